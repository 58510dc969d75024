"""All-reduce algorithms, played by hand: every rank ends with the sum, nobody waits for ever, and no more is sent than
is said."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.comm.algorithms import ALGORITHMS, Nodes
from meshwright.comm.rounds import Rounds

NAMES = list(ALGORITHMS)


def plans(name: str, ranks: int, length: int, nodes: Nodes = ()) -> list[Rounds]:
    return [ALGORITHMS[name](rank, ranks, length, nodes) for rank in range(ranks)]


def play(rounds: list[Rounds], length: int) -> tuple[list[list[int]], list[int]]:
    """What the ranks have in the end, from powers of two that tell who is in a sum how often; and elements sent."""
    ranks = len(rounds)
    values = [[1 << (8 * rank)] * length for rank in range(ranks)]
    at, sent = [0] * ranks, [0] * ranks
    begun = [False] * ranks
    mail: dict[tuple[int, int], deque[list[int]]] = {}
    while any(at[rank] < len(rounds[rank]) for rank in range(ranks)):
        moved = False
        for rank in range(ranks):
            if at[rank] == len(rounds[rank]):
                continue
            one = rounds[rank][at[rank]]
            if not begun[rank]:
                for message in one.sends:
                    assert message.to != rank
                    mail.setdefault((rank, message.to), deque()).append(
                        values[rank][message.span.start : message.span.stop]
                    )
                    sent[rank] += message.span.length
                begun[rank] = moved = True
            counts = [len(mail.get((taken.origin, rank), ())) for taken in one.receives]
            if all(counts):
                for taken in one.receives:
                    came = mail[taken.origin, rank].popleft()
                    assert len(came) == taken.span.length > 0
                    for index, value in enumerate(came, taken.span.start):
                        values[rank][index] = values[rank][index] + value if taken.adds else value
                at[rank] += 1
                begun[rank] = False
                moved = True
        assert moved, "everybody waits"
    assert not any(mail.values()), "what was sent has been taken"
    return values, sent


def total(ranks: int) -> int:
    return sum(1 << (8 * rank) for rank in range(ranks))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 16, 41])
def test_every_rank_has_every_other_once(name: str, ranks: int, length: int) -> None:
    values, _ = play(plans(name, ranks, length), length)
    assert values == [[total(ranks)] * length] * ranks


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 40), st.randoms())
def test_nodes_of_any_sizes_in_any_order(sizes: list[int], length: int, draw: object) -> None:
    ranks = sum(sizes)
    places = list(range(ranks))
    draw.shuffle(places)  # type: ignore[attr-defined]
    ends = [0, *(sum(sizes[: index + 1]) for index in range(len(sizes)))]
    nodes = [places[begin:end] for begin, end in pairwise(ends)]
    values, _ = play(plans("hierarchical", ranks, length, nodes), length)
    assert values == [[total(ranks)] * length] * ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_ranks_send_is_what_the_table_says(ranks: int) -> None:
    length = 64
    least = 2 * length * (ranks - 1) // ranks
    assert play(plans("ring", ranks, length), length)[1] == [least] * ranks
    assert play(plans("halving-doubling", ranks, length), length)[1] == [least] * ranks
    assert play(plans("ps", ranks, length), length)[1] == [(ranks - 1) * length] + [length] * (ranks - 1)
    rounds = {name: max(map(len, plans(name, ranks, length))) for name in NAMES}
    power = ranks.bit_length() - 1
    assert rounds["ring"] == 2 * (ranks - 1)
    assert rounds["tree"] == rounds["halving-doubling"] == 2 * power
    assert rounds["ps"] == 2


def test_little_goes_between_nodes() -> None:
    length, nodes = 64, [[0, 1, 2, 3], [4, 5, 6, 7]]
    of = {rank: node for node, those in enumerate(nodes) for rank in those}

    def across(name: str) -> int:
        """Elements that leave the first node."""
        found = plans(name, 8, length, nodes)
        return sum(
            message.span.length
            for rank in nodes[0]
            for one in found[rank]
            for message in one.sends
            if of[message.to] != 0
        )

    assert across("hierarchical") == length, "2 S (m - 1) / m of two nodes"
    assert across("ring") == 2 * length * 7 // 8
    assert across("halving-doubling") > across("hierarchical")
