"""A plan as one HTML page that needs nothing else: table, bars, the schedule as a drawing, the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshwright.planning.explain import PARTS, TERMS, explain
from meshwright.planning.made import Plan
from meshwright.planning.origin import origin
from meshwright.planning.placement_words import placement_text
from meshwright.planning.question import Candidate
from meshwright.planning.show import peaks, schedule_spans
from meshwright.planning.state_memory import GIB

COLOURS = ("#4878d0", "#6acc64", "#d65f5f", "#956cb4", "#8c613c", "#dc7ec0", "#797979", "#d5bb67", "#82c6e2", "#ee854a")
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1b1b1b;background:#fff}
table{border-collapse:collapse}td,th{padding:.25rem .8rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left;font-family:ui-monospace,monospace}
.fits{color:#18794e}.tight{color:#ad5700}.no{color:#c62828}svg{max-width:100%;height:auto}pre{background:#f5f5f5;padding:.8rem}
@media(prefers-color-scheme:dark){body{background:#161616;color:#e8e8e8}td,th{border-color:#444}pre{background:#242424}}
"""


def page(plan: Plan, said: Sequence[str] = ()) -> str:
    """The page; with answers to other questions, if there were some."""
    question = plan.question
    title = f"{plan.model} on {question.cluster}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>Sequences of {question.sequence_length}, global batch {question.global_batch}, {question.precision}"
        f"{f', {question.kept}' if str(question.kept) else ''}; "
        f"{escape(origin(question))}.</p>",
        _table(plan),
        _tried(plan),
        *(f"<p>{escape(line)}.</p>" for line in said),
    ]
    if plan.best is not None:
        best = plan.best
        terms = best.memory.stages[best.memory.fullest]
        parts += [
            "<h2>Memory of the fullest rank</h2>",
            _bar({TERMS[name]: getattr(terms, name) / GIB for name in TERMS}, best.memory.capacity / GIB, "GiB"),
            f"<p>{escape(peaks(best))}.</p>",
            "<h2>Memory by pipeline rank</h2>",
            *(
                _bar(
                    {TERMS[name]: getattr(one, name) / GIB for name in TERMS},
                    best.memory.room(rank) / GIB,
                    "GiB",
                    False,
                )
                for rank, one in enumerate(best.memory.stages)
            ),
            "<h2>A step</h2>",
            _bar({PARTS[name]: getattr(best.parts, name) for name in PARTS}, best.step_s, "s"),
        ]
        drawn = _schedule(best)
        if drawn:
            parts += [f"<h2>Pipeline schedule {escape(best.strategy.schedule)}</h2>", drawn]
        parts += ["<h2>Placement</h2>", f"<pre>{escape(placement_text(best))}</pre>"]
    parts += ["<h2>Why</h2>", "<ul>", *(f"<li>{escape(line)}</li>" for line in explain(plan)), "</ul>"]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _table(plan: Plan) -> str:
    rows = []
    for one in plan.candidates or (plan.shown,):
        finite = one.step_s < float("inf")
        kind = {"fits": "fits", "tight": "tight"}.get(one.memory.verdict, "no")
        cells = [
            escape(str(one.strategy) + (f" on {one.scenario.cluster}" if plan.question.cluster.groups else "")),
            str(one.micro_batch),
            f'<span class="{kind}">{one.memory.verdict}</span>',
            f"{one.memory.peak / GIB:.1f}",
            f"{one.step_s:.3f}" if finite else "",
            f"{one.tokens_per_s_per_gpu:,.0f}" if finite else "",
            f"{one.mfu:.1%}" if finite else "",
        ]
        if plan.tokens is not None:
            days, cost = (plan.days(one), plan.cost(one)) if finite else (None, None)
            cells += [f"{days:,.1f}" if days is not None else "", f"{cost:,.0f}" if cost is not None else ""]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    names = ["strategy", "micro-batch", "verdict", "GiB", "s/step", "tokens/s/GPU", "MFU"]
    names += ["days", "cost"] if plan.tokens is not None else []
    return "<table><tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>" + "".join(rows) + "</table>"


def _tried(plan: Plan) -> str:
    """What was predicted and measured of candidates that ran here."""
    if not plan.tried:
        return ""
    rows = []
    for one in plan.tried:
        cells = [
            escape(str(one.candidate.strategy)),
            str(one.candidate.micro_batch),
            f"{one.candidate.step_s:.3f}",
            "" if one.step_s is None else f"{one.step_s:.3f}",
            f"{one.candidate.memory.peak / GIB:.2f}",
            "" if one.peak is None else f"{one.peak / GIB:.2f}",
            escape(one.failure or ""),
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    names = ("strategy", "micro-batch", "s/step predicted", "measured", "GiB predicted", "measured", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<h2>Tried here</h2><table><tr>{head}</tr>{''.join(rows)}</table>"


def _bar(sizes: dict[str, float], whole: float, unit: str, legend: bool = True) -> str:
    width, place, drawn, words = 1000.0, 0.0, [], []
    shown = [(name, size) for name, size in sizes.items() if size > whole * 0.002]
    for index, (name, size) in enumerate(shown):
        colour, wide = COLOURS[index % len(COLOURS)], size / whole * width
        label = escape(f"{name}: {size:.3g} {unit}")
        drawn.append(
            f'<rect x="{place:.1f}" width="{wide:.1f}" height="26" fill="{colour}"><title>{label}</title></rect>'
        )
        words.append(f'<span style="color:{colour}">&#9632;</span> {label}')
        place += wide
    frame = f'<rect width="{width:.0f}" height="26" fill="none" stroke="#999"/>'
    text = "<p>" + " &nbsp; ".join(words) + "</p>" if legend else ""
    return f'<svg viewBox="0 0 1000 28" width="1000" role="img">{"".join(drawn)}{frame}</svg>{text}'


def _schedule(candidate: Candidate) -> str:
    spans = schedule_spans(candidate)
    if spans is None:
        return ""
    end = max(stop for row in spans for _, _, stop in row)
    colours = {"F": "#4878d0", "B": "#6acc64", "I": "#6acc64", "W": "#d5bb67"}
    drawn = []
    for rank, row in enumerate(spans):
        for label, start, stop in row:
            place, wide, colour = start / end * 1000, (stop - start) / end * 1000, colours[label[0]]
            drawn.append(
                f'<rect x="{place:.2f}" y="{rank * 16}" height="14" width="{wide:.2f}" fill="{colour}" stroke="#fff" '
                f'stroke-width=".4"><title>rank {rank} {label}</title></rect>'
            )
    return f'<svg viewBox="0 0 1000 {len(spans) * 16}" width="1000" role="img">{"".join(drawn)}</svg>'
