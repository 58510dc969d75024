"""How many steps go whole before gradients are compressed, and what checkpoints say of it."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.checkpoint.format import Manifest, TensorEntry
from meshwright.comm.compression import Compression
from meshwright.comm.travel import Travel
from meshwright.comm.whole_steps import early, whole_steps
from meshwright.config import load_config
from meshwright.errors import ConfigError
from meshwright.strategy import Strategy
from meshwright.training.beginning import Beginning


def test_kinds_that_leave_nothing_over_begin_at_once() -> None:
    for kind in ("none", "fp16", "bf16", "int8"):
        assert whole_steps(Compression.parse(kind), 500) == whole_steps(Compression.parse(kind), None) == 0
        assert early(Compression.parse(kind), 0, 500) is None


@pytest.mark.parametrize(
    ("kind", "steps", "whole"),
    [
        *(("topk:0.01", steps, whole) for steps, whole in ((500, 400), (1, 1), (3, 3), (7, 6), (10, 8), (1000, 800))),
        *(("powersgd:4", steps, whole) for steps, whole in ((500, 350), (1, 1), (3, 3), (7, 5), (10, 7), (90, 63))),
        ("topk:0.2", 500, 400),
        ("powersgd:32", 500, 350),
        ("topk:0.001", 500, 450),
        ("powersgd:3", 500, 450),
    ],
)
def test_kinds_that_leave_something_over_wait_for_a_share_of_the_run(kind: str, steps: int, whole: int) -> None:
    assert whole_steps(Compression.parse(kind), steps) == whole
    assert early(Compression.parse(kind), whole, steps) is None
    assert "is early" in str(early(Compression.parse(kind), whole - 1, steps))


def test_a_loop_of_unknown_length_waits_a_thousand_steps() -> None:
    assert Travel().whole_steps(Compression.parse("topk:0.01")) == 1000
    assert Travel(compress_after=7).whole_steps(Compression.parse("topk:0.01")) == 7


@pytest.mark.parametrize("after", [-1, "auto", 2.5, True])
def test_steps_of_a_loop_that_are_no_number_are_told_in_words(after: Any) -> None:
    with pytest.raises(ConfigError, match="a whole number from 0, or None for a loop whose length is not known"):
        Travel(compress_after=after).check(Strategy.parse("dp=2 compress=topk:0.01", 2))


def test_a_schedule_that_ends_later_is_the_length_of_the_run() -> None:
    strategy = Strategy.parse("dp=2 compress=topk:0.01", 2)
    assert Beginning(load_config(None, ["train.steps=100"]), strategy).steps == 80
    assert Beginning(load_config(None, ["train.steps=100", "train.schedule_steps=1000"]), strategy).steps == 800
    assert Beginning(load_config(None, ["train.steps=100", "train.schedule_steps=50"]), strategy).steps == 80


def checkpoint(asked: Any, unsent: bool, state: dict[str, Any] | None = None) -> Manifest:
    """One of step 50, of a run that was asked so."""
    entry = TensorEntry(dtype="float32", shape=(2, 4), pieces=())
    settings = {"comm": {} if asked is None else {"compress_after": asked}}
    tensors = {"unsent.w": entry} if unsent else {}
    return Manifest(step=50, position=0, strategy="dp=2", settings=settings, state=state or {}, tensors=tensors)


@pytest.mark.parametrize(
    ("manifest", "steps"),
    [
        # Written before there was an auto: 0 was in all of them, also where nothing was compressed.
        (checkpoint(0, unsent=False), 80),
        (checkpoint(0, unsent=True), 0),
        (checkpoint(30, unsent=True), 30),
        (checkpoint(60, unsent=False), 60),
        (checkpoint(None, unsent=False), 80),
        (checkpoint("auto", unsent=False), 80),
        (checkpoint("auto", unsent=True, state={"compress_after": 40}), 40),
    ],
)
def test_a_checkpoint_says_what_was_settled(manifest: Manifest, steps: int) -> None:
    strategy = Strategy.parse("dp=2 compress=topk:0.01", 2)
    beginning = Beginning(load_config(None, ["train.steps=100"]), strategy)
    beginning.restore(manifest)
    assert beginning.steps == steps
    # Back to one from before it had begun: by the length again.
    beginning.restore(checkpoint("auto", unsent=False))
    assert beginning.steps == 80


def test_what_is_settled_stays_in_checkpoints_of_other_strategies() -> None:
    config = load_config(None, ["train.steps=100"])
    topk = Beginning(config, Strategy.parse("dp=2 compress=topk:0.01", 2))
    assert topk.state(80) == {}
    assert topk.state(81) == {"compress_after": 80}
    whole = Beginning(config, Strategy.parse("dp=2", 2))
    whole.restore(checkpoint("auto", unsent=True, state=topk.state(81)))
    assert whole.state(90) == {"compress_after": 80}
    assert Beginning(config, Strategy.parse("dp=2 compress=int8", 2)).state(90) == {}


def test_one_rank_that_compresses_nothing_settles_nothing() -> None:
    config = load_config(None, ["train.steps=100"])
    assert Beginning(config, Strategy.parse("dp=1 compress=topk:0.01", 1)).state(90) == {}
