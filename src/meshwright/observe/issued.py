"""Which collectives a rank has called (operation, group and bytes, from torch's own recorder) and when each one ran.

Torch's profiler says when a collective ran, and nothing of its group. Its recorder says when it was called, in which
group and with which sizes, and nothing of when it ran. Calls of one kind in one group run in the order in which they
were made, and gloo runs those of a group in threads of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from meshwright.observe.breakdown import Interval
from meshwright.observe.collective_rows import Collective

OPERATIONS = {
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::alltoall_": "all_to_all",
    "c10d::broadcast_": "broadcast",
    "c10d::reduce_": "reduce",
    "c10d::gather_": "gather",
    "c10d::scatter_": "scatter",
    "c10d::barrier": "barrier",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}
"""By what a caller asked for: backends may do it as something else, and say so."""

_SPOKEN = {
    "_all_gather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "recv": "receive",
    "alltoall": "all_to_all",
}
_KERNELS = {
    "AllReduce": ("all_reduce", "barrier"),
    "AllGather": ("all_gather",),
    "ReduceScatter": ("reduce_scatter",),
    "Broadcast": ("broadcast",),
    "SendRecv": ("all_to_all", "gather", "scatter", "send", "receive"),
    "Reduce": ("reduce",),
}
"""What kernels of NCCL are called for; sums of nothing are its barriers."""
_WIDTHS = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Short": 2}
Sizes = tuple[tuple[int, ...], ...]
SLACK_S = 1e-3
"""By how much the clocks of the profiler and of the recorder may differ."""


class Group(NamedTuple):
    """A process group as people call it."""

    label: str
    ranks: int
    exchange: str = ""
    """What it is called in an all-to-all, where that is something else."""

    def called(self, operation: str) -> str:
        """Its name in an operation."""
        return self.exchange or self.label if operation == "all_to_all" else self.label


@dataclass(frozen=True)
class Call:
    """A collective that was called."""

    operation: str
    spoken: str
    """What the backend calls it."""
    group: Group
    key: str
    """Torch's name of the group."""
    bytes: int
    sizes: Sizes
    at: float


@dataclass(frozen=True)
class Ran:
    """A collective that ran, as the profiler has it."""

    name: str
    """`gloo:all_reduce`, or a kernel's."""
    begin: float
    end: float
    thread: int = 0
    sizes: Sizes = ()
    """Of what went in, where the profiler knows."""
    bytes: int = 0
    called: Interval | None = None
    """When the host launched it, where that is known."""


def calls(
    entries: Iterable[Mapping[str, Any]],
    asked: Sequence[tuple[float, float, str]],
    groups: Mapping[str, Group],
    window: Interval,
    offset: float,
) -> list[Call]:
    """The calls of a window of time, in order.

    `entries` are those of the recorder, `asked` the operations that callers asked for with begin and end, in order;
    `offset` is what to add to unix time to get the clock of these.
    """
    begins = [begin for begin, _, _ in asked]
    found = []
    for entry in entries:
        if not is_within(entry, window, offset):
            continue
        at = entry["time_created_ns"] / 1e9 + offset
        spoken = str(entry["profiling_name"])
        place = bisect_right(begins, at + SLACK_S / 10) - 1
        is_asked = place >= 0 and at <= asked[place][1] + SLACK_S
        operation = asked[place][2] if is_asked else spoken_operation(spoken)
        sizes, key = entry.get("input_sizes", []), str(entry["process_group"][0])
        group = groups.get(key, Group("other", 0))
        moved = _whole_bytes(
            operation,
            group.ranks,
            _bytes(sizes, entry.get("input_dtypes", [])),
            _bytes(entry.get("output_sizes", []), entry.get("output_dtypes", [])),
        )
        found.append(Call(operation, spoken, group, key, moved, as_sizes(sizes), at))
    return sorted(found, key=lambda call: call.at)


def is_within(entry: Mapping[str, Any], window: Interval, offset: float) -> bool:
    """Whether a call that torch's recorder knows was made in a window of time."""
    return window[0] - SLACK_S <= entry["time_created_ns"] / 1e9 + offset <= window[1]


def match(ran: Iterable[Ran], called: Iterable[Call], transfers: Group | None) -> list[Collective]:
    """What ran, each with the call that it was; what nobody is known to have called is of a group `other`.

    Transfers from rank to rank are in no recorder of gloo's: they are of the group that is given.
    """
    ran, called = sorted(ran, key=lambda one: one.begin), list(called)
    launched = _launched(ran, called)
    taken = {id(call) for call in launched.values()}
    rest = [call for call in called if id(call) not in taken]
    # Once to learn which threads are whose, and once with that.
    learning = _Queues(rest, {})
    for one in ran:
        if id(one) not in launched:
            learning.take(one)
    queues = _Queues(rest, learning.groups())
    found = []
    for one in ran:
        call = launched.get(id(one)) or queues.take(one)
        operation = call.operation if call is not None else spoken_operation(one.name)
        group = call.group if call is not None else Group("other", 0)
        if operation in ("send", "receive") and group.label == "other":
            group = transfers or group
        label, moved = group.called(operation), call.bytes if call else one.bytes
        found.append(Collective(operation, label, group.ranks, moved, one.begin, one.end))
    return found


