"""One process a rank, over heaps: a layer computes what one process computes, to the bit, whatever the ranks hold and
whenever they come; and who fails ends the others' calls."""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import DIFFERENTIABLE, assert_same, layer, on_cpu, run, same_bits, train
from forked import no_fork_warning, on_ranks, share, together, what
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from mega_moe import MoE, ShmHeaps, moe
from mega_moe.processes import heaps_for
from mega_moe.registry import stage
from mega_moe.shapes import SAVES, Grads, Inputs, Problem

pytestmark = [
    on_cpu,  # processes are forked, which a process that has used a GPU does not survive
    no_fork_warning,
]

CASES = {  # tokens of each rank, E, routing, dtype
    "uneven": ((1, 6), 4, "masked", torch.bfloat16),
    "ranks without tokens": ((0, 4, 0, 2), 4, "any", torch.float32),  # K is more than a rank has experts
    "no tokens at all": ((0, 0), 2, "any", torch.float32),
}


def case(name: str) -> tuple[Problem, Inputs, Tensor, tuple[int, ...]]:
    """The layer of a case, and how many tokens each rank has."""
    tokens_per_rank, E, routing, dtype = CASES[name]
    problem, inputs, dy = layer(T=sum(tokens_per_rank), E=E, K=2, H=32, I=32, dtype=dtype)
    if routing == "masked":
        inputs.topk_ids.flatten()[::3] = -1
    return problem, inputs, dy, tokens_per_rank


def world() -> ProcessGroup:
    """The group of all ranks."""
    return dist.group.WORLD


def in_one_process(problem: Problem, inputs: Inputs, dy: Tensor) -> tuple[Tensor, Grads]:
    """What the ranks must compute."""
    return run(stage("persistent"), problem, inputs, dy)


def leaves_of(inputs: Inputs) -> list[Tensor]:
    """moe's five tensors as fresh leaves."""
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in vars(inputs).values()]


def grads_of(leaves: list[Tensor]) -> Grads:
    """Their gradients."""
    return Grads(*(leaf.grad for leaf in leaves if leaf.is_floating_point()))


# What ranks compute.


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_computes(over_ranks, name, tmp_path, poison):
    """y, dx and the router weights' gradients at home; and weight gradients that are sums over all ranks' tokens, with
    no 1/W. With the heaps of the group, and once with heaps that are given and pre made again."""
    problem, inputs, dy, tokens_per_rank = case(name)

    def work(rank: int) -> list[tuple[Tensor, Grads]]:
        mine = share(inputs, dy, tokens_per_rank, rank)
        results = [train(over_ranks, *mine, group=world(), save="pre")]
        if name == "uneven":
            results.append(train(over_ranks, *mine, heap=ShmHeaps(None, max(tokens_per_rank), timeout_s=20)))
        return results

    expected = in_one_process(problem, inputs, dy)
    for results in zip(*on_ranks(len(tokens_per_rank), work, tmp_path), strict=True):
        assert_same(together(results), expected)


def steps(number: int, layers: int) -> list[tuple[str, int, int]]:
    """Forwards and backwards in some order, at most three begun at a time: (direction, which pass, of which layer)."""
    draw, begun, made = random.Random(0), [], []
    while len(made) < number:
        if len(begun) == min(3, number - len(made)) or (begun and draw.random() < 0.4):
            made.append(("backward", *begun.pop(draw.randrange(len(begun)))))
        else:
            begun.append((len(made), draw.randrange(layers)))
            made.append(("forward", *begun[-1]))
    return made


