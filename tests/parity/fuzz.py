"""Random small models under random legal strategies: does each compute what one process computes?

`make fuzz` (python -m tests.parity.fuzz) goes on until it is stopped or finds a case that differs, and shrinks that to
the smallest one. What it ever found stays in test_fuzz.py by name.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.launch.local import RankError
from meshwright.models.spec import Experts, ModelSpec
from meshwright.schedules import stages_per_rank
from meshwright.strategy import Strategy
from meshwright.verify.parity import Case, Prover
from meshwright.verify.pool import RankPool

Draw = Callable[[st.SearchStrategy[Any]], Any]
LINEAR = ("q", "k", "v", "o", "gate", "up", "down", "head")


@st.composite
def degrees(draw: Draw, world: int) -> dict[str, int]:
    """Factors of the world, by axis."""
    found = dict.fromkeys(("pp", "replicate", "shard", "cp", "tp"), 1)
    while world > 1:
        found[draw(st.sampled_from(sorted(found)))] *= 2
        world //= 2
    return found


@st.composite
def strategies(draw: Draw) -> Strategy:
    """A strategy on 2, 4 or 8 ranks."""
    taken = draw(degrees(draw(st.sampled_from([2, 4, 8]))))
    zero = draw(st.integers(1 if taken["shard"] > 1 else 0, 3))
    if zero == 0:
        taken["replicate"], taken["shard"] = taken["replicate"] * taken["shard"], 1
    data = taken["replicate"] * taken["shard"]
    schedules = ["1f1b", "gpipe", "interleaved:2", "zero-bubble", "zbv"]
    try:
        return Strategy(
            **taken,
            zero=zero,
            ep=draw(st.sampled_from([ep for ep in (1, 2, 4, 8) if data % ep == 0])),
            sp=draw(st.booleans()) if taken["tp"] > 1 else False,
            schedule=draw(st.sampled_from(schedules)) if taken["pp"] > 1 else "1f1b",
            layers=draw(st.sampled_from(["even", "balanced"])) if taken["pp"] > 1 else "even",
            cp_method=draw(st.sampled_from(["ring", "ulysses"])) if taken["cp"] > 1 else "ring",
            recompute=draw(st.sampled_from(["none", "full", "selective", "first:1"])),
            offload=draw(st.sampled_from(["none", "none", "none", "optimizer", "parameters", "activations"])),
            wrap=draw(st.sampled_from(["auto", "block", "size:500"])) if zero > 1 else "auto",
            shares=draw(st.sampled_from(["even", "even", "2+1", "1+3"])) if data > 1 else "even",
        )
    except ConfigError:
        assume(False)
        raise


@st.composite
def models(draw: Draw, strategy: Strategy) -> ModelSpec:
    """A small model with enough layers and experts for the strategy."""
    kv_heads, per_kv = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    stages = strategy.pp * stages_per_rank(strategy.schedule) if strategy.pp > 1 else 1
    swiglu = draw(st.booleans())
    tied = draw(st.booleans())
    bias = draw(st.lists(st.sampled_from([one for one in LINEAR if one != "gate" or swiglu]), max_size=3, unique=True))
    experts = None
    if strategy.ep > 1 or draw(st.integers(0, 3)) == 0:
        count = draw(st.sampled_from([4, 8]))
        experts = Experts(
            num_experts=count,
            num_experts_per_tok=draw(st.integers(1, 3)),
            moe_intermediate_size=draw(st.sampled_from([8, 11])),
            num_shared_experts=draw(st.integers(0, 1)),
            norm_topk_prob=draw(st.booleans()),
            first_k_dense_replace=draw(st.integers(0, 1)),
            router_aux_loss_coef=draw(st.sampled_from([0.0, 0.01])),
            router_bias_update_rate=draw(st.sampled_from([0.0, 0.01])),
        )
    return ModelSpec(
        vocab_size=draw(st.integers(9, 40)),
        hidden_size=draw(st.sampled_from([8, 16, 20])),
        intermediate_size=draw(st.sampled_from([16, 21])),
        num_hidden_layers=draw(st.integers(stages, stages + 2)),
        num_attention_heads=kv_heads * per_kv,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 8])),
        max_position_embeddings=64,
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        positions=draw(st.sampled_from(["rope", "learned"])),
        activation="swiglu" if swiglu else draw(st.sampled_from(["gelu", "gelu_tanh"])),
        bias=tuple(one for one in bias if not (tied and one == "head")),
        qk_norm=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([None, None, 3])),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.1])),
        tie_word_embeddings=tied,
        experts=experts,
    )


@st.composite
def cases(draw: Draw) -> Case:
    """A case that its strategy takes."""
    strategy = draw(strategies())
    spec = draw(models(strategy))
    micro_steps, samples = draw(st.integers(1, 5)), draw(st.integers(1, 2))
    tokens = draw(st.integers(2, 20))
    try:
        strategy.check(spec, strategy.world, tokens)
    except ConfigError:
        assume(False)
    batch = micro_steps * samples * strategy.all_shares
    return Case(spec, str(strategy), strategy.world, micro_steps=micro_steps, batch=batch, tokens=tokens, steps=3)


def search(prover: Prover, number: int) -> int:
    """How many cases of a seed agree; raises at one that does not, shrunk to the smallest."""
    agreed, found_before = 0, False

    @seed(number)
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(cases())
    def agrees(case: Case) -> None:
        nonlocal agreed, found_before
        try:
            found = prover.differences(case)
        except RankError as error:
            found = [str(error)[-1500:]]
        text = f"{case}\n" + "\n".join(found[:5])
        if found and not found_before:
            print(f"seed {number} found\n{text}\nand looks for a smaller one", file=sys.stderr, flush=True)
            found_before = True
        assert not found, text
        agreed += 1

    agrees()
    return agreed


def main() -> int:
    """Look for a case that differs until stopped."""
    started, agreed = time.monotonic(), 0
    with RankPool(8) as pool:
        prover = Prover(pool)
        for number in itertools.count(int(os.environ.get("FUZZ_SEED", "0"))):
            try:
                agreed += search(prover, number)
            except KeyboardInterrupt:
                return 0
            except AssertionError as error:
                print(f"seed {number}: the smallest case that differs:\n{error}", file=sys.stderr)
                return 1
            print(f"{agreed} cases agree, {time.monotonic() - started:.0f} s, seeds up to {number}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
