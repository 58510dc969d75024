"""What a rank spent on itself, from the lines that it records of its steps. Without torch.

A phase's own time is known where nothing in it waits for other ranks: in data always, in the forward pass of plain
copies, in an update that each rank makes for itself. Elsewhere profiled steps tell it, whose parts are without exposed
communication and bubble. Saves are too rare for that and are taken as they are: where ranks wait for each other in one,
all take as long, and nobody is called slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.observe.stragglers import PHASES
from meshwright.profile_steps import is_usual
from meshwright.strategy import Strategy


def alone_in(strategy: Strategy, *, experts: bool = False, counts_targets: bool = False) -> frozenset[str]:
    """The phases in which a rank never waits for another.

    `counts_targets` is whether ranks count together which targets of a batch are valid.
    """
    phases = {"data"}
    # Matrices that are split, sharded weights and stages exchange something in every pass.
    whole = strategy.pp == strategy.tp == strategy.cp == strategy.ep == 1
    if whole and strategy.zero < 2 and not experts and not counts_targets:
        phases.add("forward")
    # Updated rows are gathered with zero=1; what experts and stages tell each other of a step comes with the update.
    if strategy.pp == 1 and strategy.zero != 1 and not experts:
        phases.add("optimizer")
    return frozenset(phases)


def own_seconds(lines: Sequence[Mapping[str, Any]], alone: Iterable[str]) -> dict[str, float]:
    """A step's own seconds by phase, over the steps of a window; phases of which they are not known are left out."""
    alone = set(alone)
    profiled = [line for line in lines if line.get("profiled")]
    found: dict[str, float] = {}
    for phase in PHASES:
        if phase == "checkpoint":
            saves = sum(line["parts"].get(phase, 0.0) for line in lines)
            # A window without a save says nothing of saves.
            found |= {phase: saves / len(lines)} if saves else {}
            continue
        # A profiler slows down what it watches, and not all ranks alike.
        chosen = list(filter(is_usual, lines)) if phase in alone else profiled
        if chosen:
            found[phase] = _usual([line["parts"].get(phase, 0.0) for line in chosen])
    return found


def _usual(values: Sequence[float]) -> float:
    """The mean without the largest one: a single hiccup makes nobody slow, what comes again does."""
    kept = sorted(values)[:-1] if len(values) > 2 else values
    return sum(kept) / len(kept)
