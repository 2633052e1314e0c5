"""dispatch copies, whatever the strides, and writes nothing but rows that have a token."""

import pytest
import torch
from cases import DEVICE, framed, transposed
from exact import same_values

from mega_moe.kernels.dispatch import dispatch
from mega_moe.routing import plan

nan = torch.nan


def test_example(framed_memory):
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=DEVICE)
    ids = torch.tensor([[0, 1], [0, -1]], device=DEVICE)  # rows: tokens 0 and 1 of expert 0, token 0 of expert 1
    made = plan(ids, 2)
    assert made.token_of_row.tolist() == [0, 1, 0, -1]
    rows = dispatch(x, made)
    assert same_values(rows, torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [nan, nan]], device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("T, H, K", [(1, 1, 1), (65, 63, 2), (33, 65, 3), (22, 130, 3), (64, 64, 1), (5, 300, 8)])
def test_rows_are_tokens(T, H, K, dtype, framed_memory):
    x = torch.randn(T, H, device=DEVICE).to(dtype)
    ids = torch.randint(-1, 4, (T, K), device=DEVICE)
    made = plan(ids, 4)
    expected = torch.where(made.token_of_row[:, None] >= 0, x[made.token_of_row], nan)
    assert same_values(dispatch(x, made), expected)


@pytest.mark.parametrize(
    "lay_out",
    [
        transposed,
        lambda x: framed(x, gap=1, offset=1),
        lambda x: x[:, :1].expand(-1, 70),
        lambda x: x[:1].expand(20, -1),
        lambda x: x[0, :1].expand(20, 70),
        lambda x: x.flip(1).contiguous()[:, ::2],
    ],
    ids=[
        "transposed",
        "framed in NaN",
        "one column expanded",
        "one token expanded",
        "one number",
        "every other column",
    ],
)
def test_any_strides(lay_out, framed_memory):
    x = lay_out(torch.randn(20, 70, device=DEVICE))
    made = plan(torch.randint(-1, 3, (20, 2), device=DEVICE), 3)
    assert same_values(dispatch(x, made), dispatch(x.contiguous(), made))


def test_nan_and_inf_are_copied():
    x = torch.tensor([[nan, torch.inf], [-torch.inf, -0.0]], device=DEVICE, dtype=torch.bfloat16)
    rows = dispatch(x, plan(torch.tensor([[0], [0]], device=DEVICE), 1))
    assert torch.equal(rows.view(torch.int16), x.view(torch.int16))


def test_no_tokens():
    x = torch.empty(0, 8, device=DEVICE)
    assert dispatch(x, plan(torch.empty(0, 2, dtype=torch.int64, device=DEVICE), 3)).shape == (0, 8)
