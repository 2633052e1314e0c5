"""How ranks meet: publish, arrive, and then plan what all of them have sent.

The launch here is the only barrier of a call. Its programs draw tickets in this order:

publish   copy the tokens of the ranks that this process holds into their heaps, and sort their routes by expert: a plan
          of each rank's own tokens, which peers can read
arrive    when all of it is written: one addition to this rank's flag, in the heap of every rank
meet      when all ranks of this process have arrived: wait for the others
plan      when all have met: the rows of the experts of this process, from the plans of all ranks
schedule  when row_start is written: the tiles of the launch that follows, if it draws them from one schedule

A rank's rows are ordered (expert, home rank, token, slot). Within an expert each home's routes are sorted already, so
the plan is where each home's part begins, which is a sum of counts, and a copy.

Every wait is for an earlier ticket, or for another process. So the same launch serves one rank, all ranks in one
process one after another, and a process for each rank. If a rank does not come, or sends more rows than there is room
for, the plan is one without rows, and the error page (see symmetric.py) says why.
"""

from dataclasses import replace
from zlib import crc32

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..schedule import Work
from ..shapes import Inputs, Plan, Problem
from ..symmetric import Memory, heap_of_one_rank, heaps_of
from .blocks import Resident, programs
from .plan import begin_chunk, chunks_and_blocks, count_chunk, place_chunk, store_row_start
from .quantize import quantise_rows
from .schedule import Schedule, combine_tiles, empty_schedule, parts_of, shared_words, write_part
from .signal import (
    FORWARD,
    OTHER_LAYER,
    OUT_OF_STEP,
    TOO_MANY_ROWS,
    arrive,
    draw,
    has_failed,
    leave,
    record,
    signal,
    tell_host,
    wait,
    wait_for_ranks,
)
from .tile import INTERPRETED


