"""Which documents are in the given sources: finds the files and cuts them into units that can be read side by side.

A unit is a byte range of a file that begins and ends between documents, a row group of a .parquet file, or some record
batches of a `datasets` folder. All order is that of the sources as given and of relative paths, so that the
same sources always give the same units.
"""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import DataError, nearest

STANDARD_LIBRARY = "python-stdlib"
DOCUMENTS = ("file", "line", "paragraph")
TABLES = {".jsonl": "jsonl", ".parquet": "parquet"}
ENDINGS = (".txt", *TABLES)
NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Where a file of the kind may be cut: after a line, or after a line of nothing but white space.
BOUNDARIES = {"line": re.compile(rb"\n"), "jsonl": re.compile(rb"\n"), "paragraph": re.compile(rb"\n[ \t\r]*\n")}


@dataclass(frozen=True)
class SourceOptions:
    """How sources are read."""

    field: str = "text"
    """The field of .jsonl lines, or the column of tables, that holds the text."""
    documents: str = "file"
    """What is one document in plain text: a `file`, a `line` or a `paragraph`."""
    glob: tuple[str, ...] = ()
    """Patterns of the files to take from folders, in place of .txt, .jsonl and .parquet."""
    split: str | None = None
    """Which split of a saved DatasetDict."""

    def __post_init__(self) -> None:
        if self.documents not in DOCUMENTS:
            raise DataError(
                f"documents = '{self.documents}'{nearest(self.documents, DOCUMENTS)}; allowed: {', '.join(DOCUMENTS)}"
            )


class SourceFile(NamedTuple):
    """One file that holds documents; size and time tell later whether it is still the same."""

    path: str
    kind: str
    size: int
    modified: int


class Unit(NamedTuple):
    """A part of a file: bytes from `start` to `stop`, or row groups, or record batches; `size` is about its bytes."""

    kind: str
    path: str
    start: int
    stop: int
    size: int


def list_files(sources: Sequence[str], options: SourceOptions, leave_out: Path | None = None) -> list[SourceFile]:
    """The files that the sources hold, in order; nothing below the folder `leave_out` is taken."""
    if not sources:
        raise DataError(f"no source was given; give files, folders or '{STANDARD_LIBRARY}'")
    found: list[SourceFile] = []
    for source in sources:
        files = list(_files_of(source, options, leave_out))
        if not files:
            wanted = " or ".join(options.glob or (f"*{ending}" for ending in ENDINGS))
            raise DataError(f"source '{source}' holds no file that matches {wanted}; choose others with --glob '*.md'")
        found += files
    return found


def _files_of(source: str, options: SourceOptions, leave_out: Path | None) -> Iterator[SourceFile]:
    if source == STANDARD_LIBRARY:
        for entry in _walk(sysconfig.get_path("stdlib"), NOT_STANDARD_LIBRARY, leave_out):
            if entry.name.endswith(".py") and _is_text(entry.path):
                yield _source_file(entry.path, options.documents)
        return
    root = os.path.realpath(source)
    if not os.path.exists(root):
        near = nearest(source, [STANDARD_LIBRARY])
        raise DataError(f"source '{source}' does not exist{near}; give files, folders or '{STANDARD_LIBRARY}'")
    if os.path.isdir(root):
        if any(os.path.isfile(os.path.join(root, name)) for name in ("dataset_dict.json", "state.json")):
            yield from _saved_dataset(Path(root), options)
            return
        for entry in _walk(root, set(), leave_out):
            if _wanted(entry, root, options.glob):
                yield _source_file(entry.path, _kind(entry.name, options))
        return
    ending = os.path.splitext(root)[1]
    if not options.glob and ending not in ENDINGS:
        raise DataError(
            f"source '{source}' ends in '{ending}', which is none of {', '.join(ENDINGS)}; "
            f"if it is plain text, add --glob '*{ending}'"
        )
    yield _source_file(root, _kind(root, options))


def _kind(name: str, options: SourceOptions) -> str:
    return TABLES.get(os.path.splitext(name)[1], options.documents)


