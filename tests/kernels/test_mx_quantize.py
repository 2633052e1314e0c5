"""The quantisers for MX on the device against reference/quantize.py, to the bit; and what a product makes of codes."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE, on_cpu
from exact import plan_of, shuffled_plan
from test_quantize_kernels import BLOCKS, any_strides, every_dtype, uneven
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder

from mega_moe.kernels.blocks import mx_tiles
from mega_moe.kernels.mx_quantize import (
    columns_in_blocks,
    dot_scaled,
    e8m0_scale,
    power_of_two,
    quantise_columns,
    quantise_rows,
    quantise_transposed,
    quantise_weights,
    reciprocal_of,
    rows_in_blocks,
    values_of,
)
from mega_moe.kernels.tile_table import TileTable, tile_table
from mega_moe.reference import quantize
from mega_moe.reference.quantize import MX, Quantised, quantise
from mega_moe.shapes import Plan

nan, inf = torch.nan, torch.inf
ALONG = MX.along


def on_the_cpu(t: Tensor, block: tuple[int, int], row_start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales that the specification gives, as bytes, moved to where the tests run."""
    q = quantise(t.cpu(), block, MX.scale_of, None if row_start is None else row_start.cpu())
    return as_bytes(q.codes.to(DEVICE)), as_bytes(q.scales.to(DEVICE))


def as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def assert_rows(t: Tensor) -> None:
    got, (codes, scales) = quantise_rows(t), on_the_cpu(t, (1, ALONG))
    assert torch.equal(as_bytes(got.codes), codes) and torch.equal(got.scales, scales)


def assert_weights(w: Tensor) -> None:
    """Two copies, each from the value."""
    for got, true in ((quantise_weights(w), w), (quantise_transposed(w), w.mT)):
        codes, scales = on_the_cpu(true, (1, ALONG))
        assert torch.equal(as_bytes(got.codes), codes) and torch.equal(got.scales, scales)


def table_of(plan: Plan, BLOCK_R: int | None = None) -> TileTable:
    return tile_table(plan, replace(mx_tiles(), BLOCK_R=BLOCK_R or mx_tiles().BLOCK_R))


def assert_columns(tokens: Tensor, plan: Plan, BLOCK_R: int | None = None) -> None:
    """In every block of rows that holds any: what the specification says; behind an expert's last row, zeros under
    the smallest scale."""
    table, live = table_of(plan, BLOCK_R), int(plan.row_start[-1])
    got, blocks = quantise_columns(tokens, table), int(table.counters[0])
    codes, scales = on_the_cpu(tokens[plan.token_of_row[:live]], (ALONG, 1), plan.row_start)

    in_blocks = table.route_in_blocks[: blocks * table.tiles.BLOCK_R] >= 0
    of_blocks = in_blocks.view(-1, ALONG).any(1)
    got_codes, got_scales = as_bytes(got.codes[:, : len(in_blocks)]), got.scales[:, : len(of_blocks)]
    assert torch.equal(got_codes[:, in_blocks], codes.T) and not got_codes[:, ~in_blocks].any()
    assert torch.equal(got_scales[:, of_blocks], scales.T) and (got_scales[:, ~of_blocks] == 1).all()


# One scale.


