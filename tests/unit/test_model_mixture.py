"""The mixture of experts against a loop over tokens in float64: output, gradients, balancing loss and bias."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.models.initialize import build
from meshwright.models.mixture import Mixture, load_metrics, mixtures, step_load
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec

WIDTH, TOKENS, EXPERTS = 64, 11, 8
FACTS = {"num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 20}


def mixture(activation: str = "swiglu", **facts: object) -> Mixture:
    fields = preset("tiny").model_dump() | {"num_hidden_layers": 1, "activation": activation, "initializer_range": 0.3}
    made = build(ModelSpec.model_validate(fields | {"experts": FACTS | facts}), seed=6, dtype=torch.float64)
    return next(mixtures(made))


def tokens(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def metrics_of(model: torch.nn.Module) -> dict[str, float]:
    """Of what was counted since the last time."""
    numbers = step_load(model).numbers
    return load_metrics([] if numbers is None else numbers.tolist())


def expert_output(layer: Mixture, expert: int, x: Tensor) -> Tensor:
    weights = layer.experts
    if weights.gated:
        inner = F.silu(weights.gate_proj[expert] @ x) * (weights.up_proj[expert] @ x)
    else:
        inner = F.gelu(weights.up_proj[expert] @ x)
    return weights.down_proj[expert] @ inner


def naive(layer: Mixture, x_1NC: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Output, balancing loss without its coefficient, and how many tokens each expert got."""
    facts = layer.facts
    outputs, load, probabilities = [], [0] * EXPERTS, []
    for x in x_1NC[0]:
        probability = (layer.gate.weight @ x).softmax(-1)
        probabilities.append(probability)
        ranked = sorted(range(EXPERTS), key=lambda e: -float(probability[e].detach() + layer.expert_bias[e]))
        chosen = ranked[: facts.num_experts_per_tok]
        total = sum(probability[e] for e in chosen) if facts.norm_topk_prob else 1.0
        y = sum(probability[e] / total * expert_output(layer, e, x) for e in chosen)
        if facts.num_shared_experts:
            shared = layer.shared_experts
            y = y + shared.down_proj.weight @ (F.silu(shared.gate_proj.weight @ x) * (shared.up_proj.weight @ x))
        outputs.append(y)
        for e in chosen:
            load[e] += 1
    mean = torch.stack(probabilities).mean(0)
    share = torch.tensor(load, dtype=torch.float64) / (TOKENS * facts.num_experts_per_tok)
    return torch.stack(outputs)[None], EXPERTS * (share * mean).sum(), load


