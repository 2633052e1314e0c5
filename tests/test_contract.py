"""What moe() promises about its arguments, on every rung: masks, ids, empty layers, dtypes, errors."""

from dataclasses import replace

import pytest
import torch
from cases import DEVICE, assert_parity, assert_same, layer, on_cpu, on_gpu, run, same_bits, tensors, train

from mega_moe import LADDER, MoE, Problem, moe
from mega_moe.api import check
from mega_moe.registry import stage
from mega_moe.shapes import SAVES

BEYOND = [3, 10, 2**30, -2, -(2**31)]  # ids that three experts do not have
FAR_BEYOND = [2**32, 2**32 + 1, 2**40, -(2**32), -(2**63)]  # and that 32 bits would turn into 0, 1, 0, 0 and 0
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


# Masked, unknown and duplicate routes.


def test_a_masked_route_is_no_route(rung, poison):
    """An id of -1 must not wrap around to the last expert, whose huge weights would show, nor stand for a slot that
    nobody wrote: the layer is the one without that slot, to the bit."""
    _, masked, dy = layer([[1, -1], [-1, 0], [0, -1]])
    live = masked.topk_ids >= 0
    masked.w_down[2] = 1e4
    masked.topk_weights[~live] = torch.nan  # a mask selects; it does not multiply by zero
    without = replace(masked, topk_ids=masked.topk_ids[live][:, None], topk_weights=masked.topk_weights[live][:, None])

    y, grads = train(rung, masked, dy)

    assert (grads.dtopk_weights[~live] == 0).all()
    grads = replace(grads, dtopk_weights=grads.dtopk_weights[live][:, None])
    assert_same((y, grads), train(rung, without, dy))


def test_tokens_with_no_some_and_all_routes_masked(rung, poison):
    """A combine that reads all K slots shows in tokens of 0, 1, ... K valid ones."""
    problem, inputs, dy = layer([[-1, -1, -1], [0, -1, -1], [-1, 2, 1], [2, 1, 0], [-1, -1, -1]])
    y, grads = train(rung, inputs, dy)
    assert_parity(problem, inputs, dy, (y, grads))
    assert not y[[0, 4]].any() and not grads.dx[[0, 4]].any()


@pytest.mark.parametrize("bad, dtype", [(BEYOND, torch.int32), (BEYOND, torch.int64), (FAR_BEYOND, torch.int64)])
def test_an_id_outside_the_table_is_a_masked_route(bad, dtype, rung, poison):
    """With only the sign checked, or with 64 bits cut to 32, a stale id reads far outside the weights."""
    problem, masked, dy = layer([[0, -1], [-1, 1], [2, -1], [-1, -1], [-1, 0]])
    outside = masked.topk_ids.to(dtype)
    outside[outside < 0] = torch.tensor([*bad, bad[0]], dtype=dtype, device=DEVICE)
    assert_same(run(rung, problem, replace(masked, topk_ids=outside), dy), run(rung, problem, masked, dy))


@pytest.mark.parametrize("bad", BEYOND + FAR_BEYOND)
def test_an_id_outside_the_table_is_an_error_where_it_can_be_seen(bad, rung):
    """On a CPU unasked, on a GPU when asked."""
    _, inputs, _ = layer([[0, 1], [1, -1], [2, 0]])
    inputs.topk_ids[1, 1] = bad
    with pytest.raises(ValueError, match=rf"topk_ids\[1, 1\] is {bad}: ids are 0 .. 2"):
        train(rung, inputs, check_ids=DEVICE == "cuda")


@on_gpu
def test_an_id_outside_the_table_is_not_looked_for_on_a_gpu(rung):
    _, masked, dy = layer([[0, 1], [1, -1], [2, 0]])
    outside = masked.topk_ids.clone()
    outside[1, 1] = 2**30
    assert_same(train(rung, replace(masked, topk_ids=outside), dy), train(rung, masked, dy))


def test_ids_of_either_width_are_the_same(rung):
    _, inputs, dy = layer([[0, 2], [1, -1], [2, 2]])
    assert inputs.topk_ids.dtype == torch.int64
    assert_same(train(rung, replace(inputs, topk_ids=inputs.topk_ids.int()), dy), train(rung, inputs, dy))


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.int8, torch.bool, torch.float32])
def test_ids_of_another_dtype_are_an_error(dtype, rung):
    _, inputs, _ = layer([[0, 1], [1, 0]])
    with pytest.raises(TypeError, match="topk_ids must be int32 or int64"):
        train(rung, replace(inputs, topk_ids=inputs.topk_ids.to(dtype)))


