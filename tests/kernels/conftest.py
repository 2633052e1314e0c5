"""What the kernels' tests share: memory that shows where a kernel wrote, and an eye on every address it touches."""

import numpy
import pytest
import torch
from cases import DEVICE
from memory import FramedMemory
from triton.tools.tensor_descriptor import TensorDescriptor

from mega_moe import symmetric


@pytest.fixture
def framed_memory(monkeypatch):
    """Every allocation of the test is framed, and every frame is intact at its end. On a GPU a thread allocates what is
    kept from call to call, and a mode is on in its own thread only."""
    with FramedMemory() as memory:
        on_default_stream = symmetric.on_default_stream

        def framed(*make_on):
            with memory:
                return on_default_stream(*make_on)

        monkeypatch.setattr(symmetric, "on_default_stream", framed)
        yield memory
    memory.assert_intact()


@pytest.fixture(autouse=DEVICE == "cpu")
def watched_addresses(monkeypatch):
    """In the interpreter, every element that a kernel loads or stores belongs to one of the kernel's arguments. (What a
    kernel reads outside and then throws away changes no result; on a GPU it may still be a fault.)"""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    extents: list[tuple[int, int]] = []  # of each argument: its first address, and the one behind its last element
    call, load, store = (
        GridExecutor.__call__,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def extent(t: torch.Tensor) -> tuple[int, int]:
        past_the_last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
        return t.data_ptr(), t.data_ptr() + past_the_last * t.element_size() * bool(t.numel())

    def watched_call(self, *args, **kwargs):
        bases = [a.base if isinstance(a, TensorDescriptor) else a for a in (*args, *kwargs.values())]
        extents[:] = [extent(a) for a in bases if isinstance(a, torch.Tensor)]
        return call(self, *args, **kwargs)

    def assert_inside(pointers, mask) -> None:
        """All of them inside one argument: what a kernel reads or writes at once belongs to one tensor."""
        addresses = numpy.asarray(pointers.data)[numpy.asarray(mask.data, bool)]
        if addresses.size:
            lowest, highest = int(addresses.min()), int(addresses.max())
            inside = any(first <= lowest and highest < end for first, end in extents)
            assert inside, "a kernel reaches outside its arguments"

    def watched_load(self, pointers, mask, *args, **options):
        assert_inside(pointers, mask)
        return load(self, pointers, mask, *args, **options)

    def watched_store(self, pointers, value, mask, *args, **options):
        assert_inside(pointers, mask)
        return store(self, pointers, value, mask, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", watched_call)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
