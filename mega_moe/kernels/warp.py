"""One launch whose warps have roles: some load, others multiply, and none of them does both.

In the launches below this one every warp of a program does everything: it asks for the next operands, multiplies, and
at the end of a tile computes and stores while the matrix units idle. Here a program's warps are split (see
warp_ring.py): a *producer* only loads, and runs ahead through the tiles, as far as there is room in shared memory; two
*consumers* only multiply and store, 64 rows of a tile each. So the operands of a tile come in while the tile before is
still being finished, and what a consumer has stored is signalled while it multiplies the next tile.

Tiles, schedule, counters and heaps are those of mega.py, with one change of order, on one rank. Combine waits for all
slots of its tokens, so it would come last, and move bytes while no matrix unit works. So the last columns of down are
*late*: their tiles come after all others, combine tiles of the other columns are woven between them, as they are
between weight gradients in backward, and combine tiles of the late columns come at the end.

It is written in Gluon, the language below Triton that says
where a value lies and which warps compute it, and for sm_90 alone: its matrix instruction (wgmma) reads both operands
from shared memory, where they can be put by anybody.
"""

from dataclasses import replace

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..schedule import KINDS, Phase, Work
from ..shapes import Inputs, Plan, Problem
from ..symmetric import Memory
from .blocks import Warp, programs
from .exchange import home_of_rows, pull_tile
from .meet import in_heap, rows_in_heap
from .mega import DISPATCH, DOWN, GATE_UP, blocks_bound, exchange_of, offsets_of
from .persistent import descriptor
from .schedule import FIRST_COUNTER, TILES, Schedule, forward_work
from .signal import arrive, draw, has_failed, signal, wait, wait_for_ranks
from .swiglu import act_of
from .tile import halves, nan_if, narrow
from .warp_ring import (
    ARRIVALS,
    BLOCK,
    COLUMN,
    CONSUMERS,
    EXPERT,
    KIND,
    MESSAGES,
    OVER,
    PRODUCER_WARPS,
    RANK,
    ROW,
    ROWS,
    ROWS_OF_CONSUMER,
    WORDS,
    expect_stage,
    filled,
    free,
    give_back,
    hand_over,
    make_messages,
    make_ring,
    message_of,
    settle,
    stage_filled,
    stage_is_under_way,
    word_of,
)
from .weights import aligned, readable

BLOCK_R = gl.constexpr(CONSUMERS.value * ROWS_OF_CONSUMER.value)
"""Rows of a tile."""

BLOCK_N = gl.constexpr(256)
"""Columns of a tile: those of one matrix instruction. Of gate and up 128 each."""

STEP = gl.constexpr(64)
"""What a step contracts: 128 bytes of bf16 or fp16. Rows of 128 bytes are what shared memory is swizzled for, so that
tiles of gate and of up that lie one behind the other are one operand of one instruction."""


SETTLED = gl.constexpr(4)
"""After so many steps of a tile a consumer signals what it has stored of the tile before."""


LATE_DOWN, LATE_COMBINE = gl.constexpr(len(KINDS)), gl.constexpr(len(KINDS) + 1)
"""Kinds that only this rung has: down in late columns; and combine in these, whose tiles stand in no schedule: all that
a program needs to know of one is its number."""

PARTS = gl.constexpr(8)
"""Tickets among which the row blocks of an expert are dealt for each late column: with 1024 rows, one block each."""


# --8<-- [start:late]
@gluon.jit
def blocks_of_ticket(kind, rows, column, EARLY: gl.constexpr, LATE: gl.constexpr):
    """The row blocks of a ticket as first, end (every PARTS-th), and its column. One block, unless it is late."""
    first = 0
    end = 1
    if LATE > 0:
        if kind == LATE_DOWN:
            first = column // LATE
            end = gl.cdiv(rows, BLOCK_R)
            column = EARLY + column % LATE
    return first, end, column


@gluon.jit
def message_of_late(message, ticket, tickets, late_combines):
    """The same message; behind the last ticket of the schedule that of a combine tile of late columns, if there is
    one."""
    word = gl.arange(0, WORDS, message.type.layout)
    number = ticket - tickets
    is_late = (number >= 0) & (number < late_combines)
    message = gl.where(is_late & (word == KIND), LATE_COMBINE, message)
    return gl.where(is_late & (word == ROW), number, message)


# --8<-- [end:late]


