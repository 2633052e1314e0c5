"""What the kernels' tests share: memory that shows where a kernel wrote, and an eye on every address it touches."""

import numpy
import pytest
import torch
from cases import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

FRAME = 4096  # elements before and after each allocation: more than any tile reaches past its end in these tests
CANARY = -12345
ALLOCATIONS = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_zeros,
}


class FramedMemory(TorchDispatchMode):
    """While it is on, what a launcher allocates lies inside a frame of canaries, and holds NaN (or the largest integer)
    until somebody writes it."""

    def __init__(self):
        super().__init__()
        self.frames: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        allocated = func(*args, **(kwargs or {}))
        if func.overloadpacket not in ALLOCATIONS or not allocated.numel():
            return allocated
        assert allocated.is_contiguous()
        memory = torch.full((FRAME + allocated.numel() + FRAME,), CANARY).to(allocated)
        inside = memory[FRAME:-FRAME].view(allocated.shape)
        if func.overloadpacket is torch.ops.aten.new_zeros:
            inside.zero_()
        else:
            inside.fill_(torch.nan if inside.is_floating_point() else torch.iinfo(inside.dtype).max)
        self.frames += [memory[:FRAME], memory[-FRAME:]]
        return inside

    def assert_intact(self) -> None:
        """Nothing was written outside any allocation."""
        assert self.frames, "nothing was allocated: there is nothing to guard"
        for frame in self.frames:
            assert (frame == torch.tensor(CANARY).to(frame)).all()


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
