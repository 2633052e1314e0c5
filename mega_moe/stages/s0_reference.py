"""reference: plain torch, a loop over experts. Slow, and right: every other rung is held to it.

The whole layer stands in reference/forward.py and reference/backward.py; this recipe only fits it to the ladder. It runs
on any device and in float64, and it is the one rung that reads the routing on the host (an expert's rows are a Python
slice), so it neither captures in a CUDA graph nor hides its launches.
"""

from torch import Tensor

from ..reference import Saved as ReferenceSaved
from ..reference import backward as reference_backward
from ..reference import forward as reference_forward
from ..reference import plan as reference_plan
from ..routing import plan
from ..shapes import Grads, Inputs, Need, Problem, Saved


def forward(problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
    """y (T, H), and the plan and pre in the shapes that all rungs share."""
    y, saved = reference_forward(
        inputs.x, inputs.topk_ids, inputs.topk_weights, inputs.w_gate_up, inputs.w_down, problem.swiglu_limit
    )
    pre = inputs.x.new_zeros(problem.R, 2, problem.I)  # the reference knows live rows only
    pre[: len(saved.pre)] = saved.pre
    return y, Saved(plan(inputs.topk_ids, problem.E), pre)


def backward(problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need) -> Grads:
    """All four gradients by hand-derived formulas; those that nobody needs are dropped."""
    p = reference_plan(inputs.topk_ids, problem.E)
    pre = saved.pre[: len(p.token_of_row)]
    grads = reference_backward(
        ReferenceSaved(
            inputs.x, inputs.topk_weights, inputs.w_gate_up, inputs.w_down, p, pre, problem.swiglu_limit
        ),
        dy,
    )
    return Grads(**{name: grad for name, grad in grads._asdict().items() if getattr(need, name)})


def why_not(problem: Problem) -> str | None:
    """It runs wherever torch does."""
    return None


def note(problem: Problem) -> str | None:
    """It says what it is for."""
    return "loops over experts and reads the routing on the host: for checking, not for speed"
