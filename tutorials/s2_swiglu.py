# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2 · SwiGLU in the epilogue
#
# *Before: [1 · One launch for all experts](s1_grouped.md) · next: [3 · No copies](s3_gather.md) · the flag:
# `stage="swiglu"`*
#
# [Lesson 1](s1_grouped.md) made every step one launch. Between its launches stands memory: gate_up writes pre, only for
# swiglu to read it, and backward does the same with dact. This rung, `stage="swiglu"`, computes SwiGLU and its backward
# in the *epilogue* of a matrix product, the few lines after its loop, while the operands are still in registers.
#
# You will learn
#
# - how to see from a roofline that a pass over memory could hide under a product;
# - why gate and up of the same columns must be made by one program, and what that program has room for;
# - how a sum whose pieces lie in different programs keeps one order, and why that matters;
# - what it costs to keep pre for backward, and what to make it again.
#
# You need lesson 1.

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
from mega_moe.kernels.dispatch import dispatch
from mega_moe.kernels.fused_swiglu import dact_swiglu, gate_up_swiglu
from mega_moe.kernels.grouped_gemm import grouped_gemm
from mega_moe.kernels.plan import plan as make_plan
from mega_moe.kernels.swiglu import swiglu, swiglu_backward
from mega_moe.kernels.weights import readable
from mega_moe.launches import launches
from mega_moe.parity import Oracle
from mega_moe.samples import course_example, random_inputs
from mega_moe.shapes import PRESETS, Grads, Inputs, Need
from mega_moe.stages import s1_grouped, s2_swiglu

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)
torch.set_printoptions(precision=4, sci_mode=False)
below, here = LADDER[1:3]  # the rungs "grouped" and "swiglu"


def show(**tensors):
    for name, tensor in tensors.items():
        print(f"{name} {tuple(tensor.shape)}\n{tensor}\n")


# %% [markdown]
# ## What the rung below costs
#
# Of the tensors that pass from kernel to kernel, three stand around SwiGLU: pre, act and dact. Here is what
# `roofline.steps` charges for them, kernel by kernel; the last kernel of each group is what the first two become on this
# rung.


# %% tags=["hide-input"] alt="Arithmetic and memory of six kernels: SwiGLU is memory only, the products beside it leave memory idle"
class Work(NamedTuple):
    """What one kernel does: the flops of its product, the bytes of its loop, and those it moves after the loop."""

    flops: int
    loop: int
    epilogue: int

    def ms(self, ceiling, dtype):
        """Milliseconds at the data sheet's rates: of the arithmetic, of the loop's bytes, of the epilogue's bytes."""
        per_ms = ceiling.tflops(dtype) * 1e9, ceiling.gb_per_s * 1e6, ceiling.gb_per_s * 1e6
        return [work / rate for work, rate in zip(self, per_ms)]


def kernels_of(p):
    """The kernels that make act and dpre: those of the rung below, and what becomes of them here."""
    b = p.dtype.itemsize
    rows, act, pre = p.R * p.H * b, p.R * p.I * b, p.R * 2 * p.I * b
    w_down, w_gate_up, dtopk_weights = p.E * p.H * p.I * b, p.E * 2 * p.I * p.H * b, p.R * 4
    product = 2 * p.R * p.H * p.I
    return {
        "gate_up": Work(2 * product, rows + w_gate_up, pre),
        "swiglu": Work(0, 0, pre + act),
        "gate_up_swiglu": Work(2 * product, rows + w_gate_up, pre + act),
        "dact": Work(product, rows + w_down, act),
        "swiglu_backward": Work(0, 0, pre + act + pre + act + dtopk_weights),
        "dact_swiglu": Work(product, rows + w_down, pre + pre + act + dtopk_weights),
    }


h200, shape = roofline.ceiling("NVIDIA H200"), PRESETS["qwen3-30b-a3b"]
bill = kernels_of(shape)
for name, step, direction in [
    ("gate_up", "gate_up", "forward"),
    ("swiglu", "swiglu", "forward"),
    ("swiglu_backward", "swiglu", "backward"),
]:
    assert sum(bill[name][1:]) == roofline.steps(shape, direction)[step].bytes

INK, GREY = "#1f2430", "#9aa0a8"
GATE_UP, SWIGLU, DOWN = "#2e6f9e", "#c0662b", "#5f8a3a"