def _launched(ran: Iterable[Ran], called: Iterable[Call]) -> dict[int, Call]:
    """Of what is known to have been launched at a time, the calls that were made then: streams overtake each other.

    The nearest find each other first, so that a kernel whose own call the recorder has lost takes none of a neighbour.
    """
    left = sorted(called, key=lambda call: call.at)
    times = [call.at for call in left]
    near: list[tuple[float, int, int, Ran]] = []
    known = [one for one in ran if one.called is not None]
    for number, one in enumerate(sorted(known, key=lambda one: one.called or (0.0, 0.0))):
        begin, end = one.called or (0.0, 0.0)
        kinds = _KERNELS.get(_kernel(one.name))
        near += [
            (max(begin - times[place], times[place] - end, 0.0), number, place, one)
            for place in range(bisect_left(times, begin - SLACK_S), bisect_right(times, end + SLACK_S))
            if kinds is None or left[place].operation in kinds
        ]
    found: dict[int, Call] = {}
    taken: set[int] = set()
    for _, _, place, one in sorted(near, key=lambda pair: pair[:3]):
        if id(one) not in found and place not in taken:
            found[id(one)] = left[place]
            taken.add(place)
    return found


class _Queues:
    """Calls that have not been seen to run, the oldest first."""

    def __init__(self, called: Iterable[Call], groups: Mapping[int, str]) -> None:
        """`groups` of threads, as far as they are known."""
        self._queues: dict[Any, dict[str, deque[Call]]] = {}
        """By what they are, with sizes and without, and by group."""
        self._taken: set[int] = set()
        self._groups = groups
        self._only: dict[int, Counter[str]] = {}
        """Of each thread, how often which group was the only one that was possible."""
        for call in called:
            for word in ((call.spoken, call.sizes), call.spoken, call.operation):
                self._queues.setdefault(word, {}).setdefault(call.key, deque()).append(call)

    def take(self, ran: Ran) -> Call | None:
        """The call that this is: of the group that runs in its thread, else the oldest."""
        words: list[Any] = [(ran.name, ran.sizes), ran.name]
        if ran.name.startswith("nccl"):
            words = list(_KERNELS.get(_kernel(ran.name), ()))
        for word in words:
            heads = {key: call for key, queue in self._queues.get(word, {}).items() if (call := self._head(queue))}
            heads = {key: call for key, call in heads.items() if call.at <= ran.begin + SLACK_S}
            if heads:
                if len(heads) == 1 and ran.thread:
                    self._only.setdefault(ran.thread, Counter()).update(heads.keys())
                call = heads.get(self._groups.get(ran.thread, "")) or min(heads.values(), key=lambda one: one.at)
                self._taken.add(id(call))
                return call
        return None

    def groups(self) -> dict[int, str]:
        """The group of each thread, as far as it was seen."""
        return {thread: count.most_common(1)[0][0] for thread, count in self._only.items()}

    def _head(self, queue: deque[Call]) -> Call | None:
        while queue and id(queue[0]) in self._taken:
            queue.popleft()
        return queue[0] if queue else None


def _kernel(name: str) -> str:
    return next((kernel for kernel in _KERNELS if kernel in name), "")


def spoken_operation(name: str) -> str:
    """The operation that a backend or a kernel names."""
    if name.startswith("nccl") and not name.startswith("nccl:"):
        # Those of windows of memory have other beginnings: ncclSymkDevKernel_AllReduce...
        return "receive" if _kernel(name) == "SendRecv" else _KERNELS.get(_kernel(name), ("other",))[0]
    plain = name.split(":")[-1].split(" ")[0]
    return _SPOKEN.get(plain, plain)


def as_sizes(sizes: Any) -> Sizes:
    """Sizes of tensors in a form that can be compared."""
    return tuple(tuple(int(number) for number in one) for one in sizes if isinstance(one, list | tuple))


def _whole_bytes(operation: str, ranks: int, given: int, made: int) -> int:
    """The larger of what goes in and what comes out; a backend may tell of one part of what comes out."""
    if operation == "all_gather":
        return max(made, given * max(1, ranks))
    return max(given, made)


def _bytes(sizes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    return sum(prod(size) * _WIDTHS.get(dtype, 1) for size, dtype in zip(sizes, dtypes, strict=False))
