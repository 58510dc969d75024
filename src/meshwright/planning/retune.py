"""Whether a run should change its strategy: what its ranks and links were seen to reach, and what would then be faster.

The planner's picture of the machines is set right by what was seen: links by how long a large sum took, each rank by
its speed beside the fastest, and all of it by the step. Then the same search answers for that picture. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright.cluster.calibration import Points, Speeds
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.groups import together
from meshwright.planning.corrections import Learned
from meshwright.planning.links import group_of
from meshwright.planning.measured import operations_of
from meshwright.planning.question import Candidate, Question, estimate
from meshwright.planning.search import search
from meshwright.strategy import Strategy

GAIN = 0.10
"""Share of a step that a change must be expected to save."""
UNEVEN = 1.25
"""How much slower than the fastest a rank must be to count as slow."""
NEAR = 0.25
"""Ranks whose slowness differs by less count as alike."""
SMALL, LARGE = 256, 1 << 20
"""Bytes of the sums that are timed."""


@dataclass(frozen=True)
class Seen:
    """What a run has measured of itself."""

    step_s: float
    compute_s: Sequence[float]
    """Of the same work on every rank."""
    small_s: float
    large_s: float
    """Of a sum over all ranks of SMALL and of LARGE bytes."""


@dataclass(frozen=True)
class Switch:
    """A change that pays."""

    strategy: Strategy
    micro_batch: int
    now_s: float
    expected_s: float
    why: str

    def __str__(self) -> str:
        return (
            f"{self.why}: {self.strategy} with micro-batch {self.micro_batch} is expected to take "
            f"{self.expected_s:.3g} s a step instead of {self.now_s:.3g} ({self.expected_s / self.now_s - 1:+.0%})"
        )


def better(
    question: Question, now: Strategy, micro_batch: int, seen: Seen, tried: Mapping[tuple[str, int], float]
) -> Switch | None:
    """The change that pays most, if one pays enough; of other strategies that were `tried` the measured times count."""
    slow_links, factors = link_factor(question, now, micro_batch, seen), _rank_factors(seen)
    cluster = as_seen(question, now, micro_batch, seen)
    known = {**tried, (str(now), micro_batch): seen.step_s}
    asked = replace(question, cluster=cluster, learned=Learned(), left_out=frozenset(known))
    current = estimate(asked, now, micro_batch)
    scale = seen.step_s / current.step_s
    words = []
    if slow_links > 1.5:
        words.append(f"links are {slow_links:.1f} times as slow as planned")
    if max(factors) > 1:
        words.append(f"rank {factors.index(max(factors))} is {max(factors):.1f} times as slow as the fastest")
    why = " and ".join(words) or "measured steps"
    fitting = [one for one in search(asked).ranked if one.fits and one.strategy.world == question.cluster.gpus]
    best = min(fitting, key=lambda one: one.step_s, default=None)
    options = [Switch(best.strategy, best.micro_batch, seen.step_s, best.step_s * scale, why)] if best else []
    for (text, size), step_s in tried.items():
        options.append(Switch(Strategy.parse(text, now.world), size, seen.step_s, step_s, "measured before"))
    chosen = min(options, key=lambda one: one.expected_s, default=None)
    return chosen if chosen is not None and chosen.expected_s <= seen.step_s * (1 - GAIN) else None


def as_seen(question: Question, now: Strategy, micro_batch: int, seen: Seen) -> Cluster:
    """The machines as the run has found them."""
    slow_links, factors = link_factor(question, now, micro_batch, seen), _rank_factors(seen)
    linked = slowed(question.cluster, 1.0, slow_links)
    plain = estimate(replace(question, cluster=_by_rank(linked, factors)), now, micro_batch)
    # What the step took beside its communication, over what was expected of it.
    talk = _communication(plain)
    own = (seen.step_s - talk) / max(plain.step_s - talk, 1e-9)
    return _by_rank(slowed(linked, min(4.0, max(0.25, own)), 1.0), factors)


def link_factor(question: Question, now: Strategy, micro_batch: int, seen: Seen) -> float:
    """How much longer the bytes of a sum over all ranks took than the planner thinks."""
    if now.world == 1:
        return 1.0
    links = operations_of(question.scenario(now, micro_batch), question.known).links
    group = group_of(question.cluster, now.world, 1)
    expected = links.all_reduce(group, LARGE) - links.all_reduce(group, SMALL)
    return min(1000.0, max(0.25, (seen.large_s - seen.small_s) / max(expected, 1e-9)))


def slowed(cluster: Cluster, compute: float, link: float) -> Cluster:
    """The same machines, that many times as slow."""
    chip = cluster.chip
    chip = replace(
        chip,
        tflops={dtype: peak / compute for dtype, peak in chip.tflops.items()},
        memory_bandwidth=chip.memory_bandwidth / compute,
    )
    across = cluster.gpus > cluster.domain
    return replace(
        cluster,
        chip=chip,
        link=cluster.link if across else cluster.link / link,
        nic=cluster.nic / link if across else cluster.nic,
        speeds=_slowed_speeds(cluster.speeds, compute, link) if cluster.speeds is not None else None,
        lines=tuple(line.slower(link) if (line.inside < line.ranks) == across else line for line in cluster.lines),
    )


def _slowed_speeds(speeds: Speeds, compute: float, link: float) -> Speeds:
    def slower(rows: Points) -> Points:
        least = rows[0][1]
        return tuple((row[0], least + (row[1] - least) * link) for row in rows)

    found = speeds.scaled(compute)
    tables = {kind: {size: slower(rows) for size, rows in of.items()} for kind, of in speeds.collectives.items()}
    return replace(found, collectives=tables)


def _rank_factors(seen: Seen) -> list[float]:
    """How many times as slow as the fastest each rank is; all alike unless one is clearly slow."""
    fastest = min(seen.compute_s)
    factors = [max(1.0, round(one / fastest / NEAR) * NEAR) for one in seen.compute_s]
    return factors if max(factors) >= UNEVEN else [1.0] * len(factors)


def _by_rank(cluster: Cluster, factors: Sequence[float]) -> Cluster:
    """Machines whose ranks are so slow, in the order of ranks."""
    if max(factors) == 1.0:
        return cluster
    return together([replace(slowed(cluster, factor, 1.0), gpus=1) for factor in factors], cluster.note)


def _communication(candidate: Candidate) -> float:
    parts = candidate.parts
    return parts.tp + parts.cp + parts.ep + parts.dp + parts.paths
