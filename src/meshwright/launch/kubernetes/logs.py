"""Lines of all pods of a run, each with the pod's name; followed, also those of pods that come later. No torch."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

from meshwright.errors import UserError
from meshwright.launch.kubernetes.client import Api, Failure
from meshwright.launch.kubernetes.pod import Table

LOOK_S = 2.0
"""How often new pods are looked for."""


def lines(api: Api, name: str, over: Callable[[], bool] | None) -> Iterator[str]:
    """Everything that the pods have written; with `over`, until that says so and all has been read."""
    if over is None:
        for pod in api.pods(name):
            yield from _read(api, pod, follow=False)
        return
    arrived: queue.Queue[str] = queue.Queue()
    readers: dict[str, threading.Thread] = {}
    while True:
        last = over()
        for pod in api.pods(name):
            uid = pod["metadata"]["uid"]
            if uid not in readers and _has_started(pod):
                readers[uid] = threading.Thread(target=_follow, args=(api, pod, arrived), daemon=True)
                readers[uid].start()
        look = time.monotonic() + LOOK_S
        while time.monotonic() < look and not (last and not any(reader.is_alive() for reader in readers.values())):
            try:
                yield arrived.get(timeout=0.2)
            except queue.Empty:
                continue
        if last and not any(reader.is_alive() for reader in readers.values()):
            while not arrived.empty():
                yield arrived.get()
            return


def _follow(api: Api, pod: Table, arrived: queue.Queue[str]) -> None:
    try:
        for line in _read(api, pod, follow=True):
            arrived.put(line)
    except (UserError, OSError) as error:
        arrived.put(f"[{pod['metadata']['name']}] no more lines of this pod: {error}")


def _read(api: Api, pod: Table, follow: bool) -> Iterator[str]:
    name = pod["metadata"]["name"]
    query = {"container": pod["spec"]["containers"][0]["name"], **({"follow": "true"} if follow else {})}
    try:
        stream = api.call("GET", api.core(f"/pods/{name}/log"), query, stream=True)
    except Failure as failure:
        yield f"[{name}] {failure.message}"
        return
    left = b""
    for part in stream.stream(amt=None):
        *whole, left = (left + part).split(b"\n")
        for line in whole:
            yield f"[{name}] {line.decode('utf-8', 'replace')}"
    if left:
        yield f"[{name}] {left.decode('utf-8', 'replace')}"


def _has_started(pod: Table) -> bool:
    return pod.get("status", {}).get("phase") in ("Running", "Succeeded", "Failed")
