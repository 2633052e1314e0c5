"""How time is taken: right first, then in turns under load, then replayed to pytest-benchmark.

A GPU under load sits at its power limit, and its clocks depend on what ran in the last second. So all contestants of a
table run in the same rounds: each works for a block of time without a pause, the next takes over, and every round
begins with another one. Times are the device's own, between events on its queue. A block's first lap is dropped: the
host is not ahead of the device there yet, and launching would be timed too.
"""

import logging
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from contestants import Contestant, Runner
from energy import counter, joules_a_lap
from gemms import Gemm, make
from torch import Tensor

from mega_moe import Problem
from mega_moe.parity import CHUNK, OUTPUTS, Oracle
from mega_moe.roofline import useful_flops
from mega_moe.routing import plan
from mega_moe.samples import random_inputs
from mega_moe.shapes import Grads

BOTH = "forward+backward"
DIRECTIONS = ("forward", "backward", BOTH)
ROUTING = "balanced"

BLOCK = {"cuda": 0.2, "cpu": 0.0}  # seconds that a contestant works in each round; at least one lap
GEMM_BLOCK = {"cuda": 0.1, "cpu": 0.0}
ROUNDS = {"cuda": 6, "cpu": 1}
WARM_UP = {"cuda": 1, "cpu": 0}  # rounds before them that are not counted, in which the card warms up
DROPPED = {"cuda": 1, "cpu": 0}  # laps at the beginning of a block

METHOD = {
    "cuda": f"CUDA events under sustained load: the contestants of a table take turns in {ROUNDS['cuda']} rounds after "
    f"one that warms up, each for {BLOCK['cuda']} s (a GEMM alone: {GEMM_BLOCK['cuda']} s) without a pause",
    "cpu": "Wall clock: it shows that the machinery works, and nothing about speed",
}

GROSS = 0.02
"""The relative L2 error from which on a result is another function's. bf16 explains about a quarter of it. What 8 bits
lose comes on top, and is not chosen but computed: see `astray`."""

LOG = logging.getLogger(__name__)
"""What takes so long: pytest shows it with --log-cli-level=INFO."""

Mark = Callable[[], None]
Lap = Callable[[Mark], None]
"""One run of a contestant; it calls `mark` where one time ends and the next begins."""


@dataclass
class Measurement:
    """What became of one contestant: reasons why there are no times, or times and everything beside them."""

    why_not: str | None = None  # it cannot run here
    failure: str | None = None  # it ran, and raised or was wrong
    errors: dict[str, float] = field(default_factory=dict)  # relative L2 distance from the float64 truth, by output
    losses: dict[str, float] = field(default_factory=dict)  # that of the reference in this precision, likewise
    shares: dict[str, float] = field(default_factory=dict)  # the worst row's, of the parity budget, by output
    peak_bytes: dict[str, int] = field(default_factory=dict)  # over the inputs, heaps included, by direction; on a GPU
    heap_bytes: int = 0  # what heaps take of it
    flops: dict[str, int] = field(default_factory=dict)  # useful ones, by direction
    bytes: dict[str, int] = field(default_factory=dict)  # each operand once and the result once; of a GEMM alone
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by direction
    joules: dict[str, float] = field(default_factory=dict)  # of one run, by direction; where there is a counter


