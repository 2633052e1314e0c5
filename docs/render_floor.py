"""From the benchmark of few tokens to its page: no time in docs/floor.md is typed by hand.

    python3 -m pytest tests/bench/test_floor.py --benchmark-json=build/floor.json
    python3 docs/render_floor.py build/floor.json

The first line measures. The second keeps what matters of it as docs/results/floor/<date>-<device>.json, writes the
newest record's tables into the page, between its markers, and draws docs/floor.svg and docs/floor-dark.svg. Without an
argument only the page and the figures are written.
"""

import json
import sys
from itertools import groupby
from pathlib import Path

from render_results import between_markers, file_name, is_cpu, machine_line, markdown, times

from mega_moe import roofline
from mega_moe.ladder import DTYPES

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "results" / "floor"
PAGE = ROOT / "docs" / "floor.md"

DIRECTIONS = ("forward", "forward+backward")
LAUNCHED = {"eager": "launched one by one", "graph": "replayed from a graph"}

KEPT = ("direction", "contestant", "label", "kind", "launched", "interpreted", "errors", "shares_of_budget")
"""What a record keeps of a benchmark's extra_info, beside the layer and the times."""

AS_FAST = 1.03
"""Times within this factor of the least are named together with it: they spread by about as much."""

DRAWN = {
    "torch": "#9aa0a8",
    "torch-compiled": "#cc79a7",
    "grouped": "#e69f00",
    "persistent": "#2b8fd6",
    "mega": "#d55e00",
}
"""The contestants of the figure, each with its colour, which is told from the others on white and on the dark page."""

THEMES = {"floor.svg": ("#ffffff", "#1f2430"), "floor-dark.svg": ("#1e2129", "#e2e4ea")}
"""The file drawn for each theme: paper and ink."""


def record(*benchmarks: dict) -> dict:
    """One or more of pytest-benchmark's JSON reports as one record: machine, method, and a row a time.

    Raises ValueError where there is nothing in them, or they come from different machines, versions or methods.
    """
    found = [benchmark for report in benchmarks for benchmark in report["benchmarks"]]
    if not found:
        raise ValueError("there are no benchmarks in it")
    infos = [benchmark["extra_info"] for benchmark in found]
    machines, methods = [info["machine"] for info in infos], {info["method"] for info in infos}
    if len({json.dumps(machine | {"date": None}) for machine in machines}) > 1 or len(methods) > 1:
        raise ValueError("the rows come from different machines, versions or methods, and cannot stand in one table")
    rows = []
    for benchmark, info in zip(found, infos):
        shape, p = info["shape"].partition(", T = ")[0], info["problem"]
        layer = {"shape": shape} | {name: p[name] for name in (*"THIEK", "dtype", "routing")}
        rows.append(layer | {key: info.get(key) for key in KEPT} | {"ms": times(benchmark["stats"])})
    machine = machines[-1] | {"date": max(machine["date"] for machine in machines)[:10]}
    return {"machine": machine, "method": methods.pop(), "rows": rows}


