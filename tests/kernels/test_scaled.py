"""Products of 8-bit codes: each launch against the reference's formats, dequantised and multiplied in float64; then the
recipes against the reference in their precision. Memory that nobody wrote holds NaN, as codes and as scales."""

from dataclasses import replace

import pytest
import torch
from cases import DEVICE, framed, lay_out, layer, reroute, run, transposed
from exact import (
    dispatched,
    every_need,
    grad,
    plan_of,
    product,
    router_weights,
    rows_of,
    same_values,
    shuffled_plan,
)
from torch import Tensor

from mega_moe import routing
from mega_moe.kernels import blocks, scaled
from mega_moe.kernels.blocks import fp8_tiles
from mega_moe.kernels.quantize import (
    Quantised,
    columns_in_blocks,
    quantise_rows_in_blocks,
    quantise_weights,
    rows_in_blocks,
)
from mega_moe.kernels.scaled import InBlocks, dact_swiglu, down, dx_slots, gate_up_swiglu, weight_grad
from mega_moe.kernels.tile_table import TICKETS, TileTable, tile_table
from mega_moe.parity import Oracle
from mega_moe.reference import forward as reference_forward
from mega_moe.reference.backward import backward as reference_backward
from mega_moe.reference.backward import swiglu_backward
from mega_moe.reference.forward import swiglu
from mega_moe.reference.quantize import FP8, fp32_scale, quantise
from mega_moe.registry import stage
from mega_moe.shapes import Grads, Need, Plan, Problem

nan = torch.nan
ALONG, LIMIT = FP8.along, 3.0
RUNG = stage("persistent")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}

# What is lost of a sum of 128 products: fp32 keeps 24 bits, a GPU's matrix unit some 14 where it multiplies codes (an
# H200 lost 2^-11 at most). How many codes that are made from such sums are other ones then (0.6 % there), how many
# steps off, and how far off a result is (0.3 %).
LOST, MOVED, STEPS, OFF = (2.0**-21, 0.004, 1, 4e-3) if DEVICE == "cpu" else (2.0**-10, 0.02, 2, 1e-2)

every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
every_size = pytest.mark.parametrize("H, I", [(16, 16), (150, 140), (128, 256), (33, 67), (1, 1)], ids=str)
every_routing = pytest.mark.parametrize(
    "rows, masked",
    [([1, 127, 0, 128, 129], 5), ([0, 0, 133, 0], 0), ([0, 1], 0), ([0, 0], 6)],
    ids=["tails", "one expert has all", "one row", "all masked"],
)


def tensor(values: list) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers whose rows and columns differ in size, so that no scale could stand for another's."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.exp2(torch.randint(-2, 3, (n,), generator=generator)) for n in shape[-2:]]
    return (torch.randn(shape, generator=generator) * sizes[0][:, None] * sizes[1]).to(DEVICE, dtype)


def table_of(plan: Plan) -> TileTable:
    """Good for one launch of each kernel: a ticket is drawn once."""
    return tile_table(plan, fp8_tiles())


def held(t: Tensor) -> Tensor:
    """What FP8 holds of tokens or weights, in float64."""
    blocks = (1, ALONG) if t.dim() == 2 else (FP8.across, ALONG)
    return quantise(t, blocks, fp32_scale).dequantise(torch.float64)


def assert_close(got: Tensor, true: Tensor, size: Tensor, dtype: torch.dtype) -> None:
    """Off by its rounding, and by what a sum of products of this size loses; NaN where it is NaN."""
    assert got.dtype == dtype and torch.equal(got.isnan(), true.isnan())
    allowed = ROUNDING[dtype] * true.abs() + LOST * size + 2.0**-25 * (dtype == torch.float16)
    assert ((got.double() - true).abs() <= allowed)[~true.isnan()].all()