_, axes = plt.subplots(figsize=(10, 4.2), layout="constrained")
heights = [5.6, 4.6, 3.6, 2, 1, 0]
for at, (name, work) in zip(heights, bill.items()):
    arithmetic, loop, epilogue = work.ms(h200, shape.dtype)
    fused = name.endswith("_swiglu")
    colour = GATE_UP if name.startswith("gate_up") else DOWN
    axes.barh(at + 0.19, arithmetic, 0.36, color=colour)
    axes.barh(at - 0.19, loop, 0.36, color=colour, alpha=0.45, hatch="///", edgecolor="white")
    axes.barh(at - 0.19, epilogue, 0.36, left=loop, color=SWIGLU, hatch="///", edgecolor="white")
    bound = max(arithmetic, loop + epilogue)
    axes.text(bound + 0.01, at, f"{bound:.2f} ms", va="center", color=INK, weight="bold" if fused else "normal")
    axes.text(-0.01, at, name, va="center", ha="right", color=INK, weight="bold" if fused else "normal")
for at, fused in ((5.1, 3.6), (1.5, 0)):
    axes.plot([0.96, 0.96], [at - 0.8, at + 0.8], color=GREY)
    axes.text(0.98, at, "one after the other\nin the rung below", va="center", color=INK)
    axes.text(0.98, fused, "here", va="center", color=INK, weight="bold")
for label, style in {
    "arithmetic": dict(color=GREY),
    "memory, in the loop": dict(color=GREY, alpha=0.45, hatch="///", edgecolor="white"),
    "memory, after the loop": dict(color=SWIGLU, hatch="///", edgecolor="white"),
}.items():
    axes.bar(0, 0, label=label, **style)
axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.45, 1), ncols=3)
axes.set(xlabel="ms that an H200 needs at least, by its data sheet", xlim=(-0.14, 1.2), ylim=(-0.5, 6.1), yticks=[])
axes.set_xticks([0, 0.2, 0.4, 0.6, 0.8])
axes.spines[["top", "right", "left"]].set_visible(False)
plt.show()

# %% [markdown]
# `swiglu` is nothing but memory, and while it runs no matrix unit works. `gate_up` is bound by arithmetic, and while it
# runs the memory idles more than half of the time. Two kernels that need different parts of the chip run one after the
# other. Inside the product, SwiGLU's bytes could travel while other tiles multiply, and some need not travel at all: in
# forward pre is not read back, in backward dact is neither written nor read. In backward it is a tight fit, since the
# product is half as large and its epilogue moves more. So this is what the roofline promises, if all that moves after a
# loop hides under arithmetic, and if nothing of it does:


# %% tags=["hide-input"]
def predicted(p, ceiling, hidden):
    """Milliseconds that this rung saves, (forward, backward): if the bytes after a loop hide under arithmetic, or not."""

    def ms(work):
        arithmetic, loop, epilogue = work.ms(ceiling, p.dtype)
        return max(arithmetic, loop + epilogue) if hidden else max(arithmetic, loop) + epilogue

    k = {name: ms(work) for name, work in kernels_of(p).items()}
    forward = k["gate_up"] + k["swiglu"] - k["gate_up_swiglu"]
    return forward, k["dact"] + k["swiglu_backward"] - k["dact_swiglu"]


for hidden, words in ((True, "epilogues hide"), (False, "they do not")):
    forward, backward = predicted(shape, h200, hidden)
    print(f"if {words:14}  forward saves {forward:.3f} ms, backward {backward:.3f} ms")

# %% [markdown]
# And measured? The record has the rung below as a whole, and each of its products alone. What the products leave of a
# direction is its passes over memory (dispatch, swiglu, combine), the plan, and the gaps between launches:

# %% tags=["hide-input"]
record = recorded.newest()
print(record)
PRODUCTS = dict(forward=("gate_up", "down"), backward=("dact", "dw_down", "drows", "dw_gate_up"))
for name in record.problems:
    for direction, products in PRODUCTS.items():
        whole = record.ms(name, "grouped", direction)
        alone = [record.ms(name, "grouped", product) for product in products]
        if whole and all(alone):
            p = PRESETS[name]
            passes = {step: cost.bytes for step, cost in roofline.steps(p, direction).items() if not cost.flops}
            if direction == "backward":
                passes["dispatch"] += (p.T + p.R) * p.H * p.dtype.itemsize  # x, once more
            least = {step: size / h200.gb_per_s / 1e6 for step, size in passes.items()}
            print(f"{name}, {direction}: {whole:.2f} ms, less products {sum(alone):.2f}: {whole - sum(alone):.2f} ms")
            words = ", ".join(f"{step} {ms:.2f}" for step, ms in least.items())
            print(f"    predicted for the passes: {sum(least.values()):.2f} ms ({words})")

