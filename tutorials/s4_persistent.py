# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4 · Resident programs
#
# *Before: [3 · No copies](s3_gather.md) · next: [5 · Experts over ranks](s5_ranks.md) · the flag:
# `stage="persistent"`, which is the default*
#
# After [lesson 3](s3_gather.md) the layer is six matrix products and a few small sums, and hardly a byte travels that
# need not. What is left is the products themselves. They run one program a tile: a program is born, finds its place,
# multiplies, stores and dies. This rung, `stage="persistent"`, starts one program a processor and lets it live as long
# as there are tiles.
#
# You will learn
#
# - how to split a kernel's time into what grows with the work and the rest, and what such a split is worth;
# - how programs share uneven tiles without talking: by *tickets*, and with the longest first;
# - why the order of tickets is an order of bytes in the L2 cache;
# - what a *descriptor* asks of a layout, and why some padding must be zeros and some may be anything;
# - what was tried besides, and was slower.
#
# You need lessons 1 to 3: blocks of rows, SwiGLU in the epilogue, gathered rows.

# %%
import difflib
import heapq
import inspect
import os
from dataclasses import replace
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when it is imported, below

from mega_moe import LADDER, MoE, recorded, roofline, routing
from mega_moe.exercises import check
from mega_moe.kernels import persistent as kernels
from mega_moe.kernels.blocks import blocks_of_target, nearest, persistent_for
from mega_moe.kernels.plan import plan as make_plan
from mega_moe.kernels.tile_table import tile_table
from mega_moe.parity import Oracle
from mega_moe.roofline import Cost
from mega_moe.samples import course_example, random_inputs
from mega_moe.shapes import PRESETS
from mega_moe.stages import s3_gather, s4_persistent

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)
torch.set_printoptions(precision=4, sci_mode=False)
reference, persistent = LADDER[0], LADDER[4]


def show(**tensors):
    for name, tensor in tensors.items():
        print(f"{name} {tuple(tensor.shape)}\n{tensor}\n")


# %% [markdown]
# ## What the rung below costs
#
# A layer has six kinds of tiles, one for each product. Here are the products of one layer of Qwen3-30B-A3B: rows,
# columns, *contraction* C (what is summed over), and the tiles of 128 × 256 that they make. An H200 has 132
# processors, and a program of this size fills one: four stages of operands take 192 of its 227 KiB of shared memory.
# So tiles come in *waves* of 132, and the last wave may be nearly empty.

# %%
PROCESSORS, L2 = 132, 50e6  # of an H200, and the bytes of its L2 cache


