"""What a file says beside the question of a plan, such as the learning rate, is in the file that the plan writes."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.config import RunConfig
from meshwright.config_load import load_config, nested
from meshwright.errors import UserError
from meshwright.interop.deepspeed import translate as read_deepspeed
from meshwright.interop.emit import forms
from meshwright.interop.megatron_emit import megatron_file
from meshwright.interop.plan_args import Asked, asked_by_megatron
from meshwright.interop.translation import Around
from meshwright.models.presets import preset
from meshwright.planning.answer import plan
from meshwright.planning.carried import SETTINGS, Carried
from meshwright.planning.made import Plan
from meshwright.strategy import Strategy
from meshwright.training.job import model_spec
from meshwright.training.schedule import learning_rate
from tests.conftest import CommandLine

FIXTURE = Path(__file__).parents[1] / "fixtures/megatron_gpt_175b.args"
SHAPE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 2 --global-batch-size 64 "
)
SAMPLES = (
    "--train-samples 64000 --lr 2e-4 --min-lr 1e-5 --lr-decay-style WSD --lr-wsd-decay-style linear "
    "--lr-wsd-decay-iters 77 "
    "--lr-warmup-samples 640 --lr-warmup-init 1e-6 --data-path 0.3 a 0.7 'b c' --save out --save-interval 25 "
    "--bf16 --vocab-size 1000 "
)
PLAIN = "--train-iters 300 --lr 1e-3 --tokenizer-type GPT2BPETokenizer --optimizer sgd --sgd-momentum 0.8 "
NARROW = "--train-iters 9 --lr 1e-3 --vocab-size 999 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 2 "
WRITTEN = [SAMPLES, PLAIN, NARROW + "--overlap-param-gather --seed 3 --clip-grad 0.25 --eval-iters 3 --num-workers 4"]


def asked(flags: str | Path, tmp_path: Path, gpus: int, **options: Any) -> tuple[Asked, Plan]:
    file = flags if isinstance(flags, Path) else tmp_path / "given.args"
    if isinstance(flags, str):
        file.write_text(flags)
    found = asked_by_megatron(str(file), gpus)
    question = {"strategy": found.strategy, "micro_batch": found.micro_batch, "precision": found.precision, **options}
    cluster = f"{gpus // 8}x8xh100" if gpus > 8 else f"{gpus}xh100"
    sizes = {"sequence_length": found.sequence_length, "global_batch": found.global_batch}
    made = plan(found.spec, cluster, **{**sizes, **question})
    assert made.best is not None
    return found, made


def settings(config: RunConfig, gpus: int) -> dict[str, Any]:
    """All settings, and what they come to where the same can be said in two ways."""
    facts = config.model_dump()
    facts["parallel"]["strategy"] = Strategy.parse(config.parallel.strategy, gpus)
    return {**facts, "model": model_spec(config)}


@pytest.mark.parametrize(("flags", "gpus"), [(FIXTURE, 1024), *((SHAPE + one, 8) for one in WRITTEN)])
@pytest.mark.parametrize("form", ["megatron", "run"])
def test_flags_are_written_with_all_that_they_say(tmp_path: Path, flags: str | Path, gpus: int, form: str) -> None:
    found, made = asked(flags, tmp_path, gpus)
    text = forms()[form].write(made, found.carried)
    (tmp_path / "again").write_text(text)
    if form == "megatron":
        again = asked_by_megatron(str(tmp_path / "again"), gpus)
        assert {flag: words for flag, words in found.carried.flags.items() if flag not in again.carried.flags} == {}
        read = again.resolved.config
    else:
        left_open = [] if found.carried.has_data else ["data.path=none"]
        read = load_config(tmp_path / "again", [f"run.dir={found.resolved.config.run.dir}", *left_open])
    here, there = settings(found.resolved.config, gpus), settings(read, gpus)
    assert there == here
    assert "those of" in text


def test_another_strategy_precision_and_length_replace_their_flags_alone(tmp_path: Path) -> None:
    flags = SHAPE + NARROW + "--sequence-parallel --overlap-param-gather --recompute-activations --lr-warmup-iters 2"
    found, made = asked(flags, tmp_path, 8, strategy="zero=0 pp=2", precision="fp16", tokens=64 * 512 * 50)
    (tmp_path / "again").write_text(megatron_file(made, found.carried))
    again = asked_by_megatron(str(tmp_path / "again"), 8)
    config = again.resolved.config
    assert Strategy.parse(config.parallel.strategy, 8) == Strategy.parse("zero=0 pp=2", 8)
    assert (config.train.precision, config.train.steps, config.train.warmup_steps) == ("fp16", 50, 2)
    # Padded to a multiple of 256 for tp=2, and of that size for any tp.
    assert model_spec(config).vocab_size == found.spec.vocab_size == 1024
    gone = {"--bf16", "--use-distributed-optimizer", "--sequence-parallel", "--overlap-param-gather"}
    assert not (gone | {"--recompute-activations"}) & again.carried.flags.keys()


TRAIN = {"lr": 4e-4, "min_lr": 4e-5, "warmup_steps": 20, "steps": 200}


@pytest.mark.parametrize(
    "train",
    [
        {},
        TRAIN,
        {**TRAIN, "warmup": "log", "warmup_lr": 1e-4, "schedule_steps": 150},
        {**TRAIN, "schedule": "constant"},
        {**TRAIN, "schedule": "constant", "warmup_steps": 0},
        {**TRAIN, "schedule": "linear", "warmup_lr": 4e-5},
        {**TRAIN, "schedule": "linear", "warmup_steps": 0},
        {**TRAIN, "optimizer": "sgd", "beta1": 0.7, "grad_clip": 0.0},
        {**TRAIN, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.03},
    ],
)
def test_ds_config_has_the_schedule_and_the_optimizer(train: dict[str, Any]) -> None:
    config = RunConfig.model_validate({"train": train, "comm": {"bucket_mb": 8}, "observe": {"log_every": 7}})
    made = plan("llama3.2-1b", "8xh100", sequence_length=512, global_batch=64, strategy="zero=2", micro_batch=1)
    content = json.loads(forms()["deepspeed"].write(made, Carried(config, "run.toml")))
    found = read_deepspeed(content, "ds.json", Around(RunConfig(), 8))
    read = RunConfig.model_validate(nested({**found.assumed, **found.stated}))
    read = read.model_copy(update={"train": read.train.model_copy(update={"steps": config.train.steps})})
    moments = () if config.train.optimizer == "sgd" else ("beta2", "eps")
    for setting in ("lr", "beta1", "weight_decay", "grad_clip", "optimizer", "schedule", *moments):
        assert getattr(read.train, setting) == getattr(config.train, setting), setting
    assert (read.comm.bucket_mb, content["steps_per_print"]) == (8, 7)
    # DeepSpeed's warm-ups have two steps at least.
    first = 2 if not config.train.warmup_steps else 0
    for step in range(first, config.train.steps):
        here, there = learning_rate(config.train, step), learning_rate(read.train, step)
        assert there == pytest.approx(here, abs=0.02 * config.train.lr), step


def test_loss_scale_and_the_dtype_of_sums_are_in_a_ds_config() -> None:
    made = plan("llama3.2-1b", "8xh100", global_batch=64, strategy="zero=2", micro_batch=1, precision="fp16")
    scale = {"initial_power": 12, "window": 50, "hysteresis": 3, "minimum": 2.0, "reduce": "bf16"}
    for precision in (scale, {"loss_scale": 128.0}):
        config = RunConfig.model_validate({"precision": precision, "comm": {"bucket_mb": 8}})
        content = json.loads(forms()["deepspeed"].write(made, Carried(config, "run.toml")))
        found = read_deepspeed(content, "ds.json", Around(RunConfig(), 8))
        read = RunConfig.model_validate(nested({**found.assumed, **found.stated}))
        assert read.precision == config.precision
        assert read.comm.bucket_mb == 8  # Elements are as wide as the sums.


def test_torchtitan_has_the_schedule_checkpoints_and_seed() -> None:
    made = plan("llama3.1-8b", "16xh200", sequence_length=1024, global_batch=64, strategy="zero=3", micro_batch=1)
    content = {
        "train": {
            **TRAIN,
            "grad_clip": 0.0,
            "schedule": "wsd",
            "decay_steps": 50,
            "schedule_steps": 400,
            "eps": 1e-6,
            "beta1": 0.8,
            "beta2": 0.97,
            "weight_decay": 0.03,
            "deterministic": True,
        },
        "run": {"seed": 5},
        "checkpoint": {"dir": "out", "every": 30},
        "observe": {"log_every": 7},
    }
    carried = Carried(RunConfig.model_validate(content), "run.toml")
    found = tomllib.loads(forms()["torchtitan"].write(made, carried))
    schedule = {"warmup_steps": 20, "decay_type": "linear", "decay_ratio": 0.125, "total_steps": 400}
    assert found["lr_scheduler"] == {**schedule, "min_lr_factor": pytest.approx(0.1)}
    assert (found["training"]["steps"], found["training"]["max_norm"]) == (200, math.inf)
    assert found["checkpoint"] == {"enable": True, "interval": 30, "folder": "out"}
    assert (found["debug"], found["metrics"]) == ({"seed": 5, "deterministic": True}, {"log_freq": 7})
    update = {"name": "AdamW", "lr": 4e-4, "beta1": 0.8, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.03}
    assert found["optimizer"] == update


def test_accelerate_which_has_no_place_for_them_tells_them() -> None:
    made = plan("llama3.1-8b", "8xh100", global_batch=64, strategy="zero=3", micro_batch=1)
    dealt = {"global_batch": 32, "micro_batch": 2, "precision": "bf16"}
    config = RunConfig.model_validate({"train": {"lr": 0.004, **dealt}, "data": {"path": "a\n b"}})
    text = forms()["accelerate"].write(made, Carried(config, "x\ny"))
    assert 'train.lr=0.004 data.path="a\\n b"' in text
    # What the plan has decided is not told as it was before.
    assert [word for word in dealt if f"train.{word}" in text] == []
    assert yaml.safe_load(text)["num_processes"] == 8


def test_a_file_that_has_its_data_needs_none() -> None:
    there = Carried(RunConfig.model_validate({"data": {"path": "corpus"}}), "gpt.args")
    for form, without, with_data in (
        ("run", "set data.path in it, then: meshwright train F", "meshwright train F"),
        ("megatron", "add data and tokenizer to it, for pretrain_gpt.py", "give it to pretrain_gpt.py"),
        ("torchtitan", "set its dataset, then: --job.config_file F", "set its dataset, then: --job.config_file F"),
    ):
        assert (forms()[form].advice("F", Carried()), forms()[form].advice("F", there)) == (without, with_data)


def test_a_plan_of_flags_keeps_state_as_they_do(meshwright: CommandLine, tmp_path: Path) -> None:
    narrow = "--main-params-dtype bf16 --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
    (tmp_path / "mine.args").write_text(SHAPE + NARROW + "--use-precision-aware-optimizer " + narrow)
    shown = meshwright("plan", "--megatron-args", "mine.args", "--cluster", "2xh100", "--json")
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert (found["stored"], found["moments"]) == ("bf16", "bf16")


@pytest.mark.parametrize(
    ("form", "train", "word"),
    [
        ("deepspeed", {**TRAIN, "schedule": "wsd"}, "train.schedule=wsd, as run.toml has it"),
        ("deepspeed", {**TRAIN, "schedule": "linear"}, "falls to the rate from which it rose"),
        ("deepspeed", {"optimizer": "adafactor"}, "train.optimizer=adafactor"),
        ("torchtitan", {"optimizer": "sgd"}, "train.optimizer=sgd"),
        ("torchtitan", {**TRAIN, "warmup": "log"}, "the warm-up"),
        ("torchtitan", {**TRAIN, "schedule_steps": 100}, "train.schedule_steps=100"),
    ],
)
def test_setting_that_the_other_trainer_lacks_is_refused(form: str, train: dict[str, Any], word: str) -> None:
    made = plan("llama3.1-8b", "16xh200", sequence_length=1024, global_batch=64, strategy="zero=3", micro_batch=1)
    with pytest.raises(UserError, match=word):
        forms()[form].write(made, Carried(RunConfig.model_validate({"train": train}), "run.toml"))


def test_scale_and_dropout_that_cannot_be_said_are_refused() -> None:
    made = plan("llama3.2-1b", "8xh100", global_batch=64, strategy="zero=2", micro_batch=1, precision="fp16")
    config = RunConfig.model_validate({"precision": {"minimum": 0.5}})
    with pytest.raises(UserError, match=r"precision.minimum=0.5, as run.toml has it, cannot be written"):
        forms()["deepspeed"].write(made, Carried(config, "run.toml"))
    spec = preset("llama3.1-8b").model_copy(update={"dropout": 0.1})
    made = plan(spec, "16xh200", sequence_length=1024, global_batch=64, strategy="zero=3", micro_batch=1)
    with pytest.raises(UserError, match=r"dropout=0.1 cannot be written: its models drop nothing"):
        forms()["torchtitan"].write(made, Carried())


def test_defaults_are_called_so(meshwright: CommandLine, tmp_path: Path) -> None:
    asked = (
        "plan",
        "--model",
        "llama3.1-8b",
        "--cluster",
        "8xh100",
        "zero=3",
        "recompute=none",
        "tp=1",
        "pp=1",
        "cp=1",
    )
    for form in ("run", "deepspeed", "megatron", "torchtitan"):
        shown = meshwright(*asked, "--micro-batch", "1", "--seq-len", "1024", "--emit", form, "--out", "written")
        assert shown.returncode == 0, shown.stderr
        assert "are Meshwright's defaults: set your own" in shown.stdout, form
        assert form == "deepspeed" or "# Optimizer, learning rate" in (tmp_path / "written").read_text()


def test_json_tells_which_settings_nobody_has_chosen(meshwright: CommandLine, tmp_path: Path) -> None:
    words = ["plan", "--cluster", "2xh100", "--emit", "deepspeed", "--json"]
    shape = ["--model", "llama3.2-1b", "tp=1", "pp=1", "cp=1", "recompute=none"]
    ours = json.loads(meshwright(*words, *shape).stdout)["emitted"]
    assert (ours["form"], ours["file"], ours["defaults"]) == ("deepspeed", "ds_config.json", list(SETTINGS))
    assert "Meshwright's defaults" in ours["text"]
    (tmp_path / "mine.args").write_text(SHAPE + PLAIN + "--weight-decay 0.02 --clip-grad 0.5 ")
    theirs = json.loads(meshwright(*words, "--megatron-args", "mine.args", "--out", "ds.json").stdout)["emitted"]
    chosen = {"train.optimizer", "train.lr", "train.beta1", "train.weight_decay", "train.grad_clip"}
    assert set(SETTINGS) - set(theirs["defaults"]) == chosen
    assert "mine.args" in theirs["text"]
    nothing = meshwright(*words[:2], "1xh100", *words[3:], "--model", "llama3.1-70b", "--out", "no.json")
    assert json.loads(nothing.stdout)["emitted"]["file"] is None
    assert set(SETTINGS) <= {f"train.{name}" for name in RunConfig().train.model_dump()}


def test_each_machine_has_its_own_command_where_accelerate_launches() -> None:
    advice = forms()["accelerate"].advice
    assert advice("F", Carried()) == "accelerate launch --config_file F train.py"
    where = "--main_process_ip HOST --main_process_port 29500 train.py"
    assert advice("F", Carried(), 2).splitlines()[1:] == [
        f"  machine {rank}: accelerate launch --config_file F --machine_rank {rank} {where}" for rank in range(2)
    ]
    many = advice("F", Carried(), 16)
    assert "from 0 to 15" in many
    assert f"--machine_rank R {where}" in many
