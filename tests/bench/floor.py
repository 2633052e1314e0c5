"""The floor: layers of so few tokens that launching, and reading the weights, is all that takes time.

Every launch costs the host some microseconds, and the GPU what lies between two kernels. Of many tokens that does not
show. Of few, a step takes as long as the host needs for it; or, where it was captured in a CUDA graph and is replayed,
as long as the kernels and the gaps between them. So each contestant is timed both ways. The weights of every expert
that any token chose have to be read, and in backward all their gradients have to be written, whatever the number of
tokens: below that no time can go.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from contestants import CONTESTANTS, Contestant, Runner, compile_for, differentiate, unfused
from measuring import BOTH, GROSS, Lap, Mark, Measurement, examine, relative_l2, take_turns
from torch import Tensor

from mega_moe import Problem
from mega_moe.parity import OUTPUTS, Oracle
from mega_moe.roofline import useful_flops
from mega_moe.samples import random_inputs
from mega_moe.shapes import Inputs

TOKENS = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), "cpu": (1, 5)}
DIRECTIONS = ("forward", BOTH)
LAUNCHED = ("eager", "graph")
"""How a step gets to the GPU: launch by launch from Python, or replayed from a graph that holds all its launches."""

ROUTING = "balanced"
BLOCK = {"cuda": 0.01, "cpu": 0.0}
ROUNDS = {"cuda": 5, "cpu": 1}

METHOD = {
    "cuda": "CUDA events between steps that follow each other without a pause, at the pace of the host or of the GPU, "
    "whichever is slower: the contestants of one number of tokens take turns, launched eagerly and replayed from CUDA "
    f"graphs, in {ROUNDS['cuda']} rounds after one that warms up, each for {BLOCK['cuda']} s",
    "cpu": "Wall clock: it shows that the machinery works, and nothing about speed",
}


@cache
def compiled(device: str) -> Callable[..., Tensor]:
    """The plain layer under torch.compile, once for all numbers of tokens but one, which torch compiles apart."""
    options = compile_for(torch.device(device)).keywords | dict(dynamic=None)
    return torch.compile(unfused, **options)


def plain_torch_compiled(problem: Problem, inputs: Inputs, dy: Tensor) -> Runner:
    """Its number of tokens is left open: a server's changes from step to step."""
    i, layer = inputs, compiled(problem.device)

    def call(x, topk_weights, w_gate_up, w_down):
        for t in (x, i.topk_ids, topk_weights):
            torch._dynamo.maybe_mark_dynamic(t, 0)
        return layer(x, i.topk_ids, topk_weights, w_gate_up, w_down)

    return differentiate(call, [i.x, i.topk_weights, i.w_gate_up, i.w_down], dy)


OF_FEW_TOKENS = {
    **{c.name: c for c in CONTESTANTS.values() if c.kind == "rung" and c.ranks == 1 and c.precision == "bf16"},
    "torch": CONTESTANTS["torch"],
    "torch-compiled": replace(CONTESTANTS["torch-compiled"], start=plain_torch_compiled),
}
"""The rungs without heaps, and plain torch."""


def measure_floor(problem: Problem, wanted: Sequence[Contestant]) -> dict[tuple[str, str], Measurement]:
    """One layer by every contestant, by (its name, how it is launched): parity of y and all gradients, then time."""
    inputs, dy = random_inputs(problem, ROUTING)
    inputs = replace(inputs, topk_weights=inputs.topk_weights.to(problem.dtype).float())  # as measure_layer has them
    oracle = Oracle(problem, inputs, dy)
    found = {(c.name, launched): Measurement(why_not=c.why_not(problem)) for c in wanted for launched in LAUNCHED}
    runners = {}
    for contestant in wanted:
        eager = found[contestant.name, "eager"]
        if eager.why_not:
            continue
        try:
            runner = contestant.start(problem, inputs, dy)
            examine(eager, contestant, runner, oracle, oracle.truth)
        except Exception as error:
            eager.failure = f"{type(error).__name__}: {error}"
        if not eager.failure:
            runners[contestant.name] = runner
    del oracle
    if problem.device == "cuda":
        torch.cuda.empty_cache()  # the oracle's memory: graphs take theirs apart

    laps = {}
    for name, runner in runners.items():
        eager, graph = (found[name, launched] for launched in LAUNCHED)
        steps = {"forward": runner.forward, BOTH: partial(both, runner)}
        laps |= {(name, "eager", direction): lap_of(step) for direction, step in steps.items()}
        graph.errors, graph.losses, graph.shares = eager.errors, eager.losses, eager.shares
        graph.why_not = not_captured(problem, name)
        if graph.why_not:
            continue
        try:
            replays = {direction: capture(step) for direction, step in steps.items()}
            graph.failure = differs(runner, *replays[BOTH])
        except Exception as error:
            graph.failure = f"{type(error).__name__}: {error}"
        if not graph.failure:
            laps |= {(name, "graph", direction): lap_of(replay) for direction, (replay, _) in replays.items()}

    device = problem.device
    for (name, launched, direction), times in take_turns(laps, device, BLOCK[device], ROUNDS[device]).items():
        measurement = found[name, launched]
        measurement.seconds[direction] = [seconds for (seconds,) in times]
        measurement.flops[direction] = sum(useful_flops(problem, part) for part in direction.split("+"))
    return found


def both(runner: Runner) -> tuple[Tensor, tuple[Tensor, ...]]:
    """y, and all gradients as the contestant makes them."""
    y = runner.forward()
    return y, runner.backward(y)


def not_captured(problem: Problem, name: str) -> str | None:
    """Why a contestant is not replayed from a graph; None if it is."""
    if problem.device != "cuda":
        return "CUDA graphs need a GPU"
    return "the reference reads row counts on the host, which no graph can hold" if name == "reference" else None


def capture(step: Callable[[], object]) -> tuple[Callable[[], None], object]:
    """A step, captured: what replays it, and its results, which every replay writes anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph.replay, results


def differs(runner: Runner, replay: Callable[[], None], results: tuple[Tensor, tuple[Tensor, ...]]) -> str | None:
    """What of a replayed step is not what the step makes launch by launch, which was judged; None if nothing is."""
    y, grads = results
    replay()
    eager_y, eager_grads = both(runner)
    pairs = zip(OUTPUTS, (y, *grads), (eager_y, *eager_grads))
    wrong = [name for name, got, truth in pairs if not relative_l2(got, truth) <= GROSS]
    return f"no time without parity: {', '.join(wrong)} of the graph differ" if wrong else None


def lap_of(step: Callable[[], object]) -> Lap:
    """One step."""

    def lap(mark: Mark) -> None:
        step()
        mark()

    return lap
