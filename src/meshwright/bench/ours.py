"""Meshwright's contender: the step that `meshwright train` takes, with the batches that its loop makes."""

from __future__ import annotations

import torch

from meshwright.bench.clock import Clock
from meshwright.bench.trial import Facts, Trial
from meshwright.parallel.world import join_world
from meshwright.strategy import Strategy
from meshwright.training.step import TrainingStep


def train(trial: Trial, clock: Clock) -> Facts:
    """Train with the settings of the trial."""
    config, spec = trial.config, trial.spec
    strategy = Strategy.parse(config.parallel.strategy, 1)
    strategy.check(spec, 1, trial.length, config.train.optimizer)
    micro_steps = strategy.micro_steps(trial.micro_batch, config.train.micro_batch)
    with join_world(config.run.device, config.elastic.timeout_s) as world:
        torch.use_deterministic_algorithms(config.train.deterministic)
        step = TrainingStep(config, spec, strategy, world)
        batches = []
        for number, tokens in enumerate(trial.batches()):
            samples = torch.arange(trial.micro_batch) + number * trial.micro_batch
            batch = {
                "tokens": torch.from_numpy(tokens).unflatten(0, (micro_steps, -1)),
                "samples": samples.unflatten(0, (micro_steps, -1)),
                "valid": torch.tensor(trial.tokens),
            }
            batches.append(
                {name: one.pin_memory() if clock.device.type == "cuda" else one for name, one in batch.items()}
            )
        clock.begin()
        for number, batch in enumerate(batches):
            clock.stepped(step(number, batch)["loss"])
        return Facts(sum(one.numel() for one in step.model.parameters()))
