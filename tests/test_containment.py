"""What must stay where it is: NaN and Inf in their tokens and experts, and every write inside its tensor."""

from dataclasses import replace

import pytest
import torch
from cases import assert_parity, assert_same, framed, layer, run, same_bits, train
from memory import FramedMemory

from mega_moe import MoE

# Token 3 shares experts 0 and 1 with others; 2 and 3 never see it.
IDS = [[0, 1], [2, 3], [1, 3], [1, 0], [0, 2], [3, -1]]
OTHERS = [0, 1, 2, 4, 5]


@pytest.mark.parametrize("where, bad", [("x", torch.nan), ("x", -torch.inf), ("dy", torch.nan), ("dy", torch.inf)])
def test_a_bad_token_reaches_itself_and_its_experts_gradients(where, bad, rung):
    """Through a tile that tokens share, or a mask that multiplies, NaN would reach other tokens. All else is the same
    to the bit."""
    _, inputs, dy = layer(IDS, E=4)
    y, grads = train(rung, inputs, dy)
    (inputs.x if where == "x" else dy)[3, 7] = bad
    y_spoilt, spoilt = train(rung, inputs, dy)

    assert y_spoilt[3].isfinite().all() == (where == "dy")
    assert not spoilt.dtopk_weights[3].isfinite().any()
    for got, expected in ((y_spoilt, y), (spoilt.dx, grads.dx), (spoilt.dtopk_weights, grads.dtopk_weights)):
        assert same_bits(got[OTHERS], expected[OTHERS])
    for got, expected in ((spoilt.dw_gate_up, grads.dw_gate_up), (spoilt.dw_down, grads.dw_down)):
        assert same_bits(got[2:], expected[2:])
        assert not got[:2].isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_expert_reaches_the_tokens_that_chose_it(bad, rung):
    _, inputs, dy = layer([[0, 1], [1, 0], [2, 1], [-1, 0]])
    y, grads = train(rung, inputs, dy)
    inputs.w_gate_up[2, 0, 3, 5] = inputs.w_down[2, 4, 6] = bad
    y_spoilt, spoilt = train(rung, inputs, dy)
    assert not y_spoilt[2].isfinite().all() and not spoilt.dx[2].isfinite().all()
    for got, expected in ((y_spoilt, y), (spoilt.dx, grads.dx), (spoilt.dtopk_weights, grads.dtopk_weights)):
        assert same_bits(got[[0, 1, 3]], expected[[0, 1, 3]])
    assert same_bits(spoilt.dw_down[0], grads.dw_down[0]) and same_bits(spoilt.dw_gate_up[0], grads.dw_gate_up[0])


def test_an_expert_that_nobody_chose_is_never_read(rung):
    _, inputs, dy = layer([[0, 1], [1, 0], [-1, 1]])
    expected = train(rung, inputs, dy)
    inputs.w_gate_up[2], inputs.w_down[2] = torch.nan, torch.nan
    assert_same(train(rung, inputs, dy), expected)


def test_a_weight_of_zero_is_no_mask(rung):
    """An expert that overflows for one token whose weight for it is 0: Inf times 0 is NaN, there and nowhere else."""
    _, inputs, dy = layer([[0, 1], [2, 0], [1, 0]])
    inputs.topk_weights[1, 0] = 0.0
    y, grads = train(rung, inputs, dy)
    inputs.w_down[2] = 3e38
    inputs.w_gate_up[2] = 100 * inputs.x[1].sign()  # a large positive gate and up
    y_overflown, overflown = train(rung, inputs, dy)
    assert y_overflown[1].isnan().all() and same_bits(y_overflown[[0, 2]], y[[0, 2]])
    assert same_bits(overflown.dx[[0, 2]], grads.dx[[0, 2]])
    assert same_bits(overflown.dw_gate_up[:2], grads.dw_gate_up[:2])
    assert same_bits(overflown.dw_down[:2], grads.dw_down[:2])


def test_a_bad_token_through_the_router(rung):
    """NaN scores must not become an id outside the table."""
    torch.manual_seed(0)
    module = MoE(16, 24, 4, 2, stage=rung.name, dtype=torch.bfloat16).to(layer()[1].x.device)
    x = torch.randn(5, 16, dtype=torch.bfloat16, device=module.gate.weight.device)
    expected = module(x)
    x[3] = torch.nan
    y = module(x)
    assert y[3].isnan().all() and same_bits(y[[0, 1, 2, 4]].detach(), expected[[0, 1, 2, 4]].detach())


@pytest.mark.parametrize("T, H, I, E, K", [(5, 33, 17, 3, 2), (3, 80, 65, 2, 2), (35, 16, 16, 2, 1)])
def test_nothing_is_written_outside_a_tensor(T, H, I, E, K, fused):
    """A last tile without its mask spills behind the last row, where programs that run in order would never repair it;
    and what lies around the inputs, NaN, is never read."""
    problem, inputs, dy = layer(T=T, H=H, I=I, E=E, K=K)
    inputs.topk_ids[0, 0] = -1
    around = {name: framed(t, gap=0, offset=8) for name, t in vars(inputs).items()}
    with FramedMemory() as memory:
        y, grads = run(fused, problem, replace(inputs, **around), framed(dy, gap=0, offset=8))
    memory.assert_intact()
    assert_parity(problem, inputs, dy, (y, grads))