def measure_layer(problem: Problem, contestants: Sequence[Contestant]) -> dict[str, Measurement]:
    """One layer by every contestant: parity of y and all gradients, then time. Keys are the contestants' names."""
    inputs, dy = random_inputs(problem, ROUTING)
    # Hugging Face's router hands its weights on in bf16: with weights that bf16 holds exactly, all solve one problem.
    inputs = replace(inputs, topk_weights=inputs.topk_weights.to(problem.dtype).float())

    problems = {contestant.name: problem.at(precision=contestant.precision) for contestant in contestants}
    measurements = {c.name: Measurement(why_not=c.why_not(problems[c.name])) for c in contestants}
    able = [contestant for contestant in contestants if not measurements[contestant.name].why_not]

    truth = None  # without 8 bits, if it is needed beside an oracle of 8 bits, whose memory it leaves alone
    if any(contestant.precision != "bf16" and contestant.kind != "ceiling" for contestant in able):
        truth = {name: t.float().cpu() for name, t in Oracle(problem, inputs, dy).truth.items()}

    laps, runners = {}, {}
    # 8 bits first: their oracles are the largest, and every contestant that has started holds memory.
    for precision in sorted(dict.fromkeys(c.precision for c in able), key="bf16".__eq__):
        oracle = Oracle(problem.at(precision=precision), inputs, dy)
        for contestant in able:
            if contestant.precision != precision:
                continue
            measurement, begun = measurements[contestant.name], time.perf_counter()
            try:
                runner = contestant.start(oracle.problem, inputs, dy)
                examine(measurement, contestant, runner, oracle, oracle.truth if precision == "bf16" else truth)
            except Exception:
                measurement.failure = traceback.format_exc()
            if not measurement.failure:
                laps[contestant.name], runners[contestant.name] = lap_of(runner), runner
            LOG.info("%s: compiled and examined in %.0f s", contestant.name, time.perf_counter() - begun)
        del oracle

    for name, times in take_turns(laps, problem.device, BLOCK[problem.device]).items():
        forward, backward = zip(*times)
        both = [sum(lap) for lap in times]
        measurements[name].seconds = dict(zip(DIRECTIONS, (forward, backward, both)))
        measurements[name].flops = {
            direction: sum(useful_flops(problem, part) for part in direction.split("+")) for direction in DIRECTIONS
        }
    if read := counter(problem.device):
        for name, runner in runners.items():
            steps = {"forward": runner.forward, BOTH: lambda runner=runner: runner.backward(runner.forward())}
            measurements[name].joules = {direction: joules_a_lap(step, read) for direction, step in steps.items()}
    return measurements


def lap_of(runner: Runner) -> Lap:
    """Forward and backward, as a training step has them, timed apart."""

    def lap(mark: Mark) -> None:
        y = runner.forward()
        mark()
        runner.backward(y)
        mark()

    return lap


def examine(
    measurement: Measurement, contestant: Contestant, runner: Runner, oracle: Oracle, truth: dict[str, Tensor]
) -> None:
    """Fill in everything but time. A rung has to keep its parity budget; others may round elsewhere, not be wrong.

    oracle: of the contestant's precision, for the budget. truth: y and the gradients without 8 bits, for the error.
    """
    y = runner.forward()
    grads = runner.backward(y)
    if contestant.kind == "ceiling":
        return
    judge(measurement, y.detach(), runner.as_grads(*grads), oracle, truth)
    over = [name for name, share in measurement.shares.items() if contestant.kind == "rung" and not share <= 1]
    wrong = astray(measurement.errors, measurement.losses)
    if over or wrong:
        measurement.failure = (
            f"no time without parity: {', '.join(dict.fromkeys(over + wrong))} failed; "
            f"shares of the budget {measurement.shares}, relative L2 errors {measurement.errors}, "
            f"in {contestant.precision} the reference's own {measurement.losses}"
        )
    del y, grads
    if oracle.problem.device == "cuda":
        measurement.heap_bytes, measurement.peak_bytes = runner.heap_bytes, peak_bytes(runner)


def judge(measurement: Measurement, y: Tensor, grads: Grads, oracle: Oracle, truth: dict[str, Tensor]) -> None:
    """Errors of y and all gradients, by both measures, and what the reference loses by the precision."""
    measurement.shares = oracle.shares(y, grads)
    for name in OUTPUTS:
        got = y if name == "y" else getattr(grads, name)
        measurement.errors[name] = relative_l2(got, truth[name])
        measurement.losses[name] = relative_l2(oracle.truth[name], truth[name])


def astray(errors: dict[str, float], losses: dict[str, float]) -> list[str]:
    """The outputs whose error is not what the precision explains: errors that have nothing to do with each other add up
    in squares, so error^2 may be off loss^2 by GROSS^2. Where the loss is 0, as in bf16, error <= GROSS is left.

    losses: of the reference in the same precision, in float64, where nothing else is lost. In 8 bits this is a bound
    from below too: a result that is nearer to the truth was not made of 8 bits, and its time is another layer's.
    """
    return [name for name, error in errors.items() if not abs(error**2 - losses[name] ** 2) <= GROSS**2]


def relative_l2(got: Tensor, truth: Tensor) -> float:
    """|got - truth| / |truth| over the whole tensor. truth: fp32 or float64, the same shape, dense, on any device."""
    distance = size = 0.0
    for g, t in zip(got.reshape(-1).split(CHUNK), truth.reshape(-1).split(CHUNK)):
        t = t.to(g.device).double()
        distance, size = distance + (g.double() - t).square().sum(), size + t.square().sum()
    return (distance / size).sqrt().item()


