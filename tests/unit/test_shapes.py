"""The closed form of a decoder's parameters is the decoder: names, order and shapes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from meshwright.errors import UserError
from meshwright.models.initialize import build_meta
from meshwright.models.presets import preset, presets
from meshwright.models.shapes import shapes_of
from meshwright.models.spec import ModelSpec
from tests.unit.specs import SPECS

BUILDABLE = [name for name, each in presets().items() if each.spec.latent_attention is None]


def assert_same(spec: ModelSpec) -> None:
    built = [(name, tuple(parameter.shape)) for name, parameter in build_meta(spec).named_parameters()]
    assert list(shapes_of(spec).items()) == built


@pytest.mark.parametrize("name", SPECS)
def test_names_order_and_shapes_are_the_decoders(name: str) -> None:
    assert_same(SPECS[name])


@pytest.mark.parametrize("name", BUILDABLE)
def test_presets_have_the_shapes_that_the_decoder_builds(name: str) -> None:
    spec = preset(name)
    # Layers beyond the first sparse one repeat.
    dense = spec.experts.first_k_dense_replace if spec.experts else 0
    assert_same(spec.model_copy(update={"num_hidden_layers": min(spec.num_hidden_layers, dense + 3)}))


def test_the_shapes_are_those_on_paper() -> None:
    shapes = shapes_of(SPECS["gelu experts"])
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (8, 16)
    assert shapes["model.layers.1.self_attn.o_proj.weight"] == (16, 16)
    assert shapes["model.layers.1.mlp.experts.down_proj"] == (4, 16, 6)
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"] == (12, 16)
    assert "model.layers.1.mlp.experts.gate_proj" not in shapes
    assert shapes_of(SPECS["wide heads"])["model.layers.0.self_attn.o_proj.weight"] == (16, 40)
    assert "lm_head.weight" not in shapes_of(SPECS["tied"])


def test_a_shape_that_the_decoder_does_not_build_is_refused() -> None:
    with pytest.raises(UserError, match="latent attention"):
        shapes_of(preset("deepseek-v3"))


def test_shapes_and_tensor_plan_need_no_torch() -> None:
    code = "import sys, meshwright.models.shapes, meshwright.models.tensor_plan, meshwright.cuts, meshwright.strategy"
    check = f"{code}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
