"""8-bit codes between ranks: over heaps a layer computes what it computes on one rank, to the bit, in "fp8" and
"fp8_bwd"; forward sends codes."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from cases import assert_same, layer, on_cpu, run, same_bits, train
from forked import no_fork_warning, on_ranks, share, together
from torch import Tensor

from mega_moe import LocalHeaps
from mega_moe.kernels.meet import meet
from mega_moe.kernels.quantize import quantise_rows
from mega_moe.registry import stage
from mega_moe.shapes import PRECISIONS, SAVES, Grads, Inputs, Need, Problem
from mega_moe.symmetric import STATE, TIMED_OUT

MEGA = stage("mega")


def on_one_rank(problem: Problem, inputs: Inputs, dy: Tensor) -> tuple[Tensor, Grads]:
    """What rung persistent computes, without heaps."""
    return run(stage("persistent"), problem, inputs, dy)


CASES = {  # layer, tokens of each rank, precision, save
    "uneven": (dict(T=38, H=150, I=24, E=4, K=2), (1, 37), "fp8", "inputs"),
    "pre is kept": (dict(T=7, H=33, I=17, E=2, K=2), (3, 4), "fp8", "pre"),
    "more than one block": (dict(T=140, H=40, I=140, E=2, K=2), (70, 70), "fp8_bwd", "inputs"),
    "fp8_bwd, pre is kept": (dict(T=7, H=33, I=17, E=2, K=2), (3, 4), "fp8_bwd", "pre"),
    "ranks without tokens": (dict(T=6, H=33, I=17, E=4, K=2), (0, 4, 0, 2), "fp8", "inputs"),
    "no tokens at all": (dict(T=0, H=32, I=24, E=2, K=2), (0, 0), "fp8", "inputs"),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_computes(name, poison):
    """Both directions use the same heaps."""
    sizes, tokens_per_rank, precision, save = CASES[name]
    problem, inputs, dy = layer(**sizes)
    problem = problem.at(precision=precision, save=save)
    heap = LocalHeaps(len(tokens_per_rank), max(tokens_per_rank) + 1)
    over_heaps = problem.at(heap=heap.key, tokens_per_rank=tokens_per_rank)
    assert_same(run(MEGA, over_heaps, inputs, dy), on_one_rank(problem, inputs, dy))
    assert len(heap.pages) == 1


@on_cpu
@no_fork_warning
@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_a_process_for_each_rank(precision, tmp_path, poison):
    """Of uneven ranks, through moe."""
    problem, inputs, dy = layer(T=7, E=4, H=40, I=32)

    def work(rank: int) -> tuple[Tensor, Grads]:
        return train(MEGA, *share(inputs, dy, (1, 6), rank), group=dist.group.WORLD, precision=precision)

    got = together(on_ranks(2, work, tmp_path))
    assert_same(got, on_one_rank(problem.at(precision=precision), inputs, dy))


@on_cpu
@no_fork_warning
@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_launches_apart_compute_the_same(precision, tmp_path, poison):
    """A process for each rank: through heaps, in which fp8's rows are codes, and by all_to_all, which sends them as
    they are. Pre is made again, of codes where forward read them."""
    problem, inputs, dy = layer(T=7, E=2, H=40, I=17)
    expected = on_one_rank(problem.at(precision=precision), inputs, dy)
    assert not same_bits(expected[1].dx, on_one_rank(problem, inputs, dy)[1].dx)

    def work(rank: int) -> list[tuple[Tensor, Grads]]:
        mine, options = share(inputs, dy, (1, 6), rank), dict(group=dist.group.WORLD, precision=precision)
        return [train(stage("ranks"), *mine, heap=heap, **options) for heap in (None, "all_to_all")]

    for results in zip(*on_ranks(2, work, tmp_path), strict=True):
        assert_same(together(list(results)), expected)


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_rows_that_did_not_come_leave_nan_apart_too(precision, poison):
    """Codes cannot all be NaN; their scales can."""
    problem, inputs, dy = layer([[0, 1], [1, 0], [1, 1]], I=16, E=2)
    heap, ranks = LocalHeaps(1, 4), stage("ranks")
    problem = problem.at(precision=precision, save="inputs", heap=heap.key, tokens_per_rank=(3,))
    _, saved = ranks.forward(problem, inputs)
    for page in heap.pages:
        page[STATE] = TIMED_OUT  # a peer says so
    y, _ = ranks.forward(problem, inputs)
    grads = ranks.backward(problem, inputs, saved, dy, Need())
    assert y.isnan().all() and all(grad.isnan().all() for grad in grads.tensors())


def test_exactly_the_gradients_that_are_needed(poison):
    problem, inputs, dy = layer([[0, -1], [1, 0]], I=16, E=2)
    problem = problem.at(precision="fp8")
    _, full = on_one_rank(problem, inputs, dy)
    heap = LocalHeaps(2, 2)
    problems = [problem.at(save=save, heap=heap.key, tokens_per_rank=(1, 1)) for save in SAVES]
    kept = [MEGA.forward(problem, inputs)[1] for problem in problems]
    for n, needed in enumerate(product([False, True], repeat=4)):
        need = Need(*needed)
        grads = MEGA.backward(problems[n % 2], inputs, kept[n % 2], dy, need)
        for name, wanted in vars(need).items():
            got = getattr(grads, name)
            assert same_bits(got, getattr(full, name)) if wanted else got is None, (need, name)


def test_call_after_call(poison):
    """Nothing of an earlier call is read, be it forward or backward."""
    problem, inputs, dy = layer(T=7, H=40, I=24, E=2)
    problem, heap = problem.at(precision="fp8", save="inputs"), LocalHeaps(2, 4)
    over_heaps = problem.at(heap=heap.key, tokens_per_rank=(3, 4))
    other = replace(inputs, x=inputs.x.flip(0))
    expected, expected_of_other = (on_one_rank(problem, each, dy) for each in (inputs, other))
    for _ in range(2):
        y, _ = MEGA.forward(over_heaps, other)
        assert same_bits(y, expected_of_other[0])
        assert_same(run(MEGA, over_heaps, inputs, dy), expected)


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd"])
def test_forward_sends_codes_and_not_what_they_were_made_of(precision, poison):
    """Half the bytes, and a scale for 128 of them: what is published, and what peers therefore pull. Where forward is
    bf16's, heaps have no room for codes."""
    problem, inputs, _ = layer(T=5, H=150, E=2)
    heap = LocalHeaps(2, 3)
    problem = problem.at(precision=precision, heap=heap.key, tokens_per_rank=(2, 3))
    memory, *_ = meet(problem, inputs)
    views = memory.layout.views()
    if precision == "fp8_bwd":
        assert "x_codes" not in views and torch.equal(memory.view(1, "x")[1], inputs.x[2:])
        return
    codes, scales, _ = quantise_rows(inputs.x)
    assert torch.equal(memory.view(1, "x_codes")[1].float(), codes[2:].float())
    assert torch.equal(memory.view(1, "x_scales")[1], scales[2:])
    assert memory.view(1, "x").isnan().all()  # as it was made
    assert views["x_codes"].dtype.itemsize * 2 == views["x"].dtype.itemsize and views["x_scales"].shape == (2, 3, 2)


def test_rows_that_there_is_no_room_for_leave_nan(poison):
    """Nothing is planned then, and what was to be summed over rows is NaN."""
    problem, inputs, dy = layer([[0, 1], [1, 0], [2, 3]], E=4)
    heap = LocalHeaps(1, 4)
    problem = problem.at(precision="fp8", save="inputs", heap=heap.key, tokens_per_rank=(3,), max_rows=5)
    y, saved = MEGA.forward(problem, inputs)
    grads = MEGA.backward(problem, inputs, saved, dy, Need())
    assert y.isnan().all() and all(grad.isnan().all() for grad in grads.tensors())
