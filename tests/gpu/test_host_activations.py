"""Activations in host memory on a GPU: equal numbers, less memory, pinned buffers used again, copies beside kernels."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from meshwright.models.head import Targets
from meshwright.models.initialize import build
from meshwright.models.spec import ModelSpec
from meshwright.parallel.own_loop import Parallel
from meshwright.parallel.parallelize import parallelize

GPU = torch.device("cuda")
LENGTH, SAMPLES = 1024, 4
SPEC = ModelSpec(
    vocab_size=512,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=LENGTH,
)


@dataclass
class Found:
    losses: list[float]
    gradients: dict[str, Tensor]
    peak: int
    """Bytes on the GPU beyond what was there before the last step."""
    model: Parallel


def train(words: str, compiled: bool, steps: int = 3) -> Found:
    # In float32: in bf16, kernels that add up in any order tip roundings, and hide what else differs.
    model = parallelize(build(SPEC, seed=1).to(GPU), words, compiled=compiled)
    losses, peak = [], 0
    for step in range(steps):
        # Gradients keep their memory, so that what is measured is that of activations.
        model.module.zero_grad(set_to_none=False)
        tokens = torch.randint(512, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step)).to(GPU)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        weight = torch.tensor(1 / tokens.numel(), device=GPU)
        loss = model(tokens, targets=Targets(tokens.roll(-1, dims=1), weight))
        loss.backward()
        losses.append(loss.item())
        peak = torch.cuda.max_memory_allocated() - before
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Found(losses, gradients, peak, model)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_equal_losses_and_gradients_with_less_memory(recompute: str, compiled: bool) -> None:
    plain = train(f"recompute={recompute}", compiled)
    offloaded = train(f"recompute={recompute} offload=activations", compiled)
    assert offloaded.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, gradient in plain.gradients.items():
        other = offloaded.gradients[name]
        assert float((gradient - other).norm()) <= 1e-5 * float(gradient.norm()), name
    host = offloaded.model.host_activations
    assert host is not None
    assert host.memory.in_use == 0
    # Every layer but the last has its input there, at least.
    row = SAMPLES * LENGTH * SPEC.hidden_size * 4
    assert host.memory.most >= (SPEC.num_hidden_layers - 1) * row
    moved = host.memory.most / 1.125
    two_layers = 2 * moved / (SPEC.num_hidden_layers - 1)
    assert offloaded.peak < plain.peak - 0.8 * (moved - two_layers)


def test_buffers_are_pinned_once_and_used_again() -> None:
    found = train("offload=activations", compiled=False, steps=1)
    host = found.model.host_activations
    assert host is not None
    most, idle = host.memory.most, host.memory.idle
    assert most == idle > 0
    for _ in range(3):
        tokens = torch.randint(512, (SAMPLES, LENGTH), device=GPU)
        weight = torch.tensor(1.0, device=GPU)
        found.model(tokens, targets=Targets(tokens, weight)).backward()
    assert (host.memory.most, host.memory.idle) == (most, idle)
    buffer = host.memory.take(idle // 64, pinned=True)
    assert buffer.memory.is_pinned()


def test_copies_do_not_hold_the_host_up() -> None:
    model = train("offload=activations", compiled=False, steps=1).model
    tokens = torch.randint(512, (SAMPLES, LENGTH), device=GPU)
    weight = torch.tensor(1.0, device=GPU)
    torch.cuda.synchronize()
    with_error = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(tokens, targets=Targets(tokens, weight)).backward()
    finally:
        torch.cuda.set_sync_debug_mode(with_error)
