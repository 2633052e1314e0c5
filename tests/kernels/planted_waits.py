"""Plant faults in how kernels wait and signal, and say what cross_compile.py finds wrong with each.

    python -m tests.kernels.planted_waits

Statements of signal.py are left out or changed, or calls in a kernel moved. Prints JSON: the faults found, by what was
planted. Run it in a process of its own without TRITON_INTERPRET.
"""

import ast
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch
import triton
from triton.runtime.jit import JITFunction

from mega_moe.kernels import exchange, mega, signal
from tests.kernels.cross_compile import LAYERS, Form, compile_form, forms
from tests.ranks.planted import copied, load, planted, wait_last

TARGET, LAYER = "sm_90", "qwen3-30b-a3b"


def changed(function: str, old: str, new: str, folder: Path) -> JITFunction:
    """A function of signal.py with another text in the place of one that stands there once."""
    tree = ast.parse(inspect.getsource(signal))
    (n,) = (n for n, node in enumerate(tree.body) if isinstance(node, ast.FunctionDef) and node.name == function)
    source = ast.unparse(tree.body[n])
    assert source.count(old) == 1, f"no single {old} in {function}: has it changed?"
    tree.body[n : n + 1] = ast.parse(source.replace(old, new)).body
    return getattr(load(ast.unparse(tree), like=signal, folder=folder), function)


def form_of(module: ModuleType, form: Form) -> Form:
    """The form of the kernel of that name in another module."""
    return replace(form, kernel=getattr(module, form.kernel.__name__))


def planted_in(forward: Form, push: Form, folder: Path) -> Iterator[tuple[str, Form]]:
    """Each fault, and the form that has it."""
    barrier, fence = "tl.debug_barrier()", "fence_for_copy_engine()"
    for fault, form, module, function, old, new in (
        ("a wait without its barrier", forward, mega, "wait", barrier, "pass"),
        ("a wait without its fence", forward, mega, "wait", fence, "pass"),
        ("a signal without its barrier", forward, mega, "signal", barrier, "pass"),
        ("a signal without its fence", forward, mega, "signal", fence, "pass"),
        ("ranks told by a GPU's own signal", push, exchange, "arrive", "scope='sys'", "scope='gpu'"),
    ):
        faulty = copied(module, folder)
        setattr(faulty, function, changed(function, old, new, folder))
        yield fault, form_of(faulty, form)
    late = planted(mega, forward.kernel.__name__, "kind == DOWN", wait_last, folder)
    yield "a wait behind its tile", form_of(late, forward)


def main() -> int:
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: interpreted kernels cannot be compiled", file=sys.stderr)
        return 2
    launched = forms(TARGET, LAYERS[LAYER].at(dtype=torch.bfloat16, device="meta"))
    forward, push = (
        next(form for form in launched if form.kernel is kernel)
        for kernel in (mega.mega_forward_kernel, exchange.push_kernel)
    )
    with tempfile.TemporaryDirectory() as folder:
        planted_forms = planted_in(forward, push, Path(folder))
        print(json.dumps({fault: compile_form(TARGET, form).faults for fault, form in planted_forms}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
