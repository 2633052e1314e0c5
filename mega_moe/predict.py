"""How long a layer takes on hardware that is not here: the real schedule, played with measured tile times and links.

`simulate` plays order and waiting, in steps. Here a tile lasts as long as it was measured to last, and rows travel over
links that programs share: the more of them move rows at once, the less each gets. So this tells what bounds a layer
over W ranks (products, links, or an order in which one waits for the other), before anybody has W GPUs.

In 8 bits the bytes of codes and scales are counted, over links and on the device. Products are taken to last as long as
bf16's, for in one launch they have not been measured; in a launch each they were not shorter.

What is taken from measurements is in `Machine`, ten-odd numbers, none of which belongs to one layer alone. What is
played is schedule.py's table of a routing that samples.py drew, with the block sizes of kernels/blocks.py.

Ranks that each have a GPU are alike: one is played, the one that has most row blocks to multiply. Of its peers it is
assumed that they keep time with it: they pull from it while it pulls from them, and have pushed their last row when it
has. So one rank's traffic is what its own link carries in either direction.
"""

import heapq
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

import torch

from .kernels.blocks import Mega, Persistent, Strips, WeightGrad, blocks_of_target, nearest
from .kernels.schedule import backward_work, forward_work, group_over_ranks
from .registry import stage
from .routing import plan
from .samples import random_inputs
from .schedule import (
    COMBINE,
    KINDS,
    Work,
    counter_of,
    first_block_of_expert,
    home_of_row,
    schedule,
)
from .shapes import PRESETS, Need, Problem
from .symmetric import shares

RUNGS = ("persistent", "ranks", "mega")
"""The rungs that can be predicted: those whose products are resident programs."""

PULL, PUSH, NETWORK = range(3)
"""What rows travel by. A pull and a push share the links of one node."""

DRAWN = 8
"""Routes are drawn for the tokens of so many ranks at most. Of more ranks, each such rank stands for several."""


@dataclass(frozen=True)
class Machine:
    """What was measured of one kind of GPU, its links and its network. Seconds and bytes.

    Attributes:
        name: what it is.
        programs: how many draw tickets, one a processor.
        unit: of a tile of 128 x 256, a unit of its contraction, under load.
        tile: what a tile takes besides; of a flattened strip the first alone.
        epilogue: a byte that an epilogue moves beyond its tile's own result.
        memory: bytes a second, read and written together, of all programs that move rows on the device.
        launch: between two launches.
        plan_and_schedule: forward's first launch. schedule: backward's.
        flag: from a signal to who waits for it on another GPU.
        pull: (programs, bytes a second each way) of so many programs that pull rows at once. push: likewise.
        domain: how many GPUs share such links. Beyond them lies the network.
        network: bytes a second, each way, of each GPU, however many programs send.
    """

    name: str
    programs: int
    unit: float
    tile: float
    epilogue: float
    memory: float
    launch: float
    plan_and_schedule: float
    schedule: float
    flag: float
    pull: tuple[tuple[int, float], ...]
    push: tuple[tuple[int, float], ...]
    domain: int
    network: float

    def at(self, **changes) -> "Machine":
        """The same machine with some numbers changed."""
        return replace(self, **changes)

    def rate(self, lane: int, programs: int) -> float:
        """Bytes a second of each of so many programs that move rows at once."""
        if lane == NETWORK:
            return self.network / programs
        return along((self.pull, self.push)[lane], programs) / programs

    def best(self, lane: int) -> float:
        """Bytes a second of all programs together, at most."""
        if lane == NETWORK:
            return self.network
        return max(rate for _, rate in (self.pull, self.push)[lane])


def along(curve: Sequence[tuple[int, float]], n: int) -> float:
    """A curve of (n, value) at n: straight between its points, through zero before the first, level behind the last.

    Example: along(((8, 80.0), (16, 120.0)), n) is 40 at n = 4, 100 at 12 and 120 at 132.
    """
    points = [(0, 0.0), *curve]
    right = bisect_left([at for at, _ in points], n)
    if right == len(points):
        return points[-1][1]
    (n0, low), (n1, high) = points[max(right - 1, 0)], points[right]
    return high if n1 == n0 else low + (high - low) * (n - n0) / (n1 - n0)


