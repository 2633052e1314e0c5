"""What dact's epilogue keeps in registers is not rounded; what nobody wants is neither made nor multiplied."""

import pytest
import torch
from cases import DEVICE, layer, on_cpu
from exact import plan_of
from test_persistent import everything
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mega_moe.kernels import fused_swiglu, gathered, persistent
from mega_moe.kernels.blocks import blocks_for
from mega_moe.kernels.tile_table import tile_table
from mega_moe.kernels.weights import readable
from mega_moe.registry import stage
from mega_moe.shapes import Need, Plan

bf16 = torch.bfloat16
Results = tuple[Tensor | None, Tensor | None, Tensor | None]


def by_rows(dy: Tensor, w: Tensor, pre: Tensor, weights: Tensor, plan: Plan, need: Need = Need()) -> Results:
    return fused_swiglu.dact_swiglu(dy, w, pre, weights, plan, None, need)


def by_tokens(dy: Tensor, w: Tensor, pre: Tensor, weights: Tensor, plan: Plan, need: Need = Need()) -> Results:
    return gathered.gathered_dact(dy, w, pre, weights, plan, None, need)


def by_tickets(dy: Tensor, w: Tensor, pre: Tensor, weights: Tensor, plan: Plan, need: Need = Need()) -> Results:
    table = tile_table(plan, blocks_for(bf16).persistent)
    return persistent.dact_swiglu(dy, readable(w), pre, weights, plan, table, None, need)


every_dact = pytest.mark.parametrize("dact", [by_rows, by_tokens, by_tickets])


@every_dact
@pytest.mark.parametrize(
    "dy, weight, gate, up, dgate, dup, weighted_act, dweight",
    [  # sigmoid(gate) is 1. bf16 has 8 bits: it rounds 257 to 256, 257/256 to 1 and 387 to 388
        ([256.0, 1.0], 1.0, 192.0, 192.0, 49408.0, 49408.0, 36864.0, 257.0 * 36864),  # of dact 256: 49152, 256 * 36864
        ([1.0, 0.0], 257 / 256, 192.0, 192.0, 193.0, 193.0, 37120.0, 36864.0),  # of weight 1: 192, 192, 36864
        ([1.0, 0.0], 0.75, 129.0, 3.0, 2.25, 97.0, 290.0, 387.0),  # of an act rounded to 388: weighted act 292, and 388
    ],
)
def test_nothing_is_rounded_between_dact_and_what_is_made_of_it(
    dact, dy, weight, gate, up, dgate, dup, weighted_act, dweight
):
    tensor = lambda values: torch.tensor(values, device=DEVICE)
    ones = torch.ones(1, 2, 1, dtype=bf16, device=DEVICE)
    results = dact(tensor([dy]).to(bf16), ones, tensor([[[gate], [up]]]).to(bf16), tensor([[weight]]), plan_of([1]))
    dpre, act, dtopk_weights = results
    assert dpre.flatten()[:2].tolist() == [dgate, dup]
    assert act.flatten()[0].item() == weighted_act and dtopk_weights.item() == dweight


def test_nan_of_token_zero_stays_with_its_expert():
    """Rows behind an expert's last are masked in the loads, and would otherwise be those of token 0."""
    plan, tokens = plan_of([20, 20, 20]), torch.ones(60, 24, device=DEVICE)
    tokens[0] = torch.nan
    dw = gathered.gathered_weight_grad(
        torch.ones(60, 16, device=DEVICE), tokens, plan, torch.empty(3, 16, 24, device=DEVICE)
    )
    assert dw[0].isnan().all() and (dw[1:] == 20).all()


class Allocations(TorchDispatchMode):
    """The shapes of floating-point tensors that are allocated while it is on."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if "empty" in func.__name__ and made.is_floating_point():
            self.shapes.append(tuple(made.shape))
        return made


@pytest.mark.parametrize("name", ["swiglu", "gather", "persistent"])
def test_a_fused_rung_makes_no_pre_that_nobody_keeps_and_no_act_to_make_pre_again(name):
    problem, inputs, dy = layer(T=32, H=16, I=64, E=2, K=2)
    problem, rung = problem.at(save="inputs"), stage(name)
    with Allocations() as forward:
        _, saved = rung.forward(problem, inputs)
    assert (problem.R, 2, problem.I) not in forward.shapes
    with Allocations() as backward:
        rung.backward(problem, inputs, saved, dy, Need(True, False, False, False))
    assert (problem.R, 2, problem.I) in backward.shapes
    assert not [shape for shape in backward.shapes if len(shape) == 2 and shape[1] == problem.I]  # no act


@pytest.fixture
def products(monkeypatch) -> list:
    """One element for each product that the interpreter makes."""
    from triton.runtime.interpreter import InterpreterBuilder

    made, dot = [], InterpreterBuilder.create_dot
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda *args: made.append(None) or dot(*args))
    return made


@on_cpu
def test_a_strip_that_is_not_filled_multiplies_nothing_in_vain(products):
    everything(STRIP=1)
    one_by_one = len(products)
    everything(STRIP=2)
    assert len(products) == 2 * one_by_one


@on_cpu
@every_dact
def test_weighted_act_alone_takes_no_product(dact, products):
    one = lambda *shape: torch.ones(shape, dtype=bf16)
    dact(one(1, 2), one(1, 2, 1), one(1, 2, 1), torch.ones(1, 1), plan_of([1]), Need(False, False, False, True))
    assert not products
