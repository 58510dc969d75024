"""Levels of NCCL, for GPUs among each other and for GPUDirect, held against the distances of recorded machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cluster.hardware import Hardware
from meshwright.cluster.nvml import NvmlGpu
from meshwright.comm.nccl_levels import Reach, level_in
from meshwright.comm.nccl_profile import Finding, Level, nccl_profile
from tests.machines import EPYC, GiB, Machine, cloud, dgx, pair, roce

P2P, GDR = "NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"
RAILS = "mlx5_0, mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_9, mlx5_10, mlx5_11"


def told(hardware: Hardware, name: str, value: str, **others: str) -> Finding | None:
    """What is said about one setting."""
    found = [one for one in nccl_profile(hardware, {name: value, **others}).findings if one.about == name]
    assert len(found) <= 1, found
    return found[0] if found else None


def mixed(root: Path) -> Hardware:
    """Four GPUs in a row of NVLinks, two to a switch; one port beside the first two, one two switches from the last."""
    machine = Machine(root)
    machine.system(2)
    near, far = "pci0000:10/0000:10:01.0/0000:11:00.0", "pci0000:50/0000:50:01.0/0000:51:00.0"
    places = [
        f"{near}/0000:12:00.0/0000:13:00.0", f"{near}/0000:12:01.0/0000:14:00.0",
        f"{far}/0000:52:00.0/0000:53:00.0", f"{far}/0000:52:01.0/0000:54:00.0",
    ]  # fmt: skip
    for index, place in enumerate(places):
        machine.gpu(place, index // 2)
    addresses = [place.split("/")[-1] for place in places]
    ends = [(addresses[1],), (addresses[0], addresses[2]), (addresses[1],), ()]
    machine.nvml = tuple(
        NvmlGpu(index, addresses[index], "NVIDIA A100", 40 * GiB, tuple(("gpu", end) for end in ends[index]), 25000)
        for index in range(4)
    )
    machine.rdma("mlx5_0", f"{near}/0000:12:02.0/0000:15:00.0", 0)
    machine.rdma("mlx5_1", f"{far}/0000:52:02.0/0000:55:00.0/0000:56:00.0/0000:57:00.0", 1)
    machine.write("sys/module/nvidia_peermem/version", "550.54.15")
    return machine.hardware()


def superchips(root: Path) -> Machine:
    """GPUs with NVLink-C2C to their processor, and a port on that processor."""
    machine = pair(root)
    machine.rdma("mlx5_0", "pci0000:80/0000:80:01.0/0000:81:00.0", 0)
    machine.write("sys/module/nvidia_peermem/version", "550.54.15")
    machine.nvml = tuple(NvmlGpu(i, f"0000:{0x41 + 16 * i:02x}:00.0", "NVIDIA GH200 480GB", 96 * GiB) for i in range(2))
    return machine


@pytest.mark.parametrize("level", ["LOC", "0", "NVL", "NVB", "C2C"])
def test_a_level_nearer_than_every_port_switches_gpudirect_off_for_all_by_name(level: str, tmp_path: Path) -> None:
    finding = told(dgx(tmp_path).hardware(), GDR, level)
    assert finding is not None
    assert finding.level is Level.WARNING
    assert "switched off for all 8 ports" in finding.text
    assert ("PIX" in finding.text) == (level not in ("LOC", "0"))
    assert finding.cost.endswith(f"copied through host memory first: {RAILS}")


@pytest.mark.parametrize("level", ["PIX", "1", "PXB", "2", "PHB", "3", "SYS", "4", "5", "77", "", "pix"])
def test_a_level_that_reaches_every_rail_costs_nothing(level: str, tmp_path: Path) -> None:
    finding = told(dgx(tmp_path).hardware(), GDR, level)
    # A number too large and a word in small letters are told as such.
    assert finding is None or "host memory" not in finding.cost


def test_only_chosen_ports_are_counted(tmp_path: Path) -> None:
    finding = told(dgx(tmp_path).hardware(), GDR, "NVL", NCCL_IB_HCA="=mlx5_3,mlx5_9")
    assert finding is not None
    assert "all 2 ports" in finding.text
    assert finding.cost.endswith(": mlx5_3, mlx5_9")


def test_a_level_that_some_ports_are_beyond_is_told_for_those(tmp_path: Path) -> None:
    found = mixed(tmp_path)
    for level in ("PIX", "1"):
        finding = told(found, GDR, level)
        assert finding is not None
        assert "1 of 2 ports" in finding.text
        assert "at PXB, and it ends at PIX" in finding.text
        assert finding.cost.endswith(": mlx5_1")
    assert told(found, GDR, "PXB") is None


def test_ports_that_nccl_would_not_join_anyway_lose_nothing(tmp_path: Path) -> None:
    machine = pair(tmp_path)
    machine.rdma("mlx5_0", "pci0000:80/0000:80:01.0/0000:81:00.0", 0)
    machine.write("sys/module/nvidia_peermem/version", "550.54.15")
    finding = told(machine.hardware(), GDR, "LOC")
    assert finding is not None
    assert finding.level is Level.NOTE
    assert "no effect" in finding.text
    assert "PHB" in finding.text
    assert told(machine.hardware(), GDR, "PXB") is None


def test_gpus_with_a_link_of_their_own_to_the_processor_are_nearer(tmp_path: Path) -> None:
    found = superchips(tmp_path).hardware()
    assert told(found, GDR, "P2C") is None
    finding = told(found, GDR, "PXB")
    assert finding is not None
    assert "at P2C, and it ends at PXB" in finding.text


def test_pairs_of_gpus_beyond_a_level_are_told_by_name(tmp_path: Path) -> None:
    # 0-1 and 1-2 by NVLinks, 0-2 by way of 1, 2-3 over one switch, 0-3 and 1-3 from processor to processor.
    found = mixed(tmp_path)
    for level, which, named in (
        ("LOC", "4 of 6 pairs", "GPU0-GPU1, GPU0-GPU2, GPU1-GPU2, GPU2-GPU3"),
        ("0", "4 of 6 pairs", "GPU0-GPU1, GPU0-GPU2, GPU1-GPU2, GPU2-GPU3"),
        ("NVL", "2 of 6 pairs", "GPU0-GPU2, GPU2-GPU3"),
        ("NVB", "1 of 6 pairs", "GPU2-GPU3"),
        ("C2C", "1 of 6 pairs", "GPU2-GPU3"),
    ):
        finding = told(found, P2P, level)
        assert finding is not None
        assert finding.level is Level.WARNING
        assert which in finding.text
        assert f"host memory: {named}" in finding.cost
        assert ("carry nothing" in finding.cost) == (level in ("LOC", "0"))
    assert [told(found, P2P, level) for level in ("PIX", "1", "PXB", "2", "PHB", "SYS")] == [None] * 6
    without = told(found, P2P, "NVB", NCCL_NVB_DISABLE="1")
    assert without is not None
    assert without.cost.endswith(": GPU2-GPU3"), "GPU0-GPU2 is at SYS then, which NCCL does not join by itself"


def test_nvlinks_between_all_are_within_every_level_but_none(tmp_path: Path) -> None:
    found = dgx(tmp_path).hardware()
    assert told(found, P2P, "NVL") is None
    finding = told(found, P2P, "0")
    assert finding is not None
    assert "8 GPUs may not reach each other directly" in finding.text
    assert "GPU0-GPU1" in finding.cost
    assert "and 20 more" in finding.cost


def test_gpus_that_nccl_would_not_join_anyway_lose_nothing(tmp_path: Path) -> None:
    for name, found in (("roce", roce(tmp_path / "roce").hardware()), ("cloud", cloud(tmp_path / "cloud").hardware())):
        for variable, value in ((P2P, "LOC"), (P2P, "NVL"), (P2P, "1"), ("NCCL_P2P_DISABLE", "1")):
            finding = told(found, variable, value)
            assert finding is not None, name
            assert finding.level is Level.NOTE
            assert "no effect" in finding.text
            assert "PHB" in finding.text
        assert told(found, P2P, "PXB") is None
        assert told(found, P2P, "SYS") is None


def test_two_gpus_on_amd_are_joined_unless_a_level_forbids_it(tmp_path: Path) -> None:
    found = pair(tmp_path / "amd", EPYC).hardware()
    for level in ("LOC", "NVL", "PXB", "2"):
        finding = told(found, P2P, level)
        assert finding is not None
        assert finding.level is Level.WARNING
        assert "GPU0-GPU1" in finding.cost
        assert "maker" not in finding.cost
    assert told(found, P2P, "PHB") is None
    machine = pair(tmp_path / "unknown")
    machine.finish()
    (tmp_path / "unknown/proc/cpuinfo").unlink()
    finding = told(machine.hardware(), P2P, "PXB")
    assert finding is not None
    assert "if the processor is not AMD's" in finding.cost


def test_nvlinks_that_nobody_told_of_are_not_denied(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    machine.nvml = None
    found = machine.hardware()
    finding = told(found, P2P, "LOC")
    assert finding is not None
    assert finding.level is Level.WARNING
    assert "NVML did not tell" in finding.cost
    assert told(found, P2P, "NVL") is None


@pytest.mark.parametrize(
    ("value", "level"),
    [("0", Reach.LOC), ("1", Reach.PIX), ("2", Reach.PXB), ("3", Reach.PHB), ("4", Reach.SYS), ("5", Reach.SYS),
     ("99", Reach.SYS), ("0x2", Reach.PXB), ("2x", Reach.PXB), ("09", Reach.LOC), ("NVL", Reach.NVL),
     ("SYS", Reach.SYS), ("nvl", None), ("", None), ("-1", None), ("NET", None), ("٣", None)],
)  # fmt: skip
def test_a_level_is_what_nccl_takes_it_for(value: str, level: Reach | None) -> None:
    assert level_in(value) is level


def advice(hardware: Hardware, name: str) -> tuple[str, str]:
    """In which list a name is, and why."""
    profile = nccl_profile(hardware, {})
    rows = [("left", one) for one in profile.left] + [("asked", one) for one in profile.questions]
    ((where, one),) = [row for row in rows if row[1].name == name]
    return where, one.reason


def test_two_gpus_on_amd_need_no_level_and_on_others_it_is_to_be_tried(tmp_path: Path) -> None:
    where, reason = advice(pair(tmp_path / "amd", EPYC).hardware(), P2P)
    assert where == "left"
    assert "by itself" in reason
    assert "host memory" not in reason
    where, reason = advice(pair(tmp_path / "intel").hardware(), P2P)
    assert where == "asked"
    assert "copies through host memory there. Try PHB" in reason


def test_more_gpus_on_amd_are_joined_in_groups_of_two_alone(tmp_path: Path) -> None:
    where, reason = advice(pair(tmp_path / "amd", EPYC, gpus=4).hardware(), P2P)
    assert where == "asked"
    assert (
        "host memory there; in groups of up to 2 GPUs of a machine it joins directly by itself, as the processor"
        in reason
    )
    where, reason = advice(pair(tmp_path / "intel", gpus=4).hardware(), P2P)
    assert where == "asked"
    assert "AMD" not in reason


def test_advice_for_a_processor_of_unknown_make_says_when_it_holds(tmp_path: Path) -> None:
    for gpus, said in (
        (2, "unless the processor is AMD's, which is not known here"),
        (4, "if the processor is AMD's, which is not known here"),
    ):
        machine = pair(tmp_path / str(gpus), gpus=gpus)
        (machine.root / "proc/cpuinfo").unlink()
        where, reason = advice(machine.hardware(), P2P)
        assert where == "asked"
        assert said in reason


def test_gpus_joined_by_way_of_another_are_not_said_to_use_host_memory(tmp_path: Path) -> None:
    machine = pair(tmp_path, gpus=3)
    addresses = [one.address for one in machine.nvml or ()]
    ends = [(addresses[1],), (addresses[0], addresses[2]), (addresses[1],)]
    machine.nvml = tuple(
        NvmlGpu(index, addresses[index], "NVIDIA V100", 32 * GiB, tuple(("gpu", end) for end in ends[index]), 25000)
        for index in range(3)
    )
    assert advice(machine.hardware(), P2P) == ("left", "NVLinks join all GPUs, and NCCL uses them")


def test_ports_of_a_processor_with_a_link_to_its_gpu_need_no_level(tmp_path: Path) -> None:
    where, reason = advice(superchips(tmp_path).hardware(), GDR)
    assert where == "left"
    assert "NVLink-C2C" in reason
