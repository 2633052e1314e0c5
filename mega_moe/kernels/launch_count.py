"""Watching Triton's interpreter launch kernels: what a profiler is for on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from triton.runtime.interpreter import GridExecutor


@contextmanager
def interpreted_launches(entered: Callable[[str], None], left: Callable[[], None]) -> Iterator[None]:
    """While this context lasts, call entered(kernel name) before and left() after every interpreted kernel launch.

    Triton has no hook for this, so the interpreter's own entry point is wrapped, and restored at the end. Not for
    several threads at once.
    """
    call = GridExecutor.__call__

    def observed_call(self, *args, **kwargs):
        entered(self.fn.__name__)
        try:
            return call(self, *args, **kwargs)
        finally:
            left()

    GridExecutor.__call__ = observed_call
    try:
        yield
    finally:
        GridExecutor.__call__ = call
