"""Which attention kernel runs where, that all of them compute the same, and that plain products are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from meshwright.config import RunConfig
from meshwright.models import attention_kernels
from meshwright.models.attention_kernels import attend_with, attend_with_kernel, kernels_for, math_reason, repeat_heads
from meshwright.models.presets import preset
from meshwright.strategy import Strategy
from meshwright.training.slow_attention import slow_attention

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
V100, A100, L4, H100, B200, RTX_5090 = 70, 80, 89, 90, 100, 120
BF16, FP16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "masked", "training", "expected"),
    [
        (H100, BF16, 128, False, True, [CUDNN, FLASH]),
        (H100, FP16, 64, False, True, [CUDNN, FLASH]),
        (B200, BF16, 128, False, True, [CUDNN, FLASH]),
        (RTX_5090, BF16, 128, False, True, [CUDNN, FLASH]),
        (H100, BF16, 128, False, False, [FLASH]),
        (A100, BF16, 128, False, True, [FLASH]),
        (H100, BF16, 192, False, True, [FLASH]),
        (H100, BF16, 256, False, True, [FLASH]),
        (H100, BF16, 70, False, True, [FLASH]),
        (H100, BF16, 264, False, True, [EFFICIENT]),
        (H100, BF16, 258, False, True, [MATH]),
        (H100, BF16, 128, True, True, [EFFICIENT]),
        (H100, BF16, 70, True, True, [MATH]),
        (L4, BF16, 192, False, True, [FLASH]),
        (L4, BF16, 208, False, True, [EFFICIENT]),
        (L4, BF16, 256, False, True, [FLASH]),
        (RTX_5090, BF16, 208, False, True, [EFFICIENT]),
        (V100, FP16, 64, False, True, [EFFICIENT]),
        (V100, BF16, 64, False, True, [MATH]),
        (H100, FLOAT32, 128, False, True, [EFFICIENT]),
        (H100, FLOAT32, 128, True, True, [EFFICIENT]),
        (H100, FLOAT32, 4, False, True, [EFFICIENT]),
        (H100, FLOAT32, 6, False, True, [MATH]),
        (H100, FLOAT64, 64, False, True, [MATH]),
        (H100, FLOAT64, 64, True, False, [MATH]),
    ],
)
def test_the_kernel_follows_from_chip_dtype_and_head_size(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_size: int,
    masked: bool,
    training: bool,
    expected: list[SDPBackend],
) -> None:
    assert kernels_for(capability, dtype, head_size, masked=masked, training=training) == expected


def heads(kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(2, count, 19, 8) for count in (6, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator, dtype=FLOAT64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_heads_that_are_repeated_give_what_grouped_ones_give(kv_heads: int) -> None:
    q, k, v = inputs = heads(kv_heads)
    repeated = [repeat_heads(x, 6) for x in (k, v)]
    assert [x.shape[1] for x in repeated] == [6, 6]
    found, grouped = attend_with_kernel(q, *repeated, causal=True), attend_with_kernel(*inputs, causal=True)
    torch.testing.assert_close(found, grouped)
    gradient = torch.randn_like(found)
    for ours, theirs in zip(*(torch.autograd.grad(y, inputs, gradient) for y in (found, grouped)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_efficient_kernel_is_given_repeated_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one of GPUs, and refuses grouped ones there; here another takes its place."""
    given: list[Tensor] = []
    monkeypatch.setattr(attention_kernels, "_attend", lambda *what: given.extend(what[:3]) or what[0])
    attend_with([EFFICIENT], *heads(2), causal=True, mask=None)
    attend_with([FLASH], *heads(2), causal=True, mask=None)
    assert [x.shape[1] for x in given] == [6, 6, 6, 6, 2, 2]


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("dtype", [BF16, FLOAT64], ids=["cuDNN or flash", "math"])
def test_a_named_kernel_leaves_a_compiled_graph_whole(kv_heads: int, dtype: torch.dtype) -> None:
    """On a CPU there are flash and math of those that are named."""

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernels = kernels_for(H100, dtype, 64, masked=False, training=torch.is_grad_enabled())
        return attend_with(kernels, q, k, v, causal=True, mask=None)

    inputs = heads(kv_heads)
    before = enabled()
    torch._dynamo.reset()
    made = torch.compile(attended, backend="aot_eager", fullgraph=True)(*inputs)
    torch.testing.assert_close(made, attend_with_kernel(*inputs, causal=True))
    assert enabled() == before


