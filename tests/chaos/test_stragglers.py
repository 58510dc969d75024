"""Ranks that are slow: each is named with its phase, and whoever waits for it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.errors import ExitCode
from meshwright.observe.goodput import goodput
from meshwright.observe.rank_files import RankFiles
from meshwright.observe.trace_file import read_spans, write_trace
from tests.chaos.runs import Training, events, metrics, start
from tests.unit.test_trace import check_trace

pytestmark = pytest.mark.alone

SETTINGS = ("train.steps=24", "checkpoint.every=0", "observe.straggler_every=6", "observe.profile_every=2")
SLEEP = 0.12
"""Several times what a step takes, so that what else the machine does is little beside it."""


def slowed(rank: int, phase: str, after: int = 0) -> str:
    return f"rank={rank},phase={phase},kind=sleep:{SLEEP},times=100000,after={after}"


def train_slowed(folder: Path, settings: list[str], strategy: str, *faults: str) -> Training:
    training = start(folder, settings, *SETTINGS, f"parallel.strategy={strategy}", fault=";".join(faults))
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    found = events(training.folder, "straggler")
    for event in found:
        assert f"rank {event['rank']} on {event['host']} is slow in {event['phase']}" in ended.err
    return training


def named(training: Training) -> set[tuple[int, str]]:
    return {(event["rank"], event["phase"]) for event in events(training.folder, "straggler")}


def test_slow_copies_are_named_with_their_phases(settings: list[str], tmp_path: Path) -> None:
    training = train_slowed(tmp_path, settings, "zero=0", slowed(1, "forward"), slowed(0, "optimizer"))
    assert named(training) == {(1, "forward"), (0, "optimizer")}
    assert all(event["relative"] > 2 for event in events(training.folder, "straggler"))


@pytest.fixture(scope="module")
def sharded(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run whose ranks wait for each other in every pass, one of them slow in data and the other in backward."""
    folder = tmp_path_factory.mktemp("sharded")
    return train_slowed(folder, settings, "zero=3", slowed(1, "data"), slowed(0, "backward"))


def test_ranks_that_wait_for_slow_ones_in_their_passes_are_not_named(sharded: Training) -> None:
    assert named(sharded) == {(1, "data"), (0, "backward")}


def test_a_stage_that_becomes_slow_is_named_though_no_other_rank_does_its_work(
    settings: list[str], tmp_path: Path
) -> None:
    # Two micro-batches a step: slow from the ninth step on.
    settings = [*settings, "train.micro_batch=4"]
    training = train_slowed(tmp_path, settings, "pp=2 schedule=1f1b", slowed(1, "forward", after=16))
    assert named(training) == {(1, "forward")}
    (event,) = events(training.folder, "straggler")
    assert event["relative"] is None
    assert event["own"] > 2
    # The other stage has nothing to compute meanwhile, and its timeline shows that.
    write_trace(training.folder, tmp_path / "trace.json", "16:")
    shown = check_trace(json.loads((tmp_path / "trace.json").read_text()))
    assert {"forward", "backward", "collective", "transfer", "idle"} <= {span["cat"] for span in shown}
    assert {"F stage 0 micro-batch 1", "B stage 1 micro-batch 0"} <= {span["name"] for span in shown}
    assert max(span["dur"] for span in shown if span["pid"] == 0 and span["cat"] == "idle") > 0.7e6 * SLEEP


def test_a_stage_that_is_slow_from_the_start_is_named_by_its_part_of_the_model(
    settings: list[str], tmp_path: Path
) -> None:
    settings = [*settings, "train.micro_batch=4"]
    training = train_slowed(tmp_path, settings, "pp=2 schedule=1f1b", slowed(0, "forward"))
    assert named(training) == {(0, "forward")}
    (event,) = events(training.folder, "straggler")
    assert event["relative"] is None
    assert event["planned"] > 1.6


@pytest.mark.parametrize("strategy", ["zero=3", "pp=2 schedule=1f1b"])
def test_ranks_that_take_as_long_as_each_other_are_not_named(
    settings: list[str], tmp_path: Path, strategy: str
) -> None:
    assert not named(train_slowed(tmp_path, settings, strategy, slowed(0, "forward"), slowed(1, "forward")))


def test_timeline_of_a_run_is_a_trace_of_both_ranks(sharded: Training, tmp_path: Path) -> None:
    told = write_trace(sharded.folder, tmp_path / "trace.json", "10:19")
    assert "2 ranks" in told
    shown = check_trace(json.loads((tmp_path / "trace.json").read_text()))
    assert {span["pid"] for span in shown} == {0, 1}
    assert {"forward", "backward", "optimizer", "collective", "data"} <= {span["cat"] for span in shown}
    assert all(10 <= span["args"]["step"] <= 19 for span in shown)
    # A rank that sleeps before its backward pass keeps the other one waiting in a collective.
    waits = [span["dur"] / 1e6 for span in shown if span["pid"] == 1 and span["cat"] == "collective"]
    steps = {span["args"]["step"] for span in shown}
    assert sum(wait > 0.5 * SLEEP for wait in waits) > len(steps) / 2
    assert read_spans(sharded.folder, range(1000, 1001))[0].spans == []


def test_account_of_a_run_that_was_killed_and_went_on_has_what_that_cost(settings: list[str], tmp_path: Path) -> None:
    training = start(tmp_path, settings, fault="rank=1,step=9,phase=forward,kind=sigkill")
    began = training.started
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    (restarted,) = events(training.folder, "restarted")
    files = RankFiles(training.folder / "ranks")
    files.refresh()
    told, recorded = events(training.folder), metrics(training.folder)
    for of_ranks in (files.records, {}):
        found = goodput(told, recorded, of_ranks, began)
        assert sum(found.parts.values()) == pytest.approx(found.wall_s)
        assert found.wall_s == pytest.approx(told[-1]["time"] - began)
        assert (found.restarts, found.lost_steps) == (1, 3)
        assert found.parts["restart"] == pytest.approx(restarted["restart_s"], abs=1.0)
        assert found.parts["replayed"] > 0
        assert found.parts["startup"] > 0.2
        assert found.parts["evaluation"] > 0
        assert 0 < found.share < 1
