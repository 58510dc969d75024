"""What `meshwright launch` refuses, what it writes for review, and how processes outlive a terminal."""

from __future__ import annotations

import json
import signal
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.config_load import load_config
from meshwright.errors import ConfigError, UserError
from meshwright.launch import detached
from meshwright.launch.hostfile import Host, parse_hosts, read_hostfile
from meshwright.launch.submission import Machines, chip_of, label_of, prepare
from tests.conftest import CommandLine

TINY = ["model.preset=tiny", "data.sequence_length=32", "train.global_batch=8", "run.dir=runs/Some_Run.v2"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--on", "local", "--partition", "main"], "--partition is for --on slurm"),
        (["--on", "slurm", "--hosts", "a"], "--hosts is for --on hosts"),
        (["--on", "local", "--nodes", "2"], "--on local is this machine alone"),
        (["--on", "slurm", "--nodes", "4:2"], "--nodes takes a number of machines or MIN:MAX"),
        (["--on", "slurm", "--gpu", "h100", "--gpus-per-node", "2", "--nproc", "4"], "4 ranks on 2 GPUs"),
        (["--on", "slurm", "--gpus-per-node", "8"], "say --gpu h100"),
        (["--on", "slurm", "--gpu", "h1000"], "h1000"),
        (["parallel.strategy=dp=3", "--on", "slurm", "--nodes", "3"], "a global batch of 8 is not divisible by 3"),
        (["--on", "hosts"], "needs --hostfile FILE or --hosts A,B"),
        (["--on", "hosts", "--hosts", "a,a"], "names a twice"),
        (["--on", "hosts", "--hosts", "127.0.0.1,127.0.0.2"], "which no other host reaches; say --address"),
        (["--on", "slurm", "--env", "API_TOKEN=x"], "secrets go by reference"),
        (["--on", "slurm", "--env", "novalue"], "is not NAME=VALUE"),
        (["--on", "slurm", "--sbatch", "rm -rf"], "is not an option of sbatch"),
        (["--on", "slurm", "--setup", "missing.sh"], "missing.sh cannot be read"),
        (
            ["model.preset=llama3.1-405b", "parallel.strategy=dp=8", "--on", "slurm", "--gpu", "h100"],
            "parallel.strategy='dp=8' is not expected to fit",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    words: list[str], told: str, meshwright: CommandLine, tmp_path: Path
) -> None:
    ended = meshwright("launch", *TINY, *words)
    assert ended.returncode == 2, ended.stdout
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_plan_is_part_of_what_is_submitted(meshwright: CommandLine, tmp_path: Path) -> None:
    words = ["model.preset=llama3.1-8b", "train.global_batch=512", "data.sequence_length=4096"]
    there = ["--on", "slurm", "--nodes", "2", "--gpu", "h100", "--dry-run", "review"]
    ended = meshwright("launch", *words, *there)
    assert ended.returncode == 0, ended.stderr
    run = tomllib.loads((tmp_path / "review/run.toml").read_text())
    plan = json.loads((tmp_path / "review/plan.json").read_text())
    assert run["parallel"]["cluster"] == "2x8xh100"
    assert run["parallel"]["strategy"] == plan["strategy"] == plan["answer"]["best"]["strategy"]
    assert run["train"]["micro_batch"] == plan["answer"]["best"]["micro_batch"]
    # What is written is what was asked for, with the choice made.
    written, asked = load_config(tmp_path / "review/run.toml"), load_config(overrides=words)
    assert written.identity() == asked.identity()


def test_a_ds_config_is_launched_in_our_settings(meshwright: CommandLine, tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 0.002, "betas": [0.8, 0.9]}}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    content = {**sizes, "optimizer": optimizer, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    words = ("launch", *TINY[:2], "bf16=true", "--deepspeed", "ds.json", "--on", "slurm", "--dry-run", "review")
    ended = meshwright(*words, "--nodes", "2", "--nproc", "2")
    assert ended.returncode == 0, ended.stderr
    run = tomllib.loads((tmp_path / "review/run.toml").read_text())
    # The batch follows from the four ranks that there will be.
    assert (run["train"]["global_batch"], run["train"]["micro_batch"], run["train"]["lr"]) == (24, 2, 0.002)
    assert (run["train"]["beta1"], run["train"]["precision"]) == (0.8, "bf16")
    assert "zero=2" in run["parallel"]["strategy"]
    assert "optimizer.params.lr" in ended.stdout
    assert "note   bf16=true is train.precision=bf16 here" in ended.stdout
    elastic = meshwright(*words, "--nodes", "1:2")
    assert elastic.returncode == 2
    assert "follows from the number of ranks" in elastic.stderr
    # All three sizes say how many ranks there are to be, which Ray then takes.
    (tmp_path / "ds.json").write_text(json.dumps({**content, "train_batch_size": 18}))
    there = meshwright(*words[:5], "ds.json", "--on", "ray", "--dry-run", "review")
    assert there.returncode == 0, there.stderr
    assert json.loads((tmp_path / "review/plan.json").read_text())["processes_per_node"] == 3
    content["zero_optimisation"] = {}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    assert "did you mean 'zero_optimization'" in meshwright(*words).stderr


def test_flags_of_megatron_are_launched_in_our_settings(meshwright: CommandLine, tmp_path: Path) -> None:
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    flags = f"{shape} --vocab-size 256 --tensor-model-parallel-size 2 --global-batch-size 8 --lr 0.004 --bf16"
    (tmp_path / "gpt.args").write_text(flags)
    words = ("launch", "--megatron-args", "gpt.args", "--dry-run", "review", "--on")
    for target in (("slurm", "--nproc", "4"), ("ray",)):
        ended = meshwright(*words, *target)
        assert ended.returncode == 0, ended.stderr
        run = tomllib.loads((tmp_path / "review/run.toml").read_text())
        assert (run["model"]["spec"]["hidden_size"], run["train"]["lr"]) == (64, 0.004)
        assert "tp=2" in run["parallel"]["strategy"]
        plan = json.loads((tmp_path / "review/plan.json").read_text())
        assert plan["processes_per_node"] == (4 if target[0] == "slurm" else 2)
    both = meshwright(*words, "local", "--deepspeed", "ds.json")
    assert "two descriptions of one run" in both.stderr


def test_a_named_strategy_stays_and_is_checked() -> None:
    config = load_config(overrides=[*TINY, "parallel.strategy=dp=2 tp=2"])
    submission = prepare(config, Machines(2, 2, 2), chip_of(config, 0, None))
    assert submission.config.parallel.strategy == "dp=2 tp=2"
    assert submission.answer is not None
    with pytest.raises(ConfigError, match="dp=2 tp=2"):
        prepare(config, Machines(3, 3, 2), "cpu")


def test_what_is_not_expected_to_fit_is_submitted_when_it_is_said_twice() -> None:
    config = load_config(overrides=["model.preset=llama3.1-405b", "train.global_batch=8", "parallel.strategy=dp=8"])
    submission = prepare(config, Machines(1, 1, 8, 8), "h100", anyway=True)
    assert submission.answer is not None
    assert submission.answer["candidates"][0]["verdict"] == "does not fit"


def test_a_secret_in_the_settings_is_not_written() -> None:
    secret = "checkpoint.dir=s3://me:hunter2hunter2@bucket/x"
    config = load_config(overrides=[*TINY, secret])
    submission = prepare(config, Machines(1, 1, 2), "cpu")
    with pytest.raises(UserError, match="a secret would be written") as refused:
        submission.files()
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("folder", "label"), [("runs/Some_Run.v2", "some-run-v2"), ("x/7b", "run-7b"), ("ä", "run"), ("a" * 80, "a" * 40)]
)
def test_names_are_labels(folder: str, label: str) -> None:
    assert label_of(folder) == label


