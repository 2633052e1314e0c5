"""Heaps with one process a rank: each reaches all, all or none are made, and who fails says so to the others."""

import ctypes
import gc
import multiprocessing
import os
import signal
import time
import weakref
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import DEVICE, on_cpu
from forked import no_fork_warning, on_ranks, what

from mega_moe import processes
from mega_moe.processes import KEPT, ShmHeaps, SymmetricHeaps, heaps_for, refuse
from mega_moe.shapes import Problem
from mega_moe.symmetric import LIMIT, OWNER, Memory, heaps_of, view_of, what_happened

pytestmark = no_fork_warning

CPU = torch.device("cpu")


def memory(heaps: processes.ProcessHeaps, T: int = 3, parts: int = 1, **changes) -> Memory:
    """What a call of this rank with T tokens works on, for a small layer."""
    p = Problem(T, H=8, I=4, E=4 * heaps.ranks, K=2, dtype=torch.float32, device="cpu").at(**changes)
    return heaps.memory(p.at(tokens_per_rank=(T,), **heaps.facts(p.K)), torch.float32, parts, CPU)


def at(address: int, size: int) -> bytes:
    """What a kernel finds there."""
    return ctypes.string_at(int(address), size)


def mappings() -> list[str]:
    """Of heaps, in this process."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "mega_moe" in line]


def files() -> list[str]:
    """Of heaps, that this process has open."""
    links = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
    return [os.readlink(link) for link in links if os.path.lexists(link) and "mega_moe" in os.readlink(link)]


# Each rank reaches all heaps.


def write_and_read(group: dist.ProcessGroup | None = None) -> ShmHeaps:
    """Each rank writes into its own heap, into a place of its own in every heap, and reads what the others wrote. The
    heaps, closed."""
    heaps = ShmHeaps(group, max_tokens=5, timeout_s=20)
    W, rank = heaps.ranks, heaps.first
    assert (W, rank, heaps.here) == (dist.get_world_size(group), dist.get_rank(group), 1)
    m = memory(heaps)
    views = m.layout.views()
    assert m.heaps.shape == (1, m.layout.bytes) and m.first == rank and m.token_start.tolist() == [0, 3]
    assert m.addresses[rank] == m.own == m.heaps.data_ptr()
    assert not any(m.view(rank, name).any() for name in ("call", "flags", "rows_arrived"))
    assert m.view(rank, "page").nonzero().flatten().tolist() == ([OWNER] if rank else []) + [LIMIT]
    assert m.view(rank, "page")[LIMIT] == 20 * 10**9
    assert m.view(rank, "slots").isnan().all() and (m.view(rank, "row_start") == -1).all()
    dist.barrier(group)  # all have seen what a new heap holds

    m.view(rank, "x").fill_(rank + 0.5)
    for address in m.addresses.tolist():
        ctypes.c_int32.from_address(address + views["flags"].offset + 4 * rank).value = 7 + rank
    dist.barrier(group)
    for peer, address in enumerate(m.addresses.tolist()):
        size = m.view(rank, "x").nbytes
        assert at(address + views["x"].offset, size) == torch.full_like(m.view(rank, "x"), peer + 0.5).numpy().tobytes()
    assert m.view(rank, "flags").tolist() == [7 + peer for peer in range(W)]

    again, other = memory(heaps, T=0), memory(heaps, parts=2)
    assert again.addresses is m.addresses and other.own != m.own
    dist.barrier(group)
    heaps.close()
    assert "closed" in what(memory, heaps)
    return heaps


@on_cpu
@pytest.mark.parametrize("W", [1, 2, 4])
def test_each_rank_reaches_all_heaps_and_nothing_is_left(W, tmp_path, capfd):
    def work(rank: int) -> tuple[list[str], list[str]]:
        closed = write_and_read()
        gc.collect()  # what was raised holds frames, and these hold tensors
        assert closed.closed
        return mappings(), files()

    before = os.listdir("/dev/shm")
    assert on_ranks(W, work, tmp_path) == [([], [])] * W
    assert os.listdir("/dev/shm") == before
    assert "mega_moe" not in (err := capfd.readouterr().err) and "Warning" not in err and "leaked" not in err


@on_cpu
def test_a_group_need_not_be_the_world(tmp_path):
    """A rank's number is that in its group. Two groups at once, then one that leaves a rank out, then the world."""

    def work(rank: int) -> None:
        for groups in ([[0, 2], [3, 1]], [[2, 0, 1]]):
            made = [dist.new_group(ranks) for ranks in groups]
            for ranks, group in zip(groups, made, strict=True):
                if rank in ranks:
                    write_and_read(group)
                else:
                    assert "member" in what(ShmHeaps, group, 5)
        write_and_read()

    assert on_ranks(4, work, tmp_path) == [None] * 4


