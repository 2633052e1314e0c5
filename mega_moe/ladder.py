"""Climbing the ladder: run one layer on every rung, and note parity, launches, time and memory.

No time without parity: every rung's results are judged against the float64 truth in the same run that times it. Timing
is interleaved, round by round over all rungs and both directions: a card that grows hot slows all of them alike.
"""

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from . import roofline
from .kernels.weights import copied_bytes
from .launches import launches
from .parity import SMALL, SMALL_BUDGET, Oracle, Parity
from .registry import Rung
from .roofline import DIRECTIONS
from .shapes import Inputs, Problem
from .symmetric import LocalHeaps

WARM_UP = {"cuda": 3, "cpu": 1}  # rounds before the measured ones
ROUNDS = {"cuda": 20, "cpu": 5}
LONGEST = 30.0  # seconds of timing after which no further round begins, once one is measured

FLUSH = 2**28  # bytes written before each measured call: more than any GPU's L2
FLUSHES = 10  # that many times: about a millisecond, in which the host gets ahead of the device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Layer:
    """One layer to run: its facts, its tensors, dy (T, H), where its routing comes from, and over ranks their heaps."""

    problem: Problem
    inputs: Inputs
    dy: Tensor
    routing: str  # one of samples.ROUTINGS, or "layer" for one read from a file
    heaps: LocalHeaps | None = None

    @property
    def rows(self) -> int:
        """Live routes."""
        ids = self.inputs.topk_ids
        return int(((ids >= 0) & (ids < self.problem.E)).sum())


@dataclass
class Row:
    """What was measured of one rung; everything but `stage` and `why_not` is None where it cannot run.

    `Climb.as_json` says what each is, and in which unit; `spread` alone is not in it: the median distance of the times
    from their median `ms`, and None where there is one time.
    """

    stage: str
    why_not: str | None = None
    note: str | None = None
    parity: Parity | None = None
    launches: dict[str, int] | None = None
    ms: dict[str, float] | None = None
    spread: dict[str, float | None] | None = None
    interpreted: bool | None = None
    tflops: dict[str, float] | None = None
    share_of_ceiling: dict[str, float] | None = None
    peak_bytes: int | None = None
    copied_bytes: int | None = None

    def as_json(self) -> dict:
        """One of the `rows` of `Climb.as_json`."""
        shares = None
        if self.parity:
            shares = {name: share if math.isfinite(share) else None for name, share in self.parity.shares.items()}
        return {
            "stage": self.stage,
            "why_not": self.why_not,
            "note": self.note,
            "parity": shares,
            "failed": self.parity.failed if self.parity else None,
            "launches": self.launches,
            "ms": self.ms,
            "interpreted": self.interpreted,
            "tflops": self.tflops,
            "share_of_ceiling": self.share_of_ceiling,
            "peak_bytes": self.peak_bytes,
            "copied_bytes": self.copied_bytes,
        }


@dataclass(frozen=True)
class Climb:
    """A finished run: the type of the device, the machine, the problem, and a row for each rung that was asked for."""

    device: str  # "cuda" or "cpu"
    machine: dict
    problem: dict
    rows: list[Row] = field(default_factory=list)
    allowed_ms: dict[str, float] | None = None  # what the hardware's ceiling allows, where it is known

    @property
    def passed(self) -> bool:
        """Whether some rung ran, and every rung that ran is within its budget, in every output."""
        ran = [row.parity.passed for row in self.rows if row.parity]
        return bool(ran) and all(ran)

    @property
    def where(self) -> str:
        """The machine in one line."""
        m = self.machine
        triton = f"triton {m['triton']}" if m["triton"] else "no triton"
        return f"{m['device']}, torch {m['torch']}, {triton}, python {m['python']}"

    @property
    def fixed_budget(self) -> str | None:
        """The budget of every output where parity does not measure it, since H or I is small; None where it does."""
        p = self.problem
        if p["dtype"] != "fp32" or min(p["H"], p["I"]) >= SMALL:
            return None
        return f"2^{math.log2(SMALL_BUDGET):.0f}"

    def as_json(self) -> dict:
        """What `mega-moe ladder --json` prints: `{"machine": {...}, "problem": {...}, "rows": [{...}, ...]}`.

        machine: where and when it ran.
            device  str         what the GPU calls itself, or a CPU's model and the threads that torch uses
            torch   str         its version
            triton  str | null  its version; null where it is not installed
            python  str         its version
            date    str         ISO 8601, to the second, with the time zone

        problem: what ran.
            T, H, I, E, K  int         tokens, hidden size, an expert's intermediate size, experts, experts a token
            W              int         ranks: 1
            dtype          str         of x and the weights: "fp32", "bf16", "fp16", "fp64"
            routing        str         "balanced", "random", "zipf", "hot"; "layer" where it was read from a file
            save           str         what forward keeps for backward: "pre", what gate_up puts out; or "inputs", and
                                       backward makes pre again
            precision      str | null  what the products are computed in; null: in dtype

        rows: one for each rung that was asked for, in that order; without --stage, the whole ladder from below.
            stage             str          the rung's name
            why_not           str | null   why it cannot run here; null where it ran. Otherwise all below is null
            note              str | null   what makes it slower here than it need be; null if nothing does
            parity            {output: float | null}
                                           for y, dx, dtopk_weights, dw_gate_up and dw_down: the worst row's error as a
                                           share of its budget, up to 1 passes; null where it is NaN or infinite
            failed            [output]     those over budget, or not finite; empty where all passed
            launches          {d: int}     kernels, memsets and copies
            ms                {d: float}   milliseconds, the median; of the device on a GPU, of the wall clock on a CPU
            interpreted       bool         Triton's interpreter ran the kernels, so ms says nothing about hardware
            tflops            {d: float}   10^12 useful operations a second, nothing recomputed among them; null where
                                           interpreted
            share_of_ceiling  {d: float}   the least time that the hardware allows, over ms; null where interpreted, on
                                           a CPU, and on a GPU whose data sheet is not known here
            peak_bytes        int          memory beside the inputs, forward and backward together; null on a CPU
            copied_bytes      int          weights copied at each call, since no kernel can read them as they lie

        {d: ...} has the two keys "forward" and "backward".
        """
        return {"machine": self.machine, "problem": self.problem, "rows": [row.as_json() for row in self.rows]}


