"""Which machines are let in: one whose agents die again and again is not."""

from __future__ import annotations

import json
import time

from meshwright.elastic.rendezvous import Nodes
from meshwright.lock import is_alive
from meshwright.parallel.torch_releases import Store


def enter(store: Store, host: str, agent: int, nodes: Nodes) -> int | None:
    """Note that a machine's agent (a process id) takes part; gives how often such have died when that is too often."""
    now = time.time()
    while True:
        before = store.compare_set(_key(host), "", "[]").decode()
        agents = [one for one in json.loads(before) if now - one["time"] < nodes.quarantine_window_s]
        for one in agents:
            one["died"] = one["died"] or not is_alive(one["pid"])
        deaths = sum(one["died"] for one in agents)
        quarantined = deaths >= nodes.quarantine_failures
        if not quarantined:
            agents.append({"pid": agent, "time": now, "died": False})
        after = json.dumps(agents)
        if store.compare_set(_key(host), before, after).decode() == after:
            return deaths if quarantined else None


def leave(store: Store, host: str, agent: int) -> None:
    """An agent that ends in peace is not held against its machine."""
    while True:
        before = store.get(_key(host)).decode()
        after = json.dumps([one for one in json.loads(before) if one["pid"] != agent])
        if store.compare_set(_key(host), before, after).decode() == after:
            return


def _key(host: str) -> str:
    return f"meshwright/agents/{host}"
