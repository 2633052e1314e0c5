# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3 · No copies: gather in the loads, store by slot
#
# *Before: [2 · SwiGLU in the epilogue](s2_swiglu.md) · next: [4 · Resident programs](s4_persistent.md) · the flag:
# `stage="gather"`*
#
# [Lesson 2](s2_swiglu.md) took SwiGLU out of memory's way. What is left between the matrix products is copying: x is
# dispatched to rows, dy too, and then x again. This rung, `stage="gather"`, copies nothing. A product loads its rows
# from the tokens themselves, and stores its results where combine wants them.
#
# You will learn
#
# - what a copy costs twice: the bytes that it moves, and the memory that it occupies;
# - why a matrix product needs its rows' addresses, not that they lie side by side;
# - what gathering costs: next to nothing over rows, and along a contraction more than the copy that it spares;
# - how the order of backward's launches sets its peak of memory.
#
# You need lesson 1 for the plan and the blocks of rows, lesson 2 for the epilogues.

# %%
import difflib
import inspect
import os
from itertools import permutations
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when it is imported, below

from mega_moe import LADDER, MoE, Problem, recorded, roofline
from mega_moe.exercises import check
from mega_moe.kernels.blocks import blocks_of_target
from mega_moe.kernels.combine import sum_slots
from mega_moe.kernels.gathered import gathered_dact, gathered_gate_up, gathered_weight_grad, slot_gemm
from mega_moe.kernels.plan import plan as make_plan
from mega_moe.kernels.weights import readable
from mega_moe.launches import launches
from mega_moe.parity import Oracle, worst_row
from mega_moe.samples import course_example, random_inputs
from mega_moe.shapes import PRESETS, Need
from mega_moe.stages import s2_swiglu, s3_gather

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)
torch.set_printoptions(precision=4, sci_mode=False)
rungs = {rung.name: rung for rung in LADDER}


def show(**tensors):
    for name, tensor in tensors.items():
        print(f"{name} {tuple(tensor.shape)}\n{tensor}\n")


# %% [markdown]
# ## What the rung below costs
#
# Here is everything that the two rungs launch for one training step, with the large tensors that each launch reads and
# makes. (The plan and the sum of the router's gradient are left out: they handle numbers by the row, not rows.) From
# this one list we get the bytes, the time that the hardware allows for them, and the memory.


# %%
class Launch(NamedTuple):
    name: str
    step: str
    reads: str
    makes: str
    products: int = 0  # of 2·R·H·I flops each


FORWARD = {
    "swiglu": [
        Launch("dispatch x", "dispatch", "x", "rows"),
        Launch("gate_up", "gate_up", "rows w_gate_up", "pre act", 2),
        Launch("down", "down", "act w_down", "out", 1),
        Launch("combine", "combine", "out", "y"),
    ],
    "gather": [
        Launch("gate_up", "gate_up", "x w_gate_up", "pre act", 2),
        Launch("down", "down", "act w_down", "slots", 1),
        Launch("combine", "combine", "slots", "y"),
    ],
}
BACKWARD = {
    "swiglu": [
        Launch("dispatch dy", "dispatch", "dy", "dy_rows"),
        Launch("dact", "down", "dy_rows w_down pre", "dpre weighted_act", 1),
        Launch("dw_down", "down", "dy_rows weighted_act", "dw_down", 1),
        Launch("drows", "gate_up", "dpre w_gate_up", "drows", 2),
        Launch("dx", "combine", "drows", "dx"),
        Launch("dispatch x", "dispatch", "x", "rows_again"),
        Launch("dw_gate_up", "gate_up", "dpre rows_again", "dw_gate_up", 2),
    ],
    "gather": [
        Launch("dact", "down", "dy w_down pre", "dpre weighted_act", 1),
        Launch("drows", "gate_up", "dpre w_gate_up", "dx_slots", 2),
        Launch("dx", "combine", "dx_slots", "dx"),
        Launch("dw_gate_up", "gate_up", "dpre x", "dw_gate_up", 2),
        Launch("dw_down", "down", "dy weighted_act", "dw_down", 1),
    ],
}


def sizes(p):
    """MiB of each tensor."""
    sizes = dict.fromkeys(("x", "y", "dy", "dx"), p.T * p.H)
    sizes |= dict.fromkeys(("rows", "dy_rows", "rows_again", "out", "drows", "slots", "dx_slots"), p.R * p.H)
    sizes |= dict.fromkeys(("pre", "dpre"), 2 * p.R * p.I) | dict.fromkeys(("act", "weighted_act"), p.R * p.I)
    sizes |= dict.fromkeys(("w_gate_up", "dw_gate_up"), 2 * p.E * p.I * p.H)
    sizes |= dict.fromkeys(("w_down", "dw_down"), p.E * p.I * p.H)
    return {name: elements * p.dtype.itemsize / 2**20 for name, elements in sizes.items()}


