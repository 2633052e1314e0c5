"""Parity: whether a rung computes what the reference computes, as far as its dtype allows. One rule, used everywhere.

The *truth* is the reference in float64 on the same (already rounded) inputs. A result is judged by its worst row, since
one dropped slot or one bad tile drowns in the norm of a whole tensor:

    error of a row = RMS(got - truth) / max(RMS of that truth row, RMS of the whole truth)     over the last axis
    budget         = 2 * (error of the reference's own run in the working dtype + one rounding)
    share          = error of the worst row / budget                                           passes when <= 1

The budget is measured, not chosen: the reference, run in bf16, shows what bf16 costs on these very inputs, and a rung
gets twice that. The one rounding is that of the lower of the tensor's precision and x's.

Two kinds of row have a rule of their own. A row whose truth is exactly zero must be exactly zero: nothing was routed
there. And each entry of dtopk_weights is a row of length one whose divisor is |dact| |act| of its route in the truth:
the entry is the dot product of those two vectors and may cancel to nearly nothing, where no precision would survive a
division by the result. NaN and Inf are infinite errors.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .reference.backward import Grads as ReferenceGrads
from .reference.backward import backward, combine_backward, down_backward
from .reference.forward import Saved as ReferenceSaved
from .reference.forward import forward, swiglu
from .shapes import Grads, Inputs, Need, Problem

OUTPUTS = ("y", "dx", "dtopk_weights", "dw_gate_up", "dw_down")
"""What is judged: the output and the four gradients."""

ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-24}
"""The error of rounding a result once, relative: half the spacing of numbers just below 1 for bf16 and fp16, just above
1 for fp32."""

FLOAT64_BUDGET = 2.0**-45
"""The budget in float64, where truth and reference are the same run and measure nothing. Sums taken in another order
differ by a few 2^-53; 2^-45 leaves room for 256 of them and for no mistake."""

SMALL = 16
SMALL_BUDGET = 2.0**-10
"""The budget where H or I is below 16: a worst row's error means little over so few columns, so such sizes are judged
in fp32 alone, for masks and tails rather than for rounding."""

CHUNK = 2**24
"""Elements compared at once: the float64 temporaries stay at 128 MiB each, however large the tensor."""


@dataclass(frozen=True)
class Parity:
    """The verdict on one run: per output, the share of its budget that the error uses."""

    shares: dict[str, float]

    @property
    def failed(self) -> list[str]:
        """The outputs over budget; NaN and Inf in a result count as an infinite share."""
        return [name for name, share in self.shares.items() if not share <= 1]

    @property
    def passed(self) -> bool:
        """Whether every output is within its budget."""
        return not self.failed


class Oracle:
    """Truth and budget for one set of inputs: computed once, on the inputs' device, when first asked; then any number
    of runs can be judged.

    problem: gives the dtype and the SwiGLU limit; dy: (T, H), the gradient of y. Memory: the float64 y and gradients
    are kept; while they are computed it takes almost four times as much (19 and 71 GiB for qwen3-235b-a22b).
    """

    def __init__(self, problem: Problem, inputs: Inputs, dy: Tensor):
        if min(problem.H, problem.I) < SMALL and problem.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"parity in {problem.dtype} needs H and I of at least {SMALL}, not H={problem.H}, I={problem.I}: "
                "use larger sizes, or fp32"
            )
        if problem.precision != "bf16" and problem.dtype in (torch.float32, torch.float16):
            raise ValueError(
                f"parity in {problem.precision} cannot be judged in {problem.dtype}: values a hair apart get other "
                "codes, and nothing coarser is there to measure that by: use bf16"
            )
        self.problem, self.inputs, self.dy = problem, inputs, dy

    @cached_property
    def truth(self) -> dict[str, Tensor]:
        """y and the gradients in float64."""
        return self._truth_and_divisor[0]

    @cached_property
    def dtopk_weights_divisor(self) -> Tensor:
        """(T, K): |dact| |act| of each route in the truth, 0 where the route is masked."""
        return self._truth_and_divisor[1]

    @cached_property
    def _truth_and_divisor(self) -> tuple[dict[str, Tensor], Tensor]:
        y, grads, saved = self._run(torch.float64)
        plan = saved.plan
        act = swiglu(saved.pre, saved.swiglu_limit)
        dy_rows = combine_backward(self.dy.double(), plan)
        dact, _ = down_backward(dy_rows, act, dy_rows.new_ones(len(act)), saved.w_down, plan)
        divisor = torch.zeros_like(saved.topk_weights)
        divisor[plan.token_of_row, plan.slot_of_row] = dact.norm(dim=-1) * act.norm(dim=-1)
        return _named(y, grads), divisor

    @cached_property
    def budgets(self) -> dict[str, float]:
        """The largest error of each output that passes. Raises ValueError where the inputs overflow the dtype."""
        dtype = self.problem.dtype
        if dtype == torch.float64:
            return dict.fromkeys(OUTPUTS, FLOAT64_BUDGET)
        if min(self.problem.H, self.problem.I) < SMALL:
            return dict.fromkeys(OUTPUTS, SMALL_BUDGET)
        _ = self.truth  # first, while no results of the other run take memory
        y, grads, _ = self._run(dtype)
        budgets = {}
        for name, got in _named(y, grads).items():
            error = self._error(name, got)
            if not math.isfinite(error):
                raise ValueError(
                    f"parity cannot be judged on these inputs: the reference's own {name} in {dtype} is not finite, or "
                    "not zero where the truth is exactly zero"
                )
            budgets[name] = 2 * (error + max(ROUNDING[dtype], ROUNDING.get(got.dtype, 0.0)))
        return budgets

    def errors(self, y: Tensor, grads: Grads, need: Need = Need()) -> dict[str, float]:
        """The worst row's error of y and of each gradient that was needed or given."""
        return {
            name: math.inf if got is None else self._error(name, got)
            for name, got in _named(y, grads).items()
            if got is not None or getattr(need, name)
        }

    def shares(self, y: Tensor, grads: Grads, need: Need = Need()) -> dict[str, float]:
        """The errors as shares of their budgets: at most 1 passes, inf where a result is NaN, Inf or missing.

        y: (T, H), grads: as the rung returned them. A gradient that `need` names and the rung left out has failed.
        Raises ValueError where a result has another shape or dtype than its input.
        """
        return {name: error / self.budgets[name] for name, error in self.errors(y, grads, need).items()}

    def check(self, y: Tensor, grads: Grads, need: Need = Need()) -> Parity:
        """`shares`, with the verdict."""
        return Parity(self.shares(y, grads, need))

    def _run(self, dtype: torch.dtype) -> tuple[Tensor, ReferenceGrads, ReferenceSaved]:
        """The reference in `dtype`; in the working dtype topk_weights keep their own."""
        i = self.inputs
        topk_weights = i.topk_weights.double() if dtype == torch.float64 else i.topk_weights
        y, saved = forward(
            i.x.to(dtype),
            i.topk_ids,
            topk_weights,
            i.w_gate_up.to(dtype),
            i.w_down.to(dtype),
            self.problem.swiglu_limit,
            self.problem.precision,
        )
        return y, backward(saved, self.dy.to(dtype)), saved

    def _error(self, name: str, got: Tensor) -> float:
        of = {"y": "x", "dx": "x", "dtopk_weights": "topk_weights", "dw_gate_up": "w_gate_up", "dw_down": "w_down"}
        dtype = getattr(self.inputs, of[name]).dtype
        truth = self.truth[name]
        if got.shape != truth.shape or got.dtype != dtype:
            raise ValueError(f"{name} is {got.dtype} {tuple(got.shape)}, not {dtype} {tuple(truth.shape)}")
        if name == "dtopk_weights":
            return worst_row(got[..., None], truth[..., None], self.dtopk_weights_divisor)
        return worst_row(got, truth)


