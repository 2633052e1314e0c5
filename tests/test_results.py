"""Benchmarks run end to end, refuse what is wrong, and reach the pages as numbers that nobody typed."""

import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import render_results
import torch
from cases import on_cpu

from mega_moe import LADDER
from mega_moe.shapes import PRESETS

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "tests" / "bench"


@pytest.fixture
def measuring(monkeypatch):
    """tests/bench/measuring.py, which the benchmarks import from their own folder."""
    monkeypatch.syspath_prepend(BENCH)
    import measuring

    return measuring


# The benchmarks.


@on_cpu
def test_every_contestant_is_checked_timed_and_rendered(tmp_path):
    command = [sys.executable, "-m", "pytest", str(BENCH), "-p", "no:cacheprovider"]
    command.append(f"--benchmark-json={tmp_path / 'bench.json'}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "bench.json").read_text())

    rows = {(b["group"], b["extra_info"]["contestant"]): b for b in report["benchmarks"]}
    contestants = {contestant for _, contestant in rows}
    able = [rung for rung in LADDER if not rung.why_not(PRESETS["tiny"].at(device="cpu"))]
    over_ranks = {f"{rung.name}-over-2" for rung in able if rung.over_ranks}
    kernels = [rung for rung in able if rung.needs_triton]
    in_8_bits = [rung for rung in kernels if rung.name != "ranks"]  # which has persistent's products
    eight_bits = {f"{rung.name}-{p}": p for rung in in_8_bits for p in rung.precisions if p != "bf16"}
    interpreted = {rung.name for rung in kernels} | over_ranks | eight_bits.keys()
    ceilings = {"cublas": "bf16", "cublas-fp8": "fp8", "cublas-fp8_bwd": "fp8_bwd"}
    everybody = (
        {rung.name for rung in able} | interpreted | {"torch", "torch-compiled", "transformers"} | ceilings.keys()
    )
    assert everybody <= contestants and "persistent-fp8" in eight_bits

    for (_, contestant), benchmark in rows.items():
        info, stats = benchmark["extra_info"], benchmark["stats"]
        assert stats["median"] > 0 and stats["rounds"] == len(stats["data"])
        assert info["machine"]["torch"] == torch.__version__ and info["machine"]["date"] and info["method"]
        assert info["interpreted"] == (contestant in interpreted)
        assert info.get("ranks", 1) == (2 if contestant in over_ranks else 1)
        assert info["tflops"] is None, "a CPU's rate is no rate"
        if "gemm" not in info:
            assert info["precision"] == (eight_bits | ceilings).get(contestant, "bf16")
        if contestant in eight_bits:
            assert info["losses"]["dx"] > 0.04 and info["errors"]["dx"] == pytest.approx(info["losses"]["dx"], rel=0.05)
        elif contestant not in ceilings:
            assert info["errors"] and all(error < 0.01 for error in info["errors"].values())
    both, forward, backward = (
        rows[f"tiny: {direction}", "grouped"]["stats"]["data"]
        for direction in ("forward+backward", "forward", "backward")
    )
    assert both == pytest.approx([f + b for f, b in zip(forward, backward)], rel=1e-6)

    record = render_results.record(report)
    with pytest.raises(ValueError, match="only a GPU's times are results"):
        render_results.save(record, tmp_path)
    text = render_results.tables(record)
    assert text in run.stdout, "the tables are printed last"
    for label in ("mega_moe, grouped (interpreted)", "plain torch, eager", "dense GEMMs of the same flops"):
        assert label in text


def test_wrong_results_get_no_time(measuring):
    from contestants import CONTESTANTS, Runner

    plain = CONTESTANTS["torch"]

    def off_by(share, problem, inputs, dy):
        runner = plain.start(problem, inputs, dy)
        return Runner(lambda: runner.forward() * (1 + share), runner.backward)

    def broken(problem, inputs, dy):
        raise RuntimeError("out of memory")

    measured = measuring.measure_layer(
        PRESETS["tiny"].at(device="cpu"),
        [
            plain,
            replace(plain, name="rounds elsewhere", start=partial(off_by, 0.015)),
            replace(plain, name="wrong", start=partial(off_by, 0.03)),
            replace(plain, name="rung over budget", start=partial(off_by, 0.015), kind="rung"),
            replace(plain, name="broken", start=broken),
            replace(plain, name="missing", why_not=lambda problem: "not installed"),
        ],
    )

    assert {name for name, m in measured.items() if m.seconds} == {"torch", "rounds elsewhere"}
    assert "no time without parity: y" in measured["wrong"].failure
    assert "no time without parity: y" in measured["rung over budget"].failure
    assert "out of memory" in measured["broken"].failure
    assert measured["missing"].why_not == "not installed"


def test_8_bits_are_held_to_what_8_bits_lose(measuring):
    """The reference as a contestant in fp8: as it is; off by shares of itself; and as one that rounds nothing."""
    from contestants import CONTESTANTS

    reference = CONTESTANTS["reference"]

    def off_by(share, problem, inputs, dy):
        runner = reference.start(problem, inputs, dy)
        return replace(runner, forward=lambda: runner.forward() * (1 + share))

    def in_bf16(problem, inputs, dy):
        return reference.start(problem.at(precision="bf16"), inputs, dy)

    in_fp8 = replace(reference, precision="fp8")
    measured = measuring.measure_layer(
        PRESETS["tiny"].at(device="cpu"),
        [
            replace(in_fp8, name="right"),
            replace(in_fp8, name="wrong", start=partial(off_by, 0.03), kind="peer"),
            replace(in_fp8, name="not in 8 bits", start=in_bf16, kind="peer"),
            replace(in_fp8, name="half of it", precision="fp8_bwd"),
        ],
    )

    assert {name for name, m in measured.items() if m.seconds} == {"right", "half of it"}
    right, half = measured["right"], measured["half of it"]
    assert all(0.04 < loss < 0.1 for loss in right.losses.values())
    assert right.errors == pytest.approx(right.losses, rel=0.03)
    assert half.losses["y"] < 1e-6 and half.errors["y"] < 0.01 and half.losses["dx"] > 0.04
    assert all(0 < share <= 1 for m in (right, half) for share in m.shares.values())
    assert "no time without parity: y" in measured["wrong"].failure
    assert "no time without parity: y, dx" in measured["not in 8 bits"].failure


def test_a_forgotten_operand_is_seen(measuring):
    """Its results keep the parity budget; they are too good."""
    from contestants import CONTESTANTS

    from mega_moe.reference.quantize import Format

    steps = import_module("mega_moe.reference.forward")
    as_ever, reference = steps.down, CONTESTANTS["reference"]

    class ReadsRowsAsTheyAre(Format):
        def rows(self, t):
            return t.float()

    def down(act, w_down, plan, format):
        return as_ever(act, w_down, plan, ReadsRowsAsTheyAre(format.scale_of, format.along, format.across))

    def forgetful(problem, inputs, dy):
        runner = reference.start(problem, inputs, dy)

        def forward():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(steps, "down", down)
                return runner.forward()

        return replace(runner, forward=forward)

    contestant = replace(reference, name="forgetful", precision="fp8", start=forgetful)
    measured = measuring.measure_layer(PRESETS["tiny"].at(device="cpu"), [contestant])["forgetful"]
    assert all(0 < share < 1 for share in measured.shares.values())
    assert measured.errors["y"] < measured.losses["y"] and not measured.seconds
    assert "no time without parity: y failed" in measured.failure


def test_errors_add_up_in_squares(measuring):
    """0.06 and 0.02 at right angles are 0.063; 0.02 of bf16 is 0.02 of everything."""
    losses = dict(y=0.06, dx=0.0)
    for y, dx, out in ((0.0632, 0.0199, []), (0.0633, 0, ["y"]), (0.0565, 0, ["y"]), (0.0566, 0.0201, ["dx"])):
        assert measuring.astray(dict(y=y, dx=dx), losses) == out
    assert measuring.astray(dict(y=float("nan"), dx=float("inf")), losses) == ["y", "dx"]


def test_one_oracle_is_held_at_a_time(measuring, monkeypatch):
    """Each holds the layer's results in float64, and takes several times as much while it makes them."""
    from contestants import CONTESTANTS

    made = []

    class Watched(measuring.Oracle):
        def __init__(self, *facts):
            assert not [oracle for oracle in made if oracle()], "the one before is still held"
            super().__init__(*facts)
            made.append(weakref.ref(self))

    monkeypatch.setattr(measuring, "Oracle", Watched)
    contestants = [
        replace(CONTESTANTS["reference"], name=precision, precision=precision) for precision in ("fp8", "bf16", "mxfp8")
    ]
    measured = measuring.measure_layer(PRESETS["tiny"].at(device="cpu"), contestants)
    assert len(made) == 4 and all(m.seconds for m in measured.values())


def test_the_dense_products_in_8_bits_are_products(measuring):
    from contestants import product, product_of_codes

    a, b = (torch.randn(32, 32, generator=torch.Generator().manual_seed(0)).bfloat16() for _ in range(2))
    for left, right in ((a, b), (a.mT, b), (a, b.mT)):
        exact = left.double() @ right.double()
        assert measuring.relative_l2(product(left, right)(), exact) < 0.005
        assert 0.01 < measuring.relative_l2(product_of_codes(left, right)(), exact) < 0.06


def test_a_wrong_gemm_is_seen(measuring):
    from gemms import make

    from mega_moe.routing import plan

    problem = PRESETS["tiny"].at(device="cpu")
    ids = torch.randint(problem.E, (problem.T, problem.K), generator=torch.Generator().manual_seed(0))
    for name, gemm in make(problem, plan(ids, problem.E)).items():
        product, _ = gemm.run("torch")
        right = product()
        wrong = right.clone()
        wrong[-1] = 0  # the last row, or the last expert's gradient
        good, bad = measuring.Measurement(), measuring.Measurement()
        measuring.examine_gemm(good, gemm, "torch", right)
        measuring.examine_gemm(bad, gemm, "torch", wrong)

        assert good.errors["product"] < 0.005 and not good.failure, name
        assert "no time without parity" in bad.failure, name


def test_laps_are_cut_at_their_marks(measuring, monkeypatch):
    now = iter([0.0, 1.0, 3.0, 7.0, 15.0])
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(now))

    assert measuring.back_to_back(lambda mark: (mark(), mark()), 2, "cpu") == [[1.0, 2.0], [4.0, 8.0]]


