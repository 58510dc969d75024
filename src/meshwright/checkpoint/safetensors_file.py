"""The safetensors format, as far as checkpoints need it: a header of JSON, then the bytes of the tensors.

Written and read here rather than by its library so that pieces go from memory to the file and back without a copy, and
so that they can be read from any place.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import xxhash

from meshwright.checkpoint.place import Place
from meshwright.errors import CheckpointError

LARGEST_HEADER = 100_000_000
"""The format's own limit."""

NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""What the format calls the dtypes."""

SIZES = {"64": 8, "32": 4, "16": 2, "8": 1, "BOOL": 1}


def dtype_bytes(dtype: str) -> int:
    """The size of an element of a dtype, such as float32."""
    name = NAMES[dtype]
    return next(size for ending, size in SIZES.items() if name.split("_")[0].endswith(ending))


class Span(NamedTuple):
    """Where the bytes of a piece lie in a file, and what they are."""

    start: int
    length: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    spans: Mapping[str, Span]
    digest: str
    """Of the header's own bytes, its length included."""
    file_bytes: int


def make_header(pieces: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, Header]:
    """The bytes that a file of these pieces (name -> dtype, shape) begins with; data follows in their order."""
    entries, at = {}, 0
    for name, (dtype, shape) in pieces.items():
        length = prod(shape) * dtype_bytes(dtype)
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Data starts at a multiple of eight, as readers that map files into memory like it.
    text += b" " * (-len(text) % 8)
    raw = struct.pack("<Q", len(text)) + text
    return raw, _header(raw, len(raw) + at)


def _header(raw: bytes, file_bytes: int) -> Header:
    dtypes = {short: name for name, short in NAMES.items()}
    spans = {}
    for name, entry in json.loads(raw[8:]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        spans[name] = Span(len(raw) + first, last - first, dtypes[entry["dtype"]], tuple(entry["shape"]))
    return Header(spans, xxhash.xxh3_128_hexdigest(raw), file_bytes)


def read_header(place: Place, file: str) -> Header:
    """A file's header, with every span checked to lie inside of the file."""
    size = place.size(file)
    start = bytearray(8)
    if place.read(file, 0, memoryview(start)) < 8:
        raise CheckpointError(f"{place.path_of(file)} is damaged: it is cut short")
    (length,) = struct.unpack("<Q", start)
    if length > min(LARGEST_HEADER, size - 8):
        raise CheckpointError(f"{place.path_of(file)} is damaged: its header cannot be {length:,} bytes long")
    text = bytearray(length)
    place.read(file, 8, memoryview(text))
    try:
        header = _header(bytes(start) + bytes(text), size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{place.path_of(file)} is damaged: its header cannot be read") from None
    for name, span in header.spans.items():
        sizes = [*span.shape, span.start, span.length]
        sound = all(isinstance(number, int) and number >= 0 for number in sizes)
        if not sound or span.length != prod(span.shape) * dtype_bytes(span.dtype) or span.start + span.length > size:
            raise CheckpointError(f"{place.path_of(file)} is damaged: {name} does not lie inside of the file")
    return header
