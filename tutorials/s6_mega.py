# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6 · One launch
#
# *Before: [5 · Experts over ranks](s5_ranks.md) · next: [7 · Warps with roles](s7_warp.md) · the flag: `stage="mega"`*
#
# After [lesson 4](s4_persistent.md) programs stay, and tiles come to them. But only until the launch ends: then all
# have to leave, the slowest too, before the next launch begins with an empty GPU. This rung, `stage="mega"`, does all
# five steps of a direction in one launch. Nobody waits for everybody any more. Each tile waits for just the tiles that
# make what it reads.
#
# You will learn
#
# - what the end of a launch costs, and how little that is on one GPU;
# - how a *schedule* orders tiles so that nobody waits for ever, and hardly anybody waits at all;
# - how programs hand bytes to each other: tickets, waits, signals, and the barriers and fences around them;
# - what happens without a wait, and why you may not notice;
# - why this rung is, so far, a little *slower* than the rung below.
#
# You need lesson 4: blocks of rows, tickets, the tile table. ([Lesson 5](s5_ranks.md) splits the experts over ranks. This
# rung can do so too, but the lesson is about one GPU.)

# %%
import difflib
import inspect
import os
import random
from dataclasses import replace
from functools import cache

import matplotlib.pyplot as plt
import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when it is imported, below

from mega_moe import MoE, recorded, roofline, routing
from mega_moe.exercises import check
from mega_moe.kernels.blocks import Elementwise, blocks_of_target, mega_for, nearest
from mega_moe.kernels.schedule import backward_work, forward_work, plan_and_schedule
from mega_moe.launches import launches
from mega_moe.parity import Oracle
from mega_moe.registry import stage
from mega_moe.samples import course_example, random_inputs
from mega_moe.schedule import (
    ARRIVALS,
    BLOCK,
    COLUMNS,
    COMBINE,
    EXPERT,
    KIND,
    KINDS,
    RANK,
    ROW,
    ROWS,
    STEP_OF_KIND,
    Phase,
    Work,
    counter_of,
    home_of_row,
    schedule,
    signals_of,
)
from mega_moe.shapes import PRESETS, Need
from mega_moe.simulate import Deadlock, Simulation, by_ticket, in_words, play
from mega_moe.stages import s4_persistent, s6_mega
from mega_moe.timeline import COLOURS, Bar, svg

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)
torch.set_printoptions(precision=4, sci_mode=False)
reference, persistent, mega = (stage(name) for name in ("reference", "persistent", "mega"))
INK = "#1f2430"


class Picture:
    """The text of an SVG file, which a notebook shows."""

    def __init__(self, text):
        self.text = text

    def _repr_svg_(self):
        return self.text


# %% [markdown]
# ## What the rung below costs
#
# One layer of Qwen3-30B-A3B on an H200, as lesson 4 counts: a tile of 128 × 256 takes some 12 ns a unit of contraction
# and 5 µs besides, and 132 programs draw them. A combine tile, 16 tokens, takes as long as its bytes need at 4.3 TB/s,
# which is what combine was measured to move. These are round figures; what we ask is where time is *lost*, not how
# long it is.
#
# `mega_moe.simulate` plays such tiles through, program by program. We let it play each launch by itself, as the rung
# below does, and ask how long programs stand idle at its end, on average, because there are no tickets left and some
# are still busy.

# %%
PROCESSORS = 132
tiles = blocks_of_target("sm_90", torch.bfloat16).mega


@cache
def real(shape, direction, spread="balanced", group=tiles.group):
    """The work of one direction, and its schedule, with the tiles of an H200."""
    p = PRESETS[shape]
    ids = random_inputs(p.at(H=1, I=1, device=device, dtype=torch.float32), spread)[0].topk_ids.cpu()
    sized = replace(tiles, group=group)
    work = forward_work(p, sized) if direction == "forward" else backward_work(p, sized, Need(), recompute=False)
    with torch.device("cpu"):
        return p, work, schedule(routing.plan(ids, p.E).row_start, [p.T], [p.R], work).tolist()


def nanoseconds(p, tile):
    kind = KINDS[tile[KIND]]
    if kind == "combine":
        return round(tile[ROWS] * (p.K + 1) * p.H * p.dtype.itemsize / (4300 / PROCESSORS))
    depth = {"gate_up": p.H, "down": p.I, "dact": p.H, "dx": 2 * p.I}
    return 12 * depth.get(kind, tile[ROWS]) + 5000  # a weight gradient sums over its expert's rows


def played(p, work, table):
    """What 132 programs do with it, in nanoseconds."""
    lengths = [nanoseconds(p, tile) for tile in table]
    return play(table, work, p.E, 1, [0] * p.R, by_ticket(table, 1, PROCESSORS), lengths)


def end(spans):
    return max(span.end for span in spans)


# Of the launches below: forward, and backward.
ORDER = ("gate_up", "down", "dact", "dx", "combine", "dw_gate_up", "dw_down")


def apart(p, work, table):
    """The same tiles, each kind in a launch of its own, in which nobody waits: {kind: spans}."""
    of_kind = {kind: [[*t[:ARRIVALS], 0] for t in table if KINDS[t[KIND]] == kind] for kind in ORDER}
    return {kind: played(p, work, several) for kind, several in of_kind.items() if several}


idle_us = {}
for direction in ("forward", "backward"):
    p, work, table = real("qwen3-30b-a3b", direction)
    print(f"{direction:12} {'tiles':>8} {'ms':>8}   idle at its end, us")
    for kind, spans in apart(p, work, table).items():
        even = sum(span.end - span.start for span in spans) / PROCESSORS
        idle_us[direction, kind] = (end(spans) - even) / 1e3
        print(f"    {kind:10} {len(spans):6} {end(spans) / 1e6:8.2f} {idle_us[direction, kind]:10.0f}")
total = sum(idle_us.values())
print(f"\nin all {total:.0f} us: less than one tile at the end of each launch")

# %% [markdown]
# Now all tiles of a direction in one launch. Who has no gate_up tile left takes a down tile, if what it reads is
# there. Here is how many of the 132 programs are at work, backward:

# %% tags=["hide-input"] alt="Programs at work in backward: with a launch a step the number falls to zero at each end; in one launch it stays full"


def at_work(spans):
    """Times, one every 3 us, and how many programs work then."""
    starts, ends = (np.sort([getattr(span, of) for span in spans]) for of in ("start", "end"))
    times = np.arange(0, ends[-1] + 3000, 3000)
    return times / 1e6, np.searchsorted(starts, times, "right") - np.searchsorted(ends, times, "right")


