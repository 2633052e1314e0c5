"""The timelines that docs/timeline.md shows before a reader opens one: predicted from the real schedule, or traced.

    python3 docs/timeline_data.py FOLDER

writes two files into FOLDER: timeline_data.js, a classic script that docs/js/timeline.js reads, and trace.json, what
`mega-moe trace --perfetto` writes, for a reader who wants to try opening one. mkdocs_hooks.py calls it, in a process of
its own, since Triton has to be told of its interpreter before it is imported.

    python3 docs/timeline_data.py --keep TRACE.json

keeps of a trace from a GPU, as `mega-moe trace --perfetto` wrote it, what the page draws (one of six programs, and the
numbers of all), in docs/results/traces/: a whole one is some 20 MB.

A prediction is `mega_moe.predict`'s, tile by tile. Where a launch does nothing but move bytes, the model knows how long
that takes and not who moves which, so each program gets one bar of that length. What stands in front of the first
launch drawn (the plan, the tile table, ranks that meet, the host's launches) is what is left of the predicted time.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # nothing here runs on a GPU
sys.path.append(str(Path(__file__).resolve().parent.parent))  # a bare checkout has nothing installed

import torch

from mega_moe import predict, simulate
from mega_moe.kernels.blocks import Mega, Persistent, mega_for
from mega_moe.kernels.schedule import forward_work
from mega_moe.ladder import Layer
from mega_moe.predict import H200, PULL, PUSH, Share, play
from mega_moe.roofline import DIRECTIONS
from mega_moe.samples import random_inputs
from mega_moe.schedule import ARRIVALS, COMBINE, KIND, KINDS, STEP_OF_KIND, first_block_of_expert, schedule
from mega_moe.shapes import PRESETS, Problem
from mega_moe.timeline import COLOURS
from mega_moe.trace import Span, Trace, trace

SHAPE = "qwen3-30b-a3b"
NODE = 8  # GPUs joined by NVLink
EVERY = 6  # of so many programs one is drawn: a page has no room for all tiles of 132
PARTS = 100  # of a microsecond: times are written as whole numbers of them
DISPATCH = KINDS.index("dispatch")


@dataclass(frozen=True)
class Drawn:
    """A timeline as the page takes it.

    Attributes:
        name: what ran.
        made: how its times were found.
        trace: its tiles and times.
        moving: of each of its spans, when its program ended its work and began to move rows over links.
        launches: (name, start, end), one after another.
    """

    name: str
    made: str
    trace: Trace
    moving: Sequence[float]
    launches: Sequence[tuple[str, float, float]]

    def as_json(self, every: int, parts: int) -> dict:
        """For the page, with one of `every` lanes; numbers of all lanes are in its summary.

        A lane is a list of tiles: the columns of the schedule, the ticket, and four times as whole `parts` of a unit:
        since the lane's last tile, waited, at work, moved rows.
        """
        lanes = {lane: [] for lane in range(0, len(self.trace.lanes), every)}
        free_from = dict.fromkeys(lanes, 0)
        drawn = [(span, moving) for span, moving in zip(self.trace.spans, self.moving) if span.lane in lanes]
        for span, moving in sorted(drawn, key=lambda pair: pair[0].taken):
            times = [round(time * parts) for time in (span.taken, span.start, moving, span.end)]
            between = [later - earlier for earlier, later in pairwise([free_from[span.lane], *times])]
            lanes[span.lane].append([*self.trace.table[span.tile], span.tile, *between])
            free_from[span.lane] = times[-1]
        summary = self.trace.as_json()
        return {
            "name": self.name,
            "made": self.made,
            "direction": self.trace.direction,
            "unit": self.trace.unit,
            "parts": parts,
            "launches": [[name, round(start, 2), round(end, 2)] for name, start, end in self.launches],
            "names": self.trace.lanes[::every],
            "lanes": list(lanes.values()),
            "summary": {name: summary[name] for name in ("total", "lanes", "shares", "overlap", "hidden", "kinds")},
        }


# Predicted, in microseconds.


def predicted(problem: Problem, direction: str, W: int | None, rung: str) -> Drawn:
    """All of a direction on one GPU, or where W is a number the part of one of W ranks that have a GPU each."""
    p, tiles = problem, predict.tiles_for(problem)
    if W is None:
        share = predict.all_of_it(p.T, p.E, p.K, 1, "random", 0)
    else:
        there = predict.ways(H200, W)
        share = predict.busiest(p.T, p.E, p.K, W, "random", 0, tiles[0].BLOCK_R, there, False)
        p = p.at(ranks=W, tokens_per_rank=(p.T,))
    if rung == "mega":
        launches = [one_launch(p, tiles[0], share, direction)]
        whole = launches[0][1] + 1e6 * predict.beside_one_launch(H200, p, share, direction)
    else:
        launches = launches_apart(p, tiles[1], share, direction)
        on_one_gpu = lambda: predict.on_one_gpu(problem, direction, rung, routing="random")
        whole = 1e3 * (predict.over_links(problem, W, direction, rung) if W else on_one_gpu()).ms

    table_of = "schedule" if rung == "mega" else "tile table"
    first = ", ".join([*["meet"] * (W is not None), *["plan"] * (direction == "forward"), table_of])
    now = whole - sum(1e6 * H200.launch + length for _, length, _, _ in launches)
    named, table, spans, moving = [(first, 0.0, now)], [], [], []
    for name, length, of_launch, played in launches:
        now += 1e6 * H200.launch
        for span in played:
            drawn, start, moved, end = (now + 1e6 * time for time in span[2:])
            spans.append(Span(span.program, len(table) + span.ticket, drawn, start, end))
            moving.append(moved)
        table += of_launch
        named.append((name, now, now + length))
        now += length
    lanes = [f"program {n}" for n in range(H200.programs)]
    facts = {letter: getattr(problem, letter) for letter in "THIEK"}
    where = f"{W} GPUs" if W else "one GPU"
    name = f"{rung} on {where}, {direction}: {'one launch' if rung == 'mega' else 'a launch a step'}"
    return Drawn(name, "predicted", Trace({}, facts, direction, "µs", table, lanes, spans), moving, named)


LaunchDrawn = tuple[str, float, list[list[int]], Sequence[predict.Span]]
"""Its name, its length in microseconds, its tiles, and what was done with them."""


def one_launch(p: Problem, tiles: Mega, share: Share, direction: str) -> LaunchDrawn:
    """Rung mega's, tile by tile from the schedule."""
    work = predict.work_of_launch(p, tiles, direction)
    played = play(predict.tickets_of(H200, p, tiles, work, share, direction), H200)
    table = schedule(torch.tensor(share.row_start), share.tokens_of_rank, (share.row_start[-1],), work).tolist()
    return "mega", 1e6 * played.seconds, table, played.spans


