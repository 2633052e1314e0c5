"""What goes wrong in layers over ranks elsewhere, each a fault that somebody reported: with a process for each rank,
through heaps and by all_to_all, none of it does."""

import ast
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import assert_same, layer, on_cpu, run, train
from forked import no_fork_warning, on_ranks, share, together, what
from torch import Tensor

from mega_moe import MoE, ShmHeaps, moe
from mega_moe.kernels import signal
from mega_moe.registry import stage
from mega_moe.shapes import Grads, Inputs, Problem
from mega_moe.symmetric import Layout

pytestmark = [
    on_cpu,  # processes are forked, which a process that has used a GPU does not survive
    no_fork_warning,
]


def both_ways(max_tokens: int) -> dict[str, dict]:
    """How ranks may meet, by stage: through new heaps, or by all_to_all."""
    heaps = ShmHeaps(None, max_tokens, timeout_s=20)
    return dict(mega=dict(heap=heaps), ranks=dict(group=dist.group.WORLD, heap="all_to_all"))


# Numbers of tokens, routes and experts.

LAYERS = {  # tokens of each rank, E, topk_ids or K, most tokens of a rank
    # Of the rows that there can be, all on one rank; the other has tokens, and its experts get nothing.
    "all routes to one rank": ((3, 3), 4, [[0, 1], [1, 1], [0, 0]] * 2, 3),
    "a rank that neither sends nor gets anything": ((2, 3), 4, [[0, 1], [1, -1]] + [[-1, -1]] * 3, 3),
    "one token for all ranks, fewer routes than experts": ((1, 0), 16, 8, 1),
    "one token for each rank": ((1, 1), 2, [[1], [0]], 1),
    "a route of every token on each rank": ((3, 2), 4, [[0, 2], [3, 1], [1, 3], [2, 0], [0, 3]], 3),
    "the many tokens of one rank go to the other, which has one": ((1, 64), 2, [[0]] * 65, 64),
    "one expert a rank, in room for many rows": ((2, 1), 2, [[0, 1], [-1, 0], [1, -1]], 10),
    "more routes than all experts": ((1, 1), 4, [[3, 3, -1, 3, 2, 2], [0, 1, 2, 3, -1, 0]], 1),
}


def made(tokens_per_rank: tuple[int, ...], E: int, routes: list | int) -> tuple[Problem, Inputs, Tensor]:
    """The layer of a row of the tables, and dy."""
    sizes = dict(E=E, H=16, I=16)
    return layer(T=sum(tokens_per_rank), K=routes, **sizes) if isinstance(routes, int) else layer(routes, **sizes)


def test_sizes_that_leave_a_rank_with_much_or_nothing(tmp_path, poison):
    """Each as one process computes it. Heaps hold as many tokens as a rank has and not one more, unless told so."""
    whole = {name: made(*row[:3]) for name, row in LAYERS.items()}

    def work(rank: int) -> dict[str, list[tuple[Tensor, Grads]]]:
        results = {}
        for name, (tokens_per_rank, _, _, most) in LAYERS.items():
            mine = share(*whole[name][1:], tokens_per_rank, rank)
            results[name] = [train(stage(way), *mine, **options) for way, options in both_ways(most).items()]
        return results

    ranks = on_ranks(2, work, tmp_path)
    for name, its in whole.items():
        expected = run(stage("persistent"), *its)
        for results in zip(*(of_rank[name] for of_rank in ranks), strict=True):
            assert_same(together(list(results)), expected)


def test_the_same_tokens_over_one_rank_and_over_two(tmp_path, poison):
    """No gradient is larger or smaller by the number of ranks, and none lacks what another rank's experts add to it."""
    problem, inputs, dy = layer([[0, 2], [3, 1], [-1, 3]], E=4, H=16, I=16)

    def work(process: int) -> list[tuple[Tensor, Grads]]:
        alone = [dist.new_group([rank]) for rank in range(2)][process]
        over_one = train(stage("mega"), inputs, dy, group=alone)
        return [over_one, train(stage("mega"), *share(inputs, dy, (2, 1), process), group=dist.group.WORLD)]

    expected = run(stage("persistent"), problem, inputs, dy)
    (one, its), (other, others) = on_ranks(2, work, tmp_path)
    for got in (one, other, together([its, others])):
        assert_same(got, expected)


