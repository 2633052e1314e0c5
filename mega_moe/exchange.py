"""Rows between ranks over torch.distributed, where no rank can look into another's memory.

Heaps (symmetric.py) take ranks that read and write each other's memory, which ends at the edge of an NVLink domain. A
collective goes further: all_to_all sends a block of rows from every rank to every rank, over any network and on a CPU.
It is also what a layer without fusion pays, so it is what heaps are measured against. Its price is that blocks must be
known before they travel: ranks tell each other how many rows they send, and the host waits to read it.

With these counts goes a *header*, which says what a rank comes for: with which layer, and forward, or back through
which call. Whoever reads that another came for something else, or was called with wrong arguments, raises before any
row travels; all read the same, so all raise, and the group goes on with the next call. For this the first thing that
ranks exchange must have one size, whatever each of them came for: the header and as many counts as any layer of this
group has needed so far.

A rank plans its own tokens over the experts of all ranks (kernels/plan.py). In the order of that plan the rows for one
rank's experts stand side by side: they are the block. Blocks arrive ordered by home rank, then expert, and are turned
to expert, home rank: then the rows of an expert stand in the order (home rank, token, slot), in which one rank that
held all tokens would have them, and every sum over rows is the same to the bit. Results go the same way back.
"""

from dataclasses import dataclass
from struct import pack, unpack
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .shapes import PRECISIONS, Plan
from .symmetric import FORWARD, MOST_TOKENS, Heaps, way

REFUSED = -1  # in the place of FORWARD, or the number of a call
DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)  # by the number that stands for them in a header
MESSAGE_BYTES = 1024


@dataclass(frozen=True)
class Call:
    """What all ranks must have in common that come to an exchange. What is 0 or None is not said.

    Attributes:
        E: experts, of all ranks.
        H: hidden size.
        I: intermediate size.
        K: routes per token.
        dtype: of the rows.
        weights_dtype: of topk_weights.
        swiglu_limit: the clamp before SwiGLU.
        precision: of products.
        of_call: FORWARD, or the number of the forward that ranks go back through.
    """

    E: int
    H: int = 0
    I: int = 0
    K: int = 0
    dtype: torch.dtype | None = None
    weights_dtype: torch.dtype | None = None
    swiglu_limit: float | None = None
    precision: str = PRECISIONS[0]
    of_call: int = FORWARD

    def header(self) -> list[int]:
        """As numbers of 32 bits, which a collective carries. The first is of_call, which is not REFUSED."""
        limit = 0.0 if self.swiglu_limit is None else self.swiglu_limit  # a limit is positive
        dtypes = (DTYPES.index(dtype) for dtype in (self.dtype, self.weights_dtype))
        of_limit, precision = unpack("i", pack("f", limit))[0], PRECISIONS.index(self.precision)
        return [self.of_call, self.E, self.H, self.I, self.K, *dtypes, of_limit, precision]

    @classmethod
    def of(cls, header: list[int]) -> "Call":
        """The inverse of `header`."""
        of_call, *sizes, dtype, weights_dtype, limit, precision = header
        limit = unpack("f", pack("i", limit))[0] or None
        return cls(*sizes, DTYPES[dtype], DTYPES[weights_dtype], limit, PRECISIONS[precision], of_call)

    def words(self) -> list[str]:
        """How a rank came, fact by fact."""
        *facts, (_, of_call) = vars(self).items()
        return [f"for {way(of_call)}", *(f"with {name} = {fact}" for name, fact in facts)]


HEADER = len(Call(E=0).header())  # numbers