def test_without_a_process_group():
    assert "init_process_group" in what(ShmHeaps, None, 5)
    assert "init_process_group" in what(heaps_for, None, "cpu", 5)
    assert "ProcessGroup" in what(ShmHeaps, 5, 5)


def test_another_process_with_the_same_numbers_is_not_taken_for_a_rank():
    """As from another host, or another container."""
    file = os.memfd_create("mega_moe-another")
    try:
        reason = what(processes.file_of, 3, os.getpid(), file, "mega_moe-wanted")
        assert "rank 3" in reason and 'heap="all_to_all"' in reason
        assert processes.file_of(3, os.getpid(), file, "mega_moe-another")
    finally:
        os.close(file)
    assert 'heap="all_to_all"' in what(processes.file_of, 3, os.getpid(), file, "mega_moe-another")


# All ranks make them, or none.


@on_cpu
def test_a_rank_that_cannot_reach_another_keeps_all_from_going_on(tmp_path):
    def work(rank: int) -> tuple[str, list[str]]:
        heaps = ShmHeaps(None, 5, timeout_s=20)
        if rank == 1:
            processes.file_of = lambda *_, **__: f"/proc/self/fd/{10**6}"  # this process is nobody else's
        raised = what(memory, heaps)
        dist.barrier()  # or rank 0 may find that rank 1 is gone, and say so
        gc.collect()
        return raised, mappings() + files()

    (zero, left), one, two = on_ranks(3, work, tmp_path)
    assert zero.startswith("RuntimeError: rank 1: ") and zero.removeprefix("RuntimeError: rank 1: ") in one[0]
    assert two == (zero, []) and left == one[1] == []


DIFFERENT = {
    "H": ("H", dict(H=16)),
    "K": ("K", dict(K=1)),
    "E": ("E", dict(E=30)),
    "dtype": ("dtype", dict(dtype=torch.bfloat16)),
    "parts": ("parts", dict(parts=3)),
}


@on_cpu
def test_ranks_that_come_with_different_layers_all_raise(tmp_path):
    """And can go on with the same heaps, whatever they had before."""

    def work(rank: int) -> list[str]:
        heaps = ShmHeaps(None, 5, timeout_s=20)
        raised = []
        for _, changes in DIFFERENT.values():
            raised.append(what(memory, heaps, **(changes if rank == 1 else {})))
        memory(heaps)
        return raised

    first, *others = on_ranks(3, work, tmp_path)
    assert others == [first] * 2
    for (name, _), message in zip(DIFFERENT.values(), first, strict=True):
        assert f" {name} is " in message and message.count(" is ") == 1, message
        assert "on rank 0, 2, " in message and message.endswith("on rank 1")


@on_cpu
def test_ranks_that_make_different_heaps_all_raise(tmp_path):
    def work(rank: int) -> list[str]:
        at_rank_1 = lambda special, usual: special if rank == 1 else usual
        made = [
            what(ShmHeaps, None, at_rank_1(6, 5)),
            what(ShmHeaps, None, 5, max_rows=at_rank_1(10, None)),
            what(at_rank_1(SymmetricHeaps, ShmHeaps), None, 5),
            what(ShmHeaps, None, at_rank_1(0, 5)),
            what(ShmHeaps, None, 5, max_rows=at_rank_1(0, 5)),
            what(ShmHeaps, None, 5, timeout_s=at_rank_1(-1, 5)),
        ]
        heaps = SymmetricHeaps(None, 5, timeout_s=20)  # takes no memory yet
        return [*made, what(memory, heaps)]

    ranks = on_ranks(2, work, tmp_path)
    for messages in ranks:
        assert "max_tokens is 5 on rank 0, 6 on rank 1" in messages[0]
        assert "max_rows is None on rank 0, 10 on rank 1" in messages[1]
        assert "heap is ShmHeaps on rank 0, SymmetricHeaps on rank 1" in messages[2]
        assert "CUDA" in messages[6]
    for name, told, raised in zip(("max_tokens", "max_rows", "timeout_s"), ranks[0][3:6], ranks[1][3:6], strict=True):
        assert raised.startswith(f"ValueError: {name} must be")
        assert told.startswith("RuntimeError: rank 1: ") and raised.removeprefix("ValueError: ") in told


# Who fails says so, or is missed.


