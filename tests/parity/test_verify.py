"""`meshwright verify` finds planted mistakes and names the module in which each begins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from meshwright.cli.main import main
from meshwright.launch.local import may_fork
from meshwright.models import decoder
from meshwright.models.mixture import Mixture
from meshwright.parallel import data, experts, local_optimizer, parallelize
from meshwright.parallel.local_optimizer import LocalOptimizer
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.stages import SharedWeight
from meshwright.parallel.tensor import Axis
from meshwright.strategy import Strategy
from meshwright.verify.first_difference import Kind, Search
from meshwright.verify.parity import TOLERANCES
from meshwright.verify.pool import RankPool
from meshwright.verify.shrink import asked_strategy
from meshwright.verify.trial import Trial, run_trial
from tests.parity.conftest import SPECS

Found = dict[str, Any]


@pytest.fixture
def prove(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command here, so that ranks, which are forked, have what a test has planted."""
    assert may_fork("cpu"), "ranks would not inherit what is planted"

    def run(model: str, strategy: str, *options: str) -> tuple[int, Found]:
        code = main(["verify", "--model", model, "--parallel", strategy, "--json", "--steps", "2", *options])
        return code, json.loads(capsys.readouterr().out)

    return run


def first(found: tuple[int, Found], kind: str) -> Found:
    code, proof = found
    assert code == 1
    assert not proof["equal"]
    difference = proof["first_difference"]
    assert difference is not None, proof["verdict"]
    assert difference["kind"] == kind, proof["verdict"]
    return difference


