"""The energy that a GPU has taken, by the counter of its driver (NVML), and what of it one run of a layer takes.

A card under load sits at its power limit, so its clocks, and with them all times, follow from the energy that a layer
needs. The counter goes up in steps, ten a second on an H200, and says nothing in between. So a run is repeated, and the
energy is taken from one step to another, a second later.

NVML comes with the driver. Three of its functions are called here; no package has to be there for that.
"""

import ctypes
import time
from collections.abc import Callable

import torch

LIBRARY = "libnvidia-ml.so.1"
SECONDS = 1.0
"""How long a run is repeated at least."""

AHEAD = 2
"""How many runs the host is ahead of the GPU: so that it has work, and the counter is read while these go on."""


def counter(device: str) -> Callable[[], float] | None:
    """What reads the joules that the current GPU has taken since its driver was loaded. None where none counts: on a
    CPU, without NVML, on GPUs before Volta."""
    if device != "cuda":
        return None
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return None

    def read() -> float:
        """Raises RuntimeError with NVML's number of what went wrong."""
        if code := nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)):
            raise RuntimeError(f"nvmlDeviceGetTotalEnergyConsumption returned {code}")
        return millijoules.value / 1e3

    try:
        read()
    except RuntimeError:
        return None
    return read


def joules_a_lap(lap: Callable[[], object], read: Callable[[], float], seconds: float = SECONDS) -> float:
    """The energy of one of many laps that follow each other without a pause, the card's idle draw included.

    lap: what is launched each time. read: the counter. The laps between two of its steps are counted.
    """
    done: list[torch.cuda.Event] = []

    def run_one() -> None:
        lap()
        done.append(torch.cuda.Event())
        done[-1].record()
        if len(done) > AHEAD:
            done.pop(0).synchronize()

    def until_it_steps(laps: int) -> tuple[float, int]:
        before = read()
        while (now := read()) == before:
            run_one()
            laps += 1
        return now, laps

    first, _ = until_it_steps(0)
    begun, laps = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        run_one()
        laps += 1
    last, laps = until_it_steps(laps)
    torch.cuda.synchronize()
    return (last - first) / laps
