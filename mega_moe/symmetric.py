"""Where bytes live that ranks share: one *heap* a rank, all laid out alike.

A rank that wants something of another's looks at the same place of that rank's heap: its address is the heap's, plus
an offset that all ranks agree on. Who writes what, and when, is fixed once a call by one barrier (kernels/meet.py):
each rank *publishes* its tokens and where they want to go, and *arrives* at all ranks; behind the barrier peers read
what was published, and write results into slots that their owners read last.

What is published lies twice, by the parity of the call's number: a peer may still read the last call's until it arrives
at the next barrier. Slots lie once: a peer writes them behind the barrier alone, and their owner enters it when it has
read those of the call before.

A kernel cannot raise, and the host does not wait for it. So each heap has an *error page*: a program that waits for a
peer too long writes down what it waits for, in the pages of all ranks; whoever waits sees it, ends, and computes NaN.
The host looks at a copy of its page in its own memory before each call and after it, and raises.

`LocalHeaps` holds the heaps of all ranks in one process, on one device; processes.py those of one rank a process.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from math import ceil, prod
from typing import Any
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
        token_scales: how many scales a token has where forward reads it as codes; 0 where it does not.
    """

    W: int
    max_tokens: int
    H: int
    K: int
    E: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    parts: int
    token_scales: int = 0

    def views(self) -> dict[str, View]:
        """By name, in their order:

        call: (1,), how many times this rank has met the others.
        flags: (W,), how often each rank has arrived here.
        rows_arrived: (1,), rows that have arrived in the slots in this call.
        came_for: (2, 2), what this rank comes for: FORWARD, or the number of the forward that it goes back through; and
            a number that stands for what no layout says of the layer.
        page: (64,) int64, the error page; see PAGE.
        row_start, token_of_row, slot_of_row: (2, ...), the plan of the rank's own tokens over the experts of all ranks.
        x, dy: (2, max_tokens, H).   topk_weights: (2, max_tokens, K).
        slots: (max_tokens, K, H).   dweights: (max_tokens, K, parts) fp32, of the gradient of each route's weight.
        x_codes: (2, max_tokens, H) and x_scales: (2, max_tokens, token_scales), x as forward reads it in 8 bits.
        """
        T, i32 = self.max_tokens, torch.int32
        shapes = dict(
            call=((1,), i32),
            flags=((self.W,), i32),
            rows_arrived=((1,), i32),
            came_for=((2, 2), i32),
            page=((PAGE_WORDS,), torch.int64),
            row_start=((2, self.E + 1), i32),
            token_of_row=((2, T * self.K), i32),
            slot_of_row=((2, T * self.K), i32),
            x=((2, T, self.H), self.dtype),
            dy=((2, T, self.H), self.dtype),
            topk_weights=((2, T, self.K), self.weights_dtype),
            slots=((T, self.K, self.H), self.dtype),
            dweights=((T, self.K, self.parts), torch.float32),
        )
        if self.token_scales:
            shapes["x_codes"] = (2, T, self.H), torch.float8_e4m3fn
            shapes["x_scales"] = (2, T, self.token_scales), torch.float32
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
        heaps: (ranks here, bytes) uint8, those of the ranks of this process.
        addresses: (W,) int64, where each rank's heap begins, on the device.
        own: (ranks here,) int64, the same of the ranks of this process.
        token_start: (ranks here + 1,) int32, where each rank's tokens begin among those of this process, on the device.
        first: the first rank of this process.
        of_call: (1,) int32, which call of these heaps forward was; backward brings that of its forward. None where
            heaps last for one call.
    """

    layout: Layout
    heaps: Tensor
    addresses: Tensor
    own: Tensor
    token_start: Tensor
    first: int = 0
    of_call: Tensor | None = None

    def view(self, rank: int, name: str) -> Tensor:
        """A tensor of this name of one of the ranks here."""
        return view_of(self.heaps[rank - self.first], self.layout, name)


def view_of(heap: Tensor, layout: Layout, name: str) -> Tensor:
    """The tensor of this name in a heap (bytes,) uint8."""
    view = layout.views()[name]
    size = prod(view.shape) * view.dtype.itemsize
    return heap[view.offset : view.offset + size].view(view.dtype).view(view.shape)


# The error page.

PAGE_WORDS = 64
STATE, RANK, CALL, SHOWN, EXPECTED, WAITED_FOR, CLAIMED, OWNER, LIMIT, MIRROR = range(10)
MESSAGE = 16
"""Words of an error page. STATE: what happened, one of the words below, 0 for nothing. RANK: who writes it. CALL: its
call. WAITED_FOR: the rank that did not arrive, or -1: rows. EXPECTED, SHOWN: how many arrivals, or rows; or what two
ranks came for. CLAIMED: who may write all this, the first to count here. OWNER: whose page this is. LIMIT: how
long to wait, in nanoseconds; 0: for ever. MIRROR: the address of a copy in the host's memory, 0 without. MESSAGE: of
STATE SAID, up to its first zero, UTF-8."""

TIMED_OUT, TOO_MANY_ROWS, SAID, OUT_OF_STEP, OTHER_LAYER = 1, 2, 3, 4, 5
FORWARD = 0  # in the place of the number of a forward, which counts from 1


def what_happened(page: Tensor) -> str | None:
    """What an error page (64,) int64 on the host says; None if nothing happened."""
    state, rank, call, shown, expected, waited_for, *_ = page.tolist()
    match state:
        case 0:
            return None
        case 1 if waited_for >= 0:
            return (
                f"rank {rank} waited in vain for rank {waited_for} at call {call} ({shown} of {expected} arrivals): it "
                "died, raised, or makes other calls. All ranks must make the same calls in the same order"
            )
        case 1:
            return (
                f"rank {rank} waited in vain for rows of its tokens in call {call}: {shown} of {expected} came. A rank "
                "that owns their experts died or raised"
            )
        case 2:
            return (
                f"rank {rank} would receive {expected} rows in call {call}, and its heap was made for max_rows = "
                f"{shown}: make heaps with a larger max_rows"
            )
        case 4:
            return (
                f"rank {rank} came to call {call} for {way(expected)}, and rank {waited_for} for {way(shown)}: all "
                "ranks must make the same calls in the same order"
            )
        case 5:
            return (
                f"rank {rank} came to call {call} with another layer than rank {waited_for}: I, swiglu_limit and "
                "precision must be the same on all ranks"
            )
    return bytes(page[MESSAGE:].view(torch.uint8).tolist()).partition(b"\0")[0].decode(errors="replace")


def way(of_call: int) -> str:
    """What a rank comes for, FORWARD or the number of the forward that it goes back through."""
    return "forward" if of_call == FORWARD else f"backward of call {of_call}"


def open_pages(heaps: Tensor, layout: Layout, first: int, timeout_s: float) -> Tensor:
    """Prepare the zeroed pages of the ranks of a process, `first` and up. heaps: (ranks here, bytes). Returns a page on
    the host that shows what happens, (64,) int64: on a GPU a mirror that kernels write, on a CPU the page itself."""
    pages = [view_of(heap, layout, "page") for heap in heaps]
    on_gpu = heaps.device.type == "cuda"
    mirror = torch.zeros(PAGE_WORDS, dtype=torch.int64, pin_memory=True) if on_gpu else pages[0]
    for rank, page in enumerate(pages, first):
        page[OWNER].fill_(rank)
        page[LIMIT].fill_(ceil(timeout_s * 1e9))
        page[MIRROR].fill_(mirror.data_ptr() if on_gpu else 0)
    return mirror


def fresh_heaps(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """(W, bytes) uint8, in which only what counts is zeroed, and where each begins, (W,) int64."""
    heaps = torch.empty(layout.W, layout.bytes, dtype=torch.uint8, device=device)
    heaps[:, : layout.views()["row_start"].offset].zero_()
    addresses = torch.arange(layout.W, dtype=torch.int64, device=device) * heaps.stride(0) + heaps.data_ptr()
    return heaps, addresses


def heap_of_one_rank(problem: Problem, weights_dtype: torch.dtype, parts: int, device: torch.device) -> Memory:
    """A heap for one call of one rank that has no peers. Who waits in it waits for ever."""
    p = problem
    layout = Layout(1, max(p.T, 1), p.H, p.K, p.E, p.dtype, weights_dtype, parts, p.token_scales)
    heaps, addresses = fresh_heaps(layout, device)
    token_start = torch.arange(2, dtype=torch.int32, device=device) * p.T
    return Memory(layout, heaps, addresses, addresses, token_start)


class Heaps:
    """What heaps have in common, whoever holds them.

    Attributes:
        ranks: W.
        first: the first rank of this process.
        here: how many ranks this process holds: all, or one.
        max_tokens: the most tokens that a rank may have in a call.
        timeout_s: how long a rank waits for its peers before it gives up, in seconds; 0: for ever.
        key: stands for these heaps where only numbers can be passed.
        closed: whether `close` was called.
        dead: whether this rank has raised what happened to them, and so knows that all ranks need new ones.
        remedy: what is to be done then.
    """

    def __init__(self, ranks: int, first: int, here: int, max_tokens: int, timeout_s: float):
        for name, size in dict(ranks=ranks, max_tokens=max_tokens).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be a positive whole number, not {size}")
        if ranks * max_tokens > MOST_TOKENS:
            raise ValueError(f"ranks * max_tokens = {ranks * max_tokens} tokens, more than {MOST_TOKENS}: give fewer")
        if not timeout_s >= 0:
            raise ValueError(f"timeout_s must be 0 (for ever) or more, not {timeout_s}")
        self.ranks, self.first, self.here, self.max_tokens, self.timeout_s = ranks, first, here, max_tokens, timeout_s
        self.key = next(KEYS)
        self.closed = self.dead = False
        self.remedy = "close them, and make new ones on all ranks"
        self.pages: list[Tensor] = []  # on the host, one for each kind of layer
        self._starts: dict[tuple, Tensor] = {}
        self._captured: list[Tensor] = []  # starts that graphs hold the addresses of
        OPEN[self.key] = self

    def __reduce__(self):
        raise TypeError("heaps hold addresses and cannot be copied: make new ones")

    def facts(self, K: int) -> dict[str, int]:
        """What a `Problem` over these heaps must say of them, with K routes a token."""
        return dict(max_tokens=self.max_tokens)

    def token_start(self, tokens_per_rank: tuple[int, ...], device: torch.device) -> Tensor:
        """(ranks here + 1,) int32 on the device: where each rank's tokens begin. Made once for each distribution,
        number by number, since a copy from the host would wait for the device."""
        made = self._starts.pop((tokens_per_rank, device), None)
        if made is None:
            refuse_in_capture(device)
            starts = [sum(tokens_per_rank[:rank]) for rank in range(self.here + 1)]
            if len(self._starts) == MOST_STARTS:
                self._starts.pop(next(iter(self._starts)))  # the one not used for longest
            made = kept(lambda: numbers(starts, device), device)
        self._starts[tokens_per_rank, device] = made
        if is_capturing(device):
            self._captured.append(made)
        return made

    def raise_if_failed(self) -> None:
        """Raise RuntimeError if something is known to have happened. Does not wait for the device."""
        for page in self.pages:
            if happened := what_happened(page):
                self.dead = True
                raise RuntimeError(f"{happened.rstrip('.')}. These heaps are dead: {self.remedy}")

    def refuse(self, message: str) -> None:
        """Tell all other ranks why this one does not take part in a call. Ranks of one process need not be told."""

    def check(self) -> None:
        """Wait for the device, and raise RuntimeError if a call over these heaps has failed."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.raise_if_failed()

    def raise_if_unusable(self, problem: Problem) -> None:
        """Raise RuntimeError where these heaps are closed, or too small."""
        if self.closed:
            raise RuntimeError("these heaps are closed: make new ones, and begin with forward")
        tokens = problem.tokens_per_rank
        if len(tokens) != self.here or max(tokens) > self.max_tokens:
            raise RuntimeError(f"{tokens} tokens do not fit {self.here} ranks of up to {self.max_tokens}")

    def close(self) -> None:
        """Give the memory back. What was saved for backward cannot be used after it."""
        self.closed = True
        self.pages.clear()
        self._starts.clear()
        self._captured.clear()


