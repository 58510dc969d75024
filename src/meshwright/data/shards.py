"""The packed corpus on disk and its reader.

A folder holds `index.json`, which is written last, so a folder without it is not whole; for each shard its tokens
(`shard-00000.bin`, little-endian, of one width) and the ends of its documents (`shard-00000.documents`, 64-bit
counts of tokens from the start of the shard); and the tokenizer, so that tokens can be turned back into text.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.data.tokenizer import saved_digest
from meshwright.errors import DataError

FORMAT = "meshwright tokens"
VERSION = 1
INDEX = "index.json"
REMAINS = "preparing.json"
TOKENIZER = "tokenizer"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
DOCUMENT_DTYPE = np.dtype("<u8")


def dtype_name(vocab_size: int) -> str:
    """The narrowest width that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class Shard:
    """One shard as the index describes it."""

    file: str
    tokens: int
    documents: int
    largest_token: int
    digest: str
    documents_file: str
    documents_digest: str


@dataclass(frozen=True)
class TokenizerRecord:
    """Which tokenizer made the tokens."""

    name: str
    vocab_size: int
    end: int | None
    digest: str


@dataclass(frozen=True)
class Index:
    """What `index.json` says."""

    dtype: str
    tokenizer: TokenizerRecord
    shards: tuple[Shard, ...]
    plan: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The digest of the whole corpus, from those of its shards."""
        state = xxhash.xxh3_128(self.dtype.encode())
        for shard in self.shards:
            state.update(f"\n{shard.tokens} {shard.digest} {shard.documents_digest}".encode())
        return state.hexdigest()

    def to_json(self) -> str:
        """The text of `index.json`; totals are there for people and other programs, and checked when read."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype,
            "tokens": sum(shard.tokens for shard in self.shards),
            "documents": sum(shard.documents for shard in self.shards),
            "largest_token": max(shard.largest_token for shard in self.shards),
            "digest": self.digest,
            "tokenizer": asdict(self.tokenizer),
            "shards": [asdict(shard) for shard in self.shards],
            "plan": dict(self.plan),
        }
        return json.dumps(content, indent=1) + "\n"


def read_index(folder: Path) -> Index:
    """The index of a packed corpus, or a DataError that says why there is none."""
    path = folder / INDEX
    if not path.is_file():
        if (folder / REMAINS).is_file():
            raise DataError(f"{folder} was not finished; run the same `meshwright data prepare` again to finish it")
        what = f"has no {INDEX}" if folder.is_dir() else "does not exist"
        raise DataError(f"{folder} {what}, so it is no packed corpus; make one with `meshwright data prepare`")
    damaged = f"{path} is damaged; make the corpus again with `meshwright data prepare --overwrite`"
    try:
        content = json.loads(path.read_bytes())
        name, version = content["format"], content["version"]
        if name != FORMAT:
            raise DataError(f"{path} is of the format '{name}', not '{FORMAT}'; give the folder of a packed corpus")
        if version != VERSION:
            raise DataError(
                f"{path} is version {version} of the format, this program reads version {VERSION}; "
                "use the version of meshwright that made it, or prepare the corpus again"
            )
        index = Index(
            dtype=content["dtype"],
            tokenizer=TokenizerRecord(**content["tokenizer"]),
            shards=tuple(Shard(**shard) for shard in content["shards"]),
            plan=content["plan"],
        )
        whole = index.dtype in DTYPES and len(index.shards) > 0 and json.loads(index.to_json()) == content
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(damaged) from error
    if not whole:
        raise DataError(damaged)
    return index


def _expected_sizes(index: Index) -> Iterator[tuple[str, int, str]]:
    """For each file of the shards: its name, its size in bytes and its digest."""
    for shard in index.shards:
        yield shard.file, shard.tokens * DTYPES[index.dtype].itemsize, shard.digest
        yield shard.documents_file, shard.documents * DOCUMENT_DTYPE.itemsize, shard.documents_digest


def _wrong_size(path: Path, size: int) -> str | None:
    try:
        found = path.stat().st_size
    except OSError:
        return f"{path.name} is missing"
    return None if found == size else f"{path.name} has {found:,} bytes instead of {size:,}"


