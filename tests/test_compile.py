"""torch.compile, activation checkpointing and autocast see one opaque operator, and get what eager gets, to the bit."""

import shutil
from itertools import product

import pytest
import torch
from cases import DEVICE, DIFFERENTIABLE, framed, layer, same_bits, transposed
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from mega_moe import LADDER, MoE, moe
from mega_moe.registry import DEFAULT_OVER_RANKS, stage
from mega_moe.shapes import SAVES, Inputs, Need

EVERY_NEED = list(product([True, False], repeat=4))[:-1]
STEPS = (5, 8, 0, 1, 13)  # tokens of successive calls


# torch sees the same two operators on every rung: on a CPU the lowest and the highest that runs there stand for all.
RUNGS = LADDER if DEVICE == "cuda" else (LADDER[0], stage(DEFAULT_OVER_RANKS))


@pytest.fixture(params=[rung.name for rung in RUNGS])
def name(request) -> str:
    """A rung that can run here."""
    problem, _, _ = layer()
    if reason := stage(request.param).why_not(problem):
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def forget():
    """Each test compiles by itself."""
    torch._dynamo.reset()


def arguments(inputs: Inputs, needs=(True,) * 4) -> list[Tensor]:
    """moe's five tensors as fresh leaves of which the differentiable ones require a gradient as told."""
    required = dict(zip(DIFFERENTIABLE, needs, strict=True))
    return [t.detach().requires_grad_(required.get(name, False)) for name, t in vars(inputs).items()]


def results(function, inputs: Inputs, dy: Tensor, needs=(True,) * 4) -> list[Tensor | None]:
    """y and the gradients of function(*inputs)."""
    leaves = arguments(inputs, needs)
    y = function(*leaves)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.is_floating_point())]


