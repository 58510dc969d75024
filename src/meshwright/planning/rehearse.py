"""A rehearsal: a step of the trainer's own code on one rank of the whole world, counted, with what was planned beside.

Nothing is allocated and nothing is sent: the model is split on the meta device and computes on tensors without memory,
the process group is a fake (`verify/rehearsal.py`). Needs torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.errors import UserError
from meshwright.estimate.state import state_bytes
from meshwright.estimate.traffic import Work, step_traffic
from meshwright.estimate.units import Place
from meshwright.planning.memory import memory_of
from meshwright.planning.question import Candidate
from meshwright.planning.state_memory import GIB
from meshwright.strategy import Strategy


@dataclass(frozen=True)
class Collectives:
    """Collectives of one kind over one axis in one phase of a step."""

    phase: str
    """forward, backward, pipeline (between stages), update (norm, agreement, optimizer)."""
    kind: str
    axis: str
    calls: int
    bytes: int
    """Of the whole tensors."""


@dataclass(frozen=True)
class Rehearsal:
    """What a rank holds and sends: as the step did it, by the closed form, and as planned."""

    rank: int
    pipeline_rank: int
    counted_parameters: int
    counted_optimizer: int
    exact_parameters: int
    exact_optimizer: int
    planned_parameters: float
    planned_optimizer: float
    counted_peak: int
    """Bytes of all tensors that were alive at once in the step."""
    planned_peak: float
    """What the plan says that torch has allocated at the peak, if no layer is compiled."""
    micro_steps: int
    """Those that were run of a step's; collectives are those of the whole step."""
    collectives: tuple[Collectives, ...]
    exact_traffic: int | None
    """Bytes of all collectives by the closed form; None where it knows none (pp, cp, ep)."""

    @property
    def counted_traffic(self) -> int:
        """Bytes of all collectives, as counted."""
        return sum(one.bytes for one in self.collectives)

    def as_json(self) -> dict[str, Any]:
        """The stable form."""
        return {**asdict(self), "counted_traffic": self.counted_traffic}

    def __str__(self) -> str:
        closed = f"; closed form {_gib(self.exact_traffic)}" if self.exact_traffic is not None else ""
        lines = [
            f"rehearsal of rank {self.rank} (pipeline rank {self.pipeline_rank}), {self.micro_steps} micro-steps run:",
            f"  parameters  counted {_gib(self.counted_parameters)}, closed form {_gib(self.exact_parameters)}, "
            f"planned {_gib(self.planned_parameters)}",
            f"  optimizer   counted {_gib(self.counted_optimizer)}, closed form {_gib(self.exact_optimizer)}, "
            f"planned {_gib(self.planned_optimizer)}",
            f"  peak        counted {_gib(self.counted_peak)} of tensors alive at once, "
            f"planned {_gib(self.planned_peak)} allocated without compilation",
            f"  collectives of a step: {_gib(self.counted_traffic)} counted{closed}",
        ]
        lines += [
            f"    {one.phase:<9} {one.kind:<15} over {one.axis:<18} {one.calls:>8} x, {_gib(one.bytes)}"
            for one in self.collectives
        ]
        return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / GIB:.3f} GiB" if size >= 1 << 20 else f"{size:.0f} bytes"


def rehearse(candidate: Candidate, rank: int) -> Rehearsal:
    """Run a step of one rank of a candidate's world, and count."""
    strategy, scenario = candidate.strategy, candidate.scenario
    spec, micro_steps = scenario.spec, max(1, round(scenario.micro_steps))
    if not 0 <= rank < strategy.world:
        raise UserError(f"--rehearse={rank} is no rank of this world; use 0 to {strategy.world - 1}")
    if strategy.recompute.startswith("budget"):
        raise UserError(
            f"--rehearse runs layers as they are written, and recompute={strategy.recompute} is the compiler's choice "
            "of what they keep; rehearse recompute=selective, which comes near"
        )
    spec.check_buildable()
    from meshwright.torch_support import require_torch

    require_torch()
    from meshwright.config import RunConfig
    from meshwright.verify.rehearsal import rehearse_step

    kept = {"stored": scenario.kept.stored, "moments": scenario.kept.moments}
    config = RunConfig.model_validate({"train": {"precision": scenario.precision}, "precision": kept})
    found = rehearse_step(
        spec,
        strategy,
        rank,
        config,
        micro_batch=candidate.micro_batch,
        sequence_length=scenario.sequence_length,
        micro_steps=micro_steps,
    )
    place = Place.of(strategy, rank)
    exact = state_bytes(spec, strategy, place, kept=scenario.kept)
    # Compiled layers keep something else than what is counted here.
    terms = memory_of(replace(scenario, compile=False)).stages[place.pp]
    states = candidate.memory.stages[place.pp]
    work = Work(micro_steps, candidate.micro_batch, scenario.sequence_length, computed=scenario.element)
    return Rehearsal(
        rank=rank,
        pipeline_rank=place.pp,
        counted_parameters=found.parameters,
        counted_optimizer=found.optimizer,
        exact_parameters=exact.parameters,
        exact_optimizer=exact.optimizer,
        planned_parameters=states.parameters,
        planned_optimizer=states.optimizer,
        counted_peak=found.peak,
        planned_peak=terms.allocated,
        micro_steps=found.micro_steps,
        collectives=tuple(
            Collectives(*key, round(calls), round(size)) for key, (calls, size) in found.collectives.items()
        ),
        exact_traffic=_exact_traffic(spec, strategy, work, place.tp),
    )


def _exact_traffic(spec: Any, strategy: Strategy, work: Work, tp_rank: int) -> int | None:
    if strategy.pp * strategy.cp * strategy.ep > 1:
        return None
    return sum(step_traffic(spec, strategy, work, tp_rank).bytes.values())