def test_every_id_means_the_same_expert_on_every_rank(tmp_path):
    """Each rank sends a token to each expert of all ranks, and an expert's output is its number."""
    E = 6
    _, inputs, _ = layer(T=2 * E, E=E, K=2, H=16, I=16, dtype=torch.float32)
    x, scores = torch.zeros(2 * E, 16), torch.tensor([1.0, 100.0]).expand(2 * E, 2)
    ids = torch.stack((torch.arange(2 * E) % E, torch.arange(2 * E).flip(0) // 2), 1)
    x[:, 0] = 32  # whose sigmoid is 1 in fp32
    w_gate_up, w_down = torch.zeros_like(inputs.w_gate_up), torch.zeros_like(inputs.w_down)
    w_gate_up[:, :, 0, 0] = 1
    w_down[:, :, 0] = torch.arange(E)[:, None] / 32**2
    whole = Inputs(x, ids, scores, w_gate_up, w_down)

    def work(rank: int) -> list[Tensor]:
        mine, _ = share(whole, x, (E, E), rank)
        return [moe(**vars(mine), stage=way, **options) for way, options in both_ways(E).items()]

    for results in zip(*on_ranks(2, work, tmp_path), strict=True):
        assert torch.equal(torch.cat(results), (ids[:, 0] + 100.0 * ids[:, 1])[:, None].expand(-1, 16))


@pytest.mark.parametrize("way", ["heaps", "all_to_all"])
def test_experts_that_ranks_cannot_share_evenly_are_an_error_on_all(way, tmp_path):
    """Not a rest that the last rank gets, and no rank without any. What is right then, goes on."""
    _, inputs, _ = layer(T=4, E=6, K=1, H=16, I=16)
    sizes = dict(hidden_size=16, intermediate_size=16, top_k=1)
    experts = (slice(0, 3), slice(3, 5)), (slice(0, 1), slice(1, 1)), (slice(0, 3), slice(3, 6))

    def work(rank: int) -> list[str]:
        tokens = slice(2 * rank, 2 * rank + 2)
        of_tokens = {name: getattr(inputs, name)[tokens] for name in ("x", "topk_weights")}
        options = of_tokens | dict(topk_ids=inputs.topk_ids[tokens].clamp(max=0), group=dist.group.WORLD)
        options |= dict(heap=None if way == "heaps" else way)
        *wrong, right = [(inputs.w_gate_up[its[rank]], inputs.w_down[its[rank]]) for its in experts]
        call = lambda w_gate_up, w_down: moe(w_gate_up=w_gate_up, w_down=w_down, **options)
        raised = [what(call, *weights) for weights in wrong]
        assert call(*right).isfinite().all()
        return [*raised, *(what(MoE, **sizes, num_experts=E, group=dist.group.WORLD) for E in (5, 1))]

    uneven = {"heaps": "E is 6 on rank 0, 4 on rank 1", "all_to_all": "with E = 4 where rank 0 came with E = 6"}
    for rank, (rest, none, *modules) in enumerate(on_ranks(2, work, tmp_path)):
        assert uneven[way] in rest
        assert none.startswith("ValueError: E = 0" if rank else "RuntimeError: rank 1: E = 0")
        for E, said in zip((5, 1), modules, strict=True):
            assert said.startswith("ValueError")
            assert f"num_experts = {E} cannot be split evenly over the 2 ranks" in said


# Memory.


@pytest.mark.parametrize("H, K, size", [(1024, 2, 2), (512, 8, 4)])
def test_a_heap_is_as_large_as_its_formula_for_any_number_of_ranks(H, K, size):
    """(4 + K) * H elements a token: x and dy twice, and a slot for each route. Ranks add no more than their flags. What
    is beside that is seven numbers for each route: token, slot and weight, each twice, and its weight's gradient."""
    dtype, tokens = {2: torch.bfloat16, 4: torch.float32}[size], 1024
    heaps = [Layout(W, tokens, H, K, 64, dtype, torch.float32, 1).bytes for W in (1, 2, 8, 64)]
    formula = (4 + K) * H * tokens * size
    assert max(heaps) - min(heaps) <= 256  # a flag for each rank
    assert all(formula < bytes <= formula + tokens * K * 4 * 7 + 16 * 256 for bytes in heaps)


# Time.


def test_a_rank_may_come_late_to_its_first_call(tmp_path):
    """It still compiles, say. The others wait, where heaps are made and where rows are sent."""
    problem, inputs, dy = layer([[0, 1], [1, 0]], E=2, H=16, I=16)

    def work(rank: int) -> list[tuple[Tensor, Grads]]:
        results = []
        for way, heap in dict(mega=None, ranks="all_to_all").items():
            time.sleep(1.5 * rank)
            results.append(train(stage(way), *share(inputs, dy, (1, 1), rank), group=dist.group.WORLD, heap=heap))
        return results

    expected = run(stage("persistent"), problem, inputs, dy)
    for results in zip(*on_ranks(2, work, tmp_path), strict=True):
        assert_same(together(list(results)), expected)


# What a machine without two GPUs cannot see.

TEXT = Path(signal.__file__).read_text().partition("[start:ranks]")[2].partition("# --8<-- [end:ranks]")[0]
BETWEEN_RANKS = {node.name: node for node in ast.parse(TEXT).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", BETWEEN_RANKS)
def test_between_ranks_a_flag_is_not_seen_before_the_bytes_it_stands_for(name):
    """What says something to another GPU releases at sys scope, behind a barrier of all threads; who looks at it
    acquires at sys scope, in front of one."""
    called = [node for node in ast.walk(BETWEEN_RANKS[name]) if isinstance(node, ast.Call)]
    barriers = [call.lineno for call in called if ast.unparse(call.func) == "tl.debug_barrier"]
    for call in called:
        if ast.unparse(call.func).startswith("tl.atomic"):
            words = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg in ("sem", "scope")}
            assert words["scope"] == "sys" and words["sem"] in ("release", "acquire", "acq_rel")
            assert words["sem"] == "release" or any(line > call.lineno for line in barriers)
            assert words["sem"] != "release" or any(line < call.lineno for line in barriers)


def test_there_are_functions_between_ranks_to_look_at():
    assert {"arrive", "wait_for_ranks", "record"} <= set(BETWEEN_RANKS)
