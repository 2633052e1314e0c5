"""SwiGLU in the GEMM's epilogue: what it reads is computed where it is still in registers.

Forward, one program multiplies its rows by the gate *and* the up weights of the same columns, so that both operands of
SwiGLU are at hand when the loop ends: act is stored without pre being read again. Backward, the program that has made a
tile of dact reads the same tile of pre and turns both into dpre, the weighted act that dw_down contracts with, and its
share of <dact, act>, the router weight's gradient. dact itself never reaches memory.

A row's <dact, act> runs over all of I, and a tile holds some columns of it. Each tile stores its own part, and a last
kernel adds a row's parts in the order of the columns: no atomics, so the same bits every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Need, Plan
from .blocks import blocks_for, launch_options
from .grouped_gemm import multiply
from .swiglu import act_and_dpre, act_of
from .tile import dot, halves, nan_if, narrow, route_of_row, rows_at, rows_of_block, weight_of_route


# --8<-- [start:gate_up]
@triton.jit
def multiply_gate_up(
    a_at,  # (BLOCK_R,) where each row begins
    gate_at,  # (BLOCK_N,) where each column's gate weights begin; they lie side by side
    to_up,  # from a gate weight to the up weight of the same column
    stride_ac,
    inside,  # (BLOCK_N,) whether the column exists
    H: tl.constexpr,
    FULL: tl.constexpr,  # all columns exist
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A tile of gate and the same tile of up, each (BLOCK_R, BLOCK_N) fp32: the rows are loaded once for both."""
    c = tl.arange(0, BLOCK_C).to(tl.int64)
    a_at = a_at[:, None] + c[None, :] * stride_ac
    gate_at = gate_at[None, :] + c[:, None]
    gate = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for start in range(0, H, BLOCK_C):
        if H % BLOCK_C == 0 and FULL:
            a, w_gate, w_up = tl.load(a_at), tl.load(gate_at), tl.load(gate_at + to_up)
        else:
            left = c < H - start
            w_mask = left[:, None] & inside[None, :]
            a = tl.load(a_at, mask=left[None, :], other=0.0)
            w_gate = tl.load(gate_at, mask=w_mask, other=0.0)
            w_up = tl.load(gate_at + to_up, mask=w_mask, other=0.0)
        gate = dot(a, w_gate, gate)
        up = dot(a, w_up, up)
        a_at += tl.cast(BLOCK_C, tl.int64) * stride_ac
        gate_at += BLOCK_C
    return gate, up


@triton.jit
def store_pre_and_act(
    gate,  # (BLOCK_R, BLOCK_N) fp32
    up,  # (BLOCK_R, BLOCK_N) fp32
    pre_at,  # (BLOCK_R,) where each row of pre begins, or None
    act_at,  # (BLOCK_R,) where each row of act begins, or None
    live,  # (BLOCK_R,) whether the row's pre is written
    act_stored,  # (BLOCK_R,) whether the row's act is written
    i,  # (BLOCK_N,) columns of I
    LIMIT: tl.constexpr,
    I: tl.constexpr,
    dtype: tl.constexpr,
):
    """Write a tile of pre and the act made from it, each where somebody wants it."""
    if act_at is not None:
        act = act_of(gate, up, LIMIT, dtype)
        tl.store(act_at[:, None] + i[None, :], narrow(act, dtype), mask=act_stored[:, None] & (i < I)[None, :])
    if pre_at is not None:
        mask = live[:, None] & (i < I)[None, :]
        tl.store(pre_at[:, None] + i[None, :], narrow(gate, dtype), mask=mask)
        tl.store(pre_at[:, None] + (I + i)[None, :], narrow(up, dtype), mask=mask)


