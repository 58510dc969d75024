"""Names that users of other trainers know, as ours: degrees of a strategy, and settings.

A name that means the same thing is taken, with a note that tells ours. One that means something else is refused with
what to write instead. `interop` reads whole files of other trainers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.errors import ConfigError

DEGREES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp_size", "tp_degree", "tensor_parallel_size", "tensor_parallel_degree", "tensor_model_parallel_size"),
    "pp": (
        "pp_size",
        "pp_degree",
        "pipeline_parallel_size",
        "pipeline_parallel_degree",
        "pipeline_model_parallel_size",
    ),
    "cp": ("cp_size", "cp_degree", "context_parallel_size", "context_parallel_degree"),
    "ep": ("ep_size", "ep_degree", "expert_parallel_size", "expert_parallel_degree", "expert_model_parallel_size"),
    "dp": ("dp_size", "dp_degree", "data_parallel_size"),
    "replicate": ("dp_replicate", "dp_replicate_size", "data_parallel_replicate_degree"),
    "shard": ("dp_shard", "dp_shard_size", "data_parallel_shard_degree", "fsdp_size"),
    "sp": ("sequence_parallel", "enable_sequence_parallel"),
    "zero": ("zero_stage",),
}
"""Our word of a strategy, and what others call it."""
OTHER_DEGREES = {name: ours for ours, names in DEGREES.items() for name in names}
ULYSSES = "sp_size"
"""accelerate's name for sequences that are split by heads."""
RECOMPUTE = "gradient_checkpointing"

ALL_SHARDED = "zero=3"

SETTINGS = {
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
    "train_iters": "train.steps",
    "adam_beta1": "train.beta1",
    "adam_beta2": "train.beta2",
    "adam_epsilon": "train.eps",
    "weight_decay": "train.weight_decay",
    "warmup_steps": "train.warmup_steps",
    "max_grad_norm": "train.grad_clip",
    "gradient_clipping": "train.grad_clip",
    "clip_grad": "train.grad_clip",
    "global_batch_size": "train.global_batch",
    "train_batch_size": "train.global_batch",
    "micro_batch_size": "train.micro_batch",
    "seq_len": "data.sequence_length",
    "seq_length": "data.sequence_length",
    "max_seq_length": "data.sequence_length",
    "seed": "run.seed",
    "output_dir": "run.dir",
    "logging_steps": "observe.log_every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "train.eval_every",
}
"""What means the same thing."""
VALUES: Mapping[str, tuple[str, Mapping[Any, Any]]] = {
    "lr_scheduler_type": (
        "train.schedule",
        {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"},
    ),
    "torch_compile": ("train.compile", {True: "on", False: "off"}),
    "bf16": ("train.precision", {True: "bf16"}),
    "fp16": ("train.precision", {True: "fp16"}),
}
"""The same thing in other words."""
INSTEAD = {
    "per_device_train_batch_size": "ours are train.micro_batch, and train.global_batch over all ranks and passes",
    "per_device_eval_batch_size": "evaluation takes train.micro_batch",
    "train_micro_batch_size_per_gpu": "ours are train.micro_batch, and train.global_batch over all ranks and passes",
    "gradient_accumulation_steps": "it follows from train.global_batch / (train.micro_batch x data-parallel ranks)",
    "num_train_epochs": "a run is as long as train.steps",
    "warmup_ratio": "ours is train.warmup_steps, a number of steps",
    "eval_strategy": "ours is train.eval_every, a number of steps",
    "save_strategy": "ours is checkpoint.every, a number of steps",
    "optim": "ours is train.optimizer=adamw, sgd or adafactor",
    "report_to": "ours are observe.tensorboard, observe.wandb and observe.mlflow",
    "run_name": "a run is named by its folder, run.dir",
    "dataloader_num_workers": "ours is data.prefetch, in steps",
    "resume_from_checkpoint": "the same command goes on from the newest checkpoint in run.dir",
    "deepspeed": "give the file with --deepspeed FILE",
    "fsdp": "ours is parallel.strategy=zero=3",
    "fsdp_config": "ours is parallel.strategy=zero=3; docs/interop.md has its parts",
    "parallelism_config": "ours is parallel.strategy, such as zero=3 tp=2",
    "model_name_or_path": "ours is model.from_hf, a local folder",
}
"""What means something else here."""


FOREIGN = frozenset({*SETTINGS, *VALUES, *INSTEAD, *OTHER_DEGREES, ULYSSES, RECOMPUTE})
"""All names of others that are known, right or not."""


class Ours(NamedTuple):
    """A setting under our name."""

    setting: str
    """Empty where nothing is to be set."""
    value: Any
    note: str


def our_setting(name: str, value: Any) -> Ours | None:
    """What a setting of another trainer is here; None where the name is not known, a ConfigError where it differs."""
    if name in INSTEAD:
        raise ConfigError(f"'{name}' is a setting of another trainer: {INSTEAD[name]}")
    if name in SETTINGS:
        return Ours(SETTINGS[name], value, f"{name} is {SETTINGS[name]} here")
    if name in ("bf16", "fp16") and value is False:
        # As in `bf16=true fp16=false`.
        return Ours("", None, f"{name}=false leaves train.precision as it is")
    if name in VALUES:
        setting, words = VALUES[name]
        if value not in words:
            known = ", ".join(str(word).lower() for word in words)
            raise ConfigError(f"{name}={value} is not taken: here it is {known}; ours is {setting}")
        return Ours(setting, words[value], f"{name}={str(value).lower()} is {setting}={words[value]} here")
    return None


def our_words(name: str, value: str) -> dict[str, str] | None:
    """What a degree of another trainer is in a strategy; None where the name is not known."""
    if name == RECOMPUTE:
        return {"recompute": "full" if value.lower() == "true" else "none"}
    if name == ULYSSES:
        return {"cp": value, "cp_method": "ulysses"} if value != "1" else {"cp": "1"}
    ours = OTHER_DEGREES.get(name)
    if ours is None:
        return None
    if ours == "sp":
        return {"sp": {"true": "on", "false": "off"}.get(value.lower(), value)}
    if ours == "shard" and value == "-1":
        return {}
    return {ours: value}


def shards_everything(name: str, value: str) -> bool:
    """Whether a degree says that parameters are sharded, too, where nothing else says what is."""
    return OTHER_DEGREES.get(name) == "shard" and value != "1"


def in_our_words(text: str) -> tuple[str, list[str]]:
    """A strategy, or constraints, with all names ours; and a note for each that was not."""
    if not any(name in text for name in (*OTHER_DEGREES, ULYSSES, RECOMPUTE)):
        return text, []
    words: list[str] = []
    notes: list[str] = []
    sharded = False
    for word in text.split():
        match = re.fullmatch(r"(\w+)(<=|>=|!=|=|<|>)(.*)", word)
        found = our_words(match[1], match[3]) if match is not None else None
        if match is None or found is None:
            words.append(word)
            continue
        name, sign, value = match.groups()
        ours = [f"{key}{sign if key in DEGREES else '='}{one}" for key, one in found.items()]
        if sign == "=" and shards_everything(name, value):
            sharded = True
        words += [one for one in ours if one != "shard=1"]
        notes.append(f"{word} is {' '.join([*ours, *(['zero=3'] if sharded else [])])} here")
    if sharded and not any(re.match(r"zero\W", word) for word in words):
        words.append(ALL_SHARDED)
    return " ".join(words), notes
