"""Rows between ranks: each comes from its token's home and goes back to its slot there, and the slots are added up."""

from dataclasses import dataclass

import pytest
import torch
from cases import DEVICE, framed, on_cpu, same_bits, transposed
from exact import by_slot, dispatched, same_values, whole
from torch import Tensor

from mega_moe import LocalHeaps, routing
from mega_moe.kernels import signal
from mega_moe.kernels.exchange import as_tokens, combine_slots, pull, push
from mega_moe.kernels.meet import meet
from mega_moe.shapes import Inputs, Plan, Problem
from mega_moe.symmetric import Memory, what_happened

nan = torch.nan
both = pytest.mark.parametrize("dtype, weights", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
every_spread = pytest.mark.parametrize(
    "tokens_per_rank, E",
    [((9,), 3), ((3, 6), 4), ((4, 0, 3), 3), ((0, 0), 2), ((0, 2, 0, 5), 4), ((70, 66), 2)],  # the last: many blocks
    ids=str,
)


@pytest.fixture(autouse=True)
def watched_addresses():
    """Not watched: a heap is reached by its address, and is no argument of the kernel."""


@pytest.fixture(autouse=DEVICE == "cpu")
def impatient(monkeypatch):
    """In one process a wait is over at the first look, or never."""
    monkeypatch.setattr(signal, "MOST_POLLS", type(signal.MOST_POLLS)(10))


@dataclass(frozen=True)
class Call:
    """A call whose ranks have met.

    Attributes:
        problem, inputs, dy, memory: as everywhere.
        plan: over heaps, as `meet` makes it.
        true: the plan of all tokens, one rank after another.
    """

    problem: Problem
    inputs: Inputs
    dy: Tensor
    memory: Memory
    plan: Plan
    true: Plan


def call_of(
    ids: Tensor, tokens_per_rank: tuple[int, ...], E: int, H=5, dtype=torch.float32, weights=torch.float32, heap=None
) -> Call:
    """Whole numbers for x and dy, and eighths for weights; in masked slots NaN."""
    T, K = ids.shape
    x, dy = whole(T, H, dtype=dtype, seed=1), whole(T, H, dtype=dtype, seed=2)
    topk_weights = whole(T, K, seed=3).add(0.5).div(4).masked_fill(ids < 0, nan).to(weights)
    w_gate_up = torch.empty(E, 2, 1, H, dtype=dtype, device=DEVICE)  # of which only the shape matters here
    inputs = Inputs(x, ids, topk_weights, w_gate_up, w_gate_up[:, 0].mT)
    heap = heap or LocalHeaps(len(tokens_per_rank), max(tokens_per_rank) + 1)  # its memory lives on in the call
    problem = inputs.problem(heap=heap.key, tokens_per_rank=tokens_per_rank)
    memory, plan, *_ = meet(problem, inputs, dy)
    return Call(problem, inputs, dy, memory, plan, routing.plan(ids, E))


def ids_of(T: int, K: int, E: int) -> Tensor:
    """Random ids with every fourth route masked; the same expert may come twice in a token."""
    ids = torch.randint(E, (T, K), generator=torch.Generator().manual_seed(0))
    ids.flatten()[::4] = -1
    return ids.to(DEVICE)


def of_homes(call: Call, name: str) -> Tensor:
    """A view of all ranks that has one buffer, their tokens one rank after another."""
    parts = [call.memory.view(rank, name)[:T] for rank, T in enumerate(call.problem.tokens_per_rank)]
    return torch.cat(parts)


# Examples.


def example() -> Call:
    """Three tokens on two ranks of at most four: row 0 is that of rank 1, row 1 the second of rank 0."""
    ids = torch.tensor([[-1], [1], [0]], device=DEVICE)
    call = call_of(ids, (2, 1), 2, H=1, heap=LocalHeaps(2, max_tokens=4))
    assert call.plan.token_of_row.tolist() == [4, 1, -1]
    return call


def test_pull_does_its_example(framed_memory):
    call = example()
    buffer = call.memory.view(0, "call").item() & 1
    call.memory.view(0, "x")[buffer, :2, 0] = torch.tensor([1.0, 2.0], device=DEVICE)
    call.memory.view(1, "x")[buffer, 0, 0] = 3.0
    rows, weights = pull("x", False, call.problem, call.memory, call.plan)
    assert rows[:2].tolist() == [[3.0], [2.0]] and rows[2].isnan() and weights is None


def test_push_does_its_example(framed_memory):
    call = example()
    push(torch.tensor([[5.0], [6.0], [nan]], device=DEVICE), None, call.problem, call.memory, call.plan)
    slots = [call.memory.view(rank, "slots")[..., 0] for rank in range(2)]
    assert slots[0][1].tolist() == [6.0] and slots[1][0].tolist() == [5.0]
    assert slots[0][[0, 2, 3]].isnan().all() and slots[1][1:].isnan().all()
    assert [call.memory.view(rank, "rows_arrived").item() for rank in range(2)] == [1, 1]


def test_combine_does_its_example(framed_memory):
    call = call_of(torch.tensor([[0, -1]], device=DEVICE), (1,), 1, H=1)
    call.memory.view(0, "slots")[0, :, 0] = torch.tensor([1.0, nan], device=DEVICE)
    call.memory.view(0, "rows_arrived").fill_(1)
    y, weights = torch.empty(1, 1, device=DEVICE), torch.tensor([[0.5, 3.0]], device=DEVICE)
    combine_slots(y, None, weights, call.problem, call.memory, call.plan)
    assert y.tolist() == [[0.5]]


# Values.


@both
@every_spread
def test_pull(tokens_per_rank, E, dtype, weights, framed_memory):
    """Rows without an expert are not written; weights come in their own dtype. More than one block of columns."""
    call = call_of(ids_of(sum(tokens_per_rank), 2, E), tokens_per_rank, E, H=70, dtype=dtype, weights=weights)
    x, none = pull("x", False, call.problem, call.memory, call.plan)
    dy, weight_of_row = pull("dy", True, call.problem, call.memory, call.plan)
    assert same_values(x, dispatched(call.inputs.x, call.true)) and none is None
    assert same_values(dy, dispatched(call.dy, call.true))
    token, slot = call.true.token_of_row, call.true.slot_of_row
    if call.problem.R:
        expected = torch.where(token >= 0, call.inputs.topk_weights[token.clamp(min=0), slot.clamp(min=0)], nan)
        assert same_bits(weight_of_row, expected[:, None])


@both
@every_spread
def test_push_and_combine(tokens_per_rank, E, dtype, weights, framed_memory):
    """Every row lands in its slot and no other place, every home hears of all of its rows, and sums them."""
    call = call_of(ids_of(sum(tokens_per_rank), 2, E), tokens_per_rank, E, H=70, dtype=dtype, weights=weights)
    p, args = call.problem, (call.problem, call.memory, call.plan)
    before = call.memory.heaps.clone()
    rows, dweights = whole(p.R, p.H, dtype=dtype, most=50), whole(p.R, most=50, seed=4)
    rows[call.true.row_start[-1] :], dweights[call.true.row_start[-1] :] = nan, nan

    push(rows, dweights, *args)

    live = call.true.row_of_slot >= 0
    of_rank = live.sum(1).split(p.tokens_per_rank)
    assert [v.item() for v in views(call, "rows_arrived")] == [int(routes.sum()) for routes in of_rank]
    slots, dweights_of_slots = of_homes(call, "slots"), of_homes(call, "dweights").view(p.T, p.K)
    if p.R:
        assert same_values(slots, by_slot(rows, call.true))
        assert same_values(dweights_of_slots, by_slot(dweights[:, None], call.true)[..., 0])
    assert_touched(call, before, "rows_arrived", "slots", "dweights")
    for name in ("slots", "dweights"):
        assert all(v[T:].isnan().all() for v, T in zip(views(call, name), p.tokens_per_rank, strict=True))

    # combine, weighted and not, with the weights' gradients and without
    exact = torch.where(live[..., None], slots.double(), 0.0)
    times = torch.where(live, call.inputs.topk_weights.double(), 0.0)[..., None]
    y, dx, dw = (torch.empty_like(t) for t in (call.inputs.x, call.inputs.x, call.inputs.topk_weights))
    combine_slots(y, None, call.inputs.topk_weights, *args)
    combine_slots(dx, dw, None, *args)
    assert same_values(y, (exact * times).sum(1).to(dtype)) and same_values(dx, exact.sum(1).to(dtype))
    assert same_values(dw, torch.where(live, dweights_of_slots, 0.0).to(weights))
    alone = torch.empty_like(dw)
    combine_slots(None, alone, None, *args)
    assert same_bits(alone, dw)


def views(call: Call, name: str) -> list[Tensor]:
    """That of each rank."""
    return [call.memory.view(rank, name) for rank in range(call.memory.layout.W)]


def assert_touched(call: Call, before: Tensor, *names: str) -> None:
    """Of all heaps only these views may differ from before."""
    now, all_views = call.memory.heaps, call.memory.layout.views()
    starts = [*(view.offset for view in all_views.values()), call.memory.layout.bytes]
    for name, start, end in zip(all_views, starts, starts[1:]):
        assert name in names or torch.equal(now[:, start:end], before[:, start:end]), name


@pytest.mark.parametrize("one", ["rows", "dweights"])
def test_push_of_one_thing_leaves_the_other_alone(one, framed_memory):
    call = call_of(ids_of(5, 2, 2), (2, 3), 2)
    before, p = call.memory.heaps.clone(), call.problem
    given = dict(rows=whole(p.R, p.H), dweights=whole(p.R)) | {"rows" if one == "dweights" else "dweights": None}
    push(**given, problem=p, memory=call.memory, plan=call.plan)
    assert_touched(call, before, "rows_arrived", "slots" if one == "rows" else one)
    assert sum(v.item() for v in views(call, "rows_arrived")) == call.true.row_start[-1]


@pytest.mark.parametrize(
    "lay_out", [transposed, lambda t: framed(t, gap=3, offset=1), lambda t: t[:, :1].expand(-1, 2)]
)
def test_weights_of_any_strides(lay_out, framed_memory):
    call = call_of(ids_of(5, 2, 2).clamp(min=0), (2, 3), 2)
    weights = lay_out(call.inputs.topk_weights)
    push(whole(call.problem.R, 5), None, call.problem, call.memory, call.plan)
    y = torch.empty_like(call.inputs.x)
    combine_slots(y, None, weights, call.problem, call.memory, call.plan)
    assert same_values(y, (of_homes(call, "slots").double() * weights.double()[..., None]).sum(1).float())


def test_slots_are_summed_in_their_order(framed_memory):
    """Not in that of their rows, nor that of the ranks that pushed them: 2**24 + 1 + 1 rounds otherwise."""
    ids = torch.tensor([[2, 1, 0], [0, 1, 2]], device=DEVICE)
    call = call_of(ids, (1, 1, 0), 3, H=1)
    rows = torch.zeros(6, 1, device=DEVICE)
    for token in range(2):
        rows[call.true.row_of_slot[token].long(), 0] = torch.tensor([2.0**24, 1.0, 1.0], device=DEVICE)
    push(rows, None, call.problem, call.memory, call.plan)
    y = torch.empty(2, 1, device=DEVICE)
    combine_slots(y, None, None, call.problem, call.memory, call.plan)
    assert y.tolist() == [[2.0**24]] * 2


def test_what_the_last_call_left_is_not_read(framed_memory):
    """Published, pushed and counted in another call of other ranks' tokens, with another parity."""
    heap = LocalHeaps(2, 6)
    for tokens_per_rank in ((6, 1), (2, 5), (0, 6)):
        T = sum(tokens_per_rank)
        call = call_of(ids_of(T, 2, 2), tokens_per_rank, 2, heap=heap)
        args = (call.problem, call.memory, call.plan)
        rows, _ = pull("x", False, *args)
        assert same_values(rows, dispatched(call.inputs.x, call.true))
        push(rows, None, *args)
        live = int(call.true.row_start[-1])
        assert sum(v.item() for v in views(call, "rows_arrived")) == live
        y = torch.empty_like(call.inputs.x)
        combine_slots(y, None, None, *args)
        times = (call.true.row_of_slot >= 0).sum(1, keepdim=True)
        assert same_values(y, call.inputs.x * times)


@on_cpu
@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_that_has_not_arrived_is_waited_for(rank):
    """All have been pushed here, so a count that is behind stands for a row that is on its way."""
    call = call_of(ids_of(5, 2, 2), (2, 3), 2)
    push(whole(call.problem.R, 5), None, call.problem, call.memory, call.plan)
    call.memory.view(rank, "rows_arrived").sub_(1)
    y, dw = torch.empty_like(call.inputs.x), torch.empty_like(call.inputs.topk_weights)
    combine_slots(y, dw, None, call.problem, call.memory, call.plan)
    assert y.isnan().all()
    happened = what_happened(call.memory.view(0, "page"))
    assert "rank 0 waited in vain for rows of its tokens in call 1" in happened
    assert torch.equal(call.memory.view(0, "page")[:6], call.memory.view(1, "page")[:6])  # and all are told


def test_rows_as_tokens_of_their_own():
    plan = routing.plan(torch.tensor([[1, -1], [0, 1]], device=DEVICE), 2)
    own = as_tokens(plan.row_start, len(plan.token_of_row))
    assert torch.equal(own.row_start, plan.row_start) and own.token_of_row.tolist() == [0, 1, 2, 3]
    assert own.slot_of_row.tolist() == [0] * 4 and own.row_of_slot.tolist() == [[0], [1], [2], [3]]
    assert all(t.dtype == torch.int32 for t in own)
