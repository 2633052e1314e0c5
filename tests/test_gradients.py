"""Gradients as users ask for them: in any combination, twice, through other operations, and never beside the truth."""

from dataclasses import fields, replace
from itertools import product

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from cases import (
    DEVICE,
    DIFFERENTIABLE,
    assert_parity,
    assert_same,
    framed,
    layer,
    run,
    same_bits,
    tensors,
    train,
    transposed,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mega_moe import moe
from mega_moe.launches import launches
from mega_moe.routing import route
from mega_moe.shapes import SAVES, Grads, Inputs, Need

IDS = [[0, 1], [1, -1], [2, 2], [0, 2]]


def leaves_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The differentiable inputs as leaves that require gradients."""
    return {name: getattr(inputs, name).clone().requires_grad_() for name in DIFFERENTIABLE}


def grads_of(leaves: dict[str, torch.Tensor]) -> Grads:
    return Grads(**{f"d{name}": leaf.grad for name, leaf in leaves.items()})


# Every combination of requires_grad.


def test_exactly_the_gradients_that_are_required(rung, poison):
    """All sixteen combinations: None where nobody asked, and the same bits as ever where somebody did, whatever forward
    kept."""
    _, inputs, dy = layer([[0, -1], [0, 0]], I=16, E=1)
    y_full, full = train(rung, inputs, dy)
    patterns = list(product([False, True], repeat=4))
    in_turn = [(SAVES[sum(pattern) % 2], pattern) for pattern in patterns]
    for save, pattern in in_turn if DEVICE == "cpu" else product(SAVES, patterns):
        needs = [name for name, needed in zip(DIFFERENTIABLE, pattern, strict=True) if needed]
        y, grads = train(rung, inputs, dy, needs, save=save)
        assert same_bits(y, y_full), (save, needs)
        for name in DIFFERENTIABLE:
            got, expected = getattr(grads, f"d{name}"), getattr(full, f"d{name}")
            assert same_bits(got, expected) if name in needs else got is None, (save, needs, name)


def test_without_any_gradient_there_is_no_graph(rung):
    _, inputs, _ = layer(IDS)
    assert not moe(*vars(inputs).values(), stage=rung.name).requires_grad
    with torch.no_grad():
        assert not moe(topk_ids=inputs.topk_ids, **leaves_of(inputs), stage=rung.name).requires_grad


class Allocations(TorchDispatchMode):
    """Notes the sizes of all new tensors, in elements."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not (func.is_view or func.overloadpacket.__name__.endswith("_")):
            self.sizes.add(result.numel())
        return result


@pytest.mark.parametrize("name", [field.name for field in fields(Need)])
def test_what_nobody_needs_is_not_computed(name, fused):
    """One gradient alone takes fewer launches than all four (or a launch that does all of them fewer tiles, as
    test_schedule_kernel.py shows), and no memory of another weight gradient's size."""
    problem, inputs, dy = layer(IDS, H=20)  # a size that no number of whole blocks of rows has
    _, saved = fused.forward(problem, inputs)
    need = Need(**{field.name: field.name == name for field in fields(Need)})
    one = lambda: fused.backward(problem, inputs, saved, dy, need)
    with Allocations() as allocations:
        grads = one()

    assert [field.name for field in fields(grads) if getattr(grads, field.name) is not None] == [name]
    unwanted = {w.numel() for w in (inputs.w_gate_up, inputs.w_down)} - {getattr(grads, name).numel()}
    assert not allocations.sizes & unwanted
    of_one, of_all = launches(one, DEVICE), launches(lambda: fused.backward(problem, inputs, saved, dy), DEVICE)
    assert len(of_one) < len(of_all) or "mega_backward_kernel" in of_one


def test_dw_down_alone_needs_no_product_over_rows(fused):
    """It is made from dy and act; dact, which the other three are made from, is a product of its own."""
    problem, inputs, dy = layer(IDS)
    _, saved = fused.forward(problem, inputs)
    need = Need(dx=False, dtopk_weights=False, dw_gate_up=False)
    names = launches(lambda: fused.backward(problem, inputs, saved, dy, need), DEVICE)
    assert "weight_grad_kernel" in names or fused.name != "grouped"
    assert "grouped_gemm_kernel" not in names


def test_forward_mode_is_an_error(rung):
    """A custom operator drops tangents in silence, which reads as a derivative of zero."""
    _, inputs, dy = layer(IDS, dtype=torch.float32)
    with forward_ad.dual_level():
        dual = replace(inputs, x=forward_ad.make_dual(inputs.x, dy))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            moe(**vars(dual), stage=rung.name)


def test_no_gradient_is_made_for_what_forward_saved():
    """The operator returns it beside y, and torch would fill zeros of its size. Every rung has the same operator."""
    _, inputs, dy = layer(IDS)
    leaves = leaves_of(inputs)
    y = moe(topk_ids=inputs.topk_ids, **leaves, stage="reference")
    with Allocations() as allocations:
        torch.autograd.grad(y, list(leaves.values()), dy)
    assert not allocations.sizes


class WithoutGradient(torch.autograd.Function):
    """The identity, whose backward passes nothing on."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, _):
        return None


def test_where_y_gets_no_gradient_nothing_does():
    """Not even zeros: that is how torch says that a result was not used."""
    _, inputs, dy = layer(IDS)
    leaves = leaves_of(inputs)
    y = moe(topk_ids=inputs.topk_ids, **leaves, stage="reference")
    WithoutGradient.apply(y).backward(dy)
    assert all(leaf.grad is None for leaf in leaves.values())


def test_backward_runs_on_the_stage_of_forward(rung, monkeypatch):
    """Results would not tell: all stages give the same."""
    _, inputs, dy = layer(IDS)
    asked = []
    recipe, backward = rung.recipe(), rung.recipe().backward
    monkeypatch.setattr(recipe, "backward", lambda *args: asked.append(rung.name) or backward(*args))
    train(rung, inputs, dy)
    assert asked == [rung.name]


# What else a training loop does.


def test_backward_twice_over_the_same_graph_doubles_every_gradient(rung):
    """A backward that reused a saved buffer would not notice: torch counts no versions through Triton."""
    _, inputs, dy = layer(IDS, dtype=torch.float32)
    leaves = leaves_of(inputs)
    y = moe(topk_ids=inputs.topk_ids, **leaves, stage=rung.name)
    y.backward(dy, retain_graph=True)
    once = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    y.backward(dy)
    assert all(torch.equal(leaf.grad, 2 * once[name]) for name, leaf in leaves.items())


def test_two_losses_of_one_output_add(rung):
    _, inputs, dy = layer(IDS, dtype=torch.float32)
    leaves = leaves_of(inputs)
    y = moe(topk_ids=inputs.topk_ids, **leaves, stage=rung.name)
    (y * dy).sum().backward(retain_graph=True)
    (y * dy).sum().backward()
    _, once = train(rung, inputs, dy)
    assert all(torch.equal(leaf.grad, 2 * getattr(once, f"d{name}")) for name, leaf in leaves.items())


def test_gradients_are_added_to_those_that_are_there(rung):
    _, inputs, dy = layer(IDS, dtype=torch.float32)
    leaves = leaves_of(inputs)
    for leaf in leaves.values():
        leaf.grad = torch.full_like(leaf, 4.0)
    moe(topk_ids=inputs.topk_ids, **leaves, stage=rung.name).backward(dy)
    _, once = train(rung, inputs, dy)
    assert all(torch.equal(leaf.grad, 4 + getattr(once, f"d{name}")) for name, leaf in leaves.items())


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_second_derivative_is_an_error_that_says_where_to_get_it(name, rung):
    _, inputs, _ = layer(IDS)
    leaves = leaves_of(inputs)
    y = moe(topk_ids=inputs.topk_ids, **leaves, stage=rung.name)
    (first,) = torch.autograd.grad(y.float().square().sum(), leaves[name], create_graph=True)
    with pytest.raises(RuntimeError, match=r'differentiable once.*stage="reference"'):
        first.float().sum().backward()


def test_inputs_are_never_written(rung, poison):
    """A residual or a shared expert reads x after moe has: no output may live in an input's memory, dy's included."""
    _, inputs, dy = layer(IDS)
    before = [t.clone() for t in (*vars(inputs).values(), dy)]
    result = train(rung, inputs, dy)
    assert all(torch.equal(t, was) for t, was in zip((*vars(inputs).values(), dy), before, strict=True))
    memory = [t.untyped_storage().data_ptr() for t in (*vars(inputs).values(), dy, *tensors(result))]
    assert len(set(memory)) == len(memory)


def test_the_same_call_gives_the_same_bits(rung, poison):
    """Atomic sums over a token's rows would not, on a GPU: there it is called fifty times."""
    problem, inputs, dy = layer(T=500, K=8, E=16, H=256, I=128) if DEVICE == "cuda" else layer(T=7, K=3)
    first = run(rung, problem, inputs, dy)
    for _ in range(50 if DEVICE == "cuda" else 1):
        assert_same(run(rung, problem, inputs, dy), first)


# Strides and graphs around the call.


def test_a_gradient_of_stride_zero_as_sum_and_mean_make_it(rung):
    _, inputs, _ = layer(IDS, dtype=torch.float32)
    leaves = leaves_of(inputs)
    moe(topk_ids=inputs.topk_ids, **leaves, stage=rung.name).sum().backward()
    ones = torch.ones_like(inputs.x)
    assert_same((ones, grads_of(leaves)), (ones, train(rung, inputs, ones)[1]))


def test_a_gradient_that_is_transposed(rung):
    _, inputs, dy = layer(IDS)
    assert_same(train(rung, inputs, transposed(dy)), train(rung, inputs, dy))


def test_an_input_of_stride_zero(rung):
    """One token's row and one expert's weights, expanded: their gradients are the sums over all of them."""
    _, inputs, dy = layer(IDS, dtype=torch.float32)
    one = {name: getattr(inputs, name)[:1].clone().requires_grad_() for name in ("x", "w_gate_up", "w_down")}
    expanded = {name: t.expand(getattr(inputs, name).shape) for name, t in one.items()}
    moe(topk_ids=inputs.topk_ids, topk_weights=inputs.topk_weights, **expanded, stage=rung.name).backward(dy)

    copied = replace(inputs, **{name: t.detach().contiguous() for name, t in expanded.items()})
    _, grads = train(rung, copied, dy)
    for name, leaf in one.items():
        torch.testing.assert_close(leaf.grad[0], getattr(grads, f"d{name}").sum(0))


def test_weights_that_are_not_leaves(rung):
    """Scaled, and gate and up stacked from two parameters: the gradient must reach the base."""
    _, inputs, dy = layer(IDS, dtype=torch.float32)
    gate, up, down = (w.clone().requires_grad_() for w in (*inputs.w_gate_up.unbind(1), inputs.w_down))
    y = moe(inputs.x, inputs.topk_ids, inputs.topk_weights, torch.stack([gate, up], 1), down * 1.0, stage=rung.name)
    y.backward(dy)
    y_leaf, grads = train(rung, inputs, dy)
    assert same_bits(y.detach(), y_leaf)
    assert same_bits(torch.stack([gate.grad, up.grad], 1), grads.dw_gate_up) and same_bits(down.grad, grads.dw_down)


def inside_out(w):
    """w with its dimensions in reverse order in memory."""
    dimensions = list(reversed(range(w.dim())))
    return w.permute(dimensions).contiguous().permute(dimensions)


@pytest.mark.parametrize(
    "w_gate_up, w_down",
    [
        (inside_out, inside_out),
        (lambda w: framed(w.flatten(1), gap=8, offset=0).unflatten(1, w.shape[1:]), inside_out),
        (lambda w: w.transpose(0, 1).contiguous().transpose(0, 1), transposed),
    ],
    ids=["inside out", "experts apart", "gates before ups"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_any_strides(w_gate_up, w_down, dtype, rung, poison):
    problem, inputs, dy = layer(IDS, dtype=dtype)
    other = replace(inputs, w_gate_up=w_gate_up(inputs.w_gate_up), w_down=w_down(inputs.w_down))
    assert not other.w_gate_up.is_contiguous() and not other.w_down.is_contiguous()
    assert_parity(problem, other, dy, train(rung, other, dy))


def test_checkpointing_with_tied_router_scores(rung):
    """Recomputation routes again: with ties it may choose other experts only if the router is not deterministic."""
    _, inputs, dy = layer(T=4, dtype=torch.float32)
    logits = torch.zeros(4, 3, device=DEVICE)
    calls = []

    def block(x, w_gate_up, w_down):
        calls.append(None)
        return moe(x, *route(logits, 2), w_gate_up, w_down, stage=rung.name)

    results = []
    for layer_of in (block, lambda *args: checkpoint(block, *args, use_reentrant=False)):
        leaves = leaves_of(inputs)
        y = layer_of(leaves["x"], leaves["w_gate_up"], leaves["w_down"])
        y.backward(dy)
        results.append((y.detach(), grads_of(leaves)))
    assert_same(*results)
    assert len(calls) == 3


def test_a_gradient_that_nobody_passes_on_is_zero(rung):
    """y is used in part: dy of the unused tokens is zero, and so is all that follows from it."""
    problem, inputs, dy = layer([[0, 0], [1, 1], [2, 2]])
    leaves = leaves_of(inputs)
    moe(topk_ids=inputs.topk_ids, **leaves, stage=rung.name)[1:2].backward(dy[1:2])
    dy[[0, 2]] = 0
    y, _ = train(rung, inputs)
    assert_parity(problem, inputs, dy, (y, grads_of(leaves)))
    assert not leaves["w_down"].grad[[0, 2]].any()


def test_three_steps_of_training_change_every_weight_and_lower_the_loss(rung):
    """A forward without a gradient leaves experts as they were initialised, and a loss that falls without them."""
    _, inputs, target = layer(T=6, dtype=torch.float32)
    leaves = leaves_of(inputs)
    optimizer = torch.optim.SGD(leaves.values(), lr=0.3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (moe(topk_ids=inputs.topk_ids, **leaves, stage=rung.name) - target).square().mean()
        loss.backward()
        assert all(leaf.grad.any() for leaf in leaves.values())
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    for name, leaf in leaves.items():
        moved = (leaf != getattr(inputs, name)).flatten(1).any(1)
        assert moved.all(), name
