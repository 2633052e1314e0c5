# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The course: from plain torch to one launch
#
# *Next: [0 · The layer in plain torch](s0_reference.md)*
#
# Seven lessons take one layer of a language model, a Mixture of Experts, from a loop in plain torch to a single launch a
# direction. Each lesson is one rung of [the ladder](../design.md#the-ladder): one idea, the real kernel, what it changed,
# whether it is right, and what the clock says. Nothing is simplified for the course. What you read is what runs when you
# write `stage="grouped"` in your own model.
#
# No GPU is needed, to read or to run. This page says why the effort is worth it, what stands where, and how to take it.

# %% tags=["hide-input"]
import re

import matplotlib.pyplot as plt

from mega_moe import LADDER, predict, recorded, roofline, routing
from mega_moe.samples import course_example
from mega_moe.schedule import BLOCK, EXPERT, KIND, KINDS, ROW, ROWS, Phase, Work, home_of_row, schedule
from mega_moe.shapes import PRESETS


class Words:
    """Markdown that a page shows as such, with numbers in it that were computed."""

    def __init__(self, *lines):
        self.text = "\n".join(lines)

    def _repr_markdown_(self):
        return self.text


def table(head, *rows):
    """Rows of cells, as Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return Words(lines[0], "|---" * len(head) + "|", *lines[1:])


# %% [markdown]
# ## Why MoE training wastes GPUs
#
# An MoE layer sends each token to a few of many experts, so that a model can know much and compute little. A GPU likes
# the opposite: few large matrices, many rows for each. In between stands everything that is not a matrix product.
# Tokens are sorted and copied to their experts, a step writes to memory what the next one reads, launches begin and end,
# and rows travel between GPUs.
#
# How much is that? Here is one layer of two models, forward and backward, with the [benchmark's newest
# record](../results.md). The two lines to look at first: *dense GEMMs*, which is nothing but the matrix products of that
# layer, by the vendor's library; and plain torch, which is what one writes first.

# %% tags=["hide-input"] alt="Milliseconds of forward and backward of one layer of each model, for all who were measured, beside dense products and the data sheet's ceiling"
record = recorded.newest()
INK = "#1f2430"
RUNG, OTHERS, DENSE, CEILING = "#2e6f9e", "#9aa0a8", "#5f8a3a", "#b89b2f"
print(record)
h200 = roofline.ceiling("NVIDIA H200")
shapes = max(len(record.problems), 1)
_, panels = plt.subplots(shapes, 1, figsize=(7.4, 4.2 * shapes), layout="constrained", squeeze=False)
for axes, shape in zip(panels[:, 0], record.problems):
    rows = [row for (of, _, what), row in record.rows.items() if of == shape and what == "forward+backward"]
    colours = {"rung": RUNG, "ceiling": DENSE}
    bars = [
        (row["ms"]["median"], row["label"], colours.get(row["kind"], OTHERS))
        for row in rows
        if "-over-" not in row["contestant"]
    ]
    allowed = sum(roofline.allowed_ms(PRESETS[shape], direction, h200) for direction in roofline.DIRECTIONS)
    bars.append((allowed, "the ceiling, by the data sheet", CEILING))
    axes.barh(range(len(bars)), [ms for ms, _, _ in sorted(bars)], color=[colour for _, _, colour in sorted(bars)])
    axes.set_yticks(range(len(bars)), [f"{label}  {ms:.1f}" for ms, label, _ in sorted(bars)], fontsize=8)
    title = f"{shape}: ms, forward and backward of one layer, T = 16384"
    axes.annotate(title, (0, 1), (3, 6), ("figure fraction", "axes fraction"), "offset points", fontsize=9)
    axes.set(ylim=(-0.6, len(bars) - 0.4))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.margins(x=0.15)
plt.show()

# %% [markdown]
# In a step of training, with all the layers of the model:

# %% tags=["hide-input"]
LAYERS = {"qwen3-30b-a3b": 48, "qwen3-235b-a22b": 94}
WAYS = {"torch": "plain torch", "torch-compiled": "plain torch, torch.compile", "persistent": "stage persistent"}
BOTH = "forward+backward"
beyond = {}
for shape in record.problems:
    dense = record.ms(shape, "cublas", BOTH)
    for contestant, words in WAYS.items():
        ms = record.ms(shape, contestant, BOTH)
        if dense and ms:
            beyond[shape, contestant] = 1 - dense / ms
            seconds = LAYERS[shape] * ms / 1e3
            print(f"{shape:16} {words:27} {seconds:.2f} s in {LAYERS[shape]} layers,", end=" ")
            print(f"{seconds * (1 - dense / ms):.2f} s ({1 - dense / ms:.0%}) beyond the dense products")

# %% tags=["hide-input"]
plain = [share for (_, contestant), share in beyond.items() if contestant != "persistent"]
Words(
    f"So of the hours that a GPU spends in such layers in plain torch, {min(plain):.0%} to {max(plain):.0%} are more than "
    "the dense products of the same flops would take. And these are balanced layers on one GPU, the best case there is."
    if plain
    else "The record does not have plain torch beside the dense products."
)

# %% [markdown]
# Where does the time go, and which lesson takes it away? Predicted is what the data sheet allows; measured is from the
# record, where the record has it.


# %% tags=["hide-input"]
def added(times):
    """A sum of times; nothing if one of them was not measured."""
    times = list(times)
    return sum(times) if all(times) else None


def in_ms(words, time):
    return f"{words} {time:.2f} ms" if time else f"{words} not recorded"


def least(cost):
    return max(cost.flops / (h200.tflops(p.dtype) * 1e9), cost.bytes / (h200.gb_per_s * 1e6))


name = "qwen3-30b-a3b"
p = PRESETS[name]
steps = [cost for direction in roofline.DIRECTIONS for cost in roofline.steps(p, direction).values()]
again = roofline.Cost(0, (p.T + p.R) * p.H * p.dtype.itemsize)  # backward copies x once more, on the way to dw_gate_up
PRODUCTS = ("gate_up", "down", "dact", "dw_down", "drows", "dw_gate_up")
alone = {c: added(record.ms(name, c, product) for product in PRODUCTS) for c in ("grouped", "persistent", "cublas")}
grouped = record.ms(name, "grouped", BOTH)
peaks = [record.peak_MiB(name, c) for c in ("swiglu", "gather")]
W, LINK = 8, 450e9  # ranks, and bytes a second each way: half of the 900 GB/s of the H200's data sheet
travels = 5 * (p.R * (W - 1) // W) * p.H * p.dtype.itemsize / LINK * 1e3  # x and out; dy, x and dx
uneven = {
    m.routing: m.ms
    for path in sorted((recorded.RECORDS / "one-gpu").glob("*.json"))
    for m in predict.measured(path)
    if (m.shape, m.rung, m.what) == (name, "persistent", BOTH)
}
more = [
    f"{routing} routing +{ms / uneven['balanced'] - 1:.1%}" for routing, ms in uneven.items() if routing != "balanced"
]
table(
    ("what is lost", "predicted", "measured", "lesson"),
    (
        "launches and waits of a loop over experts, and products too small for the chip",
        f"five steps without them: {sum(map(least, steps)):.2f} ms",
        in_ms("reference", record.ms(name, "reference", BOTH)),
        "[1](s1_grouped.md)",
    ),
    (
        "passes over memory between the products",
        f"{sum(least(cost) for cost in (*steps, again) if not cost.flops):.2f} ms",
        in_ms("grouped, less its products", grouped and alone["grouped"] and grouped - alone["grouped"]),
        "[2](s2_swiglu.md), [3](s3_gather.md)",
    ),
    (
        "memory for copies of rows",
        f"{p.R * p.H * p.dtype.itemsize / 2**20:.0f} MiB each",
        f"peak {peaks[0]:.0f} MiB with them, {peaks[1]:.0f} without" if all(peaks) else "not recorded",
        "[3](s3_gather.md)",
    ),
    (
        "products that are slower than the vendor's dense ones",
        f"{sum(least(roofline.Cost(cost.flops)) for cost in steps):.2f} ms at full rate",
        ", ".join(in_ms("dense" if c == "cublas" else c, time) for c, time in alone.items()),
        "[4](s4_persistent.md)",
    ),
    (
        "experts that are not equally busy",
        "padding: half a block for each",
        ", ".join(more) or "not recorded",
        "[1](s1_grouped.md), [4](s4_persistent.md)",
    ),
    (
        f"links and matrix units that wait for each other, over {W} GPUs",
        f"{travels:.2f} ms of travelling, and then the products",
        "[over two GPUs](../results.md#2-gpus-of-one-host)",
        "[5](s5_ranks.md), [6](s6_mega.md)",
    ),
)

# %% [markdown]
# (One layer of qwen3-30b-a3b, forward and backward, an H200, 16,384 tokens.)
#
# ## One example, all the way
#
# Every idea here is about *which row is where*. So one example goes through all lessons, small enough for a pencil: four
# tokens, three experts, two routes a token, one of which is masked. That makes seven rows. Here they are as each lesson
# sees them, computed by the project's own plan and schedule. Colours are experts; a number is a row, of a route the row
# that it becomes.

# %% tags=["hide-input"] alt="The seven rows of the example: routes of four tokens, rows sorted by expert, blocks of two with padding, slots of tokens, two ranks, and the tickets of one launch"
inputs, _ = course_example(experts=4)
ids, plan = inputs.topk_ids, routing.plan(inputs.topk_ids, 4)
EXPERT_COLOURS = ["#2e6f9e", "#c0662b", "#5f8a3a"]
live, starts = int(plan.row_start[-1]), plan.row_start.tolist()
phases = (Phase(KINDS.index("gate_up"), 1), Phase(KINDS.index("down"), 1))
work = Work(BLOCK_R=2, phases=phases, weight_grads=(), waits_for=0, combine=True, BLOCK_T=2, group=1, ahead=0)
tiles = schedule(plan.row_start, [4], [live], work).tolist()
expert_of = lambda row: next(e for e in range(3) if starts[e] <= row < starts[e + 1])

_, axes = plt.subplots(figsize=(10, 6.6), layout="constrained")


def cell(at, line, text, colour=None, width=1.0, dotted=False):
    style = dict(facecolor=colour or "white", edgecolor="white" if colour else "#9aa0a8")
    style |= dict(linestyle=":", hatch="////") if dotted else {}
    axes.add_patch(plt.Rectangle((at, -line), width - 0.06, 0.62, **style))
    middle = at + width / 2 - 0.03
    axes.text(middle, 0.31 - line, text, ha="center", va="center", fontsize=9, color="white" if colour else INK)


def line_of(line, name, words):
    axes.text(-0.2, 0.42 - line, name, ha="right", va="center", color=INK, weight="bold", fontsize=9)
    axes.text(-0.2, 0.12 - line, words, ha="right", va="center", color=INK, fontsize=8)


def slots_at(line):
    for t in range(4):
        for k in range(2):
            row, at = int(plan.row_of_slot[t, k]), t * 2.5 + k
            cell(
                at, line, str(row) if row >= 0 else "", EXPERT_COLOURS[ids[t, k]] if row >= 0 else None, dotted=row < 0
            )
        axes.text(t * 2.5 + 0.97, -line - 0.16, f"token {t}", ha="center", va="center", fontsize=7, color=INK)


line_of(0, "routes", "lesson 0: token by token")
slots_at(0)
line_of(1.3, "rows", "lesson 0: sorted by expert")
for row in range(live):
    cell(row, 1.3, str(row), EXPERT_COLOURS[expert_of(row)])
line_of(2.6, "tiles", "lessons 1, 2: blocks of two, padded")
for number, tile in enumerate(tile for tile in tiles if KINDS[tile[KIND]] == "gate_up"):
    for place in range(2):
        padding = place >= tile[ROWS]
        colour = None if padding else EXPERT_COLOURS[tile[EXPERT]]
        cell(number * 2.5 + place, 2.6, "" if padding else str(tile[ROW] + place), colour, dotted=padding)
    axes.text(number * 2.5 + 0.97, -2.76, f"block {tile[BLOCK]}", ha="center", va="center", fontsize=7, color=INK)
line_of(3.9, "slots", "lesson 3: results by token")
slots_at(3.9)
line_of(5.2, "two ranks", "lesson 5: who owns the row")
home = home_of_row(plan, (2, 2)).tolist()
for row in range(live):
    owner = 0 if row < starts[2] else 1
    cell(row + 1.5 * owner, 5.2, f"{row} ←" if home[row] != owner else str(row), EXPERT_COLOURS[expert_of(row)])
for at, rank in ((2.5, 0), (7.5, 1)):
    axes.text(at, -5.36, f"rank {rank}; ← has travelled", ha="center", va="center", fontsize=7, color=INK)
line_of(6.5, "tickets", "lessons 4, 6: one launch's order")
at = 0.0
for ticket, tile in enumerate(tiles):
    kind = KINDS[tile[KIND]]
    colour = EXPERT_COLOURS[tile[EXPERT]] if kind != "combine" else None
    rows = f"{tile[ROW]}" if tile[ROWS] == 1 else f"{tile[ROW]}, {tile[ROW] + 1}"
    cell(at, 6.5, f"{kind}\n{rows}", colour, width=1.15)
    axes.text(at + 0.55, -6.66, str(ticket), ha="center", va="center", fontsize=7, color=INK)
    at += 1.15
axes.set(xlim=(-4.2, 11.7), ylim=(-6.9, 0.75))
axes.axis("off")
plt.show()

# %% [markdown]
# In the last line a tile has its rows below its step; combine's, in white, are two tokens each.
#
# ## The lessons
#
# Minutes are estimated: 200 words and 20 lines of source a minute. Exercises come on top.

# %% tags=["hide-input"]
AFTERWARDS = {
    "reference": "derive all four gradients, and say where a GPU's time goes",
    "grouped": "write a grouped GEMM, and a sort by expert without a sort",
    "swiglu": "read a roofline, count registers, and keep a sum's order fixed",
    "gather": "gather in a product's loads, and find the order with the lowest peak of memory",
    "persistent": "hand out tiles by ticket, and know what the copy engine asks of a layout",
    "ranks": "count what travels, and find out whether a protocol of flags is right",
    "mega": "order tiles so that nobody waits for ever, and say why a wait is more than a look",
    "warp": "give warps roles, follow a ring of barriers, and signal late without a deadlock",
}
ROOT = recorded.RECORDS.parents[1]
INCLUDED = re.compile(r'^# --8<-- "([^:"]+):?([^"]*)"', re.MULTILINE)  # not what is folded, which is indented


def lines_of(file, region):
    """How many lines of a file a page includes."""
    source = (ROOT / file).read_text()
    if region:
        source = source.partition(f"[start:{region}]")[2].partition(f"[end:{region}]")[0]
    return len(source.splitlines())


def minutes(source):
    """To read a lesson, to the next five."""
    cells = source.split("\n# %%")[1:]
    prose = [cell for cell in cells if cell.startswith(" [markdown]")]
    shown = [cell for cell in cells if cell not in prose and "hide-input" not in cell.partition("\n")[0]]
    words = sum(len(cell.replace("\n#", " ").split()) for cell in prose)
    lines = sum(len(cell.splitlines()) for cell in shown) + sum(lines_of(*found) for found in INCLUDED.findall(source))
    return 5 * -(-(words / 200 + lines / 20) // 5)


lessons = []
for rung in LADDER:
    source = (ROOT / "tutorials" / f"{rung.module}.py").read_text()
    title = re.search(r"^# # (.*)$", source, re.MULTILINE)[1]
    cells = f"[{title}]({rung.module}.md)", rung.idea, f"`{rung.name}`", f"{minutes(source):.0f} min"
    lessons.append((*cells, AFTERWARDS[rung.name]))
table(("lesson", "one idea", "stage=", "to read", "afterwards you can"), *lessons)

# %% [markdown]
# Every lesson has the same parts: what the rung below costs, predicted and measured; the idea in a drawing; the kernel
# itself; what changed in the recipe, as a diff of the two stage files; whether it is right; whether it is fast; the flag;
# and two exercises.
#
# ## How to take it
#
# Read the pages in order, with a pencil: the numbers of the example are made to be checked. The pages are complete,
# with everything that the code printed and drew when they were built.
#
# To work with a lesson, change its file and run it as a script: it stops at the first answer that is not right. Or open
# it in Jupyter (`.venv/bin/pip install jupyterlab`; with jupytext, which is there, it opens as a notebook).
#
# ```sh
# .venv/bin/python tutorials/s1_grouped.py
# ```
#
# **Exercises** end in a cell that begins with `answer = ...`. Put yours there and run it: the rest of the cell computes
# what is right. If yours is not, it says which part is off, in which direction, and under which heading to look again;
# what is right it keeps to itself. Two digits will do. (When these pages are built every check is tried on wrong answers
# too, so that none says yes to anything.)
#
# **In your own model** the flag is one word, `MoE(..., stage="grouped")` or `layer.stage = "grouped"`, and may change
# between two steps: [the layer, and the flag](../index.md#the-layer-and-the-flag).
#
# You need matrix products, the chain rule and some PyTorch. Triton you learn on the way, from the point where a program
# works on a tile. When a letter or a word is new, [the glossary](../glossary.md) has it; every derivation in one place is
# in [the mathematics](../math.md). And [behind the last lesson](s6_mega.md#what-comes-next) stands what is not built yet.
