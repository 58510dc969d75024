"""Bounds below which no strategy can come: what a search need not look at. No torch.

Tests compare a search that uses them with trying everything.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.models.spec import ModelSpec
from meshwright.planning.memory import FITS, Memory, does_fit
from meshwright.planning.question import FEATURE, Question
from meshwright.planning.space import Degrees, Space, plain
from meshwright.planning.state_times import OFFLOAD_S, from_host
from meshwright.planning.timing import jitter_of
from meshwright.strategy import host_activations, host_states


def in_order(space: Space) -> list[Degrees]:
    """Degrees in the order of their bounds."""
    return sorted(
        (replace(one, bound=bound_of(space, one)) for one in space.degrees()),
        key=lambda one: (one.bound, one.tp, one.pp, one.cp, one.ep, -one.micro_batch),
    )


def bound_of(space: Space, degrees: Degrees, again: float = 0.0, features: int = 0) -> float:
    """A score that no strategy with these degrees can be below; with so many seconds of recompute in all layers.

    The slowest pipeline rank computes at least its share of all layers, for every micro-batch, with what tensor and
    expert parallel add. Context parallel, sums over data ranks, gaps in the pipeline, the optimizer and offload only
    add to that.
    """
    question, timer = space.question, space.timer(degrees)
    software = timer.operations.software
    work = sum(timer.layers.head()) + again
    for sparse, count in layer_kinds(question.spec):
        one = timer.layers.layer(sparse, False)
        work += count * (one.forward + one.backward + one.weights + one.tp + one.ep)
    micro_steps = question.global_batch / (degrees.dp * degrees.micro_batch)
    floor = micro_steps * work / degrees.pp * (1 + jitter_of(timer.scenario, software)) + software.step_s
    axes = sum(degree > 1 for degree in (degrees.tp, degrees.pp, degrees.cp, degrees.ep)) + (again > 0)
    axes += features
    return floor * (1 + FEATURE * axes)


def bound_with_memory(degrees: Degrees, least: Least) -> float:
    """The same, with the recompute that even the strategy of least memory needs to fit."""
    space, features = least.space, least.features()
    question = space.question
    if question.allows(recompute="none") and least.may_fit("none"):
        return bound_of(space, degrees, features=features)
    layout = replace(plain(degrees), recompute="selective")
    timer = space.timer(degrees).like(question.scenario(layout, degrees.micro_batch))
    cheap = sum(count * timer.layers.layer(sparse, False).again for sparse, count in layer_kinds(question.spec))
    forward = min(timer.layers.layer(sparse, True).forward for sparse, _ in layer_kinds(question.spec))
    # Roughly how many layers: an eighth of them is close enough for a bound.
    low, high = 0, question.spec.num_hidden_layers
    while high - low > max(1, question.spec.num_hidden_layers // 8):
        middle = (low + high) // 2
        if least.may_fit(f"first:{middle}"):
            high = middle
        else:
            low = middle
    again = (low + 1) * forward
    return bound_of(space, degrees, min(again, cheap) if least.may_fit("selective") else again, features)


def bound_with_offload(question: Question, degrees: Degrees, offload: str, zero: int, shard: int) -> float:
    """The bound with more features, and the least that the host's optimizer takes, and parameters on their way."""
    axes = sum(degree > 1 for degree in (degrees.tp, degrees.pp, degrees.cp, degrees.ep))
    shards = shard * degrees.cp if zero else 1
    # Experts may be shared by more ranks than the rest is.
    ranks = degrees.tp * degrees.pp * shards if degrees.ep == 1 else question.cluster.gpus
    held = question.parameters / ranks
    states = host_states(offload)
    seconds = held * OFFLOAD_S if states != "none" else 0.0
    if states == "parameters" and zero == 3 and degrees.ep == 1:
        micro_steps = question.global_batch / (degrees.dp * degrees.micro_batch)
        seconds += micro_steps * 2 * from_host(held, question.trainer)
    return (degrees.bound / (1 + FEATURE * axes) + seconds) * (1 + FEATURE * (axes + host_features(offload)))


def host_features(offload: str) -> int:
    """Features that host memory counts as."""
    return 2 * (host_states(offload) != "none") + 2 * host_activations(offload)


def layer_kinds(spec: ModelSpec) -> list[tuple[bool, int]]:
    """(is a mixture, how many layers), of those that there are."""
    if spec.experts is None:
        return [(False, spec.num_hidden_layers)]
    sparse = sum(map(spec.is_sparse, range(spec.num_hidden_layers)))
    kinds = [(True, sparse), (False, spec.num_hidden_layers - sparse)]
    return [kind for kind in kinds if kind[1]]


class Least:
    """Whether anything with some degrees can fit: a floor of the memory of all that can be chosen with them.

    Of the schedules 1f1b holds the fewest micro-batches, and of the states a rank has at least the shards that it
    updates, spread over all data ranks; both layer splits are looked at.
    """

    def __init__(self, space: Space, degrees: Degrees, offload: str) -> None:
        self.question, self.space, self.degrees = space.question, space, degrees
        stages = space.zero_stages(degrees, offload)
        self.layouts = [
            replace(plain(degrees), zero=zero, shard=degrees.dp if zero else 1, offload=offload, layers=layers)
            for zero in stages[-1:]
            for layers in space.splits(degrees.pp, "1f1b")
        ]

    def may_fit(self, recompute: str) -> bool:
        """Whether nothing rules it out."""
        question, micro_batch = self.question, self.degrees.micro_batch
        return any(
            does_fit(question.scenario(replace(layout, recompute=recompute), micro_batch), floor=True)
            for layout in self.layouts
        )

    def features(self) -> int:
        """Features that are needed whatever else: sharded state where copies do not fit, host memory."""
        offload = self.layouts[0].offload
        many = self.degrees.dp * self.degrees.cp > 1
        return host_features(offload) + (many and not self.space.may_hold(self.degrees, offload, 0))


def needed_layers(none: Memory, full: Memory, layers: float) -> float:
    """Layers that must be computed again at least without a pipeline: each saves the same, and needs room to work."""
    before, after = none.stages[0], full.stages[0]
    spread = before.fragmentation / (before.allocated - before.optimizer)
    save = (before.activations - after.activations) * (1 + spread) + 2 * after.working
    excess = before.total - FITS * none.capacity
    return max(0.0, excess / save * layers) if save > 0 else 0.0
