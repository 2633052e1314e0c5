"""Resident programs that multiply 8-bit codes: persistent.py's launches, over the same table, for precision "fp8".

A product of codes is exact, a sum of many is not: Hopper's fp8 instructions keep some 14 bits of a running sum
(DeepSeek-V3 Technical Report, section 3.3.2). So each step multiplies 128 of the contraction, as many as share a scale,
into a sum of its own, and

    acc += sum of a's codes * b's codes over these 128 * (scale of a * scale of b)

takes it, scaled, into fp32. Both sums live in registers, which is why tiles are 128 by 128: half of persistent.py's.
A tile is multiplied in parts of ROWS rows, one after the other, so that the sum of a step is that of a part. A program
then needs one warpgroup, and two share a processor: while one multiplies, the other adds its sums to its own.

What a kernel hands on is quantised where it is made: act by row, for down; dpre by row for dx and by column for
dw_gate_up; weighted act by column for dw_down. A tile of 128 columns holds whole groups of its rows, and a block of 128
rows whole groups of its columns. Rows that pad an expert's last block are zeros in columns. A program writes the tile,
in 16 bits, to memory of its own, and reads it back to quantise it. In registers the values of a row or of a column lie
in threads as the matrix instruction left them: to quantise them there by column took five times as long as a product.

Codes move in steps. So what is quantised has been rounded wherever the reference rounds it, though it never was in
memory: else some 4 % of act's codes would be neighbours of the reference's.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Need, Plan
from .blocks import Strips, launch_options, programs
from .fused_swiglu import chunks_of, inside, load_chunk, sum_parts
from .persistent import descriptor, load_gathered, load_matrix, look_up, look_up_expert
from .quantize import (
    ALONG,
    Quantised,
    QuantisedWeights,
    columns_in_blocks,
    dot_codes,
    quantise_block,
    rows_in_blocks,
)
from .signal import draw
from .swiglu import act_and_dpre, act_of
from .tile import INTERPRETED, narrow, rounded, rows_at, tokens_of_rows, weight_of_route
from .tile_table import TileTable


class InBlocks(NamedTuple):
    """What a kernel hands on: rows in blocks, quantised for the products that read them; None where nobody does.

    Attributes:
        rows: codes (parts, rows in blocks, columns): parts are 2, gate and up, in dpre, else 1.
        columns: codes (parts * columns, rows in blocks).
    """

    rows: Quantised | None
    columns: Quantised | None


DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def zeros(TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tuple of sums that nothing was added to yet."""
    sums = ()
    for _ in tl.static_range(TILES):
        sums += (tl.zeros((ROWS, COLUMNS), tl.float32),)
    return sums