def test_the_same_expert_twice_counts_twice(rung):
    """Both slots add to y and to the weights' gradients, and both have the same gradient themselves."""
    problem, inputs, dy = layer([[0, 0], [2, 2], [0, 0]])
    y, grads = train(rung, inputs, dy)
    assert_parity(problem, inputs, dy, (y, grads))
    assert torch.equal(grads.dtopk_weights[:, 0], grads.dtopk_weights[:, 1]) and grads.dtopk_weights.all()


@pytest.mark.parametrize("E, K, ids", [(2, 4, [[0, 1, 0, 0], [1, -1, 1, 0]]), (4, 4, None), (1, 1, None)])
def test_more_routes_than_experts_and_as_many(E, K, ids, rung):
    """Code that assumes K <= E, or bounds routes by min(K, E), loses rows."""
    problem, inputs, dy = layer(ids, T=3, E=E, K=K)
    assert_parity(problem, inputs, dy, train(rung, inputs, dy))


@pytest.mark.parametrize("E, K", [(5, 3), (6, 6)])
def test_experts_and_routes_that_are_no_powers_of_two(E, K, rung):
    problem, inputs, dy = layer(T=3, E=E, K=K, I=16)
    assert_parity(problem, inputs, dy, train(rung, inputs, dy))


@on_gpu
@pytest.mark.parametrize("E, K, T", [(96, 8, 100), (384, 10, 3000), (384, 6, 1)])
def test_many_experts(E, K, T, rung):
    """Also with one token, where T*K/E rounds down to zero rows an expert: no block size may be divided by that."""
    problem, inputs, dy = layer(T=T, E=E, K=K)
    assert_parity(problem, inputs, dy, train(rung, inputs, dy))


def test_experts_are_counted_in_the_weights(rung):
    """Not in topk_weights (K = 2), nor in the ids that happen to occur."""
    problem, inputs, dy = layer([[7, 0], [0, 7]], E=9)
    assert_parity(problem, inputs, dy, train(rung, inputs, dy))


@pytest.mark.parametrize("K", [1, 2])
def test_every_route_on_one_expert(K, rung, poison):
    """A capacity sized for balance would drop rows or write over its neighbours."""
    problem, inputs, dy = layer(torch.full((40, K), 2), I=16)
    assert_parity(problem, inputs, dy, train(rung, inputs, dy))


@on_cpu
def test_masked_routes_cost_no_tiles(fused, monkeypatch):
    """Padding that is masked multiplies nothing: as many tile products as without it, forward and backward."""
    from triton.runtime.interpreter import InterpreterBuilder

    products = []
    monkeypatch.setattr(InterpreterBuilder, "create_dot", counted(InterpreterBuilder.create_dot, products))
    _, padded, dy = layer(T=70, E=2, K=1)
    padded.topk_ids[33:] = -1
    tokens = {name: getattr(padded, name)[:33] for name in ("x", "topk_ids", "topk_weights")}
    train(fused, replace(padded, **tokens), dy[:33])
    without = len(products)
    products.clear()
    train(fused, padded, dy)
    assert 0 < len(products) <= without


def counted(function, calls):
    """The function, with a note of each call."""

    def wrapper(*args):
        calls.append(None)
        return function(*args)

    return wrapper


# Nothing to do.


@pytest.mark.parametrize("ids", [torch.zeros(0, 2, dtype=torch.int64), torch.full((3, 2), -1)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_no_tokens_or_no_routes_give_zeros_of_full_shape(ids, dtype, rung, poison):
    """Not None, not garbage, not of another shape than on an ordinary call; and weights stay in the graph."""
    _, inputs, dy = layer(ids, dtype=dtype)
    y, grads = train(rung, inputs, dy)
    like = [inputs.x, inputs.x, inputs.topk_weights, inputs.w_gate_up, inputs.w_down]
    assert all(same_bits(got, torch.zeros_like(t)) for got, t in zip(tensors((y, grads)), like, strict=True))


# Dtypes.


@pytest.mark.parametrize(
    "dtype, weights",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float16, torch.float16),
    ],
)
def test_y_and_every_gradient_have_the_dtype_of_their_input(dtype, weights, rung):
    _, inputs, dy = layer(dtype=dtype)
    inputs = replace(inputs, topk_weights=inputs.topk_weights.to(weights))
    y, grads = train(rung, inputs, dy)
    assert [t.dtype for t in tensors((y, grads))] == [dtype, dtype, weights, dtype, dtype]