def save(record: dict, folder: Path) -> Path:
    """Write the record, one line a row. Raises ValueError for a CPU's: interpreted times are no results."""
    machine = record["machine"]
    if is_cpu(record):
        raise ValueError(f"{machine['device']}: only a GPU's times are results")
    lines = [f'"{key}": {json.dumps(record[key])}' for key in ("machine", "method")]
    lines.append('"rows": [\n' + ",\n".join(json.dumps(row) for row in record["rows"]) + "\n]")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{machine['date']}-{file_name(machine['device'])}.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def tables(record: dict) -> str:
    """What stands between the markers, and in the terminal: of each layer and direction all times, and the fastest."""
    parts = [machine_line(record)]
    for shape in dict.fromkeys(row["shape"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["shape"] == shape]
        sizes = ", ".join(f"{letter} = {rows[0][letter]}" for letter in "HIEK")
        parts.append(f"### {shape}: {sizes}, {rows[0]['dtype']}, {rows[0]['routing']} routing")
        for direction in DIRECTIONS:
            here = [row for row in rows if row["direction"] == direction]
            if here:
                parts += [f"**{direction}**, microseconds a step, median, by number of tokens.", _times(here, record)]
                parts += [] if is_cpu(record) else [_fastest(here)]
    return "\n\n".join(parts)


def floor_us(row: dict, device: str) -> float | None:
    """Microseconds below which the layer of a row cannot go: the weights of all experts that have rows are read once a
    direction, and backward writes the gradients of all; at the bandwidth of the data sheet. None if that is not known.
    """
    ceiling = roofline.ceiling(device)
    if ceiling is None:
        return None
    of_expert = 3 * row["I"] * row["H"] * DTYPES[row["dtype"]].itemsize
    touched = min(row["E"], row["T"] * row["K"])  # balanced: each token has other experts, as long as there are any
    moved = touched if row["direction"] == "forward" else 2 * touched + row["E"]
    return moved * of_expert / (ceiling.gb_per_s * 1e3)


def _times(rows: list[dict], record: dict) -> str:
    """A line for each contestant and way of launching, a column for each number of tokens; the fastest of each column
    and way in bold."""
    tokens = sorted({row["T"] for row in rows})
    us = {(row["contestant"], row["launched"], row["T"]): row["ms"]["median"] * 1e3 for row in rows}
    labels = {row["contestant"]: row["label"] + (" (interpreted)" if row["interpreted"] else "") for row in rows}
    lines = []
    for launched, how in LAUNCHED.items():
        here = {T: [t for (_, by, of), t in us.items() if (by, of) == (launched, T)] for T in tokens}
        for name, label in labels.items():
            of = [us.get((name, launched, T)) for T in tokens]
            if any(t is not None for t in of):
                lines.append([f"{label}, {how}", *(_us(t, min(here[T], default=None)) for t, T in zip(of, tokens))])
    bounds = [floor_us(next(row for row in rows if row["T"] == T), record["machine"]["device"]) for T in tokens]
    if None not in bounds:
        lines.append(["*the weights alone, by the data sheet*", *(f"*{bound:.0f}*" for bound in bounds)])
    return markdown(["T", *map(str, tokens)], lines)


def _us(time: float | None, least: float | None) -> str:
    if time is None:
        return "–"
    return f"**{time:.0f}**" if time == least else f"{time:.0f}"


def _fastest(rows: list[dict]) -> str:
    """Who is fastest at each number of tokens, either way; and who is as fast."""
    sentences = []
    for launched, how in LAUNCHED.items():
        here = [row for row in rows if row["launched"] == launched]
        tokens = sorted({row["T"] for row in here})
        names = []
        for T in tokens:
            of = {row["contestant"]: row["ms"]["median"] for row in here if row["T"] == T}
            least = min(of.values())
            as_fast = sorted((name for name, ms in of.items() if ms <= least * AS_FAST), key=of.get)
            names.append(" and ".join(as_fast))
        runs = [(name, [T for T, _ in run]) for name, run in groupby(zip(tokens, names), key=lambda pair: pair[1])]
        texts = [f"{name} (T = {Ts[0]}{f' to {Ts[-1]}' if len(Ts) > 1 else ''})" for name, Ts in runs]
        if texts:
            sentences.append(f"Fastest, {how}: {', '.join(texts)}.")
    return " ".join(sentences)


def draw(record: dict) -> None:
    """Time by number of tokens, for each layer and direction, once for each theme."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "floor"  # the same file from the same numbers
    shapes = list(dict.fromkeys(row["shape"] for row in record["rows"]))
    for name, (paper, ink) in THEMES.items():
        figure = Figure(figsize=(10, 3.4 * len(shapes)), layout="constrained", facecolor=paper)
        grid = figure.subplots(len(shapes), len(DIRECTIONS), squeeze=False)
        for line, shape in zip(grid, shapes):
            for axes, direction in zip(line, DIRECTIONS):
                rows = [row for row in record["rows"] if (row["shape"], row["direction"]) == (shape, direction)]
                _draw_panel(axes, rows, record["machine"]["device"], ink)
                axes.set_title(f"{shape}, {direction}", loc="left", fontsize=10, color=ink)
                axes.set_facecolor(paper)
        handles = dict(zip(*reversed(grid[0, 0].get_legend_handles_labels())))
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=4,
            fontsize=8,
            frameon=False,
            labelcolor=ink,
        )
        figure.savefig(PAGE.with_name(name), metadata={"Date": None}, facecolor=paper)


def _draw_panel(axes, rows: list[dict], device: str, ink: str) -> None:
    tokens = sorted({row["T"] for row in rows})
    for name, colour in DRAWN.items():
        for launched, style in (("graph", "solid"), ("eager", (0, (2, 2)))):
            of = {row["T"]: row for row in rows if (row["contestant"], row["launched"]) == (name, launched)}
            us = [of[T]["ms"]["median"] * 1e3 for T in sorted(of)]
            marker = dict(marker="o", markersize=3.5) if launched == "graph" else {}
            axes.plot(sorted(of), us, color=colour, linestyle=style, label=f"{name}, {launched}", **marker)
    bounds = [floor_us(next(row for row in rows if row["T"] == T), device) for T in tokens]
    axes.plot(tokens, bounds, color=ink, linestyle=":", label="the weights alone")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [str(T) for T in tokens])
    low, high = axes.get_ylim()
    ticks = [tick for power in range(7) for tick in (10**power, 2 * 10**power, 5 * 10**power) if low <= tick <= high]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("tokens", color=ink)
    axes.set_ylabel("µs", color=ink)
    axes.tick_params(colors=ink, which="both")
    axes.grid(alpha=0.25, color=ink)
    for spine in axes.spines.values():
        spine.set_color(ink)
    axes.spines[["top", "right"]].set_visible(False)


def newest() -> dict | None:
    """The newest record; None where there is none."""
    paths = sorted(RECORDS.glob("*.json"))
    return json.loads(paths[-1].read_text()) if paths else None


def page(record: dict | None) -> str:
    """The page with its tables written anew."""
    return between_markers(PAGE, tables(record) if record else "Nothing is recorded yet.")


def main(arguments: list[str]) -> None:
    """Record the given pytest-benchmark files, if any, and write the page and its figures."""
    if arguments:
        save(record(*(json.loads(Path(name).read_text()) for name in arguments)), RECORDS)
    found = newest()
    PAGE.write_text(page(found))
    if found:
        draw(found)


if __name__ == "__main__":
    main(sys.argv[1:])
