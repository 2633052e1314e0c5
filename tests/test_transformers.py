"""Models of transformers with their experts computed by moe: small random ones of several families, held to what
transformers computes by itself."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from cases import DEVICE
from torch import Tensor, nn

from mega_moe import LADDER

NEEDED = "needs transformers 5.23 or newer"
transformers = pytest.importorskip("transformers", minversion="5.23", reason=NEEDED)
registry = pytest.importorskip("transformers.integrations.moe", reason=NEEDED)
ours = pytest.importorskip("mega_moe.integrations.transformers", reason=NEEDED)

ours.register()

SIZES = dict(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
DEEPSEEK = dict(
    moe_intermediate_size=8,
    intermediate_size=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
FAMILIES = {
    "qwen3_moe": dict(
        moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, head_dim=8, **SIZES
    ),
    "mixtral": dict(intermediate_size=8, num_local_experts=4, **SIZES),
    "olmoe": dict(intermediate_size=8, num_experts=4, num_experts_per_tok=2, **SIZES),
    "glm4_moe": dict(head_dim=8, **DEEPSEEK, **SIZES),
    "deepseek_v3": dict(
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, **DEEPSEEK, **SIZES
    ),
}
"""Each with something of its own: what the router weights sum up to, their dtype, a shared expert, a dense layer."""


def model_of(family: str, experts: str = "eager", **options) -> transformers.PreTrainedModel:
    """A model of two layers, the same each time. Its weights are large, so that experts are seen in what comes out."""
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family] | IDS | options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=experts).to(DEVICE)
    for name, w in sorted(model.named_parameters()):
        if w.dim() > 1:
            nn.init.normal_(w, std=w.shape[-1] ** -0.5 if "embed" not in name else 1.0)
    return model


def tokens(rows: int = 2, length: int = 5) -> Tensor:
    return torch.randint(2, 32, (rows, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def train(model: transformers.PreTrainedModel, ids: Tensor | None = None) -> dict[str, Tensor]:
    """Logits, loss, and the gradient of each parameter."""
    ids = tokens() if ids is None else ids
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    grads = {name: w.grad for name, w in model.named_parameters() if w.grad is not None}
    return dict(logits=out.logits.detach(), loss=out.loss.detach(), **grads)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """In fp32, through whole models: eager experts add up in torch's order, not in ours."""
    assert got.keys() == expected.keys()
    for name, its in expected.items():
        torch.testing.assert_close(got[name], its, rtol=rtol, atol=atol, msg=lambda told, name=name: f"{name}: {told}")


@contextmanager
def counted() -> Iterator[list[int]]:
    """How often moe ran forward in it, known when it ends."""
    calls = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        yield calls
    name = torch.ops.mega_moe.forward.default.name()
    calls.append(sum(event.count for event in seen.key_averages() if event.key == name))


# Models


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_and_generates_as_with_its_own_experts(family):
    """And the experts that ran were moe's: eager experts would call the forward of their class."""
    model = model_of(family)
    expected = train(model)
    words = dict(inputs=tokens(2, 3), max_new_tokens=4, do_sample=False)
    written = model.generate(**words)
    assert written.shape == (2, 7)
    grads = [grad for name, grad in expected.items() if "experts.gate_up_proj" in name]
    assert grads and all(grad.abs().max() > 1e-3 for grad in grads)

    model.set_experts_implementation("mega_moe")
    assert ours.why_not(model) is None
    with counted() as calls:
        got = train(model)
    assert calls == [len(grads)]
    assert_close(got, expected)
    assert torch.equal(model.generate(**words), written)


def test_each_rung_has_a_name(rung):
    """And runs under it: all compute the same, but only one of them computes in float64."""
    expected = train(model_of("qwen3_moe"))
    model = model_of("qwen3_moe", f"mega_moe:{rung.name}")
    assert_close(train(model), expected)
    if rung.needs_triton:
        with pytest.raises(RuntimeError, match=f'stage "{rung.name}" computes in fp32'):
            model.double()(tokens())


def test_names_are_the_rungs():
    ours = {name for name in registry.ExpertsInterface().valid_keys() if name.startswith("mega_moe")}
    assert ours == {"mega_moe"} | {f"mega_moe:{rung.name}" for rung in LADDER}
    with pytest.raises(ValueError, match=r'"mega_moe:fastest"` is not supported.*"mega_moe:'):
        model_of("qwen3_moe", "mega_moe:fastest")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # it has another name since 5.24
def test_gradient_checkpointing():
    model = model_of("qwen3_moe", "mega_moe").train()
    with counted() as calls:
        expected = train(model)
    assert calls == [2]
    model.gradient_checkpointing_enable()
    with counted() as calls:
        assert_close(train(model), expected, rtol=0, atol=0)
    assert calls == [4]  # backward computes each layer once more


