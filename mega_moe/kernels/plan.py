"""The plan of rows, made on the device in two launches: the same numbers, to the bit, as `mega_moe.routing.plan`.

A sort by expert that keeps the order within an expert needs no sort and no atomics, only counting. A route's row is the
number of routes that come before it: all those of lower experts, and the earlier ones of its own. So the routes are cut
into chunks, one a program. `count_kernel` counts each chunk's routes of each expert; `place_kernel` adds up the counts
of lower experts and of earlier chunks, which is where the chunk's own routes begin, and ranks these among themselves.
Nothing is read on the host, so a call never waits for the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Plan
from .blocks import routes


# --8<-- [start:kernel]
@triton.jit
def routes_of_chunk(chunk, chunks, R, BLOCK: tl.constexpr):
    """A chunk's first route, and its end.

    Every chunk has the same number of blocks, but for the last ones, which have what is left: perhaps nothing.
    """
    blocks = tl.cdiv(R, BLOCK)
    blocks_of_chunk = tl.cdiv(blocks, chunks)
    first_block = tl.minimum(chunk * blocks_of_chunk, blocks)
    end_block = tl.minimum(first_block + blocks_of_chunk, blocks)
    return first_block * BLOCK, tl.minimum(end_block * BLOCK, R)


@triton.jit
def experts_of_routes(topk_ids_ptr, route, R, E, stride_t, stride_k, K: tl.constexpr):
    """The expert of each route t*K + k; E for a masked route, and behind the last one."""
    from_ids = topk_ids_ptr + (route // K).to(tl.int64) * stride_t + (route % K).to(tl.int64) * stride_k
    ids = tl.load(from_ids, mask=route < R, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


@triton.jit
def count_chunk(
    chunk,
    chunks,
    topk_ids_ptr,
    count_ptr,
    R,
    E,
    stride_t,
    stride_k,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """How many of a chunk's routes go to each expert; masked routes are not counted."""
    first, end = routes_of_chunk(chunk, chunks, R, BLOCK)

    count = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(first, end, BLOCK):
        expert = experts_of_routes(topk_ids_ptr, start + tl.arange(0, BLOCK), R, E, stride_t, stride_k, K)
        count += tl.histogram(expert, BLOCK_E, mask=expert < E)

    tl.store(count_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), count)


@triton.jit
def begin_chunk(chunk, chunks, count_ptr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr):
    """From the counts of all chunks: the end of each expert's rows, and the row of its next route in this chunk."""
    e = tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_C, BLOCK_E), tl.int32)
    earlier = tl.zeros((BLOCK_C, BLOCK_E), tl.int32)
    for start in range(0, chunks, BLOCK_C):
        other = (start + tl.arange(0, BLOCK_C))[:, None]
        count = tl.load(count_ptr + other * BLOCK_E + e[None, :], mask=other < chunks, other=0)
        total += count
        earlier += tl.where(other < chunk, count, 0)

    # Behind all rows of lower experts, and its own of earlier chunks.
    rows_of_expert = tl.sum(total, 0)
    row_end = tl.cumsum(rows_of_expert)
    return row_end, row_end - rows_of_expert + tl.sum(earlier, 0)


@triton.jit
def store_row_start(row_start_ptr, row_end, E, BLOCK_E: tl.constexpr):
    """row_start, from the end of each expert's rows."""
    e = tl.arange(0, BLOCK_E)
    tl.store(row_start_ptr, 0)
    tl.store(row_start_ptr + 1 + e, row_end, mask=e < E)


