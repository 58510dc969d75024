"""Times of operations and collectives on machines that were calibrated: read between measured points. No torch.

A GPU keeps the model of `operations` for the shape of a product (waves of tiles, length of the sum); the speed under it
is the measured one. On CPU cores, which ranks share, nothing is modelled: a core does one thing after the other, and an
exchange costs what it was seen to cost in training, and for its bytes what collectives of that size took.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright.cluster.calibration import Points, Speeds, at_group, between, seconds_of
from meshwright.planning.blocks import Product, Work
from meshwright.planning.links import Group, Links
from meshwright.planning.operations import BACKWARD_ATTENTION, Operations
from meshwright.planning.scenario import Scenario
from meshwright.planning.software import Common, Constants

CAST = 6.0, 10.0
"""Bytes read and written for each parameter that is stored wide and used narrow: the copy, and its gradient added."""


def operations_of(scenario: Scenario, constants: Constants) -> Operations:
    """The operations of a scenario: measured ones, if our own software was measured on such a chip in that dtype."""
    speeds = scenario.cluster.speeds
    if speeds is None or scenario.software.name != "meshwright" or scenario.wide not in speeds.products:
        return Operations(scenario, constants)
    return Measured(scenario, constants, speeds)


class Measured(Operations):
    """Times of operations that were measured."""

    def __init__(self, scenario: Scenario, constants: Constants, speeds: Speeds) -> None:
        super().__init__(scenario, constants)
        self.speeds = speeds
        self.memory = speeds.memory
        self.mixed = scenario.element == 2
        self._compiled = scenario.compiled
        self.software = replace(
            self.software,
            passes=speeds.passes[scenario.wide],
            step_s=speeds.step_s,
            gather_bytes=float(scenario.element),
        )
        self._forward = [(row[0], row[1]) for row in speeds.attention[scenario.wide]]
        self._backward = [(row[0], row[1]) for row in speeds.attention_backward[scenario.wide]]
        self._narrow = scenario.dtype != scenario.wide
        self._points = self._per_size(speeds.products[scenario.wide])
        if self.on_cpu:
            self.links = CrowdLinks(speeds, constants.common)

    def _per_size(self, rows: Points) -> list[tuple[float, float]]:
        """FLOPs of a product, and the FLOP/s that a shape without waste would have reached."""
        found: dict[float, list[float]] = {}
        for inputs, inner, outer, speed in rows:
            found.setdefault(2 * inputs * inner * outer, []).append(speed / self._reached(inputs, inner, outer, 1))
        return [(flops, sum(speeds) / len(speeds)) for flops, speeds in sorted(found.items())]

    def _reached(self, rows: float, inner: float, outer: float, times: float) -> float:
        return 1.0 if self.on_cpu else self.shape_share(rows, inner, outer, times)

    def product(self, one: Product) -> tuple[float, float, float]:
        if self._narrow and self.is_narrow(one):
            return super().product(one)
        shapes = (one.rows, one.inner, one.outer), (one.rows, one.outer, one.inner), (one.inner, one.rows, one.outer)
        grouped = 1.0
        if one.times > 1 and not self.on_cpu:
            grouped = self.common.grouped * one.rows / (one.rows + self.common.rows)
        flops = 2 * one.rows * one.inner * one.outer
        # Experts' products on a GPU run side by side: their size is that of all of them.
        size = flops if self.on_cpu else flops * one.times
        speed = between(self._points, size) * grouped
        first, second, third = (flops * one.times / (speed * self._reached(*shape, one.times)) for shape in shapes)
        return first, second, third

    def attend(self, work: Work, own: float) -> tuple[float, float]:
        if not self.flash_attention:
            return super().attend(work, own)
        forward = work.attention_flops / between(self._forward, own)
        return forward, BACKWARD_ATTENTION * work.attention_flops / between(self._backward, own)

    def host_times(self, sparse: bool) -> tuple[float, float]:
        forward, backward = self.speeds.experts_s if sparse else self.speeds.layer_s
        return forward, backward

    def casts(self, parameters: float) -> tuple[float, float]:
        if not self.mixed:
            return 0.0, 0.0
        # Compiled layers keep the copy, and gradients come out of their products as wide as they are stored.
        return parameters * CAST[0] / self.memory, 0.0 if self._compiled else parameters * CAST[1] / self.memory

    def micro_step(self) -> float:
        return self.speeds.micro_s if self.on_cpu else 0.0

    def update(self, parameters: float) -> float:
        return parameters * self.speeds.optimizer_s


class CrowdLinks(Links):
    """Times of collectives between ranks that share a machine's cores."""

    def __init__(self, speeds: Speeds, common: Common) -> None:
        self.speeds, self.common = speeds, common

    def _table(self, kind: str, group: Group, size: float) -> float:
        groups = self.speeds.collectives.get(kind)
        return seconds_of(groups[at_group(groups, group.size)], size) if groups else 0.0

    def _bytes(self, kind: str, group: Group, size: float) -> float:
        """What a collective of that size takes more than one of next to nothing."""
        return max(0.0, self._table(kind, group, size) - self._table(kind, group, 0.0))

    def _axis(self, axis: str, group: Group) -> float:
        of = self.speeds.axes.get(axis)
        return per_rank(of, group.size) if of else 0.0

    def half(self, group: Group, size: float, kind: str = "all_gather") -> float:
        return self._table(kind, group, size) if group.size > 1 and size > 0 else 0.0

    def all_reduce(self, group: Group, size: float) -> float:
        return self._table("all_reduce", group, size) if group.size > 1 and size > 0 else 0.0

    def unit(self, group: Group, size: float, kind: str = "all_gather") -> float:
        if group.size <= 1 or size <= 0:
            return 0.0
        return self._axis("shard", group) + self._bytes(kind, group, size)

    def tensor(self, group: Group, size: float, sp: bool, once_more: bool) -> tuple[float, float]:
        if sp:
            both = self._bytes("all_gather", group, size) + self._bytes("reduce_scatter", group, size)
            once = 4 * self._axis("sp", group) + 2 * both
        else:
            once = 2 * (self._axis("tp", group) + self._bytes("all_reduce", group, size))
        return once, once

    def ring(self, group: Group, size: float, forward: float, backward: float) -> tuple[float, float]:
        step = self._axis("ring", group)
        passed = self._bytes("send", group, size)
        ahead = group.size * step + (group.size - 1) * passed
        return ahead, 3 * group.size * step + (2 * group.size - 1) * passed

    def ulysses(self, group: Group, size: float) -> tuple[float, float]:
        once = 2 * self._axis("ulysses", group) + 2 * self._bytes("all_to_all", group, size / 2)
        return once, once

    def experts(self, group: Group, size: float, copies: float) -> tuple[float, float]:
        if group.size <= 1:
            return 0.0, 0.0
        each, bytes_ = self._axis("ep", group), 2 * self._bytes("all_to_all", group, size)
        return 3 * each + bytes_, 2 * each + bytes_

    def send(self, size: float, far: bool) -> float:
        return self._table("send", Group(2, 2), size)


def per_rank(values: Mapping[str, float], size: int) -> float:
    """Seconds for a group of that size: along straight lines between measured sizes, and from nothing to the first."""
    points = [(0.0, 0.0), *sorted((float(of), value) for of, value in values.items())]
    last = next((index for index, point in enumerate(points) if size <= point[0]), len(points) - 1)
    (left, low), (right, high) = points[last - 1], points[last]
    return max(0.0, low + (high - low) * (size - left) / (right - left))
