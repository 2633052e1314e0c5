"""The plan of rows, made on the device in one launch: the same numbers, to the bit, as `mega_moe.routing.plan`.

A sort by expert that keeps the order within an expert needs no sort and no atomics. Program e counts the routes that go
to experts below e: that is where its own rows start. Then it walks over the routes once more and gives each of its own
the next row. Nothing is read on the host, so a call never waits for the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Plan
from .blocks import launch_options, routes


# --8<-- [start:kernel]
@triton.jit
def experts_of_routes(topk_ids_ptr, route, R, E):
    """The expert of each route t*K + k; E for a masked route, E + 1 behind the last route."""
    ids = tl.load(topk_ids_ptr + route, mask=route < R, other=0)
    ids = tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)
    return tl.where(route < R, ids, E + 1)


@triton.jit(do_not_specialize=["R", "E"])
def plan_kernel(
    topk_ids_ptr,  # (T, K) int32 or int64, read
    row_start_ptr,  # (E+1,) int32, written
    token_of_row_ptr,  # (R,) int32, written
    slot_of_row_ptr,  # (R,) int32, written
    row_of_slot_ptr,  # (T, K) int32, written
    R,
    E,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (E + 1,), one program an expert, and one for the masked routes, which count as expert E and come last.

    Every element of the plan is written by exactly one program. The work is E * R reads, all of them from cache.

    Example: topk_ids = [[2, 0], [0, -1], [2, 2]], E = 3. Program 2 counts two routes below it, so row_start[2] = 2; its
    own routes are 0, 4 and 5 (t*K + k), which become rows 2, 3 and 4. Program 3 writes row_start[3] = 5, leaves row 5
    without a token and slot (1, 1) without a row.
    """
    expert = tl.program_id(0)

    below = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, R, BLOCK):
        below += (experts_of_routes(topk_ids_ptr, start + tl.arange(0, BLOCK), R, E) < expert).to(tl.int32)
    first = tl.sum(below)
    tl.store(row_start_ptr + expert, first)

    next_row = first
    live = expert < E
    for start in range(0, R, BLOCK):
        route = start + tl.arange(0, BLOCK)
        mine = experts_of_routes(topk_ids_ptr, route, R, E) == expert
        row = next_row + tl.cumsum(mine.to(tl.int32)) - 1
        tl.store(token_of_row_ptr + row, tl.where(live, route // K, -1), mask=mine)
        tl.store(slot_of_row_ptr + row, tl.where(live, route % K, -1), mask=mine)
        tl.store(row_of_slot_ptr + route, tl.where(live, row, -1), mask=mine)
        next_row += tl.sum(mine.to(tl.int32))


# --8<-- [end:kernel]


def plan(topk_ids: Tensor, num_experts: int) -> Plan:
    """The plan of rows for topk_ids (T, K), any strides. Every id outside 0 .. num_experts-1 is a masked route."""
    T, K = topk_ids.shape
    index = lambda *shape: torch.empty(shape, dtype=torch.int32, device=topk_ids.device)
    made = Plan(index(num_experts + 1), index(T * K), index(T * K), index(T, K))
    plan_kernel[(num_experts + 1,)](topk_ids.contiguous(), *made, T * K, num_experts, K=K, **launch_options(routes()))
    return made
