"""Activations in host memory: what moves, what stays, that nothing holds it on the device, and buffers used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.models.initialize import build
from meshwright.models.spec import Experts, ModelSpec
from meshwright.parallel.host_activations import HostActivations
from meshwright.parallel.host_memory import HostMemory, size_class
from meshwright.parallel.own_loop import Parallel
from meshwright.parallel.parallelize import parallelize
from meshwright.verify.live_memory import LiveMemory

LAYERS = 8
DENSE = ModelSpec(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
EXPERTS = Experts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
SPECS = {"dense": DENSE, "experts": DENSE.model_copy(update={"experts": EXPERTS})}


def model_of(shape: str, words: str, compiled: bool = False, layers: int = LAYERS) -> Parallel:
    spec = SPECS[shape].model_copy(update={"num_hidden_layers": layers})
    return parallelize(build(spec, seed=1), words, compiled=compiled)


def kept_by(model: Parallel) -> int:
    """Bytes that wait for the backward pass, which follows."""
    with LiveMemory() as live:
        loss = forward(model)
        kept = live.now
        loss.backward()
    return kept


def forward(model: Parallel) -> Tensor:
    tokens = torch.randint(64, (4, 128), generator=torch.Generator().manual_seed(1))
    return model(tokens).logsumexp(-1).mean()


def gradients(model: Parallel) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def host_of(model: Parallel) -> HostActivations:
    assert model.host_activations is not None
    return model.host_activations


@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "first:3"])
def test_the_device_keeps_the_last_layers_activations_and_no_others(shape: str, recompute: str) -> None:
    plain = model_of(shape, f"recompute={recompute}")
    last = "none" if recompute == "first:3" else recompute
    kept, own = kept_by(plain), kept_by(model_of(shape, f"recompute={last}", layers=1))
    model = model_of(shape, f"recompute={recompute} offload=activations")
    host = host_of(model).memory
    forward(model).backward()
    model.module.zero_grad()
    most = host.most
    with LiveMemory() as live:
        loss = forward(model)
        # Buffers of the first step are used again, so all that is new is on the device.
        left = live.now
        assert 0.99 * kept <= left + host.in_use <= 1.05 * kept
        loss.backward()
    assert left <= 1.01 * own
    assert host.in_use == 0
    assert host.most == most
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, gradients(plain)[name]), name  # type: ignore[arg-type]


def test_evaluation_moves_nothing() -> None:
    model = model_of("dense", "offload=activations")
    with torch.no_grad():
        forward(model)
    assert host_of(model).memory.most == 0


def test_a_graph_that_is_dropped_gives_its_buffers_back() -> None:
    model = model_of("dense", "offload=activations")
    loss = forward(model)
    assert host_of(model).memory.in_use > 0
    del loss
    assert host_of(model).memory.in_use == 0


def test_a_graph_that_is_kept_may_be_used_twice() -> None:
    plain, model = model_of("dense", "dp=1"), model_of("dense", "offload=activations")
    for one in (plain, model):
        loss = forward(one)
        loss.backward(retain_graph=True)
        loss.backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, gradients(plain)[name]), name  # type: ignore[arg-type]


def test_compiled_layers_move_what_they_keep_and_stay_in_one_piece() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain = model_of("dense", "dp=1", compiled=True)
    forward(plain).backward()
    model = model_of("dense", "offload=activations", compiled=True)
    for _ in range(2):
        model.module.zero_grad()
        loss = forward(model)
        # An input of each layer at least.
        assert host_of(model).memory.in_use >= (LAYERS - 1) * 4 * 128 * 64 * 4
        loss.backward()
    assert host_of(model).memory.in_use == 0
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, gradients(plain)[name]), name  # type: ignore[arg-type]
    torch._dynamo.reset()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 4097, 1 << 20, (1 << 20) + 1, 3 << 20, 123456789])
def test_a_buffer_is_larger_than_what_it_holds_by_an_eighth_at_most(size: int) -> None:
    assert size <= size_class(size) <= max(size * 1.125, size + 1)
    assert size_class(size_class(size)) == size_class(size)


def test_free_buffers_are_used_again_and_never_more_than_were_needed_at_once() -> None:
    memory = HostMemory()
    first = [memory.take(1 << 20, pinned=False) for _ in range(4)]
    places = {one.memory.data_ptr() for one in first}
    for one in first:
        memory.give(one)
    again: list[Any] = [memory.take(1 << 20, pinned=False) for _ in range(4)]
    assert {one.memory.data_ptr() for one in again} == places
    for one in again:
        memory.give(one)
    others = [memory.take(3 << 18, pinned=False) for _ in range(4)]
    assert memory.in_use == 3 << 20
    assert memory.idle <= 1 << 20
    assert len(others) == 4