def assert_nearly_same(codes: Tensor, scales: Tensor, true_codes: Tensor, true_scales: Tensor, dtype) -> None:
    """Sums in another order, or another exp, bring a few values over an edge: those codes are neighbours, an eighth off
    at most, or the next ones where sums are coarse. Scales differ by an ulp of what was quantised, and by what was lost
    of it."""
    (codes, scales), (true_codes, true_scales) = (
        [t.double() for t in pair] for pair in ((codes.float(), scales), (true_codes.float(), true_scales))
    )
    assert codes.shape == true_codes.shape and torch.equal(codes.isnan(), true_codes.isnan())
    differ = (codes != true_codes) & ~true_codes.isnan()
    assert differ.sum() <= max(MOVED * differ.numel(), 2)
    assert ((codes - true_codes).abs() <= STEPS * (true_codes.abs() / 7 + 2.0**-9))[differ].all()
    assert torch.equal(scales.isnan(), true_scales.isnan())
    assert ((scales - true_scales).abs() <= (2 * ROUNDING[dtype] + 8 * LOST) * true_scales)[~scales.isnan()].all()


def in_blocks(rows: Tensor, plan: Plan, padding: float) -> Tensor:
    """rows (R, ...) laid out in blocks of 128, those that hold any; behind an expert's last row, padding."""
    blocks = [block for expert in rows_of(plan) for block in rows[expert].split(ALONG) if len(block)]
    fill = lambda block: block.new_full((ALONG - len(block), *rows.shape[1:]), padding)
    return torch.cat([part for block in blocks for part in (block, fill(block))]) if blocks else rows[:0]


def rows_as_codes(t: Tensor, plan: Plan, table: TileTable) -> Quantised:
    """t (R, parts, N), quantised by row as kernels hand it on; NaN in rows that pad a block."""
    to = rows_in_blocks(*t.shape[1:], t.dtype, table)
    q = quantise(t.cpu(), (1, ALONG), fp32_scale)
    codes = in_blocks(q.codes.float(), plan, nan)
    scales = in_blocks(q.scales.flatten(1), plan, nan)
    to.codes[:, : len(codes)] = codes.transpose(0, 1).to(to.codes)
    to.scales[:, : len(scales)] = scales.T.to(DEVICE)
    return to


def columns_as_codes(t: Tensor, plan: Plan, table: TileTable) -> tuple[Quantised, Tensor]:
    """t (R, N), quantised by column as kernels hand it on, zeros in rows that pad a block; and what that holds."""
    live = int(plan.row_start[-1])
    to = columns_in_blocks(t.shape[1], t.dtype, table)
    q = quantise(t[:live].cpu(), (ALONG, 1), fp32_scale, plan.row_start.cpu())
    codes = in_blocks(q.codes.float(), plan, 0.0)
    to.codes[:, : len(codes)] = codes.T.to(to.codes)
    to.scales[: len(q.scales)] = q.scales.to(DEVICE)
    return to, q.dequantise(torch.float64).to(DEVICE)


# Each launch.


def assert_forward(x: Tensor, w: Tensor, plan: Plan, limit: float | None = None) -> None:
    """pre from what the codes hold; act's codes and scales from that pre, zeros in rows that pad a block."""
    table, live = table_of(plan), int(plan.row_start[-1])
    pre, act = gate_up_swiglu(quantise_rows_in_blocks(x, table), quantise_weights(w), plan, table, limit, True, True)
    x_held, w_held = dispatched(held(x), plan), held(w).flatten(1, 2)
    true, size = product(x_held, w_held, plan), product(x_held.abs(), w_held.abs(), plan)
    assert_close(pre.flatten(1), true, size, x.dtype)

    q = quantise(swiglu(pre[:live], limit), (1, ALONG), fp32_scale)
    codes, scales = in_blocks(q.codes.float(), plan, 0.0), in_blocks(q.scales, plan, 2.0**-126)
    got = act.rows.codes[0, : len(codes)], act.rows.scales[:, : len(codes)].T
    assert_nearly_same(*got, codes, scales, x.dtype)


def assert_slots(plan: Plan, C: int, N: int, dtype: torch.dtype) -> None:
    """down, and dx with a contraction of two parts."""
    E, live = len(plan.row_start) - 1, plan.row_of_slot >= 0
    for parts in (1, 2):
        a, table = normal(len(plan.token_of_row), parts, C, dtype=dtype), table_of(plan)
        if parts == 1:
            w = normal(E, N, C, dtype=dtype, seed=1)
            slots = down(InBlocks(rows_as_codes(a, plan, table), None), quantise_weights(w), plan, table)
            w_held = held(w)
        else:
            w = normal(E, 2, C, N, dtype=dtype, seed=1)
            slots = dx_slots(
                InBlocks(rows_as_codes(a, plan, table), None), quantise_weights(w, transposed=True), plan, table
            )
            w_held = held(w).flatten(1, 2).mT
        a_held = quantise(a, (1, ALONG), fp32_scale).dequantise(torch.float64).flatten(1)
        true, size = product(a_held, w_held, plan), product(a_held.abs(), w_held.abs(), plan)
        of_slot = plan.row_of_slot[live]
        assert_close(slots[live], true[of_slot], size[of_slot], dtype)


