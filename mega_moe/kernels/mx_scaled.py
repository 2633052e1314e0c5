"""Resident programs that multiply MX codes: persistent.py's launches, over the same table, for precision "mxfp8".

A power of two scales without rounding, so nothing has to be added up apart as in scaled.py: where a GPU has an
instruction for it, scales go to the matrix unit beside the codes, 32 of the contraction to a scale. Where it has none,
codes become bf16 values in registers, and those are multiplied (see `dot_scaled`): the same products, and work that
precision "bf16" does not have. Tiles are persistent.py's, as is the order in which programs draw them.

What a kernel hands on is quantised where it is made, 32 values to a scale: act by row, for down; dpre by row for dx and
by column for dw_gate_up; weighted act by column for dw_down. So few fit into any part of a tile, and dact's epilogue
has both kinds of blocks whole in every chunk of its columns. Rows that pad an expert's last block are zeros in columns.

Codes move in steps. So what is quantised has been rounded wherever the reference rounds it, though it never was in
memory: else some codes would be neighbours of the reference's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Need, Plan
from .blocks import Strips, launch_options, programs
from .fused_swiglu import chunks_of, sum_parts
from .mx_quantize import (
    ALONG,
    columns_in_blocks,
    dot_scaled,
    load_scales,
    mx_store_columns,
    mx_store_rows,
    rows_in_blocks,
)
from .persistent import descriptor, load_gathered, load_matrix, look_up, look_up_expert, look_up_rows
from .quantize import Quantised
from .scaled import DTYPES, InBlocks, backward_of_chunk, codes_and_scales
from .signal import draw
from .swiglu import act_of
from .tile import halves, narrow, rows_at, weight_of_route
from .tile_table import TileTable


# --8<-- [start:gate_up]
@triton.jit
def mx_gate_up_kernel(
    x_ptr,  # (T, H) codes, read
    x_scales_ptr,  # (T, ceil(H / 32)), read
    w_desc,  # (E, 2, I, H) codes, read
    w_scales_ptr,  # (E, 2, I, ceil(H / 32)), read
    pre_ptr,  # (R, 2, I) written where a row has an expert; or None
    act_ptr,  # (rows in blocks, I) codes, written in every block that holds rows; or None
    act_scales_ptr,  # (rows in blocks, ceil(I / 32)), likewise; or None
    row_blocks_ptr,  # (blocks, 3) int32, read
    token_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    ticket_ptr,  # int32, drawn from
    stride_x,
    stride_x_scales,
    stride_w_scales,
    stride_act,
    stride_act_scales,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    dtype: tl.constexpr,  # of pre, and what act is rounded to before it is quantised
    NATIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Grid: one program a processor. A ticket is a row block and a strip of column blocks of I, strips fastest.

    Example: one expert, its one row is token 1, x = [[9., 9.], [1., 2.]] with bytes of 127, w = [[[[1., 0.]], [[0.,
    1.]]]] with bytes of 127 (gate) and 126 (up): pre = [[[1.], [1.]]], silu(1) = 0.7311 has code 384 and byte 118.
    """
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    strips: tl.constexpr = (column_blocks + STRIP - 1) // STRIP
    i_block = tl.arange(0, BLOCK_R)
    i_both = tl.arange(0, 2 * BLOCK_N)  # of gate's columns, then of up's
    tickets = tl.load(counters_ptr) * strips
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    block, expert, row, rows = look_up(ticket, tickets, strips, row_blocks_ptr)
    while ticket < tickets:
        token = look_up_rows(ticket, tickets, strips, token_in_blocks_ptr, BLOCK_R)  # not ahead: registers are short
        next_block, next_expert, next_row, next_rows = look_up(following, tickets, strips, row_blocks_ptr)
        after = draw(ticket_ptr)

        x_at = x_ptr + token[:, None] * stride_x + tl.arange(0, BLOCK_C)[None, :]
        x_scales_at = x_scales_ptr + token * stride_x_scales
        first = ticket % strips * STRIP
        for column in tl.range(first, tl.minimum(first + STRIP, column_blocks), flatten=FLATTEN):
            i_w = column * BLOCK_N + i_both % BLOCK_N
            w_row = (expert * 2 + i_both // BLOCK_N).to(tl.int64) * I + i_w
            w_scales_at = w_scales_ptr + w_row * stride_w_scales
            gate_up = tl.zeros((BLOCK_R, 2 * BLOCK_N), tl.float32)
            for start in range(0, H, BLOCK_C):
                x = load_gathered(x_at + start, start, H, BLOCK_C)
                x_scales = load_scales(x_scales_at, None, start, H, BLOCK_C)
                w = w_desc.load([expert, 0, column * BLOCK_N, start]).reshape(2 * BLOCK_N, BLOCK_C)
                w_scales = load_scales(w_scales_at, rows_inside(i_w, I, BLOCK_N), start, H, BLOCK_C)
                gate_up = dot_scaled(x, x_scales, w, w_scales, gate_up, NATIVE)

            gate, up = halves(narrow(gate_up, dtype), BLOCK_R, 2 * BLOCK_N)
            i = column * BLOCK_N + tl.arange(0, BLOCK_N)
            if pre_ptr is not None:
                pre_at = rows_at(pre_ptr, row + i_block, 2 * I)[:, None] + i[None, :]
                mask = (i_block < rows)[:, None] & (i < I)[None, :]
                tl.store(pre_at, gate, mask=mask)
                tl.store(pre_at + I, up, mask=mask)
            if act_ptr is not None:  # down reads whole blocks
                act = narrow(act_of(gate.to(tl.float32), up.to(tl.float32), LIMIT, dtype), dtype).to(tl.float32)
                r = block.to(tl.int64) * BLOCK_R + i_block
                act_at, act_scales_at = act_ptr + r * stride_act, act_scales_ptr + r * stride_act_scales
                mx_store_rows(act_at, act_scales_at, act, None, column * BLOCK_N, I, BLOCK_N, I % BLOCK_N == 0)

        ticket, following = following, after
        block, expert, row, rows = next_block, next_expert, next_row, next_rows


@triton.jit
def rows_inside(n, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which rows n of a matrix of N there are; None, which costs nothing, where blocks never end beyond it."""
    inside = None
    if N % BLOCK_N != 0:
        inside = n < N
    return inside


# --8<-- [end:gate_up]


# --8<-- [start:slots]
@triton.jit
def mx_slot_gemm_kernel(
    a_desc,  # (PARTS, rows in blocks, C) codes, read
    a_scales_ptr,  # (PARTS, rows in blocks, ceil(C / 32)), read
    w_desc,  # (E * PARTS, N, C) codes, read
    w_scales_ptr,  # (E * PARTS, N, ceil(C / 32)), read
    slots_ptr,  # (T, K, N) written at live routes
    row_blocks_ptr,  # (blocks, 3) int32, read
    route_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    ticket_ptr,  # int32, drawn from
    stride_a_part,
    stride_a_scales,
    stride_w_matrix,
    stride_w_scales,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Grid: one program a processor. A ticket is a row block and a strip of column blocks, strips fastest.

    The contraction has PARTS parts of C each: gate and up of dx, whose blocks do not reach from one into the other.

    Example: one expert, T = 1, K = 2, a = [[[1., 2.], [3., 4.]]] with bytes 127 and 128, whose rows serve slots 1 and
    0, w = [[[1., 0.]]] with byte 127: slots = [[[6.], [1.]]].
    """
    steps: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    strips: tl.constexpr = (column_blocks + STRIP - 1) // STRIP
    i_block = tl.arange(0, BLOCK_R)
    tickets = tl.load(counters_ptr) * strips
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    block, expert, _, _ = look_up(ticket, tickets, strips, row_blocks_ptr)
    while ticket < tickets:
        route = look_up_rows(ticket, tickets, strips, route_in_blocks_ptr, BLOCK_R)  # not needed before the epilogue
        next_block, next_expert, _, _ = look_up(following, tickets, strips, row_blocks_ptr)
        after = draw(ticket_ptr)

        a_scales_at = rows_at(a_scales_ptr, block * BLOCK_R + i_block, stride_a_scales)
        first = ticket % strips * STRIP
        for column in tl.range(first, tl.minimum(first + STRIP, column_blocks), flatten=FLATTEN):
            n = column * BLOCK_N + tl.arange(0, BLOCK_N)
            w_scales_at = rows_at(w_scales_ptr, n, stride_w_scales)
            acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
            for step in range(PARTS * steps):
                part, start = step // steps, step % steps * BLOCK_C
                a = a_desc.load([part, block * BLOCK_R, start]).reshape(BLOCK_R, BLOCK_C)
                matrix = expert * PARTS + part
                w = load_matrix(w_desc, matrix, column * BLOCK_N, start, BLOCK_N, BLOCK_C)
                a_part = a_scales_at + tl.cast(part, tl.int64) * stride_a_part
                w_part = w_scales_at + matrix.to(tl.int64) * stride_w_matrix
                a_scales = load_scales(a_part, None, start, C, BLOCK_C)
                w_scales = load_scales(w_part, rows_inside(n, N, BLOCK_N), start, C, BLOCK_C)
                acc = dot_scaled(a, a_scales, w, w_scales, acc, NATIVE)

            mask = (route >= 0)[:, None] & (n < N)[None, :]
            to_slots = slots_ptr + route[:, None] * N + n[None, :]
            tl.store(to_slots, narrow(acc, slots_ptr.dtype.element_ty), mask=mask)

        ticket, following = following, after
        block, expert = next_block, next_expert


# --8<-- [end:slots]


# --8<-- [start:dact]
@triton.jit
def mx_backward_epilogue(
    dact,  # (BLOCK_R, BLOCK_N) fp32, without the router weight
    pre_at,  # (BLOCK_R,) where each row of pre begins, read
    dpre_at,  # (BLOCK_R,) where each row of dgate's codes begins, written; or None
    dpre_scales_at,  # (BLOCK_R,) where each row of dgate's scales begins, written; or None
    to_dup,  # from a code of dgate to that of dup
    to_dup_scales,  # from a scale of dgate to that of dup
    dpre_columns_at,  # where the block begins in the codes of dpre by column, written; or None
    dpre_columns_scales_at,  # where it begins in their scales, written; or None
    act_columns_at,  # where the block begins in the codes of weighted act by column, written; or None
    act_columns_scales_at,  # where it begins in their scales, written; or None
    weight,  # (BLOCK_R,) fp32
    live,  # (BLOCK_R,) whether this is a row of the tile's expert: the results of others are zeros
    first,  # the column of I where the tile begins
    stride_columns,
    stride_columns_scales,
    LIMIT: tl.constexpr,
    I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Turn dact into dpre and weighted act, quantised, and return the tile's part of each row's <dact, act>.

    CHUNK columns at a time, as persistent.py does: a chunk holds whole blocks of rows and whole blocks of columns.
    """
    dtype: tl.constexpr = pre_at.dtype.element_ty
    chunks = chunks_of(narrow(dact, dtype), BLOCK_R, BLOCK_N, CHUNK)
    part = tl.zeros((BLOCK_R,), tl.float32)
    for chunk in tl.static_range(BLOCK_N // CHUNK):
        at = first + chunk * CHUNK
        i = at + tl.arange(0, CHUNK)
        dact, act, dgate, dup = backward_of_chunk(chunks[chunk], pre_at, weight, live, i, LIMIT, I, I % BLOCK_N == 0)
        part += tl.sum(dact * act, 1)
        if act_columns_at is not None:
            weighted_act = narrow(weight[:, None] * act, dtype).to(tl.float32)
            mx_store_columns(
                act_columns_at, act_columns_scales_at, weighted_act, i, stride_columns, stride_columns_scales, I
            )
        if dpre_columns_at is not None:
            codes, scales = dpre_columns_at, dpre_columns_scales_at
            mx_store_columns(codes, scales, dgate, i, stride_columns, stride_columns_scales, I)
            codes += tl.cast(I, tl.int64) * stride_columns
            scales += tl.cast(I, tl.int64) * stride_columns_scales
            mx_store_columns(codes, scales, dup, i, stride_columns, stride_columns_scales, I)
        if dpre_at is not None:
            # Chunks of the last tile may lie behind I altogether, also where CHUNK divides it.
            mx_store_rows(dpre_at, dpre_scales_at, dgate, None, at, I, CHUNK, I % BLOCK_N == 0)
            mx_store_rows(dpre_at + to_dup, dpre_scales_at + to_dup_scales, dup, None, at, I, CHUNK, I % BLOCK_N == 0)
    return part


@triton.jit
def mx_dact_kernel(
    dy_ptr,  # (T, H) codes, read
    dy_scales_ptr,  # (T, ceil(H / 32)), read
    w_desc,  # (E, I, H) codes, transposed, read
    w_scales_ptr,  # (E, I, ceil(H / 32)), read
    pre_ptr,  # (R, 2, I) read
    topk_weights_ptr,  # (T, K) read, any strides
    dpre_ptr,  # (2, rows in blocks, I) codes, written in every block that holds rows; or None
    dpre_scales_ptr,  # (2, rows in blocks, ceil(I / 32)), likewise; or None
    dpre_columns_ptr,  # (2I, rows in blocks) codes, likewise; or None
    dpre_columns_scales_ptr,  # (2I, rows in blocks / 32), likewise; or None
    act_columns_ptr,  # (I, rows in blocks) codes of weighted act, likewise; or None
    act_columns_scales_ptr,  # (I, rows in blocks / 32), likewise; or None
    parts_ptr,  # (R, blocks of I) fp32, written where a row has an expert; or None
    row_blocks_ptr,  # (blocks, 3) int32, read
    token_in_blocks_ptr,  # (rows in blocks,) int32, read
    route_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    ticket_ptr,  # int32, drawn from
    stride_dy,
    stride_dy_scales,
    stride_w_scales,
    stride_t,
    stride_k,
    stride_dpre,
    stride_dpre_scales,
    stride_columns,
    stride_columns_scales,
    rows_in_blocks,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Grid: one program a processor. A ticket is a row block and a strip of column blocks of I, strips fastest.

    Example: one route of token 1 and weight 0.5, dy = [[9.], [3.]] with bytes of 127, w = [[[1.]]] with byte 128,
    pre = [[[0.], [2.]]] (gate 0, up 2): dact is 6, sigmoid 1/2, so dgate = 0.5*6 * 2 * 1/2 = 3, dup = 0, weighted act
    = 0 and <dact, act> = 0. Codes are 384 and 0, for dgate's row and its column; their byte is 120, 2^-7.
    """
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    strips: tl.constexpr = (column_blocks + STRIP - 1) // STRIP
    i_block = tl.arange(0, BLOCK_R)
    tickets = tl.load(counters_ptr) * strips
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    block, expert, row, _ = look_up(ticket, tickets, strips, row_blocks_ptr)
    while ticket < tickets:
        token = look_up_rows(ticket, tickets, strips, token_in_blocks_ptr, BLOCK_R)  # not ahead: registers are short
        route = look_up_rows(ticket, tickets, strips, route_in_blocks_ptr, BLOCK_R)
        next_block, next_expert, next_row, _ = look_up(following, tickets, strips, row_blocks_ptr)
        after = draw(ticket_ptr)

        live = route >= 0
        weight = weight_of_route(route, live, topk_weights_ptr, stride_t, stride_k, K)
        dy_at = dy_ptr + token[:, None] * stride_dy + tl.arange(0, BLOCK_C)[None, :]
        dy_scales_at = dy_scales_ptr + token * stride_dy_scales
        r_in_blocks = block * BLOCK_R + i_block
        first = ticket % strips * STRIP
        for column in tl.range(first, tl.minimum(first + STRIP, column_blocks), flatten=FLATTEN):
            i = column * BLOCK_N + tl.arange(0, BLOCK_N)
            w_scales_at = rows_at(w_scales_ptr, expert.to(tl.int64) * I + i, stride_w_scales)
            dact = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
            if dpre_ptr is not None or dpre_columns_ptr is not None or parts_ptr is not None:
                for start in range(0, H, BLOCK_C):
                    dy = load_gathered(dy_at + start, start, H, BLOCK_C)
                    dy_scales = load_scales(dy_scales_at, None, start, H, BLOCK_C)
                    w = load_matrix(w_desc, expert, column * BLOCK_N, start, BLOCK_N, BLOCK_C)
                    w_scales = load_scales(w_scales_at, rows_inside(i, I, BLOCK_N), start, H, BLOCK_C)
                    dact = dot_scaled(dy, dy_scales, w, w_scales, dact, NATIVE)

            part = mx_backward_epilogue(
                dact,
                rows_at(pre_ptr, row + i_block, 2 * I),
                rows_at(dpre_ptr, r_in_blocks, stride_dpre),
                rows_at(dpre_scales_ptr, r_in_blocks, stride_dpre_scales),
                tl.cast(rows_in_blocks, tl.int64) * stride_dpre,
                tl.cast(rows_in_blocks, tl.int64) * stride_dpre_scales,
                rows_at(dpre_columns_ptr, block, BLOCK_R),
                rows_at(dpre_columns_scales_ptr, block, BLOCK_R // ALONG),
                rows_at(act_columns_ptr, block, BLOCK_R),
                rows_at(act_columns_scales_ptr, block, BLOCK_R // ALONG),
                weight,
                live,
                column * BLOCK_N,
                stride_columns,
                stride_columns_scales,
                LIMIT,
                I,
                BLOCK_R,
                BLOCK_N,
                CHUNK,
            )
            if parts_ptr is not None:
                tl.store(parts_ptr + (row + i_block).to(tl.int64) * column_blocks + column, part, mask=live)

        ticket, following = following, after
        block, expert, row = next_block, next_expert, next_row


# --8<-- [end:dact]


# --8<-- [start:weight_grad]
@triton.jit(do_not_specialize=["E"])
def mx_weight_grad_kernel(
    a_desc,  # (M, rows in blocks) codes, read; zeros where a block is padded
    a_scales_ptr,  # (M, rows in blocks / 32), read
    b_desc,  # (N, rows in blocks) codes, read; zeros where a block is padded
    b_scales_ptr,  # (N, rows in blocks / 32), read
    dw_ptr,  # (E, M, N) written, all of it, any strides
    longest_first_ptr,  # (E, 3) int32, read
    ticket_ptr,  # int32, drawn from
    E,
    stride_a_scales,
    stride_b_scales,
    stride_dwe,
    stride_dwm,
    stride_dwn,
    M: tl.constexpr,
    N: tl.constexpr,
    ROWS_OF_BLOCK: tl.constexpr,  # of a's and b's blocks
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid: one program a processor. A ticket is an expert, longest first, and a block of M and of N, N fastest. Who
    draws it alone sums that tile, over the expert's rows in order; without rows it takes no step and stores zeros.

    Example: two experts, the first with two rows, a = [[1., 2., 0., ...]] with byte 127, b = [[3., 5., 0., ...],
    [4., 6., 0., ...]] with bytes 127 and 128: dw = [[[13., 32.]], [[0., 0.]]].
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tiles: tl.constexpr = ((M + BLOCK_M - 1) // BLOCK_M) * n_blocks
    tickets = E * tiles
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    expert, block, rows = look_up_expert(ticket, tickets, tiles, longest_first_ptr)
    while ticket < tickets:
        next_expert, next_block, next_rows = look_up_expert(following, tickets, tiles, longest_first_ptr)
        after = draw(ticket_ptr)

        first_m, first_n = ticket % tiles // n_blocks * BLOCK_M, ticket % n_blocks * BLOCK_N
        m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
        first_row = block * ROWS_OF_BLOCK
        a_scales_at = rows_at(a_scales_ptr, m, stride_a_scales) + first_row // ALONG
        b_scales_at = rows_at(b_scales_ptr, n, stride_b_scales) + first_row // ALONG
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, rows, BLOCK_R):
            a = a_desc.load([first_m, first_row + start])
            b = b_desc.load([first_n, first_row + start])
            a_scales = load_scales(a_scales_at, rows_inside(m, M, BLOCK_M), start, ROWS_OF_BLOCK, BLOCK_R)
            b_scales = load_scales(b_scales_at, rows_inside(n, N, BLOCK_N), start, ROWS_OF_BLOCK, BLOCK_R)
            acc = dot_scaled(a, a_scales, b, b_scales, acc, NATIVE)

        mask = (m < M)[:, None] & (n < N)[None, :]
        to_dw = dw_ptr + expert.to(tl.int64) * stride_dwe
        to_dw += m.to(tl.int64)[:, None] * stride_dwm + n.to(tl.int64)[None, :] * stride_dwn
        tl.store(to_dw, narrow(acc, dw_ptr.dtype.element_ty), mask=mask)

        ticket, following = following, after
        expert, block, rows = next_expert, next_block, next_rows


# --8<-- [end:weight_grad]


def gate_up_swiglu(
    x: Quantised,
    w_gate_up: Quantised,
    plan: Plan,
    table: TileTable,
    swiglu_limit: float | None,
    pre: bool,
    act: bool,
) -> tuple[Tensor | None, InBlocks | None]:
    """x (T, H), w_gate_up (E, 2, I, H) -> pre (R, 2, I) of x's dtype, and act, rounded to it and quantised by row; None
    if not asked for."""
    _, _, I, H = w_gate_up.codes.shape
    R = len(plan.token_of_row)
    pre = x.codes.new_empty(R, 2, I, dtype=x.dtype) if pre else None
    act = InBlocks(rows_in_blocks(1, I, x.dtype, table), None) if act else None
    tile = table.tiles.gate_up
    if R:
        mx_gate_up_kernel[(programs(tile),)](
            x.codes,
            x.scales,
            descriptor(w_gate_up.codes, 1, 2, tile.BLOCK_N, tile.BLOCK_C),
            w_gate_up.scales,
            pre,
            *codes_and_scales(act.rows if act else None),
            table.row_blocks,
            table.token_in_blocks,
            table.counters,
            table.ticket("gate_up"),
            x.codes.stride(0),
            x.scales.stride(0),
            w_gate_up.scales.stride(2),
            act.rows.codes.stride(1) if act else 0,
            act.rows.scales.stride(1) if act else 0,
            H=H,
            I=I,
            LIMIT=swiglu_limit,
            dtype=DTYPES[x.dtype],
            NATIVE=table.tiles.native,
            BLOCK_R=table.tiles.BLOCK_R,
            **launch_options(tile),
        )
    return pre, act


def down(act: InBlocks, w_down: Quantised, plan: Plan, table: TileTable) -> Tensor:
    """slots[t, k] = act[r] @ w_down[e]^T for the row r of that slot: act by row, w_down (E, H, I) -> slots (T, K, H),
    rounded once. Masked routes' slots are not written.
    """
    return slot_gemm(act.rows, w_down.codes, w_down.scales, plan, table, "down", table.tiles.down)


def dx_slots(dpre: InBlocks, w_gate_up: Quantised, plan: Plan, table: TileTable) -> Tensor:
    """slots[t, k] = dpre[r] @ w_gate_up[e] for the row r of that slot: dpre by row, w_gate_up transposed, (E, 2, H, I)
    -> slots (T, K, H), rounded once. Masked routes' slots are not written.
    """
    codes, scales = (t.flatten(0, 1) for t in (w_gate_up.codes, w_gate_up.scales))
    return slot_gemm(dpre.rows, codes, scales, plan, table, "dx", table.tiles.dx)


def slot_gemm(
    a: Quantised, w: Tensor, w_scales: Tensor, plan: Plan, table: TileTable, kernel: str, tile: Strips
) -> Tensor:
    """What `down` and `dx_slots` share. kernel: whose ticket to draw."""
    T, K = plan.row_of_slot.shape
    _, N, C = w.shape
    slots = w.new_empty(T, K, N, dtype=a.dtype)
    if slots.numel():
        mx_slot_gemm_kernel[(programs(tile),)](
            descriptor(a.codes, 1, table.tiles.BLOCK_R, tile.BLOCK_C),
            a.scales,
            descriptor(w, 1, tile.BLOCK_N, tile.BLOCK_C),
            w_scales,
            slots,
            table.row_blocks,
            table.route_in_blocks,
            table.counters,
            table.ticket(kernel),
            *a.scales.stride()[:2],
            *w_scales.stride()[:2],
            PARTS=len(a.codes),
            C=C,
            N=N,
            NATIVE=table.tiles.native,
            BLOCK_R=table.tiles.BLOCK_R,
            **launch_options(tile),
        )
    return slots


def dact_swiglu(
    dy: Quantised,
    w_down: Quantised,
    pre: Tensor,
    topk_weights: Tensor,
    plan: Plan,
    table: TileTable,
    swiglu_limit: float | None,
    need: Need,
) -> tuple[InBlocks | None, InBlocks | None, Tensor | None]:
    """dy (T, H), w_down transposed, (E, I, H), pre (R, 2, I), topk_weights (T, K), any strides -> dpre by row and by
    column, weighted act by column, dtopk_weights (T, K); each None where `need` has no use for it.
    """
    (R, _, I), H = pre.shape, dy.codes.shape[1]
    tile = table.tiles.dact
    by_row = rows_in_blocks(2, I, pre.dtype, table) if need.dx else None
    by_column = columns_in_blocks(2 * I, pre.dtype, table) if need.dw_gate_up else None
    act_by_column = columns_in_blocks(I, pre.dtype, table) if need.dw_down else None
    columns = by_column or act_by_column
    parts = None
    if need.dtopk_weights:
        parts = pre.new_empty(R, triton.cdiv(I, tile.BLOCK_N), dtype=torch.float32)
    if R:
        mx_dact_kernel[(programs(tile),)](
            dy.codes,
            dy.scales,
            descriptor(w_down.codes, 1, tile.BLOCK_N, tile.BLOCK_C),
            w_down.scales,
            pre,
            topk_weights,
            *codes_and_scales(by_row),
            *codes_and_scales(by_column),
            *codes_and_scales(act_by_column),
            parts,
            table.row_blocks,
            table.token_in_blocks,
            table.route_in_blocks,
            table.counters,
            table.ticket("dact"),
            dy.codes.stride(0),
            dy.scales.stride(0),
            w_down.scales.stride(1),
            *topk_weights.stride(),
            by_row.codes.stride(1) if need.dx else 0,
            by_row.scales.stride(1) if need.dx else 0,
            columns.codes.stride(0) if columns else 0,
            columns.scales.stride(0) if columns else 0,
            len(table.token_in_blocks),
            K=topk_weights.shape[1],
            H=H,
            I=I,
            LIMIT=swiglu_limit,
            NATIVE=table.tiles.native,
            BLOCK_R=table.tiles.BLOCK_R,
            **launch_options(tile),
        )
    return (
        InBlocks(by_row, by_column) if need.dpre else None,
        InBlocks(None, act_by_column) if need.dw_down else None,
        sum_parts(parts, topk_weights, plan) if need.dtopk_weights else None,
    )


def weight_grad(a: InBlocks, tokens: Quantised, table: TileTable, kernel: str, dw: Tensor) -> Tensor:
    """dw[e] = sum over the rows r of e of a[r]^T tokens[token_of_row[r]]: both by column, (M, rows in blocks) and
    (N, rows in blocks). kernel: "dw_down" or "dw_gate_up". Writes all of dw (E, M, N), any strides.
    """
    E, M, N = dw.shape
    tile = getattr(table.tiles, kernel)
    mx_weight_grad_kernel[(programs(tile),)](
        descriptor(a.columns.codes, tile.BLOCK_M, tile.BLOCK_R),
        a.columns.scales,
        descriptor(tokens.codes, tile.BLOCK_N, tile.BLOCK_R),
        tokens.scales,
        dw,
        table.longest_first,
        table.ticket(kernel),
        E,
        a.columns.scales.stride(0),
        tokens.scales.stride(0),
        *dw.stride(),
        M=M,
        N=N,
        ROWS_OF_BLOCK=table.tiles.BLOCK_R,
        NATIVE=table.tiles.native,
        **launch_options(tile),
    )
    return dw
