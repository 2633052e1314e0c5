"""The trainer of examples/: whoever computes the experts takes the same steps; so do ranks, and a run that resumes."""

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

NEEDED = "needs transformers 5.23 or newer"
pytest.importorskip("transformers", minversion="5.23", reason=NEEDED)

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "ranks"))

from forked import no_fork_warning, on_ranks  # noqa: E402

spec = importlib.util.spec_from_file_location("train", ROOT / "examples" / "train.py")
trainer = importlib.util.module_from_spec(spec)
sys.modules["train"] = trainer
spec.loader.exec_module(trainer)

MODEL = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=16,
    num_experts=4,
    initializer_range=0.2,  # large, so that experts are seen in the loss
)
TEXT = str(ROOT / "LICENSE")  # a text that stays as it is, which the pages do not
PLAIN = dict(type="mega_moe", stage="reference")
NAMES = ["eager", "grouped_mm", "batched_mm"]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No test leaves the group of its one rank to the next."""
    yield
    leave()


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def config(moe: dict = PLAIN, parallel: dict | None = None, checkpoints: dict | None = None, **train) -> dict:
    """A layer that is trained in fp32 on two sequences of eight bytes a step."""
    train = dict(dtype="fp32", lr=0.01, activation_checkpointing="none") | train
    data = dict(text=TEXT, length=8, batch=4 if parallel else 2)
    tables = dict(model=MODEL, moe=moe, data=data, train=train)
    return trainer.parse(tables | dict(parallel=parallel or {}, checkpoints=checkpoints or {}), trainer.SETTINGS)


def facts(*args, **kwargs) -> list[dict]:
    """What a run tells of its steps, without times."""
    told = list(trainer.train(config(*args, **kwargs)))
    leave()
    timed = ("s_per_step", "tokens_per_s_per_rank", "mfu", "peak_bytes")
    return [{key: value for key, value in step.items() if key not in timed} for step in told]


def follows(got: list[dict], expected: list[dict], rtol: float = 1e-4) -> None:
    """Loss and norm of each step, in fp32: experts add up in another order, and what that rounds grows from step to
    step."""
    assert [step["step"] for step in got] == [step["step"] for step in expected]
    for key in ("loss", "grad_norm"):
        its = [torch.tensor([step[key] for step in steps]) for steps in (got, expected)]
        torch.testing.assert_close(*its, rtol=rtol, atol=0, msg=lambda told, key=key: f"{key}: {told}")


# Whoever computes the experts


@pytest.mark.parametrize("stage", ["persistent", "mega"])
def test_fifty_steps_follow_the_reference(stage):
    """In which the model learns something."""
    expected = facts(steps=50)
    assert expected[-1]["loss"] < 0.8 * expected[0]["loss"]
    follows(facts(dict(type="mega_moe", stage=stage), steps=50), expected)


@pytest.mark.full
def test_fifty_steps_of_every_rung(rung):
    follows(facts(dict(type="mega_moe", stage=rung.name), steps=50), facts(steps=50))


@pytest.mark.parametrize("stage", NAMES)
def test_with_experts_of_transformers(stage):
    follows(facts(dict(type="torch", stage=stage), steps=10), facts(steps=10))


@pytest.mark.parametrize("what", ["none", "full"])
def test_with_experts_that_are_compiled(what):
    """As one graph a direction, which is compiled once and not in every step."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = facts(dict(type="torch", stage="grouped_mm", compile=True), steps=4, activation_checkpointing=what)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    follows(got, facts(steps=4))


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd", "mxfp8"])
def test_in_8_bits(precision):
    """Near the reference in 16 bits and not the same, but for the first forward of fp8_bwd."""
    got, expected = facts(PLAIN | dict(precision=precision), steps=6), facts(steps=6)
    assert (got[0]["loss"] == expected[0]["loss"]) == (precision == "fp8_bwd")
    assert {step["loss"] for step in got[1:]}.isdisjoint(step["loss"] for step in expected)
    follows(got, expected, rtol=0.1)


