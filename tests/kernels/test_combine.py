"""combine and dispatch's backward, from rows or from slots: sums in fp32, in slot order, rounded once.

A masked slot is selected away, whatever memory holds.
"""

import pytest
import torch
from cases import DEVICE, framed, transposed
from exact import same_values, whole

from mega_moe.kernels.combine import combine, dispatch_backward, sum_slots
from mega_moe.routing import plan

nan = torch.nan
SIZES = [(1, 1, 1, 1), (65, 63, 2, 3), (33, 130, 3, 5), (64, 64, 6, 4), (9, 65, 10, 96)]  # T, H, K, E


def ids_of(T: int, K: int, E: int) -> torch.Tensor:
    """Random ids, a sixth of them masked, and one token with none left."""
    ids = torch.randint(E, (T, K), device=DEVICE)
    ids.flatten()[::6] = -1
    ids[-1] = -1
    return ids


def slots(rows: torch.Tensor, made) -> torch.Tensor:
    """(T, K, H) in float64: each slot's row; zeros where it is masked, whatever memory holds."""
    live = (made.row_of_slot >= 0)[..., None]
    return torch.where(live, rows.double()[made.row_of_slot], 0.0)


def test_combine_does_its_example(framed_memory):
    out = torch.tensor([[1.0], [2.0], [nan], [nan]], device=DEVICE)
    made = plan(torch.tensor([[1, 0], [-1, -1]], device=DEVICE), 2)
    assert made.row_of_slot.tolist() == [[1, 0], [-1, -1]]
    weights = torch.tensor([[0.5, 3.0], [7.0, nan]], device=DEVICE)
    assert combine(out, weights, made).tolist() == [[4.0], [0.0]]


def test_dispatch_backward_does_its_example(framed_memory):
    # The docstring lets two slots share row 0, which no plan does; the kernel only reads row_of_slot.
    made = plan(torch.tensor([[1, 0], [-1, 0]], device=DEVICE), 2)
    made = made._replace(row_of_slot=torch.tensor([[1, 0], [-1, 0]], dtype=torch.int32, device=DEVICE))
    assert dispatch_backward(torch.tensor([[1.0], [2.0]], device=DEVICE), made).tolist() == [[3.0], [1.0]]