def test_a_kernel_that_cannot_is_an_error_and_not_plain_products() -> None:
    with pytest.raises(RuntimeError, match="No (viable|available)"):
        attend_with([CUDNN], *heads(2), causal=True, mask=None)


def enabled() -> list[bool]:
    cuda = torch.backends.cuda
    return [
        cuda.cudnn_sdp_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
    ]


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_choice_of_kernels_is_a_constant_to_the_compiler(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(device: torch.device) -> tuple[int, int]:
        # What a compiler cannot take in.
        torch._dynamo.graph_break()
        return 9, 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", asked)

    def choose(q_BHTD: Tensor) -> tuple[Tensor, list[SDPBackend]]:
        capability = attention_kernels.capability_of(q_BHTD.device)
        blocks = attention_kernels.takes_blocks(torch.device("cuda"), q_BHTD.dtype, q_BHTD.shape[-1])
        kernels = kernels_for(capability, q_BHTD.dtype, q_BHTD.shape[-1], masked=False, training=True)
        return q_BHTD + (2 if blocks else 1), kernels

    torch._dynamo.reset()
    compiled = torch.compile(choose, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for size, kernels in ((64, [CUDNN, FLASH]), (256, [FLASH]), (264, [EFFICIENT])):
        result, found = compiled(torch.zeros(1, 2, 4, size, dtype=torch.bfloat16))
        assert found == kernels
        assert result.unique().item() == (2 if size <= 256 else 1)


@pytest.mark.parametrize(
    ("dtype", "head_size", "masked", "words"),
    [
        (BF16, 128, False, None),
        (BF16, 128, True, None),
        (BF16, 70, False, None),
        (BF16, 70, True, None),
        (BF16, 6, True, "multiple of 8"),
        (FLOAT32, 6, False, "multiple of 4"),
        (FLOAT64, 6, True, None),
    ],
)
def test_plain_products_are_told_unless_asked_for(
    dtype: torch.dtype, head_size: int, masked: bool, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "capability_of", lambda device: H100)
    reason = math_reason(GPU, dtype, head_size, masked=masked)
    assert (reason is None) == (words is None)
    if reason is not None and words is not None:
        assert words in reason
        assert f"heads of {head_size}" in reason
        assert str(dtype).removeprefix("torch.") in reason


def run(**changes: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate({"model": {"preset": "tiny"}, "train": {"precision": "bf16"}, **changes})


def test_a_run_says_which_attention_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("meshwright.models.attention_kernels", "meshwright.training.slow_attention"):
        monkeypatch.setattr(f"{name}.capability_of", lambda device: H100)
    spec, plain = preset("tiny").model_copy(update={"head_dim": 64}), Strategy()
    ring, ulysses = (replace(plain, cp=2, cp_method=method) for method in ("ring", "ulysses"))
    masked = run(data={"mask_documents": True})
    odd = spec.model_copy(update={"head_dim": 6})
    assert slow_attention(run(), spec, plain, GPU) is None
    assert slow_attention(masked, spec, plain, GPU) is None
    assert slow_attention(run(), spec, ring, GPU) is None
    assert slow_attention(masked, spec, ulysses, GPU) is None
    assert "cp_method=ulysses" in (slow_attention(masked, spec, ring, GPU) or "")
    wide = run(train={"precision": "float32"})
    assert "multiple of 4" in (slow_attention(wide, odd, plain, GPU) or "")
    assert "bf16" in (slow_attention(wide, spec, ring, GPU) or "")
    assert slow_attention(wide, odd, ring, torch.device("cpu")) is None
