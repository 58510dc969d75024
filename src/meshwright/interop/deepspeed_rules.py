"""Every key of a ds_config.json (DeepSpeed 0.19) and what becomes of it. The guide's table is made of this one."""

from __future__ import annotations

from typing import Any

from meshwright.interop.deepspeed_section_rules import ALIASES as SECTION_ALIASES
from meshwright.interop.deepspeed_section_rules import BACKGROUND, FEATURE_RULES, SPLIT_RULES, degree
from meshwright.interop.deepspeed_zero_rules import NO_NVME, ZERO_RULES
from meshwright.interop.rules import Rule, does, later, leave, only, refused, to
from meshwright.interop.translation import Reading

STEPS_PER_PRINT = 10
"""Every how many steps times are shown where wall_clock_breakdown is on and steps_per_print is not given."""
DTYPES = {"fp32": "float32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
AUTOCAST = {
    **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("float16", "fp16", "torch.float16", "half"), "fp16"),
}

REMOVED = {
    "elasticity": "every run here is elastic: docs/faults.md, --nodes MIN:MAX",
    "nebula": "checkpoints are written in the background anyway: checkpoint.background",
    "amp": "train.precision=bf16 or fp16 is what there is",
    "compression_training": "models are trained as they are",
    "quantize_training": "train.precision=fp8 is what there is",
    "sparse_attention": "attention is dense, or has a sliding window: model.spec.sliding_window",
    "curriculum_learning": "the order of samples follows from run.seed",
    "eigenvalue": "it belonged to quantize_training",
    "graph_harvesting": "train.compile is what there is",
    "progressive_layer_drop": "all layers are trained in all steps",
}


def _loss_scale(reading: Reading, key: str, value: Any) -> None:
    reading.map(key, value, "precision.loss_scale", value or "dynamic")


def _reduce(reading: Reading, key: str, value: Any) -> None:
    if value not in DTYPES:
        reading.refuse(key, f"= {value!r} is not one of {', '.join(DTYPES)}")
    else:
        reading.map(key, value, "precision.reduce", DTYPES[value])


def _buffer(reading: Reading, key: str, value: Any) -> None:
    if value not in DTYPES:
        reading.refuse(key, f"= {value!r} is not one of {', '.join(DTYPES)}")
    else:
        reading.map(key, value, "precision.buffer", DTYPES[value])


def _autocast(reading: Reading, key: str, value: Any) -> None:
    if value not in AUTOCAST:
        reading.refuse(key, f"= {value!r} is not one of {', '.join(AUTOCAST)}")
    else:
        reading.map(key, value, "train.precision", AUTOCAST[value])


def _autocast_enabled(reading: Reading, key: str, value: Any) -> None:
    reading.leave(key, value, "its dtype is what counts" if value else "off")


def _precision(name: str) -> Any:
    def act(reading: Reading, key: str, value: Any) -> None:
        if value:
            reading.map(key, value, "train.precision", name)
        else:
            reading.leave(key, value, "off")

    return act


def _when(setting: str, value: Any, off: str = "off") -> Any:
    """A switch that turns a setting on, and leaves it alone where it is off."""

    def act(reading: Reading, key: str, given: Any) -> None:
        if given:
            reading.map(key, given, setting, value)
        else:
            reading.leave(key, given, off)

    return act


def _ulysses(reading: Reading, key: str, value: Any) -> None:
    if degree(reading, key, value, "cp"):
        reading.word(key, value, "cp_method", "ulysses")


