# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1 · One launch for all experts
#
# *Before: [0 · The layer in plain torch](s0_reference.md) · next: [2 · SwiGLU in the epilogue](s2_swiglu.md) · the flag:
# `stage="grouped"`*
#
# [Lesson 0](s0_reference.md) looped over experts. This rung, `stage="grouped"`, has no loop: one launch multiplies the
# rows of all experts, whatever number of rows each of them has, and the host never asks the device how many there are.
#
# You will learn
#
# - how to count what a loop over experts costs, and what the hardware would allow instead;
# - how a kernel sorts routes by expert without sorting and without atomics;
# - how a program finds out which expert its block of rows belongs to;
# - how one kernel serves four of the six matrix products of training, and a second the other two.
#
# You need lesson 0, and a rough idea of Triton: a *program* works on a *tile*, and a launch starts a grid of programs.
# Where there is no GPU the same kernels run in Triton's interpreter. It is slow, but right.

# %%
import difflib
import inspect
import os
import textwrap

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when it is imported, below

from mega_moe import LADDER, MoE, Problem, recorded, roofline, routing
from mega_moe import reference as plain_torch
from mega_moe.exercises import check
from mega_moe.kernels.blocks import blocks_of_target
from mega_moe.kernels.combine import combine, dispatch_backward
from mega_moe.kernels.dispatch import dispatch
from mega_moe.kernels.grouped_gemm import grouped_gemm, weight_grad
from mega_moe.kernels.plan import plan as make_plan
from mega_moe.kernels.swiglu import swiglu, swiglu_backward
from mega_moe.kernels.weights import readable
from mega_moe.launches import launches
from mega_moe.parity import Oracle, worst_row
from mega_moe.samples import course_example, random_inputs
from mega_moe.shapes import PRESETS, Inputs, Need
from mega_moe.stages import s1_grouped

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)
torch.set_printoptions(precision=4, sci_mode=False)
reference, grouped = LADDER[:2]


def show(**tensors):
    for name, tensor in tensors.items():
        print(f"{name} {tuple(tensor.shape)}\n{tensor}\n")


# %% [markdown]
# The running example of lesson 0, in fp32 now, since kernels do not compute in float64:

# %%
inputs, dy = course_example(device=device)
x, topk_ids, topk_weights, w_gate_up, w_down = vars(inputs).values()
T, K, E, H, I = 4, 2, 3, 2, 1

# %% [markdown]
# ## What the rung below costs
#
# **Launches.** Count what each rung gives the device to do, forward and backward together, as experts are added and
# the tokens stay the same. A launch costs the host some microseconds; when the kernels are short the device runs dry.
# And the loop of rung 0 *waits*: `row_start.tolist()` and every boolean mask need a number that only the device knows.


# %%
def launches_of(rung, experts):
    problem = Problem(T=32, H=16, I=16, E=experts, K=2, dtype=torch.float32, device=device)
    inputs, dy = random_inputs(problem)
    _, saved = rung.forward(problem, inputs)
    rung.backward(problem, inputs, saved, dy)  # once before counting: a first call compiles
    return {
        "forward": launches(lambda: rung.forward(problem, inputs), device),
        "backward": launches(lambda: rung.backward(problem, inputs, saved, dy), device),
    }


for rung in (reference, grouped):
    counts = {experts: sum(map(len, launches_of(rung, experts).values())) for experts in (2, 4, 16)}
    print(f"{rung.name:9}", "   ".join(f"{experts:2} experts: {n:3} launches" for experts, n in counts.items()))

# %% [markdown]
# Rung 1 launches these, always, in this order:

# %%
for direction, names in launches_of(grouped, experts=4).items():
    print(f"{direction}, {len(names)} launches")
    print(*(f"    {name}" for name in names), sep="\n")

# %% [markdown]
# That is fifteen kernels and one memset, which zeroes the gradients of `topk_weights`: a masked route has no row, so no
# kernel would write that route's. Backward dispatches twice, dy and then x again: `rows` is copied anew, not kept from
# forward, since it would occupy memory until backward comes.