p, work, table = real("qwen3-30b-a3b", "backward")
_, panels = plt.subplots(2, 1, figsize=(10, 4.2), sharex=True, layout="constrained")
now = 0.0
for kind, spans in apart(p, work, table).items():
    times, programs = at_work(spans)
    panels[0].fill_between(times + now, programs, step="post", color=COLOURS[STEP_OF_KIND[kind]], linewidth=0)
    panels[0].text(now + end(spans) / 2e6, 60, kind, ha="center", rotation=90 if kind == "combine" else 0, color=INK)
    now += end(spans) / 1e6
together = played(p, work, table)
panels[1].fill_between(*at_work(together), step="post", color="#9aa0a8", linewidth=0)
for axes, ends_at, way in ((panels[0], now, "a launch a step"), (panels[1], end(together) / 1e6, "one launch")):
    axes.axvline(ends_at, color=INK, linestyle=":")
    axes.set_title(f"{way}: ends at {ends_at:.2f} ms", loc="left", fontsize=10)
    axes.set(ylabel="programs", ylim=(0, 140))
    axes.spines[["top", "right"]].set_visible(False)
panels[1].set_xlabel("ms, predicted")
plt.show()

# %% [markdown]
# You have to look closely. That is the first finding of this lesson: on one GPU the ends of launches are thin slits.

# %%
record = recorded.newest()
PRODUCTS = dict(forward=("gate_up", "down"), backward=("dact", "drows", "dw_gate_up", "dw_down"))
predicted = {}
print(f"measured: {record}")
for shape in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
    for direction in ("forward", "backward"):
        layer = real(shape, direction)
        launches_apart = apart(*layer)
        many, one = sum(map(end, launches_apart.values())) / 1e6, end(played(*layer)) / 1e6
        predicted[shape, direction] = one / many - 1
        print(f"{shape:16} {direction:9} {many:6.2f} ms apart, {one:6.2f} ms in one launch: {one / many - 1:+.1%}")
        whole = record.ms(shape, "persistent", direction)
        alone = [record.ms(shape, "persistent", product) for product in PRODUCTS[direction]]
        if whole and all(alone):
            combine = end(launches_apart["combine"]) / 1e6
            print(f"    measured {whole:.2f} ms, of which products, each alone, {sum(alone):.2f}", end="; ")
            print(f"the rest {whole - sum(alone):.2f} ms, of which combine is predicted to take {combine:.2f}")

# %% [markdown]
# (Measured is the rung below. A product alone has the end of its launch in its time, so what is left is combine, the plan
# and its table, and the gaps between launches. Each ran at clocks of its own: a rest that is smaller than combine alone
# says how much that matters.)
#
# A good one per cent at best, and a few microseconds that it takes to start a launch, which the model leaves out. Why
# bother, then? Because of what may stand in such a slit. Where experts are shared by several GPUs, rows have to travel
# between the steps, and while a launch does nothing but move them no matrix unit works. Here a tile may wait for its
# rows while others are multiplied: [lesson 5](s5_ranks.md#what-it-costs) counts how much there is to be had. Here is the
# machine for that, on one GPU, where everything can be checked. What it does for an exchange over links
# [was measured on two](../results.md#2-gpus-of-one-host).
#
# ## The idea: lagged groups
#
# Put the tiles of all steps into one table, and let programs draw its rows by ticket. A tile must not begin before the
# tiles are done that make what it reads; if they are not, the program that has drawn it waits. So what is there to
# decide? Only the order. Take the running example, four tokens and three experts, in blocks of two rows; say a gate_up
# tile takes 4 units of time, a down tile 2, a combine tile 1. First the obvious order, expert after expert:

# %%
inputs, dy = course_example(device=device)
x, topk_ids, topk_weights, w_gate_up, w_down = vars(inputs).values()
example = inputs.problem()
small = replace(mega_for(example), BLOCK_R=2, combine=Elementwise(2, 64, 1), group=1)

plan, tickets = plan_and_schedule(topk_ids, example.E, forward_work(example, small))
work, found = tickets.work, int(tickets.counters[1])  # word 0 is the ticket, word 1 the number of tiles
table = tickets.table[:found].tolist()
LENGTHS = {"gate_up": 4, "down": 2, "combine": 1}


def play_example(table, programs, lengths=None):
    lengths = lengths or [LENGTHS[KINDS[tile[KIND]]] for tile in table]
    return play(table, work, example.E, 1, [0] * example.R, by_ticket(table, 1, programs), lengths)


def simulation(table, programs=2):
    facts = {letter: getattr(example, letter) for letter in "THIEK"} | {"W": 1}
    return Simulation(facts, "forward", work, table, programs, play_example(table, programs))


expert_by_expert = sorted(table, key=lambda tile: (tile[KIND] == COMBINE, tile[EXPERT], tile[KIND]))
print(simulation(expert_by_expert).outcome())

# %% tags=["hide-input"] alt="Two programs draw the example's tiles expert by expert: down of experts 1 and 2 waits"
Picture(simulation(expert_by_expert).as_svg())

# %% [markdown]
# Hatched is waiting. Of expert 1 one program draws gate_up and the other down right after it, and waits for as long as
# gate_up takes; of expert 2 it draws down a little later, and waits for the rest. In the end combine waits for the last
# down. A program that waits with a tile does nothing else, for it cannot put the tile back.
#
# Now let each step lag one group of experts behind the step before. With groups of one expert:
#
#     turn 0   gate_up of group 0
#     turn 1   gate_up of group 1   down of group 0
#     turn 2   gate_up of group 2   down of group 1
#     turn 3                        down of group 2
#
# This is the table that a kernel has just made, on this machine, and how it goes:

# %%
print(simulation(table).as_text())

# %% tags=["hide-input"] alt="The same tiles in lagged groups: only down of the last expert waits, and combine"
Picture(simulation(table).as_svg())

# %% [markdown]
# Read a row: its kind; the rank that computes it (there is one); the expert; the number of the row block, its first row
# and how many it holds; which of the tiles side by side it is; and how many *arrivals* it has to wait for. Expert 0 has
# two row blocks, so down of expert 0 waits for two. combine waits for seven rows: that is all there are.
#
# Between a tile and what it waits for now stand the tiles of another group. How many are enough? About as many as there
# are programs: whoever draws a tile then finds that what stood so far ahead of it is done. The example is too small:
# behind its last gate_up tile nothing is left to put in between. A real layer, times as above, routed at random:

# %% tags=["hide-input"] alt="The first 0.4 ms of forward on a real layer: gate_up and down of one group after another, without waits"


