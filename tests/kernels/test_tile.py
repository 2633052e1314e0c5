"""The tile maths that kernels share, and the interpreter on whose behaviour two of its functions rest."""

import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE, framed, on_cpu, transposed
from exact import plan_of, same_values, whole

from mega_moe import routing
from mega_moe.kernels.tile import (
    dot,
    halves,
    narrow,
    route_of_row,
    rows_at,
    rows_of_block,
    sigmoid,
    weight_of_route,
)


@triton.jit
def blocks_kernel(
    row_start_ptr,  # (E+1,) read
    expert_ptr,  # (blocks,) written
    row_ptr,  # (blocks,) written
    end_ptr,  # (blocks,) written
    E,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    block = tl.program_id(0)
    expert, row, end = rows_of_block(block, row_start_ptr, E, BLOCK_R, BLOCK_E)
    tl.store(expert_ptr + block, expert)
    tl.store(row_ptr + block, row)
    tl.store(end_ptr + block, end)


def blocks(row_start: list[int], BLOCK_R: int) -> list[tuple[int, int, int]]:
    """(expert, first row, end) of every block that a launch has."""
    E, R = len(row_start) - 1, row_start[-1]
    expert, row, end = torch.full((3, R // BLOCK_R + E), -1, dtype=torch.int32, device=DEVICE)
    blocks_kernel[(len(expert),)](
        torch.tensor(row_start, dtype=torch.int32, device=DEVICE),
        expert,
        row,
        end,
        E,
        BLOCK_R=BLOCK_R,
        BLOCK_E=triton.next_power_of_2(E),
    )
    return list(zip(expert.tolist(), row.tolist(), end.tolist(), strict=True))


def test_rows_of_block_does_its_example():
    assert blocks([0, 5, 5, 13], BLOCK_R=4) == [(0, 0, 5), (0, 4, 5), (1, 5, 5), (2, 5, 13), (2, 9, 13), (2, 13, 13)]


@pytest.mark.parametrize("BLOCK_R", [1, 4, 32])
@pytest.mark.parametrize(
    "rows",
    [
        [0],
        [1],
        [33],
        [0, 0, 0],
        [4, 4, 4],
        [3, 5, 4, 0, 8],
        [0, 0, 64, 0, 0],
        [1, 0, 1],
        [31, 32, 33, 0, 0, 1],
        [1] * 17,
        [128, 130, 65],
    ],
    ids=str,
)
def test_every_live_row_is_in_exactly_one_block(rows, BLOCK_R):
    row_start = plan_of(rows).row_start.tolist()
    covered = []
    for expert, row, end in blocks(row_start, BLOCK_R):
        mine = range(row, min(row + BLOCK_R, end))
        assert all(row_start[expert] <= r < row_start[expert + 1] for r in mine)
        covered += mine
    assert sorted(covered) == list(range(sum(rows)))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, M: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    m, c, n = tl.arange(0, M)[:, None], tl.arange(0, C), tl.arange(0, N)[None, :]
    a, b = tl.load(a_ptr + m * C + c[None, :]), tl.load(b_ptr + c[:, None] * N + n)
    tl.store(out_ptr + m * N + n, dot(a, b, tl.full((M, N), 1.0, tl.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dot_adds_to_its_accumulator(dtype):
    a, b = whole(16, 32, dtype=dtype), whole(32, 64, dtype=dtype, seed=1)
    out = torch.empty(16, 64, device=DEVICE)
    dot_kernel[(1,)](a, b, out, 16, 32, 64)
    assert torch.equal(out, 1 + a.float() @ b.float())


def test_fp32_is_not_multiplied_as_tf32():
    a = torch.full((16, 16), 1 + 2.0**-20, device=DEVICE)  # TF32 keeps 10 bits of a mantissa
    out = torch.empty(16, 16, device=DEVICE)
    dot_kernel[(1,)](a, torch.eye(16, device=DEVICE), out, 16, 16, 16)
    assert (out == 1 + a).all()


@triton.jit
def narrow_kernel(value_ptr, out_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + i, narrow(tl.load(value_ptr + i), out_ptr.dtype.element_ty))


def narrowed(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values as kernels store them."""
    out = torch.empty_like(value, dtype=dtype)
    narrow_kernel[(len(value) // 4096,)](value, out, 4096)
    return out


def all_bf16() -> torch.Tensor:
    """Every bit pattern that bf16 has, 65,536 of them, with zero in place of the subnormal ones (below 1.2e-38): the
    interpreter converts those wrongly, and a GPU may flush them."""
    value = torch.arange(2**16, dtype=torch.int32).short().view(torch.bfloat16).to(DEVICE)
    return torch.where(value.abs() < torch.finfo(torch.bfloat16).tiny, 0.0, value)


def test_narrow_rounds_to_nearest_even():
    value = all_bf16().float()
    value = torch.where(value.isfinite() & (value != 0), value, 1.0)
    ulp = (value.view(torch.int32) + 2**16).view(torch.float32) - value  # to the neighbour away from zero
    ties, around = value + ulp / 2, value + ulp * torch.rand_like(value)
    for wide in (ties, around, torch.nextafter(ties, value), torch.nextafter(ties, value + ulp)):
        assert same_values(narrowed(wide, torch.bfloat16), wide.to(torch.bfloat16))


def test_narrow_keeps_every_bf16_nan_and_inf():
    value = all_bf16()
    assert same_values(narrowed(value.float(), torch.bfloat16), value)
    assert narrowed(value.float(), torch.bfloat16).isnan().sum() == value.isnan().sum() == 254


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # numpy's word for what a GPU does as well
def test_narrow_to_fp16_and_fp32():
    value = torch.cat([torch.randn(4095, device=DEVICE) * 1e3, torch.tensor([1e6], device=DEVICE)])
    assert same_values(narrowed(value, torch.float16), value.half())
    assert same_values(narrowed(value, torch.float32), value)


@triton.jit
def cast_kernel(value_ptr, wide_ptr, back_ptr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    wide = tl.load(value_ptr + i).to(tl.float32)
    tl.store(wide_ptr + i, wide)
    tl.store(back_ptr + i, wide.to(tl.bfloat16))


@on_cpu
def test_canary_what_the_emulation_of_bf16_rests_on():
    """If this fails, the installed Triton's interpreter has changed and tile.py is no longer right in it: `dot` and
    every kernel rely on bf16 -> fp32 being exact, `narrow` on fp32 -> bf16 keeping what bf16 can hold."""
    value = all_bf16()
    wide, back = torch.empty_like(value, dtype=torch.float32), torch.empty_like(value)
    cast_kernel[(16,)](value, wide, back, 4096)
    assert same_values(wide, value.float())
    assert same_values(back, value)


@triton.jit
def sigmoid_kernel(z_ptr, s_ptr, rest_ptr, N: tl.constexpr, dtype: tl.constexpr):
    i = tl.arange(0, N)
    s, rest = sigmoid(tl.load(z_ptr + i), dtype)
    tl.store(s_ptr + i, s)
    tl.store(rest_ptr + i, rest)


def sigmoids(z: torch.Tensor, dtype: tl.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """s and 1 - s, as exact as dtype deserves."""
    s, rest = torch.empty_like(z), torch.empty_like(z)
    sigmoid_kernel[(1,)](z, s, rest, len(z), dtype)
    return s, rest


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's: exp(1e4) is Inf, as it should be
@pytest.mark.parametrize("dtype", [tl.float32, tl.bfloat16, tl.float16], ids=str)
def test_sigmoid(dtype):
    z = torch.tensor([-torch.inf, -1e4, -88, -30, -8, -1e-3, -0.0, 0, 1e-3, 8, 30, 88, 1e4, torch.inf, 0.5, torch.nan])
    z = z.to(DEVICE)
    s, rest = sigmoids(z, dtype)
    finite, truth, true_rest = z.isfinite(), z.double().sigmoid(), (-z.double()).sigmoid()
    # exp2 is off by up to 4 * 2^-24; where nothing corrects it or fuses multiply-adds, exp(z) carries z's own rounding.
    loss = 8 + (0 if DEVICE == "cuda" and dtype == tl.float32 else 2 * z.double().abs())
    bound = lambda t: loss * 2.0**-24 * t + torch.finfo(torch.float32).tiny  # smaller than normal numbers may become 0
    assert ((s.double() - truth).abs() <= bound(truth))[finite].all()
    subtracted = 0 if dtype == tl.float32 else 2.0**-22  # half precision: rest is what is left of 1
    assert ((rest.double() - true_rest).abs() <= bound(true_rest) + subtracted)[finite].all()
    assert (s[0], s[1], s[12], s[13]) == (0, 0, 1, 1) and s[15].isnan()
    assert (rest[0], rest[1], rest[12], rest[13]) == (1, 1, 0, 0) and rest[15].isnan()


@pytest.mark.parametrize("dtype, half_ulp", [(tl.bfloat16, 2.0**-9), (tl.float16, 2.0**-12)], ids=str)
def test_sigmoid_is_exact_enough_for_half_precision(dtype, half_ulp):
    """silu and its derivative, as an epilogue makes them, are off by far less than their rounding."""
    z = torch.linspace(-16, 16, 4096, device=DEVICE)
    s, rest = sigmoids(z, dtype)
    wide, s, rest = z.double(), s.double(), rest.double()
    true_s, true_rest = wide.sigmoid(), (-wide).sigmoid()
    assert ((wide * s - wide * true_s).abs() <= half_ulp / 64 * (wide * true_s).abs()).all()
    derivative, terms = true_s + wide * true_s * true_rest, true_s + (wide * true_s * true_rest).abs()
    assert ((s + wide * s * rest - derivative).abs() <= half_ulp / 64 * terms).all()


@triton.jit
def halves_kernel(tile_ptr, left_ptr, right_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column, half = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :], tl.arange(0, COLUMNS // 2)[None, :]
    left, right = halves(tl.load(tile_ptr + row * COLUMNS + column), ROWS, COLUMNS)
    tl.store(left_ptr + row * (COLUMNS // 2) + half, left)
    tl.store(right_ptr + row * (COLUMNS // 2) + half, right)


@pytest.mark.parametrize("rows, columns", [(16, 32), (32, 2), (4, 64)])
def test_halves(rows, columns):
    tile = torch.arange(rows * columns, dtype=torch.float32, device=DEVICE).view(rows, columns)
    left, right = tile.new_empty(rows, columns // 2), tile.new_empty(rows, columns // 2)
    halves_kernel[(1,)](tile, left, right, rows, columns)
    assert torch.equal(torch.cat([left, right], 1), tile)


@triton.jit
def rows_at_kernel(ptr, out_ptr, stride, N: tl.constexpr):
    r = tl.arange(0, N)
    at = rows_at(ptr, r, stride)
    if at is not None:
        tl.store(out_ptr + r, tl.load(at))
    else:
        tl.store(out_ptr + r, -1.0)


def test_rows_at():
    t, out = torch.arange(24.0, device=DEVICE).view(8, 3), torch.empty(8, device=DEVICE)
    rows_at_kernel[(1,)](t, out, 3, 8)
    assert torch.equal(out, t[:, 0])
    rows_at_kernel[(1,)](None, out, 3, 8)
    assert (out == -1).all()


@triton.jit
def far_rows_kernel(ptr, out_ptr, stride, N: tl.constexpr):
    at = rows_at(ptr, tl.arange(0, N), stride)
    tl.store(out_ptr + tl.arange(0, N), at.to(tl.int64, bitcast=True))


def test_rows_at_counts_in_64_bits():
    """The last row begins 7 * 2^30 elements of 4 bytes behind the first. Nothing is read there."""
    t, out = torch.empty(1, device=DEVICE), torch.empty(8, dtype=torch.int64, device=DEVICE)
    far_rows_kernel[(1,)](t, out, 2**30, 8)
    assert [at - t.data_ptr() for at in out.tolist()] == [r * 2**32 for r in range(8)]


@triton.jit
def route_kernel(
    token_of_row_ptr,
    slot_of_row_ptr,
    topk_weights_ptr,
    route_ptr,  # (N,) written
    weight_ptr,  # (N,) written
    end,
    stride_t,
    stride_k,
    K: tl.constexpr,
    N: tl.constexpr,
):
    r = tl.arange(0, N)
    route = route_of_row(r, r < end, token_of_row_ptr, slot_of_row_ptr, K)
    tl.store(route_ptr + r, route)
    tl.store(weight_ptr + r, weight_of_route(route, r < end, topk_weights_ptr, stride_t, stride_k, K))


@pytest.mark.parametrize(
    "lay_out",
    [lambda w: w, transposed, lambda w: framed(w, gap=2, offset=1)],
    ids=["contiguous", "transposed", "framed in NaN"],
)
def test_the_route_and_the_weight_of_a_row(lay_out):
    """Rows behind the live ones, whose token may be -1 or not there at all, get route 0 and weight 0."""
    K, plan = 3, routing.plan(torch.tensor([[2, 0, 1], [0, -1, 2], [2, 2, -1]], device=DEVICE), 3)
    weights = lay_out(torch.tensor([[1.0, 2, 3], [4, torch.nan, 6], [7, 8, torch.nan]], device=DEVICE))
    route = torch.empty(16, dtype=torch.int64, device=DEVICE)
    weight = torch.empty(16, device=DEVICE)
    route_kernel[(1,)](plan.token_of_row, plan.slot_of_row, weights, route, weight, 7, *weights.stride(), K=K, N=16)
    assert route[:7].tolist() == [1, 3, 2, 0, 5, 6, 7] and not route[7:].any()
    assert weight[:7].tolist() == [2, 4, 3, 1, 6, 7, 8] and not weight[7:].any()
