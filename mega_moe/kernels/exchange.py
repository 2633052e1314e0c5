"""Rows between ranks, each way a launch of its own: pull what experts need, push what they made, add up what came back.

`pull` loads each row of the plan from the heap of the rank that holds its token. `push` stores each finished row into
its home's heap, at the slot [token, k] that the home reads, and tells the home how many rows have come. `combine_slots`
waits until those of all its live routes are there, and sums them in slot order, whoever made them.

Where ranks cannot reach each other's memory, all_to_all carries the same rows (../exchange.py). `meet_peers` gives
either way the same verbs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..exchange import Call, Exchange, agree
from ..shapes import Inputs, Plan, Problem, Saved
from ..symmetric import Memory, heaps_of
from .blocks import blocks_for, launch_options
from .combine import combine, dispatch_backward
from .meet import home_of_token, in_heap, meet, rows_in_heap
from .plan import plan as make_plan
from .quantize import Quantised, lay_in_blocks
from .signal import arrive, has_failed, wait_for_ranks
from .tile import nan_if, narrow
from .tile_table import TileTable


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
    own_heaps_ptr,  # (ranks here,) int64, read: the same of the ranks of this process
    token_of_row_ptr,  # (R,) int32, read: home rank * max_tokens + token there
    slot_of_row_ptr,  # (R,) int32, read
    rows_ptr,  # (R, H) written where a row has an expert
    weights_ptr,  # (R,) written where a row has an expert; or None
    R,
    max_tokens,
    to_view,  # where x or dy stands in a heap, in bytes
    to_topk_weights,
    CALL: tl.constexpr,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program a block of rows. If a rank did not come, rows are NaN.

    Example: max_tokens = 4, x = [[1.], [2.]] on rank 0, [[3.]] on rank 1, token_of_row = [4, 1]: rows = [[3.], [2.]].
    """
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.load(token_of_row_ptr + r, mask=r < R, other=-1)
    live = token >= 0
    home, token = home_of_rows(token, live, max_tokens)
    own_heap = tl.load(own_heaps_ptr)
    buffer = tl.load(in_heap(own_heap, CALL, tl.int32)) & 1
    failed = has_failed(in_heap(own_heap, PAGE, tl.int64))

    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    columns = tl.where(tl.max(live.to(tl.int32)) > 0, H, 0)  # most blocks are empty where few of max_rows have come
    for start in range(0, columns, BLOCK_N):
        h = start + tl.arange(0, BLOCK_N)
        rows = pull_tile(heaps_ptr, home, token, live, h, to_view, buffer, max_tokens, dtype, H)
        if dtype.primitive_bitwidth > 8:  # codes are as much as their scales
            rows = nan_if(failed, rows)
        tl.store(rows_ptr + r.to(tl.int64)[:, None] * H + h[None, :], rows, mask=live[:, None] & (h < H)[None, :])

    if weights_ptr is not None:
        slot = tl.load(slot_of_row_ptr + r, mask=live, other=0)
        dtype_of_weights: tl.constexpr = weights_ptr.dtype.element_ty
        weights = pull_weights(
            heaps_ptr, home, token, slot, live, to_topk_weights, buffer, max_tokens, dtype_of_weights, K
        )
        tl.store(weights_ptr + r, weights, mask=live)


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
    own_heaps_ptr,  # (RANKS,) int64, read: the same of the ranks of this process
    token_start_ptr,  # (RANKS+1,) int32, read: where their tokens begin
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
    PAGE: tl.constexpr,
    W: tl.constexpr,
    RANKS: tl.constexpr,  # of this process
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Grid: one program a block of tokens. Waits on: all live routes of the ranks of this process, pushed by whoever
    owns their experts. If they do not come, sums are NaN.

    Example: one rank, K = 2, slots = [[[1.], [NaN]]], row_of_slot = [[0, -1]], weights = [[0.5, 3.]]: y = [[0.5]].
    """
    ranks = tl.arange(0, BLOCK_W)
    heaps = tl.load(own_heaps_ptr + ranks, mask=ranks < RANKS, other=0)
    own_heap = tl.load(own_heaps_ptr)
    call = tl.load(in_heap(own_heap, CALL, tl.int32))
    page_ptr = in_heap(own_heap, PAGE, tl.int64)
    live_routes_ptr = (heaps + ROW_START).to(tl.pointer_type(tl.int32)) + (call & 1) * (E + 1) + E
    live_routes = tl.load(live_routes_ptr, mask=ranks < RANKS, other=0)
    rows_arrived_ptr = (heaps + ROWS_ARRIVED).to(tl.pointer_type(tl.int32))
    wait_for_ranks(rows_arrived_ptr, live_routes, ranks < RANKS, ranks * 0 - 1, call, page_ptr, heaps_ptr, PAGE, W)
    failed = has_failed(page_ptr)

    t = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    home, token = home_of_token(tl.minimum(t, T - 1), token_start_ptr, RANKS)
    heap = tl.load(own_heaps_ptr + home)
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
            y = nan_if(failed, y)
            mask = (t < T)[:, None] & (h < H)[None, :]
            tl.store(y_ptr + t.to(tl.int64)[:, None] * H + h[None, :], narrow(y, y_ptr.dtype.element_ty), mask=mask)
    if dtopk_weights_ptr is not None:
        dweights_at = (heap + to_dweights).to(tl.pointer_type(tl.float32)) + token.to(tl.int64) * K
        for slot in tl.static_range(K):
            route = t.to(tl.int64) * K + slot
            live = tl.load(row_of_slot_ptr + route, mask=t < T, other=-1) >= 0
            dweight = nan_if(failed, tl.load(dweights_at + slot, mask=live, other=0.0))
            tl.store(dtopk_weights_ptr + route, narrow(dweight, dtopk_weights_ptr.dtype.element_ty), mask=t < T)


# --8<-- [end:combine]


@dataclass(frozen=True)
class ThroughHeaps:
    """Peers whose memory is in reach, for one direction of one call: rows are pulled and pushed.

    Attributes:
        problem, inputs: of the call.
        memory: the heaps.
        plan: of the rows that experts here receive; forward saves it.
        own: of the same rows, as tokens of their own.
    """

    problem: Problem
    inputs: Inputs
    memory: Memory
    plan: Plan
    own: Plan

    @property
    def call(self) -> Tensor | None:
        """(1,) int32, which call of the heaps forward was; forward saves it. None where they last for one call."""
        return self.memory.of_call

    def pull(self, name: str, weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """The rows of x or dy (by name) for the experts here, (R, H), and if wanted their router weights (R, 1)."""
        return pull(name, weights, self.problem, self.memory, self.plan)

    def pull_x(self, quantise: Callable, table: TileTable) -> Tensor | Quantised:
        """The rows of x as forward's products read them: codes where these are published, or what `quantise` makes."""
        if not self.problem.token_scales:
            return quantise(self.pull("x")[0], table)
        codes, scales = (self.pull(name)[0] for name in ("x_codes", "x_scales"))
        return lay_in_blocks(Quantised(codes, scales, self.problem.dtype), table)

    def combine(self, out: Tensor) -> Tensor:
        """out (R, 1, H), to whom it belongs; what came back, summed: y (T, H)."""
        y = self.inputs.x.new_empty(self.inputs.x.shape)
        push(out, None, self.problem, self.memory, self.plan)
        combine_slots(y, None, self.inputs.topk_weights, self.problem, self.memory, self.plan)
        return y

    def combine_gradients(self, drows: Tensor | None, dweights: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """drows (R, 1, H) and dweights (R, 1), to whom they belong: dx (T, H) and dtopk_weights (T, K)."""
        dx = self.inputs.x.new_empty(self.inputs.x.shape) if drows is not None else None
        of_weights = self.inputs.topk_weights
        dtopk_weights = of_weights.new_empty(of_weights.shape) if dweights is not None else None
        if drows is not None or dweights is not None:
            push(drows, dweights, self.problem, self.memory, self.plan)
            combine_slots(dx, dtopk_weights, None, self.problem, self.memory, self.plan)
        return dx, dtopk_weights


@dataclass(frozen=True)
class ByAllToAll:
    """Peers of a process group, for one direction of one call: a collective carries rows there and back.

    Attributes:
        inputs, dy: of the call.
        exchange: how many rows go where.
        plan: of the routes of the tokens here, over the experts of all ranks; forward saves it.
        own: of the rows that experts here receive, as tokens of their own.
    """

    inputs: Inputs
    dy: Tensor | None
    exchange: Exchange
    plan: Plan
    own: Plan

    @property
    def call(self) -> Tensor:
        """(1,) int32, which call of the group forward was; forward saves it."""
        return self.exchange.of_call

    def live_routes(self) -> tuple[Tensor, Tensor]:
        """The token and the slot of each row that goes out."""
        rows = sum(self.exchange.sent)
        return self.plan.token_of_row[:rows], self.plan.slot_of_row[:rows]

    def pull(self, name: str, weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """As ThroughHeaps.pull. Collective, as what follows."""
        token, slot = self.live_routes()
        rows = self.exchange.dispatch(dict(x=self.inputs.x, dy=self.dy)[name][token])
        return rows, self.exchange.dispatch(self.inputs.topk_weights[token, slot][:, None]) if weights else None

    def pull_x(self, quantise: Callable, table: TileTable) -> Tensor | Quantised:
        """As ThroughHeaps.pull_x. Rows travel as they are."""
        return quantise(self.pull("x")[0], table)

    def combine(self, out: Tensor) -> Tensor:
        """As ThroughHeaps.combine."""
        return combine(self.exchange.give_back(out.flatten(1)), self.inputs.topk_weights, self.plan)

    def combine_gradients(self, drows: Tensor, dweights: Tensor) -> tuple[Tensor, Tensor]:
        """As ThroughHeaps.combine_gradients, with both."""
        dx = dispatch_backward(self.exchange.give_back(drows.flatten(1)), self.plan)
        dtopk_weights = self.inputs.topk_weights.new_zeros(self.inputs.topk_weights.shape)
        dtopk_weights[self.live_routes()] = self.exchange.give_back(dweights)[:, 0]
        return dx, dtopk_weights


def meet_peers(
    problem: Problem, inputs: Inputs, dy: Tensor | None = None, saved: Saved | None = None
) -> ThroughHeaps | ByAllToAll:
    """Begin one direction of one call, together with all ranks. Backward passes dy (T, H) and what forward saved: the
    same routes make the same rows."""
    p, plan, of_call = problem, saved and saved.plan, saved and saved.call
    if p.by_all_to_all:
        plan = plan or make_plan(inputs.topk_ids, p.E)
        call = Call(p.E, p.H, p.I, p.K, p.dtype, inputs.topk_weights.dtype, p.swiglu_limit, p.precision)
        exchange = agree(plan, heaps_of(p.heap).group, call, of_call)
        own = as_tokens(exchange.row_start, sum(exchange.received))
        return ByAllToAll(inputs, dy, exchange, plan, own)
    memory, met, _ = meet(p, inputs, dy, of_call=of_call)
    plan = plan or met
    return ThroughHeaps(p, inputs, memory, plan, as_tokens(plan.row_start, p.R))


def as_tokens(row_start: Tensor, R: int) -> Plan:
    """The plan of R rows that are tokens of their own, with one route each: row r is token r."""
    rows = torch.arange(R, dtype=torch.int32, device=row_start.device)
    return Plan(row_start, rows, torch.zeros_like(rows), rows[:, None])


def pull(name: str, weights: bool, problem: Problem, memory: Memory, plan: Plan) -> tuple[Tensor, Tensor | None]:
    """The published rows of x or dy (by name), or of x's codes or scales, in the order of the plan, (R, H), and their
    router weights (R, 1)."""
    p, layout, at = problem, memory.layout, memory.layout.offsets()
    view = layout.views()[name]
    rows = torch.empty(p.R, view.shape[-1], dtype=view.dtype, device=memory.heaps.device)
    weight_of_row = rows.new_empty(p.R, 1, dtype=layout.weights_dtype) if weights else None
    tile = blocks_for(p.dtype).elementwise
    if p.R:
        pull_kernel[(triton.cdiv(p.R, tile.BLOCK_R),)](
            memory.addresses,
            memory.own,
            plan.token_of_row,
            plan.slot_of_row,
            rows,
            weight_of_row,
            p.R,
            layout.max_tokens,
            at[name],
            at["topk_weights"],
            CALL=at["call"],
            PAGE=at["page"],
            H=view.shape[-1],
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
            memory.own,
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
            PAGE=at["page"],
            W=layout.W,
            RANKS=len(memory.heaps),
            H=p.H,
            K=p.K,
            BLOCK_W=triton.next_power_of_2(len(memory.heaps)),
            **launch_options(tile),
        )