h200, shape = roofline.ceiling("NVIDIA H200"), PRESETS["qwen3-30b-a3b"]
MiB = sizes(shape)


def moved(launch, MiB=MiB):
    """MiB to and from memory: each operand once, each result once."""
    return sum(MiB[name] for name in f"{launch.reads} {launch.makes}".split())


def bound(launch, p=shape, MiB=MiB):
    """Milliseconds that the launch needs at least, and whether its bytes decide."""
    arithmetic = launch.products * 2 * p.R * p.H * p.I / (h200.tflops(p.dtype) * 1e9)
    memory = moved(launch, MiB) * 2**20 / (h200.gb_per_s * 1e6)
    return max(arithmetic, memory), memory > arithmetic


# %% tags=["hide-input"] alt="Bytes and the least time of one layer's launches, with and without copies"
INK = "#1f2430"
STEP_COLOURS = dict(dispatch="#8a5a9e", gate_up="#2e6f9e", down="#5f8a3a", combine="#b89b2f")
PLACES = {
    ("swiglu", "forward"): 4.5,
    ("gather", "forward"): 3.6,
    ("swiglu", "backward"): 2.0,
    ("gather", "backward"): 1.1,
}

_, (bytes_axes, time_axes) = plt.subplots(1, 2, figsize=(10, 3.3), layout="constrained", sharey=True)
for (rung, direction), at in PLACES.items():
    ends = [0, 0]
    for launch in (FORWARD if direction == "forward" else BACKWARD)[rung]:
        ms, memory_bound = bound(launch)
        style = dict(color=STEP_COLOURS[launch.step], edgecolor="white", hatch="///" if memory_bound else None)
        for i, (axes, length) in enumerate(((bytes_axes, moved(launch) / 1024), (time_axes, ms))):
            axes.barh(at, length, left=ends[i], height=0.75, **style)
            ends[i] += length
    bytes_axes.text(ends[0] + 0.1, at, f"{ends[0]:.1f} GiB", va="center", color=INK)
    time_axes.text(ends[1] + 0.04, at, f"{ends[1]:.2f} ms", va="center", color=INK)
bytes_axes.set_yticks(list(PLACES.values()), [f"{rung}, {direction}" for rung, direction in PLACES])
bytes_axes.set(xlabel="GiB to and from memory", xlim=(0, 9.2))
time_axes.set(xlabel="ms an H200 needs at least (hatched: memory decides)", xlim=(0, 3.4))
for axes in (bytes_axes, time_axes):
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
swatches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in STEP_COLOURS.values()]
plt.gcf().legend(swatches, STEP_COLOURS, loc="outside upper center", ncols=4, frameon=False)
plt.show()

# %%
copies = [launch for launch in FORWARD["swiglu"] + BACKWARD["swiglu"] if launch.step == "dispatch"]
share = sum(map(moved, copies)) / sum(map(moved, FORWARD["swiglu"] + BACKWARD["swiglu"]))
print(f"three copies: {sum(map(moved, copies)):.0f} MiB moved, {share:.0%} of all,", end=" ")
print(f"{sum(bound(launch)[0] for launch in copies):.2f} ms at the least")

# %% [markdown]
# A copy computes nothing, so no amount of arithmetic hides it: the matrix units stand still for as long as it takes.
# Measured: what its products, each alone, leave of a direction of the rung below, beside what this list predicts for
# the launches that multiply nothing. (The measured rest has the plan and the gaps between launches in it.)

# %% tags=["hide-input"]
record = recorded.newest()
print(record)
BILLS = {"forward": FORWARD["swiglu"], "backward": BACKWARD["swiglu"]}
for name in record.problems:
    p = PRESETS[name]
    for direction, bill in BILLS.items():
        whole = record.ms(name, "swiglu", direction)
        products = [launch.name for launch in bill if launch.products]
        # This rung has kernels of its own for two of them; the others are the rung's below it.
        alone = [record.ms(name, "swiglu", of) or record.ms(name, "grouped", of) for of in products]
        if whole and all(alone):
            least = {launch.name: bound(launch, p, sizes(p))[0] for launch in bill if not launch.products}
            print(f"{name}, {direction}: {whole:.2f} ms, less products {sum(alone):.2f}: {whole - sum(alone):.2f} ms")
            words = ", ".join(f"{launch} {ms:.2f}" for launch, ms in least.items())
            print(f"    predicted for the others: {sum(least.values()):.2f} ms ({words})")

