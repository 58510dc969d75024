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


def text_beyond_pictures(page: Page) -> list[str]:
    """Texts of pictures that are cut off at an edge."""
    script = """() => [...document.querySelectorAll('.picture > svg')].flatMap(picture => {
        const edge = picture.getBoundingClientRect();
        return [...picture.querySelectorAll('text')].filter(text => {
            const box = text.getBoundingClientRect();
            return box.width && (box.left < edge.left - 0.5 || box.right > edge.right + 0.5);
        }).map(text => `${picture.closest('section').id}: ${text.textContent}`);
    })"""
    return list(page.evaluate(script))


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
    assert pictures == ["loss", "throughput", "mesh", "memory", "breakdown", "efficiency", "other", "pipeline"]
    for section, key, words in (
        ("loss", "ArrowLeft", "step 12"),
        ("throughput", "Home", "step 1,"),
        ("mesh", "ArrowRight", "rank 0 (pp 0, dp 0, tp 0)"),
        ("memory", "ArrowDown", "parameters: predicted 430"),
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
    labels = page.locator("details .scroll").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    assert len(set(labels)) == 8
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


@pytest.mark.parametrize("width", [1280, 375])
def test_no_text_is_cut_off_at_the_edge_of_its_picture(
    width: int, tmp_path: Path, served: Callable[..., str], opened: Open
) -> None:
    folder = write_run(tmp_path / "run", "dp=2 pp=2", steps=24, profile_every=100)
    for rank in range(4):
        facts = {
            "profiled": True,
            "communication": {"exposed": 0.2, "overlapped": 0.04},
            "idle": 0.02,
            "compute": 0.215,
        }
        line = {
            "kind": "step",
            "step": 25,
            "time": 1.0,
            "seconds": 0.5,
            "parts": {"forward": 0.3, "communication": 0.2},
        }
        append(folder / f"ranks/{rank:05d}.jsonl", line | facts | {"exposed_in": {"forward": 0.2}})
    page, _ = opened(served(folder), width=width)
    expect(page.locator("#efficiency text.strong", has_text="51.8\u00a0% below")).to_be_visible()
    expect(page.locator("#pipeline rect.pass")).not_to_have_count(0)
    assert text_beyond_pictures(page) == []


def test_no_time_has_sixty_seconds_beside_its_minutes(large: str, opened: Open) -> None:
    page, _ = opened(large)
    said = page.evaluate(
        "import('/assets/format.js').then(it => [119, 120, 179.7, 3601, 7199.7, 7260].map(it.seconds))"
    )
    plain = [text.replace("\u00a0", " ") for text in said]
    assert plain == ["119 s", "2 min 0 s", "3 min 0 s", "60 min 1 s", "2 h 0 min", "2 h 1 min"]


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
