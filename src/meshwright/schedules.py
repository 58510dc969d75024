"""Pipeline schedules as data: which rank computes what, in which order, and how long that takes. No torch.

A pipeline has stages; a rank holds one or several. Each micro-batch goes forward through the stages and back again. The
backward pass of a stage is one action, or two: the gradient of its input, for which the stage before waits, and that of
its weights, which can fill gaps.

    gpipe           all forward, then all backward
    1f1b            one forward, one backward in turn; at most as many micro-batches in flight as stages follow
    interleaved:V   1f1b with V stages a rank, dealt out round by round: shorter gaps, more traffic
    zero-bubble     1f1b with split backward passes: weight gradients fill the gaps, no more activations are held
    zbv             split backward passes on two stages a rank, there and back: a rank has a first and a last stage

The runtime executes a `Program`, planners simulate it, dashboards draw it: one truth for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; backward to the input; backward to the weights."""


class Action(NamedTuple):
    """What a rank computes at once."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


class Transfer(NamedTuple):
    """What travels between two ranks: the output of an action, to the stage after (forward) or before (backward)."""

    kind: Literal["forward", "backward"]
    stage: int
    """Whose output it is."""
    micro: int
    source: int
    target: int


@dataclass(frozen=True)
class Program:
    """A schedule for a number of ranks and micro-batches."""

    name: str
    ranks: int
    micro_batches: int
    placement: tuple[int, ...]
    """The rank of each stage."""
    order: tuple[tuple[Action, ...], ...]
    """What each rank computes, in order."""

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    def with_transfers(self, rank: int) -> list[Action | Transfer]:
        """What a rank computes and what it sends and receives meanwhile, in order.

        All ranks order transfers alike, by when they could begin if all passes took equally long: so each rank may
        begin its own one after the other, and none waits for one that comes later.
        """
        events: list[tuple[float, bool, Action | Transfer]] = []
        for source, spans in enumerate(simulate(self, lambda _: 1.0).spans):
            for action, _, end in spans:
                if source == rank:
                    events.append((end, False, action))
                moved = self._transfer_after(action)
                if moved is not None and rank in (moved.source, moved.target):
                    events.append((end, True, moved))
        return [event for *_, event in sorted(events, key=lambda one: (one[0], one[1], one[2].stage, one[2].micro))]

    def _transfer_after(self, action: Action) -> Transfer | None:
        """What goes to another rank when an action is done."""
        following = action.stage + 1 if action.kind == "F" else action.stage - 1
        if action.kind == "W" or following not in range(self.stages):
            return None
        source, target = self.placement[action.stage], self.placement[following]
        direction: Literal["forward", "backward"] = "forward" if action.kind == "F" else "backward"
        return Transfer(direction, action.stage, action.micro, source, target) if source != target else None

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, the first one first."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]


def stages_per_rank(schedule: str) -> int:
    """How many stages each rank holds."""
    name, _, count = schedule.partition(":")
    return {"interleaved": int(count or 1), "zbv": 2}.get(name, 1)


def splits_backward(schedule: str) -> bool:
    """Whether backward passes come in two parts."""
    return schedule in ("zero-bubble", "zbv")


def placement_of(schedule: str, ranks: int) -> tuple[int, ...]:
    """The rank of each stage: dealt out round by round, or there and back."""
    if schedule == "zbv":
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(range(ranks)) * stages_per_rank(schedule)


def make_program(schedule: str, ranks: int, micro_batches: int) -> Program:
    """The program of a schedule."""
    placement = placement_of(schedule, ranks)
    if schedule == "zbv":
        order = _fill_gaps(placement, ranks, micro_batches)
    else:
        order = [_one_rank(schedule, rank, ranks, micro_batches) for rank in range(ranks)]
    return Program(schedule, ranks, micro_batches, placement, tuple(tuple(actions) for actions in order))


def forward_program(schedule: str, ranks: int, micro_batches: int) -> Program:
    """Forward passes alone: all micro-batches through a rank's first stage, then through its next one."""
    placement = placement_of(schedule, ranks)
    order = tuple(
        tuple(
            Action("F", stage, micro)
            for stage, holder in enumerate(placement)
            if holder == rank
            for micro in range(micro_batches)
        )
        for rank in range(ranks)
    )
    return Program(schedule, ranks, micro_batches, placement, order)


