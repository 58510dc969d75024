"""What is known of the software that trains: what it stores and overlaps, how fast it is. Data in `constants.toml`.

Facts (bytes that a framework keeps for a parameter) and fitted numbers (the share of a peak that is reached) are apart
in that file, and each fitted number says what it was fitted on. No torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from meshwright.estimate.kept import FLOAT32, Kept

T = TypeVar("T")


@dataclass(frozen=True)
class Software:
    """A family of training software."""

    name: str
    # Facts: what is kept.
    parameter_bytes: float
    """Of a parameter as it is stored for computing, or as its shard is stored."""
    gradient_bytes: float
    optimizer_bytes: float
    """Moments, and the wide copy of parameters where the stored one is narrow."""
    reduce_bytes: float
    """Of a gradient on its way between ranks."""
    gather_bytes: float
    """Of a parameter on its way."""
    sums_whole: bool
    """Whether zero=1 sums whole gradients on every rank, rather than the part that the rank updates."""
    late_gradients: bool
    """Whether gradients have memory only from their backward pass to the optimizer's step."""
    gathered_saved: bool
    """Whether tokens that tensor-parallel ranks gathered are kept for the backward pass, rather than gathered again."""
    mlp_saved: float
    """Elements of width `f` that a gated feed-forward keeps: 3 fused, 4 where each operation keeps its own."""
    selective_saved: float
    """Share of the products' outputs that selective recompute keeps."""
    logit_bytes: float
    """Of each logit at the peak of the loss; our own is a closed form, `head_memory`."""
    narrow_saved: bool
    """Whether inputs of products in narrow dtypes are kept in those."""
    narrow_experts: bool
    """Whether products of stacked experts are computed in narrow dtypes, too."""
    stage_buffers: float
    """Inputs and outputs of its stage that a pipeline rank holds for each micro-batch in flight."""
    bucket_gib: float
    """Buffers of gradients and parameters on their way, made once."""
    context_gib: float
    """The driver's context and libraries."""
    group_gib: float
    """Each communicator's buffers."""
    fragmentation: float
    """Memory that the allocator holds over what is in use."""
    # Fitted: how fast it is.
    compute: float
    """Share of what a chip's matrix products reach in this software."""
    attention: float
    """The same for fused attention."""
    passes: float
    """How often activations go through memory, over the least that fused kernels need."""
    cast: float
    """The same for casts to narrow dtypes."""
    tp_exposed: float
    """Share of tensor-parallel communication that nothing hides."""
    ep_exposed: float
    """Share of the experts' exchange that nothing hides."""
    overlap: float
    """Share of the backward pass that can hide the sums of gradients, and of the forward pass the gathers."""
    contention: float
    """How much slower computation is while it hides communication."""
    host_s: float
    """Least time for a layer's forward pass, in which the host starts its kernels."""
    host_experts_s: float
    """The same for a layer of experts."""
    portable_attention: bool
    """Whether its attention is the kernel for all chips rather than the chip's own."""
    step_s: float
    """What every step costs beside all that: logging, clipping, data."""
    pipeline: float
    """How much of a transfer between stages is waited for."""
    jitter: float
    """Growth of a step with every doubling of the machines: the slowest rank sets the pace."""
    # Of our own trainer.
    compiled_passes: float = 1.0
    """As `passes`, of compiled layers."""
    compiled_again: float = 1.0
    """What compiled layers take for computing norms and activations again, over their first time."""
    compiled_host_s: float = 0.0
    """As `host_s`, of compiled layers."""
    update: float = 0.0
    """Share of a chip's memory bandwidth that the optimizer's own kernel reaches; 0 where it has none."""
    update_int8_s: float = 0.0
    """Seconds for a parameter in which that kernel reads and writes moments in 8 bits, at least: it computes then."""


def keeping(software: Software, kept: Kept) -> Software:
    """Our own trainer with narrow weights or moments; what others keep is a fact of theirs."""
    if software.name != "meshwright" or kept == FLOAT32:
        return software
    element = float(kept.element)
    return replace(
        software,
        parameter_bytes=element,
        gradient_bytes=element,
        optimizer_bytes=kept.both_moments,
        reduce_bytes=element,
    )


@dataclass(frozen=True)
class ChipSpeed:
    """What a chip reaches in training, as shares of the vendor's peaks."""

    host: float
    """How long its host takes to start a kernel, over others."""
    gemm: float
    fp8: float
    fp4: float
    attention: float
    """Of the chip's own kernel."""
    portable_attention: float
    """Of the kernel that was written for the chips before it."""
    memory: float


@dataclass(frozen=True)
class Common:
    """What is the same everywhere."""

    link: float
    """Share of the links' bandwidth that large collectives reach."""
    nic: float
    """Share of the network's."""
    all_to_all: float
    """Share of either that an exchange of rows reaches."""
    link_latency_s: float
    nic_latency_s: float
    depth: float
    """Length of a sum over which a product's start and end are spread: k / (k + depth) of the peak is reached."""
    quantum: float
    """How much of an unfilled last wave of tiles is lost."""
    grouped: float
    """Share of a plain product's speed that products of many experts reach."""
    rows: float
    """Rows of an expert at which its products reach half of that."""
    attention_length: float
    """Tokens at which fused attention reaches half of its speed."""
    float32: float
    """Share of a chip's peak that products in float32 reach, which run beside the tensor cores."""
    unfused: float
    """Passes through memory of the scores of attention that is not fused."""


MEASURED = ("a100", "h100", "h100-500w", "b200", "b300", "gb200", "gb300")
"""Chips of which published runs were at hand."""


@dataclass(frozen=True)
class Constants:
    """All of them."""

    software: Mapping[str, Software]
    chips: Mapping[str, ChipSpeed]
    like: Mapping[str, str]
    """Chips that are as fast as others, for their peaks."""
    common: Common

    def chip(self, key: str) -> ChipSpeed:
        """What a chip reaches; one that nothing was measured on gets the default."""
        return self.chips.get(self.like.get(key, key), self.chips["default"])

    def measured(self, key: str) -> bool:
        """Whether published runs on that chip were at hand."""
        return self.like.get(key, key) in MEASURED


def read_constants(table: Mapping[str, Any]) -> Constants:
    """Constants of a table as in `constants.toml`."""
    return Constants(
        {name: _only(Software, {"name": name, **values}) for name, values in table["software"].items()},
        {name: _only(ChipSpeed, values) for name, values in table["chip"].items()},
        table["like"],
        _only(Common, table["common"]),
    )


@cache
def constants() -> Constants:
    """Those that come with the package."""
    return read_constants(table())


def table() -> dict[str, Any]:
    """The file as it is."""
    return tomllib.loads(files("meshwright.planning").joinpath("constants.toml").read_text(encoding="utf-8"))


def _only(kind: type[T], values: Mapping[str, Any]) -> T:
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
