"""grouped: one launch multiplies the rows of all experts.

New since reference: the loop over experts is gone. The plan of rows is made on the device, dispatch copies tokens into
the order of their experts, and a grouped GEMM finds out by itself which expert a block of rows belongs to. The host
launches the same fifteen kernels and one memset whatever the routing says (two kernels more where backward makes pre
again), and never waits. Every step is still a kernel of its own, and every tensor between two steps goes through
memory: that is what the rungs above take away.
"""

from torch import Tensor

from ..kernels import blocks
from ..kernels.combine import combine, dispatch_backward
from ..kernels.dispatch import dispatch
from ..kernels.grouped_gemm import grouped_gemm, weight_grad
from ..kernels.plan import plan as make_plan
from ..kernels.swiglu import swiglu, swiglu_backward
from ..kernels.weights import readable
from ..shapes import Grads, Inputs, Need, Plan, Problem, Saved

# step        forward         backward
# dispatch    dispatch        dispatch_backward
# gate_up     grouped_gemm    grouped_gemm, weight_grad
# swiglu      swiglu          swiglu_backward
# down        grouped_gemm    grouped_gemm, weight_grad
# combine     combine         dispatch (dy goes to rows as x does)


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs."""
    plan = make_plan(inputs.topk_ids, problem.E)
    pre = gate_up(inputs, plan)
    act = swiglu(pre, plan, problem.swiglu_limit)
    saved = Saved(plan, pre if problem.save == "pre" else None)
    del pre
    out = grouped_gemm(act, readable(inputs.w_down), plan)
    y = combine(out, inputs.topk_weights, plan)
    return y, saved


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """The needed gradients; dact carries no router weight (see reference/backward.py)."""
    plan, pre = saved.plan, saved.pre
    dx = dw_gate_up = dw_down = None

    if pre is None:
        pre = gate_up(inputs, plan)
    dy_rows = dispatch(dy, plan)
    dact = grouped_gemm(dy_rows, readable(inputs.w_down).mT, plan) if need.dact else None
    dpre, weighted_act, dtopk_weights = swiglu_backward(
        dact, pre, inputs.topk_weights, plan, problem.swiglu_limit, need
    )
    if need.dw_down:
        dw_down = weight_grad(dy_rows, weighted_act, plan)
    del dy_rows, pre, dact, weighted_act
    if need.dx:
        drows = grouped_gemm(dpre.flatten(1), readable(inputs.w_gate_up).mT, plan)
        dx = dispatch_backward(drows, plan)
        del drows
    if need.dw_gate_up:
        dw_gate_up = weight_grad(dpre.flatten(1), dispatch(inputs.x, plan), plan).view_as(inputs.w_gate_up)
    return Grads(dx, dtopk_weights, dw_gate_up, dw_down)


def gate_up(inputs: Inputs, plan: Plan) -> Tensor:
    """pre (R, 2, I): gate and up are one matrix of 2I rows. In backward again, where forward did not save it."""
    return grouped_gemm(dispatch(inputs.x, plan), readable(inputs.w_gate_up), plan).unflatten(1, (2, -1))


def why_not(problem: Problem) -> str | None:
    """None: any sizes, on any GPU that Triton compiles for."""
    return None


def note(problem: Problem) -> str | None:
    """Whether the block sizes were measured for this device."""
    return blocks.note()
