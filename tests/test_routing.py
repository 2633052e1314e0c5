"""The router's choice, and the plan of rows in its two plain-torch forms."""

import pytest
import torch
from cases import DEVICE

from mega_moe import reference
from mega_moe.routing import plan, route


def random_logits(T=9, E=6):
    return torch.randn(T, E, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.mark.parametrize("K", [1, 2, 6])
@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_the_weights_are_a_softmax_over_all_experts(K, norm_topk_prob):
    """Not over the chosen ones, nor raw scores; renormalised along a token's slots, also with a single slot."""
    logits = random_logits()
    topk_ids, topk_weights = route(logits, K, norm_topk_prob)
    expected = logits.softmax(-1).gather(-1, topk_ids)
    if norm_topk_prob:
        expected = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(topk_weights.sum(-1), torch.ones(9, device=DEVICE))
    torch.testing.assert_close(topk_weights, expected)
    assert topk_ids.dtype == torch.int64 and topk_weights.dtype == torch.float32
    assert torch.equal(topk_ids, logits.topk(K).indices)


def test_the_references_router_agrees():
    x, w = random_logits(9, 16), random_logits(6, 16)
    for K in (1, 3):
        for norm_topk_prob in (False, True):
            topk_ids, topk_weights, _ = reference.router(x, w, K, norm_topk_prob)
            ids, weights = route(x @ w.T, K, norm_topk_prob)
            assert torch.equal(ids, topk_ids)
            torch.testing.assert_close(weights, topk_weights)


@pytest.mark.parametrize("norm_topk_prob, learns", [(False, True), (True, False)])
def test_one_renormalised_slot_teaches_the_router_nothing(norm_topk_prob, learns):
    """Its weight is 1 whatever the scores; without renormalisation it does learn."""
    logits = random_logits().requires_grad_()
    _, topk_weights = route(logits, 1, norm_topk_prob)
    topk_weights.sum().backward()
    assert (logits.grad.abs().max() > 1e-3) == learns
    assert learns or logits.grad.abs().max() < 1e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_of_any_range_give_finite_weights(dtype):
    """Probabilities that underflow to zero are chosen and divided all the same."""
    logits = torch.tensor([[0.0, -200.0, -300.0], [300.0, 300.0, 300.0], [-6e4, 0.0, 6e4]], dtype=dtype, device=DEVICE)
    for norm_topk_prob in (False, True):
        _, topk_weights = route(logits, 2, norm_topk_prob)
        assert topk_weights.isfinite().all() and (topk_weights >= 0).all()


def test_nan_scores_choose_experts_that_exist():
    logits = random_logits()
    logits[3] = torch.nan
    logits[4, 2] = torch.nan
    topk_ids, topk_weights = route(logits, 2, norm_topk_prob=True)
    assert ((topk_ids >= 0) & (topk_ids < 6)).all()
    assert topk_weights[[3, 4]].isnan().all() and topk_weights[[0, 1, 2, 5]].isfinite().all()


def test_the_plan_of_the_example():
    made = plan(torch.tensor([[2, 0], [0, -1], [2, 2]]), 3)
    assert [t.tolist() for t in made] == [
        [0, 2, 2, 5],
        [0, 1, 0, 2, 2, -1],
        [1, 0, 0, 0, 1, -1],
        [[2, 0], [1, -1], [3, 4]],
    ]
    assert all(t.dtype == torch.int32 for t in made)


@pytest.mark.parametrize("T, K, E", [(0, 2, 3), (1, 1, 1), (7, 3, 2), (40, 2, 9), (5, 4, 64)])
def test_both_plans_agree_on_live_rows(T, K, E):
    """mega_moe.routing.plan has T*K rows whatever the routing; the reference's has the live ones alone."""
    ids = torch.randint(-2, E + 2, (T, K), generator=torch.Generator().manual_seed(T)).to(DEVICE)
    made, expected = plan(ids, E), reference.plan(ids, E)
    live = int(((ids >= 0) & (ids < E)).sum())
    assert torch.equal(made.row_start.long(), expected.row_start)
    assert torch.equal(made.row_of_slot.long(), expected.row_of_slot)
    for name in ("token_of_row", "slot_of_row"):
        rows = getattr(made, name).long()
        assert torch.equal(rows[:live], getattr(expected, name)) and (rows[live:] == -1).all()
