"""The flags of Megatron-LM's pretrain_gpt.py that people use, and what becomes of them: mapped, left, refused."""

from __future__ import annotations

import math
from typing import Any

from meshwright.interop.rules import Kind, Rule, does, later, leave, only, refused, to
from meshwright.interop.translation import Reading


def _leaves(reason: str, kind: Kind, *names: str) -> tuple[Rule, ...]:
    return tuple(leave(f"--{name}", kind, reason) for name in names)


def _refusals(reason: str, *names: str) -> tuple[Rule, ...]:
    return tuple(refused(f"--{name}", reason) for name in names)


def _switch(key: str, setting: str, value: Any, note: str = "") -> Rule:
    """A flag without a value that stands for a setting."""

    def act(reading: Reading, name: str, given: Any) -> None:
        reading.map(name, given, setting, value, note)

    return does(key, "bool", f"`{setting}={value}`".lower() + (f"; {note}" if note else ""), act)


def _named(key: str, setting: str, note: str) -> Rule:
    """A flag with a name or place that turns a setting on."""

    def act(reading: Reading, name: str, given: Any) -> None:
        reading.map(name, given, setting, True, note)

    return does(key, "text", f"`{setting}=true`; {note}", act)


def _power(reading: Reading, key: str, value: Any) -> None:
    power = math.log2(value) if value > 0 else 0.5
    if power != int(power):
        reading.refuse(key, f"= {value:g} is no power of two; precision.initial_power takes one")
    else:
        reading.map(key, value, "precision.initial_power", int(power))


def _minutes(reading: Reading, key: str, value: Any) -> None:
    reading.map(key, value, "elastic.timeout_s", 60.0 * value)


def _optimizer(reading: Reading, key: str, value: Any) -> None:
    ours = {"adam": "adamw", "sgd": "sgd"}.get(value)
    if ours is None:
        reading.refuse(key, f"= {value} is refused: here are adam (as AdamW) and sgd")
    else:
        reading.map(key, value, "train.optimizer", ours)


def _stated_dtype(setting: str) -> Any:
    def act(reading: Reading, key: str, value: Any) -> None:
        ours = {"fp32": "float32", "bf16": "bf16"}.get(value)
        if ours is None:
            reading.refuse(key, f"= {value} is refused: {setting} is float32 or bf16")
        else:
            reading.map(key, value, setting, ours)

    return act


FUSED = "kernels are chosen by device and shape; the numbers are the same but for rounding"
OVERLAP = "sums and gathers always travel while passes go on; the numbers are the same"
CHECKPOINTS = "checkpoints have a format of their own, for any strategy: docs/checkpoints.md"
LOGGED = "every run records it: DIR/metrics.jsonl, `meshwright watch`"
DATA = "samples are found by computing, without an index on disk: docs/data.md"
OTHER_MODEL = "the decoder of this trainer does not build it"

