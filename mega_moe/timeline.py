"""A timeline as SVG, written by hand: lanes are programs, colours the five steps of the layer, and waiting is hatched.

It brings its own background, and another where the reader's system is dark. Its title and description are what a
reader hears who cannot see it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

STEPS = ("dispatch", "gate_up", "swiglu", "down", "combine")

COLOURS = dict(zip(STEPS, ("#cc79a7", "#0072b2", "#009e73", "#d55e00", "#e69f00"), strict=True))
"""Of each step: from Okabe and Ito's palette, made for readers who do not tell red from green."""

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1120, 92, 16, 74, 46  # of the picture, and of the margins around the lanes
LANES = 760  # their height in all, if they would be more than TALLEST
TALLEST = 26
GAP = 0.6  # between tiles, and between lanes, unless they are so thin that there would be little else
LETTER = 6.2  # the width of one in a tile

STYLE = """
.timeline text { font: 12px system-ui, sans-serif; fill: #1f2430 }
.timeline .title { font-size: 15px; font-weight: 600 }
.timeline .in { font-size: 10.5px; fill: #000 }
.timeline .in.gate_up { fill: #fff }
.timeline .paper { fill: #fff }
.timeline .axis { stroke: #1f2430; stroke-opacity: 0.25 }
.timeline .lane { fill: #1f2430; fill-opacity: 0.06 }
.timeline .hatch { fill: #1f2430; fill-opacity: 0.12 }
.timeline .line { stroke: #1f2430; stroke-opacity: 0.6; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  .timeline text, .timeline .lane, .timeline .hatch { fill: #e6e8ee }
  .timeline .in { fill: #000 }
  .timeline .paper { fill: #191c23 }
  .timeline .axis, .timeline .line { stroke: #e6e8ee }
}
""" + "\n".join(
    f".timeline path.{step}, .timeline rect.{step} {{ fill: {colour} }}" for step, colour in COLOURS.items()
)

HATCH = (
    '<pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch" width="6" height="6"/><line class="line" x1="0" y1="0" x2="0" y2="6"/></pattern>'
)


@dataclass(frozen=True)
class Bar:
    """One tile in its lane.

    Attributes:
        lane: number of the lane.
        drawn: when waiting began.
        start: when work began; no earlier than drawn.
        end: when it ended.
        step: one of STEPS.
        label: written into the tile where there is room.
    """

    lane: int
    drawn: float
    start: float
    end: float
    step: str
    label: str


def svg(bars: Sequence[Bar], lanes: Sequence[str], title: str, description: str, unit: str) -> str:
    """The timeline as the text of an SVG file.

    lanes: their names, from above. unit: what time is counted in, under the axis. Steps that do not occur are left out
    of the legend.
    """
    end = max((bar.end for bar in bars), default=0) or 1
    pitch = min(TALLEST, LANES / max(len(lanes), 1))
    scale = (WIDTH - LEFT - RIGHT) / end
    bottom = TOP + pitch * len(lanes)
    height = round(bottom + BOTTOM)
    x = lambda time: LEFT + time * scale
    y = lambda lane: TOP + lane * pitch

    def boxes(css: str, extents: list[tuple[int, float, float]]) -> str:
        """One path of many rectangles: a hundred thousand tiles stay a file that can be opened."""
        shapes = []
        for lane, begin, until in extents:
            wide, tall = ((size - GAP if size > 4 * GAP else size) for size in ((until - begin) * scale, pitch))
            shapes.append(f"M{x(begin):.2f} {y(lane):.2f}h{wide:.2f}v{tall:.2f}h{-wide:.2f}z")
        return f'<path {css} d="{"".join(shapes)}"/>' if shapes else ""

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'class="timeline" role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title><desc id="description">{escape(description)}</desc>',
        f"<style>{STYLE}</style><defs>{HATCH}</defs>",
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="title" x="{LEFT}" y="26">{escape(title)}</text>',
        *_legend([step for step in STEPS if any(bar.step == step for bar in bars)]),
        boxes('class="lane"', [(lane, 0, end) for lane in range(len(lanes))]),
        *_axis(end, x, bottom, unit),
        boxes('fill="url(#waiting)"', [(bar.lane, bar.drawn, bar.start) for bar in bars if bar.start > bar.drawn]),
    ]
    for step in STEPS:
        parts.append(boxes(f'class="{step}"', [(bar.lane, bar.start, bar.end) for bar in bars if bar.step == step]))
    for bar in bars:
        if pitch >= 14 and (bar.end - bar.start) * scale > len(bar.label) * LETTER + 4:
            middle = x((bar.start + bar.end) / 2), y(bar.lane) + pitch / 2 + 3.5
            parts.append(_text(*middle, bar.label, "middle", f"in {bar.step}"))
    every = max(round(16 / pitch), 1)  # a name is as tall as this
    for lane in range(0, len(lanes), every):
        parts.append(_text(LEFT - 8, y(lane) + pitch / 2 + 4, lanes[lane], "end"))
    return "\n".join(part for part in [*parts, "</svg>"] if part) + "\n"


def _legend(steps: list[str]) -> list[str]:
    parts, at = [], LEFT
    for name, css in [*((step, f'class="{step}"') for step in steps), ("waiting", 'fill="url(#waiting)"')]:
        parts.append(f'<rect {css} x="{at}" y="42" width="14" height="14"/>' + _text(at + 20, 53.5, name))
        at += 44 + round(len(name) * LETTER * 1.15)
    return parts


def _axis(end: float, x, bottom: float, unit: str) -> list[str]:
    """Lines at round times, about ten of them."""
    power = 10.0 ** floor(log10(end / 10))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 10 >= end)
    parts = []
    for n in range(int(end / step) + 1):
        at = x(n * step)
        parts.append(f'<line class="axis" x1="{at:.2f}" y1="{TOP}" x2="{at:.2f}" y2="{bottom + 4:.2f}"/>')
        parts.append(_text(at, bottom + 18, f"{n * step:,g}", "middle"))
    return [*parts, _text(WIDTH - RIGHT, bottom + 36, unit, "end")]


def _text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    return f'<text class="{css}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(words)}</text>'