def peak_bytes(runner: Runner) -> dict[str, int]:
    """The most memory that was taken at once, over what was taken before; but heaps, which stay, are counted."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - runner.heap_bytes
    y = runner.forward()
    forward = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    _ = runner.backward(y)
    backward = torch.cuda.max_memory_allocated() - before
    return {"forward": forward, "backward": backward, "forward+backward": max(forward, backward)}


def measure_gemms(problem: Problem, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Measurement]:
    """GEMMs of a layer alone, as (name, implementation): the error of those that are grouped, then time."""
    narrow, _ = random_inputs(problem.at(H=1, I=1), ROUTING)  # for its routing; `make` draws the operands
    gemms = make(problem, plan(narrow.topk_ids, problem.E))
    measurements, laps = {}, {}
    for name, implementation in wanted:
        measurement = measurements[name, implementation] = Measurement(why_not=gemms[name].why_not(implementation))
        if measurement.why_not:
            continue
        try:
            product, result = gemms[name].run(implementation)
            examine_gemm(measurement, gemms[name], implementation, result(product()))
        except Exception:
            measurement.failure = traceback.format_exc()
        if not measurement.failure:
            laps[name, implementation] = lap_of_gemm(product)

    for key, times in take_turns(laps, problem.device, GEMM_BLOCK[problem.device]).items():
        gemm = gemms[key[0]]
        measurements[key].seconds = {"product": [seconds for (seconds,) in times]}
        measurements[key].flops, measurements[key].bytes = {"product": gemm.flops}, {"product": gemm.bytes}
    return measurements


def lap_of_gemm(product: Callable[[], object]) -> Lap:
    """One product."""

    def lap(mark: Mark) -> None:
        product()
        mark()

    return lap


def examine_gemm(measurement: Measurement, gemm: Gemm, implementation: str, got: Tensor) -> None:
    """The error of a grouped product; the dense one is another product, on purpose."""
    if implementation == "cublas":
        return
    measurement.errors = {"product": gemm.error(got)}
    if not measurement.errors["product"] <= GROSS:
        measurement.failure = f"no time without parity: relative L2 error {measurement.errors['product']}"


def take_turns(laps: dict, device: str, block: float, rounds: int | None = None) -> dict[object, list[list[float]]]:
    """Run all of `laps` in rounds (ROUNDS, unless told), each for about `block` seconds at a time: the times of every
    counted lap of each."""
    rounds = rounds or ROUNDS[device]
    counts = dict.fromkeys(laps, 1)
    for name in laps if block else ():
        times = back_to_back(laps[name], 1, device)
        counts[name] = max(1, math.ceil(block / sum(times[0])))

    kept = {name: [] for name in laps}
    names = list(laps)
    for turn in range(WARM_UP[device] + rounds):
        for name in names:
            times = back_to_back(laps[name], counts[name], device)
            if turn >= WARM_UP[device]:
                kept[name] += times
        names = names[1:] + names[:1]
    return kept


def back_to_back(lap: Lap, count: int, device: str) -> list[list[float]]:
    """`count` laps without a pause, after those that are dropped: the seconds between the marks of each."""
    stamps = []
    if device == "cuda":

        def mark() -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            stamps.append(event)
    else:

        def mark() -> None:
            stamps.append(time.perf_counter())

    ends = []  # of each lap, in stamps
    mark()
    for _ in range(DROPPED[device] + count):
        lap(mark)
        ends.append(len(stamps))
    if device == "cuda":
        torch.cuda.synchronize()
        between = [a.elapsed_time(b) / 1e3 for a, b in pairwise(stamps)]
    else:
        between = [b - a for a, b in pairwise(stamps)]

    times = [between[start - 1 : end - 1] for start, end in zip([1, *ends], ends)]
    return times[DROPPED[device] :]


class ReplayedClock:
    """A timer for pytest-benchmark that shows times measured elsewhere: it moves only when it is told to."""

    __name__ = "replayed"
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


CLOCK = ReplayedClock()


def replay(benchmark, seconds: Sequence[float]) -> None:
    """Let pytest-benchmark take its statistics from `seconds`. The test must be marked benchmark(timer=CLOCK)."""
    left = iter(seconds)
    benchmark.pedantic(lambda: CLOCK.advance(next(left)), rounds=len(seconds))
