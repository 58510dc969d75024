"""Names of other trainers: taken where they mean the same, with a note that tells ours; refused where they do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.config_load import resolve_config
from meshwright.errors import ConfigError, UserError
from meshwright.known_names import DEGREES, INSTEAD, OTHER_DEGREES, SETTINGS, in_our_words
from meshwright.planning.constraints import parse_constraints
from meshwright.strategy import KEYS, Strategy


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("tp_size=2", "tp=2"),
        ("tensor_parallel_size=2", "tp=2"),
        ("tensor_parallel_degree=2", "tp=2"),
        ("tensor_model_parallel_size=2", "tp=2"),
        ("pp_size=2", "pp=2"),
        ("pipeline_model_parallel_size=2 zero=1", "pp=2 zero=1"),
        ("context_parallel_degree=2", "cp=2"),
        ("sp_size=2", "cp=2 cp_method=ulysses"),
        ("dp_replicate_size=2 dp_shard_size=4", "replicate=2 shard=4 zero=3"),
        ("data_parallel_replicate_degree=2 data_parallel_shard_degree=-1", "replicate=2 zero=3"),
        ("dp_shard=4 zero=2", "shard=4 zero=2"),
        ("zero=1 fsdp_size=8", "zero=1 shard=8"),
        ("fsdp_size=1 dp=8", "dp=8"),
        ("tp_size=2 sequence_parallel=false", "tp=2 sp=off"),
        ("tp=2 enable_sequence_parallel=true", "tp=2 sp=on"),
        ("zero_stage=2", "zero=2"),
    ],
)
def test_degrees_of_others_are_taken_in_a_strategy(theirs: str, ours: str) -> None:
    text, notes = in_our_words(theirs)
    assert text == ours
    assert notes
    assert Strategy.parse(theirs, 8) == Strategy.parse(ours, 8)
    assert Strategy.fewest_processes(theirs) == Strategy.fewest_processes(ours)
    found = resolve_config(None, [f"parallel.strategy={theirs}"])
    assert (found.config.parallel.strategy, list(found.notes)) == (ours, notes)


def test_our_own_words_are_left_alone() -> None:
    for text in ("auto", "dp=2 zero=3 tp=2 sp=off", "auto tp<=2 zero=3", "shard=4 zero=3"):
        assert in_our_words(text) == (text, [])
    assert resolve_config(None, ["parallel.strategy=dp=2"]).notes == ()


def test_constraints_of_a_plan_are_taken_too() -> None:
    (one,) = parse_constraints(["tensor_parallel_size<=8"])
    assert str(one) == "tp<=8"
    with pytest.raises(UserError, match="unknown key 'tensor_size'"):
        parse_constraints(["tensor_size<=8"])


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        (["learning_rate=1e-3"], {"train.lr": 1e-3}),
        (["train.learning_rate=1e-3", "max_steps=7"], {"train.lr": 1e-3, "train.steps": 7}),
        (["adam_beta2=0.9", "adam_epsilon=1e-6", "max_grad_norm=0.5"], {"train.beta2": 0.9, "train.grad_clip": 0.5}),
        (["output_dir=runs/x", "seed=3", "logging_steps=2"], {"run.dir": "runs/x", "run.seed": 3}),
        (["save_steps=9", "save_total_limit=4", "eval_steps=5"], {"checkpoint.every": 9, "checkpoint.keep": 4}),
        (["bf16=true", "fp16=false", "torch_compile=false"], {"train.precision": "bf16", "train.compile": "off"}),
        (["lr_scheduler_type=constant_with_warmup", "warmup_steps=3"], {"train.schedule": "constant"}),
        (["tp_size=2"], {"parallel.strategy": "tp=2"}),
        (["parallel.tensor_parallel_size=2", "parallel.strategy=zero=1"], {"parallel.strategy": "zero=1 tp=2"}),
        (["parallel.strategy=auto tp<=4 zero=3", "tp_size=2"], {"parallel.strategy": "auto zero=3 tp=2"}),
        (["tp_size=4", "tp_size=2", "parallel.strategy=tp=2"], {"parallel.strategy": "tp=2"}),
        (["learning_rate=1e-3", "train.lr=0.001"], {"train.lr": 1e-3}),
        (["fsdp_size=4", "gradient_checkpointing=true"], {"parallel.strategy": "shard=4 recompute=full zero=3"}),
        (["seq_len=64", "global_batch_size=32"], {"data.sequence_length": 64, "train.global_batch": 32}),
    ],
)
def test_settings_of_others_are_taken_with_a_note(overrides: list[str], settings: dict[str, Any]) -> None:
    found = resolve_config(None, overrides)
    for key, value in settings.items():
        section, name = key.split(".")
        assert getattr(getattr(found.config, section), name) == value
        assert found.origin(key) == "command line"
    assert found.notes


def test_a_precision_that_is_ruled_out_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nprecision = 'bf16'\n")
    with pytest.raises(
        ConfigError, match="command line: bf16=false, and train.precision is bf16; say what it is to be"
    ):
        resolve_config(tmp_path / "run.toml", ["bf16=false"])
    assert resolve_config(tmp_path / "run.toml", ["fp16=false"]).config.train.precision == "bf16"
    found = resolve_config(tmp_path / "run.toml", ["bf16=false", "train.precision=float32"])
    assert found.config.train.precision == "float32"


def test_run_file_may_have_them(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("tp_size = 2\n[train]\nlearning_rate = 1e-3\n[parallel]\nstrategy = 'zero=1'\n")
    found = resolve_config(tmp_path / "run.toml")
    assert (found.config.train.lr, found.config.parallel.strategy) == (1e-3, "zero=1 tp=2")
    assert "learning_rate is train.lr here" in found.notes


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["tp_size=2", "parallel.strategy=tp=4"], "tp_size=2 and parallel.strategy: tp=4 are one setting, tp"),
        (["parallel.strategy=tp_size=4", "parallel.tp_size=2"], "are one setting, tp"),
        (["tp_size=2", "tensor_parallel_size=4"], "tp_size=2 and tensor_parallel_size=4 are one setting, tp"),
        (["sp_size=2", "cp_size=4"], "sp_size=2 and cp_size=4 are one setting, cp"),
        (["fp16=true", "bf16=true"], "fp16=true and bf16=true are one setting, train.precision"),
        (["bf16=true", "train.precision=fp16"], "are one setting, train.precision"),
        (["train.lr=1e-3", "learning_rate=2e-3"], "train.lr=0.001 and learning_rate=0.002 are one setting"),
        (["max_grad_norm=1", "clip_grad=2"], "max_grad_norm=1 and clip_grad=2 are one setting, train.grad_clip"),
    ],
)
def test_two_names_that_contradict_each_other_are_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"command line: .*{re.escape(said)}"):
        resolve_config(None, overrides)
    lines = [re.sub(r"^([\w.]+)=([a-z].*[ =].*|fp16)$", r"\1 = '\2'", one) for one in overrides]
    lines.sort(key=lambda line: "." in line.partition("=")[0])
    (tmp_path / "run.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"run\.toml: .*differ"):
        resolve_config(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("written", "overrides", "strategy"),
    [
        ("tp_size = 2", ["parallel.strategy=tp=4"], "tp=4"),
        ("parallel.strategy = 'zero=1 tp=4'", ["tp_size=2"], "zero=1 tp=2"),
        ("tp_size = 4", ["tensor_parallel_size=2"], "tp=2"),
        ("fsdp_size = 4", ["zero_stage=2"], "shard=4 zero=2"),
    ],
)
def test_command_line_wins_over_a_file_under_any_name(
    tmp_path: Path, written: str, overrides: list[str], strategy: str
) -> None:
    (tmp_path / "run.toml").write_text(written)
    found = resolve_config(tmp_path / "run.toml", overrides)
    assert (found.config.parallel.strategy, found.origin("parallel.strategy")) == (strategy, "command line")


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_what_means_something_else_is_refused_with_ours(name: str) -> None:
    for override in (f"{name}=1", f"train.{name}=1"):
        with pytest.raises(ConfigError, match="a setting of another trainer") as error:
            resolve_config(None, [override])
        assert INSTEAD[name] in str(error.value)


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("lr_scheduler_type=polynomial", "is not taken"),
        ("learning_rat=1", "is not an override"),
        ("train.learning_rat=1", "unknown setting 'train.learning_rat'"),
        ("elastic.tp_size=2", "unknown setting 'elastic.tp_size'"),
        ("run.learning_rate=2", "unknown setting 'run.learning_rate'"),
        ("tp_size=x", "tp needs a whole number"),
        ("parallel.strategy=tp=4 tp_size=2", "tp is given twice"),
    ],
)
def test_unknown_names_stay_refused(override: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Strategy.parse(resolve_config(None, [override]).config.parallel.strategy, 2)


def test_tables_lead_to_settings_that_exist() -> None:
    config = resolve_config().config
    for key in SETTINGS.values():
        section, name = key.split(".")
        assert hasattr(getattr(config, section), name)
    assert set(DEGREES) <= set(KEYS)
    assert not set(OTHER_DEGREES) & set(KEYS)
