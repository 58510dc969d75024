"""Checkpoints of a loop of one's own: training goes on under other strategies, and mistakes are told in words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.comm.travel import Travel
from meshwright.errors import CheckpointError, UserError
from meshwright.models.initialize import build
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS
from tests.parity.own_loops import (
    Trace,
    assert_same,
    go_on,
    images,
    loss_of,
    make,
)

ROUTES = [
    ("branches", [("dp=2 zero=3", 2), ("dp=1 tp=2", 4), ("dp=1", 5), ("dp=2", 8)]),
    ("branches", [("dp=1", 1), ("dp=2 zero=1", 4), ("dp=2 zero=2 tp=2", 8)]),
    ("convolutions", [("dp=2 zero=3", 2), ("dp=1", 5), ("dp=4 zero=3 replicate=2", 8)]),
    ("convolutions", [("dp=2", 4), ("dp=2 zero=2", 5), ("dp=2 zero=1", 8)]),
]


@pytest.mark.parametrize(("kind", "route"), ROUTES)
def test_training_goes_on_under_other_strategies(
    kind: str, route: list[tuple[str, int]], pool: RankPool, tmp_path: Path
) -> None:
    (whole,) = pool.run(go_on, 1, kind, "dp=1", str(tmp_path / "whole"), 0, 8)
    first = 0
    for strategy, last in route:
        ranks = mw.Strategy.fewest_processes(strategy)
        expected = Trace(whole.losses[first:last], whole.norms[first:last], whole.held, whole.without_state)
        for found in pool.run(go_on, ranks, kind, strategy, str(tmp_path / "parts"), first, last):
            assert_same(found, expected, held=last == 8)
        first = last


@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("compress", ["topk:0.05", "powersgd:1"])
def test_gradients_that_were_not_sent_go_on_bit_for_bit(
    compress: str, after: int, pool: RankPool, tmp_path: Path
) -> None:
    """Also where compression begins after the checkpoint: at the same step."""
    strategy = f"dp=2 compress={compress}"
    whole = pool.run(go_on, 2, "branches", strategy, str(tmp_path / "whole"), 0, 6, after)
    pool.run(go_on, 2, "branches", strategy, str(tmp_path / "parts"), 0, 3, after)
    for found, expected in zip(
        pool.run(go_on, 2, "branches", strategy, str(tmp_path / "parts"), 3, 6, after), whole, strict=True
    ):
        assert found.losses == expected.losses[3:]
        for name, value in found.held.items():
            assert torch.equal(value, expected.held[name]), name


@pytest.mark.parametrize("later", [50, None])
def test_compression_that_has_begun_does_not_stop_again(later: int | None, pool: RankPool, tmp_path: Path) -> None:
    strategy = "dp=2 compress=topk:0.05"
    whole, _ = pool.run(go_on, 2, "branches", strategy, str(tmp_path / "whole"), 0, 6, 1)
    pool.run(go_on, 2, "branches", strategy, str(tmp_path / "parts"), 0, 3, 1)
    found, _ = pool.run(go_on, 2, "branches", strategy, str(tmp_path / "parts"), 3, 6, later)
    assert found.losses == whole.losses[3:]


def go_on_by_hand(world: World, strategy: str, folder: str, first: int, last: int) -> list[bool]:
    """Steps [first, last) whose passes and updates nobody counts; whether each sent less than all."""
    parallel = make("branches", strategy, travel=Travel(compress_after=4))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    parallel.load(folder, optimizer, must_exist=first > 0)
    rows = [one[parallel.data_rank :: parallel.strategy.dp] for one in images(8).tensors]
    found = []
    for _ in range(first, last):
        loss_of(parallel, *rows).backward()
        optimizer.step()
        optimizer.zero_grad()
        counted = parallel.sent_bytes()
        found.append(counted is not None and counted[0] < counted[1])
    parallel.save(folder, optimizer, step=last)
    return found


def whole_steps_of(world: World, folder: str, after: int, steps: tuple[int, ...]) -> list[int]:
    """How many steps go whole after each of some checkpoints, which one loop loads in turn."""
    parallel, found = make("branches", "dp=2 compress=topk:0.05", travel=Travel(compress_after=after)), []
    for step in steps:
        parallel.load(f"{folder}/step-{step:06}")
        assert parallel.compressor is not None
        found.append(parallel.compressor.whole_steps)
    return found


def test_a_loop_that_goes_back_begins_again_when_it_was_asked_to(pool: RankPool, tmp_path: Path) -> None:
    for first, last in ((0, 1), (1, 3)):
        pool.run(go_on, 2, "branches", "dp=2 compress=topk:0.05", str(tmp_path), first, last, 2)
    # After three steps compression had begun, after one it had not.
    assert pool.run(whole_steps_of, 2, str(tmp_path), 50, (1, 3, 1)) == [[50, 3, 50]] * 2


@pytest.mark.parametrize("between", ["dp=2 compress=topk:0.05", "dp=2", "dp=1"])
def test_steps_by_hand_are_counted_across_checkpoints(between: str, pool: RankPool, tmp_path: Path) -> None:
    """Also across one of a strategy that compresses nothing."""
    strategy = "dp=2 compress=topk:0.05"
    pool.run(go_on_by_hand, 2, strategy, str(tmp_path), 0, 3)
    # Saved again as it is, under another number.
    pool.run(save_again, mw.Strategy.fewest_processes(between), between, str(tmp_path), 4)
    for found in pool.run(go_on_by_hand, 2, strategy, str(tmp_path), 4, 7):
        assert found == [False, True, True]


def save_again(world: World, strategy: str, folder: str, step: int) -> None:
    parallel = make("branches", strategy)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    parallel.load(folder, optimizer)
    parallel.save(folder, optimizer, step=step)


@pytest.fixture
def saved(pool: RankPool, tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    pool.run(go_on, 2, "branches", "dp=2 zero=3", str(tmp_path / "saved"), 0, 1)
    pool.run(go_on, 2, "branches", "dp=2 zero=3", str(tmp_path / "saved"), 1, 2)
    return tmp_path / "saved"


def load(world: World, kind: str, strategy: str, folder: str, make_optimizer: Any = torch.optim.AdamW) -> int:
    parallel = make(kind, strategy)
    optimizer = None if make_optimizer is None else parallel.optimizer(make_optimizer, lr=1e-2)
    step: int = parallel.load(folder, optimizer)["step"]
    return step


def complaint_of(world: World, kind: str, folder: str, make_optimizer: Any = torch.optim.AdamW) -> str:
    """What loading says here, after which the rank still answers the others."""
    with pytest.raises(UserError) as caught:
        load(world, kind, "dp=2 zero=3", folder, make_optimizer)
    world.sum(torch.zeros(1))
    return str(caught.value)


def test_checkpoint_is_found_by_its_folder_or_its_number(saved: Path, pool: RankPool) -> None:
    assert pool.run(load, 2, "branches", "dp=2", str(saved)) == [2, 2]
    assert pool.run(load, 1, "branches", "dp=1", str(saved / "step-000001")) == [1]
    assert pool.run(load, 1, "branches", "dp=1", str(saved), None) == [2]


def test_what_cannot_be_loaded_is_told_in_words_on_every_rank(saved: Path, pool: RankPool, tmp_path: Path) -> None:
    for folder, kind, optimizer, complaint in (
        (saved, "convolutions", torch.optim.AdamW, "is of another model than this one: it lacks blocks.0.0.weight"),
        (saved, "branches", torch.optim.SGD, "has the state of AdamW, and this optimizer is SGD; give the same"),
        (tmp_path / "nowhere", "branches", None, "nowhere has no checkpoint: there is no such folder"),
    ):
        for found in pool.run(complaint_of, 2, kind, str(folder), optimizer):
            assert complaint in found


def test_damaged_file_is_named_and_half_a_save_is_none(saved: Path, pool: RankPool) -> None:
    newest = saved / "step-000002"
    (half := saved / ".step-000003.unfinished-0123abcd").mkdir()
    shutil.copy(newest / "model-00000.safetensors", half)
    assert pool.run(load, 2, "branches", "dp=2", str(saved)) == [2, 2]
    file = newest / "model-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    # One rank alone reads what is damaged; all of them must hear of it.
    for found in pool.run(complaint_of, 2, "branches", str(saved)):
        assert "model-00001.safetensors" in found
    (newest / "manifest.json").unlink()
    assert pool.run(load, 1, "branches", "dp=1", str(saved)) == [1]


def test_what_cannot_be_saved_is_told_in_words(tmp_path: Path) -> None:
    parallel = make("branches", "dp=1")
    optimizer = parallel.optimizer(torch.optim.AdamW)
    with pytest.raises(UserError, match=r"save\(rate=...\) is kept as JSON, which cannot hold it"):
        parallel.save(tmp_path, rate=torch.zeros(2))
    with pytest.raises(UserError, match="would come back changed: use lists for tuples"):
        parallel.save(tmp_path, seen={1: 2})
    assert parallel.load(tmp_path / "none", optimizer, must_exist=False) == {}
    parallel.save(tmp_path, step=3, note="first")
    with pytest.raises(CheckpointError, match="step-000003 is there already and is never overwritten"):
        parallel.save(tmp_path, step=3)
    with pytest.raises(CheckpointError, match="was saved without an optimizer"):
        parallel.load(tmp_path, optimizer)
    assert parallel.load(tmp_path) == {"step": 3, "note": "first"}
    with pytest.raises(CheckpointError, match="of a module of one's own"):
        mw.load_model(tmp_path)


def test_decoder_of_an_own_loop_is_a_model_for_all_commands(tmp_path: Path) -> None:
    parallel = mw.parallelize(build(SPECS["gqa"]), "dp=1")
    optimizer = parallel.optimizer(torch.optim.AdamW)
    tokens = torch.randint(67, (2, 9))
    parallel.backward(lambda model, ids: mw.cross_entropy(model(ids[:, :-1]), ids[:, 1:]), tokens)
    parallel.step(optimizer)
    parallel.save(tmp_path, optimizer)
    loaded = mw.load_model(tmp_path)
    assert torch.equal(loaded.lm_head.weight, parallel.module.lm_head.weight)  # type: ignore[union-attr]


def go_on_with_torchs_own(world: World, strategy: str, folder: str, first: int) -> list[float]:
    """Two steps with an optimizer that the loop has made by itself."""
    parallel = make("branches", strategy, seed=first)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, foreach=False)
    parallel.load(folder, optimizer, must_exist=first > 0)
    rows = [one[parallel.data_rank :: parallel.strategy.dp] for one in images(8).tensors]
    found = []
    for _ in range(2):
        found.append(float(parallel.backward(loss_of, *rows)))
        parallel.step(optimizer)
    parallel.save(folder, optimizer)
    return found


def test_optimizer_of_torchs_own_is_saved_and_loaded_in_shards(pool: RankPool, tmp_path: Path) -> None:
    one = [pool.run(go_on_with_torchs_own, 1, "dp=1", str(tmp_path / "one"), step)[0] for step in (0, 2)]
    for step, strategy in ((0, "dp=2 zero=3"), (2, "dp=2 zero=2")):
        for found in pool.run(go_on_with_torchs_own, 2, strategy, str(tmp_path / "two"), step):
            assert found == pytest.approx(one[step // 2], rel=1e-9)
