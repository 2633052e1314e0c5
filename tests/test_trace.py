"""Traces: every tile is stamped, where and when it says, and a launch that nobody traces knows nothing of it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("triton")  # what is traced are kernels
from cases import DEVICE, on_cpu, poisoned, reroute, same_bits

from mega_moe import trace as module
from mega_moe.kernels import clock, mega
from mega_moe.kernels.schedule import Schedule
from mega_moe.ladder import Layer
from mega_moe.roofline import DIRECTIONS
from mega_moe.samples import random_inputs
from mega_moe.schedule import ARRIVALS, KIND, KINDS, RANK
from mega_moe.shapes import SAVES, Grads, Problem
from mega_moe.stages.s6_mega import LAUNCHES
from mega_moe.symmetric import LocalHeaps
from mega_moe.timeline import STEPS
from mega_moe.trace import Span, Trace, read, trace

pytestmark = pytest.mark.skipif(
    bool(module.why_not(Problem(5, 16, 24, 3, 2, device=DEVICE))), reason="kernels cannot be traced here"
)

ROOT = Path(__file__).parents[1]
UNSTAMPED = -1

every_direction = pytest.mark.parametrize("direction", DIRECTIONS)


def layer_to_trace(save: str = "pre", precision: str = "bf16") -> Layer:
    """More than one tile of each kind, an expert without rows, and a masked route."""
    problem = Problem(T=40, H=66, I=40, E=4, K=2, device=DEVICE, save=save, precision=precision)
    inputs, dy = random_inputs(problem)
    ids = reroute(inputs.topk_ids, "empty", problem.E).clone()
    ids[7, 1] = -1
    return Layer(problem, replace(inputs, topk_ids=ids), dy, "balanced")


def rows_of(made: Schedule, words: torch.Tensor, programs: int) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """The tiles, and the words of each program and of each ticket."""
    return made.table[: int(made.counters[1])].tolist(), *clock.rows_of(words.cpu(), programs)


# What kernels note.


@every_direction
@pytest.mark.parametrize("save", SAVES)
def test_every_tile_is_stamped_and_no_other_word_written(direction, save):
    tiles, of_program, of_ticket = rows_of(*module.launch(layer_to_trace(save), direction))
    assert len(of_ticket) > len(tiles) and (of_ticket[len(tiles) :] == UNSTAMPED).all()
    assert (of_program[:, : clock.PROCESSOR.value] >= 0).all()
    taken, start, end, program = of_ticket[: len(tiles)].unbind(1)
    assert ((program >= 0) & (program < len(of_program))).all()
    for n, tile in enumerate(tiles):
        assert 0 <= taken[n] < end[n], tile
        if tile[ARRIVALS]:
            assert taken[n] <= start[n] <= end[n], tile
        if KINDS[tile[KIND]] == "gate_up":
            assert start[n] == UNSTAMPED
    kinds = {"gate_up", "down", "combine"}
    if direction == "backward":
        kinds = {"dact", "dx", "dw_gate_up", "dw_down", "combine"} | ({"gate_up"} if save == "inputs" else set())
    assert {KINDS[tile[KIND]] for tile in tiles} == kinds


@every_direction
def test_a_program_does_one_tile_after_another_between_its_entry_and_its_exit(direction):
    tiles, of_program, of_ticket = rows_of(*module.launch(layer_to_trace(), direction))
    for number, (timer_in, cycle_in, timer_out, cycle_out, _) in enumerate(of_program.tolist()):
        mine = sorted(words for words in of_ticket[: len(tiles)].tolist() if words[clock.PROGRAM.value] == number)
        times = [cycle_in, *(words[n] for words in mine for n in (clock.TAKEN.value, clock.END.value)), cycle_out]
        assert times == sorted(times) and timer_in <= timer_out


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_over_ranks_the_tiles_of_all_ranks_are_stamped(direction):
    layer = layer_to_trace()
    heaps = LocalHeaps(2, 24)
    problem = layer.problem.at(heap=heaps.key, tokens_per_rank=(16, 24))
    traced = trace(replace(layer, problem=problem, heaps=heaps), direction)
    assert {tile[RANK] for tile in traced.table} == {0, 1}
    assert sum(tile[KIND] == KINDS.index("dispatch") for tile in traced.table) > 1
    assert all(span.taken <= span.start <= span.end for span in traced.spans) and len(traced.spans) == len(traced.table)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_to_trace_changes_no_bit_of_any_result(monkeypatch, precision, save):
    def results_of(traced: bool) -> list[torch.Tensor]:
        """y, pre and the gradients, of one forward and one backward."""
        results = []

        def keeping(launcher):
            def launch(*arguments, trace):
                results.append(launcher(*arguments, trace=trace if traced else None))
                return results[-1]

            return launch

        with monkeypatch.context() as patch, poisoned():
            both = [
                of._replace(forward=keeping(of.forward), backward=keeping(of.backward)) for of in LAUNCHES[precision]
            ]
            patch.setitem(LAUNCHES, precision, both)
            for direction in DIRECTIONS:
                module.launch(layer_to_trace(save, precision), direction)
        tensors = [result.tensors() if isinstance(result, Grads) else result for result in results]
        return [tensor for several in tensors for tensor in several if tensor is not None]

    traced, plain = results_of(True), results_of(False)
    assert len(traced) == len(plain) == 2 + 2 * (save == "pre") + 4
    assert all(map(same_bits, traced, plain))


@on_cpu
@every_direction
@pytest.mark.parametrize("save", SAVES)
def test_the_stamps_stand_around_the_wait_and_around_the_work(monkeypatch, direction, save):
    """Interpreted time passes only where a tile ends. Here every wait also takes 7, and every tile's work 3."""
    clocks, empty_trace = [], clock.empty_trace

    def kept(*arguments):
        clocks.append(empty_trace(*arguments))
        return clocks[-1]

    def takes(function, time, when=lambda *arguments: True):
        def slow(*arguments):
            if clocks and when(*arguments):
                clocks[0][0] += time
            return function(*arguments)

        return slow

    monkeypatch.setattr(clock, "empty_trace", kept)
    monkeypatch.setattr(mega, "wait", takes(mega.wait, 7, when=lambda counter, arrivals, fence: bool(arrivals > 0)))
    for name in ("gate_up_strip", "slot_gemm_strip", "dact_strip", "weight_grad_tile", "combine_tile"):
        monkeypatch.setattr(mega, name, takes(getattr(mega, name), 3))
    traced = trace(layer_to_trace(save), direction)
    for span in traced.spans:
        tile = traced.table[span.tile]
        assert (span.start - span.taken, span.end - span.start) == (7 if tile[ARRIVALS] else 0, 3 + 1), tile
    assert traced.shares()["between"] == 0


