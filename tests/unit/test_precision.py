"""Precision: what is stored stays in its dtype, the model's code reads and computes in another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from meshwright.config import load_config
from meshwright.models.float8 import Recipe
from meshwright.models.initialize import build
from meshwright.models.mixture import mixtures
from meshwright.models.reads import around_forward
from meshwright.models.spec import ModelSpec
from meshwright.parallel.own_loop import Parallel
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.precision import Float8, Precision, not_in_float8
from meshwright.training.precision import precision_of
from tests.unit.specs import SPECS, small

BF16 = Precision(param=torch.bfloat16)
BALANCED = SPECS["experts that are balanced"]


def tokens(length: int = 12) -> Tensor:
    return torch.randint(37, (2, length), generator=torch.Generator().manual_seed(2))


def under(precision: Precision | None, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Parallel:
    return parallelize(build(spec, seed=1, dtype=dtype), "dp=1", precision=precision)


def holders(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Every module that stores a parameter, with its name there and what is stored."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def assert_all_stored(model: nn.Module) -> None:
    """Whoever reads a parameter now gets what is stored."""
    for module, name, parameter in holders(model):
        assert getattr(module, name) is parameter
        assert parameter.dtype == torch.float32


@pytest.mark.parametrize("name", ["plain", "gpt2-like", "qk norm", "shared experts", "gelu experts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_and_gradients_stay_float32_while_everything_between_is_not(name: str, dtype: torch.dtype) -> None:
    model = under(Precision(param=dtype), SPECS[name])
    seen: dict[str, torch.dtype] = {}
    for path, module in model.module.named_modules():
        module.register_forward_hook(lambda _, __, output, path=path: seen.update({path: output.dtype}))
    logits = model(tokens())
    assert logits.dtype == dtype
    assert len(seen) > 10
    assert set(seen.values()) == {dtype}
    logits.float().square().mean().backward()
    for path, parameter in model.module.named_parameters():
        assert parameter.dtype == torch.float32, path
        assert parameter.grad is not None, path
        assert parameter.grad.dtype == torch.float32, path
    assert_all_stored(model.module)


@pytest.mark.parametrize("name", ["plain", "qk norm", "some biases", "layernorm"])
def test_the_numbers_are_those_of_a_model_in_bfloat16(name: str) -> None:
    mixed, pure = under(BF16, SPECS[name]), build(SPECS[name], seed=1).bfloat16()
    ours, theirs = mixed(tokens()), pure(tokens())
    assert torch.equal(ours, theirs)
    ours.float().square().mean().backward()
    theirs.float().square().mean().backward()
    for (path, stored), other in zip(mixed.module.named_parameters(), pure.parameters(), strict=True):
        # Sums over tokens are not rounded: embeddings and biases differ by what bfloat16 loses of them.
        largest = float(other.grad.abs().max())
        torch.testing.assert_close(stored.grad, other.grad.float(), rtol=2e-2, atol=1e-2 * largest, msg=path)


def test_gradients_of_several_passes_are_added_in_float32() -> None:
    model = under(BF16, small())
    weight = model.module.lm_head.weight
    for _ in range(300):
        # A hundredth more each time is lost in bfloat16 after about a hundred times.
        (model(tokens(1)).float().sum() * 1e-2).backward()
    once = under(BF16, small())
    (once(tokens(1)).float().sum() * 1e-2).backward()
    torch.testing.assert_close(weight.grad, 300 * once.module.lm_head.weight.grad, rtol=1e-3, atol=1e-6)


def test_stored_and_read_dtypes_may_be_any() -> None:
    model = under(Precision(torch.float64, torch.float32, torch.float64, torch.float64), small(), torch.float64)
    assert model(tokens()).dtype == torch.float32
    model(tokens()).sum().backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_precision_all_stays_as_the_model_is(dtype: torch.dtype) -> None:
    model = under(None, BALANCED, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert model.precision == Precision(dtype, dtype, dtype, None)
    assert not model.precision.mixed
    assert not any(module._forward_pre_hooks for module in model.module.modules()), "forward passes cost nothing more"
    seen: list[Tensor] = []
    model.module.lm_head.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    assert model(tokens()).dtype == dtype
    assert seen[0] is model.module.lm_head.weight
    assert {mixture.expert_bias.dtype for mixture in mixtures(model.module)} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_buffers_get_their_dtype_and_counts_stay_whole(dtype: torch.dtype) -> None:
    for param in (torch.float32, torch.bfloat16):
        model = under(Precision(param=param, buffer=dtype), BALANCED)
        assert model(tokens()).dtype == param
        for mixture in mixtures(model.module):
            assert mixture.expert_bias.dtype == dtype
            assert mixture.expert_load.dtype == torch.int64


def test_what_does_not_multiply_in_8_bits_is_named_behind_wrappers_too() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    around_forward(model[1], lambda forward, x: forward(x))
    found = not_in_float8(model, Float8(Recipe(smallest=16)))
    assert list(found) == ["1"], "the second one is too small"


class Looks(nn.Linear):
    """A layer of somebody else's model, which tells what it sees of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.looked = self.weight.dtype, next(self.parameters()).dtype, self.state_dict()["weight"].dtype
        return super().forward(x.to(self.weight.dtype))


def test_a_foreign_layer_reads_in_the_dtype_to_compute_in_and_whoever_asks_for_parameters_gets_what_is_stored() -> None:
    layer = Looks(4, 3)
    model = parallelize(nn.Sequential(layer), "dp=1", precision=BF16)
    assert model(torch.ones(2, 4)).dtype == torch.bfloat16
    assert layer.looked == (torch.bfloat16, torch.float32, torch.float32)
    assert_all_stored(model.module)


@pytest.mark.parametrize("where", ["model.embed_tokens", "model.layers.1", "model.layers.1.mlp.experts", "lm_head"])
def test_reading_after_a_pass_that_raised_gives_what_is_stored(where: str) -> None:
    model = under(BF16, BALANCED)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    hook = model.module.get_submodule(where).register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(tokens())
    assert_all_stored(model.module)
    hook.remove()
    assert model(tokens()).dtype == torch.bfloat16
    with pytest.raises(IndexError):
        model(tokens() + 37)
    assert_all_stored(model.module)


def test_an_update_between_passes_is_read_by_the_next() -> None:
    model = under(BF16, small())
    before = model(tokens())
    with torch.no_grad():
        model.module.lm_head.weight.mul_(2)
    assert torch.equal(model(tokens()), before * 2)
    model.module.lm_head.weight = nn.Parameter(torch.zeros(37, 16))
    assert not model(tokens()).any()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], Precision()),
        (["train.precision=float64"], Precision(*(torch.float64,) * 4)),
        (["train.precision=bf16"], BF16),
        (["train.precision=fp16"], Precision(param=torch.float16)),
        (["train.precision=bf16", "precision.reduce=bf16"], Precision(param=torch.bfloat16, reduce=torch.bfloat16)),
        (["train.precision=bf16", "precision.buffer=bf16"], Precision(param=torch.bfloat16, buffer=torch.bfloat16)),
        (["precision.param=bf16"], BF16),
    ],
)
def test_settings_mean_their_dtypes(settings: list[str], expected: Precision) -> None:
    assert precision_of(load_config(None, ["train.precision=float32", *settings])) == expected