SHAPE: tuple[Rule, ...] = (
    later("--num-layers", "int", "`model.spec.num_hidden_layers`"),
    later("--hidden-size", "int", "`model.spec.hidden_size`"),
    later("--ffn-hidden-size", "int", "`model.spec.intermediate_size`; absent 4 x hidden, or 2/3 of that"),
    later("--num-attention-heads", "int", "`model.spec.num_attention_heads`"),
    later("--group-query-attention", "bool", "`model.spec.num_key_value_heads`, with --num-query-groups"),
    later("--num-query-groups", "int", "`model.spec.num_key_value_heads`"),
    later("--kv-channels", "int", "`model.spec.head_dim`"),
    later("--seq-length", "int", "`data.sequence_length`"),
    later("--max-position-embeddings", "int", "`model.spec.max_position_embeddings`"),
    later("--vocab-size", "int", "`model.spec.vocab_size`, padded as Megatron does it"),
    later("--make-vocab-size-divisible-by", "int", "`model.spec.vocab_size` is padded to a multiple of it times tp"),
    later("--padded-vocab-size", "int", "`model.spec.vocab_size`"),
    later("--tokenizer-type", "text", "GPT2BPETokenizer: `model.spec.vocab_size`; others do not apply"),
    later("--tokenizer-model", "text", "`data.tokenizer`, with HuggingFaceTokenizer"),
    later("--normalization", "text", "`model.spec.norm`: LayerNorm or RMSNorm"),
    later("--norm-epsilon", "number", "`model.spec.norm_eps`"),
    later("--position-embedding-type", "text", "`model.spec.positions`: learned_absolute or rope"),
    later("--rotary-base", "number", "`model.spec.rope_theta`"),
    only("--rotary-percent", "number", [1.0], "all of a head is rotated", "all of a head is rotated here"),
    later("--use-rope-scaling", "bool", "`model.spec.rope_scaling`, as Llama 3.1 has it"),
    later("--rope-scaling-factor", "number", "`model.spec.rope_scaling.factor`"),
    later("--swiglu", "bool", "`model.spec.activation=swiglu`"),
    later("--openai-gelu", "bool", "`model.spec.activation=gelu_tanh`"),
    later("--no-bias-gelu-fusion", "bool", "`model.spec.activation=gelu`: without the fusion it is exact"),
    later("--disable-bias-linear", "bool", "`model.spec.bias` without linears"),
    later("--add-qkv-bias", "bool", "`model.spec.bias` with q, k, v"),
    later("--qk-layernorm", "bool", "`model.spec.qk_norm=true`"),
    later("--window-size", "text", "`model.spec.sliding_window`: the first number, and the token itself"),
    later("--untie-embeddings-and-output-weights", "bool", "`model.spec.tie_word_embeddings=false`"),
    later("--hidden-dropout", "number", "`model.spec.dropout`"),
    only(
        "--attention-dropout",
        "number",
        [0.0],
        "attention weights are never dropped",
        "attention weights are never dropped here; write 0, or leave it out",
    ),
    later("--init-method-std", "number", "`model.spec.initializer_range`"),
    later("--num-experts", "int", "`model.spec.experts.num_experts`"),
    later("--moe-router-topk", "int", "`model.spec.experts.num_experts_per_tok`"),
    later("--moe-ffn-hidden-size", "int", "`model.spec.experts.moe_intermediate_size`"),
    later("--moe-shared-expert-intermediate-size", "int", "`model.spec.experts.num_shared_experts`"),
    later("--moe-aux-loss-coeff", "number", "`model.spec.experts.router_aux_loss_coef`, unless balancing is none"),
    later("--moe-z-loss-coeff", "number", "`model.spec.experts.router_z_loss_coef`"),
    later("--moe-expert-capacity-factor", "number", "`model.spec.experts.capacity_factor`"),
    only("--moe-layer-freq", "text", ["1"], "all layers are mixtures", "see model.spec.experts.decoder_sparse_step"),
    only(
        "--moe-router-load-balancing-type",
        "text",
        ["aux_loss", "none"],
        "the loss is over the samples of a micro-step on all data ranks",
        "aux_loss and none are what there is; see model.spec.experts",
    ),
    *_leaves(FUSED, "bool", "moe-grouped-gemm", "moe-permute-fusion", "moe-router-fusion"),
    *_leaves("rows travel by all-to-all", "text", "moe-token-dispatcher-type"),
    *_refusals(OTHER_MODEL, "multi-latent-attention", "apply-layernorm-1p", "squared-relu", "quick-geglu",
        "apply-residual-connection-post-layernorm", "mtp-num-layers", "hybrid-layer-pattern", "encoder-num-layers",
        "no-position-embedding", "rotary-interleaved", "moe-router-pre-softmax", "decoupled-lr", "decoupled-min-lr"),
)  # fmt: skip

