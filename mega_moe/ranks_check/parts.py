"""One part after another, on all ranks: each ends, whatever happens, and all ranks hear how it ended.

A part that raises on any rank has failed, and the next begins. A part that takes longer than it may ends the program:
whoever hangs in a collective or in a kernel cannot be reached otherwise. So the report is written before each part
begins, with that part as one that did not end, and again after it.
"""

import faulthandler
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..processes import ProcessHeaps, ShmHeaps, SymmetricHeaps

HEAPS_WAIT_S = 60  # for a peer, in a call: longer than ranks that compile the same kernels are apart

Work = Callable[[ProcessGroup], tuple[str, dict]]
"""What a part does, with a process group of its own: a line for people, and facts for JSON."""


class Wrong(Exception):
    """A result is not what it has to be. line, facts: what there is to say of the part all the same."""

    def __init__(self, message: str, line: str = "", facts: dict | None = None):
        super().__init__(message)
        self.line, self.facts = line, facts or {}


class Left(Exception):
    """A rank does not come to where the others wait for it, since its part has ended; the message is why."""


@dataclass(frozen=True)
class Node:
    """What every part knows of where it runs.

    Attributes:
        rank, W: of this process, and of how many.
        device: where its tensors are.
        hosts: a gloo group of all, for what is said on the host.
        collectives: whether rows can travel by collectives: not where several ranks share a GPU, which NCCL refuses.
    """

    rank: int
    W: int
    device: torch.device
    hosts: ProcessGroup
    collectives: bool = True

    @property
    def on_gpu(self) -> bool:
        """Whether kernels are compiled, and not interpreted."""
        return self.device.type == "cuda"

    def gather(self, value: object) -> list:
        """The values of all ranks, which wait here for each other. Raises Left where one has ended the part."""
        heard = self.exchange((False, value))
        if ended := [word for ending, word in heard if ending]:
            failure, _ = ended[0]
            raise Left(failure or "a rank has ended this part before the others")
        return [value for _, value in heard]

    def end(self, failure: str | None, value: object) -> list[tuple[str | None, object]]:
        """The same at the end of a part, where all come, however theirs ended: who waited elsewhere is sent here."""
        while True:
            heard = self.exchange((True, (failure, value)))
            if all(ending for ending, _ in heard):
                return [value for _, value in heard]

    def exchange(self, word: tuple) -> list[tuple]:
        """The words of all ranks. There is no other collective in `hosts`, so no two can be confused."""
        words = [None] * self.W
        dist.all_gather_object(words, word, group=self.hosts)
        return words

    def meet(self) -> None:
        """All ranks have come here, and their devices are done."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self.gather(None)

    @contextmanager
    def heaps(
        self, group: ProcessGroup, max_tokens: int, max_rows: int | None = None, timeout_s: float = HEAPS_WAIT_S
    ) -> Iterator[ProcessHeaps]:
        """Heaps of a group, closed at the end. timeout_s: how long a rank waits for another in a call."""
        self.meet()  # heaps are made collectively, and who comes early waits for a time only
        kind = SymmetricHeaps if self.on_gpu else ShmHeaps
        made = kind(group, max_tokens, max_rows, timeout_s=timeout_s)
        try:
            yield made
        finally:
            made.close()


@dataclass
class Part:
    """How a part ended. seconds: it took. failure: None where it passed. line, facts: of rank 0."""

    name: str
    passed: bool = False
    seconds: float = 0.0
    failure: str | None = "did not end in time, or a process died in it"
    line: str = ""
    facts: dict = field(default_factory=dict)


class Check:
    """A run of the whole program: its parts, and the report of them.

    seconds: for all parts together. report: where rank 0 writes it, None for nowhere. about: what stands at its top.
    """

    def __init__(self, node: Node, seconds: float, report: Path | None, about: dict):
        self.node, self.report, self.about = node, report, about
        self.ends, self.parts, self.dead = time.monotonic() + seconds, [], None

    def part(self, name: str, most_seconds: float, work: Work) -> Part:
        """Run a part on all ranks: how it ended, the same on all of them."""
        part = Part(name)
        self.parts.append(part)
        left = min(most_seconds, self.ends - time.monotonic())
        if reason := self.node.gather(self.dead or ("no time was left for it" if left <= 0 else None))[0]:
            return self.skip(part, f"not run: {reason}")
        self.write()
        if self.node.rank == 0:
            print(f"{name:24}", end="", flush=True)
        begun, failure = time.monotonic(), None
        faulthandler.dump_traceback_later(max(left, 1), exit=True)
        try:
            group = dist.new_group()  # of its own: whoever fails in a part leaves nothing half said to the next
            part.line, part.facts = work(group)
            self.node.meet()
        except Left as why:
            failure = str(why)
        except Exception as error:
            if isinstance(error, Wrong):
                part.line, part.facts = error.line, error.facts
            failure = f"rank {self.node.rank}: {type(error).__name__}: {error}"
            print(f"{name}, rank {self.node.rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        gc.collect()  # what was raised held frames, and these held tensors
        broken = broken_gpu()
        if self.node.on_gpu and not broken:
            torch.cuda.empty_cache()  # heaps take memory of their own
        heard = self.node.end(failure, broken)
        faulthandler.cancel_dump_traceback_later()
        failures = list(dict.fromkeys(failure for failure, _ in heard if failure))
        if dead := [rank for rank, (_, broken) in enumerate(heard) if broken]:
            self.dead = f"the GPU of rank {dead[0]} has failed in part {name}"
        if not failures:
            dist.destroy_process_group(group)
        part.seconds = time.monotonic() - begun
        part.passed, part.failure = not failures, "; ".join(failures) or None
        if failures and not failure:
            part.line = ""  # which says how well it went here
        self.say(part)
        return part

    def skip(self, part: Part, reason: str) -> Part:
        """A part that does not run, and so has not passed."""
        part.failure = reason
        if self.node.rank == 0:
            print(f"{part.name:24}", end="")
        self.say(part)
        return part

    def say(self, part: Part) -> None:
        """Print how it ended, and write the report."""
        if self.node.rank == 0:
            said = " ".join(text for text in (part.failure, part.line) if text)
            print(f"{'passed' if part.passed else 'FAILED'}  {part.seconds:6.1f} s  {said}", flush=True)
        self.write()

    @property
    def passed(self) -> bool:
        """Whether all parts have, and there were any."""
        return bool(self.parts) and all(part.passed for part in self.parts)

    def write(self) -> None:
        """The report, by rank 0: what stands at its top, whether all passed, and each part."""
        if self.node.rank == 0 and self.report:
            whole = self.about | {"passed": self.passed, "parts": [vars(part) for part in self.parts]}
            self.report.parent.mkdir(parents=True, exist_ok=True)
            self.report.write_text(json.dumps(whole, indent=2) + "\n")


def broken_gpu() -> bool:
    """Whether this process's GPU answers with an error, which it then does until the process ends."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
