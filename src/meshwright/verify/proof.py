"""A proof for users: a model under a strategy and the same model on one device, side by side on local processes.

Losses and gradient norms are compared after every step, weights at the end. Where they differ, the step in which it
begins is run again with everything recorded, in float64, to name what departs first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.errors import UserError
from meshwright.launch.local import RankError
from meshwright.models.count import count_parameters
from meshwright.models.spec import ModelSpec
from meshwright.strategy import Strategy
from meshwright.verify.explain import explain
from meshwright.verify.first_difference import Difference, first_difference, unlike
from meshwright.verify.parity import ROUNDED, TOLERANCES
from meshwright.verify.pool import RankPool
from meshwright.verify.record import StepTrace
from meshwright.verify.shrink import Small, micro_steps_of, samples_of, tokens_of
from meshwright.verify.trial import Record, Refusal, Trial, run_trial, survey

WORST = 5
"""How many parameters are told of."""
_COMPARED = {
    "float64": "losses, gradient norms and weights",
    "float32": "losses and gradient norms",
    "tf32": "losses and gradient norms",
}
"""What is compared; in other precisions losses alone."""
_LAST_LINES = 12

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Compared:
    """One number on both sides; not a number where the step overflowed."""

    strategy: float
    one_device: float
    difference: float
    """Relative."""


@dataclass(frozen=True)
class Proof:
    """What came out, and on what."""

    equal: bool
    precision: str
    bound: float
    ranks: int
    losses: list[Compared]
    grad_norms: list[Compared]
    parameters: list[tuple[str, float]]
    """The worst ones: name, and largest difference relative to max(1, largest of the tensor)."""
    parameter_count: int
    first_difference: Difference | None = None
    only_rounding: bool = False
    """Whether both sides differ in this precision and agree in float64."""
    narrowing: str = ""
    """Where the model itself rounds to fewer digits than the precision has."""
    failure: str = ""
    """How the strategy failed where one device worked."""
    seconds: float = 0.0

    def verdict(self) -> str:
        """The result in a sentence or two."""
        if self.equal:
            what = _COMPARED.get(self.precision, "losses")
            agree = f"{what} agree to {self.bound:g} in {self.precision}"
            why = f" ({self.narrowing}, by itself)" if self.narrowing else ""
            return f"equal: the strategy computes what one device computes; {agree}{why}"
        if self.failure:
            return "not equal: the strategy fails where one device works"
        if self.only_rounding:
            return (
                f"not equal in {self.precision}, equal in float64: the strategy is right, "
                f"and {self.precision} rounds its sums differently by more than {self.bound:g}"
            )
        if self.first_difference is None:
            return "not equal, and equal when run again: what the strategy computes changes from run to run"
        return f"not equal: {explain(self.first_difference)}"

    def as_json(self) -> dict[str, Any]:
        """The result as plain values; docs/verify.md says what they mean."""
        steps = [
            {"step": number + 1, "loss": _plain(loss), "grad_norm": _plain(norm)}
            for number, (loss, norm) in enumerate(zip(self.losses, self.grad_norms, strict=True))
        ]
        found = self.first_difference
        return {
            "equal": self.equal,
            "verdict": self.verdict(),
            "precision": self.precision,
            "bound": self.bound,
            "ranks": self.ranks,
            "parameter_count": self.parameter_count,
            "steps": steps,
            "parameters": [{"name": name, "difference": _finite(worst)} for name, worst in self.parameters],
            "first_difference": None if found is None else {key: _finite(v) for key, v in asdict(found).items()},
            "narrowing": self.narrowing or None,
            "failure": self.failure or None,
            "seconds": round(self.seconds, 2),
        }


def prove(subject: ModelSpec | str, asked: Strategy, small: Small, *, precision: str, steps: int, tell: Tell) -> Proof:
    """Compare a shape (`small.spec` is run for it) or a user's `module:build` under a strategy with one device."""
    started = time.monotonic()
    strategy = small.strategy
    shape = small.spec if small.spec is not None else subject
    with RankPool(strategy.world) as pool:
        count = _count(pool, subject, asked, small)
        trial = Trial(
            shape, strategy, precision, steps, samples_of(strategy), micro_steps_of(strategy), tokens_of(strategy)
        )
        tell(f"one device: {steps} steps")
        (expected,) = _run(pool, _alone(trial))
        tell(f"{strategy}: {steps} steps on {strategy.world} processes")
        proof = Proof(False, precision, TOLERANCES[precision], strategy.world, [], [], [], count)
        try:
            proof = _compare(trial, expected, _run(pool, trial), count)
            if not proof.equal:
                proof = _locate(pool, trial, proof, tell)
        except RankError as error:
            proof = replace(proof, failure=_last_lines(str(error)))
    return replace(proof, seconds=time.monotonic() - started)