H200 = Machine(
    name="H200, NVLink with 18 links, 400 Gb/s of network a GPU",
    programs=132,
    # These three from six kernels of one layer, each alone: see `calibrate`.
    unit=13.0e-9,
    tile=4.3e-6,
    epilogue=57e-12,
    memory=4.3e12,
    launch=4e-6,
    plan_and_schedule=43e-6,
    schedule=6e-6,
    flag=2.7e-6,
    pull=tuple(zip((8, 16, 24, 32, 64, 132), (86e9, 164e9, 238e9, 295e9, 310e9, 315e9))),
    push=tuple(zip((8, 16, 24, 32, 64, 132), (214e9, 296e9, 304e9, 312e9, 330e9, 332e9))),
    domain=8,
    network=50e9,
)
"""One H200 as this project measured it, two of them with the NVLink between; the network is a data sheet's."""


# Playing tickets.


class Ticket(NamedTuple):
    """One tile, or a strip of them, to be drawn once.

    Attributes:
        kind: which of KINDS.
        seconds: of work in its program.
        counter: what it waits for; -1 for nothing. arrivals: how much that must show.
        signals: (counter, how much) it adds to when it is done.
        moves: (lane, bytes) that it moves after its work, one after another.
    """

    kind: int
    seconds: float
    counter: int = -1
    arrivals: int = 0
    signals: tuple[tuple[int, int], ...] = ()
    moves: tuple[tuple[int, float], ...] = ()


class Span(NamedTuple):
    """What one program does with one ticket. In seconds.

    Attributes:
        program: its number.
        ticket: which, counted from 0.
        drawn: when it drew the ticket; from here on it waits.
        start: when the ticket's counter showed enough arrivals; from here on it works.
        moving: when its work was done; from here on it moves rows.
        end: when its last row had arrived.
    """

    program: int
    ticket: int
    drawn: float
    start: float
    moving: float
    end: float


@dataclass(frozen=True)
class Played:
    """How it went. In seconds.

    Attributes:
        seconds: until the last ticket was done.
        working: of each kind, by all programs together, without what moves rows between GPUs.
        moving: of all programs together.
        waiting: of all programs together, with a ticket in hand.
        bytes: by lane.
        spans: of each ticket, in the order in which they end; () where several launches are summed up.
    """

    seconds: float
    working: dict[str, float]
    moving: float
    waiting: float
    bytes: tuple[float, float, float]
    spans: tuple[Span, ...] = ()


def play(tickets: Sequence[Ticket], machine: Machine) -> Played:
    """What a GPU's programs do with these tickets, which they draw in this order.

    Programs that move rows share the links: each of n gets `machine.rate(lane, n)`, from one event to the next. What a
    program has got of a lane since the beginning is the same for all that move in it; so whoever enters a lane leaves
    it when that sum has grown by what it moves, and the next to leave is the least of a heap.

    Raises RuntimeError where programs wait and none works.
    """
    rates = {lane: [0.0, *(machine.rate(lane, n) for n in range(1, machine.programs + 1))] for lane in range(3)}
    counters: dict[int, int] = {}
    waiting: dict[int, list[tuple[int, float]]] = {}  # counter -> [(ticket, since when)]
    working: list[tuple[float, int, int]] = []  # (end, order, ticket)
    moving: list[list[tuple[float, int, int, int, float]]] = [[], [], []]  # (got, order, ticket, move, since when)
    got, each = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    order, drawn, now = count(), iter(range(len(tickets))), 0.0
    worked, moved, waited, carried = [0.0] * len(KINDS), 0.0, 0.0, [0.0, 0.0, 0.0]
    noted: dict[int, list] = {}  # ticket -> [program, ticket, drawn, start, moving]
    spans: list[Span] = []

    def share() -> None:
        on_links = len(moving[PULL]) + len(moving[PUSH])
        each[PULL], each[PUSH] = rates[PULL][on_links], rates[PUSH][on_links]
        each[NETWORK] = rates[NETWORK][len(moving[NETWORK])]

    def begin(ticket: int) -> None:
        seconds = tickets[ticket].seconds
        worked[tickets[ticket].kind] += seconds
        noted[ticket] += [now, now + seconds]
        heapq.heappush(working, (now + seconds, next(order), ticket))

    def draw(program: int) -> None:
        ticket = next(drawn, None)
        if ticket is None:
            return
        noted[ticket] = [program, ticket, now]
        t = tickets[ticket]
        if t.counter < 0 or counters.get(t.counter, 0) >= t.arrivals:
            begin(ticket)
        else:
            waiting.setdefault(t.counter, []).append((ticket, now))

    def move(ticket: int, which: int) -> None:
        """The next of a ticket's moves; if there is none it is done."""
        nonlocal waited
        t = tickets[ticket]
        if which < len(t.moves):
            lane, size = t.moves[which]
            carried[lane] += size
            heapq.heappush(moving[lane], (got[lane] + size, next(order), ticket, which, now))
            share()
            return
        for counter, arrivals in t.signals:
            counters[counter] = counters.get(counter, 0) + arrivals
            if counter in waiting:
                held = waiting.pop(counter)
                for other, since in held:
                    if counters[counter] >= tickets[other].arrivals:
                        waited += now - since
                        begin(other)
                    else:
                        waiting.setdefault(counter, []).append((other, since))
        spans.append(Span(*noted.pop(ticket), now))
        draw(spans[-1].program)

    for program in range(machine.programs):
        draw(program)
    while True:
        first, lane = (working[0][0] if working else inf), None
        for candidate in range(3):
            if moving[candidate]:
                end = now + (moving[candidate][0][0] - got[candidate]) / each[candidate]
                if end < first:
                    first, lane = end, candidate
        if first == inf:
            break
        for candidate in range(3):
            if moving[candidate]:
                got[candidate] += each[candidate] * (first - now)
        now = first
        if lane is None:
            _, _, ticket = heapq.heappop(working)
            move(ticket, 0)
        else:
            reached, _, ticket, which, since = heapq.heappop(moving[lane])
            got[lane] = reached  # exactly, whatever the additions above have lost
            moved += now - since
            share()
            move(ticket, which + 1)

    if waiting:
        raise RuntimeError(f"{sum(map(len, waiting.values()))} programs wait for what nobody will ever do")
    return Played(now, {k: s for k, s in zip(KINDS, worked) if s}, moved, waited, tuple(carried), tuple(spans))