# %% [markdown]
# **And memory.** Bytes that move are over in a millisecond. A tensor that *exists* takes room away from everything else
# on the GPU: longer sequences, larger batches. When does each one exist? It begins with the launch that makes it and
# ends with the last one that reads it, with three exceptions. What the layer returns stays: y, and the gradients. So
# does pre, which autograd holds until backward has returned. And act, a local variable of `forward`, lives until that
# returns.


# %%
KEPT = {"pre", "y", "dx", "dw_gate_up", "dw_down"}


def alive(bill, MiB, before=()):
    """What exists during each launch of the bill: {name: MiB}. `before`: what exists at its start already."""
    first, last = dict.fromkeys(before, 0), dict.fromkeys(before, 0)
    for at, launch in enumerate(bill):
        for name in launch.makes.split():
            first[name] = last[name] = at
        last |= {name: at for name in launch.reads.split() if name in first}
        if launch.name == "combine":
            last["act"] = at
    last |= dict.fromkeys(KEPT, len(bill))
    return [{name: MiB[name] for name in first if first[name] <= at <= last[name]} for at in range(len(bill))]


def peak(bill, MiB, before=()):
    return max(sum(existing.values()) for existing in alive(bill, MiB, before))


# %% tags=["hide-input"] alt="MiB alive during each launch of a training step; without the copies, and in another order, the peak is lower"
GROUPS = {  # colour, tensors
    "y and gradients": ("#9aa0a8", "y dx dw_down dw_gate_up"),
    "pre": ("#2e6f9e", "pre"),
    "act, weighted act, dpre": ("#7fb0d3", "act weighted_act dpre"),
    "results of down and of dx, by row or by slot": ("#b89b2f", "out drows slots dx_slots"),
    "copies of x and dy": ("#8a5a9e", "rows dy_rows rows_again"),
}
_, panels = plt.subplots(2, 1, figsize=(10, 6.2), layout="constrained", sharey=True)
for axes, rung in zip(panels, FORWARD):
    bill = FORWARD[rung] + BACKWARD[rung]
    existing = alive(bill, MiB)
    bottom = [0] * len(bill)
    for label, (colour, names) in GROUPS.items():
        heights = [sum(now.get(name, 0) for name in names.split()) for now in existing]
        axes.bar(range(len(bill)), heights, 1, bottom, color=colour, edgecolor="white", linewidth=0.6, label=label)
        bottom = [b + h for b, h in zip(bottom, heights)]
    top = max(range(len(bill)), key=bottom.__getitem__)
    axes.text(top + 0.48, bottom[top] + 60, f"peak: {bottom[top]:.0f} MiB", ha="right", color=INK)
    if MiB_measured := record.peak_MiB("qwen3-30b-a3b", rung):
        axes.axhline(MiB_measured, color="#b00020", linewidth=1, linestyle="--")
        axes.text(-0.45, MiB_measured + 40, f"measured: {MiB_measured:.0f} MiB", color="#b00020", fontsize=9)
    axes.axvline(len(FORWARD[rung]) - 0.5, color=INK, linewidth=1, linestyle=":")
    axes.set_xticks(range(len(bill)), [launch.name for launch in bill], fontsize=9)
    axes.set(ylabel="MiB over the inputs", title=rung, ylim=(0, 3000), xlim=(-0.5, len(bill) - 0.5))
    axes.spines[["top", "right"]].set_visible(False)
handles, labels = axes.get_legend_handles_labels()
plt.gcf().legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# The violet is what this rung takes away. On the tallest column above, a copy of x stands beside both weight gradients,
# at the worst moment. What is left at the worst moments below: the gradients themselves; what they are made from, dpre
# and the weighted act or that act alone; y; and pre, which nobody reads any more, but which is autograd's to let go.
# (With `save="inputs"` backward makes pre itself, and does let it go.) Part of the gain is [another
# order](#the-order-of-backward) of the launches.
#
# The yellow is all that remains of size R·H, and it is there from down to combine and from drows to dx only. It is the
# price of a sum in a fixed order: an atomic add into y would do without it, and give other bits on every run. Forward's
# peak is just there, so it stays as high as it was.
#
# ## The idea
#
# A program that multiplies a block of rows asks two things of them. It needs to know where each row *begins*, and that
# the row's numbers lie side by side from there. Nothing asks for row 6 to lie behind row 5: lesson 1's kernel already
# has a *vector* of row pointers, one a row. So let the pointers be those of the tokens, `x + token_of_row[r] * H`, and
# dispatch is done.
#
# At the other end it is the same. The kernel stores row by row, so each row may go anywhere. We let it go to slot k of
# its token in a tensor `slots` (T, K, H), and combine finds a token's K rows side by side.

# %%
example, dy = course_example(device=device)
x, topk_ids, topk_weights, w_gate_up, w_down = vars(example).values()
T, K, E = 4, 2, 3
plan = make_plan(topk_ids, E)

