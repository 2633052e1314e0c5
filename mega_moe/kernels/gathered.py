"""GEMMs that read tokens where they lie and write rows where they are wanted: no permuted copy of x or dy exists.

A program that multiplies a block of rows needs its rows' addresses, not that the rows lie side by side. So dispatch is
a vector of pointers: token_of_row says which token each row is, and the GEMM loads that token's columns. The results go
straight to slot k of token t in a tensor (T, K, H), where combine reads them in order. The weight gradients gather
along their contraction: each step loads the tokens of the next few rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Need, Plan
from .blocks import blocks_for, launch_options
from .fused_swiglu import multiply_gate_up, store_pre_and_act, sum_parts, swiglu_backward_epilogue
from .grouped_gemm import multiply
from .tile import dot, narrow, route_of_row, rows_at, rows_of_block, weight_of_route


# --8<-- [start:gate_up]
@triton.jit
def tokens_of_tile(r, end, token_of_row_ptr):
    """The token of each row of a tile, in int64. Behind the expert's last row it repeats: loads need no mask."""
    return tl.load(token_of_row_ptr + tl.minimum(r, end - 1)).to(tl.int64)


@triton.jit(do_not_specialize=["E"])
def gathered_gate_up_kernel(
    x_ptr,  # (T, H) read, any strides
    w_ptr,  # (E, 2I, H) read, unit last stride: first the rows of gate, then those of up
    pre_ptr,  # (R, 2, I) written where a row has an expert; or None
    act_ptr,  # (R, I) written where a row has an expert; or None
    row_start_ptr,  # (E+1,) int32, read
    token_of_row_ptr,  # (R,) int32, read
    E,
    stride_xt,
    stride_xh,
    stride_we,
    stride_wn,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid: one program for each (block of rows, block of I), columns fastest, for the most blocks of any routing.

    Example: one expert, token_of_row = [1], x = [[9., 9.], [1., 2.]], w = [[[1., 0.], [0., 1.]]]: gate is 1 and up 2,
    so pre = [[[1.], [2.]]] and act = [[silu(1) * 2]] = [[1.4621]].
    """
    column_blocks = tl.cdiv(I, BLOCK_N)
    expert, row, end = rows_of_block(tl.program_id(0) // column_blocks, row_start_ptr, E, BLOCK_R, BLOCK_E)
    if row < end:
        r = row + tl.arange(0, BLOCK_R)
        i = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)

        x_at = x_ptr + tokens_of_tile(r, end, token_of_row_ptr) * stride_xt
        gate_at = w_ptr + expert.to(tl.int64) * stride_we + i.to(tl.int64) * stride_wn
        to_up = tl.cast(I, tl.int64) * stride_wn
        gate, up = multiply_gate_up(
            x_at, gate_at, to_up, stride_xh, i < I, H, I % BLOCK_N == 0, BLOCK_R, BLOCK_N, BLOCK_C
        )

        pre_at = rows_at(pre_ptr, r, 2 * I)
        act_at = rows_at(act_ptr, r, I)
        store_pre_and_act(gate, up, pre_at, act_at, r < end, r < end, i, LIMIT, I, x_ptr.dtype.element_ty)


# --8<-- [end:gate_up]


# --8<-- [start:slots]
@triton.jit(do_not_specialize=["E"])
def slot_gemm_kernel(
    a_ptr,  # (R, C) read, rows sorted by expert
    w_ptr,  # (E, N, C) read, one of the last two strides is 1
    slots_ptr,  # (T, K, N) written at live routes
    row_start_ptr,  # (E+1,) int32, read
    token_of_row_ptr,  # (R,) int32, read
    slot_of_row_ptr,  # (R,) int32, read
    E,
    stride_we,
    stride_wn,
    stride_wc,
    K: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid: one program for each (block of rows, block of columns), columns fastest, for the most of any routing.

    Example: one expert, T = 1, K = 2, a = [[1., 2.], [3., 4.]] whose rows serve slots 1 and 0, w = [[[1., 0.]]]:
    slots = [[[3.], [1.]]].
    """
    column_blocks = tl.cdiv(N, BLOCK_N)
    expert, row, end = rows_of_block(tl.program_id(0) // column_blocks, row_start_ptr, E, BLOCK_R, BLOCK_E)
    if row < end:
        r = row + tl.arange(0, BLOCK_R)
        n = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)

        a_at = a_ptr + tl.minimum(r, end - 1).to(tl.int64) * C
        w_at = w_ptr + expert.to(tl.int64) * stride_we + n.to(tl.int64) * stride_wn
        acc = multiply(a_at, w_at, 1, stride_wc, n < N, C, N % BLOCK_N == 0, BLOCK_R, BLOCK_N, BLOCK_C)

        route = route_of_row(r, r < end, token_of_row_ptr, slot_of_row_ptr, K)
        mask = (r < end)[:, None] & (n < N)[None, :]
        tl.store(slots_ptr + route[:, None] * N + n[None, :], narrow(acc, slots_ptr.dtype.element_ty), mask=mask)


# --8<-- [end:slots]


# --8<-- [start:dact]
@triton.jit(do_not_specialize=["E"])
def gathered_dact_kernel(
    dy_ptr,  # (T, H) read, any strides
    w_ptr,  # (E, H, I) read, unit last stride
    pre_ptr,  # (R, 2, I) read
    topk_weights_ptr,  # (T, K) read, any strides
    token_of_row_ptr,  # (R,) int32, read
    slot_of_row_ptr,  # (R,) int32, read
    dpre_ptr,  # (R, 2, I) written where a row has an expert; or None
    weighted_act_ptr,  # (R, I) written where a row has an expert; or None
    parts_ptr,  # (R, blocks of I) fp32, written where a row has an expert; or None
    row_start_ptr,  # (E+1,) int32, read
    E,
    stride_dyt,
    stride_dyh,
    stride_we,
    stride_wc,
    stride_t,
    stride_k,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: one program for each (block of rows, block of I), columns fastest, for the most blocks of any routing.

    Example: one route of token 1 and weight 0.5, dy = [[9.], [3.]], w = [[[1.]]], pre = [[[0.], [2.]]] (gate 0, up 2):
    dact is 3, sigmoid 1/2, so dgate = 0.5*3 * 2 * 1/2 = 1.5, dup = 0, weighted act = 0 and <dact, act> = 0.
    """
    column_blocks = tl.cdiv(I, BLOCK_N)
    column_block = tl.program_id(0) % column_blocks
    expert, row, end = rows_of_block(tl.program_id(0) // column_blocks, row_start_ptr, E, BLOCK_R, BLOCK_E)
    if row < end:
        r = row + tl.arange(0, BLOCK_R)
        live = r < end
        i = column_block * BLOCK_N + tl.arange(0, BLOCK_N)

        dy_at = dy_ptr + tokens_of_tile(r, end, token_of_row_ptr) * stride_dyt
        w_at = w_ptr + expert.to(tl.int64) * stride_we + i
        dact = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        if dpre_ptr is not None or parts_ptr is not None:  # weighted act alone is made without it
            dact = multiply(dy_at, w_at, stride_dyh, stride_wc, i < I, H, I % BLOCK_N == 0, BLOCK_R, BLOCK_N, BLOCK_C)

        route = route_of_row(r, live, token_of_row_ptr, slot_of_row_ptr, K)
        part = swiglu_backward_epilogue(
            dact,
            rows_at(pre_ptr, r, 2 * I),
            rows_at(dpre_ptr, r, 2 * I),
            rows_at(weighted_act_ptr, r, I),
            weight_of_route(route, live, topk_weights_ptr, stride_t, stride_k, K),
            live,
            live,
            column_block * BLOCK_N,
            LIMIT,
            I,
            BLOCK_R,
            BLOCK_N,
            CHUNK,
        )
        if parts_ptr is not None:
            tl.store(parts_ptr + r.to(tl.int64) * column_blocks + column_block, part, mask=live)


# --8<-- [end:dact]


# --8<-- [start:weight_grad]
@triton.jit
def gathered_weight_grad_kernel(
    a_ptr,  # (R, M) read, rows sorted by expert
    tokens_ptr,  # (T, N) read, any strides
    dw_ptr,  # (E, M, N) written, all of it, any strides
    row_start_ptr,  # (E+1,) int32, read
    token_of_row_ptr,  # (R,) int32, read
    stride_tokens_t,
    stride_tokens_n,
    stride_dwe,
    stride_dwm,
    stride_dwn,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid: one program for each (expert, block of M, block of N), N fastest. It alone sums its tile, over the expert's
    rows in order; an expert without rows takes no step and stores zeros.

    Example: row_start = [0, 2, 2], token_of_row = [1, 0], a = [[1.], [2.]], tokens = [[5., 6.], [3., 4.]]:
    dw = [[[13., 16.]], [[0., 0.]]].
    """
    n_blocks = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * n_blocks
    expert = tl.program_id(0) // tiles
    m = tl.program_id(0) % tiles // n_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    first, end = tl.load(row_start_ptr + expert), tl.load(row_start_ptr + expert + 1)

    r = tl.arange(0, BLOCK_R)
    a_at = a_ptr + (first + r).to(tl.int64)[:, None] * M + m[None, :]
    to_n = n.to(tl.int64)[None, :] * stride_tokens_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, end, BLOCK_R):
        inside = r < end - start
        token = tl.load(token_of_row_ptr + start + r, mask=inside, other=0).to(tl.int64)
        a = tl.load(a_at, mask=inside[:, None] & (m < M)[None, :], other=0.0)
        b_at = tokens_ptr + token[:, None] * stride_tokens_t + to_n
        b = tl.load(b_at, mask=inside[:, None] & (n < N)[None, :], other=0.0)
        acc = dot(a.T, b, acc)
        a_at += BLOCK_R * M

    mask = (m < M)[:, None] & (n < N)[None, :]
    to_dw = dw_ptr + expert.to(tl.int64) * stride_dwe
    to_dw += m.to(tl.int64)[:, None] * stride_dwm + n.to(tl.int64)[None, :] * stride_dwn
    tl.store(to_dw, narrow(acc, dw_ptr.dtype.element_ty), mask=mask)


# --8<-- [end:weight_grad]


def gathered_gate_up(
    x: Tensor, w_gate_up: Tensor, plan: Plan, swiglu_limit: float | None, pre: bool, act: bool
) -> tuple[Tensor | None, Tensor | None]:
    """x (T, H), any strides, w_gate_up (E, 2I, H) with unit last stride -> pre (R, 2, I) and act (R, I); None if not
    asked for. act is made from fp32 accumulators and rounded once. Rows without an expert are left unwritten.
    """
    R, H = len(plan.token_of_row), x.shape[1]
    E, I = len(w_gate_up), w_gate_up.shape[1] // 2
    pre = x.new_empty(R, 2, I) if pre else None
    act = x.new_empty(R, I) if act else None
    tile = blocks_for(x.dtype).gate_up
    if R:
        grid = (R // tile.BLOCK_R + E) * triton.cdiv(I, tile.BLOCK_N)
        gathered_gate_up_kernel[(grid,)](
            x,
            w_gate_up,
            pre,
            act,
            plan.row_start,
            plan.token_of_row,
            E,
            *x.stride(),
            *w_gate_up.stride()[:2],
            H=H,
            I=I,
            LIMIT=swiglu_limit,
            BLOCK_E=triton.next_power_of_2(E),
            **launch_options(tile),
        )
    return pre, act


def slot_gemm(a: Tensor, w: Tensor, plan: Plan) -> Tensor:
    """slots[t, k] = a[r] @ w[e]^T for the row r of that slot: a (R, C) contiguous, w (E, N, C) with one of the last two
    strides 1 -> slots (T, K, N). Accumulates in fp32 and rounds once. Slots of masked routes are left unwritten.
    """
    (R, C), (T, K) = a.shape, plan.row_of_slot.shape
    E, N, _ = w.shape
    slots = a.new_empty(T, K, N)
    tile = blocks_for(a.dtype).rows
    if R:
        grid = (R // tile.BLOCK_R + E) * triton.cdiv(N, tile.BLOCK_N)
        slot_gemm_kernel[(grid,)](
            a,
            w,
            slots,
            plan.row_start,
            plan.token_of_row,
            plan.slot_of_row,
            E,
            *w.stride(),
            K=K,
            C=C,
            N=N,
            BLOCK_E=triton.next_power_of_2(E),
            **launch_options(tile),
        )
    return slots


def gathered_dact(
    dy: Tensor,
    w_down: Tensor,
    pre: Tensor,
    topk_weights: Tensor,
    plan: Plan,
    swiglu_limit: float | None,
    need: Need,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dy (T, H), any strides, w_down (E, H, I) with unit last stride, pre (R, 2, I), topk_weights (T, K), any strides
    -> dpre (R, 2, I), weighted act (R, I), dtopk_weights (T, K); each None where `need` has no use for it.
    """
    (R, _, I), (E, H, _) = pre.shape, w_down.shape
    tile = blocks_for(pre.dtype).dact
    parts_of_row = triton.cdiv(I, tile.BLOCK_N)
    dpre = torch.empty_like(pre) if need.dpre else None
    weighted_act = pre.new_empty(R, I) if need.dw_down else None
    parts = pre.new_empty(R, parts_of_row, dtype=torch.float32) if need.dtopk_weights else None
    if R:
        gathered_dact_kernel[((R // tile.BLOCK_R + E) * parts_of_row,)](
            dy,
            w_down,
            pre,
            topk_weights,
            plan.token_of_row,
            plan.slot_of_row,
            dpre,
            weighted_act,
            parts,
            plan.row_start,
            E,
            *dy.stride(),
            *w_down.stride()[:2],
            *topk_weights.stride(),
            K=topk_weights.shape[1],
            H=H,
            I=I,
            LIMIT=swiglu_limit,
            BLOCK_E=triton.next_power_of_2(E),
            **launch_options(tile),
        )
    return dpre, weighted_act, sum_parts(parts, topk_weights, plan) if need.dtopk_weights else None


def gathered_weight_grad(a: Tensor, tokens: Tensor, plan: Plan, dw: Tensor) -> Tensor:
    """dw[e] = sum over the rows r of e of a[r]^T tokens[token_of_row[r]]: a (R, M) contiguous, tokens (T, N), any
    strides. Writes all of dw (E, M, N), any strides, and returns it.
    """
    E, M, N = dw.shape
    tile = blocks_for(a.dtype).gathered_weight_grad
    grid = E * triton.cdiv(M, tile.BLOCK_M) * triton.cdiv(N, tile.BLOCK_N)
    gathered_weight_grad_kernel[(grid,)](
        a,
        tokens,
        dw,
        plan.row_start,
        plan.token_of_row,
        *tokens.stride(),
        *dw.stride(),
        M=M,
        N=N,
        **launch_options(tile),
    )
    return dw
