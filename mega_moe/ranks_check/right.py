"""Whether ranks compute what one process computes: small and odd layers, a thousand calls, a captured graph, and two
groups at once; and whether a rank that stays away is missed."""

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..processes import ProcessHeaps
from ..shapes import Inputs, Problem
from .layers import DIFFERENTIABLE, Judge, Results, Whole, differentiate, draw, same_sums, which_differ
from .parts import Node, Wrong

Way = tuple[str, dict]
"""A name, and options of `moe` that make it take this way."""


def small(node: Node) -> tuple[Problem, int]:
    """The layer that most of this is tried on, without tokens, and the most that a rank has of them."""
    if node.on_gpu:
        return Problem(0, H=512, I=256, E=4 * node.W, K=4), 300
    return Problem(0, H=32, I=32, E=2 * node.W, K=2, device="cpu"), 6


def uneven(most: int, W: int) -> tuple[int, ...]:
    """Tokens of each rank: of 300 and 4, (75, 150, 225, 300)."""
    return tuple(most * (rank + 1) // W for rank in range(W))


def without_first(most: int, W: int) -> tuple[int, ...]:
    """The same, but rank 0 has none, unless it is the only one."""
    return (0, *uneven(most, W)[1:]) if W > 1 else (most,)


def cases(node: Node, shapes: dict[str, Problem], quick: bool) -> dict[str, Callable[[], Whole]]:
    """What parity is tried on, by name: small layers, then those to be timed, with few tokens. quick: the first two of
    the small ones alone."""
    p, most = small(node)
    W = node.W
    odd = p.at(H=67, I=17, E=3 * W, K=2, dtype=torch.float32) if node.on_gpu else p.at(H=35, I=17, dtype=torch.float32)
    made = {
        "odd sizes": lambda: draw(odd, uneven(37 if node.on_gpu else 5, W), "masked"),
        "an empty rank, masked routes": lambda: draw(p, without_first(most, W), "masked"),
        "all on one expert": lambda: draw(p, uneven(most, W), "one"),
        "no tokens at all": lambda: draw(p, (0,) * W),
        "uneven": lambda: draw(p, uneven(most, W)),
    }
    if quick:
        made = {name: made[name] for name in list(made)[:2]}
    return made | {name: lambda shape=shape: draw(shape, (min(shape.T, 256),) * W) for name, shape in shapes.items()}


def ways(node: Node, group: ProcessGroup, heaps: ProcessHeaps | None) -> dict[str, dict]:
    """The options of `moe` by which a layer can be taken over ranks here."""
    found = {}
    if node.collectives:
        found["ranks, all_to_all"] = dict(stage="ranks", group=group, heap="all_to_all")
    if heaps:
        found["ranks, heaps"] = dict(stage="ranks", heap=heaps)
        found["mega, heaps"] = dict(stage="mega", heap=heaps)
    return found


def parity(
    node: Node, group: ProcessGroup, shapes: dict[str, Problem], can_heap: bool, quick: bool
) -> tuple[str, dict]:
    """y and all gradients of every rank, every way, against one process; and that against the truth in float64."""
    found, failures, inexact, compared = {}, [], [], 0
    for name, make in cases(node, shapes, quick).items():
        whole = make()
        judge = Judge(whole, name)
        held, dy = whole.of(node.rank)
        facts = found[name] = dict(tokens_per_rank=whole.tokens_per_rank, one_process=judge.shares, differing={})
        with ExitStack() as stack:
            heaps = stack.enter_context(node.heaps(group, max(1, *whole.tokens_per_rank))) if can_heap else None
            for way, options in ways(node, group, heaps).items():
                exact = same_sums(whole.problem, "persistent", options["stage"])
                node.meet()
                got = differentiate(held, dy, save="inputs", **options)
                facts["differing"][way] = judge.hold(f"{name}, {way}", node.rank, got, exact)
                inexact += [f"{name}, {way}"] * bool(facts["differing"][way])
                compared += 1
            if heaps:
                heaps.check()
        failures += judge.failures
    if failures:
        raise Wrong("; ".join(failures))
    inexact = list(dict.fromkeys(name for of_rank in node.gather(inexact) for name in of_rank))
    said = f"; within the parity budget: {', '.join(inexact)}" if inexact else ", all equal to the bit"
    return f"{len(found)} layers, {compared} comparisons with one process{said}", found


def stress(node: Node, group: ProcessGroup, calls: int) -> tuple[str, dict]:
    """Calls with other tokens, other routes and other numbers of tokens each time: mega against ranks over the same
    heaps, to the bit. Where their sums are not in the same order, mega against mega."""
    p, most = small(node)
    held, _ = draw(p, (most,) * node.W).of(node.rank)
    host = torch.Generator().manual_seed(node.rank)
    generator = torch.Generator(node.device).manual_seed(node.rank)
    other = "ranks" if same_sums(p, "ranks", "mega") else "mega"
    with node.heaps(group, most) as heaps:
        differing = torch.zeros(5, dtype=torch.int64, device=node.device)
        tokens = 0
        for _ in range(calls):
            T = int(torch.randint(0, most + 1, (), generator=host))
            inputs, dy = other_tokens(p, T, held, generator)
            one, two = (
                differentiate(inputs, dy, stage=stage, heap=heaps, save=save)
                for stage, save in ((other, "inputs"), ("mega", "pre" if T % 2 else "inputs"))
            )
            differing += which_differ(one, two)
            tokens += T
        heaps.check()
        counts = dict(zip(one, differing.tolist()))
    if any(counts.values()):
        raise Wrong(f"mega is not equal to {other}: of {calls} calls differ {counts}")
    line = f"{calls} calls, {tokens} tokens: mega equal to {other} to the bit, y and all gradients"
    return line, dict(calls=calls, tokens=tokens, against=other, differing=counts)


def other_tokens(p: Problem, T: int, held: Inputs, generator: torch.Generator) -> tuple[Inputs, Tensor]:
    """Tokens drawn anew, with routes that may be masked or come twice; the weights stay."""
    normal = lambda *shape: torch.randn(shape, generator=generator, device=held.x.device)
    ids = torch.randint(-1, p.E, (T, p.K), generator=generator, device=held.x.device)
    x, dy = normal(T, p.H).to(p.dtype), normal(T, p.H).to(p.dtype)
    return Inputs(x, ids, normal(T, p.K).softmax(-1), held.w_gate_up, held.w_down), dy


class Captured:
    """A layer over heaps, forward and backward, as a CUDA graph over memory of its own."""

    def __init__(self, inputs: Inputs, dy: Tensor, **options):
        self.inputs, self.dy = Inputs(*(t.clone() for t in vars(inputs).values())), dy.clone()
        leaves = {name: getattr(self.inputs, name).detach().requires_grad_() for name in DIFFERENTIABLE}
        self.leaves, self.options = leaves, options
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            self.both_directions()
        torch.cuda.current_stream().wait_stream(warm_up)
        self.graph = torch.cuda.CUDAGraph()
        # NCCL's threads ask the device how it goes, which a capture forbids to all threads unless told otherwise.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = self.both_directions()

    def both_directions(self) -> Results:
        """What is captured."""
        return differentiate(Inputs(topk_ids=self.inputs.topk_ids, **self.leaves), self.dy, **self.options)

    def replay(self, inputs: Inputs, dy: Tensor) -> Results:
        """The graph on other tokens, as many."""
        for name, t in vars(inputs).items():
            getattr(self.inputs, name).copy_(t)
        self.dy.copy_(dy)
        self.graph.replay()
        return self.result


def graph(node: Node, group: ProcessGroup, replays: int = 20) -> tuple[str, dict]:
    """A graph captured over heaps, replayed with other routings; between replays the same heaps serve other calls, so
    that no call's number is the graph's."""
    p, most = small(node)
    T = uneven(most, node.W)[node.rank]
    held, _ = draw(p, (most,) * node.W).of(node.rank)
    generator = torch.Generator(node.device).manual_seed(node.rank)
    with node.heaps(group, most) as heaps:
        options = dict(stage="mega", heap=heaps, save="inputs")
        captured = Captured(*other_tokens(p, T, held, generator), **options)
        node.meet()
        differing = torch.zeros(5, dtype=torch.int64, device=node.device)
        for number in range(replays):
            inputs, dy = other_tokens(p, T, held, generator)
            if number % 4 == 3:
                inputs.topk_ids.fill_(p.E - 1)
            replayed = {name: t.clone() for name, t in captured.replay(inputs, dy).items()}
            for _ in range(1 + number % 2):
                eager = differentiate(inputs, dy, **options)
            differing += which_differ(replayed, eager)
        heaps.check()
        counts = dict(zip(eager, differing.tolist()))
    if any(counts.values()):
        raise Wrong(f"a replayed graph computes something else: of {replays} replays differ {counts}")
    return f"{replays} replays with other routings equal to eager calls, to the bit", dict(replays=replays)


def who_did_not_hear(raised: list[str | None], away: int) -> list[int]:
    """The ranks that raised nothing, or something else than that rank `away` was missed."""
    return [rank for rank, said in enumerate(raised) if f"waited in vain for rank {away} " not in (said or "")]


def failing(node: Node, group: ProcessGroup, timeout_s: float = 5.0) -> tuple[str, dict]:
    """The last rank stays away from a call: the others end their wait, and raise who was missed; and when it does come,
    it hears so."""
    p, most = small(node)
    held, dy = draw(p, uneven(most, node.W)).of(node.rank)
    away = node.W - 1
    with node.heaps(group, most) as heaps:  # whoever compiles longer than others would be missed as well
        differentiate(held, dy, stage="mega", heap=heaps, save="inputs")
        heaps.check()
    with node.heaps(group, most, timeout_s=timeout_s) as heaps:
        differentiate(held, dy, stage="mega", heap=heaps, save="inputs")
        heaps.check()
        raised, took = None, 0.0
        for others in (True, False):
            node.meet()
            if (node.rank != away) == others:
                begun = time.monotonic()
                try:
                    differentiate(held, dy, stage="mega", heap=heaps, save="inputs")
                    heaps.check()
                except RuntimeError as error:
                    raised, took = str(error), time.monotonic() - begun
        heard = node.gather((raised, took))
    said = "\n".join(f"rank {rank}: {message}" for rank, (message, _) in enumerate(heard))
    if deaf := who_did_not_hear([message for message, _ in heard], away):
        raise Wrong(f"rank {away} stayed away, and ranks {deaf} did not raise that it was missed:\n{said}")
    longest = max(took for _, took in heard)
    line = (
        f"rank {away} stayed away: all others raised that it was missed, within {longest:.1f} s; and it, when it came"
    )
    return line, dict(timeout_s=timeout_s, seconds=longest, raised=[message for message, _ in heard])


def groups(node: Node, group: ProcessGroup, calls: int = 5) -> tuple[str, dict]:
    """Two groups of every second rank, each with a layer of its own, at the same time."""
    mine = node.rank % 2
    made = [dist.new_group(list(range(first, node.W, 2))) for first in range(2)]
    its = made[mine]
    p, most = small(node)
    whole = draw(p.at(E=p.E // node.W * its.size()), uneven(most, its.size()), seed=mine)
    judge = Judge(whole, f"group {mine}")
    held, dy = whole.of(its.rank())
    with node.heaps(its, most) as heaps:
        for way, options in ways(node, its, heaps).items():
            node.meet()
            for _ in range(calls):
                got = differentiate(held, dy, save="inputs", **options)
            exact = same_sums(whole.problem, "persistent", options["stage"])
            judge.hold(f"group {mine}, {way}", its.rank(), got, exact)
        heaps.check()
    if judge.failures:
        raise Wrong("; ".join(judge.failures))
    return f"two groups of {its.size()} and more, {calls} calls each way: each as one process", dict(calls=calls)
