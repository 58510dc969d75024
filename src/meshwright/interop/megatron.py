"""Reads the flags of a Megatron-LM run: --megatron-args FILE of `meshwright train` and `meshwright plan`.

`megatron_rules` has what single flags become; here are those that are read together: batches, the schedule, how the
work is split, files. The model's shape is in `megatron_shape`. No torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, nearest
from meshwright.interop.megatron_rules import RULES
from meshwright.interop.megatron_shape import read_shape
from meshwright.interop.rules import Kind
from meshwright.interop.translation import UNKNOWN, Around, Reading, Translation

DIALECT = "megatron"
Given = Mapping[str, Any]
_BY_KEY = {rule.key: rule for rule in RULES}
SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
SPLIT = "969,30,1"
INITIAL_POWER = 32
"""Megatron's own loss scale begins at two to this power."""
DEFAULTS = {
    "--weight-decay": ("train.weight_decay", 0.01),
    "--adam-beta2": ("train.beta2", 0.999),
    "--clip-grad": ("train.grad_clip", 1.0),
    "--seed": ("run.seed", 1234),
}
MIB = 1 << 20


def read_megatron(file: str | Path, around: Around) -> Translation:
    """What a file of flags says, in our settings."""
    return translate(_read(file), str(file), around)


def flags_of(file: str | Path) -> dict[str, tuple[str, ...]]:
    """The flags of a file as they stand in it, with their values."""
    return {flag: tuple(words) for flag, words in _flags(_read(file), str(file)).items()}


def _read(file: str | Path) -> str:
    try:
        return Path(file).read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"--megatron-args={file}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--megatron-args={file} cannot be read: {error}") from None


def translate(text: str, file: str, around: Around) -> Translation:
    """The same for the text of a file."""
    reading = Reading(DIALECT, file)
    given = _known(reading, _flags(text, file))
    for key, value in given.items():
        _BY_KEY[key].act(reading, key, value)
    read_shape(reading, given, around.config)
    _precision(reading, given)
    _parallel(reading, given)
    _recompute(reading, given)
    batch = _batches(reading, given, around)
    _schedule(reading, given, batch)
    _files(reading, given, batch)
    for key, (setting, value) in DEFAULTS.items():
        if key not in given:
            reading.assume(key, setting, value, "absent: Megatron's default")
    return reading.finish(around)


def _flags(text: str, file: str) -> dict[str, list[str]]:
    """Flags and their values, as a shell would pass them."""
    try:
        words = shlex.split(re.sub(r"\\[ \t]*\r?\n", " ", text), comments=True)
    except ValueError as error:
        raise ConfigError(f"{file} ({DIALECT}): {error}; close the quotation") from None
    found: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if "$" in word or "`" in word:
            raise ConfigError(f"{file} ({DIALECT}): '{word}' is for a shell to fill in; write its value")
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            if flag in found:
                raise ConfigError(f"{file} ({DIALECT}): {flag} is given twice; leave one of them out")
            found[flag] = [value] if equals else []
        elif not flag:
            raise ConfigError(
                f"{file} ({DIALECT}): it begins with '{word}'; keep the flags alone, such as --num-layers 24"
            )
        else:
            found[flag].append(word)
    return found


def _known(reading: Reading, flags: Mapping[str, list[str]]) -> dict[str, Any]:
    """Flags with values of their kinds; what is unknown is refused."""
    found: dict[str, Any] = {}
    for flag, words in flags.items():
        rule = _BY_KEY.get(flag)
        if rule is None:
            reading.refuse(flag, f"is no flag that is known here{nearest(flag, _BY_KEY)}; leave it out, or correct it")
            continue
        try:
            found[flag] = _value(rule.kind, words)
        except ValueError as error:
            reading.refuse(flag, f"{' '.join(words) or 'without a value'}: {error}")
    return found


def _value(kind: Kind, words: list[str]) -> Any:
    """The words after a flag as a value of its kind."""
    text = " ".join(words)
    if kind == "any":
        return words
    if kind == "bool":
        if words:
            raise ValueError("it takes no value")
        return True
    if not words:
        raise ValueError("a value is missing")
    if kind == "list":
        return words
    if kind == "text":
        return text
    try:
        number = float(text)
    except ValueError:
        raise ValueError("it takes a number") from None
    if kind == "int" and number != int(number):
        raise ValueError("it takes a whole number")
    return int(number) if kind == "int" else number


