"""One property of layers that nobody thought of: whatever sizes, routing, masks, strides and dtype, parity holds."""

import pytest
import torch
from cases import AXES, DEVICE, DTYPES, SHAPES, assert_parity, lay_out, poisoned, run

from mega_moe.samples import random_inputs
from mega_moe.shapes import Problem

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if DEVICE == "cuda":  # sizes are compiled in: those of the table of cases, which are compiled already
    sizes = st.sampled_from([(H, I, E, K) for _, H, I, E, K in SHAPES.values() if min(H, I) >= 16])
else:
    sizes = st.tuples(st.integers(16, 70), st.integers(16, 40), st.integers(1, 6), st.integers(1, 4))


@st.composite
def layers(draw):
    """problem, inputs, dy: ids drawn one by one, and so likely to repeat, to leave experts empty and to be masked."""
    (H, I, E, K), T = draw(sizes), draw(st.integers(0, 24))
    problem = Problem(T, H, I, E, K, DTYPES[draw(st.sampled_from(list(DTYPES)))], DEVICE)
    inputs, dy = random_inputs(problem, seed=draw(st.integers(0, 99)), scale=draw(st.sampled_from(AXES["scale"])))
    ids = st.integers(-1, E - 1)
    routes = draw(st.lists(st.lists(ids, min_size=K, max_size=K), min_size=T, max_size=T))
    inputs.topk_ids.copy_(torch.tensor(routes, dtype=torch.int64).view(T, K))
    return problem, *lay_out(inputs, dy, draw(st.sampled_from(AXES["layout"])))


@settings(  # in the interpreter few: a rung has 60 core-seconds for all of its tests
    max_examples=12 if DEVICE == "cpu" else 100,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
@given(layers())
def test_parity_of_any_layer(rung, any_layer):
    problem, inputs, dy = any_layer
    with poisoned():
        result = run(rung, problem, inputs, dy)
    assert_parity(problem, inputs, dy, result)
