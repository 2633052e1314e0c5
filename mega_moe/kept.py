"""Keeping what is made of a weight for as long as the weight is the same: its 8-bit codes, between optimiser steps.

Whether a weight is the same cannot be seen in all cases: autograd counts the writes that go through torch, and not
those through `.data`, through a pointer (a fused optimiser's kernel), or of FSDP, which fills one parameter anew in
each step and leaves its counter as it was. So nothing is kept unless the caller opens a block and says so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


class Kept(NamedTuple):
    """What was made of a weight, and of which.

    Attributes:
        storage: the weight's, watched without being kept alive: as long as it is, no other storage has its identity.
        version: how often it had been written.
        made: the result.
    """

    storage: StorageWeakRef
    version: int
    made: object


KEPT: list[dict[tuple, Kept]] = []
"""One for each open block, the innermost last. Not of a thread: backward runs in others than forward."""


@contextmanager
def keep_codes() -> Iterator[None]:
    """In this block weights stay as they are between optimiser steps: 8-bit precisions quantise each one once.

    For gradient accumulation, and for inference:

        for batch in batches:
            with mega_moe.keep_codes():
                for part in batch:
                    loss(model(part)).backward()
            optimizer.step()

    A weight that is another tensor than before, or was written by torch since (an optimiser's step, load_state_dict),
    is quantised anew, so a block may also hold steps. What torch cannot count must not happen in one: writes through
    `.data`, by foreign kernels, or an FSDP whose optimiser steps. Inside a CUDA graph's capture, and of tensors made in
    inference mode, which have no count, nothing is kept. Codes take a byte a value of the weight, and another one for
    the transpose that backward reads, which is made in the same pass where the weight has a gradient; the end of the
    block frees them, and that of the weight.
    """
    KEPT.append({})
    try:
        yield
    finally:
        KEPT.pop()


def once(make: Callable[..., T], w: Tensor, *arguments: object) -> T:
    """make(w, *arguments); in an open block what an earlier call with these has made, if the weight is the same."""
    if not can_be_kept(w):
        return make(w, *arguments)
    if not is_kept(make, w, *arguments):
        for gone in [key for key, kept in KEPT[-1].items() if kept.storage.expired()]:
            del KEPT[-1][gone]
        storage = StorageWeakRef(w.untyped_storage())
        KEPT[-1][key_of(make, w, arguments)] = Kept(storage, w._version, make(w, *arguments))
    return KEPT[-1][key_of(make, w, arguments)].made


def is_kept(make: Callable, w: Tensor, *arguments: object) -> bool:
    """Whether `once` has the result."""
    kept = KEPT[-1].get(key_of(make, w, arguments)) if can_be_kept(w) else None
    return kept is not None and kept.version == w._version


def can_be_kept(w: Tensor) -> bool:
    """Whether a block is open, and it can be told whether w is written."""
    return bool(KEPT) and not (
        w.is_inference() or w.is_meta or (w.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def key_of(make: Callable, w: Tensor, arguments: tuple) -> tuple:
    """What is made, of which part of which storage, and on which stream: another one would not wait for it."""
    stream = torch.cuda.current_stream(w.device).cuda_stream if w.is_cuda else None
    lies = (w.untyped_storage()._cdata, w.data_ptr(), w.storage_offset(), w.shape, w.stride(), w.dtype)
    return make, arguments, *lies, stream
