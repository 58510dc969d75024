"""A plan as a ds_config.json: data parallel and ZeRO, which is all that such a file describes. No torch."""

from __future__ import annotations

import json
from typing import Any

from meshwright.interop.deepspeed_zero_rules import MIB
from meshwright.interop.emit import Chosen
from meshwright.planning.carried import Carried
from meshwright.planning.made import Plan

SHORTEST = 2
"""Steps of a warm-up that DeepSpeed takes at least."""
MODELS_CODE = "the model's code says that, not the file"


def deepspeed_file(plan: Plan, carried: Carried) -> str:
    """The text of the file."""
    return json.dumps(deepspeed_config(Chosen.of(plan, "deepspeed", carried)), indent=2) + "\n"


def deepspeed_config(chosen: Chosen) -> dict[str, Any]:
    """What the file holds."""
    strategy, carried, train = chosen.strategy, chosen.carried, chosen.carried.config.train
    for key in ("tp", "pp", "cp", "ep"):
        degree = getattr(strategy, key)
        chosen.refuse_unless(degree == 1, f"{key}={degree}", "a ds_config describes data parallel and ZeRO alone")
    copies = strategy.zero == 0 or strategy.replicate == 1
    chosen.refuse_unless(copies, f"replicate={strategy.replicate}", "all data-parallel ranks share one copy there")
    chosen.refuse_unless(strategy.recompute == "none", f"recompute={strategy.recompute}", MODELS_CODE)
    chosen.refuse_unless(not strategy.host_activations, f"offload={strategy.offload}", MODELS_CODE)
    return {
        "train_batch_size": chosen.global_batch,
        "train_micro_batch_size_per_gpu": chosen.micro_batch,
        "gradient_accumulation_steps": chosen.passes,
        "gradient_clipping": train.grad_clip,
        "optimizer": _optimizer(chosen),
        **_scheduler(chosen),
        "zero_optimization": _zero(chosen),
        **_precision(chosen),
        **_communication(chosen),
        **({"steps_per_print": carried.config.observe.log_every} if carried.source else {}),
    }


def _optimizer(chosen: Chosen) -> dict[str, Any]:
    train = chosen.carried.config.train
    shared = {"lr": train.lr, "weight_decay": train.weight_decay}
    if train.optimizer == "sgd":
        return {"type": "SGD", "params": {**shared, "momentum": train.beta1}}
    chosen.refuse_setting_unless(train.optimizer == "adamw", f"train.optimizer={train.optimizer}", "its own differs")
    return {"type": "AdamW", "params": {**shared, "betas": [train.beta1, train.beta2], "eps": train.eps}}


def _scheduler(chosen: Chosen) -> dict[str, Any]:
    """The learning rate of every step; there is nothing to write where it stays as it is."""
    train = chosen.carried.config.train
    if train.schedule == "constant" and not train.warmup_steps:
        return {}
    params: dict[str, Any] = {"warmup_num_steps": max(SHORTEST, train.warmup_steps), "warmup_type": train.warmup}
    if train.schedule != "constant":
        params["total_num_steps"] = train.schedule_steps or chosen.steps
    if train.schedule == "cosine":
        # Without a warm-up it rises from the highest rate.
        first = train.warmup_lr / train.lr if train.warmup_steps else 1.0
        params |= {"warmup_min_ratio": first, "cos_min_ratio": train.min_lr / train.lr}
        return {"scheduler": {"type": "WarmupCosineLR", "params": params}}
    chosen.refuse_setting_unless(train.schedule != "wsd", "train.schedule=wsd", "it decays at once, or never")
    params |= {"warmup_min_lr": train.warmup_lr, "warmup_max_lr": train.lr}
    if train.schedule == "constant":
        return {"scheduler": {"type": "WarmupLR", "params": params}}
    if not train.warmup_steps:
        # The logarithm is at its end a step earlier.
        params |= {"warmup_min_lr": train.min_lr, "warmup_type": "log"}
    chosen.refuse_setting_unless(
        params["warmup_min_lr"] == train.min_lr,
        f"a linear schedule from {train.warmup_lr:g} to {train.min_lr:g}",
        "WarmupDecayLR falls to the rate from which it rose",
    )
    return {"scheduler": {"type": "WarmupDecayLR", "params": params}}


def _communication(chosen: Chosen) -> dict[str, Any]:
    """In which dtype gradients are summed, where the file that was planned for says it."""
    names = {"float32": "fp32", "bf16": "bf16", "fp16": "fp16", None: None}
    asked = chosen.carried.config.precision.reduce
    chosen.refuse_setting_unless(asked in names, f"precision.reduce={asked}", "it has fp32, bf16 and fp16")
    return {"communication_data_type": names[asked]} if asked is not None else {}


def _zero(chosen: Chosen) -> dict[str, Any]:
    strategy = chosen.strategy
    zero: dict[str, Any] = {"stage": strategy.zero, "overlap_comm": True, "contiguous_gradients": True}
    kind, _, size = strategy.wrap.partition(":")
    chosen.refuse_unless(kind != "name", f"wrap={strategy.wrap}", "units are by size there")
    bucket = chosen.carried.config.comm.bucket_mb
    if isinstance(bucket, float) and strategy.zero < 3:
        width = 4 if chosen.carried.config.precision.reduce in (None, "float32") else 2
        zero["reduce_bucket_size"] = max(1, round(bucket * MIB / width))
    if strategy.zero == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if strategy.zero == 3 and kind in ("size", "block"):
        zero["stage3_prefetch_bucket_size"] = int(size or 0)
    if strategy.host_states != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if strategy.host_states == "parameters":
        chosen.refuse_unless(strategy.zero == 3, f"{strategy}", "parameters are offloaded in stage 3 alone")
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


def _precision(chosen: Chosen) -> dict[str, Any]:
    kept = chosen.kept
    precise = chosen.precision in ("bf16", "fp16", "float32")
    chosen.refuse_setting_unless(precise, f"precision={chosen.precision}", "it computes in bf16, fp16 and float32")
    narrow = kept.stored == "bf16"
    if narrow or kept.moments != "float32":
        fits = narrow and chosen.precision == "bf16" and chosen.strategy.zero > 0 and kept.moments != "int8"
        chosen.refuse_unless(fits, str(kept), "bf16 weights, with or without moments, need bf16 and a stage above 0")
        states = kept.moments == "bf16"
        return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": states}}
    if chosen.precision == "fp16":
        scale = chosen.carried.config.precision
        if scale.loss_scale != "dynamic":
            return {"fp16": {"enabled": True, "loss_scale": scale.loss_scale}}
        dynamic = {"initial_scale_power": scale.initial_power, "loss_scale_window": scale.window}
        whole = scale.minimum == int(scale.minimum)
        chosen.refuse_setting_unless(whole, f"precision.minimum={scale.minimum:g}", "min_loss_scale is a whole number")
        ends = {"hysteresis": scale.hysteresis, "min_loss_scale": int(scale.minimum)}
        return {"fp16": {"enabled": True, "loss_scale": 0, **dynamic, **ends}}
    return {"bf16": {"enabled": True}} if chosen.precision == "bf16" else {}
