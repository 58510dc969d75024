"""Steps of several models on one GPU beside TorchTitan and a bare loop: `meshwright bench step`, part after part.

    python benchmarks/gpu_speed.py --list
    python benchmarks/gpu_speed.py 1b 3b --minutes 9 [--out benchmarks/results/h200_speed.json]

Each part is one call of `meshwright bench step`, so that its rows were measured in turns. Results are added to those of
the file; parts that do not fit into the minutes are named at the end. Prints one short table last.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

LLAMA_1B = "--model llama3.2-1b model.spec.tie_word_embeddings=false"
LONG_1B = f"{LLAMA_1B} model.spec.max_position_embeddings=131072 --micro-batch 1 --recompute full --repeats 1"
BOTH = "--contenders meshwright,torchtitan --baseline torchtitan"
ALL = "--contenders meshwright,torchtitan,bare --baseline torchtitan"
ALONE = "--contenders meshwright --baseline meshwright"
FP8 = "--variant fp8:train.precision=fp8"
NARROW = "precision.stored=bf16 precision.moments=int8"
MIXTURE = "model.spec.experts.num_experts=32 model.spec.experts.num_experts_per_tok=4"


def recomputing(name: str, words: str) -> str:
    """A variant with another strategy."""
    return f"""--variant "{name}:'parallel.strategy=dp=1 {words}'" """


class Part(NamedTuple):
    """One table."""

    what: str
    arguments: str


PARTS = {
    "1b": Part(
        "Llama-3.2-1B's shape, untied, 2 x 8192",
        f"{LLAMA_1B} --sequence 8192 --micro-batch 2 {ALL} {FP8} {recomputing('selective', 'recompute=selective')}",
    ),
    "1b-batches": Part(
        "the same, the fastest micro-batch of each",
        f"{LLAMA_1B} --sequence 8192 --micro-batch 1,2,4,8 --steps 10 --repeats 1 {BOTH} {FP8} "
        + recomputing("selective", "recompute=selective"),
    ),
    "3b": Part(
        "Llama-3.2-3B's shape, untied, 1 x 8192",
        f"--model llama3.2-3b model.spec.tie_word_embeddings=false --sequence 8192 --micro-batch 1 {BOTH} {FP8}",
    ),
    "8b": Part(
        "Llama-3.1-8B, 1 x 8192, where states do not fit in float32",
        f"--model llama3.1-8b --sequence 8192 --micro-batch 1 --steps 10 --repeats 1 {BOTH} "
        f'--variant "narrow:{NARROW}" --variant "fp8:{NARROW} train.precision=fp8"',
    ),
    "8b-offload": Part(
        "the same: float32 states in host memory beside narrow ones on the card",
        f"--model llama3.1-8b --sequence 8192 --micro-batch 1 --steps 5 --warm-up 2 --repeats 1 {ALONE} {NARROW} "
        f"""--variant "offload:'parallel.strategy=dp=1 recompute=selective offload=optimizer' """
        'precision.stored=float32 precision.moments=float32"',
    ),
    "mixture": Part(
        "a mixture of 32 experts, 4 for a token: 3.3 B parameters, 1.2 B at work, 2 x 4096",
        f"--model qwen3-30b-a3b model.spec.num_hidden_layers=16 {MIXTURE} --sequence 4096 --micro-batch 2 {BOTH}",
    ),
    "32k": Part(
        "Llama-3.2-1B's shape, 1 x 32768, recompute=full", f"{LONG_1B} --sequence 32768 --steps 6 --warm-up 2 {ALL}"
    ),
    "128k": Part(
        "Llama-3.2-1B's shape, 1 x 131072, recompute=full",
        f"{LONG_1B} --sequence 131072 --steps 3 --warm-up 2 --contenders meshwright,bare --baseline bare",
    ),
    "offload": Part(
        "Llama-3.2-1B's shape, 2 x 8192: what moving states or activations to host memory costs",
        f"{LLAMA_1B} --sequence 8192 --micro-batch 2 --steps 8 --repeats 1 {ALONE} "
        + recomputing("optimizer", "offload=optimizer")
        + recomputing("activations", "offload=activations"),
    ),
    "small": Part("GPT-2, 16 x 1024", f"--model gpt2 --sequence 1024 --micro-batch 16 {ALONE}"),
}


def measure(part: Part, limit_s: float) -> dict[str, Any] | str:
    """What one part found, or why it found nothing."""
    with tempfile.TemporaryDirectory(prefix="meshwright-speed-") as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "meshwright", "bench", "step", *shlex.split(part.arguments)]
        command += ["--full-attention", "--json", str(out)]
        try:
            subprocess.run(command, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            return "not done in time"
        return dict(json.loads(out.read_text(encoding="utf-8"))) if out.exists() else "nothing was found"


def table(results: dict[str, Any]) -> str:
    """The rows of all parts, each contender at its best micro-batch."""
    lines = [f"{'':28}{'micro':>6}{'ms/step':>9}{'tokens/s':>10}{'ratio':>7}{'MFU':>7}{'GiB':>7}{'first step s':>15}"]
    for name, one in results.items():
        lines.append(f"{name}: {PARTS[name].what if name in PARTS else ''} ({one['measured']})")
        best = one["found"]["best"]
        for row in one["found"]["rows"]:
            if row["trouble"]:
                lines.append(f"  {row['contender']:26}{row['micro_batch']:6}  {row['trouble']}"[:110])
            elif best.get(row["contender"]) == row["micro_batch"]:
                lines.append(_line(row))
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    ratio, mfu = row["ratio"], row["mfu"]
    starts = " / ".join(f"{seconds:.1f}" for seconds in (row["first_step_s"] or {}).values() if seconds is not None)
    speed = f"{row['ms_per_step']:9.1f}{row['tokens_per_s']:10,.0f}{f'{ratio:.3f}' if ratio else '':>7}"
    rest = f"{f'{mfu:.1%}' if mfu else '':>7}{row['peak_gib']:7.1f}{starts:>15}"
    return f"  {row['contender']:26}{row['micro_batch']:6}{speed}{rest}"


def main() -> int:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="which (default: all)")
    parser.add_argument("--list", action="store_true", help="name the parts and their commands")
    parser.add_argument("--minutes", type=float, default=60.0, help="for all of them together (default 60)")
    parser.add_argument("--out", type=Path, help="a JSON file; what it holds of other parts stays")
    args = parser.parse_args()
    wanted = args.parts or list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    if args.list:
        for name in wanted:
            print(f"{name:12}{PARTS[name].what}\n{'':12}meshwright bench step {PARTS[name].arguments}")
        return 0
    results = json.loads(args.out.read_text(encoding="utf-8")) if args.out is not None and args.out.exists() else {}
    end, left = time.monotonic() + 60 * args.minutes, []
    for name in wanted:
        found = measure(PARTS[name], end - time.monotonic()) if time.monotonic() < end else "no time was left"
        if isinstance(found, str):
            left.append(f"{name}: {found}")
            continue
        said = f"{datetime.now(UTC):%Y-%m-%d}, {found['device']}, torch {found['torch']}"
        results[name] = {"measured": said, "arguments": PARTS[name].arguments, "found": found}
        if args.out is not None:
            args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(results))
    print("\n".join(left))
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