# The pages.


def benchmarks(shape="qwen3-30b-a3b", device="NVIDIA H200", date="2026-12-01T10:00:00+00:00") -> dict:
    """A report as pytest-benchmark writes it, with made-up times."""
    problem = dict(T=16384, H=2048, I=768, E=128, K=8, W=1, dtype="bf16", routing="balanced")
    machine = dict(device=device, torch="2.11.0", triton="3.6.0", python="3.12.3", date=date, transformers="5.17.0")
    rows = []

    def add(contestant, label, kind, direction, ms, tflops, share, gemm=None):
        row = dict(shape=shape, problem=problem, direction=direction, contestant=contestant, label=label, kind=kind)
        row |= dict(
            interpreted=False, tflops=tflops, share_of_dense=share, gb_per_s=None, machine=machine, method="How"
        )
        row |= dict(gemm=gemm) if gemm else {}
        if kind == "ceiling":
            row |= dict(peak_bytes=None, errors={}, shares_of_budget={})
        else:
            row |= dict(
                peak_bytes=2**31,
                errors=dict(y=0.0029, dx=0.0026, dtopk_weights=0.003, dw_gate_up=0.0031, dw_down=0.0035),
                shares_of_budget=dict(y=0.41, dx=0.5, dtopk_weights=0.2, dw_gate_up=0.3, dw_down=0.62),
            )
        seconds = dict(median=ms / 1e3, q1=ms / 1e3 - 1e-5, q3=ms / 1e3 + 3e-5, min=ms / 2e3, max=ms / 5e2, rounds=600)
        rows.append({"extra_info": row, "stats": seconds | {"data": [ms / 1e3] * 600}})

    for direction, ms, tflops in (("forward", 2.5, 495.0), ("backward", 5.0, 495.1), ("forward+backward", 7.5, 495.2)):
        add("grouped", "mega_moe, grouped", "rung", direction, ms, tflops, 0.74)
        add("torch", "plain torch, eager", "peer", direction, 2 * ms, tflops / 2, 0.37)
        add("cublas", "dense GEMMs of the same flops", "ceiling", direction, 0.74 * ms, tflops / 0.74, 1.0)
    add("grouped", "mega_moe, grouped", "rung", "product", 1.52, 543.2, 0.8, gemm="gate_up")
    return {"benchmarks": rows}


