"""What stands in prime-rl for its Mega MoE, over ranks that are processes, held to all experts in one."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import on_cpu
from forked import no_fork_warning, on_ranks, what
from torch import Tensor
from torch.nn import functional as F

from mega_moe.integrations.prime_rl import MegaMoEExpertCompute
from mega_moe.processes import ShmHeaps

pytestmark = [
    on_cpu,  # processes are forked, which a process that has used a GPU does not survive
    no_fork_warning,
]

W, E, K, H, I = 2, 4, 2, 20, 6
TOKENS = (5, 2)  # of each rank


def train(
    rank: int | None, group: dist.ProcessGroup | None, precision: str
) -> tuple[list[Tensor], MegaMoEExpertCompute, tuple]:
    """y and every gradient, of a rank or (None) of all; what computed it; what it was called with."""
    torch.manual_seed(0)
    experts, tokens = slice(None), slice(None)
    if rank is not None:
        L, start = E // W, sum(TOKENS[:rank])
        experts, tokens = slice(rank * L, rank * L + L), slice(start, start + TOKENS[rank])
    gate_up, down = torch.randn(E, 2 * I, H)[experts].div_(2), torch.randn(E, H, I)[experts].div_(2)
    x, dy = torch.randn(2, sum(TOKENS), H)[:, tokens]
    scores, ids = torch.rand(sum(TOKENS), K)[tokens], torch.rand(sum(TOKENS), E).topk(K).indices[tokens]
    leaves = [t.clone().requires_grad_() for t in (x, scores, gate_up, down)]
    x, scores, gate_up, down = leaves
    silu = SimpleNamespace(apply=lambda gate, up: F.silu(gate) * up)
    module = SimpleNamespace(gate_up_proj=gate_up, down_proj=down, activation=silu)
    max_tokens, stage = sum(TOKENS) - (group is not None), None if group else "mega"
    compute = MegaMoEExpertCompute(module, E, K, group, max_tokens, precision=precision, stage=stage)
    y = compute(module, x, scores, ids)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)], compute, (module, x, scores, ids)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_over_ranks(precision, tmp_path):
    def work(rank: int) -> tuple[list[Tensor], str]:
        results, compute, (module, *routes) = train(rank, dist.group.WORLD, precision)
        none = what(MegaMoEExpertCompute, module, E, K, dist.group.WORLD, 1, precision="mxfp8")
        assert none.endswith("dispatch] precision = 'mxfp8': stage \"mega\" has 'bf16', 'fp8', 'fp8_bwd'")
        one_rank = what(MegaMoEExpertCompute, module, E, K, dist.group.WORLD, 1, stage="persistent")
        assert one_rank == 'ValueError: stage "persistent" runs on one rank: over a group use "ranks" or "mega"'
        heap = compute.options["heap"]
        assert type(heap) is ShmHeaps and heap.max_tokens == sum(TOKENS) - 1
        dist.barrier()  # or what follows would end a backward that still runs
        if rank == 0:  # the other one calls as it should, and hears of it
            routes = [torch.cat([t, t]) for t in routes]
        said = what(lambda: (compute(module, *routes).sum().backward(), heap.check()))
        return results, said

    expected, _, _ = train(None, None, precision)
    on_rank = on_ranks(W, work, tmp_path)
    for its, *mine in zip(expected, *(results for results, _ in on_rank)):
        assert its.abs().max() > 1e-2
        torch.testing.assert_close(torch.cat(mine), its, rtol=0, atol=0)  # to the bit: one process runs the same rung
    for _, said in on_rank:
        assert "x holds 10 tokens, and the heaps max_tokens = 6 of a rank" in said
