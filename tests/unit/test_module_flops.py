"""FLOPs by module: what plans reckon with is what PyTorch counts, and adds up to what a whole model takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.cli.main import main
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


def test_the_model_of_a_run_folder_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text('[model]\npreset = "tiny"\nspec = {num_hidden_layers = 3}\n')
    assert main(["models", str(tmp_path), "--flops", "128", "--json"]) == 0
    modules = {one["name"]: one for one in json.loads(capsys.readouterr().out)["modules"]}
    assert modules["feed-forward"]["count"] == 3
    assert modules["feed-forward"]["counted"][0] == pytest.approx(modules["feed-forward"]["forward"])
    assert main(["models", str(tmp_path)]) == 0
    assert "the run's config.toml" in capsys.readouterr().out
    (tmp_path / "config.toml").unlink()
    assert main(["models", str(tmp_path), "--flops", "128"]) == 2
    assert "config.json" in capsys.readouterr().err


def test_sequences_up_to_a_limit_are_counted_and_longer_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "llama3.1-405b", "--flops", str(1 << 26)]) == 0
    capsys.readouterr()
    for tokens in ((1 << 26) + 1, 99_999_999_999, 10**30):
        assert main(["models", "tiny", "--flops", str(tokens)]) == 2
        assert "give up to 67,108,864" in capsys.readouterr().err
