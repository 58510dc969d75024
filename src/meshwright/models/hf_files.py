"""The safetensors files of a Hugging Face folder: one file, or shards with an index; read lazily, written in shards."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.errors import CheckpointError
from meshwright.models.hf_weights import Piece, join

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorFiles:
    """The tensors of a folder's files; nothing is read before it is asked for."""

    def __init__(self, folder: Path, handles: Mapping[str, Any]) -> None:
        self.folder = folder
        self._handles = handles
        self.shapes = {name: tuple(handle.get_slice(name).get_shape()) for name, handle in handles.items()}

    def read(self, name: str, part: tuple[slice | int, ...] = ()) -> Tensor:
        """A tensor, or the part of it at that index."""
        handle = self._handles[name]
        value: Tensor = handle.get_slice(name)[part] if part else handle.get_tensor(name)
        return value

    def dtype(self, names: Iterable[str], given: torch.dtype | None = None) -> torch.dtype:
        """The dtype to load these tensors in: the given one or their own; where they differ, the commonest, said so."""
        count: Counter[str] = Counter()
        for name in set(names):
            count[self._handles[name].get_slice(name).get_dtype()] += math.prod(self.shapes[name])
        if strange := sorted(count.keys() - _DTYPES.keys()):
            known = ", ".join(_DTYPES)
            raise CheckpointError(f"{self.folder}: weights of type {', '.join(strange)}; supported types: {known}")
        if given is not None:
            return given
        most = count.most_common(1)[0][0]
        if len(count) > 1:
            others = ", ".join(sorted(count.keys() - {most}))
            warnings.warn(f"{self.folder}: weights of type {others} are converted to {most}", stacklevel=3)
        return _DTYPES[most]


@contextmanager
def open_files(folder: Path) -> Iterator[TensorFiles]:
    """Open the folder's safetensors files; pickle files are refused."""
    with ExitStack() as stack:
        if (folder / SINGLE).exists():
            handle = stack.enter_context(_open(folder / SINGLE))
            yield TensorFiles(folder, dict.fromkeys(handle.keys(), handle))
            return
        if not (folder / INDEX).exists():
            raise CheckpointError(_nothing_to_read(folder))
        places = _read_index(folder / INDEX)
        handles = {file: stack.enter_context(_open(folder / file)) for file in sorted(set(places.values()))}
        held = {file: set(handle.keys()) for file, handle in handles.items()}
        if lost := [f"{name} in {file}" for name, file in places.items() if name not in held[file]]:
            raise CheckpointError(f"{folder / INDEX} names tensors that are not there: {lost[0]} (of {len(lost)})")
        yield TensorFiles(folder, {name: handles[file] for name, file in places.items()})


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is named in {INDEX} but is not there; fetch the folder again") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error


def _read_index(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = set(places.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: it has no readable weight_map") from error
    if outside := sorted(str(file) for file in files if not isinstance(file, str) or Path(file).name != file):
        raise CheckpointError(f"{path} names a file outside of its folder: {outside[0]}")
    return dict(places)


def _nothing_to_read(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles:
        return f"{folder} has neither {SINGLE} nor {INDEX}"
    return (
        f"{folder} has its weights as pickle ({pickles[0]}), which can run code when it is read and is never opened. "
        "Convert it once, where you trust it: transformers.AutoModelForCausalLM.from_pretrained(old)"
        ".save_pretrained(new) writes safetensors"
    )


def write_files(folder: Path, pieces: Iterable[Piece], parameters: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """Write the tensors that the pieces make up, as one file or as shards of at most that size with an index."""
    parts: dict[str, list[Piece]] = {}
    for piece in pieces:
        parts.setdefault(piece.theirs, []).append(piece)
    sizes = {
        name: math.prod(group[0].their_shape) * parameters[group[0].ours].element_size()
        for name, group in parts.items()
    }
    shards = _shards(sizes, max_shard_bytes)
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: join(parts[name], parameters).cpu().contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """The names in order, in groups that stay under the limit; a tensor over it is alone in its group."""
    shards: list[list[str]] = []
    room = -1
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards
