"""From a record of losses to its page: no loss in docs/training.md is typed by hand.

    python3 examples/precisions.py examples/precisions.toml docs/results/losses/<date>-<device>.json
    python3 docs/render_losses.py

The first line trains. The second writes the newest record's table into the page, between its markers, and draws
docs/losses.svg.
"""

import json
import statistics
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "results" / "losses"
PAGE, FIGURE = ROOT / "docs" / "training.md", ROOT / "docs" / "losses.svg"
START, END = "<!-- losses:start -->", "<!-- losses:end -->"

BESIDE = "bf16"
"""The precision that the others are held against: by the same seed, and step by step on the same batch."""

SMOOTHED = 20
"""Steps whose mean is drawn; and the last of a run, whose mean stands in the table."""

APART = 100
"""Steps over which the slope is taken, at the end of a run."""

COLOURS = dict(fp32="#9aa0a8", bf16="#1f2430", fp8="#0072b2", fp8_bwd="#009e73", mxfp8="#d55e00")
INK = "#1f2430"


def complete(record: dict) -> dict[str, list[dict]]:
    """The runs of each precision, a seed after the other: of the seeds that were run in every precision."""
    precisions = list(dict.fromkeys(run["precision"] for run in record["runs"]))
    seeds = [seed for seed in {run["seed"] for run in record["runs"]} if len(of_seed(record, seed)) == len(precisions)]
    return {
        precision: [of_seed(record, seed)[precision] for seed in sorted(seeds)] for precision in precisions if seeds
    }


def of_seed(record: dict, seed: int) -> dict[str, dict]:
    """Its runs by precision."""
    return {run["precision"]: run for run in record["runs"] if run["seed"] == seed}


def trained(run: dict) -> float:
    """The mean loss of the last steps."""
    return statistics.mean(run["losses"][-SMOOTHED:])


def render(record: dict) -> str:
    """What stands between the markers."""
    runs, text, train = complete(record), record["text"], record["config"]["train"]
    seeds = len(runs[BESIDE])
    heads = [*(f"seed {run['seed']}" for run in runs[BESIDE]), f"held out − {BESIDE}", f"trained − {BESIDE}"]
    lines = [f"| | {' | '.join(heads)} |"]
    lines.append("|:--|" + "--:|" * (seeds + 2))
    for precision, its in runs.items():
        cells = [f"{run['held_out']:.4f}" for run in its]
        if precision != BESIDE:
            pairs = list(zip(its, runs[BESIDE], strict=True))
            cells.append(spread([a["held_out"] - b["held_out"] for a, b in pairs]))
            cells.append(spread([trained(a) - trained(b) for a, b in pairs]))
        else:
            cells += ["", ""]
        lines.append(f"| {precision} | {' | '.join(cells)} |")
    m, data, machine = record["config"]["model"], record["config"]["data"], record["machine"]
    model = f"{m['num_hidden_layers']} layers, H = {m['hidden_size']}, I = {m['moe_intermediate_size']}"
    caption = (
        f"Loss on text that was held out, after {train['steps']} steps of {data['batch']} × {data['length']} tokens. "
        f"{model}, E = {m['num_experts']}, K = {m['num_experts_per_tok']}; {text['called']}, {text['bytes']:,} bytes; "
        f"{machine['device']}, torch {machine['torch']}, {machine['date']}, stage {record['config']['moe']['stage']}. "
        f"Differences: mean over the seeds, and from the least to the largest of them. *Trained* is the mean over the "
        f"last {SMOOTHED} steps. Over the last {APART}, the loss of {BESIDE} falls by {slope(runs[BESIDE]):.4f} a step."
    )
    return "\n".join(lines) + f"\n\n{caption}"


def slope(runs: list[dict]) -> float:
    """By how much the loss falls a step at the end, from one window to another; mean over the seeds."""
    ends = [smooth(run["losses"])[1] for run in runs]
    return statistics.mean(its[-1 - APART] - its[-1] for its in ends) / APART


def spread(differences: list[float]) -> str:
    """Their mean, the least and the largest."""
    return f"{statistics.mean(differences):+.4f} ({min(differences):+.4f} to {max(differences):+.4f})"


def draw(record: dict) -> None:
    """Above the losses, their mean over seeds; below how far each run is from that of its seed in BESIDE."""
    matplotlib.rcParams["svg.hashsalt"] = "losses"  # the same file from the same numbers
    runs = complete(record)
    figure = Figure(figsize=(10, 5.6), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.3])
    for precision, its in runs.items():
        losses = [run["losses"] for run in its]
        mean = [statistics.mean(step) for step in zip(*losses)]
        above.plot(*smooth(mean), color=COLOURS[precision], linewidth=1.4)
        for run, beside in zip(its, runs[BESIDE], strict=True):
            difference = [a - b for a, b in zip(run["losses"], beside["losses"], strict=True)]
            below.plot(*smooth(difference), color=COLOURS[precision], linewidth=1)
        below.plot([], [], color=COLOURS[precision], label=precision)
    above.set_title("loss, mean over seeds", loc="left", fontsize=10, color=INK)
    below.set_title(f"loss − that of {BESIDE}, each seed", loc="left", fontsize=10, color=INK)
    below.set(xlabel="step")
    below.legend(frameon=False, ncols=5, fontsize=9)
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURE, metadata={"Date": None})


def smooth(values: list[float]) -> tuple[list[int], list[float]]:
    """The last step of each window, and the mean over it."""
    ends = list(range(SMOOTHED, len(values) + 1))
    return ends, [statistics.mean(values[end - SMOOTHED : end]) for end in ends]


def page(record: dict) -> str:
    """The page with what stands between its markers written anew."""
    before, rest = PAGE.read_text().split(START)
    return before + START + "\n\n" + render(record) + "\n\n" + END + rest.split(END)[1]


def newest() -> dict:
    return json.loads(max(RECORDS.glob("*.json")).read_text())


if __name__ == "__main__":
    PAGE.write_text(page(newest()))
    draw(newest())