def climb(rungs: Sequence[Rung], layer: Layer, doing: Callable[[str], None] = lambda what: None) -> Climb:
    """Run `layer` on each of `rungs`. `doing` is told what is being done; `steps_of` says how often.

    Raises ValueError where parity has no meaning: bf16 or fp16 with H or I below 16, or inputs that overflow the dtype.
    """
    problem = layer.problem
    rows = [Row(rung.name, why_not=rung.why_not(problem)) for rung in rungs]
    running = [(rung, row) for rung, row in zip(rungs, rows, strict=True) if not row.why_not]
    ceiling = roofline.ceiling(device_name(problem.device))
    allowed = {d: roofline.allowed_ms(problem, d, ceiling, layer.rows) if ceiling else None for d in DIRECTIONS}
    allowed_ms = None if None in allowed.values() else allowed

    if running:
        doing("truth in float64, and the reference's own rounding")
        oracle = Oracle(problem, layer.inputs, layer.dy)
        _ = oracle.budgets
        for rung, row in running:
            doing(f"{rung.name}: parity, launches, memory")
            _examine(rung, row, layer, oracle)
        del oracle
        for round_number in _time(running, layer):
            doing(f"time, round {round_number}")
        for _, row in running:
            _rate(row, layer, allowed_ms)
    return Climb(problem.device, machine(problem.device), facts(layer), rows, allowed_ms)


def steps_of(rungs: Sequence[Rung], problem: Problem) -> int:
    """How often `climb` reports what it is doing, at most."""
    running = sum(not rung.why_not(problem) for rung in rungs)
    return 1 + running + WARM_UP[problem.device] + ROUNDS[problem.device] if running else 0


def _examine(rung: Rung, row: Row, layer: Layer, oracle: Oracle) -> None:
    """Everything but time. The first run, which parity judges, also compiles; the others count."""
    problem, inputs, dy = layer.problem, layer.inputs, layer.dy
    row.note = rung.note(problem)
    row.interpreted = rung.needs_triton and problem.device == "cpu"
    row.copied_bytes = copied_bytes(inputs) if rung.needs_triton else 0

    y, saved = rung.forward(problem, inputs)
    grads = rung.backward(problem, inputs, saved, dy)
    row.parity = oracle.check(y, grads)
    del y, saved, grads

    if problem.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y, saved = rung.forward(problem, inputs)
        grads = rung.backward(problem, inputs, saved, dy)
        row.peak_bytes = torch.cuda.max_memory_allocated() - before
        del y, saved, grads

    _, saved = rung.forward(problem, inputs)
    row.launches = {
        "forward": len(launches(lambda: rung.forward(problem, inputs), problem.device)),
        "backward": len(launches(lambda: rung.backward(problem, inputs, saved, dy), problem.device)),
    }


