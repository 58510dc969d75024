"""A module of the user's own: `module:build`, found from the current directory, and the loop that it is proved in.

    build()                the model: a function without arguments, or a class, that gives an nn.Module
    inputs(seed, samples)  optional: a tuple or dict of tensors whose first dimension is the sample
    loss(model, inputs)    optional, with `inputs`: calls the model and gives the mean over the samples

Without the last two the model is a language model: token ids in, logits out; ids are drawn below the number of rows
of its first embedding, and the loss is the cross-entropy of the next token.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from meshwright.errors import UserError
from meshwright.models.float8 import MULTIPLE, Recipe
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.precision import Float8, Precision
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.training.loss import cross_entropy
from meshwright.training.precision import COMPUTE

Inputs = Any
"""A tuple or dict; tensors in it have one row a sample."""


@dataclass(frozen=True)
class OwnModule:
    """What a user's module offers to a proof."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]
    loss: Callable[[Any, Inputs], Tensor]


def find(place: str, tokens: int) -> OwnModule:
    """What `module:build` names; sequences of a language model get that many tokens."""
    name, _, function = place.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"'{name}' imports {error.name}, which is not installed here") from None
        raise UserError(
            f"there is no module '{name}' here; start where {name.replace('.', '/')}.py lies, or install it"
        ) from None
    if not callable(getattr(module, function, None)):
        raise UserError(f"{name} has no function '{function}'; define one without arguments that gives an nn.Module")
    build = getattr(module, function)
    inputs, loss = (getattr(module, part, None) for part in ("inputs", "loss"))
    if (inputs is None) != (loss is None):
        given, missing = ("inputs", "loss(model, inputs)") if loss is None else ("loss", "inputs(seed, samples)")
        raise UserError(f"{name} defines {given} and not {missing}; define both, or neither for a language model")
    if inputs is None or loss is None:
        inputs, loss = _LanguageInputs(place, build, tokens), language_loss
    return OwnModule(lambda: _build(place, build), inputs, loss)


def _build(place: str, build: Callable[[], Any]) -> nn.Module:
    try:
        model = build()
    except TypeError as error:
        raise UserError(f"{place} cannot be called without arguments ({error}); give each a default") from None
    if not isinstance(model, nn.Module):
        raise UserError(f"{place} gives {type(model).__name__}, not an nn.Module; return the model")
    return model


class _LanguageInputs:
    """Draws token ids for a language model."""

    def __init__(self, place: str, build: Callable[[], Any], tokens: int) -> None:
        self.place = place
        self.build = build
        self.tokens = tokens
        self.vocabulary = 0

    def __call__(self, seed: int, samples: int) -> Inputs:
        if not self.vocabulary:
            embeddings = (m for m in _build(self.place, self.build).modules() if isinstance(m, nn.Embedding))
            self.vocabulary = next((embedding.num_embeddings for embedding in embeddings), 0)
        if not self.vocabulary:
            raise UserError(
                f"{self.place} has no nn.Embedding and so is no language model; "
                "define inputs(seed, samples) and loss(model, inputs) beside it"
            )
        draw = torch.Generator().manual_seed(seed)
        return (torch.randint(self.vocabulary, (samples, self.tokens + 1), generator=draw),)


def language_loss(model: Any, inputs: Inputs) -> Tensor:
    """The mean cross-entropy of the next token; logits may be an attribute of what the model gives."""
    (ids_BT,) = inputs
    output = model(ids_BT[:, :-1])
    return cross_entropy(getattr(output, "logits", output), model.own_tokens(ids_BT[:, 1:]))


class OwnLoop:
    """A training loop around a user's module, as docs/strategies.md has it: accumulation, clipping, AdamW."""

    def __init__(
        self,
        world: World,
        place: str,
        strategy: Strategy,
        *,
        precision: str,
        samples: int,
        micro_steps: int,
        tokens: int,
        clip: float,
        seed: int,
    ) -> None:
        self.world, self.samples, self.micro_steps, self.clip, self.seed = world, samples, micro_steps, clip, seed
        self.source = find(place, tokens)
        torch.manual_seed(seed)
        compute = COMPUTE[precision]
        self.stored = torch.float64 if compute == torch.float64 else torch.float32
        self.model = self.source.build().to(self.stored).train()
        for module in self.model.modules():
            if isinstance(module, _DropoutNd):
                # Every rank would drop other things than one device does.
                module.eval()
        float8 = Float8(Recipe(smallest=MULTIPLE)) if precision == "fp8" else None
        policy = Precision(self.stored, compute, self.stored, self.stored, float8)
        self.parallel = parallelize(self.model, strategy, precision=policy)
        self.optimizer = self.parallel.optimizer(torch.optim.AdamW, lr=1e-2)

    def __call__(self, number: int) -> tuple[float, float]:
        """Train one step; gives the loss of the whole batch and the norm of its gradient."""
        whole = self.source.inputs(1000 * self.seed + number, self.samples)
        strategy, mesh = self.parallel.strategy, self.parallel.mesh
        together = self.samples // self.micro_steps
        own = strategy.own_samples(self.parallel.data_rank, together)
        starts = [index * together for index in range(self.micro_steps)]
        mine = [self._rows(whole, slice(first + own.start, first + own.stop)) for first in starts]
        total = torch.zeros((), dtype=torch.float64)
        if self.parallel.pipeline is None:
            for index, inputs in enumerate(mine):
                with self.parallel.micro_step(last=index == self.micro_steps - 1):
                    loss = self.source.loss(self.parallel, inputs) * (self.parallel.weight / self.micro_steps)
                    loss.backward()
                total += loss.detach().double()
        else:
            self._through_pipeline(mine, total)
        norm = self.parallel.clip_grad_norm_(self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if mesh is not None:
            dist.all_reduce(total)
            total /= strategy.dp * strategy.cp * strategy.tp
        return float(total), float(norm)

    def _through_pipeline(self, mine: list[Inputs], total: Tensor) -> None:
        """As a language model: what else a loss may need cannot be had from the last stage's output."""
        ids = [next(iter(inputs.values() if isinstance(inputs, dict) else inputs)) for inputs in mine]

        def loss(logits: Tensor, index: int) -> Tensor:
            found = cross_entropy(logits, self.parallel.own_tokens(ids[index][:, 1:]))
            found = found * (self.parallel.weight / len(ids))
            total.add_(found.detach().double())
            return found

        self.parallel.forward_backward([{"tokens_BT": ids_BT[:, :-1]} for ids_BT in ids], loss)

    def _rows(self, inputs: Inputs, rows: slice) -> Inputs:
        """Some samples of a batch; numbers are in the model's dtype."""
        if isinstance(inputs, dict):
            return {name: self._row(name, value, rows) for name, value in inputs.items()}
        return tuple(self._row(str(place), value, rows) for place, value in enumerate(inputs))

    def _row(self, name: str, value: Any, rows: slice) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 0 or value.shape[0] != self.samples:
            raise UserError(
                f"inputs(seed, {self.samples}) gives '{name}' with shape {tuple(value.shape)}; "
                f"its first dimension must be the {self.samples} samples"
            )
        return value[rows].to(self.stored) if value.is_floating_point() else value[rows]
