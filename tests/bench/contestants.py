"""Who is measured: the rungs of the ladder, what people train with today, and the dense GEMMs that bound them all.

All of them get the same layer after its router, that is x, topk_ids, topk_weights and the weights, and all of them owe
y and all four gradients. Whatever a contestant makes of topk_ids (a sort, a plan) is inside its time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_moe import LADDER, Problem, moe
from mega_moe.shapes import Grads, Inputs


@dataclass(frozen=True)
class Runner:
    """A contestant with a layer in its hands, the weights in the form in which it keeps them."""

    forward: Callable[[], Tensor]  # y, with everything that backward needs
    backward: Callable[[Tensor], tuple[Tensor, ...]]  # from what forward returned, all gradients
    as_grads: Callable[..., Grads] | None = Grads  # the gradients in the shapes of the inputs; None: not this layer's


@dataclass(frozen=True)
class Contestant:
    """`name` is for the command line, `label` for tables; `kind` is "rung", "peer" or "ceiling"."""

    name: str
    label: str
    kind: str
    start: Callable[[Inputs, Tensor], Runner]
    why_not: Callable[[Problem], str | None] = lambda problem: None
    needs_triton: bool = False


def differentiate(call: Callable[..., Tensor], leaves: list[Tensor], dy: Tensor, as_grads=Grads) -> Runner:
    """`call(*leaves)` by autograd: forward keeps the graph, backward walks it once."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return Runner(lambda: call(*leaves), lambda y: torch.autograd.grad(y, leaves, dy), as_grads)


def rung(stage: str, inputs: Inputs, dy: Tensor) -> Runner:
    """A rung, through the public function that users call."""
    i = inputs

    def call(x, topk_weights, w_gate_up, w_down):
        return moe(x, i.topk_ids, topk_weights, w_gate_up, w_down, stage=stage)

    return differentiate(call, [i.x, i.topk_weights, i.w_gate_up, i.w_down], dy)


