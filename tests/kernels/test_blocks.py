"""Block sizes, and how many programs work on them."""

from dataclasses import fields, replace

import pytest
from cases import DEVICE

from mega_moe.kernels import blocks
from mega_moe.kernels.tile import INTERPRETED
from mega_moe.parity import check
from mega_moe.registry import stage
from mega_moe.samples import random_inputs
from mega_moe.shapes import Problem


@pytest.mark.parametrize("tiles_for", [blocks.persistent_for, blocks.mega_for, blocks.mx_for])
def test_processors_are_left_to_others(tiles_for):
    """By every kernel with resident programs; at least one is left to work on, or the rung says why it cannot."""
    problem = Problem(T=5, H=64, I=48, E=4, K=2)
    tiles, fewer = tiles_for(problem), tiles_for(problem.at(num_reserved_sms=2))
    kernels = [f.name for f in fields(tiles) if isinstance(getattr(tiles, f.name), blocks.Resident)]
    assert len(kernels) == 6
    for name in kernels:
        all_of_them, some = (blocks.programs(getattr(each, name)) for each in (tiles, fewer))
        assert some == all_of_them - 2 * getattr(tiles, name).per_processor
    assert blocks.why_not(problem.at(num_reserved_sms=2)) is None
    if not INTERPRETED:
        assert "leaves none of the GPU's" in blocks.why_not(problem.at(num_reserved_sms=10**4))


FEW = (blocks.few(16, 16, N=128, C=128, stages=1, apart=(128, 64, 2)), blocks.few(32, 32, 64, 64, 1, (64, 64, 3)))


@pytest.fixture
def few_rows(monkeypatch):
    """Tiles for few rows where kernels are interpreted, too."""
    monkeypatch.setattr(blocks, "INTERPRETER", replace(blocks.INTERPRETER, few=FEW))


def test_tiles_of_few_rows_are_those_of_the_mean(few_rows):
    """Up to so many rows, on average over experts; never over ranks, which must choose
    alike, whatever tokens each of them has; nor for a precision whose directions have products of two kinds."""
    layer = Problem(T=1, H=64, I=48, E=8, K=2, device="cpu")
    for tiles_for, name in ((blocks.persistent_for, "persistent"), (blocks.mega_for, "mega")):
        few, more = (getattr(each, name) for each in FEW)
        many = getattr(blocks.INTERPRETER, name)
        chosen = {T: tiles_for(layer.at(T=T)) for T in (0, 1, 64, 65, 128, 129)}
        assert chosen == {0: few, 1: few, 64: few, 65: more, 128: more, 129: many}
        assert tiles_for(layer.at(tokens_per_rank=(1,))) == tiles_for(layer.at(precision="fp8_bwd")) == many
        assert tiles_for(layer.at(num_reserved_sms=1)).down.reserved == 1


@pytest.mark.parametrize("routing", ["balanced", "hot"])
@pytest.mark.parametrize("stage_name", ["persistent", "mega"])
def test_parity_on_tiles_of_few_rows(few_rows, stage_name, routing):
    """hot gives an expert more rows than fit into a block. No size is a multiple of a block."""
    problem = Problem(T=19, H=80, I=48, E=6, K=2, device=DEVICE, save="inputs" if routing == "hot" else "pre")
    inputs, dy = random_inputs(problem, routing)
    rung = stage(stage_name)
    y, saved = rung.forward(problem, inputs)
    assert check(problem, inputs, dy, y, rung.backward(problem, inputs, saved, dy)).passed


@pytest.mark.parametrize("few", blocks.HALF["sm_90"].few, ids=lambda few: f"{few.rows} rows")
def test_no_step_of_a_weight_gradient_crosses_a_block(few):
    """Behind a block stands another expert's, whose rows are not zeros."""
    for tiles in (few.persistent, few.mega):
        assert tiles.BLOCK_R % tiles.dw_down.BLOCK_R == 0 and tiles.BLOCK_R % tiles.dw_gate_up.BLOCK_R == 0
        warps = {getattr(tiles, f.name).num_warps for f in fields(tiles) if f.name not in NO_TILES}
        assert tiles is few.persistent or len(warps) == 1, "one launch has one number of warps"


NO_TILES = {"BLOCK_R", "group", "group_over_ranks", "ahead"}
