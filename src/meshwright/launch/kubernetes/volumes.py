"""Volumes of the pods, and whether what a run reads and writes lies on them."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.config import RunConfig
from meshwright.data.sources import STANDARD_LIBRARY
from meshwright.errors import ConfigError
from meshwright.launch.kubernetes import words

RUN_MOUNT, HOSTFILE_MOUNT, SHM_MOUNT = "/meshwright", "/job", "/dev/shm"
_TAKEN_NAMES = ("meshwright", "hostfile", "shm")
_TAKEN_FOLDERS = (RUN_MOUNT, HOSTFILE_MOUNT, "/dev", "/proc", "/sys", "/etc", "/usr", "/bin", "/lib", "/run")
_STORE = re.compile(r"(s3|gs)://")
_SHAPE = "NAME=pvc:CLAIM:/mount[:ro], NAME=emptydir[:SIZE]:/mount or NAME=hostpath:/folder:/mount[:ro]"


@dataclass(frozen=True)
class Volume:
    """Storage that every pod sees at one place."""

    name: str
    kind: Literal["pvc", "emptydir", "hostpath"]
    source: str
    """Claim, size (may be empty) or folder."""
    mount: str
    read_only: bool = False

    @property
    def lasts(self) -> bool:
        """Whether what is written there outlives the pod."""
        return self.kind != "emptydir"

    def holds(self, path: str) -> bool:
        """Whether an absolute path lies on it."""
        return path == self.mount or path.startswith(self.mount + "/")

    def as_volume(self) -> dict[str, Any]:
        """Of a pod."""
        match self.kind:
            case "pvc":
                claim = {"claimName": self.source, **({"readOnly": True} if self.read_only else {})}
                return {"name": self.name, "persistentVolumeClaim": claim}
            case "hostpath":
                return {"name": self.name, "hostPath": {"path": self.source, "type": "Directory"}}
        return {"name": self.name, "emptyDir": {"sizeLimit": self.source} if self.source else {}}

    def as_mount(self) -> dict[str, Any]:
        """Of a container."""
        return {"name": self.name, "mountPath": self.mount, **({"readOnly": True} if self.read_only else {})}


def parse_volume(word: str, host_paths: bool) -> Volume:
    """A volume as people type it."""
    option = f"--volume {word}"
    name, given, rest = word.partition("=")
    kind, *parts = rest.split(":")
    read_only = parts[-1:] == ["ro"]
    if read_only:
        parts.pop()
    kind = kind.lower()
    if kind == "emptydir" and len(parts) == 1:
        parts.insert(0, "")
    if not given or kind not in ("pvc", "emptydir", "hostpath") or len(parts) != 2:
        raise ConfigError(f"{option} is not {_SHAPE}")
    source, mount = parts
    words.label(option, name)
    words.folder(option, mount)
    if name in _TAKEN_NAMES or any(mount == taken or mount.startswith(taken + "/") for taken in _TAKEN_FOLDERS):
        raise ConfigError(f"{option}: the name or the folder is taken by the pod itself; choose another one")
    if kind == "pvc":
        return Volume(name, "pvc", words.object_name(option, source), mount, read_only)
    if kind == "hostpath":
        words.folder(option, source)
        if not host_paths:
            raise ConfigError(
                f"{option} opens a folder of the machines to the pods, which most clusters forbid; add "
                "--allow-host-path if that is meant, or take a claim: NAME=pvc:CLAIM:/mount"
            )
        return Volume(name, "hostpath", source, mount, read_only)
    if read_only:
        raise ConfigError(f"{option}: an empty folder that nobody can write to holds nothing; drop :ro")
    return Volume(name, "emptydir", words.memory(option, source) if source else "", mount)


def parse_volumes(given: list[str], host_paths: bool) -> tuple[Volume, ...]:
    """All of them; no two of one name, none inside another."""
    found: list[Volume] = []
    for word in given:
        volume = parse_volume(word, host_paths)
        for other in found:
            if other.name == volume.name or other.holds(volume.mount) or volume.holds(other.mount):
                raise ConfigError(
                    f"--volume {word} and --volume {other.name}=...:{other.mount} are in each other's way"
                )
        found.append(volume)
    return tuple(found)


def home_of(volumes: tuple[Volume, ...], given: str | None) -> str:
    """Where relative paths of the run file begin."""
    if given is not None:
        return words.folder("--workdir", given)
    return next((volume.mount for volume in volumes if volume.lasts and not volume.read_only), "/tmp")


def check_places(config: RunConfig, volumes: tuple[Volume, ...], home: str) -> None:
    """Refuse a run whose folders the pods would not see, could not write, or would lose."""
    for setting, value, written in _places(config):
        if _STORE.match(value) and setting == "checkpoint.dir":
            continue
        path = posixpath.normpath(posixpath.join(home, value))
        volume = next((one for one in volumes if one.holds(path)), None)
        where = f"{setting}={value}" + ("" if value.startswith("/") else f" ({path} in the pods)")
        if volume is None:
            raise ConfigError(
                f"{where} lies on no volume of the pods: add --volume {_suggestion(setting)} "
                "with the claim's name and where it is mounted, and keep the path below that"
            )
        if written and volume.read_only:
            raise ConfigError(f"{where} is written to, and --volume {volume.name} is mounted :ro; drop the :ro")
        if not volume.lasts and (written or not config.data.sources):
            raise ConfigError(
                f"{where} is on --volume {volume.name}, an emptydir, which begins empty and ends with its pod; take a "
                f"claim: --volume {_suggestion(setting)}"
            )


def _suggestion(setting: str) -> str:
    name = "data" if setting.startswith(("data.", "model.")) else "runs"
    return f"{name}=pvc:CLAIM:/{name}"


def _places(config: RunConfig) -> Iterator[tuple[str, str, bool]]:
    """Settings that name files or folders, what they name, and whether that is written to."""
    yield "run.dir", config.run.dir, True
    if config.checkpoint.dir is not None:
        yield "checkpoint.dir", config.checkpoint.dir, True
    if config.data.path is not None:
        yield "data.path", config.data.path, False
    for share in config.data.mix:
        yield "data.mix path", share.path, False
    for source in config.data.sources:
        if source != STANDARD_LIBRARY:
            yield "data.sources", source, False
    if config.data.tokenizer not in (None, "bytes"):
        yield "data.tokenizer", str(config.data.tokenizer), False
    if config.model.from_hf is not None:
        yield "model.from_hf", config.model.from_hf, False
    if config.observe.prometheus_token_file is not None:
        yield "observe.prometheus_token_file", config.observe.prometheus_token_file, False
    cluster = config.parallel.cluster or ""
    if cluster.endswith(".toml") or "/" in cluster:
        yield "parallel.cluster", cluster, False