def _precision(reading: Reading, given: Given) -> None:
    """fp8 is an addition to bf16, and the loss scale begins elsewhere."""
    if "--fp8-format" in given:
        if "--fp16" in given:
            reading.refuse("--fp8-format", "goes with --bf16, and --fp16 is given")
            return
        reading.stated.pop("train.precision", None)
        reading.map("--fp8-format", given["--fp8-format"], "train.precision", "fp8")
    if "--fp16" in given and "--loss-scale" not in given and "--initial-loss-scale" not in given:
        reading.assume("--initial-loss-scale", "precision.initial_power", INITIAL_POWER, "absent: Megatron's default")


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
    if each in given and "--num-layers" in given:
        stages, left = divmod(given["--num-layers"], pp * given[each]) if given[each] > 0 else (0, 1)
        if left or not stages:
            reading.refuse(each, f"{given[each]} does not cut {given['--num-layers']} layers evenly over pp={pp}")
            return
    elif each in given:
        reading.refuse(each, "needs --num-layers beside it")
        return
    elif count in given:
        stages = given[count]
    else:
        return
    flag = each if each in given else count
    if stages < 2 or pp < 2:
        reading.leave(flag, given[flag], "there is one stage on each rank")
    else:
        reading.word(flag, given[flag], "schedule", f"interleaved:{stages}")


def _sharded(reading: Reading, given: Given) -> None:
    """What is sharded over data-parallel ranks."""
    kind, copies = "--data-parallel-sharding-strategy", "--num-distributed-optimizer-instances"
    optimizer = "--use-distributed-optimizer"
    fsdp = next((flag for flag in ("--use-megatron-fsdp", "--use-torch-fsdp2") if flag in given), None)
    stage = 0
    if fsdp is not None:
        asked = given.get(kind, "optim_grads_params") if fsdp == "--use-megatron-fsdp" else "optim_grads_params"
        if asked not in SHARDED:
            reading.refuse(kind, f"{asked} is not one of {', '.join(SHARDED)}")
            return
        stage = SHARDED[asked]
        reading.word(fsdp, True, "zero", stage)
        if kind in given:
            reading.word(kind, given[kind], "zero", stage)
        if optimizer in given:
            reading.leave(optimizer, True, f"{fsdp} says what is sharded")
    elif optimizer in given:
        stage = 1
        reading.word(optimizer, True, "zero", 1)
    if kind in given and fsdp is None:
        reading.leave(kind, given[kind], "it is for --use-megatron-fsdp")
    if fsdp is None and optimizer not in given:
        reading.word(optimizer, "", "zero", 0, "absent: nothing is sharded")
    if given.get(copies, 1) > 1 and stage:
        reading.word(copies, given[copies], "replicate", given[copies])
    elif copies in given:
        reading.leave(copies, given[copies], "every rank has its own copy of what is not sharded")


def _recompute(reading: Reading, given: Given) -> None:
    """Which activations are computed again."""
    grain, method, layers = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
    pp = given.get("--pipeline-model-parallel-size", 1)
    kind = given.get(grain, "selective" if "--recompute-activations" in given else None)
    if kind is None:
        for flag in {method, layers} & given.keys():
            reading.refuse(flag, f"needs {grain} full beside it")
        return
    if kind not in ("full", "selective"):
        reading.refuse(grain, f"{kind} is neither full nor selective")
        return
    flag = grain if grain in given else "--recompute-activations"
    if kind == "selective":
        note = "norms, activations and rotations are computed again; attention is kept by its kernel"
        reading.word(flag, given[flag], "recompute", "selective", note)
        for other in {method, layers} & given.keys():
            reading.leave(other, given[other], "selective is for all layers")
        return
    how = given.get(method, "uniform")
    if how == "block":
        number = given.get(layers, 1) * pp
        reading.word(
            flag, given[flag], "recompute", f"first:{number}", f"{given.get(layers, 1)} of each of {pp} stages"
        )
    elif how == "uniform":
        reading.word(flag, given[flag], "recompute", "full")
    else:
        reading.refuse(method, f"{how} is neither uniform nor block")
    if method in given:
        reading.leave(method, how, "recompute in parallel.strategy says it")
    if layers in given:
        note = "recompute in parallel.strategy says it" if how == "block" else "each layer keeps its own input"
        reading.leave(layers, given[layers], note)


def _batches(reading: Reading, given: Given, around: Around) -> int:
    """The global batch, which other flags count in."""
    micro, whole = given.get("--micro-batch-size"), given.get("--global-batch-size")
    if around.unknown and whole is None and micro is not None:
        reading.refuse("--global-batch-size", f"is absent, and {UNKNOWN}; add it")
        return 1
    data = 1 if around.unknown else around.data_ranks(reading.words)
    if micro is not None:
        reading.map("--micro-batch-size", micro, "train.micro_batch", micro)
    if whole is not None:
        reading.map("--global-batch-size", whole, "train.global_batch", whole)
        return max(1, int(whole))
    if micro is not None:
        note = f"absent: {micro} on each of {data} data-parallel ranks"
        reading.assume("--global-batch-size", "train.global_batch", micro * data, note)
        return max(1, int(micro) * data)
    return around.config.train.global_batch


