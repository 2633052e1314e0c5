"""Arithmetic with known answers. Layers whose products are exact leave nothing but the step under test to round.

The trick: x is one at one place and zero elsewhere, so pre is a column of w_gate_up; a gate of 64 makes silu(gate) * up
equal to 64 * up, to the bit; and w_down is the identity or holds one column of numbers to be summed.
"""

from dataclasses import replace

import pytest
import torch
from cases import DEVICE, assert_parity, layer, same_bits, train

MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
HALVES = (torch.bfloat16, torch.float16)


def ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The spacing of dtype's numbers at each value (float64)."""
    exponent = value.abs().clamp_min(torch.finfo(dtype).tiny).log2().floor()
    return torch.exp2(exponent - MANTISSA[dtype])


def through_identity(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype):
    """One token, one expert, pre = (gate, up): then y is act, and dw_gate_up's first column is dpre for dact = 1.
    Returns inputs, dy, and the gate and up that dtype could hold, in float64."""
    I = len(gate)
    _, inputs, dy = layer([[0]], H=I, I=I, E=1, dtype=dtype)
    for t in (inputs.x, inputs.w_gate_up, inputs.w_down, dy):
        t.zero_()
    inputs.x[0, 0] = 1
    inputs.w_gate_up[0, 0, :, 0], inputs.w_gate_up[0, 1, :, 0] = gate, up
    inputs.w_down[0].fill_diagonal_(1)
    inputs.topk_weights.fill_(1)
    dy.fill_(1)
    return inputs, dy, *inputs.w_gate_up[0, :, :, 0].double().unbind(0)


# SwiGLU.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_over_the_range_of_its_arguments(dtype, rung):
    """silu rounded before the product, 1 - sigmoid(-x) for small negatives, and exp of large ones, each lose their bits
    somewhere in here."""
    points = torch.tensor([-1e4, -88.0, -30.0, -8.0, -1e-3, 0.0, 1e-3, 8.0, 30.0, 88.0, 1e4], dtype=torch.float64)
    gate, up = (t.flatten() for t in torch.meshgrid(points, torch.tensor([1.0, 1e3]).double(), indexing="ij"))
    inputs, dy, gate, up = through_identity(gate, up, dtype)
    y, grads = train(rung, inputs, dy)

    s = torch.sigmoid(gate)
    expected = [gate * s * up, up * (s + gate * s * (1 - s)), gate * s]
    got = [y[0], *grads.dw_gate_up[0, :, :, 0]]
    for one, other in zip(got, expected, strict=True):
        # exp(88) in fp32 is good to 88 roundings of its argument; bf16 sees none of that.
        allowed = ulp(other, dtype) if dtype == torch.bfloat16 else other.abs() * 2**-16
        assert one.isfinite().all() and ((one.double() - other).abs() <= allowed + 1e-36).all()


def test_gate_comes_first(rung):
    """w_gate_up[:, 0] goes through silu and w_gate_up[:, 1] does not; their gradients come back in the same order."""
    gate = torch.linspace(-4, 4, 20)
    inputs, dy, gate, _ = through_identity(gate, torch.ones(20), torch.float32)
    y, grads = train(rung, inputs, dy)
    silu = torch.nn.functional.silu(gate)
    torch.testing.assert_close(y[0].double(), silu, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grads.dw_gate_up[0, 1, :, 0].double(), silu, rtol=1e-6, atol=1e-7)


