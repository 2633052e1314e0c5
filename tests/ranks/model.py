"""The protocol by which ranks exchange rows, as small programs that take steps in random order.

Each rank has a *heap*: memory that its peers read and write. A call, forward or backward, is two launches on every
rank, and each launch is a list of tiles that the rank's programs draw by ticket.

    plan launch   publish   write my inputs into one of my two buffers, and zero my counters
                  arrive    behind my publish tiles: note the new call number, and raise my flag in every rank's heap
                  plan      wait for all W flags in my heap; read what every peer has published about its routing
    mega launch   dispatch  pull rows from the peers' buffers
                  down      push finished rows into their owners' slots, then count them there
                  combine   wait until all my rows are counted; add up my slots

This is one barrier a call, and nobody waits in it longer than for the slowest rank's *arrival*. Why it is enough:

    counters  I zero mine before I arrive, and peers count after I arrived. Nobody counts for the last call any more: I
              have combined it, so all its rows were counted.
    buffers   a peer may read what I published for the last call until it arrives in this one: this call has the other
              buffer. The next has the same again, and I publish for it when I have seen the peer's flag of this one.
    slots     a peer pushes behind the barrier, which I enter when my last combine is done. So they need no second copy.
    flags     only grow: one that is set and taken down may be taken down after the peer has set it for the next call.

A rank may be far behind its peers, or in front of them, though by no more than one call. So the model takes steps of
all programs of all ranks in random order, some programs being much slower than others. It writes into each place not
rows but which call they are of, and whoever reads checks that. What it looks for is a place that holds something else
(`Stale`), and programs that all wait (`Deadlock`).
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

FORWARD = dict(publish=("routing", "x"), plan=("routing",), dispatch=("x",))
BACKWARD = dict(publish=("x", "dy"), plan=(), dispatch=("x", "dy"))  # the plan of rows was saved

WRAP = 4
"""Flags and call numbers are counted modulo this. On a device it is 2**32, which no test reaches."""

Step = Callable[[], bool] | None
"""What a program yields between two steps: None, or what has to hold before it goes on."""

AT_THE_END: Step = lambda: False
"""What a program's last step is told from."""

Tile = Callable[[], Iterator[Step]]


class Stale(AssertionError):
    """Somebody read what is not of this call."""


class Deadlock(AssertionError):
    """Every program waits."""


@dataclass(frozen=True)
class Protocol:
    """What the ranks agree on. Each default is needed: the tests break them one by one.

    Attributes:
        buffers: for inputs.
        parity_of_publish: which buffer inputs are published in, by call number, where it is not the one they are read
            from.
        zero_counters: "publish", or "plan": behind the barrier.
        flags: "grow"; "stay" up, as they were set in the first call; or are "taken down" behind the barrier.
        wrapped: whether flags and call numbers are compared as numbers that wrap around.
        arrive_waits: whether the arrive tile waits for the publish tiles.
        plan_knows_call: whether plan tiles wait for the arrive tile of their own rank, which writes the call number.
    """

    buffers: int = 2
    parity_of_publish: int = 0
    zero_counters: str = "publish"
    flags: str = "grow"
    wrapped: bool = True
    arrive_waits: bool = True
    plan_knows_call: bool = True


@dataclass
class Heap:
    """What peers touch on one rank, and, below, what only the rank's own programs touch."""

    inputs: list[dict[str, tuple]]  # by buffer: what was published, as (call, rank)
    slots: dict[tuple, tuple]  # by (rank that pushes, number of the row): (call, rank)
    flags: list[int]  # of each rank: in how many calls it has arrived
    arrivals: int = 0  # rows that are in the slots
    call: int = 0

    published: int = 0  # publish tiles that are done
    arrived: int = 0  # arrive tiles that are done
    tickets: dict[str, int] = field(default_factory=lambda: {"plan": 0, "mega": 0})
    left: list[int] = field(default_factory=list)  # of each launch: programs that ended


