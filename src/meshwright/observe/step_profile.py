"""One step under torch's profiler: what was computed when, and which collectives ran when."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.observe.breakdown import Interval
from meshwright.observe.collective_rows import Collective
from meshwright.observe.issued import Group, calls, is_within, match
from meshwright.observe.profile_events import Events, sort_events
from meshwright.torch_private import flight_records, forget_events, is_on_gpu, profiled_events, profiling_all_threads

_MARK = "meshwright profile"


@dataclass(frozen=True)
class Seen:
    """What a profile has seen; times are seconds of the host's monotonic clock."""

    begin: float
    end: float
    compute: list[Interval]
    collectives: list[Collective]
    problem: str = ""
    """Why groups and sizes of collectives are not known, where they are not."""


class StepProfile:
    """A profile of what runs between `start` and `stop`."""

    def __init__(
        self, device: torch.device, groups: Mapping[str, Group], transfers: Group | None, all_threads: bool = False
    ) -> None:
        """`groups` by torch's names of them; `transfers` is that of messages from rank to rank, where there are any;
        `all_threads`: whether threads of ours call collectives, too."""
        self._groups, self._transfers = groups, transfers
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        # Read when the profiler starts for the first time, which else tells of each of its starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        # Messages from rank to rank are in no recorder of gloo's; else shapes would only triple the cost.
        self._profile = profile(
            activities=activities,
            record_shapes=transfers is not None,
            experimental_config=profiling_all_threads() if all_threads else None,
        )
        self._begin = 0.0

    def start(self) -> None:
        """From here on all is recorded."""
        self._profile.start()
        with record_function(_MARK):
            # Tells which of the threads is this one.
            self._begin = time.monotonic()

    def drop(self) -> None:
        """End it and look at nothing."""
        self._profile.stop()
        forget_events(self._profile)

    def stop(self) -> Seen:
        """What there was."""
        end = time.monotonic()
        self._profile.stop()
        offset = time.monotonic() - time.time()
        seen = read_events(self._profile, _MARK, self._on_gpu, offset)
        forget_events(self._profile)
        window = self._begin, end
        entries, problem = recorded_calls(window, offset) if self._groups else ([], "")
        collectives = collectives_in(seen, entries, window, self._groups, self._transfers)
        return Seen(self._begin, end, seen.compute, collectives, problem)


def read_events(profile: profile, mark: str, on_gpu: bool, offset: float) -> Events:
    """What a profile that was stopped has seen; the thread that trains is that of a mark in it."""
    events = profiled_events(profile)
    if not on_gpu:
        return sort_events(events, None, mark, offset)
    device = [event for event in events if is_on_gpu(event)]
    return sort_events([event for event in events if not is_on_gpu(event)], device, mark, offset)


def recorded_calls(window: Interval, offset: float) -> tuple[list[Mapping[str, Any]], str]:
    """What torch's recorders know of the calls of a window of time; else why they are not known."""
    try:
        kept = [one.get("entries", []) for one in flight_records(with_entries=True)]
        lost = next((problem for entries in kept if (problem := _overrun(entries, window, offset))), "")
        return [entry for entries in kept for entry in entries if is_within(entry, window, offset)], lost
    except Exception as error:
        # Another release of torch may keep other records; a rank must train on all the same.
        return [], repr(error)


def collectives_in(
    events: Events,
    entries: list[Mapping[str, Any]],
    window: Interval,
    groups: Mapping[str, Group],
    transfers: Group | None,
) -> list[Collective]:
    """The collectives that began in a window of time, each with the call that it was."""
    ran = [one for one in events.ran if window[0] <= one.begin <= window[1]]
    called = calls(entries, events.asked, groups, window, events.offset)
    return match(ran, called, transfers)


def _overrun(entries: list[dict[str, Any]], window: Interval, offset: float) -> str:
    """What to say where torch's recorder, which keeps so many calls, has let go of some of this window's."""
    if not entries:
        return ""
    oldest = min(entries, key=lambda entry: int(entry["record_id"]))
    if not oldest["record_id"] or oldest["time_created_ns"] / 1e9 + offset <= window[0]:
        return ""
    return (
        f"a step calls more collectives than the {len(entries)} that torch's recorder keeps, and the first of them are "
        f"listed as of a group other; start with TORCH_FR_BUFFER_SIZE={4 * len(entries)} in the environment"
    )
