"""A profiled step as spans on a timeline: phases, the passes of a pipeline, what travelled. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.observe.collective_rows import Collective
from meshwright.schedules import Action

Span = tuple[str, str, float, float]
"""Name, category, begin and end."""

CATEGORIES = ("forward", "backward", "optimizer", "collective", "transfer", "data", "other")

MOST_SPANS = 20_000
"""Spans of a step that are kept; the longest ones."""


def spans_of(
    phases: Sequence[tuple[str, float]],
    end: float,
    passes: Iterable[tuple[Action, float, float]],
    collectives: Iterable[Collective],
) -> list[Span]:
    """The spans of a step, by their beginning; the passes of a pipeline stand for its forward and backward phases."""
    found: list[Span] = [
        (
            f"{action.kind} stage {action.stage} micro-batch {action.micro}",
            "forward" if action.kind == "F" else "backward",
            begin,
            end,
        )
        for action, begin, end in passes
    ]
    told = ("forward", "backward") if found else ()
    borders = [*[begin for _, begin in phases], end]
    for (name, begin), until in zip(phases, borders[1:], strict=True):
        if name not in told and begin < until:
            found.append((name, name if name in CATEGORIES else "other", begin, until))
    found += [(one.name, "transfer" if one.is_transfer else "collective", one.begin, one.end) for one in collectives]
    if len(found) > MOST_SPANS:
        found = sorted(found, key=lambda span: span[2] - span[3])[:MOST_SPANS]
    return sorted(found, key=lambda span: (span[2], -span[3]))
