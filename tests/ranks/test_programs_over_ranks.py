"""What ranks hand to each other through heaps arrives, however programs take turns; and each wait and signal of it is
needed.

The launches are those in which ranks meet, and those in which rows travel: of two ranks in one process, each program a
process (see programs.py). What programs of one rank hand to each other is in test_programs.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from types import ModuleType

import pytest
import torch
from cases import layer, on_cpu, poisoned
from planted import Fault, moved, planted, signal_first, with_argument, without
from programs import LAGGARD, RUNS, UNEVEN, Subject, recorded
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from mega_moe import LocalHeaps
from mega_moe.kernels import meet as meeting
from mega_moe.kernels import mega, scaled_mega
from mega_moe.kernels import schedule as schedules
from mega_moe.shapes import Need
from mega_moe.stages.s6_mega import LAUNCHES
from mega_moe.symmetric import Memory

pytestmark = on_cpu

LAYER = dict(ids=[[0, 1], [1, 0], [0, 0], [-1, 1]] * 4, H=96, I=72, E=2)  # an expert a rank: of few tiles most wait
TOKENS = (9, 7)


@lru_cache
def subject(name: str) -> Subject:
    """meet, forward, backward, recompute, or dtopk_weights: backward for this gradient alone; each with fp8 before it
    in that precision."""
    precision = "fp8" if name.startswith("fp8 ") else "bf16"
    name, module = name.removeprefix("fp8 "), module_of(name)
    problem, inputs, dy = layer(**LAYER)
    problem, (one_launch, _) = problem.at(precision=precision), LAUNCHES[precision]
    tiles = replace(one_launch.tiles(problem), group=2)
    heap, parts = LocalHeaps(len(TOKENS), max(TOKENS)), mega.parts_of_weight(problem, tiles)
    save = "inputs" if name == "recompute" else "pre"
    problem = problem.at(heap=heap.key, tokens_per_rank=TOKENS, save=save)
    memory = heap.memory(problem, inputs.topk_weights.dtype, parts, inputs.x.device)
    share(memory)
    forward_work = schedules.forward_work(problem, tiles)
    with poisoned():
        poison(memory)
        if name == "meet":

            def meet():
                _, plan, schedule = meeting.meet(problem, inputs, dy, forward_work, parts)
                return [*plan, schedule.table, schedule.counters, *schedules.KEPT.values()]

            return meeting_only(subject_of(meeting.meet_kernel, meet, memory), [*vars(inputs).values(), dy], memory)

        _, plan, schedule = meeting.meet(problem, inputs, None, forward_work, parts)
        forward = lambda: one_launch.forward(problem, inputs, plan, schedule, tiles, memory)
        if name == "forward":
            return subject_of(kernel_of(module, "forward"), forward, memory, schedule.counters)

        _, pre = forward()
        poison(memory)
        need = Need(dx=False, dw_gate_up=False, dw_down=False) if name == "dtopk_weights" else Need()
        backward_work = schedules.backward_work(problem, tiles, need, recompute=pre is None)
        _, _, met = meeting.meet(problem, inputs, dy, backward_work, parts)
        backward = lambda: one_launch.backward(problem, inputs, plan, pre, dy, need, met, tiles, memory)
        return subject_of(kernel_of(module, "backward"), lambda: vars(backward()).values(), memory, met.counters)


def module_of(name: str) -> ModuleType:
    """Where the kernel of a subject is written."""
    if name == "meet":
        return meeting
    return scaled_mega if name.startswith("fp8 ") else mega


def kernel_of(module: ModuleType, direction: str) -> InterpretedFunction:
    return getattr(module, f"{module.__name__.rpartition('.')[2]}_{direction}_kernel")


def share(memory: Memory) -> None:
    """Move the heaps to where other processes see them. They are reached by their addresses, which change."""
    before = memory.heaps.data_ptr()
    memory.heaps.untyped_storage().share_memory_()
    for addresses in {t.data_ptr(): t for t in (memory.addresses, memory.own)}.values():
        addresses += memory.heaps.data_ptr() - before


def poison(memory: Memory) -> None:
    """Whatever was published, planned or pushed becomes NaN, or -1."""
    memory.heaps[:, memory.layout.views()["row_start"].offset :] = 255


def subject_of(
    kernel, launcher: Callable[[], Iterable[Tensor | None]], memory: Memory, counters: Tensor | None = None
) -> Subject:
    """The launch that the launcher makes of this kernel, and what it writes: all that heaps hold, and what the launcher
    returns. counters: those of its schedule, which a launch uses up."""
    used = [memory.heaps] if counters is None else [memory.heaps, counters]
    found = [t.clone() for t in used]
    in_heaps = [memory.view(rank, name) for rank in range(memory.layout.W) for name in memory.layout.views()]
    expected = [t.clone() for t in [*launcher(), *in_heaps] if t is not None]
    for t, content in zip(used, found):
        t.copy_(content)
    launch, returned = recorded(kernel, launcher)
    launch = replace(launch, before=(*launch.before, (memory.heaps, found[0])))
    schedules.KEPT.clear()  # it has words that the launch shares with processes, and that a fault may leave as they are
    return Subject(launch, [t for t in [*returned, *in_heaps] if t is not None], expected, LAGGARD)


def meeting_only(right: Subject, given: list[Tensor], memory: Memory) -> Subject:
    """Nobody writes behind the last tile of the schedule. And who takes poison for a number of rows ends at once, by an
    address that is nobody's; zeros are as wrong."""
    table, counters = 4, 5  # behind the plan
    _, tiles, *_ = right.expected[counters].tolist()
    for written in (right.outputs, right.expected):
        written[table] = written[table][:tiles]
    read = [*given, memory.heaps, memory.addresses, memory.own, memory.token_start]
    kept = {t.untyped_storage().data_ptr() for t in read}
    before = ((t, content if t.data_ptr() in kept else torch.zeros_like(content)) for t, content in right.launch.before)
    return replace(right, launch=replace(right.launch, before=tuple(before)))


