"""A model's pipeline plan: which modules are dealt out, in which order, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import ConfigError
from meshwright.parallel.dry_run import DryRun, Passage
from meshwright.parallel.pipeline import Call
from meshwright.parallel.pipeline_units import check, units_in_order
from meshwright.parallel.precision import Precision
from meshwright.strategy import Strategy


class Net(nn.Module):
    """Widths differ; what is between the layers has no parameters."""

    pipeline_plan: Any = ("embed", "layers.*", "head")

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)])
        self.head = nn.Linear(4, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Twice(Net):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers[0](self.embed(ids)) + self.layers[0](torch.ones(4)))


class Jumping(Net):
    def forward(self, ids: Tensor) -> Any:
        return self.layers[0](self.embed(ids)), self.head(torch.ones(4))


class Swapped(Net):
    def forward(self, ids: Tensor) -> Any:
        later = self.layers[1](torch.ones(2, 6))
        return self.layers[0](self.embed(ids)), later


class OneUnused(Net):
    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[2](self.layers[1](self.layers[0](self.embed(ids))))


class ResidualOutside(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.layers[2](self.layers[1](self.layers[0](x)))
        return self.head(self.layers[3](y) + x)


class TwoTravel(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = nn.Bilinear(8, 6, 8)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.layers[0](self.embed(ids))
        return self.head(self.layers[3](self.layers[2](self.layers[1](first), first)))


class HiddenStates(Net):
    def forward(self, ids: Tensor) -> Any:
        hidden = [self.embed(ids)]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        return {"logits": self.head(hidden[-1]), "hidden": hidden[1]}


class ByContent(Net):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids[: int(ids.max())])


class InPlace(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x += 1
        for layer in self.layers:
            x = layer(x)
            x *= 2
        return self.head(x)


def passages(model: nn.Module, *starts: int) -> list[Passage]:
    units = units_in_order(model)
    run = DryRun(model, units.names, units.layers, starts, Precision())
    return run.passages(Call((torch.zeros(2, 3, dtype=torch.long),), {}))


def test_units_are_what_the_patterns_name_outermost_and_in_order() -> None:
    units = units_in_order(Net())
    assert units.names == ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert units.layers == range(1, 5)


def test_ends_go_with_the_first_and_the_last_layer() -> None:
    units = units_in_order(Net(vocabulary=40))
    for layers, starts in (("even", [0, 3]), ("1+3", [0, 2]), ("3+1", [0, 4])):
        assert units.starts(units.cut(Strategy.parse(f"pp=2 layers={layers}", 2))) == starts
    # The embedding costs the row that it looks up, the head all of its own.
    assert units.starts(units.cut(Strategy.parse("pp=2 layers=balanced", 2))) == [0, 4]


def test_a_plan_may_be_the_objects_own() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model.pipeline_plan = ("*",)  # type: ignore[assignment]
    assert units_in_order(model).names == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (None, "pp needs to know in which order Net calls its parts: give the class a `pipeline_plan`"),
        (("embed", "blocks.*", "head"), "has 'blocks.\\*', and no module of that name; mend or remove it"),
        (("embed", "layers.*", "layers.0", "head"), "has 'layers.0', and layers.0 is in another unit"),
        (("layers.*", "head"), "no pattern of Net.pipeline_plan covers the parameter embed.weight"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: Any, told: str) -> None:
    model = Net()
    model.pipeline_plan = plan
    with pytest.raises(ConfigError, match=told):
        check(model, Strategy.parse("pp=2", 2))


@pytest.mark.parametrize(
    ("strategy", "world", "told"),
    [
        ("pp=5", 5, "has 5 stages and the model 4 layers; pp can be at most 4"),
        ("pp=2 layers=1+2", 2, "1\\+2 is 2 stages of 3 layers, not 2 of 4"),
        ("pp=2 cp=2", 4, "use cp=1 or pp=1"),
        ("pp=2 dp=2 zero=3 schedule=zbv", 4, "use zero=2, or schedule=1f1b"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused(strategy: str, world: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check(Net(), Strategy.parse(strategy, world))


def test_weights_on_three_ranks_are_refused() -> None:
    model = Net()
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    for layer in model.layers:
        layer.weight = model.layers[0].weight
    with pytest.raises(ConfigError, match=r"layers.0.weight is shared by stages on more than two ranks"):
        check(model, Strategy.parse("pp=3", 3))


def test_what_goes_from_unit_to_unit_is_known_without_memory() -> None:
    found = passages(Net(), 2)
    assert [passage.like.shape[-1] for passage in found[1:] if passage.like] == [4, 6, 8, 8, 4]
    assert found[3].output.shape == (2, 3, 8)
    assert found[3].stand_in().isnan().all()
    assert len(passages(InPlace(), 2, 4)) == 6


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Twice, "calls layers.0 a second time in one forward pass"),
        (Jumping, "does not call layers.1, with which a stage begins, at its place in the pipeline_plan"),
        (ResidualOutside, "head of ResidualOutside uses what embed gave, and a stage begins at layers.1 in between"),
        (TwoTravel, "layers.2 of TwoTravel uses what layers.0 gave, and a stage begins at layers.1"),
        (HiddenStates, "the output of HiddenStates uses what layers.0 gave, and a stage begins at layers.1"),
        (ByContent, "pp runs ByContent once without memory.*must not depend on the content of tensors"),
    ],
)
def test_a_forward_pass_that_cannot_be_cut_is_refused(kind: type[nn.Module], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        passages(kind(), 2)


def test_a_plan_in_another_order_than_the_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"calls layers.1 before embed, and its pipeline_plan has them the other way"):
        passages(Swapped(), 4)


def test_units_that_no_pass_calls_have_no_turn_and_begin_no_stage() -> None:
    found = passages(OneUnused(), 2)
    assert [passage.called for passage in found] == [True, True, True, True, False, False]
    with pytest.raises(ConfigError, match=r"does not call layers.3, with which a stage begins"):
        passages(OneUnused(), 4)


def test_two_tensors_at_the_border_are_refused() -> None:
    with pytest.raises(ConfigError, match="a stage begins with layers.2 of TwoTravel, which takes 2 tensors"):
        passages(TwoTravel(), 3)
