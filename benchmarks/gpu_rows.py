"""Tables of steps of our own trainer on one GPU: settings, and in `benchmarks/results/h200_steps.csv` what an H200
measured of them. Lines that begin with # say when, with what and how."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.cluster.cluster import parse_cluster
from meshwright.estimate.kept import Kept
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec
from meshwright.planning.question import Question
from meshwright.planning.scenario import Layout, Scenario

PATH = Path(__file__).parent / "results/h200_steps.csv"
Row = dict[str, str]
"""By column. `compile` is on or off; precision, stored and moments are bf16, float32 and float32 where a table has no
such columns, and `tied` (embeddings) as the model's preset has it."""


def read_rows(path: Path = PATH) -> list[Row]:
    """All rows of such a table."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def write_rows(path: Path, rows: Sequence[Row], said: Sequence[str]) -> None:
    """Write such a table, under what is to be said of it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {line}\n" for line in said)
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def spec_of(row: Row) -> ModelSpec:
    """The model of a row."""
    spec = preset(row["model"])
    tied = {"yes": True, "no": False}.get(row.get("tied", ""), spec.tie_word_embeddings)
    return spec.model_copy(update={"num_hidden_layers": int(row["layers"]), "tie_word_embeddings": tied})


def scenario_of(row: Row) -> Scenario:
    """What was measured, as the planner sees it."""
    size, kept = int(row["micro_batch"]), Kept.of(row.get("stored") or None, row.get("moments") or None)
    batch, precision = size * int(row["micro_steps"]), row.get("precision") or "bf16"
    question = Question(spec_of(row), parse_cluster("1xh200"), int(row["sequence_length"]), batch, precision, kept=kept)
    return replace(question.scenario(Layout(recompute=row["recompute"]), size), compile=row["compile"] == "on")
