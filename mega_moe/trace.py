"""A trace: what every tile of one launch of rung mega did, and when, noted by the kernel itself.

A profiler sees one long kernel. Its programs, if asked, note of each tile when they turn to it, when its wait is over
and when it is done (kernels/clock.py says with which clocks). Here such notes become a timeline, numbers, and a file
for ui.perfetto.dev.

To note the time takes time itself, a barrier and a store for each note: a traced launch is a little slower. One that
is not traced has not a single instruction of it.
"""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .kernels import blocks, clock
from .kernels.meet import meet
from .kernels.mega import parts_of_weight
from .kernels.schedule import Schedule, backward_work, forward_work, plan_and_schedule, schedule
from .ladder import ROUNDS, WARM_UP, Layer, cpu_seconds, facts, machine
from .registry import stage
from .roofline import DIRECTIONS
from .schedule import ARRIVALS, COLUMNS, COMBINE, EXPERT, KIND, KINDS, RANK, STEP_OF_KIND
from .shapes import Need, Problem
from .stages.s6_mega import LAUNCHES
from .timeline import Bar, svg

EXCHANGE = ("dispatch", "combine")
"""The steps that multiply nothing: they move rows, over ranks from and to others."""

UNITS = {"cuda": "µs", "cpu": "tiles"}
"""What time is counted in: a GPU's clock, or tiles that are done (see kernels/clock.py)."""

OF_MACHINE = ("device", "torch", "triton", "python", "date")
"""What `mega_moe.ladder.machine` says; whatever else a file tells of a trace is of the problem."""


