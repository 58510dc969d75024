"""List the model presets with their parameter counts, or show one in full.

examples:
  meshwright models
  meshwright models llama3.1-8b
  meshwright models --json
"""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table

from meshwright.models.count import count_parameters
from meshwright.models.presets import Preset, find_preset, presets

_PLAIN_WIDTH = 200
"""Columns of the output where it is not a terminal: wide enough that no cell is cut."""
_WIDTH_WITH_SOURCE = 120
"""Narrower terminals show the list without the column of sources."""


def describe(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `meshwright models`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this preset in full")
    parser.add_argument("--json", action="store_true", help="print a list of objects with exact counts")


def run(args: argparse.Namespace) -> int:
    """Print the presets as a table, one preset in full, or either as JSON."""
    chosen = list(presets().values()) if args.name is None else [find_preset(args.name)]
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
