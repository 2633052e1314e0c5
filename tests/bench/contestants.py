"""Who is measured: the rungs of the ladder, what people train with today, and the dense GEMMs that bound them all.

All of them get the same layer after its router, that is x, topk_ids, topk_weights and the weights, and all of them owe
y and all four gradients. Whatever a contestant makes of topk_ids (a sort, a plan) is inside its time; laying the
weights out as it wants them, and its gradients as ours, is not. Other libraries are imported only when they are run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from cases import DEVICE
from torch import Tensor

from mega_moe import LADDER, LocalHeaps, Problem, moe
from mega_moe.reference.quantize import E4M3_MAX, formats
from mega_moe.shapes import Grads, Inputs
from mega_moe.symmetric import shares

RANKS = {"cuda": 8, "cpu": 2}[DEVICE]  # of those over ranks: a node's, or as few as there can be


@dataclass(frozen=True)
class Runner:
    """A contestant with a layer in its hands, the weights in the form in which it keeps them."""

    forward: Callable[[], Tensor]  # y, with everything that backward needs
    backward: Callable[[Tensor], tuple[Tensor, ...]]  # from what forward returned, all gradients
    as_grads: Callable[..., Grads] | None = Grads  # the gradients in the shapes of the inputs; None: not this layer's
    heap_bytes: int = 0  # what the heaps of its ranks take, from its first call on; on a GPU


@dataclass(frozen=True)
class Contestant:
    """`name` is for the command line, `label` for tables; `kind` is "rung", "peer" or "ceiling"; `ranks` share the
    tokens and the experts, all of them in this process; `precision` is what its products read, and that of the problem
    which the functions get."""

    name: str
    label: str
    kind: str
    start: Callable[[Problem, Inputs, Tensor], Runner]
    why_not: Callable[[Problem], str | None] = lambda problem: None
    needs_triton: bool = False
    ranks: int = 1
    precision: str = "bf16"


def differentiate(call: Callable[..., Tensor], leaves: list[Tensor], dy: Tensor, as_grads=Grads) -> Runner:
    """`call(*leaves)` by autograd: forward keeps the graph, backward walks it once."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return Runner(lambda: call(*leaves), lambda y: torch.autograd.grad(y, leaves, dy), as_grads)


def rung(stage: str, problem: Problem, inputs: Inputs, dy: Tensor, **options) -> Runner:
    """A rung, through the public function that users call."""
    i = inputs
    options |= dict(stage=stage, save=problem.save, precision=problem.precision)

    def call(x, topk_weights, w_gate_up, w_down):
        return moe(x, i.topk_ids, topk_weights, w_gate_up, w_down, **options)

    return differentiate(call, [i.x, i.topk_weights, i.w_gate_up, i.w_down], dy)


def over_ranks(stage: str, problem: Problem, inputs: Inputs, dy: Tensor) -> Runner:
    """A rung over heaps of RANKS ranks, which hold equally many tokens. It saves what it saves on one rank."""
    tokens_per_rank = shares(problem.T, RANKS)
    heap = LocalHeaps(RANKS, max(tokens_per_rank))
    runner = rung(stage, problem, inputs, dy, heap=heap, tokens_per_rank=tokens_per_rank)
    if problem.device == "cpu":
        return runner
    before = torch.cuda.memory_allocated()
    runner.forward()  # takes the heaps, and gives everything else back
    return replace(runner, heap_bytes=torch.cuda.memory_allocated() - before)


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


def plain_torch(compiled: bool, problem: Problem, inputs: Inputs, dy: Tensor) -> Runner:
    """`unfused` by autograd."""
    i, layer = inputs, compile_for(inputs.x.device)(unfused) if compiled else unfused

    def call(x, topk_weights, w_gate_up, w_down):
        return layer(x, i.topk_ids, topk_weights, w_gate_up, w_down)

    return differentiate(call, [i.x, i.topk_weights, i.w_gate_up, i.w_down], dy)


def plain_torch_apart(compiled: bool, problem: Problem, inputs: Inputs, dy: Tensor) -> Runner:
    """`unfused_apart` by autograd."""
    i, layer = inputs, compile_for(inputs.x.device)(unfused_apart) if compiled else unfused_apart

    def call(x, topk_weights, w_gate, w_up, w_down):
        return layer(x, i.topk_ids, topk_weights, w_gate, w_up, w_down)

    def as_grads(dx, dtopk_weights, dw_gate, dw_up, dw_down):
        return Grads(dx, dtopk_weights, torch.stack([dw_gate, dw_up], 1), dw_down)

    w_gate, w_up = (w.contiguous() for w in i.w_gate_up.unbind(1))
    return differentiate(call, [i.x, i.topk_weights, w_gate, w_up, i.w_down], dy, as_grads)


def transformers(compiled: bool, problem: Problem, inputs: Inputs, dy: Tensor) -> Runner:
    """The experts of Hugging Face's Qwen3-MoE with experts_implementation="grouped_mm".

    Its router hands weights on in x's dtype, so that is what the experts get here too.
    """
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    i, p = inputs, problem
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


