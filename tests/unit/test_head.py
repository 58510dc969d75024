"""The head's loss is the cross-entropy of whole logits, with their gradients, and whole logits never exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models import logit_chunks
from meshwright.models.cross_entropy import IGNORED
from meshwright.models.decoder import Decoder
from meshwright.models.head import Head, Targets
from meshwright.models.initialize import initialize
from tests.unit.specs import SPECS

WIDTH, ENTRIES = 12, 29
FEW = 4
"""Tokens of a chunk, where there are to be many."""


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many chunks":
        in_chunks(monkeypatch)


def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_chunks, "FEWEST", FEW)
    monkeypatch.setattr(logit_chunks, "CHUNK_BYTES", 1)


def make_head(bias: bool = True, dtype: torch.dtype = torch.float64) -> Head:
    generator = torch.Generator().manual_seed(5)
    made = Head(WIDTH, ENTRIES, bias=bias, dtype=dtype)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return made


def inputs(
    shape: tuple[int, ...] = (2, 9), ignored: float = 0.3, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """18 tokens are four chunks of four, and a last one of two."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(ENTRIES, shape, generator=generator)
    return x, targets.masked_fill(torch.rand(shape, generator=generator) < ignored, IGNORED)


def whole_loss(head: Head, x: Tensor, targets: Tensor, weight: float) -> Tensor:
    logits = F.linear(x, head.weight, head.bias)
    return weight * F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def gradients(head: Head, x: Tensor, loss: Tensor, upstream: float = 1.0) -> list[Tensor]:
    found = torch.autograd.grad(loss, [x, *head.parameters()], torch.full_like(loss, upstream))
    return list(found)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize(
    ("bias", "ignored", "weight", "upstream"),
    [(True, 0.3, 1.0, 1.0), (False, 0.0, 0.25, 1.0), (True, 0.3, 3.0, -2.5), (True, 1.1, 0.5, 1.0)],
    ids=["plain", "weighed", "weighed, of something else", "all ignored"],
)
def test_the_loss_and_its_gradients_are_those_of_whole_logits(
    bias: bool, ignored: float, weight: float, upstream: float
) -> None:
    head = make_head(bias)
    x, targets = inputs(ignored=ignored)
    found = head(x, Targets(targets, torch.tensor(weight, dtype=torch.float64)))
    expected = whole_loss(head, x, targets, weight)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = gradients(head, x, found, upstream), gradients(head, x, expected, upstream)
    assert [gradient.shape for gradient in ours] == [gradient.shape for gradient in theirs]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
    if ignored > 1:
        assert found.item() == 0
        assert not any(gradient.any() for gradient in ours)


def test_few_tokens_make_a_chunk_where_the_vocabulary_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_chunks, "CHUNK_BYTES", 1 << 20)
    assert logit_chunks.chunk_tokens(1 << 20, 2) == logit_chunks.FEWEST
    assert logit_chunks.chunk_tokens(512, 2) == 1024
    assert logit_chunks.chunk_tokens(700, 2) % logit_chunks.FEWEST == 0
    assert logit_chunks.chunk_tokens(700, 2) * 700 * 2 <= 1 << 20
    assert logit_chunks.chunk_tokens(0, 2) >= logit_chunks.FEWEST, "a rank may have no entry of a vocabulary"


@pytest.mark.usefixtures("chunks")
def test_without_gradients_the_loss_is_the_same() -> None:
    head = make_head()
    x, targets = inputs()
    weighed = Targets(targets, torch.tensor(0.5, dtype=torch.float64))
    with torch.no_grad():
        found = head(x, weighed)
    assert not found.requires_grad
    assert torch.equal(found, head(x, weighed).detach())


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_does_not_learn_gets_no_gradient_and_what_does_gets_its_own(frozen: str) -> None:
    head = make_head(bias=False)
    x, targets = inputs()
    expected = dict(zip(("x", "weight"), gradients(head, x, whole_loss(head, x, targets, 1.0)), strict=True))
    (x if frozen == "x" else head.weight).requires_grad_(False)
    head(x, Targets(targets, torch.ones((), dtype=torch.float64))).backward()
    for name, value in (("x", x), ("weight", head.weight)):
        if name == frozen:
            assert value.grad is None
        else:
            torch.testing.assert_close(value.grad, expected[name], rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("chunks")
def test_in_bf16_the_weights_gradient_is_float32_and_nearer_the_truth_than_whole_logits() -> None:
    exact = make_head()
    head = make_head(dtype=torch.float32)
    x, targets = inputs((8, 64), dtype=torch.bfloat16)
    rounded = Head(WIDTH, ENTRIES, dtype=torch.float64)
    for name, parameter in rounded.named_parameters():
        parameter.data = getattr(exact, name).data.to(torch.bfloat16).double()
    weight = 1 / 100
    found = gradients(head, x, head(x, Targets(targets, torch.tensor(weight))))
    wide = x.detach().double().requires_grad_()
    truth = gradients(rounded, wide, whole_loss(rounded, wide, targets, weight))
    logits = F.linear(x, head.weight.bfloat16(), head.bias.bfloat16())
    plain = gradients(
        head, x, weight * F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction="sum")
    )
    assert [gradient.dtype for gradient in found] == [torch.bfloat16, torch.float32, torch.float32]

    def distance(gradient: Tensor, number: int) -> float:
        return float((gradient.double() - truth[number]).norm() / truth[number].norm())

    for number in range(3):
        assert distance(found[number], number) < 2e-2
    # The plain path rounds the sum over all tokens to bf16; ours only what one chunk adds to it (on a CPU).
    for number in (1, 2):
        assert distance(found[number], number) <= distance(plain[number], number) * 1.01


