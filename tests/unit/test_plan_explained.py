"""A plan in words: sizes in units that say something, shares that are shares."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from meshwright.cluster.cluster import parse_cluster
from meshwright.models.presets import preset
from meshwright.planning.answer import plan
from meshwright.planning.explain import fewer_chips, model_states, time_goes_into


@pytest.mark.parametrize(
    ("name", "said"),
    [("demo", "3.09M parameters; in float32 12.4 MB"), ("llama2-7b", "6.74B parameters; in float32 27.0 GB")],
)
def test_states_of_small_and_large_models_are_told_in_units_that_say_something(name: str, said: str) -> None:
    made = plan(preset(name), parse_cluster("8xa100"), sequence_length=128, global_batch=8)
    assert said in model_states(made)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_shares_of_a_step_are_of_a_whole_where_runs_were_faster_or_slower(factor: float) -> None:
    best = plan(preset("demo"), parse_cluster("8xa100"), sequence_length=128, global_batch=8).candidates[0]
    corrected = replace(best, parts=replace(best.parts, correction=(factor - 1) * best.step_s))
    assert corrected.step_s == pytest.approx(factor * best.step_s)
    said, _, less = time_goes_into(corrected).partition("; runs here took ")
    shares = [float(number) for number in re.findall(r"([\d.]+)%", said)]
    assert 97 < sum(shares) <= 100.3
    assert less == ("20.0% less in all" if factor < 1 else "")


@pytest.mark.parametrize(
    ("share", "said"),
    [(-1e-5, "as many GPU-hours: as efficient"), (0.012, "+1.2% GPU-hours: as efficient"), (-0.3, "-30.0% GPU-hours")],
)
def test_hours_of_fewer_chips_are_as_many_where_no_digit_tells_them_apart(share: float, said: str) -> None:
    best = plan(preset("demo"), parse_cluster("8xa100"), sequence_length=128, global_batch=8).candidates[0]
    scaled = replace(best, parts=replace(best.parts, correction=share * best.step_s))
    assert said in fewer_chips(best, scaled)
