"""The files of a checkpoint with every byte checked: headers against the manifest, pieces by their digests."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import xxhash

from meshwright.checkpoint.format import DamageError, Manifest, Piece, digest_of, read_manifest
from meshwright.checkpoint.place import Place, open_place
from meshwright.checkpoint.safetensors_file import Header, read_header
from meshwright.errors import CheckpointError

AT_A_TIME = 8 * 2**20


@dataclass(frozen=True)
class Damage:
    """What is wrong with a checkpoint: in which file, in which tensor (none: the file as a whole)."""

    file: str
    tensor: str | None
    what: str


class CheckedFiles:
    """Reads pieces of one checkpoint folder."""

    def __init__(self, folder: Place | str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        self.folder = folder if isinstance(folder, Place) else open_place(os.fspath(folder))
        self.manifest = manifest or read_manifest(self.folder)
        self._headers: dict[str, Header] = {}

    def header(self, file: str) -> Header:
        """A file's header, checked against the manifest; read once."""
        if file not in self._headers:
            self._headers[file] = self._read_header(file)
        return self._headers[file]

    def _read_header(self, file: str) -> Header:
        path = self.folder.path_of(file)
        try:
            header = read_header(self.folder, file)
        except FileNotFoundError:
            raise DamageError(f"{path} is missing") from None
        except OSError as error:
            raise DamageError(f"{path} cannot be read: {error.strerror or error}") from None
        except CheckpointError as error:
            raise DamageError(str(error)) from None
        expected = self.manifest.files.get(file)
        if expected is not None and header.file_bytes != expected.nbytes:
            raise DamageError(f"{path} is damaged: {header.file_bytes:,} bytes long, and was saved {expected.nbytes:,}")
        if expected is not None and header.digest != expected.header:
            raise DamageError(f"{path} is damaged: its header is not what was saved")
        return header

    def length(self, piece: Piece, dtype: str) -> int:
        """How many bytes a piece has, seen to lie in its file."""
        span = self.header(piece.file).spans.get(piece.name)
        if span is None or span.shape != piece.shape or span.dtype != dtype:
            raise DamageError(f"{self.folder.path_of(piece.file)} is damaged: it has no {piece.name} as it was saved")
        return span.length

    def read(self, piece: Piece, buffer: memoryview) -> None:
        """Fill the buffer, as long as the piece, with its bytes."""
        path = self.folder.path_of(piece.file)
        span = self.header(piece.file).spans[piece.name]
        try:
            found = self.folder.read(piece.file, span.start, buffer)
        except OSError as error:
            raise DamageError(f"{path} cannot be read: {error.strerror or error}") from None
        if found != span.length:
            raise DamageError(f"{path} is damaged: {piece.name} is cut short")
        if digest_of(buffer) != piece.digest:
            raise DamageError(f"{path} is damaged: {piece.name} is not what was saved")

    def check(self, piece: Piece, dtype: str) -> None:
        """Raise unless a piece is what was saved; however large it says to be, it takes little memory."""
        path, start, left = self.folder.path_of(piece.file), self.header(piece.file).spans, self.length(piece, dtype)
        digest, at = xxhash.xxh3_128(), start[piece.name].start
        buffer = memoryview(bytearray(min(left, AT_A_TIME)))
        while left:
            part = buffer[: min(left, AT_A_TIME)]
            try:
                found = self.folder.read(piece.file, at, part)
            except OSError as error:
                raise DamageError(f"{path} cannot be read: {error.strerror or error}") from None
            if found != len(part):
                raise DamageError(f"{path} is damaged: {piece.name} is cut short")
            digest.update(part)
            at, left = at + found, left - found
        if digest.hexdigest() != piece.digest:
            raise DamageError(f"{path} is damaged: {piece.name} is not what was saved")


def find_damage(
    folder: Place,
    files: set[str] | None = None,
    threads: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> list[Damage]:
    """Everything that is wrong with a checkpoint, or with some of its files; nothing when it is what was saved.

    Reads with that many threads; with one, in the caller's own, calling `between` after every piece.
    """
    try:
        checked = CheckedFiles(folder)
    except CheckpointError as error:
        return [Damage("manifest.json", None, str(error))]
    except OSError as error:
        return [Damage("manifest.json", None, f"{folder} cannot be read: {error.strerror or error}")]
    broken: dict[str, Damage] = {}
    for file in sorted({piece.file for entry in checked.manifest.tensors.values() for piece in entry.pieces}):
        if files is None or file in files:
            try:
                checked.header(file)
            except CheckpointError as error:
                broken[file] = Damage(file, None, str(error))
    pieces = [
        (name, entry.dtype, piece)
        for name, entry in checked.manifest.tensors.items()
        for piece in entry.pieces
        if piece.file not in broken and (files is None or piece.file in files)
    ]

    def look(job: tuple[str, str, Piece]) -> Damage | None:
        name, dtype, piece = job
        try:
            checked.check(piece, dtype)
        except CheckpointError as error:
            return Damage(piece.file, name, str(error))
        return None

    found: list[Damage | None] = []
    if threads == 1:
        for piece in pieces:
            found.append(look(piece))
            between()
    else:
        with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
            found = list(pool.map(look, pieces))
    return [*broken.values(), *(damage for damage in found if damage is not None)]
