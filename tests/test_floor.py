"""The benchmark of few tokens, its record and its page."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cases import DEVICE

pytest.importorskip("pytest_benchmark", reason="mega-moe bench runs on it")
import render_floor

from mega_moe.shapes import PRESETS

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "tests" / "bench"
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is for measuring, not for trying the machinery")


@pytest.fixture
def floor(monkeypatch):
    """tests/bench/floor.py, which finds its neighbours in its own folder."""
    monkeypatch.syspath_prepend(BENCH)
    import floor

    return floor


# The benchmark.


@on_cpu
def test_few_tokens_are_measured_and_rendered(tmp_path):
    command = [sys.executable, "-m", "pytest", str(BENCH / "test_floor.py"), "-p", "no:cacheprovider"]
    command += ["-k", "mega or torch-eager", f"--benchmark-json={tmp_path / 'floor.json'}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads((tmp_path / "floor.json").read_text())

    found = [benchmark["extra_info"] for benchmark in report["benchmarks"]]
    expected = {(name, T, way) for name in ("mega", "torch") for T in (1, 5) for way in render_floor.DIRECTIONS}
    assert {(info["contestant"], info["problem"]["T"], info["direction"]) for info in found} == expected
    assert all(info["launched"] == "eager" for info in found) and "CUDA graphs need a GPU" in run.stdout
    assert all(0 < error < 0.01 for info in found for error in info["errors"].values())
    assert all(
        0 < share <= 1 for info in found if info["kind"] == "rung" for share in info["shares_of_budget"].values()
    )
    assert all(benchmark["stats"]["median"] > 0 for benchmark in report["benchmarks"])

    record = render_floor.record(report)
    assert render_floor.tables(record) in run.stdout, "the tables are printed last"
    with pytest.raises(ValueError, match="only a GPU's times are results"):
        render_floor.save(record, tmp_path)


@on_cpu
def test_wrong_results_get_no_time(floor):
    plain = floor.OF_FEW_TOKENS["torch"]

    def scaled(problem, inputs, dy):
        runner = plain.start(problem, inputs, dy)
        return replace(runner, forward=lambda: runner.forward() * 1.03)

    wrong = replace(plain, name="wrong", start=scaled)
    found = floor.measure_floor(PRESETS["tiny"].at(T=3, device="cpu"), [plain, wrong])
    assert found["torch", "eager"].seconds.keys() == set(floor.DIRECTIONS)
    assert not found["wrong", "eager"].seconds and "no time without parity: y" in found["wrong", "eager"].failure


@on_cpu
@pytest.mark.parametrize("off", [0.0, 0.5])
def test_a_graph_that_replays_something_else_gets_no_time(floor, monkeypatch, off):
    """As on a GPU, but for the GPU: a step is captured by running it, and replayed by doing nothing."""

    def capture(step):
        results = step()
        if isinstance(results, tuple):
            y, (*grads, dw_down) = results
            results = y, (*grads, dw_down * (1 + off))
        return (lambda: None), results

    monkeypatch.setattr(floor, "not_captured", lambda problem, name: None)
    monkeypatch.setattr(floor, "capture", capture)
    problem = PRESETS["tiny"].at(T=3, device="cpu")
    graph = floor.measure_floor(problem, [floor.OF_FEW_TOKENS["torch"]])["torch", "graph"]
    if off:
        assert not graph.seconds and graph.failure == "no time without parity: dw_down of the graph differ"
    else:
        assert graph.seconds.keys() == set(floor.DIRECTIONS) and not graph.failure and graph.errors


# The record and the page.


def benchmark(contestant: str, launched: str, T: int, us: float, direction: str = "forward", device="NVIDIA H200"):
    """A row as pytest-benchmark writes it, with a made-up time."""
    problem = dict(T=T, H=2048, I=768, E=128, K=8, W=1, dtype="bf16", routing="balanced")
    machine = dict(device=device, torch="2.11.0", triton="3.6.0", python="3.12.3", date="2026-12-01T10:00:00+00:00")
    info = dict(shape=f"qwen3-30b-a3b, T = {T}", problem=problem, direction=direction, contestant=contestant)
    info |= dict(label=contestant, kind="rung", launched=launched, interpreted=False, errors={}, shares_of_budget={})
    seconds = dict(median=us / 1e6, q1=us / 1e6, q3=us / 1e6, min=us / 1e6, max=us / 1e6, rounds=50)
    return {"extra_info": info | dict(machine=machine, method="How"), "stats": seconds}


MADE_UP = {
    "benchmarks": [
        *(benchmark("mega", "graph", T, us) for T, us in ((1, 50.0), (16, 300.0), (512, 320.0))),
        *(benchmark("torch", "graph", T, us) for T, us in ((1, 90.0), (16, 290.0), (512, 325.0))),
        *(benchmark(name, "eager", 1, us) for name, us in (("mega", 400.0), ("torch", 200.0))),
        benchmark("mega", "graph", 1, 700.0, "forward+backward"),
    ]
}


def test_a_report_becomes_tables():
    text = render_floor.tables(render_floor.record(MADE_UP))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert lines[0] == ["T", "1", "16", "512"]
    assert ["torch, launched one by one", "**200**", "–", "–"] in lines
    assert ["mega, replayed from a graph", "**50**", "300", "**320**"] in lines
    # 3*I*H bf16 weights of an expert are 9.44 MB; 8 experts, then all 128, at 4.8 TB/s; and backward's writes.
    assert ["*the weights alone, by the data sheet*", "*16*", "*252*", "*252*"] in lines
    assert ["*the weights alone, by the data sheet*", "*283*"] in lines
    assert "Fastest, replayed from a graph: mega (T = 1), torch (T = 16), mega and torch (T = 512)." in text
    assert "Fastest, launched one by one: torch (T = 1)." in text


def test_what_does_not_belong_together_is_refused():
    other = {"benchmarks": [benchmark("mega", "graph", 1, 1.0, device="NVIDIA H100")]}
    for reports, why in (((MADE_UP, other), "different machines"), (({"benchmarks": []},), "no benchmarks in it")):
        with pytest.raises(ValueError, match=why):
            render_floor.record(*reports)


def test_a_record_is_kept_as_it_was(tmp_path):
    record = render_floor.record(MADE_UP)
    path = render_floor.save(record, tmp_path / "floor")
    assert path.name == "2026-12-01-nvidia-h200.json" and json.loads(path.read_text()) == record


def test_the_page_is_its_newest_record():
    assert render_floor.page(render_floor.newest()) == render_floor.PAGE.read_text(), "run docs/render_floor.py again"
    for name in render_floor.THEMES:
        assert render_floor.PAGE.with_name(name).exists() and f"]({name}#" in render_floor.PAGE.read_text()
