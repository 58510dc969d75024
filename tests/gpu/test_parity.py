"""Strategies on up to four ranks that share one GPU compute what one rank does, on the GPU's own kernels.

Float64 is compared as on CPUs: losses and gradient norms to 1e-9, and all final weights, after three steps of AdamW
with clipping and four micro-batches. PyTorch has no fused attention in float64, and takes matrix products there.

The narrow precisions take the kernels that training takes. Their bounds are on relative differences of losses, which
are means over some 250 tokens, and in float32 of gradient norms too. Sums of float32 in another order move losses by
some 1e-7; what AdamW divides by small roots makes that 1e-5 in the norms of later steps. bf16 and fp16 round every
activation to 8 and 11 bits; a mean over so many tokens stays within one unit of the last.
"""

from __future__ import annotations

import pytest

from meshwright.verify.parity import Prover
from tests.gpu.cases import DOCUMENTS, FLOAT64, NARROW, case_of

BOUNDS = {"float32": 1e-4, "bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.mark.parametrize(("shape", "strategy"), FLOAT64)
def test_float64_equals_one_rank(shape: str, strategy: str, prover: Prover) -> None:
    assert prover.differences(case_of(shape, strategy)) == []


@pytest.mark.parametrize(("shape", "strategy", "precision"), NARROW)
def test_narrow_precision_equals_one_rank(shape: str, strategy: str, precision: str, prover: Prover) -> None:
    assert prover.differences(case_of(shape, strategy, precision), BOUNDS[precision]) == []


@pytest.mark.parametrize("strategy", ["dp=1 cp=2", "dp=1 cp=4 cp_method=ulysses:2"])
@pytest.mark.parametrize("precision", ["float64", "bf16"])
def test_documents_are_kept_apart_where_sequences_are_split(strategy: str, precision: str, prover: Prover) -> None:
    case = case_of("short documents", strategy, precision, settings=DOCUMENTS)
    assert prover.differences(case, BOUNDS.get(precision)) == []
