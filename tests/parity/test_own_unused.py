"""Parameters and layers that some samples use, or none, in a loop of one's own: as on one device, or told by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.launch.local import RankError
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool
from tests.parity.own_loops import (
    Branches,
    Skips,
    assert_same,
    images,
    loss_of,
    train,
    train_plainly,
)


@pytest.mark.parametrize("together", [None, 100])
@pytest.mark.parametrize(
    "strategy", ["dp=2 zero=2", "dp=2 zero=3", "dp=2 zero=3 recompute=full", "dp=4 zero=3 replicate=2"]
)
def test_layers_that_some_samples_leave_out(strategy: str, together: int | None, pool: RankPool) -> None:
    """Gathered one by one, or two at a time."""
    wrap = " wrap=block" if together is None else ""
    (expected,) = pool.run(train_plainly, 1, "skips", 2)
    ranks = mw.Strategy.fewest_processes(strategy)
    for found in pool.run(train, ranks, "skips", strategy + wrap, 2, 22, 8, False, together):
        assert_same(found, expected)


@pytest.mark.parametrize("kind", ["branches", "skips"])
def test_samples_decide_what_is_used_in_these_cases(kind: str, pool: RankPool) -> None:
    one, other = (trace.chosen for trace in pool.run(train, 2, kind, "dp=2"))
    assert (True, False) in zip(one, other, strict=True) or (False, True) in zip(one, other, strict=True)
    assert (False, False) in zip(one, other, strict=True)


class Promising(Branches):
    uses_all_parameters = True


class PromisingLayers(Skips):
    uses_all_parameters = True


def break_a_promise(world: World, kind: type[nn.Module], strategy: str) -> None:
    torch.manual_seed(0)
    parallel = mw.parallelize(kind().double(), strategy)
    rows = [one[parallel.data_rank :: parallel.strategy.dp] for one in images(8).tensors]
    parallel.backward(loss_of, *rows, micro_steps=2)


def told_of_a_promise(world: World, strategy: str) -> str:
    with pytest.raises(ConfigError) as caught:
        break_a_promise(world, Promising, strategy)
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", "dp=2 tp=2"])
def test_parameter_without_a_gradient_is_named_where_none_was_promised(strategy: str, pool: RankPool) -> None:
    told = pool.run(told_of_a_promise, mw.Strategy.fewest_processes(strategy), strategy)
    # Ranks lack other ones: some samples use `rare`, none `never`.
    assert {one.split(" ")[0] for one in told} == {"rare.weight", "never.weight"}
    assert all("got no gradient in this step, and its model promises `uses_all_parameters`" in one for one in told)


@pytest.mark.parametrize("strategy", ["dp=2 zero=2 wrap=block", "dp=2 zero=3 wrap=block"])
def test_layer_that_a_rank_leaves_out_in_spite_of_a_promise_is_named(strategy: str, pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"blocks\.\d\.weight got no gradient in this step"):
        pool.run(break_a_promise, 2, PromisingLayers, strategy)