@dataclass(frozen=True)
class Span:
    """What one program did with one tile: from `taken` on it waited, from `start` on it worked, until `end`.

    Attributes:
        lane: number of the program's lane.
        tile: the row of the schedule.
        taken: when the program turned to the tile; it had drawn the ticket earlier.
        start: when the tile's counter showed enough arrivals; the same as taken where it needs none.
        end: when the last of the program's threads was done.
    """

    lane: int
    tile: int
    taken: float
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """A traced launch. Time begins when the first program enters.

    Attributes:
        machine: where and when it ran, as `mega_moe.ladder.Climb.as_json` says.
        problem: what ran, as there.
        direction: "forward" or "backward".
        unit: what time is counted in: "µs", or in the interpreter "tiles" that are done.
        table: the schedule as a list of its rows.
        lanes: names of the lanes, one a program: its processor.
        spans: what was done, in the order of the table.
    """

    machine: dict
    problem: dict
    direction: str
    unit: str
    table: list[list[int]]
    lanes: list[str]
    spans: list[Span]

    @cached_property
    def total(self) -> float:
        """From the first program's entry to the end of the last tile."""
        return max((span.end for span in self.spans), default=0.0)

    def shares(self) -> dict[str, float]:
        """Where the lanes' time went: shares of all of it, that is of `total` times the number of lanes. They add up
        to 1.

        busy     the lane's program worked on a tile
        waiting  it held a tile and waited
        between  it held none, and one was still to come: entering, tickets, the table
        tail     its last tile was done, or it never had one, while others worked
        """
        free_from, total = [0.0] * len(self.lanes), self.total
        spent = dict(busy=0.0, waiting=0.0, between=0.0, tail=0.0)
        for span in sorted(self.spans, key=lambda span: span.taken):
            spent["busy"] += span.end - span.start
            spent["waiting"] += span.start - span.taken
            spent["between"] += span.taken - free_from[span.lane]
            free_from[span.lane] = span.end
        spent["tail"] = sum(total - last for last in free_from)
        return {name: self.share(time) for name, time in spent.items()}

    def share(self, time: float) -> float:
        """A time as a share of all that the lanes had."""
        return time / (self.total * len(self.lanes) or 1)

    def kinds(self) -> dict[str, dict[str, float]]:
        """Of each kind that occurs: how many tiles, the median and the longest of their times at work, and which shares
        of the lanes' time they worked and waited. Kinds in the order of their first tile."""
        of_kind: dict[str, list[Span]] = {}
        for span in self.spans:
            of_kind.setdefault(KINDS[self.table[span.tile][KIND]], []).append(span)
        return {
            kind: dict(
                tiles=len(spans),
                median=statistics.median(span.end - span.start for span in spans),
                longest=max(span.end - span.start for span in spans),
                busy=self.share(sum(span.end - span.start for span in spans)),
                waiting=self.share(sum(span.start - span.taken for span in spans)),
            )
            for kind, spans in of_kind.items()
        }

    def at_work(self) -> Iterator[tuple[float, set[str]]]:
        """How long which steps were at work at once, on any lane: (time, steps), one after another."""
        changes = []
        for span in self.spans:
            step = STEP_OF_KIND[KINDS[self.table[span.tile][KIND]]]
            changes += [(span.start, 1, step), (span.end, -1, step)]
        working, before = Counter(), 0.0
        for time, change, step in sorted(changes):
            if time > before:
                yield time - before, {step for step in working if working[step]}
            working[step] += change
            before = time

    def overlap(self) -> float:
        """The share of the total time in which at least two of the five steps were at work at once."""
        return sum(time for time, steps in self.at_work() if len(steps) > 1) / (self.total or 1)

    def hidden(self) -> float | None:
        """Of the time in which dispatch or combine was at work, the share in which a step that multiplies was too: so
        much of the exchange is hidden. None where there was neither."""
        exchanging = [(time, steps) for time, steps in self.at_work() if steps & set(EXCHANGE)]
        if not exchanging:
            return None
        return sum(time for time, steps in exchanging if steps - set(EXCHANGE)) / sum(time for time, _ in exchanging)

    def as_json(self) -> dict:
        """What `mega-moe trace --json` prints:

        machine    device, torch, triton, python, date
        problem    T, H, I, E, K, W, dtype, routing, save, precision
        direction  "forward" or "backward"
        unit       what time is counted in: "µs"; in the interpreter "tiles" that are done
        total      from the first program's entry to the end of the last tile
        lanes      how many programs there were
        tiles      how many tiles
        shares     busy, waiting, between, tail: shares of the lanes' time that add up to 1
        overlap    share of the total in which at least two of the five steps were at work at once
        hidden     share of the time of dispatch and combine in which another step was at work too; or null
        kinds      of each kind that occurs: tiles, median and longest time at work; busy and waiting, shares as above
        """
        return {
            "machine": self.machine,
            "problem": self.problem,
            "direction": self.direction,
            "unit": self.unit,
            "total": self.total,
            "lanes": len(self.lanes),
            "tiles": len(self.spans),
            "shares": self.shares(),
            "overlap": self.overlap(),
            "hidden": self.hidden(),
            "kinds": self.kinds(),
        }

    def as_text(self) -> str:
        """The kinds in a table, and below what became of the time."""
        columns = "{:10}  {:>7}  {:>10}  {:>10}  {:>6}  {:>7}".format
        lines = [columns("kind", "tiles", f"median {self.unit}", "longest", "busy", "waiting")]
        for kind, of in self.kinds().items():
            times, shares = (of["median"], of["longest"]), (of["busy"], of["waiting"])
            cells = [f"{time:,.1f}" for time in times] + [f"{share:.1%}" for share in shares]
            lines.append(columns(kind, f"{of['tiles']:,}", *cells))
        lines += ["", self.outcome(), f"{self.overlap():.1%} of that time at least two steps are at work at once"]
        if self.hidden() is not None:
            named = " and ".join(step for step in EXCHANGE if step in self.kinds())
            lines.append(f"{self.hidden():.1%} of the time of {named}, a step that multiplies is at work as well")
        if self.unit == "tiles":
            lines.append("Interpreted programs run one after another: this shows the order of tiles and nothing else")
        return "\n".join(lines)

    def outcome(self) -> str:
        """One line: how long it took, and where the lanes' time went."""
        words = dict(busy="at work", waiting="waiting", between="between tiles", tail="after their last")
        shares = ", ".join(f"{share:.1%} {words[name]}" for name, share in self.shares().items())
        return f"{len(self.lanes)} programs, {self.total:,.1f} {self.unit}: {shares}"

    def as_perfetto(self) -> dict:
        """The trace in Chrome's format, which ui.perfetto.dev and chrome://tracing open: a process a rank, a thread a
        program. An event named after its kind is a tile at work, one named "waiting" is the wait before.

        Times there are microseconds; in the interpreter a microsecond stands for a tile that is done.
        """
        events, lanes_of_rank = [], {}
        for span in self.spans:
            tile = self.table[span.tile]
            kind, rank = KINDS[tile[KIND]], tile[RANK]
            lanes_of_rank.setdefault(rank, set()).add(span.lane)
            where = {"ph": "X", "pid": rank, "tid": span.lane}
            args = {"kind": kind, "step": STEP_OF_KIND[kind], "ticket": span.tile}
            args |= zip(COLUMNS[EXPERT:], tile[EXPERT:], strict=True)
            if span.start > span.taken:
                wait = {"name": "waiting", "cat": "waiting", "ts": span.taken, "dur": span.start - span.taken}
                events.append(wait | where | {"args": args})
            work = {"name": kind, "cat": STEP_OF_KIND[kind], "ts": span.start, "dur": span.end - span.start}
            events.append(work | where | {"args": args})

        named = []
        for rank, lanes in sorted(lanes_of_rank.items()):
            named.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
            for lane in sorted(lanes):
                where = {"ph": "M", "pid": rank, "tid": lane}
                named.append({"name": "thread_name", **where, "args": {"name": self.lanes[lane]}})
                named.append({"name": "thread_sort_index", **where, "args": {"sort_index": lane}})
        return {
            "displayTimeUnit": "ns",
            "otherData": {"direction": self.direction, "unit": self.unit, "lanes": len(self.lanes)}
            | self.machine
            | self.problem,
            "traceEvents": named + events,
        }

    @classmethod
    def from_perfetto(cls, written: dict) -> "Trace":
        """The trace of which `as_perfetto` made this, but for two things that a file does not say: a tile's end is its
        start and how long it took, to a rounding; and a lane without tiles has no name."""
        of_all = dict(written["otherData"])
        direction, unit, lanes = of_all.pop("direction"), of_all.pop("unit"), [""] * of_all.pop("lanes")
        machine = {name: of_all.pop(name) for name in OF_MACHINE if name in of_all}
        table, spans, taken = [], [], {}
        for event in written["traceEvents"]:
            name, args = event["name"], event["args"]
            if name == "thread_name":
                lanes[event["tid"]] = args["name"]
            elif name == "waiting":
                taken[args["ticket"]] = event["ts"]
            elif event["ph"] == "X":
                start, ticket = event["ts"], args["ticket"]
                table.append([KINDS.index(name), event["pid"], *(args[column] for column in COLUMNS[EXPERT:])])
                spans.append(Span(event["tid"], ticket, taken.get(ticket, start), start, start + event["dur"]))
        return cls(machine, of_all, direction, unit, table, lanes, spans)

    def as_svg(self) -> str:
        """The timeline as the text of an SVG file: a lane a program."""
        bars = []
        for span in self.spans:
            kind, expert = KINDS[self.table[span.tile][KIND]], self.table[span.tile][EXPERT]
            label = kind if self.table[span.tile][KIND] == COMBINE else f"{kind} {expert}"
            bars.append(Bar(span.lane, span.taken, span.start, span.end, STEP_OF_KIND[kind], label))
        sizes = ", ".join(f"{letter} = {self.problem[letter]}" for letter in "THIEKW")
        tiles = ", ".join(f"{of['tiles']:,} {kind}" for kind, of in self.kinds().items())
        unit = "tiles that are done" if self.unit == "tiles" else self.unit
        return svg(bars, self.lanes, f"{self.direction}, {sizes}", f"{self.outcome()}. Tiles: {tiles}.", unit)


