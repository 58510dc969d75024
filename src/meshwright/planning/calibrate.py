"""`meshwright plan --calibrate`: measures this machine and keeps what it found for later plans. Needs torch.

On CPU cores it is done with 1, 2, 4 and 8 ranks that share them, on GPUs with one and with all of the machine. A rank
measures what it computes and moves (`measure.py`), then what exchanges cost: collectives between other work, and what
each axis adds to the training of a tiny decoder by the trainer's own step.
"""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright.cluster.calibration import CROWDS, Calibration, Speeds, between, read_calibration, write_calibration
from meshwright.cluster.cluster import chip_named, cores_here
from meshwright.errors import UserError
from meshwright.models.spec import Experts, ModelSpec
from meshwright.parallel.world import World, join_world, visible_gpus
from meshwright.planning import measure
from meshwright.planning.blocks import layer_work
from meshwright.planning.measure import ON_CPU, ON_GPU, Sizes
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool

LAYERS, TOKENS, STEPS = 4, 16, 4
MORE_MICRO_STEPS = 4
SPEEDS = ("products", "attention", "attention_backward", "memory")
TINY = ModelSpec(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=8,
    max_position_embeddings=TOKENS,
)
TINY_EXPERTS = TINY.model_copy(
    update={"experts": Experts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)}
)
Say = Callable[[str], None]
Run = Callable[..., list[Any]]
"""Gives what some work found on each of the ranks."""


def calibrate(
    device: str = "auto",
    say: Say = lambda line: None,
    crowds: Sequence[int] = CROWDS,
    on_cpu: Sizes = ON_CPU,
) -> tuple[Calibration, Path]:
    """Measure this machine's GPUs, or its cores where it has none; store it, and say where."""
    started = time.perf_counter()
    use_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    chip, speeds = _gpus(say) if use_gpu else ("cpu", _cores(say, crowds, on_cpu))
    when = datetime.now(UTC).isoformat(timespec="seconds")
    kept, _ = read_calibration(chip)
    lines = kept.lines if kept is not None else ()
    found = Calibration(socket.gethostname(), chip, torch.__version__, when, speeds, lines)
    say(f"took {time.perf_counter() - started:.0f} s")
    return found, write_calibration(found)


def lines_of(found: Calibration) -> list[str]:
    """What was found, for people."""
    lines = []
    for ranks, speeds in found.crowds.items():
        lines.append(f"{ranks} at once, each:" if ranks > 1 else "one alone:")
        for dtype, rows in speeds.products.items():
            told = ", ".join(f"{row[0]:.0f}x{row[1]:.0f}x{row[2]:.0f} {row[3] / 1e12:.3g}" for row in rows)
            lines.append(f"  products {dtype}: {told} TFLOP/s")
            for name, points in (("", speeds.attention), (" backward", speeds.attention_backward)):
                told = ", ".join(f"{row[0]:.0f} tokens {row[1] / 1e12:.3g}" for row in points[dtype])
                lines.append(f"  attention{name} {dtype}: {told} TFLOP/s")
        told = ", ".join(f"{dtype} {one:.1f}" for dtype, one in speeds.passes.items())
        lines.append(f"  memory: {speeds.memory / 1e9:.4g} GB/s; passes through it over the least: {told}")
        lines.append(
            f"  a layer takes at least {1e6 * speeds.layer_s[0]:.0f} + {1e6 * speeds.layer_s[1]:.0f} us, with experts "
            f"{1e6 * speeds.experts_s[0]:.0f} + {1e6 * speeds.experts_s[1]:.0f} us; "
            f"a step {1e3 * speeds.step_s:.1f} ms, a micro-step {1e3 * speeds.micro_s:.1f} ms beside that; "
            f"the optimizer {1e9 * speeds.optimizer_s:.3g} ns a parameter"
        )
        for kind, groups in speeds.collectives.items():
            told = "; ".join(
                f"{size}: " + ", ".join(f"{row[0] / 1024:.4g} KiB {1e6 * row[1]:.0f}" for row in rows)
                for size, rows in groups.items()
            )
            lines.append(f"  {kind}, us by ranks: {told}")
        if speeds.axes:
            told = "; ".join(
                f"{axis} " + ", ".join(f"{size}: {1e6 * one:.0f}" for size, one in of.items())
                for axis, of in speeds.axes.items()
            )
            lines.append(f"  an exchange within training, us by ranks: {told}")
    return lines


