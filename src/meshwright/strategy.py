"""Strategy: what is split and how many ways. Parse, format, check; the only place that knows what is legal.

The short form is what people read and type: `dp=8 zero=3 tp=2`. Left-out degrees are filled in.

    world       = pp x dp x cp x tp
    dp          = replicate x shard: copies of the model, and ranks that share one copy; auto takes what is left
    zero        = 0 nothing is sharded (shard=1), 1 optimizer state, 2 gradients too, 3 parameters too
    tp, sp      = ranks that split every matrix; sp=on (the default with tp) splits the tokens between matrices too
    pp          = ranks that hold the layers one after the other; schedule=1f1b; layers=even, balanced or 3+5 a stage
    cp          = ranks that split every sequence; cp_method=ring, ulysses or ulysses:N
    ep          = ranks that split the experts; divides dp
    shares      = even, or how the samples are dealt out: 3+1 gives the first half of the dp ranks three times as many
    recompute   = none, full, selective, first:N, budget:F; activations that the backward pass computes again
    offload     = none, optimizer or parameters (with its state), activations; what lives in host memory. Activations
                go with either: optimizer+activations
    wrap        = auto (layers, small ones with their neighbours), block, size:N, name:A+B; what is gathered together
                with zero=2 and 3
    compress    = none, fp16, bf16, int8, powersgd:N (columns), topk:F (share); how gradients are made smaller for their
                way, with nothing but dp
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

from meshwright.errors import ConfigError, nearest
from meshwright.known_names import in_our_words
from meshwright.schedules import splits_backward, stages_per_rank
from meshwright.strategy_fit import check_fit, divisors, listed, refuse

if TYPE_CHECKING:
    from meshwright.models.spec import ModelSpec

AUTO = "auto"
DEGREES = ("dp", "replicate", "shard", "tp", "pp", "cp", "ep")
SCHEDULES = ("gpipe", "1f1b", "interleaved:N", "zero-bubble", "zbv")
CP_METHODS = ("ring", "ulysses", "ulysses:N")
RECOMPUTE = ("none", "full", "selective", "first:N", "budget:F")
OFFLOAD = ("none", "optimizer", "parameters", "activations", "optimizer+activations", "parameters+activations")
WRAP = ("auto", "block", "size:N", "name:A+B")
LAYERS = ("even", "balanced", "N+N")
SHARES = ("even", "N+N")
COMPRESS = ("none", "fp16", "bf16", "int8", "powersgd:N", "topk:F")
_SHARES = {"budget": 0.5, "topk": 0.01}
"""Of choices that take one, to show how it is written."""
WHOLE_PARAMETERS = ("adafactor",)
"""Optimizers whose update of an element depends on others of its parameter."""
CHOICES = {
    "schedule": SCHEDULES,
    "layers": LAYERS,
    "cp_method": CP_METHODS,
    "recompute": RECOMPUTE,
    "offload": OFFLOAD,
    "wrap": WRAP,
    "shares": SHARES,
    "compress": COMPRESS,
}
KEYS = (*DEGREES, "zero", "sp", *CHOICES)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the work of a step is split. `parse` fills it in consistently; `check` says what a model cannot take."""

    pp: int = 1
    """Stages of layers, one after the other."""
    replicate: int = 1
    """Copies of the model."""
    shard: int = 1
    """Ranks that share the state of one copy."""
    cp: int = 1
    """Ranks that split every sequence."""
    tp: int = 1
    """Ranks that split every matrix."""
    ep: int = 1
    """Data-parallel ranks that split the experts among them."""
    zero: int = 0
    """What is sharded: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters."""
    sp: bool = False
    """Whether tensor-parallel ranks split the tokens between the matrices."""
    schedule: str = "1f1b"
    """The order of micro-batches in a pipeline."""
    layers: str = "even"
    """Layers of each pipeline stage: even, balanced (by cost, the head counted), or their numbers (3+5)."""
    cp_method: str = "ring"
    """How split sequences attend to each other."""
    recompute: str = "none"
    """Which activations are computed again in the backward pass: none, full, selective, first:N (layers), budget:F
    (compiled layers keep that share of their activations, those that are dearest to compute for their size)."""
    offload: str = "none"
    """What lives in host memory: none, optimizer (its state), parameters (and the optimizer's state), activations (that
    wait for their backward pass); these go with either of the others: optimizer+activations."""
    wrap: str = "auto"
    """What is gathered together under zero=2 and 3: auto (each layer, small ones with their neighbours), block (each
    layer), size:N (at least N parameters), name:A+B (modules)."""
    shares: str = "even"
    """How the samples of every micro-step are dealt out to the data-parallel ranks: even, or numbers, each for as many
    consecutive ranks as the others (3+1: the first half of them gets three times what the second half gets)."""
    compress: str = "none"
    """How gradients are made smaller for their way between data-parallel ranks that hold all parameters: none, fp16,
    bf16, int8 (a scale for every 256), powersgd:N (matrices as products with N columns), topk:F (the largest ones)."""

    def __post_init__(self) -> None:
        for key in ("pp", "replicate", "shard", "cp", "tp", "ep"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key}={getattr(self, key)} is not a degree; use a whole number from 1")
        if self.zero not in range(4):
            raise ConfigError(f"zero={self.zero} is not a stage; stages are 0, 1, 2 and 3")
        if self.zero == 0 and self.shard > 1:
            raise ConfigError(f"shard={self.shard} needs something to shard; add zero=1, 2 or 3")
        if self.sp and self.tp == 1:
            raise ConfigError("sp=on splits tokens over tensor-parallel ranks; add tp=2, or drop it")
        if self.ep > 1 and self.ep not in self.expert_degrees:
            shards = "" if self.shard in (1, self.dp) else f" and divide or be divisible by shard={self.shard}"
            raise ConfigError(f"ep={self.ep} must divide dp={self.dp}{shards}; ep can be {listed(self.expert_degrees)}")
        turned = "+".join(reversed(self.offload.split("+")))
        if turned in OFFLOAD:
            object.__setattr__(self, "offload", turned)
        for key, choices in CHOICES.items():
            check_choice(key, getattr(self, key), choices)
        for key, axis in (("schedule", "pp"), ("layers", "pp"), ("cp_method", "cp")):
            if getattr(self, axis) == 1 and getattr(self, key) != getattr(Strategy, key):
                raise ConfigError(f"{key}={getattr(self, key)} says how {axis} works; add {axis}=2, or drop it")
        stages = self.pp * stages_per_rank(self.schedule)
        if self.layers not in ("even", "balanced") and len(self.layers.split("+")) != stages:
            raise ConfigError(f"layers={self.layers} is not one number for each of {stages} stages")
        if self.shares != "even":
            self._take_shares()
        if self.compress != "none":
            self._check_compression()
        _, _, members = self.cp_method.partition(":")
        if members and self.cp % int(members):
            legal = divisors(self.cp)
            raise ConfigError(f"cp_method={self.cp_method} must divide cp={self.cp}; N can be {listed(legal)}")

    def _check_compression(self) -> None:
        for key, least, reason in (
            ("zero", 0, "what is sent is more than gradients, or shards of them"),
            ("tp", 1, "gradients of split matrices travel unit by unit"),
            ("pp", 1, "gradients travel when the passes of all micro-batches are done"),
            ("cp", 1, "ranks that split sequences take part in the sums"),
            ("ep", 1, "gradients of experts go to other ranks than the rest"),
        ):
            value = getattr(self, key)
            if value > least:
                raise ConfigError(
                    f"compress={self.compress} is for data parallel alone, with zero=0; with {key}={value} {reason}: "
                    f"drop {key} or compress"
                )

    def _take_shares(self) -> None:
        """Check the shares, and bring them into the form that all ways of writing them have."""
        numbers = [int(number) for number in self.shares.split("+")]
        if self.dp % len(numbers):
            legal = [n for n in divisors(self.dp) if n > 1]
            other = f"give {listed(legal)} numbers" if legal else "drop it, or raise dp"
            raise ConfigError(f"shares={self.shares} has {len(numbers)} numbers for dp={self.dp} ranks; {other}")
        lowest = [number // gcd(*numbers) for number in numbers]
        # As few numbers as say the same: 3+3+1+1 is 3+1.
        ranks = [number for number in lowest for _ in range(self.dp // len(lowest))]
        fewest = next(n for n in divisors(self.dp) if all(len(set(part)) == 1 for part in _parts(ranks, n)))
        text = "even" if fewest == 1 else "+".join(str(part[0]) for part in _parts(ranks, fewest))
        object.__setattr__(self, "shares", text)

    @property
    def dp(self) -> int:
        """Ranks that work on different samples."""
        return self.replicate * self.shard

    @property
    def sums_in_buckets(self) -> bool:
        """Whether every rank holds all parameters, whole, so that DDP sums their gradients, bucket by bucket."""
        return self.zero < 2 and self.tp == self.pp == self.ep == 1

    @property
    def host_states(self) -> str:
        """Whose state lives in host memory: none, optimizer or parameters."""
        return host_states(self.offload)

    @property
    def host_activations(self) -> bool:
        """Whether activations wait in host memory for their backward pass."""
        return host_activations(self.offload)

    @property
    def data_shares(self) -> tuple[int, ...]:
        """For each data-parallel rank, how many parts of a micro-step's samples are its own."""
        if self.shares == "even":
            return (1,) * self.dp
        numbers = [int(number) for number in self.shares.split("+")]
        return tuple(number for number in numbers for _ in range(self.dp // len(numbers)))

    @property
    def all_shares(self) -> int:
        """Into how many parts the samples of a micro-step are cut; dp where all ranks get the same."""
        return self.dp if self.shares == "even" else sum(self.data_shares)

    def own_samples(self, data_rank: int, samples: int) -> slice:
        """Which samples of a micro-step are a data-parallel rank's; `all_shares` must divide their number."""
        parts, one = self.data_shares, samples // self.all_shares
        return slice(sum(parts[:data_rank]) * one, sum(parts[: data_rank + 1]) * one)

    @property
    def expert_degrees(self) -> list[int]:
        """What `ep` can be with these data-parallel ranks: whole groups of shards, or whole parts of one."""
        return [ep for ep in divisors(self.dp) if self.shard % ep == 0 or ep % self.shard == 0]

    @property
    def expert_copies(self) -> tuple[int, int]:
        """How often each expert exists on data-parallel ranks: copies, and ranks that share the state of one."""
        if self.shard % self.ep == 0:
            return self.replicate, self.shard // self.ep
        return self.dp // self.ep, 1

    @property
    def world(self) -> int:
        """How many processes it takes."""
        return self.pp * self.dp * self.cp * self.tp

    @classmethod
    def parse(cls, text: str, world: int) -> Strategy:
        """The strategy of a short form for that many processes; `auto` and left-out degrees are filled in."""
        words = {key: value for key, value in _words(text).items() if value != AUTO}
        given = {key: _number(text, key, words[key]) for key in (*DEGREES, "zero") if key in words}
        zero = given.get("zero", 0)
        tp, pp, cp = (given.get(key, 1) for key in ("tp", "pp", "cp"))
        dp = given.get("dp", _left_for_data(text, world, given))
        replicate, shard = _copies(text, given, zero, dp)
        sp = words.get("sp", "on" if tp > 1 else "off")
        if sp not in ("on", "off"):
            raise refuse(text, f"sp={sp} is neither on nor off")
        values: dict[str, Any] = {key: words[key] for key in CHOICES if key in words}
        values |= {"pp": pp, "replicate": replicate, "shard": shard, "cp": cp, "tp": tp, "ep": given.get("ep", 1)}
        try:
            strategy = cls(**values, zero=zero, sp=sp == "on")
        except ConfigError as error:
            raise refuse(text, str(error)) from None
        if strategy.world != world:
            raise refuse(
                text,
                f"it needs {strategy.world} processes and there are {world}; "
                f"start with --nproc {strategy.world} or leave dp out",
            )
        if strategy.wrap != "auto" and zero < 2:
            raise refuse(text, f"wrap={strategy.wrap} says what is gathered together; add zero=2 or 3, or drop it")
        return strategy

    @classmethod
    def processes(cls, text: str) -> int | None:
        """How many processes a short form asks for; None when it leaves that open."""
        words = {key: int(value) for key, value in _words(text).items() if value.isdecimal()}
        others = words.get("tp", 1) * words.get("pp", 1) * words.get("cp", 1)
        if "dp" in words:
            return words["dp"] * others
        if "replicate" in words and ("shard" in words or not words.get("zero")):
            return words["replicate"] * words.get("shard", 1) * others
        return None

    @classmethod
    def fewest_processes(cls, text: str) -> int:
        """With how many processes a short form can do."""
        words = {key: int(value) for key, value in _words(text).items() if value.isdecimal()}
        shares = len(_words(text).get("shares", AUTO).split("+"))
        copies = lcm(words.get("replicate", 1) * words.get("shard", 1), words.get("ep", 1), shares)
        return cls.processes(text) or copies * words.get("tp", 1) * words.get("pp", 1) * words.get("cp", 1)

    def __str__(self) -> str:
        default = Strategy()
        parts = [f"dp={self.dp}"]
        if self.zero:
            parts.append(f"zero={self.zero}")
            if self.replicate > 1:
                parts.append(f"replicate={self.replicate}")
        parts += [f"{key}={getattr(self, key)}" for key in ("tp", "pp", "cp", "ep") if getattr(self, key) > 1]
        if self.tp > 1 and not self.sp:
            parts.append("sp=off")
        parts += [f"{key}={getattr(self, key)}" for key in CHOICES if getattr(self, key) != getattr(default, key)]
        return " ".join(parts)

    def check(self, model: ModelSpec, world: int, sequence_length: int | None = None, optimizer: str = "adamw") -> None:
        """Raise a ConfigError unless that model can be trained so on that many processes."""
        self.check_any(world, optimizer)
        check_fit(self, model, sequence_length)

    def check_any(self, world: int, optimizer: str = "adamw") -> None:
        """Raise a ConfigError unless some model can be trained so on that many processes."""
        if self.world != world:
            raise refuse(str(self), f"it needs {self.world} processes and there are {world}")
        if optimizer in WHOLE_PARAMETERS and (self.zero or self.tp > 1 or self.ep > 1 or self.host_states != "none"):
            raise refuse(
                str(self),
                f"train.optimizer={optimizer} needs whole parameters and cannot be sharded; "
                "use zero=0, tp=1 and ep=1 without offload, or train.optimizer=adamw",
            )
        if self.host_states == "parameters" and (self.zero < 2 or self.dp * self.cp == 1):
            raise refuse(
                str(self),
                "offload=parameters moves the shards of zero=2 and 3 and needs dp or cp of at least 2; "
                "use zero=3 on more processes, or offload=optimizer",
            )
        if self.host_activations and splits_backward(self.schedule):
            raise refuse(
                str(self),
                f"schedule={self.schedule} takes backward passes apart, between which activations would wait on the "
                "device; use schedule=1f1b or interleaved:2, or drop offload of activations",
            )

    def micro_steps(self, batch: int, micro_batch: int | None) -> int:
        """Forward passes per optimizer step on each rank for a global batch; refuses one that does not divide.

        A micro-batch is that of one share: a rank with three shares takes three of them in one pass.
        """
        shares = self.all_shares
        unit = shares * (micro_batch or 1)
        if batch % unit:
            below, above = batch // unit * unit, -(-batch // unit) * unit
            legal = f"{below} or {above}" if below else str(above)
            detail = f"dp={self.dp}" if self.shares == "even" else f"all shares of dp={self.dp} shares={self.shares}"
            detail += f" x train.micro_batch={micro_batch}" if micro_batch else ""
            raise ConfigError(f"a global batch of {batch} is not divisible by {unit} ({detail}); use {legal}")
        share = batch // shares
        if micro_batch:
            return share // micro_batch
        # Enough for the stages to be busy most of the time, as large as that allows.
        wanted = min(share, 4 * self.pp) if self.pp > 1 else 1
        return next(count for count in range(wanted, share + 1) if share % count == 0)


def host_states(offload: str) -> str:
    """Whose state a value of `offload` puts into host memory: none, optimizer or parameters."""
    first = offload.partition("+")[0]
    return "none" if first == "activations" else first


def host_activations(offload: str) -> bool:
    """Whether a value of `offload` puts activations into host memory."""
    return offload.endswith("activations")


def _left_for_data(text: str, world: int, given: Mapping[str, int]) -> int:
    """The data-parallel degree that fills the world; refuses other degrees that do not divide it."""
    left = world
    for key in ("tp", "cp", "pp"):
        degree = given.get(key, 1)
        if "dp" not in given and left % degree:
            before = "" if left == world else f" (what the other degrees leave of {world})"
            raise refuse(
                text,
                f"{key}={degree} does not divide {left} processes{before}; {key} can be {listed(divisors(left))}, "
                f"or start more processes",
            )
        left //= degree
    return left


def _copies(text: str, given: Mapping[str, int], zero: int, dp: int) -> tuple[int, int]:
    """(replicate, shard) of a data-parallel degree."""
    if zero == 0 and given.get("shard", 1) > 1:
        # Refused as a strategy, whatever dp is.
        return 1, given["shard"]
    if zero == 0:
        replicate, shard = given.get("replicate", dp), 1
    elif "replicate" in given:
        replicate, shard = given["replicate"], given.get("shard", dp // given["replicate"])
    else:
        shard = given.get("shard", dp)
        replicate = dp // shard
    if replicate * shard != dp:
        if {"replicate", "shard"} <= given.keys():
            found = f"dp={dp}" if "dp" in given else f"{dp} data-parallel processes"
            raise refuse(text, f"replicate={replicate} x shard={shard} is not {found}; leave one of them out")
        key = "replicate" if "replicate" in given else "shard"
        found = f"dp={dp}" if "dp" in given else f"{dp} data-parallel processes"
        legal = [dp] if zero == 0 else divisors(dp)
        raise refuse(text, f"{key}={given[key]} does not fit {found}; {key} can be {listed(legal)}")
    return replicate, shard


def _parts(numbers: list[int], count: int) -> list[list[int]]:
    """That many parts of a list, all as long."""
    length = len(numbers) // count
    return [numbers[first : first + length] for first in range(0, len(numbers), length)]


def _words(text: str) -> Mapping[str, str]:
    """Keys and values of a short form, in order."""
    words: dict[str, str] = {}
    for word in in_our_words(text)[0].split():
        key, _, value = word.partition("=")
        if word == AUTO:
            continue
        if key not in KEYS:
            known = ", ".join(KEYS)
            raise refuse(text, f"unknown key '{key}'{nearest(key, KEYS)}; write auto, or KEY=VALUE with {known}")
        if key in words:
            raise refuse(text, f"{key} is given twice")
        words[key] = value
    return words


def _number(text: str, key: str, value: str) -> int:
    lowest = 0 if key == "zero" else 1
    if not value.isdecimal() or int(value) < lowest:
        raise refuse(text, f"{key} needs a whole number from {lowest}, not '{value}'")
    return int(value)


def check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless the value is one of some words; a choice that ends in `:N` takes a number after it, `:F` a share."""
    kind, colon, rest = value.partition(":")
    if "N+N" in choices and all(size.isdecimal() and int(size) > 0 for size in value.split("+")):
        return
    for choice in choices:
        name, needs, form = choice.partition(":")
        fits = {
            "": True,
            "N": rest.isdecimal() and int(rest) > 0,
            "F": re.fullmatch(r"(\d*\.\d+|\d+)(e-\d+)?", rest, re.ASCII) is not None and 0 < float(rest) < 1,
            "A+B": all(rest.split("+")),
        }[form]
        if name == kind and bool(needs) == bool(colon) and fits:
            return
    raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}{_meant(kind, rest, choices)}")


def _meant(kind: str, rest: str, choices: tuple[str, ...]) -> str:
    """What may have been meant: a share that was written as a percentage or is none, or another word."""
    percent = re.fullmatch(r"(\d*\.?\d+)%", rest)
    if percent is not None and f"{kind}:F" in choices and 0 < float(percent[1]) < 100:
        return f"; F is a share: write {kind}:{format(float(percent[1]) / 100, '.12f').rstrip('0')}"
    if f"{kind}:F" in choices:
        return f"; F is a share, above 0 and below 1, such as {kind}:{_SHARES[kind]}"
    return nearest(kind, choices)