def assert_equal(got: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Equal to the bit; None where None is expected."""
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or same_bits(one, other)


def of_stage(name: str, **options):
    """moe as a function of its five tensors."""
    return lambda *tensors: moe(*tensors, stage=name, **options)


# The operators themselves


@pytest.mark.parametrize(
    "needs, dtype, save",
    [
        ((True, True, True, True), torch.float32, "pre"),
        ((True, False, False, False), torch.bfloat16, "pre"),
        ((False, True, False, True), torch.bfloat16, "inputs"),
    ],
    ids=str,
)
def test_the_forward_operator_keeps_torchs_rules(name, needs, dtype, save):
    """Schema, autograd registration, fakes that agree with the real results, and both under dynamic shapes. Without
    masked routes: what is saved for those is never written, and never the same twice."""
    _, inputs, _ = layer([[0, 1], [2, 0], [1, 1], [0, 2]], dtype=dtype)
    given = (*arguments(inputs, needs), name, 7.0, save, "bf16", 0, 0, None, False)
    torch.library.opcheck(torch.ops.mega_moe.forward.default, given)


@pytest.mark.parametrize(
    "needs, save",
    [
        ((True, True, True, True), "inputs"),
        ((False, True, False, True), "pre"),
        ((False, False, True, False), "inputs"),
    ],
    ids=str,
)
def test_the_backward_operator_keeps_torchs_rules(name, needs, save):
    problem, inputs, dy = layer(dtype=torch.bfloat16)
    _, saved = stage(name).forward(problem.at(save=save), inputs)
    torch.library.opcheck(
        torch.ops.mega_moe.backward.default,
        (dy, *arguments(inputs, (False,) * 4), saved.tensors(), name, None, save, "bf16", 0, 0, None, list(needs)),
    )


def laid_out(inputs: Inputs, dy: Tensor) -> tuple[Inputs, Tensor]:
    """The same values with strides that no fake could guess from the shapes."""
    i = inputs
    weights = (transposed(i.w_gate_up), framed(i.w_down, gap=8, offset=8))
    return Inputs(transposed(i.x), transposed(i.topk_ids), framed(i.topk_weights, 1, 1), *weights), transposed(dy)


@pytest.mark.parametrize("T, save", [(0, "pre"), (5, "inputs")])
def test_operators_keep_torchs_rules_for_any_strides_and_without_tokens(name, T, save):
    problem, inputs, dy = layer(T=T)
    inputs, dy = laid_out(inputs, dy) if T else (inputs, dy)
    leaves = arguments(inputs)
    torch.library.opcheck(torch.ops.mega_moe.forward.default, (*leaves, name, None, save, "bf16", 0, 0, None, False))
    _, saved = stage(name).forward(problem.at(save=save), inputs)
    given = (dy, *(t.detach() for t in leaves), saved.tensors(), name, None, save, "bf16", 0, 0, None, [True] * 4)
    torch.library.opcheck(torch.ops.mega_moe.backward.default, given)


@pytest.mark.parametrize("save", SAVES)
def test_fakes_are_contiguous_as_the_real_results_are(name, save):
    """Whatever the strides of the inputs: compiled code relies on it."""
    _, inputs, dy = layer(dtype=torch.float32)
    inputs, dy = laid_out(inputs, dy)
    y, saved = torch.ops.mega_moe.forward(*vars(inputs).values(), name, None, save, "bf16", 0, 0, None, False)
    grads = torch.ops.mega_moe.backward(
        dy, *vars(inputs).values(), saved, name, None, save, "bf16", 0, 0, None, [True] * 4
    )
    assert len(saved) == (5 if save == "pre" else 4)
    assert all(t.is_contiguous() for t in (y, *saved, *grads))


# torch.compile


def test_compiled_equals_eager_for_any_number_of_tokens(name):
    """One graph for all T, and one each for T = 0 and T = 1, which torch always compiles apart: two recompilations."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(of_stage(name), fullgraph=True, dynamic=True, backend=counter)
    for T in STEPS:
        _, inputs, dy = layer(T=T, seed=T)
        assert_equal(results(compiled, inputs, dy), results(of_stage(name), inputs, dy))
    assert counter.frame_count <= 3
    for T in (2, 0, 21):
        _, inputs, dy = layer(T=T, seed=T + 1)
        results(compiled, inputs, dy)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("needs", EVERY_NEED, ids=str)
def test_backward_is_asked_for_what_is_needed_and_no_more(needs, save, monkeypatch):
    """Eager and compiled. The operators are the same on every rung; here the reference stands for all."""
    recipe, asked = stage("reference").recipe(), []
    backward = recipe.backward

    def spy(problem, inputs, saved, dy, need):
        assert (saved.pre is not None) == (problem.save == save == "pre")
        asked.append(need)
        return backward(problem, inputs, saved, dy, need)

    monkeypatch.setattr(recipe, "backward", spy)
    _, inputs, dy = layer(limit=7.0)
    plain = of_stage("reference", swiglu_limit=7.0, save=save)
    got = results(torch.compile(plain, fullgraph=True, backend="aot_eager"), inputs, dy, needs)
    assert_equal(got, results(plain, inputs, dy, needs))
    assert [grad is not None for grad in got[1:]] == list(needs)
    assert asked == [Need(*needs)] * 2


def test_compiled_without_gradients(name, monkeypatch):
    """Also nothing is then kept for any."""
    recipe, asked = stage(name).recipe(), []
    forward = recipe.forward
    monkeypatch.setattr(recipe, "forward", lambda *given: asked.append(given[0].save) or forward(*given))

    _, inputs, _ = layer()
    compiled = torch.compile(of_stage(name), fullgraph=True, backend="aot_eager")
    y = of_stage(name)(*vars(inputs).values())
    assert same_bits(compiled(*vars(inputs).values()), y)
    with torch.no_grad():
        assert same_bits(compiled(*arguments(inputs)), y)
    with torch.inference_mode():
        assert same_bits(compiled(*vars(inputs).values()), y)
    assert asked == ["inputs"] * 4
    assert compiled(*arguments(inputs)).requires_grad and asked[-1] == "pre"


def module(name: str, **options) -> MoE:
    """A small MoE, the same each time."""
    torch.manual_seed(0)
    return MoE(16, 24, 4, 2, stage=name, device=DEVICE, **options)


def trained(function, moe: MoE, x: Tensor) -> list[Tensor]:
    """y, dx and the gradients of all parameters of one step."""
    moe.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device, dtype=y.dtype).view_as(y))
    return [y.detach(), x.grad, *(w.grad for w in moe.parameters())]


