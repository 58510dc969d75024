"""A plan as the TOML job configuration of torchtitan 0.2, for the models that it has. No torch."""

from __future__ import annotations

import math
from typing import Any

import tomli_w

from meshwright.errors import UserError
from meshwright.interop.emit import Chosen
from meshwright.models.presets import presets
from meshwright.models.spec import ModelSpec
from meshwright.planning.carried import Carried
from meshwright.planning.made import Plan
from meshwright.schedules import stages_per_rank
from meshwright.training.schedule import decay_length

FLAVORS = {
    "llama3.1-8b": ("llama3", "8B"),
    "llama3.1-70b": ("llama3", "70B"),
    "llama3.1-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"),
    "qwen3-4b": ("qwen3", "4B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
}
"""Our presets that torchtitan has, by its names."""
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}


def torchtitan_file(plan: Plan, carried: Carried) -> str:
    """The text of the file."""
    chosen = Chosen.of(plan, "torchtitan", carried)
    head = f"# {chosen.strategy} on {chosen.gpus} GPUs. Set training.dataset and model.hf_assets_path.\n"
    return f"{head}# {carried.told}\n\n" + tomli_w.dumps(torchtitan_config(chosen))


def torchtitan_config(chosen: Chosen) -> dict[str, Any]:
    """What the file holds."""
    strategy, kept, train = chosen.strategy, chosen.kept, chosen.carried.config.train
    name, flavor = _flavor(chosen)
    _refuse(chosen)
    chosen.refuse_setting_unless(not str(kept), str(kept), "weights and moments have one dtype there")
    return {
        "job": {"description": f"planned by meshwright: {strategy}"},
        "model": {"name": name, "flavor": flavor},
        "optimizer": {
            "name": "AdamW",
            "lr": train.lr,
            "beta1": train.beta1,
            "beta2": train.beta2,
            "eps": train.eps,
            "weight_decay": train.weight_decay,
        },
        "lr_scheduler": _schedule(chosen),
        "training": {
            # In a pipeline it is what is cut into micro-batches; else it is one, and the rest is accumulated.
            "local_batch_size": chosen.micro_batch if strategy.pp == 1 else chosen.global_batch // strategy.dp,
            "global_batch_size": chosen.global_batch,
            "seq_len": chosen.sequence_length,
            # A norm of 0 would be one to clip to.
            "max_norm": train.grad_clip or math.inf,
            "steps": chosen.steps,
            "enable_cpu_offload": strategy.offload == "parameters",
            "dtype": "float32",
            "mixed_precision_param": "bfloat16" if chosen.precision == "bf16" else "float32",
            "mixed_precision_reduce": "float32",
        },
        "parallelism": _parallelism(chosen),
        "activation_checkpoint": _recompute(chosen),
        "compile": {"enable": True},
        **(_kept_of_the_run(chosen) if chosen.carried.source else {}),
    }


def _schedule(chosen: Chosen) -> dict[str, Any]:
    """The learning rate of every step."""
    train = chosen.carried.config.train
    chosen.refuse_setting_unless(train.optimizer == "adamw", f"train.optimizer={train.optimizer}", "AdamW is written")
    rises = train.warmup_steps == 0 or (train.warmup, train.warmup_lr) == ("linear", 0.0)
    chosen.refuse_setting_unless(rises, "the warm-up", "it rises linearly from 0 there")
    end = train.schedule_steps or chosen.steps
    found: dict[str, Any] = {
        "warmup_steps": train.warmup_steps,
        "decay_type": "cosine" if train.schedule == "cosine" else "linear",
        "min_lr_factor": train.min_lr / train.lr,
    }
    if train.schedule == "constant":
        return {**found, "decay_ratio": 0.0}
    chosen.refuse_setting_unless(
        end >= chosen.steps,
        f"train.schedule_steps={end}",
        f"it goes on falling below its end there, up to {chosen.steps}",
    )
    if train.schedule == "wsd":
        found["decay_ratio"] = decay_length(train, end) / end
    return {**found, "total_steps": end} if end != chosen.steps else found


