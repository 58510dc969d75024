"""`meshwright train` as people use it: runs, resumes, stops, refuses. Real processes, real files."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from meshwright.checkpoint.reader import load_whole
from meshwright.errors import ExitCode
from tests.conftest import CommandLine, write_text
from tests.e2e.trainings import events, metrics, start, wait_for_step

pytestmark = pytest.mark.slow


def test_a_run_leaves_everything_that_its_folder_promises(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    result = meshwright("train", *tiny_run, "--nproc", 2, "run.dir=runs/a", "observe.sample=the ", "checkpoint.every=2")
    assert result.returncode == 0, result.stderr
    run = tmp_path / "runs/a"
    found = metrics(run)
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    assert all({"step", "loss", "grad_norm", "lr", "tokens_per_s"} <= line.keys() for line in found)
    assert found[-1]["loss"] < found[0]["loss"] - 1
    assert "eval_loss" in found[-1]
    assert [event["event"] for event in events(run)] == [
        "started",
        "checkpoint",
        "checkpoint",
        "checkpoint",
        "finished",
    ]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
    manifest = json.loads((run / "checkpoints/step-000006/manifest.json").read_text())
    plan = json.loads((run / "plan.json").read_text())
    assert (manifest["step"], manifest["position"], manifest["strategy"]) == (6, 48, plan["strategy"])
    assert plan["answer"]["best"]["strategy"] == plan["strategy"]
    assert f"plan   auto: {plan['strategy']}" in result.stdout
    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert "2 processes over gloo" in result.stdout
    assert "step 6/6" in result.stdout
    assert "what it has learned to write" in result.stdout
    assert not [path for path in run.rglob(".*") if path.name != ".lock"]


def test_resolved_configuration_reproduces_the_run_bit_for_bit(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    options = [*tiny_run, "train.deterministic=true"]
    assert meshwright("train", *options, "run.dir=a", "parallel.strategy=dp=2").returncode == 0
    again = meshwright("train", tmp_path / "a/config.toml", "run.dir=b")
    assert again.returncode == 0, again.stderr
    assert "2 processes" in again.stdout
    assert [line["loss"] for line in metrics(tmp_path / "a")] == [line["loss"] for line in metrics(tmp_path / "b")]
    first, second = (load_whole(tmp_path / run / "checkpoints/step-000006") for run in "ab")
    assert all(first[name].equal(second[name]) for name in first)


def test_finished_run_goes_on_when_given_more_steps(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    assert meshwright("train", *tiny_run, "run.dir=a").returncode == 0
    done = meshwright("train", *tiny_run, "run.dir=a")
    assert done.returncode == 0
    assert "already" in done.stdout
    more = meshwright("train", *tiny_run, "run.dir=a", "train.steps=8")
    assert "from step 6 to step 8" in more.stdout
    assert [line["step"] for line in metrics(tmp_path / "a")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_fresh_sets_the_old_run_aside(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    assert meshwright("train", *tiny_run, "run.dir=a").returncode == 0
    assert meshwright("train", *tiny_run, "run.dir=a", "train.lr=0.001", "--fresh").returncode == 0
    assert len(metrics(tmp_path / "a")) == len(metrics(tmp_path / "a.previous-1")) == 6
    assert "fresh = false" in (tmp_path / "a/config.toml").read_text()
    # The new run is a run like any other: it goes on without --fresh.
    assert meshwright("train", *tiny_run, "run.dir=a", "train.lr=0.001", "train.steps=7").returncode == 0
    # What was set aside before stays, and so does what only has such a name.
    (tmp_path / "a.previous-2").write_text("mine")
    assert meshwright("train", *tiny_run, "run.dir=a", "--fresh").returncode == 0
    assert (tmp_path / "a.previous-2").read_text() == "mine"
    assert len(metrics(tmp_path / "a.previous-3")) == 7
    assert len(metrics(tmp_path / "a.previous-1")) == 6


def test_nothing_listens_beyond_loopback(tiny_run: list[str], tmp_path: Path) -> None:
    process = start(tmp_path, *tiny_run, "--nproc", "2", "run.dir=a", "train.steps=100000")
    wait_for_step(tmp_path / "a", 1, process)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    listening = [c.laddr.ip for p in family for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert listening, "gloo's own listeners should be seen"
    assert set(listening) <= {"127.0.0.1", "::1"}


def test_torchrun_starts_the_same_run(tiny_run: list[str], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "meshwright", "train", *tiny_run, "run.dir=a"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert "2 processes over gloo" in result.stdout
    assert len(metrics(tmp_path / "a")) == 6


SCRIPT = """
import sys
import torch
import meshwright as mw

if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.randn(500, 500) @ torch.randn(500, 500)  # Starts threads, which a forked rank would wait for in vain.
    mw.train(mw.load_config(None, sys.argv[1:]), nproc=2)
    mw.train(mw.load_config(None, [*sys.argv[1:], "train.steps=7"]), nproc=2)
    print("loss", mw.load_model("a")(torch.arange(5)[None]).shape)