def test_checkpoints_stay_ordinary(tmp_path):
    """Names and values of the state dict, the files, and their config do not tell who computes the experts."""
    eager, model = model_of("qwen3_moe"), model_of("qwen3_moe", "mega_moe")
    model(tokens())
    for name, one in (("eager", eager), ("mega_moe", model)):
        one.save_pretrained(tmp_path / name)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "mega_moe" / file).read_bytes() == (tmp_path / "eager" / file).read_bytes()

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "eager", experts_implementation="mega_moe").to(
        DEVICE
    )
    assert again.config._experts_implementation == "mega_moe"
    assert list(again.state_dict()) == list(eager.state_dict())
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_in_bf16(family):
    """Qwen3-MoE hands its router weights over in x's dtype, GLM-4 in fp32. Both are within what bf16 loses."""
    exact = model_of(family)(tokens()).logits
    loss = lambda experts: (model_of(family, experts).bfloat16()(tokens()).logits.float() - exact).norm()
    assert loss("mega_moe") < 1.2 * loss("eager") < 0.1 * exact.norm()


def test_under_autocast():
    """Experts return the dtype that they got, as eager ones do."""
    model = model_of("mixtral", "mega_moe")
    experts = model.model.layers[0].mlp.experts
    x, ids, weights = torch.randn(3, 16), torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.rand(3, 2)
    x, ids, weights = (t.to(DEVICE) for t in (x, ids, weights))
    exact = experts(x, ids, weights)
    for given in (weights, weights.bfloat16()):
        with torch.autocast(DEVICE, torch.bfloat16):
            y = experts(x, ids, given)
        assert y.dtype == torch.float32
        torch.testing.assert_close(y, exact, rtol=0.05, atol=0.05)  # bf16 keeps 8 bits, of three products in a row


def test_compiled():
    """The block in one graph; what moe computes is looked up while it is compiled."""
    block = model_of("qwen3_moe", "mega_moe").model.layers[0].mlp
    x = torch.randn(1, 5, 16, device=DEVICE)
    expected = model_of("qwen3_moe").model.layers[0].mlp(x)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)  # eager adds up in another order


# Options


def test_options_reach_moe():
    experts = model_of("qwen3_moe", "mega_moe").model.layers[0].mlp.experts
    x, ids = torch.randn(3, 16, device=DEVICE), torch.tensor([[0, 1]] * 3, device=DEVICE)
    held = []
    try:
        for save, kept in ((None, 1), ("inputs", 0)):
            ours.register(save=save)
            held.clear()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.shape) or t, lambda t: t):
                experts(x, ids, torch.rand(3, 2, device=DEVICE))
            assert held.count((6, 2, 8)) == kept
        with pytest.raises(ValueError, match="'pre' or 'inputs', not 'act'"):
            ours.register(save="act")
        with pytest.raises(ValueError, match="max_tokens = 0"):
            ours.register(max_tokens=0)
    finally:
        ours.register()


# What is refused, and what is not


class Experts(nn.Module):
    """Experts as models write them, without the decorator that says what is special about them."""

    def __init__(self, config, act: str = "silu"):
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * 8, 16) / 4)
        self.down_proj = nn.Parameter(torch.randn(4, 16, 8) / 4)
        self.act_fn = transformers.activations.ACT2FN[act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for t, (ids, weights) in enumerate(zip(top_k_index, top_k_weights)):
            for e, weight in zip(ids, weights):
                if e < self.num_experts:
                    act = self._apply_gate(self.gate_up_proj[e] @ hidden_states[t])
                    y[t] = y[t] + weight * (self.down_proj[e] @ act)
        return y


class Clamped(Experts):
    """DeepSeek-V4's, and by another name GLM-5's."""

    limit = 0.5

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(min=-self.limit, max=self.limit)


class ClampedOnBothSides(Clamped):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.clamp(-self.limit, self.limit).chunk(2, dim=-1)
        return self.act_fn(gate) * up


class ClampedInSecret(Clamped):
    """By a number that it has under no name that one could look up."""

    limit = None

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=50.0)) * up


class OneMore(Experts):
    """Like GPT-OSS's."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (up + 1) * self.act_fn(gate)


def experts_of(cls: type, name: str = "mega_moe", facts: dict | None = None, **options) -> nn.Module:
    """Experts of a class, decorated as transformers' own are; each time a class of its own."""
    config = transformers.AutoConfig.for_model("qwen3_moe", experts_implementation=name)
    torch.manual_seed(0)
    return registry.use_experts_implementation(type(cls.__name__, (cls,), {}), **facts or {})(config, **options).to(
        DEVICE
    )


