"""Reading of files that somebody else writes: only whole lines, only what is new, and never an error."""

from __future__ import annotations

import json
import math
import os
import random
import tracemalloc
from pathlib import Path

import pytest

from meshwright.observe.curves import Curves, thin
from meshwright.observe.tail import LONGEST_LINE, Tail


def test_only_new_whole_lines_are_given(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = Tail(path)
    assert tail.read().lines == []
    path.write_text('{"step": 1}\n{"step": 2')
    assert tail.read().lines == [{"step": 1}]
    assert tail.read().lines == []
    with path.open("a") as file:
        file.write('0}\n{"step": 3}\n')
    added = tail.read()
    assert added.lines == [{"step": 20}, {"step": 3}]
    assert not added.anew


def test_a_file_that_is_replaced_or_cut_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = Tail(path)
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    tail.read()
    other = tmp_path / "b"
    other.write_text('{"step": 1}\n')
    os.replace(other, path)
    added = tail.read()
    assert added.anew
    assert added.lines == [{"step": 1}]
    path.write_text("")  # The same file, emptied.
    added = tail.read()
    assert added.anew
    assert added.lines == []
    with path.open("a") as file:
        file.write('{"step": 7}\n')
    assert tail.read().lines == [{"step": 7}]


def test_a_file_written_anew_in_place_is_noticed_though_it_is_longer(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = Tail(path)
    path.write_text('{"step": 1}\n')
    tail.read()
    with path.open("r+") as file:
        file.write('{"step": 5}\n{"step": 6}\n')
    added = tail.read()
    assert added.anew
    assert added.lines == [{"step": 5}, {"step": 6}]


def test_a_file_that_goes_away_is_forgotten_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n')
    tail = Tail(path)
    tail.read()
    path.unlink()
    assert tail.read().anew
    assert not tail.read().anew


@pytest.mark.parametrize(
    "rubbish", [b"\x00\xff\xfe\n", b"[1, 2]\n", b'"text"\n', b"{" * 100_000 + b"\n", b"nul\n", b"\n"]
)
def test_lines_that_are_no_records_are_left_out(tmp_path: Path, rubbish: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + rubbish + b'{"a": 2}\n')
    assert Tail(path).read().lines == [{"a": 1}, {"a": 2}]


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.truncate(6 * LONGEST_LINE)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"a": 2}\n')
    tracemalloc.start()
    try:
        assert Tail(path).read().lines == [{"a": 2}]
        assert tracemalloc.get_traced_memory()[1] < 4 * LONGEST_LINE
    finally:
        tracemalloc.stop()


def test_what_comes_in_pieces_is_what_comes_at_once(tmp_path: Path) -> None:
    draw = random.Random(1)
    lines = [{"step": step, "text": "x" * draw.randrange(200)} for step in range(300)]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path = tmp_path / "a.jsonl"
    tail, found, place = Tail(path), [], 0
    while place < len(data):
        size = draw.randrange(1, 3000)
        with path.open("ab") as file:
            file.write(data[place : place + size])
        place += size
        found += tail.read().lines
    assert found == lines


def test_the_last_record_of_a_step_counts() -> None:
    curves = Curves()
    for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5)):
        curves.add({"step": step, "loss": loss})
    assert curves.points("loss") == [(1, 5.0), (2, 4.5), (3, 3.0)]
    assert curves.last_step() == 2, "the run is back at step 2"
    curves.add({"step": 2, "eval_loss": 7.0})
    curves.add({"step": 2, "loss": 4.0})
    assert curves.points("eval_loss") == []
    assert curves.points("loss")[1] == (2, 4.0)


def test_values_that_are_no_numbers_leave_gaps() -> None:
    curves = Curves()
    for step, loss in enumerate((1.0, math.nan, math.inf, "low", None, True, 10**400, 2.0)):
        curves.add({"step": step, "loss": loss})
    curves.add({"step": "nine", "loss": 1.0})
    curves.add({"step": 1e300, "loss": 1.0})
    assert curves.points("loss") == [(0, 1.0), (7, 2.0)]


def test_thinned_curves_keep_peaks_and_ends_and_are_small() -> None:
    draw = random.Random(0)
    points = [(step, draw.random()) for step in range(100_003)]
    points[54_321] = (54_321, 99.0)
    points[12_345] = (12_345, -99.0)
    few = thin(points, 2000)
    assert len(few) <= 2000
    assert {(54_321, 99.0), (12_345, -99.0)} <= set(few)
    assert few[-1] == points[-1]
    assert few == sorted(few)
    assert set(few) <= set(points)
    assert thin(points[:2000], 2000) == points[:2000]


def test_a_thinned_curve_that_grows_keeps_its_beginning() -> None:
    points = [(step, math.sin(step)) for step in range(5000)]
    before, after = thin(points[:4700], 2000), thin(points, 2000)
    same = sum(1 for old, new in zip(before, after, strict=False) if old == new)
    assert same > len(before) - 4