def _schedule(reading: Reading, given: Given, batch: int) -> None:
    """Steps, and the learning rate of each."""
    steps = _counted(reading, given, "--train-iters", "--train-samples", "train.steps", batch)
    end = _counted(reading, given, "--lr-decay-iters", "--lr-decay-samples", "train.schedule_steps", batch)
    style = given.get("--lr-decay-style")
    if style is not None and style not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        reading.refuse("--lr-decay-style", f"{style} is refused{nearest(style, SCHEDULES)}: here are {known}")
    elif style == "WSD" and "--lr-wsd-decay-style" not in given:
        told = "WSD is refused: it decays exponentially by default, and linearly here; add --lr-wsd-decay-style linear"
        reading.refuse("--lr-decay-style", told)
    elif style is not None:
        reading.map("--lr-decay-style", style, "train.schedule", SCHEDULES[style])
    elif "--lr" in given:
        reading.assume("--lr-decay-style", "train.schedule", "linear", "absent: Megatron's default")
    if "--lr-wsd-decay-iters" in given:
        if style == "WSD":
            value = given["--lr-wsd-decay-iters"]
            reading.map("--lr-wsd-decay-iters", value, "train.decay_steps", value)
        else:
            reading.leave("--lr-wsd-decay-iters", given["--lr-wsd-decay-iters"], "it is for --lr-decay-style WSD")
    warm = _counted(reading, given, "--lr-warmup-iters", "--lr-warmup-samples", "train.warmup_steps", batch)
    if "--lr-warmup-fraction" in given:
        share, whole = given["--lr-warmup-fraction"], end or steps
        if warm is not None:
            reading.refuse("--lr-warmup-fraction", "and another flag both give the warm-up; leave one of them out")
        elif whole is None:
            reading.refuse("--lr-warmup-fraction", "is a share of --lr-decay-iters or --train-iters; add one of them")
        else:
            reading.map("--lr-warmup-fraction", share, "train.warmup_steps", round(share * whole), f"of {whole} steps")


def _counted(reading: Reading, given: Given, steps: str, samples: str, setting: str, batch: int) -> int | None:
    """A number of steps, which can be given in samples."""
    if steps in given and samples in given:
        reading.refuse(samples, f"and {steps} say the same; leave one of them out")
    if steps in given:
        reading.map(steps, given[steps], setting, given[steps])
        return int(given[steps])
    if samples in given:
        value = max(0, round(given[samples] / batch))
        reading.map(samples, given[samples], setting, value, f"{batch} samples in each step")
        return value
    return None


def _files(reading: Reading, given: Given, batch: int) -> None:
    """Data, checkpoints, evaluations, profiles."""
    if "--data-path" in given:
        _data(reading, given["--data-path"])
    split = given.get("--split", SPLIT)
    shares = [float(one) if re.fullmatch(r"\d+(\.\d+)?", one) else -1.0 for one in split.split(",")]
    if min(shares) < 0 or sum(shares) == 0 or not shares[0]:
        reading.refuse("--split", f"{split} is not three shares, such as 949,50,1")
    else:
        held = round(1 - shares[0] / sum(shares), 9)
        if "--split" in given:
            reading.map("--split", split, "data.validation", held, "what is not trained on")
        elif "--data-path" in given:
            reading.assume("--split", "data.validation", held, f"absent: Megatron's {SPLIT}")
    if "--load" in given:
        if given["--load"] == given.get("--save"):
            reading.leave("--load", given["--load"], "the same command goes on from the newest checkpoint")
        else:
            reading.refuse(
                "--load", "is not --save: a run goes on where it saves; weights to start from are model.from_hf"
            )
    if "--eval-iters" in given:
        value = given["--eval-iters"]
        reading.map("--eval-iters", value, "train.eval_sequences", value * batch, f"{batch} samples in each")
    first, past = given.get("--profile-step-start", 10), given.get("--profile-step-end", 12)
    if "--profile" in given:
        reading.map("--profile", True, "observe.profile_steps", f"{first}:{max(first, past - 1)}")
    for flag in {"--profile-step-start", "--profile-step-end"} & given.keys():
        on = "--profile" in given
        reading.leave(flag, given[flag], "observe.profile_steps has it" if on else "--profile is not given")


def _data(reading: Reading, words: list[str]) -> None:
    """One corpus, or several with their weights before them."""
    if len(words) == 1:
        reading.map("--data-path", words[0], "data.path", words[0])
        return
    pairs = list(zip(words[::2], words[1::2], strict=False))
    if len(words) % 2 or not all(
        re.fullmatch(r"\d*\.?\d+(e-?\d+)?", weight) and float(weight) > 0 for weight, _ in pairs
    ):
        reading.refuse("--data-path", f"{' '.join(words)}: give one prefix, or WEIGHT PREFIX for each of several")
        return
    mix = [{"path": path, "weight": float(weight)} for weight, path in pairs]
    reading.map("--data-path", " ".join(words), "data.mix", mix)
