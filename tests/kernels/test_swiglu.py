"""swiglu and its backward against float64, where the sigmoid is flat, steep, or at the end of fp32's range."""

from itertools import product

import pytest
import torch
from cases import DEVICE, framed, transposed
from exact import same_values, swiglu_in_float64
from torch import Tensor

from mega_moe.kernels.swiglu import swiglu, swiglu_backward
from mega_moe.routing import plan as plan_of
from mega_moe.shapes import Need, Plan

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's: exp(1e4) is Inf, rightly

DTYPES = [torch.float32, torch.bfloat16]
GATES = [-1e4, -88.0, -30.0, -8.0, -1e-3, 0.0, 1e-3, 8.0, 30.0, 88.0, 1e4]
LIMIT = 7.0
AT_THE_LIMIT = [-1e4, -8.0, -7.0, -6.9, 0.0, 6.9, 7.0, 8.0, 1e4]
SIZES = [(1, 1), (3, 63), (65, 64), (130, 65), (64, 130)]  # R, I
nan = torch.nan
tiny = torch.finfo(torch.float32).tiny


def one_row(gate: list[float], up: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """pre (1, 2, I) with these values."""
    return torch.tensor([[gate, up]], device=DEVICE).to(dtype)


def layer(R: int, I: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Plan]:
    """dact, pre, topk_weights and a plan of R routes, two a token as far as they go, a fifth of them masked. Rows of
    masked routes hold NaN."""
    K = 2 if R % 2 == 0 else 1
    ids = torch.randint(3, (R // K, K), device=DEVICE)
    ids.flatten()[1::5] = -1
    plan = plan_of(ids, 3)
    dact, pre = torch.randn(R, I, device=DEVICE).to(dtype), 3 * torch.randn(R, 2, I, device=DEVICE).to(dtype)
    dact[plan.row_start[-1] :] = nan
    pre[plan.row_start[-1] :] = nan
    return dact, pre, torch.rand(R // K, K, device=DEVICE), plan


def bounds(dact: Tensor, pre: Tensor, topk_weights: Tensor, plan: Plan, limit: float | None) -> dict[str, Tensor]:
    """What fp32 may cost: a few roundings (2^-24 each) of the largest term, and |gate| more of them in exp(-gate),
    whose argument was rounded. What is below fp32's normal numbers may be lost."""
    row = plan.row_of_slot.flatten()
    weight = torch.zeros(len(pre), dtype=torch.float64, device=DEVICE)
    weight[row[row >= 0].long()] = topk_weights.double().flatten()[row >= 0].abs()
    d = dact.double().abs()
    gate, up = pre.double().unbind(1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    s, up = gate.sigmoid(), up.abs()
    roundings = (8 + gate.abs().clamp(max=100)) * 2.0**-23
    gate = gate.abs()
    act = roundings * gate * s * up + tiny * gate * (up + 1)
    dgate = roundings * up * (s + gate * s * (1 - s)) + tiny * (up + 1) * (1 + gate)
    dup = roundings * gate * s + tiny * (1 + gate)
    w = weight[:, None]
    dweight = (d * act).sum(1) + (d * gate * s * up).sum(1) * 2.0**-20  # the sum rounds too
    dtopk_weights = torch.zeros(len(row), dtype=torch.float64, device=DEVICE)
    dtopk_weights[row >= 0] = dweight[row[row >= 0].long()]
    return dict(
        act=act,
        dpre=torch.stack([w * d * dgate, w * d * dup], 1),
        weighted_act=w * act,
        dtopk_weights=dtopk_weights.view_as(topk_weights),
    )


def assert_near(got: Tensor, true: Tensor, bound: Tensor) -> None:
    """Within the bound of fp32 and one rounding to got's dtype; NaN, Inf and zeros where the truth has them."""
    dtype = torch.finfo(got.dtype)
    error = (got.double() - true).abs()
    assert torch.equal(got.isnan(), true.isnan())
    allowed = bound + dtype.eps / 2 * (true.abs() + bound).clamp(min=dtype.smallest_normal)
    assert torch.all((error <= allowed) | true.isnan()), (error / allowed).nan_to_num().max()


def assert_true(dact: Tensor, pre: Tensor, topk_weights: Tensor, plan: Plan, limit: float | None = None) -> None:
    """All four results of the two kernels are near float64's."""
    true, bound = (of(dact, pre, topk_weights, plan, limit) for of in (swiglu_in_float64, bounds))
    assert_near(swiglu(pre, plan, limit), true["act"], bound["act"])
    results = swiglu_backward(dact, pre, topk_weights, plan, limit, Need())
    for name, got in zip(("dpre", "weighted_act", "dtopk_weights"), results, strict=True):
        assert_near(got, true[name], bound[name])


def test_forward_does_its_example(framed_memory):
    act = swiglu(one_row([0.0, 1.0], [2.0, 3.0]), plan_of(torch.tensor([[0]], device=DEVICE), 1), None)
    assert act[0, 0] == 0 and round(act[0, 1].item(), 4) == 2.1932


def test_backward_does_its_example(framed_memory):
    dact, weights = torch.tensor([[3.0]], device=DEVICE), torch.tensor([[0.5]], device=DEVICE)
    plan = plan_of(torch.tensor([[0]], device=DEVICE), 1)
    dpre, weighted_act, dweights = swiglu_backward(dact, one_row([0.0], [2.0]), weights, plan, None, Need())
    assert dpre.tolist() == [[[1.5], [0.0]]]
    assert weighted_act.tolist() == [[0.0]] and dweights.tolist() == [[0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_gates_and_ups_of_every_size(dtype, limit, framed_memory):
    gate, up = zip(*product(GATES, [1.0, 1e3, -1.0]))
    pre = one_row([*gate], [*up], dtype)
    plan = plan_of(torch.tensor([[0]], device=DEVICE), 1)
    assert_true(torch.full_like(pre[:, 0], -0.75), pre, torch.full((1, 1), 0.3, device=DEVICE), plan, limit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamps_and_their_gradients_are_those_of_torch(dtype, framed_memory):
    """At the limit itself the gradient passes; beyond it is exactly zero."""
    gate, up = zip(*product(AT_THE_LIMIT, AT_THE_LIMIT))
    pre = one_row([*gate], [*up], dtype)
    plan = plan_of(torch.tensor([[0]], device=DEVICE), 1)
    dact, weights = torch.ones_like(pre[:, 0]), torch.ones(1, 1, device=DEVICE)
    assert_true(dact, pre, weights, plan, LIMIT)
    dpre, _, _ = swiglu_backward(dact, pre, weights, plan, LIMIT, Need())
    assert (dpre[:, 0][pre[:, 0] > LIMIT] == 0).all()
    assert (dpre[:, 1][pre[:, 1].abs() > LIMIT] == 0).all()
    assert (dpre[:, 1][(pre[:, 1].abs() == LIMIT) & (pre[:, 0] > 0)] != 0).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("R, I", SIZES)
def test_rows_and_columns_that_fill_no_block(R, I, dtype, framed_memory):
    assert_true(*layer(R, I, dtype))


@pytest.mark.parametrize("needed", list(product([True, False], repeat=4))[:-1], ids=str)
def test_what_nobody_needs_is_not_made_and_the_rest_is_the_same(needed, framed_memory):
    dact, pre, weights, plan = layer(30, 70, torch.float32)
    everything = swiglu_backward(dact, pre, weights, plan, LIMIT, Need())
    need = Need(*needed)
    results = swiglu_backward(dact if need.dact else None, pre, weights, plan, LIMIT, need)
    for got, whole, made in zip(results, everything, (need.dpre, need.dw_down, need.dtopk_weights), strict=True):
        assert (got is not None) == made
        assert got is None or same_values(got, whole)


@pytest.mark.parametrize(
    "lay_out",
    [transposed, lambda w: framed(w, gap=2, offset=1), lambda w: w[:, :1].expand(-1, 2)],
    ids=["transposed", "framed in NaN", "one slot expanded"],
)
def test_weights_of_any_strides(lay_out, framed_memory):
    dact, pre, weights, plan = layer(30, 20, torch.float32)
    weights = lay_out(weights)
    laid_out = swiglu_backward(dact, pre, weights, plan, None, Need())
    assert all(map(same_values, laid_out, swiglu_backward(dact, pre, weights.contiguous(), plan, None, Need())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_weight_has_its_dtype(dtype, framed_memory):
    dact, pre, weights, plan = layer(20, 70, torch.bfloat16)
    weights = weights.to(dtype)
    _, _, dweights = swiglu_backward(dact, pre, weights, plan, None, Need())
    assert dweights.dtype == dtype
    assert_true(dact, pre, weights, plan)


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_nan_stays_nan_and_in_its_row(limit, framed_memory):
    dact, pre, weights, plan = layer(20, 70, torch.float32)
    pre[3, :, 5] = nan
    act = swiglu(pre, plan, limit)
    assert act[3, 5].isnan() and act[:3].isfinite().all()
    dpre, weighted_act, dweights = swiglu_backward(dact, pre, weights, plan, limit, Need())
    assert weighted_act[3, 5].isnan() and dpre[:3].isfinite().all()
    assert dweights[plan.token_of_row[3], plan.slot_of_row[3]].isnan() and dweights.isnan().sum() == 1


def test_no_rows():
    plan = plan_of(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 3)
    pre, none = torch.empty(0, 2, 8, device=DEVICE), torch.empty(0, 8, device=DEVICE)
    assert swiglu(pre, plan, None).shape == (0, 8)
    shapes = [t.shape for t in swiglu_backward(none, pre, torch.empty(0, 2, device=DEVICE), plan, None, Need())]
    assert shapes == [(0, 2, 8), (0, 8), (0, 2)]
