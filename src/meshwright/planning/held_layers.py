"""Which layers each stage and each pipeline rank holds, by kind: what times and peaks are sums over. No torch."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.models.spec import ModelSpec
from meshwright.planning.blocks import remembered
from meshwright.planning.pipeline import in_flight, waiting_weights
from meshwright.schedules import placement_of, stages_per_rank
from meshwright.stages import stage_layers


class Kind(NamedTuple):
    """Layers of a stage that are alike."""

    sparse: bool
    """Whether they are mixtures of experts."""
    again: bool
    """Whether they are computed again in whole."""
    number: int


class Stage(NamedTuple):
    """One stage of the model."""

    layers: range
    rank: int
    """The pipeline rank that holds it."""
    kinds: tuple[Kind, ...]


class RankLayers(NamedTuple):
    """What one pipeline rank holds."""

    kinds: tuple[tuple[int, Kind], ...]
    """Kinds of layers, each with the micro-batches that are held of it at once."""
    held: int
    """Micro-batches that are held at once, of all stages."""
    waiting: float
    """Micro-batches whose gradients of weights wait, of all of this rank's layers."""
    has_first: bool
    has_last: bool


@remembered
def stages_of(spec: ModelSpec, pp: int, schedule: str, layers: str, again: int) -> tuple[Stage, ...]:
    """The stages in the model's order, where the first `again` layers are computed again."""
    if pp == 1:
        whole = range(spec.num_hidden_layers)
        return (Stage(whole, 0, _kinds(spec, whole, again)),)
    parts = stage_layers(spec, pp * stages_per_rank(schedule), layers)
    ranks = placement_of(schedule, pp)
    return tuple(Stage(part, rank, _kinds(spec, part, again)) for part, rank in zip(parts, ranks, strict=True))


@remembered
def ranks_of(
    spec: ModelSpec, pp: int, schedule: str, layers: str, again: int, micro_steps: int, quick: bool
) -> tuple[RankLayers, ...]:
    """What the pipeline ranks hold; `quick` leaves out those that cannot be the fullest.

    Of ranks that hold alike layers, those with fewer micro-batches in flight cannot; both ends of the model stay.
    """
    held: list[list[Stage]] = [[] for _ in range(pp)]
    for stage in stages_of(spec, pp, schedule, layers, again):
        held[stage.rank].append(stage)
    flights = in_flight(schedule, pp, micro_steps) if pp > 1 else [(1,)]
    waiting = waiting_weights(schedule, pp, micro_steps) if pp > 1 else [0]
    chosen: list[int] = list(range(pp))
    if quick and pp > 2:
        most: dict[object, int] = {}
        for rank in chosen[1:-1]:
            alike = tuple((stage.kinds, _order_of_kinds(spec, stage.layers)) for stage in held[rank])
            other = most.get(alike)
            if other is None or (flights[rank], waiting[rank]) > (flights[other], waiting[other]):
                most[alike] = rank
        chosen = [0, *most.values(), pp - 1]
    return tuple(
        RankLayers(
            kinds=tuple(
                (flight, kind) for stage, flight in zip(held[rank], flights[rank], strict=True) for kind in stage.kinds
            ),
            held=sum(flights[rank]),
            waiting=waiting[rank] / len(held[rank]),
            has_first=any(stage.layers.start == 0 for stage in held[rank]),
            has_last=any(stage.layers.stop == spec.num_hidden_layers for stage in held[rank]),
        )
        for rank in chosen
    )


def _order_of_kinds(spec: ModelSpec, part: range) -> tuple[bool, ...]:
    return () if spec.experts is None else tuple(map(spec.is_sparse, part))


def _kinds(spec: ModelSpec, part: range, again: int) -> tuple[Kind, ...]:
    """The layers of a stage by kind."""
    count = max(0, min(part.stop, again) - part.start)
    if spec.experts is None:
        kinds = (Kind(False, True, count), Kind(False, False, len(part) - count))
        return tuple(kind for kind in kinds if kind.number)
    counts: dict[tuple[bool, bool], int] = {}
    for index, layer in enumerate(part):
        key = spec.is_sparse(layer), index < count
        counts[key] = counts.get(key, 0) + 1
    return tuple(Kind(*key, count) for key, count in counts.items())
