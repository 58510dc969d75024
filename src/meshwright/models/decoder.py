"""The decoder, written for one device: everything a family differs in comes from its spec.

It knows nothing of ranks; parallelism is applied from outside. Layers live in a ModuleDict under their global index,
so that what a pipeline rank holds (this module with layers removed) keeps every parameter's name.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from meshwright.models.attention import Attention, Documents, KeyValueCache
from meshwright.models.counter_random import keep_mask, token_keys
from meshwright.models.document_attention import look_ahead
from meshwright.models.feed_forward import FeedForward
from meshwright.models.head import Head, Targets
from meshwright.models.mixture import Mixture
from meshwright.models.norms import LayerNorm, RMSNorm
from meshwright.models.rope import angles
from meshwright.models.spec import ModelSpec
from meshwright.models.tensor_plan import tensor_plan


class Dropout(nn.Module):
    """Dropout whose mask is a function of (seed, sample, position, site, channel), however a batch is split."""

    def __init__(self, rate: float, site: int) -> None:
        super().__init__()
        self.rate = rate
        self.site = site

    def forward(self, x_BTC: Tensor, keys_BT: Tensor | None) -> Tensor:
        if keys_BT is None:
            return x_BTC
        keep = keep_mask(keys_BT, self.site, x_BTC.shape[-1], self.rate)
        return torch.where(keep, x_BTC / (1 - self.rate), 0.0)


def _norm(spec: ModelSpec) -> nn.Module:
    kind = RMSNorm if spec.norm == "rmsnorm" else LayerNorm
    return kind(spec.hidden_size, eps=spec.norm_eps)


class Block(nn.Module):
    """One layer: attention and feed-forward, each on a norm of the residual and added to it."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.input_layernorm = _norm(spec)
        self.self_attn = Attention(spec, layer)
        self.post_attention_layernorm = _norm(spec)
        self.mlp = Mixture(spec) if spec.is_sparse(layer) else FeedForward(spec, spec.intermediate_size)
        self.attention_dropout = Dropout(spec.dropout, 2 * layer + 1)
        self.mlp_dropout = Dropout(spec.dropout, 2 * layer + 2)

    def forward(
        self,
        x_BTC: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        dropout_keys: Tensor | None = None,
        cache: KeyValueCache | None = None,
        documents: Documents = None,
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x_BTC), rope, cache, documents)
        x_BTC = x_BTC + self.attention_dropout(attended, dropout_keys)
        return x_BTC + self.mlp_dropout(self.mlp(self.post_attention_layernorm(x_BTC)), dropout_keys)


class Body(nn.Module):
    """Embeddings, layers and the last norm; Hugging Face's `model`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        if spec.positions == "learned":
            self.embed_positions = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)
        self.embedding_dropout = Dropout(spec.dropout, 0)
        self.layers = nn.ModuleDict({str(layer): Block(spec, layer) for layer in range(spec.num_hidden_layers)})
        self.norm = _norm(spec)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        dropout_keys: Tensor | None = None,
        cache: KeyValueCache | None = None,
        documents_BT: Tensor | None = None,
        hidden_BTC: Tensor | None = None,
        layers: range | None = None,
    ) -> Tensor:
        x_BTC = self._embed(tokens_BT, positions_BT, dropout_keys) if hidden_BTC is None else hidden_BTC
        rope = angles(self.spec, positions_BT, x_BTC.dtype) if self.spec.positions == "rope" else None
        documents: Documents = documents_BT
        if cache is None:
            documents = look_ahead(
                documents_BT, tokens_BT.shape[1], self.spec.sliding_window, x_BTC, self.spec.head_dim
            )
        for layer in layers or range(self.spec.num_hidden_layers):
            x_BTC = self.layers[str(layer)](x_BTC, rope, dropout_keys, cache, documents)
        return self.norm(x_BTC) if ends_with(self.spec, layers) else x_BTC

    def _embed(self, tokens_BT: Tensor, positions_BT: Tensor, dropout_keys: Tensor | None) -> Tensor:
        x_BTC = self.embed_tokens(tokens_BT)
        if self.spec.positions == "learned":
            x_BTC = x_BTC + self.embed_positions(positions_BT)
        return self.embedding_dropout(x_BTC, dropout_keys)


def ends_with(spec: ModelSpec, layers: range | None) -> bool:
    """Whether these layers are the last ones."""
    return layers is None or layers.stop == spec.num_hidden_layers


class Decoder(nn.Module):
    """A language model: token ids in, logits out."""

    uses_all_parameters = True
    """Every pass does: ranks need not ask each other which have a gradient."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        spec.check_buildable()
        self.spec = spec
        self.dropout_seed = 0
        self.model = Body(spec)
        self.lm_head = Head(spec.hidden_size, spec.vocab_size, bias="head" in spec.bias)
        self.tie()

    def tie(self) -> None:
        """Let the head use the embedding's weight, if the spec says so; `to_empty` of a meta model undoes it."""
        if self.spec.tie_word_embeddings and self.lm_head is not None:
            (weight,) = self.model.embed_tokens.parameters()
            self.lm_head.weight = weight

    @property
    def tensor_plan(self) -> dict[str, str]:
        """How tensor parallel splits each module of this shape."""
        names = [name for name, _ in self.named_modules()]
        plan = tensor_plan(self.spec)
        return {pattern: rule for pattern, rule in plan.items() if any(fnmatchcase(name, pattern) for name in names)}

    @property
    def expert_plan(self) -> tuple[str, ...]:
        """Which modules hold experts."""
        return () if self.spec.experts is None else ("model.layers.*.mlp.experts",)

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        samples_B: Tensor | None = None,
        cache: KeyValueCache | None = None,
        documents_BT: Tensor | None = None,
        hidden_BTC: Tensor | None = None,
        layers: range | None = None,
        targets: Targets | None = None,
    ) -> Tensor:
        """Logits (batch, tokens, vocabulary); with `targets` the weighted sum of their cross-entropies instead.

        `positions` default to 0, 1, ... after what the cache holds. `samples` are the global numbers of the sequences,
        from which dropout masks follow; without them a model in training mode draws them from torch's generator.
        With `documents`, numbers of the documents in which tokens are (those in the cache too), tokens attend within
        their document only.
        With `layers`, only these: from what the layer before them gave (`hidden`, unless they are the first) to what
        the last of them gives (logits, if it is the model's last).
        """
        if positions_BT is None:
            start = cache.length if cache is not None else 0
            positions_BT = torch.arange(start, start + tokens_BT.shape[1], device=tokens_BT.device)[None]
        keys = self._dropout_keys(tokens_BT, positions_BT, samples_B)
        hidden_BTC = self.model(tokens_BT, positions_BT, keys, cache, documents_BT, hidden_BTC, layers)
        if not ends_with(self.spec, layers):
            return hidden_BTC
        return self.lm_head(hidden_BTC) if targets is None else self.lm_head(hidden_BTC, targets)

    def _dropout_keys(self, tokens_BT: Tensor, positions_BT: Tensor, samples_B: Tensor | None) -> Tensor | None:
        if not (self.training and self.spec.dropout):
            return None
        if samples_B is None:
            samples_B = torch.randint(2**62, tokens_BT.shape[:1], device=tokens_BT.device)
        return token_keys(self.dropout_seed, samples_B, positions_BT.expand_as(tokens_BT))
