"""observe.profile_steps: traces and memory of the steps that were asked for, of every rank, that others can read."""

from __future__ import annotations

import gzip
import json
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


def test_a_step_in_turn_that_a_profile_on_demand_takes_is_made_up_for(
    meshwright: CommandLine, tiny_run: list[str]
) -> None:
    # In turn are the steps 5, 8 and 11; a profile of 7 and 8 begins at the end of 6.
    both = ["run.dir=a", "train.steps=11", "observe.profile_steps=7:8", "observe.profile_every=3"]
    assert meshwright("train", *tiny_run, *both).returncode == 0
    written = meshwright("watch", "a", "--trace", "t.json")
    assert "steps 5, 9, 11;" in written.stdout
    missing = meshwright("watch", "a", "--trace", "t.json", "--steps", "7:8")
    assert missing.returncode == 2
    assert "none of the steps 7:8 has a timeline; a has steps 5, 9, 11" in missing.stderr
    assert "steps of observe.profile_steps are in a/profile" in missing.stderr
    # Without profiles in turn nobody knows how much is computing, and why is said.
    never = ["run.dir=b", "train.steps=3", "observe.profile_steps=2:3", "observe.profile_every=0"]
    assert "unknown: no step was profiled by observe.profile_every" in meshwright("train", *tiny_run, *never).stdout
