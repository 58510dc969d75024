"""From which step on gradients are compressed: what `auto` chooses and says, where it stays, loops of one's own."""

from __future__ import annotations

import json
from contextlib import nullcontext, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.comm.travel import Travel
from meshwright.config import load_config
from meshwright.lock import Fence
from meshwright.parallel.world import World
from meshwright.planning.question import Question
from meshwright.planning.retune import Seen, Switch
from meshwright.strategy import Strategy
from meshwright.trainer import Trainer
from meshwright.verify.pool import RankPool
from tests.parity.own_loops import images, loss_of, make
from tests.parity.test_compression import losses, settings_of, train, train_and_hear

AUTO = ("comm.compress_after=auto", "train.steps=10", "checkpoint.every=2", "checkpoint.keep=10")
TOPK = "dp=2 compress=topk:0.05"


def rows(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def compressed_steps(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder) if row["sent_share"] < 1]


@pytest.mark.parametrize(
    ("kind", "first", "said"),
    [
        (
            "topk:0.05",
            9,
            "compress=topk:0.05 begins with step 9 of 10 (comm.compress_after=auto: gradients travel whole",
        ),
        ("powersgd:4", 8, "compress=powersgd:4 begins with step 8 of 10 (comm.compress_after=auto: gradients travel"),
        ("int8", 1, "compress=int8 begins with the first step (comm.compress_after=auto: it leaves nothing over"),
    ],
)
def test_a_run_begins_by_itself_where_it_does_no_harm_and_says_so(
    kind: str, first: int, said: str, pool: RankPool, corpus: Path, tmp_path: Path
) -> None:
    settings = [one for one in settings_of(tmp_path, corpus, f"dp=2 compress={kind}", *AUTO[1:]) if "after" not in one]
    heard, *_ = pool.run(train_and_hear, 2, settings)
    assert compressed_steps(tmp_path) == list(range(first, 11))
    assert f"comm   {said}" in heard
    assert "warning" not in heard
    assert [one["compress_after"] for one in rows(tmp_path, "events.jsonl") if one["event"] == "started"] == [first - 1]


