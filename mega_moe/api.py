"""moe(): check what can be checked without reading a value, then call the chosen stage."""

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from . import autograd
from .registry import DEFAULT, DEFAULT_OVER_RANKS
from .shapes import SAVES
from .symmetric import LocalHeaps

INDEX_DTYPES = (torch.int32, torch.int64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_ROWS = 2**31 - 2**16  # rows are counted in int32, and a block may look past the last one


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w_gate_up: Tensor,
    w_down: Tensor,
    *,
    stage: str | None = None,
    save: str | None = None,
    swiglu_limit: float | None = None,
    check_ids: bool = False,
    heap: LocalHeaps | None = None,
    tokens_per_rank: tuple[int, ...] | None = None,
) -> Tensor:
    """A Mixture-of-Experts layer after its router: y_t = sum_k weight_k * down(swiglu(gate_up(x_t))) over K experts.

    Args:
        x: (T, H) tokens; fp32, bf16 or fp16 (float64 with stage="reference").
        topk_ids: (T, K) int32 or int64, each token's experts; -1 masks a route, the same expert twice counts twice.
        topk_weights: (T, K) router weights, applied to the experts' outputs; fp32 or x's dtype.
        w_gate_up: (E, 2, I, H), 0 = gate and 1 = up, in x's dtype. For a checkpoint's gate_up_proj (E, 2I, H) pass the
            free view gate_up_proj.unflatten(1, (2, -1)).
        w_down: (E, H, I), in x's dtype.
        stage: which rung computes it, a name from `mega_moe.LADDER`. All of them give the same result. None:
            `mega_moe.registry.DEFAULT`; with a heap DEFAULT_OVER_RANKS.
        save: "pre" keeps the experts' R * 2I activations before SwiGLU for backward (R = T*K rows, x's dtype); "inputs"
            keeps the inputs and the plan of rows, and backward makes them again: it then multiplies a third more, to
            the same bits. None: "pre", with a heap "inputs". Where no gradient can be asked for, nothing is kept.
        swiglu_limit: before SwiGLU clamp `gate` to at most this, and `up` to [-limit, limit]; None: no clamp.
        check_ids: look for ids outside the table on a GPU too, which waits for the device. On a CPU they are always
            looked for; on a GPU without this they count as masked.
        heap: the heaps of several ranks, over which the experts are split: rank r of W owns experts r*L .. r*L+L-1,
            where L = E / W. x, topk_ids, topk_weights and y then hold the ranks' tokens one rank after another. Keep a
            reference to it until backward is done.
        tokens_per_rank: with a heap, how many of the T tokens each rank holds; 0 is fine.

    Returns:
        y: (T, H) in x's dtype. Differentiable once in x, topk_weights, w_gate_up and w_down, in any combination.
            Under autocast x and the weights are cast to its dtype first, and y has that dtype.

    Raises:
        TypeError: a dtype that does not fit, named with its argument.
        ValueError: a shape, device, stage, save or tokens_per_rank that does not fit, an id outside the table, a limit
            that is not positive, ranks that do not divide E.
        RuntimeError: the stage cannot run here (the message is its why_not), or an input has a forward-mode tangent.
    """
    if dtype := autocast_dtype(x):
        x, w_gate_up, w_down = (t.to(dtype) if t.dtype in DTYPES else t for t in (x, w_gate_up, w_down))
    check(x, topk_ids, topk_weights, w_gate_up, w_down, swiglu_limit, save)
    check_ranks(heap, tokens_per_rank, len(x), len(w_down))
    if not torch.compiler.is_compiling():
        refuse_forward_mode(x, topk_weights, w_gate_up, w_down)
    stage = stage or (DEFAULT if heap is None else DEFAULT_OVER_RANKS)
    save = worth_saving(save or ("pre" if heap is None else "inputs"), x, topk_weights, w_gate_up, w_down)
    ranks = (0, None) if heap is None else (heap.key, list(tokens_per_rank))
    y, _ = autograd.forward(x, topk_ids, topk_weights, w_gate_up, w_down, stage, swiglu_limit, save, *ranks, check_ids)
    return y


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
    check_options(swiglu_limit, save)


def check_options(swiglu_limit: float | None, save: str | None) -> None:
    """Raise what `moe` documents of these two options."""
    if swiglu_limit is not None and not swiglu_limit > 0:
        raise ValueError(f"swiglu_limit must be positive, not {swiglu_limit}")
    if save is not None and save not in SAVES:
        raise ValueError(f"save must be {' or '.join(map(repr, SAVES))}, not {save!r}")


def check_ranks(heap: LocalHeaps | None, tokens_per_rank: tuple[int, ...] | None, T: int, E: int) -> None:
    """Raise what `moe` documents of the ranks."""
    if heap is None:
        if tokens_per_rank is not None:
            raise ValueError(
                "tokens_per_rank says how tokens lie over ranks: it needs heap=LocalHeaps(ranks, max_tokens)"
            )
        return
    if not isinstance(heap, LocalHeaps):
        raise TypeError(f"heap must be LocalHeaps(ranks, max_tokens), not {type(heap).__name__}")
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
