"""persistent: resident programs draw tiles by ticket, and contiguous tiles are loaded by the copy engine.

New since gather: a launch starts one program a processor instead of one a tile. Where a tile begins was found out by
every program for itself, and is now looked up ahead, in a table that is made on the device once a direction; in a strip
of tiles the loads of one begin under the epilogue of the one before; a long expert's weight gradient could come last,
and now comes first. What the kernels hand to each other lies in whole blocks of rows, so that TMA can load it.

In 8 bits the steps are the same, and so are the launches (PRODUCTS names them) but for those that quantise: tokens
and weights before they are multiplied, in every call, so that no change of a weight is missed (but see kept.py); what
lies between products in the epilogue that makes it. Tokens' codes are laid out in blocks as well, so that TMA loads
them too. A weight gradient contracts over rows, for which its tokens are quantised once more.
"""

from torch import Tensor

from ..kernels import blocks
from ..kernels.combine import sum_slots
from ..kernels.plan import plan as make_plan
from ..kernels.products import PRODUCTS
from ..kernels.tile_table import TileTable, tile_table
from ..shapes import Grads, Inputs, Need, Plan, Problem, Saved

# step        forward         backward
# dispatch    gate_up_swiglu  sum_slots
# gate_up     gate_up_swiglu  dx_slots, weight_grad
# swiglu      gate_up_swiglu  dact_swiglu
# down        down            dact_swiglu, weight_grad
# combine     sum_slots       dact_swiglu, weight_grad


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs."""
    of, _ = PRODUCTS[problem.precision]
    plan = make_plan(inputs.topk_ids, problem.E)
    table = tile_table(plan, of.tiles(problem))
    pre, act = gate_up(problem, inputs, plan, table, pre=problem.save == "pre")
    slots = of.launches.down(act, of.weights(inputs.w_down), plan, table)
    y = sum_slots(slots, inputs.topk_weights, plan)
    return y, Saved(plan, pre)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """The needed gradients; dact carries no router weight (see reference/backward.py)."""
    of_forward, of = PRODUCTS[problem.precision]
    plan, pre = saved.plan, saved.pre
    table = tile_table(plan, of.tiles(problem))
    dx = dw_gate_up = dw_down = None

    if pre is None:
        as_before = table if of is of_forward else tile_table(plan, of_forward.tiles(problem))
        pre, _ = gate_up(problem, inputs, plan, as_before, act=False)
    w_down, limit = of.transposed(inputs.w_down), problem.swiglu_limit
    dpre, weighted_act, dtopk_weights = of.launches.dact_swiglu(
        of.rows(dy, table), w_down, pre, inputs.topk_weights, plan, table, limit, need
    )
    del pre, w_down
    if need.dx:
        slots = of.launches.dx_slots(dpre, of.transposed(inputs.w_gate_up), plan, table)
        dx = sum_slots(slots, None, plan)
        del slots
    if need.dw_gate_up:
        dw_gate_up = inputs.w_gate_up.new_empty(inputs.w_gate_up.shape)
        of.launches.weight_grad(dpre, of.columns(inputs.x, table), table, "dw_gate_up", dw_gate_up.flatten(1, 2))
    del dpre
    if need.dw_down:
        dw_down = inputs.w_down.new_empty(inputs.w_down.shape)
        of.launches.weight_grad(weighted_act, of.columns(dy, table), table, "dw_down", dw_down.mT)
    return Grads(dx, dtopk_weights, dw_gate_up, dw_down)


def gate_up(
    problem: Problem, inputs: Inputs, plan: Plan, table: TileTable, pre: bool = True, act: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """pre (R, 2, I) and act (rows in blocks, I) as wanted: forward stores both, or act alone; backward pre alone."""
    of, _ = PRODUCTS[problem.precision]
    x, w = of.rows(inputs.x, table), of.weights(inputs.w_gate_up)
    return of.launches.gate_up_swiglu(x, w, plan, table, problem.swiglu_limit, pre, act)


def why_not(problem: Problem) -> str | None:
    """Any sizes, on any GPU that Triton compiles for, in 8 bits on those that multiply them; but some processors must
    be left to work on."""
    _, of = PRODUCTS[problem.precision]  # backward's: none multiplies less than forward's
    return blocks.why_not(problem) or of.why_not()


def note(problem: Problem) -> str | None:
    """Whether the block sizes were measured for this device and this layer, and its products are the device's own."""
    _, of = PRODUCTS[problem.precision]
    return of.note(problem)
