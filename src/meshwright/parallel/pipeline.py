"""The runtime of a pipeline: this rank's part of a program of forward passes, backward passes and transfers.

A rank has one module, the model with the layers of other ranks removed, and calls it with the layers of one of its
stages. Micro-batches are known to all ranks; only what goes from one layer to the next travels, and its gradient.
Transfers begin as early as the program allows and are waited for when their content is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshwright.comm.transfers import Message, receive, send
from meshwright.parallel.spans import Spans
from meshwright.pulse import Pulse
from meshwright.schedules import Action, Program, Transfer, forward_program, make_program, splits_backward
from meshwright.torch_private import backward_to_input, backward_to_weights, fold_gradients

Batch = Mapping[str, Any]
"""The arguments of the model for a micro-batch."""
Loss = Callable[[Tensor, int], Tensor]
"""From the model's output and the number of the micro-batch to what gradients are taken of."""
Border = Callable[[Batch], Tensor]
"""An empty tensor like those that a micro-batch sends from one stage to the next."""
Result = TypeVar("Result")


Key = tuple[str, int, int]
"""What travels: forward or backward, from which stage, of which micro-batch."""


class _Embedded:
    """What the first layer is given: there a backward pass that should stop at the input can stop, for a while."""

    def __init__(self) -> None:
        self.made: Tensor | None = None
        self.given: Tensor | None = None

    @contextmanager
    def of(self, layer: nn.Module | None) -> Iterator[None]:
        """The context of a forward pass, in which the layer's input is cut off from what made it."""
        handle = layer.register_forward_pre_hook(self._cut) if layer is not None else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()

    def _cut(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self.made = inputs[0]
        self.given = inputs[0].detach().requires_grad_()
        return (self.given, *inputs[1:])

    def backward(self) -> None:
        """Go on where it stopped."""
        if self.made is not None and self.made.requires_grad and self.given is not None:
            torch.autograd.backward(self.made, self.given.grad)


class _Graph(NamedTuple):
    """Input and output of a stage's forward pass."""

    hidden: Tensor | None
    output: Tensor
    embedded: _Embedded


@dataclass
class _Passing:
    """The micro-batches of a step on this rank."""

    spans: Spans
    pulse: Pulse
    graphs: dict[tuple[int, int], _Graph] = field(default_factory=dict)
    """By stage and micro-batch, what was computed and waits for its backward pass."""
    unfinished: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    """What computes the gradients of weights, where those of inputs were computed first."""
    here: dict[Key, Tensor] = field(default_factory=dict)
    """From one stage of this rank to another."""
    arriving: dict[Key, tuple[Message, Tensor]] = field(default_factory=dict)
    leaving: dict[Key, Tensor] = field(default_factory=dict)
    sent: list[tuple[Message, int]] = field(default_factory=list)
    """With the rank that takes it."""


class Pipeline:
    """The stages of one rank."""

    def __init__(
        self,
        module: nn.Module,
        schedule: str,
        layers: Sequence[range],
        group: dist.ProcessGroup,
        border: Border,
        first_layer: nn.Module | None = None,
    ) -> None:
        self.module = module
        self.layers = list(layers)
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.members = dist.get_process_group_ranks(group)
        """Their numbers among all ranks."""
        self.in_hand = (0, 0)
        """The micro-batch and the stage of the forward pass that runs or ran last."""
        self._border = border
        self._first_layer = first_layer if splits_backward(schedule) else None
        """Where the first stage's backward pass is split, for want of an input that has a gradient."""
        self.program: Callable[[int], Program] = cache(lambda count: make_program(schedule, self.ranks, count))
        self._steps = cache(lambda count: self.program(count).with_transfers(self.rank))
        self._forward_steps = cache(
            lambda count: forward_program(schedule, self.ranks, count).with_transfers(self.rank)
        )
        placement = self.program(1).placement
        self.placement = placement
        self.stages = self.program(1).stages_of(self.rank)
        self.has_first, self.has_last = placement[0] == self.rank, placement[-1] == self.rank

    @property
    def own_layers(self) -> list[range]:
        """The layers of each of this rank's stages."""
        return [self.layers[stage] for stage in self.stages]

    def forward_backward(self, batches: Sequence[Batch], loss: Loss, pulse: Pulse | None = None) -> Spans:
        """Forward and backward passes of micro-batches; gradients add up in the parameters. Gives when they ran."""
        passing = _Passing(Spans(batches[0]["tokens_BT"].device, len(batches)), pulse or Pulse())
        for step in self._steps(len(batches)):
            if isinstance(step, Transfer):
                self._transfer(step, passing, batches)
            elif step.kind == "F":
                passing.pulse.enter("forward")
                self._forward(step, passing, batches, loss)
            else:
                passing.pulse.enter("backward")
                self._backward(step, passing)
        self._wait_for_sent(passing)
        passing.spans.finish()
        return passing.spans

    @torch.no_grad()
    def forward(
        self, batches: Sequence[Batch], finish: Callable[[Tensor, int], Result], pulse: Pulse | None = None
    ) -> list[Result]:
        """Forward passes only: what `finish` makes of the output of each micro-batch, on the rank of the last stage."""
        results: list[Result] = []
        passing = _Passing(Spans(batches[0]["tokens_BT"].device, len(batches)), pulse or Pulse())
        for step in self._forward_steps(len(batches)):
            if isinstance(step, Transfer):
                self._transfer(step, passing, batches)
                continue
            _, stage, micro = step
            hidden = self._arrived(("forward", stage - 1, micro), passing) if stage else None
            output = self.module(**batches[micro], hidden_BTC=hidden, layers=self.layers[stage])
            if stage + 1 == len(self.placement):
                results.append(finish(output, micro))
            else:
                self._pass_on(("forward", stage, micro), output, stage + 1, passing)
        self._wait_for_sent(passing)
        return results

    def _forward(self, action: Action, passing: _Passing, batches: Sequence[Batch], loss: Loss) -> None:
        _, stage, micro = action
        hidden = self._arrived(("forward", stage - 1, micro), passing) if stage else None
        if hidden is not None:
            hidden.requires_grad_()
        self.in_hand = micro, stage
        embedded = _Embedded()
        with passing.spans.record(action), embedded.of(self._first_layer if stage == 0 else None):
            output = self.module(**batches[micro], hidden_BTC=hidden, layers=self.layers[stage])
            if stage + 1 == len(self.placement):
                output = loss(output, micro)
        passing.graphs[stage, micro] = _Graph(hidden, output, embedded)
        if stage + 1 < len(self.placement):
            self._pass_on(("forward", stage, micro), output.detach(), stage + 1, passing)

    def _backward(self, action: Action, passing: _Passing) -> None:
        kind, stage, micro = action
        if kind == "W":
            with passing.spans.record(action):
                passing.unfinished.pop((stage, micro))()
            return
        gradient = None
        if stage + 1 < len(self.placement):
            gradient = self._arrived(("backward", stage + 1, micro), passing)
        graph = passing.graphs.pop((stage, micro))
        with passing.spans.record(action):
            if kind == "I":
                passing.unfinished[stage, micro] = self._split_backward(graph, gradient)
            elif graph.output.requires_grad:
                torch.autograd.backward(graph.output, gradient)
        hidden = graph.hidden
        if hidden is not None:
            assert hidden.grad is not None
            self._pass_on(("backward", stage, micro), hidden.grad, stage - 1, passing)
            hidden.grad = None

    def _split_backward(self, graph: _Graph, gradient: Tensor | None) -> Callable[[], None]:
        """Compute the gradient of the input; gives what computes those of the weights."""
        given = graph.embedded.given if graph.hidden is None else graph.hidden
        if not graph.output.requires_grad:
            # All of the first stage is frozen.
            return lambda: None
        if given is None:
            return lambda: torch.autograd.backward(graph.output, gradient)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        groups = backward_to_input(graph.output, gradient, given, parameters)

        def finish() -> None:
            backward_to_weights(parameters, groups)
            graph.embedded.backward()
            if isinstance(self.module, FSDPModule):
                fold_gradients(self.module)

        return finish

    def _pass_on(self, key: Key, value: Tensor, following: int, passing: _Passing) -> None:
        """To a stage of this rank at once; to another rank when the program says so."""
        if self.placement[following] == self.rank:
            passing.here[key] = value
        else:
            passing.leaving[key] = value.contiguous()

    def _arrived(self, key: Key, passing: _Passing) -> Tensor:
        """What another stage has made for one of this rank's."""
        if key in passing.here:
            return passing.here.pop(key)
        message, value = passing.arriving.pop(key)
        with passing.pulse.waiting_for(self.members[self.placement[key[1]]]):
            message.wait()
        return value

    def _wait_for_sent(self, passing: _Passing) -> None:
        for message, target in passing.sent:
            with passing.pulse.waiting_for(self.members[target]):
                message.wait()

    def _transfer(self, transfer: Transfer, passing: _Passing, batches: Sequence[Batch]) -> None:
        key = (transfer.kind, transfer.stage, transfer.micro)
        if transfer.source == self.rank:
            passing.sent = [sent for sent in passing.sent if not sent[0].is_completed()]
            message = send(passing.leaving.pop(key), self.group, transfer.target)
            passing.sent.append((message, transfer.target))
        else:
            value = self._border(batches[transfer.micro])
            passing.arriving[key] = receive(value, self.group, transfer.source), value
