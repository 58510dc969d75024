"""Recordings: what is read of one is what was read of the machine; what is in it, and what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from ipaddress import IPv6Address
from pathlib import Path

import pytest

from meshwright.cluster.hardware import Hardware
from meshwright.cluster.recording import Recorder, lay_out, opened, record
from meshwright.cluster.sysfs import read_hardware
from meshwright.comm.nccl_profile import nccl_profile
from meshwright.comm.nccl_variables import given_settings
from meshwright.errors import UserError
from tests.machines import MACHINES, ROCE_GIDS, Machine, dgx, laptop, roce

ANSWER = {"index": 0, "address": "0000:01:00.0", "name": "NVIDIA H100", "memory_bytes": 80 * 2**30}


def again(root: Path, file: Path) -> Hardware:
    """What is read of a recording of a tree."""
    file.write_text(record(root), encoding="utf-8")
    with opened(file) as folder:
        return read_hardware(folder)


def without_gids(hardware: Hardware) -> Hardware:
    return replace(hardware, rdma=tuple(replace(port, gids=()) for port in hardware.rdma))


@pytest.mark.parametrize("name", MACHINES)
def test_a_recording_is_read_as_the_machine_was(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name](tmp_path / "root")
    machine.write("etc/nccl.conf", "# ours\nNCCL_DEBUG=WARN\nPASSWORD=hunter2")
    found = machine.hardware()
    told = again(tmp_path / "root", tmp_path / "recording.json")
    assert without_gids(told) == without_gids(found)
    assert nccl_profile(told, {}).environment() == nccl_profile(found, {}).environment()
    for before, after in zip(found.rdma, told.rdma, strict=True):
        rows = [[(gid.index, gid.kind, gid.ipv4, gid.link_local) for gid in port.gids] for port in (before, after)]
        assert rows[0] == rows[1]
    with opened(tmp_path / "recording.json") as root:
        assert [(key, one.value) for key, one in given_settings({}, root).items()] == [("NCCL_DEBUG", "WARN")]
    assert "hunter2" not in (tmp_path / "recording.json").read_text()


@pytest.mark.parametrize("name", MACHINES)
def test_a_recording_of_a_recording_is_the_same(name: str, tmp_path: Path) -> None:
    MACHINES[name](tmp_path / "root").finish()
    file = tmp_path / "recording.json"
    file.write_text(record(tmp_path / "root"), encoding="utf-8")
    (tmp_path / "laid out").mkdir()
    lay_out(file, tmp_path / "laid out")
    parts, kept = (json.loads(text) for text in (record(tmp_path / "laid out"), file.read_text(encoding="utf-8")))
    assert parts["folders"] == kept["folders"]


def test_cores_of_packages_are_counted_in_the_recording_too(tmp_path: Path) -> None:
    machine = laptop(tmp_path / "root")
    one = "vendor_id\t: GenuineIntel\ncpu cores\t: 2\n"
    blocks = [f"processor\t: {cpu}\nphysical id\t: {cpu // 4}\n{one}" for cpu in range(8)]
    machine.write("proc/cpuinfo", "\n".join(blocks))
    assert machine.hardware().cores == 4
    assert again(tmp_path / "root", tmp_path / "recording.json").cores == 4


def test_links_from_the_root_on_lead_to_the_same_place_in_the_recording(tmp_path: Path) -> None:
    dgx(tmp_path / "root").finish()
    root = tmp_path / "root"
    (root / "etc/nccl.conf").symlink_to("/etc/nccl.d/ours.conf")
    (root / "etc/nccl.d").mkdir()
    recorder = Recorder(root)
    recorder.real("etc/nccl.conf")
    assert recorder.folders["etc"]["nccl.conf"] == ["nccl.d/ours.conf"]
    assert recorder.folders["etc/nccl.d"] == {}


def test_a_machine_of_which_nothing_can_be_read_is_a_recording_all_the_same(tmp_path: Path) -> None:
    for name in ("sys", "proc"):
        (tmp_path / "root" / name).mkdir(parents=True)
    assert again(tmp_path / "root", tmp_path / "recording.json").host == "root"


def test_this_machine_can_be_recorded(tmp_path: Path) -> None:
    found, told = read_hardware(), again(Path("/"), tmp_path / "here.json")
    assert (told.host, told.processor, told.cpus) == (found.host, found.processor, found.cpus)
    assert [one.name for one in told.interfaces] == [one.name for one in found.interfaces]
    assert told.pci == found.pci


def test_what_marks_one_machine_out_of_all_is_not_recorded(tmp_path: Path) -> None:
    machine = roce(tmp_path)
    bridge = "sys/devices/pci0000:10/0000:10:01.0"
    serial = bytes.fromhex("c0ffee00ab1e5e71")
    # A serial number is another capability of the same space as access control.
    config = bytearray(4096)
    config[0x100:0x104] = (0x0003 | 1 << 16 | 0x140 << 20).to_bytes(4, "little")
    config[0x104:0x10C] = serial
    config[0x140:0x148] = (0x000D | 1 << 16).to_bytes(4, "little") + bytes.fromhex("00001d00")
    machine.write(f"{bridge}/config", bytes(config))
    net = next((tmp_path / "sys").glob("devices/**/net/ens1f0")).relative_to(tmp_path)
    secrets = {
        f"{net}/address": "0c:42:a1:7b:00:01",
        f"{net}/uevent": "INTERFACE=ens1f0\nID=secret-of-uevent",
        "sys/class/dmi/id/product_serial": "SERIAL-1234",
        "proc/driver/nvidia/gpus/0000:13:00.0/information": "Model: \t\t NVIDIA A100\nGPU UUID: \t GPU-5ec2e7",
        "proc/driver/nvidia/version": "NVRM version: 550\nGCC version: secret-of-gcc",
        "etc/hosts": "127.0.0.1 localhost\n10.9.8.7 secret-of-hosts",
        "proc/net/if_inet6": "fe800000000000000e42a1fffe7b0001 02 40 20 80   ens1f0",
        "sys/class/infiniband/mlx5_1/ports/1/gids/0": "fe80:0000:0000:0000:0e42:a1ff:fe7b:0002",
    }
    for path, text in secrets.items():
        machine.write(path, text)
    machine.finish()
    text = record(tmp_path)
    for secret in ("a1ff", "0c:42", "e71", "SERIAL", "5ec2e7", "secret-of", "c0ffee"):
        assert secret not in text.lower().replace("serial numbers", "") or (secret == "SERIAL" and secret not in text)
    (tmp_path / "recording.json").write_text(text)
    with opened(tmp_path / "recording.json") as root:
        found = read_hardware(root)
    assert found.pci["0000:10:01.0"].redirects is True
    assert found.gpus[0].name == "NVIDIA A100 80GB PCIe"
    interface = found.interface("ens1f0")
    assert interface is not None
    assert "fe80::" in interface.addresses[1]
    # An address has one number wherever it is, another has another; those of IPv4 stay.
    assert len({gid.value for gid in found.rdma[0].gids}) == 2
    first, second = (str(IPv6Address(port.gids[0].value)) for port in found.rdma[:2])
    assert first == interface.addresses[1]
    assert first != second


def test_names_made_of_hardware_addresses_have_numbers_in_their_place(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "root")
    machine.system(virtual=True, maker="Microsoft Corporation")
    machine.loopback()
    bus, card = "LNXSYSTM:00/VMBUS:00", "000d3a7b-1c2d-000d-3a7b-1c2d000d3a7b"
    machine.write(f"sys/devices/{bus}/{card}/vendor", "0x1414")
    machine.net("enxb03af2b6059f", "10.0.0.4/24", path=f"{bus}/{card}", mbit_s=50000, default=True)
    machine.net("enx00155d0102ff", "10.1.0.4/24", path=f"{bus}/{card}", mbit_s=50000)
    machine.net("enp1s0", "10.2.0.4/24")
    folder = machine.net("bond0", "10.3.0.4/24", mbit_s=100000, uevent="DEVTYPE=bond")
    machine.write(f"{folder}/bonding/slaves", "enxb03af2b6059f enx00155d0102ff")
    machine.gpu(f"{bus}/47505500-0001-0000-3130-444531334632/pci0001:00/0001:00:00.0", 0)
    place = "pci0000:20/0000:20:00.0"
    machine.rdma("rocexb8599f0300c7b0aa", place, 0, layer="Ethernet", net="enxb03af2b6059f", gids=ROCE_GIDS)
    machine.write("etc/nccl.conf", "NCCL_SOCKET_IFNAME==enxb03af2b6059f\nNCCL_IB_HCA==rocexb8599f0300c7b0aa:1")
    found = machine.hardware()
    file = tmp_path / "recording.json"
    told = again(tmp_path / "root", file)
    text = file.read_text()
    for secret in ("b03af2b6059f", "00155d0102ff", "b8599f0300c7b0aa", "000d3a7b", "444531334632"):
        assert secret not in text
    low, high, port = "enx000000000001", "enx000000000002", "rocex0000000000000003"
    assert [one.name for one in told.interfaces] == ["bond0", "enp1s0", low, high, "lo"]
    assert [one.addresses for one in told.interfaces] == [one.addresses for one in found.interfaces]
    bond, default = told.interface("bond0"), told.interface(high)
    assert bond is not None
    assert bond.members == (high, low)
    assert default is not None
    assert (default.default_route, default.vendor, default.mbit_s) == (True, "0x1414", 50000)
    assert [(one.device, one.netdev, one.address) for one in told.rdma] == [(port, high, "0000:20:00.0")]
    assert told.pci["0001:00:00.0"] == found.pci["0001:00:00.0"]
    with opened(file) as root:
        given = {name: one.value for name, one in given_settings({}, root).items()}
        assert json.loads(record(root)) == json.loads(text)
    assert given == {"NCCL_SOCKET_IFNAME": f"={high}", "NCCL_IB_HCA": f"={port}:1"}


def test_a_bridge_without_access_control_is_told_from_one_that_cannot_be_read(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    machine.write("sys/devices/pci0000:10/0000:10:01.0/config", bytes(4096))
    machine.write("sys/devices/pci0000:20/0000:20:01.0/config", bytes(64))
    machine.finish()
    told = again(tmp_path, tmp_path / "recording.json")
    assert [told.pci[f"0000:{bus}:01.0"].redirects for bus in ("10", "20", "30")] == [False, None, None]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"meshwright recording": 2}, "meshwright recording"),
        ({"folders": {"../outside": {"a": "b"}}}, "leads out"),
        ({"folders": {"/tmp/outside": {"a": "b"}}}, "leads out"),
        ({"folders": {"sys": {"../a": "b"}}}, "no name"),
        ({"folders": {"sys": {"up": ["../../outside"]}}}, "leads out"),
        ({"folders": {"sys": {"up": ["/etc"]}}}, "leads out"),
        ({"folders": {"a/b": {"up": ["../.."]}, "sys": {"far": ["../a/b/up/.."]}}}, "leads out"),
        ({"folders": []}, "no recording"),
        ({"access control": {"../x": ""}}, "leads out"),
        ({"access control": {"sys/config": "zz"}}, "no recording"),
        ({"folders": {"sys": {"up": []}, "proc": {}}}, "'up' in 'sys' is neither a file's text nor a link"),
        ({"folders": {"sys": {}, "proc": {"cpuinfo": 5}}}, "'cpuinfo' in 'proc' is neither"),
        ({"folders": {"sys": {}}}, "it has no proc"),
        ({"folders": {}}, "it has no sys"),
        ({"nvml": [{"index": 0}]}, "what NVML answered is damaged"),
        ({"nvml": 3}, "what NVML answered is damaged"),
        ({"nvml": {}}, "what NVML answered is damaged"),
        ({"nvml": [{**ANSWER, "index": [1]}]}, "what NVML answered is damaged"),
        ({"nvml": [{**ANSWER, "index": True}]}, "what NVML answered is damaged"),
        ({"nvml": [{**ANSWER, "address": 5}]}, "what NVML answered is damaged"),
        ({"nvml": [{**ANSWER, "name": 5}]}, "what NVML answered is damaged"),
        ({"nvml": [{**ANSWER, "name": "\x1b[31mH100"}]}, "what NVML answered is damaged"),
        ({"nvml": [{**ANSWER, "name": "\ud800"}]}, "what NVML answered is damaged"),
        ({"nvml": [{**ANSWER, "memory_bytes": "80"}]}, "what NVML answered is damaged"),
        ({"nvml": [{**ANSWER, "memory_bytes": 10**400}]}, "what NVML answered is damaged"),
        ({"nvml": [{**ANSWER, "link_mb_s": "fast"}]}, "what NVML answered is damaged"),
        ({"nvml": [{**ANSWER, "links": [["gpu", "0000:01:00.0", "more"]]}]}, "what NVML answered is damaged"),
        ({"nvml": [{**ANSWER, "links": [["gpu", 5]]}]}, "what NVML answered is damaged"),
        ({"folders": {"sys": {"\x1b[31m": "b"}}}, r"'\\x1b\[31m' has characters"),
        ({"folders": {"sys/\x07": {}}}, r"'sys/\\x07' has characters"),
        ({"folders": {"sys": {"up": ["\x1b"]}}}, r"'\\x1b' has characters"),
        ({"folders": {"sys/\x1b": {"a": 5}}}, r"'sys/\\x1b'"),
    ],
)
def test_a_file_that_is_no_recording_or_leads_out_of_its_folder_is_refused(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    parts = {"meshwright recording": 1, "about": "", "folders": {"sys": {}, "proc": {}}, "access control": {}}
    file = tmp_path / "recording.json"
    file.write_text(json.dumps({**parts, **changed}))
    (tmp_path / "in").mkdir()
    with pytest.raises(UserError, match=said):
        lay_out(file, tmp_path / "in")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "recording.json"]


@pytest.mark.parametrize("missing", ["folders", "access control"])
def test_what_a_recording_lacks_is_named(missing: str, tmp_path: Path) -> None:
    parts = {"meshwright recording": 1, "folders": {"sys": {}, "proc": {}}, "access control": {}}
    del parts[missing]
    file = tmp_path / "recording.json"
    file.write_text(json.dumps(parts))
    with pytest.raises(UserError, match=f'it has no "{missing}"'), opened(file):
        pass


def test_files_that_recorded_settings_name_are_there_in_the_recording(tmp_path: Path) -> None:
    machine = dgx(tmp_path / "root")
    named = {"NCCL_TOPO_FILE": "/srv/nccl/topology.xml", "NCCL_GRAPH_FILE": "/srv/nccl/gone.xml"}
    named["NCCL_DEBUG_FILE"] = "/srv/logs/%h.log"
    machine.write("etc/nccl.conf", "\n".join(f"{name}={path}" for name, path in named.items()))
    machine.write("srv/nccl/topology.xml", "<system/>")
    machine.write("srv/logs/other.log", "what others wrote")
    machine.finish()
    file = tmp_path / "recording.json"
    file.write_text(record(tmp_path / "root"))
    with opened(file) as root:
        assert (root / "srv/nccl/topology.xml").is_file()
        assert not (root / "srv/nccl/gone.xml").exists()
        assert (root / "srv/logs").is_dir()
    assert "<system/>" not in file.read_text()
    assert "other" not in file.read_text()


def test_files_that_a_person_s_settings_name_are_recorded_and_the_settings_are_not(
    tmp_path: Path,
) -> None:
    machine = dgx(tmp_path / "root")
    for name in ("topology.xml", "graph.xml", "plugin.xml", "\x1b.log"):
        machine.write(f"srv/{name}", "<system/>")
    machine.write("home/one/.nccl.conf", "NCCL_GRAPH_FILE=/srv/graph.xml\nNCCL_IB_DISABLE=1")
    machine.finish()
    environment = {"HOME": "/home/one", "NCCL_TOPO_FILE": "/srv/topology.xml", "PLUGIN": "/srv/plugin.xml"}
    environment |= {"NCCL_DEBUG_FILE": "/srv/\x1b.log", "NCCL_TOPO_DUMP_FILE": "/" + "a" * 5000}
    file = tmp_path / "recording.json"
    file.write_text(record(tmp_path / "root", environment=environment))
    with opened(file) as root:
        assert sorted(path.name for path in (root / "srv").iterdir()) == ["graph.xml", "topology.xml"]
        assert not (root / "home").exists()
    assert "NCCL_" not in file.read_text()


def test_a_machine_s_own_name_is_a_loopback_address_in_the_recording_too(tmp_path: Path) -> None:
    machine = dgx(tmp_path / "root")
    machine.write("etc/hosts", "127.0.0.1 localhost\n  127.0.1.1 node01")
    assert machine.hardware().loopback_name
    assert again(tmp_path / "root", tmp_path / "recording.json").loopback_name


def test_why_nvml_told_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dgx(tmp_path / "root").finish()
    (tmp_path / "root/nvml.json").write_text(json.dumps("NVML does not answer: Driver Not Loaded"))
    told = again(tmp_path / "root", tmp_path / "recording.json")
    assert told.nvml == "NVML does not answer: Driver Not Loaded"
    monkeypatch.setattr("meshwright.cluster.recording.ask_nvml", lambda: (None, "NVML is not asked"))
    assert again(Path("/"), tmp_path / "recording.json").nvml == "NVML is not asked"


def test_lists_without_an_end_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "recording.json"
    file.write_text("[" * 100_000)
    with pytest.raises(UserError, match="no recording"), opened(file):
        pass


def test_text_that_is_no_json_is_refused(tmp_path: Path) -> None:
    laptop(tmp_path / "root").finish()
    file = tmp_path / "recording.json"
    file.write_text(record(tmp_path / "root")[:-20])
    with pytest.raises(UserError, match="no recording"), opened(file):
        pass