"""


def test_python_script_trains_on_ranks_after_work_of_its_own(tiny_run: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "script.py", *tiny_run, "run.dir=a"]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "loss torch.Size([1, 5, 272])" in result.stdout
    assert len(metrics(tmp_path / "a")) == 7


def test_reader_that_goes_away_does_not_end_the_training(tiny_run: list[str], tmp_path: Path) -> None:
    process = start(tmp_path, *tiny_run, "run.dir=a", "train.steps=200", "observe.log_every=1")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.wait(60)
    assert len(metrics(tmp_path / "a")) == 200, errors
    assert (tmp_path / "a/checkpoints/step-000200/manifest.json").exists()


def test_folder_names_are_shown_as_they_are(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    result = meshwright("train", *tiny_run, "run.dir=runs/[red]my run[/blue]")
    assert result.returncode == 0, result.stderr
    assert "meshwright generate 'runs/[red]my run[/blue]' \"your prompt\"" in result.stdout


def test_terminal_shows_a_bar_and_what_to_do_next(tiny_run: list[str], tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "meshwright", "train", *tiny_run, "run.dir=a", "train.steps=30"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"}
    process = subprocess.Popen(command, cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    while select.select([controller], [], [], 60)[0]:
        try:
            piece = os.read(controller, 65536)
        except OSError:  # The other side has closed.
            break
        shown += piece
    os.close(controller)
    assert process.wait(10) == 0
    screen = shown.decode()
    for expected in ("step", "30/30", "━", "loss", "grad norm", "tokens/s", "ETA", "meshwright generate a"):
        assert expected in screen


def test_early_stop_ends_a_run_that_no_longer_improves(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    options = [*tiny_run, "train.lr=1e-12", "train.eval_every=1", "train.early_stop=2", "train.steps=50", "run.dir=a"]
    result = meshwright("train", *options)
    assert result.returncode == 0, result.stderr
    assert len(metrics(tmp_path / "a")) < 50
    assert "no better evaluation loss" in result.stdout


def test_resumed_run_on_other_data_is_refused(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    for text, overwrite in (("one", []), ("two", ["--overwrite"])):
        write_text(tmp_path / f"{text}.txt", 5_000, seed=len(overwrite))
        made = meshwright("data", "prepare", f"{text}.txt", "--out", "packed", "--tokenizer", "bytes", *overwrite)
        assert made.returncode == 0, made.stderr
        result = meshwright("train", *tiny_run, "data.path=packed", "run.dir=a", f"train.steps={6 + len(overwrite)}")
    assert result.returncode == 2
    assert "was trained on other data" in result.stderr


def test_save_that_fails_at_the_end_is_not_called_finished(
    meshwright: CommandLine, tiny_run: list[str], small_disk: Path
) -> None:
    result = meshwright("train", *tiny_run, f"run.dir={small_disk}/a", "model.preset=demo")
    assert result.returncode == 2
    assert "missing" in result.stderr
    assert "finished" not in result.stdout
    assert [event["event"] for event in events(small_disk / "a")] == [
        "started",
        "checkpoint_failed",
        "failed",
        "gave_up",
    ]


def test_disk_that_fills_during_training_is_told_without_a_traceback(
    meshwright: CommandLine, tiny_run: list[str], small_disk: Path
) -> None:
    (small_disk / "filler").write_bytes(b"x" * (1_000_000 - 60_000))
    options = [*tiny_run, f"run.dir={small_disk}/a", "train.steps=3000", "--nproc", 2, "observe.tensorboard=false"]
    result = meshwright("train", *options)
    assert result.returncode == 2, result.stderr
    assert "cannot be recorded" in result.stderr
    assert "Traceback" not in result.stderr


def test_bf16_learns_too(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    assert meshwright("train", *tiny_run, "train.precision=bf16", "run.dir=a").returncode == 0
    found = metrics(tmp_path / "a")
    assert found[-1]["loss"] < found[0]["loss"] - 1
    weights = load_whole(tmp_path / "a/checkpoints/step-000006", "model.")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.float32"}


def test_tf32_on_a_cpu_says_that_it_is_float32(meshwright: CommandLine, tiny_run: list[str]) -> None:
    run = meshwright("train", *tiny_run, "train.precision=tf32", "train.steps=1", "checkpoint.every=0")
    assert run.returncode == 0, run.stderr
    assert "tf32; on a CPU that is plain float32" in run.stdout


def test_divergence_stops_the_run_and_says_so(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    result = meshwright("train", *tiny_run, "train.lr=1e38", "train.grad_clip=0", "run.dir=a", "--nproc", 2)
    assert result.returncode == ExitCode.DIVERGED
    assert "training has diverged, and there is no checkpoint from before step 2 to go back to" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "a").glob("checkpoints/step-*"))


def test_weights_and_biases_gets_the_metrics(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    result = meshwright("train", *tiny_run, "observe.wandb=true", "run.dir=a", WANDB_MODE="offline", HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    (file,) = (tmp_path / "a/wandb").glob("offline-run-*/*.wandb")
    # Names of metrics are stored as they are.
    assert b"train/loss" in file.read_bytes()
    assert "Weights & Biases" not in result.stderr


def test_generate_continues_a_prompt_from_the_run(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    assert meshwright("train", *tiny_run, "run.dir=a", "train.steps=60").returncode == 0
    for place in ("a", "a/checkpoints/step-000060"):
        result = meshwright("generate", place, "the mesh ", "--tokens", 40, "--temperature", 0)
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("the mesh ")
        assert len(result.stdout) == len("the mesh ") + 40 + 1
    assert meshwright("generate", "nowhere", "x").returncode == 2


def test_mixed_corpora_train(meshwright: CommandLine, tiny_run: list[str], corpus: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "other.txt", 5_000, seed=9)
    assert meshwright("data", "prepare", "other.txt", "--out", "other", "--tokenizer", "bytes").returncode == 0
    mix = f'data.mix=[{{path="{corpus}",weight=3}},{{path="other",weight=1}}]'
    options = [option for option in tiny_run if not option.startswith("data.path")]
    result = meshwright("train", *options, mix, "run.dir=a")
    assert result.returncode == 0, result.stderr
    assert " + other: 5" in result.stdout


def test_data_sources_are_prepared_on_the_way(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    write_text(tmp_path / "texts/a.txt", 5_000)
    options = [*tiny_run, "data.path=packed", "data.sources=['texts']", "data.tokenizer=bytes"]
    assert meshwright("train", *options, "run.dir=a").returncode == 0
    assert (tmp_path / "packed/index.json").exists()


def test_explain_prints_value_origin_and_meaning(meshwright: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nlr = 0.125\n")
    result = meshwright("train", "run.toml", "run.seed=7", "--preset", "demo", "--explain", COLUMNS="200")
    assert result.returncode == 0
    (row,) = [line for line in result.stdout.splitlines() if "train.lr " in line]
    assert "0.125" in row
    assert "run.toml, line 2" in row
    assert "Highest learning rate" in row
    (row,) = [line for line in result.stdout.splitlines() if "run.seed" in line]
    assert "command line" in row
    assert not (tmp_path / "runs").exists()


def test_a_run_in_8_bits_says_what_stays_in_bf16_and_goes_on_where_it_was(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    narrow = [*tiny_run, "train.precision=fp8", "precision.fp8_smallest=16", "run.dir=a"]
    first = meshwright("train", *narrow, "--nproc", 2, "parallel.strategy=dp=2 zero=3", "train.steps=3")
    assert first.returncode == 0, first.stderr
    assert "\nbf16   lm_head, " in first.stdout
    (started, *_) = events(tmp_path / "a")
    assert started["bf16_linears"].keys() >= {"lm_head"}
    again = meshwright("train", *narrow, "train.steps=6")
    assert again.returncode == 0, again.stderr
    losses = [line["loss"] for line in metrics(tmp_path / "a")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_a_run_that_would_compute_nothing_in_8_bits_is_refused(meshwright: CommandLine, tiny_run: list[str]) -> None:
    result = meshwright("train", *tiny_run, "train.precision=fp8", "run.dir=a")
    assert result.returncode == ExitCode.BAD_INPUT, result.stderr
    assert "no linear of this model multiplies in 8 bits" in result.stderr


def test_compiled_layers_that_fall_apart_say_so(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    # On a CPU experts are a loop whose lengths the compiler cannot know.
    mixture = "model.spec.experts={num_experts = 2, num_experts_per_tok = 1, moe_intermediate_size = 16}"
    settings = ["train.compile=on", "train.steps=2", "model.spec.num_hidden_layers=1", "run.dir=a"]
    result = meshwright("train", *tiny_run, *settings, mixture, timeout=280)
    assert result.returncode == 0, result.stderr
    (compiled,) = [event for event in events(tmp_path / "a") if event["event"] == "compiled"]
    assert compiled["step"] == 1
    assert compiled["seconds"] > 0
    assert compiled["breaks"]
    reason = next(iter(compiled["breaks"]))
    assert f"compiled layers run in pieces: {reason}" in result.stdout


def test_layers_that_are_not_compiled_say_nothing_of_it(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    result = meshwright("train", *tiny_run, "run.dir=a")
    assert result.returncode == 0, result.stderr
    assert "compiled" not in result.stdout
    assert all(event["event"] != "compiled" for event in events(tmp_path / "a"))


def test_a_measured_size_of_buckets_is_told(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    asked = ("parallel.strategy=dp=2 compress=topk:0.9", "comm.bucket_mb=auto", "train.steps=1", "run.dir=runs/a")
    result = meshwright("train", *tiny_run, "--nproc", 2, *asked)
    assert result.returncode == 0, result.stderr
    (begun,) = [event for event in events(tmp_path / "runs/a") if event["event"] == "started"]
    assert isinstance(begun["bucket_mb"], float)
    told = f"comm   comm.bucket_mb=auto measured what sums take, and chose {begun['bucket_mb']:.4g} MiB"
    assert result.stdout.count(told) == 1
    assert result.stdout.count("comm   compress=topk:0.9 sends 180% of") == 1
