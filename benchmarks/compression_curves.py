"""Where compressed gradients lead: the demo trained with each kind of compression, beside the same without any.

    python benchmarks/compression_curves.py [--steps 500] [--ranks 2] [--kinds fp16,topk:0.01@0] [--json FILE]

After an @ stands the number of steps before compression begins; without one comm.compress_after chooses it.
Prints the loss on held-out text at the end, how far that is from the one without compression, the mean loss of the last
steps, and what a rank sends in a compressed step. Exits with 1 where a kind that begins by itself ends more than 2%
above the loss without compression.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

WITHIN = 0.02
KINDS = ("fp16", "bf16", "int8", "powersgd:4", "topk:0.01")


def train(kind: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with that compression; gives the last losses and what was sent."""
    run = folder / kind.replace(":", "-")
    kind, _, after = kind.partition("@")
    settings = [
        f"run.dir={run}",
        f"data.path={folder / 'text'}",
        f"train.steps={args.steps}",
        f"parallel.strategy=dp={args.ranks} compress={kind}",
        *([f"comm.compress_after={after}"] if after else []),
        *args.settings,
    ]
    command = [sys.executable, "-m", "meshwright", "train", "--preset", "demo", "--nproc", str(args.ranks), *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    held_out = [row["eval_loss"] for row in rows if "eval_loss" in row][-1]
    losses = [row["loss"] for row in rows if "loss" in row]
    sent = [row["sent_mib"] for row in rows if "sent_mib" in row]
    return {"held_out": held_out, "loss": fmean(losses[-20:]), "sent_mib": sent[-1] if sent else None}


def main() -> int:
    """Train with each, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path, help="write what is printed")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="settings of all")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    failed = False
    print(f"{'compression':16}{'held-out loss':>15}{'to none':>10}{'last losses':>13}{'MiB sent':>11}", flush=True)
    with tempfile.TemporaryDirectory(prefix="meshwright-curves-") as folder:
        for kind in ("none", *args.kinds.split(",")):
            one = found[kind] = train(kind, args, Path(folder))
            apart = one["held_out"] / found["none"]["held_out"] - 1
            failed |= "@" not in kind and apart > WITHIN
            sent = "" if one["sent_mib"] is None else f"{one['sent_mib']:.3f}"
            print(f"{kind:16}{one['held_out']:15.4f}{apart:+10.2%}{one['loss']:13.4f}{sent:>11}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
