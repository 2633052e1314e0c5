"""Quantisation on the device: codes and scales as reference/quantize.py's FP8 defines them, to the bit.

A matrix instruction reads 8-bit operands only where the contraction is contiguous (K-major), so each tensor is written
as its product reads it:

    rows      tokens, for a contraction along their columns: codes as they lie, a scale for 128 columns of a row
    weights   codes as they lie and, in the same pass, their transpose: blocks are square, so both have the same scales
    columns   an expert's rows, for a contraction over them: codes transposed, a scale for 128 rows of a column

Blocks of rows in a tile table have 128 rows here. So a block of rows is a block of the columns' format as well, and
whatever makes a tile of it (see scaled.py) can quantise it either way while it is in registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kept import can_be_kept, is_kept, once
from .blocks import fp8_tiles
from .tile import INTERPRETED
from .tile_table import TileTable
from .weights import aligned

ALONG = tl.constexpr(128)
"""How many values along a contraction share a scale; of a weight, as many rows share it too."""

E4M3_MAX = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-126)


class Quantised(NamedTuple):
    """A tensor as codes and scales.

    Attributes:
        codes: float8_e4m3fn, rows padded to 16 bytes.
        scales: fp32; of MX (see mx_quantize.py) bytes of E8M0.
        dtype: of the tensor; what a product makes of it is rounded to this.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


class QuantisedWeights(NamedTuple):
    """A weight (E, N, C), or (E, 2, N, C), as codes and fp32 scales.

    Attributes:
        codes: (..., N, C), for products that contract along C; None if not asked for.
        transposed: (..., C, N), for those that contract along N; None if not asked for.
        scales: (..., ceil(N / 128), ceil(C / 128)).
    """

    codes: Tensor | None
    transposed: Tensor | None
    scales: Tensor


# --8<-- [start:tile]
@triton.jit
def magnitude(t):
    """|t| of fp32 values; infinity for NaN, which a maximum would pass over."""
    return tl.where(t == t, tl.abs(t), float("inf"))


@triton.jit
def larger(a, b):
    """The larger one; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(t, AXIS: tl.constexpr):
    """The largest magnitude of fp32 values along AXIS (None: of all); more than any number if one is NaN."""
    if INTERPRETED:  # which takes long for another maximum than its own
        amax = tl.max(magnitude(t), AXIS)
    else:
        amax = tl.reduce(tl.abs(t), AXIS, larger)
    return amax


@triton.jit
def scale_of(amax):
    """The scale of a block by its largest magnitude, which becomes 448. NaN for a block with an infinity or NaN."""
    return tl.where(amax < float("inf"), tl.maximum(amax * (1 / E4M3_MAX), SMALLEST_SCALE), float("nan"))


@triton.jit
def encode(t, reciprocal):
    """fp32 values times the reciprocal of their scale, as e4m3 codes. NaN keeps no sign. Nothing is clamped: none is
    larger than what its scale was made from, and so beyond 448 by more than its rounding, which leads back."""
    return to_e4m3(t * reciprocal)


@triton.jit
def to_e4m3(value):
    """fp32 values up to +-464, or NaN, rounded to the nearest e4m3, ties to even: as a GPU's conversion does, and the
    interpreter's does not."""
    if INTERPRETED:
        bits = value.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)  # 3 bits of mantissa are left
        # Below 2^-6 numbers lie 2^-9 apart, as fp32's do above 2^14: the addition rounds.
        small = (tl.abs(value) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
        code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 31) << 7)
        code = tl.where(value == value, code, 0x7F)
        codes = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        codes = value.to(tl.float8e4nv)
    return codes


@triton.jit
def quantise(t, AXIS: tl.constexpr):
    """Codes and scales of a tile of fp32 values, in which those along AXIS share one; None: all of them do."""
    scale = scale_of(largest(t, AXIS))
    reciprocal = tl.div_rn(1.0, scale)
    if AXIS is not None:
        reciprocal = tl.expand_dims(reciprocal, AXIS)
    return encode(t, reciprocal), scale


