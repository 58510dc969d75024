"""A run on a terminal: the picture fits, shows what needs a look, and whatever files hold, nothing breaks it."""

from __future__ import annotations

import io
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from meshwright.observe.event_words import details, sentence
from meshwright.observe.picture import draw
from meshwright.observe.rank_bar import BLOCKS, LETTERS, bar, cells, scale, sparkline
from meshwright.observe.terminal import Watched, status
from tests.run_folders import append
from tests.unit.run_folders import make_run, write_lines


def picture(folder: Path, width: int = 80, height: int | None = None) -> list[str]:
    """The lines of a picture."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(draw(Watched(folder).look(), width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (60, 20), (120, 30)])
@pytest.mark.parametrize("world", [2, 64])
def test_picture_fits_the_terminal(width: int, height: int, world: int, tmp_path: Path) -> None:
    lines = picture(make_run(tmp_path / "run", world=world, slow={1: "forward"}), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "step 100/400" in lines[1]
    assert "goodput" in text
    assert "75%" in next(line for line in lines if line.startswith("computing"))
    assert "forward x3.1" in text


def test_the_title_of_a_run_with_wide_letters_stays_one_line(tmp_path: Path) -> None:
    title, progress = picture(make_run(tmp_path / "训练运行"))[:2]
    assert "训练运行" in title
    assert title.endswith("running")
    assert cell_len(title) == 80
    assert progress.startswith("step 100/400")


def test_steps_without_an_update_are_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert not any(line.startswith("skipped") for line in picture(folder))
    for step in (101, 102, 103):
        append(folder / "metrics.jsonl", {"step": step, "skipped": int(step < 103), "loss_scale": 1024.0})
    assert "skipped           2  steps without an update, the last 102" in picture(folder)


def test_hidden_communication_and_idle_time_are_shown_where_a_profile_tells_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", world=2)
    line = {"kind": "step", "step": 101, "seconds": 1.0, "parts": {"forward": 1.0}, "profiled": True, "bubble": 0.1}
    line |= {"compute": 0.4, "idle": 0.3, "communication": {"exposed": 0.2, "overlapped": 0.05}}
    for rank in range(2):
        append(folder / f"ranks/{rank:05d}.jsonl", line)
    (computing,) = [line for line in picture(folder) if line.startswith("computing")]
    assert computing.endswith("goal 80%, else exposed; hidden 5%, idle 30%")


def test_parts_beyond_all_numbers_end_no_picture(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", world=2)
    parts = {"forward": 1e308, "backward": 1e308}
    write_lines(folder / "ranks/00000.jsonl", [{"kind": "step", "step": 1, "seconds": 1.0, "parts": parts}])
    assert any(line.startswith("0 ") for line in picture(folder))


def test_of_many_ranks_those_are_shown_that_need_a_look(tmp_path: Path) -> None:
    lines = picture(make_run(tmp_path / "run", world=512, slow={300: "data", 17: "backward"}), 80, 24)
    head = next(place for place, line in enumerate(lines) if line.startswith("rank "))
    assert {line.split()[0] for line in lines[head + 1 : head + 3]} == {"17", "300"}
    assert "of 512 ranks" in lines[head - 1]


def test_bars_have_exposed_communication_apart_where_a_profile_tells_it(tmp_path: Path) -> None:
    line = next(line for line in picture(make_run(tmp_path / "a"), 160) if line.startswith("0 "))
    assert "cccc" in line
    assert "ppp" in line
    line = next(line for line in picture(make_run(tmp_path / "b", profiled=False), 160) if line.startswith("0 "))
    assert "c" not in line.split("alive")[-1].split()[0]


def test_nothing_of_a_file_is_obeyed_by_the_terminal(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", events=[{"time": 1, "event": "war\x1b[2Jning", "text": "\x1b]0;title\x07\r\n"}])
    (folder / "config.toml").write_text('[model]\npreset = "\\u001b[31mred"\n')
    text = "\n".join(picture(folder, 120)) + status(Watched(folder).look())
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "red" in text


def test_run_that_has_only_begun_is_shown(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert any("waiting" in line for line in picture(tmp_path))
    assert any("no rank" in line for line in picture(tmp_path))


def test_damaged_files_are_shown_as_far_as_they_can_be_read(tmp_path: Path) -> None:
    draws = random.Random(0)
    for number in range(40):
        folder = make_run(tmp_path / str(number), world=2, steps=12)
        paths = [path for path in folder.rglob("*") if path.is_file()]
        for _ in range(3):
            _damage(draws.choice(paths), draws)
        assert picture(folder, 80, 24)
        assert status(Watched(folder).look()).startswith("step ")


def _damage(path: Path, draws: random.Random) -> None:
    data = path.read_bytes()
    kind = draws.randrange(4)
    if kind == 0:
        path.write_bytes(data[: draws.randrange(len(data) + 1)])
    elif kind == 1:
        path.write_bytes(b"")
    elif kind == 2:
        lines = data.splitlines(keepends=True)
        for place, line in enumerate(lines):
            if draws.random() < 0.4:
                lines[place] = _other_values(line, draws)
        path.write_bytes(b"".join(lines))
    else:
        place = draws.randrange(len(data) + 1)
        path.write_bytes(data[:place] + draws.randbytes(20) + data[place:])


def _other_values(line: bytes, draws: random.Random) -> bytes:
    """The line with values of other kinds than one expects."""
    try:
        found: Any = json.loads(line)
    except ValueError:
        return line
    wrong = [None, "x", -1, [], {}, [1], {"a": "b"}, 1e308, True, 10**400, {"forward": "x"}, float("nan")]
    if isinstance(found, dict):
        for name in found:
            if draws.random() < 0.4:
                found[name] = draws.choice(wrong)
    return json.dumps(found).encode() + b"\n"


@pytest.mark.alone
def test_a_long_run_is_looked_at_in_little_time(tmp_path: Path) -> None:
    watched = Watched(make_run(tmp_path / "run", world=2, steps=50_000))
    watched.look()
    began = time.monotonic()
    for _ in range(5):
        draw(watched.look(), 80, 24)
    assert (time.monotonic() - began) / 5 < 0.5


@given(st.dictionaries(st.sampled_from([*LETTERS, "other"]), st.floats(0, 100), max_size=8), st.integers(1, 60))
def test_bar_is_full_and_true_to_its_shares(parts: dict[str, float], width: int) -> None:
    found, whole = cells(parts, width), sum(parts.values())
    assert sum(found.values()) == (width if whole > 0 else 0)
    assert len(bar(parts, width).plain) == sum(found.values())
    for name, count in found.items():
        if name != "unattributed":
            assert abs(count - parts.get(name, 0.0) / whole * width) <= 1 + 1e-6


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(0, 80))
def test_sparkline_shows_lowest_and_highest_and_fits(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(BLOCKS)
    if values and width >= len(values) and max(values) - min(values) > 1e-3:
        assert line[values.index(max(values))] == BLOCKS[-1]
        assert line[values.index(min(values))] == BLOCKS[0]


def test_scale_has_its_mark() -> None:
    assert scale(0.5, 10, 0.8) == "█████░░░┃░"
    assert scale(7.0, 10, 0.8) == "████████┃█"


def test_events_are_sentences() -> None:
    assert sentence(
        {"event": "failed", "rank": 1, "host": "a", "cause": "ended by SIGKILL", "step": 7, "phase": "data"}
    ) == ("failed at step 7: rank 1 on a: ended by SIGKILL, in data")
    assert sentence({"event": "straggler", "rank": 3, "phase": "forward", "step": 9, "relative": None, "own": 3.0}) == (
        "straggler at step 9: rank 3 in forward: 3.0 times its own best"
    )
    assert (
        sentence({"event": "checkpoint_failed", "step": 3, "error": "disk full"})
        == "checkpoint failed at step 3: disk full"
    )
    saved = {"event": "checkpoint", "step": 4, "path": "step-4", "bytes": 3 << 20, "seconds": 0.25, "stalled_s": 0.0125}
    assert sentence(saved) == "checkpoint at step 4: step-4, 3 MiB in 0.25 s; training waited 0.0125 s"
    assert sentence({"event": "unsent_dropped", "error": "a\x1b[31mb"}) == "unsent dropped: a [31mb"
    assert details({"event": "hang", "text": "rank 0\nrank 1"}) == "rank 0\nrank 1"
    assert sentence({"event": "retuned", "time": 3.0, "step": 1, "micro_batch": 2, "gone": None}) == (
        "retuned at step 1: micro batch 2"
    )
