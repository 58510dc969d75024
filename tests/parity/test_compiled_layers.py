"""What a compiled layer keeps for its backward pass is what the planner says: the compiler's partitioner is asked.

The backend is the one that takes a graph apart as inductor does, and runs the parts as they are; on cores attention
saves what flash attention saves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from meshwright.cluster.cluster import parse_cluster
from meshwright.estimate.kept import FLOAT32, Kept
from meshwright.models import stacked_experts
from meshwright.models.decoder import Decoder
from meshwright.models.parts import local_of
from meshwright.models.presets import preset
from meshwright.models.rope import angles
from meshwright.models.spec import ModelSpec
from meshwright.parallel import compile
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.precision import Precision
from meshwright.parallel.world import World
from meshwright.planning.layer_memory import kept_by_layer, layer_work
from meshwright.planning.question import Question
from meshwright.planning.scenario import Layout
from meshwright.strategy import Strategy
from meshwright.verify.pool import RankPool

BACKEND = "aot_eager_decomp_partition"
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
    start_counting()
    model = Decoder(spec).to(stored)
    compile.apply([model.model.layers["0"]], recompute, backend=BACKEND)
    found = saved_by(model)
    assert not compile.breaks()
    return found


def kept_by_rank(world: World, spec: ModelSpec, text: str) -> int:
    """The same of a layer whose experts are on several ranks; it falls into pieces where these send each other rows."""
    start_counting()
    strategy = Strategy.parse(text, world.size)
    model = Decoder(spec)
    real = compile.apply
    compile.apply = partial(real, backend=BACKEND)  # type: ignore[assignment]
    try:
        mesh, precision = make_mesh(strategy, "cpu"), Precision(param=torch.bfloat16)
        parallelize(model, strategy, mesh, precision=precision, reduction="sum", compiled=True)
    finally:
        compile.apply = real
    # Once for the shapes as they are, once for any number of rows.
    return [saved_by(model, world.rank + 10 * turn) for turn in range(3)][-1]


def start_counting() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    # Of tests before this one.
    counters.clear()


def saved_by(model: Decoder, seed: int = 0) -> int:
    """Bytes that are saved by the one layer of a model."""
    spec, block = model.spec, model.model.layers["0"]
    x = torch.randn(SAMPLES, LENGTH, spec.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16()
    x.requires_grad_()
    rope = angles(spec, torch.arange(LENGTH)[None], torch.bfloat16) if spec.positions == "rope" else None
    held = (local_of(value) for value in (*model.parameters(), *model.buffers(), *(rope or ())))
    known = {value.untyped_storage().data_ptr() for value in held}
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


@pytest.mark.slow
@pytest.mark.parametrize("text", ["dp=2 ep=2 zero=1", "dp=4 ep=4 zero=3"])
def test_what_a_compiled_layer_keeps_is_planned_where_ranks_share_the_experts(text: str, pool: RankPool) -> None:
    spec, count = spec_of({"experts": "8 x 448"}), Strategy.processes(text) or 1
    counted = pool.run(kept_by_rank, count, spec, text)
    question = Question(spec, parse_cluster(f"{count}xh200"), LENGTH, SAMPLES * count)
    # The mean of all ranks: together they have as many rows as without it.
    scenario = replace(question.scenario(Strategy.parse(text, count), SAMPLES), imbalance=1.0)
    planned = sum(kept_by_layer(scenario, layer_work(scenario, True), True, again=False))
    assert planned == pytest.approx(sum(counted) / count, rel=0.02)
