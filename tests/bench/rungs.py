"""The six products of a layer as the rungs' own kernels make them. Imported where Triton can run, and there alone.

`product` gives the call to be timed, and what brings its result into the order of `Gemm`'s, outside the time: a rung
that stores by slot, or in blocks, is not asked to do otherwise.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mega_moe.kernels import blocks, fused_swiglu, gathered, grouped_gemm, persistent
from mega_moe.kernels.tile_table import TileTable, tile_table
from mega_moe.shapes import Need, Plan, Problem

DACT = Need()  # dpre, weighted act and dtopk_weights

Product = tuple[Callable[[], object], Callable[[object], Tensor]]


def product(rung: str, name: str, gemm) -> Product:
    """The product `name` of a `gemms.Gemm` by a rung."""
    return {"grouped": grouped, "swiglu": swiglu, "gather": gather, "persistent": resident}[rung](name, gemm)


def grouped(name: str, gemm) -> Product:
    """One kernel over rows, one for weight gradients."""
    a, b, plan = gemm.a, gemm.b, gemm.layer.plan
    kernel = grouped_gemm.weight_grad if gemm.is_weight_grad else grouped_gemm.grouped_gemm
    return lambda: kernel(a, b, plan), as_it_is


def swiglu(name: str, gemm) -> Product:
    """gate_up with act, dact with dpre and weighted act, over rows that lie side by side."""
    v = gemm.layer
    if name == "gate_up":
        w = v.w_gate_up.flatten(1, 2)
        return lambda: fused_swiglu.gate_up_swiglu(gemm.a, w, v.plan, None, True, True), first
    return lambda: fused_swiglu.dact_swiglu(gemm.a, v.w_down, v.pre, v.topk_weights, v.plan, None, DACT), first


def gather(name: str, gemm) -> Product:
    """From tokens to slots."""
    v, plan = gemm.layer, gemm.layer.plan
    w_gate_up, dpre = v.w_gate_up.flatten(1, 2), v.dpre.flatten(1)
    return {
        "gate_up": (lambda: gathered.gathered_gate_up(v.x, w_gate_up, plan, None, True, True), first),
        "down": (lambda: gathered.slot_gemm(v.act, v.w_down, plan), lambda slots: rows_of(slots, plan)),
        "dact": (lambda: gathered.gathered_dact(v.dy, v.w_down, v.pre, v.topk_weights, plan, None, DACT), first),
        "drows": (lambda: gathered.slot_gemm(dpre, w_gate_up.mT, plan), lambda slots: rows_of(slots, plan)),
        "dw_gate_up": (lambda: gathered.gathered_weight_grad(dpre, v.x, plan, torch.empty_like(w_gate_up)), as_it_is),
        "dw_down": (
            lambda: gathered.gathered_weight_grad(v.act, v.dy, plan, torch.empty_like(v.w_down).mT),
            lambda dw: dw.mT,
        ),
    }[name]


def resident(name: str, gemm) -> Product:
    """From tokens to slots by resident programs. Every call makes its tile table: tickets are drawn once."""
    v, plan = gemm.layer, gemm.layer.plan
    (T, H), (E, _, I, _) = v.x.shape, v.w_gate_up.shape
    tiles = blocks.persistent_for(Problem(T, H, I, E, plan.row_of_slot.shape[1], v.x.dtype, v.x.device.type))
    w_gate_up = v.w_gate_up.flatten(1, 2)
    table = lambda: tile_table(plan, tiles)
    act, dpre = (in_blocks(t, table()) for t in (v.act, v.dpre.flatten(1)))
    return {
        "gate_up": (lambda: persistent.gate_up_swiglu(v.x, w_gate_up, plan, table(), None, True, True), first),
        "down": (lambda: persistent.down(act, v.w_down, plan, table()), lambda slots: rows_of(slots, plan)),
        "dact": (
            lambda: persistent.dact_swiglu(v.dy, v.w_down, v.pre, v.topk_weights, plan, table(), None, DACT),
            lambda results: results[0][table().route_in_blocks >= 0],
        ),
        "drows": (lambda: persistent.dx_slots(dpre, w_gate_up, plan, table()), lambda slots: rows_of(slots, plan)),
        "dw_gate_up": (
            lambda: persistent.weight_grad(dpre, v.x, table(), "dw_gate_up", torch.empty_like(w_gate_up)),
            as_it_is,
        ),
        "dw_down": (
            lambda: persistent.weight_grad(act, v.dy, table(), "dw_down", torch.empty_like(v.w_down).mT),
            lambda dw: dw.mT,
        ),
    }[name]


def in_blocks(rows: Tensor, table: TileTable) -> Tensor:
    """rows (R, C), all of them live, in blocks, zeros where a block is padded."""
    placed = table.in_blocks(rows.shape[1], like=rows).zero_()
    blocks_of_rows = table.counters[0] * table.tiles.BLOCK_R  # behind them the table is not written
    live = (table.route_in_blocks >= 0) & (torch.arange(len(placed), device=rows.device) < blocks_of_rows)
    placed[live] = rows
    return placed


def rows_of(slots: Tensor, plan: Plan) -> Tensor:
    """slots (T, K, C) -> (R, C), all of them live."""
    return slots[plan.token_of_row, plan.slot_of_row]


def first(results: tuple) -> Tensor:
    """pre, or dpre: what there is of it first, as rows."""
    return results[0].flatten(1)


def as_it_is(result: Tensor) -> Tensor:
    """Rows, or a weight's gradient."""
    return result
