"""Questions that are turned around, other aims, and constraints that leave nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.cluster.cluster import parse_cluster
from meshwright.errors import UserError
from meshwright.models.presets import preset
from meshwright.planning.answer import plan
from meshwright.planning.blocks import Product
from meshwright.planning.constraints import parse_constraints
from meshwright.planning.inverse import fits, longest_sequence
from meshwright.planning.operations import Operations
from meshwright.planning.question import Question, estimate
from meshwright.planning.runners import runners_of
from meshwright.planning.scenario import Layout
from meshwright.planning.search import search
from meshwright.planning.software import constants
from meshwright.strategy import Strategy
from tests.unit.specs import PLANNED


@pytest.mark.parametrize("positions", [500, 1024, 4096, 5000, 9999])
def test_the_longest_sequence_may_be_the_models_own_number_of_positions(positions: int) -> None:
    spec = PLANNED.model_copy(update={"max_position_embeddings": positions})
    found = longest_sequence(Question(spec, parse_cluster("8xh100"), min(2048, positions), 64))
    assert found is not None
    assert found[0] == positions


def test_the_longest_sequence_is_the_last_that_fits() -> None:
    held = parse_constraints(["offload=none recompute=none cp=1 pp=1 tp=1"])
    bound = Question(preset("llama3.1-8b"), parse_cluster("8xh100"), 4096, 64, constraints=held)
    found = longest_sequence(bound)
    assert found is not None
    length, candidate = found
    assert candidate.fits
    assert length < bound.spec.max_position_embeddings
    assert fits(replace(bound, sequence_length=length + 1024, global_batch=32)) is None


def test_where_short_sequences_cannot_be_split_long_ones_are_found() -> None:
    split = parse_constraints(["cp=4"])
    question = Question(preset("llama3.1-8b"), parse_cluster("8xh100"), 32768, 8, constraints=split)
    assert search(question).best is not None
    found = longest_sequence(question)
    assert found is not None
    assert found[0] >= 32768


def test_the_least_memory_is_less_than_that_of_any_strategy_tried() -> None:
    question = Question(preset("llama3.1-8b"), parse_cluster("4xh100"), 4096, 16)
    best = search(question, "memory").best
    assert best is not None
    for text in (
        "dp=1 tp=4 recompute=full",
        "dp=1 tp=4 recompute=full offload=optimizer",
        "dp=4 zero=3 recompute=full offload=parameters",
        "dp=1 zero=3 tp=2 cp=2 recompute=full offload=parameters",
    ):
        other = estimate(question, Strategy.parse(text, 4), 1)
        assert not other.fits or other.memory.peak >= best.memory.peak, text


def test_a_family_that_fits_with_host_memory_is_not_called_unfit() -> None:
    question = Question(preset("mixtral-8x7b"), parse_cluster("32xh100"), 4096, 1024)
    best = search(question).best
    assert best is not None
    runners = {one.family: one for one in runners_of(question, best)}
    sharded = runners["sharded state (ZeRO, FSDP)"]
    assert sharded.candidate is not None
    assert sharded.candidate.fits
    assert "does not fit" not in sharded.reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "nonsense", "strategy": "dp=8 zero=3"}, "is not one of"),
        ({"objective": "memory", "strategy": "dp=8 zero=3"}, "drop one of them"),
        ({"sequence_length": 10**13}, "longer than any"),
        ({"constraints": "tp=3"}, "3 does not divide 8 GPUs"),
        ({"constraints": "tp=16"}, "16 does not divide 8 GPUs"),
        ({"constraints": "ep=2"}, "no experts"),
        ({"constraints": "cp=8"}, "leave a rank 512"),
        ({"constraints": "sp=on tp=1"}, "drop one of them"),
        ({"constraints": "dp=8", "global_batch": 12}, "must divide the batch"),
        ({"constraints": "zero=4"}, "zero is 0, 1, 2 or 3"),
        ({"constraints": "layers=8+8+8+8 pp=4"}, "is not searched"),
    ],
)
def test_what_cannot_be_is_told_with_its_reason(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError) as told:
        plan("llama3.1-8b", "8xh100", **{"sequence_length": 4096, **options})  # type: ignore[arg-type]
    assert words in str(told.value)


def test_of_several_precisions_a_given_strategy_takes_the_fastest() -> None:
    found = plan("llama3.1-8b", "8xh100", strategy="dp=8 zero=3", precision="float32,bf16", global_batch=64)
    assert found.question.precision == "bf16"


def planned(model: str, precision: str, strategy: str = "dp=8 zero=3", *, compile: bool = True) -> tuple[float, float]:
    """Seconds of a step, and bytes at the peak."""
    found = plan(
        model, "8xh100", strategy=strategy, precision=precision, global_batch=64, micro_batch=1, compile=compile
    )
    return found.shown.step_s, found.shown.memory.peak


@pytest.mark.parametrize("compile", [False, True])
def test_linears_in_8_bits_save_time_and_memory_only_where_layers_are_compiled(compile: bool) -> None:
    (narrow, narrow_bytes), (wide, wide_bytes) = (
        planned("llama3.1-8b", precision, compile=compile) for precision in ("fp8", "bf16")
    )
    assert wide / 2 < narrow < 0.9 * wide
    assert narrow_bytes < 0.95 * wide_bytes if compile else wide_bytes <= narrow_bytes < 1.02 * wide_bytes


def test_a_budget_lies_between_keeping_and_computing_again() -> None:
    """In memory and in time, in the order of the shares that it leaves."""
    words = ("selective", "budget:0.7", "budget:0.4", "budget:0.1", "full")
    found = [planned("llama3.1-8b", "bf16", f"dp=8 zero=3 recompute={word}") for word in words]
    times, peaks = zip(*found, strict=True)
    assert list(times) == sorted(times)
    assert list(peaks) == sorted(peaks, reverse=True)
    assert len({*times}) == len(times)


def test_a_budget_is_not_searched_for() -> None:
    with pytest.raises(UserError, match="recompute=budget:0.5 is not searched"):
        plan("llama3.1-8b", "8xh100", constraints="recompute=budget:0.5")


@pytest.mark.parametrize(("software", "gains"), [("meshwright", False), ("megatron", True)])
def test_our_stacked_experts_are_not_computed_in_8_bits(software: str, gains: bool) -> None:
    narrow, wide = (
        Operations(
            Question(
                preset("qwen3-30b-a3b"), parse_cluster("8xh100"), 4096, 64, precision=precision, software=software
            ).scenario(Layout.of(Strategy.parse("dp=8 zero=3 ep=8", 8)), 1),
            constants(),
        )
        for precision in ("fp8", "bf16")
    )
    linear, experts = Product(8192, 4096, 4096), Product(8192, 4096, 4096, times=16, experts=True)
    assert narrow.product(linear) < wide.product(linear)
    assert (narrow.product(experts) < wide.product(experts)) == gains


def test_8_bits_must_be_asked_for() -> None:
    found = plan("llama3.1-8b", "8xh100", strategy="dp=8 zero=3", precision="auto", global_batch=64)
    assert found.question.precision == "bf16"
    with pytest.raises(UserError, match="lacks it; use bf16 or fp16 or tf32 or float32"):
        plan("llama3.1-8b", "8xa100", precision="fp8", global_batch=64)
