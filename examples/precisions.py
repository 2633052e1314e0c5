"""Does a model that is trained in 8 bits follow one in 16? The same model on the same text, once in each precision.

    python3 examples/precisions.py examples/precisions.toml build/losses.json                 # a quarter of an hour
    python3 examples/precisions.py examples/precisions.toml build/losses.json --set train.steps=10 --seeds 1

A run of a seed begins from the same weights in every precision, and sees the same batches. fp32 is there to compare
with: bf16 differs from it by rounding alone, so the distance of these two is what any rounding comes to after so many
steps. Without data.text the text is that of Python's own help: its language reference, which every Python brings along.
"""

import argparse
import hashlib
import json
import platform
import sys
import tempfile
import time
from datetime import date
from importlib import import_module
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import train  # the file beside this one
from torch import Tensor
from torch.nn.functional import cross_entropy

PRECISIONS = ("fp32", "bf16", "fp8", "fp8_bwd", "mxfp8")
HELD_OUT = 0.1  # of the text, its end, is not trained on
SEQUENCES = 64  # of what is held out are looked at in the end


def text_of(config: train.Section) -> tuple[str, str]:
    """The text, and what it is called."""
    if config.data.text:
        return Path(config.data.text).read_text(encoding="utf-8"), Path(config.data.text).name
    topics = import_module("pydoc_data.topics").topics
    return "\n\n".join(
        topics[name] for name in sorted(topics)
    ), f"pydoc_data.topics of Python {platform.python_version()}"


def run(config: train.Section, precision: str, seed: int, held_out: Path) -> dict:
    """Train in one precision: the loss of every step, and that of text that was held out, both before the balancing
    loss; and the seconds that it took."""
    wide = precision == "fp32"
    changed = dict(train=dict(config.train, seed=seed, dtype="fp32" if wide else "bf16"))
    changed["moe"] = dict(config.moe, precision="" if precision in ("fp32", "bf16") else precision)
    began = time.perf_counter()
    trainer = train.start(train.parse(dict(config, **changed), train.SETTINGS))
    losses = []
    for step in range(config.train.steps):
        loss, *_ = train.train_step(trainer, train.batch(trainer), train.rate(config, step))
        losses.append(round(float(loss), 5))
    left = round(float(loss_on(trainer, held_out)), 5)
    dist.destroy_process_group()
    return dict(
        precision=precision, seed=seed, held_out=left, seconds=round(time.perf_counter() - began, 1), losses=losses
    )


@torch.no_grad()
def loss_on(trainer: train.Trainer, text: Path) -> Tensor:
    """The mean loss of the first SEQUENCES of a text, in the precision that was trained in."""
    data = train.Section(trainer.config.data, text=str(text))
    tokens = train.read_tokens(train.Section(trainer.config, data=data))
    starts = range(0, len(tokens) - 1 - data.length, data.length)[:SEQUENCES]
    losses = []
    for first in range(0, len(starts), data.batch):
        ids = torch.stack([tokens[at : at + data.length + 1] for at in starts[first : first + data.batch]])
        ids = ids.to(train.DEVICE)
        trainer.routed.clear()
        logits = trainer.model(input_ids=ids[:, :-1], use_cache=False).logits
        losses.append(cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none").mean(1))
    return torch.cat(losses).mean()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a TOML file, as train.py takes it")
    parser.add_argument("results", type=Path, help="a JSON file to write, a line for each run")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="instead of the file's")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    arguments = parser.parse_args()
    config = train.read(arguments.config, arguments.set)
    text, called = text_of(config)
    cut = int(len(text) * (1 - HELD_OUT))
    facts = dict(called=called, bytes=len(text.encode()), sha256=hashlib.sha256(text.encode()).hexdigest())
    device = torch.cuda.get_device_name() if train.DEVICE == "cuda" else "CPU"
    machine = dict(device=device, torch=torch.__version__, date=date.today().isoformat())

    runs = []
    with tempfile.TemporaryDirectory() as folder:
        seen, held_out = Path(folder) / "seen", Path(folder) / "held out"
        seen.write_text(text[:cut], encoding="utf-8")
        held_out.write_text(text[cut:], encoding="utf-8")
        here = train.Section(config, data=train.Section(config.data, text=str(seen)))
        for seed, precision in product(range(arguments.seeds), PRECISIONS):
            its = run(here, precision, seed, held_out)
            runs.append(its)
            write(arguments.results, dict(machine=machine, text=facts, config=config), runs)
            ends = f"loss {its['losses'][0]:.4f} ... {its['losses'][-1]:.4f}  held out {its['held_out']:.4f}"
            print(f"seed {seed}  {precision:8} {ends}  {its['seconds']:.0f} s", flush=True)
    return 0


def write(path: Path, facts: dict, runs: list[dict]) -> None:
    """A line for each of them: what is there so far."""
    lines = [f'"{key}": {json.dumps(value)}' for key, value in facts.items()]
    lines.append('"runs": [\n' + ",\n".join(json.dumps(its) for its in runs) + "\n]")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
