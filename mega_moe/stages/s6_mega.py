"""mega: all steps of a direction in one launch, tile by tile from one schedule.

New since persistent: launches end, and each end is a line that the whole GPU has to cross together. Here one launch
draws the tiles of every step from one table; a tile waits for the tiles that make what it reads, and for nothing else.
The schedule runs one group of experts behind another, so that a tile's wait is over before it is drawn. Backward's sums
over slots are woven between the weight gradients, which need nobody.
"""

from torch import Tensor

from ..kernels import blocks
from ..kernels.meet import meet
from ..kernels.mega import mega_backward, mega_forward, parts_of_weight
from ..kernels.schedule import backward_work, forward_work, plan_and_schedule, schedule
from ..shapes import Grads, Inputs, Need, Problem, Saved

# step        forward         backward
# dispatch    mega_forward    mega_backward
# gate_up     mega_forward    mega_backward
# swiglu      mega_forward    mega_backward
# down        mega_forward    mega_backward
# combine     mega_forward    mega_backward


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs."""
    tiles, memory = blocks.mega_for(problem), None
    work = forward_work(problem, tiles)
    if problem.heap:
        memory, plan, tickets = meet(problem, inputs, None, work, parts_of_weight(problem, tiles))
    else:
        plan, tickets = plan_and_schedule(inputs.topk_ids, problem.E, work)
    y, pre = mega_forward(problem, inputs, plan, tickets, tiles, memory)
    return y, Saved(plan, pre)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """The needed gradients; dact carries no router weight (see reference/backward.py)."""
    plan, pre = saved
    tiles, memory = blocks.mega_for(problem), None
    work = backward_work(problem, tiles, need, recompute=pre is None)
    if problem.heap:
        memory, _, tickets = meet(problem, inputs, dy, work, parts_of_weight(problem, tiles))
    else:
        tickets = schedule(plan, work)
    return mega_backward(problem, inputs, plan, pre, dy, need, tickets, tiles, memory)


def why_not(problem: Problem) -> str | None:
    """Any sizes, on any GPU that Triton compiles for; but some processors must be left to work on, and rows must go
    through heaps."""
    if problem.by_all_to_all:
        return 'stage "mega" exchanges rows inside its launch, through heaps: with heap="all_to_all" use stage="ranks".'
    return blocks.why_not(problem)


def note(problem: Problem) -> str | None:
    """Whether the block sizes were measured for this device."""
    return blocks.note()
