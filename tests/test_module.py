"""MoE as a torch module: a stand-in for Hugging Face's Qwen3-MoE block, and a module like any other."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from cases import DEVICE
from torch import nn

from mega_moe import LADDER, MoE

H, I, E, K = 32, 24, 6, 2


def layer(stage: str = "reference", **options) -> MoE:
    """A small MoE, the same each time."""
    torch.manual_seed(0)
    return MoE(**dict(hidden_size=H, intermediate_size=I, num_experts=E, top_k=K, stage=stage, device=DEVICE) | options)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, H, generator=torch.Generator().manual_seed(1)).to(DEVICE)


# Hugging Face's block


@pytest.fixture(params=[False, True], ids=["as softmax gives them", "normalised"])
def block(request) -> nn.Module:
    """transformers' Qwen3-MoE block with random weights."""
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=H,
        moe_intermediate_size=I,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=request.param,
        hidden_act="silu",
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config).to(DEVICE)
    for w in block.parameters():
        nn.init.normal_(w, std=w.shape[-1] ** -0.5)
    return block


def stand_in(block: nn.Module, stage: str = "reference") -> MoE:
    """MoE with the block's settings, its state dict loaded as it is."""
    moe = layer(stage, norm_topk_prob=block.gate.norm_topk_prob)
    moe.load_state_dict(block.state_dict())
    return moe


def test_the_blocks_state_dict_is_ours(block):
    moe = stand_in(block)
    assert list(moe.state_dict()) == ["gate.weight", "experts.gate_up_proj", "experts.down_proj"]
    assert set(moe.state_dict()) == set(block.state_dict())
    block.load_state_dict(moe.state_dict())


def test_same_output_and_gradients_as_the_block(block, rung):
    moe, x, x_of_block = stand_in(block, rung.name), tokens(2, 5).requires_grad_(), tokens(2, 5).requires_grad_()
    y, y_of_block = moe(x), block(x_of_block)
    torch.testing.assert_close(y, y_of_block, rtol=1e-5, atol=1e-5)
    dy = torch.randn_like(y)
    y.backward(dy)
    y_of_block.backward(dy)
    torch.testing.assert_close(x.grad, x_of_block.grad, rtol=1e-5, atol=1e-5)
    expected = dict(block.named_parameters())
    for name, w in moe.named_parameters():
        torch.testing.assert_close(w.grad, expected[name].grad, rtol=1e-5, atol=1e-5)


def test_same_routes_as_the_block(block):
    moe, x = stand_in(block), tokens(7)
    logits, weights, ids = block.gate(x)
    got_ids, got_weights, got_logits = moe.route(x)
    assert torch.equal(got_ids, ids)
    torch.testing.assert_close(got_weights, weights)
    torch.testing.assert_close(got_logits, logits)


# Checkpoints


def named_per_expert(moe: MoE, prefix: str = "") -> dict[str, torch.Tensor]:
    """The state dict as checkpoints on disk have it."""
    return {
        f"{prefix}gate.weight": moe.gate.weight.detach().clone(),
        **moe.experts.per_expert(f"{prefix}experts."),
    }


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    others = dict(other.named_parameters())
    assert len(others) == len(list(one.parameters()))
    for name, w in one.named_parameters():
        assert torch.equal(w, others[name]), name


def test_per_expert_names_are_those_of_checkpoints():
    moe = layer()
    named = moe.experts.per_expert("model.layers.0.mlp.experts.")
    assert len(named) == 3 * E
    gate_up, down = moe.experts.gate_up_proj, moe.experts.down_proj
    for e in range(E):
        of = lambda name, e=e: named[f"model.layers.0.mlp.experts.{e}.{name}_proj.weight"]
        assert torch.equal(of("gate"), gate_up[e, :I]) and of("gate").shape == (I, H)
        assert torch.equal(of("up"), gate_up[e, I:]) and of("up").shape == (I, H)
        assert torch.equal(of("down"), down[e]) and of("down").shape == (H, I)
    before = gate_up.detach().clone()
    named["model.layers.0.mlp.experts.0.gate_proj.weight"].zero_()
    assert torch.equal(gate_up, before)  # they are copies, without autograd
    assert not any(w.requires_grad for w in named.values())


