"""Linears in 8 bits: as exact as e4m3 can be, forward and back; what is not suited stays as it is, and is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models import float8
from meshwright.models.float8 import E4M3, E5M2, Recipe, cast, float8_linear, turn
from meshwright.parallel.torch_releases import RELEASE

RECIPES = [Recipe(scaling, gradient, 16) for scaling in ("rowwise", "tensorwise") for gradient in (True, False)]
ROWWISE, TENSORWISE = RECIPES[0], RECIPES[2]
NAMES = {
    recipe: f"{recipe.scaling}, weight gradient in {8 if recipe.weight_gradient else 16} bits" for recipe in RECIPES
}
with_recipes = pytest.mark.parametrize("recipe", RECIPES, ids=NAMES.values())

# A value is rounded by up to 1/16 of itself (e5m2: 1/8), evenly spread: 2.6% (5.2%) of it in the root mean square, and
# both factors of a product are rounded.
BOUND = 0.04
OF_GRADIENTS = {"rowwise": (0.02, 0.04), "tensorwise": (0.045, 0.065)}


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def gradients_of(
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor], *inputs: Tensor, gradient: Tensor
) -> list[Tensor]:
    """The output, and the gradients of all inputs."""
    held = [value.detach().clone().requires_grad_() for value in inputs]
    y = linear(*held)
    y.backward(gradient.to(y.dtype))
    return [y.detach(), *(value.grad for value in held if value.grad is not None)]


@with_recipes
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inner", "outer"), [(64, 128, 96), (16, 16, 512), (160, 512, 16)])
def test_output_and_gradients_are_as_exact_as_8_bits_can_be(
    recipe: Recipe, stored: torch.dtype, tokens: int, inner: int, outer: int
) -> None:
    x, weight = draw(2, tokens // 2, inner), draw(outer, inner, seed=1, scale=0.02).to(stored)
    bias, gradient = draw(outer, seed=2, scale=0.02), draw(2, tokens // 2, outer, seed=3, scale=1e-7)
    exact = gradients_of(F.linear, x.double(), weight.double(), bias.double(), gradient=gradient)
    found = gradients_of(partial(float8_linear, recipe=recipe), x, weight, bias, gradient=gradient)
    assert [value.dtype for value in found] == [torch.bfloat16, torch.bfloat16, stored, torch.bfloat16]
    assert [value.shape for value in found] == [value.shape for value in exact]
    y, of_x, of_weight, of_bias = (apart(ours, theirs) for ours, theirs in zip(found, exact, strict=True))
    lowest, highest = OF_GRADIENTS[recipe.scaling]
    assert 0.005 < y < BOUND, "in 8 bits, and not in fewer"
    assert lowest < of_x < highest
    if recipe.weight_gradient:
        assert lowest < of_weight < highest
    else:
        assert of_weight < 0.004
    assert of_bias < 0.004


@with_recipes
def test_a_compiler_takes_it_in_one_piece_and_gets_the_same_bits(recipe: Recipe) -> None:
    torch._dynamo.reset()
    x, weight, gradient = draw(32, 64), draw(48, 64, seed=1).float(), draw(32, 48, seed=2)
    linear = partial(float8_linear, bias=None, recipe=recipe)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(
        gradients_of(compiled, x, weight, gradient=gradient),
        gradients_of(linear, x, weight, gradient=gradient),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(RELEASE < (2, 13), reason="torch's own product by rows on a CPU was seen in 2.13")
@with_recipes
def test_the_reference_gives_what_the_kernel_gives(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, gradient = draw(32, 64), draw(48, 64, seed=1), draw(32, 48, seed=2, scale=1e-3)
    linear = partial(float8_linear, bias=None, recipe=recipe)
    reference = gradients_of(linear, x, weight, gradient=gradient)
    monkeypatch.setattr(float8, "multiply_on", lambda device: float8.by_kernel)
    for ours, theirs in zip(reference, gradients_of(linear, x, weight, gradient=gradient), strict=True):
        assert apart(ours, theirs) < 2e-3, "sums in another order, rounded to bf16"


def test_rows_of_unequal_size_need_scales_of_their_own() -> None:
    sizes = torch.logspace(-6, 6, 64)[:, None]
    x, weight = (draw(64, 128).float() * sizes).bfloat16(), draw(96, 128, seed=1)
    exact = F.linear(x.double(), weight.double())
    worst = {
        recipe.scaling: max(
            apart(ours, theirs) for ours, theirs in zip(float8_linear(x, weight, None, recipe), exact, strict=True)
        )
        for recipe in (ROWWISE, TENSORWISE)
    }
    assert worst["rowwise"] < 0.05
    assert worst["tensorwise"] == 1.0, "the smallest rows are lost"


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-20, 1e-7, 1.0, 300.0, 1e30])
def test_the_largest_value_fits_and_uses_the_range(dtype: torch.dtype, size: float) -> None:
    for seed in range(20):
        values, scale = cast(draw(8, 64, seed=seed, scale=size), dtype, by_row=True)
        largest = values.float().abs().amax(dim=1)
        assert largest.isfinite().all()
        assert (largest >= torch.finfo(dtype).max / 2 - torch.finfo(dtype).max / 16).all()
        assert (scale.log2() == scale.log2().round()).all(), "powers of two"


def test_the_largest_value_fits_where_dividing_by_it_rounds_up() -> None:
    for value in (448.0, 448.0 * (1 + 2**-23), 224.0, 7.0, 7.0 * (1 + 2**-23), 3.4e38):
        values, _ = cast(torch.full((1, 16), value), E4M3, by_row=True)
        assert values.float().isfinite().all(), value


def test_a_part_of_a_matrix_is_rounded_as_the_whole_is() -> None:
    x = draw(64, 256)
    wholes = [cast(x, E4M3, by_row) for by_row in (True, False)]
    turned, turned_scale = cast(x.t(), E4M3, by_row=True)
    part, part_scale = cast(x[:, 64:128].contiguous(), E4M3, by_row=True)
    rounded = [values.float() * scale for values, scale in wholes]
    # Values that are thousands of times smaller than the largest have fewer bits under a common scale.
    large = x.abs() > 1e-2
    for other in (rounded[1], (turned.float() * turned_scale).t()):
        assert torch.equal(rounded[0][large], other[large])
    assert torch.equal(rounded[0][:, 64:128][large[:, 64:128]], (part.float() * part_scale)[large[:, 64:128]])


@with_recipes
@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_zeros_and_huge_rows_give_numbers(recipe: Recipe, tokens: int) -> None:
    for size in (0.0, 1e-38, 1e18):
        x, weight = draw(tokens, 64), draw(32, 64, seed=1)
        x[0] *= size
        gradient = draw(tokens, 32, seed=2)
        gradient[-1] *= size
        for value in gradients_of(partial(float8_linear, bias=None, recipe=recipe), x, weight, gradient=gradient):
            assert value.isfinite().all()
        y, *_ = gradients_of(
            partial(float8_linear, bias=None, recipe=recipe), x, torch.zeros_like(weight), gradient=gradient * 0
        )
        assert not y.any()


@with_recipes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(recipe: Recipe, bad: float) -> None:
    x, weight, gradient = draw(32, 64), draw(32, 64, seed=1), draw(32, 32, seed=2)
    linear = partial(float8_linear, bias=None, recipe=recipe)
    spoiled = x.clone()
    spoiled[3, 5] = bad
    assert not linear(spoiled, weight)[3].isfinite().any()
    gradient[4, 6] = bad
    _, of_x, of_weight = gradients_of(linear, x, weight, gradient=gradient)
    assert not of_x[4].isfinite().any()
    assert not of_weight[6].isfinite().any()


@with_recipes
def test_tokens_in_no_multiples_of_16_leave_the_weight_gradient_in_bf16(recipe: Recipe) -> None:
    x, weight, gradient = draw(31, 64), draw(32, 64, seed=1), draw(31, 32, seed=2)
    *_, of_weight = gradients_of(partial(float8_linear, bias=None, recipe=recipe), x, weight, gradient=gradient)
    assert torch.equal(of_weight, gradient.t() @ x)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((512, 2048), None),
        ((2048, 512), None),
        ((2056, 2048), "not in multiples of 16"),
        ((2048, 2056), "not in multiples of 16"),
        ((496, 4096), "smaller than 512"),
        ((4096, 256), "smaller than 512"),
        ((0, 1024), "smaller than 512"),
    ],
)
def test_shapes_that_do_not_suit_are_multiplied_as_they_are(shape: tuple[int, int], reason: str | None) -> None:
    assert Recipe().obstacle(torch.Size(shape)) == reason
    x, weight, bias = draw(4, shape[1]), draw(*shape, seed=1), draw(shape[0], seed=2)
    same = torch.equal(float8_linear(x, weight, bias, Recipe()), F.linear(x, weight, bias))
    assert same == (reason is not None)


@with_recipes
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 16, 64), (32, 64)])
def test_a_backward_pass_in_two_parts_computes_each_product_once(
    recipe: Recipe, stored: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = 0

    def count(*inputs: object) -> Tensor:
        nonlocal counted
        counted += 1
        return plain(*inputs)

    plain, recipe = float8.scaled_mm, Recipe(recipe.scaling, True, 16)
    monkeypatch.setattr(float8, "scaled_mm", lambda *inputs, fast: count(*inputs, fast))
    x, weight = draw(*shape).requires_grad_(), draw(32, 64, seed=1).to(stored).requires_grad_()
    y = float8_linear(x, weight, None, recipe).float().square().sum()
    assert counted == 1
    (of_x,) = torch.autograd.grad(y, [x], retain_graph=True)
    assert counted == 2
    (of_weight,) = torch.autograd.grad(y, [weight], retain_graph=True)
    assert counted == 3
    y.backward()
    assert counted == 5
    assert torch.equal(of_x, x.grad)
    assert torch.equal(of_weight, weight.grad)


def test_what_is_turned_around_has_the_values_that_it_had() -> None:
    x = (draw(64, 96).float() * torch.logspace(0, -4, 64)[:, None]).bfloat16()
    values, scale = cast(x, E4M3, by_row=True)
    turned, one = turn((values, scale))
    assert turned.is_contiguous()
    assert one == scale.max()
    before, after = values.float() * scale, (turned.float() * one).t()
    # Numbers down to 1/64 of the scale keep their bits; smaller ones lose some, none more than the smallest step.
    large = before.abs() >= one / 64
    assert torch.equal(before[large], after[large])
    assert 0 < (before - after).abs().max() <= one * 2**-10
    assert torch.equal(turn((values, scale[:1, 0]))[0], values.t())


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_gradient_tells_of_numbers_that_are_none(bad: float) -> None:
    x, weight, gradient = draw(32, 64), draw(48, 64, seed=1), draw(32, 48, seed=2)
    gradient[5, 7] = bad
    of_weight = gradients_of(partial(float8_linear, bias=None, recipe=ROWWISE), x, weight, gradient=gradient)[2]
    assert not of_weight.isfinite().all()