def _kept_of_the_run(chosen: Chosen) -> dict[str, Any]:
    """Checkpoints, seed and lines."""
    config = chosen.carried.config
    checkpoint: dict[str, Any] = {"enable": True, "interval": config.checkpoint.every or chosen.steps}
    if config.checkpoint.dir is not None:
        checkpoint["folder"] = config.checkpoint.dir
    return {
        "checkpoint": checkpoint,
        "debug": {"seed": config.run.seed, "deterministic": config.train.deterministic},
        "metrics": {"log_freq": config.observe.log_every},
    }


def _refuse(chosen: Chosen) -> None:
    """Raise where torchtitan has no words for the strategy."""
    strategy, dropout = chosen.strategy, chosen.spec.dropout
    chosen.refuse_setting_unless(dropout == 0, f"dropout={dropout:g}", "its models drop nothing")
    chosen.refuse_unless(strategy.zero != 1, "zero=1", "it shards gradients too: zero=2 or 3")
    chosen.refuse_unless(strategy.tp == 1 or strategy.sp, "sp=off", "its tensor parallel splits tokens as well")
    chosen.refuse_unless(strategy.cp_method == "ring", f"cp_method={strategy.cp_method}", "cp is a ring there")
    chosen.refuse_unless(strategy.layers == "even", f"layers={strategy.layers}", "its stages are even")
    kind = strategy.schedule.partition(":")[0]
    chosen.refuse_unless(kind in SCHEDULES, f"schedule={strategy.schedule}", f"there are {', '.join(SCHEDULES)}")
    moved = strategy.offload in ("none", "parameters")
    chosen.refuse_unless(moved, f"offload={strategy.offload}", "it moves parameters together with their state")
    precise = chosen.precision in ("bf16", "float32")
    chosen.refuse_setting_unless(precise, f"precision={chosen.precision}", "it has bf16, and float32 with shards")
    narrow = chosen.precision == "bf16" or strategy.zero > 0 or strategy.dp == 1
    chosen.refuse_unless(narrow, f"precision=float32 with {strategy}", "it has float32 with shards")


def _parallelism(chosen: Chosen) -> dict[str, Any]:
    strategy = chosen.strategy
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": strategy.replicate,
        "data_parallel_shard_degree": strategy.shard,
        "fsdp_reshard_after_forward": "always" if strategy.zero == 3 else "never",
        "tensor_parallel_degree": strategy.tp,
        "pipeline_parallel_degree": strategy.pp,
        "context_parallel_degree": strategy.cp,
        "expert_parallel_degree": strategy.ep,
        # tp splits experts as well.
        "expert_tensor_parallel_degree": strategy.tp if strategy.ep > 1 else 1,
    }
    if strategy.pp > 1:
        stages = strategy.pp * stages_per_rank(strategy.schedule)
        found |= {
            "pipeline_parallel_schedule": SCHEDULES[strategy.schedule.partition(":")[0]],
            "pipeline_parallel_layers_per_stage": -(-chosen.spec.num_hidden_layers // stages),
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
            "pipeline_parallel_microbatch_size": chosen.micro_batch,
        }
    return found


def _recompute(chosen: Chosen) -> dict[str, Any]:
    kind, _, share = chosen.strategy.recompute.partition(":")
    chosen.refuse_unless(kind != "first", f"recompute={chosen.strategy.recompute}", "it has all layers, or every n-th")
    if kind == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    if kind == "budget":
        return {"mode": "memory_budget", "memory_budget": float(share)}
    return {"mode": kind}


def _flavor(chosen: Chosen) -> tuple[str, str]:
    """Which of torchtitan's models it is."""
    known = presets()
    for name, flavor in FLAVORS.items():
        if _facts(known[name].spec) == _facts(chosen.spec):
            return flavor
    here = ", ".join(f"{model} {size}" for model, size in FLAVORS.values())
    raise UserError(f"--emit torchtitan: torchtitan has no model of this shape; it has {here}")


def _facts(spec: ModelSpec) -> ModelSpec:
    """A shape without what does not change its weights."""
    return spec.model_copy(update={"max_position_embeddings": 1, "rope_scaling": None, "dropout": 0.0})
