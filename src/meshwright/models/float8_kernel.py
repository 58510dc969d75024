"""Transposes of 8-bit matrices on a GPU: one program turns a tile around."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS, _COLUMNS = 128, 64


@triton.jit
def _turn(values, factors, turned, rows, columns, SCALES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(values + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0)
    if SCALES:
        factor = tl.load(factors + row, mask=row < rows, other=0.0)
        tile = (tile.to(tl.float32) * factor[:, None]).to(values.dtype.element_ty)
    tl.store(turned + column[:, None].to(tl.int64) * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))


def transposed(values: Tensor, factors: Tensor | None) -> Tensor:
    """The columns of a matrix, each in one piece; its rows times factors before."""
    rows, columns = values.shape
    values = values.contiguous()
    turned = torch.empty(columns, rows, dtype=values.dtype, device=values.device)
    with torch.cuda.device(values.device):
        _turn[(triton.cdiv(columns, _COLUMNS), triton.cdiv(rows, _TOKENS))](
            values,
            values if factors is None else factors.contiguous(),
            turned,
            rows,
            columns,
            SCALES=factors is not None,
            ROWS=_TOKENS,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return turned