# %% [markdown]
# **Bytes and arithmetic.** What could the hardware do? A step cannot take less time than its arithmetic needs at the
# full matrix rate, nor less than its bytes need at the full memory bandwidth; the longer of the two is its *bound*. The
# upper bar of each pair adds up the bounds of five separate steps. The lower bar is the bound of a layer that reads
# every input once, writes every result once, and keeps the rest on the chip: that is the *ceiling* to which all rungs
# are compared.

# %% tags=["hide-input"] alt="The time that the hardware allows for one layer, step by step and at once"
INK = "#1f2430"
STEP_COLOURS = dict(dispatch="#8a5a9e", gate_up="#2e6f9e", swiglu="#c0662b", down="#5f8a3a", combine="#b89b2f")

h200, shape = roofline.ceiling("NVIDIA H200"), PRESETS["qwen3-30b-a3b"]


def bound(cost):
    """Milliseconds that a step needs at least, and whether its bytes decide."""
    arithmetic, memory = cost.flops / (h200.tflops(shape.dtype) * 1e9), cost.bytes / (h200.gb_per_s * 1e6)
    return max(arithmetic, memory), memory > arithmetic


_, axes = plt.subplots(figsize=(10, 3.4), layout="constrained")
for at, direction in ((3.4, "forward"), (1, "backward")):
    start = 0
    for step, cost in roofline.steps(shape, direction).items():
        ms, memory_bound = bound(cost)
        hatch = "///" if memory_bound else None
        axes.barh(at, ms, left=start, color=STEP_COLOURS[step], edgecolor="white", hatch=hatch)
        if direction == "forward":
            axes.text(start + ms / 2, at + 0.5, step, ha="center", color=STEP_COLOURS[step], fontsize=9)
        start += ms
    allowed = roofline.allowed_ms(shape, direction, h200)
    axes.barh(at - 0.9, allowed, color="#9aa0a8")
    axes.text(start + 0.03, at, f"five steps: {start:.2f} ms", va="center", color=INK)
    axes.text(allowed + 0.03, at - 0.9, f"at once: {allowed:.2f} ms", va="center", color=INK)
axes.set_yticks([2.95, 0.55], ["forward", "backward"])
axes.set(xlabel="ms that an H200 needs at least, by its data sheet (hatched: memory decides)", xlim=(0, 3.8))
axes.spines[["top", "right", "left"]].set_visible(False)
axes.tick_params(left=False)
plt.show()

# %% [markdown]
# And measured, on the layer of the newest record that has the rung below: the same two predictions, and the clock.

# %%
record = recorded.newest()
print(record)
for name in [name for name in record.problems if record.ms(name, "reference", "forward")]:
    shape = PRESETS[name]
    for direction in roofline.DIRECTIONS:
        at_once = roofline.allowed_ms(shape, direction, h200)
        steps = sum(bound(cost)[0] for cost in roofline.steps(shape, direction).values())
        below = record.ms(name, "reference", direction)
        times = f"at once {at_once:.2f} ms, five steps {steps:.2f} ms; measured, rung reference {below:.2f} ms"
        print(f"{name}, {direction:8}  {times}: {below / steps:.1f} times as long")

# %% [markdown]
# The five steps themselves explain a small part. The rest is what a loop adds: launches, waits, and products of one
# expert that may be too small to fill the chip. (How much of it is which was not measured.) Even at the ceiling, most of
# the time is matrix products. So the first thing to get right is one fast product for all experts, and the first thing
# to get rid of is whatever keeps the device from running it. That is this rung. The hatched bars stay: they are what the
# rungs above take away.
#
# ## The plan, made on the device
#
# Lesson 0 sorted the routes on the host's command: `argsort`, `bincount`, a mask. We want the same four arrays with
# nothing read by the host. A sort by expert needs no sort, only counting, because a route's row is the number of routes
# that come before it:
#
# - all those of lower experts, since expert e's rows start behind theirs;
# - the earlier ones of its own expert, since within an expert rows are in the order of the routes.
#
# The second number is a long sum, up to R routes back. Cut the routes into chunks and it falls into two short ones: the
# expert's routes in earlier chunks, and the earlier ones in the route's own chunk. So there are two launches, each with
# one program a chunk. The first counts: how many of the chunk's routes go to each expert? Masked routes, which have no
# row, are left out. On our example (route 2t + k is token t, slot k), with chunks of four routes:

# %%
routes = topk_ids.flatten().tolist()
chunks = [range(4), range(4, 8)]
count = [[sum(routes[route] == e for route in chunk) for e in range(E)] for chunk in chunks]
for chunk, counted in zip(chunks, count):
    print(f"routes {chunk[0]} to {chunk[-1]}: experts {[routes[route] for route in chunk]}, count {counted}")

# %% [markdown]
# The second launch places. It starts when the first has ended, so every program can read what all the others counted.
# It adds up the experts below and the chunks before: there its own routes of each expert begin. From then on it needs
# nobody else:

# %%
rows_of_expert = [sum(counted[e] for counted in count) for e in range(E)]
row_start = [sum(rows_of_expert[:e]) for e in range(E + 1)]
print(f"rows_of_expert = {rows_of_expert}, so row_start = {row_start}")
for program, chunk in enumerate(chunks):
    next_row = [row_start[e] + sum(counted[e] for counted in count[:program]) for e in range(E)]
    print(f"\nprogram {program} begins with next_row = {next_row}")
    for route in chunk:
        if (e := routes[route]) >= 0:
            print(f"    route {route}, expert {e} -> row {next_row[e]}")
            next_row[e] += 1

# %% [markdown]
# Programs never talk to each other, nothing is added atomically, and the order is the same on every run. In the kernel
# the last loop takes many routes a step, 128 on a GPU. A route's rank among them is found by comparing each with each:
# how many have a smaller *key*, that is a lower expert, or the same expert and an earlier place? Less those of lower
# experts, which the step counts too, that is the rank among the expert's routes. A masked route's key is larger than
# all others, so it is in nobody's way.
#
# ```python
# --8<-- "mega_moe/kernels/plan.py:kernel"
# ```
#
# It could be one launch, with one program an expert that reads all routes twice, once to count those of lower experts
# and once to place its own. It was, until it was measured: all programs together read 2 * E * R ids, which takes even a
# cache longer than a second launch takes. Now each id is read twice in all. The plan in plain torch,
# `mega_moe.routing.plan`, is the specification of these kernels, and they agree to the bit:

# %%
plan = make_plan(topk_ids, E)
show(**plan._asdict())
for ours, specified in zip(plan, routing.plan(topk_ids, E)):
    assert torch.equal(ours, specified)

# %% [markdown]
# Compared with lesson 0, one row more: R is T*K now, eight, because a size that depended on the routing would have to
# travel to the host. Row 7 belongs to nobody: its token is -1, nothing writes it and nothing reads it.
#
# ## Which expert does a block of rows belong to?
#
# A program of the grouped GEMM multiplies a block of, say, 128 rows by one expert's weight. So a block may not reach
# over from one expert to the next: each expert's last block may be partly empty. The host, which launches the grid,
# does not know how many rows any expert has. It needs a number of blocks that is enough for *every* routing, and a
# program needs to find its expert from its number alone. One formula does both:
#
# $$\mathrm{first\_block}(e) = \left\lfloor \frac{\mathrm{row\_start}[e]}{B} \right\rfloor + e$$
#
# with B rows a block. In words: as many whole blocks as fit before the expert, plus one spare for each expert below.
# Here is our example with B = 2:


