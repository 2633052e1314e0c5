# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 0 · The layer in plain torch
#
# *[The course](course.md) · next: [1 · One launch for all experts](s1_grouped.md) · the flag: `stage="reference"`*
#
# A Mixture-of-Experts layer is a small idea: give every token its own few experts out of many. This lesson takes the
# layer apart on an example that you can follow with a pencil, forward and backward, and ends with the reason why the
# layer is a nuisance to a GPU, predicted and measured. Everything after this lesson is a remedy.
#
# You will learn
#
# - the five steps `dispatch`, `gate_up`, `swiglu`, `down`, `combine`, and the plan of rows that they walk along;
# - how the same five steps run backward, and why one factor is left out on the way;
# - where the time goes: uneven experts, many small launches, and bytes that travel for nothing.
#
# You need to know matrix products and the chain rule. You do not need a GPU.

# %%
from itertools import product

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import silu

from mega_moe import LADDER, MoE, Problem, recorded, reference, roofline
from mega_moe.exercises import check
from mega_moe.launches import launches
from mega_moe.reference.backward import (
    combine_backward,
    dispatch_backward,
    down_backward,
    gate_up_backward,
    router_weights_backward,
    swiglu_backward,
)
from mega_moe.reference.forward import combine, dispatch, down, gate_up, swiglu
from mega_moe.samples import course_example, random_inputs
from mega_moe.shapes import PRESETS

torch.set_default_dtype(torch.float64)  # so that differences show mistakes, not rounding
torch.set_printoptions(precision=4, sci_mode=False)


def show(**tensors):
    for name, tensor in tensors.items():
        print(f"{name} {tuple(tensor.shape)}\n{tensor}\n")


# %% [markdown]
# ## Many experts, few of them at a time
#
# The feed-forward half of a transformer block sends every token through the same three wide matrices: *gate* and *up*,
# which it meets first, and *down*, which leads back. An MoE layer has $E$ such triples, the *experts*, and a small
# *router* that picks $K$ of them for each token. The layer knows as much as all of its experts together and costs as much
# as $K$ of them. One layer of Qwen3-30B-A3B:

# %%
p = PRESETS["qwen3-30b-a3b"]
one_expert = 3 * p.H * p.I  # gate, up, down
print(f"weights of one expert        {one_expert / 1e6:6.1f} million")
print(f"weights of all {p.E} experts   {p.E * one_expert / 1e6:6.1f} million")
print(f"weights that a token meets   {p.K * one_expert / 1e6:6.1f} million")

# %% [markdown]
# So the layer does a sixteenth of the arithmetic that its size suggests. The price is order: neighbouring tokens want
# different matrices, and a GPU is fast only when many rows are multiplied by the same one.
#
# ## The running example
#
# Four tokens, three experts, two routes a token. It stays with us through all lessons.
#
# | letter | here | meaning |
# |---|---|---|
# | T | 4 | tokens |
# | K | 2 | routes of each token (top-k) |
# | E | 3 | experts |
# | H | 2 | hidden size: a token is two numbers |
# | I | 1 | intermediate size: inside an expert there is only one |
# | R | 7 | rows: the routes that exist |
#
# Token `t` has K places for experts, its *slots*, and `topk_ids[t, k]` is the expert in its slot `k`. One such choice,
# the pair `(t, k)`, is a *route*. We take the router's choices as given. Expert 0 is popular, expert 1 is not, and token
# 2 has only one live route: `-1` masks the other. All lessons take it from the same function:
#
# ```python
# --8<-- "mega_moe/samples.py:course_example"
# ```

# %%
inputs, dy = course_example(dtype=torch.float64)
x, topk_ids, topk_weights, w_gate_up, w_down = vars(inputs).values()
show(x=x, topk_ids=topk_ids, topk_weights=topk_weights)

