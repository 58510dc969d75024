"""What a view says of a run folder: of whole ones, of broken ones, and of what happens while it looks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.observe.snapshot import clean, difference, snapshot, to_text
from meshwright.observe.trace_file import write_trace
from meshwright.observe.view import RunView
from meshwright.strategy import Strategy
from meshwright.training.run_folder import RunFolder
from tests.run_folders import append, append_steps, write_run
from tests.unit.run_folders import write_lines


@pytest.fixture
def dead_pid() -> int:
    """A process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2 tp=2 pp=2", world=8, steps=60)
    view = RunView(folder).refresh()
    assert (view.name, view.state, view.step, view.steps, view.world) == ("run", "finished", 60, 60, 8)
    assert len(view.curves.points("loss")) == 60
    assert [step for step, _ in view.curves.points("eval_loss")] == [20, 40, 60]
    assert [rank.coordinates["pp"] for rank in view.ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {rank.state for rank in view.ranks} == {"ended"}
    rank = view.ranks[5]
    assert rank.record.profiled is not None
    assert sum(rank.record.mean_parts().values()) == pytest.approx(0.5, rel=0.1)
    assert rank.memory["rss"] > 0
    assert view.collectives is not None
    assert view.pipeline is not None
    assert view.pipeline.measured is not None
    assert view.pipeline.step == 50
    assert view.pipeline.micro_batches == 8
    assert 0 < view.pipeline.predicted_idle < 0.5
    assert view.comparison.step_time.error == pytest.approx(1 / 0.94 - 1, abs=0.05)
    assert [pair.name for pair in view.comparison.memory][:3] == ["parameters", "gradients", "optimizer"]


def test_steps_that_sent_all_are_not_compared_with_what_compressed_ones_should_take(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2 compress=topk:0.01", world=2, steps=0)
    run = RunView(folder)

    def record(first: int, last: int, step_s: float, share: float) -> None:
        for step in range(first, last):
            row = {"step": step, "time": 0.0, "step_s": step_s, "tokens_per_s": 8 / step_s, "sent_share": share}
            append(folder / "metrics.jsonl", row)

    record(1, 31, 2.0, 1.0)
    view = run.refresh()
    assert view.step_s == 2.0
    assert view.comparison.step_time.measured is None
    assert view.comparison.tokens.measured is None
    record(31, 36, 0.5, 0.04)
    view = run.refresh()
    # What a step takes now is that of the last ones, whatever they sent.
    assert view.step_s == 2.0
    assert view.comparison.step_time.measured == 0.5
    assert view.comparison.tokens.measured == 16.0
    # In vain, but compressed.
    record(36, 90, 4.0, 3.6)
    assert run.refresh().comparison.step_time.measured == 4.0


def test_where_no_event_tells_the_strategy_ranks_do_and_else_nobody(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2 pp=2", world=4, steps=5)
    for name in ("events.jsonl", "plan.json", "config.toml"):
        (folder / name).write_bytes(b"\xff damaged")
    view = RunView(folder).refresh()
    assert (view.strategy_text, str(view.strategy)) == (str(Strategy.parse("dp=2 pp=2", 4)),) * 2
    assert view.comparison.unknown == "there is no plan.json that can be read"
    for rank in range(4):
        append(folder / f"ranks/{rank:05d}.jsonl", {"kind": "rank", "rank": rank, "world": 4})
    assert RunView(folder).refresh().strategy is None


def test_without_files_of_ranks_the_mesh_follows_from_the_strategy(tmp_path: Path) -> None:
    told = write_run(tmp_path / "told", "dp=4 tp=2 pp=2 zero=2", world=16, steps=3)
    silent = write_run(tmp_path / "silent", "dp=4 tp=2 pp=2 zero=2", world=16, steps=3, ranks=False)
    places = [[rank.coordinates for rank in RunView(folder).refresh().ranks] for folder in (told, silent)]
    assert places[0] == places[1]


def test_a_running_run_grows_under_the_reader(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=10, planned_steps=100, end=None)
    run = RunView(folder)
    view = run.refresh()
    assert (view.state, view.step) == ("running", 10)
    assert {rank.state for rank in view.ranks} == {"alive"}
    append_steps(folder, Strategy.parse("dp=2", 2), 11, 30, began=time.time())
    view = run.refresh()
    assert view.step == 30
    assert len(view.curves.points("loss")) == 30
    assert view.ranks[1].record.last is not None
    assert view.ranks[1].record.last["step"] == 30


def test_steps_that_are_undone_are_forgotten(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=30, end=None)
    run = RunView(folder)
    run.refresh()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "new").write_text("".join(lines[:20]))
    os.replace(folder / "new", folder / "metrics.jsonl")
    append_steps(folder, Strategy.parse("dp=2", 2), 21, 22, began=time.time(), ranks=True)
    view = run.refresh()
    assert [step for step, _ in view.curves.points("loss")] == list(range(1, 23))
    assert [line["step"] for line in view.ranks[0].record.steps] == list(range(1, 23))


def test_a_failed_rank_is_lost_until_the_run_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=4", world=4, steps=10, end=None)
    run = RunView(folder)
    failed = {"event": "failed", "rank": 2, "host": "h", "cause": "SIGKILL", "step": 11, "generation": 0}
    append(folder / "events.jsonl", {"time": time.time(), **failed})
    view = run.refresh()
    assert view.state == "restarting"
    assert [rank.state for rank in view.ranks] == ["waiting", "waiting", "lost", "waiting"]
    append(
        folder / "events.jsonl", {"time": time.time(), "event": "resumed", "step": 5, "strategy": "dp=4", "ranks": 4}
    )
    view = run.refresh()
    assert view.state == "running"
    assert {rank.state for rank in view.ranks} == {"alive"}
    assert [len(rank.failures) for rank in view.ranks] == [0, 0, 1, 0]
    # Nothing follows, though the launcher is there still, or on another machine.
    append(folder / "events.jsonl", {"time": time.time(), **failed})
    append(folder / "events.jsonl", {"time": time.time(), "event": "gave_up", "text": "rank 2 failed"})
    view = run.refresh()
    assert (view.state, view.reason) == ("failed", "SIGKILL")
    assert [rank.state for rank in view.ranks] == ["ended", "ended", "lost", "ended"]


def test_a_run_whose_processes_are_gone_has_failed(tmp_path: Path, dead_pid: int) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=10, end=None, pid=dead_pid)
    view = RunView(folder).refresh()
    assert view.state == "failed"
    assert "without a word" in view.reason
    assert [rank.state for rank in view.ranks] == ["lost", "lost"], "nobody is left who could tell of the first"


def test_without_events_the_steps_and_the_lock_say_how_a_run_stands(tmp_path: Path, dead_pid: int) -> None:
    for name, pid, state in (("alive", os.getpid(), "running"), ("gone", dead_pid, "silent")):
        folder = write_run(tmp_path / name, "dp=2", world=2, steps=10, end=None, pid=pid)
        (folder / "events.jsonl").unlink()
        view = RunView(folder).refresh()
        assert (view.state, view.step) == (state, 10)
        (folder / "metrics.jsonl").unlink()
        assert RunView(folder).refresh().state == "waiting"


def test_a_rank_whose_process_is_gone_is_lost_before_anyone_says_so(tmp_path: Path, dead_pid: int) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=10, end=None)
    line = json.loads((folder / "ranks/00001.jsonl").read_text().splitlines()[0])
    append(folder / "ranks/00001.jsonl", {**line, "pid": dead_pid})
    assert [rank.state for rank in RunView(folder).refresh().ranks] == ["alive", "lost"]


