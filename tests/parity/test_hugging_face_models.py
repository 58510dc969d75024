"""Models of transformers, as they are, under data and tensor parallel: what one process computes, for many families.

Their code computes norms and rotations in float32 whatever the model's dtype is, so that sums in another order may move
a loss by some 1e-7; `verify` knows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from meshwright.cli.main import main
from meshwright.errors import ConfigError
from meshwright.models.hf_tensor_plan import hugging_face_plan
from meshwright.models.parts import whole
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 66, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
# None of them is a preset's family. Some fuse what others keep apart, tie embeddings, or cap and scale logits.
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {},
    "gemma": {},
    "gemma2": {},
    "granite": {},
    "olmo2": {},
    "phi3": {},
    "starcoder2": {},
    "glm": {},
    "smollm3": {},
    "ernie4_5": {},
    "gpt_neox": {},
    "nemotron": {},
    "helium": {},
    "exaone4": {},
}
ONLY_DATA: dict[str, dict[str, Any]] = {
    "stablelm": {},
    "bloom": {"n_head": 4, "n_layer": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
}
Trace = tuple[list[float], list[float], dict[str, torch.Tensor]]


def build(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    own = {**FAMILIES, **ONLY_DATA}.get(family, {})
    config = AutoConfig.for_model(family, **{**SHAPE, **own, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()


def train(world: World, family: str, strategy: str) -> Trace:
    model = build(family)
    parallel = mw.parallelize(model, strategy)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    ranks, rank = parallel.strategy.dp, parallel.data_rank
    losses, norms = [], []
    for step in range(3):
        tokens = torch.randint(66, (4, 13), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        with parallel.micro_step(last=True):
            logits: Any = parallel(input_ids=tokens[:, :-1], use_cache=False)
            loss = F.cross_entropy(logits.logits.double().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        norms.append(float(mw.clip_grad_norm_(parallel.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(world.sum(loss.detach())) / world.size)
    return losses, norms, {name: whole(value.detach()) for name, value in parallel.named_parameters()}


def assert_alike(found: Trace, expected: Trace) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    for name, value in expected[2].items():
        assert torch.allclose(found[2][name], value, rtol=0, atol=1e-5), name


def __getattr__(name: str) -> Any:
    """A family as `module:family`, for `meshwright verify`."""
    if name not in FAMILIES:
        raise AttributeError(name)
    return partial(build, name)


@pytest.mark.parametrize("strategy", ["tp=2", "dp=2 zero=3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_verify_proves_a_family(family: str, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", f"{__name__}:{family}", "--parallel", strategy, "--steps", "3"]
    assert main(["verify", *arguments]) == 0, capsys.readouterr().out


def test_rounding_of_a_family_is_told_apart_from_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", f"{__name__}:gemma", "--steps", "2"]
    assert main(["verify", *arguments, "--parallel", "dp=2 zero=3"]) == 0
    told = "agree to 1e-05 in float64 (model.layers.0.input_layernorm (GemmaRMSNorm) rounds to float32, by itself)"
    assert told in capsys.readouterr().out
    # Where its rounding is the same on both sides, nothing is forgiven.
    assert main(["verify", *arguments, "--parallel", "tp=2"]) == 0
    assert "agree to 1e-09 in float64" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["gemma2", "phi3", "exaone4"])
def test_both_at_once(family: str, pool: RankPool) -> None:
    (expected,) = pool.run(train, 1, family, "dp=1")
    for found in pool.run(train, 4, family, "dp=2 tp=2 zero=3"):
        assert_alike(found, expected)


@pytest.mark.parametrize("family", ONLY_DATA)
def test_families_without_a_table_train_under_data_parallel(family: str, pool: RankPool) -> None:
    (expected,) = pool.run(train, 1, family, "dp=1")
    for strategy in ("dp=2", "dp=2 zero=3"):
        for found in pool.run(train, 2, family, strategy):
            assert_alike(found, expected)


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("stablelm", {}, "tp needs a table that says how StableLmForCausalLM is split"),
        ("apertus", {}, r"does not say how tp treats model.layers.0.mlp.act_fn"),
        ("gemma", {"num_key_value_heads": 1}, "tp=2 does not divide num_key_value_heads=1"),
        ("gemma", {"attention_dropout": 0.1}, "has attention_dropout=0.1"),
    ],
)
def test_what_a_model_does_not_support_is_refused_by_name(family: str, changes: dict[str, Any], told: str) -> None:
    from meshwright.parallel import tensor

    with pytest.raises(ConfigError, match=told):
        tensor.check(build(family, **changes), 2)


def test_a_vocabulary_that_cannot_be_cut_evenly_stays_whole(pool: RankPool) -> None:
    plan = hugging_face_plan(build("gemma", vocab_size=67), 2)
    assert plan is not None
    assert plan["lm_head"] == plan["model.embed_tokens"] == "tokens"
