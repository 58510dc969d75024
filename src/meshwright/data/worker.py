"""One worker process of `prepare`: takes shards to make as JSON lines on its input, answers with JSON lines.

The worker ends as soon as its input is closed, in the middle of a shard too, so that none is left when the
process that started it dies.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from meshwright.data.pack import make_shard
from meshwright.data.sources import SourceOptions, Unit
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import DataError

REPORT_SECONDS = 0.1


def main() -> None:
    """Make shards until the input is closed."""
    # What a library prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    tasks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    try:
        _work(tasks, answers)
    except BrokenPipeError:
        os._exit(1)
    except BaseException as error:
        try:
            print(json.dumps(_describe(error)), file=answers)
        finally:
            os._exit(1)


def _listen(tasks: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        tasks.put(json.loads(line))
    os._exit(0)


def _work(tasks: queue.SimpleQueue[dict[str, Any]], answers: TextIO) -> None:
    setup = tasks.get()
    tokenizer = load_tokenizer(setup["tokenizer"])
    options = SourceOptions(**{**setup["options"], "glob": tuple(setup["options"]["glob"])})
    while True:
        task = tasks.get()
        reporter = _Reporter(answers)
        units = [Unit(*unit) for unit in task["units"]]
        shard = make_shard(
            Path(setup["folder"]), task["number"], units, options, tokenizer, setup["plan"], reporter.report
        )
        reporter.flush()
        print(json.dumps({"number": task["number"], "shard": asdict(shard)}), file=answers)


class _Reporter:
    """Gathers progress, so that small batches do not become many messages."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self._read, self._tokens, self._last = 0, 0, time.monotonic()

    def report(self, read: int, tokens: int) -> None:
        self._read += read
        self._tokens += tokens
        if time.monotonic() - self._last >= REPORT_SECONDS:
            self.flush()

    def flush(self) -> None:
        print(json.dumps({"read": self._read, "tokens": self._tokens}), file=self._answers)
        self._read, self._tokens, self._last = 0, 0, time.monotonic()


def _describe(error: BaseException) -> dict[str, Any]:
    if isinstance(error, DataError):
        return {"error": "data", "text": str(error)}
    if isinstance(error, OSError) and error.errno is not None:
        return {"error": "system", "code": error.errno, "text": error.strerror, "file": str(error.filename or "")}
    return {"error": "internal", "text": "".join(traceback.format_exception(error))}


if __name__ == "__main__":
    main()