def to_rows(x: Tensor, topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """rows (R, H) sorted by expert, the route (token * K + slot) of each row, and where each expert's rows end."""
    expert_of_row, route_of_row = topk_ids.flatten().sort(stable=True)
    experts = torch.arange(num_experts, device=x.device)
    ends = torch.searchsorted(expert_of_row, experts, right=True, out_int32=True)
    return x[route_of_row // topk_ids.shape[1]], route_of_row, ends


def to_tokens(out: Tensor, topk_weights: Tensor, route_of_row: Tensor, x: Tensor) -> Tensor:
    """out (R, H) times its router weight, in fp32 and rounded, then added up for each token."""
    weighted = (out * topk_weights.flatten()[route_of_row][:, None]).to(x.dtype)
    return torch.zeros_like(x).index_add(0, route_of_row // topk_weights.shape[1], weighted)


def unfused(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
    """The layer as trainers write it in plain torch, with gate and up stacked in one grouped GEMM."""
    rows, route_of_row, ends = to_rows(x, topk_ids, len(w_down))
    gate, up = F.grouped_mm(rows, w_gate_up.flatten(1, 2).mT, offs=ends).chunk(2, dim=-1)
    out = F.grouped_mm(F.silu(gate) * up, w_down.mT, offs=ends)
    return to_tokens(out, topk_weights, route_of_row, x)


def unfused_apart(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor
) -> Tensor:
    """The same with gate and up as two parameters (E, I, H) and two GEMMs, which is how most trainers keep them."""
    rows, route_of_row, ends = to_rows(x, topk_ids, len(w_down))
    gate, up = F.grouped_mm(rows, w_gate.mT, offs=ends), F.grouped_mm(rows, w_up.mT, offs=ends)
    out = F.grouped_mm(F.silu(gate) * up, w_down.mT, offs=ends)
    return to_tokens(out, topk_weights, route_of_row, x)


def plain_torch(compiled: bool, inputs: Inputs, dy: Tensor) -> Runner:
    """`unfused` by autograd."""
    i, layer = inputs, compile_for(inputs.x.device)(unfused) if compiled else unfused

    def call(x, topk_weights, w_gate_up, w_down):
        return layer(x, i.topk_ids, topk_weights, w_gate_up, w_down)

    return differentiate(call, [i.x, i.topk_weights, i.w_gate_up, i.w_down], dy)


def plain_torch_apart(compiled: bool, inputs: Inputs, dy: Tensor) -> Runner:
    """`unfused_apart` by autograd."""
    i, layer = inputs, compile_for(inputs.x.device)(unfused_apart) if compiled else unfused_apart

    def call(x, topk_weights, w_gate, w_up, w_down):
        return layer(x, i.topk_ids, topk_weights, w_gate, w_up, w_down)

    def as_grads(dx, dtopk_weights, dw_gate, dw_up, dw_down):
        return Grads(dx, dtopk_weights, torch.stack([dw_gate, dw_up], 1), dw_down)

    w_gate, w_up = (w.contiguous() for w in i.w_gate_up.unbind(1))
    return differentiate(call, [i.x, i.topk_weights, w_gate, w_up, i.w_down], dy, as_grads)


def transformers(compiled: bool, inputs: Inputs, dy: Tensor) -> Runner:
    """The experts of Hugging Face's Qwen3-MoE with experts_implementation="grouped_mm".

    Its router hands weights on in x's dtype, so that is what the experts get here too.
    """
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    i, p = inputs, inputs.problem()
    config = Qwen3MoeConfig(
        hidden_size=p.H,
        moe_intermediate_size=p.I,
        num_experts=p.E,
        num_experts_per_tok=p.K,
        experts_implementation="grouped_mm",
    )
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(i.w_gate_up.flatten(1, 2))
    experts.down_proj = torch.nn.Parameter(i.w_down)
    layer = compile_for(i.x.device)(experts) if compiled else experts
    x, topk_weights = (t.detach().requires_grad_() for t in (i.x, i.topk_weights))
    leaves = [x, topk_weights, experts.gate_up_proj, experts.down_proj]

    def as_grads(dx, dtopk_weights, dgate_up_proj, ddown_proj):
        return Grads(dx, dtopk_weights, dgate_up_proj.unflatten(1, (2, p.I)), ddown_proj)

    return Runner(
        lambda: layer(x, i.topk_ids, topk_weights.to(x.dtype)),
        lambda y: torch.autograd.grad(y, leaves, dy),
        as_grads,
    )


def dense_gemms(inputs: Inputs, dy: Tensor) -> Runner:
    """The products of the layer if all rows had one expert: two in forward, four in backward, and nothing else.

    It is no layer. It is what the vendor's library needs for the same flops: the time to come close to.
    """
    i, p = inputs, inputs.problem()
    rows, dy_rows = i.x.repeat(p.K, 1), dy.repeat(p.K, 1)
    w_gate_up, w_down = i.w_gate_up[0].flatten(0, 1), i.w_down[0]
    dpre = pre = rows @ w_gate_up.mT
    act = pre[:, : p.I].contiguous()

    def forward() -> Tensor:
        _ = rows @ w_gate_up.mT
        return act @ w_down.mT

    def backward(_: Tensor) -> tuple[Tensor, ...]:
        return dy_rows @ w_down, dy_rows.mT @ act, dpre @ w_gate_up, dpre.mT @ rows

    return Runner(forward, backward, as_grads=None)


def compile_for(device: torch.device) -> Callable:
    """torch.compile as people use it on a GPU. On a CPU, where only the machinery is tried, without a C++ compiler."""
    return partial(
        torch.compile, fullgraph=True, dynamic=False, backend="inductor" if device.type == "cuda" else "aot_eager"
    )


def transformers_are_missing(problem: Problem) -> str | None:
    """Why there are no Hugging Face experts here, if so."""
    return None if find_spec("transformers") else "transformers is not installed: pip install transformers"


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        *(
            Contestant(r.name, f"mega_moe, {r.name}", "rung", partial(rung, r.name), r.why_not, r.needs_triton)
            for r in LADDER
        ),
        Contestant("torch", "plain torch, eager", "peer", partial(plain_torch, False)),
        Contestant("torch-compiled", "plain torch, torch.compile", "peer", partial(plain_torch, True)),
        Contestant("torch-apart", "plain torch, gate and up apart, eager", "peer", partial(plain_torch_apart, False)),
        Contestant(
            "torch-apart-compiled",
            "plain torch, gate and up apart, torch.compile",
            "peer",
            partial(plain_torch_apart, True),
        ),
        Contestant(
            "transformers",
            "Hugging Face grouped_mm, eager",
            "peer",
            partial(transformers, False),
            transformers_are_missing,
        ),
        Contestant(
            "transformers-compiled",
            "Hugging Face grouped_mm, torch.compile",
            "peer",
            partial(transformers, True),
            transformers_are_missing,
        ),
        Contestant("cublas", "dense GEMMs of the same flops", "ceiling", dense_gemms),
    )
}
"""All of them by name, in the order in which tables show them."""
