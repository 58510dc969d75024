"""A plan on the terminal: ranked table, bars of memory and time, the schedule as a picture, the mesh on machines."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from meshwright.planning.answer_json import peaks_gib
from meshwright.planning.explain import PARTS, TERMS, explain
from meshwright.planning.group_times import timer_on
from meshwright.planning.made import Plan
from meshwright.planning.origin import origin
from meshwright.planning.placement_words import placement_text
from meshwright.planning.question import Candidate
from meshwright.planning.state_memory import GIB
from meshwright.schedules import make_program, simulate

COLOURS = ("blue", "cyan", "magenta", "green", "yellow", "bright_blue", "red", "bright_cyan", "bright_magenta", "white")
BAR = 60
PICTURE = 100
MOST_DRAWN = 16
"""Micro-batches and ranks of a schedule that are drawn."""


def show(plan: Plan, console: Console) -> None:
    """All of it."""
    question = plan.question
    console.print(
        f"[bold]{escape(plan.model)}[/] on [bold]{escape(str(question.cluster))}[/], "
        f"sequences of {question.sequence_length}, global batch {question.global_batch}, {question.precision}"
        f"{f', {question.kept}' if str(question.kept) else ''} ({escape(origin(question))})\n"
    )
    console.print(table_of(plan))
    if plan.tried:
        console.print()
        console.print(tried_table(plan))
    if plan.best is not None:
        console.print()
        console.print(Group(*bars(plan.best)))
        console.print(f"\n{peaks(plan.best)}", highlight=False, soft_wrap=True)
        drawn = schedule_picture(plan.best)
        if drawn is not None:
            console.print()
            console.print(drawn)
        console.print()
        console.print(placement_text(plan.best), highlight=False, markup=False, soft_wrap=True)
    console.print()
    for line in explain(plan):
        console.print(f"  - {line}", highlight=False, markup=False, soft_wrap=True)


def table_of(plan: Plan) -> Table:
    """Candidates, best first."""
    table = Table(box=None, pad_edge=False, caption_justify="left")
    if len(plan.candidates) > 1:
        table.caption = "in the order of time, where every feature must earn one percent of it"
    names = ["strategy", "micro-batch", "verdict", "GiB", "s/step", "tokens/s/GPU", "MFU"]
    if plan.tokens is not None:
        names += ["days", "cost"]
    if plan.question.cluster.groups:
        names.insert(1, "GPUs")
    for name in names:
        table.add_column(
            name, justify="left" if name in ("strategy", "verdict") else "right", no_wrap=name == "strategy"
        )
    for candidate in plan.candidates or (plan.shown,):
        finite = candidate.step_s < float("inf")
        verdict = candidate.memory.verdict
        colour = {"fits": "green", "tight": "yellow"}.get(verdict, "red")
        row = [
            str(candidate.strategy),
            str(candidate.micro_batch),
            f"[{colour}]{verdict}[/]",
            f"{candidate.memory.peak / GIB:.1f}",
            f"{candidate.step_s:.3f}" if finite else "",
            f"{candidate.tokens_per_s_per_gpu:,.0f}" if finite else "",
            f"{candidate.mfu:.1%}" if finite else "",
        ]
        if plan.question.cluster.groups:
            row.insert(1, str(candidate.scenario.cluster.gpus))
        if plan.tokens is not None:
            days, cost = plan.days(candidate) if finite else None, plan.cost(candidate) if finite else None
            row += [f"{days:,.1f}" if days is not None else "", f"{cost:,.0f}" if cost is not None else ""]
        table.add_row(*row)
    return table


def tried_table(plan: Plan) -> Table:
    """What was predicted and what was measured of the candidates that ran here."""
    table = Table(box=None, pad_edge=False, title="tried here", title_justify="left")
    for name in ("strategy", "micro-batch", "s/step predicted", "measured", "GiB predicted", "measured", ""):
        table.add_column(name, justify="left" if name in ("strategy", "") else "right", no_wrap=name == "strategy")
    for one in plan.tried:
        candidate = one.candidate
        row = [str(candidate.strategy), str(candidate.micro_batch), f"{candidate.step_s:.3f}"]
        row.append("" if one.step_s is None else f"{one.step_s:.3f}")
        row.append(f"{candidate.memory.peak / GIB:.2f}")
        row.append("" if one.peak is None else f"{one.peak / GIB:.2f}")
        chosen = "measured best" if plan.best is not None and candidate.same_choice(plan.best) else ""
        table.add_row(*row, escape(one.failure) if one.failure else chosen)
    return table


def bars(candidate: Candidate) -> list[RenderableType]:
    """Memory of the fullest rank and time of a step."""
    memory = candidate.memory
    terms = memory.stages[memory.fullest]
    held = {TERMS[name]: getattr(terms, name) / GIB for name in TERMS}
    spent = {PARTS[name]: getattr(candidate.parts, name) for name in PARTS}
    title = f"memory, {memory.peak / GIB:.1f} of {memory.capacity / GIB:.1f} GiB"
    return [
        *_bar(title, held, memory.capacity / GIB, "GiB"),
        Text(),
        *_bar(f"step, {candidate.step_s:.3f} s", spent, candidate.step_s, "s"),
    ]


def peaks(candidate: Candidate) -> str:
    """What the fullest rank holds at most, at four times."""
    found = ", ".join(f"{name.replace('_', ' and ' if name == 'forward_backward' else ' ')} {size:.1f}"
                      for name, size in peaks_gib(candidate).items())  # fmt: skip
    return f"peaks in GiB of the fullest rank: {found}"


def _bar(title: str, sizes: dict[str, float], whole: float, unit: str) -> list[RenderableType]:
    bar = Text(f"{title:<28} ")
    legend = Text(" " * 29)
    shown = [(name, size) for name, size in sizes.items() if size > whole * 0.004]
    for index, (name, size) in enumerate(shown):
        colour = COLOURS[index % len(COLOURS)]
        bar.append("█" * max(1, round(size / whole * BAR)), style=colour)
        legend.append(f"{name} {size:.3g} {unit}  ", style=colour)
    return [bar, legend]


def schedule_picture(candidate: Candidate) -> Text | None:
    """The pipeline's passes in time, of a few micro-batches; nothing without a pipeline."""
    spans = schedule_spans(candidate)
    if spans is None:
        return None
    end = max(stop for row in spans for _, _, stop in row)
    picture = Text(f"schedule {candidate.strategy.schedule} (F forward, B backward, W weights), first micro-batches\n")
    for rank, row in enumerate(spans[:MOST_DRAWN]):
        cells = [" "] * PICTURE
        for label, start, stop in row:
            first, last = int(start / end * PICTURE), max(int(stop / end * PICTURE), int(start / end * PICTURE) + 1)
            for place in range(first, min(last, PICTURE)):
                cells[place] = label[0]
        picture.append(f"  rank {rank:<3}")
        for cell in cells:
            picture.append(cell, style={"F": "blue", "B": "green", "I": "green", "W": "yellow"}.get(cell, ""))
        picture.append("\n")
    return picture


def schedule_spans(candidate: Candidate) -> list[list[tuple[str, float, float]]] | None:
    """For each pipeline rank its passes with start and end, of as many micro-batches as can be drawn."""
    strategy = candidate.strategy
    if strategy.pp == 1:
        return None
    scenario = candidate.scenario
    micro = min(max(1, round(scenario.micro_steps)), max(strategy.pp, MOST_DRAWN))
    from meshwright.planning.software import constants

    times = timer_on(scenario, constants()).stage_times()
    program = make_program(strategy.schedule, strategy.pp, micro)
    timeline = simulate(program, lambda action: times.of(action.kind, action.stage), times.transfers)
    return [[(f"{action.kind}{action.micro}", start, stop) for action, start, stop in row] for row in timeline.spans]
