"""What stands in prime-rl for its Mega MoE: experts with its attributes, held to plain torch, and its TOML."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from cases import DEVICE
from torch import Tensor, nn
from torch.nn import functional as F

from mega_moe import moe
from mega_moe.integrations.prime_rl import Dispatch, MegaMoEExpertCompute, read_dispatch

E, K, H, I, T = 4, 2, 20, 6, 7  # no multiple of 256, and none of 128
TYPES = ("packed", "apart")


@pytest.fixture
def in_fp32(monkeypatch):
    """Rows and weights are rounded to bf16. Without that, all is in fp32."""
    monkeypatch.setattr(Tensor, "bfloat16", lambda t: t)


class Silu:
    @staticmethod
    def apply(gate: Tensor | None, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class ClampedSilu:
    def __init__(self, limit: float):
        self.limit = limit

    def apply(self, gate: Tensor | None, up: Tensor) -> Tensor:
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class Relu2:
    @staticmethod
    def apply(gate: Tensor | None, up: Tensor) -> Tensor:
        return F.relu(gate).square() * up


class GroupedExperts(nn.Module):
    """The attributes that experts of prime-rl have; its fusion packs gate_proj and up_proj into gate_up_proj."""

    def __init__(self, kind: str = "packed", activation=Silu, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        gate, up, down = (torch.randn(E, *sides).div(2).to(DEVICE, dtype) for sides in ((I, H), (I, H), (H, I)))
        packed = kind == "packed"
        self.gate_up_proj = nn.Parameter(torch.cat([gate, up], dim=1)) if packed else None
        self.gate_proj, self.up_proj = (None if packed else nn.Parameter(w) for w in (gate, up))
        self.down_proj = nn.Parameter(down)
        self.gate_proj_bias = self.up_proj_bias = self.down_proj_bias = None
        self.activation, self.num_experts, self.hidden_dim = activation, E, I


def plain(experts: GroupedExperts, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    """Each route by itself."""
    packed = experts.gate_up_proj is not None
    gate, up = experts.gate_up_proj.chunk(2, dim=1) if packed else (experts.gate_proj, experts.up_proj)
    y = torch.zeros_like(x)
    for t, k in torch.cartesian_prod(torch.arange(T), torch.arange(K)).tolist():
        e = ids[t, k]
        act = experts.activation.apply(gate[e] @ x[t], up[e] @ x[t])
        y = y.index_add(0, torch.tensor([t], device=x.device), scores[t, k] * (experts.down_proj[e] @ act)[None])
    return y


def routes(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, scores, and experts of which one is not chosen."""
    torch.manual_seed(1)
    ids = torch.tensor([[0, 1], [1, 0], [3, 1], [0, 3], [1, 3], [0, 1], [3, 0]], device=DEVICE)
    x, scores = torch.randn(T, H), torch.rand(T, K)
    return x.to(DEVICE, dtype).requires_grad_(), scores.to(DEVICE).requires_grad_(), ids