LIMIT = 2.0
AROUND = [-1e4, -2.5, -2.0 - 2**-6, -2.0, -2.0 + 2**-6, -1.0, 0.0, 1.0, 2.0 - 2**-7, 2.0, 2.0 + 2**-6, 3.0, 1e4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_swiglu_limit_and_its_gradient_are_torch_clamps(dtype, rung):
    """Below, exactly at and above the limit, on both sides: gate is cut from above only, up on both sides, and the
    gradient passes where the clamp did, ends included."""
    grid = torch.meshgrid(torch.tensor(AROUND), torch.tensor(AROUND), indexing="ij")
    inputs, dy, gate, up = through_identity(*(t.flatten() for t in grid), dtype)
    y, grads = train(rung, inputs, dy, swiglu_limit=LIMIT)

    gate, up = gate.requires_grad_(), up.requires_grad_()
    act = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    act.sum().backward()
    for got, expected in ((y[0], act.detach()), *zip(grads.dw_gate_up[0, :, :, 0], (gate.grad, up.grad), strict=True)):
        assert torch.equal(got == 0, expected.to(dtype) == 0)
        assert ((got.double() - expected).abs() <= ulp(expected, dtype) * (1 if dtype in HALVES else 8) + 1e-30).all()


def test_a_limit_between_two_numbers_of_x_s_dtype(rung):
    """bf16's nearest number to 0.1 is above it: it is clamped, so its gradient is zero."""
    nearest = torch.full((16,), 0.1).bfloat16().double()
    assert (nearest > 0.1).all()
    inputs, dy, _, _ = through_identity(nearest, nearest, torch.bfloat16)
    _, grads = train(rung, inputs, dy, swiglu_limit=0.1)
    assert not grads.dw_gate_up.any()


def test_a_limit_that_nothing_reaches_changes_nothing(rung):
    problem, inputs, dy = layer()
    assert problem.swiglu_limit is None
    assert_parity(problem, inputs, dy, train(rung, inputs, dy, swiglu_limit=1e6))


@pytest.mark.parametrize("half", [0, 1], ids=["gate", "up"])
def test_each_half_of_dx_by_itself(half, rung):
    """One of two products into one accumulator may get lost while y and every weight's gradient stay right. A limit
    that all of one half exceeds leaves dx to the other."""
    problem, inputs, dy = layer(dtype=torch.float32, limit=0.5, I=40)
    inputs.x.abs_()
    inputs.w_gate_up[:, half].abs_().add_(1)  # far above the limit
    y, grads = train(rung, inputs, dy, swiglu_limit=0.5)
    assert not grads.dw_gate_up[:, half].any() and grads.dx.any()
    assert_parity(problem, inputs, dy, (y, grads))


# Router weights and combine.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_weight_multiplies_the_output_once(dtype, rung):
    """Half the weights is half of y and of every gradient but the router's, to the bit: on an expert's input they would
    go through silu, and twice applied they would count a quarter."""
    _, inputs, dy = layer(dtype=dtype)
    y, grads = train(rung, inputs, dy)
    y_half, halved = train(rung, replace(inputs, topk_weights=inputs.topk_weights / 2), dy)
    assert same_bits(y_half * 2, y)
    assert same_bits(halved.dtopk_weights, grads.dtopk_weights)
    for name in ("dx", "dw_gate_up", "dw_down"):
        assert same_bits(getattr(halved, name) * 2, getattr(grads, name))


@pytest.mark.parametrize(
    "K, dtype, weights",
    [
        (8, torch.bfloat16, "fp32"),
        (8, torch.bfloat16, "like x"),
        (10, torch.bfloat16, "fp32"),
        (8, torch.float16, "like x"),
        (10, torch.float32, "fp32"),
    ],
)
def test_combine_sums_in_fp32_and_rounds_once(K, dtype, weights, rung):
    """A running sum in bf16, or a router weight rounded to it, is off by several roundings at K = 8."""
    ids = torch.stack([torch.arange(K), torch.arange(K).flip(0)])
    _, inputs, _ = layer(ids, H=64, I=16, E=K, dtype=dtype)
    weight = torch.full((2, K), 0.125, device=DEVICE)
    weight[1] = torch.rand(K, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    inputs = replace(inputs, topk_weights=weight if weights == "fp32" else weight.to(dtype))
    inputs.x.zero_()[:, 0] = 1
    inputs.w_gate_up.zero_()[:, 0, 0, 0], inputs.w_gate_up[:, 1, 0, 0] = 64, 1 / 64  # act = (1, 0, ...)
    y, _ = train(rung, inputs)

    terms = inputs.topk_weights.double()[:, :, None] * inputs.w_down[inputs.topk_ids, :, 0].double()
    exact = terms.sum(1)
    rounding = ulp(exact, dtype) / 2 if dtype in HALVES else 0
    assert ((y.double() - exact).abs() <= rounding + terms.abs().sum(1) * K * 2**-24).all()


def test_fp32_is_not_tf32(rung):
    """TF32 would drop the last thirteen bits of each factor."""
    problem, inputs, dy = layer(T=6, H=64, I=64, dtype=torch.float32)
    assert_parity(problem, inputs, dy, train(rung, inputs, dy))
    inputs.x.zero_()[:, 0] = 1 + 2**-20
    inputs.w_gate_up.zero_()[:, 0, 0, 0], inputs.w_gate_up[:, 1, 0, 0] = 64, 1 / 64
    inputs.w_down[:, :, 0] = 1
    inputs.topk_weights.fill_(0.5)
    y, _ = train(rung, inputs)
    assert ((y.double() - (1 + 2**-20) ** 2).abs() < 2**-22).all()