# %% [markdown]
# ## The idea
#
# When the loop of a grouped GEMM ends, a tile of its result is in registers. The rung below cuts the 2I columns of pre
# into tiles side by side, so a tile holds gate *or* up, never both operands of $\mathrm{silu}(\mathrm{gate}) \cdot
# \mathrm{up}$. So cut them differently: a program takes half as many columns of gate, and the *same* columns of up. It
# is the same amount of arithmetic and the same number of registers, two accumulators of 128 by 128 instead of one of
# 128 by 256; and the rows, which both need, are loaded once for both.

# %% tags=["hide-input"] alt="Above: one program's columns of pre in both rungs. Below: what each program has in registers, reads and writes"
_, (columns, forward, backward) = plt.subplots(
    3, 1, figsize=(10, 8.2), layout="constrained", height_ratios=[1.15, 1.6, 1.9]
)


def box(axes, at, height, width, text, colour="white", dashed=False):
    style = dict(facecolor=colour, edgecolor=INK, linestyle="--" if dashed else "-")
    axes.add_patch(plt.Rectangle((at, height), width, 0.6, zorder=2, **style))
    ink = INK if colour == "white" else "white"
    axes.text(at + width / 2, height + 0.3, text, ha="center", va="center", color=ink, zorder=3, fontsize=10)


def arrow(axes, start, end, colour=INK):
    axes.annotate("", end, start, arrowprops=dict(arrowstyle="-|>", color=colour, linewidth=1.4), zorder=1)


for row, (rung, pieces) in enumerate((("grouped", 6), ("swiglu", 12))):
    for piece in range(pieces):
        program = piece % 6
        mine = GATE_UP if program == 1 else "white"
        width = 9 / pieces
        box(columns, 1 + piece * width, 1 - 0.9 * row, width, str(program), mine)
    columns.text(0.9, 1.3 - 0.9 * row, rung, ha="right", va="center", color=INK)
columns.plot([5.5, 5.5], [-0.1, 2.05], color=INK, linewidth=2.5, zorder=4)
for at, half in ((3.25, "gate: columns 0 to 767"), (7.75, "up: columns 0 to 767")):
    columns.text(at, 1.8, half, ha="center", color=INK)
columns.set_title("which program makes which columns of pre", fontsize=11, color=INK, loc="left")
columns.set(xlim=(0, 10.1), ylim=(-0.1, 2.2))

for axes, height in ((forward, 3.1), (backward, 4.0)):
    axes.add_patch(plt.Rectangle((1, 0.95), 9, height - 1.35, facecolor="#eef1f5", edgecolor="none", zorder=0))
    axes.text(0.9, height + 0.3, "memory", ha="right", va="center", color=INK)
    axes.text(0.9, 0.45, "memory", ha="right", va="center", color=INK)
    axes.text(0.9, (height + 0.55) / 2, "registers\nof one\nprogram", ha="right", va="center", color=INK)
    axes.set(xlim=(0, 10.1), ylim=(0.05, height + 0.7))

forward.set_title("forward: gate_up_swiglu", fontsize=11, color=INK, loc="left")
for at, width, text in ((1.5, 2, "w_gate[e]"), (4.1, 1.6, "rows"), (6.3, 2, "w_up[e]")):
    box(forward, at, 3.1, width, text)
box(forward, 1.5, 2.0, 2, "gate, 128 × 128", GATE_UP)
box(forward, 6.3, 2.0, 2, "up, 128 × 128", GATE_UP)
box(forward, 3.9, 1.1, 2, "act, 128 × 128", SWIGLU)
for start, end in (
    ((2.5, 3.1), (2.5, 2.6)),
    ((4.5, 3.1), (3.3, 2.6)),
    ((5.3, 3.1), (6.5, 2.6)),
    ((7.3, 3.1), (7.3, 2.6)),
):
    arrow(forward, start, end)
forward.text(8.6, 2.85, "the loop over H", color=INK, va="center", fontsize=9)
forward.text(8.6, 1.4, "the epilogue", color=SWIGLU, va="center", fontsize=9)
for start, end in (((3.5, 2.2), (4.4, 1.7)), ((6.3, 2.2), (5.4, 1.7)), ((4.9, 1.1), (4.9, 0.75))):
    arrow(forward, start, end, SWIGLU)
for start, end in (((2.0, 2.0), (2.0, 0.75)), ((7.8, 2.0), (7.8, 0.75))):
    arrow(forward, start, end, SWIGLU)
