"""What being watched costs a rank: its words on phases, and the thread that tells how far it has come.

    python -m benchmarks.watch

Measured on the demo's model in one process, and for the thread in a world of two ranks with a full recorder of
collectives. The share is of a step's time; the aim is less than 0.1 %.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from meshwright.config import resolve_config
from meshwright.elastic.rank_side import PERIOD_S, _Answers
from meshwright.parallel.world import World
from meshwright.pulse import Pulse, read_pulse
from meshwright.training.job import make_job, prepare_sources
from meshwright.training.loop import TrainingLoop
from meshwright.verify.pool import RankPool

STEPS = 20


def seconds_of(work: Callable[[], object], times: int) -> float:
    """The median of five rounds, for one call."""
    rounds = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(times):
            work()
        rounds.append((time.thread_time() - began) / times)
    return statistics.median(rounds)


def demo_steps(folder: Path) -> tuple[float, float]:
    """Seconds of a step of the demo and how many phases it enters."""
    settings = [f"run.dir={folder / 'run'}", f"train.steps={STEPS}", "observe.tensorboard=false"]
    config = resolve_config(overrides=settings, preset="demo").config
    prepare_sources(config)
    make_job(config, 1)
    path = folder / "0.pulse"
    loop = TrainingLoop(config, World(pulse=Pulse(0, path)))
    began = time.perf_counter()
    loop.train()
    beat = read_pulse(path)
    assert beat is not None
    return (time.perf_counter() - began) / STEPS, beat.entered / STEPS


def telling(world: World, folder: Path) -> float:
    """Seconds of processor time that the thread takes each time."""
    for _ in range(2100):
        world.sum(torch.zeros(4))
    answers = _Answers(folder, world.rank)
    answers._tell()
    return seconds_of(answers._tell, 50)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pulse = Pulse(0, folder / "1.pulse")
        enter = seconds_of(lambda: pulse.enter("forward"), 100_000)
        step, entered = demo_steps(folder)
        with RankPool(2) as pool:
            tell = max(pool.run(telling, 2, folder))
    print(f"a word on the phase      {1e6 * enter:8.2f} us, {entered:.1f} of them a step of {1000 * step:.0f} ms")
    print(f"telling of collectives   {1e6 * tell:8.0f} us, each {PERIOD_S:g} s")
    phases, thread = enter * entered / step, tell / PERIOD_S
    print(f"of a rank's time         {100 * phases:8.4f} % + {100 * thread:.4f} % = {100 * (phases + thread):.4f} %")


if __name__ == "__main__":
    main()
