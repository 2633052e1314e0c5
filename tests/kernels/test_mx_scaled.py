"""Products of MX codes: each launch against the reference's format, dequantised and multiplied in float64; then the
recipe against the reference. Memory that nobody wrote holds NaN, as codes and as scales."""

from dataclasses import replace

import pytest
import torch
from cases import DEVICE, framed, lay_out, layer, on_cpu, reroute, run, transposed
from exact import dispatched, every_need, grad, plan_of, product, rows_of, same_values, shuffled_plan
from test_scaled import (
    LAYERS,
    LIMIT,
    LOST,
    MOVED,
    ROUNDING,
    RUNG,
    assert_close,
    backward,
    every_dtype,
    forward,
    judged,
    normal,
    rows_aligned,
    tensor,
)
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from mega_moe import routing
from mega_moe.kernels import blocks, mx_scaled
from mega_moe.kernels.blocks import mx_tiles
from mega_moe.kernels.mx_quantize import (
    columns_in_blocks,
    quantise_columns,
    quantise_rows,
    quantise_transposed,
    quantise_weights,
    rows_in_blocks,
)
from mega_moe.kernels.mx_scaled import dact_swiglu, down, dx_slots, gate_up_swiglu, weight_grad
from mega_moe.kernels.quantize import Quantised
from mega_moe.kernels.scaled import InBlocks
from mega_moe.kernels.tile_table import TICKETS, TileTable, tile_table
from mega_moe.reference.backward import swiglu_backward
from mega_moe.reference.forward import swiglu
from mega_moe.reference.quantize import MX, quantise
from mega_moe.shapes import Need, Plan, Problem

nan = torch.nan
ALONG, BLOCK_R = MX.along, mx_tiles().BLOCK_R

every_size = pytest.mark.parametrize(
    "H, I", [(16, 16), (70, 100), (64, 128), (33, 67), (64, 32), (64, 96), (1, 1)], ids=str
)
every_routing = pytest.mark.parametrize(
    "rows, masked",
    [([1, BLOCK_R - 1, 0, BLOCK_R, 33, BLOCK_R + 1], 5), ([0, 0, BLOCK_R + 5, 0], 0), ([0, 1], 0), ([0, 0], 6)],
    ids=["tails", "one expert has all", "one row", "all masked"],
)


def table_of(plan: Plan) -> TileTable:
    """Good for one launch of each kernel: a ticket is drawn once."""
    return tile_table(plan, mx_tiles())


def values(q: Quantised) -> Tensor:
    """What codes and scales (..., N, C) and (..., N, ceil(C / 32)) stand for, in float64."""
    scales = q.scales.view(torch.float8_e8m0fnu).double().repeat_interleave(ALONG, -1)
    return q.codes.double() * scales[..., : q.codes.shape[-1]]


def held(t: Tensor) -> Tensor:
    """What MX holds of tokens, or of weights along their last axis, in float64."""
    return quantise(t, (1, ALONG), MX.scale_of).dequantise(torch.float64)


def held_in_columns(t: Tensor, plan: Plan) -> Tensor:
    """What MX holds of rows t (R, N) where they are contracted over; NaN where a row has no expert."""
    live = int(plan.row_start[-1])
    q = quantise(t[:live].cpu(), (ALONG, 1), MX.scale_of, plan.row_start.cpu())
    return torch.cat([q.dequantise(torch.float64).to(DEVICE), t[live:].double().fill_(nan)])


def in_blocks(rows: Tensor, plan: Plan, padding: float) -> Tensor:
    """rows (R, ...) laid out in blocks, those that hold any; behind an expert's last row, padding."""
    blocks = [block for expert in rows_of(plan) for block in rows[expert].split(BLOCK_R) if len(block)]
    fill = lambda block: block.new_full((BLOCK_R - len(block), *rows.shape[1:]), padding)
    return torch.cat([part for block in blocks for part in (block, fill(block))]) if blocks else rows[:0]


