"""One launch a direction, of 8-bit codes: on one rank to the bit what rung persistent computes with the same tiles.
(What persistent computes is held to the reference in test_scaled.py, and ranks to one rank in ../ranks.)"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import assert_same, lay_out, layer, reroute, run, same_bits

from mega_moe.kernels import blocks, mega, scaled_mega
from mega_moe.kernels.tile_table import TICKETS
from mega_moe.registry import stage
from mega_moe.shapes import SAVES, Need, Problem
from mega_moe.stages.s6_mega import LAUNCHES

PERSISTENT, MEGA = stage("persistent"), stage("mega")
LIMIT = 3.0

LAYERS = {
    "odd": dict(T=13, H=67, I=17, E=3, K=2),
    "more than one block a side": dict(T=70, H=140, I=140, E=1, K=2),
    "masked": dict(T=20, H=32, I=24, E=4, K=3),
    "all masked": dict(T=5, H=32, I=24, E=3, K=2),
    "no tokens": dict(T=0, H=32, I=24, E=3, K=2),
}


@pytest.mark.parametrize(
    "name, precision, save",
    [
        *((name, "fp8", "inputs") for name in LAYERS),
        *(("odd", "fp8", "pre"), ("more than one block a side", "fp8_bwd", "inputs"), ("masked", "fp8_bwd", "pre")),
    ],
)
def test_what_persistent_computes(name, precision, save, poison):
    problem, inputs, dy = layer(**LAYERS[name], limit=LIMIT if name == "masked" else None)
    inputs = replace(inputs, topk_ids=reroute(inputs.topk_ids, name, problem.E))
    layer_ = problem.at(precision=precision, save=save), inputs, dy
    assert_same(run(MEGA, *layer_), run(PERSISTENT, *layer_))


@pytest.mark.parametrize("dtype, layout", [(torch.float16, "transposed"), (torch.float32, "weights padded")], ids=str)
def test_other_dtypes_and_any_strides(dtype, layout, poison):
    problem, inputs, dy = layer(T=9, H=150, I=30, dtype=dtype)
    layer_ = problem.at(precision="fp8", save="inputs"), *lay_out(inputs, dy, layout)
    assert_same(run(MEGA, *layer_), run(PERSISTENT, *layer_))


def test_exactly_the_gradients_that_are_needed(poison):
    """All combinations, whatever forward kept: None where nobody asked, the same bits as ever where somebody did."""
    problem, inputs, dy = layer([[0, -1], [1, 0]], I=16, E=2)
    problems = [problem.at(precision="fp8", save=save) for save in SAVES]
    _, full = run(PERSISTENT, problems[0], inputs, dy)
    kept = [MEGA.forward(problem, inputs)[1] for problem in problems]
    for n, needed in enumerate(product([False, True], repeat=4)):
        need = Need(*needed)
        grads = MEGA.backward(problems[n % 2], inputs, kept[n % 2], dy, need)
        for name, wanted in vars(need).items():
            got = getattr(grads, name)
            assert same_bits(got, getattr(full, name)) if wanted else got is None, (need, name)


def test_nan_stays_with_its_token_and_the_experts_it_used(poison):
    """Token 2 uses expert 3, whose block it pads."""
    problem, inputs, dy = layer([[0, 1], [2, 0], [3, 3], [1, 2]], E=4)
    problem, inputs = problem.at(precision="fp8"), replace(inputs, x=inputs.x.clone())
    inputs.x[2, 5] = torch.nan
    y, grads = run(MEGA, problem, inputs, dy)
    assert_same((y, grads), run(PERSISTENT, problem, inputs, dy))
    assert y.isnan().any(1).tolist() == [False, False, True, False]
    assert grads.dw_down.isnan().flatten(1).any(1).tolist() == [False, False, False, True]


def test_any_programs_and_strips_give_the_same_bits(monkeypatch, poison):
    problem, inputs, dy = layer(T=9, H=140, I=140, E=2, K=1)
    problem = problem.at(precision="fp8", save="inputs")
    expected, tiles = run(MEGA, problem, inputs, dy), blocks.fp8_tiles()
    longer = {kernel: replace(getattr(tiles, kernel), STRIP=2) for kernel in TICKETS if "dw" not in kernel}
    monkeypatch.setattr(scaled_mega, "programs", lambda tile: 1)
    monkeypatch.setattr(blocks, "fp8_tiles", lambda: replace(tiles, **longer))
    assert_same(run(MEGA, problem, inputs, dy), expected)


# The recipe.


def test_fp8_bwd_goes_forward_and_makes_pre_again_as_bf16_does():
    forward, backward = LAUNCHES["fp8_bwd"]
    assert forward.forward is mega.mega_forward and backward.backward is scaled_mega.scaled_mega_backward
    problem = Problem(1, 16, 16, 1, 1, precision="fp8_bwd")
    tiles = backward.tiles(problem)
    assert tiles.gate_up == forward.tiles(problem).gate_up and tiles.dact == blocks.fp8_tiles().dact
    assert backward.tiles(problem.at(precision="fp8")).gate_up == blocks.fp8_tiles().gate_up


def test_tiles_leave_processors_to_others():
    tiles = blocks.mega_fp8_for(Problem(1, 16, 16, 1, 1, precision="fp8", num_reserved_sms=2))
    assert {tiles.gate_up.reserved, tiles.dact.reserved, tiles.dw_down.reserved} == {2}


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_what_has_no_use_for_codes_says_so(precision, monkeypatch):
    problem = Problem(1, 16, 16, 1, 1, precision=precision)
    monkeypatch.setattr(blocks, "INTERPRETED", True)  # whose processors nobody counts
    for name, reason in (("sm_90", None), ("gfx942", "e4m3fnuz"), ("sm_86", "older than sm_90")):
        monkeypatch.setattr(blocks, "target", lambda name=name: name)
        said = MEGA.recipe().why_not(problem)
        assert said is None if reason is None else reason in said
    assert "not measured on" in MEGA.recipe().note(problem)