@triton.jit
def scale_kernel(amax_ptr, scales_ptr, power_ptr, reciprocal_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    scale = e8m0_scale(tl.load(amax_ptr + i))
    tl.store(scales_ptr + i, scale)
    tl.store(power_ptr + i, power_of_two(scale))
    tl.store(reciprocal_ptr + i, reciprocal_of(scale))


def test_every_scale_and_its_neighbours():
    """Every power of two, 7/4 of it, and the numbers beside both; nothing, the smallest and the largest number."""
    powers = torch.exp2(torch.arange(-149, 128, dtype=torch.float64)).float()
    around = [powers, powers * 1.75, torch.tensor([0.0, inf, torch.finfo(torch.float32).max, 2.0**-149])]
    amax = torch.cat(around)
    amax = torch.cat([amax, torch.nextafter(amax, torch.tensor(inf)), torch.nextafter(amax, torch.tensor(0.0))])
    amax = torch.cat([amax, torch.zeros(-len(amax) % 256)]).to(DEVICE)
    scales = torch.empty_like(amax, dtype=torch.uint8)
    power, reciprocal = torch.empty_like(amax), torch.empty_like(amax)
    scale_kernel[(len(amax) // 256,)](amax, scales, power, reciprocal, 256)
    true = quantize.e8m0_scale(amax.cpu()).to(DEVICE)
    assert torch.equal(scales, as_bytes(true)) and set(range(1, 248)) <= set(scales.tolist())
    for got, expected in ((power, true.float()), (reciprocal, true.float().reciprocal())):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# Whole tensors.


def test_kernels_do_their_examples(poison):
    tensor = lambda values: torch.tensor(values, device=DEVICE)
    rows = quantise_rows(tensor([[2.0, -448.0], [1.0, 0.0]]))
    assert rows.codes.tolist() == [[2.0, -448.0], [256.0, 0.0]] and rows.scales.tolist() == [[127], [119]]
    w = quantise_weights(tensor([[[[2.0, -448.0], [1.0, 0.0]]]]))
    assert w.codes.tolist() == [[[[2.0, -448.0], [256.0, 0.0]]]] and w.scales.tolist() == [[[[127], [119]]]]
    plan = plan_of([1])._replace(token_of_row=tensor([1]).int())
    table = table_of(plan)
    columns, rows_of_block = quantise_columns(tensor([[9.0], [448.0]]), table), table.tiles.BLOCK_R
    assert columns.codes[0, :rows_of_block].tolist() == [448.0] + [0.0] * (rows_of_block - 1)
    assert columns.scales[0, : rows_of_block // ALONG].tolist() == [127] + [1] * (rows_of_block // ALONG - 1)


@every_dtype
@pytest.mark.parametrize("T, N", [(1, 1), (3, 32), (70, 300), (130, 17)])
def test_rows(T, N, dtype, poison):
    assert_rows(uneven(T, N, dtype=dtype))


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 130, 260), (3, 2, 17, 140), (2, 2, 128, 16)], ids=str)
def test_weights(shape, dtype, poison):
    assert_weights(uneven(*shape, dtype=dtype))


@every_dtype
@pytest.mark.parametrize("BLOCK_R", [32, 128])
@pytest.mark.parametrize(
    "rows, masked, N",
    [([1, 31, 0, 32, 33, 128, 129], 3, 140), ([0, 300], 0, 16), ([1], 0, 1), ([0, 0], 4, 20)],
    ids=["tails", "one expert has all", "one row", "all masked"],
)
def test_columns(rows, masked, N, BLOCK_R, dtype, poison):
    plan = shuffled_plan(rows, masked)
    assert_columns(uneven(len(plan.row_of_slot), N, dtype=dtype), plan, BLOCK_R)


@any_strides
def test_any_strides(lay_out, poison):
    assert_rows(lay_out(uneven(40, 150)))
    assert_weights(lay_out(uneven(2, 2, 40, 150)))
    plan = shuffled_plan([33, 0, 3])
    assert_columns(lay_out(uneven(len(plan.row_of_slot), 30)), plan)


MX_BLOCKS = BLOCKS | {
    "the largest scale": [torch.finfo(torch.bfloat16).max, 240 * 2.0**120, -248 * 2.0**120, 1.75 * 2.0**127, 2.0**110],
    "just above 448": [448.0000305, 448.0, 1.0],
}


@pytest.mark.parametrize("values", MX_BLOCKS.values(), ids=list(MX_BLOCKS))
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
    assert quantise_columns(empty, table_of(plan)).codes.shape == (130, 2 * mx_tiles().BLOCK_R)


def test_rows_of_codes_and_of_scales_are_aligned():
    """As the copy engine reads them, and four scales at once."""
    table = table_of(plan_of([3]))
    tensors = [quantise_rows(uneven(3, 17)), quantise_weights(uneven(2, 17, 33)), quantise_transposed(uneven(2, 9, 33))]
    tensors += [rows_in_blocks(2, 17, torch.float32, table), columns_in_blocks(17, torch.float32, table)]
    assert all(stride % 16 == 0 for q in tensors for t in (q.codes, q.scales) for stride in t.stride()[:-1])


# Products.


@triton.jit
def product_kernel(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, out_ptr, N: tl.constexpr, C: tl.constexpr, NATIVE: tl.constexpr
):
    i, c, block = tl.arange(0, N), tl.arange(0, C), tl.arange(0, C // 32)
    at, scales_at = i[:, None] * C + c[None, :], i[:, None] * (C // 32) + block[None, :]
    a, a_scales = tl.load(a_ptr + at), tl.load(a_scales_ptr + scales_at)
    b, b_scales = tl.load(b_ptr + at), tl.load(b_scales_ptr + scales_at)
    out = tl.full((N, N), 1.0, tl.float32)
    out = dot_scaled(a, a_scales, b, b_scales, out, NATIVE)
    tl.store(out_ptr + i[:, None] * N + i[None, :], out)


def product(a: Quantised, b: Quantised, native: bool) -> Tensor:
    """1 + a @ b^T."""
    out = torch.empty(len(a.codes), len(b.codes), device=DEVICE)
    operands = (t.to(DEVICE) for q in (a, b) for t in (q.codes, as_bytes(q.scales)))
    product_kernel[(1,)](*operands, out, *a.codes.shape, native)
    return out


def operands() -> tuple[Quantised, Quantised]:
    """Two tensors of 128 x 128, uneven; one has a block with a NaN, blocks of zeros, and huge and tiny ones."""
    a, b = uneven(128, 128, spread=2).cpu(), uneven(128, 128, spread=8).cpu().flip(0)
    a[3, 40], a[5, 64:96], a[7] = nan, 0, 0
    a[9, :32], a[9, 32:], a[11] = 2.0**100, 2.0**-100, 2.0**-126
    return tuple(quantise(t, (1, ALONG), MX.scale_of) for t in (a, b))


def is_product(out: Tensor, a: Quantised, b: Quantised) -> None:
    a, b = (q.dequantise(torch.float64).to(DEVICE) for q in (a, b))
    true, size = 1 + a @ b.T, 1 + a.abs() @ b.abs().T
    assert torch.equal(out.isnan(), true.isnan())
    assert ((out.double() - true).abs() <= 2.0**-20 * size)[~true.isnan()].all()


def test_a_product_of_codes_in_bf16_is_that_of_the_values():
    a, b = operands()
    assert a.dequantise().isnan().sum() == ALONG
    is_product(product(a, b, native=False), a, b)


@triton.jit
def values_kernel(codes_ptr, scales_ptr, values_ptr, C: tl.constexpr):
    i, c = tl.arange(0, 128), tl.arange(0, C)
    at = i[:, None] * C + c[None, :]
    values = values_of(tl.load(codes_ptr + at), tl.load(scales_ptr + i[:, None] * (C // 32) + tl.arange(0, C // 32)))
    tl.store(values_ptr + at, values.to(tl.float32))


def test_bf16_holds_every_code_under_every_scale():
    """But for what is smaller than its smallest number. (The interpreter's bf16 has no subnormal ones.)"""
    smallest = 2.0**-126 if DEVICE == "cpu" else 2.0**-133
    codes = torch.arange(256, dtype=torch.uint8).repeat(128, 1)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes = codes.to(DEVICE).view(torch.float8_e4m3fn)
    for first in (1, 120):
        scales = torch.arange(first, first + 128, dtype=torch.uint8, device=DEVICE)[:, None].repeat(1, 256 // ALONG)
        values = torch.empty(128, 256, device=DEVICE)
        values_kernel[(1,)](codes, scales, values, 256)
        true = codes.double() * torch.exp2(scales.double() - 127).repeat_interleave(ALONG, 1)
        held = (true % smallest == 0) & (true.abs() < 2.0**128)
        assert held.float().mean() > 0.9 and torch.equal(values[held].double(), true[held])
        assert ((values.double() - true).abs()[~held & (true.abs() < 1)] <= smallest).all()


@on_cpu
def test_the_interpreter_multiplies_codes_and_scales_or_says_that_it_cannot():
    """Triton's has it from 3.8 on. Before that only the form in bf16 can be tested on a CPU."""
    a, b = operands()
    if hasattr(InterpreterBuilder, "create_dot_scaled"):
        is_product(product(a, b, native=True), a, b)
    else:
        with pytest.raises(InterpreterError):
            product(a, b, native=True)
