"""`meshwright doctor` as a user runs it: on this machine, and on a recorded one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cluster.calibration import write_lines
from meshwright.cluster.link_lines import LinkLine
from meshwright.cluster.nvml import NvmlGpu
from tests.machines import GiB, Machine, dgx, roce


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if "NCCL" not in name and "GLOO" not in name}
    command = [sys.executable, "-m", "meshwright", "doctor", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**given, "COLUMNS": "80", **environment}
    )


def test_this_machine_is_described() -> None:
    done = doctor(AWS_SECRET_ACCESS_KEY="hunter2hunter2")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("machine", "devices", "network", "versions", "limits", "fit to train"):
        assert part in done.stdout
    done = doctor("--topology")
    assert done.returncode == 0, done.stderr
    for part in ("NUMA", "127.0.0.1", "measured", "meshwright plan --calibrate"):
        assert part in done.stdout
    facts = json.loads(doctor("--json", AWS_SECRET_ACCESS_KEY="hunter2hunter2").stdout)
    assert facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["topology"]["cpus"] == os.cpu_count()
    assert "hunter2" not in json.dumps(facts)


def test_settings_come_as_json_and_nonsense_ends_with_code_one() -> None:
    done = doctor("--nccl", "--json", GLOO_SOCKET_IFNAME="nosuch0")
    assert done.returncode == 1, done.stderr
    profile = json.loads(done.stdout)["nccl"]
    assert profile["breaks"]
    assert [finding["about"] for finding in profile["findings"]] == ["GLOO_SOCKET_IFNAME"]
    assert profile["kept"][0]["value"] == "nosuch0"
    assert "GLOO_SOCKET_IFNAME" not in profile["environment"]


def test_a_recorded_machine_is_shown_within_eighty_columns(tmp_path: Path) -> None:
    dgx(tmp_path).finish("dgx01")
    done = doctor("--root", str(tmp_path), "--topology", "--nccl", NCCL_IB_DISABLE="1", NCCL_SOCKET_IFNAME="eno3")
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    flat = " ".join(done.stdout.split())
    for said in (
        "dgx01: NVIDIA",
        "18 links of 26.6 GB/s each over 4 NVSwitches; all GPUs reach each other so",
        "mlx5_10 SYS SYS SYS SYS PHB PHB PIX PHB",
        "1 x 10 Gb/s (eno3), instead of 8 x 400 Gb/s: 320 times slower at best",
        "NCCL_IB_DISABLE=1",
    ):
        assert said in flat


def test_distances_of_more_gpus_than_fit_a_line_come_in_several_tables(tmp_path: Path) -> None:
    built = Machine(tmp_path)
    built.system(2, cores=16, gib=64)
    places = [f"pci0000:{0x10 + gpu:02x}/0000:{0x10 + gpu:02x}:00.0" for gpu in range(16)]
    for gpu, place in enumerate(places):
        built.gpu(place, gpu // 8)
    built.nvml = tuple(NvmlGpu(gpu, place.split("/")[1], "NVIDIA L4", 23 * GiB) for gpu, place in enumerate(places))
    built.finish()
    lines = doctor("--topology", "--root", str(tmp_path)).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("\u2026" in line for line in lines)
    heads = [line.split() for line in lines if line.split()[:1] in (["GPU0"], ["GPU12"]) and "GPU" in line.split()[1]]
    assert heads == [[f"GPU{gpu}" for gpu in some] for some in (range(12), range(12, 16))]
    rows = [line.split() for line in lines if line.startswith("  GPU") and ("PHB" in line or "SYS" in line)]
    assert [row[0] for row in rows] == [f"GPU{gpu}" for gpu in range(16)] * 2
    assert [len(row) - 1 for row in rows] == [12] * 16 + [4] * 16
    assert rows[0][1:] == ["-", *["PHB"] * 7, *["SYS"] * 4]
    assert rows[-1][1:] == ["PHB", "PHB", "PHB", "-"]


def test_this_machine_is_recorded_and_shown_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    done = doctor("--record", str(file))
    assert done.returncode == 0, done.stderr
    assert f"meshwright doctor --topology --root {file}" in done.stdout
    assert f'"hostname": "{socket.gethostname()}"' in file.read_text()
    (tmp_path / "laid out").mkdir()
    own = {"TMPDIR": str(tmp_path / "laid out")}
    shown = [doctor("--topology", "--json", *more, **own) for more in ([], ["--root", str(file)])]
    here, there = (json.loads(one.stdout)["topology"] for one in shown)
    for key in ("host", "processor", "cpus", "memory_bytes", "numa", "pci", "files", "kernel"):
        assert here[key] == there[key], key
    assert list((tmp_path / "laid out").iterdir()) == [], "nothing is left of the tree"


def test_gpus_of_several_domains_and_cards_without_a_driver_are_told_apart(tmp_path: Path) -> None:
    built = Machine(tmp_path)
    built.system(2, cores=16, gib=288)
    built.write("proc/cpuinfo", "\n".join(f"processor\t: {cpu}\ncpu\t\t: POWER9\n" for cpu in range(16)))
    places = {"0004:05": 0, "0004:06": 0, "0035:05": 1, "0035:06": 1}
    for node, (place, numa) in enumerate(places.items(), 252):
        domain = place[:4]
        built.gpu(f"pci{domain}:00/{domain}:00:00.0/{domain}:01:00.0/{domain}:02:{place[5:]}.0/{place}:00.0", numa)
        built.write(f"sys/devices/system/node/node{node}/cpulist", "")
        built.write(f"sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:       {8 * 2**20} kB")
        built.write(f"proc/driver/nvidia/gpus/{place}:00.0/numa_status", f"Node:      {node}\nStatus:    online")
    built.pci("pci0000:00/0000:00:01.0/0000:1a:00.0", "0x15b3:0x1013", "0x020700", 0)
    built.finish("node07")
    done = doctor("--topology", "--nccl", "--root", str(tmp_path))
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    flat = " ".join(done.stdout.split())
    for said in (
        "POWER9, 16 CPUs, 256 GiB",
        "NUMA 252: memory of GPU 0004:05:00.0, 8.0 GiB",
        # The bus alone would not tell them apart.
        "0004:05 0004:06 0035:05 0035:06",
        "GPU 0035:05:00.0 SYS SYS - PIX",
        "unless NVLinks join them, which NVML did not tell",
        "no RDMA device (InfiniBand, RoCE, EFA), though InfiniBand cards are on the bus: 0000:1a:00.0",
    ):
        assert said in flat, flat
    assert "AMD" not in flat


def test_lines_for_a_shell_are_all_that_is_printed(tmp_path: Path) -> None:
    roce(tmp_path).finish()
    done = doctor("--nccl", "--root", str(tmp_path), "--format", "env")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert lines == [
        "export NCCL_SOCKET_IFNAME='=eno1'",
        "export GLOO_SOCKET_IFNAME=eno1",
        "export NCCL_IB_HCA='=mlx5_0,mlx5_1,mlx5_2,mlx5_3'",
    ]


def test_a_wrong_command_says_what_to_change(tmp_path: Path) -> None:
    for arguments, said in (
        (["--format", "env"], "--nccl"),
        (["--nccl", "--nodes", "0"], "--nodes"),
        (["--nccl", "--json", "--format", "text"], "--json"),
        (["--nccl", "--root", "/nowhere"], "--root"),
        (["--topology", "--root", str(tmp_path)], "holds neither sys nor proc"),
        (["--topology", "--root", __file__], "is no recording"),
        (["--record", "/nowhere/here.json"], "--record cannot write /nowhere/here.json"),
        (["--record", str(tmp_path / "here.json"), "--nccl"], "--record goes alone"),
    ):
        done = doctor(*arguments)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stdout == ""


def test_what_was_calibrated_is_shown(tmp_path: Path) -> None:
    """With a file of the form that `plan --calibrate` writes, and one that is damaged."""
    code = (
        "from meshwright.cluster.calibration import Calibration, Speeds, write_calibration\n"
        "rows = {'float32': ((64.0, 64.0, 64.0, 2.5e12),)}\n"
        "flat = {'float32': ((128.0, 1e12),)}\n"
        "speeds = Speeds(2, rows, flat, flat, 3e11, {'float32': 1.0}, (0.0, 0.0), (0.0, 0.0), 0.0, 0.0, 0.0,\n"
        "    {'all_reduce': {'2': ((1024.0, 1e-4), (4194304.0, 4e-3))}}, {})\n"
        "from meshwright.cluster.link_lines import LinkLine\n"
        "line = LinkLine('all_gather', 'dp', 4, 2, 2, 'gloo', 3e-4, 2e8, '2.13.0', '2026-01-03')\n"
        "write_calibration(Calibration('here', 'cpu', '2.13.0', '2026-01-02', {2: speeds}, (line,)))\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
    done = doctor("--topology", XDG_CACHE_HOME=str(tmp_path))
    flat = " ".join(done.stdout.split())
    assert "calibrated on here, 2026-01-02, torch 2.13.0" in flat
    assert "float32 2.5 TFLOP/s; memory 300 GB/s" in flat
    assert "all_reduce of 2 4 MiB in 4 ms, 1.05 GB/s" in flat
    assert "all_gather of 4 on 2 machines 300 us, 0.2 GB/s on the bus (gloo, dp, 2026-01-03)" in flat
    assert "links by themselves" not in flat
    _nothing_of_here_is_in_a_recorded_machine(tmp_path / "recorded", tmp_path)
    for path in tmp_path.rglob("calibration-*"):
        path.write_text("{")
    assert "is damaged" in " ".join(doctor("--topology", XDG_CACHE_HOME=str(tmp_path)).stdout.split())


def test_links_alone_are_not_called_a_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = [
        LinkLine("all_gather", "dp", 2, 2, 2, "gloo", 3e-4, 2e8, "2.13.0", f"2026-01-0{day}T00:00:00+00:00")
        for day in (3, 4)
    ]
    for line in lines:
        write_lines("cpu", [line])
    flat = " ".join(doctor("--topology").stdout.split())
    assert f"cpu, links measured on {socket.gethostname()}, 2026-01-04, nothing else" in flat
    assert "calibrated" not in flat
    assert "speeds: `meshwright plan --calibrate`" in flat


def _nothing_of_here_is_in_a_recorded_machine(root: Path, cache: Path) -> None:
    dgx(root).finish("dgx01")
    for name in ("cpuinfo", "meminfo"):
        (root / "proc" / name).unlink()
    here = {"XDG_CACHE_HOME": str(cache), "SLURM_JOB_NODELIST": "gpu[01-02]"}
    told = " ".join(doctor("--topology", "--root", str(root), **here).stdout.split())
    assert "nothing yet" in told
    assert "calibrated" not in told
    assert "gpu01" not in told
    assert told.startswith("dgx01: NVIDIA nodes dgx01")
    facts = json.loads(doctor("--topology", "--json", "--root", str(root), **here).stdout)["topology"]
    assert (facts["calibrations"], facts["nodes"], facts["cpus"], facts["memory_bytes"]) == ([], [], 0, 0)
