"""A scenario: which model, split how, on which machines, with which software. What every estimate is a function of.

A `Layout` holds the degrees as numbers. It comes from a Strategy, which says only what the trainer can run, or from
the description of a run of other software, which can be freer (experts over tensor-parallel ranks, and so on).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cluster.cluster import Cluster
from meshwright.models.spec import ModelSpec
from meshwright.planning.software import Software
from meshwright.schedules import placement_of, stages_per_rank
from meshwright.stages import stage_layers
from meshwright.strategy import Strategy


@dataclass(frozen=True)
class Layout:
    """How many ways everything is split."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    """Ranks that split each expert's matrices."""
    zero: int = 0
    shard: int = 1
    """Data-parallel ranks that share the state of one copy."""
    sp: bool = False
    schedule: str = "1f1b"
    layers: str = "even"
    cp_method: str = "ring"
    recompute: str = "none"
    offload: str = "none"
    shares: str = "even"
    """How the samples of a micro-step are dealt out to data-parallel ranks."""

    @classmethod
    def of(cls, strategy: Strategy) -> Layout:
        """The numbers of a strategy."""
        return cls(
            dp=strategy.dp,
            tp=strategy.tp,
            pp=strategy.pp,
            cp=strategy.cp,
            ep=strategy.ep,
            expert_tp=strategy.tp,
            zero=strategy.zero,
            shard=strategy.shard,
            sp=strategy.sp,
            schedule=strategy.schedule,
            layers=strategy.layers,
            cp_method=strategy.cp_method,
            recompute=strategy.recompute,
            offload=strategy.offload,
            shares=strategy.shares,
        )

    def strategy(self) -> Strategy:
        """The strategy that has these numbers."""
        return Strategy(
            pp=self.pp,
            replicate=self.replicate,
            shard=self.shard,
            cp=self.cp,
            tp=self.tp,
            ep=self.ep,
            zero=self.zero,
            sp=self.sp,
            schedule=self.schedule,
            layers=self.layers,
            cp_method=self.cp_method,
            recompute=self.recompute,
            offload=self.offload,
            shares=self.shares,
        )

    @property
    def data_shares(self) -> tuple[int, ...]:
        """Of each data-parallel rank."""
        numbers = [1] if self.shares == "even" else [int(number) for number in self.shares.split("+")]
        return tuple(number for number in numbers for _ in range(self.dp // len(numbers)))

    @property
    def all_shares(self) -> int:
        """Parts of a micro-step's samples: dp where all ranks get the same."""
        return self.dp if self.shares == "even" else sum(self.data_shares)

    @property
    def world(self) -> int:
        """Ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicate(self) -> int:
        """Copies of the state."""
        return self.dp // self.shard

    @property
    def state_ranks(self) -> int:
        """Ranks over which sharded state is spread."""
        return self.shard * self.cp

    @property
    def expert_state_ranks(self) -> int:
        """Ranks over which the state of one expert is spread: those that would hold it, within a copy's ranks."""
        holders = self.dp * self.cp * self.tp // (self.ep * self.expert_tp)
        return max(1, holders // self.replicate) if self.zero else 1

    @property
    def chunks(self) -> int:
        """Stages that each rank holds."""
        return stages_per_rank(self.schedule) if self.pp > 1 else 1


PRECISIONS = ("float32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
"""What matrix products are computed in."""
_DTYPES = {"float32": "float32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}


@dataclass(frozen=True)
class Scenario:
    """One training step to be estimated."""

    spec: ModelSpec
    layout: Layout
    cluster: Cluster
    software: Software
    sequence_length: int
    micro_batch: int
    global_batch: int
    precision: str = "bf16"
    flash_attention: bool = True
    loss_chunks: int = 1
    """Parts in which the loss is computed, so that logits are there one part at a time."""
    imbalance: float = 1.0
    """How much more the busiest expert-parallel rank gets than the mean, in time and memory."""

    @property
    def micro_steps(self) -> float:
        """Forward passes per optimizer step on each rank."""
        return self.global_batch / (self.layout.all_shares * self.micro_batch)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank, of one of its shares."""
        return self.micro_batch * self.sequence_length / self.layout.cp

    @property
    def dtype(self) -> str:
        """The chip's dtype of large matrix products."""
        return _DTYPES[self.precision]

    @property
    def wide(self) -> str:
        """The dtype of everything that is not computed in a narrow one."""
        return self.precision if self.precision in ("float32", "bf16", "fp16") else "bf16"

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "float32" else 2

    @property
    def stages(self) -> Stages:
        """The layers of each rank's stages, by pipeline rank."""
        layout = self.layout
        whose = id(self.spec) if layout.layers == "balanced" else self.spec.num_hidden_layers
        key = whose, layout.pp, layout.schedule, layout.layers
        if key not in _STAGES:
            _STAGES[key] = self.spec, _stages(self.spec, layout)
        return _STAGES[key][1]

    def recomputed(self, layers: range) -> int:
        """How many of these layers are computed again in whole."""
        kind, _, count = self.layout.recompute.partition(":")
        if kind == "full":
            return len(layers)
        if kind == "first":
            return max(0, min(layers.stop, int(count)) - layers.start)
        return 0

    @property
    def selective(self) -> bool:
        """Whether cheap operations are computed again in every layer."""
        return self.layout.recompute == "selective"


Stages = tuple[tuple[range, ...], ...]
_STAGES: dict[tuple[int, int, str, str], tuple[ModelSpec, Stages]] = {}


def _stages(spec: ModelSpec, layout: Layout) -> Stages:
    if layout.pp == 1:
        return ((range(spec.num_hidden_layers),),)
    parts = stage_layers(spec, layout.pp * layout.chunks, layout.layers)
    held: list[list[range]] = [[] for _ in range(layout.pp)]
    for part, rank in zip(parts, placement_of(layout.schedule, layout.pp), strict=True):
        held[rank].append(part)
    return tuple(tuple(one) for one in held)
