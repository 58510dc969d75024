"""Estimates against published runs: the figures that we claim, and files that nobody has seen."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "benchmarks/data/published_runs.csv"


def evaluate(path: Path, out: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks/published.py"), "--csv", str(path), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return evaluate(DATA, tmp_path_factory.mktemp("published") / "out.json")


def test_the_figures_are_reached(result: dict[str, Any]) -> None:
    assert result["coverage"]["share"] >= 0.85
    assert result["time"]["median_abs_error"] <= 0.10
    assert result["time"]["p90_abs_error"] <= 0.25
    assert result["memory"]["median_abs_error"] <= 0.06
    assert result["verdicts"]["share_caught"] >= 0.80
    assert result["verdicts"]["share_refused"] <= 0.05


def test_every_row_is_used_or_skipped_with_a_reason(result: dict[str, Any]) -> None:
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = sum(1 for _ in csv.DictReader(file))
    coverage = result["coverage"]
    assert coverage["used"] + coverage["completed"] + len(result["skipped"]) == rows
    assert coverage["complete_rows"] == coverage["used"] + sum(one["complete"] for one in result["skipped"])
    assert all(one["reason"] for one in result["skipped"])
    assert {"source", "gpu", "scale", "strategy", "software"} == result["groups"].keys()


def test_who_publishes_a_run_changes_no_estimate(result: dict[str, Any], tmp_path: Path) -> None:
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        row["source"], row["url_or_repo_path"] = f"somebody {number}", ""
    found = evaluate(write_rows(tmp_path / "rows.csv", rows), tmp_path / "out.json")
    for name in ("time", "memory", "verdicts", "coverage"):
        assert found[name] == result[name]


def test_a_file_of_nonsense_is_skipped_and_never_crashes(tmp_path: Path) -> None:
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    draw = random.Random(0)
    words = ["", "?", "-1", "0", "1e99", "nan", "inf", "7", "3.5", "many", "none", "128 GPUs", "fp3", "2048"]
    changed = []
    for row in draw.sample(rows, 150):
        new = dict(row)
        for name in draw.sample(list(row), 3):
            new[name] = draw.choice(words)
        new["unknown_column"] = "x"
        changed.append(new)
    path = tmp_path / "nonsense.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, changed[0])
        writer.writeheader()
        writer.writerows(changed)
    found = evaluate(path, tmp_path / "out.json")
    assert found["skipped"]


GOOD = {
    "source": "one", "model": "dense", "n_layers": "8", "hidden": "1024", "n_heads": "8", "ffn_hidden": "4096",
    "vocab": "32000", "seq_len": "2048", "gpu": "H100", "n_gpus": "8", "dp": "8", "tp": "1", "pp": "1", "cp": "1",
    "micro_batch": "1", "global_batch": "64", "precision": "bf16", "zero_stage": "3", "step_time_s": "1",
}  # fmt: skip
NONSENSE = (
    {"n_layers": "99999999"},
    {"n_layers": "1e14"},
    {"zero_stage": "3 shard group 0"},
    {"ep": "0.5"},
    {"n_gpus": "1e14"},
    {"gpus_per_node": "0.5"},
    {"hidden": "0.5"},
    {"global_batch": "1e14", "pp": "8"},
)


def write_rows(path: Path, rows: list[dict[str, str]], encoding: str = "utf-8") -> Path:
    with path.open("w", encoding=encoding, newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_impossible_rows_are_skipped_with_their_reason(tmp_path: Path) -> None:
    rows = [GOOD, *({**GOOD, **change} for change in NONSENSE)]
    found = evaluate(write_rows(tmp_path / "rows.csv", rows, "utf-8-sig"), tmp_path / "out.json")
    assert found["time"]["rows"] == 1
    assert [one["line"] for one in found["skipped"]] == list(range(3, 3 + len(NONSENSE)))
    assert all(one["reason"] for one in found["skipped"])
    # What has no rows has no figures, under the same names.
    assert found["memory"]["rows"] == 0
    assert [found["memory"][name] for name in ("median_abs_error", "p90_abs_error", "bias")] == [None] * 3


@pytest.mark.parametrize("content", [None, b"source,model\n\xff\xfe,x\n"])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_bytes(content)
    command = [sys.executable, str(ROOT / "benchmarks/published.py"), "--csv", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_constant_belongs_to_a_source_or_a_row() -> None:
    """What is fitted is named for chips, software and everything; nothing else."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from fit_published import FREE
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    assert {name.split(".")[0] for name in FREE} == {"chip", "software", "common"}
    families = {name.split(".")[1] for name in FREE if name.startswith("software")}
    assert families == {"megatron", "fsdp", "deepspeed", "jax"}
    assert len(FREE) < 75
