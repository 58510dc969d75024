"""The mesh lays ranks out as the strategy and the placement say, and its groups are those of its axes."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.pool import RankPool

Neighbours = dict[str, list[int]]


def neighbours(world: World, strategy: str, placement: list[int] | None) -> Neighbours:
    """The ranks with which this one shares each axis."""
    mesh = make_mesh(Strategy.parse(strategy, world.size), "cpu", placement)
    groups = {axis: mesh[axis].get_group() for axis in ("pp", "replicate", "shard", "cp", "tp")}
    groups |= {"data": mesh.data.get_group(), "loss": mesh.loss.get_group(), "state": mesh.state.get_group()}
    if mesh.experts is not None:
        places = {"ep": mesh.experts["ep"], "expert_state": mesh.experts.state, "copies": mesh.experts.copies}
        groups |= {axis: place.get_group() for axis, place in places.items()}
    return {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}


def test_tensor_parallel_ranks_are_neighbours_and_copies_are_far_apart(pool: RankPool) -> None:
    found = pool.run(neighbours, 8, "zero=3 replicate=2 shard=2 tp=2", None)
    assert found[5] == {
        "pp": [5],
        "replicate": [1, 5],
        "shard": [5, 7],
        "cp": [5],
        "tp": [4, 5],
        "data": [1, 3, 5, 7],
        "loss": [1, 3, 5, 7],
        "state": [5, 7],
    }


def test_pipeline_is_outermost_and_context_lies_between_shard_and_tensor(pool: RankPool) -> None:
    found = pool.run(neighbours, 8, "zero=3 dp=2 pp=2 cp=2", None)
    assert found[2] == {
        "pp": [2, 6],
        "replicate": [2],
        "shard": [0, 2],
        "cp": [2, 3],
        "tp": [2],
        "data": [0, 2],
        "loss": [0, 1, 2, 3],
        "state": [0, 1, 2, 3],
    }


def test_experts_lie_on_the_innermost_data_ranks_and_their_copies_on_the_others(pool: RankPool) -> None:
    sharded = pool.run(neighbours, 8, "zero=2 dp=4 ep=2 cp=2", None)
    assert (sharded[3]["ep"], sharded[3]["expert_state"]) == ([1, 3], [2, 3, 6, 7])
    copied = pool.run(neighbours, 8, "zero=2 replicate=4 shard=2 ep=4", None)
    assert (copied[5]["ep"], copied[5]["expert_state"], copied[5]["copies"]) == ([4, 5, 6, 7], [5], [1, 5])


def test_order_of_ranks_comes_from_the_placement(pool: RankPool) -> None:
    found = pool.run(neighbours, 4, "dp=2 tp=2", [0, 2, 1, 3])
    assert found[0]["tp"] == found[2]["tp"] == [0, 2]
    assert found[3]["tp"] == [1, 3]
    assert found[3]["data"] == [2, 3]


def test_placement_that_is_no_order_of_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="is not an order of the 4 ranks"):
        make_mesh(Strategy.parse("dp=4", 4), "cpu", [0, 1, 1, 2])
    with pytest.raises(ValueError, match="descending order along tp"):
        make_mesh(Strategy.parse("dp=2 tp=2", 4), "cpu", [1, 0, 2, 3])
    # Along each of its axes ascending, but not along the one that is made of them.
    with pytest.raises(ValueError, match="descending order along data"):
        make_mesh(Strategy.parse("dp=4 zero=3 replicate=2", 4), "cpu", [0, 2, 1, 3])
