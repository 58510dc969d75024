"""What hosts, Slurm and this machine are given: names, paths, variables, and one launch of a run at a time."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.launch.alone import alone
from tests.conftest import CommandLine

TINY = ["model.preset=tiny", "data.sequence_length=32", "train.global_batch=8", "run.dir=runs/mine"]
ON_HOSTS = ["--on", "hosts", "--hosts"]
Launch = Callable[..., tuple[int, str]]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Runs `meshwright launch` in an empty folder; gives its exit code and what it complains of."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        try:
            code = main(["launch", *TINY, *words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*ON_HOSTS, "127.0.0.1", "--ssh", "ssh '{host}"], "No closing quotation"),
        ([*ON_HOSTS, "127.0.0.1", "--address", "127.0.0.1:abc"], "--address 127.0.0.1:abc"),
        ([*ON_HOSTS, "127.0.0.1", "--address", "127.0.0.1:70000"], "--address 127.0.0.1:70000"),
        ([*ON_HOSTS, "127.0.0.1", "--address", "fe80::1"], "--address fe80::1"),
        ([*ON_HOSTS, "10.0.0.1:x"], "--hosts: '10.0.0.1:x' is not the name of a host, or HOST:SLOTS"),
        ([*ON_HOSTS, "10.0.0.1:2", "--nproc", "4"], "has 2 slots, and 4 ranks"),
        ([*ON_HOSTS, "127.0.0.1,127.0.0.2"], "which no other host reaches"),
        ([*ON_HOSTS, "127.0.0.1", "--name", "x/y"], "--name x/y"),
        (["--on", "slurm", "--name", "a$(id>/tmp/x)b"], "--name a$(id"),
        (["--on", "slurm", "--name", "My Run"], "--name My Run"),
        (["--on", "slurm", "--name", "a" * 64], "63"),
        (["--on", "slurm", 'run.dir=runs/a"b'], "run.dir"),
        (["--on", "slurm", "--workdir", "/a\\b"], "the working folder"),
        (["--on", "slurm", "--dry-run", 'a"b'], "--dry-run has a name that sbatch cannot take"),
        (["--on", "slurm", "--partition", "a\nb"], "--partition"),
        (["--on", "slurm", "--partition", "a b"], "--partition 'a b'"),
        (["--on", "slurm", "--account", "a;id"], "--account 'a;id'"),
        (["--on", "slurm", "--qos", "$(id)"], "--qos '$(id)'"),
        (["--on", "slurm", "--qos", ""], "--qos ''"),
        (["--on", "slurm", "--constraint", "a b"], "--constraint 'a b'"),
        (["--on", "slurm", "--constraint", "a;id"], "--constraint 'a;id'"),
        *(
            (["--on", "slurm", "--time", time], f"--time {time!r}")
            for time in ("1;id", "abc", "5 minutes", "1:2:3:4", "1.5")
        ),
        *((["--on", "slurm", "--mem", size], f"--mem {size!r}") for size in ("9x", "1.5G", "1TiB", "G", "1G #")),
        (["--on", "slurm", "--cpus-per-task", "0"], "--cpus-per-task 0"),
        (["--on", "slurm", "--grace", "-1"], "--grace -1"),
        (["--on", "slurm", "--grace", "65536"], "--grace 65536"),
        (["--on", "slurm", "--sbatch=--comment=a\rb"], "--sbatch"),
        (["--on", "slurm", "--sbatch=reservation"], "--sbatch"),
        (["--on", "slurm", "--sbatch=--comment=a --nodes=5"], "more than one option"),
        (["--on", "slurm", "--sbatch=--comment='a"], "is not an option of sbatch"),
        (["--on", "slurm", "--sbatch=--comment=a\\ --nodes=5"], "is not an option of sbatch"),
        (["--on", "slurm", "--sbatch=--time-min=2"], "--time-min 2 is 120 s"),
        *(
            (["--on", "slurm", f"--sbatch={option}"], f"job.sh says itself what --{name} is; {instead}")
            for option, name, instead in (
                ("--nodes=5", "nodes", "--nodes says it"),
                ("--nodes 5", "nodes", "--nodes says it"),
                ("-N5", "nodes", "--nodes says it"),
                ("-N 5", "nodes", "--nodes says it"),
                ("-HN5", "nodes", "--nodes says it"),
                ("--ntasks=4", "ntasks", "each machine has one task; --processes-per-node"),
                ("-n4", "ntasks", "each machine has one task; --processes-per-node"),
                ("--gpus-per-node=2", "gpus-per-node", "--gpus-per-node says how many"),
                ("--gpus-per-n=2", "gpus-per-node", "--gpus-per-node says how many"),
                ("-G2", "gpus", "--gpus-per-node says how many"),
                ("--array=1-4", "array", "a run is one job"),
                ("--arr=1-4", "array", "a run is one job"),
                ("--output=x", "output", "logs lie beside the run folder"),
                ("-o x", "output", "logs lie beside the run folder"),
                ("--job-name=x", "job-name", "--name says it"),
                ("--no-requeue", "no-requeue", "a job that has saved comes back"),
                ("--no-r", "no-requeue", "a job that has saved comes back"),
                ("--signal=USR1@5", "signal", "--grace says when"),
                ("--chdir=/", "chdir", "--workdir says it"),
                ("-t5", "time", "--time says it"),
            )
        ),
        (["--on", "slurm", "--sbatch=--gres=nvme,gpu:2"], "--gpus-per-node says how many"),
        *(
            (["--on", "slurm", "--time", time, *grace], told)
            for time, grace, told in (
                ("00:02:00", [], "--time 00:02:00 is 120 s, and --grace 120"),
                ("3", [], "--time 3 is 180 s, and --grace 120"),
                ("2:30", [], "--time 2:30 is 180 s"),
                ("00:05:00", ["--grace", "600"], "--time 00:05:00 is 300 s, and --grace 600"),
                ("0-1", ["--grace", "3600"], "--time 0-1 is 3600 s"),
                ("0-0:10", ["--grace", "600"], "--time 0-0:10 is 600 s"),
                ("0-0:01:30", [], "--time 0-0:01:30 is 120 s"),
            )
        ),
        (["--on", "slurm", "--nodes", "2:"], "--nodes takes a number of machines or MIN:MAX, not '2:'"),
        (["--on", "slurm", "--gpu", "h100", "run.device=cpu"], "run.device=cpu"),
        *(
            (["--on", *on, "run.device=cuda", *gpus], "run.device=cuda, and the machines are asked for no GPUs")
            for on in (["slurm"], ["hosts", "--hosts", "a:2"], ["kubernetes", "--image", "i"])
            for gpus in ([], ["--gpus-per-node", "0"])
        ),
        (["--on", "ray", "run.device=cuda", "--gpus-per-node", "0"], "are asked for no GPUs"),
        (["--on", "local", "--nodes", "2"], "--on local is this machine alone"),
        (["--on", "local", "--gpu", "h100"], "--gpu"),
        (["--on", "local", "--gpus-per-node", "2"], "--gpus-per-node"),
    ],
)
def test_what_submitting_refuses_is_not_written_for_review(
    words: list[str], told: str, launch: Launch, tmp_path: Path
) -> None:
    code, complaint = launch("--dry-run", "review", *words)
    assert code == 2
    assert told in complaint
    assert complaint.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [["--on", "slurm", "--gpus-per-node", "1"], ["--on", "local"], ["--on", "ray"], [*ON_HOSTS, "a", "--gpu", "h100"]],
    ids=lambda words: words[1],
)
def test_gpus_that_are_there_or_asked_for_can_be_used(words: list[str], launch: Launch) -> None:
    code, complaint = launch("run.device=cuda", "parallel.strategy=zero=0", *words, "--dry-run", "review")
    assert code == 0, complaint


def test_a_file_in_the_place_of_the_review_is_named(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "review").write_text("mine")
    code, complaint = launch("--on", "slurm", "--dry-run", "review")
    assert (code, (tmp_path / "review").read_text()) == (2, "mine")
    assert "--dry-run review" in complaint
    assert "run.dir" not in complaint


def test_hosts_need_no_name_service_for_review(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("no-such-host-1.invalid slots=2\nno-such-host-2.invalid slots=2\n")
    code, complaint = launch("--on", "hosts", "--hostfile", "hosts", "--dry-run", "review")
    assert code == 0, complaint
    commands = (tmp_path / "review/commands.sh").read_text()
    assert "--listen no-such-host-1.invalid:0" in commands
    # Where things lie is known; only the store's port is not.
    assert f"{tmp_path}/runs/mine.launch/run.toml" in commands
    assert " DIR" not in commands


@pytest.mark.parametrize("word", ["10.0.0.9", "10.0.0.9:29400", "[fe80::1]:0", "head-0.cluster:1"])
def test_addresses_that_a_store_can_have(word: str, launch: Launch, tmp_path: Path) -> None:
    code, complaint = launch(*ON_HOSTS, "a,b", "--address", word, "--dry-run", "review")
    assert code == 0, complaint
    shown = word if word != "10.0.0.9" else "10.0.0.9:0"
    lines = (tmp_path / "review/commands.sh").read_text().splitlines()[1:]
    store, *nodes = (shlex.split(shlex.split(line)[-1]) for line in lines if line)
    assert store[store.index("--listen") + 1] == shown
    assert [node[node.index("--rendezvous") + 1] for node in nodes] == [re.sub(":0$", ":PORT", shown)] * 2


def test_hosts_meet_on_ipv6(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    (tmp_path / "ssh").chmod(0o755)
    words = ["--on", "hosts", "--hosts", "a,b", "--address", "[::1]", "--ssh", f"{tmp_path}/ssh {{host}}"]
    assert meshwright("launch", *tiny_run, "run.dir=run", *words).returncode == 0
    assert "6/6" in meshwright("launch", "logs", "run", "--follow").stdout
    assert "finished" in meshwright("launch", "status", "run").stdout


def test_a_script_is_what_bash_takes_whatever_the_names(launch: Launch, tmp_path: Path) -> None:
    words = ["run.dir=runs/with 'a space' #1", "--workdir", "/some where", "--name", "My.Run_2"]
    words += [
        "--constraint",
        "[a*2&b*1]",
        "--partition",
        "gpu,gpu-long",
        "--account",
        "us",
        "--sbatch",
        "--comment='a b'",
    ]
    code, complaint = launch("--on", "slurm", *words, "--dry-run", "review 'it' #1")
    assert code == 0, complaint
    subprocess.run(["bash", "-n", tmp_path / "review 'it' #1/job.sh"], check=True)
    script = (tmp_path / "review 'it' #1/job.sh").read_text()
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    # As sbatch splits its lines: at spaces that no quotes hold.
    assert all(len(shlex.split(option)) == 1 for option in asked)
    assert shlex.split(" ".join(asked))[-6:] == [
        f"--output={tmp_path}/review 'it' #1/slurm-%j.log", "--chdir=/some where",
        "--partition=gpu,gpu-long", "--account=us", "--constraint=[a*2&b*1]", "--comment=a b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("chip", "host", "told"), [(r"x\nid", "a", r"chip 'x\nid': a name is one line"), ("x", r"a\nid", "names must be")]
)
def test_names_of_a_cluster_file_do_not_leave_their_comment(
    chip: str, host: str, told: str, launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(
        f'nodes = 1\ngpus_per_node = 1\nnames = ["{host}"]\n[chip]\nname = "{chip}"\nmemory_mib = 4000\n'
        "memory_bandwidth = 100\nlink = 1\nnic = 1\ntflops = { bf16 = 1.0, float32 = 1.0 }\n"
    )
    code, complaint = launch("--on", "slurm", "parallel.cluster=mine.toml", "--dry-run", "review")
    assert (code, (tmp_path / "review").exists()) == (2, False)
    assert told in complaint


@pytest.mark.parametrize("option", [
    *(f"--time={limit}" for limit in ("90", "90:00", "24:00:00", "1-12", "1-12:30", "7-00:00:00", "UNLIMITED")),
    *(f"--mem={size}" for size in ("0", "900G", "900000", "1tb")),
])  # fmt: skip
def test_limits_and_sizes_are_those_of_sbatch(option: str, launch: Launch, tmp_path: Path) -> None:
    code, complaint = launch("--on", "slurm", option, "--dry-run", "review")
    assert code == 0, complaint
    assert f"\n#SBATCH {option}\n" in (tmp_path / "review/job.sh").read_text()


@pytest.mark.parametrize("words", [
    ["--time", "4"], ["--time", "3:01"], ["--time", "0-1"], ["--time", "0"], ["--time", "2", "--grace", "30"],
    *([f"--sbatch={option}"] for option in (
        "--reservation=night", "--mem-per-cpu=4G", "-w a,b", "-xnode7", "--exclusive", "--gres=nvme:1", "-H",
        "--wait-all-nodes=1", "--export=NONE", "--time-min=60", "--time-min=a-5::", "--dependency afterok:7",
        "--comment='not --nodes=5'",
    )),
])  # fmt: skip
def test_what_leaves_the_plan_and_time_to_train_is_handed_to_sbatch(words: list[str], launch: Launch) -> None:
    code, complaint = launch("--on", "slurm", *words, "--dry-run", "review")
    assert code == 0, complaint


def test_the_script_of_a_review_runs_from_anywhere(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    words = [*tiny_run, "train.steps=2", "run.dir=run", "--on", "local", "--dry-run", "review"]
    assert meshwright("launch", *words).returncode == 0
    subprocess.run([tmp_path / "review/training.sh"], cwd="/", check=True, capture_output=True, timeout=60)
    assert (tmp_path / "run/metrics.jsonl").exists()
    assert "step 2/2" in (tmp_path / "review/training-rank0.log").read_text()


def test_variables_reach_a_run_here(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    # A fault on purpose is asked for by a variable.
    fault = "MESHWRIGHT_FAULT=rank=0,step=2,phase=forward,kind=raise"
    words = [*tiny_run, "run.dir=run", "elastic.max_restarts=0", "--on", "local", "--nproc", "2", "--env", fault]
    assert meshwright("launch", *words, "--dry-run", "review").returncode == 0
    assert fault in (tmp_path / "review/training.sh").read_text()
    assert meshwright("launch", *words).returncode == 0
    assert "injected fault raise" in meshwright("launch", "logs", "run", "--follow").stdout
    assert "failed" in meshwright("launch", "status", "run").stdout


def test_of_launches_at_once_one_is_submitted(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    words = [*tiny_run, "train.steps=100000", "run.dir=run", "--on", "local"]
    command = [sys.executable, "-m", "meshwright", "launch", *words]
    started = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    told = [process.communicate(timeout=60)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 2, 2], told
    for text in filter(None, told):
        assert "another `meshwright launch`" in text or "was launched before on local and is running" in text
    assert "asked process" in meshwright("launch", "stop", "run", "--wait", "60").stdout


def test_a_launch_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "runs/mine.launch"
    with alone(folder):
        assert folder.is_dir()
        with pytest.raises(UserError, match="another `meshwright launch`"), alone(folder):
            pass
    assert list(tmp_path.iterdir()) == []
    with alone(folder):
        (folder / "launch.json").write_text("{}")
    assert [path.name for path in folder.iterdir()] == ["launch.json"]


def test_complaints_are_one_line(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    code, complaint = launch("--on", "slurm", "--no-such-option")
    assert code == 2
    assert complaint == (
        "meshwright launch: unrecognized arguments: --no-such-option; `meshwright launch --help` says what it takes\n"
    )
    assert main(["launch", "stat", "runs/mine"]) == 2
    assert "did you mean 'status'?" in capsys.readouterr().err


def test_a_run_file_may_be_called_almost_like_an_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stats").write_text("")
    assert main(["launch", "stats", *TINY, "--on", "slurm", "--dry-run", "review"]) == 0


def test_torchruns_name_for_processes_is_taken(launch: Launch, tmp_path: Path) -> None:
    code, complaint = launch("--on", "slurm", "--nproc_per_node", "2", "--dry-run", "review")
    assert code == 0, complaint
    assert "--nproc 2" in (tmp_path / "review/job.sh").read_text()
