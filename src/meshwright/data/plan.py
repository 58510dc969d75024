"""What a preparation will do, decided before it starts: which source text goes into which shard.

Shards are cut from the sources by size, from a small sample of how many tokens a byte gives, and never by what the
workers did. So the shards are the same whatever their number, each is made by one worker from start to end,
and a run that was broken off knows which ones are missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import xxhash

from meshwright.data.documents import head, read_unit
from meshwright.data.shards import DOCUMENT_DTYPE, DTYPES, VERSION, dtype_name
from meshwright.data.sources import SourceFile, SourceOptions, Unit, cut_units, whole_units
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer

SHARDS_WANTED = 64  # enough to keep the cores of a large machine busy to the end
LARGEST_SHARD = 1 << 28
# A shard should take one core longer to make than to sync: about a second of BPE, a twentieth of one of bytes.
SMALLEST_SHARD, SMALLEST_BYTES_SHARD = 1 << 20, 1 << 24
UNIT_BYTES = 4 << 20  # what a worker holds in memory at once, and how often it tells how far it is
SAMPLES, SAMPLE_BYTES = 8, 1 << 15


def describe(
    sources: Sequence[str],
    files: Iterable[SourceFile],
    options: SourceOptions,
    tokenizer: Tokenizer,
    shard_tokens: int | None,
) -> dict[str, Any]:
    """Everything that the packed tokens depend on, as it is kept with them."""
    state = xxhash.xxh3_128()
    count, size = 0, 0
    for file in files:
        state.update(f"{file.path}\0{file.size}\0{file.modified}\n".encode(errors="surrogateescape"))
        count, size = count + 1, size + file.size
    return {
        "version": VERSION,
        "sources": list(sources),
        **asdict(options),
        "glob": list(options.glob),
        "shard_tokens": shard_tokens,
        "tokenizer": tokenizer.name,
        "tokenizer_digest": tokenizer.digest,
        "files": count,
        "bytes": size,
        "listing": state.hexdigest(),
    }


def plan_digest(plan: Mapping[str, Any]) -> str:
    """A short name of a plan; how files were spelled does not matter, what they hold does."""
    kept = sorted((name, value) for name, value in plan.items() if name not in ("sources", "tokenizer"))
    return xxhash.xxh3_128_hexdigest(repr(kept).encode())


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """In what an earlier plan and this one differ, in words."""
    found = [
        f"{name} was {old.get(name)!r} and is {new[name]!r}"
        for name in ("documents", "field", "glob", "split", "shard_tokens", "version")
        if old.get(name) != new[name]
    ]
    if old.get("tokenizer_digest") != new["tokenizer_digest"]:
        same = " with other content" if old.get("tokenizer") == new["tokenizer"] else ""
        found.append(f"the tokenizer was {old.get('tokenizer')} and is {new['tokenizer']}{same}")
    if old.get("listing") != new["listing"]:
        sizes = [f"{plan.get('bytes', 0):,} bytes in {plan.get('files', 0):,} file(s)" for plan in (old, new)]
        same = "the same number and sizes, but other names or times" if sizes[0] == sizes[1] else f"now {sizes[1]}"
        found.append(f"the sources were {sizes[0]} ({', '.join(old.get('sources', []))}) and are {same}")
    return "; ".join(found)


class Rate(NamedTuple):
    """What a byte of the sources gives, from a sample."""

    tokens: float
    documents: float
    seconds: float


@dataclass(frozen=True)
class Layout:
    """The units of each shard, and what to expect of them."""

    shards: tuple[tuple[Unit, ...], ...]
    rate: Rate
    itemsize: int

    def source_bytes(self, numbers: Iterable[int]) -> int:
        """How much source text some shards hold."""
        return sum(unit.size for number in numbers for unit in self.shards[number])

    def packed_bytes(self, numbers: Iterable[int]) -> int:
        """About how much space some shards take on disk."""
        each = self.rate.tokens * self.itemsize + self.rate.documents * DOCUMENT_DTYPE.itemsize
        return int(self.source_bytes(numbers) * each)


def lay_out(
    files: Sequence[SourceFile], options: SourceOptions, tokenizer: Tokenizer, shard_tokens: int | None
) -> Layout:
    """Share the source text out over shards of about `shard_tokens` tokens."""
    units = list(whole_units(files, options))
    rate = sample_rate(units, options, tokenizer)
    total = sum(unit.size for unit in units)
    if shard_tokens is None:
        smallest = SMALLEST_BYTES_SHARD if isinstance(tokenizer, ByteTokenizer) else SMALLEST_SHARD
        shard_tokens = min(max(int(total * rate.tokens) // SHARDS_WANTED, smallest), LARGEST_SHARD)
    shard_bytes = max(int(shard_tokens / rate.tokens), 1)
    shards: list[tuple[Unit, ...]] = []
    current: list[Unit] = []
    size = 0
    for unit in cut_units(units, min(shard_bytes, UNIT_BYTES)):
        current.append(unit)
        size += unit.size
        if size >= shard_bytes:
            shards.append(tuple(current))
            current, size = [], 0
    if current:
        shards.append(tuple(current))
    return Layout(tuple(shards), rate, DTYPES[dtype_name(tokenizer.vocab_size)].itemsize)


def sample_rate(units: Sequence[Unit], options: SourceOptions, tokenizer: Tokenizer) -> Rate:
    """Tokenise a little text at a few places of the sources to learn what a byte gives."""
    start = time.perf_counter()
    apart = max(sum(unit.size for unit in units) // SAMPLES, SAMPLE_BYTES)
    places = list(cut_units(units, apart))
    tokens, documents, size = 0, 0, 0
    for number in range(min(SAMPLES, len(places))):
        unit = head(places[number * len(places) // min(SAMPLES, len(places))], SAMPLE_BYTES)
        texts = next(iter(read_unit(unit, options)), [])
        if texts:
            tokens += len(tokenizer.encode_documents(texts)[0])
            documents += len(texts)
        size += sum(map(len, texts)) if unit.kind in ("parquet", "arrow") else unit.size
    seconds = time.perf_counter() - start
    if not size or not tokens:
        return Rate(1.0, 0.0, 0.0)
    return Rate(tokens / size, documents / size, seconds / size)
