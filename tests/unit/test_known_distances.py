"""Distances held against machines whose owners published what NVIDIA's tools say of them.

The trees are laid out after NCCL's topology files or `lspci -t` of those machines, as far as these go: they do not tell
which port of a switch leads down, and an address is made up there. `nvidia-smi topo -m` has a word more than NCCL: what
it calls NODE, from root to root of one NUMA node, is PHB for NCCL.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cluster.hardware import Distance
from tests.machines import EPYC, Machine

BROADCOM_4, BROADCOM_5, PLX = "0x1000:0xc010", "0x1000:0xc030", "0x10b5:0x8764"


def bridges(built: Machine, path: str, ids: str, card: str) -> None:
    """Make all that lies between a root's port and a device the ports of switches of one kind."""
    steps = path.split("/")
    for end in range(3, len(steps)):
        folder = f"sys/devices/{'/'.join(steps[:end])}"
        for name, value in zip(("vendor", "device"), ids.split(":"), strict=True):
            built.write(f"{folder}/{name}", value)
        for name, value in zip(("vendor", "device"), card.split(":"), strict=True):
            built.write(f"{folder}/subsystem_{name}", value)


def test_a_dgx_a100_s_cards_are_several_switches_from_its_gpus(tmp_path: Path) -> None:
    """NVIDIA/nccl, "Question on DGX A100 GPU topologies": one of four trees, 01:00.0, and a GPU of another.

    Each GPU is below three switches, the second of them below 0a:00.0 and 0d:00.0; the card 0c:00.0 is below 0a:00.0.
    """
    built = Machine(tmp_path)
    built.system(8, cores=256, processor=EPYC)
    top = "pci0000:00/0000:00:01.1/0000:01:00.0"
    first = f"{top}/0000:02:00.0/0000:03:00.0/0000:04:00.0/0000:05:00.0/0000:06:00.0/0000:07:00.0"
    card = f"{top}/0000:02:04.0/0000:0a:00.0/0000:0b:00.0/0000:0c:00.0"
    second = f"{top}/0000:02:04.0/0000:0a:00.0/0000:0b:04.0/0000:0d:00.0/0000:0e:00.0/0000:0f:00.0"
    built.gpu(first, 3)
    built.gpu(second, 3)
    built.gpu("pci0000:40/0000:40:01.1/0000:47:00.0", 1)
    built.rdma("mlx5_0", card, 3, rate="200 Gb/sec (4X HDR)")
    for path in (first, second, card):
        bridges(built, path, BROADCOM_4, "0x1000:0xa096")
    found = built.hardware()
    distances = [found.distance("0000:0c:00.0", gpu.address) for gpu in found.gpus]
    assert distances == [Distance.PXB, Distance.PXB, Distance.SYS]


def test_a_gpu_and_a_card_of_an_h100_machine_share_one_switch(tmp_path: Path) -> None:
    """aliyun/SimAI, "Run SimCCL/test/run.sh with 8 H100 topo xml file": GPU 7 and mlx5_5, both below d7:00.0."""
    built = Machine(tmp_path)
    top = "pci0000:d6/0000:d6:01.0/0000:d7:00.0"
    built.gpu(f"{top}/0000:d8:00.0/0000:d9:00.0", 1)
    built.rdma("mlx5_5", f"{top}/0000:d8:01.0/0000:da:00.0", 1)
    bridges(built, f"{top}/0000:d8:00.0/0000:d9:00.0", BROADCOM_5, "0x1000:0x100b")
    assert built.hardware().distance("0000:d9:00.0", "0000:da:00.0") is Distance.PIX


def test_two_gpus_of_a_dgx_1_share_one_switch(tmp_path: Path) -> None:
    """NVIDIA/nccl, "Understand the tree topology": GPUs 0 and 1 below 03:00.0, a switch of PLX."""
    built = Machine(tmp_path)
    top = "pci0000:00/0000:00:02.0/0000:03:00.0"
    built.gpu(f"{top}/0000:04:08.0/0000:06:00.0", 0)
    built.gpu(f"{top}/0000:04:0c.0/0000:07:00.0", 0)
    bridges(built, f"{top}/0000:04:08.0/0000:06:00.0", PLX, PLX)
    assert built.hardware().distance("0000:06:00.0", "0000:07:00.0") is Distance.PIX


def test_gpus_of_two_slots_of_one_root_reach_each_other_through_the_processor(tmp_path: Path) -> None:
    """noonghunna/club-3090, "2x 5090 on 16x/16x": two GPUs below ports of root 00; PHB."""
    built = Machine(tmp_path)
    built.system(1, cores=64, processor=EPYC)
    built.gpu("pci0000:00/0000:00:01.1/0000:01:00.0", 0)
    built.gpu("pci0000:00/0000:00:03.1/0000:02:00.0", 0)
    assert built.hardware().distance("0000:01:00.0", "0000:02:00.0") is Distance.PHB


@pytest.mark.parametrize(
    ("ids", "cards", "distance"),
    [
        (BROADCOM_4, ("0x1000:0xa096", "0x1000:0xa096"), Distance.PIX),
        (BROADCOM_5, ("0x1000:0x0042", "0x1000:0x1042"), Distance.PIX),
        # Of another maker's card NCCL does not know that it is one switch.
        (BROADCOM_5, ("0x15d9:0x1d2a", "0x15d9:0x1d2a"), Distance.PXB),
        (PLX, (PLX, PLX), Distance.PXB),
    ],
)
def test_a_switch_that_shows_itself_as_two_levels_is_one_for_nccl(
    ids: str, cards: tuple[str, str], distance: Distance, tmp_path: Path
) -> None:
    built = Machine(tmp_path)
    top = "pci0000:10/0000:10:01.0/0000:11:00.0"
    for slot in range(2):
        path = f"{top}/0000:12:0{slot}.0/0000:2{slot}:00.0/0000:3{slot}:00.0/0000:4{slot}:00.0"
        built.gpu(path, 0)
        bridges(built, path, ids, cards[1])
    bridges(built, f"{top}/0000:12:00.0", ids, cards[0])
    assert built.hardware().distance("0000:40:00.0", "0000:41:00.0") is distance