def test_a_number_that_is_early_is_warned_of(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    heard, *_ = pool.run(train_and_hear, 2, settings_of(tmp_path, corpus, TOPK, *AUTO, "comm.compress_after=3"))
    assert "comm   compress=topk:0.05 begins with step 4 of 10 (comm.compress_after=3)" in heard
    assert "comm   warning: topk after 3 of 10 steps is early" in heard
    assert "ended 41% above the loss without compression; comm.compress_after=auto, 8 here" in heard
    assert compressed_steps(tmp_path) == list(range(4, 11))


def test_one_rank_that_has_nothing_to_compress_says_so(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    heard, *_ = pool.run(train_and_hear, 1, settings_of(tmp_path, corpus, "dp=1 compress=topk:0.05", "train.steps=2"))
    assert "comm   compress=topk:0.05 has nothing to do: one rank sends no gradients" in heard


def test_a_run_that_is_cut_short_begins_at_the_same_step(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    pool.run(train, 2, settings_of(tmp_path / "whole", corpus, TOPK, *AUTO))
    halves = settings_of(tmp_path / "halves", corpus, TOPK, *AUTO)
    for step in (4, 10):
        with pytest.raises(Exception, match="injected fault"):
            pool.run(train, 2, halves, f"step={step},phase=forward,kind=raise")
    pool.run(train, 2, halves)
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")


def test_a_longer_run_begins_later_unless_it_has_begun(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, corpus, TOPK, *AUTO)
    with pytest.raises(Exception, match="injected fault"):
        pool.run(train, 2, settings, "step=6,phase=forward,kind=raise")
    # Nothing is compressed yet: 80% of 15 steps.
    pool.run(train, 2, [*settings, "train.steps=15"])
    assert compressed_steps(tmp_path) == [13, 14, 15]
    # It has begun: it does not stop again, though 80% of 20 steps would be 16.
    heard, *_ = pool.run(train_and_hear, 2, [*settings, "train.steps=20"])
    assert compressed_steps(tmp_path) == list(range(13, 21))
    assert (
        "compress=topk:0.05 from step 16 of 20 on (comm.compress_after=auto: 12, as it was settled before in this run; "
        "a new run of this length would take 16)"
    ) in heard
    assert "warning: topk after 12 of 20 steps is early" in heard


def steps_of(world: World, overrides: list[str]) -> int:
    """Steps that would go whole if the run went on."""
    trainer = Trainer(load_config(None, overrides), world)
    # Let go of the run folder.
    with trainer._lock or nullcontext():
        return trainer.one_step.beginning.steps


def test_another_number_than_a_run_has_begun_with_is_refused(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, corpus, TOPK, *AUTO)
    pool.run(train, 2, settings)
    longer = [*settings, "train.steps=12"]
    with pytest.raises(Exception, match=r"gradients are compressed after 8 steps.*give comm\.compress_after=8"):
        pool.run(steps_of, 2, [*longer, "comm.compress_after=10"])
    assert pool.run(steps_of, 2, [*longer, "comm.compress_after=8"]) == [8, 8]


def test_a_number_stays_where_it_is_no_longer_given(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, corpus, TOPK, *AUTO)
    pool.run(train, 2, [*settings, "comm.compress_after=5", "train.steps=4"])
    assert pool.run(steps_of, 2, settings) == [5, 5]
    # By a number, not by another length: nothing of what is said may be about that.
    heard, *_ = pool.run(train_and_hear, 2, settings)
    assert "begins with step 6 of 10 (comm.compress_after=auto: 5, as it was settled before in this run; " in heard
    with pytest.raises(Exception, match=r"settled before.*compressed after 5 steps.*give comm\.compress_after=5"):
        pool.run(steps_of, 2, [*settings, "train.steps=12", "comm.compress_after=6"])


def test_a_number_is_kept_by_checkpoints_alone(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, corpus, TOPK, *AUTO)
    with pytest.raises(Exception, match="injected fault"):
        pool.run(train, 2, [*settings, "comm.compress_after=5"], "step=1,phase=forward,kind=raise")
    assert pool.run(steps_of, 2, settings) == [8, 8]


def test_a_number_that_differs_from_the_one_before_is_refused(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, corpus, TOPK, *AUTO)
    pool.run(train, 2, [*settings, "comm.compress_after=5", "train.steps=4"])
    with pytest.raises(Exception, match=r"comm\.compress_after was 5, now 6"):
        pool.run(steps_of, 2, [*settings, "comm.compress_after=6"])


def test_a_run_that_sent_all_may_begin_when_it_goes_on(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    pool.run(train, 2, settings_of(tmp_path, corpus, "dp=2", *AUTO, "train.steps=4"))
    settings = settings_of(tmp_path, corpus, TOPK, *AUTO)
    assert pool.run(steps_of, 2, settings) == [8, 8]
    assert pool.run(steps_of, 2, [*settings, "comm.compress_after=4"]) == [4, 4]
    # Not with one that is done.
    heard, *_ = pool.run(train_and_hear, 2, [*settings, "comm.compress_after=2"])
    assert "comm   compress=topk:0.05 from step 5 of 10 on (comm.compress_after=2)" in heard
    assert [row["step"] for row in rows(tmp_path) if row.get("sent_share", 1) < 1] == list(range(5, 11))
    assert [one["compress_after"] for one in rows(tmp_path, "events.jsonl") if one["event"] == "resumed"] == [4]


def test_a_kind_that_leaves_nothing_over_settles_nothing_for_one_that_does(
    pool: RankPool, corpus: Path, tmp_path: Path
) -> None:
    pool.run(train, 2, settings_of(tmp_path, corpus, "dp=2 compress=int8", *AUTO, "train.steps=4"))
    pool.run(train, 2, settings_of(tmp_path, corpus, TOPK, *AUTO))
    assert compressed_steps(tmp_path) == [1, 2, 3, 4, 9, 10]


def test_whole_steps_are_no_measure_of_a_compressed_strategy(pool: RankPool, corpus: Path, tmp_path: Path) -> None:
    pool.run(train, 2, settings_of(tmp_path, corpus, TOPK, "comm.compress_after=9", "train.steps=36"))
    # Five at the start of what counts are left out, too.
    assert json.loads((tmp_path / "plan.json").read_text())["measured"]["steps"] == 36 - 9 - 5


def retune(world: World, overrides: list[str]) -> list[tuple[int, str]]:
    """After which steps a run has looked for a better strategy, and of which one it took its steps to be.

    It has tried what runs now before, and it was faster then.
    """
    trainer = Trainer(load_config(None, overrides), world)
    # As from a launcher: without one nobody would start the ranks anew.
    trainer.world = replace(world, fence=Fence(launch="one"))
    looked = []

    def better(question: Question, now: Strategy, micro_batch: int, seen: Seen, tried: Any) -> Switch:
        looked.append((trainer.step, str(now)))
        assert (str(trainer.job.strategy), micro_batch) not in tried, "it would be started anew as it is"
        assert tried, "in micro-batches of other sizes"
        return Switch(Strategy.parse("pp=2", 2), 1, seen.step_s, seen.step_s / 2, "links")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.training.retune.better", better)
        before = {(str(trainer.job.strategy), size): 1e-9 for size in (1, 2, 4)}
        patch.setattr("meshwright.training.retune.tried_before", lambda held: before)
        trainer.train()
    return looked


@pytest.mark.parametrize(("after", "looked"), [(6, (24, TOPK)), (18, (12, "dp=2"))])
def test_a_run_that_looks_for_a_better_strategy_knows_which_steps_it_has_seen(
    after: int, looked: tuple[int, str], pool: RankPool, corpus: Path, tmp_path: Path
) -> None:
    """Too few are left at the twelfth where compression began after six."""
    settings = ("train.steps=30", "checkpoint.every=12", "parallel.retune=true", f"comm.compress_after={after}")
    first, _ = pool.run(retune, 2, settings_of(tmp_path, corpus, TOPK, *settings))
    assert first == [looked]
    held = json.loads((tmp_path / "plan.json").read_text())
    assert held["strategy"] == "dp=1 pp=2"
    # What was asked for: a way back compresses again.
    assert {text for text, *_ in held["tried"]} == {TOPK}
    assert max(step_s for *_, step_s in held["tried"]) > 1e-6, "what was seen now"


def loop_by_itself(world: World, after: int | None, by_hand: bool) -> tuple[str, list[bool]]:
    """What is said, and whether a step sent less than all, of five."""
    with redirect_stderr(StringIO()) as said:
        parallel = make("branches", "dp=2 compress=topk:0.05", travel=Travel(compress_after=after))
    # Not made by `parallel.optimizer`: nobody tells when it steps.
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    parts = [one[parallel.data_rank :: 2] for one in images(8).tensors]
    found = []
    for _ in range(5):
        if by_hand:
            for last in (False, True):
                with parallel.micro_step(last=last):
                    loss_of(parallel, *parts).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            parallel.backward(loss_of, *parts, micro_steps=2)
            parallel.step(optimizer)
        with torch.no_grad():
            parallel(parts[0])
        counted = parallel.sent_bytes()
        assert counted is not None
        found.append(counted[0] < counted[1])
    return said.getvalue(), found


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_loop_of_ones_own_begins_after_the_steps_it_names(by_hand: bool, pool: RankPool) -> None:
    for said, found in pool.run(loop_by_itself, 2, 3, by_hand):
        assert found == [False, False, False, True, True]
        assert said == ""
    (first, found), (other, _) = pool.run(loop_by_itself, 2, None, by_hand)
    assert "compress=topk:0.05 begins after 1000 steps that travel whole" in first
    assert "Travel(compress_after=N)" in first
    assert other == ""
    assert not any(found)