@on_cpu
def test_a_rank_that_died_is_missed_and_leaves_nothing(tmp_path, capfd):
    def work(rank: int) -> tuple:
        heaps = ShmHeaps(None, 5, timeout_s=1)
        m = memory(heaps)
        m.view(rank, "x").fill_(rank + 0.5)
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        missed = what(memory, heaps, parts=2)
        x = at(m.addresses[1] + m.layout.views()["x"].offset, 4)  # nobody's address becomes wrong
        return missed, time.monotonic() - begun, x

    before = os.listdir("/dev/shm")
    zero, _, two = on_ranks(3, work, tmp_path, killed=(1,))
    assert os.listdir("/dev/shm") == before
    assert "leaked" not in capfd.readouterr().err
    for message, waited, x in (zero, two):
        assert "rank 1 of 3 did not come" in message and 1 <= waited < 4
        assert x == torch.tensor(1.5).numpy().tobytes()


@on_cpu
def test_who_comes_too_late_hears_that_nobody_waits(tmp_path):
    def work(rank: int) -> str:
        heaps = ShmHeaps(None, 5, timeout_s=0.5)
        if rank == 1:
            time.sleep(1.5)
        raised = what(memory, heaps)
        dist.barrier()
        memory(heaps)  # together again
        return raised

    early, late = on_ranks(2, work, tmp_path)
    assert "rank 1 of 2 did not come" in early and "rank 0 no longer waits" in late


@on_cpu
def test_refusing_ends_the_making_of_heaps(tmp_path):
    def work(rank: int) -> str:
        heaps = ShmHeaps(None, 5, timeout_s=20)
        if rank == 1:
            heaps.refuse("T = 6")
        return what(memory, heaps)

    assert on_ranks(3, work, tmp_path) == ["RuntimeError: rank 1: T = 6"] * 3


@on_cpu
def test_refusing_is_written_into_all_pages(tmp_path):
    """So what does not fit is cut, and the heaps of no rank can be used again."""
    said = "topk_ids has the wrong shape " + "ß" * 500

    def work(rank: int) -> list[str]:
        heaps = ShmHeaps(None, 5, timeout_s=20)
        memory(heaps)
        with torch.inference_mode():
            memory(heaps, parts=2)
        heaps.raise_if_failed()
        heaps.check()
        dist.barrier()
        if rank == 1:
            heaps.refuse(said)
        dist.barrier()
        assert len(heaps.pages) == 2
        raised = [what(heaps.raise_if_failed), what(heaps.check)]
        dist.barrier()
        heaps.refuse("what others have said, or who raises it")  # the first message stays
        raised.append(what(heaps.raise_if_failed))
        heaps.close()
        heaps.refuse("nobody is left to hear it")
        return raised

    one, *others = on_ranks(3, work, tmp_path)
    assert others == [one] * 2 and one == one[:1] * 3
    assert one[0].startswith("RuntimeError: rank 1: topk_ids has the wrong shape ßß") and "ß" * 200 not in one[0]


# Heaps of a group, made when they are needed.


@on_cpu
def test_a_group_gets_heaps_at_its_first_call(tmp_path):
    def work(rank: int) -> list[str]:
        T = [0, 5, 3][rank]
        heaps = heaps_for(None, "cpu", T)
        assert isinstance(heaps, ShmHeaps) and heaps.max_tokens == 5 and heaps_of(heaps.key) is heaps
        assert heaps_for(dist.group.WORLD, "cpu", 4) is heaps and heaps_for(None, "cpu", 0) is heaps
        memory(heaps)
        dist.barrier()
        if rank == 2:
            raised = what(heaps_for, None, "cpu", 6)
            dist.barrier()
        else:
            dist.barrier()
            raised = what(heaps.raise_if_failed)
        heaps.close()
        again = heaps_for(None, "cpu", 2 * T)
        assert again is not heaps and again.max_tokens == 10
        again.raise_if_failed()
        memory(again)
        return raised

    zero, one, two = on_ranks(3, work, tmp_path)
    assert two.startswith("ValueError: T = 6") and "heap=ShmHeaps(group, max_tokens)" in two
    assert zero == one and zero.startswith("RuntimeError: rank 2: T = 6, but this group's heaps")


@on_cpu
def test_heaps_for_no_tokens_at_all(tmp_path):
    assert on_ranks(2, lambda rank: heaps_for(None, "cpu", 0).max_tokens, tmp_path) == [1, 1]


