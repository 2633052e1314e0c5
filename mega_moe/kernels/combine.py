"""combine: y_t = sum_k weight_k * out_k, and dispatch's backward: dx_t = sum_k drow_k.

A token's sum has one owner and runs in slot order, so it is the same to the bit every time. Rows are looked up where
the plan put them (`combine`, `dispatch_backward`), or a GEMM has already stored them by slot (`sum_slots`).
"""

import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Plan
from .blocks import blocks_for, launch_options
from .tile import narrow


# --8<-- [start:kernel]
@triton.jit
def load_slot(rows_ptr, row_of_slot_ptr, token, h, slot, T, H: tl.constexpr, K: tl.constexpr):
    """The tile of rows that lie in one slot of each token, in fp32; zeros, whatever memory holds, where masked."""
    row = tl.load(row_of_slot_ptr + token.to(tl.int64) * K + slot, mask=token < T, other=-1)
    mask = (row >= 0)[:, None] & (h < H)[None, :]
    at = rows_ptr + row.to(tl.int64)[:, None] * H + h[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32), row >= 0


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    out_ptr,  # (R, H) read
    topk_weights_ptr,  # (T, K) read, any strides
    row_of_slot_ptr,  # (T, K) int32, read
    y_ptr,  # (T, H) written
    T,
    stride_t,
    stride_k,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program for each (block of tokens, block of columns), columns fastest.

    Example: out = [[1.], [2.]], row_of_slot = [[1, 0], [-1, -1]], weights = [[0.5, 3.], [7., NaN]]: y = [[4.], [0.]].
    """
    column_blocks = tl.cdiv(H, BLOCK_N)
    token = tl.program_id(0) // column_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    h = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)

    y = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for slot in tl.static_range(K):
        out, live = load_slot(out_ptr, row_of_slot_ptr, token, h, slot, T, H, K)
        at_weight = topk_weights_ptr + token.to(tl.int64) * stride_t + tl.cast(slot, tl.int64) * stride_k
        y += tl.load(at_weight, mask=live, other=0.0).to(tl.float32)[:, None] * out

    mask = (token < T)[:, None] & (h < H)[None, :]
    tl.store(y_ptr + token.to(tl.int64)[:, None] * H + h[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)


# --8<-- [end:kernel]


@triton.jit(do_not_specialize=["T"])
def dispatch_backward_kernel(
    drows_ptr,  # (R, H) read
    row_of_slot_ptr,  # (T, K) int32, read
    dx_ptr,  # (T, H) written
    T,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program for each (block of tokens, block of columns), columns fastest.

    Example: drows = [[1.], [2.]], row_of_slot = [[1, 0], [-1, 0]]: dx = [[3.], [1.]].
    """
    column_blocks = tl.cdiv(H, BLOCK_N)
    token = tl.program_id(0) // column_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    h = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)

    dx = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for slot in tl.static_range(K):
        drow, _ = load_slot(drows_ptr, row_of_slot_ptr, token, h, slot, T, H, K)
        dx += drow

    mask = (token < T)[:, None] & (h < H)[None, :]
    tl.store(dx_ptr + token.to(tl.int64)[:, None] * H + h[None, :], narrow(dx, dx_ptr.dtype.element_ty), mask=mask)


# --8<-- [start:slots]
@triton.jit
def add_slots(
    slots_ptr,  # (T, K, H) read at live routes
    topk_weights_ptr,  # (T, K) read, any strides; or None: every weight is 1
    row_of_slot_ptr,  # (T, K) int32, read
    token,  # (BLOCK_R,) int64
    h,  # (BLOCK_N,) columns
    T,
    stride_t,
    stride_k,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The weighted sum over each token's live slots, in slot order, (BLOCK_R, BLOCK_N) fp32."""
    y = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for slot in tl.static_range(K):
        live = tl.load(row_of_slot_ptr + token * K + slot, mask=token < T, other=-1) >= 0
        at = slots_ptr + (token * K + slot)[:, None] * H + h[None, :]
        value = tl.load(at, mask=live[:, None] & (h < H)[None, :], other=0.0).to(tl.float32)
        if topk_weights_ptr is not None:
            at_weight = topk_weights_ptr + token * stride_t + tl.cast(slot, tl.int64) * stride_k
            value *= tl.load(at_weight, mask=live, other=0.0).to(tl.float32)[:, None]
        y += value
    return y


@triton.jit(do_not_specialize=["T"])
def sum_slots_kernel(
    slots_ptr,  # (T, K, H) read at live routes
    topk_weights_ptr,  # (T, K) read, any strides; or None: every weight is 1
    row_of_slot_ptr,  # (T, K) int32, read
    y_ptr,  # (T, H) written
    T,
    stride_t,
    stride_k,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program for each (block of tokens, block of columns), columns fastest.

    Example: slots = [[[1.], [2.]], [[3.], [NaN]]], row_of_slot = [[1, 0], [2, -1]], weights = [[0.5, 3.], [7., NaN]]:
    y = [[6.5], [21.]].
    """
    column_blocks = tl.cdiv(H, BLOCK_N)
    token = (tl.program_id(0) // column_blocks * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    h = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)

    y = add_slots(slots_ptr, topk_weights_ptr, row_of_slot_ptr, token, h, T, stride_t, stride_k, K, H, BLOCK_R, BLOCK_N)
    mask = (token < T)[:, None] & (h < H)[None, :]
    tl.store(y_ptr + token[:, None] * H + h[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)


# --8<-- [end:slots]


def combine(out: Tensor, topk_weights: Tensor, plan: Plan) -> Tensor:
    """out (R, H), topk_weights (T, K), any strides -> y (T, H): summed in fp32 in slot order, rounded once."""
    T, K = plan.row_of_slot.shape
    H = out.shape[1]
    y = out.new_empty(T, H)
    tile = blocks_for(out.dtype).elementwise
    if T:
        grid = triton.cdiv(T, tile.BLOCK_R) * triton.cdiv(H, tile.BLOCK_N)
        combine_kernel[(grid,)](
            out, topk_weights, plan.row_of_slot, y, T, *topk_weights.stride(), K=K, H=H, **launch_options(tile)
        )
    return y


def dispatch_backward(drows: Tensor, plan: Plan) -> Tensor:
    """drows (R, H) -> dx (T, H): summed in fp32 in slot order, rounded once."""
    T, K = plan.row_of_slot.shape
    H = drows.shape[1]
    dx = drows.new_empty(T, H)
    tile = blocks_for(drows.dtype).elementwise
    if T:
        grid = triton.cdiv(T, tile.BLOCK_R) * triton.cdiv(H, tile.BLOCK_N)
        dispatch_backward_kernel[(grid,)](drows, plan.row_of_slot, dx, T, K=K, H=H, **launch_options(tile))
    return dx


def sum_slots(slots: Tensor, topk_weights: Tensor | None, plan: Plan) -> Tensor:
    """slots (T, K, H), topk_weights (T, K), any strides, or None for weights of 1 -> y (T, H): summed over the live
    slots in fp32 in slot order, rounded once."""
    T, K, H = slots.shape
    y = slots.new_empty(T, H)
    tile = blocks_for(slots.dtype).elementwise
    strides = topk_weights.stride() if topk_weights is not None else (0, 0)
    if T:
        grid = triton.cdiv(T, tile.BLOCK_R) * triton.cdiv(H, tile.BLOCK_N)
        sum_slots_kernel[(grid,)](
            slots, topk_weights, plan.row_of_slot, y, T, *strides, K=K, H=H, **launch_options(tile)
        )
    return y
