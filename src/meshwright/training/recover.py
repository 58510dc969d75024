"""Counts bad steps, says which rank and which samples they come from, and after some in a row goes back."""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Mapping
from typing import Any

from meshwright.data.skips import runs
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop
from meshwright.training.rollback import GoBack


class Recover(Hook):
    """What follows from steps whose numbers are not fit to learn from; comes before the hooks that record."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self.first = 0
        self.skipped = 0
        """Steps of the run that nothing was learned from."""

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        elastic = trainer.config.elastic
        self.skipped += int(metrics.get("skipped", 0))
        if self.skipped:
            metrics["skipped_steps"] = self.skipped
        cause = next((name for name in ("nonfinite", "spike") if metrics.get(name)), None)
        if cause is None:
            self.in_a_row = 0
            self._note_progress(trainer)
            return
        if not self.in_a_row:
            self.first = trainer.step
        self.in_a_row += 1
        self._tell(trainer, cause, metrics)
        if cause == "spike" and elastic.spike_policy == "warn":
            return
        by_spikes = cause == "spike" and elastic.spike_policy == "rollback"
        if self.in_a_row >= (elastic.spike_steps if by_spikes else elastic.bad_steps):
            what = "loss spikes" if cause == "spike" else "a loss or gradients that are no numbers"
            steps = f"step {self.first}" if self.first == trainer.step else f"steps {self.first} to {trainer.step}"
            trainer.go_back(GoBack(cause, f"{what} in {steps}", self.first, trainer.step))

    def _note_progress(self, trainer: TrainingLoop) -> None:
        """Past the step that went wrong, the count of rollbacks starts anew."""
        rollbacks = trainer.rollbacks
        if rollbacks.count and trainer.step > rollbacks.past:
            rollbacks.count = 0
            if trainer.world.is_first:
                rollbacks.write()

    def _tell(self, trainer: TrainingLoop, cause: str, metrics: Metrics) -> None:
        """Put into words and into events.jsonl where it comes from; all ranks together, since each knows its part."""
        elastic = trainer.config.elastic
        if cause == "spike" and elastic.spike_policy != "skip" and self.in_a_row != elastic.spike_steps:
            return
        found = trainer.world.exchange(_own_findings(trainer) if cause == "nonfinite" else {})
        if not trainer.world.is_first:
            return
        ranks = [finding for finding in found if finding.get("samples")]
        facts: dict[str, Any] = {"step": trainer.step, "in_a_row": self.in_a_row, "skipped": metrics.get("skipped", 0)}
        facts |= {name: metrics[name] for name in ("loss", "grad_norm") if name in metrics}
        if cause == "nonfinite":
            # Where every loss is a number, the gradients are not, and those are of all samples together.
            facts["ranks"] = [{"rank": one["rank"], "host": one["host"], "samples": one["samples"]} for one in ranks]
            alone = [one["rank"] for one in found if one["norm"]]
            if not ranks and len(alone) < len(found):
                facts["gradients_of_ranks"] = alone
        first, last = trainer.job.batches.position(trainer.step - 1), trainer.job.batches.position(trainer.step) - 1
        facts["samples"] = [trainer.skips.place(first), trainer.skips.place(last) + 1]
        trainer.job.folder.event(cause, **facts)
        print(f"meshwright: {_sentence(trainer, cause, facts)}", file=sys.stderr, flush=True)

    def state(self) -> dict[str, Any]:
        kept = {"in_a_row": self.in_a_row, "first": self.first, "skipped": self.skipped}
        return {"recover": kept} if self.skipped or self.in_a_row else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        kept = state.get("recover", {"in_a_row": 0, "first": 0, "skipped": 0})
        self.in_a_row, self.first, self.skipped = kept["in_a_row"], kept["first"], kept["skipped"]


def _own_findings(trainer: TrainingLoop) -> dict[str, Any]:
    """Which of this rank's samples have a loss that is no number, and whether its own norm is none."""
    losses = trainer.one_step.losses.tolist()
    samples = trainer.batch["samples"].numpy()
    bad = [window for loss, row in zip(losses, samples, strict=True) if not math.isfinite(loss) for window in runs(row)]
    norm = not math.isfinite(trainer.one_step.own_norm)
    return {"rank": trainer.world.rank, "host": socket.gethostname(), "samples": bad, "norm": norm}


def _sentence(trainer: TrainingLoop, cause: str, facts: Mapping[str, Any]) -> str:
    step = f"step {trainer.step}"
    done = "the step is skipped on all ranks" if facts["skipped"] else "the step counts"
    if cause == "spike":
        return f"{step}: loss {facts['loss']:.4f}, gradient norm {facts['grad_norm']:.4f}: a spike; {done}"
    if facts["ranks"]:
        where = "; ".join(
            f"rank {one['rank']} on {one['host']}, samples {', '.join(f'{a} to {b - 1}' for a, b in one['samples'])}"
            for one in facts["ranks"]
        )
        return f"{step}: the loss is not a number ({where}); {done}"
    alone = facts.get("gradients_of_ranks")
    where = f" on rank {', '.join(map(str, alone))} alone" if alone else ""
    first, end = facts["samples"]
    return f"{step}: gradients are not numbers{where}, though the loss is (samples {first} to {end - 1}); {done}"
