"""Where the check runs: GPUs, how they reach each other, and whether heaps can be made."""

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..ladder import device_name
from ..shapes import Problem
from .layers import bits, draw
from .parts import Node, Wrong

BLOCK = 2**26  # bytes to each peer when links are measured


def where(node: Node, group: ProcessGroup) -> tuple[str, dict]:
    """Facts of the machine. heaps: "made", or why they cannot be; bytes_per_s: what a GPU gets of an all_to_all each
    way, None where there is none."""
    devices = node.gather(device_name(node.device.type))
    facts = dict(devices=devices, bytes_per_s=None, nccl=None, out_of_reach=node.gather(out_of_reach(node)))
    if len(set(node.gather(drawn(node)))) > 1:
        raise Wrong(
            "ranks draw different random numbers from one seed: their GPUs are not alike, and the check needs it"
        )
    if node.on_gpu and node.collectives:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        if node.W > 1:
            facts["bytes_per_s"] = all_to_all_rate(node, group)
    facts["heaps"] = heaps(node, group)
    line = f"{node.W} x {devices[0]}"
    if facts["bytes_per_s"]:
        line += f", all_to_all {facts['bytes_per_s'] / 1e9:.0f} GB/s each way (NCCL {facts['nccl']})"
    if facts["heaps"] != "made":
        raise Wrong(f"heaps cannot be made: {facts['heaps']}", line, facts)
    return f"{line}, heaps can be made", facts


def out_of_reach(node: Node) -> list[int]:
    """The GPUs that this process sees and whose memory its own cannot reach."""
    if not node.on_gpu:
        return []
    others = (other for other in range(torch.cuda.device_count()) if other != node.device.index)
    return [other for other in others if not torch.cuda.can_device_access_peer(node.device.index, other)]


def drawn(node: Node) -> int:
    """A number that tells whether a rank draws what the others draw."""
    whole = draw(Problem(0, H=64, I=32, E=8, K=2, device=node.device.type), (64,))
    return int(bits(whole.inputs.x).long().sum() + whole.inputs.topk_ids.sum() + bits(whole.inputs.w_down).long().sum())


def all_to_all_rate(node: Node, group: ProcessGroup, laps: int = 5) -> float:
    """Bytes a second that leave a GPU, and reach it, in an all_to_all of the slowest rank."""
    sent = torch.zeros(node.W * BLOCK, dtype=torch.uint8, device=node.device)
    received = torch.empty_like(sent)
    for _ in range(2):
        dist.all_to_all_single(received, sent, group=group)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    node.meet()
    began.record()
    for _ in range(laps):
        dist.all_to_all_single(received, sent, group=group)
    ended.record()
    torch.cuda.synchronize()
    seconds = max(node.gather(began.elapsed_time(ended))) / 1e3
    return laps * (node.W - 1) * BLOCK / seconds


def heaps(node: Node, group: ProcessGroup) -> str:
    """ "made", or why they cannot be, the same on all ranks."""
    p = Problem(0, H=64, I=32, E=node.W, K=1, device=node.device.type, tokens_per_rank=(0,))
    try:
        with node.heaps(group, 1) as made:
            made.memory(p.at(**made.facts(p.K)), torch.float32, 1, node.device)
        reason = None
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error)
    return next((f"rank {rank}: {why}" for rank, why in enumerate(node.gather(reason)) if why), "made")
