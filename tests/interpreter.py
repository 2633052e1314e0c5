"""Triton's interpreter, without work that it does again and again, and without waits that keep a core busy.

While a kernel is interpreted, functions of triton.language are replaced by interpreted ones. The interpreter does so
once for the kernel, and then again for every call of a function that the kernel calls, though they are replaced
already: a third of the time that a small launch takes. Here a call replaces them only where they are not. That changes
no result.
"""

import time
from functools import cache

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder

PAUSE = 0.002  # seconds, between two looks at the same counters

replace = interpreter._patch_lang


@cache
def languages(function) -> list:
    """The modules whose functions it calls, of those that are replaced."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]


def replace_once(function):
    """Replace what this function calls of triton.language, if any of it is not replaced yet."""
    if any(tl.core.is_builtin(language.load) for language in languages(function)):
        return replace(function)
    return interpreter._LangPatchScope()  # with nothing to be put back


def install() -> None:
    """From now on, in this process."""
    interpreter._patch_lang = replace_once


def wait_politely() -> None:
    """From now on, in this process: who looks at the same counters again, which another process is to change, leaves it
    the core meanwhile."""
    atomic_rmw, last = InterpreterBuilder.create_atomic_rmw, []

    def patient_atomic_rmw(self, operation, pointer, value, *rest):
        if not value.data.any():  # a look
            if last == [pointer.data.tobytes()]:
                time.sleep(PAUSE)
            last[:] = [pointer.data.tobytes()]
        return atomic_rmw(self, operation, pointer, value, *rest)

    InterpreterBuilder.create_atomic_rmw = patient_atomic_rmw
