"""Which samples of a map-style data set are a rank's in each step: a batch sampler for torch's DataLoader.

A batch is that of the whole step. It is dealt out in runs of `strategy.all_shares` samples, of which each data rank
takes its own (`strategy.own_samples`), and its micro-batches are cut so that together with those of the other ranks
they hold the samples of one device's micro-batches (`cuts`). The order of an epoch is a function of the seed and
the epoch alone, the position a count of samples: both are the same for every number of ranks.

DataLoader asks for batches long before they are used. So what is asked for does not move the position: `advance`
does, and `Parallel.step` calls it once for every batch that the step has learned from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from meshwright.data.permutation import Numbers, Permutation, derive_key
from meshwright.errors import ConfigError, UserError
from meshwright.strategy import Strategy


class BatchSampler(Sampler[list[int]]):
    """Gives this rank's samples of each step of an epoch; every iteration is the next epoch."""

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        strategy: Strategy,
        data_rank: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.batch_size, self.shuffle, self.seed, self.drop_last = batch_size, shuffle, seed, drop_last
        self.epoch = 0
        """The epoch that the position is in."""
        self.position = 0
        """Samples of the epoch that steps have learned from, on all ranks together."""
        self._strategy = strategy
        self._own = strategy.own_samples(data_rank, strategy.all_shares)
        self.begun = False
        """Whether the epoch is: a batch of it was asked for."""
        self.exhausted = False
        """Whether all batches of the epoch were given, if not learned from."""
        self._check()

    def _check(self) -> None:
        shares, dp, batch = self._strategy.all_shares, self._strategy.dp, self.batch_size
        if not isinstance(batch, int):
            raise ConfigError(f"batch_size={batch!r} is no whole number")
        if batch < 1 or self.length < 1:
            raise ConfigError(f"batch_size={batch} of {self.length} samples: both must be at least 1")
        # The last rank comes first where there are too few to go round.
        needed = shares - self._strategy.data_shares[-1] + 1
        if batch < needed:
            raise ConfigError(
                f"batch_size={batch} is that of the whole step and leaves some of the dp={dp} ranks without a sample; "
                f"use {needed} or more"
            )
        last = self.length % batch
        if self.drop_last and self.length < batch:
            raise ConfigError(f"drop_last=True leaves nothing of {self.length} samples in batches of {batch}")
        if 0 < last < needed and not self.drop_last:
            raise ConfigError(
                f"the last batch of an epoch has {last} of {self.length} samples, too few for dp={dp} ranks; "
                f"use drop_last=True, or a batch_size that divides {self.length} or leaves at least {needed}"
            )

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    @property
    def _end(self) -> int:
        return len(self) * self.batch_size if self.drop_last else self.length

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's samples of the batches from the position on; of the next epoch if this one was begun before."""
        # Begun when the first batch is asked for: DataLoader makes an iterator that it never uses.
        if self.begun:
            self.set_epoch(self.epoch + 1)
        self.begun = True
        order = Permutation(self.length, derive_key("batches", self.seed + self.epoch))
        for first in range(self.position, self._end, self.batch_size):
            mine = np.uint64(first) + self._own_places(min(self.batch_size, self._end - first))
            self.exhausted = first + self.batch_size >= self._end
            yield (order(mine) if self.shuffle else mine).tolist()

    def _own_places(self, samples: int) -> Numbers:
        """Which of a batch's samples are this rank's."""
        places = np.arange(samples, dtype=np.uint64)
        turns = places % self._strategy.all_shares
        return places[(turns >= self._own.start) & (turns < self._own.stop)]

    def _batch(self, ahead: int) -> int:
        """Samples of all ranks in the batch so many behind the position."""
        return max(0, min(self.batch_size, self._end - self.position - ahead * self.batch_size))

    def samples(self, ahead: int) -> int | None:
        """This rank's samples of the batch so many behind the position; None where no such batch was asked for."""
        return len(self._own_places(self._batch(ahead))) or None if self.begun else None

    def cuts(self, ahead: int, samples: int, micro_steps: int) -> list[int] | None:
        """Where they are cut into micro-batches; None where the batch in hand, of so many here, cannot be that one."""
        whole = self._batch(ahead)
        mine = self._own_places(whole)
        if not self.begun or len(mine) != samples:
            return None
        return np.searchsorted(mine, cut_evenly(whole, micro_steps)).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of an epoch: from its start, or from where a loaded state is in it."""
        if epoch != self.epoch or self.begun:
            self.position = 0
        self.epoch, self.begun, self.exhausted = epoch, False, False

    def advance(self, batches: int = 1) -> None:
        """Count batches as learned from; for loops that do without `Parallel.step`."""
        if self.begun:
            self.position = min(self.position + batches * self.batch_size, self._end)

    def state_dict(self) -> dict[str, Any]:
        """Where the data goes on, as JSON has it: behind the last batch that a step has learned from."""
        done = self.position >= self._end
        return {
            "epoch": self.epoch + done,
            "position": 0 if done else self.position,
            **{name: getattr(self, name) for name in _IDENTITY},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on any number of ranks."""
        for name in _IDENTITY:
            if state[name] != getattr(self, name):
                raise UserError(
                    f"the sampler's state is of {name}={state[name]} and this one has {name}={getattr(self, name)}: "
                    "its position means other samples; give what it was saved with"
                )
        self.epoch, self.position = state["epoch"], state["position"]
        self.begun = self.exhausted = False


def cut_evenly(samples: int, parts: int) -> list[int]:
    """Where so many samples are cut, from the first to the end; longer parts come first."""
    return [-(-samples * index // parts) for index in range(parts + 1)]


_IDENTITY = ("length", "batch_size", "shuffle", "seed", "drop_last")
"""What decides which sample a position means."""
