"""The parity rule sees what it must see, and passes what is honest. The faults here are planted on tensors."""

import math
from dataclasses import replace

import pytest
import torch

from mega_moe import parity, reference
from mega_moe.samples import random_inputs
from mega_moe.shapes import Grads, Inputs, Need, Problem

CPU = Problem(T=48, H=64, I=48, E=4, K=2, device="cpu")
SCALES = (0.02, 1.0, 30.0)


def run(p, inputs, dy):
    """What an honest rung returns: the reference in the working dtype."""
    y, saved = reference.forward(
        inputs.x, inputs.topk_ids, inputs.topk_weights, inputs.w_gate_up, inputs.w_down, p.swiglu_limit
    )
    return y, Grads(*reference.backward(saved, dy))


def case(scale=1.0, **changes):
    p = CPU.at(**changes)
    inputs, dy = random_inputs(p, scale=scale)
    return p, inputs, dy, parity.Oracle(p, inputs, dy)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_honest_result_passes(dtype, scale):
    p, inputs, dy, oracle = case(scale, dtype=dtype)
    verdict = oracle.check(*run(p, inputs, dy))
    assert verdict.passed and verdict.failed == []
    assert tuple(verdict.shares) == parity.OUTPUTS
    assert all(0 < share < 0.5 for share in verdict.shares.values())  # it is the reference: half of the budget or less


def test_the_budget_is_a_few_roundings_of_the_dtype():
    for dtype, rounding in parity.ROUNDING.items():
        oracle = case(dtype=dtype)[3]
        assert all(2 * rounding < budget < 40 * rounding for budget in oracle.budgets.values()), oracle.budgets


@pytest.mark.parametrize("scale", SCALES)
def test_an_output_of_zeros_fails(scale):
    p, inputs, dy, oracle = case(scale)
    y, g = run(p, inputs, dy)
    zeros = [torch.zeros_like(t) for t in (y, g.dx, g.dtopk_weights, g.dw_gate_up, g.dw_down)]
    verdict = oracle.check(zeros[0], Grads(*zeros[1:]))
    assert verdict.failed == list(parity.OUTPUTS)


@pytest.mark.parametrize("scale", SCALES)
def test_one_dropped_slot_fails(scale):
    p, inputs, dy, oracle = case(scale)
    cosine = oracle.truth["dtopk_weights"].abs() / oracle.dtopk_weights_divisor
    typical = (cosine == cosine.median()).nonzero()[0]  # a route whose gradient is not zero by chance
    dropped = inputs.topk_ids.clone()
    dropped[*typical] = -1
    y, grads = run(p, replace(inputs, topk_ids=dropped), dy)
    assert oracle.check(y, grads).failed == list(parity.OUTPUTS)


@pytest.mark.parametrize("scale", SCALES)
def test_gate_and_up_swapped_fails(scale):
    p, inputs, dy, oracle = case(scale)
    assert oracle.check(*run(p, replace(inputs, w_gate_up=inputs.w_gate_up.flip(1)), dy)).failed == list(parity.OUTPUTS)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["y", "dx", "dw_gate_up", "dw_down"])
def test_sixteen_zeroed_columns_fail(scale, name):
    p, inputs, dy, oracle = case(scale)
    y, grads = run(p, inputs, dy)
    {"y": y, **vars(grads)}[name][..., 16:32] = 0
    assert oracle.check(y, grads).failed == [name]


def test_an_expert_whose_gradient_was_left_unwritten_fails():
    p = CPU
    inputs, dy = random_inputs(p)
    inputs.topk_ids[inputs.topk_ids == 2] = -1  # expert 2 has no rows: its gradients are exactly zero
    oracle = parity.Oracle(p, inputs, dy)
    y, grads = run(p, inputs, dy)
    assert oracle.check(y, grads).passed
    grads.dw_down[2, 5, 7] = 1e-6
    grads.dw_gate_up[2] = math.nan
    assert oracle.check(y, grads).failed == ["dw_gate_up", "dw_down"]


