"""Python's garbage collection stays out of the steps, happens between them, and is Python's again at the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import load_config
from meshwright.torch_support import imported_for_good
from meshwright.training.garbage import CollectGarbage
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop


class Seen(Hook):
    """Whether Python collects by itself, and how much is frozen, after every step; may fail at one."""

    def __init__(self, fails_at: int = 0) -> None:
        self.enabled: list[bool] = []
        self.frozen: list[int] = []
        self.fails_at = fails_at

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        self.enabled.append(gc.isenabled())
        self.frozen.append(gc.get_freeze_count())
        if trainer.step == self.fails_at:
            raise ZeroDivisionError("planted")


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    """As in a user's own program; the tests froze what they imported."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """Every collection from now on: whether somebody asked for it (2) or Python began it (0, 1, 2)."""
    found: list[str] = []

    def note(phase: str, facts: dict[str, Any]) -> None:
        if phase == "start":
            found.append(str(facts["generation"]))

    assert gc.isenabled()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.enable()


def loop(tmp_path: Path, tiny_run: list[str], every: int, *hooks: Hook) -> TrainingLoop:
    settings = [*tiny_run, f"run.dir={tmp_path}/run", f"train.gc_every={every}", "parallel.strategy=dp=1"]
    return TrainingLoop(load_config(overrides=settings), hooks=hooks)


def test_collections_come_between_steps_and_only_then(
    tmp_path: Path, tiny_run: list[str], collections: list[str]
) -> None:
    seen, frozen = Seen(), gc.get_freeze_count()
    training = loop(tmp_path, tiny_run, 2, CollectGarbage(), seen)
    collections.clear()
    training.train()
    # Before the first step, after it, and after the second, fourth and sixth.
    assert collections == ["2"] * 5
    assert seen.enabled == [False] * 6
    assert all(count > frozen for count in seen.frozen)
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_nothing_is_changed_where_it_is_left_to_python(tmp_path: Path, tiny_run: list[str]) -> None:
    seen, frozen = Seen(), gc.get_freeze_count()
    loop(tmp_path, tiny_run, 0, CollectGarbage(), seen).train()
    assert seen.enabled == [True] * 6
    assert seen.frozen == [frozen] * 6


@pytest.mark.usefixtures("collections")
def test_python_collects_again_after_an_error(tmp_path: Path, tiny_run: list[str]) -> None:
    frozen = gc.get_freeze_count()
    training = loop(tmp_path, tiny_run, 2, CollectGarbage(), Seen(fails_at=3))
    with pytest.raises(ZeroDivisionError):
        training.train()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_imports_for_good_are_not_looked_through(collections: list[str]) -> None:
    made = []
    with imported_for_good():
        collections.clear()
        made += [[[]] for _ in range(10_000)]
        assert not gc.isenabled()
    assert collections == []
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(made)
    gc.disable()
    with imported_for_good():
        pass
    assert not gc.isenabled(), "as it was"


@pytest.mark.usefixtures("collections")
def test_what_somebody_else_froze_or_disabled_stays_so(tmp_path: Path, tiny_run: list[str]) -> None:
    gc.disable()
    gc.freeze()
    try:
        loop(tmp_path, tiny_run, 2, CollectGarbage()).train()
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
