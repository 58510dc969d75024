"""What the compression of gradients takes beside them while a backward pass goes on, bucket by bucket. No torch."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.comm.bucket_size import buckets_of
from meshwright.comm.compression import NONE, Compression
from meshwright.comm.travel import BUCKET_MB
from meshwright.models.shapes import shapes_of
from meshwright.models.spec import ModelSpec
from meshwright.planning import blocks
from meshwright.planning.scenario import Scenario


class Sending(NamedTuple):
    """A bucket on its way."""

    working: float
    """Bytes beside its gradients."""
    waiting: float
    """Share of the layers that still wait for their backward pass."""


def sendings(scenario: Scenario) -> tuple[Sending, ...]:
    """All buckets of a step, in the order in which they leave."""
    layout = scenario.layout
    if layout.compress == NONE or layout.dp == 1:
        return ()
    return _sendings(scenario.spec, layout.compress, layout.dp, scenario.held_bytes[1])


@blocks.remembered
def _sendings(spec: ModelSpec, compress: str, ranks: int, element: float) -> tuple[Sending, ...]:
    how, named = Compression.parse(compress), shapes_of(spec)
    names = list(reversed(named))
    found, taken = [], 0
    for bucket in buckets_of(list(named.values()), BUCKET_MB * 2**20, int(element)):
        taken += len(bucket)
        found.append(Sending(how.working(bucket, ranks), _waiting(names[taken - 1], spec) / spec.num_hidden_layers))
    return tuple(found)


def _waiting(name: str, spec: ModelSpec) -> int:
    """Layers whose backward pass is not over when a parameter's gradient comes."""
    place = name.removeprefix("model.layers.").partition(".")[0]
    if place.isdecimal():
        return int(place) + 1
    return 0 if name.startswith("model.embed") else spec.num_hidden_layers