def liger(problem: Problem, inputs: Inputs, dy: Tensor) -> Runner:
    """Liger-Kernel's fused MoE, on its own layout of gate_up_proj, which is a checkpoint's (E, 2I, H)."""
    from liger_kernel.ops import LigerFusedMoEFunction

    i, p = inputs, problem

    def call(x, topk_weights, gate_up_proj, down_proj):
        return LigerFusedMoEFunction.apply(x, gate_up_proj, down_proj, i.topk_ids.int(), topk_weights)

    def as_grads(dx, dtopk_weights, dgate_up_proj, ddown_proj):
        return Grads(dx, dtopk_weights, dgate_up_proj.unflatten(1, (2, p.I)), ddown_proj)

    return differentiate(call, [i.x, i.topk_weights, i.w_gate_up.flatten(1, 2), i.w_down], dy, as_grads)


def moe_ops(problem: Problem, inputs: Inputs, dy: Tensor) -> Runner:
    """moe-ops' permute, grouped GEMMs and unpermute, with gate and up in one product.

    It has no SwiGLU of its own: torch.compile makes one kernel of each direction's.
    """
    from moe_ops import grouped_gemm, permute, unpermute
    from moe_ops.grouped_gemm_ops_sm90 import grouped_matmul_tma_kernel

    # Its tuner goes by the number of experts alone: without this a second shape would run on the first one's tiles.
    grouped_matmul_tma_kernel.cache.clear()
    i, p = inputs, problem

    @compile_for(i.x.device)
    def swiglu(pre):
        gate, up = pre.chunk(2, dim=-1)
        return F.silu(gate) * up

    def call(x, topk_weights, w_gate_up, w_down):
        rows, row_of_slot, row_start = permute(x, i.topk_ids.int(), E=p.E)
        out = grouped_gemm(swiglu(grouped_gemm(rows, w_gate_up, row_start)), w_down, row_start)
        return unpermute(out, row_of_slot, topk_weights, p.T, p.K)

    def as_grads(dx, dtopk_weights, dw_gate_up, dw_down):
        return Grads(dx, dtopk_weights, dw_gate_up.unflatten(1, (2, p.I)), dw_down)

    return differentiate(call, [i.x, i.topk_weights, i.w_gate_up.flatten(1, 2), i.w_down], dy, as_grads)


def sonic_moe(problem: Problem, inputs: Inputs, dy: Tensor) -> Runner:
    """SonicMoE's layer from behind its router on: what its `moe_TC_softmax_topk_layer` does with ids and scores.

    Its public entry for a routing made elsewhere allows any number of routes a token; this is its path for a fixed K.
    It keeps gate and up interleaved, (E, 2I, H) with gate in the even rows, and tunes itself on the first call.
    """
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import TC_topk_router_metadata_triton, _DownProjection, _UpProjection

    i, p = inputs, problem

    def call(x, topk_weights, w_interleaved, w_down):
        rows_of_expert, token_of_row, route_of_row, row_of_route = (x.new_empty(n, dtype=torch.int32) for n in sizes)
        row_start = x.new_empty(p.E + 1, dtype=torch.int32)
        TC_topk_router_metadata_triton(
            i.topk_ids.int(), p.E, rows_of_expert, row_start, token_of_row, route_of_row, row_of_route
        )
        plan = token_of_row, route_of_row, row_of_route, None, False  # no offsets of tokens: all have K routes
        act, pre = _UpProjection.apply(
            x, w_interleaved.permute(1, 2, 0), None, row_start, p.R, p.K, *plan, ActivationType.SWIGLU, False
        )
        return _DownProjection.apply(
            act, pre, w_down.permute(1, 2, 0), None, topk_weights, row_start, p.T, p.K, *plan, ActivationType.SWIGLU
        )

    def as_grads(dx, dtopk_weights, dw_interleaved, dw_down):
        return Grads(dx, dtopk_weights, dw_interleaved.unflatten(1, (p.I, 2)).transpose(1, 2), dw_down)

    sizes = p.E, p.R, p.R, p.R
    w_interleaved = i.w_gate_up.transpose(1, 2).flatten(1, 2)
    return differentiate(call, [i.x, i.topk_weights, w_interleaved, i.w_down], dy, as_grads)


