"""Figures as characters: where a step's time went as a bar, a curve in one line, a share on a scale. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from rich.text import Text

LETTERS = {
    "data": "d",
    "forward": "f",
    "backward": "b",
    "reduce": "r",
    "communication": "c",
    "bubble": "p",
    "optimizer": "o",
    "evaluate": "e",
    "checkpoint": "s",
    "hooks": "h",
    "unattributed": ".",
}
"""What each part of a step is drawn with, in the order of a step: letters, so that a bar needs no colours."""

STYLES = {
    "data": "black on yellow",
    "forward": "black on green",
    "backward": "black on cyan",
    "reduce": "white on red",
    "communication": "white on red",
    "bubble": "white on magenta",
    "optimizer": "white on blue",
}
WORDS = {"communication": "exposed", "checkpoint": "saving"}
"""What parts are called where their own name is long or says less."""
BLOCKS = "▁▂▃▄▅▆▇█"


def cells(parts: Mapping[str, float], width: int) -> dict[str, int]:
    """How many characters of a bar each part gets: as many as there are, and no part more than one off its share."""
    held = {name: max(0.0, parts.get(name, 0.0)) for name in LETTERS}
    held["unattributed"] += sum(max(0.0, seconds) for name, seconds in parts.items() if name not in LETTERS)
    whole = sum(held.values())
    # Files may hold anything, also what adds up to more than there are numbers for.
    if not 0 < whole < inf:
        return {}
    found, reached, drawn = {}, 0.0, 0
    for name, seconds in held.items():
        reached += seconds
        end = round(reached / whole * width)
        if end > drawn:
            found[name] = end - drawn
        drawn = end
    return found


def bar(parts: Mapping[str, float], width: int) -> Text:
    """The parts of a step as a bar."""
    text = Text()
    for name, count in cells(parts, width).items():
        text.append(LETTERS[name] * count, STYLES.get(name, "dim"))
    return text


def legend(names: Sequence[str]) -> Text:
    """What the letters of bars mean."""
    text = Text()
    for name in LETTERS:
        if name in names and name != "unattributed":
            text.append(LETTERS[name], STYLES.get(name, "dim"))
            text.append(f" {WORDS.get(name, name)} ", "dim")
    return text


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve in one line of at most that many characters; each stands for the mean of its share of the values."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    borders = [place * len(values) // count for place in range(count + 1)]
    means = [sum(values[one:other]) / (other - one) for one, other in zip(borders, borders[1:], strict=False)]
    low, high = min(means), max(means)
    span = high - low
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((value - low) / span * top) if span > 0 else 0] for value in means)


def scale(share: float, width: int, mark: float) -> str:
    """A share on a scale from 0 to 1 with a mark that it should reach."""
    full, border = round(min(1.0, max(0.0, share)) * width), round(mark * width)
    return "".join("┃" if place == border else "█" if place < full else "░" for place in range(width))
