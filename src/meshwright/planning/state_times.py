"""How long a step's traffic between data-parallel ranks and its optimizer take, and what of it is seen. No torch."""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from meshwright.comm.compression import NONE
from meshwright.cuts import SMALL_UNIT
from meshwright.estimate.kept import FLOAT32
from meshwright.models.shapes import shapes_of
from meshwright.planning import blocks
from meshwright.planning.links import Group, group_of
from meshwright.planning.operations import Operations
from meshwright.planning.scenario import Scenario
from meshwright.planning.software import Software

HOST_LINK = 25e9
"""Bytes per second between a chip and its host, one way."""
HOST_ADAM = 12e9
"""Bytes of parameters and moments that the host cores of one rank update in a second."""
OFFLOAD_S = (4 + 4) / HOST_LINK + 16 / HOST_ADAM
"""Seconds for each parameter that is updated in host memory."""
Elements = dict[tuple[str, str], list[tuple[float, float]]]
"""By schedule and layer split: elements of each pipeline rank before sharding, plain ones and dealt-out experts."""


def from_host(parameters: float, software: Software) -> float:
    """Seconds in which a rank's shards of parameters come from host memory for one pass."""
    return parameters * software.gather_bytes / HOST_LINK


class StateTimes:
    """Times of what happens to a scenario's parameters, gradients and optimizer state."""

    def __init__(self, scenario: Scenario, operations: Operations, elements: Elements | None = None) -> None:
        self.scenario, self.operations = scenario, operations
        layout, cluster = scenario.layout, scenario.cluster
        self.shard_group = group_of(cluster, layout.shard * layout.cp, layout.tp, "state")
        self.replicas = group_of(cluster, layout.replicate, layout.tp * layout.cp * layout.shard, "replicate")
        self._elements: Elements = {} if elements is None else elements

    def like(self, scenario: Scenario) -> StateTimes:
        """Those of a scenario with the same degrees."""
        return StateTimes(scenario, self.operations, self._elements)

    def gathers(self, part: range, forward: float, backward: float) -> tuple[float, float]:
        """Exposed seconds of gathering and scattering a stage's parameters for one micro-batch with zero=3."""
        layout, software = self.scenario.layout, self.operations.software
        if self.shard_group.size == 1 or layout.zero < 2 or (layout.zero == 2 and layout.pp > 1):
            return 0.0, 0.0
        links = self.operations.links
        elements, experts = self._parameters(part)
        # The ends are a unit of their own.
        units = self._units(part) + 1
        if layout.zero == 2:
            # Gradients of every micro-batch are scattered; parameters stay gathered for the step.
            return 0.0, self.operations.hide(
                units * links.unit(self.shard_group, elements * software.reduce_bytes / units, "reduce_scatter"),
                backward,
                1 / max(1, len(part)),
            )
        gather = units * links.unit(self.shard_group, elements * software.gather_bytes / units)
        scatter = units * links.unit(self.shard_group, elements * software.reduce_bytes / units, "reduce_scatter")
        if experts:
            # With their padding.
            experts *= self.scenario.expert_share * layout.expert_state_ranks
            group = Group(layout.expert_state_ranks, 1, "expert_state")
            gather += units * links.unit(group, experts * software.gather_bytes / units)
            scatter += units * links.unit(group, experts * software.reduce_bytes / units, "reduce_scatter")
        # The first layer's gather and the last one's scatter have nothing to hide behind.
        edge = 1 / max(1, len(part))
        shown = self.operations.hide(gather, forward, edge), self.operations.hide(gather + scatter, backward, edge)
        if layout.host_states == "parameters":
            moved = from_host(elements / layout.state_ranks, software)
            shown = shown[0] + moved, shown[1] + moved
        return shown

    def _units(self, part: range) -> int:
        """Modules of a stage that are gathered by themselves: layers, small ones with their neighbours."""
        spec, layout = self.scenario.spec, self.scenario.layout
        sparse = spec.experts is not None and spec.is_sparse(part.start)
        held = blocks.layer_parameters(spec, sparse, layout.tp, layout.ep, layout.expert_tp)
        return max(1, ceil(len(part) / ceil(SMALL_UNIT / held.plain)))

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
            found = [(0.0, 0.0)] * layout.pp
            for stage in self.scenario.stages:
                (plain, experts), more = found[stage.rank], self._parameters(stage.layers)
                found[stage.rank] = plain + more[0], experts + more[1]
            self._elements[key] = found
        return self._elements[key]

    def reduction(self, slowest: int, forward: float, backward: float) -> float:
        """Exposed seconds of the sums of gradients and the gathers of parameters that a step needs once.

        They are those of the slowest pipeline rank, and hide behind its last micro-batch's passes.
        """
        layout, software = self.scenario.layout, self.operations.software
        if layout.dp * layout.cp == 1 or (layout.zero == 3 and layout.replicate == 1):
            return 0.0
        plain, experts = self._held()[slowest]
        links = self.operations.links
        gather = 0.0
        if layout.zero == 3:
            reduce = links.all_reduce(self.replicas, plain * software.reduce_bytes / layout.state_ranks)
        else:
            gradients = plain * software.reduce_bytes
            whole = group_of(self.scenario.cluster, layout.dp * layout.cp, layout.tp, "loss")
            if layout.compress != NONE:
                reduce = self._compressed(whole, plain + experts)
            elif layout.zero == 0 or (layout.zero == 1 and software.sums_whole):
                reduce = links.all_reduce(whole, gradients)
            else:
                reduce = links.half(self.shard_group, gradients) if layout.zero == 1 or layout.pp > 1 else 0.0
                if layout.replicate > 1:
                    reduce += links.all_reduce(self.replicas, gradients / layout.state_ranks)
            if layout.zero:
                gather = links.half(self.shard_group, plain * software.gather_bytes)
            if experts and layout.compress == NONE:
                holders = max(1, layout.dp * layout.cp * layout.tp // (layout.ep * layout.expert_tp))
                group = Group(holders, 1, "copies")
                reduce += links.half(group, experts * software.reduce_bytes) * (1 if layout.zero else 2)
                gather += links.half(group, experts * software.gather_bytes) if layout.zero else 0.0
        edge = 1 / max(2, sum(len(stage.layers) for stage in self.scenario.stages if stage.rank == slowest))
        return self.operations.hide(reduce, backward, edge) + self.operations.hide(gather, forward, edge)

    def _compressed(self, group: Group, elements: float) -> float:
        """Seconds in which compressed gradients are summed: what carries them, and what is computed."""
        compression, links = self.scenario.layout.compression, self.operations.links
        seconds = self.operations.compress(elements, compression.kind)
        for one in compression.messages(list(shapes_of(self.scenario.spec).values()), group.size):
            match one.operation:
                case "all_to_all":
                    seconds += links.exchange(group, one.size)
                case "all_gather":
                    seconds += links.half(group, one.size)
                case _:
                    seconds += links.all_reduce(group, one.size)
        return seconds

    def update(self, ranks: Collection[int] | None = None) -> tuple[float, float]:
        """Seconds of the optimizer's step of the fullest of these pipeline ranks, on the chip and in host memory."""
        layout = self.scenario.layout
        shards, share = layout.state_ranks if layout.zero else 1, self.scenario.expert_share
        most = max(
            plain / shards + experts * share
            for rank, (plain, experts) in enumerate(self._held())
            if ranks is None or rank in ranks
        )
        if layout.host_states == "none":
            # Of weights, gradients and moments, against those in float32.
            kept = self.scenario.kept
            moved = self.operations.update(most) * kept.updated / FLOAT32.updated
            computed = most * self.operations.software.update_int8_s if kept.moments == "int8" else 0.0
            return max(moved, computed), 0.0
        # Gradients go down and parameters come back; the host's cores update them.
        return 0.0, most * OFFLOAD_S
