"""One launch a direction, of products of 8-bit codes: mega.py's launch with the strips of scaled.py.

The order of tiles, what they wait for and what they signal are mega.py's. A tile hands its results on as codes and
scales, all of which it has when it signals: an epilogue quantises whole groups, by row and by column.

One thing no epilogue can make. A weight gradient contracts over an expert's rows, for which its tokens are quantised
128 rows of a column at a time, once their rows are known. That waits for nothing, and multiplies nothing: it is what
dispatch tiles do here. Tokens by row and weights do not depend on the routing; launches before this one quantise them,
in every call, so that no change of a weight is missed.

Over ranks forward pulls codes, which their homes have made and published (see meet.py). Backward pulls rows as they
are, since its weight gradients need them by column, and quantises them both ways as they come.

The compiler hoists nothing out of the loop over tickets. What it would find there, indices and masks of all kinds of
tiles, takes no time to make again, and would take registers from each of them: in backward 750 bytes of a thread would
lie in memory, and not 120. (The interpreter knows nothing of `tl.condition`, and would never leave such a loop.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..schedule import KINDS
from ..shapes import Grads, Inputs, Need, Plan, Problem
from ..symmetric import Memory
from .blocks import Mega, fp8_tiles, programs
from .clock import END, START, TAKEN, clock_in, clock_out, stamp
from .exchange import home_of_rows, pull_tile, pull_weights, slots_of_rows, tell_homes
from .fused_swiglu import add_parts
from .meet import in_heap
from .mega import (
    blocks_bound,
    combine_tile,
    dispatch_tile,
    exchange_of,
    look_up,
    offsets_of,
    parts_of_weight,
    rank_of_tile,
    routes_of_block,
    wait_for_rows,
)
from .persistent import descriptor, gate_up_strip
from .quantize import (
    ALONG,
    Quantised,
    columns_of_blocks,
    every_fourth,
    quantise,
    quantise_columns_tile,
    quantise_rows,
    quantise_weights,
    rows_of_blocks,
    store_columns,
    tokens_in_blocks,
)
from .scaled import (
    codes_and_scales,
    quantise_backward,
    scaled_backward_epilogue,
    scaled_dact_tile,
    scaled_gate_up_strip,
    scaled_slot_gemm_tile,
    scaled_weight_grad_tile,
    scratch,
    store_slots,
    zeros,
)
from .schedule import Schedule
from .signal import draw, needs_fence, signal, wait
from .tile import INTERPRETED, rows_at, tokens_of_rows, weight_of_route
from .weights import aligned, readable

DISPATCH = tl.constexpr(KINDS.index("dispatch"))
GATE_UP = tl.constexpr(KINDS.index("gate_up"))
DOWN = tl.constexpr(KINDS.index("down"))
DACT = tl.constexpr(KINDS.index("dact"))
DX = tl.constexpr(KINDS.index("dx"))
DW_GATE_UP = tl.constexpr(KINDS.index("dw_gate_up"))
DW_DOWN = tl.constexpr(KINDS.index("dw_down"))


# --8<-- [start:dispatch]
@triton.jit
def quantise_block(
    tokens_ptr,  # (T, N) read, any strides
    codes_ptr,  # (N, rows in blocks) written at the block
    scales_ptr,  # (blocks, N) fp32, likewise
    token,
    live,
    block,
    stride_t,
    stride_n,
    stride_codes,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Quantise a block's tokens by column. Rows that pad it become zeros."""
    for start in range(0, N, BLOCK_N):
        quantise_columns_tile(
            tokens_ptr,
            codes_ptr,
            scales_ptr,
            token.to(tl.int64),
            live,
            block.to(tl.int64),
            start + tl.arange(0, BLOCK_N),
            stride_t,
            stride_n,
            stride_codes,
            N,
        )