PARALLEL: tuple[Rule, ...] = (
    later("--tensor-model-parallel-size", "int", "`parallel.strategy: tp=N`"),
    later("--pipeline-model-parallel-size", "int", "`parallel.strategy: pp=N`"),
    later("--context-parallel-size", "int", "`parallel.strategy: cp=N`"),
    later("--cp-comm-type", "text", "`parallel.strategy: cp_method=ring` (p2p) or `ulysses` (a2a)"),
    later("--expert-model-parallel-size", "int", "`parallel.strategy: ep=N`"),
    later("--expert-tensor-parallel-size", "int", "what tp is; another one is refused"),
    later("--sequence-parallel", "bool", "`parallel.strategy: sp=on`; without it `sp=off`"),
    later("--num-layers-per-virtual-pipeline-stage", "int", "`parallel.strategy: schedule=interleaved:N`"),
    later("--num-virtual-stages-per-pipeline-rank", "int", "`parallel.strategy: schedule=interleaved:N`"),
    later("--use-distributed-optimizer", "bool", "`parallel.strategy: zero=1`"),
    later("--num-distributed-optimizer-instances", "int", "`parallel.strategy: replicate=N`"),
    later("--use-megatron-fsdp", "bool", "`parallel.strategy: zero`, by --data-parallel-sharding-strategy"),
    later(
        "--data-parallel-sharding-strategy",
        "text",
        "`parallel.strategy: zero`: no_shard 0, optim 1, optim_grads 2, optim_grads_params 3",
    ),
    later("--use-torch-fsdp2", "bool", "`parallel.strategy: zero=3`"),
    later("--optimizer-cpu-offload", "bool", "`parallel.strategy: offload=optimizer`"),
    only("--optimizer-offload-fraction", "number", [1.0], "all of it", "all of the state is in host memory, or none"),
    later("--recompute-granularity", "text", "`parallel.strategy: recompute=full` or `selective`"),
    later(
        "--recompute-activations",
        "bool",
        "`parallel.strategy: recompute=selective`, whatever --recompute-granularity says, as in Megatron",
    ),
    later(
        "--recompute-method",
        "text",
        "uniform: `recompute=full`; block: `recompute=first:N` without pp; with pp refused, unless it has all layers",
    ),
    later("--recompute-num-layers", "int", "block: N of `recompute=first:N`; uniform: each layer by itself"),
    leave("--recompute-modules", "list", "selective computes norms, activations and rotations again"),
    later("--ddp-bucket-size", "int", "`comm.bucket_mb`, 4 bytes for each element"),
    *_leaves(OVERLAP, "bool", "overlap-grad-reduce", "overlap-param-gather", "overlap-p2p-communication",
        "overlap-param-gather-with-optimizer-step", "no-overlap-p2p-communication", "tp-comm-overlap",
        "no-align-param-gather", "ddp-average-in-collective", "no-gradient-reduce-div-fusion",
        "overlap-cpu-optimizer-d2h-h2d", "use-precision-aware-optimizer", "use-torch-optimizer-for-cpu-offload"),
    *_refusals("ours is layers=N+N in parallel.strategy, a number for each stage", "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers", "pipeline-model-parallel-layout"),
    leave("--distributed-backend", "text", "nccl with a GPU for each rank, gloo without"),
    does("--distributed-timeout-minutes", "number", "`elastic.timeout_s`, times 60", _minutes),
    leave("--use-tp-pp-dp-mapping", "bool", "the order of axes is parallel.placement"),
    leave("--nccl-communicator-config-path", "text", "`meshwright doctor --nccl` says what to set"),
)  # fmt: skip