def test_in_bf16_weights_stay_fp32():
    """A loss of bf16 is near that of fp32, and not the same; small steps are not lost."""
    got, expected = facts(dtype="bf16", steps=6), facts(steps=6)
    assert {step["loss"] for step in got}.isdisjoint(step["loss"] for step in expected)
    follows(got, expected, rtol=0.05)
    started = trainer.start(config(dtype="bf16"))
    assert {w.dtype for w in started.model.parameters()} == {torch.float32}


# What backward makes again


KEPT = {"none": 1, "all but the experts": 1, "full": 2}
"""How often a layer's experts run forward in a step."""


class Counted(TorchDispatchMode):
    """How often each operator runs in it. What checkpointing has kept does not get here."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.calls[op.name().split(".")[0]] += 1
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("save", ["pre", "inputs"])
@pytest.mark.parametrize("what", KEPT)
def test_recomputing_changes_no_bit(what, save):
    """And experts run as often as docs/training.md says."""
    with Counted() as counted:
        got = facts(PLAIN | dict(save=save), steps=3, activation_checkpointing=what)
    assert counted.calls["mega_moe::forward"] == 3 * KEPT[what]
    assert counted.calls["mega_moe::backward"] == 3
    assert got == facts(steps=3)


@pytest.mark.parametrize("stage", ["eager", "grouped_mm"])
def test_all_but_the_experts_of_transformers(stage):
    """Their products are kept, two of each or of all: what is made again are four of attention and the router's."""

    def multiplied(what: str) -> tuple[int, list[dict]]:
        with Counted() as counted:
            got = facts(dict(type="torch", stage=stage), steps=1, activation_checkpointing=what)
        return counted.calls["aten::mm"] + counted.calls["aten::_grouped_mm"], got

    (none, expected), (exempt, got), (full, again) = map(multiplied, KEPT)
    assert got == again == expected
    each = 1 if stage == "grouped_mm" else MODEL["num_experts"] - expected[0]["dead_experts"]
    assert (exempt - none, full - none) == (5, 5 + 2 * each)


# Ranks


@on_cpu  # processes are forked, which a process that has used a GPU does not survive
@no_fork_warning
@pytest.mark.parametrize(
    "W, ep, moe",
    [
        (2, 2, dict(type="mega_moe", stage="mega")),
        (2, 2, dict(type="torch", stage="grouped_mm")),
        (2, 1, PLAIN),
        (4, 2, dict(type="torch", stage="eager")),
        pytest.param(2, 2, dict(type="mega_moe", stage="ranks"), marks=pytest.mark.full),
        pytest.param(4, 2, dict(type="mega_moe", stage="mega"), marks=pytest.mark.full),
    ],
    ids=lambda value: value["stage"] if isinstance(value, dict) else None,
)
def test_ranks_take_the_steps_of_one_process(W, ep, moe, tmp_path):
    """The second step is with weights that all have moved; under full checkpointing."""
    run = dict(steps=3, activation_checkpointing="full")
    expected = facts(PLAIN, dict(ep=1), **run)
    for got in on_ranks(W, lambda rank: list(trainer.train(config(moe, dict(ep=ep), **run))), tmp_path):
        follows(got, expected, rtol=1e-5)
        for key in ("max_load", "entropy", "dead_experts"):
            assert [step[key] for step in got] == pytest.approx([step[key] for step in expected])


@on_cpu
@no_fork_warning
def test_bench_over_ranks(tmp_path):
    """Each implementation begins from the experts, not from how the one before brought rows to them."""
    tables = config(dict(type="torch"), dict(ep=2))
    tables["bench"].update(moe=[trainer.parse(dict(type="torch", stage=name), trainer.MOE) for name in NAMES], rounds=1)
    _, second = facts(PLAIN, dict(ep=1), steps=2, lr=0.0)
    for (measured,) in on_ranks(2, lambda rank: list(trainer.bench(tables)), tmp_path):
        assert measured["rows"][0]["loss"] == pytest.approx(second["loss"], rel=1e-5)
        assert [row["moe"]["stage"] for row in measured["rows"]] == NAMES
        assert all(row["loss_difference"] < 1e-5 and row["norm_difference"] < 1e-4 for row in measured["rows"])


