"""Models of transformers, as they are, cut into the stages of a pipeline: what one process computes.

Their code computes norms and rotations in float32 whatever the model's dtype is, so that sums in another order may move
a loss by some 1e-7.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshwright as mw
from meshwright.elastic.failure import RankError
from meshwright.errors import ConfigError
from meshwright.models.parts import whole
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool
from tests.parity.test_hugging_face_experts import EXPERTS, LATENT
from tests.parity.test_hugging_face_models import FAMILIES, build

Trace = tuple[list[float], list[float], dict[str, torch.Tensor]]


def train(world: World, family: str, strategy: str, changes: dict[str, Any]) -> Trace:
    model = build(family, **changes)
    parallel = mw.parallelize(model, strategy)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    losses, norms = [], []
    for step in range(2):
        tokens = torch.randint(66, (8, 13), generator=torch.Generator().manual_seed(step))
        mine = [micro.chunk(parallel.strategy.dp)[parallel.data_rank] for micro in tokens.chunk(4)]

        def loss_of(model: Any, micro: torch.Tensor) -> torch.Tensor:
            logits = model(input_ids=micro[:, :-1]).logits
            return F.cross_entropy(logits.double().flatten(0, 1), micro[:, 1:].flatten()) / 4

        total = torch.zeros((), dtype=torch.float64)
        for loss in parallel.passes(loss_of, mine):
            total += loss
        norms.append(float(parallel.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(world.sum(total)) * parallel.strategy.pp / world.size)
    return losses, norms, {name: whole(value.detach()) for name, value in parallel.named_parameters()}


def assert_alike(found: list[Trace], expected: Trace) -> None:
    """All ranks agree with one process, and together they have all of its parameters, under its names."""
    for losses, norms, weights in found:
        assert losses == pytest.approx(expected[0], rel=1e-6)
        assert norms == pytest.approx(expected[1], rel=1e-5)
        for name, value in weights.items():
            assert torch.allclose(value, expected[2][name], rtol=0, atol=1e-5), name
    assert {name for _, _, weights in found for name in weights} == set(expected[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_on_one_device(family: str, pool: RankPool) -> None:
    (expected,) = pool.run(train, 1, family, "dp=1", {})
    assert_alike(pool.run(train, 2, family, "dp=1 pp=2", {}), expected)


FOUR = {"num_hidden_layers": 4}
MOE = {"num_local_experts": 4, "experts_implementation": "eager"}
BALANCED = {"output_router_logits": True}
NO_CACHE = {"use_cache": False}
"""What is computed again must not find what it has put into a cache."""


@pytest.mark.parametrize(
    ("family", "strategy", "ranks", "changes"),
    [
        ("gemma", "tp=2 pp=2", 4, {}),
        ("gemma2", "tp=2 pp=2 schedule=interleaved:2", 4, FOUR),
        ("phi3", "tp=2 pp=2 schedule=zero-bubble", 4, {}),
        ("gemma", "dp=2 pp=2 zero=2", 4, {}),
        ("gemma2", "dp=2 pp=2 zero=3 wrap=block recompute=full", 4, NO_CACHE),
        ("cohere", "dp=2 pp=2 zero=1 schedule=gpipe", 4, {}),
        ("gemma", "dp=2 pp=2 zero=2 schedule=zbv wrap=block", 4, FOUR),
        ("starcoder2", "dp=2 tp=2 pp=2 zero=3", 8, {}),
        ("granite", "pp=4", 4, FOUR),
        ("olmo2", "dp=1 pp=2 layers=3+1 offload=activations", 2, FOUR),
        ("olmo2", "dp=2 pp=2 zero=3 wrap=name:mlp+lm_head+embed_tokens", 4, {}),
        ("mixtral", "dp=1 pp=2", 2, MOE),
    ],
)
def test_with_other_axes_and_schedules(
    family: str, strategy: str, ranks: int, changes: dict[str, Any], pool: RankPool
) -> None:
    (expected,) = pool.run(train, 1, family, "dp=1", changes)
    assert_alike(pool.run(train, ranks, family, strategy, changes), expected)


@pytest.mark.parametrize("family", ["stablelm", "bloom", "mamba", "gemma3_text"])
def test_a_family_that_says_nothing_is_cut_as_it_is_registered(family: str, pool: RankPool) -> None:
    (expected,) = pool.run(train, 1, family, "dp=1", {})
    assert_alike(pool.run(train, 2, family, "dp=1 pp=2", {}), expected)


def by_labels(world: World, strategy: str, narrow: bool) -> tuple[list[float], float]:
    parallel = mw.parallelize(build("gemma2").float(), strategy)
    ids = torch.randint(66, (4, 13), generator=torch.Generator().manual_seed(0))

    def loss_of(model: Any, micro: torch.Tensor) -> torch.Tensor:
        return model(input_ids=micro, labels=micro, attention_mask=torch.ones_like(micro)).loss / 2

    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        losses = parallel.passes(loss_of, ids.chunk(2))
    return [float(loss) for loss in losses], float(parallel.grad_norm())


@pytest.mark.parametrize("narrow", [False, True])
def test_their_own_loss_masks_and_autocast(narrow: bool, pool: RankPool) -> None:
    ((losses, norm),) = pool.run(by_labels, 1, "dp=1", narrow)
    first, last = pool.run(by_labels, 2, "pp=2", narrow)
    assert first[0] == []
    assert last[0] == pytest.approx(losses, rel=1e-6)
    assert first[1] == last[1] == pytest.approx(norm, rel=1e-5)


OPT_PLAN = (
    "model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.layers.*",
    "model.decoder.final_layer_norm", "lm_head",
)  # fmt: skip


def raised(world: World, family: str, changes: dict[str, Any], options: dict[str, Any], plan: Any) -> None:
    if told := refused(world, family, changes, options, plan):
        raise ConfigError(told)


def refused(world: World, family: str, changes: dict[str, Any], options: dict[str, Any], plan: Any) -> str:
    model = build(family, **changes)
    if plan is not None:
        model.pipeline_plan = plan
    parallel = mw.parallelize(model, "pp=2")
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), **options}
    try:
        parallel.forward([batch], lambda output, _: output.logits.isfinite().all())
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("family", "changes", "options", "plan", "told"),
    [
        ("gemma", {}, {"output_hidden_states": True}, None, "the output of GemmaForCausalLM uses what model"),
        ("mixtral", MOE, {"output_router_logits": True}, None, "the balancing loss of MixtralForCausalLM needs what"),
        ("mixtral", MOE | BALANCED, {}, None, "pass output_router_logits=False (config.output_router_logits)"),
        ("mixtral", MOE | BALANCED, {"output_router_logits": False}, None, ""),
        ("glm_moe_dsa", MOE | EXPERTS | LATENT, {}, None, "layers.1 ended in DynamicOutputShapeException"),
        ("opt", {}, {}, None, "calls model.decoder.layers.0 before model.decoder.final_layer_norm"),
        ("opt", {}, {}, OPT_PLAN, ""),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    family: str, changes: dict[str, Any], options: dict[str, Any], plan: Any, told: str, pool: RankPool
) -> None:
    first = pool.run(refused, 2, family, changes, options, plan)[0]
    assert told in first
    assert bool(first) == bool(told)


def test_a_pass_that_drops_a_layer_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match=r"did not call model.decoder.layers.1 in this pass"):
        pool.run(raised, 2, "opt", {"layerdrop": 1.0}, {}, OPT_PLAN)


def gathered(world: World) -> str:
    try:
        mw.parallelize(build("olmo2"), "dp=2 pp=2 zero=3 wrap=name:model")
    except ConfigError as error:
        return str(error)
    return ""


def test_what_is_on_several_stages_is_not_gathered_as_one(pool: RankPool) -> None:
    for found in pool.run(gathered, 4):
        assert "wrap=name:model gathers a Olmo2Model as a whole, and pp cuts it into stages; use wrap=block" in found