@triton.jit(do_not_specialize=["E"])
def gate_up_swiglu_kernel(
    rows_ptr,  # (R, H) read, rows sorted by expert
    w_ptr,  # (E, 2I, H) read, unit last stride: first the rows of gate, then those of up
    pre_ptr,  # (R, 2, I) written where a row has an expert; or None
    act_ptr,  # (R, I) written where a row has an expert; or None
    row_start_ptr,  # (E+1,) int32, read
    E,
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

    Example: one expert, rows = [[1., 2.]], w = [[[1., 0.], [0., 1.]]], so gate is 1 and up 2: pre = [[[1.], [2.]]] and
    act = [[silu(1) * 2]] = [[1.4621]].
    """
    column_blocks = tl.cdiv(I, BLOCK_N)
    expert, row, end = rows_of_block(tl.program_id(0) // column_blocks, row_start_ptr, E, BLOCK_R, BLOCK_E)
    if row < end:
        r = row + tl.arange(0, BLOCK_R)
        i = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)

        a_at = rows_ptr + tl.minimum(r, end - 1).to(tl.int64) * H
        gate_at = w_ptr + expert.to(tl.int64) * stride_we + i.to(tl.int64) * stride_wn
        to_up = tl.cast(I, tl.int64) * stride_wn
        gate, up = multiply_gate_up(a_at, gate_at, to_up, 1, i < I, H, I % BLOCK_N == 0, BLOCK_R, BLOCK_N, BLOCK_C)

        pre_at = rows_at(pre_ptr, r, 2 * I)
        act_at = rows_at(act_ptr, r, I)
        store_pre_and_act(gate, up, pre_at, act_at, r < end, r < end, i, LIMIT, I, rows_ptr.dtype.element_ty)


# --8<-- [end:gate_up]


# --8<-- [start:dact]
@triton.jit
def chunks_of(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr):
    """A tile's columns from left to right, as a tuple of tiles of CHUNK columns each."""
    if COLUMNS > CHUNK:
        left, right = halves(tile, ROWS, COLUMNS)
        chunks = chunks_of(left, ROWS, COLUMNS // 2, CHUNK) + chunks_of(right, ROWS, COLUMNS // 2, CHUNK)
    else:
        chunks = (tile,)
    return chunks


@triton.jit
def inside(rows, i, I: tl.constexpr, FULL: tl.constexpr):
    """The mask of a tile with these rows (None: all) and columns i. A mask of rows alone takes far fewer registers."""
    mask = None
    if rows is None and not FULL:
        mask = (i < I)[None, :]
    elif rows is not None and FULL:  # every column exists
        mask = rows[:, None]
    elif rows is not None:
        mask = rows[:, None] & (i < I)[None, :]
    return mask


@triton.jit
def load_chunk(pre_at, i, live, I: tl.constexpr, FULL: tl.constexpr):
    """gate and up of some columns, as they lie in memory; zeros for rows that are not live."""
    mask = inside(live, i, I, FULL)
    gate = tl.load(pre_at[:, None] + i[None, :], mask=mask, other=0.0)
    return gate, tl.load(pre_at[:, None] + (I + i)[None, :], mask=mask, other=0.0)


@triton.jit
def swiglu_backward_epilogue(
    dact,  # (BLOCK_R, BLOCK_N) fp32, without the router weight
    pre_at,  # (BLOCK_R,) where each row of pre begins, read
    dpre_at,  # (BLOCK_R,) where each row of dpre begins, written; or None
    weighted_act_at,  # (BLOCK_R,) where each row of weighted act begins, written; or None
    weight,  # (BLOCK_R,) fp32
    live,  # (BLOCK_R,) whether this is a row of the tile's expert: the results of others are zeros
    stored,  # (BLOCK_R,) whether the row's results are written; None: all of them are
    first,  # the column of I where the tile begins
    LIMIT: tl.constexpr,
    I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Turn dact into dpre and weighted act, and return the tile's part of each row's <dact, act>.

    gate, up and their gradients would not fit into the registers beside a whole tile of dact. So CHUNK columns at a
    time are worked on, while the gate and up of the next are on their way.
    """
    CHUNKS: tl.constexpr = BLOCK_N // CHUNK
    FULL: tl.constexpr = I % BLOCK_N == 0
    dtype: tl.constexpr = pre_at.dtype.element_ty
    chunks = chunks_of(dact, BLOCK_R, BLOCK_N, CHUNK)
    gate, up = load_chunk(pre_at, first + tl.arange(0, CHUNK), live, I, FULL)
    part = tl.zeros((BLOCK_R,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        i = first + chunk * CHUNK + tl.arange(0, CHUNK)
        if chunk + 1 < CHUNKS:
            next_gate, next_up = load_chunk(pre_at, i + CHUNK, live, I, FULL)

        dact = tl.where(live[:, None] & (i < I)[None, :], chunks[chunk], 0.0)
        act, dgate, dup = act_and_dpre(dact, gate.to(tl.float32), up.to(tl.float32), weight[:, None], LIMIT, dtype)
        part += tl.sum(dact * act, 1)

        mask = inside(stored, i, I, FULL)
        if weighted_act_at is not None:
            tl.store(weighted_act_at[:, None] + i[None, :], narrow(weight[:, None] * act, dtype), mask=mask)
        if dpre_at is not None:
            tl.store(dpre_at[:, None] + i[None, :], narrow(dgate, dtype), mask=mask)
            tl.store(dpre_at[:, None] + (I + i)[None, :], narrow(dup, dtype), mask=mask)
        if chunk + 1 < CHUNKS:
            gate, up = next_gate, next_up
    return part


@triton.jit(do_not_specialize=["E"])
def dact_swiglu_kernel(
    dy_rows_ptr,  # (R, H) read, rows sorted by expert
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

    Example: one route of weight 0.5, dy = [[3.]], w = [[[1.]]], pre = [[[0.], [2.]]] (gate 0, up 2): dact is 3, sigmoid
    1/2, so dgate = 0.5*3 * 2 * 1/2 = 1.5, dup = 0, weighted act = 0 and <dact, act> = 0.
    """
    column_blocks = tl.cdiv(I, BLOCK_N)
    column_block = tl.program_id(0) % column_blocks
    expert, row, end = rows_of_block(tl.program_id(0) // column_blocks, row_start_ptr, E, BLOCK_R, BLOCK_E)
    if row < end:
        r = row + tl.arange(0, BLOCK_R)
        live = r < end
        i = column_block * BLOCK_N + tl.arange(0, BLOCK_N)

        a_at = dy_rows_ptr + tl.minimum(r, end - 1).to(tl.int64) * H
        w_at = w_ptr + expert.to(tl.int64) * stride_we + i
        dact = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        if dpre_ptr is not None or parts_ptr is not None:  # weighted act alone is made without it
            dact = multiply(a_at, w_at, 1, stride_wc, i < I, H, I % BLOCK_N == 0, BLOCK_R, BLOCK_N, BLOCK_C)

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


# --8<-- [start:dtopk_weights]
@triton.jit
def add_parts(
    parts_ptr,  # fp32, PARTS of each row, read at live routes; with BY_ROUTE of each route
    row_of_slot_ptr,
    dtopk_weights_ptr,
    route,
    inside,
    failed,
    PARTS: tl.constexpr,
    BY_ROUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the router weights' gradients of BLOCK routes: their parts, added in the order of the columns; NaN where
    what they are made of did not come."""
    row = tl.load(row_of_slot_ptr + route, mask=inside, other=-1)
    at = row.to(tl.int64) * PARTS
    if BY_ROUTE:
        at = route.to(tl.int64) * PARTS
    dweight = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        dweight += tl.load(parts_ptr + at + part, mask=row >= 0, other=0.0)
    dweight = nan_if(failed, dweight)
    tl.store(dtopk_weights_ptr + route, narrow(dweight, dtopk_weights_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def dtopk_weights_kernel(
    parts_ptr,  # (R, PARTS) fp32, read where a row has an expert
    row_of_slot_ptr,  # (T, K) int32, read
    dtopk_weights_ptr,  # (T, K) written, all of it
    R,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: one program for each block of routes. A masked route has no parts, and gets exactly 0.

    Example: parts = [[1., 2.], [3., 4.], [NaN, NaN]], row_of_slot = [[1, -1, 0]]: dtopk_weights = [[7., 0., 3.]].
    """
    route = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    add_parts(parts_ptr, row_of_slot_ptr, dtopk_weights_ptr, route, route < R, False, PARTS, False, BLOCK)


# --8<-- [end:dtopk_weights]


def gate_up_swiglu(
    rows: Tensor, w_gate_up: Tensor, plan: Plan, swiglu_limit: float | None, pre: bool, act: bool
) -> tuple[Tensor | None, Tensor | None]:
    """rows (R, H), w_gate_up (E, 2I, H) with unit last stride -> pre (R, 2, I) and act (R, I); None if not asked for.

    act is made from fp32 accumulators and rounded once. Rows without an expert are left unwritten.
    """
    R, H = rows.shape
    E, I = len(w_gate_up), w_gate_up.shape[1] // 2
    pre = rows.new_empty(R, 2, I) if pre else None
    act = rows.new_empty(R, I) if act else None
    tile = blocks_for(rows.dtype).gate_up
    if R:
        grid = (R // tile.BLOCK_R + E) * triton.cdiv(I, tile.BLOCK_N)
        gate_up_swiglu_kernel[(grid,)](
            rows,
            w_gate_up,
            pre,
            act,
            plan.row_start,
            E,
            *w_gate_up.stride()[:2],
            H=H,
            I=I,
            LIMIT=swiglu_limit,
            BLOCK_E=triton.next_power_of_2(E),
            **launch_options(tile),
        )
    return pre, act


def dact_swiglu(
    dy_rows: Tensor,
    w_down: Tensor,
    pre: Tensor,
    topk_weights: Tensor,
    plan: Plan,
    swiglu_limit: float | None,
    need: Need,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dy_rows (R, H), w_down (E, H, I) with unit last stride, pre (R, 2, I), topk_weights (T, K), any strides ->
    dpre (R, 2, I), weighted act (R, I), dtopk_weights (T, K); each None where `need` has no use for it.
    """
    R, H = dy_rows.shape
    E, _, I = w_down.shape
    tile = blocks_for(pre.dtype).dact
    parts_of_row = triton.cdiv(I, tile.BLOCK_N)
    dpre = torch.empty_like(pre) if need.dpre else None
    weighted_act = pre.new_empty(R, I) if need.dw_down else None
    parts = pre.new_empty(R, parts_of_row, dtype=torch.float32) if need.dtopk_weights else None
    if R:
        dact_swiglu_kernel[((R // tile.BLOCK_R + E) * parts_of_row,)](
            dy_rows,
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


def sum_parts(parts: Tensor, topk_weights: Tensor, plan: Plan) -> Tensor:
    """parts (R, blocks of I) fp32 -> dtopk_weights (T, K), of topk_weights' dtype: summed in order, rounded once."""
    R, parts_of_row = parts.shape
    dtopk_weights = topk_weights.new_empty(topk_weights.shape)  # contiguous, whatever the strides of topk_weights
    tile = blocks_for(topk_weights.dtype).elementwise
    BLOCK = tile.BLOCK_R * tile.BLOCK_N
    if R:
        dtopk_weights_kernel[(triton.cdiv(R, BLOCK),)](
            parts, plan.row_of_slot, dtopk_weights, R, PARTS=parts_of_row, BLOCK=BLOCK, num_warps=tile.num_warps
        )
    return dtopk_weights
