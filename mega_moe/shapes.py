"""The facts and the bundles that every room of the house shares. Nothing here computes on tensors.

A `Problem` is what can be known without touching a tensor's values. `Inputs`, `Plan`, `Saved` and `Grads` are named
bundles of tensors, so that no function passes or returns a tuple whose order must be remembered. The letters are the
glossary's: T tokens, K routes per token (top_k), E experts, H hidden size, I intermediate size, R = T*K rows.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

SAVES = ("pre", "inputs")
"""What forward may keep for backward: pre as well, or nothing that can be made again from the inputs."""

PRECISIONS = ("bf16", "fp8", "fp8_bwd", "mxfp8")
"""What matrix products may read; see reference/quantize.py. "bf16" is the layer's own dtype, whatever it is."""


@dataclass(frozen=True)
class Problem:
    """One MoE layer's sizes, dtype and device: all that a rung needs to say whether it can run.

    Attributes:
        T: tokens.
        H: hidden size.
        I: intermediate size of one expert.
        E: experts.
        K: routes per token (top_k).
        dtype: of x and of both weights.
        device: a device type, "cpu" or "cuda".
        swiglu_limit: clamps gate from above and up from both sides before SwiGLU; None: no clamp.
        save: "pre": forward keeps the plan and pre for backward; "inputs": the plan alone; backward makes pre again.
        precision: what the matrix products read, one of PRECISIONS.
        num_reserved_sms: processors that resident programs leave to others.
        heap: over ranks, the key of their heaps (see symmetric.py); 0 without.
        tokens_per_rank: over ranks, how many of the T tokens each rank of this process holds, one rank after another;
            () without.
        ranks: how many there are, where each has a process of its own; 0: all of them are in this one.
        max_rows: the most rows that the experts of this process may receive; 0: T*K, for nobody else sends any.
        max_tokens: the most tokens that a rank may have in a call over these heaps; 0: as many as it has.
    """

    T: int
    H: int
    I: int
    E: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    swiglu_limit: float | None = None
    save: str = "pre"
    precision: str = "bf16"
    num_reserved_sms: int = 0
    heap: int = 0
    tokens_per_rank: tuple[int, ...] = ()
    ranks: int = 0
    max_rows: int = 0
    max_tokens: int = 0

    @property
    def R(self) -> int:
        """Rows that the experts here may receive: T*K, or max_rows. Those that stay unused cost nothing."""
        return self.max_rows or self.T * self.K

    @property
    def W(self) -> int:
        """Ranks, 1 without."""
        return self.ranks or max(len(self.tokens_per_rank), 1)

    @property
    def E_here(self) -> int:
        """Experts whose weights are in this process: all, or with a process for each rank E / W."""
        return self.E // self.ranks if self.ranks else self.E

    @property
    def by_all_to_all(self) -> bool:
        """Whether a collective carries rows between processes, and not heaps, which have room for max_rows."""
        return self.ranks > 0 and not self.max_rows

    @property
    def token_scales(self) -> int:
        """How many scales a token has where forward reads it as 8-bit codes, one for 128 of them; 0 elsewhere."""
        return -(-self.H // 128) if self.precision == "fp8" else 0

    def plan_shapes(self) -> list[tuple[int, ...]]:
        """Of the four arrays of the plan that forward keeps: that of the rows which experts here receive; where rows
        are not received into heaps, that of the routes of the tokens here."""
        planned = self.E_here if self.max_rows else self.E
        return [(planned + 1,), (self.R,), (self.R,), (self.T, self.K)]

    def at(self, **changes) -> "Problem":
        """The same problem with some facts changed."""
        return replace(self, **changes)


PRESETS = {
    "tiny": Problem(T=64, H=64, I=48, E=8, K=2),
    "qwen3-30b-a3b": Problem(T=16384, H=2048, I=768, E=128, K=8),
    "qwen3-235b-a22b": Problem(T=16384, H=4096, I=1536, E=128, K=8),
}
"""Layers to try: one that a CPU runs in seconds, and one layer each of the two Qwen3 MoE models."""


@dataclass(frozen=True)
class Inputs:
    """The five tensors of a layer. None of them is ever written.

    Attributes:
        x: (T, H).
        topk_ids: (T, K), int32 or int64; -1 masks a route.
        topk_weights: (T, K).
        w_gate_up: (E, 2, I, H); 0 is gate, 1 is up. With a process for each rank E / W experts, of this rank.
        w_down: (E, H, I), likewise.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w_gate_up: Tensor
    w_down: Tensor

    def problem(self, *, ranks: int = 0, **facts) -> Problem:
        """The facts of these tensors, and those that no tensor shows, by their names."""
        T, H = self.x.shape
        E_here, _, I, _ = self.w_gate_up.shape
        K, dtype, device = self.topk_ids.shape[1], self.x.dtype, self.x.device.type
        return Problem(T, H, I, E_here * max(ranks, 1), K, dtype, device, ranks=ranks, **facts)


class Plan(NamedTuple):
    """Where every route goes: rows sorted by expert and, within an expert, by token and slot. All int32.

    Rows row_start[E] : R belong to no expert (their routes are masked); token_of_row and slot_of_row are -1 there.

    Example: T=3, K=2, E=3, topk_ids = [[2, 0], [0, -1], [2, 2]]
        row_start    = [0, 2, 2, 5]          expert 1 has no rows
        token_of_row = [0, 1, 0, 2, 2, -1]   row 0 is token 0, slot 1; row 2 is token 0, slot 0
        slot_of_row  = [1, 0, 0, 0, 1, -1]
        row_of_slot  = [[2, 0], [1, -1], [3, 4]]

    Attributes:
        row_start: (E+1,); the rows of expert e are `row_start[e] : row_start[e+1]`.
        token_of_row: (R,); the token of which row r is a copy.
        slot_of_row: (R,); the slot of that token which row r serves.
        row_of_slot: (T, K); the row of slot k of token t, -1 for a masked route.
    """

    row_start: Tensor
    token_of_row: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor


class Saved(NamedTuple):
    """What forward keeps for backward, beside the inputs; the shapes depend on the problem alone.

    The plan is kept because it is small and backward walks the same rows. pre is the one tensor worth keeping beside
    it: to make it again repeats the larger GEMM, `4*R*H*I` flops, so that backward has 16 units of `R*H*I` to do and
    not 12; to keep it takes `R * 2I` elements, 384 MiB for a layer of qwen3-30b-a3b at T = 16384. All else is cheap to
    make again: rows are copies of x, act is one elementwise pass away from pre, and backward has no use for out.

    Attributes:
        plan: where every route goes.
        pre: (R, 2, I), in x's dtype; rows of masked routes are never written. None where `Problem.save` is "inputs".
        call: (1,) int32, over ranks: which call of theirs forward was, so that ranks which do not go back through the
            same one find out. None on one rank.
    """

    plan: Plan
    pre: Tensor | None
    call: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """As a flat list, without what is None: so torch's custom operators return it."""
        return [*self.plan, *(t for t in (self.call, self.pre) if t is not None)]

    @classmethod
    def of(cls, tensors: list[Tensor], problem: Problem) -> "Saved":
        """The inverse of `tensors`."""
        plan, rest = tensors[:4], iter(tensors[4:])
        call = next(rest) if problem.heap else None
        return cls(Plan(*plan), next(rest, None), call)


@dataclass(frozen=True)
class Need:
    """Which gradients somebody asked for; the others are not computed.

    Attributes:
        dx: whether that of x is needed.
        dtopk_weights: whether that of topk_weights is needed.
        dw_gate_up: whether that of w_gate_up is needed.
        dw_down: whether that of w_down is needed.
    """

    dx: bool = True
    dtopk_weights: bool = True
    dw_gate_up: bool = True
    dw_down: bool = True

    @property
    def dpre(self) -> bool:
        """Whether any needed gradient is made from dpre."""
        return self.dx or self.dw_gate_up

    @property
    def dact(self) -> bool:
        """Whether any needed gradient is made from dact."""
        return self.dpre or self.dtopk_weights


@dataclass(frozen=True)
class Grads:
    """The gradients, each with the dtype of its input; None where nobody asked.

    Attributes:
        dx: (T, H).
        dtopk_weights: (T, K).
        dw_gate_up: (E, 2, I, H).
        dw_down: (E, H, I).
    """

    dx: Tensor | None = None
    dtopk_weights: Tensor | None = None
    dw_gate_up: Tensor | None = None
    dw_down: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Those that were computed, in the order of the fields."""
        return [g for g in (getattr(self, f.name) for f in fields(self)) if g is not None]
