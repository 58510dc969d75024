"""What is read of a machine: recorded trees of several kinds of them, damaged ones, and this one."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.cli.doctor_topology import expand_nodes
from meshwright.cli.main import main
from meshwright.cluster.hardware import Distance, rates
from meshwright.cluster.nvml import NvmlGpu, pci_address, read_nvml
from meshwright.cluster.sysfs import _redirects, read_hardware
from tests.machines import MACHINES, Machine, bonded, cloud, dgx, laptop, roce


def test_a_machine_of_eight_gpus_and_rails_is_read_whole(tmp_path: Path) -> None:
    found = dgx(tmp_path, down="mlx5_4").hardware()
    assert (found.host, found.maker, found.cpus, found.memory_bytes) == ("node01", "NVIDIA", 224, 2048 * 2**30)
    assert [(node.index, node.cpus) for node in found.numa] == [(0, "0-111"), (1, "112-223")]
    assert [gpu.index for gpu in found.gpus] == list(range(8))
    assert [gpu.numa for gpu in found.gpus] == [0] * 4 + [1] * 4
    assert all(gpu.name == "NVIDIA H100 80GB HBM3" and gpu.links == 18 and gpu.switched for gpu in found.gpus)
    assert found.all_linked
    assert found.nvswitches == 4
    assert not found.virtual
    assert found.peer_memory
    # By number, not by letter: mlx5_10 is last but one.
    assert [port.device for port in found.rdma][-2:] == ["mlx5_10", "mlx5_11"]
    first = found.rdma[0]
    assert (first.link_layer, first.gbit_s, first.state, first.netdev, first.numa) == (
        "InfiniBand", 400.0, "ACTIVE", "ib0", 0,
    )  # fmt: skip
    assert [port.device for port in found.rdma if not port.active] == ["mlx5_4"]
    assert rates(found.rdma) == "10 x 400 Gb/s"
    route = found.interface("eno3")
    assert route is not None
    assert (route.default_route, route.mbit_s, route.addresses) == (True, 10000, ("10.0.0.11",))


@pytest.mark.parametrize(
    ("cpuinfo", "maker"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 7763 64-Core Processor\n", "AuthenticAMD"),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Gold 6430\n", "GenuineIntel"),
        ("processor\t: 0\nBogoMIPS\t: 2000.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "ARM"),
        ("processor\t: 0\ncpu\t\t: POWER9\n", "IBM"),
        (None, ""),
    ],
)
def test_a_processor_s_maker_is_read_or_not_known(cpuinfo: str | None, maker: str, tmp_path: Path) -> None:
    machine = laptop(tmp_path)
    if cpuinfo is None:
        (tmp_path / "proc/cpuinfo").unlink()
    else:
        machine.write("proc/cpuinfo", cpuinfo)
    assert machine.hardware().processor_maker == maker


def test_distances_follow_switches_roots_and_numa_nodes(tmp_path: Path) -> None:
    found = dgx(tmp_path).hardware()
    ports = {port.device: port.address for port in found.rdma}
    gpus = [gpu.address for gpu in found.gpus]
    assert found.distance(ports["mlx5_0"], gpus[0]) is Distance.PIX
    assert found.distance(ports["mlx5_0"], gpus[1]) is Distance.PHB
    assert found.distance(ports["mlx5_0"], gpus[4]) is Distance.SYS
    assert found.distance("0000:ff:00.0", gpus[0]) is None
    near = found.nearest_gpu(ports["mlx5_9"])
    assert near is not None
    assert (near[0].index, near[1]) == (5, Distance.PIX)


def test_a_processor_lies_between_two_roots_of_one_node_or_of_none_and_two_nodes_of_one_root(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    places = {"pci0000:10/0000:10:00.0": 0, "pci0000:10/0000:10:01.0": 1, "pci0000:20/0000:20:00.0": -1}
    for place, numa in {**places, "pci0000:30/0000:30:00.0": 0}.items():
        machine.gpu(place, numa)
    distance = machine.hardware().distance
    assert distance("0000:10:00.0", "0000:10:01.0") is Distance.PHB, "one root, whatever its devices say"
    assert distance("0000:10:00.0", "0000:20:00.0") is Distance.PHB, "of no node"
    assert distance("0000:20:00.0", "0000:10:01.0") is Distance.PHB, "of no node"
    assert distance("0000:10:00.0", "0000:30:00.0") is Distance.PHB, "of one node"
    assert distance("0000:10:01.0", "0000:30:00.0") is Distance.SYS


def test_several_switches_on_the_way_are_told_from_one(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    root = "pci0000:10/0000:10:01.0/0000:11:00.0"
    machine.gpu(f"{root}/0000:12:00.0/0000:13:00.0/0000:14:00.0/0000:15:00.0", 0)
    machine.gpu(f"{root}/0000:12:01.0/0000:23:00.0/0000:24:00.0/0000:25:00.0", 0)
    found = machine.hardware()
    assert found.distance("0000:15:00.0", "0000:25:00.0") is Distance.PXB


def test_addresses_of_roce_are_told_by_version_and_family(tmp_path: Path) -> None:
    port = roce(tmp_path).hardware().rdma[0]
    assert [(gid.index, gid.kind, gid.ipv4, gid.link_local) for gid in port.gids] == [
        (0, "RoCE v1", None, True),
        (1, "RoCE v2", None, True),
        (2, "RoCE v1", "10.1.0.11", False),
        (3, "RoCE v2", "10.1.0.11", False),
    ]


def test_the_network_s_prefix_before_zeros_is_no_address(tmp_path: Path) -> None:
    """As the table of a real ConnectX-3 has it in 127 of 128 entries."""
    machine = Machine(tmp_path)
    gids = ("fe80:0000:0000:0000:0002:c903:00f9:bfa1", "fe80:0000:0000:0000:0000:0000:0000:0000")
    machine.rdma("mlx4_0", "pci0000:80/0000:80:02.2/0000:82:00.0", 1, gids=tuple((gid, "") for gid in gids))
    assert [gid.index for gid in machine.hardware().rdma[0].gids] == [0]


def test_interfaces_of_every_kind_are_told_apart(tmp_path: Path) -> None:
    found = bonded(tmp_path).hardware()
    kinds = {one.name: one.kind for one in found.interfaces}
    assert kinds == {
        "bond0": "bond", "br-5f1c0a": "bridge", "docker0": "bridge", "enp33s0": "ethernet", "enp34s0": "ethernet",
        "lo": "loopback", "veth1a2b3c": "virtual",
    }  # fmt: skip
    assert [one.name for one in found.interfaces if one.usable] == ["bond0"]
    bond = found.interface("bond0")
    assert bond is not None
    assert bond.members == ("enp33s0", "enp34s0")
    assert laptop(tmp_path / "laptop").hardware().interfaces[1].kind == "wireless"


def test_gpus_are_found_without_nvml(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    machine.nvml = None
    found = machine.hardware()
    assert len(found.gpus) == 8
    assert found.nvml == "NVML was not recorded"
    assert not found.all_linked


def test_amazon_s_adapter_is_no_port_of_nccl(tmp_path: Path) -> None:
    found = cloud(tmp_path, efa=True).hardware()
    assert [port.is_efa for port in found.rdma] == [True]
    assert found.virtual


def test_a_virtio_card_has_the_address_of_the_device_below_which_it_hangs(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.pci("pci0000:00/0000:00:03.0", "0x1af4:0x1000", "0x020000", -1)
    machine.write("sys/devices/pci0000:00/0000:00:03.0/virtio2/vendor", "0x1af4")
    machine.net("eth0", path="pci0000:00/0000:00:03.0/virtio2")
    assert [one.address for one in machine.hardware().interfaces] == ["0000:00:03.0"]


def test_access_control_of_a_bridge_is_read_from_its_configuration() -> None:
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
    config[0x140:0x144] = (0x000D | 1 << 16).to_bytes(4, "little")
    assert _redirects(bytes(config)) is False
    config[0x146] = 0x1D
    assert _redirects(bytes(config)) is True
    assert _redirects(bytes(config[:64])) is None
    # A list that leads back to itself ends all the same.
    config[0x140:0x144] = (0x0003 | 0x100 << 20).to_bytes(4, "little")
    assert _redirects(bytes(config)) is False


class Nvml(SimpleNamespace):
    """Two GPUs with a bridge of two links between them, as pynvml answers; a third link is down."""

    class NVMLError(Exception):
        pass

    NVML_NVLINK_DEVICE_TYPE_GPU, NVML_NVLINK_DEVICE_TYPE_SWITCH, NVML_NVLINK_MAX_LINKS = 0, 2, 18

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:4{handle + 1}:00.0".encode())

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA RTX A6000"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=48 * 2**30)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link > 2:
            raise self.NVMLError
        return int(link < 2)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return self.nvmlDeviceGetPciInfo(1 - handle)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> Any:
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=14062))]


def test_links_are_read_from_nvml_and_joined_with_the_bus(tmp_path: Path) -> None:
    answers, why = read_nvml(Nvml())
    assert why == ""
    links = (("gpu", "0000:42:00.0"),) * 2
    assert answers is not None
    assert answers[0] == NvmlGpu(0, "0000:41:00.0", "NVIDIA RTX A6000", 48 * 2**30, links, 14062)
    machine = bonded(tmp_path)
    machine.nvml = answers
    found = machine.hardware()
    assert [gpu.peers for gpu in found.gpus] == [("0000:42:00.0",), ("0000:41:00.0",)]
    assert found.all_linked
    assert pci_address("00000000:1B:00.0") == "0000:1b:00.0"
    assert pci_address("00010000:E3:00.0") == "10000:e3:00.0"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[01-03,07],login1", ["gpu01", "gpu02", "gpu03", "gpu07", "login1"]),
        ("node[9-11]-ib", ["node9-ib", "node10-ib", "node11-ib"]),
        ("one", ["one"]),
        ("", []),
        ("a[x],b[", ["a[x]", "b"]),
    ],
)
def test_slurm_s_lists_of_nodes_are_read(text: str, names: list[str]) -> None:
    assert expand_nodes(text) == names


@pytest.mark.parametrize("kind", MACHINES)
def test_a_damaged_tree_is_read_as_far_as_it_goes(kind: str, tmp_path: Path) -> None:
    machine = MACHINES[kind](tmp_path)
    machine.finish()
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink())
    chance = random.Random(kind)
    for path in chance.sample(files, len(files) // 3):
        damage = chance.choice(["gone", "empty", "garbage"])
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(b"" if damage == "empty" else bytes(chance.randrange(256) for _ in range(40)))
    found = read_hardware(tmp_path)
    assert found.host


MANY = "9" * 5000


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("proc/meminfo", f"MemTotal: {MANY} kB"),
        ("proc/meminfo", f"MemTotal: {MANY[:400]} kB"),
        ("proc/cpuinfo", f"processor: 0\nphysical id: 0\ncpu cores: {MANY}"),
        ("proc/sys/kernel/osrelease", f"{MANY}.1"),
        ("proc/sys/kernel/osrelease", f"6.{MANY}"),
        ("proc/driver/nvidia/gpus/0000:13:00.0/numa_status", f"Node: {MANY}"),
        ("sys/class/infiniband/mlx5_0/ports/1/rate", "1.2.3 Gb/sec"),
        ("sys/class/infiniband/mlx5_0/ports/1/rate", f"{MANY[:400]} Gb/sec"),
        ("sys/class/net/eno3/speed", MANY[:400]),
        ("etc/nccl.conf", f"NCCL_IB_TIMEOUT={MANY}"),
    ],
)
def test_numbers_that_no_machine_has_are_left_out(
    path: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = dgx(tmp_path)
    machine.finish("dgx01")
    machine.write(path, text)
    assert main(["doctor", "--topology", "--nccl", "--root", str(tmp_path)]) in (0, 1)
    shown = capsys.readouterr()
    assert "dgx01" in shown.out
    assert "Traceback" not in shown.err


def test_this_machine_is_read() -> None:
    found = read_hardware()
    assert found.cpus >= 1
    assert found.memory_bytes > 2**28
    lo = found.interface("lo")
    assert lo is not None
    assert lo.kind == "loopback"
    assert "127.0.0.1" in lo.addresses
