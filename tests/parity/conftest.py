"""One pool of ranks for all parity tests, started once and reused."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from meshwright.elastic.ranks import may_fork
from meshwright.models.spec import Experts, ModelSpec
from meshwright.verify.parity import Prover
from meshwright.verify.pool import RankPool

_SHAPE = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 58,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
_GPT = {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "dropout": 0.1}
_EXPERTS = Experts(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=22,
    num_shared_experts=1,
    router_aux_loss_coef=0.01,
    router_bias_update_rate=0.01,
    first_k_dense_replace=1,
)

SPECS = {
    # The vocabulary and the feed-forward's width are divisible by neither 2 nor 4.
    "gqa": ModelSpec(**_SHAPE),
    "tied": ModelSpec(**_SHAPE, tie_word_embeddings=True),
    "gpt": ModelSpec(**{**_SHAPE, **_GPT}, bias=("q", "k", "v", "o", "up", "down"), tie_word_embeddings=True),
    "few-kv": ModelSpec(**{**_SHAPE, "num_key_value_heads": 1}, qk_norm=True, bias=("q", "k", "v", "head")),
    "experts": ModelSpec(**_SHAPE, experts=_EXPERTS),
}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Found where it begins: with a thread in this process, tests that plant a bug in forked ranks would all fail."""
    yield
    assert may_fork("cpu"), f"threads: {threading.enumerate()}, {len(os.listdir('/proc/self/task'))} in all"


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    # Threads that another test left in this process would make every rank a fresh interpreter, ten times as slow.
    assert may_fork("cpu"), f"threads: {threading.enumerate()}, {len(os.listdir('/proc/self/task'))} in all"
    with RankPool(8) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def prover(pool: RankPool) -> Prover:
    return Prover(pool)