def cells(text: str) -> list[list[str]]:
    """The cells of all tables in a text, line by line."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_a_report_becomes_tables():
    text = render_results.tables(render_results.record(benchmarks()))

    lines = cells(text)
    times = ["2.50 ± 0.02", "5.00 ± 0.02", "7.50 ± 0.02"]
    assert ["**mega_moe, grouped**", *times, "495 / 495", "74% / 74%", "2048 / 2048", *lines[2][-2:]] == lines[2]
    assert lines[2][-2:] == ["0.29% / 0.26%-0.35%", "0.62"]
    assert lines[3][:2] == ["plain torch, eager", "5.00 ± 0.02"]
    assert lines[4][-3:] == ["–", "–", "–"]  # a ceiling has no result to be wrong
    assert ["**mega_moe, grouped**", "543 (1.52)"] in lines
    assert "**NVIDIA H200**, 2026-12-01; torch 2.11.0, triton 3.6.0, transformers 5.17.0, python 3.12.3. How." in text
    assert "T = 16384, H = 2048, I = 768, E = 128, K = 8, bf16" in text
    assert "joules" not in lines[0] and "Energy was not measured in this run" in text


def test_energy_stands_beside_time_where_it_was_counted():
    """By contestant, for forward and for both directions together; backward alone is never counted."""
    report = benchmarks()
    for row in report["benchmarks"]:
        info = row["extra_info"]
        counted = {"forward": 1.46, "forward+backward": 4.5}.get(info["direction"])
        info["joules"] = counted if info["contestant"] == "grouped" else None
    record = render_results.record(report)
    assert {row["joules"] for row in record["rows"]} == {1.46, 4.5, None}
    text = render_results.tables(record)
    at = cells(text)[0].index("joules")
    assert [line[at] for line in cells(text)[2:5]] == ["1.46 / 4.50", "–", "–"]
    assert "*joules* is what the whole card takes for one run" in text and "Energy was not" not in text


def test_what_ran_over_ranks_stands_apart_beside_one_rank():
    """2.5 ms and 7.5 on one rank, 3.125 and 10 over eight: 80 % and 75 % of the speed. The README shows one rank."""
    report = benchmarks()
    for row in report["benchmarks"]:
        info = row["extra_info"]
        if info["contestant"] == "grouped":
            info |= dict(contestant="mega", label="mega_moe, mega", ranks=1, heap_bytes=0)
        if info["contestant"] == "torch":
            seconds = {"forward": 0.003125, "backward": 0.006875, "forward+backward": 0.01}[info["direction"]]
            row["stats"] |= dict(median=seconds, q1=seconds, q3=seconds)
            info |= dict(contestant="mega-over-8", label="mega_moe, mega over 8 ranks", kind="rung", ranks=8)
            info |= dict(heap_bytes=2**30)
    record = render_results.record(report)
    one_rank, ranks = render_results.tables(record).split("Over 8 ranks in one process")

    assert [line[0] for line in cells(one_rank)[2:]] == ["**mega_moe, mega**", "dense GEMMs of the same flops"]
    header, _, one, eight, *gemms = cells(ranks)
    assert header[5:9] == ["of dense", "of mega", "peak MiB", "heaps MiB"] and len(gemms) == 3
    assert one[0] == "**mega_moe, mega**" and one[6:9] == ["100% / 100%", "2048 / 2048", "–"]
    assert eight[0] == "**mega_moe, mega over 8 ranks**" and eight[6:9] == ["80% / 75%", "2048 / 2048", "1024"]
    assert eight[1:4] == ["3.12 ± 0.00", "6.88 ± 0.00", "10.00 ± 0.00"]
    assert "over 8 ranks" not in render_results.summary(record)
    assert "in one process" not in render_results.tables(render_results.record(benchmarks()))

    alone = without(record, "mega")
    assert cells(render_results.tables(alone).split("in one process")[1])[2][6] == "– / –"


PRODUCTS = ("gate_up", "down", "dact", "dw_down", "drows", "dw_gate_up")


def taken_apart() -> dict:
    """A record of the highest rung, its rivals and the dense products: 10 ms and 2 forward, for 6 and 1.5 dense."""
    record = render_results.record(benchmarks())
    template = record["rows"][0] | {"peak_bytes": None}

    def rows(contestant: str, label: str, times: dict[str, float], gemm: bool = False) -> list[dict]:
        facts = dict(contestant=contestant, label=label, kind="rung")
        return [
            template | facts | dict(direction=d, gemm=d if gemm else None, ms=dict(median=ms, q1=ms, q3=ms, samples=9))
            for d, ms in times.items()
        ]

    def layer(forward: float, both: float) -> dict[str, float]:
        return {"forward": forward, "backward": both - forward, "forward+backward": both}

    record["rows"] = [
        *rows("persistent", "mega_moe, persistent", layer(2.0, 10.0)),
        *rows("torch-compiled", "plain torch, torch.compile", layer(5.0, 12.0)),
        *rows("sonic-moe", "SonicMoE, CuTe", layer(1.9, 7.0)),
        *rows("cublas", "dense", layer(1.5, 6.0)),
        *rows("persistent", "mega_moe, persistent", dict(zip(PRODUCTS, (1.4, 0.8, 0.9, 0.7, 1.5, 1.7))), gemm=True),
        *rows("cublas", "dense", dict(zip(PRODUCTS, (1.2, 0.7, 0.6, 0.6, 1.3, 1.2))), gemm=True),
    ]
    return record


def without(record: dict, contestant: str, gemm: str | None = None) -> dict:
    """The record without a contestant's rows of the layer, or without its row of one product."""
    gone = [row for row in record["rows"] if row["contestant"] == contestant and row["gemm"] == gemm]
    assert gone
    return record | {"rows": [row for row in record["rows"] if row not in gone]}


