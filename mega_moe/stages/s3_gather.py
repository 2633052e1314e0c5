"""gather: no permuted copy of x or dy is ever made, and results go straight to the slots they belong to.

New since swiglu: dispatch has no kernel of its own. A GEMM that needs the rows of an expert loads the tokens they are
copies of from where these lie, in both directions, and along the contraction of the weight gradients too. The rows that
come out, down's in forward and dx's in backward, are stored by slot, (T, K, H), so that combine reads a token's K rows
side by side. Those slots are the one tensor of size R*H that is left, and in backward it is gone before the weights'
gradients, the largest things there are, are made.
"""

from torch import Tensor

from ..kernels import blocks
from ..kernels.combine import sum_slots
from ..kernels.gathered import gathered_dact, gathered_gate_up, gathered_weight_grad, slot_gemm
from ..kernels.plan import plan as make_plan
from ..kernels.weights import readable
from ..shapes import Grads, Inputs, Need, Plan, Problem, Saved

# step        forward           backward
# dispatch    gathered_gate_up  sum_slots
# gate_up     gathered_gate_up  slot_gemm, gathered_weight_grad
# swiglu      gathered_gate_up  gathered_dact
# down        slot_gemm         gathered_dact, gathered_weight_grad
# combine     sum_slots         gathered_dact, gathered_weight_grad


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs."""
    plan = make_plan(inputs.topk_ids, problem.E)
    pre, act = gate_up(problem, inputs, plan, pre=problem.save == "pre")
    slots = slot_gemm(act, readable(inputs.w_down), plan)
    y = sum_slots(slots, inputs.topk_weights, plan)
    return y, Saved(plan, pre)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """The needed gradients; dact carries no router weight (see reference/backward.py)."""
    plan, pre = saved.plan, saved.pre
    dx = dw_gate_up = dw_down = None

    if pre is None:
        pre, _ = gate_up(problem, inputs, plan, act=False)
    dpre, weighted_act, dtopk_weights = gathered_dact(
        dy, readable(inputs.w_down), pre, inputs.topk_weights, plan, problem.swiglu_limit, need
    )
    del pre
    if need.dx:
        slots = slot_gemm(dpre.flatten(1), readable(inputs.w_gate_up).mT, plan)
        dx = sum_slots(slots, None, plan)
        del slots
    if need.dw_gate_up:
        dw_gate_up = inputs.w_gate_up.new_empty(inputs.w_gate_up.shape)
        gathered_weight_grad(dpre.flatten(1), inputs.x, plan, dw_gate_up.flatten(1, 2))
    del dpre
    if need.dw_down:
        dw_down = inputs.w_down.new_empty(inputs.w_down.shape)
        gathered_weight_grad(weighted_act, dy, plan, dw_down.mT)
    return Grads(dx, dtopk_weights, dw_gate_up, dw_down)


def gate_up(
    problem: Problem, inputs: Inputs, plan: Plan, pre: bool = True, act: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """pre (R, 2, I) and act (R, I) as wanted: forward stores both, or act alone; to recompute, pre alone."""
    return gathered_gate_up(inputs.x, readable(inputs.w_gate_up), plan, problem.swiglu_limit, pre, act)


def why_not(problem: Problem) -> str | None:
    """None: any sizes, on any GPU that Triton compiles for."""
    return None


def note(problem: Problem) -> str | None:
    """Whether the block sizes were measured for this device."""
    return blocks.note()
