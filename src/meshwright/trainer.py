"""Train from a configuration: the loop with everything that a normal run wants around it, here or on n processes."""

from __future__ import annotations

import sys
import time
from functools import partial

from meshwright.config import RunConfig
from meshwright.launch.local import run_ranks
from meshwright.observe.console import Console
from meshwright.observe.ledger import Ledger
from meshwright.observe.records import Records
from meshwright.observe.sample import Sample
from meshwright.observe.tensorboard import TensorBoard
from meshwright.observe.weights_and_biases import WeightsAndBiases
from meshwright.parallel.world import World, join_world, launched_ranks, sum_in_one_order
from meshwright.training.hooks import EarlyStop, Evaluate, Events, Hook, SaveCheckpoints, StopOnSignal
from meshwright.training.job import make_job, prepare_sources, unprepared
from meshwright.training.loop import TrainingLoop
from meshwright.training.recover import Recover


def standard_hooks(config: RunConfig) -> list[Hook]:
    """What happens around the steps of a normal run, in order: who adds metrics comes before who records them."""
    hooks: list[Hook] = [Events(), StopOnSignal(), Recover()]
    if config.observe.ledger:
        hooks.append(Ledger())
    hooks += [Evaluate(), EarlyStop(), Records()]
    if config.observe.tensorboard:
        hooks.append(TensorBoard())
    if config.observe.wandb:
        hooks.append(WeightsAndBiases())
    hooks.append(Console())
    if config.observe.sample is not None:
        hooks.append(Sample(config.observe.sample, config.observe.sample_tokens))
    # Last, so that it is the first at the end: what others say then is said of a run that is saved.
    return [*hooks, SaveCheckpoints()]


class Trainer(TrainingLoop):
    """One rank's training of a configuration, with records, console and checkpoints."""

    def __init__(self, config: RunConfig, world: World | None = None) -> None:
        super().__init__(config, world, standard_hooks(config))


def train(config: RunConfig, nproc: int = 1) -> None:
    """Train to the end: as one rank of a launcher's job when there is one, otherwise on that many local processes."""
    if config.train.deterministic:
        sum_in_one_order()
    ranks = launched_ranks()
    if ranks is not None:
        _prepare_together(config, ranks[0])
        with join_world(config.run.device, config.elastic.timeout_s, ranks) as world:
            _train_rank(config, world)
        return
    # Checked here too, so that a mistake is told before any process starts.
    make_job(config, nproc)
    work = partial(_train_rank, config)
    run_ranks(work, nproc, device=config.run.device, timeout_s=config.elastic.timeout_s)


def _prepare_together(config: RunConfig, rank: int) -> None:
    """The first rank packs the data; the others wait for it without the limit of a collective."""
    if rank == 0:
        prepare_sources(config)
    index = unprepared(config.data)
    if index is not None:
        print(f"rank {rank} waits until rank 0 has written {index}", file=sys.stderr, flush=True)
    while index is not None and not index.exists():
        time.sleep(0.5)


def _train_rank(config: RunConfig, world: World) -> None:
    Trainer(config, world).train()