def test_the_highest_rungs_time_is_taken_apart():
    """Bounds by hand: the products are 4 or 2 x 131072 x 2048 x 768 flops at 989.5 TFLOP/s, and y reads 131072 rows of
    2048 bf16 and as many fp32 weights, and writes 16384 tokens, at 4.8 TB/s."""
    lines = cells(render_results.tables(taken_apart()))

    assert lines[lines.index(["", "flops", "bytes", "dense", "measured", "over dense", "of the layer"]) + 2 :] == [
        ["gate_up", "0.83", "0.31", "1.20", "1.40", "0.20", "2.0%"],
        ["down", "0.42", "0.24", "0.70", "0.80", "0.10", "1.0%"],
        ["y", "0.00", "0.13", "–", "–", "–", "–"],
        ["dact", "0.42", "0.31", "0.60", "0.90", "0.30", "3.0%"],
        ["drows", "0.83", "0.36", "1.30", "1.50", "0.20", "2.0%"],
        ["dx", "0.00", "0.13", "–", "–", "–", "–"],
        ["dw_gate_up", "0.83", "0.27", "1.20", "1.70", "0.50", "5.0%"],
        ["dw_down", "0.42", "0.14", "0.60", "0.70", "0.10", "1.0%"],
        ["sum", "3.75", "1.87", "5.60", "7.00", "1.40", "14.0%"],
        ["plan, table, sums, gaps", "–", "–", "0.00", "3.00", "3.00", "30.0%"],
        ["the layer", "–", "–", "6.00", "10.00", "4.00", "40.0%"],
    ]


