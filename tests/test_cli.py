"""The command line: what it prints, what it returns, and what it refuses in one line."""

import json
import math
import os
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from cases import DEVICE, on_cpu

from mega_moe import bench, cli, figure, ladder, simulate, tables
from mega_moe.parity import Parity
from mega_moe.registry import LADDER, Rung, stage
from mega_moe.samples import LAYER, random_inputs
from mega_moe.schedule import COLUMNS, KINDS
from mega_moe.shapes import PRESETS, SAVES, Problem

CHECKOUT = Path(__file__).resolve().parent.parent
OUTPUTS = ["y", "dx", "dtopk_weights", "dw_gate_up", "dw_down"]
SMALL = ("--shape", "12,32,16,4,2", "--device", "cpu")
ROW = [
    *("stage", "why_not", "note", "parity", "failed", "launches", "ms", "interpreted"),
    *("tflops", "share_of_ceiling", "peak_bytes", "copied_bytes"),
]


needs_kernels = pytest.mark.skipif(
    bool(stage("persistent").why_not(PRESETS["tiny"].at(device=DEVICE))), reason="block sizes are chosen by kernels"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ladder, "ROUNDS", {"cuda": 2, "cpu": 2})
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "1"))  # undo what the program sets
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


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
    rungs = tuple(
        Planted(fault, "s0_reference", "a planted fault", needs_triton=False, fault=fault) for fault in faults
    )
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
    kernels = [row for row in result["rows"] if row["stage"] != "reference" and not row["why_not"]]
    if not kernels:
        pytest.skip(result["rows"][1]["why_not"])
    for row in kernels:
        assert row["interpreted"] is True and row["tflops"] is None and row["share_of_ceiling"] is None
        # Rung ranks without a heap makes one in each call: 15 launches.
        assert 0 < row["launches"]["forward"] <= 15 and row["failed"] == []


def test_where_nothing_can_run_nothing_has_passed(capsys):
    code, out, _ = run(capsys, "ladder", *SMALL, "--stage", "grouped", "--dtype", "fp64")
    assert code == 1 and "grouped cannot run" in out and "nothing ran" in out and "passed" not in out


@needs_kernels
def test_over_ranks_run_the_rungs_that_take_heaps(capsys):
    code, result = ladder_json(capsys, "--shape", "11,32,16,4,2", "--ranks", "2")
    assert code == 0 and result["problem"]["W"] == 2
    rows = {row["stage"]: row for row in result["rows"]}
    for rung in LADDER:
        row = rows[rung.name]
        runs_here = rung.over_ranks and not rung.why_not(PRESETS["tiny"].at(device=DEVICE))
        assert bool(row["why_not"]) == (not runs_here)
        assert row["parity"] is None or all(0 < share <= 1 for share in row["parity"].values())
    assert rows["mega"]["launches"] == {"forward": 2, "backward": 2}


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


def test_what_forward_keeps_can_be_chosen_and_what_is_made_again_earns_nothing(capsys):
    """More launches in backward for the same results; useful operations stay what they are."""
    rows = {}
    for save in SAVES:
        code, result = ladder_json(capsys, *SMALL, "--stage", "reference", "--save", save)
        assert code == 0 and result["problem"]["save"] == save
        (rows[save],) = result["rows"]
    assert rows["pre"]["launches"]["backward"] < rows["inputs"]["launches"]["backward"]
    assert rows["pre"]["parity"] == rows["inputs"]["parity"]
    assert math.isclose(*(row["tflops"]["backward"] * row["ms"]["backward"] for row in rows.values()))


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


def test_a_cpu_is_timed_on_one_thread_and_the_machine_says_so(capsys):
    torch.set_num_threads(2)
    assert ladder.device_name("cpu").endswith("(CPU, 2 threads)")
    _, result = ladder_json(capsys, *SMALL, "--stage", "reference")
    assert torch.get_num_threads() == 1 and result["machine"]["device"].endswith("(CPU, 1 thread)")


def test_the_keys_of_json_are_documented_in_their_order(capsys, monkeypatch):
    plant(monkeypatch, "why_not")
    _, result = ladder_json(capsys, *SMALL)
    lines = [line.strip() for line in ladder.Climb.as_json.__doc__.splitlines()]
    at = [next(n for n, line in enumerate(lines) if line.startswith(f"{key} ")) for key in ROW]
    assert all(one < other for one, other in pairwise(at))
    for key in (*result["machine"], "T, H, I, E, K", *list(result["problem"])[5:]):
        assert any(line.startswith(f"{key} ") for line in lines), key


