"""Heaps of ranks that are processes: each makes its own rank's, and reaches those of all others.

`ShmHeaps` are memory of one host that processes share, for CPU tensors and interpreted kernels; `SymmetricHeaps` are
memory of GPUs that reach each other's. Beside that difference they are alike: heaps are made *collectively*. Each rank
makes its own, all tell each other on the host where theirs is, each maps all of them, and nobody goes on before all
have. What the host says goes through the store of the process group, for three reasons: a rank that cannot go on can
say why, instead of leaving the others to wait; those who wait do so for a time of their own, and then know who is
missing; and no collective of the group stands in between, whatever its backend.

A rank whose arguments are wrong enters no barrier, and its peers would wait for it: it *refuses*, which writes why into
the error pages of all ranks (see symmetric.py), and where peers are still making heaps, into the store.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import PrefixStore, ProcessGroup, Store

from .shapes import Problem
from .symmetric import (
    CLAIMED,
    MESSAGE,
    PAGE_WORDS,
    RANK,
    SAID,
    STATE,
    Heaps,
    Layout,
    Memory,
    is_capturing,
    kept,
    open_pages,
    refuse_in_capture,
    view_of,
)

TIMEOUT_S = 60
MESSAGE_BYTES = (PAGE_WORDS - MESSAGE) * 8
LOOK_S = 0.002  # between looks into the store
ELSEWHERE = 'use heap="all_to_all" with stage="ranks", which needs no memory in common'
SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Torch's variable in the environment: "1" lets several ranks have their memory on one GPU."""


# What ranks say to each other on the host.


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a group meet on the host: each says something, and hears what all have said.

    How often a rank was here is counted in the store, so the count lives as long as what it counts.

    Attributes:
        store: of the group, under a prefix.
        rank: of this process.
        ranks: W.
        timeout_s: how long to wait for the others, in seconds; 0: for ever.
    """

    store: Store
    rank: int
    ranks: int
    timeout_s: float

    def share(self, step: Callable[[], object]) -> list:
        """Do this process's step, and say what it returns, which JSON can carry: what the steps of all ranks returned.

        Collective. If the step raises, that is raised here, and in the others RuntimeError with its message. Raises
        RuntimeError as well when somebody does not come, or refuses.
        """
        number = self.store.add(f"times {self.rank} came", 1)
        try:
            said = step()
        except Exception as error:
            self.say(number, wrong=f"rank {self.rank}: {error}")
            raise
        self.say(number, said=said)
        heard = [self.hear(number, rank) for rank in range(self.ranks)]
        if number > 1:
            self.store.delete_key(f"{number - 1} {self.rank}")  # who has come again, has heard the last time's
        for word in heard:
            if "wrong" in word:
                raise RuntimeError(word["wrong"])
        return [word["said"] for word in heard]

    def say(self, number: int, **word: object) -> None:
        """Leave a word for the others."""
        self.store.set(f"{number} {self.rank}", json.dumps(word))

    def hear(self, number: int, rank: int) -> dict:
        """The word that a rank has left for this time. Waits for it."""
        key, begun, look = f"{number} {rank}", time.monotonic(), LOOK_S
        while not self.store.check([key]):
            self.raise_if_refused()
            if self.timeout_s and time.monotonic() - begun > self.timeout_s:
                self.give_up(number)
            time.sleep(look)
            look = min(2 * look, 0.1)
        return json.loads(self.store.get(key))

    def give_up(self, number: int) -> None:
        """Raise RuntimeError that names who did not come, and say so to them, should they still come."""
        missing = [str(rank) for rank in range(self.ranks) if not self.store.check([f"{number} {rank}"])]
        if missing:
            late = (
                f"rank {', '.join(missing)} of {self.ranks} did not come to make heaps within {self.timeout_s} s: it "
                "died, raised, or makes other calls. All ranks must make the same calls in the same order"
            )
            self.say(number, wrong=f"rank {self.rank} no longer waits: {late}")
            raise RuntimeError(late)

    def refuse(self, message: str) -> None:
        """Say why this rank does not come, now or later."""
        self.store.set("refused", message)

    def raise_if_refused(self) -> None:
        """Raise RuntimeError with what a rank has said that does not come."""
        if self.store.check(["refused"]):
            raise RuntimeError(self.store.get("refused").decode())


def meeting_of(group: ProcessGroup, timeout_s: float) -> Meeting:
    """Where all processes of a group meet."""
    return Meeting(PrefixStore("mega_moe", group.get_group_store()), group.rank(), group.size(), timeout_s)


def member(group: ProcessGroup | None) -> ProcessGroup:
    """The group; for None the default one."""
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise RuntimeError("there is no process group: call torch.distributed.init_process_group first")
    if not isinstance(group, ProcessGroup):
        outside = " (this process is not one of its ranks)" if group is dist.GroupMember.NON_GROUP_MEMBER else ""
        raise TypeError(f"group must be a ProcessGroup of which this process is a member, not {group!r}{outside}")
    return group


def refuse_differences(facts: list[dict[str, object]]) -> None:
    """Raise RuntimeError, naming what differs and where, unless all ranks have said the same.

    Example: [{"H": 64, "K": 2}, {"H": 64, "K": 1}] -> "... K is 2 on rank 0, 1 on rank 1"
    """
    differing = []
    for name in facts[0]:
        ranks_with = {}
        for rank, of_rank in enumerate(facts):
            ranks_with.setdefault(of_rank[name], []).append(str(rank))
        if len(ranks_with) > 1:
            values = (f"{value} on rank {', '.join(ranks)}" for value, ranks in ranks_with.items())
            differing.append(f"{name} is {', '.join(values)}")
    if differing:
        raise RuntimeError(f"ranks must come with the same layer and the same heaps, but {'; '.join(differing)}")


# Memory that processes have in common.


class Common(Protocol):
    """One heap a rank, of which this process makes its own and reaches all.

    Attributes:
        heaps: W tensors (bytes,) uint8, own and peers', each as this process sees it, once they are reached.
        addresses: W, where they begin.
    """

    heaps: list[Tensor]
    addresses: list[int]

    def make(self, layout: Layout, device: torch.device) -> tuple[Tensor, dict]:
        """This rank's heap, and what others need to reach it. What does not count holds anything."""

    def reach(self, told: list[dict], rank: int, group_name: str) -> None:
        """Map the heaps of all ranks. Collective, and all have made theirs."""