def test_hostfiles_of_deepspeed_and_mpi(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(
        "# ours\nworker-1 slots=8\n\nme@worker-2 slots=4 max_slots=8 # small\nworker-3:2\nworker-4\n"
        "fd00::5 slots=2\nme@[fd00::6]:4\n[fd00::7]\n"
    )
    assert read_hostfile(tmp_path / "hosts") == [
        Host("worker-1", 8), Host("me@worker-2", 4), Host("worker-3", 2), Host("worker-4"),
        Host("fd00::5", 2), Host("me@fd00::6", 4), Host("fd00::7"),
    ]  # fmt: skip
    assert Host("me@worker-2").address == "worker-2"


@pytest.mark.parametrize("line", [
    "-oProxyCommand=sh", "a slots=x", "a gpus=2", "a slots=0", "a b", "a;b", "$(x)",
    "10.0.0.1:x", "a:", "a:8:8", "fd00::1::2", "[fd00::5", "[a]:2", "[::1]:x",
])  # fmt: skip
def test_lines_that_are_no_hosts_are_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_hostfile(tmp_path / "hosts")


def test_hosts_are_never_options_of_ssh() -> None:
    with pytest.raises(ConfigError, match="not the name of a host"):
        parse_hosts("a,-oProxyCommand=sh")


def test_a_detached_command_says_how_it_ended(tmp_path: Path) -> None:
    detached.start(tmp_path, "one", [sys.executable, "-c", "import sys; print('hello'); sys.exit(7)"])
    deadline = time.monotonic() + 20
    while detached.state(tmp_path, "one") == ("running", None):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert detached.state(tmp_path, "one") == ("ended", 7)
    assert (tmp_path / "one.log").read_text() == "hello\n"
    assert not detached.send(tmp_path, "one", signal.SIGTERM)


def test_another_process_with_the_same_id_is_not_taken_for_it(tmp_path: Path) -> None:
    facts = detached.start(tmp_path, "one", ["sleep", "60"])
    assert detached.state(tmp_path, "one") == ("running", None)
    (tmp_path / "other.json").write_text(json.dumps({**facts, "began": "an earlier boot:1"}))
    assert detached.state(tmp_path, "other") == ("lost", None)
    assert not detached.send(tmp_path, "other", signal.SIGTERM)
    assert detached.send(tmp_path, "one", signal.SIGTERM)
    deadline = time.monotonic() + 20
    while detached.state(tmp_path, "one")[0] != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert detached.state(tmp_path, "one") == ("ended", -signal.SIGTERM)


def test_a_run_here_goes_on_without_the_terminal(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    words = [*tiny_run, "run.dir=run", "--on", "local", "--nproc", "2"]
    assert meshwright("launch", *words).returncode == 0
    # What a rank says is also in a file of its own.
    own = meshwright("launch", "logs", "run", "--rank", "0", "--follow").stdout.splitlines()
    assert any(line.startswith("step 6/6") for line in own)
    followed = meshwright("launch", "logs", "run", "--follow")
    assert "2 processes over gloo" in followed.stdout
    assert meshwright("launch", "logs", "run", "--rank", "0").stdout.splitlines() == own
    assert set(own) <= set(followed.stdout.splitlines())
    for rank in ("-1", "2"):
        for more in ([], ["--follow"]):
            refused = meshwright("launch", "logs", "run", "--rank", rank, *more)
            assert refused.returncode == 2
            assert f"--rank {rank}: the first rank of run is 0, the last is 1" in refused.stderr
    (tmp_path / "run.launch/training-rank1.log").unlink()
    assert "rank 1 has not started" in meshwright("launch", "logs", "run", "--rank", "1").stderr
    status = meshwright("launch", "status", "run")
    assert "run on local: finished" in status.stdout
    assert "step 6" in status.stdout
    assert meshwright("launch", "stop", "run").returncode == 2
    assert "no `meshwright launch` has started" in meshwright("launch", "status", "elsewhere").stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.path=nowhere"], "nowhere"),
        ([], "no data: set data.path"),
        (["data.path=packed", 'data.sources=["nowhere"]'], "source 'nowhere' does not exist"),
        (["data.path=nowhere", "observe.mlflow=true"], "set MLFLOW_TRACKING_URI"),
        (["data.path=nowhere", "observe.mlflow=true", "--env", "MLFLOW_TRACKING_URI=http://127.0.0.1:1"], "nowhere"),
    ],
)
def test_what_can_be_known_here_is_told_before_a_run_is_started_here(
    words: list[str], told: str, meshwright: CommandLine, tmp_path: Path
) -> None:
    ended = meshwright("launch", *TINY, *words, "--on", "local")
    assert ended.returncode != 0, ended.stdout
    assert told in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    # The disks of others are not known here.
    assert meshwright("launch", *TINY, *words, "--on", "slurm", "--dry-run", "review").returncode == 0