def _cores(say: Say, crowds: Sequence[int], on_cpu: Sizes) -> dict[int, Speeds]:
    """All crowds. What ranks compute is measured again before each: what else a machine does comes and goes."""
    cores = cores_here()
    # More ranks than cores take turns, in equal shares: what they compute follows.
    computing = [ranks for ranks in crowds if ranks <= cores or ranks == min(crowds)]
    computed: dict[int, Any] = {}
    exchanged: dict[int, Any] = {}
    with RankPool(max(crowds)) as pool:
        for turn in crowds:
            say(f"{turn} {'rank' if turn == 1 else 'ranks at once'}: what they compute, move and exchange")
            for ranks in computing:
                sizes = on_cpu if ranks == 1 else replace(on_cpu, dtypes=("float32",))
                once = _typical(pool.run(measure.computing, ranks, sizes))
                computed[ranks] = _better(computed[ranks], once) if ranks in computed else once
            exchanged[turn] = _exchanges(partial(_on_pool, pool, turn), turn, on_cpu)
    found: dict[int, Speeds] = {}
    for ranks in crowds:
        if ranks in computed:
            sizes = on_cpu if ranks == 1 else replace(on_cpu, dtypes=("float32",))
            speeds = _computed(computed[ranks], sizes)
            speeds = _with_all_dtypes(speeds, found[1]) if 1 in found else speeds
        else:
            most = max(found)
            speeds = found[most].scaled(ranks / max(most, cores))
        found[ranks] = _with_exchanges(speeds, ranks, exchanged[ranks])
    return found


def _with_all_dtypes(few: Speeds, alone: Speeds) -> Speeds:
    """Crowds are measured in one dtype; sharing cores slows the others as much."""

    def slowed(name: str) -> dict[str, Any]:
        own, other = getattr(few, name)["float32"], getattr(alone, name)
        pairs = {dtype: zip(rows, own, other["float32"], strict=True) for dtype, rows in other.items()}
        return {
            dtype: tuple((*row[:-1], row[-1] * mine[-1] / before[-1]) for row, mine, before in rows)
            for dtype, rows in pairs.items()
        }

    return replace(
        few,
        products=slowed("products"),
        attention=slowed("attention"),
        attention_backward=slowed("attention_backward"),
        passes={**alone.passes, **few.passes},
    )


def _on_pool(pool: RankPool, ranks: int, work: Callable[..., Any], *inputs: Any) -> list[Any]:
    return pool.run(work, ranks, *inputs)


def _gpus(say: Say) -> tuple[str, dict[int, Speeds]]:
    name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory / 2**20
    chip = chip_named(name, memory)
    if chip is None:
        raise UserError(f"{name} is in no table of chips, so no plan could use what is measured; see docs/plan.md")
    say(f"one {chip.name}: products, attention, memory, layers")
    crowds = {1: _crowd(_in_this_process, 1, ON_GPU)}
    count = visible_gpus()
    if count > 1:
        say(f"{count} at once: the same, and collectives")
        crowds[count] = _crowd(partial(_on_gpus, count), count, ON_GPU)
    return chip.key, crowds


def _in_this_process(work: Callable[..., Any], *inputs: Any) -> list[Any]:
    with join_world("cuda", 120.0) as world:
        return [work(world, *inputs)]


def _on_gpus(count: int, work: Callable[..., Any], *inputs: Any) -> list[Any]:
    """On a rank for each GPU, started for this."""
    from meshwright.launch.local import run_ranks

    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        run_ranks(partial(_write_result, folder, work, inputs), count, device="cuda", timeout_s=300.0)
        return [json.loads((Path(folder) / str(rank)).read_text(encoding="utf-8")) for rank in range(count)]


