"""Writes token files by the definition of Megatron's format, byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

CODES = {"u1": 1, "i4": 4, "u2": 8}
LETTERS = {"u1": "B", "i4": "i", "u2": "H"}


def write_indexed(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], width: str = "u2") -> Path:
    """Documents of sequences of tokens; gives the prefix back."""
    letter = LETTERS[width]
    size = struct.calcsize(letter)
    sequences = [sequence for document in documents for sequence in document]
    tokens = [token for sequence in sequences for token in sequence]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    starts, marks = [0], [0]
    for sequence in sequences:
        starts.append(starts[-1] + len(sequence) * size)
    for document in documents:
        marks.append(marks[-1] + len(document))
    content = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[width], len(sequences), len(marks))
    content += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    content += struct.pack(f"<{len(sequences)}q", *starts[:-1])
    content += struct.pack(f"<{len(marks)}q", *marks)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(content)
    return prefix
