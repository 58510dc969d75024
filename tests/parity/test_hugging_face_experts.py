"""Experts of models of transformers: dealt out (ep), cut (tp), both, as one process computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from meshwright.errors import ConfigError
from meshwright.models.expert_plan import holders_of
from meshwright.models.parts import local_of, whole
from meshwright.parallel import tensor
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.pool import RankPool
from tests.conftest import CommandLine
from tests.parity.test_hugging_face_models import SHAPE, Trace, assert_alike

EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "moe_layer_start_index": 1, "n_group": 1,
    "topk_group": 1, "shared_expert_intermediate_size": 24, "n_shared_experts": 1, "moe_num_shared_experts": 1,
}  # fmt: skip


LATENT = {
    "head_dim": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "mixtral": {},
    "olmoe": {},
    "deepseek_v3": LATENT,
    "gpt_oss": {},
    "qwen2_moe": {},
    "granitemoe": {},
    "dots1": {},
    "glm4_moe": {},
    "ernie4_5_moe": {},
    # Matrices the other way round, and router and experts of other names.
    "aria_text": {},
    "minimax_m2": {},
}


EVERY_WAY = list(FAMILIES)[:5]


STRATEGIES = [
    "dp=2 ep=2",
    "dp=2 zero=2 ep=2",
    "dp=2 zero=3 ep=2",
    "dp=4 ep=2",
    "dp=4 zero=1 ep=2",
    "tp=2",
    "dp=2 tp=2 ep=2",
]


def build(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    implementation = changes.pop("experts", "eager")
    config = AutoConfig.for_model(family, **{**SHAPE, **EXPERTS, **FAMILIES.get(family, {}), **changes})
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation=implementation
    ).double()
    for module in holders_of(model).values():
        for parameter in module.parameters():
            # Biases begin as zeros, and all else so small that experts hardly matter.
            nn.init.normal_(parameter, std=0.2)
    if family == "gpt_oss":
        # Its own table splits nothing but the head.
        model.tensor_plan = {"*.experts": "experts-summed", "*": "tokens"}
    return model


def train(world: World, model: Any, strategy: str, labels: bool = False) -> Trace:
    parallel = mw.parallelize(model, strategy)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    own = parallel.strategy.own_samples(parallel.data_rank, 4)
    losses, norms = [], []
    for step in range(2):
        tokens = torch.randint(66, (4, 13), generator=torch.Generator().manual_seed(step))[own]
        with parallel.micro_step(last=True):
            output: Any = parallel(input_ids=tokens, labels=tokens if labels else None, use_cache=False)
            if labels:
                loss = output.loss
            else:
                loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten())
            loss = loss * parallel.weight
            loss.backward()
        norms.append(float(mw.clip_grad_norm_(parallel.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(world.sum(loss.detach().double())) / world.size)
    return losses, norms, {name: whole(value.detach()) for name, value in parallel.named_parameters()}


def train_family(world: World, family: str, strategy: str, changes: dict[str, Any] | None = None) -> Trace:
    model = build(family, **(changes or {}))
    count = {name: parameter.numel() for name, parameter in model.named_parameters()}
    found = train(world, model, strategy)
    for name, module in holders_of(model).items():
        for held, parameter in module.named_parameters(recurse=False):
            # What is not split is proved for nothing.
            parts = 1 if world.size == 1 else world.size // (2 if held == "down_proj_bias" and "tp" in strategy else 1)
            if "dp=4" not in strategy and ("ep" in strategy or world.size == 2):
                assert local_of(parameter).numel() * parts == count[f"{name}.{held}"], (name, held)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_with_experts_trains_as_on_one_device(family: str, pool: RankPool) -> None:
    (expected,) = pool.run(train_family, 1, family, "dp=1")
    for strategy in STRATEGIES if family in EVERY_WAY else ("dp=2 zero=3 ep=2", "dp=2 tp=2 ep=2"):
        for found in pool.run(train_family, Strategy.fewest_processes(strategy), family, strategy):
            assert_alike(found, expected)


def train_uneven(world: World, bias: list[float], strategy: str) -> Trace:
    model = build("gpt_oss")
    for layer in model.model.layers:
        layer.mlp.router.bias.data.copy_(torch.tensor(bias))
    return train(world, model, strategy)


@pytest.mark.parametrize("bias", [(50, 0, 0, -50), (50, 50, -50, -50), (-50, -50, 50, 40)])
def test_experts_and_ranks_without_a_row_take_part(bias: tuple[float, ...], pool: RankPool) -> None:
    (expected,) = pool.run(train_uneven, 1, list(bias), "dp=1")
    for strategy in ("dp=2 ep=2", "dp=2 zero=3 ep=2", "dp=4 ep=4", "dp=2 tp=2 zero=2 ep=2"):
        for found in pool.run(train_uneven, Strategy.fewest_processes(strategy), list(bias), strategy):
            assert_alike(found, expected)


def first_loss(world: World, experts: str, strategy: str) -> tuple[float, float]:
    """In float32, which the products of transformers for all experts at once want."""
    model = build("qwen3_moe", experts=experts).float()
    parallel = mw.parallelize(model, strategy)
    tokens = torch.randint(66, (4, 13), generator=torch.Generator().manual_seed(1))
    tokens = tokens.chunk(parallel.strategy.dp)[parallel.data_rank]
    with parallel.micro_step(last=True):
        loss = parallel(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
    return float(world.sum(loss.detach())) / world.size, float(mw.clip_grad_norm_(parallel.parameters(), 0.0))


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_products_of_all_experts_at_once_know_how_many_there_are(experts: str, pool: RankPool) -> None:
    (expected,) = pool.run(first_loss, 1, "eager", "dp=1")
    for strategy in ("dp=2 ep=2", "tp=2", "dp=2 tp=2 ep=2"):
        for found in pool.run(first_loss, Strategy.fewest_processes(strategy), experts, strategy):
            assert found == pytest.approx(expected, rel=1e-5)


def train_balanced(world: World, strategy: str) -> Trace:
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return train(world, build("mixtral", **changes), strategy, labels=True)


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 ep=2", "dp=4 zero=3 ep=2", "dp=2 shares=3+1 ep=2"])
def test_balancing_loss_is_that_of_all_ranks(strategy: str, pool: RankPool) -> None:
    (expected,) = pool.run(train_balanced, 1, "dp=1")
    for found in pool.run(train_balanced, Strategy.fewest_processes(strategy), strategy):
        assert_alike(found, expected)


def balance_with_padding(world: World) -> str:
    parallel = mw.parallelize(build("mixtral", output_router_logits=True), "dp=2 ep=2")
    tokens = torch.ones(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="a mask leaves out") as refused:
        parallel(input_ids=tokens, labels=tokens, attention_mask=tokens.tril(), use_cache=False)
    return str(refused.value)


def test_balancing_loss_of_padded_sequences_is_refused(pool: RankPool) -> None:
    for told in pool.run(balance_with_padding, 2):
        assert "pass output_router_logits=False" in told


def test_experts_of_transformers_are_proved(meshwright: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "from transformers import AutoModelForCausalLM, Qwen3MoeConfig\n"
        "def build():\n"
        f"    config = Qwen3MoeConfig(**{ {**SHAPE, **EXPERTS} })\n"
        "    return AutoModelForCausalLM.from_config(config)\n"
    )
    result = meshwright("verify", "--model", "theirs:build", "--parallel", "dp=2 zero=3 tp=2 ep=2", "--steps", 2)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 15}, "tp=2 does not divide the inner width 15 of the experts in"),
        ("mixtral", {"router_jitter_noise": 0.1}, "has router_jitter_noise=0.1"),
        ("granitemoe_swa", {}, "does not say how tp treats model.layers.0.self_attn.sinks"),
        ("llama4_text", {}, "asks for the style 'packed_rowwise' for model.layers.0.feed_forward.experts.gate_up_proj"),
        ("deepseek_v2", LATENT, "the style 'mla_kv_a_proj'"),
        ("qwen3_next", {}, "has a convolution, model.layers.0.linear_attn.conv1d"),
    ],
)
def test_experts_that_cannot_be_cut_are_refused_by_name(family: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tensor.check(build(family, **changes), 2)