def products(p):
    """Rows, columns and contraction of the six products; a weight gradient's rows are those of all experts."""
    return {
        "gate_up": (p.R, 2 * p.I, p.H),
        "down": (p.R, p.H, p.I),
        "dact": (p.R, p.I, p.H),
        "dx": (p.R, p.H, 2 * p.I),
        "dw_down": (p.E * p.H, p.I, p.R // p.E),
        "dw_gate_up": (p.E * 2 * p.I, p.H, p.R // p.E),
    }


def tiles_of(p, kind):
    rows, columns, _ = products(p)[kind]
    return rows // 128 * (columns // 256)


p = PRESETS["qwen3-30b-a3b"]
print("              rows  columns     C    tiles   waves   idle in the last, of all")
for kind, (rows, columns, C) in products(p).items():
    tiles = tiles_of(p, kind)
    waves = -(-tiles // PROCESSORS)
    idle = 1 - tiles / (waves * PROCESSORS)
    print(f"{kind:10} {rows:7} {columns:8} {C:5} {tiles:8} {waves:7} {idle:26.1%}")

# %% [markdown]
# So it is not the waves; with 16,384 tokens there are enough of them. Look at one tile instead. Before it can
# multiply, a program searches for its expert, then reads which rows, then which tokens they are: three loads, each
# waiting for the one before. Then its pipeline of operands fills. After the last product come the epilogue and the
# stores. None of this depends on C, so a tile should take
#
# $$\mathrm{time} = a \cdot C + b$$
#
# with $a$ for the matrix units and $b$ a *fixed cost*. In short bursts an H200 was found to take some 12 ns a unit
# of contraction for a tile of 128 × 256, and some 5 µs besides. What share of its time would a tile then not multiply?

# %%
for shape in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
    shares = [f"{kind} {5e3 / (12 * C + 5e3):.0%}" for kind, (_, _, C) in products(PRESETS[shape]).items()]
    print(f"{shape:16}", *shares, sep="   ")

# %% [markdown]
# The shallower, the worse: a weight gradient has as many rows to sum as its expert has, 1,024 on average, however
# large the model. So much for round figures. The record is taken under load, at the power limit, where the card lowers
# its clocks. Two of our products, down and dx, are one kernel at two depths, and neither gathers. Each layer whose
# products were recorded gives these two points. We lay a line by them; its slope is $a$ and its foot is $b$:

# %% tags=["hide-input"]
INK = "#1f2430"
record = recorded.newest()
product_ms = {
    (shape, contestant, {"drows": "dx"}.get(row["gemm"], row["gemm"])): row["ms"]["median"]
    for (shape, contestant, _), row in record.rows.items()
    if row["gemm"]
}
layers = {shape: PRESETS[shape] for shape in record.problems if shape in PRESETS}
h200 = roofline.ceiling("NVIDIA H200")


def tile_us(shape, contestant, kind):
    """What 128 x 256 of the result cost one processor, in microseconds; None if that was not recorded."""
    ms = product_ms.get((shape, contestant, kind))
    return ms and ms * 1e3 * PROCESSORS / tiles_of(layers[shape], kind)


def rate_and_fixed(contestant):
    """a in nanoseconds a unit of contraction, b in microseconds a tile, and how many points gave them; or None."""
    points = [
        (products(layers[shape])[kind][2], tile_us(shape, contestant, kind))
        for shape in layers
        for kind in ("down", "dx")
        if tile_us(shape, contestant, kind)
    ]
    if len(points) < 2:
        return None
    slope, fixed = np.polyfit(*zip(*points), 1)
    return slope * 1e3, fixed, len(points)


def fixed_cost(us):
    """b in words; what is not above zero is no cost, but the error of the line."""
    return f"{us:.1f}" if us > 0.05 else "lost in the error"


below = [name for name in ("grouped", "swiglu", "gather") if rate_and_fixed(name)][-1:]
print(f"{'':24} a: ns a unit of C        b: us a tile   points")
for contestant in [*below, "cublas"]:
    if found := rate_and_fixed(contestant):
        print(f"{contestant:24} {found[0]:17.1f} {fixed_cost(found[1]):>19} {found[2]:8}")
print(f"{'by the data sheet':24} {2 * 128 * 256 / h200.tflops(p.dtype) * PROCESSORS / 1e3:17.1f} {'none':>19}")
print(f"\n{record}")

# %% [markdown]
# Two points always lie on a line, so where there are no more it is an illustration and cannot say how wrong it is. A
# foot at zero or below it, for one, only tells that the two depths differ in something else than $C$. Taken so: what
# $a$ exceeds the vendor's by is lost in the loop, and what is lost around it is $b$.
#
# Now all six products, split by that slope. Dark is the bound of the roofline: all arithmetic at the rate of the data
# sheet, since memory, with every operand read once, needs less. Light is what the slope of down and dx adds. Orange is
# *the rest*. That is the fixed cost of tiles, and whatever makes a step dearer than a step of down or dx: all but these
# two gather an operand, and pay for it at every step.


# %% tags=["hide-input"] alt="Measured time of the six products, split into bound, what the slope adds, and the rest"
def bound_ms(p, kind):
    rows, columns, C = products(p)[kind]
    cost = Cost(2 * rows * columns * C, (rows * C + p.E * columns * C + rows * columns) * p.dtype.itemsize)
    arithmetic, memory = cost.flops / (h200.tflops(p.dtype) * 1e9), cost.bytes / (h200.gb_per_s * 1e6)
    assert memory < arithmetic
    return arithmetic


def draw_products(contestants):
    """For each shape and kind one bar a contestant."""
    shapes = [shape for shape in layers if any((shape, c, "down") in product_ms for c in contestants)]
    _, panels = plt.subplots(1, len(shapes), figsize=(10, 1.2 + 1.9 * len(contestants)), layout="constrained")
    for axes, shape in zip(np.atleast_1d(panels), shapes):
        ticks, p = {}, layers[shape]
        for at, (kind, contestant) in enumerate((k, c) for k in products(p) for c in contestants):
            if not (us := tile_us(shape, contestant, kind)):
                continue
            ms, bound = product_ms[shape, contestant, kind], bound_ms(p, kind)
            looped = max(bound, min(ms, ms * rate_and_fixed(contestant)[0] * products(p)[kind][2] / us / 1e3))
            height = -at - 0.5 * (at // len(contestants))
            for start, end, colour in ((0, bound, "#2e6f9e"), (bound, looped, "#a9c6da"), (looped, ms, "#c0662b")):
                axes.barh(height, end - start, left=start, color=colour, edgecolor="white")
            axes.text(ms, height, f" {1 - looped / ms:.0%}", va="center", color="#c0662b", fontsize=9)
            ticks[height] = f"{kind}, {contestant}" if len(contestants) > 1 else kind
        axes.set_yticks([*ticks], [*ticks.values()])
        axes.set(title=shape, xlabel="ms; orange: the rest, and its share of all")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.margins(x=0.12)
        axes.tick_params(left=False)
    plt.show()


if below:
    print("recorded for stage", below[0])
    draw_products(below)

# %% [markdown]
# What can be done about the part that every tile pays? Hide it. While one tile is being multiplied the next can be
# looked up, and while one is in its epilogue the loads of the next can run, if only somebody asks for them. A program
# that ends cannot, and the one that takes its place on the processor is not born yet. A program that stays can.

# %% tags=["hide-input"] alt="One program a tile; a resident program that looks ahead; and one whose loads never stop"
COLOURS = ["#2e6f9e", "#c0662b", "#5f8a3a"]  # three tiles in turn; experts 0, 1, 2 elsewhere
FIND, FILL, LOOP, EPILOGUE, START = 1.2, 0.8, 4.0, 1.2, 0.3
_, panels = plt.subplots(3, 1, figsize=(10, 4.8), sharex=True, layout="constrained")
for axes, way in zip(
    panels,
    (
        "one program a tile",
        "resident: looks up one ticket ahead, draws two ahead",
        "resident, and the tiles of a strip are one loop",
    ),
):
    now = 0.0  # when the tile before is done
    for tile, colour in enumerate(COLOURS):
        bar = dict(color=colour, edgecolor="white", height=0.8)
        ahead, flattened = tile > 0 and "resident" in way, tile > 0 and "loop" in way
        find = now - EPILOGUE - LOOP * 0.9 if ahead else now
        loads = now - EPILOGUE * 0.8 if flattened else now if ahead else find + FIND
        multiply = max(now, loads + FILL)
        axes.barh(2, FIND, left=find, alpha=0.6, **bar)
        axes.barh(1, multiply + LOOP - FILL - loads, left=loads, **bar)
        axes.barh(0, LOOP, left=multiply, **bar)
        axes.barh(0, EPILOGUE, left=multiply + LOOP, alpha=0.35, hatch="///", **bar)
        now = multiply + LOOP + EPILOGUE + (0 if "resident" in way else START)
    axes.set_yticks([0, 1, 2], ["multiply, epilogue (hatched)", "load operands", "find expert, rows, tokens"])
    axes.set_title(way, loc="left", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
panels[-1].set(xlabel="time (not to scale)", xticks=[])
plt.show()

# %% [markdown]
# ## Who takes which tile?
#
# There is a second gain in staying, and a trap. The hardware deals programs to processors as they become free. Who
# stays has to choose the next tile, and the usual way is to stride: program p takes tiles p, p + 132, p + 264. That is
# fair if all tiles are alike, and a weight gradient's tile is as long as its expert has rows. The other way is to draw
# *tickets*: whoever is free adds one to a counter in memory, and takes the tile of that number. And since we now say
# which number means which tile, the longest can come first. A few lines simulate all three:


# %%
def timeline(lengths, processors, tickets=True):
    """(processor, start, length) of every tile, dealt in this order by ticket or by striding."""
    free = [(0.0, processor) for processor in range(processors)]
    spans = []
    for number, length in enumerate(lengths):
        start, processor = free[0] if tickets else free[number % processors]
        if tickets:
            heapq.heapreplace(free, (start + length, processor))  # free[0] is whoever is free first
        else:
            free[processor] = (start + length, processor)
        spans.append((processor, start, length))
    return spans


def ends(spans):
    return max(start + length for _, start, length in spans)


WAYS = {
    "striding": lambda lengths, processors: timeline(lengths, processors, tickets=False),
    "tickets": timeline,
    "tickets, longest first": lambda lengths, processors: timeline(sorted(lengths, reverse=True), processors),
}

# %% tags=["hide-input"] alt="Timelines of seven processors: striding, tickets, and tickets with the longest tile first"
lengths = [rows for rows in (6, 2, 3, 1, 2, 13, 1, 4) for _ in range(3)]
palette = plt.get_cmap("viridis_r")
_, panels = plt.subplots(3, 1, figsize=(10, 4.8), sharex=True, layout="constrained")
for axes, (way, deal) in zip(panels, WAYS.items()):
    spans = deal(lengths, 7)
    for processor, start, length in spans:
        axes.barh(processor, length, left=start, color=palette((length + 1) / 15), edgecolor="white", height=0.9)
    axes.axvline(sum(lengths) / 7, color=INK, linestyle=":")
    axes.set_title(f"{way}: ends at {ends(spans):.0f}", loc="left", fontsize=10)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
panels[-1].set_xlabel("time; dotted: all work divided evenly")
plt.show()

# %% [markdown]
# Eight experts with three tiles each, on seven processors. And now dw_down of Qwen3-30B-A3B on 132, with tiles of
# 12 ns a row and 5 µs besides. Under Zipf's law the busiest expert has 13 times the mean:

# %%
routing_only = p.at(H=1, I=1, device=device, dtype=torch.float32)
print(f"{'':10} {'evenly':>8} " + " ".join(f"{way:>24}" for way in WAYS))
for spread in ("balanced", "random", "zipf"):
    rows_of_experts = random_inputs(routing_only, spread)[0].topk_ids.flatten().bincount(minlength=p.E).tolist()
    lengths = [rows * 12e-6 + 5e-3 for rows in rows_of_experts for _ in range(tiles_of(p, "dw_down") // p.E)]
    even = sum(lengths) / PROCESSORS
    times = {way: ends(deal(lengths, PROCESSORS)) for way, deal in WAYS.items()}
    print(f"{spread:10} {even:5.3f} ms", *(f"{ms:10.3f} ms, {ms / even - 1:+6.1%}   " for ms in times.values()))
    assert times["tickets, longest first"] < 1.02 * even

# %% [markdown]
# Tickets alone leave it to chance when the long expert comes. If it comes last, the others watch. Longest first leaves
# the short tiles for the end, where they fill the gaps. So no tile need be split, and every sum keeps its one owner.
#
# What does uneven routing cost the whole layer? [Measured](../measuring.md#what-was-tried) on an H200, both directions
# take 6.5 % longer by Zipf's law than balanced, on Qwen3-235B-A22B 6.7 %. But balanced, where every expert's rows are
# exactly whole blocks, is a best case that no router gives. Random routing, every token's experts drawn uniformly, pads
# as many rows as Zipf's law, and beside it the imbalance itself costs 1.8 % and 3.9 %; on the larger layer such
# differences are hardly larger than the measurements' spread.
#
# A ticket is one atomic addition. It orders nothing and guards nothing:
#
# ```python
# --8<-- "mega_moe/kernels/signal.py:draw"
# ```
#
# ## The tile table
#
# What does a ticket's number stand for? A program could find out as before, but the answers are the same for all
# kernels of a direction. So one small launch writes them down, on the device, and a ticket is one lookup away from
# everything. The running example, with blocks of two rows:

# %%
inputs, dy = course_example(device=device)
example = inputs.problem()

plan = make_plan(inputs.topk_ids, example.E)
table = tile_table(plan, replace(persistent_for(example), BLOCK_R=2))
live_blocks = int(table.counters[0])
tokens, routes = (t.view(-1, 2)[:live_blocks].tolist() for t in (table.token_in_blocks, table.route_in_blocks))
print(f"row_start = {plan.row_start.tolist()}, {live_blocks} blocks hold rows, {len(table.row_blocks)} at most\n")
for block, (expert, row, held) in enumerate(table.row_blocks[:live_blocks].tolist()):
    served = f"tokens {tokens[block]}, routes {routes[block]}"
    print(f"block {block}: expert {expert}, rows {list(range(row, row + held))}, {served}")
print()
for expert, block, rows in table.longest_first.tolist():
    print(f"expert {expert}, first block {block}, rows: {rows}")

# %% [markdown]
# A kernel over rows draws a block and a tile of its columns; nobody draws an empty block, since the table counts those
# that hold rows. A kernel of weight gradients draws from the lower list. Each kernel's ticket is a counter in the
# table. Say two programs are resident. A tile over a block takes two units of time, padded or not; a tile of a weight
# gradient takes one for each row of its expert. So they draw (one tile is as wide as the example):

# %%
blocks = table.row_blocks[:live_blocks].tolist()
over_rows = [f"block {n}, rows {list(range(row, row + held))}" for n, (_, row, held) in enumerate(blocks)]
over_experts = [f"expert {expert}, rows: {rows}" for expert, _, rows in table.longest_first.tolist()]
times = table.longest_first[:, 2].tolist()
for kernel, tiles, lengths in (("down", over_rows, [2] * live_blocks), ("dw_down", over_experts, times)):
    print(kernel)
    for ticket, (program, start, length) in enumerate(timeline(lengths, processors=2)):
        drawn = f"program {program} draws ticket {ticket} at time {start:g}"
        print(f"    {drawn}: {tiles[ticket]}, until {start + length:g}")

# %% [markdown]
# ??? abstract "The kernel that makes the table"
#     ```python
#     --8<-- "mega_moe/kernels/tile_table.py:kernel"
#     ```
#
# Behind a block's last row its last token is repeated, and a route of -1 says that nobody is served. Blocks are also
# a layout. What one of our kernels writes for another (act, dpre, weighted act) need not lie as the plan's rows do.
# It lies *in blocks*: every expert has whole blocks, and all blocks stand side by side.

# %% tags=["hide-input"] alt="Seven rows side by side, and the same in blocks of two, one of them padded with a zero"
_, axes = plt.subplots(figsize=(10, 2.7), layout="constrained")


def cell(at, height, text, colour, **style):
    filled = "facecolor" in style
    axes.add_patch(plt.Rectangle((at, height), 1, 0.8, edgecolor="white" if filled else colour, **style))
    axes.text(at + 0.5, height + 0.4, text, ha="center", va="center", color="white" if filled else colour)


SHIFT = 3.5  # of the upper line, to stand in the middle
for block in range(len(table.row_blocks)):
    axes.text(block * 2 + 1, -0.4, f"block {block}", ha="center", color=INK, fontsize=9)
    axes.plot([block * 2] * 2, [-0.1, 0.9], color=INK, linewidth=2)
    expert, row, held = table.row_blocks[block].tolist() if block < live_blocks else (None, 0, 0)
    for place in range(2):
        at = block * 2 + place
        if expert is None:
            cell(at, 0, "?", "#9aa0a8", fill=False)
        elif place >= held:
            cell(at, 0, "0", COLOURS[expert], fill=False)
        else:
            cell(at, 0, str(row + place), COLOURS[expert], facecolor=COLOURS[expert])
            cell(row + place + SHIFT, 2, str(row + place), COLOURS[expert], facecolor=COLOURS[expert])
            axes.plot([row + place + SHIFT + 0.5, at + 0.5], [1.97, 0.83], color=COLOURS[expert], alpha=0.6)
axes.text(-0.2, 2.4, "rows", ha="right", va="center", color=INK)
axes.text(-0.2, 0.4, "in blocks", ha="right", va="center", color=INK)
axes.set(xlim=(-1.8, len(table.row_blocks) * 2 + 0.2), ylim=(-0.6, 3))
axes.axis("off")
plt.show()

# %% [markdown]
# Why bother? Because of how bytes are fetched. Until now all threads of a program computed addresses and asked for
# their share of a tile. Since Hopper, NVIDIA's GPUs have a copy engine, the *tensor memory accelerator* (TMA), for
# *bulk copies*: one thread hands it a *descriptor* (where a tensor begins, its sizes, its strides, the shape of a
# tile) and a corner, and the tile arrives in shared memory. The threads are free, and so are the registers that held
# addresses. But a descriptor knows nothing of experts: it fetches a whole box, with no mask for each row. What do the
# rows beyond the expert's last then hold?
#
# - **In `down`: anything.** A row of the result comes from that row alone, and a row whose route is -1 is not stored.
#   Even NaN does no harm. What stands there is the act of the expert's last row once more, since gate_up loads that
#   row's token again and masks no row of act: so no kernel ever reads memory that nobody wrote.
# - **In weight gradients: zeros.** There the rows are summed over. Packed side by side, the box that begins with expert
#   1's row would go on with expert 2's. So dact's epilogue stores zeros in the padding. The other operand is gathered,
#   and the table lets a padding row repeat its expert's last token: zero times a finite number is zero, and if that
#   token is not finite, then its expert's gradient is not either, with or without padding.
#
# Gathered tokens lie anywhere, and no descriptor describes that: they still come by pointer.
#
# ## The order of tickets, and the cache
#
# 132 programs work at once, on tickets that follow each other. So the order of tickets decides which bytes are wanted
# together, and what several programs want at the same time comes from memory once, and then from the L2 cache with its
# 50 MB. Our order is row block by row block, column blocks fastest. Two others suggest themselves. A ticket could buy
# a *strip*, several tiles side by side. Or one column block could be finished for all row blocks before the next
# begins; to the cache that is the same as strips that are the whole row: 132 programs, in step, stand on 132 row
# blocks. Let us count what they read at one time:

# %% tags=["hide-input"]
balanced = routing.plan(random_inputs(routing_only)[0].topk_ids, p.E)
starts = balanced.row_start.tolist()
row_blocks = [(e, row) for e in range(p.E) for row in range(starts[e], starts[e + 1], 128)]


def touched(p, kind, strip):
    """Experts that 132 programs visit at one time, in the middle of a launch, and the distinct bytes they read."""
    _, columns, C = products(p)[kind]
    strips = -(-columns // 256 // strip)
    tickets = range(len(row_blocks) // 2 * strips, len(row_blocks) // 2 * strips + PROCESSORS)
    at_work = [(ticket // strips, ticket % strips * strip) for ticket in tickets]  # each at its strip's first tile
    weights = {(row_blocks[block][0], column) for block, column in at_work}
    first_rows = {row_blocks[block][1] for block, _ in at_work}
    rows = torch.cat([torch.arange(row, row + 128) for row in first_rows])
    if kind in ("gate_up", "dact"):
        rows = balanced.token_of_row[rows].unique()  # gathered: a token that two experts want is the same bytes
    return len({e for e, _ in weights}), (len(rows) + 256 * len(weights)) * C * p.dtype.itemsize


ORDERS = ("one tile a ticket", "strips of two", "strips of four", "whole strips")
print(f"{'':27}" + "".join(f"{order:>21}" for order in ORDERS))
for shape in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
    for kind in ("gate_up", "down", "dact", "dx"):
        _, columns, C = products(PRESETS[shape])[kind]
        asked = PROCESSORS * (128 + 256) * C * p.dtype.itemsize
        counts = [touched(PRESETS[shape], kind, strip) for strip in (1, 2, 4, columns // 256)]
        cells = [f"{experts} experts, {size / 1e6:.0f} MB{' *' if size > L2 else '  '}" for experts, size in counts]
        print(f"{shape:16} {kind:10}" + "".join(f"{text:>21}" for text in cells), f"  of {asked / 1e6:.0f}")
print("* more than the L2 cache holds. Last column: what the programs ask for, counted by program")

# %% [markdown]
# With one tile a ticket a wave stays within a few experts, and each tile of rows or weights serves several programs
# while it is there. With whole strips the wave spreads over seventeen experts and asks memory for up to three times as
# much, and for each tile of the strip anew, if what it had for the first does not survive in the cache until the next.
# (A star is no disaster: programs walk along the contraction side by side, and at any one moment want only a part.) So
# strips, whose loop has no seams, have a price, and whether they pay is a matter of measuring. Weight gradients go
# expert by expert, and a wave stays within a few anyway. `mega-moe tune` [measures](../measuring.md#block-sizes) what
# is best. On an H200 strips pay for down and dx; they do not for gate_up and dact, which in the table are the two that
# ask for the most at one time. These are in use:

# %% tags=["hide-input"]
for shape in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
    found = nearest("sm_90", PRESETS[shape].H, PRESETS[shape].I)
    tiles = found.tiles if found else blocks_of_target("sm_90", torch.bfloat16).persistent
    print(f"{shape}, blocks of {tiles.BLOCK_R} rows")
    for kind in products(p):
        tile = getattr(tiles, kind)
        size = f"{tile.BLOCK_M if kind.startswith('dw') else tiles.BLOCK_R} x {tile.BLOCK_N}"
        size += " of gate and of up" if kind == "gate_up" else ""
        strip = getattr(tile, "STRIP", 1)
        many = f"strips of {strip}" if strip > 1 else "one a ticket"
        many += ", flattened" if getattr(tile, "FLATTEN", False) else ""
        print(f"    {kind:10} tiles {size:27} {many:24} {tile.num_stages} stages, {tile.per_processor} on a processor")

# %% [markdown]
# ## The kernels
#
# All four have one shape. A program looks up one ticket ahead and draws two ahead: while it multiplies, it looks up
# what the next ticket means, and draws the number of the one after. An atomic or a lookup takes long to answer; asked
# early, the answer is there when it is wanted. Here is the kernel that is down forward and dx backward:
#
# ```python
# --8<-- "mega_moe/kernels/persistent.py:slots"
# ```
#
# It looks up and loads with these; `a` and `w` come by descriptor:
#
# ```python
# --8<-- "mega_moe/kernels/persistent.py:load"
# ```
#
# `flatten` tells Triton to make one loop of two, over the tiles of a strip and over the steps of each. Its pipeline
# then runs across the seam, and the next tile's loads start under this one's epilogue, as in the lowest timeline
# above. It is allowed because no tile here waits for another: all operands are there when the launch begins. A loop
# with a wait in it is not pipelined. With one tile a ticket there is no seam, and the middle timeline applies: then
# `flatten` changes only what the compiler makes of the same loop. dact, which takes one tile a ticket, is flattened
# for no better reason than that it came out faster.
#
# The kernel of weight gradients steps over rows: one operand comes by descriptor, from blocks, the other by pointer,
# from the tokens. Its tickets count through the experts longest first:
#
# ```python
# --8<-- "mega_moe/kernels/persistent.py:weight_grad"
# ```
#
# In lesson 3's kernel a step loads its tokens' numbers and then the tokens, and the chain of two loads cost it half of
# its pipeline. Here `token` is carried around the loop: each step finds its numbers at hand, uses them, and loads those
# of the next. So the gathered load is one level deep, like any other, and all stages hold tiles: with four of them
# Triton 3.7 makes four buffers for sm_90 (times are of the version that the record names, 3.6 in November 2026), and
# tiles are under way for three steps. On an H200 this took up to 13 % off the same kernel with both loads in one step.
#
# ??? abstract "gate_up with SwiGLU, and dact"
#     ```python
#     --8<-- "mega_moe/kernels/persistent.py:gate_up"
#     --8<-- "mega_moe/kernels/persistent.py:dact"
#     ```
#
# ### What was tried besides
#
# These seemed better on paper, and lost on an H200, each in one run with what is in use ([the
# figures](../measuring.md#what-was-tried)):
#
# - *Strips of weight gradients, flattened*: more than twice the time, since a loop that loads its tokens' numbers itself
#   is not pipelined once it is flattened. With one loop over strip and steps written by hand, and the numbers loaded a
#   step ahead, it still took about a fifth more at the least.
# - *Two small programs on a processor*, 128 × 128 tiles and 4 warps each, so that one multiplies during the other's
#   epilogue: slower nearly everywhere, mostly by some 10 %. Smaller tiles load more for the same products.
# - *Striding instead of tickets*, and all of a program's tiles one flattened loop: for down and dx 12 to 17 % slower
#   than the best of tickets and strips. Their tiles are all equally long, so tickets have nothing to even out there,
#   and why striding loses is not understood. For gate_up it made no difference.
#
# ## The recipe, and what changed in it
#
# Below, `-` is lesson 3's stage file and `+` this one's. Each direction makes a table, since tickets are drawn once,
# and hands it to every kernel. The order of the steps is the same, and so is what is saved. `PRODUCTS` is not of this
# lesson: this rung also multiplies 8-bit codes, and it says what is launched then. In bf16 that is the launchers above,
# and operands are what they were.

# %% tags=["hide-input", "diff"]
stages = [inspect.getsource(stage) for stage in (s3_gather, s4_persistent)]
code = [source.split("\nfrom torch import Tensor\n")[1].splitlines() for source in stages]
for line in list(difflib.unified_diff(*code, n=1, lineterm=""))[2:]:
    print("" if line.startswith("@@") else line)

# %% [markdown]
# ## The example, once more
#
# The same four tokens, forward and backward:

# %%
y, saved = persistent.forward(example, inputs)
grads = persistent.backward(example, inputs, saved, dy)
show(y=y, dtopk_weights=grads.dtopk_weights, dx=grads.dx, dw_down=grads.dw_down.squeeze(-1))

y_below, saved = reference.forward(example, inputs)
grads_below = reference.backward(example, inputs, saved, dy)
for ours, theirs in zip([y, *grads.tensors()], [y_below, *grads_below.tensors()]):
    torch.testing.assert_close(ours, theirs)

# %% [markdown]
# The numbers of all lessons before.
#
# ## Is it right?
#
# Now in bf16, as shares of the [budget](../parity.md). And what was said of padding deserves a fault of each sort: NaN in
# the rows that pad act must change no bit of y; a mere 1 in the rows that pad weighted act must fail.

# %%
problem = PRESETS["tiny"].at(device=device)
inputs, tiny_dy = random_inputs(problem)
oracle = Oracle(problem, inputs, tiny_dy)
tiny_y, saved = persistent.forward(problem, inputs)
grads = persistent.backward(problem, inputs, saved, tiny_dy)
verdict = oracle.check(tiny_y, grads)
print(*(f"{name} {share:.2f}  " for name, share in verdict.shares.items()), "passed" if verdict.passed else "FAILED")
assert verdict.passed


def padded_with(value, launcher):
    """The launcher of act, or of weighted act (its second result), and then `value` in all rows that are nobody's."""

    def launch(*arguments, **options):
        first, in_blocks, *rest = launcher(*arguments, **options)
        route = tile_table(saved.plan, persistent_for(problem)).route_in_blocks
        in_blocks[route < 0] = value
        return first, in_blocks, *rest

    return launch


with patch.object(kernels, "gate_up_swiglu", padded_with(float("nan"), kernels.gate_up_swiglu)):
    y_again, _ = persistent.forward(problem, inputs)
print("NaN pads act: y has the same bits:", torch.equal(y_again, tiny_y))
assert torch.equal(y_again, tiny_y)

with patch.object(kernels, "dact_swiglu", padded_with(1.0, kernels.dact_swiglu)):
    spoiled = persistent.backward(problem, inputs, saved, tiny_dy)
verdict = oracle.check(tiny_y, spoiled)
print(f"1 pads weighted act: dw_down has {verdict.shares['dw_down']:.0f} times its budget; failed: {verdict.failed}")
assert verdict.failed == ["dw_down"]

# %% [markdown]
# ## The same bits, whoever draws
#
# Tickets go to whoever is free, so which program computes a tile, and when, is a matter of chance. The result is not:
# a ticket's number alone decides what is computed for it, each tile has one owner, and no tile reads another's result.
# So it does not matter how many programs there are, nor which expert comes first. (In the interpreter programs run one
# after another, and the first draws nearly everything. On a GPU they race.)


# %%
def shortest_first(*arguments):
    table = tile_table(*arguments)
    return replace(table, longest_first=table.longest_first.flip(0))


for programs, make_table in ((1, tile_table), (7, tile_table), (7, shortest_first)):
    with (
        patch.object(kernels, "programs", return_value=programs),
        patch.object(s4_persistent, "tile_table", make_table),
    ):
        y_again, saved = persistent.forward(problem, inputs)
        again = persistent.backward(problem, inputs, saved, tiny_dy)
    for one, other in zip([y_again, *again.tensors()], [tiny_y, *grads.tensors()]):
        assert torch.equal(one, other)
print("1 program or 7, longest or shortest first: the same bits, y and all gradients")

# %% [markdown]
# ## Is it fast?
#
# From [recorded runs](../results.md), all in one, with parity checked in the same run ([how](../measuring.md)): the
# rungs, what people use, and the dense products of the same flops. Under each table: each direction beside plain torch
# under torch.compile.

# %% tags=["hide-input"]
print(record)
for shape, p in layers.items():
    print(f"\n{shape:46}{'forward ms':>11}{'backward':>11}{'both':>11}{'TF/s':>7}")
    contestants = dict.fromkeys(c for of, c, what in record.rows if of == shape and what in roofline.DIRECTIONS)
    for contestant in contestants:
        timed = [record.rows.get((shape, contestant, what)) for what in (*roofline.DIRECTIONS, "forward+backward")]
        if contestant != "reference" and all(timed):
            cells = "".join(f"{row['ms']['median']:11.2f}" for row in timed)
            print(f"{timed[0]['label']:46}{cells}{timed[-1]['tflops']:7.0f}")
    allowed = [roofline.allowed_ms(p, direction, h200) for direction in roofline.DIRECTIONS]
    print(f"{'the ceiling, by the data sheet':46}{allowed[0]:11.2f}{allowed[1]:11.2f}{sum(allowed):11.2f}")
    for direction in roofline.DIRECTIONS:
        ours, theirs = (record.ms(shape, name, direction) for name in ("persistent", "torch-compiled"))
        if ours and theirs:
            print(f"    {direction:8} persistent takes {ours / theirs:.2f} times as long as plain torch, torch.compile")

# %% [markdown]
# In the record of November 2026 both directions are faster than in lesson 3, on either layer, and a training step is
# faster than on every rung below that was recorded with it. But backward on the larger layer only wins back what
# lesson 3 had paid for its memory: it takes as long as on lesson 1's rung. And what this rung is ahead of plain torch
# under torch.compile, it owes to forward alone; backward alone is *not* ahead, on either layer. What holds backward
# back are gathered weight gradients and dact's epilogue: in these the products below are furthest behind. What each
# part of this rung contributed was not recorded by itself; as far as it was measured, the table [*What
# paid*](../measuring.md#what-was-tried) has it.
#
# Where does the time go, tile kind by tile kind? Our products, split as above. Beside them `F.grouped_mm`, which finds
# its rows side by side and has no epilogue, and the vendor's dense products. (Down and dx, which give the line, now
# take strips of four and of two, so the line is still less of a measurement than before.)

# %% tags=["hide-input"] alt="Measured time of the six products: the rung below beside the resident programs"
resident = [name for name in ("persistent",) if rate_and_fixed(name)]
for contestant in [*below, *resident, "cublas"]:
    if found := rate_and_fixed(contestant):
        print(f"{contestant:12} {found[0]:5.1f} ns a unit of contraction; us a tile: {fixed_cost(found[1])}")
for shape in layers:
    if (shape, "persistent", "down") not in product_ms:
        continue
    print(f"\n{shape:16}" + "".join(f"{kind:>12}" for kind in products(p)))
    for contestant in [*below, *resident, "torch", "cublas"]:
        times = [product_ms.get((shape, contestant, kind)) for kind in products(p)]
        name = "F.grouped_mm" if contestant == "torch" else contestant
        print(f"{name:16}" + "".join(f"{f'{ms:.2f} ms' if ms else '–':>12}" for ms in times))
if resident:
    draw_products([*below, *resident])

# %% [markdown]
# The rest of dact has not become less, in the record of November 2026; its share has even grown. The slope by which it
# is split fell with down and dx, and dact's time hardly did: looking ahead did little for it.
#
# What is still orange has three names. **Epilogues**, dact's above all: it reads pre and computes act and its
# derivative for every entry of the tile, and while it does its matrix units wait. **Gathered operands** come by
# pointer, asked for by the threads that also multiply. And **weight gradients** are shallow: every 1,024 rows a tile
# is finished and stored. None of these is a matter of who takes which tile. They ask for programs in which some warps
# load, some multiply and some finish, all at the same time.
#
# ## The flag
#
# It is the default, so nothing need be said. To compare, say the other:

# %%
torch.manual_seed(0)
layer = MoE(hidden_size=16, intermediate_size=12, num_experts=3, top_k=2, device=device)
tokens = torch.randn(4, 16)
print(f"unless told, a layer runs on stage={layer.stage!r}")
for name in ("gather", "persistent"):
    layer.stage = name
    layer.zero_grad()
    loss = layer(tokens).square().mean()
    loss.backward()
    norm = layer.experts.down_proj.grad.norm()
    print(f'stage="{layer.stage}": loss {loss.item():.6f}, norm of the gradient of down_proj {norm.item():.6f}')

# %% [markdown]
# ## Exercises
#
# **1.** Two programs draw dw_down's three tiles of the running example; a tile takes as long as its expert has rows. When
# does the launch end, longest first and shortest first? Then show for any tiles and any order of tickets: the launch ends
# at most one tile, the longest, later than if all work were divided evenly.
#
# ??? success "Answer"
#     Longest first: 4, then 2 and 1 beside it, so it ends at 4, where 3.5 would be even. Shortest first: 1 and 2, and the
#     long one begins at 1, so it ends at 5. In general, look at the tile that ends last. Until it was drawn every
#     processor had been busy, for one that was free would have drawn it sooner. So it began no later than the work
#     divided evenly would have ended, and from there on it takes its own length. (R. L. Graham, *Bounds on multiprocessing
#     timing anomalies*, 1969.)

# %% tags=["solution"]
answer = dict(longest_first=4, shortest_first=5)

rows_of_experts = plan.row_start.diff().tolist()
check(
    answer,
    dict(
        longest_first=ends(timeline(sorted(rows_of_experts, reverse=True), 2)),
        shortest_first=ends(timeline(sorted(rows_of_experts), 2)),
    ),
    see=dict(
        longest_first=("Who takes which tile?", "whoever is free draws the next; the launch ends with the last tile"),
        shortest_first=("Who takes which tile?", "when does the longest tile begin, if it is drawn last?"),
    ),
)
dice = np.random.default_rng(0)
late = []
for _ in range(300):
    lengths, processors = dice.integers(1, 20, dice.integers(1, 40)).tolist(), int(dice.integers(1, 9))
    late.append((ends(timeline(lengths, processors)) - sum(lengths) / processors) / max(lengths))
print(f"300 launches at random end at most {max(late):.2f} of their longest tile later than evenly")
assert max(late) <= 1

# %% [markdown]
# **2.** In dw_down of Qwen3-30B-A3B one expert receives more and more of all R routes, and the others share the rest. A
# tile takes a time proportional to its rows. How many tiles has an expert? From which share of the routes on does the busy
# expert decide how long the launch takes, even longest first? Can a router that picks 8 distinct experts for each token
# get there?
#
# ??? success "Answer"
#     dw_down has 2048/128 · 768/256 = 48 tiles an expert. With c the time of a row, all work divided evenly takes
#     $48\,R\,c/132$, and one tile of an expert with share $s$ takes $s\,R\,c$. The tile is longer once $s > 48/132$,
#     36 %. With 8 distinct experts for each token none has more than 1/8 of the routes. For a router that goes further,
#     one would cut such an expert's rows into parts, sum each into memory of its own, and add the parts in a second
#     launch in their order: not by atomics, where whoever comes first would decide the last bit.

# %% tags=["solution"]
answer = dict(tiles=48, share=0.36, reached=False)

tiles_of_expert = tiles_of(PRESETS["qwen3-30b-a3b"], "dw_down") // 128
from_share = tiles_of_expert / PROCESSORS
check(
    answer,
    dict(tiles=tiles_of_expert, share=from_share, reached=1 / 8 > from_share),
    see=dict(
        tiles=("The tile table", "dw_down is H by I for each expert, in tiles of 128 by 256"),
        share=("Who takes which tile?", "one tile of the busy expert, against all work over the processors"),
        reached=("Who takes which tile?", "the largest share that an expert can have, if each token picks it once"),
    ),
)
for share in (1 / 8, 0.3, 0.36, 0.37, 0.5):
    rows_of_experts = [share] + [(1 - share) / 127] * 127
    lengths = [rows for rows in rows_of_experts for _ in range(tiles_of_expert)]
    even = sum(lengths) / PROCESSORS
    best = ends(WAYS["tickets, longest first"](lengths, PROCESSORS))
    print(f"a share of {share:5.1%}: longest first ends at {best / even:.3f} of even, one tile at {share / even:.3f}")
    assert (best == share > even) == (share > from_share)
