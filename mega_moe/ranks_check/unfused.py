"""The layer as people run it today: plain torch, rows exchanged by all_to_all, one kernel after another.

It is what fusing is measured against. Rows are sorted by expert, sent to its rank, multiplied by torch's grouped
product, sent back, weighted and added up; autograd makes the backward of it, and keeps what it needs.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..exchange import Exchange, agree
from ..shapes import Plan

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""From x, topk_ids, topk_weights, w_gate_up and w_down to y, as `moe` takes them."""


class Dispatch(torch.autograd.Function):
    """Rows to the ranks of their experts; their gradients come back."""

    @staticmethod
    def forward(ctx, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.dispatch(rows)

    @staticmethod
    def backward(ctx, drows: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.give_back(drows), None


class GiveBack(torch.autograd.Function):
    """Results to where their rows came from; their gradients go out."""

    @staticmethod
    def forward(ctx, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.give_back(rows)

    @staticmethod
    def backward(ctx, drows: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.dispatch(drows), None


def to_rows(x: Tensor, topk_ids: Tensor, row_start_of: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows (R, H) sorted by expert, the route (token * K + slot) of each, and where each expert's begin (E+1,).

    row_start_of: 0 .. E. No route is masked.
    """
    expert_of_row, route_of_row = topk_ids.flatten().sort(stable=True)
    row_start = torch.searchsorted(expert_of_row, row_start_of, out_int32=True)
    return x[route_of_row // topk_ids.shape[1]], route_of_row, row_start


def experts(rows: Tensor, w_gate_up: Tensor, w_down: Tensor, ends: Tensor) -> Tensor:
    """What the experts here make of their rows, which end at `ends`."""
    gate, up = F.grouped_mm(rows, w_gate_up.flatten(1, 2).mT, offs=ends).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, w_down.mT, offs=ends)


def to_tokens(out: Tensor, topk_weights: Tensor, route_of_row: Tensor, x: Tensor) -> Tensor:
    """out (R, H) times its router weight, in fp32 and rounded, then added up for each token."""
    weighted = (out * topk_weights.flatten()[route_of_row][:, None]).to(x.dtype)
    return torch.zeros_like(x).index_add(0, route_of_row // topk_weights.shape[1], weighted)


def layer(group: ProcessGroup, compiled: bool, device: torch.device) -> Layer:
    """The layer over the ranks of a group. compiled: torch compiles what stands between the collectives; on a CPU,
    where only the machinery is tried, without a C++ compiler."""
    before, between, after = to_rows, experts, to_tokens
    if compiled:
        torch.compiler.reset()
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        compile = partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)
        before, between, after = compile(to_rows), compile(experts), compile(to_tokens)

    def over_ranks(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        numbers = torch.arange(len(w_down) * group.size() + 1, device=x.device)
        rows, route_of_row, row_start = before(x, topk_ids, numbers)
        exchange = agree(Plan(row_start, None, None, None), group)
        out = between(Dispatch.apply(rows, exchange), w_gate_up, w_down, exchange.row_start[1:])
        return after(GiveBack.apply(out, exchange), topk_weights, route_of_row, x)

    return over_ranks
