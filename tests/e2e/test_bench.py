"""`meshwright bench` on this machine's CPU: real processes, figures, a contender that breaks, collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.bench_comm import as_json
from meshwright.cluster.calibration import calibration_file
from tests.conftest import CommandLine

SHAPE = ["--model", "tiny", "--device", "cpu", "--sequence", "32", "--precision", "float32"]
QUICK = ["--steps", "3", "--warm-up", "1"]


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", "bench", "step", *SHAPE, *QUICK, *arguments]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=given)


@pytest.mark.slow
def test_ours_and_the_bare_loop_are_measured_and_agree(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    variant = ["--variant", "steep:train.lr=1e-2"]
    done = bench("--contenders", "meshwright,bare", *variant, "--repeats", "2", "--json", str(out), "train.lr=1e-3")
    assert done.returncode == 0, done.stderr
    facts = json.loads(out.read_text())
    assert facts["device"] == "cpu"
    assert facts["baseline"] == "bare"
    assert facts["config"]["train"]["lr"] == 1e-3
    rows = {row["contender"]: row for row in facts["rows"]}
    assert rows.keys() == {"meshwright", "bare", "meshwright steep"}
    for row in rows.values():
        assert row["trouble"] is None
        assert len(row["repeats_ms"]) == 2
        assert row["tokens_per_s"] == pytest.approx(32e3 / row["ms_per_step"])
        assert row["mfu"] > 0
        assert row["times_floor"] > 0
        assert row["peak_gib"] > 0.01
        assert row["first_step_s"]["cold"] > row["ms_per_step"] / 1e3
        assert row["first_step_s"]["warm"] > row["ms_per_step"] / 1e3
    ratio = rows["bare"]["ms_per_step"] / rows["meshwright"]["ms_per_step"]
    assert rows["meshwright"]["ratio"] == pytest.approx(ratio)
    # The same weights, tokens and updates: the same work.
    assert rows["meshwright"]["last_loss"] == pytest.approx(rows["bare"]["last_loss"], rel=1e-6)
    assert rows["meshwright steep"]["first_loss"] == pytest.approx(rows["meshwright"]["first_loss"], rel=1e-6)
    assert rows["meshwright steep"]["last_loss"] != pytest.approx(rows["meshwright"]["last_loss"], rel=1e-4)
    assert rows["meshwright"]["parameters"] == rows["bare"]["parameters"] == facts["parameters"]
    roofline = facts["roofline"]["1"]
    assert roofline["floor_ms"] == pytest.approx(roofline["compute_ms"] + roofline["update_ms"])
    assert roofline["ceilings"]["flops"] > 1e8
    for said in ("meshwright", "bare", "floor", "ceilings", "MFU"):
        assert said in done.stdout


@pytest.mark.slow
def test_a_contender_that_breaks_is_named_with_its_reason(tmp_path: Path) -> None:
    """Its module is there and fails when it is used: a process that ends with a traceback, which others outlive."""
    for name in ("lightning_fabric", "transformers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('this package is broken')\n")
    out = tmp_path / "step.json"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = bench("--contenders", "bare,fabric", "--repeats", "1", "--json", str(out), PYTHONPATH=path)
    assert done.returncode == 1, done.stderr
    rows = {row["contender"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["bare"]["trouble"] is None
    assert rows["fabric"]["trouble"] == "failed: exit code 1: RuntimeError: this package is broken"
    assert "fabric: failed: exit code 1: RuntimeError: this package is broken" in done.stdout


@pytest.mark.slow
def test_a_contender_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    done = bench("--contenders", "bare", "--repeats", "2", "--limit", "0.5", "--json", str(out))
    assert done.returncode == 1
    facts = json.loads(out.read_text())
    assert "not done in time" in facts["rows"][0]["trouble"]
    assert facts["baseline"] is None
    assert "no floor" in done.stdout


def test_collectives_are_measured_and_written(meshwright: CommandLine, tmp_path: Path) -> None:
    options = ["-b", 8, "-e", "4K", "-f", 512, "--iters", 2, "--json", tmp_path / "comm.json"]
    result = meshwright("bench", "comm", "all_reduce", "send_receive", "--nproc", 2, *options)
    assert result.returncode == 0, result.stderr
    assert "out of bounds values: 0 OK" in result.stdout
    assert "algbw" in result.stdout
    found = json.loads((tmp_path / "comm.json").read_text())
    assert (found["backend"], found["device"]) == ("gloo", "cpu")
    assert "ranks, gloo on cpu" in result.stdout
    assert [(row["operation"], row["bytes"], row["ranks"]) for row in found["rows"]] == [
        (operation, size, 2) for operation in ("all_reduce", "send_receive") for size in (8, 4096)
    ]
    assert {line["operation"] for line in found["lines"]} == {"all_reduce", "send_receive"}


@pytest.mark.parametrize("what", [["all_reduce"], ["--algorithms"]])
def test_results_that_nobody_looked_at_are_not_called_right(what: list[str], meshwright: CommandLine) -> None:
    result = meshwright("bench", "comm", *what, "-b", 8, "-e", 8, "--iters", 1, "--warm-up", 0, "--no-check")
    assert result.returncode == 0, result.stderr
    assert "out of bounds values: not looked for (--no-check)" in result.stdout
    assert "OK" not in result.stdout


def test_one_size_and_one_call_do_not_tell_lines_and_spreads(meshwright: CommandLine) -> None:
    # Of 1000 bytes each of three ranks scatters 332: every operation has one size, though they differ.
    sizes = ["-b", 1000, "-e", 1000, "--iters", 1, "--nproc", 3, "--no-save"]
    result = meshwright("bench", "comm", "all_reduce", "reduce_scatter", *sizes)
    assert result.returncode == 0, result.stderr
    assert "latency and bus bandwidth: not known from one size; -b and -e further apart" in result.stdout
    assert "N/A" in result.stdout.split("(GB/s)   (GB/s)")[1].splitlines()[1]


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    meshwright: CommandLine, tmp_path: Path
) -> None:
    for option in ("--json", "--paths"):
        for path in ("missing/comm.json", "."):
            result = meshwright("bench", "comm", *(["all_reduce"] if option == "--json" else []), option, path)
            assert (result.returncode, result.stdout) == (2, "")
            assert f"{option} {path} is no file in a folder that is there" in result.stderr
            assert "Traceback" not in result.stderr


def test_what_cannot_be_kept_for_plans_is_told_and_the_file_is_written(meshwright: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = ["-b", "64K", "-e", "4M", "-f", 64, "--iters", 1, "--json", tmp_path / "comm.json"]
    result = meshwright("bench", "comm", "broadcast", *options, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert result.returncode == 2
    assert "cannot be kept for plans" in result.stderr
    assert "Traceback" not in result.stderr
    assert json.loads((tmp_path / "comm.json").read_text())["rows"]


def test_numbers_without_end_are_null_in_files(meshwright: CommandLine, tmp_path: Path) -> None:
    facts = {"lines": [{"bandwidth": float("inf"), "latency_s": 1e-5}], "rows": ({"seconds": float("nan")},)}
    assert json.loads(as_json(facts)) == {
        "lines": [{"bandwidth": None, "latency_s": 1e-5}],
        "rows": [{"seconds": None}],
    }
    # So small that times do not grow with sizes: whatever the line, the file is JSON.
    options = ["--nproc", 2, "-b", 4, "-e", 16, "-f", 2, "--iters", 1, "--warm-up", 0, "--json", "comm.json"]
    result = meshwright("bench", "comm", "all_reduce", "broadcast", *options)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "comm.json").read_text()
    assert "Infinity" not in text
    assert "NaN" not in text
    assert [row["calls"] for row in json.loads(text)["rows"]] == [1] * 6


def test_lines_are_kept_for_plans_and_drawn(meshwright: CommandLine, tmp_path: Path) -> None:
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    sizes = ["--nproc", 2, "-b", "64K", "-e", "32M", "-f", 512, "--iters", 2]
    result = meshwright("bench", "comm", "all_reduce", *sizes, "--plot", "comm.png", "--no-save", **own)
    assert result.returncode == 0, result.stderr
    assert "drawn in comm.png" in result.stdout
    assert (tmp_path / "comm.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "cache" / "meshwright").exists()
    result = meshwright(
        "bench", "comm", "all_reduce", "broadcast", *sizes, "--plot", "--strategy", "dp=1 tp=2", **own, COLUMNS="80"
    )
    assert result.returncode == 0, result.stderr
    (kept,) = (tmp_path / "cache" / "meshwright").glob("calibration-*-cpu.json")
    assert f"kept for later plans in {kept}: 2 lines" in result.stdout
    assert {(line["operation"], line["axis"]) for line in json.loads(kept.read_text())["lines"]} == {
        (operation, "tp") for operation in ("all_reduce", "broadcast")
    }
    assert "bus bandwidth" in result.stdout
    assert "B broadcast, 2 ranks: " in result.stdout
    planned = meshwright("plan", "--model", "tiny", "--cluster", "1x2xcpu", "--seq-len", 64, "--global-batch", 8, **own)
    assert "by bench comm (groups of 2 ranks)" in " ".join(planned.stdout.split()), planned.stdout


def test_what_says_little_about_bandwidth_is_not_kept_and_a_damaged_file_is_told(
    meshwright: CommandLine, tmp_path: Path
) -> None:
    path = tmp_path / "meshwright" / calibration_file("cpu").name
    path.parent.mkdir()
    path.write_text("{")
    own = {"XDG_CACHE_HOME": str(tmp_path)}
    sizes = ["--nproc", 2, "-b", 8, "-f", 2, "--iters", 3]
    result = meshwright("bench", "comm", "all_reduce", *sizes, "-e", 32, **own)
    assert "not kept for plans: all_reduce over world" in result.stdout
    assert path.read_text() == "{"
    result = meshwright("bench", "comm", "all_reduce", "--nproc", 2, "-b", "64K", "-e", "32M", "-f", 512, **own)
    assert f"{path} is damaged" in result.stdout
    assert json.loads(path.read_text())["lines"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("all_reduc",), "did you mean 'all_reduce'"),
        (("--nproc", 1), "nobody to talk to"),
        (("-b", "1M", "-e", "8"), "no less"),
        (("all_reduce", "--algorithms"), "without operations"),
        (("--node-size", 2), "--algorithms"),
        (("--nproc", 2, "--strategy", "tp=3"), "tp=3"),
        (("--paths", "p.toml", "-b", "1K", "-e", "1K", "--iters", 1), "leave --begin, --end, --iters out"),
        (("--paths", "p.toml", "--json", "p.json"), "under torchrun or srun"),
        (("--plot", "all_reduce"), "goes after the operations"),
        (("--plot", "nowhere/comm.png"), "in a folder that is there"),
    ],
)
def test_collectives_that_cannot_be_measured_are_refused(
    arguments: tuple[object, ...], said: str, meshwright: CommandLine
) -> None:
    refused = meshwright("bench", "comm", *arguments)
    assert refused.returncode == 2, refused.stderr
    assert said in refused.stderr
    assert "Traceback" not in refused.stderr
