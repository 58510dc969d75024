"""Train from a configuration: the loop with everything that a normal run wants around it, here or on n processes."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from meshwright.config import RunConfig
from meshwright.elastic.budget import Budget
from meshwright.elastic.member import Member
from meshwright.elastic.membership import Alone, Membership
from meshwright.elastic.placement import Choice, Placement
from meshwright.elastic.ranks import Ending, Work
from meshwright.elastic.rendezvous import Nodes, interface_to
from meshwright.elastic.supervisor import Supervisor
from meshwright.elastic.watch_settings import watchdog_command
from meshwright.errors import ExitCode
from meshwright.launch.local import stay_on_loopback
from meshwright.observe.console import Console
from meshwright.observe.end_report import EndReport
from meshwright.observe.export import Export
from meshwright.observe.ledger import Ledger
from meshwright.observe.mlflow import MLflow
from meshwright.observe.plan_file import PlanFile
from meshwright.observe.profiler import Profiler
from meshwright.observe.prometheus import Prometheus
from meshwright.observe.recorder import Recorder
from meshwright.observe.records import Records
from meshwright.observe.sample import Sample
from meshwright.observe.straggler_watch import StragglerWatch
from meshwright.observe.tensorboard import TensorBoard
from meshwright.observe.weights_and_biases import WeightsAndBiases
from meshwright.parallel.torch_releases import Store
from meshwright.parallel.world import (
    World,
    join_world,
    launched_ranks,
    launcher_store,
    local_ranks,
    sum_in_one_order,
)
from meshwright.secrets import guarded_output
from meshwright.training.checkpoints import SaveCheckpoints
from meshwright.training.compiled import TellBreaks
from meshwright.training.garbage import CollectGarbage
from meshwright.training.hooks import EarlyStop, Evaluate, Events, Hook, StopOnSignal
from meshwright.training.job import make_job, prepare_sources, unprepared
from meshwright.training.loop import TrainingLoop
from meshwright.training.out_of_memory import explain, is_out_of_memory, with_micro_batch
from meshwright.training.placed import is_placed, machines_of_ranks, new_rank, place_run
from meshwright.training.planned import Planned, agree, plan_ranks, plan_run, with_choice
from meshwright.training.recover import Recover
from meshwright.training.replicas import CheckReplicas
from meshwright.training.retune import Retune
from meshwright.training.run_folder import RunFolder
from meshwright.training.tell_travel import TellTravel


def standard_hooks(config: RunConfig, others: Sequence[Hook] = ()) -> list[Hook]:
    """What happens around the steps of a normal run, in order: who adds metrics comes before who records them.

    `others` see all metrics, and end when the last state is saved.
    """
    saves, recorder = SaveCheckpoints(), Recorder()
    # The report comes first, so that it is the last at the end.
    hooks: list[Hook] = [EndReport(), Events(), StopOnSignal(), CollectGarbage(), TellBreaks(), Recover()]
    hooks.append(CheckReplicas())
    if config.observe.ledger:
        hooks.append(Ledger())
    hooks += [Evaluate(), EarlyStop(), saves.progress, recorder.metrics, Records()]
    if config.parallel.retune:
        hooks.append(Retune())
    if config.observe.tensorboard:
        hooks.append(TensorBoard())
    if config.observe.wandb:
        hooks.append(Export(WeightsAndBiases))
    if config.observe.mlflow:
        hooks.append(Export(MLflow))
    if config.observe.prometheus is not None:
        hooks.append(Prometheus(recorder.metrics))
    hooks += others
    hooks += [Console(), TellTravel()]
    if config.observe.sample is not None:
        hooks.append(Sample(config.observe.sample, config.observe.sample_tokens))
    # At the end before the sample, whose memory is none of a step's.
    plan = PlanFile()
    hooks.append(plan)
    if config.observe.profile_steps is not None:
        hooks.append(Profiler(config.observe.profile_steps, recorder.look_at))
    # Saves are the first at the end: what others say then is said of a run that is saved. After them only who times
    # it all, and who compares these times.
    return [*hooks, saves, recorder, StragglerWatch(recorder.take_steps, plan)]


class Trainer(TrainingLoop):
    """One rank's training of a configuration, with records, console and checkpoints."""

    def __init__(
        self,
        config: RunConfig,
        world: World | None = None,
        planned: Planned | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        super().__init__(config, world, standard_hooks(config, hooks), planned)


def train(
    config: RunConfig,
    nproc: int = 1,
    *,
    supervised: bool | None = None,
    nodes: Nodes | None = None,
    planned: Planned | None = None,
) -> ExitCode:
    """Train to the end: as one rank of a launcher's job when there is one, otherwise on that many local processes.

    Gives DONE, or PREEMPTED when the run was asked to stop and has saved. Local processes are looked after by this one
    and started again after a fault; `supervised=True` does so for a single one, too, which else is this process.
    With `nodes` they are this machine's share of a run on several. `planned` is the strategy where it is known already.
    """
    ranks = launched_ranks()
    if ranks is not None:
        return train_launched(config, ranks)
    if config.train.deterministic:
        sum_in_one_order()
    budget = Budget(config.elastic.max_restarts, config.elastic.same_step_failures)
    membership: Membership
    if nodes is not None:
        folder = RunFolder(config.run.dir, config.secrets())
        if (interface := interface_to(nodes.endpoint)) is not None:
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, interface)
        membership = Member(nodes, nproc, budget, partial(_plan, config, nproc), _digest(config), config.run.device)
    else:
        # Checked here too, so that a mistake is told before any process starts.
        planned = planned or plan_run(config, nproc)
        folder = make_job(planned.config, nproc).folder
        if nproc == 1 and (not supervised or config.elastic.max_restarts == 0):
            with join_world(config.run.device, config.elastic.timeout_s) as world:
                return ExitCode(_train_rank(planned, world).code)
        stay_on_loopback()
        membership = Alone(nproc, budget)
    supervisor = Supervisor(
        partial(_work, planned or config),
        membership,
        device=config.run.device,
        timeout_s=config.elastic.timeout_s,
        folder=folder,
        fresh=config.run.fresh,
        watchdog=watchdog_command(config.elastic) if config.elastic.watchdog else None,
    )
    return ExitCode(supervisor.run().code)


