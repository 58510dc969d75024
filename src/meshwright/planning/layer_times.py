"""How long one layer's passes of a micro-batch take on one rank, with what tensor, context and expert parallel add."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planning import blocks
from meshwright.planning.blocks import Work
from meshwright.planning.compiled import compiled_layer
from meshwright.planning.links import group_of
from meshwright.planning.operations import Operations
from meshwright.planning.scenario import Scenario


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


class LayerTimes:
    """Times of a scenario's layers and of its head."""

    def __init__(self, scenario: Scenario, operations: Operations) -> None:
        self.scenario, self.operations = scenario, operations
        layout, cluster = scenario.layout, scenario.cluster
        self.tp_group = group_of(cluster, layout.tp, 1, "tp")
        self.cp_group = group_of(cluster, layout.cp, layout.tp, "cp")
        self.ep_group = group_of(cluster, layout.ep, layout.expert_tp, "ep")
        self._layers: dict[tuple[bool, bool], Layer] = {}
        self._head: tuple[float, float, float] | None = None

    def layer(self, sparse: bool, again: bool) -> Layer:
        """The passes of one layer, computed again or not."""
        key = sparse, again
        if key not in self._layers:
            self._layers[key] = self._layer(sparse, again)
        return self._layers[key]

    def _layer(self, sparse: bool, again: bool) -> Layer:
        scenario, layout, operations = self.scenario, self.scenario.layout, self.operations
        software = operations.software
        work = blocks.layer_work(
            scenario.spec, sparse, scenario.tokens, scenario.sequence_length,
            layout.tp, layout.sp, layout.ep, layout.expert_tp, scenario.imbalance,
        )  # fmt: skip
        forward = backward = weights = 0.0
        for one in work.products:
            times = operations.product(one)
            forward, backward, weights = forward + times[0], backward + times[1], weights + times[2]
        attention_forward, attention_backward = operations.attend(work, scenario.sequence_length / layout.cp)
        moved = operations.move(work.moved)
        if scenario.dtype != scenario.wide:
            # Read wide, write narrow twice (as it is and transposed).
            cast = work.cast * 4 * software.cast / operations.memory
            forward, backward = forward + cast, backward + cast
        forward += attention_forward + moved
        backward += attention_backward + 2 * moved
        if not scenario.flash_attention and layout.recompute == "selective":
            backward += attention_forward
        held = blocks.layer_parameters(scenario.spec, sparse, layout.tp, layout.ep, layout.expert_tp)
        copied, added = operations.casts(held.all)
        forward, backward = forward + copied, backward + added
        host, host_backward = operations.host_times(sparse)
        if operations.on_cpu:
            forward, total = forward + host, backward + weights + host_backward
        else:
            forward, total = max(forward, host), max(backward + weights, host_backward)
        backward = total - weights
        result = Layer(forward, backward, weights)
        result.tp_forward, tp_backward = self._tensor(work)
        exchanged = operations.links.experts(self.ep_group, work.exchanged * scenario.element, self._copies())
        result.ep_forward = software.ep_exposed * exchanged[0]
        result.cp_forward, cp_backward = self._context(work, attention_forward, attention_backward)
        result.tp = result.tp_forward + tp_backward
        result.ep = result.ep_forward + software.ep_exposed * exchanged[1]
        result.cp = result.cp_forward + cp_backward
        if again:
            result.again = forward
            result.tp += result.tp_forward
            result.ep += result.ep_forward
            result.cp += result.cp_forward
        elif scenario.compiled:
            result.again = self._again_by_compiler(work, sparse, moved, attention_forward)
        elif scenario.selective:
            result.again = moved
        return result

    def _again_by_compiler(self, work: Work, sparse: bool, moved: float, attention: float) -> float:
        """Seconds of what a compiled layer computes again within its backward pass."""
        if not self.scenario.selective:
            return 0.0
        kept = compiled_layer(self.scenario, work, sparse)
        products = sum(self.operations.product(one)[0] for one in kept.again)
        return products + attention * kept.attends_again + moved * self.operations.software.compiled_again

    def _copies(self) -> float:
        experts = self.scenario.spec.experts
        return experts.num_experts_per_tok if experts is not None else 1

    def _tensor(self, work: Work) -> tuple[float, float]:
        """Exposed seconds of tensor-parallel collectives, forward and backward: two sums each, or four halves."""
        if self.tp_group.size == 1:
            return 0.0, 0.0
        size = work.tp_elements * self.scenario.element
        # Backward passes of the weights need the gathered inputs: kept, or gathered once more.
        sp = self.scenario.layout.sp
        once_more = sp and not self.operations.software.gathered_saved
        forward, backward = self.operations.links.tensor(self.tp_group, size, sp, once_more)
        exposed = self.operations.software.tp_exposed
        return forward * exposed, backward * exposed

    def _context(self, work: Work, forward: float, backward: float) -> tuple[float, float]:
        """Exposed seconds of context-parallel traffic; a ring hides behind attention, an exchange does not."""
        layout, element = self.scenario.layout, self.scenario.element
        if layout.cp == 1:
            return 0.0, 0.0
        if layout.cp_method == "ring":
            return self.operations.links.ring(self.cp_group, work.kv_elements * element, forward, backward)
        return self.operations.links.ulysses(self.cp_group, (work.kv_elements + work.qo_elements) * element)

    def head(self) -> tuple[float, float, float]:
        """Seconds of the last norm, the head and the loss: forward, to the input, to the weights."""
        if self._head is None:
            self._head = self._make_head()
        return self._head

    def _make_head(self) -> tuple[float, float, float]:
        scenario, layout, operations = self.scenario, self.scenario.layout, self.operations
        work = blocks.head_work(scenario.spec, scenario.tokens, layout.tp, layout.sp)
        forward, backward, weights = operations.product(work.products[0])
        logits = scenario.tokens * scenario.spec.vocab_size / layout.tp
        loss = operations.loss(logits, layout.tp > 1)
        moved = operations.move(work.moved)
        beside = operations.micro_step()
        return forward + loss / 2 + moved + beside / 3, backward + loss / 2 + 2 * moved + beside * 2 / 3, weights