def test_of_several_that_are_gone_nobody_knows_who_was_first_until_it_is_told(tmp_path: Path, dead_pid: int) -> None:
    folder = write_run(tmp_path / "run", "dp=4", world=4, steps=10, end=None)
    for rank in (0, 2):
        line = json.loads((folder / f"ranks/{rank:05d}.jsonl").read_text().splitlines()[0])
        append(folder / f"ranks/{rank:05d}.jsonl", {**line, "pid": dead_pid})
    view = RunView(folder)
    assert [rank.state for rank in view.refresh().ranks] == ["unknown", "alive", "unknown", "alive"]
    append(folder / "events.jsonl", {"time": time.time(), "event": "failed", "rank": 2, "cause": "SIGKILL", "step": 11})
    assert [rank.state for rank in view.refresh().ranks] == ["waiting", "waiting", "lost", "waiting"]


def test_another_process_with_the_same_number_is_not_the_runs(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        began = time.time() - 3600
        folder = write_run(tmp_path / "run", "dp=2", world=2, steps=10, end=None, pid=process.pid, began=began)
        os.utime(folder / ".lock", (began, began))
        view = RunView(folder).refresh()
        assert view.state == "failed"
    finally:
        process.communicate(b"\n")


def test_a_failure_that_nothing_follows_on_another_machine_turns_silent(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=10, end=None)
    fence = json.loads((folder / ".lock").read_text())
    (folder / ".lock").write_text(json.dumps(fence | {"host": "elsewhere"}))
    append(folder / "events.jsonl", {"time": time.time(), "event": "failed", "rank": 1, "cause": "x", "step": 11})
    assert RunView(folder).refresh().state == "restarting"
    assert RunView(folder, clock=lambda: time.time() + 200).refresh().state == "silent"


def test_every_phase_in_which_a_rank_is_slow_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=10, end=None)
    slow = {"time": time.time(), "event": "straggler", "rank": 1, "step": 10}
    append(folder / "events.jsonl", slow | {"phase": "forward", "relative": 2.0})
    append(folder / "events.jsonl", slow | {"phase": "data", "relative": 28.0})
    run = RunView(folder)
    straggler = run.refresh().ranks[1].straggler
    assert straggler is not None
    assert (straggler["phase"], straggler["relative"]) == ("data and forward", 28.0)
    append(folder / "events.jsonl", slow | {"event": "straggler_cleared", "phase": "data"})
    straggler = run.refresh().ranks[1].straggler
    assert straggler is not None
    assert straggler["phase"] == "forward"