def launches_apart(p: Problem, tiles: Persistent, share: Share, direction: str) -> list[LaunchDrawn]:
    """Those of rung persistent, or where the problem has ranks of rung ranks, in their order."""
    rows, row = share.row_start[-1], p.H * p.dtype.itemsize
    here, away = share.ways.here, 1 - share.ways.here
    stored = lambda copies: rows * row * (2 - copies * away) / H200.memory  # what stays is read and written

    def product(kind: str) -> LaunchDrawn:
        save = p.save if direction == "forward" else "inputs"
        played = play(predict.launch_of(H200, p, tiles, share, kind, save), H200)
        return kind, 1e6 * played.seconds, tiles_of_launch(tiles, share, kind, len(played.spans)), played.spans

    def bars(name: str, kind: int, work: float, moves: float = 0.0) -> LaunchDrawn:
        """Of a launch that moves bytes: one a program."""
        spans = [predict.Span(n, n, 0.0, 0.0, work, work + moves) for n in range(H200.programs)]
        return name, 1e6 * (work + moves), [[kind, 0, -1, -1, -1, -1, -1, 0]] * H200.programs, spans

    pulls, pushes = [], []
    if here < 1:
        tensors = 1 if direction == "forward" else 2
        pull, push = (rows * row * away / H200.best(lane) for lane in (PULL, PUSH))
        pulls = [bars("pull", DISPATCH, tensors * stored(share.copies), tensors * pull)]
        pushes = [bars("push", COMBINE, stored(1.0), push)]
    combine = bars("combine", COMBINE, predict.combine_seconds(H200, p, sum(share.tokens_of_rank)) / H200.programs)
    if direction == "forward":
        return [*pulls, product("gate_up"), product("down"), *pushes, combine]
    again = [product("gate_up")] if p.save == "inputs" else []
    weights = [product("dw_gate_up"), product("dw_down")]
    return [*pulls, *again, product("dact"), product("dx"), *pushes, combine, *weights]


def tiles_of_launch(tiles: Persistent, share: Share, kind: str, tickets: int) -> list[list[int]]:
    """The tiles behind the tickets of `predict.launch_of`, with the columns of a schedule. They wait for nothing."""
    starts, first_blocks = share.row_start, first_block_of_expert(share.row_start, tiles.BLOCK_R)
    rows, number, E = share.rows, KINDS.index(kind), len(share.rows)
    if kind in ("dw_gate_up", "dw_down"):
        longest, strips = sorted(range(E), key=lambda e: (-rows[e], e)), tickets // E
        return [[number, 0, e, first_blocks[e], starts[e], rows[e], n, 0] for e in longest for n in range(strips)]
    strips, found = tickets // first_blocks[-1], []
    for e in range(E):
        for block in range(first_blocks[e], first_blocks[e + 1]):
            row = starts[e] + (block - first_blocks[e]) * tiles.BLOCK_R
            held = min(starts[e + 1] - row, tiles.BLOCK_R)
            found += [[number, 0, e, block, row, held, column, 0] for column in range(strips)]
    return found


# Played in steps, and small enough to read.

SMALL = Problem(T=160, H=64, I=48, E=8, K=2, device="cpu", tokens_per_rank=(80, 80))
PROGRAMS = 3  # on each of its two ranks