# %%
def rows_of_block(block, row_start, B):
    """The expert of a block, its first row, and the end of the expert's rows."""
    first_block = [start // B + e for e, start in enumerate(row_start[:-1])]
    expert = sum(first <= block for first in first_block) - 1
    return expert, row_start[expert] + (block - first_block[expert]) * B, row_start[expert + 1]


B = 2
row_start = plan.row_start.tolist()
blocks = T * K // B + E
for block in range(blocks):
    expert, row, end = rows_of_block(block, row_start, B)
    holds = f"rows {row} to {min(row + B, end) - 1}" if row < end else "nothing"
    print(f"block {block}: expert {expert}, first row {row}, end {end}: {holds}")

# %% tags=["hide-input"] alt="Seven blocks of two rows; three are full, one is half full and three are empty"
COLOURS = ["#2e6f9e", "#c0662b", "#5f8a3a"]  # experts 0, 1, 2 in every figure
_, axes = plt.subplots(figsize=(10, 2.7), layout="constrained")
for block in range(blocks):
    expert, first_row, end = rows_of_block(block, row_start, B)
    for place in range(B):
        row, at = first_row + place, block * (B + 0.5) + place
        live = row < end
        colour = COLOURS[expert]
        style = dict(facecolor=colour, edgecolor="white") if live else dict(fill=False, edgecolor=colour, hatch="///")
        axes.add_patch(plt.Rectangle((at, 0), 1, 1, linewidth=1.5, **style))
        if live:
            axes.text(at + 0.5, 0.5, f"row {row}", ha="center", va="center", color="white")
    middle = block * (B + 0.5) + B / 2
    axes.text(middle, 1.15, f"block {block}", ha="center", color=INK)
    axes.text(middle, -0.35, f"expert {expert}", ha="center", color=COLOURS[expert], weight="bold")
    if block in [row_start[e] // B + e for e in range(E)]:
        formula = rf"first block: $\lfloor {row_start[expert]}/{B} \rfloor + {expert}$"
        axes.text(middle, -0.75, formula, ha="center", color=COLOURS[expert], fontsize=9)
axes.set(xlim=(-0.2, blocks * (B + 0.5)), ylim=(-1, 1.5))
axes.axis("off")
plt.show()

# %% [markdown]
# Why is it always enough? An expert with $n$ rows needs $\lceil n/B \rceil$ blocks. It has the blocks up to the next
# expert's first:
#
# $$\left\lfloor \frac{s + n}{B} \right\rfloor + (e + 1) - \left\lfloor \frac{s}{B} \right\rfloor - e
#   \;\ge\; \left\lfloor \frac{n}{B} \right\rfloor + 1 \;\ge\; \left\lceil \frac{n}{B} \right\rceil$$
#
# since the floor of a sum is at least the sum of the floors. First blocks grow from expert to expert, so the expert of
# a block is found by counting: how many first blocks are at or before it, less one. And all experts together end at
# block $\lfloor R/B \rfloor + E$: that is the grid, whatever the router does. Not convinced? Let chance try:

# %%
generator = torch.Generator(device).manual_seed(0)
for trial in range(500):
    rows_of_expert = torch.randint(9, (5,), generator=generator).tolist()
    starts = [sum(rows_of_expert[:e]) for e in range(6)]
    B_tried = 1 + trial % 4
    covered = []
    for block in range(starts[-1] // B_tried + 5):
        expert, row, end = rows_of_block(block, starts, B_tried)
        assert starts[expert] <= row
        covered += range(row, min(row + B_tried, end))
    assert covered == list(range(starts[-1]))
print("500 routings: every row in exactly one block, and no block over two experts")

# %% [markdown]
# A block with nothing to do costs a program that reads E numbers and leaves. The same in Triton, all experts at once
# in a vector:
#
# ```python
# --8<-- "mega_moe/kernels/tile.py:rows_of_block"
# ```
#
# ## The grouped GEMM
#
# With that, one matrix product for all experts is an ordinary one, whose weight is chosen at the top:
#
# ```text
# for each block of rows, for each block of columns:          one program
#     expert, row, end = rows_of_block(...)
#     acc = 0
#     for each block of the contraction:
#         acc += a[rows, c] @ w[expert][columns, c]^T
#     out[rows, columns] = acc                                rows before end only
# ```
#
# ```python
# --8<-- "mega_moe/kernels/grouped_gemm.py:rows"
# ```
#
# Two details repay a second look. Rows behind the end of the expert are not masked on the way in: their loads repeat
# the last row, whose values are there anyway, and only the store is masked. And addresses are computed in 64 bits: R
# times H passes $2^{31}$ sooner than one thinks.
#
# Forward is now five launches after the plan. `readable` gives a weight's matrices as they lie in memory, (E, rows,
# columns), without a copy where the hardware can read them so.

# %%
rows = dispatch(x, plan)
pre = grouped_gemm(rows, readable(w_gate_up), plan).unflatten(1, (2, I))
act = swiglu(pre, plan, None)
out = grouped_gemm(act, readable(w_down), plan)
y = combine(out, topk_weights, plan)

live = plan.row_start[-1]
show(pre=pre[:live].squeeze(-1), act=act[:live], y=y)

# %% [markdown]
# Compare with lesson 0: the same numbers, row by row.
#
# ## Backward: the same kernel, and one more
#
# Forward has two products, gate_up and down. Backward has two for each: one gives the gradient of its rows, the other
# the gradient of its weight. Of these six, four go *over rows* and are one kernel:
#
# | product | rows | times | gives |
# |---|---|---|---|
# | gate_up | rows (R, H) | w_gate_up[e]ᵀ | pre (R, 2I) |
# | down | act (R, I) | w_down[e]ᵀ | out (R, H) |
# | down, backward | dy_rows (R, H) | w_down[e] | dact (R, I) |
# | gate_up, backward | dpre (R, 2I) | w_gate_up[e] | drows (R, H) |
#
# The last two want the weight without its transposition. Nothing is re-laid for that: `w.mT` is a view with two strides
# swapped, and the kernel takes strides.
#
# Weight gradients are another matter. There the rows are what is *summed over*:
#
# $$\mathrm{dw}[e] = \sum_{r\ \text{of}\ e} a_r^{\top}\, b_r$$
#
# One program owns one tile of one expert's gradient and walks over that expert's rows alone. No two programs add to the
# same number, so there are no atomics and the sum has one order. An expert without rows has a loop of no steps, and
# stores its zeros: a gradient is never left as memory happened to be.
#
# ```python
# --8<-- "mega_moe/kernels/grouped_gemm.py:weight_grad"
# ```

# %%
dy_rows = dispatch(dy, plan)
dact = grouped_gemm(dy_rows, readable(w_down).mT, plan)
dpre, weighted_act, dtopk_weights = swiglu_backward(dact, pre, topk_weights, plan, None, Need())
dw_down = weight_grad(dy_rows, weighted_act, plan)
drows = grouped_gemm(dpre.flatten(1), readable(w_gate_up).mT, plan)
dx = dispatch_backward(drows, plan)
dw_gate_up = weight_grad(dpre.flatten(1), rows, plan).view_as(w_gate_up)
show(dtopk_weights=dtopk_weights, dx=dx, dw_down=dw_down.squeeze(-1))

# %% [markdown]
# `swiglu_backward` makes three results in one pass, because each row's `pre` and `dact` are at hand only once: dpre
# with the router's weight, the weighted act for `dw_down`, and the router's own gradient $\langle\mathrm{dact},
# \mathrm{act}\rangle$. A program owns whole rows and walks over their columns, so that this sum, too, has one owner.
#
# ??? abstract "The kernel"
#     ```python
#     --8<-- "mega_moe/kernels/swiglu.py:backward"
#     ```
#
# ## What changed in the recipe
#
# Put together, this is the recipe of `stage="grouped"`: each direction beside the reference's, with `-` before lines of
# `reference/` and `+` before those of the stage file. Step answers step. What is new is what each name stands for, a
# launch instead of a loop, and that a gradient which nobody needs is not computed.


# %% tags=["hide-input", "diff"]
def body(function):
    """The function's source below its docstring."""
    return textwrap.dedent(inspect.getsource(function).split('"""')[-1].strip("\n")).splitlines()


for direction in roofline.DIRECTIONS:
    recipes = [body(getattr(module, direction)) for module in (plain_torch, s1_grouped)]
    places = f"reference/{direction}.py", f"mega_moe/stages/s1_grouped.py, {direction}"
    print(*difflib.unified_diff(*recipes, *places, n=0, lineterm=""), "", sep="\n")

# %% [markdown]
# ## Is it right?
#
# Two numbers in agreement prove little, and "close enough" needs a yardstick. Ours is measured: run the reference in
# float64 for the truth, run it again in bf16 to see what bf16 costs on these very inputs, and give a rung twice that. A
# rung is judged by its *worst row*, as a share of that budget; up to 1 passes. [Parity](../parity.md) explains why.

# %%
problem = PRESETS["tiny"].at(device=device)  # bf16
inputs, tiny_dy = random_inputs(problem)
oracle = Oracle(problem, inputs, tiny_dy)
results = {}
for rung in (reference, grouped):
    tiny_y, saved = rung.forward(problem, inputs)
    results[rung.name] = tiny_y, rung.backward(problem, inputs, saved, tiny_dy)
    verdict = oracle.check(*results[rung.name])
    shares = "   ".join(f"{name} {share:.2f}" for name, share in verdict.shares.items())
    print(f"{rung.name:9} {shares}   {'passed' if verdict.passed else 'FAILED'}")
    assert verdict.passed

# %% [markdown]
# A yardstick is worth something if it can say no. Drop one of the 128 routes, as a kernel with a wrong mask would. The
# norm of the whole y hardly notices, and many a test suite would let it pass; the worst row does notice:

# %%
dropped = inputs.topk_ids.clone()
dropped[17, 1] = -1
y_dropped, saved = grouped.forward(problem, Inputs(**{**vars(inputs), "topk_ids": dropped}))
error = (y_dropped - oracle.truth["y"]).norm() / oracle.truth["y"].norm()
verdict = oracle.check(y_dropped, results["grouped"][1])
print(f"error in the norm of the whole y  {error:.1%}")
print(f"error of the worst row            {worst_row(y_dropped, oracle.truth['y']):.1%}")
print(f"as a share of the budget          {verdict.shares['y']:.1f}, failed: {verdict.failed}")
assert verdict.failed == ["y"]

# %% [markdown]
# ## Is it fast?
#
# The interpreter's times say nothing about a GPU, so the times here are from [recorded runs](../results.md), beside the
# plain torch path that people run today and the dense products of the same flops. How they are taken is
# [a page of its own](../measuring.md).

# %% tags=["hide-input"]
print(record)
for shape in record.problems:
    if not record.ms(shape, "grouped", "forward"):  # this layer was recorded without this rung
        continue
    print(f"\n{shape:36}{'forward':>22}{'forward + backward':>22}")
    for contestant in ("reference", "grouped", "torch", "torch-compiled", "cublas"):
        both = [record.rows.get((shape, contestant, direction)) for direction in ("forward", "forward+backward")]
        if all(both):
            cells = [f"{row['ms']['median']:.2f} ms, {row['tflops']:3.0f} TF/s" for row in both]
            print(f"{both[0]['label']:36}{cells[0]:>22}{cells[1]:>22}")

# %% [markdown]
# What is left to gain is in the figure above, hatched: rows, pre, act and out still go to memory and back between
# kernels that do nothing else with them, and each of those kernels is a launch. [The next rung](s2_swiglu.md) starts
# there: it does SwiGLU while gate and up are still in registers.
#
# ## The flag
#
# To a user it is one word. The same layer by either rung, gradients included:

# %%
torch.manual_seed(0)
layer = MoE(hidden_size=16, intermediate_size=12, num_experts=3, top_k=2, device=device)
tokens = torch.randn(4, 16)
for name in ("reference", "grouped"):
    layer.stage = name
    layer.zero_grad()
    loss = layer(tokens).square().mean()
    loss.backward()
    norm = layer.experts.down_proj.grad.norm()
    print(f'stage="{layer.stage}": loss {loss.item():.6f}, norm of the gradient of down_proj {norm.item():.6f}')

# %% [markdown]
# ## Exercises
#
# **1.** On an H200 a block holds 128 rows. Take the busy and the idle experts of lesson 0: 16,384 tokens, 8 of 128
# experts. How many blocks does the host launch? How many of them hold rows if all experts are equally busy? A partly
# filled block multiplies all of its 128 rows: by Zipf's law, what share of the multiplication is padding? And why does
# the host not launch exactly the blocks that hold rows?
#
# ??? success "Answer"
#     It launches $\lfloor R/128 \rfloor + E = 1024 + 128 = 1152$, always. Balanced, every expert has 1,024 rows, which is
#     eight full blocks: 1,024 blocks hold rows, and 128 programs (for each block of columns) leave at once. By Zipf's law
#     an expert leaves on average half a block empty, 64 rows beside the mean 1,024, so about 6 %. It grows as experts get
#     more and tokens fewer: with 64 rows an expert, half of a block of 128 is padding. The host does not launch just what
#     is needed because it does not know how much that is. The number is on the device, and to fetch it the host would
#     have to wait for everything it has queued before: all kernels of the layers below.

# %% tags=["solution"]
answer = dict(launched=1152, hold_rows=1024, padding=0.06)

BLOCK_R = blocks_of_target("sm_90", torch.bfloat16).rows.BLOCK_R
routing_only = PRESETS["qwen3-30b-a3b"].at(H=1, I=1, device=device, dtype=torch.float32)
holding = {}
for name in ("balanced", "zipf"):
    rows_of_expert = random_inputs(routing_only, name)[0].topk_ids.flatten().bincount(minlength=routing_only.E)
    holding[name] = ((rows_of_expert + BLOCK_R - 1) // BLOCK_R).sum().item()
padding = 1 - routing_only.R / (holding["zipf"] * BLOCK_R)
check(
    answer,
    dict(launched=routing_only.R // BLOCK_R + routing_only.E, hold_rows=holding["balanced"], padding=padding),
    see=dict(
        launched=("Which expert does a block of rows belong to?", "whole blocks of all R routes, and what is to spare"),
        hold_rows=("Which expert does a block of rows belong to?", "the rows of one expert over the rows of a block"),
        padding=("Which expert does a block of rows belong to?", "an expert's last block is half empty, on average"),
    ),
)
print(f"blocks that hold rows: {holding}; by Zipf's law {padding:.1%} of the multiplication is padding")

# %% [markdown]
# **2.** Somebody simplifies the formula: $\mathrm{first\_block}(e) = \lfloor \mathrm{row\_start}[e] / B \rfloor$, with
# nothing added, and $\lfloor R/B \rfloor$ blocks. Follow it on the running example with B = 2. Which row does nobody
# multiply any more? Whose token is that? And is there a B with which it would be right for every routing?
#
# ??? success "Answer"
#     First blocks are 0, 2, 2: experts 1 and 2 begin in the same block. The count finds the last of them, so block 2 is
#     expert 2's, and expert 1 has none. Row 4 is lost, which is token 1 (its slot 0). A block may belong to one expert
#     only, so each expert that begins in the middle of a block needs one of its own: that is the spare. With B = 1
#     nobody begins in the middle of anything, and the formula is right, if wasteful in another way.

# %% tags=["solution"]
answer = dict(row=4, token=1, right_B=1)


def lost(starts, B):
    """The rows that are in no block of the simplified formula."""
    first_block = [start // B for start in starts[:-1]]
    found = set()
    for block in range(starts[-1] // B + (starts[-1] % B > 0)):
        expert = sum(first <= block for first in first_block) - 1
        row = starts[expert] + (block - first_block[expert]) * B
        found |= set(range(row, min(row + B, starts[expert + 1])))
    return sorted(set(range(starts[-1])) - found)


(row,) = lost(row_start, 2)
routings = torch.randint(9, (200, 5), generator=torch.Generator(device).manual_seed(0)).cumsum(1).tolist()
right = [B for B in range(1, 9) if not any(lost([0, *starts], B) for starts in routings)]
assert len(right) == 1
check(
    answer,
    dict(row=row, token=plan.token_of_row[row].item(), right_B=right[0]),
    see=dict(
        row=("Which expert does a block of rows belong to?", "write down first_block, and who owns each block"),
        token=("The plan, made on the device", "token_of_row of the row that is lost"),
        right_B=("Which expert does a block of rows belong to?", "when does no expert begin in the middle of a block?"),
    ),
)
print(f"lost: row {row}, of token {plan.token_of_row[row]}")