def why_not(problem: Problem) -> str | None:
    """Why this layer cannot be traced here, with the fix; None if it can."""
    if reason := stage("mega").why_not(problem):
        return reason
    if not problem.T:
        return "without tokens there is nothing to trace: choose a layer that has some"
    return clock.why_not()


def seconds(problem: Problem) -> float:
    """About how long `trace` takes on a CPU: one of the runs that a climb makes of a rung."""
    return cpu_seconds([stage("mega")], problem) / (4 + WARM_UP["cpu"] + ROUNDS["cpu"])


def trace(layer: Layer, direction: str) -> Trace:
    """Run one direction of the layer on rung mega, and read what its tiles noted. On a GPU it has run before, so that
    nothing is compiled meanwhile and clocks are up. Backward gives all gradients.

    Raises ValueError for another direction, and for what `why_not` says.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}, not {direction!r}")
    if reason := why_not(layer.problem):
        raise ValueError(reason)
    for _ in range(WARM_UP["cuda"] if layer.problem.device == "cuda" else 0):
        launch(layer, direction)
    made, words, programs = launch(layer, direction)
    table = made.table[: int(made.counters[1])].tolist()
    names, spans = read(words.cpu(), table, programs, layer.problem.device)
    device = layer.problem.device
    return Trace(machine(device), facts(layer), direction, UNITS[device], table, names, spans)


def launch(layer: Layer, direction: str) -> tuple[Schedule, Tensor, int]:
    """Run the layer, one direction of it traced. Returns its schedule, the words of its trace, and how many programs
    there were."""
    p, inputs = layer.problem, layer.inputs
    of_forward, of_backward = LAUNCHES[p.precision]
    tiles = of_forward.tiles(p)
    programs = blocks.programs(tiles.gate_up)
    empty = lambda made: clock.empty_trace(len(made.table), programs, inputs.x.device)

    memory, work, parts = None, forward_work(p, tiles), parts_of_weight(p, of_backward.tiles(p))
    if p.heap:
        memory, plan, made = meet(p, inputs, None, work, parts)
    else:
        plan, made = plan_and_schedule(inputs.topk_ids, p.E, work)
    words = empty(made) if direction == "forward" else None
    _, pre = of_forward.forward(p, inputs, plan, made, tiles, memory, trace=words)
    if direction == "backward":
        tiles = of_backward.tiles(p)
        work = backward_work(p, tiles, Need(), recompute=pre is None)
        made = meet(p, inputs, layer.dy, work, parts, memory.of_call)[2] if p.heap else schedule(plan, work)
        words = empty(made)
        of_backward.backward(p, inputs, plan, pre, layer.dy, Need(), made, tiles, memory, trace=words)
    return made, words, programs


def read(words: Tensor, table: list[list[int]], programs: int, device: str) -> tuple[list[str], list[Span]]:
    """The names of the lanes, and a span for each tile of the table, from the words of a trace, on the CPU.

    A program's cycles become nanoseconds by the line through its two pairs of clocks; the differences are taken in
    integers, and are small. Lanes are in the order of processors.
    """
    of_program, of_ticket = clock.rows_of(words, programs)
    of_ticket, arrivals = of_ticket[: len(table)], torch.tensor(table)[:, ARRIVALS]
    processor = of_program[:, clock.PROCESSOR.value]
    lane_of_program = processor.argsort(stable=True).argsort()
    names = _names(processor.sort(stable=True).values.tolist(), "SM" if device == "cuda" else "program")

    program = of_ticket[:, clock.PROGRAM.value]
    timer_in, cycle_in, timer_out, cycle_out = of_program[program, : clock.PROCESSOR.value].unbind(1)
    rate = (timer_out - timer_in) / (cycle_out - cycle_in).clamp_min(1).double()
    entered = (timer_in - of_program[:, clock.TIMER_IN.value].min()).double()
    scale = 1e-3 if device == "cuda" else 1.0  # ns to µs
    times = ((of_ticket[:, : clock.PROGRAM.value] - cycle_in[:, None]) * rate[:, None] + entered[:, None]) * scale
    taken, start, end = times.unbind(1)
    start = torch.where(arrivals > 0, start, taken)
    columns = (column.tolist() for column in (lane_of_program[program], taken, start, end))
    return names, [Span(lane, tile, *times) for tile, (lane, *times) in enumerate(zip(*columns, strict=True))]


def _names(numbers: list[int], word: str) -> list[str]:
    """Names for lanes in the order of their processors; those that share one are told apart."""
    nth, several = Counter(), Counter(numbers)
    names = []
    for number in numbers:
        nth[number] += 1
        names.append(f"{word} {number}" + (f" · {nth[number]}" if several[number] > 1 else ""))
    return names
