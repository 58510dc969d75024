"""A rank's own log has all that it said, also when it and all around it are asked to end, or it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, signal, sys
from meshwright.elastic.rank_log import RankLog
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
log = RankLog(3)
print("began", flush=True)
while not asked:
    signal.pause()
print("asked to end, and saved", flush=True)
os.write(2, b"last words\\n")
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
log.close()
os._exit(75)
"""


@pytest.mark.parametrize(("how", "code"), [("ends", 75), ("killed", -signal.SIGKILL)])
def test_it_is_whole_and_the_joined_one_too(how: str, code: int, tmp_path: Path) -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, how],
        env=os.environ | {"MESHWRIGHT_RANK_LOGS": f"{tmp_path}/7-rank"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert rank.stdout is not None
    first = rank.stdout.readline()
    # As schedulers do: to all processes that are there.
    os.killpg(rank.pid, signal.SIGTERM)
    said = first + rank.stdout.read()
    assert rank.wait() == code
    assert said == "began\nasked to end, and saved\nlast words\n"
    assert (tmp_path / "7-rank3.log").read_text() == said