def window(layer, since_ms, until_ms, title, lanes=range(0, PROCESSORS, 6)):
    """Some programs' tiles of some time."""
    p, work, table = layer
    spans, since, until = played(p, work, table), since_ms * 1e6, until_ms * 1e6
    lane_of = {program: lane for lane, program in enumerate(lanes)}
    bars = []
    for span in spans:
        if span.program in lane_of and span.end > since and span.drawn < until:
            kind = KINDS[table[span.tile][KIND]]
            times = [(min(max(t, since), until) - since) / 1e3 for t in (span.drawn, span.start, span.end)]
            label = (
                kind
                if kind == "combine"
                else f"{kind.replace('dw_gate_up', 'dw').replace('dw_down', 'dw')} {table[span.tile][EXPERT]}"
            )
            bars.append(Bar(lane_of[span.program], *times, STEP_OF_KIND[kind], label))
    names = [f"program {program}" for program in lanes]
    return Picture(svg(bars, names, title, title, f"µs since {since_ms} ms, predicted"))


layer = real("qwen3-30b-a3b", "forward", "random", group=4)
window(layer, 0, 0.4, "qwen3-30b-a3b, forward, groups of 4 experts: the first 0.4 ms on 22 of 132 programs")

# %%
print("qwen3-30b-a3b, random routing         forward                    backward")
print("experts of a group         tiles that wait      ms     tiles that wait      ms")
waits = {}
for group in (1, 2, 4, 16, 128):
    cells = []
    for direction in ("forward", "backward"):
        layer = real("qwen3-30b-a3b", direction, "random", group)
        spans = played(*layer)
        late = [span for span in spans if span.start > span.drawn]
        over_rows = [span for span in late if layer[2][span.tile][KIND] != COMBINE]
        waits[group, direction] = len(over_rows)
        cells.append(f"{len(over_rows):5} + {len(late) - len(over_rows):3} combine {end(spans) / 1e6:8.2f}")
    print(f"{group:18}         " + "    ".join(cells))

# %% [markdown]
# Forward, some combine tiles wait whatever the group: combine stands last, and waits for *all* rows of the layer, since
# a token's experts may be any. Of the lines that everybody crosses together this one is left. Backward has something
# to put there. A weight gradient sums over all rows of its expert and belongs to that expert alone. So weight gradients
# stand at the end, longest expert first as in lesson 4, and combine tiles (they make dx) are woven in between. Below,
# blue is dx and then dw_gate_up, orange is dw_down, and yellow combine; the numbers are experts.

# %% tags=["hide-input"] alt="Where the products over rows end and the tail begins: combine tiles stand among the weight gradients, and hardly anybody waits"
layer = real("qwen3-30b-a3b", "backward", "random")
last_dx = max(span.end for span in played(*layer) if KINDS[layer[2][span.tile][KIND]] == "dx") / 1e6
since = round(last_dx - 0.15, 2)
window(layer, since, since + 0.4, "qwen3-30b-a3b, backward: where the tail begins")

# %% [markdown]
# Over ranks a turn has a phase more, dispatch, and a program that fetches rows over a link multiplies nothing. If all
# dispatch tiles stood together, all programs would fetch at once, where a few fill the link, and then all would multiply
# while the link rests. So over ranks the phases of a turn are *mixed* evenly, and groups are small. That order was found
# with a simulator like this one, to which links were added: [scaling](../scaling.md).
#
# ## The protocol
#
# Three moves, and there are no others. All of them are in one file, `mega_moe/kernels/signal.py`.
#
# **1. Draw a ticket.** One atomic addition, as in lesson 4. The ticket is a row of the table. (In the kernel, two
# tickets ahead.)
#
# **2. Wait.** If the tile's row says `arrivals`, look at a counter until it shows that many.
#
# **3. Compute, then signal.** When the tile's bytes are stored, add to the counter of those who wait for them.
#
# Which counter? Every phase of every expert has one, where tiles are counted; and one more counts the rows that are
# ready for combine. For the example:


# %%
def counter_in_words(counter):
    if counter is None:
        return "nothing"
    phase, expert = divmod(counter, example.E)
    return "rows" if phase == len(work.phases) else f"{KINDS[work.phases[phase].kind]} of expert {expert}"


homes = [0] * int(plan.row_start[-1])  # of each row the rank of its token: there is one rank
print(f"{'tile':4} {'':32} {'waits for':26} {'adds to'}")
for n, tile in enumerate(table):
    waited = counter_in_words(counter_of(tile, example.E, work))
    waited += f", {tile[ARRIVALS]}" if tile[ARRIVALS] else ""
    # To `rows` it adds as many as it has stored. What nobody waits for (down's own counter) is not kept.
    added = [s for s in signals_of(tile, example.E, work, homes) if counter_in_words(s[0])[:4] != "down"]
    adds = ", ".join(f"{counter_in_words(counter)}: +{by}" for counter, by in added)
    print(f"{n:4} {in_words(tile):32} {waited:26} {adds}".rstrip())

# %% [markdown]
# Draw the tiles in the order of tickets, and an arrow from each to those it waits for:

# %% tags=["hide-input"] alt="The ten tiles in the order of tickets; every arrow to what a tile waits for points to the left"
_, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
for n, tile in enumerate(table):
    kind, combine = KINDS[tile[KIND]], tile[KIND] == COMBINE
    colour = COLOURS[STEP_OF_KIND[kind]]
    axes.add_patch(plt.Rectangle((n - 0.46, -0.55), 0.92, 1.1, facecolor=colour, edgecolor="white"))
    text = f"{kind}\n" + (f"tokens {tile[ROW]}, {tile[ROW] + 1}" if combine else f"expert {tile[EXPERT]}")
    axes.text(n, 0, text, ha="center", va="center", fontsize=9, color="white" if kind == "gate_up" else "black")
    axes.text(n, -0.85, str(n), ha="center", va="center", fontsize=9, color=INK)
    awaited = counter_of(tile, example.E, work)
    for earlier, other in enumerate(table):
        if awaited is not None and awaited in [c for c, _ in signals_of(other, example.E, work, homes)]:
            assert earlier < n
            above = dict(arrowstyle="-|>", color=colour, shrinkA=0, shrinkB=0, linewidth=1.3, mutation_scale=10)
            bend = "arc3,rad=" + ("0.45" if not combine else "-0.35")
            y = 0.57 if not combine else -1.05
            axes.annotate("", (earlier + 0.1, y), (n - 0.1, y), arrowprops=above | dict(connectionstyle=bend))
axes.text(-0.7, -0.85, "ticket", ha="right", va="center", color=INK, fontsize=9)
axes.set(xlim=(-1.2, len(table) - 0.4), ylim=(-2.7, 2.0))
axes.axis("off")
plt.show()

