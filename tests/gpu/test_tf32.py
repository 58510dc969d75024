"""TF32 on a GPU: products of a step are in it, those of others are not, and losses stay those of float32."""

from __future__ import annotations

import torch

from meshwright.parallel.world import World
from meshwright.training.tf32 import tf32_products
from meshwright.verify.parity import run_case
from tests.gpu.cases import case_of


def error_of_a_product() -> float:
    draw = torch.Generator("cuda").manual_seed(1)
    one, other = (torch.randn(512, 512, device="cuda", generator=draw) for _ in range(2))
    exact = one.double() @ other.double()
    return float(((one @ other).double() - exact).norm() / exact.norm())


def test_products_are_in_tf32_inside_and_in_float32_again_after_it() -> None:
    before = error_of_a_product()
    with tf32_products(True):
        inside = error_of_a_product()
    assert before < 1e-5
    assert 1e-5 < inside < 1e-2
    assert error_of_a_product() == before


def numbers_of(precision: str) -> list[float]:
    trace = run_case(World(device=torch.device("cuda")), case_of("dense", "dp=1", precision))
    return [*trace.losses, *trace.norms]


def test_losses_in_tf32_are_those_of_float32_but_for_its_rounding() -> None:
    exact, narrow, coarse = map(numbers_of, ("float32", "tf32", "bf16"))
    offs = [[abs(ours / theirs - 1) for ours, theirs in zip(found, exact, strict=True)] for found in (narrow, coarse)]
    assert 0 < offs[0][0] < 1e-3
    # Updates carry it on; of bf16, which reads three bits less, more.
    assert max(offs[0]) < 0.5 * max(offs[1])