def test_fifty_calls_over_the_same_heaps(tmp_path, poison):
    """One rank comes late, each time by another moment; token counts change; two rungs take turns; several layers are
    between forward and backward at once, so every buffer is used again before its first call's backward."""
    distributions = [(2, 1), (0, 3), (3, 3), (1, 0)]
    layers = [layer(T=sum(tokens), E=2, K=1, H=16, I=16, seed=sum(tokens)) for tokens in distributions]
    expected = [in_one_process(*each) for each in layers]
    passes = steps(50, len(layers))
    assert sum(direction == "backward" for direction, *_ in passes) == 25

    def work(rank: int) -> list[tuple[int, tuple[Tensor, Grads]]]:
        heap, draw = ShmHeaps(None, 3, timeout_s=20), random.Random(rank)
        of_rank = [share(*each[1:], tokens, rank) for each, tokens in zip(layers, distributions)]
        begun, done = {}, []
        for direction, which, number in passes:
            inputs, dy = of_rank[number]
            time.sleep(0.03 * draw.random() if rank == 1 else 0)
            if direction == "forward":
                leaves = leaves_of(inputs)
                options = dict(save=SAVES[which % 2], stage=["ranks", "mega"][which // 2 % 2])
                begun[which] = leaves, moe(*leaves, heap=heap, **options)
            else:
                leaves, y = begun.pop(which)
                y.backward(dy)
                done.append((number, (y.detach(), grads_of(leaves))))
        return done

    for (number, one), (_, other) in zip(*on_ranks(2, work, tmp_path), strict=True):
        assert_same(together([one, other]), expected[number])


def test_two_groups_at_once_have_a_layer_each(tmp_path, poison):
    """The second and the fourth process are ranks 1 and 0 of theirs, with other tokens than the other group's."""
    groups, tokens_per_rank = ([0, 2], [3, 1]), (1, 4)
    layers = [layer(T=5, E=4, H=32, I=32, seed=seed) for seed in range(2)]

    def work(process: int) -> tuple[Tensor, Grads]:
        made = [dist.new_group(ranks) for ranks in groups]
        ranks, group, (_, *whole) = next(all_of for all_of in zip(groups, made, layers) if process in all_of[0])
        assert group.rank() == sorted(ranks).index(process)
        return train(stage("mega"), *share(*whole, tokens_per_rank, group.rank()), group=group)

    results = on_ranks(4, work, tmp_path)
    for ranks, its in zip(groups, layers):
        assert_same(together([results[process] for process in sorted(ranks)]), in_one_process(*its))


def test_a_rank_that_needs_little_serves_its_peers(tmp_path, poison):
    """Rank 0 asks for one gradient, of its own. Rank 1 still gets its own, which both ranks' experts make."""
    problem, inputs, dy, tokens_per_rank = case("uneven")

    def work(rank: int) -> tuple[Tensor, Grads]:
        needs = DIFFERENTIABLE if rank == 1 else ("w_down",)
        return train(stage("mega"), *share(inputs, dy, tokens_per_rank, rank), needs, group=world())

    (_, of_one), (_, of_all) = on_ranks(2, work, tmp_path)
    _, expected = in_one_process(problem, inputs, dy)
    assert [name for name, grad in vars(of_one).items() if grad is not None] == ["dw_down"]
    its, L = slice(tokens_per_rank[0], None), problem.E // 2
    assert same_bits(of_one.dw_down, expected.dw_down[:L])
    assert same_bits(of_all.dx, expected.dx[its]) and same_bits(of_all.dtopk_weights, expected.dtopk_weights[its])
    assert same_bits(of_all.dw_gate_up, expected.dw_gate_up[L:]) and same_bits(of_all.dw_down, expected.dw_down[L:])


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_compiled_and_checkpointed_equal_eager(how, tmp_path):
    """Two layers deep, so that the second's backward comes between the first's two directions."""
    _, inputs, dy, tokens_per_rank = case("uneven")

    def two_deep(layer_of: Callable[..., Tensor], inputs: Inputs, dy: Tensor) -> tuple[Tensor, Grads]:
        leaves = leaves_of(inputs)
        y = layer_of(layer_of(*leaves), *leaves[1:])
        y.backward(dy)
        return y.detach(), grads_of(leaves)

    def work(rank: int) -> tuple[Tensor, Grads]:
        heaps_for(world(), "cpu", tokens_per_rank[rank])  # before compiling
        one = lambda x, *rest: x + moe(x, *rest, group=world())
        wrapped = (
            torch.compile(one, fullgraph=True, backend="aot_eager")
            if how == "compiled"
            else partial(checkpoint, one, use_reentrant=False)
        )
        return two_deep(wrapped, *share(inputs, dy, tokens_per_rank, rank))

    eager = lambda x, *rest: x + moe(x, *rest, stage="persistent", save="inputs")
    expected = two_deep(eager, inputs, dy)
    assert_same(together(on_ranks(2, work, tmp_path)), expected)


def test_weights_may_be_dtensors(tmp_path):
    """Sharded on experts; so are their gradients then. Another placement is refused, on all ranks."""
    problem, inputs, dy, tokens_per_rank = case("uneven")

    def work(rank: int) -> tuple:
        mesh = init_device_mesh("cpu", (2,))
        mine, its_dy = share(inputs, dy, tokens_per_rank, rank)
        x, ids, scores, *weights = leaves_of(mine)
        weights = [DTensor.from_local(w.detach(), mesh, [Shard(0)]).requires_grad_() for w in weights]
        y = moe(x, ids, scores, *weights, group=mesh.get_group())
        y.backward(its_dy)
        grads = [w.grad for w in weights]
        assert all(isinstance(g, DTensor) and g.placements == (Shard(0),) for g in grads)
        assert [g.shape for g in grads] == [inputs.w_gate_up.shape, inputs.w_down.shape]
        dist.barrier()  # who is told while it still computes, gives that up
        if rank == 1:
            weights[1] = DTensor.from_local(mine.w_down, mesh, [Replicate()])
        refused = what(moe, x, ids, scores, *weights, group=mesh.get_group())
        return refused, (y.detach(), Grads(x.grad, scores.grad, *(g.to_local() for g in grads)))

    (heard, *one), (refused, *other) = on_ranks(2, work, tmp_path)
    assert_same(together([*one, *other]), in_one_process(problem, inputs, dy))
    assert refused.startswith("ValueError: w_down must be sharded on experts")
    assert heard.startswith("RuntimeError: rank 1: w_down must be sharded on experts")


# Who fails.

WRONG = {  # what is wrong on rank 1, and what it says
    "dtype": (lambda i: dict(x=i.x.half()), "TypeError: w_gate_up is torch.float32 and x is torch.float16"),
    "an id outside": (lambda i: dict(topk_ids=i.topk_ids + 4), "ValueError: topk_ids[0, 0] is "),
    "stage": (lambda i: dict(stage="grouped"), "RuntimeError: "),
    "tokens": (
        lambda i: dict(x=i.x.repeat(2, 1), topk_ids=i.topk_ids.repeat(2, 1), topk_weights=i.topk_weights.repeat(2, 1)),
        "ValueError: x holds 4 tokens",
    ),
}


@pytest.mark.parametrize("before", [False, True], ids=["at once", "after a call"])
def test_what_is_wrong_on_one_rank_ends_the_others_calls(before, tmp_path):
    """At once, and with what that rank raises: while heaps are made, and while programs wait."""
    _, inputs, dy = layer(T=4, E=4, dtype=torch.float32)

    def work(rank: int) -> list[str]:
        mine, _ = share(inputs, dy, (2, 2), rank)
        raised, begun = [], time.monotonic()
        for change, _ in WRONG.values():
            heap = ShmHeaps(None, 2, timeout_s=40)
            if before:
                moe(**vars(mine), heap=heap)
                dist.barrier()  # who is told while it still computes, gives that up
            raised.append(what(moe, **vars(mine) | dict(heap=heap) | (change(mine) if rank == 1 else {})))
            heap.close()
        assert time.monotonic() - begun < 40
        return raised

    heard, said = on_ranks(2, work, tmp_path)
    for told, raised, (_, expected) in zip(heard, said, WRONG.values(), strict=True):
        message = raised.partition(": ")[2]
        assert raised.startswith(expected) and told.startswith(f"RuntimeError: rank 1: {message[:200]}")


def test_what_is_wrong_where_a_group_has_no_heaps(tmp_path):
    """At its first call, and twice in a row: there are none yet, or those that died the time before. The next call
    makes them."""
    _, inputs, dy = layer(T=4, E=4)

    def work(rank: int) -> list[str]:
        mine, _ = share(inputs, dy, (2, 2), rank)
        call, raised = partial(moe, **vars(mine), group=world()), []
        for times in (1, 3):
            raised += [what(call, save=f"act {n}" if rank == 1 else None) for n in range(times)]
            call()
            dist.barrier()  # who is told while it still computes, gives that up
        return raised

    for heard, said in zip(*on_ranks(2, work, tmp_path), strict=True):
        assert said.startswith("ValueError: save must be") and heard.startswith(f"RuntimeError: rank 1: {said[12:]}")


@pytest.mark.parametrize("name, when", [("ranks", "between its calls"), ("mega", "at some moment")])
def test_a_killed_rank_ends_the_others_calls(name, when, tmp_path):
    _, inputs, dy = layer(T=6, E=3)

    def work(rank: int) -> tuple[str, float]:
        heap = ShmHeaps(None, 2, timeout_s=2)
        mine, its_dy = share(inputs, dy, (2, 2, 2), rank)
        leaves = leaves_of(mine)
        y = moe(*leaves, heap=heap, stage=name)
        kill = partial(os.kill, os.getpid(), signal.SIGKILL)
        if rank == 1:
            kill() if when == "between its calls" else threading.Timer(0.2, kill).start()

        def go_on() -> None:
            y.backward(its_dy)
            while True:
                train(stage(name), mine, its_dy, heap=heap)

        return what(go_on), time.monotonic()

    (zero, one_ended), _, (two, other_ended) = on_ranks(3, work, tmp_path, killed=[1])
    for message in (zero, two):
        assert "waited in vain for" in message  # rank 1, or a rank that waits for it
        assert "These heaps are dead" in message
    assert abs(one_ended - other_ended) < 20


def test_more_rows_than_a_rank_has_room_for_is_an_error_on_all(over_ranks, tmp_path):
    """One fewer is not."""
    problem, inputs, dy = layer([[2, 3], [3, 2], [0, 2]], E=4)

    def work(rank: int) -> tuple:
        mine = share(inputs, dy, (2, 1), rank)
        result = train(over_ranks, *mine, heap=ShmHeaps(None, 2, max_rows=5, timeout_s=20))
        too_small = ShmHeaps(None, 2, max_rows=4, timeout_s=20)
        return result, what(moe, **vars(mine[0]), heap=too_small, stage=over_ranks.name)

    (one, its), (other, others) = on_ranks(2, work, tmp_path)
    assert_same(together([one, other]), in_one_process(problem, inputs, dy))
    for message in (its, others):
        assert message.startswith("RuntimeError: rank 1 would receive 5 rows in call 1, and its heap was made for max_")


def test_heaps_of_another_group_are_refused(tmp_path):
    """It has as many ranks, this process among them. A group made twice is no other one."""
    _, inputs, dy = layer(T=2, E=2, H=16, I=16)

    def work(rank: int) -> str | None:
        both, others, again = (dist.new_group(ranks) for ranks in ([0, 1], [0, 2], [0, 1]))
        said = None
        if rank < 2:
            heap, mine = ShmHeaps(both, 1, timeout_s=20), share(inputs, dy, (1, 1), rank)[0]
            moe(**vars(mine), heap=heap, group=again)
            dist.barrier(both)  # who is told while it still computes, gives that up
            said = what(moe, **vars(mine), heap=heap, group=others if rank == 0 else both)
        dist.barrier()  # nobody leaves a group in which another still is
        return said

    refused, heard, _ = on_ranks(3, work, tmp_path)
    assert refused.startswith("ValueError: the group has the ranks [0, 2], and the heaps were made for [0, 1]")
    assert heard.startswith("RuntimeError: rank 0: the group has the ranks [0, 2]")


# The module.

SIZES = dict(hidden_size=32, intermediate_size=24, num_experts=4, top_k=2, norm_topk_prob=True)


def test_a_rank_has_its_part_of_a_module(tmp_path):
    """The state dict of the whole layer loads, by fused names and by those of checkpoints; and so does a rank's own."""
    torch.manual_seed(0)
    whole = MoE(**SIZES)
    fused = whole.state_dict()
    per_expert = {"gate.weight": fused["gate.weight"], **whole.experts.per_expert("experts.")}

    def work(rank: int) -> None:
        its = {f"experts.{name}": w[2 * rank : 2 * rank + 2] for name, w in whole.experts.named_parameters()}
        part = MoE(**SIZES, group=world())
        for state in (fused, per_expert):
            assert part.load_state_dict(state) == ([], [])
            other = MoE(**SIZES, group=world())
            own = {"gate.weight": part.gate.weight, **part.experts.per_expert("experts.")}
            assert other.load_state_dict(own) == ([], [])
            for loaded in (part, other):
                assert torch.equal(loaded.gate.weight, whole.gate.weight)
                for name, w in its.items():
                    assert torch.equal(loaded.get_parameter(name), w) and len(w) == 2
            part.reset_parameters()
        part.load_state_dict(other.state_dict())
        assert torch.equal(part.experts.down_proj, its["experts.down_proj"])
        assert "num_experts = 5 cannot be split evenly over the 2 ranks" in what(
            MoE, **SIZES | dict(num_experts=5), group=world()
        )

    on_ranks(2, work, tmp_path)


def test_a_module_over_ranks_computes_what_one_computes(tmp_path):
    """The router's gradient is that of a rank's own tokens: their sum is that of one process. A wrong x on one rank
    ends the others' calls."""
    torch.manual_seed(0)
    whole, x, dy = MoE(**SIZES, stage="persistent"), torch.randn(5, 32), torch.randn(5, 32)
    tokens = [slice(0, 1), slice(1, 5)]

    def trained(layer_of: MoE, x: Tensor, dy: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = layer_of(x)
        y.backward(dy)
        return [y.detach(), x.grad, *(w.grad for w in layer_of.experts.parameters()), layer_of.gate.weight.grad]

    def work(rank: int) -> tuple[list[Tensor], str]:
        part = MoE(**SIZES, group=world())
        part.load_state_dict(whole.state_dict())
        assert part.stage == "mega"
        result = trained(part, x[tokens[rank]], dy[tokens[rank]])
        dist.barrier()  # else a rank may be told of the call to come before it has left the one before
        return result, what(part, x[:, :31] if rank == 1 else x[:1])

    (one, heard), (other, said) = on_ranks(2, work, tmp_path)
    *expected, gate = trained(whole, x, dy)
    # Not to the bit: the router is a product of torch's own, which rounds otherwise for other numbers of tokens.
    for mine, its, whole_of in zip(one[:-1], other[:-1], expected, strict=True):
        torch.testing.assert_close(torch.cat([mine, its]), whole_of, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one[-1] + other[-1], gate, rtol=1e-5, atol=1e-6)
    assert said.startswith("ValueError: x must be") and heard.startswith("RuntimeError: rank 1: x must be")


def test_ranks_that_do_not_belong_together_are_told(over_ranks, tmp_path):
    """One in backward where the other is in forward, or in that of another call; or with another clamp, or products in
    another precision: both are told, and nobody goes on with what that computes. The next call over the group makes new
    heaps."""
    _, inputs, dy, tokens_per_rank = case("uneven")
    others = {"a clamp": dict(swiglu_limit=2.5)}
    if "fp8_bwd" in over_ranks.precisions:
        others["8 bits"] = dict(precision="fp8_bwd")

    def work(rank: int) -> list[str]:
        mine, its_dy = share(inputs, dy, tokens_per_rank, rank)
        call = lambda **options: moe(*leaves_of(mine), stage=over_ranks.name, group=world(), **options)
        right, said = call().detach(), []

        def tell(step: Callable, begun: int = 0) -> None:
            """What a step raises behind so many calls; then all is well again."""
            calls = [call() for _ in range(begun)]
            dist.barrier()
            said.append(what(step, *calls))
            dist.barrier()
            assert same_bits(call().detach(), right)

        tell(lambda y: y.backward(its_dy) if rank else call(), begun=1)
        tell(lambda *ys: ys[rank].backward(its_dy), begun=2)
        for options in others.values():
            tell(lambda options=options: call(**options if rank else {}))
        return said

    both = "all ranks must make the same calls"
    zero, one = "rank 0 (came to call 3 )?for forward", "rank 1 (came to call 3 )?for backward of call 2"
    first, second = (f"rank {rank} (came to call 4 )?for backward of call {rank + 2}" for rank in (0, 1))
    of_layer = "rank . came to call 2 with another layer than rank .: I, swiglu_limit and precision must be the same"
    expected = [(zero, one, both), (first, second, both), *((of_layer,) for _ in others)]
    for texts in on_ranks(2, work, tmp_path):
        for text, patterns in zip(texts, expected, strict=True):
            assert all(re.search(pattern, text) for pattern in patterns), text


def test_ranks_seeded_alike_share_the_router_and_no_expert(tmp_path):
    """As one usually seeds; and a layer of one rank is drawn as ever."""

    def work(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        return [w.detach() for w in MoE(**SIZES, group=world()).parameters()]

    one, other = on_ranks(2, work, tmp_path)
    assert same_bits(one[0], other[0])
    assert not any(torch.isclose(a, b).all() for a, b in zip(one[1:], other[1:], strict=True))
    with pytest.raises(TypeError, match="of which this process is a member"):
        MoE(**SIZES, group=dist.GroupMember.NON_GROUP_MEMBER)


def test_a_stage_of_one_rank_is_refused_when_a_layer_is_made(tmp_path):
    """And costs nobody their heaps."""
    said = on_ranks(2, lambda rank: what(MoE, **SIZES, group=world(), stage="persistent"), tmp_path)
    assert all('over a group use "ranks" or "mega"' in each for each in said)


def test_a_refusal_before_any_heap_holds_a_layer(tmp_path):
    """One rank asks for a stage that it cannot have: heaps are made, and no memory yet. Both hear of it, and both make
    new heaps when they call again."""
    _, inputs, dy, tokens_per_rank = case("uneven")

    def work(rank: int) -> tuple[str, bool]:
        mine, _ = share(inputs, dy, tokens_per_rank, rank)
        said = what(moe, *vars(mine).values(), stage="persistent" if rank else "mega", group=world())
        y = moe(*vars(mine).values(), group=world())
        return said, bool(y.isfinite().all())

    said, right = zip(*on_ranks(2, work, tmp_path), strict=True)
    assert all("runs on one rank" in each for each in said) and all(right)
