"""A layer of few tokens, launched eagerly and replayed from a CUDA graph: which rung is fastest, and how far it is from
reading the weights. Runs when this file is named."""

from collections.abc import Callable

import pytest
from floor import DIRECTIONS, LAUNCHED, METHOD, OF_FEW_TOKENS
from measuring import CLOCK, Measurement

from mega_moe import Problem


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("launched", LAUNCHED)
@pytest.mark.parametrize("contestant", OF_FEW_TOKENS)
def test_floor(
    problem: Problem,
    contestant: str,
    launched: str,
    direction: str,
    floor_measurements: dict[tuple[str, str], Measurement],
    report: Callable,
):
    facts = OF_FEW_TOKENS[contestant]
    report(
        direction,
        floor_measurements[contestant, launched],
        ceiling=None,
        contestant=contestant,
        label=facts.label,
        kind=facts.kind,
        launched=launched,
        interpreted=facts.needs_triton and problem.device == "cpu",
        method=METHOD[problem.device],
    )
