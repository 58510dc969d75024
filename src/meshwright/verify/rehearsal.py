"""One rank of any world rehearses a step: the trainer's own step runs, on tensors that have a shape and no memory.

The model is split on the meta device; then it gets fake tensors in place of memory, and `TrainingStep` runs on them as
it runs in training: forward, backward, sums over ranks, optimizer. Groups send nothing. Collectives are counted as the
dispatcher sees them, and storages while they are alive, so that the peak is that of the step itself.

What needs values cannot be rehearsed: where data decides about sizes, experts get equal shares. DDP fills its buckets
in code that needs memory; what it would sum is counted as one collective.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.config import RunConfig
from meshwright.models.initialize import materialise
from meshwright.models.parts import local_of
from meshwright.models.spec import ModelSpec
from meshwright.parallel.mesh import axes_of
from meshwright.parallel.ring_attention import RING_ATTENTION, ring_forward
from meshwright.parallel.world import World
from meshwright.pulse import Pulse
from meshwright.strategy import Strategy
from meshwright.torch_private import FakeTensor, FakeTensorMode, in_backward, without_modes
from meshwright.training.step import TrainingStep
from meshwright.verify.collectives import Collective, collective_of
from meshwright.verify.fake_world import fake_rank
from meshwright.verify.gpu_kernels import like_a_gpu

_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
Key = tuple[str, str, str]
"""Phase (forward, backward, pipeline, update), kind of collective, axis."""


@dataclass
class Counted:
    """What a rank did in a step."""

    calls: Counter[Key] = field(default_factory=Counter)
    bytes: Counter[Key] = field(default_factory=Counter)


@dataclass(frozen=True)
class Rehearsed:
    """What was counted on one rank; collectives are those of a whole step."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int
    """Bytes of all tensors that were alive at once."""
    micro_steps: int
    """Micro-steps that were run; collectives of the others follow from what one more of them adds."""
    collectives: dict[Key, tuple[float, float]]
    """Calls and bytes."""


def rehearse_step(
    spec: ModelSpec,
    strategy: Strategy,
    rank: int,
    config: RunConfig,
    *,
    micro_batch: int,
    sequence_length: int,
    micro_steps: int,
) -> Rehearsed:
    """Run steps of one rank of the strategy's world, and count."""
    # As many as a pipeline needs to be full; the difference shows what each adds.
    least = min(micro_steps, strategy.pp)
    most = min(micro_steps, 2 * strategy.pp)
    with fake_rank(rank, strategy.world), like_a_gpu(), ExitStack() as stack:
        follow = _Follow()
        world = World(rank=rank, size=strategy.world, backend="fake", pulse=follow.pulse)
        step = _Step(config, spec, strategy, world, stack=stack, follow=follow)
        follow.axes = axes_of(step.mesh)
        runs = []
        for index, count in enumerate((least, most)):
            follow.counted, follow.gradients = Counted(), 0
            shape = count, micro_batch
            tokens = torch.zeros(*shape, sequence_length + 1, dtype=torch.long)
            step(index, {"tokens": tokens, "samples": torch.zeros(*shape, dtype=torch.long)})
            _sums_of_ddp(step, follow)
            runs.append(follow.counted)
        return Rehearsed(
            parameters=_storages(step.parallel.parameters()),
            gradients=follow.gradients,
            optimizer=_storages(
                value
                for state in step.optimizer.state.values()
                for value in state.values()
                if isinstance(value, Tensor) and value.dim()
            ),
            peak=follow.peak,
            micro_steps=most,
            collectives=_whole_step(runs[0], runs[1], least, most, micro_steps),
        )


class _Step(TrainingStep):
    """A training step on tensors without memory."""

    def __init__(self, *inputs: Any, stack: ExitStack, follow: _Follow) -> None:
        self._stack, self._follow = stack, follow
        super().__init__(*inputs)

    def give_memory(self, spec: ModelSpec) -> None:
        # From here on tensors are fakes; the mesh before it is real.
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        self._stack.enter_context(self._follow)
        materialise(self.model, self.world.device)
        if self._averaged:
            self.parallel.without_ddp()
        if self.parallel.host_activations is not None:
            self.parallel.host_activations.rehearse()
        self._follow.parameters = list(self.parallel.parameters())


class _Phases(Pulse):
    """Tells who follows the step which part of it begins."""

    def __init__(self, follow: _Follow) -> None:
        super().__init__()
        self.follow = follow

    def enter(self, phase: str, *rest: Any, **options: Any) -> Any:
        self.follow.enter(phase)
        return super().enter(phase, *rest, **options)


