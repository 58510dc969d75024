"""Numbers that ranks of a machine leave for the one that serves metrics: of those that live; nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.observe.rank_board import Board, board_folder, read_boards
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
    script = (
        "import os, signal, sys; from pathlib import Path; from tests.unit.test_rank_board import told;"
        "told(Path(sys.argv[1]), 1, rss=1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(folder)], cwd=Path(__file__).parents[2], check=False)
    assert ended.returncode == -9
    assert [path.name for path in folder.iterdir()] == ["1"]
    assert read_boards(folder, 0) == {}
    # The next one of its number takes the place.
    told(folder, 1, rss=2).close()
    assert not folder.exists()


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
