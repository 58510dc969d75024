"""Compiled layers: all of a kind share one graph, in one piece, and compute what they compute uncompiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.errors import ConfigError
from meshwright.models.head import Targets
from meshwright.models.initialize import build
from meshwright.models.reads import around_forward, read_through
from meshwright.parallel import compile
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.precision import Precision
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.training.compiled import TellBreaks
from meshwright.verify.parity import Case, run_case, step_of
from tests.unit.specs import SPECS, small

CPU = torch.device("cpu")
LAYERS = 4
BF16 = Precision(param=torch.bfloat16)


@pytest.fixture(autouse=True)
def counted() -> Iterator[dict[str, Any]]:
    """A compiler that has compiled nothing yet, and its counters."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()
    counters.clear()


def graphs(counters: dict[str, Any]) -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that takes graphs as the real one does, and runs them as they are."""
    real = compile._compiled.__wrapped__
    monkeypatch.setattr(compile, "_compiled", lambda forward, _: real(forward, "aot_eager"))


def loss_and_gradients(model: Any, seed: int = 1) -> tuple[float, dict[str, Tensor]]:
    tokens = torch.randint(37, (2, 12), generator=torch.Generator().manual_seed(seed))
    targets = Targets(tokens.roll(-1, dims=1), torch.tensor(1 / 24))
    loss = model(tokens, samples_B=torch.arange(2), targets=targets)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    # A gradient that is zero but for rounding, as that of a key's bias, is compared with the others.
    least = 1e-2 * max(gradient.norm() for gradient in expected.values())
    for name, gradient in expected.items():
        distance = (found[name] - gradient).norm() / gradient.norm().clamp(min=least)
        assert distance < relative, f"{name} differs by {distance:.1e}"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", ["plain", "qk norm", "all biases", "gpt2-like", "wide heads"])
@pytest.mark.parametrize("precision", [None, BF16], ids=["float32", "bf16"])
def test_layers_share_one_graph_in_one_piece_and_compute_the_same(
    name: str, precision: Precision | None, counted: dict[str, Any]
) -> None:
    spec = SPECS[name].model_copy(update={"num_hidden_layers": LAYERS})
    plain = parallelize(build(spec, seed=1), "dp=1", precision=precision)
    compiled = parallelize(build(spec, seed=1), "dp=1", precision=precision, compiled=True)
    expected, gradients = loss_and_gradients(plain)
    found, ours = loss_and_gradients(compiled)
    # A number that differs from layer to layer, as that of a dropout, costs a second one, not one for each.
    assert graphs(counted) == (2 if spec.dropout else 1)
    assert compile.breaks() == {}
    assert found == pytest.approx(expected, rel=1e-2 if precision else 1e-5)
    assert_close(ours, gradients, 5e-2 if precision else 1e-4)


@pytest.mark.usefixtures("quick")
def test_layers_with_wrappers_and_reads_inside_share_one_graph(counted: dict[str, Any]) -> None:
    def doubled(weight: Tensor) -> Tensor:
        return weight * 2

    def region(forward: Any, x: Tensor, *rest: Any) -> Tensor:
        return forward(x * 0.5, *rest)

    losses = []
    for compiled in (False, True):
        model = build(small(num_hidden_layers=LAYERS), seed=1)
        for layer in model.model.layers.values():
            read_through(layer.mlp.up_proj, "weight", doubled)
            around_forward(layer.mlp, region)
        losses.append(loss_and_gradients(parallelize(model, "dp=1", precision=BF16, compiled=compiled))[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert graphs(counted) == 1
    assert compile.breaks() == {}


@pytest.mark.usefixtures("quick")
def test_a_layer_that_has_a_wrapper_already_keeps_it_and_shares_the_graph(counted: dict[str, Any]) -> None:
    def twice(forward: Any, x: Tensor, *rest: Any) -> Tensor:
        return 2 * forward(x, *rest)

    losses = []
    for compiled in (False, True):
        model = build(small(num_hidden_layers=LAYERS), seed=1)
        for layer in model.model.layers.values():
            around_forward(layer, twice)
        losses.append(loss_and_gradients(parallelize(model, "dp=1", compiled=compiled))[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert graphs(counted) == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_layer_with_a_forward_pass_of_its_own_keeps_it(wrapped: bool) -> None:
    def twice(forward: Any, x: Tensor, *rest: Any) -> Tensor:
        return 2 * forward(x, *rest)

    losses = []
    for compiled in (False, True):
        model = build(small(), seed=1)
        for layer in model.model.layers.values():
            layer.forward = partial(twice, layer.forward)
            if wrapped:
                around_forward(layer, twice)
        losses.append(loss_and_gradients(parallelize(model, "dp=1", compiled=compiled))[0])
    plain, _ = loss_and_gradients(parallelize(build(small(), seed=1), "dp=1"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1] != pytest.approx(plain, rel=1e-5)


@pytest.mark.usefixtures("quick")
def test_what_the_compiler_cannot_take_in_one_piece_is_named() -> None:
    model = parallelize(build(SPECS["experts"], seed=1), "dp=1", compiled=True)
    plain = parallelize(build(SPECS["experts"], seed=1), "dp=1")
    found, ours = loss_and_gradients(model)
    expected, gradients = loss_and_gradients(plain)
    assert found == pytest.approx(expected, rel=1e-5)
    assert_close(ours, gradients, 1e-4)
    # The loop over experts, which a CPU has in place of grouped products, waits for counts.
    assert any("ata" in reason and ": aten." in reason for reason in compile.breaks()), compile.breaks()


def test_what_is_no_longer_compiled_is_told_when_it_comes_to_that() -> None:
    """Compiled for a word of each length, until the compiler has had enough of it."""
    told: list[dict[str, Any]] = []
    folder = SimpleNamespace(event=lambda name, **fields: told.append(fields))
    trainer: Any = SimpleNamespace(
        one_step=SimpleNamespace(compiled=True), breaks={}, world=World(), job=SimpleNamespace(folder=folder), step=1
    )
    hook = TellBreaks()
    compiled = torch.compile(lambda x, word: x + len(word), backend="eager")
    for trainer.step in range(1, 13):
        compiled(torch.ones(1), "a" * trainer.step)
        hook.after_step(trainer, {"step_s": 1.0})
    assert [event["step"] for event in told] == [1, torch._dynamo.config.recompile_limit + 1]
    assert told[0]["breaks"] == {}
    assert any("limit" in reason for reason in told[1]["breaks"]), told


@pytest.mark.usefixtures("quick")
def test_evaluation_of_any_length_compiles_nothing(counted: dict[str, Any]) -> None:
    model = parallelize(build(small(), seed=1), "dp=1", compiled=True)
    with torch.no_grad():
        for length in (3, 5, 8):
            model(torch.zeros(1, length, dtype=torch.long))
    assert graphs(counted) == 0


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_schedules_that_take_backward_passes_apart_are_refused_or_run_uncompiled(schedule: str) -> None:
    strategy = Strategy.parse(f"pp=2 schedule={schedule}", 2)
    with pytest.raises(ConfigError, match=f"schedule={schedule} takes backward passes apart.*train.compile=auto"):
        compile.compiles("on", strategy, CPU)
    assert not compile.compiles("auto", strategy, torch.device("cuda"))
    assert not compile.compiles("off", strategy, torch.device("cuda"))


def test_auto_compiles_on_a_gpu() -> None:
    strategy = Strategy.parse("dp=1", 1)
    assert compile.compiles("auto", strategy, torch.device("cuda"))
    assert not compile.compiles("auto", strategy, CPU)
    assert compile.compiles("on", strategy, CPU)


def test_a_budget_without_compiled_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="recompute=budget:0.5 is for compiled layers: set train.compile=on"):
        parallelize(build(small(), seed=1), "dp=1 recompute=budget:0.5")
    case = Case(small(), "dp=1 recompute=budget:0.5", 1, "float32", settings={"train": {"compile": "off"}})
    with pytest.raises(ConfigError, match="train.compile=on"):
        step_of(World(device=CPU), case)


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """How many bytes the graph keeps for its backward pass, parameters left out."""

    def __init__(self, model: Any) -> None:
        self.bytes = 0
        own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        seen: set[int] = set()

        def pack(value: Tensor) -> Tensor:
            place = value.untyped_storage().data_ptr()
            if place not in own and place not in seen:
                seen.add(place)
                self.bytes += value.untyped_storage().nbytes()
            return value

        super().__init__(pack, lambda value: value)


@pytest.mark.slow
def test_recompute_gives_the_same_gradients_from_ever_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Takes graphs apart as inductor does, which is what this is about, and makes no kernels of them.
    real = compile._compiled
    monkeypatch.setattr(compile, "_compiled", lambda forward, _: real(forward, "aot_eager_decomp_partition"))
    spec = small(num_hidden_layers=2, hidden_size=64, intermediate_size=256, num_attention_heads=4)
    expected, gradients = loss_and_gradients(parallelize(build(spec, seed=1), "dp=1"))
    kept = []
    for recompute in ("none", "selective", "budget:0.3", "full"):
        model = parallelize(build(spec, seed=1), f"dp=1 recompute={recompute}", compiled=True)
        saved = Saved(model)
        with saved:
            found, ours = loss_and_gradients(model)
        assert found == pytest.approx(expected, rel=1e-5)
        assert_close(ours, gradients, 1e-4)
        kept.append(saved.bytes)
    assert kept == sorted(set(kept), reverse=True), kept
    assert kept[-1] < kept[0] / 2, kept


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "bound"), [("plain", "bf16", 1e-2), ("gpt2-like", "float32", 1e-5)])
def test_steps_with_the_real_compiler_give_the_losses_without(name: str, precision: str, bound: float) -> None:
    traces = [
        run_case(World(device=CPU), Case(SPECS[name], "auto", 1, precision, settings={"train": {"compile": setting}}))
        for setting in ("on", "off")
    ]
    assert traces[0].losses == pytest.approx(traces[1].losses, rel=bound)
    assert traces[0].norms == pytest.approx(traces[1].norms, rel=10 * bound)
