"""Train from a configuration: the loop with everything that a normal run wants around it, here or on n processes."""

from __future__ import annotations

from functools import partial

import torch

from meshwright.config import RunConfig
from meshwright.launch.local import run_ranks
from meshwright.observe.console import Console
from meshwright.observe.records import Records
from meshwright.observe.sample import Sample
from meshwright.observe.tensorboard import TensorBoard
from meshwright.observe.weights_and_biases import WeightsAndBiases
from meshwright.parallel.world import World, join_world, launched_ranks
from meshwright.train.hooks import EarlyStop, Evaluate, Hook, OpenFolder, SaveCheckpoints, StopOnSignal
from meshwright.train.job import make_job, prepare_sources
from meshwright.train.loop import TrainingLoop


def standard_hooks(config: RunConfig) -> list[Hook]:
    """What happens around the steps of a normal run, in order: who adds metrics comes before who records them."""
    hooks: list[Hook] = [OpenFolder(), StopOnSignal(), Evaluate(), EarlyStop(), Records()]
    if config.observe.tensorboard:
        hooks.append(TensorBoard())
    if config.observe.wandb:
        hooks.append(WeightsAndBiases())
    hooks += [Console(), SaveCheckpoints()]
    if config.observe.sample is not None:
        hooks.append(Sample(config.observe.sample, config.observe.sample_tokens))
    return hooks


class Trainer(TrainingLoop):
    """One rank's training of a configuration, with records, console and checkpoints."""

    def __init__(self, config: RunConfig, world: World | None = None) -> None:
        super().__init__(config, world, standard_hooks(config))


def train(config: RunConfig, nproc: int = 1) -> None:
    """Train to the end: as one rank of a launcher's job when there is one, otherwise on that many local processes."""
    ranks = launched_ranks()
    if ranks is not None:
        with join_world(config.run.device, config.elastic.timeout_s, ranks) as world:
            if world.is_first:
                prepare_sources(config.data)
            world.sum(torch.zeros(1))  # The others wait for the data.
            _train_rank(config, world)
        return
    # Checked here too, so that a mistake is told before any process starts.
    make_job(config, nproc)
    work = partial(_train_rank, config)
    run_ranks(work, nproc, device=config.run.device, timeout_s=config.elastic.timeout_s)


def _train_rank(config: RunConfig, world: World) -> None:
    Trainer(config, world).train()
