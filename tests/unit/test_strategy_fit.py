"""What a model must have for a strategy: refusals name the setting and what would do instead."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.errors import ConfigError
from meshwright.models.presets import preset
from meshwright.models.spec import Experts
from meshwright.strategy import Strategy
from tests.unit.test_strategy import MODEL, check_refusal


def test_check_refuses_a_world_that_is_not_its_own() -> None:
    for check in (Strategy(replicate=4).check_any, lambda world: Strategy(replicate=4).check(MODEL, world)):
        with pytest.raises(ConfigError, match="dp=4': it needs 4 processes and there are 2"):
            check(2)


@pytest.mark.parametrize("text", ["offload=parameters", "zero=1 offload=parameters", "zero=3 tp=2 offload=parameters"])
def test_parameters_that_are_not_sharded_cannot_move_to_the_host(text: str) -> None:
    assert check_refusal(text, 2) == (
        "offload=parameters moves the shards of zero=2 and 3 and needs dp or cp of at least 2; "
        "use zero=3 on more processes, or offload=optimizer"
    )
    for each in ("zero=2 offload=parameters", "zero=3 offload=parameters", "offload=optimizer"):
        Strategy.parse(each, 2).check(MODEL, 2)


@pytest.mark.parametrize("text", ["zero=1", "zero=3", "tp=2", "offload=optimizer"])
def test_optimizer_that_needs_whole_parameters_is_refused_where_they_are_not(text: str) -> None:
    strategy = Strategy.parse(text, 2)
    with pytest.raises(ConfigError) as caught:
        strategy.check(MODEL, 2, optimizer="adafactor")
    assert str(caught.value).endswith(
        "train.optimizer=adafactor needs whole parameters and cannot be sharded; "
        "use zero=0, tp=1 and ep=1 without offload, or train.optimizer=adamw"
    )
    for optimizer in ("adamw", "sgd"):
        strategy.check(MODEL, 2, optimizer=optimizer)
    Strategy.parse("dp=2", 2).check(MODEL, 2, optimizer="adafactor")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "legal"),
    [
        (12, 6, [1, 2, 3, 6, 12]),  # 4 divides the heads, and can neither cut nor repeat 6 key-value heads
        (12, 12, [1, 2, 3, 4, 6, 12]),
        (12, 1, [1, 2, 3, 4, 6, 12]),
        (12, 4, [1, 2, 4, 12]),
        (8, 2, [1, 2, 4, 8]),
    ],
)
def test_heads_are_dealt_out_whole(heads: int, kv_heads: int, legal: list[int]) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    for tp in range(1, 25):
        if tp in legal:
            Strategy.parse(f"tp={tp}", tp).check(MODEL.model_copy(update=changes), tp, 24)
            continue
        assert check_refusal(f"tp={tp}", tp, **changes) == (
            f"tp={tp} cannot deal out {heads} attention heads and {kv_heads} key-value heads; "
            f"tp can be {', '.join(map(str, legal))}"
        )


def test_dimensions_smaller_than_the_ranks_are_refused_by_name() -> None:
    for name in ("vocab_size", "intermediate_size"):
        # 9 in six parts are 2, 2, 2, 2, 1 and nothing.
        for size in (5, 9):
            refused = f"tp=6 leaves a rank without a part of the model's {name}={size}; tp can be 1, 2, 3"
            assert check_refusal("tp=6", 6, **{name: size}) == refused
    experts = Experts(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=9)
    assert "a part of the model's experts.moe_intermediate_size=9" in check_refusal("tp=6", 6, experts=experts)
    Strategy.parse("tp=6", 6).check(MODEL.model_copy(update={"vocab_size": 6, "intermediate_size": 6}), 6, 36)


def with_experts(count: int, **facts: Any) -> dict[str, Any]:
    experts = {"num_experts": count, "num_experts_per_tok": 1, "moe_intermediate_size": 9}
    return {"experts": Experts(**experts | facts)}


def test_experts_are_dealt_out_evenly() -> None:
    assert check_refusal("ep=2", 2) == "ep=2 splits experts, and the model has none; leave ep out"
    all_dense = with_experts(4, first_k_dense_replace=3)
    assert check_refusal("ep=2", 2, **all_dense) == "ep=2 splits experts, and the model has none; leave ep out"
    assert check_refusal("ep=4", 8, **with_experts(6)) == "ep=4 does not divide the model's 6 experts; ep can be 1, 2"
    refused = "ep=4 does not divide the model's 6 experts; ep can be 1, 2, 6"
    assert check_refusal("dp=12 zero=3 shard=2 ep=4", 12, **with_experts(6)) == refused
    Strategy.parse("ep=2", 8).check(MODEL.model_copy(update=with_experts(6)), 8)


def test_optimizer_of_whole_parameters_does_not_get_dealt_out_experts() -> None:
    with pytest.raises(ConfigError, match="adafactor needs whole parameters"):
        Strategy.parse("ep=2", 2).check(MODEL.model_copy(update=with_experts(2)), 2, optimizer="adafactor")


@pytest.mark.parametrize(
    ("tp", "length", "legal"),
    [(2, 33, "32 or 34"), (3, 100, "99 or 102"), (6, 31, "30 or 36"), (6, 5, "6"), (2, 1, "2")],
)
def test_sequence_that_cannot_be_dealt_out_names_the_nearest_that_can(tp: int, length: int, legal: str) -> None:
    assert check_refusal(f"tp={tp}", tp, length) == (
        f"data.sequence_length={length} is not divisible by tp={tp}; use {legal}, or sp=off"
    )
    Strategy.parse(f"tp={tp} sp=off", tp).check(MODEL, tp, length)
    Strategy.parse(f"tp={tp}", tp).check(MODEL, tp)
    for each in legal.split(" or "):
        Strategy.parse(f"tp={tp}", tp).check(MODEL, tp, int(each))


def test_recomputing_more_layers_than_there_are_is_refused() -> None:
    assert check_refusal("recompute=first:4", 1) == "recompute=first:4 of 3 layers; use first:3 or full"
    for text in ("recompute=first:3", "recompute=first:1", "recompute=full", "recompute=selective"):
        Strategy.parse(text, 1).check(MODEL, 1)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_models_that_ship_can_be_split_two_ways(name: str) -> None:
    for text in ("dp=2", "zero=1", "zero=2", "zero=3", "tp=2", "tp=2 sp=off"):
        Strategy.parse(text, 2).check(preset(name), 2, 512)


def test_batch_that_does_not_divide_names_the_nearest_that_do() -> None:
    with pytest.raises(ConfigError, match=r"10 is not divisible by 4 .*use 8 or 12"):
        Strategy(replicate=4).micro_steps(10, None)
    with pytest.raises(ConfigError, match=r"10 is not divisible by 12 .*use 12"):
        Strategy(replicate=2, shard=2, zero=3).micro_steps(10, 3)


def test_micro_steps_share_the_batch() -> None:
    assert Strategy(replicate=2).micro_steps(16, None) == 1
    assert Strategy(shard=2, zero=3).micro_steps(16, 2) == 4
    # Ranks that split matrices see the same samples.
    assert Strategy(replicate=2, tp=4).micro_steps(16, 2) == 4


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_activations_in_host_memory_are_refused_where_backward_passes_are_taken_apart(schedule: str) -> None:
    with pytest.raises(ConfigError, match="use schedule=1f1b or interleaved:2, or drop offload of activations"):
        Strategy.parse(f"pp=2 schedule={schedule} offload=activations", 2).check_any(2)
    Strategy.parse("pp=2 offload=activations", 2).check_any(2)


def test_activations_in_host_memory_leave_parameters_whole() -> None:
    Strategy.parse("dp=2 offload=activations", 2).check(MODEL, 2, optimizer="adafactor")
