"""The energy that the benchmarks count beside time."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import DEVICE

from mega_moe.shapes import PRESETS

BENCH = Path(__file__).resolve().parent / "bench"


@pytest.fixture
def bench(monkeypatch):
    """Modules of tests/bench, which import each other from their own folder."""
    monkeypatch.syspath_prepend(BENCH)
    import contestants
    import energy
    import measuring

    return SimpleNamespace(contestants=contestants, energy=energy, measuring=measuring)


class Counting:
    """A driver whose counter goes up by `step` joules after every `every` laps, wherever it begins."""

    def __init__(self, every: int, step: float, begun: int):
        self.every, self.step, self.laps = every, step, begun

    def lap(self):
        self.laps += 1

    def read(self) -> float:
        return self.laps // self.every * self.step


@pytest.mark.parametrize("begun", [0, 3, 9])
def test_energy_is_counted_from_step_to_step_of_the_counter(bench, monkeypatch, begun):
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    counting = Counting(every=10, step=25.0, begun=begun)
    assert bench.energy.joules_a_lap(counting.lap, counting.read, seconds=0.001) == 2.5


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is for measuring, not for trying the machinery")
def test_the_layers_benchmark_counts_a_forward_and_a_whole_step(bench, monkeypatch):
    alone = []  # of each step: whether it returned y, and not gradients

    def joules(step, read):
        result = step()
        alone.append(isinstance(result, torch.Tensor))
        return read()

    monkeypatch.setattr(bench.measuring, "counter", lambda device: lambda: 7.0)
    monkeypatch.setattr(bench.measuring, "joules_a_lap", joules)
    problem = PRESETS["tiny"].at(device="cpu")
    found = bench.measuring.measure_layer(problem, [bench.contestants.CONTESTANTS["torch"]])
    assert found["torch"].joules == {"forward": 7.0, "forward+backward": 7.0} and alone == [True, False]


def test_where_nothing_counts_there_is_no_energy(bench, monkeypatch):
    assert bench.energy.counter("cpu") is None
    monkeypatch.setattr(bench.energy, "LIBRARY", "libof-another-maker.so")
    assert bench.energy.counter("cuda") is None


@pytest.mark.parametrize("refused", [None, "nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "total"])
def test_the_counter_is_that_of_the_current_gpu(bench, monkeypatch, refused):
    asked = []

    def by_uuid(uuid, handle):
        asked.append(uuid)
        return refused == "nvmlDeviceGetHandleByUUID"

    def total(handle, millijoules):
        ctypes.cast(millijoules, ctypes.POINTER(ctypes.c_ulonglong))[0] = 1500
        return 3 * (refused == "total")

    nvml = SimpleNamespace(
        nvmlInit_v2=lambda: refused == "nvmlInit_v2",
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetTotalEnergyConsumption=total,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"12-{device}"))
    read = bench.energy.counter("cuda")
    assert (read is None) == (refused is not None)
    if read:
        assert read() == 1.5 and asked == [b"GPU-12-1"]
