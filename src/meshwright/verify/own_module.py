"""A module of the user's own: `module:build`, found from the current directory, and the loop that it is proved in.

    build()                the model: a function without arguments, or a class, that gives an nn.Module
    inputs(seed, samples)  optional: a tuple or dict of tensors whose first dimension is the sample
    loss(model, inputs)    optional, with `inputs`: calls the model and gives the mean over the samples

Without the last two the model is a language model: token ids in, logits out; ids are drawn below the number of rows
of its first embedding, and the loss is the cross-entropy of the next token.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from meshwright.errors import UserError
from meshwright.models.float8 import MULTIPLE, Recipe
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.precision import Float8, Precision
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.training.loss import cross_entropy
from meshwright.training.precision import COMPUTE
from meshwright.verify.dropout import NothingDropped

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
    except Exception as error:
        raise UserError(f"'{name}' cannot be imported: {_told(error)}") from error
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
    needed = [one.name for one in _parameters(build) if one.default is one.empty and one.kind not in _GATHERING]
    if needed:
        raise UserError(f"{place} cannot be called without arguments ({', '.join(needed)}); give each a default")
    try:
        model = build()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{place} fails: {_told(error)}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"{place} gives {type(model).__name__}, not an nn.Module; return the model")
    return model


_GATHERING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(build: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(build).parameters.values())
    except ValueError:
        return []


def _told(error: Exception) -> str:
    """An error of the user's own code, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = "" if isinstance(error, SyntaxError) else f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return f"{type(error).__name__}: {error}{where}"


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


def _multiply_in_float64(model: nn.Module) -> None:
    """Let experts of transformers take plain products: the grouped ones that it prefers know no float64."""
    for module in model.modules():
        if getattr(module, "_can_set_experts_implementation", lambda: False)():
            module.set_experts_implementation("eager")  # type: ignore[operator]


class OwnLoop:
    """A training loop around a user's module, as docs/own_loop.md has it: accumulation, clipping, AdamW."""

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
        self.stored = stored = torch.float64 if compute == torch.float64 else torch.float32
        self.model = self.source.build().to(stored).train()
        if stored == torch.float64:
            _multiply_in_float64(self.model)
        for module in self.model.modules():
            if isinstance(module, _DropoutNd):
                # Every rank would drop other things than one device does.
                module.eval()
        float8 = Float8(Recipe(smallest=MULTIPLE)) if precision == "fp8" else None
        policy = Precision(stored, compute, stored, stored, float8)
        self.parallel = parallelize(self.model, strategy, precision=policy)
        # A gradient that is zero but for rounding (a bias before a BatchNorm) must not become a step of AdamW.
        self.optimizer = self.parallel.optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-6)

    def __call__(self, number: int) -> tuple[float, float]:
        """Train one step; gives the loss of the whole batch and the norm of its gradient."""
        whole = self.source.inputs(1000 * self.seed + number, self.samples)
        strategy = self.parallel.strategy
        together = self.samples // self.micro_steps
        own = strategy.own_samples(self.parallel.data_rank, together)
        starts = [index * together for index in range(self.micro_steps)]
        mine = [self._rows(whole, slice(first + own.start, first + own.stop)) for first in starts]
        joined = tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *mine)
        with NothingDropped():
            total = self.parallel.backward(self.source.loss, joined, micro_steps=self.micro_steps)
        norm = self.parallel.step(self.optimizer, clip=self.clip)
        return float(total), float(norm)

    def _rows(self, inputs: Inputs, rows: slice) -> Inputs:
        """Some samples of a batch; numbers are in the dtype of its weights."""
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