def _write_result(folder: str, work: Callable[..., Any], inputs: tuple[Any, ...], world: World) -> None:
    (Path(folder) / str(world.rank)).write_text(json.dumps(work(world, *inputs)), encoding="utf-8")


def _crowd(run: Run, ranks: int, sizes: Sizes) -> Speeds:
    """What each of that many GPUs reaches."""
    computed = _computed(_typical(run(measure.computing, sizes)), sizes)
    speeds = _with_exchanges(computed, ranks, _exchanges(run, ranks, sizes))
    # A GPU waits for its host or does not: what a micro-step costs more than its layers is put to them.
    factor = 1 + speeds.micro_s / (LAYERS * sum(speeds.layer_s))
    layer_s, experts_s = (tuple(one * factor for one in held) for held in (speeds.layer_s, speeds.experts_s))
    return replace(speeds, layer_s=layer_s, experts_s=experts_s, micro_s=0.0)


def _exchanges(run: Run, ranks: int, sizes: Sizes) -> dict[str, Any]:
    """Seconds of collectives and of steps, as they were found."""
    collectives: dict[str, dict[str, Any]] = {}
    for group in _groups(ranks):
        for kind, rows in _typical(run(measure.talking, sizes, group)).items():
            collectives.setdefault(kind, {})[str(group)] = rows
    precision = "float32" if sizes.on_cpu else "bf16"
    cases = _cases(ranks, sizes.on_cpu)
    steps = {name: max(run(timed, _case(name, text, ranks, precision))) for name, text in cases.items()}
    return {"collectives": collectives, "steps": steps}


def _groups(ranks: int) -> list[int]:
    return [1 << power for power in range(1, ranks.bit_length()) if ranks % (1 << power) == 0]


def _better(one: Any, other: Any, fast: bool = False) -> Any:
    """Of every number in two sets of findings the better one: the larger speed, the shorter time."""
    if isinstance(one, dict):
        return {key: _better(one[key], other[key], fast or key in SPEEDS) for key in one}
    if isinstance(one, list | tuple):
        # What a row is about is the same in both.
        return tuple(_better(mine, theirs, fast) for mine, theirs in zip(one, other, strict=True))
    return max(one, other) if fast else min(one, other)


def _computed(found: dict[str, Any], sizes: Sizes) -> Speeds:
    """What ranks compute and move."""
    layers = found["layers"]
    passes = {dtype: _passes(found, sizes, dtype, layers[dtype]) for dtype in sizes.dtypes}
    held = {name: value for name, value in found.items() if name != "layers"}
    return Speeds(ranks=1, passes=passes, step_s=0.0, micro_s=0.0, collectives={}, axes={}, **held)


def _with_exchanges(computed: Speeds, ranks: int, raw: dict[str, Any]) -> Speeds:
    """The same with what was found of collectives and of whole steps."""
    step_s, micro_s, axes = _axes(raw["steps"], computed)
    collectives = {
        kind: {size: tuple(tuple(row) for row in rows) for size, rows in groups.items()}
        for kind, groups in raw["collectives"].items()
    }
    return replace(computed, ranks=ranks, step_s=step_s, micro_s=micro_s, collectives=collectives, axes=axes)


def _typical(answers: list[Any]) -> Any:
    """The median over ranks of every number in what they found."""
    first = answers[0]
    if isinstance(first, dict):
        return {key: _typical([one[key] for one in answers]) for key in first}
    if isinstance(first, list | tuple):
        return tuple(_typical(list(values)) for values in zip(*answers, strict=True))
    return statistics.median(answers)


