"""Launches are counted: what would run counts once, what would not counts not at all."""

import importlib.util
import sys

import pytest
import torch
from cases import DEVICE

from mega_moe import LocalHeaps
from mega_moe.launches import launches
from mega_moe.registry import LADDER, stage
from mega_moe.samples import random_inputs
from mega_moe.shapes import PRESETS, SAVES
from mega_moe.symmetric import shares

CPU = PRESETS["tiny"].at(device="cpu", T=8)
HERE = CPU.at(device=DEVICE)
a = torch.randn(4, 6)


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda: a @ a.T, ["aten.mm"]),
        (lambda: (a + 1).sum(), ["aten.add", "aten.sum"]),
        (lambda: a.view(6, 4).T[1:].unsqueeze(0).expand(2, 3, 6), []),
        (lambda: a.reshape(24).unflatten(0, (2, 12)), []),
        (lambda: a.T.reshape(24), ["aten.clone"]),
        (lambda: torch.empty(3, 3), []),
        (lambda: torch.zeros(3, 3), ["aten.zeros"]),
        (lambda: a[:0] @ a.T, []),
        (lambda: a.new_empty(6, 4).copy_(a.T), ["aten.copy_"]),
        (lambda: a.sum().item(), ["aten.sum", "aten._local_scalar_dense"]),
        (lambda: torch.where(a > 0, a, 0.0), ["aten.gt", "aten.where"]),
        (lambda: torch.promote_types(a.dtype, torch.float64), []),
        (lambda: a.double(), ["aten._to_copy"]),
        (lambda: a.float(), []),
    ],
)
def test_operators_that_would_launch(function, expected):
    assert launches(function, "cpu") == expected


def test_nothing_is_watched_afterwards():
    launches(lambda: a + 1, "cpu")
    seen = launches(lambda: None, "cpu")
    a + 1
    assert seen == []


def grouped(problem):
    rung = LADDER[1]
    if reason := rung.why_not(problem):
        pytest.skip(reason)
    return rung


def test_kernels_are_named_and_their_inner_workings_are_not_counted():
    """Also not those of the interpreter, which calls torch's operators on its way."""
    rung = grouped(HERE)
    inputs, dy = random_inputs(HERE)
    _, saved = rung.forward(HERE, inputs)
    rung.backward(HERE, inputs, saved, dy)
    forward = launches(lambda: rung.forward(HERE, inputs), DEVICE)
    backward = launches(lambda: rung.backward(HERE, inputs, saved, dy), DEVICE)

    assert forward.count("grouped_gemm_kernel") == 2 and backward.count("weight_grad_kernel") == 2
    assert len(forward) <= 10 and len(backward) <= 10


def test_the_interpreter_is_left_as_it_was_found_even_after_an_error():
    grouped(HERE)
    from triton.runtime.interpreter import GridExecutor

    before = GridExecutor.__call__
    with pytest.raises(ZeroDivisionError):
        launches(lambda: 1 // 0, "cpu")
    assert GridExecutor.__call__ is before


def test_without_triton_the_references_launches_can_still_be_counted(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("mega_moe.launches.find_spec", lambda name: None if name == "triton" else find_spec(name))
    monkeypatch.setitem(sys.modules, "triton", None)
    inputs, _ = random_inputs(CPU)
    names = launches(lambda: LADDER[0].forward(CPU, inputs), "cpu")
    assert len(names) > 20 and all(name.startswith("aten.") for name in names)


def test_the_loop_over_experts_launches_more_with_more_experts():
    counts = []
    for E in (4, 16):
        problem = CPU.at(E=E, T=32)
        inputs, _ = random_inputs(problem)
        counts.append(len(launches(lambda problem=problem, inputs=inputs: LADDER[0].forward(problem, inputs), "cpu")))
    assert counts[1] - counts[0] >= 24  # two products an expert


@pytest.mark.parametrize("save", SAVES if DEVICE == "cuda" else ("inputs",))
@pytest.mark.parametrize("W", [None, 1, 2, 8] if DEVICE == "cuda" else [None, 2], ids=lambda W: f"W={W}")
def test_mega_is_two_launches_each_way_however_many_ranks_meet(W, save):
    """One that makes the plan and the schedule, over heaps behind what ranks publish; and one for all else. W=None:
    without heaps."""
    mega, problem = stage("mega"), HERE.at(save=save)
    if reason := mega.why_not(problem):
        pytest.skip(reason)
    inputs, dy = random_inputs(problem)
    if W:
        heap = LocalHeaps(W, problem.T)
        problem = problem.at(heap=heap.key, tokens_per_rank=shares(problem.T, W))
    _, saved = mega.forward(problem, inputs)
    mega.backward(problem, inputs, saved, dy)
    forward = launches(lambda: mega.forward(problem, inputs), DEVICE)
    backward = launches(lambda: mega.backward(problem, inputs, saved, dy), DEVICE)

    assert len(forward) == 2 and "mega_forward_kernel" in forward[1], forward
    assert len(backward) == 2 and "mega_backward_kernel" in backward[1], backward


QUANTISE = {"rows": "quantise_rows_kernel", "weights": "quantise_weights_kernel"}

ARE_QUANTISED = {  # by precision, save, and whether over heaps: what forward quantises first, and what backward
    ("fp8", "pre", False): (["rows", "weights", "weights"], ["weights", "weights", "rows"]),
    ("fp8", "inputs", False): (["rows", "weights", "weights"], ["weights", "weights", "rows", "rows"]),
    ("fp8", "inputs", True): (["rows", "weights", "weights"], ["weights", "weights"]),
    ("fp8_bwd", "pre", False): ([], ["weights", "weights", "rows"]),
}


@pytest.mark.parametrize("precision, save, over_heaps", ARE_QUANTISED)
def test_in_8_bits_mega_quantises_before_its_two_launches(precision, save, over_heaps):
    """Both weights, each call, so that no change of one is missed; and tokens by row, x in forward, dy in backward,
    and x once more where pre is made again from it. Over heaps backward pulls them as they are, and quantises them in
    the launch that does all else."""
    mega, problem = stage("mega"), HERE.at(precision=precision, save=save)
    if reason := mega.why_not(problem):
        pytest.skip(reason)
    inputs, dy = random_inputs(problem)
    if over_heaps:
        heap = LocalHeaps(2, problem.T)
        problem = problem.at(heap=heap.key, tokens_per_rank=shares(problem.T, 2))
    _, saved = mega.forward(problem, inputs)
    mega.backward(problem, inputs, saved, dy)
    forward = launches(lambda: mega.forward(problem, inputs), DEVICE)
    backward = launches(lambda: mega.backward(problem, inputs, saved, dy), DEVICE)

    for names, quantised in zip((forward, backward), ARE_QUANTISED[precision, save, over_heaps], strict=True):
        found = [name for name in names if name.startswith("quantise")]
        assert found == [QUANTISE[what] for what in quantised] and len(names) == len(found) + 2, names
    assert "mega_forward_kernel" in forward[-1] and "scaled_mega_backward_kernel" in backward[-1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_profiler_sees_kernels_memsets_and_copies():
    b = torch.randn(64, 64, device="cuda")

    def work():
        (b @ b).relu_().cpu()

    work()
    names = launches(work, "cuda")
    assert len(names) >= 3 and any("memcpy" in name.lower() for name in names)