class HostMemory:
    """Memory of a host, as files without a name: a process opens another's by the number that it has there.

    Such memory is gone with the last process that maps it, however that ends: nothing has to be removed, and nothing
    can be left behind. Nor is it bounded by the size of /dev/shm, which containers keep small.
    """

    def make(self, layout: Layout, device: torch.device) -> tuple[Tensor, dict]:
        if device.type != "cpu":
            raise ValueError(f"ShmHeaps are for CPU tensors, not for {device}: use SymmetricHeaps(group, max_tokens)")
        name = f"mega_moe-{uuid4()}"
        file = os.memfd_create(name)
        finalize(self, os.close, file)
        os.ftruncate(file, layout.bytes)
        self.own = mapped(f"/proc/self/fd/{file}", layout.bytes)
        self.own.fill_(255)  # NaN, or -1: memory comes zeroed, and would hide who reads what nobody wrote
        return self.own, dict(process=os.getpid(), file=file, name=name)

    def reach(self, told: list[dict], rank: int, group_name: str) -> None:
        self.heaps = [
            self.own if peer == rank else mapped(file_of(peer, **of_peer), len(self.own))
            for peer, of_peer in enumerate(told)
        ]
        self.addresses = [heap.data_ptr() for heap in self.heaps]


def mapped(path: str, size: int) -> Tensor:
    """(size,) uint8: the content of a file. The mapping ends with the last tensor that shows it."""
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def file_of(rank: int, process: int, file: int, name: str) -> str:
    """The path of what another process has open under a number. Raises RuntimeError unless that has this name: on
    another host, or in another container, the same numbers may mean something else."""
    path = f"/proc/{process}/fd/{file}"
    try:
        if name in os.readlink(path):
            return path
        reason = "its process is not on this host, or not in this container"
    except OSError as error:
        reason = error.strerror
    raise RuntimeError(f"the memory of rank {rank} cannot be reached ({reason}): {ELSEWHERE}")


