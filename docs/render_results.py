"""From benchmarks to pages: no time of README.md, docs/results.md and docs/comparison.md is typed by hand.

    python3 -m pytest tests/bench --benchmark-json=build/bench.json
    torchrun --nproc-per-node=2 -m mega_moe.ranks_check --json build/ranks.json
    python3 docs/render_results.py build/bench.json
    python3 docs/render_results.py build/ranks.json

The first two lines measure, on one GPU and on several. The others keep what matters of it, the record: of one GPU as
docs/results/<date>-<device>.json, of several as docs/results/ranks/<date>-<number>-x-<device>.json. They write the
records' tables into the pages, between their markers. Without an argument only the pages are written. All want the
Python that has torch: what the hardware allows a kernel is asked of mega_moe.roofline.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # a bare checkout has nothing installed

from mega_moe import Problem, roofline
from mega_moe.ladder import DTYPES

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "results"
OF_RANKS = RECORDS / "ranks"
START, END = "<!-- results:start -->", "<!-- results:end -->"
NOTHING = "Nothing is recorded yet."

KEPT = (
    "shape",
    "direction",
    "gemm",
    "contestant",
    "label",
    "kind",
    "ranks",
    "precision",
    "interpreted",
    "tflops",
    "share_of_dense",
    "gb_per_s",
    "peak_bytes",
    "heap_bytes",
    "joules",
    "errors",
    "losses",
    "shares_of_budget",
)
"""What a record keeps of a benchmark's extra_info, beside its times."""

