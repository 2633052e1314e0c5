"""GEMMs that gather tokens and store by slot: exact where silu is relu, at every tail, from tokens of any strides."""

import pytest
import torch
from cases import DEVICE, framed, transposed
from exact import (
    GATE,
    both_dtypes,
    by_slot,
    dispatched,
    every_dtype,
    every_need,
    every_routing,
    every_size,
    gate_up_and_act,
    gate_up_weights,
    grad,
    plan_of,
    pre_of,
    product,
    router_weights,
    same_values,
    shuffled_plan,
    swiglu_gradients,
    whole,
)
from torch import Tensor

from mega_moe import routing
from mega_moe.kernels.gathered import gathered_dact, gathered_gate_up, gathered_weight_grad, slot_gemm
from mega_moe.shapes import Need, Plan

LIMIT = 3 * GATE  # reached by gates alone
nan = torch.nan

STRIDES = {
    "transposed": transposed,
    "framed in NaN": lambda t: framed(t, gap=3, offset=1),
    "one column expanded": lambda t: t[:, :1].expand(-1, t.shape[1]),
    "one token expanded": lambda t: t[:1].expand(len(t), -1),
    "one number": lambda t: t[0, 0].expand(t.shape),
}
any_strides = pytest.mark.parametrize("lay_out", STRIDES.values(), ids=list(STRIDES))


