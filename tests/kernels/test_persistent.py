"""Resident programs: exact where silu is relu, at every tail, whoever draws which ticket, in strips of any length."""

from dataclasses import replace

import pytest
import torch
from cases import DEVICE, framed, same_bits, transposed
from exact import (
    GATE,
    both_dtypes,
    by_slot,
    dispatched,
    every_dtype,
    every_need,
    every_routing,
    every_size,
    gate_up_and_act,
    gate_up_weights,
    grad,
    plan_of,
    pre_of,
    product,
    router_weights,
    rows_of,
    same_values,
    shuffled_plan,
    swiglu_gradients,
    whole,
)
from torch import Tensor
from triton import cdiv

from mega_moe import routing
from mega_moe.kernels import persistent
from mega_moe.kernels.blocks import Persistent, blocks_for
from mega_moe.kernels.persistent import dact_swiglu, down, dx_slots, gate_up_swiglu, weight_grad
from mega_moe.kernels.tile_table import TICKETS, TileTable, tile_table
from mega_moe.kernels.weights import readable
from mega_moe.samples import random_inputs
from mega_moe.shapes import Need, Plan, Problem

LIMIT = 3 * GATE  # reached by gates alone
nan = torch.nan


def tensor(values: list) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def table_of(plan: Plan, dtype: torch.dtype = torch.float32) -> TileTable:
    """Good for one launch of each kernel: a ticket is drawn once."""
    return tile_table(plan, blocks_for(dtype).persistent)


def in_blocks(rows: Tensor, plan: Plan, table: TileTable, padding: float | None) -> Tensor:
    """rows (R, C) laid out in blocks: behind an expert's last row `padding`; or (None) that row again, as far as
    gate_up writes a block. NaN behind the last block with any."""
    laid_out = table.in_blocks(rows.shape[1], like=rows).fill_(nan)
    BLOCK_R, SHORT = table.tiles.BLOCK_R, table.tiles.gate_up.SHORT or 0
    blocks = [block for expert in rows_of(plan) for block in rows[expert].split(BLOCK_R) if len(block)]
    for n, block in enumerate(blocks):
        written = SHORT if padding is None and len(block) <= SHORT else BLOCK_R
        laid_out[n * BLOCK_R :][:written] = block[-1] if padding is None else padding
        laid_out[n * BLOCK_R :][: len(block)] = block
    return laid_out


