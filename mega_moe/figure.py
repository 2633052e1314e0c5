"""`mega-moe ladder --plot`: parity and time of every rung, drawn side by side. Needs matplotlib."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from .ladder import Climb, Row
from .parity import OUTPUTS
from .roofline import DIRECTIONS

INK = "#1f2430"
ALARM = "#b00020"
OUTPUT_COLOURS = ("#1f4e79", "#2e8b8b", "#8a5a9e", "#c0662b", "#6b7b3a")
DIRECTION_COLOURS = {"forward": "#2e6f9e", "backward": "#b5532d"}
LINES = {"forward": "solid", "backward": (0, (3, 1))}
OVER = 1.25  # bars over budget are cut here and say how far they go


def draw(climb: Climb, path: Path) -> None:
    """Write the figure to `path`; its suffix chooses the format (svg, png, pdf)."""
    rows = [row for row in climb.rows if row.parity]
    figure = Figure(figsize=(12, 4.6), layout="constrained", facecolor="white")
    parity, times = figure.subplots(1, 2)
    _draw_parity(parity, rows)
    _draw_times(times, rows, climb.allowed_ms)

    p = climb.problem
    sizes = ", ".join(f"{letter} = {p[letter]}" for letter in "THIEK")
    figure.suptitle(f"{sizes}, {p['dtype']}, routing {p['routing']}", color=INK, fontsize=13, fontweight="bold")
    m = climb.machine
    figure.supxlabel(
        f"{m['device']}, torch {m['torch']}, triton {m['triton']}, {m['date'][:10]}", color=INK, fontsize=9
    )
    figure.savefig(path)


def _draw_parity(axes: Axes, rows: list[Row]) -> None:
    width = 0.8 / len(OUTPUTS)
    tallest = 1.0
    for number, (name, colour) in enumerate(zip(OUTPUTS, OUTPUT_COLOURS, strict=True)):
        at = [place + (number - (len(OUTPUTS) - 1) / 2) * width for place in range(len(rows))]
        shares = [row.parity.shares[name] for row in rows]
        bars = axes.bar(at, [min(share, OVER) for share in shares], width * 0.92, color=colour, label=name)
        for bar, share in zip(bars, shares, strict=True):
            if not share <= 1:
                tallest = OVER
                top = (bar.get_x() + bar.get_width() / 2, OVER)
                axes.annotate(f"{share:.2g}", top, ha="center", va="bottom", color=ALARM)
    axes.axhline(1, color=INK, linewidth=1.2, linestyle="--")
    axes.annotate("budget", (1.01, 1), xycoords=("axes fraction", "data"), ha="left", va="center", color=INK)
    axes.set_ylim(0, tallest * 1.32)
    _dress(axes, rows, "Parity: the worst row's error", "share of the budget", columns=len(OUTPUTS))


def _draw_times(axes: Axes, rows: list[Row], allowed_ms: dict[str, float] | None) -> None:
    width = 0.36
    tallest = max((row.ms[direction] for row in rows for direction in DIRECTIONS), default=1.0)
    for number, direction in enumerate(DIRECTIONS):
        colour = DIRECTION_COLOURS[direction]
        at = [place + (number - 0.5) * (width + 0.02) for place in range(len(rows))]
        bars = axes.bar(at, [row.ms[direction] for row in rows], width, color=colour, label=direction)
        axes.bar_label(bars, [f"{row.ms[direction]:.3g}" for row in rows], color=INK, fontsize=9, padding=2)
        for bar, row in zip(bars, rows, strict=True):
            if row.interpreted:
                bar.set(hatch="///", edgecolor="white")
        if allowed_ms:
            allowed = allowed_ms[direction]
            halo = [withStroke(linewidth=4, foreground="white")]  # to be seen on a bar
            label = f"{direction}: the hardware allows {allowed:.3g} ms"
            left, right = [x - width / 2 for x in at], [x + width / 2 for x in at]
            style = LINES[direction]
            axes.hlines([allowed] * len(at), left, right, color=INK, linestyle=style, path_effects=halo, label=label)
    axes.set_ylim(0, tallest * 1.32)
    interpreted = any(row.interpreted for row in rows)
    title = "Time (hatched: in the interpreter, says nothing about a GPU)" if interpreted else "Time on the device"
    _dress(axes, rows, title, "ms, median", columns=2)


def _dress(axes: Axes, rows: list[Row], title: str, unit: str, columns: int) -> None:
    axes.set_title(title, color=INK, fontsize=11, loc="left")
    axes.set_ylabel(unit, color=INK)
    axes.set_xticks(range(len(rows)), [row.stage for row in rows])
    axes.set_xlim(-0.6, max(len(rows), 1) - 0.4)
    axes.tick_params(colors=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", ncols=columns, fontsize=8, frameon=False, columnspacing=1.0, handlelength=1.2)
