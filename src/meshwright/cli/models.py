"""List the model presets with their parameter counts, show one in full, or what its modules compute.

In the place of a preset's name there may be a run folder, or one of Hugging Face.

examples:
  meshwright models
  meshwright models llama3.1-8b
  meshwright models llama3.1-8b --flops 4096
  meshwright models runs/demo --flops 128
  meshwright models --json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshwright.config import load_config
from meshwright.errors import UserError
from meshwright.models.count import count_parameters
from meshwright.models.hf_config import read_spec
from meshwright.models.presets import Preset, find_preset, presets
from meshwright.planning.module_flops import ModuleFlops, module_flops
from meshwright.torch_support import require_torch
from meshwright.training.job import model_spec

_PLAIN_WIDTH = 200
"""Columns of the output where it is not a terminal: wide enough that no cell is cut."""
_WIDTH_WITH_SOURCE = 120
"""Narrower terminals show the list without the column of sources."""

_MOST_TOKENS = 1 << 26
"""Of a sequence: PyTorch cannot count more pairs of tokens."""


def describe(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `meshwright models`."""
    parser.add_argument(
        "name", nargs="?", metavar="NAME|FOLDER", help="show this preset, or the model of a run, in full"
    )
    parser.add_argument(
        "--flops",
        type=int,
        metavar="TOKENS",
        help="FLOPs of the model's modules for a sequence of so many tokens: by closed form, and counted by PyTorch",
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects with exact counts")


def run(args: argparse.Namespace) -> int:
    """Print the presets as a table, one preset in full, or either as JSON."""
    if args.flops is not None:
        return _show_flops(args)
    chosen = list(presets().values()) if args.name is None else [_find(args.name)]
    if args.json:
        print(json.dumps([_object(preset) for preset in chosen], indent=2))
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    if args.name is not None:
        console.print(_facts(chosen[0]))
        return 0
    with_source = console.width >= _WIDTH_WITH_SOURCE
    console.print(_list(chosen, with_source))
    if not with_source:
        console.print("\nmeshwright models NAME shows where a preset's facts come from")
    return 0


def _find(name: str) -> Preset:
    """A preset, or the model of a run folder or of a Hugging Face folder."""
    folder = Path(name)
    if name.lower().replace("_", "-") in presets() or not folder.is_dir():
        return find_preset(name)
    settings = folder / "config.toml"
    if settings.exists():
        return Preset(name, model_spec(load_config(settings)), f"the run's {settings.name}")
    return Preset(name, read_spec(folder), "the folder's config.json")


def _show_flops(args: argparse.Namespace) -> int:
    """Print FLOPs by module: what plans reckon with, and what PyTorch counts on the meta device."""
    if args.name is None or args.flops < 1:
        raise UserError("--flops TOKENS takes the name of a preset or a run folder before it, and at least one token")
    if args.flops > _MOST_TOKENS:
        raise UserError(f"--flops {args.flops}: PyTorch cannot count so many tokens; give up to {_MOST_TOKENS:,}")
    spec = _find(args.name).spec
    planned = module_flops(spec, args.flops)
    counted: dict[str, tuple[int, int]] = {}
    unknown = None
    try:
        spec.check_buildable()
    except UserError as error:
        unknown = str(error)
    else:
        require_torch()
        from meshwright.verify.counted_flops import counted_flops

        counted = counted_flops(spec, args.flops)
    if args.json:
        rows = [{**asdict(one), "counted": counted.get(one.name)} for one in planned]
        print(json.dumps({"preset": args.name, "tokens": args.flops, "modules": rows}, indent=2))
        return 0
    console = Console(highlight=False, width=None if Console().is_terminal else _PLAIN_WIDTH)
    console.print(_flops_table(planned, counted))
    if unknown is not None:
        console.print(f"not counted: {unknown}", markup=False)
    return 0


def _flops_table(planned: Sequence[ModuleFlops], counted: Mapping[str, tuple[int, int]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("GFLOPs of a sequence", no_wrap=True)
    for heading in ("modules", "forward", "counted", "backward", "counted"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in planned:
        ahead, back = counted.get(one.name, (None, None))
        table.add_row(one.name, str(one.count), *map(_giga, (one.forward, ahead, one.backward, back)))
    sums = [sum(one.forward for one in planned), sum(one.backward for one in planned)]
    found = [sum(pair[index] for pair in counted.values()) if counted else None for index in (0, 1)]
    table.add_row("all", "", *map(_giga, (sums[0], found[0], sums[1], found[1])), style="bold")
    return table


def _giga(flops: float | None) -> str:
    return "-" if flops is None else f"{flops / 1e9:,.4g}" if flops < 1e13 else f"{flops / 1e9:,.0f}"


def human_count(count: int) -> str:
    """A count in the field's usual short form: 8.03B, 124M, 405K."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            scaled = count / size
            return f"{scaled:,.{2 if scaled < 10 else 1 if scaled < 100 else 0}f}{unit}"
    return str(count)


def _object(preset: Preset) -> dict[str, object]:
    count = count_parameters(preset.spec)
    return {
        "name": preset.name,
        "parameters": count.total,
        "active_parameters": count.active,
        "spec": preset.spec.model_dump(mode="json"),
        "source": preset.source,
    }


def _list(chosen: list[Preset], with_source: bool) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for heading in ("name", "parameters", "active", "layers", "width", "heads/KV", "vocabulary", "context"):
        table.add_column(heading, justify="left" if heading == "name" else "right", no_wrap=True)
    if with_source:
        table.add_column("source", overflow="fold")
    for preset in chosen:
        count, spec = count_parameters(preset.spec), preset.spec
        row = [preset.name, human_count(count.total), human_count(count.active)]
        row += [str(spec.num_hidden_layers), str(spec.hidden_size)]
        row += [f"{spec.num_attention_heads}/{spec.num_key_value_heads}"]
        row += [str(spec.vocab_size), str(spec.max_position_embeddings)]
        table.add_row(*row, *([preset.source] if with_source else []))
    return table


def _facts(preset: Preset) -> Table:
    count = count_parameters(preset.spec)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    table.add_row("name", preset.name)
    table.add_row("parameters", f"{count.total:,} ({human_count(count.total)})")
    table.add_row("active parameters", f"{count.active:,} ({human_count(count.active)})")
    for name, value in _flat(preset.spec.model_dump(mode="json")):
        table.add_row(name, value)
    table.add_row("source", preset.source)
    return table


def _flat(facts: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """Rows of a nested table, with dotted names; what is not set is left out."""
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            rows.append((prefix + name, " ".join(map(str, value)) or "none"))
        elif value is not None:
            rows.append((prefix + name, str(value).lower() if isinstance(value, bool) else str(value)))
    return rows
