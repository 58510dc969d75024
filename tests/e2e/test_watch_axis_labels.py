"""Labels of the pictures' axes in a real browser: none is cut off, also where the last one stands at the edge."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page

from meshwright.cli.main import main
from tests.e2e.pages import Open
from tests.run_folders import append, write_run

pytestmark = pytest.mark.slow


def room_beside(page: Page, card: str, label: str) -> float:
    """Pixels between the end of a label and the edge of its picture."""
    picture = page.locator(f"#{card} .picture > svg")
    picture.wait_for()
    edge, box = picture.bounding_box(), picture.get_by_text(label, exact=True).bounding_box()
    assert edge is not None
    assert box is not None
    return edge["x"] + edge["width"] - box["x"] - box["width"]


def test_the_last_label_of_a_schedule_is_whole(tmp_path: Path, opened: Open) -> None:
    folder = write_run(tmp_path / "run", "pp=2", world=2, steps=5)
    for rank in range(2):
        # The predicted schedule ends after 1.406 s: two forward and two backward passes, one after the other.
        passes = [[f"F stage {rank} micro-batch 0", "forward", 0.0, 0.3]]
        passes += [[f"B stage {rank} micro-batch 0", "backward", 0.4, 0.803]]
        append(folder / f"ranks/{rank:05d}.spans.jsonl", {"step": 5, "unix": 0.0, "spans": passes})
    assert main(["report", str(folder)]) == 0
    page, _ = opened((folder / "report.html").as_uri())
    assert room_beside(page, "pipeline", "1.4\u00a0s") >= -0.5


def test_the_last_step_of_a_long_run_is_whole(tmp_path: Path, opened: Open) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=5)
    for step in range(0, 200_001, 1000):
        append(folder / "metrics.jsonl", {"step": step, "loss": 2.0, "tokens_per_s": 100.0, "step_s": 0.5})
    assert main(["report", str(folder)]) == 0
    page, _ = opened((folder / "report.html").as_uri())
    assert room_beside(page, "loss", "200,000") >= -0.5
    assert room_beside(page, "throughput", "200,000") >= -0.5
