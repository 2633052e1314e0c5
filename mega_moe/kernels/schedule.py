"""The schedule, made on the device: the same numbers, to the bit, as `mega_moe.schedule`, and nothing read on the host.

A tile's place in the table is the number of tiles before it. To count them needs no list: before it stand whole phases
of some groups, its phase's tiles of lower experts, and those of its own expert. So a place is a few sums over experts,
and any program can put any tile into its place. Where the phases of a turn are mixed, before it stand whole turns and
a share of each phase of its own.

Forward needs a plan too, and both come from one launch, whose programs draw tickets in this order: count the routes of
each chunk; when all are counted, place the routes of each chunk (see plan.py); when row_start is written, write each
part of the schedule. Who waits has drawn a later ticket than those it waits for, so the launch ends with any number of
programs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..schedule import COLUMNS, COMBINE, KINDS, Phase, Work, most_tiles, number_of_counters, with_dispatch
from ..shapes import Need, Plan, Problem
from ..symmetric import is_capturing, kept
from .blocks import Mega, Resident, Strips, WeightGrad, programs, routes
from .plan import begin_chunk, chunks_and_blocks, count_chunk, empty_plan, place_chunk, store_row_start
from .signal import draw, leave, signal, wait
from .tile import INTERPRETED

TILES, FIRST_COUNTER = tl.constexpr(1), tl.constexpr(2)
"""Words of `Schedule.counters`: how many tiles there are, and the first counter they wait for. Word 0 is the ticket."""

WORDS = 8
"""The most words that the programs of a launch share; its kernel names them."""

KEPT: dict[tuple, Tensor] = {}
"""These words, for each device and stream; zeros between launches. Kept, because zeroing them is a launch."""


@dataclass(frozen=True)
class Schedule:
    """The tiles of one direction of one call, to be drawn once. All int32, on the device.

    Attributes:
        table: (most tiles, 8); `mega_moe.schedule.COLUMNS` names the columns. Behind the last tile nothing is written.
        counters: the ticket, which is zero; the number of tiles; then the counters that tiles wait for, numbered as in
            `mega_moe.schedule`, all zeros.
        work: what the tiles do.
    """

    table: Tensor
    counters: Tensor
    work: Work


# --8<-- [start:places]
@triton.jit
def sum_below(bound, of_expert, key):
    """For each bound the sum over all experts with a lower key: bound (N,), of_expert and key (BLOCK_E,) -> (N,)."""
    return tl.sum(tl.where(key[None, :] < bound[:, None], of_expert[None, :], 0), 1)


@triton.jit
def sum_at(bound, of_expert, key):
    """The same over all experts whose key is the bound."""
    return tl.sum(tl.where(key[None, :] == bound[:, None], of_expert[None, :], 0), 1)


@triton.jit
def value_of(expert, of_expert, BLOCK_E: tl.constexpr):
    """of_expert[expert] for each of N experts, 0 beyond the last: expert (N,), of_expert (BLOCK_E,) -> (N,)."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_E)[None, :] == expert[:, None], of_expert[None, :], 0), 1)


@triton.jit
def turn_of(expert, L, W: tl.constexpr, GROUP: tl.constexpr):
    """An expert's group, and its turn among all: by group, rank, number on its rank. On one rank the turn is itself."""
    rank, local = expert // L, expert % L
    group = local // GROUP
    size = tl.minimum(GROUP, L - group * GROUP)  # the last group may be smaller
    return group, group * (GROUP * W) + rank * size + local % GROUP


@triton.jit
def mixed_place(tile, p: tl.constexpr, group, blocks, group_of, STRIPS_OF_PHASE: tl.constexpr):
    """Where a tile of phase p stands if the phases of a turn are mixed: all of earlier turns are before it, and of its
    own turn a share of each phase. tile: (N, M), its number in its phase; group: (N,), its expert's.

    Let it be number i of the n tiles that its phase has in this turn. Of the m tiles of phase q those are before it for
    which (j + 1/2) / m < (i + 1/2) / n, and if q < p the one at the same place. Of its own phase that makes i.

    Example: i = 2, n = 4, m = 2: it is 5/8 of the way, the others 1/4 and 3/4, so one is before it.
    """
    i = (tile - (sum_below(group, blocks, group_of) * STRIPS_OF_PHASE[p])[:, None]).to(tl.int64)
    n = tl.maximum(sum_at(group, blocks, group_of) * STRIPS_OF_PHASE[p], 1).to(tl.int64)[:, None]
    place = tl.zeros_like(tile)
    for q in range(len(STRIPS_OF_PHASE)):  # a loop: written out for each phase of each, it takes twice the registers
        strips = q * 0
        for phase in tl.static_range(len(STRIPS_OF_PHASE)):
            strips = tl.where(q == phase, STRIPS_OF_PHASE[phase], strips)
        m = (sum_at(group + p - q, blocks, group_of) * strips)[:, None]
        share = ((2 * i + 1) * m + n - tl.where(q < p, 0, 1)) // (2 * n)
        place += (sum_below(group + p - q, blocks, group_of) * strips)[:, None] + share.to(tl.int32)
    return place