@triton.jit
def dot_codes(a, b):
    """a @ b of e4m3 codes in fp32, without scales. The interpreter takes the code of NaN for a number."""
    if INTERPRETED:
        a_nan, b_nan = (a.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F, (b.to(tl.uint8, bitcast=True) & 0x7F) == 0x7F
        a, b = tl.where(a_nan, float("nan"), a.to(tl.float32)), tl.where(b_nan, float("nan"), b.to(tl.float32))
    return tl.dot(a, b, out_dtype=tl.float32)


@triton.jit
def four_codes(a, b, c, d):
    """Four fp32 values of one place, as e4m3 codes in one int32, a's the lowest byte. Codes that are to lie side by
    side in memory are so when they are made: no byte has to move from thread to thread."""
    if INTERPRETED:
        word = tl.zeros(a.shape, tl.uint32)
        for i in tl.static_range(4):
            word |= to_e4m3((a, b, c, d)[i]).to(tl.uint8, bitcast=True).to(tl.uint32) << (8 * i)
        words = word.to(tl.int32, bitcast=True)
    else:
        words = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
            " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return words


@triton.jit
def every_fourth(t):
    """Of 128 values every fourth from the first on, from the second, the third, the fourth."""
    even, odd = tl.split(tl.reshape(t, (t.shape[0] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def store_transposed(
    codes_ptr,  # (N, R) written, rows aligned to 16 bytes
    rows,  # four of (BLOCK_R / 4, BLOCK_N): every fourth row of a tile
    reciprocal,  # of their scales
    row,  # (BLOCK_R / 4,) of the first of four, divided by 4
    n,  # (BLOCK_N,)
    stride_codes,
    mask,
):
    """Write a tile as codes and transposed: four rows a word, whose last may lie in the padding."""
    a, b, c, d = rows
    words = four_codes(
        a.to(tl.float32) * reciprocal,
        b.to(tl.float32) * reciprocal,
        c.to(tl.float32) * reciprocal,
        d.to(tl.float32) * reciprocal,
    )
    words_ptr = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    stride = tl.multiple_of(stride_codes // 4, 4)
    tl.store(words_ptr + n.to(tl.int64)[None, :] * stride + row[:, None], words, mask=mask)


# --8<-- [end:tile]


# --8<-- [start:rows]
@triton.jit(do_not_specialize=["T"])
def quantise_rows_kernel(
    t_ptr,  # (T, N) read, any strides
    codes_ptr,  # (T, N) written, unit last stride
    scales_ptr,  # (T, ceil(N / 128)) fp32, written
    T,
    stride_t,
    stride_n,
    stride_codes,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid: one program for each (block of rows, 128 columns), columns fastest.

    Example: a row [2., -448.] has scale 1 and codes [2., -448.]; [1., 0.] has scale 1/448 and codes [448., 0.].
    """
    groups: tl.constexpr = (N + ALONG - 1) // ALONG
    row = (tl.program_id(0) // groups * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    group = tl.program_id(0) % groups
    n = group * ALONG + tl.arange(0, ALONG)
    mask = (row < T)[:, None] & (n < N)[None, :]

    at = t_ptr + row[:, None] * stride_t + n.to(tl.int64)[None, :] * stride_n
    codes, scale = quantise(tl.load(at, mask=mask, other=0.0).to(tl.float32), 1)

    tl.store(codes_ptr + row[:, None] * stride_codes + n[None, :], codes, mask=mask)
    tl.store(scales_ptr + row * groups + group, scale, mask=row < T)


@triton.jit
def lay_in_blocks_kernel(
    codes_ptr,  # (T, N) read
    scales_ptr,  # (T, groups of N) fp32, read
    in_blocks_ptr,  # (rows in blocks, N) written in every block that holds rows
    scales_in_blocks_ptr,  # (rows in blocks, groups of N), likewise
    token_in_blocks_ptr,  # (rows in blocks,) int32, read
    route_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    stride_codes,
    stride_in_blocks,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Grid: one program for each (block of rows, block of columns), columns fastest, for the most blocks of any
    routing. Rows behind an expert's last become zeros.

    Example: an expert whose one row is token 1, codes = [[9.], [448.]]: the codes of its block are [[448.], [0.], ...].
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    groups: tl.constexpr = (N + ALONG - 1) // ALONG
    block = (tl.program_id(0) // n_blocks).to(tl.int64)
    if block < tl.load(counters_ptr):
        r = block * ALONG + tl.arange(0, ALONG)
        n = tl.program_id(0) % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        token = tl.load(token_in_blocks_ptr + r).to(tl.int64)
        live = tl.load(route_in_blocks_ptr + r) >= 0
        at = codes_ptr + token[:, None] * stride_codes + n[None, :]
        codes = tl.load(at, mask=live[:, None] & (n < N)[None, :], other=0.0)
        tl.store(in_blocks_ptr + r[:, None] * stride_in_blocks + n[None, :], codes, mask=(n < N)[None, :])
        if tl.program_id(0) % n_blocks == 0:
            group = tl.arange(0, GROUPS)
            mask = live[:, None] & (group < groups)[None, :]
            scales = tl.load(scales_ptr + token[:, None] * groups + group[None, :], mask=mask, other=0.0)
            to_scales = scales_in_blocks_ptr + r[:, None] * groups + group[None, :]
            tl.store(to_scales, scales, mask=(group < groups)[None, :])


# --8<-- [end:rows]


# --8<-- [start:weights]
@triton.jit
def quantise_weights_kernel(
    w_ptr,  # (E, PARTS, N, C) read, any strides
    codes_ptr,  # (E, PARTS, N, C) written, unit last stride; or None
    transposed_ptr,  # (E, PARTS, C, N) written, unit last stride; or None
    scales_ptr,  # (E, PARTS, blocks of N, blocks of C) fp32, written
    stride_e,
    stride_part,
    stride_n,
    stride_c,
    stride_codes,
    stride_transposed,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """Grid: one program for each block of 128 x 128, in the order of the scales.

    Example: w = [[[[1., -2.], [0., 448.]]]]: scale 1, codes the same, transposed = [[[[1., 0.], [-2., 448.]]]].
    """
    n_blocks: tl.constexpr = (N + ALONG - 1) // ALONG
    c_blocks: tl.constexpr = (C + ALONG - 1) // ALONG
    matrix = (tl.program_id(0) // (n_blocks * c_blocks)).to(tl.int64)
    quarter = tl.program_id(0) // c_blocks % n_blocks * (ALONG // 4) + tl.arange(0, ALONG // 4)
    n = 4 * quarter
    c = tl.program_id(0) % c_blocks * ALONG + tl.arange(0, ALONG)

    w_ptr += matrix // PARTS * stride_e + matrix % PARTS * stride_part
    at = w_ptr + n.to(tl.int64)[:, None] * stride_n + c.to(tl.int64)[None, :] * stride_c
    rows = ()
    amax = tl.zeros((ALONG // 4, ALONG), tl.float32)
    for i in tl.static_range(4):
        mask = (n + i < N)[:, None] & (c < C)[None, :]
        row = tl.load(at + tl.cast(i, tl.int64) * stride_n, mask=mask, other=0.0)
        amax = larger(amax, tl.abs(row.to(tl.float32)))
        rows += (row,)
    scale = scale_of(largest(amax, None))
    reciprocal = tl.div_rn(1.0, scale)

    tl.store(scales_ptr + tl.program_id(0), scale)
    if codes_ptr is not None:
        to_codes = codes_ptr + (matrix * N + n)[:, None] * stride_codes + c[None, :]
        for i in tl.static_range(4):
            mask = (n + i < N)[:, None] & (c < C)[None, :]
            tl.store(to_codes + i * stride_codes, encode(rows[i].to(tl.float32), reciprocal), mask=mask)
    if transposed_ptr is not None:
        mask = (quarter < (N + 3) // 4)[:, None] & (c < C)[None, :]
        store_transposed(transposed_ptr, rows, reciprocal, quarter, matrix * C + c, stride_transposed, mask)


# --8<-- [end:weights]


# --8<-- [start:columns]
@triton.jit
def store_columns(
    codes_ptr,  # (N, rows in blocks) written at the block
    scales_at,  # (N,) likewise
    rows,  # four of (32, COLUMNS): every fourth row of one block; zeros behind the expert's last
    block,  # int64
    n,  # (COLUMNS,)
    stride_codes,
    N: tl.constexpr,
):
    """Quantise a tile by columns, and write it transposed."""
    tl.static_assert(rows[0].shape[0] * 4 == ALONG)
    amax = tl.zeros(rows[0].shape, tl.float32)
    for i in tl.static_range(4):
        amax = larger(amax, tl.abs(rows[i].to(tl.float32)))
    scale = scale_of(largest(amax, 0))
    row = block * (ALONG // 4) + tl.arange(0, ALONG // 4)
    store_transposed(codes_ptr, rows, tl.div_rn(1.0, scale)[None, :], row, n, stride_codes, (n < N)[None, :])
    tl.store(scales_at + n, scale, mask=n < N)


@triton.jit
def quantise_columns_tile(
    tokens_ptr,  # (T, N) read, any strides
    codes_ptr,  # (N, rows in blocks) written at the block
    scales_ptr,  # (blocks, N) fp32, likewise
    token,  # (128,) of each row of the block, int64
    live,  # (128,) whether it is a row of the block's expert: others become zeros
    block,  # int64
    n,  # (BLOCK_N,) which columns
    stride_t,
    stride_n,
    stride_codes,
    N: tl.constexpr,
):
    """Gather a block of rows, and quantise some of their columns."""
    tokens, alive = every_fourth(token), every_fourth(live)
    rows = ()
    for i in tl.static_range(4):
        at = tokens_ptr + tokens[i][:, None] * stride_t + n.to(tl.int64)[None, :] * stride_n
        rows += (tl.load(at, mask=alive[i][:, None] & (n < N)[None, :], other=0.0),)
    store_columns(codes_ptr, scales_ptr + block * N, rows, block, n, stride_codes, N)


@triton.jit
def quantise_block(
    t_ptr,  # (ROWS, COLUMNS) read; columns without a value hold zeros
    stride_t,
    codes_ptr,  # (rows in blocks, N) written at these rows; or None
    scales_at,  # (rows in blocks,) likewise
    columns_ptr,  # (N, rows in blocks) codes, likewise; or None
    columns_scales_at,  # (N,) likewise
    first_row,  # in blocks, a multiple of ROWS
    first_column,
    stride_codes,
    stride_columns,
    N: tl.constexpr,
    ROWS: tl.constexpr,  # 128, or as many as there are where no columns are wanted
    COLUMNS: tl.constexpr,
):
    """Quantise values from memory both ways, each where somebody wants it. The rows are read once, in a layout that
    suits both: a thread holds some columns of four rows side by side."""
    n = first_column + tl.arange(0, COLUMNS)
    if columns_ptr is not None:
        r = 4 * tl.arange(0, ROWS // 4)
        rows = ()
        for i in tl.static_range(4):
            rows += (tl.load(t_ptr + ((r + i) * stride_t)[:, None] + tl.arange(0, COLUMNS)[None, :]),)
        store_columns(columns_ptr, columns_scales_at, rows, first_row.to(tl.int64) // ROWS, n, stride_columns, N)
    if codes_ptr is not None:
        for start in range(0, ROWS, ROWS // 4):
            r = start + tl.arange(0, ROWS // 4)
            t = tl.load(t_ptr + (r * stride_t)[:, None] + tl.arange(0, COLUMNS)[None, :])
            codes, scale = quantise(t.to(tl.float32), 1)
            row = first_row.to(tl.int64) + r
            tl.store(codes_ptr + (row * stride_codes)[:, None] + n[None, :], codes, mask=(n < N)[None, :])
            tl.store(scales_at + row, scale)


@triton.jit
def quantise_columns_kernel(
    tokens_ptr,  # (T, N) read, any strides
    codes_ptr,  # (N, rows in blocks) written in every block that holds rows
    scales_ptr,  # (blocks, N) fp32, likewise
    token_in_blocks_ptr,  # (rows in blocks,) int32, read
    route_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    stride_t,
    stride_n,
    stride_codes,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program for each (block of rows, block of columns), columns fastest, for the most blocks of any
    routing. Rows behind an expert's last become zeros.

    Example: an expert whose one row is token 1, tokens = [[9.], [448.]]: codes = [[448., 0., 0., ...]], scale 1.
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = (tl.program_id(0) // n_blocks).to(tl.int64)
    if block < tl.load(counters_ptr):
        r = block * ALONG + tl.arange(0, ALONG)
        n = tl.program_id(0) % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        token = tl.load(token_in_blocks_ptr + r).to(tl.int64)
        live = tl.load(route_in_blocks_ptr + r) >= 0
        quantise_columns_tile(
            tokens_ptr, codes_ptr, scales_ptr, token, live, block, n, stride_t, stride_n, stride_codes, N
        )


# --8<-- [end:columns]


def quantise_rows(t: Tensor) -> Quantised:
    """t (T, N), any strides -> codes (T, N), scales (T, ceil(N / 128))."""
    T, N = t.shape
    groups = triton.cdiv(N, ALONG.value)
    to = Quantised(codes_like(t, T, N), t.new_empty(T, groups, dtype=torch.float32), t.dtype)
    tile = fp8_tiles().quantise
    if T:
        quantise_rows_kernel[(triton.cdiv(T, tile.BLOCK_R) * groups,)](
            t,
            to.codes,
            to.scales,
            T,
            *t.stride(),
            to.codes.stride(0),
            N=N,
            BLOCK_R=tile.BLOCK_R,
            num_warps=tile.num_warps,
        )
    return to


def quantise_weights(w: Tensor, codes: bool = True, transposed: bool = False) -> QuantisedWeights:
    """w (E, N, C) or (E, 2, N, C), any strides -> its codes, as they lie, transposed, or both in one pass."""
    if not can_be_kept(w):
        return make_codes(w, codes, transposed)
    # What is kept for forward, of a weight that has a gradient, backward will read transposed.
    both = (codes and (transposed or w.requires_grad)) or is_kept(make_codes, w, True, True)
    return once(make_codes, w, both or codes, both or transposed)


def make_codes(w: Tensor, codes: bool, transposed: bool) -> QuantisedWeights:
    """The same, whatever is kept."""
    *matrices, N, C = w.shape
    by_part = w if w.dim() == 4 else w[:, None]
    blocks = [triton.cdiv(size, ALONG.value) for size in (N, C)]
    to = QuantisedWeights(
        codes_like(w, *matrices, N, C) if codes else None,
        codes_like(w, *matrices, C, N) if transposed else None,
        w.new_empty(*matrices, *blocks, dtype=torch.float32),
    )
    quantise_weights_kernel[(to.scales.numel(),)](
        by_part,
        *to,
        *by_part.stride(),
        to.codes.stride(-2) if codes else 0,
        to.transposed.stride(-2) if transposed else 0,
        PARTS=by_part.shape[1],
        N=N,
        C=C,
        num_warps=fp8_tiles().quantise.num_warps,
    )
    return to


def quantise_rows_in_blocks(tokens: Tensor, table: TileTable) -> Quantised:
    """tokens (T, N), any strides -> of their rows in blocks, codes (rows in blocks, N) and scales (rows in blocks,
    ceil(N / 128)). A token is quantised once, and its codes are copied to each of its rows."""
    return lay_in_blocks(quantise_rows(tokens), table)


def lay_in_blocks(q: Quantised, table: TileTable) -> Quantised:
    """Of tokens by row, codes (T, N) and scales (T, ceil(N / 128)) -> the same of their rows in blocks."""
    (T, N), groups, tile = q.codes.shape, q.scales.shape[1], fp8_tiles().copy
    to = tokens_in_blocks(N, q.dtype, len(table.row_blocks), q.codes.device)
    if T:
        lay_in_blocks_kernel[(len(table.row_blocks) * triton.cdiv(N, tile.BLOCK_N),)](
            q.codes,
            q.scales,
            to.codes,
            to.scales,
            table.token_in_blocks,
            table.route_in_blocks,
            table.counters,
            q.codes.stride(0),
            to.codes.stride(0),
            N=N,
            BLOCK_N=tile.BLOCK_N,
            GROUPS=triton.next_power_of_2(groups),
            num_warps=tile.num_warps,
        )
    return to


def quantise_columns(tokens: Tensor, table: TileTable) -> Quantised:
    """tokens (T, N), any strides -> of their rows in blocks, codes (N, rows in blocks), scales (blocks, N)."""
    N = tokens.shape[1]
    to = columns_in_blocks(N, tokens.dtype, table)
    tile = fp8_tiles().quantise
    if len(tokens):
        quantise_columns_kernel[(len(to.scales) * triton.cdiv(N, tile.BLOCK_N),)](
            tokens,
            to.codes,
            to.scales,
            table.token_in_blocks,
            table.route_in_blocks,
            table.counters,
            *tokens.stride(),
            to.codes.stride(0),
            N=N,
            BLOCK_N=tile.BLOCK_N,
            num_warps=tile.num_warps,
        )
    return to


def codes_like(t: Tensor, *shape: int) -> Tensor:
    """Uninitialised codes on t's device, rows padded to 16 bytes."""
    return aligned(shape, like=t.new_empty(0, dtype=torch.float8_e4m3fn))


def rows_in_blocks(parts: int, columns: int, dtype: torch.dtype, table: TileTable) -> Quantised:
    """`rows_of_blocks` for the blocks of a table."""
    return rows_of_blocks(parts, columns, dtype, len(table.row_blocks), table.row_blocks.device)


def columns_in_blocks(columns: int, dtype: torch.dtype, table: TileTable) -> Quantised:
    """`columns_of_blocks` for the blocks of a table."""
    return columns_of_blocks(columns, dtype, len(table.row_blocks), table.row_blocks.device)


def rows_of_blocks(parts: int, columns: int, dtype: torch.dtype, blocks: int, device: torch.device) -> Quantised:
    """Uninitialised: codes (parts, rows in blocks, columns) and their scales, (parts * ceil(columns / 128), rows in
    blocks), so that a kernel loads those of a block of rows side by side."""
    rows, groups = blocks * ALONG.value, triton.cdiv(columns, ALONG.value)
    scales = torch.empty(parts * groups, rows, dtype=torch.float32, device=device)
    return Quantised(codes_like(scales, parts, rows, columns), scales, dtype)


def tokens_in_blocks(columns: int, dtype: torch.dtype, blocks: int, device: torch.device) -> Quantised:
    """Uninitialised: codes (rows in blocks, columns) and their scales, (rows in blocks, ceil(columns / 128)), a row's
    side by side, as tokens lie that are not in blocks."""
    rows = blocks * ALONG.value
    scales = torch.empty(rows, triton.cdiv(columns, ALONG.value), dtype=torch.float32, device=device)
    return Quantised(codes_like(scales, rows, columns), scales, dtype)


def columns_of_blocks(columns: int, dtype: torch.dtype, blocks: int, device: torch.device) -> Quantised:
    """Uninitialised: codes (columns, rows in blocks) and their scales, (blocks, columns)."""
    scales = torch.empty(blocks, columns, dtype=torch.float32, device=device)
    return Quantised(codes_like(scales, columns, blocks * ALONG.value), scales, dtype)
