"""What `make test-gpu` and benchmarks/plan_gpu_ranks.py run is legal and planned for, seen without a GPU."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.gpu_rows import read_rows, scenario_of, write_rows

from meshwright.cli import bench
from meshwright.cluster.cluster import parse_cluster
from meshwright.models.spec import ModelSpec
from meshwright.planning.memory import memory_of
from meshwright.planning.question import Question
from meshwright.strategy import Strategy
from tests.gpu import cases

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ALL = [(shape, strategy) for shape, strategy, *_ in (*cases.FLOAT64, *cases.NARROW)]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, imported as it is when it runs: beside its neighbours."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    found = importlib.import_module("plan_gpu_ranks")
    monkeypatch.delitem(sys.modules, "plan_gpu_ranks")
    monkeypatch.delitem(sys.modules, "plan_gpu")
    return found


@pytest.mark.parametrize(("shape", "text"), ALL)
def test_every_strategy_of_the_gpu_tests_is_legal(shape: str, text: str) -> None:
    case = cases.case_of(shape, text)
    strategy = Strategy.parse(case.strategy, case.ranks)
    strategy.check(case.spec, case.ranks, case.tokens)
    assert case.ranks <= 4
    assert case.batch % (case.micro_steps * strategy.all_shares) == 0


def test_the_gpu_tests_have_every_axis_and_schedule() -> None:
    found = [Strategy.parse(text, Strategy.processes(text) or 1) for _, text in ALL]
    assert len({str(strategy) for strategy in found}) >= 25
    for axis in ("tp", "pp", "cp", "ep", "replicate", "shard"):
        assert any(getattr(strategy, axis) > 1 for strategy in found), axis
    assert {strategy.zero for strategy in found} == {0, 1, 2, 3}
    assert {strategy.schedule for strategy in found if strategy.pp > 1} >= {"1f1b", "interleaved:2", "zero-bubble"}
    assert {strategy.cp_method for strategy in found if strategy.cp > 1} >= {"ring", "ulysses"}


def test_every_strategy_of_the_benchmark_has_a_planned_peak_that_fits_beside_the_others(ranks: ModuleType) -> None:
    sizes = []
    for model, text in ranks.STRATEGIES:
        strategy = Strategy.parse(text, Strategy.processes(text) or 1)
        case = ranks.case_of(ranks.MODELS[model], strategy)
        spec: ModelSpec = case.spec
        strategy.check(spec, strategy.world, case.tokens)
        peaks = ranks.planned(case, strategy, "h200")
        assert len(peaks) == strategy.pp
        assert sum(peaks) * strategy.world / strategy.pp < 120 * 2**30
        sizes.append(strategy.world)
    assert sizes.count(2) + sizes.count(4) == len(sizes) >= 12
    assert {2, 4} == set(sizes)


def planned_mib(ranks: ModuleType, row: dict[str, str]) -> float:
    """What is planned today for the rank of a row."""
    strategy = Strategy.parse(row["strategy"], Strategy.processes(row["strategy"]) or 1)
    case = ranks.case_of(ranks.MODELS[row["model"]], strategy)
    return float(ranks.planned(case, strategy, "h200")[int(row["pipeline_rank"])] / 2**20)


def test_peaks_of_ranks_that_shared_an_h200_are_still_planned_for(ranks: ModuleType) -> None:
    rows = [row for row in read_rows(ranks.RESULTS) if row["model"] == "dense"]
    assert len({row["strategy"] for row in rows}) >= 11
    for row in rows:
        assert planned_mib(ranks, row) == pytest.approx(float(row["measured_mib"]), rel=0.03), row["strategy"]


def test_the_busiest_rank_of_experts_is_above_the_mean_by_what_was_measured(ranks: ModuleType) -> None:
    """Which rank has the popular experts differs from layer to layer: over all layers the ranks are nearly alike."""
    rows = [row for row in read_rows(ranks.RESULTS) if row["strategy"] == "dp=4 ep=4 zero=3"]
    measured = [float(row["measured_mib"]) for row in rows]
    strategy = Strategy.parse(rows[0]["strategy"], 4)
    case = ranks.case_of(ranks.MODELS["experts"], strategy)
    question = Question(case.spec, parse_cluster("4xh200"), case.tokens, case.batch)
    scenario = question.scenario(strategy, ranks.MICRO_BATCH)
    even = memory_of(replace(scenario, imbalance=1.0)).stages[0].allocated / 2**20
    above = max(measured) - sum(measured) / len(measured)
    assert above <= planned_mib(ranks, rows[0]) - even <= 2 * above


def test_every_setting_of_the_table_is_planned_for_and_fits() -> None:
    rows = read_rows(BENCHMARKS / "data/gpu_settings.csv")
    assert len({tuple(row.values()) for row in rows}) == len(rows) >= 20
    for row in rows:
        assert memory_of(scenario_of(row)).stages[0].allocated < 130 * 2**30
    for name, kinds in (("recompute", 5), ("precision", 3), ("sequence_length", 5), ("model", 8)):
        assert len({row[name] for row in rows}) >= kinds


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [{"model": "a", "step_ms": "1.5"}, {"model": "b, c", "step_ms": ""}]
    write_rows(tmp_path / "rows.csv", rows, ["when, with what", "how"])
    assert (tmp_path / "rows.csv").read_text().startswith("# when, with what\n# how\nmodel,step_ms\n")
    assert read_rows(tmp_path / "rows.csv") == rows


def test_every_part_of_the_speed_script_is_a_command_that_bench_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    parts = importlib.import_module("gpu_speed").PARTS
    monkeypatch.delitem(sys.modules, "gpu_speed")
    for name, part in parts.items():
        parser = argparse.ArgumentParser()
        bench.describe_step(parser)
        entries = bench.entries_of(parser.parse_args(shlex.split(part.arguments)))
        assert entries, name
        assert len({entry.contender.name for entry in entries}) == len(entries) >= (1 if name == "small" else 2), name
