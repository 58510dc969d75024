"""What a profiler has seen of a step, sorted: what was computed when, which collectives ran, who asked for them.

On a GPU a kernel knows the call on the host that launched it, so that each of NCCL's kernels finds its collective
exactly, whatever its stream. Copies between host and GPU are no computing: who waits for them, or for a collective
beside them, computes nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from meshwright.observe.breakdown import Interval, subtract, union
from meshwright.observe.issued import OPERATIONS, Ran, as_sizes

LAUNCHES = "record_param_comms"
"""What torch calls the part of a call of NCCL that launches its kernels."""
_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
_NO_COMPUTE = ("c10d::", "_c10d_functional::", "autograd::", "profiler::", "FSDP::")
_HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
_WIDTHS = {"double": 8, "long": 8, "float": 4, "int": 4, "BFloat16": 2, "Half": 2}


class Event(Protocol):
    """What is asked of an event of kineto's."""

    def name(self) -> str: ...
    def start_ns(self) -> int: ...
    def end_ns(self) -> int: ...
    def start_thread_id(self) -> int: ...
    def correlation_id(self) -> int: ...
    def linked_correlation_id(self) -> int: ...
    def is_user_annotation(self) -> bool: ...
    def shapes(self) -> Sequence[Any]: ...
    def dtypes(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Events:
    """What a profiler has seen, by kind; times are seconds of the host's monotonic clock."""

    compute: list[Interval]
    ran: list[Ran]
    asked: list[tuple[float, float, str]]
    """Operations that were called, in order, with begin and end of the call."""
    offset: float
    """What to add to unix time to get the clock of these."""


def sort_events(host: Iterable[Event], device: Iterable[Event] | None, mark: str, offset: float) -> Events:
    """Events of the host and of its GPU, None without one. The thread that trains is that of a mark among the host's;
    `offset` is what to add to their clock."""
    named = [(event.name(), event) for event in host]
    asked = sorted((*_interval(event, offset), OPERATIONS[name]) for name, event in named if name in OPERATIONS)
    # A send ends when somebody waits for it, and nobody does before the end of a step: its time means nothing.
    ran = [
        Ran(name, *_interval(event, offset), event.start_thread_id(), as_sizes(event.shapes()), _bytes(event))
        for name, event in named
        if name.startswith("gloo:") and name != "gloo:send"
    ]
    if device is None:
        return Events(_computed_by_host(named, asked, mark, offset), ran, asked, offset)
    launches = {event.correlation_id(): _interval(event, offset) for name, event in named if name == LAUNCHES}
    compute = []
    for event in device:
        name = event.name()
        if event.is_user_annotation() or name.startswith(_HOST_COPIES):
            continue
        if name.startswith("nccl"):
            ran.append(Ran(name, *_interval(event, offset), called=launches.get(event.linked_correlation_id())))
        else:
            compute.append(_interval(event, offset))
    return Events(union(compute), ran, asked, offset)


def _computed_by_host(
    named: Sequence[tuple[str, Event]], asked: Iterable[tuple[float, float, str]], mark: str, offset: float
) -> list[Interval]:
    own = next((event.start_thread_id() for name, event in named if name == mark), 1)
    compute, waits = [], [(begin, end) for begin, end, _ in asked]
    for name, event in named:
        if name not in OPERATIONS and event.start_thread_id() == own:
            if name.startswith("_c10d_functional::"):
                waits.append(_interval(event, offset))
            elif _computes(name):
                compute.append(_interval(event, offset))
    return subtract(union(compute), union(waits))


def _interval(event: Event, offset: float) -> Interval:
    return event.start_ns() / 1e9 + offset, event.end_ns() / 1e9 + offset


def _computes(name: str) -> bool:
    """Whether an event of the training thread is an operator at work, not one that only stands around others."""
    return name.startswith(_COMPILED) or ("::" in name and not name.startswith(_NO_COMPUTE))


def _bytes(event: Event) -> int:
    """What went into a collective, by the profiler."""
    found = 0
    for size, dtype in zip(event.shapes(), event.dtypes(), strict=False):
        width = next((width for word, width in _WIDTHS.items() if word in dtype), 1)
        found += prod(size) * width
    return found
