"""A layer that ranks share, what one process makes of it, and whether ranks make the same.

All ranks draw the whole layer, from the same seed, so that each can compute it alone as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..api import moe
from ..parity import CHUNK, OUTPUTS, Oracle
from ..samples import random_inputs
from ..shapes import Grads, Inputs, Problem

Results = dict[str, Tensor]
"""y and the four gradients, by the names in parity.OUTPUTS."""

OF_TOKENS = ("y", "dx", "dtopk_weights")
DIFFERENTIABLE = ("x", "topk_weights", "w_gate_up", "w_down")


@dataclass(frozen=True)
class Whole:
    """A layer, and how many of its tokens each rank holds, one rank after another; the experts they share evenly."""

    problem: Problem
    inputs: Inputs
    dy: Tensor
    tokens_per_rank: tuple[int, ...]

    @property
    def W(self) -> int:
        """Ranks."""
        return len(self.tokens_per_rank)

    def tokens_of(self, rank: int) -> slice:
        """Where a rank's tokens stand among all."""
        start = sum(self.tokens_per_rank[:rank])
        return slice(start, start + self.tokens_per_rank[rank])

    def experts_of(self, rank: int) -> slice:
        """Where a rank's experts stand among all."""
        L = self.problem.E // self.W
        return slice(rank * L, rank * L + L)

    def of(self, rank: int) -> tuple[Inputs, Tensor]:
        """What a rank holds of the layer, and of its dy."""
        i, tokens, experts = self.inputs, self.tokens_of(rank), self.experts_of(rank)
        held = Inputs(i.x[tokens], i.topk_ids[tokens], i.topk_weights[tokens], i.w_gate_up[experts], i.w_down[experts])
        return held, self.dy[tokens]

    def results_of(self, rank: int, results: Results) -> Results:
        """A rank's part of what one process has computed, as views."""
        tokens, experts = self.tokens_of(rank), self.experts_of(rank)
        return {name: t[tokens if name in OF_TOKENS else experts] for name, t in results.items()}

    def rows(self) -> Tensor:
        """(W, W): how many rows of the tokens of each rank go to the experts of each, on the host."""
        L = self.problem.E // self.W
        counts = [
            torch.bincount(ids[(ids >= 0) & (ids < self.problem.E)] // L, minlength=self.W)
            for ids in self.inputs.topk_ids.split(self.tokens_per_rank)
        ]
        return torch.stack(counts).cpu()


def draw(problem: Problem, tokens_per_rank: Sequence[int], routing: str = "random", seed: int = 0) -> Whole:
    """A random layer whose tokens are those of all ranks. routing: as of `random_inputs`; or "masked", a third of the
    routes masked, all of some tokens; or "one", all on the last expert."""
    problem = problem.at(T=sum(tokens_per_rank))
    inputs, dy = random_inputs(problem, routing if routing == "random" else "balanced", seed)
    ids = inputs.topk_ids
    if routing == "masked":
        ids.flatten()[::3] = -1
        ids[::5] = -1
    elif routing == "one":
        ids.fill_(problem.E - 1)
    return Whole(problem, inputs, dy, tuple(tokens_per_rank))


def differentiate(inputs: Inputs, dy: Tensor, **options) -> Results:
    """y and all gradients, by `moe` with these options."""
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in DIFFERENTIABLE}
    y = moe(topk_ids=inputs.topk_ids, **leaves, **options)
    return dict(zip(OUTPUTS, (y.detach(), *torch.autograd.grad(y, list(leaves.values()), dy))))


def by_one_process(inputs: Inputs, dy: Tensor) -> Results:
    """The same by the rung below those over ranks."""
    return differentiate(inputs, dy, stage="persistent", save="inputs")


