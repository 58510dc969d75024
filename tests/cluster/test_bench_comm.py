"""`bench comm` between hosts whose links are slow: its lines predict what is measured later, and plans use them."""

from __future__ import annotations

import json
import socket
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.bench_comm import COLLECTIVES
from meshwright.cluster.calibration import read_calibration
from meshwright.cluster.cluster import parse_cluster
from meshwright.comm.bandwidth import Line, bus_factor
from meshwright.planning.links import Group
from meshwright.planning.measured_links import links_of
from meshwright.planning.software import constants
from tests.hosts import Hosts

pytestmark = pytest.mark.alone

MBIT = 200
WITHIN = 0.15
QUICK = ("--warm-up", "1", "--iters", "20")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2, first=True) as made:
        for name in made.names:
            made.limit(name, mbit=MBIT)
        yield made


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all hosts keep what was measured, and who this process is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    return tmp_path


def bench(hosts: Hosts, each: int, out: Path, *words: str) -> dict[str, list[dict[str, Any]]]:
    """What `bench comm` found with so many ranks on each host."""
    ends = hosts.run_ranks(each, "meshwright", "bench", "comm", *words, *QUICK, "--json", str(out), timeout=240)
    assert [one.code for one in ends] == [0] * len(ends), ends[0].err
    return json.loads(out.read_text())


@pytest.mark.parametrize(("each", "operations"), [(1, COLLECTIVES), (2, ("all_reduce", "broadcast", "all_to_all"))])
def test_lines_predict_fresh_measurements_and_plans_use_them(
    each: int, operations: tuple[str, ...], hosts: Hosts, cache: Path
) -> None:
    before, _ = planned(hosts, each)
    fitted = bench(hosts, each, cache / "fit.json", *operations, "-b", "256K", "-e", "4M", "-f", "2")
    fresh = bench(hosts, each, cache / "fresh.json", *operations, "-b", "384K", "-e", "3M", "-f", "2", "--no-save")
    ranks, found = 2 * each, read_calibration("cpu")[0]
    assert found is not None
    assert {(line.operation, line.ranks, line.inside, line.node) for line in found.lines} == {
        (operation, ranks, each, each) for operation in operations
    }
    links = links_of(parse_cluster(f"2x{each}xcpu"), constants().common)
    for line in fitted["lines"]:
        operation = line["operation"]
        rows = [row for row in fresh["rows"] if row["operation"] == operation]
        times = Line(*(line[name] for name in Line._fields))
        expected = [times.seconds(row["bytes"] * bus_factor(operation, ranks)) for row in rows]
        assert median_off(expected, rows) < WITHIN, (line, rows)
        # A link carries no more than it may, whatever is fitted.
        share = (line["beyond"] or line["bandwidth"]) / (MBIT * 1e6 / 8)
        assert share < 1.1
        # Both directions at once, which messages that take turns would use by halves.
        assert operation != "send_receive" or share > 0.75
        if operation == "all_reduce":
            assert [links.all_reduce(Group(ranks, each), row["bytes"]) for row in rows] == pytest.approx(expected)
    after, said = planned(hosts, each)
    assert after > 10 * before
    assert f"by bench comm (groups of 2 x {each} ranks)" in said


def planned(hosts: Hosts, each: int) -> tuple[float, str]:
    """Seconds that a plan made on the first host puts to sums of gradients, and where it says that they are from."""
    words = ["--model", "tiny", "--cluster", f"2x{each}xcpu", "--seq-len", "64", "--global-batch", "8"]
    process = hosts.popen("a", "meshwright", "plan", *words, "--strategy", f"dp={2 * each}", "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    answer = json.loads(out)
    return answer["candidates"][0]["step_time"]["dp"], answer["origin"]


def median_off(expected: list[float], rows: list[dict[str, Any]]) -> float:
    return statistics.median(abs(one / row["seconds"] - 1) for one, row in zip(expected, rows, strict=True))
