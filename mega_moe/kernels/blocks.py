"""Block sizes: how large a tile each kernel works on, for each kind of GPU.

They are measured, not searched for at run time: a search would make the first call slow, and its choice (and with it
the last bit of every sum) would differ from run to run. A GPU that is not in the table gets the portable sizes, and
`note` says so.

The tiles of resident programs depend on the layer too: blocks.json holds those that `mega-moe tune` measured, each with
where, when and on which layer.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from math import log2
from pathlib import Path

import torch
import triton

from ..shapes import Problem
from .tile import INTERPRETED


@dataclass(frozen=True)
class Rows:
    """A tile of a grouped GEMM over rows: BLOCK_R rows of one expert by BLOCK_N columns, BLOCK_C deep a step."""

    BLOCK_R: int
    BLOCK_N: int
    BLOCK_C: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Dact(Rows):
    """A tile of dact, whose epilogue works on CHUNK columns at a time."""

    CHUNK: int


@dataclass(frozen=True)
class WeightGrad:
    """A tile of a weight gradient: BLOCK_M by BLOCK_N of one expert's matrix, BLOCK_R rows deep a step."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_R: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Elementwise:
    """A tile of a kernel that moves or maps rows: BLOCK_R rows (or tokens) by BLOCK_N columns."""

    BLOCK_R: int
    BLOCK_N: int
    num_warps: int


@dataclass(frozen=True)
class Routes:
    """What a step of the plan's kernels does: count BLOCK routes, rank BLOCK_RANK, add up COUNTS counts. A chunk is one
    block, or more where that would be more than MOST_CHUNKS chunks."""

    BLOCK: int
    BLOCK_RANK: int
    COUNTS: int
    MOST_CHUNKS: int
    num_warps: int


@dataclass(frozen=True)
class Resident:
    """How many programs of a persistent kernel share a processor, where small ones hide each other's epilogues; how
    many registers each of their threads may then take, which the compiler would choose without knowing of the others;
    and how many processors are left to others."""

    per_processor: int = field(default=1, kw_only=True)
    maxnreg: int | None = field(default=None, kw_only=True)
    reserved: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class Strips(Resident):
    """What a resident program does with one ticket: STRIP tiles side by side of one block of rows, each BLOCK_N columns
    wide and BLOCK_C deep a step. With FLATTEN the steps of all of them are one loop, so that the loads of a tile begin
    under the epilogue of the one before."""

    BLOCK_N: int
    BLOCK_C: int
    STRIP: int
    FLATTEN: bool
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class GateUpStrips(Strips):
    """Strips of gate_up. A block that holds no more than SHORT rows is multiplied as one of SHORT rows, which has fewer
    that pad it; None: no block is."""

    SHORT: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class DactStrips(Strips):
    """Strips of dact, whose epilogue works on CHUNK columns at a time."""

    CHUNK: int


@dataclass(frozen=True)
class ResidentWeightGrad(Resident, WeightGrad):
    """What a resident program does with one ticket: a tile of a weight gradient."""


@dataclass(frozen=True)
class CodeStrips(Resident):
    """What a resident program does with one ticket where it multiplies codes: STRIP tiles side by side of one block of
    rows, each BLOCK_N columns wide and BLOCK_C deep a step. ROWS by COLUMNS of a tile are multiplied at once: their sum
    of one step stands in registers beside all that the tile has summed up."""

    BLOCK_N: int
    BLOCK_C: int
    ROWS: int
    COLUMNS: int
    STRIP: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class CodeChunks(CodeStrips):
    """Strips of gate_up or dact, whose epilogues work on CHUNK columns at a time."""

    CHUNK: int


@dataclass(frozen=True)
class CodeWeightGrad(ResidentWeightGrad):
    """A tile of a weight gradient of codes, of which ROWS by COLUMNS are multiplied at once."""

    ROWS: int
    COLUMNS: int