@triton.jit
def place_chunk(
    chunk,
    chunks,
    next_row,  # (BLOCK_E,): see begin_chunk
    live_rows,
    topk_ids_ptr,
    token_of_row_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    R,
    E,
    stride_t,
    stride_k,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Put a chunk's routes into their rows."""
    first, end = routes_of_chunk(chunk, chunks, R, BLOCK)
    i = tl.arange(0, BLOCK_RANK)
    for start in range(first, end, BLOCK_RANK):
        route = start + i
        expert = experts_of_routes(topk_ids_ptr, route, R, E, stride_t, stride_k, K)
        live = expert < E

        # Keys are in the order of rows. A route's rank among them, less the routes of lower experts, is that among its
        # expert's.
        key = expert * BLOCK_RANK + i
        rank = tl.sum((key[:, None] < key[None, :]).to(tl.int32), 0)
        count = tl.histogram(expert, BLOCK_E, mask=live)
        lower = tl.cumsum(count) - count
        row = tl.gather(next_row - lower, tl.minimum(expert, BLOCK_E - 1), 0) + rank
        next_row += count

        tl.store(token_of_row_ptr + row, route // K, mask=live)
        tl.store(slot_of_row_ptr + row, route % K, mask=live)
        tl.store(row_of_slot_ptr + route, tl.where(live, row, -1), mask=route < R)

        # There are as many rows as routes. Those behind the last expert's have no token.
        unused = (route >= live_rows) & (route < R)
        tl.store(token_of_row_ptr + route, -1, mask=unused)
        tl.store(slot_of_row_ptr + route, -1, mask=unused)


@triton.jit(do_not_specialize=["R", "E"])
def count_kernel(
    topk_ids_ptr,  # (T, K) int32 or int64, read, any strides
    count_ptr,  # (chunks, BLOCK_E) int32, written
    R,
    E,
    stride_t,
    stride_k,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid: one program a chunk. How many of its routes go to each expert; masked routes are not counted.

    Example: topk_ids = [[2, 0], [0, -1], [2, 2]], E = 3, chunks of BLOCK = 4 routes, BLOCK_E = 4:
    count = [[2, 0, 1, 0], [0, 0, 2, 0]].
    """
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    count_chunk(chunk, chunks, topk_ids_ptr, count_ptr, R, E, stride_t, stride_k, K, BLOCK, BLOCK_E)


@triton.jit(do_not_specialize=["R", "E"])
def place_kernel(
    topk_ids_ptr,  # (T, K) int32 or int64, read, any strides
    count_ptr,  # (chunks, BLOCK_E) int32, read
    row_start_ptr,  # (E+1,) int32, written
    token_of_row_ptr,  # (R,) int32, written
    slot_of_row_ptr,  # (R,) int32, written
    row_of_slot_ptr,  # (T, K) int32, written
    R,
    E,
    stride_t,
    stride_k,
    K: tl.constexpr,
    BLOCK: tl.constexpr,  # that of count_kernel, so that the chunks are the same
    BLOCK_RANK: tl.constexpr,  # routes ranked in one step; divides BLOCK
    BLOCK_C: tl.constexpr,  # chunks whose counts are read in one step
    BLOCK_E: tl.constexpr,
):
    """Grid: one program a chunk, as for count_kernel. Every element of the plan is written by exactly one program.

    Example: continues that of count_kernel. rows_of_expert = [2, 0, 3, 0], so row_start = [0, 2, 2, 5]. Program 1, with
    routes 4 and 5, begins with next_row = [2, 2, 3, 5], since two routes of expert 0 and one of expert 2 are in chunk
    0. Both go to expert 2 and become rows 3 and 4. Route 3 is masked and has no row: row 5, behind the last expert's,
    has no token.
    """
    chunk, chunks = tl.program_id(0), tl.num_programs(0)
    row_end, next_row = begin_chunk(chunk, chunks, count_ptr, BLOCK_C, BLOCK_E)
    if chunk == 0:
        store_row_start(row_start_ptr, row_end, E, BLOCK_E)
    place_chunk(
        chunk,
        chunks,
        next_row,
        tl.max(row_end),
        topk_ids_ptr,
        token_of_row_ptr,
        slot_of_row_ptr,
        row_of_slot_ptr,
        R,
        E,
        stride_t,
        stride_k,
        K,
        BLOCK,
        BLOCK_RANK,
        BLOCK_E,
    )


# --8<-- [end:kernel]


def plan(topk_ids: Tensor, num_experts: int) -> Plan:
    """The plan of rows for topk_ids (T, K), any strides. Every id outside 0 .. num_experts-1 is a masked route.

    Every program of the second launch reads the counts of all chunks, chunks² * BLOCK_E * 4 bytes from cache together.
    So chunks are at most `MOST_CHUNKS`, and grow with T instead.
    """
    made = empty_plan(topk_ids, num_experts)
    chunks, blocks, ranked = chunks_and_blocks(topk_ids, num_experts)
    count = topk_ids.new_empty(chunks, blocks["BLOCK_E"], dtype=torch.int32)
    sizes = (topk_ids.numel(), num_experts, *topk_ids.stride())

    count_kernel[(chunks,)](topk_ids, count, *sizes, **blocks)
    place_kernel[(chunks,)](topk_ids, count, *made, *sizes, **blocks, **ranked)
    return made


def empty_plan(topk_ids: Tensor, num_experts: int) -> Plan:
    """Memory for the plan of these ids."""
    index = lambda *shape: torch.empty(shape, dtype=torch.int32, device=topk_ids.device)
    R = topk_ids.numel()
    return Plan(index(num_experts + 1), index(R), index(R), index(*topk_ids.shape))


def chunks_and_blocks(topk_ids: Tensor, num_experts: int) -> tuple[int, dict[str, int], dict[str, int]]:
    """How many chunks these ids are cut into; the sizes that counting and placing share; those of placing alone."""
    tile, BLOCK_E = routes(), triton.next_power_of_2(num_experts)
    chunks = min(max(triton.cdiv(topk_ids.numel(), tile.BLOCK), 1), tile.MOST_CHUNKS)
    blocks = dict(K=topk_ids.shape[1], BLOCK=tile.BLOCK, BLOCK_E=BLOCK_E, num_warps=tile.num_warps)
    return chunks, blocks, dict(BLOCK_RANK=tile.BLOCK_RANK, BLOCK_C=max(tile.COUNTS // BLOCK_E, 1))
