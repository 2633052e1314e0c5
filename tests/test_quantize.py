"""8 bits: the quantisers against a slow one that knows no tensor tricks, and the layer they make against the layer
written out. Faults are planted at the end: each check that is named there must see its own."""

import math
import re
from itertools import pairwise

import pytest
import torch
from torch.autograd.forward_ad import dual_level, make_dual

from mega_moe import reference
from mega_moe.parity import Oracle
from mega_moe.reference import PRECISIONS, quantize, ranks
from mega_moe.reference.backward import down_backward, gate_up_backward, router_weights_backward, swiglu_backward
from mega_moe.reference.forward import combine, down, gate_up, swiglu
from mega_moe.reference.quantize import FP8, MX, Format, block_of, e8m0_scale, fp32_scale, quantise
from mega_moe.samples import random_inputs
from mega_moe.shapes import Grads, Problem

SCALES_OF = pytest.mark.parametrize("scale_of", [fp32_scale, e8m0_scale])
EIGHT_BITS = [name for name in PRECISIONS if name != "bf16"]
MAX = {dtype: torch.finfo(dtype).max for dtype in (torch.bfloat16, torch.float32)}

CODES = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
"""The e4m3 numbers from 0 to 448; the code of each is its index, with 128 for a minus sign."""


def bits(t):
    """A tensor of 8-bit or 32-bit floats as integers: equal if the very bits are."""
    return t.view(torch.uint8 if t.element_size() == 1 else torch.int32)


def assert_same(one, other):
    assert torch.equal(bits(one.codes), bits(other.codes)) and torch.equal(bits(one.scales), bits(other.scales))


def uneven(rows, columns, spread):
    """Powers of two, up to 2^spread either way, (rows, columns): times these, every block needs a scale of its own."""
    g = torch.Generator().manual_seed(0)
    exponents = [torch.randint(-spread, spread + 1, (n,), generator=g) / 2 for n in (rows, columns)]
    return torch.exp2((exponents[0][:, None] + exponents[1]).round())


