"""What change would make a choice fit, and what it costs: "recompute 6 of 80 layers: +3% time, -9.1 GiB"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshwright.errors import ConfigError
from meshwright.planning.memory import does_fit
from meshwright.planning.question import Candidate, Question, estimate
from meshwright.planning.scenario import Layout
from meshwright.planning.space import allowed
from meshwright.planning.state_memory import GIB
from meshwright.schedules import splits_backward
from meshwright.strategy import Strategy


@dataclass(frozen=True)
class Change:
    """One change to a strategy, and what comes of it."""

    what: str
    candidate: Candidate
    slower: float
    """Share of the step that it adds; below zero it saves time."""
    saved_gib: float

    def __str__(self) -> str:
        return f"{self.what}: {self.slower:+.1%} time, {-self.saved_gib:+.1f} GiB"


def cheapest_change(question: Question, candidate: Candidate) -> Change | None:
    """The change that makes a failing choice fit at the least cost in time; where none does alone, two of them."""
    single = list(changes(question, candidate))
    fitting = [change for change in single if change.candidate.fits]
    if not fitting:
        fitting = [
            replace(second, what=f"{first.what} and {second.what}", slower=_slower(second, candidate),
                    saved_gib=_saved(second, candidate))
            for first in single
            for second in changes(question, first.candidate)
            if second.candidate.fits
        ]  # fmt: skip
    return min(fitting, key=lambda change: change.slower, default=None)


def _slower(change: Change, candidate: Candidate) -> float:
    return change.candidate.step_s / candidate.step_s - 1


def _saved(change: Change, candidate: Candidate) -> float:
    return (candidate.memory.peak - change.candidate.memory.peak) / GIB


def changes(question: Question, candidate: Candidate) -> Iterator[Change]:
    """All single changes that might help and that the constraints allow."""
    for what, strategy, micro_batch in _tried(question, candidate):
        if not (allowed(question, Layout.of(strategy)) and question.allows(micro_batch=micro_batch)):
            continue
        try:
            strategy.check(question.spec, question.cluster.gpus, question.sequence_length)
        except ConfigError:
            continue
        found = estimate(question, strategy, micro_batch)
        saved = (candidate.memory.peak - found.memory.peak) / GIB
        yield Change(what, found, found.step_s / candidate.step_s - 1, saved)


def _tried(question: Question, candidate: Candidate) -> Iterator[tuple[str, Strategy, int]]:
    strategy, micro_batch = candidate.strategy, candidate.micro_batch
    layers = question.spec.num_hidden_layers
    if strategy.recompute == "none":
        yield (
            "recompute norms and activations (recompute=selective)",
            replace(strategy, recompute="selective"),
            micro_batch,
        )
        count = _fewest_layers(question, candidate)
        if count is not None:
            word = "full" if count == layers else f"first:{count}"
            yield f"recompute {count} of {layers} layers", replace(strategy, recompute=word), micro_batch
    elif strategy.recompute != "full":
        yield "recompute all layers", replace(strategy, recompute="full"), micro_batch
    many = strategy.dp * strategy.cp > 1
    for zero in range(strategy.zero + 1, 4):
        if many:
            sharded = replace(strategy, zero=zero, shard=strategy.dp, replicate=1, compress="none")
            whole = "" if strategy.compress == "none" else f" and drop compress={strategy.compress}"
            yield (
                f"shard {('', 'optimizer state', 'gradients too', 'parameters too')[zero]} (zero={zero}){whole}",
                sharded,
                micro_batch,
            )
    if micro_batch > 1:
        for size in sorted({1, micro_batch // 2}, reverse=True):
            yield f"micro-batch {size} instead of {micro_batch}", strategy, size
    for axis in ("tp", "pp", "cp"):
        doubled = _doubled(strategy, axis)
        if doubled is not None:
            yield f"{axis}={getattr(doubled, axis)} instead of {getattr(strategy, axis)}", doubled, micro_batch
    if strategy.host_states == "none":
        yield (
            "keep optimizer state in host memory (offload=optimizer)",
            replace(strategy, offload="optimizer+activations" if strategy.host_activations else "optimizer"),
            micro_batch,
        )
    if not strategy.host_activations and not splits_backward(strategy.schedule):
        offload = "activations" if strategy.offload == "none" else f"{strategy.offload}+activations"
        yield (
            f"keep activations in host memory (offload={offload})",
            replace(strategy, offload=offload),
            micro_batch,
        )


def _fewest_layers(question: Question, candidate: Candidate) -> int | None:
    """How many of the first layers must be recomputed; None where all of them are not enough."""

    def fits(count: int) -> bool:
        layers = question.spec.num_hidden_layers
        word = "full" if count == layers else f"first:{count}"
        scenario = question.scenario(replace(candidate.strategy, recompute=word), candidate.micro_batch)
        return does_fit(scenario)

    low, high = 0, question.spec.num_hidden_layers
    if not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _doubled(strategy: Strategy, axis: str) -> Strategy | None:
    """Twice the degree, from half the data-parallel ranks."""
    values: dict[str, object] = {axis: 2 * getattr(strategy, axis)}
    if strategy.shard % 2 == 0:
        values["shard"] = strategy.shard // 2
    elif strategy.replicate % 2 == 0:
        values["replicate"] = strategy.replicate // 2
    else:
        return None
    if axis == "tp":
        values["sp"] = True
    if strategy.layers not in ("even", "balanced"):
        values["layers"] = "even"
    try:
        return replace(strategy, **values)  # type: ignore[arg-type]
    except ConfigError:
        return None
