"""Resident programs: as many as the GPU has processors, each drawing tickets until there are none.

A launch with one program a tile pays for every tile's beginning (find the expert, find the rows, fill the pipeline) and
for its end (the epilogue) with idle matrix units. Here a program lives as long as the launch. It looks its tile up in
a table, draws its next ticket before it multiplies, so that the answer is there in time, and may take a strip of tiles
in one loop whose loads never stop: those of the next tile begin under the epilogue of this one. Nobody waits for a tile
that somebody else is slow with, since tickets go to whoever is free.

What lies contiguously (weights, and what these kernels pass to each other) is loaded by descriptor: one thread asks the
copy engine for a whole tile, instead of all threads computing addresses. What is gathered (tokens) cannot be.

Tensors between the kernels lie in blocks (see tile_table.py), and the rows that pad an expert's last block are zeros: a
weight gradient sums over whole steps, and no row of another expert is ever among them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..shapes import Need, Plan
from .blocks import Strips, launch_options, programs
from .fused_swiglu import store_pre_and_act, sum_parts, swiglu_backward_epilogue
from .gathered import tokens_of_tile
from .signal import draw
from .tile import dot, halves, narrow, route_of_row, rows_at, weight_of_route
from .tile_table import TileTable


# --8<-- [start:load]
@triton.jit
def load_row_block(at):
    """A row of the table of row blocks: expert, first row, end of the expert's rows, block."""
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


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
def persistent_gate_up_kernel(
    x_ptr,  # (T, H) read, any strides
    w_desc,  # (E, 2, I, H) read: gate and up of the same columns come as one tile
    pre_ptr,  # (R, 2, I) written where a row has an expert; or None
    act_ptr,  # (rows in blocks, I) written where a row has an expert; or None
    token_of_row_ptr,  # (R,) int32, read
    row_blocks_ptr,  # (blocks, 4) int32, read
    counters_ptr,  # int32, read: the number of live row blocks
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
):
    """Grid: one program a processor. A ticket is a row block and a strip of column blocks of I, strips fastest.

    Example: one expert, token_of_row = [1], x = [[9., 9.], [1., 2.]], w = [[[1., 0.], [0., 1.]]]: gate is 1 and up 2,
    so pre = [[[1.], [2.]]] and act = [[silu(1) * 2]] = [[1.4621]].
    """
    column_blocks: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    strips: tl.constexpr = (column_blocks + STRIP - 1) // STRIP
    tickets = tl.load(counters_ptr) * strips
    ticket = draw(ticket_ptr)
    while ticket < tickets:
        following = draw(ticket_ptr)
        expert, row, end, block = load_row_block(row_blocks_ptr + ticket // strips * 4)
        r = row + tl.arange(0, BLOCK_R)
        c = tl.arange(0, BLOCK_C).to(tl.int64)
        x_at = x_ptr + tokens_of_tile(r, end, token_of_row_ptr)[:, None] * stride_xt + c[None, :] * stride_xh

        first = ticket % strips * STRIP
        for column in tl.range(first, tl.minimum(first + STRIP, column_blocks), flatten=FLATTEN):
            gate_up = tl.zeros((BLOCK_R, 2 * BLOCK_N), tl.float32)
            for start in range(0, H, BLOCK_C):
                x = load_gathered(x_at + tl.cast(start, tl.int64) * stride_xh, start, H, BLOCK_C)
                w = w_desc.load([expert, 0, column * BLOCK_N, start]).reshape(2 * BLOCK_N, BLOCK_C)
                gate_up = dot(x, w.T, gate_up)

            gate, up = halves(gate_up, BLOCK_R, 2 * BLOCK_N)
            pre_at = rows_at(pre_ptr, r, 2 * I)
            act_at = rows_at(act_ptr, block.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R), stride_act)
            i = column * BLOCK_N + tl.arange(0, BLOCK_N)
            store_pre_and_act(gate, up, pre_at, act_at, r < end, i, LIMIT, I, x_ptr.dtype.element_ty)
        ticket = following


# --8<-- [end:gate_up]


