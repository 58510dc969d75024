"""A training of n forked ranks with a watchdog beside them and nobody who acts on it; for tests of the watchdog alone.

    python -m tests.chaos.watched NPROC FIRST FACTOR FLOOR setting=value ...

Prints `ready PID...`, then each line of the watchdog as it comes, then `exit CODE...`. After a hang it kills the ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from meshwright.config import RunConfig, resolve_config
from meshwright.elastic.mismatch import explain_abort
from meshwright.elastic.rank_side import answer_watchers, leave_last_words
from meshwright.elastic.watch_settings import WatchSettings, watchdog_command
from meshwright.parallel.torch_releases import FileStore
from meshwright.parallel.world import join_world
from meshwright.pulse import Pulse
from meshwright.trainer import Trainer


def rank_main(config: RunConfig, rank: int, size: int, folder: Path) -> None:
    """One rank: what the supervisor's ranks do, without its care."""
    pulse = Pulse(rank, folder / f"{rank}.pulse")
    pulse.enter("start")
    answer_watchers(folder, rank)
    store = FileStore(str(folder / "store"), size) if size > 1 else None
    with join_world("cpu", config.elastic.timeout_s, (rank, size, rank), store, pulse) as world:
        try:
            Trainer(config, world).train()
        except BaseException:
            leave_last_words(folder, rank)
            raise
    os._exit(0)


def main() -> None:
    size, (first, factor, floor) = int(sys.argv[1]), map(float, sys.argv[2:5])
    config = resolve_config(overrides=sys.argv[5:]).config
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context: Any = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = [context.Process(target=rank_main, args=(config, rank, size, folder)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        said = {"generation": 0, "host": "here", "run_dir": str(Path(config.run.dir).absolute())}
        said["ranks"] = {str(number): rank.pid for number, rank in enumerate(ranks)}
        (folder / "ranks.json").write_text(json.dumps(said))
        command = [*watchdog_command(WatchSettings(first, factor, floor)), str(folder)]
        watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        print("ready", *[rank.pid for rank in ranks], watchdog.pid, flush=True)

        def relay() -> None:
            assert watchdog.stdout is not None
            for line in watchdog.stdout:
                print(line, end="", flush=True)
                if json.loads(line)["kind"] == "hang":
                    for rank in ranks:
                        rank.kill()

        thread = threading.Thread(target=relay)
        thread.start()
        for rank in ranks:
            rank.join()
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        watchdog.wait(10)
        thread.join()
        ended_by = {n: signal.Signals(-rank.exitcode) for n, rank in enumerate(ranks) if rank.exitcode < 0}
        if explained := explain_abort(folder, ended_by):
            print("abort", explained)
        print("exit", *[rank.exitcode for rank in ranks], flush=True)


if __name__ == "__main__":
    main()
