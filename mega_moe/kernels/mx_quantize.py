"""Quantisation on the device: codes and exponents as reference/quantize.py's MX defines them, to the bit.

A block is 32 values along a contraction, and its scale 2^e is kept as the byte e + 127. Blocks are no squares: a tensor
that two products contract along two axes is quantised twice, weights among them. Each time it is written as its product
reads it, with the contraction contiguous:

    rows      tokens, for a contraction along their columns
    weights   for a contraction along their last axis; given as w.mT, for one along the other
    columns   an expert's rows, for a contraction over them: codes transposed

Scales lie as their codes do, a byte for each 32: those of codes (..., N, C) are (..., N, ceil(C / 32)) uint8. Blocks of
rows in a tile table have a multiple of 32 rows, so they are whole blocks of the columns' format too, and whatever makes
a tile of them (see mx_scaled.py) can quantise it either way while it is in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import launch_options, mx_tiles
from .fused_swiglu import inside
from .quantize import Quantised, codes_like, magnitude, to_e4m3
from .tile import dot
from .tile_table import TileTable
from .weights import aligned

ALONG = tl.constexpr(32)
"""How many values along a contraction share a scale."""

SMALLEST_BYTE = tl.constexpr(1)  # 2^-126: no scale is subnormal, and neither is its reciprocal
NAN_BYTE = tl.constexpr(255)

LARGEST = tl.constexpr(240 * 2.0**120)
"""The largest value that the largest scale has a finite code for: 256 * 2^120 is more than fp32 holds."""


# --8<-- [start:tile]
@triton.jit
def e8m0_scale(amax):
    """The scale of a block by its largest magnitude m * 2^k, 1 <= m < 2: e = k - 8, and one more where m > 7/4, so that
    none of its codes is beyond 448. That of NaN for a block with an infinity or NaN.

    Example: 448 = 7/4 * 2^8 has byte 127, which is 2^0; the next number above it has 128; 0 has 1.
    """
    bits = amax.to(tl.uint32, bitcast=True)
    byte = ((bits + 0x1FFFFF) >> 23).to(tl.int32) - 8  # a mantissa above that of 7/4 carries into the exponent
    return tl.where(amax < float("inf"), tl.maximum(byte, SMALLEST_BYTE), NAN_BYTE).to(tl.uint8)


@triton.jit
def power_of_two(byte):
    """2^(byte - 127) in fp32, for bytes other than 0; NaN for 255."""
    power = (byte.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    return tl.where(byte == NAN_BYTE, float("nan"), power)


@triton.jit
def reciprocal_of(byte):
    """1 / 2^(byte - 127) in fp32, for the bytes that `e8m0_scale` gives."""
    power = ((254 - byte.to(tl.int32)).to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    return tl.where(byte == NAN_BYTE, float("nan"), power)


@triton.jit
def mx_quantise(t, AXIS: tl.constexpr):
    """Codes (M, N) and scales of a tile of fp32 values (M, N), 32 of which share one along AXIS: scales (M, N / 32) for
    axis 1, (M / 32, N) for axis 0. A block with an infinity or NaN becomes NaN throughout."""
    M: tl.constexpr = t.shape[0]
    N: tl.constexpr = t.shape[1]
    WITHIN: tl.constexpr = AXIS + 1
    if AXIS == 1:
        blocks = tl.reshape(t, (M, N // ALONG, ALONG))
    else:
        blocks = tl.reshape(t, (M // ALONG, ALONG, N))
    byte = e8m0_scale(tl.max(magnitude(blocks), WITHIN))
    blocks = tl.minimum(tl.maximum(blocks, -LARGEST), LARGEST)
    codes = to_e4m3(blocks * tl.expand_dims(reciprocal_of(byte), WITHIN))
    return tl.reshape(codes, (M, N)), byte


@triton.jit
def load_scales(at, live, start, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """The scales of a tile's rows, for BLOCK_C columns from `start` on; at: where those of column 0 stand. They are 2^0
    beyond column C and in rows that are not live (None: all are), where codes are zeros."""
    block = tl.arange(0, BLOCK_C // ALONG) + start // ALONG
    mask = inside(live, block, (C + ALONG - 1) // ALONG, C % BLOCK_C == 0)
    at = at[:, None] + block[None, :]
    if mask is None:
        scales = tl.load(at)
    else:
        scales = tl.load(at, mask=mask, other=127)
    return scales


@triton.jit
def values_of(codes, scales):
    """What codes (M, C) and scales (M, C / 32) stand for, in bf16. It holds them all, but for what is below 2^-133: a
    scale moves a code's exponent, and leaves its 4 bits."""
    M: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1]
    blocks = tl.reshape(codes.to(tl.float32), (M, C // ALONG, ALONG)) * power_of_two(scales)[:, :, None]
    return tl.reshape(blocks.to(tl.bfloat16), (M, C))


@triton.jit
def dot_scaled(a, a_scales, b, b_scales, acc, NATIVE: tl.constexpr):
    """acc + a @ b^T of codes a (M, C) and b (N, C) with scales (M, C / 32) and (N, C / 32), in fp32.

    NATIVE where one instruction multiplies codes and their scales. Elsewhere, and in the interpreter, which has none
    either, the same values are multiplied in bf16.
    """
    if NATIVE:
        acc = tl.dot_scaled(a, a_scales, "e4m3", b.T, b_scales, "e4m3", acc)
    else:
        acc = dot(values_of(a, a_scales), values_of(b, b_scales).T, acc)
    return acc


# --8<-- [end:tile]


# --8<-- [start:rows]
@triton.jit
def mx_store_rows(
    codes_at,  # (M,) where each row of codes begins
    scales_at,  # (M,) where each row of scales begins
    t,  # (M, COLUMNS) fp32; zeros beyond column N
    live,  # (M,) which rows are written; None: all of them
    first,  # of the columns; a multiple of 32
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,  # whether all columns of every tile are below N
):
    """Quantise a tile by rows, and write it."""
    codes, scales = mx_quantise(t, 1)
    n, block = tl.arange(0, COLUMNS) + first, tl.arange(0, COLUMNS // ALONG) + first // ALONG
    mask = inside(live, n, N, FULL)
    tl.store(codes_at[:, None] + n[None, :], codes, mask=mask)
    mask = inside(live, block, (N + ALONG - 1) // ALONG, FULL)
    tl.store(scales_at[:, None] + block[None, :], scales, mask=mask)


@triton.jit(do_not_specialize=["T"])
def mx_quantise_rows_kernel(
    t_ptr,  # (T, N) read, any strides
    codes_ptr,  # (T, N) written, unit last stride
    scales_ptr,  # (T, ceil(N / 32)) written, unit last stride
    T,
    stride_t,
    stride_n,
    stride_codes,
    stride_scales,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program for each (block of rows, block of columns), columns fastest.

    Example: a row [2., -448.] has byte 127 and codes [2., -448.]; [1., 0.] has byte 119, 2^-8, and codes [256., 0.].
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    row = (tl.program_id(0) // n_blocks * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    first = tl.program_id(0) % n_blocks * BLOCK_N
    n = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask = (row < T)[:, None] & (n < N)[None, :]

    t = tl.load(t_ptr + row[:, None] * stride_t + n[None, :] * stride_n, mask=mask, other=0.0).to(tl.float32)
    mx_store_rows(
        codes_ptr + row * stride_codes,
        scales_ptr + row * stride_scales,
        t,
        row < T,
        first,
        N,
        BLOCK_N,
        N % BLOCK_N == 0,
    )


# --8<-- [end:rows]


# --8<-- [start:weights]
@triton.jit
def mx_quantise_weights_kernel(
    w_ptr,  # (E, PARTS, N, C) read, any strides
    codes_ptr,  # (E, PARTS, N, C) written, unit last stride
    scales_ptr,  # (E, PARTS, N, ceil(C / 32)) written, unit last stride
    stride_e,
    stride_part,
    stride_n,
    stride_c,
    stride_codes,
    stride_scales,
    PARTS: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program for each (matrix, block of BLOCK_R rows, block of BLOCK_N columns), columns fastest.

    Example: w = [[[[2., -448.], [1., 0.]]]]: scales [[[[127], [119]]]], codes [[[[2., -448.], [256., 0.]]]].
    """
    n_blocks: tl.constexpr = (N + BLOCK_R - 1) // BLOCK_R
    c_blocks: tl.constexpr = (C + BLOCK_N - 1) // BLOCK_N
    matrix = (tl.program_id(0) // (n_blocks * c_blocks)).to(tl.int64)
    n = (tl.program_id(0) // c_blocks % n_blocks * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    first = tl.program_id(0) % c_blocks * BLOCK_N
    c = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
    mask = (n < N)[:, None] & (c < C)[None, :]

    at = w_ptr + matrix // PARTS * stride_e + matrix % PARTS * stride_part
    w = tl.load(at + n[:, None] * stride_n + c[None, :] * stride_c, mask=mask, other=0.0).to(tl.float32)
    row = matrix * N + n
    mx_store_rows(
        codes_ptr + row * stride_codes, scales_ptr + row * stride_scales, w, n < N, first, C, BLOCK_N, C % BLOCK_N == 0
    )


# --8<-- [end:weights]


# --8<-- [start:columns]
@triton.jit
def mx_store_columns(
    codes_at,  # where the tile's first row stands in column 0, (N, rows in blocks) behind it
    scales_at,  # where its scale stands in column 0, (N, rows in blocks / 32) behind it
    t,  # (ROWS, COLUMNS) fp32: rows of one expert, from the first of a block of 32 on; zeros behind its last
    n,  # (COLUMNS,)
    stride_codes,
    stride_scales,
    N: tl.constexpr,
):
    """Quantise a tile by columns, and write it transposed."""
    ROWS: tl.constexpr = t.shape[0]
    codes, scales = mx_quantise(t, 0)
    n, mask = n.to(tl.int64), (n < N)[None, :]
    tl.store(codes_at + n[None, :] * stride_codes + tl.arange(0, ROWS)[:, None], codes, mask=mask)
    tl.store(scales_at + n[None, :] * stride_scales + tl.arange(0, ROWS // ALONG)[:, None], scales, mask=mask)


@triton.jit
def mx_quantise_columns_kernel(
    tokens_ptr,  # (T, N) read, any strides
    codes_ptr,  # (N, rows in blocks) written in every block that holds rows
    scales_ptr,  # (N, rows in blocks / 32) likewise
    token_in_blocks_ptr,  # (rows in blocks,) int32, read
    route_in_blocks_ptr,  # (rows in blocks,) int32, read
    counters_ptr,  # int32, read: the number of blocks that hold rows
    stride_t,
    stride_n,
    stride_codes,
    stride_scales,
    N: tl.constexpr,
    ROWS_OF_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid: one program for each (block of rows, block of columns), columns fastest, for the most blocks of any
    routing. Rows behind an expert's last become zeros.

    Example: an expert whose one row is token 1, tokens = [[9.], [448.]]: codes = [[448., 0., 0., ...]], scales =
    [[127, 1, ...]], one for each 32 rows of the block.
    """
    n_blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = (tl.program_id(0) // n_blocks).to(tl.int64)
    if block < tl.load(counters_ptr):
        r = block * ROWS_OF_BLOCK + tl.arange(0, ROWS_OF_BLOCK)
        n = tl.program_id(0) % n_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        token = tl.load(token_in_blocks_ptr + r).to(tl.int64)
        live = tl.load(route_in_blocks_ptr + r) >= 0

        at = tokens_ptr + token[:, None] * stride_t + n.to(tl.int64)[None, :] * stride_n
        t = tl.load(at, mask=live[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        codes_at, scales_at = codes_ptr + block * ROWS_OF_BLOCK, scales_ptr + block * (ROWS_OF_BLOCK // ALONG)
        mx_store_columns(codes_at, scales_at, t, n, stride_codes, stride_scales, N)


# --8<-- [end:columns]


def quantise_rows(t: Tensor) -> Quantised:
    """t (T, N), any strides -> codes (T, N), scales (T, ceil(N / 32))."""
    T, N = t.shape
    to, tile = quantised_like(t, T, N), mx_tiles().quantise
    if T:
        mx_quantise_rows_kernel[(triton.cdiv(T, tile.BLOCK_R) * triton.cdiv(N, tile.BLOCK_N),)](
            t,
            to.codes,
            to.scales,
            T,
            *t.stride(),
            to.codes.stride(0),
            to.scales.stride(0),
            N=N,
            **launch_options(tile),
        )
    return to


def quantise_weights(w: Tensor) -> Quantised:
    """w (E, N, C) or (E, 2, N, C), any strides -> codes (..., N, C), scales (..., N, ceil(C / 32))."""
    *matrices, N, C = w.shape
    by_part = w if w.dim() == 4 else w[:, None]
    to, tile = quantised_like(w, *matrices, N, C), mx_tiles().quantise
    programs = by_part.shape[0] * by_part.shape[1] * triton.cdiv(N, tile.BLOCK_R) * triton.cdiv(C, tile.BLOCK_N)
    mx_quantise_weights_kernel[(programs,)](
        by_part,
        to.codes,
        to.scales,
        *by_part.stride(),
        to.codes.stride(-2),
        to.scales.stride(-2),
        PARTS=by_part.shape[1],
        N=N,
        C=C,
        **launch_options(tile),
    )
    return to


def quantise_transposed(w: Tensor) -> Quantised:
    """w (E, N, C) or (E, 2, N, C), any strides -> codes (..., C, N), scales (..., C, ceil(N / 32))."""
    return quantise_weights(w.mT)


def quantise_columns(tokens: Tensor, table: TileTable) -> Quantised:
    """tokens (T, N), any strides -> of their rows in blocks, codes (N, rows in blocks), scales (N, those rows / 32)."""
    N = tokens.shape[1]
    to, tile = columns_in_blocks(N, tokens.dtype, table), mx_tiles().quantise
    if len(tokens):
        mx_quantise_columns_kernel[(len(table.row_blocks) * triton.cdiv(N, tile.BLOCK_N),)](
            tokens,
            to.codes,
            to.scales,
            table.token_in_blocks,
            table.route_in_blocks,
            table.counters,
            *tokens.stride(),
            to.codes.stride(0),
            to.scales.stride(0),
            N=N,
            ROWS_OF_BLOCK=table.tiles.BLOCK_R,
            BLOCK_N=tile.BLOCK_N,
            num_warps=tile.num_warps,
        )
    return to


def rows_in_blocks(parts: int, columns: int, dtype: torch.dtype, table: TileTable) -> Quantised:
    """Uninitialised: codes (parts, rows in blocks, columns), scales (parts, rows in blocks, ceil(columns / 32))."""
    return quantised_like(table.row_blocks, parts, len(table.token_in_blocks), columns)._replace(dtype=dtype)


def columns_in_blocks(columns: int, dtype: torch.dtype, table: TileTable) -> Quantised:
    """Uninitialised: codes (columns, rows in blocks), scales (columns, rows in blocks / 32)."""
    return quantised_like(table.row_blocks, columns, len(table.token_in_blocks))._replace(dtype=dtype)


def quantised_like(t: Tensor, *shape: int) -> Quantised:
    """Uninitialised, on t's device and of its dtype: codes of this shape and a byte for each 32 of a row; rows of both
    padded to 16 bytes."""
    *outer, columns = shape
    scales = aligned((*outer, triton.cdiv(columns, ALONG.value)), like=t.new_empty(0, dtype=torch.uint8))
    return Quantised(codes_like(t, *shape), scales, t.dtype)
