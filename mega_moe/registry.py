"""The ladder: every rung in reading order, and the way to ask whether one can run here.

A rung's recipe is imported only when it is used, so this file, and `import mega_moe`, work where Triton does not exist.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from .shapes import PRECISIONS, Grads, Inputs, Need, Problem, Saved


@dataclass(frozen=True)
class Rung:
    """One implementation of the layer. `name` is what `stage=` takes; `idea` says what it adds to the rung below;
    `over_ranks`, whether it can exchange rows through heaps; `resident`, whether its programs are as many as there are
    processors, and not as there are tiles, so that it can leave some to others; `precisions`, what its products can
    read."""

    name: str
    module: str
    idea: str
    needs_triton: bool = True
    over_ranks: bool = False
    resident: bool = False
    precisions: tuple[str, ...] = ("bf16",)

    def why_not(self, problem: Problem) -> str | None:
        """One sentence, with the fix, if this rung cannot run the problem here; None if it can."""
        if problem.dtype == torch.float64 and self.needs_triton:
            return f'stage "{self.name}" computes in fp32, bf16 or fp16: for float64 use stage="reference".'
        if problem.heap and not self.over_ranks:
            able = " or ".join(f'"{rung.name}"' for rung in LADDER if rung.over_ranks)
            return f'stage "{self.name}" runs on one rank: over heaps use stage={able}.'
        if problem.num_reserved_sms and not self.resident:
            able = " or ".join(f'"{rung.name}"' for rung in LADDER if rung.resident)
            return f'stage "{self.name}" starts a program for each tile and reserves no processors: use stage={able}.'
        if reason := self.why_not_in(problem.precision, over_ranks=problem.heap > 0):
            return reason
        if self.needs_triton and (reason := triton_is_missing(self.name, problem)):
            return reason
        return self.recipe().why_not(problem)

    def why_not_in(self, precision: str, over_ranks: bool) -> str | None:
        """The same of products in a precision, whatever the problem and wherever it runs."""
        if precision in self.precisions:
            return None
        here = [rung for rung in LADDER if rung.over_ranks or not over_ranks]
        able = " or ".join(f'"{rung.name}"' for rung in here if precision in rung.precisions)
        way = f"use stage={able}, or another precision" if able else 'use precision="bf16", or one rank'
        return f'stage "{self.name}" has no products in {precision}: {way}.'

    def note(self, problem: Problem) -> str | None:
        """What runs here, but slower than it should; None if nothing does. Only for a rung that can run."""
        return self.recipe().note(problem)

    def forward(self, problem: Problem, inputs: Inputs) -> tuple[Tensor, Saved]:
        """y (T, H) and what backward needs, without autograd."""
        return self.recipe().forward(problem, inputs)

    def backward(self, problem: Problem, inputs: Inputs, saved: Saved, dy: Tensor, need: Need | None = None) -> Grads:
        """The needed gradients (all of them unless told), without autograd. dy: (T, H), any strides."""
        return self.recipe().backward(problem, inputs, saved, dy, need or Need())

    def recipe(self) -> ModuleType:
        """The stage file."""
        return import_module(f"{__package__}.stages.{self.module}")


LADDER = (
    Rung("reference", "s0_reference", "plain torch, a loop over experts", needs_triton=False, precisions=PRECISIONS),
    Rung("grouped", "s1_grouped", "one launch multiplies the rows of all experts"),
    Rung("swiglu", "s2_swiglu", "SwiGLU in the epilogue of the GEMM that makes its operand"),
    Rung("gather", "s3_gather", "rows are gathered in the GEMM's loads and stored by slot: no permuted copies"),
    Rung(
        "persistent",
        "s4_persistent",
        "resident programs draw tiles by ticket; contiguous tiles come by TMA",
        resident=True,
        precisions=PRECISIONS,
    ),
    Rung(
        "ranks",
        "s5_ranks",
        "experts over ranks: rows are pulled from peers, and pushed to their owners",
        over_ranks=True,
        resident=True,
        precisions=PRECISIONS,
    ),
    Rung(
        "mega",
        "s6_mega",
        "all steps of a direction in one launch, tile by tile from one schedule",
        over_ranks=True,
        resident=True,
        precisions=("bf16", "fp8", "fp8_bwd"),
    ),
    Rung(
        "warp",
        "s7_warp",
        "some warps load, others multiply; for Hopper alone",
        over_ranks=True,
        resident=True,
    ),
)
"""The rungs, each one idea further than the one before."""

DEFAULT = "persistent"
"""The stage that `moe` and `MoE` use unless told: the fastest on one GPU by the recorded results."""


DEFAULT_OVER_RANKS = "mega"
"""The stage that `moe` uses with heaps unless told."""


def stage(name: str) -> Rung:
    """The rung of that name. Raises ValueError, listing the names, if there is none."""
    for rung in LADDER:
        if rung.name == name:
            return rung
    raise ValueError(f"stage={name!r}: the stages are {', '.join(rung.name for rung in LADDER)}")


def triton_is_missing(name: str, problem: Problem) -> str | None:
    """Why a Triton rung cannot run on the problem's type of device, if so."""
    otherwise = "" if problem.heap else ', or use stage="reference"'  # which runs on one rank
    if find_spec("triton") is None:
        return f'stage "{name}" needs Triton: pip install "triton>=3.6"{otherwise}.'
    interpreted = import_module(f"{__package__}.kernels.tile").INTERPRETED.value
    if problem.device == "cuda" or interpreted:
        return None
    return (
        f'stage "{name}" needs tensors on a GPU, not on "{problem.device}": move them, or run Triton\'s interpreter '
        f"(TRITON_INTERPRET=1 in the environment before Python starts){otherwise}."
    )
