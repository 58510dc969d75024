"""Where checkpoints lie: a local folder, or a prefix of an object store such as s3:// or gs:// through fsspec.

A place holds files by plain names. Nothing that a name or a link says can lead out of it: names with a slash, links,
pipes and devices are refused. What `create` wrote is on the disk, or in the store, when it returns.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from meshwright.errors import CheckpointError, ConfigError, StoreError, UserError
from meshwright.files import flush, write_atomically
from meshwright.secrets import Secrets, login_of, without_login

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BEGUN = re.compile(r"\.[A-Za-z0-9_][A-Za-z0-9._-]*\.unfinished-[0-9a-f]{8}")

_WHAT_TO_CHECK = {
    "s3": "check the endpoint (AWS_ENDPOINT_URL), the credentials (AWS_ACCESS_KEY_ID or a profile) and the network",
    "gs": "check the credentials (GOOGLE_APPLICATION_CREDENTIALS) and the network",
    "": "check its address, the credentials and the network",
}
"""By the store's scheme, when it does not answer."""


class Place(ABC):
    """A folder of files."""

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def child(self, name: str) -> Place:
        """A folder in this one."""

    @abstractmethod
    def prepare(self) -> None:
        """Make the folder, if it is not there."""

    @abstractmethod
    def names(self) -> list[str]:
        """What lies here, sorted; nothing where there is no folder."""

    @abstractmethod
    def holds(self, name: str) -> bool:
        """Whether a folder of that name was published here."""

    @abstractmethod
    def size(self, name: str) -> int:
        """The length of a file; FileNotFoundError where there is none."""

    @abstractmethod
    def read(self, name: str, start: int, buffer: memoryview) -> int:
        """Fill the buffer from a position of a file; gives how much there was."""

    @abstractmethod
    def create(self, name: str) -> Any:
        """A context with a new file to write."""

    @abstractmethod
    def put(self, name: str, content: bytes) -> None:
        """Write a small file, in place of what was there."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the folder with all that is in it; at once or, after a crash, not at all."""

    @abstractmethod
    def free(self) -> int | None:
        """Bytes that still fit; None where nobody can say."""

    @abstractmethod
    def begin(self, name: str) -> Place:
        """A fresh folder to write what shall become `name`."""

    @abstractmethod
    def key(self) -> str:
        """What tells another rank which folder this begun one is."""

    @abstractmethod
    def own_name(self, file: str) -> str:
        """The name under which a file is written to a folder that was begun: no other writer has it."""

    @abstractmethod
    def discard(self, files: Iterable[str]) -> None:
        """Remove a folder that was begun and not published, or the files of it that this rank wrote."""

    @abstractmethod
    def rejoin(self, key: str) -> Place:
        """The folder that another rank has begun here."""

    @abstractmethod
    def publish(self, begun: Place, name: str) -> Place:
        """Make what was begun visible under its name, at once."""

    @abstractmethod
    def set_aside(self, name: str) -> None:
        """Give a folder that is in the way another name, out of the way."""

    @abstractmethod
    def clear_unfinished(self) -> None:
        """Remove what interrupted writes left behind; nobody else may be writing."""

    def read_all(self, name: str, limit: int) -> bytes:
        """A file's content, unless it is longer than that."""
        size = self.size(name)
        if size > limit:
            raise CheckpointError(f"{self.path_of(name)} has {size:,} bytes, more than the {limit:,} that it may have")
        buffer = bytearray(size)
        found = self.read(name, 0, memoryview(buffer))
        return bytes(buffer[:found])

    def path_of(self, name: str) -> str:
        """A file's path as people write it."""
        return f"{self}/{name}"

    def checked(self, name: str) -> str:
        """The name, if it is one that stays in the folder."""
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{self}: '{name}' is not a name of a file in that folder")
        return name


