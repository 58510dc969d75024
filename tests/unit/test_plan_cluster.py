"""Clusters: what people type, what files say, and what is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cluster.chips import chips, find_chip
from meshwright.cluster.cluster import chip_named, parse_cluster
from meshwright.errors import UserError
from meshwright.planning.constraints import parse_constraints


def test_short_forms() -> None:
    plain = parse_cluster("64xh100")
    assert (plain.gpus, plain.node, plain.nodes, plain.domain) == (64, 8, 8, 8)
    dealt = parse_cluster("8x4xH100")
    assert (dealt.gpus, dealt.node, dealt.nodes, dealt.domain) == (32, 4, 8, 4)
    rack = parse_cluster("144xgb200")
    assert (rack.node, rack.domain) == (4, 72)
    assert parse_cluster("3xa100").node == 3


def test_several_kinds_in_one_cluster(tmp_path: Path) -> None:
    short = parse_cluster("16xh100+2x4xa100-40")
    assert str(short) == "16 x NVIDIA H100 SXM 80 GB + 8 x NVIDIA A100 SXM 40 GB"
    assert (short.gpus, short.nodes, [group.node for group in short.groups]) == (24, 4, [8, 4])
    # What all of them have.
    assert short.memory == short.groups[1].memory
    assert short.chip.peak("bf16") == 312e12
    assert (short.link, short.nic, short.domain) == (300, 25, 4)
    assert short.mean_peak("bf16") == pytest.approx((16 * 989e12 + 8 * 312e12) / 24, rel=0.01)
    path = tmp_path / "cluster.toml"
    path.write_text(
        'price = 2\nnic = 20\n[[group]]\nchip = "h100"\nnodes = 2\nprice = 3\n'
        '[[group]]\nchip = "a100-40"\nnodes = 2\ngpus_per_node = 4\nreserve_gib = 1\n'
    )
    written = parse_cluster(str(path))
    assert str(written) == str(short)
    assert [(group.price, group.nic) for group in written.groups] == [(3, 20), (2, 20)]
    assert written.price == pytest.approx((16 * 3 + 8 * 2) / 24)
    assert written.memory == short.memory - 2**30
    assert str(written.with_gpus(20)) == "16 x NVIDIA H100 SXM 80 GB + 4 x NVIDIA A100 SXM 40 GB"
    assert not written.with_gpus(8).groups


def test_chips_without_a_precision_in_common_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    own = "[group.chip]\nname = 'own'\nmemory_mib = 1000\nmemory_bandwidth = 100\nlink = 10\nnic = 1\n"
    path.write_text(f"[[group]]\nchip = 'v100'\nnodes = 1\n[[group]]\nnodes = 1\n{own}tflops = {{ bf16 = 10 }}\n")
    with pytest.raises(UserError, match="no precision that all of these chips compute in"):
        parse_cluster(str(path))


def test_this_machine_is_described() -> None:
    here = parse_cluster("here")
    assert here.gpus >= 1
    assert here.memory > 0


def test_every_chip_has_its_facts_and_a_source() -> None:
    wanted = "a100 a100-40 h100 h100-pcie h200 h800 b200 b300 gb200 gb300 mi250x mi300x mi325x mi355x gaudi2 gaudi3"
    assert set(f"{wanted} v100 l40s rtx4090 cpu".split()) <= chips().keys()
    for chip in chips().values():
        assert len(chip.source) > 10
        assert chip.tflops
    assert find_chip("H100-SXM5").key == "h100"


def test_a_file_describes_machines_and_chips(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('chip = "h100"\nnodes = 4\ngpus_per_node = 8\nnic = 25\nprice = 2.5\nreserve_gib = 2\n')
    cluster = parse_cluster(str(path))
    assert (cluster.gpus, cluster.nic, cluster.price) == (32, 25, 2.5)
    assert cluster.memory == cluster.chip.memory - 2 * 2**30
    path.write_text(
        "nodes = 2\n[chip]\nname = 'own'\nmemory_mib = 1000\nmemory_bandwidth = 100\nlink = 10\nnic = 1\n"
        "tflops = { bf16 = 10 }\n"
    )
    assert parse_cluster(str(path)).chip.peak("bf16") == 1e13


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64xh1000", "unknown chip 'h1000'.*did you mean 'h100'"),
        ("sixty", "is not a number of chips"),
        ("0xh100", "has no chips"),
        ("8xh100+8xh1000", "unknown chip 'h1000'.*did you mean 'h100'"),
        ("8xh100+0xa100", "has no chips"),
        ("8xh100+", r"'' is not a number of chips; write 32xh100\+32xa100"),
        ("8xh100+-8xa100", "'-8xa100' is not a number of chips"),
        ("nowhere.toml", "there is no such file"),
    ],
)
def test_what_cannot_be_is_told(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('chip = "h100"\nnodes = 0\n', "nodes=0 is impossible"),
        ('chip = "h100"\nnodes = 2\nnic = -3\n', "nic=-3 is impossible"),
        ('chip = "h100"\nnodes = 2\nnicc = 3\n', "unknown key 'nicc'.*did you mean 'nic'"),
        ('chip = "h100"\nnodes = 2\nreserve_gib = 90\n', "reserve_gib=90"),
        ('chip = "h100"\nnodes = 1.5\n', "whole number"),
        ('chip = "h100"\n', "chip and nodes are needed"),
        ("nodes = 2\n[chip]\nname = 'x'\n", "missing"),
        ("chip = [", "not readable as TOML"),
        ('[[group]]\nchip = "h100"\nnodes = 1\n[[group]]\nnodes = 1\n', "group 2: chip and nodes are needed"),
        ('[[group]]\nchip = "h100"\nnodes = -1\n', "group 1: nodes=-1 is impossible"),
        ('[[group]]\nchip = "h1000"\nnodes = 1\n', "unknown chip 'h1000'"),
        ('[[group]]\nchip = "h100"\nnodes = 1\nnic = 0\n', "group 1: nic=0 is impossible"),
        ('[[group]]\nchip = "h100"\nnodess = 1\n', "group 1: unknown key 'nodess'.*did you mean 'nodes'"),
        ('nodes = 3\n[[group]]\nchip = "h100"\nnodes = 1\n', "stands above the groups"),
        ("group = 3\n", "must be one or more"),
        ('[[groups]]\nchip = "h100"\nnodes = 1\n', "unknown key 'groups'.*did you mean 'group'"),
    ],
)
def test_impossible_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        parse_cluster(str(path))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tp", "is not KEY=VALUE"),
        ("tq=3", "unknown key 'tq'"),
        ("tp=two", "whole number"),
        ("recompute<full", "is a word"),
    ],
)
def test_bad_constraints_are_told(word: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_constraints([word])


def test_constraints_hold_and_do_not() -> None:
    most, exact, words = parse_constraints(["tp<=8", "zero=3 recompute!=full"])
    assert most.holds({"tp": 8})
    assert not most.holds({"tp": 16})
    assert exact.holds({"pp": 4}), "what is not said yet is open"
    assert words.holds({"recompute": "first:3"})
    assert not words.holds({"recompute": "full"})


@pytest.mark.parametrize(
    ("name", "memory", "key"),
    [
        ("NVIDIA A100-SXM4-80GB", 81251, "a100"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA GB200", 189471, "gb200"),
        ("NVIDIA B200", 183359, "b200"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090"),
    ],
)
def test_what_the_driver_says_is_understood(name: str, memory: float, key: str) -> None:
    chip = chip_named(name, memory)
    assert chip is not None
    assert chip.key == key
    assert chip_named("Somebody's Card", 1000) is None
