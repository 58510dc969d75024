"""How long a step takes, in parts: a roofline for every operation, collectives, overlap, the pipeline. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import ceil, log2

from meshwright.planning import blocks, pipeline
from meshwright.planning.blocks import Product, Work
from meshwright.planning.links import Group, Links, group_of
from meshwright.planning.pipeline import StageTimes
from meshwright.planning.scenario import Scenario
from meshwright.planning.software import Constants
from meshwright.schedules import splits_backward

TILE = 128
BACKWARD_ATTENTION = 2.5
"""Products of fused attention's backward pass over those of its forward pass: five for two."""
ADAM_BYTES = 30
"""Read and written for each parameter that an optimizer step updates: two moments, gradient, wide and narrow copy."""
HOST_LINK = 25e9
"""Bytes per second between a chip and its host, one way."""
HOST_ADAM = 12e9
"""Bytes of parameters and moments that the host cores of one rank update in a second."""

CPU_LAYER_S = 0.001
"""Least time for a layer's forward pass on a CPU where nothing was measured."""
OFFLOAD_S = (4 + 4) / HOST_LINK + 16 / HOST_ADAM
"""Seconds for each parameter that is updated in host memory."""


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

    @property
    def total(self) -> float:
        """The step."""
        return sum(getattr(self, one.name) for one in fields(self))


@dataclass
class Layer:
    """Seconds of one layer's passes of one micro-batch on one rank."""

    forward: float = 0.0
    backward: float = 0.0
    """To the input."""
    weights: float = 0.0
    again: float = 0.0
    """Computed again in the backward pass."""
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    tp_forward: float = 0.0
    ep_forward: float = 0.0
    cp_forward: float = 0.0


@dataclass(frozen=True)
class _Passes:
    """Seconds of one stage's passes of one micro-batch, with what is exposed of communication."""

    forward: float
    backward: float
    weights: float
    again: float
    tp: float
    ep: float
    cp: float
    gathered: float


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
    bound: float | None = None
    simulated: float | None = None


