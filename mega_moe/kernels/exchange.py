"""Rows between ranks, each way a launch of its own: pull what experts need, push what they made, add up what came back.

`pull` loads each row of the plan from the heap of the rank that holds its token. `push` stores each finished row into
its home's heap, at the slot [token, k] that the home reads, and tells the home how many rows have come. `combine_slots`
waits until those of all its live routes are there, and sums them in slot order, whoever made them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Plan, Problem
from ..symmetric import Memory
from .blocks import blocks_for, launch_options
from .meet import home_of_token, in_heap, rows_in_heap
from .signal import arrive, wait_for_ranks
from .tile import narrow


# --8<-- [start:rows]
@triton.jit
def home_of_rows(token, live, max_tokens):
    """The home rank of each row's token, and the token's number there; zeros where not live. token: as `meet` numbers
    them, (BLOCK,)."""
    return tl.where(live, token // max_tokens, 0), tl.where(live, token % max_tokens, 0)


@triton.jit
def slots_of_rows(
    slots_ptr,  # (T, K, H), where there is no heap; or None
    heaps_ptr,  # (W,) int64, read; or None
    token,
    slot,
    live,
    to_slots,
    max_tokens,
    dtype: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
):
    """Where the slot of each row's route begins, (BLOCK, 1), and its home rank, (BLOCK,)."""
    if heaps_ptr is None:
        home = tl.zeros_like(token)
        at = (slots_ptr + (token.to(tl.int64) * K + slot) * H)[:, None]
    else:
        home, token = home_of_rows(token, live, max_tokens)
        at = rows_in_heap(tl.load(heaps_ptr + home), to_slots, token * K + slot, dtype, H)
    return at, home


@triton.jit
def pull_tile(heaps_ptr, home, token, live, h, to_view, buffer, max_tokens, dtype: tl.constexpr, H: tl.constexpr):
    """Columns h of the rows that their homes have published in this call, (BLOCK, len(h)); zeros where not live."""
    at = rows_in_heap(tl.load(heaps_ptr + home), to_view, buffer * max_tokens + token, dtype, H)
    return tl.load(at + h[None, :], mask=live[:, None] & (h < H)[None, :], other=0.0)


@triton.jit
def pull_weights(
    heaps_ptr, home, token, slot, live, to_topk_weights, buffer, max_tokens, dtype: tl.constexpr, K: tl.constexpr
):
    """The router weight of each row's route, (BLOCK,); 0 where not live."""
    at = (tl.load(heaps_ptr + home) + to_topk_weights).to(tl.pointer_type(dtype))
    return tl.load(at + (buffer * max_tokens + token).to(tl.int64) * K + slot, mask=live, other=0.0)


@triton.jit
def tell_homes(heaps_ptr, home, live, ROWS_ARRIVED: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr):
    """Signal to each rank how many of its rows this program has stored there."""
    rank = tl.arange(0, BLOCK_W)
    rows = tl.sum(((home[:, None] == rank[None, :]) & live[:, None]).to(tl.int32), 0)
    heaps = tl.load(heaps_ptr + rank, mask=rank < W, other=0)
    arrive((heaps + ROWS_ARRIVED).to(tl.pointer_type(tl.int32)), rows, rows > 0)


# --8<-- [end:rows]


