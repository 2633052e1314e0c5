"""Train a Qwen3-MoE on text, with the MoE of your choice in it: a whole trainer, small enough to read.

    python3 examples/train.py examples/tiny.toml                      # less than a minute on a CPU
    python3 examples/train.py examples/tiny.toml --bench              # a step of every implementation, in turns
    torchrun --nproc-per-node=8 examples/train.py examples/qwen3-30b-a3b.toml --set parallel.ep=8

The model is that of transformers, with random weights. `moe = {type = "torch" | "mega_moe", stage = "..."}` says who
computes its experts; router, attention, loss and optimizer are the same code either way. docs/training.md explains it.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that it runs from a bare checkout
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # kernels are interpreted, which must be said before Triton is imported; more threads only wait
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)


# Settings: the sections of a TOML file, their keys and defaults.


class Section(dict):
    """A table whose keys are attributes too."""

    __getattr__ = dict.__getitem__


class ConfigError(ValueError):
    """What is asked for cannot be done; the message names the key."""


MODEL = dict(vocab_size=256, hidden_size=64, num_hidden_layers=2)  # as Qwen3MoeConfig calls them
MODEL |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_theta=1e6, initializer_range=0.02)
MODEL |= dict(moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
MOE = dict(
    type="mega_moe",  # or "torch": transformers
    stage="",  # a rung; of torch one of OF_TRANSFORMERS. "": the default rung, or eager
    save="pre",  # what a rung keeps for backward: or "inputs"
    precision="",  # what a rung's products read: or "fp8", "fp8_bwd", "mxfp8"; "": train.dtype
    compile=False,  # torch's experts by torch.compile
)
DATA = dict(
    text="",  # a file; "": docs/*.md of this repository
    tokenizer="",  # a tokenizer.json; "": bytes are tokens
    length=64,  # tokens of a sequence
    batch=4,  # sequences of a step, of all ranks together
)
TRAIN = dict(
    steps=20,
    lr=1e-3,
    warmup=5,  # steps in which the rate rises to lr
    weight_decay=0.1,
    clip=1.0,
    balance=0.01,  # weight of the loss that spreads routes evenly
    dtype="bf16",  # of products; weights, their gradients and AdamW are fp32. Or "fp32"
    activation_checkpointing="full",  # or "all but the experts", "none"
    deterministic=False,  # on a GPU: torch's kernels that give the same bits each time
    seed=0,
    log_every=1,
)
SETTINGS = dict(
    model=MODEL,
    moe=MOE,
    parallel=dict(ep=1),  # ranks that share the experts
    data=DATA,
    train=TRAIN,
    checkpoints=dict(folder="", every=100),  # "": none
    bench=dict(
        moe=[],  # []: what there is
        activation_checkpointing=[],  # each of them with every moe; []: train's
        after=0,  # steps of training, so that routes spread as in a run under way
        rounds=5,
    ),
)
WAYS = ("full", "all but the experts", "none")  # what backward makes again of a layer
CHOICES = {
    "moe.type": ("mega_moe", "torch"),
    "moe.save": ("pre", "inputs"),
    "moe.precision": ("", "fp8", "fp8_bwd", "mxfp8"),
    "train.dtype": ("bf16", "fp32"),
    "train.activation_checkpointing": WAYS,
    "bench.activation_checkpointing": WAYS,
}
MAY_BE_ZERO = (
    "steps",
    "after",
    "lr",
    "warmup",
    "weight_decay",
    "balance",
    "seed",
    "initializer_range",
)  # other numbers: above


def parse(given: Any, known: dict, at: str = "") -> Section:
    """A section with all its keys. Raises ConfigError for an unknown key, another type than the default's, a word that
    is none of the choices, or a number that is too small."""
    if not isinstance(given, dict):
        raise ConfigError(f"{at} must be a table, not {given!r}")
    found = Section((key, parse({}, value, key) if isinstance(value, dict) else value) for key, value in known.items())
    for key, value in given.items():
        name = f"{at}.{key}" if at else key
        if key not in known:
            raise ConfigError(f"unknown key {name}: {f'[{at}]' if at else 'the file'} takes {', '.join(known)}")
        kind = type(known[key])
        if kind is dict:
            value = parse(value, known[key], name)
        elif kind is float and type(value) is int:
            value = float(value)
        elif type(value) is not kind:
            raise ConfigError(f"{name} = {value!r}: it must be of type {kind.__name__}")
        for each in value if kind is list else [value]:
            if each not in CHOICES.get(name, (each,)):
                raise ConfigError(f"{name} = {value!r}: it must be one of {', '.join(map(repr, CHOICES[name]))}")
        if kind in (int, float) and not (value > 0 or (value == 0 and key in MAY_BE_ZERO)):
            raise ConfigError(f"{name} = {value}: it must be {'at least' if key in MAY_BE_ZERO else 'above'} 0")
        found[key] = [parse(each, MOE, "moe") for each in value] if name == "bench.moe" else value
    return found


def read(path: Path, changes: list[str]) -> Section:
    """The settings of a file, and changes to them: "section.key=value", or "section=value" for all of it, with a value
    as in TOML or a bare word."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    for change in changes:
        name, _, value = change.partition("=")
        section, _, key = name.partition(".")
        try:
            value = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            pass
        if not key:
            tables[section] = value
        elif isinstance(tables.setdefault(section, {}), dict):  # else parse says that it must be
            tables[section][key] = value
    return parse(tables, SETTINGS)


