"""A machine in one file of text: all that was read of it, and nothing else. It can be read again anywhere. No torch.

A recorder reads like a Tree and keeps what it is asked for. What would tell one machine from all others is left out or
replaced: hardware addresses, serial numbers, all of a file but the lines that are looked at.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from meshwright.cluster.hardware import Hardware
from meshwright.cluster.nvml import NvmlGpu, ask_nvml, recorded_nvml
from meshwright.cluster.sysfs import ACS, access_control, is_empty_gid, read_hardware
from meshwright.cluster.tree import Tree
from meshwright.comm.nccl_variables import given_settings
from meshwright.errors import UserError

FORMAT = 1
_MOST_LINKS = 40
_LINES = {
    r"proc/cpuinfo": r"(processor|vendor_id|model name|cpu|CPU implementer|physical id|cpu cores)\s*\d*\s*:.*",
    r"(proc|sys/devices/system/node/node\d+)/meminfo": r".*MemTotal:.*",
    r"sys/.*/net/[^/]+/uevent": r"DEVTYPE=.*",
    r"etc/hosts": r"\s*127\..*",
    r"etc/nccl.conf": r"(NCCL|TORCH_NCCL|GLOO)_.*",
    r"proc/driver/nvidia/version": r"NVRM.*",
    r"proc/driver/nvidia/gpus/[^/]+/information": r"Model:.*",
    r"proc/driver/nvidia/gpus/[^/]+/numa_status": r"Node:.*",
}
"""Of these files the lines that are looked at; the others are short, and kept whole."""
_ADDRESSES = re.compile(
    r"(?P<kind>(?:en|wl|ww|sl|ib|iw|opa|roce)x)(?P<name>[0-9a-f]{16}|[0-9a-f]{12})(?![0-9a-f])"
    r"|(?P<bus>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
)
"""Names that are made of hardware addresses: udev's for interfaces and RDMA devices, Hyper-V's for what its bus has."""
_CONFIG_HEAD = 256
"""Bytes of a PCIe device's configuration before the part where access control is."""


@dataclass(frozen=True)
class Recorder(Tree):
    """Reads below a root, and remembers what was read, by folder: a file's text, a link as a list of its target."""

    folders: dict[str, dict[str, str | list[str]]] = field(default_factory=dict)
    configs: dict[str, str] = field(default_factory=dict)
    """Of PCIe configurations the one register that is looked at, in hexadecimal."""
    _masks: dict[str, int] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        """As a Tree."""
        found = super().text(path)
        if found is not None:
            place = self._place(path)
            kept = self._kept(place, found)
            if kept is not None:
                self._folder(posixpath.dirname(place))[posixpath.basename(place)] = kept
        return found

    def data(self, path: str) -> bytes:
        """As a Tree; only a bridge's access control is kept, as there are serial numbers beside it."""
        found = super().data(path)
        if len(found) > _CONFIG_HEAD:
            control = access_control(found)
            self.configs[self._place(path)] = "" if control is None else f"{control:04x}"
        return found

    def names(self, path: str) -> list[str]:
        """As a Tree; files are kept once they are read."""
        found = super().names(path)
        if found:
            place = self._place(path)
            self._folder(place)
            for name in found:
                if (self.root / place / name).is_symlink() or (self.root / place / name).is_dir():
                    self._place(f"{place}/{name}")
        return found

    def has(self, path: str) -> bool:
        """As a Tree."""
        found = super().has(path)
        if found:
            place = self._place(path)
            if not (self.root / place).is_dir():
                self._folder(posixpath.dirname(place)).setdefault(posixpath.basename(place), "")
        return found

    def real(self, path: str) -> Path:
        """As a Tree."""
        self._place(path)
        return super().real(path)

    def _folder(self, place: str) -> dict[str, str | list[str]]:
        return self.folders.setdefault(place, {})

    def _place(self, path: str) -> str:
        """Where links lead to, from the root on; the links are kept, and so are folders."""
        done, left, links = "", path.split("/"), 0
        while left:
            step = left.pop(0)
            if step in ("", "."):
                continue
            if step == "..":
                done = posixpath.dirname(done)
                continue
            here = posixpath.join(done, step)
            if (self.root / here).is_symlink() and links < _MOST_LINKS:
                target = os.readlink(self.root / here)
                if target.startswith("/"):
                    target = posixpath.relpath(target, f"/{done}")
                self._folder(done)[step] = [target]
                left, links = target.split("/") + left, links + 1
            else:
                done = here
                if (self.root / done).is_dir():
                    self._folder(done)
        return done

    def _kept(self, place: str, text: str) -> str | None:
        """What is told of a file; None where there is nothing to tell."""
        if re.search(r"/gids/\d+$", place):
            # Most of the table is empty, and an empty entry is as good as none.
            return None if is_empty_gid(text) else self._masked(text)
        if place.endswith("net/if_inet6"):
            return re.sub(r"^[0-9a-f]{32}", lambda found: self._masked(found[0]), text, flags=re.MULTILINE)
        if place.endswith("net/fib_trie"):
            return "\n".join(re.findall(r"\|-- \S+\s+/32 host LOCAL", text))
        for files, wanted in _LINES.items():
            if re.fullmatch(files, place):
                lines = [line for line in text.splitlines() if re.fullmatch(wanted, line)]
                return _cpuinfo(text) if place == "proc/cpuinfo" else "\n".join(lines)
        return text

    def _masked(self, address: str) -> str:
        """An IPv6 address with a number for its second half, which the hardware's address is in, unless it is IPv4."""
        digits = address.replace(":", "")
        if len(digits) != 32 or not digits.strip("0")[1:] or digits.startswith("0" * 20 + "ffff"):
            return address
        number = self._masks.setdefault(digits[16:], len(self._masks) + 1)
        masked = f"{digits[:16]}{number:016x}"
        return ":".join(re.findall("....", masked)) if ":" in address else masked


