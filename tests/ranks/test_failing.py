"""What ranks do that wait for each other in vain, or have no room: they end, compute NaN, and the host says why."""

import time

import pytest
import torch
import triton
import triton.language as tl
from cases import DEVICE, assert_same, layer, on_cpu, train
from triton.runtime.interpreter import InterpreterBuilder

from mega_moe import LocalHeaps, moe
from mega_moe.kernels import exchange, mega, signal
from mega_moe.kernels.meet import in_heap, meet
from mega_moe.shapes import Need
from mega_moe.symmetric import CLAIMED, RANK, view_of, what_happened

TOKENS = (2, 3)
LATE = (
    r"rank 0 waited in vain for rank 1 at call {call} \({shown} of {call} arrivals\): it died, raised, or makes other"
)


@pytest.fixture(autouse=DEVICE == "cpu")
def impatient(monkeypatch):
    """In one process a wait is over at the first look, or never."""
    monkeypatch.setattr(signal, "MOST_POLLS", type(signal.MOST_POLLS)(10))


@pytest.fixture
def call():
    """A layer over the heaps of two ranks, which have met once."""
    problem, inputs, dy = layer(T=5, E=4)
    heap = LocalHeaps(2, 4, timeout_s=0.5)
    problem = problem.at(heap=heap.key, tokens_per_rank=TOKENS, save="pre")
    return problem, inputs, dy, heap


def spoil(heap: LocalHeaps, rank: int = 1) -> None:
    """One arrival of this rank at rank 0 gets lost, in all kinds of layers."""
    for (layout, _), (heaps, _) in heap._kept.items():
        at = layout.views()["flags"].offset
        heaps[0, at : at + 4 * layout.W].view(torch.int32)[rank] -= 1


def test_a_rank_that_does_not_come(over_ranks, call):
    """All ends: y, dx and the router weights' gradients are NaN, and so are the weights'."""
    problem, inputs, dy, heap = call
    y, saved = over_ranks.forward(problem, inputs)
    heap.check()
    assert not y.isnan().any()
    spoil(heap)
    grads = over_ranks.backward(problem, inputs, saved, dy, Need())
    with pytest.raises(RuntimeError, match=LATE.format(call=2, shown=1)):
        heap.check()
    for name in ("dx", "dtopk_weights", "dw_gate_up", "dw_down"):
        assert getattr(grads, name).isnan().all(), name
    y, saved = over_ranks.forward(problem, inputs)
    assert y.isnan().all() and saved.plan.row_start.max() == 0
    grads = over_ranks.backward(problem, inputs, saved, dy, Need())
    assert all(grad.isnan().all() for grad in grads.tensors())


def test_gradients_that_nobody_sends_home_are_nan_too(over_ranks, call):
    problem, inputs, dy, heap = call
    _, saved = over_ranks.forward(problem, inputs)
    spoil(heap)
    grads = over_ranks.backward(problem, inputs, saved, dy, Need(dx=False, dtopk_weights=False))
    assert grads.dw_gate_up.isnan().all() and grads.dw_down.isnan().all()


def test_heaps_that_have_failed_are_dead(over_ranks, call):
    """On a CPU the call itself raises, on a GPU the next one that knows; and so does every one after it, until heaps
    are made anew."""
    _, inputs, dy, heap = call
    options = dict(heap=heap, tokens_per_rank=TOKENS, stage=over_ranks.name)
    expected = train(over_ranks, inputs, dy, heap=LocalHeaps(2, 4), tokens_per_rank=TOKENS)
    assert_same(train(over_ranks, inputs, dy, heap=heap, tokens_per_rank=TOKENS), expected)
    x = inputs.x.detach().requires_grad_()
    y = moe(x, inputs.topk_ids, inputs.topk_weights, inputs.w_gate_up, inputs.w_down, **options)
    spoil(heap)
    with pytest.raises(RuntimeError, match=LATE.format(call=4, shown=3)):
        y.backward(dy)
        heap.check()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="These heaps are dead: close them, and make new ones on all ranks"):
            moe(**vars(inputs), **options)
    heap.close()
    heap.check()  # what has been closed has nothing to say
    assert_same(train(over_ranks, inputs, dy, heap=LocalHeaps(2, 4), tokens_per_rank=TOKENS), expected)


