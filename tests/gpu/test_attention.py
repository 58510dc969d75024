"""Attention on a GPU against plain float64: the kernel that is named runs, and its values and gradients are right.

The reference is given the same narrow numbers. Of the output a kernel rounds what it weights values with, and the
result: two units of bf16's 8 bits, relative to values of size one. Gradients go through one more product of rounded
terms.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from meshwright.models.attention import Documents, attend
from meshwright.models.document_attention import Sight, look_ahead
from meshwright.models.initialize import build
from meshwright.models.spec import ModelSpec
from meshwright.parallel.attention_blocks import attend_block, attend_block_backward
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.precision import Precision

TOKENS, BATCH, HEADS = 192, 2, 8
UNIT = 2.0**-8


def reference(q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor | None) -> Tensor:
    """Softmax attention written out, each query seeing what the words say."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    for query in range(q.shape[2]):
        for_query = torch.arange(q.shape[2], device=q.device)
        seen = for_query <= query
        if window is not None:
            seen = seen & (for_query > query - window)
        seen = seen.expand(len(q), -1)
        if documents is not None:
            seen = seen & (documents == documents[:, query, None])
        scores[:, :, query] = scores[:, :, query].masked_fill(~seen[:, None], float("-inf"))
    return scores.softmax(dim=-1) @ v


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the size of the expected values."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def inputs(head: int, kv_heads: int, dtype: torch.dtype = torch.bfloat16, tokens: int = TOKENS) -> list[Tensor]:
    torch.manual_seed(head + kv_heads)
    shapes = [(BATCH, heads, tokens, head) for heads in (HEADS, kv_heads, kv_heads)]
    return [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]


def documents_of(tokens: int = TOKENS) -> Tensor:
    return torch.arange(tokens, device="cuda").repeat(BATCH, 1) // 50