def test_an_unknown_device_has_no_bounds():
    record = taken_apart()
    record["machine"]["device"] = "NVIDIA H900"
    lines = cells(render_results.tables(record))

    assert ["gate_up", "–", "–", "1.20", "1.40", "0.20", "2.0%"] in lines
    assert ["sum", "–", "–", "5.60", "7.00", "1.40", "14.0%"] in lines


@pytest.mark.parametrize(
    "record",
    [
        render_results.record(benchmarks()),
        without(taken_apart(), "persistent"),
        without(taken_apart(), "persistent", "dw_down"),
        without(taken_apart(), "cublas", "drows"),
        taken_apart()
        | {"problems": {"qwen3-30b-a3b": taken_apart()["problems"]["qwen3-30b-a3b"] | {"save": "inputs"}}},
        taken_apart() | {"machine": taken_apart()["machine"] | {"device": "EPYC (CPU, 1 thread)"}},
    ],
    ids=["no rows", "no layer", "a product missing", "a dense product missing", "pre made again", "a CPU's"],
)
def test_what_was_not_measured_is_not_taken_apart(record):
    assert "over dense" in render_results.tables(taken_apart()) and "over dense" not in render_results.tables(record)


def test_the_highest_rung_is_held_against_its_rivals():
    """10 ms, and 2 forward; 90 % of the dense products' speed would take 6 / 0.9 = 6.67 ms, and 1.67 forward."""
    start = "**mega_moe, persistent**, both directions together: "
    dense = (
        "60% of the speed of the dense products (forward 75%, backward 56%); at 90% it would take 6.67 instead of "
        "10.00 ms (forward 1.67 instead of 2.00, backward 5.00 instead of 8.00)"
    )
    compiled = "1.20 times as fast as plain torch, torch.compile (forward 2.50, backward 0.88)"
    sonic = "0.70 times as fast as SonicMoE, CuTe (forward 0.95, backward 0.64)"
    record = taken_apart()

    assert f"{start}{dense}; {compiled}; {sonic}." in render_results.tables(record)
    assert f"{start}{dense}; {compiled}." in render_results.tables(without(record, "sonic-moe"))
    assert "times as fast" not in render_results.tables(without(record, "cublas"))
    faster = record["rows"][2]
    assert faster["direction"] == "forward+backward"
    faster["ms"] = dict(median=6.5, q1=6.5, q3=6.5, samples=9)
    assert "92% of the speed of the dense products (forward 75%, backward 56%); at 90% it would take 6.67" in (
        render_results.tables(record)
    )


