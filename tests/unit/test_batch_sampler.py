"""The batch sampler: ranks together get one device's batches, in any number, from any position, nothing lost."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright as mw
from meshwright.errors import ConfigError, UserError
from meshwright.parallel.batch_sampler import BatchSampler, cut_evenly
from meshwright.strategy import Strategy

STRATEGIES = ["dp=1", "dp=2", "dp=3", "dp=4 zero=3", "dp=2 shares=3+1", "dp=2 tp=2", "dp=2 pp=2"]


def of_ranks(text: str, samples: int = 22, batch: int = 8, **options: object) -> list[BatchSampler]:
    strategy = Strategy.parse(text, Strategy.fewest_processes(text))
    return [BatchSampler(samples, batch, strategy, rank, **options) for rank in range(strategy.dp)]  # type: ignore[arg-type]


def epoch_of(samplers: list[BatchSampler]) -> list[list[int]]:
    """The samples of each step, of all ranks."""
    return [sorted(chain(*parts)) for parts in zip(*samplers, strict=True)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_together_get_the_batches_of_one_device(strategy: str, shuffle: bool) -> None:
    (one,), many = of_ranks("dp=1", shuffle=shuffle, seed=4), of_ranks(strategy, shuffle=shuffle, seed=4)
    for _ in range(2):
        batches = list(one)
        assert sorted(chain(*batches)) == list(range(22)), "an epoch has every sample once"
        assert epoch_of(many) == [sorted(batch) for batch in batches]


def test_order_changes_with_the_seed_and_from_epoch_to_epoch() -> None:
    (one,), (other,) = of_ranks("dp=1", shuffle=True, seed=4), of_ranks("dp=1", shuffle=True, seed=9)
    first = list(one)
    assert first != list(one)
    assert first != list(other)
    one.set_epoch(0)
    assert first == list(one)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("micro_steps", [1, 2, 3, 5])
@pytest.mark.parametrize("samples", [8, 6, 5])
def test_micro_batches_of_ranks_together_are_those_of_one_device(strategy: str, micro_steps: int, samples: int) -> None:
    parts: list[list[int]] = [[] for _ in range(micro_steps)]
    for sampler in of_ranks(strategy, samples=samples):
        (mine,) = list(sampler)
        cuts = sampler.cuts(0, len(mine), micro_steps)
        assert cuts is not None
        assert (cuts[0], cuts[-1]) == (0, len(mine))
        for index in range(micro_steps):
            parts[index] += mine[cuts[index] : cuts[index + 1]]
    expected = [list(range(first, end)) for first, end in pairwise(cut_evenly(samples, micro_steps))]
    assert [sorted(part) for part in parts] == expected


def test_batch_in_hand_that_is_no_batch_of_the_sampler_is_not_cut_by_it() -> None:
    (sampler,) = of_ranks("dp=1")
    assert sampler.cuts(0, 8, 2) is None, "nobody asks it for batches"
    next(iter(sampler))
    assert sampler.cuts(0, 5, 2) is None
    assert sampler.cuts(2, 6, 2) == [0, 3, 6]


def test_position_is_what_was_learned_from_not_what_was_fetched() -> None:
    data = TensorDataset(torch.arange(40.0)[:, None])
    parallel = mw.parallelize(nn.Linear(1, 1), "dp=1")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.0)

    def seen(sampler: BatchSampler, steps: int) -> list[int]:
        found: list[int] = []
        for (rows,) in DataLoader(data, batch_sampler=sampler, num_workers=2, prefetch_factor=2):
            parallel.backward(lambda model, x: model(x).mean(), rows, sampler=sampler)
            parallel.step(optimizer)
            found += rows.flatten().int().tolist()
            steps -= 1
            if not steps:
                break
        return found

    whole = list(parallel.batch_sampler(data, 4, shuffle=True, seed=1))
    sampler = parallel.batch_sampler(data, 4, shuffle=True, seed=1)
    assert seen(sampler, 3) == list(chain(*whole[:3]))
    state = sampler.state_dict()
    assert (state["epoch"], state["position"]) == (0, 12)
    again = parallel.batch_sampler(data, 4, shuffle=True, seed=1)
    again.load_state_dict(state)
    assert seen(again, 100) == list(chain(*whole[3:]))
    assert again.state_dict()["epoch"] == 1
    assert again.state_dict()["position"] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_goes_on_in_the_middle_of_an_epoch_on_other_ranks(strategy: str) -> None:
    (one,) = of_ranks("dp=1", shuffle=True)
    before, whole = list(one), list(one)
    assert before != whole
    one.set_epoch(1)
    next(iter(one))
    one.advance()
    many = of_ranks(strategy, shuffle=True)
    for sampler in many:
        sampler.load_state_dict(one.state_dict())
        sampler.set_epoch(1)
    assert epoch_of(many) == [sorted(batch) for batch in whole[1:]]
    assert epoch_of(many)[0] != sorted(whole[0]), "the epoch after it starts anew"


def test_another_data_set_does_not_go_on_from_a_state() -> None:
    (one,), (other,) = of_ranks("dp=1"), of_ranks("dp=1", samples=24)
    with pytest.raises(UserError, match="state is of length=22 and this one has length=24"):
        other.load_state_dict(one.state_dict())


def test_last_batch_may_be_left_out_where_that_is_said() -> None:
    (kept,), (dropped,) = of_ranks("dp=1"), of_ranks("dp=1", drop_last=True)
    assert (len(kept), len(dropped)) == (3, 2)
    assert sum(map(len, kept)) == 22
    assert sum(map(len, dropped)) == 16
    next(iter(dropped))
    dropped.advance(2)
    assert dropped.state_dict()["epoch"] == 2


@pytest.mark.parametrize(
    ("strategy", "samples", "batch", "options", "complaint"),
    [
        (
            "dp=2",
            17,
            8,
            {},
            "the last batch of an epoch has 1 of 17 samples, too few for dp=2 ranks; use drop_last=True",
        ),
        ("dp=4", 16, 3, {}, "batch_size=3 is that of the whole step and leaves some of the dp=4 ranks without"),
        ("dp=2 shares=3+1", 18, 8, {}, "or a batch_size that divides 18 or leaves at least 4"),
        ("dp=1", 4, 8, {"drop_last": True}, "leaves nothing of 4 samples"),
        ("dp=1", 0, 8, {}, "both must be at least 1"),
    ],
)
def test_batches_that_leave_a_rank_without_samples_are_refused(
    strategy: str, samples: int, batch: int, options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        of_ranks(strategy, samples, batch, **options)


def test_micro_steps_of_unlike_length_weigh_their_samples() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    rows = torch.randn(7, 3, dtype=torch.float64)

    def loss_of(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    loss_of(model, rows).backward()
    assert model.weight.grad is not None
    expected, model.weight.grad = model.weight.grad, None
    parallel = mw.parallelize(model, "dp=1")
    for micro_steps in (1, 2, 3, 9):
        model.zero_grad()
        assert float(parallel.backward(loss_of, rows, micro_steps=micro_steps)) == pytest.approx(
            loss_of(model, rows).item(), rel=1e-12
        )
        assert torch.allclose(model.weight.grad, expected, rtol=1e-12)
    with pytest.raises(UserError, match="all of its tensors must have the samples as their first dimension"):
        parallel.backward(loss_of, rows, torch.zeros(3))
    with pytest.raises(UserError, match=r"the loss must be one number.*got shape \[7, 1\]"):
        parallel.backward(lambda net, x: net(x), rows)
