"""The schedule made on the device is that of mega_moe.schedule, to the bit, for every routing and all work there is."""

import itertools
from dataclasses import replace

import pytest
import torch
from cases import DEVICE, ROUTINGS, framed, on_cpu, on_gpu, reroute, transposed

from mega_moe import routing
from mega_moe import schedule as specification
from mega_moe.kernels import blocks, signal
from mega_moe.kernels import schedule as module
from mega_moe.kernels.schedule import KEPT, Schedule, backward_work, forward_work, plan_and_schedule, schedule
from mega_moe.schedule import KINDS, Phase, Work, number_of_counters, with_dispatch
from mega_moe.shapes import PRESETS, Need, Plan, Problem

UNWRITTEN = torch.iinfo(torch.int32).max

PROBLEM = Problem(T=70, H=130, I=72, E=6, K=3, device=DEVICE)
"""More than one strip of every phase in the interpreter."""

NEEDS = [Need(*needed) for needed in itertools.product([True, False], repeat=4)][:-1]  # all, ... but none


def work_of(over_rows: dict[str, int], weight_grads: dict[str, int] | None = None, **changes) -> Work:
    """A phase of that many strips for each name, and that many tiles of each weight gradient."""
    phases = lambda named: tuple(Phase(KINDS.index(kind), number) for kind, number in named.items())
    facts = dict(BLOCK_R=4, waits_for=0, combine=True, BLOCK_T=2, group=2, ahead=3)
    return Work(phases=phases(over_rows), weight_grads=phases(weight_grads or {}), **facts | changes)


FORWARD = work_of(dict(gate_up=2, down=3))
BACKWARD = work_of(dict(gate_up=3, dact=2, dx=1), dict(dw_gate_up=5, dw_down=2), waits_for=1)


def ids_of(T: int, K: int, E: int) -> torch.Tensor:
    """Random ids; the same expert may come twice in a token."""
    return torch.randint(E, (T, K), generator=torch.Generator().manual_seed(T)).to(DEVICE)


def assert_tiles(made: Schedule, plan: Plan, work: Work) -> None:
    """The tiles and counters are those of the specification, and nothing else is written."""
    T, E = len(plan.row_of_slot), len(plan.row_start) - 1
    specified = specification.schedule(plan.row_start, [T], [int(plan.row_start[-1])], work)
    tiles = len(specified)
    assert len(made.table) == specification.most_tiles(plan.row_of_slot.numel(), E, [T], work)
    assert torch.equal(made.table[:tiles], specified)
    assert (made.table[tiles:] == UNWRITTEN).all()
    assert made.counters.tolist() == [0, tiles] + [0] * number_of_counters(E, 1, work)
    assert made.work == work


def assert_scheduled(ids: torch.Tensor, E: int, work: Work) -> None:
    """Plan and schedule from one launch, which leaves its words as it found them; and the schedule from the plan."""
    plan, made = plan_and_schedule(ids, E, work)
    for name, got, specified in zip(plan._fields, plan, routing.plan(ids, E), strict=True):
        assert torch.equal(got, specified), name
    assert_tiles(made, plan, work)
    assert_words_are_zeros()
    assert_tiles(schedule(plan, work), plan, work)


def assert_words_are_zeros() -> None:
    assert KEPT and not any(words.any() for words in KEPT.values())


def test_example(framed_memory):
    ids = torch.tensor([[2, 0], [-1, 2], [2, -1]], device=DEVICE)
    work = work_of(dict(gate_up=1, down=1), BLOCK_R=2, ahead=0)
    plan, made = plan_and_schedule(ids, 3, work)
    assert plan.row_start.tolist() == [0, 1, 1, 4]
    assert made.counters.tolist() == [0, 8, 0, 0, 0, 0, 0, 0, 0]
    gate_up, down, combine = (KINDS.index(kind) for kind in ("gate_up", "down", "combine"))
    expected = [
        [gate_up, 0, 0, 0, 0, 1, 0, 0],
        [gate_up, 0, 2, 1, 1, 2, 0, 0],
        [gate_up, 0, 2, 2, 3, 1, 0, 0],
        [down, 0, 0, 0, 0, 1, 0, 1],
        [down, 0, 2, 1, 1, 2, 0, 2],
        [down, 0, 2, 2, 3, 1, 0, 2],
        [combine, 0, 0, 0, 0, 2, 0, 4],
        [combine, 0, 0, 1, 2, 1, 0, 4],
    ]
    assert made.table[:8].tolist() == schedule(plan, work).table[:8].tolist() == expected