def dense_gemms(problem: Problem, inputs: Inputs, dy: Tensor) -> Runner:
    """The products of the layer if all rows had one expert: two in forward, four in backward, and nothing else.

    It is no layer. It is what the vendor's library needs for the same flops: the time to come close to. In 8 bits too
    its operands are there before the clock starts, which a layer has to make.
    """
    i, p = inputs, problem
    rows, dy_rows = i.x.repeat(p.K, 1), dy.repeat(p.K, 1)
    w_gate_up, w_down = i.w_gate_up[0].flatten(0, 1), i.w_down[0]
    dpre = pre = rows @ w_gate_up.mT
    act = pre[:, : p.I].contiguous()

    of_forward, of_backward = (
        product if format.scale_of is None else product_of_codes for format in formats(p.precision)
    )
    forward = [of_forward(rows, w_gate_up.mT), of_forward(act, w_down.mT)]
    backward = [
        of_backward(dy_rows, w_down),
        of_backward(dy_rows.mT, act),
        of_backward(dpre, w_gate_up),
        of_backward(dpre.mT, rows),
    ]
    return Runner(lambda: [run() for run in forward][-1], lambda _: tuple(run() for run in backward), as_grads=None)


def product(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """a (M, C) @ b (C, N), ready to run."""
    return lambda: a @ b


def product_of_codes(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """The same of e4m3 codes, with one scale for each operand and sums as fast as the hardware makes them: the least
    that 8 bits can cost. The codes are laid out along C, as matrix units read them."""
    (a, scale_a), (b, scale_b) = codes(a.contiguous()), codes(b.mT.contiguous())
    # By the name that all versions have on a CPU too: F.scaled_mm came there later than on GPUs.
    return lambda: torch._scaled_mm(a, b.mT, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)


def codes(t: Tensor) -> tuple[Tensor, Tensor]:
    """t as e4m3 codes, and the scale (), fp32, that takes its largest magnitude to the largest code."""
    scale = t.abs().amax().float() / E4M3_MAX
    return (t / scale).to(torch.float8_e4m3fn), scale


def dense_why_not(problem: Problem) -> str | None:
    """Whether the vendor's library multiplies e4m3 here."""
    if problem.precision == "bf16" or problem.device == "cpu" or torch.cuda.get_device_capability() >= (8, 9):
        return None
    return "products of e4m3 need a GPU of compute capability 8.9 or above"


def compile_for(device: torch.device) -> Callable:
    """torch.compile as people use it on a GPU. On a CPU, where only the machinery is tried, without a C++ compiler."""
    return partial(
        torch.compile, fullgraph=True, dynamic=False, backend="inductor" if device.type == "cuda" else "aot_eager"
    )


def needs(module: str, package: str, capability: tuple[int, int] | None = None) -> Callable[[Problem], str | None]:
    """A why_not for an optional package: whether it is installed, and whether the GPU that it needs is here.

    capability: the least compute capability of an NVIDIA GPU that it runs on; None: it needs no GPU.
    """

    def why_not(problem: Problem) -> str | None:
        nvidia = problem.device == "cuda" and torch.version.cuda
        if capability and not (nvidia and torch.cuda.get_device_capability() >= capability):
            return f"{package} needs an NVIDIA GPU of compute capability {capability[0]}.{capability[1]} or above"
        return None if find_spec(module) else f"{package} is not installed: docs/measuring.md says how"

    return why_not


def named(name: str, precision: str) -> str:
    """What a contestant of that name is called in a precision."""
    return name if precision == "bf16" else f"{name}-{precision}"


def labelled(label: str, precision: str) -> str:
    """The same for its label."""
    return label if precision == "bf16" else f"{label}, {precision}"


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        *(
            Contestant(
                named(r.name, precision),
                labelled(f"mega_moe, {r.name}", precision),
                "rung",
                partial(rung, r.name),
                r.why_not,
                r.needs_triton,
                precision=precision,
            )
            for r in LADDER
            for precision in r.precisions
            # In 8 bits the reference is the measure, and slow; and ranks has persistent's products.
            if precision == "bf16" or (r.needs_triton and r.name != "ranks")
        ),
        *(
            Contestant(
                f"{r.name}-over-{RANKS}",
                f"mega_moe, {r.name} over {RANKS} ranks",
                "rung",
                partial(over_ranks, r.name),
                r.why_not,
                r.needs_triton,
                RANKS,
            )
            for r in LADDER
            if r.over_ranks
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
            needs("transformers", "transformers"),
        ),
        Contestant(
            "transformers-compiled",
            "Hugging Face grouped_mm, torch.compile",
            "peer",
            partial(transformers, True),
            needs("transformers", "transformers"),
        ),
        Contestant("liger", "Liger-Kernel, fused MoE", "peer", liger, needs("liger_kernel", "liger-kernel", (8, 0))),
        Contestant("moe-ops", "moe-ops, Triton", "peer", moe_ops, needs("moe_ops", "moe-ops", (8, 0))),
        Contestant("sonic-moe", "SonicMoE, CuTe", "peer", sonic_moe, needs("sonicmoe", "sonic-moe", (9, 0))),
        *(
            Contestant(
                named("cublas", precision),
                labelled("dense GEMMs of the same flops", precision),
                "ceiling",
                dense_gemms,
                dense_why_not,
                precision=precision,
            )
            for precision in ("bf16", "fp8", "fp8_bwd")
        ),
    )
}
"""All of them by name, in the order in which tables show them."""
