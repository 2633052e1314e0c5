"""The six grouped GEMMs of a layer, two forward and four backward, each alone beside its dense counterpart.

From rung swiglu on a kernel does more than a product: gate_up makes act too, dact makes dpre and the weighted act of
it. Then the time is that of the whole kernel, and the rate still counts the product's flops alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_moe import Problem
from mega_moe.reference.backward import swiglu_backward
from mega_moe.registry import stage
from mega_moe.shapes import PRESETS, Plan

GEMMS = ("gate_up", "down", "dact", "dw_down", "drows", "dw_gate_up")
"""By their results, in the order in which a training step runs them."""


@dataclass(frozen=True)
class Implementation:
    """Who multiplies; the fields are a Contestant's."""

    label: str
    kind: str
    needs_triton: bool = False


IMPLEMENTATIONS = {
    "grouped": Implementation("mega_moe, grouped", "rung", needs_triton=True),
    "swiglu": Implementation("mega_moe, swiglu", "rung", needs_triton=True),
    "gather": Implementation("mega_moe, gather", "rung", needs_triton=True),
    "persistent": Implementation("mega_moe, persistent", "rung", needs_triton=True),
    "torch": Implementation("F.grouped_mm", "peer"),
    "cublas": Implementation("dense GEMM of the same flops", "ceiling"),
}


RUNGS = tuple(name for name, facts in IMPLEMENTATIONS.items() if facts.kind == "rung")


@dataclass(frozen=True)
class Layer:
    """What the six products are made of: rows are copies of tokens, dact is not weighted.

    x, dy: (T, H). topk_weights: (T, K). w_gate_up: (E, 2, I, H). w_down: (E, H, I). pre, dpre: (R, 2, I). act: (R, I).
    """

    x: Tensor
    dy: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    pre: Tensor
    act: Tensor
    dpre: Tensor
    plan: Plan

    @cached_property
    def rows(self) -> Tensor:
        """(R, H)."""
        return self.x[self.plan.token_of_row]

    @cached_property
    def dy_rows(self) -> Tensor:
        """(R, H)."""
        return self.dy[self.plan.token_of_row]


@dataclass(frozen=True)
class Gemm:
    """One grouped product over the rows of a layer: a weight gradient where b is of rows too, else rows by weights.

    a: (R, M). b: (E, N, M), one matrix an expert, giving (R, N); or (R, N), giving (E, M, N).
    """

    name: str
    a: Tensor
    b: Tensor
    layer: Layer

    @property
    def is_weight_grad(self) -> bool:
        """Whether the rows are what is summed over."""
        return self.b.dim() == 2

    @property
    def flops(self) -> int:
        """Two a multiply-add; the same for the dense counterpart."""
        N = self.b.shape[1]
        return 2 * self.a.numel() * N

    @property
    def bytes(self) -> int:
        """Each operand read once and the result written once."""
        R, M = self.a.shape
        E, N = len(self.layer.plan.row_start) - 1, self.b.shape[1]
        result = E * M * N if self.is_weight_grad else R * N
        return (self.a.numel() + self.b.numel() + result) * self.a.element_size()

    def why_not(self, implementation: str) -> str | None:
        """Why there is nothing to measure, if so."""
        if implementation == "swiglu" and self.name not in ("gate_up", "dact"):
            return "the same kernel as grouped"
        here = PRESETS["tiny"].at(device=self.a.device.type)
        return stage(implementation).why_not(here) if implementation in RUNGS else None

    def run(self, implementation: str) -> tuple[Callable[[], object], Callable[[object], Tensor]]:
        """The product as a call without arguments, and what makes of its result the product's rows or weight gradient.
        "cublas" is one dense product over all rows: not the same result."""
        a, b, plan = self.a, self.b, self.layer.plan
        if implementation in RUNGS:
            from rungs import product  # imports Triton

            return product(implementation, self.name, self)
        as_it_is = lambda result: result
        if implementation == "cublas":
            return (lambda: a.mT @ b) if self.is_weight_grad else (lambda: a @ b[0].mT), as_it_is
        ends = plan.row_start[1:]
        return lambda: F.grouped_mm(*((a.mT, b) if self.is_weight_grad else (a, b.mT)), offs=ends), as_it_is

    def error(self, got: Tensor) -> float:
        """Relative L2 distance of a result from the product (of fused dact: from dpre) in float64."""
        starts = self.layer.plan.row_start.tolist()
        distance = size = 0.0
        for e, (start, end) in enumerate(pairwise(starts)):
            a = self.a[start:end].double()
            if self.is_weight_grad:
                g, truth = got[e], a.mT @ self.b[start:end].double()
            else:
                g, truth = got[start:end], a @ self.b[e].double().mT
                if self.name == "dact" and g.shape != truth.shape:
                    truth = self.dpre(truth, slice(start, end))
            distance += (g - truth).square().sum()
            size += truth.square().sum()
        return (distance / size).sqrt().item()

    def dpre(self, dact: Tensor, rows: slice) -> Tensor:
        """dact (rows, I) float64 -> dpre (rows, 2I)."""
        plan = self.layer.plan
        weight = self.layer.topk_weights[plan.token_of_row[rows], plan.slot_of_row[rows]].double()
        return swiglu_backward(dact, weight, self.layer.pre[rows].double()).flatten(1)


def make(problem: Problem, plan: Plan) -> dict[str, Gemm]:
    """All six on random operands: tokens, pre, act and dpre ~ N(0, 1), weights ~ N(0, 1/fan-in); all routes live."""
    p = problem
    generator = torch.Generator(p.device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=p.device).mul_(std).to(p.dtype)

    layer = Layer(
        x=normal(p.T, p.H),
        dy=normal(p.T, p.H),
        topk_weights=torch.rand(p.T, p.K, generator=generator, device=p.device),
        w_gate_up=normal(p.E, 2, p.I, p.H, std=p.H**-0.5),
        w_down=normal(p.E, p.H, p.I, std=p.I**-0.5),
        pre=normal(p.R, 2, p.I),
        act=normal(p.R, p.I),
        dpre=normal(p.R, 2, p.I),
        plan=plan,
    )
    w_gate_up, dpre = layer.w_gate_up.flatten(1, 2), layer.dpre.flatten(1)
    operands = {
        "gate_up": (layer.rows, w_gate_up),
        "down": (layer.act, layer.w_down),
        "dact": (layer.dy_rows, layer.w_down.mT),
        "dw_down": (layer.dy_rows, layer.act),
        "drows": (dpre, w_gate_up.mT),
        "dw_gate_up": (dpre, layer.rows),
    }
    return {name: Gemm(name, a, b, layer) for name, (a, b) in operands.items()}
