"""DeepSpeed's own classes take what we write, have no key that we do not know, and rise and decay as ours do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from deepspeed.autotuning import constants as autotuning
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config
from deepspeed.runtime.data_pipeline import constants as data_pipeline
from deepspeed.runtime.lr_schedules import WarmupCosineLR, WarmupDecayLR, WarmupLR
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from meshwright.config import RunConfig
from meshwright.config_load import nested
from meshwright.interop.deepspeed import translate
from meshwright.interop.deepspeed_emit import deepspeed_file
from meshwright.interop.deepspeed_rules import RULES
from meshwright.interop.translation import Around
from meshwright.planning.answer import plan
from meshwright.planning.carried import Carried
from meshwright.training.schedule import learning_rate


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("zero=0", {}, [0, True, False, "none", "none"]),
        ("zero=1", {"precision": "fp16"}, [1, False, True, "none", "none"]),
        ("zero=2 offload=optimizer", {}, [2, True, False, "cpu", "none"]),
        ("zero=3 offload=parameters wrap=block", {}, [3, True, False, "cpu", "cpu"]),
        ("zero=3", {"stored": "bf16", "moments": "bf16"}, [3, True, False, "none", "none"]),
    ],
)
def test_its_config_class_reads_our_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, options: dict[str, str], expected: list[Any]
) -> None:
    # Two ranks as the class sees them: starting its communication would compile a kernel for minutes.
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda *group: 2)
    made = plan(
        "llama3.2-1b", "2xh200", sequence_length=1024, global_batch=16, strategy=strategy, micro_batch=2, **options
    )
    (tmp_path / "ds.json").write_text(deepspeed_file(made, Carried()))
    found = config.DeepSpeedConfig(str(tmp_path / "ds.json"))
    zero = found.zero_config
    sizes = (found.train_batch_size, found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps)
    assert (found.world_size, *sizes) == (2, 16, 2, 4)
    assert (found.gradient_clipping, found.optimizer_name) == (1.0, "adamw")
    devices = [getattr(part, "device", None) for part in (zero.offload_optimizer, zero.offload_param)]
    names = ["none" if device is None else str(getattr(device, "value", device)) for device in devices]
    facts = [int(found.zero_optimization_stage), found.bfloat16_config.enabled, found.float16_config.enabled, *names]
    assert facts == expected
    assert found.bfloat16_config.bf16_master_weights_and_grads == ("stored" in options)


@pytest.mark.parametrize(
    ("model", "prefix"),
    [
        (DeepSpeedZeroConfig, "zero_optimization."),
        (DeepSpeedZeroOffloadOptimizerConfig, "zero_optimization.offload_optimizer."),
        (DeepSpeedZeroOffloadParamConfig, "zero_optimization.offload_param."),
        (DeepSpeedFP16Config, "fp16."),
        (DeepSpeedBF16Config, "bf16."),
        (TPTrainingConfig, "tensor_parallel."),
        (TPConfig, "tensor_parallel.tp."),
        (CompileConfig, "compile."),
        (CometConfig, "comet."),
        (WandbConfig, "wandb."),
        (TensorBoardConfig, "tensorboard."),
        (CSVConfig, "csv_monitor."),
        (CommsLoggerConfig, "comms_logger."),
        (config.HybridEngineConfig, "hybrid_engine."),
        (DeepSpeedThroughputTimerConfig, "timers.throughput."),
    ],
)
def test_every_key_of_its_classes_has_a_rule(model: Any, prefix: str) -> None:
    known = {rule.key for rule in RULES}
    tables = {key[len(prefix) :].partition(".")[0] for key in known if key.startswith(prefix)}
    missing = [field.alias or name for name, field in model.model_fields.items() if (field.alias or name) not in tables]
    assert missing == []


def test_every_key_of_its_other_sections_has_a_rule() -> None:
    known = {rule.key for rule in RULES}
    experts = {f"expert_parallel.{field}" for field in AutoEPConfig.__dataclass_fields__ if not field.startswith("_")}
    assert experts - known == set()
    values = ("TUNER_GRIDSEARCH", "TUNER_RANDOM", "TUNER_MODELBASED", "METRIC_")
    tuned = {
        f"autotuning.{value}"
        for name, value in vars(autotuning).items()
        if name.startswith("AUTOTUNING_") and not name.endswith(("_DEFAULT", "_FORMAT"))
        if not name.removeprefix("AUTOTUNING_").startswith(values) or name == "AUTOTUNING_METRIC_PATH"
    }
    assert len(tuned) > 15
    assert tuned - known == set()
    sampled = (data_pipeline.DATA_EFFICIENCY_SEED, data_pipeline.DATA_SAMPLING, data_pipeline.DATA_ROUTING)
    assert {f"data_efficiency.{name}" for name in sampled} <= known


def theirs(kind: Any, steps: int, rate: float = 0.01, /, **params: Any) -> list[float]:
    """The learning rate of every optimizer step: the schedule moves after each."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=rate)
    schedule = kind(optimizer, **params)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def ours(name: str, steps: int, **params: Any) -> list[float]:
    content = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": name, "params": params},
    }
    found = translate(content, "ds.json", Around(RunConfig(), 1))
    run = RunConfig.model_validate(nested({**found.assumed, **found.stated}))
    return [learning_rate(run.train, step) for step in range(steps)]


