"""Prove on this machine's CPU that a model under a strategy computes what one device computes.

Both train for a few steps on random data, with accumulation, clipping and AdamW, side by side on local processes.
Losses, gradient norms and weights are compared; where they differ, the first module that departs is named. A preset
or a Hugging Face folder is proved with a small model of the same structure; its weights are not read."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import UserError, nearest
from meshwright.models.hf_config import read_spec
from meshwright.models.presets import find_preset, presets
from meshwright.models.spec import ModelSpec
from meshwright.torch_support import imported_for_good, require_torch
from meshwright.verify.shrink import Small, asked_strategy, shrink

if TYPE_CHECKING:
    from rich.table import Table

    from meshwright.verify.proof import Compared, Proof, Tell

_PLAIN_WIDTH = 200
"""Columns of the output where it is not a terminal: wide enough that no cell is cut."""
PRECISIONS = ("float64", "float32", "tf32", "bf16", "fp16", "fp8")


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of `meshwright verify`."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="PRESET|FOLDER|MODULE:BUILD",
        help="a preset's name, a Hugging Face folder, or a function of your own that gives an nn.Module",
    )
    parser.add_argument("--parallel", required=True, metavar="STRATEGY", help='such as "dp=2 zero=1 tp=2"')
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps to compare (default 5)")
    parser.add_argument(
        "--precision",
        default="float64",
        choices=PRECISIONS,
        help="float64 (default) tells a mistake from rounding; others compare with wider bounds",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; docs/verify.md says what is in it")
    parser.epilog = (
        "exit code: 0 equal, 1 not equal, 2 something to change in the command or the model\n\n"
        "a module of your own:\n"
        "  build()                 gives the model; a class that needs no arguments will do\n"
        "  inputs(seed, samples)   optional: a tuple or dict of tensors whose first dimension is the sample\n"
        "  loss(model, inputs)     optional, with inputs: calls the model, gives the mean over the samples\n"
        "  Without the last two the model is a language model: token ids in, logits out.\n\n"
        "examples:\n"
        '  meshwright verify --model llama3.1-8b --parallel "dp=2 zero=1 tp=2"\n'
        '  meshwright verify --model path/to/folder --parallel "zero=3 tp=4 recompute=selective"\n'
        '  meshwright verify --model net:Net --parallel "dp=2 tp=2" --json\n'
    )


def run(args: argparse.Namespace) -> int:
    """Prove it; 0 when both compute the same, 1 when they do not."""
    if args.steps < 1:
        raise UserError(f"--steps={args.steps} compares nothing; use a whole number from 1")
    subject = _subject(args.model)
    asked, filled_in = asked_strategy(args.parallel)
    asked.check_any(asked.world)
    if isinstance(subject, ModelSpec):
        asked.check(subject, asked.world)
    small = shrink(asked, subject if isinstance(subject, ModelSpec) else None)
    notes = (*filled_in, *small.notes)
    require_torch()
    # Read when numpy and torch are imported: ranks are forked, and threads do not survive that.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with imported_for_good():
        from meshwright.launch.local import RankError
        from meshwright.verify.proof import prove

    try:
        with _progress() as tell:
            proof = prove(subject, asked, small, precision=args.precision, steps=args.steps, tell=tell)
    except RankError as error:
        raise UserError(f"{args.model} does not train on one device: {error}") from None
    if args.json:
        shape = small.spec.model_dump(mode="json") if small.spec is not None else None
        facts = {"model": args.model, "shape": shape, "asked": str(asked), "strategy": str(small.strategy)}
        print(json.dumps({**facts, "notes": list(notes), **proof.as_json()}, indent=2, allow_nan=False))
    else:
        _print(args.model, small, notes, proof)
    return 0 if proof.equal else 1


def _subject(model: str) -> ModelSpec | str:
    """The full shape of a preset or a folder; a user's `module:build` as it is."""
    if Path(model).is_dir():
        spec = read_spec(model)
    elif ":" in model:
        name, _, function = model.partition(":")
        if not all(part.isidentifier() for part in (*name.split("."), function)):
            raise UserError(f"--model={model} is not MODULE:FUNCTION; write it as in Python, such as package.net:build")
        return model
    elif "/" in model or os.sep in model:
        raise UserError(f"--model={model}: there is no such folder; give one that holds a config.json")
    else:
        plain = model.lower().replace("_", "-")
        if plain not in presets():
            raise UserError(
                f"--model={model} is no preset{nearest(plain, presets())}, no folder here and no MODULE:FUNCTION; "
                "`meshwright models` lists the presets"
            )
        spec = find_preset(model).spec
    spec.check_buildable()
    return spec


@contextmanager
def _progress() -> Iterator[Tell]:
    """Says what is going on, on stderr: in one line on a terminal, in a line each elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    # No spinner: it would be a thread, and ranks are forked.
    start_of_line = "\r\x1b[2K"
    try:
        yield lambda text: print(f"{start_of_line}{text} ...", end="", file=sys.stderr, flush=True)
    finally:
        print(start_of_line, end="", file=sys.stderr, flush=True)


def _print(model: str, small: Small, notes: tuple[str, ...], proof: Proof) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    console.print(Text(f"model      {_what(model, small, proof)}"))
    console.print(Text(f"strategy   {small.strategy}, {proof.ranks} {'process' if proof.ranks == 1 else 'processes'}"))
    for note in notes:
        console.print(Text(f"           {note}"))
    if proof.losses:
        console.print()
        console.print(_steps(proof))
        console.print()
        console.print(_parameters(proof))
    if proof.failure:
        console.print()
        console.print(Text(proof.failure))
    console.print()
    console.print(Text(proof.verdict(), style="bold green" if proof.equal else "bold red"), soft_wrap=True)
    console.print(Text(f"{proof.seconds:.1f} s", style="dim"))


def _what(model: str, small: Small, proof: Proof) -> str:
    spec = small.spec
    if spec is None:
        return f"{model}: {proof.parameter_count:,} parameters"
    experts = f", {spec.experts.num_experts} experts" if spec.experts is not None else ""
    return (
        f"{model} as {proof.parameter_count:,} parameters of the same structure: {spec.num_hidden_layers} layers, "
        f"width {spec.hidden_size}, heads {spec.num_attention_heads}/{spec.num_key_value_heads}, "
        f"vocabulary {spec.vocab_size}{experts}"
    )


def _steps(proof: Proof) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("step", "loss", "one device", "difference", "grad norm", "one device", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, (loss, norm) in enumerate(zip(proof.losses, proof.grad_norms, strict=True)):
        table.add_row(str(number + 1), *_cells(loss), *_cells(norm))
    return table


def _cells(number: Compared) -> tuple[str, str, str]:
    return f"{number.strategy:.9f}", f"{number.one_device:.9f}", f"{number.difference:.1e}"


def _parameters(proof: Proof) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("weights that differ most", no_wrap=True)
    table.add_column("difference", justify="right", no_wrap=True)
    for name, worst in proof.parameters:
        table.add_row(name, f"{worst:.1e}")
    return table
