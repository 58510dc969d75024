"""Axes in any order over the ranks give what one process computes, and the groups that the order says."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from meshwright.axis_order import AXES, is_plain, orders, ranks_in_mesh_order, short
from meshwright.estimate.units import Place
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.parity import Case, Prover
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS


def others(text: str, ranks: int) -> list[tuple[str, int, str]]:
    """A strategy under every order of its axes but the usual one."""
    strategy = Strategy.parse(text, ranks)
    return [(text, ranks, short(order, strategy)) for order in orders(strategy) if not is_plain(order, strategy)]


@pytest.mark.parametrize(
    ("strategy", "ranks", "placement"),
    [
        *others("dp=2 tp=2", 4),
        *others("dp=2 zero=3 tp=2", 4),
        *others("dp=2 zero=1 tp=2", 4),
        *others("cp=2 tp=2", 4),
        *others("pp=2 tp=2", 4),
        *others("dp=2 zero=2 pp=2", 4),
        *others("pp=2 cp=2 schedule=interleaved:2 layers=1+1+1+1", 4),
        ("dp=4 zero=3 replicate=2 tp=2", 8, "replicate,tp,shard"),
        ("dp=4 zero=3 replicate=2 tp=2", 8, "tp,dp"),
        ("dp=2 zero=3 cp=2 tp=2", 8, "tp,dp,cp"),
        ("dp=2 zero=3 cp=2 tp=2", 8, "dp,tp,cp"),
        ("dp=2 zero=1 pp=2 tp=2", 8, "dp,tp,pp"),
        ("dp=2 zero=1 pp=2 tp=2", 8, "tp,dp,pp"),
    ],
)
def test_every_order_trains_as_one_process_does(strategy: str, ranks: int, placement: str, prover: Prover) -> None:
    spec = SPECS["tied"].model_copy(update={"num_hidden_layers": 4}) if "pp" in strategy else SPECS["gqa"]
    case = Case(spec, strategy, ranks, batch=8, settings={"parallel": {"placement": placement}})
    assert prover.differences(case) == []


@pytest.mark.parametrize(
    ("strategy", "ranks", "placement"),
    [
        *others("dp=2 zero=2 ep=2 tp=2", 4),
        *others("dp=2 ep=2 pp=2", 4),
        ("dp=4 zero=2 replicate=2 ep=4 tp=2", 8, "tp,dp"),
        ("dp=4 zero=2 ep=2 tp=2", 8, "tp,dp"),
        ("dp=2 zero=2 ep=2 cp=2 pp=2", 8, "dp,cp,pp"),
    ],
)
def test_experts_lie_where_the_order_says(strategy: str, ranks: int, placement: str, prover: Prover) -> None:
    case = Case(SPECS["experts"], strategy, ranks, batch=8, settings={"parallel": {"placement": placement}})
    assert prover.differences(case) == []


def place_on(world: World, text: str, order: tuple[str, ...]) -> tuple[Place, bool]:
    """Where this rank is, and whether its number in every group is its place there."""
    strategy = Strategy.parse(text, world.size)
    mesh = make_mesh(strategy, "cpu", ranks_in_mesh_order(order, strategy))
    groups = [mesh[axis] for axis in AXES] + [mesh.data, mesh.loss, mesh.state]
    if mesh.experts is not None:
        groups += [mesh.experts["ep"], mesh.experts.copies, mesh.experts.state]
    agree = all(dist.get_rank(one.get_group()) == one.get_local_rank() for one in groups)
    return Place(**{axis: mesh[axis].get_local_rank() for axis in AXES}), agree


@pytest.mark.parametrize(
    "text", ["dp=4 zero=3 replicate=2 tp=2", "dp=2 zero=2 ep=2 pp=2 cp=2", "dp=4 zero=1 ep=2 pp=2"]
)
def test_places_follow_the_order_and_groups_number_their_members_so(text: str, pool: RankPool) -> None:
    strategy = Strategy.parse(text, 8)
    for order in orders(strategy):
        found = pool.run(place_on, 8, text, order)
        assert [place for place, _ in found] == [Place.of(strategy, rank, order) for rank in range(8)], order
        assert all(agree for _, agree in found), order
