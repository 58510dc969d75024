"""Measured collectives as a PNG file: bus bandwidth and time by size, with the lines through them. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from meshwright.bench.comm_series import Series, rate_words, size_words, time_words
from meshwright.errors import UserError

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000")
"""Told apart by people who see colours differently; after Okabe and Ito."""
_MARKS = "osD^vP*X"
_BETWEEN = 16
"""Points of a fitted line for each that was measured."""


def require_matplotlib() -> None:
    """Refuse where it is not installed."""
    if find_spec("matplotlib") is None:
        raise UserError(
            "--plot FILE.png needs matplotlib: pip install 'meshwright[plot]'; --plot alone draws in the terminal"
        )


def draw(series: Sequence[Series], path: Path) -> None:
    """Draw into a file."""
    require_matplotlib()
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: nothing is shown, and nothing global is left behind.
    figure = Figure(figsize=(12, 5.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    _panel(left, series, "bus bandwidth", lambda one, size, seconds: one.bus_gb_s(size, seconds), rate_words)
    _panel(right, series, "time of a call", lambda one, size, seconds: seconds, time_words)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False, fontsize=9)
    figure.savefig(path, format="png")


def _panel(
    axes: Any,
    series: Sequence[Series],
    title: str,
    value: Callable[[Series, float, float], float],
    words: Callable[[float], str],
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    for number, one in enumerate(series):
        colour, mark = _COLOURS[number % len(_COLOURS)], _MARKS[number % len(_MARKS)]
        sizes = [size for size, _ in one.points]
        measured = [value(one, size, seconds) for size, seconds in one.points]
        axes.plot(sizes, measured, mark, color=colour, markersize=4.5, linestyle="none", label=str(one))
        fine = _between(min(sizes), max(sizes), _BETWEEN * len(sizes))
        fitted = [(size, one.fitted(size)) for size in fine]
        known = [(size, value(one, size, seconds)) for size, seconds in fitted if seconds is not None]
        axes.plot(*zip(*known, strict=True) if known else ((), ()), color=colour, linewidth=0.9, alpha=0.7)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(f"{title} (points), and the line through all sizes", fontsize=10, loc="left")
    axes.set_xlabel("size in bytes")
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=10))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_words(size)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda one, _: words(one)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda one, _: ""))
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _between(low: float, high: float, count: int) -> list[float]:
    """Sizes from one to another, even on a logarithmic scale."""
    return [low * (high / low) ** (step / max(1, count - 1)) for step in range(count)]
