"""Private names of PyTorch that are used here, checked when they are imported; torch_private_fsdp has those of FSDP."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch._C._autograd import DeviceType, _profiler_enabled
from torch._C._profiler import _ExperimentalConfig
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group, _world  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    _NodeDesc,
    _RendezvousState,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import Placement, Shard, debug
from torch.distributed.tensor.placement_types import _StridedShard

# Importing it makes the backend "fake" known.
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from meshwright.comm.transfers import is_staged

__all__ = [
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "FlashAttention",
    "RendezvousMember",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "backward_to_input",
    "backward_to_weights",
    "beside",
    "flash_attention",
    "flatten",
    "flight_records",
    "forget_events",
    "forget_meshes",
    "graph_breaks",
    "group_members",
    "in_backward",
    "is_on_gpu",
    "is_profiling",
    "is_shard",
    "parameters_of",
    "prepare_compiler",
    "profiled_events",
    "profiling_all_threads",
    "quiet_fake_tensors",
    "reduce_scatter",
    "resolve_group",
    "shard_within",
    "start_compiler_processes",
    "wanted_gradients",
    "without_modes",
]


def forget_meshes() -> None:
    """Drop what torch remembers of operations on split tensors: with it come meshes of process groups that are gone."""
    debug._clear_sharding_prop_cache()


def prepare_compiler(budget: float, lean: bool) -> None:
    """Settings under which layers are compiled: the share of activations that they keep, and whether they compute again
    what is elementwise even where a product needs it in the backward pass."""
    import torch._dynamo.config
    import torch._functorch.config

    # Autograd functions are traced into the graph, and so into its key: what was compiled before may be found again.
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    settings = {"activation_memory_budget": budget, "ban_recompute_materialized_backward": not lean}
    if any(getattr(torch._functorch.config, name) != value for name, value in settings.items()):
        # What was compiled under others would be taken for this.
        torch._dynamo.reset()
        for name, value in settings.items():
            setattr(torch._functorch.config, name, value)
    # Layers differ in such numbers (the site of a dropout), and are one code all the same.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    # A layer's gradients come out of its backward pass together: buckets cannot take it apart.
    torch._dynamo.config.optimize_ddp = False


def start_compiler_processes() -> None:
    """Start the processes that compile kernels for a GPU: they import torch themselves, and are ready when asked then.

    Where they are not, everything is compiled one by one."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool()
    AsyncCompile.use_process_pool()


def graph_breaks() -> dict[str, int]:
    """Where compiled code fell apart, or is not compiled at all: the reason with what it was about, and how often."""
    # Takes a second to import.
    from torch._dynamo.utils import counters

    found: Counter[str] = Counter()
    # What is left as it is as a whole (the first operation breaks it, or it was compiled too often) is no break.
    for kind in ("graph_break", "unimplemented"):
        for reason, count in counters[kind].items():
            found[_reason_in_short(str(reason))] += count
    return dict(found)


def _reason_in_short(text: str) -> str:
    """What the compiler says in a first line, and of what: an operation, a function."""
    first, *others = (line.strip() for line in text.splitlines() or [""])
    said = "Developer debug context:"
    about = next((line.removeprefix(said).strip() for line in others if line.startswith(said)), "")
    # Further on are paths of this machine.
    about = about.partition(", skip reason")[0]
    return f"{first}: {about}" if about else first


def without_modes() -> Any:
    """A context in which operations run as they are, whatever follows them."""
    return _disable_current_modes()


@contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """A context in which operations on tensors without memory fail with an exception, and no lines in the log."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def in_backward() -> bool:
    """Whether the engine of a backward pass runs this."""
    return bool(torch._C._current_graph_task_id() != -1)


def wanted_gradients(ctx: Any) -> tuple[bool, ...]:
    """Which gradients the backward pass in hand wants of a Function; `needs_input_grad` says which any could want.

    They differ where a backward pass is done in parts. Inputs of the Function must not be leaves of the graph.
    """
    needed: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        return needed
    follow = [node for node, _ in ctx.next_functions]
    return tuple(
        need and bool(torch._C._will_engine_execute_node(node)) for need, node in zip(needed, follow, strict=False)
    )


def flatten(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """One axis made of several neighbouring ones; the mesh knows it by that name from then on."""
    return mesh[axes]._flatten(name)


def beside(*meshes: DeviceMesh) -> DeviceMesh:
    """One mesh with the axes of several, in that order, which are parts of one; they may be axes made of others."""
    return DeviceMesh._concatenate(list(meshes))


def shard_within(dim: int, factor: int) -> Placement:
    """The placement of a part that is cut out of a part: the dimension was cut into `factor` parts before."""
    return _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)


def is_shard(placement: Placement) -> bool:
    """Whether a placement cuts a tensor, in whichever order."""
    return isinstance(placement, Shard | _StridedShard)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module itself stores, whatever reading them by name gives."""
    return module._parameters


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that name."""
    return _resolve_process_group(name)  # type: ignore[arg-type]


def group_members() -> dict[str, list[int]]:
    """The ranks of each process group of this process, by the group's name."""
    groups = list(_world.pg_group_ranks.items())
    return {group.group_name: sorted(ranks) for group, ranks in groups if isinstance(group, dist.ProcessGroup)}


# NCCL has a recorder of its own; a build without it lacks the second.
_RECORDERS = [getattr(c10d, name) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if hasattr(c10d, name)]


