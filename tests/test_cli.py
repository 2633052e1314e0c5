"""The command line: what it prints, what it returns, and what it refuses in one line."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from mega_moe import bench, cli, ladder
from mega_moe.registry import LADDER, Rung
from mega_moe.samples import LAYER, random_inputs
from mega_moe.shapes import Problem

CHECKOUT = Path(__file__).resolve().parent.parent
OUTPUTS = ["y", "dx", "dtopk_weights", "dw_gate_up", "dw_down"]
SMALL = ("--shape", "12,32,16,4,2", "--device", "cpu")
ROW = [
    *("stage", "why_not", "note", "parity", "failed", "launches", "ms", "interpreted"),
    *("tflops", "share_of_ceiling", "peak_bytes", "copied_bytes"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ladder, "ROUNDS", {"cuda": 2, "cpu": 2})
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "1"))  # undo what the program sets


@dataclass(frozen=True)
class Planted(Rung):
    """The reference with a fault, or one that says why it cannot run."""

    fault: str = ""

    def why_not(self, problem):
        return "needs a moon: look up." if self.fault == "why_not" else None

    def forward(self, problem, inputs):
        y, saved = super().forward(problem, inputs)
        if self.fault == "zeros":
            y = torch.zeros_like(y)
        return y, saved

    def backward(self, problem, inputs, saved, dy, need=None):
        grads = super().backward(problem, inputs, saved, dy, need)
        if self.fault == "nan":
            grads.dx[0, 0] = float("nan")
        return grads


def plant(monkeypatch, *faults):
    rungs = tuple(Planted(fault, "s0_reference", "a planted fault", False, fault) for fault in faults)
    monkeypatch.setattr(cli, "LADDER", (LADDER[0], *rungs))


def run(capsys, *argv):
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def ladder_json(capsys, *argv):
    code, out, err = run(capsys, "ladder", "--json", *argv)
    assert err == ""
    return code, json.loads(out)


def test_json_has_the_documented_keys_and_nothing_else(capsys):
    code, result = ladder_json(capsys, *SMALL, "--stage", "reference", "--seed", "3", "--routing", "zipf")
    assert code == 0
    assert list(result) == ["machine", "problem", "rows"]
    assert list(result["machine"]) == ["device", "torch", "triton", "python", "date"]
    assert result["problem"] == dict(
        T=12, H=32, I=16, E=4, K=2, W=1, dtype="bf16", routing="zipf", save="pre", precision=None
    )
    (row,) = result["rows"]
    assert list(row) == ROW
    assert row["stage"] == "reference" and row["why_not"] is None and row["failed"] == []
    assert list(row["parity"]) == OUTPUTS and all(0 < share <= 1 for share in row["parity"].values())
    assert row["launches"]["forward"] > 20 and row["ms"]["backward"] > 0 and row["tflops"]["forward"] > 0
    assert row["interpreted"] is False and row["copied_bytes"] == 0
    assert row["share_of_ceiling"] is None and row["peak_bytes"] is None  # a CPU


def test_every_rung_that_can_run_here_is_a_row_and_an_interpreted_one_claims_no_rate(capsys):
    code, result = ladder_json(capsys, *SMALL)
    assert code == 0
    assert [row["stage"] for row in result["rows"]] == [rung.name for rung in LADDER]
    for row in result["rows"][1:]:
        if row["why_not"]:
            pytest.skip(row["why_not"])
        assert row["interpreted"] is True and row["tflops"] is None and row["share_of_ceiling"] is None
        assert 0 < row["launches"]["forward"] <= 10 and row["failed"] == []


def test_a_rung_that_cannot_run_says_why_and_has_null_in_every_measured_key(capsys, monkeypatch):
    plant(monkeypatch, "why_not")
    code, result = ladder_json(capsys, *SMALL)
    row = result["rows"][1]
    assert code == 0
    assert row["why_not"] == "needs a moon: look up."
    assert all(row[key] is None for key in ROW if key not in ("stage", "why_not"))


def test_float64_is_the_references_alone(capsys):
    code, result = ladder_json(capsys, *SMALL, "--dtype", "fp64")
    assert code == 0 and result["rows"][0]["failed"] == []
    assert all("float64" in row["why_not"] for row in result["rows"][1:])


def test_a_nan_fails_and_is_null(capsys, monkeypatch):
    plant(monkeypatch, "nan")
    code, result = ladder_json(capsys, *SMALL)
    row = result["rows"][1]
    assert code == 1
    assert row["failed"] == ["dx"] and row["parity"]["dx"] is None and row["parity"]["y"] <= 1


def test_a_share_over_one_fails(capsys, monkeypatch):
    plant(monkeypatch, "zeros")
    code, result = ladder_json(capsys, *SMALL)
    assert code == 1
    assert result["rows"][0]["failed"] == []
    assert result["rows"][1]["failed"] == ["y"] and result["rows"][1]["parity"]["y"] > 1


def test_the_table_shows_parity_launches_time_and_what_cannot_run(capsys, monkeypatch):
    plant(monkeypatch, "zeros", "why_not")
    code, out, _ = run(capsys, "ladder", *SMALL)
    assert code == 1
    for word in (*OUTPUTS, "launches", "forward, ms", "TFLOP/s", "passed", "FAILED", "T=12", "bf16"):
        assert word in out, word
    assert "why_not cannot run: needs a moon: look up." in out
    assert "parity failed: zeros: y" in out
    monkeypatch.undo()
    code, out, _ = run(capsys, "ladder", *SMALL, "--stage", "reference", "--stage", "reference")
    assert code == 0 and "parity passed: 1 of 1 rungs ran" in out


def test_the_figure_is_drawn(capsys, monkeypatch, tmp_path):
    plant(monkeypatch, "nan")
    path = tmp_path / "ladder.svg"
    code, _, _ = run(capsys, "ladder", *SMALL, "--plot", str(path))
    drawn = path.read_text()
    assert code == 1 and drawn.startswith("<?xml")
    for label in ("budget", "share of the budget", "dw_gate_up", "reference", "forward", "ms, median"):
        assert f"<!-- {label} -->" in drawn, label


@pytest.mark.parametrize(
    "argv, message",
    [
        (("ladder", "--stage", "warp"), "the stages are reference, grouped"),
        (
            ("ladder", "--shape", "huge"),
            "--shape huge: give tiny, qwen3-30b-a3b, qwen3-235b-a22b, or five sizes T,H,I,E,K",
        ),
        (("ladder", "--shape", "1,2,3"), "--shape 1,2,3: give"),
        (("ladder", "--shape", "4,32,16,0,2"), "must be at least 1"),
        (("ladder", "--dtype", "int8"), "invalid choice: 'int8'"),
        (("ladder", "--routing", "even"), "invalid choice: 'even'"),
        (("ladder", "--shape", "4,8,8,2,1", "--device", "cpu"), "needs H and I of at least 16"),
        (("ladder", "--shape", "qwen3-30b-a3b", "--device", "cpu"), "on a CPU this layer takes about"),
        (("ladder", "--layer", "absent.safetensors"), "no such file: absent.safetensors"),
        (("ladder", "--layer", "a.safetensors", "--shape", "tiny"), "--layer brings its own shape: leave --shape out"),
        (("ladder", "--layer", "a.safetensors", "--routing", "hot"), "leave --routing out"),
        (("ladder", "--plot", "no/such/folder/a.svg"), "there is no folder no/such/folder"),
        (("ladder", "--fast"), "unrecognized arguments: --fast"),
        (("climb",), "invalid choice: 'climb'"),
        ((), "the following arguments are required"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line_and_exit_code_two(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == ""
    assert err.startswith("mega-moe: ") and err.count("\n") == 1 and message in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_refused(capsys):
    code, _, err = run(capsys, "ladder", "--device", "cuda")
    assert code == 2 and "there is no GPU" in err


def test_without_rich_it_says_what_to_install_and_json_works_all_the_same(capsys, monkeypatch):
    monkeypatch.setattr(cli, "find_spec", lambda package: None if package == "rich" else object())
    monkeypatch.setitem(sys.modules, "rich", None)
    code, out, err = run(capsys, "ladder", *SMALL)
    assert (code, out, err) == (2, "", "mega-moe: this needs rich: pip install 'mega-moe[cli]'\n")
    code, _ = ladder_json(capsys, *SMALL, "--stage", "reference")
    assert code == 0


def test_a_layer_from_a_file_may_be_cast(capsys, tmp_path):
    from safetensors.torch import save_file

    inputs, _ = random_inputs(Problem(T=12, H=32, I=16, E=4, K=2, device="cpu", dtype=torch.float32))
    path = tmp_path / "layer.safetensors"
    save_file({name: getattr(inputs, name) for name in LAYER}, path)
    for argv, dtype in [((), "fp32"), (("--dtype", "fp16"), "fp16"), (("--dtype", "fp64"), "fp64")]:
        code, result = ladder_json(capsys, "--layer", str(path), "--stage", "reference", "--device", "cpu", *argv)
        assert code == 0 and result["problem"]["dtype"] == dtype and result["problem"]["routing"] == "layer"


def test_layers_with_no_tokens_and_with_masked_routes_climb(capsys):
    code, result = ladder_json(capsys, "--shape", "0,32,16,4,2", "--device", "cpu", "--stage", "reference")
    assert code == 0 and result["rows"][0]["parity"] == dict.fromkeys(OUTPUTS, 0.0)


def test_doctor_says_what_can_run_and_why_not(capsys):
    code, out, _ = run(capsys, "doctor", "--device", "cpu")
    assert code == 0
    for line in ("torch ", "python ", "triton ", "reference: ", "runs in fp32, bf16, fp16, fp64", "has      rich"):
        assert line in out, line
    assert all(rung.idea in out for rung in LADDER)


def test_doctor_without_triton(capsys, monkeypatch):
    for module in ("registry", "doctor"):
        monkeypatch.setattr(f"mega_moe.{module}.find_spec", lambda package: None)
    code, out, _ = run(capsys, "doctor", "--device", "cpu")
    assert code == 0 and "needs Triton" in out and "lacks    rich" in out


# bench finds pytest's benchmarks and starts them.


def test_bench_says_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "BENCHMARKS", tmp_path)
    code, _, err = run(capsys, "bench")
    assert code == 2 and "run this from a checkout" in err
    (tmp_path / "test_speed.py").touch()
    monkeypatch.setattr(bench, "find_spec", lambda package: None)
    code, _, err = run(capsys, "bench")
    assert code == 2 and "pip install 'mega-moe[bench]'" in err


def test_bench_hands_shapes_and_results_to_pytest(capsys, monkeypatch, tmp_path):
    (tmp_path / "test_speed.py").touch()
    monkeypatch.setattr(bench, "BENCHMARKS", tmp_path)
    commands = []
    verdicts = iter([0, 1, 4])

    def started(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, next(verdicts))

    monkeypatch.setattr(subprocess, "run", started)
    argv = ("bench", "--shape", "tiny", "--json", "results.json")
    assert [run(capsys, *argv)[0] for _ in range(3)] == [0, 1, 2]
    assert commands[0][1:4] == ["-m", "pytest", str(tmp_path)]
    assert commands[0][4:] == ["--shape=tiny", f"--benchmark-json={Path('results.json').resolve()}"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_program_runs_from_a_bare_checkout_and_chooses_the_interpreter_itself():
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    command = [sys.executable, "-m", "mega_moe", "ladder", "--json", "--device", "cpu", "--shape", "8,16,16,2,1"]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert all(row["interpreted"] for row in rows[1:] if not row["why_not"])
    assert not any("TRITON_INTERPRET" in (row["why_not"] or "") for row in rows)


def test_nothing_loads_triton_or_rich_before_it_is_known_what_to_do():
    program = "import sys, mega_moe.cli; sys.exit('triton' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, check=False).returncode == 0
