"""The flags of a Megatron-LM run in our settings: each is mapped, does not apply, or is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import RunConfig
from meshwright.errors import ConfigError
from meshwright.interop.megatron import translate
from meshwright.interop.megatron_rules import RULES
from meshwright.interop.resolve import resolve_foreign
from meshwright.interop.translation import Around, Translation
from meshwright.models.count import count_parameters
from meshwright.strategy import Strategy
from meshwright.training.job import model_spec

GPT = Path(__file__).parents[1] / "fixtures/megatron_gpt_175b.args"
SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 64"
SHAPE += " --vocab-size 1000"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers"


def read(text: str, ranks: int | None = None, **base: Any) -> Translation:
    return translate(text, "flags", Around(RunConfig.model_validate(base), ranks))


def refusal(text: str, ranks: int | None = None, **base: Any) -> str:
    with pytest.raises(ConfigError) as error:
        read(text, ranks, **base)
    return str(error.value)


def spec_of(flags: str) -> dict[str, Any]:
    found = read(flags)
    together = {**found.assumed, **found.stated}
    return {key.removeprefix("model.spec."): value for key, value in together.items() if key.startswith("model.spec.")}


def test_every_flag_of_a_large_gpt_is_read() -> None:
    flags = set(re.findall(r"(?<!\S)--[a-z0-9-]+", re.sub("#.*", "", GPT.read_text())))
    assert len(flags) == 62
    found = read(GPT.read_text(), 1024)
    assert flags <= {entry.key for entry in found.entries}
    assert {
        "train.steps": 500_000,
        "train.global_batch": 1536,
        "train.micro_batch": 1,
        "train.warmup_steps": 430,
        "train.schedule_steps": 430_000,
        "train.schedule": "cosine",
        "train.precision": "fp16",
        "train.eval_sequences": 15_360,
        "precision.initial_power": 32,
        "data.path": "tokens/my corpus_text_document",
        "data.validation": 0.051,
        "checkpoint.dir": "checkpoints/gpt",
        "checkpoint.every": 10_000,
        "checkpoint.background": True,
        "elastic.timeout_s": 1800.0,
        "train.gc_every": 100,
        "run.seed": 7,
    }.items() <= found.stated.items()
    strategy = Strategy.parse(found.stated["parallel.strategy"], 1024)
    assert str(strategy) == "dp=32 zero=1 tp=8 pp=4 schedule=interleaved:2 recompute=full"


def test_large_gpt_has_its_published_shape() -> None:
    resolved, _ = resolve_foreign("megatron", str(GPT), 1024)
    spec = model_spec(resolved.config)
    assert (spec.vocab_size, spec.intermediate_size, spec.head_dim) == (51_200, 49_152, 128)
    assert (spec.norm, spec.positions, spec.activation, spec.tie_word_embeddings) == (
        "layernorm",
        "learned",
        "gelu_tanh",
        True,
    )
    assert 174e9 < count_parameters(spec).total < 176e9
    assert resolved.origin("model.spec.num_hidden_layers") == "megatron: --num-layers"


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (
            "",
            {
                "activation": "gelu_tanh",
                "norm": "layernorm",
                "bias": ["q", "k", "v", "o", "up", "down"],
                "dropout": 0.1,
            },
        ),
        ("--swiglu", {"activation": "swiglu", "intermediate_size": 128}),
        ("--no-bias-gelu-fusion", {"activation": "gelu", "intermediate_size": 256}),
        ("--disable-bias-linear --add-qkv-bias", {"bias": ["q", "k", "v"]}),
        ("--disable-bias-linear", {"bias": []}),
        ("--normalization RMSNorm --norm-epsilon 1e-6", {"norm": "rmsnorm", "norm_eps": 1e-6}),
        ("--position-embedding-type rope --rotary-base 500000", {"positions": "rope", "rope_theta": 500_000.0}),
        (
            "--position-embedding-type rope --use-rope-scaling",
            {"rope_scaling.kind": "llama3", "rope_scaling.factor": 8.0},
        ),
        ("--group-query-attention --num-query-groups 2", {"num_key_value_heads": 2}),
        ("--kv-channels 32", {"head_dim": 32}),
        ("--untie-embeddings-and-output-weights", {"tie_word_embeddings": False}),
        ("--window-size (15,0)", {"sliding_window": 16}),
        ("--make-vocab-size-divisible-by 64 --tensor-model-parallel-size 2", {"vocab_size": 1024}),
        ("--make-vocab-size-divisible-by 1", {"vocab_size": 1000}),
        ("--padded-vocab-size 1111", {"vocab_size": 1111}),
        (
            "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 1e-2 "
            "--moe-shared-expert-intermediate-size 64 --swiglu",
            {
                "experts.num_experts": 8,
                "experts.num_experts_per_tok": 2,
                "experts.moe_intermediate_size": 32,
                "experts.num_shared_experts": 2,
                "experts.router_aux_loss_coef": 0.01,
                "family": "mixtral",
            },
        ),
    ],
)
def test_shape_has_megatrons_values_where_flags_are_absent(flags: str, facts: dict[str, Any]) -> None:
    found = spec_of(f"{SHAPE} {flags}")
    assert {name: found[name] for name in facts} == facts


@pytest.mark.parametrize(
    ("flags", "strategy"),
    [
        ("", "zero=0"),
        ("--use-distributed-optimizer", "zero=1"),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", "zero=1 replicate=2"),
        ("--use-megatron-fsdp", "zero=3"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "zero=2"),
        ("--use-torch-fsdp2", "zero=3"),
        ("--tensor-model-parallel-size 2", "tp=2 sp=off zero=0"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "tp=2 sp=on zero=0"),
        ("--context-parallel-size 2 --cp-comm-type a2a", "cp=2 cp_method=ulysses zero=0"),
        ("--context-parallel-size 2 --cp-comm-type p2p", "cp=2 cp_method=ring zero=0"),
        (
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
            "pp=2 schedule=interleaved:2 zero=0",
        ),
        ("--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", None),
        ("--recompute-activations", "zero=0 recompute=selective"),
        ("--recompute-granularity selective --recompute-modules core_attn mlp", "zero=0 recompute=selective"),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            "zero=0 recompute=first:3",
        ),
        ("--recompute-granularity full --recompute-activations", "zero=0 recompute=selective"),
        (f"{SHAPE} --pipeline-model-parallel-size 2 {BLOCK} 2", "pp=2 zero=0 recompute=full"),
        (
            f"{SHAPE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 {BLOCK} 1",
            "pp=2 schedule=interleaved:2 zero=0 recompute=full",
        ),
        ("--use-torch-fsdp2 --data-parallel-sharding-strategy optim_grads", "zero=3"),
        ("--optimizer-cpu-offload --use-precision-aware-optimizer", "zero=0 offload=optimizer"),
    ],
)
def test_degrees_become_a_strategy(flags: str, strategy: str | None) -> None:
    if strategy is None:
        flags, strategy = f"{SHAPE} {flags.partition('4 ')[2]}", "pp=2 schedule=interleaved:2 zero=0"
    assert read(flags).stated["parallel.strategy"] == strategy


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--train-samples 6400 --global-batch-size 64", {"train.steps": 100}),
        ("--micro-batch-size 2 --tensor-model-parallel-size 2", {"train.global_batch": 8}),
        ("--lr 1e-3", {"train.lr": 1e-3, "train.schedule": "linear", "train.beta2": 0.999, "train.weight_decay": 0.01}),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 50 --lr-wsd-decay-style linear",
            {"train.schedule": "wsd", "train.decay_steps": 50},
        ),
        ("--lr-warmup-samples 640 --global-batch-size 64", {"train.warmup_steps": 10}),
        ("--lr-warmup-fraction 0.1 --train-iters 50", {"train.warmup_steps": 5}),
        ("--bf16 --fp8-format hybrid", {"train.precision": "fp8"}),
        ("--bf16 --grad-reduce-in-bf16", {"train.precision": "bf16", "precision.reduce": "bf16"}),
        ("--fp16", {"precision.initial_power": 32}),
        ("--fp16 --loss-scale 128", {"precision.loss_scale": 128.0}),
        ("--optimizer sgd --sgd-momentum 0.8", {"train.optimizer": "sgd", "train.beta1": 0.8}),
        ("--optimizer sgd --sgd-momentum 0.8 --adam-beta1 0.5", {"train.beta1": 0.8}),
        ("--adam-beta1 0.8 --sgd-momentum 0.5", {"train.beta1": 0.8}),
        ("--eval-iters 10 --global-batch-size 4", {"train.eval_sequences": 40, "train.eval_every": 1000}),
        ("--eval-iters 10 --eval-interval 5", {"train.eval_every": 5}),
        ("--seed 9007199254740993", {"run.seed": 9007199254740993}),
        ("--data-path a_text_document", {"data.path": "a_text_document", "data.validation": 0.031}),
        (
            "--data-path 0.3 a 0.7 b",
            {"data.mix": [{"path": "a", "weight": 0.3}, {"path": "b", "weight": 0.7}]},
        ),
        ("--reset-attention-mask", {"data.mask_documents": True}),
        ("--profile --profile-step-start 4 --profile-step-end 6", {"observe.profile_steps": "4:5"}),
        ("--wandb-project x", {"observe.wandb": True}),
        ("--ddp-bucket-size 262144", {"comm.bucket_mb": 1.0}),
    ],
)
def test_flags_become_settings(flags: str, settings: dict[str, Any]) -> None:
    found = read(flags, 8)
    together = {**found.assumed, **found.stated}
    assert {key: together[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--num-layer 4", "did you mean '--num-layers'"),
        ("--tensor-parallel-size 4", "did you mean '--tensor-model-parallel-size'"),
        ("--hidden-size 64 --num-layers 2", "--num-attention-heads is missing"),
        (SHAPE.replace(" --vocab-size 1000", ""), "--vocab-size is missing"),
        (f"{SHAPE} --attention-dropout 0.1", "never dropped"),
        (f"{SHAPE} --multi-latent-attention", "does not build it"),
        (f"{SHAPE} --position-embedding-type yarn", "yarn is refused"),
        (f"{SHAPE} --squared-relu", "does not build it"),
        ("--lr-decay-style inverse-square-root", "is refused"),
        ("--lr-decay-style WSD", "add --lr-wsd-decay-style linear"),
        ("--optimizer muon", "muon is refused"),
        ("--ddp-bucket-size 0", "--ddp-bucket-size 0 must be a whole number from 1"),
        ("--rampup-batch-size 16 16 5859375", "train.batch_schedule"),
        ("--mock-data", "python-stdlib"),
        ("--data-path a b c", "WEIGHT PREFIX"),
        ("--split 0,1,0", "not three shares"),
        ("--split x,1", "not three shares"),
        ("--save a --load b", "model.from_hf"),
        ("--finetune", "model.from_hf"),
        ("--train-iters ten", "takes a number"),
        ("--train-iters 1.5", "takes a whole number"),
        ("--train-iters", "a value is missing"),
        ("--fp16 yes", "takes no value"),
        ("--fp16 --bf16", "says train.precision"),
        ("--seed 1 --seed 2", "given twice"),
        ("--data-path $DATA", "for a shell to fill in"),
        ("torchrun pretrain_gpt.py --seed 1", "begins with 'torchrun'"),
        ("--data-path 'a", "close the quotation"),
        ("--expert-tensor-parallel-size 2", "tp=1 splits experts"),
        ("--recompute-method block", "needs --recompute-granularity"),
        (f"--pipeline-model-parallel-size 2 {BLOCK} 1", "--recompute-method block computes 1 layers of every stage"),
        (
            f"{SHAPE} --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 1 {BLOCK} 1",
            "use --recompute-method uniform (all layers) or --recompute-granularity selective",
        ),
        (BLOCK.removesuffix(" --recompute-num-layers"), "--recompute-num-layers is missing"),
        ("--recompute-granularity selective --recompute-method uniform", "needs --recompute-granularity full"),
        ("--use-megatron-fsdp --use-torch-fsdp2", "two ways to shard"),
        (
            f"{SHAPE} --num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 1",
            "both say how many stages",
        ),
        ("--num-layers inf --hidden-size 64", "--num-layers inf: it takes a finite number"),
        ("--seed 1e400", "takes a finite number"),
        ("--lr nan", "takes a finite number"),
        ("--adam-eps -inf", "takes a finite number"),
        ("--hidden-size 1e300", "takes a whole number of 64 bits"),
        (f"{SHAPE} --make-vocab-size-divisible-by 0", "must be a whole number from 1"),
        (f"{SHAPE} --tensor-model-parallel-size 0", "is not a degree"),
        (f"{SHAPE} --pipeline-model-parallel-size 0 --num-layers-per-virtual-pipeline-stage 1", "is not a degree"),
        (f"{SHAPE} --num-experts 2 --moe-ffn-hidden-size 0", "must be a whole number from 1"),
        ("--lr-warmup-fraction 1e308 --train-iters 100", "is no share"),
        ("--data-path 1e400 a", "WEIGHT PREFIX"),
        (f"--split {'9' * 400},1,0", "not three shares"),
        ("--cp-comm-type a2a+p2p", "is refused"),
        ("--initial-loss-scale 1000", "no power of two"),
        ("--exit-duration-in-mins 5", "exit code 75"),
        ("--pipeline-model-parallel-layout Et*3|L", "layers=N+N"),
    ],
)
def test_mistake_and_what_is_not_done_are_refused_by_name(flags: str, word: str) -> None:
    assert word in refusal(flags)


def test_flag_with_a_wrong_value_is_not_told_to_be_missing() -> None:
    assert "--num-layers is missing" not in refusal(SHAPE.replace("--num-layers 4", "--num-layers inf"))


def test_batch_that_follows_from_ranks_that_nobody_knows_yet_is_refused() -> None:
    around = Around(RunConfig(), unknown=True)
    with pytest.raises(ConfigError, match="not known before they have met"):
        translate("--micro-batch-size 2", "flags", around)
    assert translate("--micro-batch-size 2 --global-batch-size 8", "flags", around).stated["train.global_batch"] == 8


def test_batch_counts_the_copies_that_the_flags_ask_for() -> None:
    flags = "--micro-batch-size 3 --use-distributed-optimizer --num-distributed-optimizer-instances 2"
    assert read(f"{flags} --tensor-model-parallel-size 2").assumed["train.global_batch"] == 6


def test_lines_go_on_after_a_backslash_and_quotes_hold_spaces() -> None:
    text = "--data-path 'my tokens' \\\n  --save a\\ b \\  \r\n\t--seed=3 # the end\n\n--lr 1e-3"
    stated = read(text).stated
    assert (stated["data.path"], stated["checkpoint.dir"]) == ("my tokens", "a b")
    assert (stated["run.seed"], stated["train.lr"]) == (3, 1e-3)


def test_shape_of_the_run_file_and_of_the_flags_are_not_mixed() -> None:
    assert "leave one out" in refusal(SHAPE, model={"preset": "tiny"})
    assert "model.spec.hidden_size" not in read("--lr 1e-3", model={"preset": "tiny"}).stated


@pytest.mark.parametrize(
    ("flags", "setting", "reason"),
    [
        ("--sgd-momentum 0.5", "train.beta1", "the optimizer is adam"),
        ("--optimizer sgd --adam-beta1 0.5", "train.beta1", "the optimizer is sgd"),
        ("--optimizer sgd --adam-beta2 0.5", "train.beta2", "the optimizer is sgd"),
        ("--optimizer sgd --adam-eps 0.5", "train.eps", "the optimizer is sgd"),
        (
            f"{SHAPE} --num-experts 2 --moe-ffn-hidden-size 8 --moe-router-load-balancing-type none "
            "--moe-aux-loss-coeff 0.5",
            "model.spec.experts.router_aux_loss_coef",
            "there is no such loss",
        ),
        ("--use-torch-fsdp2 --data-parallel-sharding-strategy optim_grads", "", "it is for --use-megatron-fsdp"),
        (f"{SHAPE} --moe-router-topk 1", "model.spec.experts.num_experts_per_tok", "--num-experts is not given"),
    ],
)
def test_flag_for_what_the_others_do_not_ask_for_does_not_apply(flags: str, setting: str, reason: str) -> None:
    found = read(flags)
    assert setting not in {**found.assumed, **found.stated}
    flag = flags.split()[-2]
    assert [(entry.verdict, reason in entry.note) for entry in found.entries if entry.key == flag] == [
        ("not applicable", True)
    ]


def test_strategy_of_the_command_line_settles_what_block_cannot_say() -> None:
    around = Around(RunConfig(), settled=True)
    found = translate(f"--pipeline-model-parallel-size 2 {BLOCK} 1", "flags", around)
    assert "recompute" not in found.words


def test_rules_have_distinct_flags() -> None:
    assert len({rule.key for rule in RULES}) == len(RULES)
    assert all(rule.key.startswith("--") and rule.ours for rule in RULES)
