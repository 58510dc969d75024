"""How long a step takes, in parts: layers, traffic between data ranks, the pipeline, the optimizer. No torch.

Single operations are in `operations`, a layer's passes in `layer_times`, what happens to the states in `state_times`,
the order of a pipeline's passes in `pipeline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import log2

from meshwright.planning import pipeline
from meshwright.planning.held_layers import Stage
from meshwright.planning.host_activations import exposed
from meshwright.planning.layer_times import LayerTimes
from meshwright.planning.links import far_borders
from meshwright.planning.measured import operations_of
from meshwright.planning.operations import Operations
from meshwright.planning.pipeline import StageTimes
from meshwright.planning.scenario import Scenario
from meshwright.planning.software import Constants, Software
from meshwright.planning.state_times import StateTimes
from meshwright.schedules import splits_backward


@dataclass(frozen=True)
class Parts:
    """Seconds of a step, by what they are spent on; they add up to it."""

    compute: float = 0.0
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    other: float = 0.0
    paths: float = 0.0
    """What is waited for named paths between machines, beyond what their network cards would take."""
    correction: float = 0.0
    """What runs on these machines took beyond the estimate."""

    @property
    def total(self) -> float:
        """The step."""
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass(frozen=True)
class Passes:
    """Seconds of one stage's passes of one micro-batch, with what is exposed of communication."""

    forward: float
    backward: float
    weights: float
    again: float
    tp: float
    ep: float
    cp: float
    gathered: float
    host: float
    """Of activations on their way to host memory and back."""


@dataclass
class Flow:
    """All stages of a step, and what the slowest pipeline rank spends its time on for one micro-batch."""

    times: StageTimes
    micro_steps: int
    work: float
    mean: float
    """Of all ranks' work."""
    slowest: int
    forward: float
    backward: float
    again: float
    tp: float
    ep: float
    cp: float
    gathered: float
    host: float = 0.0
    bound: float | None = None
    simulated: float | None = None


class Timer:
    """Times of a scenario's parts."""

    def __init__(self, scenario: Scenario, constants: Constants, operations: Operations | None = None) -> None:
        """`operations` may be those of another scenario on the same chips, in the same precision and software."""
        self.scenario, self._constants = scenario, constants
        self.operations = operations or operations_of(scenario, constants)
        self.layers = LayerTimes(scenario, self.operations)
        self.states = StateTimes(scenario, self.operations)
        self._flows: dict[tuple[object, ...], Flow] = {}

    def like(self, scenario: Scenario) -> Timer:
        """A timer of a scenario that differs in nothing that a layer's own passes depend on: they are shared."""
        other = object.__new__(Timer)
        other.scenario, other.operations, other._flows = scenario, self.operations, self._flows
        other._constants = self._constants
        if scenario.compiled != self.scenario.compiled:
            other.operations = operations_of(scenario, self._constants)
        layout, mine = scenario.layout, self.scenario.layout
        # The flows know these by their keys; the passes of layers do not.
        alike = layout.cp_method == mine.cp_method and _within(scenario) == _within(self.scenario)
        other.layers = self.layers if alike else LayerTimes(scenario, other.operations)
        other.states = self.states.like(scenario)
        return other

    def parts(self, simulate: bool = True) -> Parts:
        """The step; without simulation a lower bound of the pipeline's length stands in for it."""
        flow = self._flow()
        length = length_of(self.scenario, flow, simulate)
        reduction = self.states.reduction(flow.slowest, flow.forward, flow.backward)
        return parts_of(self.scenario, self.operations.software, flow, length, reduction, self.states.update())

    def stage_times(self) -> StageTimes:
        """Seconds of a micro-batch in each stage."""
        return self._flow().times

    def without_gaps(self) -> float:
        """Seconds of the step if no rank ever waited for another and all had the same work: below any schedule."""
        parts, flow = self.parts(simulate=False), self._flow()
        return parts.total - length_of(self.scenario, flow, simulate=False) + flow.micro_steps * flow.mean

    def floor(self) -> float:
        """A bound of the step, without what is sent once, that grows with every layer that is computed again."""
        jitter = jitter_of(self.scenario, self.operations.software)
        return self.passes_floor() + sum(self.states.update()) * (1 + jitter)

    def passes_floor(self) -> float:
        """A bound of the step from its passes alone."""
        software = self.operations.software
        length = length_of(self.scenario, self._flow(), simulate=False)
        return length * (1 + jitter_of(self.scenario, software)) + software.step_s

    def _flow(self) -> Flow:
        """What the stages take; the same for all strategies that differ in what is summed once a step only."""
        layout = self.scenario.layout
        every = layout.zero == 3 or (layout.zero == 2 and layout.pp == 1)
        sharded = (layout.zero, layout.shard, layout.host_states == "parameters") if every else ()
        key = layout.schedule, layout.layers, layout.cp_method, layout.recompute, layout.host_activations, sharded
        if key not in self._flows:
            self._flows[key] = self._make_flow()
        return self._flows[key]

    def _make_flow(self) -> Flow:
        return flow_of(self.scenario, self.passes(), self.transfers())

    def passes(self) -> list[Passes]:
        """Of every stage, in order."""
        last = self.scenario.spec.num_hidden_layers
        passes: dict[tuple[object, ...], Passes] = {}
        found: list[Passes] = []
        for stage in self.scenario.stages:
            key = (stage.kinds, stage.layers.start == 0, stage.layers.stop == last)
            if key not in passes:
                passes[key] = self._stage(stage)
            found.append(passes[key])
        return found

    def _stage(self, stage: Stage) -> Passes:
        """One stage's passes of one micro-batch."""
        forward = backward = weights = again = tp = ep = cp = tp_forward = 0.0
        for sparse, recomputed, count in stage.kinds:
            one = self.layers.layer(sparse, recomputed)
            forward += count * one.forward
            backward += count * one.backward
            weights += count * one.weights
            again += count * one.again
            tp, ep, cp = tp + count * one.tp, ep + count * one.ep, cp + count * one.cp
            tp_forward += count * (one.tp_forward + one.ep_forward + one.cp_forward)
        if stage.layers.stop == self.scenario.spec.num_hidden_layers:
            head = self.layers.head()
            forward, backward, weights = forward + head[0], backward + head[1], weights + head[2]
        shown = self.states.gathers(stage.layers, forward, backward + weights + again)
        forward += tp_forward + shown[0]
        backward += again + tp + ep + cp - tp_forward + shown[1]
        host = exposed(self.scenario, stage, forward, backward + weights)
        return Passes(
            forward=forward + host[0],
            backward=backward + host[1],
            weights=weights,
            again=again,
            tp=tp,
            ep=ep,
            cp=cp,
            gathered=shown[0] + shown[1],
            host=sum(host),
        )

    def transfers(self) -> list[float]:
        """Seconds from each pipeline rank to the next, and from the last to the first: by the links between them."""
        scenario, layout = self.scenario, self.scenario.layout
        if layout.pp == 1:
            return []
        size = scenario.tokens / (layout.tp if layout.sp else 1) * scenario.spec.hidden_size * scenario.element
        far = far_borders(scenario.cluster.domain, layout.dp * layout.cp * layout.tp, layout.pp)
        seconds = {one: self.operations.links.send(size, one) * self.operations.software.pipeline for one in set(far)}
        return [seconds[one] for one in far]


