"""TF32: a GPU's matrix products of float32 read ten bits of each factor's fraction, and add up in float32.

PyTorch has it as a setting of the whole process. Here it holds for as long as somebody trains with it, so that whoever
else computes in the process keeps what they had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tf32_products(wanted: bool) -> Iterator[None]:
    """A context in which products of float32 on GPUs are in TF32, if that is wanted."""
    if not wanted:
        yield
        return
    places = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, kept = _of_process(), [place.fp32_precision for place in places]
    # The old of two interfaces: it keeps both in agreement, and compilers ask through either of them.
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for place, value in zip(places, kept, strict=True):
            place.fp32_precision = value


def _of_process() -> str:
    """What the old interface says; it refuses to where somebody has used the new one, and it had not been used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "highest"
