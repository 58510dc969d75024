"""How gradients travel between data-parallel ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.comm.compression import Compression
from meshwright.comm.whole_steps import whole_steps
from meshwright.errors import ConfigError
from meshwright.strategy import Strategy

BACKEND = "backend"
BUCKET_MB = 25.0
Auto = Literal["auto"]


@dataclass(frozen=True)
class Travel:
    """By which all-reduce, and in how large pieces."""

    all_reduce: str = BACKEND
    """The backend's own, or one of `algorithms`, over messages from rank to rank."""
    bucket_mb: float | Auto | None = None
    """MiB of gradients that travel together, while the backward pass goes on; None leaves it to the strategy."""
    compress_after: int | None = None
    """Steps in which gradients travel whole before a strategy's `compress` begins; None is for a loop whose length is
    not known."""

    @property
    def bucket_bytes(self) -> float:
        """What a bucket of gradients holds, once it was measured where it is to be."""
        assert self.bucket_mb != "auto"
        return (BUCKET_MB if self.bucket_mb is None else self.bucket_mb) * 2**20

    def whole_steps(self, compression: Compression) -> int:
        """Steps in which gradients travel whole."""
        return whole_steps(compression, None) if self.compress_after is None else self.compress_after

    def check(self, strategy: Strategy) -> None:
        """Refuse what a strategy has no use for."""
        if self.all_reduce != BACKEND and not strategy.sums_in_buckets:
            raise ConfigError(
                f"comm.allreduce={self.all_reduce} is of gradients that are summed whole, as with zero=0 or 1 without "
                f"tp, pp and ep; under {strategy} others carry them: leave it out"
            )
        if self.all_reduce != BACKEND and not Compression.parse(strategy.compress).sums:
            raise ConfigError(
                f"comm.allreduce={self.all_reduce} sums tensors, and compress={strategy.compress} exchanges codes by "
                "itself: leave one of them out"
            )
        if self.bucket_mb is not None and strategy.zero == 3:
            raise ConfigError(
                f"comm.bucket_mb={self.bucket_mb} is of gradients of whole parameters; with zero=3 they travel with "
                "what is gathered together: use wrap=size:N in parallel.strategy"
            )
        if self.bucket_mb is not None and strategy.wrap != "auto":
            raise ConfigError(f"comm.bucket_mb={self.bucket_mb} and wrap={strategy.wrap} say the same: leave one out")
        # From Python anything may come, also what comm.compress_after of a run may be.
        after: object = self.compress_after
        if after is not None and (not isinstance(after, int) or isinstance(after, bool) or after < 0):
            raise ConfigError(
                f"compress_after={after!r} are steps: give a whole number from 0, or None for a loop whose length is "
                "not known"
            )
