"""Reads the documents of units as UTF-8, in batches of bounded size; what cannot be read is named by file and place."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from meshwright.data.sources import SourceOptions, Unit
from meshwright.errors import DataError, nearest

BATCH_BYTES = 1 << 20
PARAGRAPH_BREAK = re.compile(rb"(?:\A|\n)(?:[ \t\r]*\n)+")


class Batch(NamedTuple):
    """Some documents, and how much of their units has been read with them."""

    documents: list[bytes]
    read: int


def read_batches(units: Iterable[Unit], options: SourceOptions) -> Iterator[Batch]:
    """The documents of the units in order; a batch is closed when it holds about a mebibyte."""
    documents: list[bytes] = []
    held, read = 0, 0
    for unit in units:
        for group in read_unit(unit, options):
            for part, size in _parts(group):
                documents += part
                held += size
                if held >= BATCH_BYTES:
                    yield Batch(documents, read)
                    documents, held, read = [], 0, 0
        read += unit.size
    if documents or read:
        yield Batch(documents, read)


def _parts(group: list[bytes]) -> Iterator[tuple[list[bytes], int]]:
    """A group of documents in parts of about a mebibyte, with their sizes."""
    ends = list(accumulate(map(len, group)))
    start, before = 0, 0
    while start < len(group):
        stop = min(bisect_left(ends, before + BATCH_BYTES, lo=start) + 1, len(group))
        yield group[start:stop], ends[stop - 1] - before
        start, before = stop, ends[stop - 1]


def read_unit(unit: Unit, options: SourceOptions) -> Iterator[list[bytes]]:
    """The documents of one unit in groups; empty documents are left out."""
    if unit.kind in ("parquet", "arrow"):
        from meshwright.data.tables import table_documents

        for texts in table_documents(unit.kind, unit.path, unit.start, unit.stop, options.field):
            yield [text for text in texts if text]
        return
    data = read_range(unit)
    if unit.kind == "jsonl":
        yield _json_documents(unit, data, options.field)
        return
    if not data.isascii():
        _decode(unit, data)
    if unit.kind == "line":
        yield [line.rstrip(b"\r") for line in data.split(b"\n") if line and not line.isspace()]
    elif unit.kind == "paragraph":
        parts = (part.strip(b"\r\n") for part in PARAGRAPH_BREAK.split(data))
        yield [part for part in parts if part and not part.isspace()]
    elif data:
        yield [data]


def head(unit: Unit, limit: int) -> Unit:
    """About the first `limit` bytes of a unit, as a unit that ends between lines; tables are not cut."""
    if unit.kind in ("parquet", "arrow") or unit.size <= limit:
        return unit
    length = read_range(unit._replace(stop=unit.start + limit)).rfind(b"\n") + 1
    return unit._replace(stop=unit.start + length, size=length) if length else unit


def read_range(unit: Unit) -> bytes:
    """The bytes of a unit that is a range of a file."""
    try:
        with open(unit.path, "rb", buffering=0) as file:
            if unit.start:
                file.seek(unit.start)
            data = file.read(unit.stop - unit.start)
            while len(data) < unit.stop - unit.start and (more := file.read(unit.stop - unit.start - len(data))):
                data += more  # one read gives at most 2 GiB
    except OSError as error:
        raise DataError(f"{unit.path} cannot be read: {error.strerror}; change its rights or leave it out") from error
    if len(data) != unit.stop - unit.start:
        raise DataError(f"{unit.path} became shorter while it was read; start again when nothing writes to it")
    return data


def _decode(unit: Unit, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{unit.path} is not UTF-8: byte {unit.start + error.start} is {data[error.start]:#04x}; "
            "convert the file to UTF-8 or leave it out"
        ) from error


def _json_documents(unit: Unit, data: bytes, field: str) -> list[bytes]:
    lines = _decode(unit, data).split("\n")
    documents: list[bytes] = []
    for number, line in enumerate(lines):
        if not line or line.isspace():
            continue
        try:
            text = json.loads(line)[field]
            document = text.encode()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            before = len("\n".join(lines[:number]).encode()) + (number > 0)
            raise _bad_line(unit, data, before, line, field, error) from error
        if document:
            documents.append(document)
    return documents


def _bad_line(unit: Unit, data: bytes, before: int, line: str, field: str, error: Exception) -> DataError:
    """What is wrong with a line, and where; the number of the line is counted only now that it is needed."""
    number = 1 + data[:before].count(b"\n")
    for start in range(0, unit.start, BATCH_BYTES):
        number += read_range(unit._replace(start=start, stop=min(start + BATCH_BYTES, unit.start))).count(b"\n")
    place = f"{unit.path}, line {number} (byte {unit.start + before})"
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as reason:
        return DataError(f"{place} is not JSON: {reason}; correct or remove the line")
    if not isinstance(record, dict):
        return DataError(f"{place} holds a {type(record).__name__}; each line must be a JSON object with '{field}'")
    if field not in record:
        known = ", ".join(record) or "none"
        return DataError(f"{place} has no field '{field}'{nearest(field, record)}; its fields: {known}; see --field")
    if not isinstance(record[field], str):
        kind = type(record[field]).__name__
        return DataError(f"{place}: field '{field}' holds a {kind}, not text; choose another with --field")
    return DataError(f"{place}: field '{field}' cannot be written as UTF-8: {error}; correct or remove the line")
