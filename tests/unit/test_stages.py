"""Layers are dealt out to stages evenly, by cost or by hand; every stage has some."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError
from meshwright.models.presets import preset
from meshwright.models.spec import Experts, ModelSpec
from meshwright.stages import stage_layers
from meshwright.strategy import Strategy


def shape(layers: int, vocabulary: int = 64, **options: object) -> ModelSpec:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "max_position_embeddings": 32}
    return ModelSpec(num_hidden_layers=layers, vocab_size=vocabulary, **sizes, **options)  # type: ignore[arg-type]


def sizes(spec: ModelSpec, stages: int, layers: str = "even") -> list[int]:
    found = stage_layers(spec, stages, layers)
    assert [layer for stage in found for layer in stage] == list(range(spec.num_hidden_layers))
    return [len(stage) for stage in found]


def test_even_stages_differ_by_one_at_most_and_the_last_are_the_shorter_ones() -> None:
    assert sizes(shape(8), 4) == [2, 2, 2, 2]
    assert sizes(shape(10), 4) == [3, 3, 2, 2]


def test_balanced_stages_give_fewer_layers_to_the_stage_with_the_head() -> None:
    # A layer of this shape has 2,592 weights, the head 16 for each entry of the vocabulary: as many as two layers.
    assert sizes(shape(10, vocabulary=324), 4, "balanced") == [3, 3, 3, 1]
    assert sizes(shape(8, vocabulary=1), 4, "balanced") == [2, 2, 2, 2]
    assert sizes(preset("llama3.2-1b"), 4, "balanced")[-1] < 4


def test_balanced_stages_count_the_experts_that_a_token_visits() -> None:
    experts = Experts(num_experts=4, num_experts_per_tok=1, moe_intermediate_size=32, first_k_dense_replace=4)
    assert sizes(shape(8, vocabulary=1, experts=experts), 2, "balanced") == [4, 4]


def test_stages_given_by_hand() -> None:
    assert sizes(shape(8), 3, "1+5+2") == [1, 5, 2]


@pytest.mark.parametrize(
    ("strategy", "world", "complaint"),
    [
        ("pp=4", 4, "pp=4 with schedule=1f1b has 4 stages and the model 3 layers; pp can be at most 3"),
        ("pp=2 schedule=interleaved:2", 2, "has 4 stages and the model 3 layers; pp can be at most 1"),
        ("pp=2 layers=2+2", 2, "layers=2+2 is 2 stages of 4 layers, not 2 of 3; give 2 numbers that add up to 3"),
        ("dp=2 pp=2 zero=3 schedule=zero-bubble", 4, "use zero=2, or schedule=1f1b"),
    ],
)
def test_what_a_model_cannot_take_is_refused_with_what_it_can(strategy: str, world: int, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Strategy.parse(strategy, world).check(shape(3), world)
    assert complaint in str(refused.value)


@pytest.mark.parametrize("layers", ["2+0", "+", "2+x", "evn", "2+"])
def test_layers_that_are_no_numbers_are_refused(layers: str) -> None:
    with pytest.raises(ConfigError, match=r"is not one of even, balanced, N\+N"):
        Strategy.parse(f"pp=2 layers={layers}", 2)


@pytest.mark.parametrize(
    ("batch", "micro_batch", "micro_steps"), [(64, None, 8), (64, 8, 4), (6, None, 3), (2, None, 1), (20, None, 10)]
)
def test_a_pipeline_cuts_the_batch_into_enough_micro_steps_by_itself(
    batch: int, micro_batch: int | None, micro_steps: int
) -> None:
    assert Strategy.parse("dp=2 pp=2", 4).micro_steps(batch, micro_batch) == micro_steps


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        ("pp=2 layers=1+1+1", "layers=1+1+1 is not one number for each of 2 stages"),
        ("pp=2 schedule=zbv layers=1+2", "layers=1+2 is not one number for each of 4 stages"),
        ("schedule=zbv", "schedule=zbv says how pp works; add pp=2, or drop it"),
        ("layers=3+5", "layers=3+5 says how pp works; add pp=2, or drop it"),
        ("cp_method=ulysses", "cp_method=ulysses says how cp works; add cp=2, or drop it"),
    ],
)
def test_what_says_nothing_without_its_axis_is_refused(strategy: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Strategy.parse(strategy, 2)
    assert complaint in str(refused.value)
