"""What only a GPU can show: no waiting, graphs, streams, devices, threads, memory, and what is compiled when."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch.nn.functional as F
from cases import DEVICE, DIFFERENTIABLE, able, assert_same, bits, layer, on_gpu, run, same_bits, tensors, train
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mega_moe import LADDER, LocalHeaps, moe
from mega_moe.parity import OUTPUTS
from mega_moe.registry import DEFAULT_OVER_RANKS, Rung, stage
from mega_moe.samples import ROUTINGS, random_inputs
from mega_moe.shapes import SAVES, Grads, Problem

pytestmark = on_gpu

SIZES = dict(T=96, H=64, I=48, E=8, K=2)
LARGER = dict(H=512, I=256, E=16, K=4)  # one layer for all that takes many tiles, so that it is compiled once


# The host never waits.


def test_nothing_waits_for_the_device(fused):
    _, inputs, dy = layer(**SIZES)
    train(fused, inputs, dy)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        train(fused, inputs, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Captured:
    """One layer, forward and backward, as a CUDA graph over memory of its own."""

    def __init__(self, rung, inputs, dy, pool=None, **options):
        self.inputs = replace(inputs, **{name: t.clone() for name, t in vars(inputs).items()})
        self.dy = dy.clone()
        leaves = {name: getattr(self.inputs, name).detach().requires_grad_() for name in DIFFERENTIABLE}

        def both_directions():
            y = moe(topk_ids=self.inputs.topk_ids, **leaves, stage=rung.name, **options)
            return y.detach(), Grads(*torch.autograd.grad(y, list(leaves.values()), self.dy))

        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            both_directions()
        torch.cuda.current_stream().wait_stream(warm_up)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.result = both_directions()

    def replay(self, inputs, dy):
        """The graph on other values."""
        for name, t in vars(inputs).items():
            getattr(self.inputs, name).copy_(t)
        self.dy.copy_(dy)
        self.graph.replay()
        return self.result


@pytest.mark.parametrize("save", SAVES)
def test_a_captured_layer_replays_with_other_routings(save, fused):
    captured = Captured(fused, *layer(**SIZES)[1:], save=save)
    hot = torch.zeros(96, 2, dtype=torch.int64)
    masked = torch.full((96, 2), -1)
    masked[5, 1] = 7
    for seed, ids in enumerate([None, hot, masked, None]):
        _, inputs, dy = layer(**SIZES, seed=seed)
        if ids is not None:
            inputs = replace(inputs, topk_ids=ids.to(inputs.x.device))
        assert_same(captured.replay(inputs, dy), train(fused, inputs, dy))


def test_two_captured_layers_share_a_pool(fused):
    """A graph remembers the addresses of its scratch: another one's must not lie there while it still counts."""
    first = Captured(fused, *layer(**SIZES)[1:])
    second = Captured(fused, *layer(**SIZES)[1:], pool=first.graph.pool())
    for seed in range(3):
        for captured in (first, second):
            _, inputs, dy = layer(**SIZES, seed=seed)
            assert_same(captured.replay(inputs, dy), train(fused, inputs, dy))


# The same bits, every time.


def test_a_thousand_runs_give_the_same_bits(fused):
    """Who draws which ticket, and which program comes first, differs from run to run, the more so while another stream
    keeps some of the processors busy."""
    problem, inputs, dy = layer(T=512, **LARGER)
    expected = run(fused, problem, inputs, dy)
    other, noise = torch.cuda.Stream(), torch.randn(1024, 1024, device=dy.device)
    differing = 0
    for _ in range(1000):
        with torch.cuda.stream(other):
            noise @ noise
        differing = differing + which_differ(run(fused, problem, inputs, dy), expected)
    assert not differing.any(), dict(zip(OUTPUTS, differing.tolist(), strict=True))


def which_differ(got: tuple[Tensor, Grads], expected: tuple[Tensor, Grads]) -> Tensor:
    """(5,) bool, on the device, of OUTPUTS: nobody waits to compare."""
    pairs = zip(tensors(got), tensors(expected), strict=True)
    return torch.stack([(bits(one) != bits(other)).any() for one, other in pairs])


# Over heaps.

