"""Which call of a collective ran when, as torch's recorder and its profiler tell it together."""

from __future__ import annotations

from typing import Any

from meshwright.observe.issued import Call, Group, Ran, calls, match

TP, DP = Group("tp", 2), Group("dp", 4)
GROUPS = {"3": TP, "5": DP}


def entry(name: str, group: str, at_ns: int, given: int, made: int | None = None) -> dict[str, Any]:
    return {
        "profiling_name": name,
        "process_group": [group, "of something"],
        "time_created_ns": at_ns,
        "input_sizes": [[given]],
        "output_sizes": [[given if made is None else made]],
        "input_dtypes": ["BFloat16"],
        "output_dtypes": ["BFloat16"],
    }


def test_operation_is_what_was_asked_for_and_bytes_are_those_of_the_whole() -> None:
    entries = [
        entry("gloo:all_reduce", "3", 1_000_000_000, 1000),
        entry("gloo:all_gather", "5", 1_100_000_000, 1000),
        entry("gloo:all_reduce", "9", 1_200_000_000, 10),
        entry("gloo:all_reduce", "3", 9_000_000_000, 1000),
    ]
    asked = [(0.9999, 1.0001, "reduce_scatter"), (1.0999, 1.1001, "all_gather")]
    found = calls(entries, asked, GROUPS, (0.5, 2.0), 0.0)
    assert [(call.operation, call.group.label, call.bytes) for call in found] == [
        ("reduce_scatter", "tp", 2000),
        ("all_gather", "dp", 8000),
        ("all_reduce", "other", 20),
    ]


def call(operation: str, group: Group, key: str, moved: int, at: float) -> Call:
    return Call(operation, f"gloo:{operation}", group, key, moved, (), at)


def test_threads_tell_groups_apart_when_calls_overtake_each_other() -> None:
    """The third sum over dp waits for a thread when one over tp is called, and runs: order alone would swap them."""
    called = [
        call("all_reduce", DP, "5", 100, 1.0),
        call("all_reduce", DP, "5", 101, 1.1),
        call("all_reduce", DP, "5", 102, 1.2),
        call("all_reduce", TP, "3", 7, 1.3),
        call("all_reduce", TP, "3", 8, 3.0),
    ]
    ran = [
        Ran("gloo:all_reduce", 1.0, 2.0, thread=11),
        Ran("gloo:all_reduce", 1.1, 2.1, thread=12),
        Ran("gloo:all_reduce", 2.0, 2.2, thread=11),
        Ran("gloo:all_reduce", 1.3, 1.4, thread=21),
        Ran("gloo:all_reduce", 3.0, 3.1, thread=21),
    ]
    found = match(ran, called, None)
    assert [(one.group, one.bytes) for one in found] == [("dp", 100), ("dp", 101), ("tp", 7), ("dp", 102), ("tp", 8)]


def test_kernels_find_their_calls_and_strangers_stay_strangers() -> None:
    called = [
        Call("all_gather", "nccl:_all_gather_base", DP, "5", 400, (), 1.0),
        Call("reduce_scatter", "nccl:_reduce_scatter_base", DP, "5", 800, (), 1.1),
    ]
    ran = [
        Ran("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1.2, 1.3),
        Ran("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1.1, 1.2),
        Ran("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 1.4, 1.5),
        Ran("gloo:recv", 1.5, 1.6, bytes=64),
    ]
    found = match(ran, called, Group("pp", 2))
    assert [(one.operation, one.group, one.bytes) for one in found] == [
        ("all_gather", "dp", 400),
        ("reduce_scatter", "dp", 800),
        ("receive", "pp", 0),
        ("receive", "pp", 64),
    ]


def test_a_call_that_was_not_made_yet_is_not_what_ran() -> None:
    found = match([Ran("gloo:all_reduce", 1.0, 1.1, bytes=4)], [call("all_reduce", DP, "5", 100, 2.0)], None)
    assert [(one.group, one.bytes) for one in found] == [("other", 4)]
