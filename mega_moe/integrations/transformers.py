"""moe inside Hugging Face's transformers: names for its `experts_implementation` and its `ep_implementation`.

transformers keeps the experts of an MoE model as two tensors, laid out as moe takes them, and looks up in a registry by
name what computes them. `register()` puts the rungs of the ladder into it; model code, router and checkpoints stay as
they are. A second registry holds ways to compute experts that are split over ranks: there moe stands with its group.
"""

from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from ..api import DTYPES, check_options, constant, moe
from ..processes import heaps_for
from ..registry import LADDER

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError(
        "mega_moe.integrations.transformers needs transformers 5.23 or newer, the first with a registry for expert "
        f'parallelism (EPImplementationInterface), and met: {error}. pip install "transformers>=5.23"'
    ) from error

NAME = "mega_moe"


def register(
    *,
    save: str | None = None,
    precision: str | None = None,
    num_reserved_sms: int = 0,
    max_tokens: int | None = None,
) -> None:
    """Make "mega_moe" known to transformers, in this process. Call it before a model is made; again to change options,
    which then hold for all models, those that are there included.

    `experts_implementation` takes "mega_moe", the default rung, and "mega_moe:<stage>" for each rung of
    `mega_moe.LADDER`, wherever transformers takes one: from_pretrained, from_config, set_experts_implementation.
    `DistributedConfig(ep_implementation=...)` takes "mega_moe", and "mega_moe:<stage>" for the rungs that exchange rows
    through heaps ("ranks", "mega", "warp"). There moe computes the experts too, whatever experts_implementation is.

    Models whose experts moe does not compute are refused with a ValueError when they first run, and over ranks when
    they are loaded; `why_not` tells before.

    Args:
        save: what forward keeps for backward, see `mega_moe.moe`.
        precision: what products read, see `mega_moe.moe`. A rung that has none such raises when it first runs.
        num_reserved_sms: processors that are left to others, see `mega_moe.moe`.
        max_tokens: over ranks, the most tokens that a rank will bring to a call: heaps are made for as many. None: as
            many as the rank with the most brings to the first call, and more of them later are an error. For training
            on batches of one size, that is enough.

    Raises:
        ValueError: an option that `mega_moe.moe` would refuse, a max_tokens below 1.
    """
    check_options(None, save, precision, num_reserved_sms=num_reserved_sms)
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: it must be at least 1")
    options = dict(save=save, precision=precision, num_reserved_sms=num_reserved_sms)
    for name, stage in {NAME: None, **{f"{NAME}:{rung.name}": rung.name for rung in LADDER}}.items():
        forward = partial(forward_here, stage=stage, **options)
        ExpertsInterface.register(name, forward)
        FP8ExpertsInterface.register(name, forward)  # only to refuse: else all one hears is that the name is unknown
    over_ranks = {f"{NAME}:{rung.name}": rung.name for rung in LADDER if rung.over_ranks}
    for name, stage in {NAME: None, **over_ranks}.items():
        EPImplementationInterface.register(name, partial(OverRanks, max_tokens=max_tokens, stage=stage, **options))


def why_not(model: nn.Module) -> str | None:
    """One sentence, with what to use instead, if moe does not compute the experts of a model of transformers; None if
    it does. The model may be on the meta device: no weight is read."""
    found = [module for module in model.modules() if hasattr(module, "_apply_gate") and hasattr(module, "has_gate")]
    if not found:
        return (
            f"{type(model).__name__} has no experts that transformers looks up by name, so experts_implementation does "
            "nothing in it"
        )
    return next((reason for experts in found if (reason := difference(experts))), None)


def forward_here(
    experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **options
) -> Tensor:
    """What transformers calls in place of the forward of an experts module: (T, H), (T, K), (T, K) -> (T, H)."""
    if experts._is_expert_parallel:  # by transformers' own means, which mark routes to other ranks by one id too many
        top_k_index = top_k_index.masked_fill(top_k_index >= experts.num_experts, -1)
    return compute(experts, hidden_states, top_k_index, top_k_weights, **options)


