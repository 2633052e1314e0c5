"""The MoE layer, backward: the five steps of forward.py from last to first, each derived by hand in its docstring.

One decision shapes the whole file. The router weight multiplies an expert's output, y_t = sum_k weight_k * out_k, so
every gradient below `out` carries a factor weight_k. It is left out of dact on purpose: dact = dy @ w_down is then also
what the router's own gradient needs, dweight_k = <dact, act>, and no path ever divides by a weight. The factor is put
back where rows are cheap to scale: on act for dw_down, on dact for dpre.

Two of the four products here contract along H or I, as forward's do, and two over the rows of an expert. A format (see
quantize.py) has its blocks along the contraction, so it reads dy_rows and dpre by row for the first two, by column for
the others.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .forward import Saved, clamp, dispatch, swiglu
from .quantize import AS_IS, Format, formats
from .routing import Plan


class Grads(NamedTuple):
    """The gradients, each in its input's shape and dtype."""

    dx: Tensor  # (T, H)
    dtopk_weights: Tensor  # (T, K), exactly 0 where the route is masked
    dw_gate_up: Tensor  # (E, 2, I, H)
    dw_down: Tensor  # (E, H, I)


# --8<-- [start:backward]
def backward(saved: Saved, dy: Tensor) -> Grads:
    """From dy (T, H) to the gradients of x, topk_weights, w_gate_up and w_down.

    act is made again from pre (one elementwise pass) and rows again from x (one copy): cheaper than keeping them.
    """
    p, format = saved.plan, formats(saved.precision).backward
    weight_of_row = saved.topk_weights[p.token_of_row, p.slot_of_row]
    act = swiglu(saved.pre, saved.swiglu_limit)

    dy_rows = combine_backward(dy, p)
    dact, dw_down = down_backward(dy_rows, act, weight_of_row, saved.w_down, p, format)
    dtopk_weights = router_weights_backward(dact, act, saved.topk_weights, p)
    dpre = swiglu_backward(dact, weight_of_row, saved.pre, saved.swiglu_limit)
    drows, dw_gate_up = gate_up_backward(dpre, dispatch(saved.x, p), saved.w_gate_up, p, format)
    dx = dispatch_backward(drows, p.row_of_slot)
    return Grads(dx, dtopk_weights, dw_gate_up, dw_down)


# --8<-- [end:backward]


# --8<-- [start:steps]
def combine_backward(dy: Tensor, plan: Plan) -> Tensor:
    """y_t = sum_k weight_k * out_k gives dout_k = weight_k * dy_t: every row receives its token's dy.

    Returns dy_rows (R, H) *without* the factor weight_k (see the top of this file): a plain copy of dy to rows, the
    same movement as forward's dispatch.
    """
    return dy[plan.token_of_row]


def down_backward(
    dy_rows: Tensor, act: Tensor, weight_of_row: Tensor, w_down: Tensor, plan: Plan, format: Format = AS_IS
) -> tuple[Tensor, Tensor]:
    """out = act @ w_down[e]^T, row by row: out_h = sum_i act_i w_hi. With dout = weight * dy:

        dact_i       = sum_h dy_h w_hi                     dact = dy_rows @ w_down[e]       (unweighted, (R, I))
        dw_down[e]_hi = sum_rows (weight dy_h) act_i       dw_down[e] = dy_rows^T @ (weight * act)

    The weight goes to act, which is narrower than dy. An expert without rows sums nothing: its dw_down is zero.
    """
    weighted_act = (weight_of_row[:, None].to(wide(act)) * act).to(act.dtype)
    experts = plan.experts()
    dy_by_row = format.rows(dy_rows)
    dact = torch.cat([dy_by_row[own] @ format.weights(w.T).T for own, w in zip(experts, w_down, strict=True)])
    dy_by_column, act_by_column = (format.columns(t, plan.row_start) for t in (dy_rows, weighted_act))
    dw_down = torch.stack([dy_by_column[own].T @ act_by_column[own] for own in experts])
    return dact.to(act.dtype), dw_down.to(act.dtype)