def assert_backward(dy: Tensor, w: Tensor, pre: Tensor, weights: Tensor, plan: Plan, limit=None, need=Need()) -> None:
    """Codes and scales as the reference makes them from dact, which is made from what the codes hold."""
    table, live = table_of(plan), int(plan.row_start[-1])
    w_codes = quantise_weights(w, transposed=True)
    dpre, act, dweights = dact_swiglu(
        quantise_rows_in_blocks(dy, table), w_codes, pre, weights, plan, table, limit, need
    )
    wanted = need.dx, need.dw_gate_up, need.dw_down, need.dtopk_weights
    by_row, by_column = dpre or (None, None)
    act = act.columns if act else None
    assert [part is not None for part in (by_row, by_column, act, dweights)] == list(wanted)

    dact = product(dispatched(held(dy), plan), held(w).mT, plan)[:live].to(dy.dtype)
    pre, of_row = pre[:live], weights[plan.token_of_row[:live], plan.slot_of_row[:live]].float()
    true_act, true_dpre = swiglu(pre, limit), swiglu_backward(dact, of_row, pre, limit)
    weighted = (of_row[:, None] * true_act).to(dy.dtype)
    if need.dx:
        q = quantise(true_dpre, (1, ALONG), fp32_scale)
        rows = in_blocks(torch.ones(live, device=DEVICE), plan, 0.0) > 0
        got = by_row.codes.float()[:, : len(rows)][:, rows].transpose(0, 1), by_row.scales[:, : len(rows)].T[rows]
        assert_nearly_same(*got, q.codes, q.scales.flatten(1), dy.dtype)
    for columns, true in ((by_column, true_dpre.flatten(1)), (act, weighted)):
        if columns is not None:
            true, _ = columns_as_codes(true, plan, table)
            blocks = int(table.counters[0])
            got, true = ((q.codes[:, : blocks * ALONG], q.scales[:blocks]) for q in (columns, true))
            assert_nearly_same(*got, *true, dy.dtype)
    if need.dtopk_weights:
        true = weights.new_zeros(weights.shape, dtype=torch.float64)
        terms = dact.double() * true_act.double()
        true[plan.token_of_row[:live], plan.slot_of_row[:live]] = terms.sum(1)
        size = true.clone()
        size[plan.token_of_row[:live], plan.slot_of_row[:live]] = terms.abs().sum(1)
        allowed = (2 * ROUNDING[dy.dtype] + LOST) * size + ROUNDING[weights.dtype] * true.abs()
        assert ((dweights.double() - true).abs() <= allowed).all()


def assert_weight_grad(plan: Plan, M: int, N: int, dtype: torch.dtype) -> None:
    """As an ordinary tensor and as the transpose of one."""
    E, R, table = len(plan.row_start) - 1, len(plan.token_of_row), table_of(plan)
    (a, a_held), (b, b_held) = (columns_as_codes(normal(R, n, seed=n), plan, table) for n in (M, N))
    true, size = grad(a_held, b_held, plan), grad(a_held.abs(), b_held.abs(), plan)
    full = lambda *shape: torch.full(shape, nan, dtype=dtype, device=DEVICE)
    for kernel, dw in (("dw_gate_up", full(E, M, N)), ("dw_down", full(E, N, M).mT)):
        assert weight_grad(InBlocks(None, a), b, table, kernel, dw) is dw
        assert_close(dw, true, size, dtype)


