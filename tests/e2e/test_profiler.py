"""observe.profile_steps: traces and memory of the steps that were asked for, of every rank, that others can read."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CommandLine

pytestmark = pytest.mark.slow


def read(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def test_chosen_steps_are_profiled_on_every_rank(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    wrong = meshwright("train", *tiny_run, "run.dir=a", "observe.profile_steps=5:3")
    assert wrong.returncode == 2
    assert "observe.profile_steps='5:3' is not FIRST:LAST" in wrong.stderr
    result = meshwright("train", *tiny_run, "--nproc", 2, "run.dir=a", "observe.profile_steps=3:4")
    assert result.returncode == 0, result.stderr
    assert "profile steps 3 to 4: traces and memory of each rank are in a/profile" in result.stdout
    for rank in (0, 1):
        name = f"steps-3-4.rank-{rank:05d}"
        trace = read(tmp_path / f"a/profile/{name}.trace.json.gz")
        marks = {event["name"]: event for event in trace["traceEvents"] if event["name"].startswith("step ")}
        assert sorted(marks) == ["step 3", "step 4"]
        # The work of a step lies inside of its mark: its products, and what the ranks tell each other.
        step = marks["step 3"]
        inside = [
            event["name"]
            for event in trace["traceEvents"]
            if "dur" in event and step["ts"] <= event["ts"] <= step["ts"] + step["dur"]
        ]
        assert "aten::mm" in inside
        assert any("allreduce" in name or "all_reduce" in name for name in inside)
        memory = read(tmp_path / f"a/profile/{name}.memory.json.gz")["events"]
        assert all(before[0] <= after[0] for before, after in zip(memory, memory[1:], strict=False))
        assert max(total for _, _, total in memory) > 10_000
    # A run that ends on the way leaves what there was.
    short = meshwright("train", *tiny_run, "run.dir=b", "train.steps=2", "observe.profile_steps=2:9")
    assert short.returncode == 0, short.stderr
    assert (tmp_path / "b/profile/steps-2-2.rank-00000.trace.json.gz").exists()


def spans_of(run: Path, rank: int) -> dict[int, Any]:
    """The timelines of a rank, by step."""
    lines = (run / f"ranks/{rank:05d}.spans.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines)}


def steps_with_spans(run: Path, rank: int) -> list[int]:
    """The steps of a rank's timelines, one for each line."""
    lines = (run / f"ranks/{rank:05d}.spans.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("strategy", ["dp=2", "dp=1 pp=2"])
def test_steps_on_demand_have_a_timeline_as_those_in_turn(
    strategy: str, meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    asked = ["train.steps=10", "observe.profile_steps=7:9", "observe.profile_every=50", "train.micro_batch=1"]
    result = meshwright("train", *tiny_run, *asked, "--nproc", 2, "run.dir=a", f"parallel.strategy={strategy}")
    assert result.returncode == 0, result.stderr
    assert "no timeline" not in result.stderr
    written = meshwright("watch", "a", "--trace", "t.json", "--steps", "7:9")
    assert "of 2 ranks, steps 7, 8, 9;" in written.stdout, written.stderr
    for rank in range(2):
        lines = spans_of(tmp_path / "a", rank)
        assert list(lines) == [5, 7, 8, 9]
        # The step in turn, which a profiler of its own has seen, has the same phases, passes and collectives.
        names = {step: Counter(name for name, *_ in line["spans"]) for step, line in lines.items()}
        in_turn = names.pop(5)
        assert any(name.startswith("all_reduce") for name in in_turn)
        assert any(name.startswith("F stage") for name in in_turn) == ("pp" in strategy)
        for step, found in names.items():
            assert found == in_turn, step
        ends = [max(end for *_, end in line["spans"]) for line in lines.values()]
        assert all(end <= line["begin"] + 1e-3 for end, line in zip(ends, list(lines.values())[1:], strict=False))
        # Their figures are those of other steps: this profiler slows them down by much.
        records = [json.loads(line) for line in (tmp_path / f"a/ranks/{rank:05d}.jsonl").read_text().splitlines()]
        assert [line["step"] for line in records if line.get("profiled")] == [5]
        assert [line["step"] for line in records if line.get("on_demand")] == [7, 8, 9]


def test_a_run_that_ends_or_goes_back_within_the_steps_on_demand_has_timelines_of_what_there_was(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    short = meshwright("train", *tiny_run, "run.dir=a", "train.steps=2", "observe.profile_steps=1:9")
    assert short.returncode == 0, short.stderr
    assert list(spans_of(tmp_path / "a", 0)) == [1, 2]
    bad = ";".join(f"step={step},phase=forward,kind=nan" for step in (7, 8))
    settings = ["train.steps=10", "observe.profile_steps=5:9", "elastic.bad_steps=2", "checkpoint.every=4"]
    back = meshwright("train", *tiny_run, *settings, "observe.profile_every=0", "run.dir=b", MESHWRIGHT_FAULT=bad)
    assert back.returncode == 0, back.stderr
    assert steps_with_spans(tmp_path / "b", 0) == [5, 6, 7, 8, 9]


def test_a_run_goes_back_to_steps_on_demand_out_of_one_that_is_profiled_in_turn(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    # Two bad steps send it from 8 back to 4. In turn would be 9, which begins where 8 ends, and on demand is 5.
    bad = ";".join(f"step={step},phase=forward,kind=nan" for step in (7, 8))
    settings = ["train.steps=12", "elastic.bad_steps=2", "checkpoint.every=4", "elastic.max_restarts=0"]
    both = ["observe.profile_steps=5:6", "observe.profile_every=4", "run.dir=a"]
    back = meshwright("train", *tiny_run, *settings, *both, MESHWRIGHT_FAULT=bad)
    assert back.returncode == 0, back.stderr
    assert "no more" not in back.stderr
    events = (json.loads(line)["event"] for line in (tmp_path / "a/events.jsonl").read_text().splitlines())
    assert "rollback" in set(events)
    assert steps_with_spans(tmp_path / "a", 0) == [5, 6, 7, 5, 6, 7, 9]


def test_a_step_in_turn_that_a_profile_on_demand_takes_is_made_up_for(
    meshwright: CommandLine, tiny_run: list[str]
) -> None:
    # In turn are the steps 5, 8 and 11; a profile of 7 and 8 begins at the end of 6.
    both = ["run.dir=a", "train.steps=11", "observe.profile_steps=7:8", "observe.profile_every=3"]
    assert meshwright("train", *tiny_run, *both).returncode == 0
    written = meshwright("watch", "a", "--trace", "t.json")
    assert "steps 5, 7, 8, 9, 11;" in written.stdout
    # A step in turn, 5, that ends where a profile on demand has begun is none of either's.
    near = ["run.dir=near", "train.steps=11", "observe.profile_steps=6:7", "observe.profile_every=3"]
    ended = meshwright("train", *tiny_run, *near, "elastic.max_restarts=0")
    assert ended.returncode == 0, ended.stderr
    assert "steps 6, 7, 8, 11;" in meshwright("watch", "near", "--trace", "t.json").stdout
    missing = meshwright("watch", "a", "--trace", "t.json", "--steps", "1:4")
    assert missing.returncode == 2
    assert "none of the steps 1:4 has a timeline; a has steps 5, 7, 8, 9, 11" in missing.stderr
    assert "steps of observe.profile_steps are in a/profile" in missing.stderr
    # Without profiles in turn nobody knows how much is computing, and why is said.
    never = ["run.dir=b", "train.steps=3", "observe.profile_steps=2:3", "observe.profile_every=0"]
    assert "unknown: no step was profiled by observe.profile_every" in meshwright("train", *tiny_run, *never).stdout
