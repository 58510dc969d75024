"""The machines of a published training run: chips, how many in a machine, what is between them."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.cluster.chips import Chip, chips
from meshwright.cluster.cluster import Cluster
from published_words import Skip, number_of, whole

HERE = Path(__file__).parent


@cache
def _networks() -> dict[str, dict[str, Any]]:
    return tomllib.loads((HERE / "data/networks.toml").read_text(encoding="utf-8"))


def cluster_of(row: dict[str, str], gpus: int) -> Cluster:
    chip = _chip(row)
    node = whole(row, "gpus_per_node", otherwise=chip.node)
    nic = _nic(row.get("interconnect", ""), node) or chip.nic
    domain = chip.domain if chip.domain > chip.node else node
    return Cluster(chip, gpus, min(node, gpus), min(domain, gpus), chip.link, nic)


def _chip(row: dict[str, str]) -> Chip:
    text = row.get("gpu", "").lower()
    memory = number_of(row.get("gpu_mem_gb", ""))
    if not text:
        raise Skip("gpu is not given")
    if "h100" in text and ("hbm2e" in text or memory == 96):
        return chips()["h100-500w"]
    if "h100" in text and "pcie" in text:
        return chips()["h100-pcie"]
    if "a100" in text:
        return chips()["a100-40" if memory == 40 or "40gb" in text else "a100"]
    plain = re.sub(r"[^a-z0-9]", "", text)
    for key in sorted(chips(), key=len, reverse=True):
        if plain.startswith(key.replace("-", "")) or key.replace("-", "") in plain:
            return chips()[key]
    raise Skip(f"unknown chip '{text}'")


def _nic(text: str, node: int) -> float | None:
    """GB/s of the network for each GPU, as a source says it."""
    several = re.search(r"(\d+)x(\d+) ?gb", text.lower())
    if several:
        return int(several.group(1)) * int(several.group(2)) / 8 / node
    each = re.search(r"(\d+) ?gb(?:/s)?[a-z -]*per gpu", text.lower())
    if each:
        return int(each.group(1)) / 8
    together = re.search(r"(\d+) ?gb(?:/s)?[a-z -]*per node", text.lower())
    if together:
        return int(together.group(1)) / 8 / node
    for place, network in _networks().items():
        if place in text.lower():
            return float(network["gbit_per_node"]) / 8 / node
    return None
