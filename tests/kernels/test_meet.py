"""Ranks meet: each one's tokens stand in its heap, and the plan is that of all tokens, whoever draws which ticket."""

import itertools
import re

import pytest
import torch
from cases import DEVICE, framed, on_cpu, same_bits, transposed
from torch import Tensor

from mega_moe import LocalHeaps, routing
from mega_moe.kernels import schedule, signal
from mega_moe.kernels.blocks import routes
from mega_moe.kernels.meet import meet
from mega_moe.shapes import Inputs, Plan, Problem
from mega_moe.symmetric import Memory

LAST = 2**31 - 1  # the largest call number there is; behind it comes the smallest


@pytest.fixture(autouse=True)
def watched_addresses():
    """Not watched: a heap is reached by its address, and is no argument of the kernel."""


@pytest.fixture(autouse=DEVICE == "cpu")
def impatient(monkeypatch):
    """In one process a wait is over at the first look, or never."""
    monkeypatch.setattr(signal, "MOST_POLLS", type(signal.MOST_POLLS)(10))


def ids_of(T: int, K: int, E: int, seed: int = 0) -> Tensor:
    """Random ids with every fifth route masked; the same expert may come twice in a token."""
    ids = torch.randint(E, (T, K), generator=torch.Generator().manual_seed(seed))
    ids.flatten()[::5] = -1
    return ids.to(DEVICE)


def tokens_of(ids: Tensor, E: int, H: int = 5, dtype=torch.float32, weights=torch.float32) -> tuple[Inputs, Tensor]:
    """Tokens that are all different, of layers with these ids, and dy."""
    (T, K), numbers = ids.shape, lambda *shape: torch.arange(1, 1 + shape[0] * shape[1], device=DEVICE).view(shape)
    x, dy, topk_weights = numbers(T, H) % 251, -numbers(T, H) % 241, numbers(T, K) % 256
    w_gate_up = torch.empty(E, 2, 1, H, dtype=dtype, device=DEVICE)  # of which only the shape matters here
    return Inputs(x.to(dtype), ids, topk_weights.to(weights), w_gate_up, w_gate_up[:, 0].mT), dy.to(dtype)


def met(heap: LocalHeaps, tokens_per_rank: tuple[int, ...], inputs: Inputs, dy: Tensor | None) -> tuple[Memory, Plan]:
    """What a meeting makes."""
    problem = inputs.problem(heap=heap.key, tokens_per_rank=tokens_per_rank)
    memory, plan, *_ = meet(problem, inputs, dy)
    return memory, plan


def assert_planned(plan: Plan, ids: Tensor, tokens_per_rank: tuple[int, ...], E: int, max_tokens: int) -> None:
    """The plan is that of all tokens, but for the numbers of tokens and what row_of_slot counts in."""
    specified = routing.plan(ids, E)
    numbers = [rank * max_tokens + token for rank, T in enumerate(tokens_per_rank) for token in range(T)]
    numbers = torch.tensor([*numbers, -1], dtype=torch.int32, device=DEVICE)  # the last, -1, stays -1
    of_homes = [routing.plan(part, E).row_of_slot for part in ids.split(tokens_per_rank)]
    expected = specified._replace(token_of_row=numbers[specified.token_of_row], row_of_slot=torch.cat(of_homes))
    for name, got, right in zip(plan._fields, plan, expected, strict=True):
        assert got.dtype == torch.int32 and torch.equal(got, right), name


def assert_published(memory: Memory, call: int, inputs: Inputs, dy: Tensor | None, tokens_per_rank) -> None:
    """Every rank's tokens and their own plan, in the buffer of this call and not beyond; and everybody was counted."""
    views = dict(x=inputs.x, topk_weights=inputs.topk_weights) | (dict(dy=dy) if dy is not None else {})
    E = inputs.w_gate_up.shape[0]
    for rank, ids in enumerate(inputs.topk_ids.split(tokens_per_rank)):
        view = lambda name, rank=rank: memory.view(rank, name)
        assert view("call").tolist() == [call] and view("flags").tolist() == [call] * memory.layout.W
        assert view("rows_arrived").tolist() == [0]
        for name, tokens in views.items():
            assert same_bits(view(name)[call & 1, : len(ids)], tokens.split(tokens_per_rank)[rank]), name
            assert view(name)[call & 1, len(ids) :].isnan().all(), name
        own = routing.plan(ids, E)
        assert torch.equal(view("row_start")[call & 1], own.row_start)
        for name in ("token_of_row", "slot_of_row"):
            assert torch.equal(view(name)[call & 1, : ids.numel()], getattr(own, name)), name


