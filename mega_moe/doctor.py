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