# %% [markdown]
# What the layer means fits in a double loop. For token $t$, slot $k$ and the expert $e$ in it,
#
# $$\mathrm{gate} = W^{g}_e\, x_t, \quad \mathrm{up} = W^{u}_e\, x_t \qquad
#   y_t = \sum_k w_{tk}\ W^{d}_e\, \bigl(\mathrm{silu}(\mathrm{gate}) \cdot \mathrm{up}\bigr) \qquad
#   \mathrm{silu}(z) = \frac{z}{1 + e^{-z}}$$
#
# with the router's weight $w_{tk}$ and an expert's three matrices: gate, up and down.


# %%
def double_loop(x, topk_ids, topk_weights, w_gate_up, w_down):
    y = torch.zeros_like(x)
    for t, k in product(range(topk_ids.shape[0]), range(topk_ids.shape[1])):
        e = topk_ids[t, k]
        if e >= 0:
            gate, up = w_gate_up[e] @ x[t]
            y[t] = y[t] + topk_weights[t, k] * (w_down[e] @ (silu(gate) * up))
    return y


y_by_definition = double_loop(x, topk_ids, topk_weights, w_gate_up, w_down)
show(y=y_by_definition)

# %% [markdown]
# Take token 0 and check it by hand; $\mathrm{silu}(1) = 0.7311$ and $\mathrm{silu}(2) = 1.7616$ are all you need for
# the whole example. Its first route goes to expert 0: gate = 1, up = 2, so the expert puts out
# $(2 \cdot 0.7311,\ 0)$. Its second goes to expert 2: gate = 1, up = 1, out = $(0.7311, -0.7311)$. Half of each:
# $y_0 = (1.0966, -0.3655)$.
#
# The loop is right, and hopeless: every step multiplies one vector by a matrix that it fetched for that vector alone.
# The rest of this lesson turns it into three matrix products per expert.
#
# ## The plan: who sits in which row
#
# Sort the routes by expert, keep the order of tokens within an expert, and give every route a *row*. Now each expert's
# rows lie side by side, as one dense matrix. Four small arrays hold the plan, and each reads as a function. (The example
# in the docstring is another one, with an expert that has no rows.)
#
# ```python
# --8<-- "reference/routing.py:plan"
# ```

# %%
plan = reference.plan(topk_ids, num_experts=3)
show(**plan._asdict())

# %% [markdown]
# Read it aloud. `row_start`: expert 0 owns rows 0 to 3, expert 1 row 4, expert 2 rows 5 and 6. `token_of_row[4]` is 1:
# row 4 is token 1. `slot_of_row[4]` is 0: its first slot. `row_of_slot` goes the other way: token 1's slots have rows 4
# and 1. The masked route has no row at all: it will cost nothing.

# %% tags=["hide-input"] alt="Four tokens go to seven rows, sorted by expert, and come back"
COLOURS = ["#2e6f9e", "#c0662b", "#5f8a3a"]  # experts 0, 1, 2 in every figure
INK = "#1f2430"


