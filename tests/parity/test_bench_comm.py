"""Collectives that are measured are checked: all right on real ranks, and wrong ones are seen."""

from __future__ import annotations

import itertools
import json
import time

import pytest
import torch
import torch.distributed as dist

from meshwright.bench import comm_algorithms
from meshwright.bench.collectives import OPERATIONS, repeated
from meshwright.bench.comm import DTYPES, Asked, measure, places_of, seconds_of
from meshwright.comm.algorithms import ALGORITHMS
from meshwright.parallel.mesh import axes_of, make_mesh
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.live_memory import LiveMemory
from meshwright.verify.pool import RankPool


def count_wrong(world: World, count: int, spoil: bool) -> dict[str, int]:
    """Wrong elements of all operations and dtypes, over all ranks; `spoil` lets the last rank put in another number."""
    found = {}
    assert dist.group.WORLD is not None
    for name, kind in OPERATIONS.items():
        for dtype in DTYPES.values():
            one = kind(count, dtype, world.device, dist.group.WORLD)
            if spoil and world.rank == world.size - 1:
                one.given[0] += 1
            wrong = torch.tensor([float(one.wrong())])
            found[f"{name} {dtype}"] = int(world.sum(wrong))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_right_results_are_right(ranks: int, pool: RankPool) -> None:
    for found in pool.run(count_wrong, ranks, 12 * ranks, False):
        assert found == dict.fromkeys(found, 0)


def test_a_wrong_number_is_seen(pool: RankPool) -> None:
    (found, *_) = pool.run(count_wrong, 3, 36, True)
    # The first one's is broadcast.
    assert all(wrong > 0 for name, wrong in found.items() if not name.startswith("broadcast"))


def rows_of(world: World, asked: Asked, path: str) -> None:
    measure(asked, path, world)


