"""Layers whose results are known to the bit: whole numbers, small enough that fp32 holds every sum of their products.

Then the order of a sum does not matter, a kernel and plain torch round the same number once, and must agree exactly.
SwiGLU takes part where gates are multiples of 128: sigmoid is 0, 1/2 or 1 there, in fp32 and in float64.

Beside the numbers: what kernels are specified to compute, in plain torch and float64, rows without an expert NaN.
"""

import itertools

import pytest
import torch
from cases import DEVICE
from torch import Tensor

from mega_moe import routing
from mega_moe.shapes import Need, Plan

nan = torch.nan


def whole(*shape: int, dtype: torch.dtype = torch.float32, most: int = 4, seed: int = 0) -> Tensor:
    """Random whole numbers in -most .. most."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(DEVICE, dtype)


GATE = 128
"""What gates are multiples of, so that silu is relu."""

BLOCK = 128 if DEVICE == "cuda" else 32
"""Rows of a tile where the tests run: see mega_moe/kernels/blocks.py."""

ROUTINGS = {  # rows of each expert; then that many masked routes
    "tails": ([1, BLOCK - 1, 0, BLOCK, BLOCK + 1, 0, 2 * BLOCK + 17], 5),
    "one expert has all": ([0, 0, BLOCK + 5, 0], 0),
    "one row": ([0, 1], 0),
    "one expert": ([40], 2),
    "whole blocks": ([BLOCK, 0, 2 * BLOCK], 0),
    "all masked": ([0, 0, 0], 6),
}
every_routing = pytest.mark.parametrize("rows, masked", ROUTINGS.values(), ids=list(ROUTINGS))
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
every_size = pytest.mark.parametrize(
    "H, I, dtype",
    [
        *((1, 1, torch.float32), (1, 1, torch.bfloat16), (7, 9, torch.bfloat16), (16, 64, torch.float32)),
        *((64, 31, torch.bfloat16), (33, 130, torch.float32), (65, 17, torch.bfloat16), (130, 65, torch.float32)),
    ],
    ids=str,
)

every_need = pytest.mark.parametrize(  # of the three results of dact: dpre, weighted act, dtopk_weights
    "need",
    [Need(dx, dtopk, False, dw_down) for dx, dtopk, dw_down in itertools.product([True, False], repeat=3)][:-1],
    ids=lambda need: "+".join(name for name, needed in vars(need).items() if needed),
)


def plan_of(rows_per_expert: list[int], masked: int = 0) -> Plan:
    """A plan with that many rows for each expert and `masked` routes at the end. K = 1, and row r is token r."""
    experts = torch.arange(len(rows_per_expert)).repeat_interleave(torch.tensor(rows_per_expert))
    ids = torch.cat([experts, experts.new_full((masked,), -1)])
    return routing.plan(ids[:, None].to(DEVICE), len(rows_per_expert))


def shuffled_plan(rows_per_expert: list[int], masked: int = 0, K: int = 2) -> Plan:
    """A plan with that many rows for each expert and at least `masked` masked routes, spread over tokens at random."""
    experts = torch.arange(len(rows_per_expert)).repeat_interleave(torch.tensor(rows_per_expert))
    masked += -(len(experts) + masked) % K
    ids = torch.cat([experts, experts.new_full((masked,), -1)])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    return routing.plan(ids.view(-1, K).to(DEVICE), len(rows_per_expert))


def rows_of(plan: Plan) -> list[slice]:
    """The rows of each expert."""
    starts = plan.row_start.tolist()
    return [slice(start, end) for start, end in itertools.pairwise(starts)]


def same_values(got: Tensor, expected: Tensor) -> bool:
    """Equal values in the same dtype; NaN equals NaN, and 0 equals -0."""
    without_nan = [torch.where(t.isnan(), 0.0, t) for t in (got, expected)]
    return got.dtype == expected.dtype and torch.equal(*without_nan) and torch.equal(got.isnan(), expected.isnan())


def router_weights(plan: Plan) -> Tensor:
    """(T, K) eighths, other than 0 where live, NaN where masked."""
    weights = whole(*plan.row_of_slot.shape, seed=5).add(0.5) / 4
    return weights.masked_fill(plan.row_of_slot < 0, nan)


def gate_up_weights(E: int, I: int, H: int, dtype: torch.dtype) -> Tensor:
    """(E, 2, I, H) whole numbers, those of gate times GATE: with whole x, gates are multiples of it."""
    w = whole(E, 2, I, H, dtype=dtype, most=1, seed=2)
    w[:, 0] *= GATE
    return w


def pre_of(plan: Plan, I: int, dtype: torch.dtype) -> Tensor:
    """(R, 2, I) whole numbers, gates multiples of GATE, NaN in rows without an expert."""
    pre = whole(len(plan.token_of_row), 2, I, dtype=dtype, seed=3)
    pre[:, 0] *= GATE
    pre[plan.row_start[-1] :] = nan
    return pre


# What kernels are specified to compute, in plain torch.


def dispatched(tokens: Tensor, plan: Plan) -> Tensor:
    """tokens (T, C) -> rows (R, C)."""
    rows = tokens[plan.token_of_row.clamp(min=0)] if len(tokens) else tokens
    return torch.where(plan.token_of_row[:, None] >= 0, rows, nan)


def product(a: Tensor, w: Tensor, plan: Plan) -> Tensor:
    """a (R, C), w (E, N, C) -> out (R, N) of a's dtype: each expert's rows times its matrix."""
    out = torch.full((len(a), w.shape[1]), nan, dtype=torch.float64, device=a.device)
    for e, rows in enumerate(rows_of(plan)):
        out[rows] = a[rows].double() @ w[e].double().T
    return out.to(a.dtype)


def grad(a: Tensor, b: Tensor, plan: Plan) -> Tensor:
    """a (R, M), b (R, N) -> dw (E, M, N) of a's dtype: summed over each expert's rows."""
    return torch.stack([a[rows].double().T @ b[rows].double() for rows in rows_of(plan)]).to(a.dtype)


def by_slot(rows: Tensor, plan: Plan) -> Tensor:
    """rows (R, N) -> slots (T, K, N); NaN where masked."""
    live = plan.row_of_slot[..., None] >= 0
    return torch.where(live, rows[plan.row_of_slot.clamp(min=0)], nan) if len(rows) else rows.view(0, 1, rows.shape[1])


def gate_up_and_act(rows: Tensor, w: Tensor, plan: Plan, limit: float | None = None) -> tuple[Tensor, Tensor]:
    """rows (R, H), w (E, 2I, H) -> pre (R, 2, I) and act (R, I), each rounded once from float64."""
    wide = product(rows.double(), w, plan).unflatten(1, (2, -1))
    gate, up = wide.unbind(1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return wide.to(rows.dtype), (torch.nn.functional.silu(gate) * up).to(rows.dtype)


def swiglu_in_float64(dact: Tensor, pre: Tensor, topk_weights: Tensor, plan: Plan, limit: float | None = None) -> dict:
    """act, dpre, weighted_act and dtopk_weights, by autograd; 0 in dtopk_weights for masked routes."""
    live = slice(0, int(plan.row_start[-1]))
    token, slot = plan.token_of_row[live], plan.slot_of_row[live]
    d, wide = dact[live].double(), pre[live].double().requires_grad_()
    weights = topk_weights.double().requires_grad_()
    gate, up = wide.unbind(1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    act = torch.nn.functional.silu(gate) * up
    weighted_act = weights[token, slot][:, None] * act
    (weighted_act * d).sum().backward()
    whole = lambda rows: torch.cat([rows, rows.new_full((len(pre) - len(rows), *rows.shape[1:]), nan)]).detach()
    return dict(act=whole(act), dpre=whole(wide.grad), weighted_act=whole(weighted_act), dtopk_weights=weights.grad)


def swiglu_gradients(
    dy: Tensor, w_down: Tensor, pre: Tensor, topk_weights: Tensor, plan: Plan, limit: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """dy (T, H) -> dpre (R, 2, I) and weighted act (R, I) of pre's dtype, and dtopk_weights of topk_weights'."""
    dact = product(dispatched(dy, plan).double(), w_down.mT, plan)
    true = swiglu_in_float64(dact, pre, topk_weights, plan, limit)
    return (
        true["dpre"].to(pre.dtype),
        true["weighted_act"].to(pre.dtype),
        true["dtopk_weights"].to(topk_weights.dtype),
    )
