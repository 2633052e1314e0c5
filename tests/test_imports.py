"""What may import what, and how much works where Triton does not exist."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

WITHOUT_TRITON = """
import sys

class WithoutTriton:
    \"\"\"A finder of modules that finds all but Triton, as on a machine where it is not installed.\"\"\"

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *where):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, *where)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(WithoutTriton, sys.meta_path)
"""


def python(code: str) -> str:
    """What a fresh Python prints. It starts outside the checkout, so that nothing is found by accident."""
    find = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    program = subprocess.run([sys.executable, "-c", find + code], cwd="/", capture_output=True, text=True)
    assert program.returncode == 0, program.stderr
    return program.stdout


def test_the_reference_trains_without_triton():
    python(
        WITHOUT_TRITON
        + """
import torch
import mega_moe
from mega_moe import reference

moe = mega_moe.MoE(16, 24, 4, 2, stage="reference", dtype=torch.float64)
x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
moe(x).sum().backward()
assert x.grad.abs().sum() > 0 and moe.gate.weight.grad.abs().sum() > 0
assert not any(name.partition(".")[0] == "triton" for name in sys.modules)
"""
    )


def test_without_triton_the_other_rungs_say_what_to_install():
    out = python(
        WITHOUT_TRITON
        + """
import torch
from mega_moe import LADDER, MoE, Problem

for device in ("cpu", "cuda"):
    problem = Problem(T=3, H=16, I=24, E=4, K=2, device=device)
    for rung in LADDER:
        reason = rung.why_not(problem)
        print(rung.name, reason)
        assert (reason is None) == (rung.name == "reference")
        assert reason is None or "pip install" in reason and "triton" in reason
try:
    MoE(16, 24, 4, 2, stage="grouped")(torch.randn(3, 16))
except RuntimeError as error:
    assert "pip install" in str(error)
else:
    raise AssertionError("it ran")
"""
    )
    assert "grouped" in out


def test_importing_mega_moe_does_not_load_triton():
    """A rung's kernels are loaded when it is used: until then a user of the reference waits for nothing."""
    python("import sys, mega_moe\nassert not any(name.startswith('mega_moe.kernels') for name in sys.modules)")


def test_the_reference_stands_alone():
    """It imports nothing of mega_moe: a student reads it, and runs it, by itself."""
    python(
        """
import sys
import reference, torch
ids = torch.tensor([[0, 1], [1, -1]])
y, _ = reference.forward(
    torch.randn(2, 8), ids, torch.rand(2, 2), torch.randn(2, 2, 4, 8), torch.randn(2, 8, 4)
)
assert y.shape == (2, 8)
assert not any(name.startswith("mega_moe") for name in sys.modules)
"""
    )


def test_the_public_face():
    import mega_moe

    heaps = {"LocalHeaps", "ShmHeaps", "SymmetricHeaps"}
    assert set(mega_moe.__all__) == heaps | {"LADDER", "MoE", "Problem", "capture_layer", "keep_codes", "moe"}
    assert all(hasattr(mega_moe, name) for name in mega_moe.__all__)


def test_import_rules_hold():
    """The contracts in pyproject.toml: imports run downwards only, and so on."""
    lint_imports = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    if lint_imports is None:
        pytest.skip("import-linter is not installed")
    program = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert program.returncode == 0, program.stdout + program.stderr
