"""AdamW's decay groups, and what one step of the loop adds up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.config import TrainSection, load_config
from meshwright.models.initialize import build
from meshwright.models.presets import preset
from meshwright.parallel.parallelize import parallelize
from meshwright.training.loop import TrainingLoop
from meshwright.training.optimizer import make_optimizer


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = build(preset("tiny").model_copy(update={"bias": ("q",)}))
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(parallelize(model, "dp=1"), TrainSection(lr=0.5, weight_decay=0.1)).step()
    for name, parameter in model.named_parameters():
        expected = 1.0 if "norm" in name or name.endswith("bias") else 0.95
        assert parameter.unique().tolist() == pytest.approx([expected]), name


def make_loop(tiny_run: list[str], folder: Path, *overrides: str) -> TrainingLoop:
    settings = [*tiny_run, f"run.dir={folder}", "train.precision=float64", *overrides]
    return TrainingLoop(load_config(None, settings))


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
def test_accumulating_a_batch_twice_is_one_step_on_it(tiny_run: list[str], tmp_path: Path, model: str) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (1, 4, 33))
    batch = {"tokens": torch.from_numpy(rows), "samples": torch.arange(4)[None]}
    twice = {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}
    once = make_loop(tiny_run, tmp_path / "a", f"model.preset={model}").train_step(0, batch)
    both = make_loop(tiny_run, tmp_path / "b", f"model.preset={model}").train_step(0, twice)
    assert both["loss"] == pytest.approx(once["loss"], rel=1e-12)
    assert both["grad_norm"] == pytest.approx(once["grad_norm"], rel=1e-12)


def test_deterministic_mode_is_switched_on(tiny_run: list[str], tmp_path: Path) -> None:
    try:
        make_loop(tiny_run, tmp_path, "train.deterministic=true")
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
