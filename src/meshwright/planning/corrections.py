"""What runs on these machines showed of the planner's estimates, kept for the next plan. No torch.

Each run leaves what was estimated of its strategy and what was measured. A strategy that was measured under the same
settings gets its measured figures. Others get the median ratio of step times; of peaks of memory only what is above the
estimate, since a run of another shape is no reason to trust less memory. Ratios of estimates that are made otherwise by
now (other constants, another calibration) are left out.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from meshwright.cluster.cluster import Cluster
from meshwright.files import cache_folder, write_atomically
from meshwright.planning.memory import Memory

if TYPE_CHECKING:
    from meshwright.planning.question import Candidate, Question
    from meshwright.planning.scenario import Scenario

KEPT = 50
"""Runs of one kind of machines that are remembered."""
WIDEST = 4.0
"""Ratios beyond this, or below its inverse, are of something else than the estimate."""


@dataclass(frozen=True)
class Observation:
    """One run."""

    subject: str
    """What was trained: model, batches, number of chips."""
    strategy: str
    micro_batch: int
    basis: str
    """What the estimate was made with."""
    estimated_s: float
    step_s: float
    estimated_peak: float
    peak: float


@dataclass(frozen=True)
class Learned:
    """All that is known of a kind of machines."""

    observations: tuple[Observation, ...] = ()

    def exact(self, candidate: Candidate) -> Observation | None:
        """The latest run of this very candidate."""
        wanted = subject_of(candidate.scenario), str(candidate.strategy), candidate.micro_batch
        same = (one for one in reversed(self.observations) if (one.subject, one.strategy, one.micro_batch) == wanted)
        return next(same, None)

    def time_ratio(self, cluster: Cluster) -> float:
        """How much longer steps were than estimated."""
        return _middle(one.step_s / one.estimated_s for one in self._alike(cluster))

    def memory_ratio(self, cluster: Cluster) -> float:
        """How much higher peaks were than estimated; never below 1."""
        return max(1.0, _middle(one.peak / one.estimated_peak for one in self._alike(cluster)))

    def _alike(self, cluster: Cluster) -> list[Observation]:
        basis = basis_of(cluster) if self.observations else ""
        return [one for one in self.observations if one.basis == basis]


def _middle(ratios: Iterable[float]) -> float:
    usable = [ratio for ratio in ratios if 1 / WIDEST < ratio < WIDEST]
    return median(usable) if usable else 1.0


def corrected(candidate: Candidate, learned: Learned) -> Candidate:
    """A candidate with what was learned; it says where its figures come from."""
    if not learned.observations or candidate.step_s == float("inf"):
        return candidate
    if (seen := learned.exact(candidate)) is not None:
        step_s, peak, origin = seen.step_s, seen.peak, "measured"
    else:
        cluster = candidate.scenario.cluster
        time, memory = learned.time_ratio(cluster), learned.memory_ratio(cluster)
        if time == memory == 1.0:
            return candidate
        step_s, peak, origin = candidate.step_s * time, candidate.memory.peak * memory, "calibrated"
    parts = replace(candidate.parts, correction=step_s - candidate.step_s)
    return replace(candidate, parts=parts, memory=_with_peak(candidate.memory, peak), origin=origin)


def _with_peak(memory: Memory, peak: float) -> Memory:
    """Every stage's peak in the same proportion."""
    ratio = peak / memory.peak
    stages = tuple(replace(terms, correction=terms.total * (ratio - 1)) for terms in memory.stages)
    return replace(memory, stages=stages)


def observe(candidate: Candidate, step_s: float, peak: float) -> None:
    """Remember a run. `candidate` is the plain estimate of it, without corrections."""
    path = corrections_file()
    key = machines_key(candidate.scenario.cluster)
    table = _read(path)
    seen = Observation(
        subject_of(candidate.scenario),
        str(candidate.strategy),
        candidate.micro_batch,
        basis_of(candidate.scenario.cluster),
        candidate.step_s,
        step_s,
        candidate.memory.peak,
        peak,
    )
    what = seen.subject, seen.strategy, seen.micro_batch
    others = [one for one in table.get(key, ()) if (one.subject, one.strategy, one.micro_batch) != what]
    table[key] = (*others, seen)[-KEPT:]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = {name: [asdict(one) for one in held] for name, held in table.items()}
    write_atomically(path, json.dumps(text, indent=1) + "\n")


def learned_of(cluster: Cluster) -> Learned:
    """What is known of such machines."""
    return Learned(_read(corrections_file()).get(machines_key(cluster), ()))


def corrections_file() -> Path:
    """Where it is kept."""
    return cache_folder() / "corrections.json"


def _read(path: Path) -> dict[str, tuple[Observation, ...]]:
    """All of it; what cannot be read counts as nothing."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(key): tuple(
                Observation(
                    str(one["subject"]),
                    str(one["strategy"]),
                    int(one["micro_batch"]),
                    str(one["basis"]),
                    float(one["estimated_s"]),
                    float(one["step_s"]),
                    float(one["estimated_peak"]),
                    float(one["peak"]),
                )
                for one in held
            )
            for key, held in table.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def machines_key(cluster: Cluster) -> str:
    """A kind of machines: the chip, how many of them share a machine, their network; the host's own cores."""
    if cluster.groups:
        return str(cluster)
    if cluster.chip.key == "cpu":
        return f"cpu-{socket.gethostname()}"
    return f"{cluster.chip.key}-{cluster.node}-{cluster.domain}-{cluster.nic:g}"


def subject_of(scenario: Scenario | Question) -> str:
    """What is trained on how many chips, as a digest."""
    facts = [
        scenario.spec.model_dump(mode="json"),
        scenario.cluster.gpus,
        scenario.global_batch,
        scenario.sequence_length,
        scenario.precision,
        *([str(scenario.kept)] if str(scenario.kept) else []),
        *([] if scenario.compile else ["not compiled"]),
    ]
    return _digest(json.dumps(facts, sort_keys=True))


def basis_of(cluster: Cluster) -> str:
    """What estimates on these machines are made with."""
    constants = files("meshwright.planning").joinpath("constants.toml").read_text(encoding="utf-8")
    return _digest(f"{constants}{cluster.speeds}{cluster.lines or ''}{cluster.paths or ''}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
