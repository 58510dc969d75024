"""FLOPs of a model's modules for one sequence, as PyTorch counts them where they run on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.models.decoder import Block
from meshwright.models.head import Head
from meshwright.models.rope import angles
from meshwright.models.spec import ModelSpec
from meshwright.models.stacked_experts import StackedExperts
from meshwright.planning.module_flops import DENSE, HEAD, MIXTURE, PAIRS, PROJECTIONS

Counts = Mapping[str, Mapping[Any, int]]


def counted_flops(spec: ModelSpec, length: int) -> dict[str, tuple[int, int]]:
    """Forward and backward FLOPs by the names of `module_flops`; a layer of each kind runs once and is counted for all.

    Experts get equal shares of the rows, since nothing decides between them where there are no values.
    """
    spec.check_buildable()
    found: dict[str, tuple[int, int]] = {}
    layers = range(spec.num_hidden_layers)
    with torch.device("meta"):
        rope = angles(spec, torch.arange(length)[None], torch.float32) if spec.positions == "rope" else None
        for sparse in sorted(set(map(spec.is_sparse, layers))):
            alike = [layer for layer in layers if spec.is_sparse(layer) == sparse]
            block = Block(spec, alike[0])
            _share_evenly(block)
            ahead, back = _count(partial(block, rope=rope), spec.hidden_size, length)
            parts = {
                PROJECTIONS: lambda counts: _sum(counts, "Block.self_attn", "mm"),
                PAIRS: lambda counts: _sum(counts, "Block.self_attn", "bmm"),
                MIXTURE if sparse else DENSE: lambda counts: _sum(counts, "Block.mlp", ""),
            }
            for name, part in parts.items():
                before = found.get(name, (0, 0))
                found[name] = before[0] + len(alike) * part(ahead), before[1] + len(alike) * part(back)
        head = Head(spec.hidden_size, spec.vocab_size, bias="head" in spec.bias)
        ahead, back = _count(head, spec.hidden_size, length)
        found[HEAD] = _sum(ahead, "Global", ""), _sum(back, "Global", "")
    return found


def _count(run: Callable[[Tensor], Tensor], width: int, length: int) -> tuple[Counts, Counts]:
    """What a forward pass takes, and what a backward pass takes beyond it, by module and operator."""
    x = torch.zeros(1, length, width, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        run(x)
    with FlopCounterMode(display=False) as both:
        run(x).sum().backward()
    ahead, all_of_it = forward.get_flop_counts(), both.get_flop_counts()
    back = {
        name: {key: count - ahead.get(name, {}).get(key, 0) for key, count in counts.items()}
        for name, counts in all_of_it.items()
    }
    return ahead, back


def _sum(counts: Counts, module: str, kind: str) -> int:
    """The FLOPs of a module's operators: all, products of matrices ("mm"), or of batches of them ("bmm")."""
    chosen = {str(key).removeprefix("aten."): count for key, count in counts.get(module, {}).items()}
    batches = sum(count for name, count in chosen.items() if name.startswith(("bmm", "baddbmm", "_scaled")))
    return sum(chosen.values()) - batches if kind == "mm" else batches if kind == "bmm" else sum(chosen.values())


def _share_evenly(block: nn.Module) -> None:
    def even(module: nn.Module, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        rows, counts = inputs
        experts = counts.shape[0]
        shares = [rows.shape[0] // experts + (expert < rows.shape[0] % experts) for expert in range(experts)]
        return rows, torch.tensor(shares, device="cpu")

    for module in block.modules():
        if isinstance(module, StackedExperts):
            module.register_forward_pre_hook(even)
