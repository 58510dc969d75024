"""`meshwright doctor` of machines that somebody made up: their names reach a terminal as harmless text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.cluster.nvml import read_nvml
from meshwright.cluster.sysfs import read_hardware
from tests.machines import GiB, Machine, dgx
from tests.unit.test_hardware import Nvml

ESCAPE = "\x1b[31mEVIL\x1b]0;x\x07"
MARKUP = "[/x]"
EMOJI = ":warning:"
PORT = "sys/class/infiniband/mlx5_0/ports/1"
FILES = {
    "proc/sys/kernel/hostname": "{}",
    "sys/class/dmi/id/sys_vendor": "{}",
    "proc/cpuinfo": "processor: 0\nmodel name: {}",
    "sys/devices/system/node/node0/cpulist": "{}",
    "sys/class/net/eno3/operstate": "{}",
    "sys/class/net/eno3/bonding/slaves": "{0} {0}",
    f"{PORT}/state": "4: {}",
    f"{PORT}/link_layer": "{}",
    f"{PORT}/gid_attrs/ndevs/0": "{}",
    "sys/module/nvidia/version": "{}",
    "etc/nccl.conf": "NCCL_DEBUG={0}\nNCCL_{0}=1",
}


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """All that the terminal got."""
    capsys.readouterr()
    main(["doctor", *arguments])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err, shown.err
    return shown.out + shown.err


def check_harmless(capsys: pytest.CaptureFixture[str], root: Path) -> str:
    shown = told(capsys, "--topology", "--nccl", "--root", str(root))
    for text in (shown, told(capsys, "--nccl", "--format", "env", "--root", str(root))):
        assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
    return shown


@pytest.mark.parametrize("words", [ESCAPE, MARKUP, EMOJI])
@pytest.mark.parametrize("path", FILES)
def test_what_a_file_says_is_shown_as_plain_text(
    path: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = dgx(tmp_path)
    machine.finish()
    machine.write(path, FILES[path].format(words))
    shown = check_harmless(capsys, tmp_path)
    if words in (MARKUP, EMOJI) and path in ("proc/sys/kernel/hostname", "sys/class/net/eno3/operstate"):
        assert words in shown


@pytest.mark.parametrize("words", [ESCAPE, "[bold]", "[x]"])
def test_names_of_devices_are_shown_as_plain_text(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = dgx(tmp_path)
    machine.rdma(f"{words}ib", f"pci0000:c0/0000:c0:01.0/{words}", 0)
    machine.net(f"{words}net", "10.7.0.1/24", mbit_s=400000, path=f"pci0000:c0/0000:c0:01.0/{words}")
    machine.finish()
    check_harmless(capsys, tmp_path)


def test_bridges_on_the_way_to_a_device_are_shown_as_plain_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = dgx(tmp_path)
    machine.gpu(f"pci0000:c0/0000:c0:01.0/{ESCAPE}/0000:c2:00.0/0000:c3:00.0", 0)
    machine.finish()
    assert "switch ?[31mEVIL" in check_harmless(capsys, tmp_path)


@pytest.mark.parametrize("field", ["name", "address"])
def test_what_nvml_said_is_shown_as_plain_text(field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (ESCAPE, MARKUP):
        machine = Machine(tmp_path / words[-2])
        machine.system()
        answer = {"index": 0, "address": "0000:01:00.0", "name": "NVIDIA H100", "memory_bytes": GiB, field: words}
        machine.write("nvml.json", json.dumps([answer]))
        machine.finish()
        check_harmless(capsys, machine.root)


def test_what_nvml_says_now_has_no_escapes() -> None:

    class Evil(Nvml):
        def nvmlDeviceGetName(self, handle: int) -> str:
            return ESCAPE

    answers, _ = read_nvml(Evil())
    assert answers is not None
    assert answers[0].name.isprintable()


def test_refusals_have_no_escapes_of_the_file_or_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = {"meshwright recording": 1, "folders": {"sys": {}, "proc": {}}, "access control": {}}
    for folders in ({f"sys/{ESCAPE}": {"a": 5}}, {"sys": {ESCAPE: ["/etc"]}}, {"sys": {"a": [ESCAPE]}}):
        file = tmp_path / f"{ESCAPE}.json"
        file.write_text(json.dumps({**parts, "folders": folders}))
        shown = told(capsys, "--topology", "--root", str(file))
        assert "is no recording" in shown
        assert shown.replace("\n", "").isprintable()
    laid = tmp_path / ESCAPE
    laid.mkdir()
    assert told(capsys, "--topology", "--root", str(laid)).replace("\n", "").isprintable()


def test_the_name_of_a_recording_is_echoed_without_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dgx(tmp_path / "root").finish()
    shown = told(capsys, "--root", str(tmp_path / "root"), "--record", str(tmp_path / f"{ESCAPE}.json"))
    assert "KiB of text" in shown
    assert shown.replace("\n", "").isprintable()


def test_a_folder_s_name_stands_in_for_a_machine_s_without_escapes(tmp_path: Path) -> None:
    root = tmp_path / ESCAPE
    (root / "sys").mkdir(parents=True)
    assert read_hardware(root).host.isprintable()


def test_what_is_no_file_and_no_folder_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "pipe", "is neither"),
        (Path("/dev/null"), "is neither"),
        (tmp_path / "gone", "is not there"),
        (Path("a" * 5000), "File name too long"),
    ):
        shown = told(capsys, "--topology", "--root", str(path))
        assert said in shown
        assert shown.count("\n") == 1