@pytest.mark.usefixtures("chunks")
def test_a_backward_pass_in_two_parts_gives_the_gradients_of_one() -> None:
    head = make_head()
    x, targets = inputs()
    expected = gradients(head, x, whole_loss(head, x, targets, 2.0), 3.0)
    # As zero-bubble schedules do: first to the inputs, later to the weights.
    loss = head(x * 1.0, Targets(targets, torch.tensor(2.0, dtype=torch.float64)))
    upstream = torch.tensor(3.0, dtype=torch.float64)
    (x_grad,) = torch.autograd.grad(loss, [x], upstream, retain_graph=True)
    rest = torch.autograd.grad(loss, list(head.parameters()), upstream)
    for one, other in zip((x_grad, *rest), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_a_third_whole_backward_pass_is_refused_and_not_wrong() -> None:
    head = make_head(bias=False)
    x, targets = inputs()
    loss = head(x, Targets(targets, torch.ones((), dtype=torch.float64)))
    # Autograd adds to the very tensors that were handed out, and notices that the next pass would hand them out again.
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_tokens_have_no_loss_and_zero_gradients() -> None:
    head = make_head()
    x, targets = inputs((0,))
    loss = head(x, Targets(targets, torch.ones((), dtype=torch.float64)))
    assert loss.item() == 0
    assert [gradient.shape for gradient in gradients(head, x, loss)] == [(0, WIDTH), (ENTRIES, WIDTH), (ENTRIES,)]


def test_inputs_may_lie_in_memory_in_any_order() -> None:
    head = make_head()
    x, targets = inputs((15,))
    turned = x.detach().T.contiguous().T.requires_grad_()
    found = gradients(head, turned, head(turned, Targets(targets, torch.ones((), dtype=torch.float64))))
    expected = gradients(head, x, whole_loss(head, x, targets, 1.0))
    assert found[0].is_contiguous(), "a GPU's kernel scales it as one run of numbers"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", ["tied", "head bias", "experts", "gpt2-like"])
def test_a_decoder_given_targets_learns_as_from_its_logits(name: str) -> None:
    model = Decoder(SPECS[name]).double()
    initialize(model, SPECS[name], seed=3)
    torch.manual_seed(3)
    tokens = torch.randint(37, (2, 10))
    targets, samples = tokens.roll(-1, dims=1).clone(), torch.arange(2)
    targets[:, -1] = IGNORED
    losses = []
    found: list[dict[str, Tensor | None]] = []
    for whole in (True, False):
        model.zero_grad()
        if whole:
            logits = model(tokens, samples_B=samples)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 18
        else:
            loss = model(tokens, samples_B=samples, targets=Targets(targets, torch.tensor(1 / 18, dtype=torch.float64)))
        loss.backward()
        losses.append(loss.item())
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-9, atol=1e-13)


class Largest(TorchDispatchMode):
    """The most elements that a tensor has had that an operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        result = operation(*inputs, **(options or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_whole_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch)
    head = make_head(dtype=torch.float32)
    x, targets = inputs((4, 32), dtype=torch.bfloat16)
    with Largest() as largest:
        head(x, Targets(targets, torch.ones(()))).backward()
    tokens = targets.numel()
    assert largest.elements == max(tokens * WIDTH, ENTRIES * WIDTH) < tokens * ENTRIES
    with Largest() as largest:
        whole_loss(head, x.float(), targets, 1.0).backward()
    assert largest.elements == tokens * ENTRIES, "what is counted sees whole logits where there are any"


class Products(TorchDispatchMode):
    """The shapes of factors of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        if operation.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes += [value.shape for value in inputs if isinstance(value, Tensor)]
        return operation(*inputs, **(options or {}))


def test_products_in_16_bits_have_vocabularies_in_eights() -> None:
    head = make_head(dtype=torch.float32)
    x, targets = inputs(dtype=torch.bfloat16)
    with Products() as products:
        head(x, Targets(targets, torch.ones(()))).backward()
    lengths = {length for shape in products.shapes for length in shape}
    assert lengths == {targets.numel(), WIDTH, 32}