box(forward, 1.5, 0.15, 2, "pre, gate")
box(forward, 3.9, 0.15, 2, "act")
box(forward, 6.3, 0.15, 2, "pre, up")

backward.set_title("backward: dact_swiglu", fontsize=11, color=INK, loc="left")
for at, width, text in ((1.3, 1.5, "dy_rows"), (3.0, 1.5, "w_down[e]"), (5.4, 1.5, "pre, gate"), (7.1, 1.5, "pre, up")):
    box(backward, at, 4.0, width, text)
box(backward, 1.3, 2.9, 3.2, "dact, 128 × 256", DOWN)
box(backward, 1.3, 2.0, 0.9, "chunk", DOWN)
for at in (2.5, 3.4):
    box(backward, at, 2.0, 0.8, "…", DOWN, dashed=True)
box(backward, 5.4, 2.0, 1.5, "gate, chunk", SWIGLU)
box(backward, 7.1, 2.0, 1.5, "up, chunk", SWIGLU)
for at, text in ((1.3, "dgate"), (3.1, "dup"), (4.9, "weighted act"), (7.0, r"sum of dact·act")):
    box(backward, at, 1.1, 1.6, text, SWIGLU)
for start, end in (((2.05, 4.0), (2.05, 3.5)), ((3.75, 4.0), (3.75, 3.5)), ((1.75, 2.9), (1.75, 2.6))):
    arrow(backward, start, end)
for start, end in (((6.15, 4.0), (6.15, 2.6)), ((7.85, 4.0), (7.85, 2.6))):
    arrow(backward, start, end, SWIGLU)
for start, end in (((1.75, 2.0), (1.75, 1.85)), ((6.15, 2.0), (6.15, 1.85)), ((7.85, 2.0), (7.85, 1.85))):
    backward.plot(*zip(start, end), color=SWIGLU, linewidth=1.4)
backward.plot([1.75, 7.85], [1.85, 1.85], color=SWIGLU, linewidth=1.4)
for at in (2.1, 3.9, 5.7, 7.8):
    arrow(backward, (at, 1.85), (at, 1.7), SWIGLU)
    arrow(backward, (at, 1.1), (at, 0.75), SWIGLU)
for at, text in ((1.3, "dpre, gate"), (3.1, "dpre, up"), (4.9, "weighted act"), (7.0, "parts")):
    box(backward, at, 0.15, 1.6, text)
backward.text(8.8, 3.75, "the loop over H", color=INK, va="center", fontsize=9)
backward.text(
    8.8, 1.85, "the epilogue,\nchunk by chunk;\nthe next loads\nmeanwhile", color=SWIGLU, va="center", fontsize=9
)
for axes in (columns, forward, backward):
    axes.axis("off")
plt.show()

# %% [markdown]
# Backward is the mirror image. The product gives a tile of dact; the epilogue reads the same tile of pre, and the two
# become all that backward wants of this place: dpre, the weighted act that dw_down contracts with, and a piece of
# $\langle\mathrm{dact}, \mathrm{act}\rangle$, the gradient of the router's weight. Then dact is forgotten.
#
# **A piece of a sum.** That last one needs thought. The rung below let one program walk over all I columns of a row, so
# that the sum had one owner. A tile of dact holds 256 of them, so with I = 768 three programs hold a *part* each. The
# usual remedy is to add them up in memory with atomics. But programs finish in any order, and fp32 addition remembers
# the order:

# %%
parts = torch.tensor([2.0**24, 1.0, -(2.0**24)])  # of one route, from three blocks of I
for order in permutations(range(3)):
    print(f"added in the order {order}: {sum(parts[list(order)]).item()}")

# %% [markdown]
# $2^{24} + 1$ has no place for the 1 in fp32. That is made up to be seen; real sums differ in the last bits. Here are
# 1,000 random routes of a layer whose I is 1,536, in six parts of 256 columns: once in the order of the columns, once in
# an order of chance:

# %%
generator = torch.Generator(device).manual_seed(0)
dact, act = torch.randn(2, 1000, 6, 256, generator=generator)
parts = (dact * act).sum(-1)
by_chance = parts.gather(1, torch.rand(parts.shape, generator=generator).argsort(1))

differ = (sum(parts.unbind(1)) != sum(by_chance.unbind(1))).float().mean().item()
print(f"another order changes bits of {differ:.0%} of the sums")
assert differ > 0

