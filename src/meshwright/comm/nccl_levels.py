"""How near two parts must be for NCCL to join them directly: its scale, its own limits, and a level that was set.

GPUs that it does not join (P2P) exchange data through host memory, and so do a port and a GPU (GPUDirect RDMA). No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations

from meshwright.cluster.hardware import AMD, Distance, Gpu, Hardware, RdmaPort
from meshwright.comm.nccl_profile import Finding, Level
from meshwright.comm.nccl_selection import rdma_ports
from meshwright.comm.nccl_variables import number_in

_C2C_GPUS = ("GH200", "GB200", "GB300")
"""Which have NVLink-C2C to their processor."""
FEW_GPUS = 2
"""GPUs of a group in one machine, up to which NCCL trusts AMD's processors with what goes between them."""
_MOST_NAMED = 8


class Reach(IntEnum):
    """NCCL's scale of distances, from near to far; the words are what a level may be."""

    LOC = 0
    """The same device: as a level, never."""
    NVL = 1
    """Over NVLinks."""
    NVB = 2
    """Over NVLinks, by way of another GPU."""
    C2C = 3
    PIX = 4
    PXB = 5
    P2C = 6
    """From a GPU to its processor by NVLink-C2C, and on to a port by PCIe."""
    PXN = 7
    PHB = 8
    SYS = 9


OLD_LEVELS = (Reach.LOC, Reach.PIX, Reach.PXB, Reach.PHB, Reach.SYS, Reach.SYS)
"""What the numbers of old stand for; larger ones count as the last."""


def level_in(value: str) -> Reach | None:
    """What NCCL takes a level for; None where it takes no notice of it."""
    if value in Reach.__members__:
        return Reach[value]
    if value and value[0].isascii() and value[0].isdecimal():
        return OLD_LEVELS[min(number_in(value), len(OLD_LEVELS) - 1)]
    return None


@dataclass(frozen=True)
class Way:
    """From GPU to GPU, or from a port to the GPU that is nearest to it."""

    name: str
    reach: Reach


def ways_between_gpus(hardware: Hardware, values: Mapping[str, str]) -> list[Way]:
    """All pairs of GPUs."""
    by_another = number_in(values.get("NCCL_NVB_DISABLE", "")) == 0
    return [
        Way(f"{one.label}-{other.label}", reach)
        for one, other in combinations(hardware.gpus, 2)
        if (reach := _between(hardware, one, other, by_another)) is not None
    ]


def _between(hardware: Hardware, one: Gpu, other: Gpu, by_another: bool) -> Reach | None:
    if hardware.linked(one, other):
        return Reach.NVL
    thirds = (gpu for gpu in hardware.gpus if gpu not in (one, other))
    if by_another and any(hardware.linked(one, gpu) and hardware.linked(gpu, other) for gpu in thirds):
        return Reach.NVB
    distance = hardware.distance(one.address, other.address)
    return None if distance is None else Reach[distance.name]


def ways_to_ports(hardware: Hardware, ports: Sequence[RdmaPort]) -> list[Way]:
    """Each port and its nearest GPU; ports whose place on the bus is not known are left out."""
    found = []
    several = {port.device for port in hardware.rdma if port.port > 1}
    for port in ports:
        if (near := hardware.nearest_gpu(port.address)) is None:
            continue
        gpu, distance = near
        # Through a processor, but the GPU is on that one's own link.
        linked = distance is Distance.PHB and any(model in gpu.name for model in _C2C_GPUS)
        name = port.name if port.device in several else port.device
        found.append(Way(name, Reach.P2C if linked else Reach[distance.name]))
    return found


def own_p2p_level(hardware: Hardware) -> Reach | None:
    """How far NCCL goes by itself between GPUs; None where that depends on a processor's maker that is not known."""
    if len(hardware.gpus) > FEW_GPUS:
        return Reach.PXB
    if not hardware.processor_maker:
        return None
    return Reach.SYS if hardware.processor_maker == AMD else Reach.PXB


