"""From the model to its page: no prediction in docs/scaling.md is typed by hand.

    python3 docs/render_scaling.py

plays both Qwen3 layers over 1 to 64 ranks, writes the tables into the page, between their markers, and draws
docs/scaling.svg. It takes two minutes of a CPU; run it again when tiles, schedule or `mega_moe.predict` change.
"""

import json
import os
import sys
from functools import cache
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # nothing here runs on a GPU
sys.path.append(str(Path(__file__).resolve().parent.parent))  # a bare checkout has nothing installed

import matplotlib
import torch
from matplotlib.figure import Figure

from mega_moe import predict
from mega_moe.shapes import PRESETS

ROOT = Path(__file__).resolve().parent.parent
PAGE, FIGURE = ROOT / "docs" / "scaling.md", ROOT / "docs" / "scaling.svg"
RECORDS = [*sorted(ROOT.glob("docs/results/*.json")), *sorted(ROOT.glob("docs/results/one-gpu/*.json"))]
OVER_LINKS = sorted(ROOT.glob("docs/results/ranks/*.json"))
START, END = "<!-- predicted:start -->", "<!-- predicted:end -->"
SHAPES = ("qwen3-30b-a3b", "qwen3-235b-a22b")
DIRECTIONS = ("forward", "backward")
NODE, RANKS = 8, (1, 2, 4, 8, 16, 32, 64)

WAYS = {
    "launches apart": dict(rung="ranks"),
    "mega, unmixed": dict(mixed=False, group=16),
    "mega": {},
    "mega, deduplicated": dict(dedup=True),
}
"""What is played, and how `over_links` is asked for it. Unmixed: the order that is good on one GPU."""

COLOURS = dict(zip(WAYS, ("#9aa0a8", "#d55e00", "#0072b2", "#009e73")))
INK = "#1f2430"


@cache
def predicted(shape: str, W: int, direction: str, way: str) -> predict.Prediction:
    """T = 16384 tokens of each rank, random routing, pre made again."""
    return predict.over_links(PRESETS[shape].at(save="inputs"), W, direction, **WAYS[way])


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown, numbers to the right."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def of_one_node(shape: str) -> str:
    """What a node of eight can do with a shape, and what bounds it."""
    rows = []
    for direction in DIRECTIONS:
        for way in WAYS:
            p = predicted(shape, NODE, direction, way)
            facts = [f"**{p.ms:.2f}**", f"{p.products:.2f}", f"{p.links:.2f}", f"{p.overlap:.0%}", p.bound]
            rows.append([f"{direction}, {way}", *facts])
        rows.append([f"{direction}, Prime Mega MoE, published", f"{predict.PUBLISHED[shape, direction]}", *[""] * 4])
    return table(["", "ms", "products", "links", "overlap", "bound by"], rows)


def over_ranks(shape: str) -> str:
    """Milliseconds, forward and backward, by number of ranks."""
    both = lambda W, way: " + ".join(f"{predicted(shape, W, direction, way).ms:.2f}" for direction in DIRECTIONS)
    rows = []
    for W in RANKS:
        alone = [predicted(shape, W, direction, "mega") for direction in DIRECTIONS]
        exchange = " + ".join(f"{p.exchange:.2f}" for p in alone)
        rows.append([str(W), *(both(W, way) for way in WAYS), exchange])
    return table(["W", *WAYS, "exchange alone"], rows)


def checked() -> str:
    """What was measured on one GPU beside what is predicted for it."""
    rows = []
    for one in (one for path in RECORDS for one in predict.measured(path)):
        ms = predict.of(one)
        heaps = "" if one.ranks is None else f", {one.ranks} local heaps"
        what = one.what + (" alone" if one.what in predict.KINDS else "")
        name = f"{one.shape}, {one.rung}{heaps}, {one.routing}, {one.save}: {what}"
        rows.append([name, f"{one.ms:.2f}", f"{ms:.2f}", f"{ms / one.ms - 1:+.1%}"])
    return table(["", "measured, ms", "predicted, ms", ""], rows)


def checked_over_links() -> str:
    """What was measured over several GPUs beside what is predicted for them."""
    rows = []
    for record in (json.loads(path.read_text()) for path in OVER_LINKS):
        for part in record["parts"]:
            shape = part["name"].removeprefix("times ")
            took = {row["name"]: row["ms"] for row in part["facts"].get("rows", []) if not row["failure"]}
            for way, name in (("launches apart", "ranks, heaps"), ("mega", "mega, heaps")):
                for direction in DIRECTIONS if name in took else ():
                    ms, p = took[name][direction], predicted(shape, record["ranks"], direction, way)
                    cells = [f"{ms:.2f}", f"{p.ms:.2f}", f"{p.ms / ms - 1:+.1%}"]
                    rows.append([f"{record['ranks']} GPUs, {shape}, {way}: {direction}", *cells])
    return table(["", "measured, ms", "predicted, ms", ""], rows)


def draw() -> None:
    """Time by number of ranks, for each shape and direction."""
    matplotlib.rcParams["svg.hashsalt"] = "scaling"  # the same file from the same numbers
    figure = Figure(figsize=(10, 6.4), layout="constrained", facecolor="white")
    for row, shape in zip(figure.subplots(2, 2), SHAPES):
        for axes, direction in zip(row, DIRECTIONS):
            for way in WAYS:
                times = [predicted(shape, W, direction, way).ms for W in RANKS]
                axes.plot(RANKS, times, color=COLOURS[way], marker="o", markersize=4, label=way)
            floor = [predicted(shape, W, direction, "mega").exchange for W in RANKS[1:]]
            axes.plot(RANKS[1:], floor, color=INK, linestyle=":", label="exchange alone")
            axes.plot([NODE], [predict.PUBLISHED[shape, direction]], "k*", markersize=10, label="Prime Mega MoE")
            axes.axvline(NODE, color=INK, linewidth=0.6)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_xticks(RANKS, [str(W) for W in RANKS])
            ticks = [2**n for n in range(-1, 8) if axes.get_ylim()[0] <= 2**n <= axes.get_ylim()[1]]
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_title(f"{shape}, {direction}", loc="left", fontsize=10, color=INK)
            axes.set(xlabel="ranks", ylabel="ms")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.savefig(FIGURE, metadata={"Date": None})


def render() -> str:
    """The page with its tables written anew."""
    parts = [f"### What was measured, and what the model says\n\n{checked()}"]
    parts += [f"### The same over links\n\n{checked_over_links()}"]
    parts += [f"### A node of eight: {shape}\n\n{of_one_node(shape)}" for shape in SHAPES]
    parts += [f"### 1 to 64 ranks: {shape}\n\nForward + backward, ms.\n\n{over_ranks(shape)}" for shape in SHAPES]
    before, rest = PAGE.read_text().split(START)
    return before + START + "\n\n" + "\n\n".join(parts) + "\n\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(render())
    draw()
