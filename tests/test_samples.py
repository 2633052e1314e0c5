"""Random layers have the spread over experts that their routing promises; layers from files are checked by name."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from mega_moe import moe, reference
from mega_moe.samples import LAYER, ROUTINGS, course_example, load_layer, random_inputs
from mega_moe.shapes import Problem

CPU = Problem(T=96, H=32, I=24, E=8, K=2, dtype=torch.bfloat16, device="cpu")
SIZES = [(96, 8, 2), (97, 8, 3), (1, 64, 8), (5, 6, 6), (50, 128, 8), (7, 1, 1), (0, 4, 2), (40, 3, 5)]


def rows_of_expert(p, inputs):
    return inputs.topk_ids.flatten().bincount(minlength=p.E)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("T, E, K", SIZES)
def test_ids_are_in_range_and_distinct_within_a_token(routing, T, E, K):
    p = CPU.at(T=T, E=E, K=K)
    inputs, dy = random_inputs(p, routing)

    assert inputs.problem() == p and inputs.topk_ids.dtype == torch.int64
    assert dy.shape == (T, p.H) and dy.dtype == p.dtype
    assert ((inputs.topk_ids >= 0) & (inputs.topk_ids < E)).all()
    if K <= E:
        assert all(len(set(token)) == K for token in inputs.topk_ids.tolist())


@pytest.mark.parametrize("T, E, K", SIZES)
def test_balanced_is_as_even_as_whole_numbers_allow(T, E, K):
    p = CPU.at(T=T, E=E, K=K)
    rows = rows_of_expert(p, random_inputs(p)[0])
    assert rows.max() - rows.min() <= 1


def test_balanced_is_not_a_few_hands_repeated():
    p = CPU.at(T=1024, E=16, K=4, H=16, I=16)
    hands = {tuple(sorted(token)) for token in random_inputs(p)[0].topk_ids.tolist()}
    assert len(hands) > 500  # of 1820 possible


def test_random_counts_scatter_as_uniform_draws_do():
    p = CPU.at(T=16384, E=128, K=8, H=16, I=16)
    ids = random_inputs(p, "random")[0].topk_ids
    share = p.K / p.E  # of the tokens, for every expert: its rows are binomial
    deviation = (p.T * share * (1 - share)) ** 0.5
    rows = ids.flatten().bincount(minlength=p.E).double()
    assert rows.mean() == p.T * share
    assert 0.75 < rows.std() / deviation < 1.25  # of 128 counts it is good to 6 %
    assert (rows - rows.mean()).abs().max() < 5 * deviation
    assert len({tuple(sorted(token)) for token in ids.tolist()}) == p.T  # of 10^12 possible hands


def test_random_with_more_routes_than_experts_draws_each_route_for_itself():
    p = CPU.at(T=4096, E=3, K=5)
    ids = random_inputs(p, "random")[0].topk_ids
    rows = ids.flatten().bincount(minlength=p.E).double()
    assert (rows - p.R / p.E).abs().max() < 5 * (p.R * 2 / 9) ** 0.5
    alike = (ids == ids[:, :1]).all(1).double().mean()
    assert 0.5 / 81 < alike < 2 / 81  # all five the same: 3 of 3^5


def test_zipf_has_a_busiest_expert_of_about_13_times_the_mean():
    p = CPU.at(T=16384, E=128, K=8, H=16, I=16)
    rows = rows_of_expert(p, random_inputs(p, "zipf")[0])
    assert 12.5 < rows.max() / rows.float().mean() < 14
    assert rows.min() > 0


@pytest.mark.parametrize("E, K", [(8, 2), (8, 8), (3, 5)])
def test_hot_has_one_expert_in_every_token(E, K):
    p = CPU.at(T=64, E=E, K=K)
    ids = random_inputs(p, "hot")[0].topk_ids
    assert any((ids == expert).any(1).all() for expert in range(E))


def test_scale_reaches_x_and_a_small_scale_reaches_dy():
    p = CPU.at(T=512, dtype=torch.float32)
    for scale, dy_scale in [(0.02, 0.02), (1.0, 1.0), (30.0, 1.0)]:
        inputs, dy = random_inputs(p, scale=scale)
        assert inputs.x.std().item() == pytest.approx(scale, rel=0.05)
        assert dy.std().item() == pytest.approx(dy_scale, rel=0.05)
        assert inputs.w_gate_up.std().item() == pytest.approx(p.H**-0.5, rel=0.05)
        assert inputs.w_down.std().item() == pytest.approx(p.I**-0.5, rel=0.05)


def test_weights_sum_to_one_in_fp32_and_the_seed_decides_everything():
    (a, da), (b, db), (c, dc) = random_inputs(CPU), random_inputs(CPU), random_inputs(CPU, seed=1)
    assert a.topk_weights.dtype == torch.float32
    assert random_inputs(CPU.at(dtype=torch.float64))[0].topk_weights.dtype == torch.float64
    torch.testing.assert_close(a.topk_weights.sum(-1), torch.ones(CPU.T))
    for name in LAYER:
        assert torch.equal(getattr(a, name), getattr(b, name))
        assert not torch.equal(getattr(a, name), getattr(c, name))
    assert torch.equal(da, db) and not torch.equal(da, dc)


def test_an_unknown_routing_names_the_known_ones():
    with pytest.raises(ValueError, match="balanced, random, zipf, hot"):
        random_inputs(CPU, "uniform")


# The layer of the lessons.


def test_the_lessons_layer_is_what_they_compute_by_hand():
    """Lesson 0 says: silu(1) and silu(2) are all that is needed. So here is the layer with them and no matrices."""
    inputs, dy = course_example(dtype=torch.float64)
    one, two = 1 / (1 + math.exp(-1)), 2 / (1 + math.exp(-2))
    y, saved = reference.forward(**vars(inputs))

    assert saved.plan.row_start.tolist() == [0, 4, 5, 7]
    assert saved.plan.token_of_row.tolist() == [0, 1, 2, 3, 1, 0, 3]
    assert saved.plan.slot_of_row.tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert saved.pre[:, 0, 0].tolist() == [1, 1, 2, 1, 2, 1, 2]  # gates
    assert saved.pre[:, 1, 0].tolist() == [2, 1, 3, 3, 1, 1, 1]  # ups
    by_hand = [
        [0.5 * 2 * one + 0.5 * one, -0.5 * one],  # experts 0 and 2
        [0.25 * one, 0.75 * two],  # experts 1 and 0
        [0.75 * 3 * two, 0],  # expert 0
        [0.25 * two + 0.75 * 3 * one, -0.25 * two],  # experts 2 and 0
    ]
    torch.testing.assert_close(y, torch.tensor(by_hand, dtype=torch.float64))
    assert dy.shape == y.shape and dy.dtype == y.dtype


def test_a_fourth_expert_that_nobody_wants_changes_nothing():
    (three, _), (four, _) = course_example(), course_example(experts=4)
    alone = moe(**vars(three), stage="reference")
    assert four.w_down.shape[0] == 4 and not (four.topk_ids == 3).any()
    assert torch.equal(moe(**vars(four), stage="reference"), alone)
    with pytest.raises(ValueError, match="3 experts, or 4 for two ranks, not 2"):
        course_example(experts=2)


# Layers from files.


def write(path, layer, **changes):
    tensors = {name: getattr(layer, name) for name in LAYER} | changes
    save_file({name: t.contiguous() for name, t in tensors.items() if t is not None}, path)
    return path


@pytest.fixture
def layer():
    return random_inputs(CPU)[0]


def test_a_layer_comes_back_as_it_was_written(layer, tmp_path):
    loaded = load_layer(write(tmp_path / "layer.safetensors", layer))
    assert all(torch.equal(getattr(loaded, name), getattr(layer, name)) for name in LAYER)


def test_rank_three_is_read_as_a_checkpoints_gate_up_proj(layer, tmp_path):
    path = write(tmp_path / "layer.safetensors", layer, w_gate_up=layer.w_gate_up.flatten(1, 2))
    assert torch.equal(load_layer(path).w_gate_up, layer.w_gate_up)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(w_down=None), "has no w_down; it holds"),
        (dict(x=torch.zeros(96, 1, 32)), "x must have 2 dimensions"),
        (dict(w_gate_up=torch.zeros(8, 47, 32)), r"must be \(E, 2I, H\)"),
        (dict(w_gate_up=torch.zeros(8, 3, 24, 32, dtype=torch.bfloat16)), r"ask for \(8, 2, 24, 32\)"),
        (dict(w_down=torch.zeros(8, 24, 32, dtype=torch.bfloat16)), r"w_down is \(8, 24, 32\)"),
        (dict(topk_weights=torch.zeros(96, 3)), "topk_weights is"),
        (dict(topk_ids=torch.zeros(96, 2)), "topk_ids must be int32 or int64"),
        (dict(topk_ids=torch.full((96, 2), 8)), "topk_ids holds 8; ids run from 0 to 7"),
        (dict(topk_ids=torch.full((96, 2), -2)), "topk_ids holds -2"),
        (dict(x=torch.zeros(96, 32)), "must share one dtype"),
        (dict(topk_weights=torch.zeros(96, 2, dtype=torch.int32)), "topk_weights must be floating point"),
    ],
)
def test_a_layer_that_does_not_fit_is_an_error_that_names_the_tensor(layer, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_layer(write(tmp_path / "layer.safetensors", layer, **changes))


def test_files_that_are_no_layers(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_layer(tmp_path / "absent.safetensors")
    (tmp_path / "text.safetensors").write_text("hello, this is no safetensors file")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_layer(tmp_path / "text.safetensors")


def test_masked_routes_are_legal_in_a_layer(layer, tmp_path):
    ids = layer.topk_ids.clone()
    ids[3] = -1
    path = write(tmp_path / "layer.safetensors", replace(layer, topk_ids=ids.int()))
    assert (load_layer(path).topk_ids[3] == -1).all()
