"""The check of a node, run as a user runs it, and what it says of results that are wrong."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import on_cpu
from forked import no_fork_warning, on_ranks

from mega_moe.parity import OUTPUTS
from mega_moe.processes import SHARED_GPU
from mega_moe.ranks_check import layers, right
from mega_moe.ranks_check.__main__ import PARTS, device_of, main, shapes_of, wanted_of
from mega_moe.ranks_check.layers import Judge, Whole, by_one_process, draw, which_differ
from mega_moe.ranks_check.parts import Check, Node
from mega_moe.ranks_check.times import ALONE, OTHERS, exchange, medians
from mega_moe.shapes import Problem

pytestmark = [on_cpu, no_fork_warning]  # on a GPU it is the program itself that is run

CHECKOUT = Path(__file__).parent.parent.parent
SHAPE = "2,32,32,2,2"
FASTER = """
import os
if "LOCAL_RANK" in os.environ:  # a rank, not what starts them
    import interpreter
    interpreter.install()
    interpreter.wait_politely()
"""
"""What each rank does first: kernels compute the same, in half of the time, and who waits leaves its core to others."""
WAYS = ["ranks, all_to_all", "ranks, heaps", "mega, heaps"]


def test_the_whole_program_on_a_cpu(tmp_path):
    """Two processes, as torchrun starts them."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program += ["-m", "mega_moe.ranks_check", "--shape", SHAPE, "--quick", "--json", str(tmp_path / "node.json")]
    (tmp_path / "sitecustomize.py").write_text(FASTER)  # Python imports it first
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "tests", tmp_path)))}
    ended = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("passed: all 7 parts\n")

    report = json.loads((tmp_path / "node.json").read_text())
    assert report["passed"] and report["ranks"] == 2
    assert report["shapes"] == {SHAPE: dict(T=2, H=32, I=32, E=2, K=2)}
    parts = {part["name"].partition(" ")[0]: part for part in report["parts"]}
    assert list(parts) == ["machine", "parity", "stress", "failing", "times", "trace", "predicted"]
    assert all(part["passed"] and part["failure"] is None and part["seconds"] > 0 for part in parts.values())
    assert parts["machine"]["facts"]["heaps"] == "made"

    tried = parts["parity"]["facts"]
    assert [layer["tokens_per_rank"] for layer in tried.values()] == [[2, 5], [0, 6], [2, 2]]
    for layer in tried.values():
        assert layer["differing"] == {way: {} for way in WAYS}
        assert list(layer["one_process"]) == list(OUTPUTS)
        assert all(share <= 1 for share in layer["one_process"].values())
    stress = parts["stress"]["facts"]
    assert stress["calls"] == 1 and stress["against"] == "ranks" and not any(stress["differing"].values())

    failing = parts["failing"]["facts"]
    assert failing["seconds"] < failing["timeout_s"] + 5
    assert all(said.startswith("rank 0 waited in vain for rank 1 at call 3 (2 of 3") for said in failing["raised"])

    rows = {row["name"]: row for row in parts["times"]["facts"]["rows"]}
    assert list(rows) == [*OTHERS, *WAYS, "mega, heaps, pre kept", ALONE]
    for name, row in rows.items():
        assert row["failure"] is None and min(row["ms"].values()) > 0
        assert list(row["ms"]) == ["forward", "backward", "2 x forward + backward"]
        assert set(row["off"]) <= set(OUTPUTS) if name in OTHERS else not row["off"]
    exchanged = parts["times"]["facts"]["exchange"]
    assert exchanged["backward"]["bytes"] > exchanged["forward"]["bytes"] > 0
    for direction, trace in parts["trace"]["facts"].items():
        assert trace["direction"] == direction and trace["problem"]["W"] == 2 and trace["tiles"] > 0
        assert sum(trace["shares"].values()) == pytest.approx(1)
    predicted = parts["predicted"]["facts"][SHAPE]
    told = [facts for directions in predicted.values() for facts in directions.values()]
    assert len(told) == 4 and all(facts["predicted_ms"] >= max(facts["products"], facts["links"]) > 0 for facts in told)
    assert all(facts["bound"] and facts["measured_ms"] is None and "published_ms" not in facts for facts in told)


# What is wrong is found.


