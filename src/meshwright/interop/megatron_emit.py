"""A plan as the flags of Megatron-LM's pretrain_gpt.py. What `megatron` reads back is the same strategy. No torch."""

from __future__ import annotations

import shlex

from meshwright.interop.emit import Chosen
from meshwright.interop.megatron_rules import PARALLEL, PRECISION, SHAPE
from meshwright.models.spec import ModelSpec
from meshwright.planning.carried import Carried
from meshwright.planning.made import Plan
from meshwright.strategy import Strategy

Flags = list[tuple[str, ...]]
SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
STAYING = frozenset({
    "--vocab-size", "--padded-vocab-size", "--tokenizer-type", "--tokenizer-model", "--attention-dropout",
    "--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion", "--moe-token-dispatcher-type",
    "--ddp-bucket-size", "--distributed-backend", "--distributed-timeout-minutes", "--use-tp-pp-dp-mapping",
    "--nccl-communicator-config-path",
})  # fmt: skip
"""Flags beside those of the shape and the strategy that say neither."""
LLAMA3_SCALING = (1.0, 4.0, 8192)
"""Low and high frequencies and the first length, which Megatron does not ask for."""


def megatron_file(plan: Plan, carried: Carried) -> str:
    """The text of the file: a flag a line."""
    chosen = Chosen.of(plan, "megatron", carried)
    adding = "Add --data-path, --split, --tokenizer-type, --save and --load."
    if carried.source:
        adding = f"What is neither shape, batch nor strategy is as in {carried.source!r}."
    head = f"# {chosen.strategy} on {chosen.gpus} GPUs. {adding}\n# {carried.told}\n"
    rows, tokens = padded_vocabulary(chosen), chosen.spec.vocab_size
    if rows != tokens:
        head += f"# Megatron pads the vocabulary of {tokens} to {rows}, a multiple of tp={chosen.strategy.tp}.\n"
    return head + "".join(shlex.join(flag) + "\n" for flag in megatron_flags(chosen))


def megatron_flags(chosen: Chosen) -> Flags:
    """The flags with their values."""
    carried, kept = chosen.carried, chosen.kept
    asked = carried.config.precision
    same = carried.flags and (kept.stored, kept.moments) == (asked.stored or "float32", asked.moments)
    chosen.refuse_setting_unless(
        bool(same) or not str(kept), str(kept), "weights and moments are written in float32 alone"
    )
    planned: Flags = [
        *_shape(chosen),
        *_parallel(chosen),
        ("--micro-batch-size", f"{chosen.micro_batch}"),
        ("--global-batch-size", f"{chosen.global_batch}"),
    ]
    if carried.flags:
        return _with_given(chosen, planned)
    return [*planned, ("--train-iters", f"{chosen.steps}"), *_training(chosen), *_precision(chosen)]


def _with_given(chosen: Chosen, planned: Flags) -> Flags:
    """What is planned, and all other flags as they were given."""
    carried, strategy = chosen.carried, chosen.strategy
    replaced = {rule.key for rule in (*SHAPE, *PARALLEL)} - STAYING
    if strategy == Strategy.parse(carried.config.parallel.strategy, chosen.gpus):
        # What goes along with the strategy, such as overlaps, goes along still.
        replaced -= {rule.key for rule in PARALLEL if rule.ours.startswith("not applicable")}
    if chosen.tokens is not None:
        replaced |= {"--train-iters", "--train-samples"}
        planned = [*planned, ("--train-iters", f"{chosen.steps}")]
    if chosen.precision != carried.config.train.precision:
        replaced |= PRECISION
        planned = [*planned, *_precision(chosen)]
    replaced |= {flag for flag, *_ in planned}
    return [*planned, *((flag, *words) for flag, words in carried.flags.items() if flag not in replaced)]


def _training(chosen: Chosen) -> Flags:
    """The optimizer and its learning rates, where no flags were given."""
    train = chosen.carried.config.train
    return [
        ("--lr", f"{train.lr:g}"),
        ("--min-lr", f"{train.min_lr:g}"),
        ("--lr-decay-style", "cosine"),
        ("--weight-decay", f"{train.weight_decay:g}"),
        ("--adam-beta1", f"{train.beta1:g}"),
        ("--adam-beta2", f"{train.beta2:g}"),
        ("--adam-eps", f"{train.eps:g}"),
        ("--clip-grad", f"{train.grad_clip:g}"),
    ]


def _precision(chosen: Chosen) -> Flags:
    match chosen.precision:
        case "bf16":
            return [("--bf16",)]
        case "fp16":
            return [("--fp16",), ("--initial-loss-scale", f"{2**16}")]
        case "fp8":
            return [("--bf16",), ("--fp8-format", "hybrid")]
    chosen.refuse_setting_unless(
        chosen.precision == "float32", f"precision={chosen.precision}", "it has no flag for it"
    )
    return []