def test_the_table_shows_parity_launches_time_and_what_cannot_run(capsys, monkeypatch):
    plant(monkeypatch, "zeros", "why_not")
    code, out, _ = run(capsys, "ladder", *SMALL)
    assert code == 1
    for word in (*OUTPUTS, "launches", "forward, ms", "TFLOP/s", "passed", "FAILED", "T=12", "bf16", "1 thread)"):
        assert word in out, word
    assert "why_not cannot run: needs a moon: look up." in out
    assert "parity failed: zeros: y" in out
    monkeypatch.undo()
    code, out, _ = run(capsys, "ladder", *SMALL, "--stage", "reference", "--stage", "reference")
    assert code == 0 and "parity passed: 1 of 1 rungs ran" in out
    assert "judged against" not in out and "kernels" not in out  # nothing was interpreted


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (0.0002, "<0.001"),
        (0.0123, "0.0123"),
        (5.327, "5.33"),
        (99.96, "100"),
        (215.4, "215"),
        (2104, "2,104"),
    ],
)
def test_numbers_are_plain(value, text):
    assert ladder.plain(value) == text


@pytest.mark.parametrize(
    "share, text",
    [
        (0, "0.00"),
        (0.0003, "<0.01"),
        (0.364, "0.36"),
        (1, "1.00"),
        (1.002, "1.002"),
        (2104, "2,104"),
        (math.inf, "inf"),
    ],
)
def test_a_share_is_never_rounded_to_what_it_is_not(share, text):
    assert ladder.plain_share(share) == text


def test_sizes_under_16_are_judged_against_a_fixed_budget_and_the_table_says_so(capsys):
    few = ("--dtype", "fp32", "--device", "cpu", "--stage", "reference", "--stage", "grouped")
    code, out, _ = run(capsys, "ladder", "--shape", "12,32,8,4,2", *few)
    assert code == 0 and "sizes under 16 are judged against 2^-10" in out
    assert "<0.01" in out and "0.00" not in out
    _, out, _ = run(capsys, "ladder", "--shape", "12,32,16,4,2", *few)
    assert "2^-10" not in out


def climbed(device: str, *rows: ladder.Row, allowed_ms=None) -> ladder.Climb:
    """A run that never was."""
    machine = {"device": "A machine", "torch": "2.13.0", "triton": None, "python": "3.12.1", "date": "2026-11-29T09:30"}
    problem = ladder.facts(ladder.Layer(PRESETS["qwen3-30b-a3b"], None, None, "zipf"))
    return ladder.Climb(device, machine, problem, list(rows), allowed_ms)


def measured(stage: str, forward: float, interpreted: bool) -> ladder.Row:
    return ladder.Row(
        stage,
        parity=Parity(dict.fromkeys(OUTPUTS, 0.25)),
        launches={"forward": 1204, "backward": 2},
        ms={"forward": forward, "backward": 2 * forward},
        spread={"forward": forward / 20, "backward": 0.0},
        interpreted=interpreted,
        tflops=None if interpreted else {"forward": 1234.5, "backward": 60.0},
        peak_bytes=1020 * 2**20,
    )


def test_the_table_has_thousands_no_exponents_and_a_name_for_every_column(capsys):
    tables.show(climbed("cpu", measured("slow", 2104.2, True), measured("fast", 0.5, False)), name="a layer")
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    header, _, slow, fast = lines[next(n for n, words in enumerate(lines) if "launches" in words[1:]) :][:4]
    assert " ".join(header) == "stage launches forward, ms backward, ms TFLOP/s peak kernels"
    assert " ".join(slow) == "slow 1,204 / 2 2,104 ±5% 4,208 ±0% – 1,020 MiB interpreted"
    assert " ".join(fast) == "fast 1,204 / 2 0.5 ±5% 1 ±0% 1,234 / 60 1,020 MiB –"
    assert "A machine, torch 2.13.0, no triton, python 3.12.1" in out


def test_one_time_has_no_spread(capsys, monkeypatch):
    monkeypatch.setitem(ladder.ROUNDS, "cpu", 1)
    code, out, _ = run(capsys, "ladder", "--shape", "8,16,16,2,1", "--stage", "reference", "--device", "cpu")
    assert code == 0 and "±" not in out.replace("median ± spread", "")