class _Follow(TorchDispatchMode):
    """Counts collectives and living storages; gives numbers where there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.pulse = _Phases(self)
        self.counted = Counted()
        self.axes: dict[str, str] = {}
        self.parameters: list[Tensor] = []
        self.gradients = self.now = self.peak = 0
        self._updates = False
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}

    def enter(self, phase: str) -> None:
        """A part of the step begins."""
        self._updates = phase in ("reduce", "optimizer")
        if phase == "reduce":
            self.gradients = _storages(one.grad for one in self.parameters if one.grad is not None)

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        options = options or {}
        if operation is torch.ops.aten._local_scalar_dense.default and isinstance(inputs[0], FakeTensor):
            # Nothing depends on it but what is logged.
            return 1.0 if inputs[0].dtype.is_floating_point else 1
        if operation is RING_ATTENTION:
            with self:
                return ring_forward(*inputs, **options)
        if operation is torch.ops.aten.repeat_interleave.self_Tensor and not isinstance(inputs[1], FakeTensor):
            return inputs[0].new_empty(int(inputs[1].sum()))
        given = _tensors((inputs, options))
        if given and not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in given):
            # Meshes are real, and so are the experts' shares.
            with without_modes():
                result = operation(*inputs, **options)
                found = self._count(operation, inputs, result)
                return inputs[0].clone() if found == "all_to_all" else result
        result = operation(*inputs, **options)
        self._count(operation, inputs, result)
        self._hold(given, result)
        return result

    def _count(self, operation: Any, inputs: Any, result: Any) -> str | None:
        """The kind of collective that it was."""
        found = collective_of(operation, inputs, result)
        if found is None:
            return None
        axis = self.axes.get(found.ranks, found.ranks)
        key = self._phase(found, axis), found.kind, axis
        self.counted.calls[key] += 1
        self.counted.bytes[key] += found.bytes
        return found.kind

    def _phase(self, found: Collective, axis: str) -> str:
        if self._updates:
            return "update"
        if found.kind in ("send", "receive") and axis == "pp":
            return "pipeline"
        # A pipeline sums gradients when all backward passes are done.
        sums = found.kind in ("all_reduce", "reduce_scatter") and found.dtype in _GRADIENTS and axis not in ("tp", "cp")
        return "backward" if sums or in_backward() else "forward"

    def _hold(self, given: list[Tensor], result: Any) -> None:
        """Count what is new; storages that are there already may have been made larger or empty (FSDP does)."""
        for tensor in [*given, *_tensors(result)]:
            if type(tensor) is not FakeTensor or tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            known = self._sizes.get(key)
            if known is None:
                self._storages[key] = weakref.ref(storage)
                weakref.finalize(storage, self._forget, key)
            self._sizes[key] = size
            self.now += size - (known or 0)
        if self.now > self.peak:
            for key, reference in self._storages.items():
                kept = reference()
                if kept is not None:
                    self.now += kept.nbytes() - self._sizes[key]
                    self._sizes[key] = kept.nbytes()
            self.peak = max(self.peak, self.now)

    def _forget(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)
        self._storages.pop(storage)


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among values; of DTensors this rank's part, since what they do with it is not seen."""
    return [local_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _sums_of_ddp(step: _Step, follow: _Follow) -> None:
    """What DDP would have summed, as one."""
    if not step._averaged or step.mesh is None:
        return
    ranks = " ".join(map(str, dist.get_process_group_ranks(step.mesh.loss.get_group())))
    key = "backward", "all_reduce", follow.axes[ranks]
    follow.counted.calls[key] += 1
    follow.counted.bytes[key] += sum(one.nbytes for one in step.parallel.parameters())


def _storages(tensors: Any) -> int:
    """Bytes of the storages behind tensors, each once."""
    held = {}
    for tensor in tensors:
        storage = local_of(tensor).untyped_storage()
        held[storage._cdata] = storage.nbytes()
    return sum(held.values())


def _whole_step(fewer: Counted, more: Counted, least: int, most: int, wanted: int) -> dict[Key, tuple[float, float]]:
    """Collectives of as many micro-steps as wanted."""
    times = (wanted - most) / (most - least) if most > least else 0.0
    return {
        key: (
            more.calls[key] + times * (more.calls[key] - fewer.calls[key]),
            more.bytes[key] + times * (more.bytes[key] - fewer.bytes[key]),
        )
        for key in sorted(more.calls)
    }
