"""Step time of data parallel and ZeRO against bare PyTorch loops, DeepSpeed, Accelerate and Fabric, over gloo on CPU.

All contenders of one number of ranks live in the same processes and share their process group. A block of Meshwright's
steps and a block of the peer's alternate in short turns (AB, BA, ...), each after a barrier, so that what disturbs the
machine meets both; a turn takes as long as its slowest rank. Prints each ratio (Meshwright / peer, below 1 is faster)
as the median over pairs of blocks, its 95% interval (bootstrap over pairs), whether the upper end meets the bar, and
the ratio of the processor time of all ranks, which other work on the machine disturbs less.

Everybody trains the same decoder from the same weights on the same batches, one thread a rank, with AdamW (fused, norms
without decay), clipping at 1.0 and the loss as a number after each step; the losses of the first steps must agree.
Meshwright's side is the step of its trainer, which also sums the loss and counts the tokens over all ranks.

DeepSpeed's stage 3 leaves parameters below 1e5 elements whole, which here are all; `all sharded` sets that threshold to
0, as it is with zero=3. Accelerate has no FSDP2 on CPU (1.15 silently trains with DDP), so Fabric stands for both.

    pip install deepspeed accelerate lightning      # optional; what is not installed is listed as such
    python benchmarks/data_parallel.py [--ranks 2 4] [--blocks 20] [--turns 4] [--steps 2] [--peers PyTorch ...]
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Before torch is imported, and forced: every rank of every contender computes with one thread.
os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console as Terminal
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwright._version import __version__
from meshwright.config import RunConfig
from meshwright.launch.local import run_ranks
from meshwright.models.decoder import Decoder
from meshwright.models.initialize import build
from meshwright.models.spec import ModelSpec
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.training.step import TrainingStep

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
BATCH, TOKENS, BATCHES = 16, 64, 8
"""Samples of a step over all ranks, their tokens, and how many such batches take turns."""
SPEC = ModelSpec.model_validate({**SHAPE, **HEADS, "max_position_embeddings": TOKENS})
CONFIG = RunConfig.model_validate({"run": {"seed": 1}, "train": {"lr": 3e-3, "schedule": "constant"}}, strict=False)
PACKAGES = {"PyTorch": "torch", "DeepSpeed": "deepspeed", "Accelerate": "accelerate", "Fabric": "lightning"}
"""Who is compared with, and the package to install for it."""

WARM_UP = 5
"""Steps that everybody takes before the first block, and whose losses must agree."""

Step = Callable[[int], float]
"""Takes the number of a step, trains, and gives the loss."""


@dataclass(frozen=True)
class Comparison:
    """A strategy of Meshwright against what a peer calls the same."""

    strategy: str
    peer: str
    form: str
    limit: float
    """The bar: the upper end of the ratio's interval must be at or below."""


COMPARISONS = (
    Comparison("zero=0", "PyTorch", "DDP", 1.05),
    Comparison("zero=0", "Accelerate", "DDP", 1.05),
    Comparison("zero=0", "Fabric", "DDP", 1.05),
    Comparison("zero=2", "PyTorch", "fully_shard, whole", 1.05),
    Comparison("zero=2", "DeepSpeed", "stage 2", 1.0),
    Comparison("zero=3", "PyTorch", "fully_shard", 1.05),
    Comparison("zero=3", "DeepSpeed", "stage 3, all sharded", 1.0),
    Comparison("zero=3", "DeepSpeed", "stage 3, defaults", 1.0),
    Comparison("zero=3", "Fabric", "FSDP2", 1.05),
)


@dataclass
class Contender:
    """Somebody who trains: its step, and how often it was taken."""

    step: Step
    linear: Any
    """torch.nn.functional.linear as this contender left it: DeepSpeed's stage 3 replaces it for the whole process."""
    taken: int = 0


