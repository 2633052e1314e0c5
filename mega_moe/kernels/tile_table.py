"""The tile table: what a resident program must know of a tile, made on the device, one lookup away from its ticket.

Rows lie *in blocks* here: every expert owns whole blocks of BLOCK_R rows, its last one padded, and all blocks stand
side by side, expert by expert. So a block never holds rows of two experts, can be loaded by a descriptor of
contiguous memory, and its place is its number. Without the table a program would have to search for a block's expert,
then find its rows, then their tokens: three loads, each waiting for the one before, at the beginning of every tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Plan
from .blocks import Persistent
from .tile import INTERPRETED
from .weights import aligned

TICKETS = ("gate_up", "down", "dact", "dx", "dw_down", "dw_gate_up")
"""The kernels that draw, each from a counter of its own; counter 0 is the number of blocks."""


@dataclass(frozen=True)
class TileTable:
    """All int32, on the device. Behind the last block that holds rows, nothing is written.

    Attributes:
        row_blocks: (blocks, 3): of each block its expert, its first row, and how many rows it holds.
        token_in_blocks: (blocks * BLOCK_R,): the token of each row; a padding row repeats the expert's last token, so
            that it can be loaded like any other.
        route_in_blocks: (blocks * BLOCK_R,): the route t*K + k that each row serves; -1 for a padding row.
        longest_first: (E, 3): experts by their number of rows: expert, its first block, its number of rows. A weight
            gradient's tile takes as long as its expert has rows, and whoever draws a long one last keeps all waiting.
        counters: (1 + len(TICKETS),): the number of blocks that hold rows; then the tickets, zeroed.
        tiles: the tiles of the kernels that draw.
    """

    row_blocks: Tensor
    token_in_blocks: Tensor
    route_in_blocks: Tensor
    longest_first: Tensor
    counters: Tensor
    tiles: Persistent

    def ticket(self, kernel: str) -> Tensor:
        """The counter from which `kernel` draws. Drawn from by one launch."""
        return self.counters[1 + TICKETS.index(kernel) :]

    def in_blocks(self, columns: int, like: Tensor) -> Tensor:
        """An uninitialised (blocks * BLOCK_R, columns) tensor of like's dtype, its rows padded to 16 bytes."""
        return aligned((len(self.token_in_blocks), columns), like)


