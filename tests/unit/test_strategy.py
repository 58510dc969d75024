"""The strategy's short form: what it fills in, that it reads back, and every refusal with its way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.models.spec import ModelSpec
from meshwright.strategy import KEYS, OFFLOAD, Strategy

DEGREE = st.integers(1, 6)
SCHEDULES = st.sampled_from(["gpipe", "1f1b", "zero-bubble", "zbv"]) | st.integers(1, 9).map("interleaved:{}".format)
RECOMPUTE = st.sampled_from(["none", "full", "selective"]) | st.integers(1, 99).map("first:{}".format)
NAMES = st.lists(st.from_regex(r"[a-z_]+(\.[a-z0-9_]+)*", fullmatch=True), min_size=1, max_size=3)
WRAP = (
    st.sampled_from(["auto", "block"])
    | st.integers(1, 10**9).map("size:{}".format)
    | NAMES.map(lambda names: "name:" + "+".join(names))
)
# Twelve heads and six key-value heads: tp=4 deals out the heads and cannot deal out the key-value heads.
MODEL = ModelSpec(
    vocab_size=131,
    hidden_size=48,
    intermediate_size=72,
    num_hidden_layers=3,
    num_attention_heads=12,
    num_key_value_heads=6,
    max_position_embeddings=128,
)


@st.composite
def strategies(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Strategy:
    """Every strategy that a short form can mean."""
    zero, tp, pp, cp = draw(st.integers(0, 3)), draw(DEGREE), draw(DEGREE), draw(DEGREE)
    replicate, shard = draw(DEGREE), draw(DEGREE) if zero else 1
    return Strategy(
        pp=pp,
        replicate=replicate,
        shard=shard,
        cp=cp,
        tp=tp,
        ep=draw(st.sampled_from(expert_degrees(replicate, shard))),
        zero=zero,
        sp=draw(st.booleans()) if tp > 1 else False,
        schedule=draw(SCHEDULES) if pp > 1 else "1f1b",
        cp_method=draw(st.sampled_from(["ring", "ulysses"])) if cp > 1 else "ring",
        recompute=draw(RECOMPUTE),
        offload=draw(st.sampled_from(OFFLOAD)),
        wrap=draw(WRAP) if zero > 1 else "auto",
        shares=draw(st.sampled_from(["even", "+".join(map(str, range(1, replicate * shard + 1)))])),
    )


def expert_degrees(replicate: int, shard: int) -> list[int]:
    divisors = [n for n in range(1, replicate * shard + 1) if replicate * shard % n == 0]
    return [n for n in divisors if n % shard == 0 or shard % n == 0]


def long_form(strategy: Strategy) -> list[str]:
    """Every key with its value, the ones with defaults too."""
    values = {key: getattr(strategy, key) for key in KEYS}
    return [f"{key}={value}" for key, value in (values | {"sp": "on" if strategy.sp else "off"}).items()]


def refusal(text: str, world: int = 4) -> str:
    with pytest.raises(ConfigError) as caught:
        Strategy.parse(text, world)
    message = str(caught.value)
    prefix = f"parallel.strategy='{text}': "
    assert message.startswith(prefix), "a refusal shows the setting as it was written"
    return message.removeprefix(prefix)


def check_refusal(text: str, world: int, sequence_length: int | None = None, **changes: int) -> str:
    strategy, spec = Strategy.parse(text, world), MODEL.model_copy(update=changes)
    with pytest.raises(ConfigError) as caught:
        strategy.check(spec, world, sequence_length)
    assert str(caught.value).startswith(f"parallel.strategy='{strategy}': ")
    return str(caught.value).removeprefix(f"parallel.strategy='{strategy}': ")


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("", 1, Strategy()),
        ("auto", 4, Strategy(replicate=4)),
        ("dp=auto", 4, Strategy(replicate=4)),
        ("dp=4", 4, Strategy(replicate=4)),
        ("replicate=4", 4, Strategy(replicate=4)),
        ("replicate=4 shard=1", 4, Strategy(replicate=4)),
        ("zero=0", 4, Strategy(replicate=4)),
        ("zero=1", 4, Strategy(shard=4, zero=1)),
        ("zero=3", 4, Strategy(shard=4, zero=3)),
        ("dp=auto zero=2", 4, Strategy(shard=4, zero=2)),
        ("zero=1 replicate=2", 8, Strategy(replicate=2, shard=4, zero=1)),
        ("zero=3 shard=2", 8, Strategy(replicate=4, shard=2, zero=3)),
        ("zero=3 replicate=2 shard=4", 8, Strategy(replicate=2, shard=4, zero=3)),
        ("dp=8 zero=3 replicate=2 shard=4", 8, Strategy(replicate=2, shard=4, zero=3)),
        ("tp=2", 8, Strategy(replicate=4, tp=2, sp=True)),
        ("tp=2 sp=on", 8, Strategy(replicate=4, tp=2, sp=True)),
        ("tp=2 sp=off", 8, Strategy(replicate=4, tp=2)),
        ("sp=off", 2, Strategy(replicate=2)),
        ("zero=3 tp=2", 8, Strategy(shard=4, zero=3, tp=2, sp=True)),
        ("auto zero=3 tp=2", 8, Strategy(shard=4, zero=3, tp=2, sp=True)),
        ("tp=auto pp=auto", 2, Strategy(replicate=2)),
        ("pp=2 cp=2 tp=2", 16, Strategy(pp=2, replicate=2, cp=2, tp=2, sp=True)),
        ("zero=2 replicate=2 pp=3 cp=2", 24, Strategy(pp=3, replicate=2, shard=2, cp=2, zero=2)),
        ("ep=4 zero=2", 8, Strategy(shard=8, zero=2, ep=4)),
        ("pp=2 schedule=interleaved:2", 2, Strategy(pp=2, schedule="interleaved:2")),
        ("cp=2 cp_method=ulysses", 2, Strategy(cp=2, cp_method="ulysses")),
        ("recompute=first:12", 1, Strategy(recompute="first:12")),
        ("offload=optimizer", 1, Strategy(offload="optimizer")),
        ("offload=activations+optimizer", 1, Strategy(offload="optimizer+activations")),
        ("zero=2 wrap=auto", 2, Strategy(shard=2, zero=2)),
        ("wrap=auto", 2, Strategy(replicate=2)),
        ("shares=3+1", 4, Strategy(replicate=4, shares="3+1")),
        ("shares=6+6+2+2 zero=3", 4, Strategy(shard=4, zero=3, shares="3+1")),
        ("shares=2+2", 2, Strategy(replicate=2)),
        ("shares=even", 2, Strategy(replicate=2)),
        ("zero=3 wrap=block", 2, Strategy(shard=2, zero=3, wrap="block")),
        ("zero=2 wrap=size:5000", 2, Strategy(shard=2, zero=2, wrap="size:5000")),
        ("zero=3 wrap=name:mlp+self_attn", 2, Strategy(shard=2, zero=3, wrap="name:mlp+self_attn")),
    ],
)
def test_short_form_fills_in_what_is_left_open(text: str, world: int, expected: Strategy) -> None:
    assert Strategy.parse(text, world) == expected


def test_defaults_are_one_device_that_keeps_everything() -> None:
    default = Strategy.parse("", 1)
    assert default == Strategy()
    assert (default.world, default.dp, default.zero, default.sp) == (1, 1, 0, False)
    assert (default.schedule, default.cp_method) == ("1f1b", "ring")
    assert (default.recompute, default.offload, default.wrap) == ("none", "none", "auto")


@given(strategies())
def test_canonical_form_reads_back_as_the_same_strategy(strategy: Strategy) -> None:
    read = Strategy.parse(str(strategy), strategy.world)
    assert read == strategy
    assert hash(read) == hash(strategy)
    assert str(read) == str(strategy)


@given(strategies(), st.randoms())
def test_order_of_keys_and_spelled_out_defaults_mean_nothing(strategy: Strategy, random: Any) -> None:
    words = long_form(strategy)
    if strategy.tp == 1:
        words.remove("sp=off")
    random.shuffle(words)
    assert Strategy.parse("  ".join(words), strategy.world) == strategy


@given(strategies())
def test_the_world_is_the_product_of_its_axes(strategy: Strategy) -> None:
    assert strategy.dp == strategy.replicate * strategy.shard
    assert strategy.world == strategy.pp * strategy.replicate * strategy.shard * strategy.cp * strategy.tp
    assert Strategy.processes(str(strategy)) == strategy.world


@given(strategies(), st.integers(1, 64))
def test_left_out_data_parallelism_takes_what_is_left(strategy: Strategy, copies: int) -> None:
    rest = f"tp={strategy.tp} pp={strategy.pp} cp={strategy.cp}"
    world = copies * strategy.tp * strategy.pp * strategy.cp
    assert Strategy.parse(rest, world).replicate == copies
    assert Strategy.parse(f"{rest} zero=3", world).shard == copies


@given(strategies())
def test_canonical_form_leaves_defaults_out(strategy: Strategy) -> None:
    words = str(strategy).split()
    assert words[0] == f"dp={strategy.dp}"
    assert "sp=on" not in words
    assert not {f"{key}=1" for key in ("tp", "pp", "cp", "ep", "replicate", "shard")} & set(words)
    assert not {"zero=0", "schedule=1f1b", "cp_method=ring", "recompute=none", "offload=none", "wrap=auto"} & {*words}


def test_canonical_form_is_what_people_write() -> None:
    assert str(Strategy(replicate=8)) == "dp=8"
    assert str(Strategy(shard=8, zero=3, tp=2, sp=True)) == "dp=8 zero=3 tp=2"
    assert str(Strategy(replicate=2, shard=4, zero=1, tp=2)) == "dp=8 zero=1 replicate=2 tp=2 sp=off"
    everything = (
        "dp=4 zero=2 pp=2 cp=2 ep=2 schedule=zbv cp_method=ulysses recompute=full offload=optimizer wrap=size:9"
    )
    assert str(Strategy.parse(everything, 16)) == everything


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", None),
        ("", None),
        ("zero=3", None),
        ("tp=2", None),
        ("dp=auto tp=2", None),
        ("dp=3", 3),
        ("dp=3 tp=2 pp=5 cp=7", 210),
        ("dp=4 zero=3 replicate=2", 4),
        ("replicate=4", 4),
        ("replicate=4 zero=0 tp=2", 8),
        ("replicate=4 zero=3", None),
        ("shard=4 zero=3", None),
        ("replicate=2 shard=4 zero=3 cp=2", 16),
        ("dp=4 recompute=first:8 wrap=size:9 zero=2", 4),
    ],
)
def test_processes_are_known_before_any_is_started(text: str, expected: int | None) -> None:
    assert Strategy.processes(text) == expected


def test_processes_of_an_unknown_key_are_refused() -> None:
    for count in (Strategy.processes, Strategy.fewest_processes):
        with pytest.raises(ConfigError, match="unknown key 'ddp'"):
            count("ddp=2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", 1),
        ("zero=3", 1),
        ("tp=2", 2),
        ("tp=2 pp=3 cp=5 zero=1", 30),
        ("zero=3 replicate=4", 4),
        ("zero=3 shard=4 tp=2", 8),
        ("dp=6 tp=2", 12),
        ("replicate=2 shard=3 zero=2", 6),
        ("ep=4 tp=2", 8),
        ("zero=3 shard=2 ep=4", 4),
    ],
)
def test_fewest_processes_are_those_that_the_degrees_need(text: str, expected: int) -> None:
    assert Strategy.fewest_processes(text) == expected
    assert Strategy.parse(text, expected).world == expected


@given(strategies())
def test_fewest_processes_are_enough_when_data_parallelism_is_left_out(strategy: Strategy) -> None:
    words = [word for word in str(strategy).split() if not word.startswith(("dp=", "ep="))]
    text = " ".join(words)
    fewest = Strategy.fewest_processes(text)
    assert Strategy.parse(text, fewest).world == fewest
    assert strategy.world % fewest == 0


def test_strategies_cannot_change_and_serve_as_keys() -> None:
    strategy = Strategy.parse("zero=3 tp=2", 4)
    for field in fields(Strategy):
        with pytest.raises(FrozenInstanceError):
            setattr(strategy, field.name, getattr(strategy, field.name))
    assert {strategy: 1}[Strategy.parse("tp=2 zero=3 dp=2", 4)] == 1
    assert len({strategy, Strategy.parse("zero=3 tp=2 sp=off", 4), Strategy.parse("zero=2 tp=2", 4)}) == 3


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        Strategy(4)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp=3", "it needs 3 processes and there are 4; start with --nproc 3 or leave dp out"),
        ("dp=4 tp=2", "it needs 8 processes and there are 4; start with --nproc 8 or leave dp out"),
        ("tp=3", "tp=3 does not divide 4 processes; tp can be 1, 2, 4, or start more processes"),
        ("cp=8", "cp=8 does not divide 4 processes; cp can be 1, 2, 4, or start more processes"),
        ("pp=3", "pp=3 does not divide 4 processes; pp can be 1, 2, 4, or start more processes"),
        (
            "tp=2 pp=4",
            "pp=4 does not divide 2 processes (what the other degrees leave of 4); pp can be 1, 2, "
            "or start more processes",
        ),
        (
            "tp=2 cp=3",
            "cp=3 does not divide 2 processes (what the other degrees leave of 4); cp can be 1, 2, "
            "or start more processes",
        ),
        ("ep=3", "ep=3 must divide dp=4; ep can be 1, 2, 4"),
        ("tp=2 ep=4", "ep=4 must divide dp=2; ep can be 1, 2"),
        (
            "dp=12 zero=3 shard=4 ep=6",
            "ep=6 must divide dp=12 and divide or be divisible by shard=4; ep can be 1, 2, 4, 12",
        ),
        ("shard=4", "shard=4 needs something to shard; add zero=1, 2 or 3"),
        ("zero=0 shard=2", "shard=2 needs something to shard; add zero=1, 2 or 3"),
        ("dp=4 zero=3 replicate=3", "replicate=3 does not fit dp=4; replicate can be 1, 2, 4"),
        ("zero=1 replicate=8", "replicate=8 does not fit 4 data-parallel processes; replicate can be 1, 2, 4"),
        ("dp=4 replicate=2", "replicate=2 does not fit dp=4; replicate can be 4"),
        ("tp=2 replicate=4", "replicate=4 does not fit 2 data-parallel processes; replicate can be 2"),
        ("zero=3 shard=8", "shard=8 does not fit 4 data-parallel processes; shard can be 1, 2, 4"),
        ("zero=3 shard=3", "shard=3 does not fit 4 data-parallel processes; shard can be 1, 2, 4"),
        ("dp=4 zero=2 replicate=2 shard=4", "replicate=2 x shard=4 is not dp=4; leave one of them out"),
        ("zero=4", "zero=4 is not a stage; stages are 0, 1, 2 and 3"),
        ("dp=0", "dp needs a whole number from 1, not '0'"),
        ("tp=two", "tp needs a whole number from 1, not 'two'"),
        ("pp=-1", "pp needs a whole number from 1, not '-1'"),
        ("cp=1.5", "cp needs a whole number from 1, not '1.5'"),
        ("dp", "dp needs a whole number from 1, not ''"),
        ("zero=x", "zero needs a whole number from 0, not 'x'"),
        ("dp=4 dp=4", "dp is given twice"),
        ("shares=3+2+1", "shares=3+2+1 has 3 numbers for dp=4 ranks; give 2, 4 numbers"),
        ("tp=4 shares=3+1", "shares=3+1 has 2 numbers for dp=1 ranks; drop it, or raise dp"),
        ("shares=3+0", "shares=3+0 is not one of even, N+N"),
        ("sp=on", "sp=on splits tokens over tensor-parallel ranks; add tp=2, or drop it"),
        ("tp=2 sp=maybe", "sp=maybe is neither on nor off"),
        ("wrap=size:100", "wrap=size:100 says what is gathered together; add zero=2 or 3, or drop it"),
        ("wrap=block", "wrap=block says what is gathered together; add zero=2 or 3, or drop it"),
        ("zero=1 wrap=name:mlp", "wrap=name:mlp says what is gathered together; add zero=2 or 3, or drop it"),
    ],
)
def test_refusal_says_what_to_change(text: str, expected: str) -> None:
    assert refusal(text) == expected


@pytest.mark.parametrize(
    ("text", "choices", "hint"),
    [
        ("schedule=gpip", "gpipe, 1f1b, interleaved:N, zero-bubble, zbv", "gpipe"),
        ("schedule=interleaved", "gpipe, 1f1b, interleaved:N, zero-bubble, zbv", "interleaved:N"),
        ("schedule=1f1b:2", "gpipe, 1f1b, interleaved:N, zero-bubble, zbv", "1f1b"),
        ("schedule=interleaved:0", "gpipe, 1f1b, interleaved:N, zero-bubble, zbv", "interleaved:N"),
        ("cp_method=rings", "ring, ulysses, ulysses:N", "ring"),
        ("cp_method=ulysses:0", "ring, ulysses, ulysses:N", "ulysses"),
        ("recompute=selectiv", "none, full, selective, first:N", "selective"),
        ("recompute=first", "none, full, selective, first:N", "first:N"),
        ("recompute=first:x", "none, full, selective, first:N", "first:N"),
        ("recompute=first:0", "none, full, selective, first:N", "first:N"),
        ("recompute=full:2", "none, full, selective, first:N", "full"),
        ("offload=parameter", "none, optimizer, parameters", "parameters"),
        ("zero=3 wrap=blocks", "auto, block, size:N, name:A+B", "block"),
        ("zero=3 wrap=size:", "auto, block, size:N, name:A+B", "size:N"),
        ("zero=3 wrap=size:-5", "auto, block, size:N, name:A+B", "size:N"),
        ("zero=3 wrap=name:", "auto, block, size:N, name:A+B", None),
        ("zero=3 wrap=name:mlp+", "auto, block, size:N, name:A+B", None),
        ("offload=", "none, optimizer, parameters", None),
        ("offload=activation", "none, optimizer, parameters, activations, optimizer+activations", "activations"),
        ("offload=activations+none", "none, optimizer, parameters, activations", None),
    ],
)
def test_unknown_choice_lists_the_choices_and_the_nearest(text: str, choices: str, hint: str | None) -> None:
    said = refusal(text)
    assert said.startswith(f"{text.split()[-1]} is not one of {choices}")
    assert hint is None or said.endswith(f" (did you mean '{hint}'?)")


def test_unknown_key_lists_the_keys_and_the_nearest() -> None:
    said = refusal("ddp=4")
    assert said.startswith("unknown key 'ddp' (did you mean 'dp'?); write auto, or KEY=VALUE with ")
    assert said.endswith(", ".join(KEYS))


@given(strategies(), st.integers(1, 2000))
def test_only_the_world_that_it_fills_is_taken(strategy: Strategy, world: int) -> None:
    if world == strategy.world:
        assert Strategy.parse(str(strategy), world) == strategy
    else:
        assert f"it needs {strategy.world} processes and there are {world}" in refusal(str(strategy), world)


def test_shares_deal_out_every_sample_once() -> None:
    strategy = Strategy(replicate=6, shares="3+2+1")
    assert strategy.data_shares == (3, 3, 2, 2, 1, 1)
    parts = [strategy.own_samples(rank, 24) for rank in range(6)]
    assert [sample for own in parts for sample in range(24)[own]] == list(range(24))
    assert [own.stop - own.start for own in parts] == [6, 6, 4, 4, 2, 2]


def test_batch_is_cut_by_shares_and_the_micro_batch_of_one() -> None:
    strategy = Strategy(replicate=2, shares="3+1")
    assert strategy.micro_steps(24, 2) == 3
    assert strategy.micro_steps(24, None) == 1
    with pytest.raises(ConfigError, match=r"all shares of dp=2 shares=3\+1 x train.micro_batch=2\); use 16 or 24"):
        strategy.micro_steps(20, 2)
