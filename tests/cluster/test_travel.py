"""Gradients between hosts with slow links: what leaves a host, which compression pays, what overlap hides."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster.cluster import parse_cluster
from meshwright.comm.compression import ring
from meshwright.planning.answer import plan
from tests.cluster.measured_rank import SAMPLES, SPEC, TOKENS
from tests.hosts import Hosts

pytestmark = pytest.mark.alone

KINDS = ("none", "fp16", "bf16", "int8", "powersgd:4", "topk:0.01")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2, Path.cwd(), first=True) as made:
        yield made


def measured(hosts: Hosts, *words: str) -> list[Any]:
    """What the rank of each host has found."""
    ended = hosts.run_ranks(1, "tests.cluster.measured_rank", *words, timeout=240)
    assert [one.code for one in ended] == [0] * len(ended), ended[0].err
    return [json.loads(one.out.splitlines()[-1]) for one in ended]


def as_counted(found: list[Any], ranks: int) -> None:
    dense = ring(sum(rows * columns for rows, columns in ((1000, 700), (333, 900), (5000, 1))), ranks, 4)
    assert found[0]["none"]["counted"] == dense
    for rank in found:
        for kind, one in rank.items():
            # Headers of packets, and answers that say that they came.
            assert 1.0 <= one["sent"] / one["counted"] < 1.1 + 20_000 / one["counted"], kind
        assert rank["topk:0.01"]["sent"] < 0.05 * dense


def test_what_leaves_a_host_is_what_is_counted(hosts: Hosts) -> None:
    as_counted(measured(hosts, "bytes", *KINDS), 2)


def test_what_leaves_one_of_four_hosts_is_what_is_counted() -> None:
    with Hosts(4, Path.cwd(), first=True) as four:
        as_counted(measured(four, "bytes", *KINDS), 4)


def predicted(folder: Path, mbit: float, kinds: Sequence[str]) -> dict[str, float]:
    """Seconds of a step with each kind, as a plan has them."""
    file = folder / "cluster.toml"
    file.write_text(f'chip = "cpu"\nnodes = 2\ngpus_per_node = 1\nnic = {mbit / 8000}\n')
    given = {"sequence_length": TOKENS, "global_batch": 2 * SAMPLES, "micro_batch": SAMPLES, "precision": "float32"}
    plans = {kind: plan(SPEC, parse_cluster(str(file)), strategy=f"dp=2 compress={kind}", **given) for kind in kinds}  # type: ignore[arg-type]
    return {kind: one.candidates[0].step_s for kind, one in plans.items()}


def test_on_a_slow_link_compression_wins_and_plans_say_which(hosts: Hosts, tmp_path: Path) -> None:
    mbit, kinds = 200, ("none", "bf16", "int8", "topk:0.01")
    for name in hosts.names:
        hosts.limit(name, mbit=mbit)
    found, *_ = measured(hosts, "steps", *kinds)
    expected = predicted(tmp_path, mbit, kinds)
    print({kind: (round(found[kind], 3), round(expected[kind], 3)) for kind in kinds})
    for times in (found, expected):
        assert max(times, key=times.__getitem__) == "none"
        assert min(times, key=times.__getitem__) == "topk:0.01"
    assert found["topk:0.01"] < 0.6 * found["none"]


def test_on_a_fast_link_plans_expect_nothing_from_compression(tmp_path: Path) -> None:
    expected = predicted(tmp_path, 40_000, KINDS)
    assert min(expected, key=expected.__getitem__) == "none"


def test_overlap_hides_at_least_half_of_what_it_could(hosts: Hosts) -> None:
    for name in hosts.names:
        hosts.limit(name, mbit=400)
    found = measured(hosts, "overlap", "1.0")
    print(found)
    for rank in found:
        # The last bucket is full when the backward pass is over.
        could = min(rank["backward"], rank["sums"] * (1 - 1 / rank["buckets"]))
        assert rank["backward"] + rank["sums"] - rank["both"] >= 0.5 * could
