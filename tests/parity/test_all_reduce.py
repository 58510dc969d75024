"""All-reduce over messages gives what the backend's own gives, for any algorithm, number of ranks, length and dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.comm.algorithms import ALGORITHMS
from meshwright.comm.all_reduce import all_reduce
from meshwright.elastic.failure import RankError
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool

# The last is more than a socket's buffers hold, whatever the dtype.
LENGTHS = [(0,), (1,), (3,), (5, 7), (1000,), (786_437,)]
# Sums of a few numbers of about one, in another order.
BOUNDS = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def compared(world: World, algorithm: str, dtype: torch.dtype) -> list[tuple[float, int]]:
    """How far each is from the backend's own, and in how many bits the ranks differ from the first one."""
    nodes = [[rank for rank in range(world.size) if rank % 2 == node] for node in range(min(2, world.size))]
    found = []
    for shape in LENGTHS:
        draw = torch.Generator().manual_seed(world.rank)
        ours = torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
        theirs = ours.clone()
        all_reduce(ours, algorithm, nodes=nodes)
        dist.all_reduce(theirs)
        first = ours.clone()
        dist.broadcast(first, 0)
        off = float((ours - theirs).abs().max()) if ours.numel() else 0.0
        found.append((off, int((first != ours).sum())))
    return found


@pytest.mark.parametrize("dtype", BOUNDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_the_backends_and_alike_on_all_ranks(
    ranks: int, algorithm: str, dtype: torch.dtype, pool: RankPool
) -> None:
    for of_rank in pool.run(compared, ranks, algorithm, dtype):
        for off, differ in of_rank:
            assert off <= BOUNDS[dtype] * ranks
            assert differ == 0


def turned_around(world: World, algorithm: str) -> tuple[bool, int]:
    tensor = torch.arange(12.0).view(3, 4).t() * (world.rank + 1)
    sent = all_reduce(tensor, algorithm)
    factor = world.size * (world.size + 1) / 2
    return bool(torch.equal(tensor, torch.arange(12.0).view(3, 4).t() * factor)), sum(sent.values())


def every_other(world: World) -> bool:
    tensor = torch.arange(16.0)
    all_reduce(tensor[::2], "ring")
    return torch.equal(tensor[::2], torch.arange(0.0, 16.0, 2) * world.size) and bool(tensor[1] == 1)


def test_every_other_element_is_summed_in_its_place(pool: RankPool) -> None:
    assert all(pool.run(every_other, 2))


def unknown(world: World) -> None:
    all_reduce(torch.ones(2), "rong")


def test_an_algorithm_that_there_is_not_is_told(pool: RankPool) -> None:
    with pytest.raises(RankError, match="there is no all-reduce called 'rong'; there are"):
        pool.run(unknown, 2)


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_tensors_that_do_not_lie_in_one_row_are_summed_too(algorithm: str, pool: RankPool) -> None:
    for right, sent in pool.run(turned_around, 3, algorithm):
        assert right
        assert sent > 0