@on_cpu
@no_fork_warning
def test_ranks_resume_to_the_bit(tmp_path):
    """Experts are split over two ranks, and each share over two others."""
    moe, folder = dict(type="torch", stage="eager"), dict(folder=str(tmp_path / "kept"), every=2)
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    run = lambda steps, resume: (
        lambda rank: [
            (step["loss"], step["grad_norm"])
            for step in trainer.train(config(moe, dict(ep=2), folder, steps=steps), resume)
        ]
    )
    whole = on_ranks(4, run(4, False), tmp_path / "1")[0]
    (tmp_path / "kept" / "step-00000004").rename(tmp_path / "elsewhere")
    assert on_ranks(4, run(4, True), tmp_path / "2")[0] == whole[2:]


# Checkpoints


def test_a_run_resumes_to_the_bit(tmp_path):
    """All that is told of the steps after it, and the weights at the end. The text is short, so that it begins anew."""
    text = tmp_path / "text"
    text.write_text("How often does a text of eighty letters begin anew, if each step reads sixteen?")

    def run(folder: str, steps: int, resume: bool = False) -> tuple[list[dict], dict]:
        tables = config(checkpoints=dict(folder=str(tmp_path / folder), every=3), steps=steps, warmup=6)
        tables["data"]["text"] = str(text)
        torch.manual_seed(steps)  # of no consequence
        told = [(step["step"], step["loss"], step["grad_norm"], step["lr"]) for step in trainer.train(tables, resume)]
        leave()
        return told

    whole = run("whole", 8)
    first = run("parts", 5)
    assert first == whole[:5]
    assert run("parts", 8, resume=True) == whole[5:]
    ends = [trainer.start(config()) for _ in range(2)]
    for each, folder in zip(ends, ("whole", "parts")):
        trainer.load(each, tmp_path / folder / "step-00000008")
    assert ends[0].position == ends[1].position == 16
    for a, b in zip(*(each.model.parameters() for each in ends)):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    for a, b in zip(*(each.optimizer.state_dict()["state"].values() for each in ends)):
        assert all(torch.equal(a[key].full_tensor(), b[key].full_tensor()) for key in ("exp_avg", "exp_avg_sq"))

    with pytest.raises(trainer.ConfigError, match=r"go on with --resume, or name another"):
        run("parts", 9)
    with pytest.raises(
        trainer.ConfigError, match=r"--resume: there is no checkpoint in checkpoints.folder = '.*mistyped'"
    ):
        run("mistyped", 9, resume=True)


@pytest.mark.parametrize(
    "section, key, value",
    [
        ("model", "num_hidden_layers", 2),
        ("model", "norm_topk_prob", False),
        ("data", "length", 4),
        ("train", "seed", 1),
    ],
)
def test_another_model_or_place_in_the_data_does_not_resume(section, key, value, tmp_path):
    """Also where all weights that are wanted are there."""
    tables = config(steps=1, checkpoints=dict(folder=str(tmp_path), every=1))
    list(trainer.train(tables))
    leave()
    was, tables[section][key] = tables[section][key], value
    with pytest.raises(trainer.ConfigError, match=rf"{section}.{key} = {value}: .*step-00000001 was made with {was}"):
        list(trainer.train(tables, resume=True))


def test_other_settings_may_change_when_a_run_resumes(tmp_path):
    """They are then what the file says, and not what the checkpoint says of its optimizer."""
    folder = dict(folder=str(tmp_path), every=1)
    facts(checkpoints=folder, steps=1)
    started = trainer.start(config(weight_decay=0.5, lr=0.02))
    trainer.load(started, tmp_path / "step-00000001")
    trainer.train_step(started, trainer.batch(started), lr=0.02)
    assert {(group["weight_decay"], group["lr"]) for group in started.optimizer.param_groups} == {(0.5, 0.02)}