def flow_of(scenario: Scenario, found: Sequence[Passes], transfers: Sequence[float]) -> Flow:
    """The flow of stages with these passes."""
    layout = scenario.layout
    forward = [one.forward for one in found]
    weights = [one.weights for one in found]
    split = layout.pp > 1 and splits_backward(layout.schedule)
    backward = [one.backward if split else one.backward + one.weights for one in found]
    times = StageTimes(forward, backward, weights if split else [0.0] * len(found), transfers)
    work = pipeline.rank_work(layout.schedule, layout.pp, times) if layout.pp > 1 else [forward[0] + backward[0]]
    slowest = max(range(layout.pp), key=lambda rank: work[rank])
    own = [one for stage, one in zip(scenario.stages, found, strict=True) if stage.rank == slowest]
    return Flow(
        times=times,
        micro_steps=max(1, round(scenario.micro_steps)),
        work=work[slowest],
        mean=sum(work) / len(work),
        slowest=slowest,
        forward=sum(one.forward for one in own),
        backward=sum(one.backward + one.weights for one in own),
        again=sum(one.again for one in own),
        tp=sum(one.tp for one in own),
        ep=sum(one.ep for one in own),
        cp=sum(one.cp for one in own),
        gathered=sum(one.gathered for one in own),
        host=sum(one.host for one in own),
    )


def length_of(scenario: Scenario, flow: Flow, simulate: bool) -> float:
    """Seconds from the first pass to the last, or a bound below which they cannot be."""
    layout = scenario.layout
    if layout.pp == 1:
        return flow.micro_steps * flow.work
    if simulate:
        if flow.simulated is None:
            length = pipeline.length(layout.schedule, layout.pp, flow.micro_steps, flow.times)
            flow.simulated = _on_shared_cores(scenario, flow, length)
        return flow.simulated
    if flow.bound is None:
        length = pipeline.shortest(layout.schedule, layout.pp, flow.micro_steps, flow.times)
        flow.bound = _on_shared_cores(scenario, flow, length)
    return flow.bound


def _on_shared_cores(scenario: Scenario, flow: Flow, length: float) -> float:
    """A pipeline's length where ranks share cores: a rank that waits leaves its share to the others."""
    share = scenario.cluster.share
    return length if share == 1 else max(length * share, flow.micro_steps * flow.mean)


def parts_of(
    scenario: Scenario, software: Software, flow: Flow, length: float, reduction: float, update: tuple[float, float]
) -> Parts:
    """A step whose passes take so long, with what comes once a step: sums over data ranks, the optimizer."""
    optimizer, offload = update
    steady = length + reduction + optimizer + offload
    other = software.step_s + steady * jitter_of(scenario, software)
    # Ranks that share cores have those of the ones that wait: together they can be faster than the slowest alone.
    micro_steps = flow.micro_steps * min(1.0, length / (flow.micro_steps * flow.work))
    spent = flow.tp + flow.ep + flow.cp + flow.gathered + flow.again + flow.host
    return Parts(
        compute=micro_steps * (flow.work - spent),
        recompute=micro_steps * flow.again,
        tp=micro_steps * flow.tp,
        cp=micro_steps * flow.cp,
        ep=micro_steps * flow.ep,
        dp=micro_steps * flow.gathered + reduction,
        bubble=length - micro_steps * flow.work,
        optimizer=optimizer,
        offload=offload + micro_steps * flow.host,
        other=other,
    )


def _within(scenario: Scenario) -> tuple[str, bool]:
    """What is computed again within layers, and by whom; layers that are as a whole are known as such."""
    recompute = scenario.layout.recompute
    return recompute if scenario.selective else "", scenario.compiled


def jitter_of(scenario: Scenario, software: Software) -> float:
    """Share of a step that ranks wait for the slowest of them: it grows with the machines."""
    nodes = max(1.0, scenario.cluster.gpus / max(1, scenario.cluster.node))
    return software.jitter * log2(nodes) if nodes > 1 else 0.0
