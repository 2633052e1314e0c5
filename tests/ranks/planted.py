"""Kernels with a fault in how their programs wait for each other, planted in the kernel's own source.

A kernel's programs draw tickets, and what a ticket says to do is a branch: `if kind == DOWN`. A fault changes one
branch. It is found by its condition, and what is changed are calls of `wait` and `signal`, so that a fault survives
most edits of the kernel, and fails loudly where it does not.
"""

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

Fault = Callable[[list[ast.stmt]], None]
"""Changes the statements of a branch, in place."""


def planted(module: ModuleType, kernel: str, branch: str, fault: Fault, folder: Path) -> ModuleType:
    """A copy of the module, kept in the folder, in which a branch of this kernel has the fault.

    branch: its condition, as it is written; "else" for the last of the longest chain of branches.
    """
    tree = ast.parse(inspect.getsource(module))
    (function,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == kernel)
    fault(unwrapped(branch_of(function, branch)))
    return load(ast.unparse(ast.fix_missing_locations(tree)), like=module, folder=folder)


def copied(module: ModuleType, folder: Path) -> ModuleType:
    """A copy of the module, whose names can be changed without harm."""
    return load(inspect.getsource(module), like=module, folder=folder)


def load(source: str, like: ModuleType, folder: Path) -> ModuleType:
    """A module of this source beside another, from a file in the folder: Triton reads kernels from files."""
    path = folder / f"{like.__name__.rpartition('.')[2]}_{len(list(folder.iterdir()))}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"{like.__package__}.{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def branch_of(function: ast.FunctionDef, condition: str) -> list[ast.stmt]:
    """The statements of a branch."""
    chains = [chain_of(node) for node in ast.walk(function) if isinstance(node, ast.If)]
    return max(chains, key=len)[condition]


def chain_of(node: ast.If) -> dict[str, list[ast.stmt]]:
    """The branches of if, elif, ... else, by their conditions."""
    branches = {ast.unparse(node.test): node.body}
    match node.orelse:
        case [ast.If() as following]:
            return branches | chain_of(following)
        case rest:
            return branches | {"else": rest}


def unwrapped(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Without the condition that all of them share: `if dx_ptr is not None`."""
    match statements:
        case [ast.If(body=body, orelse=[])]:
            return unwrapped(body)
    return statements


def calls(statements: list[ast.stmt], name: str) -> Iterator[ast.Call]:
    """The calls of a function in these statements; at least one."""
    found = [
        node
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]
    assert found, f"no {name} here: has the kernel changed?"
    yield from found


def without(name: str) -> Fault:
    """wait, or signal, is not called."""

    def fault(statements):
        for call in calls(statements, name):
            call.func, call.args = ast.parse("tl.static_assert").body[0].value, [ast.Constant(True)]

    return fault


def with_argument(name: str, number: int, value: str) -> Fault:
    """An argument of wait, or of signal, is another expression, in which `it` is the right one."""

    def fault(statements):
        for call in calls(statements, name):
            call.args[number] = ast.parse(value.replace("it", f"({ast.unparse(call.args[number])})")).body[0].value

    return fault


def signal_first(statements: list[ast.stmt]) -> None:
    """Signals come before everything else."""
    statements.sort(key=lambda statement: not mentions(statement, "signal"))


def moved(name: str, before: str) -> Fault:
    """The statement that calls one function comes before the one that calls another."""

    def fault(statements):
        (late,) = [statement for statement in statements if mentions(statement, name)]
        statements.remove(late)
        (at,) = [n for n, statement in enumerate(statements) if mentions(statement, before)]
        statements.insert(at, late)

    return fault


def wait_last(statements: list[ast.stmt]) -> None:
    """Waits come behind everything else."""
    statements.sort(key=lambda statement: mentions(statement, "wait"))


def mentions(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(statement))
