"""The table of tensor parallel covers every parameter of every shape, and a model it does not cover is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import ConfigError
from meshwright.models.decoder import Decoder
from meshwright.models.initialize import build_meta
from meshwright.models.shapes import shapes_of
from meshwright.models.tensor_plan import TENSOR_PLAN, Rule, cut_dimension, rule_of, tensor_plan
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.tensor import check
from tests.unit.specs import SPECS, small

OF_PARAMETERS = (
    "column, row, heads, outputs, outputs-whole, inputs, inputs-own, shared, experts, experts-summed, vocabulary, "
    "head, tokens, lookup, dropout"
)
RULES = f"region, {OF_PARAMETERS}"


def cuts_of(name: str, tp: int) -> dict[str, int | None]:
    """Which dimension of each parameter is cut, by the table alone."""
    plan, cuts = tensor_plan(SPECS[name]), {}
    for parameter in shapes_of(SPECS[name]):
        module, _, last = parameter.rpartition(".")
        rule = rule_of(plan, module)
        assert rule is not None, parameter
        cuts[parameter] = cut_dimension(rule, last, tp)
    return cuts


@pytest.mark.parametrize("name", SPECS)
def test_every_parameter_is_covered(name: str) -> None:
    model = build_meta(SPECS[name])
    for tp in (2, 4):
        check(model, tp)
    for path, module in model.named_modules():
        if module._parameters:
            rule = rule_of(model.tensor_plan, path)
            assert rule is not None, path
            assert rule.word not in ("region", "dropout"), path


@pytest.mark.parametrize("name", SPECS)
def test_every_dropout_and_region_is_in_the_table(name: str) -> None:
    model = build_meta(SPECS[name])
    words = {path: rule_of(model.tensor_plan, path) for path, _ in model.named_modules()}
    for path, rule in words.items():
        if path.endswith("dropout"):
            assert rule == Rule("dropout"), path
        if path.endswith((".mlp", ".self_attn")):
            assert rule == Rule("region"), path


def test_no_row_of_the_table_is_dead() -> None:
    for pattern in TENSOR_PLAN:
        alone = {pattern: TENSOR_PLAN[pattern].partition(":")[0]}
        found = (rule_of(alone, path) for spec in SPECS.values() for path, _ in build_meta(spec).named_modules())
        assert any(rule is not None for rule in found), pattern


def test_key_value_heads_are_those_of_the_shape() -> None:
    for name, heads in (("plain", 2), ("one key-value head", 1), ("as many key-value heads", 4)):
        plan = tensor_plan(SPECS[name])
        assert rule_of(plan, "model.layers.1.self_attn.k_proj") == Rule("heads", heads)
        assert rule_of(plan, "model.layers.11.self_attn.v_proj") == Rule("heads", heads)


def test_first_rule_that_fits_counts_and_others_find_none() -> None:
    plan = {"a.b": "row", "a.*": "heads:7", "a.c": "column"}
    assert rule_of(plan, "a.b") == Rule("row", 0)
    assert rule_of(plan, "a.c") == Rule("heads", 7)
    assert rule_of(plan, "a") is None
    assert rule_of(plan, "A.b") is None


@pytest.mark.parametrize("tp", [2, 4])
def test_matrices_are_cut_across_the_dimension_that_ranks_share(tp: int) -> None:
    cuts = cuts_of("gpt2-like", tp)
    expected = {
        "model.embed_tokens.weight": 0,
        "model.embed_positions.weight": None,
        "model.layers.0.input_layernorm.weight": None,
        "model.layers.0.input_layernorm.bias": None,
        "model.layers.0.self_attn.q_proj.weight": 0,
        "model.layers.0.self_attn.q_proj.bias": 0,
        "model.layers.0.self_attn.k_proj.weight": 0,
        "model.layers.0.self_attn.k_proj.bias": 0,
        "model.layers.0.self_attn.v_proj.weight": 0,
        "model.layers.0.self_attn.v_proj.bias": 0,
        "model.layers.0.self_attn.o_proj.weight": 1,
        "model.layers.0.self_attn.o_proj.bias": None,
        "model.layers.0.post_attention_layernorm.weight": None,
        "model.layers.0.post_attention_layernorm.bias": None,
        "model.layers.0.mlp.up_proj.weight": 0,
        "model.layers.0.mlp.up_proj.bias": 0,
        "model.layers.0.mlp.down_proj.weight": 1,
        "model.layers.0.mlp.down_proj.bias": None,
        "model.norm.weight": None,
        "model.norm.bias": None,
    }
    second = {name.replace("layers.0.", "layers.1."): dim for name, dim in expected.items()}
    assert cuts == expected | second


def test_experts_are_cut_within_and_the_router_is_not() -> None:
    cuts = cuts_of("shared experts", 2)
    mlp = {name.removeprefix("model.layers.0.mlp."): dim for name, dim in cuts.items() if "layers.0.mlp." in name}
    assert mlp == {
        "gate.weight": None,
        "experts.gate_proj": 1,
        "experts.up_proj": 1,
        "experts.down_proj": 2,
        "shared_experts.gate_proj.weight": 0,
        "shared_experts.up_proj.weight": 0,
        "shared_experts.down_proj.weight": 1,
    }
    assert cuts["model.layers.0.self_attn.q_norm.weight"] is None
    assert cuts["model.layers.0.self_attn.k_norm.weight"] is None
    assert cuts_of("head bias", 2)["lm_head.weight"] == cuts_of("head bias", 2)["lm_head.bias"] == 0


@pytest.mark.parametrize(("name", "tp", "cut"), [("plain", 2, 0), ("plain", 4, None), ("one key-value head", 2, None)])
def test_key_value_heads_that_do_not_go_round_are_held_whole(name: str, tp: int, cut: int | None) -> None:
    cuts = cuts_of(name, tp)
    assert cuts["model.layers.0.self_attn.k_proj.weight"] == cuts["model.layers.0.self_attn.v_proj.weight"] == cut
    assert cuts["model.layers.0.self_attn.q_proj.weight"] == 0


class WithTable(Decoder):
    """A decoder whose table has some rows changed."""

    changes: dict[str, str]

    @property
    def tensor_plan(self) -> dict[str, str]:
        return self.changes | super().tensor_plan | self.changes


def refusal(model: nn.Module, tp: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        check(model, tp)
    return str(caught.value)


def test_parameter_that_no_rule_covers_is_refused_by_name() -> None:
    model = build_meta(small())
    model.model.layers["1"].gain = nn.Parameter(torch.empty(16, device="meta"))
    assert refusal(model) == (
        "no rule of Decoder.tensor_plan covers the parameter model.layers.1.gain; "
        f"give its module one of {OF_PARAMETERS}, or use tp=1"
    )


def test_module_that_no_rule_covers_is_refused_by_name() -> None:
    model = build_meta(small())
    model.model.layers["0"].adapter = nn.Sequential(nn.ReLU(), nn.Linear(16, 16, device="meta"))
    assert "covers the parameter model.layers.0.adapter.1.weight; give its module one of" in refusal(model)


def test_parameter_of_a_region_itself_is_refused() -> None:
    model = build_meta(small())
    model.model.layers["0"].self_attn.sinks = nn.Parameter(torch.empty(4, device="meta"))
    assert "covers the parameter model.layers.0.self_attn.sinks; give its module one of" in refusal(model)


def test_parameter_of_the_root_is_refused_by_its_name() -> None:
    model = build_meta(small())
    model.temperature = nn.Parameter(torch.empty((), device="meta"))
    assert "covers the parameter temperature; give its module one of" in refusal(model)


def test_row_without_a_module_is_refused() -> None:
    with torch.device("meta"):
        model = WithTable(small())
    model.changes = {"model.layers.*.mlp.upward": "column"}
    assert refusal(model) == (
        "WithTable.tensor_plan has a row 'model.layers.*.mlp.upward', and no module of that name; mend or remove it"
    )


@pytest.mark.parametrize(("heads", "tp"), [(6, 4), (3, 2), (4, 6)])
def test_heads_that_cannot_be_dealt_out_are_refused(heads: int, tp: int) -> None:
    with torch.device("meta"):
        model = WithTable(small())
    model.changes = {"model.layers.*.self_attn.[kv]_proj": f"heads:{heads}"}
    assert refusal(model, tp) == (
        f"tp={tp} cannot deal out the {heads} heads of model.layers.0.self_attn.k_proj; "
        "it must divide them or be a multiple"
    )
    for legal in (heads, 1, 3 * heads):
        check(model, legal)


def test_embedding_that_changes_when_it_is_read_is_refused() -> None:
    model = build_meta(small())
    model.model.embed_tokens.max_norm = 1.0
    assert refusal(model).startswith("model.embed_tokens has max_norm")


def test_modules_and_places_without_parameters_need_no_rule() -> None:
    model = build_meta(small())
    model.model.layers["0"].extra = nn.Sequential(nn.ReLU(), nn.Identity())
    model.model.layers["0"].register_parameter("absent", None)
    check(model, 2)


@pytest.mark.parametrize("module", ["lm_head", "model.layers.*.mlp.up_proj", "model.layers.*.attention_dropout"])
def test_unknown_rule_is_refused_with_the_known_ones(module: str) -> None:
    with torch.device("meta"):
        model = WithTable(small())
    model.changes = {module: "columns"}
    where = module.replace("*", "0")
    assert refusal(model) == f"WithTable.tensor_plan has no rule 'columns' for {where}; rules are {RULES}"


def test_model_without_a_table_is_refused_with_what_to_write() -> None:
    said = refusal(nn.Sequential(nn.Linear(2, 2)))
    assert said.startswith("tp needs a table that says how Sequential is split: give the class a `tensor_plan`")
    assert said.endswith("or use tp=1")


def test_parallelize_refuses_before_any_process_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # As a launcher says it.
    with pytest.raises(ConfigError, match="how Linear is split"):
        parallelize(nn.Linear(2, 2), "tp=2")
    assert not dist.is_initialized()
