"""Ranks with unequal shares of every batch compute what one process computes: `shares=3+1`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.config import load_config
from meshwright.observe.ledger import account
from meshwright.strategy import Strategy
from meshwright.trainer import train
from meshwright.training.job import make_job
from meshwright.training.out_of_memory import micro_batch_of, next_micro_batch
from meshwright.training.step import TrainingStep
from meshwright.verify.parity import Case, Prover
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS
from tests.parity.test_matrix import ranks_of
from tests.parity.test_train import assert_same_run, lines

QUICK = [
    ("gqa", "dp=2 shares=3+1"),
    ("gpt", "dp=2 zero=2 wrap=block shares=1+3"),
    ("experts", "dp=2 zero=3 ep=2 wrap=block shares=3+1"),
    ("tied", "dp=2 zero=1 pp=2 shares=1+3"),
]
SLOW = [
    ("tied", "dp=2 zero=1 shares=3+1"),
    ("gqa", "dp=2 zero=3 wrap=block shares=3+1"),
    ("gqa", "dp=4 zero=3 replicate=2 shares=2+2+3+1"),
    ("gpt", "dp=4 zero=2 replicate=2 shares=1+3 recompute=full"),
    ("few-kv", "dp=2 tp=2 shares=3+1"),
    ("few-kv", "dp=2 zero=1 tp=2 sp=off shares=1+3 recompute=selective"),
    ("tied", "dp=2 zero=3 tp=2 offload=parameters shares=3+1"),
    ("gqa", "dp=2 cp=2 zero=2 shares=3+1"),
    ("gpt", "dp=2 cp=4 cp_method=ulysses:2 shares=1+3"),
    ("experts", "dp=2 shares=3+1"),
    ("experts", "dp=4 zero=1 ep=2 shares=5+1+1+1"),
    ("experts", "dp=4 zero=3 ep=4 tp=2 shares=3+1 recompute=full"),
    ("gqa", "dp=2 zero=2 pp=2 schedule=interleaved:2 shares=3+1"),
    ("tied", "dp=2 pp=2 zero=2 schedule=zbv shares=3+1"),
    ("experts", "dp=2 pp=2 tp=2 ep=2 schedule=1f1b layers=3+1 shares=1+3"),
    ("gqa", "dp=2 pp=2 cp=2 zero=3 shares=3+1"),
    ("gqa", "dp=3 zero=3 shares=3+4+1"),
]


def case_of(shape: str, strategy: str, batch: int = 16) -> Case:
    spec = SPECS[shape].model_copy(update={"num_hidden_layers": 4 if "pp=" in strategy else 2})
    return Case(spec, strategy, ranks_of(strategy), batch=batch, steps=4)


@pytest.mark.parametrize(("shape", "strategy"), QUICK)
def test_unequal_shares_equal_one_process(shape: str, strategy: str, prover: Prover) -> None:
    assert prover.differences(case_of(shape, strategy)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy"), SLOW)
def test_unequal_shares_equal_one_process_in_combinations(shape: str, strategy: str, prover: Prover) -> None:
    assert prover.differences(case_of(shape, strategy)) == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_unequal_shares_equal_one_process_in_narrow_precisions(precision: str, prover: Prover) -> None:
    case = Case(SPECS["gqa"], "dp=2 zero=2 shares=3+1", 2, precision)
    assert prover.differences(case) == []


def test_mean_of_each_ranks_mean_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other trainers do when ranks have different numbers of samples."""
    original = TrainingStep.__call__

    def mean_of_means(self: TrainingStep, step: int, batch: dict[str, Any], asked_to_stop: bool = False) -> Any:
        parts = self.strategy.data_shares
        self._loss_factor = self._loss_factor * self.strategy.all_shares / parts[self.data_rank] / self.strategy.dp
        return original(self, step, batch, asked_to_stop)

    monkeypatch.setattr(TrainingStep, "__call__", mean_of_means)
    with RankPool(2) as pool:
        found = Prover(pool).differences(case_of("gqa", "dp=2 shares=3+1"))
    assert any("gradient norm of step 1" in line for line in found)


def test_ranks_of_unequal_shares_agree_on_every_collective() -> None:
    """With torch's checks of what passes through process groups, which ends a disagreement in an error."""
    with RankPool(2, checked=True) as pool:
        assert Prover(pool).differences(case_of("gqa", "dp=2 zero=3 wrap=block shares=3+1", 8)) == []


def start(settings: list[str], folder: Path, ranks: int, *overrides: str) -> Path:
    fixed = ["train.precision=float64", "observe.tensorboard=false", "observe.ledger=true", "train.eval_every=3"]
    # One rank is this process, in which a profiler would leave a thread behind.
    fixed.append("observe.profile_every=0")
    train(load_config(None, [*settings, *fixed, *overrides, f"run.dir={folder}"]), ranks)
    return folder