class OverRanks(EPImplementation):
    """Experts over the ranks of a group: moe brings rows to them and back, and computes them. transformers makes one
    for each experts module when a model is loaded."""

    def __init__(
        self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, *, max_tokens: int | None, **options
    ):
        super().__init__(experts, ep_mesh, tp_mesh)
        swiglu_limit_of(experts)  # refuses what moe does not compute
        self.experts, self.max_tokens, self.options = experts, max_tokens, options

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The tokens of this rank, with ids of all experts. Ranks of a TP group hold the same tokens: each takes its
        share of them, and gets all rows of y."""
        mesh, shape = self.tp_mesh, hidden_states.shape
        if mesh.size() == 1:
            return self.share(hidden_states, top_k_index, top_k_weights)
        shares = (
            DTensor.from_local(t, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)]).to_local()
            for t in (hidden_states, top_k_index, top_k_weights)
        )
        y = self.share(*shares)
        y = DTensor.from_local(y, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
        return y.full_tensor()

    def share(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """moe of tokens that no other rank brings."""
        group = self.ep_mesh.get_group()
        try:
            if self.max_tokens and not torch.compiler.is_compiling():
                heaps_for(group, x.device.type, self.max_tokens)  # if there are none yet, they are made for as many
            return compute(self.experts, x, topk_ids, topk_weights, group=group, **self.options)
        except ValueError as error:
            error.add_note("heaps too small for a call are made larger by register(max_tokens=...), before the first")
            raise


def compute(experts: nn.Module, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, **options) -> Tensor:
    """moe with the weights of an experts module. y has the dtype of x also under autocast, as with eager experts."""
    w_gate_up = experts.gate_up_proj.unflatten(1, (2, -1))
    limit = swiglu_limit_of(experts)
    y = moe(x, topk_ids, topk_weights, w_gate_up, experts.down_proj, swiglu_limit=limit, **options)
    return y.to(x.dtype)


# What moe computes


LIMITS: WeakKeyDictionary[nn.Module, float | None] = WeakKeyDictionary()
"""The swiglu_limit of experts modules that have been looked at, which is done once."""


@constant
def swiglu_limit_of(experts: nn.Module) -> float | None:
    """The clamp before SwiGLU of an experts module. Raises ValueError if moe does not compute it."""
    if experts not in LIMITS:
        if reason := difference(experts):
            raise ValueError(reason)
        LIMITS[experts] = limit_of(experts)
    return LIMITS[experts]


def limit_of(experts: nn.Module) -> float | None:
    """The clamp by either name that models have for it."""
    found = (getattr(experts, name, None) for name in ("swiglu_limit", "limit"))
    return next((limit for limit in found if limit is not None), None)


def difference(experts: nn.Module) -> str | None:
    """In what an experts module differs from what moe computes, and what to use instead; None: in nothing."""
    dtype = experts.down_proj.dtype
    found = {
        "they have no gate": not experts.has_gate,
        "they add biases": experts.has_bias,
        "their weights are transposed, (E, H, 2I) and (E, I, H)": experts.is_transposed,
        "rows of gate and up alternate": not experts.is_concatenated,
        "what an expert puts out is normalised": experts.has_post_expert_norm,
        f"their weights are quantized, to {dtype}": dtype not in DTYPES,
    }
    differs = [what for what, so in found.items() if so]
    if not differs and not gates_by_swiglu(experts):
        differs = ["their activation is not silu(gate) * up, also not with a clamp of gate and up before it"]
    if not differs:
        return None
    return (
        f"{type(experts).__name__}: {', '.join(differs)}. mega_moe computes down(silu(gate) * up) with gate_up_proj "
        "(E, 2I, H), gate first, and down_proj (E, H, I), in fp32, bf16 or fp16. Use "
        'experts_implementation="grouped_mm" or "eager", and for ranks ep_implementation="auto"'
    )


def gates_by_swiglu(experts: nn.Module) -> bool:
    """Whether the gate function is that of moe. It is tried on numbers, small and beyond any clamp: each model has a
    class and names of its own, and what counts is what they compute."""
    act_fn = getattr(experts, "act_fn", None)
    if isinstance(act_fn, nn.Module) and next(act_fn.parameters(), None) is not None:
        return False  # it learns, which silu does not
    limit = limit_of(experts)
    sizes = (0.1, 1.0, 9.0, 1e3, 2.0 * (limit or 1.0))
    numbers = torch.tensor([sign * size for size in sizes for sign in (-1, 1)], device="cpu")
    gate, up = (axis.flatten() for axis in torch.meshgrid(numbers, numbers, indexing="ij"))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        got = experts._apply_gate(torch.cat([gate, up])[None])[0]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.allclose(got, F.silu(gate) * up, rtol=1e-5, atol=1e-6)
