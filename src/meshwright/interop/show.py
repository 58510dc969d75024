"""A translation on the terminal: each key of the other trainer, its value, our setting, and why."""

from __future__ import annotations

import re

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.config_load import ResolvedConfig
from meshwright.interop.translation import Translation
from meshwright.secrets import public

_PLAIN_WIDTH = 160


def print_translation(translation: Translation, resolved: ResolvedConfig) -> None:
    """A table: what was mapped first, then what does not apply."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH)
    table = Table(title=Text(f"{translation.file} in our settings", "bold"), title_justify="left", box=None)
    for name in (translation.dialect, "value", "ours", "note"):
        table.add_column(name, overflow="fold")
    order = sorted(translation.entries, key=lambda entry: entry.verdict != "mapped")
    for entry in order:
        mapped = entry.verdict == "mapped"
        ours = entry.ours if mapped else "not applicable"
        note = entry.note
        setting = re.split("[:=]", ours, maxsplit=1)[0]
        origin = resolved.origin(setting) if mapped else ""
        if mapped and not origin.startswith(translation.dialect):
            note = f"{origin} says otherwise, and counts" + (f"; {note}" if note else "")
        cells = (entry.key, str(public(entry.given)), str(public(ours)), note)
        table.add_row(*map(Text, cells), style="" if mapped else "dim")
    console.print(table)
