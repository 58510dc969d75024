"""Where one generation of ranks runs, as one machine sees it."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.lock import Fence


class Choice(NamedTuple):
    """The strategy of a generation."""

    strategy: str
    micro_batch: int | None
    """Samples of a pass; None is a rank's whole share."""
    world: int
    said: tuple[str, ...] = ()
    """What is to be told about it."""
    placement: str = "auto"
    """The order of its axes, as parallel.placement has it."""
    machines: tuple[int, ...] = ()
    """Those that have met, in the order of the ranks; as they are numbered where there is nothing."""


@dataclass(frozen=True)
class Placement:
    """One generation: which ranks this machine has, of how many, and where they meet."""

    world: int
    local: int
    """Ranks of this machine."""
    first_rank: int = 0
    generation: int = 0
    host: str = field(default_factory=socket.gethostname)
    node: int = 0
    """Number of this machine in the order of the ranks; the first one holds the run folder."""
    hosts: tuple[str, ...] = ()
    choice: Choice | None = None
    """What several machines have agreed on; None is what one planned for itself."""
    store: tuple[str, int, str] | None = None
    """Host, port and prefix of the store where ranks of several machines meet; None is a file."""
    check: bool = False
    """Whether ranks check that they agree on every collective, because the last ones did not."""
    fence: Fence | None = None
    """What the run folder's lock says as long as this generation may write."""