def flight_records(with_entries: bool) -> list[dict[str, Any]]:
    """What torch's recorders of collectives know: `pg_status` of each group and, where wanted, the last `entries`."""
    return [json.loads(dump(includeCollectives=with_entries)) for dump in _RECORDERS]


def profiling_all_threads() -> Any:
    """What makes a profiler see all threads, not only the one that starts it."""
    return _ExperimentalConfig(profile_all_threads=True)


def profiled_events(profile: torch.profiler.profile) -> list[Any]:
    """What a profile that was stopped has seen, as kineto has it: a tenth of the time that torch's own lists take."""
    assert profile.profiler is not None
    found: Any = profile.profiler.kineto_results
    return list(found.events())


def forget_events(profile: torch.profiler.profile) -> None:
    """Let go of what a profile has seen, some 3 KB for each event: references go in a circle, and who keeps garbage
    collection out of the way would hold it for long."""
    profile.profiler = None


def is_profiling() -> bool:
    """Whether a profiler of torch's runs in this thread; a second one would take its place."""
    return bool(_profiler_enabled())


def is_on_gpu(event: Any) -> bool:
    """Whether what the profiler has seen happened on a GPU."""
    return bool(event.device_type() == DeviceType.CUDA)


# 2.13 has new names for them and warns of the old ones.
_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

# The functional collectives: they give new tensors, so that recomputation may keep their results and compilers may
# see through them. Their results are waited for here. Gathers and scatters of CUDA tensors over gloo end the process
# there (torch 2.11 reads the GPU's addresses on the host), so they go through host memory.


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of a group."""
    return _wait(functional.all_reduce(x, "sum", group))


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """The ranks' tensors after one another."""
    return _wait(_gather(_readable(x, group), dim, group)).to(x.device)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum over the ranks."""
    return _wait(_scatter(_readable(x, group), "sum", dim, group)).to(x.device)


def all_to_all(x: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows from every rank of a group after one another; `send` says how many of x's rows go to each, in order."""
    return _wait(functional.all_to_all_single(x.contiguous(), receive, send, group))


def _readable(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.contiguous().cpu() if is_staged(x, group) else x.contiguous()


def _wait(x: Any) -> Tensor:
    return x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x


def backward_to_input(
    output: Tensor, gradient: Tensor | None, hidden: Tensor, parameters: list[nn.Parameter]
) -> list[dict[str, Any]]:
    """The part of a backward pass that leads to the input, whose gradient is set; gives what is left for the others."""
    gradients = None if gradient is None else [gradient]
    _, groups = stage_backward_input([output], gradients, [hidden], iter(parameters))
    return groups


def backward_to_weights(parameters: list[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """The rest of such a backward pass: gradients are added to those of the parameters."""
    stage_backward_weight(iter(parameters), groups)


class FlashAttention:
    """A flash-attention kernel for blocks of a softmax: what SDPA calls, with the log-sum-exp in the caller's hands."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """The output and the log-sum-exp (batch, heads, tokens)."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return out, lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values."""
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal
        )


class _CudaFlashAttention(FlashAttention):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
        return out, lse

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Sequences are not packed (no cumulative lengths) and nothing is dropped (the random state is not read). The
        # kernel takes the log-sum-exp to be contiguous without looking.
        unused = torch.empty(0, dtype=torch.int64, device="cpu")
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
        )


def flash_attention(q: Tensor) -> FlashAttention | None:
    """The kernel for queries (batch, heads, tokens, head size) of that kind; None where there is none."""
    if q.device.type == "cpu":
        return FlashAttention()
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    if q.device.type == "cuda" and narrow and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return _CudaFlashAttention()
    return None


class RendezvousMember:
    """One machine in torchelastic's dynamic rendezvous, whose state is kept by `holder` instead of as a pickle.

    The holder has `state`, `sync()` and `mark_dirty()`, as torchelastic's own; it fills in states of `new_state` with
    nodes of `node`.
    """

    def __init__(self, settings: RendezvousSettings, address: str, store: Any, holder: Any) -> None:
        self.node = DynamicRendezvousHandler._node_desc_generator.generate(address)
        self.handler = DynamicRendezvousHandler(self.node, settings, "meshwright", store, holder)

    @staticmethod
    def new_state() -> Any:
        """A rendezvous that nobody has joined yet."""
        return _RendezvousState()

    @staticmethod
    def node_of(address: str, process: int, number: int) -> Any:
        """A machine in a state."""
        return _NodeDesc(address, process, number)

    def stop_heartbeats(self) -> None:
        """Say nothing more to the others."""
        self.handler._stop_heartbeats()


def memory_events(profile: Any) -> list[list[int]]:
    """Of a profile that has ended, each allocation and release on the CPU: (unix nanoseconds, bytes, sum so far)."""
    found = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    total, rows = 0, []
    for event in sorted(found, key=lambda event: event.start_ns()):
        total += event.nbytes()
        rows.append([event.start_ns(), event.nbytes(), total])
    return rows


def record_memory(on: bool) -> None:
    """Let the GPU's allocator remember who asks for memory, or forget it again."""
    torch.cuda.memory._record_memory_history("all" if on else None, max_entries=1_000_000)


def memory_snapshot() -> dict[str, Any]:
    """What the GPU's allocator holds and remembers: plain tables and lists."""
    return dict(torch.cuda.memory._snapshot())
