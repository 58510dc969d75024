"""The documentation is true: the settings page is current, the commands and links in the pages exist."""

from __future__ import annotations

import re
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

from meshwright.cli.main import VERBS
from meshwright.observe.prometheus import COUNTERS, GAUGES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_settings_page_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs/make_configuration.py"))["page"]()
    assert (ROOT / "docs/configuration.md").read_text() == made, "run python docs/make_configuration.py"


def test_tables_of_other_trainers_are_those_of_the_code() -> None:
    text = (ROOT / "docs/interop.md").read_text()
    assert text == runpy.run_path(str(ROOT / "docs/make_interop.py"))["page"](text), "run python docs/make_interop.py"
    assert text.count("`zero_optimization.") > 50


def test_as_many_models_of_transformers_bring_tables_as_the_page_says() -> None:
    found = find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    files = list(Path(found.origin).parent.glob("models/*/configuration_*.py"))
    texts = [(path.parent.name, path.read_text("utf-8")) for path in files]
    counts = []
    for plan in ("tp", "ep"):
        given = re.compile(rf"^ +base_model_{plan}_plan[^=\n]*= *(?!None)\S", re.MULTILINE)
        counts.append(len({folder for folder, text in texts if given.search(text)}))
    page = " ".join((ROOT / "docs/strategies.md").read_text().split())
    assert f"`tp_plan`, which {counts[0]} of transformers' folders of models have" in page
    assert f"`ep_plan`, in {counts[1]} of those folders" in page


def test_pictures_are_what_the_algorithms_do() -> None:
    made = runpy.run_path(str(ROOT / "docs/make_pictures.py"))["pictures"]()
    drawn = {path.name: path.read_text() for path in (ROOT / "docs/pictures").glob("all-reduce-*.svg")}
    assert drawn == made, "run python docs/make_pictures.py"
    page = (ROOT / "docs/communication.md").read_text()
    assert [name for name in made if f"(pictures/{name})" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_code_blocks_are_verbs(page: Path) -> None:
    blocks = re.findall(r"^```.*?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    used = {verb for block in blocks for verb in re.findall(r"^\s*(?:\$ )?meshwright ([a-z]+)", block, re.MULTILINE)}
    assert used <= VERBS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", page.read_text())) <= targets


def test_every_metric_for_prometheus_is_in_the_table() -> None:
    table = (ROOT / "docs" / "watch.md").read_text().partition("### Prometheus")[2].partition("## ")[0]
    names = [name for name, _ in GAUGES.values()] + [f"{name}_total" for name, _ in COUNTERS.values()]
    assert [name for name in names if f"`{name}`" not in table] == []
