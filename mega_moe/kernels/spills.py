"""Registers that did not suffice: what a compiler says of a kernel once it is loaded on a GPU."""

from collections.abc import Callable

from triton.runtime.jit import JITFunction


def spills(call: Callable[[], object]) -> int:
    """Run `call`, and return the most registers a thread that one of the kernels it launched keeps in memory.

    0 in the interpreter, which has no registers. Triton gives what it compiled to whoever launches, and launchers drop
    it: so its entry point is wrapped, and restored at the end. Not for several threads at once.
    """
    run, launched = JITFunction.run, []

    def observed_run(self, *args, **kwargs):
        launched.append(run(self, *args, **kwargs))
        return launched[-1]

    JITFunction.run = observed_run
    try:
        call()
    finally:
        JITFunction.run = run
    return max((kernel.n_spills for kernel in launched), default=0)