def test_run_with_shares_evaluates_records_and_resumes_as_one_process_does(tiny_run: list[str], tmp_path: Path) -> None:
    """Equal and unequal shares, other numbers of ranks: the samples of a step are the same, and so is all else."""
    settings = [*tiny_run, "train.batch_schedule=8..16 over 3", "train.steps=5", "train.schedule=constant"]
    # Seven sequences for eight places: one rank's last share is short.
    settings += ["train.eval_sequences=7"]
    one = start(settings, tmp_path / "one", 1)
    unequal = ["train.micro_batch=1", "parallel.strategy=zero=3 shares=3+1"]
    start(settings, tmp_path / "many", 2, *unequal, "train.steps=2")
    start(settings, tmp_path / "many", 2, "train.steps=3", "parallel.strategy=zero=1")
    start(settings, tmp_path / "many", 4, "train.steps=4", "parallel.strategy=dp=2 pp=2 shares=1+3")
    many = start(settings, tmp_path / "many", 3, "parallel.strategy=zero=2 shares=1+2+1")
    assert_same_run(one, many)
    found = account(many / "ledger.jsonl")
    assert found.exact, found.problems
    assert found.steps == account(one / "ledger.jsonl").steps
    fed = [json.loads(line)["fed"] for line in (many / "ledger.jsonl").read_text().splitlines()]
    assert fed[0] == [[[0, 3], [4, 7]], [[3, 4], [7, 8]]]
    assert fed[-1] == [[[40, 44]], [[44, 52]], [[52, 56]]]


def test_ledger_would_tell_of_a_sample_that_shares_lose(
    tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Strategy.own_samples

    def forgetful(self: Strategy, data_rank: int, samples: int) -> slice:
        own = honest(self, data_rank, samples)
        return slice(own.start - 1, own.stop - 1) if data_rank else own

    monkeypatch.setattr(Strategy, "own_samples", forgetful)
    settings = [*tiny_run, "train.global_batch=8", "train.steps=2", "parallel.strategy=shares=3+1"]
    found = account(start(settings, tmp_path / "run", 2) / "ledger.jsonl")
    assert not found.exact
    assert found.lost
    assert found.repeated


def test_experts_of_unequal_shares_balance_as_on_one_process(tiny_run: list[str], tmp_path: Path) -> None:
    settings = [*tiny_run, "model.preset=tiny-moe", "train.global_batch=16", "train.steps=3"]
    settings += ["model.spec.experts.router_bias_update_rate=0.01"]
    one = start(settings, tmp_path / "one", 1, "train.micro_batch=8")
    strategy = "parallel.strategy=dp=2 ep=2 zero=2 shares=3+1"
    many = start(settings, tmp_path / "many", 2, "train.micro_batch=2", strategy)
    assert_same_run(one, many)
    assert [line["expert_load_max"] for line in lines(one)] == [line["expert_load_max"] for line in lines(many)]


@pytest.mark.parametrize(
    ("strategy", "notes"),
    [
        ("dp=2 zero=2 shares=3+1", []),
        ("dp=64 zero=3 shares=7+3", ["dp=64 is proved as dp=2", "shares=7+3 is proved as shares=2+1"]),
    ],
)
def test_verify_takes_unequal_shares(strategy: str, notes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "tiny", "--parallel", strategy, "--json", "--steps", "2"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert proof["equal"]
    assert [note for note in notes if note not in str(proof)] == []


OWN = """
import torch
from torch import nn

def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

def inputs(seed, samples):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 6, generator=draw), torch.randn(samples, 2, generator=draw)

def loss(model, inputs):
    x, y = inputs
    return ((model(x) - y) ** 2).mean()
"""


def test_loop_of_ones_own_weighs_its_mean_by_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "unequal.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    for strategy in ("dp=2 shares=3+1", "dp=2 zero=3 shares=1+2"):
        assert main(["verify", "--model", "unequal:build", "--parallel", strategy, "--json", "--steps", "2"]) == 0
    capsys.readouterr()


def test_memory_that_runs_out_halves_the_micro_batch_of_a_share(tiny_run: list[str], tmp_path: Path) -> None:
    settings = ["train.global_batch=16", "train.micro_batch=4", "parallel.strategy=shares=3+1"]
    config = load_config(None, [*tiny_run, *settings, f"run.dir={tmp_path / 'run'}"])
    job = make_job(config, 2)
    assert (micro_batch_of(config, job), next_micro_batch(config, job)) == (4, 2)
