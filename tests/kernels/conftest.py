"""What the kernels' tests share: memory that shows where a kernel wrote, and an eye on every address it touches."""

import numpy
import pytest
import torch
from cases import DEVICE
from memory import FramedMemory


@pytest.fixture
def framed_memory():
    """Every allocation of the test is framed, and every frame is intact at its end."""
    with FramedMemory() as memory:
        yield memory
    memory.assert_intact()


@pytest.fixture(autouse=DEVICE == "cpu")
def watched_addresses(monkeypatch):
    """In the interpreter, every element that a kernel loads or stores belongs to one of the kernel's arguments. (What a
    kernel reads outside and then throws away changes no result; on a GPU it may still be a fault.)"""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    arguments: list[torch.Tensor] = []
    call, load, store = (
        GridExecutor.__call__,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def watched_call(self, *args, **kwargs):
        arguments[:] = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        return call(self, *args, **kwargs)

    def assert_inside(pointers, mask) -> None:
        addresses = numpy.asarray(pointers.data)[numpy.asarray(mask.data)].astype(numpy.int64)
        inside = numpy.zeros(addresses.shape, bool)
        for t in arguments:
            past_the_last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1
            first, end = t.data_ptr(), t.data_ptr() + past_the_last * t.element_size()
            inside |= bool(t.numel()) & (first <= addresses) & (addresses < end)
        assert inside.all(), "a kernel reaches outside its arguments"

    def watched_load(self, pointers, mask, *rest):
        assert_inside(pointers, mask)
        return load(self, pointers, mask, *rest)

    def watched_store(self, pointers, value, mask, *rest):
        assert_inside(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(GridExecutor, "__call__", watched_call)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