def tensor(values: list) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def forward(plan: Plan, H: int, I: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (T, H) and w_gate_up (E, 2I, H)."""
    x = whole(len(plan.row_of_slot), H, dtype=dtype, most=1)
    return x, gate_up_weights(len(plan.row_start) - 1, I, H, dtype).flatten(1, 2)


def backward(plan: Plan, H: int, I: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """dy (T, H), w_down (E, H, I), pre (R, 2, I), topk_weights (T, K)."""
    dy = whole(len(plan.row_of_slot), H, dtype=dtype, most=1)
    w = whole(len(plan.row_start) - 1, H, I, dtype=dtype, most=1, seed=1)
    return dy, w, pre_of(plan, I, dtype), router_weights(plan)


def assert_forward(x: Tensor, w: Tensor, plan: Plan, limit: float | None = None) -> None:
    results = gathered_gate_up(x, w, plan, limit, True, True)
    assert all(map(same_values, results, gate_up_and_act(dispatched(x, plan), w, plan, limit)))


def assert_slots(plan: Plan, C: int, N: int, dtype: torch.dtype) -> None:
    """Both ways in which a weight may lie; NaN in rows without an expert."""
    a, w = whole(len(plan.token_of_row), C, dtype=dtype), whole(len(plan.row_start) - 1, N, C, dtype=dtype, seed=1)
    a[plan.row_start[-1] :] = nan
    expected = by_slot(product(a, w, plan), plan)
    assert same_values(slot_gemm(a, w, plan), expected)
    assert same_values(slot_gemm(a, transposed(w), plan), expected)


def assert_backward(
    dy: Tensor, w: Tensor, pre: Tensor, weights: Tensor, plan: Plan, limit: float | None = None
) -> None:
    results = gathered_dact(dy, w, pre, weights, plan, limit, Need())
    assert all(map(same_values, results, swiglu_gradients(dy, w, pre, weights, plan, limit)))


def assert_weight_grad(tokens: Tensor, M: int, plan: Plan) -> None:
    """As an ordinary tensor and as the transpose of one; NaN in rows without an expert."""
    a, E, N = whole(len(plan.token_of_row), M, dtype=tokens.dtype, seed=6), len(plan.row_start) - 1, tokens.shape[1]
    a[plan.row_start[-1] :] = nan
    expected = grad(a, dispatched(tokens, plan), plan)
    for dw in (a.new_full((E, M, N), nan), a.new_full((E, N, M), nan).mT):
        assert gathered_weight_grad(a, tokens, plan, dw) is dw
        assert same_values(dw, expected)


def test_gate_up_does_its_example(framed_memory):
    x, w = tensor([[9.0, 9.0], [1.0, 2.0]]), tensor([[[1.0, 0.0], [0.0, 1.0]]])
    plan = routing.plan(tensor([[-1], [0]]), 1)
    assert plan.token_of_row.tolist() == [1, -1]
    pre, act = gathered_gate_up(x, w, plan, None, pre=True, act=True)
    assert pre[0].tolist() == [[1.0], [2.0]] and round(act[0].item(), 4) == 1.4621


def test_slot_gemm_does_its_example(framed_memory):
    plan = routing.plan(tensor([[0, 0]]), 1)
    plan = plan._replace(slot_of_row=plan.slot_of_row.flip(0), row_of_slot=plan.row_of_slot.flip(1))
    slots = slot_gemm(tensor([[1.0, 2.0], [3.0, 4.0]]), tensor([[[1.0, 0.0]]]), plan)
    assert slots.tolist() == [[[3.0], [1.0]]]


def test_dact_does_its_example(framed_memory):
    plan, weights = routing.plan(tensor([[-1], [0]]), 1), tensor([[nan], [0.5]])
    pre = tensor([[[0.0], [2.0]], [[nan], [nan]]])
    dpre, weighted_act, dweights = gathered_dact(
        tensor([[9.0], [3.0]]), tensor([[[1.0]]]), pre, weights, plan, None, Need()
    )
    assert dpre[0].tolist() == [[1.5], [0.0]] and weighted_act[0].tolist() == [0.0]
    assert dweights.tolist() == [[0.0], [0.0]]


def test_weight_grad_does_its_example(framed_memory):
    plan = plan_of([2, 0])._replace(token_of_row=tensor([1, 0]).int())
    tokens, dw = tensor([[5.0, 6.0], [3.0, 4.0]]), torch.full((2, 1, 2), nan, device=DEVICE)
    gathered_weight_grad(tensor([[1.0], [2.0]]), tokens, plan, dw)
    assert dw.tolist() == [[[13.0, 16.0]], [[0.0, 0.0]]]


@both_dtypes
@every_routing
def test_rows_of_an_expert(rows, masked, dtype, framed_memory):
    plan = shuffled_plan(rows, masked)
    assert_forward(*forward(plan, 48, 33, dtype), plan)
    assert_slots(plan, 48, 33, dtype)
    assert_backward(*backward(plan, 33, 48, dtype), plan)
    assert_weight_grad(whole(len(plan.row_of_slot), 33, dtype=dtype), 48, plan)


@every_size
def test_columns_and_contraction(H, I, dtype, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    assert_forward(*forward(plan, H, I, dtype), plan)
    assert_slots(plan, H, I, dtype)
    assert_backward(*backward(plan, H, I, dtype), plan)
    assert_weight_grad(whole(len(plan.row_of_slot), H, dtype=dtype), I, plan)


@every_dtype
def test_limit(dtype, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    assert_forward(*forward(plan, 32, 70, dtype), plan, LIMIT)
    assert_backward(*backward(plan, 32, 70, dtype), plan, limit=LIMIT)


@pytest.mark.parametrize("K", [1, 3, 8])
def test_other_numbers_of_slots(K, framed_memory):
    """With masked routes in every token, and fewer routes than a block has rows."""
    plan = shuffled_plan([5, 0, 9, 2], masked=2 * K, K=K)
    assert_forward(*forward(plan, 24, 20, torch.bfloat16), plan)
    assert_slots(plan, 24, 20, torch.bfloat16)
    assert_backward(*backward(plan, 24, 20, torch.bfloat16), plan)
    assert_weight_grad(whole(len(plan.row_of_slot), 24), 20, plan)


@any_strides
def test_tokens_of_any_strides(lay_out, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    x, w = forward(plan, 40, 20, torch.float32)
    assert_forward(lay_out(x), w, plan)
    dy, *rest = backward(plan, 40, 20, torch.float32)
    assert_backward(lay_out(dy), *rest, plan)
    assert_weight_grad(lay_out(x), 20, plan)


@any_strides
def test_router_weights_of_any_strides(lay_out, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    dy, w, pre, weights = backward(plan, 33, 20, torch.float32)
    assert_backward(dy, w, pre, lay_out(weights.nan_to_num(0.25)), plan)


@pytest.mark.parametrize("made", [(True, False), (False, True), (False, False)], ids=["pre", "act", "neither"])
def test_what_nobody_wants_of_forward_is_not_made(made, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    x, w = forward(plan, 48, 70, torch.bfloat16)
    results = gathered_gate_up(x, w, plan, None, *made)
    expected = gate_up_and_act(dispatched(x, plan), w, plan)
    for got, wanted, true in zip(results, made, expected, strict=True):
        assert same_values(got, true) if wanted else got is None


@every_need
def test_what_nobody_needs_of_backward_is_not_made(need, framed_memory):
    plan = shuffled_plan([33, 0, 3], masked=3)
    layer = backward(plan, 33, 70, torch.bfloat16)
    results = gathered_dact(*layer, plan, LIMIT, need)
    expected = swiglu_gradients(*layer, plan, LIMIT)
    for got, made, true in zip(results, (need.dpre, need.dw_down, need.dtopk_weights), expected, strict=True):
        assert same_values(got, true) if made else got is None


def test_the_gradient_of_a_router_weight_has_its_dtype(framed_memory):
    plan = shuffled_plan([33, 0, 3])
    dy, w, pre, weights = backward(plan, 33, 70, torch.float32)
    assert_backward(dy, w, pre, weights.bfloat16(), plan)


def test_weights_with_padded_rows_far_apart(framed_memory):
    """Experts and rows need not follow each other; between them lies NaN, and it is not read."""
    plan = shuffled_plan([17, 0, 40, 1])
    x, w = forward(plan, 40, 35, torch.float32)
    assert_forward(x, framed(w, gap=8, offset=8), plan)
    a, w = whole(58, 35), whole(4, 40, 35, seed=1)
    for apart in (framed(w, 5, 8), framed(w.mT, 8, 8).mT):
        assert same_values(slot_gemm(a, apart, plan), by_slot(product(a, w, plan), plan))
    dy, w, pre, weights = backward(plan, 67, 35, torch.float32)
    assert_backward(dy, framed(w, 5, 8), pre, weights, plan)


def test_weight_gradients_of_any_strides_are_written_and_nothing_else():
    """Between the rows of a framed dw lies NaN, which stays."""
    plan, tokens, a = shuffled_plan([17, 0, 40, 1]), whole(29, 35), whole(58, 20, seed=1)
    memory = torch.full((4, 22, 40), nan, device=DEVICE)
    gathered_weight_grad(a, tokens, plan, memory[:, 1:21, 2:37])
    assert same_values(memory[:, 1:21, 2:37].contiguous(), grad(a, dispatched(tokens, plan), plan))
    assert memory.isnan().sum() == memory.numel() - 4 * 20 * 35


def test_act_is_made_before_pre_is_rounded(framed_memory):
    """192 * 257 is nearest to 49408 in bf16; from an up of 257 that was rounded to 256 it would be 49152."""
    x, w = tensor([[192.0, 256.0, 1.0]]).bfloat16(), tensor([[[1.0, 0, 0], [0, 1.0, 1.0]]]).bfloat16()
    pre, act = gathered_gate_up(x, w, plan_of([1]), None, pre=True, act=True)
    assert pre.tolist() == [[[192.0], [256.0]]] and act.item() == 49408


def test_sums_are_kept_in_fp32():
    """bf16 holds no whole number between 256 and 258: a running sum in bf16 would stop at 256."""
    plan, ones = plan_of([600]), torch.ones(600, 600, dtype=torch.bfloat16, device=DEVICE)
    assert (slot_gemm(ones, ones[None, :8], plan) == 600).all()
    dw = torch.empty(1, 8, 8, dtype=torch.bfloat16, device=DEVICE)
    assert (gathered_weight_grad(ones[:, :8].contiguous(), ones[:, :8], plan, dw) == 600).all()


def test_nan_stays_with_its_token_and_its_expert(framed_memory):
    """Behind an expert's last row a tile repeats that row's token: here it is NaN."""
    plan = plan_of([20, 20, 20])
    others = [r for r in range(60) if r != 39]
    x, w = forward(plan, 24, 40, torch.float32)
    x[39] = nan
    for made in gathered_gate_up(x, w, plan, None, True, True):
        assert made[39].isnan().all() and made[others].isfinite().all()
    dw = gathered_weight_grad(whole(60, 16), x, plan, torch.empty(3, 16, 24, device=DEVICE))
    assert dw[1].isnan().all() and dw[[0, 2]].isfinite().all()
    slots = slot_gemm(x, whole(3, 16, 24), plan)
    assert slots[39].isnan().all() and slots[others].isfinite().all()

    dy, w, pre, weights = backward(plan, 24, 70, torch.float32)
    dy[39] = nan
    dpre, weighted_act, dweights = gathered_dact(dy, w, pre, weights, plan, None, Need())
    assert dpre[39].isnan().all() and dpre[others].isfinite().all() and weighted_act.isfinite().all()
    assert dweights[39].isnan() and dweights[others].isfinite().all()


def test_no_rows():
    plan = routing.plan(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 3)
    x, weights = torch.empty(0, 16, device=DEVICE), torch.empty(0, 2, device=DEVICE)
    pre, act = gathered_gate_up(x, whole(3, 16, 16), plan, None, pre=True, act=True)
    assert pre.shape == (0, 2, 8) and act.shape == (0, 8)
    assert slot_gemm(act, whole(3, 16, 8), plan).shape == (0, 2, 16)
    results = gathered_dact(x, whole(3, 16, 8), pre, weights, plan, None, Need())
    assert [t.shape for t in results] == [(0, 2, 8), (0, 8), (0, 2)]
    dw = torch.full((3, 8, 16), nan, device=DEVICE)
    assert not gathered_weight_grad(act, x, plan, dw).any()
