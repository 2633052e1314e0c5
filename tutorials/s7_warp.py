# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 7 · Warps with roles
#
# *Before: [6 · One launch](s6_mega.md) · next: [what comes next](s6_mega.md#what-comes-next) · the flag: `stage="warp"`*
#
# On every rung so far, all warps of a program do the same: they ask for the next operands, they multiply, and when a tile
# is done they all compute its epilogue and store it, while the matrix units wait. This rung, `stage="warp"`, gives warps
# roles. Some only load. The others only multiply and store. The launch, its tiles, its schedule and its waits are those
# of [lesson 6](s6_mega.md).
#
# You will learn
#
# - what a ring of barriers is, and why its waits need nothing but a number and a parity;
# - why who loads must not wait for who stores, and how a signal can be given late without anybody waiting for ever;
# - what a fence is too much of;
# - what roles gain on an H200, and what they cost.
#
# It is the end of portability, too: the kernel is written in Gluon, the language below Triton, for one architecture
# (sm_90: H100, H200). It cannot run in the interpreter. So this page shows it, and computes with models of it.

# %%
import difflib
import inspect
import os
from collections import Counter

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when it is imported, below

from mega_moe import MoE, recorded
from mega_moe.exercises import check
from mega_moe.parity import Oracle
from mega_moe.registry import stage
from mega_moe.samples import course_example, random_inputs
from mega_moe.shapes import PRESETS
from mega_moe.stages import s6_mega, s7_warp

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)
torch.set_printoptions(precision=4, sci_mode=False)
mega, warp = stage("mega"), stage("warp")
INK, BLUE, LIGHT, ORANGE = "#1f2430", "#2e6f9e", "#7fb0d3", "#c0662b"
record = recorded.newest()

# %% [markdown]
# ## What the rung below costs
#
# [Lesson 4](s4_persistent.md) counted a tile of 128 × 256 on an H200: some 12 ns a unit of contraction, and 5 µs besides.
# The first part is the matrix units at work. The second is everything that they wait for: the first operands have a
# microsecond's way from memory, and at the end the sums become results and are stored. How much is that of one layer's
# forward?

