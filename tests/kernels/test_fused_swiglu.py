"""SwiGLU in the epilogue of a GEMM, and its backward: exact where silu is relu, at every tail."""

import pytest
import torch
from cases import DEVICE, framed, transposed
from exact import (
    GATE,
    both_dtypes,
    dispatched,
    every_dtype,
    every_need,
    every_routing,
    every_size,
    gate_up_and_act,
    gate_up_weights,
    plan_of,
    pre_of,
    router_weights,
    same_values,
    shuffled_plan,
    swiglu_gradients,
    whole,
)
from torch import Tensor

from mega_moe import routing
from mega_moe.kernels.fused_swiglu import dact_swiglu, gate_up_swiglu, sum_parts
from mega_moe.shapes import Need, Plan

LIMIT = 3 * GATE  # reached by gates alone
nan = torch.nan


def tensor(values: list) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def forward(plan: Plan, H: int, I: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """rows (R, H), NaN where there is no expert, and w_gate_up (E, 2I, H)."""
    rows = dispatched(whole(len(plan.row_of_slot), H, dtype=dtype, most=1), plan)
    return rows, gate_up_weights(len(plan.row_start) - 1, I, H, dtype).flatten(1, 2)


def backward(plan: Plan, H: int, I: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """dy (T, H), w_down (E, H, I), pre (R, 2, I), topk_weights (T, K)."""
    dy = whole(len(plan.row_of_slot), H, dtype=dtype, most=1)
    w = whole(len(plan.row_start) - 1, H, I, dtype=dtype, most=1, seed=1)
    return dy, w, pre_of(plan, I, dtype), router_weights(plan)


def assert_forward(plan: Plan, H: int, I: int, dtype: torch.dtype, limit: float | None = None) -> None:
    rows, w = forward(plan, H, I, dtype)
    results = gate_up_swiglu(rows, w, plan, limit, True, True)
    assert all(map(same_values, results, gate_up_and_act(rows, w, plan, limit)))


def assert_backward(plan: Plan, H: int, I: int, dtype: torch.dtype, limit: float | None = None) -> None:
    dy, w, pre, weights = backward(plan, H, I, dtype)
    results = dact_swiglu(dispatched(dy, plan), w, pre, weights, plan, limit, Need())
    assert all(map(same_values, results, swiglu_gradients(dy, w, pre, weights, plan, limit)))


def test_gate_up_does_its_example(framed_memory):
    pre, act = gate_up_swiglu(
        tensor([[1.0, 2.0]]), tensor([[[1.0, 0.0], [0.0, 1.0]]]), plan_of([1]), None, pre=True, act=True
    )
    assert pre.tolist() == [[[1.0], [2.0]]] and round(act.item(), 4) == 1.4621


def test_dact_does_its_example(framed_memory):
    pre, weights = tensor([[[0.0], [2.0]]]), tensor([[0.5]])
    dpre, weighted_act, dweights = dact_swiglu(
        tensor([[3.0]]), tensor([[[1.0]]]), pre, weights, plan_of([1]), None, Need()
    )
    assert dpre.tolist() == [[[1.5], [0.0]]] and weighted_act.tolist() == [[0.0]] and dweights.tolist() == [[0.0]]


def test_dtopk_weights_does_its_example(framed_memory):
    plan = routing.plan(tensor([[1, -1, 0]]), 2)
    assert plan.row_of_slot.tolist() == [[1, -1, 0]]
    parts = tensor([[1.0, 2.0], [3.0, 4.0], [nan, nan]])
    assert sum_parts(parts, tensor([[1.0, 1.0, 1.0]]), plan).tolist() == [[7.0, 0.0, 3.0]]


@both_dtypes
@every_routing
def test_rows_of_an_expert(rows, masked, dtype, framed_memory):
    plan = shuffled_plan(rows, masked)
    assert_forward(plan, 48, 33, dtype)
    assert_backward(plan, 33, 48, dtype)


@every_size
def test_columns_and_contraction(H, I, dtype, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    assert_forward(plan, H, I, dtype)
    assert_backward(plan, H, I, dtype)


@every_dtype
def test_limit(dtype, framed_memory):
    """At the limit, above and below it: every row has gates of each kind."""
    plan = shuffled_plan([33, 0, 3])
    assert_forward(plan, 32, 70, dtype, LIMIT)
    assert_backward(plan, 32, 70, dtype, LIMIT)


@pytest.mark.parametrize("made", [(True, False), (False, True), (False, False)], ids=["pre", "act", "neither"])
def test_what_nobody_wants_of_forward_is_not_made(made, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    rows, w = forward(plan, 48, 70, torch.bfloat16)
    results = gate_up_swiglu(rows, w, plan, None, *made)
    for got, wanted, expected in zip(results, made, gate_up_and_act(rows, w, plan), strict=True):
        assert same_values(got, expected) if wanted else got is None


@every_need
def test_what_nobody_needs_of_backward_is_not_made(need, framed_memory):
    plan = shuffled_plan([33, 0, 3], masked=3)
    dy, w, pre, weights = backward(plan, 33, 70, torch.bfloat16)
    results = dact_swiglu(dispatched(dy, plan), w, pre, weights, plan, LIMIT, need)
    expected = swiglu_gradients(dy, w, pre, weights, plan, LIMIT)
    for got, made, true in zip(results, (need.dpre, need.dw_down, need.dtopk_weights), expected, strict=True):
        assert same_values(got, true) if made else got is None


@pytest.mark.parametrize(
    "lay_out",
    [transposed, lambda w: framed(w, gap=2, offset=1), lambda w: w[:, :1].expand(-1, 2)],
    ids=["transposed", "framed in NaN", "one slot expanded"],
)
def test_router_weights_of_any_strides(lay_out, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    dy, w, pre, weights = backward(plan, 33, 20, torch.float32)
    weights = lay_out(weights)
    results = dact_swiglu(dispatched(dy, plan), w, pre, weights, plan, None, Need())
    assert all(map(same_values, results, swiglu_gradients(dy, w, pre, weights, plan)))


def test_the_gradient_of_a_router_weight_has_its_dtype(framed_memory):
    plan = shuffled_plan([33, 0, 3])
    dy, w, pre, weights = backward(plan, 33, 70, torch.float32)
    weights = weights.bfloat16()
    _, _, dweights = dact_swiglu(dispatched(dy, plan), w, pre, weights, plan, None, Need())
    assert dweights.dtype == torch.bfloat16
    assert same_values(dweights, swiglu_gradients(dy, w, pre, weights, plan)[2])


def test_weights_with_padded_rows_far_apart(framed_memory):
    """Experts and rows need not follow each other; between them lies NaN, and it is not read."""
    plan = shuffled_plan([17, 0, 40, 1])
    rows, w = forward(plan, 40, 35, torch.float32)
    apart = framed(w, gap=8, offset=8)
    assert all(map(same_values, gate_up_swiglu(rows, apart, plan, None, True, True), gate_up_and_act(rows, w, plan)))
    dy, w, pre, weights = backward(plan, 67, 35, torch.float32)
    results = dact_swiglu(dispatched(dy, plan), framed(w, 5, 8), pre, weights, plan, None, Need())
    assert all(map(same_values, results, swiglu_gradients(dy, w, pre, weights, plan)))


def test_act_is_made_before_pre_is_rounded(framed_memory):
    """192 * 257 is nearest to 49408 in bf16; from an up of 257 that was rounded to 256 it would be 49152."""
    rows, w = tensor([[192.0, 256.0, 1.0]]).bfloat16(), tensor([[[1.0, 0, 0], [0, 1.0, 1.0]]]).bfloat16()
    pre, act = gate_up_swiglu(rows, w, plan_of([1]), None, pre=True, act=True)
    assert pre.tolist() == [[[192.0], [256.0]]] and act.item() == 49408


def test_parts_are_summed_in_the_order_of_the_columns():
    """2^24 + 1 is 2^24 in fp32: the order of a sum shows."""
    plan = plan_of([2])
    parts = tensor([[2.0**24, 1.0, -(2.0**24)], [2.0**24, -(2.0**24), 1.0]])
    assert sum_parts(parts, torch.ones(2, 1, device=DEVICE), plan).tolist() == [[0.0], [1.0]]


def test_nan_stays_with_its_row_and_its_expert(framed_memory):
    plan = plan_of([20, 20, 20])
    rows, w = forward(plan, 24, 40, torch.float32)
    rows[25] = nan
    others = [r for r in range(60) if r != 25]
    for made in gate_up_swiglu(rows, w, plan, None, True, True):
        assert made[25].isnan().all() and made[others].isfinite().all()

    dy, w, pre, weights = backward(plan, 24, 70, torch.float32)
    pre[25, :, 5] = nan
    w[0] = nan
    dpre, weighted_act, dweights = dact_swiglu(dy, w, pre, weights, plan, None, Need())
    assert dpre[:20].isnan().all() and dpre[25].isnan().sum() == 2 and dpre[20:].isnan().sum() == 2
    assert weighted_act[25, 5].isnan() and weighted_act.isnan().sum() == 1
    assert dweights[:20].isnan().all() and dweights[25].isnan() and dweights.isnan().sum() == 21


def test_no_rows():
    plan = routing.plan(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 3)
    rows, weights = torch.empty(0, 16, device=DEVICE), torch.empty(0, 2, device=DEVICE)
    pre, act = gate_up_swiglu(rows, whole(3, 16, 16), plan, None, pre=True, act=True)
    assert pre.shape == (0, 2, 8) and act.shape == (0, 8)
    results = dact_swiglu(rows, whole(3, 16, 8), pre, weights, plan, None, Need())
    assert [t.shape for t in results] == [(0, 2, 8), (0, 8), (0, 2)]
