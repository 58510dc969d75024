"""What is wrapped together: layers, named modules or modules of a size; shared parameters go with the root."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshwright.cuts import SMALL_UNIT
from meshwright.errors import ConfigError
from meshwright.models.decoder import Decoder
from meshwright.models.initialize import build_meta
from meshwright.parallel.units import blocks_of, units_of
from tests.unit.specs import SPECS, small

PLAIN, TIED = build_meta(small(num_hidden_layers=3)), build_meta(small(num_hidden_layers=3, tie_word_embeddings=True))


def paths(model: nn.Module, wrap: str) -> list[str]:
    """The names of the units, in their order; modules that are wrapped together are joined."""
    names = {module: path for path, module in model.named_modules()}
    return ["+".join(names[module] for module in unit) for unit in units_of(model, wrap)]


def modules_of(model: nn.Module, wrap: str) -> list[nn.Module]:
    """The modules of units of one module each, in their order."""
    units = units_of(model, wrap)
    assert all(len(unit) == 1 for unit in units)
    return [module for (module,) in units]


def own_count(module: nn.Module, units: list[nn.Module]) -> int:
    """Parameters of a module that are in none of the units strictly below it."""
    below = {p for other in module.modules() if other is not module and other in units for p in other.parameters()}
    return sum(parameter.numel() for parameter in module.parameters() if parameter not in below)


@pytest.mark.parametrize("name", SPECS)
def test_blocks_are_the_layers(name: str) -> None:
    model = build_meta(SPECS[name])
    assert modules_of(model, "block") == blocks_of(model) == list(model.model.layers.values())


def test_a_model_without_lists_has_no_blocks() -> None:
    for wrap in ("auto", "block"):
        assert units_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), wrap) == []


def test_blocks_of_a_list_count_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    assert blocks_of(model) == list(model[1])


def test_the_longest_of_several_lists_are_the_layers() -> None:
    lists = [nn.ModuleList(nn.Linear(2, 2) for _ in range(count)) for count in (2, 5, 3)]
    assert blocks_of(nn.Sequential(*lists)) == list(lists[1])


def test_names_are_last_parts_or_whole_paths() -> None:
    assert sorted(paths(PLAIN, "name:mlp")) == [f"model.layers.{layer}.mlp" for layer in range(3)]
    assert paths(PLAIN, "name:model.layers.1.mlp") == ["model.layers.1.mlp"]
    assert sorted(paths(PLAIN, "name:lm_head+1")) == ["lm_head", "model.layers.1"]
    # Part of a name is no name.
    with pytest.raises(ConfigError):
        units_of(PLAIN, "name:layers.1.mlp")


def test_inner_modules_come_before_those_around_them() -> None:
    for wrap in ("name:mlp+1+q_proj+self_attn+model", "size:1", "size:300", "size:600"):
        units = modules_of(PLAIN, wrap)
        assert len(units) > 3
        for index, unit in enumerate(units):
            assert not set(unit.modules()) & set(units[index + 1 :]), wrap


def test_tied_weights_go_with_the_root() -> None:
    assert set(paths(PLAIN, "name:embed_tokens+lm_head+norm")) == {"model.embed_tokens", "lm_head", "model.norm"}
    assert paths(TIED, "name:embed_tokens+lm_head+norm") == ["model.norm"]
    assert paths(TIED, "name:lm_head") == []
    # The body holds the embedding, which is the head's too.
    assert paths(PLAIN, "name:model") == ["model"]
    assert paths(TIED, "name:model") == []
    assert {"model.embed_tokens", "lm_head"} <= set(paths(PLAIN, "size:1"))
    assert not {"model.embed_tokens", "lm_head", "model"} & set(paths(TIED, "size:1"))
    assert all(
        parameter is not TIED.lm_head.weight for unit in modules_of(TIED, "size:1") for parameter in unit.parameters()
    )


@pytest.mark.parametrize("name", ["mpl", "Block", "model.layers.3", "layer"])
def test_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        units_of(PLAIN, f"name:mlp+{name}+norm")
    assert str(caught.value) == f"wrap=name:mlp+{name}+norm: Decoder has no module '{name}'"


def test_size_takes_the_smallest_modules_that_reach_it() -> None:
    linear = lambda: nn.Linear(4, 4)  # noqa: E731, twenty parameters
    model = nn.Sequential(
        nn.Sequential(linear(), linear()),
        nn.Sequential(linear(), nn.ModuleList([linear(), linear()]), nn.Linear(9, 9, bias=False)),
        nn.LayerNorm(4),
    )
    assert paths(model, "size:1") == ["0.0", "0.1", "1.0", "1.1.0", "1.1.1", "1.2", "2"]
    assert paths(model, "size:20") == ["0.0", "0.1", "1.0", "1.1.0", "1.1.1", "1.2"]
    # At 21 the twos of twenty are wrapped together; the list cannot be called, and goes with what is around it.
    assert paths(model, "size:21") == ["0", "1.2", "1"]
    assert paths(model, "size:40") == ["0", "1.2", "1"]
    assert paths(model, "size:41") == ["1.2", "1"]
    assert paths(model, "size:60") == ["1.2", "1"]
    # What is already wrapped below does not count: 60 are left of 141.
    assert paths(model, "size:61") == ["1.2"]
    assert paths(model, "size:82") == ["1"]
    assert paths(model, "size:142") == []


def test_parameters_of_a_module_itself_count() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(5))

    model = nn.Sequential(Scaled(), nn.ReLU())
    assert paths(model, "size:25") == ["0"]
    assert paths(model, "size:26") == []
    assert paths(model, "size:5") == ["0.inner", "0"]


@pytest.mark.parametrize("model", [PLAIN, TIED, build_meta(SPECS["shared experts"])], ids=["plain", "tied", "experts"])
@given(least=st.integers(1, 6000))
def test_units_of_a_size_reach_it_and_nothing_else_does(model: Decoder, least: int) -> None:
    units = modules_of(model, f"size:{least}")
    tied = model.spec.tie_word_embeddings
    outside = {model, model.model.layers, *((model.model, model.model.embed_tokens, model.lm_head) if tied else ())}
    for module in model.modules():
        if module in units:
            assert own_count(module, units) >= least
            assert module not in outside
        else:
            assert module in outside or own_count(module, units) < least


def layered(*widths: int) -> nn.Module:
    """A model whose layers have a thousand parameters per unit of width."""
    return nn.Sequential(nn.ModuleList(nn.Linear(1000, width, bias=False, device="meta") for width in widths))


def test_small_layers_are_wrapped_with_their_neighbours() -> None:
    assert SMALL_UNIT == 1_048_576
    assert paths(layered(1049, 1049), "auto") == ["0.0", "0.1"]
    assert paths(layered(1048, 1049), "auto") == ["0.0+0.1"]
    assert paths(layered(500, 500, 500, 1), "auto") == ["0.0+0.1+0.2", "0.3"]
    assert paths(layered(5000, 1, 1, 5000, 1), "auto") == ["0.0", "0.1+0.2+0.3", "0.4"]
    assert paths(layered(5000, 1, 1, 5000, 1), "block") == ["0.0", "0.1", "0.2", "0.3", "0.4"]
    assert paths(PLAIN, "auto") == [], "a small model is one unit"


@pytest.mark.parametrize("wrap", ["auto", "block"])
def test_layers_that_share_a_parameter_or_a_module_go_with_the_root(wrap: str) -> None:
    model = layered(1100, 2, 1100, 3)
    model[0][2].weight = model[0][0].weight
    assert paths(model, wrap) == {"auto": ["0.1+0.3"], "block": ["0.1", "0.3"]}[wrap]
    again = nn.Sequential(nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
    again[0][1][0] = again[0][2][0]
    assert paths(again, wrap) == {"auto": [], "block": ["0.0"]}[wrap]


def test_the_name_of_a_list_stands_for_its_members() -> None:
    assert set(paths(PLAIN, "name:layers")) == {f"model.layers.{layer}" for layer in range(3)}
    assert set(paths(PLAIN, "name:layers+lm_head")) == {"lm_head", *(f"model.layers.{layer}" for layer in range(3))}


def test_the_path_of_a_list_stands_for_its_members_and_a_name_for_every_list_of_it() -> None:
    assert set(paths(PLAIN, "name:model.layers")) == {f"model.layers.{layer}" for layer in range(3)}
    layers = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])}) for _ in range(2))
    assert set(paths(nn.Sequential(layers), "name:experts")) == {"0.0.experts.0", "0.1.experts.0"}
    with pytest.raises(ConfigError, match=r"^wrap=name:layers\+nope: Decoder has no module 'nope'$"):
        units_of(PLAIN, "name:layers+nope")
