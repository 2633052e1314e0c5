"""Clocks inside a kernel: what a program notes of each tile while it is traced, and nothing at all while it is not.

On NVIDIA's GPUs there are two clocks. The *cycle counter* is exact, but every processor has its own, begun at its own
zero. The *global timer* is the same for all and counts nanoseconds, but coarsely: it moves in jumps, and nobody
promises how short they are. So tiles are stamped with the cycle counter, and each program reads both clocks together
twice, when it enters and when it leaves, each time at the moment at which the global timer jumps. The line through
these two pairs turns its processor's cycles into everybody's nanoseconds.

The interpreter has no clock that would say anything. There time is counted in tiles that are done, by all programs
together: it tells the order of things, and nothing lasts but a tile, which lasts one.

A trace is int64 words:

    word 0             how many tiles are done; in the interpreter only
    5 words a program  TIMER_IN and CYCLE_IN, when it entered; TIMER_OUT and CYCLE_OUT, when it left; PROCESSOR
    4 words a ticket   TAKEN, when its program turned to it; START, behind its wait; END; PROGRAM

What is not stamped stays -1: START of kinds that never wait, and tickets beyond the last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import target
from .signal import draw, global_timer
from .tile import INTERPRETED

TIMER_IN, CYCLE_IN, TIMER_OUT, CYCLE_OUT, PROCESSOR = (tl.constexpr(word) for word in range(5))
TAKEN, START, END, PROGRAM = (tl.constexpr(word) for word in range(4))
FIRST, WORDS_OF_PROGRAM, WORDS_OF_TILE = tl.constexpr(1), tl.constexpr(5), tl.constexpr(4)


# --8<-- [start:stamp]
@triton.jit
def stamp(trace_ptr, ticket, WORD: tl.constexpr):
    """Note the time as TAKEN, START or END of a ticket. Without a trace (None) this compiles to nothing.

    The barrier is there for the truth of it: one thread notes the time, and what all threads had to do before is done.
    """
    if trace_ptr is not None:
        tl.debug_barrier()
        at = trace_ptr + FIRST + WORDS_OF_PROGRAM * tl.num_programs(0) + WORDS_OF_TILE * ticket.to(tl.int64)
        if INTERPRETED:
            time = draw(trace_ptr) + 1 if WORD == END else tl.load(trace_ptr)
        else:
            time = cycle_counter()
        tl.store(at + WORD, time)
        if WORD == TAKEN:
            tl.store(at + PROGRAM, tl.program_id(0))


@triton.jit
def clock_in(trace_ptr):
    """A program enters. Without a trace (None) this compiles to nothing."""
    if trace_ptr is not None:
        at = trace_ptr + FIRST + WORDS_OF_PROGRAM * tl.program_id(0)
        read_both_clocks(trace_ptr, at + TIMER_IN, at + CYCLE_IN)
        tl.store(at + PROCESSOR, tl.program_id(0) if INTERPRETED else processor())


@triton.jit
def clock_out(trace_ptr):
    """A program leaves. Without a trace (None) this compiles to nothing."""
    if trace_ptr is not None:
        at = trace_ptr + FIRST + WORDS_OF_PROGRAM * tl.program_id(0)
        read_both_clocks(trace_ptr, at + TIMER_OUT, at + CYCLE_OUT)


# --8<-- [end:stamp]


@triton.jit
def read_both_clocks(trace_ptr, timer_ptr, cycle_ptr):
    """Store the global timer and the cycle counter, as they are when the global timer jumps."""
    if INTERPRETED:
        timer = tl.load(trace_ptr)
        cycle = timer
    else:
        before = global_timer()
        timer = before
        while timer == before:
            timer = global_timer()
        cycle = cycle_counter()
    tl.store(timer_ptr, timer)
    tl.store(cycle_ptr, cycle)


@triton.jit
def cycle_counter():
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def processor():
    """The number of the processor that this program runs on."""
    return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def why_not() -> str | None:
    """Why kernels cannot be traced on this device; None if they can."""
    name = target()
    if name == "interpreter" or name.startswith("sm_"):
        return None
    return f"a trace reads NVIDIA's clocks, and {name} has others: use an NVIDIA GPU, or a CPU, where order is traced"


def empty_trace(tickets: int, programs: int, device: torch.device) -> Tensor:
    """The words of a trace before its launch: nothing is stamped, no tile is done."""
    words = FIRST.value + WORDS_OF_PROGRAM.value * programs + WORDS_OF_TILE.value * tickets
    trace = torch.full((words,), -1, dtype=torch.int64, device=device)
    trace[0] = 0
    return trace


def rows_of(trace: Tensor, programs: int) -> tuple[Tensor, Tensor]:
    """The words of each program (programs, 5) and of each ticket (tickets, 4)."""
    end = FIRST.value + WORDS_OF_PROGRAM.value * programs
    of_program, of_ticket = trace[FIRST.value : end], trace[end:]
    return of_program.view(programs, WORDS_OF_PROGRAM.value), of_ticket.view(-1, WORDS_OF_TILE.value)
