"""Messages from rank to rank through host memory, as where ranks share a GPU over gloo; forced on CPU tensors here."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import transfers
from meshwright.comm.transfers import Message, exchange, must_stage, receive, send
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.torch_releases import group_of
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.torch_private import resolve_group
from meshwright.verify.parity import Case, Prover, Trace, run_case
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS

DEEP = {name: spec.model_copy(update={"num_hidden_layers": 4}) for name, spec in SPECS.items()}


@pytest.mark.parametrize(
    ("backends", "device_type", "staged"),
    [
        ("cpu:gloo,cuda:gloo", "cuda", True),
        ("cpu:gloo,cuda:nccl", "cuda", False),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cpu:gloo,cuda:gloo", "cpu", False),
        ("cuda:nccl", "cuda", False),
        ("cpu:gloo,cuda:gloo", "meta", False),
        ("cpu:fake,cuda:fake", "cuda", False),
    ],
)
def test_only_gloo_and_only_gpus_need_host_memory(backends: str, device_type: str, staged: bool) -> None:
    assert must_stage(backends, device_type) is staged


def _backends(world: World) -> str:
    return dist.get_backend_config(world.group)


def test_the_backends_of_a_group_are_told_as_they_are_read(pool: RankPool) -> None:
    """A group over gloo alone serves GPUs too: their messages must be staged."""
    told = pool.run(_backends, 2)[0]
    assert must_stage(told, "cuda")
    assert not must_stage(told, "cpu")


def forced() -> patch:
    """All messages go through host memory."""
    return patch.object(transfers, "is_staged", lambda tensor, group: True)


def _messages(world: World) -> dict[str, bool]:
    assert world.group is not None
    other = 1 - world.rank
    found = {}
    with forced():
        # Rows that do not lie together, and none at all.
        table = torch.arange(12.0).view(3, 4) + 100 * world.rank
        came = torch.zeros(4, 3).t()
        message = exchange(table, other, came, other, world.group)
        # What was sent may change at once, what comes is not there before somebody has waited.
        table.zero_()
        found["copied"] = all(held.data_ptr() not in (table.data_ptr(), came.data_ptr()) for held in message.held)
        found["not there yet"] = not came.any() and not message.is_completed()
        message.wait()
        message.wait()
        expected = torch.arange(12.0).view(3, 4) + 100 * other
        found["exchanged"] = bool((came == expected).all())
        came.zero_()
        message.wait()
        found["copied once"] = not came.any()
        one = torch.zeros(5, dtype=torch.bfloat16)
        if world.rank == 0:
            send(torch.ones(5, dtype=torch.bfloat16), world.group, 1).wait()
        else:
            receive(one, world.group, 0).wait()
        found["received"] = bool(one.all()) == (world.rank == 1)
        nothing = exchange(torch.zeros(0, 3), other, torch.zeros(0, 3), other, world.group)
        nothing.wait()
    came = torch.zeros(3, 4)
    direct: Message = exchange(expected, other, came, other, world.group)
    direct.wait()
    found["direct without a copy"] = {*map(id, direct.held)} == {id(expected), id(came)}
    return found


def test_messages_arrive_whole_and_are_there_when_waited_for(pool: RankPool) -> None:
    for found in pool.run(_messages, 2):
        assert all(found.values()), found


def staged_case(world: World, case: Case) -> Trace:
    with forced():
        return run_case(world, case)


class _Staged(RankPool):
    """The ranks of another pool, whose messages go through host memory."""

    def __init__(self, pool: RankPool) -> None:
        super().__init__(pool.size)
        self.pool = pool

    def run(self, work: object, ranks: int, *inputs: object) -> list[Trace]:  # type: ignore[override]
        assert work is run_case
        return self.pool.run(staged_case if ranks > 1 else run_case, ranks, *inputs)


STAGED = [
    ("tied", "dp=1 pp=2 schedule=1f1b"),
    ("tied", "dp=1 pp=4 schedule=zero-bubble"),
    ("gqa", "dp=1 pp=2 schedule=interleaved:2"),
    ("tied", "dp=2 pp=2 zero=2 schedule=zbv"),
    ("gpt", "dp=1 pp=2 tp=2"),
    ("gqa", "dp=1 cp=2"),
    ("gpt", "dp=1 cp=4"),
    ("experts", "dp=2 cp=2 zero=3"),
    ("gqa", "dp=1 cp=4 cp_method=ulysses:2"),
    ("tied", "dp=1 pp=2 cp=2 schedule=zero-bubble recompute=full"),
]


@pytest.mark.parametrize(("shape", "strategy"), STAGED)
def test_pipelines_and_rings_through_host_memory_equal_one_process(shape: str, strategy: str, pool: RankPool) -> None:
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    case = Case(DEEP[shape], strategy, ranks, micro_steps=4, steps=2, tokens=18)
    assert Prover(_Staged(pool)).differences(case) == []


def _groups(world: World) -> list[bool]:
    mesh = make_mesh(Strategy.parse("pp=2 cp=2", world.size), "cpu")
    groups = [group_of(dist.get_process_group_ranks(mesh["pp"].get_group())), mesh["cp"].get_group()]
    groups.append(resolve_group(groups[1].group_name))
    return [must_stage(dist.get_backend_config(group), "cuda") for group in groups]


def test_every_group_that_messages_go_through_tells_its_backends(pool: RankPool) -> None:
    assert pool.run(_groups, 4) == [[True] * 3] * 4
