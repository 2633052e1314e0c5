"""Triton's interpreter, without work that it does again and again, and without waits that keep a core busy.

While a kernel is interpreted, functions of triton.language are replaced by interpreted ones. The interpreter does so
once for the kernel, and then again for every call of a function that the kernel calls, though they are replaced
already: a third of the time that a small launch takes. Here a call replaces them only where they are not.

Whether integers overflow it computes for every sum, which is a dozen operations for one, and then tells nobody, since
it does so only in debug mode: here it does not compute it. And it writes down the table of numpy's dtypes for every
load: here it looks where it has looked before.

CPython keeps the frames of calls in chunks of 16 KiB. Where a loop stands at the end of one, every call in it asks the
system for the next chunk and gives it back: a third of the time again, in launches whose caller happens to be so deep.
Here a launch begins with a frame so large that CPython makes a chunk for it in which all others have room.

None of this changes a result.
"""

import dataclasses
import time
from functools import cache

import numpy
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

FRAME = 8200
"""Words of the frame that a launch begins with. They fill a little more than half of a chunk, since those are of 2^n
bytes: 62 KiB are left."""

PAUSES = (0.002, 0.016)  # seconds, between two looks at the same counters: at first, and at most

replace = interpreter._patch_lang
launch = GridExecutor.__call__


@cache
def languages(function) -> list:
    """The modules whose functions it calls, of those that are replaced."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]


def replace_once(function):
    """Replace what this function calls of triton.language, if any of it is not replaced yet."""
    if any(tl.core.is_builtin(language.load) for language in languages(function)):
        return replace(function)
    return interpreter._LangPatchScope()  # with nothing to be put back


def launch_with_room(*args, **kwargs) -> None:
    """A launch, from a frame that is large."""
    launch(*args, **kwargs)


launch_with_room.__code__ = launch_with_room.__code__.replace(co_stacksize=FRAME)

numpy_dtype = cache(interpreter._get_np_dtype)


def known_numpy_dtype(kind: tl.dtype) -> numpy.dtype:
    """That of the elements of a type; addresses are numbers."""
    return numpy_dtype(tl.uint64 if kind.scalar.is_ptr() else kind.scalar)


def install() -> None:
    """From now on, in this process."""
    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = known_numpy_dtype
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    GridExecutor.__call__ = launch_with_room


def wait_politely() -> None:
    """From now on, in this process: who looks at the same counters again, which another process is to change, leaves it
    the core meanwhile."""
    atomic_rmw, last, pause = InterpreterBuilder.create_atomic_rmw, None, PAUSES[0]

    def patient_atomic_rmw(self, operation, pointer, value, *rest):
        nonlocal last, pause
        if not value.data.any():  # a look, which itself takes milliseconds
            looked_at = pointer.data.tobytes()
            if looked_at == last:
                time.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
            else:
                last, pause = looked_at, PAUSES[0]
        return atomic_rmw(self, operation, pointer, value, *rest)

    InterpreterBuilder.create_atomic_rmw = patient_atomic_rmw
