"""Attention by blocks sees what the mask says: the blocks themselves, and layers that are traced with them.

The kernel is one of GPUs (tests/gpu/test_attention.py). Here PyTorch's definition of it runs in its place, traced in
one piece as a compiler would, and the decision that is made by the device is made by hand.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models import attention, document_attention
from meshwright.models.attention import attend
from meshwright.models.document_attention import BLOCK, Sight, attend_by_blocks, look_ahead, seen_blocks
from meshwright.models.initialize import build
from meshwright.parallel import recompute
from tests.unit.specs import small

CPU = torch.device("cpu")
LENGTHS = [2, 100, BLOCK, 3 * BLOCK, 3 * BLOCK + 1, 1000]
WINDOWS = [None, 1, 40, BLOCK, 200, 5000]
KINDS = ["none", "one", "short", "long", "in any order", "back in the first one"]
UNSORTED = ("in any order", "back in the first one")


def documents_of(kind: str, length: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(length)
    if kind == "none":
        return None
    if kind in UNSORTED:
        documents = torch.randint(3, (3, length), generator=generator)
        if kind != "in any order":
            documents[:, BLOCK:] = 0
        return documents
    chance = {"one": 0.0, "short": 0.05, "long": 0.004}[kind]
    return (torch.rand(3, length, generator=generator) < chance).long().cumsum(dim=1)


def said(length: int, window: int | None, documents: Tensor | None) -> Tensor:
    """The mask in words: (batch, queries, keys)."""
    places = torch.arange(length)
    mask = (places <= places[:, None])[None]
    if window is not None:
        mask = mask & (places > places[:, None] - window)
    return mask if documents is None else mask & (documents[:, :, None] == documents[:, None])


def dense(counts: Tensor, places: Tensor) -> Tensor:
    """Which blocks are listed: (batch, blocks of queries, blocks of keys)."""
    listed = torch.arange(places.shape[-1]) < counts[..., None]
    return torch.zeros(places.shape, dtype=torch.bool).scatter_(-1, places.long(), listed)[:, 0]


def spread(blocks: Tensor, length: int) -> Tensor:
    """For each pair of tokens, whether its block is in."""
    return blocks.repeat_interleave(BLOCK, dim=1).repeat_interleave(BLOCK, dim=2)[:, :length, :length]


def by_rule(blocks: BlockMask, samples: int, length: int) -> Tensor:
    places = torch.arange(length)
    sample, head = torch.arange(samples)[:, None, None], torch.zeros((), dtype=torch.int64)
    return blocks.mask_mod(sample, head, places[:, None], places[None]).expand(samples, -1, -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", LENGTHS)
def test_blocks_and_rule_see_what_the_mask_says(length: int, window: int | None, kind: str) -> None:
    documents = documents_of(kind, length)
    blocks = seen_blocks(length, window, documents, CPU)
    expected = said(length, window, documents)
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_indices is not None
    partly = dense(blocks.kv_num_blocks, blocks.kv_indices)
    wholly = dense(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (partly & wholly).any()
    seen = spread(wholly, length) | (spread(partly, length) & by_rule(blocks, len(expected), length))
    assert torch.equal(seen, expected)
    if kind in UNSORTED:
        return
    # What is left out or seen in whole is as much as PyTorch finds by looking at every pair.
    samples = None if documents is None else len(documents)
    theirs = create_block_mask(blocks.mask_mod, samples, None, length, length, device="cpu")
    assert torch.equal(partly | wholly, theirs.to_dense()[:, 0].bool())
    assert theirs.full_kv_num_blocks is not None
    assert torch.equal(blocks.full_kv_num_blocks, theirs.full_kv_num_blocks)


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were a GPU; PyTorch refuses gradients on a CPU before it looks how it would compute them."""
    for module in (attention, document_attention):
        monkeypatch.setattr(module, "takes_blocks", lambda *what: True)
    monkeypatch.setattr(sys.modules["torch.nn.attention.flex_attention"], "_validate_device", lambda *what: None)
    torch._dynamo.reset()


