"""accelerate's own classes take the file that we write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType

from meshwright.interop.accelerate_emit import PREFIX, accelerate_file
from meshwright.interop.emit import forms
from meshwright.planning.answer import plan
from meshwright.planning.carried import Carried
from tests.ports import free_ports


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("zero=0", DistributedType.MULTI_GPU),
        ("zero=2", DistributedType.FSDP),
        ("zero=3 recompute=full", DistributedType.FSDP),
        ("zero=3 replicate=2", DistributedType.FSDP),
        ("zero=3 tp=2 sp=off", DistributedType.FSDP),
        ("zero=3 cp=2", DistributedType.FSDP),
        ("zero=3 offload=parameters", DistributedType.FSDP),
    ],
)
def test_its_config_class_reads_our_file(tmp_path: Path, strategy: str, kind: DistributedType) -> None:
    made = plan("llama3.2-1b", "8xh200", sequence_length=1024, global_batch=16, strategy=strategy, micro_batch=1)
    path = tmp_path / "accelerate.yaml"
    path.write_text(accelerate_file(made, Carried()))
    found = ClusterConfig.from_yaml_file(str(path))
    assert (found.distributed_type, found.num_processes, found.mixed_precision) == (kind, 8, "bf16")
    options = {action.dest for action in launch_command_parser()._actions}
    assert {*found.fsdp_config, *found.parallelism_config} <= options
    sizes = {key.removeprefix(PREFIX): size for key, size in found.parallelism_config.items() if key.endswith("_size")}
    assert ParallelismConfig(**sizes).total_size == 8 or not sizes


SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
print(f"rank {dist.get_rank()} of {ones.item():g}", flush=True)
dist.destroy_process_group()
"""


def test_machines_meet_by_the_commands_that_we_tell(tmp_path: Path) -> None:
    made = plan("llama3.2-1b", "2x1xh200", sequence_length=1024, global_batch=16, strategy="zero=3", micro_batch=1)
    (tmp_path / "accelerate.yaml").write_text(accelerate_file(made, Carried()))
    (tmp_path / "train.py").write_text(SCRIPT)
    told = forms()["accelerate"].advice("accelerate.yaml", Carried(), 2).replace("HOST", "127.0.0.1")
    commands = [line.partition(": ")[2] for line in told.replace("29500", str(free_ports(1)[0])).splitlines()[1:]]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "accelerate.commands.accelerate_cli", *command.split()[1:]],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    for rank, machine in enumerate(started):
        assert f"rank {rank} of 2" in machine.communicate(timeout=120)[0]
