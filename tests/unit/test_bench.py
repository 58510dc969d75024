"""`meshwright bench`: contenders do the same work, the floor counts what a step really does, troubles are told."""

from __future__ import annotations

import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from meshwright.bench import bare, ours
from meshwright.bench.clock import Clock
from meshwright.bench.contenders import CONTENDERS, Contender, Unable, chosen
from meshwright.bench.roofline import Ceilings, Work, lines
from meshwright.bench.table import Report, rows_of
from meshwright.bench.trial import Found, Trial
from meshwright.cli.main import main
from meshwright.config_load import load_config
from meshwright.errors import UserError
from meshwright.models.initialize import build
from meshwright.planning.blocks import forward_flops
from meshwright.planning.operations import ADAM_BYTES
from meshwright.training.loss import cross_entropy


def trial(*settings: str, contender: str = "meshwright", steps: int = 4) -> Trial:
    shape = ["model.preset=tiny", "model.spec.num_hidden_layers=2", "data.sequence_length=32", "train.global_batch=2"]
    common = ["run.device=cpu", "train.schedule=constant", "train.lr=3e-3", f"train.steps={steps}"]
    config = load_config(None, [*shape, *common, "parallel.strategy=dp=1", *settings])
    return Trial(contender, config, steps, 0)


def losses_of(module: object, asked: Trial) -> list[float]:
    clock = Clock(torch.device("cpu"), time.monotonic())
    facts = module.train(asked, clock)  # type: ignore[attr-defined]
    assert len(clock.step_ms()) == asked.total
    assert min(clock.step_ms()) > 0
    assert clock.first_step_s > 0
    assert clock.peak_bytes() > 1e6
    assert facts.parameters == sum(one.numel() for one in build(asked.spec).parameters())
    return clock.losses()


@pytest.mark.parametrize(
    ("precision", "recompute", "bound"),
    [("float32", "none", 1e-6), ("float32", "full", 1e-6), ("float32", "selective", 1e-6), ("bf16", "none", 2e-3)],
)
def test_bare_loop_trains_as_ours(precision: str, recompute: str, bound: float) -> None:
    asked = trial(f"train.precision={precision}", f"parallel.strategy=dp=1 recompute={recompute}")
    expected, found = losses_of(ours, asked), losses_of(bare, asked)
    assert found == pytest.approx(expected, rel=bound)
    assert len(set(found)) == len(found), "nothing was learned, or every step had the same tokens"


def test_bare_loop_shares_tied_weights() -> None:
    asked = trial("model.spec.tie_word_embeddings=true")
    assert losses_of(bare, asked) == pytest.approx(losses_of(ours, asked), rel=1e-6)


@pytest.mark.parametrize(
    "setting",
    ["model.spec.qk_norm=true", "model.spec.sliding_window=8", "train.optimizer=sgd", "train.precision=float64"],
)
def test_bare_loop_refuses_what_it_would_compute_differently(setting: str) -> None:
    with pytest.raises(Unable, match="bare loop"):
        bare.train(trial(setting), Clock(torch.device("cpu"), 0.0))


def test_products_and_attention_are_those_that_torch_counts() -> None:
    asked = trial()
    model = build(asked.spec)
    rows = torch.from_numpy(next(asked.batches()))
    # Attention as plain products, which the counter sees on a CPU too.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        cross_entropy(model(rows[:, :-1]), rows[:, 1:]).backward()
    counted = counter.get_flop_counts()["Global"]
    forward = forward_flops(asked.spec, asked.tokens, asked.length)
    work = Work.of(asked.spec, asked.tokens, asked.length, asked.config.train)
    assert work.products == 3 * forward.products == counted[torch.ops.aten.mm]
    assert 3 * forward.full_attention == counted[torch.ops.aten.bmm]
    assert work.full_model_flops == sum(counted.values())
    # Without a window, causal attention is the half.
    assert 2 * forward.attention == forward.full_attention


def test_fused_attention_is_counted_as_torch_counts_its_kernels() -> None:
    asked = trial()
    spec = asked.spec
    shape = (asked.micro_batch, spec.num_attention_heads, asked.length, spec.head_dim)
    both = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    work = Work.of(spec, asked.tokens, asked.length, asked.config.train)
    assert 2 * work.attention == spec.num_hidden_layers * both


def test_update_moves_what_the_planner_counts() -> None:
    asked = trial("train.precision=bf16", "train.grad_clip=0")
    work = Work.of(asked.spec, asked.tokens, asked.length, asked.config.train)
    count = sum(one.numel() for one in build(asked.spec).parameters())
    assert work.update_bytes == ADAM_BYTES * count
    clipped = Work.of(asked.spec, asked.tokens, asked.length, trial("train.precision=bf16").config.train)
    assert clipped.update_bytes == (ADAM_BYTES + 4) * count


