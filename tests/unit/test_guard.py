"""The verdict on a step: numbers, spikes, and the same after a resume."""

from __future__ import annotations

import json
import math
import random

import pytest

from meshwright.config import ElasticSection
from meshwright.training.guard import Guard, Verdict


def guard(**settings: object) -> Guard:
    return Guard(ElasticSection.model_validate(settings))


def falling(count: int, seed: int = 0) -> list[float]:
    """A loss that falls as losses do, with noise."""
    draw = random.Random(seed)
    return [3 + 3 * math.exp(-step / 40) + draw.gauss(0, 0.03) for step in range(count)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_number_is_never_learned_from_whatever_the_spikes_are_told_to_do(bad: float) -> None:
    for settings in ({}, {"spike": 6.0}, {"spike": 6.0, "spike_policy": "skip"}):
        judge = guard(**settings)
        assert judge.judge(bad, 1.0) == Verdict(nonfinite=True, learn=False)
        assert judge.judge(1.0, bad) == Verdict(nonfinite=True, learn=False)
        assert judge.judge(1.0, 1.0) == Verdict()
        assert len(judge.state().get("guard", {"losses": []})["losses"]) <= 1, "what is no number is not compared with"


def test_spikes_are_not_looked_for_unless_asked() -> None:
    judge = guard()
    assert all(judge.judge(loss, 1.0) == Verdict() for loss in [*falling(50), 1e6])
    assert judge.state() == {}


@pytest.mark.parametrize("policy", ["warn", "skip", "rollback"])
def test_a_loss_far_above_the_last_ones_is_a_spike_and_a_falling_one_is_not(policy: str) -> None:
    judge = guard(spike=6.0, spike_policy=policy)
    for loss in falling(200):
        assert not judge.judge(loss, 1.0).spike
    assert judge.judge(30.0, 1.0) == Verdict(spike=True, learn=policy != "skip")
    assert not judge.judge(3.0, 1.0).spike


def test_the_first_steps_have_nothing_to_be_compared_with() -> None:
    judge = guard(spike=6.0)
    assert [judge.judge(loss, 1.0).spike for loss in [*falling(15), 1e3]] == [False] * 16
    assert judge.judge(1e3, 1.0).spike


def test_spikes_do_not_move_what_they_are_compared_with_but_a_level_that_stays_does() -> None:
    judge = guard(spike=6.0, spike_window=32)
    for loss in falling(64):
        judge.judge(loss, 1.0)
    verdicts = [judge.judge(9.0 + step / 100, 1.0).spike for step in range(40)]
    assert all(verdicts[:15])
    assert not any(verdicts[20:])


def test_gradient_norms_have_a_threshold_of_their_own() -> None:
    draw = random.Random(1)
    judge = guard(spike_norm=6.0)
    for _ in range(40):
        assert not judge.judge(3.0, 1 + draw.gauss(0, 0.1)).spike
    assert not judge.judge(300.0, 1.0).spike
    assert judge.judge(3.0, 30.0).spike


def test_a_flat_loss_has_no_spikes_of_a_millionth() -> None:
    judge = guard(spike=6.0)
    assert not any(judge.judge(2.0, 1.0).spike for _ in range(40))
    assert not judge.judge(2.000002, 1.0).spike
    assert judge.judge(2.1, 1.0).spike


def test_a_checkpoint_continues_the_same_verdicts() -> None:
    losses = falling(60)
    for number in (20, 33, 50):
        losses[number] *= 4
    whole, resumed = guard(spike=4.0, spike_window=24), guard(spike=4.0, spike_window=24)
    expected = [whole.judge(loss, 1.0) for loss in losses]
    for cut in (5, 21, 40):
        first = guard(spike=4.0, spike_window=24)
        found = [first.judge(loss, 1.0) for loss in losses[:cut]]
        resumed.restore(json.loads(json.dumps(first.state())))
        assert found + [resumed.judge(loss, 1.0) for loss in losses[cut:]] == expected
    assert sum(verdict.spike for verdict in expected) == 3
