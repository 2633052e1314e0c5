"""One launch a direction: resident programs draw the tiles of all steps from one schedule.

Between the launches of a rung below, the whole GPU waits for its slowest tile. Here no launch ends before all is done:
tiles of the next step of one expert are drawn while the step before is still being done for another. What holds a tile
back is only what it reads: it *waits* until the counter of its expert shows that the tiles before it have *signalled*
(see signal.py), and the schedule (see mega_moe/schedule.py) has put them so far ahead that it is seldom kept.

The tiles themselves are those of persistent.py, strip for strip. What differs is who calls them, and when.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..schedule import KINDS
from ..shapes import Grads, Inputs, Need, Plan, Problem
from ..symmetric import Memory
from .blocks import Mega, programs
from .clock import END, START, TAKEN, clock_in, clock_out, stamp
from .combine import add_slots
from .exchange import home_of_rows, pull_tile, pull_weights, slots_of_rows, tell_homes
from .fused_swiglu import add_parts
from .meet import in_heap
from .persistent import dact_strip, descriptor, gate_up_strip, slot_gemm_strip, weight_grad_tile
from .schedule import Schedule
from .signal import draw, has_failed, needs_fence, signal, wait, wait_for_ranks
from .tile import nan_if, narrow, tokens_of_rows, weight_of_route
from .weights import aligned, readable

DISPATCH = tl.constexpr(KINDS.index("dispatch"))
GATE_UP = tl.constexpr(KINDS.index("gate_up"))
DOWN = tl.constexpr(KINDS.index("down"))
DACT = tl.constexpr(KINDS.index("dact"))
DX = tl.constexpr(KINDS.index("dx"))
DW_GATE_UP = tl.constexpr(KINDS.index("dw_gate_up"))
DW_DOWN = tl.constexpr(KINDS.index("dw_down"))


# --8<-- [start:look_up]
@triton.jit
def look_up(ticket, tickets, table_ptr):
    """The row of a ticket in the schedule, but for its rank; zeros beyond the last."""
    at = table_ptr + ticket.to(tl.int64) * 8
    known = ticket < tickets
    kind, expert = tl.load(at, mask=known, other=0), tl.load(at + 2, mask=known, other=0)
    block, row = tl.load(at + 3, mask=known, other=0), tl.load(at + 4, mask=known, other=0)
    rows, column = tl.load(at + 5, mask=known, other=0), tl.load(at + 6, mask=known, other=0)
    return kind, expert, block, row, rows, column, tl.load(at + 7, mask=known, other=0)


@triton.jit
def routes_of_block(row, rows, token_of_row_ptr, slot_of_row_ptr, BLOCK_R: tl.constexpr):
    """The token and the slot that each row of a block serves, and whether it serves any; zeros if not."""
    r = tl.arange(0, BLOCK_R)
    live = r < rows
    token = tl.load(token_of_row_ptr + row + r, mask=live, other=0)
    return token, tl.load(slot_of_row_ptr + row + r, mask=live, other=0), live


@triton.jit
def rank_of_tile(ticket, table_ptr, own_heaps_ptr, token_start_ptr):
    """Of a combine tile's rank: where its heap begins, its first token, and the end of its tokens."""
    rank = tl.load(table_ptr + ticket.to(tl.int64) * 8 + 1)
    return tl.load(own_heaps_ptr + rank), tl.load(token_start_ptr + rank), tl.load(token_start_ptr + rank + 1)


@triton.jit
def wait_for_rows(
    heap,
    arrivals,
    heaps_ptr,
    own_heaps_ptr,
    CALL: tl.constexpr,
    ROWS_ARRIVED: tl.constexpr,
    PAGE: tl.constexpr,
    W: tl.constexpr,
):
    """Wait until so many rows have come to the slots of this heap, whoever sends them. Whether they will never come."""
    own_heap = tl.load(own_heaps_ptr)
    call = tl.load(in_heap(own_heap, CALL, tl.int32))
    page_ptr = in_heap(own_heap, PAGE, tl.int64)
    one = tl.arange(0, 1)
    rows_arrived_ptr = in_heap(heap, ROWS_ARRIVED, tl.int32) + one
    wait_for_ranks(rows_arrived_ptr, arrivals, one == 0, one - 1, call, page_ptr, heaps_ptr, PAGE, W)
    return has_failed(page_ptr)


# --8<-- [end:look_up]


