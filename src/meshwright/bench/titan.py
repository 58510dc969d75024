"""TorchTitan: its own Trainer at one GPU, as its users start it with torch.compile, on random tokens.

At one GPU it shards nothing and computes under autocast. It runs with its per-block compilation and compiled loss, its
optimizer container and schedule, its clipping, its garbage collection and its metrics every ten steps. In place of its
tokenizer and dataset stands a loader of random tokens; there are no checkpoints and no TensorBoard. Dense shapes run as
its llama3; shapes with experts, norms of queries and keys, tied weights or heads of another size as its qwen3.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from meshwright.bench.clock import Clock
from meshwright.bench.contenders import Unable
from meshwright.bench.trial import Facts, Trial
from meshwright.models.spec import ModelSpec
from meshwright.strategy import Strategy

PRECISIONS = {"bf16": "bfloat16", "float32": "float32"}
NOTES = ("random tokens in place of its tokenizer and dataset; no checkpoints, no TensorBoard",)


def train(trial: Trial, clock: Clock) -> Facts:
    """Train with its Trainer."""
    if clock.device.type != "cuda":
        raise Unable("TorchTitan's Trainer needs a GPU")
    _stand_in_for_datasets()
    with tempfile.TemporaryDirectory(prefix="meshwright-titan-") as folder:
        return _train(trial, clock, folder)


def _train(trial: Trial, clock: Clock, folder: str) -> Facts:
    import torchtitan.train
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.protocols.train_spec import register_train_spec

    logging.getLogger().setLevel(logging.WARNING)

    class RandomTokens(BaseDataLoader):
        """The trial's batches in the form of its loaders."""

        def __init__(self, **_: Any) -> None:
            self.batches = [torch.from_numpy(tokens) for tokens in trial.batches()]

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            for rows in self.batches:
                yield {"input": rows[:, :-1].contiguous()}, rows[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    package, shape = _shape(trial.spec)
    register_train_spec(
        "bench",
        replace(
            package.get_train_spec(),
            model_args={"bench": shape},
            build_dataloader_fn=RandomTokens,
            build_tokenizer_fn=None,
            build_validator_fn=None,
            state_dict_adapter=None,
        ),
    )

    class Timed(torchtitan.train.Trainer):
        """Tells the clock after each step."""

        def forward_backward_step(self, **inputs: Any) -> Tensor:
            self.latest: Tensor = super().forward_backward_step(**inputs)
            return self.latest

        def train_step(self, data_iterator: Iterator[Any]) -> None:
            super().train_step(data_iterator)
            clock.stepped(self.latest)

    trainer = Timed(_job(trial, clock.device.type, folder))
    parameters = sum(one.numel() for part in trainer.model_parts for one in part.parameters())
    clock.begin()
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
    return Facts(parameters, NOTES)


def _job(trial: Trial, device_type: str, folder: str) -> Any:
    """Its configuration for the trial."""
    from torchtitan.config import JobConfig

    settings, recompute = trial.config.train, Strategy.parse(trial.config.parallel.strategy, 1).recompute
    if settings.precision not in PRECISIONS or settings.optimizer != "adamw" or recompute.startswith("first"):
        raise Unable("TorchTitan runs here in bf16 or float32 with adamw, recompute none, selective or full")
    # It is a rank of a launcher's job.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    job = JobConfig()
    job.job.dump_folder = folder
    job.model.name = job.model.flavor = "bench"
    job.training.local_batch_size, job.training.seq_len = trial.micro_batch, trial.length
    job.training.steps = trial.total
    job.training.max_norm = settings.grad_clip or float("inf")
    job.training.mixed_precision_param = PRECISIONS[settings.precision]
    job.optimizer.lr, job.optimizer.eps, job.optimizer.weight_decay = settings.lr, settings.eps, settings.weight_decay
    job.optimizer.beta1, job.optimizer.beta2 = settings.beta1, settings.beta2
    job.compile.enable = trial.compiles(device_type)
    job.activation_checkpoint.mode = recompute
    if recompute == "selective":
        job.activation_checkpoint.selective_ac_option = "op"
    return job


def _shape(spec: ModelSpec) -> tuple[ModuleType, Any]:
    """Its package for a shape, and the shape in its words."""
    if spec.norm != "rmsnorm" or spec.positions != "rope" or spec.activation != "swiglu" or spec.bias or spec.dropout:
        raise Unable("TorchTitan has no model of this shape: it has RMS norms, rotary positions and SwiGLU, no biases")
    if spec.sliding_window is not None:
        raise Unable("TorchTitan's models have no sliding window")
    common = {
        "dim": spec.hidden_size,
        "n_layers": spec.num_hidden_layers,
        "n_heads": spec.num_attention_heads,
        "n_kv_heads": spec.num_key_value_heads,
        "vocab_size": spec.vocab_size,
        "norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
    }
    usual_head = spec.head_dim * spec.num_attention_heads == spec.hidden_size
    if spec.experts is None and usual_head and not spec.qk_norm and not spec.tie_word_embeddings:
        from torchtitan.models import llama3

        # Its inner width is int(multiplier x 8/3 width), rounded up to a multiple: half of ours up to one of ours.
        half = spec.intermediate_size / 2 / (8 * spec.hidden_size / 3)
        inner = {"ffn_dim_multiplier": half, "multiple_of": spec.intermediate_size}
        return llama3, llama3.TransformerModelArgs(**common, **inner)
    from torchtitan.models import qwen3

    common |= {"head_dim": spec.head_dim, "hidden_dim": spec.intermediate_size, "qk_norm": spec.qk_norm}
    common |= {"enable_weight_tying": spec.tie_word_embeddings}
    experts = spec.experts
    if experts is None:
        return qwen3, qwen3.Qwen3ModelArgs(**common)
    if not all(map(spec.is_sparse, range(spec.num_hidden_layers))) or experts.capacity_factor is not None:
        raise Unable("TorchTitan's qwen3 has experts in every layer and drops no tokens")
    from torchtitan.models.moe import MoEArgs

    routed = MoEArgs(
        num_experts=experts.num_experts,
        num_shared_experts=experts.num_shared_experts,
        top_k=experts.num_experts_per_tok,
        score_func="softmax",
        route_norm=experts.norm_topk_prob,
        score_before_experts=False,
        load_balance_coeff=experts.router_bias_update_rate or None,
    )
    inner = {"moe_inter_dim": experts.moe_intermediate_size, "moe_args": routed}
    return qwen3, qwen3.Qwen3ModelArgs(**common, moe_enabled=True, **inner)


def _stand_in_for_datasets() -> None:
    """It imports `datasets` for its text loader, which is not used here."""
    if find_spec("datasets") is not None:
        return
    module, distributed = ModuleType("datasets"), ModuleType("datasets.distributed")
    for name in ("Dataset", "load_dataset"):
        setattr(module, name, None)
    vars(distributed)["split_dataset_by_node"] = None
    sys.modules |= {"datasets": module, "datasets.distributed": distributed}
