"""How gradients travel between data-parallel ranks. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import ConfigError
from meshwright.strategy import Strategy

BACKEND = "backend"
BUCKET_MB = 25.0


@dataclass(frozen=True)
class Travel:
    """By which all-reduce, and in how large pieces."""

    all_reduce: str = BACKEND
    """The backend's own, or one of `algorithms`, over messages from rank to rank."""
    bucket_mb: float = BUCKET_MB
    """MiB of gradients that travel together, while the backward pass goes on."""

    def check(self, strategy: Strategy, in_buckets: bool) -> None:
        """Refuse what a strategy has no use for; `in_buckets` says whether its gradients travel whole, in buckets."""
        asked = [f"comm.allreduce={self.all_reduce}"] if self.all_reduce != BACKEND else []
        asked += [f"comm.bucket_mb={self.bucket_mb:g}"] if self.bucket_mb != BUCKET_MB else []
        if asked and not in_buckets:
            raise ConfigError(
                f"{asked[0]} is of gradients that are summed in buckets, as with zero=0 or 1 without tp, pp and ep; "
                f"under {strategy} others carry them: leave it out"
            )
