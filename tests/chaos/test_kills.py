"""Ranks that are killed: the run restarts from its newest checkpoint and becomes the run that it would have been."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.runs import STEPS, losses


def test_undisturbed(undisturbed: Path) -> None:
    assert len(losses(undisturbed)) == STEPS