PEERS = ("transformers", "liger-kernel", "moe-ops", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")
"""Other people's packages whose versions belong to the numbers. A record has those that were installed."""

BOTH = "forward+backward"
DIRECTIONS = {"forward": "forward", "backward": "backward", BOTH: "both"}
"""By what a record calls it: the column's title."""

TAKEN_APART = "persistent"
"""The rung whose time is taken apart by kernel: the highest of which roofline.tiles has the bill."""

RIVALS = ("torch-compiled", "sonic-moe")
"""Whom that rung is held against: what most people have, and the fastest."""

ON_ONE_RANK = "mega"
"""The rung without heaps that those over ranks are held against."""

GOAL = 0.9
"""The share of the dense products' speed to come to."""


def main(arguments: list[str]) -> None:
    """Record the given pytest-benchmark files, or the given report of ranks_check, if any, and write the pages."""
    if arguments:
        reports = [json.loads(Path(name).read_text()) for name in arguments]
        if any("parts" in report for report in reports):
            save_ranks(*reports, folder=OF_RANKS)
        else:
            save(record(*reports), RECORDS)
    for page, block in blocks(*records()).items():
        page.write_text(between_markers(page, block))
        print(f"wrote {page.relative_to(ROOT)}")


def records() -> tuple[list[Path], list[Path]]:
    """The records of one GPU, and those of several, the newest first."""
    return tuple(sorted(folder.glob("*.json"), reverse=True) for folder in (RECORDS, OF_RANKS))


def record(*benchmarks: dict) -> dict:
    """One or more of pytest-benchmark's JSON reports as one record: machine, method, problems and a row a time.

    Raises ValueError where they do not belong together: another device or version, a table in two of them (its rows
    would not have been timed side by side), or nothing in them.
    """
    machines, methods, problems, rows = [], set(), {}, []
    for report in benchmarks:
        tables_before = {_table(row) for row in rows}
        for benchmark in report["benchmarks"]:
            info, stats = benchmark["extra_info"], benchmark["stats"]
            row = {key: info.get(key) for key in KEPT} | {"ms": times(stats)}
            if _table(row) in tables_before:
                raise ValueError(f"two reports have times for {', '.join(_table(row))}: give one of them")
            machines.append(info["machine"])
            methods.add(info["method"])
            problems[info["shape"]] = info["problem"]
            rows.append(row)
    if not rows:
        raise ValueError("there are no benchmarks in it")
    if len({json.dumps(machine | {"date": None}) for machine in machines}) > 1 or len(methods) > 1:
        raise ValueError("the rows come from different machines, versions or methods, and cannot stand in one table")
    machine = machines[-1] | {"date": max(machine["date"] for machine in machines)[:10]}
    return {"machine": machine, "method": methods.pop(), "problems": problems, "rows": rows}


def save(record: dict, folder: Path) -> Path:
    """Write the record, one line a row. Raises ValueError for a CPU's, since interpreted times are no results, and for
    one that no page can show."""
    machine = record["machine"]
    if is_cpu(record):
        raise ValueError(f"{machine['device']}: only a GPU's times are results")
    refuse_what_cannot_be_shown(record, tables, summary)
    lines = [f'"{key}": {json.dumps(record[key])}' for key in ("machine", "method", "problems")]
    lines.append('"rows": [\n' + ",\n".join(json.dumps(row) for row in record["rows"]) + "\n]")
    folder.mkdir(exist_ok=True)
    path = folder / f"{machine['date']}-{file_name(machine['device'])}.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return path


def save_ranks(*reports: dict, folder: Path) -> Path:
    """Write a report of ranks_check, or several of one node, as one record: each part as the last of them that passed
    it says. Raises ValueError where a part has not passed, for a CPU's, where they are not of one node, and where the
    page cannot show them."""
    if not all("parts" in report for report in reports):
        raise ValueError("give reports of ranks_check apart from those of the benchmarks")
    kept = {part["name"]: part for report in reports for part in report["parts"] if part["passed"]}
    failed = sorted({part["name"] for report in reports for part in report["parts"]} - kept.keys())
    if failed or not kept:
        raise ValueError(f"not a result, since parts have not passed: {', '.join(failed) or 'all'}")
    about = []
    for report in reports:
        (node,) = [part["facts"] for part in report["parts"] if part["name"] == "machine"] or [{}]
        about.append((report["ranks"], report["machine"] | {"date": None}, node.get("devices")))
    if any(one != about[0] or not one[-1] for one in about):
        raise ValueError("the reports come from different nodes or versions")
    machine = reports[-1]["machine"] | {"date": reports[-1]["machine"]["date"][:10]}
    whole = {"machine": machine, "ranks": reports[0]["ranks"], "parts": list(kept.values())}
    if is_cpu(whole):
        raise ValueError(f"{machine['device']}: only a GPU's times are results")
    refuse_what_cannot_be_shown(whole, over_gpus)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{machine['date']}-{whole['ranks']}-x-{file_name(machine['device'])}.json"
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path


def refuse_what_cannot_be_shown(record: dict, *shows: Callable[[dict], str]) -> None:
    """Raise ValueError, before it is saved, for a record in which something is missing: it would stand in the way of
    every page to come."""
    for show in shows:
        try:
            show(record)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not saved, since no page can show it ({type(error).__name__}: {error})") from error


def file_name(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def blocks(newest_first: list[Path], of_ranks: list[Path]) -> dict[Path, str]:
    """What stands between each page's markers, for records of one GPU, and for those of several."""
    results, readme, comparison = ROOT / "docs" / "results.md", ROOT / "README.md", ROOT / "docs" / "comparison.md"
    if not newest_first:
        return dict.fromkeys((results, readme, comparison), NOTHING)
    records = [json.loads(path.read_text()) for path in newest_first]
    parts = []
    for path, found in zip(newest_first, records):
        heading = "## One GPU" if path is newest_first[0] else f"## One GPU, an earlier run: {found['machine']['date']}"
        parts += [heading, tables(found), f"[All numbers of this run](results/{path.name})"]
        if path is newest_first[0]:
            parts += several(of_ranks)
    return {results: "\n\n".join(parts), readme: summary(records[0]), comparison: beside_others(records)}


def several(of_ranks: list[Path]) -> list[str]:
    """The newest record of each number of GPUs."""
    newest = {}
    for path in of_ranks:
        found = json.loads(path.read_text())
        newest.setdefault(found["ranks"], (path, found))
    parts = []
    for ranks, (path, found) in sorted(newest.items()):
        link = f"[All numbers of this run](results/ranks/{path.name})"
        parts += [f"## {ranks} GPUs of one host", over_gpus(found), link]
    return parts


def over_gpus(record: dict) -> str:
    """A record of ranks_check: the node, what was right, and for each layer its times, its exchange and its trace."""
    m, parts = record["machine"], {part["name"]: part for part in record["parts"]}
    node = parts["machine"]["facts"]
    versions = ", ".join(f"{what} {m[what]}" for what in ("torch", "triton", "python") if m.get(what))
    rate = f", {node['bytes_per_s'] / 1e9:.0f} GB/s each way in an all_to_all" if node.get("bytes_per_s") else ""
    lines = [f"**{record['ranks']} x {m['device']}**, {m['date']}; {versions}; NCCL {node['nccl']}{rate}."]
    right = [
        f"- {name}: {parts[name]['line']}"
        for name in ("parity", "stress", "graph", "groups", "failing")
        if name in parts
    ]
    lines.append("\n".join(right))
    for name, part in parts.items():
        if name.startswith("times "):
            shape = name.removeprefix("times ")
            traced = parts.get(f"trace {shape}", {}).get("facts", {})
            lines += [f"### {shape} over {record['ranks']} GPUs", _times_over_gpus(part["facts"])]
            lines.append(_exchange_over_gpus(part["facts"]["exchange"], traced))
            lines.append(_beside_the_model(parts.get("predicted", {}).get("facts", {}).get(shape, {})))
    return "\n\n".join(line for line in lines if line)


def _times_over_gpus(facts: dict) -> str:
    what = ("forward", "backward", "2 x forward + backward")
    rows = [row for row in facts["rows"] if not row["failure"]]
    first = rows[0]["ms"]["2 x forward + backward"]
    lines = []
    for row in rows:
        cells = [f"{row['ms'][name]:.2f} ± {row['spread'][name]:.2f}" for name in what]
        name = row["name"] if row["name"].startswith("plain") else f"**{row['name']}**"
        off = f"{max(row['off'].values()):.1e}" if row["off"] else "equal"
        lines.append([name, *cells, f"{first / row['ms'][what[-1]]:.2f}", off])
    header = ["", *what, f"times as fast as {rows[0]['name']}", "off one process"]
    caption = (
        f"Milliseconds of the slowest rank, median ± half of the interquartile range; {facts['tokens']} tokens a rank, "
        "routed at random; the rows took turns under load, each compared with one process that computes all tokens."
    )
    return f"{caption}\n\n{markdown(header, lines)}"


def _exchange_over_gpus(exchange: dict, traced: dict) -> str:
    lines = []
    for direction, e in exchange.items():
        if e["shown_ms"] is None or not e["bytes"]:
            continue
        by_trace = traced.get(direction, {}).get("hidden")
        lines.append(
            [
                direction,
                f"{e['bytes'] / 1e6:.0f}",
                f"{e['gb_per_s']:.0f}",
                f"{e['links_ms']:.2f}" if e["links_ms"] else "–",
                f"{e['shown_ms']:.2f}",
                f"{e['hidden']:.0%}" if e["hidden"] is not None else "–",
                f"{by_trace:.0%}" if by_trace is not None else "–",
            ]
        )
    if not lines:
        return ""
    header = [
        "",
        "MB each way",
        "GB/s on average",
        "the links alone, ms",
        "longer than without, ms",
        "hidden",
        "traced",
    ]
    caption = (
        "The exchange of mega: what goes over the links of the busiest rank, each way; what an all_to_all of as much "
        "takes; how much longer the launch is than on the same rows with all experts at home; the share of the links' "
        "time that so does not show; and the share of the exchange during which others multiply, by the trace of one "
        "launch."
    )
    return f"{caption}\n\n{markdown(header, lines)}"


def _beside_the_model(predicted: dict) -> str:
    """What `ranks_check` has found beside what mega_moe.predict says, by rung and direction; nothing without times."""
    lines, published = [], {}
    for rung, directions in predicted.items():
        for direction, its in directions.items():
            ms, took = its["predicted_ms"], its["measured_ms"]
            if took and "bound" in its:
                numbers = [f"{took:.2f}", f"{ms:.2f}", f"{ms / took - 1:+.0%}", f"{its['products']:.2f}"]
                lines.append([f"{rung}: {direction}", *numbers, f"{its['links']:.2f}", its["bound"]])
            if its.get("published_ms"):
                published[direction] = f"{its['published_ms']:.1f} {direction}"
    if not lines:
        return ""
    header = ["", "measured, ms", "predicted, ms", "", "products alone, ms", "links alone, ms", "bound by"]
    caption = "Over heaps, beside what [the model](scaling.md) says of as many H200s, and what it is that bounds them."
    if published:
        caption += f" Prime Mega MoE, as published: {', '.join(published.values())}, in ms."
    return f"{caption}\n\n{markdown(header, lines)}"


def between_markers(page: Path, block: str) -> str:
    """The page's text with `block` between its markers. Raises ValueError if it has none."""
    before, start, rest = page.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{page} has no {START} followed by {END}")
    return f"{before}{START}\n\n{block}\n\n{END}{after}"


def tables(record: dict) -> str:
    """Everything for the results page, and for the terminal: the machine, and for each shape the layer, its GEMMs, and
    where the highest rung's time goes, as far as that was measured."""
    parts = [machine_line(record)]
    for shape, problem in record["problems"].items():
        sizes = ", ".join(f"{letter} = {problem[letter]}" for letter in "THIEK")
        parts.append(f"### {shape}: {sizes}, {problem['dtype']}, {problem['routing']} routing{_save(problem)}")
        rows = [row for row in record["rows"] if row["shape"] == shape]
        layer, gemms = [row for row in rows if not row["gemm"]], [row for row in rows if row["gemm"]]
        if layer:
            spread = " ± half of the interquartile range" if any(_spread(row["ms"]) for row in layer) else ""
            parts.append(f"The layer: milliseconds, median{spread}; then forward / both directions.")
            if on_one_rank := [row for row in layer if not _over_ranks(row)]:
                parts.append(_layer(on_one_rank))
            if not is_cpu(record):
                parts.append(_energy(layer))
                parts += _verdict(layer)
                parts += _eight_bits(layer)
            parts += _exchanging(layer)
        if gemms:
            parts += ["Its grouped GEMMs, each alone: TFLOP/s (milliseconds).", _gemms(gemms)]
            if not is_cpu(record):
                parts += _taken_apart(layer, gemms, problem, roofline.ceiling(record["machine"]["device"]))
    return "\n\n".join(parts)


def summary(record: dict) -> str:
    """The README's table: forward, backward and both of every contestant, for each shape."""
    problems = record["problems"]
    columns = [(shape, direction) for shape in problems for direction in DIRECTIONS]
    titles = {shape: shape + _save(problem) for shape, problem in problems.items()}
    header = ["", *(f"{titles[shape]}<br>{DIRECTIONS[direction]}" for shape, direction in columns)]
    lines = [
        [_name(rows), *(_ms(_find(rows, direction, shape)) for shape, direction in columns)]
        for rows in _by_contestant(_on_one_rank(record))
    ]
    problem = next(iter(problems.values()))
    machine = record["machine"]
    caption = (
        f"Milliseconds on one {machine['device']}, {problem['dtype']}, T = {problem['T']}, {machine['date']}, median ± "
        "half of the interquartile range; parity checked in the same run. [How, and more](docs/results.md)"
    )
    if any("–" in cells for cells in lines):
        caption += "\n\n–: not measured in this run."
    return f"{markdown(header, lines)}\n\n{caption}"


def beside_others(newest_first: list[dict]) -> str:
    """The comparison's table: the times of those that are not rungs over those of TAKEN_APART, and peaks of memory, for
    each shape on which that rung was measured. Each from the newest record in which both ran side by side."""
    newest = newest_first[0]["machine"]["date"]
    runs = []  # of each record and shape: rows on one rank, what the rung took, when
    for record in newest_first:
        layer = _on_one_rank(record)
        for shape in record["problems"]:
            if ours := _medians([row for row in layer if row["shape"] == shape], TAKEN_APART):
                runs.append((shape, [row for row in layer if row["shape"] == shape], ours, record["machine"]["date"]))
    if not runs:
        return NOTHING
    shapes = list(dict.fromkeys(shape for shape, *_ in runs))
    others = {}  # name: a row of it
    for _, rows, *_ in runs:
        for row in rows:
            in_bf16 = row.get("precision") in (None, "bf16")
            if row["contestant"] == TAKEN_APART or (row["kind"] != "rung" and in_bf16):
                others.setdefault(row["contestant"], row)

    def cells(name: str, shape: str) -> list[str]:
        for here, layer, ours, date in runs:
            rows = [row for row in layer if row["contestant"] == name]
            if here != shape or not rows:
                continue
            found = [_find(rows, direction) for direction in DIRECTIONS]
            ratios = [f"{row['ms']['median'] / ours[row['direction']]:.2f}" if row else "–" for row in found]
            peak = found[-1]["peak_bytes"] if found[-1] else None
            when = "" if date == newest else f" ({date})"
            return [*ratios[:-1], ratios[-1] + when, f"{peak / 2**20:.0f}" if peak else "–"]
        return ["–"] * 4

    header = ["", *(f"{s}<br>{title}" for s in shapes for title in (*DIRECTIONS.values(), "peak MiB"))]
    lines = [[_name([row]), *(c for s in shapes for c in cells(name, s))] for name, row in others.items()]
    dated = (
        ", or on the date that stands there" if any(f"({d})" in c for *_, d in runs for ln in lines for c in ln) else ""
    )
    caption = (
        f"Their time over that of {TAKEN_APART}, both from one run on one {newest_first[0]['machine']['device']}, "
        f"{newest}{dated}: above 1 {TAKEN_APART} is faster, **below 1 they are**. Peaks are those of both directions "
        "together. [Milliseconds, spread, errors, versions and method](results.md)"
    )
    if any("–" in line[1:] for line in lines):
        caption += "\n\n–: not measured beside it, or nothing to measure."
    return f"{markdown(header, lines)}\n\n{caption}"


def is_cpu(record: dict) -> bool:
    """Whether the times are a CPU's, and some of them an interpreter's."""
    return "CPU" in record["machine"]["device"]


def times(stats: dict) -> dict:
    keys = ("median", "q1", "q3", "min", "max")
    return {key: float(f"{stats[key] * 1e3:.6g}") for key in keys} | {"samples": stats["rounds"]}


def _table(row: dict) -> tuple[str, str]:
    return row["shape"], row["gemm"] or row["direction"]


def machine_line(record: dict) -> str:
    m = record["machine"]
    versions = ", ".join(f"{what} {m[what]}" for what in ("torch", "triton", *PEERS, "python") if m.get(what))
    warning = ""
    if is_cpu(record):
        warning = "\n\n**A CPU's times are no results; those marked interpreted are Triton's interpreter at work.**"
    return f"**{m['device']}**, {m['date']}; {versions}. {record['method']}.{warning}"


def _save(problem: dict) -> str:
    """What a heading adds where rungs did not keep what they usually keep. The first records do not say."""
    save = problem.get("save", "pre")
    return "" if save == "pre" else f', save="{save}"'


def _over_ranks(row: dict) -> bool:
    """Whether it was measured over heaps. The first records do not say, and hold none that was."""
    return (row.get("ranks") or 1) > 1


def _on_one_rank(record: dict) -> list[dict]:
    """The rows of whole layers without heaps, in the order of the shape that has the most of them."""
    layer = [row for row in record["rows"] if not row["gemm"] and not _over_ranks(row)]
    measured = Counter(row["shape"] for row in layer)
    return sorted(layer, key=lambda row: -measured[row["shape"]])


def _layer(rows: list[dict], beside: list[dict] | None = None) -> str:
    """A line a contestant. beside: rows on one rank, of the same layer: then also how those over ranks compare."""
    lines = []
    for contestant in _by_contestant(rows):
        forward, backward, step = (_find(contestant, d) for d in DIRECTIONS)
        any_row = contestant[0]
        line = {"": _name(contestant)}
        line |= zip(DIRECTIONS.values(), map(_ms, (forward, backward, step)))
        line["TFLOP/s"] = _pair(forward, step, "tflops", lambda value: f"{value:.0f}")
        line["of dense"] = _pair(forward, step, "share_of_dense", lambda value: f"{value:.0%}")
        if beside is not None:
            line[f"of {ON_ONE_RANK}"] = _speeds(forward, step, beside)
        line["peak MiB"] = _pair(forward, step, "peak_bytes", lambda value: f"{value / 2**20:.0f}")
        if any(row.get("joules") for row in rows):
            line["joules"] = _pair(forward, step, "joules", lambda value: f"{value:.2f}")
        if beside is not None:
            line["heaps MiB"] = f"{any_row['heap_bytes'] / 2**20:.0f}" if any_row.get("heap_bytes") else "–"
        line["error: y / gradients"] = _errors(any_row["errors"])
        line["of budget"] = _share(any_row["shares_of_budget"])
        lines.append(line)
    return markdown(list(lines[0]), [list(line.values()) for line in lines])


def _exchanging(layer: list[dict]) -> list[str]:
    """A caption, and the table of what ran over ranks, below the rung that does the same without heaps; empty where
    nothing ran over ranks."""
    over_ranks = [row for row in layer if _over_ranks(row)]
    if not over_ranks:
        return []
    beside = [row for row in layer if row["contestant"] == ON_ONE_RANK]
    caption = (
        f"Over {over_ranks[0]['ranks']} ranks in one process, which share tokens and experts evenly: "
        f"*of {ON_ONE_RANK}* is their speed beside {ON_ONE_RANK} without heaps; *peak* holds the heaps."
    )
    return [caption, _layer(beside + over_ranks, beside)]


def _speeds(forward: dict | None, step: dict | None, beside: list[dict]) -> str:
    """The times beside over those of these rows, forward / both directions; an interpreter's say nothing."""
    speeds = []
    for row in (forward, step):
        other = _find(beside, row["direction"]) if row and not row["interpreted"] else None
        speeds.append(f"{other['ms']['median'] / row['ms']['median']:.0%}" if other else "–")
    return " / ".join(speeds)


def _gemms(rows: list[dict]) -> str:
    names = list(dict.fromkeys(row["gemm"] for row in rows))
    lines = []
    for contestant in _by_contestant(rows):
        found = {row["gemm"]: row for row in contestant}
        lines.append([_name(contestant), *(_rate(found.get(name)) for name in names)])
    return markdown(["", *names], lines)


def _energy(layer: list[dict]) -> str:
    """What the column of joules says, or why there is none. The first records do not have it."""
    if any(row.get("joules") for row in layer):
        return "*joules* is what the whole card takes for one run, forward / both directions, under sustained load."
    return "Energy was not measured in this run, or the card's driver does not count it."


def _verdict(layer: list[dict]) -> list[str]:
    """A sentence on the rung beside the dense products and its rivals; none where those products were not measured."""
    ms, dense = _medians(layer, TAKEN_APART), _medians(layer, "cublas")
    if not ms or not dense:
        return []
    labels = {row["contestant"]: row["label"] for row in layer}

    share = _each(lambda direction: f"{dense[direction] / ms[direction]:.0%}", " of the speed of the dense products")
    goal = _each(lambda direction: f"{dense[direction] / GOAL:.2f} instead of {ms[direction]:.2f}", " ms")
    claims = [share, f"at {GOAL:.0%} it would take {goal}"]
    for rival in RIVALS:
        if times := _medians(layer, rival):
            ratio = lambda direction, times=times: f"{times[direction] / ms[direction]:.2f}"
            claims.append(_each(ratio, f" times as fast as {labels[rival]}"))
    return [f"**{labels[TAKEN_APART]}**, both directions together: {'; '.join(claims)}."]


def _eight_bits(layer: list[dict]) -> list[str]:
    """A sentence on each rung in 8 bits beside itself in bf16; none where that was not measured. The first records do
    not say their precision, which is bf16."""
    sentences = []
    for rows in _by_contestant(layer):
        name, precision, label = (rows[0].get(key) for key in ("contestant", "precision", "label"))
        ms, bf16 = _medians(layer, name), _medians(layer, name.removesuffix(f"-{precision}"))
        if precision in (None, "bf16") or rows[0]["kind"] != "rung" or not ms or not bf16:
            continue
        ratio = lambda direction, ms=ms, bf16=bf16: f"{bf16[direction] / ms[direction]:.2f}"
        errors, losses = _errors(rows[0]["errors"]), _errors(rows[0]["losses"])
        sentences.append(
            f"**{label}**, both directions together: {_each(ratio, ' times as fast as in bf16')}; its errors are "
            f"{errors}, the reference's in {precision} {losses}."
        )
    return sentences


def _taken_apart(layer: list[dict], gemms: list[dict], problem: dict, ceiling: roofline.Ceiling | None) -> list[str]:
    """A caption and a line for each kernel of a training step by the rung: what the hardware allows, the dense product,
    the kernel itself. Empty unless the layer and all products of the rung were measured, and the dense products; and
    where backward makes pre again, which is a product more than was measured alone.
    """
    step, dense_step = _medians(layer, TAKEN_APART), _medians(layer, "cublas")
    dense, rung = ({row["gemm"]: row for row in gemms if row["contestant"] == name} for name in ("cublas", TAKEN_APART))
    dtype = DTYPES[problem["dtype"]]
    bill = roofline.tiles(Problem(**{letter: problem[letter] for letter in "THIEK"}, dtype=dtype))
    products = {name for name, cost in bill.items() if cost.flops}
    if not step or _save(problem) or not products <= dense.keys() & rung.keys():
        return []

    def allowed(cost: roofline.Cost) -> list[float | None]:
        if ceiling is None:
            return [None, None]
        return [cost.flops / (ceiling.tflops(dtype) * 1e9), cost.bytes / (ceiling.gb_per_s * 1e6)]

    def taken(name: str) -> list[float | None]:
        return [row[name]["ms"]["median"] if name in products else None for row in (dense, rung)]

    def line(name: str, figures: list[float | None]) -> list[str]:
        *_, dense_ms, ms = figures
        over = None if dense_ms is None else ms - dense_ms
        cells = ["–" if figure is None else f"{figure:.2f}" for figure in (*figures, over)]
        return [name, *cells, "–" if over is None else f"{over / step[BOTH]:.1%}"]

    figures = {name: [*allowed(cost), *taken(name)] for name, cost in bill.items()}
    columns = ([figure for figure in column if figure is not None] for column in zip(*figures.values()))
    figures["sum"] = [sum(column) if column else None for column in columns]
    figures["plan, table, sums, gaps"] = [None, None, 0.0, step[BOTH] - figures["sum"][-1]]
    figures["the layer"] = [None, None, dense_step[BOTH] if dense_step else None, step[BOTH]]
    header = ["", "flops", "bytes", "dense", "measured", "over dense", "of the layer"]
    caption = (
        f"Where the time of {rung['gate_up']['label']} goes, both directions together, in milliseconds: the least for "
        "flops and for bytes by the data sheet; the dense product of the same flops; the kernel alone; how much longer "
        "that is, and what share of the layer's time."
    )
    return [caption, markdown(header, [line(name, row) for name, row in figures.items()])]


def _each(text: Callable[[str], str], unit: str = "") -> str:
    """What `text` says of both directions together, and then of each."""
    return f"{text(BOTH)}{unit} (forward {text('forward')}, backward {text('backward')})"


def _medians(layer: list[dict], contestant: str) -> dict[str, float] | None:
    """Milliseconds of the layer by direction; None unless all of them were measured."""
    ms = {row["direction"]: row["ms"]["median"] for row in layer if row["contestant"] == contestant}
    return ms if DIRECTIONS.keys() <= ms.keys() else None


def _by_contestant(rows: list[dict]) -> list[list[dict]]:
    contestants = dict.fromkeys(row["contestant"] for row in rows)
    return [[row for row in rows if row["contestant"] == name] for name in contestants]


def _find(rows: list[dict], direction: str, shape: str | None = None) -> dict | None:
    found = [row for row in rows if row["direction"] == direction and shape in (None, row["shape"])]
    return found[0] if found else None


def _name(rows: list[dict]) -> str:
    label = rows[0]["label"] + (" (interpreted)" if rows[0]["interpreted"] else "")
    return f"**{label}**" if rows[0]["kind"] == "rung" else label


def _ms(row: dict | None) -> str:
    if row is None:
        return "–"
    return f"{row['ms']['median']:.2f}{_spread(row['ms'])}"


def _spread(ms: dict) -> str:
    """Half of the interquartile range; nothing where there is one sample, which has none."""
    return f" ± {(ms['q3'] - ms['q1']) / 2:.2f}" if ms["samples"] > 1 else ""


def _rate(row: dict | None) -> str:
    if row is None:
        return "–"
    rate = "–" if row["tflops"] is None else f"{row['tflops']:.0f}"
    return f"{rate} ({row['ms']['median']:.2f})"


def _pair(forward: dict | None, step: dict | None, key: str, text: Callable[[float], str]) -> str:
    values = [row.get(key) if row else None for row in (forward, step)]
    return " / ".join("–" if value is None else text(value) for value in values) if any(values) else "–"


def _errors(errors: dict[str, float | None]) -> str:
    if not errors:
        return "–"
    y, gradients = errors["y"], [error for name, error in errors.items() if name != "y"]
    return f"{y:.2%} / {min(gradients):.2%}-{max(gradients):.2%}"


def _share(shares: dict[str, float | None]) -> str:
    if not shares:
        return "–"
    return "over" if None in shares.values() else f"{max(shares.values()):.2f}"


def markdown(header: list[str], lines: list[list[str]]) -> str:
    """A table whose columns line up, so that it can be read before it is rendered too."""
    widths = [max(2, *(len(line[column]) for line in [header, *lines])) for column in range(len(header))]
    align = [str.ljust, *[str.rjust] * (len(header) - 1)]
    padded = [[side(cell, width) for side, cell, width in zip(align, line, widths)] for line in [header, *lines]]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [padded[0], rule, *padded[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
