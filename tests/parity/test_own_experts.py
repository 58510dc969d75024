"""Experts of models of one's own: dealt out as their plan says, proved, and refused by name where they cannot be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.models import expert_plan
from meshwright.parallel import tensor
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.pool import RankPool
from tests.conftest import CommandLine
from tests.parity.test_hugging_face_experts import build, train
from tests.parity.test_hugging_face_models import Trace, assert_alike

DOCS = Path(__file__).parents[2] / "docs/strategies.md"


@pytest.fixture
def sparse(tmp_path: Path) -> str:
    """The module with experts of docs/strategies.md."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (source,) = [code for code in blocks if "class Sparse" in code]
    (tmp_path / "sparse.py").write_text(source)
    return source


def test_experts_of_ones_own_are_proved(meshwright: CommandLine, sparse: str) -> None:
    result = meshwright("verify", "--model", "sparse:Sparse", "--parallel", "dp=2 ep=2", "--steps", 2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "blocks.0.experts.up" in result.stdout


def test_a_mistake_of_experts_of_ones_own_is_found_around_them(
    meshwright: CommandLine, sparse: str, tmp_path: Path
) -> None:
    # The rank's own number of experts stands in what every expert gives.
    wrong = sparse.replace("return torch.cat([", "return len(counts) * torch.cat([")
    (tmp_path / "sparse.py").write_text(wrong)
    result = meshwright("verify", "--model", "sparse:Sparse", "--parallel", "dp=2 ep=2", "--steps", 2)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "not equal: the output of blocks.0 is the first that departs" in result.stdout


class Chosen(nn.Module):
    """Experts that take choices, and one more number beyond the last for none."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.num_experts = count
        self.weight = nn.Parameter(torch.randn(count, 32, 32) / 4)
        self.bias = nn.Parameter(torch.randn(count, 32))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = torch.where(index == expert)
            given = hidden[token] @ self.weight[expert] + self.bias[expert]
            output = output.index_add(0, token, given.tanh() * weights[token, place, None])
        return output


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.expert_plan: Any = {"experts": "choices"}
        self.embed = nn.Embedding(66, 32)
        self.router = nn.Linear(32, 5)
        self.experts: nn.Module = Chosen()
        self.head = nn.Linear(32, 66)

    def forward(self, input_ids: Tensor, labels: None, use_cache: bool) -> Any:
        x = self.embed(input_ids)
        weights, index = self.router(x.flatten(0, 1)).softmax(dim=-1).topk(2)
        self.logits = self.head(x + self.experts(x.flatten(0, 1), index, weights).view_as(x))
        return self


def train_choosing(world: World, strategy: str) -> Trace:
    return train(world, Choosing().double(), strategy)


@pytest.mark.parametrize("strategy", ["dp=2 ep=2", "dp=4 zero=3 ep=4"])
def test_ones_own_experts_may_take_choices_and_none(strategy: str, pool: RankPool) -> None:
    (expected,) = pool.run(train_choosing, 1, "dp=1")
    for found in pool.run(train_choosing, Strategy.fewest_processes(strategy), strategy):
        assert_alike(found, expected)


def choosing(plan: Any = ("experts",), **changes: Any) -> Choosing:
    model = Choosing()
    model.expert_plan = plan
    for name, value in changes.items():
        setattr(model.experts, name, value)
    return model


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Chosen()
        self.second = Chosen()
        self.second.weight = self.first.weight
        self.expert_plan = ["first", "second"]


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: choosing("experts"), "is one text; make it a list"),
        (lambda: choosing({"experts": "columns"}), "says 'columns' for 'experts'; say rows or choices"),
        (lambda: choosing(["experts", "specialists"]), "names 'specialists', and no module has that name"),
        (lambda: choosing(["router"]), r"router is a Linear, called with \(input\)"),
        (lambda: choosing({"router": "rows"}), "ep=2 does not divide the 5 experts of router"),
        (lambda: choosing(scale=nn.Parameter(torch.ones(32))), r"experts.scale of Choosing has shape \(32,\)"),
        (lambda: choosing(norm=nn.LayerNorm(4)), "experts.norm.weight of Choosing lies below its experts"),
        (lambda: choosing(load=nn.Buffer(torch.zeros(4))), "experts.load of Choosing is a buffer by expert"),
        (lambda: choosing({"experts.act": "rows"}, act=nn.GELU()), "named as experts and has no parameters"),
        (Twice, "second shares experts with first"),
        (lambda: build("llama4_text"), "is a Llama4TextExperts, called with"),
        (lambda: build("stablelm"), "StableLmForCausalLM has none; leave ep out, or name them"),
    ],
)
def test_experts_that_cannot_be_dealt_out_are_refused_by_name(model: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        expert_plan.check(model(), 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bias": nn.Parameter(torch.ones(4, 32))}, r"experts.weight of shape \(4, 32, 32\) is none of gate_up_proj"),
        ({"weight": None, "bias": None, "up_proj": nn.Parameter(torch.ones(4, 8, 32))}, "experts has no down_proj"),
        (
            {
                "weight": None,
                "bias": None,
                "gate_up_proj": nn.Parameter(torch.ones(4, 32, 16)),
                "down_proj": nn.Parameter(torch.ones(4, 8, 32)),
            },
            "dimension 1 should be 64 to fit its down_proj; set `is_transposed`",
        ),
    ],
)
def test_a_layout_that_is_not_known_is_refused(changes: dict[str, Any], told: str) -> None:
    model = choosing(**changes)
    model.tensor_plan = {"experts": "experts-summed", "*": "tokens"}
    with pytest.raises(ConfigError, match=told):
        tensor.check(model, 2)
