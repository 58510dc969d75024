"""Processors, memory and NUMA nodes as kernels old and new tell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.doctor_topology import machine
from meshwright.cluster.processors import as_list, cpus_in, cpus_of_mask
from tests.machines import Machine, laptop, pair


@pytest.mark.parametrize(
    ("mask", "listed"),
    [
        ("ff", "0-7"),
        ("00000000,00000001", "0"),
        ("00000011,11111111", "0,4,8,12,16,20,24,28,32,36"),
        ("1,00000003", "0-1,32"),
        ("00000000,00000000", ""),
        ("", ""),
        ("nonsense", ""),
    ],
)
def test_a_mask_of_cpus_is_the_list_that_newer_kernels_write(mask: str, listed: str) -> None:
    assert as_list(cpus_of_mask(mask)) == listed
    assert cpus_in(listed) == cpus_of_mask(mask)


def test_a_node_that_has_a_mask_alone_is_not_left_without_cpus(tmp_path: Path) -> None:
    built = laptop(tmp_path)
    (tmp_path / "sys/devices/system/node/node0/cpulist").unlink()
    built.write("sys/devices/system/node/node0/cpumap", "00000000,000000ff")
    assert [node.cpus for node in built.hardware().numa] == ["0-7"]


def test_cpus_that_are_offline_are_not_counted(tmp_path: Path) -> None:
    built = laptop(tmp_path)
    built.write("sys/devices/system/cpu/online", "0-2,5")
    assert built.hardware().cpus == 4


def test_cores_are_told_from_their_threads(tmp_path: Path) -> None:
    built = laptop(tmp_path)
    package = "processor\t: {}\nmodel name\t: Xeon   E5 \nphysical id\t: {}\ncpu cores\t: 2\n"
    built.write("proc/cpuinfo", "\n".join(package.format(cpu, cpu // 4) for cpu in range(8)))
    found = built.hardware()
    assert (found.cpus, found.cores) == (8, 4)
    assert machine(found) == "Xeon E5, 4 cores (8 CPUs), 16 GiB"


def test_a_maker_s_name_is_not_told_twice(tmp_path: Path) -> None:
    built = laptop(tmp_path)
    built.write("sys/class/dmi/id/sys_vendor", "NVIDIA")
    built.write("sys/class/dmi/id/product_name", "NVIDIA_DGX_Spark")
    assert machine(built.hardware()).startswith("NVIDIA_DGX_Spark, Intel")


def test_the_memory_of_gpus_is_not_the_machine_s(tmp_path: Path) -> None:
    """Of GPUs whose memory is a NUMA node the kernel adds it to all other."""
    built = pair(tmp_path)
    built.write("sys/devices/system/node/node1/cpulist", "")
    built.write("sys/devices/system/node/node1/meminfo", f"Node 1 MemTotal:       {96 * 2**20} kB")
    built.write("proc/driver/nvidia/gpus/0000:41:00.0/numa_status", "Node:      1\nStatus:    online")
    found = built.hardware()
    assert [node.gpu for node in found.numa] == ["", "0000:41:00.0"]
    assert found.memory_bytes == (256 - 96) * 2**30


def test_a_gpu_s_name_needs_no_nvml(tmp_path: Path) -> None:
    built = pair(tmp_path)
    built.nvml = None
    text = "Model: \t\t NVIDIA GH200 480GB\nIRQ:   \t\t 100\nGPU UUID: \t GPU-0\nBus Location: \t 0000:41:00.0"
    built.write("proc/driver/nvidia/gpus/0000:41:00.0/information", text)
    assert [gpu.name for gpu in built.hardware().gpus] == ["NVIDIA GH200 480GB", ""]


def test_a_device_without_a_node_is_placed_by_the_cpus_beside_it(tmp_path: Path) -> None:
    built = Machine(tmp_path)
    built.system(2, cores=8)
    for bus, beside in ((0x10, "0-3"), (0x20, "4-7"), (0x30, "0-7")):
        folder = built.pci(f"pci0000:{bus:x}/0000:{bus:x}:01.0", "0x8086:0x1572", "0x020000", -1)
        built.write(f"{folder}/local_cpulist", beside)
        built.net(f"eth{bus:x}", path=f"pci0000:{bus:x}/0000:{bus:x}:01.0")
    found = built.hardware()
    assert [device.numa for device in found.pci.values()] == [0, 1, None]
    assert [one.numa for one in found.interfaces] == [0, 1, None]


def test_domains_of_more_than_four_digits_are_a_part_of_the_tree(tmp_path: Path) -> None:
    built = Machine(tmp_path)
    for slot in (1, 2):
        built.gpu(f"pci10000:e0/10000:e0:00.0/10000:e1:00.0/10000:e2:0{slot}.0/10000:e{2 + slot}:00.0", 0)
    found = built.hardware()
    near = found.distance("10000:e3:00.0", "10000:e4:00.0")
    assert near is not None
    assert near.name == "PIX"


def test_each_of_two_ports_on_one_address_has_its_own_interface(tmp_path: Path) -> None:
    built = Machine(tmp_path)
    place = "pci0000:80/0000:80:02.0/0000:82:00.0"
    built.rdma("mlx4_0", place, 0, rate="56 Gb/sec (4X FDR)")
    device = f"sys/devices/{place}/infiniband/mlx4_0/ports/2"
    for key, value in {"link_layer": "InfiniBand", "rate": "40 Gb/sec (4X QDR)", "state": "4: ACTIVE"}.items():
        built.write(f"{device}/{key}", value)
    for port in (1, 0):
        built.write(f"{built.net(f'ib{port}', path=place, link=32)}/dev_id", hex(port))
    found = built.hardware()
    assert [(port.name, port.netdev) for port in found.rdma] == [("mlx4_0:1", "ib0"), ("mlx4_0:2", "ib1")]
    # An interface of InfiniBand is as fast as its port, where old drivers tell no speed.
    assert [(one.name, one.mbit_s) for one in found.interfaces] == [("ib0", 56000), ("ib1", 40000)]
