"""When a rank runs out of memory: who, where, what it asked for and holds, what to change; and smaller passes.

A rank that has failed alone leaves the others in a collective, so nothing is mended within the processes. With
elastic.oom=retry it writes down a smaller micro-batch (`micro_batch.json` in the run folder) and ends; whoever starts
the ranks again, the launcher or a person, then gets that. The global batch stays, and so does what is computed, but for
the balancing loss of a mixture of experts, which is taken over one pass.
"""

from __future__ import annotations

import errno
import gc
import json
import re
import resource
import socket
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshwright.checkpoint.training_state import state_tensors
from meshwright.config import RunConfig
from meshwright.errors import ConfigError, ExitCode, UserError
from meshwright.files import write_atomically
from meshwright.models.parts import local_of
from meshwright.parallel.world import World
from meshwright.training.job import Job, batch_schedule
from meshwright.training.run_folder import RunFolder

if TYPE_CHECKING:
    from meshwright.training.loop import TrainingLoop

_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory")
_ASKED_FOR = re.compile(r"[Uu]nable to allocate ([\d.]+ \w+)|[Tt]ried to allocate ([\d.]+ \w+)")


class OutOfMemory(UserError):
    """A rank needs more memory than there is."""

    exit_code = ExitCode.OUT_OF_MEMORY


