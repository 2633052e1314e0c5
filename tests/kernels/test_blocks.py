"""Block sizes, and how many programs work on them."""

from dataclasses import fields

import pytest

from mega_moe.kernels import blocks
from mega_moe.kernels.tile import INTERPRETED
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
