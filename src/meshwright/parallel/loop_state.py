"""What a loop of one's own has done: steps, and batches of which sampler it has learned from since the last one."""

from __future__ import annotations

from collections import Counter

from meshwright.errors import UserError
from meshwright.parallel.batch_sampler import BatchSampler, cut_evenly


class LoopState:
    """The place of a loop between two steps."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps that were done here, and before what was loaded."""
        self.by_hand = 0
        """Steps before what was loaded whose gradients travelled, and which are not among those."""
        self.samplers: list[BatchSampler] = []
        """Those that were given out."""
        self.in_step = False
        """Whether `Parallel.step` is at work."""
        self._learned: Counter[BatchSampler | None] = Counter()
        self._passes = False

    @property
    def learned(self) -> bool:
        """Whether a batch went backward since the last step."""
        return bool(self._learned)

    def whose(self, sampler: BatchSampler | None) -> BatchSampler | None:
        """The sampler whose batch is in hand: the one that is named, or the only one in use."""
        if sampler is not None:
            return sampler
        begun = [one for one in self.samplers if one.begun]
        using = [one for one in begun if not _has_evaluated(one)] or begun
        if len(using) > 1:
            raise UserError(
                f"{len(using)} samplers are in use, and whose batch this is cannot be told; "
                "say it: backward(loss_of, *batch, sampler=...)"
            )
        return using[0] if using else None

    def cuts(self, whose: BatchSampler | None, samples: int, micro_steps: int) -> list[int]:
        """Where the batch in hand, of so many samples of this rank, is cut into micro-batches."""
        known = None if whose is None else whose.cuts(self._learned[whose], samples, micro_steps)
        return cut_evenly(samples, micro_steps) if known is None else known

    def in_hand(self, whose: BatchSampler | None) -> int | None:
        """Samples of this rank in the batch that a sampler's loop is at; None where there is none."""
        return None if whose is None or _has_evaluated(whose) else whose.samples(self._learned[whose])

    def begin_pass(self) -> None:
        """A forward pass: gradients of another step may follow."""
        self._passes = True

    def learn(self, whose: BatchSampler | None) -> None:
        """A batch of that sampler went backward."""
        self._learned[whose] += 1

    def begin_step(self) -> None:
        """Refuse a step without gradients, and a second one of the same, which the first has scaled and clipped."""
        if not self._passes:
            since = "since the last step; several optimizers go together: step([a, b])" if self.steps else "before it"
            raise UserError(f"a step, and nothing went backward {since}")
        self.in_step = True

    def end_step(self) -> None:
        """Data goes on behind the batches that were learned from."""
        for sampler, batches in self._learned.items():
            if sampler is not None:
                sampler.advance(batches)
        self._learned.clear()
        self._passes = False
        self.steps += 1


def _has_evaluated(sampler: BatchSampler) -> bool:
    """One that has given all of an epoch, of which nothing was learned."""
    return sampler.exhausted and sampler.position == 0