OVER_RANKS = [rung.name for rung in LADDER if rung.over_ranks]
CALLS, TOKENS = 1000, 512


@pytest.fixture(params=OVER_RANKS)
def over_ranks(request) -> Rung:
    """A rung that takes heaps."""
    return able(stage(request.param))


def spreads(W: int) -> list[tuple[int, ...]]:
    """How many of up to TOKENS tokens each of W ranks holds, in eight ways: all that its heap takes, only one rank,
    only every second, nobody, and four times at random."""
    most = TOKENS // W
    even, alone, halves, none = [most] * W, [0] * (W - 1) + [most], [most, 0] * (W // 2), [0] * W
    anyhow = torch.randint(most + 1, (4, W), generator=torch.Generator().manual_seed(W)).tolist()
    return [tuple(spread) for spread in (even, alone, halves, none, *anyhow)]


def over_heaps(W: int, **options) -> tuple[Problem, dict]:
    """A layer of W ranks that hold unequally many tokens, the first of them none, and the options with which moe
    computes it over heaps."""
    spread = 0, *spreads(W)[-1][1:]
    problem = Problem(sum(spread), **LARGER, device=DEVICE)
    return problem, dict(save="pre", heap=LocalHeaps(W, TOKENS // W), tokens_per_rank=spread) | options


@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("name", OVER_RANKS[1:])
def test_a_thousand_calls_over_heaps_give_the_same_bits_by_one_launch_and_by_many(name, W):
    """From call to call change the tokens, how many of them each rank holds, where they go, the weights, and what is
    saved. Both rungs use the same heaps; now and then comes a forward more, so that it meets in either buffer."""
    ranks, one_launch = stage(OVER_RANKS[0]), able(stage(name))
    heap, ways, differing = LocalHeaps(W, TOKENS // W), spreads(W), 0
    for n in range(CALLS):
        spread, save, routing = ways[n % 8], SAVES[n // 8 % 2], ROUTINGS[n // 16 % 4]
        problem = Problem(sum(spread), **LARGER, device=DEVICE, save=save, heap=heap.key, tokens_per_rank=spread)
        inputs, dy = random_inputs(problem, routing, seed=n)
        if n % 3 == 0:
            inputs.topk_ids.flatten()[::5] = -1
        if n % 7 == 0:
            one_launch.forward(problem, inputs)
        differing = differing + which_differ(run(one_launch, problem, inputs, dy), run(ranks, problem, inputs, dy))
    assert not differing.any(), dict(zip(OUTPUTS, differing.tolist(), strict=True))


@pytest.mark.usefixtures("tiles_of_many_rows")
@pytest.mark.parametrize("save", SAVES)
def test_a_layer_captured_over_heaps_replays_with_other_routings(save, over_ranks):
    """Between replays the same heaps serve other calls, one of them an odd number of times: no call's number is the
    graph's."""
    problem, options = over_heaps(8, save=save)
    T, K, E = problem.T, problem.K, problem.E
    captured = Captured(over_ranks, *layer(T=T, **LARGER)[1:], **options)
    hot = torch.zeros(T, K, dtype=torch.int64)
    masked = torch.full((T, K), -1)
    masked[-1, -1] = E - 1
    for seed, ids in enumerate([None, hot, masked, None, None]):
        _, inputs, dy = layer(T=T, **LARGER, seed=seed)
        if ids is not None:
            inputs = replace(inputs, topk_ids=ids.to(inputs.x.device))
        expected = train(over_ranks, inputs, dy)  # without heaps
        assert_same(captured.replay(inputs, dy), expected)
        if seed % 2:
            y, _ = train(over_ranks, inputs, needs=(), **options)
            assert same_bits(y, expected[0])


def test_a_long_product_on_another_stream_neither_stops_ranks_nor_changes_them(over_ranks):
    """It holds any number of the processors while ranks meet and rows travel: nobody waits for a program that has not
    been started yet."""
    problem, options = over_heaps(8)
    problem = problem.at(heap=options["heap"].key, tokens_per_rank=options["tokens_per_rank"])
    inputs, dy = random_inputs(problem)
    expected, differing = run(over_ranks, problem, inputs, dy), 0
    other, noise = torch.cuda.Stream(), torch.randn(8192, 8192, dtype=torch.bfloat16, device=dy.device)
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(200):
        with torch.cuda.stream(other):  # milliseconds of products, for calls that take less
            for _ in range(3):
                noise @ noise
        differing = differing + which_differ(run(over_ranks, problem, inputs, dy), expected)
    assert not differing.any(), dict(zip(OUTPUTS, differing.tolist(), strict=True))


@pytest.mark.usefixtures("tiles_of_many_rows")
def test_twenty_layers_share_heaps(over_ranks):
    """Forward through all of them before backward through all: heaps hold nothing that backward needs. As residual
    blocks, so that what comes out of the last is still of the size of what went in."""
    problem, options = over_heaps(8)
    layers = [random_inputs(problem, ROUTINGS[n % 4], seed=n)[0] for n in range(20)]
    _, dy = random_inputs(problem)

    def trained(**options) -> list[Tensor]:
        x = layers[0].x.clone().requires_grad_()
        y, leaves = x, [x]
        for inputs in layers:
            weights = [getattr(inputs, name).clone().requires_grad_() for name in DIFFERENTIABLE[1:]]
            y = y + moe(F.rms_norm(y, y.shape[1:]), inputs.topk_ids, *weights, **options)
            leaves += weights
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    expected = trained(stage=DEFAULT_OVER_RANKS, save="pre")  # without heaps
    got = trained(stage=over_ranks.name, **options)
    assert all(t.isfinite().all() and t.any() for t in expected)
    assert [n for n, (one, other) in enumerate(zip(got, expected, strict=True)) if not same_bits(one, other)] == []


@pytest.mark.parametrize("W", [None, 8], ids=["one rank", "heaps"])
def test_compiled_with_reduced_overhead_equals_eager(W, over_ranks, monkeypatch):
    """torch.compile's own graphs: the first call warms up in the graphs' memory, the second captures, and the others
    replay. What is kept from call to call, heaps too, must not lie in that memory."""
    replayed, replay = [], torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(graph), replay(graph))[1])
    torch._dynamo.reset()
    problem, options = over_heaps(W) if W else (Problem(TOKENS, **LARGER, device=DEVICE), {})
    plain = lambda *tensors: moe(*tensors, stage=over_ranks.name, **options)
    compiled = torch.compile(plain, fullgraph=True, mode="reduce-overhead")

    def both_directions(function, inputs, dy) -> tuple[Tensor, Grads]:
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in vars(inputs).values()]
        y = function(*leaves)
        y.backward(dy)
        return y.detach(), Grads(*(leaf.grad for leaf in leaves if leaf.is_floating_point()))

    for seed in range(4):
        _, inputs, dy = layer(T=problem.T, **LARGER, seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        got = both_directions(compiled, inputs, dy)
        assert_same(got, both_directions(plain, inputs, dy))
    assert len(replayed) >= 4  # both directions of the last two calls, at least: torch can do without graphs


# Streams, devices, threads.


def test_the_current_stream_is_honoured(rung):
    """Ids that a slow kernel on a side stream still has to produce, and nobody synchronises."""
    _, inputs, dy = layer(**SIZES)
    expected = train(rung, inputs, dy)
    late = torch.full_like(inputs.topk_ids, -1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(inputs.topk_ids)
        result = train(rung, replace(inputs, topk_ids=late), dy)
    stream.synchronize()
    assert_same(result, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one(rung):
    """Triton launches on the current device, whose memory this is not; backward runs in a thread of its own."""
    _, inputs, dy = layer(**SIZES)
    there = replace(inputs, **{name: t.to("cuda:1") for name, t in vars(inputs).items()})
    y, grads = train(rung, there, dy.to("cuda:1"))
    assert torch.cuda.current_device() == 0 and all(t.device.index == 1 for t in tensors((y, grads)))
    here = y.cpu(), Grads(**{name: grad.cpu() for name, grad in vars(grads).items()})
    y, grads = train(rung, inputs, dy)
    assert_same(here, (y.cpu(), Grads(**{name: grad.cpu() for name, grad in vars(grads).items()})))
    with pytest.raises(ValueError, match="w_down is on cuda:1 and x on cuda:0"):
        train(rung, replace(inputs, w_down=there.w_down), dy)


def test_a_thread_of_its_own(rung):
    _, inputs, dy = layer(**SIZES)
    expected, results = train(rung, inputs, dy), []
    thread = Thread(target=lambda: results.append(train(rung, inputs, dy)))
    thread.start()
    thread.join()
    assert_same(results[0], expected)


FIRST_CALL = """
import hashlib, sys, threading
from cases import bits, layer, tensors, train
from mega_moe.registry import stage

def call():
    _, inputs, dy = layer(T=96, H=64, I=48, E=8, K=2)
    values = b"".join(bits(t).cpu().numpy().tobytes() for t in tensors(train(stage(sys.argv[1]), inputs, dy)))
    print(hashlib.sha256(values).hexdigest())

thread = threading.Thread(target=call)
thread.start()
thread.join()
"""


def test_four_processes_make_their_first_call_over_one_empty_cache(fused, tmp_path):
    """Each in a thread, too: what is set up in the main thread or by an earlier process is not there."""
    here = Path(__file__).parent
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
    }
    command = [sys.executable, "-c", FIRST_CALL, fused.name]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = {process.communicate()[0].strip() for process in started}
    assert not any(process.returncode for process in started)
    assert len(printed) == 1 and len(printed.pop()) == hashlib.sha256().digest_size * 2


# Memory and compilation.


def test_memory_stays_flat_under_checkpointing(rung):
    """Twenty steps: each gives back what it took, and none takes more than the one before."""
    _, inputs, dy = layer(**SIZES)

    def step():
        leaves = [getattr(inputs, name).clone().requires_grad_() for name in DIFFERENTIABLE]
        block = lambda x, *weights: moe(x, inputs.topk_ids, *weights, stage=rung.name)
        checkpoint(block, *leaves, use_reentrant=False).backward(dy)
        torch.cuda.synchronize()

    step()
    before, peaks = torch.cuda.memory_allocated(), set()
    for _ in range(20):
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks.add(torch.cuda.max_memory_allocated())
        assert torch.cuda.memory_allocated() == before
    assert len(peaks) == 1


@pytest.mark.parametrize("save", SAVES)
def test_between_forward_and_backward_only_what_was_asked_for_is_kept(save, rung):
    """y, the plan, and pre if it was asked for; without a gradient to come, y alone."""
    problem, inputs, dy = layer(T=1024, H=256, I=512, E=8, K=2)
    train(rung, inputs, dy)  # compiles, and makes what stays
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in DIFFERENTIABLE}

    def kept() -> int:
        before = torch.cuda.memory_allocated()
        y = moe(topk_ids=inputs.topk_ids, **leaves, stage=rung.name, save=save)
        assert y.shape == dy.shape
        return torch.cuda.memory_allocated() - before

    y_bytes = problem.T * problem.H * 2
    pre_bytes = problem.R * 2 * problem.I * 2
    plan_bytes = 4 * (problem.E + 1 + 3 * problem.R)
    expected = y_bytes + plan_bytes + (pre_bytes if save == "pre" else 0)
    rounding = 5 * 512  # the allocator hands out whole blocks of 512 bytes
    assert expected <= kept() <= expected + rounding
    with torch.no_grad():
        assert kept() == y_bytes


def test_no_number_of_tokens_compiles_anew(fused, monkeypatch):
    """Token counts differ in every step of training: only the first few compile (an integer of 1 or a multiple of 16
    may), and one for each kind of tiles that few rows have; the second time none does."""
    from triton import knobs

    from mega_moe.kernels import blocks

    kinds = 1 + len(blocks.blocks_for(torch.bfloat16).few)
    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts["fn"].name))
    counts = []
    for T in [*range(1000, 1031), 7, 2000, 1, 64, *range(1000, 1031)]:
        _, inputs, dy = layer(T=T, H=48, I=80, E=5, K=2)  # sizes that no other test has
        compiled.clear()
        train(fused, inputs, dy)
        counts.append(len(compiled))
    assert counts[0] > 0 and sum(counts[1:]) <= kinds * counts[0] and sum(counts[-31:]) == 0, counts
