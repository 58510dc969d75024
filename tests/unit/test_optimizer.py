"""AdamW's decay groups, clipping, and what one step of the loop adds up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.config import TrainSection, load_config
from meshwright.models.initialize import build
from meshwright.models.presets import preset
from meshwright.training.loop import TrainingLoop
from meshwright.training.optimizer import clip_gradients, make_optimizer


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    model = build(preset("tiny").model_copy(update={"bias": ("q",)}))
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    make_optimizer(model, TrainSection(lr=0.5, weight_decay=0.1)).step()
    for name, parameter in model.named_parameters():
        expected = 1.0 if "norm" in name or name.endswith("bias") else 0.95
        assert parameter.unique().tolist() == pytest.approx([expected]), name


def test_clipping_scales_all_gradients_to_the_largest_norm() -> None:
    weights = [torch.zeros(2, 2, requires_grad=True), torch.zeros(3, requires_grad=True), torch.zeros(5)]
    weights[0].grad, weights[1].grad = torch.full((2, 2), 2.0), torch.tensor([0.0, 3.0, 0.0])
    assert float(clip_gradients(weights, 2.5)) == 5.0
    assert float(torch.cat([w.grad.flatten() for w in weights if w.grad is not None]).norm()) == pytest.approx(2.5)
    assert float(weights[1].grad[1]) == pytest.approx(1.5)


def test_gradients_are_left_alone_without_or_below_a_limit() -> None:
    for largest in (0.0, 10.0):
        weight = torch.zeros(2, requires_grad=True)
        weight.grad = torch.tensor([3.0, 4.0])
        assert float(clip_gradients([weight], largest)) == 5.0
        assert weight.grad.tolist() == [3.0, 4.0]


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
