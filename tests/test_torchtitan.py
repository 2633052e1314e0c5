"""TorchTitan's MoE layer with its routed experts computed by moe, in both forms that they have, held to its own."""

import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from cases import DEVICE
from torch import Tensor, nn

NEEDED = "needs torchtitan 0.3"
ours = pytest.importorskip("mega_moe.integrations.torchtitan", reason=NEEDED, exc_type=ImportError)
from torchtitan.config import OverrideConfig, apply_overrides  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter  # noqa: E402
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # its router asks for fp32, and has it

E, K, H, I = 5, 2, 16, 8
EMPTY = 3  # an expert that no token goes to
FORMS = {"routed": "mega_moe.integrations.torchtitan.routed_experts"}
FORMS["grouped"] = FORMS["routed"].replace("routed", "grouped")


@pytest.fixture
def in_fp32(monkeypatch):
    """TorchTitan rounds rows and weights to bf16, and so do we. Without that, both compute in fp32."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda t: t)


def config(experts: type[GroupedExperts.Config] = GroupedExperts.Config, **options) -> MoE.Config:
    normal = lambda std: partial(nn.init.normal_, std=std)
    init = {"w1_EFD": normal(H**-0.5), "w2_EDF": normal(I**-0.5), "w3_EFD": normal(H**-0.5)}
    return MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=experts(dim=H, hidden_dim=I, num_experts=E, param_init=init),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=K),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=E,
            gate=Linear.Config(in_features=H, out_features=E, param_init={"weight": normal(H**-0.5)}),
            top_k=K,
            **options,
        ),
    )


def overridden(form: str, **options) -> MoE.Config:
    """A config as TorchTitan's trainer leaves it, where a form of the override is named with options."""
    changed = config()
    replaced = apply_overrides(OverrideConfig(imports=[(FORMS[form], options)]), changed)
    assert len(replaced) == 1
    return changed


def layer_of(changed: MoE.Config, dtype: torch.dtype = torch.float32) -> MoE:
    """A layer, with the same weights each time; its router never chooses one of the experts."""
    layer = changed.build().to(DEVICE)
    torch.manual_seed(0)
    with torch.no_grad():
        layer.init_states()
    layer.expert_bias_E[EMPTY] = -10.0
    layer.routed_experts.to(dtype)
    return layer