def draw_plan(plan, topk_ids):
    _, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")
    T, R = len(topk_ids), len(plan.token_of_row)
    height_of_token = [(R - 1) / 2 + (T - 1) / 2 * 1.7 - 1.7 * t for t in range(T)]
    height_of_row = [R - 1 - r for r in range(R)]

    def box(at, height, text, colour, width):
        shape = plt.Rectangle((at - width / 2, height - 0.36), width, 0.72, facecolor=colour, edgecolor=INK, zorder=2)
        axes.add_patch(shape)
        axes.text(at, height, text, ha="center", va="center", zorder=3, color=INK if colour == "white" else "white")

    def line(start, end, colour):
        (x0, y0), (x1, y1) = start, end
        bend = (x1 - x0) / 2
        path = plt.matplotlib.path.Path([(x0, y0), (x0 + bend, y0), (x1 - bend, y1), (x1, y1)], [1, 4, 4, 4])
        axes.add_patch(plt.matplotlib.patches.PathPatch(path, facecolor="none", edgecolor=colour, linewidth=2))

    for t, height in enumerate(height_of_token):
        box(0, height, f"$x_{t}$", "white", 0.9)
        box(10, height, f"$y_{t}$", "white", 0.9)
    for r, (t, k, height) in enumerate(zip(plan.token_of_row, plan.slot_of_row, height_of_row)):
        colour = COLOURS[topk_ids[t, k]]
        box(5, height, f"row {r}:  token {t}, slot {k}  →  expert {topk_ids[t, k]}", colour, 3.6)
        spread = 0.18 if k == 0 else -0.18
        line((0.45, height_of_token[t] + spread), (3.2, height), colour)
        line((6.8, height), (9.55, height_of_token[t] + spread), colour)
    for t in (topk_ids[:, 1] < 0).nonzero().flatten():
        start = height_of_token[t] - 0.18
        axes.plot([0.45, 0.9], [start, start - 0.1], color="grey", linewidth=2, linestyle=":")
        axes.text(1, start - 0.12, "masked", color="grey", va="center")
    for at, word in ((1.8, "dispatch"), (5, "gate_up, swiglu, down"), (8.2, "combine")):
        axes.text(at, R - 0.1, word, ha="center", color=INK, style="italic")
    axes.set(xlim=(-0.6, 10.6), ylim=(-0.6, R + 0.3))
    axes.axis("off")
    plt.show()


draw_plan(plan, topk_ids)

# %% [markdown]
# ## Forward, in five steps
#
# **1. dispatch** copies every token to each of its rows. Tokens 0, 1 and 3 appear twice, token 2 once.

# %%
rows = dispatch(x, plan)
show(rows=rows)

# %% [markdown]
# **2. gate_up** multiplies each expert's rows by its first two matrices. This is the point of the plan: four rows meet
# expert 0 in *one* product. Since I is 1, gate and up are one number each; printed side by side:

# %%
pre = gate_up(rows, w_gate_up, plan)
print(f"pre {tuple(pre.shape)}\n{pre.squeeze(-1)}")

# %% [markdown]
# **3. swiglu** turns the two into one: silu(gate) times up. Row 2 is $1.7616 \cdot 3$.

# %%
act = swiglu(pre)
show(act=act)

# %% [markdown]
# **4. down** goes back from I to H numbers with each expert's last matrix.

# %%
out = down(act, w_down, plan)
show(out=out)

# %% [markdown]
# **5. combine** brings the rows home: each token adds up its own, times the router's weights. The masked route is
# skipped, not multiplied by zero, since zero times infinity is not zero.

# %%
y = combine(out, topk_weights, plan.row_of_slot)
show(y=y)
torch.testing.assert_close(y, y_by_definition)

# %% [markdown]
# The same y. Here are the five steps in full, from `reference/forward.py`:
#
# ```python
# --8<-- "reference/forward.py:steps"
# ```
#
# ## Backward, the same five from last to first
#
# Let `dy` be the gradient that arrives at y. We want `dx`, `dtopk_weights`, `dw_gate_up` and `dw_down`. Each forward
# step has a partner, and each partner is a short derivation; the derivations stand in the docstrings below, and
# [the mathematics](../math.md) collects them.
#
# One choice is worth making slowly. The router's weight multiplies the expert's output, so by the chain rule every
# gradient below `out` carries that factor:
#
# $$y_t = \sum_k w_k\, \mathrm{out}_k \quad\Rightarrow\quad
#   \mathrm{dout}_k = w_k\, dy_t, \qquad dw_k = \langle dy_t,\ \mathrm{out}_k \rangle$$
#
# The second formula asks for `out`, one of the largest tensors of the layer, which we would rather forget. But out is
# itself a product, and a scalar product lets us move the matrix to the other side:
#
# $$\langle dy_t,\ W^{d}_e\, \mathrm{act} \rangle = \langle W^{d\top}_e\, dy_t,\ \mathrm{act} \rangle
#   = \langle \mathrm{dact},\ \mathrm{act} \rangle$$
#
# with $\mathrm{dact} = W^{d\top}_e\, dy_t$ taken *before* the router's weight. So the weight is left out of `dact`, the
# router gets its gradient from two tensors that backward has at hand anyway, and the factor is put back where a row is
# cheap to scale. Nothing is ever divided by a weight, which may well be zero.
#
# ```python
# --8<-- "reference/backward.py:backward"
# ```
#
# Forward kept two things for this, the plan and `pre`. `act` is made again from `pre`, in one elementwise pass. Now
# watch the five steps.

