"""moe inside prime-rl: what stands for its Mega MoE expert compute, and a reader of the table that asks for it.

prime-rl hands an MoE layer's experts, its tokens and the router's choice to one object, which brings rows to the ranks
of a group and back and computes them: `MegaMoEExpertCompute`. The one here is made and called as its own, from the same
TOML, and asks for no wheel and no multiples of sizes. prime-rl is not imported: experts are known by their attributes,
and their activation by what it computes.
"""

import tomllib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from .. import registry
from ..api import check_options, moe, peers_are_told
from ..processes import heaps_for, member
from ..shapes import PRECISIONS

TABLE = "trainer.model.moe.dispatch"
SEQ_LEN = 2048  # what prime-rl takes for model.seq_len, where a config has none


@dataclass(frozen=True)
class Dispatch:
    """What `[trainer.model.moe.dispatch]` says, where its type is "mega_moe": the last arguments of
    `MegaMoEExpertCompute`.

    Attributes:
        max_tokens_per_rank: the most tokens that a rank brings to a call.
        num_reserved_sms: processors that are left to others, to NCCL for instance.
        precision: what products read: "bf16", or in 8 bits "fp8", "fp8_bwd" (backward's alone) or "mxfp8".
    """

    max_tokens_per_rank: int
    num_reserved_sms: int = 16
    precision: str = "bf16"

    def __post_init__(self):
        whole = lambda value: isinstance(value, int) and not isinstance(value, bool)
        if not whole(self.max_tokens_per_rank) or self.max_tokens_per_rank < 1:
            raise ValueError(f"max_tokens_per_rank must be a positive whole number, not {self.max_tokens_per_rank!r}")
        if not whole(self.num_reserved_sms) or self.num_reserved_sms < 0:
            raise ValueError(f"num_reserved_sms must be a whole number, 0 or more, not {self.num_reserved_sms!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, not {self.precision!r}")


def read_dispatch(config: Path | str | Mapping[str, Any]) -> Dispatch | None:
    """What a config of prime-rl says about Mega MoE; None if its dispatch is of another type.

    Args:
        config: the path of a TOML file, or what tomllib has read of one. The table is `[trainer.model.moe.dispatch]`,
            or `[model.moe.dispatch]` in a config of the trainer alone:

                [trainer.model.moe.dispatch]
                type = "mega_moe"
                precision = "bf16"
                num_reserved_sms = 16
                max_tokens_per_rank = 16384

            Without max_tokens_per_rank it is `seq_len` of the model's table.

    Raises:
        ValueError: a key that is not one of these, a value that does not fit, a `moe.compute` of another precision than
            the dispatch: where Mega MoE computes, it has no say.
    """
    if not isinstance(config, Mapping):
        config = tomllib.loads(Path(config).read_text(encoding="utf-8"))
    model = table(table(config, "trainer") if "trainer" in config else config, "model")
    layers = table(model, "moe")
    keys = dict(table(layers, "dispatch"))
    if keys.pop("type", None) != "mega_moe":
        return None
    known = list(Dispatch.__dataclass_fields__)
    if unknown := ", ".join(key for key in keys if key not in known):
        raise ValueError(f'[{TABLE}] has {unknown}: with type = "mega_moe" its other keys are {", ".join(known)}')
    keys.setdefault("max_tokens_per_rank", model.get("seq_len", SEQ_LEN))
    try:
        dispatch = Dispatch(**keys)
    except ValueError as error:
        raise ValueError(f"[{TABLE}] {error}") from error
    compute = table(layers, "compute").get("type", dispatch.precision)
    if compute != dispatch.precision:
        raise ValueError(
            f'[{TABLE}] type = "mega_moe" computes the experts too, in {dispatch.precision}, and [{TABLE[:-8]}compute] '
            f"asks for {compute!r}: leave that table out"
        )
    return dispatch


