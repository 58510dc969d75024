"""Trainings from configurations of other trainers, on real ranks, against the same runs in our own settings."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from meshwright.config import load_config
from meshwright.strategy import Strategy
from tests.conftest import CommandLine
from tests.e2e.trainings import metrics
from tests.indexed_files import write_indexed

pytestmark = pytest.mark.slow

GPT = Path(__file__).parents[1] / "fixtures/megatron_gpt_175b.args"

OWN = [
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.optimizer=adamw",
    "train.lr=0.01",
    "train.beta1=0.9",
    "train.beta2=0.95",
    "train.eps=1e-8",
    "train.weight_decay=0.1",
    "train.schedule=linear",
    "train.schedule_steps=12",
    "train.warmup=log",
    "train.warmup_steps=3",
    "train.warmup_lr=0.001",
    "train.min_lr=0.001",
    "train.grad_clip=0.7",
    "train.precision=bf16",
    "parallel.strategy=dp=2 zero=2 offload=optimizer",
    "comm.bucket_mb=0.5",
]


def curve(run: Path) -> list[tuple[float, float, float]]:
    return [(line["loss"], line["grad_norm"], line["lr"]) for line in metrics(run)]


def test_ds_config_trains_as_the_same_run_in_our_settings_to_the_bit(
    meshwright: CommandLine, corpus: Path, tmp_path: Path
) -> None:
    content = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 3, "total_num_steps": 12},
        },
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 131072,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "gradient_clipping": 0.7,
        "steps_per_print": 2,
        "wall_clock_breakdown": True,
    }
    (tmp_path / "ds.json").write_text(json.dumps(content))
    model = ["model.preset=tiny", "model.spec.num_hidden_layers=2", f"data.path={corpus}", "data.sequence_length=32"]
    common = [*model, "train.steps=6", "train.eval_sequences=0", "train.deterministic=true"]
    theirs = meshwright("train", "--deepspeed", "ds.json", *common, "run.dir=a", "--nproc", 2)
    assert theirs.returncode == 0, theirs.stderr
    assert "parallel.strategy: zero=2" in theirs.stdout
    ours = meshwright("train", *common, *OWN, "run.dir=b")
    assert ours.returncode == 0, ours.stderr
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    assert len(curve(tmp_path / "a")) == 6
    first, second = (load_config(tmp_path / run / "config.toml") for run in "ab")
    assert first.identity() == second.identity()
    assert first.comm == second.comm
    assert Strategy.parse(first.parallel.strategy, 2) == Strategy.parse(second.parallel.strategy, 2)
    assert (first.observe.profile_every, first.observe.log_every) == (2, 2)


def test_explain_names_the_key_that_a_setting_comes_from(meshwright: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_clipping": 0.5}))
    shown = meshwright("train", "--deepspeed", "ds.json", "--preset", "demo", "--explain", "--nproc", 2, COLUMNS="200")
    assert shown.returncode == 0, shown.stderr
    assert "deepspeed: zero_optimization.stage" in shown.stdout
    assert "deepspeed: gradient_clipping" in shown.stdout


def test_sizes_that_do_not_fit_the_ranks_are_refused_before_anything_starts(
    meshwright: CommandLine, tmp_path: Path
) -> None:
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    (tmp_path / "ds.json").write_text(json.dumps(sizes))
    refused = meshwright("train", "--deepspeed", "ds.json", "--preset", "demo", "--nproc", 3)
    assert refused.returncode == 2
    assert "on 3 data-parallel ranks" in refused.stderr


def test_what_stage_3_gathers_ahead_is_how_the_run_is_wrapped(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 20_000, "stage3_param_persistence_threshold": 1e5}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    done = meshwright("train", "--deepspeed", "ds.json", *tiny_run, "run.dir=a", "--nproc", 2)
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "a")) == 6
    assert 'strategy = "zero=3 wrap=size:20000"' in (tmp_path / "a/config.toml").read_text()


def test_flags_of_a_large_gpt_train_shrunken_on_four_ranks(meshwright: CommandLine, tmp_path: Path) -> None:
    draw = random.Random(0)
    documents = [[[draw.randrange(60) for _ in range(draw.randrange(20, 200))]] for _ in range(60)]
    write_indexed(tmp_path / "tokens/my corpus_text_document", documents)
    (tmp_path / "gpt.args").write_text(GPT.read_text())
    shrunken = [
        "model.spec.num_hidden_layers=4",
        "model.spec.hidden_size=32",
        "model.spec.num_attention_heads=4",
        "model.spec.intermediate_size=64",
        "model.spec.vocab_size=64",
        "model.spec.max_position_embeddings=64",
        "data.sequence_length=32",
        "train.steps=4",
        "train.global_batch=8",
        "train.micro_batch=2",
        "train.warmup_steps=1",
        "train.lr=1e-2",
        "train.eval_sequences=8",
        "train.precision=float32",
        "parallel.strategy=zero=1 tp=2 pp=2 schedule=interleaved:2 recompute=full",
    ]
    done = meshwright("train", "--megatron-args", "gpt.args", *shrunken, "run.dir=a", timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    found = metrics(tmp_path / "a")
    assert len(found) == 4
    assert found[-1]["loss"] < found[0]["loss"]
    assert (tmp_path / "checkpoints/gpt").is_dir()
    assert "--num-layers" in done.stdout
    one = meshwright(
        *("train", "--megatron-args", "gpt.args", *shrunken[:-1], "parallel.strategy=zero=0", "run.dir=b"),
        "checkpoint.dir=checkpoints/one",
    )
    assert one.returncode == 0, one.stderr
    for here, there in zip(metrics(tmp_path / "b"), found, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-4)


def test_plan_of_the_flags_is_of_their_strategy_and_goes_back_into_flags(
    meshwright: CommandLine, tmp_path: Path
) -> None:
    asked = ("plan", "--megatron-args", str(GPT), "--cluster", "128x8xh100")
    shown = meshwright(*asked, "--emit", "megatron", "--out", "again.args")
    assert shown.returncode == 0, shown.stderr
    assert "--num-layers" in shown.stdout
    first = json.loads(meshwright(*asked, "--json").stdout)
    second = json.loads(meshwright("plan", "--megatron-args", "again.args", "--cluster", "128x8xh100", "--json").stdout)
    strategy = "dp=32 zero=1 tp=8 pp=4 schedule=interleaved:2 recompute=full"
    assert (first["best"]["strategy"], first["global_batch"], first["precision"]) == (strategy, 1536, "fp16")
    assert second["best"] == first["best"]
    assert "those of" in shown.stdout
    assert "--lr 6.0e-5\n" in (tmp_path / "again.args").read_text()
    assert meshwright(*asked, "--emit", "run", "--out", "run.toml").returncode == 0
    run = load_config(tmp_path / "run.toml")
    assert (run.train.lr, run.train.steps, run.train.schedule_steps) == (6e-5, 500_000, 430_000)
    assert (run.data.path, run.checkpoint.dir) == ("tokens/my corpus_text_document", "checkpoints/gpt")


@pytest.mark.parametrize(
    ("form", "file"),
    [("deepspeed", "ds_config.json"), ("accelerate", "accelerate.yaml"), ("torchtitan", "torchtitan.toml")],
)
def test_plan_writes_other_trainers_files(meshwright: CommandLine, tmp_path: Path, form: str, file: str) -> None:
    machines = ("--model", "llama3.1-8b", "--cluster", "16xh200", "--seq-len", "2048", "--global-batch", "64")
    done = meshwright("plan", *machines, "--strategy", "zero=3", "--emit", form)
    assert done.returncode == 0, done.stderr
    assert f"wrote {file}" in done.stdout
    assert ("--machine_rank 1 --main_process_ip HOST" in done.stdout) == (form == "accelerate")
    assert (tmp_path / file).stat().st_size > 200
    refused = meshwright("plan", *machines, "--strategy", "zero=1 tp=2 pp=2", "--emit", form, "--out", "x")
    assert refused.returncode == 2
    assert "cannot be written" in refused.stderr


def test_what_a_form_cannot_hold_is_not_searched_and_the_answer_says_so(
    meshwright: CommandLine, tmp_path: Path
) -> None:
    asked = ("plan", "--model", "llama3.1-70b", "--cluster", "64xh100", "--emit", "megatron")
    done = meshwright(*asked)
    assert done.returncode == 0, done.stderr
    assert "--emit megatron keeps the search to what its file can hold: zero=0 or 1" in done.stdout
    found = json.loads(meshwright(*asked, "--out", "again.args", "--json").stdout)
    assert found["emitted"]["limited"].startswith("--emit megatron keeps")
    assert "layers=even" in found["constraints"]
    assert found["best"]["strategy"] in (tmp_path / "megatron.args").read_text()
    assert (tmp_path / "again.args").read_text() == (tmp_path / "megatron.args").read_text()
    named = json.loads(meshwright(*asked, "--strategy", "zero=3 recompute=full", "--out", "x", "--json").stdout)
    assert named["emitted"]["limited"] is None


def test_names_of_others_are_told_as_ours(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> None:
    own = [one for one in tiny_run if not one.startswith(("train.lr=", "train.steps="))]
    options = [*own, "learning_rate=0.02", "parallel.strategy=tensor_parallel_size=2", "max_steps=2"]
    done = meshwright("train", *options, "run.dir=a")
    assert done.returncode == 0, done.stderr
    assert "note   learning_rate is train.lr here" in done.stdout
    assert "note   tensor_parallel_size=2 is tp=2 here" in done.stdout
    assert next(line["lr"] for line in metrics(tmp_path / "a")) == 0.02
    assert 'strategy = "tp=2"' in (tmp_path / "a/config.toml").read_text()
    planned = meshwright("plan", "--model", "llama3.2-1b", "--cluster", "8xh100", "tp_size<=2", "--json")
    assert "note   tp_size<=2 is tp<=2 here" in planned.stderr
    assert json.loads(planned.stdout)["constraints"] == ["tp<=2"]


def test_a_plan_s_own_strategy_counts_in_place_of_the_flags(meshwright: CommandLine, tmp_path: Path) -> None:
    shape = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
    split = "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block"
    rest = "--recompute-num-layers 1 --micro-batch-size 1 --global-batch-size 16 --vocab-size 999 --lr 1e-4"
    (tmp_path / "gpt.args").write_text(f"{shape} {split} {rest} --train-iters 10 --bf16")
    asked = ("plan", "--megatron-args", "gpt.args", "--cluster", "8xh100", "--json")
    assert "--recompute-method block computes 1 layers of every stage" in meshwright(*asked).stderr
    done = meshwright(*asked, "--strategy", "dp=4 pp=2 recompute=full")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["candidates"][0]["strategy"] == "dp=4 pp=2 recompute=full"
