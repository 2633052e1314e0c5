"""The MoE layer, forward: dispatch, gate_up, swiglu, down, combine. For token t, slot k, expert e = topk_ids[t, k]:

    pre = x_t @ w_gate_up[e]^T     act = silu(gate) * up     out = act @ w_down[e]^T     y_t = sum_k weight_k * out_k

Each expert sees a dense matrix of its own rows, so the layer is a loop over experts around three matrix products.
backward.py mirrors this file step by step; routing.py makes the plan that both walk along. A product reads its operands
through a format, which rounds them to 8 bits (see quantize.py) or, AS_IS, gives them back as they are.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .quantize import AS_IS, Format, formats, refuse_autograd
from .routing import Plan, plan


class Saved(NamedTuple):
    """What forward keeps for backward."""

    x: Tensor  # (T, H)
    topk_weights: Tensor  # (T, K)
    w_gate_up: Tensor  # (E, 2, I, H)
    w_down: Tensor  # (E, H, I)
    plan: Plan
    pre: Tensor  # (R, 2, I): saved, since making it again is the larger of the two matrix products
    swiglu_limit: float | None
    precision: str = "bf16"  # backward's products read their operands as it says


def forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    swiglu_limit: float | None = None,
    precision: str = "bf16",
) -> tuple[Tensor, Saved]:
    """The whole layer. Returns y (T, H) in x's dtype, and what backward needs.

    x: (T, H), topk_ids: (T, K) integer with -1 for a masked route, topk_weights: (T, K), w_gate_up: (E, 2, I, H) with
    gate first and up second, w_down: (E, H, I). Sums over slots and SwiGLU run in fp32 or wider; every step's result is
    rounded to x's dtype once, and that is what a product's format then rounds. precision: a key of
    quantize.PRECISIONS, else ValueError; "bf16" quantises nothing, whatever x's dtype is. Autograd follows "bf16" only,
    since rounding to 8 bits is a step function: with another one it is a RuntimeError to ask for its gradients.
    `backward` follows every precision, and what it needs is saved as in "bf16", nothing in 8 bits.
    """
    format = formats(precision).forward
    refuse_autograd(precision, x, topk_weights, w_gate_up, w_down)
    p = plan(topk_ids, len(w_gate_up))
    rows = dispatch(x, p)
    pre = gate_up(rows, w_gate_up, p, format)
    act = swiglu(pre, swiglu_limit)
    out = down(act, w_down, p, format)
    y = combine(out, topk_weights, p.row_of_slot)
    return y, Saved(x, topk_weights, w_gate_up, w_down, p, pre, swiglu_limit, precision)


# --8<-- [start:steps]
def dispatch(x: Tensor, plan: Plan) -> Tensor:
    """Copy every token to each of its rows: x (T, H) -> rows (R, H)."""
    return x[plan.token_of_row]


def gate_up(rows: Tensor, w_gate_up: Tensor, plan: Plan, format: Format = AS_IS) -> Tensor:
    """Multiply each expert's rows with both of its first matrices: (R, H) -> pre (R, 2, I)."""
    x = format.rows(rows)
    experts = zip(plan.experts(), w_gate_up, strict=True)
    pre = torch.cat([torch.einsum("rh,cih->rci", x[own], format.weights(w)) for own, w in experts])
    return pre.to(rows.dtype)


def swiglu(pre: Tensor, swiglu_limit: float | None = None) -> Tensor:
    """act = silu(gate) * up: (R, 2, I) -> (R, I), in fp32 or wider, rounded once (Shazeer 2020, arXiv:2002.05202).

    With a limit, gate is first clamped to at most limit and up to [-limit, limit], as DeepSeek-V4 does.
    """
    gate, up = clamp(pre, swiglu_limit)
    return (torch.nn.functional.silu(gate) * up).to(pre.dtype)


def clamp(pre: Tensor, swiglu_limit: float | None) -> tuple[Tensor, Tensor]:
    """gate and up (R, I), widened to at least fp32, clamped if there is a limit."""
    gate, up = pre.to(torch.promote_types(pre.dtype, torch.float32)).unbind(1)
    if swiglu_limit is not None:
        gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return gate, up


def down(act: Tensor, w_down: Tensor, plan: Plan, format: Format = AS_IS) -> Tensor:
    """Multiply each expert's rows with its last matrix: act (R, I) -> out (R, H)."""
    a = format.rows(act)
    experts = zip(plan.experts(), w_down, strict=True)
    return torch.cat([a[own] @ format.weights(w).T for own, w in experts]).to(act.dtype)


def combine(out: Tensor, topk_weights: Tensor, row_of_slot: Tensor) -> Tensor:
    """y_t = sum_k weight_k * out_k, in slot order: out (R, H) -> y (T, H).

    The sum runs in fp32 or wider and is rounded once. A masked route is skipped, not multiplied by zero: zero times
    infinity would be NaN.
    """
    wide = torch.promote_types(out.dtype, torch.float32)
    y = torch.zeros(len(row_of_slot), out.shape[1], dtype=wide, device=out.device)
    for row, weight in zip(row_of_slot.unbind(1), topk_weights.unbind(1), strict=True):
        live = row >= 0
        y[live] += weight[live, None].to(wide) * out[row[live]].to(wide)
    return y.to(out.dtype)


# --8<-- [end:steps]
