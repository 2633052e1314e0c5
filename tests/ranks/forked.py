"""Ranks that are processes: forks of this one, which share all that is imported and start in milliseconds; and what
each of them holds of a layer."""

import gc
import multiprocessing
import signal
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from interpreter import wait_politely
from torch import Tensor

from mega_moe.shapes import Grads, Inputs

FORK = multiprocessing.get_context("fork")
torch.ones(1, requires_grad=True).sum().backward()
# With a CUDA build of torch and no GPU, a process whose first backward is one under FSDP2 has threads for devices from
# then on, which its forks lack: they may not run backward. One whose first is on a CPU has none.

PATIENCE = timedelta(seconds=60)  # of the group's own collectives
MOST_S = 240  # then they hang, and are ended

no_fork_warning = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
"""Of Python, about forking a process that has threads. Those of xdist are not used in the forks."""


def on_ranks(W: int, work: Callable[[int], Any], folder: Path, killed: Collection[int] = ()) -> list:
    """What work(rank) returns in each of W processes, which are the ranks of the default group, over gloo. `killed`
    are those that end by SIGKILL, and return None; any other end is an error, told in the captured output."""

    def process(rank: int) -> None:
        store = dist.FileStore(f"{folder}/store", W)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=W, timeout=PATIENCE)
        wait_politely()
        torch.save(work(rank), folder / f"{rank}.pt")
        dist.destroy_process_group()

    ranks = [FORK.Process(target=process, args=(rank,)) for rank in range(W)]
    gc.freeze()  # a process group that is garbage here is not collected there: it would wait for threads left behind
    for each in ranks:
        each.start()
    gc.unfreeze()
    last = time.monotonic() + MOST_S
    for each in ranks:
        each.join(max(last - time.monotonic(), 0))
    ended = [each.exitcode for each in ranks]
    for each in ranks:
        each.kill()
        each.join()
    assert ended == [-signal.SIGKILL if rank in killed else 0 for rank in range(W)]
    return [None if rank in killed else torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(W)]


def what(call: Callable, *args, **kwargs) -> str:
    """What a call raises."""
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        call(*args, **kwargs)
    return f"{caught.type.__name__}: {caught.value}"


# A layer over ranks.


def share(inputs: Inputs, dy: Tensor, tokens_per_rank: tuple[int, ...], rank: int) -> tuple[Inputs, Tensor]:
    """What a rank holds of a layer, and of its dy."""
    L, start = len(inputs.w_down) // len(tokens_per_rank), sum(tokens_per_rank[:rank])
    tokens, experts = slice(start, start + tokens_per_rank[rank]), slice(rank * L, rank * L + L)
    of_tokens = {name: getattr(inputs, name)[tokens] for name in ("x", "topk_ids", "topk_weights")}
    of_experts = {name: getattr(inputs, name)[experts] for name in ("w_gate_up", "w_down")}
    return Inputs(**of_tokens, **of_experts), dy[tokens]


def together(results: list[tuple[Tensor, Grads]]) -> tuple[Tensor, Grads]:
    """What all ranks have, one after another."""
    y = torch.cat([y for y, _ in results])
    return y, Grads(*(torch.cat(its) for its in zip(*(vars(grads).values() for _, grads in results))))
