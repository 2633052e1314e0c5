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

    Without matrix instructions an entry's products are added one after another, and a long chain of fp32 additions
    loses a bit or two to a library that splits it. So fp32, which is here for checking, sums a block's products in
    float64 (where they are exact) and rounds once a block.
    """
    if a.dtype == tl.float32:
        acc += tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64).to(tl.float32)
    elif INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """fp32 value rounded to nearest even in dtype, as a GPU's conversion does."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # ties to even, then nothing is left to truncate
        value = tl.where(value == value, rounded.to(tl.float32, bitcast=True), value)  # NaN has no neighbour
    return value.to(dtype)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """fp32 value as narrow rounds it, still in fp32. bf16 two at a time: the instruction for one has a quarter of the
    speed, and the compiler pairs only what it packs."""
    if INTERPRETED or dtype != tl.bfloat16:
        value = narrow(value, dtype).to(tl.float32)
    else:
        value = tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xffff0000; }",
            "=r,=r,r,r",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return value


@triton.jit
def nan_if(failed, values):
    """The values; or NaN, where what they are made of did not come: nobody shall go on with it. False costs nothing."""
    return tl.where(failed, tl.cast(float("nan"), tl.float32).to(values.dtype), values)


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
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile's columns. Both stay in the registers where they are."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def tokens_of_rows(row, rows, token_of_row_ptr, ROWS: tl.constexpr):
    """The tokens of some rows from `row` on, int64. Those beyond the first `rows` repeat the last, to be loaded like
    any other. rows may be 0 or less: then the last lies before them all."""
    return tl.load(token_of_row_ptr + row + tl.minimum(tl.arange(0, ROWS), rows - 1)).to(tl.int64)


@triton.jit
def rows_at(ptr, r, stride):
    """Where each row r begins, or None for a tensor that nobody wants (ptr is None)."""
    at = None
    if ptr is not None:
        at = ptr + r.to(tl.int64) * stride
    return at


@triton.jit
def route_of_row(r, live, token_of_row_ptr, slot_of_row_ptr, K: tl.constexpr):
    """The route t*K + k that each live row serves, in int64; 0 where not live."""
    token = tl.load(token_of_row_ptr + r, mask=live, other=0).to(tl.int64)
    return token * K + tl.load(slot_of_row_ptr + r, mask=live, other=0)


@triton.jit
def weight_of_route(route, live, topk_weights_ptr, stride_t, stride_k, K: tl.constexpr):
    """The router weight of each live route t*K + k, in fp32; 0 where not live."""
    at = topk_weights_ptr + route // K * stride_t + route % K * stride_k
    return tl.load(at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def sigmoid(z, dtype: tl.constexpr):
    """s = 1 / (1 + exp(-z)) and 1 - s, for z in fp32; 0 and 1 at the ends, NaN for NaN alone.

    For bf16 and fp16 the hardware's exp2 and division are exact enough, and cost a tenth: an epilogue that computes a
    hundred million of these does not overlap with matrix products. For fp32 both come out to about the last bit:
    Rounding -z * log2(e) costs exp a relative error of |z| * 2^-24; `lost` is what the rounding (and log2(e) itself, in
    fp32) left out. The division is IEEE's: the fast one is off by two units in the last place. And 1 - s, which the
    derivative multiplies by z, keeps its bits as exp(-z) * s where s is near 1.
    """
    log2_e: tl.constexpr = 1.4426950216293335
    log2_e_rest: tl.constexpr = 1.925963033500996e-08
    ln_2: tl.constexpr = 0.6931471805599453
    t = -z * log2_e
    if dtype == tl.float32:
        lost = -(tl.fma(z, log2_e, t) + z * log2_e_rest)
        lost = tl.where(tl.abs(t) < 150.0, lost, 0.0)  # beyond, exp2 is 0 or infinite: a correction could only spoil it
        exp = tl.exp2(t) * (1.0 + lost * ln_2)
        s = tl.div_rn(1.0, 1.0 + exp)
        rest = tl.where(exp < 1.0, exp * s, 1.0 - s)
    else:
        s = 1.0 / (1.0 + tl.exp2(t))
        rest = 1.0 - s
    return s, rest
