"""What differs between the supported PyTorch releases, in one place."""

from __future__ import annotations

import inspect

from torch.nn.parallel import DistributedDataParallel

_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters

# 2.13 renamed the argument and warns of the old name.
BUFFERS_STAY_LOCAL: dict[str, bool] = (
    {"forward_sync_buffers": False} if "forward_sync_buffers" in _DDP_ARGUMENTS else {"broadcast_buffers": False}
)
"""Arguments with which DistributedDataParallel leaves buffers alone in forward passes."""
