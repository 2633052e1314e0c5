"""Each grouped GEMM of the layer alone, beside torch's and beside the dense product of the same flops."""

from collections.abc import Callable

import pytest
from gemms import GEMMS, IMPLEMENTATIONS
from measuring import CLOCK, Measurement

from mega_moe import Problem


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("gemm", GEMMS)
def test_gemm(
    problem: Problem,
    gemm: str,
    implementation: str,
    gemm_measurements: dict[tuple[str, str], Measurement],
    report: Callable,
):
    facts = IMPLEMENTATIONS[implementation]
    report(
        "product",
        gemm_measurements[gemm, implementation],
        ceiling=gemm_measurements.get((gemm, "cublas")),
        gemm=gemm,
        contestant=implementation,
        label=facts.label,
        kind=facts.kind,
        interpreted=facts.needs_triton and problem.device == "cpu",
    )