def test_others_stand_beside_the_highest_rung_as_ratios():
    """10 ms, and 2 forward: 7 and 1.9 of SonicMoE's are 0.70 and 0.95, its backward 5.1 of 8 is 0.64. No other rung."""
    record = taken_apart()
    for row in record["rows"]:
        row["kind"] = "rung" if row["contestant"] == "persistent" else "peer"
        row["peak_bytes"] = 2**30 if row["contestant"] == "sonic-moe" else None
    other_rung = [row | dict(contestant="grouped", label="mega_moe, grouped") for row in record["rows"][:3]]
    text = render_results.beside_others([record | {"rows": [*record["rows"], *other_rung]}])
    header, _, *lines = cells(text)

    assert header[1:] == [f"qwen3-30b-a3b<br>{title}" for title in ("forward", "backward", "both", "peak MiB")]
    assert lines == [
        ["**mega_moe, persistent**", "1.00", "1.00", "1.00", "–"],
        ["plain torch, torch.compile", "2.50", "0.88", "1.20", "–"],
        ["SonicMoE, CuTe", "0.95", "0.64", "0.70", "1024"],
        ["dense", "0.75", "0.56", "0.60", "–"],
    ]
    assert "one NVIDIA H200, 2026-12-01" in text
    assert text.endswith("–: not measured beside it, or nothing to measure.")
    assert render_results.beside_others([without(record, "persistent")]) == render_results.NOTHING


def test_others_are_taken_from_the_newest_run_that_has_them():
    """SonicMoE was not in the newest run: its ratio is the older one's, in which persistent took twice as long."""
    newest = without(taken_apart(), "sonic-moe")
    older = json.loads(json.dumps(taken_apart()))
    older["machine"]["date"] = "2026-11-01"
    for row in older["rows"]:
        if row["contestant"] in ("persistent", "torch-compiled"):
            row["ms"]["median"] *= 2
    for row in [*newest["rows"], *older["rows"]]:
        row["kind"] = "rung" if row["contestant"] == "persistent" else "peer"
    text = render_results.beside_others([newest, older])
    found = {line[0]: line[1:4] for line in cells(text)[2:]}

    assert found["plain torch, torch.compile"] == ["2.50", "0.88", "1.20"]
    assert found["SonicMoE, CuTe"] == ["0.47", "0.32", "0.35 (2026-11-01)"]
    assert "2026-12-01, or on the date that stands there" in text


def test_8_bits_stand_beside_16():
    """10 ms, and 2 forward, in bf16; 8 and 1.6 in fp8: 1.25 times as fast in both directions."""
    record = taken_apart()
    template = record["rows"][0]
    facts = dict(contestant="persistent-fp8", label="mega_moe, persistent, fp8", precision="fp8")
    facts |= dict(errors=dict(y=0.0636, dx=0.065, dw_down=0.063), losses=dict(y=0.064, dx=0.0651, dw_down=0.062))
    fp8 = [
        template | facts | dict(direction=direction, ms=dict(median=ms, q1=ms, q3=ms, samples=9))
        for direction, ms in (("forward", 1.6), ("backward", 6.4), ("forward+backward", 8.0))
    ]
    both = record | {"rows": [*record["rows"], *fp8]}
    sentence = (
        "**mega_moe, persistent, fp8**, both directions together: 1.25 times as fast as in bf16 (forward 1.25, "
        "backward 1.25); its errors are 6.36% / 6.30%-6.50%, the reference's in fp8 6.40% / 6.20%-6.51%."
    )

    text = render_results.tables(both)
    assert sentence in text
    assert ["**mega_moe, persistent, fp8**", "1.60 ± 0.00", "6.40 ± 0.00", "8.00 ± 0.00"] in [
        c[:4] for c in cells(text)
    ]
    assert "**mega_moe, persistent, fp8**" in render_results.summary(both)
    dense = [row | dict(contestant="cublas-fp8", kind="ceiling", precision="fp8") for row in both["rows"][:3]]
    both = both | {"rows": [*both["rows"], *dense]}
    assert "fp8" not in render_results.beside_others([both]), "bf16 beside bf16"
    assert "as in bf16" not in render_results.tables(record)
    assert "as in bf16" not in render_results.tables(without(both, "persistent"))


def test_headings_say_what_was_kept_if_it_was_not_the_usual():
    report = benchmarks()
    usual = render_results.record(report)
    usual["problems"]["qwen3-30b-a3b"]["save"] = "pre"
    less = usual | {"problems": {"qwen3-30b-a3b": usual["problems"]["qwen3-30b-a3b"] | {"save": "inputs"}}}

    assert "save=" not in render_results.tables(usual) + render_results.summary(usual)
    assert 'bf16, balanced routing, save="inputs"\n' in render_results.tables(less)
    assert 'qwen3-30b-a3b, save="inputs"<br>forward ' in render_results.summary(less)


def test_the_readme_gets_one_table_for_all_shapes():
    record = render_results.record(benchmarks("qwen3-30b-a3b"), benchmarks("qwen3-235b-a22b"))
    text = render_results.summary(record)
    header, _, grouped, *_ = cells(text)

    assert header[:4] == ["", *(f"qwen3-30b-a3b<br>{d}" for d in ("forward", "backward", "both"))]
    assert [title.partition("<br>")[0] for title in header[4:]] == ["qwen3-235b-a22b"] * 3
    assert grouped[1:] == ["2.50 ± 0.02", "5.00 ± 0.02", "7.50 ± 0.02"] * 2
    assert "not measured" not in text


