"""Who arrived at which collective, from what ranks tell."""

from __future__ import annotations

import json
from pathlib import Path

from meshwright.elastic.arrivals import Call, Standing, Word, find_mismatch, find_waits, name_of, read_word

ALL = ("0", (0, 1, 2, 3))
PAIR = ("7", (0, 1))


def calls(first: int, *operations: str, open_last: bool = False, size: int = 4) -> dict[int, Call]:
    found = {}
    for number, operation in enumerate(operations, start=first):
        last = number == first + len(operations) - 1
        done = not (open_last and last)
        found[number] = Call(number, operation, ((size,),), ((size,),), ("Float",), done)
    return found


def standing(calls: dict[int, Call]) -> Standing:
    done = [number for number, call in calls.items() if call.done]
    return Standing(max(calls), max(done, default=0), calls)


def word(answered: bool = True, **groups: Standing) -> Word:
    keys = {"all": ALL, "pair": PAIR}
    return Word(0.0, answered, {keys[name]: standing for name, standing in groups.items()})


def waiting(first: int, *operations: str) -> Standing:
    return standing(calls(first, *operations, open_last=True))


def test_rank_that_did_not_arrive_is_the_one_that_called_fewer() -> None:
    words = {rank: word(all=waiting(41, "all_gather", "all_reduce")) for rank in (0, 2, 3)}
    words[1] = word(all=standing(calls(41, "all_gather")))
    waits = find_waits(words)
    assert {wait.rank for wait in waits} == {0, 2, 3}
    assert {(wait.operation, wait.number, wait.missing, wait.unknown) for wait in waits} == {
        ("all_reduce", 42, (1,), ())
    }
    assert find_mismatch(words) is None


def test_rank_of_which_nothing_is_known_is_unknown_and_not_missing() -> None:
    words = {rank: word(all=waiting(5, "all_reduce")) for rank in (0, 1)}
    (first, _) = find_waits(words)
    assert (first.missing, first.unknown) == ((), (2, 3))


def test_what_a_silent_rank_told_earlier_is_corrected_by_what_others_have_seen() -> None:
    """It told of call 10; others have finished 12 with it, so it is missing at 13 and not before."""
    words = {rank: word(all=waiting(11, "all_reduce", "all_reduce", "all_reduce")) for rank in (0, 2, 3)}
    words[1] = word(answered=False, all=Standing(10, 9))
    waits = find_waits(words)
    # It is not in call 10 any more, which it was in when it told.
    assert {wait.rank for wait in waits} == {0, 2, 3}
    assert {wait.missing for wait in waits} == {(1,)}
    assert {wait.number for wait in waits} == {13}


def test_silent_rank_is_not_missing_where_others_have_finished_with_it() -> None:
    words = {0: word(all=waiting(12, "all_reduce")), 2: word(all=standing(calls(12, "all_reduce")))}
    words[1] = word(answered=False, all=Standing(10, 10))
    (wait,) = find_waits(words)
    assert (wait.rank, wait.number, wait.missing) == (0, 12, ())


def test_rank_that_never_used_a_group_is_missing_in_it() -> None:
    words = {0: word(pair=waiting(1, "all_reduce")), 1: word(all=waiting(9, "all_reduce"))}
    by_rank = {wait.rank: wait for wait in find_waits(words)}
    assert by_rank[0].missing == (1,)
    assert by_rank[1].missing == (0,)


def test_odd_rank_is_named_where_operations_differ() -> None:
    words = {rank: word(all=waiting(41, "all_gather", "all_reduce")) for rank in (0, 2, 3)}
    words[1] = word(all=waiting(41, "all_gather", "broadcast"))
    mismatch = find_mismatch(words)
    assert mismatch is not None
    assert (mismatch.number, mismatch.odd) == (42, (1,))
    assert str(mismatch.calls[1]) == "broadcast of [4] float"


def test_two_ranks_that_differ_are_both_named() -> None:
    words = {0: word(pair=waiting(3, "all_reduce")), 1: word(pair=waiting(3, "all_gather"))}
    mismatch = find_mismatch(words)
    assert mismatch is not None
    assert mismatch.odd == (0, 1)


def test_sizes_that_differ_are_a_mismatch_where_they_must_agree() -> None:
    def of(operation: str) -> object:
        first = standing(calls(1, operation, open_last=True, size=4))
        second = standing(calls(1, operation, open_last=True, size=6))
        return find_mismatch({0: word(pair=first), 1: word(pair=second)})

    assert of("all_reduce") is not None
    assert of("all_to_all") is None


def test_numbers_with_gaps_are_not_compared() -> None:
    """Over gloo, messages between two ranks take numbers too: then a rank waits for those who are in no collective."""
    gap = {**calls(1, "all_reduce"), **calls(5, "all_reduce", open_last=True)}
    even = calls(1, "all_reduce", "all_reduce", open_last=True)
    words = {0: word(all=standing(gap)), 1: word(all=standing(even)), 2: word(all=standing(calls(1, "all_reduce")))}
    assert find_mismatch(words) is None
    assert {wait.rank: wait.missing for wait in find_waits(words)} == {0: (2,), 1: (2,)}


def test_only_the_answer_of_the_right_process_to_the_right_question_counts(tmp_path: Path) -> None:
    said = {"pid": 5, "time": 1.0, "answers": 2, "groups": []}
    (tmp_path / "0.records").write_text(json.dumps(said | {"records": []}))
    (tmp_path / "0.collectives").write_text(json.dumps(said))
    answer = read_word(tmp_path, 0, 5, 2)
    assert answer is not None
    assert answer.answered
    older = read_word(tmp_path, 0, 5, 3)
    assert older is not None
    assert not older.answered
    assert read_word(tmp_path, 0, 6, 2) is None, "from a rank of an earlier generation"
    assert read_word(tmp_path, 1, 5, 2) is None


def test_groups_have_names_for_people() -> None:
    words = {0: Word(0.0, True, {}, {ALL: "default_pg", PAIR: "mesh_tp"})}
    assert name_of(ALL, words) == "the group of all ranks (ranks 0 1 2 3)"
    assert name_of(PAIR, words) == "the group 'tp' (ranks 0 1)"
    assert name_of(("x", (0, 2)), words) == "a group of ranks 0 2"
