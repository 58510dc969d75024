"""The configuration: layering, errors that name the place and the fix, a resolved copy that reproduces the run."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from meshwright.config import RunConfig, load_config, resolve_config
from meshwright.config_load import format_config, run_presets
from meshwright.errors import ConfigError


def refusal(*arguments: object, **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_config(*arguments, **options)
    return str(caught.value)


def test_later_layers_win_and_origins_are_told(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("# mine\n[train]\nsteps = 7\nlr = 0.5\n")
    resolved = resolve_config(file, ["train.lr=0.25"], preset="demo")
    assert resolved.config.train.lr == 0.25
    assert resolved.origin("train.lr") == "command line"
    assert resolved.config.train.steps == 7
    assert resolved.origin("train.steps") == f"{file}, line 3"
    assert resolved.config.model.preset == "demo"
    assert resolved.origin("model.preset") == "preset demo"
    assert resolved.origin("train.beta1") == "default"


def test_override_splits_at_first_equals_sign() -> None:
    config = load_config(None, ["run.dir=runs/a=b", "observe.sample=x == 1"])
    assert config.run.dir == "runs/a=b"
    assert config.observe.sample == "x == 1"


@pytest.mark.parametrize(
    ("override", "value"),
    [("run.dir=123", "123"), ("run.dir=true", "true"), ('run.dir="a b"', "a b"), ("run.dir=1e5", "1e5")],
)
def test_text_settings_take_any_text(override: str, value: str) -> None:
    assert load_config(None, [override]).run.dir == value


def test_none_clears_a_setting_of_a_preset() -> None:
    config = load_config(None, ["observe.sample=none", "data.tokenizer=none"], preset="demo")
    assert config.observe.sample is None
    assert config.data.tokenizer is None
    assert "run.dir" not in refusal(None, ["train.steps=none"])


def test_shape_overrides_keep_their_types() -> None:
    config = load_config(None, ["model.spec.num_hidden_layers=4", "model.spec.experts.num_experts=8"])
    assert config.model.spec == {"num_hidden_layers": 4, "experts": {"num_experts": 8}}


def test_unknown_key_names_file_line_and_nearest(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\n\nstepz = 7\n")
    message = refusal(file)
    assert f"{file}, line 3" in message
    assert "'train.stepz' (did you mean 'steps'?)" in message


def test_unknown_section_names_nearest() -> None:
    assert "unknown section [trian] (did you mean 'train'?)" in refusal(None, ["trian.steps=3"])


def test_setting_in_wrong_section_names_the_right_one() -> None:
    assert "did you mean 'data.sequence_length'?" in refusal(None, ["train.sequence_length=3"])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=many", "command line: train.steps = 'many' should be a valid integer"),
        ("train.steps=0", "train.steps = 0 should be greater than 0"),
        ("comm.bucket_mb=0", "comm.bucket_mb = 0 should be greater than 0, or should be 'auto'"),
        ("comm.bucket_mb=nan", "comm.bucket_mb = nan should be a finite number, or should be 'auto'"),
        ("train.lr=nan", "train.lr = nan should be a finite number"),
        ("elastic.timeout_s=inf", "elastic.timeout_s = inf should be a finite number"),
        ("train.steps=1.5", "train.steps = 1.5 should be a valid integer"),
        ("train.schedule=cos", "should be 'constant', 'cosine', 'linear' or 'wsd'"),
        ("train.deterministic=1", "train.deterministic = 1 should be a valid boolean"),
        ("data.validation=1", "should be less than 1"),
        ("train.min_lr=1", "train.min_lr=1 is above train.lr=0.0003"),
        ("train.early_stop=1", "needs evaluations"),
        ("data.sources=['a']", "needs data.path"),
        ("train.steps", "write section.key=value"),
        ("steps=3", "write section.key=value"),
    ],
)
def test_wrong_value_names_what_is_allowed(override: str, expected: str) -> None:
    assert expected in refusal(None, [override])


def test_rule_about_two_settings_names_their_place(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nlr = 0.1\nmin_lr = 0.2\n")
    assert refusal(tmp_path / "run.toml").startswith(f"{tmp_path}/run.toml, line ")


def test_all_mistakes_are_reported_at_once() -> None:
    message = refusal(None, ["train.steps=0", "train.lr=-1", "run.seed=x"])
    assert all(key in message for key in ("train.steps", "train.lr", "run.seed"))


def test_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    assert "no.toml does not exist" in refusal(tmp_path / "no.toml")
    (tmp_path / "bad.toml").write_text("[train\n")
    assert "bad.toml is not valid TOML" in refusal(tmp_path / "bad.toml")


def test_unknown_preset_names_nearest() -> None:
    assert "did you mean 'demo'?" in refusal(preset="demos")


@pytest.mark.parametrize("preset", run_presets())
def test_written_configuration_reads_back_equal(preset: str) -> None:
    overrides = ["train.batch_schedule=8..32 over 10", "model.spec.num_hidden_layers=2", "train.micro_batch=4"]
    config = load_config(None, overrides, preset=preset)
    assert RunConfig.model_validate(tomllib.loads(format_config(config))) == config


def test_every_setting_is_documented() -> None:
    for section, field in RunConfig.model_fields.items():
        for name, entry in field.annotation.model_fields.items():
            assert entry.description, f"{section}.{name} has no documentation"


def test_resuming_may_change_only_what_does_not_alter_results() -> None:
    identity = RunConfig().identity()
    assert "lr" in identity["train"]
    assert "seed" in identity["run"]
    assert "steps" not in identity["train"]
    assert "dir" not in identity["run"]
