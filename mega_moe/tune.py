"""`mega-moe tune`: the tiles of resident programs, measured again and written into kernels/blocks.json.

Each of the six persistent kernels runs alone, on one random layer, with every tile that may suit it. No time without
parity: a tile whose result is not the default's, as far as the dtype can tell, gets no time. The default itself is held
to the reference by the ladder. Time is taken under load: a kernel is captured in a CUDA graph, which is replayed
without a pause; the tiles of one kernel take turns, and every round begins with another one. The fastest median wins.
Of tiles as fast within half a per cent it is the one that spills least, and of those the first in the list: the
default, then what is in use, then what is simple.

A tile that does not compile, does not fit, spills or raises is reported and passed over. Compiling goes ahead
of all timing, in as many processes as there are cores, on small layers: kernels are compiled for H, I and K, and never
for T or E. What the processes leave behind is Triton's cache on disk.
"""

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import product
from json import dumps

import torch
from torch import Tensor

from .kernels import blocks
from .kernels.blocks import Persistent, Resident
from .kernels.persistent import dact_swiglu, down, dx_slots, gate_up_swiglu, weight_grad
from .kernels.spills import spills
from .kernels.tile_table import TICKETS, TileTable, tile_table
from .kernels.weights import readable
from .ladder import machine
from .parity import CHUNK
from .routing import plan as make_plan
from .samples import random_inputs
from .shapes import Inputs, Need, Plan, Problem

KERNELS = TICKETS
"""The kernels whose tiles are measured: all that draw tickets."""

BLOCK = {"cuda": 50.0, "cpu": 0.0}  # milliseconds that a tile works in each round; at least one call
ROUNDS = {"cuda": 7, "cpu": 2}  # after one that is not counted, in which the card warms up
ROUNDING = 1e-3  # relative L2 distance of two results from which on one of them is wrong
NEGLIGIBLE = 0.005  # a tile that is slower by no more than this share is as fast

Doing = Callable[[str], None]


@dataclass(frozen=True)
class Timed:
    """One tile of one kernel: why there is no time, or the time."""

    kernel: str
    tile: Resident
    why_not: str | None = None
    wrong: bool = False  # why there is no time: it computed something else
    error: float | None = None  # relative L2 distance from the default's result; 0: the same bits
    spills: int | None = None  # registers a thread
    ms: tuple[float, ...] = ()  # of each round

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.ms)

    @property
    def spread(self) -> float:
        """Half of the range, in milliseconds."""
        return (max(self.ms) - min(self.ms)) / 2

    @property
    def tile_text(self) -> str:
        """The tile to be read: 128×64, strip 2, flat, 8 warps, 4 stages."""
        return text(self.tile)

    def tflops(self, problem: Problem) -> float:
        """10^12 operations a second, of this layer's product."""
        return flops(problem, self.kernel) / self.median / 1e9


@dataclass(frozen=True)
class Tuning:
    """What was measured of one layer. base: the tiles of kernels that were not measured, and everybody's BLOCK_R."""

    problem: Problem
    machine: dict
    target: str
    base: Persistent
    rows: dict[str, list[Timed]]  # by kernel, in the order of the candidates
    dense_ms: dict[str, float] = field(default_factory=dict)  # the vendor's dense product of the same flops, on a GPU

    @property
    def chosen(self) -> dict[str, Resident]:
        """The tile of each kernel that was measured."""
        return {kernel: choice(rows).tile for kernel, rows in self.rows.items()}

    @property
    def passed(self) -> bool:
        """Whether all that ran computed the same."""
        return not any(row.wrong for rows in self.rows.values() for row in rows)

    def entry(self) -> dict:
        """What goes into blocks.json: where, when and on which layer it was measured, and the tiles."""
        sizes = {letter: getattr(self.problem, letter) for letter in "HITEK"}
        made = {name: self.machine[name] for name in ("device", "date", "torch", "triton")}
        tiles = blocks.sizes_of(replace(self.base, **self.chosen))
        return {"target": self.target, **made, "dtype": "bf16", **sizes, "tiles": tiles}


# Which tiles


def candidates(problem: Problem, kernels: Sequence[str] = KERNELS, quick: bool = False) -> dict[str, list[Resident]]:
    """The tiles to measure, each once: the default of this target, that in use for this problem, and the grid of all
    that may suit. quick: of the grid only what differs from the default in one size."""
    default, in_use = blocks.blocks_for(problem.dtype).persistent, blocks.persistent_for(problem)
    found = {}
    for kernel in kernels:
        first, second = getattr(default, kernel), getattr(in_use, kernel)
        wanted = [tile for tile in grid(kernel, first) if not quick or differences(tile, first) < 2]
        found[kernel] = list(dict.fromkeys([first, second, *wanted]))
    return found