def test_a_run_here_with_other_settings_than_before_is_told_before_it_is_started(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    assert meshwright("train", *tiny_run, "train.steps=1", "run.dir=run").returncode == 0
    ended = meshwright("launch", *tiny_run, "train.lr=1e-3", "run.dir=run", "--on", "local")
    assert ended.returncode != 0
    assert "run holds a run of another configuration" in ended.stderr
    assert not (tmp_path / "run.launch").exists()


WHOLE: dict[str, dict[str, Any]] = {
    "local": {"folder": "/nowhere", "pid": 1},
    "hosts": {"hosts": ["a"], "folder": "/nowhere", "python": "python", "ssh": "ssh {host}"},
    "slurm": {"job": "7", "folder": "/nowhere"},
    "kubernetes": {"namespace": "n", "context": None, "objects": [
        {"apiVersion": "v1", "kind": "Job", "metadata": {"name": "x"}}
    ]},
    "ray": {"job": "7", "address": "http://127.0.0.1:1"},
}  # fmt: skip


@pytest.mark.parametrize("target", WHOLE)
def test_a_damaged_record_is_told_in_one_line(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.launch").mkdir()
    every = {"target": target, "name": "run"}
    damaged = [(key, every | {one: kept for one, kept in WHOLE[target].items() if one != key}) for key in WHOLE[target]]
    damaged += [(key, every | WHOLE[target] | {key: value}) for key in WHOLE[target] for value in ({}, [])]
    if target == "ray":  # Without a job it is a process of this machine.
        damaged[0] = ("folder", damaged[0][1])
    wrong: list[tuple[str, Any]] = [
        ("name", {"target": target}),
        ("target", {"target": [], "name": "run"}),
        ("all of it", []),
    ]
    for key, record in [*damaged, *wrong]:
        (tmp_path / "run.launch/launch.json").write_text(json.dumps(record))
        for verb in ("status", "logs", "stop"):
            assert main(["launch", verb, "run"]) == 2
            told = capsys.readouterr().err
            assert "launch.json is not what `meshwright launch` writes: " in told
            assert key in told.partition("writes: ")[2].partition(" is missing")[0]
            assert told.count("\n") == 1


def test_a_damaged_record_of_a_process_is_a_lost_one(tmp_path: Path) -> None:
    for text in ("[1]", "{}", '{"pid": 1}', "7", "{"):
        (tmp_path / "one.json").write_text(text)
        assert detached.state(tmp_path, "one") == ("lost", None)
        assert not detached.send(tmp_path, "one", signal.SIGTERM)
