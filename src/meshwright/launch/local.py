"""Run a function on n ranks of this machine, once: nothing is started again.

Ranks talk over the loopback interface and meet through a file, so that nothing listens on the network.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from meshwright.elastic.budget import Budget
from meshwright.elastic.failure import RankError
from meshwright.elastic.membership import Alone
from meshwright.elastic.ranks import may_fork
from meshwright.elastic.supervisor import Supervisor
from meshwright.parallel.world import World, join_world

__all__ = ["RankError", "may_fork", "run_ranks", "stay_on_loopback"]


def run_ranks(work: Callable[[World], None], count: int, *, device: str = "auto", timeout_s: float = 600.0) -> None:
    """Run `work` on that many ranks of this machine; raises what the first failing rank raised."""
    if count == 1:
        with join_world(device, timeout_s) as world:
            work(world)
        return
    stay_on_loopback()
    membership = Alone(count, Budget(max_restarts=0))
    Supervisor(lambda placement: work, membership, device=device, timeout_s=timeout_s).run()


def stay_on_loopback() -> None:
    """Let ranks that are started from here talk over the loopback interface, unless somebody said otherwise."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, "lo" if sys.platform == "linux" else "lo0")
