"""What a compiled layer keeps for its backward pass is what the planner says: the compiler's partitioner is asked.

The backend is the one that takes a graph apart as inductor does, and runs the parts as they are; on cores attention
saves what flash attention saves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from meshwright.cluster.cluster import parse_cluster
from meshwright.estimate.kept import FLOAT32, Kept
from meshwright.models import stacked_experts
from meshwright.models.decoder import Decoder
from meshwright.models.presets import preset
from meshwright.models.rope import angles
from meshwright.models.spec import ModelSpec
from meshwright.parallel import compile
from meshwright.parallel.world import World
from meshwright.planning.layer_memory import kept_by_layer, layer_work
from meshwright.planning.question import Question
from meshwright.planning.scenario import Layout
from meshwright.verify.pool import RankPool

SAMPLES, LENGTH = 2, 272
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 320,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
}
GPT = {"norm": "layernorm", "activation": "gelu_tanh", "positions": "learned"}
BF16 = Kept("bf16", "float32")
CASES = [
    ({}, FLOAT32, "none"),
    ({}, FLOAT32, "selective"),
    ({}, FLOAT32, "budget:0.9"),
    ({}, FLOAT32, "budget:0.6"),
    ({"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1}, FLOAT32, "budget:0.3"),
    ({"intermediate_size": 1280, "hidden_size": 192}, FLOAT32, "none"),
    ({"qk_norm": True}, FLOAT32, "none"),
    (GPT, FLOAT32, "none"),
    (GPT, FLOAT32, "selective"),
    ({}, BF16, "none"),
    ({}, BF16, "selective"),
    ({}, BF16, "budget:0.5"),
    (GPT, FLOAT32, "budget:0.5"),
    ({"experts": "8 x 448"}, FLOAT32, "none"),
    ({"experts": "8 x 448"}, FLOAT32, "selective"),
]


def spec_of(changes: dict[str, Any]) -> ModelSpec:
    shape = SHAPE | changes
    if "experts" in changes:
        few = preset("tiny-moe").experts
        assert few is not None
        shape["experts"] = few.model_copy(update={"num_experts": 8, "moe_intermediate_size": 448})
    return ModelSpec(**shape)


def kept_bytes(_: World, spec: ModelSpec, stored: torch.dtype, recompute: str) -> int:
    """Bytes that a layer's forward pass saves, without the parameters themselves and the angles."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    # Of tests before this one.
    counters.clear()
    model = Decoder(spec).to(stored)
    block: nn.Module = model.model.layers["0"]
    compile.apply([block], recompute, backend="aot_eager_decomp_partition")
    x = torch.randn(SAMPLES, LENGTH, spec.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    rope = angles(spec, torch.arange(LENGTH)[None], torch.bfloat16) if spec.positions == "rope" else None
    known = {value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers(), *(rope or ()))}
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    real = stacked_experts.can_group
    # As on a GPU, where rows of experts are multiplied in groups.
    stacked_experts.can_group = lambda x, weight: True
    try:
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            y = block(x, rope)
    finally:
        stacked_experts.can_group = real
    assert not compile.breaks()
    y.sum().backward()
    return sum(tensor.untyped_storage().nbytes() for at, tensor in found.items() if at not in known)


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "kept", "recompute"), CASES)
def test_what_a_compiled_layer_keeps_is_planned(
    changes: dict[str, Any], kept: Kept, recompute: str, pool: RankPool
) -> None:
    spec = spec_of(changes)
    # On a rank: a compiler leaves threads behind, and where there are threads no rank is forked.
    (counted,) = pool.run(kept_bytes, 1, spec, torch.float32 if kept == FLOAT32 else torch.bfloat16, recompute)
    question = Question(spec, parse_cluster("1xh200"), LENGTH, SAMPLES, kept=kept)
    scenario = question.scenario(Layout(recompute=recompute), SAMPLES)
    sparse = spec.experts is not None
    planned = sum(kept_by_layer(scenario, layer_work(scenario, sparse), sparse, again=False))
    assert planned == pytest.approx(counted, rel=0.02)