def table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a config, empty if there is none. Raises ValueError for anything else of that name."""
    found = config.get(name, {})
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} must be a table, not {found!r}")
    return found


class MegaMoEExpertCompute:
    """Computes the experts of an MoE layer of prime-rl over the ranks of a group, as its class of this name.

    Whatever the dtypes of x and of the weights are, it multiplies in bf16, or in 8 bits what is rounded from there; it
    adds up in fp32, and returns x's dtype. Sizes are free. Heaps are made here, collectively, and shared by all layers
    of the group.

    Args:
        experts: an experts module with gate_up_proj (E/W, 2I, H), gate first, or gate_proj and up_proj (E/W, I, H), and
            down_proj (E/W, H, I); each may be a DTensor. Only looked at, and not kept.
        num_experts: E, of all ranks.
        top_k: K, experts per token.
        group: of W ranks that share the experts. None: all experts are here.
        max_tokens_per_rank: the most tokens that a rank brings to a call: heaps are made for as many. Without a group
            any number is fine.
        num_reserved_sms: processors that are left to others, see `mega_moe.moe`.
        precision: what products read, see `mega_moe.moe`. "mega", the stage over ranks unless told, has all but
            "mxfp8".
        stage: which rung computes, see `mega_moe.moe`; over ranks "ranks" or "mega".
        save: what forward keeps for backward, see `mega_moe.moe`.

    Raises:
        ValueError: experts that moe does not compute (see `validate`), num_experts that are not W times those here, an
            option that does not fit, a precision that the stage does not have.
    """

    def __init__(
        self,
        experts: nn.Module,
        num_experts: int,
        top_k: int,
        group: ProcessGroup | None,
        max_tokens_per_rank: int,
        num_reserved_sms: int = 16,
        precision: str = "bf16",
        *,
        stage: str | None = None,
        save: str | None = None,
    ):
        Dispatch(max_tokens_per_rank, num_reserved_sms, precision)
        if not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k = {top_k!r}: it must be a whole number, 1 .. num_experts = {num_experts}")
        rung = registry.stage(stage or (registry.DEFAULT if group is None else registry.DEFAULT_OVER_RANKS))
        if group is not None and not rung.over_ranks:
            raise ValueError(f'stage "{stage}" runs on one rank: over a group use "ranks" or "mega"')
        if precision not in rung.precisions:
            able = ", ".join(map(repr, rung.precisions))
            raise ValueError(f'[{TABLE}] precision = {precision!r}: stage "{rung.name}" has {able}')
        self.validate(experts)
        W = 1 if group is None else member(group).size()
        down_proj = local(experts.down_proj)
        if len(down_proj) * W != num_experts:
            raise ValueError(f"num_experts = {num_experts}, and {W} ranks with {len(down_proj)} experts each")
        self.top_k, self.max_tokens_per_rank, self.precision = top_k, max_tokens_per_rank, precision
        self.activation_clamp = clamp_of(experts.activation)
        check_options(self.activation_clamp, save)
        heap = None
        if group is not None:
            device = down_proj.device.type
            heap = heaps_for(group, "cuda" if device == "meta" else device, max_tokens_per_rank)
        self.options = dict(
            stage=stage,
            precision=None if precision == "bf16" else precision,
            save=save,
            swiglu_limit=self.activation_clamp,
            num_reserved_sms=num_reserved_sms,
            group=group,
            heap=heap,
        )

    def validate(self, experts: nn.Module) -> None:
        """Raise ValueError for experts that moe does not compute: without a gate, with biases, with another
        activation than silu(gate) * up, also with a clamp of gate and up before it."""
        has = lambda name: getattr(experts, name, None) is not None
        name = type(experts).__name__
        if not has("gate_up_proj") and not (has("gate_proj") and has("up_proj")):
            raise ValueError(f'{name}: they have no gate. Use [{TABLE}] type = "torch"')
        if not has("down_proj") or not has("activation"):
            raise ValueError(f'{name}: they have no down_proj or no activation. Use [{TABLE}] type = "torch"')
        biases = [bias for bias in ("gate_up_proj", "gate_proj", "up_proj", "down_proj") if has(f"{bias}_bias")]
        if biases:
            raise ValueError(f'{name}: they add biases, to {", ".join(biases)}. Use [{TABLE}] type = "torch"')
        clamp_of(experts.activation)

    def __call__(
        self,
        experts: nn.Module,
        x: Tensor,
        top_scores: Tensor,
        selected_experts_indices: Tensor,
        *,
        score_before_experts: bool = False,
    ) -> Tensor:
        """Tokens x (T, H), and what the router chose for them, (T, K) or flat -> (T, H), weighted and summed.

        Raises what moe raises, ValueError for more tokens than the heaps hold; and ValueError for score_before_experts,
        which multiplies x and not y: through SwiGLU that is another function.
        """
        if score_before_experts:
            raise ValueError(
                "score_before_experts = True multiplies the input of an expert by its score, and moe the output, which "
                f'is not the same through SwiGLU. Use [{TABLE}] type = "torch" for this model'
            )
        shape = (len(x), self.top_k)
        with peers_are_told(self.options["group"], self.options["heap"], x.device):
            for name, t in dict(top_scores=top_scores, selected_experts_indices=selected_experts_indices).items():
                if t.numel() != len(x) * self.top_k:
                    raise ValueError(f"{name} must be (T, K) = {shape}, or flat, not of shape {tuple(t.shape)}")
        topk_ids, topk_weights = selected_experts_indices.reshape(shape), top_scores.float().reshape(shape)
        no_autocast = nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
        try:
            with no_autocast:
                w_gate_up, w_down = gate_up_of(experts), local(experts.down_proj).bfloat16()
                return moe(x.bfloat16(), topk_ids, topk_weights, w_gate_up, w_down, **self.options).type_as(x)
        except ValueError as error:
            error.add_note(f"heaps are made for [{TABLE}] max_tokens_per_rank = {self.max_tokens_per_rank} tokens")
            raise


def gate_up_of(experts: nn.Module) -> Tensor:
    """(E, 2, I, H) in bf16: a view of a gate_up_proj that is in bf16; else a copy, of gate_proj and up_proj."""
    if getattr(experts, "gate_up_proj", None) is not None:
        return local(experts.gate_up_proj).bfloat16().unflatten(1, (2, -1))
    return torch.stack([local(experts.gate_proj).bfloat16(), local(experts.up_proj).bfloat16()], dim=1)


def local(w: Tensor) -> Tensor:
    """This rank's share of a parameter."""
    return w.to_local() if isinstance(w, DTensor) else w


def clamp_of(activation: Any) -> float | None:
    """The clamp before SwiGLU of an activation of prime-rl, a class or an object with apply(gate, up). It is tried on
    numbers, small and beyond the clamp. Raises ValueError if moe does not compute it."""
    name = getattr(activation, "__name__", type(activation).__name__)
    other = (
        f"{name}: the activation is not silu(gate) * up, also not with a clamp of gate and up before it. Use "
        f'[{TABLE}] type = "torch"'
    )
    limit = getattr(activation, "limit", None)
    if not hasattr(activation, "apply") or not isinstance(limit, int | float | None):
        raise ValueError(other)
    sizes = (0.1, 1.0, 9.0, 1e3, 2.0 * (limit or 1.0))
    numbers = torch.tensor([sign * size for size in sizes for sign in (-1, 1)], device="cpu")
    gate, up = (axis.flatten() for axis in torch.meshgrid(numbers, numbers, indexing="ij"))
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        got = activation.apply(gate, up)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if not torch.allclose(got, F.silu(gate) * up, rtol=1e-5, atol=1e-6):
        raise ValueError(other)
    return None if limit is None else float(limit)
