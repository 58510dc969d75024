"""What is submitted: one run, planned for the machines that it will have. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from meshwright.config import RunConfig
from meshwright.errors import ConfigError, UserError
from meshwright.planning.question import Candidate
from meshwright.planning.state_memory import GIB
from meshwright.strategy import Strategy
from meshwright.training.job import model_spec
from meshwright.training.planned import asks_planner, check_run, plan_run, predict

RUN_FILE, PLAN_FILE = "run.toml", "plan.json"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""What all schedulers, shells and file systems take as it is."""
_LABEL = 40
"""Letters of a name: what schedulers add to it has room in the 63 of a DNS label."""


@dataclass(frozen=True)
class Machines:
    """How many machines take part, and what of each."""

    least: int = 1
    most: int = 1
    processes: int = 1
    """Ranks of each."""
    gpus: int = 0
    """Of each that the run takes; 0 trains on its CPU."""

    @property
    def world(self) -> int:
        """Ranks, with all machines there."""
        return self.most * self.processes

    @property
    def range(self) -> str:
        """As `meshwright train --nodes` takes it."""
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True)
class Submission:
    """A run on its way to some machines."""

    name: str
    """What schedulers call it: letters, digits, dashes, and in one that a user chose dots and underscores."""
    config: RunConfig
    """With the strategy that was planned."""
    machines: Machines
    said: tuple[str, ...] = ()
    """What the planner says about it."""
    answer: Mapping[str, Any] | None = None
    """The planner's, as plan.json has it; None where the machines' chips are unknown to it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of all its processes."""

    @property
    def run_file(self) -> str:
        """The run as TOML: every setting that is not a default, the strategy among them."""
        settings = self.config.model_dump(exclude_defaults=True, exclude_none=True)
        settings.setdefault("parallel", {})["strategy"] = self.config.parallel.strategy
        text = "".join(f"# {line}\n" for line in self.said) + tomli_w.dumps(settings)
        if (shown := self.config.secrets().redact(text)) != text:
            line = next(new for old, new in zip(text.splitlines(), shown.splitlines(), strict=True) if old != new)
            raise UserError(
                f"a secret would be written into what is submitted: {line.strip()}; take it out of the settings and "
                "give it to the job by its environment or a file"
            )
        return text

    @property
    def plan_file(self) -> str:
        """The plan as JSON."""
        about = {"strategy": self.config.parallel.strategy, "micro_batch": self.config.train.micro_batch}
        machines = {"nodes": self.machines.range, "processes_per_node": self.machines.processes}
        return json.dumps({**about, **machines, "answer": self.answer}, indent=1) + "\n"

    def files(self) -> dict[str, str]:
        """What every target submits."""
        return {RUN_FILE: self.run_file, PLAN_FILE: self.plan_file}

    def train(self, file: str) -> list[str]:
        """The arguments of `meshwright train` on each machine, but for where they meet."""
        return [file, "--nproc", str(self.machines.processes)]


def prepare(
    config: RunConfig,
    machines: Machines,
    chip: str | None,
    name: str | None = None,
    environment: Mapping[str, str] | None = None,
    anyway: bool = False,
) -> Submission:
    """Plan a run for those machines; `chip` is what they have in them, None what parallel.cluster says, or `here`.

    A strategy that is not expected to fit is refused, unless it is to be submitted `anyway`.
    """
    if name is not None and not _NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name}: a name has letters, digits, dashes, dots and underscores, 63 of them at most"
        )
    if machines.gpus and config.run.device == "cpu":
        raise ConfigError(
            f"run.device=cpu, and {machines.gpus} GPUs of each machine would be taken and not used; drop --gpu and "
            "--gpus-per-node, or run.device"
        )
    if chip is not None:
        config = _on(config, f"{machines.most}x{machines.processes}x{chip}")
    planned = plan_run(config, machines.world, machines.processes)
    answer = planned.answer
    if answer is None:
        check_run(planned.config, model_spec(planned.config), machines.world)
        strategy = Strategy.parse(planned.strategy, machines.world)
        try:
            made = predict(planned.config, strategy, machines.processes)
        except UserError:
            made = None  # The planner does not know these machines.
        if made is not None:
            if not anyway:
                _refuse_too_large(made.candidates[0])
            answer = made.as_json()
    return Submission(
        name or label_of(config.run.dir), planned.config, machines, planned.said, answer, environment or {}
    )


def _refuse_too_large(expected: Candidate) -> None:
    """Raise where what was asked for is known not to fit."""
    memory = expected.memory
    if memory.verdict == "does not fit":
        raise UserError(
            f"parallel.strategy='{expected.strategy}' is not expected to fit: {memory.peak / GIB:.1f} of "
            f"{memory.capacity / GIB:.1f} GiB at the peak of each rank; parallel.strategy=auto looks for one that "
            "does, `meshwright plan` says more, and --anyway submits it as it is"
        )


def chip_of(config: RunConfig, gpus: int, said: str | None) -> str | None:
    """What machines elsewhere have: what was said, the CPU without GPUs, or what parallel.cluster has (None)."""
    if said is not None:
        return said
    if config.parallel.cluster is not None:
        return None
    if not gpus:
        return "cpu"
    if asks_planner(config):
        raise ConfigError(
            "parallel.strategy=auto plans before anything is submitted, and what GPUs the machines have is not known "
            "here: say --gpu h100 (or another chip), set parallel.cluster, or name a parallel.strategy"
        )
    return None


def _on(config: RunConfig, cluster: str) -> RunConfig:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"cluster": cluster})})


def label_of(folder: str) -> str:
    """A name for schedulers from a run folder's."""
    label = re.sub(r"[^a-z0-9]+", "-", Path(folder).name.lower()).strip("-")[:_LABEL].strip("-")
    return label if label and label[0].isalpha() else f"run-{label}".strip("-")
