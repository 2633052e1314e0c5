"""mega: all steps of a direction in one launch, tile by tile from one schedule.

New since persistent: launches end, and each end is a line that the whole GPU has to cross together. Here one launch
draws the tiles of every step from one table; a tile waits for the tiles that make what it reads, and for nothing else.
The schedule runs one group of experts behind another, so that a tile's wait is over before it is drawn. Backward's sums
over slots are woven between the weight gradients, which need nobody.

In 8 bits tokens and weights are quantised before that launch, each in one of its own, and what lies between products in
it. A weight gradient's tokens are quantised in it too, for they are cut into blocks where experts begin.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..kernels import blocks
from ..kernels.meet import meet
from ..kernels.mega import mega_backward, mega_forward, parts_of_weight
from ..kernels.scaled_mega import scaled_mega_backward, scaled_mega_forward
from ..kernels.schedule import backward_work, forward_work, plan_and_schedule, schedule
from ..shapes import Grads, Inputs, Need, Problem, Saved

# step        forward         backward
# dispatch    mega_forward    mega_backward
# gate_up     mega_forward    mega_backward
# swiglu      mega_forward    mega_backward
# down        mega_forward    mega_backward
# combine     mega_forward    mega_backward


class OneLaunch(NamedTuple):
    """The launch of each direction, and its tiles."""

    forward: Callable
    backward: Callable
    tiles: Callable


AS_IS = OneLaunch(mega_forward, mega_backward, blocks.mega_for)
FP8 = OneLaunch(scaled_mega_forward, scaled_mega_backward, blocks.mega_fp8_for)
LAUNCHES = {"bf16": (AS_IS, AS_IS), "fp8": (FP8, FP8), "fp8_bwd": (AS_IS, FP8)}  # of forward, of backward


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs."""
    of, of_backward = LAUNCHES[problem.precision]
    tiles, memory, call = of.tiles(problem), None, None
    work = forward_work(problem, tiles)
    if problem.heap:
        parts = parts_of_weight(problem, of_backward.tiles(problem))  # backward's, which uses the same heaps
        memory, plan, tickets = meet(problem, inputs, None, work, parts)
        call = memory.of_call
    else:
        plan, tickets = plan_and_schedule(inputs.topk_ids, problem.E, work)
    y, pre = of.forward(problem, inputs, plan, tickets, tiles, memory)
    return y, Saved(plan, pre, call)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """The needed gradients; dact carries no router weight (see reference/backward.py)."""
    _, of = LAUNCHES[problem.precision]
    plan, pre, call = saved
    tiles, memory = of.tiles(problem), None
    work = backward_work(problem, tiles, need, recompute=pre is None)
    if problem.heap:
        memory, _, tickets = meet(problem, inputs, dy, work, parts_of_weight(problem, tiles), call)
    else:
        tickets = schedule(plan, work)
    return of.backward(problem, inputs, plan, pre, dy, need, tickets, tiles, memory)


def why_not(problem: Problem) -> str | None:
    """Any sizes, on any GPU that Triton compiles for, in 8 bits on those that multiply them; but some processors must
    be left to work on, and rows must go through heaps."""
    if problem.by_all_to_all:
        return 'stage "mega" exchanges rows inside its launch, through heaps: with heap="all_to_all" use stage="ranks".'
    return blocks.why_not(problem) or (blocks.why_not_fp8() if FP8 in LAUNCHES[problem.precision] else None)


def note(problem: Problem) -> str | None:
    """Whether the block sizes were measured for this device."""
    return blocks.fp8_note() if FP8 in LAUNCHES[problem.precision] else blocks.note()
