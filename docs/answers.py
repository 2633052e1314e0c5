"""Wrong answers made from right ones, so that the check of every exercise is seen to say no.

An exercise of a lesson ends in a cell that is tagged `solution`. It begins with `answer = ...` and goes on with what
computes and asserts that this is right. A check that no answer fails is no check: `wrong` makes the same cell with
answers that are each off in one place.
"""

import ast
from copy import deepcopy

SWAPPED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
}
"""What stands where an operator stood."""


def wrong(solution: str) -> list[str]:
    """The source of a solution, once for each number, word or operator of its answer, which is another one there.

    A whole number is one larger, any other a tenth. Raises ValueError if the cell does not begin with `answer = ...`,
    or if there is nothing in the answer to change.
    """
    first = ast.parse(solution).body[0]
    if not isinstance(first, ast.Assign) or ast.unparse(first.targets[0]) != "answer":
        raise ValueError(f"a solution begins with `answer = ...`, not with {ast.unparse(first)!r}")
    check = "\n".join(solution.splitlines()[first.end_lineno :])
    changed = []
    for place in range(len(list(ast.walk(first.value)))):
        other = deepcopy(first)
        if _change(list(ast.walk(other.value))[place]):
            changed.append(f"{ast.unparse(other)}\n{check}")
    if not changed:
        raise ValueError(f"there is nothing to change in {ast.unparse(first)!r}")
    return changed


def _change(node: ast.AST) -> bool:
    """Make this one node another; False if it is of no kind that can be."""
    if isinstance(node, ast.Constant) and node.value is not None:
        value = node.value
        kinds = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value * 1.1 or 0.1}
        node.value = kinds.get(type(value), lambda: f"not {value}")()
        return True
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
        node.op = SWAPPED[type(node.op)]()
        return True
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        node.ops[0] = SWAPPED[type(node.ops[0])]()
        return True
    return False