@on_cpu
def test_a_group_that_is_gone_takes_its_heaps_along(tmp_path):
    def work(rank: int) -> tuple:
        group = dist.new_group()
        heaps = weakref.ref(heaps_for(group, "cpu", 3))
        memory(heaps())
        assert mappings() and group in KEPT
        dist.barrier(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        return heaps(), len(KEPT), mappings()

    assert on_ranks(2, work, tmp_path) == [(None, 0, [])] * 2


@on_cpu
def test_a_rank_can_refuse_where_a_group_has_no_heaps_yet(tmp_path):
    """All others raise what it says, and the next call makes them."""

    def work(rank: int) -> str | None:
        call = partial(heaps_for, None, "cpu", 3)
        raised = refuse(None, "x is wrong") if rank == 1 else what(call)
        heaps = call()
        memory(heaps)
        if rank == 1:
            refuse(None, "w_down is wrong")
        dist.barrier()
        return raised, what(heaps.raise_if_failed)

    zero, one, two = on_ranks(3, work, tmp_path)
    assert zero == two and zero[0] == "RuntimeError: rank 1: x is wrong" and one[0] is None
    assert zero[1] == one[1] and zero[1].startswith("RuntimeError: rank 1: w_down is wrong")


# GPUs.


def told(host: str = "a", gpu: str = "0", out_of_reach: tuple = (), may_share: bool = False) -> dict:
    return dict(host=host, gpu=gpu, out_of_reach=out_of_reach, may_share=may_share)


def test_gpus_that_cannot_reach_each_other_are_refused():
    processes.refuse_unreachable([told(gpu="0"), told(gpu="1", out_of_reach=["2"])])
    several_hosts = what(processes.refuse_unreachable, [told(), told(host="b")])
    assert "several hosts (a, b)" in several_hosts and 'heap="all_to_all"' in several_hosts
    no_access = what(processes.refuse_unreachable, [told(gpu="0"), told(gpu="1", out_of_reach=["0"])])
    assert "rank 1 cannot reach that of rank 0" in no_access and 'heap="all_to_all"' in no_access


def test_ranks_on_one_gpu_are_told_what_to_do():
    """Who forgets to choose a GPU has all ranks on the first. The variable must be set in all of them."""
    processes.refuse_unreachable([told(may_share=True), told(may_share=True)])
    for one, other in ((False, False), (True, False)):
        said = what(processes.refuse_unreachable, [told("a", "1"), told(may_share=one), told(may_share=other)])
        assert "ranks 1, 2 are on one GPU" in said and f"{processes.SHARED_GPU}=1" in said and "set_device" in said


on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="torch's symmetric memory takes CUDA tensors alone")


def reach_on_gpu(rank: int, W: int, folder: str) -> None:
    """What one of the ranks does, all of them on one GPU."""
    store = dist.FileStore(f"{folder}/store", W)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=W, timeout=timedelta(seconds=60))
    device = torch.device("cuda", torch.cuda.current_device())
    heaps = SymmetricHeaps(None, 5, timeout_s=20)
    p = Problem(3, H=2**20, I=4, E=4 * W, K=2, dtype=torch.float32, device="cuda", tokens_per_rank=(3,))
    m = heaps.memory(p.at(**heaps.facts(p.K)), torch.float32, 1, device)
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert m.addresses[rank] == m.own == m.heaps.data_ptr() and m.addresses.device == device
    assert not any(m.view(rank, name).any() for name in ("call", "flags", "rows_arrived"))
    assert m.view(rank, "page")[LIMIT] == 20 * 10**9
    m.view(rank, "x").fill_(rank + 0.5)
    heaps.check()
    dist.barrier()

    ((common, *_),) = heaps._kept.values()
    for peer, heap in enumerate(common.heaps):
        assert heap.data_ptr() == m.addresses[peer]
        assert (view_of(heap, m.layout, "x") == peer + 0.5).all()
    dist.barrier()
    if rank == W - 1:
        heaps.refuse("x is wrong")
        torch.cuda.synchronize()
    dist.barrier()
    assert what_happened(m.view(rank, "page").cpu()) == f"rank {W - 1}: x is wrong"

    free, size = torch.cuda.mem_get_info()[0], m.layout.bytes
    dist.barrier()
    del m, heap, common
    heaps.close()
    gc.collect()
    dist.barrier()
    assert torch.cuda.mem_get_info()[0] - free >= W * size
    dist.destroy_process_group()


@on_gpu
@pytest.mark.parametrize("W", [1, 2])
def test_symmetric_heaps_on_one_gpu(W, tmp_path, monkeypatch):
    """Made, reached, refused and given back, through a real process group."""
    monkeypatch.setenv(processes.SHARED_GPU, "1")
    context = multiprocessing.get_context("spawn")  # a fork cannot use a GPU that its parent has used
    ranks = [context.Process(target=reach_on_gpu, args=(rank, W, str(tmp_path))) for rank in range(W)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [0] * W  # what went wrong stands in the captured output