# %% tags=["hide-input"] alt="Rows of three tiles are loaded from tokens of x; their results are stored in the slots of tokens"
COLOURS = ["#2e6f9e", "#c0662b", "#5f8a3a"]  # experts 0, 1, 2 in every figure
BLOCK_R = 4
row_start, token_of_row = plan.row_start.tolist(), plan.token_of_row.tolist()
slot_of_row, ids = plan.slot_of_row.tolist(), topk_ids.tolist()
_, axes = plt.subplots(figsize=(10, 5.6), layout="constrained")


def box(at, height, text, width, **style):
    style = dict(facecolor="white", edgecolor=INK) | style
    axes.add_patch(plt.Rectangle((at - width / 2, height - 0.36), width, 0.72, zorder=2, **style))
    axes.text(
        at, height, text, ha="center", va="center", zorder=3, color=INK if style["facecolor"] == "white" else "white"
    )


def arrow(start, end, colour, **style):
    style = dict(arrowstyle="-|>", color=colour, linewidth=1.5, shrinkA=0, shrinkB=0, mutation_scale=11) | style
    axes.annotate("", end, start, arrowprops=style)


height_of_token = [10.2 - 3 * t for t in range(T)]
for t, height in enumerate(height_of_token):
    box(0, height, f"$x_{t}$", 0.9)
    box(11.4, height, f"$y_{t}$", 0.9)
    for k in range(K):
        at = 8 + 1.3 * k
        live = ids[t][k] >= 0
        style = (
            dict(facecolor=COLOURS[ids[t][k]]) if live else dict(facecolor="white", hatch="///", edgecolor="#9aa0a8")
        )
        box(at, height, f"{t}, {k}" if live else "", 1.3, **style)
    arrow((9.95, height), (10.95, height), INK)
for e in range(E):
    for place in range(BLOCK_R):
        row = row_start[e] + place
        live = row < row_start[e + 1]
        token = token_of_row[min(row, row_start[e + 1] - 1)]
        height = 11.2 - 4.3 * e - 0.76 * place
        style = dict(facecolor=COLOURS[e]) if live else dict(edgecolor=COLOURS[e], linestyle=":")
        box(4, height, f"row {row}" if live else "repeats", 1.5, **style)
        line = {} if live else dict(linestyle=":", linewidth=1)
        arrow((0.45, height_of_token[token]), (3.25, height), COLOURS[e], **line)
        if live:
            to = height_of_token[token]
            if slot_of_row[row]:
                side = 1 if height > to else -1  # past the token's first slot, above or below it
                axes.plot([4.75, 7.1], [height, to + 0.75 * side], color=COLOURS[e], linewidth=1.5)
                arrow((7.1, to + 0.75 * side), (9.3, to + 0.36 * side), COLOURS[e])
            else:
                arrow((4.75, height), (7.35, to), COLOURS[e])
    axes.text(4, 11.75 - 4.3 * e, f"a tile of expert {e}", ha="center", color=COLOURS[e], weight="bold")
for at, word in ((0, "x"), (1.9, "load"), (6.1, "store"), (8.65, "slots (T, K, H)"), (11.4, "y")):
    axes.text(at, 12.6, word, ha="center", color=INK, style="italic")
axes.set(xlim=(-0.8, 12.2), ylim=(-0.4, 13))
axes.axis("off")
plt.show()

# %% [markdown]
# ## The kernels
#
# Gate and up first. Against lesson 2's kernel one line matters, the one that makes `x_at` (and as x is read where it
# lies, it may have any strides). `multiply_gate_up` and the epilogue are that lesson's own functions:
#
# ```python
# --8<-- "mega_moe/kernels/gathered.py:gate_up"
# ```
#
# The dotted arrows of the figure are `tl.minimum(r, end - 1)`. Behind the expert's last row a tile asks for that row's
# token again. What `token_of_row` holds there would not do: it belongs to the next expert, or, behind the last live row
# of all, it is -1, an address before x. A mask would do, at the cost of a comparison a load. A token of the same expert
# is always a valid address, and it is on its way already. Whatever it holds, NaN included, stays in its row of the
# product, which is not stored.
#
# What does gathering cost here? A program loads its 128 tokens' numbers once, before the loop. From then on the loop is
# the same as on contiguous rows: every thread copies 16 bytes at a time, eight neighbours the 64 columns of one row,
# three steps ahead of the product. One thing is given up: Hopper's *bulk copy* (TMA) moves a whole tile on one thread's
# order, but wants its rows at equal distances, and tokens have none. The next rung uses it where rows do lie side by
# side.
#
# Down and drows store by slot. The loads are lesson 1's; the address of the store is new:
#
# ```python
# --8<-- "mega_moe/kernels/gathered.py:slots"
# ```
#
# That is not quite free: a tile leaves in pieces of one row, not as one block. In return combine looks up no rows; it
# only asks which slots are live:
#
# ```python
# --8<-- "mega_moe/kernels/combine.py:slots"
# ```
#
# A token's sum has one owner and one order, that of its slots. The same kernel makes dx, where no weights are left to
# apply (`None`). A masked route's slot was written by nobody, so its load is masked: zero times NaN would be NaN.
#
# ### Weight gradients gather along the contraction
#
# Here the rows are what is summed over, so *every step* of the loop needs other tokens:
#
# ```python
# --8<-- "mega_moe/kernels/gathered.py:weight_grad"
# ```
#
# Two things differ from the products over rows. Repeating a token will not do, since it would be added twice: both
# operands are masked, and the second exercise asks why one mask is not enough. And the loop now has a load whose
# address comes from another load. Triton starts loads some steps ahead, and a chain of two loads shares that lead
# between them. With `num_stages=4` on sm_90 the contiguous kernel has four buffers of tiles, and tiles are under way
# for three steps; this one would have two, and one step. So it asks for six stages, of which three are left for the
# tiles (so Triton 3.7 compiles it; the record of November 2026 was taken with 3.6):