def _passes(found: dict[str, Any], sizes: Sizes, dtype: str, seconds: tuple[float, float]) -> float:
    """How often a layer's activations go through memory: what its products, attention and the host do not explain."""
    spec, tokens = sizes.layer, sizes.tokens
    work = layer_work(spec, False, tokens, tokens, 1, False, 1, 1, 1.0)
    points = [(rows * inner * outer, speed) for rows, inner, outer, speed in found["products"][dtype]]
    points.sort()
    products = sum(
        2 * one.rows * one.inner * one.outer / between(points, one.rows * one.inner * one.outer)
        for one in work.products
    )
    forward = work.attention_flops / between(found["attention"][dtype], tokens)
    backward = 2.5 * work.attention_flops / between(found["attention_backward"][dtype], tokens)
    # A GPU's host runs ahead where there is enough to compute; a core does one thing after the other.
    host = found["layer_s"] if sizes.on_cpu else (0.0, 0.0)
    left = sum(seconds) - 3 * products - forward - backward - sum(host)
    # The backward pass reads and writes twice as much.
    once = 3 * work.moved * (4 if dtype == "float32" else 2) / found["memory"]
    return max(1.0, left / once)


# ---- what axes add to training


def _cases(ranks: int, on_cpu: bool) -> dict[str, str]:
    """Trainings of a tiny decoder that differ in one thing."""
    cases = {"plain": f"dp={ranks}", "longer": f"dp={ranks}", "experts": f"dp={ranks}"}
    # Between GPUs of one machine an exchange is its collective; the host is not in the way.
    if ranks > 1 and on_cpu:
        cases[f"shard {ranks}"] = f"dp={ranks} zero=3 wrap=block"
        # Between the smallest and the largest group the others can be told.
        for group in sorted({_groups(ranks)[0], _groups(ranks)[-1]}):
            others = f"dp={ranks // group}"
            cases[f"tp {group}"] = f"{others} tp={group} sp=off"
            cases[f"sp {group}"] = f"{others} tp={group} sp=on"
            cases[f"ring {group}"] = f"{others} cp={group}"
            cases[f"ulysses {group}"] = f"{others} cp={group} cp_method=ulysses"
            cases[f"ep {group}"] = f"dp={ranks} ep={group}"
    return cases


def _axes(seconds: dict[str, float], computed: Speeds) -> tuple[float, float, dict[str, dict[str, float]]]:
    """What a step and a micro-step cost beside their layers, and what each axis adds for an exchange."""
    layers = LAYERS * sum(computed.layer_s)
    micro_s = max(0.0, (seconds["longer"] - seconds["plain"]) / (MORE_MICRO_STEPS - 1) - layers)
    step_s = max(0.0, seconds["plain"] - layers - micro_s)
    # Exchanges of a layer, forward and backward; every case has one micro-step.
    per_layer = {"shard": 3.0, "tp": 4.0, "sp": 8.0, "ulysses": 4.0, "ep": 5.0}
    axes: dict[str, dict[str, float]] = {}
    for name in seconds:
        axis, _, group = name.partition(" ")
        if not group:
            continue
        base = seconds["experts" if axis == "ep" else "plain"]
        # A ring has a step for each of its ranks forward and three backward.
        each = 4.0 * int(group) if axis == "ring" else per_layer[axis]
        axes.setdefault(axis, {})[group] = max(1e-6, (seconds[name] - base) / (LAYERS * each))
    return step_s, micro_s, axes


def _case(name: str, text: str, ranks: int, precision: str) -> Case:
    from meshwright.strategy import Strategy

    spec = TINY_EXPERTS if name.startswith(("experts", "ep")) else TINY
    micro_steps = MORE_MICRO_STEPS if name == "longer" else 1
    batch = Strategy.parse(text, ranks).dp * micro_steps
    return Case(spec, text, ranks, precision, micro_steps, STEPS, batch, TOKENS)


def timed(world: World, case: Case) -> float:
    """Seconds of the fastest step of a case on this rank, the first one not counted."""
    step = step_of(world, case)
    best = float("inf")
    for number in range(case.steps):
        batch = batch_of(case, number, step.data_rank, step.strategy)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        started = time.perf_counter()
        step(number, batch)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        if number:
            best = min(best, time.perf_counter() - started)
    return best
