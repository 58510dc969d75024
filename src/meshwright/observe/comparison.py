"""What was expected of a run (plan.json) beside what it has shown: times, memory by kind, the pipeline's idle time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.observe.curves import Curves, number
from meshwright.observe.rank_files import RankRecord, numbers_of
from meshwright.observe.tail import Line

GIB = 2.0**30
IN_PASSES = ("compute", "recompute", "tp", "cp", "ep", "bubble")
"""Parts of a step's expected time that lie in forward and backward passes, of which the idle share is measured."""
STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class Pair:
    """A figure twice: as it was expected, and as it came. None is what nobody knows."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """How far the measured one lies beyond the expected one, as a share of it."""
        if self.predicted is None or self.measured is None or self.predicted <= 0:
            return None
        return self.measured / self.predicted - 1


@dataclass(frozen=True)
class Comparison:
    """Expected beside measured; `unknown` says why nothing was expected."""

    step_time: Pair
    peak_memory: Pair
    tokens: Pair
    bubble: Pair
    memory: list[Pair] = field(default_factory=list)
    """By kind, of the rank that holds most."""
    fullest: int | None = None
    """That rank; None where no rank has said."""
    capacity: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    """The expected seconds of a step, by part."""
    unknown: str = ""


def compare(
    plan: Line, curves: Curves, step_s: float | None, ranks: Sequence[tuple[Mapping[str, int], RankRecord]]
) -> Comparison:
    """From plan.json, the metrics, and what each rank with its coordinates has recorded."""
    expected, measured = _object(plan.get("expected")), _object(plan.get("measured"))
    memory = _object(expected.get("memory"))
    holds = [(held, coordinates, record) for coordinates, record in ranks if (held := _held(record)) is not None]
    fullest = max(holds, key=lambda one: one[0], default=None)
    peak, coordinates, record = fullest if fullest is not None else (None, {}, None)
    # What a run has written at its end is what its plan was compared with.
    written = number(measured.get("peak_gib"))
    peak = written * GIB if written is not None else peak
    told = number(measured.get("step_time_s"))
    step_s = told if told is not None else step_s
    stage = _stage(memory, coordinates.get("pp"))
    expected_peak = number(memory.get("peak_gib"))
    tokens = number(expected.get("tokens_per_s_per_gpu"))
    gpus = number(expected.get("gpus"))
    parts = numbers_of(expected.get("step_time"))
    waits = _idle_share(parts)
    waits = curves.mean("pipeline_idle_predicted") if waits is None else waits
    return Comparison(
        step_time=Pair("step time", "s", number(expected.get("step_time_s")), step_s),
        peak_memory=Pair("peak memory", "B", _bytes(expected_peak), peak),
        tokens=Pair("tokens/s", "", tokens * gpus if tokens and gpus else None, curves.mean("tokens_per_s")),
        bubble=Pair("pipeline bubble", "share", waits, curves.mean("pipeline_idle")),
        memory=_kinds(numbers_of(stage.get("terms")), record, peak),
        fullest=record.rank if record is not None else None,
        capacity=_bytes(number(stage.get("capacity_gib"))),
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        unknown=str(expected.get("unknown") or ("" if expected else "the run has no plan.json")),
    )


def _idle_share(parts: Mapping[str, float]) -> float | None:
    """The expected share of the passes in which a rank of a pipeline waits; None where it is expected to wait never."""
    whole = sum(parts.get(name, 0.0) for name in IN_PASSES)
    return parts["bubble"] / whole if parts.get("bubble", 0.0) > 0 else None


def _held(record: RankRecord) -> float | None:
    """The most bytes that a rank has said it holds: of its GPU, else of its process."""
    found = [numbers_of(line.get("memory")) for line in record.steps]
    for name in ("held", "peak", "reserved", "rss"):
        sizes = [one[name] for one in found if name in one]
        if sizes:
            return max(sizes)
    return None


def _stage(memory: Mapping[str, Any], stage: int | None) -> Line:
    """What was expected of the ranks of a pipeline stage; of the fullest one where none is given."""
    stages = memory.get("by_stage")
    wanted = stage if stage is not None else memory.get("fullest_stage")
    if isinstance(stages, list) and isinstance(wanted, int) and 0 <= wanted < len(stages):
        return _object(stages[wanted])
    return {"terms": memory.get("terms")}


def _kinds(terms: Mapping[str, float], record: RankRecord | None, peak: float | None) -> list[Pair]:
    """Memory by kind: what a model must hold, then what passes through, as far as each side knows."""
    held = numbers_of(record.start.get("memory_kinds")) if record is not None else {}
    if not terms and not held:
        return []
    pairs = [Pair(name, "B", _bytes(terms.get(name)), held.get(name)) for name in STATES]
    # Which bytes are activations and which are libraries cannot be seen from outside: one figure for all the rest.
    rest = sum(size for name, size in terms.items() if name not in STATES)
    others = peak - sum(held.get(name, 0.0) for name in STATES) if peak is not None and held else None
    left = None if others is None else max(0.0, others)
    return [*pairs, Pair("activations, buffers, libraries", "B", _bytes(rest) if terms else None, left)]


def _bytes(gib: float | None) -> float | None:
    return None if gib is None else gib * GIB


def _object(value: object) -> Line:
    return value if isinstance(value, dict) else {}
