"""Print every setting of a configuration: its value, where it came from, what it does."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.config_load import ResolvedConfig
from meshwright.secrets import public


def print_settings(resolved: ResolvedConfig) -> None:
    """A table a section."""
    console = Console(highlight=False)
    for section in type(resolved.config).model_fields:
        table = Table(title=Text(f"[{section}]", "bold"), title_justify="left", expand=True, box=None)
        table.add_column("setting", no_wrap=True)
        table.add_column("value", overflow="fold")
        table.add_column("from", overflow="fold")
        table.add_column("meaning", ratio=1)
        values = getattr(resolved.config, section)
        for name, entry in type(values).model_fields.items():
            origin = resolved.origin(f"{section}.{name}")
            style = "dim" if origin == "default" else ""
            # A table may break a value over lines, where nobody would know a secret again.
            shown = _shown(public(getattr(values, name)))
            cells = (f"{section}.{name}", shown, origin, entry.description or "")
            table.add_row(*map(Text, cells), style=style)
        console.print(table)
        console.print()


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
