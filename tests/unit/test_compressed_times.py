"""Plans price what really carries compressed gradients: exchanges and gathers where there is no sum."""

from __future__ import annotations

import pytest

from meshwright.axis_order import AXES
from meshwright.cluster.cluster import parse_cluster
from meshwright.cluster.fabric import fabric_of
from meshwright.comm.compression import Compression
from meshwright.models.presets import preset
from meshwright.models.shapes import shapes_of
from meshwright.planning.axis_traffic import axis_traffic
from meshwright.planning.link_loads import link_loads
from meshwright.planning.links import group_of
from meshwright.planning.measured import operations_of
from meshwright.planning.question import Question
from meshwright.planning.scenario import Layout
from meshwright.planning.state_times import StateTimes
from meshwright.strategy import Strategy

SPEC = preset("llama3.2-1b")
SIZES = list(shapes_of(SPEC).values())
KINDS = ("fp16", "int8", "powersgd:4", "topk:0.01")


@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_messages_send_what_is_counted(kind: str, ranks: int) -> None:
    how = Compression.parse(kind)
    found = how.messages(SIZES, ranks)
    wanted = {"int8": ["all_to_all", "all_gather"], "topk:0.01": ["all_gather"], "powersgd:4": ["all_reduce"] * 2}
    assert [one.operation for one in found] == wanted.get(kind, ["all_reduce"])
    assert sum(one.sent(ranks) for one in found) == how.sent(SIZES, ranks)


def question(ranks: int = 16, model: str = "llama3.2-1b") -> Question:
    return Question(preset(model), parse_cluster(f"{ranks}xh100"), 2048, 64)


@pytest.mark.parametrize("kind", KINDS)
def test_traffic_is_what_ranks_send(kind: str) -> None:
    asked = question()
    found = axis_traffic(asked.scenario(Strategy.parse(f"dp=16 compress={kind}", 16), 4), asked.known)
    assert sum(one.size for one in found) == pytest.approx(Compression.parse(kind).sent(SIZES, 16), rel=1e-6)
    assert [(one.axis, one.kind) for one in found] == [
        ("loss", "ring"), *([("loss", "exchange")] if kind == "int8" else []),
    ]  # fmt: skip


def test_an_exchange_between_machines_loads_their_links_by_all_their_ranks() -> None:
    # By hand: each of 8 ranks sends 8 of its 16 parts to the other machine, and the last of the ring all but its own.
    asked, strategy = question(), Strategy.parse("dp=16 compress=int8", 16)
    found = axis_traffic(asked.scenario(strategy, 4), asked.known)
    ring, exchange = link_loads(strategy, AXES, found, fabric_of(asked.cluster, ["a", "b"], [8, 8]))
    codes = Compression.parse("int8").messages(SIZES, 16)[0].size
    assert exchange.uplink == pytest.approx(8 * codes / 2, rel=1e-6)
    assert ring.uplink == pytest.approx(codes * 15 / 16, rel=1e-6)


def test_time_is_that_of_the_collectives() -> None:
    asked = question()
    scenario = asked.scenario(Strategy.parse("dp=16 compress=int8", 16), 4)
    operations = operations_of(scenario, asked.known)
    links, group = operations.links, group_of(asked.cluster, 16, 1)
    codes = Compression.parse("int8").messages(SIZES, 16)[0].size
    by_hand = links.exchange(group, codes) + links.half(group, codes)
    assert StateTimes(scenario, operations)._compressed(group, 0.0) == pytest.approx(by_hand)
    # Several ranks of a machine share what a sum sends out of it; what goes from each to each they do not share.
    assert by_hand > 1.5 * links.all_reduce(group, codes)


def test_experts_are_compressed_once() -> None:
    asked = question(model="tiny-moe")
    how, shapes = Compression.parse("int8"), list(shapes_of(asked.spec).values())
    found = axis_traffic(asked.scenario(Layout.of(Strategy.parse("dp=16 compress=int8", 16)), 1), asked.known)
    assert sum(one.size for one in found) == pytest.approx(how.sent(shapes, 16), rel=1e-6)
