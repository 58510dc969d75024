"""Metrics for Prometheus: the first rank of each machine answers GET /metrics, on threads of its own.

So every machine is a target of its own, one that is lost shows as a target that is down, and a machine opens one port
however many ranks it has. A step leaves its numbers in a table, other ranks of the machine leave theirs on a board in
memory; texts are made when somebody asks.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from meshwright.address import Address
from meshwright.observe.metrics_server import MetricsServer
from meshwright.observe.rank_board import MEMORY, Board, Figures, board_folder, leave, read_boards
from meshwright.observe.step_metrics import StepMetrics
from meshwright.secrets import read_token
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop

GAUGES = {
    "step": ("meshwright_step", "Optimizer steps done, of the whole run"),
    "step_s": ("meshwright_step_seconds", "Duration of the latest step, without evaluation and other hooks"),
    "loss": ("meshwright_loss", "Training loss of the latest step, mean over its tokens"),
    "loss_max": ("meshwright_loss_max", "Largest mean loss of a data replica in the latest step"),
    "spike_score": ("meshwright_spike_score", "Share of the last 128 steps whose loss or gradient norm was a spike"),
    "eval_loss": ("meshwright_eval_loss", "Loss on the held-out sequences when last evaluated"),
    "grad_norm": ("meshwright_gradient_norm", "Norm of the gradient of the latest step, before clipping"),
    "lr": ("meshwright_learning_rate", "Learning rate of the latest step"),
    "loss_scale": ("meshwright_loss_scale", "Factor of the loss under fp16"),
    "tokens_per_s": ("meshwright_tokens_per_second", "Tokens of all ranks in the latest step by its duration"),
    "tokens_per_s_per_device": ("meshwright_tokens_per_second_per_device", "The same by the number of ranks"),
    "tflops_per_device": (
        "meshwright_model_teraflops_per_second_per_device",
        "The model's own FLOPs of the latest step by its duration and the number of ranks, in 1e12",
    ),
    "mfu": ("meshwright_model_flops_utilization_ratio", "Share of the chip's peak that the model's own FLOPs take"),
    "time": ("meshwright_last_step_timestamp_seconds", "When the latest step ended"),
}
"""By the name of a metric of a step; one that a run does not have is left out."""
COUNTERS = {
    "steps": ("meshwright_steps", "Optimizer steps since this process started"),
    "tokens": ("meshwright_tokens", "Tokens trained on by all ranks since this process started"),
    "skipped": ("meshwright_steps_skipped", "Steps since this process started whose update was left out"),
    "rollbacks": ("meshwright_rollbacks", "How often this process went back to a checkpoint"),
}
"""Counts that grow; `_total` is added to their names."""


class Prometheus(Hook):
    """Serves the metrics of a machine on its first rank; the others leave theirs for it."""

    def __init__(self, metrics: StepMetrics) -> None:
        self._metrics = metrics
        """Knows the memory of this rank."""
        self._board: Board | None = None
        self._boards: Path | None = None
        """Where the boards of this machine's other ranks are."""
        self._values: dict[str, float] = {}
        self._counts = dict.fromkeys(COUNTERS, 0.0)
        self._server: MetricsServer | None = None

    def at_start(self, trainer: TrainingLoop) -> None:
        observe = trainer.config.observe
        if observe.prometheus is None or trainer.finished:
            return
        is_server = _first_of_machine(trainer)
        if trainer.world.size > 1:
            self._meet(trainer, is_server)
        if not is_server:
            return
        token = None
        if observe.prometheus_token_file is not None:
            token = read_token(observe.prometheus_token_file, "observe.prometheus_token_file")
        address = Address.parse(observe.prometheus)
        try:
            self._server = MetricsServer(address, token, self._answerer(trainer))
        except OSError as error:
            text = f"metrics cannot be served at {address}: {error.strerror or error}; the run goes on without"
            print(f"meshwright: {text}", file=sys.stderr, flush=True)
            self._event(trainer, state="failed", text=text)
            return
        self._server.start()
        url = f"http://{Address(address.host, self._server.server_port)}/metrics"
        print(f"watch  {url} for Prometheus, of rank {trainer.world.rank} on {socket.gethostname()}", flush=True)
        self._event(trainer, state="serving", url=url)

    def _meet(self, trainer: TrainingLoop, is_server: bool) -> None:
        """Find the place where ranks of this machine leave their numbers, and a board there for those of this one."""
        try:
            self._boards = board_folder(trainer.run_id, trainer.job.folder.path)
            if not is_server:
                self._board = Board(self._boards, trainer.world.pulse)
        except OSError as error:
            text = f"Prometheus gets no phases and memory of rank {trainer.world.rank}: {error}; the run goes on"
            print(f"meshwright: {text}", file=sys.stderr, flush=True)

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        if self._board is not None and self._metrics.memory is not None:
            self._board.put(self._metrics.memory.now())
        if self._server is None:
            return
        # Whole tables take the place of others, so that a scrape never sees half of a step.
        evaluated = {name: value for name, value in self._values.items() if name == "eval_loss"}
        self._values = {**evaluated, "time": time.time(), **metrics, "step": trainer.step}
        grown = {"steps": 1.0, "tokens": metrics["tokens"], "skipped": float(bool(metrics.get("skipped")))}
        self._counts = {name: count + grown.get(name, 0.0) for name, count in self._counts.items()}

    def at_rollback(self, trainer: TrainingLoop) -> None:
        self._counts = {**self._counts, "rollbacks": self._counts["rollbacks"] + 1}

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
        if self._board is not None:
            self._board.close()
        elif self._boards is not None:
            leave(self._boards)

    def _event(self, trainer: TrainingLoop, **facts: Any) -> None:
        # Another machine may not see the folder.
        if trainer.world.is_first or trainer.job.folder.holds_run:
            trainer.job.folder.event("prometheus", rank=trainer.world.rank, host=socket.gethostname(), **facts)

    def _answerer(self, trainer: TrainingLoop) -> Callable[[str], tuple[bytes, str]]:
        """What makes a text, and its kind, for a scraper that accepts some kinds."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self, trainer))

        def answer(accepted: str) -> tuple[bytes, str]:
            encode, kind = choose_encoder(accepted)
            return encode(registry), kind

        return answer

    def families(self, trainer: TrainingLoop) -> Iterable[Any]:
        """The metrics as they are now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        world, values, counts = trainer.world, self._values, self._counts
        common = {"run": trainer.job.folder.path.name, "rank": str(world.rank), "host": socket.gethostname()}
        names, labels = list(common), list(common.values())
        for key, (name, text) in GAUGES.items():
            if key in values:
                gauge = GaugeMetricFamily(name, text, labels=names)
                gauge.add_metric(labels, values[key])
                yield gauge
        for key, (name, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(labels, counts[key])
            yield counter
        yield from self._of_ranks(trainer, common)
        facts = {"run_id": trainer.run_id, "strategy": str(trainer.job.strategy), "ranks": str(world.size)}
        info = InfoMetricFamily("meshwright_run", "What this run is", labels=names)
        info.add_metric(labels, {**facts, "device": str(world.device), "torch": torch.__version__})
        yield info

    def _of_ranks(self, trainer: TrainingLoop, common: dict[str, str]) -> Iterable[Any]:
        """What each rank of this machine has of its own: this one now, the others after their latest step."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        world, names = trainer.world, list(common)
        others = read_boards(self._boards, world.pulse.generation) if self._boards is not None else {}
        memory_now = self._metrics.memory.now() if self._metrics.memory is not None else {}
        own = {kind: memory_now[kind] for kind in MEMORY if kind in memory_now}
        found = {**others, world.rank: Figures(world.pulse.spent(), own)}
        phases = CounterMetricFamily(
            "meshwright_phase_seconds", "Time that a rank has spent in each phase", labels=[*names, "phase"]
        )
        memory = GaugeMetricFamily("meshwright_memory_bytes", "Memory of a rank", labels=[*names, "kind"])
        for rank, figures in sorted(found.items()):
            labels = [*{**common, "rank": str(rank)}.values()]
            for phase, seconds in figures.phases.items():
                phases.add_metric([*labels, phase], seconds)
            for kind, size in figures.memory.items():
                memory.add_metric([*labels, kind], size)
        yield phases
        yield memory


class _Collector:
    """What a registry of prometheus-client asks."""

    def __init__(self, source: Prometheus, trainer: TrainingLoop) -> None:
        self._source, self._trainer = source, trainer

    def collect(self) -> Iterable[Any]:
        return self._source.families(self._trainer)


def _first_of_machine(trainer: TrainingLoop) -> bool:
    """Launchers number the ranks of a machine; a rank without such a number is alone there."""
    return int(os.environ.get("LOCAL_RANK", trainer.world.rank)) == 0
