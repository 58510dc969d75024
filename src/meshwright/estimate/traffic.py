"""The collectives of one optimizer step, counted: how many of which kind over which axis, and how many bytes; no torch.

Bytes are those of the whole tensor in the caller's hands: what an all-reduce sums, what an all-gather gives, what a
reduce-scatter takes. A test holds these numbers against what a step does, so that no collective comes in unseen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from meshwright.cuts import buckets_of, longest_part, part_length
from meshwright.estimate.units import Place, rule_for, units_of
from meshwright.models.shapes import Shape, shapes_of
from meshwright.models.spec import ModelSpec
from meshwright.models.tensor_plan import cut_dimension, tensor_plan
from meshwright.strategy import Strategy

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"


@dataclass(frozen=True)
class Work:
    """What a step computes on each rank: micro-steps of samples of tokens, and bytes per element."""

    micro_steps: int
    samples: int
    tokens: int
    stored: int = 4
    """Bytes of a stored element and of a gradient on its way."""
    computed: int = 4
    """Bytes of an activation and of a gathered parameter."""
    loss: int = 4
    """Bytes of a number of the loss: float32, or float64 in proofs."""


@dataclass
class Traffic:
    """Counts and bytes of collectives, by kind and axis."""

    counts: Counter[tuple[str, str]]
    bytes: Counter[tuple[str, str]]

    def add(self, kind: str, axis: str, size: int, times: int = 1) -> None:
        """So many collectives of that many bytes each."""
        if times:
            self.counts[kind, axis] += times
            self.bytes[kind, axis] += size * times


def step_traffic(spec: ModelSpec, strategy: Strategy, work: Work, tp_rank: int = 0) -> Traffic:
    """The collectives in which a rank takes part in one step (not its first two, when DDP arranges its buckets)."""
    for axis in ("pp", "cp", "ep"):
        if getattr(strategy, axis) > 1:
            raise ValueError(f"{axis}={getattr(strategy, axis)}: closed forms of traffic know dp, zero and tp")
    traffic = Traffic(Counter(), Counter())
    if strategy.world == 1:
        return traffic
    if strategy.tp > 1:
        _tensor(traffic, spec, strategy, work)
    _mixtures(traffic, spec, strategy, work)
    if strategy.dp > 1:
        _data(traffic, spec, strategy, work, tp_rank)
    # How many tokens are valid; before the update the loss, the norm, whether somebody was asked to stop, and the loss
    # of each data replica but the last.
    traffic.add(ALL_REDUCE, "world", 8)
    traffic.add(ALL_REDUCE, "world", 24 + 8 * (strategy.dp - 1))
    for axes in _norm_axes(spec, strategy):
        for axis in axes:
            traffic.add(ALL_REDUCE, axis, 8)
    return traffic


def _tensor(traffic: Traffic, spec: ModelSpec, strategy: Strategy, work: Work) -> None:
    """Around every region and table, for every micro-step; recomputed layers repeat what stands before their end."""
    activations = work.samples * work.tokens * spec.hidden_size * work.computed
    regions = 2 * spec.num_hidden_layers
    again = _recomputed_regions(spec, strategy)
    times = work.micro_steps
    if strategy.sp:
        # Forward: gather before, scatter after; backward the reverse. The head gathers, the embedding scatters.
        traffic.add(ALL_GATHER, "tp", activations, times * (2 * regions + 2 + again.gathers))
        traffic.add(REDUCE_SCATTER, "tp", activations, times * (2 * regions + 2 + again.sums))
    else:
        # Forward: the sum after each region and table; backward: the sum before each region and the head.
        traffic.add(ALL_REDUCE, "tp", activations, times * (2 * regions + 2 + again.sums))
    rows = work.samples * work.tokens
    traffic.add(ALL_REDUCE, "tp", rows * work.loss, times)
    traffic.add(ALL_REDUCE, "tp", 2 * rows * work.loss, times)
    plan = tensor_plan(spec)
    for name, shape in shapes_of(spec).items():
        if _has_partial_gradient(name, plan, strategy):
            traffic.add(ALL_REDUCE, "tp", prod(shape) * work.stored, times)


@dataclass(frozen=True)
class _Again:
    gathers: int
    sums: int


def _recomputed_regions(spec: ModelSpec, strategy: Strategy) -> _Again:
    """Collectives that the backward pass repeats.

    What follows the last thing that a gradient needs is not repeated: the end of a layer's last region, unless a
    dropout mask comes after it.
    """
    kind, _, count = strategy.recompute.partition(":")
    if kind == "none":
        return _Again(0, 0)
    layers = int(count) if kind == "first" else spec.num_hidden_layers
    if kind in ("selective", "budget"):
        return _Again(2 * layers, 0)
    return _Again(2 * layers, 2 * layers if spec.dropout else layers)


def _has_partial_gradient(name: str, plan: dict[str, str], strategy: Strategy) -> bool:
    """Whether every tensor-parallel rank sees a part of the parameter's gradient only, and they are summed."""
    module, _, parameter = name.rpartition(".")
    rule = rule_for(plan, module)
    match rule.word:
        case "shared":
            return True
        case "tokens" | "lookup":
            return strategy.sp
        case "row":
            return parameter == "bias"
        case "heads":
            return rule.number % strategy.tp != 0
        case _:
            return False