def _shape(chosen: Chosen) -> Flags:
    spec = chosen.spec
    chosen.refuse_setting_unless(spec.latent_attention is None, "latent attention", "its flags are not written here")
    flags: Flags = [
        ("--num-layers", f"{spec.num_hidden_layers}"),
        ("--hidden-size", f"{spec.hidden_size}"),
        ("--ffn-hidden-size", f"{spec.intermediate_size}"),
        ("--num-attention-heads", f"{spec.num_attention_heads}"),
        ("--kv-channels", f"{spec.head_dim}"),
        ("--seq-length", f"{chosen.sequence_length}"),
        ("--max-position-embeddings", f"{spec.max_position_embeddings}"),
        *_vocabulary(chosen),
        ("--normalization", "RMSNorm" if spec.norm == "rmsnorm" else "LayerNorm"),
        ("--norm-epsilon", f"{spec.norm_eps:g}"),
        ("--init-method-std", f"{spec.initializer_range:g}"),
        ("--hidden-dropout", f"{spec.dropout:g}"),
    ]
    if spec.num_key_value_heads != spec.num_attention_heads:
        flags += [("--group-query-attention",), ("--num-query-groups", f"{spec.num_key_value_heads}")]
    if not spec.tie_word_embeddings:
        flags.append(("--untie-embeddings-and-output-weights",))
    if spec.qk_norm:
        flags.append(("--qk-layernorm",))
    if spec.sliding_window is not None:
        flags.append(("--window-size", f"({spec.sliding_window - 1},0)"))
    activation = {"swiglu": [("--swiglu",)], "gelu": [("--no-bias-gelu-fusion",)], "gelu_tanh": []}
    flags += activation[spec.activation]
    return [*flags, *_positions(chosen, spec), *_biases(chosen, spec), *_experts(chosen, spec)]


