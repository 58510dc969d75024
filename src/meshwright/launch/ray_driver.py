"""Trains a run inside Ray Train's TorchTrainer: a worker of Ray for each rank.

What a run's settings say becomes Ray's: elastic.max_restarts is max_failures, checkpoint.keep is num_to_keep,
checkpoint.best with checkpoint.keep_best the score.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray._private.services import canonicalize_bootstrap_address
from ray.train import CheckpointConfig, FailureConfig, LoggingConfig, Result, ScalingConfig
from ray.train import RunConfig as RayRunConfig
from ray.train.torch import TorchTrainer

from meshwright.config import RunConfig
from meshwright.errors import ConfigError, ExitCode, UserError
from meshwright.launch.ray_desk import Desk
from meshwright.launch.ray_rank import Meeting, work
from meshwright.training.hooks import is_echo
from meshwright.training.run_folder import RunFolder

POLL_VARIABLE = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
MOST_POLL_S, POLLS_PER_S = 2.0, 160.0
"""How often Ray's controller takes a report of each worker: its own two seconds would hold up runs with short steps."""
PRINT_VARIABLE = "RAY_TRAIN_ENABLE_PRINT_PATCH"
"""With it, lines of workers come twice."""
LOOPBACK = "127.0.0.1"
"""Ray takes it where ray_main.LOOPBACK_ONLY is set when it is imported."""
ANSWER_S = 10.0
SETTINGS = b"\x04"
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS + bytes(5)
"""What a caller of gRPC, which Ray's GCS speaks, says first; the answer is a frame of settings, too."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Workers:
    """What a run takes of a Ray cluster."""

    least: int = 1
    most: int = 1
    gpus: bool | None = None
    """One for each worker; None where the cluster has them and run.device allows it."""
    cpus: float = 1.0
    """For each worker, as Ray counts them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    look_s: float = 60.0
    """With a range, how often Ray looks whether it could have more of them."""

    @property
    def count(self) -> int | tuple[int, int]:
        """As Ray's ScalingConfig takes it."""
        return self.most if self.least == self.most else (self.least, self.most)

    @property
    def scaling(self) -> ScalingConfig:
        """As Ray takes it."""
        resources = {"CPU": self.cpus, **({"GPU": 1.0} if self.gpus else {})}
        return ScalingConfig(
            num_workers=self.count,
            use_gpu=bool(self.gpus),
            resources_per_worker=resources,
            elastic_resize_monitor_interval_s=self.look_s,
        )

    def settled(self, config: RunConfig) -> Workers:
        """With what the cluster has."""
        if self.gpus is not None:
            return self
        return replace(self, gpus=config.run.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= self.least)


def fit(
    config: RunConfig,
    workers: Workers | int | tuple[int, int] = 1,
    *,
    storage_path: str | None = None,
    callbacks: Sequence[Any] = (),
) -> Result:
    """Train on a Ray cluster to the end of the run; gives Ray's Result, whose checkpoint is one of Meshwright's.

    Ray is what `ray.init` has joined. `storage_path` is Ray's (default: beside run.dir). Raises UserError where
    starting again would not help, and Ray's TrainingFailedError where it did not.
    """
    if not isinstance(workers, Workers):
        workers = Workers(*workers) if isinstance(workers, tuple) else Workers(workers, workers)
    return _fit(config, workers, storage_path, callbacks, make_desk(config))


def make_desk(config: RunConfig) -> Any:
    """The actor that driver and ranks talk through."""
    if not ray.is_initialized():
        ray.init()
    return ray.remote(num_cpus=0)(Desk).remote(config.elastic.same_step_failures)


def _fit(config: RunConfig, workers: Workers, storage_path: str | None, callbacks: Sequence[Any], desk: Any) -> Result:
    workers = workers.settled(config)
    given = {
        "config": config.model_dump(mode="json"),
        "folder": os.getcwd(),
        "elastic": workers.least != workers.most,
        "desk": desk,
    }
    os.environ.setdefault(PRINT_VARIABLE, "0")
    os.environ.setdefault(POLL_VARIABLE, str(min(MOST_POLL_S, max(0.1, workers.most / POLLS_PER_S))))
    trainer = TorchTrainer(
        work,
        train_loop_config=given,
        torch_config=Meeting(backend="gloo"),
        scaling_config=workers.scaling,
        run_config=run_config(config, workers, storage_path, callbacks),
    )
    result = trainer.fit()
    if (verdict := ray.get(desk.verdict.remote())) is not None:
        error = UserError(verdict[1])
        error.exit_code = verdict[0]
        raise error
    return result


