"""The documentation is true: the settings page is current, the commands and links in the pages exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from meshwright.cli.main import VERBS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_settings_page_is_current() -> None:
    made = runpy.run_path(str(ROOT / "docs/make_configuration.py"))["page"]()
    assert (ROOT / "docs/configuration.md").read_text() == made, "run python docs/make_configuration.py"


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