def grid(kernel: str, like: Resident) -> Iterator[Resident]:
    """Tiles that suit a GPU of Hopper's or a later kind, the simple ones first; elsewhere some will not fit.

    like: a tile of this kernel. Sizes that it does not have are not varied.
    """
    has = lambda sizes: {name: size for name, size in sizes.items() if hasattr(like, name)}
    for sizes in _grid_of_weight_grad() if kernel in ("dw_down", "dw_gate_up") else _grid_of_rows(kernel):
        yield replace(like, **has(sizes))


def _grid_of_rows(kernel: str) -> Iterator[dict]:
    N = 128 if kernel == "gate_up" else 256  # gate_up's tile has as many columns of gate as of up
    strips = (2, 3) if kernel in ("gate_up", "dact") else (2, 4, 8)
    large = dict(BLOCK_N=N, BLOCK_C=64, num_warps=8, per_processor=1)
    small = dict(BLOCK_N=N // 2, BLOCK_C=64, num_warps=4, per_processor=2)
    shapes = [large | dict(STRIP=1, FLATTEN=flat, num_stages=n) for flat, n in product((False, True), (4, 3))]
    shapes += [large | dict(STRIP=strip, FLATTEN=True, num_stages=4) for strip in strips]
    shapes += [small | dict(STRIP=strip, FLATTEN=strip > 1, num_stages=3) for strip in (1, 2)]
    shapes += [small | dict(STRIP=1, FLATTEN=True, num_stages=3)]
    for chunk, sizes in product((32, 64), shapes):
        yield sizes | dict(CHUNK=chunk)


def _grid_of_weight_grad() -> Iterator[dict]:
    shapes = [(256, 128, 64, 8, n, 1) for n in (4, 5, 6)] + [(128, 256, 64, 8, n, 1) for n in (4, 5, 6)]
    shapes += [(256, 128, 32, 8, 7, 1), (128, 128, 64, 4, 4, 2), (128, 128, 64, 4, 5, 2)]
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_R", "num_warps", "num_stages", "per_processor")
    for shape, strip in product(shapes, (1, 2, 4, 8)):
        yield dict(zip(names, shape, strict=True)) | dict(STRIP=strip)


def differences(tile: Resident, other: Resident) -> int:
    """In how many sizes two tiles of one kernel differ."""
    sizes = asdict(other)
    return sum(size != sizes[name] for name, size in asdict(tile).items())


def choice(rows: Sequence[Timed]) -> Timed:
    """Of those with a time: the first that is as fast as the fastest, and of such the one that spills least.

    Raises ValueError where none has a time.
    """
    timed = [row for row in rows if row.ms]
    if not timed:
        raise ValueError("no tile has a time")
    limit = min(row.median for row in timed) * (1 + NEGLIGIBLE)
    return min((row for row in timed if row.median <= limit), key=lambda row: row.spills or 0)


# One layer, and each kernel alone


@dataclass(frozen=True)
class Work:
    """A layer with all that a persistent kernel may be given, so that each can run alone."""

    problem: Problem
    inputs: Inputs
    dy: Tensor  # (T, H)
    plan: Plan
    table: TileTable
    rows_in_blocks: Tensor  # (R,): where each row lies in tensors that lie in blocks
    pre: Tensor  # (R, 2, I)
    act: Tensor  # (rows in blocks, I), as all below
    weighted_act: Tensor
    dpre: Tensor  # 2I columns


def work(problem: Problem, tiles: Persistent) -> Work:
    """A random layer with balanced routing. pre is drawn as x @ w_gate_up would come out, and what follows from it is
    made in plain torch: no kernel has to run before another can be measured."""
    p = problem
    inputs, dy = random_inputs(p)
    plan = make_plan(inputs.topk_ids, p.E)
    table = tile_table(plan, tiles)
    route_in_blocks = table.route_in_blocks[: int(table.counters[0]) * tiles.BLOCK_R]
    rows_in_blocks = (route_in_blocks >= 0).nonzero().squeeze(1)

    def in_blocks(t: Tensor) -> Tensor:
        laid = table.in_blocks(t.shape[1], like=t).zero_()
        laid[rows_in_blocks] = t
        return laid

    generator = torch.Generator(p.device).manual_seed(1)
    normal = lambda *shape: torch.randn(shape, generator=generator, device=p.device, dtype=p.dtype)
    pre, dact = normal(p.R, 2, p.I), normal(p.R, p.I)
    gate, up = pre.unbind(1)
    sigmoid = gate.sigmoid()
    act = gate * sigmoid * up
    weight = inputs.topk_weights[plan.token_of_row.long(), plan.slot_of_row.long(), None].to(p.dtype)
    dact *= weight
    dpre = torch.cat([dact * up * sigmoid * (1 + gate * (1 - sigmoid)), dact * gate * sigmoid], 1)
    return Work(
        p, inputs, dy, plan, table, rows_in_blocks, pre, in_blocks(act), in_blocks(act * weight), in_blocks(dpre)
    )


def call_of(work: Work, kernel: str, tile: Resident) -> Callable[[], tuple[Tensor, ...]]:
    """One launch of a kernel with this tile as a call without arguments, which returns what it computed. It sets the
    kernel's ticket back first: so it can be repeated, which a direction of a layer never does."""
    p, i, plan = work.problem, work.inputs, work.plan
    table = replace(work.table, tiles=replace(work.table.tiles, **{kernel: tile}))
    ticket = table.ticket(kernel)[:1]
    w_gate_up, w_down = readable(i.w_gate_up), readable(i.w_down)

    def launch() -> tuple[Tensor, ...]:
        match kernel:
            case "gate_up":
                return gate_up_swiglu(i.x, w_gate_up, plan, table, p.swiglu_limit, True, True)
            case "down":
                return (down(work.act, w_down, plan, table),)
            case "dact":
                return dact_swiglu(work.dy, w_down, work.pre, i.topk_weights, plan, table, p.swiglu_limit, Need())
            case "dx":
                return (dx_slots(work.dpre, w_gate_up, plan, table),)
            case "dw_down":
                dw = torch.empty_like(i.w_down).mT
                return (weight_grad(work.weighted_act, work.dy, table, kernel, dw),)
            case "dw_gate_up":
                dw = torch.empty_like(i.w_gate_up).flatten(1, 2)
                return (weight_grad(work.dpre, i.x, table, kernel, dw),)

    def call() -> tuple[Tensor, ...]:
        ticket.zero_()
        return launch()

    return call


def flops(problem: Problem, kernel: str) -> int:
    """Of one launch: two a multiply-add."""
    return (2 if kernel in ("down", "dact", "dw_down") else 4) * problem.R * problem.H * problem.I


def dense(problem: Problem, kernel: str) -> Callable[[], tuple[Tensor]]:
    """The vendor library's plain product of the same flops and layouts, all rows with one weight, as a call."""
    R, H, I = problem.R, problem.H, problem.I
    normal = lambda *shape: torch.randn(shape, dtype=problem.dtype, device=problem.device)
    a, b = {
        "gate_up": lambda: (normal(R, H), normal(2 * I, H).mT),
        "down": lambda: (normal(R, I), normal(H, I).mT),
        "dact": lambda: (normal(R, H), normal(H, I)),
        "dx": lambda: (normal(R, 2 * I), normal(2 * I, H)),
        "dw_down": lambda: (normal(R, H).mT, normal(R, I)),
        "dw_gate_up": lambda: (normal(R, 2 * I).mT, normal(R, H)),
    }[kernel]()
    return lambda: (a @ b,)


# Compiling beforehand


def jobs_of(wanted: dict[Problem, dict[str, list[Resident]]]) -> int:
    """How often `compile_beforehand` reports what it is doing."""
    return sum(len(tiles) for kernels in wanted.values() for tiles in kernels.values())


def compile_beforehand(
    wanted: dict[Problem, dict[str, list[Resident]]], doing: Doing = lambda what: None
) -> dict[tuple[Problem, str, Resident], str]:
    """Fill Triton's cache, in a process a core. Returns why a tile cannot run, where it cannot.

    A compiler may kill its process, and that takes all others along. Whatever then has no answer is tried again in one
    process, one tile after another: so it is known whose fault it is.
    """
    jobs = [(p, kernel, tile) for p, kernels in wanted.items() for kernel, tiles in kernels.items() for tile in tiles]
    outcomes: dict[tuple[Problem, str, Resident], str | None] = {}

    def finish(job: tuple[Problem, str, Resident], future: Future) -> None:
        outcomes[job] = future.result()
        doing(f"compile {job[1]}")

    with _processes(min(len(os.sched_getaffinity(0)), len(jobs))) as pool:
        try:
            for job, future in [(job, pool.submit(compile_one, *job)) for job in jobs]:
                finish(job, future)
        except BrokenProcessPool:
            pass
    while left := [job for job in jobs if job not in outcomes]:
        with _processes(1) as pool:
            for job in left:
                try:
                    finish(job, pool.submit(compile_one, *job))
                except BrokenProcessPool:
                    outcomes[job] = "it killed the process that compiled it, or ran it first"
                    break
    return {job: why_not for job, why_not in outcomes.items() if why_not}


def _processes(number: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))


