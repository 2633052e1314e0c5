# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 5 · Experts over ranks
#
# *Before: [4 · Resident programs](s4_persistent.md) · next: [6 · One launch](s6_mega.md) · the flag: `stage="ranks"`, with
# `heap=`*
#
# All rungs up to [lesson 4](s4_persistent.md) hold all experts. A large model has more of them than a GPU has room for.
# This rung, `stage="ranks"`, splits the experts over several *ranks*: each rank holds some of the tokens and some of
# the experts, rows travel to the experts that they need, and results travel back. Between the two journeys stands
# lesson 4.
#
# You will learn
#
# - why experts are split, and how many bytes then travel, counted for two real layers;
# - what a *heap* is, and how ranks find each other's bytes in it;
# - how ranks *meet*: one barrier a call, and why one is enough;
# - why what is published lies twice, and slots once, and what breaks otherwise;
# - what it costs that exchange and products are launches apart, which the next rung changes.
#
# What you see here is all ranks in *one process and on one device*. That is enough to follow every step and to check it
# to the bit. What may go wrong between ranks that run each at its own speed it cannot show; for that there is a model,
# below. And it has no links between GPUs: where this lesson speaks of links it computes, from data sheets. With a
# process for each rank the same kernels run, over other memory; [what then changes](#a-process-for-each-rank) is little.
#
# You need lessons 0 to 4: the plan of rows, slots, tickets.

# %%
import difflib
import inspect
import os
import sys
from dataclasses import replace
from math import comb
from pathlib import Path

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when it is imported, below

import mega_moe
from mega_moe import LocalHeaps, moe, recorded, roofline
from mega_moe.exercises import check
from mega_moe.kernels import blocks
from mega_moe.kernels.exchange import as_tokens, combine_slots, pull, push
from mega_moe.kernels.meet import meet
from mega_moe.kernels.persistent import down, gate_up_swiglu
from mega_moe.kernels.tile_table import tile_table
from mega_moe.kernels.weights import readable
from mega_moe.launches import launches
from mega_moe.parity import Oracle
from mega_moe.reference.ranks import Tokens, plan_of_rank
from mega_moe.registry import stage
from mega_moe.samples import course_example, random_inputs
from mega_moe.shapes import PRESETS
from mega_moe.stages import s4_persistent, s5_ranks

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)
torch.set_printoptions(precision=4, sci_mode=False)
persistent, ranks = stage("persistent"), stage("ranks")
INK, RANK = "#1f2430", ["#2e6f9e", "#c0662b"]

# %% [markdown]
# ## What the rung below costs
#
# It wants all experts on every GPU. An expert has $3 H I$ weights, and a layer 128 experts. Training keeps a gradient
# for each weight, of the same size. With Adam in mixed precision, a master copy and two moments in fp32 come on top: 12
# bytes a weight besides the 4 of weight and gradient in bf16 ([Rajbhandari et al.,
# 2020](https://arxiv.org/abs/1910.02054), section 3.1). The two models have 48 and 94 such layers. An H200 holds 141
# GB.

# %%
LAYERS = {"qwen3-30b-a3b": 48, "qwen3-235b-a22b": 94}
print("GB of a rank, experts alone:      one layer                        all layers")
print("                     ranks     weights   + gradients     weights + gradients   with Adam")
for shape, layers in LAYERS.items():
    p = PRESETS[shape]
    for W in (1, 2, 4, 8, 16):
        weights = p.E // W * 3 * p.H * p.I
        GB = lambda bytes_each: weights * bytes_each / 1e9
        print(f"{shape:20} {W:5} {GB(2):11.2f} {GB(4):13.2f} {layers * GB(4):23.0f} {layers * GB(16):11.0f}")

# %% [markdown]
# So much is predicted. Measured, beyond the inputs: what one layer of the rung below takes at its worst moment, which is
# in backward, when all gradients are there. Beside it the part of that which is gradients of experts:

# %%
record = recorded.newest()
print(record)
for shape in LAYERS:
    if peak := record.peak_MiB(shape, "persistent"):
        gradients = PRESETS[shape].E * 3 * PRESETS[shape].H * PRESETS[shape].I * 2 / 2**20
        print(f"{shape:20} measured {peak:5.0f} MiB, of which gradients of experts {gradients:5.0f}")

# %% [markdown]
# The larger model's experts, with their gradients, fill more than six H200 before the first token comes. But a token
# visits only 8 of 128. So one gives each rank some experts for good, and sends *rows*. Rank r of W owns the $L = E/W$
# experts from $rL$ on. Which tokens a rank has does not depend on that: those of its own sequences, as many as it
# likes, also none.
#
# ## What travels
#
# Two of the five steps cross borders, dispatch and combine. The reference has the whole idea in plain torch, with a
# Python list for the ranks:
#
# ??? abstract "The layer over ranks, in plain torch"
#     ```python
#     --8<-- "mega_moe/reference/ranks.py"
#     ```
#
# Forward a row travels twice: its token to the expert (dispatch), its result back (combine). Backward three times: dy
# to the expert, x to the expert once more, since that is what dw_gate_up is made of and nobody kept the copy, and dx
# back. If every expert is equally busy, one row in W is at home already, and the others travel:


# %%
def rows_of_rank(p, W):
    """A rank's rows that come from elsewhere, if every rank has p.T tokens and every expert is equally busy."""
    return p.R * (W - 1) // W


TRIPS = {"forward": ("x", "out"), "backward": ("dy", "x", "dx")}
W = 8
print(f"W = {W}, T = 16384 tokens on each rank, bf16")
for shape in LAYERS:
    p = PRESETS[shape]
    for direction, trips in TRIPS.items():
        rows = rows_of_rank(p, W)
        MB = rows * p.H * p.dtype.itemsize / 1e6
        sum_of_trips = f"{len(trips)} x {MB:.0f} = {len(trips) * MB:5.0f} MB"
        print(
            f"{shape:16} {direction:9} {rows} rows into each rank and out, each of {', '.join(trips):9} {sum_of_trips}"
        )

