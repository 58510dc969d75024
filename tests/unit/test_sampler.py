"""The sampler: a pure function of seed and position that visits everything once an epoch and never what is held out."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.prepare import prepare
from meshwright.data.sampler import PERIOD, Order, Sampler, slot_shares
from meshwright.data.shards import Corpus
from meshwright.errors import DataError

SEEDS = st.integers(0, 2**63)


def make_corpus(folder: Path, size: int, first: int = 0) -> Corpus:
    """A corpus of `size` tokens in shards of a few hundred, in which neighbours differ."""
    folder.mkdir(parents=True)
    text = "".join(chr(33 + (first + number * number // 7) % 90) for number in range(size))
    (folder / "text.txt").write_text("\n".join(text[start : start + 99] for start in range(0, size, 99)))
    return prepare([folder / "text.txt"], folder / "packed", documents="line", shard_tokens=300).corpus


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Corpus]:
    folder = tmp_path_factory.mktemp("corpora")
    return [make_corpus(folder / "a", 3000), make_corpus(folder / "b", 1700, 5), make_corpus(folder / "c", 800, 9)]


@given(count=st.integers(1, 3000), held=st.integers(0, 50), seed=SEEDS)
def test_an_epoch_visits_every_training_sequence_exactly_once(count: int, held: int, seed: int) -> None:
    held = min(held, count - 1)
    order = Order([count], [PERIOD], seed, [held])
    found = order.locate(np.arange(2 * (count - held)))
    assert found.epoch.tolist() == [0] * (count - held) + [1] * (count - held)
    first, second = np.split(found.sequence, 2)
    assert len(np.unique(first)) == len(first)
    assert np.array_equal(np.sort(first), np.sort(second))
    if count - held > 20:
        assert not np.array_equal(first, second), "each epoch must be another shuffle"
    if held:
        kept = order.locate_held_out(np.arange(held)).sequence
        assert len(np.unique(kept)) == held
        assert not set(kept.tolist()) & set(first.tolist())
        assert np.array_equal(np.sort(np.concatenate([first, kept])), np.arange(count))


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(1, 400), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    seed=SEEDS,
)
def test_a_mixture_visits_each_corpus_in_whole_epochs(counts: list[int], weights: list[float], seed: int) -> None:
    order = Order(counts, slot_shares(weights[: len(counts)]), seed)
    found = order.locate(np.arange(3 * PERIOD))
    for number, count in enumerate(counts):
        sequence, epoch = found.sequence[found.corpus == number], found.epoch[found.corpus == number]
        assert np.array_equal(epoch, np.arange(len(sequence)) // count)
        for start in range(0, len(sequence) - count + 1, count):
            assert np.array_equal(np.sort(sequence[start : start + count]), np.arange(count))


@settings(max_examples=30)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=5), seed=SEEDS, block=st.integers(0, 10**9))
def test_every_block_holds_the_exact_shares(weights: list[float], seed: int, block: int) -> None:
    shares = slot_shares(weights)
    assert sum(shares) == PERIOD
    assert all(abs(share - weight / sum(weights) * PERIOD) < 1 for share, weight in zip(shares, weights, strict=True))
    order = Order([1000] * len(weights), [*shares], seed)
    found = order.locate(np.arange(block * PERIOD, (block + 1) * PERIOD))
    assert np.bincount(found.corpus, minlength=len(weights)).tolist() == shares


def test_corpora_are_mixed_within_a_block_and_differently_in_each() -> None:
    order = Order([10**6, 10**6], slot_shares([3, 1]), 0)
    owners = order.locate(np.arange(50 * PERIOD)).corpus.reshape(50, PERIOD)
    assert all(150 < np.bincount(part)[1] < 370 for part in owners[:, :1024])
    assert len({part.tobytes() for part in owners}) == 50


@given(position=st.integers(0, 10**6), count=st.integers(1, 64), parts=st.integers(1, 8), seed=st.integers(0, 5))
@settings(max_examples=40)
def test_samples_do_not_depend_on_how_a_batch_is_split_or_where_a_run_resumes(
    corpora: list[Corpus], position: int, count: int, parts: int, seed: int
) -> None:
    mixture = list(zip(corpora, (3.0, 1.0, 0.5), strict=True))
    whole = Sampler(mixture, seed, 16, 0.1).rows(position, count)
    cuts = np.linspace(0, count, parts + 1).astype(int)
    fresh = [
        Sampler(mixture, seed, 16, 0.1).rows(position + int(start), int(stop - start)) for start, stop in pairwise(cuts)
    ]
    assert np.array_equal(np.concatenate(fresh), whole)


def test_rows_are_the_tokens_of_the_sample_with_the_target_after_each(corpora: list[Corpus]) -> None:
    sampler = Sampler([(corpora[0], 2.0), (corpora[1], 1.0)], 7, 25)
    rows = sampler.rows(100, 50)
    assert rows.shape == (50, 26)
    assert rows.dtype == np.int64
    for number, row in enumerate(rows):
        sample = sampler.sample(100 + number)
        expected = [corpora[0], corpora[1]][sample.corpus].read(sample.sequence * 25, 26)
        assert row.tolist() == expected.tolist()


def test_one_epoch_of_rows_is_the_whole_corpus(corpora: list[Corpus]) -> None:
    sampler = Sampler([(corpora[0], 1.0)], 3, 40)
    count = corpora[0].sequences(40)
    inputs = sorted(tuple(row[:-1]) for row in sampler.rows(0, count))
    assert inputs == sorted(tuple(corpora[0].read(number * 40, 40)) for number in range(count))


def test_the_seed_changes_the_order(corpora: list[Corpus]) -> None:
    one, other = (Sampler([(corpora[0], 1.0)], seed, 16).locate(0, 100).sequence for seed in (1, 2))
    assert (one == other).sum() < 20


def test_the_samples_are_those_of_earlier_versions() -> None:
    # A run that was begun with one version must see the same samples when it goes on with another.
    found = Order([1000, 500], slot_shares([3, 1]), 42, [10, 5]).locate(np.arange(5000, 5006))
    assert found.corpus.tolist() == [0, 0, 1, 1, 0, 1]
    assert found.epoch.tolist() == [3, 3, 2, 2, 3, 2]
    assert found.sequence.tolist() == [136, 332, 368, 272, 139, 52]


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.99])
def test_what_is_held_out_is_the_same_for_every_seed_and_never_trained_on(
    corpora: list[Corpus], fraction: float
) -> None:
    mixture = [(corpora[0], 1.0), (corpora[2], 1.0)]
    one, other = (Sampler(mixture, seed, 16, fraction) for seed in (1, 2))
    count = one.validation_sequences
    totals = [corpus.sequences(16) for corpus, _ in mixture]
    assert count == sum(min(max(round(total * fraction), 1), total - 1) for total in totals)
    assert np.array_equal(one.validation_rows(0, count), other.validation_rows(0, count))
    held = one._order.locate_held_out(np.arange(count))
    kept = set(zip(held.corpus.tolist(), held.sequence.tolist(), strict=True))
    assert len(kept) == count
    for sampler in (one, other):
        found = sampler.locate(0, 2 * PERIOD)
        trained = set(zip(found.corpus.tolist(), found.sequence.tolist(), strict=True))
        assert not kept & trained
        assert len(kept | trained) == sum(totals)


def test_what_is_held_out_is_scattered_and_mixed() -> None:
    order = Order([10_000, 10_000], slot_shares([1, 1]), 0, [1000, 1000])
    first = order.locate_held_out(np.arange(200))
    assert 60 < first.corpus.sum() < 140
    assert all(count > 5 for count in np.bincount(first.sequence // 1000, minlength=10))


def test_held_out_rows_beyond_the_last_are_refused(corpora: list[Corpus]) -> None:
    sampler = Sampler([(corpora[0], 1.0)], 0, 16, 0.1)
    last = sampler.validation_sequences
    assert last == round(corpora[0].sequences(16) * 0.1)
    with pytest.raises(ValueError, match=f"there are {last}"):
        sampler.validation_rows(last - 3, 4)
    assert sampler.validation_rows(last - 3, 3).shape == (3, 17)
    assert sampler.validation_rows(last, 0).shape == (0, 17)
    assert Sampler([(corpora[0], 1.0)], 0, 16).validation_sequences == 0
    with pytest.raises(ValueError, match="position -1"):
        sampler.rows(-1, 1)


def test_ten_thousand_million_sequences_need_no_memory_and_no_more_time() -> None:
    tracemalloc.start()
    order = Order([10**10], [PERIOD], 0, [10**7])
    found = order.locate(np.array([0, 10**10, 10**15], dtype=np.int64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.epoch.tolist() == [0, 1, 100_100]
    assert peak < 2_000_000


def refused(arguments: Sequence[object], **options: object) -> str:
    with pytest.raises(DataError) as error:
        Sampler(*arguments, **options)  # type: ignore[arg-type]
    return str(error.value)


def test_a_corpus_shorter_than_a_sequence_is_refused_with_both_numbers(corpora: list[Corpus]) -> None:
    tokens = corpora[2].tokens
    assert f"has {tokens:,} tokens; sequences of 1,000 need at least 1,001" in refused([[(corpora[2], 1.0)], 0, 1000])
    Sampler([(corpora[2], 1.0)], 0, tokens - 1)
    message = refused([[(corpora[2], 1.0)], 0, tokens - 1, 0.1])
    assert "(one to train on, one to hold out)" in message


def test_a_weight_that_gets_no_slot_is_refused_with_the_least_that_does(corpora: list[Corpus]) -> None:
    message = refused([[(corpora[0], 10_000.0), (corpora[1], 1.0)], 0, 16])
    assert "has the weight 1.0 of 10001.0 in all, less than one sample in 4096; raise it to at least 2.44" in message
    Sampler([(corpora[0], 10_000.0), (corpora[1], 2.45)], 0, 16)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(corpora: list[Corpus], weight: float) -> None:
    assert "must be a number above 0" in refused([[(corpora[0], 1.0), (corpora[1], weight)], 0, 16])


def test_impossible_settings_are_refused(corpora: list[Corpus]) -> None:
    assert "no corpus was given" in refused([[], 0, 16])
    assert "must be at least 1" in refused([[(corpora[0], 1.0)], 0, 0])
    for fraction in (-0.1, 1.0, float("nan")):
        assert "must be at least 0 and below 1" in refused([[(corpora[0], 1.0)], 0, 16, fraction])


def test_a_token_beyond_the_vocabulary_is_refused_at_the_start(corpora: list[Corpus]) -> None:
    message = refused([[(corpora[0], 1.0)], 0, 16], vocab_size=256)
    assert f"{corpora[0].path} holds the token id 256, but the model's vocabulary has 256 entries" in message
    assert "at least 257" in message
    Sampler([(corpora[0], 1.0)], 0, 16, vocab_size=257)


def test_a_token_beyond_the_vocabulary_is_refused_when_it_is_read(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "a", 1000)
    sampler = Sampler([(corpus, 1.0)], 0, 16, vocab_size=257)
    shard = corpus.path / corpus.index.shards[1].file
    tokens = np.fromfile(shard, dtype="<u2")
    tokens[5] = 999
    tokens.tofile(shard)
    with pytest.raises(DataError, match="holds the token id 999, but the model's vocabulary has 257 entries"):
        sampler.rows(0, corpus.sequences(16))
