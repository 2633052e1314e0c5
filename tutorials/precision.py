# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Precision · 8 bits
#
# A matrix unit multiplies 8-bit numbers twice as fast as 16-bit ones, and they take half the memory on their way there.
# But 8 bits are 256 codes, and a tensor of activations or gradients spans more than they reach. This lesson is about
# what stands between the two: *scales*. It goes along `reference/quantize.py`, which is the specification of
# `precision=` on every rung that has it.
#
# You will learn
#
# - what an 8-bit number can hold, and what is lost in it: 2.6 % of a tensor, if nothing goes wrong;
# - why a scale belongs to a block, how large blocks are, and why they lie along the contraction;
# - where scales live, and why some tensors are quantised twice;
# - what breaks: zeros, tiny and huge numbers, outliers, NaN;
# - what it costs to make the 8 bits, and what there is to gain.
#
# You need [lesson 0](s0_reference.md), and for the launches near the end [lesson 4](s4_persistent.md).

# %%
import json
import os
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when it is imported, below

import mega_moe
from mega_moe import Problem, reference, roofline
from mega_moe.exercises import check
from mega_moe.launches import launches
from mega_moe.parity import Oracle
from mega_moe.reference.forward import combine, dispatch, gate_up, swiglu
from mega_moe.reference.quantize import FP8, MX, PRECISIONS, Format, block_of, e8m0_scale, fp32_scale, quantise
from mega_moe.reference.routing import plan as plan_of
from mega_moe.registry import stage
from mega_moe.samples import random_inputs
from mega_moe.shapes import PRESETS

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_default_device(device)
torch.set_printoptions(precision=4, sci_mode=False, linewidth=120)
generator = torch.Generator(device).manual_seed(0)


def off(got, truth):
    """|got - truth| / |truth|, in per cent."""
    return 100 * ((got - truth).norm() / truth.norm()).item()


# %% [markdown]
# ## 256 codes
#
# The code is called e4m3: a sign, 4 bits of exponent, 3 of mantissa. Two of the 256 are NaN and two are zero. Here are
# the others above zero, all of them:

# %%
codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
above_zero = codes[codes > 0].unique()
print(f"{len(above_zero)} numbers above zero, from {above_zero[0]:.6f} (2^-9) to {above_zero[-1]:.0f}")
print("from 1 to 2:", above_zero[(above_zero >= 1) & (above_zero <= 2)].tolist())
print("the first of all, in units of 2^-9:", (above_zero[:18] * 2**9).long().tolist())

# %% [markdown]
# From one power of two to the next there are 8 numbers, so rounding moves a value by at most $2^{-4}$ of itself, a
# sixteenth. bf16 has 128 there. Down to $2^{-6}$ that holds. Below it steps do not shrink any more: what is left is
# coarser and coarser, and under $2^{-10}$ there is nothing. Above 448 there is nothing either.

# %% tags=["hide-input"] alt="Relative error of rounding to e4m3 by magnitude: a saw between 2^-6 and 448, a rise to 100 per cent below, clamping above"
INK, GREY = "#1f2430", "#9aa0a8"
BLUE, ORANGE, GREEN, RED = "#2e6f9e", "#c0662b", "#5f8a3a", "#a8323e"

_, axes = plt.subplots(figsize=(10, 3.4), layout="constrained")
values = torch.logspace(-12, 10.5, 20_000, base=2)
rounded = values.clamp(max=448).to(torch.float8_e4m3fn).float()
error = 100 * ((rounded - values) / values).abs()
for where, colour in (
    (values <= 2**-6, RED),
    ((values > 2**-6) & (values <= 448), BLUE),
    (values > 448, RED),
):
    axes.plot(values[where].cpu(), error[where].cpu(), color=colour, linewidth=1)
