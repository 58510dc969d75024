"""A small shape is cut by a strategy as the full one is, and a large strategy keeps its structure on few ranks."""

from __future__ import annotations

import pytest

from meshwright.errors import ConfigError, UserError
from meshwright.models.count import count_parameters
from meshwright.models.presets import preset, presets
from meshwright.models.spec import Experts
from meshwright.strategy import Strategy
from meshwright.verify.shrink import MOST_RANKS, asked_strategy, samples_of, shrink, small_spec
from tests.unit.specs import small

STRATEGIES = ("dp=2", "dp=3 zero=3", "dp=1 tp=2", "dp=2 zero=1 tp=4", "dp=1 tp=8", "dp=64 zero=3 replicate=4 tp=8")


@pytest.mark.parametrize("text", STRATEGIES)
@pytest.mark.parametrize("name", presets())
def test_every_preset_stays_legal_and_keeps_its_structure(name: str, text: str) -> None:
    full, strategy = preset(name), asked_strategy(text)[0]
    try:
        full.check_buildable()
        strategy.check(full, strategy.world)
    except UserError:
        return
    found = shrink(strategy, full)
    spec, tp = found.spec, found.strategy.tp
    assert spec is not None
    assert found.strategy.world <= MOST_RANKS
    assert count_parameters(spec).total < 1_200_000
    for kept in ("family", "norm", "positions", "activation", "bias", "qk_norm", "tie_word_embeddings", "dropout"):
        assert getattr(spec, kept) == getattr(full, kept), kept
    assert (spec.num_attention_heads > spec.num_key_value_heads) == (
        full.num_attention_heads > full.num_key_value_heads
    )
    assert (spec.num_key_value_heads < tp) == (full.num_key_value_heads < strategy.tp)
    wide = spec.num_attention_heads * spec.head_dim != spec.hidden_size
    assert wide == (full.num_attention_heads * full.head_dim != full.hidden_size)
    pieces = tp * found.strategy.shard
    assert spec.vocab_size % pieces == full.vocab_size % pieces
    assert spec.intermediate_size % pieces == full.intermediate_size % pieces
    assert (spec.experts is None) == (full.experts is None)
    if spec.experts is not None and full.experts is not None:
        assert spec.experts.num_experts_per_tok == full.experts.num_experts_per_tok
        assert spec.experts.num_experts > spec.experts.num_experts_per_tok


def test_ratio_of_heads_is_kept_where_it_is_small() -> None:
    for name in ("llama3.1-8b", "llama3.2-3b", "qwen2.5-0.5b", "qwen3-0.6b"):
        full, spec = preset(name), small_spec(preset(name), Strategy(tp=2, sp=True))
        ratio = full.num_attention_heads // full.num_key_value_heads
        assert spec.num_attention_heads == ratio * spec.num_key_value_heads


def test_window_is_shorter_than_the_sequence() -> None:
    spec = small_spec(preset("mistral-7b").model_copy(update={"sliding_window": 4096}), Strategy())
    assert spec.sliding_window is not None
    assert spec.sliding_window < 16


def test_dense_and_sparse_layers_are_both_there() -> None:
    experts = Experts(
        num_experts=64, num_experts_per_tok=6, moe_intermediate_size=99, first_k_dense_replace=3, decoder_sparse_step=4
    )
    spec = small_spec(small(num_hidden_layers=32, experts=experts), Strategy(replicate=4, ep=4))
    assert {spec.is_sparse(layer) for layer in range(spec.num_hidden_layers)} == {False, True}
    assert spec.experts is not None
    assert spec.experts.num_experts % 4 == 0


def test_small_shape_is_not_made_larger() -> None:
    full = small()
    spec = small_spec(full, Strategy())
    assert spec.vocab_size == full.vocab_size
    assert count_parameters(spec).total <= count_parameters(full).total


