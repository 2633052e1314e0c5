"""Several programs of one launch, each a process: concurrency in the interpreter.

In one process the interpreter runs the programs of a launch one after another, so a wait that is missing changes
nothing there. Here P processes make the *same* launch, each as one of its programs, over memory that they share, and
draw tickets from the same word. Every atomic may be followed by a pause: between a ticket and its tile, between a look
and the next, and, where a signal comes too early, between the signal and the stores. Memory that the launch is to write
holds NaN before. So who reads what nobody has written yet computes NaN, or what was there before.

What this cannot show is what a CPU does not do: here all stores of a process are seen in their order, and a copy engine
there is none. See test_waits.py beside the kernels' tests for that.
"""

import multiprocessing
import random
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy
import torch
import triton.language as tl
from cases import same_bits
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.tools.tensor_descriptor import TensorDescriptor

from mega_moe.kernels import scaled, signal

MOST_POLLS = 1000
"""How often a wait looks before it gives up: for more than ten seconds, where a launch takes less than one."""

RUNS = 60
"""The most runs that a planted fault has to show itself. The shyest goes wrong in one of three."""

PROCESSES = multiprocessing.get_context("fork")  # a fork shares the launch as it is, and starts in milliseconds


@dataclass(frozen=True)
class Pace:
    """When programs pause.

    Attributes:
        programs: how many there are.
        pausing: how many of them pause at all.
        chance: that one of these pauses behind an atomic.
        pause: for how many seconds: several tiles.
        look: seconds between a look and the next, of all.
    """

    programs: int = 3
    pausing: int = 3
    chance: float = 0.4
    pause: float = 0.06
    look: float = 0.01


UNEVEN = Pace()
LAGGARD = Pace(programs=8, pausing=1, chance=0.6, pause=0.3, look=0.003)
"""One is left behind, and all others go ahead as far as they can: between what the one does too late and what it spoils
may lie several steps, each of which somebody would pause at otherwise."""


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

    def make(self, pace: Pace, seed: int, most_polls: int = MOST_POLLS) -> list[str]:
        """Restore what the memory held, and make the launch. Returns what went wrong in its programs: [] for nothing.

        The seed decides about the pauses. Which program gets which ticket still differs from run to run.
        """
        for memory, content in self.before:
            memory.copy_(content)
        ready, errors = PROCESSES.Barrier(pace.programs), PROCESSES.SimpleQueue()
        rest = (pace, seed, most_polls, ready, errors)
        processes = [PROCESSES.Process(target=self.program, args=(number, *rest)) for number in range(pace.programs)]
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

    def program(self, number: int, pace: Pace, seed: int, most_polls: int, ready, errors) -> None:
        """What one process does, which is nobody else's: its interpreter may be changed."""
        random.seed(f"{seed} {number}")
        chance = pace.chance if number < pace.pausing else 0
        atomic_rmw = InterpreterBuilder.create_atomic_rmw

        def slow_atomic_rmw(self, operation, pointer, value, *rest):
            result = atomic_rmw(self, operation, pointer, value, *rest)
            if not value.data.any():
                time.sleep(pace.look)
            elif random.random() < chance:
                time.sleep(pace.pause)
            return result

        InterpreterBuilder.create_atomic_rmw = slow_atomic_rmw
        its_number, how_many = (
            TensorHandle(numpy.array([n], dtype=numpy.int32), tl.int32) for n in (number, pace.programs)
        )
        InterpreterBuilder.create_get_program_id = lambda self, axis: its_number
        InterpreterBuilder.create_get_num_programs = lambda self, axis: how_many
        signal.MOST_POLLS = tl.constexpr(most_polls)
        ready.wait(timeout=60)
        try:
            self.kernel[(1,)](*self.args, **self.kwargs)
        except Exception as error:
            errors.put(f"program {number}: {error}")


@dataclass(frozen=True)
class Subject:
    """A launch, what it writes, and what it has to write: what programs one after another do."""

    launch: Launch
    outputs: list[Tensor]
    expected: list[Tensor]
    pace: Pace = UNEVEN

    def wrong(self, seed: int, **options) -> list[str]:
        """Make the launch; what was wrong."""
        errors = self.launch.make(self.pace, seed, **options)
        same = all(same_bits(got, right) for got, right in zip(self.outputs, self.expected, strict=True))
        return errors if same else [*errors, "not what programs one after another compute"]

    def of_module(self, module: ModuleType) -> "Subject":
        """The same with the kernel that another module has."""
        return replace(self, launch=replace(self.launch, kernel=getattr(module, self.launch.kernel.__name__)))


def recorded(kernel: InterpretedFunction, launcher: Callable[[], Any]) -> tuple[Launch, Any]:
    """The launch that a launcher makes of this kernel, which is recorded instead of made, and what the launcher
    returns. All memory that the launch touches is shared with processes from here on; of what each program has for
    itself there is enough for the most that any pace starts."""
    launches = []
    kernel.run = lambda *args, grid, warmup, **kwargs: launches.append((args, kwargs))
    try:
        with patch.object(scaled, "programs", lambda tile: LAGGARD.programs):
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
