"""All ranks in one process: over heaps a layer computes what it computes on one rank, to the bit, call after call."""

import copy
import gc
import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import DEVICE, assert_parity, assert_same, lay_out, layer, reroute, run, same_bits, train
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mega_moe import LADDER, LocalHeaps, moe
from mega_moe.registry import DEFAULT_OVER_RANKS, Rung, stage
from mega_moe.shapes import SAVES, Grads, Inputs, Need, Problem


@pytest.fixture
def in_turns() -> list[Rung]:
    """All rungs that take heaps, so that they share one."""
    able = [rung for rung in LADDER if rung.over_ranks and not rung.why_not(layer()[0])]
    return able or pytest.skip("no rung that takes heaps can run here")


def on_one_rank(problem: Problem, inputs: Inputs, dy: Tensor) -> tuple[Tensor, Grads]:
    """What the rung below computes, without heaps."""
    return run(stage("persistent"), problem, inputs, dy)


def poison_heaps(heap: LocalHeaps) -> None:
    """Whatever was published, pushed or planned there becomes NaN, or -1."""
    for (layout, _), (heaps, _) in heap._kept.items():
        heaps[:, layout.views()["row_start"].offset :] = 255


# What ranks compute.

CASES = {  # tokens of each rank, E, K, routing, dtype, save
    "one rank": ((6,), 4, 2, "any", torch.bfloat16, "pre"),
    "uneven": ((1, 37), 4, 2, "any", torch.bfloat16, "pre"),
    "three ranks": ((2, 0, 3), 3, 2, "masked", torch.bfloat16, "inputs"),
    "ranks without tokens": ((0, 4, 0, 2), 4, 2, "any", torch.float32, "pre"),
    "all on one expert": ((4, 3), 4, 2, "hot", torch.bfloat16, "inputs"),
    "the same expert twice": ((2, 3), 2, 3, "duplicate", torch.float32, "pre"),  # K is more than a rank has experts
    "all masked": ((2, 3), 2, 2, "all masked", torch.bfloat16, "pre"),
    "no tokens at all": ((0, 0), 2, 2, "any", torch.float32, "inputs"),
}


def case(name: str) -> tuple[Problem, Inputs, Tensor, tuple[int, ...]]:
    """The layer of a case, and its tokens_per_rank."""
    tokens_per_rank, E, K, routing, dtype, save = CASES[name]
    problem, inputs, dy = layer(T=sum(tokens_per_rank), E=E, K=K, H=40, dtype=dtype)
    ids = inputs.topk_ids.fill_(E - 1) if routing == "hot" else reroute(inputs.topk_ids, routing, E)
    inputs = replace(inputs, topk_ids=ids)
    return problem.at(save=save), inputs, dy, tokens_per_rank


@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_computes(name, over_ranks, poison):
    """y, dx and the router weights' gradients; and weight gradients that are sums over all ranks' tokens, with no 1/W.
    The heaps hold more tokens than any rank has."""
    problem, inputs, dy, tokens_per_rank = case(name)
    heap = LocalHeaps(len(tokens_per_rank), max(tokens_per_rank) + 3)
    got = train(over_ranks, inputs, dy, heap=heap, tokens_per_rank=tokens_per_rank, save=problem.save)
    assert_parity(problem, inputs, dy, got)
    assert_same(got, on_one_rank(problem, inputs, dy))


def test_eight_ranks(poison):
    """Each with one expert. Once: what differs between rungs is not how many ranks meet, and meeting takes a second."""
    problem, inputs, dy = layer(T=5, E=8, K=1)
    got = train(stage(DEFAULT_OVER_RANKS), inputs, dy, heap=LocalHeaps(8, 2), tokens_per_rank=(1, 0, 2, 1, 0, 0, 1, 0))
    assert_same(got, on_one_rank(problem, inputs, dy))


@pytest.mark.parametrize("layout", ["transposed", "weights padded"])  # the latter with a dy of stride zero
def test_any_strides(layout, over_ranks, poison):
    problem, inputs, dy = layer(E=2)
    inputs, dy = lay_out(inputs, dy, layout)
    got = train(over_ranks, inputs, dy, heap=LocalHeaps(2, 5), tokens_per_rank=(2, 3))
    assert_same(got, on_one_rank(problem, inputs, dy))