class LocalPlace(Place):
    """A folder of this machine, or of a file system that all machines share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalPlace:
        path = self.path / self.checked(name)
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link; a checkpoint is a folder of its own")
        return LocalPlace(path)

    def prepare(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise CheckpointError(f"{self.path} is not a folder") from None

    def holds(self, name: str) -> bool:
        return name in self.names()

    def size(self, name: str) -> int:
        with self._opened(name) as handle:
            return os.fstat(handle).st_size

    def read(self, name: str, start: int, buffer: memoryview) -> int:
        with self._opened(name) as handle:
            done = 0
            while done < len(buffer):
                count = os.preadv(handle, [buffer[done:]], start + done)
                if count == 0:
                    break
                done += count
            return done

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        path = self.path / self.checked(name)
        try:
            # Without following links, and without waiting for the other end of a pipe.
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CheckpointError(f"{path} is a link; a checkpoint holds plain files only") from None
            raise
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise CheckpointError(f"{path} is not a plain file")
            yield handle
        finally:
            os.close(handle)

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        path = self.path / self.checked(name)
        with path.open("xb", buffering=2**20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def put(self, name: str, content: bytes) -> None:
        write_atomically(self.path / self.checked(name), content.decode())

    def drop(self, name: str) -> None:
        (self.path / self.checked(name)).unlink(missing_ok=True)

    def remove(self) -> None:
        hidden = self.path.with_name(f".{self.path.name}.removed-{uuid.uuid4().hex[:8]}")
        try:
            self.path.rename(hidden)
        except FileNotFoundError:
            return
        shutil.rmtree(hidden, ignore_errors=True)

    def free(self) -> int | None:
        return shutil.disk_usage(self.path).free

    def begin(self, name: str) -> LocalPlace:
        begun = self.path / f".{self.checked(name)}.unfinished-{uuid.uuid4().hex[:8]}"
        begun.mkdir(parents=True)
        return LocalPlace(begun)

    def key(self) -> str:
        return self.path.name

    def own_name(self, file: str) -> str:
        # The whole folder is that of one writer.
        return file

    def discard(self, files: Iterable[str]) -> None:
        self.remove()

    def rejoin(self, key: str) -> LocalPlace:
        if not _BEGUN.fullmatch(key):
            raise CheckpointError(f"{self}: '{key}' is not a checkpoint that was begun")
        return LocalPlace(self.path / key)

    def publish(self, begun: Place, name: str) -> LocalPlace:
        assert isinstance(begun, LocalPlace)
        target = self.child(name)
        flush(begun.path)
        # Fails where there is something already: a folder is never replaced.
        begun.path.rename(target.path)
        flush(self.path)
        flush(self.path.parent)
        return target

    def set_aside(self, name: str) -> None:
        old = self.path / self.checked(name)
        old.rename(old.with_name(f"{name}.damaged-{uuid.uuid4().hex[:8]}"))
        flush(self.path)

    def clear_unfinished(self) -> None:
        for name in self.names():
            if re.fullmatch(r"\..+\.(unfinished|removed)-[0-9a-f]{8}|\.step-\d+\.\d+", name):
                shutil.rmtree(self.path / name, ignore_errors=True)


class RemotePlace(Place):
    """A prefix of an object store. It has no renames: a folder is there once its manifest, the last file, is."""

    def __init__(self, url: str, tag: str = "") -> None:
        """`tag` is in the names of files that a begun folder gets: a writer that was replaced and wakes up again must
        not touch those of its successor."""
        self._tag = tag
        try:
            self._files, self._root = _store(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{without_login(url)} cannot be used: {error}; pip install 'meshwright[s3]' or 'meshwright[gs]'"
            ) from None
        self._address = url.rstrip("/")
        """The place with its login, if it has one; `url` is what people may see."""
        self.url = without_login(self._address)

    def __str__(self) -> str:
        return self.url

    def child(self, name: str) -> RemotePlace:
        return RemotePlace(f"{self._address}/{self.checked(name)}")

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn what the store's own library raises when it cannot be reached, or refuses, into words."""
        try:
            yield
        except (FileNotFoundError, FileExistsError, UserError):
            raise
        except Exception as error:
            scheme = self.url.partition(":")[0]
            raise StoreError(
                f"{self.url} cannot be used from {socket.gethostname()}: {type(error).__name__}: "
                f"{Secrets.known([self._address]).redact(str(error))}; "
                f"{_WHAT_TO_CHECK.get(scheme, _WHAT_TO_CHECK[''])}"
            ) from error

    def _key(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{self.checked(name)}"

    def prepare(self) -> None:
        pass

    def names(self) -> list[str]:
        try:
            with self._asking():
                self._files.invalidate_cache()
                found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(name for name in {path.rstrip("/").rsplit("/", 1)[-1] for path in found} if name)

    def holds(self, name: str) -> bool:
        return "manifest.json" in self.child(name).names()

    def size(self, name: str) -> int:
        with self._asking():
            return int(self._files.info(self._key(name))["size"])

    def read(self, name: str, start: int, buffer: memoryview) -> int:
        if not len(buffer):
            return 0
        with self._asking():
            found = self._files.cat_file(self._key(name), start=start, end=start + len(buffer))
        buffer[: len(found)] = found
        return len(found)

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        with self._asking():
            file = self._files.open(self._key(name), "wb")
        try:
            yield file
        finally:
            with self._asking():
                file.close()

    def put(self, name: str, content: bytes) -> None:
        with self._asking():
            self._files.pipe_file(self._key(name), content)

    def drop(self, name: str) -> None:
        if name in self.names():
            with self._asking():
                self._files.rm_file(self._key(name))

    def remove(self) -> None:
        # The manifest first: without it the folder is no checkpoint any more.
        names = sorted(self.names(), key=lambda name: not name.endswith(".json"))
        for name in names:
            with self._asking():
                self._files.rm_file(self._key(name))
        self._files.invalidate_cache()

    def free(self) -> int | None:
        return None

    def begin(self, name: str) -> RemotePlace:
        return self.rejoin(f"{self.checked(name)}:{uuid.uuid4().hex[:8]}")

    def key(self) -> str:
        return f"{self.url.rsplit('/', 1)[-1]}:{self._tag}"

    def own_name(self, file: str) -> str:
        stem, _, ending = file.rpartition(".")
        return f"{stem}-{self._tag}.{ending}"

    def discard(self, files: Iterable[str]) -> None:
        for file in files:
            self.drop(file)

    def rejoin(self, key: str) -> RemotePlace:
        name, _, tag = key.partition(":")
        return RemotePlace(f"{self._address}/{self.checked(name)}", tag)

    def publish(self, begun: Place, name: str) -> Place:
        self._files.invalidate_cache()
        return begun

    def set_aside(self, name: str) -> None:
        old = f"{self._root.rstrip('/')}/{self.checked(name)}"
        with self._asking():
            self._files.mv(old, f"{old}.damaged-{uuid.uuid4().hex[:8]}", recursive=True)

    def clear_unfinished(self) -> None:
        for name in self.names():
            if re.fullmatch(r"step-\d+", name) and "manifest.json" not in self.child(name).names():
                self.child(name).remove()


def _store(url: str) -> tuple[Any, str]:
    """The file system of a URL and the prefix in it. A login in it is the key of an s3 store, whose library does not
    look there."""
    import fsspec

    login = login_of(url)
    if login is not None and url.startswith("s3://"):
        return fsspec.core.url_to_fs(without_login(url), key=login[0], secret=login[1])
    return fsspec.core.url_to_fs(url)


def open_place(where: str | Path) -> Place:
    """The place that a path or a URL names."""
    text = str(where)
    if _URL.match(text):
        return RemotePlace(text)
    return LocalPlace(Path(where))


@contextmanager
def _naming_the_setting(place: Place) -> Iterator[None]:
    """Whatever the operating system refuses is told with the setting to change."""
    try:
        yield
    except OSError as error:
        text = f"checkpoint.dir={place} cannot be written: {error.strerror or error}; give another checkpoint.dir"
        raise CheckpointError(text) from None


def prepare_place(where: str) -> None:
    """Make a folder outside of a run folder to be there, or raise; a store has nothing to prepare."""
    if not _URL.match(where):
        place = LocalPlace(Path(where))
        with _naming_the_setting(place):
            place.prepare()


def own_place(place: Place, run: str) -> None:
    """Make a place outside of a run folder that run's own, or raise if it is another's."""
    owner = "owner.json"
    with _naming_the_setting(place):
        if owner not in place.names():
            place.prepare()
            with suppress(FileExistsError), place.create(owner) as file:
                file.write(json.dumps({"run": run}).encode())
    try:
        found = json.loads(place.read_all(owner, 2**16))["run"]
    except StoreError:
        raise
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{place.path_of(owner)} cannot be read; give another checkpoint.dir") from None
    if found != run:
        raise CheckpointError(
            f"checkpoint.dir={place} holds the checkpoints of another run ({found}, this one is {run}); "
            "give another checkpoint.dir"
        )


def no_space(place: Place, needed: int, doing: str) -> str:
    """What to say when something does not fit: how much is missing, and where."""
    free = place.free() or 0
    return (
        f"{doing} needs {needed:,} bytes in {place} on {socket.gethostname()} "
        f"and {free:,} are free ({max(0, needed - free):,} missing)"
    )
