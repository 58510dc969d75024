"""A model under a strategy, in the hands of a loop of one's own: its gradients, steps, data and checkpoints.

The work is done where the trainer's is: passes in `model.py`, steps in `training/own_step.py`, checkpoints in
`checkpoint/own_loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshwright.errors import UserError
from meshwright.parallel.batch_sampler import BatchSampler
from meshwright.parallel.exchange import Exchange
from meshwright.parallel.loop_state import LoopState
from meshwright.parallel.model import SplitModel
from meshwright.parallel.pipeline import Batch, Call, Loss

if TYPE_CHECKING:
    from meshwright.training.loss_scale import LossScale

_SAVED = "use save(folder, optimizer) and load(folder, optimizer), which know them all"
_OF_A_PART = {
    **dict.fromkeys(("state_dict", "load_state_dict"), _SAVED),
    **dict.fromkeys(("to", "cpu", "cuda", "float", "double", "half", "bfloat16"), "choose it before parallelize"),
}
"""What a model has, and a rank's part of it had better not."""


class Parallel(SplitModel):
    """A model under a strategy, as `parallelize` gives it."""

    _rows: frozenset[int] = frozenset()
    """First dimensions of the tensors that the last forward pass with gradients was given."""

    @cached_property
    def loop(self) -> LoopState:
        """What the loop has done."""
        return LoopState()

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        """The forward pass of this rank's samples, whole on every rank; what comes out is that of its own tokens."""
        if torch.is_grad_enabled():
            leaves = tree_leaves((inputs, options))
            self._rows = frozenset(len(one) for one in leaves if isinstance(one, Tensor) and one.ndim)
        self.loop.begin_pass()
        if self.compressor is not None:
            self.compressor.begin_pass()
        return super().__call__(*inputs, **options)

    def forward_backward(self, batches: Sequence[Batch | Call], loss: Loss) -> None:
        """The forward and backward passes of a step's micro-batches; gradients are reduced over ranks."""
        self.loop.begin_pass()
        super().forward_backward(batches, loss)

    def optimizer(
        self, make: Callable[..., torch.optim.Optimizer], groups: Any = None, **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer of the model's parameters (or of `groups` of them), with its state where the strategy says."""
        made = super().optimizer(make, groups, **options)
        made.register_step_pre_hook(self._updating)
        made.register_step_post_hook(self._updated)
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Other attributes are the model's, but for what would be of this rank's part alone."""
            if name.startswith("_") or name == "module":
                raise AttributeError(name)
            if name in _OF_A_PART:
                raise AttributeError(f"{name} would be of this rank's part of the model; {_OF_A_PART[name]}")
            return getattr(self.module, name)

    def backward(
        self,
        loss: Callable[..., Tensor] | Tensor,
        *batch: Any,
        micro_steps: int = 1,
        sampler: BatchSampler | None = None,
    ) -> Tensor:
        """The gradients of a step, and the mean loss of the samples of all data ranks, the same on each; detached.

        `loss(model, *batch)` gives the mean over a batch's samples, the first dimension of its tensors; this rank's
        are taken in `micro_steps` passes. Without a pipeline a loss that is computed already will do. With several
        samplers in use `sampler` says whose batch it is.
        """
        from meshwright.training.own_step import backward, backward_of

        whose = self.loop.whose(sampler)
        if not isinstance(loss, Tensor):
            mean = backward(self, loss, batch, micro_steps, whose)
            self.loop.learn(whose)
            return mean
        if self.pipeline is not None:
            raise ValueError(
                f"pp={self.strategy.pp}: a loss that is computed already cannot go back through a pipeline's stages; "
                "use parallel.backward(loss_of, *batch) with loss_of(model, *batch)"
            )
        if batch or micro_steps != 1:
            raise ValueError("a loss that is computed already takes no batch and no micro_steps; give a function")
        samples = self._samples(whose)
        self.loop.learn(whose)
        return backward_of(self, loss, samples)

    def _samples(self, whose: BatchSampler | None) -> int:
        """Of how many samples of this rank a loss is the mean that was computed already."""
        if self.strategy.dp == 1:
            return 1
        known = self.loop.in_hand(whose)
        if known is None and len(self._rows) == 1:
            return next(iter(self._rows))
        # A sample may have several rows.
        if known is not None and (not self._rows or any(rows % known == 0 for rows in self._rows)):
            return known
        shown = f"tensors of {', '.join(map(str, sorted(self._rows)))} rows" if self._rows else "no tensor"
        batch = "" if known is None else f", and the batch in hand has {known} samples on this rank"
        raise UserError(
            f"the model was called with {shown}{batch}: of how many samples this loss is the mean cannot be told; use "
            "parallel.backward(loss_of, *batch) with loss_of(model, *batch), whose tensors have the samples as their "
            "first dimension, and micro_steps for parts of a batch"
        )

    def step(self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], clip: float = 0.0) -> Tensor:
        """Update the weights by gradients that are clipped to a norm of `clip` (0: as they are), and drop these.

        Gives the norm of all gradients before that. With fp16 it takes out the loss scale, and skips a step that has
        overflowed, on all ranks alike. Optimizers of parts of the model are given together.
        """
        from meshwright.training.own_step import step

        self.loop.begin_step()
        try:
            norm = step(self, [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer, clip)
        finally:
            self.loop.in_step = False
        self.loop.end_step()
        return norm

    def _updating(self, *_: Any) -> None:
        """Before an update: after `backward` some models need more than one."""
        from meshwright.training.own_step import check_plain_update

        if self.loop.learned and not self.loop.in_step:
            check_plain_update(self)

    def _updated(self, *_: Any) -> None:
        if self.loop.learned and not self.loop.in_step:
            self.loop.end_step()

    @cached_property
    def exchange(self) -> Exchange:
        """How the ranks tell each other things around checkpoints; all of them ask for it together."""
        if self.mesh is None:
            return Exchange(None)
        return Exchange(dist.new_group(backend="gloo", timeout=timedelta(days=1)))

    @cached_property
    def loss_scale(self) -> LossScale:
        """The factor of the loss, where the model computes in fp16; it may be replaced before the first step."""
        from meshwright.config import PrecisionSection
        from meshwright.training.loss_scale import LossScale

        return LossScale(PrecisionSection(), self.precision.param == torch.float16)

    def batch_sampler(
        self, dataset: Sized | int, batch_size: int, shuffle: bool = False, seed: int = 0, drop_last: bool = False
    ) -> BatchSampler:
        """For `DataLoader(dataset, batch_sampler=...)`: this rank's samples of batches that are those of all ranks."""
        sampler = BatchSampler(
            dataset, batch_size, self.strategy, self.data_rank, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        self.loop.samplers.append(sampler)
        return sampler

    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None, **state: Any) -> str:
        """Save the model, the optimizer's state and what else is given, as far as JSON has it, as a checkpoint.

        It becomes FOLDER/step-000012 after as many steps, or with `step=12`. All ranks call it, and get its folder when
        it is on the disk.
        """
        from meshwright.checkpoint.own_loop import save

        _check_one(optimizer)
        return save(self, folder, optimizer, state)

    def load(
        self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None, must_exist: bool = True
    ) -> dict[str, Any]:
        """Take up the newest checkpoint of a folder, or the one that it is, saved under any strategy; gives its state.

        Without `must_exist` a folder that has none leaves everything as it is and gives nothing.
        """
        from meshwright.checkpoint.own_loop import load

        _check_one(optimizer)
        return load(self, folder, optimizer, must_exist)


def _check_one(optimizer: Any) -> None:
    """Raise unless it is an optimizer, or none."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"a checkpoint has the state of one optimizer, not of a {type(optimizer).__name__}; make one with groups: "
            "optimizer(make, groups=[{'params': ...}, {'params': ..., 'lr': ...}])"
        )