# %% tags=["hide-input"] alt="Loads under way while a step is multiplied: three steps ahead contiguous; gathered one or two"
assert blocks_of_target("sm_90", torch.bfloat16).gathered_weight_grad.num_stages == 6  # as is said above
_, axes = plt.subplots(figsize=(10, 3), layout="constrained")
STATES = {
    "contiguous, 4 stages": ["multiplied", *["tiles loading"] * 3, "nothing yet"],
    "gathered, 4 stages": ["multiplied", "tiles loading", "tokens loading", "nothing yet", "nothing yet"],
    "gathered, 6 stages": ["multiplied", *["tiles loading"] * 2, *["tokens loading"] * 2],
}
FILLS = {"multiplied": COLOURS[0], "tiles loading": "#7fb0d3", "tokens loading": "#b89b2f", "nothing yet": "white"}
for line, (name, states) in enumerate(STATES.items()):
    axes.text(-0.06, 1 - line, name, ha="right", va="center", color=INK)
    for step, state in enumerate(states):
        edge = "#c8ccd2" if state == "nothing yet" else "white"
        axes.add_patch(plt.Rectangle((step, 0.63 - line), 0.96, 0.74, facecolor=FILLS[state], edgecolor=edge))
        axes.text(step + 0.48, 1 - line, state, ha="center", va="center", color="white" if step == 0 else INK)
for step in range(5):
    axes.text(step + 0.48, 1.55, f"rows of step s + {step}" if step else "rows of step s", ha="center", color=INK)
axes.set(xlim=(-1.1, 5), ylim=(-1.5, 1.8))
axes.axis("off")
plt.show()

# %% [markdown]
# So a gathered weight gradient takes longer than a contiguous one, and on an H200 by more than the copy takes that it
# spares: the times [are below](#is-it-fast-and-is-it-small). What it wins is memory, at the very peak.
#
# ## The running example
#
# The same numbers as in lessons 0 to 2, out of the new kernels. We put NaN into the slot that nobody wrote, to see that
# nobody reads it:

# %%
pre, act = gathered_gate_up(x, readable(w_gate_up), plan, swiglu_limit=None, pre=True, act=True)
slots = slot_gemm(act, readable(w_down), plan)
slots[plan.row_of_slot < 0] = torch.nan
y = sum_slots(slots, topk_weights, plan)
show(slots=slots, y=y)

# %% [markdown]
# Read token 0: its first expert put out (1.4621, 0), its second (0.7311, -0.7311), half of each. Backward, in the order
# of the recipe:

# %%
dpre, weighted_act, dtopk_weights = gathered_dact(dy, readable(w_down), pre, topk_weights, plan, None, Need())
dx_slots = slot_gemm(dpre.flatten(1), readable(w_gate_up).mT, plan)
dx = sum_slots(dx_slots, None, plan)
dw_gate_up = torch.empty_like(w_gate_up)
gathered_weight_grad(dpre.flatten(1), x, plan, dw_gate_up.flatten(1, 2))
dw_down = torch.empty_like(w_down)
gathered_weight_grad(weighted_act, dy, plan, dw_down.mT)
show(dtopk_weights=dtopk_weights, dx=dx, dw_down=dw_down.squeeze(-1))

y_specified, saved = rungs["reference"].forward(example.problem(), example)
specified = rungs["reference"].backward(example.problem(), example, saved, dy)
torch.testing.assert_close(y, y_specified)
for ours, theirs in zip((dx, dtopk_weights, dw_gate_up, dw_down), specified.tensors(), strict=True):
    torch.testing.assert_close(ours, theirs)

