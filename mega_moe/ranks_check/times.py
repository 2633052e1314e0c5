"""How long a layer takes over ranks: the unfused path, the rungs over ranks, and the same rows without any exchange.

Times are a GPU's own, between events on its queue. The rows of a table take turns in rounds, each for a block of time
without a pause, since a GPU's clocks depend on what ran in the second before; ranks begin a block together. A lap is a
forward and a backward; of each the slowest rank counts, and of all laps the median. No time without parity: before the
turns, each row is compared with one process that computes all tokens of all ranks.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..api import moe
from ..autograd import problem_of
from ..ladder import Layer
from ..parity import OUTPUTS
from ..processes import ProcessHeaps
from ..roofline import DIRECTIONS
from ..shapes import Inputs, Problem
from .layers import DIFFERENTIABLE, by_one_process, differing, distance, draw, folded
from .parts import Node, Wrong
from .right import ways
from .unfused import layer

WHAT = (*DIRECTIONS, "2 x forward + backward")
"""What is timed. The last is a training step that keeps nothing of forward but its inputs, and calls it again."""

GROSS = 0.02
"""The relative L2 distance from one process from which on a row computes something else. Where rounding happens in
other places bf16 explains about a quarter of it."""

INTERPRETED = "  Kernels are interpreted: these times say that they ran, and nothing about speed"

SPARE = 1.25
"""Rows that a rank has room for, over T * K: random routing gives the busiest a few per cent more than the mean."""


@dataclass(frozen=True)
class Turns:
    """How long is measured: so many rounds, after those that warm up, of blocks of so many seconds. Of a block at least
    one lap counts; the first are dropped, since the host is not ahead of the device yet."""

    warm_up: int
    rounds: int
    block: float
    dropped: int


def turns(on_gpu: bool, quick: bool) -> Turns:
    """On a CPU one lap, to show that it runs; its times say nothing."""
    return Turns(1, 2 if quick else 6, 0.2, 1) if on_gpu else Turns(0, 1, 0.0, 0)


@dataclass
class Row:
    """A row of the table.

    Attributes:
        name: of whom.
        failure: why there is no time: it raised, or computed something else.
        off: the relative L2 distance from one process of each output that is not equal to the bit.
        ms: by WHAT, the median over laps of the slowest rank's. spread: half the distance between quartiles.
    """

    name: str
    failure: str | None = None
    off: dict[str, float] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)


Lap = Callable[[Callable[[], None]], None]
"""Forward and backward; it calls what it is given when either ends."""

ALONE = "mega, no exchange"
OTHERS = ("plain torch, eager", "plain torch, torch.compile")
"""Rows that are not ours: if one of them fails there is nothing to compare with, and nothing wrong with the node."""


class Runner:
    """A layer in somebody's hands: forward with everything that backward needs, and backward."""

    def __init__(self, inputs: Inputs, dy: Tensor, call: Callable[..., Tensor]):
        self.leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in DIFFERENTIABLE}
        self.topk_ids, self.dy, self.call = inputs.topk_ids, dy, call

    def forward(self) -> Tensor:
        return self.call(topk_ids=self.topk_ids, **self.leaves)

    def backward(self, y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, list(self.leaves.values()), self.dy)

    def results(self) -> dict[str, Tensor]:
        """Of one lap, by name."""
        y = self.forward()
        return dict(zip(OUTPUTS, (y.detach(), *self.backward(y))))

    def lap(self, mark: Callable[[], None]) -> None:
        """One lap, its two times apart."""
        y = self.forward()
        mark()
        self.backward(y)
        mark()


def runners(
    node: Node, group: ProcessGroup, heaps: ProcessHeaps | None, held: Inputs, dy: Tensor
) -> dict[str, Callable[[], Runner]]:
    """The rows by name, each to be made when its turn comes."""
    made = {}
    if node.collectives:
        for name, compiled in zip(OTHERS, (False, True)):
            made[name] = lambda compiled=compiled: Runner(held, dy, layer(group, compiled, node.device))
    for name, options in ways(node, group, heaps).items():
        made[name] = partial(Runner, held, dy, partial(moe, save="inputs", **options))
    if heaps:
        made["mega, heaps, pre kept"] = partial(Runner, held, dy, partial(moe, stage="mega", heap=heaps, save="pre"))
    made[ALONE] = partial(Runner, folded(held), dy, partial(moe, stage="mega", save="inputs"))
    return made


