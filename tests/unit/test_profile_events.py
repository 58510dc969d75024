"""A profiler's events, sorted: kernels of GPUs and of NCCL, which cannot run here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from meshwright.observe.breakdown import Breakdown, Step, break_down
from meshwright.observe.collective_rows import Collective
from meshwright.observe.issued import Call, Group, Ran, match
from meshwright.observe.profile_events import Events, sort_events

DP, TP = Group("dp", 2), Group("tp", 2)


@dataclass(frozen=True)
class Recorded:
    """An event of a trace, with the questions that kineto's events answer."""

    category: str
    word: str
    begin_us: float
    duration_us: float
    link: int = 0

    def name(self) -> str:
        return self.word

    def start_ns(self) -> int:
        return round(self.begin_us * 1000)

    def end_ns(self) -> int:
        return round((self.begin_us + self.duration_us) * 1000)

    def start_thread_id(self) -> int:
        return 1

    def correlation_id(self) -> int:
        return self.link

    def linked_correlation_id(self) -> int:
        return self.link

    def is_user_annotation(self) -> bool:
        return self.category.endswith("user_annotation")

    def shapes(self) -> list[Any]:
        return []

    def dtypes(self) -> list[str]:
        return []


def sort(events: list[Recorded]) -> Events:
    host = [event for event in events if event.category == "cpu_op"]
    return sort_events(host, [event for event in events if event.category != "cpu_op"], "", 0.0)


def broken_down(events: list[Recorded]) -> Breakdown:
    """Of the time from the first kernel to the last."""
    device = [event for event in events if event.category in ("kernel", "gpu_memcpy", "gpu_memset")]
    begin = min(event.start_ns() for event in device) / 1e9
    end = max(event.end_ns() for event in device) / 1e9
    found = sort(events)
    communication = [(one.begin, one.end) for one in found.ran]
    return break_down(Step(begin, end, [("forward", begin)], found.compute, communication, host=False))


def kernel(name: str, begin: float, end: float, link: int = 0) -> Recorded:
    return Recorded("kernel", name, begin * 1e6, (end - begin) * 1e6, link)


def launch(at: float, link: int) -> Recorded:
    return Recorded("cpu_op", "record_param_comms", at * 1e6, 100, link)


def test_streams_that_overtake_each_other_keep_their_groups() -> None:
    """A sum over dp is launched first and waits in its stream; three over tp run before it. Order would swap them."""
    sums = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [launch(1.0, 1), *[launch(1.1 + number / 10, 2 + number) for number in range(3)]]
    events += [kernel(sums, 1.15 + number / 10, 1.19 + number / 10, 2 + number) for number in range(3)]
    events += [kernel(sums, 2.0, 2.5, 1)]
    called = [Call("all_reduce", "nccl:all_reduce", DP, "0", 1000, (), 1.00005)]
    called += [Call("all_reduce", "nccl:all_reduce", TP, "1", 8, (), 1.10005 + number / 10) for number in range(3)]
    assert [(one.group, one.bytes) for one in matched(events, called)] == [("tp", 8)] * 3 + [("dp", 1000)]


def test_a_kernel_of_a_call_before_the_profile_takes_no_call_of_another() -> None:
    sums = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [launch(1.0, 7), kernel(sums, 1.2, 1.3, 3), kernel(sums, 1.4, 1.5, 7)]
    called = [Call("all_reduce", "nccl:all_reduce", DP, "0", 64, (), 1.00005)]
    assert [(one.group, one.bytes) for one in matched(events, called)] == [("other", 0), ("dp", 64)]


def test_a_kernel_whose_call_was_lost_takes_no_call_of_its_neighbour() -> None:
    """The recorder has room for so many calls: the first of a step may have gone from it."""
    sums = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [launch(1.0, 7), launch(1.0005, 8), kernel(sums, 1.2, 1.3, 7), kernel(sums, 1.4, 1.5, 8)]
    called = [Call("all_reduce", "nccl:all_reduce", DP, "0", 64, (), 1.00055)]
    assert [(one.group, one.bytes) for one in matched(events, called)] == [("other", 0), ("dp", 64)]


@pytest.mark.parametrize(
    ("operation", "name"),
    [("barrier", "ncclDevKernel_AllReduce_Sum_u8_RING_LL"), ("gather", "ncclDevKernel_SendRecv")],
)
def test_kernels_are_known_by_their_calls_where_nccl_does_one_operation_as_another(operation: str, name: str) -> None:
    called = [Call(operation, f"nccl:{operation}", DP, "0", 64, (), 1.00005)]
    found = matched([launch(1.0, 7), kernel(name, 1.2, 1.3, 7)], called)
    assert [(one.operation, one.group, one.bytes) for one in found] == [(operation, "dp", 64)]


def test_a_kernel_on_a_window_of_memory_has_the_name_of_its_operation() -> None:
    found = matched([kernel("ncclSymkDevKernel_AllReduce_RSxLD_AGxST_sum_bf16", 1.2, 1.3)], [])
    assert [(one.operation, one.group) for one in found] == [("all_reduce", "other")]


@pytest.mark.alone
def test_many_kernels_find_their_calls_in_little_time() -> None:
    sums = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

    def seconds(count: int) -> float:
        ran = [Ran(sums, 9.0 + n / 1e4, 9.0 + n / 1e4, called=(n / 1e3, n / 1e3 + 1e-4)) for n in range(count)]
        called = [Call("all_reduce", "nccl:all_reduce", DP, "0", n, (), n / 1e3 + 5e-5) for n in range(count)]
        began = time.process_time()
        assert [one.bytes for one in match(ran, called, None)] == list(range(count))
        return time.process_time() - began

    assert seconds(8000) < 25 * seconds(1000)


def matched(events: list[Recorded], called: list[Call]) -> list[Collective]:
    return match(sort(events).ran, called, None)


def test_waiting_for_a_collective_beside_a_copy_to_the_host_is_waiting() -> None:
    events = [
        kernel("gemm", 0.0, 1.0),
        kernel("ncclDevKernel_AllGather_RING_LL", 1.0, 3.0),
        Recorded("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1e6, 1e6),
        Recorded("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 2e6, 0.5e6),
        Recorded("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 2.5e6, 0.25e6),
        Recorded("gpu_user_annotation", "nccl:_all_gather_base", 0, 3e6),
        kernel("gemm", 3.0, 4.0),
    ]
    found = broken_down(events)
    assert found.compute == pytest.approx(2.25)
    assert found.exposed == pytest.approx(1.75)
    assert found.overlapped == pytest.approx(0.25)
    assert found.idle == pytest.approx(0.0)