# Text, in sequences that are drawn in another order each time round.


def read_tokens(config: Section) -> Tensor:
    """All of the text, int64."""
    files = [Path(config.data.text)] if config.data.text else sorted((ROOT / "docs").glob("*.md"))
    try:
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.text = {config.data.text!r}: {error}") from error
    if config.data.tokenizer:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(config.data.tokenizer)
        except Exception as error:  # it raises no other kind
            raise ConfigError(f"data.tokenizer = {config.data.tokenizer!r}: {error}") from error
        tokens = torch.tensor(tokenizer.encode(text).ids)
    else:
        tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long() if text else torch.tensor([])
    if len(tokens) <= config.data.length:
        raise ConfigError(f"data.length = {config.data.length}: the text has only {len(tokens)} tokens")
    if (largest := int(tokens.max())) >= config.model.vocab_size:
        raise ConfigError(f"model.vocab_size = {config.model.vocab_size}: the text holds token {largest}")
    return tokens


def sequence(tokens: Tensor, length: int, seed: int, position: int) -> Tensor:
    """Number `position` of all that are ever drawn, with one token more, the last to be predicted."""
    count = (len(tokens) - 1) // length
    turn, at = divmod(position, count)
    first = int(torch.randperm(count, generator=torch.Generator().manual_seed(seed + turn))[at]) * length
    return tokens[first : first + length + 1]


# The model, made layer by layer: each is drawn, split and sharded before the next.


@dataclass
class Trainer:
    """A run under way. position: sequences drawn so far, which is all there is to know of the data. way: what backward
    makes again, one of WAYS. kept_bytes: what the latest forward left for backward, on a GPU. routed: what its routers
    put out, a layer each. watch: of the MoE blocks' time, for --bench."""

    config: Section
    tokens: Tensor
    meshes: tuple[DeviceMesh, ...]  # (all ranks,), or (dp x ep, ep, this rank alone)
    model: nn.Module = None
    optimizer: torch.optim.Optimizer = None
    way: str = "none"
    step: int = 0
    position: int = 0
    kept_bytes: int | None = None
    routed: list[tuple[Tensor, ...]] = field(default_factory=list)
    watch: "Watch" = field(default_factory=lambda: Watch())