def train(layer: MoE, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """y, and the gradients of x and of each parameter."""
    torch.manual_seed(1)
    x = torch.randn(2, 5, H, device=DEVICE).to(dtype).requires_grad_()
    dy = torch.randn(2, 5, H, device=DEVICE).to(dtype)
    y = layer(x)
    y.backward(dy)
    grads = {name: w.grad for name, w in layer.named_parameters()}
    assert len(grads) == 4 and all(grad is not None for grad in grads.values())
    return dict(y=y.detach(), x=x.grad, **grads)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """In fp32: only the order of sums differs."""
    assert got.keys() == expected.keys()
    for name, its in expected.items():
        assert its.abs().max() > 1e-2, name
        torch.testing.assert_close(got[name], its, rtol=1e-5, atol=1e-5, msg=lambda told, name=name: f"{name}: {told}")


# The layer


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, dict(score_func="softmax", route_norm=True, route_scale=2.5)])
def test_y_and_every_gradient_are_its_own(form, options, in_fp32):
    expected = train(layer_of(config(**options)))
    changed = config(**options)
    apply_overrides(OverrideConfig(imports=[FORMS[form]]), changed)
    got = train(layer_of(changed))
    assert_close(got, expected)
    for name, grad in got.items():
        if "inner_experts" in name:
            assert (grad[EMPTY] == 0).all() and (grad[:EMPTY].abs().amax((1, 2)) > 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_what_bf16_loses_is_not_more_than_its_own_loses(form, x, weights, monkeypatch):
    """Of rows and weights that bf16 holds exactly. Dtypes are its own too."""
    with monkeypatch.context() as inside:
        inside.setattr(Tensor, "bfloat16", lambda t: t)
        exact = train(rounded(layer_of(config())))
    if x == torch.bfloat16:  # the router would see other numbers, and could choose other experts
        monkeypatch.setattr(Linear, "forward", lambda self, x: nn.functional.linear(x.float(), self.weight))
    own, got = (train(rounded(layer_of(changed, weights)), x) for changed in (config(), overridden(form)))
    for name, its in exact.items():
        assert got[name].dtype == own[name].dtype
        lost, own_lost = ((values[name].float() - its).norm() / its.norm() for values in (got, own))
        assert lost < max(1.25 * own_lost, 2**-9) and lost < 0.02, f"{name}: lost {lost:.4f}, its own {own_lost:.4f}"


def rounded(layer: MoE) -> MoE:
    with torch.no_grad():
        for w in layer.parameters():
            w.copy_(w.to(torch.bfloat16))
    return layer


@cache
def its_own() -> dict[str, Tensor]:
    """In fp32, once for all rungs."""
    return train(layer_of(config()))


def test_each_rung(rung, in_fp32):
    assert_close(train(layer_of(overridden("routed", stage=rung.name))), its_own())


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_and_first_weights_are_its_own(form):
    own, layer = layer_of(config()), layer_of(overridden(form))
    names = [f"routed_experts.inner_experts.{name}" for name in ("w1_EFD", "w2_EDF", "w3_EFD")]
    assert list(layer.state_dict()) == list(own.state_dict()) and set(names) < set(own.state_dict())
    for name, w in own.state_dict().items():
        assert torch.equal(layer.state_dict()[name], w) and layer.state_dict()[name].stride() == w.stride()
    layer.load_state_dict({name: w + 1 for name, w in own.state_dict().items()})
    own.load_state_dict(layer.state_dict())
    assert isinstance(layer.routed_experts, RoutedExperts)
    assert isinstance(layer.routed_experts.inner_experts, GroupedExperts)


@pytest.mark.parametrize("form", FORMS)
def test_compiled(form):
    """The routed experts in one graph, as TorchTitan compiles its blocks: the same to the bit."""
    layer = layer_of(overridden(form))
    expected = train(layer)
    layer.zero_grad()
    layer.routed_experts.compile(backend="aot_eager", fullgraph=True)
    for name, its in train(layer).items():
        assert torch.equal(its, expected[name]), name


# Rows that are sorted


@pytest.mark.parametrize("form", FORMS)
def test_autocast_has_no_say(form):
    layer = layer_of(overridden(form)).routed_experts
    torch.manual_seed(1)
    x, scores = torch.randn(1, 5, H, device=DEVICE), torch.rand(1, 5, K, device=DEVICE)
    ids = torch.randint(E, (1, 5, K), device=DEVICE)
    y = layer(x, scores, ids, ids.flatten().bincount(minlength=E))
    with torch.autocast(DEVICE, dtype=torch.float16):
        assert torch.equal(layer(x, scores, ids, ids.flatten().bincount(minlength=E)), y)
    x, scores, ids = (t.to("meta") for t in (x, scores, ids))  # which has no autocast
    if form == "routed":
        assert layer.to("meta")(x, scores, ids, None).shape == y.shape


def test_rows_beyond_the_experts_are_padding(in_fp32):
    """A dispatcher that has room for more rows than came leaves anything there."""
    experts = layer_of(overridden("grouped")).routed_experts.inner_experts
    own = layer_of(config()).routed_experts.inner_experts
    counts = torch.tensor([3, 0, 2, 0, 1], device=DEVICE)
    x = torch.randn(6, H, device=DEVICE)
    dy = torch.randn(6, H, device=DEVICE)
    padded, of_own = torch.cat([x, x.new_full((3, H), torch.nan)]).requires_grad_(), x.clone().requires_grad_()
    y, expected = experts(padded, counts), own(of_own, counts)
    torch.testing.assert_close(y[:6], expected)
    assert (y[6:] == 0).all()
    y.backward(torch.cat([dy, dy[:3]]))
    expected.backward(dy)
    torch.testing.assert_close(padded.grad[:6], of_own.grad)
    assert (padded.grad[6:] == 0).all()
    for w, its in zip(experts.parameters(), own.parameters()):
        torch.testing.assert_close(w.grad, its.grad)


def test_no_rows():
    """A rank to which nobody sent."""
    experts = layer_of(overridden("grouped")).routed_experts.inner_experts
    x = torch.randn(0, H, device=DEVICE, requires_grad=True)
    y = experts(x, torch.zeros(E, dtype=torch.int64, device=DEVICE))
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, H)
    assert all((w.grad == 0).all() for w in experts.parameters())


# Options, and what is refused


