"""A loss that calls the model itself, `loss_of(model, micro_batch)`, over the stages of a pipeline.

Each rank asks it first what it calls the model with, and leaves it there; the rank of the last stage calls it once
more, with the output at hand, for the loss. Both times it draws the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import UserError
from meshwright.parallel.pipeline import Call

LossOf = Callable[[Any, Any], Tensor]
"""From the model and a micro-batch to what gradients are taken of; calls the model once."""


class _Called(BaseException):
    """Leaves the loss where it calls the model; no handler of its own takes it."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call


class _StandIn:
    """Stands for the model in a loss: everything but a call is the model's."""

    def __init__(self, model: Any, answer: Callable[[Call], Any]) -> None:
        self._model = model
        self._answer = answer

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self._answer(Call(inputs, options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class OwnLoss:
    """The loss of some micro-batches under a model that is on several ranks."""

    def __init__(self, model: Any, loss_of: LossOf, micro_batches: Sequence[Any]) -> None:
        self._model = model
        self._loss_of = loss_of
        self._micro_batches = micro_batches
        self._states: list[Tensor] = []
        self.found: list[Tensor] = []
        """The losses so far, without their graphs."""
        self.calls = [self._ask(micro) for micro in micro_batches]
        """What the model is called with."""

    def __call__(self, output: Any, index: int) -> Tensor:
        """The loss of a micro-batch, given the model's output."""
        answers = [output]

        def answer(_: Call) -> Any:
            if not answers:
                raise UserError(
                    "the loss calls the model twice for one micro-batch, which a pipeline has one turn for; "
                    "call it once, with both inputs in one batch, or use pp=1"
                )
            return answers.pop()

        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self._states[index])
            loss = self._loss_of(_StandIn(self._model, answer), self._micro_batches[index])
        self.found.append(loss.detach())
        return loss

    def _ask(self, micro_batch: Any) -> Call:
        def answer(call: Call) -> Any:
            raise _Called(call)

        self._states.append(torch.get_rng_state())
        try:
            self._loss_of(_StandIn(self._model, answer), micro_batch)
        except _Called as called:
            return called.call
        raise UserError("the loss does not call the model that it is given; call that one, and not another name of it")
