"""What recording takes of a short step, counted in time of a core: how busy the machine is does not matter then."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import load_config
from meshwright.observe.recorder import Recorder
from meshwright.observe.straggler_watch import StragglerWatch
from meshwright.parallel.world import World
from meshwright.trainer import Trainer
from meshwright.training.hooks import Hook
from meshwright.verify.pool import RankPool
from tests.parity.test_recorder import read

pytestmark = pytest.mark.alone

STEPS, WARM = 220, 20
SETTINGS = [
    "model.preset=tiny",
    "model.spec.num_hidden_layers=3",
    "data.sequence_length=128",
    f"train.steps={STEPS}",
    "train.global_batch=8",
    "train.eval_every=0",
    "checkpoint.every=0",
    "observe.tensorboard=false",
    "observe.profile_every=0",
    "parallel.strategy=dp=2",
]
"""Short steps, of about 20 ms of a core of 2024."""


def taken(hook: Any, name: str, into: list[float]) -> None:
    """Note how long calls of this method have a core."""
    call: Callable[..., Any] = getattr(hook, name)

    def timed(*arguments: Any) -> Any:
        began = time.thread_time()
        found = call(*arguments)
        into.append(time.thread_time() - began)
        return found

    setattr(hook, name, timed)


class Cores(Hook):
    """Notes how long all threads of this process have had a core after each step, and the one that writes."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.ends: list[float] = []
        self.writer: list[float] = []

    def after_step(self, *_: Any) -> None:
        assert self._recorder._recording is not None
        self.ends.append(time.process_time())
        self.writer.append(self._recorder._recording._writer.cpu_s)


def train(world: World, overrides: list[str]) -> dict[str, list[float]]:
    """How long calls of the recorder have had a core in each step, and until each step all threads and the writer."""
    trainer = Trainer(load_config(None, overrides), world)
    recorder = next(hook for hook in trainer.hooks if isinstance(hook, Recorder))
    calls: dict[str, list[float]] = {"metrics": [], "step": [], "lines": []}
    taken(recorder.metrics, "after_step", calls["metrics"])
    taken(recorder, "after_step", calls["step"])
    taken(next(hook for hook in trainer.hooks if isinstance(hook, StragglerWatch)), "_take_lines", calls["lines"])
    trainer.hooks.append(cores := Cores(recorder))
    trainer.train()
    return {**calls, "ends": cores.ends, "writer": cores.writer}


def usual(values: Iterable[float]) -> float:
    """The lower quartile: what others compute beside it makes calls longer, whose data leaves the caches."""
    return statistics.quantiles(values, n=4)[0]


def by_step(sums: list[float]) -> list[float]:
    """What is added to a sum now and then, by the steps since the last time."""
    grown = [step for step in range(1, len(sums)) if sums[step] > sums[step - 1]]
    return [(sums[step] - sums[last]) / (step - last) for last, step in pairwise(grown)]


@pytest.fixture(scope="module")
def ranks(pool: RankPool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, dict[str, Any]]]:
    """Both ranks of a run: what they recorded, and what was measured around it."""
    folder = tmp_path_factory.mktemp("cost") / "run"
    found = pool.run(train, 2, [*SETTINGS, f"data.path={corpus}", f"run.dir={folder}"])
    return [(folder / f"ranks/{rank:05d}.jsonl", measured) for rank, measured in enumerate(found)]


def test_recording_takes_less_than_half_a_percent_of_a_short_step(
    ranks: list[tuple[Path, dict[str, Any]]],
) -> None:
    for _, measured in ranks:
        step = usual(after - before for before, after in pairwise(measured["ends"][WARM:]))
        calls = usual(map(sum, zip(measured["metrics"][WARM:], measured["step"][WARM:], strict=True)))
        # Lines are written twice a second; 20 steps are told to the first rank together.
        beside = usual(by_step(measured["writer"])) + usual(measured["lines"]) * len(measured["lines"]) / STEPS
        said = f"{1e6 * calls:.0f} us and {1e6 * beside:.0f} us of {1e3 * step:.1f} ms"
        assert (calls + beside) / (step - calls) < 0.005, said


def test_what_is_said_of_the_cost_is_all_of_it(ranks: list[tuple[Path, dict[str, Any]]]) -> None:
    for path, measured in ranks:
        said = sum(line["inside_s"] for line in read(path) if line["kind"] == "recorder")
        around = sum(core for name in ("metrics", "step", "lines") for core in measured[name])
        # Some of it is around the clocks themselves, and the last lines are written when all is said.
        assert around + measured["writer"][-1] < 1.5 * said
