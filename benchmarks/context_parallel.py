"""Context parallel against one rank: peak memory of attention's activations, and how evenly ranks share its work.

The attention part of a layer (projections, rotary positions, attention, output projection) runs forward and backward
in float32 on one process and on four. Memory is that of live tensors, operation by operation, without parameters and
their gradients; the rank with the highest peak counts. Work is the pairs of a query and a key that the attention
kernels were called for.

    python benchmarks/context_parallel.py [--tokens 4096]
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.models.attention import Attention
from meshwright.models.rope import angles
from meshwright.models.spec import ModelSpec
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.ring_attention import RING_ATTENTION, ring_forward
from meshwright.parallel.world import World
from meshwright.verify.live_memory import LiveMemory
from meshwright.verify.pool import RankPool

RANKS = 4
METHODS = ("ring", "ulysses", "ulysses:2")
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 64
MEMORY_BAR, WORK_BAR = 0.30, 0.05
"""The ring's peak as a share of one rank's; by how much the busiest rank may have more work than the mean."""

KERNELS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class CountPairs(TorchDispatchMode):
    """Counts the pairs of a query and a key for which attention kernels are called, over all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = 0

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        if operation in KERNELS:
            first = KERNELS.index(operation)
            query, key, causal = inputs[first], inputs[first + 1], any(value is True for value in inputs)
            batch, heads, tokens, _ = query.shape
            attended = (tokens + 1) / 2 if causal else key.shape[2]
            self.pairs += round(batch * heads * tokens * attended)
        if operation is RING_ATTENTION:
            with self:
                return ring_forward(*inputs, **(options or {}))
        return operation(*inputs, **(options or {}))


class AttentionPart(nn.Module):
    """One attention layer on random activations of the tokens that it is given."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.self_attn = Attention(spec, layer=0)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        x_BTC = torch.randn(*tokens_BT.shape, self.spec.hidden_size, requires_grad=True)
        return self.self_attn(x_BTC, angles(self.spec, positions_BT, x_BTC.dtype))


def forward_and_backward(part: nn.Module, tokens: int) -> None:
    """Nobody but autograd keeps what goes in and what comes out, as in a model."""
    positions = torch.arange(tokens)[None]
    output = part(torch.zeros_like(positions), positions)
    gradient, edge = torch.ones_like(output), get_gradient_edge(output)
    del output
    torch.autograd.backward(edge, gradient)


def measure(world: World, tokens: int, method: str) -> tuple[int, int]:
    """The peak of this rank's memory, and its pairs."""
    shape = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": HEADS * HEAD_SIZE}
    others = {"vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": tokens}
    part = AttentionPart(ModelSpec.model_validate({**shape, **others}))
    if world.size > 1:
        parallelize(part, f"dp=1 cp={world.size} cp_method={method}")
    for parameter in part.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveMemory({RING_ATTENTION: ring_forward}) as memory:
        forward_and_backward(part, tokens)
    with CountPairs() as work:
        forward_and_backward(part, tokens)
    return memory.peak, work.pairs


@dataclass(frozen=True)
class Measured:
    """What a method takes on four ranks, against one."""

    peak: int
    memory: float
    """Of the rank with the highest peak, as a share of one rank's."""
    imbalance: float
    """By how much the busiest rank has more pairs than the mean."""


def compare(pool: RankPool, tokens: int) -> tuple[int, dict[str, Measured]]:
    """One rank's peak, and each method's figures."""
    ((alone, _),) = pool.run(measure, 1, tokens, "ring")
    found = {}
    for method in METHODS:
        peaks, pairs = zip(*pool.run(measure, RANKS, tokens, method), strict=True)
        found[method] = Measured(max(peaks), max(peaks) / alone, max(pairs) * RANKS / sum(pairs) - 1)
    return alone, found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args().tokens
    with RankPool(RANKS) as pool:
        alone, found = compare(pool, tokens)
    table = Table(title=f"attention of {tokens} tokens, {HEADS} heads of {HEAD_SIZE}, {KV_HEADS} KV heads; cp={RANKS}")
    for column in ("method", "peak", "of one rank", "bar", "work above mean", "bar", "verdict"):
        table.add_column(column, justify="left" if column in ("method", "verdict") else "right")
    table.add_row("one rank", f"{alone / 1e6:.1f} MB", "", "", "", "", "")
    for method, row in found.items():
        # The ring's memory is held to a bar; the others' is there to compare.
        limit = MEMORY_BAR if method == "ring" else float("inf")
        bar, met = f"{limit:.2f}" if method == "ring" else "", row.memory <= limit and row.imbalance < WORK_BAR
        peak, share, above = f"{row.peak / 1e6:.1f} MB", f"{row.memory:.3f}", f"{row.imbalance:.2%}"
        table.add_row(method, peak, share, bar, above, f"{WORK_BAR:.0%}", "met" if met else "missed")
    Console().print(table)


if __name__ == "__main__":
    main()