# From a layer to tickets.


def seconds_of(
    machine: Machine, problem: Problem, tiles: Persistent, kind: str, rows: int, tiles_side_by_side: int = 1
) -> float:
    """What a ticket of a product takes. tiles_side_by_side: of a strip. rows: of a weight gradient, its expert's, which
    it adds up; others multiply a block as a whole, however many rows it holds."""
    p, tile = problem, getattr(tiles, kind)
    if isinstance(tile, WeightGrad):
        area, depth = tile.BLOCK_M * tile.BLOCK_N, ceil(rows / tile.BLOCK_R) * tile.BLOCK_R
        return machine.tile + depth * machine.unit * area / (128 * 256)
    area = tiles.BLOCK_R * tile.BLOCK_N * (2 if kind == "gate_up" else 1)
    depth = {"gate_up": p.H, "down": p.I, "dact": p.H, "dx": 2 * p.I}[kind]
    # Beside a result of its own size: gate_up stores act too; dact reads pre, twice as wide, and stores dpre and the
    # weighted act instead of dact.
    beyond = {"gate_up": 0.5 if p.save == "pre" else 0.0, "dact": 4.0}.get(kind, 0.0) * area * p.dtype.itemsize
    each = depth * machine.unit * area / (128 * 256) + beyond * machine.epilogue
    return tiles_side_by_side * each + machine.tile * (1 if tile.FLATTEN else tiles_side_by_side)


class Ways(NamedTuple):
    """How much of a rank's rows comes from where, and goes there: shares that add up to 1.

    Attributes:
        here: from the rank's own heap.
        links: from peers of its node.
        network: from other nodes.
    """

    here: float = 1.0
    links: float = 0.0
    network: float = 0.0

    def moves(self, lane: int, bytes: float) -> tuple[tuple[int, float], ...]:
        """What of so many bytes travels by a lane, and what by the network."""
        return tuple((by, share * bytes) for by, share in ((lane, self.links), (NETWORK, self.network)) if share)


ALL_HERE = Ways()


def ways(machine: Machine, W: int) -> Ways:
    """Of W ranks with a GPU each, every rank's tokens routed alike."""
    near = min(W, machine.domain)
    return Ways(1 / W, (near - 1) / W, (W - near) / W)


@dataclass(frozen=True)
class Share:
    """What one GPU has to do: all of a layer, or one rank's part.

    Attributes:
        row_start: (experts + 1) numbers, the rows of its experts.
        tokens_of_rank: of the ranks that it holds.
        home_of_row: of each row the rank of its token, among those that it holds.
        ways: where its rows come from.
        copies: copies that dispatch fetches of a token for each route that leaves its rank: 1; deduplicated, fewer.
    """

    row_start: tuple[int, ...]
    tokens_of_rank: tuple[int, ...]
    home_of_row: tuple[int, ...]
    ways: Ways = ALL_HERE
    copies: float = 1.0

    @property
    def rows(self) -> list[int]:
        """Of each expert."""
        return [end - start for start, end in zip(self.row_start, self.row_start[1:])]