def assert_met(ids: Tensor, tokens_per_rank: tuple[int, ...], E: int, backward: bool = False, **facts) -> None:
    """The first meeting on fresh heaps, with room for one token more than any rank has."""
    heap = LocalHeaps(len(tokens_per_rank), max(tokens_per_rank) + 1)
    inputs, dy = tokens_of(ids, E, **facts)
    memory, plan = met(heap, tokens_per_rank, inputs, dy if backward else None)
    assert_planned(plan, ids, tokens_per_rank, E, heap.max_tokens)
    assert_published(memory, 1, inputs, dy if backward else None, tokens_per_rank)
    assert all(not words.any() for words in schedule.KEPT.values())


def test_example(framed_memory):
    heap, ids = LocalHeaps(ranks=2, max_tokens=4), torch.tensor([[1], [1]], device=DEVICE)
    _, plan = met(heap, (1, 1), tokens_of(ids, 2)[0], None)
    assert plan.row_start.tolist() == [0, 0, 2]
    assert plan.token_of_row.tolist() == [0, 4] and plan.slot_of_row.tolist() == [0, 0]


@pytest.mark.parametrize(
    "tokens_per_rank", [(7,), (4, 3), (7, 0), (0, 7), (2, 4, 1), (3, 0, 1, 3), (0, 0, 0, 0), (0, 0, 7, 0)], ids=str
)
def test_tokens_spread_over_ranks(tokens_per_rank, framed_memory):
    E = 6 if len(tokens_per_rank) == 3 else 4
    assert_met(ids_of(sum(tokens_per_rank), 3, E), tokens_per_rank, E, backward=True)


@pytest.mark.parametrize("fill", ["one expert", "last expert", "all masked", "empty experts", "duplicates", "outside"])
def test_uneven_routings(fill, framed_memory):
    ids = ids_of(9, 2, 4)
    if fill == "one expert":
        ids.fill_(1)
    elif fill == "last expert":
        ids.fill_(3)
    elif fill == "all masked":
        ids.fill_(-1)
    elif fill == "empty experts":
        ids = ids // 2 * 2
    elif fill == "duplicates":
        ids[:, 1] = ids[:, 0]
    elif fill == "outside":
        ids[::2, 0] = torch.tensor([4, 2**32, -2, 2**40, -(2**63)], device=DEVICE)
    assert_met(ids, (5, 4), 4)


@pytest.mark.parametrize("T, K, E, W", [(5, 6, 2, 2), (1, 1, 1, 1), (6, 3, 64, 1), (5, 2, 32, 2), (3, 5, 15, 3)])
def test_experts_and_routes_of_any_number(T, K, E, W, framed_memory):
    assert_met(ids_of(T, K, E), (T - W + 1, *[1] * (W - 1)), E)


@pytest.mark.parametrize("extra", [0, 1])
def test_routes_over_several_chunks_of_which_some_ranks_fill_fewer(extra, framed_memory):
    """More routes than a rank's tokens are copied, counted and planned in at once."""
    size = routes().BLOCK
    assert_met(ids_of(2 * size + extra + 17, 1, 3), (17, 2 * size + extra, 0), 3, H=70)