def train(compute, experts: GroupedExperts, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """y, and every gradient."""
    x, scores, ids = routes(dtype)
    y = compute(experts, x, scores, ids)
    y.backward(torch.linspace(-1, 1, T * H, device=DEVICE).view(T, H).to(y.dtype))
    grads = {name: w.grad for name, w in experts.named_parameters()}
    return dict(y=y.detach(), x=x.grad, scores=scores.grad, **grads)


def compute_of(experts: GroupedExperts, *args, **options) -> MegaMoEExpertCompute:
    return MegaMoEExpertCompute(experts, E, K, None, T, *args, **options)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("activation", [Silu, Silu(), ClampedSilu(0.5)], ids=["class", "silu", "clamped"])
def test_y_and_every_gradient(kind, activation, in_fp32):
    """In fp32: only the order of sums differs from that of plain torch."""
    expected = train(plain, GroupedExperts(kind, activation))
    experts = GroupedExperts(kind, activation)
    compute = compute_of(experts)
    assert compute.activation_clamp == getattr(activation, "limit", None)
    got = train(compute, experts)
    assert got.keys() == expected.keys()
    for name, its in expected.items():
        assert its.abs().max() > 1e-2
        torch.testing.assert_close(got[name], its, rtol=1e-5, atol=1e-5, msg=lambda told, name=name: f"{name}: {told}")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_in_bf16(kind, x, weights):
    """Whatever it is given, and dtypes stay."""
    exact = train(plain, GroupedExperts(kind))
    experts = GroupedExperts(kind, dtype=weights)
    got = train(compute_of(experts), experts, x)
    dtypes = dict(y=x, x=x, scores=torch.float32)
    for name, its in exact.items():
        assert got[name].dtype == dtypes.get(name, weights)
        assert (got[name].float() - its).norm() < 0.02 * its.norm(), name


def test_autocast_has_no_say():
    experts = GroupedExperts()
    compute, args = compute_of(experts), (experts, *routes())
    y = compute(*args)
    with torch.autocast(DEVICE, dtype=torch.float16):
        assert torch.equal(compute(*args), y)


def test_flat_routes_and_a_view_of_packed_weights(monkeypatch):
    experts = GroupedExperts(dtype=torch.bfloat16)
    compute = compute_of(experts)
    x, scores, ids = routes(torch.bfloat16)
    assert torch.equal(compute(experts, x, scores.flatten(), ids.flatten()), compute(experts, x, scores, ids))
    seen = []
    monkeypatch.setattr(f"{MegaMoEExpertCompute.__module__}.moe", lambda *args, **_: seen.append(args[3]) or args[0])
    compute(experts, x, scores, ids)
    assert seen[0].shape == (E, 2, I, H) and seen[0].data_ptr() == experts.gate_up_proj.data_ptr()


def test_options_reach_moe(monkeypatch):
    experts, seen = GroupedExperts("apart", ClampedSilu(7.0)), []
    monkeypatch.setattr(f"{MegaMoEExpertCompute.__module__}.moe", lambda x, *_, **options: seen.append(options) or x)
    compute_of(experts)(experts, *routes())
    compute_of(experts, 3, stage="grouped", save="inputs")(experts, *routes())
    compute_of(experts, 3, "fp8_bwd")(experts, *routes())
    both = dict(swiglu_limit=7.0, group=None, heap=None)
    assert seen == [
        dict(stage=None, precision=None, save=None, num_reserved_sms=16, **both),
        dict(stage="grouped", precision=None, save="inputs", num_reserved_sms=3, **both),
        dict(stage=None, precision="fp8_bwd", save=None, num_reserved_sms=3, **both),
    ]


@pytest.mark.parametrize("precision", ["fp8", "fp8_bwd", "mxfp8"])
def test_in_8_bits(precision):
    """As moe has it, to the bit, and not as in bf16; only "fp8_bwd" multiplies in bf16 in forward."""
    of = lambda precision: train(compute_of(GroupedExperts(), 0, precision, stage="reference"), GroupedExperts())
    experts = GroupedExperts(dtype=torch.bfloat16)
    x, scores, ids = routes(torch.bfloat16)
    weights = (experts.gate_up_proj.unflatten(1, (2, -1)), experts.down_proj)
    y = moe(x, ids, scores, *weights, stage="reference", precision=precision)
    got, bf16 = of(precision), of("bf16")
    assert torch.equal(got["y"], y.float())
    assert torch.equal(got["y"], bf16["y"]) == (precision == "fp8_bwd")
    assert not torch.equal(got["down_proj"], bf16["down_proj"])


# What is refused


def changed(**attributes) -> GroupedExperts:
    experts = GroupedExperts()
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


@pytest.mark.parametrize(
    "attributes, said",
    [
        (dict(gate_up_proj=None), r"^GroupedExperts: they have no gate\. .* type = \"torch\""),
        (dict(down_proj_bias=torch.zeros(E, H)), r"^GroupedExperts: they add biases, to down_proj\. "),
        (dict(activation=Relu2), "^Relu2: the activation is not silu"),
        (dict(activation=Relu2()), "^Relu2: the activation is not silu"),
        (dict(activation=object), "^object: the activation is not silu"),
        (dict(activation=None), "^GroupedExperts: they have no down_proj or no activation"),
        (dict(down_proj=None), "^GroupedExperts: they have no down_proj or no activation"),
        (dict(activation=ClampedSilu(0.0)), "swiglu_limit must be positive, not 0.0"),
    ],
)
def test_other_experts_are_refused(attributes, said):
    with pytest.raises(ValueError, match=said):
        compute_of(changed(**attributes))


def test_calls_that_are_refused():
    experts = GroupedExperts()
    compute = compute_of(experts)
    x, scores, ids = routes()
    with pytest.raises(ValueError, match=r"score_before_experts = True .* not the same through SwiGLU"):
        compute(experts, x, scores, ids, score_before_experts=True)
    more = (torch.cat([t, t]) for t in (x, scores, ids))
    assert compute(experts, *more).shape == (2 * T, H)  # no heaps, so no limit
    for which in (1, 2):
        few = [t[1:] if at == which else t for at, t in enumerate((x, scores, ids))]
        with pytest.raises(ValueError, match=r"must be \(T, K\) = \(7, 2\), or flat, not of shape \(6, 2\)"):
            compute(experts, *few)
    for wrong in (0, "2", E + 1):
        with pytest.raises(ValueError, match=f"top_k = {wrong!r}: it must be a whole number, 1 .. num_experts = 4"):
            MegaMoEExpertCompute(experts, E, wrong, None, T)
    with pytest.raises(ValueError, match="num_experts = 8, and 1 ranks with 4 experts each"):
        MegaMoEExpertCompute(experts, 8, K, None, T)
    with pytest.raises(ValueError, match="precision = 'fp8': stage \"grouped\" has 'bf16'"):
        compute_of(experts, 16, "fp8", stage="grouped")
    with pytest.raises(ValueError, match="precision must be one of 'bf16', 'fp8', 'fp8_bwd', 'mxfp8', not 'fp4'"):
        compute_of(experts, 16, "fp4")
    with pytest.raises(ValueError, match="'pre' or 'inputs', not 'act'"):
        compute_of(experts, save="act")
    with pytest.raises(ValueError, match="stage='fastest': the stages are reference"):
        compute_of(experts, stage="fastest")


# The table


def toml(table: str, rest: str = "") -> dict:
    return tomllib.loads(f'[trainer.model]\n{rest}\n[trainer.model.moe.dispatch]\ntype = "mega_moe"\n{table}')


def test_a_table(tmp_path):
    text = '[trainer.model.moe.dispatch]\ntype = "mega_moe"\nprecision = "bf16"\nnum_reserved_sms = 8\n'
    path = tmp_path / "rl.toml"
    path.write_text(text + "max_tokens_per_rank = 4096\n")
    expected = Dispatch(max_tokens_per_rank=4096, num_reserved_sms=8, precision="bf16")
    assert read_dispatch(path) == read_dispatch(str(path)) == expected
    assert read_dispatch(tomllib.loads(path.read_text())["trainer"]) == expected  # of the trainer alone
    assert read_dispatch(toml("", "seq_len = 100")) == Dispatch(100, 16, "bf16")
    assert read_dispatch(toml("")) == Dispatch(2048)
    assert read_dispatch(toml("max_tokens_per_rank = 5", 'moe.compute.type = "bf16"')) == Dispatch(5)
    for precision in ("fp8", "mxfp8", "fp8_bwd"):
        assert read_dispatch(toml(f'precision = "{precision}"')) == Dispatch(2048, 16, precision)


def test_a_table_of_another_type():
    other = '[trainer.model.moe.dispatch]\ntype = "deepep"\nnum_sms = 20\n'
    for config in ({}, {"trainer": {}}, {"trainer": {"model": {"ep": 8}}}, tomllib.loads(other)):
        assert read_dispatch(config) is None


@pytest.mark.parametrize(
    "table, said",
    [
        (
            "num_sms = 100\nfp8 = true",
            "has num_sms, fp8: .* its other keys are max_tokens_per_rank, num_reserved_sms, precision",
        ),
        ('precision = "fp4"', "precision must be one of 'bf16', 'fp8', 'fp8_bwd', 'mxfp8', not 'fp4'"),
        ("num_reserved_sms = -1", "num_reserved_sms must be a whole number, 0 or more, not -1"),
        ("num_reserved_sms = 1.5", "num_reserved_sms must be a whole number, 0 or more, not 1.5"),
        ("max_tokens_per_rank = 0", "max_tokens_per_rank must be a positive whole number, not 0"),
        ('max_tokens_per_rank = "all"', "max_tokens_per_rank must be a positive whole number, not 'all'"),
        ("max_tokens_per_rank = true", "max_tokens_per_rank must be a positive whole number, not True"),
    ],
)
def test_tables_that_are_refused(table, said):
    with pytest.raises(ValueError, match=rf"^\[trainer\.model\.moe\.dispatch\] {said}"):
        read_dispatch(toml(table))


def test_more_tables_that_are_refused():
    with pytest.raises(ValueError, match=re.escape("[trainer.model.moe.compute] asks for 'mxfp8': leave that")):
        read_dispatch(toml("", 'moe.compute.type = "mxfp8"'))
    with pytest.raises(ValueError, match=re.escape("in fp8, and [trainer.model.moe.compute] asks for 'bf16'")):
        read_dispatch(toml('precision = "fp8"', 'moe.compute.type = "bf16"'))
    with pytest.raises(ValueError, match="moe must be a table, not 'mega_moe'"):
        read_dispatch({"trainer": {"model": {"moe": "mega_moe"}}})


def test_the_page_s_example_runs(capsys):
    page = (Path(__file__).parents[1] / "docs" / "integrations" / "prime_rl.md").read_text()
    example, printed = re.search(
        r"^```python\n(.*?)^```\n.*?^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    ).groups()
    exec(compile(example, "docs/integrations/prime_rl.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed
    for precision in ("fp8", "fp8_bwd", "mxfp8"):
        assert f'"{precision}"' in re.search(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
