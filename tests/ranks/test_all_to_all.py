"""One process a rank, over torch.distributed: rows are exchanged by all_to_all, and a layer computes what one process
computes, to the bit. Ranks that do not belong together all say so, and go on."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import DIFFERENTIABLE, assert_same, layer, on_cpu, reroute, run, same_bits, train
from forked import no_fork_warning, on_ranks, share, together, what
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mega_moe import MoE, moe
from mega_moe.exchange import MESSAGE_BYTES, Call, agree, all_to_all, by_expert, difference
from mega_moe.registry import stage
from mega_moe.routing import plan as plan_of
from mega_moe.shapes import Grads, Inputs, Problem

pytestmark = [
    on_cpu,  # processes are forked, which a process that has used a GPU does not survive
    no_fork_warning,
]

# Forks.


def test_ranks_do_not_collect_what_is_garbage_here(tmp_path):
    """A process group of this process in a cycle, as a module keeps it. The threads that its end waits for are here."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cycle = [dist.group.WORLD]
    cycle.append(cycle)
    dist.destroy_process_group()
    del cycle
    on_ranks(1, lambda rank: gc.collect(), tmp_path)


# Rows there and back.


def test_by_expert_example():
    row_start, arrival_of_row = by_expert(torch.tensor([[1, 2], [1, 0]], dtype=torch.int32), 4)
    assert row_start.tolist() == [0, 2, 4] and row_start.dtype == torch.int32
    assert arrival_of_row.tolist() == [0, 3, 1, 2]


def routings(W: int, number: int) -> list[tuple[list[Tensor], int]]:
    """Random ids of each rank, and how many experts there are: ranks without tokens, masked routes, ids that are no
    expert, the same expert twice, all routes to one expert, more routes for a token than experts on a rank."""
    generator = torch.Generator().manual_seed(W)
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)
    made = []
    for n in range(number):
        E, K, most = W * int(draw(1, 4)), int(draw(1, 6)), [1, 9][n % 2]
        ids = [draw(-1, E + 1, int(draw(0, most + 1)), K).to([torch.int32, torch.int64][n % 3 % 2]) for _ in range(W)]
        made.append(([each.clamp(E - 1, E - 1) if n % 5 == 4 else each for each in ids], E))
    return made


def there_and_back(ids: list[Tensor], E: int, group: dist.ProcessGroup | None) -> None:
    """Every row names the route that it serves, and so says whether it is where it should be."""
    rank, L = dist.get_rank(group), E // len(ids)
    plan = plan_of(ids[rank], E)
    exchange = agree(plan, group or dist.group.WORLD)
    token, slot = (of_row[: sum(exchange.sent)].long() for of_row in (plan.token_of_row, plan.slot_of_row))
    rows = torch.stack((ids[rank][token, slot].long(), torch.full_like(token, rank), token, slot), 1)

    slots = [(home, t, k) for home, its in enumerate(ids) for t in range(len(its)) for k in range(its.shape[1])]
    routes = sorted([int(ids[home][t, k]), home, t, k] for home, t, k in slots)
    mine = [route for route in routes if rank * L <= route[0] < rank * L + L]
    assert exchange.dispatch(rows).tolist() == mine
    starts = [sum(route[0] < rank * L + e for route in mine) for e in range(L + 1)]
    assert exchange.row_start.tolist() == starts

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.randn(len(rows), 2, 3).to(dtype)
        received = exchange.dispatch(strided(values))
        assert same_bits(exchange.give_back(strided(received)), values)


def strided(rows: Tensor) -> Tensor:
    """The same rows, their columns exchanged in memory."""
    return rows.mT.contiguous().mT


@pytest.mark.parametrize("W", [1, 2, 4])
def test_rows_come_in_the_order_of_one_rank_and_go_home(W, tmp_path, poison):
    def work(rank: int) -> None:
        for ids, E in routings(W, 20):
            there_and_back(ids, E, None)

    on_ranks(W, work, tmp_path)


def test_groups_that_are_not_the_world(tmp_path, poison):
    """A rank's number in its group decides, not that in the world. Two groups at once, one that leaves a rank out, and
    then the world."""

    def work(rank: int) -> None:
        for groups in ([[0, 2], [1, 3]], [[1, 2, 3]], [[3, 1]]):
            made = [dist.new_group(ranks) for ranks in groups]
            for ranks, group in zip(groups, made, strict=True):
                if rank in ranks:
                    for ids, E in routings(len(ranks), 3):
                        there_and_back(ids, E, group)
        there_and_back(*routings(4, 1)[0], None)

    on_ranks(4, work, tmp_path)


# A layer.