# %% [markdown]
# A training run that cannot be repeated cannot be debugged. So nobody adds to anybody's number: each program stores its
# part in a place of its own, `parts[row, block of I]`, and a small last kernel adds a row's parts from left to right. In a
# layer of qwen3-30b-a3b that is 12 bytes a row, beside the 7,680 that the epilogue moves for it.
#
# ## The kernels
#
# Forward. Compare `multiply_gate_up` with `multiply` of lesson 1: one load of the rows, two loads of weights, two
# accumulators. `to_up` is the distance from a gate weight to the up weight of the same column, I rows of the matrix.
#
# ```python
# --8<-- "mega_moe/kernels/fused_swiglu.py:gate_up"
# ```
#
# act is made from the fp32 accumulators, one rounding less than in the rung below, which reads pre after it was rounded
# to bf16. Either of the two results may be left out (`None`): that is a pointer which is missing when the kernel is
# compiled, so its stores are not in the code at all.
#
# Backward. The loop is lesson 1's `multiply`; all that is new stands in the epilogue. (In both kernels the rows that are
# `live` are also the rows that are `stored`. A later rung tells them apart.)
#
# ```python
# --8<-- "mega_moe/kernels/fused_swiglu.py:dact"
# ```
#
# **Why in chunks?** Count registers. A tile of dact of 128 by 256 is 32,768 numbers in fp32; the program has 8 warps of
# 32 threads, so each thread holds 128 of them, of 255 that a thread can have. gate and up of the whole tile would be 256
# more, before anything is computed. So the tile is halved and halved again until 32 columns are left: 16 registers for
# each tensor of a chunk. (`chunks_of` calls itself, but only while it is compiled, and `static_range` is unrolled: what
# runs is eight copies of the loop's body.) Compiled for an H200 by Triton 3.7.1, the kernel takes 253 registers and
# spills nothing (other versions may count otherwise, and recorded times name their own: in November 2026 it is 3.6).
# With chunks of 64 columns each thread would spill 104 bytes, stores and loads together, and with a single chunk of 256
# it would spill 10,948.
#
# **And why a chunk ahead?** Chunks have a drawback: each begins with a load, and nobody else is there to use the time
# until it arrives. Eight chunks would wait eight times. So the loop asks for gate and up of the next chunk before it
# works on this one, and only the first chunk waits. The two tiles on their way are kept in bf16, as they lie in memory,
# and so take 8 registers each. In the dact of lesson 4, whose epilogue is the same function, this took 7 to 8 % off the
# whole kernel on an H200.
#
# Forward's epilogue needs no chunks. What it makes is smaller than what it consumes, and it loads nothing.
#
# The parts, from left to right. A masked route has no row, so no program ever wrote its parts: they are not read, and
# its gradient is 0.
#
# ```python
# --8<-- "mega_moe/kernels/fused_swiglu.py:dtopk_weights"
# ```
#
# ## The running example
#
# The four tokens of [lesson 0](s0_reference.md#the-running-example), through the new kernels and beside the old ones:

# %%
example, dy = course_example(device=device)
x, topk_ids, topk_weights, w_gate_up, w_down = vars(example).values()

plan = make_plan(topk_ids, len(w_down))
rows, dy_rows = dispatch(x, plan), dispatch(dy, plan)
pre, act = gate_up_swiglu(rows, readable(w_gate_up), plan, None, pre=True, act=True)
dpre, weighted_act, dtopk_weights = dact_swiglu(dy_rows, readable(w_down), pre, topk_weights, plan, None, Need())

old_pre = grouped_gemm(rows, readable(w_gate_up), plan).unflatten(1, (2, 1))
old_act = swiglu(old_pre, plan, None)
dact = grouped_gemm(dy_rows, readable(w_down).mT, plan)
old_dpre, old_weighted_act, old_dtopk_weights = swiglu_backward(dact, pre, topk_weights, plan, None, Need())

live = plan.row_start[-1]
for new, old in ((pre, old_pre), (act, old_act), (dpre, old_dpre), (weighted_act, old_weighted_act)):
    torch.testing.assert_close(new[:live], old[:live])
torch.testing.assert_close(dtopk_weights, old_dtopk_weights)
show(pre=pre[:live].squeeze(-1), act=act[:live], dpre=dpre[:live].squeeze(-1), dtopk_weights=dtopk_weights)

# %% [markdown]
# Row 0 by hand: gate 1, up 2, so act is $0.7311 \cdot 2 = 1.4621$. dact of the row is 1 (lesson 0), so its route's
# gradient is $1 \cdot 1.4621$; half of dact, the router's weight being 0.5, goes on: $\mathrm{dup} = 0.5 \cdot 0.7311$.
#
# ## The difference
#
# A rung is a recipe, and two neighbours differ in what the upper one has learnt. This is all of it, below the first
# docstring: lines that begin with `-` are the rung below's, those with `+` are new.


