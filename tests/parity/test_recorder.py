"""What ranks record of their steps: each one, all of its time, and what the strategy makes a rank wait for."""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import load_config
from meshwright.estimate.state import state_bytes
from meshwright.estimate.traffic import Work, step_traffic
from meshwright.estimate.units import Place
from meshwright.faults import parse_faults
from meshwright.models.presets import preset
from meshwright.observe.profiling import labels_of
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.trainer import Trainer
from meshwright.verify.collectives import by_ranks
from meshwright.verify.pool import RankPool

pytestmark = pytest.mark.alone

STEPS, SLOW_STEP, SLOW_S = 12, 8, 1.0
PROFILED = (5, 9)
SETTINGS = [
    "model.preset=tiny",
    "model.spec.num_hidden_layers=2",
    "data.sequence_length=128",
    f"train.steps={STEPS}",
    "train.global_batch=16",
    "train.micro_batch=2",
    "train.eval_every=6",
    "train.eval_sequences=8",
    "checkpoint.every=7",
    "checkpoint.background=false",
    "observe.profile_every=4",
    "observe.tensorboard=false",
]
STRATEGIES = {"dp=2": 2, "dp=2 zero=3": 2, "dp=1 pp=2": 2, "dp=2 tp=2": 4}
FAULT = f"rank=1,step={SLOW_STEP},phase=backward,kind=sleep:{SLOW_S}"

Sent = Counter[tuple[str, str]]


def train_slowly(world: World, overrides: list[str], fault: str) -> tuple[int, Sent]:
    """Train with a fault; gives what a step should send by the closed form, where there is one."""
    world.pulse._faults = parse_faults(fault)
    trainer = Trainer(load_config(None, overrides), world)
    trainer.train()
    assert world.pulse.listeners == []
    strategy, sent = trainer.job.strategy, Counter[tuple[str, str]]()
    if strategy.pp == strategy.ep == 1:
        assert trainer.one_step.mesh is not None
        together = 16 // strategy.micro_steps(16, 2)
        samples = strategy.own_samples(trainer.one_step.data_rank, together)
        work = Work(strategy.micro_steps(16, 2), samples.stop - samples.start, 128)
        place = Place.of(strategy, world.rank)
        labels = labels_of(trainer.one_step.mesh)
        traffic = by_ranks(step_traffic(trainer.job.spec, strategy, work, place.tp), trainer.one_step.mesh)
        for (kind, ranks), moved in traffic.bytes.items():
            sent[labels[ranks], kind] += moved
        # The loop knows how many targets count, and nobody has to ask.
        sent[labels[" ".join(map(str, range(world.size)))], "all_reduce"] -= 8
    return world.rank, sent


class Recorded:
    """A run folder, read as who shows it would."""

    def __init__(self, folder: Path, ranks: int, sent: dict[int, Sent]) -> None:
        self.folder, self.sent = folder, sent
        self.lines = {rank: read(folder / f"ranks/{rank:05d}.jsonl") for rank in range(ranks)}
        self.spans = {rank: read(folder / f"ranks/{rank:05d}.spans.jsonl") for rank in range(ranks)}
        self.metrics = read(folder / "metrics.jsonl")

    def steps(self, rank: int) -> dict[int, dict[str, Any]]:
        return {line["step"]: line for line in self.lines[rank] if line["kind"] == "step"}

    def of(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines[rank] if line["kind"] == kind]


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def record(pool: RankPool, corpus: Path, folder: Path, strategy: str, ranks: int, *more: str) -> Recorded:
    overrides = [*SETTINGS, f"data.path={corpus}", f"run.dir={folder}", f"parallel.strategy={strategy}", *more]
    return Recorded(folder, ranks, dict(pool.run(train_slowly, ranks, overrides, FAULT)))


