"""moe inside TorchTitan: overrides of its routed experts, which a config names by import path.

TorchTitan builds a model from a tree of configs, and before it does, lets functions named in `override.imports` replace
nodes of the tree. There are two nodes that moe can stand for, and so two functions here. `routed_experts` takes tokens
with the router's choice, so that moe plans, gathers, computes, weighs and adds up, and brings rows to other ranks
and back. `grouped_experts` takes rows that a dispatcher of TorchTitan has already brought and sorted, and computes
them. Parameters, their names, their sharding and checkpoints stay as they are.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from .. import registry
from ..api import check_options, moe
from ..processes import heaps_for

NEEDED = "mega_moe.integrations.torchtitan needs torchtitan 0.3 (0.3.0 or newer, before 0.4)"
INSTALL = 'pip install "torchtitan>=0.3,<0.4"'

try:
    found = version("torchtitan")
except PackageNotFoundError:  # a checkout on the path has no version, and shows below what it has
    found = None
if found is not None and found.split(".")[:2] != ["0", "3"]:
    raise ImportError(f"{NEEDED}, the first with overrides by import path, and met {found}. {INSTALL}")
try:
    from torchtitan.config import derive, override
    from torchtitan.models.common import moe as titan
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher
except ImportError as error:
    raise ImportError(f"{NEEDED}, and met: {error}. {INSTALL}") from error


class Experts(titan.GroupedExperts):
    """TorchTitan's grouped experts, with its parameters w1_EFD (gate), w3_EFD (up) and w2_EDF (down), computed by moe.

    As TorchTitan's own they compute in bf16, whatever the dtypes of x and of the parameters are, or in 8 bits what is
    rounded from there, and return x's dtype.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.GroupedExperts.Config):
        """The options of `mega_moe.moe`."""

        stage: str | None = None
        precision: str | None = None
        save: str | None = None
        num_reserved_sms: int = 0

    def __init__(self, config: Config):
        if type(self) is not Experts:
            raise ValueError(
                f"{type(self).__name__} changes how experts compute, which mega_moe's would not follow: leave out this "
                "converter, or the override"
            )
        super().__init__(config)
        of_moe = ("stage", "precision", "save", "num_reserved_sms")
        self.options = {name: getattr(config, name) for name in of_moe}

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Rows sorted by expert, (R, H), and how many each expert has, (E,) -> (R, H). Rows beyond all of these are
        padding, for which y is 0."""
        row_end = num_tokens_per_expert_E.cumsum(0)
        rows = torch.arange(len(x_RD), device=x_RD.device)
        expert_of_row = torch.searchsorted(row_end, rows, right=True)
        topk_ids = expert_of_row.masked_fill(expert_of_row == len(row_end), -1)[:, None]
        return self.compute(x_RD, topk_ids, torch.ones_like(topk_ids, dtype=torch.float32))

    def compute(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, group: ProcessGroup | None = None) -> Tensor:
        """moe with these weights. Gate and up are two parameters: each call puts them into one tensor."""
        w_gate, w_up, w_down = (local(w).bfloat16() for w in (self.w1_EFD, self.w3_EFD, self.w2_EDF))
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):  # else in its dtype
            w_gate_up = torch.stack([w_gate, w_up], dim=1)
            y = moe(x.bfloat16(), topk_ids, topk_weights, w_gate_up, w_down, group=group, **self.options)
        return y.type_as(x)


class RoutedExperts(titan.RoutedExperts):
    """TorchTitan's routed experts with dispatch and combine left to moe, also over the ranks of an "ep" mesh."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.RoutedExperts.Config):
        """max_tokens: over ranks, the most tokens that a rank will bring to a call."""

        max_tokens: int | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self.max_tokens = config.max_tokens
        self.group = None

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """Tokens (B, L, H) and what the router chose for them, (B, L, K) -> (B, L, H). moe counts for itself."""
        x, scores, ids = (t.flatten(0, 1) for t in (x_BLD, topk_scores_BLK, topk_expert_ids_BLK))
        return self.inner_experts.compute(x, ids, scores.float(), self.group).view(x_BLD.shape)

    def parallelize(self, parallel_dims) -> None:
        """As TorchTitan's own; and note the ranks. Collective where max_tokens says how large heaps are to be."""
        super().parallelize(parallel_dims)
        ep_mesh = parallel_dims.get_optional_mesh("ep")
        if ep_mesh is None:
            return
        stage, precision = (self.inner_experts.options[name] for name in ("stage", "precision"))
        rung = registry.stage(stage or registry.DEFAULT_OVER_RANKS)
        if not rung.over_ranks:
            raise ValueError(f'stage "{stage}" runs on one rank: over expert_parallel_degree use "ranks" or "mega"')
        precision_of(rung, precision)
        self.group = ep_mesh.get_group()
        if self.max_tokens is not None:
            device = self.inner_experts.w2_EDF.device.type  # TorchTitan's trainer makes models on none
            heaps_for(self.group, ep_mesh.device_type if device == "meta" else device, self.max_tokens)


