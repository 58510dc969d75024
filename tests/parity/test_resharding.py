"""A checkpoint saved under one strategy is, loaded under any other, the same state bit for bit: weights and moments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from meshwright.axis_order import orders, short
from meshwright.checkpoint.checked import find_damage
from meshwright.checkpoint.format import Manifest, digest_of, read_manifest
from meshwright.checkpoint.pieces import bytes_of
from meshwright.checkpoint.place import LocalPlace
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.training_state import model_tensors, parts_of, restore
from meshwright.errors import ConfigError
from meshwright.models.parts import whole
from meshwright.models.spec import Experts, ModelSpec
from meshwright.parallel.local_optimizer import LocalOptimizer
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.training.step import TrainingStep
from meshwright.verify.parity import Case, batch_of, step_of
from meshwright.verify.pool import RankPool
from tests.parity.fuzz import Draw, models, strategies

SMALL = ModelSpec(
    vocab_size=19,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
SPARSE = SMALL.model_copy(
    update={
        "tie_word_embeddings": False,
        "experts": Experts(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, router_bias_update_rate=0.01
        ),
    }
)


def digests(step: TrainingStep) -> dict[str, str]:
    """Of the whole tensors that this rank has a part of; every rank asks for them in the same order."""
    tensors = {f"model.{name}": tensor for name, tensor in model_tensors(step.model).items()}
    for name, parameter in step.model.named_parameters():
        optimizer = step.optimizer
        state = optimizer.state_of(parameter) if isinstance(optimizer, LocalOptimizer) else optimizer.state[parameter]
        tensors |= {f"optimizer.{kind}.{name}": value for kind, value in state.items()}
    return {name: digest_of(bytes_of(whole(tensor.detach()).cpu().contiguous())) for name, tensor in tensors.items()}


def saved(world: World, case: Case, folder: Path, background: bool) -> dict[str, str]:
    step = step_of(world, case)
    for number in range(2):
        step(number, batch_of(case, number, step.data_rank, step.strategy))
    facts = Manifest(step=2, position=0, strategy=case.strategy, model=case.spec, tensors={})
    saver = Saver(LocalPlace(folder), world.side_channel(), Retention())
    saver.save(facts, parts_of(step.model, step.optimizer), background=background)
    found = digests(step)
    saver.wait()
    (outcome,) = saver.outcomes()
    assert outcome.error is None, outcome.error
    assert not outcome.damage
    if world.is_first:
        # What was asked of the disk before anything was written.
        assert outcome.nbytes == read_manifest(folder / "step-000002").nbytes
    return found


def loaded(world: World, case: Case, folder: Path) -> dict[str, str]:
    step = step_of(world, case)
    restore(CheckpointReader(folder / "step-000002"), step.model, step.optimizer)
    return digests(step)


def together(found: list[dict[str, str]]) -> dict[str, str]:
    """What the ranks say, which must not contradict each other."""
    merged: dict[str, str] = {}
    for one in found:
        for name, digest in one.items():
            assert merged.setdefault(name, digest) == digest, f"{name} differs between ranks"
    return merged


def carry_over(pool: RankPool, folder: Path, one: Case, other: Case, background: bool = False) -> None:
    """Save under one case's strategy, load under the other's."""
    before = together(pool.run(saved, one.ranks, one, folder, background))
    after = together(pool.run(loaded, other.ranks, other, folder))
    assert find_damage(LocalPlace(folder / "step-000002")) == []
    assert before == after, sorted(name for name in before | after if before.get(name) != after.get(name))[:5]


def copies_round_alike(spec: ModelSpec, strategy: Strategy) -> bool:
    """Whether what tensor-parallel ranks hold alike is equal to the last bit.

    Sharded gradients are summed in buffers of a whole unit, in an order that follows from their place there; where
    ranks have unequal parts of matrices, a norm lies in different places, and its sums may differ by a rounding.
    """
    if strategy.zero < 2 or strategy.tp == 1:
        return True
    widths = [spec.vocab_size, spec.intermediate_size, spec.num_attention_heads, spec.num_key_value_heads]
    widths += [spec.experts.moe_intermediate_size] if spec.experts is not None else []
    return all(width % strategy.tp == 0 for width in widths)


@st.composite
def pairs(draw: Draw) -> tuple[Case, Case]:
    """A model and two strategies that take it."""
    first = draw(strategies())
    spec = draw(models(first))
    others = [draw(strategies()) for _ in range(4)]
    found = []
    for strategy in (first, *others, Strategy()):
        try:
            strategy.check(spec, strategy.world, 8)
        except ConfigError:
            continue
        if copies_round_alike(spec, strategy):
            found.append(strategy)
    assume(first in found)
    one, *rest = found
    cases = [
        Case(spec, str(strategy), strategy.world, micro_steps=2, batch=2 * strategy.all_shares, tokens=8, steps=2)
        for strategy in (one, rest[0])
    ]
    return (cases[0], cases[1]) if draw(st.booleans()) else (cases[1], cases[0])


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(pair=pairs(), background=st.booleans())
def test_state_survives_random_changes_of_strategy(
    pair: tuple[Case, Case], background: bool, pool: RankPool, tmp_path_factory: Any
) -> None:
    carry_over(pool, tmp_path_factory.mktemp("checkpoints"), *pair, background)


CHAIN = [
    ("dp=4", 4),
    ("tp=2 dp=2 zero=1", 4),
    ("pp=2 dp=2 zero=3", 4),
    ("zero=3", 3),
    ("pp=2 schedule=interleaved:2 tp=2", 4),
    ("replicate=2 shard=2 zero=2", 4),
    ("cp=2 zero=1", 4),
    ("dp=1", 1),
    ("pp=2 schedule=zbv dp=2", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SMALL, SPARSE], ids=["dense", "experts"])
def test_state_survives_a_chain_of_strategies(pool: RankPool, tmp_path: Path, spec: ModelSpec) -> None:
    chain = [*CHAIN, ("dp=4 ep=4 zero=1", 4), ("dp=4 ep=2 zero=3", 4)] if spec is SPARSE else CHAIN
    base = Case(spec, "dp=1", 1, micro_steps=2, batch=24, tokens=8, steps=2)
    cases = [replace(base, strategy=str(Strategy.parse(text, ranks)), ranks=ranks) for text, ranks in chain]
    for number, (one, other) in enumerate(zip(cases, cases[1:], strict=False)):
        folder = tmp_path / str(number)
        folder.mkdir()
        carry_over(pool, folder, one, other, background=number % 2 == 0)


@pytest.mark.parametrize("text", ["dp=2 zero=3 tp=2", "dp=2 zero=1 pp=2", "cp=2 tp=2"])
def test_state_survives_another_order_of_axes(text: str, pool: RankPool, tmp_path: Path) -> None:
    case = Case(SMALL, text, 4, micro_steps=2, batch=8, tokens=8, steps=2)
    others = orders(Strategy.parse(text, 4))[1:]
    for order in others:
        turned = replace(case, settings={"parallel": {"placement": short(order, Strategy.parse(text, 4))}})
        for one, other in ((case, turned), (turned, case)):
            folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            carry_over(pool, folder, one, other)


@pytest.mark.slow
def test_each_piece_is_written_once_and_the_work_is_shared(pool: RankPool, tmp_path: Path) -> None:
    case = Case(SMALL, "dp=4", 4, micro_steps=1, batch=8, tokens=8, steps=2)
    pool.run(saved, 4, case, tmp_path, False)
    manifest = read_manifest(tmp_path / "step-000002")
    assert len(manifest.files) == 8
    sizes = [0] * 4
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            sizes[int(piece.file.split("-")[1][:5])] += entry.nbytes
    assert sum(sizes) == manifest.nbytes
    assert max(sizes) < 1.3 * min(sizes)