def in_steps(apart: bool) -> Drawn:
    """A forward over two ranks as `mega-moe schedule` plays it; apart: each kind in a launch of its own."""
    p, W, tiles = SMALL, SMALL.W, mega_for(SMALL)
    work, share = forward_work(p, tiles), predict.all_of_it(p.T, p.E, p.K, W, "zipf", 0)
    live = [share.home_of_row.count(rank) for rank in range(W)]
    table = schedule(torch.tensor(share.row_start), share.tokens_of_rank, live, work).tolist()

    def played(those: list[int]) -> list[simulate.Span]:
        several = [[*table[n][:ARRIVALS], table[n][ARRIVALS] * (not apart)] for n in those]
        draws, lengths = simulate.by_ticket(several, W, PROGRAMS), simulate.steps_of(several, work, p, tiles)
        return simulate.play(several, work, p.E, W, share.home_of_row, draws, lengths)

    launches = {"mega": list(range(len(table)))}
    if apart:
        kinds = sorted({tile[KIND] for tile in table})
        launches = {KINDS[kind]: [n for n, tile in enumerate(table) if tile[KIND] == kind] for kind in kinds}
    spans, named, now = [], [], 0
    for kind, those in launches.items():
        spans += [Span(s.program, those[s.tile], now + s.drawn, now + s.start, now + s.end) for s in played(those)]
        named.append((kind, now, max(span.end for span in spans)))
        now = named[-1][2]
    lanes = [f"rank {n // PROGRAMS} · {n % PROGRAMS}" for n in range(W * PROGRAMS)]
    facts = {letter: getattr(p, letter) for letter in "THIEKW"}
    shown = [[*tile[:ARRIVALS], tile[ARRIVALS] * (not apart)] for tile in table]
    name = "two ranks, forward: a launch a kind" if apart else "mega on two ranks, forward: one launch"
    recorded = Trace({}, facts, "forward", "steps", shown, lanes, spans)
    return Drawn(name, "simulated", recorded, [span.end for span in spans], named)


# Traced.


def traced() -> Trace:
    """The smallest of the shapes, a forward in Triton's interpreter."""
    torch.set_num_threads(1)
    problem = PRESETS["tiny"].at(device="cpu")
    return trace(Layer(problem, *random_inputs(problem, "random"), "random"), "forward")


TRACES = Path(__file__).resolve().parent / "results" / "traces"


def keep(written: dict) -> Path:
    """Of one launch of rung mega on a GPU, what the page draws, as a file in `TRACES`."""
    read = Trace.from_perfetto(written)
    sizes = {letter: read.problem[letter] for letter in "THIEK"}
    shape = next(name for name, p in PRESETS.items() if sizes == {letter: getattr(p, letter) for letter in "THIEK"})
    made = f"traced on {read.machine['device']}, {read.machine['date'][:10]}"
    name = f"mega on one GPU, {read.direction}: traced"
    moving = [span.end for span in read.spans]
    drawn = Drawn(name, made, read, moving, [("mega", 0, read.total)])
    TRACES.mkdir(exist_ok=True)
    path = TRACES / f"{shape}-{read.direction}.json"
    path.write_text(json.dumps(drawn.as_json(EVERY, PARTS), separators=(",", ":"), ensure_ascii=False) + "\n")
    return path


# What the page shows.


def pairs(recorded: Trace) -> list[dict]:
    """Timelines in pairs, one above the other, with what they show; behind some of them, what a GPU did."""
    shown = []
    for W, problem in ((NODE, PRESETS[SHAPE].at(save="inputs", device="cpu")), (None, PRESETS[SHAPE].at(device="cpu"))):
        where = f"{W} GPUs" if W else "one GPU"
        rungs = ("ranks", "mega") if W else ("persistent", "mega")
        for direction in DIRECTIONS:
            drawn = [predicted(problem, direction, W, rung).as_json(EVERY, PARTS) for rung in rungs]
            if W is None:
                drawn.append(json.loads((TRACES / f"{SHAPE}-{direction}.json").read_text()))
            shown.append({"title": f"{SHAPE} on {where}, {direction}", "timelines": drawn})
    small = [in_steps(apart).as_json(1, 1) for apart in (True, False)]
    shown.append({"title": "160 tokens on two ranks, small enough to read", "timelines": small})
    moving = [span.end for span in recorded.spans]
    device = f"traced in Triton's interpreter, {recorded.machine['date'][:10]}"
    alone = Drawn("mega, tiny, forward: one launch", device, recorded, moving, [("mega", 0, recorded.total)])
    shown.append({"title": "tiny, traced in Triton's interpreter", "timelines": [alone.as_json(1, 1)]})
    return shown


def main(folder: Path) -> None:
    """Write both files."""
    recorded = traced()
    data = {"colours": COLOURS, "kinds": KINDS, "step_of_kind": STEP_OF_KIND, "pairs": pairs(recorded)}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    (folder / "timeline_data.js").write_text(f'"use strict";\nconst TIMELINES = {text};\n')
    (folder / "trace.json").write_text(json.dumps(recorded.as_perfetto()))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--keep", written]:
            print(keep(json.loads(Path(written).read_text())))
        case [folder]:
            main(Path(folder))
        case _:
            sys.exit(__doc__)
