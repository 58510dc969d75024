"""A rank's output in a file of its own, and where the output of all goes as well. No torch.

`MESHWRIGHT_RANK_LOGS=folder/job-rank` has rank 3 write to folder/job-rank3.log, too. A process beside the rank does
it, so that the last words of one that is killed are there as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

RANK_LOGS = "MESHWRIGHT_RANK_LOGS"
"""Variable by which launchers tell ranks where their own files go."""
LAST_WORDS_S = 2.0
# Who is asked to end has something to say still.
_TEE = 'trap "" HUP INT TERM USR1 USR2; exec tee -a -- "$0"'


class RankLog:
    """The file of this process, a rank, if one was asked for."""

    def __init__(self, rank: int) -> None:
        self._tee: subprocess.Popen[bytes] | None = None
        if prefix := os.environ.get(RANK_LOGS):
            sys.stdout.flush()
            sys.stderr.flush()
            self._tee = subprocess.Popen(["sh", "-c", _TEE, f"{prefix}{rank}.log"], stdin=subprocess.PIPE)
            assert self._tee.stdin is not None
            for stream in (1, 2):
                os.dup2(self._tee.stdin.fileno(), stream)
            self._tee.stdin.close()

    def close(self) -> None:
        """Wait until all of it is written; nothing can be said after this."""
        if self._tee is None:
            return
        with open(os.devnull, "wb") as nothing:
            for stream in (1, 2):
                os.dup2(nothing.fileno(), stream)
        with suppress(subprocess.TimeoutExpired):  # A process of the rank's own has it still.
            self._tee.wait(LAST_WORDS_S)