# %%
weight_of_row = topk_weights[plan.token_of_row, plan.slot_of_row]

dy_rows = combine_backward(dy, plan)
dact, dw_down = down_backward(dy_rows, act, weight_of_row, w_down, plan)
dtopk_weights = router_weights_backward(dact, act, topk_weights, plan)
dpre = swiglu_backward(dact, weight_of_row, pre)
drows, dw_gate_up = gate_up_backward(dpre, rows, w_gate_up, plan)
dx = dispatch_backward(drows, plan.row_of_slot)

show(dact=dact, dtopk_weights=dtopk_weights, dx=dx)

# %% [markdown]
# Check one by hand: token 0's first route. `dact` of its row is $1 \cdot 1 + 0 \cdot 0 = 1$, and its `act` is
# $1.4621$, so `dtopk_weights[0, 0]` is $1.4621$. The masked route's gradient is exactly zero.
#
# Hand-made derivatives deserve distrust. Autograd can differentiate the double loop, which knows nothing of rows,
# plans or left-out factors:

# %%
leaves = [t.clone().requires_grad_() for t in (x, topk_weights, w_gate_up, w_down)]
double_loop(leaves[0], topk_ids, *leaves[1:]).backward(dy)

by_hand = {"dx": dx, "dtopk_weights": dtopk_weights, "dw_gate_up": dw_gate_up, "dw_down": dw_down}
for (name, grad), leaf in zip(by_hand.items(), leaves):
    difference = (grad - leaf.grad).abs().max().item()
    print(f"{name:14} largest difference from autograd {difference:.1e}")
    assert difference < 1e-12

# %% [markdown]
# Equal up to the last bits of float64. The steps, with their derivations, from `reference/backward.py`:
#
# ??? abstract "The five steps of backward, in full"
#     ```python
#     --8<-- "reference/backward.py:steps"
#     ```
#
# ## Why this wastes a GPU
#
# The reference is clear, and it is slow for three reasons that you can count without owning a GPU.
#
# **Experts are not equally busy.** A router is free to prefer some. Below, 16,384 tokens choose 8 of 128 experts: once
# as evenly as possible, and once by Zipf's law, the n-th most popular expert drawn with a probability proportional to
# 1/n: a long tail, to stand for a router that is far from balance. A loop over experts must cope with products of any
# height; a kernel that gives every expert the same room must size it for the busiest.

# %% tags=["hide-input"] alt="Rows of each of 128 experts, busiest first"
_, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
routing_only = PRESETS["qwen3-30b-a3b"].at(H=1, I=1, device="cpu", dtype=torch.float32)
for routing, draw, colour in (("zipf", axes.bar, COLOURS[1]), ("balanced", axes.plot, COLOURS[0])):
    inputs, _ = random_inputs(routing_only, routing)
    load = inputs.topk_ids.flatten().bincount(minlength=routing_only.E).sort(descending=True).values
    draw(range(len(load)), load, color=colour, label=f"{routing}: {load[0]} rows at most, {load[-1]} at least")
axes.set(xlabel="experts, busiest first", ylabel="rows", xlim=(-0.5, routing_only.E - 0.5))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# **Every expert is a launch of its own, or several.** Each operation below would be a kernel that the host queues and
# the device starts, some microseconds apiece; and the loop must know its slices, so the host waits for the device to
# say how many rows each expert has.


