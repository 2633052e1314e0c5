"""Rows between ranks over torch.distributed, where no rank can look into another's memory.

Heaps (symmetric.py) take ranks that read and write each other's memory, which ends at the edge of an NVLink domain. A
collective goes further: all_to_all sends a block of rows from every rank to every rank, over any network and on a CPU.
It is also what a layer without fusion pays, so it is what heaps are measured against. Its price is that blocks must be
known before they travel: ranks tell each other how many rows they send, and the host waits to read it.

A rank plans its own tokens over the experts of all ranks (kernels/plan.py). In the order of that plan the rows for one
rank's experts stand side by side: they are the block. Blocks arrive ordered by home rank, then expert, and are turned
to expert, home rank: then the rows of an expert stand in the order (home rank, token, slot), in which one rank that
held all tokens would have them, and every sum over rows is the same to the bit. Results go the same way back.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .shapes import Plan
from .symmetric import MOST_TOKENS, Heaps


class AllToAll(Heaps):
    """A process group, where heaps would stand if its ranks reached each other's memory. It keeps nothing."""

    def __init__(self, group: ProcessGroup):
        W = dist.get_world_size(group)
        super().__init__(W, dist.get_rank(group), 1, max_tokens=MOST_TOKENS // W, timeout_s=0)
        self._group = ref(group)  # whoever made it keeps it

    @property
    def group(self) -> ProcessGroup:
        """The group. Raises RuntimeError where it is gone."""
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this call is gone: keep it until backward is done")
        return group

    def facts(self, K: int) -> dict[str, int]:
        """There is no limit to the rows of a rank: they are counted before they travel."""
        return dict(ranks=self.ranks, max_rows=0)


BY_GROUP: WeakKeyDictionary[ProcessGroup, AllToAll] = WeakKeyDictionary()


def all_to_all(group: ProcessGroup) -> AllToAll:
    """What stands for the group, the same each time. Raises ValueError where this process is not one of its ranks."""
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a rank of the group: call moe in those that are")
    if group not in BY_GROUP:
        BY_GROUP[group] = AllToAll(group)
    return BY_GROUP[group]


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
    """

    group: ProcessGroup
    sent: list[int]
    received: list[int]
    row_start: Tensor
    arrival_of_row: Tensor

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


def agree(plan: Plan, group: ProcessGroup) -> Exchange:
    """Tell each rank of the group how many rows its experts get from here, and hear the same from all.

    plan: that of this rank's own tokens over the E experts of all W ranks, of which rank r owns r*L .. r*L+L-1 where
    L = E / W. Ranks may have any number of tokens, also none, but call this alike: it is collective. It waits for the
    device, to read 2W numbers on the host: no graph can capture it.
    """
    W, E = dist.get_world_size(group), len(plan.row_start) - 1
    counts = plan.row_start.diff().view(W, E // W)  # of this rank's rows, for each rank and expert there
    counts_here = torch.empty_like(counts)  # from each rank, for each expert here
    dist.all_to_all_single(counts_here, counts, group=group)
    sent, received = torch.stack((counts.sum(1), counts_here.sum(1))).tolist()
    return Exchange(group, sent, received, *by_expert(counts_here, sum(received)))


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
