"""Loss curves of two precisions over the same text, weights and order: do they differ by more than seeds do?

    python benchmarks/precision_curves.py [--steps 500] [--seeds 3] [--precision fp8] [--csv FILE]

The model has four layers of Llama-3.2-1B's width and reads bytes. The text is the source of Python's standard library,
which is on every machine that runs this; parts of it are drawn by the seed, from which the weights follow, too. Losses
are means over windows of steps. In each window the distance between the two precisions, over the same seeds, is
compared with the spread of the seeds under bf16.
"""

from __future__ import annotations

import argparse
import csv
import sysconfig
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from meshwright.config import RunConfig
from meshwright.config_load import load_config
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec
from meshwright.parallel.world import World, join_world
from meshwright.strategy import Strategy
from meshwright.training.step import TrainingStep

BYTES = 256
REFERENCE = "bf16"


def text() -> np.ndarray:
    """The source of Python's standard library, in the order of its files' names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in folder.glob("*.py") if file.is_file())
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def shape(layers: int, width: int) -> ModelSpec:
    """Llama-3.2-1B's layers at that width, over bytes."""
    whole = preset("llama3.2-1b")
    part = width / whole.hidden_size
    sizes = {"hidden_size": width, "intermediate_size": int(whole.intermediate_size * part)}
    heads = {name: max(1, int(getattr(whole, name) * part)) for name in ("num_attention_heads", "num_key_value_heads")}
    return whole.model_copy(update={"num_hidden_layers": layers, "vocab_size": BYTES, **sizes, **heads})


def config_of(args: argparse.Namespace, precision: str, seed: int) -> RunConfig:
    """The settings of a run."""
    return load_config(
        None,
        [
            f"run.seed={seed}",
            f"train.precision={precision}",
            f"train.steps={args.steps}",
            f"train.warmup_steps={min(50, args.steps // 10)}",
            f"train.lr={args.lr}",
            f"train.global_batch={args.batch}",
            f"data.sequence_length={args.sequence}",
            *args.settings,
        ],
    )


def losses(world: World, args: argparse.Namespace, corpus: np.ndarray, precision: str, seed: int) -> list[float]:
    """The loss of every step."""
    torch._dynamo.reset()
    config, spec = config_of(args, precision, seed), shape(args.layers, args.width)
    step = TrainingStep(config, spec, Strategy.parse("dp=1", 1), world)
    draw = np.random.default_rng(seed)
    found = []
    for number in range(args.steps):
        starts = draw.integers(len(corpus) - args.sequence - 1, size=args.batch)
        rows = np.stack([corpus[start : start + args.sequence + 1] for start in starts]).astype(np.int64)
        batch = {
            "tokens": torch.from_numpy(rows)[None],
            "samples": torch.arange(args.batch)[None] + number * args.batch,
            "valid": torch.tensor(args.batch * args.sequence),
        }
        found.append(step(number, batch)["loss"])
    return found


def main() -> None:
    """Train with both, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precision", default="fp8", help="compared with bf16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--window", type=int, default=50, help="steps of which a mean is taken")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", type=Path, help="write the loss of every step")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="settings of both")
    args = parser.parse_args()
    corpus = text()
    curves: dict[tuple[str, int], list[float]] = {}
    with join_world(args.device, 120.0) as world:
        for seed in range(args.seeds):
            for precision in (REFERENCE, args.precision):
                curves[precision, seed] = losses(world, args, corpus, precision, seed)
                last = fmean(curves[precision, seed][-args.window :])
                print(f"{precision:8} seed {seed}: loss {last:.4f} over the last {args.window} steps", flush=True)
    print(f"\n{'steps':>12} {'bf16':>8} {args.precision:>8} {'apart':>9} {'spread of bf16':>15}")
    within = windows = 0
    for start in range(0, args.steps, args.window):
        of = {key: fmean(curve[start : start + args.window]) for key, curve in curves.items()}
        reference = [of[REFERENCE, seed] for seed in range(args.seeds)]
        other = [of[args.precision, seed] for seed in range(args.seeds)]
        apart, spread = fmean(other) - fmean(reference), max(reference) - min(reference)
        windows += 1
        within += abs(apart) <= spread
        label = f"{start + 1}-{min(start + args.window, args.steps)}"
        print(f"{label:>12} {fmean(reference):8.4f} {fmean(other):8.4f} {apart:+9.4f} {spread:15.4f}")
    print(f"within the spread of seeds in {within} of {windows} windows")
    if args.csv:
        with args.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("precision", "seed", "step", "loss"))
            for (precision, seed), curve in curves.items():
                writer.writerows((precision, seed, number + 1, f"{loss:.6f}") for number, loss in enumerate(curve))


if __name__ == "__main__":
    main()
