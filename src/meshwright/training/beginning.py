"""From which step on a run's gradients are compressed: comm.compress_after, and what `auto` has come to.

`auto` follows from the length of the run, which may change when it goes on. Once a step was compressed the beginning
stays where it was, whatever the length is then: checkpoints tell it. Before that it follows the length.
"""

from __future__ import annotations

from typing import Any

from meshwright.checkpoint.format import Manifest
from meshwright.checkpoint.unsent import has_unsent
from meshwright.comm.compression import Compression
from meshwright.comm.whole_steps import whole_steps
from meshwright.config import AUTO_STEPS, RunConfig
from meshwright.errors import CheckpointError
from meshwright.strategy import Strategy
from meshwright.training.travel import length_of

_KEY = "compress_after"


class Beginning:
    """How many steps of a run go whole."""

    def __init__(self, config: RunConfig, strategy: Strategy) -> None:
        self.compression = Compression.parse(strategy.compress)
        self.length = length_of(config)
        self.settled: int | None = None
        """What an earlier part of the run has settled."""
        self._asked = config.comm.compress_after
        self._travels = strategy.dp > 1
        """Whether there are gradients to compress: one rank sends none."""

    @property
    def steps(self) -> int:
        """That go whole before the first compressed one."""
        if self.settled is not None:
            return self.settled
        return whole_steps(self.compression, self.length) if self._asked == AUTO_STEPS else self._asked

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint after so many steps must remember."""
        compresses = self._travels and self.compression.remembers
        begun = self._asked == AUTO_STEPS and compresses and step > self.steps
        return {_KEY: self.steps} if begun or self.settled is not None else {}

    def restore(self, manifest: Manifest) -> None:
        """Go on as the checkpoint has begun; raises where another number is asked for."""
        settled: int | None = manifest.state.get(_KEY)
        if self._asked != AUTO_STEPS:
            if settled is not None and settled != self._asked:
                raise CheckpointError(
                    f"comm.compress_after={self._asked}: it was settled before that gradients are compressed after "
                    f"{settled} steps of this run; leave the setting out, or give comm.compress_after={settled}"
                )
        elif settled is None:
            # A number that was asked for before. 0 is also in checkpoints of runs that never compressed anything.
            asked = manifest.settings.get("comm", {}).get("compress_after", AUTO_STEPS)
            settled = asked if asked != AUTO_STEPS and (asked or has_unsent(manifest)) else None
        self.settled = settled