def test_per_expert_round_trip():
    moe, other = layer(), MoE(H, I, E, K, device=DEVICE)
    state = named_per_expert(moe)
    names = list(state)
    assert other.load_state_dict(state) == ([], [])
    assert_same_parameters(moe, other)
    assert list(state) == names  # the caller's dict is left alone


def test_per_expert_names_inside_a_larger_model():
    model = lambda: nn.ModuleDict({"layers": nn.ModuleList([MoE(H, I, E, K), nn.Linear(H, H), MoE(H, I, E, K)])})
    one, other = model(), model()
    linear = one.layers[1]
    state = {"layers.1.weight": linear.weight, "layers.1.bias": linear.bias}
    for i in (0, 2):
        state |= named_per_expert(one.layers[i], f"layers.{i}.")
    assert other.load_state_dict(state) == ([], [])
    assert_same_parameters(one, other)


@pytest.mark.parametrize("lacking", ["experts.3.up_proj.weight", "experts.5.down_proj.weight"])
def test_a_checkpoint_with_a_hole_is_reported(lacking):
    moe, other = layer(), MoE(H, I, E, K, device=DEVICE)
    before = other.experts.gate_up_proj.detach().clone()
    state = named_per_expert(moe)
    del state[lacking]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*experts\.gate_up_proj"):
        other.load_state_dict(state)
    missing, _ = other.load_state_dict(state, strict=False)
    assert set(missing) == {"experts.gate_up_proj", "experts.down_proj"}
    assert torch.equal(other.experts.gate_up_proj, before)


def test_a_checkpoint_with_more_experts_is_reported():
    larger = named_per_expert(layer(num_experts=E + 1))
    larger["gate.weight"] = larger["gate.weight"][:E]
    with pytest.raises(RuntimeError, match=rf"Unexpected key\(s\).*experts\.{E}\.gate_proj"):
        layer().load_state_dict(larger)


@pytest.mark.parametrize("per_expert", [False, True], ids=["fused names", "per-expert names"])
def test_from_meta_by_assignment(per_expert):
    """How a large model is loaded: without memory first, then with the checkpoint's own tensors."""
    moe = layer()
    empty = MoE(H, I, E, K, stage="reference", device="meta", dtype=torch.bfloat16)
    assert all(w.is_meta for w in empty.parameters())
    state = named_per_expert(moe) if per_expert else moe.state_dict()
    assert empty.load_state_dict(state, assign=True) == ([], [])
    assert_same_parameters(moe, empty)
    assert all(isinstance(w, nn.Parameter) and w.requires_grad for w in empty.parameters())
    assert torch.equal(moe(tokens(3)), empty(tokens(3)))


def test_loading_casts_to_the_parameters_dtype():
    moe = layer(dtype=torch.bfloat16)
    moe.load_state_dict(named_per_expert(layer()))
    assert {w.dtype for w in moe.parameters()} == {torch.bfloat16}
    assert torch.equal(moe.experts.down_proj, layer().experts.down_proj.bfloat16())


def test_a_copy_loads_into_itself():
    """The hook that fuses experts belongs to the copy, not to the original."""
    moe = layer()
    twin = copy.deepcopy(moe)
    assert_same_parameters(moe, twin)
    doubled = {name: 2 * w for name, w in named_per_expert(moe).items()}
    twin.load_state_dict(doubled)
    assert torch.equal(twin.experts.down_proj, 2 * moe.experts.down_proj)
    assert torch.equal(moe.experts.down_proj, layer().experts.down_proj)


# A module like any other


