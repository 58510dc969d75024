"""Draw docs/pictures/*.svg: all-reduce algorithms, from the rounds that ranks really run; a test holds them to this.

    python docs/make_pictures.py

Rows are ranks, columns rounds, arrows messages: from who sends it, at the left of its round, to who receives it.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NamedTuple

from meshwright.comm.algorithms import ALGORITHMS, Nodes
from meshwright.comm.rounds import Rounds, Span

RANKS, LENGTH = 4, 4
"""Ranks of a picture, and the parts that their numbers are in."""
PAIRS: Nodes = [[0, 1], [2, 3]]
ADDED, COPIED, INK, FAINT, CELL = "#c2410c", "#0369a1", "#334155", "#cbd5e1", "#f1f5f9"
LEFT, TOP, COLUMN, ROW, LEAST = 84, 62, 104, 52, 560
TITLES = {
    "ps": "parameter server: all send to rank 0, which sends the sum back",
    "ring": "ring: parts go around twice, first added up, then copied",
    "tree": "tree: pairs, then pairs of pairs add up; the sum comes the same way back",
    "halving-doubling": "halving-doubling: halves, then quarters; and back",
    "hierarchical": "hierarchical: inside of each node, across nodes, inside again",
}


class Message(NamedTuple):
    """Of one rank to another, in a round of all."""

    number: int
    origin: int
    to: int
    span: Span
    adds: bool


def messages(algorithm: str, nodes: Nodes = ()) -> list[Message]:
    """All messages, with the earliest round in which each can be sent; played as ranks play them."""
    plans: list[Rounds] = [ALGORITHMS[algorithm](rank, RANKS, LENGTH, nodes) for rank in range(RANKS)]
    at, begun = [0] * RANKS, [False] * RANKS
    now = [0] * RANKS
    mail: dict[tuple[int, int], deque[tuple[int, Span]]] = {}
    found: list[Message] = []
    while any(at[rank] < len(plans[rank]) for rank in range(RANKS)):
        moved = False
        for rank in range(RANKS):
            if at[rank] == len(plans[rank]):
                continue
            one = plans[rank][at[rank]]
            if not begun[rank]:
                for given in one.sends:
                    mail.setdefault((rank, given.to), deque()).append((now[rank], given.span))
                begun[rank] = moved = True
            if all(mail.get((taken.origin, rank)) for taken in one.receives):
                last = now[rank]
                for taken in one.receives:
                    sent, span = mail[taken.origin, rank].popleft()
                    found.append(Message(sent, taken.origin, rank, span, taken.adds))
                    last = max(last, sent)
                now[rank], at[rank], begun[rank], moved = last + 1, at[rank] + 1, False, True
        assert moved, f"{algorithm} waits for itself"
    return sorted(found)


def picture(algorithm: str) -> str:
    """An algorithm as SVG."""
    nodes = PAIRS if algorithm == "hierarchical" else ()
    sent = messages(algorithm, nodes)
    rounds = max(message.number for message in sent) + 1
    width, height = max(LEFT + rounds * COLUMN + 40, LEAST), TOP + RANKS * ROW + 58
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}" role="img">',
        f"<title>{TITLES[algorithm]}</title>",
        "<defs>"
        + "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" orient="auto" '
            f'markerWidth="11" markerHeight="11" markerUnits="userSpaceOnUse">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
            for name, colour in (("added", ADDED), ("copied", COPIED))
        )
        + "</defs>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-weight="600">{TITLES[algorithm]}</text>',
    ]
    for number in range(rounds):
        middle = LEFT + number * COLUMN + COLUMN / 2
        parts.append(f'<text x="{middle:g}" y="{TOP - 14}" text-anchor="middle">round {number + 1}</text>')
        if number % 2 == 0:
            where = f'x="{LEFT + number * COLUMN}" y="{TOP - 6}" width="{COLUMN}" height="{RANKS * ROW}"'
            parts.append(f'<rect {where} fill="{CELL}"/>')
    for node in nodes:
        top = TOP + min(node) * ROW - 3
        parts.append(
            f'<rect x="6" y="{top}" width="{width - 12}" height="{len(node) * ROW - 6}" rx="6" fill="none" '
            f'stroke="{INK}" stroke-dasharray="4 4"/>'
        )
    for rank in range(RANKS):
        parts.append(f'<text x="20" y="{_height(rank) + 4}">rank {rank}</text>')
        parts.append(
            f'<line x1="{LEFT - 12}" y1="{_height(rank)}" x2="{LEFT + rounds * COLUMN + 12}" y2="{_height(rank)}" '
            f'stroke="{FAINT}"/>'
        )
    for message in sent:
        parts += _arrow(message)
    below = TOP + RANKS * ROW + 28
    for place, (name, colour, words) in enumerate(
        (("added", ADDED, "added where it arrives"), ("copied", COPIED, "copied where it arrives"))
    ):
        start = 20 + 210 * place
        parts.append(_line(start, below, start + 34, below, colour, name, 1.8))
        parts.append(f'<text x="{start + 44}" y="{below + 4}">{words}</text>')
    parts.append(
        f'<text x="20" y="{below + 22}" font-size="11">letters: the quarters of the numbers that travel</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _height(rank: int) -> int:
    return TOP + rank * ROW + ROW // 2 - 6


def _arrow(message: Message) -> list[str]:
    """A message, with the parts that it carries where it begins."""
    start, end = LEFT + message.number * COLUMN + 16, LEFT + (message.number + 1) * COLUMN - 12
    colour, name = (ADDED, "added") if message.adds else (COPIED, "copied")
    first, last = _height(message.origin), _height(message.to)
    carried = "ABCD"[message.span.start : message.span.stop]
    thick, y = 1.0 + 0.5 * message.span.length, first + (16 if last < first else -7)
    return [
        f'<circle cx="{start}" cy="{first}" r="2.6" fill="{colour}"/>',
        _line(start, first, end, last, colour, name, thick),
        f'<text x="{start - 4}" y="{y}" font-size="12" fill="{colour}">{carried}</text>',
    ]


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, marker: str, width: float) -> str:
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" stroke-width="{width:g}" '
        f'marker-end="url(#{marker})"/>'
    )


def pictures() -> dict[str, str]:
    """All of them, by the name of their file."""
    return {f"all-reduce-{name}.svg": picture(name) for name in ALGORITHMS}


if __name__ == "__main__":
    folder = Path(__file__).parent / "pictures"
    folder.mkdir(exist_ok=True)
    for file, text in pictures().items():
        (folder / file).write_text(text)
