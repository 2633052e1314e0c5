"""How block sizes are measured and chosen, and how the table is read. Here with a wall clock and in the interpreter: it
shows that the machinery works, and nothing about speed."""

import json
from dataclasses import replace

import pytest
import torch
from cases import DEVICE, on_cpu

from mega_moe import cli, tables, tune
from mega_moe.kernels import blocks
from mega_moe.kernels.blocks import HALF, INTERPRETER, Persistent, Strips, tiles_of
from mega_moe.shapes import PRESETS, Problem
from mega_moe.stages import s4_persistent
from mega_moe.tune import KERNELS, Timed, Tuning, choice

DEFAULT = HALF["sm_90"].persistent
LAYER = Problem(T=20, H=64, I=48, E=3, K=2, device=DEVICE)
MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "python": "3.12", "date": "2026-11-29T09:30"}


def entry(H: int, I: int, target: str = "sm_90", strip: int = 1) -> dict:
    """An entry whose tiles are told by the strip of down."""
    problem = PRESETS["qwen3-30b-a3b"].at(H=H, I=I)
    tiles = replace(DEFAULT, down=replace(DEFAULT.down, STRIP=strip))
    rows = {kernel: [timed(getattr(tiles, kernel), 1.0, kernel)] for kernel in KERNELS}
    return Tuning(problem, MACHINE, target, DEFAULT, rows).entry()


@pytest.fixture
def table_of(monkeypatch, tmp_path):
    """Has blocks.py read these entries, as on a GPU of this target."""

    def set_table(*entries: dict, target: str = "sm_90") -> None:
        path = tmp_path / "blocks.json"
        path.write_text(tune.as_json(list(entries)))
        monkeypatch.setattr(blocks, "TABLE", path)
        monkeypatch.setattr(blocks, "target", lambda: target)
        forget()

    def forget() -> None:
        blocks.table.cache_clear()
        blocks.nearest.cache_clear()

    yield set_table
    forget()


# Reading


def test_every_entry_of_the_package_is_whole_and_alone():
    entries = json.loads(blocks.TABLE.read_text())
    for e in entries:
        assert list(e) == ["target", "device", "date", "torch", "triton", "dtype", *"HITEK", "tiles"]
        assert blocks.sizes_of(tiles_of(e["tiles"])) == e["tiles"] and e["target"] != "interpreter"
    assert len({(e["target"], e["dtype"], e["H"], e["I"]) for e in entries}) == len(entries)
    assert blocks.TABLE.read_text() == tune.as_json(entries)


@pytest.mark.parametrize(
    "H, I, strip",
    [
        (2048, 768, 1),
        (4096, 1536, 2),
        (4096, 768, 1),  # as far from both: the smaller layer's
        (4096, 769, 2),
        (2048, 1000, 1),
        (100000, 16, 1),
        (7168, 2048, 2),
    ],
)
def test_the_nearest_layer_gives_its_tiles(H, I, strip, table_of):
    table_of(entry(4096, 1536, strip=2), entry(2048, 768, strip=1), entry(H, I, "sm_100", strip=8))
    problem = PRESETS["tiny"].at(T=16384, H=H, I=I)
    for dtype in (torch.bfloat16, torch.float16):
        assert blocks.persistent_for(problem.at(dtype=dtype)).down.STRIP == strip
    assert blocks.persistent_for(problem.at(dtype=torch.float32)) == blocks.FP32.persistent


def test_without_an_entry_the_defaults_are_used(table_of):
    problem = PRESETS["tiny"].at(T=16384)
    table_of(entry(2048, 768, "sm_100"))
    assert blocks.persistent_for(problem) == DEFAULT
    table_of(entry(2048, 768, "interpreter"), target="interpreter")
    assert blocks.persistent_for(problem) == INTERPRETER.persistent


