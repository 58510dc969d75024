"""Kills at random moments; `make chaos` plays two hundred of them."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.killer import assert_same_samples, run_with_kills, undisturbed_run
from tests.chaos.runs import assert_same_run


def test_five_random_kills_change_nothing(settings: list[str], tmp_path: Path) -> None:
    killed, whole = run_with_kills(tmp_path, settings, 5, seed=5), undisturbed_run(tmp_path, settings, 5)
    assert_same_run(killed, whole)
    assert_same_samples(killed, whole)
