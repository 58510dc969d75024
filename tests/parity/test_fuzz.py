"""Forty random cases with fixed seeds, and by name each one that random cases ever found wrong."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from meshwright.verify.parity import Case, Prover
from tests.parity.fuzz import cases

FOUND: dict[str, Case] = {}
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
