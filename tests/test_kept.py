"""Codes of weights in a block that keeps them: made once, and never those of another weight."""

import pytest
import torch
from cases import DEVICE, layer, same_bits

from mega_moe import keep_codes, moe
from mega_moe.kept import KEPT, once
from mega_moe.kernels import quantize


def doubled(made: list):
    """Something to make of a weight, which notes that it was made."""

    def make(w, *arguments):
        made.append(arguments)
        return w.detach() * 2

    return make


@pytest.fixture
def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2, 3, device=DEVICE))


def test_made_once_in_a_block_and_in_every_call_outside(weight):
    make = doubled(made := [])
    for _ in range(2):
        once(make, weight)
    assert len(made) == 2
    for _ in range(2):
        with keep_codes():
            assert once(make, weight) is once(make, weight.detach())  # as backward sees one that is no leaf
            once(make, weight, "another form")
        assert not KEPT
    assert made[2:] == [(), ("another form",)] * 2


def fill(w):
    with torch.no_grad():
        w.fill_(3.0)


def step(w):
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=1.0).step()


def load(w):
    module = torch.nn.Module()
    module.w = w
    module.load_state_dict({"w": torch.full_like(w, 5.0)})


@pytest.mark.parametrize(
    "write", [fill, step, load, lambda w: w.detach().add_(1)], ids=["fill", "step", "load", "view"]
)
def test_a_write_is_seen(write, weight):
    make = doubled([])
    with keep_codes():
        once(make, weight)
        write(weight)
        assert torch.equal(once(make, weight), weight * 2)


@pytest.mark.parametrize("freed", [True, False])
def test_another_tensor_at_the_same_address_is_seen(freed):
    """As an allocator hands out again what was freed, or beside the first: the same memory, shape, count of writes."""
    make, memory = doubled([]), torch.zeros(6, device=DEVICE)
    addresses, alive = [], []
    with keep_codes():
        for value in (1.0, 2.0):
            memory.fill_(value)
            w = torch.from_dlpack(torch.utils.dlpack.to_dlpack(memory))
            assert torch.equal(once(make, w), torch.full_like(w, 2 * value))
            addresses.append((w.data_ptr(), w._version))
            if not freed:
                alive.append(w)
            del w
    assert addresses[0] == addresses[1]


def test_other_parts_of_one_storage_are_other_weights(weight):
    make = doubled(made := [])
    both = torch.arange(8.0, device=DEVICE)
    with keep_codes():
        for part in (both[:4], both[4:], both[:4].view(2, 2), both[:4].view(2, 2).T):
            assert torch.equal(once(make, part), part * 2)
    assert len(made) == 4


def test_what_is_kept_of_a_weight_goes_with_it():
    with keep_codes():
        for _ in range(3):
            once(doubled([]), torch.ones(3, device=DEVICE))
        assert len(KEPT[-1]) == 1


def test_what_has_no_count_is_not_kept():
    make = doubled(made := [])
    with torch.inference_mode(), keep_codes():
        w = torch.ones(3, device=DEVICE)
        once(make, w), once(make, w)
    assert len(made) == 2


def test_blocks_end_when_something_raises(weight):
    with pytest.raises(ZeroDivisionError), keep_codes(), keep_codes():
        raise ZeroDivisionError
    assert not KEPT


def trained(stage: str, precision: str, parts: int, steps: int) -> list[torch.Tensor]:
    """y and the gradients of each step of a layer whose weights are stepped between: torch's own optimiser."""
    _, inputs, dy = layer(T=6, H=16, I=24, E=2)
    x, weights = inputs.x.requires_grad_(), [inputs.w_gate_up.requires_grad_(), inputs.w_down.requires_grad_()]
    optimizer, results = torch.optim.SGD(weights, lr=0.1), []
    for _ in range(steps):
        for _ in range(parts):
            y = moe(x, inputs.topk_ids, inputs.topk_weights, *weights, stage=stage, precision=precision)
            y.backward(dy)
            results.append(y.detach())
        results += [w.grad.clone() for w in weights]
        optimizer.step()
        optimizer.zero_grad()
    return results


@pytest.mark.parametrize(
    "stage, precision, parts, made",
    [("persistent", "fp8", 2, 2), ("mega", "fp8_bwd", 1, 2), ("persistent", "mxfp8", 1, None)],
)
def test_training_in_a_block(stage, precision, parts, made, monkeypatch):
    """To the bit what it is outside, and codes of each weight are made once a step."""
    calls, make_codes, steps = [], quantize.make_codes, 2
    outside = trained(stage, precision, parts, steps)
    monkeypatch.setattr(quantize, "make_codes", lambda *arguments: calls.append(1) or make_codes(*arguments))
    with keep_codes():
        inside = trained(stage, precision, parts, steps)
    assert all(map(same_bits, inside, outside))
    assert made is None or len(calls) == steps * made
