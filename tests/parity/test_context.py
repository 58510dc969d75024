"""Split sequences compute what whole ones do: ring, Ulysses and both, with every other axis and with odd lengths."""

from __future__ import annotations

import pytest
import torch
from benchmarks.context_parallel import MEMORY_BAR, WORK_BAR, compare

from meshwright.models.generate import generate
from meshwright.models.spec import ModelSpec
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.verify.parity import Case, Prover, batch_of, step_of
from meshwright.verify.pool import RankPool
from tests.parity.conftest import SPECS

# Few words, so that documents are short.
DOCUMENTS = {"data": {"mask_documents": True}}
SHORT_DOCUMENTS = SPECS["gqa"].model_copy(update={"vocab_size": 9})
SHAPES: dict[str, ModelSpec] = {
    **SPECS,
    "window": SPECS["gqa"].model_copy(update={"sliding_window": 5}),
    "documents": SHORT_DOCUMENTS,
    "window and documents": SHORT_DOCUMENTS.model_copy(update={"sliding_window": 5}),
}
RING, ULYSSES, BOTH = "", "cp_method=ulysses", "cp_method=ulysses:2"
FLOAT64 = [
    ("gqa", f"dp=1 cp=2 {RING}", 16),
    ("tied", f"dp=2 cp=2 {RING}", 13),
    ("gpt", f"dp=1 cp=4 {RING}", 18),
    ("few-kv", f"dp=2 zero=1 cp=2 {RING}", 18),
    ("experts", f"dp=1 cp=4 {RING}", 13),
    ("experts", f"dp=2 zero=2 cp=2 {RING}", 13),
    ("gqa", f"dp=4 zero=3 replicate=2 cp=2 wrap=block {RING}", 18),
    ("gqa", f"dp=1 zero=3 cp=2 tp=2 recompute=full {RING}", 16),
    ("gpt", f"dp=1 cp=2 tp=2 sp=off recompute=selective {RING}", 13),
    ("tied", f"dp=1 zero=1 cp=4 recompute=first:1 {RING}", 5),
    ("window", f"dp=1 cp=4 {RING}", 18),
    ("documents", f"dp=1 cp=4 {RING}", 18),
    ("window and documents", f"dp=1 zero=2 cp=2 recompute=selective {RING}", 13),
    ("gqa", f"dp=1 cp=2 {ULYSSES}", 13),
    ("gpt", f"dp=2 zero=3 cp=2 {ULYSSES}", 18),
    ("few-kv", f"dp=1 cp=4 {ULYSSES}", 18),
    ("experts", f"dp=1 zero=1 cp=2 tp=2 {ULYSSES}", 16),
    ("tied", f"dp=1 cp=2 tp=4 {ULYSSES}", 16),
    ("window and documents", f"dp=1 cp=4 recompute=selective {ULYSSES}", 13),
    ("gqa", f"dp=1 cp=4 {BOTH}", 18),
    ("few-kv", f"dp=1 zero=3 cp=4 recompute=full {BOTH}", 13),
    ("gpt", f"dp=1 cp=4 tp=2 {BOTH}", 16),
    ("window and documents", f"dp=2 zero=2 cp=4 {BOTH}", 18),
]
NARROW = [
    ("gqa", "dp=1 cp=4", "float32"),
    ("gpt", "dp=2 zero=2 cp=2 recompute=selective", "bf16"),
    ("window and documents", "dp=1 cp=2", "bf16"),
    ("few-kv", f"dp=1 zero=3 cp=4 {BOTH}", "bf16"),
]


def case_of(shape: str, strategy: str, tokens: int, precision: str = "float64") -> Case:
    ranks = Strategy.processes(strategy)
    assert ranks is not None
    settings = DOCUMENTS if "documents" in shape else {}
    return Case(SHAPES[shape], strategy, ranks, precision, tokens=tokens, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy", "tokens"), FLOAT64)
def test_float64_equals_one_process(shape: str, strategy: str, tokens: int, prover: Prover) -> None:
    assert prover.differences(case_of(shape, strategy, tokens)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "strategy", "precision"), NARROW)