def router_weights_backward(dact: Tensor, act: Tensor, topk_weights: Tensor, plan: Plan) -> Tensor:
    """y_t = sum_k weight_k out_k gives dweight_k = <dy_t, out_k>, a sum over H. Since out_k = act_k @ w_down[e]^T,

        <dy, act @ w^T> = sum_h sum_i dy_h act_i w_hi = <dy @ w, act> = <dact, act>,

    a sum over the shorter I of tensors that backward has at hand anyway; `out` need not be kept. Returns
    dtopk_weights (T, K), zero where the route is masked.
    """
    dweight = (dact.to(wide(dact)) * act).sum(-1)
    dtopk_weights = topk_weights.new_zeros(topk_weights.shape)
    dtopk_weights[plan.token_of_row, plan.slot_of_row] = dweight.to(topk_weights.dtype)
    return dtopk_weights


def swiglu_backward(dact: Tensor, weight_of_row: Tensor, pre: Tensor, swiglu_limit: float | None = None) -> Tensor:
    """act = silu(gate) * up, silu(z) = z s(z), s the sigmoid, s' = s (1 - s). With d = weight * dact:

        dup   = d silu(gate)
        dgate = d up silu'(gate),     silu'(z) = s(z) + z s(z) (1 - s(z))

    Under a limit the clamped values enter these formulas, and the gradient passes where clamp passed: gate <= limit,
    -limit <= up <= limit (both ends included, as torch.clamp's). Returns dpre (R, 2, I), rounded once.
    """
    gate, up = clamp(pre, swiglu_limit)
    d = weight_of_row[:, None].to(gate.dtype) * dact.to(gate.dtype)
    s = torch.sigmoid(gate)
    dup = d * gate * s
    dgate = d * up * (s + gate * s * (1 - s))
    if swiglu_limit is not None:
        raw_gate, raw_up = pre.to(gate.dtype).unbind(1)  # as wide as clamp saw them: bf16 may not hold the limit
        dgate = torch.where(raw_gate <= swiglu_limit, dgate, 0)
        dup = torch.where(raw_up.abs() <= swiglu_limit, dup, 0)
    return torch.stack([dgate, dup], 1).to(pre.dtype)


def gate_up_backward(
    dpre: Tensor, rows: Tensor, w_gate_up: Tensor, plan: Plan, format: Format = AS_IS
) -> tuple[Tensor, Tensor]:
    """pre = rows @ w_gate_up[e]^T: pre_ci = sum_h row_h w_cih, for c = gate, up.

    drow_h            = sum_c sum_i dpre_ci w_cih          drows, (R, H): gate's and up's part in one sum
    dw_gate_up[e]_cih = sum_rows dpre_ci row_h             zero for an expert without rows
    """
    experts = plan.experts()
    dpre_by_row = format.rows(dpre)
    drows = torch.cat(
        [
            dpre_by_row[own].flatten(1) @ format.weights(w.mT).mT.flatten(0, 1)
            for own, w in zip(experts, w_gate_up, strict=True)
        ]
    )
    dpre_by_column, rows_by_column = (format.columns(t, plan.row_start) for t in (dpre, rows))
    dw_gate_up = torch.stack([torch.einsum("rci,rh->cih", dpre_by_column[own], rows_by_column[own]) for own in experts])
    return drows.to(rows.dtype), dw_gate_up.to(rows.dtype)


def dispatch_backward(drows: Tensor, row_of_slot: Tensor) -> Tensor:
    """Dispatch copied x_t to each of its rows, so dx_t = sum_k drow_k, in slot order: drows (R, H) -> dx (T, H).

    The same sum over slots as combine, without weights: they went into dpre. fp32 or wider, rounded once.
    """
    dx = torch.zeros(len(row_of_slot), drows.shape[1], dtype=wide(drows), device=drows.device)
    for row in row_of_slot.unbind(1):
        live = row >= 0
        dx[live] += drows[row[live]].to(dx.dtype)
    return dx.to(drows.dtype)


# --8<-- [end:steps]


def wide(t: Tensor) -> torch.dtype:
    """The dtype to do arithmetic on t in: at least fp32."""
    return torch.promote_types(t.dtype, torch.float32)
