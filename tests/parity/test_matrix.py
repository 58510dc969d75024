"""Every strategy computes what one process computes: ZeRO x tensor x sequence parallel x recompute x precision.

Float64 cases compare losses and gradient norms to 1e-9 and all final weights, after three steps of AdamW with clipping
and accumulation, five of one shape. A case is named by what it runs.
"""

from __future__ import annotations

from itertools import cycle

import pytest

from meshwright.strategy import Strategy
from meshwright.verify.parity import Case, Prover
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS


def ranks_of(strategy: str) -> int:
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    return ranks


def crossed() -> list[tuple[str, str, int]]:
    """Every ZeRO stage with every tensor-parallel degree; shapes, recompute and micro-steps take turns."""
    shapes, recompute, micro_steps = cycle(SPECS), cycle(["none", "full", "selective", "first:1"]), cycle([2, 1, 4])
    cases = []
    for zero in range(4):
        for split in ("", "tp=2", "tp=2 sp=off", "tp=4", "tp=4 sp=off"):
            wrap = "wrap=block" if zero >= 2 else ""
            strategy = f"dp=2 zero={zero} {split} recompute={next(recompute)} {wrap}"
            cases.append((next(shapes), strategy, next(micro_steps)))
    return cases


TOGETHER = [
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=2",
    "dp=2 zero=3 wrap=block",
    "dp=1 tp=2",
    "dp=1 tp=4",
    "dp=1 tp=4 sp=off",
]
HYBRID = [f"dp=4 zero={zero} replicate=2 {tp}" for zero in (1, 2, 3) for tp in ("", "tp=2")]
APART = [
    "dp=2 offload=optimizer",
    "dp=1 offload=optimizer",
    "dp=2 zero=1 tp=2 offload=optimizer",
    "dp=2 zero=2 offload=parameters",
    "dp=2 zero=3 tp=2 offload=parameters recompute=full",
    "dp=2 zero=3 wrap=size:3000",
    "dp=2 zero=3 wrap=name:self_attn+mlp+embed_tokens",
    "dp=2 zero=2 tp=2 wrap=name:self_attn+mlp+embed_tokens+lm_head",
    "dp=3 zero=3",
    "dp=1 tp=8",
    "dp=8 zero=1",
]

FLOAT64 = [
    *crossed(),
    *((shape, strategy, 2) for strategy in TOGETHER for shape in SPECS),
    *((shape, strategy, 2) for shape, strategy in zip(cycle(SPECS), HYBRID, strict=False)),
    *((shape, strategy, 1) for shape, strategy in zip(cycle(["tied", "gqa", "experts", "gpt"]), APART, strict=False)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy", "micro_steps"), FLOAT64)
def test_float64_equals_one_process(shape: str, strategy: str, micro_steps: int, prover: Prover) -> None:
    ranks = ranks_of(strategy)
    batch = 24 if "dp=3" in strategy else 8
    steps = 5 if shape == "gqa" else 3
    case = Case(SPECS[shape], strategy, ranks, micro_steps=micro_steps, batch=batch, steps=steps)
    assert prover.differences(case) == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("shape", "strategy"),
    [
        ("gqa", "dp=2"),
        ("tied", "dp=2 zero=1"),
        ("gpt", "dp=2 zero=2 recompute=full"),
        ("few-kv", "dp=4 zero=3 replicate=2"),
        ("gqa", "dp=1 tp=2"),
        ("tied", "dp=2 tp=2 sp=off recompute=selective"),
        ("few-kv", "dp=2 zero=1 tp=2"),
        ("gqa", "dp=2 zero=3 tp=2 offload=parameters"),
    ],
)
def test_narrow_precision_equals_one_process(shape: str, strategy: str, precision: str, prover: Prover) -> None:
    case = Case(SPECS[shape], strategy, ranks_of(strategy), precision)
    assert prover.differences(case) == []


AGREEING = [
    ("few-kv", "dp=2 zero=3 tp=2 recompute=full"),
    ("gpt", "dp=4 zero=2 replicate=2 tp=2 sp=off"),
    ("experts", "dp=2 zero=1 tp=2 ep=2 recompute=selective"),
    ("tied", "dp=2 pp=2 cp=2 zero=2 schedule=zbv"),
    ("experts", "dp=2 pp=2 tp=2 ep=2 schedule=interleaved:2"),
    ("gqa", "dp=2 cp=4 cp_method=ulysses:2 zero=3"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy"), AGREEING)
def test_ranks_agree_on_every_collective(shape: str, strategy: str) -> None:
    """With torch's checks of what passes through process groups, which ends a disagreement in an error."""
    spec = SPECS[shape].model_copy(update={"num_hidden_layers": 4})
    with RankPool(8, checked=True) as pool:
        assert Prover(pool).differences(Case(spec, strategy, ranks_of(strategy), steps=2)) == []