def test_exactly_the_gradients_that_are_needed(over_ranks, poison):
    """All combinations over one heap, whatever forward kept: None where nobody asked, and the same bits as ever where
    somebody did. A call may send rows home, or weights' gradients, both, or neither."""
    problem, inputs, dy = layer([[0, -1], [1, 0]], I=16, E=2)
    _, full = on_one_rank(problem, inputs, dy)
    heap = LocalHeaps(2, 2)
    problems = [problem.at(save=save, heap=heap.key, tokens_per_rank=(1, 1)) for save in SAVES]
    kept = [over_ranks.forward(problem, inputs)[1] for problem in problems]
    for n, needed in enumerate(product([False, True], repeat=4)):
        need = Need(*needed)
        grads = over_ranks.backward(problems[n % 2], inputs, kept[n % 2], dy, need)
        for name, wanted in vars(need).items():
            got = getattr(grads, name)
            assert same_bits(got, getattr(full, name)) if wanted else got is None, (need, name)


def test_nan_stays_with_its_token_and_the_experts_it_used(over_ranks, poison):
    """Token 2, of rank 1, uses expert 3 alone, of rank 1; nobody else does."""
    _, inputs, dy = layer([[0, 1], [2, 0], [3, 3], [1, 2]], E=4)
    options = dict(heap=LocalHeaps(2, 2), tokens_per_rank=(2, 2))
    y, grads = train(over_ranks, inputs, dy, **options)
    ill = replace(inputs, x=inputs.x.clone())
    ill.x[2, 5] = torch.nan
    y_ill, grads_ill = train(over_ranks, ill, dy, **options)

    assert y_ill[2].isnan().all() and grads_ill.dw_down[3].isnan().all()
    others, experts = [0, 1, 3], [0, 1, 2]
    assert same_bits(y_ill[others], y[others])
    for name in ("dx", "dtopk_weights"):
        assert same_bits(getattr(grads_ill, name)[others], getattr(grads, name)[others]), name
    for name in ("dw_gate_up", "dw_down"):
        assert same_bits(getattr(grads_ill, name)[experts], getattr(grads, name)[experts]), name


# Call after call.


def test_what_a_heap_held_before_is_not_read(over_ranks, poison):
    """NaN before forward, and between it and backward."""
    problem, inputs, dy = layer([[0, 1], [-1, 1], [0, 0]], E=2)
    heap = LocalHeaps(2, 3)
    problem = problem.at(heap=heap.key, tokens_per_rank=(1, 2))
    expected = on_one_rank(problem.at(heap=0, tokens_per_rank=()), inputs, dy)
    for save in SAVES:
        poison_heaps(heap)
        y, saved = over_ranks.forward(problem.at(save=save), inputs)
        poison_heaps(heap)
        assert_same((y, over_ranks.backward(problem.at(save=save), inputs, saved, dy, Need())), expected)
        poison_heaps(heap)
        need = Need(dx=False)
        alone = over_ranks.backward(problem.at(save=save), inputs, saved, dy, need)
        assert_same((y, alone), (y, replace(expected[1], dx=None)))


def test_many_calls_with_changing_tokens(in_turns, poison):
    """Who holds how many, where they go and what they are; now and then with a backward, so that either buffer is that
    of a forward, and on another rung than the forward. What becomes of a token does not depend on who is with it: one
    call of one rank with all of them says what is right."""
    calls, most = 30 if DEVICE == "cpu" else 1000, 4
    generator = torch.Generator().manual_seed(0)
    spreads = [tuple(torch.randint(most + 1, (2,), generator=generator).tolist()) for _ in range(calls)]
    problem, inputs, dy = layer(T=sum(map(sum, spreads)), H=16, I=16, E=2, K=1)
    inputs.topk_ids.flatten()[::5] = -1
    y, grads = on_one_rank(problem, inputs, dy)
    heap, start = LocalHeaps(2, most), 0
    for n, spread in enumerate(spreads):
        its = slice(start, start + sum(spread))
        given = {name: getattr(inputs, name)[its] for name in ("x", "topk_ids", "topk_weights")}
        facts = problem.at(T=sum(spread), save=SAVES[n % 3 % 2], heap=heap.key, tokens_per_rank=spread)
        got, saved = in_turns[n % len(in_turns)].forward(facts, replace(inputs, **given))
        assert same_bits(got, y[its]), n
        if n % 7 == 0:
            need = Need(dw_gate_up=False, dw_down=False)
            other = in_turns[(n + 1) % len(in_turns)]
            got = other.backward(facts, replace(inputs, **given), saved, dy[its], need)
            assert same_bits(got.dx, grads.dx[its]) and same_bits(got.dtopk_weights, grads.dtopk_weights[its]), n
        start = its.stop