def test_missing_sum_of_a_row_is_found_in_its_region(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    leave, calls = Axis.leave, []

    def forgetful(self: Axis, x: Tensor) -> Tensor:
        calls.append(1)
        # The second sum of a forward pass is that of the first attention.
        return x if len(calls) % 5 == 2 else leave(self, x)

    monkeypatch.setattr(Axis, "leave", forgetful)
    difference = first(prove("llama3.2-1b", "dp=1 tp=2 sp=off"), "output")
    assert difference["name"] == "model.layers.0.self_attn"
    assert (difference["rule"], difference["after"]) == ("region", "model.layers.0.self_attn.o_proj")


def test_wrong_divisor_of_summed_gradients_is_found(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrap = data.wrap_ddp
    monkeypatch.setattr(
        data,
        "wrap_ddp",
        lambda model, strategy, mesh, policy, reduction, travel: wrap(model, strategy, mesh, policy, "sum", travel),
    )
    difference = first(prove("qwen2.5-0.5b", "dp=2"), "parameter gradient")
    assert difference["factor"] == pytest.approx(2.0)
    assert difference["everywhere"]


@pytest.mark.slow
def test_wrong_divisor_of_sharded_gradients_is_found(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, _: None)
    monkeypatch.setattr(FSDPModule, "set_force_sum_reduction_for_comms", lambda self, _: None)
    difference = first(prove("llama3.2-1b", "dp=2 zero=3"), "parameter gradient")
    assert difference["factor"] == pytest.approx(0.5)
    assert difference["everywhere"]


def test_positions_of_another_rank_are_found_at_their_embedding(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Axis, "own_tokens", lambda self, x: x.chunk(self.size, dim=1)[self.rank - 1])
    difference = first(prove("gpt2", "dp=2 zero=1 tp=2"), "output")
    assert (difference["name"], difference["rule"]) == ("model.embed_positions", "lookup")


def swap_positions_of_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    angles = decoder.angles

    def swapped(spec: Any, positions: Tensor, dtype: Any) -> tuple[Tensor, Tensor]:
        if dist.is_initialized() and dist.get_rank() == 1:
            positions = positions.flip(1)
        return angles(spec, positions, dtype)

    monkeypatch.setattr(decoder, "angles", swapped)


def test_swapped_positions_of_a_split_sequence_are_found(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    swap_positions_of_rank_1(monkeypatch)
    difference = first(prove("qwen3-0.6b", "dp=1 cp=2"), "output")
    assert difference["name"].startswith("model.layers.0.self_attn")


def test_gradient_that_tied_stages_do_not_share_is_found(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedWeight, "sum_gradients", lambda self: None)
    difference = first(prove("llama3.2-1b", "dp=1 pp=2"), "parameter gradient")
    # One parameter under two names.
    assert difference["name"] in ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.slow
def test_gradient_that_is_lost_between_stages_is_found(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pass_on = Pipeline._pass_on

    def lossy(self: Pipeline, key: Any, value: Tensor, following: int, passing: Any) -> None:
        pass_on(self, key, value * 0 if key == ("backward", 1, 0) else value, following, passing)

    monkeypatch.setattr(Pipeline, "_pass_on", lossy)
    difference = first(prove("qwen2.5-0.5b", "dp=1 pp=2"), "output gradient")
    assert difference["name"].startswith("model.layers.0")


@pytest.mark.slow
def test_doubled_gradients_of_dealt_out_rows_are_found(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    back = experts._Exchange.backward
    doubled = staticmethod(lambda ctx, *gradients: back(ctx, *(gradient * 2 for gradient in gradients)))
    monkeypatch.setattr(experts._Exchange, "backward", doubled)
    difference = first(prove("mixtral-8x7b", "dp=2 ep=2"), "output gradient")
    assert difference["name"].startswith("model.layers.")


@pytest.mark.slow
def test_swapped_rotations_are_found_in_the_first_attention(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    swap_positions_of_rank_1(monkeypatch)
    difference = first(prove("qwen3-0.6b", "dp=1 tp=2"), "output")
    assert difference["name"] == "model.layers.0.self_attn.o_proj"
    assert difference["after"] == "model.layers.0.self_attn.k_norm"


def test_forgotten_sum_of_a_shared_norms_gradient_is_found(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Axis, "sum_gradient", lambda self, parameter: parameter)
    difference = first(prove("qwen3-0.6b", "dp=2 zero=1 tp=2"), "parameter gradient")
    assert (difference["name"], difference["rule"]) == ("model.layers.1.self_attn.k_norm.weight", "shared")


@pytest.mark.slow
def test_forgotten_sum_of_a_norm_between_regions_is_found(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Axis, "sum_gradient_of_tokens", lambda self, parameter: parameter)
    difference = first(prove("llama3.2-1b", "dp=1 tp=2 recompute=full"), "parameter gradient")
    assert (difference["name"], difference["rule"]) == ("model.norm.weight", "tokens")
    assert not difference["everywhere"]


@pytest.mark.slow
def test_missing_sum_going_backward_is_found(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Axis, "enter", lambda self, x: x)
    difference = first(prove("llama3.2-1b", "dp=1 tp=2 sp=off"), "output gradient")
    assert (difference["name"], difference["after"]) == ("model.norm", "the loss")


def test_wrong_weight_of_an_expert_is_found_in_its_mixture(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choose = Mixture._choose

    def wrong(self: Mixture, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights = choose(self, probabilities)
        return chosen, weights * 1.1 if dist.is_initialized() and dist.get_rank() == 1 else weights

    monkeypatch.setattr(Mixture, "_choose", wrong)
    difference = first(prove("mixtral-8x7b", "dp=2 zero=2"), "output")
    assert (difference["name"], difference["rank"]) == ("model.layers.0.mlp", 1)


@pytest.mark.slow
def test_wrong_norm_of_gradients_is_found(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.parallel import norm

    summed = norm._sum_of_squares
    monkeypatch.setattr(norm, "_sum_of_squares", lambda where, held, device: summed(None, held, device))
    first(prove("llama3.2-1b", "dp=2 zero=3"), "gradient norm")


@pytest.mark.slow
def test_lost_update_is_found_in_the_optimizer(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_optimizer, "_gather", lambda bucket: None)
    first(prove("llama3.2-1b", "dp=2 zero=1"), "update")


@pytest.mark.slow
def test_mistake_of_the_second_step_is_found_there(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gather, step = local_optimizer._gather, LocalOptimizer.step
    steps: dict[Any, int] = {}

    def counted(self: LocalOptimizer) -> None:
        steps[self] = steps.get(self, 0) + 1
        monkeypatch.setattr(local_optimizer, "_gather", gather if steps[self] != 2 else lambda bucket: None)
        step(self)

    monkeypatch.setattr(LocalOptimizer, "step", counted)
    assert first(prove("llama3.2-1b", "dp=2 zero=1", "--steps", "3"), "update")["step"] == 2


@pytest.mark.slow
def test_result_that_changes_from_run_to_run_is_told(
    prove: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    leave = Axis.leave

    def once_wrong(self: Axis, x: Tensor) -> Tensor:
        # On disk: the pool may replace its ranks between two runs.
        mark = tmp_path / str(self.rank)
        factor = 1.0 if mark.exists() else 1.5
        mark.touch()
        return leave(self, x) * factor

    monkeypatch.setattr(Axis, "leave", once_wrong)
    code, proof = prove("llama3.2-1b", "dp=1 tp=2")
    assert code == 1
    assert "changes from run to run" in proof["verdict"]


@pytest.mark.slow
def test_rounding_is_told_from_a_mistake(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOLERANCES, "float32", 1e-12)
    code, proof = prove("llama3.2-1b", "dp=1 tp=2", "--precision", "float32")
    assert code == 1
    assert "not equal in float32, equal in float64" in proof["verdict"]
    assert proof["first_difference"] is None


@pytest.mark.slow
def test_strategy_that_fails_is_not_equal(prove: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a planted failure")

    monkeypatch.setattr(parallelize.tensor, "apply", broken)
    code, proof = prove("llama3.2-1b", "dp=1 tp=2")
    assert code == 1
    assert "a planted failure" in proof["failure"]
    assert proof["first_difference"] is None


EQUAL = [
    ("gqa", "dp=2", set()),
    ("tied", "dp=2 zero=1 recompute=full", set()),
    ("gqa", "dp=4 zero=3 replicate=2", set()),
    ("few-kv", "dp=1 tp=2", set()),
    ("few-kv", "dp=2 zero=2 tp=2 sp=off recompute=selective", set()),
    ("gpt", "dp=2 zero=1 tp=2", {"model.embed_positions"}),
    ("gpt", "dp=1 tp=4", set()),
    ("experts", "dp=2 zero=3 tp=2", {"model.layers.1.mlp.experts", "model.layers.1.mlp.shared_experts"}),
    ("experts", "dp=2 recompute=first:1", {"model.layers.1.mlp.experts", "model.layers.1.mlp.shared_experts"}),
    ("gqa", "dp=2 zero=2 tp=2 shares=3+1", set()),
    ("tied", "dp=2 pp=2 shares=1+3", set()),
    ("tied", "dp=1 pp=2", set()),
    ("gqa", "dp=2 pp=2 tp=2 zero=2 schedule=zero-bubble", set()),
    ("gqa", "dp=1 cp=2", set()),
    ("gpt", "dp=1 cp=2 tp=2 cp_method=ulysses", set()),
    ("experts", "dp=2 ep=2", {"model.layers.1.mlp.experts", "model.layers.1.mlp.shared_experts"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "text", "passed_over"), EQUAL)
def test_every_module_of_an_equal_step_agrees(shape: str, text: str, passed_over: set[str], pool: RankPool) -> None:
    strategy = asked_strategy(text)[0]
    trial = Trial(SPECS[shape], strategy, "float64", 2, 8, 2, 16, trace_step=1)
    (one,) = pool.run(run_trial, 1, replace(trial, strategy=Strategy()))
    expected, found = one.trace, [record.trace for record in pool.run(run_trial, strategy.world, trial)]
    search = Search(expected, found, 1e-9)
    calls = list(expected.outputs)
    assert {call.micro_step for call in calls} == {0, 1}
    assert search.parameters(1) is None
    assert search.outputs(1, "output", calls, 1.0) is None
    backward = [call for call in reversed(calls) if call in expected.gradients]
    assert len(backward) == len(calls)
    factor = search.loss_factor(backward)
    assert search.outputs(1, "output gradient", backward, factor) is None
    kinds: tuple[Kind, ...] = ("output", "output gradient")
    missed = {call.module for call in calls for kind in kinds if search.departure(kind, call, 1.0, factor) is None}
    assert missed == passed_over
