"""The one bridge to autograd, the same for every stage: two custom operators, forward and backward.

A custom operator is opaque to torch.compile and to activation checkpointing: they see its shapes (the fakes below) and
call it as it is. So nothing in here or below is traced, and checks that read values or ask for Triton stand here.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from .registry import stage as rung_of
from .shapes import Inputs, Need, Saved


@torch.library.custom_op("mega_moe::forward", mutates_args=())
def forward(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    stage: str,
    swiglu_limit: float | None,
    save: str,
    heap: int,
    tokens_per_rank: list[int] | None,
    check_ids: bool,
) -> tuple[Tensor, list[Tensor]]:
    """y (T, H), and what backward needs as a flat list (`Saved.tensors`)."""
    inputs = Inputs(x, topk_ids, topk_weights, w_gate_up, w_down)
    problem = inputs.problem(swiglu_limit, save, heap, tuple(tokens_per_rank or ()))
    rung = rung_of(stage)
    if reason := rung.why_not(problem):
        raise RuntimeError(reason)
    if check_ids or not x.is_cuda:
        refuse_ids_outside(topk_ids, problem.E)
    with on_device_of(x), torch.autocast(x.device.type, enabled=False):
        y, saved = rung.forward(problem, inputs)
    return y, saved.tensors()


@forward.register_fake
def _(x, topk_ids, topk_weights, w_gate_up, w_down, stage, swiglu_limit, save, heap, tokens_per_rank, check_ids):
    (T, H), K, (E, _, I, _) = x.shape, topk_ids.shape[1], w_gate_up.shape
    index = lambda *shape: x.new_empty(shape, dtype=torch.int32)
    plan = [index(E + 1), index(T * K), index(T * K), index(T, K)]
    pre = [x.new_empty(T * K, 2, I)] if save == "pre" else []
    return x.new_empty(T, H), plan + pre


@torch.library.custom_op("mega_moe::backward", mutates_args=())
def backward(
    dy: Tensor,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    saved: list[Tensor],
    stage: str,
    swiglu_limit: float | None,
    save: str,
    heap: int,
    tokens_per_rank: list[int] | None,
    need: list[bool],
) -> list[Tensor]:
    """The needed gradients, in the order dx, dtopk_weights, dw_gate_up, dw_down."""
    inputs = Inputs(x, topk_ids, topk_weights, w_gate_up, w_down)
    problem = inputs.problem(swiglu_limit, save, heap, tuple(tokens_per_rank or ()))
    with on_device_of(x), torch.autocast(x.device.type, enabled=False):
        grads = rung_of(stage).backward(problem, inputs, Saved.of(saved), dy, Need(*need))
    return grads.tensors()


@backward.register_fake
def _(dy, x, topk_ids, topk_weights, w_gate_up, w_down, saved, stage, swiglu_limit, save, heap, tokens_per_rank, need):
    inputs = (x, topk_weights, w_gate_up, w_down)
    return [t.new_empty(t.shape) for t, needed in zip(inputs, need, strict=True) if needed]


def keep(ctx, inputs, output):
    """Save for backward: the five inputs and what forward kept."""
    *tensors, ctx.stage, ctx.swiglu_limit, ctx.save, ctx.heap, ctx.tokens_per_rank, _ = inputs
    _, saved = output
    ctx.save_for_backward(*tensors, *saved)
    ctx.set_materialize_grads(False)  # else torch fills zeros of pre's size, the gradient of a result nobody sees


def differentiate(ctx, dy, _):
    """One call for all four gradients; None for those that nobody asked for, and where y has no gradient."""
    if dy is None:
        return (None,) * 11
    tensors = ctx.saved_tensors  # read once: checkpointing hands them out once
    inputs, saved = tensors[:5], list(tensors[5:])
    x, _, *weights = ctx.needs_input_grad[:5]
    need = [x, *weights]
    facts = (ctx.stage, ctx.swiglu_limit, ctx.save, ctx.heap, ctx.tokens_per_rank)
    computed = iter(torch.ops.mega_moe.backward(dy, *inputs, saved, *facts, need))
    dx, *dweights = [next(computed) if needed else None for needed in need]
    return dx, None, *dweights, *(None,) * 6


def refuse(ctx, *_):
    """The backward of backward."""
    raise RuntimeError(
        "moe is differentiable once, on every stage. For second derivatives call the plain torch code of "
        'stage="reference" itself, mega_moe.reference.forward(...), which autograd can follow as often as you like.'
    )


forward.register_autograd(differentiate, setup_context=keep)
backward.register_autograd(refuse)


def refuse_ids_outside(topk_ids: Tensor, num_experts: int) -> None:
    """Raise ValueError if an id is neither -1 nor an expert. Reads the ids on the host."""
    outside = (topk_ids < -1) | (topk_ids >= num_experts)
    if outside.any():
        token, slot = outside.nonzero()[0].tolist()
        raise ValueError(
            f"topk_ids[{token}, {slot}] is {topk_ids[token, slot].item()}: ids are 0 .. {num_experts - 1}, or -1 for a "
            "masked route"
        )


def on_device_of(t: Tensor):
    """Launch on the tensor's own GPU, whatever the current one is (Triton launches on the current device)."""
    return torch.cuda.device_of(t) if t.is_cuda else nullcontext()
