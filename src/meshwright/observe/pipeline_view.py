"""The schedule of a pipeline as it should run and as it ran: the passes of one pipeline's ranks, with their gaps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from meshwright.errors import ConfigError
from meshwright.observe.curves import number
from meshwright.observe.tail import Line
from meshwright.schedules import Action, make_program, simulate, stages_per_rank
from meshwright.strategy import Strategy

MOST_DRAWN = 48
"""Micro-batches of a timeline; of longer steps only the first are shown."""
_PASS = re.compile(r"([FBIW]) stage (\d{1,4}) micro-batch (\d{1,6})")

Pass = tuple[str, int, int, float, float]
"""Kind (F, B, I, W), stage, micro-batch, start and end in seconds."""
Row = list[Pass]
Costs = dict[tuple[int, str], float]


@dataclass(frozen=True)
class PipelineView:
    """Two timelines of the same ranks."""

    schedule: str
    micro_batches: int
    drawn: int
    """How many micro-batches the timelines show."""
    predicted: list[Row]
    predicted_idle: float
    """The share of the time in which ranks compute nothing, the mean over them."""
    basis: str
    """What the length of the predicted passes was taken from."""
    measured: list[Row] | None = None
    measured_idle: float | None = None
    step: int | None = None
    """The profiled step that was measured."""


def pipeline_view(strategy: Strategy, plan: Line, spans: Mapping[int, Line]) -> PipelineView | None:
    """From the strategy, plan.json and the spans of a profiled step by pipeline rank; None where nothing is known."""
    measured = _measured(strategy.pp, spans)
    micro = 1 + max((one[2] for row in measured or [] for one in row), default=-1) or _micro_batches(strategy, plan)
    if not micro:
        return None
    if measured is not None:
        costs, basis = _means(measured), "the mean of the measured passes"
    else:
        costs, basis = {}, "the planned compute time, backward passes twice as long as forward ones"
    unit = _unit(strategy, plan, micro)

    def cost(action: Action) -> float:
        usual = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}[action.kind] * unit
        return costs.get((action.stage, action.kind), usual)

    drawn = min(micro, max(MOST_DRAWN, strategy.pp))
    whole = simulate(make_program(strategy.schedule, strategy.pp, micro), cost)
    shown = whole if drawn == micro else simulate(make_program(strategy.schedule, strategy.pp, drawn), cost)
    rows: list[Row] = [[(a.kind, a.stage, a.micro, start, end) for a, start, end in row] for row in shown.spans]
    step = number(next(iter(spans.values())).get("step")) if measured is not None else None
    return PipelineView(
        schedule=strategy.schedule,
        micro_batches=micro,
        drawn=drawn,
        predicted=rows,
        predicted_idle=fmean(whole.idle_share(rank) for rank in range(strategy.pp)),
        basis=basis,
        measured=[[one for one in row if one[2] < drawn] for row in measured] if measured is not None else None,
        measured_idle=_idle(measured) if measured is not None else None,
        step=None if step is None else int(step),
    )


def _micro_batches(strategy: Strategy, plan: Line) -> int:
    """How many micro-batches a step has, by the plan; 0 where it does not say."""
    question, micro_batch = plan.get("question"), plan.get("micro_batch")
    batches = question.get("batches") if isinstance(question, dict) else None
    if not isinstance(batches, list) or not batches or not (micro_batch is None or isinstance(micro_batch, int)):
        return 0
    try:
        return min(4096, strategy.micro_steps(max(int(one) for one in batches), micro_batch))
    except (ConfigError, TypeError, ValueError):
        return 0


def _unit(strategy: Strategy, plan: Line, micro: int) -> float:
    """Seconds of a forward pass of one stage, if all passes of a step take the planned time; 1 without a plan."""
    expected = plan.get("expected")
    times = expected.get("step_time") if isinstance(expected, dict) else None
    compute = number(times.get("compute")) if isinstance(times, dict) else None
    stages = stages_per_rank(strategy.schedule)
    return compute / (3 * micro * stages) if compute else 1.0


def _measured(ranks: int, spans: Mapping[int, Line]) -> list[Row] | None:
    """The passes of every rank on one clock that begins with the first; None unless all ranks have some."""
    rows = [_row(spans[rank]) if rank in spans else [] for rank in range(ranks)]
    if not all(rows):
        return None
    begin = min(one[3] for row in rows for one in row)
    return [
        [(kind, stage, micro, start - begin, end - begin) for kind, stage, micro, start, end in row] for row in rows
    ]


def _row(line: Line) -> Row:
    offset, held = number(line.get("unix")) or 0.0, line.get("spans")
    found: Row = []
    for span in held if isinstance(held, list) else []:
        if not isinstance(span, list) or len(span) != 4 or not (match := _PASS.fullmatch(str(span[0]))):
            continue
        start, end = number(span[2]), number(span[3])
        if start is not None and end is not None and end >= start:
            found.append((match[1], int(match[2]), int(match[3]), start + offset, end + offset))
    return sorted(found, key=lambda one: one[3])


def _means(rows: list[Row]) -> Costs:
    spent: dict[tuple[int, str], list[float]] = {}
    for kind, stage, _, start, end in (one for row in rows for one in row):
        spent.setdefault((stage, kind), []).append(end - start)
    return {key: fmean(seconds) for key, seconds in spent.items()}


def _idle(rows: list[Row]) -> float:
    length = max(one[4] for row in rows for one in row)
    busy = sum(end - start for row in rows for *_, start, end in row)
    return 1 - busy / (length * len(rows)) if length > 0 else 0.0
