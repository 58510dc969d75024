"""Models whose linears multiply in 8 bits: which do, which are named because they do not, and that they learn."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.config import load_config
from meshwright.errors import ConfigError
from meshwright.models import float8
from meshwright.models.float8 import Recipe
from meshwright.models.initialize import build
from meshwright.models.linear import linear as plain
from meshwright.models.spec import Experts, ModelSpec
from meshwright.observe.console import kept_wide
from meshwright.parallel.own_loop import Parallel
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.precision import Float8, Precision
from meshwright.parallel.torch_releases import RELEASE
from meshwright.training.loss import cross_entropy
from meshwright.training.precision import check_device, precision_of

SHAPE = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DENSE = ModelSpec.model_validate(SHAPE)
EXPERTS = Experts(num_experts=16, num_experts_per_tok=2, moe_intermediate_size=32, num_shared_experts=1)
MIXTURE = ModelSpec.model_validate(SHAPE | {"experts": EXPERTS.model_dump()})
GPT = ModelSpec.model_validate(
    SHAPE | {"norm": "layernorm", "activation": "gelu_tanh", "bias": ("q", "k", "v", "o", "up", "down"), "dropout": 0.1}
)
SMALL = Recipe(smallest=16)
BF16 = Precision(param=torch.bfloat16)


def in_float8(recipe: Recipe = SMALL, *skip: str) -> Precision:
    return Precision(param=torch.bfloat16, float8=Float8(recipe, skip) if skip else Float8(recipe))


def under(precision: Precision, spec: ModelSpec = DENSE, strategy: str = "dp=1") -> Parallel:
    return parallelize(build(spec, seed=1).train(), strategy, precision=precision)


def tokens(samples: int = 2, length: int = 33, seed: int = 2) -> Tensor:
    return torch.randint(48, (samples, length), generator=torch.Generator().manual_seed(seed))


def backward(model: Parallel, batch: Tensor, **options: Tensor) -> Tensor:
    loss = cross_entropy(model(batch[:, :-1], **options), batch[:, 1:])
    loss.backward()
    return loss.detach()


class Products(TorchDispatchMode):
    """Counts how often 8-bit products run, by the shape of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: object, inputs: Any = (), options: Any = None) -> Any:
        self.count += operation == torch.ops.aten._scaled_mm.default
        return operation(*inputs, **(options or {}))


def multiplying(model: nn.Module) -> set[str]:
    """Linears that have another product than the plain one, of the last layer and outside of layers."""
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    found = {name for name, linear in linears if getattr(linear, "product", plain) is not plain}
    return {name.removeprefix("model.layers.1.") for name in found if ".0." not in name}


def test_all_linears_of_layers_multiply_in_8_bits_and_the_others_are_named() -> None:
    model = under(in_float8())
    names = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert multiplying(model.module) == names
    assert model.wide == {"lm_head": "48 x 64: precision.fp8_skip"}


def test_routers_and_stacked_experts_stay_as_they_are_and_shared_experts_do_not() -> None:
    model = under(in_float8(), MIXTURE)
    assert {name for name in multiplying(model.module) if "mlp" in name} == {
        f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")
    }
    assert kept_wide(model.wide) == [
        "model.layers.*.mlp.gate (2 of them), 16 x 64: precision.fp8_skip",
        "lm_head, 48 x 64: precision.fp8_skip",
        "model.layers.*.mlp.experts (2 of them), stacked experts",
    ]


def test_shapes_that_do_not_suit_are_named() -> None:
    spec = ModelSpec.model_validate(SHAPE | {"intermediate_size": 90})
    model = under(in_float8(Recipe(smallest=48)), spec)
    assert kept_wide(model.wide) == [
        "model.layers.*.self_attn.k_proj (2 of them), 32 x 64: smaller than 48",
        "model.layers.*.self_attn.v_proj (2 of them), 32 x 64: smaller than 48",
        "model.layers.*.mlp.gate_proj (2 of them), 90 x 64: not in multiples of 16",
        "model.layers.*.mlp.up_proj (2 of them), 90 x 64: not in multiples of 16",
        "model.layers.*.mlp.down_proj (2 of them), 64 x 90: not in multiples of 16",
        "lm_head, 48 x 64: precision.fp8_skip",
    ]
    assert backward(model, tokens()).isfinite()


def test_names_that_are_skipped_stay_in_bf16() -> None:
    model = under(in_float8(SMALL, "lm_head", "model.layers.1.*", "*.mlp.*"))
    assert multiplying(model.module) == set()
    assert not any(name.startswith("model.layers.0.self_attn") for name in model.wide)
    everything = under(in_float8(SMALL, "model.layers.0.*"))
    assert everything.wide["lm_head"].endswith("its products come with the loss"), (
        "a list of one's own replaces the usual"
    )


