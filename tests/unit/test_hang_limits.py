"""How long a rank may stay in a phase."""

from __future__ import annotations

import pytest

from meshwright.config import RunConfig
from meshwright.elastic.limits import STEPS_TO_LEARN, Limits
from meshwright.elastic.watch_settings import WatchSettings
from meshwright.pulse import PHASES, Beat

LIMITS = Limits(first_s=600, factor=5, floor_s=60)


def beat(phase: str, ended: int, longest: float = 0.0) -> Beat:
    return Beat(1, 1, phase, 1, 0.0, ended={phase: ended}, longest={phase: longest})


@pytest.mark.parametrize("phase", PHASES)
def test_limit_is_long_as_long_as_nothing_is_known(phase: str) -> None:
    assert LIMITS.of(beat(phase, 0)) == 600


@pytest.mark.parametrize("ended", range(STEPS_TO_LEARN))
def test_first_steps_compile_and_teach_nothing(ended: int) -> None:
    assert LIMITS.of(beat("forward", ended, 0.1)) == 600


def test_limit_is_learned_from_the_longest(  # A model whose steps take minutes needs more than one of milliseconds.
) -> None:
    assert LIMITS.of(beat("forward", STEPS_TO_LEARN, 0.1)) == pytest.approx(60.5)
    assert LIMITS.of(beat("forward", STEPS_TO_LEARN, 100)) == pytest.approx(560)
    assert LIMITS.of(beat("backward", 1000, 300)) == pytest.approx(1560)


@pytest.mark.parametrize("phase", ["evaluate", "stage", "write", "commit", "retention"])
def test_one_evaluation_or_save_is_enough_to_learn_from(phase: str) -> None:
    assert LIMITS.of(beat(phase, 1, 20)) == pytest.approx(160)


@pytest.mark.parametrize("phase", ["start", "restore", "end"])
def test_what_happens_once_teaches_nothing(phase: str) -> None:
    assert LIMITS.of(beat(phase, 5, 1)) == 600


def test_words_name_the_settings() -> None:
    assert "elastic.first_timeout_s" in LIMITS.in_words(beat("forward", 0))
    words = LIMITS.in_words(beat("forward", 10, 2))
    assert "70 s" in words
    assert "elastic.hang_factor=5" in words
    assert "elastic.hang_floor_s=60" in words


def test_defaults_are_those_of_the_settings() -> None:
    elastic = RunConfig().elastic
    defaults = WatchSettings()
    assert {name: getattr(elastic, name) for name in vars(defaults)} == vars(defaults)
    assert defaults.limits == Limits()
