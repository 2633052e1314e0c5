"""MoE: a router and experts as a torch module, with the parameter names of Hugging Face's Qwen3-MoE block."""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from .api import autocast_dtype, check_options, default_stage, moe, peers_are_told
from .processes import member
from .registry import stage
from .routing import route
from .symmetric import Heaps


class Experts(nn.Module):
    """The experts' weights, as Hugging Face fuses them: gate_up_proj (E, 2I, H), gate first, and down_proj (E, H, I).

    Checkpoints on disk name each expert's matrices apart (`0.gate_proj.weight (I, H)`, `0.up_proj.weight`,
    `0.down_proj.weight (H, I)`, `1. ...`); loading a state dict accepts both. Of a rank that owns
    num_experts of `total`, `first` and up, it accepts those of all ranks as well, and takes its own.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        device=None,
        dtype=None,
        first: int = 0,
        total: int | None = None,
    ):
        super().__init__()
        empty = lambda *shape: nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.gate_up_proj = empty(num_experts, 2 * intermediate_size, hidden_size)
        self.down_proj = empty(num_experts, hidden_size, intermediate_size)
        self.first, self.total = first, total or num_experts
        self.register_load_state_dict_pre_hook(fuse_experts)
        self.register_load_state_dict_pre_hook(take_own_experts)

    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, **options) -> Tensor:
        """`moe` of these experts, with its options: x (T, H) -> y (T, H)."""
        return moe(x, topk_ids, topk_weights, self.gate_up_proj.unflatten(1, (2, -1)), self.down_proj, **options)

    def extra_repr(self) -> str:
        E, H, I = self.down_proj.shape
        return f"E={E}, H={H}, I={I}"

    def per_expert(self, prefix: str = "") -> dict[str, Tensor]:
        """The weights under the names that checkpoints on disk use, as copies."""
        named = {}
        for e, (gate_up, down) in enumerate(zip(self.gate_up_proj.detach(), self.down_proj.detach()), self.first):
            gate, up = gate_up.chunk(2)
            for name, w in dict(gate_proj=gate, up_proj=up, down_proj=down).items():
                named[f"{prefix}{e}.{name}.weight"] = w.clone()
        return named


def fuse_experts(module: Experts, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """Before loading: replace the per-expert names of a checkpoint, if it has them, by the two fused tensors.

    A checkpoint that names some experts and not others is left as it is, and load_state_dict reports what is missing.
    """
    of_expert = lambda e: [f"{prefix}{e}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
    own = range(module.first, module.first + len(module.down_proj))
    complete = lambda numbers: all(name in state_dict for e in numbers for name in of_expert(e))
    found = next((numbers for numbers in (range(module.total), own) if complete(numbers)), None)
    if found is None:
        return
    experts = [[state_dict.pop(name) for name in of_expert(e)] for e in found]
    state_dict[f"{prefix}gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
    state_dict[f"{prefix}down_proj"] = torch.stack([down for _, _, down in experts])


def take_own_experts(module: Experts, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """Before loading: of the experts of all ranks, keep this rank's."""
    own = len(module.down_proj)
    for name in ("gate_up_proj", "down_proj"):
        w = state_dict.get(f"{prefix}{name}")
        if w is not None and not isinstance(w, DTensor) and own < len(w) == module.total:
            state_dict[f"{prefix}{name}"] = w[module.first : module.first + own]


