"""The head's loss of a vocabulary that ranks have split, evenly or not, is that of whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshwright.cuts import part
from meshwright.models import logit_chunks
from meshwright.models.cross_entropy import IGNORED
from meshwright.models.head import Head, Targets, Vocabulary
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool

WIDTH, TOKENS = 6, 11


def problem(entries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(entries)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(entries, WIDTH, generator=generator, dtype=torch.float64) * 3
    bias = torch.randn(entries, generator=generator, dtype=torch.float64)
    targets = torch.randint(entries, (TOKENS,), generator=generator)
    # The first and the last entry of the vocabulary are wanted, and one token does not count.
    targets[:3] = torch.tensor([0, entries - 1, IGNORED])
    return x, weight, bias, targets


def own_share(world: World, entries: int, few: int) -> tuple[float, list[Tensor]]:
    """The loss that a rank sees, and gradients of what is its own; those of inputs are to be added up."""
    x, weight, bias, targets = problem(entries)
    mine = part(entries, world.size, world.rank)
    head = Head(WIDTH, mine.stop - mine.start, dtype=torch.float64)
    head.weight.data, head.bias.data = weight[mine].clone(), bias[mine].clone()
    x.requires_grad_()
    group = dist.group.WORLD if world.size > 1 else None
    weighed, vocabulary = Targets(targets, torch.tensor(0.5, dtype=torch.float64)), Vocabulary(mine.start, group)
    before = logit_chunks.FEWEST, logit_chunks.CHUNK_BYTES
    logit_chunks.FEWEST, logit_chunks.CHUNK_BYTES = few, 1
    try:
        loss = head(x, weighed, vocabulary)
    finally:
        # The ranks have other work to do.
        logit_chunks.FEWEST, logit_chunks.CHUNK_BYTES = before
    (2 * loss).backward()
    assert x.grad is not None
    assert head.weight.grad is not None
    assert head.bias.grad is not None
    return loss.item(), [x.grad, head.weight.grad, head.bias.grad]


@pytest.mark.parametrize("few", [4, 100], ids=["many chunks", "one chunk"])
@pytest.mark.parametrize(
    ("entries", "ranks"),
    [(12, 2), (13, 2), (12, 3), (13, 3), (2, 3)],
    ids=["even", "uneven", "even in three", "uneven in three", "a rank without entries"],
)
def test_a_split_vocabulary_gives_the_loss_and_gradients_of_a_whole_one(
    entries: int, ranks: int, few: int, pool: RankPool
) -> None:
    x, weight, bias, targets = (value.requires_grad_(value.is_floating_point()) for value in problem(entries))
    expected = 0.5 * F.cross_entropy(F.linear(x, weight, bias), targets, ignore_index=IGNORED, reduction="sum")
    x_grad, weight_grad, bias_grad = torch.autograd.grad(2 * expected, (x, weight, bias))
    found = pool.run(own_share, ranks, entries, few)
    for loss, _ in found:
        assert loss == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(sum(gradients[0] for _, gradients in found), x_grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([gradients[1] for _, gradients in found]), weight_grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([gradients[2] for _, gradients in found]), bias_grad, rtol=1e-10, atol=1e-12)
