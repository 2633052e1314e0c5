"""moe(): check what can be checked without reading a value, then call the chosen stage."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Integral

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from . import autograd, processes
from .exchange import all_to_all
from .registry import DEFAULT, DEFAULT_OVER_RANKS
from .shapes import PRECISIONS, SAVES
from .symmetric import Heaps, LocalHeaps

INDEX_DTYPES = (torch.int32, torch.int64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ALL_TO_ALL = "all_to_all"
MOST_ROWS = 2**31 - 2**16  # rows are counted in int32, and a block may look past the last one


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    stage: str | None = None,
    precision: str | None = None,
    save: str | None = None,
    swiglu_limit: float | None = None,
    check_ids: bool = False,
    num_reserved_sms: int = 0,
    group: ProcessGroup | None = None,
    heap: Heaps | str | None = None,
    tokens_per_rank: tuple[int, ...] | None = None,
) -> Tensor:
    """A Mixture-of-Experts layer after its router: y_t = sum_k weight_k * down(swiglu(gate_up(x_t))) over K experts.

    Args:
        x: (T, H) tokens; fp32, bf16 or fp16 (float64 with stage="reference").
        topk_ids: (T, K) int32 or int64, each token's experts; -1 masks a route, the same expert twice counts twice.
        topk_weights: (T, K) router weights, applied to the experts' outputs; fp32 or x's dtype.
        w_gate_up: (E, 2, I, H), 0 = gate and 1 = up, in x's dtype. For a checkpoint's gate_up_proj (E, 2I, H) pass the
            free view gate_up_proj.unflatten(1, (2, -1)). With a group the E / W experts of this rank, (E/W, 2, I, H),
            or a DTensor of all of them that is sharded over the group along its first dimension.
        w_down: (E, H, I), in x's dtype; with a group likewise.
        stage: which rung computes it, a name from `mega_moe.LADDER`. All of them give the same result. None:
            `mega_moe.registry.DEFAULT`; over ranks DEFAULT_OVER_RANKS, with "all_to_all" "ranks".
        precision: what the matrix products read. None: x's dtype, as does "bf16" with an x in bf16. "fp8": all of them
            e4m3 numbers with a scale for each 1x128 of tokens, activations and gradients and 128x128 of a weight;
            "fp8_bwd": backward's alone; "mxfp8": e4m3 with a power of two for each 32. Sums, SwiGLU and everything
            between products stay as they are, and so do y's and the gradients' dtypes. docs/math.md says what is
            rounded where; the reference computes all of them, other stages those that their why_not lets through.
        save: "pre" keeps the experts' R * 2I activations before SwiGLU for backward (R = T*K rows, x's dtype); "inputs"
            keeps the inputs and the plan of rows, and backward makes them again: it then multiplies a third more, to
            the same bits. None: "pre", over ranks "inputs". Where no gradient can be asked for, nothing is kept.
        swiglu_limit: before SwiGLU clamp `gate` to at most this, and `up` to [-limit, limit]; None: no clamp.
        check_ids: look for ids outside the table on a GPU too, which waits for the device. On a CPU they are always
            looked for; on a GPU without this they count as masked.
        num_reserved_sms: how many of the GPU's processors resident programs leave to others, to NCCL for instance; for
            stages whose programs are resident: persistent and above.
        group: any torch.distributed ProcessGroup of W ranks, over which the experts are split, each rank a process:
            rank r owns experts r*L .. r*L+L-1, where L = E / W. x, topk_ids, topk_weights and y are this rank's tokens
            (any number, also none), with ids of all E experts. All ranks call, and then call backward, in the same
            order. A rank's weight gradients are sums over all ranks' tokens.
        heap: the memory in which ranks meet. With a group None: heaps that are made for it at the first call, for as
            many tokens as the rank with the most brings to it; or `SymmetricHeaps(group, max_tokens)` (GPUs) or
            `ShmHeaps(group, max_tokens)` (CPU), made by all ranks; or "all_to_all", with stage="ranks": none, rows
            travel by collectives of the group, also between hosts. Without a group `LocalHeaps(W, max_tokens)`: the W
            ranks are in this process, x, topk_ids, topk_weights and y hold their tokens one rank after another, and
            the weights are those of all experts. Keep a reference to heaps until backward is done.
        tokens_per_rank: with LocalHeaps, how many of the T tokens each rank holds; 0 is fine.

    Returns:
        y: (T, H) in x's dtype. Differentiable once in x, topk_weights, w_gate_up and w_down, in any combination.
            Under autocast x and the weights are cast to its dtype first, and y has that dtype.

    Raises:
        TypeError: a dtype that does not fit, named with its argument.
        ValueError: a shape, device, stage, precision, save or tokens_per_rank that does not fit, an id outside the
            table, a limit that is not positive, ranks that do not divide E.
        RuntimeError: the stage cannot run here (the message is its why_not), an input has a forward-mode tangent, or a
            call over these heaps has failed before: a rank died, raised, made other calls, or would have received more
            rows than it has room for; what a failed call computes is NaN. By all_to_all: a rank raised this about its
            arguments, or came in another direction, back through another call, or with another layer; all ranks raise,
            before rows travel.
    """
    with peers_are_told(group, heap, w_down.device):
        if group is not None or isinstance(heap, Heaps):
            w_gate_up, w_down = shard_of("w_gate_up", w_gate_up), shard_of("w_down", w_down)
        if dtype := autocast_dtype(x):
            x, w_gate_up, w_down = (t.to(dtype) if t.dtype in DTYPES else t for t in (x, w_gate_up, w_down))
        check(x, topk_ids, topk_weights, w_gate_up, w_down, swiglu_limit, save, precision, num_reserved_sms)
        check_ranks(group, heap, tokens_per_rank, len(x), len(w_down))
        if not torch.compiler.is_compiling():
            refuse_forward_mode(x, topk_weights, w_gate_up, w_down)
    if group is not None and heap is None and not torch.compiler.is_compiling():
        heap = processes.heaps_for(group, x.device.type, len(x))
    key = key_of(group, heap, x.device)
    stage = stage or default_stage(key != 0, heap)
    save = worth_saving(save or ("inputs" if key else "pre"), x, topk_weights, w_gate_up, w_down)
    tokens = None if tokens_per_rank is None else list(tokens_per_rank)
    options = (stage, swiglu_limit, save, precision or "bf16", num_reserved_sms, key, tokens, check_ids)
    y, _ = autograd.forward(x, topk_ids, topk_weights, w_gate_up, w_down, *options)
    return y


def default_stage(over_ranks: bool, heap: Heaps | str | None) -> str:
    """The stage that computes unless told which."""
    if not over_ranks:
        return DEFAULT
    return "ranks" if heap == ALL_TO_ALL else DEFAULT_OVER_RANKS


def shard_of(name: str, w: Tensor) -> Tensor:
    """This rank's experts of a DTensor; another tensor as it is. Raises ValueError unless it is sharded on experts."""
    if not isinstance(w, DTensor):
        return w
    if tuple(w.placements) != (Shard(0),):
        raise ValueError(f"{name} must be sharded on experts, over the group alone: (Shard(0),), not {w.placements}")
    return w.to_local()


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast casts to on x's device; None where it is off."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # torch knows no autocast for meta tensors
        return None
    return torch.get_autocast_dtype(device)


