"""swiglu and its backward, on rows: act = silu(gate) * up.

Backward reads dact before the router weight is applied, which makes one kernel enough for three results: dpre (with the
weight), the weighted act that dw_down contracts with, and the router weight's own gradient <dact, act>.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shapes import Need, Plan
from .blocks import blocks_for, launch_options
from .tile import narrow, sigmoid


# --8<-- [start:forward]
@triton.jit
def clamp(gate, up, LIMIT: tl.constexpr):
    """gate and up, clamped to LIMIT if there is one. Comparisons, not minimum and maximum: NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate, up


@triton.jit
def act_of(gate, up, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """silu(gate) * up of a tile in fp32, as exact as dtype deserves."""
    gate, up = clamp(gate, up, LIMIT)
    s, _ = sigmoid(gate, dtype)
    return gate * s * up


@triton.jit
def load_gate_up(pre_ptr, row, i, mask, I: tl.constexpr):
    """gate and up of a tile of pre (R, 2, I), in fp32."""
    at = pre_ptr + row.to(tl.int64)[:, None] * (2 * I) + i[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + I, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit(do_not_specialize=["E"])
def swiglu_kernel(
    pre_ptr,  # (R, 2, I) read
    act_ptr,  # (R, I) written
    row_start_ptr,  # (E+1,) int32, read
    E,
    LIMIT: tl.constexpr,
    I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program for each block of rows; it walks over the columns. Rows without an expert are skipped.

    Example: pre = [[[0., 1.], [2., 3.]]] gives act = [[silu(0)*2, silu(1)*3]] = [[0., 2.1932]].
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    live = row < tl.load(row_start_ptr + E)
    for start in range(0, I, BLOCK_N):
        i = start + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (i < I)[None, :]
        gate, up = load_gate_up(pre_ptr, row, i, mask, I)
        act = act_of(gate, up, LIMIT, act_ptr.dtype.element_ty)
        to_act = act_ptr + row.to(tl.int64)[:, None] * I + i[None, :]
        tl.store(to_act, narrow(act, act_ptr.dtype.element_ty), mask=mask)


# --8<-- [end:forward]


# --8<-- [start:backward]
@triton.jit
def act_and_dpre(dact, gate, up, weight, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """act, dgate and dup of a tile. dact is without the router weight, which dgate and dup carry; all in fp32."""
    clamped_gate, clamped_up = clamp(gate, up, LIMIT)
    s, one_minus_s = sigmoid(clamped_gate, dtype)
    silu = clamped_gate * s
    d = weight * dact
    dgate = d * clamped_up * (s + silu * one_minus_s)
    dup = d * silu
    if LIMIT is not None:
        dgate = tl.where(gate <= LIMIT, dgate, 0.0)
        dup = tl.where((up <= LIMIT) & (up >= -LIMIT), dup, 0.0)
    return silu * clamped_up, dgate, dup


@triton.jit(do_not_specialize=["R"])
def swiglu_backward_kernel(
    dact_ptr,  # (R, I) read, without the router weight
    pre_ptr,  # (R, 2, I) read
    topk_weights_ptr,  # (T, K) read, any strides
    token_of_row_ptr,  # (R,) int32, read
    slot_of_row_ptr,  # (R,) int32, read
    dpre_ptr,  # (R, 2, I) written if DPRE
    weighted_act_ptr,  # (R, I) written if WEIGHTED_ACT
    dtopk_weights_ptr,  # (T, K) written at live routes if DWEIGHT
    R,
    stride_t,
    stride_k,
    K: tl.constexpr,
    LIMIT: tl.constexpr,
    DPRE: tl.constexpr,
    WEIGHTED_ACT: tl.constexpr,
    DWEIGHT: tl.constexpr,
    I: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program for each block of rows; it walks over the columns, so a row's <dact, act> has one owner.

    Example: pre = [[[0.], [2.]]] (gate 0, up 2), dact = [[3.]], weight 0.5: sigmoid is 1/2, so act = 0,
    dgate = 0.5*3 * 2 * 1/2 = 1.5, dup = 0, weighted act = 0 and dtopk_weight = 3*0 = 0.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.load(token_of_row_ptr + row, mask=row < R, other=-1)
    slot = tl.load(slot_of_row_ptr + row, mask=row < R, other=-1)
    live = token >= 0
    at_weight = topk_weights_ptr + token.to(tl.int64) * stride_t + slot.to(tl.int64) * stride_k
    weight = tl.load(at_weight, mask=live, other=0.0).to(tl.float32)[:, None]

    dweight = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, I, BLOCK_N):
        i = start + tl.arange(0, BLOCK_N)
        mask = live[:, None] & (i < I)[None, :]
        gate, up = load_gate_up(pre_ptr, row, i, mask, I)
        at_row = row.to(tl.int64)[:, None] * I + i[None, :]
        dact = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
        if DPRE or DWEIGHT:
            dact = tl.load(dact_ptr + at_row, mask=mask, other=0.0).to(tl.float32)

        act, dgate, dup = act_and_dpre(dact, gate, up, weight, LIMIT, pre_ptr.dtype.element_ty)
        if DWEIGHT:
            dweight += tl.sum(dact * act, 1)
        if WEIGHTED_ACT:
            tl.store(weighted_act_ptr + at_row, narrow(weight * act, weighted_act_ptr.dtype.element_ty), mask=mask)
        if DPRE:
            at_gate = dpre_ptr + row.to(tl.int64)[:, None] * (2 * I) + i[None, :]
            tl.store(at_gate, narrow(dgate, dpre_ptr.dtype.element_ty), mask=mask)
            tl.store(at_gate + I, narrow(dup, dpre_ptr.dtype.element_ty), mask=mask)

    if DWEIGHT:
        to_dweight = dtopk_weights_ptr + token.to(tl.int64) * K + slot
        tl.store(to_dweight, narrow(dweight, dtopk_weights_ptr.dtype.element_ty), mask=live)


# --8<-- [end:backward]


def swiglu(pre: Tensor, plan: Plan, swiglu_limit: float | None) -> Tensor:
    """pre (R, 2, I) -> act (R, I), computed in fp32 and rounded once. Rows without an expert are left unwritten."""
    R, _, I = pre.shape
    act = pre.new_empty(R, I)
    tile = blocks_for(pre.dtype).elementwise
    if R:
        swiglu_kernel[(triton.cdiv(R, tile.BLOCK_R),)](
            pre, act, plan.row_start, len(plan.row_start) - 1, LIMIT=swiglu_limit, I=I, **launch_options(tile)
        )
    return act


def swiglu_backward(
    dact: Tensor | None, pre: Tensor, topk_weights: Tensor, plan: Plan, swiglu_limit: float | None, need: Need
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dact (R, I) without the router weight, pre (R, 2, I), topk_weights (T, K), any strides ->
    dpre (R, 2, I), weighted act (R, I), dtopk_weights (T, K); each None where `need` has no use for it.

    dact is read for dpre and dtopk_weights only, and may be None if neither is needed.
    """
    R, _, I = pre.shape
    K = topk_weights.shape[1]
    dpre = torch.empty_like(pre) if need.dpre else None
    weighted_act = pre.new_empty(R, I) if need.dw_down else None
    # Masked routes have no row whose program could write them: zero first.
    dtopk_weights = topk_weights.new_zeros(topk_weights.shape) if need.dtopk_weights else None
    tile = blocks_for(pre.dtype).elementwise
    if R:
        swiglu_backward_kernel[(triton.cdiv(R, tile.BLOCK_R),)](
            dact,
            pre,
            topk_weights,
            plan.token_of_row,
            plan.slot_of_row,
            dpre,
            weighted_act,
            dtopk_weights,
            R,
            *topk_weights.stride(),
            K=K,
            LIMIT=swiglu_limit,
            DPRE=need.dpre,
            WEIGHTED_ACT=need.dw_down,
            DWEIGHT=need.dtopk_weights,
            I=I,
            **launch_options(tile),
        )
    return dpre, weighted_act, dtopk_weights
