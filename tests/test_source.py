"""Rules that the sources of kernels and recipes keep, where a machine without a GPU could not see them broken."""

import ast
from pathlib import Path

import pytest

import mega_moe
from mega_moe.registry import LADDER

PACKAGE = Path(mega_moe.__file__).parent
KERNELS = sorted((PACKAGE / "kernels").glob("*.py"))
RECIPES = [PACKAGE / "stages" / f"{rung.module}.py" for rung in LADDER if rung.needs_triton]

ON_THE_HOST = {"item", "tolist", "cpu", "numpy", "nonzero", "bincount", "unique", "synchronize", "masked_select"}
"""Methods and functions that read values on the host or whose result's size depends on them: either waits."""

CHANGING = {"T", "R", "E", "chunks", "max_tokens", "first", "max_rows", "layer"}
"""What varies from call to call or from layer to layer: no kernel is compiled anew for it."""


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """The calls in a tree, with the last name of what is called."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [(getattr(call.func, "attr", getattr(call.func, "id", "")), call) for call in found]


def functions(path: Path) -> list[ast.FunctionDef]:
    """The jitted functions of a file."""
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return [function for function in found if any("triton.jit" in ast.unparse(d) for d in function.decorator_list)]


every_kernel = pytest.mark.parametrize(
    "function",
    [pytest.param(f, id=f"{path.stem}.{f.name}") for path in KERNELS for f in functions(path)],
)
every_file = pytest.mark.parametrize("path", KERNELS + RECIPES, ids=lambda path: path.stem)


def test_there_are_kernels_to_look_at():
    assert sum(len(functions(path)) for path in KERNELS) > 5 and RECIPES


@every_kernel
def test_every_masked_load_names_its_fill(function):
    """The interpreter fills with zeros, a GPU with whatever was there."""
    for name, call in calls(function):
        given = {keyword.arg for keyword in call.keywords}
        if name == "load" and ("mask" in given or len(call.args) > 1):
            assert "other" in given, ast.unparse(call)


@every_file
def test_no_kernel_adds_atomically(path):
    """The order of such a sum is the hardware's. Tickets and signals are counted in signal.py, in integers."""
    atomics = [ast.unparse(call) for name, call in calls(ast.parse(path.read_text())) if name.startswith("atomic")]
    assert path.stem == "signal" or not atomics


@every_kernel
def test_no_kernel_is_compiled_for_a_number_of_tokens(function):
    """What changes with T, and E, are neither constants nor specialised on (an integer of 1 or a multiple of 16
    compiles anew). to_x is where x stands in a heap, behind as many bytes as there may be tokens."""
    if not function.name.endswith("_kernel"):
        return
    arguments = {argument.arg: argument.annotation for argument in function.args.args}
    changing = CHANGING & set(arguments) | {name for name in arguments if name.startswith("to_")}
    assert not [name for name in changing if arguments[name]], f"{function.name} is compiled for {changing}"
    (decorator,) = function.decorator_list
    exempt = [keyword.value for keyword in getattr(decorator, "keywords", []) if keyword.arg == "do_not_specialize"]
    assert changing == (set(ast.literal_eval(exempt[0])) if exempt else set())


@every_file
def test_nothing_is_read_on_the_host(path):
    """It would wait for the device and break CUDA graphs."""
    tree = ast.parse(path.read_text())
    assert not [ast.unparse(call) for name, call in calls(tree) if name in ON_THE_HOST]


@every_file
def test_nothing_is_tuned_at_run_time(path):
    """A search would repeat kernels in place, and its choice would change the last bits from run to run."""
    assert "autotune" not in path.read_text() and "heuristics" not in path.read_text()
