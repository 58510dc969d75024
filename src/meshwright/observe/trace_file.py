"""`meshwright watch RUN --trace FILE`: a timeline of profiled steps, from the files of the ranks. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

from meshwright.errors import UserError
from meshwright.files import write_atomically
from meshwright.observe.curves import number
from meshwright.observe.tail import Line, Tail
from meshwright.observe.trace import RankSpans, spans_of, trace_events

_SPANS = re.compile(r"(\d+)\.spans\.jsonl")


def write_trace(run: Path, target: Path, steps: str | None = None) -> str:
    """Write the timeline of a run, or of some of its steps ("50:60" with both); gives what was written, in words."""
    wanted = parse_steps(steps) if steps is not None else None
    ranks = read_spans(run, wanted)
    found = sorted({span.step for rank in ranks for span in rank.spans})
    if not found:
        held = sorted({span.step for rank in read_spans(run, None) for span in rank.spans}) if wanted else []
        if held:
            raise UserError(f"none of the steps {steps} has a timeline; {run} has {_listed(held)}{_on_demand(run)}")
        raise UserError(
            f"{run} has no timeline of a step in its folder ranks; observe.profile_every and observe.profile_steps "
            f"write them{_on_demand(run)}"
        )
    timeline = trace_events(ranks)
    text = json.dumps(timeline, allow_nan=False)
    try:
        write_atomically(target, text)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}") from None
    count = sum(event["ph"] == "X" for event in timeline["traceEvents"])
    return f"{target}: {count} spans of {len(ranks)} ranks, {_listed(found)}; https://ui.perfetto.dev opens it"


def _on_demand(run: Path) -> str:
    """Where torch's own traces of steps on demand are."""
    return f"; steps of observe.profile_steps are in {run / 'profile'}" if (run / "profile").is_dir() else ""


def parse_steps(text: str) -> range:
    """The steps that "A:B", "A:", ":B" or "A" mean, both ends included."""
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text.strip())
    if match is None or not (match[1] or match[3]) or (not match[2] and match[3]):
        raise UserError(f"--steps {text}: give A:B, the steps from A to B; either may be left out")
    first = int(match[1] or 0)
    last = int(match[3]) if match[3] else first if not match[2] else 1 << 62
    if last < first:
        raise UserError(f"--steps {text}: there is no step from {first} to {last}")
    return range(first, last + 1)


def read_spans(run: Path, steps: range | None) -> list[RankSpans]:
    """The spans of every rank that has some; files that are missing or cut short give what they have."""
    folder = run / "ranks"
    found = []
    for path in sorted(folder.glob("*.spans.jsonl")):
        if (match := _SPANS.fullmatch(path.name)) is None:
            continue
        starts = [line for line in Tail(folder / f"{match[1]}.jsonl").read().lines if line.get("kind") == "rank"]
        lines = [line for line in Tail(path).read().lines if _is_whole(line)]
        found.append(spans_of(int(match[1]), starts[-1] if starts else {}, lines, steps))
    return found


def _is_whole(line: Line) -> bool:
    """Whether a line is one of spans; files may hold anything."""
    spans = line.get("spans")
    return (
        isinstance(line.get("step"), int)
        and _is_time(line.get("unix"))
        and isinstance(spans, list)
        and all(isinstance(span, list) and len(span) == 4 and all(map(_is_time, span[2:])) for span in spans)
    )


def _is_time(value: object) -> bool:
    found = number(value)
    # Seconds, of which microseconds can be told.
    return found is not None and abs(found) < 1e12


def _listed(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    shown = ", ".join(map(str, steps if len(steps) <= 8 else [*steps[:4], "...", *steps[-2:]]))
    return f"steps {shown}"