# What is made of it.


def test_each_processors_cycles_become_the_same_microseconds():
    """Processor 9 counts two cycles a nanosecond, processor 4 three in two; the first enters 100 ns before the second.
    And what is stamped as START of a tile that waits for nothing does not count."""
    now = 10**18  # about what a global timer shows: more than a float64 holds exactly
    words = torch.tensor(
        [0]
        + [now, 5000, now + 50_000, 105_000, 9]
        + [now + 100, 10**15, now + 20_100, 10**15 + 30_000, 4]
        + [5000 + 2000, UNSTAMPED, 5000 + 20_000, 0]
        + [10**15 + 300, 10**15 + 600, 10**15 + 29_700, 1]
        + [5000 + 20_200, 5000 + 20_400, 5000 + 90_000, 0]
        + [UNSTAMPED] * 4
    )
    table = [[1, 0, 0, 0, 0, 1, 0, arrivals] for arrivals in (0, 2, 0)]
    lanes, spans = read(words, table, 2, "cuda")
    assert lanes == ["SM 4", "SM 9"]
    expected = [(1, 0, 1.0, 1.0, 10.0), (0, 1, 0.3, 0.5, 19.9), (1, 2, 10.1, 10.1, 45.0)]
    for span, (lane, tile, *times) in zip(spans, expected, strict=True):
        assert (span.lane, span.tile) == (lane, tile)
        assert (span.taken, span.start, span.end) == pytest.approx(times, abs=1e-9)


def test_programs_that_share_a_processor_have_lanes_of_their_own():
    words = torch.tensor([2, *(word for sm in (7, 3, 7) for word in (0, 0, 2, 2, sm)), 0, 0, 1, 2, 1, 1, 2, 0])
    lanes, spans = read(words, [[1, 0, 0, 0, 0, 1, 0, 0]] * 2, 3, "cuda")
    assert lanes == ["SM 3", "SM 7 · 1", "SM 7 · 2"] and [span.lane for span in spans] == [2, 1]


def tile(kind: str, rank: int = 0, expert: int = 0, arrivals: int = 0) -> list[int]:
    return [KINDS.index(kind), rank, expert, 0, 0, 1, 0, arrivals]