# %% tags=["hide-input", "diff"]
def code(module):
    """The lines of a stage file below its docstring."""
    return inspect.getsource(module).split('"""', 2)[2].lstrip().splitlines()


print(
    *difflib.unified_diff(code(s1_grouped), code(s2_swiglu), "s1_grouped.py", "s2_swiglu.py", n=1, lineterm=""),
    sep="\n",
)

# %% [markdown]
# Read the table of steps first. Forward's `gate_up` and `swiglu` now name the same kernel, backward's `swiglu` and one
# half of its `down` another. In forward two lines become one, and with them goes the care about when pre may be dropped:
# it is written if it is to be saved, and otherwise never exists. In backward the name `dact` is gone; nothing outside a
# kernel knows it any more. All else is untouched: the weights' gradients, drows, and the copies of rows.
#
# Three launches are gone, `swiglu`, `swiglu_backward` and a memset, and one has come, which adds up the parts:


# %%
def launches_of(rung, problem, inputs, dy):
    _, saved = rung.forward(problem, inputs)
    rung.backward(problem, inputs, saved, dy)  # once before counting: a first call compiles
    forward = launches(lambda: rung.forward(problem, inputs), device)
    return forward, launches(lambda: rung.backward(problem, inputs, saved, dy), device)


small = Problem(T=16, H=16, I=16, E=2, K=1, dtype=torch.float32, device=device)
for rung in (below, here):
    forward, backward = launches_of(rung, small, *random_inputs(small))
    print(f"{rung.name:8} {len(forward)} launches forward, {len(backward)} backward")

# %% [markdown]
# ## What is kept
#
# Of all that forward makes, pre alone is kept for backward. That is [a choice](../math.md#what-is-kept): the derivative
# needs gate and up, and they could be made again from x by repeating the larger of forward's two products, $4RHI$ flops.
# Backward, which has six products of $2RHI$, would then do 16 units of $RHI$ instead of 12. `save=` chooses:

# %%
pre_bytes = shape.R * 2 * shape.I * shape.dtype.itemsize
again = 4 * shape.R * shape.H * shape.I
print(f'save="pre":    keeps {pre_bytes / 2**20:.0f} MiB a layer, {48 * pre_bytes / 2**30:.0f} GiB in the model\'s 48')
units = 1 + again / roofline.useful_flops(shape, "backward")
print(f'save="inputs": backward multiplies {units:.2f} times as much, at least {again / h200.tflops_16 / 1e9:.2f} ms')
print(f"a write and a read of pre, if nothing hides them: {2 * pre_bytes / h200.gb_per_s / 1e6:.2f} ms")

# %% [markdown]
# So keeping is the default, and recomputing is for those whose memory ends before their patience. With `"inputs"`
# forward stores act alone, and backward begins with the recipe's own gate_up, which this time leaves act out: the same
# kernel with the same blocks, so the same bits.

# %%
problem = Problem(T=32, H=64, I=96, E=4, K=2, device=device)  # bf16; two parts a route in the interpreter
inputs, dy = random_inputs(problem)


def train(rung, problem, inputs=inputs):
    """y and the gradients by name, and what forward saved."""
    y, saved = rung.forward(problem, inputs)
    grads = rung.backward(problem, inputs, saved, dy)
    return {"y": y, **vars(grads)}, saved


results = {}
for save in ("pre", "inputs"):
    results[save], saved = train(here, problem.at(save=save))
    kept = "nothing" if saved.pre is None else f"pre, {saved.pre.nbytes} bytes"
    print(f"save={save!r}: forward keeps the plan and {kept}")
for name, result in results["pre"].items():
    assert torch.equal(result, results["inputs"][name])
print("y and all four gradients are equal to the bit")

# %% [markdown]
# The same holds for running twice. In the interpreter programs take turns and it could hardly go wrong; on a GPU these
# lines run many programs at once, in an order that nobody chose:

# %%
once_more, _ = train(here, problem)
assert all(torch.equal(result, once_more[name]) for name, result in results["pre"].items())
print("the second run gives the same bits")

# %% [markdown]
# ## Is it right?
#
# Both rungs are held to the reference in float64, by their worst rows, as [before](s1_grouped.md#is-it-right). They
# round at different points: act is made from unrounded gate and up here, and dact stays in fp32 until it is used up.

# %%
oracle = Oracle(problem, inputs, dy)


