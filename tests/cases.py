"""The one table of cases that every rung is held to: what a layer may look like, and which of all combinations to run.

A case is one value on each of eight axes. All combinations are thousands, which a GPU runs in minutes (`-m full`). In
the interpreter a covering array stands for them: some fifty cases in which every *pair* of values occurs, since a fault
that needs three things at once is rare and one that needs two (a tail and a mask, say) is not.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from mega_moe import moe
from mega_moe.parity import OUTPUTS, Oracle
from mega_moe.registry import Rung
from mega_moe.samples import random_inputs
from mega_moe.shapes import PRESETS, SAVES, Grads, Inputs, Problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where tests run. On a CPU that is Triton's interpreter, which conftest.py switches on."""

on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="checks the interpreter, which is not used where a GPU is present")

DIFFERENTIABLE = ("x", "topk_weights", "w_gate_up", "w_down")
"""The inputs that have gradients."""


# The axes.

SHAPES = {  # T, H, I, E, K
    "tiny": (6, 32, 24, 4, 1),
    "odd": (13, 67, 17, 3, 2),  # nothing divides anything
    "one token": (1, 32, 24, 9, 8),  # fewer routes than experts
    "K = E": (5, 32, 24, 3, 3),
    "E = 1": (20, 32, 24, 1, 2),  # K > E: every token visits the expert twice
    "coincide": (16, 16, 16, 2, 2),  # T = H = I and E = K = 2 = (gate, up): only the letters tell them apart
    "blocks": (35, 130, 40, 2, 2),  # more than one block a side, the last ones unfilled (in the interpreter)
    "small": (2, 2, 2, 2, 2),  # narrower than any tile; fp32 only
    "wide": (300, 520, 264, 3, 2),  # more than one block a side on a GPU
}
ROUTINGS = ("balanced", "hot", "empty", "masked", "duplicate", "all masked", "no tokens")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALES = (0.02, 1.0, 30.0)
LAYOUTS = ("contiguous", "transposed", "sliced", "weights transposed", "weights padded", "weights unaligned")
WEIGHTS = ("fp32", "like x")
POISON = (False, True)


@dataclass(frozen=True)
class Case:
    """One layer to run; `str(case)` is its test's name."""

    shape: str = "tiny"
    routing: str = "balanced"
    dtype: str = "bf16"
    scale: float = 1.0
    layout: str = "contiguous"
    weights: str = "fp32"  # the dtype of topk_weights
    save: str = "pre"
    poison: bool = True  # memory that nobody wrote holds NaN

    def __str__(self) -> str:
        *names, poison = astuple(self)
        return "-".join([*map(str, names), "poison" if poison else "as it comes"]).replace(" ", "_")

    def problem(self) -> Problem:
        """The facts of the layer."""
        T, H, I, E, K = SHAPES[self.shape]
        return Problem(0 if self.routing == "no tokens" else T, H, I, E, K, DTYPES[self.dtype], DEVICE, save=self.save)

    def layer(self) -> tuple[Problem, Inputs, Tensor]:
        """The problem, its inputs and dy, the same each time."""
        problem = self.problem()
        inputs, dy = random_inputs(problem, "hot" if self.routing == "hot" else "balanced", scale=self.scale)
        inputs = replace(inputs, topk_ids=reroute(inputs.topk_ids, self.routing, problem.E))
        if self.weights == "like x":
            inputs = replace(inputs, topk_weights=inputs.topk_weights.to(problem.dtype))
        return problem, *lay_out(inputs, dy, self.layout)


AXES = dict(
    shape=tuple(name for name in SHAPES if name != "wide"),
    routing=ROUTINGS,
    dtype=tuple(DTYPES),
    scale=SCALES,
    layout=LAYOUTS,
    weights=WEIGHTS,
    save=SAVES,
    poison=POISON,
)


def possible(case: dict) -> bool:
    """Whether the values chosen so far go together. Every rule is about two axes, so half a case can be asked too."""
    shape, routing, weights = case.get("shape"), case.get("routing"), case.get("weights")
    return not (
        (shape == "small" and case.get("dtype") in ("bf16", "fp16"))  # too few columns to judge a rounding
        or (shape == "small" and weights == "like x")  # the same as fp32, for the same reason as below
        or (shape == "tiny" and routing == "duplicate")  # K = 1
        or (shape == "E = 1" and routing in ("empty", "duplicate"))  # nobody is left to be empty; always duplicate
        or (shape == "one token" and routing == "no tokens")
        or (routing in ("all masked", "no tokens") and case.get("scale") in (0.02, 30.0))  # nothing is multiplied
        or (case.get("dtype") == "fp32" and weights == "like x")  # the same thing
    )


