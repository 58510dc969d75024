"""The timeline of a run: it is what the trace-event format asks for, and machines share one clock in it."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.trace import RankSpans, Span, clock_errors, spans_of, trace_events


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """What every viewer asks of a trace; gives its spans.

    As the trace-event format has it: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
    """
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert isinstance(trace["traceEvents"], list)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    threads, named = defaultdict(list), set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            (value,) = event["args"].values()
            assert isinstance(value, int if event["name"].endswith("index") else str)
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert isinstance(event["cat"], str)
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        threads[event["pid"], event["tid"]].append(event)
    for (process, thread), spans in threads.items():
        assert ("process_name", process, 0) in named
        assert ("thread_name", process, thread) in named
        # Within a thread spans follow or contain one another.
        open_ends: list[float] = []
        for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
            end = span["ts"] + span["dur"]
            while open_ends and open_ends[-1] <= span["ts"] + 2e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 2e-3
            open_ends.append(end)
    return [span for spans in threads.values() for span in spans]


spans = st.builds(
    lambda category, start, length, step: Span(f"{category} x", category, start, start + length, step),
    st.sampled_from(["forward", "backward", "optimizer", "collective", "transfer", "data", "other"]),
    st.floats(1.7e9, 1.7e9 + 5).map(lambda x: round(x, 6)),
    st.floats(0, 2),
    st.integers(1, 3),
)


@given(st.lists(st.lists(spans, max_size=25), max_size=4))
def test_whatever_ranks_did_makes_a_trace_that_viewers_take(all_spans: list[list[Span]]) -> None:
    ranks = [RankSpans(rank, f"host {rank % 2}", {"dp": rank}, found) for rank, found in enumerate(all_spans)]
    shown = check_trace(trace_events(ranks))
    assert sum(span["cat"] != "idle" for span in shown) == sum(map(len, all_spans)), "a span is missing"


def line(step: int, *found: list[Any], unix: float = 1000.0) -> dict[str, Any]:
    return {"step": step, "begin": 0.0, "unix": unix, "spans": list(found)}


def test_threads_and_idle_time_of_a_rank() -> None:
    header = {"kind": "rank", "rank": 3, "host": "node-1", "coordinates": {"pp": 1, "dp": 1}}
    lines = [
        line(6, ["F stage 1 micro-batch 0", "forward", 1.0, 2.0]),
        # Done again after a restart: the last line of a step counts.
        line(7, ["F stage 1 micro-batch 9", "forward", 5.0, 6.0]),
        line(
            7,
            ["F stage 1 micro-batch 0", "forward", 11.0, 12.0],
            ["B stage 1 micro-batch 0", "backward", 13.0, 15.0],
            ["all_reduce dp 4.0 MiB", "collective", 14.0, 15.5],
            ["all_reduce dp 1.0 MiB", "collective", 14.5, 15.8],
            ["receive pp", "transfer", 12.0, 13.0],
        ),
        {"step": 7},
    ]
    trace = trace_events([spans_of(3, header, lines, range(7, 8))])
    shown = {(span["name"], span["ts"], span["dur"], span["tid"]) for span in check_trace(trace)}
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert names == {1: "passes", 101: "collectives", 102: "collectives 2", 201: "transfers", 301: "idle"}
    assert shown == {
        ("F stage 1 micro-batch 0", 0.0, 1e6, 1),
        ("B stage 1 micro-batch 0", 2e6, 2e6, 1),
        ("all_reduce dp 4.0 MiB", 3e6, 1.5e6, 101),
        ("all_reduce dp 1.0 MiB", 3.5e6, 1.3e6, 102),
        ("receive pp", 1e6, 1e6, 201),
        ("idle", 1e6, 1e6, 301),
        ("idle", 4e6, 0.8e6, 301),
    }
    (process,) = [event for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert process["args"]["name"] == "rank 3 (pp1 dp1) on node-1"


def test_clocks_of_machines_are_aligned_by_collectives_that_end_together() -> None:
    draw = random.Random(0)
    wrong = {"a": 0.0, "b": 0.7, "c": -1.3}
    ranks = []
    # Two ranks a machine: tp within machines, dp across.
    for rank in range(6):
        host = "abc"[rank // 2]
        found = []
        for number in range(20):
            end = 100.0 + number + wrong[host] + draw.uniform(0, 1e-4)
            found.append(Span(f"all_reduce dp {number} B", "collective", end - draw.uniform(0.1, 0.5), end, 1))
            # Of other groups, at other times; and one that does not end everywhere at once.
            other = end + 0.4 + rank / 50
            found.append(Span("all_gather tp 8 B", "collective", other - 0.01, other, 1))
            found.append(Span("broadcast dp 8 B", "collective", end, end + rank / 10, 1))
        ranks.append(RankSpans(rank, host, {"dp": rank // 2, "tp": rank % 2}, found))
    assert clock_errors(ranks) == pytest.approx(wrong, abs=2e-4)
    ends = defaultdict(list)
    for span in check_trace(trace_events(ranks)):
        if " dp " in span["name"] and span["name"].startswith("all_reduce"):
            ends[span["name"]].append(span["ts"] + span["dur"])
    assert all(max(those) - min(those) < 400 for those in ends.values())


def test_machines_that_share_no_collective_keep_their_clocks() -> None:
    ranks = [RankSpans(rank, f"host {rank}", {"dp": rank}, [Span("F", "forward", 5.0, 6.0, 1)]) for rank in range(2)]
    assert clock_errors(ranks) == {"host 0": 0.0, "host 1": 0.0}
    assert clock_errors([]) == {}
    assert trace_events([])["traceEvents"] == []