def test_the_stage_says_when_its_tiles_are_another_layers(table_of):
    here, there = PRESETS["qwen3-30b-a3b"], PRESETS["qwen3-235b-a22b"]
    table_of(entry(here.H, here.I))
    assert s4_persistent.note(here) is None
    assert "measured for H=2048, I=768" in s4_persistent.note(there)
    assert s4_persistent.note(there.at(dtype=torch.float32)) is None
    assert s4_persistent.note(there.at(T=1)) is None, "few rows have tiles of their own, of no layer"
    table_of(target="sm_86")
    assert "not measured on sm_86" in s4_persistent.note(here)


# Choosing


def timed(tile, ms: float, kernel: str = "down", spills: int = 0) -> Timed:
    return Timed(kernel, tile, error=0.0, spills=spills, ms=(ms + 0.2, ms, ms - 0.1))


@pytest.mark.parametrize(
    "rows, chosen",
    [
        ([(1.0, 0), (0.9, 0), (0.8, 0)], 2),
        ([(1.0, 0), (0.996, 0)], 0),  # within half a per cent: the first
        ([(1.0, 0), (0.994, 0)], 1),
        ([(1.0, 4), (0.998, 2), (0.999, 2)], 1),  # the one that spills least, and of those the first
        ([(1.0, 0), (0.9, 4)], 1),  # but a faster one all the same
    ],
)
def test_the_fastest_median_is_chosen_or_the_first_that_is_as_fast(rows, chosen):
    tiles = [replace(DEFAULT.down, STRIP=strip) for strip in (1, 2, 4)]
    rows = [timed(tile, ms, spills=spills) for tile, (ms, spills) in zip(tiles, rows)]
    failed = [Timed("down", DEFAULT.down, why_not="it does not fit")]
    assert choice(failed + rows) is rows[chosen]
    with pytest.raises(ValueError):
        choice(failed)


def test_candidates_begin_with_the_default_and_what_is_in_use(table_of):
    table_of(entry(2048, 768, strip=7))
    every = tune.candidates(PRESETS["qwen3-30b-a3b"])
    assert list(every) == list(KERNELS)
    assert every["down"][:2] == [DEFAULT.down, replace(DEFAULT.down, STRIP=7)]
    for kernel, tiles in every.items():
        assert tiles[0] == getattr(DEFAULT, kernel) and len(set(tiles)) == len(tiles) > 5
        assert {type(tile) for tile in tiles} == {type(tiles[0])}
        assert len({tune.text(tile) for tile in tiles}) == len(tiles)
    quick = tune.candidates(PRESETS["qwen3-30b-a3b"], ["dact"], quick=True)
    assert list(quick) == ["dact"] and 2 < len(quick["dact"]) < len(every["dact"])
    assert all(tune.differences(tile, DEFAULT.dact) < 2 for tile in quick["dact"])


# Measuring


