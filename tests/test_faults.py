"""Faults planted on purpose, in every rung and at every scale, must turn the check red that the parity tests use.

A fault is a faulty version of one function of a rung's recipe: of the launcher that would have it, where the recipe
uses a launcher of that name, and otherwise of the recipe's own forward or backward.
"""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from cases import SCALES, layer, poisoned, run

from mega_moe.parity import Oracle

IDS = [[0, 2], [2, 0], [3, 2], [0, 3], [2, -1], [3, 0], [0, 2]]  # nobody chose expert 1
SLOT = 2, 1  # a live one


# Faulty launchers: each is given the launcher itself and its arguments.


def combine_drops_a_slot(combine, out, topk_weights, plan):
    return combine(out, topk_weights, without_a_slot(plan))


def dispatch_backward_drops_a_slot(dispatch_backward, drows, plan):
    return dispatch_backward(drows, without_a_slot(plan))


def without_a_slot(plan):
    row_of_slot = plan.row_of_slot.clone()
    row_of_slot[SLOT] = -1
    return plan._replace(row_of_slot=row_of_slot)


def combine_weighs_twice(combine, out, topk_weights, plan):
    return combine(out, topk_weights.square(), plan)


def swiglu_swaps_gate_and_up(swiglu, pre, *rest):
    return swiglu(pre.flip(1), *rest)


def swiglu_backward_swaps_gate_and_up(swiglu_backward, *args):
    dpre, *rest = swiglu_backward(*args)
    return dpre.flip(1), *rest


def grouped_gemm_zeroes_sixteen_columns(grouped_gemm, a, w, plan):
    return zero_sixteen_columns(grouped_gemm(a, w, plan))


def grouped_gemm_reads_past_the_contraction(grouped_gemm, a, w, plan):
    """Without a mask the last step's columns run on into the next row, of both operands."""
    live = torch.arange(len(a), device=a.device) < plan.row_start[-1]
    a = torch.where(live[:, None], a, 0)  # so that it is not poison alone that shows
    longer = lambda t: torch.cat([t, t.roll(-1, -2)[..., :1]], -1)
    return grouped_gemm(longer(a), longer(w), plan)


def weight_grad_reads_past_its_rows(weight_grad, a, b, plan):
    """Without a mask the last step's rows run on into the next expert's."""
    dw = weight_grad(a, b, plan).float()
    for expert, end in enumerate(plan.row_start[1:-1].tolist()):
        dw[expert] += torch.outer(a[end].float(), b[end].float())
    return dw.to(a.dtype)


def weight_grad_zeroes_sixteen_columns(weight_grad, a, b, plan):
    return zero_sixteen_columns(weight_grad(a, b, plan))


def weight_grad_skips_an_empty_expert(weight_grad, a, b, plan):
    return leave_an_expert_unwritten(weight_grad(a, b, plan))


def zero_sixteen_columns(t):
    t[..., 8:24] = 0
    return t


def leave_an_expert_unwritten(dw):
    dw[1] = torch.empty_like(dw[1])
    return dw


# The same faults of a whole recipe, for rungs without such a launcher.


def forward_drops_a_slot(forward, problem, inputs):
    topk_ids = inputs.topk_ids.clone()
    topk_ids[SLOT] = -1
    return forward(problem, replace(inputs, topk_ids=topk_ids))[0], forward(problem, inputs)[1]


def forward_weighs_twice(forward, problem, inputs):
    return forward(problem, replace(inputs, topk_weights=inputs.topk_weights.square()))


def forward_swaps_gate_and_up(forward, problem, inputs):
    return forward(problem, replace(inputs, w_gate_up=inputs.w_gate_up.flip(1)))


def forward_zeroes_sixteen_columns(forward, problem, inputs):
    y, saved = forward(problem, inputs)
    return zero_sixteen_columns(y), saved


