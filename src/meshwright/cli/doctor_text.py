"""How `meshwright doctor` writes: headings, names with text beside them, findings. It fits 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshwright.comm.nccl_profile import Finding, Level
from meshwright.printable import printable

_STYLES = {Level.BREAKS: "bold red", Level.WARNING: "yellow", Level.NOTE: "dim"}


def console() -> Console:
    """Plain where it is no terminal; not wider than one can read."""
    # Names of machines may look like marks of Rich.
    out = Console(highlight=False, markup=False, emoji=False)
    out.width = min(out.width, 100)
    return out


def heading(out: Console, text: str) -> None:
    """A line that opens a part."""
    out.print()
    out.print(Text(text, "bold"))


def indented(what: RenderableType, columns: int = 2) -> Padding:
    """That far to the right, without blanks at the end of lines."""
    return Padding(what, (0, 0, 0, columns), expand=False)


def beside(out: Console, rows: Iterable[tuple[str, str]], indent: int = 2) -> None:
    """Names with text beside them, which wraps there."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(printable(name)), Text(printable(text)))
    out.print(indented(table, indent))


def below(out: Console, name: str, text: str, style: str = "bold") -> None:
    """A name that may be long, with text below it."""
    out.print(indented(Text(printable(name), style, overflow="fold"), 2))
    if text:
        out.print(indented(Text(printable(text)), 6))


def show_findings(out: Console, findings: Sequence[Finding]) -> None:
    """Each with what it costs and what helps."""
    for finding in findings:
        line = Text("  ")
        line.append(f"{finding.level}: ", _STYLES[finding.level])
        line.append(printable(finding.about), "bold")
        out.print(line)
        for label, text in (("", finding.text), ("cost: ", finding.cost), ("do: ", finding.remedy)):
            if text:
                out.print(indented(Text(label, "dim").append(printable(text), ""), 6))