@pytest.mark.parametrize("name", ["w_gate_up", "w_down", "topk_weights"])
def test_dtypes_that_do_not_go_together_are_an_error_that_names_both(name, rung):
    _, inputs, _ = layer(dtype=torch.bfloat16)
    mixed = replace(inputs, **{name: getattr(inputs, name).half()})
    with pytest.raises(TypeError, match=rf"{name} is torch.float16 and x is torch.bfloat16"):
        train(rung, mixed)


def test_a_dtype_that_nobody_computes_in_is_an_error(rung):
    _, inputs, _ = layer()
    with pytest.raises(TypeError, match="x must be fp32, bf16 or fp16"):
        train(rung, replace(inputs, x=inputs.x.to(torch.float8_e4m3fn)))


def test_float64_is_for_the_reference(rung):
    problem, inputs, dy = layer(dtype=torch.float64)
    if rung.needs_triton:
        with pytest.raises(RuntimeError, match='for float64 use stage="reference"'):
            train(rung, inputs, dy)
    else:
        assert_parity(problem, inputs, dy, train(rung, inputs, dy))


@pytest.mark.parametrize(
    "x, w_gate_up, w_down",
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_autocast_casts_x_and_the_weights_and_leaves_topk_weights(x, w_gate_up, w_down, rung):
    """An operator unknown to autocast meets fp32 activations and bf16 weights, in backward if not in forward."""
    _, inputs, dy = layer(dtype=torch.float32)
    mixed = replace(inputs, x=inputs.x.to(x), w_gate_up=inputs.w_gate_up.to(w_gate_up), w_down=inputs.w_down.to(w_down))
    cast = replace(
        inputs, x=inputs.x.bfloat16(), w_gate_up=inputs.w_gate_up.bfloat16(), w_down=inputs.w_down.bfloat16()
    )

    with torch.autocast(DEVICE, torch.bfloat16):
        y, grads = train(rung, mixed, dy.bfloat16())
    y_cast, grads_cast = train(rung, cast, dy.bfloat16())

    assert same_bits(y, y_cast)
    assert [g.dtype for g in vars(grads).values()] == [x, torch.float32, w_gate_up, w_down]
    for got, expected in zip(vars(grads).values(), vars(grads_cast).values(), strict=True):
        assert torch.equal(got.float(), expected.float())


def test_a_gradient_of_another_dtype_than_y_is_cast(rung):
    _, inputs, dy = layer()
    assert_same(train(rung, inputs, dy.float()), train(rung, inputs, dy))


# Errors that come before any launch.


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(x=(5,)), r"x must be \(T, H\), not of shape \(5,\)"),
        (dict(x=(5, 2, 16)), r"x must be \(T, H\)"),
        (dict(x=(5, 17)), r"w_gate_up must be .* = \(3, 2, 24, 17\)"),
        (dict(x=(4, 16)), r"topk_ids must be \(T, K\) = \(4, 2\)"),
        (dict(topk_weights=(5, 3)), r"topk_weights must be \(T, K\) = \(5, 2\), not \(5, 3\)"),
        (dict(topk_weights=(2, 5)), r"topk_weights must be"),
        (dict(w_gate_up=(3, 48, 16)), r"view a gate_up_proj with .unflatten\(1, \(2, -1\)\)"),
        (dict(w_gate_up=(3, 3, 24, 16)), r"w_gate_up must be .* = \(3, 2, 24, 16\)"),
        (dict(w_gate_up=(3, 2, 16, 24)), r"w_gate_up must be"),
        (dict(w_down=(3, 24, 16)), r"w_down must be \(E, H, I\) = \(3, 16, 24\), not \(3, 24, 16\)"),
        (dict(w_down=(2, 16, 24)), r"w_down must be"),
        (dict(x=(5, 0), w_gate_up=(3, 2, 24, 0), w_down=(3, 0, 24)), r"H = 0: only T may be zero"),
        (dict(w_gate_up=(3, 2, 0, 16), w_down=(3, 16, 0)), r"I = 0"),
        (dict(w_gate_up=(0, 2, 24, 16), w_down=(0, 16, 24)), r"E = 0"),
        (dict(topk_ids=(5, 0), topk_weights=(5, 0)), r"K = 0"),
    ],
)
def test_shapes_that_do_not_fit_are_an_error_that_names_the_tensor(changes, message, rung):
    _, inputs, _ = layer()
    wrong = {name: getattr(inputs, name).new_zeros(shape) for name, shape in changes.items()}
    with pytest.raises(ValueError, match=message):
        train(rung, replace(inputs, **wrong))


