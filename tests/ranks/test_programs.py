"""What programs of one launch hand to each other arrives, however they take turns; and each wait and signal is needed.

Programs are processes here (see programs.py). A fault is planted in the kernel's source (see planted.py), and is red as
soon as one of several runs goes wrong: in a single one everybody may happen to be in time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from types import ModuleType

import pytest
import torch
from cases import layer, on_cpu, poisoned
from planted import copied, planted, signal_first, with_argument, without
from programs import LAGGARD, MOST_POLLS, RUNS, Subject, recorded

from mega_moe.kernels import mega, scaled_mega
from mega_moe.kernels import schedule as schedules
from mega_moe.shapes import Need
from mega_moe.stages.s6_mega import LAUNCHES

pytestmark = on_cpu

NEEDS = {
    "dx": Need(dtopk_weights=False, dw_gate_up=False, dw_down=False),
    "dtopk_weights": Need(dx=False, dw_gate_up=False, dw_down=False),
    "dw_gate_up": Need(dx=False, dtopk_weights=False, dw_down=False),
    "dw_down": Need(dx=False, dtopk_weights=False, dw_gate_up=False),
}

LAYERS = {
    "one expert": dict(ids=[[0, 0]] * 10, H=96, I=72, E=1),
    "two experts": dict(ids=[[0, 1], [1, 0], [0, 0], [-1, 1]] * 5, H=96, I=72, E=2),
    "four experts": dict(ids=[[0, 2], [2, 0], [3, 2], [0, 3], [2, -1], [3, 0], [0, 2]] * 5, H=192, I=96, E=4),
}


@lru_cache
def subject(name: str) -> Subject:
    """plan, forward, backward, recompute, or backward for one gradient: dx, recompute dx, ...; each with fp8 before it
    in that precision. Behind a comma may stand which layer; few tiles make it likely that one is drawn while what it
    waits for is still being made."""
    direction, _, size = name.removeprefix("fp8 ").partition(", ")
    problem, inputs, dy = layer(**LAYERS[size or "two experts"])
    problem = problem.at(precision="fp8" if name.startswith("fp8 ") else "bf16")
    one_launch, _ = LAUNCHES[problem.precision]
    tiles = replace(one_launch.tiles(problem), group=2)
    work = schedules.forward_work(problem, tiles)

    def plan_and_schedule():
        plan, schedule = schedules.plan_and_schedule(inputs.topk_ids, problem.E, work)
        return plan, schedule, *schedules.KEPT.values()

    def forward():
        plan, schedule, _ = plan_and_schedule()
        return one_launch.forward(problem, inputs, plan, schedule, tiles)

    def backward():
        plan, _, _ = plan_and_schedule()
        recompute = direction.startswith("recompute")
        need = NEEDS.get(direction.split()[-1], Need())
        schedule = schedules.schedule(plan, schedules.backward_work(problem, tiles, need, recompute))
        pre = None if recompute else torch.ones(problem.R, 2, problem.I, dtype=inputs.x.dtype)
        return vars(one_launch.backward(problem, inputs, plan, pre, dy, need, schedule, tiles)).values()

    if direction.startswith("plan"):
        T = 260 if direction == "plan" else 40
        inputs = replace(inputs, topk_ids=torch.randint(-1, 7, (T, 3), generator=torch.Generator().manual_seed(0)))
        problem = problem.at(E=7)

        def launcher():
            plan, schedule, words = plan_and_schedule()
            return [*plan, schedule.table, schedule.counters, words]

        kernel = schedules.plan_and_schedule_kernel
    else:
        launcher = forward if direction == "forward" else backward
        module, which = module_of(name), "forward" if direction == "forward" else "backward"
        kernel = getattr(module, f"{module.__name__.rpartition('.')[2]}_{which}_kernel")
    with poisoned():
        expected = [t.clone() for t in launcher() if t is not None]
        launch, outputs = recorded(kernel, launcher)
    outputs = [t for t in outputs if t is not None]
    if direction.startswith("plan"):
        # Nobody writes behind the last tile. And who takes poison for a row's number ends at once, by an address that
        # is nobody's; zeros are as wrong.
        _, tiles, *_ = expected[-2].tolist()
        outputs[-3], expected[-3] = outputs[-3][:tiles], expected[-3][:tiles]
        launch = replace(launch, before=tuple(zeros_but(inputs.topk_ids, launch.before)))
    schedules.KEPT.clear()  # it has words that the launch shares with processes, and that a fault may leave as they are
    return Subject(launch, outputs, expected)


def module_of(name: str) -> ModuleType:
    """Where the kernel of a subject is written."""
    if name.startswith("plan"):
        return schedules
    return scaled_mega if name.startswith("fp8 ") else mega


def zeros_but(kept: torch.Tensor, before: Iterable[tuple]) -> Iterator[tuple]:
    """What memory holds before a launch, with zeros for all but this tensor's."""
    for memory, content in before:
        yield memory, content if memory.data_ptr() == kept.data_ptr() else torch.zeros_like(content)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("direction", ["plan", "forward", "backward", "recompute", *NEEDS])
def test_programs_at_once_compute_what_they_compute_one_after_another(direction, seed):
    assert not subject(direction).wrong(seed)


@pytest.mark.parametrize("direction", ["forward", "backward", "recompute", "fp8 forward", "fp8 recompute"])
def test_with_more_tiles(direction):
    assert not subject(f"{direction}, four experts").wrong(seed=0)


