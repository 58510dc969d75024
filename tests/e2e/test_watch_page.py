"""The page in a real browser: a run that goes on, a rank that is killed, narrow screens, dark colours, the keyboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.chaos.conftest import SETTINGS
from tests.chaos.runs import kill, start
from tests.run_folders import append, write_run

TOKEN = "a-token-of-32-characters-0123456"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no chromium; make system installs it on Debian")
    with sync_playwright() as playwright:
        # Root, as in a container, has no sandbox.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()
    # Tests that follow fork: the thread that has waited for the browser must be gone.
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(10)
    assert threading.active_count() == 1


class Seen:
    """What a page has said and asked for."""

    def __init__(self, page: Page) -> None:
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname or request.url[:5]))


Open = Callable[..., tuple[Page, Seen]]


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Opens an address in a page of its own; no page may have had an error."""
    contexts, all_seen = [], []

    def visit(url: str, width: int = 1200, **options: Any) -> tuple[Page, Seen]:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        all_seen.append(Seen(page))
        page.goto(url)
        return page, all_seen[-1]

    yield visit
    for context in contexts:
        context.close()
    assert [seen.errors for seen in all_seen] == [[] for _ in all_seen]


@pytest.fixture(scope="module")
def served() -> Iterator[Callable[..., str]]:
    """Starts `meshwright watch --web` and gives the address; ends with the tests."""
    processes = []

    def begin(*arguments: object) -> str:
        command = [sys.executable, "-m", "meshwright", "watch", "--web", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        said = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert said is not None
        return said[0]

    yield begin
    for process in processes:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, served: Callable[..., str]) -> str:
    """The address of a run on 32 ranks, split in three ways."""
    folder = tmp_path_factory.mktemp("large") / "large"
    return served(write_run(folder, "dp=4 tp=2 pp=4", world=32, steps=120, planned_steps=400, end=None))