def _mixtures(traffic: Traffic, spec: ModelSpec, strategy: Strategy, work: Work) -> None:
    """The load of the experts: for the balancing loss in every micro-step, for biases and metrics once."""
    if spec.experts is None or strategy.dp == 1:
        return
    layers = [layer for layer in range(spec.num_hidden_layers) if spec.is_sparse(layer)]
    if not layers:
        return
    size = 8 * spec.experts.num_experts
    kind, _, count = strategy.recompute.partition(":")
    repeated = [] if kind == "none" else [layer for layer in layers if kind != "first" or layer < int(count)]
    if spec.experts.router_aux_loss_coef or spec.experts.router_z_loss_coef:
        traffic.add(ALL_REDUCE, "loss", size, work.micro_steps * (len(layers) + len(repeated)))
    # With each layer's load goes the number of dropped choices.
    traffic.add(ALL_REDUCE, "loss", len(layers) * (size + 8))


def _data(traffic: Traffic, spec: ModelSpec, strategy: Strategy, work: Work, tp_rank: int) -> None:
    units = [[held.shape for held in unit.values()] for unit in units_of(spec, strategy, Place(tp=tp_rank)).all]
    if strategy.zero < 2:
        elements = sum(prod(shape) for unit in units for shape in unit)
        # DDP fills buckets of its own: one holds a small model, and of a large one only the bytes are exact.
        # `replicate` reduces unit by unit.
        buckets = [elements] if strategy.tp == 1 else [sum(map(prod, unit)) for unit in units]
        for size in buckets:
            traffic.add(ALL_REDUCE, "data", size * work.stored)
        if strategy.zero == 1 and strategy.shard > 1:
            shapes = _in_groups(spec, strategy, tp_rank)
            for bucket in buckets_of([prod(shape) * work.stored for shape in shapes]):
                taken = [shapes[index] for index in bucket]
                rows = [sum(_rows(shape, strategy.shard, rank) for shape in taken) for rank in range(strategy.shard)]
                traffic.add(ALL_GATHER, "shard", strategy.shard * max(rows) * work.stored)
        return
    for unit, is_root in [(unit, index == len(units) - 1) for index, unit in enumerate(units)]:
        size = strategy.shard * sum(longest_part(shape[0], strategy.shard) * prod(shape[1:]) for shape in unit)
        # Zero=2 gathers once a step; zero=3 gathers for every pass, but the root stays from forward to backward.
        gathers = 1 if strategy.zero == 2 else work.micro_steps * (1 if is_root else 2)
        if strategy.shard > 1:
            traffic.add(ALL_GATHER, "shard", size * work.computed, gathers)
            traffic.add(REDUCE_SCATTER, "shard", size * work.stored, work.micro_steps)
        if strategy.replicate > 1:
            traffic.add(ALL_REDUCE, "replicate", size // strategy.shard * work.stored)


def _in_groups(spec: ModelSpec, strategy: Strategy, tp_rank: int) -> list[Shape]:
    """This rank's parts in the optimizer's order: what decays, then what does not."""
    units = units_of(spec, strategy, Place(tp=tp_rank))
    held = {name: one.shape for unit in units.all for name, one in unit.items()}
    shapes = [held[name] for name in shapes_of(spec)]
    return [shape for shape in shapes if len(shape) >= 2] + [shape for shape in shapes if len(shape) < 2]


def _rows(shape: Shape, parts: int, index: int) -> int:
    return part_length(shape[0], parts, index) * prod(shape[1:])


def _norm_axes(spec: ModelSpec, strategy: Strategy) -> Iterator[tuple[str, ...]]:
    """The axes over which the squares of gradients are summed, for every way in which gradients are split."""
    plan = tensor_plan(spec)
    cut = set()
    for name in shapes_of(spec):
        module, _, parameter = name.rpartition(".")
        cut.add(strategy.tp > 1 and cut_dimension(rule_for(plan, module), parameter, strategy.tp) is not None)
    shard = ("shard",) if strategy.zero >= 2 and strategy.shard > 1 else ()
    for is_cut in cut:
        yield (*shard, *(("tp",) if is_cut else ()))
