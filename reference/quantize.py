"""Quantisation: the operands of a matrix product in 8 bits each, beside scales that blocks of them share.

An e4m3 number has a sign, 4 bits of exponent and 3 of mantissa: 8 numbers from one power of two to the next, 448 the
largest, 2^-9 the smallest above zero. That is coarse (rounding moves a value by up to 2^-4 of itself) and narrow. So a
tensor is cut into blocks, and each block is divided by a scale that brings its largest value near 448:

    value ~ code * scale of its block

One large value coarsens only its own block, which is why blocks are small. Two formats differ in block and scale:

    FP8   blocks of 128 along the contraction, for weights of 128 x 128; a scale is any fp32 number: its block's largest
          value becomes 448. DeepSeek-V3 Technical Report (arXiv:2412.19437), section 3.3.2.
    MX    blocks of 32 along the contraction; a scale is a power of two, kept as its 8-bit exponent (E8M0). OCP
          Microscaling Formats (MX) Specification v1.0. Its section 6.3 rounds the exponent of the largest value down,
          and values up to an eighth beyond 448 then saturate; here it is rounded up to where nothing does, as in Mishra
          et al. (arXiv:2506.08027).

The contraction is the axis that a product sums over, and blocks lie along it. A tensor that two products contract along
two axes is quantised twice, each time from the value itself: nothing is quantised from codes. `Format` names the cases:
rows, columns, weights.

This file is the specification. Every operation in it is one that fp32 arithmetic defines to the bit, on any device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

E4M3_MAX = 448.0
"""The largest e4m3 number, 1.75 * 2^8. There is no infinity above it: a bare cast saturates, or gives NaN."""


@dataclass(frozen=True)
class Quantised:
    """A tensor as codes and the scales of its blocks.

    Attributes:
        codes: (..., M, N) float8_e4m3fn: the logical shape, nothing is padded.
        scales: (..., blocks of rows, blocks of columns), fp32 or float8_e8m0fnu.
        block: (rows, columns) of a block; at ragged ends blocks are smaller.
        row_start: (E+1,), where blocks of rows begin anew; None: at row 0 alone. Blocks of rows are numbered through
            all experts, and an expert of n rows has ceil(n / block[0]) of them.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    row_start: Tensor | None = None

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """code * scale, in the logical shape. float64 holds the product exactly, fp32 rounds it once (and holds it
        where the scale is a power of two)."""
        scales = spread(self.scales.float(), self.codes.shape, self.block, self.row_start)
        return self.codes.to(dtype) * scales.to(dtype)


# --8<-- [start:quantise]
def quantise(
    t: Tensor, block: tuple[int, int], scale_of: Callable[[Tensor], Tensor], row_start: Tensor | None = None
) -> Quantised:
    """Cut the last two axes into blocks, find each block's scale, and round every value / scale to e4m3.

    t: (..., M, N) in any floating-point dtype. block: (rows, columns). scale_of: `fp32_scale` or `e8m0_scale`.
    row_start: (E+1,), row_start[E] = M: no block of rows reaches from one expert into the next.

    What is rounded, in order: t to fp32 (bf16 and fp16 fit exactly); the scale; its reciprocal; the reciprocal times t;
    and that, clamped to +-448, to the nearest e4m3 number, ties to even. So a value of at least 2^-6 scales is off by
    at most 2^-4 of itself, a smaller one by at most 2^-10 scales. Under a scale of 2^120, which bf16's largest numbers
    get in MX, the clamp is at 240: 256 * 2^120 is more than fp32 holds.

    A block of zeros has zero codes and a scale above zero, and comes back as zeros. A block with a NaN or an infinity
    becomes NaN throughout, codes and scale: every product that reads it is NaN, and no other block changes.

    Example: one row [1, -3, 0.2, 896, 0, 0.001] in blocks of (1, 4)
        fp32_scale    scales [2, 0.001 / 448]    codes [0.5, -1.5, 0.1015625, 448, 0, 448]
        e8m0_scale    scales [2^1, 2^-18]        codes [0.5, -1.5, 0.1015625, 448, 0, 256]
    0.2 comes back as 0.203125 from both; 0.001 as 0.001 from the first, as 256 / 2^18 = 0.0009765625 from the second.
    """
    t = t.detach().float()
    scales = scale_of(largest(t, block, row_start))
    reciprocal = spread(scales.float().reciprocal(), t.shape, block, row_start)
    limit = torch.where(reciprocal > 2.0**-120, E4M3_MAX, 240.0)
    in_range = (t * reciprocal).clamp(-limit, limit)
    codes = torch.where(reciprocal.isnan(), torch.nan, in_range)  # one NaN, whatever came in: its sign would stay
    return Quantised(codes.to(torch.float8_e4m3fn), scales, block, row_start)


def fp32_scale(amax: Tensor) -> Tensor:
    """amax / 448, which takes the largest magnitude to 448; at least 2^-126, the smallest normal number.

    amax: fp32, 0 or more, of each block. The floor is for zeros, and for blocks below 448 * 2^-126. A multiplication
    stands for the division: devices differ in how they divide by a constant.
    """
    scale = (amax * (1 / E4M3_MAX)).clamp(min=2.0**-126)
    return torch.where(amax.isfinite(), scale, torch.nan)


