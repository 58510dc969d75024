"""The bare loop: what an expert writes in an hour for one GPU, on nothing but PyTorch.

A plain Llama decoder: float32 weights, autocast, SDPA, each block and the loss compiled on a GPU, fused AdamW,
clipping. Names of parameters are Hugging Face's, so that it starts from the same weights as ours.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.bench.clock import Clock
from meshwright.bench.contenders import Unable
from meshwright.bench.trial import Facts, Trial
from meshwright.models.initialize import initialize
from meshwright.models.rope import angles
from meshwright.models.spec import ModelSpec
from meshwright.strategy import Strategy

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        width, self.head = spec.hidden_size, spec.head_dim
        queries, keys = spec.num_attention_heads * self.head, spec.num_key_value_heads * self.head
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj, self.v_proj = nn.Linear(width, keys, bias=False), nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (_rotate(one, cosines, sines) for one in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        width, inner = spec.hidden_size, spec.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, spec: ModelSpec, recompute: str) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = FeedForward(spec)
        self.recompute = recompute

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.recompute == "none":
            return self.run(*inputs)
        contexts: dict[str, Any] = {"context_fn": _keep_products} if self.recompute == "selective" else {}
        return checkpoint(self.run, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts)

    def run(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, spec: ModelSpec, recompute: str) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Block(spec, recompute) for _ in range(spec.num_hidden_layers))
        self.norm = nn.RMSNorm(spec.hidden_size, spec.norm_eps)

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        # The residual in the computing dtype, as in ours; autocast alone would leave it in float32.
        x = self.embed_tokens(tokens).to(dtype)
        cosines, sines = angles(self.spec, torch.arange(tokens.shape[1], device=tokens.device)[None], torch.float32)
        for block in self.layers:
            x = block(x, cosines, sines)
        return self.norm(x)


class Llama(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, spec: ModelSpec, recompute: str = "none") -> None:
        super().__init__()
        self.model = Body(spec, recompute)
        self.lm_head = nn.Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return self.lm_head(self.model(tokens, dtype))


def train(trial: Trial, clock: Clock) -> Facts:
    """Train."""
    spec, settings, device = trial.spec, trial.config.train, clock.device
    recompute = Strategy.parse(trial.config.parallel.strategy, 1).recompute
    check(spec, settings.precision, settings.optimizer, recompute)
    with device:
        model = Llama(spec, recompute)
    with clock.aside():
        initialize(model, spec, trial.config.run.seed)
    loss_of = _loss
    if trial.compiles(device.type):
        for block in model.model.layers:
            block.compile()
        loss_of = torch.compile(_loss)
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)
    dtype = DTYPES[settings.precision]
    batches = [torch.from_numpy(tokens) for tokens in trial.batches()]
    if device.type == "cuda":
        batches = [batch.pin_memory() for batch in batches]
    clock.begin()
    for batch in batches:
        tokens = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext():
            loss = loss_of(model(tokens[:, :-1], dtype), tokens[:, 1:])
        loss.backward()
        if settings.grad_clip:
            nn.utils.clip_grad_norm_(parameters, settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        clock.stepped(loss)
    return Facts(sum(one.numel() for one in parameters))


def check(spec: ModelSpec, precision: str, optimizer: str, recompute: str) -> None:
    """Raise where the loop would train something else."""
    plain = ModelSpec.model_validate(
        {
            name: getattr(spec, name)
            for name in (
                *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
                *("num_key_value_heads", "head_dim", "max_position_embeddings", "norm_eps", "rope_theta"),
                *("rope_scaling", "tie_word_embeddings", "initializer_range", "family"),
            )
        }
    )
    if plain != spec:
        unlike = [name for name in type(spec).model_fields if getattr(spec, name) != getattr(plain, name)]
        raise Unable(f"the bare loop is a plain Llama; this model differs in {', '.join(unlike)}")
    if precision not in DTYPES or optimizer != "adamw" or recompute.startswith("first"):
        raise Unable(f"the bare loop trains in {' or '.join(DTYPES)} with adamw, recompute none, selective or full")


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cosines + torch.cat((-second, first), dim=-1) * sines).type_as(x)


def _keep_products() -> Any:
    kept = {
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }

    def policy(context: Any, operation: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