@pytest.mark.parametrize("name", ["topk_ids", "topk_weights", "w_gate_up", "w_down"])
def test_tensors_on_two_devices_are_an_error_that_names_both(name, rung):
    _, inputs, _ = layer()
    with pytest.raises(ValueError, match=rf"{name} is on meta and x on {inputs.x.device}"):
        train(rung, replace(inputs, **{name: getattr(inputs, name).to("meta")}))


def test_more_rows_than_32_bits_count_are_an_error():
    on_meta = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, device="meta", dtype=dtype)
    T, H, I, E, K = 2**28, 16, 16, 16, 8
    weights = on_meta(T, K), on_meta(E, 2, I, H), on_meta(E, H, I)
    with pytest.raises(ValueError, match=r"T \* K = 2147483648 rows.*split the tokens"):
        check(on_meta(T, H), on_meta(T, K, dtype=torch.int64), *weights, None, None, None, 0)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_not_positive_is_an_error(limit, rung):
    _, inputs, _ = layer()
    with pytest.raises(ValueError, match="swiglu_limit must be positive"):
        train(rung, inputs, swiglu_limit=limit)


@pytest.mark.parametrize("save", ["act", "", "Pre", True])
def test_a_save_that_is_neither_of_the_two_is_an_error_that_names_both(save, rung):
    _, inputs, _ = layer()
    with pytest.raises(ValueError, match=f"save must be 'pre' or 'inputs', not {save!r}"):
        train(rung, inputs, save=save)


# What is kept between forward and backward.


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_changes_no_bit(dtype, limit, rung, poison):
    """Forward keeps pre or does not, and backward makes it again: y, the plan and all gradients are the same."""
    problem, inputs, dy = layer([[0, 2], [2, 2], [3, 0], [-1, -1], [2, -1]], E=4, dtype=dtype, limit=limit)
    kept, results = {}, {}
    for save in SAVES:
        y, kept[save] = rung.forward(problem.at(save=save), inputs)
        results[save] = y, rung.backward(problem.at(save=save), inputs, kept[save], dy)
    assert kept["pre"].pre.shape == (problem.R, 2, problem.I) and kept["inputs"].pre is None
    assert all(map(torch.equal, kept["pre"].plan, kept["inputs"].plan))
    assert_same(results["inputs"], results["pre"])


@pytest.mark.parametrize("save, count", [(None, 5), ("pre", 5), ("inputs", 4)])
def test_autograd_holds_the_inputs_the_plan_and_pre_if_asked(save, count, rung):
    """What torch keeps of the call, in the order of `Saved.tensors`: nothing else lives until backward."""
    problem, inputs, dy = layer()
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        train(rung, inputs, dy, save=save)
    given, made = held[:5], held[5:]
    assert {t.data_ptr() for t in given} == {t.data_ptr() for t in vars(inputs).values()}
    assert [t.dtype for t in made] == [torch.int32] * 4 + [problem.dtype] * (count - 4)