@pytest.mark.parametrize("form", FORMS)
def test_options_reach_moe(form, monkeypatch):
    options = dict(stage="mega", precision="fp8_bwd", save="inputs", num_reserved_sms=3)
    layer = layer_of(overridden(form, **options))
    seen = []
    monkeypatch.setattr(ours, "moe", lambda x, *_, **options: seen.append(options) or x)
    layer(torch.randn(1, 3, H, device=DEVICE))
    assert seen == [dict(group=None, **options)]


@pytest.mark.parametrize("form", FORMS)
def test_in_8_bits(form):
    """Near what it is in bf16, and not the same."""
    layers = [layer_of(overridden(form, stage="reference", precision=precision)) for precision in (None, "fp8")]
    expected, got = map(train, layers)
    for name, its in expected.items():
        lost = ((got[name] - its).norm() / its.norm()).item()
        assert 1e-3 < lost < 0.2, f"{name}: lost {lost:.4f}"


class WithBias(GroupedExperts):
    """Experts of another kind, as GPT-OSS's are, which are a subclass too."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass


@pytest.mark.parametrize("form", FORMS)
def test_other_experts_are_refused_by_name(form):
    with pytest.raises(ValueError, match=r"^WithBias is not computed by mega_moe, .*without biases and without quant"):
        apply_overrides(OverrideConfig(imports=[FORMS[form]]), config(WithBias.Config))


def test_converters_that_would_have_no_effect_are_refused():
    """TorchTitan's converters to FP8 and MXFP8 make a subclass of whatever class a config has."""

    class Float8Experts(ours.Experts):
        @dataclass(kw_only=True, slots=True)
        class Config(ours.Experts.Config):
            pass

    with pytest.raises(ValueError, match=r"^Float8Experts changes how .* leave out this converter"):
        Float8Experts.Config(dim=H, hidden_dim=I, num_experts=E).build()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options, error, said",
    [
        (dict(stage="fastest"), ValueError, "stage='fastest': the stages are reference"),
        (dict(save="act"), ValueError, "'pre' or 'inputs', not 'act'"),
        (dict(num_reserved_sms=-1), ValueError, "num_reserved_sms"),
        (dict(precision="fp4"), ValueError, "precision must be 'bf16' or 'fp8' or 'fp8_bwd' or 'mxfp8', not 'fp4'"),
        (dict(stage="grouped", precision="fp8"), ValueError, "precision = 'fp8': stage \"grouped\" has 'bf16'"),
        (dict(precision_of_x="fp8"), TypeError, "precision_of_x"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_built(form, options, error, said):
    with pytest.raises(error, match=said):
        overridden(form, **options)


def test_more_options_that_are_refused():
    for wrong in (0, "16384", 2.5, True):
        with pytest.raises(ValueError, match=f"max_tokens = {wrong!r}: it must be a whole number, at least 1"):
            overridden("routed", max_tokens=wrong)
    with pytest.raises(TypeError, match="max_tokens"):
        overridden("grouped", max_tokens=1)
    with pytest.raises(ValueError, match="an ancestor of"):  # TorchTitan's own words
        apply_overrides(OverrideConfig(imports=list(FORMS.values())), config())
    with pytest.raises(ValueError, match="another override has it"):
        ours.routed_experts(overridden("routed").routed_experts)


# Around it


def test_without_torchtitan_or_with_another_the_module_says_what_it_needs():
    program = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import importlib.metadata as metadata, sys
import mega_moe
assert "torchtitan" not in sys.modules
sys.modules["torchtitan"] = None
for found in None, "0.2.1", "0.30.0", "0.3.7":
    def version(name):
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found
    metadata.version = version
    try:
        import mega_moe.integrations.torchtitan
    except ImportError as error:
        print(error)
""",
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        timeout=120,
    )
    assert program.returncode == 0, program.stderr
    absent, older, newer, broken = program.stdout.splitlines()
    for said in (absent, older, newer, broken):
        assert "needs torchtitan 0.3 (" in said and said.endswith('pip install "torchtitan>=0.3,<0.4"')
    assert "met 0.2.1." in older and "met 0.30.0." in newer
    assert "met: " in absent and "torchtitan" in absent.split("met: ")[1] and "met: " in broken


def test_the_page_s_example_runs(capsys):
    page = (Path(__file__).parents[1] / "docs" / "integrations" / "torchtitan.md").read_text()
    example, printed = re.search(
        r"^```python\n(.*?)^```\n.*?^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    ).groups()
    exec(compile(example, "docs/integrations/torchtitan.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed
