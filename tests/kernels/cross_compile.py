"""Compile every kernel for GPUs that are not here, and say what each of them needs there.

    python -m tests.kernels.cross_compile --target sm_90 gfx942
    python -m tests.kernels.cross_compile --target sm_90 --kernel grouped_gemm_kernel --blocks BLOCK_N=128,num_warps=4
    python -m tests.kernels.cross_compile --target sm_90 --layer tails --rare
    python -m tests.kernels.cross_compile --target gfx942 --over processes

No GPU takes part. Every rung runs forward and backward on meta tensors (shapes without memory) with a driver that
claims to be the target, so the launchers choose the target's block sizes; each launch is recorded instead of made, and
Triton's own warm-up compiles it, specialised on alignment, unit strides and constants exactly as a real first call
would. So nothing here lists kernels or forms: what the stages launch is what is compiled. (It also holds the stages to
reading nothing on the host: a meta tensor has no values.)

Rungs over ranks run three times: without heaps, over heaps of one process (LocalHeaps), and as one of W processes,
which holds a W-th of the experts, has rows coming from everywhere, and reaches the other ranks by their addresses.
They run in each precision that they have on the target, each precision's forms behind those of the one before. In 8
bits one launch takes a minute to compile: without the rare ones it is fp8 alone, that makes pre again, on one rank; and
nothing is compiled in 8 bits from fp32, or for sizes that fill no tile.

Matrix instructions must be there where a kernel multiplies (fp32 does without: IEEE fp32 has none on NVIDIA), shared
memory must fit, ptxas must not have serialised matrix instructions, and nothing may spill but MAY_SPILL and rare forms:
those that only occur when some gradients are not needed. What ranks tell each other must be told at sys scope, down to
the assembly; and on NVIDIA nothing may come before its wait, or behind its signal (see waits.py). What fails is printed
as a fault, and the exit code is 1.

Run it in a process of its own without TRITON_INTERPRET: interpreted kernels cannot be compiled.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import itertools
import json
import pkgutil
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from mega_moe import kernels
from mega_moe.processes import ProcessHeaps
from mega_moe.registry import LADDER
from mega_moe.shapes import PRECISIONS, PRESETS, SAVES, Inputs, Need, Problem
from mega_moe.symmetric import Heaps, Layout, LocalHeaps
from tests.kernels.waits import does_wait, wrong_in_ptx, wrong_in_ttgir, wrong_scopes, wrong_with_roles


@dataclass(frozen=True)
class Target:
    """A GPU to compile for: what Triton calls it, its matrix instruction, and the shared memory of one program."""

    triton: GPUTarget
    matrix: str
    shared: int  # bytes
    of_codes: str = ""  # the matrix instruction of e4m3 codes, as far as a line of assembly shows it
    of_scaled: str = ""  # the one that takes scales beside them
    of_few: str = ""  # the one for tiles of fewer rows than the first takes at once


TARGETS = {
    "sm_90": Target(
        GPUTarget("cuda", 90, 32),
        "wgmma.mma_async",
        227 * 1024,
        r"wgmma\.mma_async\S*\.e4m3\.e4m3",
        of_few="mma.sync.aligned.m16n8k16.row.col.f32",  # into fp32: another multiplies doubles
    ),
    "sm_100": Target(
        GPUTarget("cuda", 100, 32),
        "tcgen05.mma",
        227 * 1024,
        r"tcgen05\.mma\S*\.kind::f8f6f4",
        r"tcgen05\.mma\S*\.kind::mxf8f6f4\.block_scale",
    ),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), "v_mfma", 64 * 1024),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), "v_mfma", 160 * 1024, of_scaled="v_mfma_scale_f32"),
}

LAYERS = {name: PRESETS[name] for name in ("qwen3-30b-a3b", "qwen3-235b-a22b")} | {
    # Experts have one row on average, and 32: the tiles are those of few rows.
    "few": PRESETS["qwen3-30b-a3b"].at(T=16),
    "several": PRESETS["qwen3-30b-a3b"].at(T=512),
    # No size is a multiple of a block, so every tail mask is compiled; rows are still aligned to 16 bytes.
    "tails": Problem(T=4099, H=2896, I=1424, E=96, K=6, swiglu_limit=7.0),
    # No size divides anything, and rows are not aligned: right, but no tile is loaded in wide accesses.
    "odd": Problem(T=1003, H=1001, I=333, E=5, K=3, swiglu_limit=7.0),
    # The smallest there is: one token, one expert.
    "one": Problem(T=1, H=16, I=16, E=1, K=1),
}
# What a kernel may spill, in the units of Compiled. All steps of a direction in one function, or all that ranks meet
# for, leave the largest part a few registers short; most in fp32, which is for checking. For dact's epilogue in
# backward that is faster on an H200, by 1 to 4 %, than an epilogue of half the columns, which spills less. In 8 bits
# epilogues spill on sm_90, where two programs share a processor: dact's 300 bytes with Triton 3.6 and 1,150 with 3.7,
# and backward in one launch 460; and dact of MX. But no loop around a matrix instruction loads any of it. What warp
# spills it loads a few times a tile, in no loop either.
MAY_SPILL = {
    "mx_dact_kernel": 80,
    "scaled_gate_up_kernel": 180,
    "scaled_dact_kernel": 1150,
    "scaled_mega_forward_kernel": 150,
    "mega_forward_kernel": 56,
    "warp_forward_kernel": 148,
    "mega_backward_kernel": 148,
    "scaled_mega_backward_kernel": 480,
    "meet_kernel": 128,
    "combine_slots_kernel": 8,
    "schedule_kernel": 8,
}
FEWEST = 64
"""Rows that a warpgroup's matrix instruction takes."""
OVER = ("nothing", "local heaps", "processes")
"""What a form is launched over."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Form:
    """One way in which a stage launches a kernel: as many as there are specialisations to compile."""

    kernel: JITFunction
    args: tuple
    kwargs: dict
    rare: bool = False  # occurs neither in a whole training step nor in a forward without gradients
    over: str = OVER[0]

    @property
    def constants(self) -> dict[str, object]:
        """The constexpr arguments by name, and the options of the launch."""
        bound = dict(zip(self.kernel.arg_names, self.args)) | self.kwargs
        runtime = {p.name for p in self.kernel.params if not p.is_constexpr}
        return {name: value for name, value in bound.items() if name not in runtime}

    @property
    def name(self) -> str:
        """The kernel with what tells its forms apart: grouped_gemm_kernel(C=2048, N=1536, ...)."""
        absent = [n for n, a in zip(self.kernel.arg_names, self.args) if a is None]
        constants = ", ".join(f"{k}={v}" for k, v in self.constants.items())
        return "".join(
            [
                f"{self.kernel.__name__}({constants})",
                *(f" without {name.removesuffix('_ptr')}" for name in absent),
                f" over {self.over}" * (self.over != OVER[0]),
                " (rare)" * self.rare,
            ]
        )

    def key(self) -> str:
        """Equal for launches that compile to the same code."""
        facts = [facts_of(a) for a in self.args]
        return f"{self.kernel.__module__}.{self.kernel.__name__} {facts} {self.kwargs}"


def facts_of(argument: object) -> object:
    """What of an argument a compiler looks at."""
    if isinstance(argument, TensorDescriptor | GluonDescriptor):
        return argument.base.dtype, tuple(argument.block_shape)
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, int):  # not a constant: those are given by name
        return argument == 1, argument % 16 == 0, argument < 2**31
    return argument


@dataclass(frozen=True)
class Compiled:
    """What a form needs on its target. Registers are those of one thread; bytes those of one program or thread."""

    form: str
    kernel: str
    registers: int
    spills: int  # bytes a thread on NVIDIA, vector registers a thread on AMD
    scratch: int  # bytes of stack a thread
    shared: int
    matrix_instructions: int
    scaled_instructions: int  # of those, the ones that take scales beside codes
    seconds: float
    faults: list[str]


class Pretended:
    """A Triton driver for a GPU that is not here: it names the target, and cannot launch."""

    def __init__(self, name: str):
        self.name = name
        self.utils = SimpleNamespace(get_device_properties=lambda device: {"multiprocessor_count": 132})

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name].triton

    def get_current_device(self) -> str:
        return self.name  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: str) -> int:
        return 0


def forms(target: str, problem: Problem, rare: bool = False) -> list[Form]:
    """Every form in which any rung launches a kernel for this problem, whatever is saved and, with the rare ones,
    whatever gradients are needed."""
    launched: list[Form] = []
    needs = [Need(*needed) for needed in itertools.product([True, False], repeat=4)][:-1]  # all, ... but none
    run = JITFunction.run
    try:
        driver.set_active(Pretended(target))
        heaps = some_of_ranks, one_of_ranks = LocalHeaps(W_of(problem, 4), problem.T), OneOfRanks(problem, 8)
        T, W = problem.T, some_of_ranks.ranks
        over_heaps = problem.at(heap=some_of_ranks.key, tokens_per_rank=(T - (W - 1), *[1] * (W - 1)))
        as_process = problem.at(heap=one_of_ranks.key, tokens_per_rank=(T,), **one_of_ranks.facts(problem.K))
        precisions = PRECISIONS if rare or problem.dtype != torch.float32 else PRECISIONS[:1]
        for precision, need, rung, save in itertools.product(precisions, needs if rare else [Need()], LADDER, SAVES):
            if precision not in rung.precisions or rung.recipe().why_not(problem.at(precision=precision)):
                continue
            common = rare or precision == "bf16"
            if not common and (problem.H % 128 or problem.I % 128):
                continue
            # One launch of codes takes a minute to compile: its fullest form on one rank stands for the others.
            fullest = precision == "fp8" and save == "inputs"
            over_ranks = rung.over_ranks and common and (rare or save == "inputs")  # the default there
            alone = rung.needs_triton and (common or fullest or not rung.over_ranks)  # ranks multiplies as persistent
            able = (alone, over_ranks, over_ranks)
            for over, which in itertools.compress(zip(OVER, (problem, over_heaps, as_process)), able):
                JITFunction.run = recorder(launched, rare=need != Need(), over=over)
                saving, inputs = which.at(save=save, precision=precision), meta_inputs(which)
                y, saved = rung.forward(saving, inputs)
                rung.backward(saving, inputs, saved, torch.empty_like(y), need)
        for each in heaps:
            each.close()
    finally:
        JITFunction.run = run
    first = {}  # of each, and in order: those of a precision that a target has not come behind all others
    for form in launched:
        first.setdefault(form.key(), form)
    return list(first.values())


def W_of(problem: Problem, most: int) -> int:
    """As many ranks as can share its experts, of at most so many."""
    return next(W for W in range(most, 0, -1) if problem.E % W == 0)


class OneOfRanks(ProcessHeaps):
    """What heaps are to a process that is one rank of W: without memory, and without the others."""

    def __init__(self, problem: Problem, most: int):
        W = W_of(problem, most)
        Heaps.__init__(self, W, W // 2, 1, problem.T, timeout_s=60)
        self.max_rows, self._kept = None, {}

    def make(self, layout: Layout, device: torch.device) -> tuple[SimpleNamespace, torch.Tensor, torch.Tensor]:
        heap = torch.empty(layout.bytes, dtype=torch.uint8, device=device)
        addresses = torch.empty(self.ranks, dtype=torch.int64, device=device)
        return SimpleNamespace(heaps=[heap] * self.ranks), addresses, addresses[:1].clone()


def recorder(launched: list[Form], rare: bool, over: str) -> Callable:
    """What records a launch instead of making it."""
    return lambda self, *args, grid, warmup, **kwargs: launched.append(Form(self, args, kwargs, rare, over))


def meta_inputs(problem: Problem) -> Inputs:
    """Inputs without memory."""
    p = problem
    empty = lambda *shape, dtype=p.dtype: torch.empty(shape, dtype=dtype, device="meta")
    return Inputs(
        empty(p.T, p.H),
        empty(p.T, p.K, dtype=torch.int64),
        empty(p.T, p.K, dtype=torch.float32),
        empty(p.E_here, 2, p.I, p.H),
        empty(p.E_here, p.H, p.I),
    )


def compile_form(target: str, form: Form, may_spill: bool = False) -> Compiled:
    """Compile and measure one form. Raises what Triton raises."""
    driver.set_active(Pretended(target))
    triton.knobs.compilation.always_compile = True  # whatever a file has kept
    form.kernel.device_caches.clear()  # whatever this process has kept: another layer's form may be the same
    triton.knobs.nvidia.dump_ptxas_log = True  # to stdout, when ptxas runs
    stdout, start = io.StringIO(), time.perf_counter()
    with contextlib.redirect_stdout(stdout):
        compiled = form.kernel.warmup(*form.args, grid=(1,), **form.kwargs)
    seconds, log = time.perf_counter() - start, stdout.getvalue()

    if TARGETS[target].triton.backend == "cuda":
        assembly = compiled.asm["ptx"]
        number = lambda pattern: int(re.search(pattern, log)[1])
        registers = number(r"Used (\d+) registers")
        spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
        scratch = number(r"(\d+) bytes stack frame")
    else:
        assembly = compiled.asm["amdgcn"]
        number = lambda name: int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])
        registers = number("vgpr_count")
        spills = number("vgpr_spill_count")  # a scalar register spills into a lane of a vector register, not to memory
        scratch = number("private_segment_fixed_size")
    shared, matrix = compiled.metadata.shared, TARGETS[target].matrix
    if form.constants.get("BLOCK_R", FEWEST) < FEWEST and matrix not in assembly:
        matrix = TARGETS[target].of_few or matrix

    faults = [line.strip() for line in log.splitlines() if re.search(r"\bC75\d\d\b", line)]
    allowed = MAY_SPILL.get(form.kernel.__name__, 0)
    if (spills > allowed or scratch > allowed) and not (may_spill or form.rare):
        faults.append("spills")
    if shared > TARGETS[target].shared:
        faults.append(f"{shared} bytes of shared memory, of {TARGETS[target].shared}")
    # A product of bf16 or fp16 operands, which a GPU has instructions for. Gluon begins where Triton's TTIR ends.
    products = compiled.asm.get("ttir", compiled.asm["ttgir"])
    if re.search(r"(tt\.dot|ttng\.warp_group_dot) .*x(bf16|f16)\b", products) and matrix not in assembly:
        faults.append(f"no {matrix}")
    if re.search(r"tt\.dot .*xf8E4M3FN>", products) and not re.search(TARGETS[target].of_codes, assembly):
        faults.append(f"no {TARGETS[target].of_codes}")
    scaled_instructions = len(re.findall(TARGETS[target].of_scaled, assembly)) if TARGETS[target].of_scaled else 0
    if "tt.dot_scaled" in products and not scaled_instructions:
        faults.append(f"no {TARGETS[target].of_scaled or 'instruction that takes scales'}")
    if form.kernel.is_gluon():
        faults += wrong_with_roles(assembly)
    faults += wrong_scopes(compiled.asm["ttgir"], assembly)
    if does_wait(form.kernel) and TARGETS[target].triton.backend == "cuda":
        faults += wrong_in_ttgir(compiled.asm["ttgir"]) + wrong_in_ptx(assembly)
    return Compiled(
        form=form.name,
        kernel=form.kernel.__name__,
        registers=registers,
        spills=spills,
        scratch=scratch,
        shared=shared,
        matrix_instructions=assembly.count(matrix),
        scaled_instructions=scaled_instructions,
        seconds=round(seconds, 1),
        faults=faults,
    )


def jit_functions() -> dict[str, JITFunction]:
    """Every Triton function that lives in mega_moe.kernels, by name."""
    found = {}
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        module = importlib.import_module(info.name)
        for name, member in inspect.getmembers(module, lambda m: isinstance(m, JITFunction)):
            if member.__module__ == module.__name__:
                found[name] = member
    return found


def forgotten(launched: list[Form]) -> list[str]:
    """Triton functions that no stage launches and no other Triton function calls, or names as what some warps do."""
    functions = jit_functions()
    names = {form.kernel.__name__ for form in launched}
    called = lambda name: any(re.search(rf"\b{name}[(,]", f.src) for n, f in functions.items() if n != name)
    return [name for name in functions if name not in names and not called(name)]


def with_blocks(form: Form, blocks: dict[str, int]) -> Form:
    """The form with other block sizes, where it has them. Raises ValueError where they are part of a descriptor."""
    changed = {name: size for name, size in blocks.items() if form.kwargs.get(name, size) != size}
    in_a_descriptor = [name for name in changed if name.startswith("BLOCK_")]
    if in_a_descriptor and any(isinstance(argument, TensorDescriptor) for argument in form.args):
        raise ValueError(
            f"{form.kernel.__name__} loads by descriptor, and launchers make descriptors for the sizes in "
            f"mega_moe/kernels/blocks.py: change {', '.join(in_a_descriptor)} there"
        )
    return replace(form, kwargs=form.kwargs | changed)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", choices=TARGETS, nargs="+")
    parser.add_argument("--rotate", choices=TARGETS, nargs="+", default=[], help="each form for one of these, in turn")
    parser.add_argument("--layer", choices=LAYERS, nargs="+", default=["qwen3-30b-a3b"])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--over", choices=OVER, nargs="+", default=OVER, help="only what is launched over these")
    parser.add_argument("--kernel", help="only this kernel")
    parser.add_argument("--blocks", default="", help="other sizes than those in blocks.py: BLOCK_N=128,num_warps=4")
    parser.add_argument("--rare", action="store_true", help="also what occurs only when some gradients are not needed")
    parser.add_argument("--may-spill", action="store_true", help="spilling is no fault")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    arguments = parser.parse_args(argv)
    if arguments.target is None:
        arguments.target = [] if arguments.rotate else ["sm_90"]
    return arguments


def jobs_of(arguments: argparse.Namespace) -> list[tuple[str, Form]]:
    """What to compile: (target, form)."""
    jobs = []
    for layer in arguments.layer:
        problem = LAYERS[layer].at(dtype=DTYPES[arguments.dtype], device="meta")
        jobs += [(target, form) for target in arguments.target for form in forms(target, problem, arguments.rare)]
        in_turn = {target: numbered(forms(target, problem, arguments.rare)) for target in arguments.rotate}
        every = dict.fromkeys(itertools.chain(*in_turn.values()))  # of which a target without a precision has fewer
        for i, which in enumerate(every):
            having = [(target, found[which]) for target, found in in_turn.items() if which in found]
            jobs.append(having[i % len(having)])
    return jobs


def numbered(launched: list[Form]) -> dict[tuple, Form]:
    """The forms by kernel, what it is launched over, and a number: the same one on all targets."""
    seen, found = Counter(), {}
    for form in launched:
        which = (form.kernel.__name__, form.over)
        found[*which, seen[which]] = form
        seen[which] += 1
    return found


def main(argv: list[str] | None = None) -> int:
    """Print a table, or JSON; 0 if everything compiled without a fault."""
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: interpreted kernels cannot be compiled", file=sys.stderr)
        return 2
    arguments = parse_arguments(argv)
    blocks = {name: int(size) for name, size in (pair.split("=") for pair in arguments.blocks.split(",") if pair)}
    jobs = jobs_of(arguments)
    # This target has all precisions, and these sizes fill tiles.
    everywhere = forms("sm_90", PRESETS["qwen3-30b-a3b"].at(device="meta"))
    missing = forgotten([form for _, form in jobs] + everywhere)
    chosen = lambda form: form.over in arguments.over and arguments.kernel in (None, form.kernel.__name__)
    jobs = [(target, form) for target, form in jobs if chosen(form)]
    try:
        jobs = [(target, with_blocks(form, blocks)) for target, form in jobs]
    except ValueError as refused:
        print(refused, file=sys.stderr)
        return 2

    rows = []
    if not arguments.json:
        print("registers  spills  scratch   shared  matrix  seconds  target   form")
    for target, form in jobs:
        try:
            compiled = compile_form(target, form, arguments.may_spill)
            row = {"target": target} | asdict(compiled)
        except Exception as error:  # Triton's, LLVM's or ptxas's: what the other forms need is still worth knowing
            row = {"target": target, "form": form.name, "faults": [f"{type(error).__name__}: {error}"]}
        rows.append(row)
        if not arguments.json:
            print_row(row)
    if arguments.json:
        print(json.dumps({"rows": rows, "forgotten": missing}))
    elif missing:
        print(f"launched by no stage: {', '.join(missing)}")
    return 1 if missing or any(row["faults"] for row in rows) else 0


def print_row(row: dict) -> None:
    """One line, and one more for each fault."""
    widths = dict(registers=9, spills=8, scratch=9, shared=9, matrix_instructions=8, seconds=9)
    numbers = "".join(f"{row.get(name, '-'):>{width}}" for name, width in widths.items())
    print("\n    FAULT: ".join([f"{numbers}  {row['target']:7}  {row['form']}", *row["faults"]]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