def leaves_of(inputs: Inputs) -> list[Tensor]:
    """moe's five tensors as fresh leaves that require gradients."""
    return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in vars(inputs).values()]


def grads_of(leaves: list[Tensor]) -> Grads:
    return Grads(*(leaf.grad for leaf in leaves if leaf.is_floating_point()))


@pytest.mark.parametrize(
    "heaps, H, save", [(1, 16, "inputs"), (1, 24, "pre"), (2, 16, "pre")], ids=["alike", "of other sizes", "two heaps"]
)
def test_two_layers_at_once(heaps, H, save, in_turns, poison):
    """forward A, forward B, backward B, backward A, and then A again first: nothing of a layer is kept in a heap from
    forward to backward."""
    options = [dict(tokens_per_rank=spread, heap=LocalHeaps(2, 4), save=save) for spread in ((1, 4), (3, 1))]
    for each, rung in zip(options, (in_turns[0], in_turns[-1]), strict=True):
        each |= dict(stage=rung.name) | (dict(heap=options[0]["heap"]) if heaps == 1 else {})
    layers = layer(T=5, E=2, seed=1), layer(T=4, H=H, E=2, seed=2)
    leaves = [leaves_of(inputs) for _, inputs, _ in layers]
    y = [moe(*tensors, **each) for tensors, each in zip(leaves, options, strict=True)]
    for n in (1, 0):
        y[n].backward(layers[n][2], retain_graph=True)
        assert_same((y[n].detach(), grads_of(leaves[n])), on_one_rank(*layers[n]))
    once = leaves[0][0].grad.clone()
    y[0].backward(layers[0][2])
    assert same_bits(leaves[0][0].grad, 2 * once)


def test_layers_in_sequence_share_a_heap(in_turns, poison):
    """Each with weights of its own, on one rung or another, forward through all and backward through all."""
    heap, depth = LocalHeaps(2, 3), 6 if DEVICE == "cpu" else 20
    sizes = dict(T=4, H=16, I=16, E=2, K=1, dtype=torch.float32)
    problem, inputs, dy = layer(**sizes)
    layers = [layer(**sizes, seed=n)[1] for n in range(depth)]

    def through(rungs: list[Rung], problem: Problem) -> list[Tensor]:
        x, d, kept = inputs.x, dy, []
        for n, each in enumerate(layers):
            given, rung = replace(each, x=x), rungs[n % len(rungs)]
            y, saved = rung.forward(problem, given)
            kept.append((rung, given, saved))
            x = x + y
        results = [x]
        for rung, given, saved in reversed(kept):
            grads = rung.backward(problem, given, saved, d, Need())
            d = d + grads.dx
            results += [d, *grads.tensors()]
        return results

    ranks = problem.at(heap=heap.key, tokens_per_rank=(1, 3))
    for got, expected in zip(through(in_turns, ranks), through([stage("persistent")], problem), strict=True):
        assert same_bits(got, expected)


def test_a_call_that_was_refused_leaves_the_heap_as_it_was(poison):
    """An error before any launch, and a forward that nobody goes backward through."""
    problem, inputs, dy = layer([[0, 1], [1, -1], [0, 0]], E=2)
    options = dict(heap=LocalHeaps(2, 3), tokens_per_rank=(1, 2))
    expected = on_one_rank(problem, inputs, dy)
    assert_same(train(stage(DEFAULT_OVER_RANKS), inputs, dy, **options), expected)
    outside = replace(inputs, topk_ids=inputs.topk_ids + 1)
    with pytest.raises(ValueError, match=r"ids are 0 \.\. 1"):
        train(stage(DEFAULT_OVER_RANKS), outside, dy, check_ids=True, **options)
    moe(*leaves_of(inputs), **options)
    assert_same(train(stage(DEFAULT_OVER_RANKS), inputs, dy, **options), expected)


