"""reference: plain torch, a loop over experts. Slow, and right: every other rung is held to it.

The whole layer stands in reference/forward.py and reference/backward.py; this recipe only fits it to the ladder. It
runs on any device and in float64, and it is the one rung that reads the routing on the host (an expert's rows are a
Python slice), so it neither captures in a CUDA graph nor hides its launches.
"""

from torch import Tensor
from torch.nn.functional import pad

from ..reference import Plan as ReferencePlan
from ..reference import Saved as ReferenceSaved
from ..reference import backward as reference_backward
from ..reference import forward as reference_forward
from ..reference.forward import dispatch, gate_up
from ..reference.quantize import formats
from ..shapes import Grads, Inputs, Need, Plan, Problem, Saved


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and what backward needs. The reference has live rows only; what all rungs share is padded to R."""
    y, saved = reference_forward(**vars(inputs), swiglu_limit=problem.swiglu_limit, precision=problem.precision)
    row_start, token_of_row, slot_of_row, row_of_slot = (t.int() for t in saved.plan)
    unused = (0, problem.R - len(token_of_row))
    plan = Plan(row_start, pad(token_of_row, unused, value=-1), pad(slot_of_row, unused, value=-1), row_of_slot)
    pre = pad(saved.pre, (0, 0, 0, 0, *unused)) if problem.save == "pre" else None
    return y, Saved(plan, pre)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """All four gradients by hand-derived formulas; those that nobody needs are dropped."""
    row_start, token_of_row, slot_of_row, row_of_slot = (t.long() for t in saved.plan)
    live = slice(row_start[-1])
    plan = ReferencePlan(row_start, token_of_row[live], slot_of_row[live], row_of_slot)
    if saved.pre is None:
        pre = gate_up(dispatch(inputs.x, plan), inputs.w_gate_up, plan, formats(problem.precision).forward)
    else:
        pre = saved.pre[live]
    weights = (inputs.topk_weights, inputs.w_gate_up, inputs.w_down)
    kept = ReferenceSaved(inputs.x, *weights, plan, pre, problem.swiglu_limit, problem.precision)
    grads = reference_backward(kept, dy)
    return Grads(**{name: grad for name, grad in grads._asdict().items() if getattr(need, name)})


def why_not(problem: Problem) -> str | None:
    """It runs wherever torch does."""
    return None


def note(problem: Problem) -> str | None:
    """It says what it is for."""
    return "loops over experts and reads the routing on the host: for checking, not for speed"
