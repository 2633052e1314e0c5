"""The ledger of flops and bytes, held against numbers worked out by hand."""

import pytest
import torch

from mega_moe import roofline
from mega_moe.shapes import PRESETS, Problem

A = PRESETS["qwen3-30b-a3b"]
TOY = Problem(T=3, H=10, I=100, E=5, K=2, dtype=torch.float32)


def test_useful_flops_count_three_products_forward_and_six_backward():
    assert roofline.useful_flops(A, "forward") == 6 * 131072 * 2048 * 768
    assert roofline.useful_flops(A, "backward") == 12 * 131072 * 2048 * 768
    assert roofline.useful_flops(A, "forward", rows=1000) == 6 * 1000 * 2048 * 768
    with pytest.raises(ValueError, match="forward or backward"):
        roofline.useful_flops(A, "sideways")


@pytest.mark.parametrize("direction", roofline.DIRECTIONS)
@pytest.mark.parametrize("rows", [None, 77])
def test_the_steps_add_up_to_the_useful_flops_and_move_more_than_the_fused_minimum(direction, rows):
    steps = roofline.steps(A, direction, rows)
    total = sum(steps.values(), roofline.Cost())
    assert set(steps) == {"dispatch", "gate_up", "swiglu", "down", "combine"}
    assert total.flops == roofline.useful_flops(A, direction, rows) == roofline.fused(A, direction, rows).flops
    assert total.bytes > roofline.fused(A, direction, rows).bytes


def test_forward_bytes_of_a_toy_by_hand():
    """T=3, K=2: 6 rows. fp32, so 4 bytes an element; w_gate_up is 5*2*100*10, w_down 5*10*100."""
    assert {step: cost.bytes for step, cost in roofline.steps(TOY, "forward").items()} == {
        "dispatch": 4 * (30 + 60) + 8 * 6,
        "gate_up": 4 * (60 + 10000 + 1200),
        "swiglu": 4 * (1200 + 600),
        "down": 4 * (600 + 5000 + 60),
        "combine": 4 * (60 + 6 + 30),
    }
    assert roofline.fused(TOY, "forward").bytes == 4 * (30 + 6 + 10000 + 5000 + 1200 + 30) + 8 * 6


def test_backward_bytes_of_a_toy_by_hand():
    assert {step: cost.bytes for step, cost in roofline.steps(TOY, "backward").items()} == {
        "combine": 4 * (30 + 60) + 8 * 6,
        "down": 4 * (60 + 5000 + 600 + 60 + 600 + 5000),
        "swiglu": 4 * (1200 + 600 + 1200 + 600 + 6),
        "gate_up": 4 * (1200 + 10000 + 60 + 30 + 60 + 1200 + 60 + 10000),
        "dispatch": 4 * (60 + 30),
    }
    assert roofline.fused(TOY, "backward").bytes == 4 * (30 + 30 + 6 + 15000 + 1200 + 30 + 6 + 15000) + 8 * 6


def test_the_kernels_of_a_gathering_rung_by_hand():
    """The same toy: x is 30 elements, rows 60, pre 1200, act 600; one product is 6*10*100 = 6000 multiply-adds."""
    assert roofline.tiles(TOY) == {
        "gate_up": roofline.Cost(4 * 6000, 4 * (30 + 10000 + 1200 + 600)),
        "down": roofline.Cost(2 * 6000, 4 * (600 + 5000 + 60)),
        "y": roofline.Cost(0, 4 * (60 + 6 + 30)),
        "dact": roofline.Cost(2 * 6000, 4 * (30 + 5000 + 1200 + 1200 + 600)),
        "drows": roofline.Cost(4 * 6000, 4 * (1200 + 10000 + 60)),
        "dx": roofline.Cost(0, 4 * (60 + 30)),
        "dw_gate_up": roofline.Cost(4 * 6000, 4 * (1200 + 30 + 10000)),
        "dw_down": roofline.Cost(2 * 6000, 4 * (600 + 30 + 5000)),
    }
    # One row: one expert's weights are read (and five gradients written), and tokens, which nobody counts, as before.
    assert roofline.tiles(TOY, rows=1)["down"] == roofline.Cost(2 * 1000, 4 * (100 + 1000 + 10))
    assert roofline.tiles(TOY, rows=1)["dw_down"] == roofline.Cost(2 * 1000, 4 * (100 + 30 + 5000))