def whole(dtype: torch.dtype = torch.bfloat16) -> Whole:
    """A layer of two ranks."""
    return draw(Problem(0, H=32, I=32, E=2, K=2, dtype=dtype, device="cpu"), (2, 3), "masked")


def test_one_wrong_bit_is_seen_where_bits_must_agree():
    judge = Judge(whole(), "a layer")
    assert not judge.failures
    for name in OUTPUTS:
        got = {output: t.clone() for output, t in judge.whole.results_of(1, judge.alone).items()}
        assert judge.hold("right", 1, got, exact=True) == {} and not judge.failures
        bits = got[name].view(torch.int16 if got[name].element_size() == 2 else torch.int32)
        bits.flatten()[-1] ^= 1
        assert judge.hold("planted", 1, got, exact=True) == {name: None}
        assert judge.failures.pop() == f"planted: not the bits of one process in {name}"


def test_what_may_round_elsewhere_must_keep_the_budget():
    """A last bit is within it; another rank's part in the place of this one's is not."""
    judge = Judge(whole(), "a layer")
    got = {output: t.clone() for output, t in judge.whole.results_of(1, judge.alone).items()}
    got["dw_down"].view(torch.int16).flatten()[0] ^= 1
    shares = judge.hold("rounded", 1, got, exact=False)
    assert list(shares) == ["dw_down"] and 0 < shares["dw_down"] <= 1 and not judge.failures
    got["dw_down"] = judge.whole.results_of(0, judge.alone)["dw_down"]
    assert judge.hold("swapped", 1, got, exact=False)["dw_down"] > 1
    assert "swapped: over the parity budget: {'dw_down'" in judge.failures.pop()


def test_one_process_is_judged_too(monkeypatch):
    wrong = lambda inputs, dy: {name: t * 1.1 for name, t in by_one_process(inputs, dy).items()}
    monkeypatch.setattr(layers, "by_one_process", wrong)
    (failure,) = Judge(whole(), "a layer").failures
    assert failure.startswith("a layer: one process is over its parity budget") and "'dx'" in failure


def test_every_rank_must_hear_who_stayed_away():
    heard = "rank 0 waited in vain for rank 2 at call 3"
    assert right.who_did_not_hear([heard, heard, heard], 2) == []
    assert right.who_did_not_hear([heard, None, heard], 2) == [1]
    assert right.who_did_not_hear([heard, heard, "CUDA error"], 2) == [2]
    assert right.who_did_not_hear([heard.replace("rank 2", "rank 21"), heard, None], 2) == [0, 2]


def test_differences_are_counted_by_output():
    results = {name: torch.zeros(3) for name in OUTPUTS}
    other = results | {"dx": torch.tensor([0.0, -0.0, 0.0])}
    assert which_differ(results, other).tolist() == [0, 1, 0, 0, 0]


# A part ends on all ranks, however it goes on one.


def test_a_part_that_fails_on_one_rank_fails_on_all_and_the_next_begins(tmp_path):
    def work(rank: int) -> list:
        hosts = dist.new_group(backend="gloo")
        node = Node(rank, 2, torch.device("cpu"), hosts)
        check = Check(node, 60, tmp_path / "build" / "report.json", dict(ranks=2))

        def fails(group: dist.ProcessGroup) -> tuple[str, dict]:
            if rank == 1:
                raise ValueError("planted")
            node.meet()
            node.meet()
            return "went well here", {}

        def passes(group: dist.ProcessGroup) -> tuple[str, dict]:
            return f"{group.size()} ranks", dict(ranks=node.gather(rank))

        first, second = check.part("first", 30, fails), check.part("second", 30, passes)
        check.ends = time.monotonic()
        third = check.part("third", 30, passes)
        return [vars(part) | {"seconds": None} for part in (first, second, third)] + [check.passed]

    zero, one = on_ranks(2, work, tmp_path)
    assert zero == one
    first, second, third, passed = zero
    assert not passed and not first["passed"] and first["failure"] == "rank 1: ValueError: planted"
    assert first["line"] == ""
    assert second["passed"] and second["line"] == "2 ranks" and second["facts"] == dict(ranks=[0, 1])
    assert not third["passed"] and third["failure"] == "not run: no time was left for it"
    report = json.loads((tmp_path / "build" / "report.json").read_text())
    assert report["passed"] is False and [part["name"] for part in report["parts"]] == ["first", "second", "third"]


