"""The one bridge to autograd, the same for every stage: two custom operators, forward and backward.

A custom operator is opaque to torch.compile and to activation checkpointing: they see its shapes (the fakes below) and
call it as it is. So nothing in here or below is traced, and checks that read values or ask for Triton stand here.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from .registry import stage as rung_of
from .shapes import Inputs, Need, Problem, Saved
from .symmetric import heaps_of


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
    precision: str,
    num_reserved_sms: int,
    heap: int,
    tokens_per_rank: list[int] | None,
    check_ids: bool,
) -> tuple[Tensor, list[Tensor]]:
    """y (T, H), and what backward needs as a flat list (`Saved.tensors`)."""
    inputs = Inputs(x, topk_ids, topk_weights, w_gate_up, w_down)
    problem = problem_of(inputs, swiglu_limit, save, precision, num_reserved_sms, heap, tokens_per_rank)
    try:
        rung = rung_of(stage)
        if reason := rung.why_not(problem):
            raise RuntimeError(reason)
        if check_ids or not x.is_cuda:
            refuse_ids_outside(topk_ids, problem.E)
    except (RuntimeError, ValueError) as error:
        if heap:
            heaps_of(heap).refuse(str(error))
        raise
    with ready(x, heap):
        y, saved = rung.forward(problem, inputs)
    return y, saved.tensors()


@forward.register_fake
def _(x, topk_ids, topk_weights, w_gate_up, w_down, _stage, limit, save, precision, reserved, heap, tokens_per_rank, _):
    inputs = Inputs(x, topk_ids, topk_weights, w_gate_up, w_down)
    problem = problem_of(inputs, limit, save, precision, reserved, heap, tokens_per_rank)
    plan = [x.new_empty(shape, dtype=torch.int32) for shape in problem.plan_shapes()]
    call = [x.new_empty(1, dtype=torch.int32)] if heap else []
    pre = [x.new_empty(problem.R, 2, problem.I)] if save == "pre" else []
    return torch.empty_like(x, memory_format=torch.contiguous_format), plan + call + pre


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
    precision: str,
    num_reserved_sms: int,
    heap: int,
    tokens_per_rank: list[int] | None,
    need: list[bool],
) -> list[Tensor]:
    """The needed gradients, in the order dx, dtopk_weights, dw_gate_up, dw_down."""
    inputs = Inputs(x, topk_ids, topk_weights, w_gate_up, w_down)
    problem = problem_of(inputs, swiglu_limit, save, precision, num_reserved_sms, heap, tokens_per_rank)
    with ready(x, heap):
        grads = rung_of(stage).backward(problem, inputs, Saved.of(saved, problem), dy, to_compute(problem, need))
    return [grad for grad, needed in zip(vars(grads).values(), need, strict=True) if needed]


@backward.register_fake
def _(
    dy,
    x,
    topk_ids,
    topk_weights,
    w_gate_up,
    w_down,
    saved,
    _stage,
    _limit,
    _save,
    _precision,
    _reserved,
    _heap,
    _tokens,
    need,
):
    inputs = (x, topk_weights, w_gate_up, w_down)
    return [t.new_empty(t.shape) for t, needed in zip(inputs, need, strict=True) if needed]


def keep(ctx, inputs, output):
    """Save for backward: the five inputs and what forward kept."""
    tensors, (*ctx.facts, _) = inputs[:5], inputs[5:]
    _, saved = output
    ctx.save_for_backward(*tensors, *saved)
    ctx.set_materialize_grads(False)  # else torch fills zeros of pre's size, the gradient of a result nobody sees


def differentiate(ctx, dy, _):
    """One call for all four gradients; None for those that nobody asked for, and where y has no gradient."""
    if dy is None:
        return (None,) * 13
    tensors = ctx.saved_tensors  # read once: checkpointing hands them out once
    inputs, saved = tensors[:5], list(tensors[5:])
    x, _, *weights = ctx.needs_input_grad[:5]
    need = [x, *weights]
    computed = iter(torch.ops.mega_moe.backward(dy, *inputs, saved, *ctx.facts, need))
    dx, *dweights = [next(computed) if needed else None for needed in need]
    return dx, None, *dweights, *(None,) * 8


def refuse(ctx, *_):
    """The backward of backward."""
    raise RuntimeError(
        "moe is differentiable once, on every stage. For second derivatives call the plain torch code of "
        'stage="reference" itself, mega_moe.reference.forward(...), which autograd can follow as often as you like.'
    )


forward.register_autograd(differentiate, setup_context=keep)
backward.register_autograd(refuse)


def problem_of(
    inputs: Inputs,
    swiglu_limit: float | None,
    save: str,
    precision: str,
    num_reserved_sms: int,
    heap: int,
    tokens_per_rank: list[int] | None,
) -> Problem:
    """The facts of a call. Over heaps some are theirs."""
    facts = dict(swiglu_limit=swiglu_limit, save=save, precision=precision, num_reserved_sms=num_reserved_sms)
    if not heap:
        return inputs.problem(**facts)
    tokens = tuple(tokens_per_rank) if tokens_per_rank is not None else (inputs.x.shape[0],)
    return inputs.problem(**facts, heap=heap, tokens_per_rank=tokens, **heaps_of(heap).facts(inputs.topk_ids.shape[1]))


def to_compute(problem: Problem, need: list[bool]) -> Need:
    """The needed gradients; and those that travel between processes in any case, for a rank does not know what others
    need of it."""
    dx, dtopk_weights, *weights = need
    return Need(dx or problem.ranks > 0, dtopk_weights or problem.ranks > 0, *weights)


def refuse_ids_outside(topk_ids: Tensor, num_experts: int) -> None:
    """Raise ValueError if an id is neither -1 nor an expert. Reads the ids on the host."""
    outside = (topk_ids < -1) | (topk_ids >= num_experts)
    if outside.any():
        token, slot = outside.nonzero()[0].tolist()
        raise ValueError(
            f"topk_ids[{token}, {slot}] is {topk_ids[token, slot].item()}: ids are 0 .. {num_experts - 1}, or -1 for a "
            "masked route"
        )


@contextmanager
def ready(x: Tensor, heap: int) -> Iterator[None]:
    """Launch on x's own GPU, whatever the current one is (Triton launches on the current device), without autocast.
    Over heaps, raise if a call over them is known to have failed: an earlier one, or on a CPU this one."""
    check = heaps_of(heap).raise_if_failed if heap else lambda: None
    check()
    with torch.cuda.device_of(x) if x.is_cuda else nullcontext(), torch.autocast(x.device.type, enabled=False):
        yield
    check()
