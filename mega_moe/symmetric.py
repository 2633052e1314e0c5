"""Where bytes live that ranks share: one *heap* a rank, all laid out alike.

A rank that wants something of another's looks at the same place of that rank's heap: its address is the heap's, plus
an offset that all ranks agree on. Who writes what, and when, is fixed once a call by one barrier (kernels/meet.py):
each rank *publishes* its tokens and where they want to go, and *arrives* at all ranks; behind the barrier peers read
what was published, and write results into slots that their owners read last.

What is published lies twice, by the parity of the call's number: a peer may still read the last call's until it arrives
at the next barrier. Slots lie once: a peer writes them behind the barrier alone, and their owner enters it when it has
read those of the call before.

`LocalHeaps` holds the heaps of all ranks in one process, on one device.
"""

from dataclasses import dataclass
from itertools import count
from math import prod
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .shapes import Problem

ALIGNMENT = 256  # bytes, of every view


@dataclass(frozen=True)
class View:
    """A tensor in every heap: where it begins, in bytes, and what it looks like."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """What stands where in a heap; the same in the heaps of all ranks.

    Attributes:
        W: ranks.
        max_tokens: the most tokens of a rank.
        H: hidden size.
        K: routes per token.
        E: experts, of all ranks.
        dtype: of x and dy.
        weights_dtype: of topk_weights.
        parts: of how many parts the gradient of a route's weight is the sum.
    """

    W: int
    max_tokens: int
    H: int
    K: int
    E: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    parts: int

    def views(self) -> dict[str, View]:
        """By name, in their order:

        call: (1,), how many times this rank has met the others.
        flags: (W,), how often each rank has arrived here.
        rows_arrived: (1,), rows that have arrived in the slots in this call.
        row_start, token_of_row, slot_of_row: (2, ...), the plan of the rank's own tokens over the experts of all ranks.
        x, dy: (2, max_tokens, H).   topk_weights: (2, max_tokens, K).
        slots: (max_tokens, K, H).   dweights: (max_tokens, K, parts) fp32, of the gradient of each route's weight.
        """
        T, i32 = self.max_tokens, torch.int32
        shapes = dict(
            call=((1,), i32),
            flags=((self.W,), i32),
            rows_arrived=((1,), i32),
            row_start=((2, self.E + 1), i32),
            token_of_row=((2, T * self.K), i32),
            slot_of_row=((2, T * self.K), i32),
            x=((2, T, self.H), self.dtype),
            dy=((2, T, self.H), self.dtype),
            topk_weights=((2, T, self.K), self.weights_dtype),
            slots=((T, self.K, self.H), self.dtype),
            dweights=((T, self.K, self.parts), torch.float32),
        )
        views, offset = {}, 0
        for name, (shape, dtype) in shapes.items():
            views[name] = View(offset, shape, dtype)
            offset += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return views

    @property
    def bytes(self) -> int:
        """Of one heap."""
        last = list(self.views().values())[-1]
        return last.offset + -(-prod(last.shape) * last.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def offsets(self) -> dict[str, int]:
        """Where each view begins, in bytes."""
        return {name: view.offset for name, view in self.views().items()}


@dataclass(frozen=True)
class Memory:
    """The heaps that the ranks of one process can reach, for one call.

    Attributes:
        layout: what stands where in each of them.
        heaps: (W, bytes) uint8.
        addresses: (W,) int64, where each heap begins, on the device.
        token_start: (W+1,) int32, where each rank's tokens begin among those of this process, on the device.
    """

    layout: Layout
    heaps: Tensor
    addresses: Tensor
    token_start: Tensor

    def view(self, rank: int, name: str) -> Tensor:
        """A rank's tensor of this name."""
        view = self.layout.views()[name]
        size = prod(view.shape) * view.dtype.itemsize
        return self.heaps[rank, view.offset : view.offset + size].view(view.dtype).view(view.shape)


