"""How many tokens' logits the head computes at a time. No torch."""

from __future__ import annotations

CHUNK_BYTES = 1 << 30
"""How much the logits of a chunk take at most."""
FEWEST = 256
"""Tokens of a chunk at least: shorter products leave a device idle."""


def chunk_tokens(entries: int, element: int) -> int:
    """How many tokens' logits are there at a time, of so many entries and bytes for each."""
    return max(FEWEST, CHUNK_BYTES // max(1, entries * element) // FEWEST * FEWEST)
