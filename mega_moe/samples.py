"""Layers to run: random ones with a chosen routing, the small one of the lessons, and real ones from a file.

How tokens spread over experts decides how hard a layer is to run, so the spread is an argument: every expert equally
busy, experts drawn uniformly, a long-tailed spread, or one expert that every token visits.
"""

from functools import partial
from math import lcm
from pathlib import Path

import torch
from torch import Tensor

from .shapes import Inputs, Problem

ROUTINGS = ("balanced", "random", "zipf", "hot")

LAYER = ("x", "topk_ids", "topk_weights", "w_gate_up", "w_down")
"""The names of a layer's tensors in a safetensors file: those of `Inputs`."""


def random_inputs(
    problem: Problem, routing: str = "balanced", seed: int = 0, scale: float = 1.0
) -> tuple[Inputs, Tensor]:
    """A random layer, and a random dy (T, H) for its output; the same for the same seed, device and torch version.

    x ~ N(0, 1) * scale, weights ~ N(0, 1) / sqrt(fan-in), dy ~ N(0, 1) * min(1, scale): activations stay near `scale`
    through the layer, and large x does not come with large dy as well, whose products would overflow fp16.
    topk_ids are int64 and distinct within a token (as long as K <= E), topk_weights fp32 (float64 in a float64 problem)
    and sum to 1 over a token's slots. All are drawn on `problem.device`.

    routing: "balanced" gives every expert T*K/E rows, as evenly as whole numbers allow; "random" draws every token's
    experts uniformly; "zipf" has a long tail; "hot" sends every token to one expert and the other routes anywhere.
    Raises ValueError for another word.
    """
    p = problem
    if routing not in ROUTINGS:
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, not {routing!r}")
    generator = torch.Generator(p.device).manual_seed(seed)
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, device=p.device, dtype=wide).mul_(std).to(p.dtype)

    x = normal(p.T, p.H, std=scale)
    ids = {"balanced": _balanced, "random": _random, "zipf": _zipf, "hot": _hot}[routing](p, generator)
    topk_weights = torch.randn(p.T, p.K, generator=generator, device=p.device, dtype=wide).softmax(-1)
    w_gate_up = normal(p.E, 2, p.I, p.H, std=p.H**-0.5)
    w_down = normal(p.E, p.H, p.I, std=p.I**-0.5)
    dy = normal(p.T, p.H, std=min(1.0, scale))
    return Inputs(x, ids, topk_weights, w_gate_up, w_down), dy