def assert_nearly_same(got: Tensor, true: Tensor) -> None:
    """Values that were rounded to codes, (..., columns). Sums in another order, or another exp, bring a few over an
    edge: those are neighbours, an eighth off at most, or what of their block is below its codes."""
    assert got.shape == true.shape and torch.equal(got.isnan(), true.isnan())
    differ = (got != true) & ~true.isnan()
    assert differ.sum() <= max(MOVED * differ.numel(), 2)
    largest = true.nan_to_num().abs().amax() if true.numel() else 0
    assert ((got - true).abs() <= true.abs() / 7 + largest * 2.0**-16)[differ].all()


def rows_as_codes(t: Tensor, plan: Plan, table: TileTable) -> Quantised:
    """t (R, parts, N), quantised by row as kernels hand it on; NaN in rows that pad a block."""
    to, q = rows_in_blocks(*t.shape[1:], t.dtype, table), quantise(t.cpu(), (1, ALONG), MX.scale_of)
    codes, scales = (in_blocks(part.float(), plan, nan).transpose(0, 1) for part in (q.codes, q.scales))
    to.codes[:, : codes.shape[1]] = codes.to(to.codes)
    to.scales[:, : scales.shape[1]] = scales.to(torch.float8_e8m0fnu).view(torch.uint8).to(DEVICE)
    return to


def columns_as_codes(t: Tensor, plan: Plan, table: TileTable) -> Quantised:
    """t (R, N), quantised by column as kernels hand it on."""
    one_token_a_row = replace(
        table, token_in_blocks=in_blocks(torch.arange(len(t), device=DEVICE, dtype=torch.int32), plan, 0)
    )
    rest = len(table.token_in_blocks) - len(one_token_a_row.token_in_blocks)
    padded = torch.nn.functional.pad(one_token_a_row.token_in_blocks, (0, rest))
    return quantise_columns(t, replace(table, token_in_blocks=padded))


# Each launch.


def assert_forward(x: Tensor, w: Tensor, plan: Plan, limit: float | None = None) -> None:
    """pre from what the codes hold; act's codes and scales from that pre, in every row of every block."""
    table, live = table_of(plan), int(plan.row_start[-1])
    pre, act = gate_up_swiglu(quantise_rows(x), quantise_weights(w), plan, table, limit, True, True)
    x_held, w_held = dispatched(held(x), plan), held(w).flatten(1, 2)
    true, size = product(x_held, w_held, plan), product(x_held.abs(), w_held.abs(), plan)
    assert_close(pre.flatten(1), true, size, x.dtype)

    rows = in_blocks(torch.arange(live, device=DEVICE), plan, -1)
    rows = torch.where(rows < 0, rows.cummax(0).values, rows)  # behind an expert's last row comes that row again
    assert_nearly_same(values(act.rows)[0, : len(rows)], held(swiglu(pre[:live], limit))[rows])


def assert_slots(plan: Plan, C: int, N: int, dtype: torch.dtype) -> None:
    """down, and dx with a contraction of two parts."""
    E, live = len(plan.row_start) - 1, plan.row_of_slot >= 0
    for parts in (1, 2):
        a, table = normal(len(plan.token_of_row), parts, C, dtype=dtype), table_of(plan)
        rows = InBlocks(rows_as_codes(a, plan, table), None)
        if parts == 1:
            w = normal(E, N, C, dtype=dtype, seed=1)
            slots, w_held = down(rows, quantise_weights(w), plan, table), held(w)
        else:
            w = normal(E, 2, C, N, dtype=dtype, seed=1)
            slots = dx_slots(rows, quantise_transposed(w), plan, table)
            w_held = held(w.mT).transpose(1, 2).flatten(2)
        a_held = held(a).flatten(1)
        true, size = product(a_held, w_held, plan), product(a_held.abs(), w_held.abs(), plan)
        of_slot = plan.row_of_slot[live]
        assert_close(slots[live], true[of_slot], size[of_slot], dtype)


