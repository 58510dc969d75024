"""All-reduce algorithms: what a rank sends and receives so that all ranks have the sum in the end. No torch.

| name | rounds of n ranks | a rank sends, of S bytes | |
|---|---|---|---|
| ps (parameter server) | 2 | S; the server (n-1) S | one rank adds up everything and sends it back |
| ring | 2 (n-1) | 2 S (n-1)/n | everyone sends to the next only; the least that an all-reduce can send |
| tree | 2 log2 n | S, twice S at the root of two | few rounds, for small messages |
| halving-doubling | 2 log2 n | 2 S (n-1)/n | as little as a ring in as few rounds as a tree; far neighbours |
| hierarchical | inside, across, inside | across nodes 2 S (m-1)/m for m nodes, a share for each of a node's ranks | |

Any number of ranks, any length. `rank` is the place in the group, `nodes` the places that share a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.comm.rounds import Receive, Rounds, Send, Span, round_of

Nodes = Sequence[Sequence[int]]


def parameter_server(rank: int, ranks: int, length: int, nodes: Nodes = ()) -> Rounds:
    """The first rank adds up what all others send, and sends them the sum."""
    whole, others = Span(0, length), range(1, ranks)
    if rank == 0:
        gathered = round_of(receives=[Receive(other, whole, adds=True) for other in others])
        return gathered + round_of(sends=[Send(other, whole) for other in others])
    return round_of(sends=[Send(0, whole)]) + round_of(receives=[Receive(0, whole, adds=False)])


def ring(rank: int, ranks: int, length: int, nodes: Nodes = ()) -> Rounds:
    """Parts travel around: first they are added up on their way, then the sums go around."""
    return _ring(rank, list(range(ranks)), Span(0, length))


def tree(rank: int, ranks: int, length: int, nodes: Nodes = ()) -> Rounds:
    """Pairs, pairs of pairs and so on add up towards the first rank; the sum goes the same way back."""
    members = list(range(ranks))
    whole = Span(0, length)
    return _reduce_to_first(rank, members, whole) + _broadcast_from_first(rank, members, whole)


def halving_doubling(rank: int, ranks: int, length: int, nodes: Nodes = ()) -> Rounds:
    """Partners exchange halves, then halves of halves; sums come back the other way round.

    Of a number that is no power of two, the ranks that are too many give theirs to a neighbour and get the sum from it.
    """
    power = 1 << (ranks.bit_length() - 1)
    spare, whole = ranks - power, Span(0, length)
    # Of the first pairs one rank stands for both.
    if rank < 2 * spare and rank % 2 == 0:
        return round_of(sends=[Send(rank + 1, whole)]) + round_of(receives=[Receive(rank + 1, whole, adds=False)])
    folded = rank < 2 * spare
    before = round_of(receives=[Receive(rank - 1, whole, adds=True)]) if folded else []
    after = round_of(sends=[Send(rank - 1, whole)]) if folded else []
    own = rank // 2 if folded else rank - spare

    def place(other: int) -> int:
        return 2 * other + 1 if other < spare else other + spare

    halves: Rounds = []
    way: list[tuple[int, Span, Span]] = []
    held, apart = whole, power // 2
    while apart:
        partner = own ^ apart
        low, high = held.part(2, 0), held.part(2, 1)
        kept, given = (low, high) if own < partner else (high, low)
        halves += round_of([Send(place(partner), given)], [Receive(place(partner), kept, adds=True)])
        way.append((place(partner), kept, given))
        held, apart = kept, apart // 2
    doubles: Rounds = []
    for partner, kept, given in reversed(way):
        doubles += round_of([Send(partner, kept)], [Receive(partner, given, adds=False)])
    return before + halves + doubles + after


def hierarchical(rank: int, ranks: int, length: int, nodes: Nodes = ()) -> Rounds:
    """Inside of each node first, then across nodes, then inside again: little goes over the links between nodes.

    Where all nodes have as many ranks, each of them carries a part across; else the first of each node carries all.
    """
    groups = [list(node) for node in nodes] or [list(range(ranks))]
    mine = next(node for node in groups if rank in node)
    whole = Span(0, length)
    if len({len(node) for node in groups}) == 1:
        place = mine.index(rank)
        inside = _reduce_scatter(rank, mine, whole), _all_gather(rank, mine, whole)
        across = _ring(rank, [node[place] for node in groups], _owned(mine, place, whole))
        return inside[0] + across + inside[1]
    rounds = _reduce_to_first(rank, mine, whole)
    if rank == mine[0]:
        rounds = rounds + _ring(rank, [node[0] for node in groups], whole)
    return rounds + _broadcast_from_first(rank, mine, whole)


ALGORITHMS: dict[str, Callable[[int, int, int, Nodes], Rounds]] = {
    "ps": parameter_server,
    "ring": ring,
    "tree": tree,
    "halving-doubling": halving_doubling,
    "hierarchical": hierarchical,
}


def _ring(rank: int, members: list[int], span: Span) -> Rounds:
    return _reduce_scatter(rank, members, span) + _all_gather(rank, members, span)


def _owned(members: list[int], place: int, span: Span) -> Span:
    """The part whose sum a member of a ring has after the first way around."""
    return span.part(len(members), (place + 1) % len(members))


def _reduce_scatter(rank: int, members: list[int], span: Span) -> Rounds:
    """Every member sends the next one a part, with what it has got of it."""
    count, place = len(members), members.index(rank)
    after, before = members[(place + 1) % count], members[(place - 1) % count]
    rounds: Rounds = []
    for step in range(count - 1):
        given, taken = span.part(count, (place - step) % count), span.part(count, (place - step - 1) % count)
        rounds += round_of([Send(after, given)], [Receive(before, taken, adds=True)])
    return rounds


def _all_gather(rank: int, members: list[int], span: Span) -> Rounds:
    """Every member sends on what it has, beginning with the part that it owns."""
    count, place = len(members), members.index(rank)
    after, before = members[(place + 1) % count], members[(place - 1) % count]
    rounds: Rounds = []
    for step in range(count - 1):
        given, taken = span.part(count, (place + 1 - step) % count), span.part(count, (place - step) % count)
        rounds += round_of([Send(after, given)], [Receive(before, taken, adds=False)])
    return rounds


def _reduce_to_first(rank: int, members: list[int], span: Span) -> Rounds:
    place, apart = members.index(rank), 1
    rounds: Rounds = []
    while apart < len(members):
        if place & apart:
            return rounds + round_of([Send(members[place - apart], span)])
        if place + apart < len(members):
            rounds += round_of(receives=[Receive(members[place + apart], span, adds=True)])
        apart *= 2
    return rounds


def _broadcast_from_first(rank: int, members: list[int], span: Span) -> Rounds:
    """The way back of `_reduce_to_first`."""
    back: Rounds = []
    for one in reversed(_reduce_to_first(rank, members, span)):
        sends = [Send(taken.origin, taken.span) for taken in one.receives]
        back += round_of(sends, [Receive(given.to, given.span, adds=False) for given in one.sends])
    return back