def _cpuinfo(text: str) -> str:
    """Every processor's number; the rest once for all that are alike."""
    blocks, seen = [], set()
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.splitlines() if re.fullmatch(_LINES["proc/cpuinfo"], line)]
        if re.search(r"^flags\s*:.*\bhypervisor\b", block, re.MULTILINE):
            lines.append("flags\t: hypervisor")
        numbers = [line for line in lines if line.startswith("processor")]
        rest = [line for line in lines if not line.startswith("processor")]
        blocks.append("\n".join(numbers + ([] if tuple(rest) in seen else rest)))
        seen.add(tuple(rest))
    return "\n\n".join(filter(None, blocks))


def record(
    root: Path = Path("/"),
    about: Callable[[Hardware], str] = lambda found: found.host,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """This machine, or the one whose trees are under `root`, as the text of a file."""
    here = root == Path("/")
    nvml, why = ask_nvml() if here else recorded_nvml(root / "nvml.json")
    recorder = Recorder(root)
    hardware = read_hardware(root, nvml or (), tree=recorder)
    recorder.text("etc/nccl.conf")
    for given in given_settings(environment, root).values():
        # Settings may name files, of which it matters whether they, or folders to write them to, are there.
        if given.value.startswith("/") and given.value.isprintable():
            recorder.has(given.value.lstrip("/"))
            recorder.has(posixpath.dirname(given.value).lstrip("/"))
    for name in ("sys", "proc"):
        recorder.has(name)
    recorder.folders.setdefault("proc/sys/kernel", {})["hostname"] = hardware.host
    return _without_addresses(_written(recorder, about(hardware), nvml, why))


def _written(recorder: Recorder, about: str, nvml: tuple[NvmlGpu, ...] | None, why: str) -> str:
    """One line for each folder, so that a person can read it and look for what should not be passed on."""
    # A folder that holds nothing, and that others show, need not be told.
    within = {posixpath.dirname(place) for place in recorder.folders} | {
        posixpath.dirname(one) for one in recorder.configs
    }
    folders = {
        place: kept for place, kept in sorted(recorder.folders.items()) if place and (kept or place not in within)
    }
    lines = [f' "meshwright recording": {FORMAT}', f' "about": {json.dumps(about)}']
    for key, rows in (("folders", folders), ("access control", dict(sorted(recorder.configs.items())))):
        body = ",\n".join(f"  {json.dumps(place)}: {json.dumps(kept, sort_keys=True)}" for place, kept in rows.items())
        lines.append(f' "{key}": {{\n{body}\n }}' if rows else f' "{key}": {{}}')
    if nvml is None:
        lines.append(f' "nvml missing": {json.dumps(why)}')
    else:
        body = ",\n".join(f"  {json.dumps(asdict(gpu))}" for gpu in nvml)
        lines.append(f' "nvml": [\n{body}\n ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _without_addresses(text: str) -> str:
    """With numbers for hardware addresses in names: as long, in the same order, the same wherever a name is."""
    found = {one["name"] or one["bus"] for one in _ADDRESSES.finditer(text)}
    # In order, so that what goes by the order of names, as NCCL does, finds the same.
    numbers = {address: number for number, address in enumerate(sorted(found, key=lambda one: (len(one), one)), 1)}

    def replaced(one: re.Match[str]) -> str:
        address = one["name"] or one["bus"]
        digits = iter(f"{numbers[address]:0{len(address) - address.count('-')}x}")
        return (one["kind"] or "") + "".join(letter if letter == "-" else next(digits) for letter in address)

    return _ADDRESSES.sub(replaced, text)


def has_replaced(text: str) -> bool:
    """Whether there are names in it that a recording put in the place of those that the machine has."""
    return any((one["name"] or one["bus"]).startswith("0" * 8) for one in _ADDRESSES.finditer(text))


@contextmanager
def opened(root: Path) -> Iterator[Path]:
    """A recorded machine as a folder: the folder itself, or a recording laid out in one until it is left."""
    if not root.is_file():
        yield root
        return
    with TemporaryDirectory(prefix="meshwright-recording-") as folder:
        lay_out(root, Path(folder))
        yield Path(folder)


def lay_out(recording: Path, folder: Path) -> None:
    """The trees of a recorded machine, as files and links in a folder that is empty."""
    try:
        parts = json.loads(recording.read_text(encoding="utf-8"))
        if not isinstance(parts, dict) or parts.get("meshwright recording") != FORMAT:
            raise ValueError(f'it has no "meshwright recording": {FORMAT}')
        for key in ("folders", "access control"):
            if key not in parts:
                raise ValueError(f'it has no "{key}"')
        _lay_files(parts, folder)
        _lay_links(parts["folders"], folder)
        _check_whole(parts, folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{recording} is no recording of `meshwright doctor --record`: {error}") from error


def _lay_files(parts: Mapping[str, Any], folder: Path) -> None:
    for place, kept in parts["folders"].items():
        (folder / _within(place)).mkdir(parents=True, exist_ok=True)
        for name, content in kept.items():
            if isinstance(content, str):
                (folder / _within(place) / _name(name)).write_text(content + "\n", encoding="utf-8")
            elif not (isinstance(content, list) and len(content) == 1 and isinstance(content[0], str)):
                raise ValueError(f"{name!r} in {place!r} is neither a file's text nor a link")
    for place, control in parts["access control"].items():
        (folder / _within(place)).write_bytes(_config(control))
    if "nvml" in parts:
        (folder / "nvml.json").write_text(json.dumps(parts["nvml"]), encoding="utf-8")
    elif "nvml missing" in parts:
        (folder / "nvml.json").write_text(json.dumps(str(parts["nvml missing"])), encoding="utf-8")


def _lay_links(folders: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """After the files, so that none is written through a link; one that leads out of the folder is refused."""
    made = []
    for place, kept in folders.items():
        for name, content in kept.items():
            if isinstance(content, list):
                made.append(folder / _within(place) / _name(name))
                made[-1].symlink_to(_shown(content[0]))
    for link in made:
        if not Path(os.path.realpath(link)).is_relative_to(os.path.realpath(folder)):
            raise ValueError(f"the link {str(link.relative_to(folder))!r} leads out of it")


def _check_whole(parts: Mapping[str, Any], folder: Path) -> None:
    """Raise for what would be shown as a machine that has little."""
    for name in ("sys", "proc"):
        if not (folder / name).is_dir():
            raise ValueError(f"it has no {name}")
    if "nvml" in parts and recorded_nvml(folder / "nvml.json")[0] is None:
        raise ValueError("what NVML answered is damaged")


def _within(place: str) -> str:
    if place.startswith("/") or ".." in place.split("/"):
        raise ValueError(f"{place!r} leads out of it")
    return _shown(place)


def _name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name:
        raise ValueError(f"{name!r} is no name of a file")
    return _shown(name)


def _shown(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{name!r} has characters that do not print")
    return name


def _config(control: str) -> bytes:
    """A PCIe configuration with access control alone, or without one."""
    if not control:
        return bytes(_CONFIG_HEAD + 8)
    return bytes(_CONFIG_HEAD) + (ACS | 1 << 16).to_bytes(4, "little") + bytes(2) + bytes.fromhex(control)[::-1]
