"""Forty random cases with fixed seeds, and by name each one that random cases ever found wrong."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from meshwright.models.spec import Experts, ModelSpec
from meshwright.verify.parity import Case, Prover
from tests.parity.fuzz import cases

SMALL = ModelSpec(
    vocab_size=9,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    max_position_embeddings=64,
)
EXPERTS = Experts(num_experts=4, num_experts_per_tok=1, moe_intermediate_size=8)
FOUND = {
    # Rows that tensor parallel cuts unevenly and that are sharded once more were filled with those of others.
    "uneven-rows-cut-twice": Case(SMALL, "dp=2 zero=2 tp=2 cp=2 sp=off", 8, micro_steps=1, batch=2, tokens=2, steps=3),
    "uneven-rows-cut-twice-with-experts": Case(
        SMALL.model_copy(update={"experts": EXPERTS}), "dp=4 zero=2 tp=2 ep=4", 8, batch=8, tokens=2, steps=3
    ),
    # Weights that are gathered inside of a layer made the repeated pass do other operations than the first.
    "selective-recompute-around-sharded-modules": Case(
        SMALL.model_copy(update={"num_hidden_layers": 2}),
        "dp=2 zero=2 recompute=selective wrap=size:100",
        2,
        batch=4,
        tokens=5,
        steps=3,
    ),
}
"""What was found, mended and must stay so."""


@pytest.mark.slow
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    # Shrinking takes many runs of ranks: `make fuzz` does it.
    phases=[Phase.generate],
)
@given(case=cases())
def test_random_models_under_random_strategies_compute_what_one_process_computes(case: Case, prover: Prover) -> None:
    assert prover.differences(case) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_what_random_cases_found_stays_mended(name: str, prover: Prover) -> None:
    assert prover.differences(FOUND[name]) == []