def worth_saving(save: str, *tensors: Tensor) -> str:
    """`save`, or "inputs" where none of the tensors can be asked for a gradient: then nobody would read pre."""
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return save if differentiable else "inputs"


def refuse_forward_mode(*tensors: Tensor) -> None:
    """Raise RuntimeError for a dual tensor: a custom operator would drop its tangent without a word."""
    if any(unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(
            "moe has no forward-mode derivative: use reverse mode, or mega_moe.reference.forward(...), plain torch"
        )


def check(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    swiglu_limit: float | None,
    save: str | None,
    precision: str | None,
    num_reserved_sms: int,
) -> None:
    """Raise what `moe` documents, from shapes, dtypes, devices and the options alone."""
    tensors = dict(x=x, topk_ids=topk_ids, topk_weights=topk_weights, w_gate_up=w_gate_up, w_down=w_down)
    ranks = dict(x="(T, H)", topk_ids="(T, K)", topk_weights="(T, K)", w_gate_up="(E, 2, I, H)", w_down="(E, H, I)")
    for name, t in tensors.items():
        if t.dim() != ranks[name].count(",") + 1:
            hint = " (view a gate_up_proj with .unflatten(1, (2, -1)))" if name == "w_gate_up" and t.dim() == 3 else ""
            raise ValueError(f"{name} must be {ranks[name]}, not of shape {tuple(t.shape)}{hint}")
        if t.device != x.device:
            raise ValueError(f"{name} is on {t.device} and x on {x.device}: all tensors must be on one device")

    if topk_ids.dtype not in INDEX_DTYPES:
        raise TypeError(f"topk_ids must be int32 or int64, not {topk_ids.dtype}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be fp32, bf16 or fp16 (or float64, for the reference), not {x.dtype}")
    for name, w in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        if w.dtype != x.dtype:
            raise TypeError(f"{name} is {w.dtype} and x is {x.dtype}: cast one to the other, or use torch.autocast")
    if topk_weights.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"topk_weights is {topk_weights.dtype} and x is {x.dtype}: use x's dtype or float32")

    (T, H), (E, _, I, _) = x.shape, w_gate_up.shape
    K = topk_ids.shape[1]
    expected = dict(topk_ids=(T, K), topk_weights=(T, K), w_gate_up=(E, 2, I, H), w_down=(E, H, I))
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} must be {ranks[name]} = {shape}, not {tuple(tensors[name].shape)}, "
                f"for x {tuple(x.shape)}, topk_ids {tuple(topk_ids.shape)} and w_gate_up {tuple(w_gate_up.shape)}"
            )
    for letter, size in dict(H=H, I=I, E=E, K=K).items():
        if size == 0:
            raise ValueError(f"{letter} = 0: only T may be zero")
    if T * K > MOST_ROWS:
        raise ValueError(f"T * K = {T * K} rows, more than {MOST_ROWS}: split the tokens into several calls")
    check_options(swiglu_limit, save, precision, num_reserved_sms=num_reserved_sms)
    if precision == "bf16" and x.dtype != torch.bfloat16:
        raise ValueError(
            f'precision="bf16" reads bf16, and x is {x.dtype}: cast x and the weights, or leave precision out'
        )


