"""Write the tables of docs/interop.md from the rules that read files; a test holds the page to them.

python docs/make_interop.py
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from meshwright.interop.deepspeed_rules import RULES as DEEPSPEED
from meshwright.interop.megatron_rules import RULES as MEGATRON
from meshwright.interop.rules import Rule
from meshwright.known_names import DEGREES, INSTEAD, RECOMPUTE, SETTINGS, ULYSSES, VALUES

PAGE = Path(__file__).parent / "interop.md"


def table(head: str, rows: Iterable[tuple[str, str]]) -> str:
    """Two columns."""
    lines = "".join(f"| `{name}` | {text.replace('|', chr(92) + '|')} |\n" for name, text in rows)
    return f"| {head} | here |\n|---|---|\n{lines}"


def rules(head: str, found: Iterable[Rule]) -> str:
    """A table of keys."""
    return table(head, ((rule.key, rule.ours) for rule in found))


def names() -> str:
    """All names of others that are known by themselves."""
    rows = [(", ".join(others), f"`{ours}` in `parallel.strategy`") for ours, others in DEGREES.items()]
    rows += [(ULYSSES, "`cp` with `cp_method=ulysses`"), (RECOMPUTE, "`recompute=full` in `parallel.strategy`")]
    rows += [(name, f"`{setting}`") for name, setting in SETTINGS.items()]
    rows += [
        (name, f"`{setting}`: {', '.join(dict.fromkeys(words.values()))}") for name, (setting, words) in VALUES.items()
    ]
    rows += [(name, f"refused: {text}") for name, text in INSTEAD.items()]
    return table("name", rows)


def page(text: str) -> str:
    """The page with its tables made anew."""
    made = {"names": names(), "deepspeed": rules("key", DEEPSPEED), "megatron": rules("flag", MEGATRON)}
    for name, content in made.items():
        begin, end = f"<!-- made: {name} -->\n", "<!-- end -->"
        before, _, rest = text.partition(begin)
        text = before + begin + content + rest[rest.index(end) :]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
