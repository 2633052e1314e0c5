"""Memory that shows where a kernel wrote and where it did not."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

FRAME = 4096  # elements before and after each allocation: more than any tile reaches past its end in these tests
CANARY = -12345
ALLOCATIONS = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_zeros,
    torch.ops.aten.zeros,
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
        if func.overloadpacket in (torch.ops.aten.new_zeros, torch.ops.aten.zeros):
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