def times(
    node: Node, group: ProcessGroup, problem: Problem, can_heap: bool, how: Turns, rate: float | None
) -> tuple[str, dict]:
    """The table of one layer, `problem.T` tokens a rank. rate: bytes a second over the links, each way, if known."""
    whole = draw(problem, (problem.T,) * node.W)
    rows = whole.rows()
    held, dy = whole.of(node.rank)
    alone = whole.results_of(node.rank, by_one_process(whole.inputs, whole.dy))
    alone = {name: t.clone() for name, t in alone.items()}
    held, dy = Inputs(*(t.clone() for t in vars(held).values())), dy.clone()
    del whole
    if node.on_gpu:  # what all tokens of all ranks took, many GiB, torch keeps for itself, and heaps are not torch's
        torch.cuda.empty_cache()
    most = max_rows(problem, rows)
    table = []
    with ExitStack() as stack:
        heaps = stack.enter_context(node.heaps(group, problem.T, most)) if can_heap else None
        laps = {}
        for name, make in runners(node, group, heaps, held, dy).items():
            row, runner = examined(node, name, make, by_one_process(folded(held), dy) if name == ALONE else alone)
            table.append(row)
            if not row.failure:
                laps[name] = runner.lap
        measured = take_turns(node, laps, how)
        failures = [f"{row.name}: {row.failure}" for row in table if row.failure and row.name not in OTHERS]
        if heaps and not failures:
            heaps.check()
    for row in table:
        if row.name in measured:
            row.ms, row.spread = medians(measured[row.name])
    facts = dict(tokens=problem.T, max_rows=most, rows=[asdict(row) for row in table])
    facts["exchange"] = exchange(problem, rows, {row.name: row.ms for row in table}, rate)
    below = exchange_in_lines(facts["exchange"]) if node.on_gpu else [INTERPRETED]
    said = "\n" + "\n".join([*in_lines(table), *below])
    if failures:
        raise Wrong("; ".join(failures), said, facts)
    return said, facts


def max_rows(problem: Problem, rows: Tensor) -> int:
    """What heaps are made for: T * K rows and something to spare; but no less than come, in a layer so small that a few
    tokens make the difference."""
    return max(math.ceil(SPARE * problem.T * problem.K), int(rows.sum(0).max()))


def examined(
    node: Node, name: str, make: Callable[[], Runner], expected: dict[str, Tensor]
) -> tuple[Row, Runner | None]:
    """A row without times, the same on all ranks, and who runs it."""
    row, runner, off = Row(name), None, {}
    node.meet()
    try:
        runner = make()
        got = runner.results()
        off = {output: distance(got[output], expected[output]) for output in differing(got, expected)}
        if any(not each <= GROSS for each in off.values()):
            row.failure = f"no time without parity: relative L2 distances {off}"
    except Exception as error:
        row.failure = f"{type(error).__name__}: {error}"
    heard = node.gather((row.failure, off))
    row.failure = next((f"rank {rank}: {failure}" for rank, (failure, _) in enumerate(heard) if failure), None)
    for _, there in heard:
        for output, each in there.items():
            row.off[output] = max(each, row.off.get(output, 0.0))
    return row, runner


def take_turns(node: Node, laps: dict[str, Lap], how: Turns) -> dict[str, Tensor]:
    """Run all laps in rounds: for each name the seconds of (laps, 2) directions, of the slowest rank each."""
    counts = dict.fromkeys(laps, 1)
    for name, lap in laps.items() if how.block else ():
        seconds = float(back_to_back(node, lap, 1, how.dropped).sum())
        counts[name] = max(node.gather(max(1, math.ceil(how.block / seconds))))

    kept, names = {name: [] for name in laps}, list(laps)
    for turn in range(how.warm_up + how.rounds):
        for name in names:
            seconds = back_to_back(node, laps[name], counts[name], how.dropped)
            if turn >= how.warm_up:
                kept[name].append(torch.stack(node.gather(seconds)).amax(0))
        names = names[1:] + names[:1]
    return {name: torch.cat(seconds) for name, seconds in kept.items()}


def back_to_back(node: Node, lap: Lap, count: int, dropped: int) -> Tensor:
    """`count` laps without a pause, after those that are dropped: (count, 2) seconds of their directions. All ranks
    begin together."""
    marks = []

    def mark() -> None:
        if node.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        marks.append(event if node.on_gpu else time.perf_counter())

    node.meet()
    mark()
    for _ in range(dropped + count):
        lap(mark)
    if node.on_gpu:
        torch.cuda.synchronize()
    between = [a.elapsed_time(b) / 1e3 if node.on_gpu else b - a for a, b in pairwise(marks)]
    return torch.tensor(between).view(-1, 2)[dropped:]