def assert_backward(dy: Tensor, w: Tensor, pre: Tensor, weights: Tensor, plan: Plan, limit=None, need=Need()) -> None:
    """Codes and scales as the reference makes them from dact, which is made from what the codes hold."""
    table, live = table_of(plan), int(plan.row_start[-1])
    dpre, act, dweights = dact_swiglu(quantise_rows(dy), quantise_transposed(w), pre, weights, plan, table, limit, need)
    wanted = need.dx, need.dw_gate_up, need.dw_down, need.dtopk_weights
    by_row, by_column = dpre or (None, None)
    act = act.columns if act else None
    assert [part is not None for part in (by_row, by_column, act, dweights)] == list(wanted)

    dact = product(dispatched(held(dy), plan), held(w.mT), plan)[:live].to(dy.dtype)
    pre, of_row = pre[:live], weights[plan.token_of_row[:live], plan.slot_of_row[:live]].float()
    true_act, true_dpre = swiglu(pre, limit), swiglu_backward(dact, of_row, pre, limit)
    weighted = (of_row[:, None] * true_act).to(dy.dtype)
    rows = in_blocks(torch.ones(live, device=DEVICE), plan, 0.0) > 0
    if need.dx:
        assert_nearly_same(values(by_row)[:, : len(rows)][:, rows].transpose(0, 1), held(true_dpre))
    for columns, true in ((by_column, true_dpre.flatten(1)), (act, weighted)):
        if columns is not None:
            got = values(columns)[:, : len(rows)].T
            assert not got[~rows].any()
            assert_nearly_same(got[rows], held_in_columns(true, plan))
    if need.dtopk_weights:
        true = weights.new_zeros(weights.shape, dtype=torch.float64)
        terms, at = dact.double() * true_act.double(), (plan.token_of_row[:live], plan.slot_of_row[:live])
        true[at] = terms.sum(1)
        size = true.clone()
        size[at] = terms.abs().sum(1)
        allowed = (2 * ROUNDING[dy.dtype] + LOST) * size + ROUNDING[weights.dtype] * true.abs()
        assert ((dweights.double() - true).abs() <= allowed).all()


def assert_weight_grad(plan: Plan, M: int, N: int, dtype: torch.dtype) -> None:
    """As an ordinary tensor and as the transpose of one."""
    E, R, table = len(plan.row_start) - 1, len(plan.token_of_row), table_of(plan)
    a, b = (normal(R, n, seed=n, dtype=dtype) for n in (M, N))
    a_held, b_held = held_in_columns(a, plan), held_in_columns(b, plan)
    true, size = grad(a_held, b_held, plan), grad(a_held.abs(), b_held.abs(), plan)
    full = lambda *shape: torch.full(shape, nan, dtype=dtype, device=DEVICE)
    a, b = columns_as_codes(a, plan, table), columns_as_codes(b, plan, table)
    for kernel, dw in (("dw_gate_up", full(E, M, N)), ("dw_down", full(E, N, M).mT)):
        assert weight_grad(InBlocks(None, a), b, table, kernel, dw) is dw
        assert_close(dw, true, size, dtype)


def codes(given: list, scales: list) -> Quantised:
    """Of fp32: rows padded to 16 bytes, with NaN."""
    of_bytes = torch.nn.functional.pad(tensor(scales).to(torch.uint8), (0, 15), value=255)[..., :1]
    return Quantised(rows_aligned(tensor(given).to(torch.float8_e4m3fn)), of_bytes, torch.float32)


def test_gate_up_does_its_example(poison):
    plan = routing.plan(tensor([[-1], [0]]), 1)
    x, w = codes([[9.0, 9.0], [1.0, 2.0]], [[127], [127]]), codes([[[[1.0, 0.0]], [[0.0, 1.0]]]], [[[[127]], [[126]]]])
    pre, act = gate_up_swiglu(x, w, plan, table_of(plan), None, True, True)
    assert pre[0].tolist() == [[1.0], [1.0]]
    assert act.rows.codes[0, 0].tolist() == [384.0] and act.rows.scales[0, 0].tolist() == [118]