@pytest.mark.parametrize("shape", [(), (7,), (2, 5), (2, 3, 1), (0,), (2, 0)], ids=str)
def test_any_leading_shape(shape, rung):
    moe, x = layer(rung.name), tokens(*shape)
    y = moe(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    torch.testing.assert_close(y.reshape(-1, H), layer()(x.reshape(-1, H)), rtol=1e-5, atol=1e-5)


def test_strides_of_x_do_not_matter():
    moe, x = layer(), tokens(4, 3)
    assert torch.equal(moe(x.transpose(0, 1)), moe(x.transpose(0, 1).contiguous()))


def test_route():
    topk_ids, topk_weights, logits = layer().route(tokens(2, 5))
    assert topk_ids.shape == topk_weights.shape == (10, K) and logits.shape == (10, E)
    assert topk_ids.dtype == torch.int64 and topk_weights.dtype == torch.float32
    probabilities = logits.softmax(-1)
    assert torch.equal(topk_weights, probabilities.gather(1, topk_ids))
    assert (topk_weights[:, 0] >= topk_weights[:, 1]).all() and (topk_weights.sum(1) < 1).all()
    assert layer().bfloat16().route(tokens(2, 5).bfloat16())[1].dtype == torch.float32
    _, normalised, _ = layer(norm_topk_prob=True).route(tokens(2, 5))
    torch.testing.assert_close(normalised, topk_weights / topk_weights.sum(1, keepdim=True))


def test_auxiliary_losses_reach_the_router_through_the_logits():
    moe = layer()
    _, _, logits = moe.route(tokens(10))
    z_loss = logits.logsumexp(-1).square().mean()
    z_loss.backward()
    assert moe.gate.weight.grad.abs().sum() > 0


def test_one_normalised_route_leaves_the_router_without_gradient():
    """Its weight is 1 whatever the router says: p / p."""
    moe = layer(top_k=1, norm_topk_prob=True)
    moe(tokens(10)).square().sum().backward()
    assert moe.gate.weight.grad.abs().max() < 1e-5
    assert moe.experts.down_proj.grad.abs().max() > 1e-1


def test_one_route_without_normalising_trains_the_router():
    moe = layer(top_k=1)
    moe(tokens(10)).square().sum().backward()
    assert moe.gate.weight.grad.abs().max() > 1e-1


def test_one_expert(rung):
    moe, x = layer(rung.name, num_experts=1, top_k=1), tokens(5)
    gate, up = (x @ moe.experts.gate_up_proj[0].T).chunk(2, -1)
    expected = (nn.functional.silu(gate) * up) @ moe.experts.down_proj[0].T
    torch.testing.assert_close(moe(x), expected, rtol=1e-5, atol=1e-5)


def test_swiglu_limit_is_applied():
    moe, x = layer(swiglu_limit=0.25), tokens(5)
    clamped = moe(x)
    moe.swiglu_limit = None
    assert not torch.equal(clamped, moe(x))


def test_what_is_kept_for_backward_is_passed_on():
    """And may be changed, as the stage may."""
    moe, x = layer(save="inputs"), tokens(5)
    held = []
    for save, count in (("inputs", 0), ("pre", 1)):
        moe.save = save
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.shape) or t, lambda t: t):
            moe(x)
        assert held.count((5 * K, 2, I)) == count
    moe.save = "act"
    with pytest.raises(ValueError, match="'pre' or 'inputs', not 'act'"):
        moe(x)


def test_what_is_refused():
    for top_k in (0, E + 1):
        with pytest.raises(ValueError, match=f"1 .. {E}"):
            layer(top_k=top_k)
    with pytest.raises(ValueError, match="reference, grouped"):
        layer("fastest")
    moe = layer()
    with pytest.raises(ValueError, match="the stages are"):
        moe.stage = "fastest"
    assert moe.stage == "reference"
    for size in ("hidden_size", "intermediate_size", "num_experts"):
        with pytest.raises(ValueError, match=f"{size} = 0"):
            layer(**{size: 0})
    with pytest.raises(ValueError, match="'pre' or 'inputs', not 'act'"):
        layer(save="act")
    with pytest.raises(ValueError, match="swiglu_limit must be positive, not -1"):
        layer(swiglu_limit=-1.0)