def padded_vocabulary(chosen: Chosen) -> int:
    """Rows of the embedding: Megatron gives every rank of tp equally many."""
    tp = chosen.strategy.tp
    return -(-chosen.spec.vocab_size // tp) * tp


def _vocabulary(chosen: Chosen) -> Flags:
    """Its size, and that attention weights are not dropped; flags that were given say how many tokens there are."""
    size = chosen.spec.vocab_size
    if chosen.carried.flags:
        # Whatever the tokenizer has is padded to the size that was planned, or what tp makes of it.
        return [("--make-vocab-size-divisible-by", f"{padded_vocabulary(chosen) // chosen.strategy.tp}")]
    return [("--vocab-size", f"{size}"), ("--make-vocab-size-divisible-by", "1"), ("--attention-dropout", "0.0")]


def _positions(chosen: Chosen, spec: ModelSpec) -> Flags:
    if spec.positions == "learned":
        return [("--position-embedding-type", "learned_absolute")]
    flags: Flags = [("--position-embedding-type", "rope"), ("--rotary-base", f"{int(spec.rope_theta)}")]
    chosen.refuse_setting_unless(
        spec.rope_theta == int(spec.rope_theta), f"rope_theta={spec.rope_theta}", "it takes whole ones"
    )
    scaling = spec.rope_scaling
    if scaling is None:
        return flags
    same = (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings)
    known = scaling.kind == "llama3" and same == LLAMA3_SCALING
    chosen.refuse_setting_unless(known, f"rope_scaling of kind {scaling.kind}", "it has that of Llama 3.1 alone")
    return [*flags, ("--use-rope-scaling",), ("--rope-scaling-factor", f"{scaling.factor:g}")]


def _biases(chosen: Chosen, spec: ModelSpec) -> Flags:
    everywhere = {"q", "k", "v", "o", "up", "down"} | ({"gate"} if spec.activation == "swiglu" else set())
    found = set(spec.bias)
    if found == everywhere:
        return []
    known = found in (set(), {"q", "k", "v"})
    chosen.refuse_setting_unless(known, f"biases of {', '.join(spec.bias)}", "it has all, none, or those of q, k and v")
    return [("--disable-bias-linear",), *([("--add-qkv-bias",)] if found else [])]


def _experts(chosen: Chosen, spec: ModelSpec) -> Flags:
    experts = spec.experts
    if experts is None:
        return []
    plain = experts.first_k_dense_replace == 0 and experts.decoder_sparse_step == 1 and experts.norm_topk_prob
    plain = plain and experts.router_bias_update_rate == 0
    chosen.refuse_setting_unless(
        plain, "this mixture of experts", "dense layers between, and other routers, are not written"
    )
    flags: Flags = [
        ("--num-experts", f"{experts.num_experts}"),
        ("--moe-router-topk", f"{experts.num_experts_per_tok}"),
        ("--moe-ffn-hidden-size", f"{experts.moe_intermediate_size}"),
        ("--moe-router-load-balancing-type", "aux_loss" if experts.router_aux_loss_coef else "none"),
        ("--moe-aux-loss-coeff", f"{experts.router_aux_loss_coef:g}"),
        ("--moe-z-loss-coeff", f"{experts.router_z_loss_coef:g}"),
    ]
    if experts.num_shared_experts:
        width = experts.num_shared_experts * experts.moe_intermediate_size
        flags.append(("--moe-shared-expert-intermediate-size", f"{width}"))
    if experts.capacity_factor is not None:
        flags.append(("--moe-expert-capacity-factor", f"{experts.capacity_factor:g}"))
    return flags


def _parallel(chosen: Chosen) -> Flags:
    strategy = chosen.strategy
    flags: Flags = [
        ("--tensor-model-parallel-size", f"{strategy.tp}"),
        ("--pipeline-model-parallel-size", f"{strategy.pp}"),
        ("--context-parallel-size", f"{strategy.cp}"),
    ]
    if strategy.sp:
        flags.append(("--sequence-parallel",))
    if strategy.cp > 1:
        method = {"ring": "p2p", "ulysses": "a2a"}.get(strategy.cp_method)
        chosen.refuse_unless(method is not None, f"cp_method={strategy.cp_method}", "its groups are not written here")
        flags.append(("--cp-comm-type", f"{method}"))
    if strategy.ep > 1:
        flags += [
            ("--expert-model-parallel-size", f"{strategy.ep}"),
            ("--expert-tensor-parallel-size", f"{strategy.tp}"),
        ]
    return [*flags, *_stages(chosen, strategy), *_sharded(chosen, strategy), *_recompute(chosen, strategy)]


def _stages(chosen: Chosen, strategy: Strategy) -> Flags:
    chosen.refuse_unless(strategy.layers == "even", f"layers={strategy.layers}", "even stages are written")
    if strategy.pp > 1:
        even = chosen.spec.num_hidden_layers % strategy.pp == 0
        chosen.refuse_unless(even, f"pp={strategy.pp}", f"it does not divide {chosen.spec.num_hidden_layers} layers")
    kind, _, count = strategy.schedule.partition(":")
    if kind == "1f1b":
        return []
    each, left = divmod(chosen.spec.num_hidden_layers, strategy.pp * int(count or 1))
    chosen.refuse_unless(kind == "interleaved", f"schedule={strategy.schedule}", "it has 1f1b and interleaved")
    chosen.refuse_unless(not left, f"schedule={strategy.schedule}", "layers are not divided evenly")
    return [("--num-layers-per-virtual-pipeline-stage", f"{each}")]


def _sharded(chosen: Chosen, strategy: Strategy) -> Flags:
    if strategy.host_states == "optimizer" and not strategy.host_activations:
        chosen.refuse_unless(strategy.zero == 1, f"{strategy}", "its optimizer is offloaded with zero=1")
        host: Flags = [
            ("--optimizer-cpu-offload",),
            ("--optimizer-offload-fraction", "1.0"),
            ("--use-precision-aware-optimizer",),
        ]
    else:
        chosen.refuse_unless(
            strategy.offload == "none", f"offload={strategy.offload}", "it offloads the optimizer alone"
        )
        host = []
    if strategy.zero == 0:
        return host
    if strategy.zero == 1:
        found: Flags = [("--use-distributed-optimizer",), ("--overlap-grad-reduce",), ("--overlap-param-gather",)]
        if strategy.replicate > 1:
            found.append(("--num-distributed-optimizer-instances", f"{strategy.replicate}"))
        return [*found, *host]
    chosen.refuse_unless(strategy.replicate == 1, f"replicate={strategy.replicate}", "Megatron-FSDP is written without")
    chosen.refuse_unless(
        strategy.pp == 1, f"zero={strategy.zero} pp={strategy.pp}", "Megatron-FSDP is written without pp"
    )
    return [
        ("--use-megatron-fsdp",),
        ("--use-distributed-optimizer",),
        ("--data-parallel-sharding-strategy", SHARDED[strategy.zero]),
        ("--ckpt-format", "fsdp_dtensor"),
    ]


def _recompute(chosen: Chosen, strategy: Strategy) -> Flags:
    kind, _, count = strategy.recompute.partition(":")
    if kind == "none":
        return []
    if kind == "selective":
        return [("--recompute-granularity", "selective")]
    full: Flags = [("--recompute-granularity", "full")]
    if kind == "full" or (kind == "first" and int(count) >= chosen.spec.num_hidden_layers):
        return [*full, ("--recompute-method", "uniform"), ("--recompute-num-layers", "1")]
    chosen.refuse_unless(kind == "first", f"recompute={strategy.recompute}", "it has full, selective and first:N")
    # Ours are the first layers of the model, which lie on the first stages; its own are as many of every stage.
    chosen.refuse_unless(
        strategy.pp == 1,
        f"recompute={strategy.recompute} with pp={strategy.pp}",
        "it computes as many layers of every stage again; use recompute=full or selective, or pp=1",
    )
    return [*full, ("--recompute-method", "block"), ("--recompute-num-layers", count)]