TRAINING: tuple[Rule, ...] = (
    later("--micro-batch-size", "int", "`train.micro_batch`"),
    later("--global-batch-size", "int", "`train.global_batch`; absent: micro-batch x data-parallel ranks"),
    later("--train-iters", "int", "`train.steps`"),
    later("--train-samples", "int", "`train.steps`: samples / global batch"),
    *_refusals("ours is train.batch_schedule, by steps", "rampup-batch-size", "step-batch-size-schedule"),
    to("--lr", "number", "train.lr"),
    to("--min-lr", "number", "train.min_lr"),
    later("--lr-decay-style", "text", "`train.schedule`: constant, linear, cosine, linear WSD; others refused"),
    later("--lr-decay-iters", "int", "`train.schedule_steps`"),
    later("--lr-decay-samples", "int", "`train.schedule_steps`: samples / global batch"),
    later("--lr-wsd-decay-iters", "int", "`train.decay_steps`"),
    only("--lr-wsd-decay-style", "text", ["linear"], "wsd decays linearly", "wsd decays linearly here"),
    later("--lr-warmup-iters", "int", "`train.warmup_steps`"),
    later("--lr-warmup-samples", "int", "`train.warmup_steps`: samples / global batch"),
    later("--lr-warmup-fraction", "number", "`train.warmup_steps`: a share of the schedule"),
    to("--lr-warmup-init", "number", "train.warmup_lr"),
    does("--optimizer", "text", "`train.optimizer`: adam is adamw, sgd", _optimizer),
    to("--weight-decay", "number", "train.weight_decay", "matrices alone are decayed, as in Megatron"),
    later("--adam-beta1", "number", "adam: `train.beta1`"),
    later("--adam-beta2", "number", "adam: `train.beta2`"),
    later("--adam-eps", "number", "adam: `train.eps`"),
    later("--sgd-momentum", "number", "sgd: `train.beta1`"),
    to("--clip-grad", "number", "train.grad_clip"),
    to("--seed", "int", "run.seed"),
    *_refusals("weight decay stays as it is", "start-weight-decay", "end-weight-decay", "weight-decay-incr-style"),
    _switch("--fp16", "train.precision", "fp16"),
    _switch("--bf16", "train.precision", "bf16"),
    later("--fp8-format", "text", "`train.precision=fp8`; hybrid, as gradients are rounded, too"),
    *_leaves("precision.fp8_recipe says how products are scaled", "text", "fp8-recipe", "fp8-amax-history-len",
        "fp8-amax-compute-algo", "fp8-margin", "fp8-interval"),
    *_refusals("weights are kept in float32 or bf16: precision.stored", "fp8-param-gather", "fp4-format"),
    to("--loss-scale", "number", "precision.loss_scale"),
    does("--initial-loss-scale", "number", "`precision.initial_power`, its logarithm", _power),
    to("--min-loss-scale", "number", "precision.minimum"),
    to("--loss-scale-window", "int", "precision.window"),
    to("--hysteresis", "int", "precision.hysteresis"),
    _switch("--accumulate-allreduce-grads-in-fp32", "precision.reduce", "float32"),
    _switch("--grad-reduce-in-bf16", "precision.reduce", "bf16"),
    does("--exp-avg-dtype", "text", "`precision.moments`", _stated_dtype("precision.moments")),
    does("--exp-avg-sq-dtype", "text", "`precision.moments`", _stated_dtype("precision.moments")),
    does("--main-params-dtype", "text", "`precision.stored`", _stated_dtype("precision.stored")),
    does("--main-grads-dtype", "text", "`precision.stored`", _stated_dtype("precision.stored")),
    *_leaves(FUSED, "bool", "no-masked-softmax-fusion", "no-bias-swiglu-fusion", "no-bias-dropout-fusion",
        "no-rope-fusion", "no-gradient-accumulation-fusion", "no-persist-layer-norm", "cross-entropy-loss-fusion",
        "use-flash-attn", "use-mcore-models", "attention-softmax-in-fp32", "apply-query-key-layer-scaling"),
    *_leaves(FUSED, "text", "attention-backend", "transformer-impl", "cross-entropy-fusion-impl"),
    _switch("--deterministic-mode", "train.deterministic", True),
    leave("--calculate-per-token-loss", "bool", "the loss is always a mean over all tokens"),
    leave("--manual-gc", "bool", "all ranks collect together: train.gc_every"),
    to("--manual-gc-interval", "int", "train.gc_every"),
    leave("--empty-unused-memory-level", "int", "the allocator keeps what it has"),
    _switch("--no-check-for-nan-in-loss-and-grad", "elastic.nonfinite", "skip", "steps are looked at in any case"),
    *_leaves("SIGTERM saves and ends a run with exit code 75", "bool", "exit-signal-handler"),
    *_refusals("a launcher's time limit ends a run, which saves first: exit code 75", "exit-duration-in-mins",
        "exit-interval"),
    leave("--no-fp8-wgrad", "bool", "precision.fp8_weight_gradient says it"),
    *_leaves("weights are made shard by shard", "bool", "use-cpu-initialization", "init-model-with-meta-device"),
)  # fmt: skip

