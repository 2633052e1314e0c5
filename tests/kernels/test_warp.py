"""Rung warp's launch: the bits of rung mega, whose tiles it shares. Its code is read by cross_compile.py, on a CPU."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases import DEVICE, able, assert_parity, layer, on_gpu, poisoned, run, same_bits

from mega_moe import routing as routings
from mega_moe.kernels.blocks import warp_for
from mega_moe.kernels.warp import LATE_DOWN, PARTS, warp_work
from mega_moe.registry import stage
from mega_moe.samples import ROUTINGS, random_inputs
from mega_moe.schedule import BLOCK, COLUMN, COMBINE, KIND, KINDS, ROWS, schedule
from mega_moe.shapes import SAVES, Problem

LAYERS = {  # T, H, I, E, K
    "one block a side": (64, 64, 48, 8, 2),
    "late columns": (700, 1024, 256, 16, 4),
    "nothing divides anything": (301, 333, 201, 5, 3),
    "long experts": (3000, 512, 136, 3, 2),  # more row blocks than tickets a late column is dealt among
}


@pytest.mark.parametrize("late", [0, 1, 2, 9])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_block_of_down_has_one_tile_and_late_ones_come_last(routing, late):
    """Whatever is late: every 256 columns of every row block, once. Long experts have more blocks than PARTS."""
    problem = Problem(T=1500, H=1100, I=64, E=5, K=2, device="cpu")
    tiles = replace(warp_for(problem), late=late)
    plan = routings.plan(random_inputs(problem, routing)[0].topk_ids, problem.E)
    table = schedule(plan.row_start, [problem.T], [problem.R], warp_work(problem, tiles)).tolist()
    late = min(late, 4)  # of five blocks of columns one is early
    down, last_early, first_late = Counter(), 0, len(table)
    for n, tile in enumerate(table):
        if tile[KIND] == KINDS.index("down"):
            down[tile[BLOCK], tile[COLUMN]] += 1
            last_early = n
        if tile[KIND] == LATE_DOWN.value:  # as blocks_of_ticket deals them
            for b in range(tile[COLUMN] // late, -(-tile[ROWS] // 128), PARTS.value):
                down[tile[BLOCK] + b, 5 - late + tile[COLUMN] % late] += 1
            first_late = min(first_late, n)
    blocks = {tile[BLOCK] for tile in table if tile[KIND] == KINDS.index("gate_up")}
    assert down == Counter((block, column) for block in blocks for column in range(5))
    assert last_early < first_late
    assert not late or first_late < min(n for n, tile in enumerate(table) if tile[KIND] == COMBINE)


@pytest.fixture
def rungs():
    """warp and mega, where both can run."""
    return able(stage("warp")), stage("mega")


@on_gpu
@pytest.mark.usefixtures("tiles_of_many_rows")
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("routing", [*ROUTINGS, "masked", "empty"])
@pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
def test_forward_has_the_bits_of_mega(sizes, routing, save, rungs):
    problem = Problem(*sizes, device=DEVICE, save=save, swiglu_limit=2.0 if routing == "hot" else None)
    inputs, _ = random_inputs(problem, routing if routing in ROUTINGS else "random")
    if routing == "masked":
        inputs.topk_ids.flatten()[::3] = -1
    if routing == "empty":
        inputs.topk_ids.div_(2, rounding_mode="floor")
    with poisoned():
        (y, saved), (expected, expected_saved) = (rung.forward(problem, inputs) for rung in rungs)
    live = saved.plan.token_of_row >= 0
    assert same_bits(y, expected)
    assert save == "inputs" or same_bits(saved.pre[live], expected_saved.pre[live])


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parity_of_a_layer_with_late_columns(dtype, rungs):
    problem, inputs, dy = layer(T=300, H=768, I=136, E=6, K=3, dtype=dtype)
    assert_parity(problem, inputs, dy, run(rungs[0], problem, inputs, dy))
