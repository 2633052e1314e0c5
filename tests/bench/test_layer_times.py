"""One layer by every rung, beside what people train with today and the dense GEMMs of the same flops."""

from collections.abc import Callable

import pytest
from contestants import CONTESTANTS, named
from measuring import CLOCK, DIRECTIONS, Measurement

from mega_moe import Problem


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # transformers' own
@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("contestant", CONTESTANTS)
def test_layer(
    problem: Problem,
    contestant: str,
    direction: str,
    layer_measurements: dict[str, Measurement],
    report: Callable,
):
    facts = CONTESTANTS[contestant]
    report(
        direction,
        layer_measurements[contestant],
        ceiling=layer_measurements.get(named("cublas", facts.precision)),
        contestant=contestant,
        label=facts.label,
        kind=facts.kind,
        ranks=facts.ranks,
        precision=facts.precision,
        interpreted=facts.needs_triton and problem.device == "cpu",
    )
