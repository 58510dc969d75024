"""What a rank sends over each axis of its strategy in a step: the planner's own sums, read in bytes. No torch.

The times of `timing` are sums of what `links` says a collective takes. Here links answer with the bytes that a rank
sends for it, and nothing hides behind anything, so that the same sums give the bytes of a step: one count for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from meshwright.comm.compression import NONE
from meshwright.planning.blocks import Work
from meshwright.planning.group_times import is_uneven, on_group
from meshwright.planning.links import Group, Links
from meshwright.planning.operations import Operations
from meshwright.planning.scenario import Scenario
from meshwright.planning.software import Constants
from meshwright.planning.timing import Timer
from meshwright.schedules import stages_per_rank

RING, EXCHANGE, CHAIN = "ring", "exchange", "chain"
HIDDEN = ("state", "replicate", "loss", "copies", "expert_state")
"""Axes whose traffic runs beside computing: sums of gradients and gathers of parameters."""


@dataclass(frozen=True)
class AxisTraffic:
    """What every rank of an axis sends in a step."""

    axis: str
    """One of the mesh, or one made of several: state, loss, ep, copies, expert_state."""
    kind: str
    """ring: to the next of its group; exchange: to each other one as much; chain: to the next and to the one before."""
    size: float
    """Bytes that a rank sends; of a chain, in each of its two directions."""

    @property
    def hides(self) -> bool:
        """Whether it runs beside computing."""
        return self.axis in HIDDEN


class _Counted(Links):
    """Links whose seconds are bytes: those that a rank sends over one axis, in one way."""

    def __init__(self, axis: str, kind: str) -> None:
        self._axis, self._kind = axis, kind

    def half(self, group: Group, size: float, kind: str = "all_gather") -> float:
        return size * (group.size - 1) / group.size if (group.axis, RING) == (self._axis, self._kind) else 0.0

    def exchange(self, group: Group, size: float, copies: float = 1.0) -> float:
        return size * (group.size - 1) / group.size if (group.axis, EXCHANGE) == (self._axis, self._kind) else 0.0

    def send(self, size: float, far: bool) -> float:
        return size if (self._axis, self._kind) == ("pp", CHAIN) else 0.0


class _Counting(Operations):
    """Operations behind which nothing can hide."""

    def __init__(self, scenario: Scenario, constants: Constants, links: Links) -> None:
        super().__init__(scenario, constants)
        self.links = links
        self.software = replace(
            self.software, overlap=0.0, contention=0.0, tp_exposed=1.0, ep_exposed=1.0, pipeline=1.0
        )

    def attend(self, work: Work, own: float) -> tuple[float, float]:
        return 0.0, 0.0

    def compress(self, gradients: float, kind: str) -> float:
        return 0.0


def axis_traffic(scenario: Scenario, constants: Constants) -> list[AxisTraffic]:
    """What is sent over each axis, by the pipeline rank that sends most; the axes with the tightest groups first."""
    return list(_each(_plain(scenario), constants, max))


def least_traffic(scenario: Scenario, constants: Constants) -> list[AxisTraffic]:
    """What is sent over each axis by the mean of all pipeline ranks: no split of the layers makes the most of them
    send less."""
    return list(_each(_plain(scenario), constants, fmean))


def _plain(scenario: Scenario) -> Scenario:
    """The scenario as far as traffic depends on it."""
    if is_uneven(scenario):
        # Of the ranks with the largest share, on whose chip does not matter.
        scenario = on_group(scenario, 0, max(scenario.layout.data_shares))
    return replace(scenario, layout=replace(scenario.layout, offload="none"))


def _each(
    scenario: Scenario, constants: Constants, of_ranks: Callable[[Sequence[float]], float]
) -> Iterator[AxisTraffic]:
    ways = (
        ("tp", RING), ("ep", EXCHANGE), ("cp", RING), ("cp", EXCHANGE), ("state", RING), ("loss", RING),
        ("loss", EXCHANGE), ("expert_state", RING), ("copies", RING), ("replicate", RING), ("pp", CHAIN),
    )  # fmt: skip
    for axis, kind in ways:
        if _is_idle(scenario, axis, kind):
            continue
        timer = Timer(scenario, constants, _Counting(scenario, constants, _Counted(axis, kind)))
        size = _bytes(scenario, timer, of_ranks)
        if size > 0:
            yield AxisTraffic(axis, kind, size)


def _is_idle(scenario: Scenario, axis: str, kind: str) -> bool:
    """Whether it is known without a sum that nothing goes over an axis in that way."""
    layout = scenario.layout
    match axis:
        case "tp" | "cp" | "ep" | "pp" | "replicate":
            return getattr(layout, axis) == 1
        case "expert_state" | "copies":
            return scenario.spec.experts is None
        case _:
            # Only compressed gradients are exchanged.
            return layout.dp * layout.cp == 1 or (kind == EXCHANGE and layout.compress == NONE)


def _bytes(scenario: Scenario, timer: Timer, of_ranks: Callable[[Sequence[float]], float]) -> float:
    """What pipeline ranks send in a step."""
    layout, micro_steps = scenario.layout, max(1, round(scenario.micro_steps))
    each = [0.0] * layout.pp
    for stage, passes in zip(scenario.stages, timer.passes(), strict=True):
        each[stage.rank] += micro_steps * (passes.tp + passes.ep + passes.cp + passes.gathered)
    sent = [size + timer.states.reduction(rank, 0.0, 0.0) for rank, size in enumerate(each)]
    return of_ranks(sent) + micro_steps * stages_per_rank(layout.schedule) * max(timer.transfers(), default=0.0)
