"""Plots of measured collectives: what was measured is where it belongs, in a terminal and in a picture."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from meshwright.bench import comm_picture
from meshwright.bench.comm_rows import Row
from meshwright.bench.comm_series import Series, of_algorithms, of_rows, rate_words, size_words, time_words
from meshwright.bench.terminal_plot import show
from meshwright.errors import UserError

SIZES = [8 << (2 * power) for power in range(12)]


def rows(operation: str, latency: float, bandwidth: float, axis: str = "world") -> list[Row]:
    return [
        Row(operation, axis, 2, 1, size, size // 4, "float32", latency + size / bandwidth, 20, 0, 2, 2)
        for size in SIZES
    ]


def drawn(series: list[Series], monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8", width: int = 80) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(series, out)
    out.seek(0)
    return out.read().splitlines()


def places(lines: list[str], letter: str) -> list[tuple[int, int]]:
    """Row and column of a letter, without axes and legend."""
    return [
        (row, column)
        for row, line in enumerate(lines)
        if "│" in line
        for column, one in enumerate(line)
        if one == letter and column > line.index("│")
    ]


def test_a_terminal_shows_times_that_grow_and_a_line_through_them(monkeypatch: pytest.MonkeyPatch) -> None:
    series = of_rows([*rows("all_reduce", 1e-4, 1e9), *rows("broadcast", 1e-2, 1e8)])
    lines = drawn(series, monkeypatch)
    assert all(len(line) <= 80 for line in lines)
    bandwidth, time = (next(row for row, line in enumerate(lines) if title in line) for title in ("bus", "time of"))
    fast, slow = (places(lines[time:], letter) for letter in "AB")
    assert fast, "below the slow one, and to the right it is lower on the screen first, then higher"
    assert max(row for row, _ in fast) > max(row for row, _ in slow)
    by_column = sorted((column, row) for row, column in fast)
    assert [row for _, row in by_column] == sorted((row for _, row in by_column), reverse=True)
    rising = sorted((column, row) for row, column in places(lines[bandwidth:time], "A"))
    assert [row for _, row in rising] == sorted((row for _, row in rising), reverse=True)
    assert any("⠉" <= letter <= "⣿" for line in lines for letter in line)
    text = "\n".join(lines)
    assert "A all_reduce, 2 ranks: 100 us and 1 GB/s" in text
    assert "B broadcast, 2 ranks: 10 ms and 100 MB/s" in text
    assert "32M" in text, "the last size has its name"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_last_size_is_written_out(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    points = tuple((float(size), 1e-4) for size in (1024, 50688))
    lines = drawn([Series("ring", points, 1.0)], monkeypatch, width=width)
    below = [line.split() for line in lines if line.lstrip().startswith("bytes")]
    assert below == [["bytes", "1K", "49.5K"]] * 2
    assert all(len(line) <= width for line in lines)


def test_a_terminal_without_such_letters_gets_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(of_rows(rows("all_reduce", 1e-4, 1e9)), monkeypatch, "ascii", 60)
    assert all(len(line) <= 60 for line in lines)
    assert any("A" in line and "." in line for line in lines)


@pytest.mark.parametrize("sizes", [1, 2])
def test_few_sizes_can_be_drawn(sizes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    series = of_rows(rows("all_reduce", 1e-4, 1e9)[:sizes])
    assert any("A" in line for line in drawn(series, monkeypatch))
    comm_picture.draw(series, tmp_path / "few.png")
    assert (tmp_path / "few.png").stat().st_size > 1000


def test_algorithms_are_drawn_by_name() -> None:
    found = of_algorithms(
        [{"algorithm": name, "bytes": size, "seconds": 1e-3} for name in ("ring", "tree") for size in (8, 1 << 20)], 4
    )
    assert [one.name for one in found] == ["ring", "tree"]
    assert found[0].bus_gb_s(1 << 20, 1e-3) == pytest.approx(1.5 * (1 << 20) / 1e6)
    assert str(found[0]) == "ring: 1 ms, whatever the size"


def test_axes_are_told_apart() -> None:
    found = of_rows([*rows("all_reduce", 1e-4, 1e9, "tp"), *rows("all_reduce", 1e-4, 1e9, "dp")])
    assert [one.name for one in found] == ["all_reduce tp, 2 ranks", "all_reduce dp, 2 ranks"]


def test_a_picture_has_all_series_in_their_colours(tmp_path: Path) -> None:
    path = tmp_path / "comm.png"
    comm_picture.draw(of_rows([*rows("all_reduce", 1e-4, 1e9), *rows("broadcast", 1e-2, 1e8)]), path)
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    assert len(pixels) > 500_000
    # Blue and orange, the first two colours.
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert int((pixels == colour).all(axis=1).sum()) > 50


def test_a_missing_matplotlib_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [])
    sys.path_importer_cache.clear()
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    with pytest.raises(UserError, match=r"meshwright\[plot\]"):
        comm_picture.draw(of_rows(rows("all_reduce", 1e-4, 1e9)), tmp_path / "comm.png")


def test_units_suit_what_they_say() -> None:
    assert [size_words(one) for one in (8, 65536, 1 << 27, 3 << 30)] == ["8", "64K", "128M", "3G"]
    assert [time_words(one) for one in (2.5, 1.5e-3, 2e-6, 5e-8, 0.0)] == ["2.5 s", "1.5 ms", "2 us", "50 ns", "0 ns"]
    assert [rate_words(one) for one in (12.0, 0.0125, 3e-6, 4e-9)] == ["12 GB/s", "12.5 MB/s", "3 KB/s", "4 B/s"]