def backward_drops_a_slot(backward, problem, inputs, saved, *rest):
    topk_weights = inputs.topk_weights.clone()
    topk_weights[SLOT] = 0
    return backward(problem, replace(inputs, topk_weights=topk_weights), saved, *rest)


def backward_swaps_gate_and_up(backward, problem, inputs, saved, *rest):
    return backward(problem, inputs, saved._replace(pre=saved.pre.flip(1)), *rest)


def backward_zeroes_sixteen_columns(backward, *args):
    return changed(backward(*args), zero_sixteen_columns)


def backward_skips_an_empty_expert(backward, *args):
    return changed(backward(*args), leave_an_expert_unwritten)


def changed(grads, change):
    """Both weight gradients changed."""
    return replace(grads, dw_gate_up=change(grads.dw_gate_up), dw_down=change(grads.dw_down))


WEIGHTS = {"dw_gate_up", "dw_down"}
FAULTS = {  # what must go red, and where the fault can be planted: in the first of these that the recipe has
    "a slot dropped": (
        {"y"},
        dict(combine=combine_drops_a_slot, forward=forward_drops_a_slot),
    ),
    "a slot dropped in backward": (
        {"dx"},
        dict(dispatch_backward=dispatch_backward_drops_a_slot, backward=backward_drops_a_slot),
    ),
    "the router weight applied twice": (
        {"y"},
        dict(combine=combine_weighs_twice, forward=forward_weighs_twice),
    ),
    "gate and up swapped": (
        {"y"},
        dict(swiglu=swiglu_swaps_gate_and_up, forward=forward_swaps_gate_and_up),
    ),
    "gate and up swapped in backward": (
        {"dx", "dw_gate_up"},
        dict(swiglu_backward=swiglu_backward_swaps_gate_and_up, backward=backward_swaps_gate_and_up),
    ),
    "sixteen columns zeroed": (
        {"y"},
        dict(grouped_gemm=grouped_gemm_zeroes_sixteen_columns, forward=forward_zeroes_sixteen_columns),
    ),
    "sixteen columns of weight gradients zeroed": (
        WEIGHTS,
        dict(weight_grad=weight_grad_zeroes_sixteen_columns, backward=backward_zeroes_sixteen_columns),
    ),
    "a contraction without its tail mask": (
        {"y", "dx", *WEIGHTS},
        dict(grouped_gemm=grouped_gemm_reads_past_the_contraction),
    ),
    "a sum over rows without its tail mask": (
        WEIGHTS,
        dict(weight_grad=weight_grad_reads_past_its_rows),
    ),
    "an empty expert's gradient left unwritten": (
        WEIGHTS,
        dict(weight_grad=weight_grad_skips_an_empty_expert, backward=backward_skips_an_empty_expert),
    ),
}


@lru_cache
def oracle_at(scale: float) -> Oracle:
    """A layer at this scale and its truth."""
    return Oracle(*layer(IDS, H=32, I=24, E=4, scale=scale))


def red(rung, scale: float) -> set[str]:
    """The outputs over budget when the rung runs as it is now."""
    oracle = oracle_at(scale)
    with poisoned():
        y, grads = run(rung, oracle.problem, oracle.inputs, oracle.dy)
    return set(oracle.check(y, grads).failed)


@pytest.mark.parametrize("scale", SCALES)
def test_without_a_fault_nothing_is_red(scale, rung):
    assert not red(rung, scale)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_turns_red(fault, scale, rung, monkeypatch):
    must_go_red, plantings = FAULTS[fault]
    recipe = rung.recipe()
    name = next((name for name in plantings if hasattr(recipe, name)), None)
    if name is None:
        pytest.skip(f"{rung.name} has no {' or '.join(plantings)} of its own to spoil")
    right, faulty = getattr(recipe, name), plantings[name]
    monkeypatch.setattr(recipe, name, lambda *args: faulty(right, *args))
    assert red(rung, scale) >= must_go_red
