"""What launchers say in the environment: tasks of srun, machines by PET_*; and what they say to a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.errors import ConfigError
from meshwright.launch.adopted import pet_machine, pet_processes, slurm_rank
from meshwright.parallel.world import launched_ranks
from tests.conftest import CommandLine
from tests.e2e.trainings import metrics
from tests.ports import free_ports

RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}

TASK = {
    "SLURM_JOB_ID": "1234567", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2", "SLURM_STEP_NODELIST": "gpu[01-03]", "SLURM_TASKS_PER_NODE": "2(x2),3", "MASTER_ADDR": "gpu01",
}  # fmt: skip


def test_a_task_of_srun_is_a_rank() -> None:
    assert slurm_rank(TASK) == {
        "RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "2",
        "MASTER_ADDR": "gpu01", "MASTER_PORT": str(20_000 + 1234567 % 20_000),
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"RANK": "0"}, {"SLURM_NTASKS": "1"}, {"SLURM_STEP_ID": None}, {"SLURM_PROCID": None}],
    ids=["torchrun inside", "one task", "the batch script", "salloc"],
)
def test_what_is_no_rank_of_srun_is_left_alone(changes: dict[str, str | None]) -> None:
    assert slurm_rank({key: value for key, value in {**TASK, **changes}.items() if value is not None}) == {}


def test_the_first_machine_must_be_known() -> None:
    with pytest.raises(ConfigError, match=r"gpu\[01-03\].*set MASTER_ADDR"):
        slurm_rank({key: value for key, value in TASK.items() if key != "MASTER_ADDR"} | {"SLURM_CONF": "/none"})


PET = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0.job", "PET_MASTER_PORT": "29500"}


def test_a_machine_by_pet() -> None:
    found = pet_machine({**PET, "PET_NPROC_PER_NODE": "8"})
    assert found is not None
    assert (found.nodes, found.rank, found.endpoint, found.processes) == ("2", 1, "job-0.job:29500", "8")
    named = pet_machine({**PET, "PET_RDZV_ENDPOINT": "there:29400", "PET_RDZV_ID": "mine", "PET_NNODES": "2:4"})
    assert named is not None
    assert (named.nodes, named.endpoint, named.run_id) == ("2:4", "there:29400", "mine")


def test_machines_of_pet_meet_on_ipv6() -> None:
    for more in ({"PET_RDZV_ENDPOINT": "[fd00::5]:29400"}, {"PET_MASTER_ADDR": "fd00::5", "PET_MASTER_PORT": "29400"}):
        found = pet_machine({**PET, **more})
        assert found is not None
        assert found.endpoint == "[fd00::5]:29400"
    for wrong in ("fd00::5", "there:x"):
        with pytest.raises(ConfigError, match="PET_RDZV_ENDPOINT=.* is not HOST:PORT"):
            pet_machine({**PET, "PET_RDZV_ENDPOINT": wrong})


@pytest.mark.parametrize("environment", [{}, {"PET_NNODES": "1"}, {**PET, "RANK": "0"}])
def test_one_machine_or_one_rank_is_none_of_several(environment: dict[str, str]) -> None:
    assert pet_machine(environment) is None


@pytest.mark.parametrize("missing", ["PET_NODE_RANK", "PET_MASTER_ADDR"])
def test_several_machines_must_say_which_and_where(missing: str) -> None:
    with pytest.raises(ConfigError, match=missing):
        pet_machine({key: value for key, value in PET.items() if key != missing})


def test_a_machine_that_is_none_of_them_is_told() -> None:
    with pytest.raises(ConfigError, match="PET_NODE_RANK=7 is none of PET_NNODES=2 machines"):
        pet_machine({**PET, "PET_NNODES": "2", "PET_NODE_RANK": "7"})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"RANK": "5"}, "RANK=5, WORLD_SIZE=2 and LOCAL_RANK=0 name no rank"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"RANK": "one"}, "not to whole numbers"),
        ({"MASTER_PORT": "abc"}, "MASTER_PORT=abc is no port"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
    ],
)
def test_variables_that_name_no_rank_are_told(
    changes: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | meeting | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told):
        launched_ranks()


def test_processes_of_a_machine_by_pet() -> None:
    assert [pet_processes({"PET_NPROC_PER_NODE": text}) for text in ("4", "gpu", "auto")] == ["4", "auto", "auto"]
    assert pet_processes({}) is None


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        (["--local_rank=0", "train"], {}, "none set RANK and WORLD_SIZE"),
        (["train", "--local-rank", "1"], RANK, "--local-rank 1, and LOCAL_RANK is 0"),
        (["--local_rank=1", "train"], RANK, "--local-rank 1, and LOCAL_RANK is 0"),
        (["--local-rank", "1", "train"], RANK, "--local-rank 1, and LOCAL_RANK is 0"),
        (["--local-rank=x", "train"], RANK, "invalid int value: 'x'"),
    ],
)
def test_a_local_rank_is_what_the_variables_say(
    words: list[str], variables: dict[str, str], told: str, meshwright: CommandLine
) -> None:
    ended = meshwright(*words, "--preset", "demo", **variables)
    assert ended.returncode == 2
    assert told in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_ranks_are_started_as_deepspeed_starts_them(tiny_run: list[str], tmp_path: Path) -> None:
    # Its launcher gives each the variables, and --local_rank before all other arguments.
    place = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-u", "-m", "meshwright", f"--local_rank={rank}", "train", *tiny_run, "run.dir=run"],
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert len(metrics(tmp_path / "run")) == 6