def test_sum_slots_does_its_example(framed_memory):
    made = plan(torch.tensor([[1, 0], [1, -1]], device=DEVICE), 2)
    assert made.row_of_slot.tolist() == [[1, 0], [2, -1]]
    by_slot = torch.tensor([[[1.0], [2.0]], [[3.0], [nan]]], device=DEVICE)
    weights = torch.tensor([[0.5, 3.0], [7.0, nan]], device=DEVICE)
    assert sum_slots(by_slot, weights, made).tolist() == [[6.5], [21.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T, H, K, E", SIZES)
def test_sum_slots(T, H, K, E, dtype, framed_memory):
    """With weights and without; masked slots hold NaN, and so do their weights."""
    made = plan(ids_of(T, K, E), E)
    live = made.row_of_slot >= 0
    by_slot, weights = whole(T, K, H, dtype=dtype, most=100), whole(T, K, seed=1) / 8
    unweighted = torch.where(live[..., None], by_slot.double(), 0.0)
    weighted = weights.double()[..., None] * unweighted
    by_slot[~live], weights[~live] = nan, nan
    assert same_values(sum_slots(by_slot, weights, made), weighted.sum(1).to(dtype))
    assert same_values(sum_slots(by_slot, None, made), unweighted.sum(1).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T, H, K, E", SIZES)
def test_combine(T, H, K, E, dtype, framed_memory):
    made = plan(ids_of(T, K, E), E)
    out = whole(T * K, H, dtype=dtype, most=100)
    out[made.row_start[-1] :] = nan  # rows without an expert
    weights = whole(T, K, seed=1) / 8
    expected = (weights.double()[..., None] * slots(out, made)).sum(1).to(dtype)
    weights[made.row_of_slot < 0] = nan
    assert same_values(combine(out, weights, made), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T, H, K, E", SIZES)
def test_dispatch_backward(T, H, K, E, dtype, framed_memory):
    made = plan(ids_of(T, K, E), E)
    drows = whole(T * K, H, dtype=dtype, most=100)
    drows[made.row_start[-1] :] = nan
    assert same_values(dispatch_backward(drows, made), slots(drows, made).sum(1).to(dtype))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_eight_slots_are_rounded_once(weights_dtype):
    """A running sum in bf16 would be off by several roundings (0.070 against 0.031, in a public report)."""
    torch.manual_seed(0)
    made = plan(torch.stack([torch.randperm(8) for _ in range(32)]).to(DEVICE), 8)
    out = torch.randn(256, 64, device=DEVICE).bfloat16()
    weights = torch.full((32, 8), 0.125, dtype=weights_dtype, device=DEVICE)
    exact = 0.125 * slots(out, made).sum(1)
    y = combine(out, weights, made).double()
    half_ulp = torch.exp2(exact.abs().log2().floor() - 8)
    assert ((y - exact).abs() <= half_ulp * 1.001).all()
    assert same_values(sum_slots(slots(out, made).bfloat16(), weights, made), y.bfloat16())


@pytest.mark.parametrize("ids, expected", [([0, 1, 2], 0.0), ([0, 2, 1], 1.0)])
def test_slots_are_summed_in_order(ids, expected):
    """2^24 + 1 is 2^24 in fp32: the order of a sum shows."""
    rows = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]], device=DEVICE)
    made = plan(torch.tensor([ids, [-1, -1, -1]], device=DEVICE), 3)
    ones, by_slot = torch.ones(2, 3, device=DEVICE), slots(rows, made).float()
    for sums in (
        combine(rows, ones, made),
        dispatch_backward(rows, made),
        sum_slots(by_slot, ones, made),
        sum_slots(by_slot, None, made),
    ):
        assert sums.tolist() == [[expected], [0.0]]


@pytest.mark.parametrize(
    "lay_out",
    [
        transposed,
        lambda w: framed(w, gap=2, offset=1),
        lambda w: w[:, :1].expand(-1, 3),
        lambda w: w[0, 0].expand(20, 3),
    ],
    ids=["transposed", "framed in NaN", "one slot expanded", "one number"],
)
def test_weights_of_any_strides(lay_out):
    weights = lay_out(torch.randn(20, 3, device=DEVICE))
    made = plan(ids_of(20, 3, 4), 4)
    out = torch.randn(60, 8, device=DEVICE)
    expected = combine(out, weights.contiguous(), made)
    assert same_values(combine(out, weights, made), expected)
    assert same_values(sum_slots(slots(out, made).float(), weights, made), expected)


def test_nan_stays_in_its_token():
    made = plan(torch.tensor([[0, 1], [1, 0], [0, -1]], device=DEVICE), 2)
    out = torch.ones(6, 4, device=DEVICE)
    out[made.row_of_slot[1, 0]] = nan
    by_slot, ones = slots(out, made).float(), torch.ones(3, 2, device=DEVICE)
    for y in (combine(out, ones, made), sum_slots(by_slot, ones, made), sum_slots(by_slot, None, made)):
        assert y[1].isnan().all() and y[[0, 2]].isfinite().all()


def test_an_infinite_row_of_weight_zero_is_nan_as_in_the_reference():
    made = plan(torch.tensor([[0, 1]], device=DEVICE), 2)
    out = torch.tensor([[torch.inf], [1.0]], device=DEVICE)
    weights = torch.tensor([[0.0, 1.0]], device=DEVICE)
    assert combine(out, weights, made).isnan().all()
    assert sum_slots(out[made.row_of_slot], weights, made).isnan().all()


def test_no_tokens():
    made = plan(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 3)
    rows = torch.empty(0, 8, device=DEVICE)
    assert combine(rows, torch.empty(0, 2, device=DEVICE), made).shape == (0, 8)
    assert dispatch_backward(rows, made).shape == (0, 8)
    assert sum_slots(rows.view(0, 2, 8), None, made).shape == (0, 8)