def every_case(**chosen) -> list[Case]:
    """All combinations (with the chosen values), always poisoned: what passes with NaN in unwritten memory passes with
    anything in it."""
    axes = AXES | dict(shape=tuple(SHAPES), poison=(True,)) | {axis: (value,) for axis, value in chosen.items()}
    combined = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [Case(**case) for case in combined if possible(case)]


def pairs_of(case: dict) -> Iterator[tuple]:
    """Every two of a case's values, with their axes."""
    return combinations([(axis, case[axis]) for axis in AXES if axis in case], 2)


def possible_pairs() -> dict[tuple, None]:
    """Every pair of values that some case can have, in a fixed order (a dict, since a set's order varies)."""
    pairs = {}
    for one, other in combinations(AXES, 2):
        for values in product(AXES[one], AXES[other]):
            chosen = dict(zip((one, other), values, strict=True))
            if possible(chosen):
                pairs[tuple(chosen.items())] = None
    return pairs


def covering_array() -> list[Case]:
    """Few cases that hold every possible pair: take a pair not yet seen, then add, axis by axis, the value that brings
    the most pairs not yet seen."""
    unseen, cases = possible_pairs(), []
    while unseen:
        case = dict(next(iter(unseen)))
        for axis, values in AXES.items():
            if axis not in case:
                candidates = [case | {axis: value} for value in values if possible(case | {axis: value})]
                case = max(candidates, key=lambda candidate: sum(pair in unseen for pair in pairs_of(candidate)))
        for pair in pairs_of(case):
            unseen.pop(pair, None)
        cases.append(Case(**case))
    return cases


# What routings and layouts mean.


def reroute(topk_ids: Tensor, routing: str, num_experts: int) -> Tensor:
    """The ids of a balanced routing, changed to what the routing's name says."""
    ids = topk_ids.clone()
    if routing == "empty":
        ids //= 2  # the upper half of the experts has no rows
    elif routing == "masked":
        ids.flatten()[::3] = -1  # tokens with all, some and none of their routes
        ids[-1:] = -1
    elif routing == "duplicate":
        ids[:, 1:] = ids[:, :1]
    elif routing == "all masked":
        ids.fill_(-1)
    return ids


def lay_out(inputs: Inputs, dy: Tensor, layout: str) -> tuple[Inputs, Tensor]:
    """The same values with other strides; what lies between them in memory is NaN (or the largest integer)."""
    i = inputs
    if layout == "transposed":
        rows = {name: transposed(getattr(i, name)) for name in ("x", "topk_ids", "topk_weights")}
        return replace(i, **rows), transposed(dy)
    if layout == "sliced":
        rows = {name: framed(getattr(i, name), gap=1, offset=1) for name in ("x", "topk_ids", "topk_weights")}
        return replace(i, **rows | dict(topk_ids=rows["topk_ids"].int())), framed(dy, gap=3, offset=1)
    weights = dict(w_gate_up=i.w_gate_up, w_down=i.w_down)
    if layout == "weights transposed":
        return replace(i, **{name: transposed(w) for name, w in weights.items()}), dy
    if layout == "weights padded":  # and dy of stride zero, as y.sum().backward() makes it
        padded = {name: framed(w, gap=-w.shape[-1] % 8 + 8, offset=8) for name, w in weights.items()}
        return replace(i, **padded), dy.flatten()[:1].mean().expand(dy.shape) if dy.numel() else dy
    if layout == "weights unaligned":
        return replace(i, **{name: framed(w, gap=1, offset=1) for name, w in weights.items()}), dy
    return i, dy


def transposed(t: Tensor) -> Tensor:
    """t with its last two dimensions exchanged in memory."""
    return t.mT.contiguous().mT