@triton.jit
def pull_and_quantise(
    heaps_ptr,  # (W,) int64, read: where each rank's heap begins
    codes_ptr,  # (rows in blocks, N) written at the block; or None
    scales_ptr,  # (rows in blocks, groups of N), likewise; or None
    columns_ptr,  # (N, rows in blocks) codes, likewise; or None
    columns_scales_ptr,  # (blocks, N), likewise; or None
    pool_ptr,  # (rows in blocks, N) as they are, likewise; or None
    home,
    token,  # of each row, at its home
    live,
    block,
    buffer,
    max_tokens,
    to_view,
    stride_codes,
    stride_columns,
    stride_pool,
    dtype: tl.constexpr,
    N: tl.constexpr,
):
    """Pull a block's rows from the ranks that hold their tokens, and store them as wanted: quantised by row, by column,
    or as they are. Rows that pad it become zeros."""
    groups: tl.constexpr = (N + ALONG - 1) // ALONG
    r = block.to(tl.int64) * ALONG + 4 * tl.arange(0, ALONG // 4)
    homes, tokens, alive = every_fourth(home), every_fourth(token), every_fourth(live)
    for group in range(groups):
        n = group * ALONG + tl.arange(0, ALONG)
        rows = ()
        for i in tl.static_range(4):
            pulled = pull_tile(heaps_ptr, homes[i], tokens[i], alive[i], n, to_view, buffer, max_tokens, dtype, N)
            if pool_ptr is not None:
                tl.store(pool_ptr + (r + i)[:, None] * stride_pool + n[None, :], pulled, mask=(n < N)[None, :])
            if codes_ptr is not None:
                codes, scale = quantise(pulled.to(tl.float32), 1)
                to_codes = codes_ptr + (r + i)[:, None] * stride_codes + n[None, :]
                tl.store(to_codes, codes, mask=(n < N)[None, :])
                tl.store(scales_ptr + (r + i) * groups + group, scale)
            rows += (pulled,)
        if columns_ptr is not None:
            to_scales = columns_scales_ptr + block.to(tl.int64) * N
            store_columns(columns_ptr, to_scales, rows, block.to(tl.int64), n, stride_columns, N)


# --8<-- [end:dispatch]


# --8<-- [start:forward]
@triton.jit(do_not_specialize=["T", "E", "max_tokens", "to_x_codes", "to_x_scales", "to_slots"])
def scaled_mega_forward_kernel(
    x_ptr,  # (T, H) codes, read; or None over ranks
    x_scales_ptr,  # (T, groups of H), read; or None over ranks
    topk_weights_ptr,  # (T, K) read, any strides
    w_gate_up_desc,  # (E, 2, I, H) codes, read
    w_gate_up_scales_ptr,  # (E, 2, groups of I, groups of H), read
    w_down_desc,  # (E, H, I) codes, read
    w_down_scales_ptr,  # (E, groups of H, groups of I), read
    pre_ptr,  # (R, 2, I) written where a row has an expert; or None
    act_ptr,  # (rows in blocks, I) codes, written in every block that holds rows, and read again
    act_desc,  # the same
    act_scales_ptr,  # (groups of I, rows in blocks), likewise
    scratch_ptr,  # (programs, BLOCK_R, GATE_UP_N) written, and read again
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
    pool_ptr,  # (rows in blocks, H) codes, written in every block that holds rows, and read again
    pool_desc,  # the same
    pool_scales_ptr,  # (rows in blocks, groups of H), likewise
    trace_ptr,  # int64 words, written as clock.py says; or None
    T,
    E,
    max_tokens,
    to_x_codes,  # where things stand in a heap, in bytes
    to_x_scales,
    to_slots,
    stride_x,
    stride_t,
    stride_k,
    stride_act,
    stride_act_scales,  # rows in blocks
    stride_pool,
    K: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATE_UP_N: tl.constexpr,
    GATE_UP_C: tl.constexpr,
    GATE_UP_STRIP: tl.constexpr,
    GATE_UP_CHUNK: tl.constexpr,
    DOWN_N: tl.constexpr,
    DOWN_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PULL_R: tl.constexpr,
    PULL_H: tl.constexpr,
    PULL_SCALES: tl.constexpr,
    CALL: tl.constexpr,
    ROWS_ARRIVED: tl.constexpr,
    PAGE: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Grid: one program a processor. Counters, waits and signals are those of mega_forward_kernel. Over ranks dispatch
    pulls codes, and their scales with them."""
    clock_in(trace_ptr)
    tickets = tl.load(counters_ptr + 1)
    dispatched_ptr = counters_ptr + 2
    gate_up_done_ptr = dispatched_ptr
    if heaps_ptr is not None:
        gate_up_done_ptr = dispatched_ptr + E
        buffer = tl.load(in_heap(tl.load(own_heaps_ptr), CALL, tl.int32)) & 1
    rows_done_ptr = gate_up_done_ptr + 2 * E
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    H_GROUPS: tl.constexpr = (H + ALONG - 1) // ALONG
    I_GROUPS: tl.constexpr = (I + ALONG - 1) // ALONG
    ticket, following = draw(counters_ptr), draw(counters_ptr)
    while (ticket < tickets) if INTERPRETED else tl.condition(ticket < tickets, disable_licm=True):
        kind, expert, block, row, rows, column, arrivals = look_up(ticket, tickets, table_ptr)
        after = draw(counters_ptr)

        stamp(trace_ptr, ticket, TAKEN)
        if kind == GATE_UP:
            its_scales_ptr = x_scales_ptr
            if heaps_ptr is not None:
                wait(dispatched_ptr + expert, arrivals, FENCE)
                stamp(trace_ptr, ticket, START)
                its_scales_ptr = pool_scales_ptr
            scaled_gate_up_strip(
                x_ptr,
                pool_desc,
                its_scales_ptr,
                token_of_row_ptr,
                w_gate_up_desc,
                w_gate_up_scales_ptr,
                pre_ptr,
                act_ptr,
                act_scales_ptr,
                scratch_ptr,
                block,
                expert,
                row,
                rows,
                column,
                stride_x,
                stride_act,
                stride_act_scales,
                H,
                I,
                LIMIT,
                dtype,
                BLOCK_R,
                ROWS,
                COLUMNS,
                GATE_UP_N,
                GATE_UP_C,
                GATE_UP_STRIP,
                GATE_UP_CHUNK,
            )
            signal(gate_up_done_ptr + expert, 1, FENCE)
        elif kind == DOWN:
            wait(gate_up_done_ptr + expert, arrivals, FENCE)
            stamp(trace_ptr, ticket, START)
            accs = scaled_slot_gemm_tile(
                act_desc,
                act_scales_ptr,
                w_down_desc,
                w_down_scales_ptr,
                block,
                expert,
                column,
                stride_act_scales,
                1,
                I_GROUPS,
                1,
                I,
                H,
                BLOCK_R,
                ROWS,
                COLUMNS,
                DOWN_N,
                DOWN_C,
            )
            for i in tl.static_range(BLOCK_R // ROWS):
                start = i * ROWS
                token, slot, live = routes_of_block(row + start, rows - start, token_of_row_ptr, slot_of_row_ptr, ROWS)
                slots_at, _ = slots_of_rows(slots_ptr, heaps_ptr, token, slot, live, to_slots, max_tokens, dtype, K, H)
                store_slots(accs, i, slots_at, live, column * DOWN_N, H, COLUMNS, DOWN_N // COLUMNS)
            if heaps_ptr is None:
                signal(rows_done_ptr, rows, False)
            else:
                token, _, live = routes_of_block(row, rows, token_of_row_ptr, slot_of_row_ptr, BLOCK_R)
                home, _ = home_of_rows(token, live, max_tokens)
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
                    to_x_codes,
                    stride_pool,
                    H,
                    BLOCK_R,
                    PULL_R,
                    PULL_H,
                )
                dispatch_tile(
                    heaps_ptr,
                    pool_scales_ptr,
                    token_of_row_ptr,
                    block,
                    row,
                    rows,
                    buffer,
                    max_tokens,
                    to_x_scales,
                    H_GROUPS,
                    H_GROUPS,
                    BLOCK_R,
                    PULL_R,
                    PULL_SCALES,
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
    clock_out(trace_ptr)


# --8<-- [end:forward]


# --8<-- [start:backward]
@triton.jit(do_not_specialize=["T", "E", "max_tokens", "to_x", "to_dy", "to_topk_weights", "to_slots", "to_dweights"])
def scaled_mega_backward_kernel(
    dy_ptr,  # (T, H) read, any strides: quantised by column here
    x_ptr,  # (T, H) read, any strides: likewise; and as it is by a gate_up that does not multiply codes
    dy_codes_ptr,  # (T, H) read; over ranks (rows in blocks, H), written by dispatch, and read again
    dy_codes_desc,  # the same; over ranks only
    dy_scales_ptr,  # (T, groups of H), read; over ranks of rows in blocks, likewise
    x_codes_ptr,  # as dy_codes_ptr, for gate_up; or None
    x_codes_desc,  # the same; over ranks only
    x_scales_ptr,  # as dy_scales_ptr; or None
    topk_weights_ptr,  # (T, K) read, any strides
    w_down_desc,  # (E, I, H) codes, transposed, read
    w_down_scales_ptr,  # (E, groups of H, groups of I), read
    w_gate_up_desc,  # (E * 2, H, I) codes, transposed, read; or None
    w_gate_up_pair_desc,  # (E, 2, I, H) read by gate_up, codes or as it is; or None
    w_gate_up_scales_ptr,  # (E, 2, groups of I, groups of H), read; or None
    pre_ptr,  # (R, 2, I) read; with gate_up in the schedule written before
    dpre_ptr,  # (2, rows in blocks, I) codes, written in every block that holds rows, and read again; or None
    dpre_desc,  # the same
    dpre_scales_ptr,  # (2 * groups of I, rows in blocks), likewise
    dpre_columns_ptr,  # (2I, rows in blocks) codes, likewise; or None
    dpre_columns_desc,  # the same
    dpre_columns_scales_ptr,  # (blocks, 2I), likewise
    act_columns_ptr,  # (I, rows in blocks) codes of weighted act, likewise; or None
    act_columns_desc,  # the same
    act_columns_scales_ptr,  # (blocks, I), likewise
    x_columns_ptr,  # (H, rows in blocks) codes, likewise; or None
    x_columns_desc,  # the same
    x_columns_scales_ptr,  # (blocks, H), likewise
    dy_columns_ptr,  # (H, rows in blocks) codes, likewise; or None
    dy_columns_desc,  # the same
    dy_columns_scales_ptr,  # (blocks, H), likewise
    parts_ptr,  # (R, blocks of I) fp32, written where a row has an expert, and read again; or None
    scratch_ptr,  # (programs, BLOCK_R, 3 * DACT_N) written, and read again
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
    x_pool_ptr,  # (rows in blocks, H) written in every block that holds rows, and read again: rows as they are, for a
    # gate_up that does not multiply codes; or None
    x_pool_desc,  # the same
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
    stride_dy_codes,
    stride_x_codes,
    stride_t,
    stride_k,
    stride_dpre,
    stride_columns,  # rows in blocks
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATE_UP_N: tl.constexpr,
    GATE_UP_C: tl.constexpr,
    GATE_UP_STRIP: tl.constexpr,
    GATE_UP_CHUNK: tl.constexpr,
    DACT_N: tl.constexpr,
    DACT_C: tl.constexpr,
    CHUNK: tl.constexpr,
    DX_N: tl.constexpr,
    DX_C: tl.constexpr,
    DW_GATE_UP_M: tl.constexpr,
    DW_GATE_UP_N: tl.constexpr,
    DW_GATE_UP_R: tl.constexpr,
    DW_DOWN_M: tl.constexpr,
    DW_DOWN_N: tl.constexpr,
    DW_DOWN_R: tl.constexpr,
    QUANTISE_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CALL: tl.constexpr,
    ROWS_ARRIVED: tl.constexpr,
    PAGE: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DTOPK_WEIGHTS: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Grid: one program a processor. Counters, waits and signals are those of mega_backward_kernel, and of dispatch:

    dispatch     waits for nothing                        signals its expert; over ranks, or for weight gradients
    gate_up      waits for dispatch of its expert, if any
    dw_gate_up   waits for all dact tiles of its expert, and these have waited for dispatch
    dw_down      likewise

    Over ranks dispatch pulls rows as they are, for nothing is quantised from codes: by row for dact and gate_up, by
    column for weight gradients.
    """
    clock_in(trace_ptr)
    tickets = tl.load(counters_ptr + 1)
    dact_done_ptr = counters_ptr + 2 + DACT_PHASE * E
    rows_done_ptr = counters_ptr + 2 + PHASES * E
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    H_GROUPS: tl.constexpr = (H + ALONG - 1) // ALONG
    PARTS: tl.constexpr = (I + DACT_N - 1) // DACT_N
    if heaps_ptr is not None:
        buffer = tl.load(in_heap(tl.load(own_heaps_ptr), CALL, tl.int32)) & 1
    ticket, following = draw(counters_ptr), draw(counters_ptr)
    while (ticket < tickets) if INTERPRETED else tl.condition(ticket < tickets, disable_licm=True):
        kind, expert, block, row, rows, column, arrivals = look_up(ticket, tickets, table_ptr)
        after = draw(counters_ptr)

        stamp(trace_ptr, ticket, TAKEN)
        if kind == DACT:
            if DACT_PHASE > 0:
                wait(dact_done_ptr - E + expert, arrivals, FENCE)
                stamp(trace_ptr, ticket, START)
            dacts = zeros((BLOCK_R // ROWS) * (DACT_N // COLUMNS), ROWS, COLUMNS)
            if dpre_ptr is not None or dpre_columns_ptr is not None or NEED_DTOPK_WEIGHTS:
                dacts = scaled_dact_tile(
                    dy_codes_ptr,
                    dy_codes_desc,
                    dy_scales_ptr,
                    token_of_row_ptr,
                    w_down_desc,
                    w_down_scales_ptr,
                    block,
                    expert,
                    row,
                    rows,
                    column,
                    stride_dy_codes,
                    H,
                    I,
                    BLOCK_R,
                    ROWS,
                    COLUMNS,
                    DACT_N,
                    DACT_C,
                )
            its_scratch_ptr = scratch_ptr + tl.program_id(0) * (BLOCK_R * 3 * DACT_N)
            tl.debug_barrier()  # all threads have read what the tile before left
            for i in tl.static_range(BLOCK_R // ROWS):
                start = i * ROWS
                token, slot, live = routes_of_block(row + start, rows - start, token_of_row_ptr, slot_of_row_ptr, ROWS)
                r = row + start + tl.arange(0, ROWS)
                if heaps_ptr is None:
                    route = token.to(tl.int64) * K + slot
                    weight = weight_of_route(route, live, topk_weights_ptr, stride_t, stride_k, K)
                else:
                    weight = tl.load(weight_of_row_ptr + r, mask=live, other=0.0).to(tl.float32)
                part = scaled_backward_epilogue(
                    dacts,
                    i,
                    rows_at(pre_ptr, r, 2 * I),
                    rows_at(its_scratch_ptr, start + tl.arange(0, ROWS), 3 * DACT_N),
                    weight,
                    live,
                    column * DACT_N,
                    LIMIT,
                    I,
                    ROWS,
                    COLUMNS,
                    DACT_N,
                    CHUNK,
                )
                if NEED_DTOPK_WEIGHTS:
                    if heaps_ptr is None:
                        parts_at = rows_at(parts_ptr, r, PARTS)
                    else:
                        home, its_token = home_of_rows(token, live, max_tokens)
                        its_parts_ptr = (tl.load(heaps_ptr + home) + to_dweights).to(tl.pointer_type(tl.float32))
                        parts_at = its_parts_ptr + (its_token.to(tl.int64) * K + slot) * PARTS
                    tl.store(parts_at + column, part, mask=live)
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
                DACT_N,
            )
            signal(dact_done_ptr + expert, 1, FENCE)
            if NEED_DTOPK_WEIGHTS and not NEED_DX:
                if heaps_ptr is None:
                    signal(rows_done_ptr, rows, False)
                else:
                    token, _, live = routes_of_block(row, rows, token_of_row_ptr, slot_of_row_ptr, BLOCK_R)
                    home, _ = home_of_rows(token, live, max_tokens)
                    tell_homes(heaps_ptr, home, live, ROWS_ARRIVED, W, BLOCK_W)
        elif kind == DX:
            if NEED_DX:
                wait(dact_done_ptr + expert, arrivals, FENCE)
                stamp(trace_ptr, ticket, START)
                accs = scaled_slot_gemm_tile(
                    dpre_desc,
                    dpre_scales_ptr,
                    w_gate_up_desc,
                    w_gate_up_scales_ptr,
                    block,
                    expert,
                    column,
                    stride_columns,
                    H_GROUPS,
                    1,
                    2,
                    I,
                    H,
                    BLOCK_R,
                    ROWS,
                    COLUMNS,
                    DX_N,
                    DX_C,
                )
                for i in tl.static_range(BLOCK_R // ROWS):
                    start = i * ROWS
                    token, slot, live = routes_of_block(
                        row + start, rows - start, token_of_row_ptr, slot_of_row_ptr, ROWS
                    )
                    slots_at, _ = slots_of_rows(
                        slots_ptr, heaps_ptr, token, slot, live, to_slots, max_tokens, dtype, K, H
                    )
                    store_slots(accs, i, slots_at, live, column * DX_N, H, COLUMNS, DX_N // COLUMNS)
                if heaps_ptr is None:
                    signal(rows_done_ptr, rows, False)
                else:
                    token, _, live = routes_of_block(row, rows, token_of_row_ptr, slot_of_row_ptr, BLOCK_R)
                    home, _ = home_of_rows(token, live, max_tokens)
                    tell_homes(heaps_ptr, home, live, ROWS_ARRIVED, W, BLOCK_W)
        elif kind == DW_GATE_UP:
            if dw_gate_up_ptr is not None:
                wait(dact_done_ptr + expert, arrivals, FENCE)
                stamp(trace_ptr, ticket, START)
                scaled_weight_grad_tile(
                    dpre_columns_desc,
                    dpre_columns_scales_ptr,
                    x_columns_desc,
                    x_columns_scales_ptr,
                    dw_gate_up_ptr,
                    expert,
                    block,
                    rows,
                    column,
                    tl.cast(2 * I * H, tl.int64),
                    H,
                    1,
                    2 * I,
                    H,
                    DW_GATE_UP_M,
                    DW_GATE_UP_N,
                    DW_GATE_UP_R,
                    ROWS,
                    COLUMNS,
                )
        elif kind == DW_DOWN:
            if dw_down_ptr is not None:
                wait(dact_done_ptr + expert, arrivals, FENCE)
                stamp(trace_ptr, ticket, START)
                scaled_weight_grad_tile(
                    act_columns_desc,
                    act_columns_scales_ptr,
                    dy_columns_desc,
                    dy_columns_scales_ptr,
                    dw_down_ptr,
                    expert,
                    block,
                    rows,
                    column,
                    stride_dw_down_e,
                    stride_dw_down_i,
                    stride_dw_down_h,
                    I,
                    H,
                    DW_DOWN_M,
                    DW_DOWN_N,
                    DW_DOWN_R,
                    ROWS,
                    COLUMNS,
                )
        elif kind == GATE_UP:
            if w_gate_up_pair_desc is not None:
                if DACT_PHASE > 1:
                    wait(counters_ptr + 2 + expert, arrivals, FENCE)
                    stamp(trace_ptr, ticket, START)
                if x_codes_ptr is None:
                    x_at = x_ptr
                    if heaps_ptr is None:
                        known = tokens_of_rows(row, rows, token_of_row_ptr, BLOCK_R)
                        c = tl.arange(0, GATE_UP_C).to(tl.int64)
                        x_at = x_ptr + known[:, None] * stride_xt + c[None, :] * stride_xh
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
                else:
                    scaled_gate_up_strip(
                        x_codes_ptr,
                        x_codes_desc,
                        x_scales_ptr,
                        token_of_row_ptr,
                        w_gate_up_pair_desc,
                        w_gate_up_scales_ptr,
                        pre_ptr,
                        None,
                        None,
                        scratch_ptr,
                        block,
                        expert,
                        row,
                        rows,
                        column,
                        stride_x_codes,
                        0,
                        0,
                        H,
                        I,
                        LIMIT,
                        dtype,
                        BLOCK_R,
                        ROWS,
                        COLUMNS,
                        GATE_UP_N,
                        GATE_UP_C,
                        GATE_UP_STRIP,
                        GATE_UP_CHUNK,
                    )
                signal(dact_done_ptr - E + expert, 1, False)
        elif kind == DISPATCH:
            token, slot, live = routes_of_block(row, rows, token_of_row_ptr, slot_of_row_ptr, BLOCK_R)
            if heaps_ptr is None:
                if dy_columns_ptr is not None:
                    quantise_block(
                        dy_ptr,
                        dy_columns_ptr,
                        dy_columns_scales_ptr,
                        token,
                        live,
                        block,
                        stride_dyt,
                        stride_dyh,
                        stride_columns,
                        H,
                        QUANTISE_N,
                    )
                if x_columns_ptr is not None:
                    quantise_block(
                        x_ptr,
                        x_columns_ptr,
                        x_columns_scales_ptr,
                        token,
                        live,
                        block,
                        stride_xt,
                        stride_xh,
                        stride_columns,
                        H,
                        QUANTISE_N,
                    )
            else:
                home, its_token = home_of_rows(token, live, max_tokens)
                pull_and_quantise(
                    heaps_ptr,
                    dy_codes_ptr,
                    dy_scales_ptr,
                    dy_columns_ptr,
                    dy_columns_scales_ptr,
                    None,
                    home,
                    its_token,
                    live,
                    block,
                    buffer,
                    max_tokens,
                    to_dy,
                    stride_dy_codes,
                    stride_columns,
                    0,
                    dtype,
                    H,
                )
                if x_codes_ptr is not None or x_columns_ptr is not None or x_pool_ptr is not None:
                    pull_and_quantise(
                        heaps_ptr,
                        x_codes_ptr,
                        x_scales_ptr,
                        x_columns_ptr,
                        x_columns_scales_ptr,
                        x_pool_ptr,
                        home,
                        its_token,
                        live,
                        block,
                        buffer,
                        max_tokens,
                        to_x,
                        stride_x_codes,
                        stride_columns,
                        stride_pool,
                        dtype,
                        H,
                    )
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


def scaled_mega_forward(
    problem: Problem,
    inputs: Inputs,
    plan: Plan,
    schedule: Schedule,
    tiles: Mega,
    memory: Memory | None = None,
    trace: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y (T, H), and pre (R, 2, I) if the problem saves it: x and both weights are quantised, a launch each, and one
    launch does all else.

    memory: the heaps, over ranks; x has been published in them, quantised. trace: `clock.empty_trace`, to be filled in
    with the time of every tile.
    """
    p, dtype, device = problem, inputs.x.dtype, inputs.x.device
    y = inputs.x.new_empty(p.T, p.H)
    pre = inputs.x.new_empty(p.R, 2, p.I) if p.save == "pre" else None
    blocks, gate_up, down = blocks_bound(p, tiles), tiles.gate_up, tiles.down
    if p.R:
        x = quantise_rows(inputs.x) if memory is None else None
        pool = tokens_in_blocks(p.H, dtype, blocks, device) if memory else None
        w_gate_up, w_down = quantise_weights(inputs.w_gate_up), quantise_weights(inputs.w_down)
        act = rows_of_blocks(1, p.I, dtype, blocks, device)
        scaled_mega_forward_kernel[(programs(gate_up),)](
            *codes_and_scales(x),
            inputs.topk_weights,
            descriptor(w_gate_up.codes, 1, 1, gate_up.COLUMNS, gate_up.BLOCK_C),
            w_gate_up.scales,
            descriptor(w_down.codes, 1, down.COLUMNS, down.BLOCK_C),
            w_down.scales,
            pre,
            *operand(act, 1, down.ROWS, down.BLOCK_C),
            scratch(gate_up, tiles.BLOCK_R, like=y, dtype=dtype),
            y.new_empty(p.T, p.K, p.H) if memory is None else None,
            y,
            schedule.table,
            schedule.counters,
            *plan[1:],
            *(memory.addresses, memory.own, memory.token_start) if memory else (None, None, None),
            *operand(pool, gate_up.ROWS, gate_up.BLOCK_C),
            trace,
            p.T,
            p.E_here,
            *offsets_of(memory, "x_codes", "x_scales", "slots"),
            x.codes.stride(0) if x else 0,
            *inputs.topk_weights.stride(),
            act.codes.stride(1),
            act.scales.stride(0),
            pool.codes.stride(0) if pool else 0,
            K=p.K,
            H=p.H,
            I=p.I,
            LIMIT=p.swiglu_limit,
            BLOCK_R=tiles.BLOCK_R,
            ROWS=gate_up.ROWS,
            COLUMNS=gate_up.COLUMNS,
            GATE_UP_N=gate_up.BLOCK_N,
            GATE_UP_C=gate_up.BLOCK_C,
            GATE_UP_STRIP=gate_up.STRIP,
            GATE_UP_CHUNK=gate_up.CHUNK,
            DOWN_N=down.BLOCK_N,
            DOWN_C=down.BLOCK_C,
            PULL_R=tiles.pull.BLOCK_R,
            PULL_H=tiles.pull.BLOCK_N,
            PULL_SCALES=triton.next_power_of_2(triton.cdiv(p.H, ALONG.value)),
            FENCE=needs_fence(),
            **exchange_of(memory, tiles),
            num_warps=gate_up.num_warps,
            num_stages=gate_up.num_stages,
        )
    return y, pre


def scaled_mega_backward(
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
    """The needed gradients: dy and the weights are quantised, a launch each, and so is x where gate_up reads its codes;
    one launch does all else. Over ranks it quantises dy and x too. pre: (R, 2, I); None where the schedule's gate_up
    tiles make it again, from codes if the problem's forward reads them.

    memory: the heaps, over ranks. trace: `clock.empty_trace`, to be filled in with the time of every tile.
    """
    p, x, work = problem, inputs.x, schedule.work
    blocks, dtype, device = blocks_bound(p, tiles), x.dtype, x.device
    gate_up, dact, dx = tiles.gate_up, tiles.dact, tiles.dx
    dw_gate_up, dw_down = tiles.dw_gate_up, tiles.dw_down
    recompute = pre is None
    codes_again = recompute and p.precision == "fp8"
    if recompute:
        pre = x.new_empty(p.R, 2, p.I)

    w_down = quantise_weights(inputs.w_down, codes=False, transposed=True)
    w_gate_up = pair = x_pool = weight_of_row = slots = parts = None
    if need.dx or codes_again:
        w_gate_up = quantise_weights(inputs.w_gate_up, codes=codes_again, transposed=need.dx)
    if codes_again:
        pair = descriptor(w_gate_up.codes, 1, 1, gate_up.COLUMNS, gate_up.BLOCK_C)
    elif recompute:
        as_it_is = readable(inputs.w_gate_up).unflatten(1, (2, p.I))
        pair = descriptor(as_it_is, 1, 2, gate_up.BLOCK_N, gate_up.BLOCK_C)
    if memory is None:
        by_row = quantise_rows
        slots = x.new_empty(p.T, p.K, p.H) if need.dx else None
        if need.dtopk_weights:
            parts = x.new_empty(p.R, parts_of_weight(p, tiles), dtype=torch.float32)
    else:
        by_row = lambda t: tokens_in_blocks(p.H, dtype, blocks, device)
        weight_of_row = inputs.topk_weights.new_empty(p.R)
        x_pool = aligned((blocks * tiles.BLOCK_R, p.H), like=x) if recompute and not codes_again else None
    dy_codes, x_codes = by_row(dy), by_row(x) if codes_again else None
    by_column = lambda needed, columns: columns_of_blocks(columns, dtype, blocks, device) if needed else None
    dpre = rows_of_blocks(2, p.I, dtype, blocks, device) if need.dx else None
    dpre_columns, act_columns = by_column(need.dw_gate_up, 2 * p.I), by_column(need.dw_down, p.I)
    x_columns, dy_columns = by_column(need.dw_gate_up, p.H), by_column(need.dw_down, p.H)
    grads = Grads(
        dx=x.new_empty(p.T, p.H) if need.dx else None,
        dtopk_weights=inputs.topk_weights.new_empty(p.T, p.K) if need.dtopk_weights else None,
        dw_gate_up=inputs.w_gate_up.new_empty(inputs.w_gate_up.shape) if need.dw_gate_up else None,
        dw_down=inputs.w_down.new_empty(inputs.w_down.shape) if need.dw_down else None,
    )
    pooled = lambda q, C: descriptor(q.codes, dact.ROWS, C) if memory and q else None
    scaled_mega_backward_kernel[(programs(dact),)](
        dy,
        x,
        dy_codes.codes,
        pooled(dy_codes, dact.BLOCK_C),
        dy_codes.scales,
        x_codes.codes if x_codes else None,
        pooled(x_codes, gate_up.BLOCK_C),
        x_codes.scales if x_codes else None,
        inputs.topk_weights,
        descriptor(w_down.transposed, 1, dact.COLUMNS, dact.BLOCK_C),
        w_down.scales,
        descriptor(w_gate_up.transposed.flatten(0, 1), 1, dx.COLUMNS, dx.BLOCK_C) if need.dx else None,
        pair,
        w_gate_up.scales if w_gate_up else None,
        pre,
        *operand(dpre, 1, dx.ROWS, dx.BLOCK_C),
        *operand(dpre_columns, dw_gate_up.ROWS, dw_gate_up.BLOCK_R),
        *operand(act_columns, dw_down.ROWS, dw_down.BLOCK_R),
        *operand(x_columns, dw_gate_up.COLUMNS, dw_gate_up.BLOCK_R),
        *operand(dy_columns, dw_down.COLUMNS, dw_down.BLOCK_R),
        parts,
        scratch(dact, 3 * tiles.BLOCK_R, like=x, dtype=dtype),
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
        x_pool,
        descriptor(x_pool, tiles.BLOCK_R, gate_up.BLOCK_C) if x_pool is not None else None,
        trace,
        p.T,
        p.E_here,
        *offsets_of(memory, "x", "dy", "topk_weights", "slots", "dweights"),
        *dy.stride(),
        *x.stride(),
        dy_codes.codes.stride(0),
        x_codes.codes.stride(0) if x_codes else 0,
        *inputs.topk_weights.stride(),
        dpre.codes.stride(1) if dpre else 0,
        blocks * tiles.BLOCK_R,
        *(p.H * p.I, 1, p.I),
        x_pool.stride(0) if x_pool is not None else 0,
        K=p.K,
        H=p.H,
        I=p.I,
        LIMIT=p.swiglu_limit,
        PHASES=len(work.phases),
        DACT_PHASE=work.waits_for,
        BLOCK_R=tiles.BLOCK_R,
        ROWS=dact.ROWS,
        COLUMNS=dact.COLUMNS,
        GATE_UP_N=gate_up.BLOCK_N if recompute else None,
        GATE_UP_C=gate_up.BLOCK_C if recompute else None,
        GATE_UP_STRIP=gate_up.STRIP if recompute else None,
        GATE_UP_CHUNK=gate_up.CHUNK if codes_again else None,
        DACT_N=dact.BLOCK_N,
        DACT_C=dact.BLOCK_C,
        CHUNK=dact.CHUNK,
        DX_N=dx.BLOCK_N,
        DX_C=dx.BLOCK_C,
        DW_GATE_UP_M=dw_gate_up.BLOCK_M,
        DW_GATE_UP_N=dw_gate_up.BLOCK_N,
        DW_GATE_UP_R=dw_gate_up.BLOCK_R,
        DW_DOWN_M=dw_down.BLOCK_M,
        DW_DOWN_N=dw_down.BLOCK_N,
        DW_DOWN_R=dw_down.BLOCK_R,
        QUANTISE_N=fp8_tiles().quantise.BLOCK_N,
        NEED_DX=need.dx,
        NEED_DTOPK_WEIGHTS=need.dtopk_weights,
        FENCE=needs_fence(),
        **exchange_of(memory, tiles),
        num_warps=dact.num_warps,
        num_stages=dact.num_stages,
    )
    return grads


def operand(q: Quantised | None, *block: int) -> tuple[Tensor | None, TensorDescriptor | None, Tensor | None]:
    """Codes, the same as the copy engine reads them in blocks of this shape, and scales: as three arguments of a kernel
    that writes and reads them."""
    return (q.codes, descriptor(q.codes, *block), q.scales) if q else (None, None, None)
