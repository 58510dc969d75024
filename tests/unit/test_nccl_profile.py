"""Settings for NCCL: what is chosen on which machine, what of a user's is wrong, and that no value breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from meshwright.cli.doctor_nccl import shell_lines
from meshwright.cluster.hardware import Hardware
from meshwright.comm.host_limits import HostLimits, check_limits
from meshwright.comm.nccl_profile import Finding, Level, Profile, nccl_profile
from meshwright.comm.nccl_selection import fabric_ports, roce_gid, socket_interfaces
from meshwright.comm.nccl_variables import given_settings, known_names
from tests.machines import MACHINES, ROCE_GIDS, Machine, bonded, cloud, dgx, laptop, roce


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hardware]:
    folder = tmp_path_factory.mktemp("machines")
    return {name: make(folder / name).hardware() for name, make in MACHINES.items()}


def about(profile: Profile, name: str) -> Finding:
    """The one finding about a name."""
    found = [finding for finding in profile.findings if finding.about == name]
    assert len(found) == 1, found
    return found[0]


def test_the_compute_fabric_is_chosen_and_storage_left_out(machines: dict[str, Hardware]) -> None:
    profile = nccl_profile(machines["dgx"], {})
    assert profile.environment() == {
        "NCCL_SOCKET_IFNAME": "=eno3",
        "GLOO_SOCKET_IFNAME": "eno3",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_9,mlx5_10,mlx5_11",
    }
    assert profile.findings == ()
    assert all(setting.reason for setting in profile.settings)


def test_one_machine_needs_no_network(machines: dict[str, Hardware]) -> None:
    assert nccl_profile(machines["dgx"], {}, machines=1).environment() == {}


def test_a_large_fabric_is_given_more_time(machines: dict[str, Hardware]) -> None:
    profile = nccl_profile(machines["dgx"], {}, machines=512)
    assert profile.environment()["NCCL_IB_TIMEOUT"] == "22"
    reason = next(one.reason for one in profile.settings if one.name == "NCCL_IB_TIMEOUT")
    # 4.096 us x 2^22 x 7 tries.
    assert "120 s" in reason
    assert "30 s" in reason


def test_roce_of_the_slower_card_is_left_out_and_its_traffic_class_asked_for(machines: dict[str, Hardware]) -> None:
    profile = nccl_profile(machines["roce"], {})
    assert profile.environment()["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1,mlx5_2,mlx5_3"
    assert "NCCL_IB_GID_INDEX" not in profile.environment(), "NCCL finds index 3 by itself"
    assert [question.name for question in profile.questions] == ["NCCL_IB_TC", "NCCL_P2P_LEVEL"]
    assert about(profile, "GPUDirect").level is Level.WARNING


def test_the_gid_is_set_where_nccl_would_take_another(tmp_path: Path) -> None:
    # Only link-local addresses: NCCL stays at index 0, which is RoCE v1.
    found = roce(tmp_path, ROCE_GIDS[:2]).hardware()
    gid = roce_gid(found.rdma[0])
    assert gid is not None
    assert (gid.index, gid.kind) == (0, "RoCE v1")
    assert nccl_profile(found, {}).environment()["NCCL_IB_GID_INDEX"] == "1"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)])
def test_nccl_s_own_choice_of_a_gid_is_roce_2_with_ipv4(order: tuple[int, ...], tmp_path: Path) -> None:
    found = roce(tmp_path, tuple(ROCE_GIDS[index] for index in order)).hardware()
    gid = roce_gid(found.rdma[0])
    assert gid is not None
    assert (gid.kind, gid.ipv4) == ("RoCE v2", "10.1.0.11")


def test_fast_ethernet_without_rdma_gets_more_sockets(machines: dict[str, Hardware], tmp_path: Path) -> None:
    wanted = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    assert nccl_profile(machines["cloud"], {}).environment() == wanted
    slow = cloud(tmp_path / "slow", mbit_s=10000).hardware()
    assert nccl_profile(slow, {}).environment() == {}
    unknown = nccl_profile(cloud(tmp_path / "unknown", mbit_s=None).hardware(), {})
    assert unknown.environment() == {}
    assert "NCCL_SOCKET_NTHREADS" in {question.name for question in unknown.questions}


def test_containers_interfaces_are_passed_over(machines: dict[str, Hardware]) -> None:
    assert [one.name for one in socket_interfaces(machines["bonded"], None)] == ["bond0", "br-5f1c0a"]
    environment = nccl_profile(machines["bonded"], {}).environment()
    assert environment == {"NCCL_SOCKET_IFNAME": "=bond0", "GLOO_SOCKET_IFNAME": "bond0"}


def test_a_machine_without_gpus_needs_nothing_of_nccl(machines: dict[str, Hardware], tmp_path: Path) -> None:
    assert nccl_profile(machines["laptop"], {}).environment() == {}
    machine = laptop(tmp_path)
    machine.write("etc/hosts", "127.0.0.1 localhost\n127.0.1.1 node01.example node01  # ours")
    assert nccl_profile(machine.hardware(), {}).environment() == {"GLOO_SOCKET_IFNAME": "wlp0s20f3"}


def test_azure_s_topology_is_named_where_it_is(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    machine.system(2, cores=96, gib=1800, virtual=True, maker="Microsoft Corporation")
    assert "NCCL_TOPO_FILE" not in nccl_profile(machine.hardware(), {}).environment()
    machine.write("opt/microsoft/ndv5-topo.xml", "<system/>")
    assert nccl_profile(machine.hardware(), {}).environment()["NCCL_TOPO_FILE"] == "/opt/microsoft/ndv5-topo.xml"


def test_a_port_that_is_down_is_told_with_what_is_left(tmp_path: Path) -> None:
    profile = nccl_profile(dgx(tmp_path, down="mlx5_4").hardware(), {})
    finding = about(profile, "RDMA")
    assert "mlx5_4:1 (DOWN)" in finding.text
    assert "7 x 400 Gb/s of 8 ports" in finding.cost
    assert "88%" in finding.cost
    assert "mlx5_4" not in profile.environment()["NCCL_IB_HCA"]


def test_amazon_s_adapter_needs_its_plugin(tmp_path: Path) -> None:
    machine = cloud(tmp_path, efa=True)
    assert "1 x 100 Gb/s" in about(nccl_profile(machine.hardware(), {}), "EFA").text
    machine.write("opt/amazon/ofi-nccl/lib/libnccl-net.so", "")
    assert nccl_profile(machine.hardware(), {}).findings == ()


def test_an_iommu_that_translates_is_told_and_one_that_passes_is_not(tmp_path: Path) -> None:
    for kind, expected in (("DMA-FQ", ["IOMMU"]), ("identity", [])):
        machine = Machine(tmp_path / kind)
        machine.system()
        machine.card("eth0", "10.0.0.1/24", "pci0000:00/0000:00:01.0/0000:01:00.0", 0, 10000, default=True)
        machine.gpu("pci0000:00/0000:00:02.0/0000:02:00.0", 0, iommu=kind)
        assert [finding.about for finding in nccl_profile(machine.hardware(), {}).findings] == expected


def test_what_a_user_set_is_kept_and_named(machines: dict[str, Hardware]) -> None:
    ours = nccl_profile(machines["dgx"], {}).environment()["NCCL_IB_HCA"]
    profile = nccl_profile(machines["dgx"], {"NCCL_IB_HCA": ours, "NCCL_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "WARN"})
    assert profile.environment() == {"GLOO_SOCKET_IFNAME": "ib0"}, "gloo follows the user's choice"
    kept = {one.name: (one.value, one.agrees) for one in profile.kept}
    assert kept == {
        "NCCL_DEBUG": ("WARN", None), "NCCL_IB_HCA": (ours, True), "NCCL_SOCKET_IFNAME": ("ib0", False),
    }  # fmt: skip
    assert profile.findings == ()


WRONG = [
    ("dgx", {"NCCL_SOCKET_IFNAME": "eth7"}, "NCCL_SOCKET_IFNAME", Level.BREAKS, "no interface eth7"),
    ("dgx", {"NCCL_SOCKET_IFNAME": "lo"}, "NCCL_SOCKET_IFNAME", Level.BREAKS, "loopback"),
    ("dgx", {"NCCL_SOCKET_IFNAME": "=ib0,=ib1"}, "NCCL_SOCKET_IFNAME", Level.WARNING, "only the first name"),
    ("bonded", {"NCCL_SOCKET_IFNAME": "docker0"}, "NCCL_SOCKET_IFNAME", Level.BREAKS, "docker0 is down"),
    ("bonded", {"NCCL_SOCKET_IFNAME": "enp33s0"}, "NCCL_SOCKET_IFNAME", Level.BREAKS, "has no address"),
    ("dgx", {"GLOO_SOCKET_IFNAME": "=eno3"}, "GLOO_SOCKET_IFNAME", Level.BREAKS, "without ^ and ="),
    ("dgx", {"GLOO_SOCKET_IFNAME": "lo"}, "GLOO_SOCKET_IFNAME", Level.BREAKS, "loopback"),
    ("dgx", {"NCCL_IB_HCA": "=mlx5_2"}, "NCCL_IB_HCA", Level.WARNING, ""),
    ("dgx", {"NCCL_NET": "Socket"}, "NCCL_NET", Level.WARNING, "not used"),
    ("cloud", {"NCCL_NET": "IB"}, "NCCL_NET", Level.BREAKS, "asks for IB"),
    ("laptop", {"NCCL_NET": "IB"}, "NCCL_NET", Level.WARNING, "asks for IB"),
    ("laptop", {"GLOO_SOCKET_IFNAME": "eth7"}, "GLOO_SOCKET_IFNAME", Level.BREAKS, "no interface eth7"),
    ("dgx", {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "ten"}, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", Level.BREAKS, "no number"),
    ("roce", {"NCCL_IB_GID_INDEX": "7"}, "NCCL_IB_GID_INDEX", Level.BREAKS, "no address at index 7"),
    ("roce", {"NCCL_IB_GID_INDEX": "2"}, "NCCL_IB_GID_INDEX", Level.WARNING, "RoCE v1"),
    ("roce", {"NCCL_IB_GID_INDEX": "1"}, "NCCL_IB_GID_INDEX", Level.WARNING, "link-local"),
    ("dgx", {"NCCL_IB_GID_INDEX": "3"}, "NCCL_IB_GID_INDEX", Level.NOTE, "InfiniBand"),
    ("dgx", {"NCCL_IB_TIMEOUT": "14"}, "NCCL_IB_TIMEOUT", Level.WARNING, "0.47 s"),
    ("dgx", {"NCCL_IB_TIMEOUT": "soon"}, "NCCL_IB_TIMEOUT", Level.WARNING, "reads it as 0"),
    ("dgx", {"NCCL_IB_TIMEOUT": "99"}, "NCCL_IB_TIMEOUT", Level.WARNING, "no time that ends"),
    ("dgx", {"NCCL_IB_TIMEOUT": "0"}, "NCCL_IB_TIMEOUT", Level.WARNING, "no time that ends"),
    ("dgx", {"NCCL_IB_GDR_LEVEL": "PIX"}, "NCCL_IB_GDR_LEVEL", Level.WARNING, "any more"),
    ("dgx", {"NCCL_BUFFSIZE": "1024"}, "NCCL_BUFFSIZE", Level.WARNING, "128 at a time"),
    ("dgx", {"NCCL_IB_HCA": "=mlx5_0:x,mlx5_3"}, "NCCL_IB_HCA", Level.WARNING, "mlx5_0 has no such port"),
    ("dgx", {"NCCL_IB_DISABLE": "yes"}, "NCCL_IB_DISABLE", Level.WARNING, "reads it as 0"),
    ("dgx", {"NCCL_SOKET_IFNAME": "x"}, "NCCL_SOKET_IFNAME", Level.WARNING, "NCCL_SOCKET_IFNAME"),
    ("dgx", {"NCCL_ASYNC_ERROR_HANDLING": "1"}, "NCCL_ASYNC_ERROR_HANDLING", Level.NOTE, "old name"),
    ("dgx", {"NCCL_TREE_THRESHOLD": "1"}, "NCCL_TREE_THRESHOLD", Level.WARNING, "any more"),
    ("dgx", {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NETT"}, "NCCL_DEBUG_SUBSYS", Level.WARNING, "'NET'"),
    ("dgx", {"NCCL_DEBUG": "LOUD"}, "NCCL_DEBUG", Level.WARNING, "LOUD"),
    ("dgx", {"NCCL_P2P_LEVEL": "phb"}, "NCCL_P2P_LEVEL", Level.WARNING, "'PHB'"),
    ("dgx", {"NCCL_P2P_LEVEL": "LOC"}, "NCCL_P2P_LEVEL", Level.WARNING, "directly"),
    ("dgx", {"NCCL_NET_GDR_LEVEL": "LOC"}, "NCCL_NET_GDR_LEVEL", Level.WARNING, "switched off"),
    ("dgx", {"NCCL_NET_GDR_LEVEL": "9"}, "NCCL_NET_GDR_LEVEL", Level.WARNING, "'9' is no level: they end at 5"),
    ("dgx", {"NCCL_P2P_LEVEL": "12"}, "NCCL_P2P_LEVEL", Level.WARNING, "'12' is no level"),
    ("dgx", {"NCCL_ALGO": "Foo"}, "NCCL_ALGO", Level.BREAKS, "'Foo' is no word for it"),
    ("dgx", {"NCCL_ALGO": "^Tree,Rng"}, "NCCL_ALGO", Level.BREAKS, "'Rng' is no word for it (did you mean 'RING'?)"),
    ("dgx", {"NCCL_ALGO": "ring;allreduce:tree, nvls"}, "NCCL_ALGO", Level.BREAKS, "' nvls' is no word"),
    ("dgx", {"NCCL_PROTO": "LL256"}, "NCCL_PROTO", Level.BREAKS, "'LL256' is no word for it"),
    ("dgx", {"NCCL_TOPO_FILE": "/nowhere.xml"}, "NCCL_TOPO_FILE", Level.WARNING, "/nowhere.xml"),
    ("dgx", {"NCCL_GRAPH_FILE": "/nowhere.xml"}, "NCCL_GRAPH_FILE", Level.BREAKS, "/nowhere.xml"),
    ("dgx", {"NCCL_DEBUG_FILE": "/nowhere/%h"}, "NCCL_DEBUG_FILE", Level.WARNING, "no folder /nowhere"),
    ("dgx", {"NCCL_BUFFSIZE": "33554432"}, "NCCL_BUFFSIZE", Level.WARNING, "8 times the default"),
    ("dgx", {"NCCL_BUFFSIZE": "5000000"}, "NCCL_BUFFSIZE", Level.NOTE, "power of two"),
    ("cloud", {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}, "NCCL_NSOCKS_PERTHREAD", Level.WARNING,
     "128"),
    ("cloud", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "NCCL_SHM_DISABLE", Level.WARNING, "shared memory"),
    ("dgx", {"NCCL_SHM_DISABLE": "1"}, "NCCL_SHM_DISABLE", Level.WARNING, "shared memory"),
    (
        "dgx",
        {"NCCL_MIN_NCHANNELS": "32", "NCCL_MAX_NCHANNELS": "4"},
        "NCCL_MIN_NCHANNELS",
        Level.WARNING,
        "NCCL_MAX_NCHANNELS=4",
    ),
    ("dgx", {"NCCL_NTHREADS": "7"}, "NCCL_NTHREADS", Level.WARNING, "no multiple of 32"),
    ("dgx", {"NCCL_NET": "Sockets"}, "NCCL_NET", Level.WARNING, "did you mean 'Socket'"),
    ("dgx", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING", Level.WARNING, "not handled"),
    ("dgx", {"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT", Level.WARNING, "blocks"),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "environment", "name", "level", "said"), WRONG, ids=lambda value: str(value)[:40])
def test_nonsense_is_told(
    machine: str, environment: dict[str, str], name: str, level: Level, said: str, machines: dict[str, Hardware]
) -> None:
    profile = nccl_profile(machines[machine], environment)
    found = [finding for finding in profile.findings if finding.about == name]
    assert any(finding.level is level and said in finding.text for finding in found), profile.findings
    assert profile.breaks == (level is Level.BREAKS)
    assert environment.items() <= {kept.name: kept.value for kept in profile.kept}.items()
    # Without it nothing of the kind is said.
    assert all(finding.about != name for finding in nccl_profile(machines[machine], {}).findings)


@pytest.mark.parametrize(("threads", "taken"), [("7", 512), ("1024", 512), ("32", 64)])
def test_a_number_of_threads_that_nccl_does_not_take_is_told_with_the_one_it_takes(
    threads: str, taken: int, machines: dict[str, Hardware]
) -> None:
    cost = about(nccl_profile(machines["dgx"], {"NCCL_NTHREADS": threads}), "NCCL_NTHREADS").cost
    assert f"NCCL takes {taken} instead" in cost
    for right in ("0", "96", "512"):
        found = nccl_profile(machines["dgx"], {"NCCL_NTHREADS": right}).findings
        assert all(one.about != "NCCL_NTHREADS" for one in found)


def test_costs_are_told_in_numbers(machines: dict[str, Hardware], tmp_path: Path) -> None:
    without_ip = dgx(tmp_path, ip_over_ib=False).hardware()
    cost = about(nccl_profile(without_ip, {"NCCL_IB_DISABLE": "1"}), "NCCL_IB_DISABLE").cost
    assert "1 x 10 Gb/s (eno3), instead of 8 x 400 Gb/s: 320 times slower" in cost
    profile = nccl_profile(machines["dgx"], {"NCCL_IB_HCA": "mlx5_1"})
    costs = {finding.text: finding.cost for finding in profile.findings}
    assert "3 x 400 Gb/s instead of 8 x 400 Gb/s: 2.7 times" in costs["ports of the compute fabric are left out"]
    assert "mlx5_1 is a prefix, and takes mlx5_10, mlx5_11 too" in costs
    cost = about(nccl_profile(machines["dgx"], {"NCCL_P2P_DISABLE": "1"}), "NCCL_P2P_DISABLE").cost
    assert "18 NVLinks for each GPU of 478 GB/s" in cost


def test_switches_that_cannot_add_are_not_said_to(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    finding = about(nccl_profile(machine.hardware(), {"NCCL_NVLS_ENABLE": "0"}), "NCCL_NVLS_ENABLE")
    assert finding.text == "4 NVSwitches could add"
    for path in tmp_path.glob("sys/devices/pci0000:00/0000:00:01.0/*/device"):
        path.write_text("0x1af1\n")
    found = machine.hardware()
    assert found.nvswitches == 4
    assert nccl_profile(found, {"NCCL_NVLS_ENABLE": "0"}).findings == ()


def test_sockets_are_counted_with_no_more_threads_than_nccl_takes(machines: dict[str, Hardware]) -> None:
    settings = {"NCCL_SOCKET_NTHREADS": "17", "NCCL_NSOCKS_PERTHREAD": "4"}
    found = [one.about for one in nccl_profile(machines["cloud"], settings).findings]
    assert found == ["NCCL_SOCKET_NTHREADS"], "17 are taken for 16, and 16 x 4 are not too many"


def test_one_wrong_subsystem_costs_the_whole_list(machines: dict[str, Hardware]) -> None:
    settings = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NETT"}
    assert about(nccl_profile(machines["dgx"], settings), "NCCL_DEBUG_SUBSYS").cost == "NCCL ignores the whole list"
    settings["NCCL_DEBUG_SUBSYS"] = "init,, Net,"
    assert [one.about for one in nccl_profile(machines["dgx"], settings).findings] == ["NCCL_DEBUG"]


def test_plugins_names_are_let_be(machines: dict[str, Hardware]) -> None:
    environment = {"NCCL_FASTRAK_CTRL_DEV": "eth0", "NCCL_TUNER_CONFIG_PATH": "/x", "NCCL_VERSION": "2.27"}
    assert nccl_profile(machines["dgx"], environment).findings == ()


def test_limits_are_held_against_what_the_machine_has(machines: dict[str, Hardware]) -> None:
    low = HostLimits(64 * 1024, 1024, 64 * 2**20)
    levels = {finding.about: finding.level for finding in check_limits(low, machines["dgx"])}
    warnings = {"open files": Level.WARNING, "shared memory": Level.WARNING}
    assert levels == {"locked memory": Level.BREAKS, **warnings}
    assert {finding.about for finding in check_limits(low, machines["cloud"])} == warnings.keys()
    assert list(check_limits(HostLimits(None, None, None), machines["dgx"])) == []
    assert list(check_limits(low, machines["laptop"])) == []


def test_lines_for_a_shell_set_what_is_meant(machines: dict[str, Hardware], tmp_path: Path) -> None:
    import subprocess

    for machine in machines.values():
        profile = nccl_profile(machine, {"NCCL_DEBUG_FILE": "/x/`touch pwned`\n$(touch pwned)/y"})
        script = shell_lines(profile) + "env -0"
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env={}, cwd=tmp_path)
        shown = dict(pair.split("=", 1) for pair in done.stdout.split("\0") if "=" in pair)
        assert profile.environment().items() <= shown.items()
        assert "NCCL_DEBUG_FILE" not in shown
    assert not list(tmp_path.iterdir())


values = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "0", "1", "-1", "99999999999999999999", "0x", "^", "=", "^=", ",", ":", "=,:", "eth0", "lo",
                     "^lo", "mlx5_0", "=mlx5_0:1", "^=mlx5_0:x", "SYS", "LOC", "ALL,^", "/dev/null", "\x00", "٣"]),
)  # fmt: skip
names = st.one_of(
    st.sampled_from(sorted(known_names())),
    st.sampled_from([name for name in sorted(known_names()) if "IFNAME" in name or "IB_" in name or "P2P" in name]),
    st.text(max_size=10).map(lambda text: f"NCCL_{text}"),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(sorted(MACHINES)),
    environment=st.dictionaries(names, values, max_size=8),
    count=st.integers(1, 300),
)
@example(kind="bonded", environment={"NCCL_SOCKET_IFNAME": "lo"}, count=2)
def test_no_environment_breaks_it_and_none_is_overruled(
    kind: str, environment: dict[str, str], count: int, machines: dict[str, Hardware]
) -> None:
    profile = nccl_profile(machines[kind], environment, count)
    assert not profile.environment().keys() & environment.keys()
    assert {kept.name: kept.value for kept in profile.kept} == environment
    named = [*profile.settings, *profile.left, *profile.questions]
    assert len({one.name for one in named}) == len(named), "a name is in one list only"
    assert all(finding.text for finding in profile.findings)
    profile.as_json()
    shell_lines(profile)
    # What it would set is not wrong by its own measure.
    adopted = nccl_profile(machines[kind], profile.environment(), count)
    assert not [finding for finding in adopted.findings if finding.about in profile.environment()]


def test_fabric_ports_are_all_where_none_is_beside_a_gpu(tmp_path: Path) -> None:
    machine = bonded(tmp_path)
    for index in range(2):
        machine.rdma(f"mlx5_{index}", f"pci0000:60/0000:60:0{index + 1}.0/0000:6{index + 1}:00.0", 0)
    found = machine.hardware()
    assert [port.device for port in fabric_ports(found)] == ["mlx5_0", "mlx5_1"]
    question = next(one for one in nccl_profile(found, {}).questions if one.name == "NCCL_NET_GDR_LEVEL")
    assert "PHB" in question.reason


@pytest.mark.parametrize(
    "settings",
    [
        {"NCCL_ALGO": "Ring"},
        {"NCCL_ALGO": "^tree,CollnetChain"},
        {"NCCL_ALGO": "ring;allreduce:tree,NVLSTree;broadcast:^PAT"},
        {"NCCL_PROTO": "^LL128;allreduce:Simple"},
        {"NCCL_NET_GDR_LEVEL": "5"},
        {"NCCL_P2P_LEVEL": "2"},
    ],
)
def test_what_nccl_takes_is_not_told(settings: dict[str, str], machines: dict[str, Hardware]) -> None:
    assert not [one for one in nccl_profile(machines["dgx"], settings).findings if one.about in settings]


def test_a_port_that_a_device_has_not_is_told_as_that(machines: dict[str, Hardware]) -> None:
    findings = nccl_profile(machines["dgx"], given_settings({"NCCL_IB_HCA": "=mlx5_0:7,mlx5_3"})).findings
    assert next(one.text for one in findings) == "mlx5_0 has no such port; it has 1"


def test_interfaces_of_unlike_rates_are_told_by_their_own(machines: dict[str, Hardware]) -> None:
    cost = about(nccl_profile(machines["roce"], given_settings({"NCCL_IB_DISABLE": "1"})), "NCCL_IB_DISABLE").cost
    assert "4 x 100 Gb/s + 1 x 25 Gb/s (eno1, ens1f0, ens2f0 and more)" in cost


def test_advice_is_what_the_profile_would_set(machines: dict[str, Hardware]) -> None:
    profile = nccl_profile(machines["dgx"], given_settings({"NCCL_SOCKET_IFNAME": "lo"}))
    (kept,) = [one for one in profile.kept if one.name == "NCCL_SOCKET_IFNAME"]
    assert kept.ours == "=eno3"
    assert about(profile, "NCCL_SOCKET_IFNAME").remedy == "=eno3 is there, 10 Gb/s"
    # Where sockets carry all traffic, the fastest are the best.
    profile = nccl_profile(machines["dgx"], given_settings({"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}))
    assert about(profile, "NCCL_SOCKET_IFNAME").remedy == "=ib0 is there, 400 Gb/s"


def test_infiniband_cards_whose_driver_is_not_loaded_are_told(tmp_path: Path) -> None:
    machine = cloud(tmp_path)
    for slot, driver in (("06", "mlx5_core"), ("07", "vfio-pci")):
        machine.pci(f"pci0000:00/0000:00:{slot}.0", "0x15b3:0x1021", "0x020700", -1, driver=driver)
    finding = about(nccl_profile(machine.hardware(), {}), "RDMA")
    assert (finding.level, finding.text) == (
        Level.WARNING, "1 InfiniBand card on the PCIe bus, and no RDMA device: 0000:00:06.0",
    )  # fmt: skip
    assert "mlx5_ib" in finding.remedy