def framed(t: Tensor, gap: int, offset: int) -> Tensor:
    """t with `offset` elements before it and `gap` elements after each row of its last dimension, all unusable."""
    *outer, columns = t.shape
    rows = t.numel() // columns
    unusable = float("nan") if t.is_floating_point() else torch.iinfo(t.dtype).max
    memory = t.new_full((offset + rows * (columns + gap) + gap,), unusable)
    strides = [columns + gap]
    for size in reversed(outer[1:]):
        strides.insert(0, strides[0] * size)
    view = memory.as_strided(t.shape, (*strides, 1), offset)
    return view.copy_(t)


# Layers outside the table.


def layer(
    ids: list | Tensor | None = None, *, T=5, H=16, I=24, E=3, K=2, dtype=torch.bfloat16, seed=0, limit=None, scale=1.0
) -> tuple[Problem, Inputs, Tensor]:
    """A small layer, its topk_ids as given (T and K then follow from them): problem, inputs, dy."""
    if ids is not None:
        ids = torch.as_tensor(ids, device=DEVICE)
        T, K = ids.shape
    problem = Problem(T, H, I, E, K, dtype, DEVICE, limit)
    inputs, dy = random_inputs(problem, seed=seed, scale=scale)
    return problem, inputs if ids is None else replace(inputs, topk_ids=ids), dy


def ids_with_counts(counts: list[int]) -> Tensor:
    """(T, 1) ids, shuffled, with counts[e] tokens for expert e."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))][:, None]


# Running and judging.


@contextmanager
def poisoned(poison: bool = True) -> Iterator[None]:
    """While it lasts, memory that torch.empty and its like hand out is filled with NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(poison, warn_only=True)  # only in this mode does torch fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def able(rung: Rung, dtype: torch.dtype = torch.bfloat16) -> Rung:
    """The rung, if it can run here at all, in this dtype; else the test is skipped, with its why_not."""
    if reason := rung.why_not(PRESETS["tiny"].at(device=DEVICE, dtype=dtype)):
        pytest.skip(reason)
    return rung


def run(rung: Rung, problem: Problem, inputs: Inputs, dy: Tensor) -> tuple[Tensor, Grads]:
    """The rung itself, without autograd."""
    if problem.dtype == torch.float32:
        able(rung, torch.float32)  # which is for checking, and not every rung has
    y, saved = rung.forward(problem, inputs)
    return y, rung.backward(problem, inputs, saved, dy)


def train(
    rung: Rung, inputs: Inputs, dy: Tensor | None = None, needs: Iterable[str] = DIFFERENTIABLE, **options
) -> tuple[Tensor, Grads]:
    """moe() and its gradients as a user gets them: y, and the .grad of a leaf for each input named in `needs`."""
    if inputs.x.dtype == torch.float32:
        able(rung, torch.float32)
    leaves = {name: getattr(inputs, name).detach().requires_grad_(name in needs) for name in DIFFERENTIABLE}
    y = moe(topk_ids=inputs.topk_ids, **leaves, stage=rung.name, **options)
    if needs:
        y.backward(torch.ones_like(y) if dy is None else dy)
    return y.detach(), Grads(**{f"d{name}": leaf.grad for name, leaf in leaves.items()})


def assert_parity(problem: Problem, inputs: Inputs, dy: Tensor, result: tuple[Tensor, Grads]) -> None:
    """y and all gradients are within the one budget of mega_moe/parity.py."""
    parity = Oracle(problem, inputs, dy).check(*result)
    assert parity.passed, parity.shares


def assert_same(got: tuple[Tensor, Grads], expected: tuple[Tensor, Grads]) -> None:
    """Equal to the bit, NaN like NaN: y, and each gradient that was expected."""
    for name, one, other in zip(OUTPUTS, tensors(got), tensors(expected), strict=True):
        if other is not None:
            assert same_bits(one, other), name


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal in dtype, shape and every bit, except that any NaN equals any other."""
    return one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def tensors(result: tuple[Tensor, Grads]) -> list[Tensor | None]:
    """y and the four gradients, as parity's OUTPUTS names them."""
    y, grads = result
    return [y, *vars(grads).values()]


def bits(t: Tensor) -> Tensor:
    """A float tensor's bits as integers."""
    t = t.float() if t.element_size() == 1 else t  # e4m3, which fp32 holds
    as_integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return torch.where(t.isnan(), torch.nan, t).contiguous().view(as_integers)