CASES = {  # tokens of each rank, E, K, routing, dtype
    "one rank": ((5,), 4, 2, "masked", torch.bfloat16),
    "uneven": ((1, 6), 4, 2, "masked", torch.bfloat16),
    "ranks without tokens": ((0, 4, 0, 2), 4, 2, "any", torch.float32),  # K is more than a rank has experts
    "all on one expert": ((3, 2), 4, 2, "hot", torch.bfloat16),
    "the same expert twice": ((2, 3), 2, 3, "duplicate", torch.float16),
    "all masked": ((2, 3), 2, 2, "all masked", torch.bfloat16),
    "no tokens at all": ((0, 0), 2, 2, "any", torch.float32),
}


def case(name: str) -> tuple[Problem, Inputs, Tensor, tuple[int, ...]]:
    """The layer of a case, and how many tokens each rank has."""
    tokens_per_rank, E, K, routing, dtype = CASES[name]
    problem, inputs, dy = layer(T=sum(tokens_per_rank), E=E, K=K, H=32, I=32, dtype=dtype)
    ids = inputs.topk_ids.fill_(E - 1) if routing == "hot" else reroute(inputs.topk_ids, routing, E)
    inputs = replace(inputs, topk_ids=ids)
    return problem, inputs, dy, tokens_per_rank


def train_rank(inputs: Inputs, dy: Tensor, group: dist.ProcessGroup | None = None, needs=DIFFERENTIABLE):
    """y and the gradients of this rank: moe's own, with its defaults."""
    return train(stage("ranks"), inputs, dy, needs, group=group or dist.group.WORLD, heap="all_to_all")


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_computes(name, tmp_path, poison):
    """y, dx and the router weights' gradients at home; and weight gradients that are sums over all ranks' tokens, with
    no 1/W."""
    problem, inputs, dy, tokens_per_rank = case(name)
    work = lambda rank: train_rank(*share(inputs, dy, tokens_per_rank, rank))
    results = on_ranks(len(tokens_per_rank), work, tmp_path)
    assert_same(together(results), run(stage("persistent"), problem, inputs, dy))


def test_two_groups_at_once_have_a_layer_each(tmp_path, poison):
    """The second and the fourth process are ranks 0 and 1 of theirs, with other tokens than the other group's."""
    problem, inputs, dy, tokens_per_rank = case("uneven")
    layers = [(inputs, dy), (replace(inputs, x=inputs.x.flip(0), topk_ids=inputs.topk_ids.flip(0)), dy.flip(0))]

    def work(process: int) -> tuple[Tensor, Grads]:
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        mine = process % 2
        return train_rank(*share(*layers[mine], tokens_per_rank, process // 2), groups[mine])

    results = on_ranks(4, work, tmp_path)
    for number, its in enumerate(layers):
        assert_same(together(results[number::2]), run(stage("persistent"), problem, *its))


def test_a_rank_that_needs_little_serves_its_peers(tmp_path, poison):
    """Rank 0 asks for one gradient, of its own. Rank 1 still gets its own, which both ranks' experts make."""
    problem, inputs, dy, tokens_per_rank = case("uneven")
    work = lambda rank: train_rank(
        *share(inputs, dy, tokens_per_rank, rank), needs=DIFFERENTIABLE if rank == 1 else ("w_down",)
    )
    (_, of_one), (_, of_all) = on_ranks(2, work, tmp_path)
    _, expected = run(stage("persistent"), problem, inputs, dy)
    assert [name for name, grad in vars(of_one).items() if grad is not None] == ["dw_down"]
    its = slice(tokens_per_rank[0], None)
    assert same_bits(of_all.dx, expected.dx[its]) and same_bits(of_all.dtopk_weights, expected.dtopk_weights[its])
    L = problem.E // 2
    assert same_bits(of_all.dw_gate_up, expected.dw_gate_up[L:]) and same_bits(of_all.dw_down, expected.dw_down[L:])


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_compiled_and_checkpointed_equal_eager(how, tmp_path):
    """Two layers deep, so that the second's backward comes between the first's two directions."""
    _, inputs, dy, tokens_per_rank = case("uneven")

    def work(rank: int) -> bool:
        mine, its_dy = share(inputs, dy, tokens_per_rank, rank)

        def one(x: Tensor, *rest: Tensor) -> Tensor:
            return x + moe(x, *rest, stage="ranks", group=dist.group.WORLD, heap="all_to_all")

        wrapped = (
            torch.compile(one, fullgraph=True, backend="aot_eager")
            if how == "compiled"
            else partial(checkpoint, one, use_reentrant=False)
        )
        results = []
        for layer_of in (one, wrapped):
            leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in vars(mine).values()]
            y = layer_of(layer_of(*leaves), *leaves[1:])
            y.backward(its_dy)
            results.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.is_floating_point())])
        return all(map(same_bits, *results))

    assert on_ranks(2, work, tmp_path) == [True, True]