def test_a_text_that_is_none_is_named(tmp_path):
    tables = config()
    tables.data["text"] = str(tmp_path / "text")
    for content, said in ((b"", "data.length = 8: the text has only 0 tokens"), (b"h\xe9", "data.text = .*utf-8")):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(trainer.ConfigError, match=said):
            trainer.read_tokens(tables)


def test_each_time_round_draws_every_sequence_once():
    tokens = torch.arange(41)
    drawn = [trainer.sequence(tokens, 8, 0, position) for position in range(10)]
    for turn in (drawn[:5], drawn[5:]):
        assert sorted(int(its[0]) for its in turn) == [0, 8, 16, 24, 32]
    assert all(torch.equal(its, torch.arange(9) + its[0]) for its in drawn)
    assert [int(its[0]) for its in drawn[:5]] != [int(its[0]) for its in drawn[5:]]


# Settings


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_the_files_are_read(path):
    assert trainer.read(path, []).moe.type == "mega_moe"


@pytest.mark.parametrize(
    "change, said",
    [
        ("train.stpes=3", "unknown key train.stpes: [train] takes steps, lr"),
        ("trian.steps=3", "unknown key trian: the file takes model, moe"),
        ("train.steps=3.5", "train.steps = 3.5: it must be of type int"),
        ("train.deterministic=1", "train.deterministic = 1: it must be of type bool"),
        ("train.clip=-1.0", "train.clip = -1.0: it must be above 0"),
        ("train.lr=nan", "train.lr = nan: it must be at least 0"),
        ("train.log_every=0", "train.log_every = 0: it must be above 0"),
        ("parallel.ep=-1", "parallel.ep = -1: it must be above 0"),
        ("moe.type=tort", "moe.type = 'tort': it must be one of 'mega_moe', 'torch'"),
        ("train.activation_checkpointing=some", "one of 'full', 'all but the experts', 'none'"),
        (
            'bench.activation_checkpointing=["full", "some"]',
            "'some']: it must be one of 'full', 'all but the experts', ",
        ),
        ("moe.precision=fp4", "moe.precision = 'fp4': it must be one of '', 'fp8', 'fp8_bwd', 'mxfp8'"),
        ('bench.moe=[{stages="mega"}]', "unknown key moe.stages: [moe] takes type, stage, save"),
    ],
)
def test_what_is_not_known_is_named(change, said):
    with pytest.raises(trainer.ConfigError) as caught:
        trainer.read(ROOT / "examples" / "tiny.toml", [change])
    assert said in str(caught.value)


def test_a_change_to_what_is_no_table_is_named(tmp_path):
    (tmp_path / "settings.toml").write_text("moe = 3")
    with pytest.raises(trainer.ConfigError, match="moe must be a table, not 3"):
        trainer.read(tmp_path / "settings.toml", ["moe.stage=mega"])


def test_a_change_is_read_as_toml():
    changes = ["train.lr=1", "moe.stage=mega", "data.text=some file", "train.deterministic=true"]
    read = trainer.read(ROOT / "examples" / "tiny.toml", changes)
    assert (read.train.lr, read.moe.stage, read.data.text) == (1.0, "mega", "some file")
    assert read.train.deterministic is True
    assert trainer.SETTINGS["train"]["lr"] == 1e-3  # nobody writes into the defaults