def check_options(
    swiglu_limit: float | None, save: str | None, precision: str | None = None, *, num_reserved_sms: int = 0
) -> None:
    """Raise what `moe` documents of these options."""
    if not isinstance(num_reserved_sms, int) or num_reserved_sms < 0:
        raise ValueError(f"num_reserved_sms must be a whole number of processors, 0 or more, not {num_reserved_sms}")
    if swiglu_limit is not None and not swiglu_limit > 0:
        raise ValueError(f"swiglu_limit must be positive, not {swiglu_limit}")
    if save is not None and save not in SAVES:
        raise ValueError(f"save must be {' or '.join(map(repr, SAVES))}, not {save!r}")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be {' or '.join(map(repr, PRECISIONS))}, not {precision!r}")


def check_ranks(
    group: ProcessGroup | None, heap: Heaps | str | None, tokens_per_rank: tuple[int, ...] | None, T: int, E: int
) -> None:
    """Raise what `moe` documents of the ranks. E: the experts whose weights are here."""
    if heap is not None and not isinstance(heap, Heaps) and heap != ALL_TO_ALL:
        shown = repr(heap) if isinstance(heap, str) else type(heap).__name__
        raise TypeError(f'heap must be LocalHeaps(ranks, max_tokens), heaps of a group, or "all_to_all", not {shown}')
    if heap == ALL_TO_ALL and group is None:
        raise ValueError('heap="all_to_all" sends rows with the collectives of a group: pass group=')
    if isinstance(heap, LocalHeaps):
        if group is not None:
            raise ValueError("LocalHeaps hold all ranks in one process: leave group= out, or leave heap= out")
        check_tokens(heap, tokens_per_rank, T, E)
    elif tokens_per_rank is not None:
        raise ValueError(
            "tokens_per_rank says how tokens lie over the ranks of one process: it needs "
            "heap=LocalHeaps(ranks, max_tokens)"
        )
    elif isinstance(heap, Heaps):
        if group is not None and group.size() != heap.ranks:
            raise ValueError(
                f"the group has {group.size()} ranks, and the heaps {heap.ranks}: make them for this group"
            )
        if group is not None and not torch.compiler.is_compiling():
            processes.refuse_another_group(group, heap)
        if T > heap.max_tokens:
            raise ValueError(
                f"x holds {T} tokens, and the heaps max_tokens = {heap.max_tokens} of a rank: make larger ones, on all "
                "ranks"
            )