class MoE(nn.Module):
    """A whole MoE block: y = moe(x, *route(x)). A Qwen3-MoE block's state dict loads as it is.

    It holds the weights and not `norm_topk_prob`, and every key matches either way: take that from the model's config,
    `MoE(..., norm_topk_prob=config.norm_topk_prob)`. The released Qwen3-MoE models set it, while False is the default
    here and in transformers.

    Args:
        hidden_size: H.
        intermediate_size: I, of one expert.
        num_experts: E.
        top_k: K, experts per token.
        norm_topk_prob: divide a token's K router weights by their sum. For a checkpoint: what its config says.
        stage: which rung computes it, a name from `mega_moe.LADDER`; may be changed at any time.
        precision: what the experts' matrix products read, see `moe`; the router's stays as it is.
        save: what forward keeps for backward, see `moe`.
        swiglu_limit: clamp before SwiGLU, see `moe`.
        group: the ranks that share the experts, see `moe`. num_experts counts those of all W ranks, and this one holds
            E / W of them. The router must be the same on all ranks: seed them alike before the layer is made, and add
            up (or average) its gradient over the ranks in every step, or let `integrations.fsdp.shard` do it. A state
            dict with all experts loads too: each rank takes its own.
        heap: the memory in which the ranks of a group meet, see `moe`; may be changed at any time.
        device: of the parameters, as for any torch module.
        dtype: of the parameters; x must have it too, unless autocast casts both.

    Parameters: gate.weight (E, H), experts.gate_up_proj (E, 2I, H), experts.down_proj (E, H, I); the experts' with E/W
    instead of E over a group.

    Raises:
        ValueError: a size below 1, a top_k that E experts do not allow, a stage, precision, save or swiglu_limit that
            `moe` would refuse, a group whose ranks do not divide E; when called, an x whose last dimension is not
            hidden_size.
        TypeError: when called, an x of another dtype than the parameters', without autocast.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        norm_topk_prob: bool = False,
        stage: str | None = None,
        precision: str | None = None,
        save: str | None = None,
        swiglu_limit: float | None = None,
        group: ProcessGroup | None = None,
        heap: Heaps | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes = dict(hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=num_experts)
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} = {size}: it must be at least 1")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k = {top_k}: a router over {num_experts} experts chooses 1 .. {num_experts} of them")
        check_options(swiglu_limit, save, precision)
        group = None if group is None else member(group)
        W, rank = (1, 0) if group is None else (group.size(), group.rank())
        if num_experts % W:
            raise ValueError(f"num_experts = {num_experts} cannot be split evenly over the {W} ranks of the group")
        self.gate = nn.Linear(hidden_size, num_experts, bias=False, device=device, dtype=dtype)
        here = num_experts // W
        self.experts = Experts(hidden_size, intermediate_size, here, device, dtype, rank * here, num_experts)
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob
        self.group = group
        self.heap = heap
        self.stage = stage
        self.precision = precision
        self.save = save
        self.swiglu_limit = swiglu_limit
        self.reset_parameters()

    @property
    def stage(self) -> str:
        """The rung that computes the layer."""
        return self._stage

    @stage.setter
    def stage(self, name: str | None) -> None:
        rung = stage(name or default_stage(self.group is not None, self.heap))
        if self.group is not None and not rung.over_ranks:
            raise ValueError(f'stage "{rung.name}" runs on one rank: over a group use "ranks" or "mega"')
        self._stage = rung.name

    def reset_parameters(self) -> None:
        """Draw every matrix from a normal distribution of variance 1 / fan-in. Ranks of a group that are seeded alike
        have the same router, and each its own experts."""
        for w in self.parameters():
            if self.group is None or w is self.gate.weight:
                nn.init.normal_(w, std=w.shape[-1] ** -0.5)
                continue
            others = torch.empty_like(w)
            for rank in range(self.group.size()):
                nn.init.normal_(w if rank == self.group.rank() else others, std=w.shape[-1] ** -0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., H) -> topk_ids (T, K) int64, topk_weights (T, K) fp32, logits (T, E) for auxiliary losses."""
        self._check(x)
        logits = self.gate(x.reshape(-1, x.shape[-1]))
        return *route(logits, self.top_k, self.norm_topk_prob), logits

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) -> y of the same shape."""
        with peers_are_told(self.group, self.heap, self.experts.down_proj.device):
            topk_ids, topk_weights, _ = self.route(x)
        y = self.experts(
            x.reshape(-1, x.shape[-1]),
            topk_ids,
            topk_weights,
            stage=self.stage,
            precision=self.precision,
            save=self.save,
            swiglu_limit=self.swiglu_limit,
            group=self.group,
            heap=self.heap,
        )
        return y.view(x.shape)

    def _check(self, x: Tensor) -> None:
        """Raise what the class documents of x, before a matrix product says it less plainly."""
        _, H, _ = self.experts.down_proj.shape
        if x.dim() == 0 or x.shape[-1] != H:
            raise ValueError(f"x must be (..., hidden_size) = (..., {H}), not of shape {tuple(x.shape)}")
        w = self.experts.down_proj
        if x.dtype != w.dtype and not autocast_dtype(x) and not isinstance(w, DTensor):  # FSDP may gather another dtype
            raise TypeError(f"x is {x.dtype} and the layer {w.dtype}: cast one to the other, or use torch.autocast")

    def extra_repr(self) -> str:
        shown = [f"top_k={self.top_k}", f"norm_topk_prob={self.norm_topk_prob}", f"stage={self.stage!r}"]
        for name in ("precision", "save", "swiglu_limit"):
            if (value := getattr(self, name)) is not None:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)
