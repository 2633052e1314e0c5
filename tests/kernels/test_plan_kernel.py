"""The plan made on the device is that of mega_moe.routing, to the bit, for every routing."""

import pytest
import torch
from cases import DEVICE, framed, transposed

from mega_moe import routing
from mega_moe.kernels.blocks import routes
from mega_moe.kernels.plan import count_kernel, place_kernel, plan
from mega_moe.shapes import Plan

OUTSIDE = (-2, -(2**31), 2**31 - 1, 2**30, -1)
WIDE = (2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63), 2**40)  # ids that look like an expert in their low 32 bits


def ids_of(T: int, K: int, E: int, seed: int = 0) -> torch.Tensor:
    """Random ids with every fifth route masked; the same expert may come twice in a token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(E, (T, K), generator=generator)
    ids.flatten()[::5] = -1
    return ids.to(DEVICE)


def assert_planned(ids: torch.Tensor, E: int) -> None:
    """The kernel's plan is the specification's: every number, shape and dtype."""
    specified = routing.plan(ids, E)
    for name, got, expected in zip(specified._fields, plan(ids, E), specified, strict=True):
        assert got.dtype == torch.int32 and got.is_contiguous(), name
        assert torch.equal(got, expected), name


def test_example(framed_memory):
    ids = torch.tensor([[2, 0], [0, -1], [2, 2]], device=DEVICE)
    sizes, blocks = (6, 3, *ids.stride()), dict(K=2, BLOCK=4, BLOCK_E=4, num_warps=1)
    index = lambda *shape: torch.empty(shape, dtype=torch.int32, device=DEVICE)
    count, made = index(2, 4), Plan(index(4), index(6), index(6), index(3, 2))

    count_kernel[(2,)](ids, count, *sizes, **blocks)
    assert count.tolist() == [[2, 0, 1, 0], [0, 0, 2, 0]]

    place_kernel[(2,)](ids, count, *made, *sizes, **blocks, BLOCK_RANK=2, BLOCK_C=1)
    assert made.row_start.tolist() == [0, 2, 2, 5]
    assert made.token_of_row.tolist() == [0, 1, 0, 2, 2, -1]
    assert made.slot_of_row.tolist() == [1, 0, 0, 0, 1, -1]
    assert made.row_of_slot.tolist() == [[2, 0], [1, -1], [3, 4]]


@pytest.mark.parametrize(
    "T, K, E", [(7, 3, 5), (40, 6, 96), (8, 10, 384), (9, 1, 1), (5, 4, 1), (1, 8, 64), (30, 3, 3)]
)
def test_experts_and_slots_that_are_no_powers_of_two(T, K, E, framed_memory):
    assert_planned(ids_of(T, K, E), E)


def around(routes: int) -> list[int]:
    """Numbers of routes just around this one."""
    return [routes - 1, routes, routes + 1]


@pytest.mark.parametrize(
    "R",
    [
        *(1, 2),
        *around(routes().BLOCK_RANK),
        *around(routes().BLOCK),
        *around(2 * routes().BLOCK + routes().BLOCK_RANK),
        *around(routes().BLOCK * routes().MOST_CHUNKS),  # from here on a chunk is more than one block
        *around(routes().BLOCK * (routes().MOST_CHUNKS * 2 - 3)),  # no block is left for the last chunk
    ],
)
def test_routes_just_around_a_block_and_a_chunk(R, framed_memory):
    assert_planned(ids_of(R, 1, 3), 3)


@pytest.mark.parametrize("E", [1, 2, 3, 17, 127, 128, 129, 1000, 1024])
def test_any_number_of_experts_over_several_chunks(E, framed_memory):
    assert_planned(ids_of(routes().BLOCK // 2 + 9, 5, E), E)


def test_chunks_without_a_live_route(framed_memory):
    """The first, the last, and one between."""
    size = routes().BLOCK
    ids = ids_of(5 * size - 7, 1, 4)
    for chunk in (0, 2, 4):
        ids[chunk * size : (chunk + 1) * size] = -1
    assert_planned(ids, 4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "fill", ["one expert", "last expert", "all masked", "empty experts", "duplicates", "falling", "no tokens"]
)
def test_uneven_routings(fill, dtype, framed_memory):
    E, ids = 6, ids_of(50, 4, 6)
    if fill == "one expert":
        ids.fill_(2)
    elif fill == "last expert":
        ids.fill_(E - 1)
    elif fill == "all masked":
        ids.fill_(-1)
    elif fill == "empty experts":
        ids = ids // 2 * 2
    elif fill == "duplicates":
        ids[:, 1:] = ids[:, :1]
    elif fill == "falling":  # in the reverse of the rows' order
        ids = torch.arange(199, -1, -1, device=DEVICE).view(50, 4) // 40
    elif fill == "no tokens":
        ids = ids[:0]
    assert_planned(ids.to(dtype), E)


@pytest.mark.parametrize("dtype, outside", [(torch.int32, OUTSIDE), (torch.int64, OUTSIDE + WIDE)])
def test_ids_outside_the_table_are_masked(dtype, outside, framed_memory):
    ids = ids_of(20, 3, 4).to(dtype)
    ids.flatten()[2 : 2 + 3 * len(outside) : 3] = torch.tensor([*outside], dtype=dtype, device=DEVICE)
    ids[-1] = 4  # the first that is no expert
    assert_planned(ids, 4)


@pytest.mark.parametrize(
    "lay_out",
    [
        transposed,
        lambda ids: framed(ids, gap=3, offset=1),
        lambda ids: ids.flip(0).contiguous()[::2],
        lambda ids: ids[:, :1].expand(-1, 4),
        lambda ids: ids[:1].expand(30, -1),
    ],
    ids=["transposed", "framed", "every other token", "one slot expanded", "one token expanded"],
)
def test_any_strides(lay_out, framed_memory):
    assert_planned(lay_out(ids_of(30, 4, 5)), 5)


@pytest.mark.parametrize(
    "lay_out", [transposed, lambda ids: framed(ids, gap=3, offset=1)], ids=["transposed", "framed"]
)
def test_any_strides_over_several_chunks(lay_out, framed_memory):
    assert_planned(lay_out(ids_of(routes().BLOCK + 3, 3, 5)), 5)


def test_the_same_plan_every_time():
    ids = ids_of(100, 4, 7)
    assert all(torch.equal(a, b) for a, b in zip(plan(ids, 7), plan(ids, 7)))
