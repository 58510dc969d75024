"""Machines of several kinds in one cluster: `32xh100+32xa100`, or [[group]] tables in a file. No torch.

Ranks are placed in the order of the groups. The cluster as a whole is described by what all of them have: the slowest
chip, the smallest memory, the slowest network; who plans for each kind looks at its groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.cluster.chips import Chip
from meshwright.cluster.cluster import Cluster
from meshwright.errors import UserError


def together(groups: Sequence[Cluster], note: str = "") -> Cluster:
    """One cluster of these groups; neighbours of one kind are one group."""
    merged: list[Cluster] = []
    for group in groups:
        if merged and replace(merged[-1], gpus=1) == replace(group, gpus=1):
            merged[-1] = merged[-1].with_gpus(merged[-1].gpus + group.gpus)
        else:
            merged.append(group)
    if len(merged) == 1:
        return merged[0]
    prices = [group.price for group in merged]
    gpus = sum(group.gpus for group in merged)
    price = None
    if all(one is not None for one in prices):
        price = sum((group.price or 0.0) * group.gpus for group in merged) / gpus
    return Cluster(
        chip=_slowest(merged),
        gpus=gpus,
        node=min(group.node for group in merged),
        domain=min(group.domain for group in merged),
        link=min(group.link for group in merged),
        nic=min(group.nic for group in merged),
        price=price,
        host_gib=min(group.host_gib for group in merged),
        note=note,
        groups=tuple(merged),
    )


def _slowest(groups: Sequence[Cluster]) -> Chip:
    """What every chip of these groups can do."""
    chips = [group.chip for group in groups]
    common = [dtype for dtype in chips[0].tflops if all(dtype in chip.tflops for chip in chips)]
    if not common:
        names = "; ".join(f"{chip.name} has {', '.join(chip.tflops)}" for chip in chips)
        raise UserError(f"there is no precision that all of these chips compute in: {names}")
    slowest = min(chips, key=lambda chip: chip.tflops[common[0]])
    return replace(
        slowest,
        name=" + ".join(dict.fromkeys(chip.name for chip in chips)),
        memory_mib=min(group.memory for group in groups) / 2**20,
        memory_bandwidth=min(chip.memory_bandwidth for chip in chips),
        tflops={dtype: min(chip.tflops[dtype] for chip in chips) for dtype in common},
        link=min(chip.link for chip in chips),
        nic=min(chip.nic for chip in chips),
    )


def first_of(cluster: Cluster, gpus: int) -> Cluster:
    """The first chips of a cluster of groups; of the last group more, where there are not as many."""
    taken, left = [], gpus
    for group in cluster.groups:
        if left > 0:
            taken.append(group.with_gpus(min(group.gpus, left)))
            left -= group.gpus
    if left > 0:
        taken[-1] = taken[-1].with_gpus(taken[-1].gpus + left)
    return together(taken, cluster.note)


def kinds(cluster: Cluster) -> list[Cluster]:
    """All chips of one kind as a cluster of their own, for each kind."""
    found: list[Cluster] = []
    for group in cluster.groups:
        same = next((index for index, one in enumerate(found) if replace(one, gpus=1) == replace(group, gpus=1)), None)
        if same is None:
            found.append(group)
        else:
            found[same] = found[same].with_gpus(found[same].gpus + group.gpus)
    return found
