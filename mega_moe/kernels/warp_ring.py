"""How the warps of one program share its work: rings in shared memory between those that load and those that multiply.

A program of a warp-specialised launch has *roles*, each a partition of its warps with registers of its own:

    producer   four warps. Draws tickets, hands each to the consumers, waits for what its tile reads, and loads: bulk
               copies (TMA) of what lies contiguously, and asynchronous copies (cp.async) of rows that are gathered.
    consumers  warpgroups of four warps. Each multiplies ROWS_OF_CONSUMER rows of a tile, stores what it has made of
               them, and signals. They never wait for each other.

Two rings connect them. Both are arrays of places in shared memory, each with two barriers (mbarriers): *full*, on which
a consumer waits before it reads, and *empty*, on which the producer waits before it writes.

    stages     the operands of one step of a contraction. The producer fills stage 0, 1, ... STAGES-1, 0, ... across
               tiles: it begins with a tile while the consumers still multiply the one before, or store it.
    messages   a row of the schedule each, and its ticket. The producer hands it over before it waits for anything.

            producer                                  each consumer
            free(empty, n)                            filled(full, n)
            copies, whose arrival is full's           multiplies; when the next multiplication is under way:
                                                      give_back(empty, n)

What is number n (a step, or a message) lies in place n % PLACES. A barrier completes a *phase* each time that it has
been arrived at as often as it expects; a wait names the phase by its parity, n // PLACES % 2. The first waits for
"empty" must not block: they wait for the parity before the first, which counts as complete.

    full of a stage    expects one arrival for the bytes of the bulk copies, and one from every thread of the producer,
                       which arrives when its own asynchronous copies are done (at once, if it has started none).
    empty of a stage   expects each consumer once, and so do both barriers of a message: full the producer.

Who waits and who signals between programs is as in signal.py, with three things to mind:

- A consumer signals late (`settle`), when it has begun to multiply the next tile: its stores have arrived by then, and
  its matrix instructions go on while it makes sure that they have. Before it begins with a tile that may wait for them
  it has to signal, however long that takes. So a producer hands a tile over *before* it waits for what the tile reads.
- Bulk copies to global memory are waited for by the thread that has started them, to the end: that their bytes have
  left shared memory (store_wait) says nothing to another processor.
- Counters count what each consumer has done: of a tile CONSUMERS signals come.

Gluon knows no interpreter. It is there with Triton, but compiles for NVIDIA's sm_90 and later alone; these rings are
for sm_90.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .signal import signal

CONSUMERS = gl.constexpr(2)
"""Warpgroups that multiply."""

ROWS_OF_CONSUMER = gl.constexpr(64)
"""Rows of a tile that each of them multiplies: those of one matrix instruction."""

PRODUCER_WARPS = gl.constexpr(4)

MESSAGES = gl.constexpr(4)
"""Messages that may be under way."""

WORDS = gl.constexpr(16)
"""Of a message: the row of the schedule, then the ticket; the rest is not used."""

KIND, RANK, EXPERT, BLOCK = (gl.constexpr(word) for word in range(4))
ROW, ROWS, COLUMN, ARRIVALS = (gl.constexpr(word) for word in range(4, 8))
TICKET = gl.constexpr(8)
"""Words of a message; the first eight as in `mega_moe.schedule.COLUMNS`."""

OVER = gl.constexpr(-1)
"""As KIND: there are no more tickets."""


# --8<-- [start:ring]
@gluon.jit
def make_ring(PLACES: gl.constexpr, FULL: gl.constexpr):
    """The barriers of a ring, (PLACES, 1) each. FULL: arrivals that fill a place; each consumer empties it once."""
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(full.index(place), count=FULL)
        mbarrier.init(empty.index(place), count=CONSUMERS)
    fence_async_shared()  # bulk copies arrive at them as well
    return full, empty


@gluon.jit
def free(empty, n, PLACES: gl.constexpr):
    """Producer: wait until the place of number n may be written. The place."""
    place = n % PLACES
    mbarrier.wait(empty.index(place), ((n // PLACES) & 1) ^ 1)
    return place


@gluon.jit
def filled(full, n, PLACES: gl.constexpr):
    """Consumer: wait until number n is there. Its place."""
    place = n % PLACES
    mbarrier.wait(full.index(place), (n // PLACES) & 1)
    return place


@gluon.jit
def stage_filled(full, n, gathered, STAGES: gl.constexpr):
    """The same for a stage that matrix instructions are to read. What was gathered, by cp.async, came as if threads had
    stored it, and matrix instructions read shared memory another way: hence the fence."""
    stage = filled(full, n, STAGES)
    if gathered:
        fence_async_shared()
    return stage


@gluon.jit
def expect_stage(full, stage, BYTES: gl.constexpr):
    """Producer: begin to fill a stage, to which so many bytes come by bulk copies. The barrier of these."""
    barrier = full.index(stage)
    mbarrier.expect(barrier, BYTES)
    return barrier


@gluon.jit
def stage_is_under_way(barrier):
    """Producer: the barrier is complete when what this thread has started by cp.async is there, and the bulk copies."""
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def give_back(empty, place):
    """Consumer: this warpgroup does not read this place any more."""
    mbarrier.arrive(empty.index(place), count=1)


# --8<-- [end:ring]


# --8<-- [start:messages]
@gluon.jit
def make_messages():
    """The ring of messages: their words, (MESSAGES, WORDS), and its barriers."""
    words = gl.allocate_shared_memory(gl.int32, [MESSAGES, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = make_ring(MESSAGES, 1)
    return words, full, empty


@gluon.jit
def message_of(ticket, tickets, table_ptr, WARPS: gl.constexpr):
    """The words of a ticket's message, loaded from the schedule; OVER beyond the last."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    word = gl.arange(0, WORDS, layout)
    row = gl.load(table_ptr + ticket.to(gl.int64) * 8 + word, mask=(word < 8) & (ticket < tickets), other=OVER)
    return gl.where(word == TICKET, ticket, row)


@gluon.jit
def hand_over(message, n, words, full, empty):
    """Producer: give message number n to the consumers. Its place, where the producer may read it as well, until it
    hands over the one that comes MESSAGES later."""
    place = free(empty, n, MESSAGES)
    words.index(place).store(message)
    mbarrier.arrive(full.index(place), count=1)
    return place


@gluon.jit
def word_of(words, place, WORD: gl.constexpr, WARPS: gl.constexpr):
    """One word of a message, as a number."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(words.index(place).slice(WORD, 1).load(layout), 0)


# --8<-- [end:messages]


# --8<-- [start:signals]
@gluon.jit
def finish_bulk_stores():
    """Wait until what this thread has stored by bulk copies is in global memory, for anybody to read. Other threads go
    on at once: a barrier has to follow, as in `signal`."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def settle(counter_ptr, value, BULK: gl.constexpr):
    """Consumer: signal what its stores of an earlier tile amount to; nothing, if value is 0.

    Memory order: that of `signal`. With BULK, bulk copies stored it, and are finished before; and bulk copies may load
    it as well as threads.
    """
    if value > 0:
        if BULK:
            finish_bulk_stores()
        signal(counter_ptr, value, BULK)


# --8<-- [end:signals]
