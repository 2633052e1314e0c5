"""warp: the same launch, in which some warps load and others multiply.

New since mega: there every warp of a program does all of a tile's work in turn, and while it stores one tile nobody
loads the next. Here warps have roles. A producer draws tickets and loads, without ever looking at a number it loads;
two consumers multiply what comes and store it. Between them is a ring of stages in shared memory, in which the producer
runs ahead, from one tile into the next. What a consumer has stored is signalled only while it multiplies its next tile.

It is written in Gluon, below Triton, for one GPU architecture (sm_90). Forward alone so far: backward is mega's launch,
which reads the same plan and the same saved tensors.
"""

import torch
from torch import Tensor

from ..kernels import blocks
from ..kernels.meet import meet
from ..kernels.mega import mega_backward, parts_of_weight
from ..kernels.schedule import backward_work, plan_and_schedule, schedule
from ..kernels.warp import warp_forward, warp_work
from ..shapes import Grads, Inputs, Need, Problem, Saved

# step        forward         backward
# dispatch    warp_forward    mega_backward
# gate_up     warp_forward    mega_backward
# swiglu      warp_forward    mega_backward
# down        warp_forward    mega_backward
# combine     warp_forward    mega_backward


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs."""
    tiles, memory, call = blocks.warp_for(problem), None, None
    work = warp_work(problem, tiles)
    if problem.heap:
        parts = parts_of_weight(problem, blocks.mega_for(problem))  # backward's, which uses the same heaps
        memory, plan, tickets = meet(problem, inputs, None, work, parts)
        call = memory.of_call
    else:
        plan, tickets = plan_and_schedule(inputs.topk_ids, problem.E, work)
    y, pre = warp_forward(problem, inputs, plan, tickets, tiles, memory)
    return y, Saved(plan, pre, call)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """The needed gradients; dact carries no router weight (see reference/backward.py)."""
    plan, pre, call = saved
    tiles, memory = blocks.mega_for(problem), None
    work = backward_work(problem, tiles, need, recompute=pre is None)
    if problem.heap:
        memory, _, tickets = meet(problem, inputs, dy, work, parts_of_weight(problem, tiles), call)
    else:
        tickets = schedule(plan, work)
    return mega_backward(problem, inputs, plan, pre, dy, need, tickets, tiles, memory)


def why_not(problem: Problem) -> str | None:
    """Any sizes, in bf16 and fp16, on sm_90; but some processors must be left to work on, and rows must go through
    heaps."""
    if problem.by_all_to_all:
        return 'stage "warp" exchanges rows inside its launch, through heaps: with heap="all_to_all" use stage="ranks".'
    if (name := blocks.target()) != "sm_90":
        return f'stage "warp" is written for NVIDIA\'s sm_90 (H100, H200), and this is {name}: use stage="mega".'
    if problem.dtype == torch.float32:
        return 'stage "warp" multiplies bf16 and fp16: for fp32 use stage="mega".'
    return blocks.why_not(problem)


def note(problem: Problem) -> str | None:
    """Nothing: where it runs, its tiles were measured."""
    return None
