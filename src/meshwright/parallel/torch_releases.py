"""What differs between the supported PyTorch releases, and public names that its type information leaves out."""

from __future__ import annotations

import inspect
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    GradBucket,
    Store,
    set_debug_level_from_env,
)
from torch.nn.parallel import DistributedDataParallel

__all__ = ["BUFFERS_STAY_LOCAL", "FileStore", "GradBucket", "Store", "set_debug_level_from_env"]

_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters

# 2.13 renamed the argument and warns of the old name.
BUFFERS_STAY_LOCAL: dict[str, Any] = (
    {"forward_sync_buffers": False} if "forward_sync_buffers" in _DDP_ARGUMENTS else {"broadcast_buffers": False}
)
"""Arguments with which DistributedDataParallel leaves buffers alone in forward passes."""
