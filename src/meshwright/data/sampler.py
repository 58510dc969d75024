"""Which tokens are the sample at a position: a pure function of the seed, the position and the sequence length.

There is no loader state. A position is the count of samples before it, whatever the number of ranks, so a run
goes on exactly where it stopped from that one number.

- Mixing: positions fall into blocks of 4,096, in which every corpus has its exact share of the slots. The pattern of
  the slots is one shuffle for the seed, begun at another place in each block; a corpus's n-th slot is its n-th sample.
- Order: a corpus is gone through in epochs, each a computed permutation of its own (see `permutation.py`).
- Held out: a permutation that does not depend on the seed scatters the sequences; its tail is never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.permutation import Permutation, derive_key, numbered_keys, permute
from meshwright.data.shards import Corpus
from meshwright.errors import DataError

PERIOD = 4096


class Sample(NamedTuple):
    """Which sequence of which corpus, in which pass over that corpus."""

    corpus: int
    epoch: int
    sequence: int


class Samples(NamedTuple):
    """The same for many positions, as arrays."""

    corpus: NDArray[np.int64]
    epoch: NDArray[np.int64]
    sequence: NDArray[np.int64]


class Order:
    """Which sample is at a position, from the counts of sequences alone."""

    def __init__(
        self, sequences: Sequence[int], shares: Sequence[int], seed: int, validation: Sequence[int] | None = None
    ) -> None:
        assert sum(shares) == PERIOD
        self._held = np.array(validation or [0] * len(sequences), dtype=np.int64)
        self._sequences = list(sequences)
        self._shares = np.array(shares, dtype=np.int64)
        self._block_key = derive_key("block", seed)
        self._epoch_keys = [derive_key("epoch", seed, number) for number in range(len(sequences))]
        self._scatter_keys = [derive_key("held out", number) for number in range(len(sequences))]
        slots = Permutation(PERIOD, derive_key("slots", seed))(np.arange(PERIOD, dtype=np.uint64))
        self._owners = np.searchsorted(np.cumsum(self._shares), slots.astype(np.int64), side="right")
        # For each corpus, how many of its slots lie before each place of the pattern.
        mine = self._owners == np.arange(len(shares))[:, None]
        self._before = np.concatenate([np.zeros((len(shares), 1), np.int64), np.cumsum(mine, axis=1)], axis=1)

    def locate(self, positions: NDArray[np.int64]) -> Samples:
        """The samples at some positions."""
        block, slot = np.divmod(positions, PERIOD)
        begin = (numbered_keys(self._block_key, block.astype(np.uint64)) % np.uint64(PERIOD)).astype(np.int64)
        place = (begin + slot) % PERIOD
        corpus = self._owners[place]
        share = self._shares[corpus]
        rank = self._before[corpus, place] - self._before[corpus, begin] + np.where(place < begin, share, 0)
        index = block * share + rank
        epoch, sequence = np.empty_like(index), np.empty_like(index)
        for number in np.unique(corpus):
            chosen = np.flatnonzero(corpus == number)
            epoch[chosen], sequence[chosen] = self._train(int(number), index[chosen])
        return Samples(corpus, epoch, sequence)

    def _train(self, number: int, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The n-th training samples of one corpus: epoch and sequence."""
        trained = self._sequences[number] - int(self._held[number])
        epoch, within = np.divmod(index, trained)
        keys = numbered_keys(self._epoch_keys[number], epoch.astype(np.uint64))
        return epoch, self._scatter(number, permute(within.astype(np.uint64), trained, keys))

    def _scatter(self, number: int, index: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The sequence behind an index of which the last ones are held out."""
        if not self._held[number]:
            return index.astype(np.int64)
        return Permutation(self._sequences[number], self._scatter_keys[number])(index).astype(np.int64)

    def locate_held_out(self, indices: NDArray[np.int64]) -> Samples:
        """The held-out samples with some numbers; corpora are interleaved, so any run of them is a fair mixture."""
        total = int(self._held.sum())
        mixed = Permutation(total, derive_key("held out order"))(indices.astype(np.uint64)).astype(np.int64)
        ends = np.cumsum(self._held)
        corpus = np.searchsorted(ends, mixed, side="right")
        sequence = np.empty_like(mixed)
        for number in np.unique(corpus):
            chosen = np.flatnonzero(corpus == number)
            # Past the trained ones: the first held-out index of a corpus is its count of trained sequences.
            index = mixed[chosen] - ends[number] + self._sequences[number]
            sequence[chosen] = self._scatter(int(number), index.astype(np.uint64))
        return Samples(corpus, np.zeros_like(mixed), sequence)


def slot_shares(weights: Sequence[float]) -> list[int]:
    """How many of a block's slots each weight gets: the nearest whole numbers that add up (largest remainder)."""
    for number, weight in enumerate(weights):
        if not (math.isfinite(weight) and weight > 0):
            raise DataError(f"corpus {number} has the weight {weight}; a weight must be a number above 0")
    exact = [weight / sum(weights) * PERIOD for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: (shares[number] - exact[number], number))
    for number in by_remainder[: PERIOD - sum(shares)]:
        shares[number] += 1
    return shares


class Sampler:
    """Rows of tokens for training and for validation, from one corpus or a weighted mixture."""

    def __init__(
        self,
        corpora: Sequence[tuple[Corpus, float]],
        seed: int,
        sequence_length: int,
        validation_fraction: float = 0.0,
        vocab_size: int | None = None,
    ) -> None:
        if not corpora:
            raise DataError("no corpus was given; give at least one folder made by `meshwright data prepare`")
        if sequence_length < 1:
            raise DataError(f"the sequence length is {sequence_length}; it must be at least 1")
        if not 0.0 <= validation_fraction < 1.0:
            raise DataError(f"the validation fraction is {validation_fraction}; it must be at least 0 and below 1")
        self.corpora = tuple(corpus for corpus, _ in corpora)
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.shares = slot_shares([weight for _, weight in corpora])
        self.sequences = [_count(corpus, sequence_length, validation_fraction) for corpus in self.corpora]
        self.held_out = [_held_out(count, validation_fraction) for count in self.sequences]
        self.validation_sequences = sum(self.held_out)
        total = sum(weight for _, weight in corpora)
        for (corpus, weight), share in zip(corpora, self.shares, strict=True):
            if not share:
                raise DataError(
                    f"{corpus.path} has the weight {weight} of {total} in all, less than one sample in {PERIOD}; "
                    f"raise it to at least {total / PERIOD:.3g}, or leave the corpus out"
                )
            if vocab_size is not None and corpus.largest_token >= vocab_size:
                raise _outside(corpus, corpus.largest_token, vocab_size)
        self._order = Order(self.sequences, self.shares, seed, self.held_out)

    def sample(self, position: int) -> Sample:
        """What is at a position."""
        found = self.locate(position, 1)
        return Sample(int(found.corpus[0]), int(found.epoch[0]), int(found.sequence[0]))

    def locate(self, position: int, count: int) -> Samples:
        """What is at `count` positions from one on."""
        if position < 0 or count < 0:
            raise ValueError(f"{count} samples from position {position}")
        return self._order.locate(np.arange(position, position + count, dtype=np.int64))

    def rows(self, position: int, count: int) -> NDArray[np.int64]:
        """The tokens of `count` samples: inputs are all columns but the last, targets all but the first."""
        return self._read(self.locate(position, count))

    def validation_rows(self, start: int, count: int) -> NDArray[np.int64]:
        """The tokens of held-out samples, which are the same for every seed."""
        if start < 0 or count < 0 or start + count > self.validation_sequences:
            raise ValueError(f"held-out samples {start} to {start + count}; there are {self.validation_sequences}")
        return self._read(self._order.locate_held_out(np.arange(start, start + count, dtype=np.int64)))

    def _read(self, samples: Samples) -> NDArray[np.int64]:
        rows = np.empty((len(samples.sequence), self.sequence_length + 1), dtype=np.int64)
        places = zip(samples.corpus.tolist(), samples.sequence.tolist(), strict=True)
        for row, (corpus, sequence) in zip(rows, places, strict=True):
            row[:] = self.corpora[corpus].read(sequence * self.sequence_length, self.sequence_length + 1)
        if self.vocab_size is not None and rows.size and rows.max() >= self.vocab_size:
            row_number, _ = np.unravel_index(rows.argmax(), rows.shape)
            raise _outside(self.corpora[samples.corpus[row_number]], int(rows.max()), self.vocab_size)
        return rows


def _count(corpus: Corpus, length: int, validation_fraction: float) -> int:
    needed = 1 if validation_fraction == 0 else 2
    count = corpus.sequences(length)
    if count < needed:
        held = " (one to train on, one to hold out)" if needed == 2 else ""
        raise DataError(
            f"{corpus.path} has {corpus.tokens:,} tokens; sequences of {length:,} need at least "
            f"{needed * length + 1:,}{held}. Use a shorter sequence length or a larger corpus"
        )
    return count


def _held_out(sequences: int, fraction: float) -> int:
    return min(max(round(sequences * fraction), 1), sequences - 1) if fraction else 0


def _outside(corpus: Corpus, token: int, vocab_size: int) -> DataError:
    return DataError(
        f"{corpus.path} holds the token id {token}, but the model's vocabulary has {vocab_size:,} entries; "
        f"give the model a vocabulary of at least {max(corpus.tokenizer.vocab_size, token + 1):,} "
        f"(the tokenizer is {corpus.tokenizer.name}), or prepare the corpus with the model's own tokenizer"
    )
