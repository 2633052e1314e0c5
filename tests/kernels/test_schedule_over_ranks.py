"""Over ranks the schedule comes from the launch in which they meet, and is that of mega_moe.schedule, to the bit."""

import pytest
import torch
from cases import DEVICE

from mega_moe import routing
from mega_moe.kernels.blocks import blocks_of_target
from mega_moe.kernels.meet import meet
from mega_moe.kernels.schedule import forward_work, group_over_ranks
from mega_moe.samples import random_inputs
from mega_moe.schedule import KINDS, Phase, Work, home_of_row, number_of_counters, schedule, with_dispatch
from mega_moe.shapes import PRESETS, Problem
from mega_moe.symmetric import LocalHeaps

GATE_UP, DOWN, DACT, DX, DW_GATE_UP, DW_DOWN = (
    KINDS.index(kind) for kind in ("gate_up", "down", "dact", "dx", "dw_gate_up", "dw_down")
)
FORWARD = with_dispatch(Work(4, (Phase(GATE_UP, 2), Phase(DOWN, 3)), (), 0, True, 2, 2, 0))
BACKWARD = with_dispatch(
    Work(
        4,
        (Phase(GATE_UP, 3), Phase(DACT, 2), Phase(DX, 1)),
        (Phase(DW_GATE_UP, 5), Phase(DW_DOWN, 2)),
        1,
        True,
        2,
        2,
        3,
    )
)
WITHOUT_DX = with_dispatch(Work(4, (Phase(DACT, 2),), (Phase(DW_DOWN, 2),), 0, False, 2, 1, 3))


@pytest.fixture(autouse=True)
def watched_addresses():
    """Not watched: a heap is reached by its address, and is no argument of the kernel."""


@pytest.mark.parametrize("E", [4, 12])
@pytest.mark.parametrize("tokens_per_rank", [(43,), (40, 30), (70, 0), (9, 0, 21, 40), (0, 0, 0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("work", [FORWARD, BACKWARD, WITHOUT_DX], ids=["forward", "backward", "without dx"])
def test_the_common_order_of_all_ranks(work, tokens_per_rank, E):
    assert work.mixed
    T, W = sum(tokens_per_rank), len(tokens_per_rank)
    heaps = LocalHeaps(W, max(*tokens_per_rank, 1))
    problem = Problem(T, 32, 16, E, 3, torch.float32, DEVICE, heap=heaps.key, tokens_per_rank=tokens_per_rank)
    inputs, _ = random_inputs(problem, "zipf")
    inputs.topk_ids[::5, 1] = -1
    _, plan, made = meet(problem, inputs, None, work)

    rows = routing.plan(inputs.topk_ids, E)
    assert torch.equal(plan.row_start, rows.row_start)
    live_routes = home_of_row(rows, tokens_per_rank).bincount(minlength=W).tolist()
    specified = schedule(rows.row_start, tokens_per_rank, live_routes, work)
    assert torch.equal(made.table[: len(specified)], specified)
    assert made.counters.tolist() == [0, len(specified)] + [0] * number_of_counters(E, W, work)


@pytest.mark.parametrize(
    "T, W, group",
    [
        (16384, 8, 2),  # 64 blocks of an expert, 15 tiles each
        (4096, 8, 2),  # 480 tiles of two experts, and 462 are enough
        (2048, 8, 4),
        (1024, 8, 8),
        (256, 8, 8),  # never more than half of the rank's experts
        (1024, 2, 32),
        (256, 64, 1),
    ],
)
def test_groups_are_as_large_as_a_turn_needs(T, W, group):
    """Whatever a rank brings to a call: what counts is how much it may bring."""
    p, tiles = PRESETS["qwen3-30b-a3b"], blocks_of_target("sm_90", torch.bfloat16).mega
    for tokens in (0, 7, T):
        problem = p.at(T=tokens, tokens_per_rank=(tokens,), ranks=W, max_tokens=T)
        work = forward_work(problem, tiles)
        assert sum(phase.strips for phase in work.phases) == 15
        assert group_over_ranks(problem, work, tiles, programs=132) == group
    in_one_process = p.at(T=W * T, tokens_per_rank=(T,) * W)  # the tiles of all ranks, for the programs of one device
    assert group_over_ranks(in_one_process, work, tiles, programs=W * 132) == group
