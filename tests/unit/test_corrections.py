"""What runs have shown is in the next plan, and says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cluster.cluster import parse_cluster
from meshwright.planning.answer import plan
from meshwright.planning.corrections import WIDEST, corrections_file, observe
from meshwright.planning.made import Plan
from meshwright.planning.question import estimate


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def planned(strategy: str | None = None, gpus: int = 8) -> Plan:
    return plan("llama3.1-8b", f"{gpus}xh100", global_batch=64, strategy=strategy, compare=False)


def learn(strategy: str, time: float, memory: float = 1.0) -> None:
    made = planned(strategy)
    plain = estimate(made.question, made.candidates[0].strategy, made.candidates[0].micro_batch)
    observe(plain, plain.step_s * time, plain.memory.peak * memory)


def test_a_strategy_that_was_run_has_its_measured_figures() -> None:
    before = planned("dp=8 zero=3").candidates[0]
    learn("dp=8 zero=3", 1.3, 0.9)
    after = planned("dp=8 zero=3").candidates[0]
    assert after.origin == "measured"
    assert after.step_s == pytest.approx(before.step_s * 1.3)
    assert after.memory.peak == pytest.approx(before.memory.peak * 0.9)
    assert after.parts.correction == pytest.approx(before.step_s * 0.3)


def test_others_follow_the_median_of_times_and_only_more_memory() -> None:
    before = planned("dp=4 zero=3 tp=2").candidates[0]
    learn("dp=8 zero=3", 1.2, 0.7)
    learn("dp=8 zero=2", 1.4, 0.8)
    learn("dp=8 zero=1", 1.9, 0.9)
    after = planned("dp=4 zero=3 tp=2").candidates[0]
    assert after.origin == "calibrated"
    assert after.step_s == pytest.approx(before.step_s * 1.4)
    assert after.memory.peak == pytest.approx(before.memory.peak)
    learn("dp=8 zero=3", 1.2, 1.5)
    learn("dp=8 zero=2", 1.4, 1.5)
    assert planned("dp=4 zero=3 tp=2").candidates[0].memory.peak == pytest.approx(before.memory.peak * 1.5)


def test_a_slow_winner_gives_way_to_the_next() -> None:
    made = planned()
    assert made.best is not None
    first = str(made.best.strategy)
    learn(first, 1.0)
    for other in ("dp=8 zero=3", "dp=8 zero=2", "dp=8 zero=1"):
        if other != first:
            learn(other, 1.0)
    plain = estimate(made.question, made.best.strategy, made.best.micro_batch)
    observe(plain, plain.step_s * 3, plain.memory.peak)
    best = planned().best
    assert best is not None
    assert (str(best.strategy), best.micro_batch) != (first, made.best.micro_batch)


def test_a_peak_beyond_the_chip_makes_room_for_what_fits() -> None:
    made = planned()
    assert made.best is not None
    plain = estimate(made.question, made.best.strategy, made.best.micro_batch)
    observe(plain, plain.step_s, plain.memory.capacity * 1.1)
    best = planned().best
    assert best is not None
    assert best.fits
    assert (best.strategy, best.micro_batch) != (made.best.strategy, made.best.micro_batch)


def test_other_machines_other_bases_and_wild_ratios_change_nothing() -> None:
    learn("dp=8 zero=3", WIDEST * 2)
    assert planned("dp=8 zero=2").candidates[0].origin == "estimated"
    made = plan("llama3.1-8b", "8xa100", global_batch=64, strategy="dp=8 zero=3", compare=False)
    assert made.candidates[0].origin == "estimated"
    text = corrections_file().read_text()
    learn("dp=8 zero=1", 1.5)
    assert planned("dp=8 zero=2").candidates[0].origin == "calibrated"
    basis = '"basis": "'
    start = text.index(basis) + len(basis)
    now = corrections_file().read_text()
    corrections_file().write_text(now.replace(text[start : start + 16], "another"))
    assert planned("dp=8 zero=2").candidates[0].origin == "estimated"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"h100-8-8-50": [{}]}', '{"h100-8-8-50": 3}'])
def test_a_damaged_file_counts_as_nothing(text: str) -> None:
    corrections_file().parent.mkdir(parents=True)
    corrections_file().write_text(text)
    assert planned("dp=8 zero=2").candidates[0].origin == "estimated"
    learn("dp=8 zero=2", 1.1)
    assert planned("dp=8 zero=2").candidates[0].origin == "measured"


def test_a_run_is_remembered_once() -> None:
    for _ in range(3):
        learn("dp=8 zero=3", 1.1)
    assert corrections_file().read_text().count('"subject"') == 1


def test_more_chips_are_another_setting() -> None:
    learn("dp=8 zero=3", 1.2)
    machines = parse_cluster("16xh100")
    made = plan("llama3.1-8b", replace(machines), global_batch=64, strategy="dp=16 zero=3", compare=False)
    assert made.candidates[0].origin == "calibrated"


def test_a_strategy_that_cannot_be_read_is_passed_over() -> None:
    learn("dp=8 zero=3", 1.2)
    path = corrections_file()
    path.write_text(path.read_text().replace('"dp=8 zero=3"', '"banana=8"'))
    assert planned().best is not None


def test_compression_is_not_chosen_however_fast_it_was() -> None:
    def small(strategy: str | None = None) -> Plan:
        return plan("llama3.2-1b", "8xh100", global_batch=64, strategy=strategy, compare=False)

    made = small("dp=8 compress=int8")
    run = estimate(made.question, made.candidates[0].strategy, made.candidates[0].micro_batch)
    # Others take what they should: what was seen of one is taken for all until then.
    for other in ("dp=8", "dp=8 zero=1", "dp=8 zero=2"):
        plain = small(other)
        one = estimate(plain.question, plain.candidates[0].strategy, plain.candidates[0].micro_batch)
        observe(one, one.step_s, one.memory.peak)
    observe(run, run.step_s * 0.6, run.memory.peak)
    assert small("dp=8 compress=int8").candidates[0].origin == "measured"
    best = small().best
    assert best is not None
    assert best.strategy.compress == "none"