@pytest.mark.parametrize("called", ["forward", "route"])
def test_an_x_that_does_not_fit_is_named(called):
    call = getattr(layer(), called)
    for shape in ((5, H + 1), ()):
        with pytest.raises(ValueError, match=rf"hidden_size\) = \(\.\.\., {H}\), not of shape"):
            call(torch.zeros(shape, device=DEVICE))
    with pytest.raises(TypeError, match=r"x is torch\.bfloat16 and the layer torch\.float32"):
        call(tokens(5).bfloat16())
    with torch.autocast(DEVICE, torch.bfloat16):
        call(tokens(5).bfloat16())


def test_stage_can_change_between_calls(rung):
    moe, x = layer(), tokens(6)
    expected = moe(x)
    moe.stage = rung.name
    assert rung.name in repr(moe)
    torch.testing.assert_close(moe(x), expected, rtol=1e-5, atol=1e-5)


def test_printed_it_shows_its_sizes():
    assert f"(experts): Experts(E={E}, H={H}, I={I})" in repr(layer())
    assert "save" not in repr(layer()) and "swiglu_limit" not in repr(layer())
    assert "save='inputs', swiglu_limit=7.0" in repr(layer(save="inputs", swiglu_limit=7.0))


def test_parameters_start_with_variance_one_over_fan_in():
    torch.manual_seed(0)
    moe = MoE(256, 128, 8, 2)
    for w in moe.parameters():
        assert math.isclose(w.std().item(), w.shape[-1] ** -0.5, rel_tol=0.05)


def test_dtype_and_device_move():
    moe = layer().to(torch.bfloat16)
    assert moe(tokens(4).bfloat16()).dtype == torch.bfloat16
    with pytest.raises(TypeError):
        moe(tokens(4))
    moe.double()
    assert moe(tokens(4).double()).dtype == torch.float64


def test_autocast(rung):
    moe, x = layer(rung.name), tokens(4)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = moe(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert {w.grad.dtype for w in moe.parameters()} == {torch.float32}
    torch.testing.assert_close(y.float(), moe(x), rtol=0.05, atol=0.05)


def test_training_lowers_the_loss(rung):
    """Router and experts learn together; the rungs take the same steps."""
    x, goal = tokens(24), tokens(25)[1:]

    def losses(stage: str) -> list[float]:
        moe = layer(stage, norm_topk_prob=True)
        start = [w.detach().clone() for w in moe.parameters()]
        sgd = torch.optim.SGD(moe.parameters(), lr=0.05)
        seen = []
        for _ in range(8):
            loss = (moe(x) - goal).square().sum(-1).mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            seen.append(loss.item())
        assert not any(torch.equal(w, before) for w, before in zip(moe.parameters(), start))
        return seen

    seen = losses(rung.name)
    assert all(later < earlier for earlier, later in pairwise(seen))
    torch.testing.assert_close(seen, losses("reference"), rtol=1e-4, atol=0)


def test_two_layers_and_a_residual(rung):
    """y feeds the next router, and x is used twice."""
    one, two, x = layer(rung.name), layer(rung.name, top_k=3), tokens(6).requires_grad_()
    (x + two(x + one(x))).square().sum().backward()
    assert x.grad.isfinite().all()
    gradients = [w.grad.clone() for w in (*one.parameters(), *two.parameters())]
    same = x.grad.clone()
    x.grad = None
    for moe in (one, two):
        moe.zero_grad()
        moe.stage = "reference"
    (x + two(x + one(x))).square().sum().backward()
    torch.testing.assert_close(same, x.grad, rtol=1e-4, atol=1e-5)
    for got, w in zip(gradients, (*one.parameters(), *two.parameters())):
        torch.testing.assert_close(got, w.grad, rtol=1e-4, atol=1e-4)


def test_default_stage_is_a_rung():
    assert MoE(H, I, E, K).stage in [rung.name for rung in LADDER]
