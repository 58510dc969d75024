"""A rehearsal: the real model, split by the trainer's own code for one rank of the whole world, and its bytes counted.

Nothing is allocated and nothing is sent: parameters are on the meta device, the process group is a fake. Needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.errors import UserError
from meshwright.estimate.state import state_bytes
from meshwright.estimate.units import Place
from meshwright.planning.question import Candidate
from meshwright.planning.state_memory import GIB


@dataclass(frozen=True)
class Rehearsal:
    """What a rank holds: as its split model has it, by the closed form, and as planned."""

    rank: int
    pipeline_rank: int
    counted_parameters: int
    counted_optimizer: int
    exact_parameters: int
    exact_optimizer: int
    planned_parameters: float
    planned_optimizer: float
    modules: int
    """Parameters that the rank holds a part of."""

    def __str__(self) -> str:
        return (
            f"rehearsal of rank {self.rank} (pipeline rank {self.pipeline_rank}, {self.modules} parameters): counted "
            f"{self.counted_parameters / GIB:.3f} GiB of parameters and {self.counted_optimizer / GIB:.3f} GiB of "
            f"optimizer state; closed form {self.exact_parameters / GIB:.3f} and {self.exact_optimizer / GIB:.3f}; "
            f"planned {self.planned_parameters / GIB:.3f} and {self.planned_optimizer / GIB:.3f}"
        )


def rehearse(candidate: Candidate, rank: int) -> Rehearsal:
    """Build one rank of a candidate's world and count."""
    strategy, spec = candidate.strategy, candidate.scenario.spec
    if not 0 <= rank < strategy.world:
        raise UserError(f"--rehearse={rank} is no rank of this world; use 0 to {strategy.world - 1}")
    spec.check_buildable()
    from meshwright.torch_support import require_torch

    require_torch()
    from meshwright.verify.fake_world import state_of_rank

    state = state_of_rank(spec, strategy, rank)
    place = Place.of(strategy, rank)
    exact = state_bytes(spec, strategy, place)
    terms = candidate.memory.stages[place.pp]
    return Rehearsal(
        rank=rank,
        pipeline_rank=place.pp,
        counted_parameters=state.parameters,
        counted_optimizer=state.optimizer,
        exact_parameters=exact.parameters,
        exact_optimizer=exact.optimizer,
        planned_parameters=terms.parameters,
        planned_optimizer=terms.optimizer,
        modules=len(state.names),
    )