CASES = {
    "plain": {},
    "weights not rescaled": {"norm_topk_prob": False},
    "shared experts": {"num_shared_experts": 2},
    "one expert each": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": EXPERTS},
    "ungated": {"activation": "gelu"},
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_a_loop_over_tokens(case: str) -> None:
    layer = mixture(**CASES[case]).eval()
    layer.expert_bias[:] = torch.linspace(-0.2, 0.2, EXPERTS)
    other, x, y = copy.deepcopy(layer), tokens().requires_grad_(), tokens().requires_grad_()
    made, (expected, _, _) = layer(x), naive(other, y)
    torch.testing.assert_close(made, expected)
    weight = tokens(1)
    (made * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for (name, ours), theirs in zip(layer.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_the_balancing_loss_has_the_gradient_of_its_formula() -> None:
    layer = mixture(router_aux_loss_coef=0.7).train()
    layer.auxiliary_scale = 0.25
    other, x, y = copy.deepcopy(layer), tokens().requires_grad_(), tokens().requires_grad_()
    made, (expected, loss, _) = layer(x), naive(other, y)
    torch.testing.assert_close(made, expected)
    assert layer.auxiliary_loss is not None
    torch.testing.assert_close(layer.auxiliary_loss, loss.detach())
    weight = tokens(1)
    (made * weight).sum().backward()
    ((expected * weight).sum() + 0.7 * 0.25 * loss).backward()
    torch.testing.assert_close(x.grad, y.grad)
    for (name, ours), theirs in zip(layer.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_the_balancing_loss_is_one_when_the_load_is_even_and_acts_in_training_only() -> None:
    layer = mixture(router_aux_loss_coef=0.7, num_experts_per_tok=EXPERTS).train()
    layer(tokens())
    assert float(layer.auxiliary_loss) == pytest.approx(1.0)
    layer = mixture(router_aux_loss_coef=0.7).eval()
    layer(tokens())
    assert layer.auxiliary_loss is None


def test_the_bias_moves_against_the_load_of_the_whole_step() -> None:
    layer = mixture(router_bias_update_rate=0.01).train()
    loads = [torch.tensor(naive(layer, tokens(seed))[2]) for seed in (1, 2)]
    for seed in (1, 2):
        layer(tokens(seed))
    load = sum(loads)
    assert torch.equal(layer.expert_load, load)
    step_load(layer).move_biases()
    torch.testing.assert_close(layer.expert_bias, 0.01 * torch.sign(load.double().mean() - load))
    assert int(layer.expert_load.abs().sum()) == 0
    layer.eval()(tokens())
    assert int(layer.expert_load.abs().sum()) == 0  # evaluation is not counted


def test_the_bias_evens_out_the_load() -> None:
    layer = mixture(router_bias_update_rate=0.001).train()
    many = torch.randn(1, 400, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    spread = []
    with torch.no_grad():
        # A first channel that is the same for all tokens, and that one expert likes.
        many[..., 0] = 1.0
        layer.gate.weight[0, 0] += 3.0
        for _ in range(250):
            layer(many)
            spread.append(float(layer.expert_load.double().std()))
            step_load(layer).move_biases()
    assert sum(spread[-10:]) / 10 < 0.2 * spread[0]


def test_the_load_is_exact_in_bfloat16() -> None:
    fields = preset("tiny-moe").model_dump() | {"num_hidden_layers": 1}
    layer = next(mixtures(build(ModelSpec.model_validate(fields), dtype=torch.bfloat16).train()))
    x = torch.randn(1, 3001, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    layer(x)
    layer(x)
    assert int(layer.expert_load.sum()) == 2 * 2 * 3001


def test_the_z_loss_has_the_gradient_of_its_formula() -> None:
    layer = mixture(router_aux_loss_coef=0.7, router_z_loss_coef=0.3).train()
    layer.auxiliary_scale = 0.25
    other, x, y = copy.deepcopy(layer), tokens().requires_grad_(), tokens().requires_grad_()
    made, (expected, loss, _) = layer(x), naive(other, y)
    z_loss = (y[0] @ other.gate.weight.T).exp().sum(-1).log().square().mean()
    weight = tokens(1)
    (made * weight).sum().backward()
    ((expected * weight).sum() + 0.25 * (0.7 * loss + 0.3 * z_loss)).backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(layer.gate.weight.grad, other.gate.weight.grad)


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0])
def test_expert_takes_the_first_tokens_of_each_sequence_up_to_its_capacity(factor: float) -> None:
    layer = mixture(capacity_factor=factor).train()
    x = torch.cat([tokens(1), tokens(2)]).requires_grad_()
    y = x.detach().clone().requires_grad_()
    capacity, dropped, expected = math.ceil(factor * TOKENS * 3 / EXPERTS), 0, []
    for sequence in y:
        taken = [0] * EXPERTS
        for token in sequence:
            probability = (layer.gate.weight @ token).softmax(-1)
            chosen = probability.topk(3).indices.tolist()
            total, output = probability[chosen].sum(), torch.zeros(WIDTH, dtype=torch.float64)
            for expert in chosen:
                taken[expert] += 1
                if taken[expert] <= capacity:
                    output = output + probability[expert] / total * expert_output(layer, expert, token)
                else:
                    dropped += 1
            expected.append(output)
    made = layer(x)
    torch.testing.assert_close(made.flatten(0, 1), torch.stack(expected))
    weight = torch.cat([tokens(3), tokens(4)])
    (made * weight).sum().backward()
    (torch.stack(expected) * weight.flatten(0, 1)).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert metrics_of(layer)["dropped"] == dropped / (2 * TOKENS * 3)
    assert int(layer.dropped) == 0


def test_capacity_that_is_large_enough_or_a_model_in_evaluation_drops_nothing() -> None:
    plain = mixture()(tokens())
    torch.testing.assert_close(mixture(capacity_factor=EXPERTS / 3).train()(tokens()), plain)
    torch.testing.assert_close(mixture(capacity_factor=0.1).eval()(tokens()), plain)


def test_metrics_tell_the_largest_load() -> None:
    layer = mixture().train()
    load = naive(layer, tokens())[2]
    layer(tokens())
    assert metrics_of(layer) == {"expert_load_max": pytest.approx(max(load) * EXPERTS / sum(load))}
    assert metrics_of(torch.nn.Linear(2, 2)) == {}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("counts", [[3, 1, 4, 2], [0, 5, 0, 5], [10, 0, 0, 0]])
def test_products_of_groups_equal_the_loop(counts: list[int], gated: bool) -> None:
    fields = preset("tiny").model_dump() | {"activation": "swiglu" if gated else "gelu"}
    facts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
    experts = next(mixtures(build(ModelSpec.model_validate(fields | {"experts": facts}), seed=1))).experts
    x = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(2))
    found = []
    for way in (experts.one_by_one, experts.all_at_once):
        experts.zero_grad()
        rows = x.clone().requires_grad_()
        y = way(rows, torch.tensor(counts), experts.up_proj, experts.down_proj, experts.gate_proj if gated else None)
        y.square().sum().backward()
        found.append([y.detach(), rows.grad, *(parameter.grad for parameter in experts.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_rows_for_nobody_give_gradients_of_zero() -> None:
    experts = mixture().experts
    experts(torch.zeros(0, WIDTH, dtype=torch.float64), torch.zeros(EXPERTS, dtype=torch.int64)).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())


def test_only_a_bias_that_moves_is_part_of_the_state() -> None:
    assert "expert_bias" in mixture(router_bias_update_rate=0.01).state_dict()
    assert "expert_bias" not in mixture().state_dict()
    assert "expert_load" not in mixture(router_bias_update_rate=0.01).state_dict()


def test_dense_layers_come_where_the_facts_say() -> None:
    experts = FACTS | {"first_k_dense_replace": 2, "decoder_sparse_step": 2}
    made = ModelSpec.model_validate(preset("tiny").model_dump() | {"experts": experts})
    sparse = [isinstance(block.mlp, Mixture) for block in build(made).model.layers.values()]
    assert sparse == [False, False, False, True, False, True, False, True]
