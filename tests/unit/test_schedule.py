"""Learning-rate schedules against hand-computed values."""

from __future__ import annotations

import pytest

from meshwright.config import TrainSection
from meshwright.training.schedule import learning_rate


def rates(**settings: object) -> list[float]:
    train = TrainSection.model_validate({"steps": 10, "lr": 1.0, **settings})
    return [round(learning_rate(train, step), 6) for step in range(train.steps)]


def test_warm_up_rises_linearly_to_the_full_rate() -> None:
    assert rates(warmup_steps=4, schedule="constant") == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]


def test_linear_decays_to_the_lowest_rate_after_the_last_step() -> None:
    assert rates(schedule="linear", min_lr=0.5) == [1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55]


def test_cosine_is_halfway_in_the_middle_and_never_below_its_minimum() -> None:
    found = rates(schedule="cosine", min_lr=0.2, warmup_steps=2)
    assert found[2] == 1.0
    assert found[6] == pytest.approx(0.6)
    assert all(later < earlier for earlier, later in zip(found[2:], found[3:], strict=False))
    assert min(found) > 0.2


def test_wsd_is_stable_until_its_decay() -> None:
    assert rates(schedule="wsd", warmup_steps=2, decay_steps=4) == [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]


def test_a_longer_run_goes_on_at_the_lowest_rate() -> None:
    train = TrainSection(steps=10, lr=1.0, min_lr=0.1)
    assert learning_rate(train, 25) == pytest.approx(0.1)


def test_warm_up_starts_at_its_own_rate_and_may_rise_with_the_logarithm() -> None:
    assert rates(warmup_steps=4, warmup_lr=0.2, schedule="constant")[:5] == [0.4, 0.6, 0.8, 1.0, 1.0]
    assert rates(warmup_steps=4, warmup="log", schedule="constant")[:5] == [0.0, 0.5, 0.792481, 1.0, 1.0]
    assert rates(warmup_steps=1, warmup="log", schedule="constant")[:2] == [0.0, 1.0]


def test_schedule_may_end_before_or_after_the_run() -> None:
    assert rates(schedule="linear", schedule_steps=5, min_lr=0.5)[3:7] == [0.7, 0.6, 0.5, 0.5]
    assert rates(schedule="linear", schedule_steps=20)[9] == 0.55
    assert rates(schedule="wsd", schedule_steps=20)[9] == 1.0