def same_sums(problem: Problem, *ways: str) -> bool:
    """Whether two ways of computing a layer add up in the same order, so that their results must be equal to the bit:
    their tiles are as deep, and <dact, act> has as many parts. "persistent" is that rung in one process, without heaps;
    "ranks" and "mega" are over ranks."""
    from ..kernels import blocks  # which needs Triton

    over_ranks = problem.at(tokens_per_rank=(problem.T,))
    tiles = {
        "persistent": lambda: blocks.persistent_for(problem),
        "ranks": lambda: blocks.persistent_for(over_ranks),
        "mega": lambda: blocks.mega_for(over_ranks),
    }
    one, other = (tiles[way]() for way in ways)
    products = all(getattr(one, k).BLOCK_C == getattr(other, k).BLOCK_C for k in ("gate_up", "down", "dact", "dx"))
    sums_over_rows = all(getattr(one, k).BLOCK_R == getattr(other, k).BLOCK_R for k in ("dw_down", "dw_gate_up"))
    return products and sums_over_rows and one.dact.BLOCK_N == other.dact.BLOCK_N


def bits(t: Tensor) -> Tensor:
    """A tensor's bits as integers."""
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def which_differ(got: Results, expected: Results) -> Tensor:
    """(5,) int64 on the device: of OUTPUTS, whether any bit differs. Nobody waits to compare."""
    return torch.stack([(bits(got[name]) != bits(expected[name])).any() for name in OUTPUTS]).long()


def differing(got: Results, expected: Results) -> list[str]:
    """The outputs in which any bit differs."""
    return [name for name, differs in zip(OUTPUTS, which_differ(got, expected).tolist()) if differs]


def distance(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected| over the whole tensor; 0 where both are empty or zero."""
    pairs = list(zip(got.reshape(-1).split(CHUNK), expected.reshape(-1).split(CHUNK)))
    off = sum(((g.double() - e.double()).square().sum() for g, e in pairs), torch.zeros(()))
    size = sum((e.double().square().sum() for _, e in pairs), torch.zeros(()))
    return (off / size).sqrt().item() if off != 0 else 0.0


class Judge:
    """What ranks make of a layer, against one process, whose own results must keep the parity budget.

    Attributes:
        whole: the layer.
        alone: what one process makes of it.
        shares: of the parity budget, by output, that those results use.
        failures: what was found wrong so far. They are raised together, at the end: a rank that stopped in the middle
            would keep its peers waiting.
    """

    def __init__(self, whole: Whole, name: str):
        self.whole, self.failures = whole, []
        self.alone = by_one_process(whole.inputs, whole.dy)
        self.oracle = Oracle(whole.problem, whole.inputs, whole.dy)
        self.shares = self.oracle.shares(*as_grads(self.alone))
        over = {name: share for name, share in self.shares.items() if not share <= 1}
        if over:
            self.failures.append(f"{name}: one process is over its parity budget: {over}")

    def hold(self, name: str, rank: int, got: Results, exact: bool) -> dict[str, float | None]:
        """Compare a rank's results: {} where they are those of one process to the bit. Else, where that may be, the
        share of the parity budget that each differing output uses with this rank's part in its place."""
        off = differing(got, self.whole.results_of(rank, self.alone))
        if not off:
            return {}
        if exact:
            self.failures.append(f"{name}: not the bits of one process in {', '.join(off)}")
            return dict.fromkeys(off)
        placed = {name: t.clone() for name, t in self.alone.items()}
        for output, part in self.whole.results_of(rank, placed).items():
            part.copy_(got[output])
        shares = {name: share for name, share in self.oracle.shares(*as_grads(placed)).items() if name in off}
        over = {name: share for name, share in shares.items() if not share <= 1}
        if over:
            self.failures.append(f"{name}: over the parity budget: {over}")
        return shares


def as_grads(results: Results) -> tuple[Tensor, Grads]:
    """y and the gradients in the form that parity takes."""
    y, *grads = results.values()
    return y, Grads(*grads)


def folded(inputs: Inputs) -> Inputs:
    """A rank's layer without its peers: as many rows, and all of them on the experts here."""
    return replace(inputs, topk_ids=inputs.topk_ids % len(inputs.w_down))
