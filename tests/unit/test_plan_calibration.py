"""What was measured on a machine: kept, read back, used by plans, and passed over when it cannot be used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cluster.calibration import (
    Calibration,
    Speeds,
    between,
    calibration_file,
    read_calibration,
    seconds_of,
    write_calibration,
)
from meshwright.cluster.cluster import Cluster, cores_here, cpu_ranks, parse_cluster
from meshwright.models.presets import preset
from meshwright.planning.answer import plan
from meshwright.planning.calibrate import calibrate
from meshwright.planning.constraints import parse_constraints
from meshwright.planning.measure import ON_CPU, decoder
from meshwright.planning.origin import origin
from meshwright.planning.question import Question, estimate
from meshwright.planning.scenario import Layout, Scenario
from meshwright.planning.search import search
from meshwright.planning.software import constants
from meshwright.planning.timing import Timer
from meshwright.strategy import Strategy
from tests.unit.test_plan_search import everything


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def speeds(ranks: int = 1, tera: float = 500.0, **changes: object) -> Speeds:
    """Those of a chip that is equally fast at everything."""
    dtypes = ("float32", "bf16", "fp16")
    collective = {str(size): ((256.0, 1e-4), (1e6, 1e-3)) for size in (2, 4, 8) if size <= ranks}
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    values: dict[str, object] = {
        "ranks": ranks,
        "products": dict.fromkeys(
            dtypes, ((128.0, 128.0, 128.0, tera * 100000000000.0), (4096.0, 4096.0, 4096.0, tera * 1000000000000.0))
        ),
        "attention": dict.fromkeys(dtypes, ((1024.0, tera * 500000000000.0),)),
        "attention_backward": dict.fromkeys(dtypes, ((1024.0, tera * 400000000000.0),)),
        "memory": 3e12,
        "passes": dict.fromkeys(dtypes, 2.0),
        "layer_s": (5e-4, 8e-4),
        "experts_s": (1e-3, 2e-3),
        "optimizer_s": 1e-11,
        "step_s": 5e-3,
        "micro_s": 1e-4,
        "collectives": dict.fromkeys(kinds, collective) if ranks > 1 else {},
        "axes": {axis: {str(ranks): 1e-3} for axis in ("shard", "tp", "sp", "ring", "ulysses", "ep")}
        if ranks > 1
        else {},
    }
    return Speeds(**(values | changes))  # type: ignore[arg-type]


def calibration(chip: str = "h200", **crowds: Speeds) -> Calibration:
    found = {int(name[1:]): one for name, one in crowds.items()} or {1: speeds()}
    return Calibration("somewhere", chip, "2.13.0", "2026-01-02T03:04:05+00:00", found)


def test_what_is_written_is_read_back() -> None:
    kept = calibration(_1=speeds(), _8=speeds(8))
    path = write_calibration(kept)
    assert path == calibration_file("h200")
    found, ignored = read_calibration("h200")
    assert found == kept
    assert ignored == ""
    assert read_calibration("h100") == (None, ""), "another chip was not measured"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "damaged"),
        (lambda text: text.replace('"form": 2', '"form": 1'), "form 1, not 2"),
        (lambda text: text.replace('"chip": "h200"', '"chip": "h100"'), "of chip h100, not h200"),
        (lambda text: text.replace('"memory": 3000000000000.0', '"memory": "much"'), "'much' is no measurement"),
        (lambda text: text.replace('"memory": 3000000000000.0', '"memory": NaN'), "nan is no measurement"),
        (lambda text: text.replace('"step_s"', '"steps"'), "keys differ: step_s, steps"),
        (lambda text: json.dumps(json.loads(text) | {"crowds": {}}), "no measurements"),
        (lambda text: "[]", "damaged"),
    ],
)
def test_a_file_that_cannot_be_used_is_passed_over_and_the_answer_says_so(damage: object, message: str) -> None:
    path = write_calibration(calibration())
    text = path.read_text()
    damaged = damage(text)  # type: ignore[operator]
    assert damaged != text
    path.write_text(damaged)
    cluster = parse_cluster("8xh200")
    assert cluster.speeds is None
    assert message in cluster.measured
    assert "meshwright plan --calibrate" in cluster.measured
    assert message in origin(Question(preset("llama3.2-1b"), cluster, 2048, 64))


def test_a_plan_for_a_cluster_of_the_measured_chip_uses_it_and_says_so() -> None:
    before = plan("llama3.1-8b", "64xh200", sequence_length=4096, global_batch=512, strategy="dp=64 zero=3")
    write_calibration(calibration(_1=speeds(tera=50.0)))
    after = plan("llama3.1-8b", "64xh200", sequence_length=4096, global_batch=512, strategy="dp=64 zero=3")
    assert before.as_json()["origin"].startswith("estimated")
    assert "computing calibrated on somewhere, 2026-01-02" in after.as_json()["origin"]
    assert after.shown.parts.compute > 5 * before.shown.parts.compute, "50 TFLOP/s rather than some 650"
    other = plan("llama3.1-8b", "64xh100", sequence_length=4096, global_batch=512, strategy="dp=64 zero=3")
    assert other.as_json()["origin"].startswith("estimated"), "another chip"


def test_other_software_is_not_what_was_measured() -> None:
    write_calibration(calibration())
    known = constants()

    def seconds(cluster: Cluster, software: str) -> float:
        scenario = Scenario(preset("llama3.1-8b"), Layout(), cluster, known.software[software], 4096, 1, 8)
        return Timer(scenario, known).parts().total

    measured = parse_cluster("1xh200")
    plain = replace(measured, speeds=None)
    assert seconds(measured, "megatron") == seconds(plain, "megatron")
    assert seconds(measured, "meshwright") != seconds(plain, "meshwright")


def test_links_between_gpus_of_a_machine_are_the_measured_ones() -> None:
    slow = {"all_gather": {"8": ((256.0, 4e-4), (1e9, 1.0))}}
    write_calibration(calibration(_1=speeds(), _8=replace(speeds(8), collectives=slow)))
    ours = plan("llama3.1-8b", "8xh200", sequence_length=4096, global_batch=64, strategy="dp=1 tp=8")
    assert "links too" in ours.as_json()["origin"]
    write_calibration(calibration())
    assert plan("llama3.1-8b", "8xh200", sequence_length=4096, global_batch=64, strategy="dp=1 tp=8").shown.parts.tp < (
        0.1 * ours.shown.parts.tp
    ), "0.9 GB/s between them rather than hundreds"


def test_ranks_on_cores_get_the_numbers_of_their_crowd() -> None:
    found = {f"_{ranks}": speeds(ranks, tera=0.1 / ranks) for ranks in (1, 2, 4, 8)}
    write_calibration(calibration("cpu", **found))
    assert cpu_ranks(1).chip.peak("float32") == pytest.approx(1e11)
    assert cpu_ranks(3).chip.peak("float32") == pytest.approx(0.25e11), "as in the next larger crowd"
    many = 16 * cores_here()
    shared = many / cores_here() / max(1.0, 8 / cores_here())
    assert cpu_ranks(many).chip.peak("float32") == pytest.approx(1e11 / 8 / shared), "and beyond the largest, slower"
    assert cpu_ranks(4).with_gpus(2) == cpu_ranks(2), "fewer ranks share the cores among fewer"
    here = Question(decoder(256), cpu_ranks(2), 128, 16, "float32")
    assert origin(here).startswith("times calibrated on somewhere")
    copies, sharded = (estimate(here, Strategy.parse(text, 2), 2) for text in ("dp=2", "dp=2 zero=3"))
    assert sharded.step_s > copies.step_s


def test_ranks_that_wait_leave_their_cores_to_the_others() -> None:
    write_calibration(calibration("cpu", _8=speeds(8, tera=0.01)))
    question = Question(decoder(256, layers=8), replace(cpu_ranks(8), share=0.25), 128, 1, "float32")
    found = estimate(question, Strategy.parse("dp=1 pp=8", 8), 1)
    assert found.step_s == pytest.approx(sum(vars(found.parts).values()))
    alone = replace(question, cluster=replace(question.cluster, share=1.0))
    # One micro-batch: only one rank works at a time, so each has a whole core.
    assert found.step_s < 0.4 * estimate(alone, Strategy.parse("dp=1 pp=8", 8), 1).step_s


@pytest.mark.parametrize("words", ["", "pp>=2", "micro_batch<=2 zero>=1"])
def test_search_finds_what_trying_everything_finds_with_measured_times(words: str) -> None:
    """Its bounds hold for shared cores too."""
    write_calibration(calibration("cpu", _8=speeds(8, tera=0.1 / 8)))
    cluster = replace(cpu_ranks(8), share=0.25)
    question = Question(decoder(256, layers=8, head=32), cluster, 128, 16, "float32", parse_constraints([words]))
    best = min(everything(question), key=lambda one: one.score("throughput"))
    chosen = search(question).best
    assert chosen is not None
    assert chosen.score("throughput")[0] == pytest.approx(best.score("throughput")[0], rel=1e-9), best.strategy


def test_numbers_between_measured_ones() -> None:
    assert between([(1.0, 10.0), (100.0, 20.0)], 10.0) == pytest.approx(15.0)
    assert between([(1.0, 10.0), (100.0, 20.0)], 0.1) == 10.0
    assert between([(1.0, 10.0), (100.0, 20.0)], 1e6) == 20.0
    points = ((100.0, 1.0), (200.0, 2.0), (400.0, 3.0))
    assert seconds_of(points, 10.0) == 1.0
    assert seconds_of(points, 300.0) == pytest.approx(2.5)
    assert seconds_of(points, 800.0) == pytest.approx(5.0)


def test_this_machine_is_measured() -> None:
    quick = replace(
        ON_CPU,
        products=((16, 64, 64), (64, 128, 128)),
        attention=((1, 2, 32, 16),),
        copied=1 << 20,
        layer=decoder(64, head=16),
        tokens=64,
        parameters=1 << 16,
        collectives=(256, 1 << 16),
        rounds=1,
        seconds=0.002,
    )
    said: list[str] = []
    found, path = calibrate("cpu", said.append, crowds=(1, 2), on_cpu=quick)
    assert read_calibration("cpu") == (found, "")
    assert path.exists()
    assert said
    pair = found.crowds[2]
    assert {"float32", "bf16"} == pair.products.keys()
    assert set(pair.axes) == {"shard", "tp", "sp", "ring", "ulysses", "ep"}
    assert set(pair.collectives) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
    assert 1e8 < pair.products["float32"][-1][-1] < 1e13
    assert "calibrated" in origin(Question(decoder(64), cpu_ranks(2), 64, 2, "float32"))
