"""Routing in plain torch: the router that `MoE` uses, and the plan of rows that kernels/plan.py makes, to the bit."""

import torch
from torch import Tensor

from .shapes import Plan


def route(logits: Tensor, top_k: int, norm_topk_prob: bool = False) -> tuple[Tensor, Tensor]:
    """Choose K experts for each token, as Qwen3-MoE does: logits (T, E) -> topk_ids int64 and topk_weights, (T, K).

    Softmax over all experts in fp32 or wider, the K largest probabilities, divided by their sum if norm_topk_prob. With
    K = 1 and norm_topk_prob every weight is 1 and the router receives no gradient.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    topk_weights, topk_ids = wide.softmax(-1).topk(top_k, -1)
    if norm_topk_prob:
        total = topk_weights.sum(-1, keepdim=True)
        topk_weights = topk_weights / total.clamp_min(torch.finfo(total.dtype).tiny)
    return topk_ids, topk_weights


def plan(topk_ids: Tensor, num_experts: int) -> Plan:
    """The plan of rows with shapes that do not depend on the routing: R = T*K, masked routes without a row at the end.

    topk_ids: (T, K) int32 or int64. Any id outside 0 .. num_experts-1 is a masked route. `Plan` has an example.
    """
    T, K = topk_ids.shape
    ids = topk_ids.flatten().long()
    live = (ids >= 0) & (ids < num_experts)
    expert = torch.where(live, ids, num_experts)
    order = torch.argsort(expert, stable=True)

    row_start = torch.searchsorted(expert[order], torch.arange(num_experts + 1, device=ids.device))
    row_of_slot = torch.empty_like(order).scatter(0, order, torch.arange(T * K, device=ids.device))
    has_token = live[order]
    return Plan(
        row_start.int(),
        torch.where(has_token, order // K, -1).int(),
        torch.where(has_token, order % K, -1).int(),
        torch.where(live, row_of_slot, -1).int().view(T, K),
    )