def judged(result):
    result = dict(result)
    return oracle.check(result.pop("y"), Grads(**result))


results["grouped"], _ = train(below, problem)
for name, result in {"grouped": results["grouped"], "swiglu": results["pre"]}.items():
    verdict = judged(result)
    shares = "   ".join(f"{output} {share:.2f}" for output, share in verdict.shares.items())
    print(f"{name:9} {shares}   {'passed' if verdict.passed else 'FAILED'}")
    assert verdict.passed

# %% [markdown]
# Two mistakes invite themselves on this rung; let us make both. In the first gate and up change places, as with a wrong
# `to_up`. In the second the last kernel forgets the last part of each sum, 32 of 96 columns.

# %%
swapped = Inputs(**{**vars(inputs), "w_gate_up": inputs.w_gate_up.flip(1)})
result, _ = train(here, problem, swapped)
result["dw_gate_up"] = result["dw_gate_up"].flip(1)
verdict = judged(result)
print(f"gate and up swapped   {verdict.shares['y']:6.1f} times y's budget; failed: {', '.join(verdict.failed)}")
assert "y" in verdict.failed

_, saved = here.forward(problem, inputs)
pre_without = saved.pre[:, :, :64].contiguous()
dy_rows = dispatch(dy, saved.plan)
w_down_without = inputs.w_down[:, :, :64]
_, _, incomplete = dact_swiglu(dy_rows, w_down_without, pre_without, inputs.topk_weights, saved.plan, None, Need())
verdict = judged(results["pre"] | {"dtopk_weights": incomplete})
share = verdict.shares["dtopk_weights"]
print(f"the last part missing {share:6.1f} times dtopk_weights' budget; failed: {', '.join(verdict.failed)}")
assert verdict.failed == ["dtopk_weights"]

# %% [markdown]
# ## Is it fast?
#
# From [recorded runs](../results.md) again, beside the plain torch path under torch.compile and the dense products of
# the same flops. Under each table: what the roofline promised, and, where the rung below was recorded too, what the
# clock says, and what became of the two products that now have SwiGLU in their epilogues.

# %% tags=["hide-input"]
print(record)
for name in record.problems:
    times = {key[1:]: row for key, row in record.rows.items() if key[0] == name}
    if ("swiglu", "forward") not in times:
        continue
    print(f"\n{name:36}{'forward':>22}{'backward':>22}")
    for contestant in ("grouped", "swiglu", "torch-compiled", "cublas"):
        both = [times.get((contestant, direction)) for direction in ("forward", "backward")]
        if all(both):
            cells = [f"{row['ms']['median']:.2f} ms, {row['tflops']:3.0f} TF/s" for row in both]
            print(f"{both[0]['label']:36}{cells[0]:>22}{cells[1]:>22}")
    ceiling = roofline.ceiling(record.machine["device"])
    if name in PRESETS and ceiling:
        for hidden, words in ((True, "if epilogues hide"), (False, "if they do not")):
            cells = [f"{ms:.2f} ms" for ms in predicted(PRESETS[name], ceiling, hidden)]
            print(f"{'saving predicted, ' + words:36}{cells[0]:>22}{cells[1]:>22}")
    if ("grouped", "forward") in times:
        old, new = ([times[c, d]["ms"]["median"] for d in ("forward", "backward")] for c in ("grouped", "swiglu"))
        cells = [f"{before - after:.2f} ms" for before, after in zip(old, new)]
        print(f"{'saving measured':36}{cells[0]:>22}{cells[1]:>22}")
    for product, fused in (("gate_up", "SwiGLU"), ("dact", "its backward")):
        if ("grouped", product) in times and ("swiglu", product) in times:
            old, new = (times[c, product]["ms"]["median"] for c in ("grouped", "swiglu"))
            print(f"    {product} alone {old:.2f} ms, with {fused} in the epilogue {new:.2f} ms")
if record and not any(contestant == "swiglu" for _, contestant, _ in record.rows):
    print("\nThis rung is not recorded yet. On a GPU, `make bench` measures.")

