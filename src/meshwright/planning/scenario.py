"""A scenario: which model, split how, on which machines, with which software. What every estimate is a function of.

A `Layout` holds the degrees as numbers. It comes from a Strategy, which says only what the trainer can run, or from
the description of a run of other software, which can be freer (experts over tensor-parallel ranks, and so on).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from meshwright.cluster.cluster import Cluster
from meshwright.comm.compression import Compression
from meshwright.estimate.kept import FLOAT32, Kept
from meshwright.models.spec import ModelSpec
from meshwright.planning.held_layers import RankLayers, Stage, ranks_of, stages_of
from meshwright.planning.software import Software
from meshwright.strategy import Strategy, host_activations, host_states


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
    compress: str = "none"
    """How gradients are made smaller for their way."""

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
            compress=strategy.compress,
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
            compress=self.compress,
        )

    @property
    def compression(self) -> Compression:
        """What makes gradients smaller."""
        return Compression.parse(self.compress)

    @property
    def host_states(self) -> str:
        """Whose state lives in host memory: none, optimizer or parameters."""
        return host_states(self.offload)

    @property
    def host_activations(self) -> bool:
        """Whether activations wait in host memory."""
        return host_activations(self.offload)

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


PRECISIONS = ("float32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
"""What matrix products are computed in."""
_DTYPES = {one: one for one in PRECISIONS} | {"mxfp8": "fp8", "nvfp4": "fp4"}


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
    """How much more rows of a layer the busiest expert-parallel rank gets than the mean."""
    kept: Kept = FLOAT32
    """How our own trainer keeps weights and moments; `software` knows it too."""
    compile: bool = True
    """Whether our own trainer compiles layers where it can."""

    @property
    def held_bytes(self) -> tuple[float, float, float]:
        """Of a parameter, of its gradient, and of what the optimizer keeps for it."""
        software = self.software
        if self.element == 4 and software.name != "meshwright":
            # No second copy in another dtype.
            return 4.0, 4.0, 8.0
        return software.parameter_bytes, software.gradient_bytes, software.optimizer_bytes

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
        return self.precision if self.precision in ("float32", "tf32", "bf16", "fp16") else "bf16"

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision in ("float32", "tf32") else 2

    @property
    def again(self) -> int:
        """How many of the first layers are computed again in whole."""
        kind, _, count = self.layout.recompute.partition(":")
        if kind == "full":
            return self.spec.num_hidden_layers
        return int(count) if kind == "first" else 0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in the model's order."""
        layout = self.layout
        return stages_of(self.spec, layout.pp, layout.schedule, layout.layers, self.again)

    def ranks(self, quick: bool = False) -> tuple[RankLayers, ...]:
        """What each pipeline rank holds; `quick` leaves out those that cannot be the fullest."""
        layout, micro_steps = self.layout, max(1, round(self.micro_steps))
        return ranks_of(self.spec, layout.pp, layout.schedule, layout.layers, self.again, micro_steps, quick)

    @property
    def expert_share(self) -> float:
        """Share of its experts' state that a rank holds.

        Our trainer deals whole experts out to the ranks that share them: of fewer experts than ranks each holds one.
        """
        ranks, experts = self.layout.expert_state_ranks, self.spec.experts
        if experts is None or self.software.name != "meshwright":
            return 1 / ranks
        local = experts.num_experts / self.layout.ep
        return ceil(local / ranks) / local

    @property
    def selective(self) -> bool:
        """Whether cheap operations are computed again in every layer."""
        # A budget is the compiler's; what comes nearest without one is this.
        return self.layout.recompute.startswith(("selective", "budget"))

    @property
    def compiled(self) -> bool:
        """Whether layers are compiled, as our own trainer does on GPUs."""
        split = self.layout.schedule.startswith(("zero-bubble", "zbv"))
        return self.compile and self.software.name == "meshwright" and self.cluster.chip.key != "cpu" and not split

    @property
    def is_replicated(self) -> bool:
        """Whether our trainer sums gradients by `replicate`, as of split models, which computes with copies."""
        layout = self.layout
        split = layout.dp * layout.cp > 1 and layout.tp * layout.pp * layout.ep > 1
        return split and layout.zero < 2 and self.software.name == "meshwright"

    @property
    def rounds_weights(self) -> bool:
        """Whether layers of our own trainer read weights that are stored wider than they compute."""
        gathers = self.is_replicated or (self.layout.zero >= 2 and self.layout.state_ranks > 1)
        return self.software.name == "meshwright" and self.element < self.held_bytes[0] and not gathers

    @property
    def merges_products(self) -> bool:
        """Whether queries, keys and values come from one product with their weights put together."""
        return self.compiled and self.rounds_weights