# What moe promises about heaps.


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(heap=None), ValueError, r"it needs heap=LocalHeaps\(ranks, max_tokens\)"),
        (dict(heap=2), TypeError, r"heap must be LocalHeaps\(ranks, max_tokens\), heaps of a group, .* not int"),
        (dict(tokens_per_rank=None), ValueError, r"tokens_per_rank is needed: 2 numbers that add up to T = 5"),
        (dict(tokens_per_rank=(5,)), ValueError, r"must be 2 numbers that add up to T = 5, not \(5,\)"),
        (dict(tokens_per_rank=()), ValueError, r"must be 2 numbers that add up to T = 5, not \(\)"),
        (dict(tokens_per_rank=(2, 2)), ValueError, r"must be 2 numbers that add up to T = 5, not \(2, 2\)"),
        (dict(tokens_per_rank=(6, -1)), ValueError, r"must be 2 numbers that add up to T = 5, not \(6, -1\)"),
        (dict(tokens_per_rank=(2.0, 3.0)), TypeError, r"must be 2 whole numbers, not \(2.0, 3.0\)"),
        (dict(tokens_per_rank=5), TypeError, r"must be 2 whole numbers, not 5"),
        (dict(tokens_per_rank=[0, 5]), ValueError, r"\(0, 5\).*max_tokens = 4.*LocalHeaps\(2, 5\)"),
        (dict(heap=(3, 4), tokens_per_rank=(1, 2, 2)), ValueError, r"E = 4 experts .* 3 ranks: .* divides 4"),
    ],
)
def test_ranks_that_do_not_fit_are_an_error_that_says_what_does(options, error, message):
    _, inputs, _ = layer(T=5, E=4)
    options = dict(heap=LocalHeaps(2, 4), tokens_per_rank=(2, 3)) | options
    if isinstance(options["heap"], tuple):
        options["heap"] = LocalHeaps(*options["heap"])
    with pytest.raises(error, match=message):
        moe(**vars(inputs), **options)


@pytest.mark.parametrize(
    "sizes, name",
    [((0, 4), "ranks"), ((2, 0), "max_tokens"), ((-1, 4), "ranks"), ((2.5, 4), "ranks"), ((True, 4), "ranks")],
)
def test_heaps_of_no_size_are_an_error(sizes, name):
    with pytest.raises(ValueError, match=f"{name} must be a positive whole number"):
        LocalHeaps(*sizes)


def test_tokens_that_int32_cannot_number_are_an_error():
    with pytest.raises(ValueError, match="2147483648 tokens, more than 2147483647"):
        LocalHeaps(2, 2**30)


def test_tokens_of_other_heaps_do_not_reach_a_kernel():
    """A key is a number, and a program may hold it for longer than the heaps that it stood for."""
    problem, inputs, _ = layer(T=5, E=4)
    heap = LocalHeaps(2, 4)
    for tokens_per_rank in ((1, 1, 1, 2), (5, 0)):
        with pytest.raises(RuntimeError, match="do not fit 2 ranks of up to 4"):
            stage(DEFAULT_OVER_RANKS).forward(problem.at(heap=heap.key, tokens_per_rank=tokens_per_rank), inputs)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_heaps_cannot_be_copied(duplicate):
    """A copy would be the same memory under two names, and the one that goes first would take it away."""
    with pytest.raises(TypeError, match=r"cannot be copied: make new ones"):
        duplicate(LocalHeaps(2, 4))


@pytest.mark.parametrize("name", [rung.name for rung in LADDER if not rung.over_ranks])
def test_rungs_of_one_rank_say_so(name):
    _, inputs, _ = layer(E=2)
    with pytest.raises(RuntimeError, match=f'stage "{name}" runs on one rank: over heaps use stage="ranks"'):
        moe(**vars(inputs), heap=LocalHeaps(2, 5), tokens_per_rank=(2, 3), stage=name)