class GpuMemory:
    """Memory of a GPU which the others of one host reach over NVLink or PCIe: torch's symmetric memory.

    It is not taken from torch's pool for such memory, as torch.distributed._symmetric_memory.empty does: in a pool a
    tensor may begin inside of what processes exchange, and what is freed stays with the pool.
    """

    def make(self, layout: Layout, device: torch.device) -> tuple[Tensor, dict]:
        if device.type != "cuda":
            raise ValueError(f"SymmetricHeaps are for CUDA tensors, not for {device}: use ShmHeaps(group, max_tokens)")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.own = _SymmetricMemory.empty_strided_p2p((layout.bytes,), (1,), torch.uint8, device)
        return self.own, dict(
            host=socket.gethostname(),
            gpu=gpu_of(device),
            out_of_reach=out_of_reach(device),
            may_share=os.environ.get(SHARED_GPU) == "1",
        )

    def reach(self, told: list[dict], rank: int, group_name: str) -> None:
        refuse_unreachable(told)
        try:
            self.handle = _SymmetricMemory.rendezvous(self.own, group_name)
        except RuntimeError as error:
            raise RuntimeError(f"GPUs cannot reach each other's memory ({error}): {ELSEWHERE}") from error
        self.heaps = [
            self.own if peer == rank else self.handle.get_buffer(peer, self.own.shape, torch.uint8)
            for peer in range(len(told))
        ]
        self.addresses = list(self.handle.buffer_ptrs)


def gpu_of(device: torch.device | int) -> str:
    """What a GPU is called in every process, whichever of them it sees."""
    return str(torch.cuda.get_device_properties(device).uuid)


def out_of_reach(device: torch.device) -> list[str]:
    """The GPUs that this process sees and whose memory this one cannot reach."""
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    return [gpu_of(other) for other in others if not torch.cuda.can_device_access_peer(device, other)]


def refuse_unreachable(told: list[dict]) -> None:
    """Raise RuntimeError where torch would not join the memory of all ranks: of each what `GpuMemory.make` tells."""
    hosts = sorted({of_rank["host"] for of_rank in told})
    if len(hosts) > 1:
        raise RuntimeError(f"the ranks of this group are on several hosts ({', '.join(hosts)}): {ELSEWHERE}")
    for rank, of_rank in enumerate(told):
        for peer, of_peer in enumerate(told):
            if of_peer["gpu"] in of_rank["out_of_reach"]:
                raise RuntimeError(f"the GPU of rank {rank} cannot reach that of rank {peer}: {ELSEWHERE}")
    ranks_on: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(told):
        ranks_on.setdefault(of_rank["gpu"], []).append(rank)
    for several in ranks_on.values():
        if len(several) > 1 and not all(told[rank]["may_share"] for rank in several):
            raise RuntimeError(
                f"ranks {', '.join(map(str, several))} are on one GPU: give each its own, with "
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything else; or, to see whether a '
                f"program is right and not how fast, set {SHARED_GPU}=1 in the environment of all ranks"
            )


# Heaps.


