"""Dropout that is called as a function drops nothing in a proof: every rank would drop other things than one device."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_DROPPING = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_PLACE = 4
"""Of an attention's dropout among its arguments."""


class NothingDropped(TorchFunctionMode):
    """The context of passes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPPING:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > _PLACE:
                args = (*args[:_PLACE], 0.0, *args[_PLACE + 1 :])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)