def forward(plan: Plan, H: int, I: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (T, H) and w_gate_up (E, 2I, H) as it is read."""
    x = whole(len(plan.row_of_slot), H, dtype=dtype, most=1)
    return x, readable(gate_up_weights(len(plan.row_start) - 1, I, H, dtype))


def backward(plan: Plan, H: int, I: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """dy (T, H), w_down (E, H, I) as it is read, pre (R, 2, I), topk_weights (T, K)."""
    dy = whole(len(plan.row_of_slot), H, dtype=dtype, most=1)
    w = readable(whole(len(plan.row_start) - 1, H, I, dtype=dtype, most=1, seed=1))
    return dy, w, pre_of(plan, I, dtype), router_weights(plan)


def assert_forward(x: Tensor, w: Tensor, plan: Plan, limit: float | None = None) -> None:
    """pre by row and act in blocks, whose padding rows repeat the expert's last, or are not written: `down` reads and
    drops them."""
    table = table_of(plan, x.dtype)
    pre, act = gate_up_swiglu(x, w, plan, table, limit, True, True)
    expected_pre, expected_act = gate_up_and_act(dispatched(x, plan), w, plan, limit)
    assert same_values(pre, expected_pre)
    assert same_values(act, in_blocks(expected_act, plan, table, padding=None))


def assert_slots(plan: Plan, C: int, N: int, dtype: torch.dtype) -> None:
    """Both ways in which a weight may lie; NaN in padding rows."""
    a, w = whole(len(plan.token_of_row), C, dtype=dtype), whole(len(plan.row_start) - 1, N, C, dtype=dtype, seed=1)
    table = table_of(plan, dtype)
    a_in_blocks, expected = in_blocks(a, plan, table, padding=nan), by_slot(product(a, w, plan), plan)
    assert same_values(down(a_in_blocks, readable(w), plan, table), expected)
    assert same_values(dx_slots(a_in_blocks, readable(w.mT.contiguous()), plan, table), expected)


def assert_backward(dy: Tensor, w: Tensor, pre: Tensor, weights: Tensor, plan: Plan, limit=None, need=Need()) -> None:
    """dpre and weighted act in blocks, with exact zeros in padding rows; what is not needed is None."""
    table = table_of(plan, dy.dtype)
    results = dact_swiglu(dy, w, pre, weights, plan, table, limit, need)
    dpre, weighted_act, dweights = swiglu_gradients(dy, w, pre, weights, plan, limit)
    laid_out = [in_blocks(rows, plan, table, padding=0.0) for rows in (dpre.flatten(1), weighted_act)]
    for got, made, true in zip(
        results, (need.dpre, need.dw_down, need.dtopk_weights), (*laid_out, dweights), strict=True
    ):
        assert same_values(got, true) if made else got is None


def assert_weight_grad(tokens: Tensor, M: int, plan: Plan) -> None:
    """As an ordinary tensor and as the transpose of one; NaN in blocks that nobody owns."""
    a, E, N = whole(len(plan.token_of_row), M, dtype=tokens.dtype, seed=6), len(plan.row_start) - 1, tokens.shape[1]
    table = table_of(plan, tokens.dtype)
    laid_out, expected = in_blocks(a, plan, table, padding=0.0), grad(a, dispatched(tokens, plan), plan)
    for kernel, dw in (("dw_gate_up", a.new_full((E, M, N), nan)), ("dw_down", a.new_full((E, N, M), nan).mT)):
        assert weight_grad(laid_out, tokens, table, kernel, dw) is dw
        assert same_values(dw, expected)


# Examples.


def test_gate_up_does_its_example(framed_memory):
    x, w = tensor([[9.0, 9.0], [1.0, 2.0]]), readable(tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]]))
    plan = routing.plan(tensor([[-1], [0]]), 1)
    assert plan.token_of_row.tolist() == [1, -1]
    pre, act = gate_up_swiglu(x, w, plan, table_of(plan), None, pre=True, act=True)
    assert pre[0].tolist() == [[1.0], [2.0]] and round(act[0].item(), 4) == 1.4621


def test_slot_gemm_does_its_example(framed_memory):
    plan = routing.plan(tensor([[0, 0]]), 1)
    plan = plan._replace(slot_of_row=plan.slot_of_row.flip(0), row_of_slot=plan.row_of_slot.flip(1))
    table = table_of(plan)
    a = in_blocks(tensor([[1.0, 2.0], [3.0, 4.0]]), plan, table, padding=nan)
    assert down(a, readable(tensor([[[1.0, 0.0]]])), plan, table).tolist() == [[[3.0], [1.0]]]
    assert dx_slots(a, readable(tensor([[[1.0], [0.0]]])), plan, table).tolist() == [[[3.0], [1.0]]]


def test_dact_does_its_example(framed_memory):
    plan, weights = routing.plan(tensor([[-1], [0]]), 1), tensor([[nan], [0.5]])
    dy, w, pre = tensor([[9.0], [3.0]]), readable(tensor([[[1.0]]])), tensor([[[0.0], [2.0]], [[nan], [nan]]])
    dpre, weighted_act, dweights = dact_swiglu(dy, w, pre, weights, plan, table_of(plan), None, Need())
    assert dpre[0].tolist() == [1.5, 0.0] and weighted_act[0].tolist() == [0.0]
    assert dweights.tolist() == [[0.0], [0.0]]


def test_weight_grad_does_its_example(framed_memory):
    plan = plan_of([2, 0])._replace(token_of_row=tensor([1, 0]).int())
    table, tokens = table_of(plan), tensor([[5.0, 6.0], [3.0, 4.0]])
    assert table.token_in_blocks[:2].tolist() == [1, 0]
    a = in_blocks(tensor([[1.0], [2.0]]), plan, table, padding=0.0)
    dw = weight_grad(a, tokens, table, "dw_down", torch.full((2, 1, 2), nan, device=DEVICE))
    assert dw.tolist() == [[[13.0, 16.0]], [[0.0, 0.0]]]


# Sizes, strides, and what nobody wants.


@both_dtypes
@every_routing
def test_rows_of_an_expert(rows, masked, dtype, framed_memory):
    plan = shuffled_plan(rows, masked)
    assert_forward(*forward(plan, 48, 33, dtype), plan)
    assert_slots(plan, 48, 33, dtype)
    assert_backward(*backward(plan, 33, 48, dtype), plan)
    assert_weight_grad(whole(len(plan.row_of_slot), 33, dtype=dtype), 48, plan)


@every_size
def test_columns_and_contraction(H, I, dtype, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    assert_forward(*forward(plan, H, I, dtype), plan)
    assert_slots(plan, H, I, dtype)
    assert_backward(*backward(plan, H, I, dtype), plan)
    assert_weight_grad(whole(len(plan.row_of_slot), H, dtype=dtype), I, plan)


@every_dtype
def test_limit(dtype, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    assert_forward(*forward(plan, 32, 70, dtype), plan, LIMIT)
    assert_backward(*backward(plan, 32, 70, dtype), plan, LIMIT)


@pytest.mark.parametrize("K", [1, 3, 8])
def test_other_numbers_of_slots(K, framed_memory):
    """With masked routes in every token, and fewer routes than a block has rows."""
    plan = shuffled_plan([5, 0, 9, 2], masked=2 * K, K=K)
    assert_forward(*forward(plan, 24, 20, torch.bfloat16), plan)
    assert_slots(plan, 24, 20, torch.bfloat16)
    assert_backward(*backward(plan, 24, 20, torch.bfloat16), plan)
    assert_weight_grad(whole(len(plan.row_of_slot), 24), 20, plan)


STRIDES = {
    "transposed": transposed,
    "framed in NaN": lambda t: framed(t, gap=3, offset=1),
    "one column expanded": lambda t: t[:, :1].expand(-1, t.shape[1]),
    "one token expanded": lambda t: t[:1].expand(len(t), -1),
}
any_strides = pytest.mark.parametrize("lay_out", STRIDES.values(), ids=list(STRIDES))


@any_strides
def test_tokens_of_any_strides(lay_out, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    x, w = forward(plan, 40, 20, torch.float32)
    assert_forward(lay_out(x), w, plan)
    dy, *rest = backward(plan, 40, 20, torch.float32)
    assert_backward(lay_out(dy), *rest, plan)
    assert_weight_grad(lay_out(x), 20, plan)


@any_strides
def test_router_weights_of_any_strides(lay_out, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    dy, w, pre, weights = backward(plan, 33, 20, torch.float32)
    assert_backward(dy, w, pre, lay_out(weights.nan_to_num(0.25)), plan)


@pytest.mark.parametrize("made", [(True, False), (False, True), (False, False)], ids=["pre", "act", "neither"])
def test_what_nobody_wants_of_forward_is_not_made(made, framed_memory):
    plan = shuffled_plan([33, 0, 3])
    x, w = forward(plan, 48, 70, torch.bfloat16)
    table = table_of(plan, x.dtype)
    results = gate_up_swiglu(x, w, plan, table, None, *made)
    pre, act = gate_up_and_act(dispatched(x, plan), w, plan)
    expected = pre, in_blocks(act, plan, table, padding=None)
    for got, wanted, true in zip(results, made, expected, strict=True):
        assert same_values(got, true) if wanted else got is None


@every_need
def test_what_nobody_needs_of_backward_is_not_made(need, framed_memory):
    plan = shuffled_plan([33, 0, 3], masked=3)
    assert_backward(*backward(plan, 33, 70, torch.bfloat16), plan, LIMIT, need)


def test_the_gradient_of_a_router_weight_has_its_dtype(framed_memory):
    plan = shuffled_plan([33, 0, 3])
    dy, w, pre, weights = backward(plan, 33, 70, torch.float32)
    assert_backward(dy, w, pre, weights.bfloat16(), plan)


def test_weights_with_padded_rows_far_apart(framed_memory):
    """Experts and rows need not follow each other; between them lies NaN, and it is not read."""
    plan = shuffled_plan([17, 0, 40, 1])
    x, w = forward(plan, 40, 36, torch.float32)
    assert_forward(x, framed(w, gap=8, offset=8), plan)
    dy, w, pre, weights = backward(plan, 67, 36, torch.float32)
    assert_backward(dy, framed(w, 4, 8), pre, weights, plan)


def test_weight_gradients_of_any_strides_are_written_and_nothing_else():
    """Between the rows of a framed dw lies NaN, which stays."""
    plan, tokens, a = shuffled_plan([17, 0, 40, 1]), whole(29, 35), whole(58, 20, seed=1)
    memory, table = torch.full((4, 22, 40), nan, device=DEVICE), table_of(plan)
    dw = memory[:, 1:21, 2:37]
    weight_grad(in_blocks(a, plan, table, padding=0.0), tokens, table, "dw_down", dw)
    assert same_values(dw.contiguous(), grad(a, dispatched(tokens, plan), plan))
    assert memory.isnan().sum() == memory.numel() - dw.numel()


# Numbers.


def test_act_is_made_before_pre_is_rounded(framed_memory):
    """192 * 257 is nearest to 49408 in bf16; from an up of 257 that was rounded to 256 it would be 49152."""
    x, w = tensor([[192.0, 256.0, 1.0]]).bfloat16(), readable(tensor([[[[1.0, 0, 0]], [[0, 1.0, 1.0]]]]).bfloat16())
    plan = plan_of([1])
    pre, act = gate_up_swiglu(x, w, plan, table_of(plan, x.dtype), None, pre=True, act=True)
    assert pre.tolist() == [[[192.0], [256.0]]] and act[0].item() == 49408


def test_sums_are_kept_in_fp32():
    """bf16 holds no whole number between 256 and 258: a running sum in bf16 would stop at 256."""
    plan, ones = plan_of([600]), torch.ones(600, 600, dtype=torch.bfloat16, device=DEVICE)
    table = table_of(plan, ones.dtype)
    a = in_blocks(ones, plan, table, padding=0.0)
    assert (down(a, ones[None, :8], plan, table) == 600).all()
    dw = torch.empty(1, 600, 8, dtype=torch.bfloat16, device=DEVICE)
    assert (weight_grad(a, ones[:, :8], table, "dw_down", dw) == 600).all()


def test_nan_stays_with_its_token_and_its_expert(framed_memory):
    """Behind an expert's last row a tile repeats that row's token: here it is NaN."""
    plan = plan_of([20, 20, 20])
    others = [r for r in range(60) if r != 39]
    x, w = forward(plan, 24, 40, torch.float32)
    x[39] = nan
    assert_forward(x, w, plan)
    table = table_of(plan)
    a = in_blocks(whole(60, 16), plan, table, padding=0.0)
    dw = weight_grad(a, x, table, "dw_gate_up", torch.empty(3, 16, 24, device=DEVICE))
    assert dw[1].isnan().all() and dw[[0, 2]].isfinite().all()
    slots = down(in_blocks(x, plan, table, padding=nan), readable(whole(3, 16, 24)), plan, table)
    assert slots[39].isnan().all() and slots[others].isfinite().all()

    dy, w, pre, weights = backward(plan, 24, 70, torch.float32)
    dy[39] = nan
    table = table_of(plan)
    dpre, weighted_act, dweights = dact_swiglu(dy, w, pre, weights, plan, table, None, Need())
    blocks = in_blocks(torch.zeros(60, 70, device=DEVICE), plan, table, padding=0.0)
    assert torch.equal(weighted_act.isnan(), blocks.isnan())
    assert dpre.isfinite().sum() == 2 * blocks.isfinite().sum() - 140  # a row of 140 is NaN, and no padding row
    assert dweights[39].isnan() and dweights[others].isfinite().all()


def test_no_rows():
    plan = routing.plan(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 3)
    x, weights = torch.empty(0, 16, device=DEVICE), torch.empty(0, 2, device=DEVICE)
    table = table_of(plan)
    pre, act = gate_up_swiglu(x, whole(3, 16, 16), plan, table, None, pre=True, act=True)
    assert pre.shape == (0, 2, 8) and act.shape[1] == 8
    assert down(act, whole(3, 16, 8), plan, table).shape == (0, 2, 16)
    assert dact_swiglu(x, whole(3, 16, 8), pre, weights, plan, table, None, Need())[2].shape == (0, 2)
    dw = torch.full((3, 8, 16), nan, device=DEVICE)
    assert not weight_grad(act, x, table, "dw_gate_up", dw).any()


# Tickets and strips.


LAYER = Problem(*(50, 520, 264) if DEVICE == "cuda" else (13, 136, 72), E=4, K=3, device=DEVICE)
"""Two or three tiles side by side, for every kernel."""


def everything(**changes) -> tuple[list[Tensor], TileTable]:
    """All results of a layer of random numbers, with these changes to the tiles, and the table it drew from."""
    inputs, dy = random_inputs(LAYER, "zipf")
    plan = routing.plan(inputs.topk_ids.masked_fill(inputs.topk_ids == 2, -1), LAYER.E)
    table = tile_table(plan, changed(blocks_for(LAYER.dtype).persistent, **changes))
    w_gate_up, w_down = readable(inputs.w_gate_up), readable(inputs.w_down)

    pre, act = gate_up_swiglu(inputs.x, w_gate_up, plan, table, None, True, True)
    slots = down(act, w_down, plan, table)
    dpre, weighted_act, dweights = dact_swiglu(dy, w_down, pre, inputs.topk_weights, plan, table, None, Need())
    dw_down, dw_gate_up = torch.empty_like(inputs.w_down), torch.empty_like(inputs.w_gate_up)
    weight_grad(weighted_act, dy, table, "dw_down", dw_down.mT)
    dslots = dx_slots(dpre, w_gate_up, plan, table)
    weight_grad(dpre, inputs.x, table, "dw_gate_up", dw_gate_up.flatten(1, 2))
    return [pre, act, slots, dpre, weighted_act, dweights, dw_down, dslots, dw_gate_up], table


def changed(tiles: Persistent, **changes) -> Persistent:
    """Tiles whose kernels have these fields changed, where they have them."""
    kernels = {kernel: getattr(tiles, kernel) for kernel in TICKETS}
    having = lambda tile: {name: value for name, value in changes.items() if hasattr(tile, name)}
    return replace(tiles, **{kernel: replace(tile, **having(tile)) for kernel, tile in kernels.items()})


@pytest.mark.parametrize("resident", [1, 5])
def test_any_number_of_programs_gives_the_same_bits(resident, framed_memory, monkeypatch):
    expected, _ = everything()
    monkeypatch.setattr(persistent, "programs", lambda tile: resident)
    assert all(map(same_bits, everything()[0], expected))


def test_strips_of_any_length_give_the_same_bits(framed_memory):
    """One loop for the steps of all its tiles or a loop for each; strips that are not filled, and one for all."""
    expected, _ = everything(STRIP=1, FLATTEN=False)
    for strip, flatten in ((2, True), (3, False)):
        got, _ = everything(STRIP=strip, FLATTEN=flatten)
        assert all(map(same_bits, got, expected)), (strip, flatten)


def test_every_ticket_is_drawn_once(framed_memory, monkeypatch):
    """A program is two tickets ahead: it draws two more than it works on, and thereby knows that there are no more."""
    monkeypatch.setattr(persistent, "programs", lambda tile: 4)
    _, table = everything(STRIP=2)
    H, I, E, blocks, tiles = LAYER.H, LAYER.I, LAYER.E, int(table.counters[0]), table.tiles
    strips = lambda columns, tile: cdiv(cdiv(columns, tile.BLOCK_N), 2)
    tickets = dict(
        gate_up=blocks * strips(I, tiles.gate_up),
        down=blocks * strips(H, tiles.down),
        dact=blocks * strips(I, tiles.dact),
        dx=blocks * strips(H, tiles.dx),
        dw_down=E * cdiv(I, tiles.dw_down.BLOCK_M) * cdiv(H, tiles.dw_down.BLOCK_N),
        dw_gate_up=E * cdiv(2 * I, tiles.dw_gate_up.BLOCK_M) * cdiv(H, tiles.dw_gate_up.BLOCK_N),
    )
    assert {kernel: int(table.ticket(kernel)[0]) for kernel in TICKETS} == {k: n + 2 * 4 for k, n in tickets.items()}