# %%
PROCESSORS, UNIT, BESIDES = 132, 0.012, 5.0  # of an H200; µs a unit of contraction, and a tile
for shape in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
    p = PRESETS[shape]
    blocks = p.R // 128
    tiles = {"gate_up": (blocks * p.I // 128, p.H), "down": (blocks * p.H // 256, p.I)}
    multiplied = sum(n * depth * UNIT for n, depth in tiles.values()) / PROCESSORS / 1e3
    besides = sum(n * BESIDES for n, _ in tiles.values()) / PROCESSORS / 1e3
    measured = record.ms(shape, "mega", "forward")
    words = f"measured {measured:.2f} ms" if measured else "not recorded"
    print(f"{shape:16} multiplied {multiplied:.2f} ms + besides {besides:.2f} ms; rung mega, with combine: {words}")

# %% [markdown]
# A fifth of forward on the smaller layer, an eighth on the larger. What of it is loading and signalling can be had back:
# what a *producer* of its own loads while the others are busy with the tile before, and what nobody waits for when it is
# stored. The epilogue's arithmetic stays.
#
# ## The ring
#
# One program has twelve warps. Four are the producer. Two groups of four are *consumers*, and each multiplies 64 rows of
# a tile of 128 × 256: a matrix instruction of Hopper (wgmma) is issued by four warps together, takes 64 rows, and reads
# both operands from shared memory. It does not care who put them there.
#
# Between them is a ring of *stages*. A stage has room for what one step of a contraction needs, 64 columns of the rows
# and of the weights: 48 KiB, so that four fit. The producer fills stage 0, 1, 2, 3, and then 0 again, step after step and
# tile after tile. Each stage has two barriers. On *full* a consumer waits before it reads, on *empty* the producer before
# it writes.
#
# A barrier counts arrivals, and when as many have come as it expects it completes a *phase* and begins to count anew.
# So nobody resets anything. Who waits says which phase, by its parity, and that is known from the step's number alone:

# %%
STAGES = 4
print("step   stage   consumers wait for full's phase   the producer waited for empty's phase")
for step in (0, 1, 4, 5, 9):
    use = step // STAGES  # how often the stage has been used before
    before = "none: the first use" if use == 0 else f"{use - 1} (parity {(use - 1) % 2})"
    print(f"{step:4} {step % STAGES:7} {use:21} (parity {use % 2}) {before:>32}")

# %% [markdown]
# A wait for a parity is over if the barrier's current phase has the other one. A barrier that is new counts as having
# completed a phase of parity 1: so the producer's first waits are over at once, and there is no special case.
#
# Let us watch one. Of three short tiles, when does each stage begin to be filled, when is it full, and when is it given
# back? A copy takes 1 µs to arrive, a step 0.7 µs, an epilogue 1.5 µs.

# %%
COPY, STEP, EPILOGUE = 1.0, 0.7, 1.5


def play(tiles, steps, stages, roles):
    """The steps' (begun to be filled, full, read from, given back), and when all is done, in µs."""
    uses, free, now = [], [0.0] * stages, 0.0
    for _ in range(tiles):
        asked = now  # without roles, the tile's loads begin when the tile before is stored
        for _ in range(steps):
            place = len(uses) % stages
            begun = free[place] if roles else max(free[place], asked)
            full = begun + COPY
            read = max(full, now)
            now = read + STEP
            free[place] = now
            uses.append((place, begun, full, read, now))
        now += EPILOGUE
    return uses, now


for name, roles in (("every warp does everything", False), ("a producer, and consumers", True)):
    print(f"{name:28} {play(3, 6, STAGES, roles)[1]:5.1f} µs")

# %% tags=["hide-input"] alt="Two timelines of four stages over three tiles. Without roles all stages are empty during an epilogue and fill again after it; with a producer they are filled while the epilogue runs"
_, panels = plt.subplots(2, 1, figsize=(10, 4.6), sharex=True, layout="constrained")
for axes, (title, roles) in zip(panels, (("every warp does everything", False), ("a producer, and consumers", True))):
    uses, end = play(3, 6, STAGES, roles)
    for place, begun, full, read, back in uses:
        for start, stop, colour in ((begun, full, LIGHT), (full, read, "#d9dde2"), (read, back, BLUE)):
            axes.barh(place, stop - start, 0.8, start, color=colour, edgecolor="white", linewidth=0.5)
    ends = [uses[n][4] for n in range(5, len(uses), 6)]
    axes.barh([-1] * 3, [EPILOGUE] * 3, 0.8, ends, color=ORANGE)
    axes.set_yticks([*range(STAGES), -1], [*(f"stage {n}" for n in range(STAGES)), "epilogue"])
    axes.set_title(f"{title}: {end:.1f} µs", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
for label, colour in (("being filled", LIGHT), ("full", "#d9dde2"), ("read", BLUE)):
    panels[0].barh(0, 0, color=colour, label=label)
panels[0].legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
panels[1].set_xlabel("µs")
plt.show()

# %% [markdown]
# With roles all stages are full again when the epilogue ends. What stays is the epilogue itself: the sums of a tile fill
# half of all registers, so there is no room to begin the next one beside them.
#
# ## The kernel: its rings
#
# Two rings, in fact: the second carries *messages*, by which the producer hands each tile to the consumers: a row of the
# schedule.
#
# ??? abstract "The barriers, from `mega_moe/kernels/warp_ring.py`"
#     ```python
#     --8<-- "mega_moe/kernels/warp_ring.py:ring"
#     ```
#
# ```python
# --8<-- "mega_moe/kernels/warp_ring.py:messages"
# ```
#
# ## The kernel: its roles
#
# The producer draws two tickets ahead, as programs of lesson 6 do. Rows that are gathered come by `cp.async`, 16 bytes a
# thread; what lies contiguously by the copy engine (TMA). Both arrive at the same barrier: a stage is full when the bytes
# of the bulk copies are there, and each of 128 threads has said that its own are.
#
# ```python
# --8<-- "mega_moe/kernels/warp.py:producer"
# ```
#
# Matrix instructions run asynchronously as well. A consumer starts those of a step, and only then waits for those of
# the step before, whose stage it gives back.
#
# ??? abstract "The consumers, from `mega_moe/kernels/warp.py`"
#     ```python
#     --8<-- "mega_moe/kernels/warp.py:consumer"
#     ```
#
# ## A signal that comes late
#
# What a tile has stored must have arrived before it is signalled ([lesson 6](s6_mega.md#a-wait-is-more-than-a-look)). It
# takes a microsecond to be sure of that, in which a consumer could multiply. So a consumer does not signal at the end of
# a tile: it *owes* the signal, goes on with its next tile, and *settles* after a few steps, while its matrix instructions
# run.
#
# ```python
# --8<-- "mega_moe/kernels/warp_ring.py:signals"
# ```
#
# But what if the next tile waits for just this signal? Take one program, and an expert with one gate_up tile and one
# down tile that waits for it. The model below is the rule in the kernel: who takes a tile that may wait for what it owes,
# settles first.

# %%
WAITS_FOR = {"gate_up": None, "down": "gate_up", "combine": "down"}


def ends(tiles, settles_first):
    """Whether one program's consumer comes to its end, with tiles taken in this order."""
    total, signalled, owed = Counter(tiles), Counter(), None
    for kind in tiles:
        if settles_first and owed is not None and WAITS_FOR[kind] is not None:
            signalled[owed], owed = signalled[owed] + 1, None
        before = WAITS_FOR[kind]
        if before is not None and signalled[before] < total[before]:
            print(f"a {kind} tile waits for {total[before]} of {before}, and sees {signalled[before]}: for ever")
            return False
        if owed is not None:  # a few steps later
            signalled[owed] += 1
        owed = kind
    return True


order = ["gate_up", "gate_up", "down", "down", "combine"]
print("settles only while it multiplies:", ends(order, settles_first=False))
print("settles before what may wait:    ", ends(order, settles_first=True))

# %% [markdown]
# The other half of the rule is the producer's: it hands a tile over *before* it waits for what the tile reads. Otherwise
# the consumer would never learn that it has to settle.
#
# ## A fence that was too much
#
# Copies by the copy engine take another way to memory than loads and stores of threads, so [a fence](s6_mega.md) stands
# between a wait and a copy, and between stores and a signal. The first form of this rung used the fence that names no
# memory (`fence.proxy.async`). In the machine code it is two instructions: one is the fence, the other a full barrier of
# memory for the whole GPU, in every thread, because the fence covers shared memory as well. The fence that names global
# memory (`fence.proxy.async.global`) is the one instruction alone. The order that the barrier gave is in the signal's
# release already. (You see it in what `nvdisasm` prints: MEMBAR.ALL.GPU beside FENCE.VIEW.ASYNC.)
#
# ## The recipe, and what changed in it
#
# `-` is lesson 6's stage file and `+` this one's.

# %% tags=["hide-input", "diff"]
stages = [inspect.getsource(module) for module in (s6_mega, s7_warp)]
code = [source.split("\nfrom torch import Tensor\n")[1].splitlines() for source in stages]
for line in list(difflib.unified_diff(*code, n=1, lineterm=""))[2:]:
    print("" if line.startswith("@@") else line)

# %% [markdown]
# ## The example, once more
#
# Where the rung can run it computes the example of all lessons, in bf16, which holds these numbers exactly. Elsewhere it
# says why not, as every rung does; then the rung below stands in, whose bits are the same.

# %%
inputs, dy = course_example(dtype=torch.bfloat16, device=device)
(T, H), E, K, I = inputs.x.shape, len(inputs.w_down), inputs.topk_ids.shape[1], inputs.w_down.shape[2]
example = PRESETS["tiny"].at(T=T, H=H, I=I, E=E, K=K, dtype=torch.bfloat16, device=device)
reason = warp.why_not(example)
print(reason or "It runs here.")
y, _ = (mega if reason else warp).forward(example, inputs)
print(f"y\n{y.float()}")
torch.testing.assert_close(y, stage("reference").forward(example, inputs)[0])

# %% [markdown]
# ## Is it right?
#
# As shares of the [budget](../parity.md), and beside the rung below. Products are added up in the same order by the same
# instruction, and everything behind them is the same code, so again the bits should be equal.

# %%
problem = PRESETS["tiny"].at(device=device, T=512)  # for fewer rows mega has other tiles, and other bits
inputs, tiny_dy = random_inputs(problem)
if reason := warp.why_not(problem):
    print(reason)
else:
    y, saved = warp.forward(problem, inputs)
    verdict = Oracle(problem, inputs, tiny_dy).check(y, warp.backward(problem, inputs, saved, tiny_dy))
    print(*(f"{name} {share:.2f}  " for name, share in verdict.shares.items()))
    assert verdict.passed and torch.equal(y, mega.forward(problem, inputs)[0])

# %% [markdown]
# On an H200 (2026-11-30, torch 2.11, Triton 3.6) an early form gave y and pre the bits of rung mega on both Qwen3 layers,
# with balanced, random and Zipf routing, one hot expert, masked routes and empty experts, 16,384 tokens and 333: in all of
# 20 runs each. The present form has given them in 50 smaller cases, those of its test. A test of 1,000 runs, and the rung
# over heaps, wait for a GPU.
#
# ## Is it fast?
#
# Forward of one layer on an H200, ms, medians of one interleaved run under load, balanced routing, without pre; this rung
# in an early form:
#
# | | qwen3-30b-a3b | qwen3-235b-a22b |
# |---|---|---|
# | rung persistent | 2.22 | 8.28 |
# | rung mega | 2.51 | 8.61 |
# | rung warp | 2.34 | 8.44 |
#
# Over the same launch without them roles gain 7 % on the smaller layer and 2 % on the larger. That is not enough to be
# ahead of launches apart. Clocks inside the kernel say where the rest is. On the smaller layer a consumer multiplies for
# 2,331 of 3,185 thousand cycles, where the matrix units' own time is 2,290: there is nothing left to gain in the loop.
# Epilogues take 262, signals 156, and combine 333, during which no matrix unit works. That is why, since then, the last
# columns of down come late, with combine tiles between them, and a signal is given while two steps are under way.
# [What was tried](../measuring.md#what-was-tried) has the figures.
#
# ## The flag

# %%
torch.manual_seed(0)
layer = MoE(hidden_size=16, intermediate_size=12, num_experts=3, top_k=2, device=device)
layer.stage = "warp"
try:
    print(layer(torch.randn(4, 16)).shape)
except RuntimeError as error:
    print(error)

# %% [markdown]
# (The layer is in fp32, as modules are unless told. In bf16, on an H100 or H200, it runs.)
#
# ## Exercises
#
# **1.** A program has 227 KiB of shared memory. Two consumers need 16 KiB each for what they store, and a stage takes
# what 64 columns of 128 rows and of 256 weights take in bf16. How many stages fit? And with three consumers, so that a
# tile has 192 rows, and 16 KiB for each of them?
#
# ??? success "Answer"
#     A stage of two consumers is 48 KiB, and 195 KiB are left: 4 stages. With three it is 56 KiB, and 179 are left: 3
#     stages. A tile of 192 rows reads fewer bytes for each product, 56 KiB instead of 72, but has a shorter ring.

# %% tags=["solution"]
answer = dict(two=4, three=3)

fit = {}
for consumers in (2, 3):
    KiB = (64 * consumers + 256) * 64 * 2 / 1024
    fit[consumers] = int((227 - 16 * consumers) // KiB)
check(
    answer,
    dict(two=fit[2], three=fit[3]),
    see=dict(
        two=("The ring", "what a stage holds, in KiB, and what is left of 227 beside the consumers' own"),
        three=("The ring", "a third consumer makes a stage larger, and takes as much again for what it stores"),
    ),
)

# %% [markdown]
# **2.** A ring of one stage is a ring as well. In the model above (a copy takes 1 µs, a step 0.7), how long does a tile of
# 6 steps take with roles and one stage, without its epilogue? From how many stages on do more of them not help?
#
# ??? success "Answer"
#     With one stage every step waits for its copy and then for its product: 6 times 1.7, that is 10.2 µs. With two, a copy
#     has the time of one step less than it needs; with 3 stages a copy is asked for two steps before it is read, 1.4 µs,
#     and never waited for but at the beginning. So from 3 stages on nothing changes.

# %% tags=["solution"]
answer = dict(one_stage=10.2, enough=3)

took = {stages: play(3, 6, stages, roles=True)[1] for stages in (1, 2, 3, 4, 5)}
print({stages: round(us, 2) for stages, us in took.items()})
check(
    answer,
    dict(
        one_stage=play(1, 6, 1, roles=True)[1] - EPILOGUE,
        enough=min(stages for stages, us in took.items() if us < min(took.values()) + 1e-9),
    ),
    see=dict(
        one_stage=("The ring", "with one stage nothing overlaps: a copy, then a step, six times"),
        enough=("The ring", "when is a copy asked for early enough that nobody waits for it?"),
    ),
)

# %% [markdown]
# What is not built yet stands [behind lesson 6](s6_mega.md#what-comes-next).
