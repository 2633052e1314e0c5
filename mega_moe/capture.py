"""capture_layer: one MoE layer of a real model, on real text, in a file that `mega-moe ladder --layer` runs.

Random numbers route evenly and stay small; trained routers do not, and trained activations have outliers. This takes a
layer as a model meets it: the tokens that reach its experts, the experts its router chose, and its weights.
"""

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from .samples import LAYER
from .shapes import Inputs


def capture_layer(model: nn.Module, path: str | Path, *, layer: int = 0, **batch) -> Inputs:
    """Run `model(**batch)` once, and write what decoder layer number `layer` gave its experts to `path` (safetensors).

    For Hugging Face's Qwen3-MoE models (transformers >= 5, whose experts hold `gate_up_proj (E, 2I, H)` and
    `down_proj (E, H, I)` and are called with tokens, chosen experts and their weights), on any device and in any dtype:

        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", dtype="bfloat16")
        batch = tokenizer("Any text of yours", return_tensors="pt")
        mega_moe.capture_layer(model, "layer.safetensors", layer=20, **batch)

    Returns the layer as written, on the CPU: x (T, H) with T tokens of the whole batch, topk_ids (T, K), topk_weights
    (T, K), w_gate_up (E, 2, I, H), w_down (E, H, I). The model runs without gradients and in the mode it is in; its
    tensors are not changed, and the hook that listens is removed, also after an error.

    Raises ModuleNotFoundError without safetensors; ValueError where that layer does not exist, is dense, holds its
    experts in another form or another activation than silu; RuntimeError if the forward pass never reached it.
    """
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("writing a layer needs safetensors: pip install safetensors") from missing
    experts = _experts(model, layer)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def listen(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if not seen:
            seen.append(_call(*args, **kwargs))

    hook = experts.register_forward_pre_hook(listen, with_kwargs=True)
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        hook.remove()
    if not seen:
        raise RuntimeError(f"the forward pass never reached the experts of layer {layer}: nothing was written")

    x, topk_ids, topk_weights = seen[0]
    w_gate_up, w_down = experts.gate_up_proj.unflatten(1, (2, -1)), experts.down_proj
    captured = Inputs(*(t.detach().cpu().contiguous() for t in (x, topk_ids, topk_weights, w_gate_up, w_down)))
    save_file({name: getattr(captured, name) for name in LAYER}, path)
    return captured


def _call(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of Qwen3MoeExperts.forward by its own names, copied: what follows may write to them."""
    return hidden_states.clone(), top_k_index.clone(), top_k_weights.clone()


def _experts(model: nn.Module, layer: int) -> nn.Module:
    """The experts module of a decoder layer."""
    blocks = {}
    for name, module in model.named_modules():
        if found := re.search(r"(?:^|\.)layers\.(\d+)\.mlp$", name):
            blocks[int(found[1])] = module
    if layer not in blocks:
        raise ValueError(f"{type(model).__name__} has no decoder layer {layer}; it has {_listed(list(blocks))}")

    sparse = [number for number, block in blocks.items() if hasattr(block, "experts")]
    if layer not in sparse:
        raise ValueError(f"layer {layer} of {type(model).__name__} is dense; its MoE layers are {_listed(sparse)}")
    experts = blocks[layer].experts
    if not (hasattr(experts, "gate_up_proj") and hasattr(experts, "down_proj")):
        raise ValueError(
            f"{type(experts).__name__} holds no gate_up_proj and down_proj for all experts: capture_layer needs "
            "transformers >= 5, and a model whose experts are kept in one tensor"
        )
    activation = getattr(model.config, "hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"the experts' activation is {activation}, and a layer here is SwiGLU, with silu")
    return experts


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) if numbers else "none"