FILES: tuple[Rule, ...] = (
    later("--data-path", "list", "`data.path`, or `data.mix` with weights; .bin and .idx files are read as they are"),
    later("--split", "text", "`data.validation`: the shares that are not trained on; absent 969,30,1"),
    *_refusals("give --data-path and --split", "train-data-path", "valid-data-path", "test-data-path",
        "data-args-path", "per-split-data-args-path"),
    refused("--mock-data", "data.sources='python-stdlib' with data.path is text without a download"),
    _switch("--reset-attention-mask", "data.mask_documents", True),
    *_refusals("positions count from the start of a sample", "reset-position-ids"),
    *_refusals("the end of a document is learned, too", "eod-mask-loss"),
    *_leaves("tokens are made already; data.tokenizer names one to show text with", "text", "vocab-file", "merge-file"),
    *_leaves(DATA, "text", "data-cache-path", "dataloader-type", "num-workers", "num-dataset-builder-threads"),
    *_leaves(DATA, "bool", "no-create-attention-mask-in-dataloader", "no-mmap-bin-files"),
    to("--save", "text", "checkpoint.dir"),
    later("--load", "text", "the same as --save: a run goes on by itself; another is refused"),
    to("--save-interval", "int", "checkpoint.every"),
    to("--save-retain-interval", "int", "checkpoint.keep_every"),
    to("--most-recent-k", "int", "checkpoint.keep"),
    _switch("--async-save", "checkpoint.background", True),
    *_leaves(CHECKPOINTS, "text", "ckpt-format", "dist-ckpt-format", "async-strategy", "dist-ckpt-strictness"),
    *_leaves(CHECKPOINTS, "bool", "ckpt-fully-parallel-save", "ckpt-fully-parallel-load", "use-dist-ckpt",
        "auto-detect-ckpt-format", "ckpt-assume-constant-structure", "use-persistent-ckpt-worker"),
    *_refusals("a checkpoint holds all that a run needs; weights to start from are model.from_hf", "no-save-optim",
        "no-save-rng", "no-load-optim", "no-load-rng", "finetune", "pretrained-checkpoint", "use-checkpoint-args"),
    to("--log-interval", "int", "observe.log_every"),
    to("--eval-interval", "int", "train.eval_every"),
    later("--eval-iters", "int", "`train.eval_sequences`: times the global batch; without --eval-interval, every 1000"),
    *_leaves(LOGGED, "bool", "log-throughput", "log-params-norm", "log-num-zeros-in-grad", "log-progress",
        "log-timers-to-tensorboard", "log-memory-to-tensorboard", "log-validation-ppl-to-tensorboard",
        "log-world-size-to-tensorboard", "no-log-loss-scale-to-tensorboard", "log-straggler"),
    *_leaves(LOGGED, "text", "timing-log-level", "timing-log-option", "tensorboard-log-interval",
        "tensorboard-queue-size", "logging-level"),
    _named("--tensorboard-dir", "observe.tensorboard", "files go to DIR/tensorboard"),
    _named("--wandb-project", "observe.wandb", "set WANDB_PROJECT"),
    *_leaves("set WANDB_NAME, WANDB_DIR or WANDB_ENTITY", "text", "wandb-exp-name", "wandb-save-dir", "wandb-entity"),
    later("--profile", "bool", "`observe.profile_steps`, with its steps"),
    later("--profile-step-start", "int", "`observe.profile_steps`"),
    later("--profile-step-end", "int", "`observe.profile_steps`, without this one"),
    *_leaves("every rank is profiled", "list", "profile-ranks"),
    *_leaves("profiles are torch's", "bool", "use-pytorch-profiler", "no-one-logger"),
)  # fmt: skip

PRECISION = frozenset({
    "--fp16", "--bf16", "--fp8-format", "--fp8-recipe", "--fp8-amax-history-len", "--fp8-amax-compute-algo",
    "--fp8-margin", "--fp8-interval", "--loss-scale", "--initial-loss-scale", "--min-loss-scale",
    "--loss-scale-window", "--hysteresis",
})  # fmt: skip
"""Flags that go with a dtype to compute in."""

RULES: tuple[Rule, ...] = (*SHAPE, *PARALLEL, *TRAINING, *FILES)