@pytest.mark.parametrize(
    "section, key, value, said",
    [
        ("parallel", "ep", 3, "parallel.ep = 3: it must divide 1 ranks"),
        ("data", "length", 10**7, "data.length = 10000000: the text has only"),
        ("model", "vocab_size", 100, "model.vocab_size = 100: the text holds token"),
        ("model", "num_experts_per_tok", 5, "model.num_experts_per_tok = 5: there are 4 experts"),
        ("model", "num_key_value_heads", 3, "model.num_key_value_heads = 3: 2 heads cannot share them evenly"),
        ("data", "tokenizer", "/nowhere", "data.tokenizer = '/nowhere': "),
    ],
)
def test_what_does_not_fit_is_named(section, key, value, said):
    tables = config()
    tables[section][key] = value
    with pytest.raises(trainer.ConfigError) as caught:
        trainer.start(tables)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "moe, what, said",
    [
        (dict(stage="eager"), "none", "moe.stage = 'eager': mega_moe has 'reference', 'grouped', "),
        (dict(stage="grouped", precision="fp8"), "none", "moe.type = 'mega_moe' has it with stage 'reference' or "),
        (
            dict(type="torch", precision="fp8"),
            "none",
            "moe.precision = 'fp8': moe.type = 'torch' has it with stage none",
        ),
        (dict(compile=True), "none", "moe.compile = true: it is for moe.type = 'torch'"),
        (dict(type="torch", compile=True), "all but the experts", "without parallel.ep and activation_checkpointing"),
    ],
)
def test_experts_that_there_are_not_are_named(moe, what, said):
    with pytest.raises(trainer.ConfigError) as caught:
        trainer.start(config(moe, activation_checkpointing=what))
    assert said in str(caught.value)


# What is told


def test_flops_are_those_of_the_products():
    """As torch counts them in a step. It counts other products for attention's scores, which are left out here."""
    tables = config(dict(type="torch", stage="eager"))
    started = trainer.start(tables)
    with FlopCounterMode(display=False) as counter:
        trainer.train_step(started, trainer.batch(started), 0.0)
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    tokens = tables.data.batch * tables.data.length
    scores = 3 * 2 * tables.model.num_attention_heads * tables.model.head_dim * tables.data.length
    assert counted == tokens * (trainer.flops_per_token(tables) - scores)


def test_load_of_experts():
    """Two layers of four experts: one even, one with all routes on one expert."""
    load = trainer.load_of_experts(torch.tensor([[2, 2, 2, 2], [0, 8, 0, 0]]))
    assert load == pytest.approx(dict(max_load=4.0, entropy=0.5, dead_experts=3))


@pytest.mark.parametrize("what", KEPT)
def test_the_time_of_a_step_is_shared_out(what, monkeypatch):
    """Two layers by a clock that moves only here: experts take 1 s forward and 2 s backward, attention 10 s and 20 s;
    what is made again takes its time again."""
    clock = [0.0]

    class Taking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t, seconds):
            clock[0], ctx.seconds = clock[0] + seconds, seconds
            return t.clone()

        @staticmethod
        def backward(ctx, dt):
            clock[0] += 2 * ctx.seconds
            return dt, None

    monkeypatch.setattr(trainer, "stamp", lambda: clock[0])
    tables = config(activation_checkpointing=what)
    tables.model["num_hidden_layers"] = 2
    started = trainer.start(tables)
    for layer in started.model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, heard: (Taking.apply(heard[0], 1.0), *heard[1:]))
        layer.self_attn.register_forward_hook(lambda *heard: (Taking.apply(heard[-1][0], 10.0), None))
    trainer.train_step(started, trainer.batch(started), 0.0)
    assert not started.watch.marks and started.watch.whose == ["rest"]

    started.watch.on, clock[0] = True, 0.0
    trainer.train_step(started, trainer.batch(started), 0.0)
    forwards = 1 if what == "none" else 2
    assert started.watch.seconds() == 2 * (forwards * 1.0 + 2.0)
    assert clock[0] == 11 * started.watch.seconds() and started.watch.whose == ["rest"]


