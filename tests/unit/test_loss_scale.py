"""Loss scaling: hand-computed sequences of scales, and that a checkpoint continues them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.config import PrecisionSection
from meshwright.training.loss_scale import LossScale


def dynamic(**settings: float) -> LossScale:
    return LossScale(PrecisionSection(**settings), active=True)


def scales_after(scale: LossScale, steps: str) -> list[float]:
    """The scale after each step: `x` one whose norm is no number, `.` one that goes well."""
    scales = []
    for step in steps:
        norm = torch.tensor(1.5 if step == "." else math.inf)
        assert scale.accept(norm) == (step == "."), "a step is skipped when its norm is no number"
        scales.append(scale.value)
    return scales


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        # The first overflow keeps the scale, the second halves it, and so does each further one.
        ({}, "xxxx", [65536, 32768, 16384, 8192]),
        ({}, "x.x.x", [65536, 65536, 32768, 32768, 16384]),
        ({"hysteresis": 1}, "xx", [32768, 16384]),
        ({"hysteresis": 3}, "xxxx", [65536, 65536, 32768, 16384]),
        ({"initial_power": 3}, "xxx", [8, 4, 2]),
        ({"initial_power": 0}, "..x", [1, 1, 1]),
        # A window of good steps doubles it; an overflow starts the window anew.
        ({"window": 3}, "......", [65536, 65536, 131072, 131072, 131072, 262144]),
        ({"window": 3}, "..x...", [65536, 65536, 65536, 65536, 65536, 131072]),
        ({"window": 1}, "...", [131072, 262144, 524288]),
        # Doubling restores the patience; good steps alone do not.
        ({"window": 2}, "x..xx", [65536, 65536, 131072, 131072, 65536]),
        ({"window": 3}, "x..xx", [65536, 65536, 65536, 32768, 16384]),
        ({"window": 2}, "xxx..xx", [65536, 32768, 16384, 16384, 32768, 32768, 16384]),
        # It never falls below the minimum.
        ({"initial_power": 2}, "xxxxx", [4, 2, 1, 1, 1]),
        ({"initial_power": 3, "minimum": 3}, "xxxxx", [8, 4, 3, 3, 3]),
    ],
)
def test_dynamic_scale_goes_the_way_computed_by_hand(
    settings: dict[str, float], steps: str, expected: list[float]
) -> None:
    assert scales_after(dynamic(**settings), steps) == expected


def test_dynamic_scale_starts_at_the_sixteenth_power_and_doubles_after_a_thousand_steps() -> None:
    scale = dynamic()
    assert scale.value == 65536
    assert scales_after(scale, "." * 1000)[-2:] == [65536, 131072]


@pytest.mark.parametrize("norm", [math.inf, -math.inf, math.nan])
def test_every_kind_of_overflow_skips_the_step(norm: float) -> None:
    scale = dynamic(hysteresis=1)
    assert not scale.accept(torch.tensor(norm))
    assert scale.value == 32768


@given(st.text("x.", max_size=40), st.text("x.", max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_a_checkpoint_continues_the_same_sequence(before: str, after: str, window: int, hysteresis: int) -> None:
    settings = {"window": window, "hysteresis": hysteresis, "initial_power": 5}
    scale, resumed = dynamic(**settings), dynamic(**settings)
    scales_after(scale, before)
    # As it goes through a manifest.
    resumed.restore(json.loads(json.dumps(scale.state())))
    assert resumed.value == scale.value
    assert scales_after(resumed, after) == scales_after(scale, after)


def test_a_checkpoint_without_a_scale_starts_anew() -> None:
    scale = dynamic()
    scale.restore({"tokens": 5})
    assert scales_after(scale, "xx") == [65536, 32768]


def test_static_scale_never_moves_and_still_skips() -> None:
    scale = dynamic(loss_scale=128.0, window=1, hysteresis=1)
    assert scale.value == 128
    assert scales_after(scale, "..xxx..x.") == [128] * 9
    assert scale.state() == {}
    scale.restore(dynamic().state())
    assert scale.value == 128


def test_without_fp16_every_step_is_taken_and_the_scale_is_one() -> None:
    for loss_scale in ("dynamic", 128.0):
        scale = LossScale(PrecisionSection(loss_scale=loss_scale, window=1), active=False)
        for norm in (1.0, math.inf, math.nan, 1.0):
            assert scale.accept(torch.tensor(norm))
            assert scale.value == 1
        assert scale.state() == {}
        scale.restore(dynamic().state())
        assert scale.value == 1


def test_a_skipped_step_is_final_once_the_scale_cannot_shrink() -> None:
    scale = dynamic(initial_power=1, hysteresis=1)
    assert not scale.exhausted
    scales_after(scale, "x")
    assert scale.exhausted
    assert dynamic(loss_scale=128.0).exhausted
    assert LossScale(PrecisionSection(), active=False).exhausted
    patient = dynamic(initial_power=5, minimum=16)
    assert [patient.exhausted, *scales_after(patient, "xx"), patient.exhausted] == [False, 32, 16, True]