def _time(running: list[tuple[Rung, Row]], layer: Layer) -> Iterator[int]:
    """Fill in ms and spread. Yields the number of each round before it begins."""
    problem, inputs, dy = layer.problem, layer.inputs, layer.dy
    calls: list[tuple[Row, str, Callable[[], object]]] = []
    for rung, row in running:
        _, saved = rung.forward(problem, inputs)
        calls.append((row, "forward", lambda rung=rung: rung.forward(problem, inputs)))
        calls.append((row, "backward", lambda rung=rung, saved=saved: rung.backward(problem, inputs, saved, dy)))

    clock = _device_clock() if problem.device == "cuda" else _wall_clock
    samples: dict[tuple[str, str], list[Callable[[], float]]] = {(row.stage, d): [] for row, d, _ in calls}
    warm_up, began = WARM_UP[problem.device], time.perf_counter()
    for round_number in range(1, warm_up + ROUNDS[problem.device] + 1):
        if round_number > warm_up + 1 and time.perf_counter() - began > LONGEST:
            break
        yield round_number
        for row, direction, call in calls:
            sample = clock(call)
            if round_number > warm_up:
                samples[row.stage, direction].append(sample)

    for _, row in running:
        ms = {direction: [sample() for sample in samples[row.stage, direction]] for direction in DIRECTIONS}
        row.ms = {direction: statistics.median(values) for direction, values in ms.items()}
        row.spread = {d: _spread(ms[d]) for d in DIRECTIONS}


def _spread(times: list[float]) -> float | None:
    """The median distance from the median; None of one time, of which nobody knows how far the next would be."""
    if len(times) < 2:
        return None
    middle = statistics.median(times)
    return statistics.median(abs(time - middle) for time in times)


def _wall_clock(call: Callable[[], object]) -> Callable[[], float]:
    began = time.perf_counter()
    call()
    ms = (time.perf_counter() - began) * 1e3
    return lambda: ms


def _device_clock() -> Callable[[Callable[[], object]], Callable[[], float]]:
    """A clock of two events on the device's queue, read when all is done, so that the host never waits in between.

    Memory is flushed before each call: inputs come from memory, not from the last call's cache. It takes long enough
    for the host to queue the whole call behind it, so that what is timed is the device and not the launching.
    """
    flushed = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")

    def clock(call: Callable[[], object]) -> Callable[[], float]:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(FLUSHES):
            flushed.zero_()
        began.record()
        call()
        ended.record()

        def ms() -> float:
            ended.synchronize()
            return began.elapsed_time(ended)

        return ms

    return clock


def _rate(row: Row, layer: Layer, allowed_ms: dict[str, float] | None) -> None:
    """From times to rates. An interpreter's times say nothing about hardware."""
    if row.interpreted:
        return
    row.tflops = {d: roofline.useful_flops(layer.problem, d, layer.rows) / row.ms[d] / 1e9 for d in DIRECTIONS}
    if allowed_ms:
        row.share_of_ceiling = {d: allowed_ms[d] / row.ms[d] for d in DIRECTIONS}


def machine(device: str) -> dict:
    """Where and when this runs."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def device_name(device: str) -> str:
    """What the GPU calls itself; for a CPU its model and the number of threads that torch uses."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    threads = torch.get_num_threads()
    return f"{model} (CPU, {threads} thread{'s' if threads > 1 else ''})"


def facts(layer: Layer) -> dict:
    """The problem as JSON."""
    p = layer.problem
    dtype = next(name for name, dtype in DTYPES.items() if dtype == p.dtype)
    sizes = {letter: getattr(p, letter) for letter in "THIEK"}
    ran = {"W": p.W, "dtype": dtype, "routing": layer.routing, "save": p.save}
    return sizes | ran | {"precision": None if p.precision == "bf16" else p.precision}


def plain(value: float) -> str:
    """A number to be read: at least three digits, thousands marked, never an exponent."""
    if 0 < value < 0.001:
        return "<0.001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plain_share(share: float) -> str:
    """A share of a budget to be read: one that is small is not mistaken for zero, nor one just over 1 for 1."""
    if 0 < share < 0.01:
        return "<0.01"
    return f"{share:.2f}" if share <= 1 else f"{share:.3f}" if share < 10 else plain(share)


def cpu_seconds(rungs: Sequence[Rung], problem: Problem) -> float:
    """About how long `climb` takes on a CPU, to refuse hours before they begin.

    The interpreter pays by the step of a tile, about 4 ms for 32 x 64 x 64 multiply-adds; experts' last tiles are half
    empty; and a rung runs four times beside the timed rounds. Plain torch does 20 GFLOP/s.
    """
    runs = 4 + WARM_UP["cpu"] + ROUNDS["cpu"]
    flops_per_row = sum(roofline.useful_flops(problem, d, rows=1) for d in DIRECTIONS)
    tile = 2 * 32 * 64 * 64
    interpreted = (problem.R + 16 * problem.E) * flops_per_row / tile * 0.004
    torch_runs = 2 + runs * sum(not rung.needs_triton for rung in rungs)  # truth, and the reference's own rounding
    plain = problem.R * flops_per_row / 20e9
    return torch_runs * plain + runs * interpreted * sum(rung.needs_triton for rung in rungs)
