"""The training loop: get a batch, step, tell the hooks. What happens around the steps hooks in."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.checkpoint.format import DamageError, Manifest
from meshwright.checkpoint.place import Place, open_place, own_place
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.training_state import check_optimizer, restore
from meshwright.checkpoint.unsent import left_out, restore_unsent
from meshwright.config import RunConfig
from meshwright.data.feed import BadSample, read_samples
from meshwright.data.prefetch import Prefetcher
from meshwright.data.skips import SkippedWindows
from meshwright.errors import CheckpointError, DataError
from meshwright.parallel.world import World, pick_device
from meshwright.training.checkpoints import load_newest
from meshwright.training.hooks import Hook
from meshwright.training.job import make_job
from meshwright.training.optimizer import kept_state
from meshwright.training.planned import Planned, agree
from meshwright.training.rollback import GoBack, Rollbacks, roll_back
from meshwright.training.step import TrainingStep


class TrainingLoop:
    """Trains one configuration on one rank; `train()` runs to the end, a stop request or an error."""

    def __init__(
        self,
        config: RunConfig,
        world: World | None = None,
        hooks: Sequence[Hook] = (),
        planned: Planned | None = None,
    ) -> None:
        self.world = world or World(device=pick_device(config.run.device, 0))
        self.planned = planned or agree(config, self.world)
        self.config = config = self.planned.config
        self.job = make_job(config, self.world.size)
        # Held from before the checkpoints are read until the end, so that no other training changes them meanwhile.
        # A launcher that looks after restarts holds it for all of them.
        self.job.folder.fence = self.world.fence
        mine = self.world.is_first and self.world.fence is None
        self._lock = self.job.folder.hold(config.run.fresh) if mine else None
        checkpoints = open_place(config.checkpoint.dir or self.job.folder.checkpoints)
        if self.world.is_first:
            # Before anything is removed there.
            if config.checkpoint.dir is not None:
                own_place(checkpoints, self.job.folder.run_id())
            Rollbacks(self.job.folder.rollbacks).finish(checkpoints)
        self.world.sum(torch.zeros(1))
        self.checkpoints = checkpoints
        self.exchange = self.world.side_channel()
        self.run_id = self.job.folder.run_id()
        self.rollbacks = Rollbacks(self.job.folder.rollbacks)
        self.going_back: GoBack | None = None
        self.last_rollback: tuple[GoBack, int, tuple[int, int] | None] | None = None
        """What was asked for, the step that it began from, and the samples that were left out."""
        self.skips = SkippedWindows()
        self.batch: dict[str, Tensor] = {}
        """This rank's share of the step in hand."""
        self.step = 0
        self.stop_reason: str | None = None
        self.stopping = False
        self.preempted = False
        if self.config.train.deterministic:
            # Read when cuBLAS starts: without it, some of its sums take any order.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(self.config.train.deterministic)
        self.one_step = TrainingStep(config, self.job.spec, self.job.strategy, self.world, self.job.tokenizer.end)
        self.model, self.optimizer = self.one_step.model, self.one_step.optimizer
        self.loss_scale = self.one_step.loss_scale
        self.hooks = list(hooks)
        self.breaks: dict[str, int] = {}
        """Where compiled layers fell apart, and how often; known after the step that compiled them."""
        self.resumed_from: Manifest | None = None
        self._resume()

    @property
    def finished(self) -> bool:
        """Whether all steps of the run are done."""
        return self.step >= self.config.train.steps

    @property
    def position(self) -> int:
        """The place of the sample that the data goes on with."""
        return self.skips.place(self.job.batches.position(self.step))

    @property
    def worked(self) -> bool:
        """Whether this training has done a step."""
        return self.step > (self.resumed_from.step if self.resumed_from else 0)

    def train(self) -> None:
        """Train to the end of the run, or until someone asks to stop."""
        with ExitStack() as ending:
            if self._lock is not None:
                ending.enter_context(self._lock)
            for hook in self.hooks:
                ending.callback(hook.close)
                hook.at_start(self)
            self._run_steps()
            while self.going_back is not None:
                request, self.going_back = self.going_back, None
                # Also when the run is to stop: what must be undone is not to be saved.
                roll_back(self, request)
                if not self.stopping:
                    self._run_steps()
            self.world.pulse.enter("end")
            for hook in reversed(self.hooks):
                hook.at_end(self)

    def _run_steps(self) -> None:
        """Step until the end, or until someone asks to stop or to go back."""
        pulse = self.world.pulse
        pulse.enter("data")
        with self._batches() as batches:
            started = time.perf_counter()
            for step, batch in batches:
                pulse.step = step + 1
                metrics = self.train_step(step, batch)
                self.step = step + 1
                seconds = time.perf_counter() - started
                metrics |= {"tokens_per_s": metrics["tokens"] / seconds, "step_s": seconds}
                pulse.enter("hooks")
                for hook in self.hooks:
                    hook.after_step(self, metrics)
                    if self.going_back is not None:
                        break
                if self.stopping or self.going_back is not None:
                    break
                pulse.enter("data")
                started = time.perf_counter()

    def train_step(self, step: int, batch: dict[str, Tensor]) -> dict[str, float]:
        """One optimizer step on this rank's share of the global batch."""
        self.batch = batch
        metrics = self.one_step(step, batch, self.stop_reason is not None)
        if metrics.pop("stop"):
            self.preempted = True
            self.stop("another rank was asked to stop", everywhere=True)
        return metrics

    @torch.no_grad()
    def evaluate(self) -> float | None:
        """Mean loss on the held-out sequences, the same for every number of ranks; None when there are none."""
        count = min(self.config.train.eval_sequences, self.job.sampler.validation_sequences)
        if count == 0:
            return None
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        batch = self.job.batches.batch(self.step)
        micro_steps = self.job.strategy.micro_steps(batch, self.config.train.micro_batch)
        size = batch // micro_steps
        own = self.job.strategy.own_samples(self.one_step.data_rank, size)
        for round_start in range(0, count, size):
            self.world.pulse.enter("evaluate")
            # Every rank takes part in every round, since sharded weights are gathered together; one that has no
            # sequences left computes the first one again and does not count it.
            start = round_start + own.start
            mine = min(own.stop - own.start, max(0, count - start))
            rows = self.job.sampler.validation_rows(start if mine else 0, mine or 1)
            found = self.one_step.evaluate(torch.from_numpy(rows))
            if mine:
                total += found
        self.model.train()
        self.one_step.parallel.reshard()
        loss_sum, valid = self.one_step.sum(total).tolist()
        self.world.pulse.enter("hooks")
        return loss_sum / valid

    def make_batch(self, step: int) -> dict[str, np.ndarray]:
        """This rank's part of a step: tokens (micro-steps, samples, tokens + 1), the samples' global numbers, and how
        many targets of all ranks count.

        A micro-step is a run of samples over all ranks, so that it holds the same samples however many ranks share it,
        and in whatever shares. Every rank has a part of every micro-step: collectives within passes stay in step.
        """
        size = self.job.batches.batch(step)
        micro_steps = self.job.strategy.micro_steps(size, self.config.train.micro_batch)
        together = size // micro_steps
        own = self.job.strategy.own_samples(self.one_step.data_rank, together)
        first = self.job.batches.position(step)
        starts = [first + index * together for index in range(micro_steps)]
        places = np.stack([self.skips.places(np.arange(start + own.start, start + own.stop)) for start in starts])
        skip_bad = self.config.data.bad_samples == "skip"
        try:
            tokens, bad = read_samples(self.job.sampler, places, skip_bad)
        except BadSample as error:
            raise DataError(
                f"step {step + 1}, rank {self.world.rank} on {socket.gethostname()}: {error}. Bring the corpus back "
                "(`meshwright data verify` names what is damaged), or go on without such samples: data.bad_samples=skip"
            ) from error
        batch = {"tokens": tokens, "samples": places}
        if skip_bad:
            # How many targets count is known to all ranks together only.
            return batch | {"ignored": bad}
        # Rows are packed full: every target counts, so nobody has to ask the other ranks.
        return batch | {"valid": np.array(size * (tokens.shape[-1] - 1))}

    def stop(self, reason: str, everywhere: bool = False) -> None:
        """Stop after the step in hand; unless every rank asks for it `everywhere` alike, once the ranks have agreed."""
        self.stop_reason = self.stop_reason or reason
        self.stopping = self.stopping or everywhere

    def go_back(self, request: GoBack) -> None:
        """Go back to a checkpoint after the step in hand; every rank must ask alike."""
        self.going_back = self.going_back or request

    def _batches(self) -> Prefetcher:
        pin = self.world.device.type == "cuda"
        return Prefetcher(self.make_batch, self.step, self.config.train.steps, depth=self.config.data.prefetch, pin=pin)

    def _resume(self) -> None:
        """Take up the newest checkpoint of the run that is whole, if it has any."""
        self.world.pulse.enter("restore")
        manifest = load_newest(self)
        if manifest is not None:
            self.take_up(manifest)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must remember besides tensors."""
        state = self.loss_scale.state() | self.one_step.guard.state() | self.skips.state()
        state |= self.one_step.beginning.state(self.step)
        for hook in self.hooks:
            state |= hook.state()
        return state

    def restore(self, reader: CheckpointReader) -> None:
        """Fill weights and moments from a checkpoint, whatever was trained since the loop was made."""
        manifest = reader.manifest
        has_learned = manifest.state.get("recover", {}).get("skipped", 0) < manifest.step
        if has_learned or any(name.startswith("optimizer.") for name in manifest.tensors):
            check_optimizer(manifest, *kept_state(self.config.train))
        self.one_step.parallel.reshard()
        self.optimizer.state.clear()
        restore(reader, self.model, self.optimizer)
        if restore_unsent(reader, self.model, self.one_step.parallel.compressor) and self.world.is_first:
            text = left_out(manifest.step, self.job.strategy)
            self.job.folder.event("unsent_dropped", step=manifest.step, error=text)
            print(f"meshwright: {text}", file=sys.stderr, flush=True)

    def take_up(self, manifest: Manifest) -> None:
        """Go on from the checkpoint that was just restored."""
        self.step = manifest.step
        self.skips.restore(manifest.state)
        assert manifest.position == self.position
        # What was left out since.
        for start, end in self.rollbacks.windows:
            self.skips.add(start, end)
        self.loss_scale.restore(manifest.state)
        self.one_step.guard.restore(manifest.state)
        self.one_step.beginning.restore(manifest)
        for hook in self.hooks:
            hook.restore(manifest.state)
        self.resumed_from = manifest

    def check_same_run(self, checkpoint: Place, manifest: Manifest) -> None:
        """Raise unless the checkpoint is one of this run, of the model and the data that the configuration means."""
        if manifest.run and manifest.run != self.run_id:
            raise DamageError(
                f"{checkpoint} is a checkpoint of another run ({manifest.run}, this one is {self.run_id})"
            )
        if manifest.model != self.job.spec:
            raise CheckpointError(f"{checkpoint} is of another model shape than model.preset or model.from_hf now has")
        if manifest.corpora != tuple(corpus.digest for corpus in self.job.sampler.corpora):
            raise CheckpointError(
                f"{checkpoint} was trained on other data than the corpus now holds, and its position means others "
                "there; bring the old corpus back, or start anew with another run.dir or --fresh"
            )
