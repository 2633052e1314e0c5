"""persistent: resident programs draw tiles by ticket, and contiguous tiles are loaded by the copy engine.

New since gather: a launch starts one program a processor instead of one a tile. Where a tile begins was found out by
every program for itself, and is now looked up ahead, in a table that is made on the device once a direction; in a strip
of tiles the loads of one begin under the epilogue of the one before; a long expert's weight gradient could come last,
and now comes first. What the kernels hand to each other lies in whole blocks of rows, so that TMA can load it.
"""

from torch import Tensor

from ..kernels import blocks
from ..kernels.combine import sum_slots
from ..kernels.persistent import dact_swiglu, down, dx_slots, gate_up_swiglu, weight_grad
from ..kernels.plan import plan as make_plan
from ..kernels.tile_table import TileTable, tile_table
from ..kernels.weights import readable
from ..shapes import Grads, Inputs, Need, Plan, Problem, Saved

# step        forward         backward
# dispatch    gate_up_swiglu  sum_slots
# gate_up     gate_up_swiglu  dx_slots, weight_grad
# swiglu      gate_up_swiglu  dact_swiglu
# down        down            dact_swiglu, weight_grad
# combine     sum_slots       dact_swiglu, weight_grad


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs."""
    plan = make_plan(inputs.topk_ids, problem.E)
    table = tile_table(plan, blocks.persistent_for(problem))
    pre, act = gate_up(problem, inputs, plan, table, pre=problem.save == "pre")
    slots = down(act, readable(inputs.w_down), plan, table)
    y = sum_slots(slots, inputs.topk_weights, plan)
    return y, Saved(plan, pre)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """The needed gradients; dact carries no router weight (see reference/backward.py)."""
    plan, pre = saved
    table = tile_table(plan, blocks.persistent_for(problem))
    dx = dw_gate_up = dw_down = None

    if pre is None:
        pre, _ = gate_up(problem, inputs, plan, table, act=False)
    dpre, weighted_act, dtopk_weights = dact_swiglu(
        dy, readable(inputs.w_down), pre, inputs.topk_weights, plan, table, problem.swiglu_limit, need
    )
    del pre
    if need.dx:
        slots = dx_slots(dpre, readable(inputs.w_gate_up), plan, table)
        dx = sum_slots(slots, None, plan)
        del slots
    if need.dw_gate_up:
        dw_gate_up = inputs.w_gate_up.new_empty(inputs.w_gate_up.shape)
        weight_grad(dpre, inputs.x, table, "dw_gate_up", dw_gate_up.flatten(1, 2))
    del dpre
    if need.dw_down:
        dw_down = inputs.w_down.new_empty(inputs.w_down.shape)
        weight_grad(weighted_act, dy, table, "dw_down", dw_down.mT)
    return Grads(dx, dtopk_weights, dw_gate_up, dw_down)


def gate_up(
    problem: Problem, inputs: Inputs, plan: Plan, table: TileTable, pre: bool = True, act: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """pre (R, 2, I) and act (rows in blocks, I) as wanted: forward stores both, or act alone; backward pre alone."""
    return gate_up_swiglu(inputs.x, readable(inputs.w_gate_up), plan, table, problem.swiglu_limit, pre, act)


def why_not(problem: Problem) -> str | None:
    """Any sizes, on any GPU that Triton compiles for; but some processors must be left to work on."""
    return blocks.why_not(problem)


def note(problem: Problem) -> str | None:
    """Whether the block sizes were measured for this device and this layer."""
    return blocks.persistent_note(problem)