# --8<-- [start:pull]
@triton.jit(do_not_specialize=["R", "max_tokens", "to_view", "to_topk_weights"])
def pull_kernel(
    heaps_ptr,  # (W,) int64, read: where each rank's heap begins
    token_of_row_ptr,  # (R,) int32, read: home rank * max_tokens + token there
    slot_of_row_ptr,  # (R,) int32, read
    rows_ptr,  # (R, H) written where a row has an expert
    weights_ptr,  # (R,) written where a row has an expert; or None
    R,
    max_tokens,
    to_view,  # where x or dy stands in a heap, in bytes
    to_topk_weights,
    CALL: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program for each (block of rows, block of columns), columns fastest.

    Example: max_tokens = 4, x = [[1.], [2.]] on rank 0, [[3.]] on rank 1, token_of_row = [4, 1]: rows = [[3.], [2.]].
    """
    column_blocks = tl.cdiv(H, BLOCK_N)
    r = tl.program_id(0) // column_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    h = tl.program_id(0) % column_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.load(token_of_row_ptr + r, mask=r < R, other=-1)
    live = token >= 0
    home, token = home_of_rows(token, live, max_tokens)
    buffer = tl.load(in_heap(tl.load(heaps_ptr), CALL, tl.int32)) & 1

    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    rows = pull_tile(heaps_ptr, home, token, live, h, to_view, buffer, max_tokens, dtype, H)
    tl.store(rows_ptr + r.to(tl.int64)[:, None] * H + h[None, :], rows, mask=live[:, None] & (h < H)[None, :])

    if weights_ptr is not None:
        once = live & (tl.program_id(0) % column_blocks == 0)
        slot = tl.load(slot_of_row_ptr + r, mask=once, other=0)
        dtype_of_weights: tl.constexpr = weights_ptr.dtype.element_ty
        weights = pull_weights(
            heaps_ptr, home, token, slot, once, to_topk_weights, buffer, max_tokens, dtype_of_weights, K
        )
        tl.store(weights_ptr + r, weights, mask=once)


# --8<-- [end:pull]


# --8<-- [start:push]
@triton.jit(do_not_specialize=["R", "max_tokens", "to_slots", "to_dweights"])
def push_kernel(
    rows_ptr,  # (R, H) read where a row has an expert; or None
    dweights_ptr,  # (R,) read where a row has an expert; or None
    heaps_ptr,  # (W,) int64, read: where each rank's heap begins
    token_of_row_ptr,  # (R,) int32, read: home rank * max_tokens + token there
    slot_of_row_ptr,  # (R,) int32, read
    R,
    max_tokens,
    to_slots,  # where things stand in a heap, in bytes
    to_dweights,
    ROWS_ARRIVED: tl.constexpr,
    W: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Grid: one program a block of rows. Signals: to each home, how many of its rows are stored.

    Example: K = 1, max_tokens = 4, rows = [[5.], [6.]], token_of_row = [4, 1]: slot [1, 0] of rank 0 becomes [6.], slot
    [0, 0] of rank 1 [5.], and at each of them one row has arrived.
    """
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.load(token_of_row_ptr + r, mask=r < R, other=-1)
    live = token >= 0
    home, token = home_of_rows(token, live, max_tokens)
    heap = tl.load(heaps_ptr + home)
    route = token.to(tl.int64) * K + tl.load(slot_of_row_ptr + r, mask=live, other=0)

    if rows_ptr is not None:
        slots_at = rows_in_heap(heap, to_slots, route, rows_ptr.dtype.element_ty, H)
        for start in range(0, H, BLOCK_N):
            h = start + tl.arange(0, BLOCK_N)
            mask = live[:, None] & (h < H)[None, :]
            rows = tl.load(rows_ptr + r.to(tl.int64)[:, None] * H + h[None, :], mask=mask, other=0.0)
            tl.store(slots_at + h[None, :], rows, mask=mask)
    if dweights_ptr is not None:
        dweight = tl.load(dweights_ptr + r, mask=live, other=0.0)
        tl.store((heap + to_dweights).to(tl.pointer_type(tl.float32)) + route, dweight, mask=live)

    tell_homes(heaps_ptr, home, live, ROWS_ARRIVED, W, BLOCK_W)


# --8<-- [end:push]


# --8<-- [start:combine]
@triton.jit(do_not_specialize=["T", "E", "to_slots", "to_dweights"])
def combine_slots_kernel(
    heaps_ptr,  # (W,) int64, read: where each rank's heap begins
    token_start_ptr,  # (W+1,) int32, read: where the tokens of each rank of this process begin
    topk_weights_ptr,  # (T, K) read, any strides; or None: every weight is 1
    row_of_slot_ptr,  # (T, K) int32, read: -1 where masked
    y_ptr,  # (T, H) written; or None
    dtopk_weights_ptr,  # (T, K) written; or None
    T,
    E,
    to_slots,  # where things stand in a heap, in bytes
    to_dweights,
    stride_t,
    stride_k,
    CALL: tl.constexpr,
    ROW_START: tl.constexpr,
    ROWS_ARRIVED: tl.constexpr,
    W: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Grid: one program a block of tokens. Waits on: all live routes of the ranks of this process, pushed by whoever
    owns their experts.

    Example: one rank, K = 2, slots = [[[1.], [NaN]]], row_of_slot = [[0, -1]], weights = [[0.5, 3.]]: y = [[0.5]].
    """
    ranks = tl.arange(0, BLOCK_W)
    heaps = tl.load(heaps_ptr + ranks, mask=ranks < W, other=0)
    buffer = tl.load(in_heap(tl.load(heaps_ptr), CALL, tl.int32)) & 1
    live_routes_ptr = (heaps + ROW_START).to(tl.pointer_type(tl.int32)) + buffer * (E + 1) + E
    live_routes = tl.load(live_routes_ptr, mask=ranks < W, other=0)
    wait_for_ranks((heaps + ROWS_ARRIVED).to(tl.pointer_type(tl.int32)), live_routes, ranks < W)

    t = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    home, token = home_of_token(tl.minimum(t, T - 1), token_start_ptr, W)
    heap = tl.load(heaps_ptr + home)
    if y_ptr is not None:
        for start in range(0, H, BLOCK_N):
            h = start + tl.arange(0, BLOCK_N)
            y = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
            for slot in tl.static_range(K):
                live = tl.load(row_of_slot_ptr + t.to(tl.int64) * K + slot, mask=t < T, other=-1) >= 0
                mask = live[:, None] & (h < H)[None, :]
                at = rows_in_heap(heap, to_slots, token * K + slot, y_ptr.dtype.element_ty, H)
                value = tl.load(at + h[None, :], mask=mask, other=0.0).to(tl.float32)
                if topk_weights_ptr is not None:
                    at_weight = topk_weights_ptr + t.to(tl.int64) * stride_t + tl.cast(slot, tl.int64) * stride_k
                    value *= tl.load(at_weight, mask=live, other=0.0).to(tl.float32)[:, None]
                y += value
            mask = (t < T)[:, None] & (h < H)[None, :]
            tl.store(y_ptr + t.to(tl.int64)[:, None] * H + h[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)
    if dtopk_weights_ptr is not None:
        dweights_at = (heap + to_dweights).to(tl.pointer_type(tl.float32)) + token.to(tl.int64) * K
        for slot in tl.static_range(K):
            route = t.to(tl.int64) * K + slot
            live = tl.load(row_of_slot_ptr + route, mask=t < T, other=-1) >= 0
            dweight = tl.load(dweights_at + slot, mask=live, other=0.0)
            tl.store(dtopk_weights_ptr + route, narrow(dweight, dtopk_weights_ptr.dtype.element_ty), mask=t < T)


# --8<-- [end:combine]


def as_tokens(plan: Plan) -> Plan:
    """The plan of rows that are tokens of their own, with one route each: row r is token r."""
    rows = torch.arange(len(plan.token_of_row), dtype=torch.int32, device=plan.token_of_row.device)
    return Plan(plan.row_start, rows, torch.zeros_like(rows), rows[:, None])


def pull(name: str, weights: bool, problem: Problem, memory: Memory, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """The published rows of x or dy (by name) in the order of the plan, (R, H), and their router weights (R, 1)."""
    p, layout, at = problem, memory.layout, memory.layout.offsets()
    rows = torch.empty(p.R, p.H, dtype=p.dtype, device=memory.heaps.device)
    weight_of_row = rows.new_empty(p.R, 1, dtype=layout.weights_dtype) if weights else None
    tile = blocks_for(p.dtype).elementwise
    if p.R:
        pull_kernel[(triton.cdiv(p.R, tile.BLOCK_R) * triton.cdiv(p.H, tile.BLOCK_N),)](
            memory.addresses,
            plan.token_of_row,
            plan.slot_of_row,
            rows,
            weight_of_row,
            p.R,
            layout.max_tokens,
            at[name],
            at["topk_weights"],
            CALL=at["call"],
            H=p.H,
            K=p.K,
            **launch_options(tile),
        )
    return rows, weight_of_row


def push(rows: Tensor | None, dweights: Tensor | None, problem: Problem, memory: Memory, plan: Plan) -> None:
    """Store rows (R, 1, H) into their homes' slots, and dweights (R, 1) beside them, as fp32; each may be None."""
    p, layout, at = problem, memory.layout, memory.layout.offsets()
    tile = blocks_for(p.dtype).elementwise
    if p.R:
        push_kernel[(triton.cdiv(p.R, tile.BLOCK_R),)](
            rows,
            dweights,
            memory.addresses,
            plan.token_of_row,
            plan.slot_of_row,
            p.R,
            layout.max_tokens,
            at["slots"],
            at["dweights"],
            ROWS_ARRIVED=at["rows_arrived"],
            W=layout.W,
            H=p.H,
            K=p.K,
            BLOCK_W=triton.next_power_of_2(layout.W),
            **launch_options(tile),
        )


def combine_slots(
    y: Tensor | None,
    dtopk_weights: Tensor | None,
    topk_weights: Tensor | None,
    problem: Problem,
    memory: Memory,
    plan: Plan,
) -> None:
    """Write y (T, H), the sum over the slots that have come, weighted by topk_weights (T, K) or by 1, and dtopk_weights
    (T, K), what has come for each route; either may be None."""
    p, layout, at = problem, memory.layout, memory.layout.offsets()
    tile = blocks_for(p.dtype).elementwise
    if p.T:
        combine_slots_kernel[(triton.cdiv(p.T, tile.BLOCK_R),)](
            memory.addresses,
            memory.token_start,
            topk_weights,
            plan.row_of_slot,
            y,
            dtopk_weights,
            p.T,
            p.E,
            at["slots"],
            at["dweights"],
            *(topk_weights.stride() if topk_weights is not None else (0, 0)),
            CALL=at["call"],
            ROW_START=at["row_start"],
            ROWS_ARRIVED=at["rows_arrived"],
            W=layout.W,
            H=p.H,
            K=p.K,
            BLOCK_W=triton.next_power_of_2(layout.W),
            **launch_options(tile),
        )