def local(w: Tensor) -> Tensor:
    """This rank's share of a parameter."""
    return w.to_local() if isinstance(w, DTensor) else w


def precision_of(rung: registry.Rung, precision: str | None) -> None:
    """Raise ValueError if a rung has no products in a precision."""
    if precision is not None and precision not in rung.precisions:
        able = ", ".join(map(repr, rung.precisions))
        raise ValueError(f'precision = {precision!r}: stage "{rung.name}" has {able}')


@override(target=titan.RoutedExperts.Config, description="Routed experts by mega_moe, dispatch and combine included")
def routed_experts(
    cfg: titan.RoutedExperts.Config,
    *,
    stage: str | None = None,
    precision: str | None = None,
    save: str | None = None,
    num_reserved_sms: int = 0,
    max_tokens: int | None = None,
) -> RoutedExperts.Config:
    """Override of a layer's routed experts as a whole, `torchtitan.models.common.moe.RoutedExperts`: name it
    "mega_moe.integrations.torchtitan.routed_experts" in `override.imports`.

    With expert_parallel_degree above 1, moe also brings rows to other ranks and back, and no dispatcher of TorchTitan
    has a say.

    Args:
        cfg: what TorchTitan hands over, a node of its config.
        stage: which rung computes, see `mega_moe.moe`; over ranks "ranks" or "mega".
        precision: what products read, see `mega_moe.moe`. None: bf16.
        save: what forward keeps for backward, see `mega_moe.moe`.
        num_reserved_sms: processors that are left to others, see `mega_moe.moe`.
        max_tokens: over ranks, the most tokens that a rank brings to a call, local_batch_size * seq_len over the
            degrees of context and of tensor parallelism. Heaps for as many are made with the model; torch.compile needs
            that. None: at the first call, for as many as it brings.

    Raises:
        ValueError: experts that moe does not compute, an option that `mega_moe.moe` would refuse, a max_tokens that is
            not a whole number of at least 1.
    """
    if type(cfg) is not titan.RoutedExperts.Config:
        raise ValueError(f"{type(cfg).__qualname__} is not RoutedExperts.Config of TorchTitan: another override has it")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ValueError(f"max_tokens = {max_tokens!r}: it must be a whole number, at least 1")
    its, options = cfg.token_dispatcher, dict(save=save, num_reserved_sms=num_reserved_sms)
    return derive(
        cfg,
        RoutedExperts.Config,
        inner_experts=grouped_experts(cfg.inner_experts, stage=stage, precision=precision, **options),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=its.num_experts, top_k=its.top_k),  # does nothing
        max_tokens=max_tokens,
    )


@override(target=titan.GroupedExperts.Config, description="Grouped experts by mega_moe, behind any token dispatcher")
def grouped_experts(
    cfg: titan.GroupedExperts.Config,
    *,
    stage: str | None = None,
    precision: str | None = None,
    save: str | None = None,
    num_reserved_sms: int = 0,
) -> Experts.Config:
    """Override of what computes rows that are already sorted by expert, `torchtitan.models.common.moe.GroupedExperts`:
    name it "mega_moe.integrations.torchtitan.grouped_experts" in `override.imports`.

    Use it where a token dispatcher of TorchTitan is to bring the rows, between hosts for instance. The arguments, and
    what is raised, are those of `routed_experts`; each rank computes by itself, on any rung.
    """
    if type(cfg) is not titan.GroupedExperts.Config:
        raise ValueError(
            f"{cfg._owner.__name__} is not computed by mega_moe, which computes down(silu(gate) * up) with w1_EFD, "
            "w3_EFD and w2_EDF, in bf16, without biases and without quantization: leave out the override for this "
            "model, or what has changed its experts"
        )
    check_options(None, save, precision, num_reserved_sms=num_reserved_sms)
    if stage is not None:
        precision_of(registry.stage(stage), precision)
    return derive(cfg, Experts.Config, stage=stage, precision=precision, save=save, num_reserved_sms=num_reserved_sms)
