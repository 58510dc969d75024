"""The keys of a ds_config's sections for whole features, such as tensor_parallel, and what becomes of them."""

from __future__ import annotations

from typing import Any

from meshwright.interop.rules import Rule, does, leave, only
from meshwright.interop.translation import Reading

BACKGROUND = "checkpoints are written in the background: checkpoint.background"
COMPILE = "it belongs to deepcompile; ours is train.compile"
ROUTED = "the model says how its experts are routed: model.spec.experts"
SPLIT = "which weights are split follows from the model: docs/strategies.md"
TRACKERS = "ours are observe.wandb, observe.mlflow, observe.tensorboard"
TRY = "ours is `meshwright plan --try K`, or parallel.strategy=auto"
WHOLE = "samples are taken whole, in the order of run.seed"
HYBRID = "it is for reinforcement learning"

ALIASES = {
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    "tensor_parallel.replace_with_kernel_inject": "tensor_parallel.kernel_inject",
}


def degree(reading: Reading, key: str, value: int, name: str) -> bool:
    """Whether a degree splits something."""
    if value < 0:
        reading.refuse(key, f"= {value} is not a degree; use a whole number from 1")
    elif value < 2:
        reading.leave(key, value, "it splits nothing")
    else:
        reading.word(key, value, name, value)
    return value > 1


def _tensor_parallel(reading: Reading, key: str, value: Any) -> None:
    degree(reading, key, value, "tp")


def _expert_parallel(reading: Reading, key: str, value: Any) -> None:
    degree(reading, key, value, "ep")


def _left(section: str, reason: str, *names: str) -> tuple[Rule, ...]:
    """Keys of one section that do not apply for one reason."""
    return tuple(leave(f"{section}.{name}", "any", reason) for name in names)


SPLIT_RULES: tuple[Rule, ...] = (
    does("tensor_parallel.autotp_size", "int", "`parallel.strategy: tp=N`", _tensor_parallel),
    leave("tensor_parallel.dtype", "any", "train.precision says it"),
    leave("tensor_parallel.tp_overlap_comm", "bool", "when sums of tp travel follows from the strategy"),
    leave("tensor_parallel.vocab_parallel_lm_head", "any", "the head is always split over the vocabulary"),
    leave("tensor_parallel.vocab_parallel_ce_backend", "any", "the loss of a split vocabulary is ours"),
    *_left("tensor_parallel.tp", "autotp_size is what counts", "tp_size", "tp_grain_size", "mpu", "tp_group"),
    *_left("tensor_parallel", SPLIT, "injection_policy_tuple", "partition_config", "preset_model"),
    leave("tensor_parallel.keep_module_on_host", "bool", "weights are made shard by shard, on their device"),
    leave("tensor_parallel.kernel_inject", "bool", "kernels are the same with and without tp"),
    leave("expert_parallel.enabled", "bool", "its autoep_size is what counts"),
    does("expert_parallel.autoep_size", "int", "`parallel.strategy: ep=N`", _expert_parallel),
    leave("expert_parallel.expert_tensor_parallel_size", "int", "tp splits experts as well: parallel.strategy"),
    *_left("expert_parallel", ROUTED, "route_norm", "route_scale", "score_apply", "score_func", "top_k",
           "num_expert_groups", "num_limited_groups", "load_balance_coeff", "routed_scaling_factor",
           "has_shared_experts", "expert_activation"),
    *_left("expert_parallel", SPLIT, "preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern",
           "expert_w1", "expert_w2", "expert_w3", "num_experts_attr", "top_k_attr", "shared_experts_pattern",
           "shared_experts_gate_pattern"),
    *_left("expert_parallel", "how experts compute and their rows travel is ours", "validate_folding_routing",
           "async_split_plan", "use_grouped_mm", "disable_triton_grouped_mm", "combine_impl", "row_weighting_impl",
           "gate_up_impl", "comm_backend", "comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank"),
)  # fmt: skip

FEATURE_RULES: tuple[Rule, ...] = (
    only("comet.enabled", "bool", [False], "off", TRACKERS),
    *_left("comet", TRACKERS, "samples_log_interval", "project", "workspace", "api_key", "experiment_name",
           "experiment_key", "online", "mode"),
    *_left("timers.throughput", "steps are always timed: DIR/metrics.jsonl", "enabled", "synchronized"),
    leave("checkpoint.checkpoint_serialization", "any", BACKGROUND),
    leave("datastates_ckpt", "any", BACKGROUND),
    only("autotuning.enabled", "bool", [False], "off", TRY),
    *_left("autotuning", TRY, "fast", "results_dir", "exps_dir", "overwrite", "start_profile_step",
           "end_profile_step", "metric", "metric_path", "tuner_type", "tuner_early_stopping", "tuner_num_trials",
           "arg_mappings", "model_info", "model_info_path", "mp_size", "max_train_batch_size",
           "min_train_batch_size", "max_train_micro_batch_size_per_gpu", "min_train_micro_batch_size_per_gpu",
           "num_tuning_micro_batch_sizes"),
    only("compile.deepcompile", "bool", [False], "off", "ours is train.compile"),
    *_left("compile", COMPILE, "autoep_non_moe", "free_activation", "free_activation_threshold",
           "offload_activation", "offload_activation_pin_memory", "offload_opt_states", "double_buffer",
           "symmetric_memory", "debug_log", "offload_parameters", "sync_before_reduce", "sync_after_reduce",
           "sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors",
           "passes"),
    only("hybrid_engine.enabled", "bool", [False], "off", HYBRID),
    *_left("hybrid_engine", HYBRID, "max_out_tokens", "inference_tp_size", "release_inference_cache",
           "pin_parameters", "tp_gather_partition_size", "enable_cuda_graph"),
    only("data_efficiency.enabled", "bool", [False], "off", WHOLE),
    *_left("data_efficiency", WHOLE, "seed", "data_sampling", "data_routing"),
)  # fmt: skip
