"""The shape of a model as facts: what the decoder builds, what the planner counts, what a checkpoint records.

Field names are those of Hugging Face's `config.json` where it has one. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from meshwright.errors import UserError

Family = Literal["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2", "deepseek_v3"]
Linear = Literal["q", "k", "v", "o", "gate", "up", "down", "head"]


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class RopeScaling(_Facts):
    """How rotary frequencies are stretched beyond the length that the model was first trained on."""

    kind: Literal["linear", "llama3"]
    factor: float = Field(gt=0)
    low_freq_factor: float = 1.0
    """llama3 only: wavelengths above original length / this are fully stretched."""
    high_freq_factor: float = 4.0
    """llama3 only: wavelengths below original length / this are left alone."""
    original_max_position_embeddings: int = 8192
    """llama3 only: the length of the first training."""


class Experts(_Facts):
    """The mixture-of-experts layers."""

    num_experts: int = Field(gt=0)
    num_experts_per_tok: int = Field(gt=0)
    moe_intermediate_size: int = Field(gt=0)
    num_shared_experts: int = Field(default=0, ge=0)
    """Experts that every token visits; computed as one feed-forward of this many times the width."""
    norm_topk_prob: bool = True
    """Whether the weights of the chosen experts are rescaled to sum to one."""
    first_k_dense_replace: int = Field(default=0, ge=0)
    """How many of the first layers are dense."""
    decoder_sparse_step: int = Field(default=1, ge=1)
    """Every how many layers is a mixture; 1 means all."""
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss, summed over layers; 0 switches it off."""
    router_bias_update_rate: float = Field(default=0.0, ge=0)
    """Step of the bias that steers tokens to idle experts without a loss; 0 switches it off."""
    router_z_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the loss that keeps the router's logits small, summed over layers; 0 switches it off."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """In training an expert takes at most ceil(this x tokens x num_experts_per_tok / num_experts) tokens of a sequence,
    the first ones; none means all."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than num_experts={self.num_experts}"
            )
        return self


class LatentAttention(_Facts):
    """Multi-head latent attention (DeepSeek): facts for counting; the decoder does not build it."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class ModelSpec(_Facts):
    """A decoder's shape. Equal specs are equal models up to their weights."""

    family: Family = "llama"
    """Whose parameter names and file layout apply when reading and writing Hugging Face folders."""
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    """Width of the dense feed-forward."""
    num_hidden_layers: int = Field(gt=0, le=10_000)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    """Fewer than num_attention_heads is grouped-query attention."""
    head_dim: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    """The longest sequence; learned positions have this many rows."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = Field(default=1e-5, gt=0)
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    bias: tuple[Linear, ...] = Field(default=(), strict=False)
    """The linear layers that have a bias."""
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation."""
    sliding_window: int | None = Field(default=None, gt=0)
    """How many of the latest positions a token attends to; none means all."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of embeddings and of what each block adds to the residual; attention weights are not dropped."""
    tie_word_embeddings: bool = False
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of fresh weights; projections into the residual take it over sqrt(2 x layers)."""
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None

    @field_validator("bias")
    @classmethod
    def _in_order(cls, bias: tuple[Linear, ...]) -> tuple[Linear, ...]:
        """One order and no repeats, so that equal sets are equal specs."""
        return tuple(name for name in get_args(Linear) if name in bias)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Defaults that follow from other fields: as many KV heads as heads, head size = width / heads."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        heads, width = filled.get("num_attention_heads"), filled.get("hidden_size")
        if isinstance(heads, int) and heads > 0:
            if filled.get("num_key_value_heads") is None:
                filled["num_key_value_heads"] = heads
            if filled.get("head_dim") is None and isinstance(width, int):
                if width % heads:
                    raise ValueError(
                        f"hidden_size={width} is not divisible by num_attention_heads={heads}; set head_dim"
                    )
                filled["head_dim"] = width // heads
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.positions == "rope" and self.head_dim % 2 and self.latent_attention is None:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary positions")
        if self.activation != "swiglu" and "gate" in self.bias:
            raise ValueError(f"bias names 'gate', which a {self.activation} feed-forward does not have")
        if self.tie_word_embeddings and "head" in self.bias:
            raise ValueError("bias names 'head', which tied embeddings do not have")
        return self

    def check_buildable(self) -> None:
        """Raise a UserError unless the decoder can build this shape."""
        if self.latent_attention is not None:
            raise UserError(
                "this model has multi-head latent attention, which the decoder does not build; "
                "its facts serve counting and planning only"
            )

    def is_sparse(self, layer: int) -> bool:
        """Whether that layer's feed-forward is a mixture of experts."""
        experts = self.experts
        return (
            experts is not None
            and layer >= experts.first_k_dense_replace
            and (layer + 1) % experts.decoder_sparse_step == 0
        )
