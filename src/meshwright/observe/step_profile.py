"""One step under torch's profiler: what was computed when, and which collectives ran when."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.observe.breakdown import Interval, subtract, union
from meshwright.observe.collective_rows import Collective
from meshwright.observe.issued import OPERATIONS, Call, Group, Ran, as_sizes, calls, match
from meshwright.torch_private import flight_records, forget_events, is_on_gpu, profiled_events, profiling_all_threads

_MARK = "meshwright profile"
_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
_NO_COMPUTE = ("c10d::", "_c10d_functional::", "autograd::", "profiler::", "FSDP::")
_WIDTHS = {"double": 8, "long": 8, "float": 4, "int": 4, "BFloat16": 2, "Half": 2}


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
        events = profiled_events(self._profile)
        own = next((event.start_thread_id() for event in events if event.name() == _MARK), 1)
        ran, asked, compute, waits = [], [], [], []
        for event in events:
            name = event.name()
            on_device = self._on_gpu and is_on_gpu(event)
            interval = event.start_ns() / 1e9 + offset, event.end_ns() / 1e9 + offset
            if on_device:
                if event.is_user_annotation():
                    continue
                if name.startswith("nccl"):
                    ran.append(Ran(name, *interval))
                else:
                    compute.append(interval)
            elif name == "gloo:send":
                # Ends when somebody waits for it, and nobody does before the end of a step: its time means nothing.
                continue
            elif name.startswith("gloo:"):
                ran.append(Ran(name, *interval, event.start_thread_id(), as_sizes(event.shapes()), _bytes(event)))
            elif name in OPERATIONS:
                asked.append((*interval, OPERATIONS[name]))
                waits.append(interval)
            elif not self._on_gpu and event.start_thread_id() == own:
                if name.startswith("_c10d_functional::"):
                    waits.append(interval)
                elif _computes(name):
                    compute.append(interval)
        forget_events(self._profile)
        called, problem = self._calls(sorted(asked), (self._begin, end), offset)
        computed = union(compute) if self._on_gpu else subtract(union(compute), union(waits))
        return Seen(self._begin, end, computed, match(ran, called, self._transfers), problem)

    def _calls(self, asked: list[tuple[float, float, str]], window: Interval, offset: float) -> tuple[list[Call], str]:
        if not self._groups:
            return [], ""
        try:
            entries = [entry for one in flight_records(with_entries=True) for entry in one.get("entries", [])]
            return calls(entries, asked, self._groups, window, offset), ""
        except Exception as error:
            # Another release of torch may keep other records; a rank must train on all the same.
            return [], repr(error)


def _computes(name: str) -> bool:
    """Whether an event of the training thread is an operator at work, not one that only stands around others."""
    return name.startswith(_COMPILED) or ("::" in name and not name.startswith(_NO_COMPUTE))


def _bytes(event: Any) -> int:
    """What went into a collective, by the profiler."""
    found = 0
    for size, dtype in zip(event.shapes(), event.dtypes(), strict=False):
        width = next((width for word, width in _WIDTHS.items() if word in dtype), 1)
        found += prod(size) * width
    return found