# --8<-- [start:slots]
@triton.jit
def persistent_slot_gemm_kernel(
    a_desc,  # (rows in blocks, C) read
    w_desc,  # (E, N, C) read, or (E, C, N)
    slots_ptr,  # (T, K, N) written at live routes
    token_of_row_ptr,  # (R,) int32, read
    slot_of_row_ptr,  # (R,) int32, read
    row_blocks_ptr,  # (blocks, 4) int32, read
    counters_ptr,  # int32, read: the number of live row blocks
    ticket_ptr,  # int32, drawn from
    K: tl.constexpr,
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
    ticket = draw(ticket_ptr)
    while ticket < tickets:
        following = draw(ticket_ptr)
        expert, row, end, block = load_row_block(row_blocks_ptr + ticket // strips * 4)
        r = row + tl.arange(0, BLOCK_R)
        slots_at = slots_ptr + route_of_row(r, r < end, token_of_row_ptr, slot_of_row_ptr, K) * N

        first = ticket % strips * STRIP
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
            mask = (r < end)[:, None] & (n < N)[None, :]
            tl.store(slots_at[:, None] + n[None, :], narrow(acc, slots_ptr.dtype.element_ty), mask=mask)
        ticket = following


# --8<-- [end:slots]


# --8<-- [start:dact]
@triton.jit
def persistent_dact_kernel(
    dy_ptr,  # (T, H) read, any strides
    w_desc,  # (E, H, I) read
    pre_ptr,  # (R, 2, I) read
    topk_weights_ptr,  # (T, K) read, any strides
    token_of_row_ptr,  # (R,) int32, read
    slot_of_row_ptr,  # (R,) int32, read
    dpre_ptr,  # (rows in blocks, 2I) written in every live block; or None
    weighted_act_ptr,  # (rows in blocks, I) written in every live block; or None
    parts_ptr,  # (T*K, blocks of I) fp32, written at live routes; or None
    row_blocks_ptr,  # (blocks, 4) int32, read
    counters_ptr,  # int32, read: the number of live row blocks
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
    ticket = draw(ticket_ptr)
    while ticket < tickets:
        following = draw(ticket_ptr)
        expert, row, end, block = load_row_block(row_blocks_ptr + ticket // strips * 4)
        r = row + tl.arange(0, BLOCK_R)
        live = r < end
        r_in_blocks = block.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        c = tl.arange(0, BLOCK_C).to(tl.int64)
        dy_at = dy_ptr + tokens_of_tile(r, end, token_of_row_ptr)[:, None] * stride_dyt + c[None, :] * stride_dyh
        route = route_of_row(r, live, token_of_row_ptr, slot_of_row_ptr, K)
        weight = weight_of_route(route, live, topk_weights_ptr, stride_t, stride_k, K)
        pre_at = rows_at(pre_ptr, r, 2 * I)
        dpre_at = rows_at(dpre_ptr, r_in_blocks, stride_dpre)
        weighted_act_at = rows_at(weighted_act_ptr, r_in_blocks, stride_act)

        first = ticket % strips * STRIP
        for column in tl.range(first, tl.minimum(first + STRIP, column_blocks), flatten=FLATTEN):
            dact = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
            if dpre_ptr is not None or parts_ptr is not None:  # weighted act alone is made without it
                for start in range(0, H, BLOCK_C):
                    dy = load_gathered(dy_at + tl.cast(start, tl.int64) * stride_dyh, start, H, BLOCK_C)
                    w = load_matrix(w_desc, expert, start, column * BLOCK_N, BLOCK_C, BLOCK_N)
                    dact = dot(dy, w, dact)

            part = swiglu_backward_epilogue(
                dact,
                pre_at,
                dpre_at,
                weighted_act_at,
                weight,
                live,
                r >= 0,  # zeros behind the expert's last row are written too: dw reads them
                column * BLOCK_N,
                LIMIT,
                I,
                BLOCK_R,
                BLOCK_N,
                CHUNK,
            )
            if parts_ptr is not None:
                tl.store(parts_ptr + route * column_blocks + column, part, mask=live)
        ticket = following


# --8<-- [end:dact]


# --8<-- [start:weight_grad]
@triton.jit(do_not_specialize=["E"])
def persistent_weight_grad_kernel(
    a_desc,  # (rows in blocks, M) read; zeros where a block is padded
    tokens_ptr,  # (T, N) read, any strides
    dw_ptr,  # (E, M, N) written, all of it, any strides
    row_start_ptr,  # (E+1,) int32, read
    token_of_row_ptr,  # (R,) int32, read
    longest_first_ptr,  # (E,) int32, read
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
    STRIP: tl.constexpr,
):
    """Grid: one program a processor. A ticket is an expert, longest first, and a block of M and a strip of blocks of N,
    strips fastest. Who draws it alone sums those tiles, each over the expert's rows in order; without rows there is
    nothing to sum, and zeros are stored.

    Example: row_start = [0, 2, 2], token_of_row = [1, 0], a = [[1.], [2.]], tokens = [[5., 6.], [3., 4.]]:
    dw = [[[13., 16.]], [[0., 0.]]].
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    strips: tl.constexpr = (n_blocks + STRIP - 1) // STRIP
    strips_of_expert: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M * strips
    tickets = E * strips_of_expert
    ticket = draw(ticket_ptr)
    while ticket < tickets:
        following = draw(ticket_ptr)
        expert = tl.load(longest_first_ptr + ticket // strips_of_expert)
        first_m = ticket % strips_of_expert // strips * BLOCK_M
        first, end = tl.load(row_start_ptr + expert), tl.load(row_start_ptr + expert + 1)
        in_blocks = (first // ROWS_OF_BLOCK + expert) * ROWS_OF_BLOCK

        first_n_block = ticket % strips * STRIP
        for n_block in tl.range(first_n_block, tl.minimum(first_n_block + STRIP, n_blocks), flatten=True):
            n = n_block * BLOCK_N + tl.arange(0, BLOCK_N)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(0, end - first, BLOCK_R):
                a = a_desc.load([in_blocks + start, first_m])
                r = first + start + tl.arange(0, BLOCK_R)
                at = tokens_ptr + tokens_of_tile(r, end, token_of_row_ptr)[:, None] * stride_tokens_t
                at += n.to(tl.int64)[None, :] * stride_tokens_n
                if N % BLOCK_N == 0:
                    b = tl.load(at)
                else:
                    b = tl.load(at, mask=(n < N)[None, :], other=0.0)
                acc = dot(a.T, b, acc)

            m = first_m + tl.arange(0, BLOCK_M)
            mask = (m < M)[:, None] & (n < N)[None, :]
            to_dw = dw_ptr + expert.to(tl.int64) * stride_dwe
            to_dw += m.to(tl.int64)[:, None] * stride_dwm + n.to(tl.int64)[None, :] * stride_dwn
            tl.store(to_dw, narrow(acc, dw_ptr.dtype.element_ty), mask=mask)
        ticket = following


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
            plan.token_of_row,
            table.row_blocks,
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
            plan.token_of_row,
            plan.slot_of_row,
            table.row_blocks,
            table.counters,
            table.ticket(kernel),
            K=K,
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
            plan.token_of_row,
            plan.slot_of_row,
            dpre,
            weighted_act,
            parts,
            table.row_blocks,
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


def weight_grad(a: Tensor, tokens: Tensor, plan: Plan, table: TileTable, kernel: str, dw: Tensor) -> Tensor:
    """dw[e] = sum over the rows r of e of a[r]^T tokens[token_of_row[r]]: a (rows in blocks, M), zeros where a block is
    padded, tokens (T, N), any strides. kernel: "dw_down" or "dw_gate_up". Writes all of dw (E, M, N), any strides.
    """
    E, M, N = dw.shape
    tile = getattr(table.tiles, kernel)
    persistent_weight_grad_kernel[(programs(tile),)](
        descriptor(a, tile.BLOCK_R, tile.BLOCK_M),
        tokens,
        dw,
        plan.row_start,
        plan.token_of_row,
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
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block))