def own_gdr_level(values: Mapping[str, str]) -> Reach:
    """How far NCCL goes by itself from a port to a GPU."""
    return Reach.PXB if number_in(values.get("NCCL_NET_GDR_C2C", "1") or "1") == 0 else Reach.P2C


def check_p2p_level(hardware: Hardware, values: Mapping[str, str]) -> Iterator[Finding]:
    """Which GPUs a setting keeps apart that NCCL would have joined."""
    disabled = number_in(values.get("NCCL_P2P_DISABLE", "")) == 1
    name = "NCCL_P2P_DISABLE" if disabled else "NCCL_P2P_LEVEL"
    level = Reach.LOC if disabled else level_in(values.get(name, ""))
    ways = ways_between_gpus(hardware, values)
    if level is None or not ways:
        return
    own = own_p2p_level(hardware)
    # Without NVML any two may have NVLinks between them.
    unseen = bool(hardware.nvml)
    cut = [way for way in ways if way.reach > level]
    lost = [way for way in cut if way.reach <= (own or Reach.SYS) or (unseen and level is Reach.LOC)]
    if not lost:
        if len(cut) == len(ways) and level < Reach.PXB and not unseen:
            yield _no_effect(name, f"no two GPUs are nearer than {_nearest(ways)}, and NCCL's own limit is PXB")
        return
    which = f"{len(hardware.gpus)} GPUs" if len(lost) == len(ways) else f"{len(lost)} of {len(ways)} pairs of GPUs"
    text = f"{which} may not reach each other directly"
    if level is not Reach.LOC:
        text += f": they are at {_reaches(lost)}, and it ends at {level.name}"
    cost = f"what they exchange is copied through host memory: {_named(lost)}"
    gpu = next((gpu for gpu in hardware.gpus if gpu.links), None)
    if gpu is not None and level is Reach.LOC:
        speed = f" of {gpu.links * gpu.link_gb_s:.0f} GB/s each way" if gpu.link_gb_s else ""
        cost += f"; {gpu.links} NVLinks for each GPU{speed} carry nothing"
    if unseen:
        cost += "; NVML did not tell which of them NVLinks join"
    elif own is None and all(way.reach > Reach.PXB for way in lost):
        cost += "; without it too, if the processor is not AMD's: its maker is not known"
    yield Finding(Level.WARNING, name, text, cost, f"unset {name}")


def check_gdr_level(hardware: Hardware, values: Mapping[str, str]) -> Iterator[Finding]:
    """For which ports a setting switches GPUDirect RDMA off where NCCL would have used it."""
    name = "NCCL_NET_GDR_LEVEL"
    level = level_in(values.get(name, ""))
    ways = ways_to_ports(hardware, rdma_ports(hardware, values.get("NCCL_IB_HCA")))
    if level is None or not ways:
        return
    own = own_gdr_level(values)
    able = [way for way in ways if way.reach <= own]
    lost = [way for way in able if way.reach > level]
    if not able:
        if level < Reach.PXB:
            yield _no_effect(name, f"the nearest GPU of a port is at {_nearest(ways)}, and NCCL's own limit is PXB")
        return
    if not lost:
        return
    which = f"all {len(able)}" if len(lost) == len(able) else f"{len(lost)} of {len(able)}"
    text = f"GPUDirect RDMA is switched off for {which} ports that could use it"
    if level is not Reach.LOC:
        text += f": their nearest GPUs are at {_reaches(lost)}, and it ends at {level.name}"
    cost = f"what goes between machines over them is copied through host memory first: {_named(lost)}"
    yield Finding(Level.WARNING, name, text, cost, "unset it")


def _no_effect(name: str, why: str) -> Finding:
    return Finding(Level.NOTE, name, f"it has no effect here: {why}", "data go through host memory with it and without")


def _nearest(ways: Sequence[Way]) -> str:
    return min(way.reach for way in ways).name


def _reaches(ways: Sequence[Way]) -> str:
    return " and ".join(reach.name for reach in sorted({way.reach for way in ways}))


def _named(ways: Sequence[Way]) -> str:
    more = len(ways) - _MOST_NAMED
    return ", ".join(way.name for way in ways[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
