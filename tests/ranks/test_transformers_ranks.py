"""Models of transformers with their experts over ranks, computed by moe, held to one process with eager experts."""

from pathlib import Path

import pytest
import torch
from cases import on_cpu
from forked import no_fork_warning, on_ranks, what
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

NEEDED = "needs transformers 5.23 or newer"
transformers = pytest.importorskip("transformers", minversion="5.23", reason=NEEDED)
ours = pytest.importorskip("mega_moe.integrations.transformers", reason=NEEDED)

pytestmark = [
    on_cpu,  # processes are forked, which a process that has used a GPU does not survive
    no_fork_warning,
]

ours.register()

W = 2
TENSOR_PARALLEL = dict(tp_size=W, ep_size=W)
"""Ranks that hold the same batch: attention is split too."""
SHARDED = dict(fsdp_size=W, ep_size=W)
"""Ranks that hold batches of their own."""
CONFIG = dict(
    vocab_size=32,
    hidden_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    pad_token_id=0,
    eos_token_id=None,
)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A small model on disk."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**CONFIG))
    for name, w in model.named_parameters():
        if w.dim() > 1:
            torch.nn.init.normal_(w, std=w.shape[-1] ** -0.5 if "embed" not in name else 1.0)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(checkpoint: Path, ep_implementation: str, sizes: dict, **options) -> transformers.PreTrainedModel:
    """What from_pretrained(..., distributed_config=...) does, which needs accelerate."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, **options)
    distributed = transformers.distributed.DistributedConfig(ep_implementation=ep_implementation, **sizes)
    distributed, _, meshes = model.prepare_distribute_model(distributed)
    model = model.maybe_distribute_model(model, distributed, meshes)
    for module in model.modules():
        if isinstance(module, FSDPModule) and not hasattr(module, "gate_up_proj"):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no average
    return model


def tokens(length: int) -> Tensor:
    return torch.randint(2, 32, (W, length), generator=torch.Generator().manual_seed(1))


def train(model: transformers.PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Logits, and the whole gradient of each parameter. In eval mode nothing is random; gradients are the same."""
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t
    grads = {name: whole(w.grad).clone() for name, w in model.named_parameters()}
    return dict(logits=whole(out.logits).detach().clone(), **grads)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """In fp32, through whole models: eager experts add up in torch's order, and ranks' gradients in another."""
    assert got.keys() == expected.keys()
    for name, its in expected.items():
        torch.testing.assert_close(got[name], its, rtol=1e-4, atol=1e-5, msg=lambda told, name=name: f"{name}: {told}")


def alone(checkpoint: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation="eager")


@pytest.mark.parametrize("name, stage", [("mega_moe", "mega"), ("mega_moe:ranks", "ranks")])
def test_ranks_that_share_a_batch(name, stage, checkpoint, tmp_path):
    """Five tokens a row, so that ranks have unequal shares; and then one token, of which one rank has nothing. What is
    asked of the prompt comes first, since heaps are as large as the first call."""
    ids = tokens(5)[:1]
    words = dict(inputs=ids, max_new_tokens=3, do_sample=False)
    model = alone(checkpoint)
    expected, written = train(model, ids), model.generate(**words)

    def work(rank: int) -> tuple[dict[str, Tensor], Tensor, str]:
        model = load(checkpoint, name, TENSOR_PARALLEL)
        assert {w.to_local().shape[0] for w in model.model.layers[0].mlp.experts.parameters()} == {4 // W}
        return train(model, ids), model.generate(**words), what(model.double(), ids)

    for got, its, said in on_ranks(W, work, tmp_path):
        assert_close(got, expected)
        assert torch.equal(its, written)
        assert f'stage "{stage}" computes in fp32' in said  # so it was that one


def test_ranks_with_batches_of_their_own(checkpoint, tmp_path):
    """Under FSDP a gradient is that of the mean of the ranks' losses."""
    ids = tokens(4)
    expected = train(alone(checkpoint), ids)  # as many tokens in each row, so this is their mean

    def work(rank: int) -> dict[str, Tensor]:
        return train(load(checkpoint, "mega_moe", SHARDED), ids[rank : rank + 1])

    for rank, got in enumerate(on_ranks(W, work, tmp_path)):
        assert_close(got, expected | dict(logits=expected["logits"][rank : rank + 1]))


def test_its_own_ways_run_our_experts(checkpoint, tmp_path):
    """transformers brings the rows, and moe computes each rank's experts."""
    ids = tokens(5)[:1]
    expected = train(alone(checkpoint), ids)

    def work(rank: int) -> list[dict[str, Tensor]]:
        seen = []
        for own in ("all_reduce", "all_to_all"):
            model = load(checkpoint, own, TENSOR_PARALLEL)
            model.set_experts_implementation("mega_moe")
            seen.append(train(model, ids))
        return seen

    for seen in on_ranks(W, work, tmp_path):
        for got in seen:
            assert_close(got, expected)


@pytest.mark.parametrize("max_tokens", [None, 3])
def test_a_larger_batch_later_needs_max_tokens(max_tokens, checkpoint, tmp_path):
    """A rank's share of two tokens is one, and of six three."""
    short, long = tokens(2)[:1], tokens(6)[:1]
    expected = alone(checkpoint)(long).logits

    def work(rank: int) -> list[str] | Tensor:
        ours.register(max_tokens=max_tokens)
        model = load(checkpoint, "mega_moe", TENSOR_PARALLEL)
        model(short)
        if max_tokens:
            return model(long).logits.detach()
        with pytest.raises(ValueError, match="heaps were made at its first call, for 1 tokens") as caught:
            model(long)
        return caught.value.__notes__

    for got in on_ranks(W, work, tmp_path):
        if max_tokens:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)  # eager adds up in another order
        else:
            assert "register(max_tokens=...)" in got[0]


def test_refused_when_the_model_is_loaded(checkpoint, tmp_path):
    said = on_ranks(W, lambda rank: what(load, checkpoint, "mega_moe", TENSOR_PARALLEL, hidden_act="gelu"), tmp_path)
    assert all(each.startswith("ValueError: Qwen3MoeExperts: their activation is not silu") for each in said)