def test_floor_is_computing_then_updating() -> None:
    work = Work(6e12, 2e12, 7e12, 8e12, 100e9, 150e9, 50e9, 10e9)
    ceilings = Ceilings(4e12, 300e9)
    assert work.floor_s(ceilings) == pytest.approx(3.0)
    assert any("3000.00 ms" in line for line in lines(work, ceilings, "bf16"))


def found(name: str, ms: float, micro_batch: int = 2, **more: object) -> Found:
    facts = {"step_ms": (ms, ms, ms), "losses": (5.0, 4.0), "first_step_s": 2.0, "peak_bytes": 2.0**30, "device": "cpu"}
    return Found(name, micro_batch, **(facts | more))  # type: ignore[arg-type]


def report(*those: Found, sizes: tuple[int, ...] = (2,), names: tuple[str, ...] = ("meshwright", "bare")) -> Report:
    trials = tuple(trial(f"train.global_batch={size}") for size in sizes)
    rows = rows_of(chosen(names), trials, those)
    return Report(trials, rows, "bare", Ceilings(1e12, 1e10))


def test_best_micro_batch_of_each_is_shown_and_compared() -> None:
    made = report(
        found("meshwright", 10.0, 2), found("meshwright", 16.0, 4), found("bare", 12.0, 2), found("bare", 30.0, 4),
        sizes=(2, 4),
    )  # fmt: skip
    assert made.as_json()["best"] == {"meshwright": 4, "bare": 2}
    ratios = {row.contender.name: made.ratio(row) for row in made.best()}
    assert ratios == pytest.approx({"meshwright": (4 / 16) / (2 / 12), "bare": 1.0})


def test_mfu_counts_attention_as_asked() -> None:
    made = report(found("bare", 10.0), names=("bare",))
    (row,) = made.best()
    work = made.work(2)
    assert made.mfu(row) == pytest.approx(work.model_flops / 0.01 / 1e12)
    full = Report(made.trials, made.rows, "bare", made.ceilings, full_attention=True)
    assert full.mfu(row) == pytest.approx(work.full_model_flops / 0.01 / 1e12)
    assert work.full_model_flops > work.model_flops


def test_cold_and_warm_starts_are_kept_apart() -> None:
    made = report(
        found("bare", 10.0, first_step_s=9.0), found("bare", 10.0, first_step_s=3.0, warm=True), names=("bare",)
    )
    (facts,) = made.as_json()["rows"]
    assert facts["first_step_s"] == {"cold": 9.0, "warm": 3.0}


def test_trouble_is_told_and_not_left_out() -> None:
    made = report(Found("meshwright", 2, failure="out of memory"), Found("bare", 2, refusal="cannot"))
    assert {row["contender"]: row["trouble"] for row in made.as_json()["rows"]} == {
        "meshwright": "failed: out of memory",
        "bare": "cannot",
    }
    assert made.reference() is None


def test_contender_whose_package_is_missing_says_so() -> None:
    assert Contender("x", "x", "", (("no_such_module", "nor_this"),)).missing() == (
        "not installed: no_such_module or nor_this"
    )
    assert CONTENDERS["bare"].missing() is None
    with pytest.raises(UserError, match="unknown contender 'bear'.*bare"):
        chosen(["bear"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "tiny", "--steps", "0"], "--steps=0"),
        (["--model", "tiny", "--micro-batch", "2,x"], "--micro-batch=2,x"),
        (["--model", "tiny", "--sequence", "100000"], "--sequence=100000"),
        (["--model", "tiny", "--contenders", "nobody"], "unknown contender 'nobody'"),
        (["--model", "tiny", "--baseline", "nobody"], "--baseline=nobody"),
        (["--model", "tiny", "train.nothing=1"], "train.nothing"),
        (["--model", "tiny", "run.toml"], "section.key=value"),
        (["--model", "tiny", "--variant", "fp8"], "--variant=fp8"),
        (["--model", "tiny", "--variant", "fp8:train.nothing=1"], "train.nothing"),
        (["--model", "tiny", "--variant", "a:train.lr=1", "--variant", "a:train.lr=2"], "a name of its own"),
        ([], "no model"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_model_of_transformers_starts_with_our_loss() -> None:
    pytest.importorskip("transformers")
    from meshwright.bench.hugging_face import causal_lm

    asked = trial()
    rows = torch.from_numpy(next(asked.batches()))
    model = causal_lm(asked, Clock(torch.device("cpu"), time.monotonic()))
    loss = model(rows[:, :-1], labels=rows[:, 1:], shift_labels=rows[:, 1:].contiguous()).loss
    assert float(loss.detach()) == pytest.approx(losses_of(ours, asked)[0], rel=1e-6)


def test_work_for_the_comparison_is_no_start_of_a_training() -> None:
    clock = Clock(torch.device("cpu"), time.monotonic())
    with clock.aside():
        time.sleep(0.3)
    clock.begin()
    clock.stepped(1.0)
    assert 0 < clock.first_step_s < 0.2