def normal(*shape, spread=20):
    """Normal fp32 numbers of uneven size."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=g) * uneven(*shape[-2:], spread)


# One value, one block.


@SCALES_OF
def test_example_of_quantise(scale_of):
    q = quantise(torch.tensor([[1, -3, 0.2, 896, 0, 0.001]]), (1, 4), scale_of)
    scales, last, back = {
        fp32_scale: ([2, 0.001 / 448], 448, 0.001),
        e8m0_scale: ([2, 2**-18], 256, 0.0009765625),
    }[scale_of]
    torch.testing.assert_close(q.scales.float(), torch.tensor([scales]))
    assert q.codes.tolist() == [[0.5, -1.5, 0.1015625, 448, 0, last]]
    torch.testing.assert_close(q.dequantise(), torch.tensor([[1, -3, 0.203125, 896, 0, back]]))


def test_example_of_block_of():
    assert block_of(8, 4).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    for dtype in (torch.int32, torch.int64):
        row_start = torch.tensor([0, 3, 3, 8], dtype=dtype)
        assert block_of(8, 4, row_start).tolist() == [0, 0, 0, 1, 1, 1, 1, 2]


def test_example_of_e8m0_scale():
    above = torch.nextafter(torch.tensor(448.0), torch.tensor(1e9)).item()
    amax = torch.tensor([448, above, 1, 0, math.nan, math.inf])
    assert bits(e8m0_scale(amax)).tolist() == [127, 128, 119, 1, 255, 255]


def test_every_code_survives_and_ties_go_to_the_even_one():
    one = quantise(CODES[None], (1, 128), torch.ones_like)
    assert bits(one.codes)[0].tolist() == list(range(127))
    ties = (CODES[:-1] + CODES[1:]) / 2
    q = quantise(ties[None], (1, 128), torch.ones_like)
    assert bits(q.codes)[0].tolist() == [i + i % 2 for i in range(126)]


def test_what_mx_holds_along_one_axis_it_holds_along_the_other():
    """A power of two takes every code along, down to where codes run out of bits. Other scales do not."""
    signs = normal(64, 300).sign()
    t = signs * torch.rand(64, 300, generator=torch.Generator().manual_seed(0)).clamp(min=2**-6)
    starts = row_start_of((40, 24))
    for format, holds in ((MX, True), (FP8, False)):
        held = format.rows(t)
        assert torch.equal(format.columns(held, starts), held) == holds


def test_what_is_out_of_range_is_clamped():
    """A bare cast gives NaN or 448 beyond 464, by the version of torch."""
    t = torch.tensor([[448.0, 463, 465, 1e4, -1e4, -463]])
    q = quantise(t, (1, 128), torch.ones_like)
    assert q.codes.tolist() == [[448, 448, 448, 448, -448, -448]]


@SCALES_OF
@pytest.mark.parametrize("zeros", [torch.zeros(3, 300), -torch.zeros(3, 300), torch.zeros(2, 2, 1, 1)])
def test_blocks_of_zeros_come_back_as_zeros(scale_of, zeros):
    q = quantise(zeros, (1, 128), scale_of)
    assert (q.codes.float() == 0).all() and (q.dequantise() == 0).all()
    assert q.scales.float().isfinite().all() and (q.scales.float() > 0).all()


@SCALES_OF
@pytest.mark.parametrize(
    "largest", [MAX[torch.bfloat16], MAX[torch.float32], 248 * 2.0**120, 2.0**-118, 2.0**-126, 1e-40, 2.0**-149]
)
def test_huge_and_tiny_blocks_are_finite_and_right(scale_of, largest):
    """Also where the largest value is subnormal in fp32, and where it is the largest that there is. A neighbour of
    ordinary size is another block and stays what it was."""
    t = torch.ones(1, 8)
    t[0, :4] = torch.tensor([largest, -largest / 2, largest / 16, 0])
    q = quantise(t, (1, 4), scale_of)
    for dtype in (torch.float32, torch.float64):
        back = q.dequantise(dtype)
        assert back.isfinite().all()
        assert (back[0, 4:] - 1).abs().max() < 1e-6
        error = (back[0, :4].double() - t[0, :4].double()).abs()
        assert (error <= t[0, :4].abs().double() * 2**-4 * (1 + 2**-20) + 2.0**-10 * q.scales[0, 0].double()).all()


@SCALES_OF
def test_who_flushes_subnormal_numbers_loses_no_others(scale_of):
    """Blocks of zeros stay zeros, and blocks above 448 * 2^-126 keep their bits: no scale is subnormal itself."""
    t = normal(20, 8, spread=100)
    t[3, :4], t[5, 4:] = 0, torch.tensor([0, 2.0**-117, -(2.0**-118), 2.0**-125])
    expected = quantise(t, (1, 4), scale_of)
    torch.set_flush_denormal(True)
    try:
        got = quantise(t, (1, 4), scale_of)
        held = got.dequantise()
    finally:
        torch.set_flush_denormal(False)
    assert_same(got, expected)
    assert torch.equal(held, expected.dequantise())


# Whole tensors.


def by_hand(t, block, scale_of, row_start=None):
    """Codes (as bytes) and scales, block by block in Python's floats; float64 holds every fp32 product, and fp32's
    rounding is asked for by name."""
    fp32 = lambda value: torch.tensor(value, dtype=torch.float64).float().item()
    *leading, M, N = t.shape
    matrices = math.prod(leading)
    starts = [0, M] if row_start is None else row_start.tolist()
    row_blocks = [
        range(first, min(first + block[0], end))
        for start, end in pairwise(starts)
        for first in range(start, end, block[0])
    ]
    column_blocks = [range(first, min(first + block[1], N)) for first in range(0, N, block[1])]
    codes = torch.zeros(t.shape, dtype=torch.uint8)
    scales = torch.zeros(*leading, len(row_blocks), len(column_blocks), dtype=torch.float64)
    midpoints = (CODES[:-1] + CODES[1:]) / 2
    for m in range(matrices):
        matrix, codes_, scales_ = (u.view(matrices, *u.shape[-2:])[m] for u in (t.float(), codes, scales))
        for b, rows in enumerate(row_blocks):
            for c, columns in enumerate(column_blocks):
                here = (slice(rows.start, rows.stop), slice(columns.start, columns.stop))
                amax = matrix[here].abs().max().item()
                if scale_of is fp32_scale:
                    scale = max(fp32(amax * fp32(1 / 448)), 2.0**-126)
                else:
                    scale = next(2.0**e for e in range(-126, 128) if amax <= 448 * 2.0**e)
                scaled = (matrix[here].double() * fp32(1 / scale)).float().double()
                size = scaled.abs().clamp(max=448).contiguous()
                below, above = (torch.bucketize(size, midpoints, right=right) for right in (False, True))
                code = torch.where(below % 2 == 0, below, above)  # they differ at ties alone
                codes_[here] = (code + 128 * scaled.signbit()).to(torch.uint8)
                scales_[b, c] = scale
    return codes, scales


def is_by_hand(t, block, scale_of, row_start=None):
    q = quantise(t, block, scale_of, row_start)
    codes, scales = by_hand(t, block, scale_of, row_start)
    assert q.codes.dtype == torch.float8_e4m3fn and torch.equal(bits(q.codes), codes)
    assert q.scales.shape == scales.shape and torch.equal(q.scales.double(), scales)


SHAPES = [(3, 160), (2, 300), (1, 1), (130, 7), (2, 3, 40, 33), (129, 257), (0, 5), (5, 0)]


@SCALES_OF
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32)], ids=str)
def test_quantise_is_the_one_by_hand(shape, block, scale_of):
    is_by_hand(normal(*shape), block, scale_of)


@SCALES_OF
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_dtype_that_fp32_holds_makes_no_difference(dtype, scale_of):
    """So the float64 truth has the codes of the layer in bf16, wherever what is quantised was given."""
    t = normal(5, 200, spread=8).bfloat16()
    narrow = t.clamp(-1e4, 1e4).to(dtype)
    assert_same(quantise(narrow, (1, 128), scale_of), quantise(narrow.float(), (1, 128), scale_of))
    assert Format(scale_of, 128).rows(t.double()).dtype == torch.float64
    assert Format(scale_of, 128).rows(t).dtype == torch.float32


def round_trip(t, block, scale_of, row_start=None):
    """No value moves by more than e4m3 allows, in fp32 or float64: so no block's largest one saturates either."""
    q = quantise(t, block, scale_of, row_start)
    scales = quantize.spread(q.scales.float(), t.shape, block, row_start).double()
    allowed = torch.where(t.abs() >= 2**-6 * scales, t.abs().double() * 2**-4, 2**-10 * scales)
    for dtype in (torch.float32, torch.float64):
        assert ((q.dequantise(dtype).double() - t.double()).abs() <= allowed * (1 + 2**-20)).all()