# %% [markdown]
# As many bytes leave a rank as come, because what one pulls another gives. A link carries both ways at once, so what
# counts is one way. The router's weights and their gradients travel too, 4 bytes a row, and a few counts; they are lost
# in these figures.
#
# The data sheet of the H200 says 900 GB/s of NVLink, which is both ways together: 450 in and 450 out. That gives a
# floor, the least time that travelling takes. Nothing was measured here.

# %%
LINK = 450e9  # bytes a second, each way: half of the 900 GB/s of the NVIDIA H200 Tensor Core GPU data sheet
h200 = roofline.ceiling("NVIDIA H200")


def floors(p, direction, W, recompute):
    """Milliseconds, by data sheets: of each trip, and of the products."""
    trip = rows_of_rank(p, W) * p.H * p.dtype.itemsize / LINK
    again = 4 * p.R * p.H * p.I if recompute and direction == "backward" else 0  # pre, made again
    products = (roofline.useful_flops(p, direction) + again) / (h200.tflops(p.dtype) * 1e12)
    return trip * 1e3, products * 1e3


print("floors in ms, W = 8      trips x one trip = exchange     products    exchange / products")
for shape in LAYERS:
    for direction, trips in TRIPS.items():
        trip, products = floors(PRESETS[shape], direction, 8, recompute=True)
        exchange = len(trips) * trip
        print(
            f"{shape:16} {direction:9} {len(trips)} x {trip:.2f} = {exchange:5.2f} {products:20.2f}"
            f" {exchange / products:16.2f}"
        )

# %% [markdown]
# (Backward makes pre again here: over ranks `save` is `"inputs"` unless you say otherwise.) Forward, on the smaller
# layer, a row takes *longer to travel than to be multiplied*. Both grow with the number of rows and with H, so neither a larger
# batch nor a wider model changes the ratio. What does is I, the work that waits for a row when it arrives. Forward,
# with F flops and B bytes a second,
#
# $$\frac{\mathrm{exchange}}{\mathrm{products}} = \frac{W-1}{W} \cdot \frac{4 H}{B} \cdot \frac{F}{6 H I}
#   = \frac{W-1}{W} \cdot \frac{2 F}{3 B I}$$
#
# which for 8 ranks is 1 at an I of about 1,280. Keep this in mind for the end of the lesson.
#
# ## Heaps
#
# How does a rank get at another's rows? Each has a piece of memory that all can reach, its **heap**, and all heaps are
# laid out alike. To find rank 3's x one needs to know where heap 3 begins, and at which offset x lies in *every* heap.
# So an address is a sum:
#
# ```python
# --8<-- "mega_moe/kernels/meet.py:heap"
# ```
#
# The running example shall show it: four tokens, now on two ranks with two tokens each. It gets a fourth expert, which
# no token wants, so that the experts can be shared out: 0 and 1 to rank 0, 2 and 3 to rank 1.

# %%
inputs, dy = course_example(experts=4, device=device)
x, topk_ids, topk_weights, w_gate_up, w_down = vars(inputs).values()  # two tokens of rank 0, two of rank 1

# %% tags=["hide-input"] alt="Two ranks: tokens are pulled to the rows of the experts, over the border where rank and expert differ, and results are pushed to the slots of the tokens"
plan_of_all = mega_moe.routing.plan(topk_ids, 4)
starts, live = plan_of_all.row_start.tolist(), int(plan_of_all.row_start[-1])
_, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")


def box(at, height, text, colour, width=1.0, filled=True):
    style = dict(facecolor=colour) if filled else dict(facecolor="none", linestyle=":")
    axes.add_patch(plt.Rectangle((at + 0.05, height), width - 0.1, 0.62, edgecolor=colour, **style))
    inside = "white" if filled else colour
    axes.text(at + width / 2, height + 0.31, text, ha="center", va="center", color=inside, fontsize=9)


