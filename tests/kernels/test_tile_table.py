"""The tile table against its specification in plain Python: rows in blocks, longest experts first, tickets at zero."""

from dataclasses import replace

import pytest
import torch
from cases import DEVICE
from exact import BLOCK, plan_of, shuffled_plan

from mega_moe.kernels.blocks import HALF, INTERPRETER, blocks_for, blocks_of_target, tiles_of
from mega_moe.kernels.blocks import table as measured
from mega_moe.kernels.tile_table import TICKETS, TileTable, tile_table
from mega_moe.kernels.weights import ALIGNMENT
from mega_moe.shapes import Plan

UNWRITTEN = torch.iinfo(torch.int32).max


def table_of(plan: Plan, BLOCK_R: int) -> TileTable:
    return tile_table(plan, replace(blocks_for(torch.bfloat16).persistent, BLOCK_R=BLOCK_R))


def assert_specified(rows: list[int], BLOCK_R: int, masked: int = 0, K: int = 2) -> None:
    """The table of a routing with these numbers of rows."""
    plan = shuffled_plan(rows, masked, K)
    start, token, slot = plan.row_start.tolist(), plan.token_of_row.tolist(), plan.slot_of_row.tolist()
    row_blocks, tokens, routes, first_blocks = [], [], [], []
    for expert, end in enumerate(start[1:]):
        first_blocks.append(len(row_blocks))
        for row in range(start[expert], end, BLOCK_R):
            row_blocks.append([expert, row, min(end - row, BLOCK_R)])
            for r in range(row, row + BLOCK_R):
                tokens.append(token[min(r, end - 1)])
                routes.append(token[r] * K + slot[r] if r < end else -1)
    longest_first = sorted(range(len(rows)), key=lambda expert: -rows[expert])  # of equals, the lower comes first

    table, blocks = table_of(plan, BLOCK_R), len(row_blocks)
    assert table.counters.tolist() == [blocks] + [0] * len(TICKETS)
    assert table.longest_first.tolist() == [[expert, first_blocks[expert], rows[expert]] for expert in longest_first]
    written = [(table.row_blocks, row_blocks), (table.token_in_blocks, tokens), (table.route_in_blocks, routes)]
    for got, expected in written:
        assert len(got) >= len(expected) and got[: len(expected)].tolist() == expected
        assert (got[len(expected) :] == UNWRITTEN).all()
    assert {t.dtype for t in vars(table).values() if isinstance(t, torch.Tensor)} == {torch.int32}


def random_rows(E: int, R: int, seed: int) -> list[int]:
    """Rows of each of E experts: R in all, a third of the experts empty, a few very long."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.rand(E, generator=generator) ** 4 * (torch.rand(E, generator=generator) > 0.3)
    popularity[0] += 0.01
    return torch.multinomial(popularity, R, True, generator=generator).bincount(minlength=E).tolist()


def test_example(framed_memory):
    plan = plan_of([1, 0, 3])._replace(token_of_row=torch.tensor([2, 0, 1, 3], dtype=torch.int32, device=DEVICE))
    assert plan.row_start.tolist() == [0, 1, 1, 4]
    table = table_of(plan, 2)
    assert table.row_blocks[:3].tolist() == [[0, 0, 1], [2, 1, 2], [2, 3, 1]]
    assert table.longest_first.tolist() == [[2, 1, 3], [0, 0, 1], [1, 1, 0]]
    assert table.token_in_blocks[:6].tolist() == [2, 2, 0, 1, 3, 3]
    assert table.route_in_blocks[:6].tolist() == [2, -1, 0, 1, 3, -1]
    assert table.counters.tolist() == [3, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("E, BLOCK_R, K", [(1, 8, 1), (2, 1, 3), (3, BLOCK, 2), (17, 8, 8), (130, BLOCK, 2)])
def test_random_routings(E, BLOCK_R, K, framed_memory):
    for seed in range(3 if E < 100 else 1):
        assert_specified(random_rows(E, E + 60, seed), BLOCK_R, seed, K)


def test_a_thousand_experts(framed_memory):
    assert_specified(random_rows(1000, 500, 0), BLOCK)


@pytest.mark.parametrize(
    "rows, masked",
    [
        ([0, 0, 0], 0),
        ([0, 0, 0], 100),
        ([5, 5, 5, 5], 0),
        ([0, 5, 0, 7, 5, 7, 0], 3),
        ([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK], 0),
        ([0, 0, 20 * BLOCK + 1], 0),  # more blocks than experts
    ],
    ids=str,
)
def test_uneven_routings(rows, masked, framed_memory):
    assert_specified(rows, BLOCK, masked)


def test_every_kernel_draws_from_a_counter_of_its_own():
    table = table_of(plan_of([3, 4]), BLOCK)
    for n, kernel in enumerate(TICKETS):
        table.ticket(kernel)[0] = 10 + n
    assert table.counters[1:].tolist() == [10 + n for n in range(len(TICKETS))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 8, 17])
def test_a_tensor_in_blocks(columns, dtype):
    table = table_of(plan_of([3, 0, 2 * BLOCK], masked=BLOCK), BLOCK)
    t = table.in_blocks(columns, like=torch.empty(1, dtype=dtype, device=DEVICE))
    assert t.shape == (len(table.row_blocks) * BLOCK, columns) and t.dtype == dtype
    assert t.stride(0) * t.element_size() % ALIGNMENT == 0 and t.stride(1) == 1


def every_tiles() -> dict:
    """The resident programs' tiles of every target and dtype, and all that were measured."""
    named = {(name, dtype): blocks_of_target(name, dtype) for name in HALF for dtype in (torch.bfloat16, torch.float32)}
    named["interpreter"] = INTERPRETER
    found = {(entry["target"], entry["H"], entry["I"]): tiles_of(entry["tiles"]) for entry in measured()}
    return {str(name): blocks.persistent for name, blocks in named.items()} | {str(n): t for n, t in found.items()}


@pytest.mark.parametrize("tiles", every_tiles().values(), ids=list(every_tiles()))
def test_tiles_fit_the_blocks_that_they_share(tiles):
    """A weight gradient's step that did not divide a block would run on into the next expert's; chunks that did not
    divide a tile of dact would leave some of it out; and a descriptor's block has powers of two, at most 256 of them.
    """
    assert tiles.BLOCK_R % tiles.dw_down.BLOCK_R == tiles.BLOCK_R % tiles.dw_gate_up.BLOCK_R == 0
    assert tiles.dact.BLOCK_N % tiles.dact.CHUNK == 0
    for kernel in TICKETS:
        tile = getattr(tiles, kernel)
        sizes = [tiles.BLOCK_R] + [size for name, size in vars(tile).items() if name.startswith("BLOCK_")]
        assert all(size.bit_count() == 1 and 16 <= size <= 256 for size in sizes), (kernel, sizes)
        assert getattr(tile, "STRIP", 1) >= 1
