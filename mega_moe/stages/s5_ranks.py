"""ranks: experts are split over ranks, and rows travel to them and back.

New since persistent: each rank holds some tokens and some experts. Before the products rows are pulled from the heaps
of the ranks that hold their tokens, and after them pushed into slots of these; what is between is persistent, on rows
that are tokens of their own. Exchange and products are launches apart: while rows travel, no matrix unit works.
"""

from torch import Tensor

from ..kernels import blocks
from ..kernels.exchange import as_tokens, combine_slots, pull, push
from ..kernels.meet import meet
from ..kernels.persistent import dact_swiglu, down, dx_slots, gate_up_swiglu, weight_grad
from ..kernels.tile_table import tile_table
from ..kernels.weights import readable
from ..shapes import Grads, Inputs, Need, Problem, Saved

# step        forward                     backward
# dispatch    meet, pull                  push, combine_slots
# gate_up     gate_up_swiglu              dx_slots, weight_grad
# swiglu      gate_up_swiglu              dact_swiglu
# down        down                        dact_swiglu, weight_grad
# combine     push, combine_slots         meet, pull


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs."""
    memory, plan, _ = meet(problem, inputs)
    rows, _ = pull("x", False, problem, memory, plan)
    own = as_tokens(plan)
    table = tile_table(own, blocks.persistent_for(problem))
    w_gate_up, limit = readable(inputs.w_gate_up), problem.swiglu_limit
    pre, act = gate_up_swiglu(rows, w_gate_up, own, table, limit, problem.save == "pre", True)
    del rows
    out = down(act, readable(inputs.w_down), own, table)
    push(out, None, problem, memory, plan)
    y = inputs.x.new_empty(problem.T, problem.H)
    combine_slots(y, None, inputs.topk_weights, problem, memory, plan)
    return y, Saved(plan, pre)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """The needed gradients; dact carries no router weight (see reference/backward.py)."""
    plan, pre = saved
    memory, *_ = meet(problem, inputs, dy)  # the plan is the one saved: the same routes make the same rows
    own = as_tokens(plan)
    table = tile_table(own, blocks.persistent_for(problem))
    w_gate_up, limit = readable(inputs.w_gate_up), problem.swiglu_limit
    dx = dtopk_weights = dw_gate_up = dw_down = None

    dy_rows, weight_of_row = pull("dy", True, problem, memory, plan)
    rows = pull("x", False, problem, memory, plan)[0] if pre is None or need.dw_gate_up else None
    if pre is None:
        pre, _ = gate_up_swiglu(rows, w_gate_up, own, table, limit, True, False)
    dpre, weighted_act, dweight_of_row = dact_swiglu(
        dy_rows, readable(inputs.w_down), pre, weight_of_row, own, table, limit, need
    )
    del pre
    drows = dx_slots(dpre, w_gate_up, own, table) if need.dx else None
    if need.dx or need.dtopk_weights:
        push(drows, dweight_of_row, problem, memory, plan)
        dx = inputs.x.new_empty(problem.T, problem.H) if need.dx else None
        dtopk_weights = inputs.topk_weights.new_empty(problem.T, problem.K) if need.dtopk_weights else None
        combine_slots(dx, dtopk_weights, None, problem, memory, plan)
    del drows
    if need.dw_gate_up:
        dw_gate_up = inputs.w_gate_up.new_empty(inputs.w_gate_up.shape)
        weight_grad(dpre, rows, table, "dw_gate_up", dw_gate_up.flatten(1, 2))
    if need.dw_down:
        dw_down = inputs.w_down.new_empty(inputs.w_down.shape)
        weight_grad(weighted_act, dy_rows, table, "dw_down", dw_down.mT)
    return Grads(dx, dtopk_weights, dw_gate_up, dw_down)


def why_not(problem: Problem) -> str | None:
    """None: any sizes, on any GPU that Triton compiles for."""
    return None


def note(problem: Problem) -> str | None:
    """Whether the block sizes were measured for this device and this layer."""
    return blocks.persistent_note(problem)