# %% [markdown]
# Why is the gradient of `w_down` handed over as `dw_down.mT`? One operand is gathered and one is not, and the kernel
# gathers its second. For `dw_gate_up` that is x, as it should be; for `dw_down` it is dy, whose columns are the
# gradient's *rows*. So the kernel makes the transpose, and strides put it where it belongs.
#
# ## What changed in the recipe

# %% tags=["hide-input", "diff"]


def recipe(stage):
    """The stage file below its imports."""
    source = inspect.getsource(stage)
    return source[source.index("# step") :].splitlines()


diff = difflib.unified_diff(recipe(s2_swiglu), recipe(s3_gather), "s2_swiglu.py", "s3_gather.py", n=1, lineterm="")
print(*diff, sep="\n")

# %% [markdown]
# The kernel `dispatch` is gone, and `rows` and `dy_rows` with it: the products that want rows get `x` or `dy`. The
# recipe allocates the weight gradients now, so that one of them can be written through its transpose. dw_down has moved
# to the end. And three launches are gone:


# %%
def count(rung, problem):
    inputs, dy = random_inputs(problem)
    _, saved = rung.forward(problem, inputs)
    forward = launches(lambda: rung.forward(problem, inputs), device)
    return len(forward), len(launches(lambda: rung.backward(problem, inputs, saved, dy), device))


for name in ("swiglu", "gather"):
    small = Problem(T=32, H=16, I=16, E=4, K=2, dtype=torch.float32, device=device)
    print("{:7} {} launches forward, {} backward".format(name, *count(rungs[name], small)))

# %% [markdown]
# ### The order of backward
#
# dact comes first: all else needs what it makes. Three things are left to do after it, in any order: dx by way of its
# slots; dw_gate_up; and dw_down, which lets go of `weighted_act`. The last of the first two lets go of `dpre`. Here
# is the peak of every order (nothing ever comes between drows and dx: the slots would only stay longer), the lowest
# starred:

# %%
dact, *rest = BACKWARD["gather"]
parts = {"dx": rest[:2], "dw_gate_up": rest[2:3], "dw_down": rest[3:]}
tokens = (8192, 16384, 32768, 65536)
print(f"{'MiB at the peak, tokens:':32}", *(f"{T:7,}" for T in tokens))
peaks = {}
for order in permutations(parts):
    bill = [dact, *(launch for part in order for launch in parts[part])]
    peaks[order] = [peak(bill, sizes(shape.at(T=T)), before=("y", "pre")) for T in tokens]
for order, row in peaks.items():
    cells = (f"{MiB:6.0f}{'*' if MiB == min(column) else ' '}" for MiB, column in zip(row, zip(*peaks.values())))
    print(f"{'dact, ' + ', '.join(order):32}", *cells, "  <- the recipe" if order == tuple(parts) else "")

# %% [markdown]
# dw_gate_up, the largest gradient, had better not be there yet while the slots are: dx comes before it. When to make
# dw_down has no such answer. Late, it is not in the way itself, and `dpre` is gone when it comes. Early, it lets go of
# `weighted_act`, which grows with the tokens, before the slots come. The recipe makes it last, which gives the lowest
# peak of all as long as tokens are not very many. Where they are, the order that begins with dw_down would be lower, as
# the stars say; the first exercise asks how many that is.
#
# ## Is it right?
#
# By the yardstick of [lesson 1](s1_grouped.md): the worst row's error, as a share of the budget.

# %%
problem = PRESETS["tiny"].at(device=device)  # bf16
inputs, tiny_dy = random_inputs(problem)
oracle = Oracle(problem, inputs, tiny_dy)
results = {}
for name in ("swiglu", "gather"):
    tiny_y, saved = rungs[name].forward(problem, inputs)
    results[name] = tiny_y, rungs[name].backward(problem, inputs, saved, tiny_dy)
    verdict = oracle.check(*results[name])
    shares = "   ".join(f"{output} {share:.2f}" for output, share in verdict.shares.items())
    print(f"{name:7} {shares}   {'passed' if verdict.passed else 'FAILED'}")
    assert verdict.passed

# %% [markdown]
# Gathering invites mistakes of its own. Let one row of 128 be loaded from its token's neighbour; and let one token's
# two results be stored in each other's slot:


# %%
def y_and_dx(load_plan, store_plan):
    """y and dx of the tiny layer by the kernels, loading and storing by these plans."""
    w_gate_up, w_down = readable(inputs.w_gate_up), readable(inputs.w_down)
    pre, act = gathered_gate_up(inputs.x, w_gate_up, load_plan, None, True, True)
    y = sum_slots(slot_gemm(act, w_down, store_plan), inputs.topk_weights, tiny_plan)
    dpre, _, _ = gathered_dact(tiny_dy, w_down, pre, inputs.topk_weights, load_plan, None, Need())
    return y, sum_slots(slot_gemm(dpre.flatten(1), w_gate_up.mT, store_plan), None, tiny_plan)


