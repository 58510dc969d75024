"""What came of a run in five lines: loss, tokens per second, use of the chip, time lost, how far the plan was off."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.observe.comparison import Pair
from meshwright.observe.goodput import WORDS, Goodput
from meshwright.observe.view import View

GIB = 2.0**30
RECENT = 50
"""Steps over which speeds are averaged."""


def summary(view: View) -> Iterator[str]:
    """The lines; what is not known is said to be so."""
    loss, held_out = view.curves.last("loss"), view.curves.last("eval_loss")
    evaluated = f", held-out {held_out:.4f}" if held_out is not None else ""
    yield "loss         " + (f"{loss:.4f}{evaluated} at step {view.step}" if loss is not None else "no step yet")
    tokens = _mean(view, "tokens_per_s")
    each = f" ({tokens / view.world:,.0f} per rank)" if tokens is not None and view.world > 1 else ""
    yield "tokens/s     " + (f"{tokens:,.0f}{each}" if tokens is not None else "unknown")
    yield _chip(view)
    yield "time lost    " + (_lost(view.goodput) if view.goodput.wall_s > 0 else "unknown")
    found = view.comparison
    times = _beside(found.step_time, lambda value: f"{value:.3g} s")
    sizes = _beside(found.peak_memory, lambda value: f"{value / GIB:.2f} GiB")
    yield f"prediction   a step {times}; peak memory {sizes}"


def _chip(view: View) -> str:
    mfu, tflops = _mean(view, "mfu"), _mean(view, "tflops_per_device")
    if mfu is not None:
        return f"MFU          {mfu:.1%}"
    return "TFLOP/s      " + (f"{tflops:.3g} per device" if tflops is not None else "unknown")


def _mean(view: View, name: str) -> float | None:
    recent = view.curves.recent(name, RECENT)
    return sum(recent) / len(recent) if recent else None


def _lost(found: Goodput) -> str:
    lost = found.wall_s - found.parts["progress"]
    named = ", ".join(
        f"{WORDS.get(name, name)} {share * found.wall_s:.1f} s" for name, share in found.losses() if share >= 0.005
    )
    return f"{lost:.1f} s of {found.wall_s:.1f} s ({1 - found.share:.1%})" + (f": {named}" if named else "")


def _beside(pair: Pair, text: Callable[[float], str]) -> str:
    if pair.measured is None:
        return "unknown"
    if pair.predicted is None or pair.error is None:
        return f"{text(pair.measured)}, nothing predicted"
    return f"{text(pair.measured)}, predicted {text(pair.predicted)} ({pair.error:+.0%})"