def test_every_axis_is_measured_in_its_groups(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("comm") / "rows.json"
    asked = Asked(("all_reduce", "all_to_all"), (8, 4096), "dp=2 tp=2", calls=2, warm_up=1)
    pool.run(rows_of, 4, asked, str(path))
    found = json.loads(path.read_text())
    rows = found["rows"]
    assert (found["backend"], found["chip"]) == ("gloo", "cpu")
    assert {(row["inside"], row["node"]) for row in rows} == {(2, 4)}
    assert [(row["operation"], row["axis"], row["ranks"], row["groups"], row["bytes"]) for row in rows] == [
        (operation, axis, 2, 2, size)
        for operation in ("all_reduce", "all_to_all")
        for axis in ("tp", "dp")
        for size in (8, 4096)
    ]
    assert all(row["seconds"] > 0 and row["wrong"] == 0 for row in rows)


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [
        ("dp=4 zero=3", {"dp": [0, 1, 2, 3]}),
        ("replicate=2 shard=2 zero=3", {"dp": [0, 1, 2, 3], "replicate": [0, 2], "shard": [0, 1]}),
        ("dp=2 cp=2", {"cp": [0, 1], "dp": [0, 2], "loss": [0, 1, 2, 3]}),
        ("dp=4 ep=2", {"dp": [0, 1, 2, 3], "ep": [0, 1], "copies": [0, 2]}),
        ("dp=2 ep=2 cp=2", {"cp": [0, 1], "dp": [0, 2], "loss": [0, 1, 2, 3]}),
    ],
)
def test_all_groups_of_a_training_are_measured_once(strategy: str, axes: dict[str, list[int]], pool: RankPool) -> None:
    (first, *_) = pool.run(groups_of, 4, strategy)
    assert first == {axis: (ranks, 4 // len(ranks)) for axis, ranks in axes.items()}
    # What training names its groups by are the same ranks.
    assert {" ".join(map(str, ranks)) for ranks in axes.values()} == pool.run(groups_of_training, 4, strategy)[0]


def groups_of(world: World, strategy: str) -> dict[str, tuple[list[int], int]]:
    """The first rank's group of each axis, and how many groups there are of it."""
    found = places_of(Asked((), (), strategy), world)
    return {one.axis: (dist.get_process_group_ranks(one.group), one.groups) for one in found}


def groups_of_training(world: World, strategy: str) -> set[str]:
    mesh = make_mesh(Strategy.parse(strategy, world.size), world.device.type)
    return set(axes_of(mesh))


def algorithm_rows(world: World, asked: Asked, node_size: int | None, path: str) -> None:
    comm_algorithms.measure(asked, node_size, path, world)


@pytest.mark.parametrize("node_size", [None, 2])
def test_algorithms_send_what_they_should(
    node_size: int | None, pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("comm") / "rows.json"
    pool.run(algorithm_rows, 4, Asked(("all_reduce",), (8, 4000), None, calls=1, warm_up=1), node_size, str(path))
    rows = json.loads(path.read_text())["rows"]
    assert [row["algorithm"] for row in rows] == [comm_algorithms.BACKEND, *ALGORITHMS] * 2
    for row in rows:
        assert row["wrong"] == 0
        assert row["seconds"] > 0
        assert row["link"] == row["expected_link"]
        assert row["node_link"] == row["expected_node_link"]
        of_backend = row["algorithm"] == comm_algorithms.BACKEND
        assert (row["expected_s"] is None) == (row["link"] is None) == of_backend
        assert (row["node_link"] is None) == (of_backend or node_size is None)


def memory_of_checks(world: World, count: int) -> dict[str, tuple[float, int]]:
    """What a check takes beside what is given and made, as a share of its bytes; and if one wrong number is seen."""
    found = {}
    assert dist.group.WORLD is not None
    for name, kind in OPERATIONS.items():
        with LiveMemory() as making:
            one = kind(count, torch.float32, world.device, dist.group.WORLD)
        with LiveMemory() as checking:
            wrong = one.wrong()
        assert wrong == 0
        assert making.peak < 2.1 * 4 * count
        one.run = lambda one=one: one.made.copy_(  # type: ignore[method-assign, misc]
            torch.cat([repeated(part, len(one.made) // len(one.expected())) for part in one.expected()])
        )[-1].add_(1)
        found[name] = checking.peak / (4 * count), one.wrong()
    return found


def test_a_check_needs_little_memory_and_sees_the_last_number(pool: RankPool) -> None:
    for found in pool.run(memory_of_checks, 4, 1 << 21):
        for name, (share, wrong) in found.items():
            assert share < 0.25, name
            assert wrong == 1, name


def counted_calls(world: World, warm_up: int, calls: int) -> tuple[int, int]:
    made = []
    timed = seconds_of(lambda: made.append(1), Asked((), (), None, warm_up=warm_up, calls=calls), world)
    assert timed.seconds >= 0
    return len(made), timed.calls


@pytest.mark.parametrize(("warm_up", "calls"), [(0, 1), (5, 1), (2, 2), (0, 7), (1, 20)])
def test_as_many_calls_are_made_as_were_asked_for(warm_up: int, calls: int, pool: RankPool) -> None:
    assert pool.run(counted_calls, 2, warm_up, calls) == [(warm_up + calls, calls)] * 2


def time_calls(world: World, late: int | None) -> tuple[float, float, float | None]:
    """The time of a call, the mean and the quickest quarter's, of calls of 20 ms on the last rank, of which one may
    take 400. The first one is done with four calls at once, as one that only sends."""
    calls = itertools.count()

    def work() -> None:
        call = next(calls)
        if world.rank == world.size - 1:
            time.sleep(0.4 if call == late else 0.02)
        elif call % 4 == 3:
            time.sleep(0.08)

    timed = seconds_of(work, Asked((), (), None, warm_up=0, calls=16), world)
    return timed.seconds, timed.mean_s, timed.quick_s


@pytest.mark.alone
def test_a_call_takes_as_long_as_most_calls_do_until_all_ranks_are_done(pool: RankPool) -> None:
    for seconds, mean, quick in pool.run(time_calls, 2, None):
        assert seconds == pytest.approx(0.02, rel=0.3)
        assert mean == pytest.approx(0.02, rel=0.3)
        assert quick == pytest.approx(0.02, rel=0.3)
    for seconds, mean, _ in pool.run(time_calls, 2, 8):
        assert seconds == pytest.approx(0.02, rel=0.3)
        assert mean > 0.03