def _count(pool: RankPool, subject: ModelSpec | str, asked: Strategy, small: Small) -> int:
    """Parameters of what is run; a user's module is built to see whether it can be."""
    if small.spec is not None:
        return count_parameters(small.spec).total
    (answer,) = pool.run(survey, 1, subject, asked, tokens_of(small.strategy))
    if isinstance(answer, Refusal):
        raise UserError(answer.message)
    return answer


def _alone(trial: Trial) -> Trial:
    return replace(trial, strategy=Strategy())


def _run(pool: RankPool, trial: Trial) -> list[Record]:
    records = []
    for answer in pool.run(run_trial, trial.strategy.world, trial):
        if isinstance(answer, Refusal):
            raise UserError(answer.message)
        records.append(answer)
    return records


def _compare(trial: Trial, expected: Record, found: Sequence[Record], count: int) -> Proof:
    bound = TOLERANCES[trial.precision]
    losses = _worst([record.losses for record in found], expected.losses)
    norms = _worst([record.norms for record in found], expected.norms)
    compared = unlike(expected.weights, [record.weights for record in found], floor=1.0)
    parameters = sorted(((name, worst) for name, worst, *_ in compared), key=lambda entry: -entry[1])
    numbers = [*losses, *(norms if trial.precision in _COMPARED else [])]
    farthest = max(number.difference for number in numbers)
    if trial.precision == "float64":
        farthest = max([farthest, *(worst for _, worst in parameters)])
    narrowing = "" if farthest <= bound else expected.narrowing
    bound = ROUNDED if narrowing else bound
    worst = parameters[:WORST]
    return Proof(
        farthest <= bound, trial.precision, bound, len(found), losses, norms, worst, count, narrowing=narrowing
    )


def _worst(found: Sequence[list[float]], expected: list[float]) -> list[Compared]:
    """For every step the rank that is farthest off."""
    compared = []
    for step, theirs in enumerate(expected):
        ours = (Compared(numbers[step], theirs, _relative(numbers[step], theirs)) for numbers in found)
        compared.append(max(ours, key=lambda number: number.difference))
    return compared


def _relative(ours: float, theirs: float) -> float:
    if math.isnan(ours) or math.isnan(theirs):
        return 0.0 if math.isnan(ours) and math.isnan(theirs) else float("inf")
    return abs(ours - theirs) / (abs(theirs) or 1.0)


def _locate(pool: RankPool, trial: Trial, proof: Proof, tell: Tell) -> Proof:
    """Name what departs first: step by step, in float64."""
    exact = replace(trial, precision="float64")
    if trial.precision != "float64":
        tell("the same in float64, to tell a mistake from rounding")
        (expected,) = _run(pool, _alone(exact))
        again = _compare(exact, expected, _run(pool, exact), proof.parameter_count)
        if again.equal:
            return replace(proof, only_rounding=True)
    for step in range(trial.steps):
        tell(f"looking for what departs first: step {step + 1}")
        recorded = replace(exact, steps=step + 1, trace_step=step)
        (expected,) = _run(pool, _alone(recorded))
        found = _run(pool, recorded)
        bound = ROUNDED if expected.narrowing else TOLERANCES["float64"]
        difference = _in_step(step, expected, found, bound)
        if difference is not None:
            return replace(proof, first_difference=replace(difference, step=step + 1))
    return proof


def _in_step(step: int, expected: Record, found: Sequence[Record], bound: float) -> Difference | None:
    """What departs first in a step before which all agreed."""
    loss, norm = (
        max((_relative(numbers[-1], theirs[-1]), rank) for rank, numbers in enumerate(ours))
        for ours, theirs in (
            ([record.losses for record in found], expected.losses),
            ([record.norms for record in found], expected.norms),
        )
    )
    traces = [record.trace for record in found if record.trace is not None]
    difference = first_difference(step, expected.trace or StepTrace(), traces, bound, loss_departs=loss[0] > bound)
    if difference is not None:
        return difference
    if loss[0] > bound:
        return Difference("loss", "the loss", step, loss[0], rank=loss[1])
    if norm[0] > bound:
        return Difference("gradient norm", "the norm of the gradients", step, norm[0], rank=norm[1])
    for name, relative, rank, _ in unlike(expected.weights, [record.weights for record in found], floor=1.0):
        if not relative <= bound:
            return Difference("update", name, step, relative, rank=rank)
    return None


def _last_lines(text: str) -> str:
    lines = text.strip().splitlines()
    return "\n".join(lines if len(lines) <= _LAST_LINES + 1 else [lines[0], "...", *lines[-_LAST_LINES:]])


def _plain(number: Compared) -> dict[str, float | None]:
    return {key: _finite(value) for key, value in asdict(number).items()}


def _finite(value: Any) -> Any:
    """JSON has no infinity and nothing that is not a number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
