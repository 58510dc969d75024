"""Every rank knows its part of a tensor however unevenly two axes cut it, and together they have the whole."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from meshwright.cuts import part
from meshwright.models.parts import box_of, part_like, whole
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool


def cut_twice(world: World, lengths: list[int], tp: int) -> list[str]:
    """Rows that tensor parallel cuts first and FSDP then; gives what is wrong."""
    mesh = DeviceMesh("cpu", torch.arange(world.size).view(-1, tp), mesh_dim_names=("shard", "tp"))
    wrong = []
    for length in lengths:
        rows = torch.arange(3 * length, dtype=torch.float32).view(length, 3)
        mine = rows[part(length, tp, mesh["tp"].get_local_rank())].clone()
        split = DTensor.from_local(mine, mesh["tp"], [Shard(0)], run_check=False, shape=rows.shape, stride=(3, 1))
        module = nn.Linear(3, length, bias=False)
        module.weight = nn.Parameter(split)
        fully_shard(module, mesh=mesh["shard"])
        local, offset, _ = box_of(module.weight.detach())
        if not torch.equal(local, rows[offset[0] : offset[0] + len(local)]):
            wrong.append(f"{length} rows: another part than it is said to be")
        if not torch.equal(whole(module.weight.detach()), rows):
            wrong.append(f"{length} rows: another whole")
        if not torch.equal(part_like(rows, module.weight).to_local(), local):
            wrong.append(f"{length} rows: cut in another way")
    return wrong


def test_parts_of_lengths_that_do_not_go_round(pool: RankPool) -> None:
    for ranks, tp in ((4, 2), (6, 2), (8, 2), (8, 4)):
        for wrong in pool.run(cut_twice, ranks, [4, 5, 7, 9, 13, 16, 21], tp):
            assert wrong == []
