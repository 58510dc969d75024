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


def test_losses_in_tf32_are_those_of_float32_but_for_its_rounding() -> None:
    world = World(device=torch.device("cuda"))
    wide = run_case(world, case_of("dense", "dp=1", "float32"))
    narrow = run_case(world, case_of("dense", "dp=1", "tf32"))
    assert narrow.losses != wide.losses
    for ours, theirs in zip(narrow.losses + narrow.norms, wide.losses + wide.norms, strict=True):
        assert abs(ours - theirs) <= 5e-3 * theirs
