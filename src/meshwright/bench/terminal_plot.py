"""Measured collectives drawn in a terminal: a letter for each measurement, dots for the line through them. No torch.

1 GB/s │            A A A        letters are the operations of the legend, so that a plot needs no colours;
       │        A ⠒⠉             dots are eight to a character, where the terminal can write them
1 MB/s │  A⢀⠤⠊
       └──────────────────
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from math import ceil, floor, log10
from typing import TextIO

from rich.console import Console
from rich.text import Text

from meshwright.bench.comm_series import Series, rate_words, size_words, time_words

_COLOURS = ("cyan", "yellow", "green", "magenta", "red", "blue", "bright_black", "white")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ROWS, _LEAST, _MOST = 11, 40, 120
_MARGIN = 11
"""Of the words beside the axis."""
_NAME = 5
"""Letters of the longest size, "49.5K", of which the last one's begins below the last column."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a braille character, by row and column."""


def show(series: Sequence[Series], file: TextIO) -> None:
    """Draw both plots and the legend."""
    plain = not (file.encoding or "").lower().startswith("utf")
    width = int(os.environ.get("COLUMNS", 0)) or Console(file=file).width
    width = max(_LEAST, min(_MOST, width))
    console = Console(file=file, width=width, highlight=False)
    panels: tuple[tuple[str, Callable[[Series, float, float], float], Callable[[float], str]], ...] = (
        ("bus bandwidth", lambda one, size, seconds: one.bus_gb_s(size, seconds), rate_words),
        ("time of a call", lambda one, size, seconds: seconds, time_words),
    )
    for title, value, words in panels:
        console.print()
        for line in _panel(series, title, value, words, width - _MARGIN - _NAME - 1, plain):
            console.print(line, no_wrap=True, overflow="crop")
    console.print()
    for number, one in enumerate(series):
        console.print(_legend(number, one), no_wrap=True, overflow="crop")


def _panel(
    series: Sequence[Series],
    title: str,
    value: Callable[[Series, float, float], float],
    words: Callable[[float], str],
    columns: int,
    plain: bool,
) -> list[Text]:
    sizes = [size for one in series for size, _ in one.points]
    points = [[(size, value(one, size, seconds)) for size, seconds in one.points] for one in series]
    values = [y for those in points for _, y in those]
    across = _Scale(log10(min(sizes)), log10(max(sizes)), columns)
    up = _Scale(floor(log10(min(values)) * 3) / 3, ceil(log10(max(values)) * 3) / 3, _ROWS)
    canvas = _Canvas(columns, plain)
    for number, one in enumerate(series):
        for step in range(2 * columns):
            size = across.back((step + 0.5) / 2)
            seconds = one.fitted(size) if min(one.points)[0] <= size <= max(one.points)[0] else None
            if seconds is not None:
                canvas.dot(step, up.at(value(one, size, seconds)), number)
    for number, those in enumerate(points):
        for size, y in those:
            canvas.letter(across.at(size), up.at(y), number)
    bar, corner, rule, tick = ("|", "+", "-", "+") if plain else ("│", "└", "─", "┴")
    lines = [Text(f"{'':{_MARGIN}} {title}")]
    marks = _marks(up)
    for row in range(_ROWS):
        told = words(marks[row]) if row in marks else ""
        lines.append(Text(f"{told:>{_MARGIN}} {bar}") + canvas.row(row))
    below, names = [rule] * columns, [" "] * (columns + _NAME)
    free = 0
    for size in sorted(set(sizes)):
        place, name = min(columns - 1, int(across.at(size))), size_words(size)
        if place >= free:
            below[place] = tick
            names[place : place + len(name)] = name
            free = place + len(name) + 2
    lines.append(Text(f"{'':{_MARGIN}} {corner}{''.join(below)}"))
    lines.append(Text(f"{'bytes':>{_MARGIN}}  {''.join(names).rstrip()}"))
    return lines


def _marks(up: _Scale) -> dict[int, float]:
    """The rows that get a word, with their value: every tenfold, or the ends where there are too few."""
    tens = [10.0**power for power in range(ceil(up.low), floor(up.high) + 1)]
    if len(tens) < 2:
        tens = [10**up.low, 10**up.high]
    every = ceil(len(tens) / 6)
    return {min(_ROWS - 1, _ROWS - 1 - int(min(up.at(ten), _ROWS - 1))): ten for ten in tens[::every]}


def _legend(number: int, one: Series) -> Text:
    return Text(f"{_LETTERS[number % len(_LETTERS)]:>{_MARGIN}} ", style=_colour(number)) + Text(str(one))


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


class _Scale:
    """Places of values on a logarithmic scale."""

    def __init__(self, low: float, high: float, places: int) -> None:
        """Between powers of ten."""
        self.low, self.high, self.places = low, max(high, low + 1e-9), places

    def at(self, value: float) -> float:
        """From 0 to just below the number of places."""
        share = (log10(value) - self.low) / (self.high - self.low)
        return min(max(share, 0.0), 1 - 1e-9) * self.places

    def back(self, place: float) -> float:
        """The value at a place."""
        return float(10 ** (self.low + (self.high - self.low) * place / self.places))


class _Canvas:
    """Characters with their colours; the last that is drawn in a place stays."""

    def __init__(self, columns: int, plain: bool) -> None:
        """Empty."""
        self._columns, self._plain = columns, plain
        self._dots: dict[tuple[int, int], tuple[int, int]] = {}
        self._letters: dict[tuple[int, int], int] = {}

    def dot(self, step: int, height: float, number: int) -> None:
        """At half a column, and a height in rows from below."""
        row, column = _ROWS - 1 - int(height), step // 2
        part = 3 - int((height - int(height)) * 4)
        bits, _ = self._dots.get((row, column), (0, 0))
        self._dots[row, column] = bits | _DOTS[part][step % 2], number

    def letter(self, column: float, height: float, number: int) -> None:
        """At a column, and a height in rows from below."""
        self._letters[_ROWS - 1 - int(height), int(column)] = number

    def row(self, row: int) -> Text:
        """One line of it."""
        text = Text()
        for column in range(self._columns):
            if (row, column) in self._letters:
                number = self._letters[row, column]
                text.append(_LETTERS[number % len(_LETTERS)], style=f"bold {_colour(number)}")
            elif (row, column) in self._dots:
                bits, number = self._dots[row, column]
                text.append("." if self._plain else chr(0x2800 + bits), style=_colour(number))
            else:
                text.append(" ")
        return text