class ProcessHeaps(Heaps):
    """What `ShmHeaps` and `SymmetricHeaps` have in common: all but where the memory is."""

    common: type[Common]

    def __init__(
        self,
        group: ProcessGroup | None,
        max_tokens: int,
        max_rows: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ):
        group = member(group)
        name = str(uuid4())

        def prepare() -> dict:
            Heaps.__init__(self, group.size(), group.rank(), 1, max_tokens, timeout_s)
            whole = isinstance(max_rows, int) and not isinstance(max_rows, bool)
            if max_rows is not None and (not whole or max_rows < 1):
                raise ValueError(f"max_rows must be a positive whole number, not {max_rows}")
            facts = dict(heap=type(self).__name__, max_tokens=max_tokens, max_rows=max_rows, timeout_s=timeout_s)
            return dict(facts=facts, name=name)

        told = meeting_of(group, timeout_s).share(prepare)
        refuse_differences([of_rank["facts"] for of_rank in told])
        self.max_rows, self.group_name = max_rows, group.group_name
        self.members = dist.get_process_group_ranks(group)
        prefix = f"mega_moe heaps {told[0]['name']}"
        self.meeting = Meeting(PrefixStore(prefix, group.get_group_store()), self.first, self.ranks, timeout_s)
        self._kept: dict[tuple[Layout, torch.device], tuple[Common, Tensor, Tensor]] = {}

    def facts(self, K: int) -> dict[str, int]:
        max_rows = self.max_rows or self.ranks * self.max_tokens * K
        return dict(ranks=self.ranks, max_rows=max_rows, max_tokens=self.max_tokens)

    def memory(self, problem: Problem, weights_dtype: torch.dtype, parts: int, device: torch.device) -> Memory:
        """The heaps for this kind of layer. At its first call collective: all ranks come with the same layer, or all
        raise RuntimeError. Raises RuntimeError also when closed, where a rank does not come or refuses, and where heaps
        would have to be made while a graph is captured."""
        self.raise_if_unusable(problem)
        p = problem
        layout = Layout(self.ranks, self.max_tokens, p.H, p.K, p.E, p.dtype, weights_dtype, parts, p.token_scales)
        if (layout, device) not in self._kept:
            refuse_in_capture(device)
            try:
                with torch.inference_mode(False):  # or nobody could write a message into it outside of that mode
                    self._kept[layout, device] = kept(lambda: self.make(layout, device), device)
            except Exception:
                self.dead = True  # on all ranks: each raises here, or has refused
                raise
        common, addresses, own = self._kept[layout, device]
        token_start = self.token_start(p.tokens_per_rank, device)
        return Memory(layout, common.heaps[self.first][None], addresses, own, token_start, self.first)

    def make(self, layout: Layout, device: torch.device) -> tuple[Common, Tensor, Tensor]:
        """The heaps of all ranks for a kind of layer; where they begin, (W,) int64 on the device; where this rank's
        does, (1,)."""
        self.meeting.raise_if_refused()
        common, pages = self.common(), []

        def make_own() -> dict:
            heap, way = common.make(layout, device)
            heap[: layout.views()["row_start"].offset].zero_()
            pages.append(open_pages(heap[None], layout, self.first, self.timeout_s))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # before any peer is told of it
            return dict(layer={name: str(fact) for name, fact in vars(layout).items()}, way=way)

        told = self.meeting.share(make_own)
        refuse_differences([of_rank["layer"] for of_rank in told])
        ways = [of_rank["way"] for of_rank in told]
        self.meeting.share(lambda: common.reach(ways, self.first, self.group_name))
        self.pages += pages
        addresses = torch.tensor(common.addresses, dtype=torch.int64, device=device)
        return common, addresses, addresses[self.first : self.first + 1].clone()

    def refuse(self, message: str) -> None:
        """Tell all ranks why this one does not take part in a call, before it raises: whoever waits for it ends with
        this message. These heaps are dead then, on all ranks; if they are already, this tells nobody anything. A page
        holds the beginning of a long message."""
        self.dead = True
        if self.closed or any(page[STATE] for page in self.pages):
            return
        message = f"rank {self.first}: {message}"
        self.meeting.refuse(message)
        for page in self.pages:
            write_message(page, message, self.first)
        for (layout, device), (common, *_) in self._kept.items():
            if not is_capturing(device):  # nothing runs then, so nobody waits
                for heap in common.heaps:
                    write_message(view_of(heap, layout, "page"), message, self.first)

    def close(self) -> None:
        """Give the memory back; no other rank has to do so at the same time. What was saved for backward cannot be used
        after it, and graphs that were captured over it cannot be replayed."""
        super().close()
        self._kept.clear()


def write_message(page: Tensor, message: str, rank: int) -> None:
    """Write what a rank has said into an error page; last, that it has, since whoever waits looks at that."""
    text = message.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
    page[CLAIMED].fill_(1)
    page[RANK].fill_(rank)
    page[MESSAGE:].copy_(torch.frombuffer(bytearray(text), dtype=torch.int64))
    page[STATE].fill_(SAID)


def refuse_another_group(group: ProcessGroup, heaps: ProcessHeaps) -> None:
    """Raise ValueError for heaps that were made for other ranks than the group's: as many may be in another group that
    this process is in as well, and a layer would be computed with these."""
    if group.group_name != heaps.group_name and dist.get_process_group_ranks(group) != heaps.members:
        raise ValueError(
            f"the group has the ranks {dist.get_process_group_ranks(group)}, and the heaps were made for "
            f"{heaps.members}: pass the group's own, or leave group= out"
        )