def check_tokens(heap: LocalHeaps, tokens_per_rank: tuple[int, ...] | None, T: int, E: int) -> None:
    """Raise what `moe` documents of ranks in one process."""
    if tokens_per_rank is None:
        raise ValueError(f"with a heap tokens_per_rank is needed: {heap.ranks} numbers that add up to T = {T}")
    whole = (Integral, torch.SymInt)
    if not isinstance(tokens_per_rank, Sequence) or not all(isinstance(tokens, whole) for tokens in tokens_per_rank):
        raise TypeError(f"tokens_per_rank must be {heap.ranks} whole numbers, not {tokens_per_rank}")
    if len(tokens_per_rank) != heap.ranks or min(tokens_per_rank) < 0 or sum(tokens_per_rank) != T:
        raise ValueError(
            f"tokens_per_rank must be {heap.ranks} numbers that add up to T = {T}, not {tuple(tokens_per_rank)}"
        )
    if max(tokens_per_rank) > heap.max_tokens:
        raise ValueError(
            f"tokens_per_rank = {tuple(tokens_per_rank)}: the heap holds max_tokens = {heap.max_tokens} of a rank, so "
            f"use LocalHeaps({heap.ranks}, {max(tokens_per_rank)}) or larger"
        )
    if E % heap.ranks:
        raise ValueError(
            f"E = {E} experts cannot be split evenly over {heap.ranks} ranks: use a number of ranks that divides {E}"
        )


def peers_are_told(
    group: ProcessGroup | None, heap: Heaps | str | None, device: torch.device
) -> AbstractContextManager:
    """In it, what is raised about the arguments is told to the other ranks: this one will not meet them, and they would
    wait. device: of the weights, which are where they belong even if a token is not: by all_to_all it is told there.
    Not while a call is compiled, which all ranks do together."""
    return nullcontext() if torch.compiler.is_compiling() else telling(group, heap, device)


@contextmanager
def telling(group: ProcessGroup | None, heap: Heaps | str | None, device: torch.device) -> Iterator[None]:
    """`peers_are_told`, of a call that runs."""
    try:
        yield
    except Exception as error:
        if isinstance(heap, processes.ProcessHeaps):
            heap.refuse(str(error))
        elif isinstance(group, ProcessGroup):
            if heap == ALL_TO_ALL:
                all_to_all(group, device).refuse(str(error))
            else:
                processes.refuse(group, str(error))
        raise


def key_of(group: ProcessGroup | None, heap: Heaps | str | None, device: torch.device) -> int:
    """The key of heaps, or of what stands for them; 0 for one rank."""
    if heap == ALL_TO_ALL:
        return key_of_all_to_all(group, device)
    if heap is None:
        return 0 if group is None else key_of_group(group)
    return heap.key


def constant(function: Callable) -> Callable:
    """What torch.compiler.assume_constant_result makes of a function: when a call is compiled, it is called, and not
    compiled. That would import the compiler here, and with it Triton, before a program that imports mega_moe can say
    that kernels shall be interpreted."""
    function._dynamo_marked_constant = True
    return function


@constant
def key_of_all_to_all(group: ProcessGroup, device: torch.device) -> int:
    return all_to_all(group, device).key


@constant
def key_of_group(group: ProcessGroup) -> int:
    """Of the heaps that this group has already, when a call is compiled."""
    return processes.heaps_made_for(group).key
