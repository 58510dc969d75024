"""What a run has seen of its machines leads to the strategy that is best on such machines, and to none without need."""

from __future__ import annotations

import pytest

from meshwright.cluster.cluster import parse_cluster
from meshwright.models.presets import preset
from meshwright.planning.links import group_of
from meshwright.planning.measured import operations_of
from meshwright.planning.question import Question, estimate
from meshwright.planning.retune import GAIN, LARGE, SMALL, Seen, as_seen, better
from meshwright.planning.search import search
from meshwright.strategy import Strategy
from meshwright.training.retune import tried_before

QUESTION = Question(preset("llama3.1-8b"), parse_cluster("16xh100"), 4096, 128)
NOW = Strategy.parse("dp=16 zero=3", 16)
MICRO_BATCH = 1


def seen(links: float = 1.0, slow: float = 1.0, step: float = 1.0) -> Seen:
    """What a run would see on machines with links and one rank that many times as slow."""
    operations = operations_of(QUESTION.scenario(NOW, MICRO_BATCH), QUESTION.known).links
    group = group_of(QUESTION.cluster, 16, 1)
    small = operations.all_reduce(group, SMALL)
    large = small + links * (operations.all_reduce(group, LARGE) - small)
    step_s = estimate(QUESTION, NOW, MICRO_BATCH).step_s * step
    return Seen(step_s, [1e-3] * 15 + [slow * 1e-3], small, large)


def test_machines_as_they_were_thought_to_be_change_little() -> None:
    machines = as_seen(QUESTION, NOW, MICRO_BATCH, seen())
    assert machines.nic == pytest.approx(QUESTION.cluster.nic)
    assert machines.chip.tflops["bf16"] == pytest.approx(QUESTION.cluster.chip.tflops["bf16"], rel=1e-6)
    assert not machines.groups


def test_slow_links_are_seen_and_avoided() -> None:
    machines = as_seen(QUESTION, NOW, MICRO_BATCH, seen(links=20, step=6))
    assert machines.nic == pytest.approx(QUESTION.cluster.nic / 20)
    found = better(QUESTION, NOW, MICRO_BATCH, seen(links=20, step=6), {})
    assert found is not None
    assert found.expected_s < (1 - GAIN) * found.now_s
    assert "links are 20.0 times as slow" in found.why
    assert found.strategy.world == 16


def test_a_slow_rank_is_seen() -> None:
    machines = as_seen(QUESTION, NOW, MICRO_BATCH, seen(slow=2, step=2))
    assert [group.gpus for group in machines.groups] == [15, 1]
    first, last = machines.groups
    assert first.chip.tflops["bf16"] == pytest.approx(2 * last.chip.tflops["bf16"])


def test_what_was_tried_counts_by_its_measured_time() -> None:
    now = seen()
    other = str(Strategy.parse("dp=16 zero=1", 16))
    faster = better(QUESTION, NOW, MICRO_BATCH, now, {(other, 1): now.step_s * 0.3})
    assert faster is not None
    assert (str(faster.strategy), faster.expected_s) == (other, now.step_s * 0.3)
    first = better(QUESTION, NOW, MICRO_BATCH, seen(links=20, step=6), {})
    assert first is not None
    slow = {(str(first.strategy), first.micro_batch): first.now_s * 2}
    again = better(QUESTION, NOW, MICRO_BATCH, seen(links=20, step=6), slow)
    assert again is None or (again.strategy, again.micro_batch) != (first.strategy, first.micro_batch)


def test_the_best_stays() -> None:
    best = search(QUESTION).best
    assert best is not None
    usual = seen()
    steady = Seen(best.step_s, [1e-3] * 16, usual.small_s, usual.large_s)
    assert better(QUESTION, best.strategy, best.micro_batch, steady, {}) is None


@pytest.mark.parametrize("tried", [None, 3, "abc", [1], [["dp=2", 1]], [["dp=2", None, 1.0]], [["dp=2", 1, "nan"]], {}])
def test_a_damaged_plan_has_tried_nothing(tried: object) -> None:
    assert tried_before({"tried": tried}) == {}
    assert tried_before({"tried": [["dp=2", 1, 0.5]]}) == {("dp=2", 1): 0.5}
