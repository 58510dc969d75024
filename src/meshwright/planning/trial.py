"""One candidate's short training, as a process: `python -m meshwright.planning.trial ASKED.json`. For `tryout.py`.

Starts the ranks as a run does, trains with the trainer's own loop, and leaves each rank's step times and peak memory in
a file that is rewritten after every step, so that a trial that is ended has told what it had.
"""

from __future__ import annotations

import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from meshwright.config import RunConfig
from meshwright.elastic.failure import RankError
from meshwright.errors import UserError
from meshwright.files import write_atomically
from meshwright.launch.local import run_ranks
from meshwright.observe.rank_memory import peak_memory
from meshwright.parallel.world import World
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop
from meshwright.training.out_of_memory import is_out_of_memory


class Measure(Hook):
    """Writes down how long each step took and the most memory that there was."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self.device = path, device
        self.steps: list[float] = []

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        self.steps.append(metrics["step_s"])
        write_atomically(self.path, json.dumps({"steps": self.steps, "peak": peak_memory(self.device)}))


def train(config: RunConfig, results: str, world: World) -> None:
    """Train on this rank."""
    path = Path(results) / f"rank-{world.rank}.json"
    try:
        TrainingLoop(config, world, [Measure(path, world.device)]).train()
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(f"rank {world.rank} ran out of memory: {str(error).splitlines()[0]}") from error
        raise


def _stop(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    """Run what the file asks for."""
    # The launcher's own way out, which ends its ranks.
    signal.signal(signal.SIGTERM, _stop)
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    config = RunConfig.model_validate(asked["config"])
    torch.set_num_threads(max(1, torch.get_num_threads()))
    try:
        run_ranks(
            partial(train, config, asked["results"]),
            asked["ranks"],
            device=config.run.device,
            timeout_s=asked["timeout_s"],
        )
    except (RankError, UserError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Of a traceback its first line says who failed and its last one why.
        told = f"{lines[0]} {lines[-1]}" if any(line.startswith("Traceback") for line in lines) else " ".join(lines)
        print(f"trial: {told[:600]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
