"""From benchmarks of the trainer to its page: no time of a step in docs/training.md is typed by hand.

    python3 examples/train.py examples/qwen3-30b-a3b.toml --bench --json > build/qwen3-30b-a3b.jsonl
    python3 docs/render_training.py build/qwen3-30b-a3b.jsonl
    python3 docs/render_training.py

The first line measures, and prints all that it knows after each round. The second keeps the last whole line of each
file it is given, under the file's name, as docs/results/training/<date>-<device>.json. The third writes the tables of
the newest such record into the page, between their markers, as the second does too.
"""

import json
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import train

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "results" / "training"
PAGE = ROOT / "docs" / "training.md"
START, END = "<!-- steps:start -->", "<!-- steps:end -->"
NOTHING = "Nothing is recorded yet."

PEOPLE_RUN = dict(type="torch", stage="grouped_mm", compile=True)
"""What other rows are held against: the way in which most trainers compute experts."""


def main(arguments: list[str]) -> None:
    if arguments:
        save({Path(name).stem: last(Path(name).read_text()) for name in arguments})
    PAGE.write_text(page(newest()))


def last(text: str) -> dict:
    """The last whole line. A run that was stopped leaves half a line behind it."""
    for line in reversed(text.splitlines()):
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            continue
    raise SystemExit("render_training.py: there is no whole round")


def save(tables: dict[str, dict]) -> None:
    """In the record of each one's day and device, where it takes the place of one of its name."""
    for name, measured in tables.items():
        device = re.sub(r"[^a-z0-9]+", "-", measured["machine"]["device"].lower())
        path = RECORDS / f"{measured['machine']['date']}-{device}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(dict(sorted((kept | {name: measured}).items())), indent=1) + "\n")


def newest() -> dict[str, dict] | None:
    """The last record there is."""
    path = max(RECORDS.glob("*.json"), default=None)
    return json.loads(path.read_text()) if path else None


def page(record: dict[str, dict] | None) -> str:
    """The page with what stands between its markers written anew."""
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    by_size = sorted((record or {}).items(), key=lambda its: (len(ways_of(its[1])), size_of(its[1])))
    text = "\n\n".join(render(name, measured) for name, measured in by_size) or NOTHING
    return before + START + "\n\n" + text + "\n\n" + END + rest.split(END)[1]


def ways_of(measured: dict) -> list[str]:
    """What backward makes again, in the order of the rows."""
    return list(dict.fromkeys(row["activation_checkpointing"] for row in measured["rows"]))


def size_of(measured: dict) -> int:
    return measured["config"]["model"]["hidden_size"]


def render(name: str, measured: dict) -> str:
    """A table, with what it is of above and below."""
    m, rows, ways = measured["config"]["model"], measured["rows"], ways_of(measured)
    heads = ["experts", *["made again"] * (len(ways) > 1), "step, ms", "in MoE, ms", "the rest, ms", "share of MoE"]
    knows_kept = any(row.get("kept_bytes") for row in rows)
    heads += ["tokens/s", "MFU", *["kept"] * knows_kept, "peak", "loss off", "norm off"]
    lines = [f"| {' | '.join(heads)} |", "|:--" * (1 + (len(ways) > 1)) + "|--:" * (9 + knows_kept) + "|"]
    for row in rows:
        told = train.shown(row)
        cells = [f"**{called(row)}**" if row["moe"]["type"] == "mega_moe" else called(row)]
        cells += [row["activation_checkpointing"]] * (len(ways) > 1)
        cells += [f"{1e3 * row['s_per_step']:,.1f} ± {1e3 * row['spread']:.1f}", f"{in_moe(row):,.1f}"]
        cells += [f"{1e3 * row['s_per_step'] - in_moe(row):,.1f}", f"{row['moe_share']:.0%}"]
        cells += [f"{row['tokens_per_s_per_rank']:,.0f}", told["mfu"]]
        cells += [f"{row['kept_bytes'] / 2**30:.2f} GiB"] if knows_kept else []
        cells += [told["peak_bytes"]]
        cells += [f"{row['loss_difference']:.0e}", f"{row['norm_difference']:.0e}"]
        lines.append(f"| {' | '.join(cells)} |")
    sizes = f"H = {m['hidden_size']}, I = {m['moe_intermediate_size']}, E = {m['num_experts']}"
    what = name if len(ways) == 1 else "What backward makes again"
    title = f"{what}: {m['num_hidden_layers']} layers, {sizes}, K = {m['num_experts_per_tok']}"
    return "\n\n".join(filter(None, (f"### {title}", "\n".join(lines), caption(measured, ways), held(rows))))


def called(row: dict) -> str:
    return train.named(row["moe"])


def in_moe(row: dict) -> float:
    """Milliseconds."""
    return 1e3 * row["s_per_step"] * row["moe_share"]


def caption(measured: dict, ways: list[str]) -> str:
    """What was measured, and on what."""
    machine, data, train = measured["machine"], measured["config"]["data"], measured["config"]["train"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "transformers", "python"))
    again = f", activation_checkpointing = {ways[0]!r}" if len(ways) == 1 else ""
    steps = measured["config"]["bench"].get("after", 0)  # older records know no such thing
    after = f", after {steps} steps of training" if steps else ", with weights as they are drawn"
    m, knows_kept = measured["config"]["model"], any(row.get("kept_bytes") for row in measured["rows"])
    everybody = m["num_experts"] / m["num_experts_per_tok"]
    return (
        f"{machine['ranks']} × {machine['device']}, {machine['date']}; {versions}. A step of {data['batch']} × "
        f"{data['length']:,} tokens in {train['dtype']}{again}{after}; median of {measured['rounds']} rounds in which "
        f"the rows take turns, ± half of the interquartile range. The most loaded expert of a layer has "
        f"{measured['load']['max_load']:.1f} times the mean, where {everybody:.1f} is every token. Losses and norms "
        f"are off the first row's by no more than that share of it in any round."
        + (" *Kept* is what forward leaves for backward, of the whole model." if knows_kept else "")
        + (f" Read from {measured['read_from']}." if "read_from" in measured else "")
    )


def held(rows: list[dict]) -> str:
    """Our rows in 16 bits beside what people run, of a step and of its MoE; nothing where that did not run."""
    beside = next((row for row in rows if PEOPLE_RUN.items() <= row["moe"].items()), None)
    said = []
    for row in rows:
        if beside and row["moe"]["type"] == "mega_moe" and not row["moe"]["precision"]:
            step, moe = row["s_per_step"] / beside["s_per_step"], in_moe(row) / in_moe(beside)
            said.append(f"with {called(row)} {share(step)} ({share(moe)} in MoE)")
    return f"Beside {called(beside)} a step takes {', '.join(said)}." if said else ""


def share(of: float) -> str:
    """In words, of the time of what it stands beside."""
    return f"{abs(1 - of):.0%} {'less' if of < 1 else 'more'}"


if __name__ == "__main__":
    main(sys.argv[1:])