def compile_one(problem: Problem, kernel: str, tile: Resident) -> str | None:
    """Compile and run once, on a small layer. Returns why not, if it cannot be done. Runs in a process of its own."""
    synchronize = torch.cuda.synchronize if problem.device == "cuda" else lambda: None
    try:
        call_of(_small_work(problem.at(T=256, E=2)), kernel, tile)()
        synchronize()
    except Exception as error:
        reason = one_line(error)
    else:
        return None
    try:
        synchronize()
    except Exception:
        os._exit(1)  # no kernel runs after an illegal access: the next tiles would be blamed for this one
    return reason


@lru_cache(1)
def _small_work(problem: Problem) -> Work:
    return work(problem, blocks.blocks_for(problem.dtype).persistent)


def one_line(error: Exception) -> str:
    """What went wrong. A compiler's message begins with the code; then the last line says it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    message = lines[-1] if lines[0].startswith("at ") else lines[0]
    return f"{type(error).__name__}: {message}"[:200]


# Measuring


def steps_of(tiles: dict[str, list[Resident]], device: str) -> int:
    """How often `measure` reports what it is doing."""
    return sum(len(wanted) + 1 + ROUNDS[device] for wanted in tiles.values())


def measure(
    problem: Problem,
    tiles: dict[str, list[Resident]],
    failures: dict[tuple[Problem, str, Resident], str],
    doing: Doing = lambda what: None,
) -> Tuning:
    """Run and time every tile of every kernel on one layer.

    tiles: by kernel; the first is the one to whose result all others are held. failures: tiles known not to run, and
    why. Raises RuntimeError where a first tile does not run.
    """
    all_of_them = set(tiles) == set(KERNELS)
    base = blocks.blocks_for(problem.dtype).persistent if all_of_them else blocks.persistent_for(problem)
    layer = work(problem, base)
    tuning = Tuning(problem, machine(problem.device), blocks.target(), base, {})
    for kernel, wanted in tiles.items():
        rows = examine(layer, kernel, wanted, failures, doing)
        calls = {row.tile: call_of(layer, kernel, row.tile) for row in rows if not row.why_not}
        if problem.device == "cuda":
            calls["dense"] = dense(problem, kernel)
            calls["dense"]()
        ms = take_turns(calls, problem.device, lambda turn, kernel=kernel: doing(f"time {kernel}, round {turn}"))
        if problem.device == "cuda":
            tuning.dense_ms[kernel] = statistics.median(ms["dense"])
        tuning.rows[kernel] = [replace(row, ms=tuple(ms.get(row.tile, ()))) for row in rows]
    return tuning


def examine(
    layer: Work,
    kernel: str,
    tiles: Sequence[Resident],
    failures: dict[tuple[Problem, str, Resident], str],
    doing: Doing = lambda what: None,
) -> list[Timed]:
    """Run every tile once, and hold its result to the first one's."""
    rows, expected = [], None
    for tile in tiles:
        doing(f"run {kernel}")
        row = Timed(kernel, tile, why_not=failures.get((layer.problem, kernel, tile)))
        if not row.why_not:
            row, results = run_once(layer, row)
            if expected is None:
                expected = results
            if results:
                row = judged(row, results, expected, first=tile == tiles[0])
            del results
        if tile == tiles[0] and row.why_not:
            raise RuntimeError(f"{kernel} does not run with its default tile, {text(tile)}: {row.why_not}")
        rows.append(row)
    return rows


