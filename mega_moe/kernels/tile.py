"""Tile maths that kernels share: which rows a tile holds, and arithmetic that is right on a GPU and in the interpreter.

Triton's interpreter, which runs these kernels on a CPU with numpy, multiplies bf16 wrongly and truncates where a GPU
rounds. `dot` and `narrow` are the two places that know this; kernels call them and stay free of it.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels defined from here on run in Triton's interpreter: TRITON_INTERPRET=1 at the time of this import."""


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in fp32. fp32 operands are multiplied as IEEE fp32, never as TF32.

    a: (M, C), b: (C, N), acc: (M, N) fp32.
    """
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """fp32 value rounded to nearest even in dtype, as a GPU's conversion does."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # ties to even, then nothing is left to truncate
        value = tl.where(value == value, rounded.to(tl.float32, bitcast=True), value)  # NaN has no neighbour
    return value.to(dtype)


# --8<-- [start:rows_of_block]
@triton.jit
def rows_of_block(block, row_start_ptr, E, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):
    """Which expert a block of rows belongs to, its first row, and the end of the expert's rows.

    Experts own whole blocks: expert e's first block is row_start[e] // BLOCK_R + e. The + e leaves room for every
    unfilled last block before it, so R // BLOCK_R + E blocks hold any routing and no count has to reach the host. A
    block with nothing in it has row >= end.

    Example: BLOCK_R=4, row_start = [0, 5, 5, 13]: first blocks are 0, 2, 3, so
        block 0 -> (0, 0, 5)   block 1 -> (0, 4, 5)   block 2 -> (1, 5, 5), empty
        block 3 -> (2, 5, 13)  block 4 -> (2, 9, 13)  block 5 -> (2, 13, 13), empty
    """
    e = tl.arange(0, BLOCK_E)
    first_block = tl.load(row_start_ptr + e, mask=e < E, other=0) // BLOCK_R + e
    expert = tl.sum(((first_block <= block) & (e < E)).to(tl.int32)) - 1
    start = tl.load(row_start_ptr + expert)
    row = start + (block - start // BLOCK_R - expert) * BLOCK_R
    return expert, row, tl.load(row_start_ptr + expert + 1)


# --8<-- [end:rows_of_block]


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)) in fp32; 0 and 1 at the ends of the range, never NaN for a finite z."""
    return 1.0 / (1.0 + tl.exp(-z))
