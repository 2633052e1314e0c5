"""dispatch: copy each token to its rows, so that an expert's rows lie side by side. Backward copies dy the same way."""

import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Plan
from .blocks import blocks_for, launch_options


# --8<-- [start:kernel]
@triton.jit(do_not_specialize=["R"])
def dispatch_kernel(
    x_ptr,  # (T, H) read, any strides
    rows_ptr,  # (R, H) written where a row has a token
    token_of_row_ptr,  # (R,) int32, read
    R,
    stride_xt,
    stride_xh,
    H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program for each (block of rows, block of columns), columns fastest.

    Example: token_of_row = [0, 1, 0, -1], x = [[1., 2.], [3., 4.]]: rows = [[1., 2.], [3., 4.], [1., 2.], unwritten].
    """
    column_blocks = tl.cdiv(H, BLOCK_N)
    row = tl.program_id(0) // column_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    h = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)

    token = tl.load(token_of_row_ptr + row, mask=row < R, other=-1)
    mask = (token >= 0)[:, None] & (h < H)[None, :]
    from_x = x_ptr + token.to(tl.int64)[:, None] * stride_xt + h.to(tl.int64)[None, :] * stride_xh
    tl.store(rows_ptr + row.to(tl.int64)[:, None] * H + h[None, :], tl.load(from_x, mask=mask, other=0.0), mask=mask)


# --8<-- [end:kernel]


def dispatch(x: Tensor, plan: Plan) -> Tensor:
    """x (T, H), any strides -> rows (R, H). Rows without a token are left unwritten."""
    R, H = len(plan.token_of_row), x.shape[1]
    rows = x.new_empty(R, H)
    tile = blocks_for(x.dtype).elementwise
    grid = triton.cdiv(R, tile.BLOCK_R) * triton.cdiv(H, tile.BLOCK_N)
    if grid:
        dispatch_kernel[(grid,)](x, rows, plan.token_of_row, R, *x.stride(), H=H, **launch_options(tile))
    return rows
