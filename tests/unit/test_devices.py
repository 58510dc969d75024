"""Which device a rank gets and what ranks talk over; GPUs are pretended, since none of it starts CUDA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.config import resolve_config
from meshwright.errors import ConfigError, UserError
from meshwright.parallel import parallelize
from meshwright.parallel.world import SHARED, World, backend_for, local_ranks, pick_device
from meshwright.training.planned import machines_of, plan_run


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def test_ranks_have_a_gpu_each_or_are_told_what_to_set(gpus: pytest.MonkeyPatch) -> None:
    for setting in ("auto", "cuda"):
        assert [pick_device(setting, rank).index for rank in range(2)] == [0, 1]
        with pytest.raises(ConfigError, match=r"process 3 .* no GPU of its own \(2 found\).*run\.device=cuda-shared"):
            pick_device(setting, 2)
    assert pick_device("cpu", 5).type == "cpu"


def test_ranks_share_gpus_in_turn_when_asked_to(gpus: pytest.MonkeyPatch) -> None:
    assert [pick_device(SHARED, rank).index for rank in range(5)] == [0, 1, 0, 1, 0]


def test_sharing_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="run.device='cuda-shared' and PyTorch sees no GPU"):
        pick_device(SHARED, 0)


@pytest.mark.parametrize(
    ("setting", "device", "backend"),
    [
        ("auto", "cuda:1", "cpu:gloo,cuda:nccl"),
        ("cuda", "cuda:0", "cpu:gloo,cuda:nccl"),
        (SHARED, "cuda:0", "gloo"),
        ("auto", "cpu", "gloo"),
        ("cpu", "cpu", "gloo"),
    ],
)
def test_nccl_is_for_ranks_with_a_gpu_each(setting: str, device: str, backend: str) -> None:
    assert backend_for(setting, torch.device(device)) == backend


def test_sharing_is_said_in_words_and_nothing_else_is(gpus: pytest.MonkeyPatch) -> None:
    shared = World(0, 8, torch.device("cuda", 0), "gloo", local=4)
    assert shared.sharing == "4 ranks share 2 GPUs over gloo: right results, not speed"
    gpus.setattr(torch.cuda, "device_count", lambda: 1)
    assert shared.sharing == "4 ranks share 1 GPU over gloo: right results, not speed"
    assert replace(shared, backend="nccl").sharing is None
    assert replace(shared, device=torch.device("cpu")).sharing is None
    assert World(device=torch.device("cuda", 0)).sharing is None


def test_ranks_of_this_machine_are_those_that_the_launcher_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_ranks(8) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert local_ranks(8) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "none")
    assert local_ranks(8) == 8


def test_a_loop_of_ones_own_with_more_processes_than_gpus_is_told_how_to_share(
    gpus: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="4 processes on this machine and 2 GPUs: NCCL takes one process for each"):
        parallelize.parallelize(nn.Linear(4, 4), "dp=4")


def test_nothing_is_planned_for_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    common = ["model.preset=tiny", "data.path=x", "data.sequence_length=32", "train.global_batch=8"]
    config = resolve_config(None, [*common, "run.device=cuda-shared", f"run.dir={tmp_path / 'run'}"]).config
    found = plan_run(config, 4)
    assert found.strategy == "dp=4"
    assert "nothing was planned, since run.device=cuda-shared" in found.said[0]
    # Not even for machines that are named: times would be compared with theirs, and the difference learned.
    named = config.model_copy(update={"parallel": config.parallel.model_copy(update={"cluster": "4xh200"})})
    with pytest.raises(UserError, match="plans are made for ranks with a GPU each; name a parallel.strategy"):
        machines_of(named, 4, 4)
