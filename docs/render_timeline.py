"""The picture of the README: an exchange as launches apart have it, and as one launch hides it.

    python3 docs/render_timeline.py

plays the forward of qwen3-30b-a3b on one of eight GPUs by `mega_moe.predict`, by rung ranks and by rung mega, and draws
docs/timeline.png: some programs of each, tile by tile, over one time. It takes seconds; run it again when tiles,
schedule or `mega_moe.predict` change. The page docs/timeline.md has the same to zoom into.
"""

import timeline_data  # first: it tells Triton of its interpreter
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mega_moe.schedule import KIND, KINDS, STEP_OF_KIND
from mega_moe.shapes import PRESETS
from mega_moe.timeline import COLOURS

FIGURE = timeline_data.Path(__file__).resolve().parent / "timeline.png"
PROGRAMS = 24  # drawn of each
INK, WAITING = "#1f2430", "#e6e8ec"


def bar(lane: int, start: float, end: float) -> list[tuple[float, float]]:
    """The corners of a bar in a lane, the first lane at the top."""
    return [(start, -lane), (end, -lane), (end, -lane - 0.86), (start, -lane - 0.86)]


def draw(axes: Axes, drawn: timeline_data.Drawn) -> None:
    """Every so many programs of a timeline, a bar a tile; where a program waits, or moves nothing, it stays grey."""
    every = len(drawn.trace.lanes) // PROGRAMS
    bars, colours = [], []
    for span in drawn.trace.spans:
        lane, left = divmod(span.lane, every)
        if left == 0 and lane < PROGRAMS:
            bars.append(bar(lane, span.start, span.end))
            colours.append(COLOURS[STEP_OF_KIND[KINDS[drawn.trace.table[span.tile][KIND]]]])
    last = max(span.end for span in drawn.trace.spans)
    axes.add_collection(PolyCollection([bar(lane, 0, last) for lane in range(PROGRAMS)], facecolors=WAITING))
    axes.add_collection(PolyCollection(bars, facecolors=colours, edgecolors="white", linewidths=0.25))
    axes.set(ylim=(-PROGRAMS, 0), yticks=[], ylabel="programs")
    axes.set_title(f"{drawn.name}: {last / 1e3:.2f} ms", loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)


def picture() -> Figure:
    """Both timelines, one above the other."""
    problem = PRESETS[timeline_data.SHAPE].at(save="inputs")
    rungs = [timeline_data.predicted(problem, "forward", timeline_data.NODE, rung) for rung in ("ranks", "mega")]
    figure = Figure(figsize=(12, 5.2), layout="constrained", facecolor="white")
    for axes, drawn in zip(figure.subplots(2, 1, sharex=True), rungs):
        draw(axes, drawn)
    end = max(span.end for drawn in rungs for span in drawn.trace.spans)
    axes.set(xlim=(0, end), xlabel=f"µs; predicted for {timeline_data.SHAPE}, a program a processor, one in six drawn")
    steps = dict.fromkeys(STEP_OF_KIND[KINDS[row[KIND]]] for drawn in rungs for row in drawn.trace.table)
    patches = [Patch(facecolor=COLOURS[step], label=step) for step in steps]
    figure.legend(
        handles=[*patches, Patch(facecolor=WAITING, label="waiting")], ncols=6, loc="outside upper right", frameon=False
    )
    return figure


if __name__ == "__main__":
    picture().savefig(FIGURE, dpi=130, metadata={"Software": None})
