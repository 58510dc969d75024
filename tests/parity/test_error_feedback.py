"""What compression did not send is sent later: over some steps weights go where all gradients lead them.

With plain steps, without momentum, weights move by the sum of the gradients. What is kept and added to the next one
arrives in the end; what is dropped is missing, which a loss of a small model with AdamW does not show.
"""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from meshwright.comm.compressors import Bucket, Compressor
from meshwright.config import load_config
from meshwright.parallel.world import World
from meshwright.trainer import Trainer
from meshwright.verify.pool import RankPool
from tests.parity.test_compression import settings_of

PLAIN_STEPS = [
    "train.optimizer=sgd", "train.beta1=0", "train.grad_clip=0", "train.weight_decay=0", "train.lr=0.002",
    "train.schedule=constant", "train.steps=40", "train.precision=float64", "checkpoint.every=0",
    "observe.profile_every=0",
]  # fmt: skip


def moved(world: World, overrides: list[str], forgets: bool) -> Tensor:
    """How far all weights went; a rank that `forgets` drops what it has not sent."""

    def called(self: Compressor, bucket: Bucket) -> None:
        self.reduce(bucket)
        if forgets:
            self.forget()

    def weights() -> Tensor:
        return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.model.parameters()])

    with patch.object(Compressor, "__call__", called):
        trainer = Trainer(load_config(None, overrides), world)
        before = weights()
        trainer.train()
        return weights() - before


@pytest.fixture(scope="module")
def whole(pool: RankPool, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """The way of the weights with all gradients."""
    folder = tmp_path_factory.mktemp("whole")
    return pool.run(moved, 2, settings_of(folder, corpus, "dp=2", *PLAIN_STEPS), False)[0]


@pytest.mark.parametrize("kind", ["topk:0.2", "powersgd:4"])
def test_weights_go_where_all_gradients_lead_them(
    kind: str, whole: Tensor, pool: RankPool, corpus: Path, tmp_path: Path
) -> None:
    def off(forgets: bool) -> float:
        settings = settings_of(tmp_path / str(forgets), corpus, f"dp=2 compress={kind}", *PLAIN_STEPS)
        first, second = pool.run(moved, 2, settings, forgets)
        assert torch.equal(first, second)
        return float((first - whole).norm() / whole.norm())

    kept, dropped = off(False), off(True)
    print(f"{kind}: off by {kept:.3f}, and by {dropped:.3f} without what was not sent")
    assert kept < 0.06
    # Else this would show nothing.
    assert dropped > 4 * kept
