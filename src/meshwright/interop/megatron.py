"""Reads the flags of a Megatron-LM run: --megatron-args FILE of `meshwright train` and `meshwright plan`.

`megatron_rules` has what single flags become; here are those that are read together: the optimizer, batches, the
schedule, files. The model's shape is in `megatron_shape`, how the work is split in `megatron_split`. No torch.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import ConfigError, nearest
from meshwright.interop.megatron_rules import RULES
from meshwright.interop.megatron_shape import read_shape
from meshwright.interop.megatron_split import read_strategy
from meshwright.interop.rules import Kind, fitting
from meshwright.interop.translation import UNKNOWN, Around, Reading, Translation

DIALECT = "megatron"
Given = Mapping[str, Any]
_BY_KEY = {rule.key: rule for rule in RULES}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
SPLIT = "969,30,1"
INITIAL_POWER = 32
"""Megatron's own loss scale begins at two to this power."""
EVAL_INTERVAL = 1000
"""Megatron's own up to 0.15; later ones have none, and do not start with --eval-iters alone."""
OPTIMIZERS = {
    "adam": {"--adam-beta1": "train.beta1", "--adam-beta2": "train.beta2", "--adam-eps": "train.eps"},
    "sgd": {"--sgd-momentum": "train.beta1"},
}
"""The flags of each, which are settings of ours."""
DEFAULTS = {
    "--weight-decay": ("train.weight_decay", 0.01),
    "--clip-grad": ("train.grad_clip", 1.0),
    "--seed": ("run.seed", 1234),
}


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
    _optimizer(reading, given)
    _precision(reading, given)
    read_strategy(reading, given, around.settled)
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
        reading.given.add(flag)
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
        # A whole number of many digits is none of floating point.
        number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,30}", text) else float(text)
    except ValueError:
        raise ValueError("it takes a number") from None
    try:
        return fitting(kind, number)
    except ValueError as error:
        raise ValueError(f"it takes {str(error).removeprefix('must be ')}") from None


def _optimizer(reading: Reading, given: Given) -> None:
    """What belongs to the one that is used."""
    used = given.get("--optimizer", "adam")
    for name, flags in OPTIMIZERS.items():
        for flag, setting in flags.items():
            if flag in given and name == used:
                reading.map(flag, given[flag], setting, given[flag])
            elif flag in given:
                reading.leave(flag, given[flag], f"the optimizer is {used}")
    if used == "adam" and "--adam-beta2" not in given:
        reading.assume("--adam-beta2", "train.beta2", 0.999, "absent: Megatron's default")


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
        elif not 0 <= share <= 1:
            reading.refuse("--lr-warmup-fraction", f"{share:g} is no share; use one from 0 to 1")
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
    shares = [float(one) if re.fullmatch(r"[0-9]{1,18}(\.[0-9]+)?", one) else -1.0 for one in split.split(",")]
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
        if "--eval-interval" not in given:
            note = "absent: Megatron's default up to 0.15; later ones need it"
            reading.assume("--eval-interval", "train.eval_every", EVAL_INTERVAL, note)
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
        re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", weight) and 0 < float(weight) < math.inf for weight, _ in pairs
    ):
        reading.refuse("--data-path", f"{' '.join(words)}: give one prefix, or WEIGHT PREFIX for each of several")
        return
    mix = [{"path": path, "weight": float(weight)} for weight, path in pairs]
    reading.map("--data-path", " ".join(words), "data.mix", mix)
