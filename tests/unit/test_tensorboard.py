"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.observe.curves import SERIES
from meshwright.observe.tensorboard import TAGS, EventWriter


def test_whatever_has_a_curve_here_has_a_tag_elsewhere() -> None:
    assert set(SERIES) <= TAGS.keys()
    assert len(set(TAGS.values())) == len(TAGS)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    for step in (1, 200, 70_000):
        writer.scalars(step, {"train/loss": 1.0 / step, "perf/tokens_per_second": 1e9 + step})
    writer.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert sorted(reader.Tags()["scalars"]) == ["perf/tokens_per_second", "train/loss"]
    events = reader.Scalars("train/loss")
    assert [event.step for event in events] == [1, 200, 70_000]
    assert events[1].value == 0.004999999888241291
