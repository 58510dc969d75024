"""Which tokens of a sequence each context-parallel rank holds; no torch.

Ranks form rings of `ring`, each place of which is shared by `heads` neighbouring ranks. A sequence is cut into
2 x ring chunks, and place r of the ring has chunks r and 2 x ring - 1 - r: one early and one late, so that under a
causal mask all places have the same work. Those tokens, in order, are cut once more, over the ranks of the place.

    ring         heads = 1: the chunks are a rank's own
    ulysses      ring = 1: a rank has one run of tokens
    ulysses:N    heads = N
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cuts import part, part_length


@dataclass(frozen=True)
class ContextLayout:
    """How sequences are split over ring x heads ranks; everything follows from a sequence's length."""

    ring: int
    heads: int

    @classmethod
    def of(cls, cp: int, method: str) -> ContextLayout:
        """The layout of a degree and a method: ring, ulysses or ulysses:N, where N divides the degree."""
        kind, _, number = method.partition(":")
        heads = 1 if kind == "ring" else int(number or cp)
        assert cp % heads == 0, (cp, method)
        return cls(cp // heads, heads)

    def chunks(self, length: int, place: int) -> tuple[slice, slice]:
        """The two runs of positions of a place in the ring."""
        count = 2 * self.ring
        return part(length, count, place), part(length, count, count - 1 - place)

    def place_positions(self, length: int, place: int) -> list[int]:
        """The positions of a place in the ring, ascending."""
        return [position for chunk in self.chunks(length, place) for position in range(chunk.start, chunk.stop)]

    def positions(self, length: int, rank: int) -> list[int]:
        """The positions of a rank, ascending."""
        place, member = divmod(rank, self.heads)
        held = self.place_positions(length, place)
        return held[part(len(held), self.heads, member)]

    def part_lengths(self, length: int) -> list[int]:
        """How many tokens each rank has."""
        lengths = []
        for place in range(self.ring):
            held = sum(chunk.stop - chunk.start for chunk in self.chunks(length, place))
            lengths += [part_length(held, self.heads, member) for member in range(self.heads)]
        return lengths

    def fits(self, length: int, multiple: int = 1) -> bool:
        """Whether every rank has tokens, in number a multiple of that."""
        return all(held and held % multiple == 0 for held in self.part_lengths(length))

    def nearest_lengths(self, length: int, multiple: int = 1) -> list[int]:
        """The nearest lengths that fit, below (where there is one) and above."""
        below = next((n for n in range(length, 0, -1) if self.fits(n, multiple)), None)
        above = next(
            n for n in range(length, length + 2 * self.ring * self.heads * multiple + 1) if self.fits(n, multiple)
        )
        return [n for n in (below, above) if n is not None]
