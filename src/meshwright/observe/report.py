"""What came of a run in a few lines: loss, skipped steps, speed, use of the chip, computing, what compressed gradients
sent, time lost, how far the plan was off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean

from meshwright.observe.comparison import Pair
from meshwright.observe.curves import sent_whole
from meshwright.observe.efficiency import GOAL
from meshwright.observe.goodput import WORDS, Goodput
from meshwright.observe.view import View

GIB = 2.0**30


def summary(view: View) -> Iterator[str]:
    """The lines; what is not known is said to be so."""
    yield "loss         " + _losses(view)
    if view.skipped:
        count = len(view.skipped)
        yield f"skipped      {count:,} step{'s' * (count > 1)} without an update, the last {view.skipped[-1]}"
    tokens = view.curves.mean("tokens_per_s")
    each = f" ({tokens / view.world:,.0f} per rank)" if tokens is not None and view.world > 1 else ""
    yield "tokens/s     " + (f"{tokens:,.0f}{each}{_over(view, 'tokens_per_s')}" if tokens is not None else "unknown")
    yield _chip(view)
    yield "computing    " + _computing(view)
    sent, share = _now(view, "sent_mib"), _now(view, "sent_share")
    if sent is not None and share is not None:
        own = f"{sent:.3g} MiB sent a step and rank, {share:.1%} of what they are uncompressed"
        yield f"gradients    {own}{_with_whole_steps(view)}"
    yield "time lost    " + (_lost(view.goodput) if view.goodput.wall_s > 0 else "unknown")
    found = view.comparison
    times = _beside(found.step_time, lambda value: f"{value:.3g} s")
    sizes = _beside(found.peak_memory, lambda value: f"{value / GIB:.2f} GiB")
    yield f"prediction   a step {times}; peak memory {sizes}"


def _losses(view: View) -> str:
    """The newest losses, each with its step where they are of different ones."""
    told = [("", *point) for point in view.curves.points("loss")[-1:]]
    told += [("held-out ", *point) for point in view.curves.points("eval_loss")[-1:]]
    if not told:
        return "no step yet"
    if len({step for _, step, _ in told}) == 1:
        return ", ".join(f"{word}{value:.4f}" for word, _, value in told) + f" at step {told[0][1]}"
    return ", ".join(f"{word}{value:.4f} at step {step}" for word, step, value in told)


def _now(view: View, name: str) -> float | None:
    """A metric of the newest step; a run that goes on may have left it behind."""
    return dict(view.curves.points(name)).get(view.curves.last_step())


def _with_whole_steps(view: View) -> str:
    """What was sent over all steps, where some of them came before compression began."""
    sent, shares = ([value for _, value in view.curves.points(name)] for name in ("sent_mib", "sent_share"))
    whole = sum(map(sent_whole, shares))
    if not 0 < whole < len(shares):
        return ""
    average = f"{fmean(sent):.3g} MiB and {fmean(shares):.1%} on average"
    return f"; {average} over {len(shares)} steps, of which {whole} sent all"


def _chip(view: View) -> str:
    mfu, tflops = view.curves.mean("mfu"), view.curves.mean("tflops_per_device")
    if mfu is not None:
        return f"MFU          {mfu:.1%}{_over(view, 'mfu')}"
    known = f"{tflops:.3g} per device{_over(view, 'tflops_per_device')}" if tflops is not None else "unknown"
    return f"TFLOP/s      {known}"


def _over(view: View, name: str) -> str:
    return f", mean of the last {view.curves.averaged(name)} steps"


def _computing(view: View) -> str:
    """How much of computing and exposed communication was computing, and where least."""
    found = view.efficiency
    if found is None:
        return "unknown: no step was profiled by observe.profile_every"
    known = [(one.share, rank.rank) for rank in view.ranks if (one := rank.efficiency) is not None]
    least, rank = min(known)
    lowest = f"; lowest rank {rank} with {least:.1%}" if len(known) > 1 else ""
    return f"{found.share:.1%} of computing and exposed communication, goal {GOAL:.0%}{lowest}"


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
