"""Commands on other machines, by ssh or a command of the user's own. No torch."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

from meshwright.errors import ConfigError, UserError

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host}"
LIMIT_S = 60.0
Found = TypeVar("Found")


class RemoteError(UserError):
    """A machine cannot be reached, or a command on it has failed."""


@dataclass(frozen=True)
class Remote:
    """How machines are reached: a command whose last argument will be what they run."""

    template: str = SSH

    def __post_init__(self) -> None:
        """Refuse one that does not name the host."""
        if "{host}" not in self.template:
            raise ConfigError(f"--ssh '{self.template}' does not say where {{host}} goes; the default is '{SSH}'")
        try:
            shlex.split(self.template)
        except ValueError as error:
            raise ConfigError(f'--ssh "{self.template}" is not a command: {error}') from None

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        """What runs these words on a host, taken by its shell as they are."""
        return [*(word.replace("{host}", host) for word in shlex.split(self.template)), shlex.join(words)]

    def run(self, host: str, words: Sequence[str], given: str = "") -> str:
        """Run it; gives what it printed."""
        command = self.command(host, words)
        try:
            ended = subprocess.run(command, input=given, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        except FileNotFoundError:
            raise ConfigError(f"there is no {command[0]} here; --ssh names another way to reach hosts") from None
        except subprocess.TimeoutExpired:
            raise RemoteError(f"{host} did not answer within {LIMIT_S:g} s: {shlex.join(command)}") from None
        if ended.returncode:
            said = (ended.stderr or ended.stdout).strip().splitlines()
            raise RemoteError(f"{host}: {said[-1] if said else f'exit code {ended.returncode}'}")
        return ended.stdout

    def on_all(self, hosts: Sequence[str], work: Callable[[str], Found]) -> list[Found]:
        """The same for all of them at once; raises what went wrong, of all that did."""
        with ThreadPoolExecutor(min(32, len(hosts))) as pool:
            tasks = [pool.submit(work, host) for host in hosts]
        errors = [error for task in tasks if (error := task.exception()) is not None]
        for error in errors:
            if not isinstance(error, UserError):
                raise error
        if errors:
            raise RemoteError("\n  ".join(str(error) for error in errors))
        return [task.result() for task in tasks]

    def lines(self, hosts: Sequence[str], words: Callable[[str], Sequence[str]]) -> Iterator[str]:
        """Lines that a command prints on each of them, as they come, after the host's name if there are several."""
        queue: SimpleQueue[str | None] = SimpleQueue()
        processes = [
            subprocess.Popen(
                self.command(host, words(host)), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
            )
            for host in hosts
        ]
        threads = [
            Thread(target=_read, args=(process, f"{host}: " if len(hosts) > 1 else "", queue), daemon=True)
            for host, process in zip(hosts, processes, strict=True)
        ]
        try:
            for thread in threads:
                thread.start()
            left = len(threads)
            while left:
                line = queue.get()
                if line is None:
                    left -= 1
                else:
                    yield line
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def _read(process: subprocess.Popen[str], prefix: str, queue: SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        queue.put(prefix + line.rstrip("\n"))
    queue.put(None)