def test_rows_that_do_not_come(over_ranks, call, monkeypatch):
    """One that its home, rank 1, has counted, and nobody has sent: rank 1's sums are NaN, and whoever looks is told."""
    problem, inputs, _, heap = call
    expected, _ = over_ranks.forward(problem, inputs)
    ((heaps, _),) = heap._kept.values()
    ((layout, _),) = heap._kept
    kernel = mega.mega_forward_kernel if over_ranks.name == "mega" else exchange.combine_slots_kernel
    launch = kernel.run

    def one_too_few(*args, **kwargs):
        view_of(heaps[1], layout, "rows_arrived").sub_(1)
        return launch(*args, **kwargs)

    monkeypatch.setattr(kernel, "run", one_too_few, raising=False)
    y, _ = over_ranks.forward(problem, inputs)
    with pytest.raises(RuntimeError, match=r"rank 0 waited in vain for rows of its tokens in call 2: \d+ of \d+ came"):
        heap.check()
    assert y[2:].isnan().all() and expected.isfinite().all()


def test_more_rows_than_there_is_room_for():
    """Nothing is planned, and nothing written outside."""
    problem, inputs, _ = layer([[0, 1], [1, 0], [2, 3]], E=4)
    heap = LocalHeaps(1, 4)
    problem = problem.at(heap=heap.key, tokens_per_rank=(3,), max_rows=5)
    memory, plan, _ = meet(problem, inputs)
    with pytest.raises(RuntimeError, match=r"rank 0 would receive 6 rows in call 1, .* max_rows = 5: make .* larger"):
        heap.check()
    assert plan.row_start.tolist() == [0, -1, -2, -3, -4] and plan.token_of_row.tolist() == [-1] * 5
    assert what_happened(memory.view(0, "page").cpu())


@triton.jit
def record_kernel(heaps_ptr, call, PAGE: tl.constexpr, W: tl.constexpr):
    page_ptr = in_heap(tl.load(heaps_ptr), PAGE, tl.int64)
    signal.record(signal.OUT_OF_STEP, call, call * 0 + 1, call * 0 + 2, call * 0 + 1, page_ptr, heaps_ptr, PAGE, W)


def test_two_that_record_at_once():
    """Rank 1 is about to write into rank 0's page when rank 0 writes into rank 1's: who it is stands there still."""
    problem, inputs, _ = layer(T=5, E=4)
    heap = LocalHeaps(2, 4)
    memory, *_ = meet(problem.at(heap=heap.key, tokens_per_rank=TOKENS), inputs)
    memory.view(0, "page")[CLAIMED] = 1
    memory.view(0, "page")[RANK] = 1
    record_kernel[(1,)](memory.addresses, 3, memory.layout.offsets()["page"], 2)
    assert what_happened(memory.view(1, "page").cpu()).startswith(
        "rank 0 came to call 3 for backward of call 2, and rank 1 for backward of call 1: all ranks must"
    )
    assert what_happened(memory.view(0, "page").cpu()) is None


@on_cpu
@pytest.mark.parametrize("timeout_s, looks", [(0, 10), (60, 10), (0.3, 10**6)])
def test_how_long_a_rank_waits(timeout_s, looks, monkeypatch):
    """Until its time is over, or the interpreter has looked often enough."""
    monkeypatch.setattr(signal, "MOST_POLLS", type(signal.MOST_POLLS)(looks))
    problem, inputs, _ = layer(T=5, E=4)
    heap = LocalHeaps(2, 4, timeout_s)
    problem = problem.at(heap=heap.key, tokens_per_rank=TOKENS)
    meet(problem, inputs)
    spoil(heap)
    looked, atomic = [], InterpreterBuilder.create_atomic_rmw

    def counted(self, operation, pointer, value, *rest):
        if len(value.data.shape) and value.data.size == 2 and not value.data.any():
            looked.append(time.monotonic())
        return atomic(self, operation, pointer, value, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", counted)
    meet(problem, inputs)
    if looks == 10:
        assert abs(len(looked) - looks) <= 1
    else:
        assert 0.9 * timeout_s <= looked[-1] - looked[0] < 10 * timeout_s
    with pytest.raises(RuntimeError, match="waited in vain"):
        heap.check()


@pytest.mark.parametrize("timeout_s", [-1, float("nan")])
def test_a_time_that_is_none(timeout_s):
    with pytest.raises(ValueError, match=r"timeout_s must be 0 .* or more"):
        LocalHeaps(2, 4, timeout_s)
