"""Idle time of pipeline schedules over the real runtime, against what the schedules promise.

Two parts: four ranks whose stages sleep for set times (they take no core, so four of them run at once on any machine),
and two ranks that train a real decoder. For each schedule and rank: the share of the step in which it computes nothing,
measured and predicted. Run it on a quiet machine:

    python benchmarks/pipeline.py [--ranks 4] [--micro-batches 12] [--steps 5]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from meshwright.models.spec import ModelSpec
from meshwright.parallel.pipeline import Call, Pipeline, Shared
from meshwright.parallel.torch_releases import group_of
from meshwright.parallel.world import World
from meshwright.schedules import Action, Timeline, make_program, placement_of, simulate
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool

SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zero-bubble", "zbv")
POINTS = 0.05
"""How far a measured share may lie from the predicted one."""
SLEEP = 0.04
"""Seconds of a forward pass through all layers of a rank; so long go each half of a backward pass."""
Times = list[tuple[Action, float, float]]


class _Sleep(torch.autograd.Function):
    """Sleeps going forward and going back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class SleepyLayer(nn.Module):
    """Does the sleeping."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.seconds, self.seconds) * _Sleep.apply(self.weight, 0.0, self.seconds)


class Sleeper(nn.Module):
    """A stage that takes its time: forward, to the input, to the weight, as long each."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.ones(1, 1, 4))
        self.layer = SleepyLayer(seconds)

    def forward(self, hidden_BTC: Tensor | None) -> Tensor:
        return self.layer(self.embedding if hidden_BTC is None else hidden_BTC)


class Sleepers:
    """The stages of a pipeline that sleep."""

    def __init__(self, module: Sleeper, stages: int) -> None:
        self.module = module
        self.first_layer: nn.Module | None = module.layer
        self.layers = [range(stage, stage + 1) for stage in range(stages)]
        self.shared: list[Shared] = []
        self.everywhere: set[str] = set()

    def run(self, stage: int, call: Call, hidden: Tensor | None) -> Tensor:
        """A forward pass."""
        found: Tensor = self.module(hidden)
        return found

    def border(self, stage: int, call: Call) -> Tensor:
        """What it takes and gives."""
        return torch.empty(1, 1, 4)

    def check_wrapped(self, modules: Sequence[nn.Module], wrap: str) -> None:
        """Nothing is gathered."""


def asleep(world: World, schedule: str, micro_batches: int, steps: int) -> list[Times]:
    """The actions of a rank in some steps."""
    stages = len(placement_of(schedule, world.size))
    module = Sleeper(SLEEP * world.size / stages)
    group = group_of(list(range(world.size)))
    pipeline = Pipeline(module, schedule, Sleepers(module, stages), group)
    batches = [{"tokens_BT": torch.zeros(1, 1)}] * micro_batches
    found = []
    for _ in range(steps):
        dist.barrier()
        times, _wall = pipeline.forward_backward(batches, lambda output, _: output.sum()).times()
        found.append(times)
    return found


def at_work(world: World, case: Case) -> list[Times]:
    """The actions of a rank that trains."""
    step = step_of(world, case)
    found = []
    for number in range(case.steps + 1):
        step(number, batch_of(case, number, step.data_rank, step.strategy))
        assert step.parallel.last_step is not None
        found.append(step.parallel.last_step.times()[0])
    return found[1:]


def shares(by_rank: list[list[Times]]) -> list[float]:
    """The median share of idle time of each rank; a step lasts from the first action of any rank to the last one."""
    steps = range(len(by_rank[0]))
    timelines = [Timeline(tuple(tuple(times[step]) for times in by_rank)) for step in steps]
    return [median(timeline.idle_share(rank) for timeline in timelines) for rank in range(len(by_rank))]


def promised(schedule: str, by_rank: list[list[Times]], micro_batches: int) -> list[float]:
    """What the schedule promises if each pass takes what it took in the median."""
    spent: dict[tuple[int, str], list[float]] = {}
    for steps in by_rank:
        for action, start, end in (one for times in steps for one in times):
            spent.setdefault((action.stage, action.kind), []).append(end - start)
    costs = {key: median(seconds) for key, seconds in spent.items()}
    program = make_program(schedule, len(by_rank), micro_batches)
    timeline = simulate(program, lambda action: costs[action.stage, action.kind])
    return [timeline.idle_share(rank) for rank in range(len(by_rank))]


def theory(schedule: str, ranks: int, micro_batches: int) -> list[float]:
    """What the schedule promises for passes of set times."""
    units = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    timeline = simulate(make_program(schedule, ranks, micro_batches), lambda action: units[action.kind])
    return [timeline.idle_share(rank) for rank in range(ranks)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    table = Table(title="share of a step in which a rank computes nothing, in %")
    for column in ("stages", "schedule", "rank", "measured", "promised", "points apart", ""):
        table.add_column(column, justify="right")
    worst = 0.0

    def add(kind: str, schedule: str, measured: list[float], expected: list[float]) -> None:
        nonlocal worst
        for rank, (found, wanted) in enumerate(zip(measured, expected, strict=True)):
            apart = abs(found - wanted)
            worst = max(worst, apart)
            cells = (f"{100 * found:.1f}", f"{100 * wanted:.1f}", f"{100 * apart:.1f}")
            table.add_row(kind, schedule, str(rank), *cells, "met" if apart <= POINTS else "not met")

    with RankPool(options.ranks, timeout_s=300) as pool:
        for schedule in SCHEDULES:
            by_rank = pool.run(asleep, options.ranks, schedule, options.micro_batches, options.steps)
            add("asleep", schedule, shares(by_rank), theory(schedule, options.ranks, options.micro_batches))
        spec = ModelSpec(
            vocab_size=512,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=32,
            max_position_embeddings=256,
        )
        for schedule in SCHEDULES:
            strategy = f"dp=1 pp=2 layers=balanced schedule={schedule}"
            case = Case(spec, strategy, 2, "float32", micro_steps=8, batch=16, tokens=128, steps=options.steps)
            by_rank = pool.run(at_work, 2, case)
            add("training", schedule, shares(by_rank), promised(schedule, by_rank, 8))
    Console(width=120).print(table)
    print(f"largest distance {100 * worst:.1f} points; bar {100 * POINTS:.0f}")
    return 0 if worst <= POINTS else 1


if __name__ == "__main__":
    raise SystemExit(main())
