"""A layer captured from a real Qwen3-MoE model on real text is the layer that the model computed."""

import json
import sys
from pathlib import Path

import pytest
import torch

from mega_moe import cli, ladder
from mega_moe.capture import capture_layer
from mega_moe.parity import Oracle
from mega_moe.samples import load_layer
from mega_moe.shapes import Grads

CHECKOUT = Path(__file__).resolve().parent.parent
TEXT = (CHECKOUT / "reference" / "forward.py").read_bytes()
"""Real text of this repository; its bytes are the token ids, so no tokenizer is needed."""


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=2,  # layers 1 and 3 are MoE, 0 and 2 are dense
        max_position_embeddings=256,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def batch(sequences=2, length=20):
    return {"input_ids": torch.tensor(list(TEXT[: sequences * length])).view(sequences, length)}


def test_the_file_holds_the_layer_as_the_model_computed_it(model, tmp_path):
    model = model.double()  # so that what is left of a difference is a mistake
    model.set_experts_implementation("eager")  # the one that knows float64
    experts, seen = model.model.layers[3].mlp.experts, []
    hook = experts.register_forward_hook(lambda module, args, y: seen.append(y))
    captured = capture_layer(model, tmp_path / "layer.safetensors", layer=3, **batch())
    hook.remove()

    loaded = load_layer(tmp_path / "layer.safetensors")
    for name, tensor in vars(captured).items():
        assert torch.equal(getattr(loaded, name), tensor), name
    p = loaded.problem()
    assert (p.T, p.H, p.I, p.E, p.K) == (40, 32, 24, 8, 2)
    assert p.dtype == torch.float64 and len(set(loaded.topk_ids.flatten().tolist())) > 2

    x, topk_weights = loaded.x.clone().requires_grad_(), loaded.topk_weights.clone().requires_grad_()
    dy = torch.randn_like(x)
    y = experts(x, loaded.topk_ids, topk_weights)
    assert torch.equal(y, seen[0])
    inputs = (x, topk_weights, experts.gate_up_proj, experts.down_proj)
    dx, dtopk_weights, dgate_up_proj, dw_down = torch.autograd.grad(y, inputs, dy)
    grads = Grads(dx, dtopk_weights, dgate_up_proj.view_as(loaded.w_gate_up), dw_down)
    assert Oracle(p, loaded, dy).check(y.detach(), grads).passed
    model.float().set_experts_implementation("grouped_mm")


def test_moe_on_the_captured_tensors_is_what_the_experts_returned(model, tmp_path):
    from mega_moe import moe

    experts, seen = model.model.layers[1].mlp.experts, []
    hook = experts.register_forward_hook(lambda module, args, y: seen.append(y))
    layer = capture_layer(model, tmp_path / "layer.safetensors", layer=1, **batch())
    hook.remove()
    y = moe(layer.x, layer.topk_ids, layer.topk_weights, layer.w_gate_up, layer.w_down, stage="reference")
    torch.testing.assert_close(y, seen[0], rtol=1e-5, atol=1e-6)


def test_the_model_is_left_as_it_was(model, tmp_path):
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    layer = capture_layer(model, tmp_path / "layer.safetensors", layer=1, **batch())
    layer.w_down.mul_(1)  # the caller's to read; the model's tensors are looked at below
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1]), name
    assert not model.model.layers[1].mlp.experts._forward_pre_hooks
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_the_hook_goes_even_when_the_model_fails(model, tmp_path):
    with pytest.raises(IndexError):
        capture_layer(model, tmp_path / "layer.safetensors", layer=3, input_ids=torch.tensor([[9999]]))
    assert not model.model.layers[3].mlp.experts._forward_pre_hooks
    assert not (tmp_path / "layer.safetensors").exists()


@pytest.mark.parametrize(
    "layer, message",
    [(0, "layer 0 .* is dense; its MoE layers are 1, 3"), (7, "no decoder layer 7; it has 0, 1, 2, 3")],
)
def test_a_layer_that_is_not_moe_is_an_error_that_names_those_that_are(model, tmp_path, layer, message):
    with pytest.raises(ValueError, match=message):
        capture_layer(model, tmp_path / "layer.safetensors", layer=layer, **batch())


def test_a_layer_that_is_never_reached_is_an_error(model, tmp_path, monkeypatch):
    monkeypatch.setattr(type(model), "forward", lambda self, **batch: None)
    with pytest.raises(RuntimeError, match="never reached the experts of layer 1"):
        capture_layer(model, tmp_path / "layer.safetensors", layer=1, **batch())


def test_another_model_and_another_activation_are_errors(model, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="Linear has no decoder layer 0; it has none"):
        capture_layer(torch.nn.Linear(2, 2), tmp_path / "layer.safetensors")
    monkeypatch.setattr(model.config, "hidden_act", "gelu")
    with pytest.raises(ValueError, match="activation is gelu"):
        capture_layer(model, tmp_path / "layer.safetensors", layer=1, **batch())


def test_experts_held_one_by_one_are_an_error(model, tmp_path):
    block = model.model.layers[1].mlp
    experts = block.experts
    try:
        block.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
        with pytest.raises(ValueError, match=r"ModuleList holds no gate_up_proj .* transformers >= 5"):
            capture_layer(model, tmp_path / "layer.safetensors", layer=1, **batch())
    finally:
        block.experts = experts


def test_without_safetensors_it_says_what_to_install(model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        capture_layer(model, tmp_path / "layer.safetensors", layer=1, **batch())


def test_the_ladder_runs_on_it(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ladder, "ROUNDS", {"cuda": 1, "cpu": 1})
    path = tmp_path / "layer.safetensors"
    capture_layer(model, path, layer=1, **batch(1, 24))
    code = cli.main(["ladder", "--layer", str(path), "--json", "--device", "cpu"])

    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert result["problem"]["routing"] == "layer" and result["problem"]["dtype"] == "fp32"
    assert [result["problem"][letter] for letter in "THIEK"] == [24, 32, 24, 8, 2]
    assert all(share <= 1 for row in result["rows"] if row["parity"] for share in row["parity"].values())