def meshwright_step(strategy: str, world: World, batches: list[Tensor]) -> Step:
    """One optimizer step of the trainer."""
    training = TrainingStep(CONFIG, SPEC, Strategy.parse(strategy, world.size), world)
    samples = torch.arange(len(batches[0])).unsqueeze(0)
    # As the trainer does it: it knows that all targets of its packed rows count.
    valid = torch.tensor(BATCH * TOKENS)
    shares = [{"tokens": tokens.unsqueeze(0), "samples": samples, "valid": valid} for tokens in batches]
    return lambda number: training(number, shares[number % len(shares)])["loss"]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer that all use, with the groups that Meshwright makes."""
    train = CONFIG.train
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, fused=True)


def fresh_model() -> Decoder:
    """The decoder with the weights that all start from."""
    return build(SPEC, seed=CONFIG.run.seed).train()


def loop(
    model: nn.Module,
    optimizer: Any,
    batches: list[Tensor],
    backward: Callable[[Tensor], object] = Tensor.backward,
    clip: Callable[..., object] = torch.nn.utils.clip_grad_norm_,
) -> Step:
    """A training loop as one writes it by hand; libraries bring their own backward pass and clipping."""

    def step(number: int) -> float:
        tokens = batches[number % len(batches)]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        backward(loss)
        clip(model.parameters(), CONFIG.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def shard(model: Decoder, reshard_after_forward: bool) -> Decoder:
    """FSDP2 as its tutorial applies it: every block, then the root."""
    for block in model.model.layers.values():
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    return model


def pytorch_step(form: str, world: World, batches: list[Tensor]) -> Step:
    """A bare loop of DistributedDataParallel or fully_shard."""
    if form == "DDP":
        replica = DistributedDataParallel(fresh_model())
        return loop(replica, adamw(replica), batches)
    model = shard(fresh_model(), reshard_after_forward=form == "fully_shard")
    return loop(model, adamw(model), batches)


def accelerate_step(form: str, world: World, batches: list[Tensor]) -> Step:
    """Accelerate, which takes the process group that it finds."""
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    if accelerator.num_processes != world.size or accelerator.distributed_type != "MULTI_CPU":
        raise RuntimeError(f"Accelerate does not train on {world.size} CPU processes: {accelerator.state!r}")
    model = fresh_model()
    prepared, optimizer = accelerator.prepare(model, adamw(model))
    return loop(prepared, optimizer, batches, accelerator.backward, accelerator.clip_grad_norm_)


def fabric_step(form: str, world: World, batches: list[Tensor]) -> Step:
    """Lightning Fabric, told that a launcher has started the ranks; it takes the process group that it finds."""
    fabric_module = importlib.import_module("lightning.fabric")
    strategies = importlib.import_module("lightning.fabric.strategies")
    environments = importlib.import_module("lightning.fabric.plugins.environments")
    if form == "DDP":
        strategy = strategies.DDPStrategy()
    else:
        split = lambda model, mesh: shard(model, reshard_after_forward=True)  # noqa: E731
        strategy = strategies.ModelParallelStrategy(split, data_parallel_size=world.size, tensor_parallel_size=1)
    launched = environments.TorchElasticEnvironment()
    fabric = fabric_module.Fabric(accelerator="cpu", devices=world.size, strategy=strategy, plugins=[launched])
    fabric.launch()
    model = fabric.setup_module(fresh_model())
    optimizer = fabric.setup_optimizers(adamw(model))
    clip = lambda parameters, norm: fabric.clip_gradients(model, optimizer, max_norm=norm)  # noqa: E731
    return loop(model, optimizer, batches, fabric.backward, clip)


def deepspeed_step(form: str, world: World, batches: list[Tensor]) -> Step:
    """DeepSpeed, which takes the process group that it finds."""
    deepspeed = importlib.import_module("deepspeed")
    # Shared-memory reduction serves inference only, and would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    zero: dict[str, object] = {"stage": int(form.removeprefix("stage ")[0])}
    if form.endswith("all sharded"):
        zero["stage3_param_persistence_threshold"] = 0
    settings = {
        "train_batch_size": BATCH,
        "gradient_clipping": CONFIG.train.grad_clip,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    model = fresh_model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)

    def step(number: int) -> float:
        tokens = batches[number % len(batches)]
        loss = F.cross_entropy(engine(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


BUILDERS = {
    "Meshwright": meshwright_step,
    "PyTorch": pytorch_step,
    "DeepSpeed": deepspeed_step,
    "Accelerate": accelerate_step,
    "Fabric": fabric_step,
}


def make_batches(world: World) -> list[Tensor]:
    """This rank's shares of the batches, which do not depend on the number of ranks."""
    draw = torch.Generator().manual_seed(0)
    share = BATCH // world.size
    mine = slice(world.rank * share, (world.rank + 1) * share)
    # Not uniform, so that there is something to learn.
    rows = [torch.randint(SPEC.vocab_size, (BATCH, TOKENS + 1), generator=draw) for _ in range(BATCHES)]
    return [(tokens**2 // SPEC.vocab_size)[mine].clone() for tokens in rows]


def run_steps(contender: Contender, steps: int) -> Tensor:
    """Let a contender take some steps: the slowest rank's seconds, and the seconds of processor time of all ranks."""
    F.linear = contender.linear
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        contender.step(contender.taken)
        contender.taken += 1
    slowest, total = torch.tensor(time.perf_counter() - wall), torch.tensor(time.process_time() - processor)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return torch.stack((slowest, total))


def run_blocks(pair: Sequence[Contender], turns: int, steps: int, first: int) -> list[list[float]]:
    """A block of each of the two, in turns: seconds and processor seconds, of Meshwright and of the peer."""
    seconds = torch.zeros(2, 2)
    for turn in range(turns):
        leads = (first + turn) % 2
        for side in (leads, 1 - leads):
            seconds[side] += run_steps(pair[side], steps)
    return seconds.tolist()


def check_same_work(contenders: dict[tuple[str, str], Contender], world: World) -> None:
    """Warm everybody up; raise unless all have the same losses, meaned over the ranks."""
    found = {}
    for name, contender in contenders.items():
        F.linear = contender.linear
        losses = torch.tensor([contender.step(number) for number in range(WARM_UP)], dtype=torch.float64)
        contender.taken = WARM_UP
        dist.all_reduce(losses)
        found[name] = losses / world.size
    for name, losses in found.items():
        expected = next(iter(found.values()))
        if not torch.allclose(losses, expected, rtol=2e-5, atol=0):
            raise RuntimeError(f"{name} computes other losses: {losses.tolist()}, not {expected.tolist()}")


def measure(world: World, comparisons: Sequence[Comparison], blocks: int, turns: int, steps: int, result: Path) -> None:
    """On each rank: the times of every comparison's pairs of blocks; the first rank writes them down."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    batches = make_batches(world)
    plain = F.linear
    contenders: dict[tuple[str, str], Contender] = {}
    sides = [(("Meshwright", c.strategy), (c.peer, c.form)) for c in comparisons]
    for name in dict.fromkeys(name for pair in sides for name in pair):
        contenders[name] = Contender(BUILDERS[name[0]](name[1], world, batches), F.linear)
        F.linear = plain
    check_same_work(contenders, world)
    # One contender's garbage collection should not walk through the modules of all others.
    gc.collect()
    gc.freeze()
    pairs: list[list[list[list[float]]]] = [[] for _ in sides]
    for block in range(blocks):
        for place in range(len(sides)):
            index = (block + place) % len(sides)
            pair = [contenders[name] for name in sides[index]]
            pairs[index].append(run_blocks(pair, turns, steps, first=block % 2))
    if world.is_first:
        result.write_text(json.dumps(pairs))


def interval(ratios: Sequence[float], rounds: int = 10_000) -> tuple[float, float, float]:
    """The median and its 95% interval by bootstrap."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return statistics.median(ratios), medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def installed(peer: str) -> str | None:
    """The version of a peer that is here."""
    try:
        return version(PACKAGES[peer])
    except PackageNotFoundError:
        return None


def cells(pairs: Sequence[Any], steps: int, limit: float) -> tuple[str, ...]:
    """What the table says of a comparison."""
    own, peer = (statistics.median(pair[side][0] for pair in pairs) * 1000 / steps for side in (0, 1))
    ratio, low, high = interval([own[0] / peer[0] for own, peer in pairs])
    processor = statistics.median(own[1] / peer[1] for own, peer in pairs)
    verdict = (f"{limit:.2f}", "met" if high <= limit else "not met")
    return f"{own:.1f}", f"{peer:.1f}", f"{ratio:.3f}", f"{low:.3f} to {high:.3f}", *verdict, f"{processor:.3f}"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4, 8, 16])
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks of each comparison (default 20)")
    parser.add_argument("--turns", type=int, default=4, help="turns a pair of blocks (default 4)")
    parser.add_argument("--steps", type=int, default=2, help="steps a turn (default 2)")
    parser.add_argument("--peers", nargs="+", default=list(PACKAGES), choices=list(PACKAGES))
    options = parser.parse_args()
    wanted = [c for c in COMPARISONS if c.peer in options.peers]
    present = [c for c in wanted if installed(c.peer)]
    shape = f"{SPEC.num_hidden_layers} layers of {SPEC.hidden_size}, batch {BATCH} x {TOKENS}"
    per_block = options.turns * options.steps
    count = f"{options.blocks} pairs of blocks of {per_block} steps"
    table = Table(title=f"Meshwright {__version__} / peer: {shape}, gloo, 1 thread a rank, {count}")
    for column in ("ranks", "Meshwright", "peer", "ms/step", "peer's", "ratio", "95% interval", "bar", "", "processor"):
        table.add_column(column, justify="left" if column == "peer" else "right")
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as scratch:
            result = Path(scratch) / "pairs.json"
            counts = {"blocks": options.blocks, "turns": options.turns, "steps": options.steps}
            run_ranks(partial(measure, comparisons=present, result=result, **counts), ranks, device="cpu")
            found = dict(zip(present, json.loads(result.read_text()), strict=True))
        for c in wanted:
            text: tuple[str, ...] = (f"{c.peer} {c.form}: not installed; pip install {PACKAGES[c.peer]}",)
            if c in found:
                text = (f"{c.peer} {installed(c.peer)} {c.form}", *cells(found[c], per_block, c.limit))
            table.add_row(str(ranks), f"dp={ranks} {c.strategy}", *text)
    # Wide enough for the table, also where the output is a file.
    Terminal(width=max(Terminal().width, 140)).print(table)


if __name__ == "__main__":
    main()