def medians(seconds: Tensor) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds by WHAT, and half the distance between their quartiles, from (laps, 2) seconds."""
    forward, backward = (1e3 * seconds).unbind(1)
    ms, spread = {}, {}
    for name, each in zip(WHAT, (forward, backward, 2 * forward + backward)):
        quarter, half, three = each.quantile(each.new_tensor([0.25, 0.5, 0.75])).tolist()
        ms[name], spread[name] = half, (three - quarter) / 2
    return ms, spread


def exchange(problem: Problem, rows: Tensor, ms: dict[str, dict[str, float]], rate: float | None) -> dict:
    """What mega's exchange is, and how much of it shows, by direction.

    bytes     over the links of the busiest rank, each way: forward brings rows, and takes as many results back;
              backward brings rows of dy and of x, and takes those of dx back
    gb_per_s  the same over the time of the whole direction
    links_ms  what they take by themselves at `rate`; None where that is not known
    shown_ms  what mega takes longer than the same rows do where all experts are at home
    hidden    so much of links_ms does not show: a share; None where there is no exchange

    rows: (W, W), see `Whole.rows`.
    """
    away = rows - rows.diag().diag()
    out, into = away.sum(1), away.sum(0)
    carried = dict(forward=(into + out).max(), backward=torch.maximum(2 * into + out, into + 2 * out).max())
    found = {}
    for direction in DIRECTIONS:
        size = int(carried[direction]) * problem.H * problem.dtype.itemsize
        took, alone = (ms.get(name, {}).get(direction) for name in ("mega, heaps", ALONE))
        facts = found[direction] = dict(bytes=size, gb_per_s=None, links_ms=None, shown_ms=None, hidden=None)
        if rate:
            facts["links_ms"] = 1e3 * size / rate
        if took and alone:
            facts["gb_per_s"], facts["shown_ms"] = size / took / 1e6, took - alone
            if size and rate:
                facts["hidden"] = min(max(1 - facts["shown_ms"] / facts["links_ms"], 0.0), 1.0)
    return found


def traces(node: Node, group: ProcessGroup, problem: Problem) -> tuple[str, dict]:
    """What tiles did in one launch of mega a direction, on every rank at once; rank 0's counts."""
    from .. import trace  # which needs Triton

    whole = draw(problem, (problem.T,) * node.W)
    held, dy = whole.of(node.rank)
    most = max_rows(problem, whole.rows())
    found, said = {}, []
    with node.heaps(group, problem.T, most) as heaps:
        layer = Layer(problem_of(held, None, "inputs", "bf16", 0, heaps.key, None), held, dy, "random")
        for direction in DIRECTIONS:
            node.meet()
            traced = trace.trace(layer, direction)
            heaps.check()
            facts = found[direction] = traced.as_json()
            hidden = facts["hidden"]
            said.append(
                f"  {direction:9} {traced.outcome()}; two steps or more at work {facts['overlap']:.0%} of the time"
                + (f"; of the exchange {hidden:.0%} behind products" if hidden is not None else "")
            )
    return "\n" + "\n".join(said), found


def predicted(
    node: Node, group: ProcessGroup, shapes: dict[str, Problem], measured: dict[str, dict]
) -> tuple[str, dict]:
    """What mega_moe.predict says of the rungs over heaps on H200s, and what bounds them, beside what was measured; and
    what others have published of eight. Ranks share the work."""
    from .. import predict  # which needs Triton

    jobs = [(shape, rung, d) for shape in shapes for rung in ("ranks", "mega") for d in DIRECTIONS]
    mine = {
        job: predict.over_links(shapes[job[0]].at(save="inputs"), node.W, job[2], job[1]).as_json()
        for job in jobs[node.rank :: node.W]
    }
    all_of_them = {job: its for some in node.gather(mine) for job, its in some.items()}
    found, said = {}, []
    for shape, rung, direction in jobs:
        its = all_of_them[shape, rung, direction]
        ms = its["ms"]
        rows = measured.get(shape, {}).get("rows", [])
        took = next((row["ms"].get(direction) for row in rows if row["name"] == f"{rung}, heaps"), None)
        took = took if node.on_gpu else None
        facts = dict(predicted_ms=ms, measured_ms=took, **{name: its[name] for name in ("products", "links", "bound")})
        if node.W == 8:
            facts["published_ms"] = predict.PUBLISHED.get((shape, direction))
        found.setdefault(shape, {}).setdefault(rung, {})[direction] = facts
        beside = f"{took:9.2f} measured {ms / took - 1:+8.1%}" if took else ""
        said.append(f"  {shape:18} {rung:6} {direction:9}{ms:9.2f} predicted{beside}")
    return "\n" + "\n".join(said), found


def in_lines(rows: list[Row]) -> list[str]:
    """The table, in milliseconds."""
    wide = max(len(row.name) for row in rows)
    lines = [f"  {'ms, median ± spread':{wide}}" + "".join(f"{name:>24}" for name in WHAT) + "  against one process"]
    for row in rows:
        if row.failure:
            lines.append(f"  {row.name:{wide}}  no times: {row.failure}")
            continue
        cells = "".join(f"{row.ms[name]:17.2f} ± {row.spread[name]:4.2f}" for name in WHAT)
        off = f"off by {max(row.off.values()):.1e}" if row.off else "equal to the bit"
        lines.append(f"  {row.name:{wide}}{cells}  {off}")
    return lines


def exchange_in_lines(found: dict) -> list[str]:
    """What `exchange` found, a line a direction."""
    lines = []
    for direction, e in found.items():
        if e["shown_ms"] is None or not e["bytes"]:
            continue
        line = f"  {direction}: {e['bytes'] / 1e6:,.1f} MB each way, {e['gb_per_s']:.1f} GB/s on average; "
        line += f"{e['shown_ms']:.2f} ms more than without exchange"
        if e["hidden"] is not None:
            line += f", where the links take {e['links_ms']:.2f} ms: {e['hidden']:.0%} hidden"
        lines.append(line)
    return lines