def test_slot_gemm_does_its_example(poison):
    plan = routing.plan(tensor([[0, 0]]), 1)
    plan = plan._replace(slot_of_row=plan.slot_of_row.flip(0), row_of_slot=plan.row_of_slot.flip(1))
    table = table_of(plan)
    a = rows_in_blocks(1, 2, torch.float32, table)
    a.codes[0, :2], a.scales[0, :2] = tensor([[1.0, 2.0], [3.0, 4.0]]).to(a.codes), tensor([[127], [128]]).byte()
    w = codes([[[1.0, 0.0]]], [[[127]]])
    assert down(InBlocks(a, None), w, plan, table).tolist() == [[[6.0], [1.0]]]


def test_dact_does_its_example(poison):
    plan, weights = routing.plan(tensor([[-1], [0]]), 1), tensor([[nan], [0.5]])
    dy, w, pre = codes([[9.0], [3.0]], [[127], [127]]), codes([[[1.0]]], [[[128]]]), tensor([[[0.0], [2.0]]] * 2)
    pre[1] = nan
    dpre, act, dweights = dact_swiglu(dy, w, pre, weights, plan, table_of(plan), None, Need())
    assert dpre.rows.codes[:, 0].tolist() == [[384.0], [0.0]] and dpre.rows.scales[:, 0].tolist() == [[120], [1]]
    assert dpre.columns.codes[:, 0].tolist() == [384.0, 0.0] and dpre.columns.scales[:, 0].tolist() == [120, 1]
    assert not act.columns.codes[:, :BLOCK_R].float().any() and dweights.tolist() == [[0.0], [0.0]]


