"""`pytest tests/bench` measures; `pytest` alone does not come here. Each shape is measured once, and then reported row
by row to pytest-benchmark, in groups that compare the contestants of one shape and one direction.

Only what is selected is run: `-k "grouped or cublas"` leaves the others out, and their compilation with them. Where a
name begins another one, so does the direction behind it: `-k "torch-forward or torch-backward"` is not torch-compiled.
In 8 bits a name ends on the precision: `-k persistent` is persistent in all of them, with bf16 beside them.
"""

import math
import statistics
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import render_floor
import render_results
from cases import DEVICE
from contestants import CONTESTANTS
from floor import OF_FEW_TOKENS, TOKENS, measure_floor
from measuring import METHOD, ROUTING, Measurement, measure_gemms, measure_layer, replay

from mega_moe import Problem, ladder
from mega_moe.shapes import PRESETS, SAVES

HERE = Path(__file__).parent
APART = HERE / "test_floor.py"  # with other tables, and a record of its own: run when it is named itself
SHAPES = {"cuda": ["qwen3-30b-a3b", "qwen3-235b-a22b"], "cpu": ["tiny"]}
COLUMNS = ["median", "iqr", "rounds"]

ROWS = pytest.StashKey[list[dict]]()


def pytest_addoption(parser):
    parser.addoption(
        "--shape",
        "--shapes",
        action="append",
        default=[],
        metavar="NAME",
        help=f"which layer to measure: {', '.join(PRESETS)}; may be repeated, or a list with commas (default: both "
        "models on a GPU, tiny on a CPU)",
    )
    parser.addoption(
        "--save",
        choices=SAVES,
        default="pre",
        help="what a rung's forward keeps for its backward (default: pre); the others keep what autograd does",
    )


def pytest_configure(config):
    config.stash[ROWS] = []
    if not any(argument.startswith("--benchmark-columns") for argument in config.invocation_params.args):
        config.option.benchmark_columns = COLUMNS


def pytest_ignore_collect(collection_path, config):
    """Benchmarks run when they are named, never along with the tests."""
    named = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if collection_path == APART:
        return None if APART in named else True
    return None if any(path == HERE or HERE in path.parents for path in named) else True


def shapes(config) -> list[str]:
    """The shapes to measure. Raises UsageError for one that does not exist, or that a CPU has no business with."""
    asked = [name for option in config.getoption("--shape") for name in option.split(",")] or SHAPES[DEVICE]
    for name in asked:
        if name not in PRESETS:
            raise pytest.UsageError(f"--shape {name}: the shapes are {', '.join(PRESETS)}")
        if DEVICE == "cpu" and name != "tiny":
            raise pytest.UsageError(f"--shape {name} needs a GPU: on a CPU only tiny is run, to try the machinery")
    return list(dict.fromkeys(asked))


def pytest_generate_tests(metafunc):
    if "problem" in metafunc.fixturenames:
        names = shapes(metafunc.config)
        if "floor_measurements" in metafunc.fixturenames:
            names = [f"{name}, T = {T}" for name in names for T in TOKENS[DEVICE]]
        metafunc.parametrize("problem", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def problem(request) -> Problem:
    return problem_of(request.param, request.config)


def problem_of(name: str, config) -> Problem:
    """The layer of that name, which may give another number of tokens than the preset has."""
    shape, _, T = name.partition(", T = ")
    layer = PRESETS[shape].at(device=DEVICE, save=config.getoption("--save"))
    return layer.at(T=int(T)) if T else layer


@pytest.fixture(scope="session")
def layer_measurements(request, problem) -> dict[str, Measurement]:
    names = {params["contestant"] for params in selected(request, problem, "test_layer")}
    return measure_layer(problem, [contestant for name, contestant in CONTESTANTS.items() if name in names])


@pytest.fixture(scope="session")
def gemm_measurements(request, problem) -> dict[tuple[str, str], Measurement]:
    wanted = selected(request, problem, "test_gemm")
    return measure_gemms(problem, [(params["gemm"], params["implementation"]) for params in wanted])


@pytest.fixture(scope="session")
def floor_measurements(request, problem) -> dict[tuple[str, str], Measurement]:
    names = {params["contestant"] for params in selected(request, problem, "test_floor")}
    return measure_floor(problem, [contestant for name, contestant in OF_FEW_TOKENS.items() if name in names])


def selected(request, problem: Problem, test: str) -> list[dict]:
    """The parameters of those tests of this name and shape that are going to run."""
    calls = [item.callspec.params for item in request.session.items if getattr(item, "originalname", None) == test]
    return [params for params in calls if problem_of(params["problem"], request.config) == problem]


@pytest.fixture(scope="session")
def machine() -> dict:
    """Where and when this runs, with the peers' versions; the same for every row."""
    return ladder.machine(DEVICE) | {package: installed(package) for package in render_results.PEERS}


def installed(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@pytest.fixture
def report(request, benchmark, problem, machine) -> Callable:
    """A function that hands the times of one direction to pytest-benchmark with all that belongs to them, or says why
    there are none. `facts` go into the row as they are."""

    def hand_over(direction: str, measurement: Measurement, ceiling: Measurement | None, **facts) -> None:
        if measurement.why_not:
            pytest.skip(measurement.why_not)
        if measurement.failure:
            pytest.fail(measurement.failure, pytrace=False)
        shape = request.node.callspec.params["problem"]
        benchmark.group = f"{shape}: {facts.get('gemm', direction)}"
        benchmark.extra_info |= {
            "shape": shape,
            "problem": ladder.facts(ladder.Layer(problem, None, None, ROUTING)),
            "direction": direction,
            **rates(direction, measurement, ceiling, problem.device),
            "peak_bytes": measurement.peak_bytes.get(direction),
            "heap_bytes": measurement.heap_bytes,
            "errors": finite(measurement.errors),
            "losses": finite(measurement.losses),
            "shares_of_budget": finite(measurement.shares),
            "joules": measurement.joules.get(direction),
            "machine": machine,
            "method": METHOD[problem.device],
            **facts,
        }
        replay(benchmark, measurement.seconds[direction])
        if benchmark.stats:  # there are none under --benchmark-disable
            row = {"extra_info": benchmark.extra_info, "stats": benchmark.stats.stats.as_dict()}
            request.config.stash[ROWS].append(row)

    return hand_over


def rates(direction: str, measurement: Measurement, ceiling: Measurement | None, device: str) -> dict:
    """The median time as rates and beside the dense products of the same flops; a CPU's say nothing about hardware."""
    if device == "cpu":
        return {"tflops": None, "gb_per_s": None, "share_of_dense": None}
    median = statistics.median(measurement.seconds[direction])
    moved = measurement.bytes.get(direction)
    dense = ceiling.seconds.get(direction) if ceiling else None
    return {
        "tflops": measurement.flops[direction] / median / 1e12,
        "gb_per_s": moved / median / 1e9 if moved else None,
        "share_of_dense": statistics.median(dense) / median if dense else None,
    }


def finite(values: dict[str, float]) -> dict[str, float | None]:
    """NaN and Inf, which JSON does not have, as None."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """The tables of the results page, last."""
    of_floor = [row for row in config.stash[ROWS] if "launched" in row["extra_info"]]
    others = [row for row in config.stash[ROWS] if "launched" not in row["extra_info"]]
    for rows, render in ((of_floor, render_floor), (others, render_results)):
        if rows:
            terminalreporter.ensure_newline()
            terminalreporter.write_line(render.tables(render.record({"benchmarks": rows})))
