"""Ranks that call the same collective with different tensors: recognised from what they leave behind. Without torch.

Over gloo such a call ends one rank by an abort inside the library, which says a number of bytes and no rank, and the
others see a lost connection. From the stacks of the rank that aborted and the last collectives of the others one can
tell that this is what happened, and where. Ranks that are started again with their collectives checked (torch's debug
level DETAIL) then say which rank called what.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from meshwright.elastic.arrivals import Call
from meshwright.elastic.stacks import parse_faulthandler

CHECKED = "MESHWRIGHT_CHECK_COLLECTIVES"
"""The variable that makes ranks check that they agree on every collective."""

_FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=(\d+), OpType=(\w+)"
    r"(?:, TensorShape=\[([^\]]*)\], TensorDtypes=(\w+))?"
)

_OPERATIONS = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "all_gather_into_tensor",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "reduce_scatter_tensor",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all_single",
}


def explain_abort(folder: Path, ended_by: Mapping[int, signal.Signals]) -> str | None:
    """What an abort inside a collective means, in words; None when that is not how the ranks ended.

    `folder` is the one that ranks answer in, `ended_by` the signals that ended ranks.
    """
    for rank, number in sorted(ended_by.items()):
        if number != signal.SIGABRT:
            continue
        place, collective = _aborted_in(folder / f"{rank}.fatal")
        if not collective:
            continue
        others = [f"rank {other} called {call}" for other, call in _open_calls(folder).items() if other != rank]
        calls = f", while {', '.join(others)}" if others else ""
        return (
            f"rank {rank} was ended by SIGABRT inside {collective} at {place}{calls}. "
            "Most likely the ranks called it with tensors of different sizes or dtypes, or different collectives; "
            "checked, they say which"
        )
    return None


def explain_disagreement(text: str) -> str | None:
    """The error of ranks whose collectives are checked, in a sentence; None when it is another error."""
    found = {int(match[1]): match for match in _FINGERPRINT.finditer(text)}
    if "Detected mismatch between collectives" not in text or len(found) < 2:
        return None
    said = []
    for rank, match in sorted(found.items()):
        shape = tuple(int(size) for size in re.findall(r"\d+", match[4] or ""))
        operation = _OPERATIONS.get(match[3], match[3].lower())
        call = Call(int(match[2]), operation, (shape,) if match[5] else (), (), (match[5],) if match[5] else ())
        said.append(f"rank {rank} called {call}")
    return f"ranks disagree in a collective: {', '.join(said)} (ranks as numbered in their group)"


def fatal_stack(path: Path) -> str:
    """The stack that a rank left when a fatal signal ended it, as lines to add to a text; empty when it left none."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    frames = parse_faulthandler(text).main if text else ()
    return "".join(f"\n  {frame}" for frame in frames[:12])


def _aborted_in(path: Path) -> tuple[str, str]:
    """Where the Python code was when it aborted, and in which collective; empty when in none."""
    try:
        text = path.read_text()
    except OSError:
        return "", ""
    if "Fatal Python error: Aborted" not in text:
        return "", ""
    stacks = parse_faulthandler(text)
    collective = stacks.collective
    if not collective and any(frame.function == "_engine_run_backward" for frame in stacks.main[:3]):
        # Gradients are reduced inside the backward pass.
        collective = "the backward pass, where gradients are reduced,"
    return str(stacks.place), collective


def _open_calls(folder: Path) -> dict[int, Call]:
    """By rank, the last collective that each of the failed ones was in."""
    found = {}
    for path in sorted(folder.glob("*.last")):
        try:
            records = json.loads(path.read_text())["records"]
        except (OSError, ValueError, KeyError):
            continue
        if records:
            last = records[-1]
            found[int(path.stem)] = Call(
                last["number"], last["operation"], tuple(map(tuple, last["inputs"])), (), tuple(last["dtypes"])
            )
    return found
