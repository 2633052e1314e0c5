"""What a precision decides: the launches that multiply, their tiles, and what makes their operands of tensors.

Rungs persistent and ranks walk through the same steps in every precision, with the products of one of these for each
direction.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple

from ..kept import once
from ..shapes import Problem
from . import blocks, mx_quantize, mx_scaled, persistent, quantize, scaled
from .weights import readable


class Products(NamedTuple):
    """One way to multiply.

    Attributes:
        launches: a module with gate_up_swiglu, down, dact_swiglu, dx_slots and weight_grad.
        tiles: of a problem.
        rows: of tokens, which are contracted along their columns.
        columns: of tokens, which are contracted over an expert's rows.
        weights: as forward contracts them.
        transposed: of weights, as backward contracts them.
        why_not: why the current device cannot multiply so; None if it can.
        note: what is slower than it should be on the current device, for a problem; None if nothing is.
    """

    launches: ModuleType
    tiles: Callable
    rows: Callable
    columns: Callable
    weights: Callable
    transposed: Callable
    why_not: Callable[[], str | None]
    note: Callable[[Problem], str | None]


AS_IS = Products(
    launches=persistent,
    tiles=blocks.persistent_for,
    rows=lambda t, table: t,
    columns=lambda t, table: t,
    weights=readable,
    transposed=readable,
    why_not=lambda: None,
    note=blocks.persistent_note,
)
FP8 = Products(
    launches=scaled,
    tiles=blocks.fp8_for,
    rows=quantize.quantise_rows_in_blocks,
    columns=quantize.quantise_columns,
    weights=quantize.quantise_weights,
    transposed=partial(quantize.quantise_weights, codes=False, transposed=True),
    why_not=blocks.why_not_fp8,
    note=lambda problem: blocks.fp8_note(),
)
MX = Products(
    launches=mx_scaled,
    tiles=blocks.mx_for,
    rows=lambda t, table: mx_quantize.quantise_rows(t),
    columns=mx_quantize.quantise_columns,
    weights=partial(once, mx_quantize.quantise_weights),
    transposed=partial(once, mx_quantize.quantise_transposed),
    why_not=blocks.why_not_mx,
    note=lambda problem: blocks.mx_note(),
)

PRODUCTS = {"bf16": (AS_IS, AS_IS), "fp8": (FP8, FP8), "fp8_bwd": (AS_IS, FP8), "mxfp8": (MX, MX)}
"""Of forward, and of backward."""