def test_weight_grad_does_its_example(poison):
    plan = plan_of([2, 0])
    table = table_of(plan)
    a, b = (columns_in_blocks(n, torch.float32, table) for n in (1, 2))
    for t, given, scales in ((a, [[1.0, 2.0]], [[127]]), (b, [[3.0, 5.0], [4.0, 6.0]], [[127], [128]])):
        t.codes[:, :BLOCK_R] = 0
        t.codes[:, :2], t.scales[:, : BLOCK_R // ALONG] = tensor(given).to(t.codes), tensor(scales).byte()
    dw = weight_grad(InBlocks(None, a), b, table, "dw_down", torch.full((2, 1, 2), nan, device=DEVICE))
    assert dw.tolist() == [[[13.0, 32.0]], [[0.0, 0.0]]]


@every_routing
def test_rows_of_an_expert(rows, masked, poison):
    plan = shuffled_plan(rows, masked)
    assert_forward(*forward(plan, 48, 33, torch.bfloat16), plan)
    assert_slots(plan, 48, 33, torch.bfloat16)
    assert_backward(*backward(plan, 33, 48, torch.bfloat16), plan)
    assert_weight_grad(plan, 33, 48, torch.float32)


@every_size
def test_columns_and_contraction(H, I, poison):
    plan = shuffled_plan([33, 0, 3])
    assert_forward(*forward(plan, H, I, torch.float32), plan)
    assert_slots(plan, I, H, torch.float32)
    assert_backward(*backward(plan, H, I, torch.float32), plan)
    assert_weight_grad(plan, I, H, torch.bfloat16)


@every_dtype
def test_limit(dtype, poison):
    plan = shuffled_plan([33, 0, 3])
    assert_forward(*forward(plan, 32, 70, dtype), plan, LIMIT)
    assert_backward(*backward(plan, 32, 70, dtype), plan, LIMIT)
    assert_slots(plan, 32, 70, dtype)
    assert_weight_grad(plan, 32, 70, dtype)


@pytest.mark.parametrize("made", [(True, False), (False, True)], ids=["pre", "act"])
def test_what_nobody_wants_of_forward_is_not_made(made, poison):
    plan = shuffled_plan([33, 0, 3])
    x, w = forward(plan, 48, 70, torch.bfloat16)
    x, w = quantise_rows(x), quantise_weights(w)
    both = gate_up_swiglu(x, w, plan, table_of(plan), None, True, True)
    one = gate_up_swiglu(x, w, plan, table_of(plan), None, *made)
    assert [part is not None for part in one] == list(made)
    same = lambda got, all_of_it: same_values(values(got)[0, :BLOCK_R], values(all_of_it)[0, :BLOCK_R])
    assert same_values(one[0], both[0]) if made[0] else same(one[1].rows, both[1].rows)


@every_need
def test_what_nobody_needs_of_backward_is_not_made(need, poison):
    plan = shuffled_plan([33, 0, 3], masked=3)
    for dw_gate_up in {need.dx, False}:
        changed = replace(need, dw_gate_up=dw_gate_up)
        assert_backward(*backward(plan, 33, 70, torch.bfloat16), plan, LIMIT, changed)


def test_router_weights_of_any_strides_and_dtype(poison):
    plan = shuffled_plan([33, 0, 3])
    dy, w, pre, weights = backward(plan, 33, 20, torch.float32)
    weights = weights.nan_to_num(0.25)
    for laid_out in (transposed(weights), framed(weights, gap=3, offset=1), weights.bfloat16()):
        assert_backward(dy, w, pre, laid_out, plan)


def test_nan_stays_with_its_token_and_its_block(poison):
    """Behind an expert's last row a tile repeats that row's token: here it is NaN. Where dw contracts over rows, NaN
    reaches the 32 of its block, in its expert."""
    plan = plan_of([20, 40, 20])
    others = [r for r in range(80) if r != 59]
    x, w = forward(plan, 24, 40, torch.float32)
    x[59] = nan
    assert_forward(x, w, plan)
    dy, w, pre, weights = backward(plan, 24, 70, torch.float32)
    dy[59] = nan
    table = table_of(plan)
    dpre, act, dweights = dact_swiglu(
        quantise_rows(dy), quantise_transposed(w), pre, weights, plan, table, None, Need()
    )
    assert dweights[59].isnan() and dweights[others].isfinite().all()
    assert values(act.columns)[:, : 3 * BLOCK_R].isfinite().all()
    nans = values(dpre.rows)[:, : 3 * BLOCK_R].isnan().transpose(0, 1).flatten(1)
    assert nans[BLOCK_R + 39].all() and nans.sum() == nans[BLOCK_R + 39 : 2 * BLOCK_R].sum()
    in_block = values(dpre.columns)[:, : 3 * BLOCK_R].isnan().unflatten(1, (-1, ALONG))
    hit = BLOCK_R // ALONG + 39 // ALONG
    assert in_block[:, hit].all() and in_block.sum() == in_block[:, hit].sum()


def test_no_rows():
    plan = routing.plan(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 3)
    x, w, table = torch.empty(0, 16, device=DEVICE), normal(3, 2, 8, 16), table_of(plan)
    pre, act = gate_up_swiglu(quantise_rows(x), quantise_weights(w), plan, table, None, True, True)
    w_down, weights = normal(3, 16, 8), torch.empty(0, 2, device=DEVICE)
    assert pre.shape == (0, 2, 8) and down(act, quantise_weights(w_down), plan, table).shape == (0, 2, 16)
    dpre, act, dweights = dact_swiglu(
        quantise_rows(x), quantise_transposed(w_down), pre, weights, plan, table, None, Need()
    )
    assert dweights.shape == (0, 2) and dx_slots(dpre, quantise_transposed(w), plan, table).shape == (0, 2, 16)
    dw = torch.full((3, 8, 16), nan, device=DEVICE)
    assert not weight_grad(act, columns_in_blocks(16, x.dtype, table), table, "dw_down", dw).any()


# The recipe.

MX_LAYERS = LAYERS | {"more than one block a side": dict(T=80, H=80, I=100, E=2, K=2)}


@pytest.mark.parametrize(
    "name, save", [*((name, "pre") for name in MX_LAYERS), ("odd", "inputs"), ("masked", "inputs")]
)
def test_recipe(name, save, poison):
    problem, inputs, dy = layer(**MX_LAYERS[name], limit=LIMIT if name == "masked" else None)
    problem = problem.at(precision="mxfp8", save=save)
    judged(problem, replace(inputs, topk_ids=reroute(inputs.topk_ids, name, problem.E)), dy)


def test_recipe_makes_pre_again_to_the_bit(poison):
    problem, inputs, dy = layer(T=9, H=40, I=30)
    results = [run(RUNG, problem.at(precision="mxfp8", save=save), inputs, dy) for save in ("pre", "inputs")]
    for one, other in zip(*((y, *vars(grads).values()) for y, grads in results), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_recipe_in_other_dtypes(dtype, poison):
    problem, inputs, dy = layer(T=20, H=150, I=30, dtype=dtype)
    judged(problem.at(precision="mxfp8"), inputs, dy)


@pytest.mark.parametrize("layout", ["transposed", "weights transposed", "weights unaligned", "weights padded"])
def test_recipe_with_any_strides(layout, poison):
    problem, inputs, dy = layer(T=9, H=40, I=30)
    inputs, dy = lay_out(inputs, dy, layout)
    judged(problem.at(precision="mxfp8"), inputs, dy)


def test_recipe_of_blocks_of_zeros_and_of_huge_and_tiny_ones(poison):
    """In x, in dy and in weights: all results are finite."""
    problem, inputs, dy = layer(T=20, H=96, I=64, E=2, K=2)
    for t in (inputs.x, dy):
        t[3], t[4, :32], t[5, 32:64], t[6] = 0, 0, 2.0**-130, 2.0**30
    inputs.w_gate_up[0, 0, :32], inputs.w_down[1, :, 32:] = 0, 2.0**-120
    y, grads = judged(problem.at(precision="mxfp8"), inputs, dy)
    assert all(t.isfinite().all() for t in (y, *vars(grads).values()))


def everything() -> list[Tensor]:
    """All results of a layer of two column blocks a side or more."""
    problem, inputs, dy = layer(T=40, H=70, I=80, E=2, K=2)
    y, grads = run(RUNG, problem.at(precision="mxfp8"), inputs, dy)
    return [y, *vars(grads).values()]


def test_any_programs_and_strips_give_the_same_bits(monkeypatch, poison):
    expected, tiles = everything(), mx_tiles()
    for resident, strip in ((1, 1), (5, 2)):
        longer = {kernel: replace(getattr(tiles, kernel), STRIP=strip) for kernel in TICKETS if "dw" not in kernel}
        monkeypatch.setattr(mx_scaled, "programs", lambda tile, resident=resident: resident)
        monkeypatch.setattr(blocks, "mx_tiles", lambda longer=longer: replace(tiles, **longer))
        assert all(map(torch.equal, everything(), expected)), (resident, strip)


@on_cpu
@pytest.mark.skipif(not hasattr(InterpreterBuilder, "create_dot_scaled"), reason="Triton's interpreter has none here")
def test_scaled_instructions_give_what_bf16_gives(monkeypatch, poison):
    """Where the interpreter has them (Triton 3.8): the same products, added up in the same order."""
    expected, tiles = everything(), mx_tiles()
    monkeypatch.setattr(blocks, "mx_tiles", lambda: replace(tiles, native=True))
    assert all(map(torch.equal, everything(), expected))


# Devices.


@pytest.mark.parametrize("name, reason", [("sm_86", "older than sm_90"), ("gfx90a", "neither gfx942 nor gfx950")])
def test_what_no_kernel_is_written_for_says_so(name, reason, monkeypatch):
    monkeypatch.setattr(blocks, "target", lambda: name)
    monkeypatch.setattr(blocks, "INTERPRETED", True)  # whose processors nobody counts
    problem = Problem(1, 16, 16, 1, 1)
    assert reason in RUNG.recipe().why_not(problem.at(precision="mxfp8"))
    assert RUNG.recipe().why_not(problem) is None


@pytest.mark.parametrize(
    "name, native", [("sm_90", False), ("sm_100", True), ("sm_120", False), ("gfx942", False), ("gfx950", True)]
)
def test_where_bf16_stands_for_an_instruction_the_note_says_so(name, native, monkeypatch):
    monkeypatch.setattr(blocks, "target", lambda: name)
    monkeypatch.setattr(blocks, "INTERPRETED", True)
    problem = Problem(1, 16, 16, 1, 1, precision="mxfp8")
    assert RUNG.recipe().why_not(problem) is None and mx_tiles().native == native
    note = RUNG.recipe().note(problem)
    assert "not measured on" in note and ("no instruction for MX codes" in note) == (not native)