def test_compiled_module_equals_eager(name):
    """Here backward makes pre again; above it was saved."""
    moe, counter = module(name, norm_topk_prob=True, save="inputs"), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend=counter)
    for T in STEPS[:4]:
        x = torch.randn(2, T, 16, device=DEVICE)
        assert_equal(trained(compiled, moe, x), trained(moe, moe, x))
    assert counter.frame_count <= 3


@pytest.mark.skipif(not (shutil.which("g++") or DEVICE == "cuda"), reason="inductor needs a C++ compiler")
def test_compiled_by_inductor():
    """Code around the operator is generated; the router's own arithmetic may then round otherwise."""
    x = torch.randn(7, 16, device=DEVICE)
    name = RUNGS[-1].name
    problem, _, _ = layer()
    if reason := stage(name).why_not(problem):
        pytest.skip(reason)
    moe = module(name)
    compiled = torch.compile(moe, fullgraph=True)
    for got, expected in zip(trained(compiled, moe, x), trained(moe, moe, x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_autocast_inside_compile(name):
    moe, x = module(name), torch.randn(5, 16, device=DEVICE)

    def step(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return moe(x)

    got = trained(torch.compile(step, fullgraph=True, backend="aot_eager"), moe, x)
    assert got[0].dtype == torch.bfloat16
    assert {grad.dtype for grad in got[1:]} == {torch.float32}
    assert_equal(got, trained(step, moe, x))


# Activation checkpointing


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_equals_plain(name, use_reentrant, save):
    _, inputs, dy = layer([[0, 1], [2, -1], [1, 1], [-1, -1], [0, 2]])
    plain = of_stage(name, save=save)
    again = lambda *tensors: checkpoint(plain, *tensors, use_reentrant=use_reentrant)
    assert_equal(results(again, inputs, dy), results(plain, inputs, dy))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied scores"])
def test_checkpointed_module_equals_plain(name, use_reentrant, tied):
    """The recomputed router chooses as before, also where all experts score the same."""
    moe = module(name)
    if tied:
        torch.nn.init.zeros_(moe.gate.weight)
    x = torch.randn(6, 16, device=DEVICE)
    assert_equal(trained(lambda x: checkpoint(moe, x, use_reentrant=use_reentrant), moe, x), trained(moe, moe, x))


def test_nested_checkpoints(name):
    moe, x = module(name), torch.randn(6, 16, device=DEVICE)
    twice = lambda x: moe(x + moe(x))
    inner = lambda x: moe(x + checkpoint(moe, x, use_reentrant=False))
    assert_equal(trained(lambda x: checkpoint(inner, x, use_reentrant=False), moe, x), trained(twice, moe, x))


@pytest.mark.parametrize("save", SAVES)
def test_checkpoint_inside_compile(name, save):
    moe, x = module(name, save=save), torch.randn(6, 16, device=DEVICE)
    again = lambda x: checkpoint(moe, x, use_reentrant=False)
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    assert_equal(trained(compiled, moe, x), trained(moe, moe, x))


# What backward is asked


@pytest.mark.parametrize("needs", EVERY_NEED, ids=str)
def test_a_need_names_the_gradients_in_order(needs):
    """The list that the operator returns holds exactly what was asked for, in the order of `Need`."""
    problem, inputs, dy = layer(dtype=torch.float32)
    _, saved = stage("reference").forward(problem, inputs)
    given = (dy, *vars(inputs).values(), saved.tensors(), "reference", None, "pre", "bf16", 0, 0, None, list(needs))
    got = torch.ops.mega_moe.backward(*given)
    every = stage("reference").backward(problem, inputs, saved, dy, Need())
    assert_equal(got, [grad for grad, needed in zip(every.tensors(), needs, strict=True) if needed])
