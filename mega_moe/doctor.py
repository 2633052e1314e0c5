"""What this machine is, which rungs it can run, and why not the rest. Plain text: it works where little else does."""

import textwrap
from importlib.util import find_spec

from .ladder import DTYPES, machine
from .registry import LADDER, Rung
from .shapes import PRESETS

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
    if device == "cpu":
        lines.append("         no GPU in use: Triton's kernels run in its interpreter, for checking")
    lines.append("")
    for package, use in EXTRAS.items():
        lines.append(f"{'has' if find_spec(package) else 'lacks':8} {package.replace('_', '-')}: {use}")
    for rung in LADDER:
        lines += ["", *_rung(rung, device)]
    return "\n".join(lines)


def _rung(rung: Rung, device: str) -> list[str]:
    problem = PRESETS["tiny"].at(device=device)
    why_not = {name: rung.why_not(problem.at(dtype=dtype)) for name, dtype in DTYPES.items()}
    runs = [name for name, reason in why_not.items() if not reason]
    lines = [f"{rung.name}: {rung.idea}"]
    if runs:
        lines.append(f"runs in {', '.join(runs)}")
        note = rung.note(problem.at(dtype=DTYPES[runs[0]]))
        lines += [note] if note else []
    lines += dict.fromkeys(reason for reason in why_not.values() if reason)
    return [lines[0], *(textwrap.fill(line, 110, initial_indent="  ", subsequent_indent="  ") for line in lines[1:])]
