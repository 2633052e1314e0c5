"""What a layer costs, what the hardware allows, and so how much of the hardware a rung uses.

Two ledgers of the same layer. `steps` is the bill of a rung that writes every intermediate to memory: five kernels a
direction, each reading its operands once and writing its result once. `fused` is the least that any rung can pay: each
input read once, each output written once, pre kept for backward, and everything else staying on the chip. The ceiling
that all rungs are measured against is the second, so that their shares compare.

Flops count the matrix products only, two a multiply-add; elementwise work is paid in bytes. `rows` everywhere is the
number of live routes (T*K when none is masked): masked routes cost nothing.
"""

import re
from dataclasses import dataclass

import torch

from .shapes import Problem

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Cost:
    """Work of one step: floating-point operations of its matrix products, and bytes to or from memory."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


def useful_flops(problem: Problem, direction: str, rows: int | None = None) -> int:
    """6*R*H*I forward (gate, up, down: three products of 2*R*H*I), 12*R*H*I backward (two for each of the three).

    Recomputing pre in backward is not counted: it is not what was asked for.
    """
    _check_direction(direction)
    return {"forward": 6, "backward": 12}[direction] * _rows(problem, rows) * problem.H * problem.I


def steps(problem: Problem, direction: str, rows: int | None = None) -> dict[str, Cost]:
    """The cost of each step when every intermediate is written to memory, in the order in which they run.

    Experts without rows are assumed to be few: each of min(E, R) experts' weights is read, all E gradients are written.
    """
    _check_direction(direction)
    s = _Sizes.of(problem, rows)
    if direction == "forward":
        return {
            "dispatch": Cost(0, s.topk_ids + s.x + s.rows),
            "gate_up": Cost(4 * s.product, s.rows + s.w_gate_up + s.pre),
            "swiglu": Cost(0, s.pre + s.act),
            "down": Cost(2 * s.product, s.act + s.w_down + s.rows),
            "combine": Cost(0, s.rows + s.topk_weights + s.x),
        }
    return {
        # dy -> dy_rows
        "combine": Cost(0, s.topk_ids + s.x + s.rows),
        # dy_rows -> dact; dy_rows, weight*act -> dw_down
        "down": Cost(4 * s.product, (s.rows + s.w_down + s.act) + (s.rows + s.act + s.dw_down)),
        # pre, dact -> dpre, weight*act and the router weights' gradient
        "swiglu": Cost(0, (s.pre + s.act) + (s.pre + s.act + s.topk_weights)),
        # dpre -> drows; x -> rows once more; dpre, rows -> dw_gate_up
        "gate_up": Cost(
            8 * s.product, (s.pre + s.w_gate_up + s.rows) + (s.x + s.rows) + (s.pre + s.rows + s.dw_gate_up)
        ),
        # drows -> dx
        "dispatch": Cost(0, s.rows + s.x),
    }


def tiles(problem: Problem, rows: int | None = None) -> dict[str, Cost]:
    """The bill of a rung that gathers and fuses, by the result of each of its kernels, in the order in which they run.

    Tokens are read from memory once, however many rows gather them: the cache has to see to that. gate_up stores pre
    and act; dact reads pre, and stores dpre and the weighted act in its place.
    """
    s = _Sizes.of(problem, rows)
    return {
        "gate_up": Cost(4 * s.product, s.x + s.w_gate_up + s.pre + s.act),
        "down": Cost(2 * s.product, s.act + s.w_down + s.rows),
        "y": Cost(0, s.rows + s.topk_weights + s.x),
        "dact": Cost(2 * s.product, s.x + s.w_down + s.pre + s.pre + s.act),
        "drows": Cost(4 * s.product, s.pre + s.w_gate_up + s.rows),
        "dx": Cost(0, s.rows + s.x),
        "dw_gate_up": Cost(4 * s.product, s.pre + s.x + s.dw_gate_up),
        "dw_down": Cost(2 * s.product, s.act + s.x + s.dw_down),
    }


def fused(problem: Problem, direction: str, rows: int | None = None) -> Cost:
    """The least any rung pays: inputs once, outputs once, pre written by forward and read by backward."""
    s = _Sizes.of(problem, rows)
    inputs = s.x + s.topk_ids + s.topk_weights + s.w_gate_up + s.w_down
    flops = useful_flops(problem, direction, rows)
    if direction == "forward":
        return Cost(flops, inputs + s.pre + s.x)
    gradients = s.x + s.topk_weights + s.dw_gate_up + s.dw_down
    return Cost(flops, s.x + inputs + s.pre + gradients)


BILLED = ("grouped", "swiglu", "gather", "fused")
"""The rungs with a bill of their own, and the least; the rungs above gather move the bytes of gather on one GPU."""

PASSES = {
    "forward": {
        "topk_ids": (1, 1, 1, 1),
        "topk_weights": (1, 1, 1, 1),
        "x": (1, 1, 1, 1),
        "rows": (2, 2, 0, 0),  # dispatch writes them, gate_up reads them: gather reads x instead
        "w_gate_up": (1, 1, 1, 1),
        "pre": (2, 1, 1, 1),  # written for backward; swiglu does not read it again
        "act": (2, 2, 2, 0),
        "w_down": (1, 1, 1, 1),
        "out": (2, 2, 2, 0),
        "y": (1, 1, 1, 1),
    },
    "backward": {
        "topk_ids": (1, 1, 1, 1),
        "topk_weights": (1, 1, 1, 2),
        "dy": (1, 1, 2, 1),  # gather reads it twice, and has no dy_rows
        "dy_rows": (3, 3, 0, 0),
        "w_down": (1, 1, 1, 1),
        "dact": (2, 0, 0, 0),  # from swiglu on it stays in registers
        "pre": (1, 1, 1, 1),
        "dpre": (3, 3, 3, 0),
        "weighted act": (2, 2, 2, 0),
        "dw_down": (1, 1, 1, 1),
        "w_gate_up": (1, 1, 1, 1),
        "drows": (2, 2, 2, 0),
        "dx": (1, 1, 1, 1),
        "x": (1, 1, 1, 1),
        "rows": (2, 2, 0, 0),
        "dw_gate_up": (1, 1, 1, 1),
    },
}
"""How often each tensor passes through memory, of each of BILLED. The router weights' gradient is billed as
topk_weights."""

SIZED_AS = {
    "y": "x",
    "dy": "x",
    "dx": "x",
    "out": "rows",
    "dy_rows": "rows",
    "drows": "rows",
    "dact": "act",
    "weighted act": "act",
    "dpre": "pre",
}
"""Tensors that are as large as another, which _Sizes has."""


def bills(problem: Problem, direction: str, rows: int | None = None) -> dict[str, dict[str, int]]:
    """Bytes by tensor, of each of BILLED: so what a rung removes is its difference from the one before.

    They add up to what the ledgers say: grouped's to `steps`, fused's to `fused`, and gather's of both directions to
    `tiles`, with the ids, and the router weights' gradient, which `tiles` leaves out.
    """
    _check_direction(direction)
    sizes = _Sizes.of(problem, rows)
    size = lambda tensor: getattr(sizes, SIZED_AS.get(tensor, tensor))
    return {
        rung: {tensor: times[n] * size(tensor) for tensor, times in PASSES[direction].items()}
        for n, rung in enumerate(BILLED)
    }


@dataclass(frozen=True)
class _Sizes:
    """Bytes of each tensor, and one product's multiply-adds."""

    x: int
    rows: int
    pre: int
    act: int
    topk_ids: int
    topk_weights: int
    w_gate_up: int
    w_down: int
    dw_gate_up: int
    dw_down: int
    product: int

    @classmethod
    def of(cls, p: Problem, rows: int | None) -> "_Sizes":
        R, b = _rows(p, rows), p.dtype.itemsize
        live_experts = min(p.E, R)
        return cls(
            x=p.T * p.H * b,
            rows=R * p.H * b,
            pre=R * 2 * p.I * b,
            act=R * p.I * b,
            topk_ids=p.T * p.K * 8,
            topk_weights=p.T * p.K * 4,
            w_gate_up=live_experts * 2 * p.I * p.H * b,
            w_down=live_experts * p.H * p.I * b,
            dw_gate_up=p.E * 2 * p.I * p.H * b,
            dw_down=p.E * p.H * p.I * b,
            product=R * p.H * p.I,
        )


