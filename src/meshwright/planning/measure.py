"""The measurements of a calibration, as one rank makes them while others make the same: what it computes and moves.

Each is the time of many calls in a row, while all ranks of the crowd are at work, so that what they share (cores,
memory, a GPU's power) is in it. Of a few rounds the fastest counts: the others measure what else the machine does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.transfers import exchange
from meshwright.models.decoder import Decoder
from meshwright.models.spec import ModelSpec
from meshwright.parallel.torch_releases import all_gather_into, reduce_scatter_into
from meshwright.parallel.world import World

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = 64
"""Elements of the smallest tensor that collectives are measured with."""


@dataclass(frozen=True)
class Sizes:
    """What is measured on a kind of device."""

    dtypes: tuple[str, ...]
    products: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    """Samples, heads, tokens, head size."""
    copied: int
    """Bytes of a copy that is larger than caches."""
    layer: ModelSpec
    """Of a size at which what moves through memory shows."""
    tokens: int
    parameters: int
    """That the optimizer updates."""
    collectives: tuple[int, ...]
    """Bytes of tensors."""
    on_cpu: bool = False
    rounds: int = 3
    seconds: float = 0.05
    """Of a round."""


def decoder(width: int, layers: int = 2, head: int = 64, tokens: int = 4096, **more: Any) -> ModelSpec:
    """A plain decoder of that width."""
    heads = max(2, width // head)
    return ModelSpec(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width // heads,
        max_position_embeddings=tokens,
        **more,
    )


ON_CPU = Sizes(
    dtypes=("float32", "bf16"),
    products=((16, 64, 64), (64, 128, 128), (128, 256, 256), (256, 256, 768), (512, 512, 512), (768, 768, 1024)),
    attention=((2, 4, 32, 32), (2, 8, 128, 32), (1, 8, 512, 64)),
    copied=16 << 20,
    layer=decoder(256, head=32),
    tokens=512,
    parameters=4 << 20,
    collectives=(4 * SMALL, 256 << 10, 4 << 20),
    on_cpu=True,
    rounds=2,
)
ON_GPU = Sizes(
    dtypes=("bf16", "fp16", "float32"),
    products=(
        (128, 1024, 1024), (512, 1024, 4096), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096),
        (4096, 1024, 16384), (8192, 4096, 14336), (8192, 8192, 8192), (16384, 4096, 28672),
    ),
    attention=((8, 16, 256, 64), (4, 16, 1024, 64), (2, 32, 2048, 128), (1, 32, 8192, 128)),
    copied=1 << 30,
    layer=decoder(4096, head=128),
    tokens=8192,
    parameters=256 << 20,
    collectives=(4 * SMALL, 1 << 20, 64 << 20, 512 << 20),
    seconds=0.1,
)  # fmt: skip


class Bench:
    """Times work on this rank's device."""

    def __init__(self, world: World, sizes: Sizes) -> None:
        self.world, self.sizes, self.device = world, sizes, world.device

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call, when it is called again and again by all ranks at once."""
        work()
        self.wait()
        self._meet()
        best = float("inf")
        for _ in range(self.sizes.rounds):
            started, calls, batch = time.perf_counter(), 0, 1
            while True:
                for _ in range(batch):
                    work()
                self.wait()
                calls += batch
                spent = time.perf_counter() - started
                if spent >= self.sizes.seconds:
                    break
                batch = min(batch * 2, 64)
            best = min(best, spent / calls)
        return best

    def _meet(self) -> None:
        if self.world.size > 1:
            dist.barrier()

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random numbers: zeros cost some chips less power."""
        return torch.randn(*shape, device=self.device, dtype=dtype)


def computing(world: World, sizes: Sizes) -> dict[str, Any]:
    """Matrix products, attention, memory, layers, the optimizer."""
    bench = Bench(world, sizes)
    found: dict[str, Any] = {"memory": copy_speed(bench)}
    found["products"] = {
        dtype: [product_speed(bench, shape, dtype) for shape in sizes.products] for dtype in sizes.dtypes
    }
    found["attention"], found["attention_backward"] = {}, {}
    for dtype in sizes.dtypes:
        rows = [_attention(bench, shape, dtype) for shape in sizes.attention]
        found["attention"][dtype] = [(tokens, forward) for tokens, forward, _ in rows]
        found["attention_backward"][dtype] = [(tokens, backward) for tokens, _, backward in rows]
    found["layer_s"] = _layers(bench, decoder(64, layers=4, head=16), 4, sizes.dtypes[0])
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    found["experts_s"] = _layers(bench, decoder(64, layers=4, head=16, experts=experts), 4, sizes.dtypes[0])
    found["layers"] = {dtype: _layers(bench, sizes.layer, sizes.tokens, dtype) for dtype in sizes.dtypes}
    found["optimizer_s"] = _optimizer(bench)
    return found


