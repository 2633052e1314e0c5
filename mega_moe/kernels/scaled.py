"""Resident programs that multiply 8-bit codes: persistent.py's launches, over the same table, for precision "fp8".

A product of codes is exact, a sum of many is not: Hopper's fp8 instructions keep some 14 bits of a running sum
(DeepSeek-V3 Technical Report, section 3.3.2). So each step multiplies 128 of the contraction, as many as share a scale,
into a sum of its own, and

    acc += sum of a's codes * b's codes over these 128 * (scale of a * scale of b)

takes it, scaled, into fp32. Both sums live in registers, which is why tiles are 128 by 128: half of persistent.py's.

What a kernel hands on is quantised where it is made: act by row, for down; dpre by row for dx and by column for
dw_gate_up; weighted act by column for dw_down. A tile of 128 columns holds whole groups of its rows, and a block of 128
rows whole groups of its columns. Rows that pad an expert's last block are zeros in columns.

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
from .fused_swiglu import chunks_of, load_chunk, sum_parts
from .persistent import descriptor, load_gathered, load_matrix, look_up, look_up_expert, look_up_rows
from .quantize import (
    ALONG,
    Quantised,
    QuantisedWeights,
    columns_in_blocks,
    dot_codes,
    encode,
    magnitude,
    rows_in_blocks,
    scale_of,
    store_columns,
)
from .signal import draw
from .swiglu import act_and_dpre, act_of
from .tile import halves, narrow, rows_at, weight_of_route
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


# --8<-- [start:gate_up]
@triton.jit
def gate_up_half(
    x_at,  # (BLOCK_R, BLOCK_C) where the first step of each row's codes begins; with x_desc not used
    x_desc,  # (rows in blocks, H) codes, read: the rows, one after another; or None: they are gathered
    x_scales_at,  # (BLOCK_R,) where each row's scales begin
    w_desc,  # (E, 2, I, H) codes, read
    w_scales_at,  # where the scales of gate begin, for these columns
    to_up,  # from there to those of up
    pre_at,  # (BLOCK_R,) where each row of pre begins, written; or None
    live,  # (BLOCK_R,) whether the row's pre is written
    block,
    expert,
    first,  # of the columns of I
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    dtype: tl.constexpr,
):
    """pre of BLOCK_N columns of I is stored, act returned, rounded to dtype."""
    groups: tl.constexpr = (H + BLOCK_C - 1) // BLOCK_C
    gate, up = tl.zeros((BLOCK_R, BLOCK_N), tl.float32), tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    x_scale, gate_scale, up_scale = tl.load(x_scales_at), tl.load(w_scales_at), tl.load(w_scales_at + to_up)
    for group in range(groups):
        following = tl.minimum(group + 1, groups - 1)  # its scales are on their way while codes are multiplied
        next_x_scale = tl.load(x_scales_at + following)
        next_gate_scale, next_up_scale = tl.load(w_scales_at + following), tl.load(w_scales_at + to_up + following)
        start = group * BLOCK_C
        if x_desc is None:
            x = load_gathered(x_at + start, start, H, BLOCK_C)
        else:
            x = x_desc.load([block * BLOCK_R, start])
        w = w_desc.load([expert, 0, first, start]).reshape(2 * BLOCK_N, BLOCK_C)
        gate_sum, up_sum = halves(dot_codes(x, w.T), BLOCK_R, 2 * BLOCK_N)
        gate += gate_sum * (x_scale * gate_scale)[:, None]
        up += up_sum * (x_scale * up_scale)[:, None]
        x_scale, gate_scale, up_scale = next_x_scale, next_gate_scale, next_up_scale

    gate, up = narrow(gate, dtype), narrow(up, dtype)
    i = first + tl.arange(0, BLOCK_N)
    if pre_at is not None:
        mask = live[:, None] & (i < I)[None, :]
        tl.store(pre_at[:, None] + i[None, :], gate, mask=mask)
        tl.store(pre_at[:, None] + (I + i)[None, :], up, mask=mask)
    return narrow(act_of(gate.to(tl.float32), up.to(tl.float32), LIMIT, dtype), dtype)


@triton.jit
def scaled_gate_up_strip(
    x_at,  # (BLOCK_R, BLOCK_C) where the first step of each row's codes begins; with x_desc not used
    x_desc,  # (rows in blocks, H) codes, read: the rows, one after another; or None: they are gathered
    x_scales_at,  # (BLOCK_R,) where each row's scales begin
    w_desc,  # (E, 2, I, H) codes, read
    w_scales_ptr,  # (E, 2, groups of I, groups of H), read
    pre_ptr,  # (R, 2, I) written at the block's live rows; or None
    act_ptr,  # (rows in blocks, I) codes, written in all of the block; or None
    act_scales_ptr,  # (groups of I, rows in blocks), likewise; or None
    block,
    expert,
    row,  # the block's first
    rows,  # how many of the block are live
    strip,
    stride_act,
    stride_act_scales,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    dtype: tl.constexpr,  # of pre, and what act is rounded to before it is quantised
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """pre and act of a block of rows and a strip of column blocks of I.

    A block of 128 columns, which share the scales of their rows' act, is made in two halves: both its sums for gate and
    up at once would take all registers. The act of the first half waits in 16 bits for that of the second.
    """
    tl.static_assert(BLOCK_N == ALONG and BLOCK_C == ALONG)
    HALF: tl.constexpr = BLOCK_N // 2
    groups: tl.constexpr = (H + BLOCK_C - 1) // BLOCK_C
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    i_block = tl.arange(0, BLOCK_R)
    pre_at = rows_at(pre_ptr, row + i_block, 2 * I)
    live = i_block < rows
    first = strip * STRIP
    for column in tl.range(first, tl.minimum(first + STRIP, column_blocks), flatten=FLATTEN):
        w_scales_at = w_scales_ptr + (expert.to(tl.int64) * 2 * column_blocks + column) * groups
        to_up: tl.constexpr = column_blocks * groups
        at = column * BLOCK_N
        left, right = tl.zeros((BLOCK_R, HALF), dtype), tl.zeros((BLOCK_R, HALF), dtype)
        for half in range(2):
            left = right
            right = gate_up_half(
                x_at,
                x_desc,
                x_scales_at,
                w_desc,
                w_scales_at,
                to_up,
                pre_at,
                live,
                block,
                expert,
                at + half * HALF,
                H,
                I,
                LIMIT,
                BLOCK_R,
                HALF,
                BLOCK_C,
                dtype,
            )

        if act_ptr is not None:
            left, right = left.to(tl.float32), right.to(tl.float32)
            scale = scale_of(tl.maximum(tl.max(magnitude(left), 1), tl.max(magnitude(right), 1)))
            reciprocal = tl.div_rn(1.0, scale)[:, None]
            r = block.to(tl.int64) * BLOCK_R + i_block
            act_at, i = (act_ptr + r * stride_act)[:, None], at + tl.arange(0, HALF)[None, :]
            tl.store(act_at + i, encode(left, reciprocal), mask=i < I)
            tl.store(act_at + HALF + i, encode(right, reciprocal), mask=i + HALF < I)
            tl.store(act_scales_ptr + tl.cast(column, tl.int64) * stride_act_scales + r, scale)


@triton.jit
def scaled_gate_up_kernel(
    x_ptr,  # (T, H) codes, read
    x_scales_ptr,  # (T, groups of H), read
    w_desc,  # (E, 2, I, H) codes, read
    w_scales_ptr,  # (E, 2, groups of I, groups of H), read
    pre_ptr,  # (R, 2, I) written where a row has an expert; or None
    act_ptr,  # (rows in blocks, I) codes, written in every block that holds rows; or None
    act_scales_ptr,  # (groups of I, rows in blocks), likewise; or None
    row_blocks_ptr,  # (blocks, 3) int32, read
    token_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    ticket_ptr,  # int32, drawn from
    stride_x,
    stride_act,
    stride_act_scales,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    dtype: tl.constexpr,  # of pre, and what act is rounded to before it is quantised
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Grid: one program a processor. A ticket is a row block and a strip of column blocks of I, strips fastest.

    Example: one expert, its one row is token 1, x = [[9., 9.], [1., 2.]] with scales of 1, w = [[[[1., 0.]], [[0.,
    1.]]]] with scales of 1 (gate) and 0.5 (up): pre = [[[1.], [1.]]], act has code 448 and scale silu(1) / 448.
    """
    groups: tl.constexpr = (H + BLOCK_C - 1) // BLOCK_C
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    strips: tl.constexpr = (column_blocks + STRIP - 1) // STRIP
    tickets = tl.load(counters_ptr) * strips
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    block, expert, row, rows = look_up(ticket, tickets, strips, row_blocks_ptr)
    while ticket < tickets:
        token = look_up_rows(ticket, tickets, strips, token_in_blocks_ptr, BLOCK_R)  # not ahead: registers are short
        next_block, next_expert, next_row, next_rows = look_up(following, tickets, strips, row_blocks_ptr)
        after = draw(ticket_ptr)

        scaled_gate_up_strip(
            x_ptr + token[:, None] * stride_x + tl.arange(0, BLOCK_C)[None, :],
            None,
            x_scales_ptr + token * groups,
            w_desc,
            w_scales_ptr,
            pre_ptr,
            act_ptr,
            act_scales_ptr,
            block,
            expert,
            row,
            rows,
            ticket % strips,
            stride_act,
            stride_act_scales,
            H,
            I,
            LIMIT,
            dtype,
            BLOCK_R,
            BLOCK_N,
            BLOCK_C,
            STRIP,
            FLATTEN,
        )

        ticket, following = following, after
        block, expert, row, rows = next_block, next_expert, next_row, next_rows