@triton.jit
def store_tiles(table_ptr, place, live, kind, rank, expert, block, row, rows, column, arrivals):
    """Put the live ones of (N, M) tiles into their places. place: (N, M); of the others each broadcasts to that."""
    zero = tl.zeros_like(place)
    even = tl.join(tl.join(zero + kind, zero + row), tl.join(zero + expert, zero + column))
    odd = tl.join(tl.join(zero + rank, zero + rows), tl.join(zero + block, zero + arrivals))
    tile = tl.reshape(tl.join(even, odd), (place.shape[0], place.shape[1], 8))  # as COLUMNS says
    at = table_ptr + place.to(tl.int64)[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    tl.store(at, tile, mask=live[:, :, None])


@triton.jit
def write_part(
    part,
    row_start_ptr,
    token_start_ptr,  # (W+1,) where each rank's tokens begin; or None on one rank
    live_routes_ptr,  # (W,) of each rank; or None on one rank, all of whose rows are its own
    table_ptr,
    counters_ptr,
    T,
    E,
    W: tl.constexpr,
    KIND_OF_PHASE: tl.constexpr,
    STRIPS_OF_PHASE: tl.constexpr,
    KIND_OF_GRAD: tl.constexpr,
    TILES_OF_GRAD: tl.constexpr,
    WAITS_FOR: tl.constexpr,
    COMBINE_KIND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    MIXED: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write one part of the schedule: the tiles of PART row blocks, the weight gradients of the experts with the same
    numbers, and the combine tiles with the same numbers. Part 0 writes the counters as well.
    """
    PHASES: tl.constexpr = len(STRIPS_OF_PHASE)
    e = tl.arange(0, BLOCK_E)
    start = tl.load(row_start_ptr + e, mask=e < E, other=0)
    rows = tl.load(row_start_ptr + e + 1, mask=e < E, other=0) - start
    blocks = tl.cdiv(rows, BLOCK_R)
    all_blocks = tl.sum(blocks)
    number = part * PART + tl.arange(0, PART)
    column = tl.arange(0, COLUMNS)[None, :]
    L = E // W
    group_of, turn_of_expert = turn_of(e, L, W, GROUP)

    # Row blocks. Phase p of group g belongs to turn g + p.
    expert = tl.sum((tl.cumsum(blocks)[None, :] <= number[:, None]).to(tl.int32), 1)
    block_in_expert = number - sum_below(expert, blocks, e)
    row_in_expert = block_in_expert * BLOCK_R
    row = value_of(expert, start, BLOCK_E) + row_in_expert
    rows_of_block = tl.minimum(value_of(expert, rows, BLOCK_E) - row_in_expert, BLOCK_R)
    blocks_of_expert = value_of(expert, blocks, BLOCK_E)
    group, turn = turn_of(expert, L, W, GROUP)
    over_rows = 0
    for p in tl.static_range(PHASES):
        # Before it: of its own phase all blocks of experts with an earlier turn, and lower ones of its own; of phase q
        # all groups of earlier steps, and that of its own step if q < p. If phases are mixed, see there.
        before = (sum_below(turn, blocks, turn_of_expert) + block_in_expert) * STRIPS_OF_PHASE[p]
        if not MIXED:
            for q in tl.static_range(PHASES):
                if q != p:
                    before += sum_below(group + (p - q + (q < p)), blocks, group_of) * STRIPS_OF_PHASE[q]
        arrivals = blocks_of_expert * (STRIPS_OF_PHASE[p - 1] if p > 0 else 0)
        for first in range(0, STRIPS_OF_PHASE[p], COLUMNS):
            place = before[:, None] + first + column
            if MIXED:
                place = mixed_place(place, p, group, blocks, group_of, STRIPS_OF_PHASE)
            store_tiles(
                table_ptr,
                place,
                (number < all_blocks)[:, None] & (first + column < STRIPS_OF_PHASE[p]),
                KIND_OF_PHASE[p],
                (expert // L)[:, None],
                expert[:, None],
                number[:, None],
                row[:, None],
                rows_of_block[:, None],
                first + column,
                arrivals[:, None],
            )
        over_rows += all_blocks * STRIPS_OF_PHASE[p]

    # The tail: weight gradients, longest expert first, and combine tiles in between.
    grads = 0
    for w in tl.static_range(len(TILES_OF_GRAD)):
        grads += E * TILES_OF_GRAD[w]
    combines = combine_tiles(T, token_start_ptr, W, COMBINE_KIND, BLOCK_T)
    ahead = tl.minimum(grads, AHEAD)
    step = tl.maximum((grads - ahead) // tl.maximum(combines, 1), 1)

    if part * PART < E:
        rows_here = value_of(number, rows, BLOCK_E)
        longer = rows[None, :] > rows_here[:, None]
        lower = (rows[None, :] == rows_here[:, None]) & (e[None, :] < number[:, None])
        experts_before = tl.sum(((longer | lower) & (e < E)[None, :]).to(tl.int32), 1)
        first_block = sum_below(number, blocks, e)
        blocks_here = value_of(number, blocks, BLOCK_E)
        first_grad = experts_before * (grads // E)
        for w in tl.static_range(len(TILES_OF_GRAD)):
            for first in range(0, TILES_OF_GRAD[w], COLUMNS):
                grad = first_grad[:, None] + first + column
                combines_before = tl.where(grad < ahead, 0, tl.minimum((grad - ahead) // step + 1, combines))
                store_tiles(
                    table_ptr,
                    over_rows + grad + combines_before,
                    (number < E)[:, None] & (first + column < TILES_OF_GRAD[w]),
                    KIND_OF_GRAD[w],
                    (number // L)[:, None],
                    number[:, None],
                    first_block[:, None],
                    value_of(number, start, BLOCK_E)[:, None],
                    rows_here[:, None],
                    first + column,
                    (blocks_here * STRIPS_OF_PHASE[WAITS_FOR])[:, None],
                )
            first_grad += TILES_OF_GRAD[w]

    if COMBINE_KIND is not None:
        rank = tl.zeros_like(number)
        token, end, live_routes = number * BLOCK_T, tl.zeros_like(number) + T, tl.zeros_like(number) + tl.sum(rows)
        if token_start_ptr is not None:
            first_tile = 0
            for other in tl.static_range(W):
                start_of, end_of = tl.load(token_start_ptr + other), tl.load(token_start_ptr + other + 1)
                its = number >= first_tile
                rank = tl.where(its, other, rank)
                token = tl.where(its, start_of + (number - first_tile) * BLOCK_T, token)
                end = tl.where(its, end_of, end)
                live_routes = tl.where(its, tl.load(live_routes_ptr + other), live_routes)
                first_tile += tl.cdiv(end_of - start_of, BLOCK_T)
        before_combine = tl.minimum(ahead + number * step, grads)
        store_tiles(
            table_ptr,
            (over_rows + before_combine + number)[:, None],
            (number < combines)[:, None],
            COMBINE_KIND,
            rank[:, None],
            0,
            number[:, None],
            token[:, None],
            tl.minimum(end - token, BLOCK_T)[:, None],
            0,
            (live_routes * STRIPS_OF_PHASE[PHASES - 1])[:, None],
        )

    if part == 0:
        words = FIRST_COUNTER + PHASES * E + W
        for first in range(0, words, BLOCK_E):
            word = first + e
            tl.store(counters_ptr + word, tl.where(word == TILES, over_rows + grads + combines, 0), mask=word < words)


@triton.jit
def combine_tiles(T, token_start_ptr, W: tl.constexpr, COMBINE_KIND: tl.constexpr, BLOCK_T: tl.constexpr):
    """How many combine tiles there are."""
    tiles = T * 0
    if COMBINE_KIND is not None:
        if W == 1:
            tiles = tl.cdiv(T, BLOCK_T)
        else:
            for rank in tl.static_range(W):
                tokens = tl.load(token_start_ptr + rank + 1) - tl.load(token_start_ptr + rank)
                tiles += tl.cdiv(tokens, BLOCK_T)
    return tiles


# --8<-- [end:places]


# --8<-- [start:kernel]
@triton.jit(do_not_specialize=["R", "E"])
def plan_and_schedule_kernel(
    topk_ids_ptr,  # (T, K) int32 or int64, read, any strides
    count_ptr,  # (chunks, BLOCK_E) int32, written and read
    row_start_ptr,  # (E+1,) int32, written
    token_of_row_ptr,  # (R,) int32, written
    slot_of_row_ptr,  # (R,) int32, written
    row_of_slot_ptr,  # (T, K) int32, written
    table_ptr,  # (most tiles, 8) int32, written as far as there are tiles
    counters_ptr,  # (2 + counters,) int32, written
    words_ptr,  # (WORDS,) int32, zeros before and after: ticket, chunks counted, row_start written, programs that left
    R,
    E,
    stride_t,
    stride_k,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MOST_CHUNKS: tl.constexpr,
    KIND_OF_PHASE: tl.constexpr,  # a tuple, as the next three
    STRIPS_OF_PHASE: tl.constexpr,
    KIND_OF_GRAD: tl.constexpr,
    TILES_OF_GRAD: tl.constexpr,
    WAITS_FOR: tl.constexpr,
    COMBINE_KIND: tl.constexpr,  # None: no combine tiles
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    MIXED: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid: any number of programs. A ticket is a chunk to count, a chunk to place, or a part of the schedule.

    Waits on: to place, all chunks being counted; for a part, row_start. Signals: each chunk that is counted, and
    row_start. Who leaves last sets the words that all share back to zero.

    Example: topk_ids = [[2, 0], [-1, 2], [2, -1]], E = 3: row_start = [0, 1, 1, 4], and with the work of the example in
    mega_moe/schedule.py the table begins with the 8 rows written there, and counters = [0, 8, 0, 0, 0, 0, 0, 0, 0].
    """
    ticket_ptr, counted_ptr, row_start_written_ptr, left_ptr = words_ptr, words_ptr + 1, words_ptr + 2, words_ptr + 3
    chunks = tl.minimum(tl.maximum(tl.cdiv(R, BLOCK), 1), MOST_CHUNKS)
    most_blocks = tl.maximum(R // BLOCK_R + E, combine_tiles(R // K, None, 1, COMBINE_KIND, BLOCK_T))
    tickets = 2 * chunks + tl.cdiv(most_blocks, PART)
    ticket = draw(ticket_ptr)
    while ticket < tickets:
        if ticket < chunks:
            count_chunk(ticket, chunks, topk_ids_ptr, count_ptr, R, E, stride_t, stride_k, K, BLOCK, BLOCK_E)
            signal(counted_ptr, 1, False)
        elif ticket < 2 * chunks:
            chunk = ticket - chunks
            wait(counted_ptr, chunks, False)
            row_end, next_row = begin_chunk(chunk, chunks, count_ptr, BLOCK_C, BLOCK_E)
            if chunk == 0:
                store_row_start(row_start_ptr, row_end, E, BLOCK_E)
                signal(row_start_written_ptr, 1, False)
            place_chunk(
                chunk,
                chunks,
                next_row,
                tl.max(row_end),
                topk_ids_ptr,
                token_of_row_ptr,
                slot_of_row_ptr,
                row_of_slot_ptr,
                R,
                E,
                stride_t,
                stride_k,
                K,
                BLOCK,
                BLOCK_RANK,
                BLOCK_E,
            )
        else:
            wait(row_start_written_ptr, 1, False)
            write_part(
                ticket - 2 * chunks,
                row_start_ptr,
                None,
                None,
                table_ptr,
                counters_ptr,
                R // K,
                E,
                1,
                KIND_OF_PHASE,
                STRIPS_OF_PHASE,
                KIND_OF_GRAD,
                TILES_OF_GRAD,
                WAITS_FOR,
                COMBINE_KIND,
                BLOCK_R,
                BLOCK_T,
                GROUP,
                AHEAD,
                MIXED,
                PART,
                COLUMNS,
                BLOCK_E,
            )
        ticket = draw(ticket_ptr)

    if leave(left_ptr):
        tl.store(words_ptr + tl.arange(0, 4), 0)


@triton.jit(do_not_specialize=["T", "E"])
def schedule_kernel(
    row_start_ptr,  # (E+1,) int32, read
    table_ptr,  # (most tiles, 8) int32, written as far as there are tiles
    counters_ptr,  # (2 + counters,) int32, written
    T,
    E,
    KIND_OF_PHASE: tl.constexpr,  # a tuple, as the next three
    STRIPS_OF_PHASE: tl.constexpr,
    KIND_OF_GRAD: tl.constexpr,
    TILES_OF_GRAD: tl.constexpr,
    WAITS_FOR: tl.constexpr,
    COMBINE_KIND: tl.constexpr,  # None: no combine tiles
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    MIXED: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Grid: one program a part of the schedule.

    Example: that of plan_and_schedule_kernel, from its row_start.
    """
    write_part(
        tl.program_id(0),
        row_start_ptr,
        None,
        None,
        table_ptr,
        counters_ptr,
        T,
        E,
        1,
        KIND_OF_PHASE,
        STRIPS_OF_PHASE,
        KIND_OF_GRAD,
        TILES_OF_GRAD,
        WAITS_FOR,
        COMBINE_KIND,
        BLOCK_R,
        BLOCK_T,
        GROUP,
        AHEAD,
        MIXED,
        PART,
        COLUMNS,
        BLOCK_E,
    )


# --8<-- [end:kernel]


def plan_and_schedule(topk_ids: Tensor, num_experts: int, work: Work) -> tuple[Plan, Schedule]:
    """The plan of rows for topk_ids (T, K), any strides, and the schedule of `work` on it, in one launch.

    Every id outside 0 .. num_experts-1 is a masked route.
    """
    T, K = topk_ids.shape
    plan, made = empty_plan(topk_ids, num_experts), empty_schedule(topk_ids.device, T * K, num_experts, (T,), work)
    chunks, blocks, ranked = chunks_and_blocks(topk_ids, num_experts)
    count = topk_ids.new_empty(chunks, blocks["BLOCK_E"], dtype=torch.int32)
    sizes, parts = parts_of(T * K, num_experts, (T,), work)
    tickets = 2 * chunks + parts
    with shared_words(topk_ids.device) as words:
        plan_and_schedule_kernel[(min(tickets, programs(Resident(per_processor=4))),)](
            topk_ids,
            count,
            *plan,
            made.table,
            made.counters,
            words,
            T * K,
            num_experts,
            *topk_ids.stride(),
            MOST_CHUNKS=routes().MOST_CHUNKS,
            **blocks,
            **ranked,
            **sizes,
        )
    return plan, made


def schedule(plan: Plan, work: Work) -> Schedule:
    """The schedule of `work` on a plan that is there already, in one launch."""
    (T, K), E = plan.row_of_slot.shape, len(plan.row_start) - 1
    made = empty_schedule(plan.row_of_slot.device, T * K, E, (T,), work)
    sizes, parts = parts_of(T * K, E, (T,), work)
    schedule_kernel[(parts,)](
        plan.row_start,
        made.table,
        made.counters,
        T,
        E,
        BLOCK_E=triton.next_power_of_2(E),
        num_warps=routes().num_warps,
        **sizes,
    )
    return made


def empty_schedule(device: torch.device, R: int, E: int, tokens_per_rank: tuple[int, ...], work: Work) -> Schedule:
    """Memory for the schedule of a plan: of R rows at most, of E experts, and of the tokens of the ranks here."""
    index = lambda *shape: torch.empty(shape, dtype=torch.int32, device=device)
    tiles = most_tiles(R, E, tokens_per_rank, work)
    counters = number_of_counters(E, len(tokens_per_rank), work)
    return Schedule(index(tiles, len(COLUMNS)), index(FIRST_COUNTER.value + counters), work)


def parts_of(R: int, E: int, tokens_per_rank: tuple[int, ...], work: Work) -> tuple[dict[str, object], int]:
    """The kernels' constants for this work, and how many parts the schedule is written in. See `empty_schedule`."""
    PART, columns = (32, 64) if INTERPRETED else (4, 16)
    sizes = dict(
        KIND_OF_PHASE=tuple(phase.kind for phase in work.phases),
        STRIPS_OF_PHASE=tuple(phase.strips for phase in work.phases),
        KIND_OF_GRAD=tuple(phase.kind for phase in work.weight_grads),
        TILES_OF_GRAD=tuple(phase.strips for phase in work.weight_grads),
        WAITS_FOR=work.waits_for,
        COMBINE_KIND=COMBINE if work.combine else None,
        BLOCK_R=work.BLOCK_R,
        BLOCK_T=work.BLOCK_T,
        GROUP=work.group,
        AHEAD=work.ahead,
        MIXED=work.mixed,
        PART=PART,
        COLUMNS=columns,
    )
    combines = sum(triton.cdiv(T, work.BLOCK_T) for T in tokens_per_rank) if work.combine else 0
    most_blocks = max(R // work.BLOCK_R + E, combines)
    return sizes, triton.cdiv(most_blocks, PART)


@contextmanager
def shared_words(device: torch.device) -> Iterator[Tensor]:
    """Zeros for one launch on the current stream, which leaves them as zeros.

    The next launch on that stream gets the same ones, unless this one raises. A graph that is being captured gets its
    own: it may be replayed on any stream, beside launches of the one it was captured on.
    """
    zeros = lambda: torch.zeros(WORDS, dtype=torch.int32, device=device)
    if is_capturing(device):
        yield zeros()
        return
    key = (device, torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else (device.type,)
    words = KEPT.pop(key, None)
    words = kept(zeros, device) if words is None else words
    yield words
    KEPT[key] = words


def forward_work(problem: Problem, tiles: Mega) -> Work:
    """What forward does: over heaps dispatch, then gate_up with SwiGLU, down, combine."""
    phases = (strips("gate_up", problem.I, tiles.gate_up), strips("down", problem.H, tiles.down))
    work = Work(tiles.BLOCK_R, phases, (), 0, True, tiles.combine.BLOCK_R, tiles.group, tiles.ahead)
    return over_ranks(work, problem, tiles) if problem.tokens_per_rank else work


def backward_work(problem: Problem, tiles: Mega, need: Need, recompute: bool) -> Work:
    """What backward does for the needed gradients. recompute: pre was not saved, and gate_up makes it again. In 8 bits
    a weight gradient's tokens are quantised first, by dispatch."""
    H, I = problem.H, problem.I
    phases = [strips("gate_up", I, tiles.gate_up)] if recompute else []
    phases.append(strips("dact", I, tiles.dact))
    waits_for = len(phases) - 1
    if need.dx:
        phases.append(strips("dx", H, tiles.dx))
    grads = []
    if need.dw_gate_up:
        grads.append(matrix("dw_gate_up", 2 * I, H, tiles.dw_gate_up))
    if need.dw_down:
        grads.append(matrix("dw_down", I, H, tiles.dw_down))  # transposed: its rows are I
    work = Work(
        tiles.BLOCK_R,
        tuple(phases),
        tuple(grads),
        waits_for,
        need.dx or need.dtopk_weights,
        tiles.combine.BLOCK_R,
        tiles.group,
        tiles.ahead,
    )
    if problem.tokens_per_rank:
        return over_ranks(work, problem, tiles)
    return with_dispatch(work) if problem.precision != "bf16" and grads else work


def over_ranks(work: Work, problem: Problem, tiles: Mega) -> Work:
    """The same work where rows come through heaps."""
    work = with_dispatch(work)
    if problem.W == 1:
        return work
    return replace(work, group=group_over_ranks(problem, work, tiles, programs(tiles.gate_up)))


TILES_A_PROGRAM = 3.5
"""Of a turn, at least. With fewer, programs wait for tiles that are still being done. By the model of time groups that
are chosen so are at most 6 % slower than the best ones, and half a per cent on average (docs/scaling.md)."""


def group_over_ranks(problem: Problem, work: Work, tiles: Mega, programs: int) -> int:
    """Experts of a group where rows come from other ranks: two, that little has to arrive before the first tile is
    multiplied, or 4, 8, 16, ... until a turn has tiles enough; and two groups at least, so that rows of one travel
    while those of the other are multiplied.

    It follows from how many tokens ranks may have, not from how many they bring: all ranks have the same, and a number
    that changed from call to call would have kernels compiled anew.
    """
    p, L = problem, problem.E // problem.W
    routes = (p.max_tokens or max(p.tokens_per_rank)) * p.K  # as many rows as a rank gets, if all get as many
    of_expert = triton.cdiv(triton.cdiv(routes, L), work.BLOCK_R) * sum(phase.strips for phase in work.phases)
    group = tiles.group_over_ranks
    while group * of_expert * len(p.tokens_per_rank) < TILES_A_PROGRAM * programs and group < L:
        group *= 2
    return min(group, max(L // 2, 1))


def strips(kind: str, N: int, tile: Strips) -> Phase:
    """The tiles of a row block that is N columns wide."""
    return Phase(KINDS.index(kind), triton.cdiv(triton.cdiv(N, tile.BLOCK_N), tile.STRIP))


def matrix(kind: str, M: int, N: int, tile: WeightGrad) -> Phase:
    """The tiles of an expert's weight gradient, M by N."""
    return Phase(KINDS.index(kind), triton.cdiv(M, tile.BLOCK_M) * triton.cdiv(N, tile.BLOCK_N))
