"""Presets: counts against what the makers publish and what transformers builds, names, and the `models` verb."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from meshwright.cli.main import main
from meshwright.cli.models import human_count
from meshwright.errors import UserError
from meshwright.models.count import count_parameters
from meshwright.models.presets import preset, presets
from meshwright.models.shapes import shapes_of

PRESETS = presets()
BUILDABLE = [name for name, each in PRESETS.items() if each.spec.latent_attention is None]
OURS = {"demo", "tiny", "tiny-moe"}


@pytest.mark.parametrize("name", [name for name, each in PRESETS.items() if each.published_parameters])
def test_the_count_is_the_published_one_to_the_last_weight(name: str) -> None:
    assert count_parameters(PRESETS[name].spec).total == PRESETS[name].published_parameters


@pytest.mark.parametrize("name", [name for name, each in PRESETS.items() if each.published_billions])
def test_the_count_is_what_the_makers_say_in_words(name: str) -> None:
    count = count_parameters(PRESETS[name].spec)
    for said, counted in zip(PRESETS[name].published_billions, (count.total, count.active), strict=False):
        # Makers round or cut off at their last digit.
        assert abs(counted / 1e9 - said) < (1 if said.is_integer() else 0.1)


def test_every_published_model_has_a_published_count() -> None:
    without = {name for name, each in PRESETS.items() if not each.published_parameters and not each.published_billions}
    assert without == OURS


def test_gpt3_counts_what_its_paper_rounds_to_175_billion() -> None:
    assert count_parameters(preset("gpt3-175b")).total == 174_604_259_328


@pytest.mark.parametrize("name", BUILDABLE)
def test_the_closed_form_counts_what_the_decoder_holds(name: str) -> None:
    spec = PRESETS[name].spec
    assert count_parameters(spec).total == sum(math.prod(shape) for shape in shapes_of(spec).values())


@pytest.mark.parametrize("name", BUILDABLE)
def test_transformers_builds_as_many_weights_from_the_same_facts(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from meshwright.models.hf_config import config_from_spec

    config = config_from_spec(PRESETS[name].spec)
    with torch.device("meta"):
        made = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        model = transformers.AutoModelForCausalLM.from_config(made)
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(PRESETS[name].spec).total


def test_transformers_builds_as_many_weights_of_deepseek_v3() -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    # The class's own defaults are DeepSeek-V3's shape.
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.DeepseekV3Config())
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(preset("deepseek-v3")).total


def test_an_unknown_name_is_answered_with_the_nearest_and_the_list() -> None:
    with pytest.raises(UserError, match=r"'llama31-8b' \(did you mean 'llama3\.1-8b'\?\); known: llama2-7b, .*tiny"):
        preset("llama31-8b")


def test_names_are_found_as_model_cards_spell_them() -> None:
    assert preset("Llama3.1_8B") == preset("llama3.1-8b")


def test_human_counts_keep_three_digits() -> None:
    counts = (8_030_261_248, 68_976_648_192, 405_853_388_800, 999_600_000, 124_439_808, 404_544, 12)
    assert list(map(human_count, counts)) == ["8.03B", "69.0B", "406B", "1,000M", "124M", "405K", "12"]


def test_the_list_is_one_row_a_preset_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert rows.keys() == PRESETS.keys()
    assert rows["mixtral-8x7b"][:7] == ["46.7B", "12.9B", "32", "4096", "32/8", "32000", "32768"]
    assert "config.json of mistralai/Mixtral-8x7B-v0.1" in " ".join(rows["mixtral-8x7b"])


def test_one_preset_is_shown_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "llama3.1-8b"]) == 0
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()}
    assert shown["parameters"] == "8,030,261,248 (8.03B)"
    assert shown["rope_scaling.kind"] == "llama3"
    assert "experts" not in shown


def test_json_holds_exact_counts_and_whole_specs(capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.models.spec import ModelSpec

    assert main(["models", "--json"]) == 0
    objects = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert objects["qwen3-30b-a3b"]["parameters"] == 30_532_122_624
    assert objects["qwen3-30b-a3b"]["active_parameters"] == 3_353_032_704
    for name, entry in objects.items():
        assert ModelSpec.model_validate(entry["spec"]) == PRESETS[name].spec
        assert entry["source"]


def test_an_unknown_preset_ends_with_code_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "nonsense"]) == 2
    assert capsys.readouterr().err.startswith("meshwright models: unknown model preset 'nonsense'")


def test_models_answers_without_importing_torch() -> None:
    code = (
        "import sys; import meshwright.models.hf_config; from meshwright.cli.main import main;"
        " assert main(['models']) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
