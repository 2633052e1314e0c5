"""Reading weights where they lie.

A weight is read in place when its columns are contiguous and its outer strides and address are multiples of 16 bytes:
that is what a GPU's bulk copy engine asks for, and the layout of every ordinary checkpoint. Any other weight is copied
once a call, into rows padded to 16 bytes.
"""

import torch
from torch import Tensor

from ..shapes import Inputs

ALIGNMENT = 16  # bytes


def readable(w: Tensor) -> Tensor:
    """The weight as (E, rows, columns) in the layout above: a view of w if w has it, else a copy.

    w: (E, 2, I, H) -> (E, 2I, H), or (E, H, I) as it is.
    """
    if lies_readable(w):
        return as_matrices(w)
    copied = aligned(w.shape, like=w)
    copied.copy_(w)
    return as_matrices(copied)


def aligned(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of this shape and like's dtype, whose rows are padded to 16 bytes."""
    *outer, columns = shape
    per_row = ALIGNMENT // like.element_size()
    return like.new_empty(*outer, (columns + per_row - 1) // per_row * per_row)[..., :columns]


def copied_bytes(inputs: Inputs) -> int:
    """Bytes of weights that one call has to copy before it can read them."""
    return sum(w.numel() * w.element_size() for w in (inputs.w_gate_up, inputs.w_down) if not lies_readable(w))


def lies_readable(w: Tensor) -> bool:
    """Whether w can be read in place."""
    if w.dim() == 4 and w.stride(1) != w.shape[2] * w.stride(2):
        return False  # gate and up do not follow each other
    outer = (w.stride(0), w.stride(-2))
    return (
        w.stride(-1) == 1
        and all(stride > 0 and stride * w.element_size() % ALIGNMENT == 0 for stride in outer)
        and w.data_ptr() % ALIGNMENT == 0
    )


def as_matrices(w: Tensor) -> Tensor:
    """(E, 2, I, H) or (E, rows, columns) -> (E, rows, columns), without a copy."""
    if w.dim() == 3:
        return w
    E, two, I, H = w.shape
    return torch.as_strided(w, (E, two * I, H), (w.stride(0), w.stride(2), w.stride(3)), w.storage_offset())
