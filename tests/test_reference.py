"""The reference against what is simpler than itself: a double loop, torch's autograd, and one rank."""

import pytest
import torch

from mega_moe.reference import backward, forward, plan, ranks, router, router_backward

LIMITS = (None, 0.7)


def layer(T=7, H=5, I=3, E=4, K=2, seed=0, masked=0.2):
    """A small float64 layer with masked and duplicate routes and an expert that nobody chose."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=g)
    topk_ids = torch.randint(0, max(E - 1, 1), (T, K), generator=g)
    topk_ids[torch.rand(T, K, generator=g) < masked] = -1
    return draw(T, H), topk_ids, draw(T, K), draw(E, 2, I, H), draw(E, H, I)


def double_loop(x, topk_ids, topk_weights, w_gate_up, w_down):
    """The layer as its formula, token by token and slot by slot."""
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for k, e in enumerate(topk_ids[t].tolist()):
            if e >= 0:
                gate, up = w_gate_up[e] @ x[t]
                y[t] += topk_weights[t, k] * (w_down[e] @ (torch.nn.functional.silu(gate) * up))
    return y


def test_plan_example():
    p = plan(torch.tensor([[2, 0], [0, -1], [2, 2]]), 3)
    assert p.row_start.tolist() == [0, 2, 2, 5]
    assert p.token_of_row.tolist() == [0, 1, 0, 2, 2]
    assert p.slot_of_row.tolist() == [1, 0, 0, 0, 1]
    assert p.row_of_slot.tolist() == [[2, 0], [1, -1], [3, 4]]


def test_forward_is_the_double_loop():
    inputs = layer()
    torch.testing.assert_close(forward(*inputs)[0], double_loop(*inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("swiglu_limit", LIMITS)
@pytest.mark.parametrize("shape", [dict(), dict(T=1, E=1, K=1), dict(T=0), dict(masked=1.0), dict(K=6, E=2)])
def test_backward_is_autograd(shape, swiglu_limit):
    x, topk_ids, *rest = layer(**shape)
    leaves = [t.requires_grad_() for t in (x, *rest)]
    y, saved = forward(x, topk_ids, *rest, swiglu_limit)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(y, leaves, dy, allow_unused=True, materialize_grads=True)
    for got, want in zip(backward(saved, dy), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("swiglu_limit", LIMITS)
def test_forward_and_backward_are_differentiable(swiglu_limit):
    """gradcheck compares autograd through forward, which backward was just held to, with finite differences."""
    x, topk_ids, *rest = layer(T=4, H=3, I=2)
    leaves = tuple(t.requires_grad_() for t in (x, *rest))
    layer_of = lambda x, *rest: forward(x, topk_ids, *rest, swiglu_limit)[0]
    assert torch.autograd.gradcheck(layer_of, leaves)
    assert torch.autograd.gradgradcheck(layer_of, leaves)

    class HandDerived(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *rest):
            y, ctx.saved = forward(x, topk_ids, *rest, swiglu_limit)
            return y

        @staticmethod
        def backward(ctx, dy):
            return tuple(backward(ctx.saved, dy))

    assert torch.autograd.gradcheck(HandDerived.apply, leaves)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
def test_router(norm_topk_prob, top_k):
    g = torch.Generator().manual_seed(2)
    x, w = (torch.randn(*s, dtype=torch.float64, generator=g).requires_grad_() for s in ((6, 4), (5, 4)))
    topk_ids, topk_weights, saved = router(x, w, top_k, norm_topk_prob)
    probs = (x @ w.T).softmax(-1)
    expected = probs.gather(-1, topk_ids)
    if norm_topk_prob:
        assert torch.allclose(topk_weights.sum(-1), torch.ones(6, dtype=torch.float64))
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(topk_weights, expected)
    assert (topk_ids == probs.topk(top_k).indices).all()
    d = torch.randn(6, top_k, dtype=torch.float64, generator=g)
    for got, want in zip(router_backward(saved, d), torch.autograd.grad(topk_weights, (x, w), d), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "tokens_per_rank", [(7,), (5, 2), (0, 7), (3, 3, 1, 0), (0, 0, 7, 0), (0, 0)], ids=lambda t: "-".join(map(str, t))
)
@pytest.mark.parametrize("swiglu_limit", LIMITS)
def test_ranks_equal_one_rank(tokens_per_rank, swiglu_limit):
    W = len(tokens_per_rank)
    x, topk_ids, topk_weights, w_gate_up, w_down = layer(T=sum(tokens_per_rank), seed=3)
    y, saved = forward(x, topk_ids, topk_weights, w_gate_up, w_down, swiglu_limit)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(4))
    grads = backward(saved, dy)

    split = lambda t: list(t.split(tokens_per_rank))
    tokens = [ranks.Tokens(*t) for t in zip(split(x), split(topk_ids), split(topk_weights), strict=True)]
    experts = list(w_gate_up.chunk(W)), list(w_down.chunk(W))
    rank_y, rank_saved = ranks.forward(tokens, *experts, swiglu_limit)
    rank_grads = ranks.backward(tokens, *experts, rank_saved, split(dy), swiglu_limit)

    for got, want in zip(map(torch.cat, (rank_y, *zip(*rank_grads, strict=True))), (y, *grads), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("bad", [4, 11, -2, -(2**31), 2**40])
def test_ids_outside_the_table_are_masked(bad):
    x, topk_ids, *rest = layer(masked=0)
    masked, outside = topk_ids.clone(), topk_ids.clone()
    masked[2, 1], outside[2, 1] = -1, bad
    assert torch.equal(forward(x, masked, *rest)[0], forward(x, outside, *rest)[0])
