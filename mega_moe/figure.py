"""`mega-moe ladder --plot`: parity and time of every rung, drawn side by side. Needs matplotlib."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, NullFormatter

from .ladder import Climb, Row, plain, plain_share
from .parity import OUTPUTS
from .roofline import DIRECTIONS

FORMATS = (".svg", ".png", ".pdf")

INK = "#1f2430"
ALARM = "#b00020"
OUTPUT_COLOURS = ("#1f4e79", "#2e8b8b", "#8a5a9e", "#c0662b", "#6b7b3a")
DIRECTION_COLOURS = {"forward": "#2e6f9e", "backward": "#b5532d"}
LINES = {"forward": "solid", "backward": (0, (3, 1))}
OVER = 1.25  # bars over budget are cut here
UPRIGHT = 3  # rungs, beyond which the numbers on bars are turned to fit


def draw(climb: Climb, path: Path) -> None:
    """Write the figure to `path`; its suffix, one of FORMATS, chooses the format."""
    rows = [row for row in climb.rows if row.parity]
    figure = Figure(figsize=(12, 4.6), layout="constrained", facecolor="white")
    parity, times = figure.subplots(1, 2)
    _draw_parity(parity, rows, climb.fixed_budget)
    _draw_times(times, rows, climb.allowed_ms, climb.device)

    p = climb.problem
    sizes = ", ".join(f"{letter} = {p[letter]}" for letter in "THIEK")
    figure.suptitle(f"{sizes}, {p['dtype']}, routing {p['routing']}", color=INK, fontsize=13, fontweight="bold")
    figure.supxlabel(f"{climb.where}, {climb.machine['date'][:10]}", color=INK, fontsize=9)
    figure.savefig(path)


def _draw_parity(axes: Axes, rows: list[Row], fixed_budget: str | None) -> None:
    width = 0.8 / len(OUTPUTS)
    tallest = 1.0
    for number, (name, colour) in enumerate(zip(OUTPUTS, OUTPUT_COLOURS, strict=True)):
        at = [place + (number - (len(OUTPUTS) - 1) / 2) * width for place in range(len(rows))]
        shares = [row.parity.shares[name] for row in rows]
        bars = axes.bar(at, [min(share, OVER) for share in shares], width * 0.92, color=colour, label=name)
        labels = axes.bar_label(bars, [plain_share(share) for share in shares], fontsize=8, padding=2)
        for label, share in zip(labels, shares, strict=True):
            label.set(color=INK if share <= 1 else ALARM, rotation=90 if len(rows) > UPRIGHT else 0)
            tallest = max(tallest, min(share, OVER))
    axes.axhline(1, color=INK, linewidth=1.2, linestyle="--")
    axes.annotate("budget", (1.01, 1), xycoords=("axes fraction", "data"), ha="left", va="center", color=INK)
    axes.set_ylim(0, tallest * 1.32)
    unit = f"share of the budget, {fixed_budget}" if fixed_budget else "share of the budget"
    _dress(axes, rows, "Parity: the worst row's error", unit, columns=len(OUTPUTS))


def _draw_times(axes: Axes, rows: list[Row], allowed_ms: dict[str, float] | None, device: str) -> None:
    """Beside the interpreter's times the others would vanish: where there are any, the axis is logarithmic."""
    width = 0.36
    times = [row.ms[direction] for row in rows for direction in DIRECTIONS] or [1.0]
    interpreted = any(row.interpreted for row in rows)
    for number, direction in enumerate(DIRECTIONS):
        colour = DIRECTION_COLOURS[direction]
        at = [place + (number - 0.5) * (width + 0.02) for place in range(len(rows))]
        bars = axes.bar(at, [row.ms[direction] for row in rows], width, color=colour, label=direction)
        axes.bar_label(bars, [plain(row.ms[direction]) for row in rows], color=INK, fontsize=9, padding=2)
        for bar, row in zip(bars, rows, strict=True):
            if row.interpreted:
                bar.set(hatch="///", edgecolor="white")
        if allowed_ms:
            allowed = allowed_ms[direction]
            halo = [withStroke(linewidth=4, foreground="white")]  # to be seen on a bar
            label = f"{direction}: the hardware allows {plain(allowed)} ms"
            left, right = [x - width / 2 for x in at], [x + width / 2 for x in at]
            style = LINES[direction]
            axes.hlines([allowed] * len(at), left, right, color=INK, linestyle=style, path_effects=halo, label=label)
    title, unit = f"Time on the {'GPU' if device == 'cuda' else 'CPU'}", "ms, median"
    if interpreted:
        title, unit = f"{title} (hatched: interpreted, says nothing of a GPU)", f"{unit}, logarithmic"
        lowest, highest = min(times) / 4, max(times)
        axes.set_yscale("log")
        axes.set_ylim(lowest, highest * (highest / lowest) ** 0.25)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: plain(ms)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, max(times) * 1.32)
    _dress(axes, rows, title, unit, columns=2)


def _dress(axes: Axes, rows: list[Row], title: str, unit: str, columns: int) -> None:
    axes.set_title(title, color=INK, fontsize=11, loc="left")
    axes.set_ylabel(unit, color=INK)
    axes.set_xticks(range(len(rows)), [row.stage for row in rows])
    axes.set_xlim(-0.6, max(len(rows), 1) - 0.4)
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", ncols=columns, fontsize=8, frameon=False, columnspacing=1.0, handlelength=1.2)