# Ranks that do not belong together: one of them, the odd one, does otherwise. Nobody waits, and the group goes on.

FEW = dict(E=8, H=16, I=16, K=2)
OTHERS = {  # what the odd rank's layer has of its own; how that rank came, and the others
    "H": (dict(H=8), "with H = 8", "with H = 16"),
    "K": (dict(K=1), "with K = 1", "with K = 2"),
    "fewer experts": (dict(E=4), "with E = 4", "with E = 8"),
    "more experts": (dict(E=12), "with E = 12", "with E = 8"),
    "dtype": (dict(dtype=torch.float16), "with dtype = torch.float16", "with dtype = torch.bfloat16"),
    "I": (dict(I=17), "with I = 17", "with I = 16"),
    "two facts": (dict(H=8, K=3), "with H = 8, with K = 3", "with H = 16, with K = 2"),
}
CLAMPED = ("with swiglu_limit = 2.5", "with swiglu_limit = None")
LIKE_X = ("with weights_dtype = torch.bfloat16", "with weights_dtype = torch.float32")
WRONG = {  # who refuses the odd rank's arguments, and what is raised there
    "moe": "TypeError: w_down is torch.float16 and x is torch.bfloat16",
    "the operator": "ValueError: topk_ids[0, 0] is 8: ids are 0 .. 7",
    "the stage": "RuntimeError: all_to_all counts rows while it runs",
    "the ladder": "ValueError: stage='none': the stages are",
    "the module": "ValueError: x must be (..., hidden_size) = (..., 16), not of shape (3, 8)",
}


def of_rank(rank: int, W: int, **changes) -> tuple[Inputs, Tensor]:
    """What a rank with one token holds of a layer."""
    _, inputs, dy = layer(T=W, **(FEW | changes))
    return share(inputs, dy, (1,) * W, rank)


def call(inputs: Inputs, **options) -> Tensor:
    """y of this rank."""
    return moe(**vars(inputs), **(dict(stage="ranks", group=dist.group.WORLD, heap="all_to_all") | options))


def wrong_call(name: str, inputs: Inputs) -> Tensor:
    """One that is refused."""
    match name:
        case "moe":
            return call(replace(inputs, w_down=inputs.w_down.half()))
        case "the operator":
            return call(replace(inputs, topk_ids=inputs.topk_ids + 8 - inputs.topk_ids[0, 0]))
        case "the stage":
            return call(replace(inputs, x=inputs.x.clone().requires_grad_()), save="pre")
        case "the ladder":
            return call(inputs, stage="none")
        case "the module":
            return MoE(16, 16, 8, 2, group=dist.group.WORLD, heap="all_to_all")(torch.zeros(3, 8))


def assert_all_say(texts: tuple[str, ...], odd: int, its: str, of_others: str) -> None:
    """What ranks have raised: that the odd one came otherwise than rank 0 and the rest."""
    others = ", ".join(str(rank) for rank in range(len(texts)) if rank != odd)
    came = f"rank {odd} came {its} where rank {others} came {of_others}"
    assert set(texts) == {f"RuntimeError: {came}: all ranks must make the same calls in the same order"}


def said_and_then_right(
    W: int, work: Callable[[int, Inputs, Tensor], list[str]], folder: Path
) -> list[tuple[str, ...]]:
    """What all ranks have raised each time, where work(rank, inputs, dy) returns it of one rank. In the end they
    compute the layer of these inputs together, which must be right to the bit."""
    problem, inputs, dy = layer(T=W, **FEW)
    expected = run(stage("persistent"), problem, inputs, dy)  # first, so that forks need not import kernels

    def work_on(rank: int) -> tuple[list[str], tuple[Tensor, Grads]]:
        mine = of_rank(rank, W)
        return work(rank, *mine), train_rank(*mine)

    said, results = zip(*on_ranks(W, work_on, folder), strict=True)
    assert_same(together(results), expected)
    return list(zip(*said, strict=True))


def test_differences_are_told_of_ranks_that_came_alike():
    came = [Call(8, 32), Call(8, 32, of_call=5), Call(4, 16), Call(8, 32, of_call=5)]
    expected = (
        "rank 1, 3 came for backward of call 5 where rank 0 came for forward; "
        "rank 2 came with E = 4, with H = 16 where rank 0 came with E = 8, with H = 32: all ranks must"
    )
    assert difference(came).startswith(expected)


