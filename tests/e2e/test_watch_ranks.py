"""What the page shows of ranks: their cells in the mesh, the parts of their steps, computing, memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.e2e.pages import Open, sideways, text_beyond_pictures
from tests.run_folders import append, write_run

pytestmark = pytest.mark.slow


def test_rows_of_ranks_with_several_stages_are_ranks(tmp_path: Path, served: Callable[..., str], opened: Open) -> None:
    folder = write_run(tmp_path / "run", "dp=2 pp=2 schedule=interleaved:2", world=4, steps=30)
    page, _ = opened(served(folder))
    expect(page.locator("#pipeline rect.pass")).not_to_have_count(0)
    words = page.locator("#pipeline svg text").all_text_contents()
    assert [word for word in words if word.startswith("rank ")] == ["rank 0", "rank 2"] * 2
    assert not [word for word in words if word.startswith("stage ")]
    assert {"0:0", "3:0"} <= set(words)
    page.locator("#pipeline svg").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#pipeline .readout")).to_contain_text("predicted: rank 0, stage 0, forward of micro-batch 0")


@pytest.mark.parametrize(("width", "words"), [(1200, ["9", "dp0 tp1"]), (390, ["9", "dp0", "tp1"])])
def test_cells_of_the_mesh_say_where_a_rank_is(
    width: int, words: list[str], tmp_path: Path, served: Callable[..., str], opened: Open
) -> None:
    folder = write_run(tmp_path / "run", "dp=4 tp=2 pp=2", world=16, steps=5)
    page, _ = opened(served(folder), width=width)
    cell = page.locator("#mesh [data-rank='9']")
    box, inner = cell.locator("rect.cell").bounding_box(), [text.bounding_box() for text in cell.locator("text").all()]
    assert box is not None
    assert cell.locator("text").all_text_contents()[: len(words)] == words
    for one in inner:
        assert one is not None
        assert box["x"] <= one["x"]
        assert one["x"] + one["width"] <= box["x"] + box["width"]
        assert box["y"] <= one["y"]
        assert one["y"] + one["height"] <= box["y"] + box["height"]
    assert sideways(page) == 0


def test_cells_of_the_mesh_fill_with_what_the_figure_of_the_peak_counts(
    tmp_path: Path, served: Callable[..., str], opened: Open
) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=5, chip="h200")
    for rank in (0, 1):
        memory = {
            name: size * 2**30 for name, size in {"rss": 1, "allocated": 2, "reserved": 4, "peak": 3, "held": 5}.items()
        }
        line = {"kind": "step", "step": 6, "time": 1.0, "seconds": 0.5, "parts": {"forward": 0.5}, "memory": memory}
        append(folder / f"ranks/{rank:05d}.jsonl", line)
    page, _ = opened(served(folder))
    figure = page.locator("#figures .figure", has_text="peak memory").locator(".value")
    expect(figure).to_have_text("5\u00a0GiB")
    expect(page.locator("#mesh [data-rank='0'] text").last).to_have_text("5\u00a0GiB")


def test_computing_is_shown_for_each_rank_beside_its_goal(large: str, opened: Open) -> None:
    page, _ = opened(large)
    card = page.locator("#efficiency")
    expect(card.locator("[data-bar]")).to_have_count(33)
    # A rank in eight computes half as long as the others.
    expect(card.locator("[data-bar].below")).to_have_count(4)
    expect(card.locator("[data-bar].below text", has_text="below")).to_have_count(4)
    expect(card.locator("line.goal")).to_have_count(1)
    expect(card.locator("text", has_text="goal 80")).to_be_visible()
    expect(card).to_contain_text("a run should reach 80")
    description = card.locator("desc").text_content() or ""
    assert re.search(r"The run: 8\d\.\d.%, reaches the goal of 80.%\. Below it: ranks 5, 13, 21, 29\.", description)
    card.locator("summary").click()
    row = card.locator("tbody tr", has_text="rank 13")
    expect(row).to_contain_text("below")
    tile = page.locator("#figures .figure", has_text="computation efficiency")
    expect(tile).to_contain_text("goal 80")
    # Looked up and measured in one go, since figures are drawn anew while a run goes on.
    place = """() => {
        const [mark, bar] = ['.goal', '.meter'].map(
            (part) => document.querySelector(`#figures ${part}`).getBoundingClientRect());
        return (mark.x + mark.width / 2 - bar.x) / bar.width;
    }"""
    assert page.evaluate(place) == pytest.approx(0.8, abs=0.02)


def test_waiting_is_apart_from_the_passes_and_where_it_cannot_be_that_is_said(
    large: str, tmp_path: Path, served: Callable[..., str], opened: Open
) -> None:
    page, _ = opened(large)
    card = page.locator("#breakdown")
    expect(card.locator("[data-bar='rank 3'] .part-communication")).to_have_count(1)
    expect(card.locator("[data-bar='rank 3'] .part-bubble")).to_have_count(1)
    expect(card.locator(".head")).to_contain_text("waiting as in profiled step 100")
    expect(card.locator(".legend")).to_contain_text("exposed communication")
    page, _ = opened(served(write_run(tmp_path / "run", "dp=2 pp=2", steps=20)))
    card = page.locator("#breakdown")
    expect(card.locator(".head")).to_contain_text("no step was profiled: waiting for other ranks is in the passes")
    expect(card.locator(".legend")).to_contain_text("forward with waiting")
    expect(card.locator("[data-bar='rank 0'] .part-forward title")).to_contain_text("forward with waiting")
    expect(page.locator("#efficiency")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_part_of_a_step_has_its_own_look_and_its_name(large: str, opened: Open, scheme: str) -> None:
    page, _ = opened(large, color_scheme=scheme)
    card = page.locator("#breakdown")
    expect(card.locator("[data-bar]")).to_have_count(33)
    looks = "keys => keys.map(key => getComputedStyle(key).getPropertyValue('--part') && getComputedStyle(key).fill)"
    colours = card.locator(".legend [class*=part-]").evaluate_all(looks)
    assert len(colours) == len(set(colours)) == 11
    assert all(re.match(r"rgb\(|#", colour) for colour in colours)
    drawn = card.locator("[data-bar='rank 0'] .part-forward")
    # Found and asked in one go: the card is drawn anew when something has come.
    rectangle = "#breakdown [data-bar='rank 0'] .part-forward rect"
    assert page.evaluate("it => getComputedStyle(document.querySelector(it)).fill", rectangle) in colours
    assert re.match(r"forward \d+", drawn.locator("title").text_content() or "")
    hatched = card.locator("[data-bar='rank 0'] .part-communication rect").nth(1)
    expect(hatched).to_have_attribute("fill", re.compile(r"^url\(#texture-"))


def test_overlapped_communication_and_idle_time_are_beside_a_profiled_step(
    tmp_path: Path, served: Callable[..., str], opened: Open
) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=24, profile_every=100)
    for rank in (0, 1):
        facts = {"profiled": True, "communication": {"exposed": 0.1, "overlapped": 0.04 + rank / 100}, "idle": 0.02}
        line = {
            "kind": "step",
            "step": 25,
            "time": 1.0,
            "seconds": 0.5,
            "parts": {"forward": 0.4, "communication": 0.1},
        }
        append(folder / f"ranks/{rank:05d}.jsonl", line | facts | {"compute": 0.38, "exposed_in": {}, "bubble_in": {}})
    page, _ = opened(served(folder))
    card = page.locator("#breakdown")
    # Of the 25 steps that ranks have recorded, one was profiled.
    expect(card.locator(".head")).to_contain_text("mean of the last 24 steps")
    expect(card.locator("[data-beside]")).to_have_count(0)
    card.locator("button", has_text="profiled step alone").click()
    expect(card.locator("[data-bar='rank 0'] [data-beside=idle] title")).to_have_text("idle 20\u00a0ms")
    expect(card.locator("[data-bar='rank 1'] [data-beside=overlapped] title")).to_have_text(
        "overlapped communication 50\u00a0ms"
    )
    expect(card.locator(".legend")).to_contain_text("overlapped communication, behind computing")
    expect(card.locator(".legend")).to_contain_text("idle, within the parts")
    card.locator("svg[role=img]").focus()
    page.keyboard.press("End")
    expect(card.locator(".readout")).to_contain_text(
        "idle, within the parts: 20\u00a0ms; overlapped communication, behind computing: 50\u00a0ms"
    )
    card.locator("summary").click()
    cells = card.locator("tbody tr", has_text="rank\u00a00").locator("td").all_text_contents()
    assert cells[-2:] == ["20\u00a0ms", "40\u00a0ms"]
    assert text_beyond_pictures(page) == []


def test_the_mean_of_a_rank_says_of_how_many_steps_it_is(
    tmp_path: Path, served: Callable[..., str], opened: Open
) -> None:
    page, _ = opened(served(write_run(tmp_path / "run", "dp=2", world=2, steps=24, profile_every=10)))
    expect(page.locator("#breakdown .head")).to_contain_text("mean of 22 steps of the last 24, profiled ones left out")


def test_a_run_without_memory_shows_none_of_another(tmp_path: Path, served: Callable[..., str], opened: Open) -> None:
    first = write_run(tmp_path / "first", "dp=2", world=2, steps=5)
    bare = write_run(tmp_path / "bare", "dp=2", world=2, steps=5, ranks=False)
    (bare / "plan.json").unlink()
    page, _ = opened(served(first, bare))
    card = page.locator("#memory")
    expect(card.locator(".legend")).to_contain_text("6 GiB")
    page.locator("#runs button", has_text="bare").click()
    expect(card.locator("tbody").first).to_contain_text("tokens/s")
    expect(card.locator(".legend")).to_have_text("")
    expect(card.locator("desc")).to_have_text("")
    expect(card.locator("details")).to_be_hidden()
    page.locator("#runs button", has_text="first").click()
    expect(card.locator(".legend")).to_contain_text("6 GiB")
    expect(card.locator("details")).to_be_visible()