# %% [markdown]
# **Every arrow points backwards**, to a lower ticket. That is all it takes for a launch to end. Look at the lowest
# ticket that is not done. It has been drawn, or it is the next to be. All it waits for is lower, so it is done. So this
# tile runs, whatever the others do, and then the next is the lowest. The argument asks for no number of programs: one
# is enough, and if something else occupies half of the GPU, it still holds. Nor does it matter that programs draw two
# tickets ahead: each does its own in ascending order. But tickets do have to be *drawn*. Had every program a list of
# its own, the lowest tile might belong to a program that the GPU has not started yet, and will not start before one has
# ended that waits for this tile.

# %%
forwards = [*table[:3], table[-1], *table[3:-1]]  # a combine tile at place 3, so its waits point forwards
for order, tried in (("every wait points backwards", table), ("combine at place 3", forwards)):
    for programs in (1, 2, 7):
        try:
            outcome = f"ends at {end(play_example(tried, programs))}"
        except Deadlock as deadlock:
            outcome = f"never ends: {deadlock}"
        print(f"{order:28} programs: {programs}   {outcome}")

# %% [markdown]
# With arrows forwards it depends on luck: with one program the launch never ends, with two it does.
#
# ### A wait is more than a look
#
# ```python
# --8<-- "mega_moe/kernels/signal.py:wait"
# ```
#
# ```python
# --8<-- "mega_moe/kernels/signal.py:signal"
# ```
#
# A GPU's threads and caches see each other's stores late, and in any order, unless told otherwise. So between "I have
# stored act" and "I may load it" stands a chain, and each link is there for somebody:
#
# - **The barrier in `signal`.** A tile is stored by 256 threads, and one of them adds to the counter. Without the
#   barrier it might do so while others are still storing.
# - **`release`, and `acquire`.** Who sees the counter with the addition in it sees also what was stored before. Without
#   them a counter is a number, not a message: a ticket, in short, which is drawn `relaxed`.
# - **The barrier in `wait`.** One thread has seen the counter; the barrier makes it good for all. And it holds back the
#   compiler: that may move a load above an acquire, not above a barrier.
# - **The fence.** act and dpre are loaded by the copy engine (TMA, lesson 4), which has a way to memory of its own, and
#   what orders threads does not order it. Who has stored fences before the signal, who asks for a copy fences after the
#   wait. Slots are loaded by threads: `FENCE` is False there.
#
# Counters only grow, so a wait that is over stays over: nobody can come too late and miss it.
#
# ## The kernel
#
# Here is forward. It calls the same functions for a strip as lesson 4's kernels, since these are told where a tile lies
# and do not ask who found it. What is new is who calls them, and when. (`stamp`, `clock_in` and `clock_out` note the
# time where somebody wants a [trace](#your-own-layer); otherwise they compile to nothing.)
#
# ```python
# --8<-- "mega_moe/kernels/mega.py:forward"
# ```
#
# Backward has the same form and more kinds; each is compiled in only where its gradient is wanted:
#
# ??? abstract "Backward"
#     ```python
#     --8<-- "mega_moe/kernels/mega.py:backward"
#     ```
#
# ??? abstract "What a ticket means, and combine"
#     ```python
#     --8<-- "mega_moe/kernels/mega.py:look_up"
#     --8<-- "mega_moe/kernels/mega.py:combine"
#     ```
#
# The schedule is made on the device, from row_start, without anything being read on the host. No list is needed for it:
# a tile's place is the number of tiles before it, which are whole phases of some groups (over ranks, where they are
# mixed, a share of each), its own phase's tiles of lower experts, and those of its own expert. That is a few sums over
# experts, and so any program can put any tile into its place. `mega_moe/schedule.py` is the same in plain Python, and
# the two are equal to the bit:

# %%
with torch.device("cpu"):
    specified = schedule(plan.row_start.cpu(), [example.T], [len(homes)], work).tolist()
print("the kernel's table is the specified one:", table == specified)
assert table == specified

# %% [markdown]
# ??? abstract "The kernel that puts tiles into their places"
#     ```python
#     --8<-- "mega_moe/kernels/schedule.py:places"
#     --8<-- "mega_moe/kernels/schedule.py:kernel"
#     ```
#
# Forward needs a plan before it needs a schedule, and one launch makes both, by the same three moves: a ticket is a
# chunk of routes to count, or to place, or a part of the schedule to write. (Lesson 1's plan takes two launches.)
#
# ## Without a wait
#
# What if a wait is forgotten? Running the kernel would not tell us here: the interpreter runs programs one after
# another, and the first draws all tickets, so everything is always there. Therefore we take the simulator's word for
# *when* each tile begins and ends, and do in plain torch what the tile does: it loads when it begins, and stores when
# it ends. All memory is poisoned with NaN at first.


# %%
def computed(spans, table):
    """y of the example, if tiles load at `start` and store at `end`."""
    act, slots, y = torch.full((7, 1), torch.nan), torch.full((4, 2, 2), torch.nan), torch.full((4, 2), torch.nan)

    def load_and_multiply(tile):
        kind, e, rows = KINDS[tile[KIND]], tile[EXPERT], slice(tile[ROW], tile[ROW] + tile[ROWS])
        if kind == "gate_up":
            gate, up = (x[plan.token_of_row[rows].long()] @ w[e].T for w in (w_gate_up[:, 0], w_gate_up[:, 1]))
            return act, rows, gate.sigmoid() * gate * up
        if kind == "down":
            return slots, (plan.token_of_row[rows].long(), plan.slot_of_row[rows].long()), act[rows] @ w_down[e].T
        live = (topk_ids[rows] >= 0)[..., None]
        return y, rows, torch.where(live, topk_weights[rows][..., None] * slots[rows], 0.0).sum(1)

    under_way = {}
    # At one time, who stores comes before who loads: that is what the wait is for.
    for _, begins, n in sorted([(s.start, 1, s.tile) for s in spans] + [(s.end, 0, s.tile) for s in spans]):
        if begins:
            under_way[n] = load_and_multiply(table[n])
        else:
            memory, at, result = under_way.pop(n)
            memory[at] = result
    return y


def without(kind, table):
    """The same tiles; those of one kind wait for nothing."""
    return [[*tile[:ARRIVALS], 0] if KINDS[tile[KIND]] == kind else tile for tile in table]