class SmallerMicroBatch(RuntimeError):
    """A rank ran out of memory; ranks that are started again take a smaller micro-batch."""

    remedied = True
    """Something was changed: what is started again does not fail for the same reason."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory left, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def explain(error: BaseException, config: RunConfig, world: World, trainer: TrainingLoop | None) -> Exception:
    """What to raise instead of a rank's own error; with elastic.oom=retry the next start is prepared.

    `config` is the one that was asked for, that of the trainer has the micro-batch in use.
    """
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    match = _ASKED_FOR.search(text)
    asked = next(filter(None, match.groups()), "") if match else ""
    with suppress(ValueError):
        asked = _human(int(asked.removesuffix(" bytes")))
    phase, step = world.pulse.phase, world.pulse.step
    # What the failed pass still holds is in the frames of the error; words need some memory, too.
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    what = [
        f"rank {world.rank} of {world.size} on {socket.gethostname()} ran out of memory in step {step} ({phase})"
        + (f" when it asked for {asked}" if asked else f": {text}"),
        *_holdings(trainer, world.device),
    ]
    smaller = None
    if trainer is not None:
        smaller = next_micro_batch(trainer.config, trainer.job)
        if config.elastic.oom == "retry" and smaller is not None:
            now = micro_batch_of(trainer.config, trainer.job)
            _write(trainer.job.folder, {"asked": config.train.micro_batch, "micro_batch": smaller})
            facts = {"rank": world.rank, "host": socket.gethostname(), "step": step, "phase": phase}
            trainer.job.folder.event("out_of_memory", **facts, asked_for=asked, micro_batch=smaller, was=now)
            what.append(f"elastic.oom=retry: ranks that are started again take train.micro_batch={smaller}, not {now}")
            return SmallerMicroBatch("\n  ".join(what))
        trainer.job.folder.event(
            "out_of_memory", rank=world.rank, host=socket.gethostname(), step=step, phase=phase, asked_for=asked
        )
    what.append(_advice(config, smaller))
    return OutOfMemory("\n  ".join(what))


def _advice(config: RunConfig, smaller: int | None) -> str:
    strategy = config.parallel.strategy
    changes = []
    if smaller is not None:
        changes.append(f"set train.micro_batch={smaller} (or elastic.oom=retry, which finds one that fits)")
    if "recompute" not in strategy:
        changes.append("add recompute=full to parallel.strategy, which keeps no activations within layers")
    compress = next((word for word in strategy.split() if word.startswith("compress=")), None)
    if compress is not None:
        changes.append(
            f"drop {compress}, which needs memory beside the gradients and goes with zero=0 alone; then add zero=3, "
            "which splits parameters, gradients and optimizer state over data ranks"
        )
    elif "zero" not in strategy:
        changes.append("add zero=3, which splits parameters, gradients and optimizer state over data ranks")
    changes.append(f"use more ranks, or a shorter data.sequence_length={config.data.sequence_length}")
    return "what helps: " + "; ".join(changes)


def micro_batch_of(config: RunConfig, job: Job) -> int:
    """The largest number of samples in one forward pass of a rank; of each of its shares, where it has several."""
    strategy, asked = job.strategy, config.train.micro_batch
    return max(size // strategy.all_shares // strategy.micro_steps(size, asked) for size in job.batches.sizes())


def next_micro_batch(config: RunConfig, job: Job) -> int | None:
    """The largest micro-batch of at most half the present one that fits every batch; None when there is none."""
    for smaller in range(micro_batch_of(config, job) // 2, 0, -1):
        with suppress(ConfigError):
            for size in job.batches.sizes():
                job.strategy.micro_steps(size, smaller)
            return smaller
    return None


def _write(folder: RunFolder, values: dict[str, int | None]) -> None:
    write_atomically(folder.micro_batch, json.dumps(values) + "\n")


def read_micro_batch(folder: RunFolder) -> dict[str, int | None]:
    """What ranks that ran out of memory have left for the next start."""
    try:
        held = json.loads(folder.micro_batch.read_text())
        return {"asked": held["asked"], "micro_batch": held["micro_batch"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def with_micro_batch(config: RunConfig, world: int) -> RunConfig:
    """The configuration with the micro-batch that fits, while the setting is the one with which memory ran out."""
    if config.elastic.oom != "retry" or config.run.fresh:
        return config
    held = read_micro_batch(RunFolder(config.run.dir))
    smaller = held.get("micro_batch")
    if smaller is None or held["asked"] != config.train.micro_batch:
        return config
    from meshwright.strategy import Strategy

    strategy = Strategy.parse(config.parallel.strategy, world)
    # Another number of ranks shares a batch otherwise.
    for size in range(smaller, 0, -1):
        with suppress(ConfigError):
            for batch in batch_schedule(config).sizes():
                strategy.micro_steps(batch, size)
            section = config.train.model_copy(update={"micro_batch": size})
            return config.model_copy(update={"train": section})
    return config


def _holdings(trainer: TrainingLoop | None, device: torch.device) -> list[str]:
    """What the rank holds, as far as it is known, and what the machine has."""
    lines = []
    if trainer is not None:
        state = list(state_tensors(trainer.model, trainer.optimizer).items())
        parameters = _bytes(tensor for name, tensor in state if name.startswith("model."))
        moments = _bytes(tensor for name, tensor in state if name.startswith("optimizer."))
        gradients = _bytes(p.grad for p in trainer.model.parameters() if p.grad is not None)
        shares = trainer.job.strategy.data_shares[trainer.one_step.data_rank]
        samples = shares * micro_batch_of(trainer.config, trainer.job)
        passes = f"{samples} x {trainer.config.data.sequence_length}"
        lines.append(
            f"it holds parameters of {_human(parameters)}, gradients of {_human(gradients)}, optimizer state of "
            f"{_human(moments)}; activations come from passes of {passes} tokens"
        )
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        lines.append(
            f"{torch.cuda.get_device_name(device)}: {_human(torch.cuda.max_memory_allocated(device))} in use at most, "
            f"{_human(torch.cuda.memory_reserved(device))} reserved, {_human(free)} of {_human(total)} free now"
        )
    lines.append(f"host: {_host()}")
    return lines


def _host() -> str:
    """What this process uses of the machine's memory, and what bounds it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    words = [f"this process used {_human(peak)} at most"]
    with suppress(OSError, StopIteration, ValueError):
        entries = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (int(entries[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
        words.append(f"{_human(free)} of {_human(total)} are available")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        words.append(f"the address space is limited to {_human(limit)} (ulimit -v)")
    with suppress(OSError, ValueError):
        words.append(f"the container to {_human(int(Path('/sys/fs/cgroup/memory.max').read_text()))}")
    return ", ".join(words)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_of(tensor).nbytes for tensor in tensors)


def _human(count: float) -> str:
    """A number of bytes as people read it."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g} bytes"