def run_once(layer: Work, row: Timed) -> tuple[Timed, list[Tensor] | None]:
    """What the tile computed, of live rows, or why it did not."""
    call, results = call_of(layer, row.kernel, row.tile), []
    try:
        spilled = spills(lambda: results.extend(call()))
    except Exception as error:
        return replace(row, why_not=one_line(error)), None
    for at in {"gate_up": (1,), "dact": (0, 1)}.get(row.kernel, ()):
        results[at] = results[at][layer.rows_in_blocks]
    return replace(row, spills=spilled), results


def judged(row: Timed, results: list[Tensor], expected: list[Tensor], first: bool) -> Timed:
    """The row with its error, and whether it is given time. The first one is, even where it spills."""
    error = torch.tensor([distance(one, other) for one, other in zip(results, expected, strict=True)]).max().item()
    row = replace(row, error=error)
    if not error <= ROUNDING:
        return replace(row, wrong=True, why_not=f"WRONG: relative L2 distance {error:.1e} from the default's result")
    if row.spills and not first:  # no kernel of ours spills: what is fast in spite of it here is slow elsewhere
        return replace(row, why_not=f"spills {row.spills} registers a thread")
    return row


def distance(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected| over the whole tensor; 0 where all are equal, NaN or Inf where a value is."""
    if torch.equal(got, expected):
        return 0.0
    pairs = list(zip(got.reshape(-1).split(CHUNK), expected.reshape(-1).split(CHUNK), strict=True))
    off = sum((g.double() - e).square().sum() for g, e in pairs)
    size = sum(e.double().square().sum() for _, e in pairs)
    return (off / size).sqrt().item()


def take_turns(
    calls: dict[object, Callable[[], object]], device: str, doing: Callable[[int], None] = lambda turn: None
) -> dict[object, list[float]]:
    """Milliseconds of each call in each counted round. All have run before."""
    if device == "cuda":
        pool = torch.cuda.graph_pool_handle()  # one for all: their results are dropped, and take the same memory
        calls, clock = {key: captured(call, pool) for key, call in calls.items()}, device_clock
    else:
        clock = wall_clock
    counts = {key: max(1, math.ceil(BLOCK[device] / clock(call, 1))) for key, call in calls.items()}

    ms, keys = {key: [] for key in calls}, list(calls)
    for turn in range(1 + ROUNDS[device]):
        doing(turn)
        for key in keys:
            sample = clock(calls[key], counts[key])
            if turn > 0:
                ms[key].append(sample)
        keys = keys[1:] + keys[:1]
    return ms


def captured(call: Callable[[], object], pool: tuple[int, int]) -> Callable[[], None]:
    """The call as a CUDA graph: what is timed is the device, however slow the host is at launching."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        call()
    return graph.replay


def device_clock(call: Callable[[], object], count: int) -> float:
    """Milliseconds of one of `count` calls without a pause, behind one that is not counted."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    began.record()
    for _ in range(count):
        call()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / count


def wall_clock(call: Callable[[], object], count: int) -> float:
    """Milliseconds of one of `count` calls. It shows that the machinery works, and nothing about speed."""
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) * 1e3 / count


# The table


def has_entry(entries: list[dict], problem: Problem, target: str) -> bool:
    """Whether the very layer was measured on this target."""
    return any((e["target"], e["H"], e["I"]) == (target, problem.H, problem.I) for e in entries)


def with_entry(entries: list[dict], entry: dict) -> list[dict]:
    """The table with this entry, in place of one of the same target, dtype, H and I."""
    key = lambda e: (e["target"], e["dtype"], e["H"], e["I"])
    return sorted([*(e for e in entries if key(e) != key(entry)), entry], key=key)


def as_json(entries: list[dict]) -> str:
    """The table's text: a fact a line, a tile a line."""

    def lines(value: object, depth: int) -> str:
        inner, outer = "  " * (depth + 1), "  " * depth
        if depth == 3 or not value or not isinstance(value, dict | list):
            return dumps(value)
        if isinstance(value, list):
            parts, ends = [lines(part, depth + 1) for part in value], "[]"
        else:
            parts, ends = [f"{dumps(name)}: {lines(part, depth + 1)}" for name, part in value.items()], "{}"
        return ends[0] + "\n" + ",\n".join(inner + part for part in parts) + "\n" + outer + ends[1]

    return lines(entries, 0) + "\n"


def text(tile: Resident) -> str:
    """A tile to be read: 128×64, strip 2, flat, 8 warps, 4 stages."""
    sizes = asdict(tile)
    words = ["×".join(str(size) for name, size in sizes.items() if name.startswith("BLOCK"))]
    words += [f"{name.lower()} {sizes[name]}" for name in ("STRIP", "CHUNK") if name in sizes]
    words += ["flat"] if sizes.get("FLATTEN") else []
    words += [f"{sizes['num_warps']} warps", f"{sizes['num_stages']} stages"]
    words += [f"{tile.per_processor} a processor"] if tile.per_processor > 1 else []
    return ", ".join(words)