class AllToAll(Heaps):
    """A process group, where heaps would stand if its ranks reached each other's memory.

    Attributes:
        device: where the tensors of its calls are.
        room: for counts beside a header, of rows for the experts of a rank. It grows when all ranks have come with a
            layer of more experts, and so is the same on all of them.
        calls: how many forwards have met. It counts where all ranks have met, and so is the same on all of them.
    """

    def __init__(self, group: ProcessGroup, device: torch.device):
        W = dist.get_world_size(group)
        super().__init__(W, dist.get_rank(group), 1, max_tokens=MOST_TOKENS // W, timeout_s=0)
        self._group = ref(group)  # whoever made it keeps it
        self.device, self.room, self.calls = device, 0, 0

    @property
    def group(self) -> ProcessGroup:
        """The group. Raises RuntimeError where it is gone."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this call is gone: keep it until backward is done")
        return group

    def facts(self, K: int) -> dict[str, int]:
        """There is no limit to the rows of a rank: they are counted before they travel."""
        return dict(ranks=self.ranks)

    def exchange(
        self, header: list[int], counts: Tensor, of_call: Tensor | None = None
    ) -> tuple[list[list[int]], Tensor]:
        """Send each rank the header, and of counts (W, up to room) its own row. Collective, the same size on
        all ranks at all times. Waits for the device, once. of_call: (1,) int32, for the header's first number.

        Returns for each rank its header, how many rows go there and how many come from there; and the counts that have
        arrived, shaped as those that went. Unless all headers are alike, only they mean anything.
        """
        columns = slice(HEADER, HEADER + counts.shape[1])
        numbers = torch.empty(self.ranks, HEADER + self.room, dtype=torch.int32, device=self.device)
        # From pinned memory a copy does not wait for the device.
        own = torch.tensor(header, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        numbers[:, :HEADER] = own.to(self.device, non_blocking=True)
        if of_call is not None:
            numbers[:, :1] = of_call
        numbers[:, columns] = counts
        arrived = torch.empty_like(numbers)
        dist.all_to_all_single(arrived, numbers, group=self.group)
        counts_here = arrived[:, columns]
        sent, received = counts.sum(1, keepdim=True), counts_here.sum(1, keepdim=True)
        return torch.cat((arrived[:, :HEADER], sent, received), 1).tolist(), counts_here

    def messages(self, own: str) -> list[str]:
        """What each rank has to say, of a long message the beginning. Collective."""
        text = bytearray(own.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"))
        said = torch.frombuffer(text, dtype=torch.uint8).to(self.device).repeat(self.ranks, 1)
        heard = torch.empty_like(said)
        dist.all_to_all_single(heard, said, group=self.group)
        return [bytes(text).partition(b"\0")[0].decode(errors="ignore") for text in heard.tolist()]

    def meet(self, call: Call, counts: Tensor, of_call: Tensor | None) -> tuple[list[int], list[int], Tensor]:
        """As `exchange`, between ranks that come in the same call: how many rows go to each rank, how many come from
        each, and the counts that have arrived. Raises RuntimeError, on all ranks, where they do not."""
        told, counts_here = self.exchange(call.header(), counts, of_call)
        headers = [of_rank[:HEADER] for of_rank in told]
        if any(header != headers[0] for header in headers):
            self.raise_difference(headers)
        *_, sent, received = zip(*told, strict=True)
        return list(sent), list(received), counts_here

    def raise_difference(self, headers: list[list[int]]) -> None:
        """Raise RuntimeError: what ranks say that refuse; without any, how ranks differ. Collective."""
        if refused := [rank for rank, (of_call, *_) in enumerate(headers) if of_call == REFUSED]:
            messages = self.messages("")
            raise RuntimeError("; ".join(f"rank {rank}: {messages[rank]}" for rank in refused))
        raise RuntimeError(difference([Call.of(header) for header in headers]))

    def refuse(self, message: str) -> None:
        """Come to the exchange that the other ranks wait in, and tell them why this one does not take part in the call,
        before it raises: they raise this message. Collective with their call, and so waits for it."""
        self.exchange([REFUSED] * HEADER, torch.empty(self.ranks, 0, dtype=torch.int32, device=self.device))
        self.messages(message)


BY_GROUP: WeakKeyDictionary[ProcessGroup, dict[torch.device, AllToAll]] = WeakKeyDictionary()


def all_to_all(group: ProcessGroup, device: torch.device) -> AllToAll:
    """What stands for the group in calls with tensors on this device, the same each time. Raises ValueError where this
    process is not one of its ranks."""
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a rank of the group: call moe in those that are")
    of_group = BY_GROUP.setdefault(group, {})
    if device not in of_group:
        of_group[device] = AllToAll(group, device)
    return of_group[device]


def difference(calls: list[Call]) -> str:
    """How the calls differ in which ranks have come.

    Example: forward on ranks 0 and 2, backward of call 3 on rank 1 ->
        "rank 1 came for backward of call 3 where rank 0, 2 came for forward: all ranks must make the same calls ..."
    """
    ranks_with: dict[Call, list[str]] = {}
    for rank, call in enumerate(calls):
        ranks_with.setdefault(call, []).append(str(rank))
    (first, its), *others = ranks_with.items()
    told = []
    for call, ranks in others:
        here, there = zip(*(pair for pair in zip(call.words(), first.words()) if pair[0] != pair[1]))
        came = f"rank {', '.join(ranks)} came {', '.join(here)} where rank {', '.join(its)} came {', '.join(there)}"
        told.append(came)
    return f"{'; '.join(told)}: all ranks must make the same calls in the same order"


@dataclass(frozen=True)
class Exchange:
    """What the ranks of a group have agreed to send each other in one direction of one call.

    Rows that this rank sends are those of its own live routes, in the order of its plan. Rows that its experts receive
    are ordered (expert, home rank, token, slot); there are `R = sum(received)` of them, exactly.

    Attributes:
        group: the ranks, one process each.
        sent: how many rows go to each rank, W numbers.
        received: how many come from each rank, W numbers.
        row_start: (L+1,) int32; the received rows of this rank's expert e are `row_start[e] : row_start[e+1]`.
        arrival_of_row: (R,) int64; as which of all that arrived here, home after home, row r came.
        of_call: (1,) int32, which call of the group forward was.
    """

    group: ProcessGroup
    sent: list[int]
    received: list[int]
    row_start: Tensor
    arrival_of_row: Tensor
    of_call: Tensor

    def dispatch(self, rows: Tensor) -> Tensor:
        """Send rows (sum(sent), ...) to the ranks of their experts: (R, ...), the rows of the experts here.

        Any dtype that the group's backend sends: gloo and NCCL take fp32, bf16, fp16, int32 and int64. Collective.
        """
        arrived = rows.new_empty(sum(self.received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), self.received, self.sent, group=self.group)
        return arrived.index_select(0, self.arrival_of_row)

    def give_back(self, rows: Tensor) -> Tensor:
        """The inverse: send rows (R, ...) home: (sum(sent), ...), in the order of this rank's plan. Collective."""
        by_home = rows.new_empty(rows.shape).index_copy_(0, self.arrival_of_row, rows)
        returned = rows.new_empty(sum(self.sent), *rows.shape[1:])
        dist.all_to_all_single(returned, by_home, self.sent, self.received, group=self.group)
        return returned


def agree(plan: Plan, group: ProcessGroup, call: Call | None = None, of_call: Tensor | None = None) -> Exchange:
    """Tell each rank of the group how many rows its experts get from here, and hear the same from all.

    plan: that of this rank's own tokens over the E experts of all W ranks, of which rank r owns r*L .. r*L+L-1 where L
    = E / W. Ranks may have any number of tokens, also none, but call this alike: it is collective. call: what they must
    come with beside E; None: nothing. of_call: backward's is that of its forward's Exchange. It waits for the device,
    to read the headers and 2W numbers on the host, so no graph can capture it; where L is larger than in any call of
    this group before, twice.

    Raises RuntimeError on all ranks, and leaves the group as it was, where ranks have come in different calls, or one
    has refused its arguments (see `mega_moe.moe`).
    """
    E, peers = len(plan.row_start) - 1, all_to_all(group, plan.row_start.device)
    call = call or Call(E)
    counts = plan.row_start.diff().view(peers.ranks, E // peers.ranks)  # of this rank's rows, for each rank and expert
    L = counts.shape[1]
    if L > peers.room:
        peers.meet(call, counts[:, :0], of_call)  # to make room together, all must have come with this L
        peers.room = L
    sent, received, counts_here = peers.meet(call, counts, of_call)  # counts_here: from each rank, for each expert
    if of_call is None:
        peers.calls += 1
        of_call = plan.row_start.new_full((1,), peers.calls)
    return Exchange(group, sent, received, *by_expert(counts_here, sum(received)), of_call)


def by_expert(counts: Tensor, R: int) -> tuple[Tensor, Tensor]:
    """The row_start and arrival_of_row of an `Exchange`. counts: (W, L) rows from each rank for each expert here; R:
    their sum, known on the host.

    Example: rank 0 sends one row to expert 0 and two to expert 1, rank 1 one to expert 0: counts = [[1, 2], [1, 0]].
        arrived as      0    1    2    3     expert 0 of rank 0, expert 1 twice of rank 0, expert 0 of rank 1
        arrival_of_row = [0, 3, 1, 2]        row_start = [0, 2, 4]
    """
    rows_of_block = counts.T.flatten()  # of each (expert, home): in the order in which rows stand
    first_row = rows_of_block.cumsum(0) - rows_of_block
    first_arrival = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).T.flatten()
    moved = (first_arrival - first_row).repeat_interleave(rows_of_block, output_size=R)
    row_start = torch.cat((counts.new_zeros(1), counts.sum(0).cumsum(0)))
    return row_start.int(), torch.arange(R, device=counts.device) + moved