def assert_near_float64(
    narrow: list[Tensor], window: int | None, documents: Tensor | None, unit: float, ahead: bool = False
) -> None:
    wide = [x.detach().double().requires_grad_() for x in narrow]
    seen: Documents = documents
    if ahead:
        q = narrow[0]
        seen = look_ahead(documents, q.shape[2], window, q.transpose(1, 2).flatten(2), q.shape[-1])
        assert isinstance(seen, Sight)
    found, expected = attend(*narrow, window, seen), reference(*wide, window, documents)
    assert found.dtype == narrow[0].dtype
    gradient = torch.randn_like(found)
    found.backward(gradient)
    expected.backward(gradient.double())
    assert apart(found.detach(), expected.detach()) <= 2 * unit
    for name, ours, theirs in zip("qkv", narrow, wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert apart(ours.grad, theirs.grad) <= 4 * unit, f"gradient of {name}"


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("kv_heads", [HEADS, 2], ids=["all heads", "grouped"])
@pytest.mark.parametrize("window", [None, 40], ids=["causal", "window"])
@pytest.mark.parametrize("masked", [False, True], ids=["one document", "documents"])
def test_bf16_is_near_float64(head: int, kv_heads: int, window: int | None, masked: bool) -> None:
    documents = documents_of() if masked else None
    assert_near_float64(inputs(head, kv_heads), window, documents, UNIT, ahead=masked)


@pytest.mark.parametrize("head", [8, 36, 72, 256])
@pytest.mark.parametrize("window", [None, 40], ids=["causal", "window"])
@pytest.mark.parametrize("masked", [False, True], ids=["one document", "documents"])
def test_other_head_sizes_are_near_float64(head: int, window: int | None, masked: bool) -> None:
    assert_near_float64(inputs(head, 2), window, documents_of() if masked else None, UNIT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kv_heads", [HEADS, 2], ids=["all heads", "grouped"])
@pytest.mark.parametrize("window", [None, 40], ids=["causal", "window"])
@pytest.mark.parametrize("masked", [False, True], ids=["one document", "documents"])
def test_other_dtypes_are_near_float64(dtype: torch.dtype, kv_heads: int, window: int | None, masked: bool) -> None:
    # Products of float32 may round their factors to 10 bits.
    assert_near_float64(inputs(64, kv_heads, dtype), window, documents_of() if masked else None, 2.0**-10)


@pytest.mark.parametrize("tokens", [2, 127, 129, 700])
def test_any_length_is_near_float64(tokens: int) -> None:
    assert_near_float64(inputs(64, 2, tokens=tokens), 40, documents_of(tokens), UNIT)


def kernels(run: Callable[[], object]) -> str:
    """The names of the kernels that ran, in one line."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run()
        torch.cuda.synchronize()
    return " ".join(sorted({event.name for event in seen.events() if event.device_type == DeviceType.CUDA})).lower()


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@pytest.mark.parametrize("kv_heads", [HEADS, 2], ids=["all heads", "grouped"])
@pytest.mark.parametrize(
    ("dtype", "head", "window", "masked", "name"),
    [
        (torch.bfloat16, 128, None, False, "cudnn" if HOPPER else "flash"),
        (torch.float16, 64, None, False, "cudnn" if HOPPER else "flash"),
        (torch.bfloat16, 192, None, False, "flash"),
        (torch.bfloat16, 36, None, False, "flash"),
        (torch.float32, 64, None, False, "fmha"),
        (torch.bfloat16, 128, None, True, "triton"),
        (torch.bfloat16, 128, 40, False, "triton"),
        (torch.bfloat16, 64, 40, True, "triton"),
        (torch.float32, 64, None, True, "triton"),
        (torch.float32, 64, 40, False, "triton"),
        (torch.bfloat16, 8, 40, True, "fmha"),
        (torch.float64, 64, None, False, "softmax"),
    ],
)
def test_the_kernel_that_is_named_runs_forward_and_backward(
    dtype: torch.dtype, head: int, window: int | None, masked: bool, name: str, kv_heads: int
) -> None:
    heads, documents = inputs(head, kv_heads, dtype), documents_of() if masked else None
    gradient = torch.randn_like(heads[0])
    ran = kernels(lambda: attend(*heads, window, documents).backward(gradient))
    assert name in ran
    assert ("softmax" in ran) == (name == "softmax"), f"plain products: {ran}"


def test_without_gradients_no_plan_is_made_for_a_length() -> None:
    heads = [x.detach() for x in inputs(128, 2)]
    with torch.no_grad():
        ran = kernels(lambda: attend(*heads))
    assert "flash" in ran
    assert "cudnn" not in ran


@pytest.mark.parametrize("masked", [False, True], ids=["window", "window and documents"])
def test_long_sequences_need_no_mask_of_all_pairs(masked: bool) -> None:
    tokens = 16384
    heads = [torch.randn(1, count, tokens, 64, device="cuda", dtype=torch.bfloat16) for count in (4, 1, 1)]
    documents = torch.arange(tokens, device="cuda")[None] // 3000 if masked else None
    gradient = torch.randn_like(heads[0])
    for x in heads:
        x.requires_grad_()
    attend(*heads, 1000, documents).backward(gradient)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(*heads, 1000, documents).backward(gradient)
    # A mask of a byte for each pair alone would be 256 MiB.
    assert torch.cuda.max_memory_allocated() - before < 100 * 2**20


SPEC = ModelSpec(
    vocab_size=61,
    hidden_size=128,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_decoder_with_documents_takes_no_plain_products(compiled: bool, recompute: str, window: int | None) -> None:
    spec = SPEC.model_copy(update={"sliding_window": window, "initializer_range": 0.05})
    tokens = torch.randint(61, (2, 300), generator=torch.Generator().manual_seed(3)).cuda()
    documents = (tokens == 0).long().cumsum(dim=1)

    def gradients(stored: torch.dtype, param: torch.dtype, compiled: bool) -> tuple[list[Tensor], str]:
        model = build(spec, seed=5, dtype=stored).cuda().train()
        precision = Precision(stored=stored, param=param, reduce=stored, buffer=stored)
        parallel = parallelize(model, f"recompute={recompute}", precision=precision, compiled=compiled)

        def step() -> None:
            model.zero_grad()
            parallel(tokens, documents_BT=documents).logsumexp(dim=-1).sum().backward()

        ran = kernels(step)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], ran

    expected, _ = gradients(torch.float64, torch.float64, compiled=False)
    found, ran = gradients(torch.float32, torch.bfloat16, compiled)
    assert "triton_tem" in ran, ran
    assert "fmha" not in ran
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).norm() <= 0.05 * theirs.norm()


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("kv_heads", [HEADS, 2], ids=["all heads", "grouped"])
def test_blocks_of_ring_attention_are_near_float64(head: int, kv_heads: int) -> None:
    """Two blocks of keys, merged by their log-sum-exp, and the gradients of both."""
    q, k, v = (x.detach() for x in inputs(head, kv_heads))
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    scores = wide[0] @ wide[1].repeat_interleave(HEADS // kv_heads, dim=1).mT / head**0.5
    expected = scores.softmax(dim=-1) @ wide[2].repeat_interleave(HEADS // kv_heads, dim=1)
    gradient = torch.randn_like(q)
    expected.backward(gradient.double())
    halves = [(k[:, :, part], v[:, :, part]) for part in (slice(0, 90), slice(90, TOKENS))]
    blocks = [attend_block(q, *half, causal=False, mask_BTS=None) for half in halves]
    lse = torch.logaddexp(blocks[0][1], blocks[1][1])
    out = sum(found.float() * (own - lse).exp()[..., None] for found, own in blocks)
    assert isinstance(out, Tensor)
    assert apart(out, expected.detach()) <= 2 * UNIT
    parts = [
        attend_block_backward(gradient, q, *half, out.to(q.dtype), lse, causal=False, mask_BTS=None) for half in halves
    ]
    dq = sum(part[0].float() for part in parts)
    dk, dv = (torch.cat([part[index] for part in parts], dim=2) for index in (1, 2))
    assert isinstance(dq, Tensor)
    for name, ours, theirs in zip("qkv", (dq, dk, dv), wide, strict=True):
        assert theirs.grad is not None
        assert apart(ours, theirs.grad) <= 4 * UNIT, f"gradient of {name}"
