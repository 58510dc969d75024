"""Lines that are written behind a training's back: whole, in order, and no reason for it to end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from meshwright.lock import LockedError
from meshwright.observe.line_writer import MOST_LINES, LineWriter, append


def allowed() -> None:
    """Anybody may write."""


def test_lines_arrive_in_order_and_the_folder_is_made_for_them(tmp_path: Path) -> None:
    writer = LineWriter(allowed)
    assert not (tmp_path / "ranks").exists()
    for number in range(100):
        writer.put(tmp_path / "ranks" / ("a" if number % 2 else "b"), b"%d" % number)
    writer.close()
    assert (tmp_path / "ranks/a").read_text().split() == [str(number) for number in range(1, 100, 2)]
    assert (tmp_path / "ranks/b").read_text().split() == [str(number) for number in range(0, 100, 2)]


def test_a_line_that_a_crash_cut_short_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "ranks" / "a"
    append(path, b"whole\nhal")
    append(path, b"new\n")
    assert path.read_bytes() == b"whole\nhal\nnew\n"


@pytest.mark.alone
def test_a_full_disk_is_told_once_and_costs_the_caller_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    writer = LineWriter(allowed)
    for _ in range(3):
        began = time.perf_counter()
        writer.put(Path("/dev/full"), b"x")
        assert time.perf_counter() - began < 0.2
        time.sleep(0.6)
    writer.close()
    said = capfd.readouterr().err
    assert said.count("/dev/full cannot be written: No space left on device") == 1
    assert "the run goes on" in said


def test_a_run_folder_that_is_not_there_is_not_made(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writer = LineWriter(allowed)
    writer.put(tmp_path / "run" / "ranks" / "a", b"x")
    writer.close()
    assert not (tmp_path / "run").exists()
    assert "cannot be written" in capfd.readouterr().err


def test_ranks_that_were_replaced_write_nothing_more(tmp_path: Path) -> None:
    def replaced() -> None:
        raise LockedError("others train here now")

    writer = LineWriter(replaced)
    writer.put(tmp_path / "ranks" / "a", b"x")
    writer.close()
    assert not (tmp_path / "ranks").exists()


def test_a_disk_that_hangs_does_not_fill_the_memory(tmp_path: Path) -> None:
    writer = LineWriter(lambda: time.sleep(0.3))
    for number in range(MOST_LINES + 5000):
        writer.put(tmp_path / "ranks" / "a", b"%d" % number)
    assert len(writer._lines) <= MOST_LINES
    writer.close()
    assert (tmp_path / "ranks/a").read_text().split()[-1] == str(MOST_LINES + 4999)