right, _ = reference.forward(example, inputs)
print(f"{'programs':10}{'every wait':>14}{'down does not wait':>30}{'combine does not wait':>30}")
for programs in (1, 2, 3, 4):
    cells = []
    for tried in (table, without("down", table), without("combine", table)):
        y = computed(play_example(tried, programs), tried)
        poisoned = y.isnan().any(1).nonzero().flatten().tolist()
        cells.append(f"NaN in tokens {poisoned}" if poisoned else "right")
        assert poisoned or torch.allclose(y, right)
        assert tried is not table or not poisoned
    print(f"{programs:<10}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, (14, 30, 30))))

# %% [markdown]
# With one program the fault does not show. Nor would NaN be there outside a test: memory usually holds the last step's
# act, at the same place, plausible numbers and wrong. So faults of this sort are looked for with poison, and with
# programs whose speeds differ. Let tiles take random times, a hundred times over, in the schedule's order and expert by
# expert:


# %%
def poisoned_runs(table, programs):
    dice = random.Random(programs)
    runs = [play_example(table, programs, [dice.choice([1, 2, 5, 20]) for _ in table]) for _ in range(100)]
    return sum(computed(spans, table).isnan().any().item() for spans in runs)


print(f"{'of 100 runs poisoned, programs:':44}" + "".join(f"{programs:6}" for programs in (1, 2, 3, 4)))
for fault in (None, "down", "combine"):
    for order, tiles_in_order in (("lagged groups", table), ("expert by expert", expert_by_expert)):
        counts = [poisoned_runs(without(fault, tiles_in_order), programs) for programs in (1, 2, 3, 4)]
        words = f"{fault} does not wait" if fault else "every wait"
        print(f"{words:24}{order:20}" + "".join(f"{count:6}" for count in counts))
        assert fault or not any(counts)

# %% [markdown]
# The farther the order keeps tiles apart that depend on each other, the more seldom the missing wait is missed. On a
# real layer, with groups that leave nobody waiting, the result may be right every time, until a program is late.
#
# You can do all of this by hand: [step through this schedule](../stepper.md), take waits away, and turn its order round.
#
# ## Two tables that deadlock each other
#
# One more property of the order is not needed on one GPU, but built in: the schedule is made for any number of *ranks*,
# and is one table for all of them. (A rank is a device with some of the experts and some of the tokens; the table says
# in its column `rank` who computes a tile, and each rank draws its own. Where all ranks are in one process, its programs
# draw the whole table; where each has its own, it makes its part of the table, in the same order.) Could each rank order its tiles as it likes, as long as its own waits point backwards?
#
# Two ranks with two experts each. Rank 0's tokens all go to expert 2, which is rank 1's; rank 1's tokens all go to
# expert 1, which is rank 0's. combine of a rank waits for rows from the other. Say rank 0 takes its groups in ascending
# order, rank 1 in descending order, and each moves its combine tile up to where its last row is made:

# %%
W, E = 2, 4
swapped_ids = torch.tensor([[2, 2], [2, 2], [1, 1], [1, 1]], device="cpu")  # tokens 0, 1 of rank 0; 2, 3 of rank 1
phases = (Phase(KINDS.index("gate_up"), 1), Phase(KINDS.index("down"), 1))
shared = Work(BLOCK_R=4, phases=phases, weight_grads=(), waits_for=0, combine=True, BLOCK_T=2, group=1, ahead=0)
with torch.device("cpu"):
    swapped = routing.plan(swapped_ids, E)
    homes_of_two = home_of_row(swapped, (2, 2)).tolist()
    both = schedule(swapped.row_start, (2, 2), (4, 4), shared).tolist()


def group_of(tile):
    """The group that a tile belongs to; of combine, the group that makes its rows.

    Expert 2, for rank 0, is the first of its rank, and expert 1, for rank 1, the second.
    """
    return tile[RANK] if tile[KIND] == COMBINE else tile[EXPERT] % (E // W)


def in_order(groups, combine_last):
    """The numbers of all tiles, group by group."""
    key = lambda n: (
        combine_last and both[n][KIND] == COMBINE,
        groups.index(group_of(both[n])),
        both[n][KIND] == COMBINE,
        n,
    )
    return sorted(range(len(both)), key=key)


def play_ranks(orders):
    """One program a rank, which draws that rank's tiles in that rank's order."""
    draws = [iter([n for n in order if both[n][RANK] == rank]) for rank, order in enumerate(orders)]
    try:
        spans = play(both, shared, E, W, homes_of_two, draws, [1] * len(both))
        return f"ends at {end(spans)}"
    except Deadlock as deadlock:
        return f"DEADLOCK: {deadlock}"


ascending, descending = in_order([0, 1], False), in_order([1, 0], False)
outcomes = {
    "both ascending": play_ranks([ascending, ascending]),
    "both descending": play_ranks([descending, descending]),
    "one ascending, one descending": play_ranks([ascending, descending]),
    "the same, combine last": play_ranks([in_order([0, 1], True), in_order([1, 0], True)]),
}
for orders, outcome in outcomes.items():
    print(f"{orders:31} {outcome}")
assert ["DEADLOCK" in outcome for outcome in outcomes.values()] == [False, False, True, False]

# %% tags=["hide-input"] alt="Each rank's combine tile stands before the tiles that the other rank's combine waits for: the arrows make a circle"
_, axes = plt.subplots(figsize=(10, 2.6), layout="constrained")
places = {}
for rank, order in enumerate((ascending, descending)):
    axes.text(-0.7, -1.6 * rank, f"rank {rank}", ha="right", va="center", color=INK)
    for at, n in enumerate([n for n in order if both[n][RANK] == rank]):
        kind = KINDS[both[n][KIND]]
        places[n] = at, -1.6 * rank
        style = dict(facecolor=COLOURS[STEP_OF_KIND[kind]], edgecolor="white")
        axes.add_patch(plt.Rectangle((at - 0.47, -1.6 * rank - 0.3), 0.94, 0.6, **style))
        label, ink = kind if kind == "combine" else f"{kind}, expert {both[n][EXPERT]}", "black"
        axes.text(at, -1.6 * rank, label, ha="center", va="center", color="white" if kind == "gate_up" else ink)
waits_for = dict(arrowstyle="-|>", color=INK, linewidth=1.4, shrinkA=0, shrinkB=0, mutation_scale=11)
for n, tile in enumerate(both):
    if tile[KIND] == COMBINE:
        rank = tile[RANK]
        for m, other in enumerate(both):
            if KINDS[other[KIND]] == "down" and other[RANK] != rank:
                (x0, y0), (x1, y1) = places[n], places[m]
                down = 0.3 if rank == 0 else -0.3
                axes.annotate("", (x1 - 0.2, y1 + down), (x0 + 0.2, y0 - down), arrowprops=waits_for)
axes.set(xlim=(-1.2, 2.7), ylim=(-2.1, 0.5))
axes.axis("off")
plt.show()

# %% [markdown]
# Each table is right by itself: for each there is an order of *all* tiles in which every wait points backwards. But it
# is not the same order. Each rank waits in combine before it has done what the other waits for.
#
# The last line of the output is as important: with combine at the end, different orders of groups alone do no harm
# here. Only combine waits for another rank, and on every rank all that another may wait for stands before combine. But
# that is an argument about one schedule, to be made again whenever a tile is moved. With one common order there is
# nothing to argue: every wait points backwards, and the lowest tile can always run.
#
# ## The recipe, and what changed in it
#
# Below, `-` is lesson 4's stage file and `+` this one's. What was a row of launches is a table and a launch. (`LAUNCHES`
# says which: this rung also multiplies 8-bit codes, where the launches are others, and backward's tokens are quantised
# by dispatch tiles.)

# %% tags=["hide-input", "diff"]
stages = [inspect.getsource(module) for module in (s4_persistent, s6_mega)]
code = [source.split("\nfrom torch import Tensor\n")[1].splitlines() for source in stages]
for line in list(difflib.unified_diff(*code, n=1, lineterm=""))[2:]:
    print("" if line.startswith("@@") else line)

# %% [markdown]
# ## The example, once more

# %%
y, saved = mega.forward(example, inputs)
grads = mega.backward(example, inputs, saved, dy)
print(f"y\n{y}\n\ndtopk_weights\n{grads.dtopk_weights}\n\ndx\n{grads.dx}\n\ndw_down\n{grads.dw_down.squeeze(-1)}")

y_below, saved = reference.forward(example, inputs)
grads_below = reference.backward(example, inputs, saved, dy)
for ours, theirs in zip([y, *grads.tensors()], [y_below, *grads_below.tensors()]):
    torch.testing.assert_close(ours, theirs)

# %% [markdown]
# The numbers of all lessons before.
#
# ## Is it right?
#
# Now in bf16, as shares of the [budget](../parity.md). And beside the rung below: the tiles here are the same sizes, their
# functions are the same, and each sum has one owner and one order. So the results should be equal in every bit, and they
# are.

# %%
problem = PRESETS["tiny"].at(device=device)
inputs, tiny_dy = random_inputs(problem)
oracle = Oracle(problem, inputs, tiny_dy)
results, counts = {}, {}
for rung in (persistent, mega):
    tiny_y, saved = rung.forward(problem, inputs)
    results[rung.name] = [tiny_y, *rung.backward(problem, inputs, saved, tiny_dy).tensors()]
    counts[rung.name] = [
        launches(lambda: rung.forward(problem, inputs), device),
        launches(lambda: rung.backward(problem, inputs, saved, tiny_dy), device),
    ]
verdict = oracle.check(tiny_y, rung.backward(problem, inputs, saved, tiny_dy))
print(*(f"{name} {share:.2f}  " for name, share in verdict.shares.items()), "passed" if verdict.passed else "FAILED")
assert verdict.passed
equal = all(torch.equal(ours, theirs) for ours, theirs in zip(results["mega"], results["persistent"]))
print("the same bits as on the rung below:", equal)
assert equal or device == "cuda"  # on a GPU the rungs' tiles may differ in size
for name, (forward, backward) in counts.items():
    print(f"\n{name}: {len(forward)} launches forward, {len(backward)} backward")
    print(f"    {', '.join(forward)}\n    {', '.join(backward)}")
assert [len(names) for names in counts["mega"]] == [2, 2]

# %% [markdown]
# Two launches a direction: one that says what is to be done, and one that does it. (They are counted on a second call.
# The first on a stream also makes four words of zeros for the plan's tickets and counters, and so does a CUDA graph.)
#
# ## What it costs
#
# **Memory.** A recipe of many launches frees between them what nobody needs any more. Within one launch nobody can:
# from the first tile to the last everything has its place, since any tile may be anybody's next. Forward that changes
# nothing, as act lives until its end on the rung below too. Backward it does. Counted for one layer of Qwen3-30B-A3B,
# as in [lesson 3](s3_gather.md), beyond the inputs:

# %%
ALIVE = {  # during each launch of the rung below; and in the one launch. pre and y are autograd's, and stay
    "persistent": {
        "dact": "dpre weighted_act",
        "dx": "dpre weighted_act slots",
        "combine": "dpre weighted_act slots dx",
        "dw_gate_up": "dpre weighted_act dx dw_gate_up",
        "dw_down": "weighted_act dx dw_gate_up dw_down",
    },
    "mega": {"backward": "dpre weighted_act slots dx dw_gate_up dw_down"},
}


def sizes(p):
    """MiB of each tensor. What lies in blocks has room for a padded block an expert."""
    in_blocks = (p.R // tiles.BLOCK_R + p.E) * tiles.BLOCK_R
    elements = dict(y=p.T * p.H, dx=p.T * p.H, pre=2 * p.R * p.I, slots=p.R * p.H)
    elements |= dict(dpre=2 * in_blocks * p.I, weighted_act=in_blocks * p.I)
    elements |= dict(dw_gate_up=2 * p.E * p.I * p.H, dw_down=p.E * p.I * p.H)
    return {name: number * p.dtype.itemsize / 2**20 for name, number in elements.items()}


def peak(p, name):
    """MiB at the worst moment of backward, and which launch that is."""
    MiB = sizes(p)
    return max((sum(MiB[n] for n in f"y pre {alive}".split()), launch) for launch, alive in ALIVE[name].items())


for shape in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
    for name in ALIVE:
        MiB, launch = peak(PRESETS[shape], name)
        taken = record.peak_MiB(shape, name)
        words = f"measured {taken:5.0f}" if taken else "not recorded yet"
        print(f"{shape:16} {name:10} counted {MiB:5.0f} MiB, in {launch + ',':11} {words}")

# %% tags=["hide-input"] alt="MiB alive during each launch of backward on the rung below, and in the one launch, where all are alive at once"
GROUPS = {
    "y and gradients": ("#9aa0a8", "y dx dw_down dw_gate_up"),
    "pre": ("#2e6f9e", "pre"),
    "dpre, weighted act": ("#7fb0d3", "weighted_act dpre"),
    "slots": ("#b89b2f", "slots"),
}
MiB = sizes(PRESETS["qwen3-30b-a3b"])
columns = [(launch, alive) for name in ALIVE for launch, alive in ALIVE[name].items()]
bottom = [0.0] * len(columns)
_, axes = plt.subplots(figsize=(10, 3.4), layout="constrained")
for label, (colour, names) in GROUPS.items():
    heights = [sum(MiB[n] for n in names.split() if n in f"y pre {alive}".split()) for _, alive in columns]
    places = [*range(len(columns) - 1), len(columns) - 0.5]
    axes.bar(places, heights, 0.96, bottom, color=colour, edgecolor="white", label=label)
    bottom = [b + h for b, h in zip(bottom, heights)]
for at, top in zip(places, bottom):
    axes.text(at, top + 30, f"{top:.0f}", ha="center", color=INK)
axes.set_xticks(places, [*(launch for launch, _ in columns[:-1]), "mega: backward"])
axes.set(ylabel="MiB", ylim=(0, 3400), title="qwen3-30b-a3b, backward, over the inputs")
axes.legend(frameon=False, ncols=4, loc="upper left")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# **The schedule.** Made in the launch of the plan, both take 0.043 ms on an H200, where the plan alone takes 0.024 in
# two launches and the rung below's tile table 0.005; backward's schedule takes 0.005 to 0.007.
#
# **The choice of tiles.** One launch has one number of warps, and one number of pipeline stages, for all its tiles.
#
# ## Is it fast?
#
# By the model at the beginning one launch should be up to some one per cent faster. Measured:

# %% tags=["hide-input"]
SHAPES, RUNGS = ("qwen3-30b-a3b", "qwen3-235b-a22b"), ("persistent", "mega")
measured = {(s, rung, d): record.ms(s, rung, d) for s in SHAPES for rung in RUNGS for d in roofline.DIRECTIONS}
print(record if all(measured.values()) else "The newest record does not have both rungs")
print(f"\n{'':16} {'':10} {'persistent':>12} {'mega':>8} {'change':>8} {'by the model':>13}")
for shape in SHAPES if all(measured.values()) else ():
    for direction in roofline.DIRECTIONS:
        below, here = (measured[shape, rung, direction] for rung in RUNGS)
        foreseen = predicted[shape, direction]
        print(f"{shape:16} {direction:10} {below:9.2f} ms {here:8.2f} {here / below - 1:+8.1%} {foreseen:+13.1%}")
    below, here = (sum(measured[shape, rung, d] for d in roofline.DIRECTIONS) for rung in RUNGS)
    print(f"{shape:16} {'both':10} {below:9.2f} ms {here:8.2f} {here / below - 1:+8.1%}   speed {below / here:.2f}")

# %% [markdown]
# A negative result: in the run of 2026-11-30 this rung runs on one GPU at 0.94 of the speed of the rung below on the
# smaller layer, and at 0.99 on the larger. (An earlier run, of CUDA graphs, had 0.97 and 0.95: runs differ by as much as
# the rungs do. All eight lines of the two point the same way.)
#
# Not because tiles are kept back. `mega-moe trace` on an H200, smaller layer, random routing: of 2.34 ms forward the
# programs waited 2.3 %, of 5.17 ms backward 3.1 %. But a wait took 0.7 µs in the median and, but for combine's, never 2:
# that is what it takes to look at a counter that has long been there. So the order of the schedule holds nobody up, and
# each tile pays for asking. Another 3 % went between tiles, into tickets and look-ups. ([Both traces](../timeline.md) are
# among the timelines.) Groups of 2, 4, 8 or 16 experts changed forward by 0.06 ms.
#
# What the model leaves out is also a thing that the rung below can do, and this one cannot.
#
# There, down takes strips of four tiles and dx strips of two, *flattened*: one loop over the tiles of a strip and their
# steps, so that the loads of a tile begin under the epilogue of the one before. Here a strip is one tile. Flattened
# loops beside other products in one kernel make ptxas serialise the matrix instructions (it says so: C7512): each waits
# for the one before, where they should overlap. What is flattening worth? By the same round figures, at most this, if a
# strip pays its fixed cost once:

# %%
print(f"{'':25}{'predicted, up to':>22}{'measured':>20}")
print(f"{'':25}{'ends gain':>10}{'seams cost':>12}{'mega - persistent':>20}   pipeline stages below, here")
for shape in SHAPES if all(measured.values()) else ():
    p = PRESETS[shape]
    below = nearest("sm_90", p.H, p.I).tiles
    for direction, kind, columns, kinds, of in (
        ("forward", "down", p.H, ("gate_up", "down"), "gate_up"),
        ("backward", "dx", p.H, ("dact", "dx", "dw_gate_up", "dw_down"), "dact"),
    ):
        strip = getattr(below, kind).STRIP
        seams = p.R // 128 * (columns // 256) * (1 - 1 / strip) * 5e-3 / PROCESSORS
        ends_of_launches = -predicted[shape, direction] * measured[shape, "persistent", direction]
        more = measured[shape, "mega", direction] - measured[shape, "persistent", direction]
        depths = ", ".join(str(getattr(below, k).num_stages) for k in kinds), getattr(tiles, of).num_stages
        print(
            f"{shape:16} {direction:8}{ends_of_launches:7.2f} ms{seams:9.2f} ms{more:+17.2f} ms"
            f"   {depths[0]:>14}{depths[1]:>6}"
        )

# %% [markdown]
# So the seams of one product can cost more than all ends of launches together. On the larger layer the measurements
# lie between the two, as they should if flattening hides a part of the 5 µs. On the smaller one both directions lose a
# little more than seams explain. What else differs is the last column: on the rung below each kernel has the number of
# pipeline stages that was the fastest for it, and here a direction has one. What that costs was not measured apart.
#
# These were tried, and did not help ([the figures](../measuring.md#what-was-tried)):
#
# - *Groups of 2*, so that less passes through the L2 cache between gate_up and down: no faster than groups of 4, 8 or
#   16 forward, and slower backward.
# - *Weight gradients in tiles of 128 × 256* instead of 256 × 128: 6 % slower backward on the larger layer.
# - *Looking up a row one tile ahead* in backward, as forward does: no difference in what the compiler spills.
#
# ## The flag
#
# If you train on one GPU, use `stage="persistent"`, which is why it is the default. This rung is the one to build on.

# %%
torch.manual_seed(0)
layer = MoE(hidden_size=16, intermediate_size=12, num_experts=3, top_k=2, device=device)
tokens = torch.randn(4, 16)
for name in ("persistent", "mega"):
    layer.stage = name
    layer.zero_grad()
    loss = layer(tokens).square().mean()
    loss.backward()
    norm = layer.experts.down_proj.grad.norm()
    print(f'stage="{layer.stage}": loss {loss.item():.6f}, norm of the gradient of down_proj {norm.item():.6f}')

# %% [markdown]
# ## Your own layer
#
# ```sh
# mega-moe schedule                                                     # the small layer: its table, and how it goes
# mega-moe schedule --shape qwen3-30b-a3b --direction backward --routing zipf --programs 132
# mega-moe schedule --shape 64,64,48,8,2 --ranks 2 --plot schedule.svg
# ```
#
# It takes this machine's block sizes, counts in steps of products, and draws what you have seen above. How it really
# went is what `mega-moe trace` tells: the kernel itself notes of each tile when its program turned to it, when its wait
# was over and when it was done. That wants a GPU; in the interpreter it shows the order of tiles and nothing else.
#
# ```sh
# mega-moe trace --shape qwen3-30b-a3b --direction backward --plot trace.svg
# ```
#
# ## Exercises
#
# **1.** All experts in one group: which order of tiles is that? The model above says that hardly anybody waits then. So
# why have groups at all? Count, for Qwen3-30B-A3B forward, balanced, what passes through the cache between a row block's
# gate_up and its down: what tiles store (pre and act, or slots), and the weights that they read. How many MB are that for
# groups of 1 and of 2 experts, and how many GB for one group of all? Which of them would an L2 cache of 50 MB hold?
#
# ??? success "Answer"
#     All gate_up tiles, then all down tiles, then combine: the order of the rung below, only that no line is drawn
#     between them. Small groups are for the cache. Between gate_up and down of a row block stand the tiles of one group
#     of both kinds, and of its own group what is left: some 29 MB for each expert of a group. With groups of 1 act might
#     still be in the cache, but then many tiles wait; with groups of 2, 58 MB pass, and with one group for all 1.4 GB. So
#     whoever wants no waits cannot count on the cache here. It hardly matters: to read all of act from memory takes an
#     H200 0.04 ms. Nor did it when measured.

# %% tags=["solution"]
answer = dict(one_MB=29, two_MB=58, all_GB=1.4, held=[1])

p, work_of_layer, _ = real("qwen3-30b-a3b", "forward")
stored = {"gate_up": 128 * 128 * 3 * 2, "down": 128 * 256 * 2, "combine": 0}  # bytes of a tile: pre and act; slots
weights = {"gate_up": 2 * p.I * p.H * 2, "down": p.H * p.I * 2}  # of an expert
between_MB = {}
for group in (1, 2, 4, 128):
    _, _, of_layer = real("qwen3-30b-a3b", "forward", group=group)
    block = (p.E // 2 // group * group if group < p.E else 0) * 8  # the first row block of a group in the middle
    made = max(n for n, t in enumerate(of_layer) if t[BLOCK] == block and KINDS[t[KIND]] == "gate_up")
    used = min(n for n, t in enumerate(of_layer) if t[BLOCK] == block and KINDS[t[KIND]] == "down")
    between = of_layer[made:used]
    visited = {(KINDS[t[KIND]], t[EXPERT]) for t in between}
    total = sum(stored[KINDS[t[KIND]]] for t in between) + sum(weights[kind] for kind, _ in visited)
    between_MB[group] = total / 1e6
check(
    answer,
    dict(
        one_MB=round(between_MB[1]),
        two_MB=round(between_MB[2]),
        all_GB=between_MB[128] / 1e3,
        held=[group for group, MB in between_MB.items() if MB < 50],
    ),
    see=dict(
        one_MB=("The idea: lagged groups", "the tiles of one expert, both kinds: what they store, and its weights"),
        two_MB=("The idea: lagged groups", "twice as many experts stand between"),
        all_GB=("The idea: lagged groups", "all gate_up tiles stand between"),
        held=("The idea: lagged groups", "which of them are below 50 MB? A list of group sizes"),
    ),
)
for group, MB in between_MB.items():
    print(f"groups of {group:3}: {MB:5.0f} MB between a block's gate_up and down")
assert p.R * p.I * 2 / roofline.ceiling("NVIDIA H200").gb_per_s / 1e6 < 0.045  # ms to read act
_, _, one_group = real("qwen3-30b-a3b", "forward", group=p.E)
kinds = [tile[KIND] for tile in one_group]
assert kinds == sorted(kinds) and waits[128, "forward"] <= waits[1, "forward"]

# %% [markdown]
# **2.** Programs could do without tickets: of P programs, program n takes tiles n, n + P, n + 2P, ... of the table. Does
# that come to its end if the GPU runs all P at once? And if it holds only some of them, and starts another where one ends?
#
# ??? success "Answer"
#     With all at once it does. Take the lowest tile that is not done: its program has done all its lower tiles, so it is
#     at this one, and all this one waits for is done. If only some are there, the lowest tile may belong to a program
#     that has not started. Those that run wait for it, do not end, and make no room: a deadlock. With tickets no tile
#     belongs to anybody before it is drawn.

# %% tags=["solution"]
answer = dict(all_at_once=True, some_at_once=False)


def comes_to_its_end(draws, resident=None):
    lengths = [LENGTHS[KINDS[tile[KIND]]] for tile in table]
    try:
        return len(play(table, work, example.E, 1, homes, draws, lengths, resident=resident)) == len(table)
    except Deadlock as deadlock:
        deadlocks.append(str(deadlock))
        return False


deadlocks = []
dealt = lambda programs: [iter(range(n, len(table), programs)) for n in range(programs)]
(all_at_once,) = {comes_to_its_end(dealt(programs)) for programs in range(1, 9)}
check(
    answer,
    dict(all_at_once=all_at_once, some_at_once=comes_to_its_end(dealt(8), resident=2)),
    see=dict(
        all_at_once=("The protocol", "take the lowest tile that is not done: what may its program wait for?"),
        some_at_once=("Two tables that deadlock each other", "whose is the lowest tile, if its program has not begun?"),
    ),
)
assert comes_to_its_end(by_ticket(table, 1, 8), resident=2)  # with tickets it always does
print(*deadlocks, sep="\n")
assert len(COLUMNS) == 8

# %% [markdown]
# ## What comes next
#
# [Lesson 7](s7_warp.md) takes up what [lesson 4](s4_persistent.md#is-it-fast) left over, operands that the multiplying
# threads must fetch: there warps have different jobs. It is for one kind of GPU, so the portable ladder ends here. These
# are ideas, not promises; each would be a rung if it held what it says.
#
# - **Links.** This rung is made for rows that travel while others are multiplied. Over
#   [two GPUs](../results.md#2-gpus-of-one-host) it is ahead of launches apart on one layer and behind on the other, where
#   its tiles take longer than alone. Why, is the next thing to find out; what eight would gain is
#   [predicted](../scaling.md).
# - **Less to send.** A token whose experts share a rank could travel once ([an exercise of lesson 5](s5_ranks.md#exercises)
#   counts it), or in eight bits.
# - **Less to multiply.** Products of 8 bits are [in the mathematics](../math.md#in-8-bits) and on some rungs. A smaller last
#   block would spare part of the padding.
# - **Other GPUs.** Block sizes were measured on one type of GPU. `mega-moe tune` measures on yours.
#
# To try one of them: [how to add a rung](../design.md#the-ladder) takes four files, and every test, table and benchmark
# of the ladder then has it. If you only came to learn: [the comparison](../comparison.md) says whose kernels to read next,
# and what they do better.