# --8<-- [start:heap]
@triton.jit
def in_heap(heap, offset, dtype: tl.constexpr):
    """A pointer into a heap: heap, int64, is where it begins, for one rank or for many. A number does not say that it
    is a multiple of 16 bytes, without which a GPU would load two bytes at a time."""
    return tl.multiple_of((heap + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def home_of_token(t, token_start_ptr, W: tl.constexpr):
    """Which of the ranks of this process holds each token t of all of them, and its number there: t (BLOCK,)."""
    home = tl.zeros_like(t)
    for rank in tl.static_range(1, W):
        home += (t >= tl.load(token_start_ptr + rank)).to(tl.int32)
    return home, t - tl.load(token_start_ptr + home)


@triton.jit
def rows_in_heap(heap, offset, row, dtype: tl.constexpr, C: tl.constexpr):
    """Where rows (BLOCK,) of C elements begin in a view of one heap, or of (BLOCK,) heaps: pointers (BLOCK, 1)."""
    size: tl.constexpr = C * dtype.primitive_bitwidth // 8
    at = (heap + offset + row.to(tl.int64) * size).to(tl.pointer_type(dtype))[:, None]
    if size % 16 == 0:
        at = tl.multiple_of(at, (16, 16))
    return at


# --8<-- [end:heap]


# --8<-- [start:publish]
@triton.jit
def publish_tokens(
    first,
    T,
    from_ptr,
    heaps_ptr,
    token_start_ptr,
    buffer,
    stride_t,
    stride_c,
    to_view,
    max_tokens,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Copy BLOCK_T tokens' rows (T, C) into the heaps of their ranks."""
    t = first + tl.arange(0, BLOCK_T)
    live = t < T
    home, token = home_of_token(tl.where(live, t, 0), token_start_ptr, W)
    dtype: tl.constexpr = from_ptr.dtype.element_ty
    to = rows_in_heap(tl.load(heaps_ptr + home), to_view, buffer * max_tokens + token, dtype, C)
    for start in range(0, C, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        mask = live[:, None] & (c < C)[None, :]
        at = from_ptr + t.to(tl.int64)[:, None] * stride_t + c.to(tl.int64)[None, :] * stride_c
        tl.store(to + c[None, :], tl.load(at, mask=mask, other=0.0), mask=mask)


# --8<-- [end:publish]


@triton.jit
def comes_for(dy_ptr, of_call_ptr):
    """What ranks come for: FORWARD, or the number of the forward that they go back through."""
    of_call = tl.cast(FORWARD, tl.int32)
    if dy_ptr is not None:
        if of_call_ptr is not None:
            of_call = tl.load(of_call_ptr)
    return of_call


@triton.jit
def say_what_for(came_for_ptr, call, of_call, layer):
    """Write what a rank comes for into its heap."""
    tl.store(came_for_ptr + (call & 1) * 2, of_call)
    tl.store(came_for_ptr + (call & 1) * 2 + 1, layer)


@triton.jit
def hold_together(
    call,
    of_call,
    layer,
    heaps_ptr,
    page_ptr,
    CAME_FOR: tl.constexpr,
    PAGE: tl.constexpr,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Record the first rank that has come for something else, or with another layer."""
    ranks = tl.arange(0, BLOCK_W)
    heaps = tl.load(heaps_ptr + ranks, mask=ranks < W, other=0)
    came_for_ptr = (heaps + CAME_FOR).to(tl.pointer_type(tl.int32)) + (call & 1) * 2
    for word in tl.static_range(2):
        ours = of_call if word == 0 else layer
        theirs = tl.load(came_for_ptr + word, mask=ranks < W, other=0)
        apart = tl.min(tl.where((ranks < W) & (theirs != ours), ranks, W))
        if (apart < W) & (has_failed(page_ptr) == 0):
            its = tl.sum(tl.where(ranks == apart, theirs, 0))
            record(OUT_OF_STEP if word == 0 else OTHER_LAYER, call, its, ours, apart, page_ptr, heaps_ptr, PAGE, W)
            tell_host(page_ptr)


# --8<-- [start:kernel]
@triton.jit(
    do_not_specialize=[
        "T",
        "E",
        "layer",
        "first",
        "max_rows",
        "chunks",
        "max_tokens",
        "to_token_of_row",
        "to_slot_of_row",
        "to_x",
        "to_x_scales",
        "to_dy",
        "to_topk_weights",
    ]
)
def meet_kernel(
    x_ptr,  # (T, H) read, any strides: the tokens of the ranks of this process, one rank after another; or their codes
    x_scales_ptr,  # (T, SCALES) read, the scales of these; or None
    dy_ptr,  # (T, H) read, any strides; or None
    topk_ids_ptr,  # (T, K) int32 or int64, read, any strides
    topk_weights_ptr,  # (T, K) read, any strides
    heaps_ptr,  # (W,) int64, read: where each rank's heap begins
    own_heaps_ptr,  # (RANKS,) int64, read: the same of the ranks of this process
    token_start_ptr,  # (RANKS+1,) int32, read: where their tokens begin
    count_ptr,  # (RANKS, chunks, BLOCK_E) int32, written and read
    row_start_ptr,  # (experts here + 1,) int32, written
    token_of_row_ptr,  # (max_rows,) int32, written: home rank * max_tokens + token there
    slot_of_row_ptr,  # (max_rows,) int32, written
    row_of_slot_ptr,  # (T, K) int32, written: each route's row in its home's own plan, -1 where masked
    live_routes_ptr,  # (RANKS,) int32, written: how many routes of each rank here are not masked
    of_call_ptr,  # (1,) int32: which call forward is, written by it; or None
    table_ptr,  # (most tiles, 8) int32, written as far as there are tiles; or None
    counters_ptr,  # (2 + counters,) int32, written; or None
    words_ptr,  # int32, zeros before and after: ticket, chunks counted, tiles published, ranks arrived, all met,
    # row_start written, whether ranks did not meet, programs that left
    T,
    E,
    layer,  # a number that stands for what the heap's layout does not say of it
    first,  # rank of this process
    max_rows,
    chunks,  # of each rank's routes
    max_tokens,  # of a rank
    to_token_of_row,  # where things stand in a heap, in bytes
    to_slot_of_row,
    to_x,
    to_x_scales,
    to_dy,
    to_topk_weights,
    stride_xt,
    stride_xh,
    stride_dyt,
    stride_dyh,
    stride_idt,
    stride_idk,
    stride_wt,
    stride_wk,
    CALL: tl.constexpr,  # where those things stand that do not depend on the number of tokens
    FLAGS: tl.constexpr,
    ROWS_ARRIVED: tl.constexpr,
    CAME_FOR: tl.constexpr,
    PAGE: tl.constexpr,
    ROW_START: tl.constexpr,
    W: tl.constexpr,
    RANKS: tl.constexpr,  # of this process
    H: tl.constexpr,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
    KIND_OF_PHASE: tl.constexpr = None,  # these and those below say what the schedule holds, if there is one
    STRIPS_OF_PHASE: tl.constexpr = None,
    KIND_OF_GRAD: tl.constexpr = None,
    TILES_OF_GRAD: tl.constexpr = None,
    WAITS_FOR: tl.constexpr = None,
    COMBINE_KIND: tl.constexpr = None,
    BLOCK_R: tl.constexpr = None,
    TOKENS: tl.constexpr = None,  # of a combine tile
    GROUP: tl.constexpr = None,
    AHEAD: tl.constexpr = None,
    MIXED: tl.constexpr = None,
    PART: tl.constexpr = None,
    COLUMNS: tl.constexpr = None,
):
    """Grid: any number of programs.

    Waits on: to place a rank's routes, all chunks being counted; to arrive, all that this process publishes; to meet,
    the flags of all ranks; to plan, that they have met; for a part of the schedule, row_start. Signals: chunks counted,
    tiles published, every rank's flag in every heap, that all have met, row_start.

    Example: W = 2, one token each, K = 1, both with an expert of rank 1: topk_ids = [[1], [1]], E = 2. Then
    row_start = [0, 0, 2], token_of_row = [0, max_tokens] and slot_of_row = [0, 0].
    """
    ticket_ptr, counted_ptr, published_ptr, arrived_ptr = words_ptr, words_ptr + 1, words_ptr + 2, words_ptr + 3
    met_ptr, row_start_written_ptr = words_ptr + 4, words_ptr + 5
    apart_ptr, left_ptr = words_ptr + 6, words_ptr + 7
    experts = E // W * RANKS
    copies = tl.cdiv(T, BLOCK_T)
    counts = RANKS * chunks
    met = copies + 2 * counts + RANKS
    planned = met + 1 + experts * W
    tickets = planned
    if table_ptr is not None:
        combines = combine_tiles(T, token_start_ptr, RANKS, COMBINE_KIND, TOKENS)
        tickets += tl.cdiv(tl.maximum(max_rows // BLOCK_R + experts, combines), PART)
    # How many calls this process has been through; whoever leaves last counts this one.
    call_ptr = in_heap(tl.load(own_heaps_ptr), CALL, tl.int32)
    page_ptr = in_heap(tl.load(own_heaps_ptr), PAGE, tl.int64)
    ticket = draw(ticket_ptr)
    while ticket < tickets:
        if ticket < copies:
            buffer = (tl.load(call_ptr) + 1) & 1
            from_token = ticket * BLOCK_T
            publish_tokens(
                from_token,
                T,
                x_ptr,
                own_heaps_ptr,
                token_start_ptr,
                buffer,
                stride_xt,
                stride_xh,
                to_x,
                max_tokens,
                H,
                RANKS,
                BLOCK_T,
                BLOCK_H,
            )
            if x_scales_ptr is not None:
                publish_tokens(
                    from_token,
                    T,
                    x_scales_ptr,
                    own_heaps_ptr,
                    token_start_ptr,
                    buffer,
                    SCALES,
                    1,
                    to_x_scales,
                    max_tokens,
                    SCALES,
                    RANKS,
                    BLOCK_T,
                    BLOCK_S,
                )
            if dy_ptr is not None:
                publish_tokens(
                    from_token,
                    T,
                    dy_ptr,
                    own_heaps_ptr,
                    token_start_ptr,
                    buffer,
                    stride_dyt,
                    stride_dyh,
                    to_dy,
                    max_tokens,
                    H,
                    RANKS,
                    BLOCK_T,
                    BLOCK_H,
                )
            publish_tokens(
                from_token,
                T,
                topk_weights_ptr,
                own_heaps_ptr,
                token_start_ptr,
                buffer,
                stride_wt,
                stride_wk,
                to_topk_weights,
                max_tokens,
                K,
                RANKS,
                BLOCK_T,
                BLOCK_K,
            )
            signal(published_ptr, 1, False)
        elif ticket < copies + counts:
            rank = (ticket - copies) // chunks
            start = tl.load(token_start_ptr + rank)
            routes = (tl.load(token_start_ptr + rank + 1) - start) * K
            count_chunk(
                (ticket - copies) % chunks,
                chunks,
                topk_ids_ptr + start.to(tl.int64) * stride_idt,
                count_ptr + rank * chunks * BLOCK_E,
                routes,
                E,
                stride_idt,
                stride_idk,
                K,
                BLOCK,
                BLOCK_E,
            )
            signal(counted_ptr, 1, False)
        elif ticket < copies + 2 * counts:
            wait(counted_ptr, counts, False)
            chunk = (ticket - copies - counts) % chunks
            rank = (ticket - copies - counts) // chunks
            start = tl.load(token_start_ptr + rank)
            routes = (tl.load(token_start_ptr + rank + 1) - start) * K
            heap = tl.load(own_heaps_ptr + rank)
            buffer = (tl.load(call_ptr) + 1) & 1
            row_end, next_row = begin_chunk(chunk, chunks, count_ptr + rank * chunks * BLOCK_E, BLOCK_C, BLOCK_E)
            if chunk == 0:
                store_row_start(in_heap(heap, ROW_START, tl.int32) + buffer * (E + 1), row_end, E, BLOCK_E)
            place_chunk(
                chunk,
                chunks,
                next_row,
                tl.max(row_end),
                topk_ids_ptr + start.to(tl.int64) * stride_idt,
                in_heap(heap, to_token_of_row, tl.int32) + buffer.to(tl.int64) * (max_tokens * K),
                in_heap(heap, to_slot_of_row, tl.int32) + buffer.to(tl.int64) * (max_tokens * K),
                row_of_slot_ptr + start.to(tl.int64) * K,
                routes,
                E,
                stride_idt,
                stride_idk,
                K,
                BLOCK,
                BLOCK_RANK,
                BLOCK_E,
            )
            signal(published_ptr, 1, False)
        elif ticket < met:
            rank = ticket - copies - 2 * counts
            wait(published_ptr, copies + counts, False)
            heap = tl.load(own_heaps_ptr + rank)
            tl.store(in_heap(heap, ROWS_ARRIVED, tl.int32), 0)
            of_call = comes_for(dy_ptr, of_call_ptr)
            say_what_for(in_heap(heap, CAME_FOR, tl.int32), tl.load(call_ptr) + 1, of_call, layer)
            peers = tl.arange(0, BLOCK_W)
            heaps = tl.load(heaps_ptr + peers, mask=peers < W, other=0)
            arrive((heaps + FLAGS).to(tl.pointer_type(tl.int32)) + first + rank, 1, peers < W)
            signal(arrived_ptr, 1, False)
        elif ticket == met:
            wait(arrived_ptr, RANKS, False)
            call = tl.load(call_ptr) + 1
            ranks = tl.arange(0, BLOCK_W)
            flags_ptr = in_heap(tl.load(own_heaps_ptr), FLAGS, tl.int32)
            wait_for_ranks(flags_ptr + ranks, call, ranks < W, ranks, call, page_ptr, heaps_ptr, PAGE, W)
            if has_failed(page_ptr) == 0:
                of_call = comes_for(dy_ptr, of_call_ptr)
                hold_together(call, of_call, layer, heaps_ptr, page_ptr, CAME_FOR, PAGE, W, BLOCK_W)
            if dy_ptr is None:
                if of_call_ptr is not None:
                    tl.store(of_call_ptr, call)
            tl.store(apart_ptr, has_failed(page_ptr).to(tl.int32))
            signal(met_ptr, 1, False)
        elif ticket < planned:
            part = ticket - met - 1
            wait(met_ptr, 1, False)
            plan_part(
                part,
                experts * W,
                tl.load(call_ptr) + 1,
                tl.load(apart_ptr) == 0,
                page_ptr,
                heaps_ptr,
                own_heaps_ptr,
                row_start_ptr,
                token_of_row_ptr,
                slot_of_row_ptr,
                live_routes_ptr,
                first,
                max_rows,
                E,
                max_tokens,
                to_token_of_row,
                to_slot_of_row,
                PAGE,
                ROW_START,
                W,
                RANKS,
                K,
                BLOCK_RANK,
                BLOCK_E,
            )
            if part == 0:
                signal(row_start_written_ptr, 1, False)
        else:
            if table_ptr is not None:
                wait(row_start_written_ptr, 1, False)
                write_part(
                    ticket - planned,
                    row_start_ptr,
                    token_start_ptr,
                    live_routes_ptr,
                    table_ptr,
                    counters_ptr,
                    T,
                    experts,
                    RANKS,
                    KIND_OF_PHASE,
                    STRIPS_OF_PHASE,
                    KIND_OF_GRAD,
                    TILES_OF_GRAD,
                    WAITS_FOR,
                    COMBINE_KIND,
                    BLOCK_R,
                    TOKENS,
                    GROUP,
                    AHEAD,
                    MIXED,
                    PART,
                    COLUMNS,
                    BLOCK_E,
                )
        ticket = draw(ticket_ptr)

    if leave(left_ptr):
        tl.store(words_ptr + tl.arange(0, 8), 0)
        call = tl.load(call_ptr) + 1
        for rank in tl.static_range(RANKS):
            tl.store(in_heap(tl.load(own_heaps_ptr + rank), CALL, tl.int32), call)


@triton.jit
def plan_part(
    part,
    parts,
    call,
    all_met,
    page_ptr,
    heaps_ptr,
    own_heaps_ptr,
    row_start_ptr,
    token_of_row_ptr,
    slot_of_row_ptr,
    live_routes_ptr,
    first,
    max_rows,
    E,
    max_tokens,
    to_token_of_row,
    to_slot_of_row,
    PAGE: tl.constexpr,
    ROW_START: tl.constexpr,
    W: tl.constexpr,
    RANKS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The rows that one home rank sends to one expert here. Part 0 writes row_start and live_routes; all share the rows
    without a token. Where there is no room for all rows, or ranks have not met, every expert has fewer rows than none:
    -1, which says that what was to be summed over them is not there.

    all_met is asked once for all parts: if a peer fails behind the barrier, some parts would else be written and others
    not. All that the plan needs was published before it."""
    L = E // W
    expert, home = part // W, part % W
    buffer = call & 1
    e = tl.arange(0, BLOCK_E)
    here = e < L * RANKS
    rows = tl.zeros((BLOCK_E,), tl.int32)  # of each expert here, from all homes
    earlier = 0  # of this expert, from lower homes
    if all_met:
        for other in tl.static_range(W):
            start_ptr = in_heap(tl.load(heaps_ptr + other), ROW_START, tl.int32) + buffer * (E + 1) + first * L + e
            count = tl.load(start_ptr + 1, mask=here, other=0) - tl.load(start_ptr, mask=here, other=0)
            rows += count
            earlier += tl.sum(tl.where((e == expert) & (other < home), count, 0))
    fits = tl.sum(rows) <= max_rows
    if part == 0:
        if fits == 0:
            record(TOO_MANY_ROWS, call, max_rows, tl.sum(rows), call * 0 - 1, page_ptr, heaps_ptr, PAGE, W)
            tell_host(page_ptr)
    rows = tl.where(all_met & fits, rows, -1)
    if part == 0:
        store_row_start(row_start_ptr, tl.cumsum(rows), L * RANKS, BLOCK_E)
        for rank in tl.static_range(RANKS):
            end_ptr = in_heap(tl.load(own_heaps_ptr + rank), ROW_START, tl.int32) + buffer * (E + 1) + E
            tl.store(live_routes_ptr + rank, tl.load(end_ptr))

    if all_met & fits:
        heap = tl.load(heaps_ptr + home)
        start_ptr = in_heap(heap, ROW_START, tl.int32) + buffer * (E + 1) + first * L + expert
        theirs = tl.load(start_ptr)
        count = tl.load(start_ptr + 1) - theirs
        to_row = tl.sum(tl.where(e < expert, rows, 0)) + earlier
        tokens_ptr = in_heap(heap, to_token_of_row, tl.int32) + buffer.to(tl.int64) * (max_tokens * K) + theirs
        slots_ptr = in_heap(heap, to_slot_of_row, tl.int32) + buffer.to(tl.int64) * (max_tokens * K) + theirs
        for start in range(0, count, BLOCK):
            r = start + tl.arange(0, BLOCK)
            token = tl.load(tokens_ptr + r, mask=r < count, other=0)
            slot = tl.load(slots_ptr + r, mask=r < count, other=0)
            tl.store(token_of_row_ptr + to_row + r, home * max_tokens + token, mask=r < count)
            tl.store(slot_of_row_ptr + to_row + r, slot, mask=r < count)

    for start in range(tl.maximum(tl.sum(rows), 0) + part * BLOCK, max_rows, parts * BLOCK):
        r = start + tl.arange(0, BLOCK)
        tl.store(token_of_row_ptr + r, -1, mask=r < max_rows)
        tl.store(slot_of_row_ptr + r, -1, mask=r < max_rows)


# --8<-- [end:kernel]


def meet(
    problem: Problem,
    inputs: Inputs,
    dy: Tensor | None = None,
    work: Work | None = None,
    parts: int = 1,
    of_call: Tensor | None = None,
) -> tuple[Memory, Plan, Schedule | None]:
    """Publish x, topk_weights and, in backward, dy (T, H); meet the other ranks; plan the rows of this process; and
    write the schedule of `work` on them, if given. parts: of how many the gradient of a route's weight will be the sum.
    of_call: backward's is the Memory.of_call that its forward was given. Where forward reads x in 8 bits, it is
    quantised, in a launch of its own, and published so; backward reads it as it is, to quantise it by column too.

    The plan is that of `mega_moe.routing.plan` but for two arrays: token_of_row numbers tokens by rank, home rank *
    max_tokens + token there, and row_of_slot tells only which routes are masked.
    """
    p, x, x_scales = problem, inputs.x, None
    if p.token_scales and dy is None:
        x, x_scales, _ = quantise_rows(x)
    memory_for = heaps_of(p.heap).memory if p.heap else heap_of_one_rank
    memory = memory_for(p, inputs.topk_weights.dtype, parts, x.device)
    layout, at = memory.layout, memory.layout.offsets()
    index = lambda *shape: torch.empty(shape, dtype=torch.int32, device=x.device)
    if p.heap:
        memory = replace(memory, of_call=index(1) if dy is None else of_call)
    plan = Plan(*(index(*shape) for shape in p.plan_shapes()))
    tokens_per_rank = p.tokens_per_rank or (p.T,)
    schedule, sizes = None, {}
    if work is not None:
        schedule = empty_schedule(x.device, p.R, p.E_here, tokens_per_rank, work)
        sizes, _ = parts_of(p.R, p.E_here, tokens_per_rank, work)
        sizes["TOKENS"] = sizes.pop("BLOCK_T")
    chunks, blocks, ranked = chunks_and_blocks(inputs.topk_ids[: max(tokens_per_rank)], p.E)
    BLOCK_T, BLOCK_H = (16, 64) if INTERPRETED else (8, 512)
    with shared_words(x.device) as words:
        meet_kernel[(programs(Resident(per_processor=4, reserved=p.num_reserved_sms)),)](
            x,
            x_scales,
            dy,
            inputs.topk_ids,
            inputs.topk_weights,
            memory.addresses,
            memory.own,
            memory.token_start,
            index(len(tokens_per_rank), chunks, blocks["BLOCK_E"]),
            *plan,
            index(len(tokens_per_rank)),
            memory.of_call,
            schedule.table if schedule else None,
            schedule.counters if schedule else None,
            words,
            p.T,
            p.E,
            number_of(p),
            memory.first,
            p.R,
            chunks,
            *(layout.max_tokens, at["token_of_row"], at["slot_of_row"]),
            at["x"] if x_scales is None else at["x_codes"],
            None if x_scales is None else at["x_scales"],
            *(at["dy"], at["topk_weights"]),
            *x.stride(),
            *(dy.stride() if dy is not None else (0, 0)),
            *inputs.topk_ids.stride(),
            *inputs.topk_weights.stride(),
            CALL=at["call"],
            FLAGS=at["flags"],
            ROWS_ARRIVED=at["rows_arrived"],
            CAME_FOR=at["came_for"],
            PAGE=at["page"],
            ROW_START=at["row_start"],
            W=layout.W,
            RANKS=len(tokens_per_rank),
            H=p.H,
            SCALES=p.token_scales,
            BLOCK_T=BLOCK_T,
            BLOCK_H=min(BLOCK_H, triton.next_power_of_2(p.H)),
            BLOCK_K=triton.next_power_of_2(p.K),
            BLOCK_S=triton.next_power_of_2(max(p.token_scales, 1)),
            BLOCK_W=triton.next_power_of_2(layout.W),
            **blocks,
            **ranked,
            **sizes,
        )
    return memory, plan, schedule


def number_of(problem: Problem) -> int:
    """A number, below 2^31, that stands for what ranks must have in common and no heap shows."""
    p = problem
    limit = None if p.swiglu_limit is None else float(p.swiglu_limit)
    return crc32(repr((p.I, limit, p.precision)).encode()) >> 1
