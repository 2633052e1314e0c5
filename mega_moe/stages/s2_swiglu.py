"""swiglu: SwiGLU and its backward happen in the epilogue of the GEMM that makes their operand.

New since grouped: gate and up of the same columns are multiplied by one program, so act is computed while both are in
registers, and two passes over pre are gone. In backward the same is done to dact, which never reaches memory: its tile
becomes dpre, weighted act and a part of the router weights' gradient where it was made. pre alone is still written, by
forward for backward: recomputing it there repeats the larger of the two products (save="inputs" does so).
"""

from torch import Tensor

from ..kernels import blocks
from ..kernels.combine import combine, dispatch_backward
from ..kernels.dispatch import dispatch
from ..kernels.fused_swiglu import dact_swiglu, gate_up_swiglu
from ..kernels.grouped_gemm import grouped_gemm, weight_grad
from ..kernels.plan import plan as make_plan
from ..kernels.weights import readable
from ..shapes import Grads, Inputs, Need, Plan, Problem, Saved

# step        forward         backward
# dispatch    dispatch        dispatch_backward
# gate_up     gate_up_swiglu  grouped_gemm, weight_grad
# swiglu      gate_up_swiglu  dact_swiglu
# down        grouped_gemm    dact_swiglu, weight_grad
# combine     combine         dispatch (dy goes to rows as x does)


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs."""
    plan = make_plan(inputs.topk_ids, problem.E)
    pre, act = gate_up(problem, inputs, plan, pre=problem.save == "pre")
    out = grouped_gemm(act, readable(inputs.w_down), plan)
    y = combine(out, inputs.topk_weights, plan)
    return y, Saved(plan, pre)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """The needed gradients; dact carries no router weight (see reference/backward.py)."""
    plan, pre = saved.plan, saved.pre
    dx = dw_gate_up = dw_down = None

    if pre is None:
        pre, _ = gate_up(problem, inputs, plan, act=False)
    dy_rows = dispatch(dy, plan)
    dpre, weighted_act, dtopk_weights = dact_swiglu(
        dy_rows, readable(inputs.w_down), pre, inputs.topk_weights, plan, problem.swiglu_limit, need
    )
    del pre
    if need.dw_down:
        dw_down = weight_grad(dy_rows, weighted_act, plan)
    del dy_rows, weighted_act
    if need.dx:
        drows = grouped_gemm(dpre.flatten(1), readable(inputs.w_gate_up).mT, plan)
        dx = dispatch_backward(drows, plan)
        del drows
    if need.dw_gate_up:
        dw_gate_up = weight_grad(dpre.flatten(1), dispatch(inputs.x, plan), plan).view_as(inputs.w_gate_up)
    return Grads(dx, dtopk_weights, dw_gate_up, dw_down)


def gate_up(
    problem: Problem, inputs: Inputs, plan: Plan, pre: bool = True, act: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """pre (R, 2, I) and act (R, I) as wanted: forward stores both, or act alone; to recompute, pre alone."""
    rows = dispatch(inputs.x, plan)
    return gate_up_swiglu(rows, readable(inputs.w_gate_up), plan, problem.swiglu_limit, pre, act)


def why_not(problem: Problem) -> str | None:
    """None: any sizes, on any GPU that Triton compiles for."""
    return None


def note(problem: Problem) -> str | None:
    """Whether the block sizes were measured for this device."""
    return blocks.note()
