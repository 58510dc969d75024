"""The strategy by the flags of a Megatron-LM run: degrees, stages, shards, what is computed again. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.interop.translation import Reading

Given = Mapping[str, Any]
SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
MIB = 1 << 20


def read_strategy(reading: Reading, given: Given, settled: bool) -> None:
    """Put the words together; `settled` is whether the command line has a strategy that counts instead."""
    _parallel(reading, given)
    _recompute(reading, given, settled)


def _parallel(reading: Reading, given: Given) -> None:
    """The words of the strategy."""
    sizes = {
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "cp": "--context-parallel-size",
        "ep": "--expert-model-parallel-size",
    }
    degrees = {name: given.get(flag, 1) for name, flag in sizes.items()}
    for name, flag in sizes.items():
        if degrees[name] < 1:
            reading.refuse(flag, f"{degrees[name]} is not a degree; use a whole number from 1")
        elif flag in given:
            reading.word(flag, given[flag], name, degrees[name])
    _experts(reading, given, degrees["tp"])
    if degrees["tp"] > 1:
        on = "--sequence-parallel" in given
        reading.word("--sequence-parallel", on or "", "sp", "on" if on else "off", "" if on else "absent")
    elif "--sequence-parallel" in given:
        reading.leave("--sequence-parallel", True, "there is one tensor-parallel rank")
    _interleaved(reading, given, degrees["pp"])
    method = given.get("--cp-comm-type")
    ours = {"p2p": "ring", "allgather": "ring", "a2a": "ulysses"}.get(str(method))
    if method is not None and ours is None:
        reading.refuse("--cp-comm-type", f"{method} is refused: p2p is cp_method=ring, a2a is ulysses")
    elif method is not None and degrees["cp"] == 1:
        reading.leave("--cp-comm-type", method, "sequences are not split")
    elif method is not None:
        reading.word("--cp-comm-type", method, "cp_method", ours)
    _sharded(reading, given)
    if "--optimizer-cpu-offload" in given:
        reading.word("--optimizer-cpu-offload", True, "offload", "optimizer")
    if "--ddp-bucket-size" in given:
        size = given["--ddp-bucket-size"]
        if size < 1:
            reading.refuse("--ddp-bucket-size", f"{size} must be a whole number from 1")
            return
        reading.map("--ddp-bucket-size", size, "comm.bucket_mb", size * 4 / MIB, "4 bytes for each element")


def _experts(reading: Reading, given: Given, tp: int) -> None:
    flag = "--expert-tensor-parallel-size"
    if flag in given and given[flag] != tp:
        reading.refuse(flag, f"{given[flag]} is refused: tp={tp} splits experts as well; give that, or leave it out")
    elif flag in given:
        reading.leave(flag, given[flag], "tp splits experts as well")


def _interleaved(reading: Reading, given: Given, pp: int) -> None:
    """Several stages on each rank."""
    each, count = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    if each in given and count in given:
        reading.refuse(count, f"and {each} both say how many stages a rank has; leave one of them out")
        return
    if each in given and "--num-layers" not in given:
        reading.refuse(each, "needs --num-layers beside it")
        return
    flag = each if each in given else count
    if flag not in given or pp < 1:
        return
    stages = _chunks(given, pp)
    if stages is None:
        reading.refuse(each, f"{given[each]} does not cut {given['--num-layers']} layers evenly over pp={pp}")
    elif stages < 2 or pp < 2:
        reading.leave(flag, given[flag], "there is one stage on each rank")
    else:
        reading.word(flag, given[flag], "schedule", f"interleaved:{stages}")


def _chunks(given: Given, pp: int) -> int | None:
    """How many stages each rank has; None where layers are not cut evenly."""
    each = given.get("--num-layers-per-virtual-pipeline-stage")
    if each is None:
        return int(given.get("--num-virtual-stages-per-pipeline-rank", 1))
    stages, left = divmod(given["--num-layers"], pp * each) if each > 0 else (0, 1)
    return None if left or stages < 1 else stages


def _sharded(reading: Reading, given: Given) -> None:
    """What is sharded over data-parallel ranks."""
    kind, copies = "--data-parallel-sharding-strategy", "--num-distributed-optimizer-instances"
    megatron, torch, optimizer = "--use-megatron-fsdp", "--use-torch-fsdp2", "--use-distributed-optimizer"
    if megatron in given and torch in given:
        reading.refuse(torch, f"and {megatron} are two ways to shard; leave one of them out")
        return
    fsdp = next((flag for flag in (megatron, torch) if flag in given), None)
    stage = 0
    if fsdp is not None:
        asked = given.get(kind, "optim_grads_params") if fsdp == megatron else "optim_grads_params"
        if asked not in SHARDED:
            reading.refuse(kind, f"{asked} is not one of {', '.join(SHARDED)}")
            return
        stage = SHARDED[asked]
        reading.word(fsdp, True, "zero", stage)
        if kind in given and fsdp == megatron:
            reading.word(kind, given[kind], "zero", stage)
        if optimizer in given:
            reading.leave(optimizer, True, f"{fsdp} says what is sharded")
    elif optimizer in given:
        stage = 1
        reading.word(optimizer, True, "zero", 1)
    if kind in given and fsdp != megatron:
        reading.leave(kind, given[kind], f"it is for {megatron}")
    if fsdp is None and optimizer not in given:
        reading.word(optimizer, "", "zero", 0, "absent: nothing is sharded")
    if given.get(copies, 1) > 1 and stage:
        reading.word(copies, given[copies], "replicate", given[copies])
    elif copies in given:
        reading.leave(copies, given[copies], "every rank has its own copy of what is not sharded")


def _recompute(reading: Reading, given: Given, settled: bool) -> None:
    """Which activations are computed again."""
    grain, method, layers = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
    short = "--recompute-activations"
    kind = "selective" if short in given else given.get(grain)
    if kind not in (None, "full", "selective"):
        reading.refuse(grain, f"{kind} is neither full nor selective")
        return
    if kind != "full":
        for flag in sorted({method, layers} & given.keys()):
            beside = "selective, as Megatron refuses it" if kind else f"without {grain} full"
            reading.refuse(flag, f"needs {grain} full beside it, and is {beside}; leave it out")
    if kind == "selective":
        note = "norms, activations and rotations are computed again; attention is kept by its kernel"
        flag = short if short in given else grain
        reading.word(flag, given[flag], "recompute", "selective", note)
        if flag == short and grain in given:
            reading.leave(grain, given[grain], f"{short} makes it selective, as in Megatron")
    elif kind == "full":
        _full(reading, given, settled)


def _full(reading: Reading, given: Given, settled: bool) -> None:
    """Whole layers: all of them, or the first ones."""
    grain, method, layers = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
    how, number = given.get(method, "uniform"), given.get(layers, 1)
    if how not in ("uniform", "block"):
        reading.refuse(method, f"{how} is neither uniform nor block")
        return
    if number < 1:
        reading.refuse(layers, f"{number} must be a whole number from 1")
        return
    if how == "block" and layers not in given:
        reading.refuse(layers, f"is missing: {method} block needs it in Megatron, too")
        return
    said = "recompute in parallel.strategy says it"
    if how == "uniform":
        reading.word(grain, "full", "recompute", "full")
        note = "each layer keeps its own input"
    elif _whole_stages(given):
        reading.word(grain, "full", "recompute", "full", "block has all layers of every stage")
        note = said
    elif given.get("--pipeline-model-parallel-size", 1) > 1:
        if settled:
            for flag in sorted({grain, method, layers} & given.keys()):
                reading.leave(flag, given[flag], "parallel.strategy of the command line says it")
            return
        reading.refuse(
            method,
            f"block computes {number} layers of every stage again, and recompute=first:N here the first N of the whole "
            f"model, all on the first stages; use {method} uniform (all layers) or {grain} selective, or give "
            "parallel.strategy on the command line",
        )
        return
    else:
        reading.word(grain, "full", "recompute", f"first:{number}")
        note = said
    if method in given:
        reading.leave(method, how, said)
    if layers in given:
        reading.leave(layers, number, note)


def _whole_stages(given: Given) -> bool:
    """Whether so many layers are computed again as a stage has."""
    pp, whole = given.get("--pipeline-model-parallel-size", 1), given.get("--num-layers")
    if whole is None or pp < 1:
        return False
    # One stage on each rank of a single one, whatever the flags say.
    stages = pp * ((_chunks(given, pp) or 1) if pp > 1 else 1)
    return bool(given["--recompute-num-layers"] * stages >= whole)
