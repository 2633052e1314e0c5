"""Faults planted on purpose, in every rung and at every scale, must turn the check red that the parity tests use.

A fault is a faulty version of one function of a rung's recipe: of the launcher that would have it, where the recipe
uses a launcher of that name, and otherwise of the recipe's own forward or backward.
"""

from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from types import ModuleType

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


def sum_slots_drops_a_slot(sum_slots, slots, topk_weights, plan):
    """In forward: dx is summed without weights."""
    return sum_slots(slots, topk_weights, plan if topk_weights is None else without_a_slot(plan))


def sum_slots_drops_a_slot_of_dx(sum_slots, slots, topk_weights, plan):
    return sum_slots(slots, topk_weights, without_a_slot(plan) if topk_weights is None else plan)


def without_a_slot(plan):
    row_of_slot = plan.row_of_slot.clone()
    row_of_slot[SLOT] = -1
    return plan._replace(row_of_slot=row_of_slot)


def combine_weighs_twice(combine, out, topk_weights, plan):
    return combine(out, topk_weights.square(), plan)


def sum_slots_weighs_twice(sum_slots, slots, topk_weights, plan):
    return sum_slots(slots, None if topk_weights is None else topk_weights.square(), plan)


def swiglu_swaps_gate_and_up(swiglu, pre, *rest):
    return swiglu(pre.flip(1), *rest)


def gate_up_swaps_gate_and_up(gate_up, x, w_gate_up, *rest):
    return gate_up(x, w_gate_up.unflatten(1, (2, -1)).flip(1).flatten(1, 2), *rest)


def backward_of_swiglu_swaps_gate_and_up(backward_of_swiglu, *args):
    dpre, *rest = backward_of_swiglu(*args)
    return dpre.unflatten(-1, (2, -1)).flip(-2).flatten(-2) if dpre.dim() == 2 else dpre.flip(1), *rest


def gemm_zeroes_sixteen_columns(gemm, *args):
    return zero_sixteen_columns(gemm(*args))


def gemm_reads_past_the_contraction(gemm, a, w, plan):
    """Without a mask the last step's columns run on into the next row, of both operands."""
    live = torch.arange(len(a), device=a.device) < plan.row_start[-1]
    a = torch.where(live[:, None], a, 0)  # so that it is not poison alone that shows
    longer = lambda t: torch.cat([t, t.roll(-1, -2)[..., :1]], -1)
    return gemm(longer(a), longer(w), plan)


def weight_grad_reads_past_its_rows(weight_grad, a, b, plan):
    """Without a mask the last step's rows run on into the next expert's."""
    return with_a_row_too_many(weight_grad(a, b, plan), a, b, plan)


def gathered_weight_grad_reads_past_its_rows(weight_grad, a, tokens, plan, dw):
    return with_a_row_too_many(weight_grad(a, tokens, plan, dw), a, tokens[plan.token_of_row], plan)


def with_a_row_too_many(dw, a, b, plan):
    wide = dw.float()
    for expert, end in enumerate(plan.row_start[1:-1].tolist()):
        wide[expert] += torch.outer(a[end].float(), b[end].float())
    return dw.copy_(wide)


def dact_leaves_padding_rows(dact, *args):
    """Not zeros, but what another row left there."""
    table = next(argument for argument in args if hasattr(argument, "route_in_blocks"))
    dpre, weighted_act, dtopk_weights = dact(*args)
    for rows in (dpre, weighted_act):
        rows[table.route_in_blocks == -1] = rows[0].clone()
    return dpre, weighted_act, dtopk_weights


def sum_parts_forgets_the_last_block(sum_parts, parts, *rest):
    return sum_parts(parts[:, :-1].contiguous(), *rest)


def weight_grad_skips_an_empty_expert(weight_grad, *args):
    return leave_an_expert_unwritten(weight_grad(*args))


def zero_sixteen_columns(t):
    t[..., 8:24] = 0
    return t


def leave_an_expert_unwritten(dw):
    dw[1] = torch.empty_like(dw[1])
    return dw


def tile_table_ignores_ties(tile_table, *args):
    """Of two experts with equally many rows, as 0 and 2 have, both take the same place."""
    table = tile_table(*args)
    assert table.longest_first[0, 2] == table.longest_first[1, 2]
    table.longest_first[0] = table.longest_first[1]
    return table


def tile_table_begins_with_ticket_one(tile_table, *args):
    table = tile_table(*args)
    table.counters[1:] = 1
    return table