def test_bench_from_the_command_line():
    """An object a round, of all rounds so far. At the same weights losses and norms differ by rounding, and times do
    not matter here."""
    moes = [dict(type="torch"), dict(type="torch", stage="grouped_mm", compile=True), dict(stage="persistent")]
    moes = [trainer.parse(moe, trainer.MOE) for moe in [*moes, dict(stage="persistent", precision="fp8")]]
    sizes = {**MODEL, "initializer_range": 0.2}
    changes = [f"model.{key}={value}" for key, value in sizes.items()]
    tables = ", ".join("{" + ", ".join(f"{key} = {json.dumps(its)}" for key, its in moe.items()) + "}" for moe in moes)
    changes += [f"data.text={TEXT}", "data.length=8", "data.batch=2", "bench.rounds=2", f"bench.moe=[{tables}]"]
    sets = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "examples/train.py", "examples/tiny.toml", "--bench", "--json", *sets]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    first, measured = map(json.loads, ran.stdout.splitlines())
    assert (first["rounds"], measured["rounds"]) == (1, 2)
    assert 1 <= measured["load"]["max_load"] <= 4
    for rows in (first["rows"], measured["rows"]):
        assert [row["moe"] for row in rows] == moes
        for row in rows:
            assert row["s_per_step"] > 0 and row["tokens_per_s_per_rank"] == pytest.approx(16 / row["s_per_step"])
            assert 0 < row["moe_share"] < 1 and row["activation_checkpointing"] == "full"
        *same, fp8 = rows
        assert all(row["loss_difference"] < 1e-5 and row["norm_difference"] < 1e-4 for row in same)
        assert 1e-4 < fp8["norm_difference"] < 0.1 and fp8["loss_difference"] < 0.05
    text = [line.split("  ")[0] for line in trainer.table(measured).splitlines()[2:]]
    names = ["torch", "torch grouped_mm compiled", "mega_moe persistent", "mega_moe persistent fp8"]
    assert [line.startswith(name) for line, name in zip(text, names, strict=True)] == [True] * 4
    if measured["machine"]["device"] == "CPU":
        assert all(row["mfu"] is row["peak_bytes"] is row["kept_bytes"] is None for row in measured["rows"])


def test_what_stands_side_by_side_unless_told():
    names = lambda tables, ways: [trainer.named(moe) for moe in trainer.implementations(tables, ways)]
    ours = ["mega_moe persistent", "mega_moe mega", "mega_moe persistent fp8", "mega_moe mega fp8"]
    theirs = ["torch eager", "torch grouped_mm", "torch grouped_mm compiled"]
    assert names(config(), ["full"]) == [*theirs, *ours]
    assert names(config(), ["none", "all but the experts"]) == [*theirs[:2], *ours]
    over_ranks = config(dict(save="inputs"), dict(ep=2))
    ours = ["mega_moe ranks inputs", "mega_moe mega inputs", "mega_moe mega fp8 inputs"]
    assert [name.removesuffix(" inputs") for name in names(over_ranks, ["full"])[:2]] == theirs[:2]
    assert names(over_ranks, ["full"])[2:] == ours


def test_bench_of_what_backward_makes_again():
    """Each way with each implementation: experts run as often as it says, and no bit changes."""
    tables = config(PLAIN, activation_checkpointing="full")
    moes = [trainer.parse(PLAIN | dict(save=save), trainer.MOE) for save in ("pre", "inputs")]
    tables["bench"].update(moe=moes, activation_checkpointing=list(KEPT), rounds=1)
    with Counted() as counted:
        (measured,) = trainer.bench(tables)
    assert counted.calls["mega_moe::forward"] == 2 * 2 * sum(KEPT.values())
    found = [(row["activation_checkpointing"], row["moe"]["save"]) for row in measured["rows"]]
    assert found == [(way, save) for way in KEPT for save in ("pre", "inputs")]
    assert all(row["loss_difference"] == row["norm_difference"] == 0 for row in measured["rows"])
    assert "mega_moe reference inputs, all but the experts" in trainer.table(measured)


def test_bench_after_some_steps_is_of_the_model_that_they_leave():
    """A turn that does not count, and one that does, both at a rate of 0."""
    tables = config(warmup=3)
    tables["bench"].update(moe=[trainer.parse(PLAIN, trainer.MOE)], after=3, rounds=1)
    (measured,) = trainer.bench(tables)
    leave()
    started = trainer.start(config(warmup=3))
    for lr in [trainer.rate(tables, step) for step in range(3)] + [0.0, 0.0]:
        loss, *_ = trainer.train_step(started, trainer.batch(started), lr)
    assert float(loss) == measured["rows"][0]["loss"]