def run_config(
    config: RunConfig, workers: Workers, storage_path: str | None = None, callbacks: Sequence[Any] = ()
) -> RayRunConfig:
    """What the settings of a run are in Ray's words."""
    folder = Path(config.run.dir).resolve()
    name = f"{folder.name}.ray"
    storage = storage_path or str(folder.parent)
    if "://" not in storage:
        storage = str(Path(storage).resolve())
        _set_aside(Path(storage) / name, config)
    return RayRunConfig(
        name=name,
        storage_path=storage,
        failure_config=FailureConfig(max_failures=config.elastic.max_restarts),
        checkpoint_config=checkpoint_config(config),
        callbacks=list(callbacks),
        worker_runtime_env={"env_vars": dict(workers.environment)},
        logging_config=LoggingConfig(log_level="WARNING"),
    )


def checkpoint_config(config: RunConfig) -> CheckpointConfig:
    """How many checkpoints Ray keeps, and by what score."""
    kept = config.checkpoint
    if not kept.keep_best:
        return CheckpointConfig(num_to_keep=kept.keep)
    return CheckpointConfig(
        num_to_keep=kept.keep + kept.keep_best,
        checkpoint_score_attribute=kept.best.removeprefix("-"),
        checkpoint_score_order="max" if kept.best.startswith("-") else "min",
    )


def _set_aside(folder: Path, config: RunConfig) -> None:
    """Move what Ray knows of an earlier run away: it would take the new one for the same."""
    run = RunFolder(config.run.dir)
    if not folder.exists() or (run.holds_run and not config.run.fresh):
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.previous-{number}")).exists():
        number += 1
    folder.rename(aside)


class Driver:
    """Trains in a thread, and hears signals meanwhile."""

    def __init__(self, config: RunConfig, workers: Workers, storage_path: str | None) -> None:
        self._config, self._workers, self._storage_path = config, workers, storage_path
        self._asked: str | None = None
        self._asked_at = 0.0
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self) -> int:
        """Train to the end; gives the exit code."""
        before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        try:
            desk = make_desk(self._config)
            thread = threading.Thread(target=self._train, args=(desk,), name="ray-train", daemon=True)
            thread.start()
            told = False
            while thread.is_alive():
                thread.join(0.2)
                if self._asked is not None and not told:
                    told = True
                    if not ray.get(desk.starts.remote()):
                        return int(ExitCode.PREEMPTED)  # No worker is there: nothing was done that could be lost.
                    desk.stop.remote(self._asked)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if isinstance(self._error, UserError):
            raise self._error
        if self._error is not None:
            print(f"meshwright launch: {self._error}", file=sys.stderr, flush=True)
            return int(ExitCode.FAILED)
        assert self._result is not None
        return int((self._result.return_value or {}).get("code", ExitCode.FAILED))

    def _train(self, desk: Any) -> None:
        try:
            self._result = _fit(self._config, self._workers, self._storage_path, (), desk)
        except BaseException as error:
            self._error = error

    def _hear(self, number: int, _: object) -> None:
        if self._asked is not None:
            if is_echo(number, self._asked_at):
                return
            os._exit(128 + number)
        self._asked, self._asked_at = signal.Signals(number).name, time.monotonic()
        os.write(sys.stderr.fileno(), b"\nstopping after this step and saving; again to stop at once\n")


def _require_answer(address: str) -> None:
    """Refuse an address where no Ray can be: `ray.init` would try it for ever."""
    # As Ray does it: `auto` may be what a Ray left that was killed, loopback is this machine's own address.
    meant = canonicalize_bootstrap_address(address)
    if meant is None:
        return
    host, _, port = meant.rpartition(":")
    asked = address if meant == address else f"{address}, which Ray takes for {meant}"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            connection.sendall(GREETING)
            answer = connection.recv(9)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no Ray answers at {asked}: {error}; is its head there, and the port that of its GCS?"
        ) from None
    if answer[3:4] != SETTINGS:
        raise ConfigError(
            f"no Ray answers at {asked}, but something else: give the port of its GCS (6379, if not said)"
        )


def drive(config: RunConfig, workers: Workers, address: str | None, storage_path: str | None = None) -> int:
    """Join Ray at an address, or start it here, and train; gives the exit code."""
    if address is not None:
        try:
            _require_answer(address)
            ray.init(address=address, log_to_driver=True)
        except ConnectionError as error:
            raise ConfigError(f"no Ray answers at {address}: {error}") from None
    else:
        cores = max(os.cpu_count() or 1, int(workers.most * workers.cpus + 0.999))
        # Without its dashboard Ray Train complains every second that it cannot ask for states.
        ray.init(address="local", num_cpus=cores, include_dashboard=True, _node_ip_address=LOOPBACK)
    try:
        return Driver(config, workers, storage_path).run()
    finally:
        ray.shutdown()