@pytest.mark.parametrize(
    ("asked", "proved", "notes"),
    [
        ("dp=16", "dp=16", ()),
        ("dp=64", "dp=2", ("dp=64 is proved as dp=2",)),
        ("dp=64 zero=3 tp=8", "dp=2 zero=3 tp=8", ("dp=64 is proved as dp=2",)),
        ("dp=64 zero=3 replicate=8 tp=4", "dp=4 zero=3 replicate=2 tp=4", ("dp=64 is proved as dp=4",)),
        ("dp=1 tp=32", "dp=1 tp=2", ("tp=32 is proved as tp=2",)),
        ("dp=64 zero=1 ep=8 tp=2", "dp=4 zero=1 tp=2 ep=2", ("dp=64 is proved as dp=4", "ep=8 is proved as ep=2")),
        ("dp=64 ep=8", "dp=16 ep=8", ("dp=64 is proved as dp=16",)),
        ("dp=8 ep=8 tp=8", "dp=2 tp=8 ep=2", ("dp=8 is proved as dp=2", "ep=8 is proved as ep=2")),
        ("dp=17", "dp=2", ("dp=17 is proved as dp=2",)),
        ("dp=1 pp=19", "dp=1 pp=2", ("pp=19 is proved as pp=2",)),
    ],
)
def test_large_strategy_keeps_its_structure(asked: str, proved: str, notes: tuple[str, ...]) -> None:
    found = shrink(asked_strategy(asked)[0], None)
    assert (str(found.strategy), found.notes) == (proved, notes)


def test_strategy_that_stays_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes 32 processes even with its smallest degrees"):
        shrink(asked_strategy("dp=8 zero=3 replicate=4 tp=8 cp=8 pp=8")[0], None)


@pytest.mark.parametrize(
    ("text", "filled_in"),
    [
        ("auto", "dp=2"),
        ("zero=3", "dp=2 zero=3"),
        ("tp=2", "dp=1 tp=2"),
        ("zero=2 replicate=2", "dp=4 zero=2 replicate=2"),
    ],
)
def test_open_degree_takes_the_fewest_processes_that_show_something(text: str, filled_in: str) -> None:
    strategy, notes = asked_strategy(text)
    assert str(strategy) == filled_in
    assert notes == (f"dp is left open and taken as {strategy.dp}",)


def test_what_is_said_of_layers_and_sizes_is_brought_down() -> None:
    spec = preset("llama3.1-8b")
    found = shrink(asked_strategy("dp=2 zero=3 recompute=first:16 wrap=name:model.layers.17")[0], spec)
    assert (found.strategy.recompute, found.strategy.wrap) == ("first:1", "name:model.layers.1")
    assert "recompute=first:16 is proved as recompute=first:1" in found.notes
    sized = shrink(asked_strategy("dp=2 zero=3 wrap=size:200000000")[0], spec).strategy.wrap
    assert 500 < int(sized.partition(":")[2]) < 5000


def test_samples_are_shared_evenly() -> None:
    for dp in range(1, MOST_RANKS + 1):
        assert samples_of(Strategy(replicate=dp)) % (2 * dp) == 0


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("qwen3-235b-a22b", "dp=4 tp=8 pp=2"),
        ("llama3.1-8b", "dp=1 tp=32"),
        ("llama3.1-8b", "dp=1 cp=32 cp_method=ulysses"),
    ],
)
def test_heads_that_ranks_share_stay_shared_when_there_are_fewer_ranks(name: str, asked: str) -> None:
    found = shrink(asked_strategy(asked)[0], preset(name))
    assert found.spec is not None
    ways = found.strategy.tp * (found.strategy.cp if "ulysses" in asked else 1)
    assert ways > found.spec.num_key_value_heads


def test_ring_of_both_methods_stays_a_ring() -> None:
    found = shrink(asked_strategy("dp=1 cp=16 cp_method=ulysses:8 tp=2")[0], preset("llama3.1-8b"))
    assert str(found.strategy) == "dp=1 tp=2 cp=4 cp_method=ulysses:2"


def test_stages_by_hand_stay_uneven() -> None:
    found = shrink(asked_strategy("dp=1 pp=2 layers=20+12")[0], preset("llama3.1-8b"))
    assert found.spec is not None
    assert (found.strategy.layers, found.spec.num_hidden_layers) == ("2+1", 3)
    lowered = shrink(
        asked_strategy("dp=1 pp=32 layers=" + "+".join(["2", *["1"] * 30, "0"]).replace("+0", "+1"))[0], None
    )
    assert lowered.strategy.layers == "2+1"


def test_layers_of_a_large_model_stay_units_of_their_own() -> None:
    found = shrink(asked_strategy("dp=2 zero=3")[0], preset("llama3.1-8b"))
    assert found.strategy.wrap == "block"
    assert "wrap=auto is proved as wrap=block" in found.notes


def test_what_is_not_meant_to_be_equal_is_left_out_and_named() -> None:
    strategy, notes = asked_strategy("dp=2 compress=topk:0.01")
    assert str(strategy) == "dp=2"
    assert any("compress=topk:0.01 is left out" in note for note in notes)