class Timer:
    """Times of a scenario's parts."""

    def __init__(self, scenario: Scenario, constants: Constants) -> None:
        self.scenario, self.constants = scenario, constants
        chip, speed = scenario.cluster.chip, constants.chip(scenario.cluster.chip.key)
        software = scenario.software
        self.on_cpu = chip.key == "cpu"
        if self.on_cpu:
            # Nothing runs beside a core's own work, and every operation is waited for.
            calibration = scenario.cluster.calibration
            layer_s = calibration.layer_s if calibration is not None else CPU_LAYER_S
            software = replace(
                software, compute=1.0, overlap=0.0, contention=0.0, tp_exposed=1.0, ep_exposed=1.0, passes=1.0,
                host_s=layer_s, host_experts_s=2 * layer_s, step_s=2 * layer_s, jitter=0.0,
            )  # fmt: skip
        self.software = software
        self.common = constants.common
        wide = chip.peak(scenario.wide) * speed.gemm * software.compute
        self.wide = wide
        if scenario.dtype == scenario.wide:
            self.narrow = wide
        else:
            share = speed.fp8 if scenario.dtype == "fp8" else speed.fp4
            self.narrow = chip.peak(scenario.dtype) * share * software.compute
        kernel = speed.portable_attention if software.portable_attention else speed.attention
        self.attention = chip.peak(scenario.wide) * kernel * software.attention
        self.memory = chip.memory_bandwidth * 1e9 * speed.memory
        self.units = chip.units
        self.host = speed.host
        self.links = Links(scenario.cluster, constants.common)
        layout, cluster = scenario.layout, scenario.cluster
        self.tp_group = group_of(cluster, layout.tp, 1)
        self.cp_group = group_of(cluster, layout.cp, layout.tp)
        self.ep_group = group_of(cluster, layout.ep, layout.expert_tp)
        self.shard_group = group_of(cluster, layout.shard * layout.cp, layout.tp)
        self.replicas = group_of(cluster, layout.replicate, layout.tp * layout.cp * layout.shard)
        self._layers: dict[tuple[bool, bool], Layer] = {}
        self._flows: dict[tuple[object, ...], Flow] = {}
        self._elements: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def like(self, scenario: Scenario) -> Timer:
        """A timer of a scenario that differs in nothing that a layer's own passes depend on: they are shared."""
        other = object.__new__(Timer)
        other.__dict__.update(self.__dict__)
        other.scenario = scenario
        layout, cluster = scenario.layout, scenario.cluster
        other.shard_group = group_of(cluster, layout.shard * layout.cp, layout.tp)
        other.replicas = group_of(cluster, layout.replicate, layout.tp * layout.cp * layout.shard)
        mine = self.scenario.layout
        if (layout.cp_method, scenario.selective) != (mine.cp_method, self.scenario.selective):
            # The flows know these by their keys; the passes of layers do not.
            other._layers = {}
        return other

    # ---- operations

    def product(self, one: Product) -> tuple[float, float, float]:
        """Seconds of the forward product and of those to its input and to its weights."""
        peak = self.narrow if one.narrow else self.wide
        if one.times > 1:
            peak *= self.common.grouped * one.rows / (one.rows + self.common.rows)
        flops = 2 * one.rows * one.inner * one.outer * one.times
        return (
            self._time(flops, peak, one.rows, one.inner, one.outer, one.times),
            self._time(flops, peak, one.rows, one.outer, one.inner, one.times),
            self._time(flops, peak, one.inner, one.rows, one.outer, one.times),
        )

    def _time(self, flops: float, peak: float, rows: float, inner: float, outer: float, times: float) -> float:
        waves = ceil(rows / TILE) * ceil(outer / TILE) * times / self.units
        waste = ceil(waves) / waves - 1 if waves < 64 else 0.0
        share = inner / (inner + self.common.depth) / (1 + self.common.quantum * min(waste, 8.0))
        moved = 2 * (rows * inner + inner * outer + rows * outer) * times
        return max(flops / (peak * share), moved / self.memory)

    def attend(self, work: Work) -> tuple[float, float]:
        """Seconds of attention forward and backward."""
        scenario, common = self.scenario, self.common
        if not scenario.flash_attention:
            # Full products, and the scores go through memory for masks, softmax and dropout.
            forward = 2 * work.attention_flops / self.wide * 1.6 + work.scores * 2 * common.unfused / self.memory
            return forward, 2 * forward
        own = scenario.sequence_length / scenario.layout.cp
        share = own / (own + common.attention_length) * min(1.0, 0.6 + 0.4 * work.head_dim / 128)
        forward = work.attention_flops / (self.attention * share)
        return forward, forward * BACKWARD_ATTENTION * 1.1

    def layer(self, sparse: bool, again: bool) -> Layer:
        """The passes of one layer, computed again or not."""
        key = sparse, again
        if key not in self._layers:
            self._layers[key] = self._layer(sparse, again)
        return self._layers[key]

    def _layer(self, sparse: bool, again: bool) -> Layer:
        scenario, layout, software = self.scenario, self.scenario.layout, self.software
        work = blocks.layer_work(
            scenario.spec, sparse, scenario.tokens, scenario.sequence_length,
            layout.tp, layout.sp, layout.ep, layout.expert_tp, scenario.imbalance,
        )  # fmt: skip
        forward = backward = weights = 0.0
        for one in work.products:
            times = self.product(one)
            forward, backward, weights = forward + times[0], backward + times[1], weights + times[2]
        attention_forward, attention_backward = self.attend(work)
        moved = work.moved * scenario.element * software.passes / self.memory
        if scenario.dtype != scenario.wide:
            # Read wide, write narrow twice (as it is and transposed).
            cast = work.cast * 4 * software.cast / self.memory
            forward, backward = forward + cast, backward + cast
        forward += attention_forward + moved
        backward += attention_backward + 2 * moved
        if not scenario.flash_attention and layout.recompute == "selective":
            backward += attention_forward
        host = (software.host_experts_s if sparse else software.host_s) * self.host
        if self.on_cpu:
            forward, total = forward + host, backward + weights + 2 * host
        else:
            forward, total = max(forward, host), max(backward + weights, 2 * host)
        backward = total - weights
        result = Layer(forward, backward, weights)
        result.tp_forward, tp_backward = self._tensor(work)
        result.ep_forward = (
            software.ep_exposed
            * 2
            * self.links.exchange(self.ep_group, work.exchanged * scenario.element, self._copies())
        )
        result.cp_forward, cp_backward = self._context(work, attention_forward, attention_backward)
        result.tp = result.tp_forward + tp_backward
        result.ep = 2 * result.ep_forward
        result.cp = result.cp_forward + cp_backward
        if again:
            result.again = forward
            result.tp += result.tp_forward
            result.ep += result.ep_forward
            result.cp += result.cp_forward
        elif scenario.selective:
            result.again = moved
        return result

    def _copies(self) -> float:
        experts = self.scenario.spec.experts
        return experts.num_experts_per_tok if experts is not None else 1

    def _tensor(self, work: Work) -> tuple[float, float]:
        """Exposed seconds of tensor-parallel collectives, forward and backward: two sums each, or four halves."""
        if self.tp_group.size == 1:
            return 0.0, 0.0
        size = work.tp_elements * self.scenario.element
        once = 4 * self.links.half(self.tp_group, size) * self.software.tp_exposed
        # Backward passes of the weights need the gathered inputs once more.
        return once, once * (1.25 if self.scenario.layout.sp else 1.0)

    def _context(self, work: Work, forward: float, backward: float) -> tuple[float, float]:
        """Exposed seconds of context-parallel traffic; a ring hides behind attention, an exchange does not."""
        layout, element = self.scenario.layout, self.scenario.element
        if layout.cp == 1:
            return 0.0, 0.0
        if layout.cp_method == "ring":
            passed = self.links.half(self.cp_group, work.kv_elements * layout.cp * element)
            start = passed / layout.cp
            return max(start, passed - forward), max(2 * start, 2 * passed - backward)
        once = self.links.exchange(self.cp_group, (work.kv_elements + work.qo_elements) * element)
        return once, once

    # ---- the step

    def parts(self, simulate: bool = True) -> Parts:
        """The step; without simulation a lower bound of the pipeline's length stands in for it."""
        scenario, software = self.scenario, self.software
        flow = self._flow()
        micro_steps = flow.micro_steps
        length = self._length(flow, simulate)
        dp = micro_steps * flow.gathered
        reduction = self._reduction(flow)
        optimizer, offload = self._update()
        steady = length + reduction + optimizer + offload
        nodes = max(1.0, scenario.cluster.gpus / max(1, scenario.cluster.node))
        other = software.step_s + (steady * software.jitter * log2(nodes) if nodes > 1 else 0.0)
        spent = flow.tp + flow.ep + flow.cp + flow.gathered + flow.again
        return Parts(
            compute=micro_steps * (flow.work - spent),
            recompute=micro_steps * flow.again,
            tp=micro_steps * flow.tp,
            cp=micro_steps * flow.cp,
            ep=micro_steps * flow.ep,
            dp=dp + reduction,
            bubble=length - micro_steps * flow.work,
            optimizer=optimizer,
            offload=offload,
            other=other,
        )

    def stage_times(self) -> StageTimes:
        """Seconds of a micro-batch in each stage."""
        return self._flow().times

    def without_gaps(self) -> float:
        """Seconds of the step if no rank ever waited for another and all had the same work: below any schedule."""
        parts, flow = self.parts(simulate=False), self._flow()
        return parts.total - parts.bubble - flow.micro_steps * (flow.work - flow.mean)

    def _flow(self) -> Flow:
        """What the stages take; the same for all strategies that differ in what is summed once a step only."""
        layout = self.scenario.layout
        every = layout.zero == 3 or (layout.zero == 2 and layout.pp == 1)
        sharded = (layout.zero, layout.shard, layout.offload) if every else ()
        key = layout.schedule, layout.layers, layout.cp_method, layout.recompute, sharded
        if key not in self._flows:
            self._flows[key] = self._make_flow()
        return self._flows[key]

    def _make_flow(self) -> Flow:
        scenario, layout = self.scenario, self.scenario.layout
        stages = scenario.stages
        last = scenario.spec.num_hidden_layers
        order = sorted((part for held in stages for part in held), key=lambda part: part.start)
        passes: dict[tuple[object, ...], _Passes] = {}
        found: list[_Passes] = []
        for part in order:
            kinds = self._kinds(part)
            key = (kinds, part.start == 0, part.stop == last)
            if key not in passes:
                passes[key] = self._stage(part, kinds)
            found.append(passes[key])
        forward = [one.forward for one in found]
        weights = [one.weights for one in found]
        split = layout.pp > 1 and splits_backward(layout.schedule)
        backward = [one.backward if split else one.backward + one.weights for one in found]
        times = StageTimes(forward, backward, weights if split else [0.0] * len(found), self._transfer())
        work = pipeline.rank_work(layout.schedule, layout.pp, times) if layout.pp > 1 else [forward[0] + backward[0]]
        slowest = max(range(layout.pp), key=lambda rank: work[rank])
        held = set(stages[slowest])
        own = [one for part, one in zip(order, found, strict=True) if part in held]
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
        )

    def _length(self, flow: Flow, simulate: bool) -> float:
        layout = self.scenario.layout
        if layout.pp == 1:
            return flow.micro_steps * flow.work
        if simulate:
            if flow.simulated is None:
                flow.simulated = pipeline.length(layout.schedule, layout.pp, flow.micro_steps, flow.times)
            return flow.simulated
        if flow.bound is None:
            flow.bound = pipeline.shortest(layout.schedule, layout.pp, flow.micro_steps, flow.times)
        return flow.bound

    def _kinds(self, part: range) -> tuple[tuple[bool, bool, int], ...]:
        """The layers of a stage by kind: sparse or not, computed again or not, how many."""
        scenario = self.scenario
        again = scenario.recomputed(part)
        if scenario.spec.experts is None:
            pairs = ((False, True, again), (False, False, len(part) - again))
            return tuple(pair for pair in pairs if pair[2])
        counts: dict[tuple[bool, bool], int] = {}
        for index, layer in enumerate(part):
            key = scenario.spec.is_sparse(layer), index < again
            counts[key] = counts.get(key, 0) + 1
        return tuple((*key, count) for key, count in counts.items())

    def _stage(self, part: range, kinds: tuple[tuple[bool, bool, int], ...]) -> _Passes:
        """One stage's passes of one micro-batch."""
        forward = backward = weights = again = tp = ep = cp = tp_forward = 0.0
        for sparse, recomputed, count in kinds:
            one = self.layer(sparse, recomputed)
            forward += count * one.forward
            backward += count * one.backward
            weights += count * one.weights
            again += count * one.again
            tp, ep, cp = tp + count * one.tp, ep + count * one.ep, cp + count * one.cp
            tp_forward += count * (one.tp_forward + one.ep_forward + one.cp_forward)
        if part.stop == self.scenario.spec.num_hidden_layers:
            head = self.head()
            forward, backward, weights = forward + head[0], backward + head[1], weights + head[2]
        shown = self._gathers(part, forward, backward + weights + again)
        return _Passes(
            forward=forward + tp_forward + shown[0],
            backward=backward + again + tp + ep + cp - tp_forward + shown[1],
            weights=weights,
            again=again,
            tp=tp,
            ep=ep,
            cp=cp,
            gathered=shown[0] + shown[1],
        )

    def head(self) -> tuple[float, float, float]:
        """Seconds of the last norm, the head and the loss: forward, to the input, to the weights."""
        scenario, layout = self.scenario, self.scenario.layout
        work = blocks.head_work(scenario.spec, scenario.tokens, layout.tp, layout.sp)
        forward, backward, weights = self.product(work.products[0])
        logits = scenario.tokens * scenario.spec.vocab_size / layout.tp
        # Logits are read and written in float32 by the loss, forward and backward.
        loss = logits * 4 * 4 / self.memory
        moved = work.moved * scenario.element * self.software.passes / self.memory
        return forward + loss / 2 + moved, backward + loss / 2 + 2 * moved, weights

    def _gathers(self, part: range, forward: float, backward: float) -> tuple[float, float]:
        """Exposed seconds of gathering and scattering a stage's parameters for one micro-batch with zero=3."""
        layout, software = self.scenario.layout, self.software
        if self.shard_group.size == 1 or layout.zero < 2 or (layout.zero == 2 and layout.pp > 1):
            return 0.0, 0.0
        elements, experts = self._parameters(part)
        layers = max(1, len(part))
        if layout.zero == 2:
            # Gradients of every micro-batch are scattered; parameters stay gathered for the step.
            return 0.0, self._hide(
                layers * self.links.half(self.shard_group, elements * software.reduce_bytes / layers),
                backward,
                1 / layers,
            )
        gather = layers * self.links.half(self.shard_group, elements * software.gather_bytes / layers)
        scatter = layers * self.links.half(self.shard_group, elements * software.reduce_bytes / layers)
        if experts:
            group = Group(layout.expert_state_ranks, 1) if layout.expert_state_ranks > 1 else Group(1, 1)
            gather += layers * self.links.half(group, experts * software.gather_bytes / layers)
            scatter += layers * self.links.half(group, experts * software.reduce_bytes / layers)
        # The first layer's gather and the last one's scatter have nothing to hide behind.
        edge = 1 / layers
        shown = self._hide(gather, forward, edge), self._hide(gather + scatter, backward, edge)
        if layout.offload == "parameters":
            moved = elements * software.gather_bytes / layout.state_ranks / HOST_LINK
            shown = shown[0] + moved, shown[1] + moved
        return shown

    def _hide(self, communication: float, compute: float, edge: float) -> float:
        """What is seen of communication that runs beside computation."""
        hidden = min(communication * (1 - edge), compute * self.software.overlap)
        return communication - hidden + hidden * self.software.contention

    def _parameters(self, part: range) -> tuple[float, float]:
        """Elements of a stage on one rank before sharding: plain ones and dealt-out experts."""
        spec, layout = self.scenario.spec, self.scenario.layout
        plain = experts = 0.0
        kinds = [spec.is_sparse(layer) for layer in part] if spec.experts is not None else [False] * len(part)
        for sparse in (False, True):
            count = kinds.count(sparse)
            if count:
                held = blocks.layer_parameters(spec, sparse, layout.tp, layout.ep, layout.expert_tp)
                plain, experts = plain + count * held.plain, experts + count * held.experts
        first, last = blocks.ends_parameters(spec, layout.tp)
        plain += first if part.start == 0 else 0.0
        if part.stop == spec.num_hidden_layers and not (spec.tie_word_embeddings and part.start == 0):
            plain += last
        return plain, experts

    def _held(self) -> list[tuple[float, float]]:
        """Elements of each pipeline rank before sharding."""
        layout = self.scenario.layout
        key = layout.schedule, layout.layers
        if key not in self._elements:
            found = []
            for held in self.scenario.stages:
                pairs = [self._parameters(part) for part in held]
                found.append((sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)))
            self._elements[key] = found
        return self._elements[key]

    def _reduction(self, flow: Flow) -> float:
        """Exposed seconds of the sums of gradients and the gathers of parameters that a step needs once."""
        layout, software = self.scenario.layout, self.software
        if layout.dp * layout.cp == 1 or (layout.zero == 3 and layout.replicate == 1):
            return 0.0
        plain, experts = self._held()[flow.slowest]
        links = self.links
        gather = 0.0
        if layout.zero == 3:
            reduce = links.all_reduce(self.replicas, plain * software.reduce_bytes / layout.state_ranks)
        else:
            gradients = plain * software.reduce_bytes
            whole = group_of(self.scenario.cluster, layout.dp * layout.cp, layout.tp)
            if layout.zero == 0 or (layout.zero == 1 and software.sums_whole):
                reduce = links.all_reduce(whole, gradients)
            else:
                reduce = links.half(self.shard_group, gradients) if layout.zero == 1 or layout.pp > 1 else 0.0
                if layout.replicate > 1:
                    reduce += links.all_reduce(self.replicas, gradients / layout.state_ranks)
            if layout.zero:
                gather = links.half(self.shard_group, plain * software.gather_bytes)
            if experts:
                group = Group(max(1, layout.dp * layout.cp * layout.tp // (layout.ep * layout.expert_tp)), 1)
                reduce += links.half(group, experts * software.reduce_bytes) * (1 if layout.zero else 2)
                gather += links.half(group, experts * software.gather_bytes) if layout.zero else 0.0
        edge = 1 / max(2, sum(len(part) for part in self.scenario.stages[flow.slowest]))
        return self._hide(reduce, flow.backward, edge) + self._hide(gather, flow.forward, edge)

    def _update(self) -> tuple[float, float]:
        """Seconds of the optimizer's step of the fullest rank, on the chip and in host memory."""
        layout = self.scenario.layout
        shards, expert_shards = layout.state_ranks if layout.zero else 1, layout.expert_state_ranks
        most = max(plain / shards + experts / expert_shards for plain, experts in self._held())
        if layout.offload == "none":
            return most * ADAM_BYTES / self.memory, 0.0
        # Gradients go down and parameters come back; the host's cores update them.
        return 0.0, most * OFFLOAD_S

    def _transfer(self) -> float:
        """Seconds between two stages."""
        scenario, layout = self.scenario, self.scenario.layout
        if layout.pp == 1:
            return 0.0
        size = scenario.tokens / (layout.tp if layout.sp else 1) * scenario.spec.hidden_size * scenario.element
        far = layout.dp * layout.cp * layout.tp * 2 > scenario.cluster.domain
        return self.links.send(size, far) * self.software.pipeline
