"""Which layers make up which stage of a pipeline: evenly, balanced by cost, or given by hand. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod

from meshwright.models.shapes import shapes_of
from meshwright.models.spec import ModelSpec


def stage_layers(spec: ModelSpec, stages: int, layers: str = "even") -> list[range]:
    """The layers of each stage; every stage has at least one."""
    return cut_layers(spec.num_hidden_layers, stages, layers, lambda: _costs(spec))


def cut_layers(count: int, stages: int, layers: str, costs: Callable[[], Sequence[float]]) -> list[range]:
    """The same for so many layers of any model; `costs` says what each of them costs, where it is asked for."""
    if stages > count:
        raise ValueError(f"{stages} stages need at least as many layers, and the model has {count}")
    if layers == "even":
        # Where they do not go round, the first stages have one more: the last one has the head.
        sizes = [count // stages + (stage < count % stages) for stage in range(stages)]
    elif layers == "balanced":
        sizes = _balanced(costs(), stages)
    else:
        sizes = [int(size) for size in layers.split("+")]
        if len(sizes) != stages or sum(sizes) != count:
            raise ValueError(f"{layers} is {len(sizes)} stages of {sum(sizes)} layers, not {stages} of {count}")
    return [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def _costs(spec: ModelSpec) -> list[float]:
    """What each layer costs a token: the elements of the matrices that it passes; the model's ends go with theirs."""
    costs = [0.0] * spec.num_hidden_layers
    for name, shape in shapes_of(spec).items():
        size = float(prod(shape))
        if name.startswith("model.layers."):
            if ".experts." in name:
                assert spec.experts is not None
                size *= spec.experts.num_experts_per_tok / spec.experts.num_experts
            costs[int(name.split(".")[2])] += size
    costs[0] += spec.hidden_size
    costs[-1] += spec.vocab_size * spec.hidden_size
    return costs


def _balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Sizes of neighbouring groups, each of at least one, of which the dearest is as cheap as can be."""
    count = len(costs)
    before = list(accumulate(costs, initial=0.0))
    # best[n] of the first n layers in the stages so far: (dearest stage, sum of squares, sizes).
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ()), *[None] * count]
    for stage in range(1, stages + 1):
        found: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (count + 1)
        for stop in range(stage, count - (stages - stage) + 1):
            options = []
            for start in range(stage - 1, stop):
                so_far = best[start]
                if so_far is not None:
                    cost = before[stop] - before[start]
                    options.append((max(so_far[0], cost), so_far[1] + cost**2, (*so_far[2], stop - start)))
            found[stop] = min(options, default=None)
        best = found
    chosen = best[count]
    assert chosen is not None
    return list(chosen[2])
