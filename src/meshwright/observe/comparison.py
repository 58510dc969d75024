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
OUTSIDE = ("fragmentation", "communicators", "context", "correction")
"""Terms of a plan that are not in the hands of the model's tensors."""
BEYOND = ("activations and buffers beyond states", "libraries and reserve")
"""What a peak holds beside states. A peak may come before gradients do, whose room activations then have."""
TOGETHER = "activations, buffers and libraries together"


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
    # What a run has written at its end is the most of all its ranks and moments.
    written = number(measured.get("peak_gib"))
    peak = written * GIB if written is not None else peak
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
        memory=_kinds(stage, record, peak),
        fullest=record.rank if record is not None else None,
        capacity=_bytes(number(stage.get("capacity_gib"))),
        parts={name: seconds for name, seconds in parts.items() if seconds > 0},
        unknown=str(expected.get("unknown") or ("" if expected else "there is no plan.json that can be read")),
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
    return {"terms": memory.get("terms"), "bytes": memory.get("bytes")}


def _kinds(stage: Line, record: RankRecord | None, peak: float | None) -> list[Pair]:
    """Memory by kind: states when the update comes, then what the peak holds beyond them, as far as each side knows."""
    predicted, measured = _predicted(stage), _measured(record, peak)
    if not predicted and not measured:
        return []
    rest = [predicted[name] for name in BEYOND if name in predicted]
    if TOGETHER in measured and rest:
        predicted[TOGETHER] = sum(rest)
    kinds = [*STATES, *(name for name in (*BEYOND, TOGETHER) if name in predicted or name in measured)]
    return [Pair(name, "B", predicted.get(name), measured.get(name)) for name in kinds]


def _predicted(stage: Line) -> dict[str, float]:
    """Bytes by kind as the plan has them."""
    told, terms = numbers_of(stage.get("bytes")), numbers_of(stage.get("terms"))
    activations, outside = BEYOND
    if told:
        renamed = {"activations": activations, "outside": outside}
        return {renamed.get(name, name): size for name, size in told.items()}
    if not terms:
        return {}
    # Earlier plans have only the moment of their peak, at which gradients may not be there yet: then nobody knows.
    found = {name: terms[name] * GIB for name in STATES if terms.get(name)}
    found[outside] = sum(terms.get(name, 0.0) for name in OUTSIDE) * GIB
    found[activations] = sum(size for name, size in terms.items() if name not in (*STATES, *OUTSIDE)) * GIB
    return found


def _measured(record: RankRecord | None, peak: float | None) -> dict[str, float]:
    """Bytes by kind as the rank has measured them; the peak is that of its GPU or of its process."""
    held = numbers_of(record.start.get("memory_kinds")) if record is not None else {}
    if record is None or not held or peak is None:
        return held
    states = sum(held.get(name, 0.0) for name in STATES)
    used = [size for line in record.steps if (size := numbers_of(line.get("memory")).get("peak")) is not None]
    if not used:
        # Of a process on a CPU nobody can tell activations from what its libraries hold, which grows with the steps.
        return {**held, TOGETHER: max(0.0, peak - states)}
    activations, outside = BEYOND
    return {**held, activations: max(0.0, max(used) - states), outside: max(0.0, peak - max(*used, states))}


def _bytes(gib: float | None) -> float | None:
    return None if gib is None else gib * GIB


def _object(value: object) -> Line:
    return value if isinstance(value, dict) else {}
