"""Every kernel compiles for the GPUs that it is written for, on a machine without any: see cross_compile.py.

The interpreter hides what only a compiler sees: a name with two shapes, a name undefined on one path, a tile that fits
no register file.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import DEVICE

from mega_moe.kernels.blocks import HALF

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_90", "sm_100", "gfx942", "gfx950")
OVER_RANKS = {"meet_kernel", "push_kernel", "combine_slots_kernel", "mega_forward_kernel", "mega_backward_kernel"}
"""What knows how many ranks there are, and how many of them are here. pull_kernel does not: one form serves all."""
PRESETS = ("qwen3-30b-a3b", "qwen3-235b-a22b")

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is present: every other test compiles kernels for it")


@pytest.fixture
def cross_compile(tmp_path):
    """Runs the program with these arguments; returns its rows, after looking for faults."""

    def run(*arguments: str) -> list[dict]:
        environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
        environment.pop("TRITON_INTERPRET", None)
        program = subprocess.run(
            [sys.executable, "-m", "tests.kernels.cross_compile", "--json", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert program.stdout, program.stderr
        output = json.loads(program.stdout)
        assert not output["forgotten"], f"no stage launches {output['forgotten']}: delete them, or have them compiled"
        return output["rows"]

    return run


def faults(rows: list[dict]) -> list[str]:
    """What is wrong, with where."""
    return [f"{row['target']} {row['form']}: {fault}" for row in rows for fault in row["faults"]]


def test_every_kernel_for_sm_90_and_for_one_more_target(cross_compile):
    """The other targets take turns, form by form: all of them are compiled for all targets under -m full."""
    rows = cross_compile("--target", "sm_90", "--rotate", *TARGETS[1:], "--over", "nothing")
    assert not faults(rows)
    assert {row["target"] for row in rows} == set(TARGETS)
    assert any(row["matrix_instructions"] for row in rows)


def test_over_ranks_that_are_processes(cross_compile):
    """For one GPU of either maker: what such a rank waits for, tells others, and has room for in registers."""
    rows = cross_compile("--target", "sm_90", "gfx942", "--over", "processes")
    assert not faults(rows)
    for target in ("sm_90", "gfx942"):
        assert {row["kernel"] for row in rows if row["target"] == target} >= OVER_RANKS


@pytest.mark.full
def test_over_ranks_in_one_process(cross_compile):
    """The same kernels with more in them: here all targets take turns."""
    assert not faults(cross_compile("--rotate", *TARGETS, "--over", "local heaps"))


def test_mx_codes_go_to_the_matrix_unit_with_their_scales(cross_compile):
    """Where it takes them."""
    rows = cross_compile("--target", "sm_100", "gfx950", "--kernel", "mx_slot_gemm_kernel")
    assert not faults(rows)
    assert len(rows) == 4 and all(row["scaled_instructions"] for row in rows)


def test_fp32_for_sm_90(cross_compile):
    rows = cross_compile("--target", "sm_90", "--dtype", "fp32")
    assert not faults(rows)
    assert not any(row["matrix_instructions"] for row in rows)  # IEEE, never TF32


@pytest.mark.full
def test_sizes_that_fill_no_tile(cross_compile):
    """Tails everywhere, and the clamp of SwiGLU. They need more registers: what they may not do is fail. Here too the
    targets take turns."""
    assert not faults(cross_compile("--rotate", *TARGETS, "--layer", "odd", "--may-spill"))


def test_faults_are_seen(cross_compile):
    """A tile too large for its warps spills and serialises its matrix instructions; a small one has none."""
    kernel = ("--target", "sm_90", "--kernel", "weight_grad_kernel", "--blocks")
    seen = faults(cross_compile(*kernel, "BLOCK_M=256,BLOCK_N=256,num_stages=4"))
    for fault in ("spills", "(C7511)", "bytes of shared memory"):
        assert any(fault in line for line in seen), fault
    assert all("no wgmma" in fault for fault in faults(cross_compile(*kernel, "BLOCK_M=16,BLOCK_N=16")))


def test_blocks_of_a_descriptor_are_not_changed_behind_its_back():
    """They are part of an argument that a launcher has made: other sizes would compile what nobody launches."""
    program = [sys.executable, "-m", "tests.kernels.cross_compile", "--kernel", "persistent_gate_up_kernel"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    refused = subprocess.run(
        [*program, "--blocks", "BLOCK_N=64"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert refused.returncode == 2 and "change BLOCK_N there" in refused.stderr


@pytest.mark.full
@pytest.mark.parametrize("layer, few", [("few", 0), ("several", 1)])
def test_programs_of_few_rows_fit_into_a_processor_together(layer, few, cross_compile):
    """Registers and shared memory of as many as a processor shall hold at once, of the largest kernel."""
    rows = cross_compile(
        *("--target", "sm_90", "--layer", layer, "--over", "nothing", "--kernel", "mega_backward_kernel")
    )
    assert rows and not faults(rows)
    tile = HALF["sm_90"].few[few].mega.gate_up
    for row in rows:
        assert row["registers"] * 32 * tile.num_warps * tile.per_processor <= 2**16, row["form"]
        assert (row["shared"] + 1024) * tile.per_processor <= 228 * 1024, row["form"]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_for_every_target(target, dtype, cross_compile):
    """Masks for tails and SwiGLU's clamp take registers that dact's epilogue does not have: there it may spill."""
    chosen = ("--target", target, "--dtype", dtype, "--rare")
    assert not faults(cross_compile(*chosen, "--layer", *PRESETS))
    assert not faults(cross_compile(*chosen, "--layer", "tails", "odd", "one", "--may-spill"))
