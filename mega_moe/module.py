"""MoE: a router and experts as a torch module, with the parameter names of Hugging Face's Qwen3-MoE block."""

import torch
from torch import Tensor, nn

from .api import autocast_dtype, check_options, moe
from .registry import DEFAULT, stage
from .routing import route


class Experts(nn.Module):
    """The experts' weights, as Hugging Face fuses them: gate_up_proj (E, 2I, H), gate first, and down_proj (E, H, I).

    Checkpoints on disk name each expert's matrices apart (`0.gate_proj.weight (I, H)`, `0.up_proj.weight`,
    `0.down_proj.weight (H, I)`, `1. ...`); loading a state dict accepts both.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, device=None, dtype=None):
        super().__init__()
        empty = lambda *shape: nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.gate_up_proj = empty(num_experts, 2 * intermediate_size, hidden_size)
        self.down_proj = empty(num_experts, hidden_size, intermediate_size)
        self.register_load_state_dict_pre_hook(fuse_experts)

    def extra_repr(self) -> str:
        E, H, I = self.down_proj.shape
        return f"E={E}, H={H}, I={I}"

    def per_expert(self, prefix: str = "") -> dict[str, Tensor]:
        """The weights under the names that checkpoints on disk use, as copies."""
        named = {}
        for e, (gate_up, down) in enumerate(zip(self.gate_up_proj.detach(), self.down_proj.detach(), strict=True)):
            gate, up = gate_up.chunk(2)
            for name, w in dict(gate_proj=gate, up_proj=up, down_proj=down).items():
                named[f"{prefix}{e}.{name}.weight"] = w.clone()
        return named


def fuse_experts(module: Experts, state_dict: dict[str, Tensor], prefix: str, *_) -> None:
    """Before loading: replace the per-expert names of a checkpoint, if it has them, by the two fused tensors.

    A checkpoint that names some experts and not others is left as it is, and load_state_dict reports what is missing.
    """
    names = [
        [f"{prefix}{e}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")]
        for e in range(len(module.down_proj))
    ]
    if not all(name in state_dict for expert in names for name in expert):
        return
    experts = [[state_dict.pop(name) for name in expert] for expert in names]
    state_dict[f"{prefix}gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
    state_dict[f"{prefix}down_proj"] = torch.stack([down for _, _, down in experts])


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
        save: what forward keeps for backward, see `moe`.
        swiglu_limit: clamp before SwiGLU, see `moe`.
        device: of the parameters, as for any torch module.
        dtype: of the parameters; x must have it too, unless autocast casts both.

    Parameters: gate.weight (E, H), experts.gate_up_proj (E, 2I, H), experts.down_proj (E, H, I).

    Raises:
        ValueError: a size below 1, a top_k that E experts do not allow, a stage, save or swiglu_limit that `moe` would
            refuse; when called, an x whose last dimension is not hidden_size.
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
        stage: str = DEFAULT,
        save: str | None = None,
        swiglu_limit: float | None = None,
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
        check_options(swiglu_limit, save)
        self.gate = nn.Linear(hidden_size, num_experts, bias=False, device=device, dtype=dtype)
        self.experts = Experts(hidden_size, intermediate_size, num_experts, device, dtype)
        self.top_k = top_k
        self.norm_topk_prob = norm_topk_prob
        self.stage = stage
        self.save = save
        self.swiglu_limit = swiglu_limit
        self.reset_parameters()

    @property
    def stage(self) -> str:
        """The rung that computes the layer."""
        return self._stage

    @stage.setter
    def stage(self, name: str) -> None:
        self._stage = stage(name).name

    def reset_parameters(self) -> None:
        """Draw every matrix from a normal distribution of variance 1 / fan-in."""
        for w in self.parameters():
            nn.init.normal_(w, std=w.shape[-1] ** -0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., H) -> topk_ids (T, K) int64, topk_weights (T, K) fp32, logits (T, E) for auxiliary losses."""
        self._check(x)
        logits = self.gate(x.reshape(-1, x.shape[-1]))
        return *route(logits, self.top_k, self.norm_topk_prob), logits

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) -> y of the same shape."""
        topk_ids, topk_weights, _ = self.route(x)
        w_gate_up = self.experts.gate_up_proj.unflatten(1, (2, -1))
        y = moe(
            x.reshape(-1, x.shape[-1]),
            topk_ids,
            topk_weights,
            w_gate_up,
            self.experts.down_proj,
            stage=self.stage,
            save=self.save,
            swiglu_limit=self.swiglu_limit,
        )
        return y.view(x.shape)

    def _check(self, x: Tensor) -> None:
        """Raise what the class documents of x, before a matrix product says it less plainly."""
        _, H, _ = self.experts.down_proj.shape
        if x.dim() == 0 or x.shape[-1] != H:
            raise ValueError(f"x must be (..., hidden_size) = (..., {H}), not of shape {tuple(x.shape)}")
        dtype = self.experts.down_proj.dtype
        if x.dtype != dtype and not autocast_dtype(x):
            raise TypeError(f"x is {x.dtype} and the layer {dtype}: cast one to the other, or use torch.autocast")

    def extra_repr(self) -> str:
        shown = [f"top_k={self.top_k}", f"norm_topk_prob={self.norm_topk_prob}", f"stage={self.stage!r}"]
        for name in ("save", "swiglu_limit"):
            if (value := getattr(self, name)) is not None:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)
