"""Makes one shard: reads its units, tokenises them and writes the files so that they are whole or not there.

The files are written under temporary names, synced and renamed; a note with their counts and digests
(`shard-00000.json`) follows. A shard counts as finished when its note belongs to the plan and the sizes agree.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from meshwright.data.documents import read_batches
from meshwright.data.shards import DOCUMENT_DTYPE, DTYPES, Shard, dtype_name
from meshwright.data.sources import SourceOptions, Unit
from meshwright.data.tokenizer import Tokenizer

TEMPORARY = ".tmp"


def shard_name(number: int) -> str:
    """The name that the files of a shard share."""
    return f"shard-{number:05d}"


def make_shard(
    folder: Path,
    number: int,
    units: Iterable[Unit],
    options: SourceOptions,
    tokenizer: Tokenizer,
    plan: str,
    report: Callable[[int, int], None],
) -> Shard:
    """Write one shard; `report` hears how many bytes of source and how many tokens each batch added."""
    name = shard_name(number)
    tokens_path, documents_path = folder / f"{name}.bin", folder / f"{name}.documents"
    dtype = DTYPES[dtype_name(tokenizer.vocab_size)]
    tokens, documents, largest = 0, 0, 0
    with ExitStack() as stack:
        token_file = stack.enter_context(_ShardFile(tokens_path))
        document_file = stack.enter_context(_ShardFile(documents_path))
        for batch in read_batches(units, options):
            added = 0
            if batch.documents:
                ids, lengths = tokenizer.encode_documents(batch.documents)
                added = len(ids)
                if added:
                    largest = max(largest, int(ids.max()))
                token_file.write(ids.astype(dtype, copy=False))
                document_file.write((np.cumsum(lengths) + tokens).astype(DOCUMENT_DTYPE))
                tokens += added
                documents += len(lengths)
            report(batch.read, added)
        if tokens:  # a shard without a token has no files, only its note
            token_file.finish()
            document_file.finish()
    shard = Shard(
        file=tokens_path.name,
        tokens=tokens,
        documents=documents,
        largest_token=largest,
        digest=token_file.digest,
        documents_file=documents_path.name,
        documents_digest=document_file.digest,
    )
    # The note is not synced: after a power cut a torn one is no JSON, and the shard is made again.
    replace_file(folder / f"{name}.json", json.dumps({"plan": plan, "shard": asdict(shard)}), sync=False)
    return shard


class _ShardFile:
    """A file with the digest of what was written; it takes its name only by `finish`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(path.name + TEMPORARY)
        self._state = xxhash.xxh3_128()
        self._file: BinaryIO | None = None

    def __enter__(self) -> _ShardFile:
        self._file = open(self._temporary, "wb", buffering=0)
        return self

    def write(self, array: np.ndarray[Any, Any]) -> None:
        assert self._file is not None
        rest = memoryview(array.data).cast("B")
        self._state.update(rest)
        while rest:  # a full disk or a signal can make a write short
            rest = rest[self._file.write(rest) :]

    def finish(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self._path)

    @property
    def digest(self) -> str:
        return self._state.hexdigest()

    def __exit__(self, *_: object) -> None:
        assert self._file is not None
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def finished_shard(folder: Path, number: int, plan: str, itemsize: int) -> Shard | None:
    """The shard that an earlier run with the same plan finished, if it did."""
    try:
        note = json.loads((folder / f"{shard_name(number)}.json").read_bytes())
        shard = Shard(**note["shard"])
        same = note["plan"] == plan
        if same and shard.tokens:
            same = (folder / shard.file).stat().st_size == shard.tokens * itemsize
            same &= (folder / shard.documents_file).stat().st_size == shard.documents * DOCUMENT_DTYPE.itemsize
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return shard if same else None


def packed_size(shard: Shard, itemsize: int) -> int:
    """How many bytes the files of a shard take."""
    return shard.tokens * itemsize + shard.documents * DOCUMENT_DTYPE.itemsize


def replace_file(path: Path, text: str, sync: bool = True) -> None:
    """Write a small file whole or not at all."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