def test_the_readmes_table_keeps_the_order_of_the_fullest():
    part = benchmarks("qwen3-30b-a3b")
    part["benchmarks"] = [row for row in part["benchmarks"] if row["extra_info"]["contestant"] != "grouped"]
    text = render_results.summary(render_results.record(part, benchmarks("qwen3-235b-a22b")))
    _, _, *lines = cells(text)

    assert [line[0] for line in lines] == [
        "**mega_moe, grouped**",
        "plain torch, eager",
        "dense GEMMs of the same flops",
    ]
    assert lines[0][1:] == ["–", "–", "–", "2.50 ± 0.02", "5.00 ± 0.02", "7.50 ± 0.02"]
    assert text.endswith("–: not measured in this run.")


def test_one_sample_has_no_spread():
    report = benchmarks()
    for row in report["benchmarks"]:
        row["stats"]["rounds"] = 1
    record = render_results.record(report)
    text = render_results.tables(record)

    assert "±" not in text and "milliseconds, median;" in text
    assert cells(text)[2][1:4] == cells(render_results.summary(record))[2][1:] == ["2.50", "5.00", "7.50"]


def test_a_record_is_saved_read_and_rendered_alike(tmp_path):
    record = render_results.record(benchmarks())
    path = render_results.save(record, tmp_path)

    assert path.name == "2026-12-01-nvidia-h200.json"
    assert json.loads(path.read_text()) == record
    assert "data" not in path.read_text()
    page, *_ = render_results.blocks([path], []).values()
    assert page.startswith(f"## One GPU\n\n{render_results.tables(record)}") and f"results/{path.name}" in page


@pytest.mark.parametrize(
    "reports, reason",
    [
        ([benchmarks(), benchmarks("qwen3-235b-a22b", device="NVIDIA H100")], "different machines"),
        ([benchmarks(), benchmarks()], "two reports have times for qwen3-30b-a3b"),
        ([{"benchmarks": []}], "no benchmarks"),
    ],
)
def test_what_does_not_belong_together_is_refused(reports, reason):
    with pytest.raises(ValueError, match=reason):
        render_results.record(*reports)


def test_only_what_is_between_the_markers_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{render_results.START}\nold\n{render_results.END}\n\nafter\n")

    text = render_results.between_markers(page, "new")

    assert text == f"before\n\n{render_results.START}\n\nnew\n\n{render_results.END}\n\nafter\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="results:start"):
        render_results.between_markers(page, "new")


def test_the_pages_show_the_records():
    for page, block in render_results.blocks(*render_results.records()).items():
        assert page.read_text() == render_results.between_markers(page, block), f"run {render_results.__file__}"


def over_two_gpus(*names: str, device: str = "NVIDIA H200", date: str = "2026-12-01T10:00:00+00:00") -> dict:
    """A report of ranks_check with these parts, all passed."""
    ms = lambda *three: dict(zip(("forward", "backward", "2 x forward + backward"), three))
    row = lambda name, off, *three: dict(name=name, failure=None, off=off, ms=ms(*three), spread=ms(0.02, 0.04, 0.06))
    shown = dict(bytes=500_000_000, gb_per_s=125.0, links_ms=2.0, shown_ms=0.5, hidden=0.75)
    model = lambda took: dict(
        predicted_ms=3.5, measured_ms=took, products=2.75, links=3.0, bound="links", published_ms=3.9
    )
    unknown = dict(bytes=700_000_000, gb_per_s=None, links_ms=None, shown_ms=None, hidden=None)
    facts = {
        "machine": dict(devices=[device] * 2, nccl="2.28.9", bytes_per_s=230e9),
        "stress": {},
        "times qwen3-30b-a3b": dict(
            tokens=16384,
            rows=[
                row("plain torch, eager", dict(y=0.006, dx=0.002), 10.0, 12.0, 32.0),
                dict(name="plain torch, torch.compile", failure="rank 0: it broke", off={}, ms={}, spread={}),
                row("mega, heaps", {}, 4.0, 8.0, 16.0),
            ],
            exchange=dict(forward=shown, backward=unknown),
        ),
        "trace qwen3-30b-a3b": dict(forward=dict(hidden=0.9), backward=dict(hidden=0.95)),
        "predicted": {"qwen3-30b-a3b": dict(ranks=dict(forward=model(None)), mega=dict(forward=model(4.0)))},
    }
    parts = [dict(name=n, passed=True, seconds=1.0, failure=None, line=f"{n} went well", facts=facts[n]) for n in names]
    return dict(machine=dict(device=device, torch="2.11.0", date=date), ranks=2, passed=True, parts=parts)


