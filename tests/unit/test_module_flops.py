"""FLOPs by module: what plans reckon with is what PyTorch counts, and adds up to what a whole model takes."""

from __future__ import annotations

import pytest

from meshwright.models.presets import preset
from meshwright.planning.blocks import forward_flops
from meshwright.planning.module_flops import module_flops
from meshwright.verify.counted_flops import counted_flops


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "gpt2", "qwen3-0.6b", "mixtral-8x7b"])
def test_closed_form_is_what_pytorch_counts(name: str) -> None:
    spec, length = preset(name), 128
    counted = counted_flops(spec, length)
    planned = module_flops(spec, length)
    assert {one.name for one in planned} == counted.keys()
    for one in planned:
        assert (one.forward, one.backward) == pytest.approx(counted[one.name], rel=1e-9), one.name
    whole = forward_flops(spec, length, length)
    assert sum(one.forward for one in planned) == pytest.approx(whole.products + whole.full_attention)


def test_a_model_that_cannot_be_built_has_its_closed_form() -> None:
    spec = preset("deepseek-v3")
    whole = forward_flops(spec, 64, 64)
    assert sum(one.forward for one in module_flops(spec, 64)) == pytest.approx(whole.products + whole.full_attention)