def train_launched(
    config: RunConfig,
    ranks: tuple[int, int, int],
    hooks: Sequence[Hook] = (),
    planned: Planned | None = None,
    store: Store | None = None,
) -> ExitCode:
    """Train to the end as that (rank, size, local rank) of a launcher's job, with more hooks.

    `planned` is the strategy where all ranks know it already, `store` where they meet, if not where the launcher's
    variables say.
    """
    if config.train.deterministic:
        sum_in_one_order()
    _prepare_together(config, ranks[0])
    if planned is None and is_placed(config):
        return _train_placed(config, ranks, hooks, store)
    with join_world(config.run.device, config.elastic.timeout_s, ranks, store) as world:
        return ExitCode(_train_rank(planned or agree(config, world), world, hooks).code)


def _plan(config: RunConfig, local: int, machines: list[tuple[str, int]]) -> Choice:
    """The strategy for the ranks of several machines, and where they lie."""
    found = plan_ranks(config, sum(count for _, count in machines), local)
    placed = place_run(found, machines)
    said = (*found.said, *placed.said)
    return Choice(found.strategy, found.micro_batch, found.world, said, placed.placement, placed.machines)


def _train_placed(
    config: RunConfig, ranks: tuple[int, int, int], hooks: Sequence[Hook], store: Store | None
) -> ExitCode:
    """As one rank of a launcher's job whose ranks are numbered anew: machines may stand in another order."""
    rank, size, local = ranks
    store = store or launcher_store(config.elastic.timeout_s)
    store.set(f"meshwright/host/{rank}", socket.gethostname())
    if rank == 0:
        hosts = [store.get(f"meshwright/host/{one}").decode() for one in range(size)]
        machines = machines_of_ranks(hosts) or [("", size)]
        planned = plan_run(config, size, local_ranks(size))
        placed = place_run(planned, machines)
        said = (*planned.said, *placed.said)
        choice = Choice(planned.strategy, planned.micro_batch, size, said, placed.placement, placed.machines)
        store.set("meshwright/placement", json.dumps([choice, [count for _, count in machines]]))
    choice, counts = json.loads(store.get("meshwright/placement"))
    choice = Choice(*choice)
    chosen = with_choice(config, choice.strategy, choice.micro_batch, choice.placement)
    place = new_rank(rank, counts, choice.machines), size, local
    with join_world(config.run.device, config.elastic.timeout_s, place, store) as world:
        planned = Planned(chosen, config, size, world.local, tuple(choice.said))
        return ExitCode(_train_rank(planned, world, hooks).code)


def _digest(config: RunConfig) -> str:
    """What every machine of a run must agree on."""
    settled = {
        "identity": config.identity(),
        "steps": config.train.steps,
        "strategy": config.parallel.strategy,
        "placement": config.parallel.placement,
        # Ranks that sum by other algorithms, or in other buckets, wait for each other for ever.
        "comm": config.comm.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(settled, sort_keys=True, default=str).encode()).hexdigest()


def _work(run: Planned | RunConfig, placement: Placement) -> Work:
    """What the ranks of a generation do: as planned, or as the machines of this generation have agreed."""
    if isinstance(run, Planned):
        retuned = placement.generation > 0 and run.asked.parallel.retune
        return partial(_train_rank, plan_run(run.asked, placement.world, run.local) if retuned else run)
    choice = placement.choice
    assert choice is not None
    config = with_choice(run, choice.strategy, choice.micro_batch, choice.placement)
    planned = Planned(config, run, placement.world, placement.local, tuple(choice.said))
    # The first machine packs the data; the others wait for it.
    _prepare_together(planned.config, placement.node)
    make_job(planned.config, placement.world)
    return partial(_train_rank, planned)


def _prepare_together(config: RunConfig, rank: int) -> None:
    """The first rank packs the data; the others wait for it without the limit of a collective."""
    if rank == 0:
        prepare_sources(config)
    index = unprepared(config.data)
    if index is not None:
        print(f"rank {rank} waits until rank 0 has written {index}", file=sys.stderr, flush=True)
    while index is not None and not index.exists():
        time.sleep(0.5)


def _train_rank(planned: Planned, world: World, hooks: Sequence[Hook] = ()) -> Ending:
    trainer: Trainer | None = None
    config = planned.config
    with guarded_output(config.secrets()):
        try:
            trainer = Trainer(config, world, replace(planned, config=with_micro_batch(config, world.size)), hooks)
            trainer.train()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise explain(error, config, world, trainer) from None
    if trainer.preempted and not trainer.finished:
        return Ending(ExitCode.PREEMPTED, trainer.stop_reason)
    return Ending(ExitCode.DONE)