def mixed_node() -> dict:
    """The same of a node whose GPUs are not alike."""
    report = over_two_gpus("machine")
    report["parts"][0]["facts"]["devices"] = ["NVIDIA H200", "NVIDIA H100"]
    return report


def test_a_report_over_ranks_becomes_a_record_and_tables(tmp_path):
    """16 ms is twice as fast as 32; the worst of what eager torch is off is 0.006."""
    one, two = (
        over_two_gpus("machine", "stress"),
        over_two_gpus("machine", "times qwen3-30b-a3b", "trace qwen3-30b-a3b", "predicted"),
    )
    one["parts"].append(dict(two["parts"][1], passed=False))  # began there, and passed in the other
    path = render_results.save_ranks(one, two, folder=tmp_path)

    assert path.name == "2026-12-01-2-x-nvidia-h200.json"
    text = "\n\n".join(render_results.several([path]))
    assert text.startswith(
        "## 2 GPUs of one host\n\n**2 x NVIDIA H200**, 2026-12-01; torch 2.11.0; NCCL 2.28.9, 230 GB/s"
    )
    assert "- stress: stress went well" in text and f"results/ranks/{path.name}" in text
    _, _, *times = cells(text.split("### qwen3-30b-a3b over 2 GPUs")[1])
    assert times[:2] == [
        ["plain torch, eager", "10.00 ± 0.02", "12.00 ± 0.04", "32.00 ± 0.06", "1.00", "6.0e-03"],
        ["**mega, heaps**", "4.00 ± 0.02", "8.00 ± 0.04", "16.00 ± 0.06", "2.00", "equal"],
    ]
    _, _, *exchange = cells(text.split("The exchange of mega")[1])
    assert exchange[0] == ["forward", "500", "125", "2.00", "0.50", "75%", "90%"]
    _, beside = text.split("The exchange of mega")[1].split("Over heaps, beside")
    assert "Prime Mega MoE, as published: 3.9 forward, in ms." in beside
    _, _, *model = cells(beside)
    assert model == [["mega: forward", "4.00", "3.50", "-12%", "2.75", "3.00", "links"]]


def test_the_newest_record_of_each_number_of_gpus_is_shown(tmp_path):
    for date in ("2026-12-01", "2026-12-02"):
        render_results.save_ranks(over_two_gpus("machine", date=f"{date}T10:00:00"), folder=tmp_path)
    text = "\n".join(render_results.several(sorted(tmp_path.glob("*.json"), reverse=True)))
    assert "2026-12-02" in text and "2026-12-01" not in text


@pytest.mark.parametrize(
    "reports, reason",
    [
        ([over_two_gpus("machine") | {"parts": []}], "not passed: all"),
        ([over_two_gpus("machine", device="AMD EPYC (CPU)")], "only a GPU's times"),
        ([over_two_gpus("machine"), over_two_gpus("machine", device="NVIDIA H100")], "different nodes"),
        ([over_two_gpus("machine"), over_two_gpus("machine") | {"ranks": 4}], "different nodes"),
        ([over_two_gpus("machine"), over_two_gpus("stress")], "different nodes"),
        ([mixed_node(), over_two_gpus("machine")], "different nodes"),
        ([over_two_gpus("machine"), benchmarks()], "apart from those of the benchmarks"),
    ],
)
def test_what_is_no_result_over_ranks_is_refused(tmp_path, reports, reason):
    with pytest.raises(ValueError, match=reason):
        render_results.save_ranks(*reports, folder=tmp_path)
    assert not list(tmp_path.glob("*.json"))


def test_what_cannot_be_shown_is_not_saved(tmp_path):
    """A record that was put together by hand, say: in its place it would break every page to come."""
    bad = over_two_gpus("machine", "times qwen3-30b-a3b")
    del bad["parts"][1]["facts"]["rows"][2]["spread"]
    with pytest.raises(ValueError, match=r"no page can show it .KeyError: 'spread'"):
        render_results.save_ranks(bad, folder=tmp_path)
    of_one_gpu = render_results.record(benchmarks())
    del of_one_gpu["rows"][0]["ms"]["q1"]
    with pytest.raises(ValueError, match=r"no page can show it .KeyError: 'q1'"):
        render_results.save(of_one_gpu, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_part_that_has_not_passed_is_no_result(tmp_path):
    failed = over_two_gpus("machine", "stress")
    failed["parts"][1]["passed"] = False
    with pytest.raises(ValueError, match="parts have not passed: stress"):
        render_results.save_ranks(failed, folder=tmp_path)
    assert not list(tmp_path.glob("*.json"))
