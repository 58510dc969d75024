"""The run folder keeps metrics free of steps that will be computed again, and files free of half writes."""

from __future__ import annotations

from pathlib import Path

from meshwright.training.run_folder import RunFolder


def test_metrics_after_the_checkpoint_are_dropped_with_a_cut_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    folder.forget_metrics_after(2)
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_metrics_that_are_whole_are_left_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.forget_metrics_after(0)
    folder.metrics.write_text('{"step": 1}\n')
    before = folder.metrics.stat()
    folder.forget_metrics_after(1)
    assert folder.metrics.stat().st_ino == before.st_ino


def test_line_without_its_end_is_not_glued_to_the_next(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.write_text('{"step": 1}\n{"step": 2}')
    folder.forget_metrics_after(2)
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n'
