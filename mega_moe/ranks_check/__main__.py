"""The command line of the check, and the order of its parts."""

import argparse
import faulthandler
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ..ladder import machine
from ..processes import SHARED_GPU
from ..shapes import PRESETS, Problem
from . import right, times
from .parts import Check, Node
from .where import where

SECONDS = 540  # for everything: below the ten minutes that many queues give a short job
PARTS = ("parity", "stress", "graph", "groups", "failing", "times", "trace", "predicted")
RANKS_FOR = dict(groups=4, failing=2)  # where one is not enough


def main(argv: list[str] | None = None) -> int:
    """Run the check on this rank. Returns its exit code: 0 where all parts passed, 1 where one did not, 2 where none
    could begin."""
    arguments = parser().parse_args(argv)
    if "LOCAL_RANK" not in os.environ:
        print("start it with torchrun --nproc-per-node=N -m mega_moe.ranks_check, N: a GPU each", file=sys.stderr)
        return 2
    W = int(os.environ["WORLD_SIZE"])
    try:
        shapes = shapes_of(arguments.shape, W)
        wanted = wanted_of(arguments.part, W, torch.cuda.is_available())
        device, collectives = device_of(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2

    # Two limits of ours come first: of a part, and of heaps. NCCL's and gloo's are for what neither sees.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and collectives else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=arguments.seconds + 60))
    hosts = dist.new_group(backend="gloo", timeout=timedelta(seconds=arguments.seconds + 60))
    node = Node(dist.get_rank(), W, device, hosts, collectives)
    about = dict(machine=machine(device.type), ranks=W, shapes={n: sizes(p) for n, p in shapes.items()})
    check = Check(node, arguments.seconds, arguments.json, about)
    run(check, shapes, arguments.quick, wanted)
    if node.rank == 0:
        failed = [part.name for part in check.parts if not part.passed]
        print(f"FAILED: {', '.join(failed)}" if failed else f"passed: all {len(check.parts)} parts", flush=True)
    faulthandler.dump_traceback_later(60, exit=True)  # collectives that failed may keep a group from ending
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return 0 if check.passed else 1


def run(check: Check, shapes: dict[str, Problem], quick: bool, wanted: set[str]) -> None:
    """All parts that are wanted, one after another."""
    node = check.node
    first = check.part("machine", 120, partial(where, node))
    can_heap, rate = first.facts.get("heaps") == "made", first.facts.get("bytes_per_s")
    if not can_heap and not node.collectives:
        return  # rows can travel in no way, and the first part has failed
    calls = (100 if quick else 1000) if node.on_gpu else (1 if quick else 4)
    if "parity" in wanted:
        check.part("parity", 300, lambda group: right.parity(node, group, shapes, can_heap, quick))
    if "stress" in wanted and can_heap:
        check.part("stress", 120, lambda group: right.stress(node, group, calls))
    if "graph" in wanted and can_heap:
        check.part("graph", 60, lambda group: right.graph(node, group))
    if "groups" in wanted and can_heap:
        check.part("groups", 120, lambda group: right.groups(node, group))
    if "failing" in wanted and can_heap:
        check.part("failing", 120, lambda group: right.failing(node, group))
    measured, how = {}, times.turns(node.on_gpu, quick)
    for name, problem in shapes.items() if "times" in wanted else ():
        part = check.part(
            f"times {name}", 240, lambda group, p=problem: times.times(node, group, p, can_heap, how, rate)
        )
        measured[name] = part.facts
    for name, problem in shapes.items() if "trace" in wanted and can_heap else ():
        check.part(f"trace {name}", 120, lambda group, p=problem: times.traces(node, group, p))
    if "predicted" in wanted:
        check.part("predicted", 120, lambda group: times.predicted(node, group, shapes, measured))


def parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    made = argparse.ArgumentParser(prog="mega_moe.ranks_check", description=__doc__)
    add = made.add_argument
    names = [name for name in PRESETS if name != "tiny"]
    add(
        "--shape",
        action="append",
        metavar="NAME",
        help=f"{' | '.join(names)} | T,H,I,E,K, T of each rank; may be "
        "repeated (default: both; without a GPU one that takes seconds)",
    )
    add("--part", action="append", choices=PARTS, help="only this, besides the machine; may be repeated (default: all)")
    add("--seconds", type=float, default=SECONDS, help=f"for all parts together (default: {SECONDS})")
    add("--json", type=Path, metavar="FILE", help="where rank 0 writes the report")
    add("--quick", action="store_true", help="fewer layers, calls and rounds")
    return made


def shapes_of(asked: list[str] | None, W: int) -> dict[str, Problem]:
    """The layers to be timed, by name. Raises ValueError for one that there is not, or that W ranks cannot share."""
    on_gpu = torch.cuda.is_available()
    default = ["qwen3-30b-a3b", "qwen3-235b-a22b"] if on_gpu else [f"6,32,32,{2 * W},2"]
    shapes = {}
    for name in asked or default:
        if name in PRESETS:
            problem = PRESETS[name]
        else:
            try:
                problem = Problem(*(int(size) for size in name.split(",")))
            except (TypeError, ValueError):
                raise ValueError(f"--shape {name}: give one of {', '.join(PRESETS)}, or five sizes T,H,I,E,K") from None
        if min(sizes(problem).values()) < 1 or problem.E % W:
            raise ValueError(f"--shape {name}: all sizes must be at least 1, and {W} ranks must divide E = {problem.E}")
        shapes[name] = problem.at(device="cuda" if on_gpu else "cpu")
    return shapes


def why_not(part: str, W: int, on_gpu: bool) -> str | None:
    """Why a part cannot run over W ranks; None if it can."""
    if part in RANKS_FOR and W < RANKS_FOR[part]:
        return f"it needs --nproc-per-node={RANKS_FOR[part]} or more, not {W}"
    if part == "graph" and not on_gpu:
        return "it captures a CUDA graph, and there is no GPU"
    return None


def wanted_of(asked: list[str] | None, W: int, on_gpu: bool) -> set[str]:
    """The parts to run: those asked for, or all that can. Raises ValueError for one that is asked for and cannot."""
    for part in asked or ():
        if reason := why_not(part, W, on_gpu):
            raise ValueError(f"--part {part}: {reason}")
    return set(asked or (part for part in PARTS if not why_not(part, W, on_gpu)))


def sizes(problem: Problem) -> dict[str, int]:
    """T, H, I, E and K."""
    return {letter: getattr(problem, letter) for letter in "THIEK"}


def device_of(local_rank: int, ranks_here: int) -> tuple[torch.device, bool]:
    """This rank's device, and whether rows can travel by collectives; without a GPU Triton's interpreter is chosen.

    Raises ValueError for more ranks than GPUs, unless the environment allows several on one.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        torch.set_num_threads(1)
        return torch.device("cpu"), True
    GPUs = torch.cuda.device_count()
    if ranks_here > GPUs and os.environ.get(SHARED_GPU) != "1":
        raise ValueError(
            f"{ranks_here} processes and {GPUs} GPUs here: give --nproc-per-node={GPUs}; or, to see whether it is "
            f"right and not how fast, set {SHARED_GPU}=1 in the environment: ranks then take turns on a GPU, and meet "
            'in heaps alone, for NCCL takes one rank a GPU. CUDA_VISIBLE_DEVICES="" checks on CPUs'
        )
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # each rank would start dozens of processes
    device = torch.device("cuda", local_rank % GPUs)
    torch.cuda.set_device(device)
    return device, ranks_here <= GPUs


if __name__ == "__main__":
    raise SystemExit(main())
