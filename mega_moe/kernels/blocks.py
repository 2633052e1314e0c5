"""Block sizes: how large a tile each kernel works on, for each kind of GPU.

They are measured, not searched for at run time: a search would make the first call slow, and its choice (and with it
the last bit of every sum) would differ from run to run. A GPU that is not in the table gets the portable sizes, and
`note` says so.
"""

from dataclasses import asdict, dataclass

import torch
import triton

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
    """How many routes the plan looks at in one step."""

    BLOCK: int
    num_warps: int


@dataclass(frozen=True)
class Blocks:
    """The block sizes of one kind of GPU for one width of dtype."""

    rows: Rows
    weight_grad: WeightGrad
    elementwise: Elementwise


MAP = Elementwise(BLOCK_R=8, BLOCK_N=256, num_warps=4)

# fp32 is multiplied as IEEE fp32, without TF32's matrix instructions: it is for checking, and its tiles are small.
FP32 = Blocks(Rows(64, 64, 32, 8, 2), WeightGrad(64, 64, 32, 8, 2), Elementwise(8, 128, 4))

HALF = {  # bf16 and fp16
    "sm_90": Blocks(Rows(128, 256, 64, 8, 4), WeightGrad(128, 256, 64, 8, 4), MAP),
    "sm_100": Blocks(Rows(128, 256, 64, 8, 3), WeightGrad(128, 256, 64, 8, 3), MAP),
    "gfx942": Blocks(Rows(128, 128, 64, 8, 2), WeightGrad(128, 128, 64, 8, 2), MAP),
    "gfx950": Blocks(Rows(128, 128, 64, 8, 2), WeightGrad(128, 128, 64, 8, 2), MAP),
    "portable": Blocks(Rows(64, 128, 32, 4, 3), WeightGrad(64, 128, 32, 4, 3), MAP),
}

MEASURED = ("sm_90",)  # on an H200; the others satisfy the compiler (no spills, shared memory fits) and await their GPU

# A tile costs the interpreter milliseconds whatever its size: few wide tiles, yet narrow enough that the tests' layers
# have tails and more than one block a side.
INTERPRETER = Blocks(
    Rows(32, 64, 64, 1, 1), WeightGrad(64, 64, 32, 1, 1), Elementwise(BLOCK_R=64, BLOCK_N=64, num_warps=1)
)


def blocks_for(dtype: torch.dtype) -> Blocks:
    """The block sizes to use for this dtype on the current device."""
    name = target()
    if name == "interpreter":
        return INTERPRETER
    return blocks_of_target(name, dtype)


def routes() -> Routes:
    """The block size of the plan, which knows no dtype."""
    if INTERPRETED:
        return Routes(BLOCK=256, num_warps=1)
    amd = target().startswith("gfx")  # a running sum over more routes spills there
    return Routes(BLOCK=4096 if amd else 8192, num_warps=8)


def blocks_of_target(name: str, dtype: torch.dtype) -> Blocks:
    """The block sizes of a target by name, for instance to cross-compile for it."""
    if dtype == torch.float32:
        return FP32
    return HALF.get(name, HALF["portable"])


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


def launch_options(tile: Rows | WeightGrad | Elementwise | Routes) -> dict[str, int]:
    """A tile as keyword arguments of a kernel launch."""
    return asdict(tile)
