"""NCCL with one rank: every collective that Meshwright uses, and what it wraps models in, on a process group of one.

More ranks than GPUs is what NCCL refuses; several GPUs are not at hand. `python -m tests.parity.nccl` lets NCCL take
ranks on one GPU for different machines, and compares strategies there.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwright.comm.transfers import is_staged
from meshwright.models.initialize import build
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.torch_releases import (
    BUFFERS_STAY_LOCAL,
    all_gather_into,
    group_of,
    reduce_scatter_into,
)
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.torch_private import forget_meshes
from meshwright.training.loss import cross_entropy
from meshwright.verify.pool import RankPool
from tests.gpu.cases import SPECS


class _Group:
    """The process group of one, as a rank of several would have it."""

    def __enter__(self) -> dist.ProcessGroup:
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()
        forget_meshes()


def _collectives(world: World) -> list[str]:
    wrong = []

    def check(name: str, found: Tensor, expected: Tensor) -> None:
        torch.cuda.synchronize()
        if not torch.equal(found, expected):
            wrong.append(name)

    with _Group() as group:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            given = torch.arange(6, device=world.device).to(dtype)
            summed = given.clone()
            work = dist.all_reduce(summed, async_op=True)
            assert work is not None
            work.wait()
            check(f"all_reduce {dtype}", summed, given)
            for name, collective in (("all_gather", all_gather_into), ("reduce_scatter", reduce_scatter_into)):
                into = torch.zeros_like(given)
                collective(into, given, group=group)
                check(f"{name} {dtype}", into, given)
            into = torch.zeros_like(given)
            dist.all_to_all_single(into, given, [6], [6], group=group)
            check(f"all_to_all {dtype}", into, given)
            own = given.clone()
            dist.broadcast(own, src=0)
            check(f"broadcast {dtype}", own, given)
        small = group_of([0])
        summed = given.clone()
        dist.all_reduce(summed, group=small)
        check("all_reduce of a group of its own", summed, given)
        dist.barrier()
        # Messages over NCCL are never copied to the host.
        if is_staged(given, group) or is_staged(given, small):
            wrong.append("staging")
    return wrong


def test_every_collective_of_one_rank_gives_what_it_was_given(pool: RankPool) -> None:
    assert pool.run(_collectives, 1) == [[]]


def _batch(device: torch.device) -> Tensor:
    return torch.randint(67, (2, 17), generator=torch.Generator().manual_seed(1)).to(device)


def _gradients(model: nn.Module, called: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    loss = cross_entropy(called(tokens[:, :-1]), tokens[:, 1:], "sum")
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, dist.tensor.DTensor) else gradient
    return {name.removeprefix("module."): value.double().cpu() for name, value in found.items()}


def _wrapped(world: World, how: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = build(SPECS["dense"], seed=1).to(world.device)
    tokens = _batch(world.device)
    if how == "bare":
        return _gradients(model, model, tokens)
    with _Group():
        if how == "ddp":
            called: nn.Module = DistributedDataParallel(model, gradient_as_bucket_view=True, **BUFFERS_STAY_LOCAL)
        elif how == "fsdp":
            mesh = DeviceMesh("cuda", torch.arange(1))
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
            for layer in model.model.layers.values():
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            called = fully_shard(model, mesh=mesh, mp_policy=policy)
        else:
            strategy = Strategy.parse("dp=1", 1)
            called = parallelize(model, strategy, make_mesh(strategy, "cuda"), reduction="sum")
        return _gradients(model, called, tokens)


@pytest.fixture(scope="module")
def bare(pool: RankPool) -> dict[str, Tensor]:
    return pool.run(_wrapped, 1, "bare")[0]


@pytest.mark.parametrize("how", ["ddp", "fsdp", "parallelize"])
def test_a_model_wrapped_over_nccl_computes_what_it_did(how: str, pool: RankPool, bare: dict[str, Tensor]) -> None:
    (found,) = pool.run(_wrapped, 1, how)
    assert found.keys() == bare.keys()
    for name, expected in bare.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=name)