# --8<-- [start:kernel]
@triton.jit(do_not_specialize=["E"])
def tile_table_kernel(
    row_start_ptr,  # (E+1,) int32, read
    token_of_row_ptr,  # (R,) int32, read
    slot_of_row_ptr,  # (R,) int32, read
    row_blocks_ptr,  # (blocks, 3) int32, written as far as blocks hold rows
    token_in_blocks_ptr,  # (blocks * BLOCK_R,) int32, likewise
    route_in_blocks_ptr,  # (blocks * BLOCK_R,) int32, likewise
    longest_first_ptr,  # (E, 3) int32, written
    counters_ptr,  # (COUNTERS,) int32, written
    E,
    K: tl.constexpr,
    COUNTERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Grid: programs of BLOCKS blocks each, enough for the R // BLOCK_R + E blocks of any routing. A program writes
    those of its blocks that hold rows, and puts the experts of the same numbers in their places; of two with equally
    many rows the lower comes first. Program 0 also writes the counters.

    Example: K = 1, BLOCK_R = 2, row_start = [0, 1, 1, 4], token_of_row = [2, 0, 1, 3]: expert 0 has one block, expert 2
    has two.
        row_blocks = [[0, 0, 1], [2, 1, 2], [2, 3, 1]]       token_in_blocks = [2, 2, 0, 1, 3, 3]
        longest_first = [[2, 1, 3], [0, 0, 1], [1, 1, 0]]    route_in_blocks = [2, -1, 0, 1, 3, -1]
        counters = [3, 0, 0, 0, 0, 0, 0]
    """
    e = tl.arange(0, BLOCK_E)
    start = tl.load(row_start_ptr + e, mask=e < E, other=0)
    rows = tl.load(row_start_ptr + e + 1, mask=e < E, other=0) - start
    blocks = tl.cdiv(rows, BLOCK_R)
    end_of_blocks = tl.cumsum(blocks)
    live_blocks = tl.sum(blocks)

    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    live = block < live_blocks
    expert = tl.sum((end_of_blocks[None, :] <= block[:, None]).to(tl.int32), 1)
    blocks_below = tl.sum(tl.where(e[None, :] < expert[:, None], blocks[None, :], 0), 1)
    end = tl.load(row_start_ptr + expert + 1, mask=live, other=0)
    row = tl.load(row_start_ptr + expert, mask=live, other=0) + (block - blocks_below) * BLOCK_R
    at = row_blocks_ptr + block * 3
    tl.store(at, expert, mask=live)
    tl.store(at + 1, row, mask=live)
    tl.store(at + 2, tl.minimum(end - row, BLOCK_R), mask=live)

    r = row[:, None] + tl.arange(0, BLOCK_R)[None, :]
    known = tl.minimum(r, end[:, None] - 1)
    token = tl.load(token_of_row_ptr + known, mask=live[:, None], other=0)
    route = token * K + tl.load(slot_of_row_ptr + known, mask=live[:, None], other=0)
    place = block.to(tl.int64)[:, None] * BLOCK_R + tl.arange(0, BLOCK_R)[None, :]
    tl.store(token_in_blocks_ptr + place, token, mask=live[:, None])
    tl.store(route_in_blocks_ptr + place, tl.where(r < end[:, None], route, -1), mask=live[:, None])

    expert, mine = block, tl.sum(tl.where(e[None, :] == block[:, None], rows[None, :], 0), 1)
    longer = rows[None, :] > mine[:, None]
    lower = (rows[None, :] == mine[:, None]) & (e[None, :] < expert[:, None])
    at = longest_first_ptr + tl.sum(((longer | lower) & (e < E)[None, :]).to(tl.int32), 1) * 3
    tl.store(at, expert, mask=expert < E)
    tl.store(at + 1, tl.sum(tl.where(e[None, :] < expert[:, None], blocks[None, :], 0), 1), mask=expert < E)
    tl.store(at + 2, mine, mask=expert < E)

    if tl.program_id(0) == 0:
        for done in range(0, COUNTERS, BLOCK_E):
            counter = done + e
            tl.store(counters_ptr + counter, tl.where(counter == 0, live_blocks, 0), mask=counter < COUNTERS)


# --8<-- [end:kernel]


def tile_table(plan: Plan, tiles: Persistent) -> TileTable:
    """The table for one direction of one call: its tickets are drawn once."""
    E, R, K = len(plan.row_start) - 1, len(plan.token_of_row), plan.row_of_slot.shape[1]
    blocks = R // tiles.BLOCK_R + E
    index = lambda *shape: torch.empty(shape, dtype=torch.int32, device=plan.row_start.device)
    table = TileTable(
        row_blocks=index(blocks, 3),
        token_in_blocks=index(blocks * tiles.BLOCK_R),
        route_in_blocks=index(blocks * tiles.BLOCK_R),
        longest_first=index(E, 3),
        counters=index(1 + len(TICKETS)),
        tiles=tiles,
    )
    BLOCKS = 32 if INTERPRETED else 4
    tile_table_kernel[(triton.cdiv(blocks, BLOCKS),)](
        plan.row_start,
        plan.token_of_row,
        plan.slot_of_row,
        table.row_blocks,
        table.token_in_blocks,
        table.route_in_blocks,
        table.longest_first,
        table.counters,
        E,
        K=K,
        COUNTERS=len(table.counters),
        BLOCK_R=tiles.BLOCK_R,
        BLOCK_E=triton.next_power_of_2(E),
        BLOCKS=BLOCKS,
        num_warps=4,
    )
    return table
