"""Turns text into token ids and back: the built-in byte tokenizer, or a Hugging Face tokenizer from local files.

Nothing is downloaded and no code from a tokenizer's folder is run. The text of a document never turns into a
control token: the end-of-document id comes only from the packer, so a document cannot forge its own end.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.errors import DataError

BYTES = "bytes"
MARKER = "byte_tokenizer.json"
KNOWN_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>")


class Tokenizer(ABC):
    """What every tokenizer offers; `end` is the id that ends a document, or None where there is none."""

    name: str
    vocab_size: int
    end: int | None
    digest: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end-of-document id."""

    @abstractmethod
    def encode_documents(self, documents: Sequence[bytes]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The ids of whole UTF-8 documents in one flat array, each with its end id, and the length of each."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; ids that stand for no text give none."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write into a folder what `load_tokenizer(folder)` reads back."""


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8, 256 ends a document."""

    def __init__(self) -> None:
        self.name = BYTES
        self.vocab_size = 257
        self.end = 256
        self.digest = xxhash.xxh3_128_hexdigest(b"bytes of UTF-8, 256 ends a document")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        # A placeholder byte after each document becomes the end id: one copy and one widening, whatever their number.
        ids = np.frombuffer(b"\0".join(documents) + b"\0", dtype=np.uint8).astype(np.uint16)
        lengths = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents)) + 1
        ids[np.cumsum(lengths) - 1] = 256
        return ids, lengths

    def decode(self, ids: Iterable[int]) -> str:
        # 0xff never occurs in UTF-8, so an id that is no byte shows up as the replacement character.
        kept = bytes(i if 0 <= i < 256 else 0xFF for i in ids if i != self.end)
        return kept.decode(errors="replace")

    def save(self, folder: str | Path) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / MARKER).write_text(json.dumps({"tokenizer": BYTES, "vocab_size": self.vocab_size}) + "\n")


class FileTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, made from the bytes of its files."""

    def __init__(self, name: str, files: Mapping[str, bytes], end_name: str | None) -> None:
        self._files = dict(files)
        self._library = _build(name, files)
        self._library.no_truncation()
        self._library.no_padding()
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        if end_name is not None and end_name not in vocabulary:
            raise DataError(
                f"tokenizer {name}: tokenizer_config.json names '{end_name}' as the end of a document, but the "
                "vocabulary has no such token; correct `eos_token` there, or remove it to use the usual names"
            )
        self._end_name = end_name or next((known for known in KNOWN_ENDS if known in vocabulary), None)
        if self._end_name is not None:
            self._library.add_special_tokens([self._end_name])
        self._library.encode_special_tokens = True  # read control tokens that stand in a text as plain text
        self.name = name
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # ids may have gaps
        self.end = None if self._end_name is None else vocabulary[self._end_name]
        self.digest = _digest(files, self._end_name)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        texts = [document.decode() for document in documents]
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=False)
        pieces: list[list[int]] = [encoding.ids for encoding in encodings]
        if self.end is not None:
            for piece in pieces:
                piece.append(self.end)
        lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
        return np.fromiter(chain.from_iterable(pieces), dtype=np.uint32, count=int(lengths.sum())), lengths

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._library.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in self._files.items():
            (folder / file).write_bytes(content)
        if self._end_name is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": self._end_name}) + "\n")


class UnknownTokenizer(Tokenizer):
    """Stands for the tokenizer of tokens that came without one: it shows ids, and takes no text."""

    def __init__(self) -> None:
        self.name = "not known"
        self.vocab_size = 0
        self.end = None
        self.digest = ""

    def encode(self, text: str) -> list[int]:
        raise DataError("the tokens came without their tokenizer; set data.tokenizer to it")

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        raise DataError("the tokens came without their tokenizer; set data.tokenizer to it")

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(map(str, ids))

    def save(self, folder: str | Path) -> None:
        """There is nothing to write."""


def _build(name: str, files: Mapping[str, bytes]) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"tokenizer {name} needs the `tokenizers` package; install it with pip install 'meshwright[hf]', "
            "or use the built-in tokenizer 'bytes'"
        ) from error
    try:
        if "tokenizer.json" in files:
            return tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        vocabulary = json.loads(files["vocab.json"])
        lines = files["merges.txt"].decode().split("\n")
        pairs = (line.rstrip("\r").split(" ") for line in lines if line.strip() and not line.startswith("#version"))
        merges = [(left, right) for left, right in pairs]
        library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    except Exception as error:  # the library raises bare Exception for what it cannot parse
        raise DataError(
            f"tokenizer {name} cannot be read: {error}; expected is a Hugging Face tokenizer.json, "
            "or GPT-2's vocab.json with merges.txt"
        ) from error
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return library


def _digest(files: Mapping[str, bytes], end_name: str | None) -> str:
    state = xxhash.xxh3_128(f"end {end_name}\n".encode())
    for file in sorted(files):
        state.update(f"{file} {len(files[file])}\n".encode())
        state.update(files[file])
    return state.hexdigest()


def _end_name(folder: Path) -> str | None:
    """The token that `tokenizer_config.json` names as the end of a document, if it does."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        named = json.loads(path.read_bytes()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is not a JSON object: {error}; correct or remove it") from error
    return named.get("content") if isinstance(named, dict) else named


def _find_files(path: Path) -> dict[str, Path]:
    """The files that define the tokenizer at a path, by their usual names."""
    if path.is_dir():
        names = ["tokenizer.json"] if (path / "tokenizer.json").is_file() else ["vocab.json", "merges.txt"]
        return {name: path / name for name in names}
    if path.name == "vocab.json":
        return {name: path.parent / name for name in ("vocab.json", "merges.txt")}
    return {"tokenizer.json": path} if path.suffix == ".json" else {}


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer 'bytes', or the one in a local tokenizer.json, vocab.json + merges.txt, or folder of these."""
    name = str(name_or_path)
    path = Path(name)
    if name == BYTES or (path / MARKER).is_file():
        return ByteTokenizer()
    allowed = (
        "give 'bytes', the path of a tokenizer.json, or a folder with tokenizer.json or with vocab.json and merges.txt"
    )
    if not path.exists():
        raise DataError(f"there is no tokenizer at '{name}' (names are not downloaded); {allowed}")
    files = _find_files(path)
    if not files:
        raise DataError(f"'{name}' is not a tokenizer file that can be read; {allowed}")
    folder = path if path.is_dir() else path.parent
    missing = [str(file) for file in files.values() if not file.is_file()]
    if missing:
        present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
        raise DataError(f"tokenizer '{name}' lacks {' and '.join(missing)}; {folder} holds {present}; {allowed}")
    return FileTokenizer(name, {file: where.read_bytes() for file, where in files.items()}, _end_name(folder))


def saved_digest(folder: str | Path) -> str | None:
    """The digest of a tokenizer that `save` wrote, without loading it; None where files are missing."""
    folder = Path(folder)
    if (folder / MARKER).is_file():
        return ByteTokenizer().digest
    try:
        files = {file: path.read_bytes() for file, path in _find_files(folder).items()}
        return _digest(files, _end_name(folder))
    except (OSError, DataError):
        return None
