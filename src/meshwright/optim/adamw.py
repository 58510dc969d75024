"""AdamW whose weights may be bfloat16 and whose moments may be bfloat16 or 8 bits; computed in float32.

Weights in bfloat16 are rounded at random, never to the nearest: a weight moves by about the learning rate, which is
mostly less than half a step of bfloat16, and would stay where it is for ever. Moments too: a mean that decays by less
than half a step would not decay. Random bits come from (key, step, place in the whole parameter), so a run repeats bit
for bit, and a parameter that is split over ranks is rounded as one device would round it.

On CUDA a kernel updates all parts in one or two launches (`kernel.py`), elsewhere plain torch does (`reference.py`).
Nobody waits for the device: counts of steps and `found_inf` stay there.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.models.counter_random import key_of
from meshwright.models.parts import Box
from meshwright.optim import reference
from meshwright.optim.codes import FIRST_MOMENT, SECOND_MOMENT, blocks_of, encode_part
from meshwright.optim.random_rounding import Place
from meshwright.optim.reference import Rates, Slot

Moments = Literal["float32", "bf16", "int8"]
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
CODES = {"exp_avg": FIRST_MOMENT, "exp_avg_sq": SECOND_MOMENT}
"""The two moments, by the names that torch's optimizers give them, and how 8 bits hold them."""


def scales_of(kind: str) -> str:
    """Under which name the scales of a moment in 8 bits are kept."""
    return f"{kind}_scale"


class FusedAdamW(torch.optim.Optimizer):
    """AdamW of float32 or bfloat16 weights, with moments in float32, bfloat16 or 8 bits.

    As torch's fused optimizers it honours two attributes: gradients are divided by `grad_scale`, a tensor of one
    element where they lie, and a `found_inf` that is not zero makes a step change nothing.
    """

    # torch.amp.GradScaler leaves unscaling and skipping to optimizers that say so.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: Moments = "float32",
        seed: int = 0,
    ) -> None:
        self.moments = moments
        self.copies: dict[nn.Parameter, Tensor] = {}
        """Tensors of bfloat16 that get the new weights of float32 parts, in the same pass."""
        self._seed = seed
        self._places: dict[nn.Parameter, Place] = {}
        self._kernel: Any = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Further parameters; until `place` says more, their numbers are their names, and they are whole."""
        super().add_param_group(param_group)
        for part in self.param_groups[-1]["params"]:
            if part.dtype not in (torch.float32, torch.bfloat16) or not part.is_contiguous():
                raise ValueError(f"a weight must be contiguous float32 or bfloat16, and is {part.dtype} {part.shape}")
            self._places[part] = Place(key_of(self._seed, "rounding", len(self._places)))

    def place(self, part: nn.Parameter, name: str, box: Box) -> None:
        """Say which parameter a part belongs to, and where in it it lies: its random bits follow from that."""
        shape = tuple(part.shape)
        self._places[part] = Place.of(key_of(self._seed, "rounding", name), box.offset, shape, box.whole_shape)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parts that have a gradient."""
        if closure is not None:
            raise ValueError("takes no closure; compute the loss and its gradients before step()")
        for group in self.param_groups:
            parts = [part for part in group["params"] if part.grad is not None and part.numel()]
            for device in dict.fromkeys(part.device for part in parts):
                self._update(group, [part for part in parts if part.device == device], device)

    def _update(self, group: dict[str, Any], parts: list[nn.Parameter], device: torch.device) -> None:
        states = [self.state[part] or self._begin(part) for part in parts]
        steps = [state["step"] for state in states]
        inverse_scale, skip = self._told(device)
        torch._foreach_add_(steps, 1.0)
        if skip is not None:
            # One by one: a single tensor for all of them would be read by the host.
            torch._foreach_sub_(steps, [skip.to(steps[0].dtype)] * len(steps))
        count = torch.stack(steps)
        beta1, beta2 = group["betas"]
        rate, eps, decay = group["lr"], group["eps"], 1 - group["lr"] * group["weight_decay"]
        # In float64, so that CPU and GPU give the same float32.
        wide = count.double()
        corrections = torch.stack((rate / (1 - beta1**wide), (1 - beta2**wide).rsqrt()), dim=1).float()
        rates = Rates(decay, beta1, beta2, eps)
        slots = [self._slot(part, state) for part, state in zip(parts, states, strict=True)]
        if device.type == "cuda" and find_spec("triton") is not None:
            self._on_cuda(slots, rates, count, corrections, inverse_scale, skip)
            return
        for number, slot in enumerate(slots):
            reference.update(slot, rates, count[number], corrections[number], inverse_scale, skip)

    def _on_cuda(self, slots: list[Slot], *how: Any) -> None:
        # Triton is there with torch for CUDA only.
        from meshwright.optim.kernel import Updates

        self._kernel = self._kernel or Updates()
        self._kernel(slots, *how)

    def _told(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """One over `grad_scale`, and whether to skip, where they are set."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        inverse = None if scale is None else 1.0 / scale.to(device, torch.float32).reshape(())
        return inverse, None if found is None else found.to(device).reshape(()) != 0

    def _slot(self, part: nn.Parameter, state: dict[str, Tensor]) -> Slot:
        gradient = part.grad
        assert gradient is not None
        first, second = CODES
        return Slot(
            part.detach(),
            gradient.detach(),
            state[first],
            state[second],
            state.get(scales_of(first)),
            state.get(scales_of(second)),
            self._places[part],
            self.copies.get(part),
        )

    def _begin(self, part: nn.Parameter) -> dict[str, Tensor]:
        """The state of a part that was never updated."""
        state = self.state[part]
        state["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
        for kind in CODES:
            state[kind] = torch.zeros(part.shape, dtype=self.kept, device=part.device)
            if self.moments == "int8":
                state[scales_of(kind)] = torch.zeros(blocks_of(part.numel()), device=part.device)
        return state

    @property
    def kept(self) -> torch.dtype:
        """The dtype in which moments are kept; that of codes is uint8."""
        return _DTYPES[self.moments]

    def settle(self, part: nn.Parameter, kind: str) -> None:
        """Keep a moment that somebody put into the state in float32 or bfloat16 as this optimizer keeps its moments."""
        state = self.state[part]
        if self.moments == "int8":
            coded = encode_part(CODES[kind], state.pop(kind))
            state[kind], state[scales_of(kind)] = coded.codes, coded.scales
        else:
            state[kind] = state[kind].to(self.kept)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` gave, with the same `moments`."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parts = [part for group in self.param_groups for part in group["params"]]
        for number, part in zip(numbers, parts, strict=True):
            for kind, value in state_dict["state"].get(number, {}).items():
                if kind in CODES and value.dtype != self.kept:
                    said = f"{kind} is {value.dtype} and moments={self.moments}"
                    raise ValueError(f"{said}; give that which it was saved with")
                # Torch would give it the dtype of the weight.
                self.state[part][kind] = value.detach().to(part.device, copy=True)
