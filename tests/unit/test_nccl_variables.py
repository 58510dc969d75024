"""NCCL's settings as they are given: which place counts, and what NCCL takes names and numbers for."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.comm.nccl_profile import nccl_profile
from meshwright.comm.nccl_selection import Names
from meshwright.comm.nccl_variables import given_settings, known_names, number_in, words
from tests.machines import dgx


def test_nccl_s_files_count_where_the_environment_says_nothing(tmp_path: Path) -> None:
    machine = dgx(tmp_path)
    machine.write("etc/nccl.conf", "# of the site\nNCCL_DEBUG=WARN\nNCCL_IB_TC=106\nNCCL_IB_TC=104\nno line")
    machine.write("home/me/.nccl.conf", "NCCL_IB_TIMEOUT=22\nNCCL_IB_SL=3\nSECRET=1")
    environment = {"HOME": "/home/me", "NCCL_IB_SL": "4", "AWS_SECRET_ACCESS_KEY": "x", "PATH": "/bin"}
    found = given_settings(environment, tmp_path)
    assert {name: (one.value, one.origin) for name, one in found.items()} == {
        "NCCL_DEBUG": ("WARN", "/etc/nccl.conf"),
        "NCCL_IB_SL": ("4", "the environment"),
        "NCCL_IB_TC": ("106", "/etc/nccl.conf"),
        "NCCL_IB_TIMEOUT": ("22", "/home/me/.nccl.conf"),
    }
    assert {kept.name for kept in nccl_profile(machine.hardware(), found).kept} == found.keys()


@pytest.mark.parametrize(
    ("text", "takes", "not_"),
    [
        ("eth", ["eth0", "eth10"], ["beth0"]),
        ("=eth0", ["eth0"], ["eth01"]),
        ("^docker,lo", ["eth0"], ["docker0", "lo"]),
        ("^=docker0", ["docker01"], ["docker0"]),
        ("=eth0,eth1", ["eth0", "eth1"], ["eth2"]),
        ("", ["eth0"], []),
    ],
)
def test_lists_of_names_mean_what_nccl_takes_them_for(text: str, takes: list[str], not_: list[str]) -> None:
    names = Names(text)
    assert all(names.takes(name) for name in takes)
    assert not any(names.takes(name) for name in not_)
    assert Names("=mlx5_0:1").takes("mlx5_0", 1)
    assert not Names("=mlx5_0:1").takes("mlx5_0", 2)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12", 12),
        ("0x1f", 31),
        ("017", 15),
        (" -3", -3),
        ("4MB", 4),
        ("yes", 0),
        ("", 0),
        ("09", 0),
        ("9" * 5000, 2**63 - 1),
        ("-" + "9" * 5000, -(2**63)),
        ("0x" + "f" * 20, 2**63 - 1),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_numbers_are_read_as_c_reads_them(text: str, number: int) -> None:
    assert number_in(text) == number


def test_every_word_of_the_table_is_of_a_known_name() -> None:
    assert all(words(name) for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"))
    assert {
        "NCCL_IB_HCA",
        "NCCL_P2P_DISABLE",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "GLOO_SOCKET_IFNAME",
    } <= known_names()
