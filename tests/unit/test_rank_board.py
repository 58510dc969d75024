"""Numbers that ranks of a machine leave for the one that serves metrics: of those that live; nothing stays behind."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.observe.rank_board import Board, board_folder, leave, read_boards
from meshwright.pulse import Pulse


def told(folder: Path, rank: int, **memory: int) -> Board:
    """The board of a rank that has computed a little."""
    pulse = Pulse(rank)
    board = Board(folder, pulse)
    assert rank not in read_boards(folder, pulse.generation), "before its first step"
    pulse.enter("forward")
    pulse.enter("hooks")
    board.put(memory)
    return board


def test_what_ranks_leave_is_found_by_rank_and_goes_with_them(tmp_path: Path) -> None:
    folder = board_folder("a-run", tmp_path)
    boards = [told(folder, 3, rss=3000), told(folder, 12, rss=2**40, allocated=5, reserved=6, peak=7, held=8)]
    found = read_boards(folder, 0)
    assert {rank: one.memory for rank, one in found.items()} == {
        3: {"rss": 3000},
        12: {"rss": 2**40, "allocated": 5, "reserved": 6, "peak": 7},
    }
    assert all({"forward", "hooks"} >= set(one.phases) and one.phases["forward"] > 0 for one in found.values())
    # Ranks that were started together with others are none of these.
    assert read_boards(folder, 1) == {}
    # One that took a rank's place keeps its own when the former ends.
    boards.append(told(folder, 3, rss=4000))
    boards[0].close()
    assert read_boards(folder, 0)[3].memory == {"rss": 4000}
    for board in boards[1:]:
        board.close()
    assert not folder.exists()


def test_a_rank_that_was_killed_is_left_out(tmp_path: Path) -> None:
    folder = board_folder("a-run", tmp_path)
    killed(KILLED, folder)
    assert [path.name for path in folder.iterdir()] == ["1"]
    assert read_boards(folder, 0) == {}
    # The next one of its number takes the place.
    told(folder, 1, rss=2).close()
    assert not folder.exists()


KILLED = (
    "import os, signal, sys; from pathlib import Path; from tests.unit.test_rank_board import told;"
    "told(Path(sys.argv[1]), 1, rss=1); os.kill(os.getpid(), signal.SIGKILL)"
)
WRITING = """
import sys, time
from pathlib import Path
from meshwright.observe.rank_board import Board
from meshwright.pulse import Pulse
pulse = Pulse(1)
board = Board(Path(sys.argv[1]), pulse)
pulse.enter("forward")
time.sleep(0.01)
pulse.enter("hooks")
print("begins", flush=True)
while True:
    board.put({"rss": 2**31 + 1})
"""


def killed(script: str, folder: Path) -> None:
    """Run that script, which ends itself."""
    ended = subprocess.run([sys.executable, "-c", script, str(folder)], cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == -9


def test_numbers_that_are_written_while_somebody_looks_are_whole(tmp_path: Path) -> None:
    folder = board_folder("a-run", tmp_path)
    writer = subprocess.Popen([sys.executable, "-c", WRITING, str(folder)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.1)
        found = [read_boards(folder, 0).get(1) for _ in range(5000)]
    finally:
        writer.kill()
        writer.communicate()
    assert {one and one.memory.get("rss") for one in found} == {2**31 + 1}
    assert len({one and one.phases.get("forward") for one in found}) == 1
    leave(folder)
    assert not folder.exists()


def test_what_was_left_by_killed_ranks_goes_when_another_run_begins_or_the_server_ends(tmp_path: Path) -> None:
    folder = board_folder("a-run", tmp_path)
    killed(KILLED, folder)
    assert [path.name for path in folder.iterdir()] == ["1"]
    living = told(folder, 2, rss=2)
    board_folder("another", tmp_path).rmdir()
    assert [path.name for path in folder.iterdir()] == ["2"], "one that lives stays"
    living.close()
    assert not folder.exists()
    killed(KILLED, board_folder("a-run", tmp_path))
    leave(folder)
    assert not folder.exists()


def test_a_later_process_of_the_same_number_is_not_the_one_that_has_told(tmp_path: Path) -> None:
    folder = board_folder("a-run", tmp_path)
    board = told(folder, 1, rss=1)
    content = (folder / "1").read_bytes()
    pid, started, generation = struct.unpack_from("<qqq", content)
    assert pid == os.getpid()
    (folder / "4").write_bytes(struct.pack("<qqq", pid, started - 1, generation) + content[24:])
    assert list(read_boards(folder, 0)) == [1]
    board.close()
    assert not folder.exists()


def test_a_board_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    folder = board_folder("a-run", tmp_path)
    monkeypatch.setattr("mmap.mmap", full)
    with pytest.raises(OSError, match="No space left"):
        Board(folder, Pulse(1))
    folder.rmdir()


def test_a_folder_that_others_can_enter_is_not_used(tmp_path: Path) -> None:
    folder = board_folder("a-run", tmp_path)
    os.chmod(folder, 0o777)
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        board_folder("a-run", tmp_path)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        board_folder("a-run", tmp_path)
    folder.unlink()
    # A copy of a run folder has the same id and another place.
    other = board_folder("a-run", tmp_path / "copy")
    other.rmdir()
    assert other != folder
