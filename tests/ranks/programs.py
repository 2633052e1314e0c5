"""Several programs of one launch, each a process: concurrency in the interpreter.

In one process the interpreter runs the programs of a launch one after another, so a wait that is missing changes
nothing there. Here P processes make the *same* launch, each as one of its programs, over memory that they share, and
draw tickets from the same word. Every atomic is followed by a pause of random length: between a ticket and its tile,
between a look and the next, and, where a signal comes too early, between the signal and the stores. Memory that the
launch is to write holds NaN before. So who reads what nobody has written yet computes NaN, or what was there before.

What this cannot show is what a CPU does not do: here all stores of a process are seen in their order, and a copy engine
there is none. See test_waits.py beside the kernels' tests for that.
"""

import multiprocessing
import random
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

from mega_moe.kernels import signal

MOST_POLLS = 1000
"""How often a wait looks before it gives up: for more than ten seconds, where a launch takes less than one."""

PAUSE, LOOK = 0.06, 0.01
"""Seconds: of a pause, which is several tiles long, and between a look and the next."""

PROCESSES = multiprocessing.get_context("fork")  # a fork shares the launch as it is, and starts in milliseconds


@dataclass(frozen=True)
class Launch:
    """A launch that can be made again and again, by any number of programs at once.

    Attributes:
        kernel: what is launched.
        args, kwargs: with what.
        before: all memory that the arguments touch, as bytes, each with what it holds before the launch.
    """

    kernel: InterpretedFunction
    args: tuple
    kwargs: dict[str, object]
    before: tuple[tuple[Tensor, Tensor], ...]

    def make(self, programs: int, seed: int, most_polls: int = MOST_POLLS) -> list[str]:
        """Restore what the memory held, and make the launch. Returns what went wrong in its programs: [] for nothing.

        The seed decides about the pauses. Which program gets which ticket still differs from run to run.
        """
        for memory, content in self.before:
            memory.copy_(content)
        ready, errors = PROCESSES.Barrier(programs), PROCESSES.SimpleQueue()
        rest = (programs, seed, most_polls, ready, errors)
        processes = [PROCESSES.Process(target=self.program, args=(number, *rest)) for number in range(programs)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)  # xdist's threads are not used
            for process in processes:
                process.start()
        for process in processes:
            process.join()
        wrong = []
        while not errors.empty():
            wrong.append(errors.get())
        return wrong + [f"exit code {process.exitcode}" for process in processes if process.exitcode]

    def program(self, number: int, programs: int, seed: int, most_polls: int, ready, errors) -> None:
        """What one process does, which is nobody else's: its interpreter may be changed."""
        random.seed(f"{seed} {number}")
        atomic_rmw = InterpreterBuilder.create_atomic_rmw

        def slow_atomic_rmw(self, operation, pointer, value, *rest):
            result = atomic_rmw(self, operation, pointer, value, *rest)
            if not value.data.any():
                time.sleep(LOOK)
            elif random.random() < 0.4:
                time.sleep(PAUSE)
            return result

        InterpreterBuilder.create_atomic_rmw = slow_atomic_rmw
        number_of_programs = TensorHandle(numpy.array([programs], dtype=numpy.int32), tl.int32)
        InterpreterBuilder.create_get_num_programs = lambda self, axis: number_of_programs
        signal.MOST_POLLS = tl.constexpr(most_polls)
        ready.wait(timeout=60)
        try:
            self.kernel[(1,)](*self.args, **self.kwargs)
        except Exception as error:
            errors.put(f"program {number}: {error}")


def recorded(kernel: InterpretedFunction, launcher: Callable[[], Any]) -> tuple[Launch, Any]:
    """The launch that a launcher makes of this kernel, which is recorded instead of made, and what the launcher
    returns. All memory that the launch touches is shared with processes from here on."""
    launches = []
    kernel.run = lambda *args, grid, warmup, **kwargs: launches.append((args, kwargs))
    try:
        returned = launcher()
    finally:
        del kernel.run
    ((args, kwargs),) = launches
    return Launch(kernel, args, kwargs, tuple(shared([*args, *kwargs.values()]))), returned


def shared(arguments: Iterable[object]) -> Iterable[tuple[Tensor, Tensor]]:
    """Move the memory of all tensors among the arguments to where other processes see it: that memory, and a copy."""
    tensors = [argument.base if isinstance(argument, TensorDescriptor) else argument for argument in arguments]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if isinstance(t, Tensor) and t.numel()
    }
    for storage in storages.values():
        memory = torch.empty(0, dtype=torch.uint8).set_(storage.share_memory_())
        yield memory, memory.clone()
