"""Sharded by FSDP2, a layer over ranks takes the steps of one process that has all of the tokens."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import on_cpu
from forked import no_fork_warning, on_ranks, what
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mega_moe import MoE
from mega_moe.integrations.fsdp import shard

pytestmark = [
    on_cpu,  # processes are forked, which a process that has used a GPU does not survive
    no_fork_warning,
]

H, T = 16, 8
SIZES = dict(hidden_size=H, intermediate_size=16, num_experts=4, top_k=2, norm_topk_prob=True)


def block(**options) -> nn.Sequential:
    """A layer with something dense around it, the same each time."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(H, H, bias=False), MoE(**SIZES, stage="persistent"))
    part = nn.Sequential(nn.Linear(H, H, bias=False), MoE(**SIZES, **options))
    part.load_state_dict(whole.state_dict())
    return part


def mesh_of(dp: int, ep: int) -> DeviceMesh:
    return init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))


def whole(t: Tensor) -> Tensor:
    """All of a tensor, on each rank."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def tokens() -> tuple[Tensor, Tensor]:
    """x, and what y should be."""
    return torch.randn(2, T, H, generator=torch.Generator().manual_seed(1)).unbind()


def five_steps(model: nn.Module, x: Tensor, goal: Tensor) -> dict[str, list[Tensor]]:
    """The first step's gradients, the norm of all at each step, and the weights at the end. The norm is clipped, which
    must not tear the ranks apart."""
    sgd, grads, norms = torch.optim.SGD(model.parameters(), lr=0.5), [], []
    for _ in range(5):
        sgd.zero_grad()
        (model(x) - goal).square().sum(-1).mean().backward()
        grads = grads or [whole(w.grad) for w in model.parameters()]
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        sgd.step()
    return dict(grads=grads, norms=norms, weights=[whole(w) for w in model.parameters()])


@pytest.mark.parametrize("dp, ep", [(1, 1), (1, 2), (1, 4), (2, 2)])
def test_five_steps_are_those_of_one_process(dp, ep, tmp_path):
    """With the same tokens in all: gradients of the mean loss, their norm, and weights."""
    x, goal = tokens()
    expected = five_steps(block(stage="persistent"), x, goal)

    def work(rank: int) -> dict[str, list[Tensor]]:
        mesh, n = mesh_of(dp, ep), T // (dp * ep)
        model = block(group=mesh["ep"].get_group(), heap="all_to_all")
        shard(model[1], mesh, mesh["ep"])
        fully_shard(model, mesh=mesh)
        model.set_force_sum_reduction_for_comms(True)
        assert [w.shape for w in model.parameters()] == [w.shape for w in block().parameters()]
        assert {w.to_local().numel() * dp * ep for w in model[1].experts.parameters()} == {4 * 16 * H, 4 * 32 * H}
        its = slice(rank * n, rank * n + n)
        return five_steps(model, x[its], goal[its])

    for got in on_ranks(dp * ep, work, tmp_path):
        for name, values in expected.items():
            # Not to the bit: gradients are added up over ranks in another order, and divided.
            torch.testing.assert_close(got[name], values, rtol=1e-5, atol=1e-6)


def test_in_mixed_precision_router_weights_stay_exact(tmp_path):
    """Weights are gathered in bf16 and kept, with their gradients, in fp32. The layer alone is a root."""
    x, goal = tokens()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def step(moe: MoE, x: Tensor, goal: Tensor) -> list[Tensor]:
        (moe(x).float() - goal).square().sum(-1).mean().backward()
        return [whole(w.grad) for w in moe.parameters()]

    def work(rank: int) -> list[Tensor]:
        mesh = mesh_of(1, 2)
        moe = shard(block(group=mesh["ep"].get_group())[1], mesh, mesh["ep"], mp_policy=policy)
        its = slice(4 * rank, 4 * rank + 4)
        seen = []
        moe.experts.register_forward_pre_hook(lambda _, args: seen.append([t.dtype for t in args]))
        grads = step(moe, x[its].bfloat16(), goal[its])
        assert seen == [[torch.bfloat16, torch.int64, torch.float32]]
        assert {w.dtype for w in moe.parameters()} == {torch.float32}
        return grads

    one = block(stage="persistent")[1].bfloat16()
    expected = [grad.float() for grad in step(one, x.bfloat16(), goal)]
    for grads in on_ranks(2, work, tmp_path):
        for got, its in zip(grads, expected, strict=True):
            assert got.dtype == torch.float32 and (got - its).norm() < 0.02 * its.norm()


def test_what_is_refused(tmp_path):
    def work(rank: int) -> list[str]:
        mesh = mesh_of(1, 2)
        moe = MoE(**SIZES, group=mesh["ep"].get_group())
        half = MoE(**SIZES, group=mesh["ep"].get_group(), dtype=torch.float16)
        return [
            what(shard, moe, mesh["ep"], mesh["ep"]),
            what(shard, moe, mesh, mesh["dp"]),
            what(shard, MoE(**SIZES), mesh, mesh["ep"]),
            what(shard, half, mesh, mesh["ep"]),
        ]

    for no_dp, wrong_ep, no_group, half in on_ranks(2, work, tmp_path):
        assert "two named dimensions" in no_dp and "two named dimensions" in wrong_ep
        assert "MoE(..., group=ep_mesh.get_group())" in no_group
        assert "MixedPrecisionPolicy(reduce_dtype=" in half


@pytest.mark.parametrize("W", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_page_s_example_prints_the_same_losses_on_any_number_of_ranks(W, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "fsdp2.md").read_text()
    example, printed = re.search(
        r"^```python\n(.*?)^```\n.*?^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    ).groups()

    def work(rank: int) -> str:
        """The program, in a group that is there already."""
        with monkeypatch.context() as inside, redirect_stdout(StringIO()) as out:
            inside.setattr(dist, "init_process_group", lambda *_: None)
            inside.setattr(dist, "destroy_process_group", lambda: None)
            exec(compile(example, "docs/integrations/fsdp2.md", "exec"), {"__name__": "__main__"})
        return out.getvalue()

    assert "".join(on_ranks(W, work, tmp_path)) == printed.replace("ranks: 2", f"ranks: {W}")
