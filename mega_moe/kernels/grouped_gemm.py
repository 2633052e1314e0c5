"""Grouped GEMM: the matrix products of all experts in one launch, whatever number of rows each of them has.

Two kernels serve both directions. Over rows, out[r] = a[r] @ w[e]^T for the expert e of row r: that is gate_up and
down, and with the weight's last two dimensions swapped (a view) also dact and drows. For weight gradients the rows are
what is summed over: dw[e] = sum of a[r]^T b[r] over the rows of e.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Plan
from .blocks import blocks_for, launch_options
from .tile import dot, narrow, rows_of_block


# --8<-- [start:rows]
@triton.jit
def multiply(
    a_at,  # (BLOCK_R,) where each row begins
    w_at,  # (BLOCK_N,) where each column's weights begin
    stride_ac,
    stride_wc,
    inside,  # (BLOCK_N,) whether the column exists
    C: tl.constexpr,
    FULL: tl.constexpr,  # all columns exist
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A tile of a @ w^T, (BLOCK_R, BLOCK_N) fp32, over the contraction C."""
    c = tl.arange(0, BLOCK_C).to(tl.int64)
    a_at = a_at[:, None] + c[None, :] * stride_ac
    w_at = w_at[None, :] + c[:, None] * stride_wc
    acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for start in range(0, C, BLOCK_C):
        if C % BLOCK_C == 0 and FULL:
            a, w = tl.load(a_at), tl.load(w_at)
        else:
            left = c < C - start
            a = tl.load(a_at, mask=left[None, :], other=0.0)
            w = tl.load(w_at, mask=left[:, None] & inside[None, :], other=0.0)
        acc = dot(a, w, acc)
        a_at += tl.cast(BLOCK_C, tl.int64) * stride_ac
        w_at += tl.cast(BLOCK_C, tl.int64) * stride_wc
    return acc


@triton.jit(do_not_specialize=["E"])
def grouped_gemm_kernel(
    a_ptr,  # (R, C) read, rows sorted by expert
    w_ptr,  # (E, N, C) read, one of the last two strides is 1
    out_ptr,  # (R, N) written where a row has an expert
    row_start_ptr,  # (E+1,) int32, read
    E,
    stride_we,
    stride_wn,
    stride_wc,
    C: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid: one program for each (block of rows, block of columns), columns fastest, for the most blocks that any
    routing can need. Programs that run at the same time then share a few row blocks and all of an expert's weight.

    Example: rows of two experts, row_start = [0, 1, 2], a = [[1., 2.], [3., 4.]], w = [[[1., 0.]], [[0., 1.]]]:
    out = [[1.], [4.]].
    """
    column_blocks = tl.cdiv(N, BLOCK_N)
    expert, row, end = rows_of_block(tl.program_id(0) // column_blocks, row_start_ptr, E, BLOCK_R, BLOCK_E)
    if row < end:
        r = row + tl.arange(0, BLOCK_R)
        n = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)

        # Behind the last row the tile repeats it, so that loads need no mask for rows: those results are not stored.
        # Columns are masked instead, where they do not fill their tile: whatever repeats one of them hides from the
        # compiler that its neighbours lie side by side, and they would be loaded one by one.
        a_at = a_ptr + tl.minimum(r, end - 1).to(tl.int64) * C
        w_at = w_ptr + expert.to(tl.int64) * stride_we + n.to(tl.int64) * stride_wn
        acc = multiply(a_at, w_at, 1, stride_wc, n < N, C, N % BLOCK_N == 0, BLOCK_R, BLOCK_N, BLOCK_C)

        mask = (r < end)[:, None] & (n < N)[None, :]
        to_out = out_ptr + r.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to_out, narrow(acc, out_ptr.dtype.element_ty), mask=mask)


# --8<-- [end:rows]


# --8<-- [start:weight_grad]
@triton.jit
def weight_grad_kernel(
    a_ptr,  # (R, M) read, rows sorted by expert
    b_ptr,  # (R, N) read
    dw_ptr,  # (E, M, N) written, all of it
    row_start_ptr,  # (E+1,) int32, read
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid: one program for each (expert, block of M, block of N), N fastest. It alone sums its tile, over the expert's
    rows in order; an expert without rows takes no step and stores zeros.

    Example: row_start = [0, 2, 2], a = [[1.], [2.]], b = [[3., 4.], [5., 6.]]: dw = [[[13., 16.]], [[0., 0.]]].
    """
    n_blocks = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * n_blocks
    expert = tl.program_id(0) // tiles
    m = tl.program_id(0) % tiles // n_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    first, end = tl.load(row_start_ptr + expert), tl.load(row_start_ptr + expert + 1)

    r = tl.arange(0, BLOCK_R)
    first_row = (first + r).to(tl.int64)
    a_at = a_ptr + first_row[:, None] * M + m[None, :]
    b_at = b_ptr + first_row[:, None] * N + n[None, :]

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, end, BLOCK_R):
        inside = (r < end - start)[:, None]
        a = tl.load(a_at, mask=inside & (m < M)[None, :], other=0.0)
        b = tl.load(b_at, mask=inside & (n < N)[None, :], other=0.0)
        acc = dot(a.T, b, acc)
        a_at += BLOCK_R * M
        b_at += BLOCK_R * N

    mask = (m < M)[:, None] & (n < N)[None, :]
    to_dw = dw_ptr + (expert.to(tl.int64) * M + m[:, None]) * N + n[None, :]
    tl.store(to_dw, narrow(acc, dw_ptr.dtype.element_ty), mask=mask)


# --8<-- [end:weight_grad]


def grouped_gemm(a: Tensor, w: Tensor, plan: Plan) -> Tensor:
    """out[r] = a[r] @ w[e]^T: a (R, C) contiguous, w (E, N, C) with one of the last two strides 1 -> out (R, N).

    Accumulates in fp32 and rounds once. Rows without an expert are left unwritten.
    """
    R, C = a.shape
    E, N, _ = w.shape
    out = a.new_empty(R, N)
    tile = blocks_for(a.dtype).rows
    if R:
        grid = (R // tile.BLOCK_R + E) * triton.cdiv(N, tile.BLOCK_N)
        grouped_gemm_kernel[(grid,)](
            a,
            w,
            out,
            plan.row_start,
            E,
            *w.stride(),
            C=C,
            N=N,
            BLOCK_E=triton.next_power_of_2(E),
            **launch_options(tile),
        )
    return out


def weight_grad(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
    """dw[e] = sum of a[r]^T b[r] over the rows r of e: a (R, M), b (R, N), both contiguous -> dw (E, M, N).

    Accumulates in fp32 in the order of the rows and rounds once; zeros for an expert without rows.
    """
    M, N = a.shape[1], b.shape[1]
    E = len(plan.row_start) - 1
    dw = a.new_empty(E, M, N)
    tile = blocks_for(a.dtype).weight_grad
    grid = E * triton.cdiv(M, tile.BLOCK_M) * triton.cdiv(N, tile.BLOCK_N)
    weight_grad_kernel[(grid,)](a, b, dw, plan.row_start, M=M, N=N, **launch_options(tile))
    return dw