tiny_plan = make_plan(inputs.topk_ids, problem.E)
neighbour, swapped = tiny_plan.token_of_row.clone(), tiny_plan.slot_of_row.clone()
neighbour[40] = (neighbour[40] + 1) % problem.T
swapped[tiny_plan.row_of_slot[17].long()] = torch.tensor([1, 0], dtype=torch.int32)
for fault, *plans in (
    ("none", tiny_plan, tiny_plan),
    ("a neighbour's row", tiny_plan._replace(token_of_row=neighbour), tiny_plan),
    ("two slots swapped", tiny_plan, tiny_plan._replace(slot_of_row=swapped)),
):
    got = y_and_dx(*plans)
    share = {name: worst_row(t, oracle.truth[name]) / oracle.budgets[name] for name, t in zip(("y", "dx"), got)}
    print(f"{fault:18} share of the budget: y {share['y']:6.2f}   dx {share['dx']:6.2f}")
    assert (share["y"] > 1) == (fault != "none")

# %% [markdown]
# The last line deserves a second look. dx does not notice the swapped slots: it sums them without weights, and a sum of
# two does not care who comes first. Only y, where each slot has its own weight, tells them apart.
#
# ## Is it fast, and is it small?
#
# From the [recorded runs](../results.md), each direction alone and both together, beside what the list of launches
# predicted for both: the least time of each launch added up, and the peak of what is alive.

# %% tags=["hide-input"]
both = "forward+backward"
print(record)
for name in record.problems:
    p, MiB_of = PRESETS[name], sizes(PRESETS[name])
    heads = ("forward ms", "backward", "both", "at least", "peak MiB", "predicted")
    print(f"\n{name:30}" + "".join(f"{head:>11}" for head in heads))
    for contestant in ("swiglu", "gather", "torch-compiled", "cublas"):
        timed = [record.rows.get((name, contestant, direction)) for direction in ("forward", "backward", both)]
        if not all(timed):
            continue
        row = timed[-1]
        cells = [f"{of['ms']['median']:.2f}" for of in timed]
        cells += ["", f"{row['peak_bytes'] / 2**20:.0f}" if row["peak_bytes"] else "", ""]
        if contestant in FORWARD:
            bill = FORWARD[contestant] + BACKWARD[contestant]
            cells[3] = f"{sum(bound(launch, p, MiB_of)[0] for launch in bill):.2f}"
            cells[5] = f"{peak(bill, MiB_of):.0f}"
        print(f"{row['label']:30}" + "".join(f"{text:>11}" for text in cells))
    for gemm in ("gate_up", "down", "dact", "drows", "dw_gate_up", "dw_down"):
        if here := record.ms(name, "gather", gemm):
            contiguous = record.ms(name, "swiglu", gemm) or record.ms(name, "grouped", gemm)
            cells = [f"{ms:.2f} ms" if ms else "–" for ms in (contiguous, here)]
            print(f"    {gemm + ' alone':20} rung below {cells[0]:>8}   here {cells[1]:>8}")
if record and not any(record.ms(name, "gather", both) for name in record.problems):
    print("\nThis rung is not recorded yet. On a GPU, `make bench` measures.")

# %% [markdown]
# The list leaves out the plan and the router's gradient, 2 MiB here, and its times are a bound: they let x come from
# memory once, though each of its rows is read K times and the cache does not hold all of it.
#
# The memory is what was promised, to the last few MiB. The time is a mixed bag. Forward is faster: gate_up and dact
# gather at no cost that one could see, down and drows store by slot for a few percent more, and the copies are gone.
# But in the records of November 2026 gathered weight gradients take a fifth to a third longer than contiguous ones. What
# that adds is several times what their copies need at the least, and so backward, and the training step as a whole, is
# *slower* than on the rung below. This rung trades time for memory. The next one wins the time back.
#
# What is left? The copies are gone, and the rest is products that each take longer than their bound. A program begins
# by looking for its expert, waits for its first tiles, multiplies, writes, and ends; another takes its place and waits
# again. The next rung keeps the programs and lets the tiles come to them.
#
# ## The flag

# %%
torch.manual_seed(0)
layer = MoE(hidden_size=16, intermediate_size=12, num_experts=3, top_k=2, device=device)
few = torch.randn(4, 16)
for name in ("swiglu", "gather"):
    layer.stage = name
    layer.zero_grad()
    loss = layer(few).square().mean()
    loss.backward()
    norm = layer.experts.down_proj.grad.norm()
    print(f'stage="{layer.stage}": loss {loss.item():.6f}, norm of the gradient of down_proj {norm.item():.6f}')

