"""Training in each precision: the script that does it, and the way of its numbers to a page."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="docs/render_losses.py draws with it")
import render_losses

ROOT = Path(__file__).resolve().parent.parent


def test_every_precision_is_trained_on_the_same_batches(tmp_path):
    """One seed, two steps: the first forward is that of bf16 where it is in bf16, and nearby elsewhere."""
    pytest.importorskip("transformers", minversion="5.23", reason="the trainer needs it")
    text = tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    sizes = dict(hidden_size=32, moe_intermediate_size=32, num_experts=4, head_dim=8, initializer_range=0.2)
    changes = [f"model.{name}={size}" for name, size in sizes.items()]
    changes += ["data.length=16", "data.batch=2", "train.steps=2", f"data.text={text}"]
    command = [sys.executable, "examples/precisions.py", "examples/precisions.toml", tmp_path / "losses.json"]
    command += ["--seeds", "1", *(word for change in changes for word in ("--set", change))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    record = json.loads((tmp_path / "losses.json").read_text())

    runs = render_losses.of_seed(record, 0)
    assert list(runs) == ["fp32", "bf16", "fp8", "fp8_bwd", "mxfp8"]
    first = {precision: run["losses"][0] for precision, run in runs.items()}
    assert first["fp8_bwd"] == first["bf16"] and len({*first.values()}) == 4
    assert list(first.values()) == pytest.approx([first["fp32"]] * 5, rel=0.02)
    assert len({run["held_out"] for run in runs.values()}) == 5
    assert all(len(run["losses"]) == 2 and run["held_out"] > 0 for run in runs.values())
    assert record["text"]["called"] == "text" and record["text"]["bytes"] == 40 * 45
    for precision in runs:
        assert f"seed 0  {precision:8} loss {first[precision]:.4f} ... " in ran.stdout


def record(**held_out: list[float]) -> dict:
    """Made-up runs of 120 steps, that fall from 12 to their held-out loss at once."""
    config = dict(
        model=dict(
            num_hidden_layers=2, hidden_size=256, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2
        ),
        data=dict(batch=8, length=64),
        train=dict(steps=120),
        moe=dict(stage="reference"),
    )
    runs = [
        dict(precision=precision, seed=seed, held_out=loss, losses=[12.0] * 60 + [loss] * 60)
        for precision, losses in held_out.items()
        for seed, loss in enumerate(losses)
    ]
    machine = dict(device="CPU", torch="2.13.0", date="2026-11-30")
    return dict(machine=machine, text=dict(called="a text", bytes=1000), config=config, runs=runs)


def test_a_record_becomes_a_table():
    """By hand: 0.1 and -0.2 are -0.05 on average. The third seed was not run in all precisions."""
    text = render_losses.render(record(bf16=[2.0, 2.2, 2.5], fp8=[2.1, 2.0]))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]

    assert lines[0] == ["", "seed 0", "seed 1", "held out − bf16", "trained − bf16"]
    assert lines[2] == ["bf16", "2.0000", "2.2000", "", ""]
    assert lines[3] == ["fp8", "2.1000", "2.0000", *["-0.0500 (-0.2000 to +0.1000)"] * 2]
    assert "after 120 steps of 8 × 64 tokens" in text and "stage reference" in text
    assert "Over the last 100, the loss of bf16 falls by 0.0990 a step" in text  # 12 to 2.1, in 100


def test_means_are_of_windows_that_are_full():
    assert render_losses.smooth([float(n) for n in range(22)]) == ([20, 21, 22], [9.5, 10.5, 11.5])


def test_the_page_shows_the_newest_record():
    newest = render_losses.newest()
    assert render_losses.page(newest) == render_losses.PAGE.read_text(), "run docs/render_losses.py again"
    assert render_losses.FIGURE.exists() and "](losses.svg)" in render_losses.PAGE.read_text()
    assert len(render_losses.complete(newest)["bf16"]) >= 2, "one seed shows no spread"


def test_8_bits_follow_as_the_page_says():
    """On held-out text on either side of bf16, within what seeds differ by; in training behind it by some ten steps."""
    runs = render_losses.complete(render_losses.newest())
    held_out = {precision: [run["held_out"] for run in its] for precision, its in runs.items()}
    off = {name: [a - b for a, b in zip(its, held_out["bf16"], strict=True)] for name, its in held_out.items()}
    furthest = {name: max(map(abs, its)) for name, its in off.items()}
    for precision in ("fp32", "fp8", "fp8_bwd", "mxfp8"):
        assert min(off[precision]) < 0 < max(off[precision])
        assert abs(statistics.mean(off[precision])) < max(held_out["bf16"]) - min(held_out["bf16"])
    assert all(1.5 < furthest[name] / furthest["fp32"] < 2.5 for name in ("fp8", "fp8_bwd", "mxfp8"))
    for precision in ("fp8", "mxfp8"):
        behind = [
            render_losses.trained(a) - render_losses.trained(b)
            for a, b in zip(runs[precision], runs["bf16"], strict=True)
        ]
        assert min(behind) > 0 and 7 < statistics.mean(behind) / render_losses.slope(runs["bf16"]) < 13