def test_a_closed_heap_is_an_error_in_forward_and_in_backward():
    _, inputs, dy = layer(E=2)
    heap, leaves = LocalHeaps(2, 5), leaves_of(inputs)
    y = moe(*leaves, heap=heap, tokens_per_rank=(2, 3))
    heap.close()
    heap.close()
    with pytest.raises(RuntimeError, match=r"closed: make new ones, and begin with forward"):
        y.backward(dy)
    with pytest.raises(RuntimeError, match="closed"):
        moe(*leaves, heap=heap, tokens_per_rank=(2, 3))


def test_a_heap_that_nobody_holds_until_backward_is_an_error_that_says_to_hold_it():
    _, inputs, dy = layer(E=2)
    y = moe(*leaves_of(inputs), heap=LocalHeaps(2, 5), tokens_per_rank=(2, 3))
    gc.collect()
    with pytest.raises(RuntimeError, match="keep a reference to them"):
        y.backward(dy)


def test_stage_and_save_unless_told(monkeypatch):
    """tokens_per_rank may be a list as well."""
    _, inputs, _ = layer(E=2)
    recipe, told, kept = stage(DEFAULT_OVER_RANKS).recipe(), [], []
    forward = recipe.forward
    monkeypatch.setattr(recipe, "forward", lambda problem, given: told.append(problem) or forward(problem, given))
    heap, leaves = LocalHeaps(2, 5), leaves_of(inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        of_list = moe(*leaves, heap=heap, tokens_per_rank=[2, 3])
    assert told[0].save == "inputs" and told[0].tokens_per_rank == (2, 3) and told[0].heap == heap.key
    assert len(kept) == 5 + 4 + 1  # the inputs, the plan, and which call it was
    assert same_bits(moe(*leaves, heap=heap, tokens_per_rank=(2, 3)), of_list)

    moe(*leaves, heap=heap, tokens_per_rank=(2, 3), save="pre")
    with torch.no_grad():
        assert not moe(*leaves, heap=heap, tokens_per_rank=(2, 3), save="pre").requires_grad
    assert [problem.save for problem in told[2:]] == ["pre", "inputs"]


@pytest.mark.parametrize("how", ["compiled", "checkpointed", "checkpointed, reentrant"])
def test_compiled_and_checkpointed_equal_eager(how):
    problem, inputs, dy = layer([[0, 1], [1, -1], [-1, -1], [0, 1], [1, 1]], E=2)
    heap = LocalHeaps(2, 5)
    plain = lambda *tensors: moe(*tensors, heap=heap, tokens_per_rank=(2, 3))
    leaves = leaves_of(inputs)
    if how == "compiled":
        torch._dynamo.reset()
        y = torch.compile(plain, fullgraph=True, backend="aot_eager")(*leaves)
    else:
        y = checkpoint(plain, *leaves, use_reentrant="reentrant" in how)
    y.backward(dy)
    assert_same((y.detach(), grads_of(leaves)), on_one_rank(problem, inputs, dy))


@pytest.mark.parametrize("operator", ["forward", "backward"])
def test_operators_keep_torchs_rules(operator):
    """Without masked routes: what is saved for those is never written, and never the same twice."""
    problem, inputs, dy = layer([[0, 1], [1, 0], [1, 1], [0, 1]], I=16, E=2)
    heap = LocalHeaps(2, 3)
    facts = (DEFAULT_OVER_RANKS, None, "inputs", "bf16", 0, heap.key, [1, 3])
    if operator == "forward":
        # Not through AOTDispatcher, which must put out the same twice: what is saved says which call it was.
        rules = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.mega_moe.forward.default, (*leaves_of(inputs), *facts, False), test_utils=rules)
        return
    ranks = problem.at(save="inputs", heap=heap.key, tokens_per_rank=(1, 3))
    _, saved = stage(DEFAULT_OVER_RANKS).forward(ranks, inputs)
    given = (dy, *vars(inputs).values(), saved.tensors(), *facts, [True, False, True, True])
    torch.library.opcheck(torch.ops.mega_moe.backward.default, given)
