"""The tile table: what the resident programs of a persistent kernel draw their tickets for, made on the device.

What a program would otherwise have to find out for every tile, as three int32 tensors:

- `row_blocks` lists the blocks of rows that hold any, expert by expert. A tile is one of these and a column block.
- `longest_first` lists the experts by their number of rows. A weight gradient's tile takes as long as its expert has
  rows, and whoever draws a long one last keeps all others waiting.
- `counters` holds the number of row blocks and, zeroed, a ticket for each kernel of a direction.

The table also says where rows lie *in blocks*. Tensors between the kernels give every expert whole blocks of rows, as
rows_of_block in tile.py counts them: expert e's first block is row_start[e] // BLOCK_R + e. So a block never holds rows
of two experts, and can be loaded by a descriptor of contiguous memory.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Plan
from .blocks import Persistent
from .weights import aligned

TICKETS = ("gate_up", "down", "dact", "dx", "dw_down", "dw_gate_up")
"""The kernels that draw, each from a counter of its own; counter 0 is the number of row blocks."""


@dataclass(frozen=True)
class TileTable:
    """All int32, on the device.

    Attributes:
        row_blocks: (R // BLOCK_R + E, 4): expert, first row, end of the expert's rows, and which block it is in tensors
            that lie in blocks. Rows of this table behind the live ones are not written.
        longest_first: (E,) experts.
        counters: (1 + len(TICKETS),): the number of live row blocks, then the tickets.
        tiles: the tiles of the kernels that draw; BLOCK_R of them are a block's rows.
    """

    row_blocks: Tensor
    longest_first: Tensor
    counters: Tensor
    tiles: Persistent

    def ticket(self, kernel: str) -> Tensor:
        """The counter from which `kernel` draws. Drawn from by one launch."""
        return self.counters[1 + TICKETS.index(kernel) :]

    def in_blocks(self, columns: int, like: Tensor) -> Tensor:
        """An uninitialised (rows in blocks, columns) tensor of like's dtype, its rows padded to 16 bytes."""
        return aligned((len(self.row_blocks) * self.tiles.BLOCK_R, columns), like)


# --8<-- [start:kernel]
@triton.jit(do_not_specialize=["E"])
def tile_table_kernel(
    row_start_ptr,  # (E+1,) int32, read
    row_blocks_ptr,  # (R // BLOCK_R + E, 4) int32, written as far as there are live blocks
    longest_first_ptr,  # (E,) int32, written
    counters_ptr,  # (COUNTERS,) int32, written
    E,
    COUNTERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (E,). Program e lists the blocks of expert e behind those of the experts below it, and puts e in its place
    among all experts; of two with equally many rows the lower comes first. Program 0 also writes the counters.

    Example: BLOCK_R = 2, row_start = [0, 1, 1, 4]. Expert 0 has one block and expert 2 two:
        row_blocks = [[0, 0, 1, 0], [2, 1, 4, 2], [2, 3, 4, 3]]    longest_first = [2, 0, 1]    counters = [3, 0, ...]
    """
    expert = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    start = tl.load(row_start_ptr + e, mask=e < E, other=0)
    rows = tl.load(row_start_ptr + e + 1, mask=e < E, other=0) - start
    blocks = tl.cdiv(rows, BLOCK_R)

    first = tl.load(row_start_ptr + expert)
    end = tl.load(row_start_ptr + expert + 1)
    listed = tl.sum(tl.where(e < expert, blocks, 0))
    for done in range(0, tl.cdiv(end - first, BLOCK_R), BLOCK):
        block = done + tl.arange(0, BLOCK)
        at = row_blocks_ptr + (listed + block).to(tl.int64) * 4
        live = block < tl.cdiv(end - first, BLOCK_R)
        tl.store(at, expert, mask=live)
        tl.store(at + 1, first + block * BLOCK_R, mask=live)
        tl.store(at + 2, end, mask=live)
        tl.store(at + 3, first // BLOCK_R + expert + block, mask=live)

    before = (rows > end - first) | ((rows == end - first) & (e < expert))
    tl.store(longest_first_ptr + tl.sum((before & (e < E)).to(tl.int32)), expert)

    if expert == 0:
        counter = tl.arange(0, BLOCK)
        tl.store(counters_ptr + counter, tl.where(counter == 0, tl.sum(blocks), 0), mask=counter < COUNTERS)


# --8<-- [end:kernel]


def tile_table(plan: Plan, tiles: Persistent) -> TileTable:
    """The table for one direction of one call: its tickets are drawn once."""
    E, device = len(plan.row_start) - 1, plan.row_start.device
    R = len(plan.token_of_row)
    index = lambda *shape: torch.empty(shape, dtype=torch.int32, device=device)
    table = TileTable(index(R // tiles.BLOCK_R + E, 4), index(E), index(1 + len(TICKETS)), tiles)
    tile_table_kernel[(E,)](
        plan.row_start,
        table.row_blocks,
        table.longest_first,
        table.counters,
        E,
        COUNTERS=len(table.counters),
        BLOCK_R=tiles.BLOCK_R,
        BLOCK_E=triton.next_power_of_2(E),
        BLOCK=32,
        num_warps=1 if E <= 256 else 4,
    )
    return table