class ShmHeaps(ProcessHeaps):
    """The heaps of W ranks, each a process on this host with tensors on the CPU, for kernels that are interpreted.

    heap = ShmHeaps(group, max_tokens=64), made by all ranks of the group at once, then `moe(..., heap=heap)` with this
    rank's tokens and its experts' weights. Memory is taken at the first call for each kind of layer (sizes and dtypes),
    collectively, and kept until `close()`. Keep a reference to the heaps until backward is done.

    group: any ProcessGroup, None for the default one. max_tokens: the most tokens that a rank may have in a call.
    max_rows: the most rows that a rank may receive; None: W * max_tokens * K, all that there can be (K routes a token).
    timeout_s: how long a rank waits for another before it gives up, in seconds; 0: for ever.

    Raises ValueError for a size that is not a positive whole number (in the other ranks that becomes a RuntimeError),
    RuntimeError when ranks come with different sizes, when one does not come, or where there is no process group.
    """

    common = HostMemory


class SymmetricHeaps(ProcessHeaps):
    """The heaps of W ranks, each a process with a GPU of its own, which reach each other's memory on one host.

    Otherwise as `ShmHeaps`, with the same arguments and errors; and at the first call for a kind of layer RuntimeError
    where GPUs do not reach each other, or are on several hosts. The memory is torch's symmetric memory.

    NVLink multicast is not used. Since torch sets it up wherever it finds it, TORCH_SYMM_MEM_DISABLE_MULTICAST=1 is put
    into this process's environment when memory is first taken, unless the variable is set. Several ranks on one GPU,
    which is for tests, need TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 there; RuntimeError without it.
    """

    common = GpuMemory


# Heaps of a group, made when they are needed.

KEPT: WeakKeyDictionary[ProcessGroup, dict[str, ProcessHeaps]] = WeakKeyDictionary()


def heaps_for(group: ProcessGroup | None, device_type: str, max_tokens: int) -> ProcessHeaps:
    """The heaps that a group has for a type of device, "cuda" or "cpu".

    At the first call, and the first after they were closed or have failed, they are made, collectively: for the most
    tokens that any rank brings to it, at least one. Raises ValueError for more tokens later, after telling the other
    ranks.
    """
    group = member(group)
    of_group = KEPT.setdefault(group, {})
    heaps = of_group.get(device_type)
    kind = SymmetricHeaps if device_type == "cuda" else ShmHeaps
    if heaps is not None and heaps.dead:
        heaps.close()  # every rank has raised, or will, and makes new ones at its next call
    if heaps is None or heaps.closed:
        most = max(meeting_of(group, TIMEOUT_S).share(lambda: max_tokens))
        heaps = of_group[device_type] = kind(group, max(most, 1))
        heaps.remedy = "the next call of all ranks makes new ones"
    if max_tokens > heaps.max_tokens:
        message = (
            f"T = {max_tokens}, but this group's heaps were made at its first call, for {heaps.max_tokens} tokens, the "
            f"most of a rank then: pass heap={kind.__name__}(group, max_tokens), made once on all ranks"
        )
        heaps.refuse(message)
        raise ValueError(message)
    return heaps


def heaps_made_for(group: ProcessGroup) -> ProcessHeaps:
    """The heaps that a group has already. Raises RuntimeError where it has none, or several."""
    made = [heaps for heaps in KEPT.get(group, {}).values() if not heaps.closed]
    if len(made) != 1:
        raise RuntimeError("call moe once with this group before compiling it, or pass heap=, made for the group")
    return made[0]


def refuse(group: ProcessGroup | None, message: str) -> None:
    """As `ProcessHeaps.refuse`, on the heaps of a group that `heaps_for` has made; where it has made none, or they are
    dead, the other ranks are about to make them at this call, and hear it there."""
    group = member(group)
    heaps = [heaps for heaps in KEPT.get(group, {}).values() if not heaps.closed and not heaps.dead]
    for each in heaps:
        each.refuse(message)
    if not heaps:
        meeting = meeting_of(group, TIMEOUT_S)
        number = meeting.store.add(f"times {meeting.rank} came", 1)
        meeting.say(number, wrong=f"rank {meeting.rank}: {message}")