RULES: tuple[Rule, ...] = (
    # Batches: read together.
    later("train_batch_size", "int", "`train.global_batch`"),
    later("train_micro_batch_size_per_gpu", "int", "`train.micro_batch`"),
    later(
        "gradient_accumulation_steps",
        "int",
        "with the others `train.global_batch`; a product that is not theirs is refused",
    ),
    only(
        "managed_gradient_accumulation",
        "bool",
        [True],
        "batches are always cut into passes here",
        "train.global_batch and train.micro_batch say how batches are cut",
    ),
    # Optimizer and schedule: read together.
    later(
        "optimizer.type",
        "text",
        "`train.optimizer`: Adam and AdamW are adamw, SGD sgd, Adafactor adafactor; others are refused by name",
    ),
    later("optimizer.params.lr", "number", "`train.lr`; absent 0.001, of Adafactor 0.01"),
    later("optimizer.params.betas", "any", "Adam and AdamW: `train.beta1`, `train.beta2`"),
    later("optimizer.params.eps", "number", "Adam and AdamW: `train.eps`"),
    later("optimizer.params.weight_decay", "number", "`train.weight_decay`; here norms and biases are not decayed"),
    later("optimizer.params.momentum", "number", "SGD: `train.beta1`"),
    later("optimizer.params.adam_w_mode", "bool", "Adam: `true` is what DeepSpeed does by default; `false` is refused"),
    leave("optimizer.params.torch_adam", "bool", "the update is the same, by kernels of our own or torch's"),
    leave("optimizer.params.foreach", "bool", "the update is the same, fused"),
    leave("optimizer.params.fused", "bool", "the update is always fused"),
    leave("optimizer.params.fp32_optimizer_states", "bool", "precision.moments says how moments are kept"),
    only(
        "optimizer.params.bias_correction", "bool", [True], "moments are always corrected", "AdamW has the correction"
    ),
    only("optimizer.params.amsgrad", "bool", [False], "AdamW without it", "there is no AMSGrad here"),
    only("optimizer.params.nesterov", "bool", [False], "SGD without it", "there is no Nesterov momentum here"),
    only(
        "optimizer.params.max_grad_norm",
        "number",
        [0.0],
        "gradient_clipping says it",
        "DeepSpeed takes no notice of it; gradient_clipping is what clips",
    ),
    only("optimizer.legacy_fusion", "bool", [False], "off", "fp16 with float32 weights is what there is"),
    later(
        "scheduler.type",
        "text",
        "`train.schedule`: WarmupLR constant, WarmupDecayLR linear, WarmupCosineLR cosine; others are refused",
    ),
    later("scheduler.params.warmup_min_lr", "number", "`train.warmup_lr`; WarmupDecayLR: `train.min_lr`, too"),
    later("scheduler.params.warmup_max_lr", "number", "`train.lr`; it wins over optimizer.params.lr, as in DeepSpeed"),
    later("scheduler.params.warmup_num_steps", "int", "`train.warmup_steps`, at least 2"),
    later("scheduler.params.warmup_type", "text", "`train.warmup`: log (DeepSpeed's default) or linear"),
    later("scheduler.params.total_num_steps", "int", "`train.schedule_steps`"),
    later("scheduler.params.warmup_min_ratio", "number", "WarmupCosineLR: `train.warmup_lr`, times `train.lr`"),
    later(
        "scheduler.params.cos_min_ratio", "number", "WarmupCosineLR: `train.min_lr`, times `train.lr`; absent 0.0001"
    ),
    only("scheduler.params.last_batch_iteration", "int", [-1], "a new run", "the same command resumes a run here"),
    to("gradient_clipping", "number", "train.grad_clip"),
    # Precision.
    does("fp16.enabled", "bool", "`train.precision=fp16`", _precision("fp16")),
    does("fp16.loss_scale", "number", "`precision.loss_scale`; 0 is dynamic", _loss_scale),
    to("fp16.initial_scale_power", "int", "precision.initial_power"),
    to("fp16.loss_scale_window", "int", "precision.window"),
    to("fp16.hysteresis", "int", "precision.hysteresis"),
    to("fp16.min_loss_scale", "number", "precision.minimum"),
    only(
        "fp16.consecutive_hysteresis",
        "bool",
        [False],
        "overflows are counted anew after the scale doubles",
        "overflows are counted anew after the scale doubles, not after each good step",
    ),
    leave("fp16.auto_cast", "bool", "inputs are tokens"),
    only(
        "fp16.fp16_master_weights_and_grads",
        "bool",
        [False],
        "weights are kept in float32",
        "weights are kept in float32, or with bf16 in bf16: precision.stored",
    ),
    does("bf16.enabled", "bool", "`train.precision=bf16`", _precision("bf16")),
    does("bf16.bf16_master_weights_and_grads", "bool", "`precision.stored=bf16`", _when("precision.stored", "bf16")),
    does("bf16.bf16_optimizer_states", "bool", "`precision.moments=bf16`", _when("precision.moments", "bf16")),
    leave("bf16.immediate_grad_update", "bool", "gradients are summed as the backward pass goes on"),
    leave("bf16.check_grad_overflow", "bool", "a step that is no number is always skipped: elastic.nonfinite"),
    does("torch_autocast.enabled", "bool", "not applicable: its dtype is what counts", _autocast_enabled),
    does("torch_autocast.dtype", "text", "`train.precision`; refused where it is enabled without one", _autocast),
    leave("torch_autocast.lower_precision_safe_modules", "any", "losses and norms keep their own precision"),
    only(
        "data_types.grad_accum_dtype",
        "text",
        ["fp32"],
        "gradients are summed in float32",
        "gradients have the dtype of weights: bf16.bf16_master_weights_and_grads",
    ),
    only("data_types.param_dtype", "text", ["fp32"], "weights are kept in float32", "precision.stored says it"),
    does("data_types.buffer_dtype", "text", "`precision.buffer`", _buffer),
    leave("data_types.keep_in_fp32_modules", "any", "buffers are kept in float32: precision.buffer"),
    # How gradients travel.
    does("communication_data_type", "text", "`precision.reduce`", _reduce),
    leave("seq_parallel_communication_data_type", "text", "split sequences travel in the dtype of the pass"),
    leave("prescale_gradients", "bool", "the loss is divided by the count of all tokens before the backward pass"),
    leave("gradient_predivide_factor", "number", "gradients are summed, never averaged: there is nothing to divide"),
    only(
        "gradient_allreduce_op",
        "text",
        ["mean"],
        "the loss is a mean over the tokens of all ranks",
        "a sum would grow with the number of ranks; raise train.lr instead",
    ),
    leave("disable_allgather", "bool", "how parameters travel follows from the strategy"),
    only("sparse_gradients", "bool", [False], "gradients are dense", "gradients are dense here; DeepSpeed removed it"),
    *ZERO_RULES,
    # Other ways to split.
    *SPLIT_RULES,
    does(
        "sequence_parallel_size",
        "int",
        "`parallel.strategy: cp=N cp_method=ulysses`",
        _ulysses,
    ),
    leave("use_data_before_expert_parallelism", "bool", "the order of axes is parallel.placement"),
    # Activations.
    later(
        "activation_checkpointing.partition_activations",
        "bool",
        "`parallel.strategy: recompute=full`; with tp, sp=on keeps each rank's part alone",
    ),
    later(
        "activation_checkpointing.cpu_checkpointing",
        "bool",
        "`parallel.strategy: recompute=full offload=activations`",
    ),
    leave("activation_checkpointing.contiguous_memory_optimization", "bool", "torch's allocator does it"),
    leave("activation_checkpointing.number_checkpoints", "any", "every layer is one; see recompute=first:N"),
    leave("activation_checkpointing.synchronize_checkpoint_boundary", "bool", "streams are in order without it"),
    leave("activation_checkpointing.profile", "bool", "the recorder times forward and backward passes: DIR/ranks"),
    # What is watched.
    to("steps_per_print", "int", "observe.log_every"),
    later("wall_clock_breakdown", "bool", "`observe.profile_every`: steps_per_print, or 10; see `meshwright watch`"),
    leave("memory_breakdown", "bool", "every rank records what it holds: DIR/ranks, `meshwright watch`"),
    later("flops_profiler.enabled", "bool", "`observe.profile_steps`: the step of profile_step"),
    later("flops_profiler.profile_step", "int", "`observe.profile_steps=N:N`; traces and memory go to DIR/profile"),
    leave("flops_profiler.module_depth", "int", "`meshwright models NAME --flops N` has FLOPs of all modules"),
    leave("flops_profiler.top_modules", "int", "`meshwright models NAME --flops N` has FLOPs of all modules"),
    leave("flops_profiler.detailed", "bool", "`meshwright models NAME --flops N` has FLOPs of all modules"),
    leave("flops_profiler.output_file", "any", "traces go to DIR/profile"),
    leave("flops_profiler.recompute_fwd_factor", "number", "what is computed again is counted: docs/numbers.md"),
    leave("comms_logger.enabled", "bool", "profiled steps list their collectives: observe.profile_every"),
    leave("comms_logger.prof_all", "bool", "all of them are listed"),
    leave("comms_logger.prof_ops", "any", "all of them are listed"),
    leave("comms_logger.verbose", "bool", "they are written to DIR/ranks"),
    leave("comms_logger.debug", "bool", "they are written to DIR/ranks"),
    to("tensorboard.enabled", "bool", "observe.tensorboard"),
    leave("tensorboard.output_path", "any", "files go to DIR/tensorboard, with run.dir as DIR"),
    leave("tensorboard.job_name", "text", "files go to DIR/tensorboard, with run.dir as DIR"),
    to("wandb.enabled", "bool", "observe.wandb"),
    leave("wandb.group", "any", "set WANDB_RUN_GROUP"),
    leave("wandb.team", "any", "set WANDB_ENTITY"),
    leave("wandb.project", "any", "set WANDB_PROJECT"),
    leave("csv_monitor.enabled", "bool", "every run writes DIR/metrics.jsonl"),
    leave("csv_monitor.output_path", "any", "every run writes DIR/metrics.jsonl"),
    leave("csv_monitor.job_name", "any", "every run writes DIR/metrics.jsonl"),
    # The rest.
    to("seed", "int", "run.seed"),
    leave("dump_state", "bool", "`meshwright train --explain` shows all settings"),
    leave("disable_python_gc", "bool", "all ranks collect together: train.gc_every"),
    leave("dataloader_drop_last", "bool", "samples go on into the next epoch; no step is short"),
    leave("vocabulary_size", "int", "the model says it: model.spec.vocab_size"),
    leave("log_level", "any", "observe.log_every says how much is shown"),
    leave("checkpoint.tag_validation", "text", "checkpoints are named by their step on all ranks"),
    leave("checkpoint.load_universal", "bool", "any checkpoint goes on with any strategy"),
    leave("checkpoint.parallel_write", "any", "all ranks write their own part"),
    leave("checkpoint.writer", "any", BACKGROUND),
    only(
        "checkpoint.use_node_local_storage",
        "bool",
        [False],
        "all machines see checkpoint.dir",
        "all machines must see checkpoint.dir",
    ),
    *FEATURE_RULES,
    leave("aio", "any", NO_NVME),
    refused("weight_quantization", "train.precision=fp8 is what there is"),
    refused("pipeline", "the pipeline is described by pp, schedule and layers in parallel.strategy"),
    *(refused(name, f"DeepSpeed has removed it; {instead}. Leave it out") for name, instead in REMOVED.items()),
)

ALIASES = {
    "bfloat16": "bf16",
    **SECTION_ALIASES,
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
}
"""Other names that DeepSpeed takes for the same keys."""
OLDER = {
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    )
}
"""Keys that have a rule of their own, and the names which they have today."""