def _rows(problem: Problem, rows: int | None) -> int:
    return problem.R if rows is None else rows


def _check_direction(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be forward or backward, not {direction!r}")


@dataclass(frozen=True)
class Ceiling:
    """What a device can do at most, by its data sheet: dense matrix rates (no sparsity) and memory bandwidth.

    fp32 is the plain IEEE rate, since this project computes fp32 without TF32. Under sustained load no card reaches
    these figures: a 700 W card lowers its clocks before its tensor cores are full.
    """

    name: str
    tflops_16: float  # bf16 and fp16
    tflops_32: float
    gb_per_s: float
    source: str

    def tflops(self, dtype: torch.dtype) -> float | None:
        """Teraflops a second in `dtype`, None for float64, which no rung but the reference runs in."""
        return {
            torch.bfloat16: self.tflops_16,
            torch.float16: self.tflops_16,
            torch.float32: self.tflops_32,
        }.get(dtype)


_A100 = "NVIDIA A100 Tensor Core GPU data sheet, 2021"
_H100 = "NVIDIA H100 Tensor Core GPU data sheet (figures with sparsity, halved)"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet (figures with sparsity, halved)"
_B200 = "NVIDIA Blackwell data sheet, HGX B200 per GPU (figures with sparsity, halved)"
_MI300X = "AMD Instinct MI300X data sheet"
_MI350X = "AMD Instinct MI350X data sheet"

CEILINGS = (
    # What the device calls itself (first match counts), and its ceiling.
    (r"\bA100.*40GB", Ceiling("A100 40GB", 312.0, 19.5, 1555.0, _A100)),
    (r"\bA100.*PCIe", Ceiling("A100 PCIe 80GB", 312.0, 19.5, 1935.0, _A100)),
    (r"\bA100", Ceiling("A100 SXM 80GB", 312.0, 19.5, 2039.0, _A100)),
    (r"\bH100 PCIe", Ceiling("H100 PCIe", 756.0, 51.0, 2000.0, _H100)),
    (r"\bH100 NVL", Ceiling("H100 NVL", 835.5, 60.0, 3900.0, _H100)),
    (r"\bH100", Ceiling("H100 SXM", 989.5, 67.0, 3350.0, _H100)),
    (r"\bH200 NVL", Ceiling("H200 NVL", 835.5, 60.0, 4800.0, _H200)),
    (r"\bH200", Ceiling("H200 SXM", 989.5, 67.0, 4800.0, _H200)),
    (r"\bB200", Ceiling("B200", 2250.0, 75.0, 7700.0, _B200)),
    (r"\bMI300X", Ceiling("MI300X", 1307.4, 163.4, 5300.0, _MI300X)),
    (r"\bMI350X", Ceiling("MI350X", 2309.6, 144.2, 8000.0, _MI350X)),
)


def ceiling(device_name: str) -> Ceiling | None:
    """The ceiling of the device that calls itself `device_name` ("NVIDIA H200"), None where it is not known."""
    for pattern, known in CEILINGS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return known
    return None


def allowed_ms(problem: Problem, direction: str, ceiling: Ceiling, rows: int | None = None) -> float | None:
    """Milliseconds below which the hardware cannot go: `fused` work at full matrix rate or full bandwidth, whichever
    takes longer. None where the dtype has no rate."""
    tflops = ceiling.tflops(problem.dtype)
    if tflops is None:
        return None
    cost = fused(problem, direction, rows)
    return max(cost.flops / (tflops * 1e9), cost.bytes / (ceiling.gb_per_s * 1e6))
