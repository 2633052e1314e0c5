"""Tickets, waits and signals: how programs of one launch agree on who does what, and hand bytes to each other.

All memory order lives here. A *signal* says that bytes are written, a *wait* makes sure that they are before anybody
reads them, and a *ticket* orders nothing. Counters are int32 and only grow during a launch, so a wait that is over
stays over. Whoever waits for a counter must have drawn a later ticket than everybody who signals it: then the earliest
unfinished ticket never waits for a program that has not started, and a launch ends however few programs run at once.
"""

import time

import triton
import triton.language as tl
from triton.language.target_info import is_hip

from .. import symmetric
from .blocks import target
from .tile import INTERPRETED

MOST_POLLS = tl.constexpr(100_000)
"""How often a wait looks at its counter in the interpreter before it gives up: some minutes."""

POLLS_A_GLANCE = tl.constexpr(1 if INTERPRETED else 64)
"""How often a wait for other ranks looks at its counters before it glances at the error page and the clock."""

# Words of an error page, and what may stand in its first; see symmetric.py.
STATE, RANK, CALL = tl.constexpr(symmetric.STATE), tl.constexpr(symmetric.RANK), tl.constexpr(symmetric.CALL)
SHOWN, EXPECTED = tl.constexpr(symmetric.SHOWN), tl.constexpr(symmetric.EXPECTED)
WAITED_FOR, CLAIMED = tl.constexpr(symmetric.WAITED_FOR), tl.constexpr(symmetric.CLAIMED)
OWNER, LIMIT, MIRROR = (tl.constexpr(word) for word in (symmetric.OWNER, symmetric.LIMIT, symmetric.MIRROR))
PAGE_WORDS = tl.constexpr(symmetric.PAGE_WORDS)
TIMED_OUT, TOO_MANY_ROWS = tl.constexpr(symmetric.TIMED_OUT), tl.constexpr(symmetric.TOO_MANY_ROWS)
OUT_OF_STEP, OTHER_LAYER = tl.constexpr(symmetric.OUT_OF_STEP), tl.constexpr(symmetric.OTHER_LAYER)
FORWARD = tl.constexpr(symmetric.FORWARD)


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
    """Order this thread's loads and stores of global memory against those of the copy engine, which has its own way
    there. (A fence of shared memory too would wait until all stores have arrived, as the release does already.)

    Every writing thread needs it between its stores and the barrier of a signal; and whoever starts a copy, between the
    barrier of the wait and the copy.
    """
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


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
def wait_for_ranks(
    counter_ptrs, arrivals, mask, waited_for, call, page_ptr, heaps_ptr, PAGE: tl.constexpr, W: tl.constexpr
):
    """Return when each of these counters shows this many arrivals; or when the error page says that they will not come.
    Counters may have passed 2^31 and wrapped: what is compared is the difference.

    Waits for: `arrive`s of other ranks, or of this launch with earlier tickets. Memory order: that of `wait`, at sys
    scope.

    Who has waited for the page's LIMIT writes into the pages of all ranks what it waited for, and all end their waits.
    After this call, `has_failed(page_ptr)` tells. waited_for: of each counter the rank that adds to it, or -1. In the
    interpreter the time is over after MOST_POLLS looks as well.
    """
    late = 1
    polls = 0
    begun = tl.cast(0, tl.int64)
    nothing = mask.to(tl.int32) * 0  # a value for each counter, for Gluon widens no number to an atomic's shape
    while late > 0:
        shown = tl.atomic_add(counter_ptrs, nothing, mask=mask, sem="acquire", scope="sys")
        missing = mask & (shown - arrivals < 0)
        late = tl.sum(missing.to(tl.int32))
        polls += 1
        if late > 0:
            if polls % POLLS_A_GLANCE == 0:
                now = global_timer()
                begun = tl.where(begun == 0, now, begun)
                limit = tl.load(page_ptr + LIMIT)
                over = (limit > 0) & (now - begun >= limit)
                if INTERPRETED:
                    over = over | (polls >= MOST_POLLS)
                if over:
                    first = tl.min(tl.where(missing, waited_for, W))
                    its = missing & (waited_for == first)
                    found, expected = tl.sum(tl.where(its, shown, 0)), tl.sum(tl.where(its, arrivals, 0))
                    record(TIMED_OUT, call, found, expected, first, page_ptr, heaps_ptr, PAGE, W)
                if has_failed(page_ptr):
                    tell_host(page_ptr)
                    late = 0
    tl.debug_barrier()


@triton.jit
def has_failed(page_ptr):
    """Whether something stands in this error page."""
    return tl.load(page_ptr + STATE, volatile=True) != 0


@triton.jit
def record(STATE_NOW: tl.constexpr, call, shown, expected, waited_for, page_ptr, heaps_ptr, PAGE, W: tl.constexpr):
    """Write into the error pages of all ranks what has happened here. In each page the first to claim it writes."""
    own = tl.load(page_ptr + OWNER)
    for rank in tl.static_range(W):
        its_page_ptr = (tl.load(heaps_ptr + rank) + PAGE).to(tl.pointer_type(tl.int64))
        if tl.atomic_add(its_page_ptr + CLAIMED, 1, sem="acq_rel", scope="sys") == 0:
            tl.store(its_page_ptr + RANK, own)
            tl.store(its_page_ptr + CALL, call.to(tl.int64))
            tl.store(its_page_ptr + SHOWN, shown.to(tl.int64))
            tl.store(its_page_ptr + EXPECTED, expected.to(tl.int64))
            tl.store(its_page_ptr + WAITED_FOR, waited_for.to(tl.int64))
            finish_stores()
            tl.debug_barrier()
            tl.atomic_xchg(its_page_ptr + STATE, STATE_NOW, sem="release", scope="sys")
    tl.debug_barrier()


@triton.jit
def tell_host(page_ptr):
    """Copy this rank's error page to where the host looks at it, its first word last."""
    mirror = tl.load(page_ptr + MIRROR)
    if mirror != 0:
        state = tl.atomic_add(page_ptr + STATE, 0, sem="acquire", scope="sys")
        tl.debug_barrier()
        mirror_ptr = mirror.to(tl.pointer_type(tl.int64))
        for word in tl.static_range(1, PAGE_WORDS):
            tl.store(mirror_ptr + word, tl.load(page_ptr + word, volatile=True))
        tl.debug_barrier()
        tl.atomic_add(page_ptr + MIRROR, 0, sem="release", scope="sys")  # what is stored above comes first
        tl.store(mirror_ptr, state)


# --8<-- [end:ranks]


if INTERPRETED:

    def global_timer():
        """The host's clock, in nanoseconds. No kernel's function, for a compiler would look into it."""
        return tl.cast(time.monotonic_ns(), tl.int64)

else:

    @triton.jit
    def global_timer():
        """Nanoseconds, the same on all processors, in jumps of about a microsecond."""
        if is_hip():
            return (
                tl.inline_asm_elementwise(  # counts hundreds of nanoseconds, at 100 MHz
                    "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
                )
                * 10
            )
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


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
