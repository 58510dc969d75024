"""Turns sources into a packed corpus, on all cores, so that it can be broken off at any moment and gone on with."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.data.pack import finished_shard, make_shard, packed_size
from meshwright.data.plan import Layout, describe, difference, lay_out, plan_digest
from meshwright.data.pool import make_shards
from meshwright.data.remains import abandon, begin, earlier_plan, finish, locked, shard_bytes
from meshwright.data.shards import REMAINS, TOKENIZER, Corpus, Index, Shard, TokenizerRecord, dtype_name
from meshwright.data.sources import SourceOptions, list_files
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import DataError

Progress = Callable[[int, int, int], None]
"""Hears how many bytes of source were read, of how many, and how many tokens they gave so far."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WORTH_WORKERS = 2.0
"""Seconds of work below which starting processes costs more than they give."""


class Prepared(NamedTuple):
    """A packed corpus, and how many of its shards were made now or kept from an earlier run that was broken off."""

    corpus: Corpus
    made: int
    kept: int

    @property
    def already(self) -> bool:
        """Whether the folder was whole before."""
        return self.made == 0 and self.kept == 0


def prepare(
    sources: Sequence[str | Path],
    out: str | Path,
    tokenizer: str | Path | Tokenizer = "bytes",
    *,
    field: str = "text",
    documents: str = "file",
    glob: Sequence[str] = (),
    split: str | None = None,
    shard_tokens: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Tokenise and pack the documents of the sources into the folder `out`, or finish what was begun there."""
    for name, value in (("shard_tokens", shard_tokens), ("workers", workers)):
        if value is not None and value < 1:
            raise DataError(f"{name} = {value}; it must be at least 1, or left out")
    folder = Path(out).absolute()
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; choose a folder that is new or empty")
    options = SourceOptions(field=field, documents=documents, glob=tuple(glob), split=split)
    used = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    names = [str(source) for source in sources]
    files = list_files(names, options, leave_out=folder.resolve())
    plan = describe(names, files, options, used, shard_tokens)
    try:
        with locked(folder) as lock:
            old = earlier_plan(folder)
            same = old is not None and plan_digest(old) == plan_digest(plan)
            if old is not None and not same and not overwrite:
                raise DataError(
                    f"{folder} holds what was prepared by another plan: {difference(old, plan)}. "
                    "Choose another folder, or replace it with --overwrite"
                )
            if same and not overwrite and not (folder / REMAINS).exists():
                return Prepared(Corpus(folder), 0, 0)
            layout = lay_out(files, options, used, shard_tokens)
            work = _Work(folder, plan, layout, options, used, progress or _silent)
            return work.run(lock, workers, keep=same and not overwrite)
    except OSError as error:
        raise DataError(
            f"{error.filename or folder} cannot be written: {error.strerror}; choose another --out"
        ) from error


def _silent(read: int, total: int, tokens: int) -> None:
    pass


@dataclass(frozen=True)
class _Work:
    """One preparation in a folder that it holds alone."""

    folder: Path
    plan: Mapping[str, Any]
    layout: Layout
    options: SourceOptions
    tokenizer: Tokenizer
    progress: Progress

    def run(self, lock: int, workers: int | None, keep: bool) -> Prepared:
        kept = self._finished() if keep else {}
        missing = [number for number in range(len(self.layout.shards)) if number not in kept]
        self._check_space(missing, 0 if keep else shard_bytes(self.folder))
        try:
            begin(self.folder, self.plan, keep)
            self.tokenizer.save(self.folder / TOKENIZER)
            shards = kept | self._make(missing, lock, workers)
            finish(self.folder, self._index(shards).to_json())
        except BaseException as error:
            abandon(self.folder)
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise self._no_space(error) from error
            raise
        return Prepared(Corpus(self.folder), len(missing), len(kept))

    def _finished(self) -> dict[int, Shard]:
        digest, numbers = plan_digest(self.plan), range(len(self.layout.shards))
        found = {number: finished_shard(self.folder, number, digest, self.layout.itemsize) for number in numbers}
        return {number: shard for number, shard in found.items() if shard is not None}

    def _check_space(self, missing: Sequence[int], freed: int) -> None:
        needed, free = self.layout.packed_bytes(missing), shutil.disk_usage(self.folder).free + freed
        if needed > free:
            raise DataError(
                f"there is not enough space: about {needed:,} bytes are needed for {self.folder}, {free:,} are free "
                "there; nothing was changed. Make room or choose another --out"
            )

    def _no_space(self, error: OSError) -> DataError:
        finished, free = self._finished(), shutil.disk_usage(self.folder).free
        missing = [number for number in range(len(self.layout.shards)) if number not in finished]
        # The estimate may have fallen short: what the finished shards took tells better.
        taken = sum(packed_size(shard, self.layout.itemsize) for shard in finished.values())
        share = taken / max(self.layout.source_bytes(finished), 1)
        needed = max(int(self.layout.source_bytes(missing) * share), self.layout.packed_bytes(missing))
        if error.errno == errno.ENOSPC:
            needed = max(needed, free + 1)  # what is free was not enough
        return DataError(
            f"{error.strerror}: about {needed:,} bytes are needed for {self.folder}, {free:,} are free there. "
            f"{len(finished)} finished shards are kept: make room and run the same command again"
        )

    def _make(self, missing: Sequence[int], lock: int, workers: int | None) -> dict[int, Shard]:
        total = self.layout.source_bytes(missing)
        read, tokens = 0, 0

        def report(more_read: int, more_tokens: int) -> None:
            nonlocal read, tokens
            read, tokens = read + more_read, tokens + more_tokens
            self.progress(read, total, tokens)

        if workers is None:
            workers = 1 if total * self.layout.rate.seconds < WORTH_WORKERS else _cores()
        digest = plan_digest(self.plan)
        if min(workers, len(missing)) < 2:
            return {
                number: make_shard(
                    self.folder, number, self.layout.shards[number], self.options, self.tokenizer, digest, report
                )
                for number in missing
            }
        setup = {
            "folder": str(self.folder),
            "tokenizer": str(self.folder / TOKENIZER),
            "options": asdict(self.options),
            "plan": digest,
        }
        return make_shards({number: self.layout.shards[number] for number in missing}, setup, workers, lock, report)

    def _index(self, shards: Mapping[int, Shard]) -> Index:
        record = TokenizerRecord(
            self.tokenizer.name, self.tokenizer.vocab_size, self.tokenizer.end, self.tokenizer.digest
        )
        whole = tuple(shards[number] for number in sorted(shards) if shards[number].tokens)
        if not whole:
            raise DataError(f"the sources {', '.join(self.plan['sources'])} hold no text; give others")
        return Index(dtype_name(self.tokenizer.vocab_size), record, whole, self.plan)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