@pytest.fixture(scope="module")
def recorded(pool: RankPool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """A run of each strategy, one step of which is slow on one rank."""
    root = tmp_path_factory.mktemp("recorded")
    return {
        strategy: record(pool, corpus, root / str(number), strategy, ranks)
        for number, (strategy, ranks) in enumerate(STRATEGIES.items())
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_step_of_every_rank_is_there_and_all_of_its_time(strategy: str, recorded: dict[str, Recorded]) -> None:
    run = recorded[strategy]
    for rank, lines in run.lines.items():
        assert lines[0]["kind"] == "rank"
        assert (lines[0]["rank"], lines[0]["world"], lines[0]["device"]) == (rank, STRATEGIES[strategy], "cpu")
        steps = run.steps(rank)
        assert list(steps) == list(range(1, STEPS + 1))
        for line in steps.values():
            assert sum(line["parts"].values()) == pytest.approx(line["seconds"], abs=1e-5)
            assert min(line["parts"].values()) > 0
            assert line["memory"]["rss"] > 2**26
            assert line["parts"].get("unattributed", 0.0) < 0.05 * line["seconds"]
        # Steps follow each other without a gap; single times may be those of a moment in which others computed.
        first, *others = steps.values()
        gaps = [
            line["time"] - before["time"] - line["seconds"]
            for before, line in zip([first, *others], others, strict=False)
        ]
        assert abs(statistics.median(gaps)) < 0.005
        assert abs(sum(gaps)) < 0.1
        assert [step for step, line in steps.items() if line["parts"].get("evaluate")] == [6, 12]
        assert [step for step, line in steps.items() if line["parts"].get("checkpoint")] == [7]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_slow_phase_of_one_rank_shows_there_and_nowhere_else(strategy: str, recorded: dict[str, Recorded]) -> None:
    run = recorded[strategy]
    own = {step: line["parts"]["backward"] for step, line in run.steps(1).items()}
    assert own[SLOW_STEP] > SLOW_S
    assert statistics.median(own.values()) < SLOW_S / 2
    for part in ("forward", "optimizer", "data", "hooks"):
        assert run.steps(1)[SLOW_STEP]["parts"].get(part, 0.0) < SLOW_S


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_profiled_steps_are_broken_down(strategy: str, recorded: dict[str, Recorded]) -> None:
    run = recorded[strategy]
    for rank in run.lines:
        steps = run.steps(rank)
        assert tuple(step for step, line in steps.items() if line.get("profiled")) == PROFILED
        assert [line["step"] for line in run.of(rank, "collectives")] == list(PROFILED)
        assert [line["step"] for line in run.spans[rank]] == list(PROFILED)
        for step in PROFILED:
            line = steps[step]
            whole = line["compute"] + line["communication"]["exposed"] + line["bubble"] + line["idle"]
            # What the profiler itself takes is in the step, among the hooks, and no idleness of the training.
            assert line["seconds"] - line["parts"]["hooks"] - 1e-5 < whole < line["seconds"]
            assert line["compute"] > 0
            assert line["parts"].get("communication", 0.0) == pytest.approx(line["communication"]["exposed"], abs=1e-5)
            assert line["parts"].get("bubble", 0.0) == pytest.approx(line["bubble"], abs=1e-5)
            assert sum(line["exposed_in"].values()) == pytest.approx(line["communication"]["exposed"], abs=1e-5)
            assert set(line["exposed_in"]) <= {"data", "forward", "backward", "reduce", "optimizer"}
        for line in run.spans[rank]:
            begin = line["begin"]
            assert abs(begin + line["unix"] - steps[line["step"]]["time"]) < 60
            assert all(name and start <= end for name, _, start, end in line["spans"])
            assert {"forward", "backward", "optimizer", "collective"} <= {kind for _, kind, _, _ in line["spans"]}
            assert min(start for _, _, start, _ in line["spans"]) > begin - 1


@pytest.mark.parametrize("strategy", [one for one in STRATEGIES if "pp" not in one])
def test_bytes_of_collectives_are_those_of_the_closed_form(strategy: str, recorded: dict[str, Recorded]) -> None:
    assert_bytes(recorded[strategy])


def assert_bytes(run: Recorded) -> None:
    """Collectives send what the closed form says, in some time."""
    for rank, sent in run.sent.items():
        for line in run.of(rank, "collectives"):
            found: Sent = Counter()
            for row in line["rows"]:
                found[row["group"], row["operation"]] += row["bytes"]
                assert row["seconds"] > 0
                assert row["algorithm_gb_s"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9, rel=1e-3)
            assert found == sent


def test_experts_exchange_rows_in_a_group_of_their_own_name(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    run = record(pool, corpus, tmp_path / "run", "dp=2 ep=2", 2, "model.preset=tiny-moe", "train.steps=5")
    for rank in run.lines:
        (line,) = run.of(rank, "collectives")
        groups: dict[str, set[str]] = {}
        for row in line["rows"]:
            groups.setdefault(row["group"], set()).add(row["operation"])
        assert groups == {"ep": {"all_to_all"}, "dp": {"all_gather", "all_reduce"}}


def test_sharded_weights_show_as_communication_over_data_ranks(recorded: dict[str, Recorded]) -> None:
    run = recorded["dp=2 zero=3"]
    for rank in run.lines:
        for step in PROFILED:
            communication = run.steps(rank)[step]["communication"]
            assert communication["exposed"] + communication["overlapped"] > 0
            assert run.steps(rank)[step]["bubble"] == 0
        operations = {row["operation"] for line in run.of(rank, "collectives") for row in line["rows"]}
        assert {"all_gather", "reduce_scatter"} <= operations


def test_a_pipeline_shows_its_bubble_its_passes_and_its_messages(recorded: dict[str, Recorded]) -> None:
    run = recorded["dp=1 pp=2"]
    for rank, waiting in ((0, "backward"), (1, "forward")):
        for step in PROFILED:
            line = run.steps(rank)[step]
            # The first stage waits for gradients, the last one for what comes in.
            assert line["bubble_in"].get(waiting, 0.0) > 0
        names = [name for line in run.spans[rank] for name, _, _, _ in line["spans"]]
        assert f"F stage {rank} micro-batch 3" in names
        assert f"B stage {rank} micro-batch 0" in names
        kinds = {(row["group"], row["operation"]) for line in run.of(rank, "collectives") for row in line["rows"]}
        assert ("pp", "receive") in kinds
        # Eight passes of two sequences of 128 tokens in float32 cross the border, each way.
        (received,) = [row for row in run.of(rank, "collectives")[0]["rows"] if row["operation"] == "receive"]
        assert (received["count"], received["bytes"]) == (8, 8 * 2 * 128 * preset("tiny").hidden_size * 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_say_who_they_are_and_what_they_hold(strategy: str, recorded: dict[str, Recorded]) -> None:
    run = recorded[strategy]
    places = set()
    for rank in run.lines:
        (line,) = run.of(rank, "rank")
        parsed = Strategy.parse(strategy, STRATEGIES[strategy])
        places.add(tuple(line["coordinates"].values()))
        place = Place.of(parsed, rank)
        assert (line["coordinates"]["pp"], line["coordinates"]["tp"]) == (place.pp, place.tp)
        assert line["strategy"] == str(parsed)
        spec = preset("tiny").model_copy(update={"num_hidden_layers": 2})
        expected = state_bytes(spec, parsed, place, micro_steps=8)
        kinds = {"parameters": expected.parameters, "optimizer": expected.optimizer}
        kinds["gradients"] = expected.parameters if parsed.zero >= 2 else expected.gradients
        assert line["memory_kinds"] == kinds
        # What is predicted beside it is of the same moment.
        planned = json.loads((run.folder / "plan.json").read_text())["expected"]["memory"]["by_stage"][place.pp]
        assert {name: planned["bytes"][name] for name in kinds} == pytest.approx(kinds, abs=1)
    assert len(places) == STRATEGIES[strategy]


def test_speed_and_restlessness_are_among_the_metrics(recorded: dict[str, Recorded]) -> None:
    for strategy, run in recorded.items():
        for line in run.metrics:
            assert line["tokens_per_s_per_device"] == pytest.approx(line["tokens_per_s"] / STRATEGIES[strategy])
            assert line["tflops_per_device"] > 0
            assert "mfu" not in line
            assert line["loss_max"] >= line["loss"] - 1e-9
            assert line["spike_score"] == 0
        # The most so far never shrinks, and is no less than what the first rank held when its steps ended.
        peaks = [line["peak_memory_gib"] for line in run.metrics]
        assert peaks == sorted(peaks)
        assert peaks[-1] * 2**30 >= 0.95 * max(line["memory"]["rss"] for line in run.steps(0).values())
        # Each replica has other samples, so one of them is worse than the mean.
        is_split = "dp=2" in strategy
        assert (run.metrics[-1]["loss_max"] > run.metrics[-1]["loss"]) == is_split


def test_what_recording_costs_is_recorded_and_little(recorded: dict[str, Recorded]) -> None:
    shares = []
    for run in recorded.values():
        for rank in run.lines:
            costs = run.of(rank, "recorder")
            assert [line["step"] for line in costs] == [*PROFILED, STEPS]
            assert all("profiler_s" in line for line in costs[:2])
            assert all(line["inside_s"] > 0 for line in costs)
            shares += [line["share"] for line in costs]
    # A rank that has to wait for a core waits there as well, now and then: the middle of all tells what it costs.
    assert statistics.median(shares) < 0.01


def test_steps_that_were_undone_are_recorded_and_recorded_again(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    bad = ";".join(f"step={step},phase=forward,kind=nan" for step in (9, 10))
    overrides = [*SETTINGS, f"data.path={corpus}", f"run.dir={tmp_path / 'run'}", "parallel.strategy=dp=2"]
    pool.run(train_slowly, 2, [*overrides, "elastic.bad_steps=2", "checkpoint.every=6"], bad)
    for rank in range(2):
        lines = read(tmp_path / f"run/ranks/{rank:05d}.jsonl")
        steps = [line["step"] for line in lines if line["kind"] == "step"]
        assert steps == [*range(1, 11), *range(7, 13)]
        for line in lines:
            if line["kind"] == "step":
                assert sum(line["parts"].values()) == pytest.approx(line["seconds"], abs=1e-5)


def test_steps_that_others_profile_are_left_to_them(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    asked = ["observe.profile_every=1", "observe.profile_steps=7:8", "train.steps=10", "checkpoint.every=0"]
    run = record(pool, corpus, tmp_path / "run", "dp=2", 2, *asked)
    for rank in range(2):
        assert [step for step, line in run.steps(rank).items() if line.get("profiled")] == [5, 9, 10]
    assert len(list((tmp_path / "run/profile").glob("*.trace.json.gz"))) == 2


def train_under_another_profiler(world: World, overrides: list[str]) -> None:
    # As the recorder does it for its own: torch would tell of every start.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Trainer(load_config(None, overrides), world).train()
    assert world.pulse.listeners == []
    assert any(event.key == "aten::mm" for event in profile.key_averages())


def test_a_profiler_of_ones_own_is_left_alone(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    overrides = [*SETTINGS, f"data.path={corpus}", f"run.dir={tmp_path / 'run'}", "train.steps=7"]
    pool.run(train_under_another_profiler, 1, overrides)
    steps = [line for line in read(tmp_path / "run/ranks/00000.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 8))
    assert not any(line.get("profiled") for line in steps)


def test_without_profiles_steps_are_recorded_all_the_same(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    run = record(pool, corpus, tmp_path / "run", "dp=2", 2, "observe.profile_every=0", "train.steps=6")
    assert list(run.steps(1)) == list(range(1, 7))
    assert not any(line.get("profiled") for line in run.steps(1).values())
    assert not (tmp_path / "run/ranks/00001.spans.jsonl").exists()
