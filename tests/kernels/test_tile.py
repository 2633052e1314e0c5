"""The tile maths that kernels share, and the interpreter on whose behaviour two of its functions rest."""

import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE, on_cpu
from exact import plan_of, same_values, whole

from mega_moe.kernels.tile import dot, narrow, rows_of_block, sigmoid


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
def sigmoid_kernel(z_ptr, s_ptr, rest_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    s, rest = sigmoid(tl.load(z_ptr + i))
    tl.store(s_ptr + i, s)
    tl.store(rest_ptr + i, rest)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's: exp(1e4) is Inf, as it should be
def test_sigmoid():
    z = torch.tensor([-torch.inf, -1e4, -88, -30, -8, -1e-3, -0.0, 0, 1e-3, 8, 30, 88, 1e4, torch.inf, 0.5, torch.nan])
    z, s, rest = z.to(DEVICE), torch.empty(16, device=DEVICE), torch.empty(16, device=DEVICE)
    sigmoid_kernel[(1,)](z, s, rest, 16)
    finite = z.isfinite()
    # exp2 is off by up to 4 * 2^-24; where nothing fuses a multiply-add (numpy), exp(z) also carries z's own rounding
    loss = 8 + (0 if DEVICE == "cuda" else 2 * z.double().abs())
    for got, truth in ((s, z.double().sigmoid()), (rest, (-z.double()).sigmoid())):
        bound = loss * 2.0**-24 * truth + torch.finfo(torch.float32).tiny  # smaller than normal numbers may become 0
        assert ((got.double() - truth).abs() <= bound)[finite].all()
    assert (s[0], s[1], s[12], s[13]) == (0, 0, 1, 1) and s[15].isnan()
    assert (rest[0], rest[1], rest[12], rest[13]) == (1, 1, 0, 0) and rest[15].isnan()
