"""All-reduce algorithms as data: what each rank sends and receives, round by round. No torch.

    ring of 4      round 1   0 -> 1 -> 2 -> 3 -> 0    each a quarter, added where it arrives
                   ...       3 such rounds: every rank has the sum of one quarter
                   ...       3 more, copied where they arrive: every rank has all sums

A rank begins all messages of a round at once, from the numbers as they are before it, waits for them, and then adds or
copies what has come. Who receives a message counts on its sender's round coming, whatever its number: rounds of
different ranks need not be the same. Messages of nothing are left out on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Elements from one place to before another."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many."""
        return self.stop - self.start

    def part(self, parts: int, index: int) -> Span:
        """One of several parts as equal as can be, the longer ones first."""
        each, more = divmod(self.length, parts)
        start = self.start + index * each + min(index, more)
        return Span(start, start + each + (index < more))


class Send(NamedTuple):
    """A message to another rank."""

    to: int
    span: Span


class Receive(NamedTuple):
    """A message from another rank."""

    origin: int
    span: Span
    adds: bool
    """Whether it is added to what there is, or takes its place."""


class Round(NamedTuple):
    """Messages that are under way together."""

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()


Rounds = list[Round]


def round_of(sends: Sequence[Send] = (), receives: Sequence[Receive] = ()) -> Rounds:
    """A round of the messages that carry something; none where there are none."""
    given = tuple(one for one in sends if one.span.length)
    taken = tuple(one for one in receives if one.span.length)
    return [Round(given, taken)] if given or taken else []
