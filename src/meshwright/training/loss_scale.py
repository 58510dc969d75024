"""Loss scaling for fp16: gradients are computed of a multiple of the loss, so that small ones do not vanish.

Where a gradient is no longer a number the step is skipped, and after `hysteresis` of them the scale is halved; after
`window` steps in a row without one it is doubled. All ranks see the same norm of all gradients and so the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from meshwright.config import PrecisionSection


class LossScale:
    """The factor of the loss, and what has happened to it. Without fp16 it stays one."""

    def __init__(self, settings: PrecisionSection, active: bool) -> None:
        self.active = active
        self.dynamic = active and settings.loss_scale == "dynamic"
        self._settings = settings
        self.value = 1.0
        if active:
            self.value = 2.0**settings.initial_power if self.dynamic else float(settings.loss_scale)
        self._patience = settings.hysteresis
        self._good_steps = 0

    @property
    def exhausted(self) -> bool:
        """Whether a skipped step cannot be answered with a smaller scale."""
        return not self.dynamic or self.value <= self._settings.minimum

    def accept(self, norm: SupportsFloat) -> bool:
        """Whether a step whose gradients have that norm is taken; moves the scale. Without fp16 every step is."""
        if not self.active:
            return True
        finite = math.isfinite(norm)
        if not self.dynamic:
            return finite
        if not finite:
            self._good_steps = 0
            self._patience -= 1
            if self._patience <= 0:
                self.value = max(self.value / 2, self._settings.minimum)
            return False
        self._good_steps += 1
        if self._good_steps == self._settings.window:
            self._good_steps = 0
            self._patience = self._settings.hysteresis
            self.value *= 2
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint must remember."""
        if not self.dynamic:
            return {}
        return {"loss_scale": {"value": self.value, "patience": self._patience, "good_steps": self._good_steps}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint remembers."""
        if self.dynamic and "loss_scale" in state:
            held = state["loss_scale"]
            self.value, self._patience, self._good_steps = held["value"], held["patience"], held["good_steps"]
