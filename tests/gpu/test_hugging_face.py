"""Models of transformers on up to four ranks that share one GPU: stages, experts, tensor parallel, FSDP, in a loop of
one's own. What one rank computes.

Their code takes norms and rotations to float32 whatever the model's dtype is, so that sums in another order may move
a loss by some 1e-7 and, through AdamW, a weight by 1e-5.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM

import meshwright as mw
from meshwright.models.parts import whole
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool
from tests.parity.test_hugging_face_pipeline import Trace, assert_alike

SHAPE = {
    "vocab_size": 66, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2},
}
CASES = [
    ("qwen3", "dp=2"),
    ("qwen3", "dp=2 zero=3 recompute=full"),
    ("qwen3", "dp=1 tp=2"),
    ("qwen3", "dp=1 pp=2"),
    ("qwen3", "dp=2 pp=2 zero=2 schedule=interleaved:2"),
    ("mixtral", "dp=2 ep=2"),
    ("mixtral", "dp=2 zero=3 ep=2"),
    ("mixtral", "dp=1 tp=2"),
]


def loss_of(model: Any, ids_BT: Tensor) -> Tensor:
    logits = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.double().flatten(0, 1), ids_BT[:, 1:].flatten())


def train(world: World, family: str, strategy: str) -> Trace:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]})
    # Grouped products are of bf16 alone on a GPU.
    options = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **options).double().to(world.device)
    parallel = mw.parallelize(model, strategy)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-3)
    data = TensorDataset(torch.randint(66, (16, 13), generator=torch.Generator().manual_seed(1)))
    losses, norms = [], []
    for (ids_BT,) in DataLoader(data, batch_sampler=parallel.batch_sampler(data, 8)):
        losses.append(float(parallel.backward(loss_of, ids_BT.to(world.device), micro_steps=2)))
        norms.append(float(parallel.step(optimizer, clip=1.0)))
    parallel.reshard()
    return losses, norms, {name: whole(value.detach()).cpu() for name, value in parallel.named_parameters()}


@pytest.mark.parametrize(("family", "strategy"), CASES)
def test_family_trains_as_on_one_rank(family: str, strategy: str, pool: RankPool) -> None:
    (expected,) = pool.run(train, 1, family, "dp=1")
    assert_alike(pool.run(train, mw.Strategy.fewest_processes(strategy), family, strategy), expected)
