"""What this machine is, which rungs it can run, and why not the rest. Plain text: it works where little else does."""

import textwrap
from importlib.util import find_spec
from math import ceil

import torch

from .ladder import DTYPES, machine
from .registry import LADDER, Rung
from .shapes import PRESETS, Problem
from .symmetric import Layout

EXTRAS = {
    "rich": "tables of `mega-moe ladder`",
    "safetensors": "layers in files: --layer, capture_layer",
    "matplotlib": "--plot",
    "transformers": "capture_layer",
    "pytest_benchmark": "mega-moe bench",
}


def examination(device: str) -> str:
    """The report for this machine and a device type ("cuda", "cpu")."""
    facts = machine(device)
    lines = [
        f"device   {facts['device']}",
        f"python   {facts['python']}",
        f"torch    {facts['torch']}",
        f"triton   {facts['triton'] or 'not installed: only the reference can run'}",
    ]
    if device == "cpu" and facts["triton"]:
        lines.append("         no GPU in use: Triton's kernels run in its interpreter, for checking;")
        lines.append("         in your own programs: start Python with TRITON_INTERPRET=1 in the environment")
    lines.append("")
    for package, use in EXTRAS.items():
        lines.append(f"{'has' if find_spec(package) else 'lacks':8} {package.replace('_', '-')}: {use}")
    return "\n".join([*lines, *_rungs(device)])


def _rungs(device: str) -> list[str]:
    """Each rung with what there is to say of it alone; then, once, what there is to say of several."""
    said = {rung.name: _sentences(rung, device) for rung in LADDER}
    names: dict[str, list[str]] = {}  # of the rungs of which a sentence is said
    for name, sentences in said.items():
        for sentence in sentences:
            names.setdefault(sentence, []).append(name)

    paragraphs = {
        f"{rung.name}: {rung.idea}": [sentence for sentence in said[rung.name] if names[sentence] == [rung.name]]
        for rung in LADDER
    }
    for sentence, several in names.items():
        if len(several) > 1:
            paragraphs.setdefault(f"{', '.join(several)}:", []).append(sentence)
    fill = lambda sentence: textwrap.fill(sentence, 110, initial_indent="  ", subsequent_indent="  ")
    return [line for head, sentences in paragraphs.items() for line in ("", head, *map(fill, sentences))]


def _sentences(rung: Rung, device: str) -> list[str]:
    """In which dtypes it runs, what is slower than it need be, and why it cannot run in the others."""
    problem = PRESETS["tiny"].at(device=device)
    why_not = {name: rung.why_not(problem.at(dtype=dtype)) for name, dtype in DTYPES.items()}
    runs = [name for name, reason in why_not.items() if not reason]
    sentences = []
    if runs:
        note = rung.note(problem.at(dtype=DTYPES[runs[0]]))
        sentences = [f"runs in {', '.join(runs)}", *([note] if note else [])]
    reasons = dict.fromkeys(reason for reason in why_not.values() if reason)
    return [*sentences, *(reason.removeprefix(f'stage "{rung.name}" ') for reason in reasons)]


def sizes_over_ranks(problem: Problem, W: int, name: str) -> str:
    """What a layer takes over W ranks, a process each: `problem.T` tokens of each, bf16. As a report.

    A heap has views of fixed sizes (see symmetric.Layout). Pools hold the rows that a rank receives, and are made for
    as many as it may receive; they live for one call. On a CPU the tiles are those of an H200.
    """
    from .kernels import blocks  # which needs Triton
    from .kernels.mega import parts_of_weight

    p = problem.at(ranks=W, tokens_per_rank=(problem.T,))
    tiles = blocks.mega_for(p) if p.device == "cuda" else blocks.blocks_of_target("sm_90", p.dtype).mega
    layout = Layout(W, max(p.T, 1), p.H, p.K, p.E, p.dtype, torch.float32, parts_of_weight(p, tiles))
    rooms = {"all there can be, W*T*K": W * p.T * p.K, "random routing, 1.25*T*K": ceil(1.25 * p.T * p.K)}
    lines = [
        f"{name} over {W} ranks, {p.T:,} tokens and {p.E_here} experts a rank, {p.dtype}".replace("torch.", ""),
        "",
        f"heap of a rank            {in_units(layout.bytes):>10}    2 x, 2 dy (T, H), slots (T, K, H), and plans",
        "",
    ]
    for what, rows in rooms.items():
        pools = bytes_of_pools(p.at(max_rows=rows), tiles.BLOCK_R)
        lines.append(f"max_rows = {rows:<11,}    {what}")
        lines += [f"  {direction:22}  {in_units(size):>10}    {of}" for direction, (size, of) in pools.items()]
    weights = 3 * p.E_here * p.I * p.H * p.dtype.itemsize
    lines += [
        "",
        f"beside the weights        {in_units(weights):>10}    3 I H of each expert, and as much of gradients",
    ]
    return "\n".join(lines)


def bytes_of_pools(problem: Problem, BLOCK_R: int) -> dict[str, tuple[int, str]]:
    """What rung mega takes for rows while a direction runs, in bytes, and of what it is made. Pools end in whole blocks
    of BLOCK_R rows for each expert."""
    p = problem
    rows = (p.R // BLOCK_R + p.E_here) * BLOCK_R
    return {
        "forward": (rows * (p.H + p.I) * p.dtype.itemsize, "H + I of each row"),
        'kept, with save="pre"': (p.R * 2 * p.I * p.dtype.itemsize, "2I of each row"),
        "backward": (rows * (2 * p.H + 5 * p.I) * p.dtype.itemsize, "2H + 5I of each row"),
    }


def in_units(size: float) -> str:
    """Bytes to be read."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