def copy_speed(bench: Bench) -> float:
    """Bytes that a copy within the device's memory reads and writes in a second."""
    wide = bench.tensor(bench.sizes.copied // 4)
    target = torch.empty_like(wide)
    return 2 * wide.nbytes / bench.seconds(lambda: target.copy_(wide))


def product_speed(bench: Bench, shape: tuple[int, int, int], dtype: str) -> tuple[float, ...]:
    """The shape of a matrix product and the FLOP/s that it reaches."""
    rows, inner, outer = shape
    left = bench.tensor(rows, inner, dtype=DTYPES[dtype])
    weight = bench.tensor(outer, inner, dtype=DTYPES[dtype])
    return (*shape, 2 * rows * inner * outer / bench.seconds(lambda: F.linear(left, weight)))


def _attention(bench: Bench, shape: tuple[int, int, int, int], dtype: str) -> tuple[float, float, float]:
    samples, heads, tokens, size = shape
    q, k, v = (bench.tensor(*shape, dtype=DTYPES[dtype]).requires_grad_() for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        out = forward()
        torch.autograd.grad(out, (q, k, v), out)

    flops = 2 * samples * heads * tokens * tokens * size
    ahead = bench.seconds(forward)
    back = max(bench.seconds(both) - ahead, ahead / 2)
    return tokens, flops / ahead, 2.5 * flops / back


def _layers(bench: Bench, spec: ModelSpec, tokens: int, dtype: str) -> tuple[float, float]:
    """Seconds of a layer's forward and backward pass within a decoder, for one sequence of so many tokens."""
    with torch.device(bench.device):
        body = Decoder(spec).model.to(DTYPES[dtype])
    hidden = bench.tensor(1, tokens, spec.hidden_size, dtype=DTYPES[dtype]).requires_grad_()
    positions = torch.arange(tokens, device=bench.device)[None]
    layers = range(spec.num_hidden_layers)
    # Of the ends only the last norm is left: tokens are not looked up, and there is no head.

    def forward() -> Tensor:
        return body(torch.empty(1, tokens), positions, hidden_BTC=hidden, layers=layers)

    def both() -> None:
        # As in training, gradients are there already and are added to.
        forward().sum().backward()

    ahead = bench.seconds(forward)
    both()
    back = max(bench.seconds(both) - ahead, ahead)
    return ahead / len(layers), back / len(layers)


def _optimizer(bench: Bench) -> float:
    count = 8
    held = [torch.nn.Parameter(bench.tensor(bench.sizes.parameters // count)) for _ in range(count)]
    for one in held:
        one.grad = bench.tensor(bench.sizes.parameters // count)
    optimizer = torch.optim.AdamW(held, fused=True)
    # Norm, update, and the gradients emptied.

    def update() -> None:
        torch.nn.utils.get_total_norm([one.grad for one in held if one.grad is not None])
        optimizer.step()
        for one in held:
            if one.grad is not None:
                one.grad.zero_()

    return bench.seconds(update) / bench.sizes.parameters


def talking(world: World, sizes: Sizes, group_size: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of collectives by kind and bytes, between small products, in groups of that many ranks."""
    bench = Bench(world, sizes)
    groups = [dist.new_group(list(range(first, first + group_size))) for first in range(0, world.size, group_size)]
    group = groups[world.rank // group_size]
    size = 192 if world.device.type == "cpu" else 1024
    left = bench.tensor(size, size)
    alone = bench.seconds(lambda: left @ left)
    found = {}
    for kind in KINDS:
        rows = []
        for bytes_ in sizes.collectives:
            call = _collective(bench, kind, bytes_ // 4, group, group_size)
            rows.append((float(bytes_), _beside(bench, call, lambda: left @ left, alone, bytes_)))
        found[kind] = rows
    return found


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def _collective(bench: Bench, kind: str, elements: int, group: Any, size: int) -> Callable[[], object]:
    """A call that every rank of the group makes."""
    whole = torch.zeros(elements // size * size or size, device=bench.device)
    part = torch.zeros(len(whole) // size, device=bench.device)
    match kind:
        case "all_reduce":
            return lambda: dist.all_reduce(whole, group=group)
        case "all_gather":
            return lambda: all_gather_into(whole, part, group=group)
        case "reduce_scatter":
            return lambda: reduce_scatter_into(part, whole, group=group)
        case "all_to_all":
            given = torch.zeros_like(whole)
            return lambda: dist.all_to_all_single(given, whole, group=group)
        case _:
            own = dist.get_rank(group)
            given = torch.zeros_like(whole)
            return lambda: exchange(whole, (own + 1) % size, given, (own - 1) % size, group).wait()


def _beside(bench: Bench, call: Callable[[], object], work: Callable[[], object], alone: float, bytes_: float) -> float:
    """What a collective adds to the work that it comes between."""
    calls = 10 if bytes_ < 1 << 16 else 5 if bytes_ < 1 << 20 else 3
    call()
    best = float("inf")
    for _ in range(bench.sizes.rounds):
        bench.wait()
        dist.barrier()
        started = time.perf_counter()
        for _ in range(calls):
            work()
            call()
        bench.wait()
        best = min(best, (time.perf_counter() - started) / calls)
    return max(best - alone, 1e-6)
