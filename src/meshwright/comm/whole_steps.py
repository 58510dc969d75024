"""How many steps of a run had better pass before its gradients are compressed. No torch.

What a step does not send is added to the next gradient, and says little by then if the loss falls fast: a run that ends
soon after does not catch up. Kinds that leave nothing over can begin at once. Where the shares come from is in
docs/log.md, "Compressed gradients and AdamW".
"""

from __future__ import annotations

from meshwright.comm.compression import Compression

PERCENT = {"powersgd": 70, "topk": 80}
"""Of a run's steps: those that go whole before a kind that leaves something over begins."""
LEAST = {"powersgd": 4, "topk": 0.01}
"""Columns, and the share of numbers, for which that was measured to be enough."""
PERCENT_OF_LESS = 90
"""Of a run's steps, for kinds that send less than that."""
UNKNOWN = 1000
"""Steps of a loop whose length nobody knows; as many as PyTorch's own PowerSGD hook waits."""
FROM_THE_FIRST = {"powersgd": "powersgd:4 ended 14.7%", "topk": "topk:0.01 ended 41%"}
"""How far above the loss without compression the demo of 500 steps ended when nothing went whole."""


def whole_steps(compression: Compression, steps: int | None) -> int:
    """Steps that go whole of so many, or of a number that is not known."""
    percent = PERCENT.get(compression.kind, 0)
    if percent and compression.number < LEAST[compression.kind]:
        percent = PERCENT_OF_LESS
    if steps is None:
        return UNKNOWN if percent else 0
    return -(-percent * steps // 100)


def early(compression: Compression, after: int, steps: int) -> str | None:
    """What it costs to begin after so many steps of a run; None where that is not early."""
    if after >= whole_steps(compression, steps):
        return None
    return (
        f"{compression.kind} after {after} of {steps} steps is early, and the loss may end higher for it: from the "
        f"first step on the demo with {FROM_THE_FIRST[compression.kind]} above the loss without compression"
    )
