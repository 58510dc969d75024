"""Token files in Megatron's format, PREFIX.bin with PREFIX.idx, read as a corpus as they lie there.

PREFIX.idx says how the tokens of PREFIX.bin are cut: 9 bytes of magic, a 64-bit version, a byte for the width of
tokens, the number of sequences and of marks of documents; then, for each sequence, its length (32 bits) and where it
begins (64 bits, in bytes); then the marks: how many sequences come before each document, and at the end. All is
little-endian, nothing is run or unpickled, and every number is checked against the sizes of both files.

The files hold no tokenizer: data.tokenizer names it where text is to be shown.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.data.shards import DTYPES, Corpus, Index, Shard, TokenizerRecord
from meshwright.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
WIDTHS = {8: "uint16", 4: "uint32"}
"""Codes of uint16 and int32. Ids are never negative: as uint32 a negative one is beyond every vocabulary."""
NAMES = {1: "uint8", 2: "int8", 3: "int16", 5: "int64", 6: "float64", 7: "float32"}
SUFFIXES = (".idx", ".bin")
SCANNED = 1 << 28
"""Bytes of tokens that are looked through for the largest id when a corpus is opened; more are checked as they are
read."""
SAMPLED, BLOCK = 64, 1 << 16


def prefix_of(path: str | Path) -> Path | None:
    """The prefix of a pair of files that a path names, by itself or as one of them; None where there is none."""
    named = Path(path)
    prefix = named.with_suffix("") if named.suffix in SUFFIXES else named
    return prefix if not named.is_dir() and _beside(prefix, ".idx").is_file() else None


def open_corpus(path: str | Path) -> Corpus:
    """A folder of `meshwright data prepare`, or a pair of files in Megatron's format."""
    prefix = prefix_of(path)
    return Corpus(path) if prefix is None else IndexedCorpus(prefix)


class IndexedCorpus(Corpus):
    """Such a pair of files as one long row of tokens; they are mapped, not read."""

    def __init__(self, prefix: Path) -> None:
        self.path = prefix
        name, self._ends, tokens = _read_index(prefix)
        self.dtype = DTYPES[name]
        self._maps: dict[str, NDArray[Any]] = {}
        self._starts = [0, tokens]
        self.tokens = tokens
        self.documents = len(self._ends)
        self.tokenizer = TokenizerRecord("not known", 0, None, "")
        shard = Shard(f"{prefix.name}.bin", tokens, self.documents, 0, "", f"{prefix.name}.idx", "")
        self.index = Index(name, self.tokenizer, (shard,), {"sources": [str(prefix)], "files": 2, "bytes": self.size})
        self.digest = _digest(prefix)
        small = tokens * self.dtype.itemsize <= SCANNED
        self.largest_token = int(self.read(0, tokens).max()) if small else 0

    @property
    def tokenizer_folder(self) -> Path:
        """There is none."""
        raise DataError(f"{self.path} holds tokens without their tokenizer; set data.tokenizer to it")

    @property
    def has_tokenizer(self) -> bool:
        """Whether the tokenizer of the tokens lies with them."""
        return False

    @property
    def size(self) -> int:
        """How many bytes both files take on disk."""
        return sum(_beside(self.path, suffix).stat().st_size for suffix in SUFFIXES)

    def document_ends(self, start: int, count: int) -> NDArray[np.int64]:
        """Where documents end (one past their last token) after `start` and up to `start + count`."""
        list(self._shards(start, count))
        low, high = np.searchsorted(self._ends, [start, start + count], side="right")
        return self._ends[low:high]

    def _map(self, file: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        found = self._maps.get(file)
        if found is None:
            found = self._maps[file] = np.memmap(_beside(self.path, ".bin"), dtype=dtype, mode="r").view(np.ndarray)
        return found


def _beside(prefix: Path, suffix: str) -> Path:
    """The file of a prefix, which may have dots of its own."""
    return prefix.with_name(prefix.name + suffix)


def _read_index(prefix: Path) -> tuple[str, NDArray[np.int64], int]:
    """The width of tokens, the ends of documents, and how many tokens there are; all checked."""
    path, tokens_path = _beside(prefix, ".idx"), _beside(prefix, ".bin")

    def damaged(what: str) -> DataError:
        return DataError(
            f"{path} is damaged: {what}; copy both files again from where they are whole, or make them anew"
        )

    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if not header.startswith(MAGIC):
        raise DataError(f"{path} is no index in Megatron's format: it does not begin with MMIDIDX")
    if len(header) < HEADER.size:
        raise damaged(f"it has {size} bytes, less than its header")
    _, version, code, sequences, marks = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(f"{path} is version {version} of the format; version {VERSION} is read")
    if code not in WIDTHS:
        found = NAMES.get(code, f"of the unknown code {code}")
        raise DataError(
            f"{path}: tokens are {found}; uint16 and int32 are read, so make the files anew with one of them"
        )
    expected = HEADER.size + 12 * sequences + 8 * marks
    if size == expected + sequences and sequences:
        raise DataError(f"{path} has modes of its sequences, as for images; tokens of text have none")
    if size != expected:
        raise damaged(f"{sequences} sequences and {marks} marks take {expected} bytes, and it has {size}")
    if not sequences or marks < 2:
        raise DataError(f"{path} describes no document")
    mapped = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    middle, last = HEADER.size + 4 * sequences, HEADER.size + 12 * sequences
    lengths = mapped[HEADER.size : middle].view("<i4").astype(np.int64)
    starts, before = mapped[middle:last].view("<i8"), mapped[last:].view("<i8").astype(np.int64)
    if lengths.min() < 0:
        raise damaged("a sequence has a length below zero")
    ends = np.cumsum(lengths)
    width = DTYPES[WIDTHS[code]].itemsize
    if not np.array_equal(starts, (ends - lengths) * width):
        raise damaged("its sequences do not follow one another in the file of tokens")
    if before[0] != 0 or before[-1] != sequences or np.any(np.diff(before) < 0):
        raise damaged("its documents do not follow one another")
    try:
        held = os.stat(tokens_path).st_size
    except OSError:
        raise DataError(f"{tokens_path} is missing; it must lie beside {path.name}") from None
    tokens = int(ends[-1])
    if held != tokens * width:
        raise damaged(f"it describes {tokens * width} bytes of tokens, and {tokens_path.name} has {held}")
    if not tokens:
        raise DataError(f"{path} describes no tokens")
    # Documents without tokens end where the one before them does.
    bounds = np.unique(np.concatenate([np.zeros(1, np.int64), ends])[before])
    return WIDTHS[code], bounds[bounds > 0], tokens


def _digest(prefix: Path) -> str:
    """Tells these files from others: all of the index, and blocks from all over the tokens, which can be many."""
    state = xxhash.xxh3_128()
    with open(_beside(prefix, ".idx"), "rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    path = _beside(prefix, ".bin")
    size = path.stat().st_size
    state.update(f"\n{size}".encode())
    with open(path, "rb") as file:
        for number in range(SAMPLED):
            file.seek(max(0, size - BLOCK) * number // (SAMPLED - 1))
            state.update(file.read(BLOCK))
    return state.hexdigest()
