"""The same layer with its experts split over W ranks, as expert parallelism does it; the ranks are a Python list.

Every rank holds some tokens (as many as it likes, also none) and L = E/W experts: rank r owns experts r*L .. r*L+L-1.
The five steps stay; two of them now cross rank borders. Dispatch *pulls*: a rank takes, from every rank's x, the rows
that its own experts need. Combine *pushes*: a rank writes each finished row to its owner's slot [token, k], and the
owner then sums the K slots in slot order. In backward the same two movements carry dy rows and drows.

A rank's rows are ordered (expert, home rank, token, slot). That is the order in which one rank holding all tokens would
have them, so each expert multiplies the same matrix, every sum has the same order, and the result is the one-rank
result (to the last bit or two: torch's vectorised silu rounds a value differently at a vector's tail).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .backward import dispatch_backward, down_backward, gate_up_backward, swiglu_backward, wide
from .forward import combine, down, gate_up, swiglu
from .quantize import formats, refuse_autograd
from .routing import Plan, plan


class Tokens(NamedTuple):
    """One rank's tokens; its topk_ids name experts of all ranks."""

    x: Tensor  # (T, H)
    topk_ids: Tensor  # (T, K)
    topk_weights: Tensor  # (T, K)


class Saved(NamedTuple):
    """What one rank keeps for backward: its own rows' plan and pre."""

    plan: Plan  # token_of_row counts through all ranks' tokens, one rank after another
    pre: Tensor  # (R, 2, I)


class Grads(NamedTuple):
    """One rank's gradients: of its own tokens, and of its own experts' weights summed over all ranks' tokens."""

    dx: Tensor  # (T, H)
    dtopk_weights: Tensor  # (T, K)
    dw_gate_up: Tensor  # (L, 2, I, H)
    dw_down: Tensor  # (L, H, I)


def forward(
    ranks: list[Tokens],
    w_gate_up: list[Tensor],
    w_down: list[Tensor],
    swiglu_limit: float | None = None,
    precision: str = "bf16",
) -> tuple[list[Tensor], list[Saved]]:
    """Every rank's y (T, H), and what each rank saves. w_gate_up: (L, 2, I, H) and w_down: (L, H, I) for each rank."""
    format = formats(precision).forward
    refuse_autograd(precision, *(t for r in ranks for t in (r.x, r.topk_weights)), *w_gate_up, *w_down)
    slots = [r.x.new_zeros(*r.topk_ids.shape, r.x.shape[1]) for r in ranks]
    saved = []
    for rank in range(len(ranks)):
        p = plan_of_rank(ranks, len(w_down[rank]), rank)
        rows = pull([r.x for r in ranks], p)
        pre = gate_up(rows, w_gate_up[rank], p, format)
        out = down(swiglu(pre, swiglu_limit), w_down[rank], p, format)
        push(out, slots, p)
        saved.append(Saved(p, pre))
    num_experts = sum(map(len, w_down))
    y = [
        combine(s.flatten(0, 1), r.topk_weights, slot_rows(r.topk_ids, num_experts))
        for s, r in zip(slots, ranks, strict=True)
    ]
    return y, saved


def backward(
    ranks: list[Tokens],
    w_gate_up: list[Tensor],
    w_down: list[Tensor],
    saved: list[Saved],
    dy: list[Tensor],
    swiglu_limit: float | None = None,
    precision: str = "bf16",
) -> list[Grads]:
    """Every rank's gradients. A weight gradient is the plain sum over all ranks' tokens: nothing is divided by W."""
    format = formats(precision).backward
    slots = [r.x.new_zeros(*r.topk_ids.shape, r.x.shape[1]) for r in ranks]
    dtopk_weights = [torch.zeros_like(r.topk_weights) for r in ranks]
    dw = []
    for rank in range(len(ranks)):
        p, pre = saved[rank]
        weight_of_row = torch.cat([r.topk_weights for r in ranks])[p.token_of_row, p.slot_of_row]
        act = swiglu(pre, swiglu_limit)

        dy_rows = pull(dy, p)
        dact, dw_down = down_backward(dy_rows, act, weight_of_row, w_down[rank], p, format)
        dpre = swiglu_backward(dact, weight_of_row, pre, swiglu_limit)
        drows, dw_gate_up = gate_up_backward(dpre, pull([r.x for r in ranks], p), w_gate_up[rank], p, format)

        push(drows, slots, p)
        push((dact.to(wide(dact)) * act).sum(-1), dtopk_weights, p)
        dw.append((dw_gate_up, dw_down))
    num_experts = sum(map(len, w_down))
    dx = [
        dispatch_backward(s.flatten(0, 1), slot_rows(r.topk_ids, num_experts))
        for s, r in zip(slots, ranks, strict=True)
    ]
    return [Grads(*g) for g in zip(dx, dtopk_weights, *zip(*dw, strict=True), strict=True)]


def plan_of_rank(ranks: list[Tokens], local_experts: int, rank: int) -> Plan:
    """The rows of one rank's experts among all ranks' tokens.

    It is the one-rank plan of all tokens as this rank sees them: its own experts are 0 .. L-1, and every other id lies
    outside and so gets no row.
    """
    return plan(torch.cat([r.topk_ids for r in ranks]) - rank * local_experts, local_experts)


def pull(x: list[Tensor], plan: Plan) -> Tensor:
    """Take each row of the plan from the rank that holds its token: W tensors (T, H) -> rows (R, H)."""
    rows = x[0].new_empty(len(plan.token_of_row), x[0].shape[1])
    for home, (mine, token) in enumerate(rows_by_home(plan, [len(t) for t in x])):
        rows[mine] = x[home][token]
    return rows


def push(out: Tensor, slots: list[Tensor], plan: Plan) -> None:
    """Write each row to the slot [token, k] of its home rank: (R, ...) into W tensors (T, K, ...)."""
    for home, (mine, token) in enumerate(rows_by_home(plan, [len(s) for s in slots])):
        slots[home][token, plan.slot_of_row[mine]] = out[mine].to(slots[home].dtype)


def rows_by_home(plan: Plan, tokens_per_rank: list[int]) -> list[tuple[Tensor, Tensor]]:
    """For each home rank: which rows are its own (R,) bool, and the tokens they have there."""
    found, first = [], 0
    for count in tokens_per_rank:
        mine = (plan.token_of_row >= first) & (plan.token_of_row < first + count)
        found.append((mine, plan.token_of_row[mine] - first))
        first += count
    return found


def slot_rows(topk_ids: Tensor, num_experts: int) -> Tensor:
    """row_of_slot (T, K) for results that lie by slot already: row t*K + k, or -1 where the route is masked."""
    live = (topk_ids >= 0) & (topk_ids < num_experts)
    return torch.where(live, torch.arange(topk_ids.numel(), device=topk_ids.device).view_as(topk_ids), -1)