def sideways(page: Page) -> int:
    """By how many pixels a page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_a_run_that_is_named_twice_is_shown_once(tmp_path: Path, served: Callable[..., str]) -> None:
    first, second = (write_run(tmp_path / name, "dp=2", world=2, steps=5) for name in ("first", "second"))
    with urllib.request.urlopen(f"{served(first, second, tmp_path / 'second' / '..' / 'first')}data") as answer:
        assert [run["name"] for run in json.load(answer)["runs"]] == ["first", "second"]


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


def test_a_live_run_moves_and_a_killed_rank_turns_red(
    corpus: Path, tmp_path: Path, served: Callable[..., str], opened: Open
) -> None:
    settings = [*SETTINGS, f"data.path={corpus}"]
    training = start(tmp_path, settings, "train.steps=100000", "checkpoint.every=0", "elastic.max_restarts=0", nproc=4)
    try:
        training.wait_for_step(3)
        page, seen = opened(served(training.folder))
        expect(page.locator("#mesh [data-rank]")).to_have_count(4)
        expect(page.locator("#mesh [data-state=alive]")).to_have_count(4)
        expect(page.locator("#state")).to_have_text("running")
        curve = page.locator("#loss path.curve").first
        expect(curve).to_be_attached()
        before = curve.get_attribute("d")
        expect(curve).not_to_have_attribute("d", before or "", timeout=20_000)
        kill(training.ranks()[2])
        lost = page.locator("#mesh [data-rank='2'][data-state=lost] rect.cell")
        expect(lost).to_be_attached(timeout=30_000)
        # Red; asked until there is an answer, since a cell that is drawn anew meanwhile has no colour.
        expect(lost).to_have_css("fill", re.compile(r"^rgb\((1[6-9]|2\d)\d, \d{1,2}, \d{1,2}\)$"))
        expect(page.locator("#events .kind", has_text="failed")).to_have_count(1)
        expect(page.locator("#state")).to_contain_text("failed", timeout=20_000)
        assert seen.hosts == {"127.0.0.1"}
    finally:
        training.end()


def test_a_trained_run_has_a_report_that_works_offline(
    corpus: Path, tmp_path: Path, tiny_run: list[str], meshwright: Callable[..., Any], opened: Open
) -> None:
    result = meshwright("train", *tiny_run, "run.dir=run", "train.steps=40", "train.eval_every=20")
    assert result.returncode == 0, result.stderr
    assert re.search(r"^loss +\d+\.\d+, held-out \d+\.\d+ at step 40$", result.stdout, re.MULTILINE)
    for word in ("tokens/s ", "TFLOP/s ", "time lost ", "prediction "):
        assert re.search(f"^{word}", result.stdout, re.MULTILINE) or (word == "TFLOP/s " and "MFU" in result.stdout)
    assert "the report is in run/report.html" in result.stdout
    page, seen = opened((tmp_path / "run/report.html").as_uri(), offline=True)
    expect(page.locator("#state")).to_have_text("finished")
    expect(page.locator("#loss path.curve").first).to_be_attached()
    assert seen.hosts == {"file:"}
    # A report that cannot be written ends no training.
    (tmp_path / "run/report.html").unlink()
    (tmp_path / "run/report.html").mkdir()
    result = meshwright("train", *tiny_run, "run.dir=run", "train.steps=41", "train.eval_every=20")
    assert result.returncode == 0, result.stderr
    assert "the report could not be written" in result.stderr
    assert not list((tmp_path / "run").glob(".report*")), "no rest of it is left"


def test_texts_of_a_run_do_no_harm(tmp_path: Path, meshwright: Callable[..., Any], opened: Open) -> None:
    evil = "</script><script>document.title='harm'</script><img src=x onerror=\"document.title='harm'\">"
    folder = write_run(tmp_path / "a<script>&'b", "dp=2", world=2, steps=5, end=None)
    append(folder / "events.jsonl", {"time": 1.0, "event": "hang" + evil, "text": evil, "step": 3})
    append(folder / "events.jsonl", {"time": 2.0, "event": "started", "strategy": evil, "ranks": 2, "device": evil})
    append(
        folder / "ranks/00000.jsonl", {"kind": "collectives", "step": 5, "rows": [{"group": evil, "operation": evil}]}
    )
    result = meshwright("report", folder, "--out", tmp_path / "out.html")
    assert result.returncode == 0, result.stderr
    page, _ = opened((tmp_path / "out.html").as_uri())
    expect(page.locator("h1")).to_have_text("a<script>&'b")
    expect(page.locator("#events li .text", has_text="</script>").first).to_be_visible()
    assert "harm" not in page.title()
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_only_downwards(large: str, opened: Open, scheme: str) -> None:
    page, _ = opened(large, width=360, color_scheme=scheme, has_touch=True)
    expect(page.locator("#mesh [data-rank]")).to_have_count(32)
    expect(page.locator("#pipeline rect.pass")).not_to_have_count(0)
    for summary in page.locator("summary").all():
        summary.click()
    assert sideways(page) <= 0


def test_colours_follow_the_system_and_the_switch(large: str, opened: Open) -> None:
    page, _ = opened(large, color_scheme="dark")

    def brightness() -> float:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3

    assert brightness() < 60
    page.locator("#theme").click()
    assert brightness() > 200
    page.reload()
    expect(page.locator("#theme")).to_have_text("dark")
    assert brightness() > 200, "the choice is kept"


def test_everything_can_be_done_with_the_keyboard(large: str, opened: Open) -> None:
    page, _ = opened(large)
    expect(page.locator("#loss path.curve").first).to_be_attached()
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("[document.activeElement.closest('section')?.id ?? '', document.activeElement.tagName]")
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"the focus is not seen on {reached[-1]}"
        if reached[-1][0] == "events":
            break
    pictures = [section for section, tag in reached if tag == "svg"]
    assert pictures == ["loss", "throughput", "mesh", "breakdown", "efficiency", "other", "pipeline"]
    for section, key, words in (
        ("loss", "ArrowLeft", "step 12"),
        ("throughput", "Home", "step 1,"),
        ("mesh", "ArrowRight", "rank 0 (pp 0, dp 0, tp 0)"),
        ("breakdown", "ArrowDown", "the plan"),
        ("efficiency", "ArrowDown", "the run: "),
        ("pipeline", "ArrowRight", "predicted: stage 0, forward of micro-batch 0"),
    ):
        page.locator(f"#{section} svg[role=img]").focus()
        page.keyboard.press(key)
        expect(page.locator(f"#{section} .readout")).to_contain_text(words)
    page.locator("#loss button", has_text="log scale").focus()
    before = page.locator("#loss path.curve").last.get_attribute("d")
    page.keyboard.press("Enter")
    expect(page.locator("#loss path.curve").last).not_to_have_attribute("d", before or "")


def test_every_picture_has_a_name_a_description_and_its_numbers(large: str, opened: Open) -> None:
    page, _ = opened(large)
    expect(page.locator("#pipeline rect.pass")).not_to_have_count(0)
    pictures = page.locator("svg[role=img]")
    assert pictures.count() == 8
    for picture in pictures.all():
        assert picture.locator("title").first.text_content()
        assert picture.locator("desc").text_content()
    for details in page.locator("details").all():
        details.locator("summary").click()
        expect(details.locator("tbody tr")).not_to_have_count(0)


def test_a_trained_run_has_the_same_figures_on_the_page_as_on_a_terminal(
    tmp_path: Path, tiny_run: list[str], meshwright: Callable[..., Any], opened: Open
) -> None:
    split = ["--nproc", "2", "parallel.strategy=dp=2"]
    result = meshwright("train", *tiny_run, *split, "run.dir=run", "train.steps=60", "observe.profile_every=20")
    assert result.returncode == 0, result.stderr
    printed = dict(re.findall(r"^(tokens/s|computing) +([\d.,]+)", result.stdout, re.MULTILINE))
    once = meshwright("watch", "run", "--once").stdout
    assert re.search(rf"^tokens/s +{printed['tokens/s']} .*mean of 50 steps", once, re.MULTILINE)
    computing = re.search(r"^computing +(\d+)%", once, re.MULTILINE)
    assert computing is not None
    assert abs(float(computing[1]) - float(printed["computing"])) < 0.56, "but for rounding the same"
    page, _ = opened((tmp_path / "run/report.html").as_uri())
    figure = page.locator("#figures .figure")
    tokens = figure.filter(has_text="tokens/s").locator(".value")
    cell = page.locator("#memory tbody tr", has_text="tokens/s").locator("td").nth(2)
    expect(tokens).to_have_text(cell.text_content() or "no figure")
    if float(printed["tokens/s"].replace(",", "")) < 10_000:
        expect(tokens).to_have_text(printed["tokens/s"])
    expect(figure.filter(has_text="tokens/s")).to_contain_text("mean of 50 steps")
    expect(figure.filter(has_text="computation efficiency").locator(".value")).to_have_text(
        f"{printed['computing']}\u00a0%"
    )
    expect(page.locator("#efficiency [data-bar]")).to_have_count(3)
    expect(page.locator("#breakdown [data-bar='rank 0'] .part-communication")).to_have_count(1)


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
    mark, bar = tile.locator(".goal").bounding_box(), tile.locator(".meter").bounding_box()
    assert mark is not None
    assert bar is not None
    assert (mark["x"] + mark["width"] / 2 - bar["x"]) / bar["width"] == pytest.approx(0.8, abs=0.02)


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


def test_a_token_is_asked_for_once(tmp_path: Path, browser: Browser, served: Callable[..., str]) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=5)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    url = served(folder, "--token-file", token)
    context = browser.new_context()
    page = context.new_page()
    page.goto(url)
    page.get_by_label("token").fill(TOKEN)
    page.get_by_role("button").click()
    expect(page.locator("h1")).to_have_text("run")
    page.reload()
    expect(page.locator("#loss path.curve").first).to_be_attached()
    assert page.evaluate("document.cookie") == ""
    assert TOKEN not in page.content() + page.url
    context.close()