# %%
def launches_of(stage, problem):
    inputs, dy = random_inputs(problem)
    _, saved = stage.forward(problem, inputs)
    forward = launches(lambda: stage.forward(problem, inputs), problem.device)
    backward = launches(lambda: stage.backward(problem, inputs, saved, dy), problem.device)
    return len(forward), len(backward)


for experts in (4, 16, 64):
    problem = Problem(T=64, H=16, I=16, E=experts, K=2, dtype=torch.float32, device="cpu")
    forward, backward = launches_of(LADDER[0], problem)
    print(f"{experts:3} experts: {forward:4} launches forward, {backward:4} backward")

# %% [markdown]
# **Bytes travel for nothing.** `rows`, `pre`, `act` and `out` are written to memory by one step, only to be read by the
# next. Here is what each step asks of an H200 for one layer of Qwen3-30B-A3B with 16,384 tokens: the time that its
# arithmetic needs at the data sheet's rate, and the time that its bytes need.

# %%
h200 = roofline.ceiling("NVIDIA H200")


def needs(cost):
    """Milliseconds of an H200 by its data sheet: for the arithmetic of a step, and for its bytes."""
    return cost.flops / (h200.tflops(p.dtype) * 1e9), cost.bytes / (h200.gb_per_s * 1e6)


for direction in roofline.DIRECTIONS:
    print(f"{direction:8}    GFLOP     MB   arithmetic   memory")
    for step, cost in roofline.steps(p, direction).items():
        arithmetic, memory = needs(cost)
        print(f"  {step:9} {cost.flops / 1e9:6.0f} {cost.bytes / 1e6:6.0f}   {arithmetic:7.2f} ms   {memory:5.2f} ms")

# %% [markdown]
# Three of the five steps compute nothing to speak of and move bytes only.
#
# **Predicted, and measured.** The least that any implementation pays is all the arithmetic, or each input and output
# once, whichever takes longer. Five separate steps pay each step's own minimum, one after the other. And this is what the
# clock says, in [the newest record](../results.md): this rung, then the same steps in plain torch as trainers run them
# today, with `F.grouped_mm` for the products, then nothing but matrix products of the same flops, by the vendor.

# %%
record = recorded.newest()
print(record, "\n")
print(f"{'ms':49} {'forward':>9} {'backward':>9}")
for shape in record.problems:
    p, both = PRESETS[shape], roofline.DIRECTIONS
    print(shape)
    lines = {"predicted: the least of all": [roofline.allowed_ms(p, direction, h200) for direction in both]}
    steps = [[max(needs(cost)) for cost in roofline.steps(p, direction).values()] for direction in both]
    lines["predicted: five steps, each at its own least"] = [sum(ms) for ms in steps]
    for contestant, words in {
        "reference": "this rung",
        "torch": "plain torch",
        "torch-compiled": "plain torch, torch.compile",
        "cublas": "matrix products alone",
    }.items():
        lines[f"measured: {words}"] = [record.ms(shape, contestant, direction) for direction in both]
    for words, times in lines.items():
        if all(times):
            print(f"    {words:45} {times[0]:9.2f} {times[1]:9.2f}")

# %% [markdown]
# Two gaps are worth a long look. Between the products alone and the least of all lies what the card does not hold: its
# clocks fall under load, below those of the data sheet. Between the products alone and plain torch lies all the rest,
# and that is what this course is about. The ladder takes it away one cost at a time, and [the next
# lesson](s1_grouped.md) takes the first: no loop over experts, no waiting host.
#
# ## The flag
#
# In a model it is one word, and it may change between two steps. So a rung that you doubt can be asked beside this one:

# %%
torch.manual_seed(0)
layer = MoE(hidden_size=16, intermediate_size=12, num_experts=3, top_k=2, stage="reference", dtype=torch.float64)
tokens = torch.randn(4, 16)
loss = layer(tokens).square().mean()
loss.backward()
norm = layer.experts.down_proj.grad.norm()
print(f'stage="{layer.stage}": loss {loss.item():.6f}, norm of the gradient of down_proj {norm.item():.6f}')

