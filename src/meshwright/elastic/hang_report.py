"""A hang in plain words: which rank, where, in which collective, who arrived and who did not, what to do."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.elastic.arrivals import Wait, Word, name_of
from meshwright.elastic.judge import Verdict, View
from meshwright.elastic.limits import Limits
from meshwright.elastic.processes import WORDS
from meshwright.elastic.rank_side import ANSWERING
from meshwright.elastic.stacks import Frame
from meshwright.pulse import NOBODY

FRAMES_SHOWN = 25
CALLS_SHOWN = 3
STARTERS = {
    ("process.py", "run"),
    ("process.py", "_bootstrap"),
    ("threading.py", "run"),
    ("threading.py", "_bootstrap"),
}


@dataclass(frozen=True)
class Place:
    """Whose ranks these are."""

    host: str
    generation: int
    run_dir: Path


def headline(verdict: Verdict, views: Mapping[int, View], words: Mapping[int, Word], place: Place) -> str:
    """The verdict in a sentence or two."""
    who = _who(verdict.guilty, views, place)
    plural = len(verdict.guilty) > 1
    waiting = _waiting(verdict, words)
    first = views.get(verdict.guilty[0]) if verdict.guilty else None
    if verdict.cause == "gone":
        return f"{who} {'are' if plural else 'is'} gone{_phase(first)}{waiting}"
    if verdict.cause == "stopped":
        return f"{who} {'are' if plural else 'is'} stopped by a signal{_phase(first)}{waiting}"
    if verdict.cause == "mismatch" and verdict.mismatch is not None:
        mismatch = verdict.mismatch
        kinds: dict[str, list[int]] = {}
        for rank, call in sorted(mismatch.calls.items()):
            kinds.setdefault(str(call), []).append(rank)
        said = ", ".join(f"{_ranks(ranks)} called {kind}" for kind, ranks in kinds.items())
        return f"ranks disagree in collective {mismatch.number} of {name_of(mismatch.group, words)}: {said}"
    if verdict.cause == "circle":
        return f"{who} wait for each other in different collectives{waiting}"
    if verdict.cause == "late":
        alive = "" if verdict.certain else ", and is slow rather than stuck"
        return f"{who} {'are' if plural else 'is'} stuck{_phase(first)}{_at(first)}{alive}{waiting}"
    if verdict.cause == "stalled":
        return f"all ranks have arrived{waiting}, and nothing moves: look at the network between them"
    return f"the ranks on {place.host} wait for {_ranks(verdict.unseen)}, which other machines have{waiting}"


def report(
    verdict: Verdict, views: Mapping[int, View], words: Mapping[int, Word], place: Place, limits: Limits, now: float
) -> str:
    """All that is known of a hang."""
    lines = [
        f"Hang: {headline(verdict, views, words, place)}.",
        "",
        f"Found {time.strftime('%Y-%m-%d %H:%M:%S')} on {place.host}, in generation {place.generation} of the ranks.",
        f"Hold up the others: {_who(verdict.guilty, views, place) if verdict.guilty else 'none of the ranks seen'}.",
    ]
    if verdict.unseen:
        text = f"Nothing has been heard from the machine of {_ranks(verdict.unseen)}: its own report may say more."
        lines.append(text)
    several = len({view.host for view in views.values()}) > 1
    lines += ["", "What each rank does", ""]
    for rank in sorted(views, key=lambda rank: (rank not in verdict.guilty, rank)):
        lines += _rank_lines(views[rank], verdict, words, limits, now, several)
    lines += ["", "What to do", "", *(f"  {line}" for line in _advice(verdict, views)), "", "Python stacks", ""]
    for rank in sorted(views, key=lambda rank: (rank not in verdict.guilty, rank)):
        lines += _stack_lines(views[rank])
    return "\n".join(lines) + "\n"


def write_report(text: str, place: Place, step: int) -> Path:
    """Put a report into the run folder; an earlier one is never replaced."""
    folder = place.run_dir / "hangs"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"generation-{place.generation}-step-{step}-{place.host}"
    number = 0
    while True:
        path = folder / (f"{name}-{number}.txt" if number else f"{name}.txt")
        try:
            with path.open("x") as file:
                file.write(text)
            return path
        except FileExistsError:
            number += 1


def _rank_lines(
    view: View, verdict: Verdict, words: Mapping[int, Word], limits: Limits, now: float, several: bool
) -> Sequence[str]:
    mark = "  <- holds up the others" if view.rank in verdict.guilty else ""
    lines = [f"  rank {view.rank} {f'on {view.host} ' if several else ''}(process {view.pid}){mark}"]
    if view.beat is None:
        lines.append(f"    has not begun yet, {view.age_s:.1f} s after it was started; limit {limits.first_s:g} s")
    else:
        lines.append(f"    in {view.beat.phase} of step {view.beat.step} for {view.age_s:.1f} s")
        lines.append(f"    limit: {limits.in_words(view.beat)}")
        if view.beat.waits_for != NOBODY:
            lines.append(f"    waits for what rank {view.beat.waits_for} sends to it or takes from it")
    state = WORDS.get(view.process.state, view.process.state)
    inside = view.kernel if not view.process.ended else ""
    since = f" for {view.halted_s:.1f} s" if view.halted_s else ""
    lines.append(f"    process{since} {state}{f', in the kernel in {inside}' if inside else ''}")
    if view.stacks.holds_gil and view.process.state == "R":
        lines.append("    its main thread runs and holds the GIL: no other thread of it can do anything")
    place = view.stacks.place
    if place is not None:
        lines.append(f"    at {place}")
    word = words.get(view.rank)
    mine = [wait for wait in verdict.waits if wait.rank == view.rank]
    for wait in mine:
        lines.append(f"    in {_call(wait, words)}")
        lines.append(f"      has not come: {_list(wait.missing)}{_not_seen(wait)}")
    if not mine and view.stacks.collective:
        lines.append(f"    waits for other ranks in torch.distributed's {view.stacks.collective}")
    if word is None:
        lines.append("    has told nothing of its collectives")
    elif not mine:
        age = "" if word.answered else f", as it told {max(0.0, now - word.time):.1f} s ago; it does not answer now"
        lines.append(f"    in no collective{age}")
        for group, standing in word.groups.items():
            last = standing.calls.get(standing.called)
            name = f"{last} (number {standing.called})" if last else f"number {standing.called}"
            lines.append(f"      last called in {name_of(group, words)}: {name}")
    return [*lines, ""]


def _stack_lines(view: View) -> list[str]:
    lines = [f"  rank {view.rank}" + (f", by {view.stacks.source}" if view.stacks.source else "")]
    if view.stacks.problem:
        lines.append(f"    none: {view.stacks.problem}")
    lines += _frames(view.stacks.main, "    ")
    for name, frames in view.stacks.others:
        if name != ANSWERING and frames:
            lines += [f"    thread {name}:", *_frames(frames, "      ")]
    return [*lines, ""]


def _frames(frames: Sequence[Frame], indent: str) -> list[str]:
    """The frames, without those below them that only started the process or the thread."""
    began = next((number for number, frame in enumerate(frames) if number and _starts(frame)), len(frames))
    return [f"{indent}{frame}" for frame in frames[:began][:FRAMES_SHOWN]]


def _starts(frame: Frame) -> bool:
    method = frame.function.split(".")[-1]
    return (Path(frame.file).name, method) in STARTERS or frame.file == "<frozen runpy>"


def _advice(verdict: Verdict, views: Mapping[int, View]) -> list[str]:
    restart = "The ranks are ended and started again from the newest checkpoint."
    if verdict.cause == "stopped":
        pids = " ".join(str(views[rank].pid) for rank in verdict.guilty)
        return [
            restart,
            f"Somebody sent SIGSTOP to process {pids}; a rank that goes on within elastic.hang_floor_s is let be.",
        ]
    if verdict.cause in ("mismatch", "circle"):
        return [
            "All ranks must call the same collectives of a group in the same order, with the same sizes.",
            "Look for a branch in the code that only some ranks take: at the lines above.",
            restart + " If it happens there again, the run ends: nothing has progressed.",
        ]
    if verdict.cause == "stalled":
        return [restart, "Check the network, and with NCCL the log that NCCL_DEBUG=INFO gives."]
    return [
        restart,
        "If the rank was only slow, raise elastic.hang_floor_s or elastic.hang_factor, and for what happens once",
        "(compiling, restoring) elastic.first_timeout_s.",
    ]


def _waiting(verdict: Verdict, words: Mapping[int, Word]) -> str:
    """A clause on who waits where; first the collective that most ranks are in."""
    by_call: dict[str, list[Wait]] = {}
    direct = [wait for wait in verdict.waits if set(wait.missing) & set(verdict.guilty)]
    for wait in direct if direct and verdict.cause != "circle" else verdict.waits:
        by_call.setdefault(_call(wait, words), []).append(wait)
    clauses = []
    for call, waits in sorted(by_call.items(), key=lambda item: -len(item[1]))[:CALLS_SHOWN]:
        missing = sorted({rank for wait in waits for rank in wait.missing})
        late = f", where {_ranks(missing)} did not arrive" if missing else ""
        clauses.append(f"{_ranks([wait.rank for wait in waits])} wait{'s' if len(waits) == 1 else ''} in {call}{late}")
    return "".join(f"; {clause}" for clause in clauses)


def _call(wait: Wait, words: Mapping[int, Word]) -> str:
    return f"{wait.operation} number {wait.number} of {name_of(wait.group, words)}"


def _not_seen(wait: Wait) -> str:
    return f"; not seen from here: {_list(wait.unknown)}" if wait.unknown else ""


def _phase(view: View | None) -> str:
    if view is None or view.beat is None:
        return " before its first step"
    return f" in {view.beat.phase} of step {view.beat.step}"


def _at(view: View | None) -> str:
    place = view.stacks.place if view is not None else None
    return f", at {place}" if place is not None else ""


def _who(ranks: Sequence[int], views: Mapping[int, View], place: Place) -> str:
    """Ranks, and the machines that they are on."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        host = views[rank].host if rank in views else ""
        by_host.setdefault(host or place.host, []).append(rank)
    return " and ".join(f"{_ranks(some)} on {host}" for host, some in by_host.items()) or f"nobody on {place.host}"


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + _list(ranks)


def _list(ranks: Sequence[int]) -> str:
    return " ".join(map(str, sorted(ranks))) or "nobody"
