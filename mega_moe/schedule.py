"""The schedule in plain torch: which tile of a layer comes when, and what it waits for.

A layer is cut into tiles, and a *schedule* is the table of all of them for one direction, one row a tile. Programs draw
its rows by ticket, in its order, and a program that has drawn a tile does nothing else until it has done it: it waits
until the tile's counter shows enough arrivals, computes, and adds to the counters of those who wait for it. So the
order is all there is to decide, and it decides two things.

*That nobody waits for ever.* Every tile waits for earlier tiles alone, in one order that all ranks share. Then the
earliest unfinished tile can always run: all before it are done, and it has been drawn or is the next to be. That holds
with any number of programs, even one a rank, and however they take turns. The order must be common to the ranks,
because ranks wait for each other in combine: two tables, each right by itself, can wait in a circle. Nor may tiles be
dealt out beforehand: a program that the device has not started yet would hold tiles that others wait for.

*That hardly anybody waits at all.* A tile that is drawn right after what it waits for has to wait as long as that
takes. So experts go in groups, and the groups are *lagged*: gate_up of one group is followed by down of the group
before it. Between a tile and what it waits for stand the tiles of another group, which take long enough.

    turn 0   gate_up of group 0
    turn 1   gate_up of group 1   down of group 0
    turn 2                        down of group 1

Over ranks rows travel, and a program that moves some multiplies nothing meanwhile. If all dispatch tiles of a turn
stood together, all programs would draw them together and wait for the links; then all would multiply, and the links
would rest. So there the phases of a turn are *mixed* evenly: at any time a few programs move rows while the others
multiply. Waits still point backwards, for what a tile waits for is of an earlier turn. And groups are small there,
since nothing can be multiplied before rows of the first have arrived. (docs/scaling.md has what that is worth.)

    turn 1   dispatch of group 1 and gate_up of group 0:   g d g g d g

What stands last, the *tail*, is chosen for its end. A weight gradient sums over all rows of its expert, so its tiles
take as long as the expert is popular: the longest come first, for whoever begins a long one last keeps all others
waiting. Combine tiles wait for rows from every rank, and weight gradients wait for no other rank: so combine tiles are
woven into them, a few tiles in, and rows travel while weight gradients are multiplied.

Example: E=3, one rank of T=3 tokens, row_start = [0, 1, 1, 4], and a forward of phases gate_up and down, a strip each,
with BLOCK_R = BLOCK_T = 2. Groups are of two experts: experts 0 and 1, of which the latter has no rows, and expert 2.

    kind     rank  expert  block  row  rows  column  arrivals
    gate_up     0       0      0    0     1       0         0    turn 0
    gate_up     0       2      1    1     2       0         0    turn 1
    gate_up     0       2      2    3     1       0         0
    down        0       0      0    0     1       0         1    expert 0 has one block
    down        0       2      1    1     2       0         2    turn 2: expert 2 has two
    down        0       2      2    3     1       0         2
    combine     0       0      0    0     2       0         4    the tail: four rows have to arrive
    combine     0       0      1    2     1       0         4
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil

import torch
from torch import Tensor

from .shapes import Plan

KINDS = ("dispatch", "gate_up", "down", "dact", "dx", "dw_gate_up", "dw_down", "combine")
"""What a tile computes. A kind is its index here."""

STEP_OF_KIND = {
    "dispatch": "dispatch",
    "gate_up": "gate_up",
    "down": "down",
    "dact": "swiglu",
    "dx": "gate_up",
    "dw_gate_up": "gate_up",
    "dw_down": "down",
    "combine": "combine",
}
"""The step of the layer, forward or backward, that a kind belongs to."""

COLUMNS = ("kind", "rank", "expert", "block", "row", "rows", "column", "arrivals")
"""The columns of a schedule.

    kind      which of KINDS
    rank      who computes it: the rank that owns the expert; of a combine tile, the tokens' home
    expert    0 .. E-1, over all ranks; 0 for combine
    block     number of the row block: every expert has whole blocks of BLOCK_R rows, and all stand side by side,
              expert by expert; of a weight gradient, the expert's first row block; of combine, number of the block of
              tokens, over all ranks
    row       first row of the block; of a weight gradient, of the expert; of combine, first token, where the ranks'
              tokens stand one after another
    rows      how many rows the block holds; of a weight gradient, the expert; of combine, how many tokens
    column    which of the tiles that stand side by side: in a row block, or in the expert's matrix
    arrivals  how much the tile's counter must show before the tile may start; 0: it waits for nothing