# %% [markdown]
# ## Exercises
#
# Work them out with a pencil, then open the answer. Below each answer stands a cell that checks it: in a notebook, write
# your own `answer` there and run it. If it is not right, it says what is off, and where in the lesson to look again.
#
# **1.** The router unmasks token 2's second route and sends it to expert 1: `topk_ids[2]` is `[0, 1]` now. What becomes
# of `row_start`? Which row does the new route get, and what are the two numbers of $y_2$?
#
# ??? success "Answer"
#     Expert 1 has two rows now, and all of expert 2's move down by one: `row_start` is 0, 4, 6, 8. Within an expert rows
#     keep the order of the tokens, and token 1 comes before token 2, so the new route has row 5. At expert 1 token 2 has
#     gate $0 \cdot 1 + 2 \cdot 1 = 2$ and up $1 + 1 = 2$, so act is $1.7616 \cdot 2 = 3.5232$, and out $(0, 3.5232)$. A
#     quarter of it is added to what token 2 had: $0.75 \cdot 1.7616 \cdot 3 = 3.9636$. So $y_2 = (3.9636, 0.8808)$.

# %% tags=["solution"]
answer = dict(row_start=[0, 4, 6, 8], row=5, y=[3.9636, 0.8808])

unmasked = topk_ids.clone()
unmasked[2, 1] = 1
plan_then = reference.plan(unmasked, num_experts=3)
y_then, _ = reference.forward(x, unmasked, topk_weights, w_gate_up, w_down)
check(
    answer,
    dict(row_start=plan_then.row_start.tolist(), row=plan_then.row_of_slot[2, 1].item(), y=y_then[2].tolist()),
    see=dict(
        row_start=("The plan: who sits in which row", "count each expert's routes, and add up those before it"),
        row=("The plan: who sits in which row", "within an expert rows keep the order of the tokens"),
        y=("Forward, in five steps", "what token 2 had, and the new route's out times its router weight"),
    ),
)
print(f"row_start {plan_then.row_start.tolist()}, row {plan_then.row_of_slot[2, 1]}, y[2] {y_then[2]}")

# %% [markdown]
# **2.** A colleague keeps `weighted_out = weight * out` from forward, because combine needs it anyway, and computes the
# router's gradient as `<dy, weighted_out> / weight`. It passes all tests with random weights. For which router weight
# does the colleague's formula fail, where ours does not? What is the right gradient of token 0's second route there?
#
# ??? success "Answer"
#     For a weight of exactly zero: the colleague divides 0 by 0. The gradient there is as real as anywhere else,
#     $\langle dy, \mathrm{out} \rangle$: it says whether that expert *should* get a say. Here it is
#     $1 \cdot 0.7311 + 0 \cdot (-0.7311)$. A weight of zero happens: a softmax in low precision underflows, and some
#     routers switch routes off that way. The same holds for weights that are merely tiny: the quotient of two rounded
#     tiny numbers is noise.

# %% tags=["solution"]
answer = dict(weight=0.0, gradient=0.7311)

some = topk_weights.clone()
some[0, 1] = answer["weight"]
weighted_out = some[plan.token_of_row, plan.slot_of_row, None] * out
colleague = (dy_rows * weighted_out).sum(-1) / some[plan.token_of_row, plan.slot_of_row]
ours = router_weights_backward(dact, act, some, plan)

row = plan.row_of_slot[0, 1]
by_definition = (dy[0] * out[row]).sum()
check(
    answer,
    dict(weight=0.0, gradient=by_definition.item()),
    see=dict(
        weight=(
            "Backward, the same five from last to first",
            "for which weight is the colleague's quotient no number?",
        ),
        gradient=("Backward, the same five from last to first", "what the router's weight multiplies, along dy"),
    ),
)
assert colleague[row].isnan()
torch.testing.assert_close(ours[0, 1], by_definition)
print(f"colleague {colleague[row]:.4f}, ours {ours[0, 1]:.4f}, by definition {by_definition:.4f}")
