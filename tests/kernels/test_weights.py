"""Which weights are read where they lie, and that a copy holds the same values."""

import pytest
import torch
from cases import DEVICE, framed, transposed

from mega_moe.kernels.weights import ALIGNMENT, aligned, copied_bytes, readable
from mega_moe.shapes import Inputs

E, I, H = 3, 24, 40  # rows of 80 or 48 bytes in bf16: multiples of 16


def gate_up(dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(E, 2, I, H, device=DEVICE).to(dtype)


def down(dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(E, H, I, device=DEVICE).to(dtype)


def interleaved() -> torch.Tensor:
    """Gate and up rows in turn, as some models store them."""
    return gate_up().transpose(1, 2).contiguous().transpose(1, 2)


IN_PLACE = {
    "a checkpoint's gate_up_proj": lambda: torch.randn(E, 2 * I, H, device=DEVICE).unflatten(1, (2, I)),
    "a stack": gate_up,
    "down": down,
    "down in fp32": lambda: down(torch.float32),
    "one expert of a larger stack": lambda: gate_up()[1:2],
    "every other expert": lambda: gate_up()[::2],
    "rows padded to 16 bytes": lambda: framed(down(), gap=8, offset=8),
    "gate and up with padded rows": lambda: framed(gate_up(), gap=8, offset=8),
}
COPIED = {  # those of stride zero, too: a bulk copy engine steps through memory, and refuses to stand still
    "transposed": lambda: transposed(down()),
    "gate and up transposed": lambda: transposed(gate_up()),
    "unaligned address": lambda: framed(down(), gap=8, offset=1),
    "unaligned rows": lambda: framed(down(), gap=3, offset=8),
    "rows of 50 bytes": lambda: torch.randn(E, H, 25, device=DEVICE).bfloat16(),
    "gate and up interleaved": interleaved,
    "a stack of gates and a stack of ups": lambda: torch.stack([gate_up()[:, 0], gate_up()[:, 1]]).transpose(0, 1),
    "one expert for all (stride zero)": lambda: down()[:1].expand(5, -1, -1),
    "one row for all (stride zero)": lambda: down()[:, :1].expand(-1, H, -1),
    "one number (stride zero)": lambda: down()[:1, :1, :1].expand(E, H, I),
    "one column for all (stride zero)": lambda: down()[..., :1].expand(-1, -1, I),
    "gate shared with up (stride zero)": lambda: gate_up()[:, :1].expand(-1, 2, -1, -1),
}


def as_matrices(w: torch.Tensor) -> torch.Tensor:
    """(E, rows, columns), the values alone."""
    return w.flatten(1, 2) if w.dim() == 4 else w


def inputs_with(w: torch.Tensor) -> Inputs:
    """A layer in which w is one weight and the other lies ordinarily."""
    nothing = torch.empty(0, device=DEVICE)
    other = dict(w_gate_up=gate_up(), w_down=down())
    return Inputs(nothing, nothing, nothing, **other | {"w_gate_up" if w.dim() == 4 else "w_down": w})


def assert_layout(matrices: torch.Tensor) -> None:
    """What every kernel may rely on."""
    assert matrices.dim() == 3 and matrices.stride(2) == 1
    assert matrices.data_ptr() % ALIGNMENT == 0
    assert all(stride > 0 and stride * matrices.element_size() % ALIGNMENT == 0 for stride in matrices.stride()[:2])


@pytest.mark.parametrize("make", IN_PLACE.values(), ids=list(IN_PLACE))
def test_read_in_place(make):
    w = make()
    matrices = readable(w)
    assert matrices.data_ptr() == w.data_ptr()
    assert torch.equal(matrices, as_matrices(w))
    assert_layout(matrices)
    assert copied_bytes(inputs_with(w)) == 0


@pytest.mark.parametrize("make", COPIED.values(), ids=list(COPIED))
def test_copied(make):
    w = make()
    matrices = readable(w)
    assert matrices.untyped_storage().data_ptr() != w.untyped_storage().data_ptr()
    assert torch.equal(matrices, as_matrices(w))
    assert_layout(matrices)
    assert copied_bytes(inputs_with(w)) == w.numel() * w.element_size()


def test_a_copy_leaves_the_weight_alone():
    w = transposed(down())
    before = w.clone()
    readable(w)
    assert torch.equal(w, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [1, 3, 4, 7, 8, 9, 64])
def test_aligned(columns, dtype):
    """Rows of this many columns, each beginning on 16 bytes, with no more padding than that takes."""
    like = torch.empty(1, dtype=dtype, device=DEVICE)
    for shape in ((5, columns), (2, 3, columns)):
        t = aligned(shape, like)
        assert t.shape == shape and t.dtype == dtype and t.device == like.device
        assert t.data_ptr() % ALIGNMENT == 0 and t.stride(-1) == 1
        row = t.stride(-2) * t.element_size()
        assert row % ALIGNMENT == 0 and row < columns * t.element_size() + ALIGNMENT
