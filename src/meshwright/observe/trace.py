"""The spans of all ranks as one timeline: Chrome's trace-event JSON, which Perfetto and chrome://tracing open.

A rank is a process, with threads for passes, collectives, transfers and the time in which nothing was computed. Ranks
of one machine share a clock. Clocks of machines are apart by what `unix` does not know, so they are aligned by what
happens everywhere at once: a collective ends on all ranks of its group at nearly the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

PASSES, COLLECTIVES, TRANSFERS, IDLE = "passes", "collectives", "transfers", "idle"
THREADS = (PASSES, COLLECTIVES, TRANSFERS, IDLE)
LANES = 100
"""Numbers of threads that one kind may take: collectives that overlap are shown side by side."""

ENDS_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank leaves before all have entered."""


class Span(NamedTuple):
    """Something that a rank did."""

    name: str
    category: str
    start: float
    end: float
    step: int


@dataclass
class RankSpans:
    """The spans of one rank. Seconds since the epoch, by its machine's clock."""

    rank: int
    host: str = ""
    coordinates: Mapping[str, int] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    def title(self, axes: Iterable[str]) -> str:
        """The rank with its place on the axes that have more than one."""
        place = " ".join(f"{axis}{index}" for axis, index in self.coordinates.items() if axis in axes)
        return f"rank {self.rank}" + (f" ({place})" if place else "") + (f" on {self.host}" if self.host else "")


def spans_of(
    rank: int, header: Mapping[str, Any], lines: Iterable[Mapping[str, Any]], steps: range | None = None
) -> RankSpans:
    """A rank's spans from the lines of its file, the last of each step; all of them, or those of some steps.

    `header` is the rank's own line, which says where it is.
    """
    place = header.get("coordinates")
    found = RankSpans(rank, str(header.get("host", "")), _numbers(place) if isinstance(place, dict) else {})
    chosen = {line["step"]: line for line in lines if "spans" in line and (steps is None or line["step"] in steps)}
    for step, line in sorted(chosen.items()):
        found.spans += [
            Span(str(name), str(category), line["unix"] + start, line["unix"] + max(start, end), step)
            for name, category, start, end in line["spans"]
        ]
    return found


def _numbers(place: Mapping[Any, Any]) -> dict[str, int]:
    return {str(axis): index for axis, index in place.items() if isinstance(index, int)}


def clock_errors(ranks: Sequence[RankSpans]) -> dict[str, float]:
    """By machine, the seconds by which its clock is ahead of the first one's, as far as collectives tell."""
    differences: dict[tuple[str, str], list[float]] = defaultdict(list)
    for ends in _ends_of_collectives(ranks).values():
        for (one, end), (other, other_end) in zip(ends, ends[1:], strict=False):
            if one.host != other.host:
                differences[one.host, other.host].append(other_end - end)
                differences[other.host, one.host].append(end - other_end)
    errors: dict[str, float] = {}
    # From machine to machine; those that share no group with others that are known keep the clock they have.
    for root in dict.fromkeys(rank.host for rank in ranks):
        if root in errors:
            continue
        errors[root] = 0.0
        reached = [root]
        for host in reached:
            for (known, unknown), apart in differences.items():
                if known == host and unknown not in errors:
                    errors[unknown] = errors[host] + median(apart)
                    reached.append(unknown)
    return errors


def _ends_of_collectives(ranks: Sequence[RankSpans]) -> dict[tuple[Any, ...], list[tuple[RankSpans, float]]]:
    """When each collective ended on the ranks that took part: the n-th of a group on one is the n-th on all."""
    found: dict[tuple[Any, ...], list[tuple[RankSpans, float]]] = defaultdict(list)
    for rank in ranks:
        counts: dict[tuple[Any, ...], int] = defaultdict(int)
        for span in sorted(rank.spans, key=lambda span: span.start):
            words = span.name.split()
            if span.category != "collective" or len(words) < 2 or words[0] not in ENDS_TOGETHER:
                continue
            axis = words[1]
            # The ranks of an axis are those that differ in nothing else.
            group = tuple((name, index) for name, index in rank.coordinates.items() if name != axis)
            if axis not in rank.coordinates:
                if axis not in ("world", "all"):
                    continue
                group = ()
            key = (span.step, axis, group)
            found[(*key, span.name, counts[key])].append((rank, span.end))
            counts[key] += 1
    return found


def trace_events(ranks: Sequence[RankSpans]) -> dict[str, Any]:
    """The timeline as an object to write as JSON. Times are microseconds since its first span."""
    errors = clock_errors(ranks)
    begin = min((span.start - errors[rank.host] for rank in ranks for span in rank.spans), default=0.0)
    events: list[dict[str, Any]] = []
    axes = {axis for rank in ranks for axis, index in rank.coordinates.items() if index}
    for rank in sorted(ranks, key=lambda one: one.rank):
        shift = -errors[rank.host] - begin
        events.append(_word("process_name", rank.rank, 0, name=rank.title(axes)))
        events.append(_word("process_sort_index", rank.rank, 0, sort_index=rank.rank))
        for place, thread in enumerate(THREADS):
            lanes = _lanes([span for span in [*rank.spans, *_idle(rank.spans)] if _thread(span.category) == thread])
            for lane, spans in enumerate(lanes):
                number = 1 + place * LANES + lane
                events.append(_word("thread_name", rank.rank, number, name=thread + (f" {lane + 1}" if lane else "")))
                events.append(_word("thread_sort_index", rank.rank, number, sort_index=number))
                events += [_complete(span, rank.rank, number, shift) for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _word(kind: str, process: int, thread: int, **said: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": said}


def _complete(span: Span, process: int, thread: int, shift: float) -> dict[str, Any]:
    # Rounded at both ends, so that what was nested stays nested.
    start, end = round((span.start + shift) * 1e6, 3), round((span.end + shift) * 1e6, 3)
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.category,
        "ts": max(0.0, start),
        "dur": round(max(0.0, end - max(0.0, start)), 3),
        "pid": process,
        "tid": thread,
        "args": {"step": span.step},
    }


def _thread(category: str) -> str:
    return {"collective": COLLECTIVES, "transfer": TRANSFERS, "idle": IDLE}.get(category, PASSES)


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans dealt out so that in each lane they follow one another or lie within one another."""
    lanes: list[list[Span]] = []
    open_spans: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: (one.start, -one.end)):
        for lane, stack in zip(lanes, open_spans, strict=True):
            while stack and stack[-1].end <= span.start:
                stack.pop()
            if not stack or span.end <= stack[-1].end:
                lane.append(span)
                stack.append(span)
                break
        else:
            lanes.append([span])
            open_spans.append([span])
    return lanes


def _idle(spans: Sequence[Span]) -> list[Span]:
    """The time between passes in which nothing was computed."""
    found: list[Span] = []
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_step[span.step].append(span)
    for step, those in by_step.items():
        busy = sorted((one.start, one.end) for one in those if _thread(one.category) == PASSES)
        reached = min(one.start for one in those)
        last = max(one.end for one in those)
        for start, end in [*busy, (last, last)]:
            if start > reached:
                found.append(Span("idle", "idle", reached, start, step))
            reached = max(reached, end)
    return found
