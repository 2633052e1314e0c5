"""What tests over ranks share."""

import pytest
from cases import layer

from mega_moe.registry import LADDER, Rung, stage


@pytest.fixture(autouse=True)
def small_layers_have_the_tiles_of_large_ones(tiles_of_many_rows):
    """What ranks compute is held to the bits of one rank."""


@pytest.fixture(params=[rung.name for rung in LADDER if rung.over_ranks])
def over_ranks(request) -> Rung:
    """A rung that takes heaps, if it can run here."""
    problem, _, _ = layer()
    if reason := stage(request.param).why_not(problem):
        pytest.skip(reason)  # without Triton, as every rung of kernels
    return stage(request.param)