"""

KIND, RANK, EXPERT, BLOCK, ROW, ROWS, COLUMN, ARRIVALS = range(len(COLUMNS))
COMBINE = KINDS.index("combine")


@dataclass(frozen=True)
class Phase:
    """Tiles of one kind.

    Attributes:
        kind: which of KINDS.
        strips: how many tiles stand side by side, in a row block or, of a weight gradient, in an expert's matrix.
    """

    kind: int
    strips: int


@dataclass(frozen=True)
class Work:
    """What there is to do in one direction, whatever the routing.

    Attributes:
        BLOCK_R: rows of a row block.
        phases: what is done to row blocks. Each phase of an expert waits until the one before has done all of it.
        weight_grads: what is done to experts, after the phases. () for none.
        waits_for: the number of the phase, among phases, that weight gradients of the same expert wait for.
        combine: whether there are combine tiles, which wait for all that the last phase makes of a rank's tokens.
        BLOCK_T: tokens of a combine tile.
        group: experts of a group, on each rank.
        ahead: weight-gradient tiles that stand before the first combine tile.
        mixed: whether the phases of a turn are mixed evenly, and not one behind the other.
    """

    BLOCK_R: int
    phases: tuple[Phase, ...]
    weight_grads: tuple[Phase, ...]
    waits_for: int
    combine: bool
    BLOCK_T: int
    group: int
    ahead: int
    mixed: bool = False


def with_dispatch(work: Work, strips: int = 1) -> Work:
    """The same work where rows have to be fetched from their tokens' ranks first: a phase before all others, mixed with
    them."""
    phases = (Phase(KINDS.index("dispatch"), strips), *work.phases)
    return replace(work, phases=phases, waits_for=work.waits_for + 1, mixed=True)


def schedule(
    row_start: Tensor, tokens_of_rank: Sequence[int], live_routes_of_rank: Sequence[int], work: Work
) -> Tensor:
    """The table (tiles, 8) int32, its columns COLUMNS, on the device of row_start. Read on the host: this waits.

    row_start: (E+1,) int32, the plan's, over the experts of all ranks.
    tokens_of_rank: W numbers.
    live_routes_of_rank: W numbers: of each rank's tokens, the routes that are not masked (see `home_of_row`).

    Raises ValueError where W does not divide E, or the live routes are not as many as the rows.
    """
    starts = row_start.tolist()
    E, W = len(starts) - 1, len(tokens_of_rank)
    if E % W:
        raise ValueError(f"{E} experts cannot be shared evenly by {W} ranks: W must divide E")
    if len(live_routes_of_rank) != W or sum(live_routes_of_rank) != starts[-1]:
        raise ValueError(f"live_routes_of_rank must be {W} numbers that add up to {starts[-1]} rows")

    tiles = _over_rows(starts, W, work)
    gradients = _weight_gradients(starts, W, work)
    combines = _combines(tokens_of_rank, live_routes_of_rank, work) if work.combine else []
    tiles += weave(gradients, combines, work.ahead)
    return torch.tensor(tiles, dtype=torch.int32, device=row_start.device).view(-1, len(COLUMNS))


def _over_rows(starts: list[int], W: int, work: Work) -> list[list[int]]:
    """The tiles of all phases, in lagged groups: phase p of group g belongs to turn g + p."""
    P, groups = len(work.phases), ceil((len(starts) - 1) // W / work.group)
    tiles = []
    for turn in range(groups + P - 1):
        several = [_of_group(starts, W, work, p, turn - p) for p in range(P) if 0 <= turn - p < groups]
        tiles += mix(several) if work.mixed else chain(*several)
    return tiles


def _of_group(starts: list[int], W: int, work: Work, p: int, group: int) -> list[list[int]]:
    """The tiles of one phase of one group, rank by rank."""
    L, phase, first_blocks = (len(starts) - 1) // W, work.phases[p], first_block_of_expert(starts, work.BLOCK_R)
    tiles = []
    for rank in range(W):
        for local in range(group * work.group, min((group + 1) * work.group, L)):
            e = rank * L + local
            blocks = first_blocks[e + 1] - first_blocks[e]
            arrivals = blocks * work.phases[p - 1].strips if p > 0 else 0
            for b in range(blocks):
                row = starts[e] + b * work.BLOCK_R
                rows = min(starts[e + 1] - row, work.BLOCK_R)
                for column in range(phase.strips):
                    tiles.append([phase.kind, rank, e, first_blocks[e] + b, row, rows, column, arrivals])
    return tiles


def mix(phases: Sequence[list]) -> list:
    """The tiles of a turn's phases mixed evenly: tile i of n of a phase stands (i + 1/2) / n of the way through the
    turn; of those at the same place the lower phase comes first.

    So each phase goes its way steadily: where it has done a share of its tiles, each other phase has done as large a
    share, to within half a tile of each.

    Example: two tiles of dispatch and four of gate_up.
        [d0, d1], [g0, g1, g2, g3] -> g0 d0 g1 g2 d1 g3
    """
    places = [((i + 0.5) / len(tiles), p, tile) for p, tiles in enumerate(phases) for i, tile in enumerate(tiles)]
    return [tile for *_, tile in sorted(places, key=lambda place: place[:2])]


def _weight_gradients(starts: list[int], W: int, work: Work) -> list[list[int]]:
    """The tiles of all experts' weight gradients, longest expert first, of equals the lower.

    An expert without rows has tiles too: they store zeros, and wait for nothing.
    """
    if not work.weight_grads:
        return []
    E, first_blocks = len(starts) - 1, first_block_of_expert(starts, work.BLOCK_R)
    rows = [starts[e + 1] - starts[e] for e in range(E)]
    tiles = []
    for e in sorted(range(E), key=lambda e: (-rows[e], e)):
        arrivals = (first_blocks[e + 1] - first_blocks[e]) * work.phases[work.waits_for].strips
        for phase in work.weight_grads:
            for column in range(phase.strips):
                tiles.append([phase.kind, e // (E // W), e, first_blocks[e], starts[e], rows[e], column, arrivals])
    return tiles


def _combines(tokens_of_rank: Sequence[int], live_routes_of_rank: Sequence[int], work: Work) -> list[list[int]]:
    """The combine tiles, rank by rank, block by block."""
    tiles, first = [], 0
    for rank, tokens in enumerate(tokens_of_rank):
        arrivals = int(live_routes_of_rank[rank]) * work.phases[-1].strips
        for t in range(0, tokens, work.BLOCK_T):
            tiles.append([COMBINE, rank, 0, len(tiles), first + t, min(tokens - t, work.BLOCK_T), 0, arrivals])
        first += tokens
    return tiles


def weave(gradients: list, combines: list, ahead: int) -> list:
    """The tail: combine tiles at equal distances among the weight gradients, the first after `ahead` of them.

    Combine tile j stands before weight gradient first + j*every, or behind the last.

    Example: five weight gradients, two combine tiles, ahead = 1: so first = 1 and every = 2.
        w0 c0 w1 w2 c1 w3 w4
    """
    D, C = len(gradients), len(combines)
    first = min(ahead, D)
    every = max((D - first) // max(C, 1), 1)
    tail, done = [], 0
    for j, combine in enumerate(combines):
        before = min(first + j * every, D)
        tail += [*gradients[done:before], combine]
        done = before
    return tail + gradients[done:]


def first_block_of_expert(starts: Sequence[int], BLOCK_R: int) -> list[int]:
    """E+1 numbers: of each expert the number of its first row block; the last is how many there are."""
    first_blocks = [0]
    for e in range(len(starts) - 1):
        first_blocks.append(first_blocks[e] + ceil((starts[e + 1] - starts[e]) / BLOCK_R))
    return first_blocks


def most_tiles(R: int, E: int, tokens_of_rank: Sequence[int], work: Work) -> int:
    """How many tiles a schedule has at most, whatever the routing: so much memory it needs.

    An expert's last block may be padded, so R rows of E experts never fill more than R // BLOCK_R + E blocks.
    """
    over_rows = (R // work.BLOCK_R + E) * sum(phase.strips for phase in work.phases)
    gradients = E * sum(phase.strips for phase in work.weight_grads)
    combines = sum(ceil(tokens / work.BLOCK_T) for tokens in tokens_of_rank) if work.combine else 0
    return over_rows + gradients + combines


# Counters. Counter p*E + e counts the tiles of phase p of expert e that are done. Counter P*E + r, where P is the
# number of phases, counts the rows that tiles of the last phase have sent home to rank r: each as often as there are
# strips.


def number_of_counters(E: int, W: int, work: Work) -> int:
    """How many counters a schedule uses. All start at zero."""
    return len(work.phases) * E + W


def counter_of(tile: Sequence[int], E: int, work: Work) -> int | None:
    """The counter that a tile (8 numbers) waits for; None where it waits for nothing."""
    if tile[ARRIVALS] == 0:
        return None
    if tile[KIND] == COMBINE:
        return len(work.phases) * E + tile[RANK]
    p = _phase_of(tile, work)
    return (work.waits_for if p is None else p - 1) * E + tile[EXPERT]


def signals_of(tile: Sequence[int], E: int, work: Work, homes: Sequence[int]) -> list[tuple[int, int]]:
    """The counters to which a tile adds when it is done, and how much to each.

    homes: of each live row, the rank of its token: `home_of_row` as a list.
    """
    p = _phase_of(tile, work)
    if p is None:
        return []
    signals = [(p * E + tile[EXPERT], 1)]
    if work.combine and p == len(work.phases) - 1:
        rows = homes[tile[ROW] : tile[ROW] + tile[ROWS]]
        signals += [(len(work.phases) * E + rank, rows.count(rank)) for rank in sorted(set(rows))]
    return signals


def _phase_of(tile: Sequence[int], work: Work) -> int | None:
    """The number of a tile's phase; None for weight gradients and combine."""
    kinds = [phase.kind for phase in work.phases]
    return kinds.index(tile[KIND]) if tile[KIND] in kinds else None


def home_of_row(plan: Plan, tokens_of_rank: Sequence[int]) -> Tensor:
    """The rank whose token each live row is a copy of: (rows,) int64.

    tokens_of_rank: W numbers; the plan's tokens are those of rank 0, then those of rank 1, and so on.

    Example: two ranks with one token and two, token_of_row = [0, 1, 0, 2, 2, -1]: [0, 1, 0, 1, 1]. So the ranks have
    2 and 3 live routes, which is what `home_of_row(...).bincount(minlength=W)` counts.
    """
    tokens = torch.tensor(tokens_of_rank, device=plan.token_of_row.device)
    home_of_token = torch.arange(len(tokens), device=tokens.device).repeat_interleave(tokens)
    return home_of_token[plan.token_of_row[plan.token_of_row >= 0].long()]
