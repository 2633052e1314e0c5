"""A schedule played through without a kernel: when each tile is drawn, how long it waits, and when it is done.

Time is counted in *steps*: a step of a product loads and multiplies one piece of its contraction, BLOCK_C or (of a
weight gradient) BLOCK_R deep, and is taken to last equally long in every kind of tile. So what is played is order and
waiting: which programs stand idle, and for whom. How long a step lasts, only a GPU can tell.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from math import ceil
from typing import TYPE_CHECKING

from .schedule import (
    ARRIVALS,
    BLOCK,
    COLUMN,
    COLUMNS,
    COMBINE,
    EXPERT,
    KIND,
    KINDS,
    RANK,
    ROWS,
    STEP_OF_KIND,
    Work,
    counter_of,
    number_of_counters,
    signals_of,
)
from .shapes import Problem
from .timeline import Bar, svg

if TYPE_CHECKING:
    from .kernels.blocks import Mega  # which imports Triton

FEW = 48  # tiles: a schedule of no more is shown whole, of others only the first half as many


class Deadlock(Exception):
    """Programs wait for tiles that nobody will ever do. The message says which wait with what."""


@dataclass(frozen=True)
class Span:
    """What one program does with one tile: from `drawn` on it waits, from `start` on it works, until `end`. In steps.

    Attributes:
        program: its number.
        tile: the row of the table.
        drawn: when it drew the tile.
        start: when the tile's counter showed enough arrivals.
        end: when it was done.
    """

    program: int
    tile: int
    drawn: int
    start: int
    end: int


def by_ticket(table: Sequence[Sequence[int]], W: int, programs: int) -> list[Iterator[int]]:
    """Where each program's tiles come from: the programs of a rank draw that rank's tiles, in order, from one counter.

    Programs are numbered rank by rank, `programs` on each.
    """
    of_rank = [iter([n for n, tile in enumerate(table) if tile[RANK] == rank]) for rank in range(W)]
    return [of_rank[rank] for rank in range(W) for _ in range(programs)]


def play(
    table: Sequence[Sequence[int]],
    work: Work,
    E: int,
    W: int,
    homes: Sequence[int],
    draws: Sequence[Iterator[int]],
    steps: Sequence[int],
    resident: int | None = None,
) -> list[Span]:
    """What every program does, in the order in which tiles end.

    table: the schedule as a list of its rows.
    homes: `schedule.home_of_row` as a list.
    draws: of each program, the iterator over rows of the table that it draws from; programs may share one.
    steps: how long each tile takes, at least 1.
    resident: how many programs the device holds at once, of which another starts where one ends; None: all.

    Raises Deadlock where programs wait and none works.
    """
    counters = [0] * number_of_counters(E, W, work)
    arrived = lambda tile: counters[counter_of(table[tile], E, work)] >= table[tile][ARRIVALS]
    waiting = defaultdict(list)  # counter -> [(program, tile, drawn)]
    working, order = [], count()  # a heap of (end, order, span): of those that end together, the first to begin
    unstarted = iter(range(len(draws)))
    spans = []

    def begin(program: int, tile: int, drawn: int, now: int) -> None:
        heapq.heappush(working, (now + steps[tile], next(order), Span(program, tile, drawn, now, now + steps[tile])))

    def draw(program: int | None, now: int) -> None:
        while program is not None and (tile := next(draws[program], None)) is None:
            program = next(unstarted, None)
        if program is None:
            return
        counter = counter_of(table[tile], E, work)
        if counter is None or arrived(tile):
            begin(program, tile, now, now)
        else:
            waiting[counter].append((program, tile, now))

    for _ in range(len(draws) if resident is None else resident):
        draw(next(unstarted, None), 0)
    while working:
        now, _, span = heapq.heappop(working)
        spans.append(span)
        for counter, arrivals in signals_of(table[span.tile], E, work, homes):
            counters[counter] += arrivals
            held, waiting[counter] = waiting[counter], []
            for program, tile, drawn in held:
                if arrived(tile):
                    begin(program, tile, drawn, now)
                else:
                    waiting[counter].append((program, tile, drawn))
        draw(span.program, now)

    stuck = sorted(held for several in waiting.values() for held in several)
    if stuck:
        raise Deadlock("; ".join(f"program {program} waits with {in_words(table[tile])}" for program, tile, _ in stuck))
    return spans


def in_words(tile: Sequence[int]) -> str:
    """A tile to be read: "gate_up of expert 3, block 7", or "combine of rank 1, block 2"."""
    whose = f"rank {tile[RANK]}" if tile[KIND] == COMBINE else f"expert {tile[EXPERT]}"
    return f"{KINDS[tile[KIND]]} of {whose}, block {tile[BLOCK]}"


def steps_of(table: Sequence[Sequence[int]], work: Work, problem: Problem, tiles: "Mega") -> list[int]:
    """How many steps each tile of a schedule takes.

    Of a strip, the steps of all its tiles. Dispatch and combine multiply nothing: they take as many steps as a product
    needs to load what they load.
    """
    p = problem
    sizes = {"gate_up": (p.I, p.H), "down": (p.H, p.I), "dact": (p.I, p.H), "dx": (p.H, 2 * p.I)}
    strips = {KINDS[phase.kind]: phase.strips for phase in work.phases}
    piece = work.BLOCK_R * tiles.gate_up.BLOCK_C

    def steps(tile: Sequence[int]) -> int:
        kind = KINDS[tile[KIND]]
        if kind == "dispatch":
            return ceil(work.BLOCK_R * p.H / strips[kind] / piece)
        if kind == "combine":
            return ceil(tile[ROWS] * p.K * p.H / piece)
        shape = getattr(tiles, kind)
        if kind in sizes:
            columns, depth = sizes[kind]
            blocks = ceil(columns / shape.BLOCK_N) - tile[COLUMN] * shape.STRIP
            return min(blocks, shape.STRIP) * ceil(depth / shape.BLOCK_C)
        return max(ceil(tile[ROWS] / shape.BLOCK_R), 1)  # storing zeros takes time as well

    return [steps(tile) for tile in table]


@dataclass(frozen=True)
class Simulation:
    """A schedule and how it went.

    Attributes:
        problem: the layer as JSON: T, H, I, E, K, W, dtype, routing, seed, save.
        direction: "forward" or "backward".
        work: what there was to do.
        table: the schedule as a list of its rows.
        programs: how many each rank had.
        spans: what they did.
    """

    problem: dict
    direction: str
    work: Work
    table: list[list[int]]
    programs: int
    spans: list[Span]

    @property
    def steps(self) -> int:
        """How long it took."""
        return max((span.end for span in self.spans), default=0)

    def share(self, spent: int) -> float:
        """A number of steps as a share of all that programs had."""
        return spent / max(self.steps * self.programs * self.problem["W"], 1)

    @property
    def busy(self) -> float:
        """The share of their time that programs worked."""
        return self.share(sum(span.end - span.start for span in self.spans))

    @property
    def waiting(self) -> float:
        """The share of their time that programs waited with a tile. What is left, they had none."""
        return self.share(sum(span.start - span.drawn for span in self.spans))

    def kinds(self) -> dict[str, dict[str, int]]:
        """Of each kind that occurs: how many tiles, how many of these waited, the steps of work, the steps waited."""
        found = {}
        for span in sorted(self.spans, key=lambda span: span.tile):
            kind = found.setdefault(KINDS[self.table[span.tile][KIND]], Counter(tiles=0, waited=0, steps=0, waiting=0))
            kind["tiles"] += 1
            kind["waited"] += span.start > span.drawn
            kind["steps"] += span.end - span.start
            kind["waiting"] += span.start - span.drawn
        return {kind: dict(counts) for kind, counts in found.items()}

    def as_json(self) -> dict:
        """What `mega-moe schedule --json` prints:

        problem    T, H, I, E, K, W, dtype, routing, seed, save
        direction  "forward" or "backward"
        work       the fields of mega_moe.schedule.Work
        columns    names of the columns of tiles
        tiles      the schedule, a list of rows; the first column counts in kinds
        kinds      names of the kinds
        programs   how many drew tiles, on each rank
        steps      how long it took
        busy       share of their time that programs worked
        waiting    share of their time that programs waited with a tile
        summary    of each kind that occurs: tiles, how many of them waited, steps of work, steps of waiting
        spans      of each tile, in the order in which they end: program, tile, drawn, start, end
        """
        return {
            "problem": self.problem,
            "direction": self.direction,
            "work": asdict(self.work),
            "columns": list(COLUMNS),
            "tiles": self.table,
            "kinds": list(KINDS),
            "programs": self.programs,
            "steps": self.steps,
            "busy": self.busy,
            "waiting": self.waiting,
            "summary": self.kinds(),
            "spans": [list(asdict(span).values()) for span in self.spans],
        }

    def as_text(self) -> str:
        """The schedule, or its beginning, and what came of it."""
        shown = self.table if len(self.table) <= FEW else self.table[: FEW // 2]
        rows = [["", *COLUMNS], *([n, KINDS[tile[KIND]], *tile[1:]] for n, tile in enumerate(shown))]
        lines = _aligned(rows, left=(1,))
        if len(shown) < len(self.table):
            lines.append(f"... and {len(self.table) - len(shown):,} more; --json prints them all")
        kinds = [["kind", "tiles", "waited", "steps", "waiting"]]
        kinds += [[kind, *counts.values()] for kind, counts in self.kinds().items()]
        return "\n".join([*lines, "", *_aligned(kinds, left=(0,)), "", self.outcome()])

    def outcome(self) -> str:
        """One line: who worked how long, and which share of it."""
        W = self.problem["W"]
        programs = f"{self.programs} program{'s' * (self.programs > 1)}" + (f" on each of {W} ranks" if W > 1 else "")
        return f"{programs}: {self.steps:,} steps, {self.busy:.1%} of them at work, {self.waiting:.1%} waiting"

    def as_svg(self) -> str:
        """The timeline as the text of an SVG file: a lane a program, time in steps."""
        W, bars = self.problem["W"], []
        for span in self.spans:
            kind, expert = KINDS[self.table[span.tile][KIND]], self.table[span.tile][EXPERT]
            label = kind if kind == "combine" else f"{kind} {expert}"
            bars.append(Bar(span.program, span.drawn, span.start, span.end, STEP_OF_KIND[kind], label))
        lanes = [
            f"rank {n // self.programs} · {n % self.programs}" if W > 1 else f"program {n}"
            for n in range(W * self.programs)
        ]
        sizes = ", ".join(f"{letter} = {self.problem[letter]}" for letter in "THIEKW")
        tiles = [f"{counts['tiles']:,} {kind} ({counts['waited']:,} waited)" for kind, counts in self.kinds().items()]
        description = f"{self.outcome()}. Tiles: {', '.join(tiles) or 'none'}."
        return svg(bars, lanes, f"{self.direction}, {sizes}", description, "steps")


def _aligned(rows: list[list], left: tuple[int, ...]) -> list[str]:
    """Rows as lines, in columns: numbers to the right, the columns `left` to the left."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = lambda n, cell: cell.ljust(widths[n]) if n in left else cell.rjust(widths[n])
    return ["  ".join(align(n, cell) for n, cell in enumerate(row)).rstrip() for row in cells]
