"""The way of the trainer's times to their page."""

import json

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="the trainer needs it")
import render_training


def row(type: str, stage: str, seconds: float, moe_share: float, **kwargs) -> dict:
    moe = dict(render_training.train.MOE, type=type, stage=stage, **kwargs)
    its = dict(moe=moe, activation_checkpointing="full", s_per_step=seconds, spread=0.001, moe_share=moe_share)
    its |= dict(tokens_per_s_per_rank=1000 / seconds, mfu=0.25, peak_bytes=3 * 2**30, kept_bytes=2**28)
    return its | dict(loss=5.0, loss_difference=2e-5, norm_difference=0.0)


def measured(*rows: dict) -> dict:
    """A made-up bench of two layers."""
    model = dict(num_hidden_layers=2, hidden_size=32, moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2)
    machine = dict(ranks=1, device="NVIDIA H200", date="2026-12-01", torch="2.11.0", triton="3.6.0")
    machine |= dict(transformers="5.24.0", python="3.12.3")
    config = dict(model=model, data=dict(batch=1, length=16384), train=dict(dtype="bf16"), bench={})
    return dict(machine=machine, config=config, rounds=5, load=dict(max_load=3.21), rows=list(rows))


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_a_bench_becomes_a_table():
    """By hand: of 200 ms the half is in the MoE; ours takes 150 ms, 60 of them in the MoE, in 8 bits 100."""
    theirs = row("torch", "grouped_mm", 0.2, 0.5, compile=True)
    ours = [row("mega_moe", "mega", 0.15, 0.4), row("mega_moe", "mega", 0.1, 0.4, precision="fp8")]
    text = render_training.render("small", measured(theirs, *ours))
    heads, _, first, second, third = cells(text)

    assert heads[:5] == ["experts", "step, ms", "in MoE, ms", "the rest, ms", "share of MoE"]
    assert first[:7] == ["torch grouped_mm compiled", "200.0 ± 1.0", "100.0", "100.0", "50%", "5,000", "25.0%"]
    assert second[:5] == ["**mega_moe mega**", "150.0 ± 1.0", "60.0", "90.0", "40%"]
    assert third[0] == "**mega_moe mega fp8**" and third[7:] == ["0.25 GiB", "3.0 GiB", "2e-05", "0e+00"]
    assert text.startswith("### small: 2 layers, H = 32, I = 16, E = 8, K = 2\n")
    assert (
        "A step of 1 × 16,384 tokens in bf16, activation_checkpointing = 'full', with weights as they are drawn; "
        in text
    )
    assert "The most loaded expert of a layer has 3.2 times the mean, where 4.0 is every token." in text
    assert text.endswith("grouped_mm compiled a step takes with mega_moe mega 25% less (40% less in MoE).")


def test_what_is_not_known_has_no_column_and_where_it_is_from_is_said():
    its = row("torch", "eager", 0.2, 0.5)
    del its["kept_bytes"]
    text = render_training.render("small", measured(its) | dict(read_from="a printed table"))
    assert "kept" not in cells(text)[0] and "Kept" not in text and text.endswith(" Read from a printed table.")
    assert "*Kept* is what" in render_training.render("small", measured(row("torch", "eager", 0.2, 0.5)))


def test_what_backward_makes_again_is_a_column():
    rows = [
        row("mega_moe", "mega", 0.2, 0.5),
        row("mega_moe", "mega", 0.1, 0.5) | dict(activation_checkpointing="none"),
    ]
    text = render_training.render("small", measured(*rows))
    assert [line[1] for line in cells(text)] == ["made again", ":--", "full", "none"]
    assert text.startswith("### What backward makes again: 2 layers")
    assert "activation_checkpointing" not in text and "Beside" not in text


def test_a_run_that_was_stopped_leaves_its_last_whole_round(tmp_path, monkeypatch):
    monkeypatch.setattr(render_training, "RECORDS", tmp_path / "records")
    assert render_training.newest() is None
    one, two = measured(row("torch", "eager", 0.2, 0.5)), measured(row("torch", "eager", 0.1, 0.5))
    text = f"{json.dumps(one)}\n{json.dumps(two)}\n{json.dumps(two)[:40]}"
    render_training.save(dict(small=render_training.last(text)))
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["2026-12-01-nvidia-h200.json"]
    assert render_training.newest() == dict(small=two)


def test_a_record_takes_what_is_new_of_its_day(tmp_path, monkeypatch):
    """And the page has tables by size, those of several ways last."""
    monkeypatch.setattr(render_training, "RECORDS", tmp_path)
    small, large = (measured(row("torch", "eager", 0.2, 0.5)) for _ in range(2))
    large["config"]["model"] = dict(large["config"]["model"], hidden_size=64)
    large["config"]["bench"] = dict(after=60)
    ways = measured(small["rows"][0], small["rows"][0] | dict(activation_checkpointing="none"))
    render_training.save(dict(again=ways, small=large))
    render_training.save(dict(large=large, small=small))
    assert render_training.newest() == dict(again=ways, large=large, small=small)
    page = render_training.page(render_training.newest())
    titles = [line.partition(":")[0] for line in page.partition("steps:start")[2].splitlines() if line[:4] == "### "]
    assert titles == ["### small", "### large", "### What backward makes again"]
    assert page.count("'full', after 60 steps of training; median") == 1


def test_the_page_shows_the_newest_record():
    expected = render_training.page(render_training.newest())
    assert expected == render_training.PAGE.read_text(encoding="utf-8"), "run docs/render_training.py again"


def test_rungs_stand_as_the_page_says():
    """Of each implementation table: persistent before mega, both before people's, and 8 bits behind 16."""
    tables = [its for its in render_training.newest().values() if len(render_training.ways_of(its)) == 1]
    assert len(tables) >= 2
    for its in tables:
        took = {render_training.called(row): row["s_per_step"] for row in its["rows"]}
        names = ["mega_moe persistent", "mega_moe mega", "torch grouped_mm compiled", "torch grouped_mm", "torch eager"]
        assert sorted(names, key=took.get) == names
        assert all(took[f"{name} fp8"] > took[name] for name in names[:2])
        assert all(0.1 < row["moe_share"] < 0.3 for row in its["rows"] if "eager" not in render_training.called(row))
