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
from cases import DIFFERENTIABLE, assert_same, bits, layer, on_gpu, run, tensors, train
from torch.utils.checkpoint import checkpoint

from mega_moe import moe
from mega_moe.parity import OUTPUTS
from mega_moe.shapes import SAVES, Grads

pytestmark = on_gpu

SIZES = dict(T=96, H=64, I=48, E=8, K=2)


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
    problem, inputs, dy = layer(T=512, H=512, I=256, E=16, K=4)
    expected = [bits(t) for t in tensors(run(fused, problem, inputs, dy))]
    other, noise = torch.cuda.Stream(), torch.randn(1024, 1024, device=dy.device)
    differing = torch.zeros(len(expected), dtype=torch.int64, device=dy.device)
    for _ in range(1000):
        with torch.cuda.stream(other):
            noise @ noise
        got = [bits(t) for t in tensors(run(fused, problem, inputs, dy))]
        differing += torch.stack([(a != b).any() for a, b in zip(got, expected, strict=True)])
    assert not differing.any(), dict(zip(OUTPUTS, differing.tolist(), strict=True))


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
    may), and the second time none does."""
    from triton import knobs

    compiled = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **facts: compiled.append(facts["fn"].name))
    counts = []
    for T in [*range(1000, 1031), 7, 2000, 1, 64, *range(1000, 1031)]:
        _, inputs, dy = layer(T=T, H=48, I=80, E=5, K=2)  # sizes that no other test has
        compiled.clear()
        train(fused, inputs, dy)
        counts.append(len(compiled))
    assert counts[0] > 0 and sum(counts[1:]) <= counts[0] and sum(counts[-31:]) == 0, counts
