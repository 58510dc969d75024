"""A plan as the YAML of `accelerate launch`: FSDP2 with a ParallelismConfig, or DDP. No torch."""

from __future__ import annotations

import json
from typing import Any

from meshwright.interop.emit import Chosen
from meshwright.planning.carried import Carried
from meshwright.planning.made import Plan

PREFIX = "parallelism_config_"


def accelerate_file(plan: Plan, carried: Carried) -> str:
    """The text of the file."""
    chosen = Chosen.of(plan, "accelerate", carried)
    head = (
        f"# {chosen.strategy}: Accelerator(gradient_accumulation_steps={chosen.passes}), "
        f"and a DataLoader with batch_size={chosen.micro_batch}.\n"
        "# Optimizer, learning rate, schedule, clipping and data are the script's.\n"
    )
    if carried.source:
        # A setting may be a text of several lines.
        told = " ".join(f"{name}={json.dumps(value)}" for name, value in _for_the_script(carried).items())
        head += f"# {json.dumps(carried.source)} has them so: {told}\n"
    return head + _yaml(accelerate_config(chosen))


def _for_the_script(carried: Carried) -> dict[str, Any]:
    """Settings that the file has no place for."""
    found = carried.config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    dealt = {"global_batch", "micro_batch", "precision"}
    train = {f"train.{key}": value for key, value in found.get("train", {}).items() if key not in dealt}
    return train | {f"{part}.{key}": value for part in ("data", "run") for key, value in found.get(part, {}).items()}


def accelerate_config(chosen: Chosen) -> dict[str, Any]:
    """What the file holds."""
    strategy, kept = chosen.strategy, chosen.kept
    _refuse(chosen)
    chosen.refuse_setting_unless(not str(kept), str(kept), "state is kept in float32 there")
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP" if strategy.zero else "MULTI_GPU" if strategy.dp > 1 else "NO",
        "downcast_bf16": "no",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no" if chosen.precision == "float32" else chosen.precision,
        "num_machines": chosen.machines,
        "num_processes": chosen.gpus,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if not strategy.zero:
        return content
    content["fsdp_config"] = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": strategy.zero == 3,
        "fsdp_offload_params": strategy.offload == "parameters",
        "fsdp_activation_checkpointing": strategy.recompute == "full",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
    }
    if strategy.tp > 1 or strategy.cp > 1 or strategy.replicate > 1:
        content["parallelism_config"] = {
            f"{PREFIX}dp_replicate_size": strategy.replicate,
            f"{PREFIX}dp_shard_size": strategy.shard,
            f"{PREFIX}tp_size": strategy.tp,
            f"{PREFIX}cp_size": strategy.cp,
        }
        if strategy.cp > 1:
            content["parallelism_config"][f"{PREFIX}cp_comm_strategy"] = "alltoall"
    return content


def _refuse(chosen: Chosen) -> None:
    """Raise where accelerate has no words for the strategy."""
    strategy = chosen.strategy
    for key in ("pp", "ep"):
        degree = getattr(strategy, key)
        chosen.refuse_unless(degree == 1, f"{key}={degree}", "its ParallelismConfig has dp, tp and cp alone")
    chosen.refuse_unless(strategy.zero != 1, "zero=1", "FSDP2 shards gradients too: zero=2 or 3")
    chosen.refuse_unless(strategy.cp_method == "ring", f"cp_method={strategy.cp_method}", "cp is a ring there")
    again = strategy.recompute == "none" or (strategy.recompute == "full" and strategy.zero > 0)
    chosen.refuse_unless(again, f"recompute={strategy.recompute}", "FSDP2 has all layers or none")
    moved = strategy.offload in ("none", "parameters")
    chosen.refuse_unless(moved, f"offload={strategy.offload}", "FSDP2 moves parameters together with their state")
    precise = chosen.precision in ("bf16", "fp16", "float32")
    chosen.refuse_setting_unless(precise, f"precision={chosen.precision}", "the file has bf16, fp16 and float32")
    alone = strategy.zero > 0 or strategy.tp == strategy.cp == 1
    chosen.refuse_unless(alone, f"{strategy}", "tp and cp go with FSDP2 alone: add zero=3")
    chosen.refuse_unless(strategy.tp == 1 or not strategy.sp, "sp=on", "tp keeps tokens whole there: add sp=off")
    copies = strategy.replicate == 1 or strategy.tp == 1 or strategy.shard > 1
    chosen.refuse_unless(copies, f"{strategy}", "copies with tp need shards as well")


def _yaml(content: dict[str, Any], indent: str = "") -> str:
    """A tree of plain words and numbers as YAML."""
    lines = []
    for key, value in content.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{_yaml(value, indent + '  ')}")
        elif isinstance(value, bool):
            lines.append(f"{indent}{key}: {'true' if value else 'false'}\n")
        else:
            # A bare `no` would be read as a truth value.
            text = f"'{value}'" if str(value).lower() in ("no", "yes") else str(value)
            lines.append(f"{indent}{key}: {text}\n")
    return "".join(lines)
