"""How long the ranks of a pipeline compute nothing: measured in a step, and predicted from what its passes took."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import torch
import torch.distributed as dist

from meshwright.schedules import Action, Program, simulate

KINDS = "FBIW"


@dataclass(frozen=True)
class Bubble:
    """The share of a step's time in which ranks wait, the mean over the ranks of a pipeline."""

    measured: float
    predicted: float
    """If passes took what they took on average and messages took no time."""


def bubble_of(
    program: Program,
    times: list[tuple[Action, float, float]],
    wall: float,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Bubble:
    """From what each rank has recorded; `wall` is how long its passes took altogether. All ranks must ask."""
    spent: dict[tuple[int, str], list[float]] = {}
    for action, start, end in times:
        spent.setdefault((action.stage, action.kind), []).append(end - start)
    own = torch.zeros(1 + program.stages * len(KINDS), dtype=torch.float64)
    own[0] = wall
    for (stage, kind), seconds in spent.items():
        own[1 + stage * len(KINDS) + KINDS.index(kind)] = fmean(seconds)
    own = own.to(device)
    gathered = [torch.empty_like(own) for _ in range(program.ranks)]
    dist.all_gather(gathered, own, group=group)
    longest = max(float(one[0]) for one in gathered)
    means = torch.stack(gathered)[:, 1:].sum(dim=0).view(program.stages, len(KINDS)).tolist()

    def cost(action: Action) -> float:
        return float(means[action.stage][KINDS.index(action.kind)])

    timeline = simulate(program, cost)
    busy = sum(cost(action) for actions in program.order for action in actions)
    return Bubble(
        measured=1 - busy / (program.ranks * longest),
        predicted=fmean(timeline.idle_share(rank) for rank in range(program.ranks)),
    )