@pytest.mark.parametrize(
    "lay_out", [transposed, lambda t: framed(t, gap=3, offset=1), lambda t: t[:, :1].expand(-1, t.shape[1])]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_strides_and_either_width_of_ids(lay_out, dtype, framed_memory):
    ids = lay_out(ids_of(6, 2, 4).to(dtype))
    inputs, dy = tokens_of(ids, 4)
    laid_out = Inputs(lay_out(inputs.x), ids, lay_out(inputs.topk_weights), inputs.w_gate_up, inputs.w_down)
    memory, plan = met(LocalHeaps(2, 4), (2, 4), laid_out, lay_out(dy))
    assert_planned(plan, ids, (2, 4), 4, 4)
    assert_published(memory, 1, laid_out, lay_out(dy), (2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves(dtype, framed_memory):
    assert_met(ids_of(6, 2, 4), (2, 4), 4, backward=True, dtype=dtype, weights=dtype)


@on_cpu
@pytest.mark.parametrize("programs", [1, 2, 5, 40])
def test_any_number_of_programs(programs, framed_memory, monkeypatch):
    monkeypatch.setattr("mega_moe.kernels.meet.programs", lambda resident: programs)
    assert_met(ids_of(7, 2, 2), (3, 4), 2, backward=True)


def test_without_heaps_a_rank_meets_itself(framed_memory):
    ids = ids_of(7, 2, 4)
    inputs, dy = tokens_of(ids, 4)
    memory, plan, *_ = meet(inputs.problem(), inputs, dy)
    assert all(torch.equal(got, right) for got, right in zip(plan, routing.plan(ids, 4), strict=True))
    assert_published(memory, 1, inputs, dy, (7,))


# One meeting after another.


@pytest.mark.parametrize("start", [0, LAST - 1, LAST])
def test_calls_are_counted_and_buffers_alternate(start):
    """Also where the call number wraps. A peer may still read what was published a call ago: it is not touched."""
    heap, before = LocalHeaps(2, 5), None
    for n, (tokens_per_rank, E) in enumerate([((2, 3), 2), ((5, 0), 2), ((0, 1), 2), ((1, 4), 2)]):
        T = sum(tokens_per_rank)
        inputs, dy = tokens_of(ids_of(T, 2, E, seed=n), E)
        memory, plan = met(heap, tokens_per_rank, inputs, dy)
        assert_planned(plan, inputs.topk_ids, tokens_per_rank, E, 5)
        call = (start + n + 2**31) % 2**32 - 2**31 if n else 1
        for rank, T in enumerate(tokens_per_rank):
            assert memory.view(rank, "call").tolist() == [call] and memory.view(rank, "flags").tolist() == [call] * 2
            assert same_bits(memory.view(rank, "x")[call & 1, :T], inputs.x.split(tokens_per_rank)[rank])
            assert same_bits(memory.view(rank, "dy")[call & 1, :T], dy.split(tokens_per_rank)[rank])
        if n == 0:  # let it be call number `start`, whose parity its buffers have
            for rank, name in itertools.product(range(2), ("call", "flags")):
                memory.view(rank, name).fill_(start)
        elif n > 1:
            assert torch.equal(other_buffers(memory, call), before)
        before = other_buffers(memory, call + 1)
    assert all(not words.any() for words in schedule.KEPT.values())


def other_buffers(memory: Memory, call: int) -> Tensor:
    """What all ranks published in the call before this one, as bytes."""
    views = [v for name in ("x", "dy", "topk_weights", "row_start", "token_of_row") for v in views_of(memory, name)]
    return torch.cat([view[(call + 1) & 1].flatten().view(torch.uint8) for view in views])


def views_of(memory: Memory, name: str) -> list[Tensor]:
    return [memory.view(rank, name) for rank in range(memory.layout.W)]


@on_cpu
@pytest.mark.parametrize("late, by", [(1, 1), (1, 3), (0, 1)])
def test_a_rank_that_has_not_arrived_is_waited_for(late, by):
    """All arrive in one launch here, so a flag that is behind stands for a rank that is late."""
    heap, (inputs, _) = LocalHeaps(2, 4), tokens_of(ids_of(4, 2, 2), 2)
    memory, _ = met(heap, (2, 2), inputs, None)
    memory.view(0, "flags")[late] -= by
    _, plan = met(heap, (2, 2), inputs, None)
    message = f"rank 0 waited in vain for rank {late} at call 2 ({2 - by} of 2 arrivals)"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        heap.check()
    assert plan.row_start.tolist() == [0, -1, -2] and (plan.token_of_row == -1).all()  # less than no rows
    assert all(not words.any() for words in schedule.KEPT.values())


def test_layers_of_different_kinds_have_heaps_of_their_own():
    heap, calls = LocalHeaps(2, 4), {}
    kinds = [(2, 5, torch.float32), (4, 5, torch.float32), (2, 6, torch.float32), (2, 5, torch.bfloat16)]
    for E, H, dtype in kinds * 2:
        inputs, _ = tokens_of(ids_of(4, 2, E), E, H=H, dtype=dtype)
        memory, _ = met(heap, (1, 3), inputs, None)
        calls[memory.heaps.data_ptr()] = memory.view(0, "call").item()
    assert list(calls.values()) == [2] * 4


def test_a_problem_has_the_heaps_that_its_key_names():
    """And two heaps of the same size do not share memory."""
    inputs, _ = tokens_of(ids_of(4, 2, 2), 2)
    memories = [met(heap, (1, 3), inputs, None)[0] for heap in [LocalHeaps(2, 4) for _ in range(2)]]
    assert [memory.view(1, "call").item() for memory in memories] == [1, 1]
    assert len({memory.heaps.data_ptr() for memory in memories}) == 2
    with pytest.raises(RuntimeError, match="keep a reference to them"):
        meet(Problem(4, 5, 1, 2, 2, torch.float32, DEVICE, heap=10**9, tokens_per_rank=(1, 3)), inputs)