SHIFT = [0.0, 6.6]  # where each rank's half begins
token_at = [SHIFT[t // 2] + 1.0 + 2.0 * (t % 2) for t in range(4)]
slot_at = lambda t, k: SHIFT[t // 2] + 0.4 + 2.3 * (t % 2) + 1.1 * k
row_at = [0.0, 1.0, 2.0, 3.0, 4.5, 7.0, 8.0]
for t in range(4):
    box(token_at[t], 5.0, f"token {t}", RANK[t // 2])
    for k in range(2):
        masked = int(topk_ids[t, k]) < 0
        box(slot_at(t, k), 0.0, "–" if masked else f"[{t % 2}, {k}]", RANK[t // 2], 1.1, filled=not masked)
for e in range(4):
    rows = range(starts[e], starts[e + 1])
    left, right = (row_at[rows[0]], row_at[rows[-1]] + 1) if rows else (9.8, 10.8)
    axes.add_patch(
        plt.Rectangle((left - 0.06, 2.32), right - left + 0.12, 1.06, edgecolor="#9aa0a8", facecolor="#f1f2f4")
    )
    axes.text((left + right) / 2, 3.2, f"expert {e}", ha="center", va="center", fontsize=9, color=INK)
    if not rows:
        axes.text((left + right) / 2, 2.7, "no rows", ha="center", va="center", fontsize=9, color=INK)
for row in range(live):
    t, k = int(plan_of_all.token_of_row[row]), int(plan_of_all.slot_of_row[row])
    box(row_at[row], 2.4, f"row {row}", RANK[t // 2])
    owner = 0 if row < starts[2] else 1
    travels = dict(linewidth=2.2) if owner != t // 2 else dict(linewidth=1, alpha=0.45)
    arrow = dict(arrowstyle="-|>", color=RANK[t // 2], shrinkA=0, shrinkB=0, mutation_scale=11) | travels
    axes.annotate("", (row_at[row] + 0.5, 3.4), (token_at[t] + 0.5, 4.98), arrowprops=arrow)
    axes.annotate("", (slot_at(t, k) + 0.55, 0.66), (row_at[row] + 0.5, 2.3), arrowprops=arrow)
axes.axvline(6.2, color=INK, linestyle=":", linewidth=1)
for rank in (0, 1):
    axes.text(SHIFT[rank] + 2.6, 6.0, f"rank {rank}", ha="center", color=INK, fontsize=11)
for height, text in ((5.3, "x"), (4.2, "pull"), (2.7, "rows"), (1.5, "push"), (0.3, "slots")):
    axes.text(-0.4, height, text, ha="right", va="center", color=INK)
axes.set(xlim=(-1.3, 11.6), ylim=(-0.2, 6.4))
axes.axis("off")
plt.show()

# %% [markdown]
# Colours are *homes*: the rank whose token it is. Bold arrows cross the border. There are three rows that do: tokens 2
# and 3 want expert 0, and token 0 wants expert 2.
#
# A heap gets room for three tokens, one more than is used. So "token 0 of rank 1" (number 3) cannot be taken for "the
# third token of all" (number 2). All memory is *poisoned* until somebody writes it: its bytes are 255, which is NaN to
# a float and -1 to an int32. Only the words that count begin at zero: call, flags, rows_arrived, came_for (so that ranks
# find out that do not come for the same, one forward and one backward, say), and the page, on which they write what went
# wrong. One launch, `meet`, does the first three of the five steps below; here it is, and how a heap is laid out:

# %%
torch.use_deterministic_algorithms(True)  # among other things torch then fills what torch.empty returns
heaps = LocalHeaps(ranks=2, max_tokens=3)
example = inputs.problem(heap=heaps.key, tokens_per_rank=(2, 2))
memory, plan, *_ = meet(example, inputs)

print(f"{'view':14} {'at byte':>7}   shape")
for name, view in memory.layout.views().items():
    print(f"{name:14} {view.offset:7}   {view.shape}")

# %% [markdown]
# ## The protocol, step by step
#
# ### 1. Publish
#
# Each rank writes into *its own* heap what peers may want: its tokens, its router weights, and the plan of its own
# routes over all experts, which it can make without asking anybody. (Backward it writes dy as well.)
#
# ### 2. Arrive
#
# When all of that is written, the rank sets `rows_arrived` in its own heap to zero, and then adds one to *its* flag in
# the heap of every rank. It waits for nobody here. What comes next does: it begins when all flags in the rank's own heap
# show this call. Everybody has published then: that is the barrier, and it is the only one.
#
# ### 3. Plan
#
# Behind it every rank reads its peers' plans and joins them. So far we have come. This is in the heaps:

# %%
for name in ("call", "flags", "rows_arrived"):
    print(f"{name:12}", *(f"   rank {rank}: {memory.view(rank, name).tolist()}" for rank in (0, 1)))
for name in ("row_start", "token_of_row", "slot_of_row", "x", "topk_weights"):
    print(name)
    for rank in (0, 1):
        for buffer in (0, 1):
            print(f"    rank {rank}, buffer {buffer}   {memory.view(rank, name)[buffer].tolist()}")

# %% [markdown]
# Read it from above. Both ranks are in call 1, and both have arrived at both. No row has arrived. Everything published
# lies in **buffer 1**, because the call's number is odd; buffer 0 is as poisoned as it was, and so is the room for a
# third token. `row_start` of rank 0 says: 2 rows for expert 0, one each for experts 1 and 2.
#
# That is all rank 1 has to know to find its rows. Rank 0's route to expert 2 is row 3 of rank 0's plan, rank 1's own is
# row 2 of its own. Every part is sorted already, so joining is: where does each part begin (a sum of counts), and a
# copy. Tokens get their home into their number, home · max_tokens + token there:

# %%
tokens = [Tokens(x[:2], topk_ids[:2], topk_weights[:2]), Tokens(x[2:], topk_ids[2:], topk_weights[2:])]
row_start = plan.row_start.tolist()
print("row_start", row_start)
for rank in (0, 1):
    print(f"rank {rank}")
    specified = plan_of_rank(tokens, 2, rank)
    for expert in (2 * rank, 2 * rank + 1):
        for row in range(row_start[expert], row_start[expert + 1]):
            number, slot = int(plan.token_of_row[row]), int(plan.slot_of_row[row])
            home, token = divmod(number, heaps.max_tokens)
            print(f"    expert {expert} row {row}: token_of_row {number} = token {token} of rank {home}, slot {slot}")
            assert int(specified.token_of_row[row - row_start[2 * rank]]) == 2 * home + token  # the reference's plan
            assert int(specified.slot_of_row[row - row_start[2 * rank]]) == slot

# %% [markdown]
# The order is (expert, home, token, slot): just as one rank with all tokens would have it. So every expert multiplies
# the same matrix as on one rank, and every sum over rows has the same order. That will give us the same bits.
#
# All ranks of a process share one plan here. A rank of its own would make its part of it.
#
# ### 4. Pull, multiply, push
#
# Whoever owns a row *pulls* its token out of the home's heap, into a copy of its own. On these copies lesson 4's
# kernels work, unchanged: a copy is a token of its own, with one route (`as_tokens`). What comes out is *pushed* into
# the home's heap, to the slot [token, k] where the home will look for it, and added to the home's `rows_arrived`:

# %%
rows, _ = pull("x", False, example, memory, plan)
own = as_tokens(plan.row_start, len(plan.token_of_row))
table = tile_table(own, blocks.persistent_for(example))
_, act = gate_up_swiglu(rows, readable(w_gate_up), own, table, None, False, True)
out = down(act, readable(w_down), own, table)
push(out, None, example, memory, plan)

out = out.view(example.R, example.H)
print("row  home  token           out              goes to")
for row in range(live):
    home, token = divmod(int(plan.token_of_row[row]), heaps.max_tokens)
    values = ", ".join(f"{value:7.4f}" for value in out[row].tolist())
    slot = f"slots[{token}, {int(plan.slot_of_row[row])}]"
    print(f"{row:3} {home:5}  {rows[row].tolist()!s:12}  [{values}]   rank {home}, {slot}")
for rank in (0, 1):
    print(f"\nrank {rank}: rows_arrived {memory.view(rank, 'rows_arrived').tolist()}\n{memory.view(rank, 'slots')[:2]}")

# %% [markdown]
# ### 5. Combine
#
# A home knows from its own plan how many live routes it has: rank 0 four, rank 1 three. When so many rows have arrived,
# it sums each token's slots in slot order, times the router's weights. Slot [0, 1] of rank 1 is still NaN. That route
# is masked: nobody writes there, and nobody may read there.

# %%
y = torch.empty_like(x)
combine_slots(y, None, topk_weights, example, memory, plan)
print(y)
alone, _ = persistent.forward(inputs.problem(), inputs)
print("the same bits as on one rank:", torch.equal(y, alone))
assert torch.equal(y, alone)
torch.use_deterministic_algorithms(False)

# %% [markdown]
# The numbers of all lessons before. And now as you would call it: `heap=` and `tokens_per_rank=`, the rest as ever.
# Backward is the same five steps with other cargo. It publishes x and dy, pulls both, pushes dx rows and ⟨dact, act⟩,
# and meets on its own account: it is another call.

# %%
leaves = [t.clone().requires_grad_() for t in (x, topk_weights, w_gate_up, w_down)]
over_ranks = moe(leaves[0], topk_ids, *leaves[1:], heap=heaps, tokens_per_rank=(2, 2))
over_ranks.backward(dy)
gradients = [leaf.grad for leaf in leaves]

y, saved = persistent.forward(inputs.problem(), inputs)
expected = persistent.backward(inputs.problem(), inputs, saved, dy).tensors()
print("dtopk_weights\n", gradients[1], "\ndx\n", gradients[0])
for ours, theirs in zip([over_ranks, *gradients], [y, *expected]):
    assert torch.equal(ours, theirs)
print("call", memory.view(0, "call").tolist(), "flags", memory.view(0, "flags").tolist())
print("dy of rank 1, buffer 1:", memory.view(1, "dy")[1, :2].tolist())

# %% [markdown]
# Call 2 was forward and call 3 backward. In between nobody zeroed a flag, and nobody told the ranks the number of the
# call: it is in the heap, on the device, and the last program that leaves `meet` counts it up. The host passes no
# number that a CUDA graph would freeze.
#
# ## One barrier, two buffers, one set of slots
#
# Here is everything that ranks touch on each other's side, and who makes it ready for the next call:
#
# | in a heap | written by | read by | made ready by |
# |---|---|---|---|
# | x, dy, router weights, plan | its owner, before it arrives | peers, behind the barrier | its owner: the next call has the other buffer |
# | slots | peers, behind the barrier | its owner, in combine | nobody: they are written over |
# | rows_arrived | peers, when they have pushed | its owner, in combine | its owner, before it arrives |
# | flags | peers, when they arrive | its owner, at the barrier | nobody: they only grow |
#
# A rank may be far behind its peers. Which of the last call's things may still be in use when I begin the next? I have
# *combined*, so all my rows have arrived, and whoever pushed them had pulled my tokens before. But a peer from which I
# wanted nothing may not even have looked at my plan to find that out. (And where backward is asked for weight gradients
# alone, nothing is pushed, so my x and dy may still be read as well.) Let us play it through: rank 0 is fast, and its
# tokens stay at home. Rank 1 is slow, and its tokens go everywhere.


# %%
def timeline(calls, publish=(1, 2), plan=(0.5, 4), work=(2, 3), combine=(0.5, 1), from_peer=(False, True)):
    """(rank, call, what, start, end) of two ranks. A rank's combine waits for its peer's push if it has rows there."""
    spans, free = [], [0.0, 0.0]
    for call in range(1, calls + 1):
        arrived = [free[rank] + publish[rank] for rank in (0, 1)]
        barrier = max(arrived)
        pushed = [barrier + plan[rank] + work[rank] for rank in (0, 1)]
        for rank in (0, 1):
            spans.append((rank, call, "publish", free[rank], arrived[rank]))
            spans.append((rank, call, "plan", barrier, barrier + plan[rank]))
            spans.append((rank, call, "work", barrier + plan[rank], pushed[rank]))
            begin = max(pushed) if from_peer[rank] else pushed[rank]
            free[rank] = begin + combine[rank]
            spans.append((rank, call, "combine", begin, free[rank]))
    return spans


def collisions(spans, written, read, same_place):
    """Pairs in which one rank writes for a later call what another still reads for an earlier one."""
    return [
        (w, r)
        for w in spans
        for r in spans
        if w[2] == written and r[2] == read and w[0] != r[0] and w[1] > r[1]
        if w[3] < r[4] and r[3] < w[4] and same_place(w[1], r[1])
    ]


spans = timeline(3)
clash = collisions(spans, "publish", "plan", lambda call, earlier: True)
for (rank, call, _, begin, _), (peer, earlier, *_, until) in clash:
    reads = f"rank {peer} reads that of call {earlier} until {until:g}"
    print(f"at {begin:g} rank {rank} publishes its plan of call {call}; {reads}")
apart = collisions(spans, "publish", "plan", lambda call, earlier: call % 2 == earlier % 2)
slots = collisions(spans, "work", "combine", lambda call, earlier: True)
print(f"one buffer: {len(clash)} collisions; two: {len(apart)}; slots that lie once: {len(slots)}")
assert clash and not apart and not slots

# %% tags=["hide-input"] alt="Rank 0 publishes call 2 while rank 1 still reads what rank 0 published for call 1: into the other buffer, so no harm is done"
_, axes = plt.subplots(figsize=(10, 2.9), layout="constrained")
SHADE = {
    "publish": ("#5f8a3a", "white"),
    "plan": ("#b89b2f", "black"),
    "work": ("#a9c6da", "black"),
    "combine": ("#9aa0a8", "black"),
}
for rank, call, what, begin, until in spans:
    colour, ink = SHADE[what]
    axes.barh(-rank, until - begin, left=begin, height=0.62, color=colour, edgecolor="white")
    if what in ("publish", "plan") and until - begin >= 1:
        verb = "to" if what == "publish" else "reads buffer"
        axes.text((begin + until) / 2, -rank, f"{verb} {call % 2}", ha="center", va="center", color=ink, fontsize=9)
for call in (1, 2, 3):
    barrier = min(begin for _, c, what, begin, _ in spans if c == call and what == "plan")
    axes.axvline(barrier, color=INK, linestyle=":", linewidth=1)
    axes.text(barrier, 0.62, f"barrier of call {call}", ha="center", color=INK, fontsize=9)
for (*_, begin, _), _ in clash:
    axes.annotate(
        "",
        (begin + 0.5, -0.69),
        (begin + 0.5, -0.31),
        arrowprops=dict(arrowstyle="<|-|>", color="#b00020", linewidth=1.8),
    )
handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour, _ in SHADE.values()]
axes.legend(
    handles,
    ["publish", "plan", "pull, multiply, push", "combine"],
    frameon=False,
    ncols=4,
    loc="upper center",
    bbox_to_anchor=(0.5, -0.1),
)
axes.set_yticks([0, -1], ["rank 0", "rank 1"])
axes.set(xticks=[], ylim=(-1.45, 0.85))
axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
axes.tick_params(left=False)
plt.show()

# %% [markdown]
# **Why twice.** At the first red arrow rank 0 has all it wants of call 1 and publishes call 2, while rank 1 is still
# reading rank 0's plan of call 1. With one buffer it could read some of each. With two, call 2 goes to the other one.
#
# **Why not three times.** Call 3 has call 1's buffer again. But rank 0 publishes for call 3 when it is done with call
# 2, and so has seen rank 1's flag of call 2. Rank 1 raised that flag when it was done with call 1.
#
# **Why slots once.** A peer pushes behind the barrier of its call. I enter that barrier when I have combined the call
# before. So when the first new row comes, the last old one has been read.
#
# **Why zeroing before I arrive.** After I have arrived a fast peer may have passed the barrier, pushed and counted:
# then I would erase its count and wait for ever. Before I arrive nobody counts: the last call's rows have all been
# counted (I waited for them), and this call's pushes come behind the barrier.
#
# **Why flags only grow.** A flag that is taken down behind the barrier may have been raised by a fast peer for the next
# call already. One that only grows cannot be missed. After 2³¹ calls it wraps around, so what is compared is the
# difference.
#
# One figure proves nothing about all the others. So there is a *model* of this protocol in the tests. Each rank's
# programs are Python generators that take steps in random order, some a hundred times as fast as others, and write into
# every place which call it is of. Whoever reads something of another call raises `Stale`; if everybody waits, that is a
# `Deadlock`. The rules can be broken one by one. Two hundred runs each, of two to four ranks:

# %%
RULES = {
    "as it is": dict(),
    "one buffer for what is published": dict(buffers=1),
    "written to one parity, read from the other": dict(parity_of_publish=1),
    "the owner zeroes its counter behind the barrier": dict(zero_counters="plan"),
    "flags stay up after the first call": dict(flags="stay"),
    "flags are taken down behind the barrier": dict(flags="taken down"),
    "flags are compared as they are when they wrap": dict(wrapped=False),
    "a rank arrives before it has published": dict(arrive_waits=False),
}
folder = Path(mega_moe.__file__).parents[1] / "tests" / "ranks"
if (folder / "model.py").exists():
    sys.path.insert(0, str(folder))
    from model import Deadlock, Protocol, Stale, run

    print(f"{'':50} right  stale  deadlock   for example")
    for rule, broken in RULES.items():
        found, first = dict(right=0, Stale=0, Deadlock=0), ""
        for seed in range(200):
            try:
                run(seed, Protocol(**broken))
                found["right"] += 1
            except (Stale, Deadlock) as wrong:
                found[type(wrong).__name__] += 1
                first = first or str(wrong)
        counts = f"{found['right']:5} {found['Stale']:6} {found['Deadlock']:9}"
        print(f"{rule:50} {counts}   {first}".rstrip())
        assert (found["right"] < 200) == bool(broken)
else:
    print("The model is not here: it is in tests/ranks of the checkout.")

# %% [markdown]
# (In the examples a pair is what was found: the number of a call, modulo 4 so that wrapping happens, and a rank.)
# Nearly every broken rule goes well in some orders. On a GPU such a fault would show itself once in a while, as a
# slightly wrong number. Here it takes a few seconds to find them all.
#
# ??? abstract "The model"
#     ```python
#     --8<-- "tests/ranks/model.py"
#     ```
#
# ## The kernels
#
# `meet` is one launch whose programs draw tickets: first the publishing, then one ticket a rank to arrive, one that
# waits for the flags of all, then the plan (and for lesson 6's launch its schedule). A wait is for an earlier ticket or for another process, so the launch
# ends however few programs run at once. With one program the ranks of this process publish one after another, then
# arrive one after another, and then nobody has to wait: that is how it runs in the interpreter here.
#
# ```python
# --8<-- "mega_moe/kernels/signal.py:ranks"
# ```
#
# One adds to counters that may be another GPU's, the other waits for them. What is released at *gpu* scope other GPUs
# need not see; *sys* scope is for them. [Lesson 6](s6_mega.md#a-wait-is-more-than-a-look) explains the barrier in each,
# and what acquire and release mean.
#
# ```python
# --8<-- "mega_moe/kernels/exchange.py:rows"
# --8<-- "mega_moe/kernels/exchange.py:pull"
# ```
#
# ```python
# --8<-- "mega_moe/kernels/exchange.py:push"
# ```
#
# A block of rows may have several homes, so push counts them by home (`tell_homes`) and tells each how many came.
#
# ??? abstract "combine, and the launch in which ranks meet"
#     ```python
#     --8<-- "mega_moe/kernels/exchange.py:combine"
#     --8<-- "mega_moe/kernels/meet.py:publish"
#     --8<-- "mega_moe/kernels/meet.py:kernel"
#     ```
#
# Why does one side pull and the other push? Both times it is the owner of the expert who moves the bytes, because it
# has the plan: it knows of each row whence it comes and where it goes. The home knows only how many it expects.
#
# ## The recipe, and what changed in it
#
# Below, `-` is lesson 4's stage file and `+` this one's. What was a gather in gate_up's loads is a pull before it, what
# was a store by slot is a push behind it; what is between takes `rows` and `peers.own`, a plan in which every row is a
# token of its own, where it took `x` and the plan.

# %% tags=["hide-input", "diff"]
stages = [inspect.getsource(module) for module in (s4_persistent, s5_ranks)]
code = [source.split("\nfrom torch import Tensor\n")[1].splitlines() for source in stages]
for line in list(difflib.unified_diff(*code, n=1, lineterm=""))[2:]:
    print("" if line.startswith("@@") else line)

# %% [markdown]
# ## Is it right?
#
# A layer of 64 tokens and 8 experts, in bf16. The sum over all ranks is a plain sum, nothing is divided by W, so the
# result must be that of one rank. To stay within the [budget](../parity.md) is not enough here: the order of every sum
# is the same, so every bit must be. Over one, two and four ranks, one of them without tokens:

# %%
problem = PRESETS["tiny"].at(device=device)
inputs, tiny_dy = random_inputs(problem)
y, saved = persistent.forward(problem, inputs)
alone = [y, *persistent.backward(problem, inputs, saved, tiny_dy).tensors()]
oracle = Oracle(problem, inputs, tiny_dy)
for tokens_per_rank in ((64,), (40, 24), (17, 0, 40, 7)):
    local = LocalHeaps(ranks=len(tokens_per_rank), max_tokens=64)
    split = inputs.problem(heap=local.key, tokens_per_rank=tokens_per_rank)
    y, saved = ranks.forward(split, inputs)
    grads = ranks.backward(split, inputs, saved, tiny_dy)
    verdict = oracle.check(y, grads)
    equal = all(torch.equal(ours, theirs) for ours, theirs in zip([y, *grads.tensors()], alone))
    shares = "  ".join(f"{name} {share:.2f}" for name, share in verdict.shares.items())
    print(f"tokens {tokens_per_rank!s:15} {shares}   the same bits as on one rank: {equal}")
    assert verdict.passed
    assert equal or device == "cuda"  # on a GPU block sizes may differ from those without a heap

# %% [markdown]
# A heap serves calls with any numbers of tokens, up to `max_tokens` a rank. And if a pull took the wrong buffer? One
# more call on the example's heap, with ten times the tokens:

# %%
moe(10 * x, topk_ids, topk_weights, w_gate_up, w_down, heap=heaps, tokens_per_rank=(2, 2))
print(f"call {int(memory.view(0, 'call'))}, x of rank 0")
for buffer in (0, 1):
    print(f"    buffer {buffer}: {memory.view(0, 'x')[buffer, :2].tolist()}")

# %% [markdown]
# Call 4 has published into buffer 0. Buffer 1 still has the tokens of call 3, which was backward: plausible numbers, at
# the right place, and in a real training run hardly different from the right ones. That is why tests poison heaps, as
# we did above.
#
# On an H200 the same heaps were held to more (2026-11-29): over 2, 4 and 8 ranks 1,000 calls, each with other tokens,
# routes and numbers of tokens, and rung mega equal to this one to the bit; graphs that replay with other routings;
# eight ranks while products of 8192 cubed run on another stream; twenty layers that share heaps.
#
# ## What it costs
#
# **Launches.** Counted on a second call, for eight tokens over four ranks. Over one rank there are as many:

# %%
few, few_dy = random_inputs(PRESETS["tiny"].at(T=8, H=16, I=16, E=4, device=device))
few_heaps = {W: LocalHeaps(ranks=W, max_tokens=8) for W in (1, 4)}
few_over = {W: few.problem(heap=heap.key, tokens_per_rank=(8 // W,) * W) for W, heap in few_heaps.items()}


def launched(rung, of):
    """The names of what it launches forward, and backward."""
    _, kept = rung.forward(of, few)
    rung.backward(of, few, kept, few_dy)
    forward = launches(lambda: rung.forward(of, few), device)
    return forward, launches(lambda: rung.backward(of, few, kept, few_dy), device)


for rung, of in ((persistent, few.problem()), (ranks, few_over[4])):
    forward, backward = launched(rung, of)
    print(f"{rung.name}: {len(forward)} launches forward, {len(backward)} backward")
    print(f"    {', '.join(forward)}\n    {', '.join(backward)}\n")
assert launched(ranks, few_over[1]) == (forward, backward)

# %% [markdown]
# Of the new ones, arange and zeros_like are torch's: they write down that row r is token r. pre is kept here; where it
# is not, backward has one launch more.
#
# **Copies.** Lessons 3 and 4 had got rid of copied rows; here they are again. A row is pulled into a copy, out is
# stored in the order of rows and then pushed. That is no way back: rows have to cross a link, and copying *is* crossing
# it. But the products could load what has come, and store where it goes, while others still travel.
#
# **Memory.** A heap is as large as the most that a rank may have, whether it has it or not:

# %%
print("MiB of one rank's heap, T = 16384 tokens at most, W = 8")
for shape in LAYERS:
    p = PRESETS[shape]
    layout = replace(memory.layout, W=8, max_tokens=p.T, H=p.H, K=p.K, E=p.E, dtype=p.dtype)
    views = layout.views()
    size = lambda name: torch.Size(views[name].shape).numel() * views[name].dtype.itemsize / 2**20
    rest = sum(size(name) for name in views if name not in ("x", "dy", "slots"))
    parts = f"x 2 x {size('x') / 2:.0f} + dy 2 x {size('dy') / 2:.0f} + slots {size('slots'):.0f} + rest {rest:.0f}"
    print(f"    {shape:16} {sum(map(size, views)):5.0f}   {parts}   and rows pulled {p.R * p.H * 2 / 2**20:.0f}")

# %% [markdown]
# ("Rows pulled" is not in the heap; it is memory of the call, as large as all that a rank's experts receive, here if
# they are equally busy.) Layers of the same kind share one heap: nothing that backward needs stays in it.
#
# **Uneven ranks.** Inside a GPU a busy expert costs little, since tickets deal its tiles to whoever is free. Between
# ranks nobody deals: whoever owns busy experts has more to do, and the others wait for its rows. How much more, for 8
# ranks and 128 experts?

# %%
routing_only = PRESETS["qwen3-30b-a3b"].at(H=1, I=1, device=device, dtype=torch.float32)
busiest = {}
for spread in ("balanced", "random", "zipf"):
    ids = random_inputs(routing_only, spread)[0].topk_ids
    rows_of_owner = (ids // (128 // 8)).flatten().bincount(minlength=8)
    busiest[spread] = float(rows_of_owner.max() / rows_of_owner.float().mean())
    print(f"{spread:9} rows of each rank {rows_of_owner.tolist()}   the busiest: {busiest[spread]:.2f} of the mean")

# %% [markdown]
# **Idle links, idle matrix units.** This is the main thing. Pull, products and push are launches one behind another.
# While rows travel no matrix unit works, and while these work the links rest. By the floors above:

# %% tags=["hide-input"] alt="Forward and backward of both layers: links work while matrix units rest, and the other way round"
LAID = {  # in the order of launches; "exchange" is one trip, "products" a number of units of 2 R H I flops
    "forward": [("pull x", "exchange", 1), ("gate_up, down", "products", 3), ("push out", "exchange", 1)],
    "backward": [
        ("pull dy", "exchange", 1),
        ("pull x", "exchange", 1),
        ("gate_up, dact, dx", "products", 5),
        ("push dx", "exchange", 1),
        ("dw", "products", 3),
    ],
}
_, panels = plt.subplots(4, 1, figsize=(10, 6.4), layout="constrained")
for axes, (shape, direction) in zip(panels, [(shape, direction) for shape in LAYERS for direction in LAID]):
    trip, products = floors(PRESETS[shape], direction, 8, recompute=True)
    unit = products / sum(number for _, what, number in LAID[direction] if what == "products")
    now, busy = 0.0, dict(exchange=0.0, products=0.0)
    for label, what, number in LAID[direction]:
        length = number * (trip if what == "exchange" else unit)
        lane = 1 if what == "exchange" else 0
        axes.barh(lane, length, left=now, height=0.8, color="#c0662b" if lane else "#2e6f9e", edgecolor="white")
        axes.text(now + length / 2, lane, label, ha="center", va="center", color="white", fontsize=8)
        now += length
        busy[what] += length
    axes.axvline(max(busy.values()), color=INK, linestyle=":")
    axes.set_yticks([0, 1], ["matrix units", "links"])
    idle = f"matrix units idle {1 - busy['products'] / now:.0%}, links {1 - busy['exchange'] / now:.0%}"
    axes.set_title(
        f"{shape}, {direction}: {now:.2f} ms; {idle}; dotted: {max(busy.values()):.2f}", loc="left", fontsize=10
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlim(0, now)
panels[-1].set_xlabel("ms (each panel has its own scale): floors by data sheets, W = 8, T = 16384 a rank")
plt.show()

# %%
print("floors in ms, W = 8                  apart    one under the other   gain")
for shape in LAYERS:
    for direction, trips in TRIPS.items():
        trip, products = floors(PRESETS[shape], direction, 8, recompute=True)
        exchange = len(trips) * trip
        apart, together = exchange + products, max(exchange, products)
        print(f"{shape:16} {direction:9} {apart:16.2f} {together:18.2f} {apart / together:13.2f} x")

# %% [markdown]
# If links and matrix units worked at the same time, a direction would take as long as the longer of the two. At the
# floors that is up to 1.9 times as fast, and the most where both are equally long. No rung gets that: rows must have
# come before the first is multiplied, and the last result has to travel when nothing is left to multiply. Nor are the
# floors reached. But it says how much there is to be had, and on one GPU [lesson 6](s6_mega.md) found about one per
# cent.
#
# That is what a single launch is for over ranks: tiles of dispatch for one group of experts beside tiles of products of
# another. Rung mega takes heaps as well. It meets as here; pull has become a kind of tile, and push is the last thing
# that a tile of down or of dx does:

# %%
mega = stage("mega")
y, saved = mega.forward(split, inputs)
grads = mega.backward(split, inputs, saved, tiny_dy)
equal = all(torch.equal(ours, theirs) for ours, theirs in zip([y, *grads.tensors()], alone))
print("mega over four ranks: the same bits as on one rank:", equal)
assert equal or device == "cuda"
for names in launched(mega, few_over[4]):
    print(", ".join(names))

# %% [markdown]
# How much of the exchange it hides cannot be said here: in one process nothing travels over a link.
#
# ## Is it fast?
#
# Over the links of two GPUs it [was measured](../results.md#2-gpus-of-one-host). Forward, launches apart over heaps take
# a third of the time of eager torch over NCCL on the smaller layer and half of it on the larger; backward, 0.73 and 0.97
# of it, which is more than compiled torch takes. What the exchange itself costs to
# do can be seen on one GPU: heaps of several ranks on one device, where rows are copied from heap to heap as fast as
# memory allows. From the newest record, as far as it has them:

# %% tags=["hide-input"]
print(record)
over_ranks = dict.fromkeys((shape, c) for shape, c, _ in record.rows if c == "ranks" or "-over-" in c)
for shape in record.problems:
    for contestant in ("persistent", *(c for of, c in over_ranks if of == shape)):
        times = [record.ms(shape, contestant, direction) for direction in roofline.DIRECTIONS]
        if all(times):
            print(f"{shape:16} {contestant:16} forward {times[0]:6.2f} ms, backward {times[1]:6.2f} ms")
if record and not over_ranks:
    print("This rung is not recorded yet. On a GPU, `make bench` measures.")

# %% [markdown]
# What more GPUs would make of it is [predicted](../scaling.md), from measurements between two.
#
# ## A process for each rank
#
# Everything above knows a rank by one number, where its heap begins. With a process for each rank that number is where
# the peer's heap is *mapped* in this process: the same file in shared memory (`ShmHeaps`, on CPUs), or a peer GPU's
# memory, which NVLink makes loads and stores reach (`SymmetricHeaps`). The kernels get the table of these numbers, and a
# second one of those that are their own: they publish, arrive, plan and combine for these, and pull and push over all.
#
# | | all in one process | a process each |
# |---|---|---|
# | heaps in the table | W, side by side in a tensor | W, each wherever it is mapped |
# | of these its own | all | one |
# | experts, and rows of the plan | all | E / W; at most `max_rows` |
# | who raises a flag | the same launch | a launch of another process, at its own speed |
#
# The last line is what makes it real: now ranks do wait for each other, and one may die. A kernel cannot raise. So who
# has waited too long writes into the page of every heap what it waits for; whoever waits looks at its page now and then,
# ends, and computes NaN; and the host raises as soon as it looks. [The design](../design.md#how-ranks-meet) has it in
# detail, [running on a node](../running.md) how to start it.
#
# Where ranks share no memory at all, on two hosts for instance, the same recipe sends rows with all_to_all, a collective
# of the process group: what is `peers` in the stage file is then another object with the same verbs. It has to know how
# many rows travel before they do, so the host waits for that; over heaps it never does.
#
# ## The flag
#
# In one process it is `stage="ranks"` with a heap and the tokens of each rank; `stage="mega"`, the default over ranks, is
# asked in the same way. With a process for each rank, `MoE(..., group=torch.distributed.group.WORLD)` makes the heaps
# itself, and each process passes its own tokens.

# %%
for name in ("ranks", "mega"):
    leaf = x.clone().requires_grad_()
    y = moe(leaf, topk_ids, topk_weights, w_gate_up, w_down, stage=name, heap=heaps, tokens_per_rank=(2, 2))
    y.backward(dy)
    print(f'stage="{name}", heap=...: y[0] {y[0].tolist()}, dx[0] {leaf.grad[0].tolist()}')

# %% [markdown]
# ## Exercises
#
# **1.** A token may have several of its K experts on the same rank, and is then pulled once for each. How many ranks does a
# token visit, on average, if a router picks 8 distinct experts of 128 at random and there are 8 ranks? What share of
# dispatch would be saved if it travelled to each of them once? And with 2 ranks? Can the way back save the same?
#
# ??? success "Answer"
#     A rank has E/W experts, and a token misses all of them with probability
#     $\binom{E - E/W}{K} / \binom{E}{K}$. So a token visits $W (1 - \binom{E-E/W}{K}/\binom{E}{K})$ ranks and not K.
#     For E = 128, K = 8, W = 8 that is 5.3 instead of 8: 33 % of dispatch is saved. With 2 ranks it is 75 %. The way back
#     can save as much if the owner adds up a token's rows before it pushes them. But it must weight them for that, and
#     the sum is then no longer in slot order: the bits depend on where experts live.

# %% tags=["solution"]
answer = dict(ranks=5.3, saved=0.33, saved_with_two=0.75)

E, K = 128, 8
ids = random_inputs(routing_only, "random")[0].topk_ids
saved = {}
for W in (2, 4, 8, 16):
    visited = W * (1 - comb(E - E // W, K) / comb(E, K))
    owners = torch.nn.functional.one_hot(ids // (E // W), W).amax(1)  # (T, W)
    counted = owners.sum(1).float().mean().item()
    saved[W] = 1 - visited / K
    assert abs(visited - counted) < 0.02
check(
    answer,
    dict(ranks=K * (1 - saved[8]), saved=saved[8], saved_with_two=saved[2]),
    see=dict(
        ranks=("What travels", "W times the chance that at least one of 8 experts is among a rank's 16"),
        saved=("What travels", "one row a rank that is visited, instead of one row a route"),
        saved_with_two=("What travels", "hardly a token misses one of two ranks"),
    ),
)
for W, share in saved.items():
    print(f"W = {W:2}: a token visits {K * (1 - share):.2f} ranks: saves {share:.0%}")

# %% [markdown]
# **2.** A flag is an int32 that grows by one a call. A model of 48 layers shares one heap and makes one step a second:
# after how many days does the flag pass 2³¹ − 1? It goes to −2³¹ then. What is the difference of a flag of 2³¹ − 1 and a
# call of −2³¹, in int32, and may the rank go on? How far apart may two ranks' numbers be before that fails?
#
# ??? success "Answer"
#     96 calls a second (forward and backward are one each; more with checkpointing) reach 2³¹ after 259 days. Then the
#     flag goes to −2³¹, and the call number too. Compared as they are, a flag of 2³¹ − 1 would seem far *ahead* of call
#     −2³¹, and a rank would go through the barrier before its peer has come. The difference wraps as they do: it is −1,
#     so the rank waits. That is right as long as the numbers are less than 2³¹ apart, and those of ranks are at most one
#     apart.

# %% tags=["solution"]
answer = dict(days=259, difference=-1, goes_on=False)

days = 2**31 / (2 * 48) / 86400
flag, call = torch.tensor([2**31 - 1], dtype=torch.int32), torch.tensor([-(2**31)], dtype=torch.int32)
check(
    answer,
    dict(days=round(days), difference=int(flag - call), goes_on=bool(flag - call >= 0)),
    see=dict(
        days=("One barrier, two buffers, one set of slots", "forward and backward are a call each, in 48 layers"),
        difference=("The protocol, step by step", "int32 wraps: 2³¹ − 1 and one more is −2³¹"),
        goes_on=("The protocol, step by step", "a rank goes on once the flag is not behind its call"),
    ),
)
assert bool(flag > call)  # compared as they are it seems to have come
print(f"{days:.0f} days; flag > call: {bool(flag > call)}; flag - call: {int(flag - call)}")