class Ranks:
    """W ranks that make the same calls. rows[r][p]: how many rows of rank r's tokens rank p has the experts for."""

    def __init__(self, rows: list[list[int]], programs: int, protocol: Protocol):
        self.rows, self.programs, self.protocol, self.W = rows, programs, protocol, len(rows)
        self.heaps = [
            Heap([{} for _ in range(protocol.buffers)], {}, [0] * self.W) for _ in range(self.W)
        ]  # a host barrier comes behind this: nobody touches a heap that is not there

    # The tiles of a call. Between any two yields a program is alone.

    def plan_launch(self, me: int, direction: dict) -> list[Tile]:
        """Publish, arrive, plan, in this order: so every wait is for an earlier ticket."""
        heap, protocol = self.heaps[me], self.protocol

        def publish(what: str) -> Iterator[Step]:
            number = heap.call + 1
            self.buffer(me, number + protocol.parity_of_publish)[what] = (number % WRAP, me)
            yield
            heap.published += 1

        def zero() -> Iterator[Step]:
            if protocol.zero_counters == "publish":
                heap.arrivals = 0
            heap.tickets["mega"] = 0
            yield
            heap.published += 1

        def arrive() -> Iterator[Step]:
            if protocol.arrive_waits:
                yield lambda: heap.published == len(direction["publish"]) + 1
            heap.call = (heap.call + 1) % WRAP
            yield
            heap.arrived += 1
            for peer in self.heaps:  # in each heap one word belongs to me
                yield
                peer.flags[me] = 1 if protocol.flags != "grow" else (peer.flags[me] + 1) % WRAP

        def plan(peer: int) -> Iterator[Step]:
            if protocol.plan_knows_call:
                yield lambda: heap.arrived == 1
            number = heap.call
            yield lambda: all(self.reached(flag, number) for flag in heap.flags)
            if protocol.zero_counters == "plan" and peer == 0:
                heap.arrivals = 0
            for what in direction["plan"]:
                yield
                self.check(self.buffer(peer, number).get(what), number, peer, f"{what} of rank {peer}")

        publishes = [lambda what=what: publish(what) for what in direction["publish"]]
        return [*publishes, zero, arrive, *(lambda peer=peer: plan(peer) for peer in range(self.W))]

    def mega_launch(self, me: int, direction: dict) -> list[Tile]:
        """Dispatch and down of each peer's rows, then combine."""
        heap = self.heaps[me]
        pulled = [0] * self.W  # in my own memory: how many of each peer's rows I have

        def first() -> Iterator[Step]:
            heap.tickets["plan"] = heap.published = heap.arrived = 0
            yield
            if self.protocol.flags == "taken down":
                heap.flags[:] = [0] * self.W

        def dispatch(peer: int) -> Iterator[Step]:
            for _ in range(self.rows[peer][me]):
                for what in direction["dispatch"]:
                    yield
                    self.check(self.buffer(peer, heap.call).get(what), heap.call, peer, f"{what} of rank {peer}")
                pulled[peer] += 1

        def down(peer: int) -> Iterator[Step]:
            yield lambda: pulled[peer] == self.rows[peer][me]
            owner = self.heaps[peer]
            for row in range(self.rows[peer][me]):
                yield
                owner.slots[me, row] = (heap.call, me)
            yield
            owner.arrivals += self.rows[peer][me]

        def combine() -> Iterator[Step]:
            yield lambda: heap.arrivals == sum(self.rows[me])
            for peer in range(self.W):
                for row in range(self.rows[me][peer]):
                    yield
                    self.check(heap.slots.get((peer, row)), heap.call, peer, f"a row from rank {peer}")

        peers = range(self.W)
        dispatches = [lambda peer=peer: dispatch(peer) for peer in peers]
        return [first, *dispatches, *(lambda peer=peer: down(peer) for peer in peers), combine]

    # What the tiles are made of.

    def buffer(self, rank: int, number: int) -> dict[str, tuple]:
        """Where a rank publishes its inputs of the call with this number."""
        return self.heaps[rank].inputs[number % self.protocol.buffers]

    def reached(self, flag: int, number: int) -> bool:
        """Whether the flag's rank has arrived in the call with this number."""
        if self.protocol.flags != "grow":
            return flag == 1
        return (flag - number) % WRAP < WRAP // 2 if self.protocol.wrapped else flag >= number

    def check(self, found: tuple | None, number: int, rank: int, what: str) -> None:
        if found != (number, rank):
            raise Stale(f"{what}: expected that of call {number}, found {found}")

    # Programs.

    def program(self, me: int, calls: list[dict]) -> Iterator[Step]:
        """One of the programs of a rank, through all of its launches."""
        heap = self.heaps[me]
        for number, direction in enumerate(calls):
            for kind, tiles in ("plan", self.plan_launch), ("mega", self.mega_launch):
                launch = 2 * number + (kind == "mega")
                yield lambda launch=launch: launch == 0 or heap.left[launch - 1] == self.programs  # one stream
                if launch == len(heap.left):  # the first to start
                    heap.left.append(0)
                    self.launched[me] = tiles(me, direction)
                of_launch = self.launched[me]
                while True:
                    ticket = heap.tickets[kind]
                    heap.tickets[kind] += 1
                    yield
                    if ticket >= len(of_launch):
                        break
                    yield from of_launch[ticket]()
                heap.left[launch] += 1

    def run(self, calls: list[dict], rng: random.Random) -> None:
        """All calls, step by step. Raises Stale or Deadlock."""
        self.launched: list[list[Tile]] = [[] for _ in range(self.W)]
        programs = {(me, i): self.program(me, calls) for me in range(self.W) for i in range(self.programs)}
        speed = {name: rng.choice((1, 10, 100)) for name in programs}
        waits: dict[tuple, Step] = dict.fromkeys(programs)
        while programs:
            chances = [name for name in programs for _ in range(speed[name])]
            at_the_end = False
            while not at_the_end:
                name = rng.choice(chances)
                if waits[name] and not waits[name]():
                    ready = [name for name, wait in waits.items() if not wait or wait()]
                    if not ready:
                        raise Deadlock(f"{len(waits)} programs wait, in calls {[heap.call for heap in self.heaps]}")
                    (name,) = rng.choices(ready, [speed[other] for other in ready])
                waits[name] = next(programs[name], AT_THE_END)
                at_the_end = waits[name] is AT_THE_END
            del programs[name], waits[name]


def run(seed: int, protocol: Protocol) -> None:
    """One random run: of how many ranks, with how many programs and rows, and in which order."""
    rng = random.Random(seed)
    W, programs = rng.choice((2, 3, 4)), rng.choice((1, 1, 2))
    rows = [[rng.choice((0, 0, 1, 2)) for _ in range(W)] for _ in range(W)]
    calls = [FORWARD, *rng.choices((FORWARD, BACKWARD), k=WRAP + 1)]
    Ranks(rows, programs, protocol).run(calls, rng)
