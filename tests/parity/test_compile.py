"""Compiled layers under every kind of split: they compute what one process does, share a graph, tell their breaks."""

from __future__ import annotations

import pytest
import torch

from meshwright.parallel import compile
from meshwright.parallel.world import World
from meshwright.verify.parity import Case, Prover, Trace, run_case
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS

pytestmark = pytest.mark.slow
LAYERS = 4


def case_of(shape: str, strategy: str, setting: str = "on") -> Case:
    spec = SPECS[shape].model_copy(update={"num_hidden_layers": LAYERS})
    return Case(spec, strategy, 2, "float32", micro_steps=2, settings={"train": {"compile": setting}})


def compiled_case(world: World, case: Case) -> Trace:
    """By a compiler that takes graphs as the real one does, and runs them as they are: in seconds, not in minutes."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    real = compile._compiled
    compile._compiled = lambda forward, _: real(forward, "aot_eager")
    try:
        return run_case(world, case)
    finally:
        compile._compiled = real


def graphs_and_breaks(world: World, case: Case) -> tuple[int, dict[str, int]]:
    from torch._dynamo.utils import counters

    compiled_case(world, case)
    return int(counters["stats"]["unique_graphs"]), compile.breaks()


class Uncompiled(Prover):
    """Compares with one process that compiles nothing."""

    def reference(self, case: Case) -> Trace:
        return super().reference(Case(**{**vars(case), "settings": {"train": {"compile": "off"}}}))


@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        ("gqa", "dp=2"),
        ("gqa", "dp=2 zero=3"),
        ("gqa", "dp=1 tp=2"),
        ("gpt", "dp=1 tp=2"),
        ("gqa", "dp=1 pp=2"),
        ("gqa", "dp=1 cp=2"),
        ("gqa", "dp=1 cp=2 cp_method=ulysses"),
        ("experts", "dp=2 ep=2"),
        ("gqa", "dp=2 zero=3 recompute=full"),
        ("gqa", "dp=1 tp=2 recompute=selective"),
    ],
)
def test_compiled_layers_compute_what_one_process_does(shape: str, strategy: str, pool: RankPool) -> None:
    assert Uncompiled(pool).differences(case_of(shape, strategy), run=compiled_case) == []


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 zero=3", "dp=1 tp=2", "dp=1 tp=2 sp=off", "dp=1 pp=2"])
def test_layers_share_one_graph_in_one_piece(strategy: str, pool: RankPool) -> None:
    assert pool.run(graphs_and_breaks, 2, case_of("gqa", strategy)) == [(1, {})] * 2


def test_attention_over_ranks_is_left_out_and_said_to_be(pool: RankPool) -> None:
    for _, breaks in pool.run(graphs_and_breaks, 2, case_of("gqa", "dp=1 cp=2")):
        assert any("disable" in reason for reason in breaks), breaks
