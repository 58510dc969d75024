"""Text columns of .parquet files and of the Arrow files that `datasets` writes, through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.errors import DataError, nearest

try:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet
except ImportError as error:
    raise DataError(
        ".parquet files and `datasets` folders need the `pyarrow` package; install it with "
        "pip install 'meshwright[data]'"
    ) from error

ROWS = 1024
BATCH_BYTES = 4 << 20


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}; make the file again or leave it out") from error


def _check_column(path: str, schema: Any, field: str) -> None:
    if field not in schema.names:
        known = ", ".join(schema.names) or "none"
        raise DataError(
            f"{path} has no column '{field}'{nearest(field, schema.names)}; its columns: {known}; choose with --field"
        )
    if not _is_text(schema.field(field).type):
        texts = ", ".join(column.name for column in schema if _is_text(column.type)) or "none"
        raise DataError(
            f"column '{field}' of {path} holds {schema.field(field).type}, not text; columns with text: {texts}"
        )


def _is_text(kind: Any) -> bool:
    types = pyarrow.types
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def row_groups(path: str, field: str) -> Iterator[tuple[int, int, int]]:
    """For each row group of a .parquet file: its number, the next number, and the bytes of its text."""
    with _named(path), pyarrow.parquet.ParquetFile(path) as file:
        _check_column(path, file.schema_arrow, field)
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            columns = (group.column(i) for i in range(group.num_columns))
            size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema == field)
            if group.num_rows:
                yield number, number + 1, size


def record_batches(path: str, field: str) -> Iterator[tuple[int, int, int]]:
    """Runs of record batches of an Arrow stream file: first, one past the last, and the bytes of their text."""
    # The file is mapped, so counting the batches reads their headers and not their text.
    with _named(path), pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as stream:
        _check_column(path, stream.schema, field)
        start, number, size = 0, 0, 0
        for number, batch in enumerate(stream, 1):
            size += batch.column(field).nbytes
            if size >= BATCH_BYTES:
                yield start, number, size
                start, size = number, 0
        if number > start:
            yield start, number, size


def table_documents(kind: str, path: str, start: int, stop: int, field: str) -> Iterator[list[bytes]]:
    """The text of a unit as lists of UTF-8 documents."""
    row = 0
    with _named(path):
        for column in _columns(kind, path, start, stop, field):
            if pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            texts = column.cast(pyarrow.large_string()).cast(pyarrow.large_binary()).to_pylist()
            if column.null_count:
                place = f"row {row + texts.index(None)} of {'row group' if kind == 'parquet' else 'batch'} {start}"
                raise DataError(f"{path}: column '{field}' has no text in {place}; remove such rows")
            row += len(texts)
            yield texts


def _columns(kind: str, path: str, start: int, stop: int, field: str) -> Iterator[Any]:
    if kind == "parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = list(range(start, stop))
            for batch in file.iter_batches(batch_size=ROWS, row_groups=groups, columns=[field], use_threads=False):
                yield batch.column(0)
        return
    with pyarrow.memory_map(path) as file, pyarrow.ipc.open_stream(file) as stream:
        for number, batch in enumerate(stream):
            if number >= stop:
                return
            if number >= start:
                yield batch.column(field)
