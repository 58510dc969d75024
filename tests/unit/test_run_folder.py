"""The run folder keeps metrics free of steps that will be computed again, and files free of half writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.elastic.budget import Budget
from meshwright.elastic.journal import Journal
from meshwright.elastic.membership import Alone
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


def test_event_after_a_line_that_was_cut_short_begins_on_its_own(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.event("started", step=0)
    # Another process, after this one wrote its first event, was killed while it wrote.
    with folder.events.open("a") as file:
        file.write('{"time": 1.0, "event": "checkp')
    folder.event("resumed", step=5)
    folder.event("finished", step=9)
    assert [event["event"] for event in folder.read_events()] == ["started", "resumed", "finished"]
    assert len(folder.events.read_text().splitlines()) == 4
    journal = Journal(folder, Alone(1, Budget(1, 1)))
    assert journal._resumed() == 5


def test_events_end_with_the_last_whole_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_events() == []
    folder.events.write_bytes(b'{"event": "started", "step": 0}\n\xff\n7\n{"event": "resu')
    assert folder.read_events() == [{"event": "started", "step": 0}]
    assert Journal(folder, Alone(1, Budget(1, 1)))._resumed() == 0


def test_event_that_cannot_be_written_is_told_once(
    tmp_path: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(2**20))
    folder.events.symlink_to(small_disk / "events.jsonl")
    folder.event("started", step=0)
    folder.event("checkpoint", step=5)
    said = capsys.readouterr().err
    assert said.count("cannot be written: No space left on device") == 1
    assert "'started' is not recorded" in said
    filler.unlink()
    folder.event("finished", step=9)
    assert [json.loads(line)["event"] for line in folder.events.read_text().splitlines()] == ["finished"]
    assert capsys.readouterr().err == ""