@pytest.mark.parametrize("work", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("case", ROUTINGS)
def test_every_routing(case, work, framed_memory):
    T, K, E = 0 if case == "no tokens" else 50, 3, 7
    ids = reroute(ids_of(T, K, E), case, E)
    if case == "hot":
        ids[:, 0] = 2
    assert_scheduled(ids, E, work)


@pytest.mark.parametrize("work", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("T, K, E", [(1, 1, 1), (20, 2, 1), (9, 5, 5), (3, 8, 64), (150, 1, 2), (8, 3, 33)])
def test_any_number_of_experts_and_slots(T, K, E, work, framed_memory):
    assert_scheduled(ids_of(T, K, E), E, work)


@pytest.mark.parametrize(
    "need", NEEDS, ids=lambda need: "+".join(name for name, needed in vars(need).items() if needed)
)
@pytest.mark.parametrize("recompute", [False, True])
def test_backward_for_what_is_needed(need, recompute, framed_memory):
    """Small blocks, so that there are many: what is needed decides about phases, weight gradients and combine tiles."""
    work = replace(backward_work(PROBLEM, blocks.mega_for(PROBLEM), need, recompute), BLOCK_R=8, BLOCK_T=4)
    named = lambda phases: {KINDS[phase.kind] for phase in phases}
    wanted = dict(gate_up=recompute, dact=True, dx=need.dx)
    assert named(work.phases) == {name for name, needed in wanted.items() if needed}
    assert named(work.weight_grads) == {name for name in ("dw_gate_up", "dw_down") if getattr(need, name)}
    assert KINDS[work.phases[work.waits_for].kind] == "dact"
    assert work.combine == (need.dx or need.dtopk_weights)

    plan = routing.plan(reroute(ids_of(PROBLEM.T, PROBLEM.K, PROBLEM.E), "masked", PROBLEM.E), PROBLEM.E)
    assert_tiles(schedule(plan, work), plan, work)


def test_strips_are_those_of_the_tiles():
    """For a layer of qwen3-30b-a3b: H = 2048, I = 768."""
    problem, tiles = PRESETS["qwen3-30b-a3b"], blocks.mega(BLOCK_R=128, N=256, C=64, warps=8, stages=4, chunk=32)
    tiles = replace(tiles, down=replace(tiles.down, STRIP=3), combine=replace(tiles.combine, BLOCK_R=8))
    forward, backward = forward_work(problem, tiles), backward_work(problem, tiles, Need(), recompute=True)
    number = lambda phases: {KINDS[phase.kind]: phase.strips for phase in phases}
    assert number(forward.phases) == {"gate_up": 6, "down": 3}
    assert number(backward.phases) == {"gate_up": 6, "dact": 3, "dx": 8}
    assert number(backward.weight_grads) == {"dw_gate_up": 6 * 16, "dw_down": 3 * 16}
    for work in (forward, backward):
        assert (work.BLOCK_R, work.BLOCK_T, work.group, work.ahead) == (128, 8, tiles.group, tiles.ahead)
    assert forward.combine and not forward.weight_grads


@pytest.mark.parametrize("ranks, group", [(1, 16), (2, 2), (4, 2), (32, 2), (64, 1), (128, 1)])
def test_over_ranks_phases_are_mixed_and_groups_small(ranks, group):
    """Of 128 experts. Two groups a rank at least, if it has two experts; with a process for each rank, and with all in
    one."""
    one, tiles = PRESETS["qwen3-30b-a3b"], blocks.mega(BLOCK_R=128, N=256, C=64, warps=8, stages=4, chunk=32)
    for problem in (one.at(ranks=ranks, tokens_per_rank=(one.T,)), one.at(tokens_per_rank=(one.T // ranks,) * ranks)):
        for work in (forward_work(problem, tiles), backward_work(problem, tiles, Need(), recompute=True)):
            assert KINDS[work.phases[0].kind] == "dispatch" and work.mixed and work.group == group
    for work in (forward_work(one, tiles), backward_work(one, tiles, Need(), recompute=True)):
        assert not work.mixed and work.group == tiles.group


def test_turns_of_many_tiles():
    """Two phases of 42,000 tiles each in a turn: where they are mixed, their product is beyond int32."""
    ids = torch.arange(2, device=DEVICE).repeat(700)[:, None]
    work = work_of(dict(dispatch=60, gate_up=60), BLOCK_R=1, BLOCK_T=64, group=1, mixed=True)
    plan = routing.plan(ids, 2)
    made, specified = schedule(plan, work), specification.schedule(plan.row_start, [1400], [1400], work)
    assert torch.equal(made.table[: len(specified)], specified)


@pytest.mark.parametrize(
    "work",
    [
        work_of(dict(dact=1), combine=False),
        work_of(dict(dact=1), dict(dw_down=1), combine=False, ahead=0),
        with_dispatch(BACKWARD),
        with_dispatch(replace(FORWARD, group=1)),
        replace(FORWARD, mixed=True),
        with_dispatch(replace(BACKWARD, group=100)),
        replace(FORWARD, group=100, BLOCK_T=1),
        replace(BACKWARD, group=3, BLOCK_R=1, ahead=0),
        replace(BACKWARD, ahead=10**6, BLOCK_T=64),
        replace(BACKWARD, ahead=11, BLOCK_R=64, BLOCK_T=1),
        work_of(dict(dact=65, dx=17), dict(dw_gate_up=200, dw_down=64)),
        with_dispatch(work_of(dict(dact=65, dx=17), dict(dw_gate_up=200, dw_down=64), group=3), strips=5),
    ],
    ids=[
        *("one phase", "no combine tiles", "backward with dispatch", "groups of one", "mixed without dispatch"),
        *("one mixed group", "one group", "blocks of one row", "all weight gradients first"),
        *("more combine tiles than row blocks", "many side by side", "many side by side, mixed"),
    ],
)
def test_any_work(work, framed_memory):
    assert_scheduled(reroute(ids_of(41, 2, 9), "masked", 9), 9, work)


@pytest.mark.parametrize("resident", [1, 2, 3, 7])
def test_any_number_of_programs(resident, framed_memory, monkeypatch):
    monkeypatch.setattr(module, "programs", lambda tile: resident)
    for work in (FORWARD, BACKWARD):
        assert_scheduled(ids_of(130, 3, 5), 5, work)


@pytest.mark.parametrize(
    "lay_out", [transposed, lambda ids: framed(ids, gap=3, offset=1).int()], ids=["transposed", "framed int32"]
)
def test_any_ids(lay_out, framed_memory):
    ids = ids_of(60, 4, 5)
    ids[::7] = 5  # the first that is no expert
    assert_scheduled(lay_out(ids), 5, FORWARD)


# The words that programs share.


def test_the_words_are_kept_for_the_next_launch():
    ids = ids_of(20, 2, 3)
    kept = []
    for _ in range(3):
        plan_and_schedule(ids, 3, FORWARD)
        kept += [words.data_ptr() for words in KEPT.values()]
        assert_words_are_zeros()
    assert len(set(kept)) == len(KEPT)


@on_cpu
def test_a_wait_that_nobody_ends_is_an_error_and_its_words_are_not_kept(monkeypatch):
    """As if a chunk's signal were lost."""
    from triton.runtime.errors import InterpreterError

    monkeypatch.setattr(signal, "MOST_POLLS", 10)
    monkeypatch.setitem(KEPT, ("cpu",), torch.tensor([0, -1, 0, 0], dtype=torch.int32))
    with pytest.raises(InterpreterError, match="a wait is not over, and nobody is left to signal its counter"):
        plan_and_schedule(ids_of(20, 2, 3), 3, FORWARD)
    assert ("cpu",) not in KEPT
    plan_and_schedule(ids_of(20, 2, 3), 3, FORWARD)
    assert_words_are_zeros()


@on_gpu
def test_a_graph_has_words_of_its_own():
    """A replay beside, and between, launches of the stream it was captured on."""
    ids = ids_of(500, 4, 9)
    plan_and_schedule(ids, 9, FORWARD)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan, made = plan_and_schedule(ids, 9, FORWARD)
    for seed in range(3):
        ids.copy_(ids_of(500, 4, 9).roll(seed, 1))
        ids[seed] = -1
        graph.replay()
        other = plan_and_schedule(ids, 9, FORWARD)[1]
        tiles = int(made.counters[1])
        assert all(torch.equal(got, specified) for got, specified in zip(plan, routing.plan(ids, 9)))
        assert torch.equal(made.table[:tiles], other.table[:tiles]) and torch.equal(made.counters, other.counters)
        assert_words_are_zeros()
