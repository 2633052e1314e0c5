"""MoE under FSDP2: experts are split over ranks (EP), and every parameter is sharded over the ranks that share it.

FSDP averages gradients over the ranks of its mesh. That is right for the router, of which every rank has a gradient
from its own tokens. Experts are different: an expert's gradient is a sum over the tokens of all ranks of its group when
FSDP first sees it, and the mesh over which it is still to be summed leaves these ranks out. An average over that mesh
would be too large, by the number of ranks in a group. So sums of experts are divided by the number of all ranks, as an
average of the router is.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ..module import MoE


def shard(
    moe: MoE, mesh: DeviceMesh, ep_mesh: DeviceMesh, *, mp_policy: MixedPrecisionPolicy | None = None, **options: Any
) -> MoE:
    """Shard a layer over all ranks of a mesh, in place: a rank keeps its share of each of its experts' tensors and of
    the router, gathers them for forward and backward, and gets its share of their gradients.

    After it every gradient is the mean over all ranks of what each rank's own loss gives; so with a loss that is a mean
    over a rank's tokens, and as many tokens on each rank, one step is that of one process with all of the tokens. Call
    it when the weights are loaded, and before an optimizer is made. Then shard what is around the layer by
    `fully_shard(block, mesh=mesh)`, which leaves the layer as it is.

    Args:
        moe: a layer whose group is that of ep_mesh.
        mesh: all ranks, (ranks that have the same experts, ranks of a group), with names:
            `init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "ep"))`. The first may be 1.
        ep_mesh: of a group, mesh["ep"].
        mp_policy: as for fully_shard. Inputs of the experts are not cast, since that would round the router weights:
            where param_dtype is given, x must have it.
        options: others of fully_shard, for router and experts alike.

    Returns:
        The layer. Its parameters are DTensors over mesh: (E, ...) of the experts, sharded on experts over "ep" and then
        over "dp"; and (E, H) of the router, sharded over "ep". So torch.nn.utils.clip_grad_norm_ and distributed
        checkpoints see whole tensors.

    Raises:
        ValueError: a mesh that has not two named dimensions, an ep_mesh that is not its last one, a layer of another
            group; gradients reduced in fp16 where "dp" is 1 (FSDP would divide them twice).
    """
    names = mesh.mesh_dim_names
    if names is None or mesh.ndim != 2 or ep_mesh.mesh_dim_names != names[1:]:
        raise ValueError(
            "mesh must have two named dimensions and ep_mesh be the last of them, as mesh['ep'] of "
            f'init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "ep")), not {ep_mesh} of {mesh}'
        )
    if moe.group is None or dist.get_process_group_ranks(moe.group) != ep_mesh.mesh.tolist():
        raise ValueError("the layer must be one of this group: MoE(..., group=ep_mesh.get_group())")
    dp_mesh = mesh[names[0]]
    mp_policy = mp_policy or MixedPrecisionPolicy()
    reduced_in = mp_policy.reduce_dtype or mp_policy.param_dtype or moe.experts.down_proj.dtype
    if dp_mesh.size() == 1 and reduced_in == torch.float16:
        raise ValueError("gradients cannot be reduced in fp16 here: use MixedPrecisionPolicy(reduce_dtype=float32)")

    for name, w in list(moe.experts.named_parameters()):
        whole = DTensor.from_local(w.detach(), ep_mesh, [Shard(0)], run_check=False)
        setattr(moe.experts, name, nn.Parameter(whole, w.requires_grad))
    fully_shard(moe.gate, mesh=mesh, mp_policy=mp_policy, **options)
    moe.gate.set_force_sum_reduction_for_comms(True)  # and divide: gloo knows no other reduction
    fully_shard(moe.experts, mesh=dp_mesh, mp_policy=replace(mp_policy, cast_forward_inputs=False), **options)
    moe.experts.set_gradient_divide_factor(mesh.size())
    if dp_mesh.size() > 1:  # nothing is reduced over one rank, and FSDP would divide twice
        moe.experts.set_force_sum_reduction_for_comms(True)
    return moe