DISPATCH, GATE_UP, DOWN, DACT, DX, DW_GATE_UP, DW_DOWN, COMBINE = (
    *(f"kind == {kind}" for kind in ("DISPATCH", "GATE_UP", "DOWN", "DACT", "DX", "DW_GATE_UP", "DW_DOWN")),
    "else",
)
COUNT, PLACE, PART = "ticket < chunks", "ticket < 2 * chunks", "else"

FAULTS = {  # where it shows, in which branch it is planted, and what it is
    "down does not wait": ("forward", DOWN, without("wait")),
    "down waits for one tile too few": ("forward", DOWN, with_argument("wait", 1, "it - 1")),
    "combine does not wait": ("forward", COMBINE, without("wait")),
    "combine waits for half of its rows": ("forward", COMBINE, with_argument("wait", 1, "it // 2")),
    "gate_up signals before it stores": ("forward", GATE_UP, signal_first),
    "gate_up counts twice": ("forward", GATE_UP, with_argument("signal", 1, "2")),
    "down signals before it stores": ("forward", DOWN, signal_first),
    "dx does not wait": ("dx", DX, without("wait")),
    "dx signals before it stores": ("dx", DX, signal_first),
    "dw_gate_up does not wait": ("dw_gate_up", DW_GATE_UP, without("wait")),
    "dw_down does not wait": ("dw_down", DW_DOWN, without("wait")),
    "dact signals before it stores": ("dx", DACT, signal_first),
    "combine does not wait for dx": ("dx", COMBINE, without("wait")),
    "dact does not wait for gate_up": ("recompute dx, one expert", DACT, without("wait")),
    "gate_up signals in backward before it stores": ("recompute dx, one expert", GATE_UP, signal_first),
    "combine does not wait for parts": ("dtopk_weights", COMBINE, without("wait")),
    "dact signals before it stores parts": ("dtopk_weights", DACT, signal_first),
    "down does not wait for codes": ("fp8 forward", DOWN, without("wait")),
    "gate_up signals before it stores codes": ("fp8 forward", GATE_UP, signal_first),
    "dx does not wait for codes": ("fp8 dx", DX, without("wait")),
    "dispatch signals before it quantises": ("fp8 dw_down", DISPATCH, signal_first),
    "dact does not wait for dispatch, though dw_down relies on it": ("fp8 dw_down", DACT, without("wait")),
    "dw_gate_up does not wait for codes": ("fp8 dw_gate_up", DW_GATE_UP, without("wait")),
    "dw_down does not wait for codes": ("fp8 dw_down", DW_DOWN, without("wait")),
    "dact does not wait for a gate_up of codes": ("fp8 recompute dx, one expert", DACT, without("wait")),
    "chunks are placed before all are counted": ("plan", PLACE, without("wait")),
    "chunks signal before they are counted": ("plan", COUNT, signal_first),
    "parts do not wait for row_start": ("plan of one chunk", PART, without("wait")),
}

LEFT_BEHIND = {"dispatch signals before it quantises", "dact does not wait for dispatch, though dw_down relies on it"}
"""Those in which a step lies between what is done too late and what that spoils."""

LOST = {
    "gate_up does not signal": ("forward", GATE_UP, without("signal")),
    "gate_up signals another expert": ("forward", GATE_UP, with_argument("signal", 0, "it + 1")),
    "down counts blocks, not rows": ("forward", DOWN, with_argument("signal", 1, "1")),
    "dact does not signal": ("dw_down", DACT, without("signal")),
    "dispatch does not signal": ("fp8 dw_down", DISPATCH, without("signal")),
}


def with_fault(name: str, branch: str, fault, folder) -> Subject:
    """The subject of this name with a fault planted in its kernel."""
    kernel = subject(name).launch.kernel.__name__
    module = planted(module_of(name), kernel, branch, fault, folder)
    return subject(name).of_module(module)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_goes_wrong_in_some_run(name, tmp_path):
    faulty, most_polls = with_fault(*FAULTS[name], tmp_path), 100
    if name in LEFT_BEHIND:
        faulty, most_polls = replace(faulty, pace=LAGGARD), MOST_POLLS
    assert any(faulty.wrong(seed, most_polls=most_polls) for seed in range(RUNS))


@pytest.mark.parametrize("name", LOST)
def test_a_lost_signal_ends_in_an_error(name, tmp_path):
    (*errors,) = with_fault(*LOST[name], tmp_path).wrong(seed=0, most_polls=100)
    assert any("nobody is left to signal its counter" in error for error in errors)


def test_counters_that_nobody_zeroed_go_wrong():
    """As the last call of the same tiles left them, but for the ticket: nobody waits."""
    right = subject("forward")
    assert not right.wrong(seed=0)
    left = {memory.data_ptr(): memory.clone() for memory, _ in right.launch.before}
    counters = right.launch.args[right.launch.kernel.arg_names.index("counters_ptr")]
    left[counters.data_ptr()].view(torch.int32)[0] = 0
    before = tuple(
        (memory, left[memory.data_ptr()] if memory.data_ptr() == counters.data_ptr() else content)
        for memory, content in right.launch.before
    )
    used = replace(right, launch=replace(right.launch, before=before))
    assert any(used.wrong(seed) for seed in range(RUNS))


@pytest.mark.parametrize("leaves_last", [True, False], ids=["everybody", "nobody"])
def test_words_that_not_the_last_one_to_leave_zeroes_go_wrong(leaves_last, tmp_path):
    """Whoever has not left yet draws tickets again that others have drawn; or the next launch finds none left."""
    faulty = copied(schedules, tmp_path)
    faulty.leave = lambda left_ptr: leaves_last
    early = subject("plan of one chunk").of_module(faulty)
    assert any(early.wrong(seed, most_polls=100) for seed in range(RUNS))
