"""parallel.retune on machines that are not what the planner thinks: the run finds a faster strategy by itself."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.chaos.runs import environment_of, events, metrics, ranks_below
from tests.conftest import CommandLine

pytestmark = pytest.mark.alone

STEPS = 48
SETTINGS = [
    "model.preset=tiny",
    "data.sequence_length=64",
    "train.global_batch=12",
    f"train.steps={STEPS}",
    "train.eval_sequences=0",
    "train.precision=float64",
    "checkpoint.every=16",
    "observe.tensorboard=false",
    "observe.ledger=true",
    "parallel.strategy=dp=2",
]


def train(folder: Path, corpus: Path, *settings: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-m", "meshwright", "train", *SETTINGS, f"data.path={corpus}", *settings]
    environment = environment_of("", folder / "run") | {"XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.Popen(
        [*command, f"run.dir={folder / 'run'}", "--nproc", "2"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The same run that keeps its strategy."""
    folder = tmp_path_factory.mktemp("plain")
    training = train(folder, corpus)
    assert training.wait(300) == 0, training.communicate()[0]
    return folder / "run"


def seconds(run: Path, first: int, last: int) -> float:
    return statistics.median(line["step_s"] for line in metrics(run) if first < line["step"] <= last)


def ledger(run: Path) -> list[str]:
    return (run / "ledger.jsonl").read_text().splitlines()


def assert_paid(run: Path, plain: Path, output: str) -> dict[str, object]:
    """It changed at a checkpoint, became faster, lost no sample and computed the same."""
    changes = events(run, "retuned")
    assert changes, output
    first = changes[0]
    assert first["step"] == 16
    assert first["was"] == "dp=2"
    before, after = seconds(run, 4, 16), seconds(run, 20, 32)
    times = f"{before:.3f} -> {after:.3f} s, expected {first['expected_s']:.3f}"
    print(f"[retune] {first['why']}: {first['strategy']}, {times}")
    assert after < 0.9 * before
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    for mine, theirs in zip(metrics(run), metrics(plain), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
    return first


def test_a_slow_link_leads_to_a_strategy_that_sends_less(tmp_path: Path, corpus: Path, plain: Path) -> None:
    if os.geteuid() != 0 or shutil.which("tc") is None:
        pytest.skip("a slow link needs root, and tc of iproute2")
    space = f"mw-slow-{os.getpid()}"
    inside = ("ip", "netns", "exec", space)
    try:
        for words in (
            ("ip", "netns", "add", space),
            (*inside, "ip", "link", "set", "lo", "mtu", "9000"),
            (*inside, "ip", "link", "set", "lo", "up"),
            (*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf",
             "rate", "100mbit", "burst", "256k", "latency", "400ms"),
        ):  # fmt: skip
            subprocess.run(words, check=True, capture_output=True)
        training = train(tmp_path, corpus, "parallel.retune=true", before=inside)
        output, _ = training.communicate(timeout=300)
    finally:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
    assert training.returncode == 0, output
    change = assert_paid(tmp_path / "run", plain, output)
    assert "times as slow as planned" in str(change["why"])
    assert "pp=2" in str(change["strategy"])


@contextmanager
def slowed(launcher: int) -> Iterator[None]:
    """The second rank, whichever process it is, gets a third of the time: it is stopped for the rest."""
    over = threading.Event()

    def hold() -> None:
        rank: psutil.Process | None = None
        while not over.is_set():
            try:
                rank = rank or ranks_below(launcher).get(1)
                if rank is not None:
                    rank.send_signal(signal.SIGSTOP)
                    time.sleep(0.02)
                    rank.send_signal(signal.SIGCONT)
                time.sleep(0.01 if rank is not None else 0.1)
            except psutil.NoSuchProcess:
                rank = None
                time.sleep(0.1)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_slow_rank_gets_less_to_do(tmp_path: Path, corpus: Path, plain: Path) -> None:
    training = train(tmp_path, corpus, "parallel.retune=true")
    with slowed(training.pid):
        output, _ = training.communicate(timeout=300)
    assert training.returncode == 0, output
    change = assert_paid(tmp_path / "run", plain, output)
    assert "rank 1 is" in str(change["why"])
    assert "shares=" in str(change["strategy"]) or "layers=" in str(change["strategy"])


def test_ranks_of_a_launcher_are_not_started_anew(meshwright: CommandLine, tiny_run: list[str]) -> None:
    alone = meshwright("train", *tiny_run, "parallel.retune=true", "elastic.max_restarts=0", "run.dir=alone")
    assert alone.returncode == 0, alone.stderr
    assert "parallel.retune does nothing" in alone.stdout