bf16 = 100 * ((values.bfloat16().float() - values) / values).abs()
axes.axhline(bf16.max().item(), color=GREY)
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set(xlabel="magnitude of a value", ylabel="off, per cent of it", ylim=(0.1, 300))
axes.set_xticks([2.0**k for k in range(-12, 11, 2)])
for at, height, text, colour in (
    (2**-11, 140, "nothing is left", RED),
    (2**-7, 45, "fewer and fewer bits", RED),
    (2**1, 9, "3 bits of mantissa: at most 6.25 %", BLUE),
    (2**9.6, 140, "clamped to 448", RED),
    (2**-11, 0.45, "bf16: at most 0.39 %", GREY),
):
    axes.text(at, height, text, ha="center", color=colour, fontsize=10)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# On that plateau every tensor fares alike. Normal numbers, quantised and taken back, and a product of two such tensors:

# %%
x = torch.randn(1024, 512, generator=generator)
w = torch.randn(256, 512, generator=generator)
for name, format in (("FP8", FP8), ("MX", MX)):
    a, b = format.rows(x), format.weights(w)
    print(f"{name:4} x off by {off(a, x):.2f} %, w by {off(b, w):.2f} %, x @ w.T by {off(a @ b.T, x @ w.T):.2f} %")
product = off(FP8.rows(x) @ FP8.weights(w).T, x @ w.T)
assert 2.5 < off(FP8.rows(x), x) < 2.7 and 3.6 < product < 3.8

# %% [markdown]
# The product is off by $\sqrt{2}$ times as much: errors that have nothing to do with each other add up in squares. And
# it is off by as much whatever the length of the contraction, for its errors add up as its terms do. So 8 bits cost a
# layer some per cent, which no kernel can win back. All else in this lesson is there so that it does not cost more.
#
# ## A scale
#
# The plateau reaches from $2^{-6}$ to 448, nearly 15 powers of two. Values are moved onto it by a division, and the
# divisor is kept:
#
# $$\text{value} \approx \text{code} \cdot \text{scale}, \qquad \text{scale} = \frac{\text{largest magnitude}}{448}$$
#
# Then the largest value is 448 and nothing is clamped. Here is the specification, with two kinds of scale. FP8 takes
# any fp32 number; MX a power of two, kept as its exponent in 8 bits (E8M0), rounded up, so that nothing is clamped
# there either.
#
# ```python
# --8<-- "reference/quantize.py:quantise"
# ```
#
# Its example, six values in blocks of four:

# %%
row = torch.tensor([[1, -3, 0.2, 896, 0, 0.001]])
for scale_of in (fp32_scale, e8m0_scale):
    q = quantise(row, (1, 4), scale_of)
    print(f"{scale_of.__name__:10} scales {q.scales.float().tolist()[0]}")
    print(f"{'':10} codes  {q.codes.float().tolist()[0]}")
    print(f"{'':10} back   {q.dequantise().tolist()[0]}")

# %% [markdown]
# 0.2 shares a block with 896 and comes back as 0.203, which is as near as 3 bits get. 0.001 is the largest of its
# block. With FP8's scale it becomes 448 and comes back as it was, but for the rounding of the scale. In MX a power of
# two takes it to 262, and rounding that to 256. On the other hand a power of two itself rounds nothing: it moves an
# exponent, and leaves the mantissa.
#
# ## Why per block
#
# One scale for all of a tensor would be simpler. What it does to the small values depends on how far the large ones are
# away. Twice the same experiment: to the left one *column* of x is larger than all others, as a few channels are in
# real language models; to the right each *row* is smaller than the one before, as gradients are of tokens that the
# model predicts well. What is shown is how far everything but the outlier is off, and each row by itself.

# %% tags=["hide-input"] alt="Error of quantising by the size of an outlier, and by the size of a row, for one scale a tensor, a row, 128 and 32 values"
BLOCKS = {"a tensor": (64, 512), "a row": (1, 512), "128 of a row": (1, 128), "32 of a row": (1, 32)}
COLOURS = dict(zip(BLOCKS, (RED, ORANGE, BLUE, GREEN)))
x = torch.randn(64, 512, generator=generator)
others = torch.arange(512) != 7

_, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
by_row = {}
exponents, shrunk = range(0, 23, 2), x * 2.0 ** -(torch.arange(64) / 2.5)[:, None]
for name, block in BLOCKS.items():
    errors = []
    for k in exponents:
        spiked = torch.where(others, x, x * 2.0**k)
        back = quantise(spiked, block, fp32_scale).dequantise()
        errors.append(off(back[:, others], spiked[:, others]))
    left.plot([2.0**k for k in exponents], errors, color=COLOURS[name], marker="o", markersize=4)
    back = quantise(shrunk, block, fp32_scale).dequantise()
    by_row[name] = [off(*rows) for rows in zip(back, shrunk)]
    if name != "32 of a row":
        right.plot(shrunk.norm(dim=1).cpu() / 512**0.5, by_row[name], color=COLOURS[name], label=name)
for axes, title in ((left, "an outlier's column"), (right, "rows of many sizes")):
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
left.set(xlabel="times as large as the others", ylabel="off, per cent")
right.set(xlabel="RMS of a row")
right.invert_xaxis()
for name in BLOCKS:
    left.plot([], [], color=COLOURS[name], label=f"one scale for {name}")
left.legend(frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# Up to some $2^{12}$ nothing happens, whoever shares the scale: a code has an exponent of its own, and that is why 8
# bits of *floating point* are used and not integers, whose steps do not shrink at all. Beyond, small values fall off
# the plateau and vanish. With one scale a tensor a single outlier takes all others with it, and the gradient of a token
# $2^{19}$ times as small as the largest is zero: that token trains nothing any more. With a scale for each row and each
# block an outlier spoils its own, and every row is as exact as every other.
#
# So smaller blocks break later, and have more scales. How small they are, and how they lie, the product decides.
#
# ## Where blocks lie
#
# The *contraction* is the axis that a product sums over. Take one entry of x @ w.T, and let blocks of 128 lie along
# that axis in both operands. Within a block's part of the sum both scales are constant, and can be taken out in front:
#
# $$y_{tn} = \sum_{b} s^x_{tb}\, s^w_{nb} \sum_{c \in b} \hat{x}_{tc}\, \hat{w}_{nc}$$
#
# The inner sum is one of codes alone: that is what the matrix unit computes. Outside, one multiplication for 128 terms.
# Were blocks to lie across the contraction, each term would have scales of its own, and there would be nothing left to
# multiply in 8 bits.

# %%
x, w = torch.randn(4, 512, generator=generator), torch.randn(3, 512, generator=generator)
qx, qw = quantise(x, (1, 128), fp32_scale), quantise(w, (1, 128), fp32_scale)
y = torch.zeros(4, 3)
for b in range(4):
    own = slice(128 * b, 128 * (b + 1))
    inner = qx.codes[:, own].float() @ qw.codes[:, own].float().T  # a matrix unit's part
    y += qx.scales[:, b, None] * qw.scales[:, b] * inner
torch.testing.assert_close(y, qx.dequantise() @ qw.dequantise().T)
print(
    f"scales of x {tuple(qx.scales.shape)}, of w {tuple(qw.scales.shape)}; off by {off(y, x @ w.T):.1f} % from x @ w.T"
)

# %% [markdown]
# That is also why a block has 128 values. The multiplication is done by the ordinary units of a processor, for every
# entry of a tile, while the matrix unit waits or works ahead; with blocks of 32 there would be four times as many.
# There is a second reason to interrupt a sum. Hopper's matrix units hold those of 8-bit products with fewer bits than
# fp32 has ([DeepSeek-V3's report](https://arxiv.org/abs/2412.19437) found about 14), so partial sums are added up in
# fp32 registers every 128 terms in any case. Blocks of 32, as in MX, are for matrix units that apply scales themselves,
# from Blackwell on.
#
# Each product of the layer contracts along another axis, so one tensor may need two sets of blocks. This is what the
# formats are for:
#
# ```python
# --8<-- "reference/quantize.py:formats"
# ```
#
# `rows` is for tokens that meet a weight: blocks within a row. `columns` is for weight gradients, which sum over the
# rows of an expert: blocks within a column, which begin anew with every expert. `weights` has blocks of 128 by 128,
# which serve forward's contraction and backward's alike. Drawn small, with blocks of 4 instead of 128, and three
# experts of 6, 3 and 8 rows:

# %% tags=["hide-input"] alt="Three tensors cut into blocks: rows of a token, columns of an expert with ragged ends, squares of a weight"
row_start = torch.tensor([0, 6, 9, 17])
R, C, SMALL = 17, 10, 4
of_row, of_column = block_of(R, SMALL, row_start), block_of(C, SMALL)
cuts = {
    "rows: x, act, dy, dpre\nblocks along a row": (torch.arange(R), of_column),
    "columns: the same tensors\nfor weight gradients": (of_row, torch.arange(C)),
    "weights: (10, 10) of an expert\none copy for both directions": (block_of(C, SMALL), of_column),
}
_, panels = plt.subplots(1, 3, figsize=(10, 4.6), layout="constrained", width_ratios=[1, 1, 1])
for axes, (title, (down, across)) in zip(panels, cuts.items()):
    shades = (down[:, None] + across[None]) % 2
    axes.imshow(shades.cpu(), cmap=plt.matplotlib.colors.ListedColormap(["#cfe0ee", "#8fb8d8"]), vmin=0, vmax=1)
    axes.set_title(title, fontsize=10, loc="left", color=INK, pad=14)
    for y0 in range(len(down) + 1):
        axes.axhline(y0 - 0.5, color="white", linewidth=0.7)
    for x0 in range(len(across) + 1):
        axes.axvline(x0 - 0.5, color="white", linewidth=0.7)
    scales = (int(down.max()) + 1) * (int(across.max()) + 1)
    axes.set_xlabel(f"{scales} scales for {len(down) * len(across)} values", color=INK)
    if len(down) == R:
        for e, (first, end) in enumerate(pairwise(row_start.tolist())):
            axes.text(-0.9, (first + end - 1) / 2, f"expert {e}", ha="right", va="center", color=INK, fontsize=9)
            axes.axhline(end - 0.5, color=INK, linewidth=1.6)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
panels[0].annotate("", (9.7, -0.9), (-0.7, -0.9), arrowprops=dict(arrowstyle="->", color=ORANGE), annotation_clip=False)
panels[1].annotate("", (10, 16.6), (10, -0.6), arrowprops=dict(arrowstyle="->", color=ORANGE), annotation_clip=False)
plt.show()

# %% [markdown]
# The arrows are contractions. At ragged ends blocks are smaller: nothing is padded, and the 17 rows to the left have
# blocks of 4, 4 and 2. In the middle, expert 0 has blocks of 4 and 2 rows and expert 1 one of 3. What a token's
# gradient is thus never depends on the tokens of another expert.
#
# A tensor that needs both is quantised twice, from the values themselves. From codes it would be rounded a second time,
# and with scales that are no powers of two that [shows](../math.md#a-power-of-two-rounds-nothing): 7.2 % instead of
# 6.4.
#
# How much are the scales? For one layer of Qwen3-30B-A3B and 16,384 tokens:

# %%
p = PRESETS["qwen3-30b-a3b"]


def mib(values, scales, bytes_a_scale):
    """Codes, scales and, for comparison, bf16."""
    return [f"{size / 2**20:8.2f}" for size in (values, scales * bytes_a_scale, 2 * values)]


weights, tokens = 3 * p.E * p.H * p.I, p.T * p.H
print(f"{'MiB':28}{'codes':>8}{'scales':>10}{'in bf16':>10}")
for name, values, scales, size in (
    ("x, FP8: 128", tokens, tokens // 128, 4),
    ("x, MX: 32", tokens, tokens // 32, 1),
    ("the weights, FP8: 128 x 128", weights, weights // 128**2, 4),
    ("the weights, MX: 32", weights, weights // 32, 1),
):
    print(f"{name:28}" + "  ".join(mib(values, scales, size)))

# %% [markdown]
# 3 %, and of a weight in FP8 next to nothing. (In MX a weight has two copies, since forward and backward contract along
# different axes and a block of 32 lies along one.)
#
# ## What breaks
#
# Edge cases are where a quantiser is right or wrong. Each of these is one block of four:

# %%
cases = {
    "zeros": [0, 0, 0, 0],
    "tiny": [1e-40, -3e-41, 0, 0],
    "huge": [3e38, -1e38, 1e30, 1],
    "an outlier": [1e6, 1, 0.1, -1],
    "NaN": [1, torch.nan, 2, 3],
    "infinity": [1, torch.inf, 2, 3],
}
for name, values in cases.items():
    for scale_of in (fp32_scale, e8m0_scale):
        q = quantise(torch.tensor([values]), (1, 4), scale_of)
        back = "  ".join(f"{value:11.3g}" for value in q.dequantise()[0].tolist())
        print(f"{name:11} {scale_of.__name__:11} scale {q.scales.float().item():9.3g}   back {back}")

# %% [markdown]
# **Zeros.** Their largest magnitude is 0, so 0 / 0 lurks: an expert's padding, a masked token, a dead channel would
# turn into NaN. A scale has a floor, and zeros come back as zeros.
#
# **Tiny.** Below the floor values lose bits and then vanish, as they do in fp32 not much later.
#
# **Huge.** Scales are divided *by*, and the reciprocal of a scale may itself be too small or too large for fp32.
# `quantise` says which operations in which order, so that it is finite up to the largest fp32 number, and every device
# gets the same bits.
#
# **An outlier** ends in the picture above: 0.1 beside a million is gone. That is the price of a block, and a block pays
# it alone.
#
# **NaN** must be seen, not rounded away: e4m3 has no infinity, so an overflow could quietly become 448. Here one NaN or
# infinity makes its whole block NaN, codes and scale. In a row that is a part of one token, and other tokens do not
# notice.
#
# And the exponent of MX. To round it *down*, as the format's specification proposes, keeps one more bit of range for
# small values and clamps the large ones:

# %%
t = torch.tensor([[500.0, 100.0, 10.0, 1.0]])


def rounded_down(amax):
    """The exponent of amax less that of 448: what lies between 448 and 512 scales is clamped."""
    return torch.exp2(torch.frexp(amax)[1] - 9.0)


for name, scale_of in (("rounded down", rounded_down), ("rounded up", e8m0_scale)):
    q = quantise(t, (1, 4), scale_of)
    print(f"{name:13} scale {q.scales.float().item():.0f}, back {q.dequantise()[0].tolist()}")

# %% [markdown]
# 500 becomes 448, 10 % off, and it is the largest values that are hit, always downwards. Rounded up it is 512, 2 % off,
# like any other value.
#
# ## What a layer loses
#
# `precision=` says which products read what. The reference in each precision, in bf16 otherwise, beside the layer in
# float64 that rounds nothing, in per cent:

# %%
problem = Problem(T=128, H=256, I=192, E=4, K=2, device=device)
inputs, dy = random_inputs(problem)
truth = Oracle(problem, inputs, dy).truth
losses = {}
print(f"{'':9}" + "".join(f"{name:>15}" for name in truth))
for precision in PRECISIONS:
    y, saved = reference.forward(**vars(inputs), precision=precision)
    results = dict(y=y, **reference.backward(saved, dy)._asdict())
    losses[precision] = {name: off(results[name].double(), truth[name]) for name in truth}
    print(f"{precision:9}" + "".join(f"{loss:15.2f}" for loss in losses[precision].values()))
assert all(5 < losses["fp8"][name] < 8 for name in truth) and losses["fp8_bwd"]["y"] == losses["bf16"]["y"]

# %% [markdown]
# Two products stand between x and y, each off by 3.7 %, and act between them is rounded once more: 6 %, as the
# [mathematics](../math.md#how-far-from-bf16) has it for larger layers. `"fp8_bwd"` keeps forward, and with it loss and
# predictions, in bf16, and takes 8 bits for the gradients, of which there are two products in three.
#
# What does training make of it? That a gradient is 6 % off sounds like a lot. But in which direction? Along the
# gradient itself it would be a step of another length; it is off sideways, nearly all of it:

# %%
print("of the last of them:")
for name in ("dw_gate_up", "dw_down"):
    got, grad = results[name].double(), truth[name]
    along = (got - grad).flatten() @ grad.flatten() / grad.norm() ** 2
    print(f"{name:10} off by {off(got, grad):.2f} %, of that along the gradient {100 * along:+.2f} %")
    assert abs(along) < 0.015

# %% [markdown]
# [How losses go](../training.md#losses-in-8-bits) shows a small model on real text, in each precision.
#
# A rung is held to the reference *in its own precision*: that is the rule of [parity in 8
# bits](../parity.md#in-8-bits). Here is `persistent`:

# %%
small = Problem(T=16, H=64, I=48, E=2, K=2, device=device)
inputs, dy = random_inputs(small)
rung = stage("persistent")
counted = {}
for precision in ("bf16", "fp8", "fp8_bwd"):
    here = small.at(precision=precision)
    if reason := rung.why_not(here):
        print(reason)
        continue
    y, saved = rung.forward(here, inputs)
    verdict = Oracle(here, inputs, dy).check(y, rung.backward(here, inputs, saved, dy))
    shares = "   ".join(f"{output} {share:.2f}" for output, share in verdict.shares.items())
    print(f"{precision:8} {shares}   {'passed' if verdict.passed else 'FAILED'}")
    assert verdict.passed
    forward = launches(lambda: rung.forward(here, inputs), device)
    counted[precision] = forward, launches(lambda: rung.backward(here, inputs, saved, dy), device)

# %% [markdown]
# That is no proof that it multiplied 8 bits everywhere. Parity's budget in 8 bits is twice what the reference loses to
# flipped codes, several per cent of a row, and a forgotten operand may fit in. Let us forget one: `down`, which reads
# act as it is.

# %%
inputs, dy = random_inputs(problem)
plan, in_fp8 = plan_of(inputs.topk_ids, problem.E), Oracle(problem.at(precision="fp8"), inputs, dy)
right, saved = reference.forward(**vars(inputs), precision="fp8")
grads = reference.backward(saved, dy)

act = swiglu(gate_up(dispatch(inputs.x, plan), inputs.w_gate_up, plan, FP8))
w_down = FP8.weights(inputs.w_down)
out = torch.cat([act[own].float() @ w_down[e].T for e, own in enumerate(plan.experts())]).to(act.dtype)
forgetful = combine(out, inputs.topk_weights, plan.row_of_slot)

losses_of = {"fp8, in float64": in_fp8.truth["y"], "the reference": right, "act forgotten": forgetful}
for name, y in losses_of.items():
    share = "" if y.dtype == torch.float64 else f", {in_fp8.shares(y, grads)['y']:.2f} of the budget"
    print(f"y of {name:15} off by {off(y.double(), truth['y']):.2f} %{share}")
assert in_fp8.shares(forgetful, grads)["y"] < 1
short = off(in_fp8.truth["y"], truth["y"]) ** 2 - off(forgetful.double(), truth["y"]) ** 2
assert short > 2**2 > abs(off(in_fp8.truth["y"], truth["y"]) ** 2 - off(right.double(), truth["y"]) ** 2)
print(f"the squares of the first and the last differ by ({short**0.5:.1f} %)^2, and quantising act moves it by")
print(f"{off(FP8.rows(act), act.float()):.1f} %")

# %% [markdown]
# Its share of the budget is that of the right one. But it is too near to the truth without 8 bits, and since errors add
# up in squares, the difference says what is missing. The benchmarks hold the error of a rung in 8 bits to that of the
# reference [from above and from below](../measuring.md#what-is-compared), within 2 % in squares. And quantisers are
# compared to the bit, where they have nothing to hide behind.

# %% [markdown]
# ## What it costs, and gains
#
# The codes have to be made. These launches come in addition, or instead of their namesakes:

# %%
for name in ("fp8", "fp8_bwd"):
    for direction, plain_ones, its in zip(("forward", "backward"), counted.get("bf16", ()), counted.get(name, ())):
        more = [launch for launch in its if "quantise" in launch]
        print(f"{name:8} {direction:9} {len(its):2} launches, {len(its) - len(plain_ones)} more: {', '.join(more)}")

# %% [markdown]
# x and dy are quantised by row, and once more by column, in the order of the experts' rows: K codes for each value.
# Both weights are quantised in each direction, and in every call: a copy that was kept could be older than its weight,
# and not every write can be seen. Who knows better says so, with `mega_moe.keep_codes()`. act, dpre and the weighted act
# are not among these launches. The program that makes a tile of them leaves it in a memory of its own, small enough to
# stay in a cache, reads it back by row and by column, and stores codes at once.
#
# So what is there to gain? By the data sheet alone, for a step of both models: products at twice the rate; and for
# quantising, values read in 16 bits and written in 8.

# %% tags=["hide-input"]
h200 = roofline.ceiling("NVIDIA H200")
print(f"{'ms, NVIDIA H200, data sheet':29}{'products, 16 bits':>19}{'8 bits':>8}{'quantising':>12}{'ratio':>8}")
for name in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
    p = PRESETS[name]
    flops = sum(roofline.useful_flops(p, direction) for direction in ("forward", "backward"))
    products = flops / h200.tflops_16 / 1e9
    weights, tokens = 3 * p.E * p.H * p.I, p.T * p.H
    by_row, by_column = 2 * 3 * tokens, 2 * (2 + p.K) * tokens  # of x and dy
    quantising = (2 * 3 * weights + by_row + by_column) / h200.gb_per_s / 1e6
    ratio = products / (products / 2 + quantising)
    print(f"{name:29}{products:19.2f}{products / 2:8.2f}{quantising:12.2f}{ratio:8.2f}")

# %% [markdown]
# Twice as fast is out of reach, then, before anything else of the layer is counted: sums over slots, the plan,
# epilogues that now look for maxima. Most of quantising is the weights, which are as many for few tokens as for many:
# with more tokens to an expert the ratio rises. (No card reaches its data sheet, and it need not miss both rates
# alike.)
#
# And what came of it? The first run of FP8 on an H200 took 1.25 to 1.5 times as long as bf16: the epilogue of dact
# quantised by column in registers, and took more than all products saved. Since it goes through memory, both layers are
# about as fast as in bf16. Products are faster, by 1.2 to 1.7 times, and making codes takes most of that
# ([the figures](../measuring.md#what-was-tried)). From [the newest record](../results.md), where a rung in 8 bits is in
# it:

# %% tags=["hide-input"]
records = sorted(Path(mega_moe.__file__).parents[1].glob("docs/results/*.json"))
record = json.loads(records[-1].read_text()) if records else {"machine": {}, "rows": []}
recorded = [row for row in record["rows"] if (row.get("precision") or "bf16") != "bf16" and row["kind"] == "rung"]
medians = {(row["shape"], row["contestant"], row["direction"]): row["ms"]["median"] for row in record["rows"]}
for row in recorded:
    shape, name, direction = row["shape"], row["contestant"], row["direction"]
    in_bf16 = medians.get((shape, name.removesuffix(f"-{row['precision']}"), direction))
    beside = "" if in_bf16 is None else f", in bf16 {in_bf16:6.2f} ms"
    print(f"{shape:18} {row['label']:32} {direction:17} {medians[shape, name, direction]:6.2f} ms{beside}")
if not recorded:
    print("No rung is recorded in 8 bits yet. On a GPU, `make bench` measures.")

# %% [markdown]
# ## Exercises
#
# **1.** A block's largest value is 1. How small may a value beside it be before it is off by more than a sixteenth? How
# small before it comes back as 0? Take FP8's scale. What are the two for a block whose largest is 1000?
#
#
# ??? success "Answer"
#     The scale is 1/448. The plateau ends at a code of $2^{-6}$, so at $2^{-6}/448 = 3.5 \cdot 10^{-5}$: the largest is
#     28,672 times that. Just below, codes are $2^{-9}$ apart, so a value may be off by $2^{-10}$: more than a sixteenth
#     of it. At half the smallest code, $2^{-10}/448 = 2.2 \cdot 10^{-6}$, a ratio of 458,752, it comes back as 0 (a tie
#     goes to the even code, 0). With 1000 all is a thousand times that: it is the ratio that counts.

# %% tags=["solution"]
answer = dict(still_exact=28672, first_zero=458752)

check(
    answer,
    dict(still_exact=448 * 2**6, first_zero=448 * 2**10),
    see=dict(
        still_exact=("256 codes", "where the plateau ends, below the largest code"),
        first_zero=("256 codes", "half of the smallest code, below the largest"),
    ),
)
for largest in (1.0, 1000.0):
    edge, gone = largest / answer["still_exact"], largest / answer["first_zero"]
    for value, exact, zero in (
        (1.00001 * edge, True, False),
        (0.99999 * gone, False, True),
        (1.00001 * gone, False, False),
    ):
        back = quantise(torch.tensor([[largest, value]]), (1, 128), fp32_scale).dequantise()[0, 1].item()
        assert (abs(back / value - 1) <= 2**-4 + 1e-6, back == 0) == (exact, zero), (largest, value, back)
below = torch.linspace(0.8, 0.99999, 5000) * 2**-6 / 448  # some of these are off by more than a sixteenth
back = quantise(torch.cat([torch.ones(1), below])[None], (1, 5001), fp32_scale).dequantise()[0, 1:]
off_by_more = below[(back / below - 1).abs() > 2**-4 + 1e-6]
assert off_by_more.max() > 0.93 / answer["still_exact"]
print(f"{1 / answer['still_exact']:.2g}, {1 / answer['first_zero']:.2g}")

# %% [markdown]
# **2.** FP8's weights have one scale for 128 by 128, and MX's one for 32 along the contraction. Let the weights of
# Qwen3-30B-A3B's layer have FP8 scales for 1 by 128 instead. How many bytes of scales would there be, and how many
# bytes of codes more? What would it buy?
#
# ??? success "Answer"
#     604 million weights have one scale for each 128: 4.7 million of 4 bytes, 18 MiB, where square blocks have 0.14 MiB.
#     And a block of 1 by 128 lies along one contraction. Backward contracts along the other axis, so it needs other
#     blocks, and codes that are others and not only laid out otherwise: 576 MiB of codes for both, and 18 MiB more of
#     scales. It would buy each row of a weight a scale of its own. Unless rows differ by thousands in size, that buys
#     nothing, as the picture above shows.

# %% tags=["solution"]
answer = dict(million_weights=604, scales_MiB=18, square_MiB=0.14, codes_MiB=576)

p = PRESETS["qwen3-30b-a3b"]
weights = 3 * p.E * p.H * p.I
check(
    answer,
    dict(
        million_weights=round(weights / 1e6),
        scales_MiB=round(weights / 128 * 4 / 2**20),
        square_MiB=weights / 128**2 * 4 / 2**20,
        codes_MiB=round(weights / 2**20),
    ),
    see=dict(
        million_weights=("What it costs, and gains", "three matrices of H by I, for each of 128 experts"),
        scales_MiB=("Where blocks lie", "4 bytes for each 128 weights"),
        square_MiB=("Where blocks lie", "4 bytes for each 128 by 128 weights"),
        codes_MiB=("Where blocks lie", "a byte a weight, once more for the other axis"),
    ),
)
rows_differ = torch.randn(256, 512, generator=generator) * 2.0 ** torch.randint(-9, 1, (256, 1), generator=generator)
square, line = (off(Format(fp32_scale, 128, across).weights(rows_differ), rows_differ) for across in (128, 1))
print(square, line)
assert abs(square - line) < 0.15