@pytest.mark.parametrize("problem", [A, TOY], ids=["A", "toy"])
@pytest.mark.parametrize("masked", [0, 1])
def test_a_gathering_rungs_kernels_do_the_useful_flops_in_fewer_bytes(problem, masked):
    rows = problem.R - masked
    tiles = sum(roofline.tiles(problem, rows).values(), roofline.Cost())
    steps = [cost for d in roofline.DIRECTIONS for cost in roofline.steps(problem, d, rows).values()]
    least = [roofline.fused(problem, d, rows) for d in roofline.DIRECTIONS]

    assert tiles.flops == sum(roofline.useful_flops(problem, d, rows) for d in roofline.DIRECTIONS)
    assert sum(cost.bytes for cost in least) < tiles.bytes < sum(cost.bytes for cost in steps)


@pytest.mark.parametrize("problem", [A, TOY, TOY.at(T=1, K=1)], ids=["A", "toy", "one row"])
@pytest.mark.parametrize("masked", [0, 1])
def test_the_bills_of_the_rungs_add_up_to_the_ledgers(problem, masked):
    rows = problem.R - masked
    bills = {direction: roofline.bills(problem, direction, rows) for direction in roofline.DIRECTIONS}
    for direction, of in bills.items():
        assert list(of) == list(roofline.BILLED)
        assert sum(of["grouped"].values()) == sum(c.bytes for c in roofline.steps(problem, direction, rows).values())
        assert sum(of["fused"].values()) == roofline.fused(problem, direction, rows).bytes
    gather = sum(sum(of["gather"].values()) for of in bills.values())
    ids, weights = problem.T * problem.K * 8, problem.T * problem.K * 4
    tiles = sum(cost.bytes for cost in roofline.tiles(problem, rows).values())
    assert gather == tiles + 2 * ids + weights


def test_what_a_rung_removes_of_a_toy_by_hand():
    """pre is 1200 elements, act 600, rows and dy_rows 60, dy 30."""
    removed = {}
    for direction in roofline.DIRECTIONS:
        bills = roofline.bills(TOY, direction)
        for rung, below in (("swiglu", "grouped"), ("gather", "swiglu")):
            less = {tensor: bills[below][tensor] - bills[rung][tensor] for tensor in bills[rung]}
            removed[direction, rung] = {tensor: bytes for tensor, bytes in less.items() if bytes}
    assert removed == {
        ("forward", "swiglu"): {"pre": 4 * 1200},
        ("forward", "gather"): {"rows": 4 * 2 * 60},
        ("backward", "swiglu"): {"dact": 4 * 2 * 600},
        ("backward", "gather"): {"dy": -4 * 30, "dy_rows": 4 * 3 * 60, "rows": 4 * 2 * 60},
    }


def test_weights_of_experts_that_nobody_visits_are_not_read():
    assert roofline.steps(TOY, "forward", rows=1)["down"].bytes == 4 * (100 + 1000 + 10)


@pytest.mark.parametrize(
    "device, name",
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI350X", "MI350X"),
    ],
)
def test_devices_are_known_by_the_names_they_give(device, name):
    known = roofline.ceiling(device)
    assert known.name == name and known.source


@pytest.mark.parametrize("device", ["NVIDIA GeForce RTX 4090", "NVIDIA GB200", "NVIDIA GH200 480GB", "cpu", ""])
def test_an_unknown_device_has_no_ceiling(device):
    assert roofline.ceiling(device) is None


def test_the_time_an_h200_allows():
    """Shape A is bound by flops: 1.237 TFLOP forward at 989.5 TFLOP/s; the same in 3 rows is bound by the weights."""
    h200 = roofline.ceiling("NVIDIA H200")
    assert roofline.allowed_ms(A, "forward", h200) == pytest.approx(1.2500, rel=1e-3)
    assert roofline.allowed_ms(A, "backward", h200) == pytest.approx(2.5000, rel=1e-3)
    small = A.at(T=16)
    assert roofline.allowed_ms(small, "forward", h200) == pytest.approx(
        roofline.fused(small, "forward").bytes / 4.8e12 * 1e3
    )
    fp32 = A.at(dtype=torch.float32)
    assert roofline.allowed_ms(fp32, "forward", h200) == pytest.approx(1237.0 / 67, rel=1e-3)
    assert roofline.allowed_ms(A.at(dtype=torch.float64), "forward", h200) is None
