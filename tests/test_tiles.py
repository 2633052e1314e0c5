"""Sizes at which tiles end: rows, columns, contractions just before, at and just after a block; and far addresses."""

from dataclasses import replace

import pytest
import torch
from cases import DEVICE, assert_parity, assert_same, framed, ids_with_counts, layer, on_gpu, run, train

BLOCK = 128 if DEVICE == "cuda" else 32  # rows of a tile where the tests run: see mega_moe/kernels/blocks.py


@pytest.mark.parametrize(
    "counts",
    [
        [1, 15, 16, 17, 0, BLOCK // 2 + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1],
        [BLOCK, BLOCK + 2, BLOCK // 2 + 1],
        [1, 0, 1],
        [BLOCK // 2, BLOCK // 2],
        [0, 0, 3 * BLOCK],
    ],
    ids=str,
)
def test_rows_of_an_expert_around_a_block(counts, rung, poison):
    """Rows past the first half of a tile must not come back zero, nor may a tile that starts with one expert's row take
    the next expert's as its own; an empty expert in the middle makes that likely."""
    ids = ids_with_counts(counts)
    problem, inputs, dy = layer(ids, H=16, I=16, E=len(counts))
    assert_parity(problem, inputs, dy, train(rung, inputs, dy))


SIZES = [(33, 80), (130, 17), (17, 130)] + [(1000, 1001), (511, 127), (1025, 520)] * (DEVICE == "cuda")


@pytest.mark.parametrize("H, I", SIZES)
def test_columns_and_contractions_that_are_no_multiple_of_a_block(H, I, rung, poison):
    """Tails of each of the three products, with NaN in all memory around the inputs."""
    problem, inputs, dy = layer(T=3, H=H, I=I, E=1, K=1)
    around = replace(inputs, **{name: framed(t, gap=0, offset=8) for name, t in vars(inputs).items()})
    assert_parity(problem, around, dy, train(rung, around, dy))


@pytest.mark.parametrize("T, H, I", [(1, 64, 16), (3, 64, 16)] + [(129, 511, 127), (1, 1025, 64)] * (DEVICE == "cuda"))
def test_addresses_that_bulk_copies_refuse(T, H, I, rung):
    """Bases and rows off the 16-byte grid, one row, an odd number of rows to contract: right all the same."""
    problem, inputs, dy = layer(T=T, H=H, I=I)
    shifted = replace(inputs, **{name: framed(t, gap=0, offset=1) for name, t in vars(inputs).items()})
    assert shifted.x.data_ptr() % 16 and shifted.w_down.data_ptr() % 16
    assert_parity(problem, shifted, dy, train(rung, shifted, framed(dy, gap=0, offset=1)))


def skip_without(gib: int) -> None:
    """On a GPU memory has to exist; on a CPU what nobody touches need not."""
    if DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of GPU memory")


@pytest.mark.parametrize("name", ["x", "topk_weights", "dy"])
def test_offsets_that_32_bits_cannot_hold(name, rung):
    """Three rows, the last one 2^31 elements behind the first: a row times a stride has to be computed in 64 bits."""
    skip_without(gib=8)
    problem, inputs, dy = layer([[0, 1], [1, 2], [2, 0]], I=16)
    if name == "topk_weights":
        inputs = replace(inputs, topk_weights=inputs.topk_weights.bfloat16())
    near = dy if name == "dy" else getattr(inputs, name)
    stride = 2**30 + 8
    memory = torch.empty(2 * stride + near.shape[1], dtype=near.dtype, device=DEVICE)
    far = memory.as_strided(near.shape, (stride, 1)).copy_(near)
    expected = run(rung, problem, inputs, dy)
    if name == "dy":
        assert_same(run(rung, problem, inputs, far), expected)
    else:
        assert_same(run(rung, problem, replace(inputs, **{name: far}), dy), expected)


@on_gpu
@pytest.mark.parametrize("T", [131072 - 64, 131072 + 64], ids=["below", "above"])
@pytest.mark.parametrize("H, I", [(2048, 128), (256, 1024)])
def test_more_elements_than_32_bits_count(T, H, I, fused):
    """T*K rows of 2048 columns, just below and just above 2^31 elements, in rows or slots (H) or in pre (2I). The last
    tokens are held to a layer of their own; only their dy is not zero, so the weight gradients are theirs too."""
    skip_without(gib=48)
    problem, inputs, dy = layer(T=T, H=H, I=I, E=8, K=8)
    dy[:-16] = 0
    y, grads = train(fused, inputs, dy)
    last = replace(inputs, **{name: getattr(inputs, name)[-16:] for name in ("x", "topk_ids", "topk_weights")})
    grads = replace(grads, dx=grads.dx[-16:], dtopk_weights=grads.dtopk_weights[-16:])
    assert_parity(problem.at(T=16), last, dy[-16:], (y[-16:], grads))


@on_gpu
def test_weights_of_more_elements_than_32_bits_count(fused):
    """Both weights, and with them their gradients, are longer than 2^31 elements. Only the last two experts, which lie
    behind that, hold anything and are chosen: they are held to a layer of their own."""
    skip_without(gib=64)
    E, H, I = 130, 8200, 2048
    small, inputs, dy = layer(T=16, H=H, I=I, E=2, K=2)
    weights = {name: getattr(inputs, name) for name in ("w_gate_up", "w_down")}
    large = {name: w.new_zeros(E, *w.shape[1:]) for name, w in weights.items()}
    for name, w in weights.items():
        large[name][-2:] = w
        assert large[name][:-2].numel() > 2**31
    problem, inputs_of_all = small.at(E=E), replace(inputs, topk_ids=inputs.topk_ids + E - 2, **large)
    y, grads = run(fused, problem, inputs_of_all, dy)
    assert not grads.dw_gate_up[:-2].any() and not grads.dw_down[:-2].any()
    grads = replace(grads, dw_gate_up=grads.dw_gate_up[-2:], dw_down=grads.dw_down[-2:])
    assert_parity(small, inputs, dy, (y, grads))
