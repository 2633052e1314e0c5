"""Counting launches: the kernels, memsets and copies that a device is given between entry and return of a function.

They are counted, not declared. On a GPU the profiler sees them. On a CPU there is no device to ask, so the calls that
would launch are counted instead: Triton's interpreted launches, and every call of torch's operators that would do work
(views, allocations and empty results would not). An operator counts once there, though on a GPU a sort, say, is several
kernels: a CPU's count is a lower bound for rungs that lean on torch, and exact for kernels of our own.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FREE = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
    torch.ops.aten.set_,
    torch.ops.aten.resize_,
    torch.ops.aten.lift_fresh,
    torch.ops.aten._unsafe_view,
    torch.ops.aten.scalar_tensor,  # a Python number, which travels as a kernel's argument
}
"""Operators that give the device nothing to do, though they return a tensor that is no view. (Deterministic mode fills
what `empty` returns; that is not counted either.)"""


def launches(function: Callable[[], object], device: str) -> list[str]:
    """Call `function` and return the names of what it launched on `device` ("cpu", "cuda"), in order.

    Call it once before, so that compilation, caches and lazily loaded modules are not counted. Call a rung's `forward`
    and `backward` themselves: inside `moe`'s custom operator torch hides the calls that a CPU's count is made of.
    """
    return _on_gpu(function) if device == "cuda" else _on_cpu(function)


def _on_gpu(function: Callable[[], object]) -> list[str]:
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        function()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return [event["name"] for event in sorted(work, key=lambda event: event["ts"])]


def _on_cpu(function: Callable[[], object]) -> list[str]:
    with _watched_interpreter() as names, _Operators(names):
        function()
    return names.launched


class _Names:
    """What was launched so far; while a kernel is interpreted, the operators called are the interpreter's own."""

    def __init__(self):
        self.launched: list[str] = []
        self.interpreting = False

    def enter(self, kernel: str) -> None:
        self.launched.append(kernel)
        self.interpreting = True

    def leave(self) -> None:
        self.interpreting = False


@contextmanager
def _watched_interpreter() -> Iterator[_Names]:
    names = _Names()
    if find_spec("triton"):
        from .kernels.launch_count import interpreted_launches

        watch = interpreted_launches(names.enter, names.leave)
    else:
        watch = nullcontext()
    with watch:
        yield names


class _Operators(TorchDispatchMode):
    """Notes every operator that would launch."""

    def __init__(self, names: _Names):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not self.names.interpreting and _works(func, result):
            self.names.launched.append(str(func.overloadpacket))
        return result


def _works(func, result: object) -> bool:
    """Whether a call of `func` that returned `result` would give a device something to do."""
    if func.overloadpacket is torch.ops.aten._local_scalar_dense:
        return True  # a value read by the host: a copy
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return not func.is_view and func.overloadpacket not in FREE and any(output.numel() for output in outputs)
