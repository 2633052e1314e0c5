"""TorchTitan's MoE layer over an "ep" mesh with its routed experts computed by moe, held to its own in one process."""

from functools import partial

import pytest
import torch
from cases import on_cpu
from forked import no_fork_warning, on_ranks, what
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

ours = pytest.importorskip("mega_moe.integrations.torchtitan", reason="needs torchtitan 0.3", exc_type=ImportError)
import spmd_types as spmd  # noqa: E402
from torchtitan.distributed import parallel_dims, utils  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter  # noqa: E402
from torchtitan.models.common.moe_sharding import set_moe_sharding_config  # noqa: E402
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher  # noqa: E402

from mega_moe.processes import heaps_made_for  # noqa: E402

pytestmark = [
    on_cpu,  # processes are forked, which a process that has used a GPU does not survive
    no_fork_warning,
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),  # its router asks for fp32, and has it
]

W, E, K, H, I = 2, 4, 2, 16, 8


def config(form: str | None = None, **options) -> MoE.Config:
    """Of a layer over ranks, with one of the overrides or with none."""
    normal = partial(nn.init.normal_, std=0.3)
    changed = MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=H, hidden_dim=I, num_experts=E, param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), normal)
            ),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=E, top_k=K),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=E, gate=Linear.Config(in_features=H, out_features=E, param_init={"weight": normal}), top_k=K
        ),
    )
    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(changed, enable_ep=True, enable_sp=True, expert_param_layout=layout)
    if form == "routed":
        changed.routed_experts = ours.routed_experts(changed.routed_experts, **options)
    if form == "grouped":
        changed.routed_experts.inner_experts = ours.grouped_experts(changed.routed_experts.inner_experts, **options)
    return changed


def layer_of(changed: MoE.Config) -> MoE:
    """With the same weights each time."""
    layer = changed.build()
    torch.manual_seed(0)
    layer.init_states()
    return layer


def train(layer: MoE, ranks: slice) -> dict[str, Tensor]:
    """y of the batches of some ranks, and the gradients of x and of each parameter."""
    torch.manual_seed(1)
    x, dy = torch.randn(2, W, 5, H)[:, ranks]
    x = x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    grads = {name: w.grad.to_local() if isinstance(w, DTensor) else w.grad for name, w in layer.named_parameters()}
    return dict(y=y.detach(), x=x.grad, **grads)


def over_ranks(rank: int, backend: str, form: str, **options) -> dict[str, Tensor]:
    """The same of this rank's batch, with experts over the ranks."""
    utils.set_spmd_backend(backend)
    dims = parallel_dims.ParallelDims(1, W, 1, 1, 1, ep=W, world_size=W, spmd_backend=backend)
    dims.build_mesh()
    layer = layer_of(config(form, **options))
    layer.parallelize(dims)
    got = train(layer, slice(rank, rank + 1))
    if "max_tokens" in options:
        assert heaps_made_for(layer.routed_experts.group).max_tokens == options["max_tokens"]
    return got


def test_over_ranks(tmp_path, monkeypatch):
    """Rows that moe brings, and rows that TorchTitan's dispatcher brings; weights that are DTensors, and shares of
    them. In fp32, which takes what rounds to bf16 out."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda t: t)
    monkeypatch.setattr(parallel_dims, "device_type", "cpu")  # it takes a machine without a GPU for one with CUDA

    def work(rank: int) -> list:
        results = [
            over_ranks(rank, "partial_dtensor", "routed", max_tokens=8),
            over_ranks(rank, "partial_dtensor", "grouped"),
            over_ranks(rank, "spmd_types", "routed", stage="ranks"),
        ]
        return results, what(over_ranks, rank, "spmd_types", "routed", stage="persistent")

    expected = train(layer_of(config()), slice(W))
    on_rank = on_ranks(W, work, tmp_path)
    for refused in on_rank:
        assert 'ValueError: stage "persistent" runs on one rank' in refused[1]
    for results in zip(*(results for results, _ in on_rank)):
        for name, its in expected.items():
            mine = [result[name] for result in results]
            got = sum(mine) if name == "router.gate.weight" else torch.cat(mine)
            assert its.abs().max() > 1e-2, name
            # Not to the bit: TorchTitan's own experts add up in another order.
            torch.testing.assert_close(got, its, rtol=1e-5, atol=1e-5, msg=lambda told, name=name: f"{name}: {told}")
