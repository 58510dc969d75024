"""Figures that several displays show are the same in all of them: speeds, computing, and where a step's time goes."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from meshwright.observe.curves import Curves
from meshwright.observe.picture import draw
from meshwright.observe.rank_files import RankRecord
from meshwright.observe.report import summary
from meshwright.observe.snapshot import clean, snapshot
from meshwright.observe.terminal import Watched, status
from meshwright.observe.view import RunView
from tests.run_folders import GIB, append
from tests.unit.run_folders import make_run, write_lines


def shown(folder: Path) -> tuple[dict[str, Any], str, str, str]:
    """A run as the page gets it, as a picture on a terminal, as a line and as what is printed at its end."""
    look = Watched(folder).look()
    console = Console(file=io.StringIO(), width=160, force_terminal=False)
    console.print(draw(look, 160, None))
    assert isinstance(console.file, io.StringIO)
    return (
        clean(snapshot([look.view]))["runs"][0],
        console.file.getvalue(),
        status(look),
        "\n".join(summary(look.view)),
    )


def test_every_display_tells_the_same_speed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=100)
    # The first of these is beyond the last 50 steps, and the last one alone is another figure than their mean: it took
    # hardly any of their time.
    speeds = {101: 5e6, **dict.fromkeys(range(102, 151), 1000.0), 151: 51_000.0}
    for step, pace in speeds.items():
        facts = {"tokens_per_s": pace, "tflops_per_device": pace / 100, "mfu": pace / 1e5, "step_s": 4096 / pace}
        append(folder / "metrics.jsonl", {"step": step, "loss": 2.0, **facts})
    page, picture, line, end = shown(folder)
    assert page["speeds"] == pytest.approx(
        {"steps": 50, "tokens_per_s": 1020, "tflops_per_device": 10.2, "mfu": 0.0102}
    )
    tokens = next(one for one in page["comparison"]["figures"] if one["name"] == "tokens/s")
    assert tokens["measured"] == pytest.approx(1020)
    assert re.search(r"^tokens/s +1,020 .* MFU 1\.0%, means of 50 steps$", picture, re.MULTILINE)
    assert "1,020 tokens/s (mean of 50 steps)" in line
    assert "tokens/s     1,020 (255 per rank), mean of the last 50 steps" in end
    assert "MFU          1.0%, mean of the last 50 steps" in end


def test_a_run_that_goes_on_without_compression_tells_no_compressed_bytes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=100)
    append(folder / "metrics.jsonl", {"step": 101, "loss": 2.0, "sent_mib": 3.0, "sent_share": 0.25})
    assert "gradients    3 MiB sent a step and rank, 25.0%" in shown(folder)[3]
    append(folder / "metrics.jsonl", {"step": 102, "loss": 2.0})
    assert "gradients" not in shown(folder)[3]


@pytest.mark.parametrize(
    ("sent_later", "said", "average"),
    [
        ((1.0, 0.02), "1 MiB sent a step and rank, 2.0%", "40.2 MiB and 80.4%"),
        # Compressed in vain: it is more than all.
        ((60.0, 1.2), "60 MiB sent a step and rank, 120.0%", "52 MiB and 104.0%"),
    ],
)
def test_what_whole_steps_sent_is_not_left_out_of_what_a_run_sent(
    sent_later: tuple[float, float], said: str, average: str, tmp_path: Path
) -> None:
    folder = make_run(tmp_path / "run", steps=100)
    for step in range(101, 111):
        sent = sent_later if step > 108 else (50.0, 1.0)
        append(folder / "metrics.jsonl", {"step": step, "loss": 2.0, "sent_mib": sent[0], "sent_share": sent[1]})
    end = shown(folder)[3]
    assert f"gradients    {said} of what they are uncompressed" in end
    assert f"; {average} on average over 10 steps, of which 8 sent all" in end


def test_a_young_run_says_of_how_many_steps_its_speed_is() -> None:
    curves = Curves()
    for step in range(1, 4):
        curves.add({"step": step, "tokens_per_s": 100.0 * step})
    assert (curves.mean("tokens_per_s"), curves.averaged("tokens_per_s")) == (200.0, 3)
    assert (curves.mean("mfu"), curves.averaged("mfu")) == (None, 0)


def test_ranks_on_a_terminal_add_up_to_the_speed_of_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=100)
    _, picture, _, _ = shown(folder)
    # 4096 tokens on four ranks in 0.5 s, of which 0.01 s come after the update and count for no rank.
    pace = 4096 / 4 / 0.49
    assert picture.count(f" {pace:,.0f} ") == 4


def test_the_speed_of_a_rank_is_over_the_time_of_its_steps_as_that_of_the_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", world=2)
    # Half of the steps take nine times as long: a mean of paces would be 1.8 times as much as there was.
    seconds = [0.1, 0.9] * 25
    for step, taken in enumerate(seconds, 101):
        append(folder / "metrics.jsonl", {"step": step, "loss": 2.0, "tokens_per_s": 1000 / taken, "step_s": taken})
        for rank in range(2):
            line = {"kind": "step", "step": step, "seconds": taken, "parts": {"forward": taken}}
            append(folder / f"ranks/{rank:05d}.jsonl", line)
    _, picture, _, _ = shown(folder)
    assert re.search(r"^tokens/s +2,000 ", picture, re.MULTILINE)
    assert picture.count(" 1,000 ") == 2


def test_each_loss_at_the_end_has_its_own_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=79)
    append(folder / "metrics.jsonl", {"step": 80, "loss": 2.5, "eval_loss": 2.75})
    assert "loss         2.5000, held-out 2.7500 at step 80" in shown(folder)[3]
    append(folder / "metrics.jsonl", {"step": 81, "loss": 2.25})
    assert "loss         2.2500 at step 81, held-out 2.7500 at step 80" in shown(folder)[3]


def test_skipped_steps_are_told_at_the_end_where_there_are_any(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert "skipped" not in shown(folder)[3]
    append(folder / "metrics.jsonl", {"step": 101, "skipped": 1, "loss_scale": 1024.0})
    assert "skipped      1 step without an update, the last 101" in shown(folder)[3]


def test_computing_is_the_same_on_the_page_as_on_a_terminal(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", world=2)
    compute, exposed = {0: 0.3, 1: 0.1}, {0: 0.0, 1: 0.1}
    for rank in range(2):
        line = {"kind": "step", "step": 101, "time": 0.0, "seconds": 0.5, "parts": {"forward": 0.5}, "profiled": True}
        line |= {"compute": compute[rank], "communication": {"exposed": exposed[rank], "overlapped": 0.0}}
        append(folder / f"ranks/{rank:05d}.jsonl", line)
    page, picture, line, end = shown(folder)
    assert page["efficiency"] == pytest.approx({"share": 0.8, "goal": 0.8})
    assert [rank["efficiency"]["share"] for rank in page["ranks"]] == pytest.approx([1.0, 0.5])
    assert [rank["efficiency"]["exposed"] for rank in page["ranks"]] == pytest.approx([0.0, 0.1])
    assert re.search(r"^computing +80%", picture, re.MULTILINE)
    assert "computing 80%" in line
    assert "computing    80.0% of computing and exposed communication, goal 80%; lowest rank 1 with 50.0%" in end


def test_without_a_profiled_step_nobody_knows_how_much_is_computing(tmp_path: Path) -> None:
    page, picture, line, end = shown(make_run(tmp_path / "run", profiled=False))
    assert page["efficiency"] is None
    assert {rank["efficiency"] for rank in page["ranks"]} == {None}
    assert "computing" not in picture + line
    assert "computing    unknown: no step was profiled by observe.profile_every" in end


def test_the_page_has_waiting_apart_from_the_passes_as_a_terminal_has(tmp_path: Path) -> None:
    page, _, _, _ = shown(make_run(tmp_path / "a"))
    rank = page["ranks"][0]
    assert rank["waits_of"] == 100
    assert rank["parts"]["communication"] > 0
    assert rank["parts"]["bubble"] > 0
    assert sum(rank["parts"].values()) == pytest.approx(0.5)
    rank = shown(make_run(tmp_path / "b", profiled=False))[0]["ranks"][0]
    assert rank["waits_of"] is None
    assert not {"communication", "bubble"} & rank["parts"].keys()


def test_what_a_profile_itself_takes_does_not_make_waiting_look_short() -> None:
    record = RankRecord(0)
    parts = {"forward": 0.1, "backward": 0.3, "hooks": 0.0}
    record.take({"kind": "step", "step": 1, "seconds": 0.4, "parts": parts})
    profiled = {"forward": 0.2, "backward": 0.4, "communication": 0.15, "bubble": 0.05, "hooks": 2.0}
    line = {"kind": "step", "step": 2, "seconds": 2.8, "parts": profiled, "profiled": True}
    record.take(line | {"exposed_in": {"backward": 0.15}, "bubble_in": {"backward": 0.05}})
    # One of observe.profile_steps, whose profiler writes files at its end, is slower still.
    record.take({"kind": "step", "step": 3, "seconds": 9.8, "parts": parts | {"hooks": 9.4}, "on_demand": True})
    # Of the 0.6 s of the profiled backward pass, a quarter was exposed communication.
    expected = {"forward": 0.1, "backward": 0.2, "hooks": 0.0, "communication": 0.075, "bubble": 0.025}
    assert record.split_parts() == pytest.approx(expected)


def memory_kinds(folder: Path) -> dict[str, tuple[float | None, float | None]]:
    """By kind, the bytes that were predicted and those that were measured."""
    return {pair.name: (pair.predicted, pair.measured) for pair in RunView(folder).refresh().comparison.memory}


def with_memory(folder: Path, stage: dict[str, Any], memory: dict[str, float]) -> Path:
    """A run of one rank that holds so much, of which so much was expected."""
    make_run(folder, world=2)
    expected = {"memory": {"fullest_stage": 0, "by_stage": [stage], "peak_gib": 1000 / GIB}}
    (folder / "plan.json").write_text(json.dumps({"expected": expected}))
    kinds = {"parameters": 100, "gradients": 100, "optimizer": 200}
    start = {"kind": "rank", "rank": 0, "world": 2, "coordinates": {"pp": 0}, "memory_kinds": kinds}
    step = {"kind": "step", "step": 101, "seconds": 0.5, "parts": {"forward": 0.5}, "memory": memory}
    write_lines(folder / "ranks/00000.jsonl", [start, step])
    (folder / "ranks/00001.jsonl").unlink()
    return folder


PLANNED = {"parameters": 90, "gradients": 90, "optimizer": 180, "activations": 440, "outside": 200}
TERMS = {"parameters": 90 / GIB, "gradients": 0.0, "optimizer": 180 / GIB, "attention": 530 / GIB, "context": 200 / GIB}


def test_both_columns_of_memory_are_of_the_same_kinds_on_a_gpu(tmp_path: Path) -> None:
    memory = {"rss": 5000, "allocated": 400, "reserved": 900, "peak": 800, "held": 1100}
    assert memory_kinds(with_memory(tmp_path / "run", {"bytes": PLANNED, "terms": TERMS}, memory)) == {
        "parameters": (90, 100),
        "gradients": (90, 100),
        "optimizer": (180, 200),
        "activations and buffers beyond states": (440, 400),
        "libraries and reserve": (200, 300),
    }


def test_on_a_cpu_activations_are_predicted_apart_and_measured_with_libraries(tmp_path: Path) -> None:
    kinds = memory_kinds(with_memory(tmp_path / "run", {"bytes": PLANNED, "terms": TERMS}, {"rss": 1100}))
    assert kinds["activations and buffers beyond states"] == (440, None)
    assert kinds["libraries and reserve"] == (200, None)
    assert kinds["activations, buffers and libraries together"] == (640, 700)


def test_of_a_plan_that_has_no_gradients_at_its_peak_nobody_says_there_are_none(tmp_path: Path) -> None:
    kinds = memory_kinds(with_memory(tmp_path / "run", {"terms": TERMS}, {"rss": 1100}))
    assert kinds["gradients"] == (None, 100)
    assert kinds["parameters"] == (pytest.approx(90), 100)
    assert kinds["activations and buffers beyond states"] == (pytest.approx(530), None)


def test_the_time_of_a_step_is_the_median_of_the_last_steps_also_when_a_run_is_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=100, events=[{"time": 1_700_000_060.0, "event": "finished", "step": 100}])
    (folder / "plan.json").write_text(json.dumps({"measured": {"step_time_s": 0.7, "peak_gib": 1.0, "steps": 95}}))
    page, picture, _, end = shown(folder)
    assert page["step_s"] == 0.5
    assert page["comparison"]["figures"][0]["measured"] == 0.5
    assert "0.5 s a step" in picture
    assert "prediction   a step 0.5 s" in end