# %% [markdown]
# ## Exercises
#
# **1.** Up to which number of tokens has the recipe's order of backward the lowest peak? Take one layer of qwen3-30b-a3b,
# and find the answer in the letters T, K, E, H, I first. By how many MiB is it lower than dw_down first with 16,384
# tokens?
#
# ??? success "Answer"
#     The two orders that matter are dw_down first and dw_down last. While the slots exist, and while dw_gate_up is made,
#     the first has `dw_down` beside them and the second has `weighted_act`: E·H·I elements against R·I. So last is better
#     up to R = E·H, that is T = E·H/K, 32,768 tokens here; there both are equal. At the very end, where all gradients
#     exist, last is better in any case: `weighted_act` stands beside them, R·I elements, and in the other order `dpre`,
#     twice as many. At 16,384 tokens E·H·I is just 2·R·I, so either way it is R·I elements that the recipe saves,
#     192 MiB.

# %% tags=["solution"]
answer = dict(tokens=32768, MiB=192)

early, late, tried = ("dw_down", "dx", "dw_gate_up"), tuple(parts), []
for T_tried in (16384, 32768 - 1024, 32768, 32768 + 1024, 65536):
    MiB_at = sizes(shape.at(T=T_tried))
    early_peak, late_peak = (
        peak([dact, *(launch for part in order for launch in parts[part])], MiB_at, ("y", "pre"))
        for order in (early, late)
    )
    tried.append((T_tried, early_peak, late_peak))
equal = [T_tried for T_tried, early_peak, late_peak in tried if early_peak == late_peak]
assert equal == [shape.E * shape.H // shape.K]
assert all((early_peak > late_peak) == (T_tried < equal[0]) for T_tried, early_peak, late_peak in tried[:2] + tried[3:])
_, early_peak, late_peak = tried[0]
assert late_peak == min(row[tokens.index(16384)] for row in peaks.values())
check(
    answer,
    dict(tokens=equal[0], MiB=round(early_peak - late_peak)),
    see=dict(
        tokens=("What changed in the recipe", "one order keeps dw_down meanwhile, the other weighted_act: when equal?"),
        MiB=("What changed in the recipe", "the difference of those two, in bf16"),
    ),
)
for T_tried, early_peak, late_peak in tried:
    print(f"{T_tried:6} tokens: dw_down early {early_peak:6.0f} MiB, late {late_peak:6.0f} MiB")

# %% [markdown]
# **2.** In the weight gradients' kernel, a row behind the expert's end is masked in `a` *and* in the tokens. Zero times
# anything is zero, so one mask should do. Take an expert whose one row of `a` is 1 and whose token is 2. Behind it, a row
# of `a` that nobody wrote holds NaN, and the next expert's token infinity. What is the expert's gradient with the tokens
# masked alone, with `a` masked alone, and with both?
#
# ??? success "Answer"
#     NaN, NaN and 2. Zero times NaN is NaN. Mask the tokens alone, and `a` behind the end is the next expert's row, or,
#     behind the last live row of all, memory that nobody ever wrote: a NaN there times zero poisons a gradient. Mask `a`
#     alone, and the tokens are those of the next expert's rows: if one of them holds a NaN or an infinity, it reaches the
#     gradient of an expert that it was never sent to. With both masked, no foreign number is even loaded.

# %% tags=["solution"]
answer = dict(tokens_alone_nan=True, a_alone_nan=True, both=2.0)

rows_of_a = torch.tensor([[1.0], [torch.nan]])  # the expert's row, and one behind its end that nobody wrote
tokens_of_rows = torch.tensor([[2.0], [torch.inf]])  # the expert's token, and the next expert's
inside = torch.tensor([[1.0], [0.0]])
masked = lambda t: torch.where(inside > 0, t, 0.0)
tokens_alone, a_alone = rows_of_a.mT @ masked(tokens_of_rows), masked(rows_of_a).mT @ tokens_of_rows
both_masked = masked(rows_of_a).mT @ masked(tokens_of_rows)
check(
    answer,
    dict(tokens_alone_nan=tokens_alone.isnan().item(), a_alone_nan=a_alone.isnan().item(), both=both_masked.item()),
    see=dict(
        tokens_alone_nan=("The kernels", "a masked token is 0; what is that times what nobody wrote?"),
        a_alone_nan=("The kernels", "a masked `a` is 0; what is that times the next expert's token?"),
        both=("The kernels", "only the expert's own row is left of the sum"),
    ),
)
print(f"tokens masked {tokens_alone.item()}, a masked {a_alone.item()}, both {both_masked.item()}")