# --8<-- [start:dispatch]
@triton.jit
def dispatch_tile(
    heaps_ptr,  # (W,) int64, read: where each rank's heap begins
    pool_ptr,  # (rows in blocks, H) written in all of the block
    token_of_row_ptr,  # (R,) int32, read
    block,
    row,
    rows,
    buffer,
    max_tokens,
    to_view,
    stride_pool,
    H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PULL_R: tl.constexpr,
    PULL_H: tl.constexpr,
):
    """Pull the rows of a block from the ranks that hold their tokens. Rows that pad it become zeros."""
    dtype: tl.constexpr = pool_ptr.dtype.element_ty
    for first in range(0, BLOCK_R, PULL_R):
        r = first + tl.arange(0, PULL_R)
        token = tl.load(token_of_row_ptr + row + r, mask=r < rows, other=0)
        home, token = home_of_rows(token, r < rows, max_tokens)
        to = pool_ptr + (block.to(tl.int64) * BLOCK_R + r)[:, None] * stride_pool
        for start in range(0, H, PULL_H):
            h = start + tl.arange(0, PULL_H)
            pulled = pull_tile(heaps_ptr, home, token, r < rows, h, to_view, buffer, max_tokens, dtype, H)
            tl.store(to + h[None, :], pulled, mask=(h < H)[None, :])


# --8<-- [end:dispatch]