def test_narrow_precision_equals_one_process(shape: str, strategy: str, precision: str, prover: Prover) -> None:
    assert prover.differences(case_of(shape, strategy, 18, precision)) == []


def test_windows_and_documents_matter_to_one_process(prover: Prover) -> None:
    masked = [prover.reference(case_of(shape, "dp=1 cp=2", 18)) for shape in ("documents", "window and documents")]
    open_ = prover.reference(Case(SHORT_DOCUMENTS, "dp=1 cp=2", 2, tokens=18))
    assert len({trace.losses[0] for trace in (*masked, open_)}) == 3


def evaluate_and_generate(world: World, case: Case) -> tuple[list[float], list[int]]:
    step = step_of(world, case)
    step.model.eval()
    rows = batch_of(case, 0, step.data_rank, step.strategy)["tokens"].flatten(0, 1)
    found = step.sum(step.evaluate(rows)).tolist()
    made = list(generate(step.model, [1, 2, 3], 6, temperature=0.0))
    again = step.sum(step.evaluate(rows)).tolist()
    step.parallel.reshard()
    assert found == pytest.approx(again, rel=1e-12), "generation leaves nothing behind"
    return found, made


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp=2 cp=2", "dp=1 zero=3 cp=4 cp_method=ulysses:2", "dp=1 cp=2 tp=2"])
def test_evaluation_and_generation_are_those_of_one_process(strategy: str, pool: RankPool) -> None:
    case = case_of("documents", strategy, 16)
    ((expected, continued),) = pool.run(evaluate_and_generate, 1, case_of("documents", "dp=1", 16))
    for found, made in pool.run(evaluate_and_generate, case.ranks, case):
        assert found == pytest.approx(expected, rel=1e-9)
        assert made == continued


def tokens_and_logits(world: World, case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    step = step_of(world, case)
    step.model.eval()
    tokens = torch.arange(case.tokens)[None]
    positions = tokens * 2
    with torch.no_grad():
        return step.parallel.own_tokens(tokens)[0], step.parallel(tokens, positions)[0], step.parallel(tokens)[0]


@pytest.mark.parametrize("method", [RING, ULYSSES, BOTH])
def test_each_rank_gives_the_logits_of_its_own_tokens_at_their_positions(method: str, pool: RankPool) -> None:
    ((_, spread, plain),) = pool.run(tokens_and_logits, 1, case_of("gpt", "dp=1", 18))
    parts = pool.run(tokens_and_logits, 4, case_of("gpt", f"dp=1 cp=4 {method}", 18))
    assert sorted(torch.cat([mine for mine, *_ in parts]).tolist()) == list(range(18))
    for mine, with_positions, without in parts:
        torch.testing.assert_close(with_positions, spread[mine], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(without, plain[mine], rtol=1e-9, atol=1e-9)


def too_short(world: World, case: Case) -> str:
    step = step_of(world, case)
    with pytest.raises(ValueError) as caught:
        step.parallel(torch.zeros(1, 3, dtype=torch.int64))
    return str(caught.value)


def test_a_sequence_that_is_too_short_for_all_ranks_is_refused_on_all_of_them(pool: RankPool) -> None:
    said = pool.run(too_short, 4, case_of("gqa", "dp=1 cp=4", 16))
    assert said == ["a sequence of 3 tokens leaves one of 4 ranks without; use 4"] * 4


@pytest.mark.slow
def test_a_quarter_of_the_tokens_takes_little_more_than_a_quarter_of_the_memory(pool: RankPool) -> None:
    _, found = compare(pool, 1024)
    assert found["ring"].memory <= MEMORY_BAR
    assert all(row.imbalance < WORK_BAR for row in found.values())