@pytest.mark.parametrize("save", [None, *SAVES])
def test_nothing_is_kept_where_no_gradient_can_be_asked_for(save, rung, monkeypatch):
    """Without a gradient the forward of a rung is not even told to write pre."""
    _, inputs, _ = layer()
    recipe, forward, told = rung.recipe(), rung.recipe().forward, []
    monkeypatch.setattr(recipe, "forward", lambda problem, given: told.append(problem.save) or forward(problem, given))

    train(rung, inputs, needs=(), save=save)
    with torch.no_grad():
        moe(inputs.x.clone().requires_grad_(), *list(vars(inputs).values())[1:], stage=rung.name, save=save)
    with torch.inference_mode():
        moe(**vars(inputs), stage=rung.name, save=save)
    assert told == ["inputs"] * 3

    leaf = inputs.topk_weights.clone().requires_grad_()
    moe(**vars(replace(inputs, topk_weights=leaf)), stage=rung.name, save=save)
    assert told[3:] == [save or "pre"]


# The ladder.


def test_an_unknown_stage_lists_the_known_ones():
    _, inputs, _ = layer()
    names = ", ".join(rung.name for rung in LADDER)
    with pytest.raises(ValueError, match=f"stage='fused': the stages are {names}"):
        moe(*vars(inputs).values(), stage="fused")
    with pytest.raises(ValueError, match=f"the stages are {names}"):
        MoE(16, 24, 3, 2, stage="fused")


def test_every_rung_has_a_name_and_an_idea_of_its_own():
    assert len({rung.name for rung in LADDER}) == len({rung.idea for rung in LADDER}) == len(LADDER)
    assert LADDER[0].name == "reference" and all(stage(rung.name) is rung for rung in LADDER)


def test_what_cannot_run_says_why_and_falls_back_to_nothing(rung, monkeypatch):
    """Without Triton, the rungs that need it raise their why_not, which names the fix; no other rung steps in."""
    problem, inputs, dy = layer()
    monkeypatch.setattr("mega_moe.registry.find_spec", lambda name: None)
    if not rung.needs_triton:
        assert_parity(problem, inputs, dy, train(rung, inputs, dy))
        return
    reason = rung.why_not(problem)
    assert "pip install" in reason and 'stage="reference"' in reason
    monkeypatch.setattr(type(rung), "forward", lambda *_: pytest.fail("something was called all the same"))
    with pytest.raises(RuntimeError, match=r'needs Triton: pip install "triton>=3.6"'):
        train(rung, inputs, dy)


def test_a_cpu_without_the_interpreter_says_what_to_do(fused, monkeypatch):
    monkeypatch.setattr("mega_moe.kernels.tile.INTERPRETED", type("Not", (), dict(value=False)))
    reason = fused.why_not(Problem(5, 16, 24, 3, 2, device="cpu"))
    assert "move them" in reason and "TRITON_INTERPRET=1" in reason and 'stage="reference"' in reason


def test_a_note_is_one_line_or_none(rung):
    note = rung.note(Problem(5, 16, 24, 3, 2, device=DEVICE))
    assert note is None or (note and "\n" not in note)


def test_a_plan_and_pre_made_by_one_rung_serve_every_other(rung, poison):
    """What forward saves has one meaning: the stage may be switched between forward and backward."""
    problem, inputs, dy = layer([[0, 1], [1, -1], [2, 2], [0, 2]])
    reference = LADDER[0]
    y, saved = rung.forward(problem, inputs)
    y_reference, saved_reference = reference.forward(problem, inputs)
    assert_parity(problem, inputs, dy, (y, reference.backward(problem, inputs, saved, dy)))
    assert_parity(problem, inputs, dy, (y_reference, rung.backward(problem, inputs, saved_reference, dy)))
    for name in saved.plan._fields:
        assert torch.equal(getattr(saved.plan, name), getattr(saved_reference.plan, name)), name


# Processors left to others.


def test_reserved_processors_change_no_bit(rung):
    """Rungs whose programs are resident start fewer; the others say that they cannot."""
    _, inputs, dy = layer()
    if rung.resident:
        assert_same(train(rung, inputs, dy, num_reserved_sms=2), train(rung, inputs, dy))
        return
    with pytest.raises(RuntimeError, match=r'"persistent" or "ranks" or "mega" or "warp"'):
        train(rung, inputs, dy, num_reserved_sms=2)


@pytest.mark.parametrize("number", [-1, 0.5, None])
def test_a_number_of_processors_that_is_none(number):
    _, inputs, _ = layer()
    with pytest.raises(ValueError, match="num_reserved_sms must be a whole number"):
        moe(**vars(inputs), stage="reference", num_reserved_sms=number)