def forward(plan: Plan, H: int, I: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x (T, H), w_gate_up (E, 2, I, H)."""
    return normal(len(plan.row_of_slot), H, dtype=dtype), normal(
        len(plan.row_start) - 1, 2, I, H, dtype=dtype, seed=1
    ) / 8


def backward(plan: Plan, H: int, I: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """dy (T, H), w_down (E, H, I), pre (R, 2, I) with NaN where a row has no expert, topk_weights (T, K)."""
    pre = normal(len(plan.token_of_row), 2, I, dtype=dtype, seed=3)
    pre[plan.row_start[-1] :] = nan
    w = normal(len(plan.row_start) - 1, H, I, dtype=dtype, seed=1) / 8
    return normal(len(plan.row_of_slot), H, dtype=dtype), w, pre, router_weights(plan)


def test_gate_up_does_its_example(poison):
    plan = routing.plan(tensor([[-1], [0]]), 1)
    codes = lambda values: tensor(values).to(torch.float8_e4m3fn)
    x8, w = tokens(codes([[1.0, 2.0]])), rows_aligned(codes([[[[1.0, 0.0]], [[0.0, 1.0]]]]))
    w8 = scaled.QuantisedWeights(w, None, tensor([[[[1.0]], [[0.5]]]]))
    pre, act = gate_up_swiglu(x8, w8, plan, table_of(plan), None, True, True)
    assert pre[0].tolist() == [[1.0], [1.0]]
    assert act.rows.codes[0, 0].tolist() == [448.0] and round(act.rows.scales[0, 0].item() * 448, 4) == 0.7311


def tokens(codes: Tensor) -> Quantised:
    """A block that begins with these rows, with scales of 1; behind them NaN."""
    padded = codes.new_full((ALONG, codes.shape[1]), nan, dtype=torch.float32)
    padded[: len(codes)] = codes.float()
    return Quantised(rows_aligned(padded.to(codes.dtype)), torch.ones(ALONG, 1, device=DEVICE), torch.float32)


def rows_aligned(codes: Tensor) -> Tensor:
    """Rows padded to 16 bytes, with NaN."""
    padded = torch.nn.functional.pad(codes.float(), (0, -codes.shape[-1] % 16), value=nan).to(codes.dtype)
    return padded[..., : codes.shape[-1]]


def test_slot_gemm_does_its_example(poison):
    plan = routing.plan(tensor([[0, 0]]), 1)
    plan = plan._replace(slot_of_row=plan.slot_of_row.flip(0), row_of_slot=plan.row_of_slot.flip(1))
    table = table_of(plan)
    a = rows_in_blocks(1, 2, torch.float32, table)
    a.codes[0, :2], a.scales[0, :2] = tensor([[1.0, 2.0], [3.0, 4.0]]).to(a.codes), tensor([1.0, 2.0])
    w = rows_aligned(tensor([[[1.0, 0.0]]]).to(a.codes.dtype))
    w8 = scaled.QuantisedWeights(w, None, tensor([[[1.0]]]))
    assert down(InBlocks(a, None), w8, plan, table).tolist() == [[[6.0], [1.0]]]


def test_dact_does_its_example(poison):
    plan, weights = routing.plan(tensor([[-1], [0]]), 1), tensor([[nan], [0.5]])
    dy = tokens(tensor([[3.0]]).to(torch.float8_e4m3fn))
    w = rows_aligned(tensor([[[1.0]]]).to(torch.float8_e4m3fn))
    w8, pre = scaled.QuantisedWeights(None, w, tensor([[[2.0]]])), tensor([[[0.0], [2.0]], [[nan], [nan]]])
    dpre, act, dweights = dact_swiglu(dy, w8, pre, weights, plan, table_of(plan), None, Need())
    assert dpre.rows.codes[:, 0].tolist() == [[448.0], [0.0]] and dpre.columns.codes[:, 0].tolist() == [448.0, 0.0]
    scale = tensor([3.0 / 448])
    torch.testing.assert_close(dpre.rows.scales[:1, 0], scale)
    torch.testing.assert_close(dpre.columns.scales[0, :1], scale)
    assert not act.columns.codes[:, :ALONG].float().any() and dweights.tolist() == [[0.0], [0.0]]


def test_weight_grad_does_its_example(poison):
    plan = plan_of([2, 0])
    table = table_of(plan)
    a, b = (columns_in_blocks(n, torch.float32, table) for n in (1, 2))
    for t, values, scales in ((a, [[1.0, 2.0]], [1.0]), (b, [[3.0, 5.0], [4.0, 6.0]], [1.0, 2.0])):
        t.codes[:, :ALONG] = 0
        t.codes[:, :2], t.scales[0] = tensor(values).to(t.codes), tensor(scales)
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
    assert_forward(*forward(plan, 32, 140, dtype), plan, LIMIT)
    assert_backward(*backward(plan, 32, 140, dtype), plan, LIMIT)
    assert_slots(plan, 32, 140, dtype)
    assert_weight_grad(plan, 32, 140, dtype)


@pytest.mark.parametrize("made", [(True, False), (False, True)], ids=["pre", "act"])
def test_what_nobody_wants_of_forward_is_not_made(made, poison):
    plan = shuffled_plan([33, 0, 3])
    x, w = forward(plan, 48, 70, torch.bfloat16)
    x8, w8 = quantise_rows_in_blocks(x, table_of(plan)), quantise_weights(w)
    both = gate_up_swiglu(x8, w8, plan, table_of(plan), None, True, True)
    one = gate_up_swiglu(x8, w8, plan, table_of(plan), None, *made)
    assert [part is not None for part in one] == list(made)
    same = lambda got, all_of_it: same_values(got.codes[0, :ALONG].float(), all_of_it.codes[0, :ALONG].float())
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


def test_sums_over_steps_are_kept_in_fp32():
    """A matrix unit would lose the second step's sum, 2^-16 of the first's. That of a step it holds exactly here."""
    plan = plan_of([1])
    table, x = table_of(plan), torch.full((1, 1, 2 * ALONG), 448.0, device=DEVICE)
    x[..., ALONG:] *= 2.0**-16
    w = torch.full((1, 1, 2 * ALONG), 448.0, device=DEVICE)
    slots = down(InBlocks(rows_as_codes(x, plan, table), None), quantise_weights(w), plan, table)
    assert slots.item() == 448 * 448 * 128 * (1 + 2.0**-16)


def test_nan_stays_with_its_token_and_its_expert(poison):
    """An expert's last row is NaN, and in dw reaches what a product with its block of rows reaches: its columns, in its
    expert."""
    plan = plan_of([20, 20, 20])
    others = [r for r in range(60) if r != 39]
    x, w = forward(plan, 24, 40, torch.float32)
    x[39] = nan
    assert_forward(x, w, plan)
    dy, w, pre, weights = backward(plan, 24, 70, torch.float32)
    dy[39] = nan
    table = table_of(plan)
    dpre, act, dweights = dact_swiglu(
        quantise_rows_in_blocks(dy, table),
        quantise_weights(w, transposed=True),
        pre,
        weights,
        plan,
        table,
        None,
        Need(),
    )
    assert dweights[39].isnan() and dweights[others].isfinite().all()
    assert act.columns.codes[:, : 3 * ALONG].float().isfinite().all()
    nans = dpre.rows.codes[:, : 3 * ALONG].float().isnan().transpose(0, 1).flatten(1)
    assert nans[ALONG + 19].all() and nans.sum() == 2 * 70
    by_expert = dpre.columns.codes[:, : 3 * ALONG].float().isnan().unflatten(1, (3, ALONG))
    assert by_expert[:, 1].all() and not by_expert[:, [0, 2]].any()


def test_no_rows():
    plan = routing.plan(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 3)
    x, w, table = torch.empty(0, 16, device=DEVICE), normal(3, 2, 8, 16), table_of(plan)
    pre, act = gate_up_swiglu(quantise_rows_in_blocks(x, table), quantise_weights(w), plan, table, None, True, True)
    assert pre.shape == (0, 2, 8)
    down_w = quantise_weights(normal(3, 16, 8), transposed=True)
    assert down(act, down_w, plan, table).shape == (0, 2, 16)
    weights = torch.empty(0, 2, device=DEVICE)
    dpre, act, dweights = dact_swiglu(
        quantise_rows_in_blocks(x, table), down_w, pre, weights, plan, table, None, Need()
    )
    assert dweights.shape == (0, 2) and dx_slots(dpre, quantise_weights(w, transposed=True), plan, table).shape == (
        0,
        2,
        16,
    )
    dw = torch.full((3, 8, 16), nan, device=DEVICE)
    x_columns = columns_in_blocks(16, x.dtype, table)
    assert not weight_grad(act, x_columns, table, "dw_down", dw).any()


# Recipes.


def judged(problem: Problem, inputs, dy: Tensor) -> tuple[Tensor, Grads]:
    """The recipe's results, after they were found within the budget; and next to the reference's own in this dtype,
    which quantises the same values: 8 bits move a result by percents, what is left by a hundredth of that."""
    y, grads = run(RUNG, problem, inputs, dy)
    if problem.dtype == torch.bfloat16:
        parity = Oracle(problem, inputs, dy).check(y, grads)
        assert parity.passed, parity.shares
    true_y, saved = reference_forward(**vars(inputs), swiglu_limit=problem.swiglu_limit, precision=problem.precision)
    true = reference_backward(saved, dy)
    for got, expected in zip((y, *vars(grads).values()), (true_y, *true), strict=True):
        if got is not y or problem.precision != "fp8_bwd":  # there y is the bf16 recipe's, which rounds less
            assert (got.float() - expected.float()).norm() <= OFF * expected.float().norm()
    return y, grads


LAYERS = {
    "odd": dict(T=13, H=67, I=17, E=3, K=2),
    "more than one block a side": dict(T=140, H=140, I=140, E=2, K=2),
    "masked": dict(T=20, H=32, I=24, E=4, K=3),
    "all masked": dict(T=5, H=32, I=24, E=3, K=2),
    "no tokens": dict(T=0, H=32, I=24, E=3, K=2),
}


@pytest.mark.parametrize("precision, save", [("fp8", "pre"), ("fp8_bwd", "inputs")])
@pytest.mark.parametrize("name", LAYERS)
def test_recipe(name, precision, save, poison):
    problem, inputs, dy = layer(**LAYERS[name], limit=LIMIT if name == "masked" else None)
    problem = problem.at(precision=precision, save=save)
    judged(problem, replace(inputs, topk_ids=reroute(inputs.topk_ids, name, problem.E)), dy)


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_recipe_makes_pre_again_to_the_bit(precision, poison):
    problem, inputs, dy = layer(T=9, H=40, I=30)
    results = [run(RUNG, problem.at(precision=precision, save=save), inputs, dy) for save in ("pre", "inputs")]
    for one, other in zip(*((y, *vars(grads).values()) for y, grads in results), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_recipe_in_other_dtypes(dtype, poison):
    problem, inputs, dy = layer(T=20, H=150, I=30, dtype=dtype)
    judged(problem.at(precision="fp8"), inputs, dy)


@pytest.mark.parametrize("layout", ["transposed", "weights transposed", "weights unaligned", "weights padded"])
def test_recipe_with_any_strides(layout, poison):
    problem, inputs, dy = layer(T=9, H=40, I=30)
    inputs, dy = lay_out(inputs, dy, layout)
    judged(problem.at(precision="fp8"), inputs, dy)


# Tickets.


def everything() -> list[Tensor]:
    """All results of a layer of three column blocks a side."""
    problem, inputs, dy = layer(T=20, H=260, I=260, E=2, K=2)
    y, grads = run(RUNG, problem.at(precision="fp8"), inputs, dy)
    return [y, *vars(grads).values()]


def test_any_programs_and_strips_give_the_same_bits(monkeypatch, poison):
    expected, tiles = everything(), fp8_tiles()
    for resident, strip in ((1, 1), (5, 2)):
        longer = {kernel: replace(getattr(tiles, kernel), STRIP=strip) for kernel in TICKETS if "dw" not in kernel}
        monkeypatch.setattr(scaled, "programs", lambda tile, resident=resident: resident)
        monkeypatch.setattr(blocks, "fp8_tiles", lambda longer=longer: replace(tiles, **longer))
        assert all(map(torch.equal, everything(), expected)), (resident, strip)


# Devices.


@pytest.mark.parametrize(
    "name, reason",
    [("sm_90", None), ("sm_120", None), ("gfx942", "e4m3fnuz"), ("gfx950", "registers"), ("sm_86", "older than sm_90")],
)
def test_what_has_no_use_for_codes_says_so(name, reason, monkeypatch):
    monkeypatch.setattr(blocks, "target", lambda: name)
    monkeypatch.setattr(blocks, "INTERPRETED", True)  # whose processors nobody counts
    problem = Problem(1, 16, 16, 1, 1)
    for precision in ("fp8", "fp8_bwd"):
        said = RUNG.recipe().why_not(problem.at(precision=precision))
        assert said is None if reason is None else reason in said
    assert RUNG.recipe().why_not(problem) is None
    said = RUNG.recipe().note(problem.at(precision="fp8"))
    assert ("hardly faster than bf16 yet" if name == "sm_90" else "not measured on") in said