def hand_made() -> Trace:
    """Two ranks on three lanes, of which the last has nothing to do.

    lane 0   0-4 gate_up         5-8 down        8-10 combine
    lane 1   1-3 dispatch   3-6 waits, 6-8 down
    """
    table = [tile("dispatch", 1, 2), tile("gate_up"), tile("down"), tile("down", 1, 2, 1), tile("combine", 0, 0, 2)]
    spans = [Span(1, 0, 1, 1, 3), Span(0, 1, 0, 0, 4), Span(0, 2, 5, 5, 8), Span(1, 3, 3, 6, 8), Span(0, 4, 8, 8, 10)]
    facts = dict(T=4, H=16, I=24, E=4, K=1, W=2, dtype="bf16", routing="balanced", save="pre", precision=None)
    return Trace({"device": "by hand"}, facts, "forward", "µs", table, ["SM 0", "SM 1", "SM 2"], spans)


def test_the_shares_add_up():
    traced = hand_made()
    assert traced.total == 10
    shares = {name: round(share * 30, 9) for name, share in traced.shares().items()}
    assert shares == dict(busy=2 + 4 + 3 + 2 + 2, waiting=3, between=1 + 1, tail=2 + 10)
    assert sum(traced.shares().values()) == pytest.approx(1)
    kinds = traced.kinds()
    assert list(kinds) == ["dispatch", "gate_up", "down", "combine"]
    assert kinds["down"] == dict(tiles=2, median=2.5, longest=3, busy=5 / 30, waiting=3 / 30)
    assert sum(of["busy"] for of in kinds.values()) == pytest.approx(traced.shares()["busy"])
    assert sum(of["waiting"] for of in kinds.values()) == pytest.approx(traced.shares()["waiting"])


def test_steps_overlap_while_two_are_at_work():
    """dispatch with gate_up from 1 to 3; two downs are one step, and combine begins where they end."""
    traced = hand_made()
    assert traced.overlap() == pytest.approx(2 / 10)
    assert traced.hidden() == pytest.approx(2 / 4)
    alone = replace(traced, table=[tile("down"), tile("down")], spans=[Span(0, 0, 0, 0, 2), Span(1, 1, 0, 1, 2)])
    assert alone.overlap() == 0 and alone.hidden() is None


@every_direction
def test_a_real_trace_adds_up_too(direction):
    traced = trace(layer_to_trace(), direction)
    assert sum(traced.shares().values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in traced.shares().values())
    assert [span.tile for span in traced.spans] == list(range(len(traced.table)))
    for lane in range(len(traced.lanes)):
        mine = sorted((span for span in traced.spans if span.lane == lane), key=lambda span: span.taken)
        assert all(one.end <= other.taken for one, other in pairwise(mine))
    assert traced.total == max(span.end for span in traced.spans)
    if DEVICE == "cpu":
        assert traced.total == len(traced.table) and traced.overlap() == 0
    else:
        assert 0 < traced.total < 1e6


# Files.