def inputs(length: int = 300) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(3, heads, length, 8) for heads in (6, 2, 2)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("kind", ["none", "short", "in any order"])
@pytest.mark.parametrize("window", [None, 140])
def test_values_and_gradients_are_those_of_the_mask(
    window: int | None, kind: str, request: pytest.FixtureRequest
) -> None:
    heads, documents = inputs(), documents_of(kind, 300)
    expected = attend(*heads, window, documents)
    gradient = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, heads, gradient)
    request.getfixturevalue("by_blocks")
    made = torch.compile(attend, backend="aot_eager", fullgraph=True)(*heads, window, documents)
    torch.testing.assert_close(made, expected)
    for ours, other in zip(torch.autograd.grad(made, heads, gradient), theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 140])
def test_compiled_layers_share_the_blocks_and_are_compiled_once(
    window: int | None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(small(sliding_window=window, num_hidden_layers=3), seed=2)
    batches = [torch.randint(37, (3, 300), generator=torch.Generator().manual_seed(at)) for at in range(3)]
    # The last token of a document is that of number 0.
    documents = [(batch == 0).long().cumsum(dim=1) for batch in batches]
    expected = [passed(model, *both) for both in zip(batches, documents, strict=True)]
    request.getfixturevalue("by_blocks")
    made: list[BlockMask] = []
    original = seen_blocks

    def counted(*what: object) -> BlockMask:
        made.append(original(*what))  # type: ignore[arg-type]
        return made[-1]

    for module in (attention, document_attention):
        monkeypatch.setattr(module, "seen_blocks", counted)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(type(model.model.layers["0"]).forward, backend=counter, fullgraph=True)
    for layer in model.model.layers.values():
        monkeypatch.setattr(layer, "forward", compiled.__get__(layer))
    for batch, numbers, (loss, gradients) in zip(batches, documents, expected, strict=True):
        found, ours = passed(model, batch, numbers)
        torch.testing.assert_close(found, loss)
        for one, other in zip(ours, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert len(made) == len(batches), "blocks are to be made once a forward pass"
    assert counter.frame_count == 1, "layers and batches are to share one graph"


def passed(model: torch.nn.Module, tokens: Tensor, documents: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    loss = model(tokens, documents_BT=documents).logsumexp(dim=-1).sum()
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


class Following(TorchDispatchMode):
    """Something else that follows operations."""

    def __torch_dispatch__(self, operation, types, inputs=(), options=None):  # type: ignore[no-untyped-def]
        return operation(*inputs, **(options or {}))


@pytest.mark.parametrize(
    "mode", [Following, lambda: recompute._Keep(recompute._Results(None))], ids=["any", "selective recompute"]
)
def test_outside_of_compiled_layers_it_is_compiled_alone(
    mode: type[Following], by_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    alone = torch.compile(flex_attention, backend=counter, fullgraph=True)
    monkeypatch.setattr(document_attention, "_alone", lambda: alone)
    blocks = seen_blocks(300, 40, None, CPU)
    with mode():
        attend_by_blocks(*inputs(), blocks)
    assert counter.frame_count == 1


def test_blocks_are_made_ahead_only_where_something_is_left_out_of_all_tokens(by_blocks: None) -> None:
    hidden, documents = torch.zeros(2, 300, 16), torch.zeros(2, 300, dtype=torch.int64)
    assert look_ahead(None, 300, None, hidden, 16) is None
    assert look_ahead(None, 300, 300, hidden, 16) is None
    assert isinstance(look_ahead(None, 300, 299, hidden, 16), Sight)
    assert isinstance(look_ahead(documents, 300, None, hidden, 16), Sight)
    # Context parallel: the documents are those of all tokens, of which some are here.
    assert look_ahead(documents, 150, None, hidden[:, :150], 16) is documents


def test_a_cpu_masks() -> None:
    hidden, documents = torch.zeros(2, 300, 16), torch.zeros(2, 300, dtype=torch.int64)
    assert look_ahead(documents, 300, 100, hidden, 16) is documents