# --8<-- [end:gate_up]


# --8<-- [start:slots]
@triton.jit
def scaled_slot_gemm_strip(
    a_desc,  # (PARTS, rows in blocks, C) codes, read
    a_scales_ptr,  # (PARTS * groups of C, rows in blocks), read
    w_desc,  # (E * PARTS, N, C) codes, read
    w_scales_ptr,  # a scale for each expert, step of the contraction and group of N, read
    slots_at,  # (BLOCK_R, 1) where the slot of each row begins, written
    live,  # (BLOCK_R,) whether the row has one
    block,
    expert,
    strip,
    stride_a_scales,
    stride_w_step,
    stride_w_column,
    PARTS: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """The slots of a block of rows, in a strip of column blocks of N.

    The contraction has PARTS parts of C each: gate and up of dx, whose groups do not reach from one into the other.
    """
    tl.static_assert(ALONG % BLOCK_N == 0 and BLOCK_C == ALONG)
    groups: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    steps: tl.constexpr = PARTS * groups
    column_groups: tl.constexpr = (N + ALONG - 1) // ALONG
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    a_scales_at = a_scales_ptr + block.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    first = strip * STRIP
    for column in tl.range(first, tl.minimum(first + STRIP, column_blocks), flatten=FLATTEN):
        w_scales_at = w_scales_ptr + expert.to(tl.int64) * (steps * column_groups)
        w_scales_at += column * BLOCK_N // ALONG * stride_w_column
        acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        a_scale, w_scale = tl.load(a_scales_at), tl.load(w_scales_at)
        for step in range(steps):
            next_step = tl.minimum(step + 1, steps - 1)
            next_a_scale = tl.load(a_scales_at + tl.cast(next_step, tl.int64) * stride_a_scales)
            next_w_scale = tl.load(w_scales_at + next_step * stride_w_step)
            part, start = step // groups, step % groups * BLOCK_C
            a = a_desc.load([part, block * BLOCK_R, start]).reshape(BLOCK_R, BLOCK_C)
            w = load_matrix(w_desc, expert * PARTS + part, column * BLOCK_N, start, BLOCK_N, BLOCK_C)
            acc += dot_codes(a, w.T) * (a_scale * w_scale)[:, None]
            a_scale, w_scale = next_a_scale, next_w_scale

        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (n < N)[None, :]
        tl.store(slots_at + n[None, :], narrow(acc, slots_at.dtype.element_ty), mask=mask)


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
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
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
    while ticket < tickets:
        route = look_up_rows(ticket, tickets, strips, route_in_blocks_ptr, BLOCK_R)  # not needed before the epilogue
        next_block, next_expert, _, _ = look_up(following, tickets, strips, row_blocks_ptr)
        after = draw(ticket_ptr)

        scaled_slot_gemm_strip(
            a_desc,
            a_scales_ptr,
            w_desc,
            w_scales_ptr,
            slots_ptr + route[:, None] * N,
            route >= 0,
            block,
            expert,
            ticket % strips,
            stride_a_scales,
            stride_w_step,
            stride_w_column,
            PARTS,
            C,
            N,
            BLOCK_R,
            BLOCK_N,
            BLOCK_C,
            STRIP,
            FLATTEN,
        )

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
    dact,  # (BLOCK_R, BLOCK_N) fp32, without the router weight
    pre_at,  # (BLOCK_R,) where each row of pre begins, read
    dpre_ptr,  # (2, rows in blocks, I) codes, written; or None
    dpre_scales_ptr,  # (2 * groups of I, rows in blocks), written; or None
    dpre_columns_ptr,  # (2I, rows in blocks) codes, written; or None
    dpre_columns_scales_ptr,  # (blocks, 2I), written; or None
    act_columns_ptr,  # (I, rows in blocks) codes of weighted act, written; or None
    act_columns_scales_ptr,  # (blocks, I), written; or None
    weight,  # (BLOCK_R,) fp32
    live,  # (BLOCK_R,) whether this is a row of the tile's expert: the results of others are zeros
    block,  # int64
    column,
    stride_dpre,
    stride_columns,  # rows in blocks
    LIMIT: tl.constexpr,
    I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Turn dact into dpre and weighted act, quantised, and return the tile's part of each row's <dact, act>.

    CHUNK columns at a time, as persistent.py does. A chunk holds whole groups of columns, but the scales of rows are
    known when all of it has been seen. To keep dpre until then takes more registers than there are; so it is made a
    second time, from the same pre.
    """
    CHUNKS: tl.constexpr = BLOCK_N // CHUNK
    dtype: tl.constexpr = pre_at.dtype.element_ty
    chunks = chunks_of(narrow(dact, dtype), BLOCK_R, BLOCK_N, CHUNK)
    first = column * BLOCK_N
    part = tl.zeros((BLOCK_R,), tl.float32)
    dgate_amax, dup_amax = tl.zeros((BLOCK_R,), tl.float32), tl.zeros((BLOCK_R,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        i = first + chunk * CHUNK + tl.arange(0, CHUNK)
        dact, act, dgate, dup = backward_of_chunk(chunks[chunk], pre_at, weight, live, i, LIMIT, I, I % BLOCK_N == 0)
        part += tl.sum(dact * act, 1)
        dgate_amax = tl.maximum(dgate_amax, tl.max(magnitude(dgate), 1))
        dup_amax = tl.maximum(dup_amax, tl.max(magnitude(dup), 1))
        if act_columns_ptr is not None:
            weighted_act, to_scales = narrow(weight[:, None] * act, dtype), act_columns_scales_ptr + block * I
            to_codes = act_columns_ptr + block * BLOCK_R
            store_columns(to_codes, to_scales, weighted_act.to(tl.float32), i, stride_columns, I)
        if dpre_columns_ptr is not None:
            to_codes, to_scales = dpre_columns_ptr + block * BLOCK_R, dpre_columns_scales_ptr + block * (2 * I)
            store_columns(to_codes, to_scales, dgate, i, stride_columns, I)
            store_columns(to_codes + tl.cast(I, tl.int64) * stride_columns, to_scales + I, dup, i, stride_columns, I)

    if dpre_ptr is not None:
        r = block * BLOCK_R + tl.arange(0, BLOCK_R)
        dgate_scale, dup_scale = scale_of(dgate_amax), scale_of(dup_amax)
        to_scales = dpre_scales_ptr + tl.cast(column, tl.int64) * stride_columns + r
        groups: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
        tl.store(to_scales, dgate_scale)
        tl.store(to_scales + tl.cast(groups, tl.int64) * stride_columns, dup_scale)
        by_dgate, by_dup = tl.div_rn(1.0, dgate_scale)[:, None], tl.div_rn(1.0, dup_scale)[:, None]
        for chunk in tl.static_range(CHUNKS):
            i = first + chunk * CHUNK + tl.arange(0, CHUNK)
            _, _, dgate, dup = backward_of_chunk(chunks[chunk], pre_at, weight, live, i, LIMIT, I, I % BLOCK_N == 0)
            at = dpre_ptr + (r * stride_dpre)[:, None] + i[None, :]
            tl.store(at, encode(dgate, by_dgate), mask=(i < I)[None, :])
            tl.store(at + tl.cast(stride_columns, tl.int64) * stride_dpre, encode(dup, by_dup), mask=(i < I)[None, :])
    return part


@triton.jit
def scaled_dact_strip(
    dy_at,  # (BLOCK_R, BLOCK_C) where the first step of each row's codes begins; with dy_desc not used
    dy_desc,  # (rows in blocks, H) codes, read: the rows, one after another; or None: they are gathered
    dy_scales_at,  # (BLOCK_R,) where each row's scales begin
    w_desc,  # (E, I, H) codes, transposed, read
    w_scales_ptr,  # (E, groups of H, groups of I), read
    pre_ptr,  # (R, 2, I) read
    dpre_ptr,  # (2, rows in blocks, I) codes, written in all of the block; or None
    dpre_scales_ptr,  # (2 * groups of I, rows in blocks), likewise; or None
    dpre_columns_ptr,  # (2I, rows in blocks) codes, likewise; or None
    dpre_columns_scales_ptr,  # (blocks, 2I), likewise; or None
    act_columns_ptr,  # (I, rows in blocks) codes of weighted act, likewise; or None
    act_columns_scales_ptr,  # (blocks, I), likewise; or None
    parts_at,  # (BLOCK_R,) where the parts of each row begin, fp32, written; or None
    weight,  # (BLOCK_R,) fp32, of each row's route
    live,  # (BLOCK_R,) whether it has one
    block,
    expert,
    row,  # the block's first
    strip,
    stride_dpre,
    stride_columns,  # rows in blocks
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """What dact of a block of rows and a strip of column blocks of I turns into; dact itself is not stored."""
    tl.static_assert(BLOCK_R == ALONG and BLOCK_N == ALONG and BLOCK_C == ALONG)
    groups: tl.constexpr = (H + BLOCK_C - 1) // BLOCK_C
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    first = strip * STRIP
    for column in tl.range(first, tl.minimum(first + STRIP, column_blocks), flatten=FLATTEN):
        dact = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        if dpre_ptr is not None or dpre_columns_ptr is not None or parts_at is not None:
            w_scales_at = w_scales_ptr + expert.to(tl.int64) * (groups * column_blocks) + column
            dy_scale, w_scale = tl.load(dy_scales_at), tl.load(w_scales_at)
            for group in range(groups):
                next_group = tl.minimum(group + 1, groups - 1)
                next_dy_scale = tl.load(dy_scales_at + next_group)
                next_w_scale = tl.load(w_scales_at + next_group * column_blocks)
                start = group * BLOCK_C
                if dy_desc is None:
                    dy = load_gathered(dy_at + start, start, H, BLOCK_C)
                else:
                    dy = dy_desc.load([block * BLOCK_R, start])
                w = load_matrix(w_desc, expert, column * BLOCK_N, start, BLOCK_N, BLOCK_C)
                dact += dot_codes(dy, w.T) * (dy_scale * w_scale)[:, None]
                dy_scale, w_scale = next_dy_scale, next_w_scale

        part = scaled_backward_epilogue(
            dact,
            rows_at(pre_ptr, row + tl.arange(0, BLOCK_R), 2 * I),
            dpre_ptr,
            dpre_scales_ptr,
            dpre_columns_ptr,
            dpre_columns_scales_ptr,
            act_columns_ptr,
            act_columns_scales_ptr,
            weight,
            live,
            block.to(tl.int64),
            column,
            stride_dpre,
            stride_columns,
            LIMIT,
            I,
            BLOCK_R,
            BLOCK_N,
            CHUNK,
        )
        if parts_at is not None:
            tl.store(parts_at + column, part, mask=live)


@triton.jit
def scaled_dact_kernel(
    dy_ptr,  # (T, H) codes, read
    dy_scales_ptr,  # (T, groups of H), read
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
    row_blocks_ptr,  # (blocks, 3) int32, read
    token_in_blocks_ptr,  # (rows in blocks,) int32, read
    route_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    ticket_ptr,  # int32, drawn from
    stride_dy,
    stride_t,
    stride_k,
    stride_dpre,
    stride_columns,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Grid: one program a processor. A ticket is a row block and a strip of column blocks of I, strips fastest.

    Example: one route of token 1 and weight 0.5, dy = [[9.], [3.]] with scales of 1, w = [[[1.]]] with a scale of 2,
    pre = [[[0.], [2.]]] (gate 0, up 2): dact is 6, sigmoid 1/2, so dgate = 0.5*6 * 2 * 1/2 = 3, dup = 0, weighted act
    = 0 and <dact, act> = 0. Codes are 448 and 0, for dgate's row and its column; their scale is 3/448.
    """
    groups: tl.constexpr = (H + BLOCK_C - 1) // BLOCK_C
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    strips: tl.constexpr = (column_blocks + STRIP - 1) // STRIP
    tickets = tl.load(counters_ptr) * strips
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    block, expert, row, _ = look_up(ticket, tickets, strips, row_blocks_ptr)
    while ticket < tickets:
        token = look_up_rows(ticket, tickets, strips, token_in_blocks_ptr, BLOCK_R)  # not ahead: registers are short
        route = look_up_rows(ticket, tickets, strips, route_in_blocks_ptr, BLOCK_R)
        next_block, next_expert, next_row, _ = look_up(following, tickets, strips, row_blocks_ptr)
        after = draw(ticket_ptr)

        live = route >= 0
        scaled_dact_strip(
            dy_ptr + token[:, None] * stride_dy + tl.arange(0, BLOCK_C)[None, :],
            None,
            dy_scales_ptr + token * groups,
            w_desc,
            w_scales_ptr,
            pre_ptr,
            dpre_ptr,
            dpre_scales_ptr,
            dpre_columns_ptr,
            dpre_columns_scales_ptr,
            act_columns_ptr,
            act_columns_scales_ptr,
            rows_at(parts_ptr, row + tl.arange(0, BLOCK_R), column_blocks),
            weight_of_route(route, live, topk_weights_ptr, stride_t, stride_k, K),
            live,
            block,
            expert,
            row,
            ticket % strips,
            stride_dpre,
            stride_columns,
            H,
            I,
            LIMIT,
            BLOCK_R,
            BLOCK_N,
            BLOCK_C,
            CHUNK,
            STRIP,
            FLATTEN,
        )

        ticket, following = following, after
        block, expert, row = next_block, next_expert, next_row


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
):
    """A tile of one expert's weight gradient, summed over its blocks in order; without rows it is zeros, and with fewer
    rows than none NaN, as in persistent.py."""
    tl.static_assert(BLOCK_R == ALONG)
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first_m, first_n = tile // n_blocks * BLOCK_M, tile % n_blocks * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    a_scales_at, b_scales_at = a_scales_ptr + m, b_scales_ptr + n
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    a_scale = tl.load(a_scales_at + block.to(tl.int64) * M, mask=(m < M) & (rows > 0), other=0.0)
    b_scale = tl.load(b_scales_at + block.to(tl.int64) * N, mask=(n < N) & (rows > 0), other=0.0)
    end = block + tl.cdiv(rows, BLOCK_R)
    for step in range(block, end):
        next_step = tl.minimum(step + 1, end - 1).to(tl.int64)
        next_a_scale = tl.load(a_scales_at + next_step * M, mask=m < M, other=0.0)
        next_b_scale = tl.load(b_scales_at + next_step * N, mask=n < N, other=0.0)
        a = a_desc.load([first_m, step * BLOCK_R])
        b = b_desc.load([first_n, step * BLOCK_R])
        acc += dot_codes(a, b.T) * (a_scale[:, None] * b_scale[None, :])
        a_scale, b_scale = next_a_scale, next_b_scale
    if rows < 0:
        acc = tl.full((BLOCK_M, BLOCK_N), float("nan"), tl.float32)

    mask = (m < M)[:, None] & (n < N)[None, :]
    to_dw = dw_ptr + expert.to(tl.int64) * stride_dwe
    to_dw += m.to(tl.int64)[:, None] * stride_dwm + n.to(tl.int64)[None, :] * stride_dwn
    tl.store(to_dw, narrow(acc, dw_ptr.dtype.element_ty), mask=mask)


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
    while ticket < tickets:
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
            x.codes,
            x.scales,
            descriptor(w_gate_up.codes, 1, 2, tile.BLOCK_N // 2, tile.BLOCK_C),
            w_gate_up.scales,
            pre,
            *codes_and_scales(act.rows if act else None),
            table.row_blocks,
            table.token_in_blocks,
            table.counters,
            table.ticket("gate_up"),
            x.codes.stride(0),
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
            descriptor(a.codes, 1, table.tiles.BLOCK_R, tile.BLOCK_C),
            a.scales,
            descriptor(w, 1, tile.BLOCK_N, tile.BLOCK_C),
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
            dy.codes,
            dy.scales,
            descriptor(w_down.transposed, 1, tile.BLOCK_N, tile.BLOCK_C),
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
        descriptor(a.columns.codes, tile.BLOCK_M, tile.BLOCK_R),
        a.columns.scales,
        descriptor(tokens.codes, tile.BLOCK_N, tile.BLOCK_R),
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


def codes_and_scales(q: Quantised | None) -> tuple[Tensor | None, Tensor | None]:
    """As two arguments of a kernel."""
    return (q.codes, q.scales) if q else (None, None)
