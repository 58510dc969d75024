"""`bench comm` between hosts whose links are slow: its lines predict what is measured later, and plans use them."""

from __future__ import annotations

import json
import socket
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.cluster.calibration import read_calibration
from meshwright.cluster.cluster import parse_cluster
from meshwright.planning.links import Group
from meshwright.planning.measured_links import links_of
from meshwright.planning.software import constants
from tests.hosts import Hosts

MBIT = 200
WITHIN = 0.15
QUICK = ("--warm-up", "1", "--iters", "8")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        for name in made.names:
            made.limit(name, mbit=MBIT)
        yield made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all hosts keep what was measured, and who this process is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    return tmp_path


def bench(hosts: Hosts, each: int, out: Path, *words: str) -> dict[str, list[dict[str, float]]]:
    """What `bench comm` found with so many ranks on each host."""
    ends = hosts.run_ranks(each, "meshwright", "bench", "comm", *words, *QUICK, "--json", str(out), timeout=240)
    assert [one.code for one in ends] == [0] * len(ends), ends[0].err
    return json.loads(out.read_text())


@pytest.mark.parametrize("each", [1, 2])
def test_lines_predict_fresh_measurements_and_plans_use_them(each: int, hosts: Hosts, cache: Path) -> None:
    operations = ("all_reduce", "all_gather")
    fitted = bench(hosts, each, cache / "fit.json", *operations, "-b", "128K", "-e", "2M", "-f", "2")
    fresh = bench(hosts, each, cache / "fresh.json", *operations, "-b", "192K", "-e", "3M", "-f", "4", "--no-save")
    lines = {line["operation"]: line for line in fitted["lines"]}
    carried = {"all_reduce": 2 * (2 * each - 1) / (2 * each), "all_gather": (2 * each - 1) / (2 * each)}
    found, _ = read_calibration("cpu")
    assert found is not None
    assert {(line.operation, line.ranks, line.inside, line.node) for line in found.lines} == {
        (operation, 2 * each, each, each) for operation in operations
    }
    links = links_of(parse_cluster(f"2x{each}xcpu"), constants().common)
    group = Group(2 * each, each)
    for operation in operations:
        line = lines[operation]
        off, planned_off = [], []
        for row in fresh["rows"]:
            if row["operation"] == operation:
                by_line = line["latency_s"] + row["bytes"] * carried[operation] / line["bandwidth"]
                ask = links.all_reduce if operation == "all_reduce" else links.half
                off.append(abs(by_line / row["seconds"] - 1))
                planned_off.append(abs(ask(group, row["bytes"]) / row["seconds"] - 1))
        assert statistics.median(off) < WITHIN, (operation, off, line)
        assert statistics.median(planned_off) < WITHIN, (operation, planned_off, line)
        # A link carries no more than it may, whatever is fitted.
        assert line["bandwidth"] < 1.1 * MBIT * 1e6 / 8


def test_a_plan_for_hosts_on_a_slow_link_expects_it_and_says_so(hosts: Hosts, cache: Path) -> None:
    def plan() -> tuple[float, str]:
        words = ["--model", "tiny", "--cluster", "2x1xcpu", "--seq-len", "64", "--global-batch", "8"]
        process = hosts.popen("a", "meshwright", "plan", *words, "--strategy", "dp=2", "--json")
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        answer = json.loads(out)
        return answer["candidates"][0]["step_time"]["dp"], answer["origin"]

    before, said = plan()
    assert "bench comm" not in said
    bench(hosts, 1, cache / "comm.json", "all_reduce", "-b", "64K", "-e", "1M", "-f", "16")
    after, said = plan()
    assert "links measured here on 20" in said
    assert "by bench comm (groups of 2 x 1 ranks)" in said
    assert after > 10 * before