def test_a_masked_route_must_have_a_gradient_of_exactly_zero():
    p = CPU
    inputs, dy = random_inputs(p)
    inputs.topk_ids[3, 0] = -1
    oracle = parity.Oracle(p, inputs, dy)
    y, grads = run(p, inputs, dy)
    assert oracle.check(y, grads).passed
    grads.dtopk_weights[3, 0] = 1e-9
    assert oracle.check(y, grads).failed == ["dtopk_weights"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", parity.OUTPUTS)
def test_one_nan_or_inf_fails(name, bad):
    p, inputs, dy, oracle = case()
    y, grads = run(p, inputs, dy)
    {"y": y, **vars(grads)}[name].flatten()[-1:].fill_(bad)
    verdict = oracle.check(y, grads)
    assert verdict.failed == [name] and verdict.shares[name] == math.inf


def test_a_router_gradient_that_cancels_is_judged_by_its_vectors():
    """dy orthogonal to out: the truth of dtopk_weights is nearly 0, and its honest rounding error is not."""
    p = CPU.at(T=8, K=1, E=1)
    inputs, dy = random_inputs(p)
    y, _ = run(p.at(dtype=torch.float64), *(_double(inputs), dy.double()))
    out = y / inputs.topk_weights
    dy = (dy - (dy * out).sum(-1, keepdim=True) / (out * out).sum(-1, keepdim=True) * out).bfloat16()
    oracle = parity.Oracle(p, inputs, dy)
    assert (oracle.truth["dtopk_weights"].abs()[:, 0] < 0.01 * oracle.dtopk_weights_divisor[:, 0]).all()
    assert oracle.check(*run(p, inputs, dy)).passed


def _double(inputs):
    return Inputs(**{name: t if name == "topk_ids" else t.double() for name, t in vars(inputs).items()})


def test_a_gradient_nobody_needs_is_not_judged_and_one_that_is_needed_must_be_there():
    p, inputs, dy, oracle = case()
    y, grads = run(p, inputs, dy)
    only_dx = Grads(dx=grads.dx)
    assert tuple(oracle.shares(y, only_dx, Need(True, False, False, False))) == ("y", "dx")
    assert oracle.check(y, only_dx).failed == ["dtopk_weights", "dw_gate_up", "dw_down"]


def test_another_shape_or_dtype_is_an_error():
    p, inputs, dy, oracle = case()
    y, grads = run(p, inputs, dy)
    with pytest.raises(ValueError, match=r"y is torch.float32 \(48, 64\), not torch.bfloat16 \(48, 64\)"):
        oracle.shares(y.float(), grads)
    with pytest.raises(ValueError, match="y is"):
        oracle.shares(y[:-1], grads)


def test_no_tokens_and_no_routes_pass_with_zeros_and_only_with_zeros():
    for changes in (dict(T=0), dict(T=4)):
        p = CPU.at(**changes)
        inputs, dy = random_inputs(p)
        inputs.topk_ids.fill_(-1)
        oracle = parity.Oracle(p, inputs, dy)
        y, grads = run(p, inputs, dy)
        assert set(oracle.shares(y, grads).values()) == {0.0}
        grads.dw_down[0, 0, 0] = 1
        assert oracle.check(y, grads).failed == ["dw_down"]


def test_float64_has_a_tiny_fixed_budget():
    p, inputs, dy, oracle = case(dtype=torch.float64)
    y, grads = run(p, inputs, dy)
    assert parity.check(p, inputs, dy, y, grads).passed
    assert oracle.check(y * (1 + 2.0**-44), grads).failed == ["y"]


def test_small_sizes_are_judged_in_fp32_only():
    p, inputs, dy, oracle = case(H=8, dtype=torch.float32)
    assert set(oracle.budgets.values()) == {2.0**-10}
    assert oracle.check(*run(p, inputs, dy)).passed
    with pytest.raises(ValueError, match="at least 16"):
        case(H=8)


def test_inputs_that_overflow_the_dtype_are_an_error_rather_than_a_pass():
    p = CPU.at(dtype=torch.float16)
    inputs, dy = random_inputs(p)
    inputs.w_down.mul_(20000)
    oracle = parity.Oracle(p, inputs, dy)
    with pytest.raises(ValueError, match="cannot be judged"):
        oracle.check(*run(p, inputs, dy))


def test_chunks_change_nothing(monkeypatch):
    p, inputs, dy, oracle = case()
    y, grads = run(p, inputs, dy)
    whole = oracle.errors(y, grads)
    monkeypatch.setattr(parity, "CHUNK", 100)
    assert oracle.errors(y, grads) == pytest.approx(whole, rel=1e-12)


def test_worst_row_by_hand():
    truth = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.3, 0.4]], dtype=torch.float64)
    got = truth.clone()
    assert parity.worst_row(got, truth) == 0.0
    got[2, 0] += 0.1  # the row is small: the whole tensor's RMS, sqrt(25.25 / 6), is what it is measured against
    assert parity.worst_row(got, truth) == pytest.approx(math.sqrt(0.01 / 2) / math.sqrt(25.25 / 6))
    got[0, 0] += 0.7
    assert parity.worst_row(got, truth) == pytest.approx(math.sqrt(0.49 / 2) / math.sqrt(12.5))
    got[1, 1] = 1e-30
    assert parity.worst_row(got, truth) == math.inf
