"""Checkpoints of experts that tensor parallel has cut, gates and ups each by itself: whole, for any strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.checkpoint.format import Manifest
from meshwright.checkpoint.pieces import Held
from meshwright.checkpoint.place import LocalPlace
from meshwright.checkpoint.reader import CheckpointReader, load_parts
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.training_state import parts_of
from meshwright.errors import CheckpointError
from meshwright.models.parts import whole
from meshwright.models.presets import preset
from meshwright.optim.codes import FIRST_MOMENT, Coded
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.pool import RankPool
from tests.parity.test_hugging_face_experts import build


def after_a_step(strategy: str, seed: int) -> tuple[Any, Any]:
    model = build("qwen3_moe")
    parallel = mw.parallelize(model, strategy)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens = torch.randint(66, (4, 13), generator=torch.Generator().manual_seed(seed))
    tokens = tokens.chunk(parallel.strategy.dp)[parallel.data_rank]
    parallel(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    return model, optimizer


def save(world: World, strategy: str, folder: Path) -> dict[str, Tensor]:
    """Save a model and its optimizer after a step; gives both, whole."""
    model, optimizer = after_a_step(strategy, seed=1)
    saver = Saver(LocalPlace(folder), world.side_channel(), Retention())
    facts = Manifest(step=1, position=0, strategy=strategy, model=preset("tiny"), tensors={})
    saver.save(facts, parts_of(model, optimizer), background=False)
    (outcome,) = saver.outcomes()
    assert outcome.error is None, outcome.error
    return {name: whole(value.detach()) for name, value in state(model, optimizer).items()}


def load(world: World, strategy: str, folder: Path) -> dict[str, Tensor]:
    """Overwrite another state with a saved one."""
    model, optimizer = after_a_step(strategy, seed=2)
    load_parts(CheckpointReader(folder / "step-000001"), parts_of(model, optimizer))
    return {name: whole(value.detach()) for name, value in state(model, optimizer).items()}


def state(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        kept = optimizer.state_of(parameter) if hasattr(optimizer, "state_of") else optimizer.state[parameter]
        found |= {f"{kind} {name}": value for kind, value in kept.items()}
    return found


@pytest.mark.parametrize("strategy", ["tp=2", "dp=2 tp=2 zero=1 ep=2", "dp=2 tp=2 zero=3 ep=2"])
def test_a_checkpoint_of_cut_experts_holds_them_whole(strategy: str, pool: RankPool, tmp_path: Path) -> None:
    saved = pool.run(save, Strategy.fewest_processes(strategy), strategy, tmp_path / "split")[0]
    for other in ("dp=1", "tp=2", "dp=2 tp=2 zero=2"):
        for found in pool.run(load, Strategy.fewest_processes(other), other, tmp_path / "split"):
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name], value) for name, value in saved.items())


def test_moments_in_8_bits_of_cut_experts_are_not_saved_wrongly() -> None:
    codes = torch.zeros(4, 16, 32, dtype=torch.uint8)
    held = Held(codes, (0, 8, 0), (4, 32, 32), Coded(FIRST_MOMENT, codes, torch.zeros(8)), packed=(1, 2))
    with pytest.raises(CheckpointError, match="keep moments in bf16 or float32"):
        held.places()