def test_fewer_ranks_after_a_restart_leave_no_ghosts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=4", world=4, steps=10, end=None)
    append(
        folder / "events.jsonl", {"time": time.time(), "event": "resumed", "step": 8, "strategy": "dp=2", "ranks": 2}
    )
    view = RunView(folder).refresh()
    assert (view.world, len(view.ranks), str(view.strategy)) == (2, 2, "dp=2")


def test_time_between_failure_and_restart_is_lost_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=10, end=None, began=1000.0)
    append(
        folder / "events.jsonl",
        {"time": 1020.0, "event": "failed", "rank": 1, "cause": "x"},
        {"time": 1027.0, "event": "resumed", "step": 8, "strategy": "dp=2", "ranks": 2},
        {"time": 1028.0, "event": "restarted", "restart_s": 7.5, "steps_lost": 2},
        {"time": 1040.0, "event": "finished", "step": 10},
    )
    append(
        folder / "metrics.jsonl",
        {"step": 9, "time": 1029.0, "step_s": 1.0, "loss": 1.0},
        {"step": 10, "time": 1030.0, "step_s": 1.0, "loss": 1.0},
    )
    found = RunView(folder).refresh().goodput
    assert found.restarts == 1
    assert sum(found.parts.values()) == pytest.approx(found.wall_s)
    assert (found.wall_s, found.lost_steps) == (40.0, 2)
    assert found.parts["replayed"] == pytest.approx(1.0, rel=0.2)
    # From the last step of the first start to the beginning of the first one of the second, but for what was in vain.
    assert found.parts["restart"] + found.parts["replayed"] == pytest.approx(22, abs=0.1)
    assert found.parts["ending"] == pytest.approx(10)


@pytest.mark.parametrize("missing", ["metrics.jsonl", "events.jsonl", "plan.json", "config.toml", "ranks", ".lock"])
def test_any_file_may_be_missing(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path / "run", "dp=2 pp=2", world=4, steps=30)
    path = folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    to_text(snapshot([RunView(folder).refresh()]))


def test_an_empty_folder_waits(tmp_path: Path) -> None:
    view = RunView(tmp_path).refresh()
    assert (view.state, view.step, view.ranks) == ("waiting", 0, [])
    to_text(snapshot([view]))


RUBBISH = [
    b'{"launch": "l", "generation": 0, "host": "HOST", "pid": 100000000000000000000000}',
    b'{"kind": "rank", "pid": 100000000000000000000000, "host": "HOST", "time": 1e308, "coordinates": "pp"}\n',
    b'{"step": 1, "unix": 1e400, "spans": [["f", "pass", 0, 1]]}\n',
    b'{"step": 1, "unix": 1, "spans": [["f", "pass", 1e999, 2]]}\n',
    b"",
    b"\x00\xff",
    b"[]",
    b'{"event": 3}\n{"event": null}\n{"step": {}}\n{"kind": "step", "step": "x"}\n{',
    b'{"expected": [], "measured": 3, "question": "x", "strategy": 7, "micro_batch": "x"}',
    b'{"kind": "rank", "pid": "x", "coordinates": 3, "world": -1}\n{"kind": "step", "step": 1, "parts": []}\n',
    b'{"event": "started", "ranks": "four", "strategy": 4, "time": "x"}\n{"event": "failed", "rank": "a"}\n',
]