def two(kernel: str) -> list:
    """The default in use here, and a narrower tile."""
    default = getattr(blocks.blocks_for(LAYER.dtype).persistent, kernel)
    return [default, replace(default, BLOCK_N=default.BLOCK_N // 2)]


@on_cpu
def test_every_kernel_is_run_judged_timed_and_entered(monkeypatch, capsys):
    """Sums are taken in the same order whatever BLOCK_N: the results are equal to the bit."""
    monkeypatch.setattr(tune, "ROUNDS", {"cpu": 1})
    done = []
    tiles = {kernel: two(kernel) for kernel in KERNELS}
    tuning = tune.measure(LAYER, tiles, {}, done.append)
    assert len(done) == tune.steps_of(tiles, "cpu") == 6 * (2 + 1 + 1)
    assert tuning.passed and tuning.target == "interpreter" and not tuning.dense_ms
    for kernel, rows in tuning.rows.items():
        assert [row.tile for row in rows] == tiles[kernel]
        assert all(row.error == 0 and row.spills == 0 and len(row.ms) == 1 and row.ms[0] > 0 for row in rows)
    assert tiles_of(tuning.entry()["tiles"]) == replace(INTERPRETER.persistent, **tuning.chosen)

    tables.show_tiles(tuning, "a layer")
    out = capsys.readouterr().out
    assert all(f"{kernel}: ms a launch" in out for kernel in KERNELS) and out.count("chosen") == 6
    assert tune.text(tiles["dact"][1]) in out


@on_cpu
def test_what_does_not_run_is_passed_over_with_its_reason(monkeypatch, capsys):
    default, narrow = two("down")
    odd, known = replace(default, BLOCK_N=48), replace(default, STRIP=3)
    spilling = replace(default, STRIP=5)
    monkeypatch.setattr(tune, "spills", spilled := lambda call: (call(), 0)[1])
    failures = {(LAYER, "down", known): "it does not fit"}
    tuning = tune.measure(LAYER, {"down": [default, odd, known, narrow]}, failures)
    why = {row.tile: row.why_not for row in tuning.rows["down"]}
    assert why[default] is why[narrow] is None and why[known] == "it does not fit"
    assert "power of 2" in why[odd] and "\n" not in why[odd]
    assert tuning.passed and set(tuning.chosen) == {"down"}
    assert tuning.entry()["tiles"]["dx"] == blocks.sizes_of(INTERPRETER.persistent.dx)
    tables.show_tiles(tuning, "a layer")
    assert f"down, {tune.text(known)}: it does not fit" in capsys.readouterr().out

    monkeypatch.setattr(tune, "spills", lambda call: spilled(call) + 1)
    layer = tune.work(LAYER, INTERPRETER.persistent)
    first, second = tune.examine(layer, "down", [default, spilling], {})
    assert first.why_not is None and second.why_not == "spills 1 registers a thread"
    with pytest.raises(RuntimeError, match="down does not run with its default tile"):
        tune.examine(layer, "down", [odd, default], {})


@on_cpu
@pytest.mark.parametrize("fault", [0.5, float("nan")])
def test_no_time_without_parity(fault, monkeypatch):
    default, narrow = two("dw_down")
    call_of = tune.call_of

    def faulty(work, kernel, tile):
        call = call_of(work, kernel, tile)
        spoil = lambda results: [results[0].index_fill(0, torch.tensor([1]), fault)]
        return (lambda: spoil(call())) if tile == narrow else call

    monkeypatch.setattr(tune, "call_of", faulty)
    tuning = tune.measure(LAYER, {"dw_down": [default, narrow]}, {})
    row = tuning.rows["dw_down"][1]
    assert row.wrong and "WRONG" in row.why_not and not row.ms
    assert not tuning.passed and tuning.chosen == {"dw_down": default}


def test_the_work_is_the_layers_in_plain_torch():
    """What a kernel is given has its live rows where the table says, and zeros where a block is padded."""
    layer = tune.work(LAYER, blocks.blocks_for(LAYER.dtype).persistent)
    (slots,) = tune.call_of(layer, "down", layer.table.tiles.down)()
    gate, up = layer.pre.float().unbind(1)
    act = torch.nn.functional.silu(gate) * up
    expected = torch.stack([a @ w.float().T for a, w in zip(act, layer.inputs.w_down[expert_of_row(layer)])])
    got = slots.flatten(0, 1)[route_of_row(layer)].float()
    assert tune.distance(got, expected) < 0.01
    padded = torch.ones(len(layer.act), dtype=bool, device=DEVICE)
    padded[layer.rows_in_blocks] = False
    assert padded.sum() == len(layer.act) - LAYER.R and not layer.dpre[padded].any()


def expert_of_row(layer):
    return torch.searchsorted(layer.plan.row_start[1:].long(), torch.arange(LAYER.R, device=DEVICE), right=True)


def route_of_row(layer):
    return layer.plan.token_of_row.long() * LAYER.K + layer.plan.slot_of_row.long()


@pytest.mark.parametrize(
    "message, line",
    [
        ("at 12:8:\n  acc = dot(a, b)\n  ^\nShapes differ", "ValueError: Shapes differ"),
        ("out of resource: shared memory\nReducing may help", "ValueError: out of resource: shared memory"),
        ("", "ValueError: "),
    ],
)
def test_a_compilers_message_in_one_line(message, line):
    assert tune.one_line(ValueError(message)) == line


# Writing


def test_an_entry_replaces_its_own_and_survives_json():
    old, new = entry(2048, 768, strip=1), entry(2048, 768, strip=4)
    others = [entry(4096, 1536), entry(2048, 768, "gfx942")]
    entries = tune.with_entry([*others, old], new)
    assert old not in entries and [(e["target"], e["H"]) for e in entries] == [
        ("gfx942", 2048),
        ("sm_90", 2048),
        ("sm_90", 4096),
    ]
    text = tune.as_json(entries)
    assert json.loads(text) == entries and max(map(len, text.splitlines())) < 200
    assert tiles_of(json.loads(text)[1]["tiles"]) == replace(DEFAULT, down=replace(DEFAULT.down, STRIP=4))
    assert list(new) == ["target", "device", "date", "torch", "triton", "dtype", *"HITEK", "tiles"]
    assert tune.has_entry(entries, PRESETS["qwen3-30b-a3b"].at(T=1), "sm_90")
    assert not tune.has_entry(entries, PRESETS["tiny"], "sm_90") and tune.as_json([]) == "[]\n"


# The command


@on_cpu
def test_without_a_gpu_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.main(["tune"]) == 2
    assert "tune needs a GPU" in capsys.readouterr().err


@on_cpu
def test_the_command_measures_and_writes(capsys, monkeypatch, tmp_path, table_of):
    """As on a GPU, but for the GPU: one kernel, then the refusals, then the table."""
    table_of(target="interpreter")
    monkeypatch.setattr(cli, "_device", lambda asked: "cuda")
    monkeypatch.setattr(cli, "_shape", lambda text: LAYER.at(T=int(text)))
    monkeypatch.setattr(tune, "ROUNDS", {"cpu": 1})
    monkeypatch.setattr(tune, "compile_beforehand", lambda wanted, doing: {})
    monkeypatch.setattr(tune, "candidates", lambda problem, kernels, quick: {kernel: two(kernel) for kernel in kernels})
    assert cli.main(["tune", "--shape", "20", "--kernel", "dx"]) == 0
    assert "dx: ms a launch" in capsys.readouterr().out

    path = tmp_path / "new.json"
    for argv, message in [
        (["--shape", "0"], "without tokens"),
        (["--shape", "20", "--kernel", "combine"], "the kernels are gate_up, down"),
        (["--shape", "20", "--kernel", "dx", "--json", str(path)], "no tiles for 20 yet"),
        (["--shape", "20", "--json", str(tmp_path / "no" / "folder.json")], "there is no folder"),
        (["--shape", "20", "--json", str(tmp_path)], "cannot be written"),
    ]:
        assert cli.main(["tune", *argv]) == 2
        assert message in capsys.readouterr().err
    with monkeypatch.context() as patched:
        few = blocks.few(16, 16, N=64, C=64, stages=1, apart=(64, 64, 1))
        patched.setattr(blocks, "INTERPRETER", replace(INTERPRETER, few=(few,)))
        least = 16 * LAYER.E // LAYER.K + 1
        assert cli.main(["tune", "--shape", str(least - 1)]) == 2
        assert f"give --T {least} or more" in capsys.readouterr().err and blocks.few_for(LAYER.at(T=least)) is None

    monkeypatch.setattr(tune, "KERNELS", ("dx",))
    assert cli.main(["tune", "--shape", "9", "--T", "20", "--json", str(path), "--write"]) == 0
    assert f"wrote {path}" in capsys.readouterr().err
    (written,) = json.loads(path.read_text())
    assert blocks.TABLE.read_text() == path.read_text()
    assert (written["target"], written["H"], written["T"]) == ("interpreter", 64, 20)
    assert isinstance(tiles_of(written["tiles"]), Persistent) and isinstance(tiles_of(written["tiles"]).dx, Strips)