@SCALES_OF
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (1, 32), (32, 1)], ids=str)
def test_round_trip(block, scale_of):
    round_trip(normal(200, 300, spread=100), block, scale_of)
    round_trip(normal(200, 300, spread=0), block, scale_of)


# Rows of experts.

ROWS = [(130, 0, 3, 127), (4, 4), (1, 7), (0, 0, 5), (256,), (33, 0, 0, 64, 1), (0, 0)]


def row_start_of(rows):
    return torch.tensor([0, *rows]).cumsum(0)


def blocks_end_with_their_expert(rows, size, scale_of):
    """Quantised together, or each expert by itself: the same codes and scales."""
    t = normal(sum(rows), 5)
    q = quantise(t, (size, 1), scale_of, row_start_of(rows))
    alone = [quantise(own, (size, 1), scale_of) for own in t.split(rows)]
    for whole, parts in ((q.codes, [a.codes for a in alone]), (q.scales, [a.scales for a in alone])):
        assert torch.equal(bits(whole), bits(torch.cat(parts)))
    assert len(q.scales) == sum(math.ceil(n / size) for n in rows)
    assert torch.equal(q.dequantise(), torch.cat([a.dequantise() for a in alone]))


@SCALES_OF
@pytest.mark.parametrize("size", [32, 128])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_blocks_of_rows_end_with_their_expert(rows, size, scale_of):
    blocks_end_with_their_expert(rows, size, scale_of)