@pytest.mark.parametrize("pace", [UNEVEN, LAGGARD], ids=["uneven", "a laggard"])
@pytest.mark.parametrize(
    "name", ["meet", "forward", "backward", "recompute", "dtopk_weights", "fp8 forward", "fp8 recompute"]
)
def test_programs_at_once_compute_what_they_compute_one_after_another(name, pace):
    assert not replace(subject(name), pace=pace).wrong(seed=0)


def all_of(*faults: Fault) -> Fault:
    """Several faults at once, in one branch."""

    def fault(statements):
        for each in faults:
            each(statements)

    return fault


DISPATCH, GATE_UP, DOWN, DACT, DX = (f"kind == {kind}" for kind in ("DISPATCH", "GATE_UP", "DOWN", "DACT", "DX"))
COMBINE = "else"
PLACE, ARRIVE, MEET, PLAN = "ticket < copies + 2 * counts", "ticket < met", "ticket == met", "ticket < planned"

FAULTS = {  # where it shows, in which branch it is planted, and what it is
    "routes signal before they are placed": ("meet", PLACE, signal_first),
    "a rank arrives before all is published": ("meet", ARRIVE, without("wait")),
    "a rank does not arrive": ("meet", ARRIVE, without("arrive")),
    "nobody waits for ranks to arrive": ("meet", MEET, all_of(without("wait"), without("wait_for_ranks"))),
    "ranks plan before they have met": ("meet", PLAN, without("wait")),
    "dispatch signals before it pulls": ("forward", DISPATCH, signal_first),
    "gate_up does not wait for dispatch": ("forward", GATE_UP, without("wait")),
    "down tells homes before it stores": ("forward", DOWN, moved("tell_homes", before="slot_gemm_strip")),
    "combine does not wait for rows": ("forward", COMBINE, with_argument("wait_for_rows", 1, "0 * it")),
    "combine waits for half of its rows": ("forward", COMBINE, with_argument("wait_for_rows", 1, "it // 2")),
    "dispatch signals before it pulls codes": ("fp8 forward", DISPATCH, signal_first),
    "gate_up does not wait for codes": ("fp8 forward", GATE_UP, without("wait")),
    "dispatch signals before it pulls and quantises": ("fp8 recompute", DISPATCH, signal_first),
    "dispatch signals in backward before it pulls": ("backward", DISPATCH, signal_first),
    "dact does not wait for dispatch": ("backward", DACT, without("wait")),
    "gate_up does not wait in backward for dispatch": ("recompute", GATE_UP, without("wait")),
    "dx tells homes before it stores": ("backward", DX, moved("tell_homes", before="slot_gemm_strip")),
    "dact tells homes before it stores parts": ("dtopk_weights", DACT, moved("tell_homes", before="dact_strip")),
    "combine does not wait in backward for rows": ("backward", COMBINE, with_argument("wait_for_rows", 1, "0 * it")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_goes_wrong_in_some_run(fault, tmp_path):
    name, branch, change = FAULTS[fault]
    right = subject(name)
    module = planted(module_of(name), right.launch.kernel.__name__, branch, change, tmp_path)
    assert any(right.of_module(module).wrong(seed, most_polls=100) for seed in range(RUNS))
