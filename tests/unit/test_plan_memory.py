"""The planner's memory: against measurements on a GPU, a peer's worked example, and the closed forms of the states."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.gpu_rows import read_rows, scenario_of

from meshwright.cluster.cluster import parse_cluster
from meshwright.estimate.state import state_bytes
from meshwright.estimate.units import Place
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec
from meshwright.planning.memory import memory_of
from meshwright.planning.question import Question, estimate, with_exact_states
from meshwright.planning.scenario import Layout, Scenario
from meshwright.planning.software import constants
from meshwright.planning.state_memory import GIB, update_states
from meshwright.planning.timing import Timer
from meshwright.strategy import Strategy

MEASURED = read_rows()


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: "-".join(filter(None, row.values())))
def test_peak_of_our_decoder_is_what_an_h200_measured(row: dict[str, str]) -> None:
    terms = memory_of(scenario_of(row)).stages[0]
    assert terms.allocated / 2**20 == pytest.approx(int(row["peak_allocated_mib"]), rel=0.05)


def test_step_time_of_our_decoder_is_near_what_an_h200_measured() -> None:
    times = [Timer(scenario_of(row), constants()).parts().total * 1e3 / float(row["step_ms"]) - 1 for row in MEASURED]
    assert sorted(map(abs, times))[len(times) // 2] < 0.05
    # docs/plan.md says of these two why, as far as that is known.
    far = {(row["model"], row["precision"]) for row, off in zip(MEASURED, times, strict=True) if abs(off) >= 0.10}
    assert far == {("gpt2", "bf16"), ("qwen2.5-1.5b", "bf16")}
    assert len(times) >= 20


def test_a_peers_example_is_met_stage_by_stage() -> None:
    """Llama-3-70B, tp=8 pp=4 dp=2, 8k: SimuMax gives 46.5, 39.8 and 31.0 GiB for first, middle and last stage."""
    layout = Layout(dp=2, tp=8, pp=4, zero=1, shard=2, sp=True)
    software = constants().software["megatron"]
    scenario = Scenario(preset("llama3.1-70b"), layout, parse_cluster("64xh100"), software, 8192, 1, 128)
    first, second, _, last = (terms.allocated / GIB for terms in memory_of(scenario).stages)
    assert first == pytest.approx(46.5, rel=0.05)
    assert second == pytest.approx(39.8, rel=0.05)
    assert last == pytest.approx(31.0, rel=0.05)


SMALL = ModelSpec(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
)
SPARSE = preset("tiny-moe")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (SMALL, "dp=4"),
        (SMALL, "dp=4 zero=1"),
        (SMALL, "dp=4 zero=2 wrap=block"),
        (SMALL, "dp=4 zero=3 wrap=block"),
        (SMALL, "dp=4 zero=3 replicate=2 wrap=block"),
        (SMALL, "dp=2 tp=2"),
        (SMALL, "dp=2 zero=1 tp=4"),
        (SMALL, "dp=2 pp=2"),
        (SMALL, "dp=2 zero=1 pp=4 tp=2"),
        (SMALL, "dp=2 zero=2 pp=2 wrap=block"),
        (SMALL, "dp=2 zero=3 pp=2 wrap=block schedule=interleaved:2"),
        (SMALL, "dp=2 cp=2 zero=1"),
        (SMALL, "dp=2 pp=2 schedule=zbv"),
        (SPARSE, "dp=4 ep=2"),
        (SPARSE, "dp=4 ep=4 zero=1"),
    ],
)
def test_states_are_those_that_ranks_hold(spec: ModelSpec, text: str) -> None:
    """`estimate` is tested byte by byte against real ranks; the planner's sums are the same."""
    world = Strategy.fewest_processes(text)
    strategy = Strategy.parse(text, world)
    software = constants().software["meshwright"]
    scenario = Scenario(
        spec, Layout.of(strategy), parse_cluster(f"{world}xh100"), software, 64, 1, strategy.dp * 4, "float32"
    )
    memory = memory_of(scenario)
    for rank, terms in enumerate(memory.stages):
        exact = state_bytes(spec, strategy, Place(pp=rank), micro_steps=4)
        assert terms.parameters == pytest.approx(exact.parameters, rel=1e-9)
        assert terms.optimizer == pytest.approx(exact.optimizer, rel=1e-9)
        if strategy.zero < 2 or strategy.pp > 1:
            assert terms.gradients == pytest.approx(exact.gradients, rel=1e-9)
        else:
            # What is scattered unit by unit depends on the order; the root's part at the end is not planned for.
            assert terms.gradients >= 0.8 * exact.gradients
        held = update_states(scenario, scenario.ranks()[rank])
        sharded = strategy.zero >= 2
        assert held.parameters == pytest.approx(exact.parameters, rel=1e-9)
        assert held.gradients == pytest.approx(exact.parameters if sharded else exact.gradients, rel=1e-9)
        assert held.optimizer == pytest.approx(exact.optimizer, rel=1e-9)


def test_of_fewer_experts_than_ranks_each_holds_one() -> None:
    strategy = Strategy.parse("dp=16 ep=4 cp=2 zero=3 wrap=block", 32)
    software, layout = constants().software["meshwright"], Layout.of(strategy)
    scenario = Scenario(SPARSE, layout, parse_cluster("32xh100"), software, 64, 1, 64, "float32")
    exact = state_bytes(SPARSE, strategy)
    assert memory_of(scenario).stages[0].parameters == pytest.approx(exact.parameters, rel=0.01)


@pytest.mark.parametrize(
    "text", ["dp=3 zero=3", "dp=3 zero=2 tp=2", "dp=2 zero=3 replicate=2 pp=2", "dp=2 cp=2 zero=1"]
)
def test_states_that_are_shown_are_exact_to_the_byte(text: str) -> None:
    world = Strategy.fewest_processes(text)
    question = Question(SMALL, parse_cluster(f"{world}xh100"), 64, 24)
    shown = with_exact_states(estimate(question, Strategy.parse(text, world), 1))
    for rank, terms in enumerate(shown.memory.stages):
        exact = state_bytes(SMALL, shown.strategy, Place(pp=rank))
        assert (terms.parameters, terms.optimizer) == (exact.parameters, exact.optimizer)


def test_quick_memory_has_the_same_peak() -> None:
    spec = preset("llama3.1-8b")
    for text in ("dp=2 pp=4 zero=1", "dp=1 pp=8 schedule=interleaved:2", "dp=2 pp=4 schedule=zero-bubble"):
        for recompute in ("none", "selective", "full", "first:9"):
            strategy = replace(Strategy.parse(text, 8), recompute=recompute)
            software = constants().software["meshwright"]
            scenario = Scenario(spec, Layout.of(strategy), parse_cluster("8xh100"), software, 4096, 1, 64)
            whole, quick = memory_of(scenario), memory_of(scenario, quick=True)
            assert quick.peak == whole.peak
            assert quick.hard_share == whole.hard_share
            assert memory_of(scenario, quick=True, floor=True).peak <= whole.peak