def check(problem: Problem, inputs: Inputs, dy: Tensor, y: Tensor, grads: Grads, need: Need = Need()) -> Parity:
    """Judge one run: `Oracle(problem, inputs, dy).check(y, grads, need)`."""
    return Oracle(problem, inputs, dy).check(y, grads, need)


def worst_row(got: Tensor, truth: Tensor, divisor: Tensor | None = None) -> float:
    """The largest error of any row (the last axis) of `got` against the float64 `truth` of the same shape.

    divisor: the shape without the last axis; what each row's error is divided by, zero where the row must be exactly
    zero. None: max(RMS of the truth row, RMS of the whole truth). Infinite where a row that must be zero is not, and
    for NaN or Inf; 0 where there are no rows.
    """
    if not truth.numel():
        return 0.0
    got, truth = got.flatten(0, -2), truth.flatten(0, -2)
    rows_at_once = max(1, CHUNK // truth.shape[1])
    chunks = range(0, len(truth), rows_at_once)
    if divisor is None:
        squares = torch.stack([truth[at : at + rows_at_once].square().sum() for at in chunks])
        whole = (squares.sum() / truth.numel()).sqrt()

    worst = truth.new_zeros(())
    for at in chunks:
        g, t = got[at : at + rows_at_once].double(), truth[at : at + rows_at_once]
        if divisor is None:
            size = t.square().mean(-1).sqrt().maximum(whole)
            must_be_zero = (t == 0).all(-1)
        else:
            size = divisor.flatten()[at : at + rows_at_once]
            must_be_zero = size == 0
        error = (g - t).square().mean(-1).sqrt() / size
        is_zero = (g == 0).all(-1)
        error = torch.where(must_be_zero, torch.where(is_zero, 0.0, math.inf), error)
        worst = worst.maximum(error.nan_to_num(nan=math.inf, posinf=math.inf).max())
    return worst.item()


def _named(y: Tensor, grads: Grads | ReferenceGrads) -> dict[str, Tensor | None]:
    return {"y": y} | {name: getattr(grads, name) for name in OUTPUTS[1:]}
