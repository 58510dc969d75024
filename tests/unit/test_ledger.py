"""What a ledger proves, and that it does not prove what is not so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.ledger import account, forget_after

GOOD: list[dict[str, Any]] = [
    {"step": 1, "fed": [[[0, 2]], [[2, 4]]]},
    {"step": 2, "fed": [[[4, 5], [6, 7]], [[5, 6], [7, 8]]]},
    {"rollback": {"cause": "nonfinite", "steps": [3, 4], "skipped": [[8, 16]]}},
    {"step": 3, "fed": [[[16, 18]], [[18, 20]]], "skipped": "nonfinite"},
    {"step": 4, "fed": [[[20, 24]]], "bad": [21]},
]


def write(path: Path, lines: list[dict[str, Any]], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def test_every_sample_once_is_exact_however_ranks_share_them(tmp_path: Path) -> None:
    found = account(write(tmp_path / "ledger.jsonl", GOOD))
    assert found.exact, found.problems
    assert (found.fed, found.bad, found.skipped_steps, found.skipped_windows) == (16, [21], {3: "nonfinite"}, [(8, 16)])
    assert found.steps == {1: [(0, 4)], 2: [(4, 8)], 3: [(16, 20)], 4: [(20, 24)]}
    assert account(tmp_path) == found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines.pop(1), "after step 1"),
        (lambda lines: lines.pop(2), "samples 8 to 15 were never fed"),
        (lambda lines: lines[1]["fed"].pop(), "samples 5 to 5 were never fed"),
        (lambda lines: lines[1].update(fed=lines[0]["fed"]), "samples 0 to 3 were fed twice"),
        (lambda lines: lines[4].update(fed=[[[20, 24], [23, 24]]]), "samples 23 to 23 were fed twice"),
        (lambda lines: lines[3].update(fed=[[[14, 20]]]), "samples 14 to 15 were fed twice"),
        (lambda lines: lines[4].update(fed=[[[21, 25]]]), "samples 20 to 20 were never fed"),
        (lambda lines: lines.append(dict(lines[4])), "line 6 is of step 4, after step 4"),
        (lambda lines: lines.__setitem__(slice(None), []), "the ledger is empty"),
    ],
)
def test_what_is_lost_or_repeated_is_named(tmp_path: Path, change: Any, problem: str) -> None:
    lines = json.loads(json.dumps(GOOD))
    change(lines)
    found = account(write(tmp_path / "ledger.jsonl", lines))
    assert not found.exact
    assert any(problem in text for text in found.problems), found.problems


def test_a_line_that_was_cut_short_is_a_problem_until_a_resume_removes_it(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", GOOD, '{"step": 5, "fe')
    assert "line 6 is cut short or no JSON" in account(path).problems
    forget_after(path, 4)
    assert account(path).exact
    assert path.read_text().endswith("}\n")


def test_a_resume_cuts_back_steps_and_keeps_what_was_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "ledger.jsonl", GOOD)
    forget_after(path, 3)
    assert [json.loads(line).get("step") for line in path.read_text().splitlines()] == [1, 2, None, 3]
    before = path.stat().st_mtime_ns
    forget_after(path, 3)
    assert path.stat().st_mtime_ns == before
    forget_after(tmp_path / "none.jsonl", 3)


def test_a_ledger_that_was_switched_on_later_says_nothing_of_the_samples_before(tmp_path: Path) -> None:
    found = account(write(tmp_path / "ledger.jsonl", GOOD[1:]))
    assert found.exact, found.problems


def test_the_module_says_it_on_the_command_line(tmp_path: Path) -> None:
    write(tmp_path / "ledger.jsonl", GOOD)
    command = [sys.executable, "-m", "meshwright.observe.ledger", tmp_path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "exact: no sample lost, none repeated" in said
    assert "samples 8 to 15 were left out on purpose" in said
    write(tmp_path / "ledger.jsonl", [GOOD[0], GOOD[4]])
    assert subprocess.run(command, capture_output=True, text=True, check=False).returncode == 1
