"""The tables of docs/interop.md that were written by hand: each setting of ours is one, and their keys are known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cli.main import VERBS
from meshwright.config_load import resolve_config
from meshwright.interop.deepspeed_rules import RULES as DEEPSPEED
from meshwright.interop.megatron_rules import RULES as MEGATRON
from meshwright.interop.megatron_split import SHARDED
from meshwright.known_names import in_our_words
from meshwright.strategy import KEYS, Strategy

PAGE = (Path(__file__).parents[2] / "docs/interop.md").read_text()
VALUES = {"zero": "1", "recompute": "full", "offload": "optimizer"}
"""Of words whose value the table leaves open; degrees are 2."""
BESIDE = {"sp": "tp=2", "schedule": "pp=2", "shard": "zero=3", "replicate": "zero=0"}
"""What a word does not go without."""


def rows(head: str) -> list[list[str]]:
    lines = PAGE[PAGE.index(f"| {head} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


OURS = [(row[0], text) for head in ("Colossal-AI", "degree") for row in rows(head) for text in quoted(row[-1])]


def test_both_tables_are_read() -> None:
    assert (len(rows("Colossal-AI")), len(rows("degree"))) == (13, 12)
    assert all(quoted(row[-1]) for head in ("Colossal-AI", "degree") for row in rows(head))


@pytest.mark.parametrize(("theirs", "ours"), OURS, ids=lambda text: text.replace("`", ""))
def test_a_setting_of_ours_is_one(theirs: str, ours: str) -> None:
    if ours.startswith("mw."):
        assert callable(getattr(mw, re.split(r"\W", ours)[1]))
        return
    if ours.startswith("meshwright "):
        assert ours.split()[1] in VERBS
        return
    name, equals, value = ours.partition("=")
    if "." in name and name != "parallel.strategy":
        resolve_config(None, [f"{name}={value.replace('N', '2') if equals else 1}"])
        return
    text = value.strip('"') if name == "parallel.strategy" else ours
    words = [re.sub(r"\bN\b", "2", word) for word in text.split()]
    words = [word + VALUES.get(word[:-1], "2") if word.endswith("=") else word for word in words]
    wanted = dict(word.split("=") for word in words)
    assert wanted.keys() <= {"dp", *KEYS}
    needed = [more for key, more in BESIDE.items() if key in wanted and more.split("=")[0] not in wanted]
    asked = " ".join([*words, *needed])
    assert in_our_words(asked) == (asked, []), "it is a name of others"
    assert resolve_config(None, [f"parallel.strategy={asked}"]).config.parallel.strategy == asked
    strategy = Strategy.parse(asked, Strategy.fewest_processes(asked))
    found = {key: getattr(strategy, key) for key in wanted}
    assert {key: "on" if value is True else str(value) for key, value in found.items()} == wanted


def test_keys_of_others_are_those_that_are_read() -> None:
    keys = {rule.key for rule in DEEPSPEED}
    parts = {part for key in keys for part in key.split(".")}
    for _, deepspeed, megatron, *_ in rows("degree"):
        assert {key for key in quoted(deepspeed) if key not in keys | parts} == set()
        assert {
            flag for flag in quoted(megatron) if flag not in {rule.key for rule in MEGATRON} | set(SHARDED)
        } == set()
    for row in rows("degree"):
        for name in (*quoted(row[3]), *quoted(row[4])):
            # Degrees by their names are taken as ours.
            if name.endswith(("_size", "_degree")):
                assert in_our_words(f"{name}=2")[1], name
