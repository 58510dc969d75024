"""Plans in the words of other trainers: read back they are the same, and what cannot be said is refused."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from typing import Any

import pytest
import yaml

from meshwright.config import RunConfig
from meshwright.config_load import nested
from meshwright.errors import UserError
from meshwright.interop import FORMS
from meshwright.interop.accelerate_emit import accelerate_file
from meshwright.interop.deepspeed import translate as read_deepspeed
from meshwright.interop.deepspeed_emit import deepspeed_file
from meshwright.interop.emit import Limits, forms
from meshwright.interop.megatron import translate as read_megatron
from meshwright.interop.megatron_emit import megatron_file
from meshwright.interop.torchtitan_emit import torchtitan_file
from meshwright.interop.translation import Around
from meshwright.models.presets import preset
from meshwright.models.spec import Experts, ModelSpec
from meshwright.planning.answer import plan
from meshwright.planning.carried import Carried
from meshwright.planning.made import Plan
from meshwright.planning.scenario import Layout
from meshwright.strategy import Strategy
from meshwright.training.job import model_spec

BATCH, LENGTH = 64, 2048


def given(strategy: str, model: str | ModelSpec = "llama3.2-1b", cluster: str = "8xh100", **options: Any) -> Plan:
    found = plan(
        model, cluster, sequence_length=LENGTH, global_batch=BATCH, strategy=strategy, micro_batch=1, **options
    )
    assert found.best is not None, strategy
    return found


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("zero=0", {}),
        ("zero=1", {}),
        ("zero=2 offload=optimizer", {}),
        ("zero=3", {}),
        ("zero=3 offload=parameters", {}),
        ("zero=3 wrap=size:50000000", {}),
        ("zero=3 wrap=block", {}),
        ("zero=2", {"precision": "fp16"}),
        ("zero=2", {"precision": "float32"}),
        ("zero=1", {"stored": "bf16", "moments": "bf16"}),
    ],
)
def test_ds_config_is_read_back_as_the_same_run(strategy: str, options: dict[str, str]) -> None:
    made = given(strategy, **options)
    assert made.best is not None
    found = read_deepspeed(json.loads(deepspeed_file(made, Carried())), "ds.json", Around(RunConfig(), 8))
    config = RunConfig.model_validate(nested({**found.assumed, **found.stated}))
    assert Strategy.parse(config.parallel.strategy, 8) == made.best.strategy
    assert (config.train.global_batch, config.train.micro_batch) == (BATCH, made.best.micro_batch)
    assert config.train.precision == made.question.precision
    kept = made.question.kept
    assert ((config.precision.stored or "float32"), config.precision.moments) == (kept.stored, kept.moments)
    own = RunConfig().train
    for setting in ("lr", "beta1", "beta2", "eps", "weight_decay", "grad_clip", "optimizer"):
        assert getattr(config.train, setting) == getattr(own, setting)


MIXTURE = preset("mixtral-8x7b").model_copy(update={"num_hidden_layers": 4})
GPT = preset("gpt2").model_copy(update={"vocab_size": 50304, "max_position_embeddings": 2048})


@pytest.mark.parametrize(
    ("strategy", "model", "options"),
    [
        ("zero=0", "llama3.2-1b", {}),
        ("zero=1 tp=2", "llama3.1-8b", {}),
        ("zero=1 tp=2 sp=off", "llama3.2-1b", {}),
        ("zero=1 replicate=2", "qwen3-0.6b", {}),
        ("zero=2", "llama3.2-1b", {}),
        ("zero=3 tp=2", "llama3.2-1b", {}),
        ("zero=1 tp=2 pp=2 recompute=full", "llama3.1-8b", {}),
        ("zero=1 pp=2 schedule=interleaved:2", "llama3.2-1b", {"precision": "fp16"}),
        ("zero=1 recompute=first:4", "llama3.2-1b", {"precision": "fp8"}),
        ("zero=1 cp=2", "llama3.2-1b", {}),
        ("zero=1 cp=2 cp_method=ulysses recompute=selective", "llama3.2-1b", {}),
        ("zero=1 ep=4", MIXTURE, {}),
        ("zero=1 offload=optimizer", "llama3.2-1b", {}),
        ("zero=0 tp=2", GPT, {"precision": "float32"}),
    ],
)
def test_megatron_flags_are_read_back_as_the_same_run(
    strategy: str, model: str | ModelSpec, options: dict[str, str]
) -> None:
    made = given(strategy, model, **options)
    assert made.best is not None
    found = read_megatron(megatron_file(made, Carried()), "flags", Around(RunConfig(), 8))
    config = RunConfig.model_validate(nested({**found.assumed, **found.stated}))
    assert Strategy.parse(config.parallel.strategy, 8) == made.best.strategy
    assert (config.train.global_batch, config.train.micro_batch) == (BATCH, made.best.micro_batch)
    assert (config.train.precision, config.data.sequence_length) == (made.question.precision, LENGTH)
    read, shape = model_spec(config), made.question.spec
    assert read.model_copy(update={"family": shape.family}) == shape
    own = RunConfig().train
    for setting in ("lr", "min_lr", "schedule", "beta1", "beta2", "eps", "weight_decay", "grad_clip", "optimizer"):
        assert getattr(config.train, setting) == getattr(own, setting)


def test_a_vocabulary_that_tp_does_not_divide_is_padded_as_megatron_pads_it() -> None:
    odd = GPT.model_copy(update={"vocab_size": 50257})
    text = megatron_file(given("zero=1 tp=4", odd), Carried())
    assert "pads the vocabulary of 50257 to 50260, a multiple of tp=4" in text
    assert "--vocab-size 50257\n--make-vocab-size-divisible-by 1\n" in text
    found = read_megatron(text, "flags", Around(RunConfig(), 8))
    assert model_spec(RunConfig.model_validate(nested({**found.assumed, **found.stated}))).vocab_size == 50260


MACHINES = {"sequence_length": 4096, "global_batch": 64, "compare": False}


@pytest.mark.parametrize(
    ("form", "model", "cluster", "batch", "others"),
    [
        ("deepspeed", "llama3.1-8b", "16xa100-40", 64, ["zero=3 offload=optimizer", "zero=3 offload=parameters"]),
        ("megatron", "llama3.1-70b", "64xh100", 1024, ["zero=1 tp=4 pp=4 recompute=full", "zero=3 recompute=full"]),
        ("accelerate", "llama3.1-70b", "64xh100", 64, ["zero=3 recompute=full tp=2 sp=off", "zero=3 recompute=full"]),
        ("accelerate", "qwen3-30b-a3b", "32xh100", 64, ["zero=3 recompute=full", "zero=3 recompute=full tp=8 sp=off"]),
        ("torchtitan", "llama3.1-70b", "64xh100", 64, ["zero=2 tp=4 pp=4 recompute=full", "zero=3 recompute=full"]),
    ],
)
def test_search_for_a_form_finds_the_best_that_it_can_hold(
    form: str, model: str, cluster: str, batch: int, others: list[str]
) -> None:
    asked: dict[str, Any] = {**MACHINES, "global_batch": batch}
    with pytest.raises(UserError, match="cannot be written"):
        forms()[form].write(plan(model, cluster, **asked), Carried())
    made = plan(model, cluster, only=Limits(form, Carried()), **asked)
    assert made.best is not None
    assert forms()[form].write(made, Carried())
    for other in others:
        rival = plan(model, cluster, strategy=other, **asked)
        assert rival.best is not None, other
        assert forms()[form].write(rival, Carried())
        assert made.best.score("throughput")[0] <= rival.best.score("throughput")[0], other


def test_first_layers_of_a_pipeline_are_not_written_as_those_of_every_stage() -> None:
    asked: dict[str, Any] = {**MACHINES, "constraints": "pp=4 tp=2 zero=1 recompute=first"}
    free = plan("llama3.1-8b", "16xa100-40", **asked).best
    assert free is not None
    assert free.strategy.recompute.startswith("first:")
    with pytest.raises(UserError, match=r"can be written.* first:N with pp=1"):
        plan("llama3.1-8b", "16xa100-40", only=Limits("megatron", Carried()), **asked)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved:2"])
def test_all_layers_of_every_stage_are_written_as_such(schedule: str) -> None:
    text = megatron_file(given(f"zero=1 pp=2 schedule={schedule} recompute=first:16"), Carried())
    assert "--recompute-method uniform\n--recompute-num-layers 1\n" in text
    found = read_megatron(text, "flags", Around(RunConfig(), 8))
    assert found.words["recompute"] == "full"


@pytest.mark.parametrize(
    ("form", "asked", "words"),
    [
        ("deepspeed", {"constraints": "tp=2"}, r"tp=2, tp=1 \(--emit deepspeed keeps .*: tp=1 pp=1 cp=1 ep=1"),
        ("megatron", {"constraints": "pp=8 zero=2"}, "meets pp=8, zero=2, fits and can be written.* with pp=1"),
        ("accelerate", {"constraints": "zero=1"}, "zero=1, zero!=1 .*zero=0, 2 or 3"),
        ("torchtitan", {"precision": "tf32"}, "precision=tf32 cannot be written: it has bf16"),
        ("accelerate", {"strategy": "zero=3 pp=2 recompute=full"}, "pp=2 cannot be written.*without --strategy .*pp=1"),
    ],
)
def test_refusal_of_what_was_asked_for_names_the_words_that_help(form: str, asked: dict[str, Any], words: str) -> None:
    def emit() -> str:
        made = plan("llama3.1-8b", "64xh100", only=Limits(form, Carried()), **{**MACHINES, **asked})
        return forms()[form].write(made, Carried())

    with pytest.raises(UserError, match=words):
        emit()


def test_what_a_form_holds_of_one_model_says_nothing_of_another() -> None:
    limits, layout = Limits("megatron", Carried()), Layout(dp=2, pp=4)
    question = given("zero=3").question
    odd = question.spec.model_copy(update={"num_hidden_layers": 14})
    assert limits.takes(question, layout)
    assert not limits.takes(replace(question, spec=odd), layout)
    assert limits.takes(question, layout)


def test_a_model_that_a_form_lacks_and_machines_of_several_kinds_are_refused_before_the_search() -> None:
    with pytest.raises(UserError, match="no model of this shape"):
        plan("gpt2", "8xh100", only=Limits("torchtitan", Carried()))
    with pytest.raises(UserError, match="plan for those of one kind"):
        plan("llama3.1-8b", "8xh100+8xa100", only=Limits("megatron", Carried()))


def test_torchtitan_has_the_degrees_under_its_names() -> None:
    text = torchtitan_file(given("zero=3 tp=2 pp=2 schedule=interleaved:2 recompute=full", "llama3.1-8b"), Carried())
    found = tomllib.loads(text)
    assert (found["model"]["name"], found["model"]["flavor"]) == ("llama3", "8B")
    assert found["parallelism"] == {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": 2,
        "fsdp_reshard_after_forward": "always",
        "tensor_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "expert_tensor_parallel_degree": 1,
        "pipeline_parallel_schedule": "Interleaved1F1B",
        "pipeline_parallel_layers_per_stage": 8,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
        "pipeline_parallel_microbatch_size": 1,
    }
    assert found["activation_checkpoint"] == {"mode": "full"}
    # In a pipeline the batch of a data-parallel rank is cut into micro-batches.
    assert (found["training"]["local_batch_size"], found["training"]["global_batch_size"]) == (32, 64)
    flat = tomllib.loads(
        torchtitan_file(given("zero=2 recompute=selective", "llama3.1-8b", cluster="16xh200"), Carried())
    )
    assert flat["parallelism"]["fsdp_reshard_after_forward"] == "never"
    assert flat["training"]["local_batch_size"] == 1
    copies = tomllib.loads(torchtitan_file(given("zero=0", "qwen3-0.6b"), Carried()))["parallelism"]
    assert (copies["data_parallel_replicate_degree"], copies["data_parallel_shard_degree"]) == (8, 1)


def test_accelerate_has_fsdp2_and_the_sizes_of_its_parallelism_config() -> None:
    found = yaml.safe_load(accelerate_file(given("zero=3 replicate=2 tp=2 sp=off recompute=full"), Carried()))
    assert found["distributed_type"] == "FSDP"
    assert (found["num_processes"], found["num_machines"], found["mixed_precision"]) == (8, 1, "bf16")
    assert found["fsdp_config"]["fsdp_version"] == 2
    assert found["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert found["fsdp_config"]["fsdp_activation_checkpointing"] is True
    assert found["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 2,
        "parallelism_config_cp_size": 1,
    }
    plain = yaml.safe_load(accelerate_file(given("zero=0", precision="float32"), Carried()))
    assert (plain["distributed_type"], plain["mixed_precision"]) == ("MULTI_GPU", "no")
    assert "fsdp_config" not in plain


SHARED = MIXTURE.model_copy(
    update={"experts": Experts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=False)}
)


@pytest.mark.parametrize(
    ("form", "strategy", "model", "word"),
    [
        ("deepspeed", "zero=1 tp=2", "llama3.2-1b", "tp=2 cannot be written"),
        ("deepspeed", "zero=1 pp=2", "llama3.2-1b", "pp=2 cannot be written"),
        ("deepspeed", "zero=1 cp=2", "llama3.2-1b", "cp=2 cannot be written"),
        ("deepspeed", "zero=1 ep=2", MIXTURE, "ep=2 cannot be written"),
        ("deepspeed", "zero=3 replicate=2", "llama3.2-1b", "replicate=2"),
        ("deepspeed", "zero=3 recompute=full", "llama3.2-1b", "recompute=full"),
        ("deepspeed", "compress=bf16", "llama3.2-1b", "compress=bf16"),
        ("megatron", "zero=1 pp=2 schedule=zero-bubble", "llama3.2-1b", "schedule=zero-bubble"),
        ("megatron", "zero=1 pp=2 layers=7+9", "llama3.2-1b", r"layers=7\+9"),
        ("megatron", "zero=1 pp=2 recompute=first:4", "llama3.2-1b", "recompute=first:4 with pp=2 cannot be written"),
        (
            "megatron",
            "zero=1 pp=2 schedule=interleaved:2 recompute=first:4",
            "llama3.2-1b",
            "as many layers of every stage",
        ),
        ("megatron", "zero=3 offload=parameters", "llama3.2-1b", "offload=parameters"),
        ("megatron", "zero=3 replicate=2", "llama3.2-1b", "replicate=2"),
        ("megatron", "zero=1", SHARED, "mixture of experts"),
        ("accelerate", "zero=1", "llama3.2-1b", "zero=1"),
        ("accelerate", "zero=3 pp=2", "llama3.2-1b", "pp=2"),
        ("accelerate", "zero=3 tp=2", "llama3.2-1b", "sp=on"),
        ("accelerate", "zero=3 recompute=selective", "llama3.2-1b", "recompute=selective"),
        ("torchtitan", "zero=1", "qwen3-0.6b", "zero=1"),
        ("torchtitan", "zero=3 cp=2 cp_method=ulysses", "llama3.1-8b", "cp_method=ulysses"),
        ("torchtitan", "zero=3", "llama3.2-1b", "no model of this shape"),
        ("torchtitan", "zero=3 tp=2 sp=off", "llama3.1-8b", "sp=off"),
        ("torchtitan", "zero=3 recompute=first:4", "llama3.1-8b", "recompute=first:4"),
    ],
)
def test_strategy_that_the_other_trainer_lacks_is_refused(
    form: str, strategy: str, model: str | ModelSpec, word: str
) -> None:
    made = given(strategy, model)
    with pytest.raises(UserError, match=word):
        forms()[form].write(made, Carried())


def test_forms_are_those_that_the_command_line_names() -> None:
    assert tuple(forms()) == FORMS
