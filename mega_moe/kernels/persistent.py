"""Resident programs: as many as the GPU has processors, each drawing tickets until there are none.

A launch with one program a tile pays with idle matrix units for every tile's beginning (find the expert, find its
rows, find their tokens) and for its end. Here a program lives as long as the launch, and draws two tickets ahead:
while it multiplies one tile it looks the next one up in a table, and draws the number of the one after. Nobody waits
for a tile that somebody else is slow with, since tickets go to whoever is free. A ticket may be a strip of tiles, whose
steps are one loop: the loads of a tile begin under the epilogue of the one before.

What lies contiguously (weights, and what these kernels pass to each other) is loaded by descriptor: one thread asks the
copy engine for a whole tile, instead of all threads computing addresses. What is gathered (tokens) cannot be.

Tensors between the kernels lie in blocks (see tile_table.py). In dpre and weighted act the rows that pad an expert's
last block are zeros: a weight gradient sums over whole steps, and no row of another expert is ever among them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..shapes import Need, Plan
from .blocks import Strips, launch_options, programs
from .fused_swiglu import store_pre_and_act, sum_parts, swiglu_backward_epilogue
from .signal import draw
from .tile import dot, halves, narrow, rows_at, weight_of_route
from .tile_table import TileTable


# --8<-- [start:load]
@triton.jit
def look_up(ticket, tickets, strips, row_blocks_ptr):
    """The block of rows of a ticket: its number, expert, first row, and how many rows it holds. 0 beyond the last."""
    block = ticket // strips
    at = row_blocks_ptr + block * 3
    known = ticket < tickets
    expert, row = tl.load(at, mask=known, other=0), tl.load(at + 1, mask=known, other=0)
    return block, expert, row, tl.load(at + 2, mask=known, other=0)


@triton.jit
def look_up_rows(ticket, tickets, strips, of_rows_ptr, BLOCK_R: tl.constexpr):
    """What the table says of each row of a ticket's block (its token, or its route), in int64. 0 beyond the last."""
    at = of_rows_ptr + (ticket // strips).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    return tl.load(at, mask=ticket < tickets, other=0).to(tl.int64)


@triton.jit
def load_matrix(w_desc, expert, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of one expert's weight; zeros beyond its edges."""
    return w_desc.load([expert, row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def load_gathered(at, c, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """A tile of gathered rows, from pointers; zeros beyond column C."""
    if C % BLOCK_C == 0:
        a = tl.load(at)
    else:
        a = tl.load(at, mask=(c + tl.arange(0, BLOCK_C) < C)[None, :], other=0.0)
    return a


# --8<-- [end:load]


# --8<-- [start:gate_up]
@triton.jit
def gate_up_strip(
    x_at,  # (BLOCK_R, BLOCK_C) where the first step of each row begins; with x_desc any pointer to x
    x_desc,  # (rows in blocks, H) read: the rows, one after another; or None: they are gathered
    w_desc,  # (E, 2, I, H) read: gate and up of the same columns come as one tile
    pre_ptr,  # (R, 2, I) written at the block's live rows; or None
    act_ptr,  # (rows in blocks, I) written in all of the block; or None
    block,
    expert,
    row,  # the block's first
    rows,  # how many of the block are live
    strip,
    stride_xh,
    stride_act,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """pre and act of a block of rows and a strip of column blocks of I."""
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    i_block = tl.arange(0, BLOCK_R)
    first = strip * STRIP
    for column in tl.range(first, tl.minimum(first + STRIP, column_blocks), flatten=FLATTEN):
        gate_up = tl.zeros((BLOCK_R, 2 * BLOCK_N), tl.float32)
        for start in range(0, H, BLOCK_C):
            if x_desc is None:
                x = load_gathered(x_at + tl.cast(start, tl.int64) * stride_xh, start, H, BLOCK_C)
            else:
                x = x_desc.load([block * BLOCK_R, start])
            w = w_desc.load([expert, 0, column * BLOCK_N, start]).reshape(2 * BLOCK_N, BLOCK_C)
            gate_up = dot(x, w.T, gate_up)

        gate, up = halves(gate_up, BLOCK_R, 2 * BLOCK_N)
        pre_at = rows_at(pre_ptr, row + i_block, 2 * I)
        act_at = rows_at(act_ptr, block.to(tl.int64) * BLOCK_R + i_block, stride_act)
        i = column * BLOCK_N + tl.arange(0, BLOCK_N)
        every = i_block < BLOCK_R  # down reads whole blocks
        store_pre_and_act(gate, up, pre_at, act_at, i_block < rows, every, i, LIMIT, I, x_at.dtype.element_ty)


@triton.jit
def persistent_gate_up_kernel(
    x_ptr,  # (T, H) read, any strides
    w_desc,  # (E, 2, I, H) read: gate and up of the same columns come as one tile
    pre_ptr,  # (R, 2, I) written where a row has an expert; or None
    act_ptr,  # (rows in blocks, I) written in every block that holds rows, of a short one the first SHORT; or None
    row_blocks_ptr,  # (blocks, 3) int32, read
    token_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    ticket_ptr,  # int32, drawn from
    stride_xt,
    stride_xh,
    stride_act,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
    SHORT: tl.constexpr = None,
):
    """Grid: one program a processor. A ticket is a row block and a strip of column blocks of I, strips fastest.

    Example: one expert, its one row is token 1, x = [[9., 9.], [1., 2.]], w = [[[[1., 0.]], [[0., 1.]]]]: gate is 1 and
    up 2, so pre = [[[1.], [2.]]] and act = [[silu(1) * 2]] = [[1.4621]].
    """
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    strips: tl.constexpr = (column_blocks + STRIP - 1) // STRIP
    tickets = tl.load(counters_ptr) * strips
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    block, expert, row, rows = look_up(ticket, tickets, strips, row_blocks_ptr)
    token = look_up_rows(ticket, tickets, strips, token_in_blocks_ptr, BLOCK_R)
    while ticket < tickets:
        next_block, next_expert, next_row, next_rows = look_up(following, tickets, strips, row_blocks_ptr)
        next_token = look_up_rows(following, tickets, strips, token_in_blocks_ptr, BLOCK_R)
        after = draw(ticket_ptr)

        c = tl.arange(0, BLOCK_C).to(tl.int64)
        if SHORT is None or rows > SHORT:
            x_at = x_ptr + token[:, None] * stride_xt + c[None, :] * stride_xh
            gate_up_strip(
                x_at,
                None,
                w_desc,
                pre_ptr,
                act_ptr,
                block,
                expert,
                row,
                rows,
                ticket % strips,
                stride_xh,
                stride_act,
                H,
                I,
                LIMIT,
                BLOCK_R,
                BLOCK_N,
                BLOCK_C,
                STRIP,
                FLATTEN,
            )
        else:  # the rest of its act stays unwritten, and `down` drops what it makes of it
            few = tl.load(token_in_blocks_ptr + block.to(tl.int64) * BLOCK_R + tl.arange(0, SHORT))
            few_at = x_ptr + few.to(tl.int64)[:, None] * stride_xt + c[None, :] * stride_xh
            gate_up_strip(
                few_at,
                None,
                w_desc,
                pre_ptr,
                act_ptr,
                block * (BLOCK_R // SHORT),  # where it begins, in blocks of SHORT rows
                expert,
                row,
                rows,
                ticket % strips,
                stride_xh,
                stride_act,
                H,
                I,
                LIMIT,
                SHORT,
                BLOCK_N,
                BLOCK_C,
                STRIP,
                FLATTEN,
            )

        ticket, following = following, after
        block, expert, row, rows, token = next_block, next_expert, next_row, next_rows, next_token


# --8<-- [end:gate_up]


# --8<-- [start:slots]
@triton.jit
def slot_gemm_strip(
    a_desc,  # (rows in blocks, C) read
    w_desc,  # (E, N, C) read, or (E, C, N)
    slots_at,  # (BLOCK_R, 1) where the slot of each row begins, written
    live,  # (BLOCK_R,) whether the row has one
    block,
    expert,
    strip,
    C: tl.constexpr,
    N: tl.constexpr,
    W_IS_NC: tl.constexpr,  # how w lies
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """The slots of a block of rows, in a strip of column blocks of N."""
    column_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first = strip * STRIP
    for column in tl.range(first, tl.minimum(first + STRIP, column_blocks), flatten=FLATTEN):
        acc = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        for start in range(0, C, BLOCK_C):
            a = a_desc.load([block * BLOCK_R, start])
            if W_IS_NC:
                w = load_matrix(w_desc, expert, column * BLOCK_N, start, BLOCK_N, BLOCK_C).T
            else:
                w = load_matrix(w_desc, expert, start, column * BLOCK_N, BLOCK_C, BLOCK_N)
            acc = dot(a, w, acc)

        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (n < N)[None, :]
        tl.store(slots_at + n[None, :], narrow(acc, slots_at.dtype.element_ty), mask=mask)


@triton.jit
def persistent_slot_gemm_kernel(
    a_desc,  # (rows in blocks, C) read
    w_desc,  # (E, N, C) read, or (E, C, N)
    slots_ptr,  # (T, K, N) written at live routes
    row_blocks_ptr,  # (blocks, 3) int32, read
    route_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    ticket_ptr,  # int32, drawn from
    C: tl.constexpr,
    N: tl.constexpr,
    W_IS_NC: tl.constexpr,  # how w lies
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STRIP: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """Grid: one program a processor. A ticket is a row block and a strip of column blocks, strips fastest.

    Example: one expert, T = 1, K = 2, a = [[1., 2.], [3., 4.]] whose rows serve slots 1 and 0, w = [[[1., 0.]]]:
    slots = [[[3.], [1.]]].
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

        slot_gemm_strip(
            a_desc,
            w_desc,
            slots_ptr + route[:, None] * N,
            route >= 0,
            block,
            expert,
            ticket % strips,
            C,
            N,
            W_IS_NC,
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
def dact_strip(
    dy_at,  # (BLOCK_R, BLOCK_C) where the first step of each row begins; with dy_desc not used
    dy_desc,  # (rows in blocks, H) read: the rows, one after another; or None: they are gathered
    w_desc,  # (E, H, I) read
    pre_ptr,  # (R, 2, I) read
    dpre_ptr,  # (rows in blocks, 2I) written in all of the block; or None
    weighted_act_ptr,  # (rows in blocks, I) written in all of the block; or None
    parts_at,  # (BLOCK_R,) where the parts of each row begin, fp32, written; or None
    weight,  # (BLOCK_R,) fp32, of each row's route
    live,  # (BLOCK_R,) whether it has one
    block,
    expert,
    row,  # the block's first
    strip,
    stride_dyh,
    stride_dpre,
    stride_act,
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
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    i_block = tl.arange(0, BLOCK_R)
    first = strip * STRIP
    for column in tl.range(first, tl.minimum(first + STRIP, column_blocks), flatten=FLATTEN):
        dact = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        if dpre_ptr is not None or parts_at is not None:  # weighted act alone is made without it
            for start in range(0, H, BLOCK_C):
                if dy_desc is None:
                    dy = load_gathered(dy_at + tl.cast(start, tl.int64) * stride_dyh, start, H, BLOCK_C)
                else:
                    dy = dy_desc.load([block * BLOCK_R, start])
                w = load_matrix(w_desc, expert, start, column * BLOCK_N, BLOCK_C, BLOCK_N)
                dact = dot(dy, w, dact)

        r_in_blocks = block.to(tl.int64) * BLOCK_R + i_block
        part = swiglu_backward_epilogue(
            dact,
            rows_at(pre_ptr, row + i_block, 2 * I),
            rows_at(dpre_ptr, r_in_blocks, stride_dpre),
            rows_at(weighted_act_ptr, r_in_blocks, stride_act),
            weight,
            live,
            None,  # all rows are stored: dw reads the zeros of those that pad the block
            column * BLOCK_N,
            LIMIT,
            I,
            BLOCK_R,
            BLOCK_N,
            CHUNK,
        )
        if parts_at is not None:
            tl.store(parts_at + column, part, mask=live)


@triton.jit
def persistent_dact_kernel(
    dy_ptr,  # (T, H) read, any strides
    w_desc,  # (E, H, I) read
    pre_ptr,  # (R, 2, I) read
    topk_weights_ptr,  # (T, K) read, any strides
    dpre_ptr,  # (rows in blocks, 2I) written in every block that holds rows; or None
    weighted_act_ptr,  # (rows in blocks, I) written in every block that holds rows; or None
    parts_ptr,  # (R, blocks of I) fp32, written where a row has an expert; or None
    row_blocks_ptr,  # (blocks, 3) int32, read
    token_in_blocks_ptr,  # (rows in blocks,) int32, read
    route_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    ticket_ptr,  # int32, drawn from
    stride_dyt,
    stride_dyh,
    stride_t,
    stride_k,
    stride_dpre,
    stride_act,
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

    Example: one route of token 1 and weight 0.5, dy = [[9.], [3.]], w = [[[1.]]], pre = [[[0.], [2.]]] (gate 0, up 2):
    dact is 3, sigmoid 1/2, so dgate = 0.5*3 * 2 * 1/2 = 1.5, dup = 0, weighted act = 0 and <dact, act> = 0.
    """
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

        c = tl.arange(0, BLOCK_C).to(tl.int64)
        dy_at = dy_ptr + token[:, None] * stride_dyt + c[None, :] * stride_dyh
        live = route >= 0
        dact_strip(
            dy_at,
            None,
            w_desc,
            pre_ptr,
            dpre_ptr,
            weighted_act_ptr,
            rows_at(parts_ptr, row + tl.arange(0, BLOCK_R), column_blocks),
            weight_of_route(route, live, topk_weights_ptr, stride_t, stride_k, K),
            live,
            block,
            expert,
            row,
            ticket % strips,
            stride_dyh,
            stride_dpre,
            stride_act,
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
def look_up_expert(ticket, tickets, strips, longest_first_ptr):
    """The expert of a weight gradient's ticket, its first block, and its number of rows. 0 beyond the last."""
    at = longest_first_ptr + ticket // strips * 3
    known = ticket < tickets
    expert, block = tl.load(at, mask=known, other=0), tl.load(at + 1, mask=known, other=0)
    return expert, block, tl.load(at + 2, mask=known, other=0)


@triton.jit
def weight_grad_tile(
    a_desc,  # (rows in blocks, M) read; zeros where a block is padded
    tokens_ptr,  # (T, N) read, any strides
    rows_desc,  # (rows in blocks, N) read: the tokens' rows, one after another; or None: they are gathered
    dw_ptr,  # (E, M, N) written at the tile, any strides
    token_at,  # where the token of the expert's first row stands, the others behind it
    expert,
    first_row,  # the expert's first among the rows in blocks
    rows,
    tile,
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
    """A tile of one expert's weight gradient, summed over its rows in order; without rows it is zeros. Fewer rows than
    none stand for rows that should have come and did not: then it is NaN.

    The rows that pad the last step are zeros in a, and the expert's last token here: no other expert's token, whose NaN
    would reach this gradient as 0 * NaN.
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    first_m = tile // n_blocks * BLOCK_M
    n = tile % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if rows_desc is None:
        r = tl.arange(0, BLOCK_R)
        tokens_at = tokens_ptr + n.to(tl.int64)[None, :] * stride_tokens_n
        token = tl.load(token_at + tl.minimum(r, rows - 1), mask=rows > 0, other=0)
        for start in range(0, rows, BLOCK_R):
            a = a_desc.load([first_row + start, first_m])
            at = tokens_at + token.to(tl.int64)[:, None] * stride_tokens_t
            if N % BLOCK_N == 0:
                b = tl.load(at)
            else:
                b = tl.load(at, mask=(n < N)[None, :], other=0.0)
            next_r = start + BLOCK_R + r
            token = tl.load(token_at + tl.minimum(next_r, rows - 1), mask=start + BLOCK_R < rows, other=0)
            acc = dot(a.T, b, acc)
    else:
        for start in range(0, rows, BLOCK_R):
            a = a_desc.load([first_row + start, first_m])
            b = rows_desc.load([first_row + start, tile % n_blocks * BLOCK_N])
            acc = dot(a.T, b, acc)
    if rows < 0:
        acc = tl.full((BLOCK_M, BLOCK_N), float("nan"), tl.float32)

    m = first_m + tl.arange(0, BLOCK_M)
    mask = (m < M)[:, None] & (n < N)[None, :]
    to_dw = dw_ptr + expert.to(tl.int64) * stride_dwe
    to_dw += m.to(tl.int64)[:, None] * stride_dwm + n.to(tl.int64)[None, :] * stride_dwn
    tl.store(to_dw, narrow(acc, dw_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["E"])
def persistent_weight_grad_kernel(
    a_desc,  # (rows in blocks, M) read; zeros where a block is padded
    tokens_ptr,  # (T, N) read, any strides
    dw_ptr,  # (E, M, N) written, all of it, any strides
    token_in_blocks_ptr,  # (rows in blocks,) int32, read
    longest_first_ptr,  # (E, 3) int32, read
    ticket_ptr,  # int32, drawn from
    E,
    stride_tokens_t,
    stride_tokens_n,
    stride_dwe,
    stride_dwm,
    stride_dwn,
    M: tl.constexpr,
    N: tl.constexpr,
    ROWS_OF_BLOCK: tl.constexpr,  # of a's blocks
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid: one program a processor. A ticket is an expert, longest first, and a block of M and of N, N fastest. Who
    draws it alone sums that tile, over the expert's rows in order; without rows it takes no step and stores zeros.

    Example: two experts, the first with two rows, which are tokens 1 and 0, a = [[1.], [2.]],
    tokens = [[5., 6.], [3., 4.]]: dw = [[[13., 16.]], [[0., 0.]]].
    """
    tiles: tl.constexpr = ((M + BLOCK_M - 1) // BLOCK_M) * ((N + BLOCK_N - 1) // BLOCK_N)
    tickets = E * tiles
    ticket, following = draw(ticket_ptr), draw(ticket_ptr)
    expert, block, rows = look_up_expert(ticket, tickets, tiles, longest_first_ptr)
    while ticket < tickets:
        next_expert, next_block, next_rows = look_up_expert(following, tickets, tiles, longest_first_ptr)
        after = draw(ticket_ptr)

        weight_grad_tile(
            a_desc,
            tokens_ptr,
            None,
            dw_ptr,
            token_in_blocks_ptr + block.to(tl.int64) * ROWS_OF_BLOCK,
            expert,
            block * ROWS_OF_BLOCK,
            rows,
            ticket % tiles,
            stride_tokens_t,
            stride_tokens_n,
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
    x: Tensor, w_gate_up: Tensor, plan: Plan, table: TileTable, swiglu_limit: float | None, pre: bool, act: bool
) -> tuple[Tensor | None, Tensor | None]:
    """x (T, H), any strides, w_gate_up (E, 2I, H) as `readable` gives it -> pre (R, 2, I) and act (rows in blocks, I);
    None if not asked for. act is made from fp32 accumulators and rounded once.
    """
    R, H = len(plan.token_of_row), x.shape[1]
    I = w_gate_up.shape[1] // 2
    pre = x.new_empty(R, 2, I) if pre else None
    act = table.in_blocks(I, like=x) if act else None
    tile = table.tiles.gate_up
    if R:
        persistent_gate_up_kernel[(programs(tile),)](
            x,
            descriptor(w_gate_up.unflatten(1, (2, I)), 1, 2, tile.BLOCK_N, tile.BLOCK_C),
            pre,
            act,
            table.row_blocks,
            table.token_in_blocks,
            table.counters,
            table.ticket("gate_up"),
            *x.stride(),
            act.stride(0) if act is not None else 0,
            H=H,
            I=I,
            LIMIT=swiglu_limit,
            BLOCK_R=table.tiles.BLOCK_R,
            **launch_options(tile),
        )
    return pre, act


def down(act: Tensor, w_down: Tensor, plan: Plan, table: TileTable) -> Tensor:
    """slots[t, k] = act[r] @ w_down[e]^T for the row r of that slot: act (rows in blocks, I), w_down (E, H, I) as
    `readable` gives it -> slots (T, K, H). Accumulates in fp32 and rounds once. Masked routes' slots are not written.
    """
    tile = table.tiles.down
    w = descriptor(w_down, 1, tile.BLOCK_N, tile.BLOCK_C)
    return slot_gemm(act, w, w_down.shape[1], True, plan, table, "down", tile)


def dx_slots(dpre: Tensor, w_gate_up: Tensor, plan: Plan, table: TileTable) -> Tensor:
    """slots[t, k] = dpre[r] @ w_gate_up[e] for the row r of that slot: dpre (rows in blocks, 2I), w_gate_up (E, 2I, H)
    as `readable` gives it -> slots (T, K, H). Accumulates in fp32, rounds once. Masked routes' slots are not written.
    """
    tile = table.tiles.dx
    w = descriptor(w_gate_up, 1, tile.BLOCK_C, tile.BLOCK_N)
    return slot_gemm(dpre, w, w_gate_up.shape[2], False, plan, table, "dx", tile)


def slot_gemm(
    a: Tensor, w: TensorDescriptor, N: int, w_is_nc: bool, plan: Plan, table: TileTable, kernel: str, tile: Strips
) -> Tensor:
    """What `down` and `dx_slots` share. kernel: whose ticket to draw."""
    T, K = plan.row_of_slot.shape
    slots = a.new_empty(T, K, N)
    if slots.numel():
        persistent_slot_gemm_kernel[(programs(tile),)](
            descriptor(a, table.tiles.BLOCK_R, tile.BLOCK_C),
            w,
            slots,
            table.row_blocks,
            table.route_in_blocks,
            table.counters,
            table.ticket(kernel),
            C=a.shape[1],
            N=N,
            W_IS_NC=w_is_nc,
            BLOCK_R=table.tiles.BLOCK_R,
            **launch_options(tile),
        )
    return slots


def dact_swiglu(
    dy: Tensor,
    w_down: Tensor,
    pre: Tensor,
    topk_weights: Tensor,
    plan: Plan,
    table: TileTable,
    swiglu_limit: float | None,
    need: Need,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dy (T, H), any strides, w_down (E, H, I) as `readable` gives it, pre (R, 2, I), topk_weights (T, K), any strides
    -> dpre (rows in blocks, 2I), weighted act (rows in blocks, I), dtopk_weights (T, K); each None where `need` has no
    use for it.
    """
    (R, _, I), H = pre.shape, w_down.shape[1]
    tile = table.tiles.dact
    dpre = table.in_blocks(2 * I, like=pre) if need.dpre else None
    weighted_act = table.in_blocks(I, like=pre) if need.dw_down else None
    parts = None
    if need.dtopk_weights:
        parts = pre.new_empty(R, triton.cdiv(I, tile.BLOCK_N), dtype=torch.float32)
    if R:
        persistent_dact_kernel[(programs(tile),)](
            dy,
            descriptor(w_down, 1, tile.BLOCK_C, tile.BLOCK_N),
            pre,
            topk_weights,
            dpre,
            weighted_act,
            parts,
            table.row_blocks,
            table.token_in_blocks,
            table.route_in_blocks,
            table.counters,
            table.ticket("dact"),
            *dy.stride(),
            *topk_weights.stride(),
            dpre.stride(0) if dpre is not None else 0,
            weighted_act.stride(0) if weighted_act is not None else 0,
            K=topk_weights.shape[1],
            H=H,
            I=I,
            LIMIT=swiglu_limit,
            BLOCK_R=table.tiles.BLOCK_R,
            **launch_options(tile),
        )
    return dpre, weighted_act, sum_parts(parts, topk_weights, plan) if need.dtopk_weights else None


def weight_grad(a: Tensor, tokens: Tensor, table: TileTable, kernel: str, dw: Tensor) -> Tensor:
    """dw[e] = sum over the rows r of e of a[r]^T tokens[token_of_row[r]]: a (rows in blocks, M), zeros where a block is
    padded, tokens (T, N), any strides. kernel: "dw_down" or "dw_gate_up". Writes all of dw (E, M, N), any strides.
    """
    E, M, N = dw.shape
    tile = getattr(table.tiles, kernel)
    persistent_weight_grad_kernel[(programs(tile),)](
        descriptor(a, tile.BLOCK_R, tile.BLOCK_M),
        tokens,
        dw,
        table.token_in_blocks,
        table.longest_first,
        table.ticket(kernel),
        E,
        *tokens.stride(),
        *dw.stride(),
        M=M,
        N=N,
        ROWS_OF_BLOCK=table.tiles.BLOCK_R,
        **launch_options(tile),
    )
    return dw


def descriptor(t: Tensor, *block: int) -> TensorDescriptor:
    """How the copy engine reads t, in blocks of this shape: t's last stride is 1, the others multiples of 16 bytes."""
    strides = [stride if size > 1 else 16 for size, stride in zip(t.shape, t.stride())]  # of size 1: any will do
    return TensorDescriptor(t, list(t.shape), [*strides[:-1], 1], list(block))