def routes() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]])
    return tuple(t.to(DEVICE) for t in (3 * torch.randn(3, 16), ids, torch.rand(3, 2)))


@pytest.mark.parametrize("cls", [Experts, Clamped])
def test_clamps_are_those_of_the_experts(cls):
    expected = experts_of(cls, "eager")(*routes())
    got = experts_of(cls)(*routes())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)  # eager adds up in another order
    assert cls is Experts or not torch.allclose(got, experts_of(Experts)(*routes()), atol=1e-2)


@pytest.mark.parametrize(
    "cls, facts, options, said",
    [
        (Experts, dict(has_gate=False), {}, "have no gate"),
        (Experts, dict(has_bias=True), {}, "add biases"),
        (Experts, dict(is_transposed=True), {}, "transposed"),
        (Experts, dict(is_concatenated=False), {}, "gate and up alternate"),
        (Experts, dict(has_post_expert_norm=True), {}, "puts out is normalised"),
        (Experts, dict(has_bias=True, is_transposed=True), {}, "add biases, their weights are transposed"),
        (Experts, {}, dict(act="gelu_pytorch_tanh"), "activation is not silu"),
        (Experts, {}, dict(act="relu"), "activation is not silu"),
        (Experts, {}, dict(act="xielu"), "activation is not silu"),
        (ClampedOnBothSides, {}, {}, "activation is not silu"),
        (ClampedInSecret, {}, {}, "activation is not silu"),
        (OneMore, {}, {}, "activation is not silu"),
    ],
)
def test_other_experts_are_refused_with_what_to_use(cls, facts, options, said):
    experts = experts_of(cls, facts=facts, **options)
    for call in (lambda: experts(*routes()), lambda: experts(*routes())):  # the second time too
        with pytest.raises(ValueError, match=f'^{cls.__name__}: .*{said}.*experts_implementation="grouped_mm"'):
            call()
    assert said in ours.why_not(nn.Sequential(nn.Linear(2, 2), experts).to("meta"))


def test_quantized_experts_are_refused():
    experts = experts_of(Experts).to(torch.float8_e4m3fn)
    x, ids, weights = routes()
    with pytest.raises(ValueError, match=r"quantized, to torch\.float8_e4m3fn"):
        experts(x.bfloat16(), ids, weights)


def test_whole_models_that_are_refused():
    """Some known ones; and one without experts, where transformers takes any name and does nothing with it."""
    sizes = SIZES | dict(head_dim=8, num_local_experts=4, intermediate_size=8)
    with torch.device("meta"):
        gpt_oss = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("gpt_oss", **sizes | IDS)
        )
        qwen3 = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3", **sizes | IDS))
    assert re.match(
        r"GptOssExperts: they add biases, .* transposed, .* alternate\. .*grouped_mm", ours.why_not(gpt_oss)
    )
    assert "Qwen3ForCausalLM has no experts" in ours.why_not(qwen3)
    model = model_of("mixtral", "mega_moe", hidden_act="gelu")
    with pytest.raises(ValueError, match="MixtralExperts: their activation is not silu"):
        model(tokens())


def test_a_compiled_call_is_refused_too():
    compiled = torch.compile(experts_of(OneMore), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="activation is not silu"):
        compiled(*routes())


def test_routes_that_transformers_gives_to_other_ranks():
    """Its own ways of expert parallelism mark them by one id too many, when experts are split."""
    x, ids, weights = routes()
    ids[0, 1] = ids[2, 0] = 4
    expected = experts_of(Experts, "eager")(x, ids, weights)
    experts = experts_of(Experts)
    experts._is_expert_parallel = True
    torch.testing.assert_close(experts(x, ids, weights), expected, rtol=1e-4, atol=1e-5)  # as above


# Around it


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=120
    )


def test_with_an_older_transformers_the_module_says_what_it_needs():
    program = python(
        """
import sys, types
transformers = types.ModuleType("transformers")
transformers.__path__ = []
sys.modules["transformers"] = transformers  # as old as can be: nothing is in it
import mega_moe
try:
    import mega_moe.integrations.transformers
except ImportError as error:
    print(error)
"""
    )
    assert program.returncode == 0, program.stderr
    for part in ("needs transformers 5.23 or newer", "transformers.distributed", 'pip install "transformers>=5.23"'):
        assert part in program.stdout


def test_the_page_s_example_runs(capsys):
    page = (Path(__file__).parents[1] / "docs" / "integrations" / "transformers.md").read_text()
    example, printed = re.search(
        r"^```python\n(.*?)^```\n.*?^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    ).groups()
    exec(compile(example, "docs/integrations/transformers.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == printed
