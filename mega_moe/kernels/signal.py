"""Tickets, waits and signals: how programs of one launch agree on who does what, and hand bytes to each other.

All memory order lives here. A *signal* says that bytes are written, a *wait* makes sure that they are before anybody
reads them, and a *ticket* orders nothing. Counters are int32 and only grow during a launch, so a wait that is over
stays over. Whoever waits for a counter must have drawn a later ticket than everybody who signals it: then the earliest
unfinished ticket never waits for a program that has not started, and a launch ends however few programs run at once.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from .blocks import target
from .tile import INTERPRETED

MOST_POLLS = tl.constexpr(100_000)
"""How often a wait looks at its counter in the interpreter before it gives up: about ten seconds."""


def needs_fence() -> bool:
    """Whether kernels for the current device must fence bytes that others load with the copy engine (TMA).

    The answer is the FENCE of `wait` and `signal`. Only NVIDIA's, from sm_90 on, have one.
    """
    kind, _, number = target().partition("_")
    return kind == "sm" and int(number) >= 90


# --8<-- [start:draw]
@triton.jit
def draw(ticket_ptr):
    """The next ticket: 0, 1, 2, ... over all programs of a launch, each drawn once.

    Which program gets which ticket varies from run to run; what is computed for a ticket does not. Nothing is ordered
    by it (relaxed): a ticket is a number, not a message.
    """
    return tl.atomic_add(ticket_ptr, 1, sem="relaxed")


# --8<-- [end:draw]


# --8<-- [start:wait]
@triton.jit
def wait(counter_ptr, arrivals, FENCE: tl.constexpr):
    """Return when the counter shows this many arrivals; at once, without a look, for 0 or fewer.

    Waits for: `signal`s of the same counter, by programs of the same launch with earlier tickets.
    Memory order: the look that ends the wait acquires, at gpu scope, and the barrier hands what it acquired to all
    threads. So loads behind the wait see every byte that was stored before those signals; with FENCE, loads by the copy
    engine see them too.

    Never without its barrier: the compiler may move a load above an acquire alone. Never inside a loop over a
    contraction: a loop with a wait in it is not pipelined.

    In the interpreter, where programs of a launch run one after another, only another process can signal while this one
    waits. There a wait that lasts MOST_POLLS looks is an AssertionError.
    """
    if arrivals > 0:
        polls = 0
        while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < arrivals:
            if INTERPRETED:
                polls += 1
                tl.static_assert(polls < MOST_POLLS, "a wait is not over, and nobody is left to signal its counter")
        tl.debug_barrier()
        if FENCE:
            fence_for_copy_engine()


# --8<-- [end:wait]


# --8<-- [start:signal]
@triton.jit
def signal(counter_ptr, value, FENCE: tl.constexpr):
    """Add value to the counter: what this program has stored so far may be read by whoever waits for it.

    Memory order: the barrier collects the stores of all threads, and the one add releases them, at gpu scope. With
    FENCE the copy engine may load them as well. Stores *by* the copy engine are not covered.
    """
    if FENCE:
        fence_for_copy_engine()
    finish_stores()
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, value, sem="release", scope="gpu")


# --8<-- [end:signal]


@triton.jit
def finish_stores():
    """Have this thread's stores reach memory before the barrier that follows, which on AMD does not wait for them: the
    thread that then releases would release its own alone. NVIDIA's barrier and release cover all threads' stores."""
    if not INTERPRETED:
        if is_hip():
            tl.inline_asm_elementwise(
                "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def fence_for_copy_engine():
    """Order this thread's loads and stores against those of the copy engine, which has its own way to memory.

    Every writing thread needs it between its stores and the barrier of a signal; and whoever starts a copy, between the
    barrier of the wait and the copy.
    """
    tl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


# --8<-- [start:ranks]
@triton.jit
def arrive(counter_ptrs, values, mask):
    """Add a value to each counter, in the heaps of many ranks: what this program has stored so far may be read there.

    Memory order: that of `signal`, at sys scope, for a rank may be another GPU.
    """
    finish_stores()
    tl.debug_barrier()
    tl.atomic_add(counter_ptrs, values, mask=mask, sem="release", scope="sys")


@triton.jit
def wait_for_ranks(counter_ptrs, arrivals, mask):
    """Return when each of these counters shows this many arrivals. They may have passed 2^31 and wrapped: what is
    compared is the difference.

    Waits for: `arrive`s of other ranks, or of this launch with earlier tickets. Memory order: that of `wait`, at sys
    scope.
    """
    late = 1
    polls = 0
    while late > 0:
        shown = tl.atomic_add(counter_ptrs, 0, mask=mask, sem="acquire", scope="sys")
        late = tl.sum((mask & (shown - arrivals < 0)).to(tl.int32))
        if INTERPRETED:
            polls += 1
            tl.static_assert(polls < MOST_POLLS, "a wait is not over, and nobody is left to arrive")
    tl.debug_barrier()


@triton.jit
def wait_for_rank(counter_ptr, arrivals):
    """Return when this counter shows so many arrivals: `wait_for_ranks` for one of them."""
    one = tl.arange(0, 1)
    wait_for_ranks(counter_ptr + one, arrivals, one == 0)


# --8<-- [end:ranks]


@triton.jit
def leave(left_ptr):
    """Whether this program is the last of its launch to leave. Each program calls it once, and touches no word that all
    share afterwards, unless it is the last: then it may set them back for the next launch.

    Memory order: acquire and release, at gpu scope. What the others did before they left comes before what the last
    one does behind it.
    """
    finish_stores()
    tl.debug_barrier()
    left = tl.atomic_add(left_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return left == tl.num_programs(0) - 1
