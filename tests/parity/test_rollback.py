"""A run that goes back to a checkpoint within its processes is, under every kind of split, that of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.load_model import load_model
from meshwright.config import load_config
from meshwright.errors import DataError
from meshwright.faults import parse_faults
from meshwright.observe.ledger import Ledger, account
from meshwright.parallel.world import World
from meshwright.trainer import Trainer
from meshwright.training.loop import TrainingLoop
from meshwright.verify.pool import RankPool

BAD = ";".join(f"step={step},phase=forward,kind=nan" for step in (6, 7))
SETTINGS = [
    "train.precision=float64",
    "train.steps=9",
    "train.global_batch=8",
    "train.micro_batch=2",
    "checkpoint.every=3",
    "elastic.bad_steps=2",
    "observe.tensorboard=false",
    "observe.ledger=true",
]
STRATEGIES = [
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=2",
    "dp=4 zero=3 replicate=2",
    "dp=2 tp=2",
    "dp=2 zero=3 tp=2",
    "dp=1 pp=2",
    "dp=2 pp=2 zero=2",
    "dp=2 cp=2",
    "dp=2 offload=optimizer",
    "dp=2 zero=3 offload=parameters",
]


def train_badly(world: World, overrides: list[str]) -> None:
    world.pulse._faults = parse_faults(BAD)
    Trainer(load_config(None, overrides), world).train()


def outcome(folder: Path) -> tuple[list[tuple[int, float]], dict[str, torch.Tensor]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines], load_model(folder).state_dict()


@pytest.fixture(scope="module")
def alone(pool: RankPool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of one process for each model."""
    root = tmp_path_factory.mktemp("alone")
    for name, overrides in _models(corpus).items():
        pool.run(train_badly, 1, [*overrides, *SETTINGS, f"run.dir={root / name}"])
    return {name: root / name for name in _models(corpus)}


def _models(corpus: Path) -> dict[str, list[str]]:
    tiny = ["model.preset=tiny", "model.spec.num_hidden_layers=2", f"data.path={corpus}", "data.sequence_length=32"]
    tiny += ["train.lr=1e-2", "train.eval_sequences=8"]
    return {
        "dense": [*tiny, "model.spec.tie_word_embeddings=true"],
        "experts": [*tiny, "model.preset=tiny-moe", "model.spec.experts.router_bias_update_rate=0.01"],
    }


@pytest.mark.parametrize(
    ("model", "strategy"), [*(("dense", strategy) for strategy in STRATEGIES), ("experts", "dp=2 ep=2 zero=2")]
)
def test_going_back_gives_the_run_of_one_process(
    pool: RankPool, alone: dict[str, Path], corpus: Path, tmp_path: Path, model: str, strategy: str
) -> None:
    ranks = 1
    for part in strategy.split():
        key, _, value = part.partition("=")
        ranks *= int(value) if key in ("dp", "tp", "pp", "cp") else 1
    folder = tmp_path / "run"
    # The balance of experts is taken over the samples of one pass on all ranks.
    micro = ["train.micro_batch=1"] if model == "experts" else []
    overrides = [*_models(corpus)[model], *SETTINGS, *micro, f"parallel.strategy={strategy}", f"run.dir={folder}"]
    pool.run(train_badly, ranks, overrides)
    found, expected = account(folder), account(alone[model])
    assert found.exact, found.problems
    assert found.skipped_windows == expected.skipped_windows == [(40, 56)]
    assert found.steps == expected.steps
    (losses, weights), (true_losses, true_weights) = outcome(folder), outcome(alone[model])
    assert [step for step, _ in losses] == list(range(1, 10))
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in true_losses], rel=1e-9)
    for name, weight in true_weights.items():
        assert torch.allclose(weights[name], weight, rtol=0, atol=1e-9), name


def feed_otherwise(world: World, overrides: list[str]) -> str:
    trainer = TrainingLoop(load_config(None, overrides), world)
    ledger = Ledger()
    ledger.at_start(trainer)
    for step in range(2):
        trainer.step = step + 1
        samples = torch.arange(4)[None] + 4 * step + (step == 1 and world.rank == 1)
        trainer.batch = {"samples": samples}
        try:
            ledger.after_step(trainer, {})
        except DataError as error:
            return str(error)
    return ""


def test_ranks_that_share_a_part_of_the_batch_and_are_fed_other_samples_are_named(
    pool: RankPool, corpus: Path, tmp_path: Path
) -> None:
    overrides = [*_models(corpus)["dense"], *SETTINGS, "parallel.strategy=tp=2", f"run.dir={tmp_path / 'run'}"]
    first, _ = pool.run(feed_otherwise, 2, overrides)
    assert "step 2: rank 1 was fed other samples than the ranks that share its part" in first