# --8<-- [start:combine]
@triton.jit
def combine_tile(
    slots_ptr,  # (T, K, H) read at live routes
    topk_weights_ptr,  # (T, K) read, any strides; or None: every weight is 1
    row_of_slot_ptr,  # (T, K) int32, read
    y_ptr,  # (T, H) written at the tile's tokens
    first_token,
    T,
    failed,
    stride_t,
    stride_k,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The sums over their slots of BLOCK_T tokens; NaN if ranks have failed each other."""
    token = (first_token + tl.arange(0, BLOCK_T)).to(tl.int64)
    for start in range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        y = add_slots(
            slots_ptr, topk_weights_ptr, row_of_slot_ptr, token, h, T, stride_t, stride_k, K, H, BLOCK_T, BLOCK_H
        )
        y = nan_if(failed, y)
        mask = (token < T)[:, None] & (h < H)[None, :]
        tl.store(y_ptr + token[:, None] * H + h[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)


# --8<-- [end:combine]


# --8<-- [start:forward]
@triton.jit(do_not_specialize=["T", "E", "max_tokens", "to_x", "to_slots"])
def mega_forward_kernel(
    x_ptr,  # (T, H) read, any strides
    topk_weights_ptr,  # (T, K) read, any strides
    w_gate_up_desc,  # (E, 2, I, H) read
    w_down_desc,  # (E, H, I) read
    pre_ptr,  # (R, 2, I) written where a row has an expert; or None
    act_ptr,  # (rows in blocks, I) written in every block that holds rows, and read again
    act_desc,  # the same
    slots_ptr,  # (T, K, H) written at live routes, and read again
    y_ptr,  # (T, H) written
    table_ptr,  # (tiles, 8) int32, the schedule, read
    counters_ptr,  # int32: the ticket, drawn from; the number of tiles, read; arrivals, counted
    token_of_row_ptr,  # (R,) int32, read
    slot_of_row_ptr,  # (R,) int32, read
    row_of_slot_ptr,  # (T, K) int32, read
    heaps_ptr,  # (W,) int64, read: where each rank's heap begins; or None on one rank, and then those below
    own_heaps_ptr,  # (ranks here,) int64, read: the same of the ranks of this process
    token_start_ptr,  # (ranks here + 1,) int32, read: where their tokens begin
    pool_ptr,  # (rows in blocks, H) written in every block that holds rows, and read again
    pool_desc,  # the same
    trace_ptr,  # int64 words, written as clock.py says; or None
    T,
    E,
    max_tokens,
    to_x,  # where things stand in a heap, in bytes
    to_slots,
    stride_xt,
    stride_xh,
    stride_t,
    stride_k,
    stride_act,
    stride_pool,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GATE_UP_N: tl.constexpr,
    GATE_UP_C: tl.constexpr,
    GATE_UP_STRIP: tl.constexpr,
    DOWN_N: tl.constexpr,
    DOWN_C: tl.constexpr,
    DOWN_STRIP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PULL_R: tl.constexpr,
    PULL_H: tl.constexpr,
    CALL: tl.constexpr,
    ROWS_ARRIVED: tl.constexpr,
    PAGE: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Grid: one program a processor. Counters: dispatch, gate_up and down of expert e one after another, each at e of
    its own E; behind them the rows of down. Over ranks these are counted in the heap of each rank that they are for.

    dispatch  waits for nothing                              signals its expert; over ranks only
    gate_up   waits for all dispatch tiles of its expert     signals its expert
    down      waits for all gate_up tiles of its expert      signals the rows it has stored, to their home
    combine   waits until the rows of all live routes of its rank are stored

    E: the experts of this process. Ranks that fail each other compute NaN, see symmetric.py.
    """
    clock_in(trace_ptr)
    tickets = tl.load(counters_ptr + 1)
    dispatched_ptr = counters_ptr + 2
    gate_up_done_ptr = dispatched_ptr
    if heaps_ptr is not None:
        gate_up_done_ptr = dispatched_ptr + E
        buffer = tl.load(in_heap(tl.load(own_heaps_ptr), CALL, tl.int32)) & 1
    rows_done_ptr = gate_up_done_ptr + 2 * E
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    ticket, following = draw(counters_ptr), draw(counters_ptr)
    kind, expert, block, row, rows, column, arrivals = look_up(ticket, tickets, table_ptr)
    while ticket < tickets:
        next_kind, next_expert, next_block, next_row, next_rows, next_column, next_arrivals = look_up(
            following, tickets, table_ptr
        )
        after = draw(counters_ptr)

        stamp(trace_ptr, ticket, TAKEN)
        if kind == GATE_UP:
            x_at = x_ptr
            if heaps_ptr is None:
                token = tokens_of_rows(row, rows, token_of_row_ptr, BLOCK_R)
                c = tl.arange(0, GATE_UP_C).to(tl.int64)
                x_at = x_ptr + token[:, None] * stride_xt + c[None, :] * stride_xh
            else:
                wait(dispatched_ptr + expert, arrivals, FENCE)
                stamp(trace_ptr, ticket, START)
            gate_up_strip(
                x_at,
                pool_desc,
                w_gate_up_desc,
                pre_ptr,
                act_ptr,
                block,
                expert,
                row,
                rows,
                column,
                stride_xh,
                stride_act,
                H,
                I,
                LIMIT,
                BLOCK_R,
                GATE_UP_N,
                GATE_UP_C,
                GATE_UP_STRIP,
                False,
            )
            signal(gate_up_done_ptr + expert, 1, FENCE)
        elif kind == DOWN:
            wait(gate_up_done_ptr + expert, arrivals, FENCE)
            stamp(trace_ptr, ticket, START)
            token, slot, live = routes_of_block(row, rows, token_of_row_ptr, slot_of_row_ptr, BLOCK_R)
            slots_at, home = slots_of_rows(slots_ptr, heaps_ptr, token, slot, live, to_slots, max_tokens, dtype, K, H)
            slot_gemm_strip(
                act_desc,
                w_down_desc,
                slots_at,
                live,
                block,
                expert,
                column,
                I,
                H,
                True,
                BLOCK_R,
                DOWN_N,
                DOWN_C,
                DOWN_STRIP,
                False,
            )
            if heaps_ptr is None:
                signal(rows_done_ptr, rows, False)
            else:
                tell_homes(heaps_ptr, home, live, ROWS_ARRIVED, W, BLOCK_W)
        elif kind == DISPATCH:
            if heaps_ptr is not None:
                dispatch_tile(
                    heaps_ptr,
                    pool_ptr,
                    token_of_row_ptr,
                    block,
                    row,
                    rows,
                    buffer,
                    max_tokens,
                    to_x,
                    stride_pool,
                    H,
                    BLOCK_R,
                    PULL_R,
                    PULL_H,
                )
                signal(dispatched_ptr + expert, 1, FENCE)
        else:
            if heaps_ptr is None:
                wait(rows_done_ptr, arrivals, False)
                end = T
                its_slots_ptr = slots_ptr
                failed = False
            else:
                heap, first_token, end = rank_of_tile(ticket, table_ptr, own_heaps_ptr, token_start_ptr)
                failed = wait_for_rows(heap, arrivals, heaps_ptr, own_heaps_ptr, CALL, ROWS_ARRIVED, PAGE, W)
                its_slots_ptr = in_heap(heap, to_slots, dtype) - first_token.to(tl.int64) * (K * H)
            stamp(trace_ptr, ticket, START)
            combine_tile(
                its_slots_ptr,
                topk_weights_ptr,
                row_of_slot_ptr,
                y_ptr,
                row,
                end,
                failed,
                stride_t,
                stride_k,
                K,
                H,
                BLOCK_T,
                BLOCK_H,
            )
        stamp(trace_ptr, ticket, END)

        ticket, following = following, after
        kind, expert, block, row = next_kind, next_expert, next_block, next_row
        rows, column, arrivals = next_rows, next_column, next_arrivals
    clock_out(trace_ptr)


# --8<-- [end:forward]


# --8<-- [start:backward]
@triton.jit(do_not_specialize=["T", "E", "max_tokens", "to_x", "to_dy", "to_topk_weights", "to_slots", "to_dweights"])
def mega_backward_kernel(
    dy_ptr,  # (T, H) read, any strides
    x_ptr,  # (T, H) read, any strides
    topk_weights_ptr,  # (T, K) read, any strides
    w_down_desc,  # (E, H, I) read
    w_gate_up_desc,  # (E, 2I, H) read
    w_gate_up_pair_desc,  # (E, 2, I, H) the same, for gate_up; or None
    pre_ptr,  # (R, 2, I) read; with gate_up in the schedule written before
    dpre_ptr,  # (rows in blocks, 2I) written in every block that holds rows, and read again; or None
    dpre_desc,  # the same, in blocks of BLOCK_R rows
    dpre_rows_desc,  # the same, in blocks of the rows that dw_gate_up adds up in a step
    weighted_act_ptr,  # (rows in blocks, I) written in every block that holds rows, and read again; or None
    weighted_act_rows_desc,  # the same, in blocks of the rows that dw_down adds up in a step
    parts_ptr,  # (R, blocks of I) fp32, written where a row has an expert, and read again; or None
    slots_ptr,  # (T, K, H) written at live routes, and read again; or None
    dx_ptr,  # (T, H) written; or None
    dtopk_weights_ptr,  # (T, K) written; or None
    dw_gate_up_ptr,  # (E, 2I, H) written; or None
    dw_down_ptr,  # (E, I, H) written, any strides; or None
    table_ptr,  # (tiles, 8) int32, the schedule, read
    counters_ptr,  # int32: the ticket, drawn from; the number of tiles, read; arrivals, counted
    token_of_row_ptr,  # (R,) int32, read
    slot_of_row_ptr,  # (R,) int32, read
    row_of_slot_ptr,  # (T, K) int32, read
    heaps_ptr,  # (W,) int64, read: where each rank's heap begins; or None on one rank, and then those below
    own_heaps_ptr,  # (ranks here,) int64, read: the same of the ranks of this process
    token_start_ptr,  # (ranks here + 1,) int32, read: where their tokens begin
    weight_of_row_ptr,  # (R,) written where a row has an expert, and read again: its route's router weight
    dy_pool_ptr,  # (rows in blocks, H) written in every block that holds rows, and read again
    dy_pool_desc,  # the same, in blocks of BLOCK_R rows
    dy_pool_rows_desc,  # the same, in blocks of the rows that dw_down adds up in a step; or None
    x_pool_ptr,  # as dy_pool_ptr; or None
    x_pool_desc,  # the same, for gate_up; or None
    x_pool_rows_desc,  # the same, in blocks of the rows that dw_gate_up adds up in a step; or None
    trace_ptr,  # int64 words, written as clock.py says; or None
    T,
    E,
    max_tokens,
    to_x,  # where things stand in a heap, in bytes
    to_dy,
    to_topk_weights,
    to_slots,
    to_dweights,
    stride_dyt,
    stride_dyh,
    stride_xt,
    stride_xh,
    stride_t,
    stride_k,
    stride_dpre,
    stride_act,
    stride_dw_down_e,
    stride_dw_down_i,
    stride_dw_down_h,
    stride_pool,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    PHASES: tl.constexpr,  # how many there are, over rows
    DACT_PHASE: tl.constexpr,  # which of them dact is
    BLOCK_R: tl.constexpr,
    GATE_UP_N: tl.constexpr,
    GATE_UP_C: tl.constexpr,
    GATE_UP_STRIP: tl.constexpr,
    DACT_N: tl.constexpr,
    DACT_C: tl.constexpr,
    DACT_STRIP: tl.constexpr,
    CHUNK: tl.constexpr,
    DX_N: tl.constexpr,
    DX_C: tl.constexpr,
    DX_STRIP: tl.constexpr,
    DW_GATE_UP_M: tl.constexpr,
    DW_GATE_UP_N: tl.constexpr,
    DW_GATE_UP_R: tl.constexpr,
    DW_DOWN_M: tl.constexpr,
    DW_DOWN_N: tl.constexpr,
    DW_DOWN_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PULL_R: tl.constexpr,
    PULL_H: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DTOPK_WEIGHTS: tl.constexpr,
    CALL: tl.constexpr,
    ROWS_ARRIVED: tl.constexpr,
    PAGE: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Grid: one program a processor. Counters: phase p of expert e counts at p*E + e, rows at PHASES*E.

    dispatch     waits for nothing                            signals its expert; over ranks only
    gate_up      waits for dispatch of its expert, if any     signals its expert; only where pre is made again
    dact         waits for these of its expert, if any        signals its expert; without dx also its rows
    dx           waits for all dact tiles of its expert       signals the rows it has stored
    dw_gate_up   waits for all dact tiles of its expert
    dw_down      waits for all dact tiles of its expert
    combine      waits until the rows of all live routes of its rank are stored

    Over ranks rows are counted in the heap of each rank that they are for. E: the experts of this process. Ranks that
    fail each other compute NaN, see symmetric.py.
    """
    clock_in(trace_ptr)
    tickets = tl.load(counters_ptr + 1)
    dact_done_ptr = counters_ptr + 2 + DACT_PHASE * E
    rows_done_ptr = counters_ptr + 2 + PHASES * E
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    PARTS: tl.constexpr = (I + DACT_N - 1) // DACT_N
    if heaps_ptr is not None:
        buffer = tl.load(in_heap(tl.load(own_heaps_ptr), CALL, tl.int32)) & 1
    ticket, following = draw(counters_ptr), draw(counters_ptr)
    while ticket < tickets:
        kind, expert, block, row, rows, column, arrivals = look_up(ticket, tickets, table_ptr)
        after = draw(counters_ptr)

        stamp(trace_ptr, ticket, TAKEN)
        if kind == DACT:
            if DACT_PHASE > 0:
                wait(dact_done_ptr - E + expert, arrivals, FENCE)
                stamp(trace_ptr, ticket, START)
            token, slot, live = routes_of_block(row, rows, token_of_row_ptr, slot_of_row_ptr, BLOCK_R)
            r = row + tl.arange(0, BLOCK_R)
            dy_at = dy_ptr
            parts_at = None
            home = token
            if heaps_ptr is None:
                known = tokens_of_rows(row, rows, token_of_row_ptr, BLOCK_R)
                c = tl.arange(0, DACT_C).to(tl.int64)
                dy_at = dy_ptr + known[:, None] * stride_dyt + c[None, :] * stride_dyh
                route = token.to(tl.int64) * K + slot
                weight = weight_of_route(route, live, topk_weights_ptr, stride_t, stride_k, K)
                if NEED_DTOPK_WEIGHTS:
                    parts_at = parts_ptr + r.to(tl.int64) * PARTS
            else:
                weight = tl.load(weight_of_row_ptr + r, mask=live, other=0.0).to(tl.float32)
                home, its_token = home_of_rows(token, live, max_tokens)
                if NEED_DTOPK_WEIGHTS:
                    its_parts_ptr = (tl.load(heaps_ptr + home) + to_dweights).to(tl.pointer_type(tl.float32))
                    parts_at = its_parts_ptr + (its_token.to(tl.int64) * K + slot) * PARTS
            dact_strip(
                dy_at,
                dy_pool_desc,
                w_down_desc,
                pre_ptr,
                dpre_ptr,
                weighted_act_ptr,
                parts_at,
                weight,
                live,
                block,
                expert,
                row,
                column,
                stride_dyh,
                stride_dpre,
                stride_act,
                H,
                I,
                LIMIT,
                BLOCK_R,
                DACT_N,
                DACT_C,
                CHUNK,
                DACT_STRIP,
                False,
            )
            signal(dact_done_ptr + expert, 1, FENCE)
            if NEED_DTOPK_WEIGHTS and not NEED_DX:
                if heaps_ptr is None:
                    signal(rows_done_ptr, rows, False)
                else:
                    tell_homes(heaps_ptr, home, live, ROWS_ARRIVED, W, BLOCK_W)
        elif kind == DX:
            if NEED_DX:
                wait(dact_done_ptr + expert, arrivals, FENCE)
                stamp(trace_ptr, ticket, START)
                token, slot, live = routes_of_block(row, rows, token_of_row_ptr, slot_of_row_ptr, BLOCK_R)
                slots_at, home = slots_of_rows(
                    slots_ptr, heaps_ptr, token, slot, live, to_slots, max_tokens, dtype, K, H
                )
                slot_gemm_strip(
                    dpre_desc,
                    w_gate_up_desc,
                    slots_at,
                    live,
                    block,
                    expert,
                    column,
                    2 * I,
                    H,
                    False,
                    BLOCK_R,
                    DX_N,
                    DX_C,
                    DX_STRIP,
                    False,
                )
                if heaps_ptr is None:
                    signal(rows_done_ptr, rows, False)
                else:
                    tell_homes(heaps_ptr, home, live, ROWS_ARRIVED, W, BLOCK_W)
        elif kind == DW_GATE_UP:
            if dw_gate_up_ptr is not None:
                wait(dact_done_ptr + expert, arrivals, FENCE)
                stamp(trace_ptr, ticket, START)
                weight_grad_tile(
                    dpre_rows_desc,
                    x_ptr,
                    x_pool_rows_desc,
                    dw_gate_up_ptr,
                    token_of_row_ptr + row,
                    expert,
                    block * BLOCK_R,
                    rows,
                    column,
                    stride_xt,
                    stride_xh,
                    tl.cast(2 * I * H, tl.int64),
                    H,
                    1,
                    2 * I,
                    H,
                    DW_GATE_UP_M,
                    DW_GATE_UP_N,
                    DW_GATE_UP_R,
                )
        elif kind == DW_DOWN:
            if dw_down_ptr is not None:
                wait(dact_done_ptr + expert, arrivals, FENCE)
                stamp(trace_ptr, ticket, START)
                weight_grad_tile(
                    weighted_act_rows_desc,
                    dy_ptr,
                    dy_pool_rows_desc,
                    dw_down_ptr,
                    token_of_row_ptr + row,
                    expert,
                    block * BLOCK_R,
                    rows,
                    column,
                    stride_dyt,
                    stride_dyh,
                    stride_dw_down_e,
                    stride_dw_down_i,
                    stride_dw_down_h,
                    I,
                    H,
                    DW_DOWN_M,
                    DW_DOWN_N,
                    DW_DOWN_R,
                )
        elif kind == GATE_UP:
            if w_gate_up_pair_desc is not None:
                x_at = x_ptr
                if heaps_ptr is None:
                    known = tokens_of_rows(row, rows, token_of_row_ptr, BLOCK_R)
                    c = tl.arange(0, GATE_UP_C).to(tl.int64)
                    x_at = x_ptr + known[:, None] * stride_xt + c[None, :] * stride_xh
                else:
                    wait(counters_ptr + 2 + expert, arrivals, FENCE)
                    stamp(trace_ptr, ticket, START)
                gate_up_strip(
                    x_at,
                    x_pool_desc,
                    w_gate_up_pair_desc,
                    pre_ptr,
                    None,
                    block,
                    expert,
                    row,
                    rows,
                    column,
                    stride_xh,
                    0,
                    H,
                    I,
                    LIMIT,
                    BLOCK_R,
                    GATE_UP_N,
                    GATE_UP_C,
                    GATE_UP_STRIP,
                    False,
                )
                signal(dact_done_ptr - E + expert, 1, FENCE)
        elif kind == DISPATCH:
            if heaps_ptr is not None:
                dispatch_tile(
                    heaps_ptr,
                    dy_pool_ptr,
                    token_of_row_ptr,
                    block,
                    row,
                    rows,
                    buffer,
                    max_tokens,
                    to_dy,
                    stride_pool,
                    H,
                    BLOCK_R,
                    PULL_R,
                    PULL_H,
                )
                if x_pool_ptr is not None:
                    dispatch_tile(
                        heaps_ptr,
                        x_pool_ptr,
                        token_of_row_ptr,
                        block,
                        row,
                        rows,
                        buffer,
                        max_tokens,
                        to_x,
                        stride_pool,
                        H,
                        BLOCK_R,
                        PULL_R,
                        PULL_H,
                    )
                token, slot, live = routes_of_block(row, rows, token_of_row_ptr, slot_of_row_ptr, BLOCK_R)
                home, its_token = home_of_rows(token, live, max_tokens)
                weights_dtype: tl.constexpr = weight_of_row_ptr.dtype.element_ty
                pulled = pull_weights(
                    heaps_ptr, home, its_token, slot, live, to_topk_weights, buffer, max_tokens, weights_dtype, K
                )
                tl.store(weight_of_row_ptr + row + tl.arange(0, BLOCK_R), pulled, mask=live)
                signal(counters_ptr + 2 + expert, 1, FENCE)
        else:
            if heaps_ptr is None:
                wait(rows_done_ptr, arrivals, False)
                end = T
                its_slots_ptr = slots_ptr
                its_parts_ptr = parts_ptr
                late = False
            else:
                heap, first_token, end = rank_of_tile(ticket, table_ptr, own_heaps_ptr, token_start_ptr)
                late = wait_for_rows(heap, arrivals, heaps_ptr, own_heaps_ptr, CALL, ROWS_ARRIVED, PAGE, W)
                its_slots_ptr = in_heap(heap, to_slots, dtype) - first_token.to(tl.int64) * (K * H)
                its_parts_ptr = in_heap(heap, to_dweights, tl.float32) - first_token.to(tl.int64) * (K * PARTS)
            stamp(trace_ptr, ticket, START)
            if NEED_DX:
                combine_tile(its_slots_ptr, None, row_of_slot_ptr, dx_ptr, row, end, late, 0, 0, K, H, BLOCK_T, BLOCK_H)
            if NEED_DTOPK_WEIGHTS:
                BY_ROUTE: tl.constexpr = heaps_ptr is not None
                first_route, end_route = row * K, tl.minimum(row + BLOCK_T, end) * K
                for i in tl.static_range(K):
                    at = first_route + i * BLOCK_T + tl.arange(0, BLOCK_T)
                    add_parts(
                        its_parts_ptr,
                        row_of_slot_ptr,
                        dtopk_weights_ptr,
                        at,
                        at < end_route,
                        late,
                        PARTS,
                        BY_ROUTE,
                        BLOCK_T,
                    )
        stamp(trace_ptr, ticket, END)

        ticket, following = following, after
    clock_out(trace_ptr)


# --8<-- [end:backward]


def mega_forward(
    problem: Problem,
    inputs: Inputs,
    plan: Plan,
    schedule: Schedule,
    tiles: Mega,
    memory: Memory | None = None,
    trace: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y (T, H), and pre (R, 2, I) if the problem saves it, in one launch. act and slots live while it runs.

    memory: the heaps, over ranks. trace: `clock.empty_trace`, to be filled in with the time of every tile.
    """
    p, x = problem, inputs.x
    y = x.new_empty(p.T, p.H)
    pre = x.new_empty(p.R, 2, p.I) if p.save == "pre" else None
    rows = blocks_bound(p, tiles) * tiles.BLOCK_R
    act = aligned((rows, p.I), like=x)
    slots = x.new_empty(p.T, p.K, p.H) if memory is None else None
    pool = aligned((rows, p.H), like=x) if memory is not None else None
    if p.R:
        gate_up, down = tiles.gate_up, tiles.down
        mega_forward_kernel[(programs(tiles.gate_up),)](
            x,
            inputs.topk_weights,
            descriptor(readable(inputs.w_gate_up).unflatten(1, (2, p.I)), 1, 2, gate_up.BLOCK_N, gate_up.BLOCK_C),
            descriptor(readable(inputs.w_down), 1, down.BLOCK_N, down.BLOCK_C),
            pre,
            act,
            descriptor(act, tiles.BLOCK_R, down.BLOCK_C),
            slots,
            y,
            schedule.table,
            schedule.counters,
            *plan[1:],
            *(memory.addresses, memory.own, memory.token_start) if memory else (None, None, None),
            pool,
            descriptor(pool, tiles.BLOCK_R, gate_up.BLOCK_C) if memory else None,
            trace,
            p.T,
            p.E_here,
            *offsets_of(memory, "x", "slots"),
            *x.stride(),
            *inputs.topk_weights.stride(),
            act.stride(0),
            stride_pool=pool.stride(0) if memory else 0,
            K=p.K,
            H=p.H,
            I=p.I,
            LIMIT=p.swiglu_limit,
            BLOCK_R=tiles.BLOCK_R,
            GATE_UP_N=gate_up.BLOCK_N,
            GATE_UP_C=gate_up.BLOCK_C,
            GATE_UP_STRIP=gate_up.STRIP,
            DOWN_N=down.BLOCK_N,
            DOWN_C=down.BLOCK_C,
            DOWN_STRIP=down.STRIP,
            PULL_R=tiles.pull.BLOCK_R,
            PULL_H=tiles.pull.BLOCK_N,
            FENCE=needs_fence(),
            **exchange_of(memory, tiles),
            num_warps=gate_up.num_warps,
            num_stages=gate_up.num_stages,
        )
    return y, pre


def mega_backward(
    problem: Problem,
    inputs: Inputs,
    plan: Plan,
    pre: Tensor | None,
    dy: Tensor,
    need: Need,
    schedule: Schedule,
    tiles: Mega,
    memory: Memory | None = None,
    trace: Tensor | None = None,
) -> Grads:
    """The needed gradients in one launch. pre: (R, 2, I); None where the schedule's gate_up tiles make it again.

    memory: the heaps, over ranks. trace: `clock.empty_trace`, to be filled in with the time of every tile.
    """
    p, x, work = problem, inputs.x, schedule.work
    rows = blocks_bound(p, tiles) * tiles.BLOCK_R
    gate_up, dact, dx = tiles.gate_up, tiles.dact, tiles.dx
    dw_gate_up, dw_down = tiles.dw_gate_up, tiles.dw_down
    w_gate_up, w_down = readable(inputs.w_gate_up), readable(inputs.w_down)
    recompute = pre is None
    if recompute:
        pre = x.new_empty(p.R, 2, p.I)
    dpre = aligned((rows, 2 * p.I), like=x) if need.dpre else None
    weighted_act = aligned((rows, p.I), like=x) if need.dw_down else None
    slots = parts = weight_of_row = dy_pool = x_pool = None
    if memory is None:
        slots = x.new_empty(p.T, p.K, p.H) if need.dx else None
        if need.dtopk_weights:
            parts = x.new_empty(p.R, parts_of_weight(p, tiles), dtype=torch.float32)
    else:
        weight_of_row = inputs.topk_weights.new_empty(p.R)
        dy_pool = aligned((rows, p.H), like=x)
        x_pool = aligned((rows, p.H), like=x) if need.dw_gate_up or recompute else None
    grads = Grads(
        dx=x.new_empty(p.T, p.H) if need.dx else None,
        dtopk_weights=inputs.topk_weights.new_empty(p.T, p.K) if need.dtopk_weights else None,
        dw_gate_up=inputs.w_gate_up.new_empty(inputs.w_gate_up.shape) if need.dw_gate_up else None,
        dw_down=inputs.w_down.new_empty(inputs.w_down.shape) if need.dw_down else None,
    )
    mega_backward_kernel[(programs(tiles.gate_up),)](
        dy,
        x,
        inputs.topk_weights,
        descriptor(w_down, 1, dact.BLOCK_C, dact.BLOCK_N),
        descriptor(w_gate_up, 1, dx.BLOCK_C, dx.BLOCK_N),
        descriptor(w_gate_up.unflatten(1, (2, p.I)), 1, 2, gate_up.BLOCK_N, gate_up.BLOCK_C) if recompute else None,
        pre,
        dpre,
        descriptor(dpre, tiles.BLOCK_R, dx.BLOCK_C) if need.dx else None,
        descriptor(dpre, dw_gate_up.BLOCK_R, dw_gate_up.BLOCK_M) if need.dw_gate_up else None,
        weighted_act,
        descriptor(weighted_act, dw_down.BLOCK_R, dw_down.BLOCK_M) if need.dw_down else None,
        parts,
        slots,
        grads.dx,
        grads.dtopk_weights,
        grads.dw_gate_up,
        grads.dw_down,
        schedule.table,
        schedule.counters,
        *plan[1:],
        *(memory.addresses, memory.own, memory.token_start) if memory else (None, None, None),
        weight_of_row,
        dy_pool,
        descriptor(dy_pool, tiles.BLOCK_R, dact.BLOCK_C) if memory else None,
        descriptor(dy_pool, dw_down.BLOCK_R, dw_down.BLOCK_N) if memory and need.dw_down else None,
        x_pool,
        descriptor(x_pool, tiles.BLOCK_R, gate_up.BLOCK_C) if memory and recompute else None,
        descriptor(x_pool, dw_gate_up.BLOCK_R, dw_gate_up.BLOCK_N) if memory and need.dw_gate_up else None,
        trace,
        p.T,
        p.E_here,
        *offsets_of(memory, "x", "dy", "topk_weights", "slots", "dweights"),
        *dy.stride(),
        *x.stride(),
        *inputs.topk_weights.stride(),
        dpre.stride(0) if need.dpre else 0,
        weighted_act.stride(0) if need.dw_down else 0,
        *(p.H * p.I, 1, p.I),
        stride_pool=dy_pool.stride(0) if memory else 0,
        K=p.K,
        H=p.H,
        I=p.I,
        LIMIT=p.swiglu_limit,
        PHASES=len(work.phases),
        DACT_PHASE=work.waits_for,
        BLOCK_R=tiles.BLOCK_R,
        GATE_UP_N=gate_up.BLOCK_N,
        GATE_UP_C=gate_up.BLOCK_C,
        GATE_UP_STRIP=gate_up.STRIP,
        DACT_N=dact.BLOCK_N,
        DACT_C=dact.BLOCK_C,
        DACT_STRIP=dact.STRIP,
        CHUNK=dact.CHUNK,
        DX_N=dx.BLOCK_N,
        DX_C=dx.BLOCK_C,
        DX_STRIP=dx.STRIP,
        DW_GATE_UP_M=dw_gate_up.BLOCK_M,
        DW_GATE_UP_N=dw_gate_up.BLOCK_N,
        DW_GATE_UP_R=dw_gate_up.BLOCK_R,
        DW_DOWN_M=dw_down.BLOCK_M,
        DW_DOWN_N=dw_down.BLOCK_N,
        DW_DOWN_R=dw_down.BLOCK_R,
        NEED_DX=need.dx,
        NEED_DTOPK_WEIGHTS=need.dtopk_weights,
        PULL_R=tiles.pull.BLOCK_R,
        PULL_H=tiles.pull.BLOCK_N,
        FENCE=needs_fence(),
        **exchange_of(memory, tiles),
        num_warps=dact.num_warps,
        num_stages=dact.num_stages,
    )
    return grads


def blocks_bound(problem: Problem, tiles: Mega) -> int:
    """The most blocks of rows that any routing takes: every expert may leave its last one unfilled."""
    return problem.R // tiles.BLOCK_R + problem.E_here


def parts_of_weight(problem: Problem, tiles: Mega) -> int:
    """Of how many parts the gradient of a route's weight is the sum: one a tile of dact."""
    return triton.cdiv(problem.I, tiles.dact.BLOCK_N)


def offsets_of(memory: Memory | None, *names: str) -> list[int]:
    """max_tokens, and where views of these names stand in a heap; zeros without one."""
    if memory is None:
        return [0] * (1 + len(names))
    at = memory.layout.offsets()
    return [memory.layout.max_tokens, *(at[name] for name in names)]


def exchange_of(memory: Memory | None, tiles: Mega) -> dict[str, int]:
    """What kernels must know of ranks, and of combine tiles."""
    at = memory.layout.offsets() if memory else {}
    W = memory.layout.W if memory else 1
    return dict(
        CALL=at.get("call", 0),
        ROWS_ARRIVED=at.get("rows_arrived", 0),
        PAGE=at.get("page", 0),
        W=W,
        BLOCK_W=triton.next_power_of_2(W),
        BLOCK_T=tiles.combine.BLOCK_R,
        BLOCK_H=tiles.combine.BLOCK_N,
    )