def _one_rank(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """Some forward passes ahead, then one forward and one backward in turn."""
    chunks = stages_per_rank(schedule)
    waves = _waves(micro_batches, ranks) if chunks > 1 else [range(micro_batches)]
    stages = range(rank, chunks * ranks, ranks)
    forward = [Action("F", stage, micro) for wave in waves for stage in stages for micro in wave]
    backward = [Action("B", stage, micro) for wave in waves for stage in reversed(stages) for micro in wave]
    behind = ranks - 1 - rank
    if schedule == "gpipe":
        ahead = len(forward)
    else:
        ahead = behind if chunks == 1 else 2 * behind + (chunks - 1) * max(map(len, waves))
    actions = forward[:ahead]
    for step, (_, stage, micro) in enumerate(backward):
        actions += forward[ahead + step : ahead + step + 1]
        if schedule != "zero-bubble":
            actions.append(backward[step])
            continue
        # Weights wait as long as the rank would otherwise wait at the end for those before it.
        actions.append(Action("I", stage, micro))
        if step >= rank:
            actions.append(Action("W", stage, micro - rank))
    if schedule == "zero-bubble":
        actions += [Action("W", rank, micro) for micro in range(max(0, micro_batches - rank), micro_batches)]
    return actions


def _waves(micro_batches: int, ranks: int) -> list[range]:
    """Micro-batches in groups that go through one stage of a rank and then the next; each of at least `ranks`."""
    count = max(1, micro_batches // ranks)
    bounds = [index * micro_batches // count for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _fill_gaps(placement: Sequence[int], ranks: int, micro_batches: int) -> list[list[Action]]:
    """What each rank does first if forward, input and weight passes take equally long and weights fill the gaps.

    Each rank prefers the input gradient for which others wait, then a forward pass, then weights, of its deeper stage
    first; it holds at most as many activations as the first rank does under 1f1b.
    """
    last, most = len(placement) - 1, len(placement)
    order: list[list[Action]] = [[] for _ in range(ranks)]
    ready: list[list[Action]] = [[] for _ in range(ranks)]
    ready[placement[0]] = [Action("F", 0, micro) for micro in range(micro_batches)]
    held = [0] * ranks
    while any(ready):
        done = []
        for rank in range(ranks):
            can = [action for action in ready[rank] if action.kind != "F" or held[rank] < most]
            if can:
                done.append(min(can, key=lambda action: ("IFW".index(action.kind), -action.stage, action.micro)))
        for action in done:
            rank = placement[action.stage]
            order[rank].append(action)
            ready[rank].remove(action)
            held[rank] += {"F": 1, "W": -1}.get(action.kind, 0)
            for following in _enabled_by(action, last):
                ready[placement[following.stage]].append(following)
    return order


def _enabled_by(action: Action, last: int) -> list[Action]:
    """What can be done when an action of a split schedule is done."""
    kind, stage, micro = action
    if kind == "F":
        return [Action("F", stage + 1, micro) if stage < last else Action("I", last, micro)]
    if kind == "I":
        return [Action("W", stage, micro)] + ([Action("I", stage - 1, micro)] if stage else [])
    return []


@dataclass(frozen=True)
class Timeline:
    """When each action of a program runs, in seconds or in whatever unit costs are."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]
    """For each rank its actions with start and end."""

    @property
    def length(self) -> float:
        """From the first start to the last end."""
        starts = [start for spans in self.spans for _, start, _ in spans]
        ends = [end for spans in self.spans for _, _, end in spans]
        return max(ends, default=0.0) - min(starts, default=0.0)

    def idle_share(self, rank: int) -> float:
        """The share of the time in which a rank computes nothing."""
        busy = sum(end - start for _, start, end in self.spans[rank])
        return 1 - busy / self.length if self.length else 0.0


def dependencies(action: Action, last_stage: int, split: bool) -> Iterator[Action]:
    """What must be done before an action."""
    backward: Kind = "I" if split else "B"
    match action.kind:
        case "F":
            if action.stage:
                yield Action("F", action.stage - 1, action.micro)
        case "W":
            yield Action("I", action.stage, action.micro)
        case _:
            yield Action("F", action.stage, action.micro)
            if action.stage < last_stage:
                yield Action(backward, action.stage + 1, action.micro)


def in_order(program: Program) -> Iterator[tuple[int, Action, list[Action]]]:
    """All actions, none before what it waits for: the rank, the action, and what that is."""
    split = splits_backward(program.name)
    done: set[Action] = set()
    position = [0] * program.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(program.order):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needed = list(dependencies(action, program.stages - 1, split))
                if any(one not in done for one in needed):
                    break
                yield rank, action, needed
                done.add(action)
                position[rank] += 1
                moved = True
    if any(position[rank] < len(program.order[rank]) for rank in range(program.ranks)):
        raise AssertionError(f"{program.name} with {program.micro_batches} micro-batches waits for itself")


def border_of(one: int, other: int, ranks: int) -> int:
    """Which border is between two ranks that are neighbours: that after a rank; -1 between a rank and itself."""
    if one == other:
        return -1
    return one if (one + 1) % ranks == other else other


def simulate(program: Program, cost: Callable[[Action], float], transfers: Sequence[float] = ()) -> Timeline:
    """When everything happens if each action takes its cost, and what goes over the border after a rank so much more.

    The last rank's border is that with the first. Without `transfers` nothing takes time on its way.
    """
    moves = [*(transfers or [0.0] * program.ranks), 0.0]
    ends: dict[Action, float] = {}
    clocks = [0.0] * program.ranks
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in range(program.ranks)]
    for rank, action, needed in in_order(program):
        arrivals = [ends[one] + moves[border_of(program.placement[one.stage], rank, program.ranks)] for one in needed]
        start = max([clocks[rank], *arrivals])
        clocks[rank] = ends[action] = start + cost(action)
        spans[rank].append((action, start, clocks[rank]))
    return Timeline(tuple(tuple(one) for one in spans))