@SCALES_OF
def test_rows_of_experts_by_hand(scale_of):
    is_by_hand(normal(260, 3), (128, 1), scale_of, row_start_of(ROWS[0]))


@pytest.mark.parametrize("format", [FP8, MX], ids=["FP8", "MX"])
def test_formats_put_blocks_along_the_contraction(format):
    """Rows and columns of one tensor, both ways of a weight; a token's row is the same before dispatch and after."""
    t, w, starts = normal(40, 2, 70), normal(3, 200, 150), row_start_of((1, 32, 0, 7))
    size = format.along
    assert torch.equal(format.rows(t), quantise(t, (1, size), format.scale_of).dequantise())
    columns = quantise(t.view(40, 140), (size, 1), format.scale_of, starts).dequantise()
    assert torch.equal(format.columns(t, starts), columns.view(40, 2, 70))
    assert torch.equal(format.weights(w), quantise(w, (format.across, size), format.scale_of).dequantise())
    assert torch.equal(format.weights(w.mT).mT, format.weights(w)) == (format is FP8)
    order = torch.randint(40, (99,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(format.rows(t[order]), format.rows(t)[order])


# NaN and infinity.


def bad_blocks_are_nan(block, bad, scale_of):
    """One bad value at (40, 50), in the second of two experts: its block is NaN in the same bits, whichever NaN or
    infinity came in, and no other block changes."""
    t, row_start = normal(70, 200), row_start_of((33, 0, 37)) if block[1] == 1 else None
    without = quantise(t, block, scale_of, row_start)
    t[40, 50] = bad
    q = quantise(t, block, scale_of, row_start)
    rows, columns = {
        (1, 32): (slice(40, 41), slice(32, 64)),
        (128, 128): (slice(70), slice(128)),
        (32, 1): (slice(33, 65), slice(50, 51)),
    }[block]
    hit = torch.zeros(70, 200, dtype=torch.bool)
    hit[rows, columns] = True
    assert torch.equal(q.dequantise().isnan(), hit) and (bits(q.codes)[hit] == 0x7F).all()
    assert torch.equal(bits(q.codes)[~hit], bits(without.codes)[~hit])
    nan = q.scales.float().isnan()
    assert nan.sum() == 1 and torch.equal(bits(q.scales)[~nan], bits(without.scales)[~nan])
    assert bits(q.scales)[nan].item() == (0x7FC00000 if scale_of is fp32_scale else 255)


@SCALES_OF
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("block", [(1, 32), (128, 128), (32, 1)], ids=str)
def test_a_block_with_nan_or_infinity_is_nan_and_no_other_changes(block, bad, scale_of):
    bad_blocks_are_nan(block, bad, scale_of)


# The layer.


def layer(T=9, H=140, I=37, E=4, K=2, dtype=torch.float64, scale=1.0, spread=0):
    """One route is masked, expert E-1 has no rows unless it is the only one. Values are bf16's. With a spread, x, dy
    and the weights are uneven."""
    inputs, dy = random_inputs(Problem(T, H, I, E, K, torch.bfloat16, "cpu"), "random", scale=scale)
    for t in (inputs.x, dy, inputs.w_gate_up, inputs.w_down):
        t.mul_(uneven(*t.shape[-2:], spread))
    ids = inputs.topk_ids.clamp(max=max(E - 2, 0))
    if T:
        ids[T // 2, 0] = -1
    x, w_gate_up, w_down = (t.to(dtype) for t in (inputs.x, inputs.w_gate_up, inputs.w_down))
    weights = inputs.topk_weights.double() if dtype == torch.float64 else inputs.topk_weights
    return (x, ids, weights, w_gate_up, w_down), dy.to(dtype)


def run(inputs, dy, precision):
    y, saved = reference.forward(*inputs, precision=precision)
    return {"y": y, **reference.backward(saved, dy)._asdict()}


def written_out(inputs, dy, precision):
    """The layer route by route in float64; each operand by `by_hand`, along the axis that docs/math.md gives it."""
    x, ids, weights, w_gate_up, w_down = inputs
    E = len(w_down)
    scale_of, along, across = (e8m0_scale, 32, 1) if precision == "mxfp8" else (fp32_scale, 128, 128)

    def held(t, block, row_start=None):
        codes, scales = by_hand(t, block, scale_of, row_start)
        return quantize.Quantised(codes.view(torch.float8_e4m3fn), scales, block, row_start).dequantise(torch.float64)

    quantised = precision != "fp8_bwd"
    row = lambda t: held(t[None], (1, along))[0]
    forward_row = row if quantised else lambda t: t
    forward_weight = (lambda w: held(w, (across, along))) if quantised else lambda w: w

    y, dx = torch.zeros_like(x), torch.zeros_like(x)
    dtopk_weights = torch.zeros_like(weights)
    dw_gate_up, dw_down = torch.zeros_like(w_gate_up), torch.zeros_like(w_down)
    for e in range(E):
        routes = (ids == e).nonzero().tolist()
        gate, up, down = (forward_weight(w) for w in (*w_gate_up[e], w_down[e]))
        gate_t, up_t, down_t = (held(w.T, (across, along)).T for w in (*w_gate_up[e], w_down[e]))
        columns = {name: [] for name in ("x", "dy", "act", "dgate", "dup")}
        for t, k in routes:
            g, u = gate @ forward_row(x[t]), up @ forward_row(x[t])
            s = torch.sigmoid(g)
            act = g * s * u
            y[t] += weights[t, k] * (down @ forward_row(act))
            dact = down_t.T @ row(dy[t])
            dtopk_weights[t, k] = dact @ act
            dgate, dup = (weights[t, k] * dact * d for d in (u * (s + g * s * (1 - s)), g * s))
            dx[t] += gate_t.T @ row(dgate) + up_t.T @ row(dup)
            for name, value in zip(columns, (x[t], dy[t], weights[t, k] * act, dgate, dup)):
                columns[name].append(value)
        if routes:
            c = {name: held(torch.stack(values), (along, 1)) for name, values in columns.items()}
            dw_gate_up[e] = torch.stack([c["dgate"].T @ c["x"], c["dup"].T @ c["x"]])
            dw_down[e] = c["dy"].T @ c["act"]
    return {"y": y, "dx": dx, "dtopk_weights": dtopk_weights, "dw_gate_up": dw_gate_up, "dw_down": dw_down}


def is_written_out(precision, **changes):
    inputs, dy = layer(**changes)
    expected = written_out(inputs, dy, precision)
    for name, got in run(inputs, dy, precision).items():
        of_row = expected[name].abs().amax(-1, keepdim=True)
        assert ((got - expected[name]).abs() <= 1e-10 * of_row).all(), name


@pytest.mark.parametrize("precision", EIGHT_BITS)
@pytest.mark.parametrize(
    "changes",
    [dict(), dict(spread=16, T=4, E=2), dict(T=110, H=33, E=3, I=5)],
    ids=["ragged", "uneven", "blocks of rows"],
)
def test_the_layer_is_dequantise_then_multiply(precision, changes):
    is_written_out(precision, **changes)


def test_bf16_quantises_nothing():
    inputs, dy = layer(dtype=torch.bfloat16)
    y, saved = reference.forward(*inputs)
    for got, want in zip((y, *reference.backward(saved, dy)), run(inputs, dy, "bf16").values(), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_results_have_the_layers_dtype(dtype, precision):
    inputs, dy = layer(dtype=dtype)
    results = run(inputs, dy, precision)
    assert results.pop("dtopk_weights").dtype == inputs[2].dtype
    assert all(t.dtype == dtype for t in results.values())


@pytest.mark.parametrize("precision", EIGHT_BITS)
@pytest.mark.parametrize("changes", [dict(T=0), dict(E=1), dict(T=1, K=1), dict(H=16, I=16)], ids=str)
def test_no_tokens_and_empty_experts(precision, changes):
    """Zeros of full shape where nothing was routed, finite numbers elsewhere."""
    inputs, dy = layer(**changes)
    results = run(inputs, dy, precision)
    assert [t.shape for t in results.values()] == [t.shape for t in (inputs[0], inputs[0], *inputs[2:])]
    assert all(t.isfinite().all() for t in results.values())
    empty = torch.tensor([(inputs[1] == e).sum() == 0 for e in range(len(inputs[4]))])
    assert (results["dw_gate_up"][empty] == 0).all() and (results["dw_down"][empty] == 0).all()
    inputs[1].fill_(-1)
    assert all((t == 0).all() for t in run(inputs, dy, precision).values())


@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_zero_blocks_in_a_layer_leave_it_finite(precision):
    inputs, dy = layer(dtype=torch.bfloat16)
    x, _, _, w_gate_up, w_down = inputs
    x[2], x[3, :128], w_gate_up[1, 0], w_down[0, :128, :32], dy[4] = 0, 0, 0, 0, 0
    results = run(inputs, dy, precision)
    assert all(t.isfinite().all() for t in results.values())
    assert (results["y"][2] == 0).all() and (results["dx"][4] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_nan_and_infinity_stay_with_their_token(precision, bad):
    """In x: y and dx of other tokens keep their bits, and so do gradients of experts that the token did not visit."""
    inputs, dy = layer(dtype=torch.bfloat16)
    without = run(inputs, dy, precision)
    inputs[0][3, 20] = bad
    results = run(inputs, dy, precision)
    others = torch.arange(len(dy)) != 3
    assert not results["y"][3].isfinite().any()
    for name in ("y", "dx", "dtopk_weights"):
        assert torch.equal(results[name][others], without[name][others]), name
    untouched = [e for e in range(len(inputs[4])) if e not in inputs[1][3]]
    assert untouched
    for name in ("dw_gate_up", "dw_down"):
        assert torch.equal(results[name][untouched], without[name][untouched]), name


@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_experts_over_ranks_quantise_the_same_blocks(precision):
    inputs, dy = layer(dtype=torch.float64)
    x, ids, weights, w_gate_up, w_down = inputs
    split = lambda t: list(t.split((5, 4)))
    tokens = [ranks.Tokens(*t) for t in zip(split(x), split(ids), split(weights))]
    of_ranks = (list(w_gate_up.split(2)), list(w_down.split(2)))
    y, saved = ranks.forward(tokens, *of_ranks, precision=precision)
    grads = ranks.backward(tokens, *of_ranks, saved, split(dy), precision=precision)
    together = [torch.cat(t) for t in (y, *zip(*grads))]
    for got, want in zip(together, run(inputs, dy, precision).values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_an_unknown_precision_names_those_there_are():
    inputs, _ = layer()
    with pytest.raises(ValueError, match=r"'fp4': the precisions are bf16, fp8, fp8_bwd, mxfp8"):
        reference.forward(*inputs, precision="fp4")


@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_autograd_is_refused(precision):
    """It would lose parts of gradients without a word, or give those of bf16. Whichever input asks for one, in one
    process or over ranks, backward or forward mode; without, the same inputs are fine."""
    (x, ids, *weights), _ = layer()
    told = f'autograd cannot follow precision="{precision}": call forward(...) under torch.no_grad()'
    of_ranks = lambda x, weights, *experts: ([ranks.Tokens(x, ids, weights)], *([w] for w in experts))
    for asks in range(4):
        inputs = [t.clone().requires_grad_(at == asks) for at, t in enumerate((x, *weights))]
        for call in (
            lambda x, *weights: reference.forward(x, ids, *weights, precision=precision),
            lambda *inputs: ranks.forward(*of_ranks(*inputs), precision=precision),
        ):
            with pytest.raises(RuntimeError, match=re.escape(told)):
                call(*inputs)
            with torch.no_grad():
                call(*inputs)
                with pytest.raises(RuntimeError, match=re.escape(told)), dual_level():
                    call(*(make_dual(t, t) if t.requires_grad else t for t in inputs))
        reference.forward(inputs[0], ids, *inputs[1:])


# How far 8 bits are from 16.

BANDS = {  # of ||got - truth|| / ||truth||, the truth being the layer in float64 without 8 bits
    "bf16": dict(y=(0.002, 0.006), grads=(0.002, 0.006)),
    "fp8": dict(y=(0.05, 0.08), grads=(0.05, 0.12)),
    "fp8_bwd": dict(y=(0.002, 0.006), grads=(0.02, 0.06)),
    "mxfp8": dict(y=(0.05, 0.08), grads=(0.055, 0.12)),
}


@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
@pytest.mark.parametrize(
    "shape", [dict(T=256, H=256, I=192), dict(T=64, H=67, I=40), dict(T=130, H=128, I=300, K=1)], ids=str
)
def test_distance_to_the_layer_without_8_bits(shape, scale):
    inputs, dy = layer(**shape, scale=scale)
    truth = run(inputs, dy, "bf16")
    low, low_dy = layer(**shape, scale=scale, dtype=torch.bfloat16)
    for precision, bands in BANDS.items():
        for name, got in run(low, low_dy, precision).items():
            least, most = bands["y" if name == "y" else "grads"]
            distance = ((got.double() - truth[name]).norm() / truth[name].norm()).item()
            assert least < distance < most, (precision, name, distance)


# Parity.


def rung(inputs, dy, precision):
    """What an honest fused rung computes: products in fp32, each off by some 2^-16 of itself as sums in another order
    are, and rounded to bf16 where the reference rounds, before anything is quantised."""
    i, g = inputs, torch.Generator().manual_seed(1)
    summed = lambda t: t * (1 + 2**-16 * torch.randn(t.shape, generator=g))
    rounded = lambda t: t.bfloat16().float()
    p, (ahead, back) = reference.plan(i.topk_ids, len(i.w_down)), PRECISIONS[precision]
    x, w_gate_up, w_down = i.x.float(), i.w_gate_up.float(), i.w_down.float()
    rows, weight_of_row = x[p.token_of_row], i.topk_weights[p.token_of_row, p.slot_of_row]

    pre = rounded(summed(gate_up(rows, w_gate_up, p, ahead)))
    act = rounded(swiglu(pre))
    y = combine(summed(down(act, w_down, p, ahead)), i.topk_weights, p.row_of_slot)

    dy_rows, weighted_act = dy.float()[p.token_of_row], rounded(weight_of_row[:, None] * act)
    dact, dw_down = map(summed, down_backward(dy_rows, weighted_act, torch.ones_like(weight_of_row), w_down, p, back))
    dact = rounded(dact)
    dpre = rounded(swiglu_backward(dact, weight_of_row, pre))
    drows, dw_gate_up = map(summed, gate_up_backward(dpre, rows, w_gate_up, p, back))
    dx = combine(drows, torch.ones_like(i.topk_weights), p.row_of_slot)
    dtopk_weights = router_weights_backward(dact, act, i.topk_weights, p)
    return y.bfloat16(), Grads(dx.bfloat16(), dtopk_weights, dw_gate_up.bfloat16(), dw_down.bfloat16())


JUDGED = Problem(T=48, H=160, I=144, E=3, K=2, device="cpu")


@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
@pytest.mark.parametrize("precision", EIGHT_BITS)
@pytest.mark.parametrize("problem", [JUDGED, JUDGED.at(T=6, H=32, I=24, K=1)], ids=["blocks", "tiny"])
def test_a_rung_that_rounds_where_the_reference_does_is_within_budget(problem, precision, scale):
    for seed in range(2):
        inputs, dy = random_inputs(problem, "random", seed, scale)
        verdict = Oracle(problem.at(precision=precision), inputs, dy).check(*rung(inputs, dy, precision))
        assert verdict.passed, verdict.shares


# Faults, planted. Each check that is named must fail.


def rounded_down(amax):
    """The exponent of the MX specification: what is above 448 then saturates."""
    _, k = torch.frexp(amax)
    return (k - 9 + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def test_an_exponent_rounded_down_is_seen():
    for check in (round_trip, is_by_hand):
        with pytest.raises(AssertionError):
            check(normal(20, 100, spread=0), (1, 32), rounded_down)


@SCALES_OF
def test_the_scale_of_the_next_block_is_seen(scale_of, monkeypatch):
    spread = quantize.spread
    monkeypatch.setattr(quantize, "spread", lambda per_block, *facts: spread(per_block.roll(1, -1), *facts))
    with pytest.raises(AssertionError):
        is_by_hand(normal(20, 300), (1, 128), scale_of)
    with pytest.raises(AssertionError):
        is_written_out("mxfp8" if scale_of is e8m0_scale else "fp8")


@SCALES_OF
def test_blocks_that_cross_experts_are_seen(scale_of, monkeypatch):
    of_all = lambda n, size, row_start=None, device="cpu": block_of(n, size, None, device)
    monkeypatch.setattr(quantize, "block_of", of_all)
    with pytest.raises(AssertionError):
        blocks_end_with_their_expert((33, 0, 0, 64, 1), 32, scale_of)
    with pytest.raises(AssertionError):
        is_written_out("mxfp8" if scale_of is e8m0_scale else "fp8_bwd", T=8, H=20, E=3, I=5, spread=40)


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_one_copy_for_both_contractions_is_seen(precision, monkeypatch):
    """Rows as forward had them, instead of in blocks of rows; in MX a weight likewise. (Were all values of one size, MX
    would hardly show it: a scale that is a power of two shifts a value's bits and rounds none.)"""
    with monkeypatch.context() as fault:
        fault.setattr(Format, "columns", lambda self, t, row_start: self.rows(t))
        with pytest.raises(AssertionError):
            is_written_out(precision, T=4, E=2, spread=16)
    weights = Format.weights
    forward_only = lambda self, w: weights(self, w) if w.is_contiguous() else weights(self, w.mT).mT
    monkeypatch.setattr(Format, "weights", forward_only)
    if precision == "mxfp8":
        with pytest.raises(AssertionError):
            is_written_out(precision, T=4, E=2, spread=16)


@SCALES_OF
def test_a_maximum_that_drops_nan_is_seen(scale_of, monkeypatch):
    largest = quantize.largest
    monkeypatch.setattr(quantize, "largest", lambda t, *facts: largest(t.nan_to_num(0, 1, 1), *facts))
    for bad in (math.nan, math.inf):
        with pytest.raises(AssertionError):
            bad_blocks_are_nan((1, 32), bad, scale_of)


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_parity_sees_what_a_rung_may_do_wrong(precision, monkeypatch):
    """In a whole layer, at its budget: the scale of the next block, and a dropped route."""
    inputs, dy = random_inputs(JUDGED, "random")
    oracle = Oracle(JUDGED.at(precision=precision), inputs, dy)
    assert oracle.check(*rung(inputs, dy, precision)).passed
    spread = quantize.spread
    with monkeypatch.context() as fault:
        fault.setattr(quantize, "spread", lambda per_block, *facts: spread(per_block.roll(1, -1), *facts))
        assert {"y", "dx", "dw_gate_up", "dw_down"} <= set(oracle.check(*rung(inputs, dy, precision)).failed)
    inputs.topk_ids[20, 1] = -1
    assert {"y", "dx"} <= set(oracle.check(*rung(inputs, dy, precision)).failed)
