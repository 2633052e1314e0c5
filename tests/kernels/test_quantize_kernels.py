"""The quantisers on the device against reference/quantize.py, to the bit: every code, tie and kind of block."""

import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE, framed, transposed
from exact import plan_of, shuffled_plan
from torch import Tensor

from mega_moe.kernels.blocks import fp8_tiles
from mega_moe.kernels.quantize import (
    columns_in_blocks,
    quantise_columns,
    quantise_rows,
    quantise_rows_in_blocks,
    quantise_weights,
    rows_in_blocks,
    to_e4m3,
)
from mega_moe.kernels.tile_table import TileTable, tile_table
from mega_moe.reference.quantize import FP8, Quantised, fp32_scale, quantise
from mega_moe.shapes import Plan

nan, inf = torch.nan, torch.inf
ALONG, ACROSS = FP8.along, FP8.across

every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
STRIDES = {
    "contiguous": lambda t: t,
    "transposed": transposed,
    "framed in NaN": lambda t: framed(t, gap=3, offset=1),
    "one column expanded": lambda t: t[..., :1].expand(t.shape),
}
any_strides = pytest.mark.parametrize("lay_out", STRIDES.values(), ids=list(STRIDES))


def uneven(*shape: int, dtype: torch.dtype = torch.float32, spread: int = 12) -> Tensor:
    """Normal numbers, times powers of two that change from row to row and from column to column."""
    generator = torch.Generator().manual_seed(0)
    exponents = [torch.randint(-spread, spread + 1, (n,), generator=generator) for n in shape[-2:]]
    largest = 4.0 if dtype == torch.float16 else 1.0  # of 2^-24 .. 65504 the middle
    powers = torch.exp2((exponents[0][:, None] / 2 + exponents[1] / 2).round().clamp(-9 if largest > 1 else -99, 9))
    return (torch.randn(shape, generator=generator) * powers * largest).to(DEVICE, dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Codes by their bytes; scales by theirs, any NaN like any other."""
    if one.dtype == torch.float8_e4m3fn:
        return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    one, other = (torch.where(t.isnan(), nan, t).contiguous().view(torch.int32) for t in (one, other))
    return torch.equal(one, other)


def on_cpu(t: Tensor, block: tuple[int, int], row_start: Tensor | None = None) -> Quantised:
    """What the specification says, moved to where the tests run."""
    q = quantise(t.cpu(), block, fp32_scale, None if row_start is None else row_start.cpu())
    return Quantised(q.codes.to(DEVICE), q.scales.to(DEVICE), block)


def assert_rows(t: Tensor) -> None:
    got, true = quantise_rows(t), on_cpu(t, (1, ALONG))
    assert same_bits(got.codes, true.codes) and same_bits(got.scales, true.scales)


def assert_weights(w: Tensor) -> None:
    """Both copies from one pass, and each alone."""
    true = on_cpu(w, (ACROSS, ALONG))
    both = quantise_weights(w, transposed=True)
    one, other = quantise_weights(w), quantise_weights(w, codes=False, transposed=True)
    assert one.transposed is None and other.codes is None
    for got in (both, one, other):
        assert same_bits(got.scales, true.scales)
        assert got.codes is None or same_bits(got.codes, true.codes)
        assert got.transposed is None or same_bits(got.transposed.mT, true.codes)


def table_of(plan: Plan) -> TileTable:
    return tile_table(plan, fp8_tiles())


def assert_columns(tokens: Tensor, plan: Plan) -> None:
    """In every block that holds rows: what the specification says, and zeros behind an expert's last row. Beside it the
    same rows by row."""
    table, live = table_of(plan), int(plan.row_start[-1])
    got, blocks = quantise_columns(tokens, table), int(table.counters[0])
    by_row, rows = on_cpu(tokens, (1, ALONG)), table.route_in_blocks[: blocks * ALONG] >= 0
    token = table.token_in_blocks[: blocks * ALONG]
    codes, scales = (part[: blocks * ALONG] for part in quantise_rows_in_blocks(tokens, table)[:2])
    assert same_bits(codes[rows], by_row.codes[token[rows]]) and not codes[~rows].float().any()
    assert same_bits(scales[rows], by_row.scales[token[rows]]) and not scales[~rows].any()
    true = on_cpu(tokens[plan.token_of_row[:live]], (ALONG, 1), plan.row_start)
    assert got.codes.shape[1] % ALONG == 0 and len(true.scales) == blocks
    assert same_bits(got.scales[:blocks], true.scales)

    codes = got.codes[:, : blocks * ALONG].contiguous().view(torch.uint8)
    assert torch.equal(codes[:, rows], true.codes.view(torch.uint8).T)
    assert not codes[:, ~rows].any()


# One value.


@triton.jit
def e4m3_kernel(value_ptr, codes_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(codes_ptr + i, to_e4m3(tl.load(value_ptr + i)))


def encoded(value: Tensor) -> Tensor:
    """fp32 values as kernels encode them."""
    codes = torch.empty_like(value, dtype=torch.float8_e4m3fn)
    e4m3_kernel[(len(value) // 256,)](value, codes, 256)
    return codes


def test_every_code_every_tie_and_their_neighbours():
    """On a GPU this is its own conversion, in the interpreter ours."""
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (exact[:-1] + exact[1:]) / 2
    around = [t for m in (exact, ties) for t in (m, torch.nextafter(m, m + 1), torch.nextafter(m, m - 1))]
    value = torch.cat([*around, torch.rand(1000) * 448, torch.rand(1000) / 64]).clamp(0, 448)
    value = torch.cat([value, -value, torch.tensor([nan, 0.0, -0.0, 2.0**-149, -(2.0**-149)])])
    value = torch.cat([value, torch.zeros(-len(value) % 256)])
    assert same_bits(encoded(value.to(DEVICE)), value.to(torch.float8_e4m3fn).to(DEVICE))


# Whole tensors.


def test_kernels_do_their_examples(poison):
    tensor = lambda values: torch.tensor(values, device=DEVICE)
    rows = quantise_rows(tensor([[2.0, -448.0], [1.0, 0.0]]))
    assert rows.codes.tolist() == [[2.0, -448.0], [448.0, 0.0]]
    torch.testing.assert_close(rows.scales, tensor([[1.0], [1 / 448]]))
    w = quantise_weights(tensor([[[[1.0, -2.0], [0.0, 448.0]]]]), transposed=True)
    assert w.codes.tolist() == [[[[1.0, -2.0], [0.0, 448.0]]]] and w.scales.tolist() == [[[[1.0]]]]
    assert w.transposed.tolist() == [[[[1.0, 0.0], [-2.0, 448.0]]]]
    plan = plan_of([1])._replace(token_of_row=tensor([1]).int())
    columns = quantise_columns(tensor([[9.0], [448.0]]), table_of(plan))
    assert columns.codes[0, :ALONG].tolist() == [448.0] + [0.0] * 127 and columns.scales[0].tolist() == [1.0]
    in_blocks = quantise_rows_in_blocks(tensor([[9.0], [448.0]]), table_of(plan))
    assert in_blocks.codes[:ALONG, 0].tolist() == [448.0] + [0.0] * 127 and in_blocks.scales[0].tolist() == [1.0]


@every_dtype
@pytest.mark.parametrize("T, N", [(1, 1), (3, 128), (70, 300), (130, 17)])
def test_rows(T, N, dtype, poison):
    assert_rows(uneven(T, N, dtype=dtype))


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 130, 260), (3, 2, 17, 140), (2, 2, 128, 16)], ids=str)
def test_weights(shape, dtype, poison):
    assert_weights(uneven(*shape, dtype=dtype))


@every_dtype
@pytest.mark.parametrize(
    "rows, masked, N",
    [([1, 127, 0, 128, 129], 3, 140), ([0, 300], 0, 16), ([1], 0, 1), ([0, 0], 4, 20)],
    ids=["tails", "one expert has all", "one row", "all masked"],
)
def test_columns(rows, masked, N, dtype, poison):
    plan = shuffled_plan(rows, masked)
    assert_columns(uneven(len(plan.row_of_slot), N, dtype=dtype), plan)


@any_strides
def test_any_strides(lay_out, poison):
    assert_rows(lay_out(uneven(40, 150)))
    assert_weights(lay_out(uneven(2, 2, 40, 150)))
    plan = shuffled_plan([33, 0, 3])
    assert_columns(lay_out(uneven(len(plan.row_of_slot), 30)), plan)


BLOCKS = {
    "zeros": [0.0, 0.0],
    "minus zeros": [-0.0, -0.0],
    "NaN": [nan, 1.0],
    "infinity": [1.0, inf],
    "minus infinity": [-inf, 0.0],
    "the largest": [torch.finfo(torch.float32).max, -1e38, 1e30],
    "below the smallest scale": [448 * 2.0**-126, 447 * 2.0**-126, 2.0**-127, -(2.0**-135)],
    "subnormal": [1e-40, -(2.0**-149)],
    "far below its block's largest": [448.0, 2.0**-7, 2.0**-10, 2.0**-10 * 1.01, 1e-30],
}


@pytest.mark.parametrize("values", BLOCKS.values(), ids=list(BLOCKS))
def test_blocks_of_every_kind_and_no_neighbour_changes(values, poison):
    """The middle one of three blocks. NaN and infinity make it NaN throughout, codes and scale."""
    t = uneven(3, 3 * ALONG, spread=2)
    t[1, ALONG : ALONG + len(values)] = torch.tensor(values, device=DEVICE)
    t[1, ALONG + len(values) : 2 * ALONG] = 0
    assert_rows(t)
    assert_rows(-t)
    assert_weights(t.repeat_interleave(ALONG, 0)[None])
    plan = plan_of([ALONG] * 3)
    assert_columns(t.view(9, ALONG)[[3, 4, 5]].flatten()[:, None].repeat(1, 2), plan)


def test_nothing_at_all():
    plan = plan_of([0, 0])
    empty = torch.empty(0, 130, device=DEVICE)
    assert [len(part) for part in quantise_rows(empty)[:2]] == [0, 0]
    assert quantise_columns(empty, table_of(plan)).codes.shape == (130, 2 * ALONG)


def test_rows_of_codes_are_aligned():
    """As the copy engine reads them."""
    table = table_of(plan_of([3]))
    tensors = [quantise_rows(uneven(3, 17)).codes, quantise_weights(uneven(2, 17, 33)).codes]
    tensors += [rows_in_blocks(2, 17, torch.float32, table).codes, columns_in_blocks(17, torch.float32, table).codes]
    assert all(stride % 16 == 0 for codes in tensors for stride in codes.stride()[:-1])