class Corpus:
    """A packed corpus as one long row of tokens; files are mapped when they are first read."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.index = read_index(self.path)
        wrong = [text for file, size, _ in _expected_sizes(self.index) if (text := _wrong_size(self.path / file, size))]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise DataError(
                f"{self.path} is damaged: {'; '.join(wrong[:3])}{more}. Copy the files again from where they are "
                "whole, or make the corpus again with `meshwright data prepare --overwrite`"
            )
        shards = self.index.shards
        self.dtype = DTYPES[self.index.dtype]
        self.tokens = sum(shard.tokens for shard in shards)
        self.documents = sum(shard.documents for shard in shards)
        self.largest_token = max(shard.largest_token for shard in shards)
        self.tokenizer = self.index.tokenizer
        self.digest = self.index.digest
        self._starts = [0]
        for shard in shards:
            self._starts.append(self._starts[-1] + shard.tokens)
        self._maps: dict[str, NDArray[Any]] = {}

    @property
    def tokenizer_folder(self) -> Path:
        """The folder from which `load_tokenizer` gives the tokenizer of this corpus."""
        return self.path / TOKENIZER

    @property
    def has_tokenizer(self) -> bool:
        """Whether the tokenizer of the tokens lies with them."""
        return True

    @property
    def size(self) -> int:
        """How many bytes the shards take on disk."""
        return sum(size for _, size, _ in _expected_sizes(self.index))

    def describe(self) -> dict[str, Any]:
        """What the corpus holds and how it was made, as plain values."""
        return {
            "path": str(self.path),
            "tokens": self.tokens,
            "documents": self.documents,
            "largest_token": self.largest_token,
            "dtype": self.index.dtype,
            "shards": len(self.index.shards),
            "bytes": self.size,
            "digest": self.digest,
            "tokenizer": asdict(self.tokenizer),
            "plan": dict(self.index.plan),
        }

    def sequences(self, length: int) -> int:
        """How many sequences of a length there are, each with the token after its last one as a target."""
        return max(self.tokens - 1, 0) // length

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Tokens from `start` on, in the width of the files; read-only where they lie in one shard."""
        parts = [
            self._map(shard.file, self.dtype)[max(start - before, 0) : start + count - before]
            for shard, before in self._shards(start, count)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, self.dtype)])

    def document_ends(self, start: int, count: int) -> NDArray[np.int64]:
        """Where documents end (one past their last token) after `start` and up to `start + count`."""
        parts = [np.empty(0, np.int64)]
        for shard, before in self._shards(start, count):
            ends = self._map(shard.documents_file, DOCUMENT_DTYPE)
            limits = np.array([max(start - before, 0), start + count - before], dtype=DOCUMENT_DTYPE)
            low, high = np.searchsorted(ends, limits, side="right")
            parts.append(ends[low:high].astype(np.int64) + before)
        return np.concatenate(parts)

    def _shards(self, start: int, count: int) -> Iterator[tuple[Shard, int]]:
        """The shards that hold some of these tokens, each with the number of tokens before it."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start} to {start + count} of {self.path}, which has {self.tokens}")
        number = bisect_right(self._starts, start) - 1
        while number < len(self.index.shards) and self._starts[number] < start + count:
            yield self.index.shards[number], self._starts[number]
            number += 1

    def _map(self, file: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        found = self._maps.get(file)
        if found is None:
            # As a plain array: slicing one is several times faster than slicing a np.memmap.
            found = self._maps[file] = np.memmap(self.path / file, dtype=dtype, mode="r").view(np.ndarray)
        return found


def verify(path: str | Path, workers: int | None = None) -> list[str]:
    """Read every byte of a packed corpus again; one sentence for each file that is not as it was written."""
    folder = Path(path)
    index = read_index(folder)

    def check(expected: tuple[str, int, str]) -> str | None:
        file, size, digest = expected
        wrong = _wrong_size(folder / file, size)
        if wrong is None and _file_digest(folder / file) != digest:
            wrong = f"{file} has other content than was written"
        return wrong

    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        found = [text for text in pool.map(check, _expected_sizes(index)) if text]
    if saved_digest(folder / TOKENIZER) != index.tokenizer.digest:
        found.append(f"{TOKENIZER} is not the tokenizer that made the tokens")
    return found


def _file_digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(1 << 22))
        while count := file.readinto(buffer):
            state.update(buffer[:count])
    return state.hexdigest()