@pytest.mark.parametrize("W", [2, 4])
def test_ranks_that_come_with_other_layers_all_say_so(W, tmp_path):
    """Before they have agreed on anything, and later, when a block has room for counts."""
    odd = W // 2

    def work(rank: int, mine: Inputs, _: Tensor) -> list[str]:
        like_x = replace(mine, topk_weights=mine.topk_weights.bfloat16())
        others = [*(of_rank(rank, W, **changes)[0] for changes, *_ in OTHERS.values()), like_x]

        def meet_them() -> list[str]:
            said = [what(call, other if rank == odd else mine) for other in others]
            return [*said, what(call, mine, swiglu_limit=2.5 if rank == odd else None)]

        first = meet_them()
        call(mine)
        return first + meet_them()

    ways = [*(ways for _, *ways in OTHERS.values()), LIKE_X, CLAMPED]
    for texts, way in zip(said_and_then_right(W, work, tmp_path), 2 * ways, strict=True):
        assert_all_say(texts, odd, *way)


@pytest.mark.parametrize("W", [2, 4])
def test_ranks_that_come_in_other_directions_all_say_so(W, tmp_path):
    """One goes back where the others go forward, and the other way round; or back through another layer than they, or
    through another call of the same layer."""
    odd = W // 2
    ways = [("backward", "forward"), ("forward", "backward"), ("backward of H = 8", "backward"), ("again", "backward")]

    def work(rank: int, mine: Inputs, dy: Tensor) -> list[str]:
        narrow, narrow_dy = of_rank(rank, W, H=8)
        y, narrow_y, again = (call(replace(each, x=each.x.clone().requires_grad_())) for each in (mine, narrow, mine))
        steps = {
            "forward": partial(call, mine),
            "backward": partial(y.backward, dy, retain_graph=True),
            "backward of H = 8": partial(narrow_y.backward, narrow_dy),
            "again": partial(again.backward, dy),
        }
        return [what(steps[way[0] if rank == odd else way[1]]) for way in ways]

    said = said_and_then_right(W, work, tmp_path)
    back = "for backward of call"
    expected = [
        (f"{back} 1", "for forward"),
        ("for forward", f"{back} 1"),
        (f"{back} 2, with H = 8", f"{back} 1, with H = 16"),
        (f"{back} 3", f"{back} 1"),
    ]
    for texts, way in zip(said, expected, strict=True):
        assert_all_say(texts, odd, *way)


@pytest.mark.parametrize("W", [2, 4])
def test_a_rank_that_is_refused_tells_the_others(W, tmp_path):
    """Whoever refuses it; the other ranks may have come with more experts than there is room for. In the end rank 0 is
    refused as well, for another reason."""
    odd = W // 2

    def work(rank: int, mine: Inputs, _: Tensor) -> list[str]:
        larger, _ = of_rank(rank, W, E=12)
        made = [*((name, mine) for name in WRONG), ("moe", larger)]
        wrong = {0: "the ladder", odd: "the operator"}.get(rank)

        def hear_them() -> list[str]:
            said = [what(wrong_call, name, mine) if rank == odd else what(call, other) for name, other in made]
            return [*said, what(wrong_call, wrong, mine) if wrong else what(call, mine)]

        first = hear_them()
        call(mine)
        return first + hear_them()

    said = said_and_then_right(W, work, tmp_path)
    reason = lambda rank, texts: f"rank {rank}: {texts[rank].partition(': ')[2]}"
    for texts, name in zip(said, 2 * [*WRONG, "moe", "both"], strict=True):
        if name == "both":
            assert texts[0].startswith(WRONG["the ladder"]) and texts[odd].startswith(WRONG["the operator"])
            heard, others = f"{reason(0, texts)}; {reason(odd, texts)}", set(range(W)) - {0, odd}
        else:
            assert texts[odd].startswith(WRONG[name])
            heard, others = reason(odd, texts), set(range(W)) - {odd}
        assert all(texts[rank] == f"RuntimeError: {heard}" for rank in others)


def test_a_long_message_is_cut_between_letters(tmp_path):
    long = "x" + "\u00e9" * MESSAGE_BYTES
    say = lambda rank: all_to_all(dist.group.WORLD, torch.device("cpu")).messages(["", long][rank])
    assert on_ranks(2, say, tmp_path) == [["", long[: MESSAGE_BYTES // 2]]] * 2


def test_what_cannot_run_says_why():
    problem, _, _ = layer()
    assert 'save="inputs"' in stage("ranks").why_not(problem.at(save="pre", ranks=1))
    assert 'stage="ranks"' in stage("mega").why_not(problem.at(save="inputs", ranks=1))