def test_the_figure_is_drawn(capsys, monkeypatch, tmp_path):
    plant(monkeypatch, "nan")
    path = tmp_path / "ladder.svg"
    code, out, err = run(capsys, "ladder", *SMALL, "--json", "--plot", str(path))
    drawn = path.read_text()
    assert code == 1 and drawn.startswith("<?xml")
    assert err == f"wrote {path}\n"
    labels = ["budget", "share of the budget", "dw_gate_up", "reference", "forward", "Time on the CPU", "ms, median"]
    for row in json.loads(out)["rows"]:
        shares = [math.inf if share is None else share for share in row["parity"].values()]
        labels += [ladder.plain(ms) for ms in row["ms"].values()] + [ladder.plain_share(share) for share in shares]
    for label in labels:
        assert f"<!-- {label.replace('<', '&lt;')} -->" in drawn, label


def test_a_figure_with_interpreted_times_is_logarithmic_and_a_gpus_is_not(tmp_path):
    path = tmp_path / "ladder.svg"
    figure.draw(climbed("cpu", measured("slow", 2104.2, True), measured("fast", 0.5, False)), path)
    drawn = path.read_text()
    for label in ("Time on the CPU (hatched: interpreted, says nothing of a GPU)", "ms, median, logarithmic", "0.5"):
        assert f"<!-- {label} -->" in drawn, label
    allowed_ms = {"forward": 0.25, "backward": 0.5}
    figure.draw(climbed("cuda", measured("fast", 0.5, False), allowed_ms=allowed_ms), path)
    drawn = path.read_text()
    for label in ("Time on the GPU", "ms, median", "backward: the hardware allows 0.5 ms"):
        assert f"<!-- {label} -->" in drawn, label


@pytest.mark.parametrize("suffix, begins", [(".png", b"\x89PNG"), (".PDF", b"%PDF")])
def test_the_suffix_chooses_the_figures_format(capsys, tmp_path, suffix, begins):
    path = tmp_path / f"ladder{suffix}"
    code, _, _ = run(capsys, "ladder", *SMALL, "--stage", "reference", "--plot", str(path))
    assert code == 0 and path.read_bytes().startswith(begins)


def test_alone_it_prints_the_help(capsys):
    code, out, err = run(capsys)
    assert code == 2 and out == ""
    assert err.startswith("usage: mega-moe") and all(command in err for command in ("doctor", "ladder", "bench"))


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert exit.value.code == 0 and capsys.readouterr().out == f"mega-moe {project['version']}\n"


