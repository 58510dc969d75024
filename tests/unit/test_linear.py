"""Linears over wider weights: rounded inside of the product, gradients as wide as weights; several as one product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from meshwright.models.linear import Linear, add_wide_product, linear, linears, multiply_by
from meshwright.models.norms import LayerNorm, RMSNorm
from meshwright.models.reads import around_forward, is_read, read_through, seen

WIDTH = 24


def layer(rows: int = 10, bias: bool = True, dtype: torch.dtype = torch.float32, seed: int = 1) -> Linear:
    generator = torch.Generator().manual_seed(seed)
    made = Linear(WIDTH, rows, bias=bias, dtype=dtype)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return made


def input_of(shape: tuple[int, ...] = (3, 7), dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*shape, WIDTH, generator=generator).to(dtype).requires_grad_()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 7), (5,), (2, 3, 4), ()])
def test_bf16_over_float32_is_near_float64_and_gradients_have_the_dtype_of_what_they_are_of(
    bias: bool, shape: tuple[int, ...]
) -> None:
    wide, x = layer(bias=bias), input_of(shape)
    y = wide(x)
    assert y.dtype == torch.bfloat16
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    found = torch.autograd.grad(y, [x, *wide.parameters()], upstream)
    assert [gradient.dtype for gradient in found] == [torch.bfloat16, *[torch.float32] * (1 + bias)]
    exact = [value.detach().to(torch.bfloat16).double().requires_grad_() for value in (x, *wide.parameters())]
    truth = F.linear(*exact)
    expected = torch.autograd.grad(truth, exact, upstream.double())
    assert relative(y, truth) < 1e-2
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert relative(one, other) < 1e-2


def test_sums_of_a_bias_are_not_rounded() -> None:
    wide, x = layer(), input_of((401,))
    wide(x).sum().backward()
    # Bfloat16 knows 400 and 402.
    assert torch.equal(wide.bias.grad, torch.full((10,), 401.0))


def test_weights_in_the_dtype_of_the_input_are_multiplied_as_they_are() -> None:
    same, x = layer(dtype=torch.float64), input_of(dtype=torch.float64)
    y = same(x)
    assert torch.equal(y, F.linear(x, same.weight, same.bias))
    assert "Rounded" not in type(y.grad_fn).__name__


class Products:
    """A compiler that changes nothing, and counts the matrix products of each graph."""

    def __init__(self) -> None:
        self.of_graphs: list[int] = []
        self.backend = aot_autograd(fw_compiler=self._count, bw_compiler=self._count)

    def _count(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found = 0
        for node in graph.graph.nodes:
            kind = str(node.target).removeprefix("aten.").split(".")[0]
            found += kind in ("mm", "addmm", "bmm", "matmul", "linear")
            if "sum_of_products" in str(node.target):
                found += len(node.args[0])
        self.of_graphs.append(found)
        return make_boxed_func(graph.forward)


def three(bias: tuple[bool, bool, bool], dtype: torch.dtype) -> list[Linear]:
    return [layer(rows, has, dtype, seed) for seed, (rows, has) in enumerate(zip((8, 4, 6), bias, strict=True))]


@pytest.mark.parametrize(
    ("bias", "dtype", "apart", "forward", "backward"),
    [
        ((False, False, False), torch.float32, False, 1, 2),
        ((True, True, True), torch.float32, False, 1, 2),
        ((True, False, True), torch.float32, False, 3, 6),
        ((False, False, False), torch.bfloat16, False, 3, 6),
        ((False, False, False), torch.float32, True, 1, 6),
        ((True, True, True), torch.float32, True, 1, 6),
    ],
    ids=[
        "without biases",
        "with biases",
        "with some biases",
        "of the input's dtype",
        "gradients apart",
        "gradients apart, with biases",
    ],
)
def test_compiled_layers_that_share_an_input_are_one_product_where_that_costs_no_copy(
    bias: tuple[bool, bool, bool], dtype: torch.dtype, apart: bool, forward: int, backward: int
) -> None:
    torch._dynamo.reset()
    layers, x = three(bias, dtype), input_of()
    parameters = [parameter for one in layers for parameter in one.parameters()]

    def joined(x: Tensor, *layers: nn.Module) -> Tensor:
        return torch.cat(linears(x, *layers, apart=apart), dim=-1)

    separate = torch.cat([one(x) for one in layers], dim=-1)
    upstream = torch.randn(separate.shape, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    expected = torch.autograd.grad(separate, [x, *parameters], upstream)
    counted = Products()
    together = torch.compile(joined, backend=counted.backend, fullgraph=True)(x, *layers)
    assert torch.equal(together, separate)
    found = torch.autograd.grad(together, [x, *parameters], upstream)
    assert counted.of_graphs == [forward, backward]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_layers_are_separate_where_one_multiplies_by_a_function_of_its_own() -> None:
    layers, x = three((False, False, False), torch.float32), input_of()
    multiply_by(layers[1], lambda x, weight, bias: linear(x, weight * 2, bias), "doubled")
    torch._dynamo.reset()
    plain = linears(x, *layers)
    counted = Products()
    compiled = torch.compile(linears, backend=counted.backend)(x, *layers)
    assert counted.of_graphs[0] == 3
    assert torch.equal(plain[1], F.linear(x, 2 * layers[1].weight.to(x.dtype)))
    assert all(torch.equal(one, other) for one, other in zip(plain, compiled, strict=True))


def test_a_plain_linear_layer_of_torch_multiplies_by_a_given_function_too() -> None:
    plain = nn.Linear(WIDTH, 3)
    x = input_of(dtype=torch.float32)
    multiply_by(plain, lambda x, weight, bias: F.linear(x, weight) - 1, "less one")
    torch.testing.assert_close(plain(x), F.linear(x, plain.weight) - 1)


def test_products_add_up_in_the_memory_of_the_sum() -> None:
    a, b = torch.randn(4, 6).bfloat16(), torch.randn(6, 5).bfloat16()
    first = add_wide_product(None, a, b, torch.float32)
    assert first.dtype == torch.float32
    both = add_wide_product(first, a, b, torch.float32)
    assert both.data_ptr() == first.data_ptr()
    torch.testing.assert_close(both, 2 * (a @ b).float())


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms_compute_in_the_dtype_of_their_input(kind: type[RMSNorm] | type[LayerNorm]) -> None:
    norm, x = kind(WIDTH, eps=1e-5), input_of()
    for parameter in norm.parameters():
        parameter.data.uniform_(0.5, 1.5)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in norm.parameters())
    exact = super(kind, norm).forward(x.float())
    torch.testing.assert_close(y.float(), exact, rtol=2e-2, atol=2e-2)


def test_what_is_read_shows_during_the_forward_pass_only_and_wrappers_are_around_it() -> None:
    module, told = nn.Linear(WIDTH, 3, dtype=torch.float64), []
    x, stored = input_of(dtype=torch.float64), module.weight
    expected = F.linear(x, 2 * stored + 1, module.bias) + 5

    def wrapper(forward: Any, x: Tensor, *, more: float) -> Tensor:
        told.append(module.weight is stored)
        return forward(x) + more

    read_through(module, "weight", lambda weight: 2 * weight)
    read_through(module, "weight", lambda weight: weight + 1)
    around_forward(module, wrapper)
    assert is_read(module)
    torch.testing.assert_close(module(x, more=5.0), expected)
    assert told == [True]
    assert module.weight is stored
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    torch.testing.assert_close(seen(module, "weight"), 2 * stored + 1)

    def fails(forward: Any, x: Tensor, **_: Any) -> Tensor:
        raise KeyError

    module.register_forward_hook(lambda *_: None)
    read_through(module, "bias", fails)
    with pytest.raises(TypeError):
        module(x, more=5.0)
    assert module.weight is stored, "also after an error"


def test_modules_are_of_their_kind_with_wrappers_too_and_others_of_the_kind_are_left_alone() -> None:
    one, other = layer(), layer()
    around_forward(one, lambda forward, x: forward(x) * 0)
    assert isinstance(one, Linear)
    assert type(one).__name__ == "Linear"
    x = input_of()
    assert not one(x).any()
    assert other(x).any()
    again = layer()
    around_forward(again, lambda forward, x: forward(x) + 1)
    assert type(again) is type(one), "a compiler takes another class for other code"


def test_a_module_with_a_forward_pass_of_its_own_keeps_it_inside() -> None:
    module = nn.Linear(WIDTH, 3)
    module.forward = lambda x: x.sum()  # type: ignore[method-assign]
    around_forward(module, lambda forward, x: forward(x) + 1)
    x = input_of(dtype=torch.float32)
    torch.testing.assert_close(module(x), x.sum() + 1)