# --8<-- [start:producer]
@gluon.jit
def load_weights(w_desc, expert, column, start, arrival, w, OF_PAIR: gl.constexpr):
    """A stage's weights: 256 rows of one expert's matrix, or 128 of gate and the same of up."""
    if OF_PAIR:
        tma.async_copy_global_to_shared(w_desc, [expert, 0, column * (BLOCK_N // 2), start], arrival, w)
    else:
        tma.async_copy_global_to_shared(w_desc, [expert, column * BLOCK_N, start], arrival, w)


@gluon.jit
def load_gathered_steps(
    step,
    x_ptr,  # (T, STRIDE_X) read
    token_of_row_ptr,  # (R,) int32, read from the block's first row on
    rows,
    w_desc,  # (E, 2, I, H) read
    expert,
    column,
    a,  # (STAGES, BLOCK_R, STEP) shared
    w,  # (STAGES, 1, 2, BLOCK_N / 2, STEP) shared
    full,
    empty,
    H: gl.constexpr,
    STRIDE_X: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The steps of a gate_up tile, its rows gathered: each thread copies 16 bytes of some rows. The next step's number.
    Rows that pad the block repeat the last."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [PRODUCER_WARPS, 1], [1, 0])
    r = gl.arange(0, BLOCK_R, gl.SliceLayout(1, layout))
    c = gl.arange(0, STEP, gl.SliceLayout(0, layout))
    token = gl.load(token_of_row_ptr + gl.minimum(r, rows - 1))
    x_at = x_ptr + token.to(gl.int64)[:, None] * STRIDE_X + c[None, :]
    for start in range(0, H, STEP):
        stage = free(empty, step, STAGES)
        arrival = expect_stage(full, stage, BLOCK_N * STEP * w_desc.dtype.primitive_bitwidth // 8)
        load_weights(w_desc, expert, column, start, arrival, w.index(stage), True)
        if STRIDE_X % STEP == 0:
            async_copy.async_copy_global_to_shared(a.index(stage), x_at + start)
        else:
            async_copy.async_copy_global_to_shared(a.index(stage), x_at + start, mask=(c < STRIDE_X - start)[None, :])
        stage_is_under_way(arrival)
        step += 1
    return step


@gluon.jit
def load_steps(
    step,
    a_desc,  # (rows in blocks, C) read
    block,
    w_desc,  # (E, N, C) read, or (E, 2, N, C)
    expert,
    column,
    a,  # (STAGES, BLOCK_R, STEP) shared
    w,  # (STAGES, 1, BLOCK_N, STEP) shared, or (STAGES, 1, 2, BLOCK_N / 2, STEP)
    full,
    empty,
    C: gl.constexpr,
    OF_PAIR: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The steps of a tile whose rows lie in a block. The next step's number."""
    for start in range(0, C, STEP):
        stage = free(empty, step, STAGES)
        arrival = expect_stage(full, stage, (BLOCK_R + BLOCK_N) * STEP * w_desc.dtype.primitive_bitwidth // 8)
        tma.async_copy_global_to_shared(a_desc, [block * BLOCK_R, start], arrival, a.index(stage))
        load_weights(w_desc, expert, column, start, arrival, w.index(stage), OF_PAIR)
        stage_is_under_way(arrival)
        step += 1
    return step


@gluon.jit
def produce_forward(
    x_ptr,
    w_gate_up_desc,
    w_down_desc,
    act_desc,
    pool_desc,
    table_ptr,
    counters_ptr,
    token_of_row_ptr,
    heaps_ptr,
    a,
    w,
    full,
    empty,
    words,
    handed,
    taken,
    E,
    late_combines,
    H: gl.constexpr,
    I: gl.constexpr,
    STRIDE_X: gl.constexpr,
    EARLY: gl.constexpr,
    LATE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The producer: draw tickets, hand them over, wait for what their tiles read, and load it.

    Waits on: for down, all gate_up tiles of its expert; for gate_up, over heaps, all dispatch tiles of its expert.
    """
    dtype: gl.constexpr = w_gate_up_desc.dtype
    w_pairs = w._reinterpret(dtype, [STAGES, 1, 2, BLOCK_N // 2, STEP], w_gate_up_desc.layout)
    w_rows = w._reinterpret(dtype, [STAGES, 1, BLOCK_N, STEP], w_down_desc.layout)
    a = a._reinterpret(dtype, [STAGES, BLOCK_R, STEP], act_desc.layout)
    tickets = gl.load(counters_ptr + TILES)
    dispatched_ptr = counters_ptr + FIRST_COUNTER
    gate_up_done_ptr = dispatched_ptr
    if heaps_ptr is not None:
        gate_up_done_ptr = dispatched_ptr + E
    step = 0
    n = 0
    ticket = draw(counters_ptr)
    following = draw(counters_ptr)
    message = message_of(ticket, tickets, table_ptr, PRODUCER_WARPS)
    over = False
    while not over:
        place = hand_over(message_of_late(message, ticket, tickets, late_combines), n, words, handed, taken)
        kind = word_of(words, place, KIND, PRODUCER_WARPS)
        over = kind == OVER
        expert = word_of(words, place, EXPERT, PRODUCER_WARPS)
        block = word_of(words, place, BLOCK, PRODUCER_WARPS)
        column = word_of(words, place, COLUMN, PRODUCER_WARPS)
        ticket = following
        message = message_of(ticket, tickets, table_ptr, PRODUCER_WARPS)
        following = draw(counters_ptr)
        rows = word_of(words, place, ROWS, PRODUCER_WARPS)
        arrivals = word_of(words, place, ARRIVALS, PRODUCER_WARPS)
        if kind == GATE_UP:
            if heaps_ptr is None:
                row = word_of(words, place, ROW, PRODUCER_WARPS)
                step = load_gathered_steps(
                    step,
                    x_ptr,
                    token_of_row_ptr + row,
                    rows,
                    w_gate_up_desc,
                    expert,
                    column,
                    a,
                    w_pairs,
                    full,
                    empty,
                    H,
                    STRIDE_X,
                    STAGES,
                )
            else:
                wait(dispatched_ptr + expert, arrivals * CONSUMERS, True)
                step = load_steps(
                    step,
                    pool_desc,
                    block,
                    w_gate_up_desc,
                    expert,
                    column,
                    a,
                    w_pairs,
                    full,
                    empty,
                    H,
                    True,
                    STAGES,
                )
        elif (kind == DOWN) | (kind == LATE_DOWN):
            wait(gate_up_done_ptr + expert, arrivals * CONSUMERS, True)
            first, end, column = blocks_of_ticket(kind, rows, column, EARLY, LATE)
            for b in range(first, end, PARTS):
                step = load_steps(
                    step, act_desc, block + b, w_down_desc, expert, column, a, w_rows, full, empty, I, False, STAGES
                )
        n += 1
    async_copy.wait_group(0)


# --8<-- [end:producer]


# --8<-- [start:consumer]
@gluon.jit
def start_step(acc, step, gathered, use_acc, a, w, full, CONSUMER: gl.constexpr, STAGES: gl.constexpr):
    """Start the matrix instructions of a step: the sum that they will have made, and the stage that they read."""
    stage = stage_filled(full, step, gathered, STAGES)
    acc = warpgroup_mma(
        a.index(CONSUMERS * stage + CONSUMER), w.index(stage).permute([1, 0]), acc, use_acc=use_acc, is_async=True
    )
    return acc, stage


@gluon.jit
def add_steps(acc, before, first, end, gathered, a, w, full, empty, CONSUMER: gl.constexpr, STAGES: gl.constexpr):
    """Go on with steps first .. end-1. While one step's instructions run, those of the next are started; only then is
    the stage of the first given back. before: the stage of the step that still runs."""
    for step in range(first, end):
        acc, stage = start_step(acc, step, gathered, True, a, w, full, CONSUMER, STAGES)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        give_back(empty, before)
        before = stage
    return acc, before


@gluon.jit
def end_sum(acc, before, empty):
    """The sum, when the last step's instructions are done."""
    acc = warpgroup_mma_wait(0, deps=(acc,))
    give_back(empty, before)
    return acc


@gluon.jit
def store_half(half, at, live, n, N: gl.constexpr, out, layout: gl.constexpr):
    """Store half of a consumer's tile, (64, 128), into rows of N columns, by way of shared memory (`out`): there it
    changes from the layout of the matrix instruction to one in which threads store 16 bytes, and neighbours side by
    side. at: (64, 1) where each row begins; n: (128,) columns."""
    out.store(narrow(half, out.dtype))
    gl.store(at + n[None, :], out.load(layout), mask=live[:, None] & (n < N)[None, :])


@gluon.jit
def combine_tokens(
    slots_ptr,  # (T, K, H) read at live routes
    topk_weights_ptr,  # (T, K) read, any strides
    row_of_slot_ptr,  # (T, K) int32, read
    y_ptr,  # (T, H) written at these tokens
    first_token,
    T,
    failed,
    stride_t,
    stride_k,
    K: gl.constexpr,
    H: gl.constexpr,
    TOKENS: gl.constexpr,
    BLOCK_H: gl.constexpr,
    FIRST: gl.constexpr = 0,
    END: gl.constexpr = None,
):
    """A consumer's part of a combine tile: the sums over their slots of TOKENS tokens, in columns FIRST .. END-1 (all,
    unless told), as `add_slots` makes them; NaN if ranks have failed each other. Slots of masked routes are loaded as
    well, and not used: so no load waits for another, and all of them are under way together."""
    end: gl.constexpr = H if END is None else END
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    token = (first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))).to(gl.int64)
    known = token < T
    for start in range(FIRST, end, BLOCK_H):
        h = start + gl.arange(0, BLOCK_H, gl.SliceLayout(0, layout))
        mask = known[:, None] & (h < end)[None, :]
        y = gl.zeros([TOKENS, BLOCK_H], gl.float32, layout)
        for slot in gl.static_range(K):
            live = gl.load(row_of_slot_ptr + token * K + slot, mask=known, other=-1) >= 0
            value = gl.load(slots_ptr + (token * K + slot)[:, None] * H + h[None, :], mask=mask, other=0.0)
            value = gl.where(live[:, None], value.to(gl.float32), 0.0)
            if topk_weights_ptr is not None:
                at_weight = topk_weights_ptr + token * stride_t + gl.cast(slot, gl.int64) * stride_k
                weight = gl.load(at_weight, mask=known, other=0.0).to(gl.float32)
                value *= gl.where(live, weight, 0.0)[:, None]
            y += value
        y = nan_if(failed, y)
        gl.store(y_ptr + token[:, None] * H + h[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def dispatch_rows(
    heaps_ptr,  # (W,) int64, read: where each rank's heap begins
    pool_ptr,  # (rows in blocks, H) written at these rows of the block
    token_of_row_ptr,  # (R,) int32, read
    block,
    row,
    rows,
    buffer,
    max_tokens,
    to_x,
    stride_pool,
    CONSUMER: gl.constexpr,
    H: gl.constexpr,
    PULL_R: gl.constexpr,
    PULL_H: gl.constexpr,
):
    """A consumer's part of a dispatch tile: pull its 64 rows of the block from the ranks that hold their tokens. Rows
    that pad the block become zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    dtype: gl.constexpr = pool_ptr.dtype.element_ty
    for first in range(CONSUMER * ROWS_OF_CONSUMER, (CONSUMER + 1) * ROWS_OF_CONSUMER, PULL_R):
        r = first + gl.arange(0, PULL_R, gl.SliceLayout(1, layout))
        live = r < rows
        home, token = home_of_rows(gl.load(token_of_row_ptr + row + r, mask=live, other=0), live, max_tokens)
        to = pool_ptr + (block.to(gl.int64) * BLOCK_R + r)[:, None] * stride_pool
        for start in range(0, H, PULL_H):
            h = start + gl.arange(0, PULL_H, gl.SliceLayout(0, layout))
            pulled = pull_tile(heaps_ptr, home, token, live, h, to_x, buffer, max_tokens, dtype, H)
            gl.store(to + h[None, :], pulled, mask=(h < H)[None, :])


@gluon.jit
def settle_forward(
    counters_ptr, owed_to, owed, owed_to_homes, of_rows, heaps_ptr, ROWS_ARRIVED: gl.constexpr, W: gl.constexpr
):
    """`settle`. of_rows: the first counter that counts rows: these no bulk copy has stored, and over heaps each home is
    told how many of them are its own. owed_to_homes: (BLOCK_W,)."""
    if owed_to < of_rows:
        settle(counters_ptr + owed_to, owed, True)
    elif heaps_ptr is None:
        settle(counters_ptr + owed_to, owed, False)
    elif owed > 0:
        rank = gl.arange(0, owed_to_homes.shape[0], owed_to_homes.type.layout)
        heaps = gl.load(heaps_ptr + rank, mask=rank < W, other=0)
        arrive((heaps + ROWS_ARRIVED).to(gl.pointer_type(gl.int32)), owed_to_homes, owed_to_homes > 0)


@gluon.jit
def wait_for_rows(
    heap,
    arrivals,
    heaps_ptr,
    own_heaps_ptr,
    CALL: gl.constexpr,
    ROWS_ARRIVED: gl.constexpr,
    PAGE: gl.constexpr,
    W: gl.constexpr,
):
    """As in mega.py: wait until so many rows have come to the slots of this heap. Whether they will never come."""
    own_heap = gl.load(own_heaps_ptr)
    call = gl.load(in_heap(own_heap, CALL, gl.int32))
    page_ptr = in_heap(own_heap, PAGE, gl.int64)
    one = gl.arange(0, 1, gl.BlockedLayout([1], [32], [4], [0]))
    rows_arrived_ptr = in_heap(heap, ROWS_ARRIVED, gl.int32) + one
    wait_for_ranks(rows_arrived_ptr, arrivals, one == 0, one - 1, call, page_ptr, heaps_ptr, PAGE, W)
    return has_failed(page_ptr)


@gluon.jit
def consume_forward(
    CONSUMER: gl.constexpr,
    topk_weights_ptr,
    pre_ptr,
    act_desc,
    slots_ptr,
    y_ptr,
    row_start_ptr,
    counters_ptr,
    token_of_row_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    heaps_ptr,
    own_heaps_ptr,
    token_start_ptr,
    pool_ptr,
    a,
    w,
    out,
    full,
    empty,
    words,
    handed,
    taken,
    T,
    E,
    max_tokens,
    to_x,
    to_slots,
    stride_t,
    stride_k,
    stride_pool,
    K: gl.constexpr,
    H: gl.constexpr,
    I: gl.constexpr,
    EARLY: gl.constexpr,
    LATE: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_H: gl.constexpr,
    PULL_R: gl.constexpr,
    PULL_H: gl.constexpr,
    CALL: gl.constexpr,
    ROWS_ARRIVED: gl.constexpr,
    PAGE: gl.constexpr,
    W: gl.constexpr,
    BLOCK_W: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A consumer: multiply its 64 rows of each tile, store what becomes of them, and signal that when it is done.

    Waits on: for combine, the rows of all live routes of its rank. Signals: its half of a dispatch or a gate_up tile,
    to the counter of its expert; the rows it has stored of a down tile, over heaps to their homes.
    """
    TOKENS: gl.constexpr = BLOCK_T // CONSUMERS
    FEWEST: gl.constexpr = (H if H < I else I) // STEP  # steps of a tile, at least
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    by_home: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0])
    r = CONSUMER * ROWS_OF_CONSUMER + gl.arange(0, ROWS_OF_CONSUMER, gl.SliceLayout(1, layout))
    half_n = gl.arange(0, BLOCK_N // 2, gl.SliceLayout(0, layout))
    rank = gl.arange(0, BLOCK_W, gl.SliceLayout(0, by_home))
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    gate_up_done = FIRST_COUNTER
    if heaps_ptr is not None:
        gate_up_done = FIRST_COUNTER + E
        buffer = gl.load(in_heap(gl.load(own_heaps_ptr), CALL, gl.int32)) & 1
    rows_late = gate_up_done + E
    rows_done = gate_up_done + 2 * E
    # What the stores of an earlier tile amount to, and no counter shows yet: which counter, and how much; over heaps,
    # of rows how many of each home.
    owed_to = rows_done
    owed = 0
    owed_to_homes = rank * 0
    step = 0
    n = 0
    over = False
    while not over:
        place = filled(handed, n, MESSAGES)
        kind = word_of(words, place, KIND, 4)
        its_rank = word_of(words, place, RANK, 4)
        expert = word_of(words, place, EXPERT, 4)
        block = word_of(words, place, BLOCK, 4)
        row = word_of(words, place, ROW, 4)
        rows = word_of(words, place, ROWS, 4)
        column = word_of(words, place, COLUMN, 4)
        arrivals = word_of(words, place, ARRIVALS, 4)
        give_back(taken, place)
        over = kind == OVER
        n += 1

        # Down may wait for a gate_up tile of this consumer, and combine for any tile of it; gate_up never does.
        multiplies = (kind == GATE_UP) | (kind == DOWN) | (kind == LATE_DOWN)
        if ((kind != GATE_UP) & (owed_to < rows_late)) | (not multiplies):
            settle_forward(counters_ptr, owed_to, owed, owed_to_homes, rows_late, heaps_ptr, ROWS_ARRIVED, W)
            owed = 0
        if multiplies:
            first, end, column = blocks_of_ticket(kind, rows, column, EARLY, LATE)
            for b in range(first, end, PARTS):
                if kind == GATE_UP:
                    steps = gl.cdiv(H, STEP)
                else:
                    steps = gl.cdiv(I, STEP)
                gathered = False
                if heaps_ptr is None:
                    gathered = kind == GATE_UP
                end_step = step + steps
                settled = gl.minimum(step + SETTLED, end_step)
                mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
                acc = gl.zeros([ROWS_OF_CONSUMER, BLOCK_N], gl.float32, mma)
                acc, stage = start_step(acc, step, gathered, False, a, w, full, CONSUMER, STAGES)
                live = r < rows - b * BLOCK_R
                token = gl.load(token_of_row_ptr + row + b * BLOCK_R + r, mask=live, other=0)
                slot = gl.load(slot_of_row_ptr + row + b * BLOCK_R + r, mask=live, other=0)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                acc, stage = add_steps(acc, stage, step + 1, settled, gathered, a, w, full, empty, CONSUMER, STAGES)
                if FEWEST > SETTLED:  # one step more is started, so that matrix units are busy meanwhile
                    acc, following = start_step(acc, settled, gathered, True, a, w, full, CONSUMER, STAGES)
                settle_forward(counters_ptr, owed_to, owed, owed_to_homes, rows_late, heaps_ptr, ROWS_ARRIVED, W)
                if FEWEST > SETTLED:
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                    give_back(empty, stage)
                    stage = following
                    settled += 1
                acc, stage = add_steps(acc, stage, settled, end_step, gathered, a, w, full, empty, CONSUMER, STAGES)
                acc = end_sum(acc, stage, empty)
                step = end_step

                left, right = halves(acc, ROWS_OF_CONSUMER, BLOCK_N)
                if kind == GATE_UP:
                    i = column * (BLOCK_N // 2) + half_n
                    if pre_ptr is not None:
                        pre_at = (pre_ptr + (row + b * BLOCK_R + r).to(gl.int64) * (2 * I))[:, None]
                        store_half(left, pre_at, live, i, I, out, layout)
                        store_half(right, pre_at + I, live, i, I, out, layout)
                    out.store(narrow(act_of(left, right, LIMIT, dtype), dtype))
                    fence_async_shared()
                    first_row = (block + b) * BLOCK_R + CONSUMER * ROWS_OF_CONSUMER
                    tma.async_copy_shared_to_global(act_desc, [first_row, column * (BLOCK_N // 2)], out)
                    owed_to = gate_up_done + expert
                    owed = 1
                else:
                    if heaps_ptr is None:
                        slots_at = (slots_ptr + (token.to(gl.int64) * K + slot) * H)[:, None]
                    else:
                        home, token = home_of_rows(token, live, max_tokens)
                        slots_at = rows_in_heap(gl.load(heaps_ptr + home), to_slots, token * K + slot, dtype, H)
                        its_home = gl.convert_layout(gl.where(live, home, -1), gl.SliceLayout(1, by_home))
                        owed_to_homes = gl.sum((its_home[:, None] == rank[None, :]).to(gl.int32), 0)
                    h = column * BLOCK_N + half_n
                    store_half(left, slots_at, live, h, H, out, layout)
                    store_half(right, slots_at, live, h + BLOCK_N // 2, H, out, layout)
                    owed_to = rows_done
                    if LATE > 0:
                        if kind == LATE_DOWN:
                            owed_to = rows_late
                    owed = gl.minimum(gl.maximum(rows - b * BLOCK_R - CONSUMER * ROWS_OF_CONSUMER, 0), ROWS_OF_CONSUMER)
        elif kind == DISPATCH:
            if heaps_ptr is not None:
                dispatch_rows(
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
                    CONSUMER,
                    H,
                    PULL_R,
                    PULL_H,
                )
                signal(counters_ptr + FIRST_COUNTER + expert, 1, True)
        elif kind == LATE_COMBINE:
            if LATE > 0:
                wait(counters_ptr + rows_late, gl.load(row_start_ptr + E) * LATE, False)
                combine_tokens(
                    slots_ptr,
                    topk_weights_ptr,
                    row_of_slot_ptr,
                    y_ptr,
                    row * BLOCK_T + CONSUMER * TOKENS,
                    T,
                    False,
                    stride_t,
                    stride_k,
                    K,
                    H,
                    TOKENS,
                    BLOCK_H,
                    EARLY * BLOCK_N,
                    H,
                )
        elif not over:
            if heaps_ptr is None:
                wait(counters_ptr + rows_done, arrivals, False)
                end_token = T
                its_slots_ptr = slots_ptr
                failed = False
            else:
                heap = gl.load(own_heaps_ptr + its_rank)
                first_token = gl.load(token_start_ptr + its_rank)
                end_token = gl.load(token_start_ptr + its_rank + 1)
                failed = wait_for_rows(heap, arrivals, heaps_ptr, own_heaps_ptr, CALL, ROWS_ARRIVED, PAGE, W)
                its_slots_ptr = in_heap(heap, to_slots, dtype) - first_token.to(gl.int64) * (K * H)
            combine_tokens(
                its_slots_ptr,
                topk_weights_ptr,
                row_of_slot_ptr,
                y_ptr,
                row + CONSUMER * TOKENS,
                end_token,
                failed,
                stride_t,
                stride_k,
                K,
                H,
                TOKENS,
                BLOCK_H,
                0,
                EARLY * BLOCK_N if LATE > 0 else H,
            )


# --8<-- [end:consumer]


# --8<-- [start:forward]
@gluon.jit(do_not_specialize=["T", "E", "max_tokens", "to_x", "to_slots"])
def warp_forward_kernel(
    x_ptr,  # (T, STRIDE_X) read, zeros beyond column H
    topk_weights_ptr,  # (T, K) read, any strides
    w_gate_up_desc,  # (E, 2, I, H) read
    w_down_desc,  # (E, H, I) read
    pre_ptr,  # (R, 2, I) written where a row has an expert; or None
    act_desc,  # (rows in blocks, I) read, in blocks of a tile's rows
    act_of_consumer_desc,  # the same, in blocks of a consumer's rows, written in every block that holds rows
    slots_ptr,  # (T, K, H) written at live routes, and read again
    y_ptr,  # (T, H) written
    table_ptr,  # (tiles, 8) int32, the schedule, read
    row_start_ptr,  # (E+1,) int32, read
    counters_ptr,  # int32: the ticket, drawn from; the number of tiles, read; arrivals, counted
    token_of_row_ptr,  # (R,) int32, read
    slot_of_row_ptr,  # (R,) int32, read
    row_of_slot_ptr,  # (T, K) int32, read
    heaps_ptr,  # (W,) int64, read: where each rank's heap begins; or None on one rank, and then those below
    own_heaps_ptr,  # (ranks here,) int64, read: the same of the ranks of this process
    token_start_ptr,  # (ranks here + 1,) int32, read: where their tokens begin
    pool_ptr,  # (rows in blocks, H) written in every block that holds rows, and read again
    pool_desc,  # the same
    T,
    E,
    max_tokens,
    to_x,  # where things stand in a heap, in bytes
    to_slots,
    stride_t,
    stride_k,
    stride_pool,
    K: gl.constexpr,
    H: gl.constexpr,
    I: gl.constexpr,
    STRIDE_X: gl.constexpr,
    EARLY: gl.constexpr,
    LATE: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_H: gl.constexpr,
    PULL_R: gl.constexpr,
    PULL_H: gl.constexpr,
    CALL: gl.constexpr,
    ROWS_ARRIVED: gl.constexpr,
    PAGE: gl.constexpr,
    W: gl.constexpr,
    BLOCK_W: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid: one program a processor. Tiles, waits and counters: those of mega_forward_kernel, but that each consumer
    signals its half of a tile. num_warps: of one consumer.
    """
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    swizzled: gl.constexpr = act_desc.layout
    a = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, ROWS_OF_CONSUMER, STEP], swizzled)
    w = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, STEP], swizzled)
    out = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS_OF_CONSUMER, BLOCK_N // 2], swizzled)
    full, empty = make_ring(STAGES, 1 + 32 * PRODUCER_WARPS)
    words, handed, taken = make_messages()
    late_combines = 0
    if LATE > 0:
        late_combines = gl.cdiv(T, BLOCK_T)
    gl.warp_specialize(
        [
            (
                consume_forward,
                (
                    0,
                    topk_weights_ptr,
                    pre_ptr,
                    act_of_consumer_desc,
                    slots_ptr,
                    y_ptr,
                    row_start_ptr,
                    counters_ptr,
                    token_of_row_ptr,
                    slot_of_row_ptr,
                    row_of_slot_ptr,
                    heaps_ptr,
                    own_heaps_ptr,
                    token_start_ptr,
                    pool_ptr,
                    a,
                    w,
                    out.index(0),
                    full,
                    empty,
                    words,
                    handed,
                    taken,
                    T,
                    E,
                    max_tokens,
                    to_x,
                    to_slots,
                    stride_t,
                    stride_k,
                    stride_pool,
                    K,
                    H,
                    I,
                    EARLY,
                    LATE,
                    LIMIT,
                    BLOCK_T,
                    BLOCK_H,
                    PULL_R,
                    PULL_H,
                    CALL,
                    ROWS_ARRIVED,
                    PAGE,
                    W,
                    BLOCK_W,
                    STAGES,
                ),
            ),
            (
                consume_forward,
                (
                    1,
                    topk_weights_ptr,
                    pre_ptr,
                    act_of_consumer_desc,
                    slots_ptr,
                    y_ptr,
                    row_start_ptr,
                    counters_ptr,
                    token_of_row_ptr,
                    slot_of_row_ptr,
                    row_of_slot_ptr,
                    heaps_ptr,
                    own_heaps_ptr,
                    token_start_ptr,
                    pool_ptr,
                    a,
                    w,
                    out.index(1),
                    full,
                    empty,
                    words,
                    handed,
                    taken,
                    T,
                    E,
                    max_tokens,
                    to_x,
                    to_slots,
                    stride_t,
                    stride_k,
                    stride_pool,
                    K,
                    H,
                    I,
                    EARLY,
                    LATE,
                    LIMIT,
                    BLOCK_T,
                    BLOCK_H,
                    PULL_R,
                    PULL_H,
                    CALL,
                    ROWS_ARRIVED,
                    PAGE,
                    W,
                    BLOCK_W,
                    STAGES,
                ),
            ),
            (
                produce_forward,
                (
                    x_ptr,
                    w_gate_up_desc,
                    w_down_desc,
                    act_desc,
                    pool_desc,
                    table_ptr,
                    counters_ptr,
                    token_of_row_ptr,
                    heaps_ptr,
                    a,
                    w,
                    full,
                    empty,
                    words,
                    handed,
                    taken,
                    E,
                    late_combines,
                    H,
                    I,
                    STRIDE_X,
                    EARLY,
                    LATE,
                    STAGES,
                ),
            ),
        ],
        [4, PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


# --8<-- [end:forward]


def warp_forward(
    problem: Problem,
    inputs: Inputs,
    plan: Plan,
    schedule: Schedule,
    tiles: Warp,
    memory: Memory | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y (T, H), and pre (R, 2, I) if the problem saves it, in one launch. act and slots live while it runs.

    memory: the heaps, over ranks.
    """
    p, x, late = problem, inputs.x, late_columns(problem, tiles)
    y = x.new_empty(p.T, p.H)
    pre = x.new_empty(p.R, 2, p.I) if p.save == "pre" else None
    rows = blocks_bound(p, tiles) * tiles.BLOCK_R
    act = aligned((rows, p.I), like=x)
    slots = x.new_empty(p.T, p.K, p.H) if memory is None else None
    pool = aligned((rows, p.H), like=x) if memory is not None else None
    if p.R:
        warp_forward_kernel[(programs(tiles.gate_up),)](
            gatherable(x) if memory is None else None,
            inputs.topk_weights,
            swizzled(readable(inputs.w_gate_up).unflatten(1, (2, p.I)), 1, 2, BLOCK_N.value // 2, STEP.value),
            swizzled(readable(inputs.w_down), 1, BLOCK_N.value, STEP.value),
            pre,
            swizzled(act, BLOCK_R.value, STEP.value),
            swizzled(act, ROWS_OF_CONSUMER.value, BLOCK_N.value // 2),
            slots,
            y,
            schedule.table,
            plan.row_start,
            schedule.counters,
            *plan[1:],
            *(memory.addresses, memory.own, memory.token_start) if memory else (None, None, None),
            pool,
            swizzled(pool, BLOCK_R.value, STEP.value) if memory else None,
            p.T,
            p.E_here,
            *offsets_of(memory, "x", "slots"),
            *inputs.topk_weights.stride(),
            stride_pool=pool.stride(0) if memory else 0,
            K=p.K,
            H=p.H,
            I=p.I,
            STRIDE_X=padded(p.H),
            EARLY=triton.cdiv(p.H, BLOCK_N.value) - late,
            LATE=late,
            LIMIT=p.swiglu_limit,
            PULL_R=tiles.pull.BLOCK_R,
            PULL_H=tiles.pull.BLOCK_N,
            **exchange_of(memory, tiles),
            STAGES=tiles.stages,
            CONSUMER_REGISTERS=tiles.consumer_registers,
            PRODUCER_REGISTERS=tiles.producer_registers,
            num_warps=4,
        )
    return y, pre


def warp_work(problem: Problem, tiles: Warp) -> Work:
    """What forward does; on one rank with late columns of down, which stand where backward has weight gradients: after
    all phases, with combine tiles in between."""
    work, late = forward_work(problem, tiles), late_columns(problem, tiles)
    if not late:
        return work
    gate_up, down = work.phases
    early = replace(down, strips=down.strips - late)
    return replace(work, phases=(gate_up, early), weight_grads=(Phase(LATE_DOWN.value, late * PARTS.value),))


def late_columns(problem: Problem, tiles: Warp) -> int:
    """How many blocks of 256 columns of down are late: none over heaps, and never all."""
    return 0 if problem.heap else min(tiles.late, triton.cdiv(problem.H, BLOCK_N.value) - 1)


def gatherable(x: Tensor) -> Tensor:
    """x (T, H) in rows that lie one behind the other, each a multiple of 16 bytes from the one before: x itself if it
    lies so, else a copy with zeros behind each row. (T, H) or a little wider."""
    wide = padded(x.shape[1])
    if x.is_contiguous() and x.shape[1] == wide and x.data_ptr() % 16 == 0:
        return x
    copied = x.new_zeros(x.shape[0], wide)
    copied[:, : x.shape[1]] = x
    return copied


def padded(columns: int) -> int:
    """The next multiple of 16 bytes, of 2 bytes each."""
    return (columns + 7) // 8 * 8


def swizzled(t: Tensor, *block: int) -> TensorDescriptor:
    """How the copy engine moves blocks of t between memory and shared memory, whose rows of 128 bytes it swizzles, so
    that a column can be read without bank conflicts. t: as `persistent.descriptor` wants it."""
    of = descriptor(t, *block)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    return TensorDescriptor(of.base, of.shape, of.strides, of.block_shape, layout)
