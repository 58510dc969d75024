"""Recompute changes what is kept, not what is computed: gradients to the last bit, loads once, fewer bytes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.models.decoder import Decoder
from meshwright.models.initialize import build
from meshwright.models.mixture import mixtures
from meshwright.models.spec import ModelSpec
from meshwright.parallel.own_loop import Parallel
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.precision import Precision
from meshwright.training.loss import cross_entropy
from tests.unit.specs import SPECS, small

KINDS = ["full", "selective", "first:1"]
CASES = {name: SPECS[name] for name in ("plain", "gpt2-like", "qk norm", "gelu experts", "experts that are balanced")}
CASES["sliding window"] = small(sliding_window=5)
CASES["dropout"] = small(dropout=0.3)
FOUR_LAYERS = {
    name: SPECS[name].model_copy(update={"num_hidden_layers": 4})
    for name in ("plain", "as many key-value heads", "gpt2-like", "shared experts")
}
DEAR = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
BF16 = Precision(param=torch.bfloat16)


def under(recompute: str, spec: ModelSpec, precision: Precision | None = None) -> Parallel:
    model = build(spec.model_copy(update={"initializer_range": 0.2}), seed=3)
    return parallelize(model.train(), f"recompute={recompute}", precision=precision)


def tokens(samples: int = 2, length: int = 17) -> Tensor:
    return torch.randint(37, (samples, length), generator=torch.Generator().manual_seed(5))


def backward(model: Parallel, **options: Tensor) -> Tensor:
    batch = tokens()
    loss = cross_entropy(model(batch[:, :-1], **options), batch[:, 1:])
    loss.backward()
    return loss.detach()


def assert_same_gradients(one: Parallel, other: Parallel) -> None:
    for (name, ours), theirs in zip(one.module.named_parameters(), other.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None, name
        assert torch.equal(ours.grad, theirs.grad), name


class Storages(TorchDispatchMode):
    """Remembers the memory that operations make, for as long as somebody keeps it; counts what is dear to compute."""

    def __init__(self, model: Parallel) -> None:
        super().__init__()
        self._weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._seen: dict[int, weakref.ref[Any]] = {}
        self.dear: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: object, inputs: Any = (), options: dict[str, Any] | None = None
    ) -> Any:
        if operation in DEAR:
            self.dear[str(operation)] += 1
        result = operation(*inputs, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._seen[storage.data_ptr()] = weakref.ref(storage)
        return result

    def kept_bytes(self) -> int:
        held = (reference() for place, reference in self._seen.items() if place not in self._weights)
        return sum(storage.nbytes() for storage in held if storage is not None)


def calls_of_layers(model: Decoder) -> list[int]:
    """How often each layer runs from now on; a list that fills itself."""
    calls = [0] * len(model.model.layers)

    def count(layer: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[layer] += 1

        return hook

    for layer, block in enumerate(model.model.layers.values()):
        block.input_layernorm.register_forward_pre_hook(count(layer))
    return calls


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recompute", KINDS)
def test_gradients_are_the_same_to_the_last_bit(recompute: str, case: str) -> None:
    plain, again = under("none", CASES[case]), under(recompute, CASES[case])
    samples = torch.tensor([3, 2**40])
    assert torch.equal(backward(plain, samples_B=samples), backward(again, samples_B=samples))
    assert_same_gradients(again, plain)


@pytest.mark.parametrize("recompute", KINDS)
def test_masks_of_dropout_that_are_drawn_are_drawn_once(recompute: str) -> None:
    models = under("none", CASES["dropout"]), under(recompute, CASES["dropout"])
    states = []
    for model in models:
        torch.manual_seed(8)
        backward(model)
        states.append(torch.get_rng_state())
    assert_same_gradients(models[1], models[0])
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("case", ["plain", "gpt2-like", "gelu experts"])
@pytest.mark.parametrize("recompute", KINDS)
def test_gradients_in_bfloat16_are_the_same_to_the_last_bit(recompute: str, case: str) -> None:
    plain, again = under("none", CASES[case], BF16), under(recompute, CASES[case], BF16)
    samples = torch.tensor([3, 2**40])
    assert torch.equal(backward(plain, samples_B=samples), backward(again, samples_B=samples))
    assert_same_gradients(again, plain)
    # A repeated pass ends as soon as it has what it needs; what stands before the parameters is gone all the same.
    for module in again.module.modules():
        assert not module._parameters.keys() & module.__dict__.keys()


@pytest.mark.parametrize("recompute", ["none", *KINDS])
def test_load_of_experts_is_counted_once(recompute: str) -> None:
    spec = CASES["experts that are balanced"]
    plain, again = under("none", spec), under(recompute, spec)
    for model in (plain, again):
        backward(model)
        backward(model)
    for ours, theirs in zip(mixtures(again.module), mixtures(plain.module), strict=True):
        assert int(ours.expert_load.sum()) == 2 * 2 * 16 * spec.experts.num_experts_per_tok
        assert torch.equal(ours.expert_load, theirs.expert_load)
        assert not ours.repeating


@pytest.mark.parametrize(
    ("recompute", "expected"), [("none", [1, 1]), ("full", [2, 2]), ("selective", [2, 2]), ("first:1", [2, 1])]
)
def test_the_layers_that_run_again_are_those_asked_for(recompute: str, expected: list[int]) -> None:
    model = under(recompute, small())
    calls = calls_of_layers(model.module)
    backward(model)
    assert calls == expected


@pytest.mark.parametrize("recompute", KINDS)
def test_nothing_runs_again_where_nothing_is_differentiated(recompute: str) -> None:
    model, plain = under(recompute, small()), under("none", small())
    calls = calls_of_layers(model.module)
    with torch.no_grad():
        assert torch.equal(model(tokens()), plain(tokens()))
    assert calls == [1, 1]


def cost(recompute: str, spec: ModelSpec) -> tuple[int, Counter[str], Counter[str]]:
    """Bytes kept from a forward pass, and the dear operations of the forward and of the backward pass."""
    model, batch = under(recompute, spec), tokens(4, 21)
    with Storages(model) as storages:
        loss = cross_entropy(model(batch[:, :-1]), batch[:, 1:])
        kept, forward = storages.kept_bytes(), storages.dear.copy()
        loss.backward()
    return kept, forward, storages.dear - forward


@pytest.mark.parametrize("name", FOUR_LAYERS)
def test_fewer_activations_are_kept_the_more_is_recomputed(name: str) -> None:
    kept = {recompute: cost(recompute, FOUR_LAYERS[name])[0] for recompute in ("none", "first:1", "first:3", *KINDS)}
    assert kept["none"] > kept["selective"] > kept["full"]
    assert kept["none"] > kept["first:1"] > kept["first:3"] > kept["full"]


def test_a_recomputed_layer_keeps_its_input_only() -> None:
    full = {layers: cost("full", small(num_hidden_layers=layers))[0] for layers in (4, 5, 7)}
    an_input = 4 * 20 * 16 * 4  # samples, tokens, channels, bytes
    assert full[5] - full[4] == an_input
    assert full[7] - full[4] == 3 * an_input


@pytest.mark.parametrize("name", FOUR_LAYERS)
def test_selective_computes_nothing_dear_again(name: str) -> None:
    _, forward, backward_ = cost("none", FOUR_LAYERS[name])
    assert cost("selective", FOUR_LAYERS[name])[1:] == (forward, backward_)
    _, same, more = cost("full", FOUR_LAYERS[name])
    assert same == forward
    assert more > backward_


def test_full_computes_all_but_the_last_product_again() -> None:
    _, _, plain = cost("none", FOUR_LAYERS["plain"])
    # Seven matrices in each of the four layers; a pass ends before the last one, whose result nobody needs.
    assert (cost("full", FOUR_LAYERS["plain"])[2] - plain)["aten.mm.default"] == 4 * 6
    assert (cost("first:1", FOUR_LAYERS["plain"])[2] - plain)["aten.mm.default"] == 6


class Foreign(nn.Module):
    """A model of somebody else, whose layers draw random numbers and are called by keyword."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

        def forward(self, x: Tensor, *, shift: float) -> Tensor:
            return x + self.dropout(torch.tanh(self.linear(x) + shift))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, shift=0.1 * number)
        return x


@pytest.mark.parametrize("recompute", KINDS)
def test_layers_of_other_models_draw_the_same_numbers_again(recompute: str) -> None:
    models = []
    for strategy in ("dp=1", f"recompute={recompute}"):
        torch.manual_seed(2)
        models.append(parallelize(Foreign(), strategy))
        models[-1](torch.ones(4, 8)).square().sum().backward()
    assert_same_gradients(models[1], models[0])
    with torch.no_grad():
        expected, found = (model.eval()(torch.ones(4, 8)) for model in models)
    assert torch.equal(found, expected)


class Scaled(nn.Module):
    """A layer with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x * self.scale)


class ScaledLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("recompute", KINDS)
def test_layers_that_hold_parameters_themselves_read_them_as_before_when_repeated(recompute: str) -> None:
    gradients = []
    for kind in ("none", recompute):
        torch.manual_seed(0)
        parallel = parallelize(ScaledLayers(), f"recompute={kind}", precision=BF16)
        parallel(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
        gradients.append([parameter.grad for parameter in parallel.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert plain is not None
        assert again is not None
        assert torch.equal(plain, again)