def test_what_hangs_is_ended_and_the_report_says_so(tmp_path):
    program = f"""
import time, torch, torch.distributed as dist
from pathlib import Path
from mega_moe.ranks_check.parts import Check, Node
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
check = Check(Node(0, 1, torch.device("cpu"), dist.new_group()), 60, Path({str(tmp_path / "report.json")!r}), {{}})
check.part("hangs", 1, lambda group: time.sleep(60))
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "Timeout" in ended.stderr
    (part,) = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert not part["passed"] and "did not end" in part["failure"]


# Numbers.


def test_what_travels_in_each_direction():
    """Rank 0 sends 3 rows to rank 1 and gets 1, and keeps 5: forward carries 4 rows each way. Backward brings rank 1
    three rows of dy, three of x and one of dx back."""
    problem = Problem(4, H=10, I=1, E=2, K=2, dtype=torch.bfloat16)
    ms = {"mega, heaps": dict(forward=5.0, backward=9.0), ALONE: dict(forward=4.5, backward=9.5)}
    found = exchange(problem, torch.tensor([[5, 3], [1, 7]]), ms, rate=80e3)
    assert found["forward"]["bytes"] == 4 * 20 and found["backward"]["bytes"] == 7 * 20
    assert found["forward"]["links_ms"] == pytest.approx(1.0) and found["forward"]["shown_ms"] == pytest.approx(0.5)
    assert found["forward"]["hidden"] == pytest.approx(0.5) and found["backward"]["hidden"] == 1
    assert found["forward"]["gb_per_s"] == pytest.approx(80 / 5e-3 / 1e9)
    assert exchange(problem, torch.tensor([[8]]), ms, None)["forward"]["hidden"] is None


def test_a_whole_layer_counts_the_rows_between_its_ranks():
    problem, routes = Problem(0, H=32, I=32, E=4, K=2, device="cpu"), [[0, 3], [-1, 1], [2, 2]]
    made = draw(problem, (2, 1))
    made.inputs.topk_ids.copy_(torch.tensor(routes))
    assert made.rows().tolist() == [[2, 1], [0, 2]]


def test_medians_of_laps():
    ms, spread = medians(torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 60.0]]) * 1e-3)
    assert ms == pytest.approx({"forward": 2, "backward": 20, "2 x forward + backward": 24})
    assert spread["forward"] == pytest.approx(0.5)


def test_tokens_of_ranks():
    assert right.uneven(300, 4) == (75, 150, 225, 300)
    assert right.without_first(300, 4) == (0, 150, 225, 300) and right.without_first(300, 1) == (300,)


@pytest.mark.parametrize("shape", ["qwen", "1,2,3", "4,32,32,3,2", "0,32,32,2,2"])
def test_shapes_that_cannot_be_shared_are_refused(shape):
    with pytest.raises(ValueError, match=f"--shape {shape}"):
        shapes_of([shape], 2)


def test_without_torchrun_it_says_how_to_start_it(monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert main([]) == 2 and "torchrun" in capsys.readouterr().err


def test_a_part_that_cannot_run_is_refused_where_it_was_asked_for():
    """What runs nothing must not pass. Unasked, a part that cannot run is left out."""
    for part, W, on_gpu, reason in (
        ("failing", 1, True, "--part failing: it needs --nproc-per-node=2"),
        ("groups", 3, True, "--part groups: it needs --nproc-per-node=4"),
        ("graph", 2, False, "--part graph: it captures a CUDA graph"),
    ):
        with pytest.raises(ValueError, match=reason):
            wanted_of(["parity", part], W, on_gpu)
        assert part not in wanted_of(None, W, on_gpu)
    assert wanted_of(["failing"], 2, False) == {"failing"} and wanted_of(None, 4, True) == set(PARTS)


def test_more_ranks_than_gpus_are_told_what_works_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(SHARED_GPU, raising=False)
    with pytest.raises(ValueError, match=f"4 processes and 2 GPUs here: give --nproc-per-node=2; .* {SHARED_GPU}=1"):
        device_of(0, 4)