# %% [markdown]
# The roofline knows bytes and flops, and nothing else. A program runs its loop and then its epilogue, so what could
# multiply meanwhile is *another* program on the same processor. Is there one? On an H200 a program of `dact_swiglu` has
# 256 threads of 253 registers, which are 64,768 of the processor's 65,536, and four stages of loads take 192 KiB of its
# 227 KiB of shared memory. So no: it is alone, and while it reads pre its matrix units wait. A measured saving near the
# second promise would say just that. Below it, the epilogue cannot draw the whole bandwidth either: its loads come from
# one program a processor, two chunks at most at a time, where `swiglu_backward` has many programs at once. Above the
# first, the new loop would happen to be the faster one too.
#
# It is worth saying plainly: fusing takes some bytes off the road at once, but hides the rest only where something else
# runs beside the epilogue. Here nothing does. On the larger layer, in the record of November 2026, the two products grew
# by about as much as the passes had taken that they replace, and the layer was no faster than on the rung below. So
# this rung is a step on the way: dact is off the road, act is rounded once less, and the epilogues are there for a later
# rung to hide. The next one takes the largest tensors that are left: rows, dy_rows, out and drows, (R, H) each, which
# are copies and little more.
#
# ## The flag

# %%
torch.manual_seed(0)
layer = MoE(hidden_size=16, intermediate_size=12, num_experts=3, top_k=2, device=device)
tokens = torch.randn(4, 16)
for name in ("grouped", "swiglu"):
    layer.stage = name
    layer.zero_grad()
    loss = layer(tokens).square().mean()
    loss.backward()
    norm = layer.experts.down_proj.grad.norm()
    print(f'stage="{layer.stage}": loss {loss.item():.6f}, norm of the gradient of down_proj {norm.item():.6f}')

# %% [markdown]
# ## Exercises
#
# **1.** How many bytes fewer travel on this rung than on the one below, in one layer of qwen3-30b-a3b, forward and
# backward together? How long does an H200's memory take for them? If epilogues hide, the roofline promised more than that.
# How much, and why?
#
# ??? success "Answer"
#     Forward: pre is written but not read back, $4RI$ bytes fewer, 403 MB. Backward: dact is neither written nor read,
#     twice $2RI$, 403 MB. Together 805 MB, 0.17 ms at 4,800 GB/s. (The parts, 3 MB, are in the noise.) The roofline
#     promised 0.38 ms, since it also takes the bytes that remain to travel under arithmetic: act, pre and dpre move as
#     before, but in a kernel that has other things to do meanwhile, if it has.

# %% tags=["solution"]
answer = dict(MB=805, ms=0.17, promised=0.38)

fewer = [sum(sum(bill[k][1:]) for k in old) - sum(bill[new][1:]) for *old, new in (list(bill)[:3], list(bill)[3:])]
assert fewer == [4 * shape.R * shape.I] * 2
check(
    answer,
    dict(
        MB=round(sum(fewer) / 1e6),
        ms=sum(fewer) / h200.gb_per_s / 1e6,
        promised=sum(predicted(shape, h200, hidden=True)),
    ),
    see=dict(
        MB=("What the rung below costs", "what is written or read there and not here: pre, and dact twice; in bf16"),
        ms=("What the rung below costs", "bytes over the bandwidth of the data sheet"),
        promised=("The idea", "the figure counts each kernel as the longer of its arithmetic and its bytes"),
    ),
)
print(f"bytes fewer, forward and backward: {fewer}; {sum(fewer) / h200.gb_per_s / 1e6:.3f} ms")

# %% [markdown]
# **2.** In the first figure, arithmetic and memory of `dact_swiglu` end almost together. Keep I = 768 and E = 128 with
# 1,024 rows an expert. What is the smallest H for which the product covers its epilogue's bytes?
#
# ??? success "Answer"
#     Per row, arithmetic takes $2HI / 989.5\,\mathrm{TF/s}$. Bytes: $2H$ for dy, $10I$ in the epilogue (pre in, dpre and
#     the weighted act out), and the expert's weight shared by its 1,024 rows, $2HI/1024$; all over
#     $4.8\,\mathrm{TB/s}$. Both are equal at H = 1,945: below that memory decides. The layer's 2,048 is barely above.
#     Against the data sheet, that is: under load the matrix units are slower than it says, and cover a little more.

# %% tags=["solution"]
answer = 1945


def covered(H):
    arithmetic, loop, epilogue = kernels_of(shape.at(H=H))["dact_swiglu"].ms(h200, shape.dtype)
    return arithmetic >= loop + epilogue


tile = blocks_of_target("sm_90", torch.bfloat16).dact  # whose sizes the text counts with
assert (tile.BLOCK_R, tile.BLOCK_N, tile.CHUNK, tile.num_warps, tile.num_stages) == (128, 256, 32, 8, 4)
least = next(H for H in range(1, 4096) if covered(H))
check(
    answer,
    least,
    see=(
        "What the rung below costs",
        "set 2HI flops a row equal to its bytes: dy, the epilogue's, a share of the weight",
    ),
)
print(f"the least H: {least}")
