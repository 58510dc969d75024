"""`bench comm` and `doctor` where there is a GPU: NCCL between ranks that it takes for different hosts, gloo on CUDA
tensors, and what the machine says of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.bench.collectives import OPERATIONS
from tests.conftest import CommandLine
from tests.ports import free_ports

DEVICE = "cuda"


def test_all_operations_are_right_over_nccl(tmp_path: Path) -> None:
    """Two processes on one GPU, each of them a host of its own, as under torchrun on two machines."""
    port = str(free_ports(1)[0])
    processes = []
    for rank in range(2):
        job = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank),
        }
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_HOSTID": f"host-{rank}"}
        loopback = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        words = ["bench", "comm", "-b", "8", "-e", "1M", "-f", "64", "--device", DEVICE, "--no-save"]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "meshwright", *words, *(["--json", "rows.json"] if rank == 0 else [])],
                cwd=tmp_path,
                env={**os.environ, **job, **meeting, **loopback},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["operation"] for row in rows} == set(OPERATIONS)
    assert all(row["wrong"] == 0 and row["ranks"] == 2 and row["seconds"] > 0 for row in rows)
    assert "nccl" in said[0]


def test_all_operations_are_right_over_gloo_on_a_shared_gpu(meshwright: CommandLine, tmp_path: Path) -> None:
    done = meshwright(
        *("bench", "comm", "--nproc", 2, "-b", "8", "-e", "1M", "-f", "64", "--device", f"{DEVICE}-shared"),
        *("--no-save", "--json", "rows.json"),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["operation"] for row in rows} == set(OPERATIONS)
    assert all(row["wrong"] == 0 for row in rows)


@pytest.mark.parametrize("words", [(), ("--topology",)])
def test_doctor_names_the_card(words: tuple[str, ...], meshwright: CommandLine) -> None:
    told = meshwright("doctor", *words)
    assert told.returncode in (0, 1), told.stderr
    assert torch.cuda.get_device_name(0).split()[-1] in told.stdout


def test_doctor_has_settings_of_nccl_for_this_machine(meshwright: CommandLine) -> None:
    told = meshwright("doctor", "--nccl", "--json")
    assert told.returncode in (0, 1), told.stderr
    assert json.loads(told.stdout)
