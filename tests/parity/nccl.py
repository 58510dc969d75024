"""Strategies over NCCL against one GPU: python -m tests.parity.nccl; it needs a GPU, so pytest leaves it alone.

One GPU will do: NCCL refuses two ranks on one device unless it takes them for different hosts, which NCCL_HOSTID says.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from meshwright.models.spec import Experts, ModelSpec
from meshwright.parallel.torch_releases import FileStore
from meshwright.parallel.world import World, join_world
from meshwright.verify.parity import TOLERANCES, Case, Trace, run_case

SHAPE = ModelSpec(
    vocab_size=67,
    hidden_size=64,
    intermediate_size=58,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
EXPERTS = SHAPE.model_copy(
    update={
        "experts": Experts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, router_aux_loss_coef=0.01)
    }
)
STRATEGIES = [
    (SHAPE, "dp=4", "float32"),
    (SHAPE, "dp=4 zero=1", "float32"),
    (SHAPE, "dp=4 zero=2 replicate=2", "bf16"),
    (SHAPE, "dp=4 zero=3 wrap=block offload=parameters", "float32"),
    (SHAPE, "dp=1 tp=4", "float32"),
    (SHAPE, "dp=2 tp=2 zero=3 recompute=selective", "bf16"),
    (SHAPE, "dp=1 pp=4", "float32"),
    (SHAPE, "dp=2 pp=2 zero=1 schedule=interleaved:2", "float32"),
    (SHAPE, "dp=2 pp=2 zero=2 schedule=zbv", "bf16"),
    (SHAPE, "dp=1 pp=2 tp=2 schedule=zero-bubble recompute=full", "float32"),
    (SHAPE, "dp=1 cp=4", "bf16"),
    (SHAPE, "dp=1 cp=4 cp_method=ulysses:2", "float32"),
    (SHAPE, "dp=1 cp=2 pp=2", "float32"),
    (EXPERTS, "dp=4 zero=3 ep=2", "float32"),
    (EXPERTS, "dp=2 pp=2 ep=2", "float32"),
    (EXPERTS, "dp=2 tp=2 ep=2", "bf16"),
]


def cases(ranks: int) -> list[Case]:
    return [Case(spec, text, ranks, precision, micro_steps=2, steps=3) for spec, text, precision in STRATEGIES]


def work(rank: int, ranks: int, store: str) -> None:
    """One rank: all cases, each told by the first rank beside what one GPU gives."""
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    alone: dict[str, Trace] = {}
    if rank == 0:
        for case in cases(ranks):
            one = replace(case, strategy="auto", ranks=1)
            alone.setdefault(repr(one), run_case(World(device=torch.device("cuda", 0)), one))
    failed = 0
    with join_world("cuda", 60, (rank, ranks, rank % torch.cuda.device_count()), FileStore(store, ranks)) as world:
        for case in cases(ranks):
            found = run_case(world, case).losses
            if rank == 0:
                expected = alone[repr(replace(case, strategy="auto", ranks=1))].losses
                apart = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
                failed += not apart <= TOLERANCES[case.precision]
                print(f"{case.strategy:60} {case.precision:8} loss {found[-1]:.6f}, {apart:.1e} apart", flush=True)
    if rank == 0:
        print("all agree" if not failed else f"{failed} differ", flush=True)
        sys.exit(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    options = parser.parse_args()
    if options.rank is not None:
        work(options.rank, options.ranks, options.store)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "tests.parity.nccl", "--ranks", str(options.ranks)]
        command += ["--store", str(Path(folder) / "store")]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(options.ranks)]
        return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    raise SystemExit(main())
