"""What a run folder tells of its ranks after a fault: who they were, what they did, what was done again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import CommandLine

pytestmark = pytest.mark.slow


def test_ranks_that_were_started_again_go_on_in_their_files(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    settings = ["train.steps=14", "checkpoint.every=4", "checkpoint.background=false", "observe.profile_every=3"]
    fault = "step=8,phase=forward,kind=sleep:1;rank=1,step=8,phase=backward,kind=sigkill"
    done = meshwright("train", *tiny_run, *settings, "--nproc", 2, "run.dir=a", MESHWRIGHT_FAULT=fault)
    assert done.returncode == 0, done.stderr
    # torch's profiler would tell of each of its starts.
    assert "profiler" not in done.stderr
    assert "watch  profiling 1 step in 3 costs" in done.stdout
    for rank in range(2):
        lines = [json.loads(line) for line in (tmp_path / f"a/ranks/0000{rank}.jsonl").read_text().splitlines()]
        starts = [line for line in lines if line["kind"] == "rank"]
        assert [line["generation"] for line in starts] == [0, 1]
        assert starts[0]["pid"] != starts[1]["pid"]
        again = lines.index(starts[1])
        assert [line["step"] for line in lines[:again] if line["kind"] == "step"] == list(range(1, 8))
        later = [line for line in lines[again:] if line["kind"] == "step"]
        assert [line["step"] for line in later] == list(range(5, 15))
        assert [line["step"] for line in later if line.get("profiled")] == [9, 12]
