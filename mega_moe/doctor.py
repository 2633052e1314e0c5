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
    """What a layer takes over W ranks, a process each: `problem.T` tokens of each, bf16, products in
    `problem.precision`, one that rung mega has. As a report.

    A heap has views of fixed sizes (see symmetric.Layout). Pools hold the rows that a rank receives, and are made for
    as many as it may receive; they live for one call. On a CPU the tiles are those of an H200.
    """
    from .kernels import blocks  # which needs Triton
    from .kernels.mega import parts_of_weight

    p = problem.at(ranks=W, tokens_per_rank=(problem.T,))
    tiles = blocks.mega_for(p) if p.device == "cuda" else blocks.blocks_of_target("sm_90", p.dtype).mega
    of_codes = blocks.fp8_tiles()  # whose blocks are as large on every device
    of_forward = of_codes if p.precision == "fp8" else tiles
    of_backward = tiles if p.precision == "bf16" else of_codes
    parts = parts_of_weight(p, of_backward)
    layout = Layout(W, max(p.T, 1), p.H, p.K, p.E, p.dtype, torch.float32, parts, p.token_scales)
    rooms = {"all there can be, W*T*K": W * p.T * p.K, "random routing, 1.25*T*K": ceil(1.25 * p.T * p.K)}
    dtype = str(p.dtype).removeprefix("torch.") + ("" if p.precision == "bf16" else f", products in {p.precision}")
    published = "2 x, 2 dy (T, H), 2 of x as codes" if p.token_scales else "2 x, 2 dy (T, H)"
    lines = [
        f"{name} over {W} ranks, {p.T:,} tokens and {p.E_here} experts a rank, {dtype}",
        "",
        f"heap of a rank            {in_units(layout.bytes):>10}    {published}, slots (T, K, H), and plans",
        "",
    ]
    for what, rows in rooms.items():
        pools = bytes_of_pools(p.at(max_rows=rows), of_forward.BLOCK_R, of_backward.BLOCK_R)
        lines.append(f"max_rows = {rows:<11,}    {what}")
        lines += [f"  {direction:22}  {in_units(size):>10}    {of}" for direction, (size, of) in pools.items()]
    weights = 3 * p.E_here * p.I * p.H
    lines += [
        "",
        f"beside the weights        {in_units(weights * p.dtype.itemsize):>10}    3 I H of each expert, and as much of "
        "gradients",
    ]
    for direction, of_expert in CODES_OF_WEIGHTS[p.precision].items():
        size = of_expert * weights / 3 * (1 + 4 / 128**2)
        lines.append(f"  as codes, {direction:12}  {in_units(size):>10}    {of_expert} I H of each expert")
    return "\n".join(lines)


CODES_OF_WEIGHTS = {"bf16": {}, "fp8": dict(forward=3, backward=5), "fp8_bwd": dict(backward=3)}
"""How many I*H codes of an expert's weights are made in a direction: both matrices, and in backward both transposed; in
fp8 gate_up's as they are too, with which backward makes pre again."""

CODE = 1 + 4 / 128
"""Bytes of a code, and its part of a scale."""


def bytes_of_pools(problem: Problem, forward_R: int, backward_R: int) -> dict[str, tuple[float, str]]:
    """What rung mega takes for rows while a direction runs, in bytes, and of what it is made. Pools end in whole blocks
    of so many rows for each expert. Backward makes pre again."""
    p, size = problem, problem.dtype.itemsize
    in_blocks = lambda BLOCK_R: (p.R // BLOCK_R + p.E_here) * BLOCK_R
    forward, backward = in_blocks(forward_R), in_blocks(backward_R)
    as_it_is = (forward * (p.H + p.I) * size, "H + I of each row")
    pre = p.R * 2 * p.I * size
    of_backward = {
        "bf16": (backward * (2 * p.H + 5 * p.I) * size, "2H + 5I of each row"),
        "fp8": (backward * (4 * p.H + 5 * p.I) * CODE + pre, "4H + 5I of each row as codes, and 2I"),
        "fp8_bwd": (backward * ((3 * p.H + 5 * p.I) * CODE + p.H * size) + pre, "3H + 5I as codes, and H + 2I"),
    }
    return {
        "forward": (forward * (p.H + p.I) * CODE, "H + I of each row, as codes") if p.precision == "fp8" else as_it_is,
        'kept, with save="pre"': (pre, "2I of each row"),
        "backward": of_backward[p.precision],
    }


def in_units(size: float) -> str:
    """Bytes to be read."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
