"""The curves of the page: marks on their axis, skipped steps, what the cursor tells, several runs over each other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.e2e.pages import Open
from tests.run_folders import append, write_run

pytestmark = pytest.mark.slow


def write_diverged(folder: Path) -> Path:
    """A run that gave up in step 24, the last of three whose gradients were no numbers; step 10 overflowed before."""
    write_run(folder, "dp=2", world=2, steps=23, planned_steps=60, end=None, began=1_700_000_000.0)
    metrics = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.unlink()
    for line in lines:
        append(metrics, line | ({"skipped": 1} if line["step"] in (10, 22, 23) else {}))
    for step in (22, 23, 24):
        facts = {"time": 1_700_000_002.0 + step / 2, "step": step, "in_a_row": step - 21, "skipped": 1}
        append(folder / "events.jsonl", facts | {"event": "nonfinite"})
    failed = {"time": 1_700_000_014.5, "event": "failed", "step": 24, "rank": 1, "cause": "TrainingError: diverged"}
    append(folder / "events.jsonl", failed, {"time": 1_700_000_014.6, "event": "gave_up", "text": "it has diverged"})
    return folder


def test_the_cursor_tells_values_and_events(large: str, opened: Open) -> None:
    page, _ = opened(large)
    expect(page.locator("#loss path.curve").first).to_be_attached()
    box = page.locator("#loss svg[role=img]").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 52 + (box["width"] - 64) * 99 / 119, box["y"] + 100)
    expect(page.locator("#loss .tip")).to_contain_text("step 100")
    expect(page.locator("#loss .tip")).to_contain_text("held-out")
    expect(page.locator("#loss .tip")).to_contain_text("checkpoint")


def test_several_runs_are_laid_over_each_other(tmp_path: Path, served: Callable[..., str], opened: Open) -> None:
    folders = [write_run(tmp_path / name, "dp=2", world=2, steps=50 + 20 * place) for place, name in enumerate("ab")]
    page, _ = opened(served(*folders))
    expect(page.locator("#throughput .legend button")).to_have_text(["a", "b"])
    expect(page.locator("#throughput path.curve:not(.raw)")).to_have_count(2)
    page.locator("#throughput .legend button", has_text="b").click()
    expect(page.locator("#throughput path.curve:not(.raw)")).to_have_count(1)
    page.locator("#runs button", has_text="b").click()
    expect(page.locator("h1")).to_have_text("b")
    expect(page.locator("#progress")).to_contain_text("step 70 of 70")


def test_faults_are_on_the_axis_also_in_the_step_that_a_run_died_in(
    tmp_path: Path, served: Callable[..., str], opened: Open
) -> None:
    folder = write_diverged(tmp_path / "run")
    page, _ = opened(served(folder))
    for card in ("#loss", "#throughput", "#other"):
        for name in ("nonfinite", "failed", "gave up"):
            expect(page.locator(f"{card} [data-mark='{name}'][data-step='24'] line.bad")).to_have_count(1)
    edge = page.locator("#loss svg[role=img]").bounding_box()
    mark = page.locator("#loss [data-mark=failed] line").bounding_box()
    assert edge is not None
    assert mark is not None
    assert edge["x"] < mark["x"] < edge["x"] + edge["width"]
    page.locator("#loss svg[role=img]").focus()
    page.keyboard.press("End")
    expect(page.locator("#loss .tip")).to_contain_text("gave up (step 24)")
    expect(page.locator("#loss .readout")).to_contain_text("failed at step 24")
    assert "gave up at step 24." in (page.locator("#loss desc").text_content() or "")
    # One that failed before its first step, and went on after it was started again.
    again = write_run(tmp_path / "again", "dp=2", world=2, steps=20, began=1_700_000_000.0)
    rest = (again / "events.jsonl").read_text()
    (again / "events.jsonl").unlink()
    append(again / "events.jsonl", {"time": 1_600_000_000.0, "event": "failed", "step": 0, "rank": 0, "cause": "x"})
    append(again / "events.jsonl", {"time": 1_600_000_001.0, "event": "gave_up", "text": "x"})
    with (again / "events.jsonl").open("a") as file:
        file.write(rest)
    dead = write_run(tmp_path / "dead", "dp=2", world=2, steps=0, end=None)
    append(dead / "events.jsonl", {"time": 1_700_000_001.0, "event": "failed", "step": 1, "rank": 0, "cause": "x"})
    page, _ = opened(served(again))
    expect(page.locator("#loss [data-mark='gave up'][data-step='0']")).to_have_count(1)
    page, _ = opened(served(dead))
    expect(page.locator("#loss [data-mark=failed][data-step='1'] line.bad")).to_have_count(1)
    expect(page.locator("#loss")).to_contain_text("no values yet")


def test_skipped_steps_are_marked_and_counted(tmp_path: Path, served: Callable[..., str], opened: Open) -> None:
    page, _ = opened(served(write_diverged(tmp_path / "run")))
    for step in (10, 22, 23, 24):
        expect(page.locator(f"#loss [data-mark=skipped][data-step='{step}']")).to_have_count(1)
    expect(page.locator("#loss [data-mark=skipped]")).to_have_count(4)
    label = page.locator(".label", has_text="skipped steps")
    figure = page.locator("#figures .figure").filter(has=label)
    expect(figure.locator(".value")).to_have_text("4")
    expect(figure).to_contain_text("NaN or infinity in 3 steps")
    page.locator("#loss svg[role=img]").focus()
    page.keyboard.press("Home")
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#loss .tip")).to_contain_text("skipped (step 10)")
    page, _ = opened(served(write_run(tmp_path / "good", "dp=2", world=2, steps=5)))
    expect(page.locator("#figures .figure")).not_to_have_count(0)
    expect(page.locator("#figures .label", has_text="skipped")).to_have_count(0)


def test_the_cursor_gives_a_run_no_value_at_steps_that_it_never_had(
    tmp_path: Path, served: Callable[..., str], opened: Open
) -> None:
    folders = [
        write_run(tmp_path / name, "dp=2", world=2, steps=steps) for name, steps in (("short", 30), ("long", 70))
    ]
    page, _ = opened(served(*folders))
    picture, said = page.locator("#loss svg[role=img]"), page.locator("#loss .readout")
    expect(page.locator("#loss path.curve").first).to_be_attached()
    picture.focus()
    page.keyboard.press("Home")
    expect(said).to_contain_text("step 1, short ")
    page.keyboard.press("End")
    expect(said).to_contain_text("step 70, ")
    expect(said).to_contain_text("long 3")
    words = said.text_content() or ""
    assert not re.search(r"short \d", words), "it ended at step 30"
    # Of losses that are seldom evaluated, the last before, with its step.
    assert re.search(r"short, held-out [\d.]+ \(step 20\)", words)
    assert re.search(r"long, held-out [\d.]+ \(step 60\)", words)


def test_the_cursor_finds_what_is_left_of_curves_with_many_points(
    tmp_path: Path, served: Callable[..., str], opened: Open
) -> None:
    lengths = {"short": 3000, "long": 5000}
    folders = [
        write_run(tmp_path / name, "dp=2", world=2, steps=steps, step_s=0.01, ranks=False, seed=steps)
        for name, steps in lengths.items()
    ]
    page, _ = opened(served(*folders))
    expect(page.locator("#throughput path.curve").first).to_be_attached()
    box = page.locator("#throughput svg[role=img]").bounding_box()
    assert box is not None
    tip = page.locator("#throughput .tip")
    for share, names in ((0.3, ["short", "long"]), (0.45, ["short", "long"]), (0.8, ["long"])):
        page.mouse.move(box["x"] + 52 + (box["width"] - 64) * share, box["y"] + 100)
        rows = tip.locator("p:has(b)")
        expect(rows).to_have_count(len(names))
        for row, name in zip(rows.all(), names, strict=True):
            expect(row).to_contain_text(name)


def test_the_curves_of_many_runs_are_told_apart_without_their_colours_alone(
    tmp_path: Path, served: Callable[..., str], opened: Open
) -> None:
    folders = [write_run(tmp_path / f"run{place}", "dp=2", world=2, steps=20, ranks=False) for place in range(8)]
    page, _ = opened(served(*folders))
    keys = page.locator("#loss .legend button svg")
    expect(keys).to_have_count(16)
    look = """keys => keys.map(key => {
        const style = getComputedStyle(key.querySelector('.sample'));
        return [style.stroke, style.strokeDasharray, key.querySelector('.dot')?.getAttribute('d') ?? ''].join(' ');
    })"""
    assert len(set(keys.evaluate_all(look))) == 16
    assert len(set(page.locator("#runs button svg").evaluate_all(look))) == 8