def e8m0_scale(amax: Tensor) -> Tensor:
    """2^e, e the smallest with amax <= 448 * 2^e, as float8_e8m0fnu: the byte e + 127. NaN is byte 255.

    amax: fp32, 0 or more, of each block. With amax = m * 2^k, 1/2 <= m < 1, and 448 = 7/8 * 2^9, e is k - 9, and one
    more where m > 7/8. At least -126, which is for zeros, and for blocks below 448 * 2^-126: the byte 0 could say -127,
    a subnormal number in fp32, and zero to those who flush them.

    Example: 448 has e = 0, byte 127; the next number above 448 has byte 128; 1 has e = -8, byte 119; 0 has byte 1.
    """
    m, k = torch.frexp(amax)
    e = (k - 9 + (m > 7 / 8)).clamp(min=-126)
    e = torch.where(amax > 0, e, -126)
    e = torch.where(amax.isfinite(), e, 128)
    return (e + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


# --8<-- [end:quantise]


# --8<-- [start:blocks]
def block_of(n: int, size: int, row_start: Tensor | None = None, device: torch.device | str = "cpu") -> Tensor:
    """The block in which each of n rows (or columns) lies: (n,) int64.

    Example: n=8, size=4
        without row_start            [0, 0, 0, 0, 1, 1, 1, 1]
        row_start = [0, 3, 3, 8]     [0, 0, 0, 1, 1, 1, 1, 2]    expert 0 has one block, expert 1 none, expert 2 two
    """
    row = torch.arange(n, device=device)
    if row_start is None:
        return row // size
    rows = row_start.diff()
    blocks = (rows + size - 1) // size
    first_block = blocks.cumsum(0) - blocks
    expert = torch.repeat_interleave(rows)  # of each row
    return first_block[expert] + (row - row_start[expert]) // size


def largest(t: Tensor, block: tuple[int, int], row_start: Tensor | None = None) -> Tensor:
    """The largest magnitude in each block, NaN if one is: (..., M, N) -> (..., blocks of rows, blocks of columns)."""
    of_rows = largest_along(-2, t.abs(), block_of(t.shape[-2], block[0], row_start, t.device))
    return largest_along(-1, of_rows, block_of(t.shape[-1], block[1], device=t.device))


def largest_along(dim: int, t: Tensor, block: Tensor) -> Tensor:
    """The largest value of each block along one axis. block: (n,), the block of each index, in rising order."""
    shape, as_index = list(t.shape), [1] * t.dim()
    shape[dim] = int(block[-1]) + 1 if len(block) else 0
    as_index[dim] = len(block)
    return t.new_zeros(shape).scatter_reduce(dim, block.view(as_index).expand_as(t), t, "amax")


def spread(per_block: Tensor, shape: torch.Size, block: tuple[int, int], row_start: Tensor | None = None) -> Tensor:
    """Each value gets its block's number: (..., blocks of rows, blocks of columns) -> shape (..., M, N)."""
    of_rows = per_block.index_select(-2, block_of(shape[-2], block[0], row_start, per_block.device))
    return of_rows.index_select(-1, block_of(shape[-1], block[1], device=per_block.device))


# --8<-- [end:blocks]


# --8<-- [start:formats]
@dataclass(frozen=True)
class Format:
    """What a matrix product reads its operands as. Each method returns its tensor in the same shape, rounded to what
    the format holds: quantised and dequantised, in fp32 (float64 if it was). The product of two such tensors is the one
    an 8-bit product computes, but for the order of its sum.

    Attributes:
        scale_of: `fp32_scale` or `e8m0_scale`; None: the format holds everything, and returns what it gets.
        along: values along the contraction that share a scale.
        across: rows of a weight that share it with them.
    """

    scale_of: Callable[[Tensor], Tensor] | None = None
    along: int = 1
    across: int = 1

    def rows(self, t: Tensor) -> Tensor:
        """For a contraction along the last axis of t (..., N): blocks within a row. No row sees its neighbours, so a
        token's row is the same before dispatch and after."""
        return self.rounded(t, (1, self.along))

    def columns(self, t: Tensor, row_start: Tensor) -> Tensor:
        """For a contraction over each expert's rows of t (R, ...): blocks within an expert's part of a column."""
        return self.rounded(t.flatten(1), (self.along, 1), row_start).view(t.shape)

    def weights(self, w: Tensor) -> Tensor:
        """For a contraction along the last axis of w (..., N, C); w.mT for one along the other. Where blocks are square
        both are the same values, and one copy of a weight serves forward and backward; in MX there are two copies."""
        return self.rounded(w, (self.across, self.along))

    def rounded(self, t: Tensor, block: tuple[int, int], row_start: Tensor | None = None) -> Tensor:
        """There and back again, or nothing."""
        if self.scale_of is None:
            return t
        return quantise(t, block, self.scale_of, row_start).dequantise(torch.promote_types(t.dtype, torch.float32))


AS_IS = Format()
FP8 = Format(fp32_scale, along=128, across=128)
MX = Format(e8m0_scale, along=32)


class Precision(NamedTuple):
    """What the products of each direction read."""

    forward: Format
    backward: Format


PRECISIONS = {
    "bf16": Precision(AS_IS, AS_IS),  # or fp16, fp32, float64: whatever the layer's tensors are
    "fp8": Precision(FP8, FP8),
    "fp8_bwd": Precision(AS_IS, FP8),
    "mxfp8": Precision(MX, MX),
}


def formats(precision: str) -> Precision:
    """The formats of a precision by its name. Raises ValueError, listing the names, if there is none."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: the precisions are {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


# --8<-- [end:formats]


def refuse_autograd(precision: str, *tensors: Tensor) -> None:
    """Raise RuntimeError where autograd would follow a layer in 8 bits. Rounding is a step function and ends its graph,
    so gradients would be missing; with "fp8_bwd", whose forward rounds nothing, they would be those of "bf16"."""
    if precision == "bf16":
        return
    followed = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if followed or any(unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(
            f'autograd cannot follow precision="{precision}": call forward(...) under torch.no_grad() and then '
            f'backward(saved, dy), or mega_moe.moe(..., stage="reference", precision="{precision}"), which does both'
        )
