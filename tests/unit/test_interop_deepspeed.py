"""A ds_config in our settings: each key is mapped, does not apply, or is refused; none is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.errors import ConfigError
from meshwright.interop.deepspeed import translate
from meshwright.interop.deepspeed_rules import RULES
from meshwright.interop.resolve import resolve_foreign
from meshwright.interop.show import print_translation
from meshwright.interop.translation import Around, Translation

ADAMW = {"type": "AdamW", "params": {"lr": 3e-4}}


def read(content: dict[str, Any], ranks: int = 2, strategy: str = "auto") -> Translation:
    base = RunConfig.model_validate({"parallel": {"strategy": strategy}})
    return translate(content, "ds.json", Around(base, ranks))


def refusal(content: dict[str, Any], ranks: int = 2, strategy: str = "auto") -> str:
    with pytest.raises(ConfigError) as error:
        read(content, ranks, strategy)
    return str(error.value)


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


@pytest.mark.parametrize(
    ("content", "settings"),
    [
        (zero(2), {"parallel.strategy": "zero=2"}),
        (zero(0), {"parallel.strategy": "zero=0"}),
        (zero(1, offload_optimizer={"device": "cpu"}), {"parallel.strategy": "zero=1 offload=optimizer"}),
        (zero(3, offload_param={"device": "cpu"}), {"parallel.strategy": "zero=3 offload=parameters"}),
        (
            zero(3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu", "pin_memory": True}),
            {"parallel.strategy": "zero=3 offload=parameters"},
        ),
        (zero(2, reduce_bucket_size=5e8), {"comm.bucket_mb": 5e8 * 4 / 2**20}),
        ({**zero(2, reduce_bucket_size=1 << 20), "communication_data_type": "bf16"}, {"comm.bucket_mb": 2.0}),
        (zero(3, stage3_prefetch_bucket_size=5e7), {"parallel.strategy": "zero=3 wrap=size:50000000"}),
        (zero(3, prefetch_bucket_size=1e6), {"parallel.strategy": "zero=3 wrap=size:1000000"}),
        (zero(3, stage3_prefetch_bucket_size=0), {"parallel.strategy": "zero=3 wrap=block"}),
        (zero(3, stage3_max_live_parameters=4e6), {"parallel.strategy": "zero=3 wrap=size:2000000"}),
        (
            zero(3, stage3_max_live_parameters=1e9, stage3_prefetch_bucket_size=3e6),
            {"parallel.strategy": "zero=3 wrap=size:3000000"},
        ),
        ({"communication_data_type": "fp16"}, {"precision.reduce": "fp16"}),
        ({"gradient_clipping": 0.5}, {"train.grad_clip": 0.5}),
        ({"bf16": {"enabled": True}}, {"train.precision": "bf16"}),
        ({"bfloat16": {"enabled": True}}, {"train.precision": "bf16"}),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            {"precision.stored": "bf16", "precision.moments": "bf16"},
        ),
        (
            {
                "fp16": {
                    "enabled": True,
                    "loss_scale": 0,
                    "initial_scale_power": 12,
                    "loss_scale_window": 500,
                    "hysteresis": 3,
                    "min_loss_scale": 2,
                }
            },
            {
                "train.precision": "fp16",
                "precision.loss_scale": "dynamic",
                "precision.initial_power": 12,
                "precision.window": 500,
                "precision.hysteresis": 3,
                "precision.minimum": 2.0,
            },
        ),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, {"precision.loss_scale": 128.0}),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, {"train.precision": "bf16"}),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, {"train.precision": "bf16"}),
        ({"steps_per_print": 7}, {"observe.log_every": 7}),
        ({"wall_clock_breakdown": True}, {"observe.profile_every": 10}),
        ({"wall_clock_breakdown": True, "steps_per_print": 4}, {"observe.profile_every": 4}),
        ({"flops_profiler": {"enabled": True}}, {"observe.profile_steps": "1:1"}),
        ({"flops_profiler": {"enabled": True, "profile_step": 5}}, {"observe.profile_steps": "5:5"}),
        ({"tensorboard": {"enabled": False}}, {"observe.tensorboard": False}),
        ({"wandb": {"enabled": True, "project": "p"}}, {"observe.wandb": True}),
        ({"seed": 11}, {"run.seed": 11}),
        ({"tensor_parallel": {"autotp_size": 2}, **zero(1)}, {"parallel.strategy": "tp=2 zero=1"}),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}, **zero(1)}, {"parallel.strategy": "ep=2 zero=1"}),
        ({"sequence_parallel_size": 2}, {"parallel.strategy": "cp=2 cp_method=ulysses zero=0"}),
        (
            {**zero(2), "activation_checkpointing": {"partition_activations": True}},
            {"parallel.strategy": "zero=2 recompute=full"},
        ),
        (
            {
                **zero(2, offload_optimizer={"device": "cpu"}),
                "activation_checkpointing": {"cpu_checkpointing": True},
            },
            {"parallel.strategy": "zero=2 recompute=full offload=optimizer+activations"},
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
            {"train.optimizer": "sgd", "train.lr": 0.1, "train.beta1": 0.9},
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-6}}},
            {"train.optimizer": "adamw", "train.beta1": 0.8, "train.beta2": 0.9, "train.eps": 1e-6},
        ),
        ({"torch_autocast": {"enabled": True, "dtype": "auto"}}, {}),
    ],
)
def test_key_becomes_its_setting(content: dict[str, Any], settings: dict[str, Any]) -> None:
    stated = read(content).stated
    assert {key: stated[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (zero(3, stage3_param_persistence_threshold=1e5), "wrap"),
        (zero(3, stage3_gather_16bit_weights_on_model_save=True), "meshwright checkpoint export"),
        (zero(3, stage3_max_live_parameters=1e9), "two units"),
        (zero(3, reduce_bucket_size=5e8), "wrap in parallel.strategy"),
        (zero(2, stage3_prefetch_bucket_size=5e7), "stage 2"),
        (zero(2, offload_optimizer={"device": "none", "pin_memory": True}), "never pinned"),
        (zero(3, offload_param={"device": "cpu", "pin_memory": True}), "always pinned"),
        (zero(2, overlap_comm=True), "while passes go on"),
        ({"wall_clock_breakdown": False}, "observe.profile_every"),
        ({"flops_profiler": {"enabled": True, "module_depth": -1}}, "--flops"),
        ({"flops_profiler": {"enabled": True, "top_modules": 3}}, "--flops"),
        ({"flops_profiler": {"enabled": True, "detailed": True}}, "--flops"),
        ({"flops_profiler": {"enabled": True, "output_file": None}}, "DIR/profile"),
        ({"csv_monitor": {"enabled": True, "output_path": "x"}}, "metrics.jsonl"),
        ({"fp16": {"enabled": False, "loss_scale": 0}}, "fp16 is off"),
        ({"gradient_clipping": "auto"}, "our own setting"),
        ({"autotuning": {"fast": True}}, "autotuning is off, as it is by default"),
        ({"autotuning": {"enabled": False, "tuner_type": "random"}}, "autotuning is off"),
        ({"hybrid_engine": {"max_out_tokens": 512}}, "hybrid_engine is off"),
        ({"data_efficiency": {"seed": 1, "data_sampling": {"num_workers": 1}}}, "data_efficiency is off"),
        ({"comet": {"samples_log_interval": 100}}, "comet is off"),
        ({"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}, "follows from the strategy"),
        ({"tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}}, "autotp_size is what counts"),
        ({"tensor_parallel": {"tensor_parallel": {"tp_size": 2}}}, "autotp_size is what counts"),
        ({"compile": {"deepcompile": False, "offload_parameters": True}}, "belongs to deepcompile"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2, "top_k": 2}}, "how its experts are routed"),
        ({"expert_parallel": {"autoep_size": 2}}, "expert_parallel is off, as it is by default"),
        ({"timers": {"throughput": {"synchronized": True}}}, "always timed"),
        ({"torch_autocast": {"dtype": "bfloat16"}}, "torch_autocast is off, as it is by default"),
        ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16 is off, as it is by default"),
        ({"bfloat16": {"enabled": False, "bf16_optimizer_states": True}}, "bf16 is off"),
        ({"fp16": {"loss_scale": 128}}, "fp16 is off, as it is by default"),
        ({"flops_profiler": {"profile_step": 5}}, "flops_profiler is off, as it is by default"),
        ({"torch_autocast": {"enabled": False, "dtype": "bf16"}}, "off"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "the same as bf16"),
        (zero(3, max_reuse_distance=5, stage3_max_reuse_distance=5.0), "the same as zero_optimization.max_reuse"),
        ({"flops_profiler": {"enabled": "auto", "profile_step": 2}}, "off"),
    ],
)
def test_what_does_not_apply_is_listed_with_its_reason(content: dict[str, Any], word: str) -> None:
    left = [entry for entry in read(content).entries if entry.verdict == "not applicable"]
    assert any(word in entry.note for entry in left), left


@pytest.mark.parametrize(
    "content",
    [
        {"torch_autocast": {"dtype": "bfloat16"}},
        {"torch_autocast": {"enabled": False, "dtype": "bfloat16"}},
        {"bf16": {"bf16_master_weights_and_grads": True}},
        {"bfloat16": {"enabled": False, "bf16_optimizer_states": True}},
        {"fp16": {"loss_scale": 128, "initial_scale_power": 12}},
        {"flops_profiler": {"profile_step": 5}},
    ],
)
def test_a_section_that_is_not_enabled_sets_nothing(content: dict[str, Any]) -> None:
    assert read(content).stated == {}


def test_a_key_that_lets_someone_in_is_not_shown() -> None:
    found = read({"comet": {"enabled": False, "api_key": "lets-me-in", "project": "mine"}}).entries
    assert {entry.key: entry.given for entry in found if entry.key.startswith("comet.")} == {
        "comet.enabled": "false",
        "comet.api_key": "***",
        "comet.project": "mine",
    }


@pytest.mark.parametrize(("step", "acts"), [(1000, True), (1001, False)])
def test_a_profile_beyond_the_end_of_the_run_is_told_to_be_none(step: int, acts: bool) -> None:
    found = read({"flops_profiler": {"enabled": True, "profile_step": step}})
    note = next(entry.note for entry in found.entries if entry.key == "flops_profiler.profile_step")
    assert ("it will never act: the run ends with step 1000" in note) != acts


def test_every_key_of_a_file_has_an_entry() -> None:
    content = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 5}},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": {"device": "none"}},
        "bf16": {"enabled": "auto"},
        "wall_clock_breakdown": False,
    }
    written = {
        f"{section}.{name}.{key}" if isinstance(below, dict) else f"{section}.{name}"
        for section, table in content.items()
        if isinstance(table, dict)
        for name, below in table.items()
        for key in (below if isinstance(below, dict) else [""])
    } | {name for name, value in content.items() if not isinstance(value, dict)}
    assert written <= {entry.key for entry in read(content).entries}


def test_rules_have_distinct_keys_and_say_what_becomes_of_them() -> None:
    assert len({rule.key for rule in RULES}) == len(RULES)
    assert all(rule.ours for rule in RULES)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ({"zero_optimisation": {"stage": 2}}, "did you mean 'zero_optimization'"),
        ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'"),
        (zero(2, reduce_bucket_sise=1), "did you mean 'reduce_bucket_size'"),
        ({"stage3_prefetch_bucket_size": 5}, "did you mean 'zero_optimization.stage3_prefetch_bucket_size'"),
        ({"elasticity": {"enabled": True}}, "elasticity is refused"),
        ({"nebula": {}}, "nebula is refused"),
        ({"amp": {"enabled": "auto"}}, "amp is refused"),
        ({"compression_training": {}}, "compression_training is refused"),
        ({"sparse_attention": {}}, "sparse_attention is refused"),
        (zero(3, mics_shard_size=4), "zero=3 replicate=R"),
        (zero(3, zero_hpz_partition_size=8), "zero=3 replicate=R"),
        (zero(3, zero_quantized_weights=True), "travel whole"),
        (zero(4), "stages are 0, 1, 2 and 3"),
        (zero(2, offload_optimizer={"device": "nvme"}), "use cpu or none"),
        (zero(2, offload_param={"device": "cpu"}), "is for stage 3"),
        (zero(2, cpu_offload=True), "offload_optimizer"),
        (zero(1, overlap_comm="yes"), "must be true or false"),
        (zero(2, reduce_bucket_size=0), "zero_optimization.reduce_bucket_size = 0 must be a whole number from 1"),
        (zero(3, reduce_bucket_size=-5), "zero_optimization.reduce_bucket_size = -5 must be a whole number from 1"),
        (zero(3, stage3_prefetch_bucket_size=-5), "stage3_prefetch_bucket_size = -5 must be a whole number from 0"),
        (zero(3, stage3_max_live_parameters=-1), "stage3_max_live_parameters = -1 must be a whole number from 0"),
        (zero(1, stage3_prefetch_bucket_size=-5), "stage3_prefetch_bucket_size = -5 must be a whole number from 0"),
        ({"flops_profiler": {"enabled": True, "profile_step": 0}}, "profile_step = 0 must be a whole number from 1"),
        ({"zero_optimization": True}, "must be a table"),
        ({"optimizer": {"type": "Lamb"}}, "'Lamb' is refused"),
        ({"optimizer": {"type": "OneBitAdam"}}, "'OneBitAdam' is refused"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}}, "adam_w_mode"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, "two numbers"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, "has no optimizer.type"),
        ({"scheduler": {"type": "OneCycle"}}, "'OneCycle' is refused"),
        ({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}}, "does not belong to WarmupLR"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cubic"}}}, "neither log nor linear"),
        (
            {"optimizer": ADAMW, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5}}},
            "would go up to 0.001, not to 0.0003",
        ),
        ({"communication_data_type": "fp8"}, "is not one of"),
        ({"autotuning": {"enabled": True}}, "meshwright plan --try"),
        ({"autotuning": {"fasst": True}}, "did you mean 'fast'"),
        ({"tensor_parallel": {"autotp_siz": 2}}, "did you mean 'autotp_size'"),
        ({"hybrid_engine": {"max_out_token": 5}}, "did you mean 'max_out_tokens'"),
        ({"compile": {"passses": []}}, "did you mean 'passes'"),
        ({"comet": {"samples_log_intervall": 5}}, "did you mean 'samples_log_interval'"),
        ({"data_efficiency": {"sed": 5}}, "did you mean 'seed'"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled says train.precision=bf16"),
        ({"gradient_accumulation_steps": 2}, "needs train_batch_size"),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "bf16 and bfloat16 are two names"),
        (
            zero(3, prefetch_bucket_size=1, stage3_prefetch_bucket_size=2),
            "zero_optimization.prefetch_bucket_size and zero_optimization.stage3_prefetch_bucket_size are two names",
        ),
        (
            zero(3, gather_16bit_weights_on_model_save=True, stage3_gather_fp16_weights_on_model_save=False),
            "stage3_gather_fp16_weights_on_model_save are two names",
        ),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.dtype is absent: torch.autocast would take fp16"),
        ({"optimizer": {"type": "SGD", "params": {"eps": 1e-6}}}, "optimizer.params.eps does not belong to SGD"),
        ({"optimizer": {"type": "Adafactor", "params": {"eps": 1e-6}}}, "does not belong to Adafactor"),
        ({"optimizer": {"type": "SGD", "params": {"adam_w_mode": True}}}, "does not belong to SGD"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": float("nan")}}}, "must be a finite number"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 10**400}}}, "must be a finite number"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, float("inf")]}}}, "must be two numbers"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 10**400]}}}, "must be two numbers"),
        ({"gradient_clipping": float("inf")}, "must be a finite number"),
        ({"seed": float("inf")}, "must be a finite number"),
        ({"train_batch_size": 1e300}, "must be a whole number of 64 bits"),
    ],
)
def test_mistake_and_what_is_not_done_are_refused_by_name(content: dict[str, Any], word: str) -> None:
    assert word in refusal(content)


def test_all_that_is_refused_is_told_at_once() -> None:
    text = refusal({"gradient_cliping": 1.0, "elasticity": {}, **zero(7)})
    assert "gradient_cliping" in text
    assert "elasticity" in text
    assert "stage" in text


@pytest.mark.parametrize(
    ("sizes", "ranks", "strategy", "found"),
    [
        ((32, None, None), 4, "auto", (32, None)),
        ((32, 4, None), 4, "auto", (32, 4)),
        ((32, 4, 2), 4, "auto", (32, 4)),
        ((32, None, 2), 4, "auto", (32, 4)),
        ((None, 4, 2), 4, "auto", (32, 4)),
        ((None, 4, None), 4, "auto", (16, 4)),
        ((None, 4, None), 4, "tp=2", (8, 4)),
    ],
)
def test_batch_sizes_multiply_out_with_the_ranks(
    sizes: tuple[int | None, ...], ranks: int, strategy: str, found: tuple[int, int | None]
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    stated = read(given, ranks, strategy).stated
    assert (stated["train.global_batch"], stated.get("train.micro_batch")) == found


def test_what_follows_from_ranks_that_nobody_knows_yet_is_refused() -> None:
    around = Around(RunConfig(), unknown=True)
    for sizes in ({"train_micro_batch_size_per_gpu": 2}, {"train_batch_size": 8, "gradient_accumulation_steps": 2}):
        with pytest.raises(ConfigError, match="not known before they have met"):
            translate(sizes, "ds.json", around)
    found = translate({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, "ds.json", around)
    assert (found.stated["train.global_batch"], found.stated["train.micro_batch"]) == (8, 2)


def test_three_sizes_say_how_many_ranks_there_are_to_be() -> None:
    sizes = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    found = translate({**sizes, **zero(1)}, "ds.json", Around(RunConfig()))
    assert found.stated["parallel.strategy"] == "zero=1 dp=3"


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [((32, 4, 4), 4), ((64, 4, 2), 4), ((30, 4, None), 4), ((30, None, 4), 4), ((30, None, None), 4), ((0, 1, 1), 1)],
)
def test_sizes_that_do_not_multiply_out_are_refused(sizes: tuple[int | None, ...], ranks: int) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    assert "train_batch_size" in refusal(given, ranks)


def test_absent_keys_have_the_values_of_deepspeed_and_a_run_file_may_change_them(tmp_path: Path) -> None:
    assumed = read({"optimizer": ADAMW}).assumed
    assert assumed["train.grad_clip"] == 1.0
    assert (assumed["train.beta2"], assumed["train.weight_decay"]) == (0.999, 0.0)
    assert (assumed["train.schedule"], assumed["parallel.strategy"]) == ("constant", "zero=0")
    (tmp_path / "ds.json").write_text(json.dumps({"optimizer": ADAMW}))
    (tmp_path / "run.toml").write_text("[train]\nbeta2 = 0.9\ngrad_clip = 0.0\n")
    resolved, _ = resolve_foreign("deepspeed", str(tmp_path / "ds.json"), 2, str(tmp_path / "run.toml"))
    train = resolved.config.train
    assert (train.lr, train.beta2, train.grad_clip, train.weight_decay) == (3e-4, 0.9, 0.0, 0.0)
    assert resolved.origin("train.lr") == "deepspeed: optimizer.params.lr"
    assert resolved.origin("train.beta2").endswith("run.toml, line 2")


@pytest.mark.parametrize(("name", "rate"), [("AdamW", 1e-3), ("SGD", 1e-3), ("Adafactor", 1e-2)])
def test_rate_that_is_absent_is_that_of_the_optimizer(name: str, rate: float) -> None:
    assert read({"optimizer": {"type": name, "params": {}}}).assumed["train.lr"] == rate


@pytest.mark.parametrize("content", [{}, {"zero_optimization": {}}, {"zero_optimization": {"overlap_comm": True}}])
def test_a_file_without_a_stage_is_of_stage_0_and_the_table_says_so(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, **content}))
    resolved, found = resolve_foreign("deepspeed", str(tmp_path / "ds.json"), 2)
    assert resolved.config.parallel.strategy == "zero=0"
    print_translation(found, resolved)
    line = next(line for line in capsys.readouterr().out.splitlines() if "zero_optimization.stage" in line)
    assert "absent: DeepSpeed shards nothing by default" in line
    assert "otherwise" not in line
    (tmp_path / "run.toml").write_text('[parallel]\nstrategy = "zero=1"\n')
    resolved, found = resolve_foreign("deepspeed", str(tmp_path / "ds.json"), 2, str(tmp_path / "run.toml"))
    assert resolved.config.parallel.strategy == "zero=1"
    print_translation(found, resolved)
    assert "otherwise" in capsys.readouterr().out


def test_stage_0_stands_beside_other_words_unless_the_run_file_says_what_is_sharded() -> None:
    content = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {}}
    assert read(content, 4).stated["parallel.strategy"] == "tp=2 zero=0"
    assert read(content, 4, "zero=1").stated["parallel.strategy"] == "zero=1 tp=2"
    assert read(content, 4, "auto pp<=2").stated["parallel.strategy"] == "auto pp<=2 tp=2"


def test_shares_of_a_rate_that_is_left_to_us_are_of_ours() -> None:
    content = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "cos_min_ratio": 0.1}},
    }
    found = translate(content, "ds.json", Around(RunConfig.model_validate({"train": {"lr": 0.5}}), 1))
    assert found.stated["train.min_lr"] == 0.05
    assert "train.lr" not in found.stated


def test_auto_leaves_our_own_settings_alone() -> None:
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    steps = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    content = {
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupDecayLR", "params": {**steps, "warmup_type": "linear"}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "reduce_bucket_size": "auto"},
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto"),
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
    }
    found = read(content)
    # The minimum of the decay is that of the warm-up, which the file leaves to us.
    assert found.assumed == {}
    assert found.stated == {
        "train.optimizer": "adamw",
        "train.schedule": "linear",
        "train.warmup": "linear",
        "parallel.strategy": "zero=3",
    }


@pytest.mark.parametrize(
    ("scheduler", "settings"),
    [
        (
            {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 7, "warmup_type": "linear"}},
            {
                "train.schedule": "constant",
                "train.lr": 0.1,
                "train.warmup_steps": 7,
                "train.warmup": "linear",
                "train.warmup_lr": 0.0,
            },
        ),
        (
            {
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": 50, "warmup_min_lr": 1e-5, "warmup_max_lr": "auto"},
            },
            {
                "train.schedule": "linear",
                "train.lr": 3e-4,
                "train.warmup_steps": 1000,
                "train.warmup": "log",
                "train.warmup_lr": 1e-5,
                "train.min_lr": 1e-5,
                "train.schedule_steps": 50,
            },
        ),
        (
            {"type": "WarmupCosineLR", "params": {"total_num_steps": 50, "warmup_min_ratio": 0.5}},
            {
                "train.schedule": "cosine",
                "train.lr": 3e-4,
                "train.warmup_lr": 1.5e-4,
                "train.min_lr": 3e-8,
                "train.schedule_steps": 50,
            },
        ),
    ],
)
def test_schedules_come_with_deepspeeds_defaults(scheduler: dict[str, Any], settings: dict[str, Any]) -> None:
    found = read({"optimizer": ADAMW, "scheduler": scheduler})
    together = {**found.assumed, **found.stated}
    assert {key: together[key] for key in settings} == pytest.approx(settings)


def test_strategy_of_the_run_file_is_kept_beside_that_of_the_ds_config() -> None:
    assert read(zero(1), 4, "tp=2").stated["parallel.strategy"] == "tp=2 zero=1"
    assert read(zero(1), 4, "auto tp<=2").stated["parallel.strategy"] == "auto tp<=2 zero=1"
    assert "change one" in refusal(zero(1), 4, "zero=2 tp=2")


def test_run_file_that_disagrees_is_refused_unless_the_command_line_settles_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"gradient_clipping": 0.5}))
    (tmp_path / "run.toml").write_text("[train]\ngrad_clip = 2.0\n")
    where = ("deepspeed", str(tmp_path / "ds.json"), 2, str(tmp_path / "run.toml"))
    with pytest.raises(ConfigError, match=r"line 2 says train.grad_clip=2.0 and deepspeed: gradient_clipping says 0.5"):
        resolve_foreign(*where)
    resolved, _ = resolve_foreign(*where, ["train.grad_clip=1.5"])
    assert (resolved.config.train.grad_clip, resolved.origin("train.grad_clip")) == (1.5, "command line")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "is not JSON"),
        ("[1]", "one JSON object"),
        ('{"seed": 1, "seed": 2}', "'seed' is given twice"),
        (None, "no such file"),
        (f'{{"seed": {"9" * 5000}}}', "is not JSON"),
        ('{"seed": 1e400}', "seed = inf must be a finite number"),
    ],
)
def test_file_that_is_none_is_refused(tmp_path: Path, text: str | None, word: str) -> None:
    if text is not None:
        (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=word):
        resolve_foreign("deepspeed", str(tmp_path / "ds.json"), 1)