def _balanced(p: Problem, generator: torch.Generator) -> Tensor:
    """Deal experts like cards: a shuffled deck of all E, repeated, K cards to each token in turn.

    K neighbours in a repeated deck are distinct as long as K <= E. After lcm(E, K) cards a token's hand ends where the
    deck does: there a freshly shuffled deck takes over, so that not all tokens share the same few hands.
    """
    block = lcm(p.E, p.K)
    blocks = -(-p.R // block)
    decks = _uniform(blocks, p.E, p=p, generator=generator).argsort(-1)
    hands = decks.repeat(1, block // p.E).flatten()[: p.R].view(p.T, p.K)
    return _shuffle_slots(hands[_uniform(p.T, p=p, generator=generator).argsort()], p, generator)


def _random(p: Problem, generator: torch.Generator) -> Tensor:
    """Uniform draws, much as a freshly initialised router makes them: rows of an expert scatter around the mean.

    A token has an expert with probability K/E, so the rows of an expert are binomial in T: with 128 experts, 8 routes a
    token and 16384 tokens 1024 on average, with a standard deviation of 31.
    """
    return _draw(torch.zeros(p.T, p.E, device=p.device), p, generator)


def _zipf(p: Problem, generator: torch.Generator) -> Tensor:
    """Draws from Zipf's law: the n-th most popular expert with a probability proportional to 1/n.

    With 128 experts and 8 routes a token the busiest expert then has about 13 times the mean.
    """
    popularity = 1 + _uniform(p.E, p=p, generator=generator).argsort()
    return _draw(-popularity.log().expand(p.T, p.E), p, generator)


def _hot(p: Problem, generator: torch.Generator) -> Tensor:
    """One expert in every token, at any slot; the other K-1 routes spread evenly over the other experts."""
    hot = torch.randint(p.E, (1,), generator=generator, device=p.device)
    log_probability = torch.zeros(p.T, p.E, device=p.device)
    log_probability[:, hot] = 1e9  # larger than any noise: always among the first
    ids = _draw(log_probability, p, generator)
    if p.K > p.E:  # drawn with repetition
        ids[:, 0] = hot
        return _shuffle_slots(ids, p, generator)
    return ids


def _draw(log_probability: Tensor, p: Problem, generator: torch.Generator) -> Tensor:
    """K experts a token, (T, E) -> (T, K): the K largest of log-probability + Gumbel noise are K draws without
    repetition (Gumbel-max trick); with more routes than experts, draws with repetition."""
    if p.K > p.E:
        return torch.multinomial(log_probability.softmax(-1), p.K, replacement=True, generator=generator)
    noise = -_uniform(p.T, p.E, p=p, generator=generator).clamp_(1e-20).log().neg().log()
    return _shuffle_slots((log_probability + noise).topk(p.K, -1).indices, p, generator)


def _shuffle_slots(ids: Tensor, p: Problem, generator: torch.Generator) -> Tensor:
    """Each token's experts in random slots."""
    return ids.gather(1, _uniform(*ids.shape, p=p, generator=generator).argsort(-1))


def _uniform(*shape: int, p: Problem, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=p.device)


# --8<-- [start:course_example]
def course_example(
    experts: int = 3, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Inputs, Tensor]:
    """The layer that goes through all lessons, and dy (4, 2): numbers small enough to follow with a pencil.

    T = 4 tokens, K = 2 routes each, H = 2, I = 1. Expert 0 is popular, expert 1 is not, and token 2's second route is
    masked, so there are seven rows. Every gate that is computed is 1 or 2. A fourth expert, which no token wants, lets
    two ranks share them; `experts` is 3 or 4, and anything else is a ValueError.
    """
    if experts not in (3, 4):
        raise ValueError(f"the example has 3 experts, or 4 for two ranks, not {experts}")
    numbers = partial(torch.tensor, dtype=dtype, device=device)
    x = numbers([[1, 0], [0, 1], [1, 1], [2, -1]])  # (T, H)
    topk_ids = torch.tensor([[0, 2], [1, 0], [0, -1], [2, 0]], device=device)  # (T, K)
    topk_weights = numbers([[0.5, 0.5], [0.75, 0.25], [0.75, 0.25], [0.25, 0.75]])  # (T, K)
    w_gate = numbers([[1, 1], [0, 2], [1, 0], [0, 1]])  # (E, H): since I = 1, an expert has one gate row
    w_up = numbers([[2, 1], [1, 1], [1, 1], [1, 0]])
    w_down = numbers([[1, 0], [0, 1], [1, -1], [1, 1]])
    dy = numbers([[1, 0], [0, 1], [1, 1], [1, -1]])  # (T, H)
    w_gate_up = torch.stack([w_gate, w_up], 1)[:experts, :, None]  # (E, 2, I, H)
    return Inputs(x, topk_ids, topk_weights, w_gate_up, w_down[:experts, :, None]), dy  # w_down (E, H, I)


# --8<-- [end:course_example]


def load_layer(path: str | Path, device: str | torch.device = "cpu") -> Inputs:
    """The layer in a safetensors file, as `mega_moe.capture_layer` writes it, on `device`.

    The file holds x (T, H), topk_ids (T, K) int32 or int64, topk_weights (T, K), w_gate_up (E, 2, I, H) and w_down
    (E, H, I). A w_gate_up of rank 3 is a checkpoint's gate_up_proj (E, 2I, H), gate rows first, and is viewed as rank
    4: the rank decides, never the sizes.

    Raises ModuleNotFoundError without safetensors, FileNotFoundError, and ValueError naming the tensor that is missing
    or has a wrong rank, dtype or size, or the id that is out of range.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("reading a layer needs safetensors: pip install safetensors") from missing
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        tensors = load_file(path, device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error

    missing_names = [name for name in LAYER if name not in tensors]
    if missing_names:
        raise ValueError(
            f"{path} has no {', '.join(missing_names)}; it holds {', '.join(sorted(tensors)) or 'nothing'}"
        )
    layer = {name: tensors[name] for name in LAYER}
    w_gate_up = layer["w_gate_up"]
    if w_gate_up.ndim == 3:
        if w_gate_up.shape[1] % 2:
            raise ValueError(f"{path}: w_gate_up of rank 3 must be (E, 2I, H), not {_shape(w_gate_up)}")
        layer["w_gate_up"] = w_gate_up.unflatten(1, (2, -1))
    inputs = Inputs(**layer)
    _check_layer(path, inputs)
    return inputs


def _check_layer(path: str | Path, layer: Inputs) -> None:
    """Raise ValueError for the first tensor that does not fit the others."""
    for name, rank in zip(LAYER, (2, 2, 2, 4, 3), strict=True):
        tensor = getattr(layer, name)
        if tensor.ndim != rank:
            raise ValueError(f"{path}: {name} must have {rank} dimensions, not {_shape(tensor)}")
    p = layer.problem()
    expected = {
        "x": (p.T, p.H),
        "topk_ids": (p.T, p.K),
        "topk_weights": (p.T, p.K),
        "w_gate_up": (p.E, 2, p.I, p.H),
        "w_down": (p.E, p.H, p.I),
    }
    for name, shape in expected.items():
        tensor = getattr(layer, name)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{path}: {name} is {_shape(tensor)}, but x {_shape(layer.x)}, topk_ids {_shape(layer.topk_ids)} and "
                f"w_gate_up {_shape(layer.w_gate_up)} ask for {shape}"
            )
    if layer.topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{path}: topk_ids must be int32 or int64, not {layer.topk_ids.dtype}")
    for name in ("x", "topk_weights", "w_gate_up", "w_down"):
        if not getattr(layer, name).is_floating_point():
            raise ValueError(f"{path}: {name} must be floating point, not {getattr(layer, name).dtype}")
    if not layer.x.dtype == layer.w_gate_up.dtype == layer.w_down.dtype:
        raise ValueError(
            f"{path}: x {layer.x.dtype}, w_gate_up {layer.w_gate_up.dtype} and w_down {layer.w_down.dtype} must share "
            "one dtype"
        )
    outside = layer.topk_ids[(layer.topk_ids < -1) | (layer.topk_ids >= p.E)]
    if outside.numel():
        raise ValueError(f"{path}: topk_ids holds {int(outside[0])}; ids run from 0 to {p.E - 1}, and -1 masks a route")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
