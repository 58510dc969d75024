"""Saving and loading a state of a given size: ours beside torch.save, DCP's save and DCP's async_save, in one run.

    python benchmarks/checkpoint.py --gigabytes 1 --ranks 2 --repeats 7

Every rank holds its rows of matrices and of AdamW's moments. All savers write the same bytes to the same disk and wait
until they are on it; ours also takes digests, and checks them when it loads. Repeats are interleaved; the table has
medians, and ratios to DCP with a 95% interval of the median by resampling. Loads come from the page cache for all.

The second part trains (matrix products and a small all-reduce) while a save is under way, from its start until it is
on the disk and was read again, and compares the steps with those before it. The third kills a rank of a small training
on two ranks (kill -9) and prints how long it takes to the first new step, beside the time that a fresh interpreter
needs to start and to import the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.checkpoint.format import Manifest
from meshwright.checkpoint.pieces import Held
from meshwright.checkpoint.place import LocalPlace
from meshwright.checkpoint.reader import CheckpointReader, load_parts
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.saver import Saver
from meshwright.data.prepare import prepare
from meshwright.launch.local import run_ranks
from meshwright.models.presets import preset
from meshwright.parallel.world import World

State = dict[str, Tensor]


def make_state(world: World, gigabytes: float) -> State:
    """Matrices of a model and two moments of each, rows split over the ranks."""
    mesh = init_device_mesh("cpu", (world.size,))
    count = max(1, round(gigabytes * 1e9 / 3 / (4096 * 1024 * 4)))
    generator = torch.Generator().manual_seed(world.rank)

    def matrix() -> Tensor:
        rows = torch.randn(4096 // world.size, 1024, generator=generator)
        return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)

    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    return {f"{kind}.layers.{index}.weight": matrix() for kind in kinds for index in range(count)}


class Bench:
    """The ways to save and load, on one rank."""

    def __init__(self, world: World, state: State, folder: Path) -> None:
        self.world, self.state, self.folder = world, state, folder
        self.side = dist.new_group(backend="gloo")
        self.number = self.dcp_number = 0
        for name in ("ours", "dcp"):
            (folder / name).mkdir(exist_ok=True)
        self.saver = Saver(LocalPlace(folder / "ours"), world.side_channel(), Retention(), cpu_share=0.03)
        self.parts = {name: Held.of(tensor) for name, tensor in state.items()}

    def facts(self) -> Manifest:
        self.number += 1
        return Manifest(step=self.number, position=0, strategy="zero=3", model=preset("tiny"), tensors={})

    def torch_save(self) -> None:
        """The whole state gathered on the first rank, one file, made durable."""
        whole = {name: tensor.full_tensor() for name, tensor in self.state.items()}  # type: ignore[attr-defined]
        if self.world.is_first:
            path = self.folder / "torch.pt"
            torch.save(whole, path)
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    def _dcp_folder(self) -> Path:
        # A fresh one each time, as a run has it: overwriting would lose the last good checkpoint.
        return self.folder / f"dcp/{self.dcp_number}"

    def dcp_save(self) -> None:
        self.dcp_number += 1
        dcp_save(dict(self.state), checkpoint_id=self._dcp_folder(), process_group=self.side)

    def dcp_async(self) -> Any:
        self.dcp_number += 1
        return dcp_async_save(dict(self.state), checkpoint_id=self._dcp_folder(), process_group=self.side)

    def ours_save(self) -> None:
        self.saver.save(self.facts(), self.parts, background=False)
        self.expect_success()

    def ours_async(self) -> None:
        self.saver.save(self.facts(), self.parts, background=True)

    def expect_success(self) -> None:
        for outcome in self.saver.outcomes():
            assert outcome.error is None, outcome.error

    def dcp_load(self) -> None:
        dcp_load(dict(self.state), checkpoint_id=self._dcp_folder(), process_group=self.side)

    def ours_load(self) -> None:
        load_parts(CheckpointReader(self.folder / f"ours/step-{self.number:06d}"), self.parts)

    def tidy(self) -> None:
        """Leave the latest of each kind only, and a disk with nothing to write."""
        dist.barrier()
        if self.world.is_first:
            kept = {f"step-{self.number:06d}", str(self.dcp_number)}
            for path in [*(self.folder / "ours").iterdir(), *(self.folder / "dcp").iterdir()]:
                if path.name not in kept:
                    shutil.rmtree(path)
            os.sync()
        dist.barrier()

    def timed(self, action: Callable[[], Any]) -> float:
        """Seconds until the slowest rank has done it."""
        dist.barrier()
        started = time.perf_counter()
        action()
        dist.barrier()
        return time.perf_counter() - started


def one_step(weight: Tensor, value: Tensor) -> None:
    for _ in range(12):
        value = torch.tanh(value @ weight)
    dist.all_reduce(value[:8].clone())


def steps_while(
    bench: Bench, start: Callable[[], Any], finish: Callable[[Any], None], done: Callable[[Any], bool]
) -> tuple[float, float, float, float]:
    """Seconds per step without a save and with one under way, what it held up, and how long it took in all."""
    weight, value = torch.randn(768, 768) / 28, torch.randn(512, 768)
    for _ in range(5):
        one_step(weight, value)
    quiet, busy = [bench.timed(lambda: one_step(weight, value)) for _ in range(30)], []
    started = time.perf_counter()
    handle = start()
    stalled = time.perf_counter() - started
    while True:
        more = torch.tensor([0.0 if done(handle) else 1.0])
        dist.all_reduce(more)
        if not more.item():
            break
        busy.append(bench.timed(lambda: one_step(weight, value)))
    finish(handle)
    return (
        statistics.mean(quiet),
        statistics.mean(busy) if busy else float("nan"),
        stalled,
        time.perf_counter() - started,
    )


def measure(world: World, gigabytes: float, repeats: int, folder: Path) -> None:
    state = make_state(world, gigabytes)
    bench = Bench(world, state, folder)
    nbytes = sum(tensor.numel() * 4 for tensor in state.values())
    names: dict[str, Callable[[], Any]] = {
        "torch.save": bench.torch_save,
        "DCP save": bench.dcp_save,
        "ours save": bench.ours_save,
        "DCP load": bench.dcp_load,
        "ours load": bench.ours_load,
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        for name, action in names.items():
            bench.tidy()
            seconds = bench.timed(action)
            if repeat:
                times[name].append(seconds)
    during = {}
    for name in ("DCP async_save", "ours"):
        rounds = []
        for repeat in range(3 + 1):
            bench.tidy()
            if name == "ours":
                found = steps_while(
                    bench, bench.ours_async, lambda _: bench.saver.wait(), lambda _: not bench.saver.busy
                )
                bench.expect_success()
            else:
                found = steps_while(
                    bench, bench.dcp_async, lambda future: future.result(), lambda future: future.done()
                )
            if repeat:
                rounds.append(found)
        during[name] = rounds
    if world.is_first:
        (folder / "result.json").write_text(json.dumps({"bytes": nbytes, "times": times, "during": during}))


def recovery(folder: Path) -> None:
    """Kill a rank in the middle of a training, some times; print what that cost."""
    write_corpus(folder)
    floor = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import meshwright.trainer"], check=True)
        floor.append(time.perf_counter() - started)
    found = []
    for number in range(3):
        run = folder / f"run-{number}"
        command = [sys.executable, "-m", "meshwright", "train", "model.preset=tiny", "data.sequence_length=32"]
        command += [f"data.path={folder}/packed", f"run.dir={run}", "train.steps=20", "train.global_batch=8"]
        command += ["checkpoint.every=5", "checkpoint.background=false", "observe.tensorboard=false", "--nproc", "2"]
        environment = {**os.environ, "MESHWRIGHT_FAULT": "rank=1,step=12,phase=backward,kind=sigkill"}
        subprocess.run(command, check=True, env=environment, capture_output=True)
        lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        (failed,) = [line for line in lines if line["event"] == "failed"]
        (again,) = [line for line in lines if line["event"] == "restarted"]
        found.append((failed["detect_s"], again["restart_s"], again["steps_lost"]))
    detect, restart, lost = (statistics.median(one) for one in zip(*found, strict=True))
    print("kill -9 of one of two local ranks (each the median of 3)")
    print(f"  noticed after {detect:.2f} s, first new step {restart:.2f} s later, {lost:.0f} step done again")
    print(
        f"  floor of a rank that is not forked: {statistics.median(floor):.2f} s to start Python and import the trainer"
    )


def write_corpus(folder: Path) -> None:
    """A small corpus to train on."""
    (folder / "text.txt").write_text("".join(chr(97 + number * number % 26) for number in range(60_000)))
    prepare([folder / "text.txt"], folder / "packed", "bytes", workers=1)


def interval(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """The ratio of medians with a 95% interval."""
    draw = random.Random(0)
    ratios = sorted(
        statistics.median(draw.choices(ours, k=len(ours))) / statistics.median(draw.choices(theirs, k=len(theirs)))
        for _ in range(2000)
    )
    return statistics.median(ours) / statistics.median(theirs), ratios[50], ratios[1949]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dir", default=None, help="where to write (default: the temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder = Path(name)
        run_ranks(lambda world: measure(world, args.gigabytes, args.repeats, folder), args.ranks, device="cpu")
        result = json.loads((folder / "result.json").read_text())
    times = result["times"]
    print(f"torch {torch.__version__}, {args.ranks} ranks, {result['bytes'] / 1e9:.2f} GB, {args.repeats} repeats")
    for label, seconds in times.items():
        median = statistics.median(seconds)
        print(f"  {label:<12} {median:7.3f} s  {result['bytes'] / 1e9 / median:6.2f} GB/s")
    for what in ("save", "load"):
        ratio, low, high = interval(times[f"ours {what}"], times[f"DCP {what}"])
        print(f"  ours / DCP, {what}: {ratio:.3f} (95%: {low:.3f} to {high:.3f})")
    print("while a save is under way (each the median of 3 rounds)")
    for label, rounds in result["during"].items():
        quiet, busy, stalled, total = (statistics.median(one) for one in zip(*rounds, strict=True))
        ratio = statistics.median(one[1] / one[0] for one in rounds)
        print(
            f"  {label:<15} step {quiet * 1e3:.1f} ms quiet, {busy * 1e3:.1f} ms busy: {ratio:.3f}; "
            f"held up {stalled:.3f} s, done after {total:.2f} s"
        )
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        recovery(Path(name))


if __name__ == "__main__":
    main()
