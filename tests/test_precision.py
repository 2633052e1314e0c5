"""`precision=`: what the matrix products read, from the call down to the reference; and who refuses it."""

import json

import pytest
import torch
from cases import DEVICE, layer

from mega_moe import LADDER, MoE, cli, moe, reference
from mega_moe.parity import Oracle
from mega_moe.reference.quantize import PRECISIONS as FORMATS
from mega_moe.registry import stage
from mega_moe.shapes import PRECISIONS, Need

EIGHT_BITS = pytest.mark.parametrize("precision", PRECISIONS[1:])
SIZES = dict(T=9, H=64, I=48, E=4, K=2)


def test_there_are_as_many_as_the_reference_has():
    assert tuple(FORMATS) == PRECISIONS


@pytest.mark.parametrize("save", ["pre", "inputs"])
@EIGHT_BITS
def test_a_call_computes_what_the_reference_computes(precision, save):
    _, inputs, dy = layer(**SIZES)
    leaves = {name: t.detach().clone() for name, t in vars(inputs).items()}
    for name in ("x", "topk_weights", "w_gate_up", "w_down"):
        leaves[name].requires_grad_()
    y = moe(**leaves, stage="reference", precision=precision, save=save)
    y.backward(dy)
    expected, saved = reference.forward(**vars(inputs), precision=precision)
    grads = reference.backward(saved, dy)
    assert torch.equal(y, expected)
    for name in ("x", "topk_weights", "w_gate_up", "w_down"):
        assert torch.equal(leaves[name].grad, getattr(grads, f"d{name}"))
    plain, _ = reference.forward(**vars(inputs))
    assert torch.equal(y, plain) == (precision == "fp8_bwd")  # whose forward is as ever


def test_bf16_is_the_layers_own_dtype_or_refused():
    _, inputs, _ = layer(dtype=torch.bfloat16)
    assert torch.equal(moe(**vars(inputs), precision="bf16"), moe(**vars(inputs)))
    _, inputs, _ = layer(dtype=torch.float32)
    with pytest.raises(ValueError, match=r'precision="bf16" reads bf16, and x is torch.float32: cast'):
        moe(**vars(inputs), precision="bf16")


def test_a_precision_that_there_is_not():
    _, inputs, _ = layer()
    with pytest.raises(ValueError, match="precision must be 'bf16' or 'fp8' or 'fp8_bwd' or 'mxfp8', not 'fp4'"):
        moe(**vars(inputs), precision="fp4")
    with pytest.raises(ValueError, match="not 'fp4'"):
        MoE(16, 16, 4, 2, precision="fp4")


@EIGHT_BITS
def test_a_rung_computes_it_within_budget_or_says_who_does(rung, precision):
    problem, inputs, dy = layer(**SIZES, dtype=torch.bfloat16)
    problem = problem.at(precision=precision)
    reason = rung.why_not(problem)
    if precision not in rung.precisions:
        able = [other for other in LADDER if precision in other.precisions]
        assert reason.startswith(f'stage "{rung.name}" has no products in {precision}: use stage=') and able
        assert all(f'"{other.name}"' in reason for other in able)
        with pytest.raises(RuntimeError, match="has no products in"):
            moe(**vars(inputs), stage=rung.name, precision=precision)
        return
    assert reason is None
    y, saved = rung.forward(problem, inputs)
    verdict = Oracle(problem, inputs, dy).check(y, rung.backward(problem, inputs, saved, dy))
    assert verdict.passed, verdict.shares


@EIGHT_BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parity_in_other_dtypes_is_refused(precision, dtype):
    problem, inputs, dy = layer(dtype=dtype)
    with pytest.raises(ValueError, match=f"parity in {precision} cannot be judged in {dtype}: .*: use bf16"):
        Oracle(problem.at(precision=precision), inputs, dy)


def test_a_module_has_one():
    torch.manual_seed(0)
    layer_ = MoE(64, 48, 4, 2, stage="reference", precision="fp8", device=DEVICE)
    x = torch.randn(5, 64, device=DEVICE)
    topk_ids, topk_weights, _ = layer_.route(x)
    weights = (layer_.experts.gate_up_proj.unflatten(1, (2, -1)), layer_.experts.down_proj)
    with torch.no_grad():
        expected, _ = reference.forward(x, topk_ids, topk_weights, *weights, precision="fp8")
    assert torch.equal(layer_(x), expected) and "precision='fp8'" in repr(layer_)
    layer_.precision = None
    assert not torch.equal(layer_(x), expected) and "precision" not in repr(layer_)


def test_what_nobody_needs_is_left_out_as_ever():
    problem, inputs, dy = layer(**SIZES)
    problem, rung = problem.at(precision="mxfp8"), stage("reference")
    _, saved = rung.forward(problem, inputs)
    grads = rung.backward(problem, inputs, saved, dy, Need(dx=False, dw_down=False))
    assert grads.dx is None and grads.dw_down is None and grads.dw_gate_up is not None


def test_the_ladder_knows_it(capsys):
    shape = ["ladder", "--shape", "9,64,48,4,2", "--stage", "reference", "--stage", "grouped", "--device", DEVICE]
    assert cli.main([*shape, "--precision", "mxfp8", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["problem"]["precision"] == "mxfp8"
    own, refused = printed["rows"]
    assert all(0 < share <= 1 for share in own["parity"].values())
    assert refused["why_not"].startswith('stage "grouped" has no products in mxfp8: use stage="reference"')
    assert cli.main([*shape, "--precision", "fp8"]) == 0
    assert "bf16, products fp8" in capsys.readouterr().out