@dataclass(frozen=True)
class Persistent:
    """The tiles of resident programs. All kernels over rows cut them into the same blocks of BLOCK_R."""

    BLOCK_R: int
    gate_up: GateUpStrips
    down: Strips
    dact: DactStrips
    dx: Strips
    dw_down: ResidentWeightGrad
    dw_gate_up: ResidentWeightGrad


@dataclass(frozen=True)
class Mega(Persistent):
    """The tiles of a launch that does all steps of a direction. It has one number of warps, and one of pipeline stages
    a direction: gate_up's forward, dact's backward.

    Attributes:
        combine: a combine tile: BLOCK_R tokens, BLOCK_N columns at a time.
        pull: what a dispatch tile pulls at a time: BLOCK_R rows of its block, BLOCK_N columns.
        group: experts whose tiles of one step stand together in the schedule. The next step of a group is one group
            behind, so that it need not wait.
        group_over_ranks: the same where rows come from other ranks, at least: fewer, so that little has to arrive
            before the first tile is multiplied.
        ahead: weight-gradient tiles before the first combine tile of backward.
    """

    combine: Elementwise
    pull: Elementwise
    group: int
    group_over_ranks: int
    ahead: int


@dataclass(frozen=True)
class Warp(Mega):
    """The tiles of one launch whose warps have roles (see warp.py): of 128 rows by 256 columns, 64 deep a step, one a
    ticket, as its matrix instruction wants them. The number of warps of tiles is not used: roles have their own.

    Attributes:
        stages: steps whose operands have room in shared memory.
        consumer_registers: of each thread that multiplies.
        producer_registers: of each thread that loads.
        late: blocks of 256 columns of down that come after all others, on one rank.
    """

    stages: int
    consumer_registers: int
    producer_registers: int
    late: int


@dataclass(frozen=True)
class Fp8(Persistent):
    """The tiles of resident programs that multiply 8-bit codes (see scaled.py), and of what makes the codes. BLOCK_R,
    and what the products contract a step (BLOCK_C, of weight gradients BLOCK_R), are 128: as many as share a scale. No
    tile is larger than 128 by 128: beside the sum of a matrix instruction each has a second one in registers.

    Attributes:
        quantise: BLOCK_R rows a tile where rows are quantised, BLOCK_N columns where columns are.
        copy: a tile of what copies codes into blocks.
    """

    gate_up: CodeChunks
    down: CodeStrips
    dact: CodeChunks
    dx: CodeStrips
    dw_down: CodeWeightGrad
    dw_gate_up: CodeWeightGrad
    quantise: Elementwise
    copy: Elementwise


@dataclass(frozen=True)
class Mx(Persistent):
    """The tiles of resident programs that multiply MX codes (see mx_scaled.py), and of what makes the codes. BLOCK_R,
    and what the products contract a step, are multiples of 32: as many as share a scale.

    Attributes:
        native: whether the matrix unit takes scales beside codes; else codes become bf16 values before they are
            multiplied.
        quantise: a tile of what is quantised by rows, and BLOCK_N columns where columns are.
    """

    native: bool
    quantise: Elementwise


@dataclass(frozen=True)
class Few:
    """The tiles of a layer whose experts have few rows. Its time is that of reading weights, and of writing their
    gradients: so tiles are as narrow as matrix instructions allow, and several programs share a processor, which keeps
    more bytes on their way than one that waits for its own.

    Attributes:
        rows: of an expert, on average, up to which these are the tiles.
        persistent: of a launch a step.
        mega: of one launch.
    """

    rows: int
    persistent: Persistent
    mega: Mega


@dataclass(frozen=True)
class Blocks:
    """The block sizes of one kind of GPU for one width of dtype. few: for layers of few rows, the fewest first."""

    rows: Rows
    gate_up: Rows  # BLOCK_N columns each of gate and of up
    dact: Dact
    weight_grad: WeightGrad
    gathered_weight_grad: WeightGrad
    elementwise: Elementwise
    persistent: Persistent
    mega: Mega
    few: tuple[Few, ...] = ()


