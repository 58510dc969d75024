"""The keys of a ds_config's zero_optimization, and what becomes of them."""

from __future__ import annotations

from typing import Any

from meshwright.interop.rules import Rule, does, later, leave, only, refused
from meshwright.interop.translation import Reading

MIB = 1 << 20
PREFETCH = 50_000_000
"""DeepSpeed's own stage3_prefetch_bucket_size."""
REMOVED_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")
MICS = "DeepSpeed has removed it; ours is zero=3 replicate=R"
ALWAYS_OVERLAPS = "sums and gathers always travel while passes go on; the numbers are the same"
PINNED = "shards in host memory are always pinned on GPUs"
UNPINNED = "never pinned: the state is updated where it lies, and gradients and weights are what travels"
NO_NVME = "state lives in device or host memory, never on NVMe"
OFFLOAD = "parallel.strategy: offload=optimizer or parameters"


def _stage(reading: Reading, key: str, value: Any) -> None:
    if value not in range(4):
        reading.refuse(key, f"= {value} is not a stage; stages are 0, 1, 2 and 3")
    else:
        reading.word(key, value, "zero", value)


ZERO_RULES: tuple[Rule, ...] = (
    does("zero_optimization.stage", "int", "`parallel.strategy: zero=N`", _stage),
    later(
        "zero_optimization.reduce_bucket_size",
        "int",
        "stages 0 to 2: `comm.bucket_mb`, in MiB of what travels; stage 3: gradients travel with their unit, `wrap`",
    ),
    later(
        "zero_optimization.stage3_prefetch_bucket_size",
        "int",
        "stage 3: `parallel.strategy: wrap=size:N`, the unit that is gathered ahead; 0 is `wrap=block`",
    ),
    later(
        "zero_optimization.stage3_max_live_parameters",
        "int",
        "stage 3: bounds N of `wrap=size:N`, since two units are whole at a time; from 1e8 on it bounds nothing",
    ),
    leave(
        "zero_optimization.stage3_param_persistence_threshold",
        "int",
        "small parameters travel with their layer (wrap), so keeping them whole would save no message",
    ),
    leave("zero_optimization.stage3_model_persistence_threshold", "int", "no parameter is kept whole: see wrap"),
    leave("zero_optimization.stage3_max_reuse_distance", "int", "a unit is gathered again for its backward pass"),
    leave(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "bool",
        "any checkpoint gives whole weights: `meshwright checkpoint export`",
    ),
    leave(
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "bool",
        "any checkpoint gives whole weights: `meshwright checkpoint export`",
    ),
    leave("zero_optimization.stage3_module_granularity_threshold", "int", "wrap says what is gathered together"),
    leave("zero_optimization.stage3_use_all_reduce_for_fetch_params", "bool", "shards are gathered"),
    leave("zero_optimization.stage3_allgather_sequential", "bool", "a unit is gathered by one message"),
    leave("zero_optimization.overlap_comm", "bool", ALWAYS_OVERLAPS),
    leave("zero_optimization.contiguous_gradients", "bool", "gradients travel from one buffer for each bucket or unit"),
    leave("zero_optimization.reduce_scatter", "bool", "stages 2 and 3 always scatter"),
    leave("zero_optimization.use_multi_rank_bucket_allreduce", "bool", "one message for each bucket"),
    leave("zero_optimization.allgather_partitions", "bool", "new parameters are always gathered"),
    leave("zero_optimization.allgather_bucket_size", "int", "what is gathered together is wrap in parallel.strategy"),
    leave("zero_optimization.sub_group_size", "int", "the update of a rank's part is one fused pass"),
    leave("zero_optimization.round_robin_gradients", "bool", "each rank updates rows of every parameter"),
    leave("zero_optimization.ignore_unused_parameters", "bool", "a decoder has none"),
    leave("zero_optimization.load_from_fp32_weights", "bool", "checkpoints hold weights as they are stored"),
    leave("zero_optimization.elastic_checkpoint", "bool", "any checkpoint goes on with any number of ranks"),
    leave("zero_optimization.pipeline_loading_checkpoint", "bool", "each rank reads its own part of a checkpoint"),
    leave("zero_optimization.legacy_stage1", "bool", "there is one stage 1"),
    leave("zero_optimization.parameter_alignment", "bool", "shards are rows"),
    leave("zero_optimization.memory_efficient_linear", "bool", "linears keep what their backward pass needs"),
    leave("zero_optimization.override_module_apply", "bool", "weights are made shard by shard anyway"),
    leave("zero_optimization.log_trace_cache_warnings", "bool", "there is no such cache"),
    leave("zero_optimization.enable_sanity_checks", "bool", "copies are compared: elastic.check_replicas_every"),
    leave("zero_optimization.save_muon_momentum_buffer_in_memory", "bool", "there is no Muon here"),
    only(
        "zero_optimization.compute_grad_norm",
        "bool",
        [True],
        "the norm is always computed",
        "the norm tells whether a step is fit to learn from",
    ),
    refused("zero_optimization.leaf_module", "wrap=name:A+B says which modules are gathered together"),
    refused("zero_optimization.zenflow", "offload=optimizer updates in step with the device"),
    only(
        "zero_optimization.zero_hpz_partition_size",
        "int",
        [0, 1],
        "off",
        "ours is zero=3 replicate=R in parallel.strategy: shards inside a machine, copies across",
    ),
    *(
        only(f"zero_optimization.{name}", "bool", [False], "off", "weights and gradients of shards travel whole")
        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    ),
    later("zero_optimization.offload_optimizer.device", "text", f"`{OFFLOAD}`; cpu or none, nvme is refused"),
    leave("zero_optimization.offload_optimizer.pin_memory", "bool", UNPINNED),
    leave("zero_optimization.offload_optimizer.nvme_path", "any", NO_NVME),
    leave("zero_optimization.offload_optimizer.buffer_count", "int", NO_NVME),
    leave("zero_optimization.offload_optimizer.pipeline_read", "bool", NO_NVME),
    leave("zero_optimization.offload_optimizer.pipeline_write", "bool", NO_NVME),
    leave("zero_optimization.offload_optimizer.fast_init", "bool", NO_NVME),
    leave("zero_optimization.offload_optimizer.cpuadam_cores_perc", "number", "OMP_NUM_THREADS says how many cores"),
    only(
        "zero_optimization.offload_optimizer.ratio",
        "number",
        [1.0],
        "all of the state is in host memory",
        "all of the optimizer's state is in host memory, or none",
    ),
    only(
        "zero_optimization.offload_optimizer.super_offload",
        "bool",
        [False],
        "off",
        "ours is offload=optimizer",
    ),
    later("zero_optimization.offload_param.device", "text", f"`{OFFLOAD}`, with its state; nvme is refused"),
    leave("zero_optimization.offload_param.pin_memory", "bool", PINNED),
    leave("zero_optimization.offload_param.nvme_path", "any", NO_NVME),
    leave("zero_optimization.offload_param.buffer_count", "int", NO_NVME),
    leave("zero_optimization.offload_param.buffer_size", "int", NO_NVME),
    leave("zero_optimization.offload_param.max_in_cpu", "int", NO_NVME),
    refused("zero_optimization.cpu_offload", "write offload_optimizer: {device: cpu}, its name today"),
    refused("zero_optimization.cpu_offload_param", "write offload_param: {device: cpu}, its name today"),
    refused("zero_optimization.cpu_offload_use_pin_memory", "write offload_optimizer: {device: cpu}, its name today"),
    *(
        refused(f"zero_optimization.{name}", "DeepSpeed has removed it; ours is zero=3 replicate=R")
        for name in REMOVED_ZERO
    ),
    leave("zero_allow_untested_optimizer", "bool", "every optimizer here is tested with every stage that takes it"),
    leave("zero_force_ds_cpu_optimizer", "bool", "the update in host memory is torch's fused one"),
)