@triton.jit
def rows_of_codes(
    codes_ptr,  # (T, C), with desc not used
    desc,  # (rows in blocks, C): the rows, one after another; or None: they are gathered
    scales_ptr,  # (T, groups); with desc (rows in blocks, groups)
    token_of_row_ptr,  # (R,) int32, read; with desc not used
    block,
    row,  # the block's first
    rows,  # how many of the block are live
    stride_codes,
    groups: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Of each ROWS rows of a block: where a step of their codes begins, if they are gathered, and their scales."""
    codes_at, scales_at = (), ()
    for i in tl.static_range(BLOCK_R // ROWS):
        if desc is None:
            token = tokens_of_rows(row + i * ROWS, rows - i * ROWS, token_of_row_ptr, ROWS)
            codes_at += (codes_ptr + token[:, None] * stride_codes + tl.arange(0, BLOCK_C)[None, :],)
        else:
            token = block.to(tl.int64) * BLOCK_R + i * ROWS + tl.arange(0, ROWS)
        scales_at += (scales_ptr + token * groups,)
    return codes_at, scales_at


# --8<-- [start:gate_up]
@triton.jit
def store_pre_and_scratch(
    gate,  # (ROWS, COLUMNS) fp32
    up,  # (ROWS, COLUMNS) fp32
    pre_at,  # (ROWS,) where each row of pre begins, written; or None
    scratch_at,  # (ROWS,) where each row of act begins, for these columns, written; or None
    live,  # (ROWS,) whether the row's pre is written
    first,  # the column of I where these begin
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    dtype: tl.constexpr,
):
    """Write pre, and the act made from it as it is when rounded; CHUNK columns at a time, for registers are short."""
    gate, up = narrow(gate, dtype), narrow(up, dtype)
    i = first + tl.arange(0, COLUMNS)
    if pre_at is not None:
        mask = live[:, None] & (i < I)[None, :]
        tl.store(pre_at[:, None] + i[None, :], gate, mask=mask)
        tl.store(pre_at[:, None] + (I + i)[None, :], up, mask=mask)
    if scratch_at is not None:
        gates, ups = chunks_of(gate, ROWS, COLUMNS, CHUNK), chunks_of(up, ROWS, COLUMNS, CHUNK)
        for chunk in tl.static_range(COLUMNS // CHUNK):
            act = act_of(gates[chunk].to(tl.float32), ups[chunk].to(tl.float32), LIMIT, dtype)
            at = scratch_at[:, None] + (chunk * CHUNK + tl.arange(0, CHUNK))[None, :]
            tl.store(at, narrow(act, dtype))


@triton.jit
def scaled_gate_up_strip(
    x_ptr,  # (T, H) codes, read; with x_desc not used
    x_desc,  # (rows in blocks, H) codes, read: the rows, one after another; or None: they are gathered
    x_scales_ptr,  # (T, groups of H), read; with x_desc (rows in blocks, groups of H)
    token_of_row_ptr,  # (R,) int32, read; with x_desc not used
    w_desc,  # (E, 2, I, H) codes, read
    w_scales_ptr,  # (E, 2, groups of I, groups of H), read
    pre_ptr,  # (R, 2, I) written at the block's live rows; or None
    act_ptr,  # (rows in blocks, I) codes, written in all of the block; or None
    act_scales_ptr,  # (groups of I, rows in blocks), likewise; or None
    scratch_ptr,  # (programs, BLOCK_R, BLOCK_N) of dtype, written, and read again
    block,
    expert,
    row,  # the block's first
    rows,  # how many of the block are live
    strip,
    stride_x,
    stride_act,
    stride_act_scales,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    dtype: tl.constexpr,  # of pre, and what act is rounded to before it is quantised
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """pre and act of a block of rows and a strip of column blocks of I.

    A block of 128 columns, which share the scales of their rows' act, is made in parts where all its sums for gate and
    up at once would not fit into registers. act waits in 16 bits, in memory of the program's own that stays in a cache.
    """
    tl.static_assert(BLOCK_N == ALONG and BLOCK_C == ALONG)
    PARTS: tl.constexpr = BLOCK_N // COLUMNS
    TILES: tl.constexpr = BLOCK_R // ROWS
    groups: tl.constexpr = (H + BLOCK_C - 1) // BLOCK_C
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    scratch_ptr += tl.program_id(0) * (BLOCK_R * BLOCK_N)
    x_at, x_scales_at = rows_of_codes(
        x_ptr, x_desc, x_scales_ptr, token_of_row_ptr, block, row, rows, stride_x, groups, BLOCK_R, ROWS, BLOCK_C
    )
    first = strip * STRIP
    for part in range(PARTS * first, PARTS * tl.minimum(first + STRIP, column_blocks)):
        column, at = part // PARTS, part * COLUMNS
        gate_scales_at = w_scales_ptr + (expert.to(tl.int64) * 2 * column_blocks + column) * groups
        up_scales_at = gate_scales_at + column_blocks * groups
        gates, ups = zeros(TILES, ROWS, COLUMNS), zeros(TILES, ROWS, COLUMNS)
        for group in range(groups):
            start = group * BLOCK_C
            gate_scale, up_scale = tl.load(gate_scales_at + group), tl.load(up_scales_at + group)
            w_gate = w_desc.load([expert, 0, at, start]).reshape(COLUMNS, BLOCK_C)
            w_up = w_desc.load([expert, 1, at, start]).reshape(COLUMNS, BLOCK_C)
            gate_sums, up_sums = (), ()
            for i in tl.static_range(TILES):
                x_scale = tl.load(x_scales_at[i] + group)
                if x_desc is None:
                    x = load_gathered(x_at[i] + start, start, H, BLOCK_C)
                else:
                    x = x_desc.load([block * BLOCK_R + i * ROWS, start])
                gate_sums += (gates[i] + dot_codes(x, w_gate.T) * (x_scale * gate_scale)[:, None],)
                up_sums += (ups[i] + dot_codes(x, w_up.T) * (x_scale * up_scale)[:, None],)
            gates, ups = gate_sums, up_sums

        tl.debug_barrier()  # all threads have read the act before
        for i in tl.static_range(TILES):
            r = i * ROWS + tl.arange(0, ROWS)
            store_pre_and_scratch(
                gates[i],
                ups[i],
                rows_at(pre_ptr, row + r, 2 * I),
                rows_at(scratch_ptr + part % PARTS * COLUMNS, r, BLOCK_N) if act_ptr is not None else None,
                r < rows,
                at,
                I,
                LIMIT,
                ROWS,
                COLUMNS,
                CHUNK,
                dtype,
            )
        if act_ptr is not None:
            if part % PARTS == PARTS - 1:
                tl.debug_barrier()  # all threads have written
                quantise_block(
                    scratch_ptr,
                    BLOCK_N,
                    act_ptr,
                    act_scales_ptr + tl.cast(column, tl.int64) * stride_act_scales,
                    None,
                    None,
                    block * BLOCK_R,
                    column * BLOCK_N,
                    stride_act,
                    0,
                    I,
                    BLOCK_R,
                    BLOCK_N,
                )


@triton.jit
def scaled_gate_up_kernel(
    x_desc,  # (rows in blocks, H) codes, read
    x_scales_ptr,  # (rows in blocks, groups of H), read
    w_desc,  # (E, 2, I, H) codes, read
    w_scales_ptr,  # (E, 2, groups of I, groups of H), read
    pre_ptr,  # (R, 2, I) written where a row has an expert; or None
    act_ptr,  # (rows in blocks, I) codes, written in every block that holds rows; or None
    act_scales_ptr,  # (groups of I, rows in blocks), likewise; or None
    scratch_ptr,  # (programs, BLOCK_R, BLOCK_N) of dtype, written, and read again
    row_blocks_ptr,  # (blocks, 3) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    ticket_ptr,  # int32, drawn from
    stride_act,
    stride_act_scales,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    dtype: tl.constexpr,  # of pre, and what act is rounded to before it is quantised
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid: as many programs as processors hold at once. A ticket is a row block and a strip of column blocks of I,
    strips fastest.

    Example: one expert, its one row is token 1, x = [[9., 9.], [1., 2.]] with scales of 1, w = [[[[1., 0.]], [[0.,
    1.]]]] with scales of 1 (gate) and 0.5 (up): pre = [[[1.], [1.]]], act has code 448 and scale silu(1) / 448.
    """
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    strips: tl.constexpr = (column_blocks + STRIP - 1) // STRIP
    tickets = tl.load(counters_ptr) * strips
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    block, expert, row, rows = look_up(ticket, tickets, strips, row_blocks_ptr)
    while (ticket < tickets) if INTERPRETED else tl.condition(ticket < tickets, disable_licm=True):
        next_block, next_expert, next_row, next_rows = look_up(following, tickets, strips, row_blocks_ptr)
        after = draw(ticket_ptr)

        scaled_gate_up_strip(
            None,
            x_desc,
            x_scales_ptr,
            None,
            w_desc,
            w_scales_ptr,
            pre_ptr,
            act_ptr,
            act_scales_ptr,
            scratch_ptr,
            block,
            expert,
            row,
            rows,
            ticket % strips,
            0,
            stride_act,
            stride_act_scales,
            H,
            I,
            LIMIT,
            dtype,
            BLOCK_R,
            ROWS,
            COLUMNS,
            BLOCK_N,
            BLOCK_C,
            STRIP,
            CHUNK,
        )

        ticket, following = following, after
        block, expert, row, rows = next_block, next_expert, next_row, next_rows


# --8<-- [end:gate_up]


# --8<-- [start:slots]
@triton.jit
def scaled_slot_gemm_tile(
    a_desc,  # (PARTS, rows in blocks, C) codes, read
    a_scales_ptr,  # (PARTS * groups of C, rows in blocks), read
    w_desc,  # (E * PARTS, N, C) codes, read
    w_scales_ptr,  # a scale for each expert, step of the contraction and group of N, read
    block,
    expert,
    column,
    stride_a_scales,
    stride_w_step,
    stride_w_column,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A block of rows times a block of columns of its expert's weight: a tuple of (ROWS, COLUMNS) fp32.

    The contraction has PARTS parts of C each: gate and up of dx, whose groups do not reach from one into the other.
    """
    tl.static_assert(ALONG % BLOCK_N == 0 and BLOCK_C == ALONG)
    groups: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    steps: tl.constexpr = PARTS * groups
    column_groups: tl.constexpr = (N + ALONG - 1) // ALONG
    TILES: tl.constexpr = BLOCK_R // ROWS
    a_scales_at = a_scales_ptr + block.to(tl.int64) * BLOCK_R + tl.arange(0, ROWS)
    w_scales_at = w_scales_ptr + expert.to(tl.int64) * (steps * column_groups)
    w_scales_at += column * BLOCK_N // ALONG * stride_w_column
    accs = zeros(TILES * (BLOCK_N // COLUMNS), ROWS, COLUMNS)
    for step in range(steps):
        part, start = step // groups, step % groups * BLOCK_C
        w_scale = tl.load(w_scales_at + step * stride_w_step)
        sums = ()
        for i in tl.static_range(TILES):
            a_scale = tl.load(a_scales_at + i * ROWS + tl.cast(step, tl.int64) * stride_a_scales)
            a = a_desc.load([part, block * BLOCK_R + i * ROWS, start]).reshape(ROWS, BLOCK_C)
            for j in tl.static_range(BLOCK_N // COLUMNS):
                n = column * BLOCK_N + j * COLUMNS
                w = load_matrix(w_desc, expert * PARTS + part, n, start, COLUMNS, BLOCK_C)
                acc = accs[i * (BLOCK_N // COLUMNS) + j]
                sums += (acc + dot_codes(a, w.T) * (a_scale * w_scale)[:, None],)
        accs = sums
    return accs


@triton.jit
def store_slots(
    accs, i: tl.constexpr, slots_at, live, first, N: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):
    """Store the i-th rows of a tile, PARTS sums (ROWS, COLUMNS) side by side, where these rows have slots. slots_at:
    (ROWS, 1) where these begin. first: the tile's first column."""
    for j in tl.static_range(PARTS):
        n = first + j * COLUMNS + tl.arange(0, COLUMNS)
        mask = live[:, None] & (n < N)[None, :]
        tl.store(slots_at + n[None, :], narrow(accs[i * PARTS + j], slots_at.dtype.element_ty), mask=mask)


@triton.jit
def scaled_slot_gemm_kernel(
    a_desc,  # (PARTS, rows in blocks, C) codes, read
    a_scales_ptr,  # (PARTS * groups of C, rows in blocks), read
    w_desc,  # (E * PARTS, N, C) codes, read
    w_scales_ptr,  # a scale for each expert, step of the contraction and group of N, read
    slots_ptr,  # (T, K, N) written at live routes
    row_blocks_ptr,  # (blocks, 3) int32, read
    route_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    ticket_ptr,  # int32, drawn from
    stride_a_scales,
    stride_w_step,
    stride_w_column,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Grid: one program a processor. A ticket is a row block and a strip of column blocks, strips fastest.

    Example: one expert, T = 1, K = 2, a = [[[1., 2.], [3., 4.]]] with scales [[1., 2.]] whose rows serve slots 1 and
    0, w = [[[1., 0.]]] with a scale of 1: slots = [[[6.], [1.]]].
    """
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    strips: tl.constexpr = (column_blocks + STRIP - 1) // STRIP
    tickets = tl.load(counters_ptr) * strips
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    block, expert, _, _ = look_up(ticket, tickets, strips, row_blocks_ptr)
    while (ticket < tickets) if INTERPRETED else tl.condition(ticket < tickets, disable_licm=True):
        next_block, next_expert, _, _ = look_up(following, tickets, strips, row_blocks_ptr)
        after = draw(ticket_ptr)

        first = ticket % strips * STRIP
        for column in range(first, tl.minimum(first + STRIP, column_blocks)):
            accs = scaled_slot_gemm_tile(
                a_desc,
                a_scales_ptr,
                w_desc,
                w_scales_ptr,
                block,
                expert,
                column,
                stride_a_scales,
                stride_w_step,
                stride_w_column,
                PARTS,
                C,
                N,
                BLOCK_R,
                ROWS,
                COLUMNS,
                BLOCK_N,
                BLOCK_C,
            )
            for i in tl.static_range(BLOCK_R // ROWS):
                r = block.to(tl.int64) * BLOCK_R + i * ROWS + tl.arange(0, ROWS)
                route = tl.load(route_in_blocks_ptr + r).to(tl.int64)  # not ahead: registers are short
                slots_at = slots_ptr + route[:, None] * N
                store_slots(accs, i, slots_at, route >= 0, column * BLOCK_N, N, COLUMNS, BLOCK_N // COLUMNS)

        ticket, following = following, after
        block, expert = next_block, next_expert


# --8<-- [end:slots]


# --8<-- [start:dact]
@triton.jit
def backward_of_chunk(
    dact, pre_at, weight, live, i, LIMIT: tl.constexpr, I: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """dact, act, dgate and dup of some columns, in fp32, each as it is when rounded to pre's dtype; zeros for rows that
    are not live."""
    dtype: tl.constexpr = pre_at.dtype.element_ty
    gate, up = load_chunk(pre_at, i, live, I, FULL)
    dact = tl.where(live[:, None] & (i < I)[None, :], dact.to(tl.float32), 0.0)
    act, dgate, dup = act_and_dpre(dact, gate.to(tl.float32), up.to(tl.float32), weight[:, None], LIMIT, dtype)
    act, dgate, dup = narrow(act, dtype), narrow(dgate, dtype), narrow(dup, dtype)
    return dact, act.to(tl.float32), dgate.to(tl.float32), dup.to(tl.float32)


@triton.jit
def scaled_backward_epilogue(
    dacts,  # (ROWS, COLUMNS) fp32 each, without the router weight: of some rows, then of the next
    part_of_rows: tl.constexpr,  # which rows
    pre_at,  # (ROWS,) where each row of pre begins, read
    scratch_at,  # (ROWS,) where each row of dgate, dup and weighted act begins, BLOCK_N each, written
    weight,  # (ROWS,) fp32
    live,  # (ROWS,) whether this is a row of the tile's expert: the results of others are zeros
    first,  # the column of I where the tile begins
    LIMIT: tl.constexpr,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Turn dact into dpre and weighted act, in 16 bits in the program's scratch, and return the tile's part of each
    row's <dact, act>. CHUNK columns at a time, as persistent.py does; columns beyond I become zeros."""
    dtype: tl.constexpr = pre_at.dtype.element_ty
    FULL: tl.constexpr = I % BLOCK_N == 0
    CHUNKS: tl.constexpr = BLOCK_N // CHUNK
    SIDE_BY_SIDE: tl.constexpr = BLOCK_N // COLUMNS
    chunks = ()
    for j in tl.static_range(SIDE_BY_SIDE):
        chunks = chunks + chunks_of(narrow(dacts[part_of_rows * SIDE_BY_SIDE + j], dtype), ROWS, COLUMNS, CHUNK)
    gate, up = load_chunk(pre_at, first + tl.arange(0, CHUNK), live, I, FULL)
    part = tl.zeros((ROWS,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        i = first + chunk * CHUNK + tl.arange(0, CHUNK)
        if chunk + 1 < CHUNKS:
            next_gate, next_up = load_chunk(pre_at, i + CHUNK, live, I, FULL)
        dact = tl.where(inside(live, i, I, FULL), chunks[chunk].to(tl.float32), 0.0)
        act, dgate, dup = act_and_dpre(dact, gate.to(tl.float32), up.to(tl.float32), weight[:, None], LIMIT, dtype)
        act = rounded(act, dtype)
        part += tl.sum(dact * act, 1)
        at = scratch_at[:, None] + (chunk * CHUNK + tl.arange(0, CHUNK))[None, :]
        tl.store(at, narrow(dgate, dtype))
        tl.store(at + BLOCK_N, narrow(dup, dtype))
        tl.store(at + 2 * BLOCK_N, narrow(weight[:, None] * act, dtype))
        if chunk + 1 < CHUNKS:
            gate, up = next_gate, next_up
    return part


@triton.jit
def scaled_dact_tile(
    dy_ptr,  # (T, H) codes, read; with dy_desc not used
    dy_desc,  # (rows in blocks, H) codes, read: the rows, one after another; or None: they are gathered
    dy_scales_ptr,  # (T, groups of H), read; with dy_desc (rows in blocks, groups of H)
    token_of_row_ptr,  # (R,) int32, read; with dy_desc not used
    w_desc,  # (E, I, H) codes, transposed, read
    w_scales_ptr,  # (E, groups of H, groups of I), read
    block,
    expert,
    row,  # the block's first
    rows,  # how many of the block are live
    column,
    stride_dy,
    H: tl.constexpr,
    I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """dact of a block of rows and a block of columns of I, without the router weight: (ROWS, COLUMNS) fp32 each."""
    tl.static_assert(BLOCK_R == ALONG and BLOCK_N == ALONG and BLOCK_C == ALONG)
    groups: tl.constexpr = (H + BLOCK_C - 1) // BLOCK_C
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = BLOCK_R // ROWS
    w_scales_at = w_scales_ptr + expert.to(tl.int64) * (groups * column_blocks) + column
    dy_at, dy_scales_at = rows_of_codes(
        dy_ptr, dy_desc, dy_scales_ptr, token_of_row_ptr, block, row, rows, stride_dy, groups, BLOCK_R, ROWS, BLOCK_C
    )
    dacts = zeros(TILES * (BLOCK_N // COLUMNS), ROWS, COLUMNS)
    for group in range(groups):
        start = group * BLOCK_C
        w_scale = tl.load(w_scales_at + group * column_blocks)
        sums = ()
        for i in tl.static_range(TILES):
            dy_scale = tl.load(dy_scales_at[i] + group)
            if dy_desc is None:
                dy = load_gathered(dy_at[i] + start, start, H, BLOCK_C)
            else:
                dy = dy_desc.load([block * BLOCK_R + i * ROWS, start])
            for j in tl.static_range(BLOCK_N // COLUMNS):
                w = load_matrix(w_desc, expert, column * BLOCK_N + j * COLUMNS, start, COLUMNS, BLOCK_C)
                dact = dacts[i * (BLOCK_N // COLUMNS) + j]
                sums += (dact + dot_codes(dy, w.T) * (dy_scale * w_scale)[:, None],)
        dacts = sums
    return dacts


@triton.jit
def quantise_backward(
    scratch_ptr,  # (BLOCK_R, 3 * BLOCK_N) read: dgate, dup and weighted act
    dpre_ptr,  # (2, rows in blocks, I) codes, written in all of the block; or None
    dpre_scales_ptr,  # (2 * groups of I, rows in blocks), likewise; or None
    dpre_columns_ptr,  # (2I, rows in blocks) codes, likewise; or None
    dpre_columns_scales_ptr,  # (blocks, 2I), likewise; or None
    act_columns_ptr,  # (I, rows in blocks) codes of weighted act, likewise; or None
    act_columns_scales_ptr,  # (blocks, I), likewise; or None
    block,
    column,
    stride_dpre,
    stride_columns,
    I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Quantise a tile of dpre both ways, and of weighted act by column."""
    groups: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    if dpre_ptr is not None or dpre_columns_ptr is not None:
        for part in range(2):
            to_codes = None
            to_scales = None
            to_columns = None
            to_columns_scales = None
            if dpre_ptr is not None:
                to_codes = dpre_ptr + part * tl.cast(stride_columns, tl.int64) * stride_dpre
                to_scales = dpre_scales_ptr + (part * groups + tl.cast(column, tl.int64)) * stride_columns
            if dpre_columns_ptr is not None:
                to_columns = dpre_columns_ptr + part * tl.cast(I, tl.int64) * stride_columns
                to_columns_scales = dpre_columns_scales_ptr + block.to(tl.int64) * (2 * I) + part * I
            quantise_block(
                scratch_ptr + part * BLOCK_N,
                3 * BLOCK_N,
                to_codes,
                to_scales,
                to_columns,
                to_columns_scales,
                block * BLOCK_R,
                column * BLOCK_N,
                stride_dpre,
                stride_columns,
                I,
                BLOCK_R,
                BLOCK_N,
            )
    if act_columns_ptr is not None:
        quantise_block(
            scratch_ptr + 2 * BLOCK_N,
            3 * BLOCK_N,
            None,
            None,
            act_columns_ptr,
            act_columns_scales_ptr + block.to(tl.int64) * I,
            block * BLOCK_R,
            column * BLOCK_N,
            0,
            stride_columns,
            I,
            BLOCK_R,
            BLOCK_N,
        )


@triton.jit
def scaled_dact_kernel(
    dy_desc,  # (rows in blocks, H) codes, read
    dy_scales_ptr,  # (rows in blocks, groups of H), read
    w_desc,  # (E, I, H) codes, transposed, read
    w_scales_ptr,  # (E, groups of H, groups of I), read
    pre_ptr,  # (R, 2, I) read
    topk_weights_ptr,  # (T, K) read, any strides
    dpre_ptr,  # (2, rows in blocks, I) codes, written in every block that holds rows; or None
    dpre_scales_ptr,  # (2 * groups of I, rows in blocks), likewise; or None
    dpre_columns_ptr,  # (2I, rows in blocks) codes, likewise; or None
    dpre_columns_scales_ptr,  # (blocks, 2I), likewise; or None
    act_columns_ptr,  # (I, rows in blocks) codes of weighted act, likewise; or None
    act_columns_scales_ptr,  # (blocks, I), likewise; or None
    parts_ptr,  # (R, groups of I) fp32, written where a row has an expert; or None
    scratch_ptr,  # (programs, BLOCK_R, 3 * BLOCK_N) of pre's dtype, written, and read again
    row_blocks_ptr,  # (blocks, 3) int32, read
    route_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    ticket_ptr,  # int32, drawn from
    stride_t,
    stride_k,
    stride_dpre,
    stride_columns,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Grid: as many programs as processors hold at once. A ticket is a row block and a strip of column blocks of I,
    strips fastest.

    Example: one route of token 1 and weight 0.5, dy = [[9.], [3.]] with scales of 1, w = [[[1.]]] with a scale of 2,
    pre = [[[0.], [2.]]] (gate 0, up 2): dact is 6, sigmoid 1/2, so dgate = 0.5*6 * 2 * 1/2 = 3, dup = 0, weighted act
    = 0 and <dact, act> = 0. Codes are 448 and 0, for dgate's row and its column; their scale is 3/448.
    """
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    strips: tl.constexpr = (column_blocks + STRIP - 1) // STRIP
    tickets = tl.load(counters_ptr) * strips
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    block, expert, row, rows = look_up(ticket, tickets, strips, row_blocks_ptr)
    while (ticket < tickets) if INTERPRETED else tl.condition(ticket < tickets, disable_licm=True):
        next_block, next_expert, next_row, next_rows = look_up(following, tickets, strips, row_blocks_ptr)
        after = draw(ticket_ptr)

        first = ticket % strips * STRIP
        for column in range(first, tl.minimum(first + STRIP, column_blocks)):
            dacts = zeros((BLOCK_R // ROWS) * (BLOCK_N // COLUMNS), ROWS, COLUMNS)
            if dpre_ptr is not None or dpre_columns_ptr is not None or parts_ptr is not None:
                dacts = scaled_dact_tile(
                    None,
                    dy_desc,
                    dy_scales_ptr,
                    None,
                    w_desc,
                    w_scales_ptr,
                    block,
                    expert,
                    row,
                    rows,
                    column,
                    0,
                    H,
                    I,
                    BLOCK_R,
                    ROWS,
                    COLUMNS,
                    BLOCK_N,
                    BLOCK_C,
                )
            its_scratch_ptr = scratch_ptr + tl.program_id(0) * (BLOCK_R * 3 * BLOCK_N)
            tl.debug_barrier()  # all threads have read what the tile before left
            for i in tl.static_range(BLOCK_R // ROWS):
                r = i * ROWS + tl.arange(0, ROWS)
                route = tl.load(route_in_blocks_ptr + block.to(tl.int64) * BLOCK_R + r).to(tl.int64)
                live = route >= 0
                part = scaled_backward_epilogue(
                    dacts,
                    i,
                    rows_at(pre_ptr, row + r, 2 * I),
                    rows_at(its_scratch_ptr, r, 3 * BLOCK_N),
                    weight_of_route(route, live, topk_weights_ptr, stride_t, stride_k, K),
                    live,
                    column * BLOCK_N,
                    LIMIT,
                    I,
                    ROWS,
                    COLUMNS,
                    BLOCK_N,
                    CHUNK,
                )
                if parts_ptr is not None:
                    tl.store(rows_at(parts_ptr, row + r, column_blocks) + column, part, mask=live)
            tl.debug_barrier()  # all threads have written
            quantise_backward(
                its_scratch_ptr,
                dpre_ptr,
                dpre_scales_ptr,
                dpre_columns_ptr,
                dpre_columns_scales_ptr,
                act_columns_ptr,
                act_columns_scales_ptr,
                block,
                column,
                stride_dpre,
                stride_columns,
                I,
                BLOCK_R,
                BLOCK_N,
            )

        ticket, following = following, after
        block, expert, row, rows = next_block, next_expert, next_row, next_rows


# --8<-- [end:dact]


# --8<-- [start:weight_grad]
@triton.jit
def scaled_weight_grad_tile(
    a_desc,  # (M, rows in blocks) codes, read; zeros where a block is padded
    a_scales_ptr,  # (blocks, M), read
    b_desc,  # (N, rows in blocks) codes, read; zeros where a block is padded
    b_scales_ptr,  # (blocks, N), read
    dw_ptr,  # (E, M, N) written at the tile, any strides
    expert,
    block,  # the expert's first
    rows,
    tile,
    stride_dwe,
    stride_dwm,
    stride_dwn,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of one expert's weight gradient, summed over its blocks in order; without rows it is zeros, and with fewer
    rows than none NaN, as in persistent.py."""
    tl.static_assert(BLOCK_R == ALONG)
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = BLOCK_M // ROWS
    first_m, first_n = tile // n_blocks * BLOCK_M, tile % n_blocks * BLOCK_N
    SIDE_BY_SIDE: tl.constexpr = BLOCK_N // COLUMNS
    m, n = first_m + tl.arange(0, ROWS), first_n + tl.arange(0, COLUMNS)
    accs = zeros(TILES * SIDE_BY_SIDE, ROWS, COLUMNS)
    for step in range(block, block + tl.cdiv(rows, BLOCK_R)):
        sums = ()
        for i in tl.static_range(TILES):
            a_scales_at = a_scales_ptr + tl.cast(step, tl.int64) * M + i * ROWS + m
            a_scale = tl.load(a_scales_at, mask=i * ROWS + m < M, other=0.0)
            a = a_desc.load([first_m + i * ROWS, step * BLOCK_R])
            for j in tl.static_range(SIDE_BY_SIDE):
                b_scales_at = b_scales_ptr + tl.cast(step, tl.int64) * N + j * COLUMNS + n
                b_scale = tl.load(b_scales_at, mask=j * COLUMNS + n < N, other=0.0)
                b = b_desc.load([first_n + j * COLUMNS, step * BLOCK_R])
                sums += (accs[i * SIDE_BY_SIDE + j] + dot_codes(a, b.T) * a_scale[:, None] * b_scale[None, :],)
        accs = sums
    to_dw = dw_ptr + expert.to(tl.int64) * stride_dwe
    for i in tl.static_range(TILES):
        for j in tl.static_range(SIDE_BY_SIDE):
            acc = accs[i * SIDE_BY_SIDE + j]
            if rows < 0:
                acc = tl.full((ROWS, COLUMNS), float("nan"), tl.float32)
            its_m, its_n = m + i * ROWS, n + j * COLUMNS
            at = to_dw + its_m.to(tl.int64)[:, None] * stride_dwm + its_n.to(tl.int64)[None, :] * stride_dwn
            mask = (its_m < M)[:, None] & (its_n < N)[None, :]
            tl.store(at, narrow(acc, dw_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["E"])
def scaled_weight_grad_kernel(
    a_desc,  # (M, rows in blocks) codes, read; zeros where a block is padded
    a_scales_ptr,  # (blocks, M), read
    b_desc,  # (N, rows in blocks) codes, read; zeros where a block is padded
    b_scales_ptr,  # (blocks, N), read
    dw_ptr,  # (E, M, N) written, all of it, any strides
    longest_first_ptr,  # (E, 3) int32, read
    ticket_ptr,  # int32, drawn from
    E,
    stride_dwe,
    stride_dwm,
    stride_dwn,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid: one program a processor. A ticket is an expert, longest first, and a block of M and of N, N fastest. Who
    draws it alone sums that tile, over the expert's blocks in order; without rows it takes no step and stores zeros.

    Example: two experts, the first with two rows, a = [[1., 2., 0., ...]] with a scale of 1, b = [[3., 5., 0., ...],
    [4., 6., 0., ...]] with scales [[1., 2.]]: dw = [[[13., 32.]], [[0., 0.]]].
    """
    tiles: tl.constexpr = ((M + BLOCK_M - 1) // BLOCK_M) * ((N + BLOCK_N - 1) // BLOCK_N)
    tickets = E * tiles
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    expert, block, rows = look_up_expert(ticket, tickets, tiles, longest_first_ptr)
    while (ticket < tickets) if INTERPRETED else tl.condition(ticket < tickets, disable_licm=True):
        next_expert, next_block, next_rows = look_up_expert(following, tickets, tiles, longest_first_ptr)
        after = draw(ticket_ptr)

        scaled_weight_grad_tile(
            a_desc,
            a_scales_ptr,
            b_desc,
            b_scales_ptr,
            dw_ptr,
            expert,
            block,
            rows,
            ticket % tiles,
            stride_dwe,
            stride_dwm,
            stride_dwn,
            M,
            N,
            BLOCK_M,
            BLOCK_N,
            BLOCK_R,
            ROWS,
            COLUMNS,
        )

        ticket, following = following, after
        expert, block, rows = next_expert, next_block, next_rows


# --8<-- [end:weight_grad]


def gate_up_swiglu(
    x: Quantised,
    w_gate_up: QuantisedWeights,
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
    pre = x.scales.new_empty(R, 2, I, dtype=x.dtype) if pre else None
    act = InBlocks(rows_in_blocks(1, I, x.dtype, table), None) if act else None
    tile = table.tiles.gate_up
    if R:
        scaled_gate_up_kernel[(programs(tile),)](
            descriptor(x.codes, tile.ROWS, tile.BLOCK_C),
            x.scales,
            descriptor(w_gate_up.codes, 1, 1, tile.COLUMNS, tile.BLOCK_C),
            w_gate_up.scales,
            pre,
            *codes_and_scales(act.rows if act else None),
            scratch(tile, table.tiles.BLOCK_R, like=x.scales, dtype=x.dtype),
            table.row_blocks,
            table.counters,
            table.ticket("gate_up"),
            act.rows.codes.stride(1) if act else 0,
            len(table.token_in_blocks),
            H=H,
            I=I,
            LIMIT=swiglu_limit,
            dtype=DTYPES[x.dtype],
            BLOCK_R=table.tiles.BLOCK_R,
            **launch_options(tile),
        )
    return pre, act


def down(act: InBlocks, w_down: QuantisedWeights, plan: Plan, table: TileTable) -> Tensor:
    """slots[t, k] = act[r] @ w_down[e]^T for the row r of that slot: act by row, w_down (E, H, I) -> slots (T, K, H),
    rounded once. Masked routes' slots are not written.
    """
    w, steps = w_down.codes, w_down.scales.shape[2]
    return slot_gemm(act.rows, w, w_down.scales, (1, steps), plan, table, "down", table.tiles.down)


def dx_slots(dpre: InBlocks, w_gate_up: QuantisedWeights, plan: Plan, table: TileTable) -> Tensor:
    """slots[t, k] = dpre[r] @ w_gate_up[e] for the row r of that slot: dpre by row, w_gate_up (E, 2, I, H), transposed
    -> slots (T, K, H), rounded once. Masked routes' slots are not written.
    """
    w, columns = w_gate_up.transposed.flatten(0, 1), w_gate_up.scales.shape[3]
    return slot_gemm(dpre.rows, w, w_gate_up.scales, (columns, 1), plan, table, "dx", table.tiles.dx)


def slot_gemm(
    a: Quantised,
    w: Tensor,
    w_scales: Tensor,
    w_scales_strides: tuple[int, int],
    plan: Plan,
    table: TileTable,
    kernel: str,
    tile: Strips,
) -> Tensor:
    """What `down` and `dx_slots` share. w_scales_strides: from step to step, and from column block to column block.
    kernel: whose ticket to draw."""
    T, K = plan.row_of_slot.shape
    _, N, C = w.shape
    slots = a.scales.new_empty(T, K, N, dtype=a.dtype)
    if slots.numel():
        scaled_slot_gemm_kernel[(programs(tile),)](
            descriptor(a.codes, 1, tile.ROWS, tile.BLOCK_C),
            a.scales,
            descriptor(w, 1, tile.COLUMNS, tile.BLOCK_C),
            w_scales,
            slots,
            table.row_blocks,
            table.route_in_blocks,
            table.counters,
            table.ticket(kernel),
            len(table.token_in_blocks),
            *w_scales_strides,
            PARTS=len(a.codes),
            C=C,
            N=N,
            BLOCK_R=table.tiles.BLOCK_R,
            **launch_options(tile),
        )
    return slots


def dact_swiglu(
    dy: Quantised,
    w_down: QuantisedWeights,
    pre: Tensor,
    topk_weights: Tensor,
    plan: Plan,
    table: TileTable,
    swiglu_limit: float | None,
    need: Need,
) -> tuple[InBlocks | None, InBlocks | None, Tensor | None]:
    """dy (T, H), w_down (E, H, I), transposed, pre (R, 2, I), topk_weights (T, K), any strides -> dpre by row and by
    column, weighted act by column, dtopk_weights (T, K); each None where `need` has no use for it.
    """
    (R, _, I), H = pre.shape, dy.codes.shape[1]
    tile = table.tiles.dact
    by_row = rows_in_blocks(2, I, pre.dtype, table) if need.dx else None
    by_column = columns_in_blocks(2 * I, pre.dtype, table) if need.dw_gate_up else None
    act_by_column = columns_in_blocks(I, pre.dtype, table) if need.dw_down else None
    parts = None
    if need.dtopk_weights:
        parts = pre.new_empty(R, triton.cdiv(I, tile.BLOCK_N), dtype=torch.float32)
    if R:
        scaled_dact_kernel[(programs(tile),)](
            descriptor(dy.codes, tile.ROWS, tile.BLOCK_C),
            dy.scales,
            descriptor(w_down.transposed, 1, tile.COLUMNS, tile.BLOCK_C),
            w_down.scales,
            pre,
            topk_weights,
            *codes_and_scales(by_row),
            *codes_and_scales(by_column),
            *codes_and_scales(act_by_column),
            parts,
            scratch(tile, 3 * table.tiles.BLOCK_R, like=pre, dtype=pre.dtype),
            table.row_blocks,
            table.route_in_blocks,
            table.counters,
            table.ticket("dact"),
            *topk_weights.stride(),
            by_row.codes.stride(1) if need.dx else 0,
            len(table.token_in_blocks),
            K=topk_weights.shape[1],
            H=H,
            I=I,
            LIMIT=swiglu_limit,
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
    scaled_weight_grad_kernel[(programs(tile),)](
        descriptor(a.columns.codes, tile.ROWS, tile.BLOCK_R),
        a.columns.scales,
        descriptor(tokens.codes, tile.COLUMNS, tile.BLOCK_R),
        tokens.scales,
        dw,
        table.longest_first,
        table.ticket(kernel),
        E,
        *dw.stride(),
        M=M,
        N=N,
        **launch_options(tile),
    )
    return dw


def scratch(tile: Strips, rows: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Uninitialised memory for each program of a launch: so many rows of a tile. They are read where they were written,
    and so seldom leave a cache."""
    return like.new_empty(programs(tile), rows, tile.BLOCK_N, dtype=dtype)


def codes_and_scales(q: Quantised | None) -> tuple[Tensor | None, Tensor | None]:
    """As two arguments of a kernel."""
    return (q.codes, q.scales) if q else (None, None)
