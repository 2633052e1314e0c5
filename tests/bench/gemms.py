"""The six grouped GEMMs of a layer, two forward and four backward, each alone beside its dense counterpart."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_moe import Problem
from mega_moe.shapes import Plan

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
    "torch": Implementation("F.grouped_mm", "peer"),
    "cublas": Implementation("dense GEMM of the same flops", "ceiling"),
}


@dataclass(frozen=True)
class Gemm:
    """One grouped product over the rows of `plan`: a weight gradient where b is of rows too, else rows by weights.

    a: (R, M). b: (E, N, M), one matrix an expert, giving (R, N); or (R, N), giving (E, M, N).
    """

    a: Tensor
    b: Tensor
    plan: Plan

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
        E, N = len(self.plan.row_start) - 1, self.b.shape[1]
        result = E * M * N if self.is_weight_grad else R * N
        return (self.a.numel() + self.b.numel() + result) * self.a.element_size()

    def run(self, implementation: str) -> Callable[[], Tensor]:
        """The product as a call without arguments. "cublas" is one dense product over all rows: not the same result."""
        a, b, plan = self.a, self.b, self.plan
        if implementation == "cublas":
            return (lambda: a.mT @ b) if self.is_weight_grad else (lambda: a @ b[0].mT)
        if implementation == "torch":
            ends = plan.row_start[1:]
            return lambda: F.grouped_mm(*((a.mT, b) if self.is_weight_grad else (a, b.mT)), offs=ends)

        from mega_moe.kernels.grouped_gemm import grouped_gemm, weight_grad

        return lambda: (weight_grad if self.is_weight_grad else grouped_gemm)(a, b, plan)

    def error(self, got: Tensor) -> float:
        """Relative L2 distance of a grouped result from the product in float64."""
        starts = self.plan.row_start.tolist()
        distance = size = 0.0
        for e, (start, end) in enumerate(pairwise(starts)):
            a = self.a[start:end].double()
            if self.is_weight_grad:
                g, truth = got[e], a.mT @ self.b[start:end].double()
            else:
                g, truth = got[start:end], a @ self.b[e].double().mT
            distance += (g - truth).square().sum()
            size += truth.square().sum()
        return (distance / size).sqrt().item()


def make(problem: Problem, plan: Plan) -> dict[str, Gemm]:
    """All six on random operands: rows, act and their gradients ~ N(0, 1), weights ~ N(0, 1/fan-in)."""
    p = problem
    generator = torch.Generator(p.device).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=p.device).mul_(std).to(p.dtype)

    rows, dy_rows, act, dpre = normal(p.R, p.H), normal(p.R, p.H), normal(p.R, p.I), normal(p.R, 2 * p.I)
    w_gate_up, w_down = normal(p.E, 2 * p.I, p.H, std=p.H**-0.5), normal(p.E, p.H, p.I, std=p.I**-0.5)
    operands = {
        "gate_up": (rows, w_gate_up),
        "down": (act, w_down),
        "dact": (dy_rows, w_down.mT),
        "dw_down": (dy_rows, act),
        "drows": (dpre, w_gate_up.mT),
        "dw_gate_up": (dpre, rows),
    }
    return {name: Gemm(a, b, plan) for name, (a, b) in operands.items()}