@pytest.mark.parametrize(
    "argv, message",
    [
        (("ladder", "--stage", "summit"), "--stage summit: the stages are reference, grouped"),
        (
            ("ladder", "--shape", "huge"),
            "--shape huge: give tiny, qwen3-30b-a3b, qwen3-235b-a22b, or five sizes T,H,I,E,K",
        ),
        (("ladder", "--shape", "1,2,3"), "--shape 1,2,3: give"),
        (("ladder", "--shape", "4,32,16,0,2"), "must be at least 1"),
        (("ladder", "--dtype", "int8"), "invalid choice: 'int8'"),
        (("ladder", "--routing", "even"), "invalid choice: 'even'"),
        (("ladder", "--save", "act"), "invalid choice: 'act'"),
        (("bench", "--save", "act"), "invalid choice: 'act'"),
        (("ladder", "--shape", "4,8,8,2,1", "--device", "cpu"), "needs H and I of at least 16"),
        (("ladder", "--shape", "qwen3-30b-a3b", "--device", "cpu"), "on a CPU this layer takes about"),
        (("ladder", "--layer", "absent.safetensors"), "no such file: absent.safetensors"),
        (("ladder", "--layer", "a.safetensors", "--shape", "tiny"), "--layer brings its own shape: leave --shape out"),
        (("ladder", "--layer", "a.safetensors", "--routing", "hot"), "leave --routing out"),
        (("ladder", "--plot", "no/such/folder/a.svg"), "there is no folder no/such/folder"),
        (("ladder", "--plot", "a.foo"), "--plot a.foo: the formats are .svg, .png, .pdf"),
        (("ladder", "--plot", "a"), "--plot a: the formats are .svg, .png, .pdf"),
        (("bench", "--shape", "huge"), "--shape huge: the shapes are tiny, qwen3-30b-a3b, qwen3-235b-a22b"),
        (("bench", "--json", "no/such/folder/a.json"), "there is no folder no/such/folder"),
        (("ladder", "--fast"), "unrecognized arguments: --fast"),
        (("climb",), "invalid choice: 'climb'"),
        (("schedule", "--shape", "huge"), "--shape huge: give tiny"),
        (("ladder", "--ranks", "3"), "--ranks 3: the ranks share 8 experts evenly, so give a divisor of 8"),
        (("schedule", "--ranks", "3"), "--ranks 3: the ranks share 8 experts evenly, so give a divisor of 8"),
        (("schedule", "--ranks", "0"), "--ranks 0: "),
        (("schedule", "--programs", "0"), "--programs 0: at least 1 has to run"),
        (("schedule", "--direction", "up"), "invalid choice: 'up'"),
        (("schedule", "--dtype", "fp64"), "invalid choice: 'fp64'"),
        (("schedule", "--plot", "a.png"), "--plot a.png: the format is .svg"),
        (("schedule", "--plot", "no/such/folder/a.svg"), "there is no folder no/such/folder"),
        (("trace", "--ranks", "5"), "--ranks 5: the ranks share 8 experts evenly, so give a divisor of 8"),
        (("trace", "--shape", "huge"), "--shape huge: give tiny"),
        (("trace", "--direction", "up"), "invalid choice: 'up'"),
        (("trace", "--dtype", "fp64"), "invalid choice: 'fp64'"),
        (("trace", "--plot", "a.png"), "--plot a.png: the format is .svg"),
        (("trace", "--perfetto", "a.svg"), "--perfetto a.svg: the format is .json"),
        (
            ("trace", "--perfetto", "no/such/folder/a.json"),
            "--perfetto no/such/folder/a.json: there is no folder no/such",
        ),
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
    assert (code, out, err) == (2, "", "mega-moe: this needs rich: pip install rich\n")
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


@on_cpu
def test_doctor_says_once_what_is_true_of_several(capsys):
    _, out, _ = run(capsys, "doctor", "--device", "cpu")
    assert out.count("in your own programs: start Python with TRITON_INTERPRET=1") == 1
    for sentence in ("runs in Triton's interpreter", "computes in fp32, bf16 or fp16", "runs in fp32, bf16, fp16\n"):
        assert out.count(sentence) == 1, sentence
    assert f"{', '.join(rung.name for rung in LADDER if rung.needs_triton)}:\n" in out


@needs_kernels
def test_doctor_says_what_ranks_take(capsys):
    """By hand: elements of two bytes, blocks of 128 rows."""
    code, out, _ = run(capsys, "doctor", "--ranks", "2", "--shape", "1024,1024,512,4,2", "--device", "cpu")
    assert code == 0 and "over 2 ranks, 1,024 tokens and 2 experts a rank, bfloat16" in out
    heap = 2**20 * 2 * (2 + 2 + 2) / 2**20  # x and dy twice, two slots a token; plans and flags beside them
    (said,) = [float(line.split()[4]) for line in out.splitlines() if line.startswith("heap of a rank")]
    assert heap < said < 1.01 * heap
    numbers = {line[:20].strip(): line for line in out.splitlines()}
    assert "max_rows = 4,096" in out and "max_rows = 2,560" in out
    rows = 2560 + 2 * 128  # two experts may leave a block unfilled
    assert f"{rows * (1024 + 512) * 2 / 2**20:.1f} MiB" in numbers["forward"]
    assert f"{rows * (2 * 1024 + 5 * 512) * 2 / 2**20:.1f} MiB" in numbers["backward"]


@pytest.mark.parametrize(
    "precision, forward, backward, weights",
    [("fp8", 1024 + 512, 4 * 1024 + 5 * 512, (3, 5)), ("fp8_bwd", None, 3 * 1024 + 5 * 512, (3,))],
)
def test_doctor_says_what_ranks_take_in_8_bits(precision, forward, backward, weights, capsys):
    """By hand: a code is a byte, 128 of them have a scale of four. What is not codes has two bytes an element."""
    _, in_16, _ = run(capsys, "doctor", "--ranks", "2", "--shape", "1024,1024,512,4,2", "--device", "cpu")
    arguments = ("--ranks", "2", "--shape", "1024,1024,512,4,2", "--precision", precision, "--device", "cpu")
    code, out, _ = run(capsys, "doctor", *arguments)
    assert code == 0 and f"bfloat16, products in {precision}" in out
    lines, before = ({line[:20].strip(): line for line in text.splitlines()} for text in (out, in_16))
    rows, code, pre = 2560 + 2 * 128, 1 + 4 / 128, 2560 * 2 * 512 * 2
    as_it_is = 0 if forward else rows * 1024 * 2  # x, with which pre is made again as forward made it
    assert f"{(rows * backward * code + as_it_is + pre) / 2**20:.1f} MiB" in lines["backward"]
    heap = lambda of: float(of["heap of a rank"].split()[4])
    published = 2 * 1024 * 1024 * code / 2**20 if forward else 0.0
    assert heap(lines) - heap(before) == pytest.approx(published, abs=0.2)
    assert lines["forward"] == before["forward"] if not forward else f"{rows * forward * code / 2**20:.1f} MiB" in out
    for direction, of_expert in zip(("backward", "forward"), reversed(weights)):
        size = of_expert * 1024 * 512 * 2 * (1 + 4 / 128**2)
        assert f"{size / 2**20:.1f} MiB    {of_expert} I H of each expert" in lines[f"as codes, {direction}"]


@pytest.mark.parametrize("command", ["doctor", "predict"])
def test_a_precision_that_is_not_there_over_ranks_is_refused(command, capsys):
    code, _, err = run(capsys, command, "--ranks", "2", "--precision", "mxfp8")
    assert code == 2 and '--precision mxfp8: stage "mega" has no products in mxfp8' in err
    code, _, err = run(capsys, "predict", "--ranks", "2", "--rung", "ranks", "--precision", "fp8")
    assert code == 2 and "--precision fp8: launches apart are not predicted in fp8" in err


@pytest.mark.parametrize("arguments", [("--shape", "tiny"), ("--ranks", "3", "--shape", "tiny"), ("--ranks", "0")])
def test_doctor_refuses_ranks_that_cannot_be(arguments, capsys):
    code, _, err = run(capsys, "doctor", *arguments, "--device", "cpu")
    assert code == 2 and ("--ranks W" in err if arguments[0] == "--shape" else "--ranks" in err)


def test_doctor_without_triton(capsys, monkeypatch):
    for module in ("registry", "doctor"):
        monkeypatch.setattr(f"mega_moe.{module}.find_spec", lambda package: None)
    code, out, _ = run(capsys, "doctor", "--device", "cpu")
    assert code == 0 and "needs Triton" in out and "lacks    rich" in out


# schedule plays a layer's tiles through and draws them.


@needs_kernels
def test_a_schedule_is_printed_whole_or_its_beginning(capsys):
    code, out, err = run(capsys, "schedule", "--shape", "12,32,16,4,2", "--programs", "2")
    lines = out.splitlines()
    assert (code, err) == (0, "") and lines[0].startswith("12,32,16,4,2  T=12  H=32  I=16  E=4  K=2  W=1  bf16")
    assert lines[2].split() == list(COLUMNS) and "more" not in out
    kinds = [line.split()[1] for line in lines[3 : lines.index("", 3)]]
    assert set(kinds) == {"gate_up", "down", "combine"} and kinds[-1] == "combine"
    assert lines[-1].startswith("2 programs: ") and lines[-1].endswith("waiting")

    code, out, _ = run(capsys, "schedule", "--shape", "400,32,16,16,4", "--ranks", "4", "--direction", "backward")
    assert code == 0 and "--json prints them all" in out and "on each of 4 ranks" in out
    for kind in ("dispatch", "dact", "dx", "dw_gate_up", "dw_down", "combine"):
        assert kind in out.split("--json")[1], kind


@needs_kernels
def test_the_json_of_a_schedule_holds_every_tile_and_has_the_documented_keys(capsys):
    argv = ("--direction", "backward", "--save", "inputs", "--routing", "zipf", "--ranks", "2", "--programs", "3")
    code, out, err = run(capsys, "schedule", "--json", "--seed", "5", *argv)
    result = json.loads(out)
    assert (code, err) == (0, "")
    lines = [line.strip() for line in simulate.Simulation.as_json.__doc__.splitlines()]
    documented = [line.split()[0] for line in lines[lines.index("") + 1 :] if line]
    assert list(result) == documented and result["columns"] == list(COLUMNS) and result["kinds"] == list(KINDS)
    assert f"problem    {', '.join(result['problem'])}" in lines
    assert result["problem"]["W"] == 2 and result["problem"]["save"] == "inputs" and result["problem"]["seed"] == 5

    kinds = [KINDS[tile[0]] for tile in result["tiles"]]
    assert list(dict.fromkeys(kinds))[:4] == ["dispatch", "gate_up", "dact", "dx"]
    assert {kind: counts["tiles"] for kind, counts in result["summary"].items()} == dict(Counter(kinds))
    assert sorted(span[1] for span in result["spans"]) == list(range(len(kinds)))
    assert max(span[4] for span in result["spans"]) == result["steps"]
    assert 0 < result["busy"] <= 1 and 0 <= result["waiting"] < 1
    assert result["programs"] == 3 and {span[0] for span in result["spans"]} <= set(range(6))


@needs_kernels
@pytest.mark.parametrize("shape", ["tiny", "0,32,16,4,2"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_schedule_is_drawn_with_a_text_for_those_who_do_not_see_it(capsys, tmp_path, shape, direction):
    path = tmp_path / "schedule.svg"
    argv = ("--shape", shape, "--direction", direction, "--ranks", "2", "--programs", "2", "--plot", str(path))
    code, _, err = run(capsys, "schedule", *argv)
    assert (code, err) == (0, f"wrote {path}\n")
    svg = "{http://www.w3.org/2000/svg}"
    drawn = ElementTree.parse(path).getroot()
    title, description = drawn.findtext(f"{svg}title"), drawn.findtext(f"{svg}desc")
    assert title.startswith(f"{direction}, T = ") and "2 programs on each of 2 ranks: " in description
    words = [text.text for text in drawn.iter(f"{svg}text")]
    assert {"rank 0 · 0", "rank 1 · 1", "waiting", "steps"} <= set(words)
    steps = ["dispatch", "gate_up", "swiglu", "down", "combine"]
    here = {"forward": ["dispatch", "gate_up", "down", "combine"], "backward": steps}[direction]
    if shape != "tiny":  # without tokens only zeros are stored
        here = [] if direction == "forward" else ["gate_up", "down"]
    assert [step for step in steps if step in words] == here
    assert [path.get("class") for path in drawn.iter(f"{svg}path") if path.get("class") in steps] == here


# trace runs a layer and shows what became of its tiles.


@needs_kernels
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_trace_is_printed_and_written(capsys, tmp_path, direction):
    perfetto, plot = tmp_path / "trace.json", tmp_path / "trace.svg"
    argv = ("--shape", "12,32,16,4,2", "--direction", direction, "--perfetto", str(perfetto), "--plot", str(plot))
    code, out, err = run(capsys, "trace", *argv)
    assert code == 0 and err == f"wrote {perfetto}; open it in https://ui.perfetto.dev\nwrote {plot}\n"
    lines = out.splitlines()
    assert lines[0] == f"12,32,16,4,2  T=12  H=32  I=16  E=4  K=2  W=1  bf16  routing: balanced  {direction}"
    kinds = {"forward": ["gate_up", "down"], "backward": ["dact", "dx", "dw_gate_up", "dw_down"]}[direction]
    assert [line.split()[0] for line in lines[3 : lines.index("", 3)]] == ["kind", *kinds, "combine"]
    assert "% at work, " in out and "% waiting, " in out and "% after their last" in out
    assert ("order of tiles and nothing else" in out) == (DEVICE == "cpu")

    tiles = sum(int(line.split()[1]) for line in lines[4 : lines.index("", 3)])
    events = json.loads(perfetto.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["name"] != "waiting" for event in events) == tiles
    assert ElementTree.parse(plot).getroot().findtext("{http://www.w3.org/2000/svg}title").startswith(direction)


@needs_kernels
def test_the_json_of_a_trace_has_the_documented_keys(capsys):
    from mega_moe.trace import Trace

    argv = ("--shape", "12,32,16,4,2", "--direction", "backward", "--save", "inputs", "--routing", "hot", "--seed", "3")
    code, out, err = run(capsys, "trace", "--json", "--dtype", "fp32", *argv)
    result = json.loads(out)
    assert (code, err) == (0, "")
    lines = [line.strip() for line in Trace.as_json.__doc__.splitlines()]
    documented = [line.split()[0] for line in lines[lines.index("") + 1 :] if line]
    assert list(result) == documented
    for bundle in ("machine", "problem"):
        assert next(line for line in lines if line.startswith(bundle)).split(None, 1)[1] == ", ".join(result[bundle])
    assert result["problem"]["dtype"] == "fp32" and result["problem"]["routing"] == "hot"
    assert list(result["kinds"]) == ["gate_up", "dact", "dx", "dw_gate_up", "dw_down", "combine"]
    assert sum(of["tiles"] for of in result["kinds"].values()) == result["tiles"]
    assert list(result["shares"]) == ["busy", "waiting", "between", "tail"]
    assert sum(result["shares"].values()) == pytest.approx(1)


@needs_kernels
def test_what_takes_a_cpu_too_long_to_trace_is_refused(capsys, monkeypatch):
    code, out, err = run(capsys, "trace", "--shape", "0,32,16,4,2")
    assert (code, out) == (2, "") and "without tokens there is nothing to trace" in err
    if DEVICE == "cpu":
        code, out, err = run(capsys, "trace", "--shape", "qwen3-30b-a3b")
        assert (code, out) == (2, "") and "takes about" in err and "(Triton's interpreter)" in err
        monkeypatch.setattr(cli, "PATIENCE", 0)
        assert run(capsys, "trace", "--shape", "4,32,16,2,1")[0] == 2
        assert run(capsys, "trace", "--shape", "4,32,16,2,1", "--force")[0] == 0


# It ends quietly when it is told to.


def test_control_c_ends_it_without_a_word(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder, "climb", interrupted)
    assert run(capsys, "ladder", *SMALL) == (130, "", "")


@pytest.mark.parametrize(
    "argv",
    [
        ("doctor", "--device", "cpu"),
        ("ladder", "--shape", "8,16,16,2,1", "--stage", "reference", "--device", "cpu"),
        ("ladder", "--help"),
    ],
    ids=" ".join,
)
def test_a_closed_pipe_ends_it_without_a_word(argv):
    reader, writer = os.pipe()
    os.close(reader)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "mega_moe", *argv]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


# bench finds pytest's benchmarks and starts them.


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_bench_measures_a_models_layer_on_a_gpu_alone(capsys):
    code, out, err = run(capsys, "bench", "--shape", "tiny", "--shape", "qwen3-30b-a3b")
    assert (code, out) == (2, "") and err.startswith("mega-moe: --shape qwen3-30b-a3b needs a GPU")


def test_bench_says_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "BENCHMARKS", tmp_path)
    code, _, err = run(capsys, "bench")
    assert code == 2 and "run this from a checkout" in err
    (tmp_path / "test_speed.py").touch()
    monkeypatch.setattr(bench, "find_spec", lambda package: None)
    code, _, err = run(capsys, "bench")
    assert (code, err) == (
        2,
        "mega-moe: the benchmarks need pytest and pytest-benchmark: pip install pytest pytest-benchmark\n",
    )


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
    assert commands[0][4:] == ["--shape=tiny", "--save=pre", f"--benchmark-json={Path('results.json').resolve()}"]
    verdicts = iter([0])
    assert run(capsys, "bench", "--save", "inputs")[0] == 0 and commands[-1][4:] == ["--save=inputs"]
    verdicts = iter([0])
    assert run(capsys, "bench", "--floor")[0] == 0 and commands[-1][3:] == [str(tmp_path / bench.FLOOR), "--save=pre"]
    assert (CHECKOUT / "tests" / "bench" / bench.FLOOR).exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_the_program_runs_from_a_bare_checkout_and_chooses_the_interpreter_itself():
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")}
    command = [sys.executable, "-m", "mega_moe", "ladder", "--json", "--device", "cpu", "--shape", "8,16,16,2,1"]
    command += ["--stage", "reference", "--stage", "grouped"]
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert all(row["interpreted"] for row in rows[1:] if not row["why_not"])
    assert not any("TRITON_INTERPRET" in (row["why_not"] or "") for row in rows)


def test_nothing_loads_triton_or_rich_before_it_is_known_what_to_do():
    program = "import sys, mega_moe.cli; sys.exit('triton' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, check=False).returncode == 0