class LocalHeaps(Heaps):
    """The heaps of W ranks in one process and on one device: all ranks work in the same launches.

    With heap = LocalHeaps(ranks=4, max_tokens=64), `moe(..., heap=heap, tokens_per_rank=(17, 0, 40, 7))` takes the
    tokens of the ranks one after another and the weights of all experts; rank r owns experts r*L .. r*L+L-1, where
    L = E / W. Keep a reference to it until backward is done, and use it from one stream. Memory is taken at the first
    call for each kind of layer (sizes and dtypes), and kept until `close()`, which ends captured graphs as well.

    ranks: W. max_tokens: the most tokens that a rank may have in a call. timeout_s: how long a rank waits for another
    before it gives up, in seconds; 0: for ever.

    Raises ValueError unless both are positive whole numbers, and their product fits into 31 bits.
    """

    def __init__(self, ranks: int, max_tokens: int, timeout_s: float = 60):
        super().__init__(ranks, 0, ranks, max_tokens, timeout_s)
        self._kept: dict[tuple, tuple[Tensor, Tensor]] = {}

    def memory(self, problem: Problem, weights_dtype: torch.dtype, parts: int, device: torch.device) -> Memory:
        """The heaps for this kind of layer. Raises RuntimeError when closed, and where they would have to be made
        while a graph is captured."""
        self.raise_if_unusable(problem)
        p = problem
        layout = Layout(self.ranks, self.max_tokens, p.H, p.K, p.E, p.dtype, weights_dtype, parts, p.token_scales)
        if (layout, device) not in self._kept:
            refuse_in_capture(device)
            heaps, addresses, page = kept(lambda: self.fresh(layout, device), device)
            self.pages.append(page)
            self._kept[layout, device] = heaps, addresses
        heaps, addresses = self._kept[layout, device]
        return Memory(layout, heaps, addresses, addresses, self.token_start(p.tokens_per_rank, device))

    def fresh(self, layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Heaps, where they begin, and their page on the host."""
        heaps, addresses = fresh_heaps(layout, device)
        return heaps, addresses, open_pages(heaps, layout, 0, self.timeout_s)

    def close(self) -> None:
        super().close()
        self._kept.clear()


def numbers(values: list[int], device: torch.device) -> Tensor:
    """(n,) int32, filled number by number."""
    made = torch.empty(len(values), dtype=torch.int32, device=device)
    for at, value in zip(made, values):
        at.fill_(value)
    return made


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def kept(make: Callable[[], Any], device: torch.device) -> Any:
    """What `make` makes on this device, to be kept from call to call.

    On a GPU a thread makes it, on the default stream: who captures calls into graphs (torch.compile's
    mode="reduce-overhead") has them allocate from memory of its own even before it captures, and asks for all of it
    back; but it asks this of its own thread's stream alone.
    """
    if device.type != "cuda":
        return make()
    with torch.cuda.device(device), ThreadPoolExecutor(1) as thread:
        made = thread.submit(on_default_stream, make, device).result()
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    return made


def on_default_stream(make: Callable[[], Any], device: torch.device) -> Any:
    """What `make` makes, whose launches go to the device's default stream."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.default_stream(device)):
        return make()


def refuse_in_capture(device: torch.device) -> None:
    """What is made while a graph is captured is not there before it is replayed, and yet it would be kept."""
    if is_capturing(device):
        raise RuntimeError("call moe once with this heap, these sizes and these tokens_per_rank before capturing them")


def shares(T: int, W: int) -> tuple[int, ...]:
    """tokens_per_rank of T tokens that W ranks share as evenly as whole numbers allow: of 7 and 3, (3, 2, 2)."""
    return tuple(T // W + (rank < T % W) for rank in range(W))


MOST_TOKENS = 2**31 - 1  # tokens of all ranks are numbered in int32
KEYS = count(1)
OPEN: WeakValueDictionary[int, Heaps] = WeakValueDictionary()
MOST_STARTS = 64


def heaps_of(key: int) -> Heaps:
    """The heaps with this key, which stands for them where only numbers can be passed."""
    heaps = OPEN.get(key)
    if heaps is None:
        raise RuntimeError("the heaps of this call are gone: keep a reference to them until backward is done")
    return heaps