@pytest.mark.parametrize("made", [hand_made, lambda: trace(layer_to_trace(), "backward")], ids=["by hand", "backward"])
def test_perfetto_finds_what_its_format_demands(made):
    traced = made()
    written = json.loads(json.dumps(traced.as_perfetto(), allow_nan=False))
    assert list(written) == ["displayTimeUnit", "otherData", "traceEvents"] and written["displayTimeUnit"] == "ns"
    assert written["otherData"]["unit"] == traced.unit and written["otherData"]["lanes"] == len(traced.lanes)
    threads, named, bars = set(), {}, []
    for event in written["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["name"], str) and isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            named[event["name"], event["pid"], event.get("tid")] = event["args"]
            continue
        assert event["ph"] == "X" and isinstance(event["tid"], int) and isinstance(event["cat"], str)
        assert all(isinstance(event[time], float | int) and event[time] >= 0 for time in ("ts", "dur"))
        threads.add((event["pid"], event["tid"]))
        bars.append(event)
    for rank, lane in threads:
        assert named["process_name", rank, None] == {"name": f"rank {rank}"}
        assert named["thread_name", rank, lane] == {"name": traced.lanes[lane]}

    work = [bar for bar in bars if bar["name"] != "waiting"]
    assert [bar["args"]["ticket"] for bar in work] == list(range(len(traced.table)))
    for bar, span in zip(work, traced.spans, strict=True):
        tile = traced.table[span.tile]
        assert bar["name"] == bar["args"]["kind"] == KINDS[tile[KIND]] and bar["cat"] in STEPS
        assert (bar["pid"], bar["tid"], bar["ts"]) == (tile[RANK], span.lane, span.start)
        assert bar["ts"] + bar["dur"] == pytest.approx(span.end)
    waits = [span for span in traced.spans if span.start > span.taken]
    assert len(bars) - len(work) == len(waits)


@pytest.mark.parametrize("made", [hand_made, lambda: trace(layer_to_trace(), "backward")], ids=["by hand", "backward"])
def test_a_written_trace_can_be_read_again(made):
    traced = made()
    again = Trace.from_perfetto(json.loads(json.dumps(traced.as_perfetto())))
    facts = lambda of: (of.machine, of.problem, of.direction, of.unit, of.table)
    assert facts(again) == facts(traced)
    busy = {span.lane for span in traced.spans}
    assert again.lanes == [name if lane in busy else "" for lane, name in enumerate(traced.lanes)]
    for written, span in zip(again.spans, traced.spans, strict=True):
        assert replace(written, end=span.end) == span and written.end == pytest.approx(span.end)
    assert again.as_text() == traced.as_text()


@pytest.mark.parametrize("made", [hand_made, lambda: trace(layer_to_trace(), "forward")], ids=["by hand", "forward"])
def test_the_timeline_has_a_bar_for_every_tile_and_a_lane_for_every_program(made):
    traced = made()
    root = ElementTree.fromstring(traced.as_svg())
    svg = "{http://www.w3.org/2000/svg}"
    boxes = {path.get("class") or path.get("fill"): path.get("d").count("M") for path in root.iter(f"{svg}path")}
    assert boxes.pop("lane") == len(traced.lanes)
    assert boxes.pop("url(#waiting)", 0) == sum(span.start > span.taken for span in traced.spans)
    assert set(boxes) <= set(STEPS) and sum(boxes.values()) == len(traced.table)
    assert traced.outcome() in root.findtext(f"{svg}desc")
    named = [text.text for text in root.iter(f"{svg}text") if text.text in traced.lanes]
    assert named == [lane for lane in traced.lanes if lane in named] and named[0] == traced.lanes[0]
    assert named == traced.lanes or len(named) >= 12  # where there are many lanes, some are named


# What cannot be traced, and what is not traced.


@pytest.mark.parametrize("problem", [Problem(0, 16, 24, 3, 2, device=DEVICE)], ids=["no tokens"])
def test_without_tokens_it_says_so(problem):
    with pytest.raises(ValueError, match="without tokens there is nothing to trace"):
        trace(Layer(problem, *random_inputs(problem), "balanced"), "forward")


def test_a_gpu_with_other_clocks_is_refused_before_anything_is_launched(monkeypatch):
    monkeypatch.setattr(clock, "target", lambda: "gfx942")
    monkeypatch.setattr(module, "launch", lambda *arguments: pytest.fail("it was launched"))
    with pytest.raises(ValueError, match="reads NVIDIA's clocks, and gfx942 has others: use an NVIDIA GPU"):
        trace(layer_to_trace(), "forward")
    with pytest.raises(ValueError, match="direction must be one of forward, backward, not 'up'"):
        trace(layer_to_trace(), "up")


COMPILE = """
import torch
from tests.kernels.cross_compile import LAYERS, Pretended, meta_inputs, recorder
from mega_moe.kernels import blocks, mega
from mega_moe.kernels.schedule import forward_work, plan_and_schedule
from triton.runtime import driver
from triton.runtime.jit import JITFunction

driver.set_active(Pretended("sm_90"))
run, launched = JITFunction.run, []
JITFunction.run = recorder(launched, rare=False, over="nothing")
problem = LAYERS["one"].at(device="meta")
inputs, tiles = meta_inputs(problem), blocks.mega_for(problem)
plan, tickets = plan_and_schedule(inputs.topk_ids, problem.E, forward_work(problem, tiles))
for trace in (None, torch.empty(100, dtype=torch.int64, device="meta")):
    mega.mega_forward(problem, inputs, plan, tickets, tiles, trace=trace)
JITFunction.run = run
for form in launched[1:]:
    ptx = form.kernel.warmup(*form.args, grid=(1,), **form.kwargs).asm["ptx"]
    print(*(ptx.count(word) for word in ("%clock64", "%globaltimer", "%smid", "st.global.b64")))
"""


@on_cpu
def test_a_launch_that_is_not_traced_has_no_clock_in_its_code(tmp_path):
    """Compiled for sm_90. With a trace: taken, end, and start behind two waits; a pair of clocks at either end, each
    read once before the loop that waits for the jump, and in it."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET")
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 0 0 0", "6 4 1 10"]
