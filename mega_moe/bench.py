"""`mega-moe bench`: the benchmarks in tests/bench, which compare the rungs with each other and with what people use.

They are pytest-benchmark's, so this only finds them and starts pytest; they live in the checkout, not in the wheel.
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
BENCHMARKS = CHECKOUT / "tests" / "bench"
FLOOR = "test_floor.py"  # among them, and run apart: few tokens
USAGE_ERROR = 4  # pytest's exit code for options it does not take


def why_not() -> str | None:
    """One sentence, with the fix, if the benchmarks cannot run here; None if they can."""
    if not any(BENCHMARKS.glob("test_*.py")):
        return f"the benchmarks are not installed with the package ({BENCHMARKS} has none): run this from a checkout"
    missing = [package for package in ("pytest", "pytest_benchmark") if not find_spec(package)]
    if missing:
        return f"the benchmarks need {' and '.join(missing)}: pip install {' '.join(missing)}".replace("_", "-")
    return None


def command(shapes: list[str], save: str, results: Path | None, floor: bool) -> list[str]:
    """The pytest command line. shapes: names of presets (none: the benchmarks' default); results: a JSON file; floor:
    the benchmark of few tokens, instead of all others."""
    options = [*(f"--shape={shape}" for shape in shapes), f"--save={save}"]
    if results:
        options.append(f"--benchmark-json={results.resolve()}")
    return [sys.executable, "-m", "pytest", str(BENCHMARKS / FLOOR if floor else BENCHMARKS), *options]


def run(shapes: list[str], save: str, results: Path | None, floor: bool) -> int:
    """Run them, from the checkout. Returns 0, 1 where one failed, 2 where pytest refused the options."""
    code = subprocess.run(command(shapes, save, results, floor), cwd=CHECKOUT, check=False).returncode
    return {0: 0, USAGE_ERROR: 2}.get(code, 1)
