"""Where a compiler moves a load before its wait, or a store behind its signal, cross_compile.py says so: it does for
faults that are planted. That it says so of no kernel as it is, test_cross_compile.py shows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import DEVICE

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="compiles for a GPU that is not here; needs none")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[str]]:
    """What is said of each planted fault."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    environment.pop("TRITON_INTERPRET", None)
    program = subprocess.run(
        [sys.executable, "-m", "tests.kernels.planted_waits"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert program.returncode == 0, program.stderr
    return json.loads(program.stdout)


@pytest.mark.parametrize(
    "fault, seen_as",
    {
        "a wait without its barrier": "wait 1 has no barrier",
        "a wait without its fence": "act is copied behind a wait without a fence, or behind none",
        "a wait behind its tile": "something is loaded before wait 1",
        "a signal without its barrier": "signal 1 has no barrier",
        "a signal without its fence": "signal 1 has no fence",
        "ranks told by a GPU's own signal": "in a heap, for this GPU alone: atomic_rmw add, release, gpu, %",
    }.items(),
)
def test_a_planted_fault_is_seen(fault, seen_as, found):
    assert seen_as in found[fault]