def fresh_heaps(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """(W, bytes) uint8, in which only what counts is zeroed, and where each begins, (W,) int64."""
    heaps = torch.empty(layout.W, layout.bytes, dtype=torch.uint8, device=device)
    heaps[:, : layout.views()["row_start"].offset].zero_()
    addresses = torch.arange(layout.W, dtype=torch.int64, device=device) * heaps.stride(0) + heaps.data_ptr()
    return heaps, addresses


def heap_of_one_rank(problem: Problem, weights_dtype: torch.dtype, parts: int, device: torch.device) -> Memory:
    """A heap for one call of one rank that has no peers."""
    p = problem
    layout = Layout(1, max(p.T, 1), p.H, p.K, p.E, p.dtype, weights_dtype, parts)
    token_start = torch.arange(2, dtype=torch.int32, device=device) * p.T
    return Memory(layout, *fresh_heaps(layout, device), token_start)


class LocalHeaps:
    """The heaps of W ranks in one process and on one device: all ranks work in the same launches.

    With heap = LocalHeaps(ranks=4, max_tokens=64), `moe(..., heap=heap, tokens_per_rank=(17, 0, 40, 7))` takes the
    tokens of the ranks one after another and the weights of all experts; rank r owns experts r*L .. r*L+L-1, where
    L = E / W. Keep a reference to it until backward is done, and use it from one stream. Memory is taken at the first
    call for each kind of layer (sizes and dtypes), and kept until `close()`, which ends captured graphs as well.

    ranks: W. max_tokens: the most tokens that a rank may have in a call.

    Raises ValueError unless both are positive whole numbers, and their product fits into 31 bits.
    """

    def __init__(self, ranks: int, max_tokens: int):
        for name, size in dict(ranks=ranks, max_tokens=max_tokens).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be a positive whole number, not {size}")
        if ranks * max_tokens > MOST_TOKENS:
            raise ValueError(f"ranks * max_tokens = {ranks * max_tokens} tokens, more than {MOST_TOKENS}: give fewer")
        self.ranks, self.max_tokens = ranks, max_tokens
        self.key = next(KEYS)
        self.closed = False
        self._kept: dict[tuple, tuple[Tensor, Tensor]] = {}
        self._starts: dict[tuple, Tensor] = {}
        self._captured: list[Tensor] = []  # starts that graphs hold the addresses of
        OPEN[self.key] = self

    def __reduce__(self):
        raise TypeError("heaps hold addresses and cannot be copied: make new ones with LocalHeaps(ranks, max_tokens)")

    def memory(self, problem: Problem, weights_dtype: torch.dtype, parts: int, device: torch.device) -> Memory:
        """The heaps for this kind of layer. Raises RuntimeError when closed, and where they would have to be made
        while a graph is captured."""
        if self.closed:
            raise RuntimeError("these heaps are closed: make new LocalHeaps(ranks, max_tokens), and begin with forward")
        p = problem
        if len(p.tokens_per_rank) != self.ranks or max(p.tokens_per_rank) > self.max_tokens:
            raise RuntimeError(f"{p.tokens_per_rank} tokens do not fit {self.ranks} ranks of up to {self.max_tokens}")
        layout = Layout(self.ranks, self.max_tokens, p.H, p.K, p.E, p.dtype, weights_dtype, parts)
        if (layout, device) not in self._kept:
            refuse_in_capture(device)
            self._kept[layout, device] = fresh_heaps(layout, device)
        return Memory(layout, *self._kept[layout, device], self.token_start(p.tokens_per_rank, device))

    def token_start(self, tokens_per_rank: tuple[int, ...], device: torch.device) -> Tensor:
        """(W+1,) int32 on the device: where each rank's tokens begin. Made once for each distribution, number by
        number, since a copy from the host would wait for the device."""
        made = self._starts.pop((tokens_per_rank, device), None)
        if made is None:
            refuse_in_capture(device)
            starts = [sum(tokens_per_rank[:rank]) for rank in range(self.ranks + 1)]
            if len(self._starts) == MOST_STARTS:
                self._starts.pop(next(iter(self._starts)))  # the one not used for longest
            made = torch.empty(self.ranks + 1, dtype=torch.int32, device=device)
            for at, start in zip(made, starts):
                at.fill_(start)
        self._starts[tokens_per_rank, device] = made
        if is_capturing(device):
            self._captured.append(made)
        return made

    def close(self) -> None:
        """Give the memory back. What was saved for backward cannot be used after it."""
        self.closed = True
        self._kept.clear()
        self._starts.clear()
        self._captured.clear()


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_in_capture(device: torch.device) -> None:
    """What is made while a graph is captured is not there before it is replayed, and yet it would be kept."""
    if is_capturing(device):
        raise RuntimeError("call moe once with this heap, these sizes and these tokens_per_rank before capturing them")


def shares(T: int, W: int) -> tuple[int, ...]:
    """tokens_per_rank of T tokens that W ranks share as evenly as whole numbers allow: of 7 and 3, (3, 2, 2)."""
    return tuple(T // W + (rank < T % W) for rank in range(W))


MOST_TOKENS = 2**31 - 1  # tokens of all ranks are numbered in int32
KEYS = count(1)
OPEN: WeakValueDictionary[int, LocalHeaps] = WeakValueDictionary()
MOST_STARTS = 64


def heaps_of(key: int) -> LocalHeaps:
    """The heaps with this key, which stands for them where only numbers can be passed."""
    heaps = OPEN.get(key)
    if heaps is None:
        raise RuntimeError("the heaps of this call are gone: keep a reference to them until backward is done")
    return heaps