@cache
def all_of_it(T: int, E: int, K: int, W: int, routing: str, seed: int) -> Share:
    """The whole layer on one GPU, which holds the tokens of W ranks."""
    rows, tokens_of_rank = plan(drawn_ids(T, E, K, routing, seed), E), shares(T, W)
    return Share(tuple(rows.row_start.tolist()), tokens_of_rank, tuple(home_of_row(rows, tokens_of_rank).tolist()))


@cache
def busiest(T: int, E: int, K: int, W: int, routing: str, seed: int, BLOCK_R: int, there: Ways, dedup: bool) -> Share:
    """Of W ranks with T tokens each, the one with most row blocks."""
    drawn = min(W, DRAWN)
    ids, L = drawn_ids(T * drawn, E, K, routing, seed), E // W
    rows = [routes * W // drawn for routes in ids.flatten().bincount(minlength=E).tolist()]
    rank = max(range(W), key=lambda rank: sum(ceil(n / BLOCK_R) for n in rows[rank * L : (rank + 1) * L]))
    starts = [0]
    for n in rows[rank * L : (rank + 1) * L]:
        starts.append(starts[-1] + n)
    owners = torch.zeros(len(ids), W).scatter_(1, ids // L, 1.0)
    copies = owners.sum().item() / ids.numel() if dedup else 1.0
    return Share(tuple(starts), (T,), (0,) * starts[-1], there, copies)


def drawn_ids(T: int, E: int, K: int, routing: str, seed: int) -> torch.Tensor:
    """topk_ids (T, K) as samples.py draws them on a CPU; the tensors that nobody asks for are small."""
    p = Problem(T, 1, 1, E, K, dtype=torch.float32, device="cpu")
    return random_inputs(p, routing, seed)[0].topk_ids


CODE = 1 + 4 / 128
"""Bytes of a code, and its part of a scale."""


class Row(NamedTuple):
    """Bytes of a row that dispatch brings in a direction, of x, backward of dy too.

    Attributes:
        pulled: from where it is published.
        stored: into pools.
    """

    pulled: float
    stored: float


def row_of(problem: Problem, direction: str) -> Row:
    """In 8 bits forward pulls codes. Backward pulls rows as they are, and stores codes of each by row and by column; x
    by row as it is, where forward has not read it as codes."""
    H, as_it_is = problem.H, problem.H * problem.dtype.itemsize
    if direction == "forward":
        pulled = H + 4 * problem.token_scales if problem.token_scales else as_it_is
        return Row(pulled, pulled)
    stored = {"bf16": 2 * as_it_is, "fp8": 4 * H * CODE, "fp8_bwd": 3 * H * CODE + as_it_is}
    return Row(2 * as_it_is, stored[problem.precision])


def dispatch_ticket(machine: Machine, share: Share, rows: int, BLOCK_R: int, row: Row) -> Ticket:
    """Pull a block's rows into whole blocks of the pools: each is read and written."""
    copied = row.pulled * rows * (1 - share.copies * (1 - share.ways.here)) + row.stored * BLOCK_R
    moves = share.ways.moves(PULL, row.pulled * rows * share.copies)
    return Ticket(KINDS.index("dispatch"), copied / (machine.memory / machine.programs), moves=moves)


def combine_seconds(machine: Machine, problem: Problem, tokens: int) -> float:
    """A program adds up the slots of so many tokens: reads K rows of each and writes one."""
    return tokens * (problem.K + 1) * problem.H * problem.dtype.itemsize / (machine.memory / machine.programs)


def tickets_of(
    machine: Machine, problem: Problem, tiles: Mega, work: Work, share: Share, direction: str
) -> list[Ticket]:
    """The tickets of one launch of rung mega, in the order of the schedule."""
    p, E, W = problem, len(share.row_start) - 1, len(share.tokens_of_rank)
    live = [share.home_of_row.count(rank) for rank in range(W)] if W > 1 else [share.row_start[-1]]
    table = schedule(torch.tensor(share.row_start), share.tokens_of_rank, live, work).tolist()
    names = [KINDS[phase.kind] for phase in work.phases]
    last, strips = len(names) - 1, {phase.kind: phase.strips for phase in work.phases}
    columns = {"gate_up": p.I, "down": p.H, "dact": p.I, "dx": p.H}
    homes: dict[int, tuple[tuple[int, int], ...]] = {}  # by block
    known: dict[tuple, float] = {}

    def product_seconds(kind: str, rows: int, column: int) -> float:
        tile, several = getattr(tiles, kind), 1
        if isinstance(tile, Strips):
            rows, several = 0, min(ceil(columns[kind] / tile.BLOCK_N) - column * tile.STRIP, tile.STRIP)
        key = (kind, rows, several)
        if key not in known:
            of = p.at(save="inputs") if direction == "backward" else p  # backward's gate_up stores pre alone
            known[key] = seconds_of(machine, of, tiles, kind, rows, several)
        return known[key]

    def sent_home(row: int, block: int, rows: int) -> tuple[tuple[int, int], ...]:
        if block not in homes:
            those = share.home_of_row[row : row + rows]
            homes[block] = tuple((len(names) * E + rank, those.count(rank)) for rank in set(those))
        return homes[block]

    tickets = []
    for tile in table:
        kind, _, expert, block, row, rows, column, arrivals = tile
        name = KINDS[kind]
        counter = counter_of(tile, E, work)
        counter = -1 if counter is None else counter
        if kind == COMBINE:
            tickets.append(Ticket(kind, combine_seconds(machine, p, rows), counter, arrivals))
            continue
        moves = ()
        if name == "dispatch":
            made = dispatch_ticket(machine, share, rows, work.BLOCK_R, row_of(p, direction))
            seconds, moves = (
                made.seconds / strips[kind],
                tuple((lane, size / strips[kind]) for lane, size in made.moves),
            )
        else:
            seconds = product_seconds(name, rows, column)
        if name not in names:
            tickets.append(Ticket(kind, seconds, counter, arrivals))
            continue
        signals = ((names.index(name) * E + expert, 1),)
        if names.index(name) == last and work.combine:
            signals += sent_home(row, block, rows)
            moves = share.ways.moves(PUSH, rows * p.H * p.dtype.itemsize / strips[kind])
        tickets.append(Ticket(kind, seconds, counter, arrivals, signals, moves))
    return tickets


def launch_of(
    machine: Machine, problem: Problem, tiles: Persistent, share: Share, kind: str, save: str
) -> list[Ticket]:
    """The tickets of one kind in a launch of its own, as rung persistent draws them; gate_up's epilogue is `save`'s."""
    p, tile, number = problem.at(save=save), getattr(tiles, kind), KINDS.index(kind)
    if isinstance(tile, WeightGrad):
        M, N = (p.I, p.H) if kind == "dw_down" else (2 * p.I, p.H)
        each = ceil(M / tile.BLOCK_M) * ceil(N / tile.BLOCK_N)
        longest = sorted(share.rows, reverse=True)
        return [Ticket(number, seconds_of(machine, p, tiles, kind, n)) for n in longest for _ in range(each)]
    blocks = first_block_of_expert(share.row_start, tiles.BLOCK_R)[-1]
    columns = ceil((p.I if kind in ("gate_up", "dact") else p.H) / tile.BLOCK_N)
    strips = [min(tile.STRIP, columns - first) for first in range(0, columns, tile.STRIP)]
    of_block = [Ticket(number, seconds_of(machine, p, tiles, kind, 0, several)) for several in strips]
    return of_block * blocks


# Whole directions.


@dataclass(frozen=True)
class Prediction:
    """One direction of a layer. Milliseconds of the GPU that is played.

    Attributes:
        direction: "forward" or "backward".
        ms: how long it takes.
        products: what everything but the exchange between GPUs takes, if all programs share it evenly and none waits.
        links: what rows take over the links of a node, if these never rest. network: over the network.
        moving: while programs move rows between GPUs, on average over programs.
        waiting: while programs wait with a ticket, on average over programs.
    """

    direction: str
    ms: float
    products: float
    links: float
    network: float
    moving: float
    waiting: float

    @property
    def exchange(self) -> float:
        """Milliseconds below which the exchange cannot go: links and network work at once."""
        return max(self.links, self.network)

    @property
    def bound(self) -> str:
        """What takes longest by itself: "products", "links" or "network"; "order" where that is less than four
        fifths of the time, so that more is to be had from an order in which one hides the other."""
        longest = max(("products", "links", "network"), key=lambda name: getattr(self, name))
        return longest if getattr(self, longest) >= 0.8 * self.ms else "order"

    @property
    def overlap(self) -> float:
        """Which share of the shorter of both, products and exchange, is hidden behind the other; 1 where there is no
        exchange."""
        shorter = min(self.products, self.exchange)
        return min(max((self.products + self.exchange - self.ms) / shorter, 0.0), 1.0) if shorter else 1.0

    def as_json(self) -> dict:
        """Its fields, bound and overlap."""
        return asdict(self) | {"bound": self.bound, "overlap": self.overlap}


def over_links(
    problem: Problem,
    W: int,
    direction: str,
    rung: str = "mega",
    machine: Machine = H200,
    routing: str = "random",
    seed: int = 0,
    group: int | None = None,
    mixed: bool = True,
    dedup: bool = False,
) -> Prediction:
    """W ranks, each with a GPU of its own and with `problem.T` tokens; the experts are shared between them.

    rung: "mega", or "ranks", whose exchanges are launches apart. group: experts of a group in the schedule, instead of
    as many as the kernels have. mixed: False: as if the phases of a turn stood one behind the other. dedup: as if
    dispatch fetched a token once for each rank that has any of its experts.

    Raises ValueError for other rungs, for 8 bits in "ranks" and what "mega" has no products in, and where W does not
    divide E.
    """
    if rung == "mega" and (reason := stage(rung).why_not_in(problem.precision, over_ranks=True)):
        raise ValueError(reason)
    if rung == "ranks" and problem.precision != "bf16":
        raise ValueError(f"launches apart are not predicted in {problem.precision}")
    if problem.E % W:
        raise ValueError(f"{problem.E} experts cannot be shared evenly by {W} ranks: W must divide E")
    tiles, apart = tiles_for(problem)
    there, p = ways(machine, W), problem.at(ranks=W, tokens_per_rank=(problem.T,))
    share = busiest(p.T, p.E, p.K, W, routing, seed, tiles.BLOCK_R, there, dedup)
    if rung == "mega":
        return _one_launch(machine, p, tiles, share, direction, group, mixed)
    if rung == "ranks":
        return _launches(machine, p, apart, share, direction)
    raise ValueError(f"rung must be mega or ranks over several GPUs, not {rung!r}")


def on_one_gpu(
    problem: Problem,
    direction: str,
    rung: str = "mega",
    W: int | None = None,
    machine: Machine = H200,
    routing: str = "balanced",
    seed: int = 0,
    group: int | None = None,
    mixed: bool = True,
) -> Prediction:
    """All `problem.T` tokens and all experts on one GPU. W: over the local heaps of so many ranks; None: without.
    group, mixed: as of `over_links`.

    Raises ValueError for a rung that is not in RUNGS, or that does not run with heaps or without, and in 8 bits.
    """
    if problem.precision != "bf16":
        raise ValueError(f"{problem.precision} is predicted over links alone")
    if rung not in RUNGS or (rung != "mega" and (W is None) != (rung == "persistent")):
        raise ValueError(f"rung {rung!r} with {'no heaps' if W is None else 'heaps'}: mega has both, ranks has heaps")
    tiles, apart = tiles_for(problem)
    share = all_of_it(problem.T, problem.E, problem.K, W or 1, routing, seed)
    p = problem.at(tokens_per_rank=share.tokens_of_rank if W else ())
    if rung == "mega":
        return _one_launch(machine, p, tiles, share, direction, group, mixed)
    return _launches(machine, p, apart, share, direction)


def tiles_for(problem: Problem) -> tuple[Mega, Persistent]:
    """The tiles of an H200: of one launch, and of a launch a step."""
    blocks, measured = blocks_of_target("sm_90", problem.dtype), nearest("sm_90", problem.H, problem.I)
    return blocks.mega, measured.tiles if measured and problem.dtype.itemsize == 2 else blocks.persistent


def _one_launch(
    machine: Machine, problem: Problem, tiles: Mega, share: Share, direction: str, group: int | None, mixed: bool
) -> Prediction:
    """Over heaps if the problem has tokens_per_rank."""
    p, work = problem, work_of_launch(problem, tiles, direction)
    if not group and p.W > 1:
        group = group_over_ranks(p, work, tiles, machine.programs)  # and not for the programs of where this runs
    work = replace(work, group=group or work.group, mixed=work.mixed and mixed)
    played = play(tickets_of(machine, p, tiles, work, share, direction), machine)
    return _prediction(machine, direction, played, beside_one_launch(machine, p, share, direction))


def work_of_launch(problem: Problem, tiles: Mega, direction: str) -> Work:
    """What the one launch of a direction has to do, in the kernels' own order. All gradients are needed."""
    if direction == "forward":
        return forward_work(problem, tiles)
    return backward_work(problem, tiles, Need(), recompute=problem.save == "inputs")


def beside_one_launch(machine: Machine, problem: Problem, share: Share, direction: str) -> float:
    """Seconds of a direction in one launch in which no tile is at work: its first launch, what ranks publish, flags."""
    first = machine.plan_and_schedule if direction == "forward" else machine.schedule
    if problem.tokens_per_rank:
        first += _publishing(machine, problem, share, direction)
    if problem.precision != "bf16":
        first += _quantising(machine, problem, share, direction)
    return first + 2 * machine.launch + _flags(machine, share)


def _publishing(machine: Machine, p: Problem, share: Share, direction: str) -> float:
    """Each rank copies its tokens into its heap, and backward dy as well."""
    return 2 * sum(share.tokens_of_rank) * row_of(p, direction).pulled / machine.memory


def _quantising(machine: Machine, p: Problem, share: Share, direction: str) -> float:
    """Launches before the one that does the work: weights are read, and their codes written, in backward transposed; so
    is x before forward publishes it."""
    size, IH = p.dtype.itemsize, p.I * p.H * len(share.rows)
    if direction == "forward":
        if not p.token_scales:
            return 0.0
        moved = 3 * IH * (size + 1) + sum(share.tokens_of_rank) * p.H * (size + CODE)
        return moved / machine.memory + 3 * machine.launch
    codes = 5 if p.precision == "fp8" else 3  # where pre is made again, gate_up's as they are too
    return IH * (3 * size + codes) / machine.memory + 2 * machine.launch


def _flags(machine: Machine, share: Share) -> float:
    """Ranks meet, and the last rows arrive."""
    return 2 * machine.flag if share.ways.here < 1 else 0.0


def _launches(machine: Machine, problem: Problem, tiles: Persistent, share: Share, direction: str) -> Prediction:
    """Over heaps if the problem has tokens_per_rank."""
    p, row, heaps = problem, problem.H * problem.dtype.itemsize, bool(problem.tokens_per_rank)
    rows, tokens = share.row_start[-1], sum(share.tokens_of_rank)
    recompute = direction == "backward" and p.save == "inputs"
    if direction == "forward":
        kinds, launches, besides = ["gate_up", "down"], 4, machine.plan_and_schedule
        launches += 2 * heaps  # meet takes plan's two
    else:
        kinds, launches, besides = [*["gate_up"] * recompute, "dact", "dx", "dw_gate_up", "dw_down"], 3, 0.0
        launches += 4 * heaps
    each = [
        play(launch_of(machine, p, tiles, share, kind, p.save if direction == "forward" else "inputs"), machine)
        for kind in kinds
    ]
    # A row that stays here is read and written; one that goes is written, or read, at the other end.
    exchanges = []
    if heaps:
        besides += _publishing(machine, p, share, direction)
        exchanges = [(PULL, share.copies)] * (1 if direction == "forward" else 2) + [(PUSH, 1.0)]
    carried, spent = [0.0, 0.0, 0.0], 0.0
    for lane, copies in exchanges:
        by_lane = share.ways.moves(lane, rows * row * copies)
        besides += rows * row * (2 - copies * (1 - share.ways.here)) / machine.memory
        spent += max((size / machine.best(by) for by, size in by_lane), default=0.0)
        for by, size in by_lane:
            carried[by] += size
    besides += tokens * (p.K + 1) * row / machine.memory + (launches + len(kinds)) * machine.launch
    besides += _flags(machine, share)
    seconds = sum(played.seconds for played in each) + spent
    working = {}
    for played in each:
        for kind, s in played.working.items():
            working[kind] = working.get(kind, 0.0) + s
    whole = Played(seconds, working, spent * machine.programs, 0.0, tuple(carried))
    return _prediction(machine, direction, whole, besides)


def _prediction(machine: Machine, direction: str, played: Played, besides: float) -> Prediction:
    """besides: seconds in which nothing else goes on."""
    lanes = played.bytes
    return Prediction(
        direction,
        ms=1e3 * (played.seconds + besides),
        products=1e3 * (sum(played.working.values()) / machine.programs + besides),
        links=1e3 * (lanes[PULL] / machine.best(PULL) + lanes[PUSH] / machine.best(PUSH)),
        network=1e3 * lanes[NETWORK] / machine.network,
        moving=1e3 * played.moving / machine.programs,
        waiting=1e3 * played.waiting / machine.programs,
    )


# What was measured, beside what is predicted.


class Measured(NamedTuple):
    """A time that was measured on one GPU.

    Attributes:
        shape: the layer's name, among PRESETS.
        rung: one of RUNGS.
        ranks: over the local heaps of so many; None: without heaps.
        routing, save: as of `random_inputs`, and of Problem.
        what: "forward", "backward", "forward+backward", or a kind: its launch alone, by rung persistent.
        ms: the time.
    """

    shape: str
    rung: str
    ranks: int | None
    routing: str
    save: str
    what: str
    ms: float


def measured(path: Path) -> list[Measured]:
    """The times in a file that can be predicted: of docs/results/*.json, or of docs/results/one-gpu/*.json, whose rows
    are `Measured` as JSON objects."""
    record = json.loads(path.read_text())
    if "problems" not in record:
        return [Measured(**row) for row in record["rows"]]
    found = []
    for row in record["rows"]:
        p, rung = record["problems"][row["shape"]], row["contestant"].partition("-over-")[0]
        if rung not in RUNGS or (row["gemm"] and rung != "persistent"):
            continue
        what = {"drows": "dx"}.get(row["gemm"], row["gemm"]) or row["direction"]
        ranks = row.get("ranks") or 1
        if ranks == 1 and rung != "ranks":  # which has heaps even of one rank
            ranks = None
        found.append(Measured(row["shape"], rung, ranks, p["routing"], p["save"], what, row["ms"]["median"]))
    return found


def of(measured: Measured, machine: Machine = H200) -> float:
    """What is predicted for it, in milliseconds."""
    p = PRESETS[measured.shape].at(save=measured.save)
    if measured.what in KINDS:
        share = all_of_it(p.T, p.E, p.K, 1, measured.routing, 0)
        played = play(launch_of(machine, p, tiles_for(p)[1], share, measured.what, p.save), machine)
        return 1e3 * (played.seconds + 2 * machine.launch)  # it makes its tile table as well
    directions = measured.what.split("+")
    facts = dict(rung=measured.rung, W=measured.ranks, machine=machine, routing=measured.routing)
    return sum(on_one_gpu(p, direction, **facts).ms for direction in directions)


def calibrate(those: Iterable[Measured], machine: Machine = H200, rounds: int = 3) -> Machine:
    """The machine whose unit, tile and epilogue fit these times best: least squares of the relative differences."""
    those, names = list(those), ("unit", "tile", "epilogue")

    def off(machine: Machine) -> torch.Tensor:
        return torch.tensor([of(one, machine) / one.ms - 1 for one in those], dtype=torch.float64)

    def scaled(machine: Machine, **by: float) -> Machine:
        return machine.at(**{name: getattr(machine, name) * factor for name, factor in by.items()})

    for _ in range(rounds):
        here = off(machine)
        slopes = torch.stack([(off(scaled(machine, **{name: 1.02})) - here) / 0.02 for name in names], 1)
        change = torch.linalg.lstsq(slopes, -here[:, None]).solution[:, 0].tolist()
        machine = scaled(machine, **{name: 1 + by for name, by in zip(names, change)})
    return machine


PUBLISHED = {
    ("qwen3-30b-a3b", "forward"): 3.9,
    ("qwen3-30b-a3b", "backward"): 8.2,
    ("qwen3-235b-a22b", "forward"): 9.6,
    ("qwen3-235b-a22b", "backward"): 24.6,
}
"""Milliseconds of a layer on eight H200, T = 16384 tokens each, as the makers of Prime Mega MoE report them; pre is
made again in backward. The third follows from what they say of two forwards and a backward: 43.7 ms."""


def numbers_of_ranks(E: int) -> list[int]:
    """1, 2, 4, ... ranks that can share E experts, to 64."""
    return [W for W in (1, 2, 4, 8, 16, 32, 64) if E % W == 0]


def in_lines(predictions: dict[int, list[Prediction]], shape: str) -> list[str]:
    """Predictions by number of ranks, as a table; beside eight ranks what was published of the shape."""
    lines = ["  W  direction      ms  products   links  network  overlap  bound by  published"]
    for W, directions in predictions.items():
        for p in directions:
            hidden = f"{p.overlap:.0%}" if p.exchange else "-"
            known = PUBLISHED.get((shape, p.direction), "") if W == 8 else ""
            line = f"{W:3}  {p.direction:9}{p.ms:8.2f}{p.products:10.2f}{p.links:8.2f}{p.network:9.2f}{hidden:>9}"
            lines.append(f"{line}  {p.bound:8}{known:>11}".rstrip())
    return lines


def beside(those: Sequence[Measured], machine: Machine = H200) -> list[str]:
    """What was measured and what is predicted for it, as a table."""
    names = [f"{m.shape}, {m.rung}" + (f", {m.ranks} local heaps" if m.ranks else "") for m in those]
    wide = max(map(len, names), default=0)
    lines = [f"{'':{wide}}  {'routing':8}  {'save':6}  {'what':16}{'measured':>9}{'predicted':>11}"]
    for name, m in zip(names, those):
        ms = of(m, machine)
        facts = f"{name:{wide}}  {m.routing:8}  {m.save:6}  {m.what:16}"
        lines.append(f"{facts}{m.ms:9.2f}{ms:11.2f}{ms / m.ms - 1:+8.1%}")
    return lines