MAP = Elementwise(BLOCK_R=8, BLOCK_N=256, num_warps=4)


def persistent(BLOCK_R: int, N: int, C: int, warps: int, stages: int, chunk: int) -> Persistent:
    """Tiles of N columns (N/2 of gate and of up) for every kernel, one a ticket, and BLOCK_R by N weight gradients."""
    strips, gate_up = (of(n, C, 1, False, warps, stages) for of, n in ((Strips, N), (GateUpStrips, N // 2)))
    dw = ResidentWeightGrad(N, N // 2, C, warps, stages)
    return Persistent(BLOCK_R, gate_up, strips, DactStrips(N, C, 1, False, warps, stages, chunk), strips, dw, dw)


def mega(BLOCK_R: int, N: int, C: int, warps: int, stages: int, chunk: int, group: int = 16) -> Mega:
    """The same tiles, one a ticket, in one launch."""
    tiles = persistent(BLOCK_R, N, C, warps, stages, chunk)
    each = {f.name: getattr(tiles, f.name) for f in fields(Persistent)}
    combine, pull = Elementwise(16, 256, warps), Elementwise(32, 256, warps)
    return Mega(**each, combine=combine, pull=pull, group=group, group_over_ranks=2, ahead=132)


def few(rows: int, BLOCK_R: int, N: int, C: int, stages: int, apart: tuple[int, int, int]) -> Few:
    """Tiles of BLOCK_R rows by N columns (N/2 of gate and of up), C deep a step, all for four warps, two programs a
    processor, and N by N of weight gradients; apart: these where they have a launch of their own, M by N, and how many
    programs then share a processor."""
    strips, gate_up = (Strips(n, C, 1, False, 4, stages, per_processor=2) for n in (N, N // 2))
    dact = DactStrips(N, C, 1, False, 4, stages, CHUNK=32, per_processor=2)
    dw, (M_apart, N_apart, programs_apart) = ResidentWeightGrad(N, N, BLOCK_R, 4, stages, per_processor=2), apart
    each = dict(BLOCK_R=BLOCK_R, gate_up=gate_up, down=strips, dact=dact, dx=strips, dw_down=dw, dw_gate_up=dw)
    # A token's sum in few steps, for one program may have it all to do; and all experts in one group.
    combine, pull = Elementwise(1, 1024, 4), Elementwise(16, 256, 4)
    one = Mega(**each, combine=combine, pull=pull, group=128, group_over_ranks=2, ahead=264)
    dw = ResidentWeightGrad(M_apart, N_apart, BLOCK_R, 4, stages, per_processor=programs_apart)
    return Few(rows, Persistent(**each | dict(dw_down=dw, dw_gate_up=dw)), one)


def fp8(
    rows: int, columns: int, warps: int, stages: int, chunk: int, quantise: Elementwise, per_processor: int = 1
) -> Fp8:
    """Tiles of 128 by 128, one a ticket, of which rows by columns are multiplied at once."""
    strips = CodeStrips(128, 128, rows, columns, 1, warps, stages, per_processor=per_processor)
    chunks = CodeChunks(128, 128, rows, columns, 1, warps, stages, chunk, per_processor=per_processor)
    dw = CodeWeightGrad(128, 128, 128, warps, stages, rows, columns, per_processor=per_processor)
    return Fp8(128, chunks, strips, chunks, strips, dw, dw, quantise, copy=Elementwise(128, 512, quantise.num_warps))


def mx(BLOCK_R: int, N: int, C: int, warps: int, stages: int, chunk: int, native: bool, quantise: Elementwise) -> Mx:
    """Tiles of persistent's kind for MX codes."""
    tiles = persistent(BLOCK_R, N, C, warps, stages, chunk)
    return Mx(**{f.name: getattr(tiles, f.name) for f in fields(Persistent)}, native=native, quantise=quantise)


# fp32 is multiplied as IEEE fp32, without TF32's matrix instructions: it is for checking, and its tiles are small.
FP32 = Blocks(
    rows=Rows(64, 64, 32, 8, 2),
    gate_up=Rows(64, 32, 32, 8, 2),
    dact=Dact(64, 64, 32, 8, 2, CHUNK=16),
    weight_grad=WeightGrad(64, 64, 32, 8, 2),
    gathered_weight_grad=WeightGrad(64, 64, 32, 8, 2),
    elementwise=Elementwise(8, 128, 4),
    persistent=persistent(BLOCK_R=64, N=64, C=32, warps=8, stages=2, chunk=32),
    mega=mega(BLOCK_R=64, N=64, C=32, warps=8, stages=2, chunk=32),
)

HALF = {  # bf16 and fp16
    "sm_90": Blocks(
        rows=Rows(128, 256, 64, 8, 4),
        gate_up=Rows(128, 128, 64, 8, 4),
        dact=Dact(128, 256, 64, 8, 4, CHUNK=32),
        weight_grad=WeightGrad(128, 256, 64, 8, 4),
        # Tokens' numbers are loaded on the way: of six stages three are left for the tiles.
        gathered_weight_grad=WeightGrad(256, 128, 64, 8, 6),
        elementwise=MAP,
        persistent=Persistent(
            BLOCK_R=128,
            gate_up=GateUpStrips(128, 64, 1, False, 8, 4, SHORT=64),
            down=Strips(256, 64, 4, True, 8, 4),
            dact=DactStrips(256, 64, 1, True, 8, 4, CHUNK=32),
            dx=Strips(256, 64, 2, True, 8, 4),
            dw_down=ResidentWeightGrad(256, 128, 64, 8, 3),
            dw_gate_up=ResidentWeightGrad(256, 128, 64, 8, 3),
        ),
        mega=Mega(
            BLOCK_R=128,
            gate_up=Strips(128, 64, 1, False, 8, 4),
            down=Strips(256, 64, 1, False, 8, 4),
            dact=DactStrips(256, 64, 1, False, 8, 3, CHUNK=32),
            dx=Strips(256, 64, 1, False, 8, 3),
            dw_down=ResidentWeightGrad(256, 128, 64, 8, 3),
            dw_gate_up=ResidentWeightGrad(256, 128, 64, 8, 3),
            combine=Elementwise(16, 256, 8),
            pull=Elementwise(32, 256, 8),
            group=16,
            group_over_ranks=2,
            ahead=132,
        ),
        # A mean of 8, for of a random routing few experts have more than 16 then; with more they would be read twice.
        few=(
            few(8, BLOCK_R=16, N=128, C=128, stages=3, apart=(64, 128, 4)),
            few(32, BLOCK_R=32, N=128, C=128, stages=3, apart=(128, 128, 2)),
        ),
    ),
    "sm_100": Blocks(
        rows=Rows(128, 256, 64, 8, 3),
        gate_up=Rows(128, 128, 64, 8, 3),
        dact=Dact(128, 256, 64, 8, 3, CHUNK=32),
        weight_grad=WeightGrad(128, 256, 64, 8, 3),
        gathered_weight_grad=WeightGrad(256, 128, 64, 8, 3),
        elementwise=MAP,
        persistent=persistent(BLOCK_R=128, N=256, C=64, warps=8, stages=3, chunk=32),
        mega=mega(BLOCK_R=128, N=128, C=64, warps=8, stages=3, chunk=32),
    ),
    "portable": Blocks(
        rows=Rows(64, 128, 32, 4, 3),
        gate_up=Rows(64, 64, 32, 4, 3),
        dact=Dact(64, 128, 32, 4, 3, CHUNK=32),
        weight_grad=WeightGrad(64, 128, 32, 4, 3),
        gathered_weight_grad=WeightGrad(128, 64, 32, 4, 3),
        elementwise=MAP,
        persistent=persistent(BLOCK_R=64, N=128, C=32, warps=4, stages=3, chunk=32),
        mega=mega(BLOCK_R=64, N=128, C=32, warps=4, stages=3, chunk=32),
    ),
}
HALF["gfx942"] = HALF["gfx950"] = Blocks(
    rows=Rows(128, 128, 64, 8, 2),
    gate_up=Rows(128, 64, 64, 8, 2),
    dact=Dact(128, 128, 64, 8, 2, CHUNK=32),
    weight_grad=WeightGrad(128, 128, 64, 8, 2),
    gathered_weight_grad=WeightGrad(128, 128, 64, 8, 2),
    elementwise=MAP,
    persistent=persistent(BLOCK_R=128, N=128, C=64, warps=8, stages=2, chunk=32),
    mega=mega(BLOCK_R=128, N=128, C=32, warps=8, stages=2, chunk=32),
)

MEASURED = ("sm_90",)  # on an H200; the others satisfy the compiler (no spills, shared memory fits) and await their GPU

# A tile costs the interpreter milliseconds whatever its size: few wide tiles, yet narrow enough that the tests' layers
# have tails and more than one block a side.
INTERPRETER = Blocks(
    rows=Rows(32, 64, 64, 1, 1),
    gate_up=Rows(32, 32, 64, 1, 1),
    dact=Dact(32, 64, 64, 1, 1, CHUNK=32),
    weight_grad=WeightGrad(64, 64, 32, 1, 1),
    gathered_weight_grad=WeightGrad(64, 64, 32, 1, 1),
    elementwise=Elementwise(BLOCK_R=64, BLOCK_N=64, num_warps=1),
    persistent=Persistent(
        BLOCK_R=32,
        gate_up=GateUpStrips(32, 64, 2, True, 1, 1, SHORT=16),
        down=Strips(64, 64, 2, True, 1, 1),
        dact=DactStrips(64, 64, 1, False, 1, 1, CHUNK=32),
        dx=Strips(64, 64, 1, False, 1, 1),
        dw_down=ResidentWeightGrad(64, 64, 32, 1, 1),
        dw_gate_up=ResidentWeightGrad(64, 64, 32, 1, 1),
    ),
    mega=Mega(
        BLOCK_R=32,
        gate_up=Strips(32, 64, 2, False, 1, 1),
        down=Strips(64, 64, 2, False, 1, 1),
        dact=DactStrips(64, 64, 1, False, 1, 1, CHUNK=32),
        dx=Strips(64, 64, 1, False, 1, 1),
        dw_down=ResidentWeightGrad(64, 64, 32, 1, 1),
        dw_gate_up=ResidentWeightGrad(64, 64, 32, 1, 1),
        combine=Elementwise(16, 64, 1),
        pull=Elementwise(32, 64, 1),
        group=2,
        group_over_ranks=2,
        ahead=3,
    ),
)


FP8 = {  # whatever the dtype of what is quantised
    # Two programs a processor, of one warpgroup each: while one multiplies, the other adds its sums to its own.
    "sm_90": Fp8(
        BLOCK_R=128,
        gate_up=CodeChunks(128, 128, 64, 64, 1, 4, 3, CHUNK=32, per_processor=2),
        down=CodeStrips(128, 128, 64, 128, 1, 4, 3, per_processor=2),
        dact=CodeChunks(128, 128, 64, 128, 1, 4, 3, CHUNK=64, per_processor=2),
        dx=CodeStrips(128, 128, 64, 128, 1, 4, 3, per_processor=2),
        dw_down=CodeWeightGrad(128, 128, 128, 4, 3, 64, 128, per_processor=2),
        dw_gate_up=CodeWeightGrad(128, 128, 128, 4, 3, 64, 128, per_processor=2),
        quantise=Elementwise(32, 64, 8),
        copy=Elementwise(128, 512, 8),
    ),
    "sm_100": fp8(rows=128, columns=64, warps=8, stages=4, chunk=16, quantise=Elementwise(32, 64, 8)),
    "portable": fp8(rows=128, columns=128, warps=8, stages=2, chunk=16, quantise=Elementwise(32, 64, 8)),
    "interpreter": fp8(rows=64, columns=128, warps=1, stages=1, chunk=64, quantise=Elementwise(64, 128, 1)),
}

MX_MAP = Elementwise(32, 128, 4)

MX = {
    "sm_90": mx(128, 128, 64, warps=8, stages=3, chunk=32, native=False, quantise=MX_MAP),
    "sm_100": mx(128, 128, 128, warps=8, stages=4, chunk=32, native=True, quantise=MX_MAP),
    "gfx942": mx(64, 64, 64, warps=4, stages=2, chunk=32, native=False, quantise=MX_MAP),
    "gfx950": mx(64, 128, 64, warps=4, stages=2, chunk=32, native=True, quantise=MX_MAP),
    "portable": mx(64, 128, 64, warps=8, stages=2, chunk=32, native=False, quantise=MX_MAP),
    "interpreter": mx(64, 64, 64, warps=1, stages=1, chunk=32, native=False, quantise=Elementwise(64, 128, 1)),
}


def blocks_for(dtype: torch.dtype) -> Blocks:
    """The block sizes to use for this dtype on the current device."""
    name = target()
    if name == "interpreter":
        return INTERPRETER
    return blocks_of_target(name, dtype)


def routes() -> Routes:
    """The block sizes of the plan, which knows no dtype."""
    if INTERPRETED:
        return Routes(BLOCK=128, BLOCK_RANK=64, COUNTS=32, MOST_CHUNKS=5, num_warps=1)
    warps = 2 if target().startswith("gfx") else 4  # of 64 or 32 threads: 128, and each has a route to rank
    return Routes(BLOCK=1024, BLOCK_RANK=128, COUNTS=2048, MOST_CHUNKS=256, num_warps=warps)


def blocks_of_target(name: str, dtype: torch.dtype) -> Blocks:
    """The block sizes of a target by name, for instance to cross-compile for it."""
    if dtype == torch.float32:
        return FP32
    return HALF.get(name, HALF["portable"])


def persistent_for(problem: Problem) -> Persistent:
    """The tiles of resident programs for this problem on the current device: of few rows, if they are few; else those
    measured for the layer nearest to it, or the defaults where none was measured."""
    few, found = few_for(problem), measured_for(problem)
    many = found.tiles if found else blocks_for(problem.dtype).persistent
    return leaving(problem.num_reserved_sms, few.persistent if few else many)


def mega_for(problem: Problem) -> Mega:
    """The tiles of one launch for this problem on the current device."""
    few = few_for(problem)
    return leaving(problem.num_reserved_sms, few.mega if few else blocks_for(problem.dtype).mega)


def few_for(problem: Problem) -> Few | None:
    """The tiles of few rows, where experts have so few on average; None where they have more, in 8 bits, and over
    ranks, which must agree, whatever tokens each has."""
    if problem.tokens_per_rank or problem.precision != "bf16":
        return None
    return next((few for few in blocks_for(problem.dtype).few if problem.R <= few.rows * problem.E), None)


def warp_for(problem: Problem) -> Warp:
    """The tiles of one launch whose warps have roles, on sm_90: mega's, which are the same for both of its dtypes."""
    mega = {f.name: getattr(HALF["sm_90"].mega, f.name) for f in fields(Mega)} | {"combine": Elementwise(16, 512, 4)}
    return leaving(
        problem.num_reserved_sms, Warp(**mega, stages=4, consumer_registers=216, producer_registers=72, late=2)
    )


def fp8_tiles() -> Fp8:
    """The tiles of 8-bit codes on the current device."""
    return FP8.get(target(), FP8["portable"])


def fp8_for(problem: Problem) -> Fp8:
    """The same for this problem."""
    return leaving(problem.num_reserved_sms, fp8_tiles())


def mx_tiles() -> Mx:
    """The tiles of MX codes on the current device."""
    return MX.get(target(), MX["portable"])


def mx_for(problem: Problem) -> Mx:
    """The same for this problem."""
    return leaving(problem.num_reserved_sms, mx_tiles())


def mega_fp8_for(problem: Problem) -> Mega:
    """The tiles of one launch that multiplies 8-bit codes: those of codes, in the order of mega's, one a ticket, all
    for the same number of warps, and cut into parts as those of gate_up, which leave the most registers. In fp8_bwd
    backward makes pre again as forward made it, without codes and in mega's steps; its tile is as much narrower as
    there are fewer warps. No size here changes a sum."""
    mega, codes = blocks_for(problem.dtype).mega, fp8_tiles()
    tiles, parts = {f.name: getattr(codes, f.name) for f in fields(Persistent)}, codes.gate_up
    for name, tile in tiles.items():
        if isinstance(tile, CodeStrips):
            tiles[name] = replace(tile, STRIP=1, COLUMNS=parts.COLUMNS)
        elif isinstance(tile, CodeWeightGrad):
            tiles[name] = replace(tile, COLUMNS=parts.COLUMNS)
    tiles["dact"] = replace(tiles["dact"], CHUNK=parts.CHUNK)
    if problem.precision == "fp8_bwd":
        gate_up, warps = mega.gate_up, codes.dact.num_warps
        columns = gate_up.BLOCK_N * warps // gate_up.num_warps
        tiles["gate_up"] = replace(gate_up, BLOCK_N=columns, num_warps=warps)
    return leaving(problem.num_reserved_sms, replace(mega, **tiles))


def leaving(reserved: int, tiles: Persistent) -> Persistent:
    """The same tiles, for programs that leave so many processors to others."""
    if not reserved:
        return tiles
    resident = {f.name: getattr(tiles, f.name) for f in fields(tiles) if isinstance(getattr(tiles, f.name), Resident)}
    return replace(tiles, **{name: replace(tile, reserved=reserved) for name, tile in resident.items()})


TABLE = Path(__file__).with_name("blocks.json")


@dataclass(frozen=True)
class Measured:
    """Tiles of resident programs, and the sizes of the layer on which they were the fastest."""

    H: int
    I: int
    tiles: Persistent


def measured_for(problem: Problem) -> Measured | None:
    """The measurement nearest to this problem; None in fp32, in the interpreter, and where there is none."""
    name = target()
    if name == "interpreter" or problem.dtype.itemsize != 2:
        return None
    return nearest(name, problem.H, problem.I)


@cache
def table() -> list[dict]:
    """The entries of blocks.json."""
    return json.loads(TABLE.read_text())


@cache
def nearest(name: str, H: int, I: int) -> Measured | None:
    """This target's entry with the smallest distance in log2 H + log2 I; of two as near, that of the smaller layer."""
    entries = [entry for entry in table() if entry["target"] == name]
    distance = lambda entry: abs(log2(entry["H"] / H)) + abs(log2(entry["I"] / I))
    found = min(entries, key=lambda entry: (distance(entry), entry["H"], entry["I"]), default=None)
    return Measured(found["H"], found["I"], tiles_of(found["tiles"])) if found else None


def tiles_of(sizes: dict) -> Persistent:
    """The inverse of `sizes_of`."""
    tiles = {f.name: f.type(**sizes[f.name]) for f in fields(Persistent) if f.name != "BLOCK_R"}
    return Persistent(sizes["BLOCK_R"], **tiles)


def sizes_of(tiles: Persistent | Resident) -> dict:
    """What was measured of tiles: all but how many processors a call leaves to others."""
    measured = lambda pairs: {name: size for name, size in pairs if name != "reserved" and size is not None}
    return asdict(tiles, dict_factory=measured)


def programs(tile: Resident) -> int:
    """How many resident programs a persistent kernel starts: as many as the processors hold at once that are not left
    to others."""
    if INTERPRETED:
        return max(3 - tile.reserved, 1)
    driver = triton.runtime.driver.active
    return (processors(driver.get_current_device()) - tile.reserved) * tile.per_processor


@cache
def processors(device: int | str) -> int:
    """A GPU's processors. Asked once, for the driver takes a millisecond to answer."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["multiprocessor_count"]


def why_not(problem: Problem) -> str | None:
    """Why resident programs cannot leave so many processors to others; None if they can."""
    there = None if INTERPRETED else processors(triton.runtime.driver.active.get_current_device())
    if there is None or problem.num_reserved_sms < there:
        return None
    return f"num_reserved_sms={problem.num_reserved_sms} leaves none of the GPU's {there} processors: reserve fewer."


def why_not_fp8() -> str | None:
    """Why the current device has no use for e4m3 codes; None if it has."""
    name = target()
    kind, _, number = name.partition("_")
    if name == "interpreter" or (kind == "sm" and int(number) >= 90):
        return None
    reasons = {
        "gfx942": "has another e4m3 than the one of the layer's codes (e4m3fnuz)",
        "gfx950": "has no block sizes with which products of codes fit its registers",
    }
    reason = reasons.get(name, "is older than sm_90, for which products of codes are written")
    return f'{name} {reason}: use precision="bf16".'


def why_not_mx() -> str | None:
    """Why kernels for MX codes do not compile for the current device; None if they do."""
    name = target()
    kind, _, number = name.partition("_")
    if name in MX or (kind == "sm" and int(number) >= 90):
        return None
    reason = "is older than sm_90" if kind == "sm" else "is neither gfx942 nor gfx950"
    return f'{name} {reason}, for which products of MX codes are written: use precision="bf16".'


def target() -> str:
    """What kernels are compiled for: "interpreter", "sm_90", "gfx942", ..."""
    if INTERPRETED:
        return "interpreter"
    arch = triton.runtime.driver.active.get_current_target().arch
    return f"sm_{arch}" if isinstance(arch, int) else arch.split(":")[0]


def note() -> str | None:
    """What is slower than it should be about the block sizes here, if anything."""
    name = target()
    if name == "interpreter":
        return "runs in Triton's interpreter: right, and many thousand times slower than a GPU"
    if name not in MEASURED:
        return f"block sizes are chosen for {name if name in HALF else 'any GPU'}, but were not measured on {name}"
    return None


def fp8_note() -> str | None:
    """The same of the tiles of 8-bit codes."""
    name = target()
    if name == "sm_90":
        return "8 bits are hardly faster than bf16 yet: on an H200 to make them takes most of what the products save"
    return note() if name == "interpreter" else f"block sizes of 8-bit codes are chosen, but not measured on {name}"


def mx_note() -> str | None:
    """The same of the tiles of MX codes; and whether the GPU has no instruction for them."""
    name = target()
    if name == "interpreter":
        return note()
    unmeasured = f"block sizes of MX codes are chosen, but not measured on {name}"
    if mx_tiles().native:
        return unmeasured
    return (
        f"{name} has no instruction for MX codes, as sm_100 and gfx950 have: they become bf16 values before a product, "
        f'work that precision="bf16" does not have; {unmeasured}'
    )


def persistent_note(problem: Problem) -> str | None:
    """The same of the tiles of resident programs for this problem."""
    found = measured_for(problem)
    if found is None or few_for(problem):
        return note()
    if (found.H, found.I) == (problem.H, problem.I):
        return None
    return f"block sizes are those measured for H={found.H}, I={found.I}: `mega-moe tune` measures them for this layer"


@cache
def launch_options(tile: Rows | WeightGrad | Elementwise | Strips) -> dict[str, int]:
    """A tile as keyword arguments of a kernel launch. Kept: to make them takes longer than the rest of a launcher."""
    said = {name: size for name, size in asdict(tile).items() if name not in ("per_processor", "reserved")}
    return {name: size for name, size in said.items() if size is not None}
