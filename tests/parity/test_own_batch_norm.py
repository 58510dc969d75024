"""BatchNorm in a loop of one's own: the statistics of one device, moved once, and never of a stand-in."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.cli.main import main
from meshwright.errors import ConfigError
from meshwright.parallel import batch_norm
from meshwright.parallel.precision import Precision
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool
from tests.parity.own_loops import (
    Convolutions,
    assert_same,
    images,
    loss_of,
    make,
    train,
    train_plainly,
)


@pytest.mark.parametrize("strategy", ["dp=4", "dp=4 zero=3"])
def test_rank_without_a_sample_left_takes_part_in_the_pass(strategy: str, pool: RankPool) -> None:
    """Six samples in two micro-steps on four ranks: each time one has none, and BatchNorm must not see its stand-in."""
    (expected,) = pool.run(train_plainly, 1, "convolutions", 2, 6, 6)
    for found in pool.run(train, 4, "convolutions", strategy, 2, 6, 6):
        assert_same(found, expected)


def tracked(world: World, recompute: str) -> tuple[int, dict[str, Tensor]]:
    parallel = make("convolutions", f"dp=1 recompute={recompute}")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    parallel.backward(loss_of, *images(8).tensors)
    parallel.step(optimizer)
    norm: Any = parallel.module.blocks[0][1]  # type: ignore[index]
    return int(norm.num_batches_tracked), {name: one.clone() for name, one in parallel.module.named_buffers()}


def test_statistics_move_once_where_a_pass_is_computed_again(pool: RankPool) -> None:
    (count, expected), (again, found) = (pool.run(tracked, 1, kind)[0] for kind in ("none", "full"))
    assert (count, again) == (1, 1)
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value.double(), rtol=1e-12), name


def evaluate(world: World, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(0)
    parallel = mw.parallelize(Convolutions(), "auto", precision=Precision(param=dtype))
    pictures, _ = images(8).tensors
    parallel(pictures.to(dtype))
    with torch.no_grad():
        return parallel.eval()(pictures.to(dtype)).float()


def test_running_statistics_serve_a_model_that_computes_in_bf16(pool: RankPool) -> None:
    (narrow,), (wide,) = (pool.run(evaluate, 1, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert float((narrow - wide).norm() / wide.norm()) < 2e-2


def test_verify_compares_running_statistics(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    track = batch_norm._track

    def drifting(module: Any, mean: Tensor, *rest: Tensor) -> None:
        track(module, mean + 0.1 * torch.distributed.get_rank() if torch.distributed.is_initialized() else mean, *rest)

    monkeypatch.setattr(batch_norm, "_track", drifting)
    arguments = ["--model", "tests.parity.own_loops:Convolutions", "--parallel", "dp=2", "--steps", "1", "--json"]
    assert main(["verify", *arguments]) == 1
    found = json.loads(capsys.readouterr().out)["first_difference"]
    assert found["name"].endswith("running_mean")


class Split(Convolutions):
    tensor_plan = {"head": "outputs-whole", "stem.*": "tokens", "blocks.*.*": "tokens"}  # noqa: RUF012


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 zero=3"])
def test_torchs_synchronised_batch_norm_is_ours(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "tests.parity.own_loops:synchronised", "--parallel", strategy, "--steps", "1"]
    assert main(["verify", *arguments]) == 0, capsys.readouterr().out


def test_running_statistics_of_instances_are_refused_on_several_data_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True))
    with pytest.raises(ConfigError, match="1 is an InstanceNorm2d with running statistics"):
        mw.parallelize(model, "dp=2")


def test_batch_norm_under_tensor_parallel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"tp=2 does not know stem.1, a BatchNorm2d"):
        mw.parallelize(Split(), "tp=2")