@pytest.mark.parametrize("rubbish", RUBBISH)
@pytest.mark.parametrize(
    "name",
    [
        "metrics.jsonl",
        "events.jsonl",
        "plan.json",
        "config.toml",
        ".lock",
        "ranks/00001.jsonl",
        "ranks/00000.spans.jsonl",
    ],
)
def test_rubbish_in_a_file_is_no_error(tmp_path: Path, name: str, rubbish: bytes) -> None:
    folder = write_run(tmp_path / "run", "dp=2 pp=2", world=4, steps=30)
    (folder / name).write_bytes(rubbish.replace(b"HOST", socket.gethostname().encode()))
    to_text(snapshot([RunView(folder).refresh()]))
    with suppress(UserError):
        write_trace(folder, tmp_path / "trace.json")


def test_the_account_of_a_copied_run_is_that_of_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.hold(fresh=False):
        began = time.time()
    write_lines(tmp_path / "run/metrics.jsonl", [{"step": 1, "time": began + 3, "step_s": 1.0, "loss": 2.0}])
    ends = [{"time": began + 2, "event": "started", "step": 0}, {"time": began + 3, "event": "finished", "step": 1}]
    write_lines(tmp_path / "run/events.jsonl", ends)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    os.utime(tmp_path / "copy/run.json", (began + 1000, began + 1000))
    accounts = [RunView(tmp_path / name).refresh().goodput for name in ("run", "copy")]
    assert accounts[0].wall_s == pytest.approx(3, abs=0.1)
    assert accounts[0] == accounts[1]
    # Earlier runs do not say when they began, but for the time of the file.
    (tmp_path / "run/run.json").write_text('{"run": "0"}')
    os.utime(tmp_path / "run/run.json", (began - 2, began - 2))
    assert RunView(tmp_path / "run").refresh().goodput.wall_s == pytest.approx(5, abs=0.1)


def test_a_timeline_has_both_ends_of_its_steps_and_as_many_spans_as_it_says(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2 pp=2", world=4, steps=80)
    told = write_trace(folder, tmp_path / "trace.json", "25:50")
    spans = [one for one in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if one["ph"] == "X"]
    assert {span["args"]["step"] for span in spans} == {25, 50}
    assert "idle" in {span["cat"] for span in spans}
    assert f": {len(spans)} spans of 4 ranks, steps 25, 50;" in told
    write_trace(folder, tmp_path / "trace.json", "50")
    assert '"step": 50' in (tmp_path / "trace.json").read_text()


def test_what_goes_to_a_browser_is_plain_json_of_bearable_length(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=5)
    append(
        folder / "events.jsonl", {"event": "spike", "time": float("nan"), "step": float("inf"), "text": "x" * 100_000}
    )
    text = to_text(snapshot([RunView(folder).refresh()]))
    event = json.loads(text, parse_constant=pytest.fail)["runs"][0]["events"][-1]
    assert (event["time"], event["step"]) == (None, None)
    assert len(event["words"]) < 5000


def test_changes_lead_from_one_snapshot_to_the_next(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=40, planned_steps=4000, end=None)
    run = RunView(folder, clock=lambda: 0.0)
    old = clean(snapshot([run.refresh()]))
    assert difference(old, clean(snapshot([run.refresh()]))) is None
    append_steps(folder, Strategy.parse("dp=2", 2), 41, 2600, began=time.time())
    new = clean(snapshot([run.refresh()]))
    changes = difference(old, new)
    assert changes is not None
    shown = json.loads(json.dumps(old))["runs"][0]
    change = changes["runs"][0]
    shown.update(change["changed"])
    for name, (keep, steps, values) in change["grown"].items():
        had = shown["curves"].get(name, [[], []])
        shown["curves"][name] = [had[0][:keep] + steps, had[1][:keep] + values]
    assert shown == new["runs"][0]
    assert all(len(steps) <= 2000 for steps, _ in shown["curves"].values())


def test_one_more_step_is_a_small_message(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=1500, planned_steps=4000, end=None)
    run = RunView(folder, clock=lambda: 0.0)
    old = clean(snapshot([run.refresh()]))
    append_steps(folder, Strategy.parse("dp=2", 2), 1501, 1501, began=time.time())
    message = to_text(difference(old, clean(snapshot([run.refresh()]))))
    assert len(message) < 5000 < len(to_text(old)) / 10


@pytest.mark.alone
def test_a_long_run_is_read_quickly_and_again_at_no_price(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", "dp=2", world=2, steps=10, end=None)
    lines = "".join(
        f'{{"step": {step}, "loss": 2.5, "step_s": 0.5, "tokens_per_s": 100.0}}\n' for step in range(100_000)
    )
    (folder / "metrics.jsonl").write_text(lines)
    run = RunView(folder)
    run.refresh()
    began = time.perf_counter()
    run.refresh()
    assert time.perf_counter() - began < 1.0