def test_a_name_that_no_linear_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision.fp8_skip has 'layers.0', which fits no linear"):
        under(in_float8(SMALL, "*lm_head", "layers.0"))


def test_a_model_that_would_compute_nothing_in_8_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear of this model multiplies in 8 bits"):
        under(in_float8(Recipe()))


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("spec", [DENSE, MIXTURE, GPT], ids=["dense", "mixture", "gpt"])
def test_what_is_stored_stays_float32_and_the_numbers_are_near_those_of_bf16(scaling: Any, spec: ModelSpec) -> None:
    narrow, wide = under(in_float8(Recipe(scaling, smallest=16)), spec), under(BF16, spec)
    samples = torch.arange(2)
    ours, theirs = (backward(model, tokens(), samples_B=samples) for model in (narrow, wide))
    assert ours != theirs
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=0)
    for (name, one), other in zip(narrow.named_parameters(), wide.parameters(), strict=True):
        assert one.dtype == torch.float32, name
        assert one.grad is not None, name
        assert one.grad.dtype == torch.float32, name
        if ".mlp.experts." not in name and ".mlp.gate." not in name:
            # Tokens between two experts may go to the other one.
            alike = torch.cosine_similarity(one.grad.flatten(), other.grad.flatten(), dim=0)
            assert alike > 0.95, name


def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "multiply_on", lambda device: float8.by_kernel)


@pytest.mark.parametrize("spec", [DENSE, MIXTURE, GPT], ids=["dense", "mixture", "gpt"])
@pytest.mark.parametrize("recompute", ["full", "selective", "first:1"])
def test_recompute_gives_the_same_bits(spec: ModelSpec, recompute: str) -> None:
    samples = torch.arange(2)
    plain, again = under(in_float8(), spec), under(in_float8(), spec, f"recompute={recompute}")
    assert torch.equal(*(backward(model, tokens(), samples_B=samples) for model in (plain, again)))
    for (name, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.skipif(RELEASE < (2, 13), reason="torch's own product by rows on a CPU was seen in 2.13")
@pytest.mark.parametrize(("recompute", "products"), [("none", 3), ("selective", 3), ("full", 4)])
def test_selective_recompute_keeps_products(recompute: str, products: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels_on_cpu(monkeypatch)
    model = under(in_float8(), strategy=f"recompute={recompute}")
    with Products() as counted:
        backward(model, tokens())
    assert counted.count == products * 7 * 2


@cache
def losses_of(precision: Precision) -> list[float]:
    """Of a hundred steps in which each token follows from the one before."""
    model = under(precision)
    optimizer = model.optimizer(torch.optim.AdamW, lr=3e-3)
    losses = []
    for step in range(100):
        batch = (tokens(4, 1, seed=step) + 7 * torch.arange(17)) % 48
        losses.append(float(backward(model, batch)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_learning_follows_that_in_bf16(scaling: Any) -> None:
    wide, narrow = losses_of(BF16), losses_of(in_float8(Recipe(scaling, smallest=16)))
    assert wide[0] > 3.5
    assert wide[-1] < 0.1
    assert wide != narrow
    for ours, theirs in zip(narrow, wide, strict=True):
        assert abs(ours - theirs) < 0.05 * wide[0]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], Float8()),
        (["precision.fp8_recipe=tensorwise"], Float8(Recipe("tensorwise"))),
        (["precision.fp8_weight_gradient=false"], Float8(Recipe(weight_gradient=False))),
        (["precision.fp8_smallest=1024"], Float8(Recipe(smallest=1024))),
        (['precision.fp8_skip=["*.down_proj"]'], Float8(skip=("*.down_proj",))),
        (["precision.param=bf16"], Float8()),
    ],
)
def test_settings_mean_their_recipes(settings: list[str], expected: Float8) -> None:
    precision = precision_of(load_config(None, ["train.precision=fp8", *settings]))
    assert precision == Precision(param=torch.bfloat16, float8=expected)


def test_8_bits_are_what_fp8_asks_for_alone() -> None:
    assert precision_of(load_config(None, ["train.precision=bf16", "precision.fp8_smallest=16"])).float8 is None
    with pytest.raises(ConfigError, match="leave precision.param=float32 out"):
        load_config(None, ["train.precision=fp8", "precision.param=float32"])


@pytest.mark.parametrize(("capability", "refused"), [((8, 0), True), ((8, 9), False), ((9, 0), False)])
def test_gpus_without_8_bit_products_are_refused(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    check_device(BF16, torch.device("cuda"))
    check_device(in_float8(), torch.device("cpu"))
    if refused:
        with pytest.raises(ConfigError, match="Some GPU has no products of e4m3fn; use bf16"):
            check_device(in_float8(), torch.device("cuda"))
    else:
        check_device(in_float8(), torch.device("cuda"))