TRAIN = {"lr": 4e-4, "min_lr": 4e-5, "warmup_steps": 20, "steps": 200}
KINDS = {"WarmupLR": WarmupLR, "WarmupDecayLR": WarmupDecayLR, "WarmupCosineLR": WarmupCosineLR}


@pytest.mark.parametrize(
    ("train", "late"),
    [
        ({}, 0),
        (TRAIN, 2),
        ({**TRAIN, "warmup": "log", "schedule_steps": 150}, 1),
        ({**TRAIN, "schedule": "constant"}, 2),
        ({**TRAIN, "schedule": "constant", "warmup_steps": 0}, 0),
        ({**TRAIN, "schedule": "linear", "warmup_lr": 4e-5}, 2),
        ({**TRAIN, "schedule": "linear", "warmup_steps": 0}, 1),
        ({**TRAIN, "schedule": "linear", "min_lr": 0.0}, 2),
    ],
)
def test_schedule_that_we_write_is_ours_in_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: dict[str, Any], late: int
) -> None:
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda *group: 2)
    run = RunConfig.model_validate({"train": train}).train
    made = plan("llama3.2-1b", "2xh200", sequence_length=1024, global_batch=16, strategy="zero=2", micro_batch=2)
    (tmp_path / "ds.json").write_text(deepspeed_file(made, Carried(RunConfig(train=run), "run.toml")))
    found = config.DeepSpeedConfig(str(tmp_path / "ds.json"))
    wanted = [learning_rate(run, step) for step in range(run.steps)]
    if found.scheduler_name is None:
        assert set(wanted) == {found.optimizer_params["lr"]}
        return
    rates = theirs(KINDS[found.scheduler_name], run.steps, found.optimizer_params["lr"], **found.scheduler_params)
    # Warm-ups begin late and have two steps at least; the rest is a step off at most.
    assert rates[2 + late :] == pytest.approx(wanted[2 : run.steps - late], abs=0.02 * run.lr)


@pytest.mark.parametrize("kind", ["linear", "log"])
@pytest.mark.parametrize("least", [0.0, 0.002])
def test_warm_up_is_theirs_some_steps_ahead(kind: str, least: float) -> None:
    params = {"warmup_min_lr": least, "warmup_max_lr": 0.01, "warmup_num_steps": 8, "warmup_type": kind}
    late = {"linear": 2, "log": 1}[kind]
    assert theirs(WarmupLR, 20, **params)[late:] == pytest.approx(ours("WarmupLR", 20, **params)[:-late])


def test_linear_decay_is_theirs_one_step_ahead() -> None:
    params = {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "total_num_steps": 15, "warmup_type": "log"}
    assert theirs(WarmupDecayLR, 20, **params)[1:] == pytest.approx(ours("WarmupDecayLR", 20, **params)[:-1])


def test_cosine_decay_is_theirs() -> None:
    params = {"warmup_num_steps": 4, "total_num_steps": 15, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2}
    assert theirs(WarmupCosineLR, 20, **params)[5:] == pytest.approx(ours("WarmupCosineLR", 20, **params)[5:])
