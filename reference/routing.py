"""Routing: which experts a token goes to, with which weights, and where that puts its rows.

The router is a softmax over all experts, of which each token keeps the K most likely ones. The plan turns those choices
into rows: one row per (token, slot), sorted by expert, so that every expert finds its rows side by side.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class RouterSaved(NamedTuple):
    """What the router keeps for its backward."""

    x: Tensor  # (T, H)
    w_router: Tensor  # (E, H)
    probs: Tensor  # (T, E)
    topk_ids: Tensor  # (T, K)
    topk_weights: Tensor  # (T, K)
    norm_topk_prob: bool


def router(x: Tensor, w_router: Tensor, top_k: int, norm_topk_prob: bool = False) -> tuple[Tensor, Tensor, RouterSaved]:
    """Choose K experts for each token. Returns topk_ids (T, K) int64, topk_weights (T, K) in fp32 or wider, and saved.

    probs = softmax(x @ w_router^T) over all E experts, in at least fp32; the K largest are kept. With norm_topk_prob
    they are divided by their sum, so that a token's weights add to 1. (With K = 1 that makes every weight exactly 1:
    the router then learns nothing through it.) The convention is Qwen3-MoE's, where norm_topk_prob is a config entry.

    x: (T, H), w_router: (E, H).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    probs = (x @ w_router.T).to(wide).softmax(-1)
    topk_weights, topk_ids = probs.topk(top_k, -1)
    if norm_topk_prob:
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
    return topk_ids, topk_weights, RouterSaved(x, w_router, probs, topk_ids, topk_weights, norm_topk_prob)


def router_backward(saved: RouterSaved, dtopk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """From dtopk_weights (T, K) to dx (T, H) and dw_router (E, H).

    Per token, write s_k for the K selected probabilities and S for their sum.

    Renormalisation, weight_k = s_k / S:
        d weight_j / d s_k = (1[j = k] - weight_j) / S
        ds_k = (dweight_k - sum_j dweight_j weight_j) / S

    Selection: dprobs is ds at the selected experts and 0 elsewhere (the choice itself has no gradient).

    Softmax, p = softmax(z):
        d p_i / d z_j = p_i (1[i = j] - p_j)
        dz_j = p_j (dp_j - sum_i dp_i p_i)

    Logits, z = x @ w^T: dx = dz @ w, dw = dz^T @ x.
    """
    ds = dtopk_weights.to(saved.probs.dtype)
    if saved.norm_topk_prob:
        total = saved.probs.gather(-1, saved.topk_ids).sum(-1, keepdim=True)
        ds = (ds - (ds * saved.topk_weights).sum(-1, keepdim=True)) / total
    dprobs = torch.zeros_like(saved.probs).scatter(-1, saved.topk_ids, ds)
    dlogits = saved.probs * (dprobs - (dprobs * saved.probs).sum(-1, keepdim=True))
    dlogits = dlogits.to(saved.x.dtype)
    return dlogits @ saved.w_router, dlogits.T @ saved.x


class Plan(NamedTuple):
    """Where every route goes, as four arrays that read as functions. R counts live routes only."""

    row_start: Tensor  # (E+1,) rows of expert e: row_start[e] : row_start[e+1]
    token_of_row: Tensor  # (R,)
    slot_of_row: Tensor  # (R,)
    row_of_slot: Tensor  # (T, K), -1 for a masked route

    def experts(self) -> list[slice]:
        """The rows of each expert, one slice an expert; empty slices where nobody came."""
        return [slice(first, end) for first, end in pairwise(self.row_start.tolist())]


# --8<-- [start:plan]
def plan(topk_ids: Tensor, num_experts: int) -> Plan:
    """Sort the routes by expert; routes of one expert stay in the order (token, slot).

    topk_ids: (T, K), integer. -1 masks a route, and so does any other id outside 0 .. num_experts-1: it gets no row.

    Example: topk_ids = [[2, 0], [0, -1], [2, 2]], three experts
        row_start    = [0, 2, 2, 5]       expert 1 has no rows
        token_of_row = [0, 1, 0, 2, 2]    row 0 is token 0, slot 1; row 2 is token 0, slot 0
        slot_of_row  = [1, 0, 0, 0, 1]
        row_of_slot  = [[2, 0], [1, -1], [3, 4]]
    """
    T, K = topk_ids.shape
    ids = topk_ids.flatten().long()
    live = (ids >= 0) & (ids < num_experts)
    order = torch.argsort(torch.where(live, ids, num_experts), stable=True)
    order = order[live[order]]  # masked routes came last

    rows_of_expert = torch.bincount(ids[live], minlength=num_experts)
    row_start = torch.cat([rows_of_expert.new_zeros(1), rows_of_expert.cumsum(0)])
    row_of_slot = torch.full_like(ids, -1)
    row_of_slot[order] = torch.arange(len(order), device=ids.device)
    return Plan(row_start, order // K, order % K, row_of_slot.view(T, K))


# --8<-- [end:plan]
