"""Strategies with activations in host memory compute what one process computes, layers compiled or not."""

from __future__ import annotations

import pytest

from meshwright.strategy import Strategy
from meshwright.verify.parity import Case, Prover
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS
from tests.parity.test_compile import Uncompiled, compiled_case

pytestmark = pytest.mark.slow

CASES = [
    ("gqa", "dp=1 offload=activations"),
    ("tied", "dp=2 recompute=full offload=activations"),
    ("gpt", "dp=2 zero=1 recompute=selective offload=optimizer+activations"),
    ("gqa", "dp=2 zero=3 offload=parameters+activations"),
    ("few-kv", "dp=4 zero=3 replicate=2 recompute=full wrap=name:self_attn+mlp offload=activations"),
    ("gqa", "dp=2 zero=3 tp=2 offload=activations"),
    ("tied", "dp=1 tp=2 sp=off recompute=first:2 offload=activations"),
    ("gqa", "dp=1 cp=2 recompute=selective offload=activations"),
    ("gqa", "dp=1 cp=4 cp_method=ulysses:2 offload=activations"),
    ("tied", "dp=1 pp=2 schedule=gpipe offload=activations"),
    ("gqa", "dp=2 pp=2 recompute=full offload=activations"),
    ("gpt", "dp=2 pp=2 zero=3 schedule=interleaved:2 recompute=first:3 offload=optimizer+activations"),
    ("experts", "dp=2 ep=2 zero=1 recompute=selective offload=activations"),
    ("experts", "dp=4 ep=2 zero=3 offload=activations"),
    ("experts", "dp=2 shares=3+1 recompute=full offload=activations"),
]


def case_of(shape: str, strategy: str, precision: str = "float64", setting: str = "off") -> Case:
    spec = SPECS[shape].model_copy(update={"num_hidden_layers": 4})
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    settings = {"train": {"compile": setting}}
    return Case(spec, strategy, ranks, precision, micro_steps=2, batch=16, settings=settings)


@pytest.mark.parametrize(("shape", "strategy"), CASES)
def test_activations_in_host_memory_change_nothing(shape: str, strategy: str, prover: Prover) -> None:
    assert prover.differences(case_of(shape, strategy)) == []


@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        ("gqa", "dp=2 zero=3 offload=activations"),
        ("gqa", "dp=1 pp=2 recompute=full offload=activations"),
    ],
)
def test_nor_do_those_of_compiled_layers(shape: str, strategy: str, pool: RankPool) -> None:
    case = case_of(shape, strategy, "float32", "on")
    assert Uncompiled(pool).differences(case, run=compiled_case) == []