def start(config: Section) -> Trainer:
    """Join the ranks, and make the model and its optimizer."""
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo", **alone)
    W, ep = dist.get_world_size(), config.parallel.ep
    if W % ep or config.model.num_experts % ep:
        raise ConfigError(f"parallel.ep = {ep}: it must divide {W} ranks and {config.model.num_experts} experts")
    m = config.model
    if m.num_experts_per_tok > m.num_experts:
        raise ConfigError(f"model.num_experts_per_tok = {m.num_experts_per_tok}: there are {m.num_experts} experts")
    if m.num_attention_heads % m.num_key_value_heads:
        heads = f"{m.num_attention_heads} heads cannot share them evenly"
        raise ConfigError(f"model.num_key_value_heads = {m.num_key_value_heads}: {heads}")
    if config.data.batch % W:
        raise ConfigError(f"data.batch = {config.data.batch}: {W} ranks cannot share it evenly")
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(config.train.seed)

    meshes = (init_device_mesh(DEVICE, (W,)),)
    if ep > 1:
        mesh = init_device_mesh(DEVICE, (W // ep, ep), mesh_dim_names=("dp", "ep"))
        meshes = mesh, mesh["ep"], init_device_mesh(DEVICE, (W, 1), mesh_dim_names=("all", "alone"))["alone"]
    trainer, t = Trainer(config, read_tokens(config), meshes), config.train
    make_model(trainer)
    parameters = trainer.model.parameters()
    trainer.optimizer = torch.optim.AdamW(parameters, t.lr, (0.9, 0.95), weight_decay=t.weight_decay, fused=True)
    swap(trainer, config.moe, t.activation_checkpointing)
    return trainer


def make_model(trainer: Trainer) -> None:
    """A model of transformers under FSDP2, the same for any number of ranks: each draws all of it, and keeps its share
    of a layer before it draws the next."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from mega_moe.integrations.fsdp import shard

    config, mesh, std = trainer.config, trainer.meshes[0], trainer.config.model.initializer_range
    rope = dict(rope_type="default", rope_theta=config.model.rope_theta)
    sizes = {key: value for key, value in config.model.items() if key != "rope_theta"}
    sizes = Qwen3MoeConfig(**sizes, rope_parameters=rope, max_position_embeddings=config.data.length)
    with torch.device("meta"):
        model = trainer.model = AutoModelForCausalLM.from_config(sizes, dtype=torch.float32).train()
    model.model.rotary_emb = type(model.model.rotary_emb)(sizes).to(DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(config.train.seed)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = bf16 if config.train.dtype == "bf16" else MixedPrecisionPolicy()

    for layer in model.model.layers:
        draw(layer, std, generator)
        layer.mlp.gate.register_forward_hook(partial(listen, trainer))
        layer.mlp.forward = partial(trainer.watch.moe, layer.mlp.forward)
        layer.forward = partial(trainer.watch.rest, layer.forward)
        layer.forward = partial(recomputed, trainer, layer.forward)
        if len(trainer.meshes) > 1:
            keep_own_experts(layer.mlp.experts, trainer.meshes[1])
            layer.mlp.group = trainer.meshes[1].get_group()
            shard(layer.mlp, mesh, trainer.meshes[1], mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    for module in (model.model.embed_tokens, model.model.norm, model.lm_head):
        draw(module, std, generator)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if DEVICE == "cpu":
        for module in (model, *model.model.layers):
            module.set_force_sum_reduction_for_comms(True)  # and divide: gloo knows no average


def draw(module: nn.Module, std: float, generator: torch.Generator) -> None:
    """Matrices from a normal distribution; vectors are the scales of norms, and 1."""
    module.to_empty(device=DEVICE)
    with torch.no_grad():
        for w in module.parameters():
            w.fill_(1.0) if w.dim() == 1 else w.normal_(std=std, generator=generator)


def listen(trainer: Trainer, *heard: Any) -> None:
    """Note what a router puts out: (logits, weights, ids). Not again where backward makes it again."""
    if len(trainer.routed) < trainer.config.model.num_hidden_layers:
        trainer.routed.append(heard[-1])


def keep_own_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Of the experts of all ranks of a group, this one's."""
    experts.num_experts //= mesh.size()
    experts._is_expert_parallel = True  # so transformers' own ways know that there are others
    for name, w in list(experts.named_parameters()):
        own = w.detach().unflatten(0, (mesh.size(), -1))[mesh.get_local_rank()]
        setattr(experts, name, nn.Parameter(own.clone()))


OF_TRANSFORMERS = ("eager", "grouped_mm", "batched_mm")
COMPILER = "inductor" if DEVICE == "cuda" else "aot_eager"  # on a CPU without a C++ compiler


def swap(trainer: Trainer, moe: Section, way: str) -> None:
    """From now on `moe` computes the experts, and backward makes `way` again. Over ranks transformers' all_to_all
    brings rows to its own experts."""
    ours, over_ranks, precisions = moe.type == "mega_moe", len(trainer.meshes) > 1, dict.fromkeys(OF_TRANSFORMERS, ())
    if ours:
        from mega_moe import LADDER
        from mega_moe.integrations.transformers import register
        from mega_moe.registry import DEFAULT, DEFAULT_OVER_RANKS

        precisions = {rung.name: rung.precisions for rung in LADDER if rung.over_ranks or not over_ranks}
        precisions[""] = precisions[DEFAULT_OVER_RANKS if over_ranks else DEFAULT]
        register(save=moe.save, precision=moe.precision or None)
    if moe.stage and moe.stage not in precisions:
        stages, where = ", ".join(repr(stage) for stage in precisions if stage), "over ranks " if over_ranks else ""
        raise ConfigError(f"moe.stage = {moe.stage!r}: {where}{moe.type} has {stages}")
    if moe.precision and moe.precision not in precisions.get(moe.stage, ()):
        able = " or ".join(repr(stage) for stage, its in precisions.items() if stage and moe.precision in its) or "none"
        raise ConfigError(f"moe.precision = {moe.precision!r}: moe.type = {moe.type!r} has it with stage {able}")
    if moe.compile and (ours or over_ranks or way == "all but the experts"):
        where = "moe.type = 'torch', without parallel.ep and activation_checkpointing = 'all but the experts'"
        raise ConfigError(f"moe.compile = true: it is for {where}")
    name = ":".join(filter(None, ("mega_moe", moe.stage))) if ours else moe.stage or "eager"
    for layer in trainer.model.model.layers:
        experts = layer.mlp.experts
        vars(experts).pop("forward", None)  # of the one before
        if over_ranks:
            from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

            _, ep_mesh, tp_mesh = trainer.meshes
            ways = dict(tp_mesh=tp_mesh, ep_implementation=name if ours else "all_to_all")
            EpDispatchExpertsParallel().install_forward(experts, ep_mesh, **ways)
        forward = torch.compile(experts.forward, backend=COMPILER) if moe.compile else experts.forward
        experts.forward = partial(in_experts, forward)
    trainer.model.set_experts_implementation("eager" if ours and over_ranks else name)
    trainer.way = way


# What backward makes again.


PRODUCTS = ("mega_moe::forward", "aten::mm", "aten::bmm", "aten::_grouped_mm", "transformers::grouped_mm_fallback")
IN_EXPERTS = [False]


def in_experts(forward: Callable, *args) -> Tensor:
    """The forward of experts, as `kept` is to know."""
    IN_EXPERTS[0] = True
    try:
        return forward(*args)
    finally:  # making again ends by an exception, as soon as backward has all it needs
        IN_EXPERTS[0] = False


def kept(_, op: Any, *args, **kwargs) -> CheckpointPolicy:
    """What experts multiplied is kept, all else made again."""
    keep = IN_EXPERTS[0] and op.name().split(".")[0] in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(trainer: Trainer, forward: Callable, *args, **kwargs) -> Any:
    """The forward of a layer, of which backward keeps the inputs alone, or these and its experts' products, or all.
    FSDP gathers weights before it, once for both."""
    if trainer.way == "none":
        return forward(*args, **kwargs)
    contexts = partial(create_selective_checkpoint_contexts, kept)
    options = dict(context_fn=contexts) if trainer.way == "all but the experts" else {}
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


# Steps.


def batch(trainer: Trainer) -> Tensor:
    """This rank's share of the next sequences, (sequences, length + 1)."""
    data, share = trainer.config.data, trainer.config.data.batch // dist.get_world_size()
    first = trainer.position + dist.get_rank() * share
    of = partial(sequence, trainer.tokens, data.length, trainer.config.train.seed)
    trainer.position += data.batch
    return torch.stack([of(first + at) for at in range(share)]).to(DEVICE)


def train_step(trainer: Trainer, ids: Tensor, lr: float) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of this rank's tokens, the norm of the whole gradient, and the routes to each expert of each layer, of
    all ranks, (layers, E); all on the device."""
    trainer.routed.clear()
    trainer.optimizer.zero_grad()
    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else None
    logits = trainer.model(input_ids=ids[:, :-1], use_cache=False).logits
    loss = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    trainer.kept_bytes = torch.cuda.memory_allocated() - before if DEVICE == "cuda" else None
    routes, uneven = balance(trainer)
    (loss + trainer.config.train.balance * uneven).backward()
    norm = nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.config.train.clip)
    for group in trainer.optimizer.param_groups:
        group["lr"] = lr
    trainer.optimizer.step()
    return loss.detach(), norm.full_tensor(), routes


def rate(config: Section, step: int) -> float:
    """Of learning, in a step."""
    return config.train.lr * min(1.0, (step + 1) / max(config.train.warmup, 1))


def balance(trainer: Trainer) -> tuple[Tensor, Tensor]:
    """Routes to each expert of each layer, of all ranks, and how uneven they are: E * sum_e f_e * p_e, mean of layers,
    where f is an expert's share of all routes and p its mean probability (Switch Transformer, equation 4)."""
    logits, ids = (torch.stack([out[at] for out in trainer.routed]) for at in (0, 2))
    E = logits.shape[-1]
    routes = ids.new_zeros(len(ids), E).scatter_add_(1, ids.flatten(1), torch.ones_like(ids).flatten(1))
    dist.all_reduce(routes)
    share = routes / routes.sum(1, keepdim=True)
    return routes, E * (share * logits.float().softmax(-1).mean(1)).sum(1).mean()


def train(config: Section, resume: bool = False) -> Iterator[dict]:
    """Train, and yield what is to be told of every `log_every` steps."""
    t, folder = config.train, config.checkpoints.folder
    latest = max(Path(folder).glob("step-????????"), default=None) if folder else None
    if resume and not latest:
        raise ConfigError(f"--resume: there is no checkpoint in checkpoints.folder = {folder!r}")
    if latest and not resume:
        raise ConfigError(f"checkpoints.folder = {folder!r} has some: go on with --resume, or name another")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)  # now, rather than after the first hundred steps
    trainer = start(config)
    if latest:
        load(trainer, latest)
    told, since = trainer.step, now()
    while trainer.step < t.steps:
        lr = rate(config, trainer.step)
        loss, norm, routes = train_step(trainer, batch(trainer), lr)
        trainer.step += 1
        if trainer.step % t.log_every == 0 or trainer.step == t.steps:
            facts = dict(step=trainer.step, loss=mean(loss), grad_norm=float(norm), lr=lr)
            facts |= rates(config, (now() - since) / (trainer.step - told)) | load_of_experts(routes)
            yield facts | dict(peak_bytes=torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None)
            told, since = trainer.step, now()
        if folder and (trainer.step % config.checkpoints.every == 0 or trainer.step == t.steps):
            before = now()
            save(trainer)
            since += now() - before


# Checkpoints: a folder each, under its name only when it is whole.


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that a run goes on from. Random numbers are alike on all ranks."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    rng = dict(cpu=torch.get_rng_state()) | (dict(cuda=torch.cuda.get_rng_state()) if DEVICE == "cuda" else {})
    counted = dict(step=trainer.step, position=trainer.position, settings=fixed(trainer.config))
    return dict(model=model, optimizer=optimizer, rng=rng) | counted


def fixed(config: Section) -> dict[str, Any]:
    """The settings that make a checkpoint's weights what they are, and its position a place in the data."""
    model = {f"model.{key}": value for key, value in config.model.items()}
    return model | {"data.length": config.data.length, "train.seed": config.train.seed}


def save(trainer: Trainer) -> None:
    whole = Path(trainer.config.checkpoints.folder) / f"step-{trainer.step:08}"
    dcp.save(state_of(trainer), checkpoint_id=whole.with_suffix(".half"))
    if dist.get_rank() == 0:
        shutil.rmtree(whole, ignore_errors=True)
        whole.with_suffix(".half").rename(whole)
    dist.barrier()


def load(trainer: Trainer, path: Path) -> None:
    """Go on from a checkpoint. Raises ConfigError, before weights are read, where `fixed` settings are others."""
    now_is, was = fixed(trainer.config), dict(settings=fixed(trainer.config))
    dcp.load(was, checkpoint_id=path)
    for name, value in was["settings"].items():
        if value != now_is[name]:
            raise ConfigError(f"{name} = {now_is[name]!r}: {path} was made with {value!r}, and goes on with that alone")
    state = state_of(trainer)
    dcp.load(state, checkpoint_id=path)
    its = dict(model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    set_state_dict(trainer.model, trainer.optimizer, **its)
    for group in trainer.optimizer.param_groups:  # which were read as well
        group["weight_decay"] = trainer.config.train.weight_decay
    trainer.step, trainer.position = state["step"], state["position"]
    torch.set_rng_state(state["rng"]["cpu"])
    if DEVICE == "cuda":
        torch.cuda.set_rng_state(state["rng"]["cuda"])


# What is told.


def now() -> float:
    """Seconds, when the device has done all that it was told to."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def mean(value: Tensor) -> float:
    """Over ranks."""
    dist.all_reduce(value := value.double())
    return float(value) / dist.get_world_size()


class Watch:
    """How long the MoE blocks take, with their routers: forward as long as the call; backward from the gradient of
    their output to that of their input. What is made again of a layer is made in between, as soon as the block's
    backward asks for the first of it: so a layer's forward is marked too, as the rest."""

    def __init__(self):
        self.on, self.whose, self.marks = False, ["rest"], []

    def mark(self, begins: str = "") -> None:
        """From now on the time is of what begins; or, as that ends, of what it began in."""
        self.whose.append(begins) if begins else self.whose.pop()
        if self.on:
            self.marks.append((self.whose[-1], stamp()))

    def moe(self, forward: Callable, x: Tensor) -> Tensor:
        """The forward of a block."""
        y = self.rest(forward, x, whose="moe")
        if x.requires_grad:  # else there will be no backward
            x.register_hook(lambda _: self.mark())
            y.register_hook(lambda _: self.mark("moe"))
        return y

    def rest(self, forward: Callable, *args, whose: str = "rest", **kwargs) -> Any:
        """The forward of a layer."""
        self.mark(whose)
        try:
            return forward(*args, **kwargs)
        finally:
            self.mark()

    def seconds(self) -> float:
        """Of the MoE blocks, since `marks` was empty."""
        return sum(between(a, b) for (whose, a), (_, b) in pairwise(self.marks) if whose == "moe")


def stamp() -> Any:
    """A moment of the device, which goes on working."""
    if DEVICE == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a: Any, b: Any) -> float:
    """Seconds from one moment to another, when both are past."""
    return b - a if DEVICE == "cpu" else a.elapsed_time(b) / 1e3


def flops_per_token(config: Section) -> int:
    """Of the products of a step: two for each weight that a token meets and for each score of attention, with its half
    of the sequence, forward; and twice that backward. What is made again does not count."""
    m = config.model
    heads, kv = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
    attention = m.hidden_size * (2 * heads + 2 * kv) + 2 * heads * config.data.length // 2
    experts = m.num_experts_per_tok * 3 * m.hidden_size * m.moe_intermediate_size
    router = m.hidden_size * m.num_experts
    return 3 * 2 * (m.num_hidden_layers * (attention + router + experts) + m.vocab_size * m.hidden_size)


def rates(config: Section, seconds: float) -> dict[str, float | None]:
    """Of one step. MFU is a share of the data sheet's dense rate; None where no sheet is known."""
    from mega_moe.roofline import ceiling

    tokens = config.data.batch * config.data.length / dist.get_world_size() / seconds
    sheet = ceiling(torch.cuda.get_device_name()) if DEVICE == "cuda" else None
    dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    mfu = tokens * flops_per_token(config) / (sheet.tflops(dtype) * 1e12) if sheet else None
    return dict(s_per_step=seconds, tokens_per_s_per_rank=tokens, mfu=mfu)


def load_of_experts(routes: Tensor) -> dict[str, float]:
    """How evenly routes (layers, E) spread: in the worst layer the most of an expert, as a multiple of the mean; the
    entropy as a share of the largest, mean of layers; and how many experts of all layers have none."""
    share = routes.double() / routes.sum(1, keepdim=True)
    entropy = torch.special.entr(share).sum(1).mean() / max(math.log(routes.shape[1]), 1e-9)
    dead = int((routes == 0).sum())
    return dict(max_load=float(share.max()) * routes.shape[1], entropy=float(entropy), dead_experts=dead)


def line(facts: dict) -> str:
    """A step, for people."""
    left = "step {step:5}  loss {loss:.4f}  norm {grad_norm:.3f}  {tokens_per_s_per_rank:9,.0f} tokens/s/rank"
    right = "load: max {max_load:.2f}, entropy {entropy:.3f}, dead {dead_experts}"
    return f"{left}  MFU {{mfu}}  peak {{peak_bytes}}  {right}".format(**facts | shown(facts))


def shown(facts: dict) -> dict[str, str]:
    """What not every device knows."""
    mfu, peak = facts["mfu"], facts["peak_bytes"]
    return dict(mfu="–" if mfu is None else f"{mfu:.1%}", peak_bytes="–" if peak is None else f"{peak / 2**30:.1f} GiB")


# Implementations side by side.


def bench(config: Section) -> Iterator[dict]:
    """Whole steps of each implementation, in turns, on the same weights and batches: AdamW does its work at a rate of
    0, which leaves every weight as it is. So losses and norms differ by what an implementation rounds, and no more.
    Before, `bench.after` steps are taken as in training.

    Yields what is known after each round: machine, config, rounds, load (of experts, as `load_of_experts` has it), and
    rows. A row: moe, activation_checkpointing, s_per_step (median of the rounds, each of its slowest rank), spread
    (half of the interquartile range), tokens_per_s_per_rank, mfu, moe_share (of a step, in the MoE blocks; median, of
    rank 0), peak_bytes and kept_bytes (by forward for backward; of rank 0), loss (of the last round); and
    loss_difference and norm_difference, the furthest of any round from the first row's, relative to it.
    """
    trainer = start(config)
    for step in range(config.bench.after):
        train_step(trainer, batch(trainer), rate(config, step))
    trainer.watch.on = True
    ways = config.bench.activation_checkpointing or [config.train.activation_checkpointing]
    contestants = [(moe, way) for way in ways for moe in config.bench.moe or implementations(config, ways)]
    seen = [dict(seconds=[], share=[], loss=[], norm=[], peak=[], kept=[]) for _ in contestants]
    for at in range(config.bench.rounds + 1):
        ids = batch(trainer)
        for contestant, its in zip(contestants, seen):
            swap(trainer, *contestant)
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            dist.barrier()
            trainer.watch.marks.clear()
            since = now()
            loss, norm, routes = train_step(trainer, ids, lr=0.0)
            own = now() - since
            seconds = torch.tensor(own, device=DEVICE)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if at:  # the first compiles
                peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
                found = dict(seconds=float(seconds), share=trainer.watch.seconds() / own)
                found |= dict(loss=mean(loss), norm=float(norm), peak=peak, kept=trainer.kept_bytes)
                for key, value in found.items():
                    its[key].append(value)
        if at:
            rows = [row(config, *contestant, its, seen[0]) for contestant, its in zip(contestants, seen)]
            yield dict(machine=machine(), config=config, rounds=at, load=load_of_experts(routes), rows=rows)


def implementations(config: Section, ways: list[str]) -> list[Section]:
    """What stands side by side where nothing is said."""
    alone = config.parallel.ep == 1
    moes = [dict(type="torch", stage="eager"), dict(type="torch", stage="grouped_mm")]
    if alone and "all but the experts" not in ways:
        moes.append(dict(type="torch", stage="grouped_mm", compile=True))
    moes += [dict(stage="persistent" if alone else "ranks"), dict(stage="mega")]
    moes += [dict(stage=stage, precision="fp8") for stage in ("persistent", "mega") if alone or stage == "mega"]
    return [parse(moe | dict(save=config.moe.save), MOE, "moe") for moe in moes]


def row(config: Section, moe: Section, way: str, its: dict[str, list], first: dict[str, list]) -> dict:
    """Of what was seen of an implementation, beside the first: what `bench` tells of it."""
    low, middle, high = statistics.quantiles(its["seconds"] * 2, n=4)
    off = {key: max(abs(a / b - 1) for a, b in zip(its[key], first[key])) for key in ("loss", "norm")}
    found = dict(moe=moe, activation_checkpointing=way, **rates(config, middle), spread=(high - low) / 2)
    found |= dict(moe_share=statistics.median(its["share"]), loss=its["loss"][-1])
    found |= dict(peak_bytes=its["peak"][-1], kept_bytes=its["kept"][-1])
    return found | dict(loss_difference=off["loss"], norm_difference=off["norm"])


def machine() -> dict:
    """What the times are of."""
    from mega_moe import ladder

    its = ladder.machine(DEVICE)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    versions = {name: its[name] for name in ("torch", "triton", "python")} | dict(transformers=version("transformers"))
    return dict(device=device, ranks=dist.get_world_size(), date=date.today().isoformat(), **versions)


def table(measured: dict) -> str:
    """For people."""
    rows, ways = measured["rows"], {its["activation_checkpointing"] for its in measured["rows"]}
    names = [named(its["moe"]) + (f", {its['activation_checkpointing']}" if len(ways) > 1 else "") for its in rows]
    widest = max(map(len, names))
    form = " {s_per_step:9.4f} ± {spread:7.4f} {moe_share:6.0%} {tokens_per_s_per_rank:14,.0f} {mfu:>7} "
    form += "{peak_bytes:>10} {loss:8.4f} {loss_difference:9.1e} {norm_difference:9.1e}"
    lines = ["{device}, {ranks} ranks, torch {torch}".format(**measured["machine"])]
    heads = ("s/step", "in MoE", "tokens/s/rank", "MFU", "peak", "loss", "loss off", "norm off")
    lines.append("moe".ljust(widest) + " {:>19} {:>6} {:>14} {:>7} {:>10} {:>8} {:>9} {:>9}".format(*heads))
    lines += [name.ljust(widest) + form.format(**its | shown(its)) for name, its in zip(names, rows)]
    return "\n".join(lines)


def named(moe: dict) -> str:
    """In a few words."""
    extra = "compiled" * moe["compile"], "inputs" * (moe["save"] == "inputs")
    return " ".join(filter(None, (moe["type"], moe["stage"], moe["precision"], *extra)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="instead of the file's")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--bench", action="store_true", help="instead: time a step of each implementation")
    parser.add_argument("--json", action="store_true", help="print JSON: an object a line, a step or a round each")
    arguments = parser.parse_args()
    form = json.dumps if arguments.json else table if arguments.bench else line
    try:
        config = read(arguments.config, arguments.set)
        steps = bench(config) if arguments.bench else train(config, arguments.resume)
        for told in steps if arguments.json or not arguments.bench else deque(steps, maxlen=1):
            if dist.get_rank() == 0:
                print(form(told), flush=True)
    except (ConfigError, tomllib.TOMLDecodeError, UnicodeDecodeError, ImportError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
