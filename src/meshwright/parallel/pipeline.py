"""The runtime of a pipeline: this rank's part of a program of forward passes, backward passes and transfers.

A rank has one module, the model with the layers of other ranks removed; `Stages` knows how one stage of it is run.
Micro-batches are known to all ranks; only what goes from one layer to the next travels, and its gradient.
Transfers begin as early as the program allows and are waited for when their content is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshwright.comm.transfers import Message, receive, send
from meshwright.parallel.spans import Spans
from meshwright.pulse import Pulse
from meshwright.schedules import Action, Program, Transfer, forward_program, make_program, splits_backward
from meshwright.torch_private import backward_to_input, backward_to_weights
from meshwright.torch_private_fsdp import fold_gradients

Batch = Mapping[str, Any]
"""The arguments of the model for a micro-batch."""
Loss = Callable[[Any, int], Tensor]
"""From the model's output and the number of the micro-batch to what gradients are taken of."""
Result = TypeVar("Result")


Key = tuple[str, int, int]
"""What travels: forward or backward, from which stage, of which micro-batch."""


class Call(NamedTuple):
    """What the model is called with for a micro-batch."""

    inputs: tuple[Any, ...]
    options: Mapping[str, Any]

    @property
    def device(self) -> torch.device:
        """Where the micro-batch lies."""
        tensors = (value for value in tree_leaves((self.inputs, dict(self.options))) if isinstance(value, Tensor))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))


def as_call(batch: Batch | Call) -> Call:
    """A micro-batch as the call that it stands for."""
    return batch if isinstance(batch, Call) else Call((), batch)


class Shared(NamedTuple):
    """A parameter that several stages use."""

    name: str
    stages: tuple[int, ...]


class Stages(Protocol):
    """A model that was cut into stages, on one rank."""

    layers: list[range]
    """Of each stage."""
    shared: list[Shared]
    everywhere: set[str]
    """Modules that run on every stage, with an output that counts on one alone."""

    @property
    def first_layer(self) -> nn.Module | None:
        """The first of all, where it is on this rank."""

    def run(self, stage: int, call: Call, hidden: Tensor | None) -> Any:
        """What the stage makes of what the one before it gave; the last one gives the model's output."""

    def border(self, stage: int, call: Call) -> Tensor:
        """An empty tensor like the one that goes from this stage to the next."""

    def check_wrapped(self, modules: Sequence[nn.Module], wrap: str) -> None:
        """Refuse to gather together what is on several stages."""


def is_number(value: Any) -> bool:
    """Whether it is a tensor that could have a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point()


class _Embedded:
    """What the first layer is given: there a backward pass that should stop at the input can stop, for a while."""

    def __init__(self) -> None:
        self.made: Tensor | None = None
        self.given: Tensor | None = None

    @contextmanager
    def of(self, layer: nn.Module | None) -> Iterator[None]:
        """The context of a forward pass, in which the layer's input is cut off from what made it."""
        handle = layer.register_forward_pre_hook(self._cut, with_kwargs=True) if layer is not None else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()

    def _cut(self, _: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        leaves, form = tree_flatten((inputs, options))
        numbers = [leaf for leaf in leaves if is_number(leaf)]
        self.made = next((leaf for leaf in numbers if leaf.requires_grad), numbers[0])
        self.given = self.made.detach().requires_grad_()
        return tree_unflatten([self.given if leaf is self.made else leaf for leaf in leaves], form)

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
        cut: Stages,
        group: dist.ProcessGroup,
    ) -> None:
        self.module = module
        self.cut = cut
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.members = dist.get_process_group_ranks(group)
        """Their numbers among all ranks."""
        self.in_hand = (0, 0)
        """The micro-batch and the stage of the forward pass that runs or ran last."""
        self._splits_backward = splits_backward(schedule)
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
        return [self.cut.layers[stage] for stage in self.stages]

    def forward_backward(self, batches: Sequence[Batch | Call], loss: Loss, pulse: Pulse | None = None) -> Spans:
        """Forward and backward passes of micro-batches; gradients add up in the parameters. Gives when they ran."""
        calls = [as_call(batch) for batch in batches]
        passing = _Passing(Spans(calls[0].device, len(calls)), pulse or Pulse())
        for step in self._steps(len(calls)):
            if isinstance(step, Transfer):
                self._transfer(step, passing, calls)
            elif step.kind == "F":
                passing.pulse.enter("forward")
                self._forward(step, passing, calls, loss)
            else:
                passing.pulse.enter("backward")
                self._backward(step, passing)
        self._wait_for_sent(passing)
        passing.spans.finish()
        return passing.spans

    @torch.no_grad()
    def forward(
        self, batches: Sequence[Batch | Call], finish: Callable[[Any, int], Result], pulse: Pulse | None = None
    ) -> list[Result]:
        """Forward passes only: what `finish` makes of the output of each micro-batch, on the rank of the last stage."""
        results: list[Result] = []
        calls = [as_call(batch) for batch in batches]
        passing = _Passing(Spans(calls[0].device, len(calls)), pulse or Pulse())
        for step in self._forward_steps(len(calls)):
            if isinstance(step, Transfer):
                self._transfer(step, passing, calls)
                continue
            _, stage, micro = step
            hidden = self._arrived(("forward", stage - 1, micro), passing) if stage else None
            output = self.cut.run(stage, calls[micro], hidden)
            if stage + 1 == len(self.placement):
                results.append(finish(output, micro))
            else:
                self._pass_on(("forward", stage, micro), output, stage + 1, passing)
        self._wait_for_sent(passing)
        return results

    def _forward(self, action: Action, passing: _Passing, calls: Sequence[Call], loss: Loss) -> None:
        _, stage, micro = action
        hidden = self._arrived(("forward", stage - 1, micro), passing) if stage else None
        if hidden is not None:
            hidden.requires_grad_()
        self.in_hand = micro, stage
        embedded = _Embedded()
        # Where the first stage's backward pass is split, for want of an input that has a gradient.
        split_at = self.cut.first_layer if self._splits_backward and stage == 0 else None
        with passing.spans.record(action), embedded.of(split_at):
            output = self.cut.run(stage, calls[micro], hidden)
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

    def _transfer(self, transfer: Transfer, passing: _Passing, calls: Sequence[Call]) -> None:
        key = (transfer.kind, transfer.stage, transfer.micro)
        if transfer.source == self.rank:
            passing.sent = [sent for sent in passing.sent if not sent[0].is_completed()]
            message = send(passing.leaving.pop(key), self.group, transfer.target)
            passing.sent.append((message, transfer.target))
        else:
            # A gradient is like what it is the gradient of: what the stage before gave.
            before = transfer.stage if transfer.kind == "forward" else transfer.stage - 1
            value = self.cut.border(before, calls[transfer.micro])
            passing.arriving[key] = receive(value, self.group, transfer.source), value
