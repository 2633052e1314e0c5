"""The grouped products, at every tail: rows of an expert, columns, and the contraction just around a tile.

Operands are small whole numbers, so the right result is known to the bit.
"""

import pytest
import torch
from cases import DEVICE, framed, transposed
from exact import grad, plan_of, product, same_values, whole

from mega_moe.kernels.grouped_gemm import grouped_gemm, weight_grad

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TAILS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129]
ROUTINGS = {
    "tails": [*TAILS, 0],
    "tails with empty experts between": [n for tail in TAILS[:9] for n in (tail, 0)],
    "counts that are no multiples of a tile": [128, 130, 65],
    "an empty expert in the middle": [1, 0, 1],
    "whole tiles": [64, 64],
    "one expert": [50],
    "one row": [1],
    "the last expert has all": [0, 0, 0, 40],
    "no rows": [0, 0, 0],
}
nan = torch.nan


def test_grouped_gemm_does_its_example(framed_memory):
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE)
    w = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], device=DEVICE)
    plan = plan_of([1, 1])
    assert plan.row_start.tolist() == [0, 1, 2]
    assert grouped_gemm(a, w, plan).tolist() == [[1.0], [4.0]]


def test_weight_grad_does_its_example(framed_memory):
    a = torch.tensor([[1.0], [2.0]], device=DEVICE)
    b = torch.tensor([[3.0, 4.0], [5.0, 6.0]], device=DEVICE)
    plan = plan_of([2, 0])
    assert plan.row_start.tolist() == [0, 2, 2]
    assert weight_grad(a, b, plan).tolist() == [[[13.0, 16.0]], [[0.0, 0.0]]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROUTINGS.values(), ids=list(ROUTINGS))
def test_rows_of_an_expert(rows, dtype, framed_memory):
    plan = plan_of(rows, masked=5)
    a, b = whole(sum(rows) + 5, 48, dtype=dtype), whole(sum(rows) + 5, 33, dtype=dtype, seed=1)
    w = whole(len(rows), 33, 48, dtype=dtype, seed=2)
    a[plan.row_start[-1] :] = b[plan.row_start[-1] :] = nan  # rows of masked routes
    assert same_values(grouped_gemm(a, w, plan), product(a, w, plan))
    assert same_values(weight_grad(a, b, plan), grad(a, b, plan))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "C, N", [(1, 1), (7, 9), (16, 130), (17, 64), (63, 65), (64, 63), (65, 127), (100, 33), (130, 1)]
)
def test_columns_and_contraction(C, N, dtype, framed_memory):
    plan = plan_of([33, 0, 3])
    a, b = whole(36, C, dtype=dtype), whole(36, N, dtype=dtype, seed=1)
    w = whole(3, N, C, dtype=dtype, seed=2)
    assert same_values(grouped_gemm(a, w, plan), product(a, w, plan))
    assert same_values(grouped_gemm(a, transposed(w), plan), product(a, w, plan))
    assert same_values(weight_grad(a, b, plan), grad(a, b, plan))


@pytest.mark.parametrize("C, N", [(40, 72), (67, 35)])
def test_nothing_behind_an_operand_is_read(C, N, framed_memory):
    """Operands lie in NaN: before them, behind them and, for weights, between their rows."""
    plan = plan_of([17, 0, 40, 1])
    in_nan = lambda t: framed(t.reshape(1, -1), gap=5000, offset=5000).view(t.shape)
    a, b, w = whole(58, C), whole(58, N, seed=1), whole(4, N, C, seed=2)
    expected, expected_grad = product(a, w, plan), grad(a, b, plan)
    for laid_out in (in_nan(w), in_nan(w.mT.contiguous()).mT, framed(w, 8, 8), framed(w.mT, 8, 8).mT):
        assert same_values(grouped_gemm(in_nan(a), laid_out, plan), expected)
    assert same_values(weight_grad(in_nan(a), in_nan(b), plan), expected_grad)


def test_experts_far_apart(framed_memory):
    """Experts' matrices need not follow each other in memory: here they come last to first, with gaps."""
    plan = plan_of([5, 9, 2])
    a, w = whole(16, 24), whole(3, 40, 24, seed=1)
    memory = torch.full((6, 40, 24), nan, device=DEVICE)
    memory[::2] = w
    assert same_values(grouped_gemm(a, memory[::2], plan), product(a, w, plan))
    same = w[:1].expand(3, -1, -1)  # one matrix for all experts, stride zero
    assert same_values(grouped_gemm(a, same, plan), product(a, same, plan))


def test_nan_stays_with_its_row_and_its_expert(framed_memory):
    plan = plan_of([20, 20, 20])
    a, b, w = whole(60, 24), whole(60, 40, seed=1), whole(3, 40, 24, seed=2)
    a[25] = nan
    out, dw = grouped_gemm(a, w, plan), weight_grad(a, b, plan)
    assert out[25].isnan().all() and out[[r for r in range(60) if r != 25]].isfinite().all()
    assert dw[1].isnan().all() and dw[[0, 2]].isfinite().all()
    w[0] = nan
    assert grouped_gemm(a, w, plan)[40:].isfinite().all()


def test_sums_are_kept_in_fp32():
    """bf16 holds no whole number between 256 and 258: a running sum in bf16 would stop at 256."""
    plan = plan_of([600])
    ones = torch.ones(600, 600, dtype=torch.bfloat16, device=DEVICE)
    assert (grouped_gemm(ones, ones[None, :8], plan) == 600).all()
    assert (weight_grad(ones[:, :8].contiguous(), ones[:, :8].contiguous(), plan) == 600).all()


def test_results_are_rounded_to_nearest_even():
    """257 lies between 256 and 258, 259 between 258 and 260: ties to even, down and up."""
    plan = plan_of([1])
    a = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16, device=DEVICE)
    w = torch.tensor([[[1.0, 1.0], [1.0, 3.0]]], dtype=torch.bfloat16, device=DEVICE)
    assert grouped_gemm(a, w, plan).tolist() == [[256.0, 260.0]]


def test_fp32_is_ieee():
    """TF32 would keep 10 bits of each operand's mantissa."""
    plan = plan_of([1])
    a = torch.full((1, 1), 1 + 2.0**-20, device=DEVICE)
    one = torch.ones(1, 1, device=DEVICE)
    assert grouped_gemm(a, one[None], plan).item() == weight_grad(a, one, plan).item() == 1 + 2.0**-20


def test_no_rows_at_all():
    plan = plan_of([0, 0])
    empty = torch.empty(0, 8, device=DEVICE)
    assert grouped_gemm(empty, whole(2, 16, 8), plan).shape == (0, 16)
    assert torch.equal(
        weight_grad(empty, torch.empty(0, 16, device=DEVICE), plan), torch.zeros(2, 8, 16, device=DEVICE)
    )
