"""Messages of ranks that share a GPU: what leaves is what the stream had made of it by then, what comes can be used."""

from __future__ import annotations

import torch

from meshwright.comm.transfers import exchange, is_staged, receive, send
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool

ELEMENTS = 1 << 24


def _behind_work(world: World) -> dict[str, bool]:
    """Everything is queued behind products that take a tenth of a second, and overwritten as soon as it is sent."""
    assert world.group is not None
    other = 1 - world.rank
    busy = torch.randn(8192, 8192, device=world.device, dtype=torch.bfloat16)
    value = torch.zeros(ELEMENTS, device=world.device)
    came = torch.full_like(value, -1.0)
    torch.cuda.synchronize()
    found = {"staged": is_staged(value, world.group)}
    for _ in range(50):
        busy @ busy
    value.fill_(world.rank + 1.0)
    message = exchange(value, other, came, other, world.group)
    value.fill_(-2.0)
    message.wait()
    doubled = came * 2
    came.fill_(-3.0)
    found["exchanged"] = bool((doubled == 2 * (other + 1.0)).all())
    for _ in range(50):
        busy @ busy
    if world.rank == 0:
        send(doubled.fill_(7.0), world.group, 1).wait()
        found["sent"] = True
    else:
        receive(doubled, world.group, 0).wait()
        found["sent"] = bool((doubled == 7).all())
    return found


def test_messages_wait_for_the_stream_and_the_stream_for_messages(pool: RankPool) -> None:
    for found in pool.run(_behind_work, 2):
        assert all(found.values()), found