def tile_table_forgets_the_last_block(tile_table, *args):
    table = tile_table(*args)
    table.counters[0] -= 1
    return table


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
FAULTS = {  # what must go red, and where the fault can be planted: in the first of these that the rung has
    "a slot dropped": (
        {"y"},
        dict(combine=combine_drops_a_slot, sum_slots=sum_slots_drops_a_slot, forward=forward_drops_a_slot),
    ),
    "a slot dropped in backward": (
        {"dx"},
        dict(
            dispatch_backward=dispatch_backward_drops_a_slot,
            sum_slots=sum_slots_drops_a_slot_of_dx,
            backward=backward_drops_a_slot,
        ),
    ),
    "the router weight applied twice": (
        {"y"},
        dict(combine=combine_weighs_twice, sum_slots=sum_slots_weighs_twice, forward=forward_weighs_twice),
    ),
    "gate and up swapped": (
        {"y"},
        dict(
            swiglu=swiglu_swaps_gate_and_up,
            gate_up_swiglu=gate_up_swaps_gate_and_up,
            gathered_gate_up=gate_up_swaps_gate_and_up,
            forward=forward_swaps_gate_and_up,
        ),
    ),
    "gate and up swapped in backward": (
        {"dx", "dw_gate_up"},
        dict(
            swiglu_backward=backward_of_swiglu_swaps_gate_and_up,
            dact_swiglu=backward_of_swiglu_swaps_gate_and_up,
            gathered_dact=backward_of_swiglu_swaps_gate_and_up,
            backward=backward_swaps_gate_and_up,
        ),
    ),
    "sixteen columns zeroed": (
        {"y"},
        dict(
            grouped_gemm=gemm_zeroes_sixteen_columns,
            slot_gemm=gemm_zeroes_sixteen_columns,
            down=gemm_zeroes_sixteen_columns,
            forward=forward_zeroes_sixteen_columns,
        ),
    ),
    "sixteen columns of weight gradients zeroed": (
        WEIGHTS,
        dict(
            weight_grad=gemm_zeroes_sixteen_columns,
            gathered_weight_grad=gemm_zeroes_sixteen_columns,
            backward=backward_zeroes_sixteen_columns,
        ),
    ),
    "a contraction without its tail mask": (
        {"y", "dx"},
        dict(grouped_gemm=gemm_reads_past_the_contraction, slot_gemm=gemm_reads_past_the_contraction),
    ),
    "a sum over rows without its tail mask": (
        WEIGHTS,
        {
            "grouped_gemm.weight_grad": weight_grad_reads_past_its_rows,
            "gathered.gathered_weight_grad": gathered_weight_grad_reads_past_its_rows,
            "persistent.dact_swiglu": dact_leaves_padding_rows,
        },
    ),
    "a sum of parts without the last block": (
        {"dtopk_weights"},
        {f"{home}.sum_parts": sum_parts_forgets_the_last_block for home in ("fused_swiglu", "gathered", "persistent")},
    ),
    "an empty expert's gradient left unwritten": (
        WEIGHTS,
        dict(
            weight_grad=weight_grad_skips_an_empty_expert,
            gathered_weight_grad=weight_grad_skips_an_empty_expert,
            backward=backward_skips_an_empty_expert,
        ),
    ),
    "an expert missing among the longest first": (WEIGHTS, dict(tile_table=tile_table_ignores_ties)),
    "a ticket skipped": ({"y", "dx", *WEIGHTS}, dict(tile_table=tile_table_begins_with_ticket_one)),
    "a block of rows missing": ({"y", "dx", *WEIGHTS}, dict(tile_table=tile_table_forgets_the_last_block)),
}


def place_of(planting: str, recipe: ModuleType) -> tuple[ModuleType, str] | None:
    """The module and the name to plant a fault at, if the recipe has them. "home.name" is a launcher that the recipe
    takes from kernels/home.py, or what the launchers that it takes from there call."""
    *homes, name = planting.split(".")
    if not homes:
        return (recipe, name) if hasattr(recipe, name) else None
    home = import_module(f"mega_moe.kernels.{homes[0]}")
    if not any(getattr(member, "__module__", None) == home.__name__ for member in vars(recipe).values()):
        return None
    return (recipe, name) if hasattr(recipe, name) else (home, name)


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
    places = {place: faulty for planting, faulty in plantings.items() if (place := place_of(planting, rung.recipe()))}
    if not places:
        pytest.skip(f"{rung.name} has no {' or '.join(plantings)} of its own to spoil")
    (module, name), faulty = next(iter(places.items()))
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: faulty(right, *args))
    assert red(rung, scale) >= must_go_red