def _wanted(entry: os.DirEntry[str], root: str, glob: Sequence[str]) -> bool:
    if not glob:
        return entry.name.endswith(ENDINGS)
    relative = os.path.relpath(entry.path, root)
    return any(fnmatchcase(relative if "/" in pattern else entry.name, pattern) for pattern in glob)


def _walk(folder: str, without: set[str], leave_out: Path | None) -> Iterator[os.DirEntry[str]]:
    """The files below a folder by relative path; what begins with a dot is left out, as a shell's `*` does."""
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry for entry in found if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"folder {folder} cannot be read: {error.strerror}; change its rights or move it") from error
    for entry in entries:
        if entry.is_dir():
            if entry.is_symlink() and Path(entry.path).resolve() in Path(entry.path).absolute().parents:
                raise DataError(f"folder {entry.path} is a link to a folder that it lies in; remove it or leave it out")
            if entry.name not in without and entry.path != str(leave_out):
                yield from _walk(entry.path, without, leave_out)
        elif entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path)):
            yield entry  # a link to nothing too, so that it is named as an error and not passed over


def _is_text(path: str) -> bool:
    try:
        Path(path).read_bytes().decode()
    except UnicodeDecodeError:
        return False
    return True


def _source_file(path: str, kind: str) -> SourceFile:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; remove it or leave it out") from error
    return SourceFile(path, kind, status.st_size, status.st_mtime_ns)


def _saved_dataset(root: Path, options: SourceOptions) -> Iterator[SourceFile]:
    """The Arrow files of a folder that `datasets` wrote with `save_to_disk`."""
    if (root / "dataset_dict.json").is_file():
        splits = _json(root / "dataset_dict.json").get("splits", [])
        if options.split is None or options.split not in splits:
            found = "no split was named" if options.split is None else f"there is no split '{options.split}'"
            near = nearest(options.split or "", splits)
            raise DataError(f"{root} holds the splits {', '.join(splits)}, but {found}{near}; name one with --split")
        root = root / options.split
    state = _json(root / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"{root} is a selection kept as a list of indices; write it out with "
            "dataset.flatten_indices().save_to_disk(...) and give that folder"
        )
    for entry in state.get("_data_files", []):
        yield _source_file(str(root / entry["filename"]), "arrow")


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}; save the dataset again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object; save the dataset again")
    return content


def whole_units(files: Iterable[SourceFile], options: SourceOptions) -> Iterator[Unit]:
    """Each file as one unit, a .parquet file as its row groups, Arrow files in runs of record batches."""
    for file in files:
        if file.kind in ("parquet", "arrow"):
            from meshwright.data import tables  # needs pyarrow, which not everyone has

            ranges = tables.row_groups if file.kind == "parquet" else tables.record_batches
            for start, stop, size in ranges(file.path, options.field):
                yield Unit(file.kind, file.path, start, stop, size)
        elif file.size:
            yield Unit(file.kind, file.path, 0, file.size, file.size)


def cut_units(units: Iterable[Unit], target: int) -> Iterator[Unit]:
    """The same documents in the same order, in units of about `target` bytes where the kind can be cut."""
    for unit in units:
        pattern = BOUNDARIES.get(unit.kind)
        if pattern is None or unit.size <= target:
            yield unit
            continue
        with open(unit.path, "rb", buffering=0) as file:
            start = unit.start
            while start < unit.stop:
                stop = _boundary(file.fileno(), start + target, unit.stop, pattern)
                yield unit._replace(start=start, stop=stop, size=stop - start)
                start = stop


def _boundary(descriptor: int, position: int, stop: int, pattern: re.Pattern[bytes]) -> int:
    """The first place at or after `position` where a file may be cut, or `stop`."""
    window = 1 << 16
    begin = position - 1  # a cut may lie right at `position`, after the newline before it
    while begin < stop:
        found = pattern.search(os.pread(descriptor, window, begin))
        if found:
            return min(begin + found.end(), stop)
        if begin + window >= stop:
            break
        window *= 2
    return stop
